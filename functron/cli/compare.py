"""``functron compare``: the settings, losses and speeds of several runs side by side."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from functron import apps
from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.core.errors import refuse
from functron.core.settings import nest_table
from functron.training.records import compare


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs: settings that differ, losses and speeds, and a plot of the losses.

    Attributes:
        runs: run folders, or logs of Megatron-LM.
        svg: write the loss curves to this file.
        json: print a JSON object instead of a table.
    """

    runs: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN RUN [RUN ...]")]
    ]
    svg: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("compare.svg")
    json: bool = False


def _nest(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nest the settings of functron 0.1, which are rare; the import takes torch."""
    return nest_table(table, importlib.import_module("functron.training.config").TrainConfig)


def run(arguments: Sequence[str]) -> int:
    """Print the table, and draw the losses."""
    options = parse(CompareOptions, arguments, "compare")
    with mistakes():
        logs = apps.load_plugins("functron.logs").values()
        found = compare(options.runs, nest=_nest, logs=logs)
        try:
            options.svg.write_text(found.svg(), encoding="utf-8")
        except OSError as error:
            got, wanted = error.strerror or str(error), "a file to write the picture into"
            refuse("cannot draw", str(options.svg), got, wanted, "name another: --svg FILE")
    if options.json:
        shown = {"runs": found.runs, "settings": found.settings, "results": found.results}
        print(json.dumps(shown, indent=2))
    else:
        print(f"{found}\n\nthe losses of all: {options.svg}")
    return 0
