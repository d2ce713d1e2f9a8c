"""Training, validation and test parts of a file of tokens: contiguous runs of its documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from functron.data.token_file import TokenFile, check_range, checked_offsets
from functron.data.weights import proportions
from functron.errors import Problem, raise_problems

PARTS = ("train", "validation", "test")


def split_documents(num_documents: int, weights: str | Sequence[float | str]) -> dict[str, range]:
    """Which documents each part has: ``round(N * cumulative weight)`` bounds the parts.

    Every document is in exactly one part, and documents of a part lie side by side. Rounding goes
    to the nearest, halves to the even one, as Megatron-LM's does; but the weights are exact, so
    that no document depends on how floats add up.

    Args:
        num_documents: N.
        weights: of `PARTS`, one to three of them, as numbers or as ``"969,30,1"``: shares of their
            sum if they are whole, or else fractions that sum to 1. Those left out are 0.

    Returns:
        The documents of each of `PARTS` whose weight is not 0.

    Raises:
        ValueError: what `functron.data.weights.proportions` raises, more than three weights, or too
            few documents for each part of nonzero weight to have one.
    """
    written = weights.split(",") if isinstance(weights, str) else list(weights)
    if len(written) > len(PARTS):
        got, wanted = f"{len(written)} weights", f"at most {len(PARTS)}: {', '.join(PARTS)}"
        raise_problems("cannot split", [Problem("split", got, wanted, "leave the others out")])
    stripped = [x.strip() if isinstance(x, str) else x for x in written]
    shares = proportions(stripped, "split", zero=True)
    shares += (Fraction(0),) * (len(PARTS) - len(shares))
    bounds = [round(num_documents * x) for x in itertools.accumulate(shares, initial=Fraction(0))]
    found, problems = {}, []
    for name, share, (begin, end) in zip(PARTS, shares, itertools.pairwise(bounds), strict=True):
        if not share:
            continue
        found[name] = range(begin, end)
        if begin == end:
            got = f"{float(share):.3g} of {num_documents} documents, which is none of them"
            fix = f"raise its weight to {1 / max(num_documents, 1):.2g} of all, or set it to 0"
            problems.append(Problem(f"split, {name}", got, "at least 1 document", fix))
    raise_problems("cannot split", problems)
    return found


def split(file: TokenFile, weights: str | Sequence[float | str]) -> dict[str, DocumentRange]:
    """The parts of a file by the rule of `split_documents`; nothing is read or copied.

    Raises:
        ValueError: what `split_documents` raises.
    """
    found = split_documents(file.num_documents, weights)
    return {name: DocumentRange(file, documents, name) for name, documents in found.items()}


class DocumentRange:
    """Some documents of a file that lie side by side, as a `TokenFile` of their own.

    Args:
        file: what has them.
        documents: which.
        name: what errors call them, beside the path of the file.

    Attributes:
        documents: as given.
        path: the file's, and the name in brackets.
        dtype, num_tokens, num_documents: as of any `TokenFile`.
    """

    def __init__(self, file: TokenFile, documents: range, name: str):
        self.documents, self._file, self._name = documents, file, name
        self.path = Path(f"{file.path} ({name})")
        edges = np.array([documents.start, documents.stop])
        self._start, stop = file.starts(edges).tolist()
        self.dtype, self.num_tokens = file.dtype, stop - self._start
        self.num_documents = len(documents)

    def __reduce__(self):
        return DocumentRange, (self._file, self.documents, self._name)

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``, counted from the first document's.

        Raises:
            IndexError: there are not as many.
        """
        check_range(self.path, start, length, self.num_tokens)
        return self._file.read(self._start + start, length)

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin, both counted from the first one: int64."""
        numbers = np.asarray(documents, np.int64) + self.documents.start
        return self._file.starts(numbers) - self._start

    def document_of(self, offset: int) -> int:
        """The document that token `offset` is in, both counted from the first.

        Raises:
            IndexError: there is no such token.
        """
        return int(self.documents_of(np.array(offset)))

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        """The documents that tokens are in: int64, the shape of `offsets`.

        Raises:
            IndexError: there are no such tokens.
        """
        wanted = checked_offsets(self.path, offsets, self.num_tokens)
        return self._file.documents_of(wanted + self._start) - self.documents.start
