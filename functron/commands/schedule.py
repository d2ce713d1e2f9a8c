"""``functron schedule``: a pipeline schedule as a picture, or as a table to edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from functron import launch
from functron.commands.parsing import parse
from functron.pipeline import Schedule, make


@dataclass(frozen=True)
class ScheduleOptions:
    """Draw a pipeline schedule: who computes what when, where forwards, and backwards for inputs
    and for weights, take a unit of time each.

    Attributes:
        name: gpipe, 1f1b, eager-1f1b, interleaved, breadth-first, combined-1f1b, zb-h1, zb-h2, zbv,
            v-min, v-half, dualpipe, dualpipev, forward, or the file of a table.
        pp: ranks; 0: 4, or those of the table.
        microbatches: per step; 0: 8, or those of the table.
        chunks: stages per rank, where the schedule lets choose; 0: what it has by default.
        svg: write the drawing into this file.
        table: print the table instead, as a file that can be edited and given as the name.
    """

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    pp: int = 0
    microbatches: int = 0
    chunks: int = 0
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    table: bool = False


def run(arguments: Sequence[str]) -> int:
    """Print the drawing or the table."""
    options = parse(ScheduleOptions, arguments, "schedule")
    with launch.mistakes():
        own = Schedule.load(options.name) if Path(options.name).is_file() else None
        ranks, microbatches = (own.num_ranks, own.num_microbatches) if own else (4, 8)
        ranks, microbatches = options.pp or ranks, options.microbatches or microbatches
        schedule = make(options.name, ranks, microbatches, options.chunks or None)
        timeline = schedule.simulate()
        if options.svg is not None:
            options.svg.write_text(timeline.svg())
    print(schedule if options.table else schedule_report(schedule), end="")
    return 0


def schedule_report(schedule: Schedule) -> str:
    """The Gantt chart of a schedule, its bubble and its live activations, as text.

    F, I and W take 1 each, B 2.
    """
    timeline = schedule.simulate()
    each = [schedule.peak_live(rank) for rank in range(schedule.num_ranks)]
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    lines = [
        f"{schedule.name}: {schedule.num_ranks} ranks{chunks}, "
        f"{schedule.num_microbatches} microbatches",
        "",
        timeline.gantt(),
        "",
        f"bubble            {timeline.bubble_fraction:.1%} of the ranks' time",
        f"live activations  {' '.join(map(str, each))}: the most per rank, of one microbatch "
        "and stage each",
    ]
    return "\n".join(lines) + "\n"
