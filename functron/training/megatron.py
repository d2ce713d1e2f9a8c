"""Runs of Megatron-LM's checkpoints, with the optimizer's state, and back.

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
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.hub import megatron
from functron.hub.megatron_files import LATEST, Opened, open_checkpoint
from functron.models.config import PRESETS, GPTConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.spmd import Mesh
from functron.training import config
from functron.training.plan import plan
from functron.training.step import State

_STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant",
           "inverse-square-root": "inverse_square_root", "WSD": "wsd"}  # fmt: skip
_WSD = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
_OF_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
"""Options of torch's Adam and Transformer Engine's, which take groups from a checkpoint whole."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def read(path: Path, *, model: str | None = None) -> tuple[config.TrainConfig, State]:
    """The run in a Megatron checkpoint, and its state, whole.

    Args:
        path: the folder of an iteration, or the one above, with the latest's number.
        model: a preset, for a checkpoint without arguments, of which the parameters are read; None:
            they are there.

    Raises:
        ValueError: as `hub.megatron_files.open_checkpoint`, `hub.megatron.config_of` and `load`; or
            what the checkpoint says of samples, steps and schedule does not fit together.
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
        run = settings_of(args, opened)
    if not isinstance(run.architecture, GPTConfig):
        refuse("cannot convert", "model", run.family.title, "a GPT")
    run = dataclasses.replace(run, source=f"megatron:{path}")
    loaded = megatron.load(opened, run.gpt)
    made = plan(run, Mesh())
    state = made.init(random.key(run.seed), loaded.masters or loaded.params)
    if args is None or loaded.mu is None:
        return run, state
    return run, _with_state(state, loaded, opened, run)


def _with_state(
    state: State, loaded: megatron.Loaded, opened: Opened, run: config.TrainConfig
) -> State:
    """`state` with the moments, masters and counts of the checkpoint."""
    iteration = opened.common.get("iteration", 0)
    scheduler = opened.common.get("opt_param_scheduler") or {}
    updates = scheduler.get("num_steps", opened.step * run.global_batch)
    found = {"mu": loaded.mu, "nu": loaded.nu, "masters": loaded.masters}
    flat = {
        name: dict(zip(tree.paths(values), tree.leaves(values), strict=True))
        for name, values in found.items()
        if values is not None
    }
    scheduled = iteration if run.ramp_up else updates // run.global_batch
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


# --- arguments


def settings_of(args: Mapping[str, Any], opened: Opened) -> config.TrainConfig:
    """The configuration of a run that goes on as Megatron-LM would with these arguments.

    Raises:
        ValueError: some say what we have no counterpart of; all are listed.
    """
    architecture = megatron.config_of(args, where=str(opened.folder))
    problems = _problems(args)
    raise_problems(f"cannot go on with the run in {opened.folder}", problems)
    rows, samples = args["global_batch_size"], args.get("micro_batch_size") or 1
    ramp = args.get("rampup_batch_size")
    base = config.TrainConfig(model="megatron", gpt=architecture)
    if architecture.dtype in _PRECISIONS:
        base = config.with_precision(base, _PRECISIONS[architecture.dtype])
    run = dataclasses.replace(
        base,
        gpt=architecture,
        steps=args.get("train_iters") or opened.common.get("iteration", 1),
        seq=args["seq_length"],
        global_batch=rows,
        microbatches=rows // samples if rows % samples == 0 else 1,
        ramp_up=" ".join(map(str, ramp)) if ramp else "",
        seed=args.get("seed") or 0,
        optimizer=_optimizer_of(args, base.optimizer),
        learning_rate=_schedule_of(args, opened.common.get("opt_param_scheduler") or {}),
    )
    _check_samples(args, opened, run)
    return run


def _problems(args: Mapping[str, Any]) -> list[Problem]:
    found = [
        Problem(name, repr(args.get(name)), "a positive number")
        for name in ("global_batch_size", "seq_length")
        if type(args.get(name)) is not int or args[name] < 1
    ]
    only = {
        "optimizer": ("adam", None),
        "decoupled_lr": (None,),
        "decoupled_weight_decay": (True, None),
        "lr_decay_style": (*_STYLES, None),
        "lr_wsd_decay_style": (*_WSD, None) if args.get("lr_decay_style") == "WSD" else (
            args.get("lr_wsd_decay_style"),
        ),
    }  # fmt: skip
    for name, allowed in only.items():
        if args.get(name) not in allowed:
            wanted = " or ".join(repr(each) for each in allowed if each is not None) or "None"
            found.append(Problem(name, repr(args[name]), wanted, "there is no such thing here"))
    if args.get("attention_dropout"):
        got, fix = repr(args["attention_dropout"]), "our attention drops nothing"
        found.append(Problem("attention_dropout", got, "0", fix))
    return found


def _optimizer_of(args: Mapping[str, Any], base: OptimizerConfig) -> OptimizerConfig:
    def given(name: str, default: float) -> float:
        value = args.get(name)
        return default if value is None else float(value)

    style = args.get("weight_decay_incr_style") or "constant"
    decay = given("weight_decay", 0.01)
    ends = (given("start_weight_decay", decay), given("end_weight_decay", decay))
    changes = style != "constant"
    return dataclasses.replace(
        base,
        name="adamw",
        b1=given("adam_beta1", 0.9),
        b2=given("adam_beta2", 0.999),
        eps=given("adam_eps", 1e-8),
        clip_norm=given("clip_grad", 1.0),
        weight_decay=decay,
        weight_decay_incr_style=style,  # type: ignore[arg-type]  # the options are checked
        start_weight_decay=ends[0] if changes else 0.0,
        end_weight_decay=ends[1] if changes else 0.0,
    )


def _schedule_of(args: Mapping[str, Any], scheduler: Mapping[str, Any]) -> ScheduleConfig:
    """The schedule, in steps; the scheduler's state says it in samples, and goes before `args`."""
    rows = args["global_batch_size"]

    def steps(kept: str, name: str, default: int) -> int:
        if kept in scheduler:
            return round(scheduler[kept] / rows)
        return default if args.get(name) is None else args[name]

    style = scheduler.get("lr_decay_style") or args.get("lr_decay_style") or "linear"
    return ScheduleConfig(
        name=_STYLES[style],
        peak=float(scheduler.get("max_lr") or args.get("lr") or 0.0),
        end=float(scheduler.get("min_lr") or args.get("min_lr") or 0.0),
        init=float(args.get("lr_warmup_init") or 0.0),
        warmup_steps=steps("lr_warmup_steps", "lr_warmup_iters", 0),
        total_steps=steps("lr_decay_steps", "lr_decay_iters", args.get("train_iters") or 1),
        decay_steps=args.get("lr_wsd_decay_iters") or ScheduleConfig.decay_steps,
        decay=_WSD.get(args.get("lr_wsd_decay_style") or "", ScheduleConfig.decay),
    )


