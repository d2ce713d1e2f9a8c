"""What a configuration makes of a mesh: parameters, optimizer and training step, without data.

How a training run divides its model among the ranks of a pipeline, and under which schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from functron import checkpoint, optim
from functron import params as parameters
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems
from functron.models import gpt, lora
from functron.models.lora import lora_defs, trainable
from functron.models.options import ModelOptions
from functron.ops import use
from functron.optim import torch_dtype
from functron.params import ParamDef, decay_mask, param_specs, weight_mask
from functron.pipeline.execute import pipelined
from functron.pipeline.layout import Layout, Part, balanced_layout, even_layout, parse_layout
from functron.pipeline.partition import Partition
from functron.pipeline.registry import NAMES, make
from functron.pipeline.schedule import Schedule
from functron.pipeline.work import are_floats, floats, seeds, with_floats
from functron.program.program import Program
from functron.program.trace import trace
from functron.spmd import DATA_AXES, FSDP_AXES, BoundMesh, Mesh, P, Rules, shard_map
from functron.spmd.shards import whole_over
from functron.spmd.spec import validate
from functron.training.config import TrainConfig
from functron.training.data import target_length
from functron.training.loop import Watch
from functron.training.step import State, init_state, make_pipelined_step, make_step, state_specs
from functron.transforms import Gather
from functron.transforms.gradient import rule_vjp

if TYPE_CHECKING:
    from functron.training.config import TrainConfig


_ENDS = re.compile(r"\s*(?:first=(\d+))?\s*,?\s*(?:last=(\d+))?\s*")


def schedule_for(config: TrainConfig, mesh: Mesh | BoundMesh) -> Schedule:
    """The schedule that `config` names, for the pipeline ranks of `mesh`.

    Raises:
        ValueError: there is no such schedule, or it does not admit these counts.
    """
    schedule = make(config.schedule, mesh["pp"], config.microbatches, config.chunks or None)
    if not schedule.has_backward:
        problem = Problem("schedule", f"{config.schedule}, forwards only", "one that trains")
        raise_problems("cannot train with this schedule", [problem])
    return schedule


LARGE_BUBBLE = 0.25
"""Of the time of a pipeline's ranks: from there on `bubble_note` says what would leave less."""


def bubble_note(config: TrainConfig, mesh: Mesh | BoundMesh) -> str | None:
    """How long the ranks of a pipeline wait for one another, and what makes that less.

    Schedules are timed on stages that take equally long, backward twice as long as forward. Of
    those that this model and batch admit, it names the fewest microbatches that leave less than
    `LARGE_BUBBLE` (or the most there are), and the schedule that leaves the least, with as many
    microbatches as now and with so many more: of those that hold parameters once.

    Returns:
        A line; None without a pipeline, and where it is less than `LARGE_BUBBLE`.
    """
    if mesh["pp"] == 1:
        return None
    now = schedule_for(config, mesh).bubble_fraction()
    if now < LARGE_BUBBLE:
        return None
    more = next((c for c, least in _more_microbatches(config, mesh) if least < LARGE_BUBBLE), None)
    if more is None:
        more = max(_more_microbatches(config, mesh), key=lambda row: -row[1], default=(None,))[0]
    ways = [] if more is None else [more]
    for base in (config, *ways):
        named = [replace(base, schedule=name, chunks=0) for name in NAMES if name != base.schedule]
        found = [(least, c) for c in named if (least := _bubble(c, mesh, pipes=1)) is not None]
        best = min(found, key=lambda row: row[0], default=None)
        if best is not None and best[0] < (_bubble(base, mesh) or 1.0) - 0.01:
            ways.append(best[1])
    said = ", ".join(f"{_options(config, way)}: {_bubble(way, mesh):.0%}" for way in ways)
    count = config.microbatches
    return (
        f"{config.schedule} with {count} microbatch{'es' if count > 1 else ''} a step leaves the "
        f"{mesh['pp']} ranks of the pipeline idle {now:.0%} of the time; "
        f"{f'less: {said}' if said else 'a larger --global-batch has room for more of them'}"
    )


def _more_microbatches(
    config: TrainConfig, mesh: Mesh | BoundMesh
) -> Iterator[tuple[TrainConfig, float]]:
    """The configs with more microbatches that the batch can be cut into, and their bubbles."""
    share = math.prod(mesh[axis] for axis in DATA_AXES)
    samples = math.gcd(*config.batches.sizes) // share
    for count in range(config.microbatches + 1, samples + 1):
        changed = replace(config, microbatches=count)
        if samples % count == 0 and (least := _bubble(changed, mesh)) is not None:
            yield changed, least


