"""Low-precision parameters without masters: updates that are rounded stochastically."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functron.core import compat, random, tree
from functron.core.errors import public
from functron.ops.adamw import Stochastic, place_of, random_bits, stochastic_round
from functron.ops.foreach import foreach_
from functron.optim.masters import is_low, widen
from functron.optim.schedules import increment_, new_count
from functron.optim.transformation import Fusion, GradientTransformation, bindable, transformation
from functron.optim.whole import leaf_specs
from functron.spmd.shards import Cut, take
from functron.spmd.spec import P, dim_axes


class StochasticState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
        key: of `functron.random`, from which all bits are drawn.
        count: number of updates so far; int64, 0-dim.
        inner: the state of the wrapped transformation.
    """

    key: Any
    count: Any
    inner: tree.Tree


@public
@bindable
def with_stochastic_rounding(
    inner: GradientTransformation, seed: int = 0, *, defs: tree.Tree = None, specs: tree.Tree = None
) -> GradientTransformation:
    """`inner`, run in float32, and low-precision parameters rounded stochastically.

    A parameter becomes one of the two numbers of its dtype around its new value, the nearer one
    more often, so that it is the new value on average: updates far below the last bit add up, as
    with `with_fp32_masters`, without the 4 bytes per parameter of a master; each step adds noise of
    up to one last bit. Moments of `inner` are float32, unless it says otherwise. Parameters in
    float32 or float64 are updated by `inner` directly.

    The bits belong to an element of a parameter: to its path, its global position and the count of
    updates. So numbers are the same on every mesh, up to what differs in gradients. A pipeline of
    processes is the exception: each counts the layers that it holds from 0.

    `update` returns, in float32, the difference between the new parameters and `params`, which
    `apply_updates` adds as exactly as with masters. With `adamw`'s kernel `step_` is one pass over
    memory; otherwise it makes float32 copies of parameters and gradients. No collectives beyond
    `inner`'s.

    Args:
        inner: such as ``adamw(rate, mu_dtype=torch.bfloat16)``.
        seed: of the bits; what `init` makes of it is part of the state.
        defs: the parameters' `ParamDef`s, or anything with global shapes; needed where they are
            sharded. None: what is seen is whole.
        specs: how what this sees is sharded, a prefix tree; None: as `bind` says.
    """

    def init(params):
        device = tree.leaves(params)[0].device if tree.leaves(params) else None
        key = random.key(seed, device=device)
        return StochasticState(key, new_count(params), inner.init(tree.map(_wide, params)))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "with_stochastic_rounding: got params=None; wanted the parameters to be rounded; "
                "fix: call update(grads, state, params)"
            )
        before, count = tree.map(_wide, params), state.count + 1
        updates, inner_state = inner.update(widen(updates, params), state.inner, before)

        def one(param, old, change, bits):
            if bits is None:
                return change
            return stochastic_round(old + change, bits, param.dtype).float() - old

        rows = zip(
            tree.leaves(params), tree.leaves(before), tree.leaves(updates),
            _bits(state.key, count, params, defs, specs), strict=True,
        )  # fmt: skip
        changes = [one(*row) for row in rows]
        new_state = StochasticState(state.key, count, inner_state)
        return tree.unflatten(tree.structure(params), changes), new_state

    def one_pass(grads, state, params, fusion):
        if inner.one_pass is None or fusion.masters is not None or fusion.rounding is not None:
            return None
        rounding = _roundings(state.key, params, defs, specs)
        if rounding is None:
            return None
        fusion = fusion._replace(rounding=rounding)
        together = inner.one_pass(grads, state.inner, params, fusion)
        if together is None:
            return None

        def run():
            _, inner_state = together()
            increment_([state.count])
            return params, StochasticState(state.key, state.count, inner_state)

        return run

    def step_(grads, state, params):
        together = one_pass(grads, state, params, Fusion())
        if together is not None:
            return together()
        increment_([state.count])
        wide = tree.map(_wide, params)
        wide, inner_state = inner.step_(widen(grads, params), state.inner, wide)
        bits = _bits(state.key, state.count, params, defs, specs)
        rows = zip(tree.leaves(params), tree.leaves(wide), bits, tree.paths(params), strict=True)
        low = [(*row, word, path) for *row, word, path in rows if word is not None]
        old, new, words, paths = map(list, zip(*low, strict=True)) if low else ([], [], [], [])
        read = {"their new values": new, "bits": words}
        foreach_(_round_, {"params": old}, read, paths=lambda: paths)
        return params, StochasticState(state.key, state.count, inner_state)

    return transformation(
        init,
        update,
        specs=lambda param_specs: StochasticState(P(), P(), inner.specs(param_specs)),
        step_=step_,
        grad_specs=inner.grad_specs,
    )._replace(one_pass=one_pass)


