"""Optimizers and schedules as data: their configurations, the problems of these, and the results.

Under muP learning rates are multiplied by numbers that depend on the widths of a matrix, and on the
optimizer. By `ParamDef.width` a matrix sums over i times as many inputs, and has o times as many
outputs, as where the learning rate was tuned. A parameter that moves by the same share of itself at
every width keeps the rate (1); see `functron.models.mup` for why, and for what has no width here.

| optimizer                     | entries of an update            | multiple                       |
|-------------------------------|---------------------------------|--------------------------------|
| adam, adamw, lion, adam_mini  | about 1, at any width           | 1 / i                          |
| muon, matrices of layers      | of spectral norm s(in, out)     | sqrt(o / i) s(base) / s(here)  |
| muon, all others              | those of AdamW                  | 1 / i                          |

The first is the Adam column of tables 3 and 8 of Yang et al. 2022 (https://arxiv.org/abs/2203.03466);
the signs of Lion are of size 1 as Adam's updates are, and so are Adam-mini's, whose blocks have one
second moment. Muon's is the spectral condition (Yang, Simon and Bernstein 2023,
https://arxiv.org/abs/2310.17813): changes of a matrix whose spectral norm is of order
sqrt(outputs / inputs) change what it makes by as much at every width. With the scale "spectral" an
update of a matrix that grows on both sides has that already (1), and is not scaled again; with
"adamw" it grows as the root of the width (1 / sqrt(i)). SGD, Adafactor and SOAP have no rule here.

Decays, which are times the learning rate, are divided by the same number: lr * decay stays.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from functron.core import tree
from functron.core.errors import (
    Problem,
    load_function,
    nearest,
    public,
    raise_problems,
    refuse,
)
from functron.core.settings import Need, Needs, find_unknown, section, setting
from functron.core.tables import shows_differences
from functron.ops.operations import AUTO, Kernels
from functron.optim import schedules
from functron.optim.adam import AdamwRule, MomentDtype, adam, adamw, in_one_pass
from functron.optim.average import with_average
from functron.optim.compact import adafactor, adam_mini, blocks, lion, sgd
from functron.optim.loss_scaling import (
    LossScale,
    apply_if_finite,
    loss_scale_problems,
    with_loss_scale,
)
from functron.optim.low_precision import (
    CODES,
    MasterBits,
    check_blocks,
    quantisable,
    with_fp32_masters,
    with_stochastic_rounding,
)
from functron.optim.masking import (
    Mask,
    ParameterGroup,
    by_group,
    group_problems,
    not_norm_or_bias,
    parse_groups,
)
from functron.optim.muon import SCALES, Scale, matrices, muon
from functron.optim.norms import clip_by_global_norm
from functron.optim.offload import offload
from functron.optim.schedules import LearningRate, RateSchedule, inject_hyperparams
from functron.optim.soap import soap
from functron.optim.transformation import (
    GradientTransformation,
    chain,
    least_problems,
    share_problems,
)
from functron.optim.zero import zero
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import Width
from functron.spmd.spec import P


@shows_differences
@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule; see `functron.optim.schedules`.

    Attributes:
        name: "constant", "linear", "cosine", "exponential", "polynomial", "wsd" or
            "inverse_square_root".
        peak: the highest learning rate.
        warmup_steps: updates of linear warm-up from `init`.
        total_steps: the count at which the last learning rate is reached (all but constant).
        end: the last learning rate, or the floor of inverse_square_root (Megatron-LM's min_lr); -1:
            end_fraction of the peak.
        decay_steps: length of the decay at the end of `total_steps` (wsd only).
        decay: its shape: "linear", "cosine", "sqrt", "exponential" or "halving" (wsd only).
        end_fraction: the last learning rate as a fraction of the peak (Optax's alpha).
        init: where the warm-up begins (Megatron-LM's lr_warmup_init).
        power: the exponent of polynomial.
        warmup_ratio: warm-up as a fraction of `total_steps`, where warmup_steps is 0; rounded up,
            at most all but one.
        rewarm_steps: updates of a linear change from rewarm_init to the schedule, such as after a
            run was extended; 0: none.
        rewarm_at: the count at which it begins.
        rewarm_init: the learning rate there.
    """

    name: str = "cosine"
    peak: float = setting(3e-4, "common")
    warmup_steps: int = setting(0, "common")
    total_steps: int = 1000
    end: float = -1.0
    decay_steps: int = 200
    decay: str = "linear"
    end_fraction: float = 0.0
    init: float = 0.0
    power: float = 2.0
    warmup_ratio: float = 0.0
    rewarm_steps: int = 0
    rewarm_at: int = 0
    rewarm_init: float = 0.0

    @property
    def last(self) -> float:
        """The last learning rate."""
        return self.end_fraction * self.peak if self.end == -1 else self.end

    @property
    def num_warmup_steps(self) -> int:
        """`warmup_steps`, or as many as `warmup_ratio` says."""
        share = math.ceil(self.warmup_ratio * self.total_steps)
        return self.warmup_steps or max(min(share, self.total_steps - 1), 0)


