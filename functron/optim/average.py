"""Exponential moving averages, of updates and of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.foreach import foreach_
from functron.optim.schedules import new_count
from functron.optim.transformation import (
    GradientTransformation,
    apply_updates,
    bindable,
    need_params,
    transformation,
)
from functron.spmd.spec import P, cut_tree, join


class EmaState(NamedTuple):
    """The state of `ema`.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        ema: the running mean, like the parameters.
    """

    count: Any
    ema: tree.Tree


@public
def ema(
    decay: float, debias: bool = True, *, dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Updates that are their running mean, ``m = decay m + (1 - decay) u``; Optax's `ema`.

    Args:
        decay: weight of what was before, per update.
        debias: divide by ``1 - decay^t`` what is passed on at update t.
        dtype: how the mean is stored; None: as the parameter is. float64 stays float64.
    """

    def init(params):
        kept = tree.map(lambda p: torch.zeros_like(p, dtype=_average_dtype(p, dtype)), params)
        return EmaState(new_count(params), kept)

    def update(updates, state, params=None):
        count = state.count + 1
        bias = 1 - decay ** count.to(torch.float64)
        kept = tree.map(lambda u, m: (1 - decay) * u + decay * m, updates, state.ema)
        out = tree.map(
            lambda u, m: (m / bias.to(m.dtype) if debias else m).to(u.dtype), updates, kept
        )
        kept = tree.map(lambda m, before: m.to(before.dtype), kept, state.ema)
        return out, EmaState(count, kept)

    specs = lambda param_specs: EmaState(P(), param_specs)  # noqa: E731
    return transformation(init, update, specs, elementwise=True)


def _average_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


class AverageState(NamedTuple):
    """The state of `with_average`.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        weight: what the weights of all averaged parameters sum to; float64, 0-dim.
        average: the weighted sum of the parameters, like them.
        inner: the state of the wrapped transformation.
    """

    count: Any
    weight: Any
    average: tree.Tree
    inner: tree.Tree


@public
@bindable
def with_average(
    inner: GradientTransformation,
    decay: float | Callable[[torch.Tensor], float | torch.Tensor],
    *,
    debias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> GradientTransformation:
    """`inner`, and the exponential moving average of the parameters that it makes.

    ``average = decay average + (1 - decay) params`` after every update, and the same of a weight
    that `averaged` divides by (Polyak and Juditsky 1992, with Adam's bias correction). The average
    is sharded as the parameters are; put this inside `with_fp32_masters`, to average the masters,
    and inside `zero`, to keep shards of it. `step_` runs that of `inner`, then one multi-tensor
    update. No collectives beyond `inner`'s.

    Args:
        inner: updates the parameters, learning rate included.
        decay: weight of the previous average, per update, or a function of the count of updates so
            far.
        debias: start empty, to average trained parameters only; False: start with the parameters.
        dtype: of the average; that of float64 parameters is float64.

    Raises:
        ValueError: `decay` is a number that is not in [0, 1); (when called) no parameters given.
    """
    if not callable(decay) and not 0 <= decay < 1:
        refuse("with_average", "decay", repr(decay), "at least 0 and less than 1")

    def init(params):
        count = new_count(params)
        weight = torch.full_like(count, 0 if debias else 1, dtype=torch.float64)
        start = torch.zeros_like if debias else torch.clone
        kept = tree.map(lambda p: start(p.detach().to(_average_dtype(p, dtype))), params)
        return AverageState(count, weight, kept, inner.init(params))

    def now(state) -> float | torch.Tensor:
        """The decay of this update."""
        return torch.as_tensor(decay(state.count)).to(torch.float64) if callable(decay) else decay

    def update(updates, state, params=None, **extra):
        need_params("with_average", params, "to average")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        average = _mix_average(state.average, apply_updates(params, updates), now(state))
        return updates, _count_update(state, average, inner_state, now(state))

    def step_(grads, state, params, **extra):
        share = now(state)
        params, inner_state = inner.step_(grads, state.inner, params, **extra)
        mix = _mix_average if isinstance(share, torch.Tensor) else _mix_average_
        average = mix(state.average, params, share)
        return params, _count_update(state, average, inner_state, share)

    return transformation(
        init,
        update,
        lambda specs: AverageState(P(), P(), specs, inner.specs(specs)),
        step_=step_,
        grad_specs=inner.grad_specs,
        elementwise=inner.elementwise,
    )


def _count_update(state: AverageState, average, inner, decay: float | torch.Tensor) -> AverageState:
    weight = decay * state.weight + (1 - decay)
    return AverageState(state.count + 1, weight, average, inner)


def _mix_average(average: tree.Tree, params: tree.Tree, decay: float | torch.Tensor) -> tree.Tree:
    def one(m, p):
        share = 1 - (decay.to(m.dtype) if isinstance(decay, torch.Tensor) else decay)
        return m + share * (p.to(m.dtype) - m)

    return tree.map(one, average, params)


def _mix_average_(average: tree.Tree, params: tree.Tree, decay: Any) -> tree.Tree:
    """`_mix_average`, in the memory of `average`."""
    kept = tree.leaves(average)
    rows = tree.same_structure(average, params, names=("the state's average", "params"))
    foreach_(
        lambda ms, ps: torch._foreach_add_(ms, torch._foreach_sub(ps, ms), alpha=1 - decay),
        {"averages": kept},
        {"parameters": [p.to(m.dtype) for m, p in zip(kept, rows, strict=True)]},
        paths=lambda: tree.paths(average),
    )
    return average


def averaged(
    state: tree.Tree, params: tree.Tree, specs: tree.Tree = None, shards: tree.Tree = None
) -> tree.Tree:
    """The averaged parameters that an optimizer's state holds, like `params`.

    Parameters without an average (frozen ones) are those of `params`, as all are before the first
    update of a debiased average.

    Args:
        state: of an optimizer that contains one `with_average`, anywhere.
        params: the parameters themselves.
        specs, shards: as given to `zero`, for averages of shards; None: the averages are whole.
            With them, run this inside a mapped program: one all-gather per leaf and axis.

    Raises:
        ValueError: the state has no average, or several; or it has averages of shards, without
            `shards`.
    """
    is_average = lambda x: isinstance(x, AverageState)  # noqa: E731
    found = [x for x in tree.leaves(state, is_average) if is_average(x)]
    if len(found) != 1:
        fix = "put one with_average around the optimizer"
        refuse("averaged", "state", f"{len(found)} averages", "one", fix)
    weight, average = found[0].weight, found[0].average
    leaves, structure = tree.flatten(params)
    kept = structure.flatten_up_to(average)
    cuts = [()] * len(leaves) if shards is None else cut_tree(specs, shards, params)
    if shards is None:
        fix = "pass specs and shards, as to zero, inside a mapped program"
        raise_problems("averaged: parameters and their averages differ", [
            Problem(path, f"an average {tuple(m.shape)}", f"that of {tuple(p.shape)}", fix)
            for path, p, m in zip(tree.paths(params), leaves, kept, strict=True)
            if m is not None and m.shape != p.shape
        ])  # fmt: skip

    def one(p: torch.Tensor, m: Any, cut: tuple) -> torch.Tensor:
        if m is None:
            return p
        m, total = m.to(p.device), weight.to(p.device)  # they may be kept in host memory
        m = join(m, cut, p.shape) if cut else m
        mean = m / total.clamp(min=1e-12).to(m.dtype)
        return torch.where(total > 0, mean, p.to(m.dtype)).to(p.dtype)

    return tree.map_columns(one, params, kept, cuts)
