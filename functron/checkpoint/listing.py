"""What a person wants to know of a folder of checkpoints, or of one, as text.

Verification: every file, every description and every value of a checkpoint, read and checked.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from functron.checkpoint import database
from functron.checkpoint.chunks import grid
from functron.checkpoint.folder import UNFINISHED, steps
from functron.checkpoint.stored import Checkpoint
from functron.core.errors import Problem, raise_problems


def verify(path: str | Path, *, in_flight: int = database.IN_FLIGHT) -> int:
    """Read all of a checkpoint and compare all checksums; returns the bytes of its values.

    Only bytes that nothing refers to may differ unnoticed, in files too large for the manifest to
    have a checksum of: replaced parts of a process's index. Where the checkpoint does not record
    the checksum of each chunk, chunks may have changed places too; a UserWarning says so.

    Raises:
        ValueError: something is missing or damaged; every leaf at fault is listed, with its file.
    """
    stored = Checkpoint(path)
    stored.open()
    found: list[Problem] = []
    window = database.Window(in_flight)
    for leaf in stored.values():
        size = database.nbytes_of(leaf.chunk, leaf.itemsize)
        for cell in grid(leaf.shape, leaf.chunk):
            window.add(size, lambda leaf=leaf, cell=cell: leaf.checking(cell, found))
    window.drain()
    raise_problems(f"the checkpoint {path} is damaged", found)
    return sum(leaf.nbytes for leaf in stored.values())


def list_text(folder: str | Path) -> str:
    """The checkpoints of a folder, a line each: step, size, leaves, mesh, when it was made.

    Raises:
        ValueError: it is no folder.
    """
    root = Path(folder)
    if not root.is_dir():
        got = "no such folder"
        problem = Problem(str(folder), got, "a folder such as RUN/checkpoints", "check the path")
        raise_problems("no checkpoints to list", [problem])
    rows = [("step", "bytes", "leaves", "mesh", "made", "metadata")]
    rows += [_row(root / str(step)) for step in steps(root)]
    unfinished = sorted(path.name for path in root.iterdir() if UNFINISHED in path.name)
    lines = _table(rows) if len(rows) > 1 else ["no complete checkpoint"]
    return "\n".join([*lines, *(f"unfinished: {name}" for name in unfinished)])


def show_text(path: str | Path) -> str:
    """What a checkpoint holds: where it was made, its metadata, and every leaf.

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
    """One line that says that a checkpoint is undamaged, after reading all of it.

    Where that could not be seen altogether, a second line says what was not checked.

    Raises:
        ValueError: it is not; every leaf and file at fault is listed.
    """
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what it warns of is said below
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
