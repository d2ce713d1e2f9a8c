"""How a training run divides its model among the ranks of a pipeline, and under which schedule."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from functron import params as parameters
from functron import tree
from functron.errors import Problem, raise_problems
from functron.lora import lora_defs, trainable
from functron.models import gpt
from functron.ops import use
from functron.optim import torch_dtype
from functron.params import ParamDef
from functron.pipeline.layout import Layout, Part, balanced_layout, even_layout, parse_layout
from functron.pipeline.partition import Partition
from functron.pipeline.registry import NAMES, make
from functron.pipeline.schedule import Schedule
from functron.pipeline.work import are_floats, floats, seeds, with_floats
from functron.program.trace import trace
from functron.spmd import DATA_AXES, FSDP_AXES, BoundMesh, Mesh, P, Rules, shard_map
from functron.spmd.shards import whole_over
from functron.spmd.spec import validate
from functron.transforms import Gather
from functron.transforms.gradient import rule_vjp

if TYPE_CHECKING:
    from functron.config import TrainConfig

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


def settings_of(config: TrainConfig, mesh: Mesh | BoundMesh) -> dict[str, Any]:
    """How the model is run, but for its key: the keyword arguments of its family's loss."""
    settings = {
        "context": context_of(config),
        "experts": config.experts,
        "kernels": use(config.kernels),
        "loss_chunk_tokens": config.loss_chunk_tokens,
    }
    return {
        "stream": stream_of(config),
        "remat": config.remat,
        "gather": gather_of(config, mesh),
        **{name: value for name, value in settings.items() if name in config.family.settings},
    }


def stage_of(config: TrainConfig, mesh: Mesh | BoundMesh, *, watch: bool = False) -> Callable:
    """``(part, params, x, batch, key, total) -> y``: a stage, the last dividing its loss.

    Args:
        config: what is to be run.
        mesh: where.
        watch: say how large the residual stream is after every layer; see `gpt.loss_and_details`.
    """
    model, settings = config.gpt, settings_of(config, mesh)

    def stage(part, params, x, batch, key, total):
        key = key if model.random else None
        y = gpt.stage_loss(model, part, params, x, batch, key=key, watch=watch, **settings)
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
