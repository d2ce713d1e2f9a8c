"""Optimizers and schedules as data: what a configuration file says, and the objects it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from functron import tree
from functron.errors import Problem, nearest, raise_problems
from functron.optim import schedules
from functron.optim.adam import MomentDtype, adam, adamw
from functron.optim.clip import clip_by_global_norm
from functron.optim.learning_rate import LearningRate
from functron.optim.mask import Mask, not_norm_or_bias
from functron.optim.masters import with_fp32_masters
from functron.optim.muon import Scale, matrices, muon
from functron.optim.offload import offload
from functron.optim.quantise import check_blocks, quantisable
from functron.optim.schedules import Schedule
from functron.optim.sgd import sgd
from functron.optim.transformation import GradientTransformation, chain
from functron.optim.zero import zero
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule; see `functron.optim.schedules`.

    Attributes:
        name: "constant", "linear", "cosine", "wsd" or "inverse_square_root".
        peak: the highest learning rate.
        warmup_steps: updates of linear warm-up from 0.
        total_steps: the count at which `end` is reached (linear, cosine, wsd).
        end: the last learning rate, or the floor of inverse_square_root.
        decay_steps: length of the decay at the end of `total_steps` (wsd only).
        decay: its shape: "linear", "cosine", "sqrt" or "exponential" (wsd only).
    """

    name: str = "cosine"
    peak: float = 3e-4
    warmup_steps: int = 0
    total_steps: int = 1000
    end: float = 0.0
    decay_steps: int = 200
    decay: str = "linear"


Moment = Literal["", "float32", "bfloat16", "int8"]
Dtype = Literal["", "float32", "bfloat16"]


