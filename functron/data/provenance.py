"""Which tokenizer made tokens on disk, as `functron preprocess` wrote it down beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.data.shards import DOCUMENTS_SUFFIX
from functron.data.text_tokenizer import BYTES
from functron.errors import Problem, raise_problems

_ENDINGS = (DOCUMENTS_SUFFIX, ".npy", ".bin", ".idx")


@dataclass(frozen=True)
class Provenance:
    """The tokenizer that made tokens.

    Attributes:
        tokenizer: the path of its file when it did, or ``bytes``.
        pattern: how it split text; empty: as the file, or its name, says.
        sha256: of the file.
    """

    tokenizer: str
    pattern: str
    sha256: str

    @property
    def is_there(self) -> bool:
        """Whether the file is still where it was, and the same."""
        if self.tokenizer == BYTES:
            return True
        try:
            return hashlib.sha256(Path(self.tokenizer).read_bytes()).hexdigest() == self.sha256
        except OSError:
            return False


def provenance(paths: Sequence[str | Path]) -> Provenance | None:
    """The tokenizer of all these tokens; None where nothing says it of one of them.

    Args:
        paths: as `functron.data.open_tokens` takes them.

    Raises:
        ValueError: different tokenizers made them, so that no model can learn from both.
    """
    found = {str(path): _recorded(str(path)) for path in paths}
    known = {path: made for path, made in found.items() if made is not None}
    first = next(iter(known), None)
    if first is None:
        return None
    fix = "preprocess all with one tokenizer, or leave one out"
    problems = [
        Problem(f"data {path}", f"tokens of {made.tokenizer}", _wanted(first, known[first]), fix)
        for path, made in known.items()
        if (made.sha256, made.pattern) != (known[first].sha256, known[first].pattern)
    ]
    raise_problems("tokens of different tokenizers", problems)
    return known[first] if len(known) == len(found) else None


def _wanted(path: str, made: Provenance) -> str:
    return f"{made.tokenizer}, as in {path}"


def _recorded(path: str) -> Provenance | None:
    stem = path
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    try:
        record: Any = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        return Provenance(record["tokenizer"], record["pattern"], record["tokenizer_sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or another program's
        return None
