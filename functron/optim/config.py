"""Optimizers and schedules as data: what a configuration file says, and the objects it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from functron import tree
from functron.errors import Problem, nearest, raise_problems
from functron.optim import schedules
from functron.optim.adam import adam, adamw
from functron.optim.clip import clip_by_global_norm
from functron.optim.learning_rate import LearningRate
from functron.optim.mask import Mask, not_norm_or_bias
from functron.optim.masters import with_fp32_masters
from functron.optim.schedules import Schedule
from functron.optim.sgd import sgd
from functron.optim.transformation import GradientTransformation, chain


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


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and what is chained around it.

    Attributes:
        name: "adamw", "adam" or "sgd".
        b1: decay of Adam's mean of gradients.
        b2: decay of Adam's mean of squared gradients.
        eps: Adam's epsilon.
        weight_decay: times the learning rate (adamw only).
        momentum: of sgd; 0 for none.
        nesterov: Nesterov momentum (sgd only).
        clip_norm: largest global gradient norm; 0 for no clipping.
        fp32_masters: keep float32 copies of parameters stored in bfloat16 or float16.
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

_OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, LearningRate, Mask], GradientTransformation]]
_OPTIMIZERS = {
    "adamw": lambda c, rate, mask: adamw(rate, c.b1, c.b2, c.eps, c.weight_decay, mask),
    "adam": lambda c, rate, mask: adam(rate, c.b1, c.b2, c.eps),
    "sgd": lambda c, rate, mask: sgd(rate, c.momentum or None, c.nesterov),
}


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
) -> GradientTransformation:
    """The optimizer that `config` describes: clipping, then the optimizer (on masters).

    Args:
        config: what to build.
        learning_rate: a number or a schedule.
        specs: specs of the parameters, for the gradient norm; None: nothing is sharded.
        copies: how many ranks of a pipeline hold each parameter, for the gradient norm.
        mask: which parameters decay; by default all but norms and biases.

    Raises:
        ValueError: listing everything that `optimizer_problems` finds.
    """
    raise_problems("the optimizer cannot be built", optimizer_problems(config))
    inner = _OPTIMIZERS[config.name](config, learning_rate, mask)
    if config.fp32_masters:
        inner = with_fp32_masters(inner)
    if not config.clip_norm:
        return inner
    return chain(clip_by_global_norm(config.clip_norm, specs, copies), inner)
