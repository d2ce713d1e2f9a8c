"""Convert Megatron-LM's checkpoints, with optimizer state, into run folders and back.

| Megatron                           | here                                                        |
|------------------------------------|-------------------------------------------------------------|
| ``iteration``                      | ``step``                                                    |
| ``exp_avg``, ``exp_avg_sq``        | ``mu``, ``nu``                                              |
| ``fp32_param`` or ``param``        | masters, of parameters of 16 bits                           |
| the optimizer's ``step``           | Adam's count                                                |
| the scheduler's ``num_steps``      | the schedule's count, times the global batch                |
| ``consumed_train_samples``         | the first sample of the step, which follows from its number |
| ``args``                           | the configuration                                           |
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron import checkpoint, nn
from functron.apps.megatron import tensors
from functron.apps.megatron.architecture import GPT_FIELDS, LATENT_FIELDS, MOE_FIELDS, read_model
from functron.apps.megatron.arguments import Reading, read_arguments
from functron.apps.megatron.checkpoint_files import LATEST, OpenedCheckpoint, open_checkpoint
from functron.apps.megatron.training_settings import (
    DATA_ARGUMENTS,
    STYLES,
    WSD,
    apply_precision,
    read_data_settings,
    read_update_settings,
)
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.data.blend import ALL, parse_blend
from functron.models.config import PRESETS, GPTConfig
from functron.models.family import GPT, differing_fields, field_text
from functron.nn.moe import MoEConfig
from functron.spmd import Mesh
from functron.training import config, run_folder
from functron.training.config import configure
from functron.training.convert import Conversion, RunFormat
from functron.training.data import is_on_disk
from functron.training.setup import make_setup
from functron.training.step import State

_TAKEN = "nothing: Megatron's checkpoints are converted unchanged"
_REFUSALS = {
    name: Problem(name, "{!r}", _TAKEN, "leave it out")
    for name in ("dtype", "averaged", "max_seq", "quantise", "model")
} | {
    "expert_parallel": Problem(
        "expert_parallel", "{}", "1: it is for writing Megatron checkpoints", "leave it out"
    )
}


def make_format() -> RunFormat:
    """The format of ``functron convert megatron:PATH run:PATH``, and back."""
    return RunFormat(make_run_folder, write_checkpoint, MappingProxyType(_REFUSALS))


def make_run_folder(path: Path, out: Path, *, model: str | None = None) -> Conversion:
    """Convert a Megatron checkpoint into a run folder; see `read_run`.

    It has the optimizer's state, the step and settings, so that ``functron train --resume`` takes
    Megatron's next step.

    Args:
        model: preset for a checkpoint without arguments, of which only the parameters are read;
            None: it has arguments.
    """
    run, state = read_run(path, model=model)
    step = int(state.step)

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        kept: Any = state if step else {"params": state.params}
        about = {"step": step, "samples": run.data.batches.first_sample(step)}
        checkpoint.save(folder / run_folder.CHECKPOINTS / str(step), kept, about)

    run_folder.make(out, fill)
    return Conversion(run.architecture, out, (), _describe_continuation(run, step, out))


def _describe_continuation(run: config.TrainConfig, step: int, out: Path) -> str:
    """The progress of Megatron's run, its next sample, and the command to continue it."""
    samples = run.data.batches.first_sample(step)
    lines = [f"at step {step} of {run.steps}, after {samples:,} samples of {run.data.seq} tokens"]
    command = f"functron train --resume --out {shlex.quote(str(out))}"
    if run.data.order == "megatron":
        lines.append(
            f"the next is sample {samples:,} of the {run.data.order_samples:,} in Megatron-LM's "
            f"order, of {run.data.path}"
        )
    elif run.data.path:
        lines.append("samples come in another order than there, where they were shuffled otherwise")
    elif run.data.format != "mock":
        total = "N" if run.data.ramp_up else run.data.batches.first_sample(run.steps)
        lines.append("its arguments do not name its data, whose split is 969,30,1 by default")
        command += f" --data PREFIX --split 969,30,1 --order megatron --order-samples {total}"
    return "\n".join([*lines, f"go on: {command}"])


