"""Folders of checkpoints, one per folder named after its step: listed, shown, kept and removed."""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.checkpoint import manifest
from functron.checkpoint.manifest import UNFINISHED, is_complete
from functron.checkpoint.stored import Checkpoint, verify
from functron.core.errors import Problem, raise_problems, refuse

_REMOVED = f"{UNFINISHED}-removed"


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
        wanted, fix = "a folder such as RUN/checkpoints", "train first, or check the path"
        refuse("no checkpoint to read", str(folder), got, wanted, fix)
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


# --- as text


def list_text(folder: str | Path) -> str:
    """The checkpoints of a folder, a line each: step, size, leaves, mesh, when it was made.

    Raises:
        ValueError: it is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        wanted = "a folder such as RUN/checkpoints"
        refuse("no checkpoints to list", str(folder), "no such folder", wanted, "check the path")
    rows = [("step", "bytes", "leaves", "mesh", "made", "metadata")]
    rows += [_row(root / str(step)) for step in steps(root)]
    unfinished = sorted(path.name for path in root.iterdir() if UNFINISHED in path.name)
    lines = _table(rows) if len(rows) > 1 else ["no complete checkpoint"]
    return "\n".join([*lines, *(f"unfinished: {name}" for name in unfinished)])


def show_text(path: str | Path) -> str:
    """A checkpoint as text: where it was made, its metadata, and every leaf.

    Raises:
        ValueError: nothing is there, it is incomplete or damaged.
    """
    stored = Checkpoint(path)
    stored.open()
    lines = [f"checkpoint {path}"]
    origin = stored.origin
    if origin:
        mesh = origin["mesh"] or "no mesh"
        lines.append(f"made {_when(origin['time'])} on {mesh}, processes: {origin['processes']}")
        lines.append(f"with torch {origin['torch']}, Python {origin['python']}")
    else:
        lines.append("without a manifest: written by Orbax alone")
    values = sum(leaf.nbytes for leaf in stored.values())
    lines.append(
        f"{len(stored)} leaves, {_size(values)} of values in {_size(stored.nbytes)} of files"
    )
    if stored.metadata:
        lines += ["metadata", *_indented(json.dumps(stored.metadata, indent=2))]
    rows = [("leaf", "dtype", "shape", "bytes", "chunks of")]
    rows += [
        (leaf.path, leaf.dtype_name, str(leaf.shape), _size(leaf.nbytes), str(leaf.chunk))
        for leaf in stored.values()
    ]
    return "\n".join([*lines, "leaves", *_indented("\n".join(_table(rows)))])


def verify_text(path: str | Path) -> str:
    """A line that a checkpoint is undamaged, after reading all of it.

    Where some checks were not possible, a second line names them.

    Raises:
        ValueError: it is not; every leaf and file at fault is listed.
    """
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the second line has it
        nbytes = verify(path)
    took = f"{_size(nbytes)} of values in {time.perf_counter() - begun:.1f} s"
    if left := Checkpoint(path).unbound:
        return f"{path}: no damage found; {took}\nnot checked: {left}"
    return f"{path}: all files and checksums are right; {took}"


def _row(path: Path) -> tuple[str, ...]:
    try:
        stored = Checkpoint(path)
    except ValueError as error:
        return (path.name, "", "", "", "", f"damaged: {str(error).splitlines()[-1].strip(' -')}")
    origin = stored.origin
    made = _when(origin["time"]) if origin else ""
    mesh = str(origin.get("mesh") or "none")
    return (
        path.name,
        _size(stored.nbytes),
        str(len(stored)),
        mesh,
        made,
        _short(json.dumps(stored.metadata)),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
