"""Tokens on disk: the protocol of all kinds of files of them, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from functron.core.errors import Problem, raise_problems, refuse


class TokenFile(Protocol):
    """Documents of tokens, one after another in a row, mapped into memory.

    Attributes:
        path: as the user wrote it.
        dtype: of the tokens.
        num_tokens: in all documents together.
        num_documents: how many there are.
    """

    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_documents(self) -> int: ...

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``, across documents; a view where it can be one.

        Raises:
            IndexError: there are not as many.
        """
        ...

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in the row of all tokens: int64, the shape of `documents`.

        `num_documents` is a document too: it begins where the last one ends.
        """
        ...

    def document_of(self, offset: int) -> int:
        """The document that token `offset` of the row is in."""
        ...

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        """The documents that tokens are in: int64, the shape of `offsets`."""
        ...


def check_range(path: Path, start: int, length: int, num_tokens: int) -> None:
    """Raise IndexError unless there are `length` tokens from `start` on."""
    if not 0 <= start <= start + length <= num_tokens:
        raise IndexError(
            f"{path}: got tokens {start} to {start + length}; wanted a part of 0 to {num_tokens}"
        )


def checked_offsets(path: Path, offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    """`offsets` as int64; raise IndexError unless there is a token at each."""
    wanted = np.asarray(offsets, np.int64)
    if wanted.size:
        check_range(path, int(wanted.min()), 1, num_tokens)
        check_range(path, int(wanted.max()), 1, num_tokens)
    return wanted


def refuse_order(path: Path, start: int, stop: int) -> NoReturn:
    """Raise ValueError for documents that do not follow one another between two tokens."""
    got = f"documents that do not begin one after another, between tokens {start} and {stop}"
    fix = "copy it or make it again; functron.data.verify says what is wrong with an index"
    refuse(
        "a damaged index of documents",
        f"data {path}",
        got,
        "documents in the order of their tokens",
        fix,
    )


def check_ids(path: Path, tokens: np.ndarray, start: int, vocab_size: int | None) -> None:
    """Check that `tokens`, those from `start` on of the row of all, are ids below `vocab_size`.

    Raises:
        ValueError: one of them is not; None: any are.
    """
    if vocab_size is None or not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size:
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    got = f"id {int(tokens[at])} at token {start + at}"
    fix = f"choose a model with gpt.vocab_size > {int(tokens.max())}, or preprocess again"
    wanted = f"ids from 0 to {vocab_size - 1}"
    refuse("tokens outside the vocabulary", f"data {path}", got, wanted, fix)


def last_not_after(
    begins: Callable[[np.ndarray], np.ndarray], count: int, offsets: np.ndarray
) -> np.ndarray:
    """The last i in ``range(count)`` with ``begins(i) <= offset``, for each of `offsets`.

    Bisection, all offsets at once, that looks at no more than ``log2(count)`` values for each:
    `numpy.searchsorted` would copy a table that is not aligned, such as those of an index file.

    Args:
        begins: nondecreasing, of an int64 array; ``begins(0)`` is no more than any offset.
        count: at least 1.
        offsets: integers.
    """
    low = np.zeros(np.shape(offsets), np.int64)
    high = np.full(np.shape(offsets), count, np.int64)
    for _ in range(int(count).bit_length()):
        middle = (low + high) // 2
        here = begins(middle) <= offsets
        low, high = np.where(here, middle, low), np.where(here, high, np.maximum(middle, low + 1))
    return low


def fitting_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron-LM stores ids below `vocab_size`: uint16 below 65,500, or int32.

    Source: ``DType.optimal_dtype`` in ``megatron/core/datasets/indexed_dataset.py``.
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def dtype_problem(where: str, dtype: np.dtype, vocab_size: int) -> Problem | None:
    """The problem of `dtype` for ids below `vocab_size`; None where it holds them all."""
    wanted = f"a dtype that holds ids up to {vocab_size - 1}"
    fix = f"write the tokens as {fitting_dtype(vocab_size).name}"
    if dtype.kind not in "iu":
        return Problem(where, f"{dtype.name}, which is for no token ids", wanted, fix)
    largest = int(np.iinfo(dtype).max)
    if largest >= vocab_size - 1:
        return None
    return Problem(where, f"{dtype.name}, whose largest id is {largest}", wanted, fix)


def check_dtype(where: str, dtype: np.dtype, vocab_size: int | None) -> None:
    """Check that `dtype` holds ids below `vocab_size` (None: any).

    Raises:
        ValueError: it is too small, or not of integers.
    """
    problem = None if vocab_size is None else dtype_problem(where, dtype, vocab_size)
    raise_problems("dtype too small for the vocabulary", [problem] if problem else [])