MomentName = Literal["", "float32", "bfloat16", "int8", "fp8"]
StateDtype = Literal["", "float32", "bfloat16"]
Increase = Literal["constant", "linear", "cosine"]


@shows_differences
@dataclass(frozen=True)
class MuonConfig:
    """Options of Muon alone; see `functron.optim.muon`.

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
    dtype: StateDtype = setting("bfloat16", box="precision")


@shows_differences
@dataclass(frozen=True)
class AdafactorConfig:
    """Options of Adafactor alone; see `functron.optim.compact`.

    Attributes:
        relative_step: the paper's learning rate, min(0.01, 1/sqrt(t)), in place of the schedule.
        parameter_scale: the learning rate is relative to the size of a parameter.
        decay_rate: the exponent by which the decay of second moments approaches 1.
        clip: largest root mean square of an update before the learning rate; 0: any.
        momentum: decay of a mean of the updates; 0: none, and no memory for it.
        min_dim: parameters whose second largest dim is smaller are not factored.
    """

    relative_step: bool = False
    parameter_scale: bool = True
    decay_rate: float = 0.8
    clip: float = 1.0
    momentum: float = 0.0
    min_dim: int = 128


@shows_differences
@dataclass(frozen=True)
class SoapConfig:
    """Options of SOAP alone; see `functron.optim.soap`.

    Attributes:
        frequency: updates between two of the eigenbases.
        max_dim: a side of a matrix that is larger is not preconditioned.
        decay: of the preconditioners, per update.
        distributed: compute every matrix that is sharded on one rank, which alone keeps its state.
    """

    frequency: int = 10
    max_dim: int = 10000
    decay: float = 0.95
    distributed: bool = True


@shows_differences
@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and what is chained around it.

    Attributes:
        name: "adamw", "adam", "sgd", "lion", "adafactor", "adam_mini" (AdamW with a second moment
            per head, row or column); or "muon" or "soap" for matrices of layers, with AdamW for the
            rest. Or your own, "package.module:function", called with the learning rate and those of
            these options, and of mask, defs and specs, that it names.
        b1: decay of Adam's mean of gradients (lion: the momentum's weight in an update).
        b2: decay of Adam's mean of squared gradients (lion: of the momentum).
        eps: Adam's epsilon.
        weight_decay: times the learning rate (all but adam and sgd).
        start_weight_decay: the initial weight decay, if weight_decay_incr_style is not constant.
        end_weight_decay: the final weight decay, at the end of the learning rate's schedule.
        weight_decay_incr_style: constant: `weight_decay` throughout; linear or cosine: from
            start_weight_decay to end_weight_decay, as in Megatron-LM.
        momentum: of sgd; 0 for none.
        nesterov: Nesterov momentum (sgd only).
        clip_norm: largest global gradient norm; 0 for no clipping.
        fp32_masters: keep float32 copies of bfloat16 and float16 parameters; they begin with the
            unrounded values: random numbers, or a converted model in float32.
        master_bits: 32; or 16: only the lower half of copies of bfloat16 parameters, 2 bytes
            instead of 4. (Copies midway between two bfloat16 numbers then round away from 0.)
        stochastic_rounding: instead of keeping copies, round these parameters stochastically.
        mu_dtype: how Adam's mean of gradients is stored: float32, bfloat16, int8 or fp8 (8 bits, in
            blocks with a scale each), or empty: as parameters or their masters are.
        nu_dtype: the same for the mean of squared gradients.
        offload: keep the optimizer's state in host memory.
        grad_dtype: accumulate gradients of microbatches in float32 or bfloat16; empty: in their own
            dtype.
        reduce_dtype: sum gradients over ranks in float32 or bfloat16; empty: in their own dtype.
        groups: parameters with multiples of the learning rate and weight decay, by patterns of
            their paths, the first that matches: "embed lr=0.1; blocks/*/router/* lr=0.5 decay=0".
        ema_decay: decay per update of the exponential moving average of the parameters; 0: no
            average.
        skip_nonfinite: skip at most this number of updates with non-finite gradients in a row; 0:
            none.
        loss_scale: the factor of the loss, which keeps float16 gradients from underflowing, and how
            it changes when they overflow.
        muon, adafactor, soap: options of these alone.
    """

    name: str = setting("adamw", "common")
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = setting(0.1, "common")
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_incr_style: Increase = "constant"
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float = 1.0
    fp32_masters: bool = setting(False, box="precision")
    master_bits: MasterBits = setting(32, box="precision")
    stochastic_rounding: bool = setting(False, box="precision")
    mu_dtype: MomentName = setting("", box="precision")
    nu_dtype: MomentName = setting("", box="precision")
    offload: bool = False
    grad_dtype: StateDtype = setting("", box="precision")
    reduce_dtype: StateDtype = setting("", box="precision")
    groups: str = ""
    ema_decay: float = 0.0
    skip_nonfinite: int = 0
    loss_scale: LossScale = section(LossScale, box="precision")
    muon: MuonConfig = field(default_factory=MuonConfig)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    soap: SoapConfig = field(default_factory=SoapConfig)


