"""Functions of many tensors at once: elementwise in place, and sums of squares.

`torch._foreach_*` and `torch._fused_*` update many tensors in few kernels, but have no vmap rules,
and in simulation (or any vmap) leaves are batched. As elementwise functions do not care which dims
are batch dims, `foreach_` passes them the plain tensors underneath, with batch dims aligned as
views. Rejected: a loop over leaves of plain operations (twice the memory traffic, many small
kernels), and vmap rules for each private operation and torch version.

Sums of squares, for norms of gradients, are close to float64 at any size. A float32 sum in one
accumulator, as in torch's norms on CPUs, loses 1e-3 beyond ten million elements, and another amount
on every sharding. Here float32 sums have a bounded number of terms, and are added up in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from functron.core import compat
from functron.core.errors import Problem, raise_problems
from functron.ops.operations import (
    Gradient,
    Launch,
    define,
    map_batch,
    packable,
    statistics,
    type_name,
)
from functron.spmd.axes import SimulatedAxis, scope
from functron.spmd.simulate import no_share

Columns = Mapping[str, Sequence[torch.Tensor]]
LeafColumn = Sequence[torch.Tensor]
LeafRow = tuple[torch.Tensor, ...]
Paths = Callable[[], Sequence[str]] | None


def foreach_(
    fn: Callable[..., object],
    mutated: Columns,
    read: Columns | None = None,
    *,
    paths: Paths = None,
    dense: bool = False,
) -> None:
    """Calls ``fn(*mutated_columns, *read_columns)`` on lists of plain tensors, in place.

    One call per distinct (devices, dtypes) of a row, under `torch.no_grad`. Works in plain eager
    mode (at the price of one check per call) and under any nesting of vmaps, where the caller's
    batched tensors see the update. No collectives.

    ``foreach_(torch._foreach_add_, {"params": [w, b]}, {"updates": [dw, db]})`` is ``w += dw`` and
    ``b += db``.

    Args:
        fn: an elementwise function of lists of tensors. The tensors of a row come with the same
            batch dims in front, and so not with the shapes of the caller's.
        mutated: names (for messages) to columns of tensors that `fn` overwrites; all columns have
            the same length and the tensors of one row the same shape.
        read: the same for the columns that `fn` only reads. A tensor that is not batched where the
            mutated ones are is expanded.
        paths: gives the tree path of every row; called only for messages.
        dense: `fn` walks the memory of each row's tensors in storage order, as `torch._fused_*` do
            (the CPU kernels of torch 2.11 to 2.13 ignore strides without a word). Tensors whose
            layout differs from the row's first are then copied, and copied back if mutated.

    Raises:
        ValueError: columns of different lengths or rows of different shapes; an operand varies over
            a mesh axis over which the first mutated one is replicated (a gradient that was never
            synchronised), or another mutated one does not vary where the first does; called while
            torch.func differentiates, or torch's tape how one of them was computed. Every offending
            row is named.
    """
    names = [*mutated, *(read or ())]
    columns = [*mutated.values(), *(read or {}).values()]
    _check_shapes(names, columns, paths)
    if not columns[0]:
        return
    _refuse_taped(names[0], columns)
    if compat.transforms_active():
        columns = _physical_columns(columns, names, len(mutated), paths)
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    if dense and not all(all(t.is_contiguous() for t in column) for column in columns):
        rows = zip(*columns, strict=True)
        columns = _columns([_dense_row(row, len(mutated), copied) for row in rows])
    with torch.no_grad():
        for group in _groups(columns):
            # fused kernels do not say that they wrote; said before it, so that what interrupts them
            # finds tensors that may have been written (`functron.spmd.donation`)
            for column in group[: len(mutated)]:
                torch.autograd.graph.increment_version(list(column))
            fn(*map(list, group))
        for target, value in copied:
            target.copy_(value)


def _refuse_taped(name: str, columns: list[LeafColumn]) -> None:
    """Raise ValueError for tensors with a history on torch's tape, which would miss the update.

    Leaves of the tape, such as a torch.nn.Parameter, are updated as torch's optimizers do it.
    """
    if not torch.is_grad_enabled() or compat.dispatch_modes_active():
        return
    if any(tensor.grad_fn is not None for column in columns for tensor in column):
        raise ValueError(
            f"in-place update of {name} while torch's tape records what was computed of them: the "
            "derivative would be lost; fix: where none is wanted, detach the tensors or call it "
            "under torch.no_grad(), else use the pure `update` and `apply_updates`"
        )


def _check_shapes(names: list[str], columns: list[LeafColumn], paths: Paths) -> None:
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"foreach_: got columns of lengths {lengths}; wanted one length for all")
    shapes = [[tensor.shape for tensor in column] for column in columns]
    if all(column == shapes[0] for column in shapes):
        return
    problems = [
        Problem(
            _where(index, paths),
            f"{name} of shape {tuple(shape)}",
            f"shape {tuple(row[0])}, as {names[0]}",
        )
        for index, row in enumerate(zip(*shapes, strict=True))
        for name, shape in zip(names, row, strict=True)
        if shape != row[0]
    ]
    raise_problems(f"cannot update {names[0]} in place", problems)


def _where(index: int, paths: Paths) -> str:
    return (paths()[index] if paths is not None else f"row {index}") or "(root)"


def _columns(rows: Iterable[LeafRow]) -> list[LeafColumn]:
    return list(zip(*rows, strict=True))


def _groups(columns: list[LeafColumn]) -> list[list[LeafColumn]]:
    """Rows with equal devices and dtypes together: multi-tensor kernels take no mixtures."""
    kinds = [[(tensor.device, tensor.dtype) for tensor in column] for column in columns]
    if all(kind.count(kind[0]) == len(kind) for kind in kinds):
        return [columns]
    groups: dict[tuple, list[LeafRow]] = {}
    for key, row in zip(zip(*kinds, strict=True), zip(*columns, strict=True), strict=True):
        groups.setdefault(key, []).append(row)
    return [_columns(rows) for rows in groups.values()]


def _dense_row(row: LeafRow, num_mutated: int, copied: list) -> LeafRow:
    """The row with every tensor contiguous, all in one order of dims."""
    # A shard is often a permuted view of dense memory: walk it in the order it is stored in.
    order = sorted(range(row[0].dim()), key=row[0].stride, reverse=True)
    out = []
    for position, tensor in enumerate(row):
        view = tensor.permute(order)
        value = view.contiguous()
        if position < num_mutated and value is not view:
            copied.append((view, value))
        out.append(value)
    return tuple(out)


def laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` in the memory layout of `like`, with its batch dims under vmap; `x` itself if it has it.

    So the result of a traced program can take the memory of `like`, a donated argument.
    """
    if not compat.is_wrapped(x) and not compat.is_wrapped(like) and x.stride() == like.stride():
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def _physical_columns(
    columns: list[LeafColumn], names: list[str], num_mutated: int, paths: Paths
) -> list[LeafColumn]:
    """Every row as plain tensors with equal batch dims in front."""
    if compat.differentiating():
        raise ValueError(
            f"in-place update of {names[0]} while torch.func is differentiating (inside grad, vjp "
            "or jvp): the derivative would be lost; fix: use the pure `update` and "
            "`apply_updates` there, or move the in-place step outside the differentiated function"
        )
    problems: list[Problem] = []
    out = []
    for index, row in enumerate(zip(*columns, strict=True)):
        peeled = [compat.physical(no_share(tensor)) for tensor in row]
        value, batch_dims, _ = peeled[0]
        sizes = {level: value.shape[batch_dims[level]] for level in sorted(batch_dims)}
        if found := _mismatches(names, peeled, list(sizes), num_mutated):
            where = _where(index, paths)
            problems.extend(Problem(where, *parts) for parts in found)
        else:
            out.append(tuple([_align(one, sizes) for one in peeled]))
    raise_problems(f"cannot update {names[0]} in place", problems)
    return _columns(out)


