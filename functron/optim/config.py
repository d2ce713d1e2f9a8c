"""The optimizers and schedules that configurations stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from functron import tree
from functron.errors import Problem, public, raise_problems
from functron.ops.kernels import AUTO, Kernels
from functron.optim import schedules
from functron.optim.adafactor import adafactor
from functron.optim.adam import MomentDtype, adam, adamw
from functron.optim.adam_mini import adam_mini, blocks
from functron.optim.average import with_average
from functron.optim.clip import clip_by_global_norm
from functron.optim.finite import apply_if_finite
from functron.optim.groups import Group, by_group, group_problems, parse_groups
from functron.optim.inject import inject_hyperparams
from functron.optim.learning_rate import LearningRate
from functron.optim.lion import lion
from functron.optim.mask import Mask, not_norm_or_bias
from functron.optim.masters import with_fp32_masters
from functron.optim.muon import matrices, muon
from functron.optim.offload import offload
from functron.optim.quantise import check_blocks, quantisable
from functron.optim.schedules import Schedule
from functron.optim.settings import (
    Moment,
    OptimizerConfig,
    ScheduleConfig,
    optimizer_problems,
    schedule_problems,
    torch_dtype,
)
from functron.optim.sgd import sgd
from functron.optim.soap import soap
from functron.optim.stochastic import with_stochastic_rounding
from functron.optim.transformation import GradientTransformation, chain
from functron.optim.widths import has_widths, width_multiples, width_problems
from functron.optim.zero import zero
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P

_SCHEDULES: Mapping[str, Callable[[ScheduleConfig], Schedule]] = {
    "constant": lambda c: schedules.constant(c.peak, warmup_steps=c.num_warmup_steps, init=c.init),
    "linear": lambda c: schedules.linear(c.peak, c.total_steps, **_ends(c)),
    "cosine": lambda c: schedules.cosine_decay(c.peak, c.total_steps, **_ends(c)),
    "exponential": lambda c: schedules.exponential_decay(c.peak, c.total_steps, **_ends(c)),
    "polynomial": lambda c: schedules.polynomial_decay(
        c.peak, c.total_steps, power=c.power, **_ends(c)
    ),
    "wsd": lambda c: schedules.wsd(
        c.peak, c.total_steps, c.decay_steps, decay=c.decay, **_ends(c)
    ),
    "inverse_square_root": lambda c: schedules.inverse_square_root(
        c.peak, c.total_steps, **_ends(c)
    ),
}  # fmt: skip


def _ends(c: ScheduleConfig) -> dict:
    return {"warmup_steps": c.num_warmup_steps, "end": c.last, "init": c.init}


@dataclass(frozen=True)
class _Given:
    """What an optimizer needs to know of the parameters."""

    mask: Mask
    defs: tree.Tree
    specs: tree.Tree
    kernels: Kernels = AUTO


_OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, LearningRate, _Given], GradientTransformation]]
_OPTIMIZERS = {
    "adamw": lambda c, rate, given: _adamw(c, rate, given),
    "adam": lambda c, rate, given: adam(
        rate, c.b1, c.b2, c.eps, **_moments(c, given), kernels=given.kernels
    ),
    "sgd": lambda c, rate, given: sgd(rate, c.momentum or None, c.nesterov),
    "lion": lambda c, rate, given: lion(
        rate, c.b1, c.b2, c.weight_decay, given.mask, mu_dtype=torch_dtype(c.mu_dtype)
    ),
    "adafactor": lambda c, rate, given: _adafactor(c, rate, given),
    "adam_mini": lambda c, rate, given: adam_mini(
        rate, blocks(given.defs), c.b1, c.b2, c.eps, c.weight_decay, given.mask,
        mu_dtype=torch_dtype(c.mu_dtype), defs=given.defs, specs=given.specs,
    ),
    "muon": lambda c, rate, given: muon(
        rate, matrices(given.defs), c.muon.momentum, c.muon.nesterov, c.weight_decay, given.mask,
        scale=c.muon.scale, steps=c.muon.steps, specs=given.specs,
        distributed=c.muon.distributed, dtype=torch_dtype(c.muon.dtype),
        others=_adamw(c, rate, given),
    ),
    "soap": lambda c, rate, given: soap(
        rate, matrices(given.defs), c.b1, c.b2, c.eps, c.weight_decay, given.mask,
        precondition_decay=c.soap.decay, frequency=c.soap.frequency, max_dim=c.soap.max_dim,
        specs=given.specs, distributed=c.soap.distributed, others=_adamw(c, rate, given),
    ),
}  # fmt: skip
_BY_DEFS = ("muon", "soap", "adam_mini")


def _adamw(c: OptimizerConfig, rate: LearningRate, given: _Given) -> GradientTransformation:
    return adamw(
        rate, c.b1, c.b2, c.eps, c.weight_decay, given.mask, **_moments(c, given),
        kernels=given.kernels,
    )  # fmt: skip


def _adafactor(c: OptimizerConfig, rate: LearningRate, given: _Given) -> GradientTransformation:
    own = c.adafactor
    scheduled = c.weight_decay_incr_style != "constant"
    decay = _times(rate, c.weight_decay) if scheduled or c.weight_decay else None
    return adafactor(
        rate,
        own.min_dim,
        own.decay_rate,
        multiply_by_parameter_scale=own.parameter_scale,
        clipping_threshold=own.clip or None,
        momentum=own.momentum or None,
        weight_decay_rate=decay,
        weight_decay_mask=given.mask,
        defs=given.defs,
        specs=given.specs,
    )


def _times(rate: LearningRate, factor: float) -> LearningRate:
    if isinstance(factor, (int, float)) and factor == 1:
        return rate
    return (lambda count: factor * rate(count)) if callable(rate) else factor * rate


def _moments(config: OptimizerConfig, given: _Given) -> dict:
    eight = "int8" in (config.mu_dtype, config.nu_dtype)
    return {
        "mu_dtype": _moment_dtype(config.mu_dtype),
        "nu_dtype": _moment_dtype(config.nu_dtype),
        "quantised": quantisable(given.defs) if eight and given.defs is not None else None,
    }


def _moment_dtype(name: Moment) -> MomentDtype:
    return "int8" if name == "int8" else torch_dtype(name)


@public
def make_schedule(config: ScheduleConfig) -> Schedule:
    """The schedule that `config` describes.

    Raises:
        ValueError: listing everything that `schedule_problems` finds.
    """
    raise_problems("the learning-rate schedule cannot be built", schedule_problems(config))
    return _SCHEDULES[config.name](config)


@public
def make_optimizer(
    config: OptimizerConfig,
    learning_rate: LearningRate,
    *,
    specs: tree.Tree = None,
    copies: tree.Tree = 1,
    mask: Mask = not_norm_or_bias,
    defs: tree.Tree = None,
    whole: tree.Tree = None,
    shards: tree.Tree = None,
    mesh: Mesh | BoundMesh | None = None,
    total_steps: int | None = None,
    kernels: Kernels = AUTO,
) -> GradientTransformation:
    """The optimizer that `config` describes: clipping, then the optimizer (on masters).

    From the outside: `apply_if_finite`, clipping, `zero`, `offload`, masters or stochastic
    rounding, the average of parameters, groups, the optimizer itself.

    Args:
        config: what to build.
        learning_rate: a number or a schedule.
        specs: specs of the parameters, for the gradient norm; None: nothing is sharded.
        copies: how many ranks of a pipeline hold each parameter, for the gradient norm.
        mask: which parameters decay; by default all but norms and biases.
        defs: the parameters' `ParamDef`s; needed by muon, soap, adam_mini, moments in 8 bits and
            groups, and by adafactor where anything is sharded or stacked. Where they have widths
            (muP), learning rates are multiplied as `width_multiples` says.
        whole: those of the whole model, where a rank of a pipeline has some; None: `defs`.
        shards: the specs of every rank's part of the parameters, of `shard_specs`, which makes it
            ZeRO: `zero` around the optimizer. None: every rank updates what it holds.
        mesh: the ranks; with it, moments in 8 bits are checked against how they are sharded.
        total_steps: the count at which a weight decay that changes is what it is to be.
        kernels: whether "adamw" and "global_norm" are kernels; see `functron.ops.kernels.use`.

    Raises:
        ValueError: listing everything that `optimizer_problems` finds; `defs` is missing; or blocks
            of 8-bit moments would be divided.
    """
    found = optimizer_problems(config)
    eight = "int8" in (config.mu_dtype, config.nu_dtype)
    groups, _ = parse_groups(config.groups)
    if defs is None and (config.name in _BY_DEFS or groups):
        found.append(Problem("defs", "None", "the parameters' defs, to tell them apart by"))
    elif groups and copies == 1:  # else ranks of a pipeline have some of the parameters each
        found += group_problems(defs, groups, "optimizer.groups")
    whole = defs if whole is None else whole
    if has_widths(whole):
        found += width_problems(config)
    style = config.weight_decay_incr_style
    if style != "constant" and total_steps is None:
        wanted = f"the steps of a weight decay that is {style}"
        found.append(Problem("total_steps", "None", wanted, "pass them, or leave it constant"))
    raise_problems("the optimizer cannot be built", found)
    multiples = width_multiples(config, whole)
    seen = specs if shards is None else shards
    if eight and defs is not None and mesh is not None:
        check_blocks(defs, P() if seen is None else seen, mesh)
    given = _Given(mask, defs, seen, kernels)
    inner = _inner(config, learning_rate, given, groups, multiples, total_steps)
    if config.ema_decay:
        inner = with_average(inner, config.ema_decay)
    if config.fp32_masters:
        dtypes = None if defs is None else tree.map(lambda d: d.dtype, defs)
        inner = with_fp32_masters(inner, dtypes)
    if config.stochastic_rounding:
        inner = with_stochastic_rounding(inner, defs=defs, specs=seen)
    if config.offload:
        inner = offload(inner)
    if shards is not None:
        inner = zero(inner, P() if specs is None else specs, shards)
    if config.clip_norm:
        inner = chain(clip_by_global_norm(config.clip_norm, seen, copies, kernels=kernels), inner)
    if config.skip_nonfinite:
        inner = apply_if_finite(inner, config.skip_nonfinite, specs=seen)
    return inner


def _inner(
    config: OptimizerConfig,
    rate: LearningRate,
    given: _Given,
    groups: tuple[Group, ...],
    multiples: Mapping[str, float],
    total_steps: int | None,
) -> GradientTransformation:
    if config.name == "adafactor" and config.adafactor.relative_step:
        rate = schedules.relative_step()

    def make(group: Group) -> GradientTransformation:
        own_rate = _times(rate, group.learning_rate)

        def decaying(weight_decay: float) -> GradientTransformation:
            own = replace(config, weight_decay=weight_decay)
            return _OPTIMIZERS[config.name](own, own_rate, given)

        style, share = config.weight_decay_incr_style, group.weight_decay
        if style == "constant" or total_steps is None:
            return decaying(config.weight_decay * share)
        ends = (share * config.start_weight_decay, share * config.end_weight_decay)
        decay: Any = schedules.weight_decay_increase(*ends, total_steps, style)
        return inject_hyperparams(decaying)(weight_decay=decay)

    return by_group(make, given.defs, groups, multiples)