_SCHEDULES: Mapping[str, Callable[..., RateSchedule]] = MappingProxyType(
    {
        "constant": schedules.constant,
        "linear": schedules.linear,
        "cosine": schedules.cosine_decay,
        "exponential": schedules.exponential,
        "polynomial": schedules.polynomial_decay,
        "wsd": schedules.wsd,
        "inverse_square_root": schedules.inverse_square_root,
    }
)
_SHAPES = {"polynomial": ("power",), "wsd": ("decay_steps", "decay")}
"""The arguments of one of them alone."""
SCHEDULES = tuple(_SCHEDULES)


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype that a configuration names; None for the empty name.

    For the arguments `grad_dtype` and `reduce_dtype` of `functron.make_step`.
    """
    return getattr(torch, name) if name else None


SCHEDULE_NEEDS: Needs = MappingProxyType({
    "total_steps": Need(
        lambda c: c.name != "constant" or c.warmup_ratio > 0,
        "a schedule that decays",
        f"choose one of {', '.join(name for name in SCHEDULES if name != 'constant')}",
    ),
    "end": Need(
        lambda c: c.name != "constant", "a schedule that decays", "choose another than constant"
    ),
    "end_fraction": Need(
        lambda c: c.name != "constant" and c.end == -1,
        "a schedule that decays, whose end is not given as a rate",
        "set end to -1, which stands for this share of the peak",
    ),
    "decay_steps": Need(lambda c: c.name == "wsd", "wsd", "choose the schedule wsd"),
    "decay": Need(lambda c: c.name == "wsd", "wsd", "choose the schedule wsd"),
    "power": Need(lambda c: c.name == "polynomial", "polynomial", "choose the schedule polynomial"),
    "init": Need(lambda c: c.num_warmup_steps > 0, "a warm-up", "set warmup_steps"),
    "rewarm_at": Need(lambda c: c.rewarm_steps > 0, "a second warm-up", "set rewarm_steps"),
    "rewarm_init": Need(lambda c: c.rewarm_steps > 0, "a second warm-up", "set rewarm_steps"),
})  # fmt: skip
"""The needs of the fields of a `ScheduleConfig`, to have an effect."""


def _of(*names: str) -> Need:
    """The need of options of these optimizers alone."""
    listed = ", ".join(names)
    return Need(lambda c: c.name in names, listed, f"choose one of these optimizers: {listed}")


def _or_own(option: str, need: Need) -> Need:
    """The need of an option that an optimizer of the user's may have as well."""
    return replace(need, holds=lambda c: option in own_options(c) or need.holds(c))


