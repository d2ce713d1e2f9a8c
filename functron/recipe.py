"""What a configuration makes of a mesh: parameters, optimizer and training step, without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from functron import optim, random, staging, tree
from functron.config import TrainConfig
from functron.models import gpt
from functron.params import decay_mask, param_specs
from functron.pipeline.execute import pipelined
from functron.pipeline.partition import Partition
from functron.program.program import Program
from functron.program.trace import trace
from functron.spmd import BoundMesh, Mesh
from functron.step import State, init_state, make_pipelined_step, make_step


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
    optimizer = make_optimizer(config, defs, specs)

    def loss(params, batch, key):
        key = key if model.dropout else None
        stream = staging.stream_of(config)
        return gpt.loss(model, params, batch, key=key, stream=stream, remat=config.remat)

    step = make_step(
        loss, gpt.num_targets, optimizer, mesh, specs, num_microbatches=config.microbatches
    )
    return Recipe(defs, specs, optimizer, step)


def _assemble_pipeline(config: TrainConfig, mesh: Mesh | BoundMesh) -> Recipe:
    schedule = staging.schedule_for(config, mesh)
    partition = staging.partition_for(config, mesh, schedule)
    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    defs = partition.local_defs(gpt.defs(config.gpt), rank)
    specs = param_specs(defs, gpt.rules(config.gpt, mesh))
    optimizer = make_optimizer(config, defs, specs, partition.copies(rank))
    settings = {} if config.compile else None
    stages = pipelined(staging.stage_of(config), partition, schedule, compile=settings)
    step = make_pipelined_step(
        stages, gpt.num_targets, optimizer, mesh, specs, compile=config.compile
    )
    stored = specs if rank is None else partition.storage_specs(specs)
    return Recipe(defs, stored, optimizer, step, partition)


def make_optimizer(
    config: TrainConfig, defs: tree.Tree, specs: tree.Tree, copies: tree.Tree = 1
) -> optim.GradientTransformation:
    """The optimizer of `config` for parameters with these defs and specs.

    Args:
        config: what is to be run.
        defs: of the parameters that this process holds.
        specs: how they are split.
        copies: how many ranks of a pipeline hold each of them.
    """
    schedule = optim.make_schedule(config.rate_schedule)
    return optim.make_optimizer(
        config.optimizer, schedule, specs=specs, copies=copies, mask=decay_mask(defs)
    )


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
