"""A training run from its configuration: mesh and rules, parameters, step, loop, run folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functron import checkpoint, optim
from functron.compiler.jit import jit
from functron.core import random, tree
from functron.data import Blend, Samples
from functron.data.order import drawn
from functron.data.ramp import RampUp
from functron.models import gpt, lora
from functron.params import init_params
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.training import data, records, run_folder
from functron.training import loop as metrics
from functron.training.config import TrainConfig
from functron.training.data import prefetched
from functron.training.evaluation import HeldOut, evaluate, loss_program, open_sets
from functron.training.loop import Meter, Outcome, Request, loop, stop_requests
from functron.training.plan import Plan, Watch, plan
from functron.training.step import State

_HURRIED = 5.0  # seconds without a sign of life after which a run that is to end waits no longer


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, ready for its next step; made by `prepare`.

    Attributes:
        plan: everything that follows of its configuration and mesh.
        text: where batches come from.
        state: before the first step, which consumes it: global values, or this rank's shards.
        step: ``(state, batch) -> (state, metrics)``, compiled if that was asked for.
        watch: the twin of `step` that also measures layers, where it is asked for.
        device: where it runs.
        start: steps taken already.
        held_out: sets that are evaluated, none without `eval_every`.
        held_out_loss: of `evaluation.loss_program`, which evaluates them; None without.
    """

    plan: Plan
    text: Samples
    state: State
    step: Callable
    watch: Watch | None
    device: torch.device
    start: int = 0
    held_out: Sequence[HeldOut] = ()
    held_out_loss: Callable | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration that it was made of."""
        return self.plan.config

    @property
    def mesh(self) -> Mesh | BoundMesh:
        """Its ranks: simulated, or bound to processes."""
        return self.plan.mesh

    @cached_property
    def batches(self) -> RampUp:
        """How many samples each step has, and which one is its first."""
        return self.config.batches

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of the batch of `step`, on the device of the state."""
        return self.on_device(self.host_batch(step))

    def host_batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of the batch of `step`, in host memory."""
        first, size = self.batches.first_sample(step), self.batches.batch_size(step)
        return own_part(self.mesh, lambda part: drawn(self.text, first, size, part))

    def on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch on the device of the state."""
        return {name: value.to(self.device) for name, value in batch.items()}

    def evaluate(self, state: State) -> dict[str, dict[str, float]]:
        """The loss, perplexity and number of targets of every held-out set, by its name.

        Collective. Collectives: those of `evaluation.loss_program`, batch by batch; and before,
        where averages are evaluated that ZeRO divides, one all-gather per leaf and axis.
        """

        def batch(held_out: HeldOut, index: int) -> dict[str, torch.Tensor]:
            host = own_part(self.mesh, lambda part: held_out.batch(index, part))
            return self.on_device(host)

        if self.held_out_loss is None:
            return {}
        averaged = self.plan.averaged if self.config.eval_averaged else None
        params = state.params if averaged is None else averaged(state)
        return evaluate(self.held_out_loss, params, self.held_out, batch)


def prepare(
    config: TrainConfig,
    mesh: Mesh | BoundMesh,
    device: torch.device | str = "cpu",
    begin_from: Path | None = None,
) -> Run:
    """The run that `config` describes, ready for its next step.

    Args:
        config: what is to be run.
        mesh: simulated, or bound to processes.
        device: where it runs.
        begin_from: a checkpoint of this run, made on any mesh, or of parameters alone, with which
            it begins; None: begin with random ones.

    Raises:
        ValueError: the data cannot be read, the model cannot run on the mesh, or the checkpoint is
            damaged or another model's.
    """
    tokenizer = data.reader_of(config)  # of its held-out sets, too
    text = data.open_samples(config, reader=lambda _: tokenizer)
    held_out = open_sets(config, reader=lambda _: tokenizer)
    made, where = plan(config, mesh), torch.device(device)
    key = random.key(config.seed)
    if begin_from is None:
        state = made.init(key.to(where))
    else:
        state = _restored(begin_from, made, key, where)
    step, watch = made.step, made.watch
    if config.compile and made.rank is None:  # stages on processes are compiled one by one
        compiled = functools.partial(jit, donate=0, num_signatures=len(config.batches.sizes))
        step = compiled(step)
        if watch is not None:
            watch = dataclasses.replace(watch, step=compiled(watch.step))
    program = loss_program(made) if held_out else None
    return Run(made, text, state, step, watch, where, int(state.step), held_out, program)