def _bubble(config: TrainConfig, mesh: Mesh | BoundMesh, pipes: int = 0) -> float | None:
    """The bubble of a schedule; None where it, the model or these counts do not go together.

    Args:
        config: with the schedule.
        mesh: where.
        pipes: how many times parameters are held, at most; 0: as often as it likes.
    """
    try:
        schedule = schedule_for(config, mesh)
        partition_for(config, mesh, schedule)
    except ValueError:
        return None
    return None if 0 < pipes < len(schedule.pipes) else schedule.bubble_fraction()


def _options(config: TrainConfig, changed: TrainConfig) -> str:
    """The options that make one config of another."""
    names = ("schedule", "microbatches")
    given = {name: getattr(changed, name) for name in names}
    return " ".join(
        f"--{name} {value}" for name, value in given.items() if value != getattr(config, name)
    )


def layout_for(config: TrainConfig, mesh: Mesh | BoundMesh, num_stages: int) -> Layout:
    """The layout that `config` describes, for so many stages.

    Raises:
        ValueError: it does not fit the model and the stages.
    """
    text, num_layers = config.layout, config.gpt.num_layers
    if text in ("", "even"):
        return even_layout(num_stages, num_layers)
    if text == "cost":
        embed, loss = (stage_flops(config, mesh, part) for part in _END_PARTS)
        return balanced_layout(num_stages, _layer_flops(config, mesh), embed=embed, loss=loss)
    ends = _ENDS.fullmatch(text)
    if ends is not None and any(ends.groups()):
        first, last = (int(n) if n else None for n in ends.groups())
        return even_layout(num_stages, num_layers, first=first, last=last)
    return parse_layout(text, num_layers, num_stages)


_END_PARTS = (Part(range(0), embed=True), Part(range(0), loss=True))


def partition_for(config: TrainConfig, mesh: Mesh | BoundMesh, schedule: Schedule) -> Partition:
    """Who holds which parameters under `schedule`.

    Raises:
        ValueError: the layout does not fit, the vocabulary does not divide, or a process would have
            none of the parameters that train.
    """
    layout = layout_for(config, mesh, schedule.num_stages)
    defs = defs_of(config)
    spread = {
        name: entry.axes.index("vocab")
        for name, entry in defs.items()
        if config.vocab_over_pp and isinstance(entry, ParamDef) and "vocab" in entry.axes
    }
    partition = Partition(layout, schedule.pipes, gpt.uses(config.gpt), spread)
    stored = partition.storage_specs(parameters.param_specs(defs, rules_of(config, mesh)))
    validate(parameters.abstract_params(defs), stored, mesh, what="params")
    if config.lora is not None and (config.nproc or isinstance(mesh, BoundMesh)):
        _check_trained(partition, defs)
    return partition


def _check_trained(partition: Partition, defs: dict) -> None:
    """Raise ValueError for processes without adapters: norms are summed over those with some."""
    held = {rank: partition.local(defs, rank) for rank in range(partition.num_ranks)}
    wanted = "some in every process of the pipeline"
    fix = "give one of its stages a layer that has adapters, or simulate: --nproc 0"
    idle = [
        Problem("layout", f"no parameters that train on rank {rank}", wanted, fix)
        for rank, part in held.items()
        if not tree.leaves(tree.partition(part, trainable(part))[0])
    ]
    raise_problems("cannot train adapters on this pipeline", idle)


def stream_of(config: TrainConfig) -> P:
    """The spec of the residual stream."""
    return gpt.SEQUENCE_PARALLEL_STREAM if config.sequence_parallel else gpt.STREAM


def context_of(config: TrainConfig) -> gpt.Context:
    """How attention reaches across the ranks that split sequences."""
    return gpt.Context(config.context, "zigzag" if config.zigzag else "contiguous")


def defs_of(config: TrainConfig) -> dict:
    """The parameters of the whole model, with those of LoRA where it has any.

    Raises:
        ValueError: LoRA's targets are none of its layers.
    """
    defs = config.family.defs(config.architecture)
    return defs if config.lora is None else lora_defs(defs, config.lora)


def rules_of(config: TrainConfig, mesh: Mesh | BoundMesh) -> Rules:
    """How the parameters are split over `mesh`.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    axes = ("dp", "fsdp") if config.zero == 3 else ("fsdp",)
    family, settings = config.family, {"experts": config.experts}
    chosen = {name: value for name, value in settings.items() if name in family.rules_settings}
    return family.rules(config.architecture, mesh, fsdp=axes, **chosen)


def gather_of(config: TrainConfig, mesh: Mesh | BoundMesh) -> Gather:
    """How parameters that data axes split are gathered where they are used."""
    if config.gather == "step":
        return gpt.WHOLE  # the step has gathered them
    return Gather(
        parameters.param_specs(defs_of(config), rules_of(config, mesh)),
        regather=config.gather == "use",
        reduce_dtype=torch_dtype(config.optimizer.reduce_dtype),
    )


def used_specs(config: TrainConfig, specs: tree.Tree) -> tree.Tree:
    """The specs with which a step's microbatches get parameters of `specs`: perhaps gathered."""
    return whole_over(specs, FSDP_AXES) if config.gather == "step" else specs


