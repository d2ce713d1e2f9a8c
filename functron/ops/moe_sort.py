"""Sorting the assignments of tokens to experts by expert."""

from __future__ import annotations

import torch

from functron.ops.define import Launch, define
from functron.ops.mapping import one_by_one
from functron.spmd.rows import inverse

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
