"""The loss of held-out data on the run's mesh: the forwards of what the training step runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functron import staging, tree
from functron.config import TrainConfig
from functron.held_out import HeldOut
from functron.models import gpt
from functron.params import abstract_params, param_specs
from functron.pipeline.execute import pipelined
from functron.program.jit import jit
from functron.program.trace import trace
from functron.spmd import BoundMesh, Mesh, P, shard_map
from functron.step import gathered
from functron.transforms import accumulate


def loss_program(config: TrainConfig, mesh: Mesh | BoundMesh) -> Callable:
    """The function ``(params, batch) -> (sum, count)`` of a batch's targets, replicated.

    ``sum = sum of -log p(target)`` over the targets of the batch of all ranks, in float32 at least;
    ``count``, int64, how many there are. It is the cross-entropy of the next token alone: without
    dropout and jitter, without z-loss, and without losses of routers and of tokens further ahead.

    Parameters and batches are those of the run's step, split and cut into microbatches as there;
    the forwards of a pipeline's schedule are run, and stages on processes not compiled.

    Collectives: those of the model's forward and of gathering parameters.

    Args:
        config: the run.
        mesh: simulated (global values) or bound (this rank's shards).

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    staged = mesh["pp"] > 1
    program, specs = (_of_stages if staged else _of_all)(config, mesh)
    used = staging.used_specs(config, specs)

    def counted(params: tree.Tree, batch: gpt.Batch) -> tuple:
        return program(gathered(params, specs, used), batch), config.family.num_targets(batch)

    batches = gpt.batch_specs(packed=config.packed)
    stages = "pp" if staged else None
    mapped = shard_map(counted, mesh, (specs, batches), (P(), P()), stages=stages)
    if config.compile and not (staged and isinstance(mesh, BoundMesh)):
        mapped = jit(mapped)

    def without_gradients(params: tree.Tree, batch: gpt.Batch) -> tuple:
        with torch.no_grad():
            return mapped(params, batch)

    return without_gradients


def loss_memory_bytes(config: TrainConfig, mesh: Mesh | BoundMesh, rows: int, seq: int) -> int:
    """The most that `loss_program` holds at once in a process, of its traced program.

    Of a pipeline it is that of a rank with all layers, which is more than any of its ranks holds.

    Args:
        config: the run.
        mesh: simulated, whose ranks one process has together, or bound.
        rows: of a batch, over all ranks.
        seq: tokens of each.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    bound = isinstance(mesh, BoundMesh)
    plain = (mesh.mesh if isinstance(mesh, BoundMesh) else mesh).without("pp")
    config = dataclasses.replace(config, mesh=str(plain), microbatches=1)
    program, specs = _of_all(config, plain)
    batches = gpt.batch_specs(packed=False)
    mapped = shard_map(program, plain, (specs, batches), P())
    params = abstract_params(staging.defs_of(config))
    tokens = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    return trace(mapped, simulate=not bound)(params, batch).memory().peak_bytes


def _of_all(config: TrainConfig, mesh: Mesh | BoundMesh) -> tuple[Callable, tree.Tree]:
    """The sum over microbatches of a model that every rank has all layers of, and its specs."""
    model, settings = _plain(config, mesh)
    family = config.family
    loss: Callable = gpt.loss_and_details if family.has_details(model) else family.loss

    def microbatch(params, batch):
        return _next_token(loss(model, params, batch, **settings))

    specs = param_specs(staging.defs_of(config), staging.rules_of(config, mesh))
    return accumulate(microbatch, config.microbatches), specs


def _of_stages(config: TrainConfig, mesh: Mesh | BoundMesh) -> tuple[Callable, tree.Tree]:
    """The sum over microbatches of a model in stages, and the specs of what this process holds."""
    model, settings = _plain(config, mesh)
    schedule = staging.schedule_for(config, mesh)
    partition = staging.partition_for(config, mesh, schedule)

    def stage(part, params, x, batch):
        y = gpt.stage_loss(model, part, params, x, batch, **settings)
        return _next_token(y) if part.loss else y

    stages = pipelined(stage, partition, schedule.forward_only())

    def program(params, batch):
        return sum(stages.forward(params, batch))

    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    defs = partition.local_defs(staging.defs_of(config), rank)
    return program, param_specs(defs, staging.rules_of(config, mesh))


def _plain(config: TrainConfig, mesh: Mesh | BoundMesh) -> tuple[Any, dict[str, Any]]:
    """The model and how to run it, without what only training needs."""
    model = config.architecture
    if isinstance(model, gpt.GPTConfig):
        model = dataclasses.replace(model, z_loss=0.0, mtp_depth=0)
    return model, {**staging.settings_of(config, mesh), "key": None, "remat": "none"}


def _next_token(y: Any) -> torch.Tensor:
    """The loss of the next token out of what a model returns."""
    return y[1]["next_token"] if isinstance(y, tuple) else y


def evaluate(
    program: Callable,
    params: tree.Tree,
    sets: Sequence[HeldOut],
    batch: Callable[[HeldOut, int], dict[str, torch.Tensor]],
) -> dict[str, dict[str, float]]:
    """The mean loss of every set, ``sum / count`` over all of its batches, added up in float64.

    Args:
        program: of `loss_program`.
        params: of the run.
        sets: what to evaluate.
        batch: this process's part of a set's batch of this number, where `params` are.

    Returns:
        By name, ``loss`` in nats per target, ``perplexity``, its exponential, and ``tokens``, the
        number of targets. A set without targets has a loss that is not a number.
    """
    found = {}
    for held_out in sets:
        total = count = 0.0
        for index in range(held_out.num_batches):
            summed, targets = program(params, batch(held_out, index))
            total, count = total + summed.double(), count + targets
        total, count = float(total), int(count)
        loss = total / count if count else math.nan
        # e^709 is the largest that a float64 holds
        perplexity = math.exp(loss) if not loss > 709 else math.inf
        found[held_out.name] = {"loss": loss, "perplexity": perplexity, "tokens": count}
    return found
