"""Training settings that Megatron-LM's arguments describe: mesh, optimizer, precision, data, ..."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from functron import optim
from functron.apps.megatron.architecture import FamilyName, read_vocabulary
from functron.apps.megatron.arguments import Reading
from functron.apps.megatron.launches import is_open
from functron.core.errors import Problem
from functron.core.settings import paths_of, value_at
from functron.data.sampling import parse_ramp_up
from functron.spmd import Mesh
from functron.training.config import TrainConfig, configure, read_yaml, with_precision

NONE = ("none", "None", "null", "")
"""Values of paths that mean none."""


def read_step_settings(
    reading: Reading, family: FamilyName, ranks: int
) -> tuple[Mesh, dict[str, Any]]:
    """The mesh, and the settings of `TrainConfig` for the training step.

    Args:
        reading: the arguments, whose fates are noted there.
        ranks: number of processes; 0: as few as the sizes allow.
    """
    mesh, settings = _read_mesh(reading, family, ranks)
    return mesh, settings | read_update_settings(reading, family, mesh) | _read_compute(reading)


def read_update_settings(reading: Reading, family: FamilyName, mesh: Mesh) -> dict[str, Any]:
    """The settings of updates, which no mesh changes: batches, learning rate, optimizer."""
    settings = {"seq": _read_seq(reading, family)} | _read_batches(reading, mesh)
    return settings | _read_rate(reading, settings) | {"optimizer": _read_optimizer(reading)}


# --- the mesh


def _read_mesh(reading: Reading, family: FamilyName, ranks: int) -> tuple[Mesh, dict[str, Any]]:
    sizes = {
        "tp": reading.take("tensor_model_parallel_size", "mesh"),
        "pp": reading.take("pipeline_model_parallel_size", "mesh"),
        "cp": reading.take("context_parallel_size", "mesh"),
    }
    sizes = {name: max(size or 1, 1) for name, size in sizes.items()}
    if family != "gpt":
        for axis, name in (("pp", "pipeline_model_parallel_size"), ("cp", "context_parallel_size")):
            if sizes[axis] > 1:
                why = f"functron has no {axis} for this model: its ranks are left out"
                reading.explain("not supported", why, name)
                ranks //= sizes[axis]
                sizes[axis] = 1
    model = math.prod(sizes.values())
    ranks = ranks or model * max(reading("expert_model_parallel_size") or 1, 1)
    if ranks % model:
        got = f"{ranks} ranks for tp={sizes['tp']} x pp={sizes['pp']} x cp={sizes['cp']} = {model}"
        fix = f"--processes {-(-ranks // model) * model}, or change one of the sizes"
        reading.problems.append(Problem("ranks", got, f"a multiple of {model}", fix))
        ranks = model
    data = ranks // model
    experts, settings = _read_expert_axes(reading, sizes, data)
    context, inner = _read_context(reading, sizes["cp"])
    axes = {"pp": sizes["pp"], "dp": data // experts, "ep": experts, **inner, "tp": sizes["tp"]}
    mesh = Mesh(**{name: size for name, size in axes.items() if size > 1})
    settings |= {"mesh": str(mesh)} | context | _read_pipeline(reading, sizes["pp"])
    split = reading.take("sequence_parallel", "sequence_parallel") and sizes["tp"] > 1
    if not split:
        reading.explain("not needed", "there is one rank of tp", "sequence_parallel")
    settings["sequence_parallel"] = bool(split)
    reading.explain(
        "not needed", "--mesh is the order of ranks, dp before pp there", "use_tp_pp_dp_mapping"
    )
    return mesh, settings | _read_zero(reading, mesh)


def _read_expert_axes(
    reading: Reading, sizes: Mapping[str, int], data: int
) -> tuple[int, dict[str, Any]]:
    """The size of ep, and the axes that experts are divided over."""
    whole = reading.take("expert_model_parallel_size", "mesh") or 1
    tp, cp = sizes["tp"], sizes["cp"]
    if not reading("num_experts"):
        if whole > 1:
            reading.refuse("expert_model_parallel_size", "1 for a model without experts")
        return 1, {}
    own = reading.take("expert_tensor_parallel_size", "expert_axes")
    own = tp if own is None else own
    if own not in (1, tp):
        fix = "1 for whole experts, or tp's size for experts sharded as other matrices"
        reading.refuse("expert_tensor_parallel_size", f"1 or {tp}", fix)
        return 1, {}
    folded = tp if own == 1 else 1
    if whole % folded:
        wanted = f"{tp}, or --expert-model-parallel-size a multiple of it: tp divides tokens then"
        reading.refuse("expert_tensor_parallel_size", wanted)
        return 1, {}
    for axes, inner in ((["ep"], folded), (["ep", "cp"], folded * cp)):
        names = [*axes, *(["tp"] if folded > 1 else [])]
        if whole % inner == 0 and data % (whole // inner) == 0 and (len(axes) == 1 or cp > 1):
            if folded > 1:
                why = "tp splits their tokens: --sequence-parallel"
                reading.note("expert_axes", "expert_tensor_parallel_size", why=why)
            return whole // inner, {"expert_axes": ",".join(names)} if len(names) > 1 else {}
    most = data * folded * cp
    got = f"{whole} of {data} data-parallel ranks, tp={tp}, cp={cp}, expert tp={own}"
    fitting = whole // math.gcd(whole, most) * data * tp * cp * sizes["pp"]
    fix = f"--processes {fitting}, or another size"
    wanted = "ranks that experts can be divided over"
    reading.problems.append(Problem(reading.spell("expert_model_parallel_size"), got, wanted, fix))
    return 1, {}


def _read_context(reading: Reading, size: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The setting of context parallelism, and its axes."""
    if size == 1:
        return {}, {}
    kinds = set(reading.take("cp_comm_type", "context") or ("p2p",))
    levels = reading.take("hierarchical_context_parallel_sizes", "mesh") or ()
    if len(kinds) > 1:
        reading.refuse("cp_comm_type", "one for all layers")
    (kind, *_) = kinds
    if kind == "a2a+p2p":
        if len(levels) != 2 or math.prod(levels) != size:
            reading.refuse("hierarchical_context_parallel_sizes", f"two numbers of product {size}")
            return {}, {}
        reading.note("mesh", "cp_comm_type", why="ulysses exchanges heads")
        return {}, {"cp": levels[1], "ulysses": levels[0]}
    if kind == "a2a":
        reading.note("mesh", "cp_comm_type", why="ulysses exchanges heads")
        return {}, {"ulysses": size}
    if kind not in ("p2p", "allgather", "all_gather"):
        reading.refuse("cp_comm_type", "p2p, allgather, a2a or a2a+p2p")
    return {"context": "ring" if kind == "p2p" else "gather"}, {"cp": size}


