"""Byte-level text: batches of tokens as a pure function of the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from functron.data.documents import Documents, find, python_text
from functron.data.permutation import permute
from functron.errors import Problem, raise_problems


class ByteText:
    """Text as byte tokens, cut into windows of `seq` tokens and shuffled anew in every epoch.

    There is no iterator state: what a batch holds follows from its step. Windows do not overlap
    but for the one token that is the last target of one and the first token of the next.

    Args:
        path: a file or a folder of text files (see `functron.data.documents.find`); None is the
            text that every Python installation carries.
        seq: tokens per sample.
        seed: selects the order of the samples.

    Attributes:
        seq: tokens per sample.
        num_windows: samples in an epoch.
        num_tokens: bytes in the whole text.
        num_documents: files it is made of.
        num_skipped: files of the folder that were left out.
        vocab_size: 256; a model of this text needs at least as many token ids.

    Raises:
        ValueError: nothing is there, it cannot be read, it is empty, or it is shorter than one
            sample and its last target.
    """

    vocab_size = 256

    def __init__(self, path: str | Path | None, seq: int, *, seed: int = 0):
        files, self.num_skipped = (python_text(), 0) if path is None else find(path)
        self._documents = Documents(files)
        self.seq, self.seed = seq, seed
        self.num_tokens, self.num_documents = len(self._documents), self._documents.count
        self.num_windows = (self.num_tokens - 1) // seq if seq >= 1 else 0
        what = f"data {path}" if path is not None else "data"
        problems = []
        if seq < 1:
            problems.append(Problem("seq", str(seq), "at least 1"))
        elif self.num_windows < 1:
            got = f"{self.num_tokens} bytes"
            fix = f"use at most seq={self.num_tokens - 1}, or more text"
            wanted = f"at least seq + 1 = {seq + 1}"
            problems.append(Problem(what, got, wanted, fix if self.num_tokens > 1 else "more text"))
        raise_problems("cannot cut the text into samples", problems)

    def sample(self, index: int) -> np.ndarray:
        """The bytes of window `index`, uint8 ``[seq + 1]``: `seq` tokens and the last one's target.

        Raises:
            IndexError: there is no such window.
        """
        if not 0 <= index < self.num_windows:
            raise IndexError(f"sample {index}: wanted 0 to {self.num_windows - 1}")
        return self._documents.read(index * self.seq, self.seq + 1)

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
        index, count = part
        problems = []
        if count < 1 or not 0 <= index < count or step < 0:
            got = f"part ({index}, {count}) of step {step}"
            problems.append(Problem("part", got, "0 <= index < count, and a step from 0"))
        elif global_batch < 1 or global_batch % count:
            fix = f"use a global batch of {max(-(-global_batch // count), 1) * count}"
            problems.append(
                Problem("global_batch", str(global_batch), f"a positive multiple of {count}", fix)
            )
        raise_problems("cannot cut the batch into parts", problems)
        size = global_batch // count
        rows = np.arange(index * size, (index + 1) * size, dtype=np.int64)
        samples = np.stack([self.sample(int(i)) for i in self._order(step * global_batch + rows)])
        tokens = torch.from_numpy(samples.astype(np.int64))
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "targets": tokens[:, 1:].contiguous(),
            "rows": torch.from_numpy(rows),
        }

    def _order(self, numbers: np.ndarray) -> np.ndarray:
        epochs, within = np.divmod(numbers, self.num_windows)
        windows = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            # an odd multiplier makes the keys of two (seed, epoch) pairs differ below 2^32 epochs
            key = self.seed * 0x1_0000_0001 + int(epoch)
            windows[chosen] = permute(within[chosen], self.num_windows, key)
        return windows


def check_tokens(batch: dict[str, torch.Tensor], vocab_size: int, ignore_index: int = -100) -> None:
    """Check that a batch's tokens and targets are ids of the vocabulary.

    Args:
        batch: ``tokens`` and ``targets``, integers.
        vocab_size: ids are 0 to ``vocab_size - 1``.
        ignore_index: a target that stands for none.

    Raises:
        ValueError: ids outside the vocabulary; both leaves are reported, with their range.
    """
    problems = []
    for name in ("tokens", "targets"):
        ids = batch[name]
        outside = (ids < 0) | (ids >= vocab_size)
        if name == "targets":
            outside &= ids != ignore_index
        if bool(outside.any()):
            bad = ids[outside]
            got = f"{bad.numel()} ids outside, from {int(bad.min())} to {int(bad.max())}"
            fix = f"use a model with vocab_size > {int(bad.max())}, or another tokenizer"
            problems.append(Problem(f"batch/{name}", got, f"0 to {vocab_size - 1}", fix))
    raise_problems("tokens outside the vocabulary", problems)