def _wide(param: torch.Tensor) -> torch.Tensor:
    return param.detach().float() if is_low(param) else param


def _round_(params: list, values: list, bits: list) -> None:
    for param, value, word in zip(params, values, bits, strict=True):
        param.copy_(stochastic_round(value, word, param.dtype))


def _salt(path: str) -> int:
    """A number of a leaf's path, as in `functron.init_params`."""
    return zlib.crc32(path.encode())


def _whole(params: tree.Tree, defs: tree.Tree, specs: tree.Tree) -> list[tuple]:
    """Of every leaf its global shape, and the axes that split its dims."""
    leaves = tree.leaves(params)
    known = leaves if defs is None else tree.broadcast_prefix(defs, params, what="the defs")
    flat = leaf_specs(specs, params, "with_stochastic_rounding")
    return [
        (tuple(d.shape), dim_axes(spec, len(d.shape))) for d, spec in zip(known, flat, strict=True)
    ]


def _index(shape: Sequence[int], split: Sequence, device: torch.device | None) -> list:
    """The global positions along every dim that this rank has: None where it has all of them.

    Those of padding are 0, or past the end: it is of zeros, which are rounded to zeros.
    """
    return [
        take(torch.arange(size, device=device), (Cut(-1, axes),)) if axes else None
        for size, axes in zip(shape, split, strict=True)
    ]


def _bits(
    key: torch.Tensor, count: torch.Tensor, params: tree.Tree, defs: tree.Tree, specs: tree.Tree
) -> list[torch.Tensor | None]:
    """16 bits for every element of the parameters of low precision; None for the others."""
    step_key = random.fold_in(key, count)
    rows = zip(tree.paths(params), tree.leaves(params), _whole(params, defs, specs), strict=True)
    return [
        random_bits(random.fold_in(step_key, _salt(path)), shape, _index(shape, split, key.device))
        if is_low(leaf)
        else None
        for path, leaf, (shape, split) in rows
    ]


def _roundings(
    key: torch.Tensor, params: tree.Tree, defs: tree.Tree, specs: tree.Tree
) -> tree.Tree:
    """How the kernel rounds each parameter; None where it cannot: in simulation, for one."""
    if compat.transforms_active():
        return None
    found: list[Stochastic | None] = []
    rows = zip(tree.paths(params), tree.leaves(params), _whole(params, defs, specs), strict=True)
    for path, leaf, (shape, split) in rows:
        index = _index(shape, split, torch.device("cpu"))
        starts = [0 if at is None else int(at[0]) if len(at) else 0 for at in index]
        place = place_of(shape, starts, leaf.shape)
        if not is_low(leaf):
            found.append(None)
        elif place is None or not _in_order(leaf):
            return None
        else:
            found.append(Stochastic(key, _salt(path), place))
    return tree.unflatten(tree.structure(params), found)


def _in_order(leaf: torch.Tensor) -> bool:
    """Whether elements lie in memory in the order of their positions, with gaps or without."""
    strides = [n for n, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
    return strides == sorted(strides, reverse=True)
