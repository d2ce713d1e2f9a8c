"""A matrix product per group of rows, such as a rank's experts compute, as one operation.

y[r] = x[r] w[g] for the rows r of group g, groups being consecutive (Gale et al. 2022, MegaBlocks).
The number of rows per group is data: nothing is padded to the largest group, and empty groups cost
nothing. CPUs run one matrix product per group, with offsets on the host; CUDA in bfloat16 torch's
grouped kernel, with offsets on the device.

The derivatives are grouped products again, x's with w transposed, w's with inner dimension
`sizes[g]` per group, so every order exists. Rejected: padding every expert to a capacity and one
batched product (wasted work, or dropped tokens), and torch's own rules for `torch._grouped_mm` (no
vmap rule, bfloat16 only on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from functron.core.errors import Problem, raise_problems
from functron.core.functions import Function
from functron.core.typing import Float, Int, Tensor
from functron.ops.operations import leading

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("grouped_matmul(Tensor x, Tensor w, Tensor sizes, bool zeros=True) -> Tensor")
_LIBRARY.define("grouped_matmul_weight(Tensor x, Tensor y, Tensor sizes, int groups) -> Tensor")

_OPS = torch.ops.functron


def grouped_matmul(
    x: Float[Tensor, "rows inner"],
    w: Float[Tensor, "groups inner outer"],
    sizes: Int[Tensor, " groups"],
    zeros: bool = True,
    zeros_back: bool = True,
) -> Float[Tensor, "rows outer"]:
    """y[r] = x[r] w[g], where g is the group of row r; zeros in rows of no group.

    ``grouped_matmul(x, w, tensor([2, 0, 1]))`` multiplies rows 0 and 1 by w[0], row 2 by w[2].

    Args:
        x: ``[M, D]``, sorted by group: the first ``sizes[0]`` rows are those of group 0.
        w: ``[G, D, F]`` of x's dtype, in any layout.
        sizes: int64 ``[G]``, whose sum is at most M.
        zeros: False: kernels leave rows of no group undefined, which saves a pass over the result.
        zeros_back: the same for the derivative of x.

    Returns:
        ``[M, F]``. No collectives. Traced, it is one operation of 2 M D F FLOPs.

    Raises:
        ValueError: shapes or dtypes that do not fit; on the CPU also sizes whose sum exceeds M.
    """
    _check(x, w, sizes)
    out: Any = _Grouped.apply(x, w, sizes, zeros, zeros_back)
    return out


def grouped_matmul_weight(
    x: Float[Tensor, "rows inner"],
    y: Float[Tensor, "rows outer"],
    sizes: Int[Tensor, " groups"],
    groups: int,
) -> Float[Tensor, "groups inner outer"]:
    """w[g] = sum over the rows r of group g of x[r]^T y[r]: the derivative of `grouped_matmul`.

    Args:
        x: ``[M, D]``, sorted by group.
        y: ``[M, F]``.
        sizes: int64 ``[G]``.
        groups: G.

    Returns:
        ``[G, D, F]``; zeros for empty groups. No collectives.
    """
    out: Any = _GroupedWeight.apply(x, y, sizes, groups)
    return out


def _check(x: Tensor, w: Tensor, sizes: Tensor) -> None:
    fits = x.dim() == 2 and w.dim() == 3 and sizes.dim() == 1 and x.shape[1] == w.shape[1]
    if fits and w.shape[0] == sizes.shape[0] and x.dtype == w.dtype and sizes.dtype == torch.int64:
        return
    fix = "sort the rows by group and count them; cast x and w to one dtype"
    got = [f"{tuple(value.shape)} {value.dtype}" for value in (x, w, sizes)]
    wanted = ("[M, D]", "[G, D, F], of x's dtype", "[G], int64")
    rows = zip(("x", "w", "sizes"), got, wanted, strict=True)
    raise_problems("grouped_matmul", [Problem(*row, fix) for row in rows])


# --- the operations: `sizes` is [G], or [B, G] for B equal blocks of rows, each sorted by itself;
# --- group g of block b is multiplied by w[(b G + g) mod len(w)], so that blocks may share weights


def _spans(rows: int, sizes: Tensor) -> list[tuple[int, int]]:
    """First and last row of every group, on the host."""
    table: list[list[int]] = sizes.reshape(-1, sizes.shape[-1]).tolist()
    length = rows // max(len(table), 1)
    spans = []
    for block, counts in enumerate(table):
        start = block * length
        for count in counts:
            spans.append((start, start + count))
            start += count
        if start > (block + 1) * length:
            raise ValueError(
                f"grouped_matmul: got sizes that sum to {start - block * length} for {length} "
                "rows; wanted at most the number of rows; fix: a larger bound on the rows"
            )
    return spans


def _product(x: Tensor, w: Tensor, sizes: Tensor, zeros: bool = True) -> Tensor:
    if has_kernel(x, w, sizes):
        return kernel_product(x, w, sizes, zeros)
    y, done = x.new_empty(x.shape[0], w.shape[2]), 0
    for index, (start, stop) in enumerate(_spans(x.shape[0], sizes)):
        y[done:start].zero_()  # what a block has beyond its last group
        if stop > start:
            torch.mm(x[start:stop], w[index % len(w)], out=y[start:stop])
        done = stop
    y[done:].zero_()
    return y


def _weight_product(x: Tensor, y: Tensor, sizes: Tensor, groups: int) -> Tensor:
    """w[g] = sum over the rows r of group g of the outer product of x[r] and y[r]: [G, D, F]."""
    if has_kernel(x, y, sizes):
        return kernel_weight_product(x, y, sizes)
    w = x.new_empty(groups, x.shape[1], y.shape[1])
    seen: set[int] = set()
    for index, (start, stop) in enumerate(_spans(x.shape[0], sizes)):
        at = index % groups
        if stop > start:
            part = x[start:stop].mT, y[start:stop]
            w[at].addmm_(*part) if at in seen else torch.mm(*part, out=w[at])
            seen.add(at)
    for at in set(range(groups)) - seen:
        w[at].zero_()
    return w


def has_kernel(x: Tensor, y: Tensor, sizes: Tensor) -> bool:
    """Whether torch's kernel takes these: bfloat16 on CUDA, with rows of whole 16 bytes."""
    aligned = x.shape[1] % 8 == 0 and y.shape[-1] % 8 == 0
    return (
        x.is_cuda and x.dtype == torch.bfloat16 and sizes.dim() == 1 and aligned and x.shape[0] > 0
    )


