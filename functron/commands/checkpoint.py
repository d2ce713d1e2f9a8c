"""``functron checkpoint``: which checkpoints there are, what is in one, and whether it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from functron import checkpoint, launch, run_folder
from functron.commands.parsing import parse


@dataclass(frozen=True)
class CheckpointOptions:
    """Show checkpoints: which there are, what is in one, and whether all of it can be read.

    Attributes:
        action: ls lists those of a run; show shows what one holds; verify reads all of one and
            compares its checksums.
        path: a run folder, a folder of checkpoints, or a checkpoint. Of several, show and verify
            take the newest.
    """

    action: tyro.conf.Positional[Literal["ls", "show", "verify"]]
    path: tyro.conf.Positional[Path]


def run(arguments: Sequence[str]) -> int:
    """Print the listing, the contents, or that they are right."""
    options = parse(CheckpointOptions, arguments, "checkpoint")
    with launch.mistakes():
        folder = options.path
        if run_folder.is_run(folder):
            folder = folder / run_folder.CHECKPOINTS
        if options.action == "ls":
            print(checkpoint.list_text(folder))
            return 0
        one = checkpoint.latest(folder) if checkpoint.steps(folder) else folder
        text = checkpoint.show_text if options.action == "show" else checkpoint.verify_text
        print(text(one))
    return 0
