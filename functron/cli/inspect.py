"""``functron trace | params | schedule``: a run seen before it is begun; nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.core.errors import refuse
from functron.pipeline import Schedule, make
from functron.spmd import DATA_AXES, Mesh
from functron.training import run_folder
from functron.training.config import BOXES, COMMON, TrainConfig, starting_config
from functron.training.plan import parameter_table, plan, step_report
from functron.training.records import nearest

_SEQ = 2048  # of models that take sequences of any length


@dataclass(frozen=True)
class TraceOptions:
    """Show what one rank computes, sends and holds in a training step. Nothing is run.

    Of a pipeline it is what each of its ranks computes, hands on and holds, stage by stage.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model, with the longest samples that it takes (--seq), or 2048 tokens
            where it takes any, and one of them for each data-parallel rank and microbatch
            (--global-batch).
        program: print the whole program as well (not with pp).
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    program: bool = False
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def trace(arguments: Sequence[str]) -> int:
    """Print cost and memory, and the program where that is asked for."""
    with mistakes():
        options = _parse(TraceOptions, arguments, "trace", seq=0, global_batch=0)
        config: TrainConfig = options.options
        mesh = Mesh.parse(config.mesh)
        data_ranks = math.prod(mesh[axis] for axis in DATA_AXES)
        config = replace(
            config,
            seq=config.seq or getattr(config.architecture, "max_seq", _SEQ),
            global_batch=config.global_batch or data_ranks * config.microbatches,
        )
        text = step_report(plan(config, mesh), program=options.program)
    print(text)
    return 0


@dataclass(frozen=True)
class ParamsOptions:
    """Show the parameters of a model, and how a mesh splits them. No memory is needed for them.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def params(arguments: Sequence[str]) -> int:
    """Print the table."""
    with mistakes():
        config: TrainConfig = _parse(ParamsOptions, arguments, "params").options
        print(parameter_table(plan(config, Mesh.parse(config.mesh))))
    return 0


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


def schedule(arguments: Sequence[str]) -> int:
    """Print the drawing or the table."""
    options = parse(ScheduleOptions, arguments, "schedule")
    with mistakes():
        own = Schedule.load(options.name) if Path(options.name).is_file() else None
        ranks, microbatches = (own.num_ranks, own.num_microbatches) if own else (4, 8)
        ranks, microbatches = options.pp or ranks, options.microbatches or microbatches
        made = make(options.name, ranks, microbatches, options.chunks or None)
        if options.svg is not None:
            options.svg.write_text(made.simulate().svg())
    print(made if options.table else schedule_report(made), end="")
    return 0


def _parse(kind: Any, arguments: Sequence[str], command: str, **fields: Any) -> Any:
    """The options of a command: of the run that the first argument names, or of a preset.

    Args:
        kind: a dataclass with ``run``, a positional argument, ``options``, a `TrainConfig`, and
            what the command takes besides; options override those of the run.
        arguments: as they were given. A run comes first.
        command: its name.
        fields: of the `TrainConfig`, where no run is named.

    Raises:
        ValueError: there is no such run or preset, or it cannot be read.
        functron.cli.process.InputError, SystemExit: as `functron.cli.options.parse`.
    """
    run = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    model = value_of("--model", arguments)
    file, precision = file_of(Path(run)) if run else None, value_of("--precision", arguments)
    base = starting_config(file, model=model, precision=precision, **fields)
    made = parse(kind, arguments, command, kind(run=run, options=base), boxes=BOXES, common=COMMON)
    if made.run != run:
        title, fix = "cannot tell which run this is about", f"functron {command} {made.run} ..."
        refuse(title, "run", repr(made.run), "the first argument", fix)
    return made


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of an option; None: it has none, or the parser will say what is wrong."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option and following:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def file_of(path: Path) -> Path:
    """The file that has the options of a run."""
    if not path.is_dir():
        return path
    if not run_folder.is_run(path):
        near = nearest(path)
        fix = "" if near is None else f"name {near}, which is one"
        wanted = f"a run folder, or a file like its {run_folder.CONFIG}"
        refuse("no such run", str(path), "a folder where no run is", wanted, fix)
    return path / run_folder.CONFIG


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
