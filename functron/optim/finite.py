"""Updates that are left out where gradients are not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import public, refuse
from functron.optim.schedules import new_count
from functron.optim.transformation import (
    GradientTransformation,
    apply_updates,
    applying,
    readable,
    stateless,
    transformation,
)
from functron.optim.whole import leaf_specs, total
from functron.spmd.spec import P


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

    def init(params):
        count = new_count(params)
        finite = torch.ones_like(count, dtype=torch.bool)
        return ApplyIfFiniteState(count, finite, torch.zeros_like(count), inner.init(params))

    def judged(updates, state):
        """Whether to apply these updates, and the state with its counts."""
        finite = all_finite(updates, specs).to(state.last_finite.device)
        errors = torch.where(finite, 0, state.notfinite_count + 1)
        total = torch.where(finite, state.total_notfinite, state.total_notfinite + 1)
        go = finite | (errors > max_consecutive_errors)
        return go, ApplyIfFiniteState(errors, finite, total, state.inner_state)

    def run(method, updates, state, params, **norm):
        go, counted = judged(updates, state)
        if readable(go):
            if not go:
                return tree.map(torch.zeros_like, updates), counted
            updates, kept = method(updates, state.inner_state, params, **norm)
            return updates, counted._replace(inner_state=kept)
        out, kept = inner.update(updates, state.inner_state, params, **norm)
        out = _select(go, out, tree.map(torch.zeros_like, out))
        return out, counted._replace(inner_state=_select(go, kept, state.inner_state))

    def step_(grads, state, params, **norm):
        go, counted = judged(grads, state)
        if not readable(go):
            out, kept = inner.update(grads, state.inner_state, params, **norm)
            params = _select(go, apply_updates(params, out), params)
            return params, counted._replace(inner_state=_select(go, kept, state.inner_state))
        if not go:
            return params, counted
        params, kept = inner.step_(grads, state.inner_state, params, **norm)
        return params, counted._replace(inner_state=kept)

    def state_specs(param_specs):
        return ApplyIfFiniteState(P(), P(), P(), inner.specs(param_specs))

    def with_specs(param_specs, copies):
        bound = inner.bind(param_specs, copies)
        seen = bound.grad_specs(param_specs) if specs is None else specs
        return apply_if_finite(bound, max_consecutive_errors, specs=seen)

    wrap, unbound = applying(run), specs is None or inner.with_specs is not None
    return transformation(
        init,
        wrap(inner.update),
        state_specs,
        update_=wrap(inner.update_),
        step_=step_,
        grad_specs=inner.grad_specs,
    )._replace(norm=inner.norm, with_specs=with_specs if unbound else None)


def _select(flag: torch.Tensor, chosen: tree.Tree, other: tree.Tree) -> tree.Tree:
    return tree.map(lambda a, b: torch.where(flag.to(a.device), a, b), chosen, other)


@public
def zero_nans() -> GradientTransformation:
    """Updates with 0 in place of NaN; infinities stay. Optax's, without its record of them."""

    def fill(u: torch.Tensor) -> torch.Tensor:
        return torch.where(u.isnan(), torch.zeros_like(u), u)

    return stateless(lambda updates, params: tree.map(fill, updates))


def set_to_zero() -> GradientTransformation:
    """Updates that are 0: what is to stay as it is, in `multi_transform` or `where`."""
    return stateless(lambda updates, params: tree.map(torch.zeros_like, updates))
