"""A layer of experts: router, dispatch, experts, and an expert of all tokens.

Tokens and experts are split over `axes`. What the tensor-parallel axis does is then decided:

| tp is         | stream                | experts      | what happens                            |
|---------------|-----------------------|--------------|-----------------------------------------|
| not in `axes` | the same on its ranks | hidden split | each sends all tokens; one all-reduce   |
| not in `axes` | sequence split by it  | hidden split | all-gather before, reduce-scatter after |
| in `axes`     | sequence split by it  | whole        | each sends its own tokens               |

The last is Megatron's parallel folding (Liu et al. 2025): more experts apart, and no collectives
but the dispatch's. Routing is of each rank's own part of the stream in every case.
The shared expert is computed while rows are on their way to others.

Every rank has tokens of its own and experts of its own. Sorted by expert, a token's k assignments
are rows; rows go to the owners of their experts and come back, where they are weighted and added
up. Weights never leave the rank of their token, so the router's gradient arises there, whole.

| kind       | there                                     | back                    |
|------------|-------------------------------------------|-------------------------|
| "alltoall" | each row to the owner of its expert       | each row to its token   |
| "gather"   | all tokens and their routing to all ranks | sums, by reduce-scatter |
| "two-hop"  | each token once to every node of its      | sums within each node,  |
|            | experts, there to the owners of these     | then sums of these      |

The first sends k copies of a token, the second n: gathering is for few ranks, or for many experts
to a token. In two hops (DeepSeek-V3, section 3.2.2) a token crosses the links between nodes once
for each node, of which routing may limit the number: the first of `axes` are the nodes, on whose
rank of the same place it arrives with its weights, so that it is weighted and added up there
before it goes back.

Shapes are static: results have room for the worst case, all tokens of all ranks on one rank's
experts, or for as many rows as `functron.nn.moe.room` bounds them to; what is sent between
processes, and what is multiplied, are real rows alone. The experts are feed-forward layers in three
stacked weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from functron.core import compat
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.functions import Function
from functron.core.typing import Bool, Float, Int, Key, Scalar, Tensor
from functron.nn.layers import (
    ACTIVATIONS,
    GATE_UP,
    MATMUL,
    SEQ_DIM,
    Activation,
    Adapter,
    Matmul,
    apart,
    gather_sequence,
    linear_defs,
    mlp,
    mlp_defs,
    reduce_partial,
    sequence_axes,
    widen,
)
from functron.nn.moe.config import ExpertDispatch, MoEConfig
from functron.nn.moe.room import RowBounds, find_part, fit_rows, goes_to, mean_nodes
from functron.nn.moe.router import (
    FilledSums,
    Router,
    RouterInput,
    RouterSums,
    Routing,
    auxiliary,
    capacity,
    competing,
    over_context,
    route,
    route_by,
    router_defs,
    split_further,
    statistics,
)
from functron.ops.glu import SWIGLU_LIMIT, SWIGLU_SLOPE, glu_linear, halves
from functron.ops.grouped_matmul import grouped_matmul
from functron.ops.moe import PERMUTE, SORT, UNPERMUTE, sorted_assignments
from functron.ops.operations import AUTO, Kernels
from functron.program.recorder import keeper
from functron.spmd import collectives as lax
from functron.spmd.axes import lookup
from functron.spmd.ragged import (
    add_rows,
    copy_rows,
    count_kept,
    exchange,
    pick,
    swap_blocks,
    wait_for_rows,
    waits_for_sizes,
)
from functron.spmd.spec import P, part_length, spec_axes

ExpertActivation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "clamped_swiglu"]
"""Those of `nn.mlp`, and that of GPT-OSS, which needs a gate; see `clamped_swiglu`."""

_PADDED = 1.5  # times the rows: so many are sent before waiting for how many there are is better
_BIAS_WIDTH = 8  # the inner dim of a product with ones: whole 16 bytes for kernels


def expert_defs(
    num_experts: int,
    embed_dim: int,
    expert_dim: int,
    *,
    gated: bool,
    bias: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
    fused: bool = False,
) -> dict:
    """Defs ``{"up", "gate"?, "down"}``, each ``{"w": [E, in, out], "b"?: [E, out]}``.

    The hidden dim has the logical axis "expert_mlp": split by a tensor-parallel axis (over which
    tokens are not), each rank holds a part of every one of its experts. With `fused`, where there
    is a gate, ``"gate_up"`` in place of both, with a dim of 2 before the hidden one.
    """

    def layer(sizes: Sequence[int], axes: Sequence, stddev: float, pieces: tuple = ()) -> dict:
        return linear_defs(
            (num_experts, *sizes),
            ("expert", *axes),
            stddev=stddev,
            bias=(num_experts, *sizes[1:]) if bias else None,
            bias_axes=("expert", *axes[1:]),
            dtype=dtype,
            pieces=pieces,
            matrix=(1, len(sizes) - 1),
        )

    down = {"down": layer((expert_dim, embed_dim), ("expert_mlp", "embed"), out_stddev)}
    if gated and fused:
        axes = ("embed", None, "expert_mlp")
        return {"gate_up": layer((embed_dim, 2, expert_dim), axes, stddev, GATE_UP), **down}
    wide = layer((embed_dim, expert_dim), ("embed", "expert_mlp"), stddev)
    return {"up": wide, **down, **({"gate": wide} if gated else {})}


def clamped_swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Tensor:
    """(u + 1) g sigmoid(1.702 g), with g = min(gate, 7) and u = up within [-7, 7] (GPT-OSS)."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * (SWIGLU_SLOPE * gate).sigmoid()


