"""What a configuration makes of a mesh: parameters, optimizer and training step, without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from functron import checkpoint, optim, random, staging, tree
from functron.config import TrainConfig
from functron.models import gpt
from functron.params import decay_mask, param_specs
from functron.pipeline.execute import pipelined
from functron.pipeline.partition import Partition
from functron.program.program import Program
from functron.program.trace import trace
from functron.spmd import BoundMesh, Mesh, P
from functron.step import State, init_state, make_pipelined_step, make_step, state_specs


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training step and what it takes to make its state, put together by `assemble`.

    Attributes:
        defs: the definitions of the parameters that this process holds.
        specs: how they are split on the mesh between steps.
        optimizer: the gradient transformation.
        step: ``(state, batch) -> (state, metrics)``.
        partition: who holds which parameters, where ranks of a pipeline do.
    """

    defs: tree.Tree
    specs: tree.Tree
    optimizer: optim.GradientTransformation
    step: Callable
    partition: Partition | None = None

    def init(self, key: torch.Tensor, mesh: Mesh | BoundMesh) -> State:
        """The state before the first step."""
        return init_state(key, self.defs, self.specs, self.optimizer, mesh)


def assemble(config: TrainConfig, mesh: Mesh | BoundMesh) -> Recipe:
    """The step that `config` describes on `mesh`, without state or data.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    model = config.gpt
    if mesh["pp"] > 1:
        return _assemble_pipeline(config, mesh)
    defs = gpt.defs(model)
    specs = param_specs(defs, gpt.rules(model, mesh))
    optimizer = make_optimizer(config, defs, specs, _parts(config, defs, specs, mesh))

    def loss(params, batch, key):
        key = key if model.dropout else None
        stream = staging.stream_of(config)
        return gpt.loss(model, params, batch, key=key, stream=stream, remat=config.remat)

    step = make_step(
        loss,
        gpt.num_targets,
        optimizer,
        mesh,
        specs,
        num_microbatches=config.microbatches,
        scatter=config.zero == 2,
    )
    return Recipe(defs, specs, optimizer, step)


def _assemble_pipeline(config: TrainConfig, mesh: Mesh | BoundMesh) -> Recipe:
    schedule = staging.schedule_for(config, mesh)
    partition = staging.partition_for(config, mesh, schedule)
    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    defs = partition.local_defs(gpt.defs(config.gpt), rank)
    specs = param_specs(defs, gpt.rules(config.gpt, mesh))
    parts = _parts(config, defs, specs, mesh)
    optimizer = make_optimizer(config, defs, specs, parts, partition.copies(rank))
    settings = {} if config.compile else None
    stages = pipelined(staging.stage_of(config), partition, schedule, compile=settings)
    step = make_pipelined_step(
        stages,
        gpt.num_targets,
        optimizer,
        mesh,
        specs,
        compile=config.compile,
        scatter=config.zero == 2,
    )
    stored = specs if rank is None else partition.storage_specs(specs)
    return Recipe(defs, stored, optimizer, step, partition)


def make_optimizer(
    config: TrainConfig,
    defs: tree.Tree,
    specs: tree.Tree,
    parts: tree.Tree,
    copies: tree.Tree = 1,
) -> optim.GradientTransformation:
    """The optimizer of `config` for parameters with these defs and specs.

    Args:
        config: what is to be run.
        defs: of the parameters that this process holds.
        specs: how they are split.
        parts: how their optimizer state is; see `optim.shard_specs`.
        copies: how many ranks of a pipeline hold each of them.
    """
    schedule = optim.make_schedule(config.rate_schedule)
    inner = optim.make_optimizer(
        config.optimizer, schedule, specs=parts, copies=copies, mask=decay_mask(defs)
    )
    return optim.zero(inner, specs, parts) if config.zero else inner


def _parts(
    config: TrainConfig, defs: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh
) -> tree.Tree:
    return optim.shard_specs(defs, specs, mesh) if config.zero else specs


def placement(config: TrainConfig, mesh: Mesh | BoundMesh) -> checkpoint.Placement:
    """Where each part of the whole state lies between steps of `assemble`'s step.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    whole, rules = gpt.defs(config.gpt), gpt.rules(config.gpt, mesh)
    partition, local = None, [whole]
    if mesh["pp"] > 1 and isinstance(mesh, BoundMesh):
        partition = staging.partition_for(config, mesh, staging.schedule_for(config, mesh))
        local = [partition.local_defs(whole, rank) for rank in range(mesh["pp"])]
    specs, parts = {}, {}
    for defs in local:
        held = param_specs(defs, rules)
        specs |= held
        parts |= _parts(config, defs, held, mesh)
    optimizer = make_optimizer(config, whole, specs, parts)
    stored = partition.storage_specs(specs) if partition else specs
    plain = make_optimizer(dataclasses.replace(config, zero=0), whole, P(), P())
    like = init_state(random.key(0).to("meta"), whole, P(), plain, Mesh())
    return checkpoint.place(like, state_specs(stored, optimizer), mesh, partition)


def step_program(config: TrainConfig, mesh: Mesh) -> Program:
    """One rank's program of the training step that `config` describes; needs no memory or data.

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    recipe = assemble(config, mesh)
    state = recipe.init(random.key(config.seed).to("meta"), mesh)
    rows = torch.empty(config.global_batch, dtype=torch.int64, device="meta")
    tokens = rows.new_empty(config.global_batch, config.seq)
    batch = {"tokens": tokens, "targets": tokens, "rows": rows}
    return trace(recipe.step, donate=0)(state, batch)