def write_checkpoint(path: Path, out: Path, *, expert_parallel: int = 1) -> Conversion:
    """Convert the newest checkpoint of a run folder into a ``torch_dist`` checkpoint of Megatron.

    It has the arguments of model, optimizer, schedule and data.

    Args:
        expert_parallel: ranks of expert parallelism of the Megatron run that will load it: with
            more than 1, experts have a separate optimizer.
    """
    run = config.load(path / run_folder.CONFIG, known_only=True)
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    run_folder.make(
        out, lambda folder: write_run(folder, run, stored, expert_parallel=expert_parallel)
    )
    notes = []
    if padding := run.gpt.padded_vocab - run.gpt.vocab_size:
        notes.append(
            f"Megatron-LM's softmax includes {padding} rows of padding: its loss is higher; "
            "converted back they are padding again"
        )
    if run.data.path and not is_on_disk(run):
        notes.append("Megatron-LM needs files of tokens: functron preprocess makes them")
    elif run.data.path and run.data.order != "megatron":
        notes.append("Megatron-LM continues with its own order of samples")
    if run.data.pack:
        notes.append(f"Megatron-LM does not pack samples: pack = {run.data.pack}")
    return Conversion(run.architecture, out, (), "\n".join(notes))


_OF_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
"""Options of torch's Adam and Transformer Engine's, which load complete groups."""


def read_run(path: Path, *, model: str | None = None) -> tuple[config.TrainConfig, State]:
    """The configuration and state of a Megatron checkpoint.

    Args:
        path: the folder of an iteration, or of several, of which the latest is read.
        model: preset for a checkpoint without arguments, of which only the parameters are read;
            None: it has arguments.

    Raises:
        ValueError: as `open_checkpoint`, `read_architecture` and `load`; or samples, steps and
            schedule of the checkpoint do not fit together.
    """
    opened = open_checkpoint(path)
    args = opened.args
    if args is None:
        if model is None:
            fix = f"pass --model: one of {', '.join(sorted(PRESETS)[:4])}, ..."
            got, wanted = "none in it", "the arguments of its run"
            refuse(f"cannot tell the model of {path}", "args", got, wanted, fix)
        run = config.with_model(config.TrainConfig(), model)
    elif model is not None:
        got, fix = repr(model), "leave it out"
        refuse("cannot convert", "model", got, "nothing: the checkpoint has its arguments", fix)
    else:
        run = read_settings(args, opened)
    if not isinstance(run.architecture, GPTConfig):
        refuse("cannot convert", "model", run.family.title, "a GPT")
    run = configure(run, source=f"megatron:{Path(path).absolute()}")
    loaded = tensors.load_tensors(opened, run.gpt)
    made = make_setup(run, Mesh())
    state = made.init(random.key(run.seed), loaded.masters or loaded.params)
    if args is None or loaded.mu is None:
        return run, state
    return run, _fill_state(state, loaded, opened, run)


def _fill_state(
    state: State, loaded: tensors.LoadedTensors, opened: OpenedCheckpoint, run: config.TrainConfig
) -> State:
    iteration = opened.common.get("iteration", 0)
    scheduler = opened.common.get("opt_param_scheduler") or {}
    updates = scheduler.get("num_steps", opened.step * run.data.global_batch)
    found = {"mu": loaded.mu, "nu": loaded.nu, "masters": loaded.masters}
    flat = {
        name: dict(zip(tree.paths(values), tree.leaves(values), strict=True))
        for name, values in found.items()
        if values is not None
    }
    scheduled = iteration if run.data.ramp_up else updates // run.data.global_batch
    parents = {path.rpartition("/mu/")[0] for path in tree.paths(state.opt_state) if "/mu/" in path}

    def one(path: str, leaf: torch.Tensor) -> torch.Tensor:
        role = re.search(r"(?:^|/)(mu|nu|masters)/(.*)$", path)
        if role:
            return flat[role[1]][role[2]].to(leaf.dtype) if role[1] in flat else leaf
        if path.endswith("count"):
            adam = path.rpartition("/")[0] in parents
            return torch.full_like(leaf, opened.step if adam else scheduled)
        return leaf

    opt_state = tree.map_with_path(one, state.opt_state)
    params = loaded.params if loaded.masters is not None else state.params
    step = torch.full_like(state.step, iteration)
    return state._replace(step=step, params=params, opt_state=opt_state)