GATED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        **{name: lambda gate, up, act=act: act(gate) * up for name, act in ACTIVATIONS.items()},
        "clamped_swiglu": clamped_swiglu,
    }
)
"""The hidden features of gated experts, of (gate, up)."""


def check_activation(activation: str, *, gated: bool) -> None:
    """Refuse an activation that is unknown, or that needs a gate where there is none.

    Raises:
        ValueError: with the known ones.
    """
    known = GATED if gated else get_args(Activation)
    if activation not in known:
        why = "" if activation not in GATED else " (it multiplies a gate, and there is none)"
        raise ValueError(
            f"experts: got activation {activation!r}{why}; {nearest(activation, known)}"
        )


def experts(
    params: dict,
    rows: Float[Tensor, "rows embed"],
    sizes: Int[Tensor, " experts"],
    *,
    activation: ExpertActivation,
    parts: int = 1,
    axes: tuple[str, ...] = ("ep",),
    axis: str = "tp",
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "rows embed"]:
    """y = act(x up) down, or (act(x gate) * (x up)) down, by the expert of each row.

    Args:
        params: this rank's part of `expert_defs`; a layer may have an `Adapter` of each expert,
            whose two products are grouped as well.
        rows: sorted by expert.
        sizes: int64, how many rows each of this rank's experts has.
        activation: one of `ACTIVATIONS`, or "clamped_swiglu" for gated experts.
        parts: number of ranks that split the hidden dim. Their results are then parts of a sum, and
            each adds its part of the last bias.
        axes: the mesh axes that divide experts, for `matmul`.
        axis: the one that splits the hidden dim if it is none of these, for `matmul`.
        kernels: of ``"glu"``.
        matmul: computes the products; see `nn.mlp`.

    Returns:
        Zeros in rows that belong to no expert. No collectives but those of `matmul`.

    Raises:
        ValueError: see `check_activation`.
    """
    params = apart(params, matmul)
    check_activation(activation, gated="up" not in params or "gate" in params)
    split = () if axis in axes else axis
    where = {"experts": axes, "inner": (), "outer": split}

    def linear(name: str) -> Tensor:
        layer = params[name]
        if name == "gate_up":
            layer = {key: _join_pieces(leaf) for key, leaf in layer.items()}
        # between the first and the last product, rows of no expert may hold anything
        return _apply_linear(matmul, where, name, layer, rows=rows, sizes=sizes, zeros=False)

    gate, up = widen(params, linear)
    if gate is None:
        assert up is not None
        hidden = ACTIVATIONS[cast(Activation, activation)](up)
    elif "lora" not in params["down"] and matmul is MATMUL and kernels.takes("glu", gate, up):
        y = glu_linear(gate, up, params["down"]["w"], activation, sizes)
        return _add_bias(y, params["down"], sizes, parts)
    else:
        hidden = GATED[activation](*halves(gate, up))
    where = {"experts": axes, "inner": split, "outer": ()}
    given: Any = {"rows": hidden, "sizes": sizes, "parts": parts, "zeros_back": False}
    return _apply_linear(matmul, where, "down", params["down"], **given)


def _apply_linear(
    matmul: Matmul,
    where: Mapping[str, Any],
    name: str,
    layer: dict,
    *,
    rows: Tensor,
    sizes: Tensor,
    parts: int = 1,
    zeros: bool = True,
    zeros_back: bool = True,
) -> Tensor:
    own = {"name": f"experts/{name}", **where}
    y = matmul.grouped(rows, layer["w"], sizes, zeros, zeros_back, **own)
    if "lora" in layer:
        a, b, scale, magnitude = layer["lora"]
        assert magnitude is None  # of experts there is no DoRA
        narrow = grouped_matmul(rows, a, sizes, False, zeros_back)
        b = b * scale.to(b.dtype)[:, None, None]
        y = y + grouped_matmul(narrow, b, sizes, zeros, False)
    return _add_bias(y, layer, sizes, parts, zeros)


def _join_pieces(leaf: Any) -> Any:
    """``[E, in, 2, width]`` as ``[E, in, 2 * width]``; of an adapter its b."""
    return leaf._replace(b=leaf.b.flatten(-2)) if isinstance(leaf, Adapter) else leaf.flatten(-2)