def _check_samples(args: Mapping[str, Any], opened: Opened, run: config.TrainConfig) -> None:
    """Refuse a run that has not read as many samples as its steps would have."""
    step, consumed = opened.common.get("iteration", 0), args.get("consumed_train_samples")
    expected = run.batches.first_sample(step)
    if consumed is not None and consumed != expected:
        wanted = f"{expected}: {step} steps of {run.global_batch}"
        fix = "its batches were not always of this size: the data would not go on where it was"
        title = "the run has read other samples than its steps have"
        refuse(title, "consumed_train_samples", str(consumed), wanted, fix)


def arguments_of(
    run: config.TrainConfig, step: int, *, expert_parallel: int = 1
) -> argparse.Namespace:
    """Megatron-LM's arguments of a run at a step, on so many ranks of expert parallelism.

    Raises:
        ValueError: Megatron has no such model, optimizer or schedule; all offenders are listed.
    """
    table = megatron.arguments_of(run.gpt, seq=run.seq)
    own, rate = run.optimizer, run.rate_schedule
    styles = {ours: theirs for theirs, ours in _STYLES.items()}
    found = [
        Problem(name, repr(value), wanted)
        for name, value, wanted, good in (
            ("optimizer.name", own.name, "'adamw'", own.name == "adamw"),
            ("learning_rate.name", rate.name, " or ".join(styles), rate.name in styles),
            ("optimizer.groups", own.groups, "''", not own.groups),
            ("lora_rank", run.lora_rank, "0: merge adapters first", not run.lora_rank),
        )
        if not good
    ]
    raise_problems("Megatron has no such run", found)
    decays = (own.start_weight_decay, own.end_weight_decay)
    decays = decays if own.weight_decay_incr_style != "constant" else (own.weight_decay,) * 2
    table |= {
        "global_batch_size": run.global_batch, "micro_batch_size": 1, "train_iters": run.steps,
        "rampup_batch_size": [int(n) for n in run.ramp_up.split()] or None,
        "optimizer": "adam", "adam_beta1": own.b1, "adam_beta2": own.b2, "adam_eps": own.eps,
        "clip_grad": own.clip_norm, "weight_decay": own.weight_decay,
        "start_weight_decay": decays[0], "end_weight_decay": decays[1],
        "weight_decay_incr_style": own.weight_decay_incr_style, "lr": rate.peak,
        "min_lr": rate.last, "lr_decay_style": styles[rate.name], "lr_warmup_init": rate.init,
        "lr_decay_iters": rate.total_steps, "lr_warmup_iters": rate.num_warmup_steps,
        "lr_wsd_decay_iters": rate.decay_steps if rate.name == "wsd" else None,
        "lr_wsd_decay_style": {ours: theirs for theirs, ours in _WSD.items()}.get(rate.decay),
        "seed": run.seed, "iteration": step,
        "consumed_train_samples": run.batches.first_sample(step),
        "consumed_valid_samples": 0, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": expert_parallel,
        "use_distributed_optimizer": True, "ckpt_format": "torch_dist",
    }  # fmt: skip
    return argparse.Namespace(**table)


