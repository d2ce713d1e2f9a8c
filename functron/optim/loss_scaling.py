"""Updates that are not finite: left out, counted, and prevented by scaling the loss.

Gradients in float16 are lost below 6e-8, and infinite beyond 65504. `with_loss_scale` has the loss
multiplied before backward, and gradients divided again in float32, by a number that falls where
they overflow and grows where they do not for long (Micikevicius et al. 2018, "Mixed Precision
Training", https://arxiv.org/abs/1710.03740; the rules are Megatron-LM's).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.optim.low_precision import is_low
from functron.optim.norms import find_norm
from functron.optim.schedules import advance_schedules, new_count
from functron.optim.transformation import (
    GradientTransformation,
    Norm,
    apply_updates,
    ask,
    find_answers,
    multiplied,
    name_norm,
    refuse_scaled,
    stateless,
    transformation,
)
from functron.optim.zero import leaf_specs, total
from functron.program.recorder import readable
from functron.spmd.spec import P


def all_finite(updates: tree.Tree, specs: tree.Tree = None) -> torch.Tensor:
    """Whether no element of any leaf, on any rank, is infinite or NaN: a bool, 0-dim.

    One all-reduce of 4 bytes for each distinct set of mesh axes that the specs mention, and one
    over the ranks of a pipeline.

    Args:
        updates: a tree of tensors, on a mesh this rank's shards.
        specs: how they are sharded, a prefix tree of `P`; None: not at all.
    """
    leaves = tree.leaves(updates)
    if not leaves:
        return torch.ones((), dtype=torch.bool)
    flat = leaf_specs(specs, updates, "all_finite (and apply_if_finite)")
    return total([leaf.isfinite().logical_not().any().float() for leaf in leaves], flat) == 0


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`, as Optax's.

    Attributes:
        notfinite_count: updates in a row, up to the last, that were not finite; int64, 0-dim.
        last_finite: whether the last was; bool, 0-dim.
        total_notfinite: how many were not; int64, 0-dim.
        inner_state: of the wrapped transformation.
    """

    notfinite_count: Any
    last_finite: Any
    total_notfinite: Any
    inner_state: tree.Tree