def _add_bias(y: Tensor, layer: dict, sizes: Tensor, parts: int, zeros: bool = True) -> Tensor:
    if "b" not in layer:
        return y
    # as a product with ones: no row outside of all groups gets one, and its gradient is a sum of
    # rows by group, in a fixed order
    bias = layer["b"].unsqueeze(1) / parts
    bias = torch.nn.functional.pad(bias, (0, 0, 0, _BIAS_WIDTH - 1))
    return y + grouped_matmul(y.new_ones(y.shape[0], _BIAS_WIDTH), bias, sizes, zeros)


Compute = Callable[[Tensor, Tensor], Tensor]
"""``(rows [R, D], sizes int64 [experts])`` to ``[R, D_out]``: rows are sorted by expert, and those
beyond the sum of sizes belong to none."""


class RowOrder(NamedTuple):
    """The assignments of some tokens, sorted by expert; `sort_by_expert` makes it.

    Attributes:
        assignment: int64 ``[R]``: of each row, token * choices + choice.
        token: int64 ``[R]``.
        slots: int64 ``[N, choices]``: the row of each assignment; -1 where there is no room.
        sizes: int64 ``[experts]``: the rows of each expert; after them come dropped assignments.
        whole: every assignment has a row.
    """

    assignment: Tensor
    token: Tensor
    slots: Tensor
    sizes: Tensor
    whole: bool


