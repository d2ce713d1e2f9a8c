"""Samples that are made of other samples, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from functron.data.order import drawn

Change = Callable[[dict[str, torch.Tensor], np.ndarray], dict[str, torch.Tensor]]
"""``(drawn, numbers)`` to what is drawn instead: a pure function, of each sample by itself."""


class Drawn(Protocol):
    """What is changed: all `functron.data.windows.Windows`.

    Attributes:
        vocab_size: a model of these samples needs at least as many token ids.
        num_samples: samples in an epoch.
    """

    vocab_size: int

    @property
    def num_samples(self) -> int: ...

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that a run sees as numbers `numbers`, all but ``rows``."""
        ...

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        ...


class Changed:
    """`functron.data.Samples` made of others by a function of what is drawn and its numbers.

    As numbers count from the beginning of a run, a sample may be another one in every epoch; it is
    the same on every mesh, in batches of any size, and after resuming.

    Args:
        source: what is changed.
        change: makes other samples of those that were drawn.
        vocab_size: a model of the others needs at least as many token ids.

    Attributes:
        vocab_size: as given.
    """

    def __init__(self, source: Drawn, change: Change, vocab_size: int):
        self._source, self._change, self.vocab_size = source, change, vocab_size

    @property
    def num_samples(self) -> int:
        """Samples in an epoch: those of the source."""
        return self._source.num_samples

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """This part's rows of the batch of `step`, as `Windows.batch` has them.

        Raises:
            ValueError: what `functron.data.order.drawn` raises.
        """
        return drawn(self, step * global_batch, global_batch, part)

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that come as `numbers`, all but ``rows``."""
        return self._change(self._source.draw(numbers), numbers)

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        return self._source.summary()
