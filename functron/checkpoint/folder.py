"""Which checkpoints a folder holds: one complete checkpoint per folder named after its step."""

from __future__ import annotations

from pathlib import Path

from functron.errors import Problem, raise_problems

COMMITTED = "_CHECKPOINT_METADATA"


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint that was written to its end.

    Orbax writes under a temporary name and renames at the end; its metadata file is part of that.
    """
    return (path / COMMITTED).is_file() and "orbax-checkpoint-tmp" not in path.name


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
