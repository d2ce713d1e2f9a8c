"""Slices that begin where a tensor says, by JAX's names and rules.

Their sizes are known before a program runs and their beginnings when it does: nothing waits for a
number, and under vmap, on simulated ranks and in traced programs each has its own. A beginning
below 0 counts from the end of the dim, and one from which the slice would reach over an end is
moved until it does not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch

from functron.core import compat
from functron.core.closure import copy_views
from functron.core.errors import public, raise_problems, refuse, tensor_problem
from functron.spmd.axes import user_line

RowIndex = torch.Tensor | int


@public
def dynamic_slice(
    operand: torch.Tensor,
    start_indices: torch.Tensor | Sequence[RowIndex],
    slice_sizes: Sequence[int],
) -> torch.Tensor:
    """y = ``operand[s_0 : s_0 + n_0, s_1 : s_1 + n_1, ...]`` with s the `start_indices`.

    >>> lax.dynamic_slice(torch.arange(12).view(3, 4), (torch.tensor(1), 9), (2, 2))
    tensor([[ 6,  7],
            [10, 11]])

    Args:
        start_indices: for each dim an int or a 0-dim tensor of integers, or all in one 1-dim
            tensor; each is moved to where the slice fits: at most to the size of the dim minus n.
        slice_sizes: n, ints.

    Raises:
        ValueError: lengths are not the number of dims, or a size is not between 0 and the dim's.
        TypeError: an index is no integer.
    """
    name = "dynamic_slice"
    _check_operand(name, operand)
    starts = _split_indices(name, operand, start_indices)
    sizes = [operator.index(size) for size in slice_sizes]
    _check_sizes(name, operand, sizes, "slice_sizes")
    out = operand
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        out = _read(out, dim, start, size)
    return copy_views(out, operand)


@public
def dynamic_slice_in_dim(
    operand: torch.Tensor, start_index: RowIndex, slice_size: int, axis: int = 0
) -> torch.Tensor:
    """y = ``operand[start_index : start_index + slice_size]``, in dim `axis`; as `dynamic_slice`.

    >>> lax.dynamic_slice_in_dim(torch.arange(5), torch.tensor(-2), 2)
    tensor([3, 4])

    Raises:
        ValueError: there is no such dim, or it is smaller than the slice.
        TypeError: the index is no integer.
    """
    name = "dynamic_slice_in_dim"
    _check_operand(name, operand)
    dim, sizes = _find_dim(name, operand, axis), list(operand.shape)
    sizes[dim] = operator.index(slice_size)
    _check_sizes(name, operand, sizes, "slice_size")
    out = _read(operand, dim, _check_index(name, "start_index", start_index), sizes[dim])
    return copy_views(out, operand)


@public
def dynamic_index_in_dim(
    operand: torch.Tensor, index: RowIndex, axis: int = 0, keepdims: bool = True
) -> torch.Tensor:
    """y = ``operand[index]``, in dim `axis`, which stays with size 1, or goes without `keepdims`.

    >>> lax.dynamic_index_in_dim(torch.arange(5) ** 2, torch.tensor(3), keepdims=False)
    tensor(9)

    Raises:
        ValueError: there is no such dim, or it is empty.
        TypeError: the index is no integer.
    """
    row = dynamic_slice_in_dim(operand, index, 1, axis)
    return row if keepdims else row.squeeze(axis)


@public
def dynamic_update_slice(
    operand: torch.Tensor, update: torch.Tensor, start_indices: torch.Tensor | Sequence[RowIndex]
) -> torch.Tensor:
    """y = operand, with `update` in the place of the slice of its shape; see `dynamic_slice`.

    A new tensor: `operand` stays. The cotangent of `operand`
    is 0 there, that of `update` is the slice.

    >>> lax.dynamic_update_slice(torch.zeros(2, 3), torch.ones(1, 2), (torch.tensor(1), 0))
    tensor([[0., 0., 0.],
            [1., 1., 0.]])

    Raises:
        ValueError: lengths are not the number of dims, or `update` is larger than `operand`.
        TypeError: an index is no integer, or the dtypes differ.
    """
    name = "dynamic_update_slice"
    _check_operand(name, operand, update)
    starts = _split_indices(name, operand, start_indices)
    _check_sizes(name, operand, update.shape, "update")
    return _write(operand, update, list(enumerate(starts)))


@public
def dynamic_update_slice_in_dim(
    operand: torch.Tensor, update: torch.Tensor, start_index: RowIndex, axis: int
) -> torch.Tensor:
    """y = operand with ``y[start_index : start_index + n] = update``, in dim `axis`.

    As `dynamic_update_slice`, with n the size of `update` there. In other dims `update` begins at 0
    and may be smaller, too.

    >>> lax.dynamic_update_slice_in_dim(torch.arange(5), torch.tensor([9, 9]), torch.tensor(-1), 0)
    tensor([0, 1, 2, 9, 9])

    Raises:
        ValueError: there is no such dim, or `update` is larger than `operand`.
        TypeError: the index is no integer, or the dtypes differ.
    """
    name = "dynamic_update_slice_in_dim"
    _check_operand(name, operand, update)
    starts: list[RowIndex] = [0] * operand.dim()
    starts[_find_dim(name, operand, axis)] = _check_index(name, "start_index", start_index)
    _check_sizes(name, operand, update.shape, "update")
    return _write(operand, update, list(enumerate(starts)))


@public
def dynamic_update_index_in_dim(
    operand: torch.Tensor, update: torch.Tensor, index: RowIndex, axis: int
) -> torch.Tensor:
    """y = operand with ``y[index] = update``, in dim `axis`, which `update` has with size 1 or not.

    >>> lax.dynamic_update_index_in_dim(torch.arange(5), torch.tensor(9), torch.tensor(2), 0)
    tensor([0, 1, 9, 3, 4])

    Raises:
        ValueError, TypeError: as `dynamic_update_slice_in_dim`.
    """
    name = "dynamic_update_index_in_dim"
    _check_operand(name, operand, update)
    dim = _find_dim(name, operand, axis)
    row = update.unsqueeze(dim) if update.dim() == operand.dim() - 1 else update
    return dynamic_update_slice_in_dim(operand, row, index, dim)


def _place(start: RowIndex, size: int, room: int, device: torch.device) -> RowIndex:
    """Where a slice begins that fits into a dim of size `room`."""
    if isinstance(start, int):
        return min(max(start + room if start < 0 else start, 0), room - size)
    start = compat.constant(start.to(torch.int64), device)
    return torch.where(start < 0, start + room, start).clamp(0, room - size)


def _rows(place: torch.Tensor, size: int) -> torch.Tensor:
    return place + torch.arange(size, device=place.device)


def _read(x: torch.Tensor, dim: int, start: RowIndex, size: int) -> torch.Tensor:
    if size == x.shape[dim]:
        return x
    return _take(x, dim, _place(start, size, x.shape[dim], x.device), size)


def _take(x: torch.Tensor, dim: int, place: RowIndex, size: int) -> torch.Tensor:
    if isinstance(place, int):
        return x.narrow(dim, place, size)
    return x.index_select(dim, _rows(place, size))


def _write(
    x: torch.Tensor, update: torch.Tensor, starts: list[tuple[int, RowIndex]]
) -> torch.Tensor:
    starts = [(dim, start) for dim, start in starts if update.shape[dim] != x.shape[dim]]
    if not starts:
        return update.clone()
    (dim, start), *rest = starts
    size = update.shape[dim]
    place = _place(start, size, x.shape[dim], x.device)
    if rest:  # the slice that `update` is a part of
        update = _write(_take(x, dim, place, size), update, rest)
    if isinstance(place, int):
        return torch.slice_scatter(x, update, dim, place, place + size)
    if compat.is_batched(place):  # derivatives of index_copy fill in place, which vmap refuses
        return _write_rows(x, dim, place, update)
    return x.index_copy(dim, _rows(place, size), update)


def _write_rows(
    x: torch.Tensor, dim: int, place: torch.Tensor, update: torch.Tensor
) -> torch.Tensor:
    """x with `update` from `place` on, chosen row by row."""
    room, size = x.shape[dim], update.shape[dim]
    if not size:
        return x
    rows = torch.arange(room, device=x.device) - place
    inside = (rows >= 0) & (rows < size)
    inside = inside.view(*(room if each == dim else 1 for each in range(x.dim())))
    return torch.where(inside, update.index_select(dim, rows.clamp(0, size - 1)), x)


def _check_operand(name: str, operand: torch.Tensor, *update: torch.Tensor) -> None:
    rows = list(zip(("operand", "update"), (operand, *update), strict=False))
    wrong = [tensor_problem(path, x) for path, x in rows if not isinstance(x, torch.Tensor)]
    raise_problems(f"{name} cannot use this", wrong, TypeError)
    for path, x in rows[1:]:
        if x.dtype != operand.dtype:
            wanted, fix = f"{operand.dtype}, as operand has", f"update.to({operand.dtype})"
            refuse(_title(name), path, x.dtype, wanted, fix, TypeError)


def _check_sizes(name: str, operand: torch.Tensor, sizes: Sequence[int], what: str) -> None:
    shape = tuple(operand.shape)
    if len(sizes) != len(shape):
        got, wanted = f"{len(sizes)} sizes, {tuple(sizes)}", f"one for each dim of {shape}"
        refuse(_title(name), what, got, wanted, "give those of whole dims, too")
    for dim, (size, room) in enumerate(zip(sizes, shape, strict=True)):
        if not 0 <= size <= room:
            wanted = f"0 to {room}, as operand has shape {shape}"
            refuse(_title(name), what, f"{size} in dim {dim}", wanted)


def _find_dim(name: str, operand: torch.Tensor, axis: int) -> int:
    num = operand.dim()
    if not -num <= axis < num:
        wanted = f"{-num} to {num - 1}" if num else "an operand with dims"
        refuse(_title(name), "axis", axis, f"{wanted}, as operand has shape {tuple(operand.shape)}")
    return axis % num


def _split_indices(
    name: str, operand: torch.Tensor, starts: torch.Tensor | Sequence[RowIndex]
) -> list[RowIndex]:
    if isinstance(starts, torch.Tensor):
        if starts.dim() != 1:
            got, wanted = f"shape {tuple(starts.shape)}", f"shape {(operand.dim(),)}"
            refuse(_title(name), "start_indices", got, wanted, "one index for each dim of operand")
        starts = list(starts.unbind())
    if len(starts) != operand.dim():
        got, wanted = f"{len(starts)} indices", f"one for each dim of {tuple(operand.shape)}"
        refuse(_title(name), "start_indices", got, wanted, "give 0 for dims that are whole")
    return [_check_index(name, f"start_indices/{i}", one) for i, one in enumerate(starts)]


def _check_index(name: str, path: str, index: object) -> RowIndex:
    wanted = "an int, or a 0-dim tensor of integers"
    if isinstance(index, torch.Tensor):
        if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
            got = f"a tensor of shape {tuple(index.shape)} and {index.dtype}"
            fix = "take .to(torch.int64), and torch.func.vmap over several"
            refuse(_title(name), path, got, wanted, fix, TypeError)
        return index
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        refuse(_title(name), path, repr(index), wanted, "", TypeError)
    return operator.index(index)


def _title(name: str) -> str:
    return f"{name} at {user_line()}"