def own_options(config: OptimizerConfig) -> tuple[str, ...]:
    """The arguments beside the learning rate that an optimizer of the user's takes by name.

    () of those that are known here.
    """
    if ":" not in config.name:
        return ()
    make = load_function(config.name, "optimizer.name")
    return tuple(inspect.signature(make).parameters)[1:]


def _decays(c: OptimizerConfig) -> bool:
    return "weight_decay" in own_options(c) if ":" in c.name else c.name not in ("adam", "sgd")


_ADAMS = ("adamw", "adam", "adam_mini", "muon", "soap")
_SCALED = Need(
    lambda c: c.loss_scale.initial > 0, "a loss that is scaled", "set loss_scale.initial"
)

OPTIMIZER_NEEDS: Needs = MappingProxyType({
    **{
        name: _or_own(name, need)
        for name, need in {
            "b1": _of(*_ADAMS, "lion"),
            "b2": _of(*_ADAMS, "lion"),
            "eps": _of(*_ADAMS),
            "momentum": _of("sgd"),
            "nesterov": _of("sgd"),
        }.items()
    },
    "weight_decay": Need(
        lambda c: _decays(c) and c.weight_decay_incr_style == "constant",
        "an optimizer that decays weights, by a number that stays",
        "choose adamw, and weight_decay_incr_style constant",
    ),
    "muon": _of("muon"),
    "adafactor": _of("adafactor"),
    "soap": _of("soap"),
    **{
        f"loss_scale.{name}": _SCALED
        for name in ("growth_interval", "hysteresis", "minimum", "patience")
    },
})  # fmt: skip
"""The needs of the fields of an `OptimizerConfig`, to have an effect."""


def _schedule_arguments(config: ScheduleConfig) -> dict[str, Any]:
    """The arguments of the schedule that `config` names."""
    names = ["peak", "init", *_SHAPES.get(config.name, ())]
    found = {name: getattr(config, name) for name in names}
    if config.name != "constant":
        found |= {"total_steps": config.total_steps, "end": config.last}
    return found | {"warmup_steps": config.num_warmup_steps}


def schedule_problems(config: ScheduleConfig, path: str = "schedule") -> list[Problem]:
    """Everything wrong with `config`; fields that its schedule does not use are not judged."""
    if config.name not in SCHEDULES:
        fix = nearest(config.name, SCHEDULES)
        return [Problem(f"{path}.name", repr(config.name), "a learning-rate schedule", fix)]
    ratio = _share_problems(config, ("warmup_ratio",), path)
    if config.warmup_ratio and config.warmup_steps:
        got = f"{config.warmup_ratio} with warmup_steps={config.warmup_steps}"
        ratio.append(Problem(f"{path}.warmup_ratio", got, "one of them", "set the other to 0"))
    given = _schedule_arguments(replace(config, warmup_ratio=0.0) if ratio else config)
    ends = config.name != "constant"
    if config.name == "exponential":
        given["decay"] = config.name
    found = schedules.problems(**given)
    most = config.peak if config.peak >= 0 else math.inf  # of a negative one is told already
    if ends and config.end == -1 and config.end_fraction > 1:
        wanted = "at most 1, the peak"
        found.append(Problem("end_fraction", repr(config.end_fraction), wanted, "lower it"))
    elif ends and config.last > most:
        wanted = f"at most the peak, {config.peak:g}"
        fix = "lower it, or set end_fraction, such as 0.1, instead"
        found.append(Problem("end", repr(config.end), wanted, fix))
    if config.init > most:
        wanted = f"at most the peak, {config.peak:g}"
        found.append(Problem("init", repr(config.init), wanted, "lower it"))
    rewarm = (("rewarm_steps", config.rewarm_steps, 0), ("rewarm_at", config.rewarm_at, 0))
    found += least_problems(rewarm)
    if not 0 <= config.rewarm_init < math.inf:  # a run may come down to a lower peak as well
        wanted, fix = "a finite number of at least 0", "set it to 0, or leave it out"
        found.append(Problem("rewarm_init", repr(config.rewarm_init), wanted, fix))
    return [*ratio, *(replace(p, path=f"{path}.{p.path}") for p in found)]


