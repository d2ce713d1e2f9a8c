"""Rows of tokens to experts, and what these make of them back: gathers in both directions.

`PERMUTE` and `ADD_ROWS` are each other's transposes, as `spmd.rows.copy_rows` and `add_rows` are;
`UNPERMUTE` is the latter with weights. Sums are in float32 (float64 where rows are), in the order
of a token's choices, and rounded once to the dtype of rows.

Sorting the assignments of tokens to experts by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functron.ops.define import Gradient, Launch, define, leading, one_by_one, packable, type_name
from functron.spmd.ragged import inverse, pick, shifted

_THREADS = 128
_MOST_COLUMNS = 2**30


def _permute_kernel(
    launch: Launch, x: torch.Tensor, source: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    (x,) = _rows_of(x)
    rows, dim = source.shape[0], x.shape[1]
    y = x.new_empty(rows, dim)
    launch(
        "moe_permute", "permute", _grid(rows, dim), _THREADS,
        x, source.contiguous(), y, dim, x.stride(0), int(packable(dim, x, y)),
        defines={"ELEMENT": type_name(x, "moe_permute")},
    )  # fmt: skip
    return y


def _permute(x: torch.Tensor, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return pick(x, source)


def _permute_fake(x: torch.Tensor, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


def _add_kernel(
    launch: Launch, rows: torch.Tensor, source: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return _sum_kernel(launch, rows, None, slots)


def _sum_kernel(
    launch: Launch, rows: torch.Tensor, weights: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    (rows,) = _rows_of(rows)
    (tokens, choices), dim = slots.shape, rows.shape[1]
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    y = rows.new_empty(tokens, dim)
    launch(
        "moe_permute", "unpermute", _grid(tokens, dim), _THREADS,
        rows, weights, slots.contiguous(), y, dim, choices, rows.stride(0),
        int(packable(dim, rows, y)), defines={"ELEMENT": type_name(rows, "moe_unpermute")},
    )  # fmt: skip
    return y


def _add(rows: torch.Tensor, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return _sum(rows, None, slots)


def _sum(rows: torch.Tensor, weights: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=_wide(rows), device=rows.device)
    for choice in range(slots.shape[1]):
        row = pick(rows, slots[:, choice]).to(total.dtype)
        total = total + (row if weights is None else row * weights[:, choice : choice + 1])
    return total.to(rows.dtype)


def _add_fake(rows: torch.Tensor, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(slots.shape[0], rows.shape[1])


def _unpermute_kernel(
    launch: Launch,
    rows: torch.Tensor,
    weights: torch.Tensor,
    assignment: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    return _sum_kernel(launch, rows, weights, slots)


def _unpermute(
    rows: torch.Tensor, weights: torch.Tensor, assignment: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return _sum(rows, weights, slots)


def _unpermute_fake(
    rows: torch.Tensor, weights: torch.Tensor, assignment: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(slots.shape[0], rows.shape[1])


def _backward_kernel(
    launch: Launch,
    dy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    assignment: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dy, rows = _rows_of(dy, rows)
    num_rows, dim = rows.shape
    d_rows = rows.new_empty(num_rows, dim)
    # assignments without a row get what is here
    d_weights = weights.new_zeros(weights.shape, dtype=torch.float32)
    launch(
        "moe_permute", "unpermute_backward", _grid(num_rows, dim), _THREADS,
        dy, rows, weights.to(torch.float32).contiguous(), assignment.contiguous(), d_rows,
        d_weights, dim, slots.shape[1], dy.stride(0), rows.stride(0),
        int(packable(dim, dy, rows, d_rows)),
        defines={"ELEMENT": type_name(rows, "moe_unpermute")},
    )  # fmt: skip
    return d_rows, d_weights.to(weights.dtype)


def _backward(
    dy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    assignment: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(rows)
    tokens = torch.div(assignment, max(slots.shape[1], 1), rounding_mode="floor")
    arrived = pick(dy, tokens).to(wide)
    d_rows = arrived * pick(weights.reshape(-1, 1), assignment)
    product = (arrived * rows).sum(1, keepdim=True)
    d_weights = pick(product, slots.flatten()).view(slots.shape)
    return d_rows.to(rows.dtype), d_weights.to(weights.dtype)


def _backward_fake(
    dy: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    assignment: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _wide(rows: torch.Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def _rows_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous() for x in tensors]


def _grid(rows: int, dim: int) -> int:
    if dim >= _MOST_COLUMNS:
        raise ValueError(
            f"moe_permute: got rows of {dim} elements; wanted fewer than {_MOST_COLUMNS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    return rows if dim else 0


def _folded(assignments: bool) -> Callable:
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
            shifted(of_rows, tokens * choices if assignments else tokens).flatten(),
            shifted(slots, of_rows.shape[1]).flatten(0, 1),
        )
        if isinstance(found, tuple):
            return tuple(_split(x, size) for x in found), (0, 0)
        return _split(found, size), 0

    return rule


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unflatten(0, (size, x.shape[0] // size))


def _transpose(of: Callable) -> Gradient:
    """Of an op that is linear in its first argument, and otherwise of (source, slots)."""

    def backward(saved: Any, cotangents: tuple) -> tuple:
        return of()(cotangents[0], *saved), None, None

    return Gradient(save=lambda args, outputs: args[1:], backward=backward)


PERMUTE = define(
    "moe_permute(Tensor x, Tensor source, Tensor slots) -> Tensor",
    kernel=_permute_kernel,
    reference=_permute,
    fake=_permute_fake,
    batch=_folded(assignments=False),
    gradient=_transpose(lambda: ADD_ROWS),
)
"""y[r] = x[source[r]], zeros where source[r] < 0. Of x [N, D] and int64 source [R]; slots [N, K]
are, for each token, the rows with its number, then -1, as in `spmd.rows.copy_rows`."""

ADD_ROWS = define(
    "moe_add_rows(Tensor rows, Tensor source, Tensor slots) -> Tensor",
    kernel=_add_kernel,
    reference=_add,
    fake=_add_fake,
    batch=_folded(assignments=False),
    gradient=_transpose(lambda: PERMUTE),
)
"""y[n] = sum over j of rows[slots[n, j]], without those below 0."""

UNPERMUTE_BACKWARD = define(
    "moe_unpermute_backward(Tensor dy, Tensor rows, Tensor weights, Tensor assignment, "
    "Tensor slots) -> (Tensor, Tensor)",
    kernel=_backward_kernel,
    reference=_backward,
    fake=_backward_fake,
    batch=_folded(assignments=True),
    gradient=_backward,
)
"""(d_rows, d_weights): weights[a] dy[n] and dy[n] . rows[r], of the assignment a of each row r."""


def _unpermute_gradient(saved: Any, cotangents: tuple) -> tuple:
    return *UNPERMUTE_BACKWARD(cotangents[0], *saved), None, None


UNPERMUTE = define(
    "moe_unpermute(Tensor rows, Tensor weights, Tensor assignment, Tensor slots) -> Tensor",
    kernel=_unpermute_kernel,
    reference=_unpermute,
    fake=_unpermute_fake,
    batch=_folded(assignments=True),
    gradient=Gradient(save=lambda args, outputs: args, backward=_unpermute_gradient),
)
"""y[n] = sum over j of weights[n, j] rows[slots[n, j]], without slots below 0. assignment [R]: the
place n K + j of each row among the weights, or -1."""


_WARPS, _CHUNK = 8, 1024  # as in kernels/moe_sort.cu
_SCAN_THREADS = 1024
_MOST_EXPERTS = 4096

Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sorted_assignments(
    experts: torch.Tensor, kept: torch.Tensor, num_experts: int, rows: int
) -> Sorted:
    """Assignments by expert, in order within each, and those not kept last: in torch's operations.

    Args:
        experts: int64 ``[N, k]``, from 0 to num_experts - 1.
        kept: bool ``[N, k]``.
        num_experts: experts.
        rows: how many to make room for, at most N k.

    Returns:
        order: int64 ``[rows]``, the assignment (token k + choice) of each row.
        tokens: int64 ``[rows]``.
        slots: int64 ``[N, k]``, the row of each assignment; -1 where there is no room.
        sizes: int64 ``[num_experts]``, how many of those that are kept each expert has.
    """
    key = torch.where(kept, experts, num_experts).flatten()
    order = torch.sort(key, stable=True).indices
    places = inverse(order)
    if rows < places.shape[0]:
        order, places = order[:rows].clone(), torch.where(places < rows, places, -1)
    counts = key.new_zeros(num_experts + 1).scatter_add(0, key, torch.ones_like(key))
    tokens = torch.div(order, max(experts.shape[1], 1), rounding_mode="floor")
    return order, tokens, places.view(experts.shape), counts[:num_experts].clone()


def _kernel(
    launch: Launch, experts: torch.Tensor, kept: torch.Tensor, num_experts: int, rows: int
) -> Sorted:
    if num_experts > _MOST_EXPERTS:
        raise ValueError(
            f"moe_sort: got {num_experts} experts; wanted at most {_MOST_EXPERTS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    experts, kept = experts.contiguous(), kept.contiguous()
    assignments, columns = experts.numel(), num_experts + 1
    chunks = -(-assignments // _CHUNK)
    order, tokens = experts.new_empty(rows), experts.new_empty(rows)
    slots = experts.new_empty(experts.shape)
    counts, starts = experts.new_empty(columns, chunks), experts.new_empty(columns)
    sizes = experts.new_empty(num_experts)
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


def _fake(experts: torch.Tensor, kept: torch.Tensor, num_experts: int, rows: int) -> Sorted:
    order, tokens = experts.new_empty(rows), experts.new_empty(rows)
    return order, tokens, experts.new_empty(experts.shape), experts.new_empty(num_experts)


SORT = define(
    "moe_sort(Tensor experts, Tensor kept, int num_experts, int rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel,
    reference=sorted_assignments,
    fake=_fake,
    batch=one_by_one,
)
"""`sorted_assignments`; the kernel counts, and does not compare."""