def _align(peeled: compat.Physical, sizes: dict[int, int]) -> torch.Tensor:
    """A view of the physical tensor: one leading dim per level, then its own dims."""
    value, batch_dims, own = peeled
    value = value.permute([batch_dims[level] for level in sizes if level in batch_dims] + own)
    for position, (level, size) in enumerate(sizes.items()):
        if level not in batch_dims:
            value = value.unsqueeze(position)
            value = value.expand(*value.shape[:position], size, *value.shape[position + 1 :])
    return value


def _mismatches(
    names: list[str], peeled: list[compat.Physical], levels: list[int], num_mutated: int
) -> list[tuple[str, str, str]]:
    """(got, wanted, fix) for each operand that varies over other axes than the first does."""
    found = []
    for position, (name, (_, batch_dims, _)) in enumerate(zip(names, peeled, strict=True)):
        extra = sorted(set(batch_dims) - set(levels))
        missing = sorted(set(levels) - set(batch_dims)) if position < num_mutated else []
        if extra:
            got = (
                f"{name} that vary over {_axes(extra)}, over which {names[0]} are replicated "
                "(the replicated gradient was never synchronised)"
            )
            fix = (
                "call sync_gradients(grads, specs) before the optimizer, and give "
                "clip_by_global_norm the same specs"
            )
            found.append((got, f"{name} that are equal on all its ranks, or replicas drift", fix))
        elif missing:
            got = f"{name} that are replicated over {_axes(missing)}, over which {names[0]} vary"
            fix = "take the specs of the optimizer state from optimizer.specs(param_specs)"
            found.append((got, f"{name} sharded as {names[0]} are", fix))
    return found