def optimizer_problems(config: OptimizerConfig, path: str = "optimizer") -> list[Problem]:
    """Everything wrong with `config`; what concerns another optimizer alone is not judged."""
    found = []
    if ":" in config.name:
        found += _own_problems(config, path)
    elif config.name not in OPTIMIZERS:
        fix = f"{nearest(config.name, OPTIMIZERS)}, or package.module:function for your own"
        found.append(Problem(f"{path}.name", repr(config.name), "an optimizer", fix))
    found += _share_problems(config, ("b1", "b2", "momentum", "ema_decay"), path)
    decays = ("weight_decay", "start_weight_decay", "end_weight_decay")
    for name in ("eps", *decays, "clip_norm", "skip_nonfinite"):
        value = getattr(config, name)
        if not 0 <= value < float("inf"):
            found.append(Problem(f"{path}.{name}", repr(value), "a finite number of at least 0"))
    if config.name == "sgd" and config.nesterov and not config.momentum:
        found.append(
            Problem(f"{path}.nesterov", "true with momentum 0", "a momentum", "set momentum = 0.9")
        )
    if config.fp32_masters and config.stochastic_rounding:
        wanted = "false where fp32_masters are kept: masters lose nothing"
        found.append(Problem(f"{path}.stochastic_rounding", "true", wanted))
    if config.master_bits == 16 and not config.fp32_masters:
        got, fix = f"{config.master_bits} without fp32_masters", "add fp32_masters"
        found.append(Problem(f"{path}.master_bits", got, "32 where there are none", fix))
    found += loss_scale_problems(config.loss_scale, f"{path}.loss_scale")
    if config.loss_scale.initial and config.skip_nonfinite:
        wanted = "0 where the loss is scaled: steps that overflow are left out anyway"
        found.append(Problem(f"{path}.skip_nonfinite", str(config.skip_nonfinite), wanted))
    found += _increase_problems(config, path)
    found += _choice_problems(config, path)
    found += _moment_problems(config, path)
    found += parse_groups(config.groups, f"{path}.groups")[1]
    if config.name in _RANGES:
        own, where = getattr(config, config.name), f"{path}.{config.name}"
        shares, least = _RANGES[config.name]
        found += _choice_problems(own, where) + _share_problems(own, shares, where)
        found += least_problems((f"{where}.{x}", getattr(own, x), low) for x, low in least.items())
    return found


_OFFERED = ("b1", "b2", "eps", "weight_decay", "momentum", "nesterov", "mask", "defs", "specs")
"""Arguments that an optimizer of the user's may name."""


def _own_problems(config: OptimizerConfig, path: str) -> Iterator[Problem]:
    """The problems of an optimizer of the user's, by its signature."""
    make = load_function(config.name, f"{path}.name")
    parameters = list(inspect.signature(make).parameters.values())
    if not parameters:
        wanted = "a function of the learning rate"
        yield Problem(f"{path}.name", repr(config.name), wanted, "let it take learning_rate first")
    for parameter in parameters[1:]:
        if parameter.name not in _OFFERED and parameter.default is parameter.empty:
            got = f"an argument {parameter.name!r} of {config.name}"
            yield Problem(f"{path}.name", got, f"one of {', '.join(_OFFERED)}", "give it a default")
    for name in ("mu_dtype", "nu_dtype"):
        if value := getattr(config, name):
            wanted = f"nothing for {config.name}, which chooses by itself"
            yield Problem(f"{path}.{name}", repr(value), wanted)


def _increase_problems(config: OptimizerConfig, path: str) -> Iterator[Problem]:
    """The problems of a weight decay that changes."""
    if config.weight_decay_incr_style == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            if value := getattr(config, name):
                fix = "set weight_decay_incr_style to linear or cosine, or weight_decay alone"
                yield Problem(f"{path}.{name}", repr(value), "0 where it is constant", fix)
    elif not _decays(config):
        got, fix = repr(config.weight_decay_incr_style), "use adamw"
        wanted = f"'constant' for {config.name}, which has no weight decay"
        yield Problem(f"{path}.weight_decay_incr_style", got, wanted, fix)


