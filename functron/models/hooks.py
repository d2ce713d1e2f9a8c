"""Functions of the user's own in place of a decoder's attention and blocks, on any mesh.

What splits sequences over ranks would change what such a function computes without a word, if it
looks at tokens beside one another: attention is given whole sequences, and a block that mixes or
chooses tokens by itself is refused, unless they say that they reach across ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.typing import Tensor
from functron.models.config import GPTConfig
from functron.models.options import Hook, ModelOptions, keywords_of
from functron.nn.context import own_part
from functron.nn.layers import SEQ_DIM, sequence_axes
from functron.program.recorder import aside
from functron.spmd import CONTEXT_AXES
from functron.spmd import collectives as lax
from functron.spmd.axes import Scope, enter
from functron.spmd.params import ParamDef


def attention_keywords(function: Callable, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that an attention of the user's is called with.

    Raises:
        ValueError: it has no parameter for one that this run needs; all are listed.
    """
    taken = keywords_of(function, given)
    found = []
    for name, none in (("window", 0), ("cap", 0), ("segments", None), ("sinks", None)):
        value = given.get(name, none)
        if name not in taken and (isinstance(value, Tensor) or value != none):
            got = f"a function without a parameter {name}, which this run needs"
            fix = f"let it take {name}, as nn.context_attention does"
            found.append(Problem("options.attention", got, f"{name} among them", fix))
    raise_problems("this attention cannot compute the model", found)
    return taken


