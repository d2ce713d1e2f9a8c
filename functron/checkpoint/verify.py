"""Verification: every file, every description and every value of a checkpoint, read and checked."""

from __future__ import annotations

from pathlib import Path

from functron.checkpoint import database
from functron.checkpoint.chunks import grid
from functron.checkpoint.stored import Checkpoint
from functron.errors import Problem, raise_problems


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