def _axes(levels: list[int]) -> str:
    """The mesh axes simulated at these vmap levels, in words."""
    bound = {
        axis.level: f"mesh axis {axis.name!r}"
        for axis in scope().axes.values()
        if isinstance(axis, SimulatedAxis)
    }
    return " and ".join(bound.get(level, f"the vmap at level {level}") for level in levels)


CHUNK = 32768
"""Elements that one block adds up; part of the definition of the result, as it sets the order."""

_THREADS = 256

_BLOCK = 512
"""Elements that `squares` adds up in float32: their sum is within 1e-6 also where all are equal, so
that rounding errors have one sign."""


def squares(x: torch.Tensor, start_dim: int = 0) -> torch.Tensor:
    """``sum(x**2)`` over the dims from `start_dim` on, in float64, in torch's operations.

    Within 1e-6 of the exact sum at any size; in one pass over x, and without a copy of it where its
    memory is dense. Elements are squared and added up in float32, by blocks of `_BLOCK` (float64
    where x is); so it overflows where elements are above 1e18. Works under every transform and
    compiled; no collectives.

    Args:
        x: any shape, floating point.
        start_dim: how many leading dims stay: 1 for each layer of a stack.
    """
    wide = _accumulator(x)
    own = sorted(range(start_dim, x.dim()), key=x.stride, reverse=True)  # as it lies in memory
    flat = x.permute(*range(start_dim), *own).flatten(start_dim) if own else x.unsqueeze(-1)
    blocks, rest = divmod(flat.shape[-1], _BLOCK)
    if not blocks:
        return _norm(flat, wide).to(torch.float64).square()
    head = flat.narrow(-1, 0, blocks * _BLOCK) if rest else flat
    norms = _norm(head.unflatten(-1, (blocks, _BLOCK)), wide)
    total = _norm(norms, torch.float64).square()
    if not rest:
        return total
    tail = _norm(flat.narrow(-1, blocks * _BLOCK, rest), wide)
    return total + tail.to(torch.float64).square()


def _norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the last dim, which fake tensors do not drop where its size is 1 (2.11)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).squeeze(-1)


def sum_of_squares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum(x**2)``, and whether an element is not finite: two 0-dim tensors, on x's device.

    Accumulated in float32 (float64 where x is), in an order that is a function of the number of
    elements alone: the same bits on every run and every GPU, with any alignment. Nothing is read
    back to the host. Infinities and NaN go through to the sum, which also overflows where finite
    elements are above 1e19; the second result, 1.0 or 0.0, is of the elements themselves: what a
    loss scale goes by. Differentiable; no collectives.

    Args:
        x: any shape; bfloat16, float16, float32 or (its reference only) float64. One pass over it
            where it is dense, in the order of its memory.
    """
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    sums, flags = SUM_OF_SQUARES(x.permute(order).reshape(1, -1))
    return sums[0], flags[0]


def _kernel(launch: Launch, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dim = x.shape
    x = x if dim <= 1 or x.stride(1) == 1 else x.contiguous()
    if not dim:
        return x.new_zeros(rows, dtype=torch.float32), x.new_zeros(rows, dtype=torch.float32)
    chunks = -(-dim // CHUNK)
    types = {"ELEMENT": type_name(x, "sum_of_squares")}
    parts, flags = (x.new_empty(rows * chunks, dtype=torch.float32) for _ in range(2))
    launch(
        "global_norm", "sum_of_squares", rows * chunks, _THREADS,
        x, parts, flags, dim, x.stride(0), chunks, int(packable(dim, x)), defines=types,
    )  # fmt: skip
    if chunks == 1:
        return parts, flags
    sums, any_flag = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    launch(
        "global_norm", "finish", rows, _THREADS, parts, flags, sums, any_flag, chunks, defines=types
    )
    return sums, any_flag


def _reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(_accumulator(x))
    return wide.square().sum(1), (~wide.isfinite()).any(1).to(wide.dtype)


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _backward(saved, cotangents) -> tuple[torch.Tensor]:
    (x,) = saved
    return ((2 * x * cotangents[0][:, None]).to(x.dtype),)


SUM_OF_SQUARES = define(
    "sum_of_squares(Tensor x) -> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda x: (statistics(x), statistics(x)),
    batch=map_batch(1),
    gradient=Gradient(backward=_backward, auxiliary=(1,)),
)
"""Of every row of x, [rows, dim]: the sum of squares and 1.0 where an element is not finite."""