@dataclass(frozen=True)
class MuonConfig:
    """What concerns Muon alone; see `functron.optim.muon`.

    Attributes:
        momentum: decay of the mean of gradients.
        nesterov: Nesterov momentum.
        scale: of orthogonalised matrices: "adamw", to share AdamW's learning rate, or "spectral".
        steps: Newton-Schulz steps.
        distributed: compute every matrix that is sharded on one rank, not on all.
        dtype: in which matrices are multiplied; empty: their own.
    """

    momentum: float = 0.95
    nesterov: bool = True
    scale: Scale = "adamw"
    steps: int = 5
    distributed: bool = False
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and what is chained around it.

    Attributes:
        name: "adamw", "adam", "sgd", or "muon": Muon for matrices of layers, AdamW for the rest.
        b1: decay of Adam's mean of gradients.
        b2: decay of Adam's mean of squared gradients.
        eps: Adam's epsilon.
        weight_decay: times the learning rate (adamw and muon).
        momentum: of sgd; 0 for none.
        nesterov: Nesterov momentum (sgd only).
        clip_norm: largest global gradient norm; 0 for no clipping.
        fp32_masters: keep float32 copies of parameters stored in bfloat16 or float16.
        mu_dtype: how Adam's mean of gradients is stored: float32, bfloat16, int8 (in blocks), or
            empty: as parameters or their masters are.
        nu_dtype: the same for the mean of squared gradients.
        offload: keep the optimizer's state in host memory.
        grad_dtype: add up gradients of microbatches in float32 or bfloat16; empty: in their own.
        reduce_dtype: sum gradients over ranks in float32 or bfloat16; empty: in their own.
        muon: what concerns Muon alone.
    """

    name: str = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float = 1.0
    fp32_masters: bool = False
    mu_dtype: Moment = ""
    nu_dtype: Moment = ""
    offload: bool = False
    grad_dtype: Dtype = ""
    reduce_dtype: Dtype = ""
    muon: MuonConfig = field(default_factory=MuonConfig)


_SCHEDULES: Mapping[str, Callable[[ScheduleConfig], Schedule]] = {
    "constant": lambda c: schedules.constant(c.peak, warmup_steps=c.warmup_steps),
    "linear": lambda c: schedules.linear(
        c.peak, c.total_steps, warmup_steps=c.warmup_steps, end=c.end
    ),
    "cosine": lambda c: schedules.cosine_decay(
        c.peak, c.total_steps, warmup_steps=c.warmup_steps, end=c.end
    ),
    "wsd": lambda c: schedules.wsd(
        c.peak, c.total_steps, c.decay_steps,
        warmup_steps=c.warmup_steps, end=c.end, decay=c.decay,
    ),
    "inverse_square_root": lambda c: schedules.inverse_square_root(
        c.peak, warmup_steps=c.warmup_steps, end=c.end
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Given:
    """What an optimizer needs to know of the parameters."""

    mask: Mask
    defs: tree.Tree
    specs: tree.Tree


_OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, LearningRate, _Given], GradientTransformation]]
_OPTIMIZERS = {
    "adamw": lambda c, rate, given: _adamw(c, rate, given),
    "adam": lambda c, rate, given: adam(rate, c.b1, c.b2, c.eps, **_moments(c, given)),
    "sgd": lambda c, rate, given: sgd(rate, c.momentum or None, c.nesterov),
    "muon": lambda c, rate, given: muon(
        rate, matrices(given.defs), c.muon.momentum, c.muon.nesterov, c.weight_decay, given.mask,
        scale=c.muon.scale, steps=c.muon.steps, specs=given.specs,
        distributed=c.muon.distributed, dtype=torch_dtype(c.muon.dtype),
        others=_adamw(c, rate, given),
    ),
}  # fmt: skip


def _adamw(c: OptimizerConfig, rate: LearningRate, given: _Given) -> GradientTransformation:
    return adamw(rate, c.b1, c.b2, c.eps, c.weight_decay, given.mask, **_moments(c, given))


def _moments(config: OptimizerConfig, given: _Given) -> dict:
    eight = "int8" in (config.mu_dtype, config.nu_dtype)
    return {
        "mu_dtype": _moment_dtype(config.mu_dtype),
        "nu_dtype": _moment_dtype(config.nu_dtype),
        "quantised": quantisable(given.defs) if eight and given.defs is not None else None,
    }


def _moment_dtype(name: Moment) -> MomentDtype:
    return "int8" if name == "int8" else torch_dtype(name)


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype that a configuration names; None for the empty name.

    For the arguments `grad_dtype` and `reduce_dtype` of `functron.make_step`.
    """
    return getattr(torch, name) if name else None


def schedule_problems(config: ScheduleConfig, path: str = "schedule") -> list[Problem]:
    """Everything wrong with `config`; fields that its schedule does not use are not judged."""
    if config.name not in _SCHEDULES:
        fix = nearest(config.name, _SCHEDULES)
        return [Problem(f"{path}.name", repr(config.name), "a learning-rate schedule", fix)]
    ends = config.name in ("linear", "cosine", "wsd")
    is_wsd = config.name == "wsd"
    found = schedules.problems(
        config.peak,
        config.warmup_steps,
        config.total_steps if ends else None,
        config.end if config.name != "constant" else 0.0,
        config.decay_steps if is_wsd else None,
        config.decay if is_wsd else "linear",
    )
    return [Problem(f"{path}.{p.path}", p.got, p.wanted, p.fix) for p in found]