def _of_own_rank(x: Tensor, dim: int) -> Tensor:
    """The rank's part of a dim of heads that are exchanged for sequence."""
    for axis in CONTEXT_AXES:
        x = own_part(x, x.shape[dim] // lax.axis_size(axis), dim, axis)
    return x


def _of_own_heads(repeats: int, x: Tensor, d: ParamDef) -> Tensor:
    """The part of a parameter that belongs to the heads that a rank has after the exchange."""
    for dim, axis in enumerate(d.axes):
        if axis == "kv_heads" and repeats > 1:
            x = x.repeat_interleave(repeats, dim)
        x = _of_own_rank(x, dim) if axis in ("heads", "kv_heads") else x
    return x


def own_attention(
    config: GPTConfig,
    hook: Hook,
    options: ModelOptions,
    params: tuple,
    given: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """The core of attention that a hook computes, of whole sequences unless it has ``context``.

    Raises:
        ValueError: the run needs a keyword that it has not, or heads do not divide over the ranks
            that split sequences.
    """
    given = {**given, "sinks": sinks, "context": options.context}
    taken = attention_keywords(hook.apply, given)
    ranks = lax.axis_size(CONTEXT_AXES)
    if "context" in taken or ranks == 1:
        return hook.apply(*params, q, k, v, **taken)
    if q.shape[2] % ranks:
        got = f"{q.shape[2]} heads on each rank"
        wanted = f"a multiple of the {ranks} ranks that split sequences"
        fix = "use fewer ranks of cp, or let it take context and reach across them itself"
        refuse("this attention cannot compute the model", "options.attention", got, wanted, fix)
    repeats = ranks // math.gcd(ranks, k.shape[2])  # just enough for every rank to have one
    k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
    q, k, v = (lax.all_to_all(x, CONTEXT_AXES, 2, 1, tiled=True) for x in (q, k, v))
    for name in ("segments", "positions"):
        if taken.get(name) is not None:
            dim = 0 if taken[name].dim() == 1 else 1
            taken[name] = lax.all_gather(taken[name], CONTEXT_AXES, axis=dim, tiled=True)
    if taken.get("sinks") is not None:
        taken["sinks"] = _of_own_rank(taken["sinks"], 0)
    if hook.defs is not None:
        params = (tree.map(functools.partial(_of_own_heads, repeats), *params, hook.defs(config)),)
    out = hook.apply(*params, q, k, v, **taken)
    return lax.all_to_all(out, CONTEXT_AXES, 1, 2, tiled=True)


def own_block(hook: Hook, options: ModelOptions) -> Callable:
    """A block of the user's as a function ``(layer, weights, x) -> (x, auxiliary or None)``.

    Where ranks have parts of the sequences it is seen to mix no tokens but by the methods of its
    layer, before it is called. With a parameter ``context``, in which it is given
    `ModelOptions.context`, it reaches across these ranks itself, and nobody looks.

    Raises:
        ValueError: (when called) it mixes or chooses tokens; or returns no auxiliary loss of its
            experts, or one where there are none.
    """
    given = keywords_of(hook.apply, {"context": options.context})
    apply = functools.partial(hook.apply, **given)
    axes = sequence_axes(options.stream)

    def body(layer: Any, weights: dict, x: Tensor) -> tuple[Tensor, Any]:
        if not given and lax.axis_size(axes) > 1 and x.shape not in options.seen_blocks:
            _refuse_mixing(apply, layer, weights, x, axes)
            options.seen_blocks.add(x.shape)
        out = apply(layer, weights, x)
        y, auxiliary = out if isinstance(out, tuple) else (out, None)
        if ("moe" in weights) != (auxiliary is not None):
            got = "no auxiliary loss" if auxiliary is None else "an auxiliary loss"
            wanted = "(x, auxiliary) of a block with experts, x of another"
            fix = "return what layer.feed_forward returns beside its result"
            refuse("the block of these options", "options.block", got, wanted, fix)
        return y, auxiliary

    return body


class _OfEachToken:
    """Methods of a layer that are functions of each token alone, and keep how many tokens came."""

    lengths: set[int]

    @classmethod
    def of(cls, layer: Any) -> Any:
        """`layer`, with these methods in place of its own."""
        made = object.__new__(type(cls.__name__, (cls, type(layer)), {}))
        made.__dict__.update(vars(layer), lengths=set())
        return made

    def norm(self, weights: dict, name: str, x: Tensor) -> Tensor:
        return x / (1 + x.square().mean(-1, keepdim=True)).sqrt()

    def add_norm(self, weights: dict, name: str, x: Tensor, residual: Tensor) -> tuple:
        return self.norm(weights, name, x + residual), x + residual

    def attention(self, weights: dict, x: Tensor) -> Tensor:
        self.lengths.add(x.shape[SEQ_DIM])
        return x.tanh()

    def feed_forward(self, weights: dict, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.lengths.add(x.shape[SEQ_DIM])
        return x.tanh(), x.new_zeros(()) if "moe" in weights else None

    def drop(self, x: Tensor, which: int) -> Tensor:
        return x


def _refuse_mixing(
    apply: Callable, layer: Any, weights: dict, x: Tensor, axes: tuple[str, ...]
) -> None:
    """Raise for a block that chooses or mixes tokens; on numbers of this function's own."""
    seq, stand_in = x.shape[SEQ_DIM], _OfEachToken.of(layer)
    with aside(), enter(Scope()), torch.no_grad():
        own = tree.map(lambda leaf: _waves(leaf.shape[-1:], leaf.dtype).expand(leaf.shape), weights)
        first = _waves(x.shape[1:], x.dtype).expand(x.shape)
        half = (torch.arange(seq) < seq // 2).view(-1, 1)
        # others with all scores above, all below, and all between those of what stays
        others = [factor * first[:, :1] for factor in (50.0, -50.0, 0.01)]
        alone = True
        try:
            for stays in (half, ~half):
                seen = []
                for other in others:
                    out = apply(stand_in, own, torch.where(stays, first, other))
                    out = out[0] if isinstance(out, tuple) else out
                    seen.append(torch.where(stays, out, 0))
                pairs = itertools.pairwise(seen)
                alone &= all(torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in pairs)
        except Exception:  # it may need what these numbers are not
            return
    if alone and stand_in.lengths <= {seq}:
        return
    named = " and ".join(repr(name) for name in axes if lax.axis_size(name) > 1)
    refuse(
        "this block would choose or mix tokens among those of its own rank",
        "options.block",
        f"a result of a token that depends on others, of which a rank has {seq}: {named} split "
        "the sequence",
        "one that depends on others by layer.attention alone",
        "leave cp, or sequence parallelism over tp, out; or let it take context, and bring "
        "together the tokens of all ranks itself (lax.all_gather)",
    )


def _waves(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Numbers between -1 and 1 that differ, without drawing them; zeros of what is no number."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    steps = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.7 * steps * steps + steps).sin().view(shape).to(dtype)
