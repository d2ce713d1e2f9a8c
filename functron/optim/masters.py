"""Float32 master copies, for parameters that are stored in a lower precision."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functron.core import tree
from functron.core.errors import public
from functron.ops.foreach import foreach_
from functron.optim.transformation import Fusion, GradientTransformation, bindable, transformation

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""The dtypes whose parameters have masters."""


class MastersState(NamedTuple):
    """The state of `with_fp32_masters`.

    Attributes:
        masters: float32 copies of the bfloat16 and float16 parameters; None where a parameter is
            its own master.
        inner: the state of the wrapped transformation.
    """

    masters: tree.Tree
    inner: tree.Tree


@public
@bindable
def with_fp32_masters(
    inner: GradientTransformation, dtypes: tree.Tree = None
) -> GradientTransformation:
    """`inner`, run in float32 on master copies of the low-precision parameters.

    The parameters are the rounded masters, so that updates smaller than their last bit add up
    instead of being lost. The state holds 4 bytes per low-precision parameter more, and the moments
    of `inner` become float32; `step_` also makes a float32 copy of those gradients. Parameters that
    are float32 or float64 already are updated by `inner` directly.

    `update` returns, in float32, the difference between the new rounded masters and `params`.
    Adding it with `apply_updates` gives the rounded masters exactly when the parameter moves by
    fewer than 16 binary orders of magnitude (Sterbenz: the difference is then exact); beyond it is
    off by at most 2^-24 of the larger of the two, until the next update, which starts from the
    masters. `step_` is always exact. Where `inner` is `adamw` and its kernel is used, `step_` is
    one pass over memory, without the float32 copies of gradients.

    No collectives beyond `inner`'s.

    Args:
        inner: what updates the masters.
        dtypes: of the parameters, a prefix tree of dtypes, which allows `init` to be given what
            they were rounded from, for masters: see ``functron.init_state(..., masters=)``. None:
            `init` is given the parameters, which are their own masters at first.
    """

    def init(params):
        leaves, structure = tree.flatten(params)
        own = [leaf.dtype for leaf in leaves]
        kinds = own if dtypes is None else tree.broadcast_prefix(dtypes, params, what="dtypes")
        rows = zip(leaves, kinds, strict=True)
        masters = tree.unflatten(structure, [_master(leaf, kind) for leaf, kind in rows])
        return MastersState(masters, inner.init(_effective(params, masters)))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "with_fp32_masters: got params=None; wanted the parameters that the masters round "
                "to; fix: call update(grads, state, params)"
            )
        effective = _effective(params, state.masters)
        updates, inner_state = inner.update(widen(updates, params), state.inner, effective)

        new = tree.map(lambda now, u: now + u, effective, updates)
        out = tree.map(
            lambda p, u, master: master.to(p.dtype).float() - p.float() if is_low(p) else u,
            params,
            updates,
            new,
        )
        masters = tree.map(lambda p, master: master if is_low(p) else None, params, new)
        return out, MastersState(masters, inner_state)

    def one_pass(grads, state, params, fusion):
        if inner.one_pass is None or fusion.masters is not None:
            return None
        fusion = fusion._replace(masters=state.masters)
        together = inner.one_pass(grads, state.inner, params, fusion)
        if together is None:
            return None

        def run():
            _, inner_state = together()
            return params, MastersState(state.masters, inner_state)

        return run

    def step_(grads, state, params):
        together = one_pass(grads, state, params, Fusion())
        if together is not None:
            return together()
        effective = _effective(params, state.masters)
        effective, inner_state = inner.step_(widen(grads, params), state.inner, effective)
        pairs = zip(tree.leaves(params), tree.leaves(effective), strict=True)
        low = [pair for pair in pairs if is_low(pair[0])]
        foreach_(
            torch._foreach_copy_,
            {"params": [param for param, _ in low]},
            {"masters": [master for _, master in low]},
        )
        masters = tree.map(lambda p, m: m if is_low(p) else None, params, effective)
        return params, MastersState(masters, inner_state)

    return transformation(
        init,
        update,
        specs=lambda param_specs: MastersState(param_specs, inner.specs(param_specs)),
        step_=step_,
        grad_specs=inner.grad_specs,
    )._replace(one_pass=one_pass)


def is_low(param: torch.Tensor) -> bool:
    """Whether a parameter is bfloat16 or float16."""
    return param.dtype in LOW_PRECISION


def _master(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The master of a parameter of this dtype, from its value or from what it was rounded from."""
    low = dtype in LOW_PRECISION or is_low(param)
    return param.detach().to(torch.float32, copy=True) if low else None


def _effective(params: tree.Tree, masters: tree.Tree) -> tree.Tree:
    """The parameters for `inner`: the master where there is one, else the parameter."""
    return tree.map(lambda param, master: param if master is None else master, params, masters)


def widen(updates: tree.Tree, params: tree.Tree) -> tree.Tree:
    """`updates`, those of parameters of low precision as float32."""
    return tree.map(lambda u, p: u.float() if is_low(p) else u, updates, params)
