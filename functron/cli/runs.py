"""``functron compare | rerun | migrate``: runs beside each other, again, and from elsewhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from functron.cli.launch import device_type, join, launch, leave
from functron.cli.options import parse
from functron.cli.process import Process, current, mistakes
from functron.core.errors import Problem, raise_problems, refuse
from functron.spmd import Mesh
from functron.training import records, run_folder
from functron.training.config import TrainConfig, load
from functron.training.migrate import Migration
from functron.training.migrate import migrate as migrated
from functron.training.rerun import attributed
from functron.training.run import Job, deterministic, prepare


@dataclass(frozen=True)
class CompareOptions:
    """Show several runs side by side: the settings that differ, losses and speeds, and a picture.

    Attributes:
        runs: run folders, or files with what Megatron-LM printed of its runs.
        svg: write the loss curves of all into this file.
        json: print a JSON object instead of a table.
    """

    runs: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN RUN [RUN ...]")]
    ]
    svg: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("compare.svg")
    json: bool = False


def compare(arguments: Sequence[str]) -> int:
    """Print the table, and draw the losses."""
    options = parse(CompareOptions, arguments, "compare")
    with mistakes():
        found = records.compare(options.runs)
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


@dataclass(frozen=True, kw_only=True)
class RerunOptions:
    """Take a step of a run again, and say what its numbers come from.

    From the newest checkpoint before it the steps up to it are taken, whose losses and gradient
    norms are compared with the records bit for bit; then the step, twice; and by every rank by
    itself, where there are several. Nothing in the run folder changes.

    Attributes:
        run: the run folder that training left.
        step: which one, from 1 as in metrics.jsonl.
        mesh: axes and sizes, such as pp=2,tp=2; run: that of the run. On another one numbers are
            compared to one in a thousand, as sums are of another order.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh; -1: as the run.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    step: int
    mesh: str = "run"
    nproc: int = -1
    device: Literal["auto", "cpu", "cuda"] = "auto"


def rerun(arguments: Sequence[str]) -> int:
    """Print the verdict."""
    options = parse(RerunOptions, arguments, "rerun")
    here = current()
    with mistakes():
        config, exact = _configured(options, here)
        kind = device_type(config.device, config.nproc)
    if here is None and config.nproc:
        return launch(config.nproc, ["-m", "functron", "rerun", *arguments])
    mesh = Mesh.parse(config.mesh)
    with mistakes():
        if here is None:
            made = prepare(config, mesh, kind)
        else:
            bound, device = join(mesh, here, kind, config.timeout_seconds)
            made = prepare(config, bound, device)
    with deterministic() if config.deterministic else nullcontext():
        verdict = attributed(made, options.run, Job.of(made), options.step, (), exact=exact)
    leave()
    if here is None or here.rank == 0:
        print(verdict, flush=True)
    return 0


def _configured(options: RerunOptions, here: Process | None) -> tuple[TrainConfig, bool]:
    """The run on the ranks that are asked for, and whether these are its own."""
    begun = load(options.run / run_folder.CONFIG)
    mesh = begun.mesh if options.mesh == "run" else options.mesh
    nproc = begun.nproc if options.nproc < 0 else options.nproc
    steps = [record["step"] for record in records.read(options.run / records.METRICS)]
    size = Mesh.parse(mesh).size
    found = []
    if not 1 <= options.step <= max(steps, default=begun.steps):
        wanted = f"one of the {max(steps, default=begun.steps)} that the run took"
        found.append(Problem("step", str(options.step), wanted))
    processes = here.world_size if here else nproc
    if processes and processes != size:
        fix = f"set it to {size}, or to 0 to simulate them"
        found.append(Problem("nproc", f"{processes} for a mesh of {size}", "one per rank", fix))
    raise_problems("cannot take the step again", found)
    same = Mesh.parse(mesh) == Mesh.parse(begun.mesh)
    exact = same and (begun.nproc == processes or (here is not None and options.nproc < 0))
    device = begun.device if options.device == "auto" else options.device
    changed = replace(
        begun, mesh=mesh, nproc=nproc, device=device, out=str(options.run), resume=False
    )
    return replace(changed, eval_every=0, tensorboard=False, wandb=False), exact