def read_settings(args: Mapping[str, Any], opened: OpenedCheckpoint) -> config.TrainConfig:
    """The configuration of a run that continues as Megatron-LM would with these arguments.

    Raises:
        ValueError: arguments have no counterpart; all are listed.
    """
    args = _note_padding(args, opened)
    model = read_architecture(args, where=str(opened.folder))
    title = f"cannot go on with the run in {opened.folder}"
    raise_problems(title, _check_arguments(args))
    reading = read_values(_merge_schedule(args, opened.common))
    settings = read_update_settings(reading, "gpt", Mesh())
    run = configure(config.configure(model="megatron", gpt=model), **settings)
    run = apply_precision(reading, run)
    raise_problems(title, list_problems(reading))
    run = configure(run, gpt=model, **_read_data(args, opened))
    _check_samples(args, opened, run)
    return run


def _note_padding(args: Mapping[str, Any], opened: OpenedCheckpoint) -> Mapping[str, Any]:
    """The arguments; functron's older checkpoints lack rows of padding, whose number is added."""
    rows, *_ = opened.weights.sizes.get(tensors.EMBEDDING) or (None,)
    once = rows is not None and rows == args.get("vocab_size") != args.get("padded_vocab_size")
    return {**args, MASKED_VOCABULARY: rows} if once else args


