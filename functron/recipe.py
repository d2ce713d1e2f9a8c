"""What a configuration makes of a mesh: parameters, optimizer and training step, without data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from functron import checkpoint, lora, optim, random, staging, tree
from functron.config import TrainConfig
from functron.models import gpt
from functron.objective import target_length
from functron.ops import use
from functron.params import decay_mask, param_specs, weight_mask
from functron.pipeline.execute import pipelined
from functron.pipeline.partition import Partition
from functron.program.program import Program
from functron.program.trace import trace
from functron.spmd import BoundMesh, Mesh, P, shard_map
from functron.spmd.shards import whole_over
from functron.step import State, init_state, make_pipelined_step, make_step, state_specs
from functron.watch import Watch


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training step and what it takes to make its state, put together by `assemble`.

    Attributes:
        defs: the definitions of the parameters that this process holds.
        specs: how they are split on the mesh between steps.
        optimizer: the gradient transformation.
        step: ``(state, batch) -> (state, metrics)``.
        partition: who holds which parameters, where ranks of a pipeline do.
        watch: the twin of `step` that says more, where it is asked for.
        averaged: ``state -> params``, the averages that the optimizer keeps; None: it keeps none.
        masters: whether the optimizer keeps float32 masters, of which the first parameters are the
            rounded values.
    """

    defs: tree.Tree
    specs: tree.Tree
    optimizer: optim.GradientTransformation
    step: Callable
    partition: Partition | None = None
    watch: Watch | None = None
    averaged: Callable | None = None
    masters: bool = False

    def init(self, key: torch.Tensor, mesh: Mesh | BoundMesh, params: tree.Tree = None) -> State:
        """The state before the first step, with these parameters or random ones.

        Where the optimizer keeps masters, parameters in float32 are taken for these.
        """
        make = functools.partial(init_state, key, self.defs, self.specs, self.optimizer, mesh)
        if not self.masters:
            return make(params)
        if params is None:
            return make(masters=True)
        rows = zip(tree.leaves(params), tree.leaves(self.defs), strict=True)
        rounded = all(leaf.dtype == d.dtype for leaf, d in rows)
        return make(params) if rounded else make(masters=params)