def _read_pipeline(reading: Reading, stages: int) -> dict[str, Any]:
    """The pipeline schedule, and the layers of each stage."""
    if stages == 1:
        return {}
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    counts = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    text = reading.take("pipeline_model_parallel_layout", "layout")
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    names = (*names, "virtual_pipeline_model_parallel_size")
    reading.note("chunks", *names)
    reading.note("layout", *ends, *counts)
    group = "microbatch_group_size_per_vp_stage"
    why = "the interleaved schedule takes groups of as many microbatches as pipeline ranks"
    reading.explain("not needed", why, group)
    if reading(group) not in (None, stages):
        reading.refuse(group, f"{stages}, the number of pipeline ranks")
    layers = reading("num_layers") or 1
    extra = [int(bool(reading(name))) for name in counts]
    first, last = (reading(name) for name in ends)
    if text is not None:
        text = text.strip("\"'")
        chunks = max(_count_stages(text) // stages, 1)
        return _set_interleaved(chunks) | {"layout": text}
    total = layers + sum(extra)
    chunks = reading(names[1]) or reading(names[2]) or 1
    if per := reading(names[0]):
        chunks = max(total // stages // per, 1)
    settings = _set_interleaved(chunks)
    if first or last:
        both = (("first", first), ("last", last))
        return settings | {"layout": ",".join(f"{k}={n}" for k, n in both if n)}
    if sum(extra):
        each = total // (stages * chunks)
        if total % (stages * chunks):
            reading.refuse(counts[0] if extra[0] else counts[1], f"a multiple of {stages * chunks}")
        inner = ["t" * each] * (stages * chunks)
        inner[0] = "E" + inner[0][extra[0] :]
        inner[-1] = inner[-1][extra[1] :] + "L"
        return settings | {"layout": "|".join(inner)}
    if total % (stages * chunks):
        got = f"{total} layers in {stages * chunks} stages"
        fix = "--with decoder-last-pipeline-num-layers=N, or another number of stages"
        wanted = f"a multiple of {stages * chunks}"
        reading.problems.append(Problem(reading.spell("num_layers"), got, wanted, fix))
    return settings


def _set_interleaved(chunks: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}


def _count_stages(text: str) -> int:
    """The number of stages of a layout, after repetitions are expanded."""
    for _ in range(20):
        grown = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), text)
        grown = re.sub(r"([EtmL|])\*(\d{1,4})", lambda m: m[1] * int(m[2]), grown)
        if grown == text or len(grown) > 100_000:
            break
        text = grown
    return text.count("|") + 1


_STRATEGIES: Mapping[str, int] = MappingProxyType(
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)