def _merge_schedule(args: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the values of the scheduler's state, which counts samples.

    Checkpoints have both train_iters and train_samples.
    """
    scheduler = common.get("opt_param_scheduler")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    pairs = {
        "max_lr": "lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style",
        "lr_warmup_steps": "lr_warmup_samples", "lr_decay_steps": "lr_decay_samples",
    }  # fmt: skip
    own = {theirs: scheduler[kept] for kept, theirs in pairs.items() if kept in scheduler}
    left = {"train_samples"} if args.get("train_iters") else set()
    left |= {"lr_warmup_iters", "lr_warmup_fraction"} if "lr_warmup_samples" in own else set()
    left |= {"lr_decay_iters"} if "lr_decay_samples" in own else set()
    if not args.get("train_iters") and not args.get("train_samples"):
        own["train_iters"] = common.get("iteration")
    return {name: value for name, value in args.items() if name not in left} | own


def _check_arguments(args: Mapping[str, Any]) -> list[Problem]:
    """Problems of arguments that a launch line may have, and a checkpoint may not."""
    only = {
        "optimizer": (("adam", None), "its state cannot be read"),
        "decoupled_lr": ((None,), "its state cannot be read"),
        "decoupled_weight_decay": ((True, None), "functron has only decoupled weight decay"),
        "attention_dropout": ((0, None), "functron has no dropout of attention"),
    }
    found = []
    for name, (allowed, fix) in only.items():
        if args.get(name) not in allowed:
            found.append(Problem(name, repr(args[name]), repr(allowed[0]), fix))
    return found


def _read_data(args: Mapping[str, Any], opened: OpenedCheckpoint) -> dict[str, Any]:
    """The seed, and the data in Megatron-LM's order, if the arguments name any.

    Raises:
        ValueError: arguments of data have no counterpart; all are listed.
    """
    given = {name: args[name] for name in ("seed", *DATA_ARGUMENTS) if name in args}
    reading = Reading(read_arguments(given))
    found = {"seed": reading("seed")}
    if any(map(reading, DATA_ARGUMENTS[:5])):
        found |= read_data_settings(reading, "gpt", args["global_batch_size"])
    problems = [*reading.arguments.problems, *reading.problems]
    raise_problems(f"cannot go on with the data of the run in {opened.folder}", problems)
    return found


def _check_samples(
    args: Mapping[str, Any], opened: OpenedCheckpoint, run: config.TrainConfig
) -> None:
    """Refuse a run whose number of samples is not that of its steps."""
    step, consumed = opened.common.get("iteration", 0), args.get("consumed_train_samples")
    expected = run.data.batches.first_sample(step)
    if consumed is not None and consumed != expected:
        wanted = f"{expected}: {step} steps of {run.data.global_batch}"
        fix = "batch sizes have changed: the data would not continue where it was"
        title = "the run has read another number of samples than its steps have"
        refuse(title, "consumed_train_samples", str(consumed), wanted, fix)


def write_arguments(
    run: config.TrainConfig, step: int, *, expert_parallel: int = 1
) -> argparse.Namespace:
    """Megatron-LM's arguments of a run at a step, with this expert parallelism.

    Raises:
        ValueError: Megatron lacks the model, optimizer or schedule; all offenders are listed.
    """
    table = write_architecture(run.gpt, seq=run.data.seq)
    own, rate = run.optimizer, run.rate_schedule
    styles = {ours: theirs for theirs, ours in STYLES.items()}
    found = [
        Problem(name, repr(value), wanted)
        for name, value, wanted, good in (
            ("optimizer.name", own.name, "'adamw'", own.name == "adamw"),
            ("learning_rate.name", rate.name, " or ".join(styles), rate.name in styles),
            ("optimizer.groups", own.groups, "''", not own.groups),
            ("lora_rank", run.lora.rank, "0: merge adapters first", not run.lora.rank),
            ("learning_rate.rewarm_steps", rate.rewarm_steps, "0", _is_rewarmed(run, step)),
        )
        if not good
    ]
    raise_problems("Megatron has no such run", found)
    unit = "samples" if run.rate_unit == "samples" else "iters"
    ordered, moe = run.data.order == "megatron", run.gpt.moe
    # there, experts' capacity is per microbatch
    over_batch = moe is not None and moe.capacity_over == "batch"
    samples = run.data.global_batch // run.parallelism.microbatches if over_batch else 1
    decays = (own.start_weight_decay, own.end_weight_decay)
    decays = decays if own.weight_decay_incr_style != "constant" else (own.weight_decay,) * 2
    table |= {
        MASKED_VOCABULARY: run.gpt.vocab_size,
        "global_batch_size": run.data.global_batch, "micro_batch_size": samples,
        "train_iters": run.steps,
        "rampup_batch_size": [int(n) for n in run.data.ramp_up.split()] or None,
        "optimizer": "adam", "adam_beta1": own.b1, "adam_beta2": own.b2, "adam_eps": own.eps,
        "clip_grad": own.clip_norm, "weight_decay": own.weight_decay,
        "start_weight_decay": decays[0], "end_weight_decay": decays[1],
        "weight_decay_incr_style": own.weight_decay_incr_style, "lr": rate.peak,
        "min_lr": rate.last, "lr_decay_style": styles[rate.name], "lr_warmup_init": rate.init,
        f"lr_decay_{unit}": rate.total_steps, f"lr_warmup_{unit}": rate.num_warmup_steps,
        f"lr_wsd_decay_{unit}": rate.decay_steps if rate.name == "wsd" else None,
        "train_samples": run.ordered_samples if unit == "samples" or ordered else None,
        "lr_wsd_decay_style": {ours: theirs for theirs, ours in WSD.items()}.get(rate.decay),
        "seed": run.seed, "iteration": step,
        "consumed_train_samples": run.data.batches.first_sample(step),
        "consumed_valid_samples": 0, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": expert_parallel,
        "use_distributed_optimizer": True, "ckpt_format": "torch_dist",
    }  # fmt: skip
    return argparse.Namespace(**table, **_write_data(run))


def _write_data(run: config.TrainConfig) -> dict[str, Any]:
    """Arguments of data: files of tokens, or random tokens."""
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    found: dict[str, Any] = dict.fromkeys(names, run.data.packed)
    found |= {"split": run.data.split or None, "dataloader_type": "single"}
    if run.evaluation.every:
        found |= {"eval_interval": run.evaluation.every, "eval_iters": run.evaluation.batches}
        found |= {"full_validation": not run.evaluation.batches}
    if run.data.format == "mock":
        return found | {"mock_data": True}
    if not run.data.path or not is_on_disk(run):
        return found
    pairs = parse_blend(run.data.path) or [(ALL, run.data.path)]
    words = [word for pair in pairs for word in pair if word != ALL]
    found |= {"mock_data": False, "data_path" if run.data.split else "train_data_path": words}
    if run.evaluation.data and not run.data.split:
        found["valid_data_path"] = [
            word.partition("=")[2] for word in shlex.split(run.evaluation.data)
        ]
    if run.data.order == "megatron":
        found |= {
            "data_cache_path": run.data.order_cache or None,
            "mid_level_dataset_surplus": run.data.blend_surplus,
            "add_extra_token_to_sequence": run.data.extra_token,
        }  # fmt: skip
    return found


def write_run(
    folder: Path,
    run: config.TrainConfig,
    stored: checkpoint.Checkpoint,
    *,
    expert_parallel: int = 1,
) -> None:
    """Write a run's checkpoint, with optimizer state, as Megatron's, into an empty folder.

    Args:
        expert_parallel: as of `write_checkpoint`.

    Raises:
        ValueError: as `write_arguments`; or the optimizer has no float32 moments.
    """
    if run.gpt.fused_projections is True:  # Megatron's own tensors are joined otherwise
        run = configure(run, gpt__fused_projections=False)
    step = int(stored["step"][...]) if "step" in stored else 0
    if expert_parallel < 1 or (expert_parallel > 1 and run.gpt.moe is None):
        wanted = "1 without experts" if run.gpt.moe is None else "at least 1"
        refuse("cannot convert", "expert_parallel", expert_parallel, wanted)
    args = write_arguments(run, step, expert_parallel=expert_parallel)
    params = checkpoint.stored_params(stored, run.family.defs(run.architecture))
    trees: dict[str, Any] = {"exp_avg": {}, "exp_avg_sq": {}, "param": {}}
    names = {"mu": "exp_avg", "nu": "exp_avg_sq", "masters": "param"}
    counts, parents = {}, set()
    for path in stored:
        role = re.search(r"(?:^|/)(mu|nu|masters)/(.*)$", path)
        if path.startswith("opt_state/") and role:
            tree.put_leaf(trees[names[role[1]]], role[2], stored[path])
            parents.add(path[: role.start()])
        elif path.startswith("opt_state/") and path.endswith("/count"):
            counts[path.rpartition("/")[0]] = int(stored[path][...])
    if bool(trees["exp_avg"]) != bool(trees["exp_avg_sq"]):
        got = "one of the moments in float32"
        refuse("Megatron has no such run", "optimizer", got, "Adam's two moments")
    if not trees["param"]:
        trees["param"] = params
    state = trees if trees["exp_avg"] else {}
    updates = next((n for parent, n in counts.items() if parent in parents), step)
    common = _make_common(run, args, step, updates if state else 0, bool(state))
    inside = folder / f"iter_{step:07d}"
    inside.mkdir()
    tensors.save_tensors(
        inside, tensors.SavedTensors(run.gpt, params, _name_masters(state), common)
    )
    (folder / LATEST).write_text(str(step), encoding="utf-8")


def _name_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with masters under the names of plain and distributed optimizers."""
    return {**state, "fp32_param": state["param"]} if state else {}


def _is_rewarmed(run: config.TrainConfig, step: int) -> bool:
    """Whether the schedule is past a re-warm-up, which Megatron-LM does not have."""
    rate, by_samples = run.learning_rate, run.rate_unit == "samples"
    count = run.data.batches.first_sample(step) if by_samples else step
    return not rate.rewarm_steps or count >= rate.rewarm_at + rate.rewarm_steps


def _make_common(
    run: config.TrainConfig, args: argparse.Namespace, step: int, updates: int, has_state: bool
) -> dict[str, Any]:
    """The contents of ``common.pt``."""
    rate, rows = run.rate_schedule, 1 if run.rate_unit == "samples" else run.data.global_batch
    # Megatron's schedule counts samples; if batch sizes changed, they are not steps times batch
    by_samples = run.rate_unit == "samples" or bool(run.data.ramp_up)
    made: dict[str, Any] = {
        "args": args, "checkpoint_version": 3.0, "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {
            "max_lr": args.lr, "min_lr": args.min_lr, "lr_decay_style": args.lr_decay_style,
            "lr_warmup_steps": rate.num_warmup_steps * rows,
            "lr_decay_steps": rate.total_steps * rows,
            "num_steps": run.data.batches.first_sample(step) if by_samples else step * rows,
            "start_wd": args.start_weight_decay, "end_wd": args.end_weight_decay,
            "wd_incr_style": args.weight_decay_incr_style,
            "wd_incr_steps": args.train_samples or run.steps * run.data.global_batch,
        },
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        },
    }  # fmt: skip
    if not has_state:
        return made

    def optimizer(experts: bool) -> dict[str, Any]:
        groups = [
            {
                "is_expert_parallel": experts, "default_config": True, "wd_mult": share,
                "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": args.lr, "min_lr": args.min_lr,
                "lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps,
                "weight_decay": args.weight_decay * share, "step": float(updates), **_OF_ADAM,
            }
            for share in (1.0, 0.0)
            if not experts or share or run.gpt.bias
        ]  # fmt: skip
        # keys of the distributed optimizer, and of plain ones, which for 16-bit parameters are
        # under "optimizer"
        plain = {"state": {"common_step": torch.tensor(float(updates))}, "param_groups": groups}
        form = "fully_reshardable"
        return {"optimizer": plain, "param_state_sharding_type": form, **plain}

    several = args.expert_model_parallel_size > 1
    made["optimizer"] = {n: optimizer(bool(n)) for n in (0, 1)} if several else optimizer(False)
    return made