def assemble(config: TrainConfig, mesh: Mesh | BoundMesh) -> Recipe:
    """The step that `config` describes on `mesh`, without state or data.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    model, family = config.architecture, config.family
    if mesh["pp"] > 1:
        return _assemble_pipeline(config, mesh)
    defs = staging.defs_of(config)
    specs = param_specs(defs, staging.rules_of(config, mesh))
    optimizer = make_optimizer(config, defs, specs, mesh)
    settings = staging.settings_of(config, mesh)

    def make(layers: optim.Layers | None) -> Callable:
        # of other families nothing says how large the stream is after a layer
        watch = layers is not None and family.name == "gpt"
        details = watch or family.has_details(model)
        more = functools.partial(gpt.loss_and_details, config.gpt, watch=watch)
        summed = more if details else functools.partial(family.loss, model)

        def loss(params, batch, key):
            return summed(params, batch, key=key if model.random else None, **settings)

        return make_step(
            loss,
            family.num_targets,
            optimizer,
            mesh,
            specs,
            num_microbatches=config.microbatches,
            scatter=config.zero == 2,
            hoist=config.gather == "step",
            grad_dtype=optim.torch_dtype(config.optimizer.grad_dtype),
            reduce_dtype=optim.torch_dtype(config.optimizer.reduce_dtype),
            trainable=trained(config, defs),
            batch_specs=gpt.batch_specs(packed=config.packed),
            normed=weight_mask(defs),
            kernels=use(config.kernels),
            has_aux=details,
            layers=layers,
            check=False,  # the losses of families are sums
        )

    averaged = _averaged(config, mesh, specs, optimizer, _parts(config, defs, specs, mesh))
    watch = _watch(config, defs, make)
    keeps = config.optimizer.fp32_masters
    return Recipe(defs, specs, optimizer, make(None), watch=watch, averaged=averaged, masters=keeps)


def _watch(
    config: TrainConfig,
    defs: tree.Tree,
    make: Callable,
    rows: Mapping[str, Sequence[int]] | None = None,
) -> Watch | None:
    """The step that says more, if it is asked for, as `make` makes it of `optim.Layers`.

    Args:
        config: what is to be run.
        defs: of the whole model.
        make: ``layers -> step``.
        rows: which layers this process holds; see `optim.layers_of`.
    """
    if not config.log_layers_every:
        return None
    chosen, _ = tree.partition(defs, trained(config, defs))
    layers = optim.layers_of(tree.partition(chosen, weight_mask(defs))[0], rows)
    names = gpt.watched_names(config.gpt) if config.family.name == "gpt" else ()
    return Watch(make(layers), config.log_layers_every, layers.names, names)


def _assemble_pipeline(config: TrainConfig, mesh: Mesh | BoundMesh) -> Recipe:
    schedule = staging.schedule_for(config, mesh)
    partition = staging.partition_for(config, mesh, schedule)
    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    whole = staging.defs_of(config)
    defs = partition.local_defs(whole, rank)
    specs = param_specs(defs, staging.rules_of(config, mesh))
    parts = _parts(config, defs, specs, mesh, None if rank is None else partition)
    optimizer = make_optimizer(config, defs, specs, mesh, partition.copies(rank), parts)

    def make(layers: optim.Layers | None) -> Callable:
        stages = pipelined(
            staging.stage_of(config, mesh, watch=layers is not None),
            partition,
            schedule,
            dtype=optim.torch_dtype(config.optimizer.grad_dtype),
            compile={} if config.compile else None,
        )
        return make_pipelined_step(
            stages,
            gpt.num_targets,
            optimizer,
            mesh,
            specs,
            compile=config.compile,
            scatter=config.zero == 2,
            hoist=config.gather == "step",
            trainable=trained(config, defs),
            reduce_dtype=optim.torch_dtype(config.optimizer.reduce_dtype),
            batch_specs=gpt.batch_specs(packed=config.packed),
            normed=weight_mask(defs),
            layers=layers,
            kernels=use(config.kernels),
            check=False,
        )

    stacked = (name for name in whole if partition.stack(name) is not None)
    rows = {name: partition.rows(name, rank) for name in stacked}
    stored = specs if rank is None else partition.storage_specs(specs)
    watch = _watch(config, whole, make, rows)
    averaged = _averaged(config, mesh, specs, optimizer, parts)
    keeps = config.optimizer.fp32_masters
    return Recipe(defs, stored, optimizer, make(None), partition, watch, averaged, keeps)


def _averaged(
    config: TrainConfig,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    optimizer: optim.GradientTransformation,
    parts: tree.Tree,
) -> Callable | None:
    """What reads the averages of parameters out of a state; None where it has none."""
    if not config.optimizer.ema_decay:
        return None

    def read(state: State) -> tree.Tree:
        return optim.averaged(state.opt_state, state.params, specs, parts)

    stages = "pp" if mesh["pp"] > 1 else None
    return shard_map(read, mesh, (state_specs(specs, optimizer),), specs, stages=stages)


def trained(config: TrainConfig, defs: tree.Tree) -> tree.Tree:
    """Which parameters train: True, or a tree of bools."""
    return True if config.lora is None else lora.trainable(defs)


def make_optimizer(
    config: TrainConfig,
    defs: tree.Tree,
    specs: tree.Tree,
    mesh: Mesh | BoundMesh,
    copies: tree.Tree = 1,
    parts: tree.Tree = None,
) -> optim.GradientTransformation:
    """The optimizer of `config` for parameters with these defs and specs.

    Args:
        config: what is to be run.
        defs: of the parameters that this process holds.
        specs: how they are split.
        mesh: over which ranks.
        copies: how many ranks of a pipeline hold each of them.
        parts: how ZeRO's optimizer state is split, where processes of a pipeline divide some
            parameters; None: as `optim.shard_specs` says.
    """
    parts = _parts(config, defs, specs, mesh) if parts is None else parts
    weights, frozen = weight_mask(defs), config.lora is not None
    mask = trained(config, defs) if frozen else weights
    defs, _ = tree.partition(defs, mask)
    made = optim.make_optimizer(
        config.optimizer,
        optim.make_schedule(config.rate_schedule),
        specs=specs,
        copies=copies,
        mask=decay_mask(defs),
        defs=defs,
        whole=staging.defs_of(config),
        shards=parts,
        mesh=mesh,
        total_steps=config.rate_schedule.total_steps,
        kernels=use(config.kernels),
    )
    if frozen:
        return optim.masked(made, mask)
    moe = config.gpt.moe
    if moe is None or not moe.balance_bias:
        return made
    return optim.where(weights, made, optim.sign_sgd(moe.balance_rate))


def _parts(
    config: TrainConfig,
    defs: tree.Tree,
    specs: tree.Tree,
    mesh: Mesh | BoundMesh,
    partition: Partition | None = None,
) -> tree.Tree:
    """How ZeRO's optimizer state is split of what a rank of the pipeline holds between steps."""
    if config.zero not in (1, 2):
        return None
    stored = specs if partition is None else partition.storage_specs(specs)
    return whole_over(optim.shard_specs(defs, stored, mesh), ("pp",))


def placement(
    config: TrainConfig, mesh: Mesh | BoundMesh, partition: Partition | None = None
) -> checkpoint.Placement:
    """Where each part of the whole state lies between steps of `assemble`'s step.

    Args:
        config: what is to be run.
        mesh: where.
        partition: who holds which parameters, where the ranks of a pipeline are processes; None:
            one process has what all of them hold.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    whole, rules = staging.defs_of(config), staging.rules_of(config, mesh)
    local = [whole]
    if partition is not None:
        local = [partition.local_defs(whole, rank) for rank in range(mesh["pp"])]
    specs, parts = {}, {}
    for defs in local:  # ZeRO goes by the shapes that a rank of the pipeline has
        held = param_specs(defs, rules)
        specs |= held
        parts |= _parts(config, defs, held, mesh, partition) or {}
    optimizer = make_optimizer(config, whole, specs, mesh, parts=parts or None)
    stored = partition.storage_specs(specs) if partition else specs
    plain = make_optimizer(dataclasses.replace(config, zero=0), whole, P(), Mesh())
    like = init_state(random.key(0).to("meta"), whole, P(), plain, Mesh())
    found = checkpoint.place(like, state_specs(stored, optimizer), mesh, partition)
    return found if partition is None else dataclasses.replace(found, rank=found.here)


def step_program(config: TrainConfig, mesh: Mesh) -> Program:
    """One rank's program of the training step that `config` describes; needs no memory or data.

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    recipe = assemble(config, mesh)
    state = recipe.init(random.key(config.seed).to("meta"), mesh)
    rows = torch.empty(config.global_batch, dtype=torch.int64, device="meta")
    tokens = rows.new_empty(config.global_batch, config.seq)
    targets = rows.new_empty(config.global_batch, target_length(config))
    batch = {"tokens": tokens, "targets": targets, "rows": rows}
    if config.packed:
        batch |= {"positions": tokens, "segments": tokens}
    return trace(recipe.step, donate=0)(state, batch)