def _read_zero(reading: Reading, mesh: Mesh) -> dict[str, Any]:
    """The ZeRO stage, and when parameters are gathered."""
    level = 1 if reading.take("use_distributed_optimizer", "zero") else 0
    if reading.take("use_megatron_fsdp", "zero"):
        level = _STRATEGIES.get(reading.take("data_parallel_sharding_strategy", "zero"), -1)
        if level < 0:
            reading.refuse("data_parallel_sharding_strategy", f"one of {', '.join(_STRATEGIES)}")
            level = 0
    kept = None
    if reading.take("use_torch_fsdp2", "zero"):
        level = 3
        kept = not reading.take("torch_fsdp2_reshard_after_forward", "gather")
    copies = math.prod(mesh[axis] for axis in ("dp", "ep", "cp", "ulysses"))
    if (mesh["dp"] if level == 3 else copies) == 1:
        names = ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2")
        reading.explain("not needed", "there is one data-parallel rank", *names)
        return {}
    found: dict[str, Any] = {"zero": level}
    return found | ({"gather": "keep"} if kept else {})


# --- batches and rates


def _read_seq(reading: Reading, family: FamilyName) -> int:
    name = "seq_length" if reading("seq_length") else "encoder_seq_length"
    value = reading.take(name, "seq")
    if family == "t5":
        why = "targets have the tokens that --mask-rate takes out of a sample"
        reading.explain("not needed", why, "decoder_seq_length")
    if not value or value < 1:
        reading.refuse("seq_length", "a number of at least 1", "--with seq-length=N")
        return 1
    return value


