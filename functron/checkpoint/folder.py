"""Which checkpoints a folder holds, one per folder named after its step, and which to keep."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.checkpoint import manifest
from functron.core.errors import Problem, raise_problems

COMMITTED = "_CHECKPOINT_METADATA"
UNFINISHED = "orbax-checkpoint-tmp"
_REMOVED = f"{UNFINISHED}-removed"


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end.

    It is written under a temporary name, and renamed when all is there.
    """
    named = UNFINISHED not in path.name
    return named and ((path / manifest.NAME).is_file() or (path / COMMITTED).is_file())


def steps(folder: str | Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, increasing; those half written are not."""
    root = Path(folder)
    entries = root.iterdir() if root.is_dir() else ()
    return sorted(int(p.name) for p in entries if p.name.isdigit() and is_complete(p))


def latest(folder: str | Path) -> Path:
    """The newest complete checkpoint in `folder`.

    Raises:
        ValueError: it holds none.
    """
    found = steps(folder)
    if not found:
        got = "no complete checkpoint" if Path(folder).is_dir() else "no such folder"
        problem = Problem(
            str(folder), got, "a folder such as RUN/checkpoints", "train first, or check the path"
        )
        raise_problems("no checkpoint to read", [problem])
    return Path(folder) / str(found[-1])


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a folder stay when a new one is complete; the newest always does.

    Attributes:
        last: so many of the newest; None keeps all.
        every: also those whose step is a multiple of it; 0 for none.
        best: also so many of those with the best `metric`.
        metric: the entry of their metadata that `best` goes by; those without it do not count.
        largest: whether large numbers are good.

    Raises:
        ValueError: a number is negative, or `last` is 0.
    """

    last: int | None = None
    every: int = 0
    best: int = 0
    metric: str = "loss"
    largest: bool = False

    def __post_init__(self):
        found = [
            Problem(f"Keep.{name}", str(getattr(self, name)), "at least 0")
            for name in ("every", "best")
            if getattr(self, name) < 0
        ]
        if self.last is not None and self.last < 1:
            wanted = "at least 1, or None for all"
            found.append(Problem("Keep.last", str(self.last), wanted))
        raise_problems("no such choice of checkpoints", found)

    def choose(self, metadata: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """The steps that stay, of those whose checkpoints have this metadata."""
        ordered = sorted(metadata)
        kept = set(ordered if self.last is None else ordered[-self.last :])
        if self.every:
            kept |= {step for step in ordered if step % self.every == 0}
        values = {step: metadata[step].get(self.metric) for step in ordered}
        scores = {
            step: -value if self.largest else value
            for step, value in values.items()
            if isinstance(value, (int, float)) and not math.isnan(value)
        }
        kept |= set(sorted(scores, key=scores.__getitem__)[: self.best])
        return kept


def prune(folder: Path, keep: Keep) -> None:
    """Remove the complete checkpoints of `folder` that `keep` does not keep."""
    found = steps(folder)
    if keep.last is None or len(found) <= keep.last:
        return
    kept = keep.choose({step: _metadata(folder / str(step), keep) for step in found})
    for step in found:
        if step not in kept:
            # invisible at once, whatever happens to its files
            removed = folder / f"{step}.{_REMOVED}"
            (folder / str(step)).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what saves left in `folder` that did not come to their end; none may be under way."""
    leftovers: Sequence[Path] = list(folder.iterdir()) if folder.is_dir() else ()
    for path in leftovers:
        if UNFINISHED in path.name and path.name.partition(".")[0].isdigit():
            shutil.rmtree(path, ignore_errors=True)


def _metadata(path: Path, keep: Keep) -> Mapping[str, Any]:
    if not keep.best:
        return {}
    content, _ = manifest.read(path)
    return {} if content is None else content["metadata"]