_MOMENTS = {"sgd": (), "adafactor": (), "lion": ("mu_dtype",), "adam_mini": ("mu_dtype",)}
"""Which moments have a dtype of choice, not 8 bits; those of the other optimizers may be any."""


def moments_of(name: str) -> tuple[str, ...]:
    """The fields of `OptimizerConfig` with dtypes of the moments that this optimizer has."""
    return () if ":" in name else _MOMENTS.get(name, ("mu_dtype", "nu_dtype"))


def _moment_problems(config: OptimizerConfig, path: str) -> Iterator[Problem]:
    if config.name not in _MOMENTS:
        return
    for name in ("mu_dtype", "nu_dtype"):
        value = getattr(config, name)
        where = f"{path}.{name}"
        if value and name not in _MOMENTS[config.name]:
            yield Problem(where, repr(value), f"nothing for {config.name}: it has none")
        elif value in CODES:
            yield Problem(where, repr(value), f"'float32' or 'bfloat16' for {config.name}")


def _share_problems(config: object, names: tuple[str, ...], path: str) -> list[Problem]:
    return share_problems({f"{path}.{name}": getattr(config, name) for name in names})


def _choice_problems(config: Any, path: str) -> list[Problem]:
    return [
        Problem(f"{path}.{name}", repr(value), f"one of {', '.join(map(repr, known))}")
        for name, value, known in find_unknown(config)
    ]


_RANGES: Mapping[str, tuple[tuple[str, ...], dict]] = {
    "muon": (("momentum",), {"steps": 1}),
    "adafactor": (("momentum",), {"decay_rate": 0, "clip": 0, "min_dim": 1}),
    "soap": (("decay",), {"frequency": 1, "max_dim": 1}),
}
"""Of options of one optimizer alone: the shares, and others' least values."""


RULED = ("adamw", "adam", "lion", "adam_mini", "muon")
"""The optimizers for which there is a rule."""


def width_multiples(config: OptimizerConfig, defs: tree.Tree) -> Mapping[str, float]:
    """By path, what learning rates of parameters are multiplied by, where it is not 1.

    Args:
        config: the optimizer.
        defs: the `ParamDef`s of a whole model: sizes are global.
    """
    whole = matrices(defs) if config.name == "muon" else tree.map(lambda d: False, defs)
    rows = zip(tree.paths(defs), tree.leaves(defs), tree.leaves(whole), strict=True)
    found = {path: _multiple(config, d, matrix) for path, d, matrix in rows}
    return {path: multiple for path, multiple in found.items() if multiple != 1}


def _width(d: Any) -> Width:
    """Of a `ParamDef`; what is none has no width."""
    return getattr(d, "width", Width())


def _multiple(config: OptimizerConfig, d: Any, matrix: Any) -> float:
    inputs, outputs = _width(d)
    if matrix is False or inputs == 1:
        return 1 / inputs
    scale = SCALES[config.muon.scale]
    here = scale(matrix.outputs, matrix.inputs)
    base = scale(matrix.outputs / outputs, matrix.inputs / inputs)
    return math.sqrt(outputs / inputs) * base / here


def width_problems(config: OptimizerConfig, path: str = "optimizer") -> list[Problem]:
    """Why this optimizer cannot train at another width than it was tuned at; empty where it can."""
    if config.name in RULED:
        return []
    wanted = f"one with a rule for widths, where there is a base width: {', '.join(RULED)}"
    fix = "choose adamw, or leave gpt.mup_base_dim out"
    return [Problem(f"{path}.name", repr(config.name), wanted, fix)]


@dataclass(frozen=True)
class _GivenOptions:
    """The facts about the parameters that optimizers need."""

    mask: Mask
    defs: tree.Tree
    specs: tree.Tree
    kernels: Kernels = AUTO


def _adamw(c: OptimizerConfig, rate: LearningRate, given: _GivenOptions) -> GradientTransformation:
    return adamw(
        rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=given.mask,
        **_moments(c, given), kernels=given.kernels,
    )  # fmt: skip


def _adafactor(
    c: OptimizerConfig, rate: LearningRate, given: _GivenOptions
) -> GradientTransformation:
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