@dataclass(frozen=True)
class MigrateOptions:
    """Make a configuration of a launch line of Megatron-LM, and show what became of its arguments.

    Nothing is run: a script is read. Arguments without a counterpart here are listed, with what to
    do; unknown ones, and sizes that do not fit, are errors.

    Attributes:
        source: a shell script, a list of arguments, or YAML of Megatron-LM, Megatron-Bridge or
            NeMo.
        out: the file to write, for functron train --config.
        env: variables that the script's surroundings set, such as DATA_PATH=/data/text; 1=PATH is
            the script's first argument.
        extra: arguments after those of the line, such as vocab-size=151936 or bf16, which win.
        without: arguments to leave out, such as those of a fork.
        processes: ranks; 0: as many as the launcher starts.
        closest: where functron has another model of the kind, make that one.
        strict: arguments without a counterpart are errors, too.
        json: print a JSON object instead of a table.
    """

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE")]]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("config.toml")
    env: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    extra: Annotated[tuple[str, ...], tyro.conf.arg(name="with", metavar="NAME=VALUE")] = ()
    without: tuple[str, ...] = ()
    processes: int = 0
    closest: bool = False
    strict: bool = False
    json: bool = False


def migrate(arguments: Sequence[str]) -> int:
    """Write the configuration, and print the table."""
    options = parse(MigrateOptions, arguments, "migrate")
    with mistakes():
        made = migrated(
            options.source,
            variables=_variables(options.env),
            extra=shlex.join(options.extra),
            without=options.without,
            processes=options.processes,
            closest=options.closest,
        )
        if options.strict:
            fix = "leave --strict out, where that is understood"
            raise_problems("these arguments have no counterpart", [
                Problem(row.name, row.value, row.why, fix) for row in made.of("not supported")
            ])  # fmt: skip
        _write(options.out, made)
    if options.json:
        print(json.dumps([asdict(row) for row in made.rows], indent=2))
    else:
        print("\n".join([str(made), "", *_conclusion(options.out, made)]))
    return 0


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Variables by name.

    Raises:
        ValueError: a word is no name and value; all such are listed.
    """
    pairs = [word.partition("=") for word in words]
    raise_problems("cannot read --env", [
        Problem("--env", word, "NAME=VALUE", "write --env NAME=VALUE")
        for word, (name, equals, _) in zip(words, pairs, strict=True)
        if not (name and equals)
    ])  # fmt: skip
    return {name: value for name, _, value in pairs}


def _write(path: Path, made: Migration) -> None:
    title, fix = "cannot write the configuration", "name another: --out FILE"
    if path.exists():
        refuse(title, str(path), "a file that is there", "a new one", fix)
    try:
        path.write_text(made.toml(), encoding="utf-8")
    except OSError as error:
        refuse(title, str(path), error.strerror or str(error), "a file to write", fix)


_A_NODE = 8  # GPUs of most machines


def _conclusion(path: Path, made: Migration) -> list[str]:
    config, missing = made.config, len(made.of("not supported"))
    lines = [f"{path}: {config.title}, on {config.mesh or 'one rank'}"]
    if missing:
        plural = "argument has" if missing == 1 else "arguments have"
        lines.append(f"{missing} {plural} no counterpart: see above, and the head of the file")
    if not made.told:
        lines.append(
            f"nothing says how many processes there are, so they are {made.processes}, as few as "
            "the sizes allow: --processes N"
        )
    if made.absent:
        lines.append(f"not on this machine, and so not looked into: {', '.join(made.absent)}")
    lines.append(f"look at it: functron train --config {path} --dry-run")
    start = f"torchrun --nproc-per-node N -m functron train --config {path}"
    lines.append(
        f"start it:   {start if made.processes > 1 else f'functron train --config {path}'}"
    )
    return lines