@public
def apply_if_finite(
    inner: GradientTransformation, max_consecutive_errors: int, *, specs: tree.Tree = None
) -> GradientTransformation:
    """`inner`, but gradients that are not all finite change neither parameters nor its state.

    After so many of them in a row they are let through, for then something is wrong that skipping
    hides. Optax's `apply_if_finite`. Put it around clipping too. All ranks decide alike.

    `step_` reads the decision on the host, which waits for the device once per step, and runs
    nothing when it is to skip. What is traced, compiled or under vmap computes both and selects.
    Collectives: those of `all_finite`, and `inner`'s.

    Args:
        inner: what is protected.
        max_consecutive_errors: how many updates in a row are left out.
        specs: of the gradients (what ``inner.grad_specs`` gives), where they are sharded; None:
            as `bind` says.

    Raises:
        ValueError: a negative number of errors.
    """
    if max_consecutive_errors < 0:
        got = repr(max_consecutive_errors)
        refuse("apply_if_finite", "max_consecutive_errors", got, "at least 0")

    def first(count: torch.Tensor, inner_state: tree.Tree) -> ApplyIfFiniteState:
        finite = torch.ones_like(count, dtype=torch.bool)
        return ApplyIfFiniteState(count, finite, torch.zeros_like(count), inner_state)

    def judge(updates, state, extra, specs, copies):
        finite = all_finite(updates, specs).to(state.last_finite.device)
        errors = torch.where(finite, 0, state.notfinite_count + 1)
        skipped = torch.where(finite, state.total_notfinite, state.total_notfinite + 1)
        go = finite | (errors > max_consecutive_errors)
        return go, ApplyIfFiniteState(errors, finite, skipped, state.inner_state), extra

    refuse_scaled("apply_if_finite", "inner", ask(inner))
    return _step_where(judge, inner, first, specs)


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss, and how it changes; the rules and defaults are Megatron-LM's.

    Attributes:
        initial: the first one, a power of two so that nothing is rounded; 0: the loss is not
            scaled. (Megatron-LM begins with 2^32, and leaves out the steps until it has come down;
            torch's GradScaler begins with 2^16, as this does where float16 is asked for.)
        growth_interval: after so many steps without an overflow it doubles; 0: it stays as it is.
        hysteresis: it halves at an overflow once there have been so many since it last grew.
        minimum: it falls no further.
        patience: a training run stops when so many steps in a row overflow, and it cannot fall.
    """

    initial: float = 0.0
    growth_interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    patience: int = 20


def loss_scale_problems(config: LossScale, path: str) -> list[Problem]:
    """Everything wrong with `config`."""
    found = []
    if not config.initial:
        return found
    for name in ("initial", "minimum"):
        value = getattr(config, name)
        if not 0 < value < math.inf or math.frexp(value)[0] != 0.5:
            fix = "use 65536.0 and 1.0" if not 0 < value < math.inf else _nearest_power(value)
            found.append(Problem(f"{path}.{name}", f"{value:g}", "a power of two", fix))
    if config.initial < config.minimum:
        wanted = f"at least the minimum, {config.minimum:g}"
        found.append(Problem(f"{path}.initial", f"{config.initial:g}", wanted))
    for name, least in (("growth_interval", 0), ("hysteresis", 1), ("patience", 1)):
        if (value := getattr(config, name)) < least:
            found.append(Problem(f"{path}.{name}", str(value), f"at least {least}"))
    return found


def _nearest_power(value: float) -> str:
    return f"use {2.0 ** round(math.log2(value)):g}"


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`.

    Attributes:
        scale: the factor of the next step's loss; float32, 0-dim.
        good_steps: steps without an overflow since it last changed, or since the last overflow;
            int64, 0-dim.
        hysteresis: overflows that are left until it halves; int64, 0-dim.
        stuck: overflows in a row, up to the last step, where it could not fall; int64, 0-dim.
        inner_state: of the wrapped transformation.
    """

    scale: Any
    good_steps: Any
    hysteresis: Any
    stuck: Any
    inner_state: tree.Tree


@public
def with_loss_scale(
    inner: GradientTransformation, config: LossScale, *, specs: tree.Tree = None
) -> GradientTransformation:
    """`inner`, for gradients of a loss that is scaled: steps that overflow are left out.

    `functron.make_step` multiplies the loss by ``optim.loss_scale(opt_state)``, and divides
    gradients by it once they are summed, in float32; these are what `update` is given. Where one of
    them is infinite or NaN on any rank, neither parameters nor the state of `inner` change on any
    rank, and the scale may fall; `LossScale` says when it falls and grows.

    Put it around everything else. What is traced, compiled or under vmap selects between the new
    and old values, and waits for nothing; eager `step_` reads the decision on the host, and runs
    nothing where it is to skip. Collectives: those of `all_finite`, and `inner`'s.

    Args:
        inner: what is protected.
        config: the rules; its `initial` is above 0.
        specs: of the gradients, where they are sharded; None: as `bind` says.

    Raises:
        ValueError: what `LossScale` says is impossible, all of it.
    """
    found = loss_scale_problems(config, "config")
    if not config.initial:
        found.append(Problem("config.initial", "0", "a power of two", "use 65536.0"))
    raise_problems("with_loss_scale", found)

    def first(count: torch.Tensor, inner_state: tree.Tree) -> LossScaleState:
        scale = torch.full_like(count, config.initial, dtype=torch.float32)
        left = torch.full_like(count, config.hysteresis)
        return LossScaleState(scale, count, left, torch.zeros_like(count), inner_state)

    def judge(updates, state, extra, specs, copies):
        finite = all_finite(updates, specs).to(state.scale.device)
        lowest = state.scale <= config.minimum if config.growth_interval else True
        stuck = torch.where(finite, 0, state.stuck + lowest)
        if not config.growth_interval:
            return finite, state._replace(stuck=stuck), extra
        good = torch.where(finite, state.good_steps + 1, 0)
        left = torch.where(finite, state.hysteresis, (state.hysteresis - 1).clamp(min=0))
        fallen = (state.scale * 0.5).clamp(min=config.minimum)
        scale = torch.where(finite | (left > 0), state.scale, fallen)
        grows = good == config.growth_interval
        doubled = torch.where(scale < _MOST, scale * 2, scale)
        scale = torch.where(grows, doubled, scale)
        left = torch.where(grows, config.hysteresis, left)
        good = torch.where(grows, 0, good)
        return finite, LossScaleState(scale, good, left, stuck, state.inner_state), extra

    refuse_scaled("with_loss_scale", "inner", ask(inner))
    return _step_where(judge, inner, first, specs, scales=True)


def loss_scale(state: tree.Tree) -> torch.Tensor | None:
    """The factor of the next step's loss, wherever an optimizer's state has it; None: it has none.

    For a step of one's own: multiply the loss by it, and `unscale` the gradients.
    """
    found = _find_scale(state)
    return None if found is None else found.scale


def scaling_metrics(state: tree.Tree) -> dict[str, torch.Tensor]:
    """``loss_scale`` and ``stuck`` of an optimizer's state, for a step's metrics; {} without."""
    found = _find_scale(state)
    return {} if found is None else {"loss_scale": found.scale, "stuck": found.stuck}


def _find_scale(state: tree.Tree) -> LossScaleState | None:
    """That in a state, where there is one: in tuples, and in dicts of these by name.

    Dicts of dicts are trees like the parameters, which no step looks through thrice.
    """
    parts: list = [state]
    for part in parts:
        if isinstance(part, LossScaleState):
            return part
        nested = isinstance(part, dict)
        for inner in part.values() if nested else part:
            if isinstance(inner, tuple | list) or (isinstance(inner, dict) and not nested):
                parts.append(inner)
    return None


def unscale(grads: tree.Tree, scale: torch.Tensor | None) -> tree.Tree:
    """The gradients of a loss without its scale: divided by it, in float32 if in low precision.

    Overwrites `grads`, unless traced. None: there is no scale, and they stay as they are.
    """
    if scale is None:
        return grads
    return multiplied(tree.map(lambda g: g.float() if is_low(g) else g, grads), 1 / scale)


class LimitState(NamedTuple):
    """The state of `with_limit`.

    Attributes:
        limit: gradients of a norm above it are left out; float32, 0-dim, at first infinite.
        left_out: how many were; int64, 0-dim.
        inner_state: of the wrapped transformation.
    """

    limit: Any
    left_out: Any
    inner_state: tree.Tree


@public
def with_limit(
    inner: GradientTransformation,
    *,
    of: tree.Tree = True,
    specs: tree.Tree = None,
    copies: tree.Tree = 1,
) -> GradientTransformation:
    """`inner`, but gradients of a norm above the limit in its state change nothing else.

    Neither parameters nor the state of `inner` change in such a step. Who trains says what the
    limit is, between steps, as `set_limit_` does; the decision is made on the device, alike on all
    ranks. A norm that is not finite passes: `apply_if_finite` and `with_loss_scale`, which may be
    inside, are for that.

    What is traced, compiled or under vmap selects, and waits for nothing; eager `step_` reads the
    decision on the host, which waits for the device once per step. Collectives: those of the norm,
    unless it is known, and `inner`'s.

    Args:
        inner: what is protected; put this around everything else.
        of: whose gradients make up that norm, a tree or prefix tree of bools.
        specs: of the gradients, where they are sharded; None: as `bind` says.
        copies: how many ranks of a pipeline hold each parameter.
    """

    def judge(updates, state, extra, specs, copies):
        counted = tree.partition(updates, of)[0]
        value = find_norm(counted, name_norm(extra, updates).get("norm"), specs, copies)
        go = ~(value.isfinite() & (value > state.limit.to(value.device)))
        left_out = torch.where(go.to(state.left_out.device), state.left_out, state.left_out + 1)
        return go, state._replace(left_out=left_out), {**extra, "norm": Norm(value, counted)}

    def first(count: torch.Tensor, inner_state: tree.Tree) -> LimitState:
        limit = torch.full_like(count, math.inf, dtype=torch.float32)
        return LimitState(limit, torch.zeros_like(count), inner_state)

    return _step_where(judge, inner, first, specs, copies)


def set_limit_(state: LimitState, limit: float) -> None:
    """Set the limit of the next step in a state of `with_limit`, in place."""
    state.limit.fill_(limit)


_MOST = 2.0**100
"""The scale grows no further: times any loss it is still finite in float32."""


def _step_where(
    judge: Callable[..., tuple[torch.Tensor, Any, dict]],
    inner: GradientTransformation,
    first: Callable[[torch.Tensor, tree.Tree], Any],
    specs: tree.Tree,
    copies: tree.Tree = 1,
    *,
    scales: bool = False,
) -> GradientTransformation:
    """`inner` in the steps that go on; the others change nothing but its counts.

    Args:
        judge: ``(updates, state, extra, specs, copies)`` to whether to go on, the state with its
            counts, and the extra arguments, with the norm if it is known then.
        inner: what is left out of the others.
        first: ``(count, inner_state)`` to the state, of 0-dim tensors and ``inner_state``; count is
            an int64 0 on the parameters' device.
        specs, copies: of the gradients; None: as `bind` says.
        scales: whether it scales the loss.
    """

    def update(updates, state, params=None, *, donated=False, **extra):
        go, counted, extra = judge(updates, state, extra, specs, copies)
        if not readable(go):
            out, kept = inner.update(updates, state.inner_state, params, **extra)
            out = _select(go, out, tree.map(torch.zeros_like, out))
            return out, counted._replace(inner_state=_select(go, kept, state.inner_state))
        if not go:
            return tree.map(torch.zeros_like, updates), counted
        updates, kept = inner.update(updates, state.inner_state, params, donated=donated, **extra)
        return updates, counted._replace(inner_state=kept)

    def step_(grads, state, params, **extra):
        go, counted, extra = judge(grads, state, extra, specs, copies)
        if not readable(go):
            out, kept = inner.update(grads, state.inner_state, params, **extra)
            params = _select(go, apply_updates(params, out), params)
            return params, counted._replace(inner_state=_select(go, kept, state.inner_state))
        if not go:
            return params, counted
        params, kept = inner.step_(grads, state.inner_state, params, **extra)
        return params, counted._replace(inner_state=kept)

    def state_specs(param_specs):
        made = first(torch.zeros((), dtype=torch.int64), ())
        scalars = made._replace(**dict.fromkeys(made._fields, P()))
        return scalars._replace(inner_state=inner.specs(param_specs))

    def bind(param_specs, counts):
        if scales and (answers := find_answers(param_specs)) is not None:
            answers.scales += 1
        bound = inner.bind(param_specs, counts)
        if bound is inner and specs is not None:
            return None
        given = (bound.grad_specs(param_specs), counts) if specs is None else (specs, copies)
        return _step_where(judge, bound, first, *given, scales=scales)

    return transformation(
        lambda params: first(new_count(params), inner.init(params)),
        update,
        state_specs,
        step_=step_,
        grad_specs=inner.grad_specs,
    )._replace(bind=bind)


def _select(flag: torch.Tensor, chosen: tree.Tree, other: tree.Tree) -> tree.Tree:
    return tree.map(lambda a, b: torch.where(flag.to(a.device), a, b), chosen, other)


@public
def zero_nans() -> GradientTransformation:
    """Updates with 0 in place of NaN; infinities stay. Optax's, without its record of them."""

    def fill(u: torch.Tensor) -> torch.Tensor:
        return torch.where(u.isnan(), torch.zeros_like(u), u)

    return stateless(lambda updates, params: tree.map(fill, updates), elementwise=True)


def step_unless(skip: bool | torch.Tensor, inner: GradientTransformation) -> Callable:
    """``inner.step_``, but where `skip` says so nothing changes but the counts of schedules.

    Args:
        skip: known on the host; or, under transforms of torch.func, a bool tensor, by which the new
            and the old values are chosen.
        inner: the optimizer.
    """
    if skip is False:
        return inner.step_

    def step_(grads, state, params, **extra):
        if skip is True:
            return params, advance_schedules(state)
        new, after = inner.step_(grads, state, params, **extra)
        return _select(~skip, new, params), _select(~skip, after, advance_schedules(state))

    return step_