# --- the arguments in a checkpoint

_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "is_hybrid_model": ((False, None), "hybrids in a Megatron checkpoint yet"),
        "hybrid_override_pattern": ((None,), "hybrids in a Megatron checkpoint yet"),
        "hybrid_layer_pattern": ((None,), "hybrids in a Megatron checkpoint yet"),
        "num_moe_experts_per_layer": ((None,), "layers of different numbers of experts"),
        "moe_use_upcycling": ((False, None), "checkpoints before they are upcycled"),
        "moe_router_force_load_balancing": ((False, None), "routers that choose at random"),
        "moe_latent_size": ((None,), "such experts in a Megatron checkpoint yet"),
        "softmax_type": (("vanilla", None), "such a softmax in a Megatron checkpoint yet"),
        "attention_output_gate": ((False, None), "that gate in a Megatron checkpoint yet"),
        "scale_logits_with_mup": ((False, None), "Megatron's width rules"),
        "linear_attention_freq": ((None,), "linear attention"),
        "experimental_attention_variant": ((None,), "that attention"),
        "encoder_num_layers": ((None,), "encoders"),
    }
)
"""Allowed values of arguments, and what our model lacks for others.

In old checkpoints encoder_num_layers repeats num_layers, and is ignored."""
_OF_VOCABULARY = (
    "vocab_size", "vocab_extra_ids", "tokenizer_type", "tokenizer_model", "vocab_file",
    "merge_file", "make_vocab_size_divisible_by",
)  # fmt: skip