def optimizer_problems(config: OptimizerConfig, path: str = "optimizer") -> list[Problem]:
    """Everything wrong with `config`."""
    found = []
    if config.name not in _OPTIMIZERS:
        fix = nearest(config.name, _OPTIMIZERS)
        found.append(Problem(f"{path}.name", repr(config.name), "an optimizer", fix))
    for name in ("b1", "b2", "momentum"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            found.append(Problem(f"{path}.{name}", repr(value), "at least 0 and less than 1"))
    for name in ("eps", "weight_decay", "clip_norm"):
        value = getattr(config, name)
        if not 0 <= value < float("inf"):
            found.append(Problem(f"{path}.{name}", repr(value), "a finite number of at least 0"))
    if config.name == "sgd" and config.nesterov and not config.momentum:
        found.append(
            Problem(f"{path}.nesterov", "true with momentum 0", "a momentum", "set momentum = 0.9")
        )
    choices = {"mu_dtype": Moment, "nu_dtype": Moment, "grad_dtype": Dtype, "reduce_dtype": Dtype}
    found += _choice_problems(config, choices, path)
    if config.name == "sgd":
        found += [
            Problem(f"{path}.{name}", repr(getattr(config, name)), "nothing for sgd: it has none")
            for name in ("mu_dtype", "nu_dtype")
            if getattr(config, name)
        ]
    if config.name == "muon":
        found += _muon_problems(config.muon, f"{path}.muon")
    return found


def _choice_problems(config: object, choices: Mapping[str, object], path: str) -> list[Problem]:
    """The fields whose values are none of those of their Literal."""
    return [
        Problem(f"{path}.{name}", repr(value), f"one of {', '.join(map(repr, known))}")
        for name, kind in choices.items()
        if (value := getattr(config, name)) not in (known := get_args(kind))
    ]


def _muon_problems(config: MuonConfig, path: str) -> list[Problem]:
    found = _choice_problems(config, {"scale": Scale, "dtype": Dtype}, path)
    if not 0 <= config.momentum < 1:
        got = repr(config.momentum)
        found.append(Problem(f"{path}.momentum", got, "at least 0 and less than 1"))
    if config.steps < 1:
        found.append(Problem(f"{path}.steps", str(config.steps), "at least 1", "set it to 5"))
    return found


def make_schedule(config: ScheduleConfig) -> Schedule:
    """The schedule that `config` describes.

    Raises:
        ValueError: listing everything that `schedule_problems` finds.
    """
    raise_problems("the learning-rate schedule cannot be built", schedule_problems(config))
    return _SCHEDULES[config.name](config)


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: LearningRate,
    *,
    specs: tree.Tree = None,
    copies: tree.Tree = 1,
    mask: Mask = not_norm_or_bias,
    defs: tree.Tree = None,
    shards: tree.Tree = None,
    mesh: Mesh | BoundMesh | None = None,
) -> GradientTransformation:
    """The optimizer that `config` describes: clipping, then the optimizer (on masters).

    Args:
        config: what to build.
        learning_rate: a number or a schedule.
        specs: specs of the parameters, for the gradient norm; None: nothing is sharded.
        copies: how many ranks of a pipeline hold each parameter, for the gradient norm.
        mask: which parameters decay; by default all but norms and biases.
        defs: the parameters' `ParamDef`s; needed by muon and by moments in 8 bits.
        shards: the specs of every rank's part of the parameters, of `shard_specs`, which makes it
            ZeRO: `zero` around the optimizer. None: every rank updates what it holds.
        mesh: the ranks; with it, moments in 8 bits are checked against how they are sharded.

    Raises:
        ValueError: listing everything that `optimizer_problems` finds; `defs` is missing; or blocks
            of 8-bit moments would be divided.
    """
    found = optimizer_problems(config)
    eight = "int8" in (config.mu_dtype, config.nu_dtype)
    if defs is None and config.name == "muon":
        found.append(Problem("defs", "None", "the parameters' defs, to tell matrices by"))
    raise_problems("the optimizer cannot be built", found)
    seen = specs if shards is None else shards
    if eight and defs is not None and mesh is not None:
        check_blocks(defs, P() if seen is None else seen, mesh)
    inner = _OPTIMIZERS[config.name](config, learning_rate, _Given(mask, defs, seen))
    if config.fp32_masters:
        inner = with_fp32_masters(inner)
    if config.offload:
        inner = offload(inner)
    if shards is not None:
        inner = zero(inner, P() if specs is None else specs, shards)
    if not config.clip_norm:
        return inner
    return chain(clip_by_global_norm(config.clip_norm, seen, copies), inner)