def _read_batches(reading: Reading, mesh: Mesh) -> dict[str, Any]:
    """Sizes of batches, and the number of steps."""
    ranks = math.prod(mesh[axis] for axis in ("dp", "ep"))
    micro = reading.take(
        "micro_batch_size", "microbatches", "number of microbatches per rank, not their size"
    )
    if not micro or micro < 1:
        reading.refuse("micro_batch_size", "a number of at least 1", "--with micro-batch-size=1")
        micro = 1
    batch = reading.take("global_batch_size", "global_batch") or micro * ranks
    each = micro * ranks
    if batch % each:
        fix = f"--with global-batch-size={-(-batch // each) * each}"
        wanted = f"a multiple of {each}: samples {micro} x data-parallel ranks {ranks}"
        reading.refuse("global_batch_size", wanted, fix)
    parts = max(batch // each, 1)
    found: dict[str, Any] = {"global_batch": batch, "microbatches": parts}
    words = [w for word in reading("rampup_batch_size") or () for w in word.split()]
    numbers = [int(w) for w in words if w.isdigit()]
    if words and len(numbers) != 3:
        reading.refuse("rampup_batch_size", "a start, an increment and samples")
    elif words:
        found |= _read_ramp(reading, numbers, batch, ranks, parts)
    return found | {"steps": _read_steps(reading, found, batch)}


def _read_ramp(
    reading: Reading, numbers: Sequence[int], batch: int, ranks: int, parts: int
) -> dict[str, Any]:
    """Growing batches: our microbatches grow, Megatron-LM's become more."""
    start, increment, _ = numbers
    most = math.gcd(start, increment, batch) // ranks
    fitting = max((n for n in range(1, most + 1) if most % n == 0 and parts % n == 0), default=1)
    if start % ranks or increment % ranks:
        reading.refuse("rampup_batch_size", f"multiples of the {ranks} data-parallel ranks")
    why = ""
    if fitting < parts:
        why = f"microbatches stay {fitting} and grow to {batch // ranks // fitting} samples; "
        why += f"without the ramp they are {parts}"
        reading.note("microbatches", "micro_batch_size", why=why)
    reading.note("ramp_up", "rampup_batch_size")
    return {"ramp_up": " ".join(map(str, numbers)), "microbatches": fitting}


def _read_steps(reading: Reading, found: Mapping[str, Any], batch: int) -> int:
    steps = reading.take("train_iters", "steps")
    samples = reading.take("train_samples", "steps", "steps, not samples")
    if steps and samples:
        reading.refuse("train_samples", "one of it and --train-iters", "leave one out")
    if not steps and samples:
        steps = _find_step(found, batch, samples)
    if not steps or steps < 1:
        reading.refuse("train_iters", "a number of at least 1", "--with train-iters=N")
        return 1
    return steps


def _find_step(found: Mapping[str, Any], batch: int, samples: int) -> int:
    """The number of steps that take `samples` samples."""
    try:
        ramp = parse_ramp_up(found.get("ramp_up", ""), batch)
    except ValueError:
        return samples // batch  # reported elsewhere
    return ramp.step_of(samples)


STYLES: Mapping[str, str] = MappingProxyType({
    "constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd",
    "inverse-square-root": "inverse_square_root",
})  # fmt: skip
"""Our schedules by Megatron-LM's names."""
WSD: Mapping[str, str] = MappingProxyType({
    "exponential": "halving", "linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt",
})  # fmt: skip
"""Shapes of WSD's decay, by Megatron-LM's names."""


def _read_rate(reading: Reading, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of the learning rate, and whether it counts steps or samples."""
    batch = settings["global_batch"]
    counted = _counts_samples(reading, settings)
    unit = "samples" if counted else "steps"

    def count(stem: str, setting: str) -> int | None:
        steps = reading.take(f"{stem}_iters", f"learning_rate.{setting}")
        why = "rate_unit = samples" if counted else "steps, not samples"
        samples = reading.take(f"{stem}_samples", f"learning_rate.{setting}", why)
        if samples:
            return samples if counted else samples // batch
        return steps * batch if steps and counted else steps

    peak = reading.take("lr", "learning_rate.peak")
    if peak is None:
        reading.refuse("lr", "a learning rate", "--with lr=3e-4")
        peak = 0.0
    style = reading.take("lr_decay_style", "learning_rate.name")
    if style not in STYLES:
        reading.refuse("lr_decay_style", f"one of {', '.join(STYLES)}")
        style = "linear"
    whole = reading("train_samples") or settings["steps"] * batch if counted else settings["steps"]
    total = count("lr_decay", "total_steps") or whole
    warmup = count("lr_warmup", "warmup_steps") or 0
    fraction = reading.take("lr_warmup_fraction", "learning_rate.warmup_steps")
    warmup = round(fraction * total) if fraction else warmup
    found: dict[str, Any] = {
        "name": STYLES[style], "peak": peak, "warmup_steps": warmup, "total_steps": total,
        "end": reading.take("min_lr", "learning_rate.end"),
        "init": reading.take("lr_warmup_init", "learning_rate.init"),
    }  # fmt: skip
    if style == "WSD":
        length = count("lr_wsd_decay", "decay_steps")
        shape = reading.take("lr_wsd_decay_style", "learning_rate.decay")
        if not length or shape not in WSD:
            fix = "--with lr-wsd-decay-iters=N"
            reading.refuse("lr_wsd_decay_iters", "the steps of the decay, of a known style", fix)
        else:
            found |= {"decay_steps": length, "decay": WSD[shape]}
    if style == "constant":
        reading.explain("not needed", "a constant rate has no end", "min_lr")
    if style == "inverse-square-root" and not warmup:
        why = "without a warm-up Megatron-LM divides by the root of samples, ours of steps"
        reading.note("learning_rate.name", "lr_decay_style", why=why)
    return {"learning_rate": optim.ScheduleConfig(**found), "rate_unit": unit}


def _counts_samples(reading: Reading, settings: Mapping[str, Any]) -> bool:
    """Whether the schedule counts samples: numbers of them that are not those of whole steps."""
    names = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
    given = [samples for name in names if (samples := reading(name))]
    if reading("lr_decay_samples") is None and reading("train_samples"):
        given.append(reading("train_samples"))
    batch = settings["global_batch"]
    return bool(given) and (bool(settings.get("ramp_up")) or any(n % batch for n in given))


# --- the optimizer and precision

_DTYPES: Mapping[str, str] = MappingProxyType({
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp8": "fp8", "uint8": "fp8",
})  # fmt: skip
_SCALE_MODES = MappingProxyType({("spectral", 0.2): "adamw", ("shape_scaling", 1.0): "spectral"})


def _read_optimizer(reading: Reading) -> optim.OptimizerConfig:
    """The optimizer, without the dtypes that the precision sets."""
    kind = reading.take("optimizer", "optimizer.name", "AdamW: its decay is decoupled")
    names = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
    if kind not in names:
        reading.refuse("optimizer", f"one of {', '.join(names)}")
    name = names.get(kind, "adamw")
    found: dict[str, Any] = {"name": name}
    pairs = {
        "adam_beta1": "b1", "adam_beta2": "b2", "adam_eps": "eps", "clip_grad": "clip_norm",
        "weight_decay": "weight_decay", "sgd_momentum": "momentum",
    }  # fmt: skip
    idle = ("adam_beta1", "adam_beta2", "adam_eps") if kind == "sgd" else ("sgd_momentum",)
    for theirs, ours in pairs.items():
        is_idle = theirs in idle
        found[ours] = reading(theirs) if is_idle else reading.take(theirs, f"optimizer.{ours}")
    if kind != "sgd":
        found["momentum"] = optim.OptimizerConfig.momentum
    elif reading("weight_decay"):
        reading.explain("not supported", "sgd has no weight decay", "weight_decay")
    found |= _read_decay_increase(reading) | _read_muon(reading, name) | _read_decoupled(reading)
    found["offload"] = reading.take("optimizer_cpu_offload", "optimizer.offload")
    why = "all of the state is in host memory"
    reading.explain("not needed", why, "optimizer_offload_fraction")
    return optim.OptimizerConfig(**found)


def _read_decay_increase(reading: Reading) -> dict[str, Any]:
    """A weight decay that changes over the run."""
    style = reading.take("weight_decay_incr_style", "optimizer.weight_decay_incr_style")
    ends = ("start_weight_decay", "end_weight_decay")
    if style == "constant":
        return {}
    values = [reading.take(name, f"optimizer.{name}") for name in ends]
    if None in values:
        reading.refuse(ends[values.index(None)], "a number where the decay changes")
        return {}
    total = reading("lr_decay_iters") or reading("lr_decay_samples")
    if total not in (None, reading("train_iters"), reading("train_samples")):
        why = "ours changes until the learning rate's end, Megatron-LM's until that of training"
        reading.note("optimizer.weight_decay_incr_style", "weight_decay_incr_style", why=why)
    return {"weight_decay_incr_style": style, **dict(zip(ends, values, strict=True))}


_MUON_FIELDS = MappingProxyType({
    "muon_momentum": "momentum", "muon_use_nesterov": "nesterov", "muon_num_ns_steps": "steps",
    "muon_scale_mode": "scale",
})  # fmt: skip


def _read_muon(reading: Reading, name: str) -> dict[str, Any]:
    if name != "muon":
        return {}
    own = reading.take_fields("optimizer.muon", _MUON_FIELDS)
    factor = reading.take("muon_extra_scale_factor", "optimizer.muon.scale")
    scale = _SCALE_MODES.get((own["scale"], factor))
    if scale is None:
        fix = "such as --muon-scale-mode spectral --muon-extra-scale-factor 0.2, AdamW's size"
        wanted = "spectral with 0.2, or shape_scaling with 1"
        reading.refuse("muon_scale_mode", wanted, fix)
    mode = reading.take("muon_tp_mode", "optimizer.muon.distributed")
    if mode == "blockwise" and reading("tensor_model_parallel_size") > 1:
        why = "whole matrices are orthogonalised, not tp's blocks of them"
        reading.explain("not supported", why, "muon_tp_mode")
    own["scale"] = scale or "adamw"
    return {"muon": optim.MuonConfig(**own, distributed=mode == "distributed")}


def _read_decoupled(reading: Reading) -> dict[str, Any]:
    """A separate learning rate of the embedding and the output layer."""
    own, end, peak = reading("decoupled_lr"), reading("decoupled_min_lr"), reading("lr")
    if own is None or not peak:
        return {}
    reading.note("optimizer.groups", "decoupled_lr", "decoupled_min_lr")
    ratio = own / peak
    last = (end or 0.0) / reading("min_lr") if reading("min_lr") else ratio
    if not math.isclose(last, ratio, rel_tol=1e-3):
        why = f"ours is {ratio:.4g} times the rate throughout, at the end too"
        reading.explain("not supported", why, "decoupled_min_lr")
    both = ["embed"] if not reading("untie_embeddings_and_output_weights") else ["embed", "unembed"]
    return {"groups": "; ".join(f"{name} lr={ratio:.6g}" for name in both)}


def apply_precision(reading: Reading, config: TrainConfig) -> TrainConfig:
    """`config` in the precision of the arguments."""
    reading.note("precision", "fp16", "bf16", "params_dtype")
    name = "fp16" if reading("fp16") else "bf16" if reading("bf16") else "float32"
    if reading("fp16") and reading("bf16"):
        reading.refuse("fp16", "one of it and --bf16", "leave one out")
    name, products = _read_recipe(reading, name)
    made = with_precision(config, name)
    own: dict[str, Any] = _read_loss_scale(reading, name) | _read_grad_dtype(reading, name)
    own |= _read_state_dtypes(reading, name)
    made = configure(made, optimizer=replace(made.optimizer, **own))
    if products:
        made = configure(made, products=products)
    gathers = [n for n in ("fp8_param_gather", "fp4_param_gather") if reading.take(n, "gather_as")]
    if gathers and made.parallelism.zero == 3 and made.precision.products:
        return configure(made, gather_as="quantised")
    reading.explain("not needed", "parameters are gathered where --zero is 3", *gathers)
    return made


_RECIPES: Mapping[str, str] = MappingProxyType({
    "delayed": "fp8-delayed", "tensorwise": "fp8-tensor", "blockwise": "fp8-block",
    "mxfp8": "mxfp8",
})  # fmt: skip


def _read_recipe(reading: Reading, name: str) -> tuple[str, str]:
    """The precision with quantised matmuls, and its recipe where it is not that of the name."""
    four = reading("fp4")
    eight = None if four else reading("fp8")
    ends = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not four and not eight:
        return name, ""
    reading.take("fp4" if four else "fp8", "precision")
    kind = reading.take("fp4_recipe" if four else "fp8_recipe", "precision")
    known: Mapping[str, str] = {"nvfp4": "nvfp4"} if four else _RECIPES
    if kind not in known:
        reading.refuse("fp4_recipe" if four else "fp8_recipe", f"one of {', '.join(known)}")
        return name, ""
    if name != "bf16":
        reading.refuse("fp4" if four else "fp8", "--bf16 with it")
    recipe, words = known[kind], []
    own = {"delayed": "hybrid", "tensorwise": "hybrid"}.get(kind, "e4m3")
    if eight and eight != own:
        why = f"{recipe} is {own}: spell out the formats, --products 'fprop=...'"
        reading.explain("not supported", why, "fp8")
    if not reading.take("fp8_wgrad", "products"):
        words.append("wgrad=high")
    details = ("fp8_amax_history_len", "fp8_amax_compute_algo")
    if kind == "delayed":
        why = "scales follow the largest magnitude of 256 steps"
        reading.explain("not supported", why, *details)
    else:
        reading.explain("not needed", "scales follow the current step", *details)
    if reading.take(ends[0], "products"):
        first, last = (reading.take(n, "products") for n in ends[1:])
        words += [f"first={first}", f"last={last}"]
    elif four:
        words.append("last=0")
    return recipe, " ".join([recipe, *words]) if words else ""


def _read_loss_scale(reading: Reading, name: str) -> dict[str, Any]:
    if name != "fp16":
        return {}
    pairs = {"hysteresis": "hysteresis", "min_loss_scale": "minimum"}
    fixed = reading.take("loss_scale", "optimizer.loss_scale.initial")
    if not fixed:
        pairs |= {"initial_loss_scale": "initial", "loss_scale_window": "growth_interval"}
    values = reading.take_fields("optimizer.loss_scale", pairs)
    if fixed:
        values |= {"initial": fixed, "growth_interval": 0, "minimum": fixed}
    values["growth_interval"] = int(values["growth_interval"])
    return {"loss_scale": optim.LossScale(**values)}


def _read_grad_dtype(reading: Reading, name: str) -> dict[str, Any]:
    """The dtypes that gradients are summed and reduced in."""
    low = reading.take("grad_reduce_in_bf16", "optimizer.grad_dtype")
    why = "gradients are summed in float32"
    reading.explain("same", why, "accumulate_allreduce_grads_in_fp32")
    main = _take_dtype(reading, "main_grads_dtype", "optimizer.grad_dtype")
    if name == "float32":
        return {}
    if low or main == "bfloat16":
        return {"grad_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    return {}


def _read_state_dtypes(reading: Reading, name: str) -> dict[str, Any]:
    """The dtypes of the optimizer's state."""
    if not reading.take("use_precision_aware_optimizer", "optimizer.mu_dtype"):
        return {}
    found: dict[str, Any] = {}
    for theirs, ours in (("exp_avg_dtype", "mu_dtype"), ("exp_avg_sq_dtype", "nu_dtype")):
        found[ours] = _take_dtype(reading, theirs, f"optimizer.{ours}")
    if _take_dtype(reading, "main_params_dtype", "optimizer.fp32_masters") != "float32":
        reading.refuse("main_params_dtype", "fp32")
    if reading.take("store_param_remainders", "optimizer.master_bits") and name == "bf16":
        found["master_bits"] = 16
    return found


def _take_dtype(reading: Reading, name: str, setting: str) -> str:
    value = str(reading.take(name, setting)).rpartition(".")[2]
    if value not in _DTYPES:
        reading.refuse(name, f"one of {', '.join(_DTYPES)}")
        return "float32"
    return _DTYPES[value]


def _read_compute(reading: Reading) -> dict[str, Any]:
    """Activation checkpointing, determinism, CUDA graphs, and timeouts."""
    kind = reading.take("recompute_granularity", "remat")
    if reading.take("recompute_activations", "remat"):
        kind = kind or "selective"
    if reading.take("checkpoint_activations", "remat"):
        kind = "full"
    why = "memory alone: every block is recomputed, or the core of its attention"
    reading.explain(
        "not needed", why, "recompute_method", "recompute_num_layers", "recompute_modules"
    )
    if kind not in (None, "none", "full", "selective"):
        reading.refuse("recompute_granularity", "full or selective")
    found: dict[str, Any] = {"remat": kind or "none"}
    found["deterministic"] = reading.take("deterministic_mode", "deterministic")
    graphs = [reading("cuda_graph_impl") != "none", reading("enable_cuda_graph")]
    if any((*graphs, reading("external_cuda_graph"))):
        found |= {"compile": True, "cuda_graph": True, "device": "cuda"}
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    reading.note("cuda_graph", *names, why="of a compiled step")
    minutes = reading.take("distributed_timeout_minutes", "timeout_seconds")
    if reading.has("distributed_timeout_minutes"):
        found["timeout_seconds"] = 60.0 * minutes
        if "hang_after" in paths_of(TrainConfig):
            found["hang_after"] = min(value_at(TrainConfig(), "hang_after"), 30.0 * minutes)
    return found


# --- data

DATA_ARGUMENTS = (
    "data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "mock_data",
    "valid_data_path", "test_data_path", "split", "dataloader_type", "data_cache_path",
    "mid_level_dataset_surplus", "add_extra_token_to_sequence", "reset_position_ids",
    "reset_attention_mask", "eod_mask_loss", "train_samples", "train_iters",
)  # fmt: skip
"""The arguments that `read_data_settings` reads for a model that predicts the next token."""


def read_data_settings(reading: Reading, family: FamilyName, batch: int) -> dict[str, Any]:
    """The settings of `TrainConfig` for the data: files, split, tokenizer and order of samples.

    Args:
        reading: the arguments, whose fates are noted there.
        batch: samples of a step, at its largest.
    """
    found: dict[str, Any] = _read_documents(reading)
    why = "samples of a BERT have --seq tokens"
    reading.explain("not supported" if family == "bert" else "not needed", why, "short_seq_prob")
    if family in ("bert", "t5"):
        found["mask_rate"] = reading.take("mask_prob", "mask_rate")
    found |= _read_special_tokens(reading, family)
    blend = _read_paths(reading, "data_path", "data_args_path")
    train = _read_paths(reading, "train_data_path", "per_split_data_args_path")
    if reading.has("test_data_path"):
        why = "functron evaluate RUN --data PREFIX, afterwards"
        reading.explain("not supported", why, "test_data_path")
    split = reading("split") if train else reading.take("split", "split")
    mock = reading("mock_data")
    if mock:
        reading.note("format", "mock_data")
    if sum(map(bool, (blend, train, mock))) > 1:
        reading.refuse("data_path", "one of --data-path, --train-data-path and --mock-data")
    text = "" if split is None else ",".join(re.findall(r"[\d.]+", split))
    if split is None and (blend or mock):
        text = "969,30,1"  # Megatron-LM's own
    if not (mock or blend or train):
        fix = "--with data-path=PREFIX, or mock-data for random tokens"
        reading.refuse("data_path", "files of tokens", fix)
    if mock or not (blend or train):
        found |= _read_order(reading, "", batch)
        return (
            found | _read_tokenizer(reading, True) | {"format": "mock", "split": text or "969,30,1"}
        )
    found |= {"data": blend or train, "format": "tokens", "split": text if blend else ""}
    found |= _read_order(reading, found["data"] if family in ("gpt", "mamba") else "", batch)
    return found | _read_tokenizer(reading, False)


def _read_order(reading: Reading, data: str, batch: int) -> dict[str, Any]:
    """The order of samples: Megatron-LM's, or the arithmetic one where `data` is empty."""
    kind = reading.take("dataloader_type", "order")
    if kind not in (None, "single"):
        why = "samples come in one shuffled order, and again in another for the next epoch"
        reading.explain("not supported", why, "dataloader_type")
        return {}
    reading.explain("same", "samples come in one shuffled order", "dataloader_type")
    samples = reading("train_samples") or (reading("train_iters") or 0) * batch
    if not data or samples < 1:  # a missing number of steps is reported elsewhere
        return {}
    found: dict[str, Any] = {"order": "megatron", "order_samples": samples}
    why = f"order = megatron, of {samples} samples: the same ones in every step"
    for name in ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path"):
        if reading.has(name) and reading.fates.get(name, ("",))[0] == "taken":
            reading.note("data", name, why=why)
    cache = reading("data_cache_path")
    if cache and cache not in NONE and not is_open(cache):
        found["order_cache"] = reading.take("data_cache_path", "order_cache")
    if len(data.split()) > 1:
        found["blend_surplus"] = reading.take("mid_level_dataset_surplus", "blend_surplus")
    found["extra_token"] = reading.take("add_extra_token_to_sequence", "extra_token")
    return found


def _read_special_tokens(reading: Reading, family: FamilyName) -> dict[str, Any]:
    """The ids of BERT's [MASK] and of T5's end token in Megatron-LM's tokenizers."""
    kind = reading("tokenizer_type") or "BertWordPieceLowerCase"
    words = kind.startswith("BertWordPiece")
    if family == "bert" and words:
        return {"mask_token": 103}  # in both published vocabularies
    if family != "t5" or not (words or kind.startswith("Null")):
        return {}
    size, _ = read_vocabulary(reading, family)
    # [BOS], [EOS] and the sentinels follow the words
    return {"end_token": size - (reading("vocab_extra_ids") if words else 0) - 1}


def _read_documents(reading: Reading) -> dict[str, Any]:
    """Whether attention is masked at the boundaries of documents."""
    names = ("reset_position_ids", "reset_attention_mask")
    both = [reading.take(name, "mask_documents") for name in names]
    unlearnt = reading.take("eod_mask_loss", "mask_documents")
    if any(both) and not all(both):
        name = names[both.index(True)]
        other = reading.spell(names[both.index(False)])
        reading.refuse(name, f"{other} with it", "both mask attention between documents")
    if all(both) and not unlearnt:
        why = "a document's last token predicts nothing, as with --eod-mask-loss"
        reading.note("mask_documents", *names, why=why)
    if unlearnt and not all(both):
        why = "ends of documents are targets where attention is not masked between documents"
        reading.explain("not supported", why, "eod_mask_loss")
    return {"mask_documents": True} if all(both) else {}


def _read_paths(reading: Reading, name: str, file: str) -> str:
    """The files of a blend and their weights, as the setting `data` has them; "": none."""
    words = list(reading.take(name, "data") or ())
    path = reading(file)
    if not words and path and not is_open(path):
        reading.note("data", file)
        words = _read_list(reading, file, path, name)
    words = [word.strip("\"'") for word in words]
    words = [piece for word in words for piece in word.split()]
    if len(words) < 2 or any(map(is_open, words)):
        return " ".join(words)
    if len(words) % 2 == 0 and all(map(is_weight, words[::2])):
        return " ".join(map(shlex.quote, words))
    return " ".join(f"all {shlex.quote(word)}" for word in words)


def _read_list(reading: Reading, file: str, path: str, name: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        if file.startswith("per_split"):
            key = name.partition("_")[0]
            found = read_yaml(Path(path)).get(key) or []
            return [str(word) for word in (found if isinstance(found, list) else [found])]
        return text.split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reading.refuse(file, f"a readable list of data ({reason})")
        return []


def _read_tokenizer(reading: Reading, mock: bool) -> dict[str, Any]:
    """The tokenizer, which a run on tokens needs only to show text."""
    why = "data is tokenised already; --tokenizer FOLDER shows samples as text"
    for name in ("tokenizer_type", "tokenizer_model", "tiktoken_pattern"):
        if reading.fates.get(name, ("",))[0] != "taken":  # the vocabulary's size is from it
            reading.explain("not needed", why, name)
    path = reading("tokenizer_model")
    if mock or not path or is_open(path) or not Path(path).exists():
        return {}
    reading.note("tokenizer", "tokenizer_model")
    return {"tokenizer": path}


def read_evaluation_settings(
    reading: Reading, settings: Mapping[str, Any], family: FamilyName
) -> dict[str, Any]:
    """When the run is evaluated, and on which held-out data."""
    every = reading.take("eval_interval", "eval_every") or 0
    batches = reading.take("eval_iters", "eval_batches")
    whole = reading.take("full_validation", "eval_batches")
    if whole and settings["format"] == "mock":
        reading.explain("not needed", "random tokens have no end: --eval-iters", "full_validation")
        whole = False
    reading.explain("same", "every held-out set has a loss of its own", "multiple_validation_sets")
    valid = [w for word in reading.take("valid_data_path", "eval_data") or () for w in word.split()]
    weights = len(valid) > 1 and len(valid) % 2 == 0 and all(map(is_weight, valid[::2]))
    if weights and len(valid) > 2:
        why = "each of its files is a held-out set: a blend has no loss of its own"
        reading.note("eval_data", "valid_data_path", why=why)
    paths = valid[1::2] if weights else valid
    names = [Path(path).name for path in paths]
    names = names if len(set(names)) == len(names) else [f"valid-{n}" for n in range(len(names))]
    names = [re.sub(r"[^\w.-]", "-", name) for name in names]
    pairs = zip(names, map(shlex.quote, paths), strict=True)
    named = " ".join(f"{name}={path}" for name, path in pairs)
    shares = [float(x) for x in re.findall(r"\d+\.?\d*|\.\d+", settings.get("split", ""))]
    some = bool(named) or (len(shares) > 1 and shares[1] > 0)
    if every < 1 or not some or (not whole and (batches or 0) < 1):
        why = "there is no held-out data"
        reading.explain("not needed", why, "eval_interval", "eval_iters", "full_validation")
        return {}
    found: dict[str, Any] = {"eval_every": every, "eval_batches": 0 if whole else batches}
    return found | ({"eval_data": named} if named else {})


def is_weight(word: str) -> bool:
    return word == "all" or re.fullmatch(r"[\d.]+(e-?\d+)?", word) is not None