def _restored(path: Path, plan: Plan, key: torch.Tensor, device: torch.device) -> State:
    names, where = list(checkpoint.Checkpoint(path)), plan.placement
    adapted = lora.has_adapters(leaf.path for leaf in where.leaves)
    new = adapted and not lora.has_adapters(names)
    like = plan.init(key.to("meta"))
    if not new and any(name.startswith("opt_state/") for name in names):
        return checkpoint.restore(path, like, placement=where, device=device)
    params = like.params
    if plan.config.optimizer.fp32_masters:  # which begin with what is stored in float32
        params = _as_stored(params, path)
        dtypes = {f"params/{name}": leaf.dtype for name, leaf in _named(params)}
        leaves = [
            dataclasses.replace(leaf, dtype=dtypes.get(leaf.path, leaf.dtype))
            for leaf in where.leaves
        ]
        where = dataclasses.replace(where, leaves=tuple(leaves))
    chosen = {"params": lora.split(params)[0] if new else params}
    params = checkpoint.restore(path, chosen, placement=where, device=device)["params"]
    if new:  # the model's own parameters are there, and nothing was added to them yet
        init_key, _ = random.split(key.to(device)).unbind(0)
        defs = lora.split(plan.defs)[1]
        adapters = init_params(init_key, defs, plan.stored_specs, plan.mesh)
        params = tree.join(params, adapters)
    return plan.init(key.to(device), params)


def _named(params: tree.Tree) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(tree.paths(params), tree.leaves(params), strict=True)


def _as_stored(params: tree.Tree, path: Path) -> tree.Tree:
    """`params`, in float32 where the checkpoint is and they are in less."""
    stored = checkpoint.Checkpoint(path)

    def one(name: str, leaf: torch.Tensor) -> torch.Tensor:
        held = stored[f"params/{name}"].dtype if f"params/{name}" in stored else None
        wide = held == torch.float32 and leaf.dtype in optim.LOW_PRECISION
        return leaf.float() if wide else leaf

    return tree.map_with_path(one, params)


def train(run: Run, out: Path | None) -> Outcome:
    """Take the steps of `run`, and leave what a run folder holds in `out` (None: no files).

    On a bound mesh every rank calls it, with the same `out`, which all must reach: each writes its
    part of checkpoints, while training goes on, and rank 0 all else. Collectives: those of the
    step, and one all-reduce of a scalar per step.

    Raises:
        FloatingPointError: the loss is not finite.
        OSError, TimeoutError: a checkpoint could not be written.
    """
    config, mesh, device = run.config, run.mesh, run.device
    model, family = config.architecture, config.family
    bound = isinstance(mesh, BoundMesh)
    main = not isinstance(mesh, BoundMesh) or mesh.rank == 0

    def across(number: float, operation: Any) -> float:
        if not bound:
            return number
        value = torch.tensor(number, dtype=torch.float64, device=device)
        dist.all_reduce(value, operation)
        return float(value)

    if main and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        run_folder.keep_tokenizer(out, config)
        run_folder.write_config(out, config)
    # measured on all ranks at the same time, as they will run
    peak = metrics.peak_flops(device, model.torch_dtype)
    meter = Meter(
        learning_rate=run.plan.learning_rate,
        tokens_seen=lambda steps: run.batches.first_sample(steps) * config.seq,
        flops_per_token=data.flops_per_token(config),
        peak_flops=across(peak, dist.ReduceOp.SUM),
        device=device,
        details=gpt.summary if family.has_details(model) else None,
        position=lambda steps: seen(run, steps),
    )
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())  # until the last save is complete
        save = stack.enter_context(_saving(run, out, stop)) if out is not None else None
        # the copy to the device stays in this thread: which GPU is current is a thread's own affair
        ahead = prefetched(run.host_batch, run.start, config.steps, config.prefetch)
        host_batch = stack.enter_context(ahead)
        return loop(
            run.step,
            run.state,
            lambda step: run.on_device(host_batch(step)),
            steps=config.steps,
            start=run.start,
            meter=meter,
            save=save,
            save_every=config.save_every,
            evaluate=run.evaluate,
            evaluate_every=config.eval_every,
            reporters=reporters(config, out, run.start) if main else [],
            agree=lambda number: int(across(number, dist.ReduceOp.MAX)),
            watch=run.watch,
            stop=stop,
        )