def kernel_product(x: Tensor, w: Tensor, sizes: Tensor, zeros: bool = True) -> Tensor:
    """`grouped_matmul` by torch's kernel; nothing waits for sizes."""
    ends = sizes.cumsum(0)
    y = F.grouped_mm(x.contiguous(), w, offs=ends.to(torch.int32))
    # the kernel leaves rows beyond the last group as it finds them
    return clear_rows(y, ends[-1]) if zeros else y


def clear_rows(y: Tensor, count: Tensor) -> Tensor:
    """`y` with zeros in all rows but the first `count`."""
    real = torch.arange(y.shape[0], device=y.device) < count
    return torch.where(real.unsqueeze(1), y, torch.zeros((), dtype=y.dtype, device=y.device))


def kernel_weight_product(x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    """`grouped_matmul_weight` by torch's kernel."""
    offsets = sizes.cumsum(0).to(torch.int32)
    w = F.grouped_mm(x.contiguous().mT, y.contiguous(), offs=offsets)
    empty = (sizes == 0).view(-1, 1, 1)
    return torch.where(empty, torch.zeros((), dtype=w.dtype, device=w.device), w)


_LIBRARY.impl("grouped_matmul", _product, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_matmul_weight", _weight_product, "CompositeExplicitAutograd")


@torch.library.register_fake("functron::grouped_matmul", lib=_LIBRARY)
def _fake_product(x, w, sizes, zeros=True):
    return x.new_empty(x.shape[0], w.shape[2])


@torch.library.register_fake("functron::grouped_matmul_weight", lib=_LIBRARY)
def _fake_weight_product(x, y, sizes, groups):
    return x.new_empty(groups, x.shape[1], y.shape[1])


@register_flop_formula(_OPS.grouped_matmul)
def _flops(x, w, sizes, *args, out_shape=None, **kwargs) -> int:
    return 2 * x[0] * w[1] * w[2]


@register_flop_formula(_OPS.grouped_matmul_weight)
def _weight_flops(x, y, sizes, groups, *args, out_shape=None, **kwargs) -> int:
    return 2 * x[0] * x[1] * y[1]


# --- derivatives and batching


def _push(product: Callable[[Any, Any], Any], a: Tensor, b: Tensor, da: Any, db: Any) -> Any:
    """The tangent of a product of a and b, linear in each; a tangent of None is zero."""
    parts = [] if da is None else [product(da, b)]
    parts += [] if db is None else [product(a, db)]
    return sum(parts[1:], parts[0]) if parts else None


class _Grouped(Function):
    """``(x [B M, D], w [W G, D, F], sizes [G] or [B, G])`` to ``[B M, F]``, W dividing B."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, w, sizes, zeros, zeros_back):
        return _OPS.grouped_matmul(x, w, sizes, *(() if zeros else (False,)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.zeros, ctx.zeros_back = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        x, w, sizes = ctx.saved_tensors
        (dy,) = cotangents
        for_x, for_w = ctx.needs_input_grad[:2]
        dx = _Grouped.apply(dy, w.mT, sizes, ctx.zeros_back, True) if for_x else None
        dw = _GroupedWeight.apply(x, dy, sizes, w.shape[0]) if for_w else None
        return dx, dw, None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        x, w, sizes = ctx.saved_tensors
        flags = ctx.zeros, ctx.zeros_back
        return _push(lambda x, w: _Grouped.apply(x, w, sizes, *flags), x, w, *tangents[:2])

    @staticmethod
    def vmap(info, in_dims, x, w, sizes, zeros, zeros_back):
        size = info.batch_size
        shares = in_dims[1] is None
        x, sizes = _fold_rows(x, in_dims[0], sizes, in_dims[2], size, outer=shares)
        w = w if shares else _fold_weight(w.movedim(in_dims[1], 0), sizes.shape[1])
        out: Any = _Grouped.apply(x, w, sizes, zeros, zeros_back)
        return _unfold_rows(out, sizes.shape[0], size, outer=shares), 0


class _GroupedWeight(Function):
    """``(x [B M, D], y [B M, F], sizes, groups)`` to ``[groups, D, F]``; see `_weight_product`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, y, sizes, groups):
        return _OPS.grouped_matmul_weight(x, y, sizes, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.groups = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        x, y, sizes = ctx.saved_tensors
        (dw,) = cotangents
        for_x, for_y = ctx.needs_input_grad[:2]
        dx = _Grouped.apply(y, dw.mT, sizes, True, True) if for_x else None
        return dx, _Grouped.apply(x, dw, sizes, True, True) if for_y else None, None, None

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        x, y, sizes = ctx.saved_tensors
        product = lambda x, y: _GroupedWeight.apply(x, y, sizes, ctx.groups)  # noqa: E731
        return _push(product, x, y, *tangents[:2])

    @staticmethod
    def vmap(info, in_dims, x, y, sizes, groups):
        size, blocked = info.batch_size, sizes
        x, sizes = _fold_rows(x, in_dims[0], blocked, in_dims[2], size, outer=False)
        y, _ = _fold_rows(y, in_dims[1], blocked, in_dims[2], size, outer=False)
        out: Any = _GroupedWeight.apply(x, y, sizes, groups * size)
        per_block = sizes.shape[1]
        w = out.unflatten(0, (groups // per_block, size, per_block)).movedim(1, 0)
        return w.flatten(1, 2), 0


def _map_product(info, in_dims, x, w, sizes, zeros=True):
    return _Grouped.vmap(info, in_dims, x, w, sizes, zeros, True)


torch.library.register_vmap("functron::grouped_matmul", _map_product, lib=_LIBRARY)
torch.library.register_vmap("functron::grouped_matmul_weight", _GroupedWeight.vmap, lib=_LIBRARY)


def _fold_rows(
    x: Tensor, x_dim: int | None, sizes: Tensor, sizes_dim: int | None, size: int, *, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rows and sizes with a vmap dim made blocks: outside of the blocks there are, or within each.

    Outside, all share one set of weights; within each block, block b n + s has the weights of s.
    """
    sizes = leading(sizes, sizes_dim, size)
    sizes = sizes.reshape(size, -1, sizes.shape[-1])  # [n, B, G]
    x = leading(x, x_dim, size)
    x = x.unflatten(1, (sizes.shape[1], x.shape[1] // sizes.shape[1]))  # [n, B, M, D]
    if not outer:
        x, sizes = x.transpose(0, 1), sizes.transpose(0, 1)
    return x.flatten(0, 2), sizes.flatten(0, 1)


def _fold_weight(w: Tensor, groups: int) -> Tensor:
    """``[n, W G, D, F]`` as ``[W n G, D, F]``."""
    return w.unflatten(1, (-1, groups)).transpose(0, 1).flatten(0, 2)


def _unfold_rows(y: Tensor, blocks: int, size: int, *, outer: bool) -> Tensor:
    """``[n, B M, F]`` again."""
    if outer:
        return y.unflatten(0, (size, y.shape[0] // size))
    return (
        y.unflatten(0, (blocks // size, size, y.shape[0] // blocks)).transpose(0, 1).flatten(1, 2)
    )
