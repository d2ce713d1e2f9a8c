"""A long row of tokens, cut into samples: what text as bytes and text as tokens have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from functron.data.order import IGNORED, drawn, shuffled
from functron.errors import Problem, raise_problems


class Windows(ABC):
    """Tokens in a row, cut into windows of `seq` tokens that every epoch shuffles anew.

    There is no iterator state: what a batch holds follows from its step. Windows do not overlap
    but for the one token that is the last target of one and the first token of the next.

    Args:
        num_tokens: how many there are.
        seq: tokens per sample.
        seed: selects the order of the samples.
        what: what the user calls the text.
        unit: what the user calls a token of it.
        extra_token: read one token more than `seq`, the last target. False: samples are `seq`
            tokens that no other has, and the last predicts nothing (Megatron-LM's
            ``add_extra_token_to_sequence=False``).

    Attributes:
        seq: tokens per sample.
        extra_token: as given.
        num_windows: samples in an epoch.
        num_tokens: tokens in the whole text.

    Raises:
        ValueError: the text is shorter than one sample and its last target.
    """

    def __init__(
        self,
        num_tokens: int,
        seq: int,
        seed: int,
        *,
        what: str,
        unit: str,
        extra_token: bool = True,
    ):
        self.seq, self.seed, self.num_tokens = seq, seed, num_tokens
        self.extra_token = extra_token
        self.num_windows = (num_tokens - extra_token) // seq if seq >= 1 else 0
        problems = []
        if seq < 1:
            problems.append(Problem("seq", str(seq), "at least 1"))
        elif self.num_windows < 1:
            got = f"{num_tokens} {unit}"
            fix = f"use at most seq={num_tokens - extra_token}, or more text"
            wanted = f"at least seq + 1 = {seq + 1}" if extra_token else f"at least seq = {seq}"
            problems.append(Problem(what, got, wanted, fix if num_tokens > 1 else "more text"))
        raise_problems("cannot cut the text into samples", problems)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch: windows."""
        return self.num_windows

    @abstractmethod
    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, unsigned integers ``[length]``."""

    def sample(self, index: int) -> np.ndarray:
        """The tokens of window `index`, ``[seq + 1]``: `seq` of them and the last one's target.

        Without an extra token that target is -100, which no loss counts.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < self.num_windows:
            raise IndexError(f"sample {index}: wanted 0 to {self.num_windows - 1}")
        if self.extra_token:
            return self.read(index * self.seq, self.seq + 1)
        return np.append(self.read(index * self.seq, self.seq).astype(np.int64), IGNORED)

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """This part's rows of the batch of `step`: the same samples however many parts there are.

        Row r of step s is sample number ``s * global_batch + r``; an epoch is `num_windows` of
        them, in an order of its own. The parts' batches, concatenated in order, are the batch of
        part ``(0, 1)``.

        Args:
            step: from 0.
            global_batch: rows of all parts together.
            part: ``(index, count)``: which of how many contiguous parts.

        Returns:
            ``tokens`` and ``targets`` int64 ``[rows, seq]`` and ``rows`` int64 ``[rows]``, the
            rows' indices in the global batch.

        Raises:
            ValueError: `count` does not divide `global_batch`, or no such part.
        """
        return drawn(self, step * global_batch, global_batch, part)

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that come as `numbers`, counted from the beginning of a run.

        Args:
            numbers: int64 ``[rows]``, from 0; number n is in epoch ``n // num_windows``.

        Returns:
            ``tokens`` and ``targets`` int64 ``[rows, seq]``.
        """
        tokens = np.empty((len(numbers), self.seq), np.int64)
        targets = np.empty_like(tokens)
        order = shuffled(np.asarray(numbers, np.int64), self.num_windows, self.seed)
        for row, index in enumerate(order.tolist()):
            sample = self.sample(index)
            tokens[row], targets[row] = sample[:-1], sample[1:]
        return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