MASKED_VOCABULARY = "functron_vocab_size"
"""Our own argument: rows of the embedding from there on are masked in the softmax.

Megatron-LM ignores it and does not save it, since it trains all rows.
"""


def read_values(args: Mapping[str, Any]) -> Reading:
    """The arguments in a checkpoint, read as those of a launch line, without the vocabulary."""
    dropped = {*_OF_VOCABULARY, "encoder_num_layers"}
    return Reading(read_arguments({n: v for n, v in args.items() if n not in dropped}))


def list_problems(reading: Reading) -> list[Problem]:
    """Problems of a checkpoint's arguments that were read, without fixes of launch lines."""
    kinds = [each for each in reading.arguments.problems if each.path in reading.fates]
    return [
        replace(each, fix="") if each.fix.startswith("--") else each
        for each in (*kinds, *reading.problems)
    ]


def read_architecture(args: Mapping[str, Any], *, where: str = "args") -> GPTConfig:
    """The architecture of Megatron-LM's arguments in a checkpoint.

    It is that of a launch line, except for the vocabulary, which is padded, or of
    `MASKED_VOCABULARY` tokens; and the weight of a single multi-token prediction module, which is
    larger by ``seq / (seq - 1)``, since Megatron averages over tokens that have a target.

    Raises:
        ValueError: arguments are missing, or describe what our decoder does not compute; all
            offenders are listed.
    """
    problems: list[Problem] = []
    for name, (allowed, lacks) in _ONLY.items():
        value = args.get(name)
        if value not in allowed and not (
            name == "encoder_num_layers" and value == args.get("num_layers")
        ):
            wanted = " or ".join(repr(each) for each in allowed if each is not None) or "None"
            problems.append(Problem(name, repr(value), wanted, f"our decoder has not {lacks}"))
    needed = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size")
    problems += [
        Problem(name, "no such argument", "the model's", "pass --model")
        for name in needed
        if type(args.get(name)) is not int
    ]
    problems += [] if problems else _check_vocabulary(args)
    title = f"cannot tell the model of {where}"
    raise_problems(title, problems)
    reading = read_values(args)
    try:
        made = read_model(reading, "gpt")
    except ValueError as error:
        raise_problems(title, list_problems(reading))
        raise ValueError(f"{title}\n{error}") from None
    raise_problems(title, list_problems(reading))
    bits = {"bf16": "bfloat16", "fp16": "float16"}
    dtype: Any = next((bits[name] for name in bits if args.get(name)), "float32")
    assert isinstance(made, GPTConfig)
    made = replace(made, **_read_vocabulary(args), dtype=dtype)
    return replace(made, mtp_weight=_scale_ahead_weight(args)) if made.mtp_depth else made


