"""Byte-level text: batches of tokens as a pure function of the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from functron.data.documents import Documents, find, python_text
from functron.data.windows import Windows
from functron.errors import Problem, raise_problems


class ByteText(Windows):
    """Text as byte tokens, cut into windows of `seq` tokens and shuffled anew in every epoch.

    Args:
        path: a file or a folder of text files (see `functron.data.documents.find`); None is the
            text that every Python installation carries.
        seq: tokens per sample.
        seed: selects the order of the samples.

    Attributes:
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
        self.num_documents = self._documents.count
        what = f"data {path}" if path is not None else "data"
        super().__init__(len(self._documents), seq, seed, what=what, unit="bytes")

    def read(self, start: int, length: int) -> np.ndarray:
        """The bytes from `start` on, as uint8 ``[length]``."""
        return self._documents.read(start, length)

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        skipped = f", {self.num_skipped} files skipped (not text)" if self.num_skipped else ""
        return f"{self.num_tokens:,} bytes in {self.num_documents} documents{skipped}"


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
