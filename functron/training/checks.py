"""The checks of a configuration: all that is wrong with it at once, before anything is started."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron.checkpoint.memory import axis_of
from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.core.settings import (
    Need,
    Needs,
    fields_under,
    names_with_tag,
    needs_of,
    needs_under,
    number_problems,
    sections_of,
    unused_problems,
    value_at,
)
from functron.data.blend import is_blend
from functron.data.sampling import ARITHMETIC, Gaps, RampUp
from functron.models.family import differing_fields, field_text, list_presets, trained_families
from functron.optim import (
    group_problems,
    optimizer_problems,
    parse_groups,
    schedule_problems,
    width_problems,
)
from functron.optim.config import OPTIMIZER_NEEDS, SCHEDULE_NEEDS
from functron.pipeline.partition import Part
from functron.precision import POLICIES
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.training import data, evaluation, records, run_folder
from functron.training.config import TrainConfig, configure, load, with_model, with_precision
from functron.training.resume import recipe_text
from functron.training.setup import RunSetup, has_experts, offload_problems, with_additions

_OFF = "leave it out, or train a GPT"
_ALL_LOGITS = "0: logits of all tokens at once"


def problems_of(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """Settings that the family of `config` does not have.

    Args:
        config: what is to be run.
        mesh: its mesh; None: that cannot be read.

    Raises:
        ValueError: `data` is a blend that is written wrongly.
    """
    family, architecture = config.family, config.architecture
    default = TrainConfig()
    for name, other in trained_families().items():
        given = getattr(config, name)
        if given is not None and given is not architecture and given != getattr(default, name):
            wanted = f"nothing beside [{family.name}]: one run trains one architecture"
            fix = f"leave it out, or name a preset that is {other.title}"
            yield Problem(name, f"settings of {other.title}", wanted, fix)
    yield from data.objective_problems(config, mesh)
    longest = getattr(architecture, "max_seq", config.data.seq)
    if config.data.seq > longest:
        most = f"{family.name}.max_seq"
        fix = f"shorten the samples or raise {most}"
        yield Problem("seq", str(config.data.seq), f"at most {most}={longest}", fix)
    fewer = "leave it out; more microbatches save as much"
    for name, known, wanted, fix in (
        ("lora_rank", family.adapters, "a GPT", "train all parameters: leave it out"),
        ("loss_chunk_tokens", "loss_chunk_tokens" in family.settings, _ALL_LOGITS, fewer),
        ("mask_documents", family.packs, "a GPT", _OFF),
        ("pack", family.packs, "a GPT", _OFF),
    ):
        if not known and (value := value_at(config, name)):
            yield Problem(name, f"{value} with {family.title}", wanted, fix)
    if config.compute.loss_chunk_tokens and config.gpt.logit_cap:
        got = f"{config.compute.loss_chunk_tokens} with gpt.logit_cap"
        yield Problem("loss_chunk_tokens", got, "0: capped logits are made at once", "leave it out")
    if data.is_chat(config) and not data.objective_of(config).predicts_next:
        got, fix = f"conversations for {family.title}", "read them as text: --format text"
        yield Problem("data", got, "text or tokens", fix)


def _axis(config: TrainConfig, name: str) -> int:
    """The size of an axis of the mesh; any where that cannot be read, which is said elsewhere."""
    try:
        return Mesh.parse(config.parallelism.mesh)[name]
    except ValueError:
        return 2


_PROCESSES = Need(
    lambda c: c.parallelism.nproc > 0, "a run on processes", "start them: --nproc N, or torchrun"
)
_PIPELINE = Need(lambda c: _axis(c, "pp") > 1, "pp in the mesh", "add pp=N")
_SPLIT_SEQUENCES = Need(
    lambda c: _axis(c, "cp") > 1, "cp in the mesh, which splits sequences", "add cp=N"
)
_SHARED_SEQUENCES = dataclasses.replace(
    _SPLIT_SEQUENCES,
    holds=lambda c: (
        _axis(c, "cp") > 1 or (c.parallelism.context == "dynamic" and _axis(c, "ulysses") > 1)
    ),
)


def _unless_usual(path: str, need: Need) -> Need:
    """The need of every word but the usual one, such as "1f1b", which asks for nothing."""
    usual = value_at(TrainConfig(), path)
    return dataclasses.replace(need, holds=lambda c: value_at(c, path) == usual or need.holds(c))


TRAIN_NEEDS: Needs = MappingProxyType({
    **needs_of(TrainConfig),
    "tokenizer_pattern": Need(
        lambda c: run_folder.tokenizer_path(c) is not None, "a .tiktoken file", "name a tokenizer"
    ),
    "overlong": Need(data.is_chat, "conversations", "name some: --data FILE.jsonl"),
    **dict.fromkeys(("timeout_seconds", "check_programs"), _PROCESSES),
    **dict.fromkeys(("chunks", "layout", "vocab_over_pp"), _PIPELINE),
    "schedule": _unless_usual("schedule", _PIPELINE),
    "context": _unless_usual("context", _SHARED_SEQUENCES),
    "expert_axes": _unless_usual(
        "expert_axes",
        Need(lambda c: c.gpt.moe is not None, "experts", "choose a model with some"),
    ),
    "expert_room": Need(has_experts, "experts", "choose a model with some"),
    "uneven": Need(
        lambda c: (
            c.parallelism.zero == 3
            or any(_axis(c, n) > 1 for n in ("tp", "fsdp", *c.parallelism.expert_axis_names))
        ),
        "ranks that split parameters",
        "add tp=N or fsdp=N to the mesh",
    ),
    "gather": _unless_usual(
        "gather",
        Need(
            lambda c: _axis(c, "fsdp") > 1 or c.parallelism.zero == 3,
            "ranks that hold parts of parameters",
            "add fsdp=N to the mesh, or --zero 3",
        ),
    ),
    "blend_order": Need(
        lambda c: c.data.order == ARITHMETIC and is_blend(c.data.path),
        "a blend in the order of functron",
        "name one: --data",
    ),
    "change_batch": Need(lambda c: bool(c.resume), "a run that goes on", "add --resume"),
    "sequence_parallel": Need(
        lambda c: _axis(c, "tp") > 1, "tp in the mesh, which it splits sequences over", "add tp=N"
    ),
    "zigzag": _SPLIT_SEQUENCES,
    "gpt.moe.dispatch": Need(
        lambda c: any(_axis(c, axis) > 1 for axis in c.parallelism.expert_axis_names),
        "experts that ranks divide",
        "add ep=N to the mesh",
    ),
    "learning_rate.total_steps": Need(
        lambda c: (
            SCHEDULE_NEEDS["total_steps"].holds(c.learning_rate)
            or c.optimizer.weight_decay_incr_style != "constant"
        ),
        SCHEDULE_NEEDS["total_steps"].wanted,
        SCHEDULE_NEEDS["total_steps"].fix,
    ),
    **{
        path: need
        for name, family in trained_families().items()
        for path, need in needs_under(
            name,
            family.needs,
            lambda c, name=name: c.architecture if c.family.name == name else None,
        ).items()
    },
    **needs_under("optimizer", OPTIMIZER_NEEDS),
    **needs_under(
        "learning_rate",
        {name: need for name, need in SCHEDULE_NEEDS.items() if name != "total_steps"},
        lambda c: c.rate_schedule,
    ),
    "learning_rate": Need(
        lambda c: c.reads_rate,
        "an optimizer that takes its rate from a schedule",
        "leave --optimizer.adafactor.relative-step out",
    ),
})  # fmt: skip
"""Conditions for settings of a `TrainConfig` to have an effect, where no other check says so: as
sections declare them, and of more than one section."""


_RESTORING = " or ".join(
    family.title
    for family in trained_families().values()
    if family.objective and not family.objective.predicts_next
)

TOLD_NEEDS: Needs = MappingProxyType({
    **data.DATA_NEEDS,
    **{
        name: Need(
            lambda c, name=name: name not in data.useless_of(c),
            "a model that restores tokens",
            f"choose {_RESTORING}" if _RESTORING else "",
        )
        for name in names_with_tag(TrainConfig, "objective")
    },
    "gpt": Need(lambda c: c.family.name == "gpt", "a GPT", "choose one: --model"),
})  # fmt: skip
"""The same, of fields whose other values are refused by checks of their own: these are for options
that name the default value."""


def _is_mixed(config: TrainConfig) -> bool:
    """Whether anything of a step is in another dtype than float32."""
    moe = config.gpt.moe if config.family.name == "gpt" else None
    kinds = {d.dtype for d in tree.leaves(config.family.defs(config.architecture))}
    apart = bool(config.precision.gather_as) or (moe is not None and moe.router_dtype != "float32")
    return apart or kinds != {torch.float32}


_NARROW = Need(
    lambda c: c.architecture.dtype in ("bfloat16", "float16"),
    "parameters of 16 bits",
    "add --precision bf16",
)


PRECISION_NEEDS: Needs = MappingProxyType({
    "optimizer.fp32_masters": _NARROW,
    "optimizer.stochastic_rounding": _NARROW,
    **{
        f"optimizer.{name}": Need(
            lambda c, name=name: getattr(c.optimizer, name) != "float32" or _is_mixed(c),
            "another dtype than all has anyway",
            "add --precision bf16",
        )
        for name in ("grad_dtype", "reduce_dtype", "mu_dtype", "nu_dtype")
    },
    "gpt.fp32_residual": dataclasses.replace(
        _NARROW, holds=lambda c: _NARROW.holds(c) or c.precision.gather_as == "bfloat16"
    ),
})  # fmt: skip
"""The same of options of precision that somebody names; policies and files may have them anyway."""


def unused(
    config: TrainConfig, processes: int | None = None, given: Collection[str] = ()
) -> Iterator[Problem]:
    """The options of a run that somebody set and that have no effect.

    Values of its preset and policy, of the run that goes on, and of converted and migrated
    configurations count as not set.

    Args:
        config: what is to be run.
        processes: how many take part, where they run already.
        given: paths of the fields that options named.

    Raises:
        ValueError: the run folder's configuration cannot be read.
    """
    usual = [type(config)()]
    if config.model in list_presets():
        usual.append(with_model(usual[0], config.model))
    if config.precision.name in POLICIES:
        usual.append(with_precision(usual[-1], config.precision.name))
    if config.resume and config.out and run_folder.is_run(Path(config.out)):
        usual.append(load(Path(config.out) / run_folder.CONFIG, kind=type(config)))
    seen = config if processes is None else configure(config, nproc=processes)
    usual += [seen] if config.source else []
    yield from unused_problems(seen, _needs_of(seen), usual, given)
    same = {x: y for x, y in TOLD_NEEDS.items() if value_at(seen, x) == value_at(usual[0], x)}
    yield from unused_problems(seen, {**same, **PRECISION_NEEDS}, [seen], given)


def _needs_of(config: TrainConfig) -> Needs:
    """`TRAIN_NEEDS`, and those of additional sections.

    A weight decay that changes reads total_steps of a schedule of no rate.
    """
    needs = {**TRAIN_NEEDS, **needs_of(type(config))}
    if config.reads_rate or not config.reads_total_steps:
        return needs
    whole = {name: need for name, need in needs.items() if name != "learning_rate"}
    fields = (x for x in fields_under(config, "learning_rate") if not x.endswith(".total_steps"))
    return whole | dict.fromkeys(fields, TRAIN_NEEDS["learning_rate"])


def validate(
    config: TrainConfig,
    *,
    processes: int | None = None,
    recast: bool = False,
    launched_here: bool = False,
    given: Collection[str] = (),
) -> None:
    """Check everything that can be known before training; changes nothing.

    Args:
        config: what is to be run.
        processes: how many processes take part, where they run already (under torchrun).
        recast: whether a run that goes on may do so in another precision.
        launched_here: whether functron's own launcher started them.
        given: paths of the fields that options named, such as ``learning_rate.end_fraction``: they
            are to have an effect, as are all that differ from what is usual.

    Raises:
        ValueError: listing everything that is wrong, each with its fix.
    """
    messages: list[str] = []
    problems: list[Problem] = []
    mesh = _try(lambda: Mesh.parse(config.parallelism.mesh), messages)
    defs = config.family.defs(config.architecture)
    adapters = list(_lora_problems(config, defs))
    precision = list(_precision_problems(config))
    if mesh is not None:
        problems += _mesh_problems(config, mesh, processes)
        problems += _zero_problems(config, mesh)
        adapts = config.family.adapters and not adapters
        fits = not precision if config.lora.adapters is None else adapts
        setup = RunSetup(config, mesh, with_additions(config, defs) if fits else defs)
        if setup.is_pipelined and config.family.stages is not None and _can_be_cut(config):
            _try(lambda: setup.partition, messages)
        fits = _try(lambda: setup.rules, messages) is not None and not messages
        if fits and config.precision.products and not precision:
            # whether blocks divide what each rank has
            _try(setup.layer_flops, messages)
            if setup.options.matmul.logits:
                _try(lambda: setup.stage_flops(Part(range(0), loss=True)), messages)
        if fits and not precision:
            _try(lambda: setup.encode, messages)
    if (config.data.ramp_up or config.data.earlier_batches) and config.data.global_batch >= 1:
        ramp = _try(lambda: config.data.batches, messages)
        problems += [] if ramp is None or mesh is None else _ramp_problems(config, mesh, ramp)
    problems += number_problems(config)
    if mesh is not None and min(config.data.global_batch, config.parallelism.microbatches) >= 1:
        place = config, mesh, processes, launched_here
        for section in sections_of(config):
            own = getattr(section, "run_problems", lambda *place: ())
            problems += _try(lambda own=own: list(own(*place)), messages) or []
        if config.memory.save_every > 0:
            problems += _memory_problems(config, mesh, processes)
    for section in sections_of(config):
        problems += getattr(section, "problems", list)()
    problems += _try(lambda: list(problems_of(config, mesh)), messages) or []
    problems += adapters
    problems += precision
    problems += optimizer_problems(config.optimizer) or _fit_problems(config, defs)
    if config.steps >= 1 and (rates := _try(lambda: config.rate_schedule, messages)) is not None:
        problems += schedule_problems(rates, "learning_rate")
    problems += _resume_problems(config, recast) if config.resume else _out_problems(config.out)
    problems += run_folder.origin_problems(
        config, _try(lambda: run_folder.begins_with(config), messages)
    )
    for find in (data.problems_of, evaluation.problems_of):
        problems += _try(lambda find=find: list(find(config)), messages) or []
    if not launched_here:  # else the launcher has looked for them
        problems += _try(lambda: list(unused(config, processes, given)), messages) or []
    tokenizer = _try(lambda: data.reader_of(config), messages)
    _try(lambda: data.check_tokenizer(config, tokenizer), messages)
    problems += _task_problems(config, tokenizer)
    if config.data.seq >= 1:
        _try(lambda: data.check(config, reader=lambda _: tokenizer), messages)
        _try(lambda: evaluation.check(config, reader=lambda _: tokenizer), messages)
    for package in ("tensorboard", "wandb"):
        if value_at(config, package):
            _try(lambda name=package: records.require(name), messages)
    _try(lambda: raise_problems("these settings do not fit", problems), messages)
    if messages:
        raise ValueError("cannot train with this configuration\n" + "\n".join(messages))


def _task_problems(config: TrainConfig, tokenizer: Any) -> list[Problem]:
    """That tasks are asked of a run on tokens, of which no text can be made."""
    if not config.tasks.is_asked or tokenizer is not None:
        return []
    fix = "name it: --tokenizer FILE, or --tokenizer bytes"
    return [Problem("eval_tasks", "tokens without a tokenizer", "their tokenizer", fix)]


def _try(check: Callable[[], Any], messages: list[str]) -> Any:
    """The result of `check`; None, and its message collected, where it raises ValueError."""
    try:
        return check()
    except ValueError as error:
        if str(error) not in messages:  # two checks may need the same thing
            messages.append(str(error))
        return None


def _mesh_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    ranks = config.parallelism
    share, why = _batch_parts(config, mesh)
    if config.data.global_batch % share:
        fix = f"set it to {-(-config.data.global_batch // share) * share}"
        wanted = f"a multiple of {share}: {why}"
        yield Problem("global_batch", str(config.data.global_batch), wanted, fix)
    parts, why = sequence_parts(config, mesh)
    if config.data.seq % parts:
        fix = f"set it to {-(-config.data.seq // parts) * parts}"
        yield Problem("seq", str(config.data.seq), f"a multiple of {parts}: {why}", fix)
    if "tp" in ranks.expert_axis_names and mesh["tp"] > 1 and not ranks.sequence_parallel:
        wanted = "tokens that tp splits, where experts are divided over it"
        fix = "add --sequence-parallel, or leave tp out of it"
        yield Problem("expert_axes", repr(ranks.expert_axes), wanted, fix)
    yield from offload_problems(config, config.compute.device)
    compiled = config.compute.compile is True and config.compute.device != "cpu"
    if config.compute.cuda_graph and not compiled:
        got, fix = "true without compile on a GPU", "add --compile, or leave it out"
        yield Problem("cuda_graph", got, "a compiled step of a CUDA GPU", fix)
    if config.compute.cuda_graph and mesh["pp"] > 1 and (ranks.nproc or processes):
        got, fix = f"true with pp={mesh['pp']} on processes", "leave it out"
        yield Problem("cuda_graph", got, "a step that is one program on every rank", fix)
    if ranks.nproc and ranks.nproc != mesh.size:
        fix = f"set nproc={mesh.size}, or 0 to simulate, or change the mesh"
        got = f"{ranks.nproc} for a mesh of {mesh.size}"
        yield Problem("nproc", got, "one process per rank", fix)
    if processes is not None and processes != mesh.size:
        fix = f"start torchrun with --nproc-per-node {mesh.size}, or change --mesh; "
        fix += "or unset RANK and WORLD_SIZE, where torchrun left them over"
        got = f"{processes} process{'' if processes == 1 else 'es'} for a mesh of {mesh.size}"
        yield Problem("mesh", got, "one process per rank", fix)


def _memory_problems(config: TrainConfig, mesh: Mesh, processes: int | None) -> Iterator[Problem]:
    name, got = "memory_save_every", str(config.memory.save_every)
    if axis_of(mesh) is None:
        wanted = "several dp or fsdp ranks, which keep copies for one another"
        yield Problem(name, f"{got} on {mesh or 'one rank'}", wanted, "add dp=2, or leave it out")
    if processes is None and not config.parallelism.nproc:
        yield Problem(name, f"{got} without processes", "processes", f"add --nproc {mesh.size}")
    if not Path(config.memory.folder).is_dir():
        wanted, fix = "a folder of main memory", "mount a tmpfs, and name it"
        yield Problem("memory_folder", f"{config.memory.folder}, where none is", wanted, fix)


def _batch_parts(config: TrainConfig, mesh: Mesh) -> tuple[int, str]:
    """Into how many equal parts a batch is cut, and by what."""
    ranks = math.prod(mesh[axis] for axis in DATA_AXES)
    why = f"data-parallel ranks {ranks} x microbatches {config.parallelism.microbatches}"
    return ranks * max(config.parallelism.microbatches, 1), why


def _ramp_problems(config: TrainConfig, mesh: Mesh, ramp: RampUp) -> Iterator[Problem]:
    """Problems of the sizes that batches have while they grow."""
    share, why = _batch_parts(config, mesh)
    taken = len(ramp.sizes) - len(run_folder.sizes_to_come(config))
    before = {size for size in ramp.sizes[taken : len(ramp.earlier)] if size % share}
    if before:
        listed = ", ".join(map(str, sorted(before)))
        got = f"{config.data.earlier_batches!r}: batches of {listed} samples, which are to come"
        fix = "choose a mesh and microbatches that divide them"
        fix += "; or --change-batch, which takes others in their place" if config.resume else ""
        yield Problem("earlier_batches", got, f"multiples of {share}: {why}", fix)
    wrong = [size for size in ramp.sizes[max(taken, len(ramp.earlier)) : -1] if size % share]
    if wrong:
        listed = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        got = f"{config.data.ramp_up!r}: batches of {listed} samples"
        start = min(-(-ramp.start // share) * share, ramp.final)
        grown = ramp.final - start
        steps = (x for x in range(share, grown, share) if x >= ramp.increment and not grown % x)
        fix = f'write "{start} {next(steps, grown or share)} {ramp.samples}"'
        fix = fix if ramp.final % share == 0 else "make START and INCREMENT such multiples"
        yield Problem("ramp_up", got, f"multiples of {share}: {why}", fix)


def sequence_parts(config: TrainConfig, mesh: Mesh | BoundMesh) -> tuple[int, str]:
    """Into how many equal parts a sequence is cut, and by what."""
    counts = {f"{axis}={mesh[axis]}": mesh[axis] for axis in CONTEXT_AXES if mesh[axis] > 1}
    if mesh["cp"] > 1 and config.parallelism.zigzag:
        counts["2 for zigzag"] = 2
    if config.parallelism.sequence_parallel and mesh["tp"] > 1:
        counts[f"tp={mesh['tp']} under sequence_parallel"] = mesh["tp"]
    return math.prod(counts.values()), " x ".join(counts)


def _zero_problems(config: TrainConfig, mesh: Mesh) -> Iterator[Problem]:
    """The stage of ZeRO, where no axis of the mesh has ranks that could divide anything by it."""
    stage = config.parallelism.zero
    axes = ("dp", "fsdp") if stage == 3 else ("dp", "ep_node", "ep", *CONTEXT_AXES)
    if stage and all(mesh[axis] == 1 for axis in axes):
        got = f"{stage} on {str(mesh) or 'one rank'}"
        wanted = f"several {', '.join(axes[:-1])} or {axes[-1]} ranks"
        wanted += "" if stage == 3 else " that hold the same parameters"
        yield Problem("zero", got, wanted, "leave it out, or add dp=N")


def _can_be_cut(config: TrainConfig) -> bool:
    """Whether the numbers that a pipeline is cut by are possible ones."""
    ranks, samples = config.parallelism, config.data
    return min(ranks.microbatches, samples.seq, samples.global_batch, ranks.chunks + 1) >= 1


def _lora_problems(config: TrainConfig, defs: dict) -> Iterator[Problem]:
    if config.lora.adapters is not None and config.family.adapters:
        yield from config.lora.adapters.problems(defs)
        if config.parallelism.vocab_over_pp:
            fix = "leave one of them out"
            yield Problem("vocab_over_pp", "true with lora_rank", "all parameters to train", fix)
        if config.lora.base != "plain" and config.parallelism.uneven:
            got, fix = f"{config.lora.base} with uneven splits", "leave one of them out"
            yield Problem("lora_base", got, "ranks that divide whole blocks", fix)


def _precision_problems(config: TrainConfig) -> Iterator[Problem]:
    """Problems of the dtypes with the policy that is named, and with one another."""
    policy = config.policy
    named = POLICIES.get(config.precision.name, policy)
    if policy == POLICIES["float32"] != named:
        fix = "with_precision(config, name) fills them, as the command line does"
        yield Problem("precision", repr(config.precision.name), "the dtypes that go with it", fix)
    yield from _recipe_problems(config)
    if policy.masters == "remainder" and policy.params != "bfloat16":
        got, fix = f"{config.optimizer.master_bits} with {policy.params}", "leave it out"
        wanted = "32: bfloat16 alone is the upper half of float32"
        yield Problem("optimizer.master_bits", got, wanted, fix)
    for name, dtype in (("grad_dtype", policy.grads), ("reduce_dtype", policy.reduce)):
        if policy.params == "float64" and dtype not in ("", "float64"):
            fix = "leave precision out; products alone quantises the products of such a run"
            wanted = "float64, or nothing: sums as exact as what is summed"
            yield Problem(f"optimizer.{name}", f"{dtype} with float64", wanted, fix)
    for name, value, wanted in (
        ("fp32_masters", config.optimizer.fp32_masters, "true"),
        ("loss_scale.initial", policy.loss_scale > 0, "65536.0"),
    ):
        if policy.params == "float16" and not value:
            fix = "--precision fp16 sets it"
            yield Problem(f"optimizer.{name}", "none with float16", wanted, fix)


def _recipe_problems(config: TrainConfig) -> Iterator[Problem]:
    """Problems of quantised products with the architecture."""
    products, chunks = config.precision.products, config.compute.loss_chunk_tokens
    try:
        recipe = config.precision.recipe
    except ValueError as error:
        yield Problem("products", repr(products), "a recipe", str(error).partition("\n")[2])
        return
    if recipe is None:
        return
    out, either = "leave it out", "leave one of them out"
    if "matmul" not in config.family.settings:
        got = f"{products} with {config.family.title}"
        yield Problem("products", got, "nothing: only GPTs have a place for it", out)
    elif recipe.draws and config.gpt.kv_rank:
        got = f"{products}, which draws numbers, with latent attention"
        fix = f"{out}, or choose one of fp8-tensor, fp8-row, fp8-block and mxfp8"
        yield Problem("products", got, "a recipe that draws none", fix)
    elif recipe.draws and {*config.parallelism.uneven_names} - {"embed"}:
        got = f"{products}, which draws numbers, with uneven={config.parallelism.uneven}"
        fix = f"{out}, or choose one of fp8-tensor, fp8-row, fp8-block and mxfp8"
        yield Problem("products", got, "a recipe that draws none: padding has places, too", fix)
    elif sum(recipe.high(config.gpt.num_layers)) >= config.gpt.num_layers:
        first, last = recipe.high(config.gpt.num_layers)
        got = f"{first} first and {last} last layers of {config.gpt.num_layers} high"
        fix = f"lower first and last, or {out}"
        yield Problem("products", got, "some that are quantised", fix)
    fprop, low = recipe.fprop, recipe.logits == "low"
    for wrong, got, wanted, fix in (
        (
            config.evaluation.every and fprop is not None and fprop.draws,
            f"fprop={fprop} with eval_every",
            "an fprop that draws no numbers",
            f"evaluation has no key to draw by: {out}",
        ),
        (
            low and chunks,
            f"logits=low with loss_chunk_tokens={chunks}",
            "all logits at once: chunks make them again in backward, in blocks of columns",
            either,
        ),
        (
            low and recipe.scaling == "delayed",
            "logits=low with scaling=delayed",
            "logits=high: they have no history",
            either,
        ),
        (
            low and recipe.draws,
            "logits=low of a recipe that draws numbers",
            "logits=high, or a recipe that draws none",
            either,
        ),
        (
            config.lora.rank and config.family.adapters,
            f"{products} with lora_rank",
            "nothing: the matrices do not train",
            either,
        ),
    ):
        if wrong:
            yield Problem("products", got, wanted, fix)


def _fit_problems(config: TrainConfig, defs: dict) -> Iterator[Problem]:
    """Problems of an optimizer, right by itself, with these parameters."""
    groups, _ = parse_groups(config.optimizer.groups)
    if groups and config.lora.adapters is None:  # those of adapters are checked where they are made
        yield from group_problems(defs, groups, "optimizer.groups")
    if config.gpt.mup_base_dim:
        yield from width_problems(config.optimizer)
    if config.gpt.moe is not None and config.gpt.moe.balance_bias:
        for name in ("grad_dtype", "reduce_dtype"):
            if getattr(config.optimizer, name) == "bfloat16":
                wanted = "one that counts tokens for gpt.moe.balance_bias: bfloat16 stops at 256"
                fix = "set it to float32, or leave it out"
                yield Problem(f"optimizer.{name}", "'bfloat16'", wanted, fix)
    if config.parallelism.vocab_over_pp and config.optimizer.name == "adafactor":
        fix = "leave it out, or choose another optimizer"
        got = "true with adafactor, which needs whole rows and columns"
        yield Problem("vocab_over_pp", got, "embeddings that one rank of the pipeline has", fix)


def _out_problems(out: str, known: Container[str] = ()) -> Sequence[Problem]:
    """Why no run can begin in a folder: there are files, beside those of `known` names."""
    if not out:
        return []
    path = Path(out)
    fix = "choose another folder, or remove it"
    if path.is_file():
        return [Problem("out", f"{out}, a file", "a new or empty folder", fix)]
    if path.is_dir() and any(each.name not in known for each in path.iterdir()):
        fix += "; to go on with the run in it, --resume" if run_folder.is_run(path) else ""
        return [Problem("out", f"{out}, a folder with files", "a new or empty folder", fix)]
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return [Problem("out", out, f"a place to write; {above} is not", "choose another folder")]
    return []


_SIZES = ("seed", "seq", "global_batch", "ramp_up", "earlier_batches")
"""The settings that determine how many samples each step sees."""
_CHANGED = ("global_batch", "ramp_up")
"""Of these, those that change_batch changes."""
_LORA = ("lora_rank", "lora_alpha", "lora_targets", "lora_dora", "lora_base")


def _resume_problems(config: TrainConfig, recast: bool) -> Sequence[Problem]:
    """Settings that differ from the run's and may not: of its parameters, samples and precision."""
    if not config.out:
        return [Problem("resume", "no run folder", "the one to go on with", "name it: --out RUN")]
    path = Path(config.out)
    if not run_folder.is_run(path):
        if config.resume == "auto":  # whose launcher may have noted events before the first start
            return _out_problems(config.out, known=(records.EVENTS,))
        near = records.nearest(path)
        fix = "" if near is None else f"--out {near}, which is one; "
        fix += "to begin one where there is none, --resume auto"
        return [Problem("out", f"{config.out}, where no run is", "the folder of a run", fix)]
    begun = load(path / run_folder.CONFIG, kind=type(config))
    steps = run_folder.steps_done(config)  # 0: no sample was seen
    # converted with its steps, which took their samples elsewhere
    elsewhere = begun.is_continued and not run_folder.records(path)
    fix = "leave it out, or begin a new run in another folder"
    kept = (*(_SIZES if elsewhere else names_with_tag(TrainConfig, "samples")), *_LORA)
    anew = f"--change-batch goes on so after the {steps} steps taken; or "
    fixes = {str(name): anew + fix for name in _CHANGED}
    wanted: dict[str, Any] = {name: value_at(begun, name) for name in kept if steps}
    if config.change_batch and steps:
        own = run_folder.with_changed_batch(config)
        wanted |= {name: value_at(own, name) for name in (*_CHANGED, "earlier_batches")}
        fixes["earlier_batches"] = "leave it out; in Python, with_changed_batch(config) fills it in"
    found = [
        Problem(name, repr(now), f"{value!r}, as in the run", fixes.get(name, fix))
        for name, value in wanted.items()
        if (now := value_at(config, name)) != value
    ]
    if steps:
        found += _gap_problems(config, begun, steps)
        found += () if elsewhere else _ordered_problems(config, begun)
    if config.family is not begun.family:
        was = begun.family
        return [*found, Problem("model", config.family.title, f"{was.title}, as in the run", fix)]
    if steps and not recast:
        found += _policy_problems(config, begun)
    for path, now, was in differing_fields(config.architecture, begun.architecture):
        if path != "dtype" or not (steps or recast):
            before = f"{field_text(was)}, as in the run"
            found.append(Problem(f"{begun.family.name}.{path}", field_text(now), before, fix))
    return found


