"""Mixture of experts: routing, sorting tokens by expert, and moving rows to experts and back.

`moe_router` turns logits into experts and weights, `sorted_assignments` sorts the choices by
expert. `PERMUTE` and `ADD_ROWS` are each other's transposes, as `functron.spmd.ragged.copy_rows`
and `add_rows` are; `UNPERMUTE` is the latter with weights. All are gathers, in both directions.
Sums are in float32 (float64 where rows are), in the order of a token's choices, and rounded once to
the rows' dtype.

`look_up` reads rows of a table, such as embeddings, of which any number of tokens may have the
same; in its derivative, too, sums are in float32, in the order of tokens, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.nn import functional as F

from functron.core import compat
from functron.core.errors import nearest
from functron.core.functions import Function
from functron.core.typing import Tensor
from functron.ops.launch import usable
from functron.ops.operations import (
    PACK_BYTES,
    TYPES,
    Gradient,
    Launch,
    Op,
    as_rows,
    define,
    leading,
    map_batch,
    map_one_by_one,
    packable,
    rows_of,
    type_name,
    upcast,
)
from functron.program.recorder import keeper
from functron.spmd.ragged import inverse, pick, shift_indices

_THREADS = 128
_MOST_COLUMNS = 2**30


def _permute_kernel(launch: Launch, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    x = rows_of(x)
    rows, dim = source.shape[0], x.shape[1]
    y = x.new_empty(rows, dim)
    launch(
        "moe_permute", "permute", _permute_grid(rows, dim), _THREADS,
        x, source.contiguous(), y, dim, x.stride(0), int(packable(dim, x, y)),
        defines={"ELEMENT": type_name(x, "moe_permute")},
    )  # fmt: skip
    return y


def _sum_kernel(launch: Launch, rows: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    rows = rows_of(rows)
    (tokens, choices), dim = slots.shape, rows.shape[1]
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    y = rows.new_empty(tokens, dim)
    launch(
        "moe_permute", "unpermute", _permute_grid(tokens, dim), _THREADS,
        rows, weights, slots.contiguous(), y, dim, choices, rows.stride(0),
        int(packable(dim, rows, y)), defines={"ELEMENT": type_name(rows, "moe_unpermute")},
    )  # fmt: skip
    return y


def _sum(rows: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    total = torch.zeros(
        slots.shape[0], rows.shape[1], dtype=upcast(rows[:0]).dtype, device=rows.device
    )
    for choice in range(slots.shape[1]):
        row = pick(rows, slots[:, choice]).to(total.dtype)
        total = total + (row if weights is None else row * weights[:, choice : choice + 1])
    return total.to(rows.dtype)


def _unpermute_backward_kernel(
    launch: Launch, dy: Tensor, rows: Tensor, weights: Tensor, assignment: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    dy, rows = as_rows(dy, rows)
    num_rows, dim = rows.shape
    d_rows = rows.new_empty(num_rows, dim)
    # assignments without a row get what is here
    d_weights = weights.new_zeros(weights.shape, dtype=torch.float32)
    launch(
        "moe_permute", "unpermute_backward", _permute_grid(num_rows, dim), _THREADS,
        dy, rows, weights.to(torch.float32).contiguous(), assignment.contiguous(), d_rows,
        d_weights, dim, slots.shape[1], dy.stride(0), rows.stride(0),
        int(packable(dim, dy, rows, d_rows)),
        defines={"ELEMENT": type_name(rows, "moe_unpermute")},
    )  # fmt: skip
    return d_rows, d_weights.to(weights.dtype)


def _unpermute_backward(
    dy: Tensor, rows: Tensor, weights: Tensor, assignment: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = torch.div(assignment, max(slots.shape[1], 1), rounding_mode="floor")
    arrived = upcast(pick(dy, tokens))
    d_rows = arrived * pick(weights.reshape(-1, 1), assignment)
    product = (arrived * rows).sum(1, keepdim=True)
    d_weights = pick(product, slots.flatten()).view(slots.shape)
    return d_rows.to(rows.dtype), d_weights.to(weights.dtype)


def _permute_grid(rows: int, dim: int) -> int:
    if dim >= _MOST_COLUMNS:
        raise ValueError(
            f"moe_permute: got rows of {dim} elements; wanted fewer than {_MOST_COLUMNS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    return rows if dim else 0


def _fold_mapped_rows(assignments: bool) -> Callable:
    """The vmap rule: mapped rows become more rows, and indices move with them.

    The last two arguments are indices: of each row, a token or (if `assignments`) an assignment of
    one; and slots ``[N, k]``, rows of each token.
    """

    def rule(size: int, in_dims: tuple, args: tuple, op: Callable) -> Any:
        parts = [leading(x, dim, size) for x, dim in zip(args, in_dims, strict=True)]
        *values, of_rows, slots = parts
        tokens, choices = slots.shape[1:]
        found = op(
            *[x.flatten(0, 1) for x in values],
            shift_indices(of_rows, tokens * choices if assignments else tokens).flatten(),
            shift_indices(slots, of_rows.shape[1]).flatten(0, 1),
        )
        made = [found] if isinstance(found, Tensor) else found
        apart = [x.unflatten(0, (size, x.shape[0] // size)) for x in made]
        return (apart[0], 0) if isinstance(found, Tensor) else (tuple(apart), (0, 0))

    return rule


def _transpose_to(op: Callable[[], Op]) -> Gradient:
    """The gradient of an op of (x, source, slots) that is linear in x: its transpose is `op`."""

    def backward(saved: Any, cotangents: tuple) -> tuple:
        return op()(cotangents[0], *saved), None, None

    return Gradient(save=lambda args, outputs: args[1:], backward=backward)


PERMUTE = define(
    "moe_permute(Tensor x, Tensor source, Tensor slots) -> Tensor",
    kernel=_permute_kernel,
    reference=lambda x, source, slots: pick(x, source),
    fake=lambda x, source, slots: x.new_empty(source.shape[0], x.shape[1]),
    batch=_fold_mapped_rows(assignments=False),
    gradient=_transpose_to(lambda: ADD_ROWS),
)
"""y[r] = x[source[r]], zeros where source[r] < 0. Of x [N, D] and int64 source [R]; slots [N, K]
are, for each token, the rows with its number, then -1, as in `functron.spmd.ragged.copy_rows`."""

ADD_ROWS = define(
    "moe_add_rows(Tensor rows, Tensor source, Tensor slots) -> Tensor",
    kernel=lambda launch, rows, source, slots: _sum_kernel(launch, rows, None, slots),
    reference=lambda rows, source, slots: _sum(rows, None, slots),
    fake=lambda rows, source, slots: rows.new_empty(slots.shape[0], rows.shape[1]),
    batch=_fold_mapped_rows(assignments=False),
    gradient=_transpose_to(lambda: PERMUTE),
)
"""y[n] = sum over j of rows[slots[n, j]], without those below 0."""

UNPERMUTE_BACKWARD = define(
    "moe_unpermute_backward(Tensor dy, Tensor rows, Tensor weights, Tensor assignment, "
    "Tensor slots) -> (Tensor, Tensor)",
    kernel=_unpermute_backward_kernel,
    reference=_unpermute_backward,
    fake=lambda dy, *like: tuple(x.new_empty(x.shape) for x in like[:2]),
    batch=_fold_mapped_rows(assignments=True),
    gradient=_unpermute_backward,
)
"""(d_rows, d_weights): weights[a] dy[n] and dy[n] . rows[r], of the assignment a of each row r."""


UNPERMUTE = define(
    "moe_unpermute(Tensor rows, Tensor weights, Tensor assignment, Tensor slots) -> Tensor",
    kernel=lambda launch, rows, weights, _, slots: _sum_kernel(launch, rows, weights, slots),
    reference=lambda rows, weights, _, slots: _sum(rows, weights, slots),
    fake=lambda rows, *rest: rows.new_empty(rest[-1].shape[0], rows.shape[1]),
    batch=_fold_mapped_rows(assignments=True),
    gradient=Gradient(
        lambda saved, cotangents: (*UNPERMUTE_BACKWARD(cotangents[0], *saved), None, None)
    ),
)
"""y[n] = sum over j of weights[n, j] rows[slots[n, j]], without slots below 0. assignment [R]: the
place n K + j of each row among the weights, or -1."""


_WARPS, _CHUNK = 8, 1024  # as in kernels/moe_sort.cu
_SCAN_THREADS = 1024
_MOST_EXPERTS = 4096

Sorted = tuple[Tensor, Tensor, Tensor, Tensor]


def sorted_assignments(experts: Tensor, kept: Tensor, num_experts: int, rows: int) -> Sorted:
    """Assignments (token, choice) sorted by expert, stably, those not kept last; in torch's
    operations.

    Args:
        experts: int64 ``[N, k]``, from 0 to num_experts - 1.
        kept: bool ``[N, k]``.
        num_experts: number of experts.
        rows: number of rows to make, at most N k.

    Returns:
        order: int64 ``[rows]``, the assignment (token k + choice) of each row; tokens: int64
        ``[rows]``; slots: int64 ``[N, k]``, the row of each assignment, or -1 where there is no
        room; sizes: int64 ``[num_experts]``, the number of kept assignments of each expert.
    """
    key = torch.where(kept, experts, num_experts).flatten()
    order = torch.sort(key, stable=True).indices
    places = inverse(order)
    if rows < places.shape[0]:
        order, places = order[:rows].clone(), torch.where(places < rows, places, -1)
    counts = key.new_zeros(num_experts + 1).scatter_add(0, key, torch.ones_like(key))
    tokens = torch.div(order, max(experts.shape[1], 1), rounding_mode="floor")
    return order, tokens, places.view(experts.shape), counts[:num_experts].clone()


def _sort_kernel(
    launch: Launch, experts: Tensor, kept: Tensor, num_experts: int, rows: int
) -> Sorted:
    if num_experts > _MOST_EXPERTS:
        raise ValueError(
            f"moe_sort: got {num_experts} experts; wanted at most {_MOST_EXPERTS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    experts, kept = experts.contiguous(), kept.contiguous()
    assignments, columns = experts.numel(), num_experts + 1
    chunks = -(-assignments // _CHUNK)
    order, tokens, slots, sizes = _sort_fake(experts, kept, num_experts, rows)
    counts, starts = experts.new_empty(columns, chunks), experts.new_empty(columns)
    of_warps = _WARPS * columns * 4
    launch(
        "moe_sort", "count_chunks", chunks, 32 * _WARPS,
        experts, kept, counts, assignments, num_experts, shared_bytes=of_warps,
    )  # fmt: skip
    launch(
        "moe_sort", "scan_counts", 1, _SCAN_THREADS,
        counts, sizes, starts, num_experts, chunks, shared_bytes=columns * 8,
    )  # fmt: skip
    launch(
        "moe_sort", "place_rows", chunks, 32 * _WARPS,
        experts, kept, counts, starts, order, tokens, slots,
        assignments, num_experts, experts.shape[1], rows, shared_bytes=of_warps,
    )  # fmt: skip
    return order, tokens, slots, sizes


def _sort_fake(experts: Tensor, kept: Tensor, num_experts: int, rows: int) -> Sorted:
    order, tokens = experts.new_empty(rows), experts.new_empty(rows)
    return order, tokens, experts.new_empty(experts.shape), experts.new_empty(num_experts)


SORT = define(
    "moe_sort(Tensor experts, Tensor kept, int num_experts, int rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_sort_kernel,
    reference=sorted_assignments,
    fake=_sort_fake,
    batch=map_one_by_one,
)
"""`sorted_assignments`; the kernel counts, and does not compare."""


KernelScore = Literal["softmax", "sigmoid", "given"]
Weighting = Literal["scores", "renormalised", "softmax of chosen"]

RENORMALISE_EPS = 1e-20
"""DeepSeek's: a token whose scores all vanish gets weights of 0."""