def seen(run: Run, steps: int) -> dict[str, Any]:
    """The samples of the first `steps` steps: ``samples``, and ``sources`` of a blend.

    By the name of a source how many of its samples these are, and how often it has come round:
    ``{"samples", "epochs"}``. Arithmetic; nothing is read.
    """
    samples = run.batches.first_sample(steps)
    found: dict[str, Any] = {"samples": samples}
    if isinstance(run.text, Blend):
        found["sources"] = run.text.progress(samples)
    return found


@contextmanager
def _saving(run: Run, out: Path, stop: Request) -> Iterator[Callable[[State, int], None]]:
    """A function that saves the state after a step; after the block all saves are complete."""
    config = run.config
    keep = checkpoint.Keep(config.keep_last or None, config.keep_every)
    folder, settings = out / run_folder.CHECKPOINTS, run_folder.settings(config)

    def timeout() -> float:  # a rank's death may be why this one is to end: it is not waited for
        limit = config.timeout_seconds
        return limit if stop.signal is None else min(limit, _HURRIED)

    with checkpoint.Saver(folder, run.plan.placement, keep=keep, timeout=timeout) as saver:

        def save(state: State, step: int) -> None:
            samples = run.batches.first_sample(step)
            about = {"step": step, "samples": samples, "tokens": samples * config.seq}
            about |= {"mesh": config.mesh, "config": settings}
            if isinstance(run.text, Blend):
                about["sources"] = run.text.positions(samples)
            saver.save(step, state, about)

        yield save


def reporters(config: TrainConfig, out: Path | None, start: int = 0) -> list[records.Reporter]:
    """Where the records of a run go: always a progress bar, and the files of the run folder.

    There, records of steps after `start`, which will be taken again, are forgotten.
    """
    found: list[records.Reporter] = [records.progress(config.steps, start)]
    if out is None:
        return found
    before = run_folder.rewind(out, start)
    found.append(records.jsonl(out / run_folder.METRICS))
    found.append(records.loss_picture(out / "loss.svg", before))
    if config.tensorboard:
        found.append(records.tensorboard(out / "tensorboard"))
    if config.wandb:
        found.append(records.wandb(out, dataclasses.asdict(config)))
    return found


def own_part(
    mesh: Mesh | BoundMesh, rows: Callable[[tuple[int, int]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """This process's part of a batch: all of it where it simulates the mesh.

    Args:
        mesh: the ranks.
        rows: makes the samples of the part ``(index, count)`` of the batch.
    """
    if not isinstance(mesh, BoundMesh):
        return rows((0, 1))
    host = rows(part_of(mesh, DATA_AXES))
    index, count = part_of(mesh, CONTEXT_AXES)
    return {
        name: x.chunk(count, 1)[index].contiguous() if x.dim() > 1 else x
        for name, x in host.items()
    }


def part_of(mesh: BoundMesh, axes: Sequence[str]) -> tuple[int, int]:
    """Which part of what `axes` split this rank gets, ``(index, count)``: row-major over them."""
    index, count = 0, 1
    for axis in axes:
        index = index * mesh[axis] + mesh.coordinate.get(axis, 0)
        count *= mesh[axis]
    return index, count
