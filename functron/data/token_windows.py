"""Tokens on disk as samples: batches as a pure function of the step, read as they are needed."""

from __future__ import annotations

import numpy as np

from functron.data.token_file import TokenFile
from functron.data.windows import Windows
from functron.errors import Problem, raise_problems


class TokenWindows(Windows):
    """A file of tokens, cut into windows of `seq` tokens and shuffled anew in every epoch.

    Nothing is read but the windows of each batch, whatever the size of the file, and no index of
    samples is made: the order is arithmetic (`functron.data.permute`). Documents follow one another
    as they lie in the file.

    Args:
        file: of `functron.data.open_tokens`.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: any.

    Attributes:
        num_tokens: tokens in the whole file.
        num_documents: documents that it is made of.
        vocab_size: of the model, or 0: what ids there are is not known without reading all.

    Raises:
        ValueError: there are fewer tokens than one sample and its last target.
    """

    def __init__(self, file: TokenFile, seq: int, *, seed: int = 0, vocab_size: int | None = None):
        self._file, self._most = file, vocab_size
        self.vocab_size = vocab_size or 0
        self.num_documents = file.num_documents
        what = f"data {file.path}"
        super().__init__(file.num_tokens, seq, seed, what=what, unit="tokens")

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``.

        Raises:
            ValueError: one of them is no id of the model.
        """
        tokens = self._file.read(start, length)
        if self._most is not None and length and not 0 <= tokens.min() <= tokens.max() < self._most:
            at = int(np.flatnonzero((tokens < 0) | (tokens >= self._most))[0])
            got = f"id {int(tokens[at])} at token {start + at}"
            fix = f"choose a model with gpt.vocab_size > {int(tokens.max())}, or preprocess again"
            wanted = f"ids from 0 to {self._most - 1}"
            problem = Problem(f"data {self._file.path}", got, wanted, fix)
            raise_problems("tokens outside the vocabulary", [problem])
        return tokens

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        return f"{self.num_tokens:,} tokens in {self.num_documents:,} documents, on disk"