def _gap_problems(config: TrainConfig, begun: TrainConfig, steps: int) -> Iterator[Problem]:
    """Samples of the first steps that were left out, or were not, when these were taken."""
    try:
        seen = begun.gaps.number(config.data.batches.first_sample(steps))
        gaps, before = config.gaps, begun.gaps
    except ValueError:
        return  # said elsewhere
    kept = [tuple(x for x in g.ranges if x[0] < seen) for g in (gaps, before)]
    if kept[0] != kept[1]:
        wanted = f"{str(Gaps(kept[1])) or 'nothing'} of the {seen} samples that the run has seen"
        fix = "leave it out, or begin a new run in another folder"
        yield Problem("anomalies.skipped_samples", str(gaps) or "''", wanted, fix)


def _ordered_problems(config: TrainConfig, begun: TrainConfig) -> Iterator[Problem]:
    """Another number of samples, of which the order of an application is another one."""
    if not config.data.order == begun.data.order != ARITHMETIC:
        return
    try:
        now, before = config.ordered_samples, begun.ordered_samples
    except ValueError:
        return  # said elsewhere
    if now != before:
        fix = f"add --order-samples {before}, with which the order stays"
        yield Problem("order_samples", str(now), f"{before}, as in the run", fix)


def _policy_problems(config: TrainConfig, begun: TrainConfig) -> Iterator[Problem]:
    """Settings of precision that differ from the run's in what they mean."""
    before, now = dataclasses.asdict(begun.policy), dataclasses.asdict(config.policy)
    name = config.precision.name if config.precision.name in POLICIES else "NAME"
    fix = f"--precision {name} beside --resume says that the run goes on so; or leave it out"
    # the loss scale is the first one only, and the state has what became of it
    meaning = {"loss_scale": bool, "products": recipe_text}
    for field, value in now.items():
        read = meaning.get(field, str)
        if read(before[field]) != read(value):
            wanted = f"{before[field]!r}, as in the run"
            yield Problem(f"precision, {field}", repr(value), wanted, fix)