# --- out


def write(
    folder: Path,
    run: config.TrainConfig,
    stored: checkpoint.Checkpoint,
    *,
    expert_parallel: int = 1,
) -> None:
    """Write a checkpoint of a run as Megatron's, into an empty folder, with its optimizer's state.

    Args:
        folder: where.
        run: its configuration.
        stored: the checkpoint.
        expert_parallel: ranks of expert parallelism of the Megatron run that is to load it: with
            more than one it has an optimizer for experts alone, whose settings are apart.

    Raises:
        ValueError: as `arguments_of`; or the checkpoint's optimizer keeps no moments in float32.
    """
    step = int(stored["step"][...]) if "step" in stored else 0
    if expert_parallel < 1 or (expert_parallel > 1 and run.gpt.moe is None):
        wanted = "1 without experts" if run.gpt.moe is None else "at least 1"
        refuse("cannot convert", "expert_parallel", expert_parallel, wanted)
    args = arguments_of(run, step, expert_parallel=expert_parallel)
    params = checkpoint.stored_params(stored, run.family.defs(run.architecture))
    trees: dict[str, Any] = {"exp_avg": {}, "exp_avg_sq": {}, "param": {}}
    names = {"mu": "exp_avg", "nu": "exp_avg_sq", "masters": "param"}
    counts, parents = {}, set()
    for path in stored:
        role = re.search(r"(?:^|/)(mu|nu|masters)/(.*)$", path)
        if path.startswith("opt_state/") and role:
            _put(trees[names[role[1]]], role[2], stored[path])
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
    common = _common(run, args, step, updates if state else 0, bool(state))
    inside = folder / f"iter_{step:07d}"
    inside.mkdir()
    megatron.save(inside, megatron.Saving(run.gpt, params, _with_masters(state), common))
    (folder / LATEST).write_text(str(step), encoding="utf-8")


def _with_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state by all names: plain optimizers call masters otherwise than the distributed one."""
    return {**state, "fp32_param": state["param"]} if state else {}


def _put(into: dict, path: str, leaf: Any) -> None:
    *above, name = path.split("/")
    for key in above:
        into = into.setdefault(key, {})
    into[name] = leaf


def _common(
    run: config.TrainConfig, args: argparse.Namespace, step: int, updates: int, has_state: bool
) -> dict[str, Any]:
    """The contents of ``common.pt``: for one optimizer, distributed or not."""
    rows = run.global_batch
    made: dict[str, Any] = {
        "args": args, "checkpoint_version": 3.0, "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {
            "max_lr": args.lr, "min_lr": args.min_lr, "lr_decay_style": args.lr_decay_style,
            "lr_warmup_steps": args.lr_warmup_iters * rows,
            "lr_decay_steps": args.lr_decay_iters * rows,
            "num_steps": run.batches.first_sample(step),
            "start_wd": args.start_weight_decay, "end_wd": args.end_weight_decay,
            "wd_incr_style": args.weight_decay_incr_style, "wd_incr_steps": run.steps * rows,
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
        return {  # the first two are the distributed optimizer's, the others a plain one's
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
            "state": {"common_step": torch.tensor(float(updates))},
            "param_groups": groups,
        }

    several = args.expert_model_parallel_size > 1
    made["optimizer"] = {n: optimizer(bool(n)) for n in (0, 1)} if several else optimizer(False)
    return made