# by the numbers of kernels/moe_router.cu
_SCORES, _WEIGHTINGS = get_args(KernelScore), get_args(Weighting)
_ROUTER_WARPS, _LANES = 4, 32
_ITEMS = (1, 2, 4, 8, 16)  # experts of a lane
_MOST_GROUPS = 32
_BLOCKS_PER_PROCESSOR = 16


def moe_router(
    logits: Tensor,
    balance: Tensor | None = None,
    *,
    top_k: int,
    score: KernelScore = "softmax",
    weighting: Weighting = "scores",
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: Literal["top2", "max"] = "top2",
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores s of logits, the experts e_1 ... e_k with the largest s + balance, and their weights.

    Weights are s[e_j]; or divided by their sum, to which 1e-20 is added; or the softmax of the
    chosen logits. Scores are rounded: ties between experts, or groups, go to the larger logits, and
    then to the first. NaN ranks above all numbers, so choices are always experts, and none is
    chosen twice.

    Args:
        logits: ``[N, E]``; float32, or (its reference only) another floating dtype.
        balance: ``[E]`` or None. It has no gradient.
        top_k: number of choices of each token.
        score: ``"softmax"``, ``"sigmoid"``, or ``"given"`` for logits that are scores.
        weighting: ``"scores"``, ``"renormalised"`` or ``"softmax of chosen"``.
        num_groups: number of groups of neighbouring experts; at most 32 in the kernel.
        top_groups: number of groups that a token chooses from.
        group_score: groups are ranked by the sum of their best two, or by their best.

    Returns:
        experts: int64 ``[N, top_k]``, best first; weights: ``[N, top_k]``; scores: ``[N, E]``.
        Differentiable in reverse, any number of times; no collectives.

    Raises:
        ValueError: sizes that do not fit, more than 512 experts (kernel).
    """
    for name, value, known in (("score", score, _SCORES), ("weighting", weighting, _WEIGHTINGS)):
        if value not in known:
            raise ValueError(f"moe_router: got {name}={value!r}; {nearest(value, known)}")
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts or experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"moe_router: got {top_k} choices among {top_groups} of {num_groups} groups of "
            f"{experts} experts; wanted 1 to {experts} choices, groups of one size, and at most "
            "all of them; fix: change the sizes that do not fit"
        )
    if top_k > experts // num_groups * top_groups:
        raise ValueError(
            f"moe_router: got {top_k} choices among {experts // num_groups * top_groups} experts "
            f"of {top_groups} groups; wanted at most as many; fix: raise top_groups"
        )
    modes = _SCORES.index(score), _WEIGHTINGS.index(weighting)
    return ROUTER(
        logits, balance, top_k, *modes, num_groups, top_groups, int(group_score == "top2")
    )


def fits(num_experts: int, num_groups: int = 1) -> bool:
    """Whether the kernel has room for so many experts and groups."""
    return num_experts <= _LANES * _ITEMS[-1] and num_groups <= _MOST_GROUPS


def choose(
    scores: Tensor,
    logits: Tensor,
    balance: Tensor | None,
    score: KernelScore,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    top_two: bool,
) -> Tensor:
    """The `top_k` experts of largest ``scores [..., E]`` plus `balance` in the best groups.

    Scores are rounded (to 0 for very low logits, to 1 for very high ones): ties go to the larger
    logits, and then to the first expert.
    """
    pairs = num_groups > 1 and top_two
    logits = logits.clamp_min(torch.finfo(logits.dtype).min)  # only what is taken is at -inf
    # scores rise with logits
    ranking, ties = (logits, None) if balance is None and not pairs else (scores, logits)
    if balance is not None:
        ranking = ranking + balance.to(ranking.dtype)
    if num_groups > 1:
        groups = ranking.unflatten(-1, (num_groups, -1))
        if pairs:
            two = best(groups, 2, logits.unflatten(-1, (num_groups, -1)))
            of_groups = groups.gather(-1, two).sum(-1)
            group_ties = _order_of_pairs(
                logits.unflatten(-1, (num_groups, -1)).gather(-1, two), score
            )
        else:
            first = best(groups, 1, None if ties is None else ties.unflatten(-1, (num_groups, -1)))
            of_groups = groups.gather(-1, first).squeeze(-1)
            group_ties = logits.unflatten(-1, (num_groups, -1)).gather(-1, first).squeeze(-1)
        chosen = best(of_groups, top_groups, group_ties).unsqueeze(-1)
        index = torch.arange(num_groups, device=chosen.device)
        allowed = (chosen == index).any(-2).unsqueeze(-1)
        ranking = torch.where(allowed, groups, -torch.inf).flatten(-2)
    return best(ranking, top_k, ties)


def _order_of_pairs(logits: Tensor, score: KernelScore) -> Tensor:
    """A number that rises with the sum S of the scores of two ``logits``, also where it rounds.

    For sigmoids log(S) - log(2 - S), of which the one is exact near 0 and the other near 2.
    """
    if score == "given":
        return logits.sum(-1)
    if score == "softmax":
        return logits.logsumexp(-1)
    log = torch.nn.functional.logsigmoid
    return log(logits).logsumexp(-1) - log(-logits).logsumexp(-1)


def weights_of(chosen: Tensor, logits: Tensor, scores: Tensor, weighting: Weighting) -> Tensor:
    """The weights of the `chosen` experts ``[..., top_k]``, as of `moe_router`."""
    if weighting == "softmax of chosen":
        return logits.gather(-1, chosen).softmax(-1)
    weights = scores.gather(-1, chosen)
    if weighting == "renormalised":
        weights = weights / (weights.sum(-1, keepdim=True) + RENORMALISE_EPS)
    return weights


def best(x: Tensor, num: int, ties: Tensor | None = None) -> Tensor:
    """The indices of the `num` largest of the last dim, in order.

    Ties go to the largest of `ties`, finite numbers, and then to the first.

    One maximum after the other: a third of the time of a stable sort for the few experts of a
    token, and unlike `torch.topk` with defined ties.
    """
    found = []
    while len(found) < num:
        if found:
            x = x.scatter(-1, found[-1], -torch.inf)
        if ties is None:
            found.append(x.argmax(-1, keepdim=True))
            continue
        if found:
            ties = ties.scatter(-1, found[-1], -torch.inf)
        equal = (x == x.amax(-1, keepdim=True)) | x.isnan()  # NaN is above all numbers
        found.append(torch.where(equal, ties, -torch.inf).argmax(-1, keepdim=True))
    return torch.cat(found, dim=-1)


def _router_kernel(launch: Launch, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    logits, balance, top_k, *modes = args
    tokens, experts = logits.shape
    _check_router(logits, num_groups=modes[2])
    logits = logits if logits.stride(1) == 1 or experts == 1 else logits.contiguous()
    if balance is not None:
        balance = balance.to(torch.float32).contiguous()
    chosen, weights, scores = _router_fake(logits, balance, top_k)
    launch(
        "moe_router", "route", _router_grid(launch, logits), _LANES * _ROUTER_WARPS,
        logits, balance, chosen, weights, scores, tokens, experts, logits.stride(0), top_k,
        *modes, defines=_items(experts), shared_bytes=_ROUTER_WARPS * (2 * experts + top_k) * 4,
    )  # fmt: skip
    return chosen, weights, scores


def _router_backward_kernel(launch: Launch, *args: Any) -> Tensor:
    *tensors, score, weighting = args
    _, _, chosen, _, scores = tensors = [x.contiguous() for x in tensors]
    tokens, experts = scores.shape
    _check_router(scores, num_groups=1)
    d_logits = scores.new_empty(tokens, experts)
    launch(
        "moe_router", "route_backward", _router_grid(launch, scores), _LANES * _ROUTER_WARPS,
        *tensors, d_logits, tokens, experts, chosen.shape[1], score, weighting,
        defines=_items(experts), shared_bytes=_ROUTER_WARPS * experts * 4,
    )  # fmt: skip
    return d_logits


def _check_router(x: Tensor, num_groups: int) -> None:
    fix = 'fix: pass kernels=functron.ops.use("reference")'
    if x.dtype != torch.float32:
        raise TypeError(f"moe_router: got {x.dtype} logits; wanted float32; {fix}")
    if not fits(x.shape[1], num_groups):
        raise ValueError(
            f"moe_router: got {x.shape[1]} experts in {num_groups} groups; wanted at most "
            f"{_LANES * _ITEMS[-1]} in {_MOST_GROUPS}; {fix}"
        )


def _router_grid(launch: Launch, x: Tensor) -> int:
    return min(-(-x.shape[0] // _ROUTER_WARPS), _BLOCKS_PER_PROCESSOR * launch.processors(x.device))


def _items(experts: int) -> dict[str, str]:
    return {"ITEMS": str(next(items for items in _ITEMS if items * _LANES >= experts))}


def _router_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    logits, balance, top_k, score, weighting, num_groups, top_groups, top_two = args
    kinds: tuple[Callable, ...] = (lambda x: x.softmax(-1), torch.sigmoid, torch.clone)
    scores = kinds[score](logits)
    chosen = choose(
        scores.detach(), logits.detach(), balance, _SCORES[score],
        top_k=top_k, num_groups=num_groups, top_groups=top_groups, top_two=bool(top_two),
    )  # fmt: skip
    return chosen, weights_of(chosen, logits, scores, _WEIGHTINGS[weighting]), scores


def _router_backward_reference(*args: Any) -> Tensor:
    d_weights, d_scores, chosen, weights, scores, score, weighting = args
    kind, of_chosen = _SCORES[score], _WEIGHTINGS[weighting]
    if of_chosen != "scores":
        d_weights = d_weights - (weights * d_weights).sum(-1, keepdim=True)
    if of_chosen == "renormalised":
        total = scores.gather(-1, chosen).sum(-1, keepdim=True)
        d_weights = d_weights / (total + RENORMALISE_EPS)
    if of_chosen != "softmax of chosen":
        d_scores = d_scores.scatter_add(-1, chosen, d_weights)
    if kind == "softmax":
        d_logits = scores * (d_scores - (scores * d_scores).sum(-1, keepdim=True))
    elif kind == "sigmoid":
        d_logits = d_scores * scores * (1 - scores)
    else:
        d_logits = d_scores
    if of_chosen == "softmax of chosen":
        return d_logits.scatter_add(-1, chosen, weights * d_weights)
    return d_logits.contiguous()


def _router_fake(logits: Tensor, balance: Tensor | None, top_k: int, *modes: int) -> tuple:
    tokens, experts = logits.shape
    chosen = logits.new_empty(tokens, top_k, dtype=torch.int64)
    return chosen, logits.new_empty(tokens, top_k), logits.new_empty(tokens, experts)


def _map_tokens(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple:
    # a ranking of its own for every element, or more tokens
    rule = map_one_by_one if in_dims[1] is not None else map_batch(1)
    return rule(size, in_dims, args, op)


ROUTER_BACKWARD = define(
    "moe_router_backward(Tensor d_weights, Tensor d_scores, Tensor chosen, Tensor weights, "
    "Tensor scores, int score, int weighting) -> Tensor",
    kernel=_router_backward_kernel,
    reference=_router_backward_reference,
    fake=lambda d_weights, d_scores, *rest: d_scores.new_empty(d_scores.shape),
    batch=map_batch(5),
    gradient=_router_backward_reference,
)


def _router_backward(saved: Any, cotangents: tuple) -> tuple:
    chosen, weights, scores, score, weighting = saved
    _, d_weights, d_scores = cotangents
    d_logits = ROUTER_BACKWARD(d_weights, d_scores, chosen, weights, scores, score, weighting)
    return d_logits, *[None] * 7


ROUTER = define(
    "moe_router(Tensor logits, Tensor? balance, int top_k, int score, int weighting, "
    "int num_groups, int top_groups, int top_two) -> (Tensor, Tensor, Tensor)",
    kernel=_router_kernel,
    reference=_router_reference,
    fake=_router_fake,
    batch=_map_tokens,
    gradient=Gradient(
        save=lambda args, outputs: (*outputs, args[3], args[4]), backward=_router_backward
    ),
)
"""`moe_router`, with numbers for what it names."""


_SUM_CHUNK = 32  # as in kernels/sum_rows.cu


def look_up(table: Tensor, ids: Tensor, *, whole: bool = False) -> Tensor:
    """``table[ids]``, and zeros for ids that are no row of the table, such as other ranks' rows.

    Backward is one operation, ``functron::sum_rows``: deterministic, in torch's and in compiled
    programs, where that of `torch.nn.functional.embedding` becomes atomic additions to a float32
    table. It needs the table's gradient, and beside it float32 rows, one for 16 ids.

    Args:
        table: ``[rows, dim]``, floating point.
        ids: int64, of any shape.
        whole: all are rows of the table, which `torch.nn.functional.embedding` sees to.

    Returns:
        ``[*ids.shape, dim]``. Differentiable any number of times; no collectives.
    """
    if keeper() is not None or compat.pushing_forward():  # torch's, which has all derivatives
        return _LookUp.forward(table, ids, table.shape[0], whole)
    return _look_up(table, ids, whole)


def _look_up(table: Tensor, ids: Tensor, whole: bool) -> Any:
    return _LookUp.apply(table, ids, table.shape[0], whole)


compat.allow_in_graph(_look_up)


def _is_row(ids: Tensor, rows: int) -> Tensor:
    return (ids >= 0) & (ids < rows)


def _fold_ids(ids: Tensor, dim: int | None, size: int, rows: int) -> Tensor:
    """Ids into `size` tables as ids into their concatenation."""
    ids = leading(ids, dim, size)
    return shift_indices(torch.where(_is_row(ids, rows), ids, -1), rows)


class _Rows(Function):
    """A look-up or its transpose, of (x, ids, the number of rows, whole): linear in x."""

    generate_vmap_rule = False
    transpose: type[_Rows]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ids, *ctx.rest = inputs
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx, *cotangents) -> Any:
        (given,), (ids,) = cotangents, map(compat.unwrap_if_dead, ctx.saved_tensors)
        moved = None if given is None else cls.transpose.apply(given, ids, *ctx.rest)
        return moved, None, None, None

    @classmethod
    def jvp(cls, ctx, *tangents) -> Any:
        (ids,), x = ctx.saved_tensors, tangents[0]
        return None if x is None else cls.apply(x, ids, *ctx.rest)


class _LookUp(_Rows):
    @staticmethod
    def forward(table, ids, rows, whole):
        if whole:
            return F.embedding(ids, table)
        if not rows:
            return table.new_zeros(*ids.shape, table.shape[1])
        found = F.embedding(ids.clamp(0, rows - 1), table)
        zero = torch.zeros((), dtype=table.dtype, device=table.device)
        return torch.where(_is_row(ids, rows).unsqueeze(-1), found, zero)

    @staticmethod
    def vmap(info, in_dims, table, ids, rows, whole) -> Any:
        if in_dims[0] is None:
            return _LookUp.apply(table, ids.movedim(in_dims[1], 0), rows, whole), 0
        ids = _fold_ids(ids, in_dims[1], info.batch_size, rows)
        table = table.movedim(in_dims[0], 0).flatten(0, 1)
        return _LookUp.apply(table, ids, table.shape[0], whole), 0


class _SumRows(_Rows):
    transpose = _LookUp

    @staticmethod
    def forward(x, ids, rows, whole):
        return SUM_ROWS.raw(x.flatten(0, -2), ids.flatten(), rows)

    @staticmethod
    def vmap(info, in_dims, *args) -> Any:
        return _sum_mapped(info.batch_size, in_dims, args, _SumRows.apply)


_LookUp.transpose = _SumRows


def _sum_mapped(size: int, in_dims: tuple, args: tuple, op: Callable) -> Any:
    x, ids, rows, *rest = args
    x, ids = leading(x, in_dims[0], size), _fold_ids(ids, in_dims[1], size, rows)
    sums = op(x.flatten(0, 1), ids.flatten(0, 1), size * rows, *rest)
    return sums.unflatten(0, (size, rows)), 0


def _put_sums_(y: Tensor, x: Tensor, ids: Tensor) -> None:
    real = _is_row(ids, y.shape[0])
    if not real.all():
        x, ids = x[real], ids[real]
    if upcast(x[:0]).dtype == x.dtype:
        y.index_add_(0, ids, x)
        return
    # float32 rows of those that there are alone
    present, places = torch.unique(ids, return_inverse=True)
    sums = upcast(x[:0]).new_zeros(present.shape[0], x.shape[1]).index_add_(0, places, upcast(x))
    y.index_copy_(0, present, sums.to(x.dtype))


def _put_sums_kernel(launch: Launch, y: Tensor, x: Tensor, ids: Tensor) -> None:
    if x.dtype not in TYPES or (x.is_cuda and usable(x.device) is not None):
        return _put_sums_(y, x, ids)
    x = rows_of(x)
    (rows, dim), count = y.shape, x.shape[0]
    if not (count and dim and rows):
        return None
    ids, order = torch.sort(ids, stable=True)
    chunks, packed = -(-count // _SUM_CHUNK), int(packable(dim, x, y))
    parts = x.new_empty(2 * chunks, dim, dtype=torch.float32)
    grid = chunks, -(-dim // (_THREADS * (PACK_BYTES // x.element_size())))
    defines = {"ELEMENT": type_name(x, "sum_rows")}
    launch(
        "sum_rows", "sum_chunks", grid, _THREADS,
        x, order, ids, y, parts, count, rows, dim, x.stride(0), packed, defines=defines,
    )  # fmt: skip
    return launch(
        "sum_rows", "finish", grid, _THREADS,
        ids, y, parts, count, rows, dim, packed, defines=defines,
    )  # fmt: skip


def _made(put: Callable, x: Tensor, ids: Tensor, rows: int) -> Tensor:
    y = x.new_zeros(rows, x.shape[1])
    put(y, x, ids)
    return y


PUT_ROW_SUMS_ = define(
    "put_row_sums_(Tensor(a!) y, Tensor x, Tensor ids) -> ()",
    kernel=_put_sums_kernel,
    reference=_put_sums_,
)
"""`SUM_ROWS` into zeros, y, which is contiguous: for compiled programs, which know its memory."""

SUM_ROWS = define(
    "sum_rows(Tensor x, Tensor ids, int rows) -> Tensor",
    kernel=lambda launch, *args: _made(partial(_put_sums_kernel, launch), *args),
    reference=partial(_made, _put_sums_),
    fake=lambda x, ids, rows: x.new_empty(rows, x.shape[1]),
    batch=_sum_mapped,
    gradient=Gradient(
        save=lambda args, outputs: args[1:2],
        backward=lambda saved, cotangents: (look_up(cotangents[0], saved[0]), None, None),
    ),
)
"""y[v] = sum of x[n] over n with ids[n] = v, without those that are no row of y. Of x [N, D] and
int64 ids [N], y [rows, D]. On a GPU by a stable sort of the ids."""