def settings_of(config: TrainConfig, mesh: Mesh | BoundMesh) -> ModelOptions:
    """How the model is run: the options of its family's loss."""
    settings = {
        "context": context_of(config),
        "experts": config.experts,
        "kernels": use(config.kernels),
        "loss_chunk_tokens": config.loss_chunk_tokens,
    }
    own: dict[str, Any] = {k: v for k, v in settings.items() if k in config.family.settings}
    return ModelOptions(stream_of(config), config.remat, gather_of(config, mesh), **own)


def stage_of(config: TrainConfig, mesh: Mesh | BoundMesh, *, watch: bool = False) -> Callable:
    """``(part, params, x, batch, key, total) -> y``: a stage, the last dividing its loss.

    Args:
        config: what is to be run.
        mesh: where.
        watch: measure the residual stream after every layer; see `ModelOptions`.
    """
    model, options = config.gpt, replace(settings_of(config, mesh), watch=watch)

    def stage(part, params, x, batch, key, total):
        key = key if model.random else None
        y = gpt.stage_loss(model, part, params, x, batch, options, key=key)
        if not part.loss:
            return y
        return (y[0] / total, y[1]) if isinstance(y, tuple) else y / total

    return stage


def _layer_flops(config: TrainConfig, mesh: Mesh | BoundMesh) -> list[float]:
    """Of every layer; of those with rows in the same stacks only one is traced."""
    known: dict[tuple, float] = {}
    out = []
    for layer in range(config.gpt.num_layers):
        part = Part(range(layer, layer + 1))
        kind = Partition((part,), (((0, 0),),), gpt.uses(config.gpt)).kind(0)
        if kind not in known:
            known[kind] = stage_flops(config, mesh, part)
        out.append(known[kind])
    return out


def stage_flops(config: TrainConfig, mesh: Mesh | BoundMesh, part: Part) -> float:
    """Floating-point operations of one rank for one microbatch of a part, forward and backward.

    Counted in the program that is traced for it; nothing is computed.
    """
    model = config.gpt
    plain = (mesh.mesh if isinstance(mesh, BoundMesh) else mesh).without("pp")
    whole = Partition((part,), (((0, 0),),), gpt.uses(model))
    defs = defs_of(config)
    names = whole.names(0)
    specs = used_specs(config, parameters.param_specs(defs, rules_of(config, plain)))
    weights = parameters.abstract_params({name: defs[name] for name in names})
    weights = whole.stage_params(weights, 0, None)
    rows = config.global_batch // config.microbatches
    tokens = torch.empty(rows, config.seq, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    x = torch.empty(rows, config.seq, model.embed_dim, dtype=model.torch_dtype, device="meta")
    stream = stream_of(config)
    key = torch.empty(2, dtype=torch.int64, device="meta")

    def both(weights, x, batch, key):
        f = functools.partial(stage_of(config, plain), part)
        y, pull = rule_vjp(lambda w, x: f(w, x, batch, key, 1), weights, x)
        ones = with_floats(are_floats(y), [torch.ones_like(leaf) for leaf in floats(y)])
        return pull(seeds(y) if part.loss else ones)

    kept = {name: specs[name] for name in names}
    mapped = shard_map(both, plain, (kept, stream, gpt.batch_specs(), P()), P(), check=False)
    return trace(mapped)(weights, x, batch, key).cost().hardware_flops


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
    defs = defs_of(config)
    specs = param_specs(defs, rules_of(config, mesh))
    optimizer = make_optimizer(config, defs, specs, mesh)
    settings = settings_of(config, mesh)

    def make(layers: optim.Layers | None) -> Callable:
        # of other families nothing says how large the stream is after a layer
        watch = layers is not None and family.name == "gpt"
        details = watch or family.has_details(model)
        options = replace(settings, watch=watch)
        summed: Callable = gpt.loss_and_details if details else family.loss

        def loss(params, batch, key):
            return summed(model, params, batch, options, key=key if model.random else None)

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
    schedule = schedule_for(config, mesh)
    partition = partition_for(config, mesh, schedule)
    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    whole = defs_of(config)
    defs = partition.local_defs(whole, rank)
    specs = param_specs(defs, rules_of(config, mesh))
    parts = _parts(config, defs, specs, mesh, None if rank is None else partition)
    optimizer = make_optimizer(config, defs, specs, mesh, partition.copies(rank), parts)

    def make(layers: optim.Layers | None) -> Callable:
        stages = pipelined(
            stage_of(config, mesh, watch=layers is not None),
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
        whole=defs_of(config),
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
    whole, rules = defs_of(config), rules_of(config, mesh)
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
