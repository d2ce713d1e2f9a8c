"""Tokens without a file: random ones, of which any part can be made by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from functron.data.permutation import mix
from functron.data.token_file import check_range, fitting_dtype
from functron.errors import Problem, raise_problems


class MockTokens:
    """Random tokens in documents of equal length, as a `functron.data.token_file.TokenFile`.

    Token i is a hash of (seed, i) modulo the vocabulary: nothing is kept, so there can be 10^15 of
    them, to measure loaders and steps with, or to try out a mesh before the data is there.

    Args:
        num_tokens: how many.
        vocab_size: ids are below it.
        document: tokens of each document; the last may have fewer.
        seed: selects the tokens.

    Attributes:
        path, dtype, num_tokens, num_documents: as of any `TokenFile`.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_tokens: int, vocab_size: int, *, document: int = 1024, seed: int = 0):
        sizes = (("num_tokens", num_tokens), ("vocab_size", vocab_size), ("document", document))
        raise_problems("cannot make mock data", [
            Problem(name, str(size), "at least 1") for name, size in sizes if size < 1
        ])  # fmt: skip
        self.path, self.dtype = Path("mock"), fitting_dtype(vocab_size)
        self.num_tokens, self.num_documents = num_tokens, -(-num_tokens // document)
        self._vocab_size, self._document, self._seed = vocab_size, document, seed

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``.

        Raises:
            IndexError: there are not as many.
        """
        check_range(self.path, start, length, self.num_tokens)
        places = np.arange(start, start + length, dtype=np.int64).astype(np.uint64)
        return (mix(places, self._seed, 0) % np.uint64(self._vocab_size)).astype(self.dtype)

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin: int64; the one after the last begins at the end."""
        return np.minimum(np.asarray(documents, np.int64) * self._document, self.num_tokens)

    def document_of(self, offset: int) -> int:
        """The document that token `offset` is in."""
        return int(self.documents_of(np.array(offset)))

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        """The documents that tokens are in: int64, the shape of `offsets`."""
        return np.asarray(offsets, np.int64) // self._document
