"""A training run from its configuration: mesh and rules, parameters, step, loop, run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functron import checkpoint, metrics, optim, random, report, run_folder
from functron.config import TrainConfig
from functron.data import ByteText
from functron.loop import Meter, Outcome, loop
from functron.models import gpt
from functron.pipeline.collect import collect
from functron.pipeline.partition import Partition
from functron.program.jit import jit
from functron.recipe import assemble, make_optimizer
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, gather
from functron.step import State, init_state, state_specs


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run, put together from a `TrainConfig` by `prepare`.

    Attributes:
        config: what it was made from.
        mesh: simulated, or bound to processes.
        text: where batches come from.
        state: before the first step, which consumes it: global values, or this rank's shards.
        specs: the specs of `state`.
        step: ``(state, batch) -> (state, metrics)``.
        learning_rate: of each step.
        device: where it runs.
        partition: who holds which parameters, where ranks of a pipeline do.
    """

    config: TrainConfig
    mesh: Mesh | BoundMesh
    text: ByteText
    state: State
    specs: State
    step: Callable
    learning_rate: Callable
    device: torch.device
    partition: Partition | None = None

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of the batch of `step`, on the device of the state."""
        config, mesh = self.config, self.mesh
        part = data_part(mesh) if isinstance(mesh, BoundMesh) else (0, 1)
        host = self.text.batch(step, config.global_batch, part)
        return {name: value.to(self.device) for name, value in host.items()}


def prepare(config: TrainConfig, mesh: Mesh | BoundMesh, device: torch.device | str = "cpu") -> Run:
    """The run that `config` describes, ready for its first step.

    Raises:
        ValueError: the data cannot be read, or the model cannot run on the mesh.
    """
    text = ByteText(config.data or None, config.seq, seed=config.seed)
    recipe = assemble(config, mesh)
    state = recipe.init(random.key(config.seed).to(device), mesh)
    specs = state_specs(recipe.specs, recipe.optimizer)
    schedule = optim.make_schedule(config.rate_schedule)
    staged = recipe.partition is not None and isinstance(mesh, BoundMesh)  # compiled by stages
    step = jit(recipe.step, donate=0) if config.compile and not staged else recipe.step
    where = state.key.device
    return Run(config, mesh, text, state, specs, step, schedule, where, recipe.partition)


def train(run: Run, out: Path | None) -> Outcome:
    """Take the steps of `run`, and leave what a run folder holds in `out` (None: no files).

    On a bound mesh every rank calls it, with the same `out`; rank 0 writes. Collectives: those of
    the step, one all-reduce of a scalar per step and, at a checkpoint, the gathering of the state.
    """
    config, mesh, device = run.config, run.mesh, run.device
    bound = isinstance(mesh, BoundMesh)
    main = not isinstance(mesh, BoundMesh) or mesh.rank == 0

    def across(number: float, operation: Any) -> float:
        if not bound:
            return number
        value = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(value, operation)
        return float(value)

    def save(state: State, step: int) -> None:
        whole = whole_state(run, state)
        if main and out is not None:
            checkpoint.save(out / run_folder.CHECKPOINTS / str(step), whole, {"step": step})
        if bound:
            dist.barrier()

    if main and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        run_folder.write_config(out, config)
    # measured on all ranks at the same time, as they will run
    peak = metrics.peak_flops(device, config.gpt.torch_dtype)
    meter = Meter(
        learning_rate=run.learning_rate,
        tokens_per_step=config.global_batch * config.seq,
        flops_per_token=gpt.flops_per_token(config.gpt, config.seq),
        peak_flops=across(peak, dist.ReduceOp.SUM),
        device=device,
    )
    return loop(
        run.step,
        run.state,
        run.batch,
        steps=config.steps,
        meter=meter,
        save=save if out is not None else None,
        save_every=config.save_every,
        reporters=reporters(config, out) if main else [],
        agree=lambda number: int(across(number, dist.ReduceOp.MAX)),
    )


def whole_state(run: Run, state: State) -> State:
    """The state with global values, on the first rank at least; every rank calls it."""
    config, mesh = run.config, run.mesh
    state = gather(state, run.specs, mesh)
    if not isinstance(mesh, BoundMesh) or run.partition is None:
        return state
    if any(index for axis, index in mesh.coordinate.items() if axis != "pp"):
        return state  # another rank's pipeline has the first rank in it
    defs = gpt.defs(config.gpt)
    optimizer = make_optimizer(config, defs, P())
    like = init_state(random.key(0).to("meta"), defs, P(), optimizer, Mesh())
    return collect(state, like, run.partition, mesh)


def reporters(config: TrainConfig, out: Path | None) -> list[report.Reporter]:
    """Where the records of a run go: always a progress bar, and the files of the run folder."""
    found: list[report.Reporter] = [report.progress(config.steps)]
    if out is None:
        return found
    found += [report.jsonl(out / run_folder.METRICS), report.loss_picture(out / "loss.svg")]
    if config.tensorboard:
        found.append(report.tensorboard(out / "tensorboard"))
    if config.wandb:
        found.append(report.wandb(out, dataclasses.asdict(config)))
    return found


def data_part(mesh: BoundMesh) -> tuple[int, int]:
    """Which part of a batch this rank gets, ``(index, count)``: row-major over the data axes."""
    index, count = 0, 1
    for axis in DATA_AXES:
        index = index * mesh[axis] + mesh.coordinate.get(axis, 0)
        count *= mesh[axis]
    return index, count