_OPTIMIZERS: Mapping[
    str, Callable[[OptimizerConfig, LearningRate, _GivenOptions], GradientTransformation]
]
_OPTIMIZERS = {
    "adamw": _adamw,
    "adam": lambda c, rate, given: adam(
        rate, c.b1, c.b2, c.eps, **_moments(c, given), kernels=given.kernels
    ),
    "sgd": lambda c, rate, given: sgd(rate, c.momentum or None, c.nesterov),
    "lion": lambda c, rate, given: lion(
        rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=given.mask,
        mu_dtype=torch_dtype(c.mu_dtype),
    ),
    "adafactor": _adafactor,
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
OPTIMIZERS = tuple(_OPTIMIZERS)
_BY_DEFS = ("muon", "soap", "adam_mini")


def _own(c: OptimizerConfig, rate: LearningRate, given: _GivenOptions) -> GradientTransformation:
    """The optimizer of the user's that `c` names."""
    offered = {name: getattr(given if name in ("mask", "defs", "specs") else c, name)
               for name in own_options(c) if name in _OFFERED}  # fmt: skip
    made = load_function(c.name, "optimizer.name")(rate, **offered)
    if not isinstance(made, GradientTransformation):
        got, wanted = f"{type(made).__name__} from {c.name}", "a gradient transformation"
        refuse("cannot train with this", "optimizer.name", got, wanted, "return optim.chain(...)")
    return made


def _rule_in_one_pass(
    c: OptimizerConfig, rate: LearningRate, given: _GivenOptions
) -> AdamwRule | None:
    """The numbers of an AdamW that is alone, between what can be computed in its pass; or None."""
    alone = c.name in ("adamw", "adam") and c.weight_decay_incr_style == "constant"
    if not alone or c.ema_decay or c.master_bits != OptimizerConfig.master_bits:
        return None
    decay, mask = (c.weight_decay, given.mask) if c.name == "adamw" else (0.0, None)
    return AdamwRule(rate, c.b1, c.b2, c.eps, decay, mask, given.kernels)


def _times(rate: LearningRate, factor: float) -> LearningRate:
    if isinstance(factor, (int, float)) and factor == 1:
        return rate
    return (lambda count: factor * rate(count)) if callable(rate) else factor * rate


def _moments(config: OptimizerConfig, given: _GivenOptions) -> dict:
    eight = _in_bytes(config)
    return {
        "mu_dtype": _moment_dtype(config.mu_dtype),
        "nu_dtype": _moment_dtype(config.nu_dtype),
        "quantised": quantisable(given.defs) if eight and given.defs is not None else None,
    }


def _in_bytes(config: OptimizerConfig) -> bool:
    """Whether a moment is stored in 8 bits."""
    return bool(CODES.keys() & {config.mu_dtype, config.nu_dtype})


def _moment_dtype(name: MomentName) -> MomentDtype:
    return name if name == "int8" or name == "fp8" else torch_dtype(name)


@public
def make_schedule(config: ScheduleConfig) -> RateSchedule:
    """The schedule that `config` describes.

    Raises:
        ValueError: listing everything that `schedule_problems` finds.
    """
    raise_problems("the learning-rate schedule cannot be built", schedule_problems(config))
    made = _SCHEDULES[config.name](**_schedule_arguments(config))
    if not config.rewarm_steps:
        return made
    return schedules.rewarm(made, config.rewarm_at, config.rewarm_steps, init=config.rewarm_init)


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
    counted: Callable[[RateSchedule], RateSchedule] | None = None,
    kernels: Kernels = AUTO,
) -> GradientTransformation:
    """The optimizer that `config` describes: clipping, then the optimizer (on masters).

    From the outside: `with_loss_scale` or `apply_if_finite`, clipping, `zero`, `offload`, masters
    or stochastic rounding, the average of parameters, groups, the optimizer itself.

    Args:
        config: what to build.
        learning_rate: a number or a schedule.
        specs: the parameters' specs; None: those of `bind`.
        copies: how many ranks of a pipeline hold each parameter, for the gradient norm; those of
            `bind`, without `specs`.
        mask: which parameters decay; by default all but norms and biases.
        defs: the parameters' `ParamDef`s; needed by muon, soap, adam_mini, moments in 8 bits and
            groups, and by adafactor where anything is sharded or stacked. Where they have widths
            (muP), learning rates are multiplied as `width_multiples` says.
        whole: those of the whole model, where a rank of a pipeline has some; None: `defs`.
        shards: the specs of every rank's part of the parameters, of `shard_specs`, which makes it
            ZeRO: `zero` around the optimizer. None: every rank updates what it holds.
        mesh: the ranks; with it, moments in 8 bits are checked against how they are sharded.
        total_steps: the count at which a weight decay that changes is what it is to be.
        counted: makes a schedule of that count one of the updates, such as `schedules.by_samples`;
            None: they are the same.
        kernels: whether "adamw" and "global_norm" are kernels; see `functron.ops.use`.

    Raises:
        ValueError: listing everything that `optimizer_problems` finds; `defs` is missing; or blocks
            of 8-bit moments would be divided.
    """
    found = optimizer_problems(config)
    eight = _in_bytes(config)
    groups, _ = parse_groups(config.groups)
    if defs is None and (config.name in _BY_DEFS or groups):
        found.append(Problem("defs", "None", "the parameters' defs, to tell them apart by"))
    elif groups and copies == 1:  # else ranks of a pipeline have some of the parameters each
        found += group_problems(defs, groups, "optimizer.groups")
    whole = defs if whole is None else whole
    if any(_width(d) != Width() for d in tree.leaves(whole)):  # than where it was tuned
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
    given = _GivenOptions(mask, defs, seen, kernels)
    inner = _inner(config, learning_rate, given, groups, multiples, total_steps, counted)
    rule = None if groups or multiples else _rule_in_one_pass(config, learning_rate, given)
    if config.ema_decay:
        inner = with_average(inner, config.ema_decay)
    if config.fp32_masters:
        dtypes = None if defs is None else tree.map(lambda d: d.dtype, defs)
        inner = with_fp32_masters(inner, dtypes, bits=config.master_bits)
    if config.stochastic_rounding:
        inner = with_stochastic_rounding(inner, defs=defs, specs=seen)
    if config.offload:
        inner = inner if rule is None else in_one_pass(inner, rule, specs=seen, defs=defs)
        inner, rule = offload(inner), None
    if shards is not None:
        inner = zero(inner, specs, shards)
    if config.clip_norm:
        inner = chain(clip_by_global_norm(config.clip_norm, seen, copies, kernels=kernels), inner)
    if rule is not None:
        wide = "float32" in (config.grad_dtype, config.reduce_dtype)
        around = {"specs": specs, "copies": copies, "shards": shards, "defs": defs, "widens": wide}
        inner = in_one_pass(inner, rule, max_norm=config.clip_norm, **around)
    if config.skip_nonfinite:
        inner = apply_if_finite(inner, config.skip_nonfinite, specs=seen)
    if config.loss_scale.initial:
        inner = with_loss_scale(inner, config.loss_scale, specs=seen)
    return inner


def _inner(
    config: OptimizerConfig,
    rate: LearningRate,
    given: _GivenOptions,
    groups: tuple[ParameterGroup, ...],
    multiples: Mapping[str, float],
    total_steps: int | None,
    counted: Callable[[RateSchedule], RateSchedule] | None,
) -> GradientTransformation:
    if config.name == "adafactor" and config.adafactor.relative_step:
        rate = schedules.relative_step()

    def make(group: ParameterGroup) -> GradientTransformation:
        own_rate = _times(rate, group.learning_rate)

        def decaying(weight_decay: float) -> GradientTransformation:
            own = replace(config, weight_decay=weight_decay)
            return _OPTIMIZERS.get(config.name, _own)(own, own_rate, given)

        style, share = config.weight_decay_incr_style, group.weight_decay
        if style == "constant" or total_steps is None:
            return decaying(config.weight_decay * share)
        ends = (share * config.start_weight_decay, share * config.end_weight_decay)
        decay: Any = schedules.weight_decay_increase(*ends, total_steps, style)
        decay = decay if counted is None else counted(decay)
        return inject_hyperparams(decaying)(weight_decay=decay)

    return by_group(make, given.defs, groups, multiples)