def sort_by_expert(
    experts: Int[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    num_experts: int,
    *,
    rows: int,
    kernels: Kernels = AUTO,
) -> RowOrder:
    """Sort assignments by expert, tokens in order within each, and those not kept last.

    Args:
        experts: int64.
        rows: how many to make room for: at least as many as are kept, at most tokens * choices.
        kernels: of ``"moe_sort"``.
    """
    sort = SORT if kernels.takes("moe_sort", experts) else sorted_assignments
    found = sort(experts, kept, num_experts, rows)
    return RowOrder(*found, whole=rows >= experts.numel())


def permute(
    x: Float[Tensor, "tokens dim"], order: RowOrder, *, kernels: Kernels = AUTO
) -> Float[Tensor, "rows dim"]:
    """The token of every row. Transpose: the sum over a token's rows. Gathers both ways.

    By kernels if they take ``"moe_permute"``.
    """
    if kernels.takes("moe_permute", x):
        return PERMUTE(x, order.token, order.slots)
    return copy_rows(x, order.token, order.slots, whole=order.whole)


def unpermute(
    rows: Float[Tensor, "rows dim"],
    weights: Float[Tensor, "tokens choices"],
    order: RowOrder,
    *,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "tokens dim"]:
    """y[n] = sum over a token's assignments j of weights[n, j] times its row.

    In the wider dtype; by kernels, if they take ``"moe_permute"``, rounded to that of rows. Rows of
    assignments that are not kept must have weight 0.
    """
    if kernels.takes("moe_permute", rows, weights):
        return UNPERMUTE(rows, weights, order.assignment, order.slots)
    if compat.transforms_active() or compat.pushing_forward():
        scaled = rows * _select_rows(weights, order).unsqueeze(1)
        return add_rows(scaled, order.token, order.slots, whole=order.whole)
    out: Any = _Unpermute.apply(rows, weights, order)
    return out


def _select_rows(values: Tensor, order: RowOrder) -> Tensor:
    """``[N, choices]`` by assignment as ``[R]`` by row."""
    places = order.slots.flatten().unsqueeze(1)
    return copy_rows(values.flatten(), order.assignment, places, whole=order.whole)


class _Unpermute(Function):
    """`unpermute` on torch's tape, without the intermediates that the tape would keep."""

    @staticmethod
    def forward(rows, weights, order):
        total = pick(rows, order.slots[:, 0], order.whole) * weights[:, :1]
        for choice in range(1, weights.shape[1]):
            row = pick(rows, order.slots[:, choice], order.whole)
            total.addcmul_(row.to(total.dtype), weights[:, choice : choice + 1])
        return total

    @staticmethod
    def setup_context(ctx, inputs, output):
        rows, weights, ctx.order = inputs
        ctx.save_for_backward(rows, weights)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        (rows, weights), order = ctx.saved_tensors, ctx.order
        gradient = copy_rows(cotangents[0], order.token, order.slots, whole=order.whole)
        of_row = _select_rows(weights, order).unsqueeze(1)
        product = (gradient * rows).sum(1, dtype=weights.dtype)
        at = order.slots.flatten()
        for_weights = add_rows(product, order.assignment, at.unsqueeze(1), whole=order.whole)
        if torch.is_grad_enabled():
            gradient = gradient * of_row
        else:
            gradient.mul_(of_row)
        return gradient.to(rows.dtype), for_weights.view(weights.shape), None


def dispatched(
    x: Float[Tensor, "tokens dim"],
    experts: Int[Tensor, "tokens choices"],
    weights: Float[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    compute: Compute,
    *,
    num_experts: int,
    axes: tuple[str, ...] = ("ep",),
    kind: ExpertDispatch = "alltoall",
    per_expert: int | None = None,
    bounds: RowBounds = RowBounds(),  # noqa: B008  (a tuple)
    meanwhile: Callable[[], None] = lambda: None,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "tokens out_dim"]:
    """y[n] = sum over the kept choices j of weights[n, j] * expert experts[n, j] of x[n].

    Args:
        x: ``[N, D]``, this rank's tokens.
        experts: int64 ``[N, k]``, no expert twice among a token's kept ones.
        weights: ``[N, k]``.
        kept: ``[N, k]``; other choices are computed nowhere and sent nowhere.
        compute: this rank's experts, applied to their rows.
        num_experts: E, over all ranks.
        axes: the mesh axes over which tokens, and experts, are split: rank r of them, row-major,
            owns experts r E / n to (r + 1) E / n - 1.
        kind: see the module.
        per_expert: the most tokens among one rank's N that an expert can have, where routing limits
            them (capacity); it makes results smaller. None: all N.
        bounds: the most rows that any rank has, whatever the data, as `fit_rows` sees to.
        meanwhile: called when tokens are on their way to other ranks, before they are waited for:
            other work, such as an expert of all tokens.
        kernels: of ``"moe_permute"`` and ``"moe_sort"``.

    Returns:
        ``[N, D_out]`` in x's dtype. Collectives: "alltoall": one of ``[E]`` integers, and two of
        rows, forward, and two of rows backward; "gather": all-gathers of x, experts, weights and
        kept, and a reduce-scatter of N n rows, forward, and their transposes backward; "two-hop":
        over the first axis one of integers and three of rows (tokens, what is known of their
        choices, sums), over the others those of "alltoall". With one rank, none, and N k rows.

    Raises:
        ValueError: experts do not divide over the ranks.
    """
    ranks = lax.axis_size(axes)
    if num_experts % ranks:
        wanted = f"a multiple of {ranks}, the ranks of {axes}"
        fix = "choose another number of experts, or split them over fewer axes"
        refuse("dispatch", "num_experts", str(num_experts), wanted, fix)
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    most = x.shape[0] if per_expert is None else min(per_expert, x.shape[0])
    if ranks > 1 and kind == "gather":
        meanwhile()
        local = num_experts // ranks
        rows = min(experts.shape[0] * ranks * min(experts.shape[1], local), local * most * ranks)
        rows = rows if bounds.rows is None else min(rows, bounds.rows)
        return _gather_tokens(x, experts, weights, kept, compute, local, axes, rows, kernels)
    routed = _Routed(experts, weights, kept, num_experts, most)
    if kind == "two-hop" and len(split_axes(axes)) > 1:
        made = _send_by_node(x, routed, compute, split_axes(axes), bounds, meanwhile, kernels)
    else:
        made = _send_rows(x, routed, compute, axes, bounds.rows, meanwhile, kernels)
    return made.to(x.dtype)


def split_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` that have several ranks."""
    return tuple(name for name in axes if lax.axis_size(name) > 1)


class _Routed(NamedTuple):
    """Where tokens go, and the most of them that an expert can have.

    `rows` bounds kept assignments; None: all. `expected` are there on average. Of `exact` ones how
    many there may be differs between ranks, so that nothing static may be made of it.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor
    num_experts: int
    most: int
    rows: int | None = None
    expected: int | None = None
    exact: bool = False


def _send_rows(
    x: Tensor,
    routed: _Routed,
    compute: Compute,
    axes: tuple[str, ...],
    most_rows: int | None,
    meanwhile: Callable[[], None],
    kernels: Kernels,
) -> Tensor:
    """The weighted sums of experts to whose owners every assignment is sent; wider than x."""
    experts, weights, kept, num_experts, most, bound, expected, exact = routed
    ranks = lax.axis_size(axes)
    rows = min(experts.numel(), num_experts * most)
    rows = rows if bound is None else min(rows, bound)
    order = sort_by_expert(experts, kept, num_experts, rows=rows, kernels=kernels)
    permuted = permute(x, order, kernels=kernels)
    if ranks == 1:
        meanwhile()
        made = compute(permuted, order.sizes)
    else:
        room = 0 if exact else min(rows, num_experts // ranks * most)
        expected = rows if expected is None else min(expected, rows)
        made = _exchange_rows(
            permuted, order.sizes, compute, axes, room, most_rows, expected, meanwhile, kernels
        )
    return unpermute(made, weights, order, kernels=kernels)


def _send_by_node(
    x: Tensor,
    routed: _Routed,
    compute: Compute,
    axes: tuple[str, ...],
    bounds: RowBounds,
    meanwhile: Callable[[], None],
    kernels: Kernels,
) -> Tensor:
    """The same in two hops: along the first axis once to each node, then to owners in the node."""
    experts, weights, kept, num_experts, most, *_ = routed
    nodes, ranks, found = lax.axis_size(axes[0]), lax.axis_size(axes), lookup(axes[:1])
    count, k, local = x.shape[0], experts.shape[1], num_experts // nodes
    node = torch.div(experts, local, rounding_mode="floor")
    goes = goes_to(node, kept, nodes)
    each = torch.arange(nodes, device=experts.device).expand(count, nodes)
    room = count  # of one rank for the rank of the same place in another node
    rows = count * (bounds.nodes or min(nodes, k))
    order = sort_by_expert(each, goes, nodes, rows=rows, kernels=kernels)
    sizes, capacity = order.sizes.view(nodes, 1), nodes * count
    room = 0 if capacity > _PADDED * rows else room
    capacity = capacity if bounds.tokens is None else min(capacity, bounds.tokens)
    expected = math.ceil(count * mean_nodes(num_experts, k, nodes, bounds.nodes))
    send: Any = {"room": room, "expected": min(rows, expected)}
    there, incoming, _ = exchange(
        permute(x, order, kernels=kernels), sizes, found, capacity=capacity, wait=False, **send
    )
    known = _describe_choices(routed, node, nodes)
    known = copy_rows(
        known, order.assignment, order.slots.flatten().unsqueeze(1), whole=order.whole
    )
    known, _, _ = exchange(known, sizes, found, capacity=capacity, wait=False, **send)
    meanwhile()
    there, known = wait_for_rows(there, found), wait_for_rows(known, found)
    taken, ids = known[:, :k].to(weights.dtype), known[:, k:].detach().round().to(experts.dtype)
    bound = ids.numel() if bounds.rows is None else min(ids.numel(), bounds.rows)
    exact = waits_for_sizes(x, found, room)
    bound = count_kept(ids > 0, bound) if exact else bound
    here = _Routed(
        (ids - 1).clamp(min=0), taken, ids > 0, local, min(most * nodes, there.shape[0]), bound,
        min(experts.numel(), num_experts * most), exact,
    )  # fmt: skip
    worst = ranks * min(experts.numel(), num_experts // ranks * most)
    most_rows = worst if bounds.rows is None else bounds.rows
    made = _send_rows(there, here, compute, axes[1:], most_rows, lambda: None, kernels)
    back, _, _ = exchange(made.to(x.dtype), incoming, found, capacity=rows, **send)
    missing = rows - back.shape[0]
    back = torch.cat([back, back.new_zeros(missing, back.shape[1])]) if missing else back
    wide = torch.promote_types(weights.dtype, x.dtype)
    return add_rows(back.to(wide), order.token, order.slots, whole=order.whole)


def _describe_choices(routed: _Routed, node: Tensor, nodes: int) -> Tensor:
    """All that a node has to know of a token: ``[tokens * nodes, 2 k]``.

    The weights of its choices there, then the numbers of their experts in the node from 1, and
    zeros where it has none. Numbers are exact: of a float type, so that one exchange sends both.
    """
    experts, weights, kept, num_experts, *_ = routed
    dtype = torch.promote_types(weights.dtype, torch.float32)
    each = torch.arange(nodes, device=experts.device).view(1, -1, 1)
    here = (node.unsqueeze(1) == each) & kept.unsqueeze(1)
    numbers = (experts - node * (num_experts // nodes) + 1).to(dtype)
    both = torch.stack([weights.to(dtype), numbers], 1)  # [tokens, 2, k]
    return torch.where(here.unsqueeze(2), both.unsqueeze(1), 0).flatten(2).flatten(0, 1)


def _exchange_rows(
    rows: Tensor,
    sizes: Tensor,
    compute: Compute,
    axes: tuple[str, ...],
    room: int,
    most_rows: int | None,
    expected: int,
    meanwhile: Callable[[], None],
    kernels: Kernels,
) -> Tensor:
    """The experts' outputs of this rank's rows, sorted by expert over all ranks: there and back.

    `room` bounds the rows that one rank has for the experts of another; 0: `most_rows` alone does.
    """
    capacity = lax.axis_size(axes) * room or most_rows or 0
    if capacity > _PADDED * rows.shape[0]:  # of static sizes: the same on all ranks
        room = 0
    if most_rows is not None:
        capacity = min(capacity, most_rows)
    found = lookup(axes)
    ranks = tuple(axis.size for axis in found)
    by_rank = tuple(range(len(ranks) + 1))  # dims of sizes: the other rank, then the expert there
    by_expert = (by_rank[-1], *by_rank[:-1])
    outgoing = sizes.view(*ranks, sizes.shape[0] // lax.axis_size(axes))
    there, incoming, layout = exchange(
        rows, outgoing, found, capacity=capacity, room=room, wait=False, passing=most_rows,
        expected=expected,
    )  # fmt: skip
    meanwhile()
    there = _reorder_rows(wait_for_rows(there, found), incoming, layout, by_expert, kernels)
    made = compute(there, incoming.flatten(0, -2).sum(0))
    made = _reorder_rows(made, incoming, by_expert, by_rank, kernels)
    back, returned, layout = exchange(
        made, incoming, found, capacity=rows.shape[0], room=room, passing=most_rows,
        backwards=most_rows is not None, expected=expected,
    )  # fmt: skip
    back = _reorder_rows(back, returned, layout, by_rank, kernels)
    missing = rows.shape[0] - back.shape[0]  # processes return only what they were sent
    return torch.cat([back, back.new_zeros(missing, back.shape[1])]) if missing else back


def _reorder_rows(
    rows: Tensor, sizes: Tensor, now: tuple[int, ...], wanted: tuple[int, ...], kernels: Kernels
) -> Tensor:
    """Rows in blocks by the dims `now` of sizes, in blocks by the dims `wanted`."""
    if [d for d in now if sizes.shape[d] > 1] == [d for d in wanted if sizes.shape[d] > 1]:
        return rows
    dims = tuple(now.index(dim) for dim in wanted)
    source, slots = swap_blocks(sizes.permute(now), dims, rows.shape[0])
    if kernels.takes("moe_permute", rows):
        return PERMUTE(rows, source, slots)
    return copy_rows(rows, source, slots, whole=True)


def _gather_tokens(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    kept: Tensor,
    compute: Compute,
    local: int,
    axes: tuple[str, ...],
    rows: int,
    kernels: Kernels,
) -> Tensor:
    """All tokens on every rank, which adds up what its own experts make of them."""
    dtype = x.dtype
    x, experts, weights, kept = (
        lax.all_gather(value, axes, tiled=True) for value in (x, experts, weights, kept)
    )
    here = experts - lax.axis_index(axes) * local
    mine = kept & (here >= 0) & (here < local)
    here = torch.where(mine, here, 0)
    order = sort_by_expert(here, mine, local, rows=rows, kernels=kernels)
    weights = torch.where(mine, weights, torch.zeros_like(weights))
    made = compute(permute(x, order, kernels=kernels), order.sizes)
    y = unpermute(made, weights, order, kernels=kernels)
    return lax.psum_scatter(y.to(dtype), axes, tiled=True)


def mixture(
    params: dict,
    x: Float[Tensor, "tokens embed"],
    chosen: Int[Tensor, "tokens choices"],
    weights: Float[Tensor, "tokens choices"],
    kept: Bool[Tensor, "tokens choices"],
    *,
    activation: ExpertActivation,
    num_experts: int,
    axes: tuple[str, ...] = ("ep",),
    axis: str = "tp",
    meanwhile: Callable[[], None] = lambda: None,
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
    **options: Any,
) -> Float[Tensor, "tokens embed"]:
    """y[n] = sum over the kept choices j of weights[n, j] * expert chosen[n, j] of x[n].

    In a function for one device that `functron.partition` partitions, tokens are exchanged over
    the axes by which specs split experts (dim 0 of `params`): axes and axis follow from specs. So
    they are for models of transformers whose experts are computed by this, which is registered with
    its ``ALL_EXPERTS_FUNCTIONS``. Its own "batched_mm" copies the parameters of each token's
    experts, so that parameters are gathered.

    Args:
        params: this rank's part of `expert_defs`.
        chosen: int64, the experts of each token; this and others as for `dispatched`.
        activation, matmul: see `experts`.
        axis: the mesh axis that splits the hidden dim, if it is none of `axes`: results are then
            parts of a sum over its ranks.
        options: `kind`, `per_expert` and `bounds` of `dispatched`.

    Returns:
        y in x's dtype. Collectives: those of `dispatched`.
    """
    own: Any = {"activation": activation, "num_experts": num_experts, "kernels": kernels,
                "matmul": matmul, **options}  # fmt: skip
    if (keep := keeper()) is not None:
        meanwhile()
        return keep.dispatched(
            functools.partial(mixture, **own), (params, x, chosen, weights, kept)
        )
    parts = 1 if axis in axes else lax.axis_size(axis)
    where: Any = {"axes": axes, "axis": axis, "kernels": kernels, "matmul": matmul}

    def compute(rows: Tensor, sizes: Tensor) -> Tensor:
        return experts(params, rows, sizes, activation=activation, parts=parts, **where)

    return dispatched(
        x, chosen, weights, kept, compute, num_experts=num_experts, axes=axes,
        meanwhile=meanwhile, kernels=kernels, **options,
    )  # fmt: skip


def moe_defs(
    config: MoEConfig,
    embed_dim: int,
    *,
    gated: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
    router: dict | None = None,
    fused: bool = False,
) -> dict:
    """Defs ``{"router", "experts", "shared"?, "shared_gate"?, "latent"?}`` of a layer of experts.

    Args:
        embed_dim: width of the stream.
        gated: experts, and the shared one, multiply by an activated gate.
        stddev: of weights that read the stream.
        out_stddev: of weights that write to it.
        dtype: of all parameters but the router's balancing bias.
        router: defs of a router of one's own; None: those of `router_defs`. See `Router`.
        fused: gate and up of experts are one product; see `nn.mlp_defs`.
    """
    c, width = config, config.latent_dim or embed_dim
    stddevs = {"stddev": stddev, "out_stddev": out_stddev, "dtype": dtype}
    kind = {"gated": gated, "bias": c.expert_bias, "fused": fused, **stddevs}
    defs = {
        "router": router or router_defs(c, embed_dim, stddev=stddev, dtype=dtype),
        "experts": expert_defs(c.num_experts, width, c.expert_dim, **kind),
    }
    if c.shared_dim:
        defs["shared"] = mlp_defs(embed_dim, c.shared_dim, **kind)
    if c.shared_gate:
        defs["shared_gate"] = linear_defs(
            (embed_dim, 1), ("embed", None), stddev=stddev, dtype=dtype
        )
    if c.latent_dim:
        down, up = (embed_dim, width), (width, embed_dim)
        defs["latent"] = {
            "down": linear_defs(down, ("embed", None), stddev=stddev, dtype=dtype),
            "up": linear_defs(up, (None, "embed"), stddev=out_stddev, dtype=dtype),
        }
    return defs


def moe(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: MoEConfig,
    *,
    activation: ExpertActivation,
    stream: P,
    rows: Int[Tensor, " batch"],
    positions: Int[Tensor, "batch seq"],
    counted: Bool[Tensor, "batch seq"],
    axes: tuple[str, ...] = ("ep",),
    key: Key | None = None,
    axis: str = "tp",
    router: Router | None = None,
    room: float | None = None,
    load: Int[Tensor, " experts"] | None = None,
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
) -> tuple[Float[Tensor, "batch seq embed"], Scalar, RouterSums | FilledSums]:
    """y = sum over a token's experts of weight times expert of x, plus the shared expert of x.

    Args:
        params: this rank's part of `moe_defs`, with the logical axis "expert" split by `axes` and
            "expert_mlp" by `axis` where that is not one of them.
        x: has spec `stream`.
        activation: see `experts`; the shared expert takes those of `nn.mlp`.
        stream: the spec of the residual stream.
        rows, positions, key: see `route`.
        counted: x's tokens with a target; see `auxiliary`.
        axes: the mesh axes that split experts; tokens are split by each of them as well.
        axis: the tensor-parallel axis.
        router: one of your own, in place of `route` and `auxiliary`; see `Router`.
        room: for how many rows a rank's experts have room, as a multiple of those that a rank
            sends, of `ROOMS`; 0: the worst case. None: that, and `FilledSums.fill` is not measured.
            Where that says that it was too small, all results are of no use.
        load: of the global batch; see `auxiliary`.
        kernels: those of `route`, `dispatched`, `experts` and `nn.mlp`.
        matmul: computes the products of `experts` and `nn.mlp`; the router's is torch's.

    Returns:
        y: ``[batch, seq, embed]`` with spec `stream`.
        share: this rank's share of auxiliary losses; see `auxiliary`.
        sums: what routing did; see `statistics`, with `room` also how full ranks were.
        Collectives: those of `route`, `dispatched` and `auxiliary`, or of the router; over `axis`
        those in the table of the module, of rows as wide as the experts' input; those of `nn.mlp`
        for the shared one.

    Raises:
        ValueError: an expert axis does not split tokens, or the parameters are split otherwise; or
            the router returns what `RouterOutput` does not describe.
    """
    _check_splits(params, config, stream, axes, axis)
    if router is None:
        routing = route(
            params["router"], x, config, stream=stream, rows=rows, positions=positions, key=key,
            kernels=kernels,
        )  # fmt: skip
        share = auxiliary(
            params["router"], routing, config, counted=counted, stream=stream, load=load,
            kernels=kernels,
        )  # fmt: skip
    else:
        inputs = RouterInput(x, config, counted, stream, rows, positions, key, kernels, load)
        routing, share = route_by(router, params["router"], inputs)
        share = over_context(share, stream)
    narrow = x @ params["latent"]["down"]["w"] if config.latent_dim else x
    shared: list[Tensor] = []
    own: Any = {"axis": axis, "kernels": kernels, "matmul": matmul}

    def meanwhile() -> None:
        if config.shared_dim:
            shared.append(_run_shared_expert(params, x, activation, stream=stream, **own))

    y, fill = _run_experts(
        params["experts"], narrow, routing, config, stream=stream, activation=activation,
        axes=axes, meanwhile=meanwhile, room=room, limited=router is None, **own,
    )  # fmt: skip
    if config.latent_dim:
        y = y @ params["latent"]["up"]["w"]
    y = sum(shared, y)
    sums = statistics(routing, config, counted=counted, stream=stream)
    return y, share, sums if fill is None else FilledSums(*sums, fill)


def _run_experts(
    params: dict,
    x: Tensor,
    routing: Routing,
    config: MoEConfig,
    *,
    stream: P,
    axes: tuple[str, ...],
    axis: str,
    room: float | None,
    limited: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum of each token's experts, with spec `stream`; and `FilledSums.fill`.

    `limited`: routing keeps to the limits of `config` on nodes.
    """
    parts = 1 if axis in axes else lax.axis_size(axis)
    chosen = (routing.experts, routing.weights, routing.kept)
    if parts > 1:
        x = gather_sequence(x, stream, axis)
        if axis in sequence_axes(stream):
            chosen = lax.all_gather(chosen, axis, axis=SEQ_DIM, tiled=True)
    batch, seq = x.shape[:2]
    most = None
    if config.capacity_factor:
        limit = capacity(config, competing(config, batch, routing.experts.shape[SEQ_DIM], stream))
        over_batch = config.capacity_over == "batch"
        most = min(limit, batch * seq) if over_batch else batch * min(limit, seq)
    taken, weights, kept = (value.flatten(0, 1) for value in chosen)
    own = params["down"]["w"].shape[0]
    num_experts = own * lax.axis_size(axes)  # with those of padding
    if num_experts != config.num_experts:  # several axes have some between the others
        rank, place = find_part(taken, config.num_experts, [lax.axis_size(name) for name in axes])
        taken = rank * own + place
        limited = False  # groups of experts are not on nodes of their own
    nodes = None
    if config.dispatch == "two-hop" and len(split_axes(axes)) > 1:
        count = lax.axis_size(split_axes(axes)[:1])
        nodes = config.most_nodes(count) if limited else min(count, taken.shape[1])
    fill, bounds = None, RowBounds(nodes=nodes or 0)
    if room is not None:
        limits: Any = {"num_experts": num_experts, "axes": axes}
        limits["most"] = batch * seq if most is None else most
        if nodes is not None:
            limits |= {"nodes": nodes, "axes": split_axes(axes)}
        kept, bounds, fill = fit_rows(taken, kept, room, **limits)
        # ranks of further axes that split the sequence have tokens, and experts, of their own
        fill = lax.psum(fill, tuple(name for name in split_further(stream) if name in axes))
    y = mixture(
        params,
        x.flatten(0, 1),
        taken,
        weights,
        kept,
        num_experts=num_experts,
        axes=axes,
        axis=axis,
        kind=config.dispatch,
        per_expert=most,
        bounds=bounds,
        **options,
    ).unflatten(0, (batch, seq))
    return (reduce_partial(y, stream, axis) if parts > 1 else y), fill


def _run_shared_expert(
    params: dict, x: Tensor, activation: ExpertActivation, **options: Any
) -> Tensor:
    """The expert of all tokens; `options` are those of `nn.mlp`."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"moe: got activation {activation!r} with a shared expert, which nn.mlp computes; "
            f"wanted one of {', '.join(ACTIVATIONS)}"
        )
    y = mlp(params["shared"], x, activation=cast(Activation, activation), **options)
    if "shared_gate" in params:
        y = y * (x @ params["shared_gate"]["w"]).sigmoid()
    return y


def _check_splits(
    params: dict, config: MoEConfig, stream: P, axes: tuple[str, ...], axis: str
) -> None:
    problems = []
    for name in axes:
        if lax.axis_size(name) > 1 and name not in spec_axes(stream):
            sequence = "run with sequence parallelism" if name == axis else "split the batch by it"
            fix = f'{sequence}, or give the rule "expert" other axes'
            wanted = f"axes that split tokens; the stream is {stream}"
            problems.append(Problem("axes", repr(name), wanted, fix))
    if config.dispatch == "two-hop" and len(axes) == 1 and lax.axis_size(axes) > 1:
        fix = "use expert_axes=ep_node,ep (or ep,tp) with ranks on both, or dispatch='alltoall'"
        wanted = "several axes, of which the first are the nodes"
        problems.append(Problem("dispatch", f"'two-hop' over {axes}", wanted, fix))
    ranks, parts = map(lax.axis_size, axes), 1 if axis in axes else lax.axis_size(axis)
    have = tuple(params["experts"]["down"]["w"].shape[:2])
    wanted = part_length(config.num_experts, ranks), part_length(config.expert_dim, [parts])
    if have != wanted and not problems:
        split = f"{wanted[0]} and {wanted[1]}: {config.num_experts} over {axes}"
        split += f", {config.expert_dim} over {(axis,) if parts > 1 else ()}"
        fix = 'let the rules split "expert" by these axes, and "expert_mlp" by '
        fix += f"{axis!r} if that is none of them"
        got = f"{have[0]} experts of width {have[1]} on this rank"
        problems.append(Problem("params/experts/down", got, split, fix))
    raise_problems("a layer of experts", problems)
