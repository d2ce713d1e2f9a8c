"""``functron rerun``: a step of a run that is taken again, offline, from a checkpoint before it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from functron.cli.launch import device_type, join, launch, leave
from functron.cli.options import parse
from functron.cli.process import Process, current, mistakes
from functron.core.errors import Problem, raise_problems
from functron.spmd import Mesh
from functron.training import records, run_folder
from functron.training.config import TrainConfig, load
from functron.training.rerun import attributed
from functron.training.run import Job, deterministic, prepare


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


def run(arguments: Sequence[str]) -> int:
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
