"""Updates that are not finite: skipped, counted, and prevented by scaling the loss.

Gradients in float16 underflow below 6e-8, and overflow beyond 65504. With `with_loss_scale` the
loss is multiplied before backward, and gradients are divided in float32, by a number that falls
when they overflow and grows when they have not for long (Micikevicius et al. 2018, "Mixed Precision
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
from functron.core.tables import shows_differences
from functron.optim.low_precision import is_low
from functron.optim.norms import find_norm
from functron.optim.schedules import advance_schedules, new_count
from functron.optim.transformation import (
    GradientTransformation,
    Norm,
    apply_updates,
    ask,
    find_answers,
    least_problems,
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

    After `max_consecutive_errors` of them in a row they are let through, as skipping would hide a
    bug. Optax's `apply_if_finite`. Put it around clipping too. All ranks decide alike.

    `step_` reads the decision on the host, which waits for the device once per step, and runs
    nothing when it skips. Traced, compiled or under vmap it computes both and selects. Collectives:
    those of `all_finite`, and `inner`'s.

    Args:
        inner: the transformation to protect.
        max_consecutive_errors: number of updates in a row that are skipped.
        specs: of the gradients (as ``inner.grad_specs`` gives), where they are sharded; None: from
            `bind`.

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


@shows_differences
@dataclass(frozen=True)
class LossScale:
    """The factor of the loss, and how it changes; the rules and defaults are Megatron-LM's.

    Attributes:
        initial: the first factor, a power of two so that nothing is rounded; 0: the loss is not
            scaled. (Megatron-LM starts at 2^32, and skips steps until it has fallen; torch's
            GradScaler at 2^16, as this does where float16 is asked for.)
        growth_interval: it doubles after this number of steps without an overflow; 0: it is
            constant.
        hysteresis: number of overflows since it last grew at which it halves.
        minimum: it falls no further.
        patience: training stops after this number of overflows in a row at the minimum.
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
            fix = "use 65536.0 and 1.0"
            if 0 < value < math.inf:
                fix = f"use {2.0 ** round(math.log2(value)):g}"
            found.append(Problem(f"{path}.{name}", f"{value:g}", "a power of two", fix))
    if config.initial < config.minimum:
        wanted = f"at least the minimum, {config.minimum:g}"
        found.append(Problem(f"{path}.initial", f"{config.initial:g}", wanted))
    rows = (("growth_interval", 0), ("hysteresis", 1), ("patience", 1))
    return found + least_problems((f"{path}.{x}", getattr(config, x), low) for x, low in rows)


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`.

    Attributes:
        scale: the factor of the next step's loss; float32, 0-dim.
        good_steps: steps since it last changed, or since the last overflow; int64, 0-dim.
        hysteresis: number of overflows left until it halves; int64, 0-dim.
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
    """`inner`, for gradients of a scaled loss: steps that overflow are skipped.

    `functron.make_step` multiplies the loss by ``optim.loss_scale(opt_state)``, and divides the
    summed gradients by it in float32, before `update` sees them. If one of them is infinite or NaN
    on any rank, neither parameters nor the state of `inner` change on any rank, and the scale may
    fall: see `LossScale`.

    Put it around everything else. Traced, compiled or under vmap it selects between new and old
    values, without waiting; eager `step_` reads the decision on the host, and runs nothing when it
    skips. Collectives: those of `all_finite`, and `inner`'s.

    Args:
        inner: the transformation to protect.
        config: the rules; its `initial` is above 0.
        specs: of the gradients, where they are sharded; None: from `bind`.

    Raises:
        ValueError: an impossible `LossScale`, with all its problems.
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
    """The factor of the next step's loss, anywhere in an optimizer's state; None: it has none.

    For a step of one's own: multiply the loss by it, and `unscale` the gradients.
    """
    found = _find_scale(state)
    return None if found is None else found.scale


def scaling_metrics(state: tree.Tree) -> dict[str, torch.Tensor]:
    """``loss_scale`` and ``stuck`` of an optimizer's state, for a step's metrics; {} without."""
    found = _find_scale(state)
    return {} if found is None else {"loss_scale": found.scale, "stuck": found.stuck}


def _find_scale(state: tree.Tree) -> LossScaleState | None:
    """The `LossScaleState` in a state, if any: in tuples, and in dicts of these by name.

    Dicts of dicts are trees like the parameters, and are not searched.
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
    """The gradients of the unscaled loss: divided by the scale, in float32 if in low precision.

    Overwrites `grads`, unless traced. A scale of None leaves them as they are.
    """
    if scale is None:
        return grads
    return multiplied(tree.map(lambda g: g.float() if is_low(g) else g, grads), 1 / scale)


class LimitState(NamedTuple):
    """The state of `with_limit`.

    Attributes:
        limit: gradients with a larger norm are skipped; float32, 0-dim, at first infinite.
        left_out: number of skipped gradients; int64, 0-dim.
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
    """`inner`, but gradients of a norm above the limit in its state are skipped.

    Then neither parameters nor the state of `inner` change. Set the limit between steps with
    `set_limit_`; the decision is made on the device, alike on all ranks. Norms that are not finite
    pass: `apply_if_finite` and `with_loss_scale`, which may be inside, are for these.

    Traced, compiled or under vmap it selects, without waiting; eager `step_` reads the decision on
    the host, which waits for the device once per step. Collectives: those of the norm, unless it is
    given, and `inner`'s.

    Args:
        inner: the transformation to protect; put this around everything else.
        of: the gradients that make up the norm, a tree or prefix tree of bools.
        specs: of the gradients, where they are sharded; None: from `bind`.
        copies: number of pipeline ranks that hold each parameter.
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
    """`inner` in the steps that are not skipped; skipped ones only change the counts of the state.

    Args:
        judge: ``(updates, state, extra, specs, copies)`` to whether to take the step, the state
            with new counts, and the extra arguments, with the norm if it is known then.
        inner: the transformation to skip.
        first: ``(count, inner_state)`` to the state, of 0-dim tensors and ``inner_state``; count is
            an int64 0 on the parameters' device.
        specs, copies: of the gradients; None: from `bind`.
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
    )._replace(bind=bind, widens=inner.widens)


def _select(flag: torch.Tensor, chosen: tree.Tree, other: tree.Tree) -> tree.Tree:
    return tree.map(lambda a, b: torch.where(flag.to(a.device), a, b), chosen, other)


@public
def zero_nans() -> GradientTransformation:
    """Updates with 0 in place of NaN; infinities stay. Optax's, without its record of them."""

    def fill(u: torch.Tensor) -> torch.Tensor:
        return torch.where(u.isnan(), torch.zeros_like(u), u)

    return stateless(lambda updates, params: tree.map(fill, updates), elementwise=True)


def step_unless(skip: bool | torch.Tensor, inner: GradientTransformation) -> Callable:
    """``inner.step_``, unless `skip`: then only the counts of schedules change.

    Args:
        skip: a bool; or, under transforms of torch.func, a bool tensor that selects new or old
            values.
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