def _check_vocabulary(args: Mapping[str, Any]) -> list[Problem]:
    real, padded = args.get(MASKED_VOCABULARY), args["padded_vocab_size"]
    if real is None or (type(real) is int and 0 < real <= padded):
        return []
    fix = "set it to the number of tokens that the model has, or remove it: the padded size counts"
    return [Problem(MASKED_VOCABULARY, repr(real), f"1 to padded_vocab_size={padded}", fix)]


def _read_vocabulary(args: Mapping[str, Any]) -> dict[str, int]:
    """The fields of a checkpoint's vocabulary."""
    padded = args["padded_vocab_size"]
    real, multiple = args.get(MASKED_VOCABULARY, padded), args.get("make_vocab_size_divisible_by")
    found = {"vocab_size": real, "vocab_multiple": padded}
    if MASKED_VOCABULARY not in args or type(multiple) is not int or multiple < 1:
        return found
    fits = -(-real // multiple) * multiple == padded
    return {**found, "vocab_multiple": multiple} if fits else found


def _scale_ahead_weight(args: Mapping[str, Any]) -> float:
    factor, seq = args.get("mtp_loss_scaling_factor"), args.get("seq_length") or 0
    factor = 0.1 if factor is None else factor
    return factor * seq / (seq - 1) if args["mtp_num_layers"] == 1 and seq > 1 else factor


def write_architecture(config: GPTConfig, *, seq: int = 0) -> dict[str, Any]:
    """Megatron-LM's arguments of an architecture.

    Args:
        seq: tokens per sample, which scale the weight of multi-token prediction.

    Raises:
        ValueError: Megatron's arguments cannot express it; all fields are listed.
    """
    c, moe = config, config.moe
    made: dict[str, Any] = {theirs: getattr(c, ours) for theirs, ours in GPT_FIELDS.items()}
    made |= {
        "num_layers": c.num_layers, "hidden_size": c.embed_dim, "num_attention_heads": c.num_heads,
        "max_position_embeddings": c.max_seq, "norm_epsilon": c.norm_eps, "swiglu": c.gated,
        "init_method_std": c.init_stddev,
        "ffn_hidden_size": c.mlp_dim, "padded_vocab_size": c.padded_vocab,
        "make_vocab_size_divisible_by": c.vocab_multiple, "vocab_size": c.vocab_size,
        "normalization": "RMSNorm" if c.norm == "rms" else "LayerNorm",
        "untie_embeddings_and_output_weights": not c.tied, "add_bias_linear": c.bias,
        "add_qkv_bias": c.qkv_bias, "hidden_dropout": c.dropout, "attention_dropout": 0.0,
        "position_embedding_type": "learned_absolute" if c.positions == "learned" else c.positions,
        "rotary_base": int(c.rope_theta), "rotary_percent": c.rope_fraction,
        "squared_relu": c.activation == "relu2", "openai_gelu": c.activation == "gelu_tanh",
        "bias_gelu_fusion": False, "bf16": c.dtype == "bfloat16", "fp16": c.dtype == "float16",
        "params_dtype": c.torch_dtype, "qk_layernorm": c.qk_norm or bool(c.kv_rank),
        "multi_latent_attention": bool(c.kv_rank), "seq_length": seq or c.max_seq,
        "num_experts": None, "mtp_num_layers": c.mtp_depth or None,
    }  # fmt: skip
    if c.kv_rank:
        made |= {theirs: getattr(c, ours) or None for theirs, ours in LATENT_FIELDS.items()}
        made |= {"rope_type": "rope"} | _write_yarn(c.rope_scaling)
    else:
        made |= {"group_query_attention": c.kv_heads != c.num_heads, "num_query_groups": c.kv_heads}
        made |= {"kv_channels": c.head_size, "rotary_interleaved": c.rope_pairs == "neighbours"}
        if c.window:
            skipped = {"window_attn_skip_freq": c.global_every} if c.global_every else {}
            made |= {"window_size": (c.window - 1, 0), **skipped}
        if c.rope_scaling is not None and c.rope_scaling.kind == "llama3":
            made |= {"use_rope_scaling": True, "rope_scaling_factor": c.rope_scaling.factor}
    if moe is not None:
        kinds = {"batch": "aux_loss", "sequence": "seq_aux_loss", "global": "global_aux_loss"}
        made |= {theirs: getattr(moe, ours) for theirs, ours in MOE_FIELDS.items()}
        grouped = moe.num_groups > 1
        made |= {
            "moe_router_num_groups": moe.num_groups if grouped else None,
            "moe_router_group_topk": moe.top_groups if grouped else None,
            "moe_layer_freq": [int(i not in c.stacks["dense"]) for i in range(c.num_layers)]
            if "dense" in c.stacks else 1,
            "moe_router_load_balancing_type": kinds[moe.aux] if moe.aux_loss
            else "quantile_balancing" if moe.balance_by == "quantile" else "none",
            "moe_router_quantile_balancing_ema": moe.balance_decay,
            "moe_aux_loss_coeff": moe.aux_loss,
            "moe_router_pre_softmax": moe.score == "softmax" and not _sums_to_one(moe),
            "moe_shared_expert_intermediate_size": moe.shared_dim or None,
            "moe_z_loss_coeff": moe.z_loss or None, "moe_input_jitter_eps": moe.jitter or None,
            "moe_expert_capacity_factor": moe.capacity_factor or None,
            "moe_token_drop_policy": "probs" if moe.drop == "probability" else "position",
            "moe_token_dispatcher_type": "allgather" if moe.dispatch == "gather" else "alltoall",
            "moe_router_dtype": "fp64" if moe.router_dtype == "float64" else "fp32",
        }  # fmt: skip
    if c.mtp_depth:
        made |= {"mtp_use_repeated_layer": c.mtp_repeated, "mtp_detach_heads": c.mtp_detached}
        made["mtp_loss_scaling_factor"] = c.mtp_weight
        made["mtp_loss_scaling_factor"] = c.mtp_weight**2 / (_scale_ahead_weight(made) or 1.0)
    _check_back(config, made)
    return made


_KEEP = (
    "keep the model as a run, or write it for transformers, functron convert run:RUN hf:PATH; a "
    "model that is to become Megatron's must be trained with what Megatron has"
)


def _check_routing(moe: MoEConfig) -> Iterator[Problem]:
    """Problems of routing that Megatron-LM refuses or computes differently."""
    if moe.score != "softmax" or not _sums_to_one(moe):
        return
    if moe.top_k == 1:
        got, wanted = "1, whose weight is 1", "2 at least: with 1 Megatron-LM weighs by probability"
        yield Problem("moe.top_k", got, wanted, _KEEP)
    if moe.num_groups > 1 and moe.group_score == "top2":
        got, wanted = "'top2', of probabilities", "'max': Megatron-LM ranks groups by logits there"
        yield Problem("moe.group_score", got, wanted, _KEEP)


def _sums_to_one(moe: MoEConfig) -> bool:
    """Whether a token's weights sum to 1."""
    return moe.normalise == "after" or moe.renormalise


def _write_yarn(scaling: nn.RopeScaling | None) -> dict[str, Any]:
    """The arguments of latent attention's YaRN, if it is used."""
    if scaling is None or scaling.kind != "yarn":
        return {}
    return {
        "rope_type": "yarn", "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim,
    }  # fmt: skip


def _check_back(config: GPTConfig, made: Mapping[str, Any]) -> None:
    """Refuse a config that Megatron-LM's arguments cannot express."""
    title = "Megatron has no such model"
    raise_problems(title, [] if config.moe is None else [*_check_routing(config.moe)])
    canonical = GPT.canonical
    # rows of padding and fused parameters are not part of the architecture
    plain = replace(
        config, vocab_size=config.padded_vocab, vocab_multiple=config.padded_vocab,
        fused_projections="auto",
    )  # fmt: skip
    back = replace(read_architecture(made), mtp_weight=plain.mtp_weight)
    wanted, got = canonical(plain), canonical(back)
    found = [
        Problem(
            path, field_text(attrgetter(path)(config)), f"{field_text(theirs)}, in Megatron", _KEEP
        )
        for path, _, theirs in differing_fields(wanted, got)
    ]
    raise_problems(title, found)
