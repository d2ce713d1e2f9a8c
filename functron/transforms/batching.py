"""Functions of one element mapped over trees of many: JAX's vmap, by torch's.

torch.func.vmap knows torch's containers and its own rules of ``in_dims``; this one takes every tree
that functron does, and prefixes of trees for the axes of arguments and results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import refuse_orphans
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.spmd.axes import user_line
from functron.transforms.capture import Relay, unwatched


@public
def vmap(
    fun: Callable,
    in_axes: tree.Tree = 0,
    out_axes: tree.Tree = 0,
    axis_name: str | None = None,
    axis_size: int | None = None,
) -> Callable:
    """The function that computes `fun` for each element along an axis of its arguments, at once.

    Collectives, scans, branches, functions with rules of their own, derivatives: all of functron
    may be in `fun`, and around it. Collectives are between ranks, for each element alone.

    >>> ft.vmap(lambda x, y: x @ y, in_axes=(0, None))(torch.eye(2), torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    >>> add = lambda params, x: {"y": params["w"] * x, "b": params["b"]}
    >>> params = {"w": torch.tensor([[1.0, 2.0, 3.0]]), "b": torch.tensor(7.0)}
    >>> ft.vmap(add, ({"w": 1, "b": None}, None), {"y": -1, "b": None})(params, torch.tensor(2.0))
    {'y': tensor([[2., 4., 6.]]), 'b': tensor(7.)}

    Args:
        fun: takes and returns trees of tensors; numbers in its results become tensors.
        in_axes: the axis of each positional argument that is mapped over: an int, which may count
            from the end, or None for what every element gets whole; one for all arguments, or a
            tuple with a prefix tree for each. Keyword arguments are mapped over axis 0.
        out_axes: the axis of each result that elements are along: an int, or a prefix tree of some;
            None for a result that is the same for all.
        axis_name: always None. JAX's is an axis for collectives; here these are a mesh's:
            ``ft.shard_map(fun, ft.Mesh(name=n), P("name"), P("name"))`` maps over one.
        axis_size: the number of elements, where no argument says it.

    Raises:
        ValueError: sizes differ, all that do are listed; `in_axes` and `out_axes` are no prefixes
            of arguments and results; there is no such axis; nothing is mapped; a result for which
            `out_axes` is None differs between elements; or `axis_name` is given.
        TypeError: what is to be mapped is no tensor, or a result is neither tensor nor number.
    """
    if axis_name is not None:
        fix = f"ft.shard_map(f, ft.Mesh({axis_name}=n), P({axis_name!r}), P({axis_name!r}))"
        wanted = "None: collectives are over axes of meshes, which a mapped function may be on"
        refuse(f"vmap at {user_line()}", "axis_name", repr(axis_name), wanted, fix)
    if axis_size is not None and axis_size < 0:
        refuse(f"vmap at {user_line()}", "axis_size", axis_size, "at least 0")
    if not isinstance(in_axes, (int, list, tuple, type(None))) or isinstance(in_axes, bool):
        wanted = "an int, None, or a tuple with a prefix tree for each argument"
        refuse(f"vmap at {user_line()}", "in_axes", repr(in_axes), wanted, "", TypeError)

    @public
    @functools.wraps(fun)
    def mapped(*args, **kwargs):
        given = _Mapping(in_axes, args, kwargs, axis_size)
        if relay := Relay():
            with unwatched():
                out, captured = _run(relay.around(fun), given, (out_axes, 0))
            relay.take(captured)
            return out
        return _run(fun, given, out_axes)

    return mapped


class _Mapping:
    """Arguments, and the axes that they are mapped over.

    Attributes:
        leaves: of ``(args, kwargs)``.
        structure: of that.
        places: the leaves that are mapped.
        dims: the axis of each of those, counted from the first one.
        size: the number of elements.
    """

    def __init__(self, in_axes: tree.Tree, args: tuple, kwargs: dict, axis_size: int | None):
        self._title = f"vmap at {user_line()}"
        if isinstance(in_axes, (list, tuple)) and len(in_axes) != len(args):
            got, wanted = f"{len(in_axes)} entries", f"one for each of {len(args)} arguments"
            refuse(self._title, "in_axes", got, wanted, "None for those that are not mapped")
        prefix = tuple(in_axes) if isinstance(in_axes, (list, tuple)) else in_axes
        axes = tree.broadcast_prefix(
            prefix, args, is_leaf=_is_axis, what="in_axes", wanted="an int, None, or containers"
        )
        self.leaves, self.structure = tree.flatten((args, kwargs))
        axes += [0] * (len(self.leaves) - len(axes))
        paths = [self._name(path) for path in tree.paths((args, kwargs))]
        self.places = [i for i, axis in enumerate(axes) if axis is not None]
        self._check(paths, axes)
        self.dims = [axes[i] % self.leaves[i].dim() for i in self.places]
        self.size = self._find_size(paths, axis_size)
        refuse_orphans("vmap", self.leaves)

    def _name(self, path: str) -> str:
        """The name of an argument, from its path in ``(args, kwargs)``."""
        kind, _, rest = path.partition("/")
        return f"argument {rest}" if kind == "0" else rest

    def _check(self, paths: list[str], axes: list) -> None:
        wrong = [i for i in self.places if not isinstance(self.leaves[i], torch.Tensor)]
        raise_problems(
            self._title,
            [
                Problem(
                    paths[i],
                    f"a {type(self.leaves[i]).__name__}, to be mapped over axis {axes[i]}",
                    "a tensor",
                    "None for it in in_axes, or functools.partial",
                )
                for i in wrong
            ],
            TypeError,
        )
        raise_problems(
            self._title,
            [
                Problem(
                    paths[i],
                    f"shape {tuple(self.leaves[i].shape)}, to be mapped over axis {axes[i]}",
                    "one with that axis",
                    "an axis that it has, or None, in in_axes",
                )
                for i in self.places
                if not -self.leaves[i].dim() <= axes[i] < self.leaves[i].dim()
            ],
        )

    def _find_size(self, paths: list[str], axis_size: int | None) -> int:
        rows = zip(self.places, self.dims, strict=True)
        found = {i: self.leaves[i].shape[dim] for i, dim in rows}
        if not found and axis_size is None:
            wanted = "an axis of at least one argument"
            refuse(self._title, "in_axes", "nothing to map over", wanted, "or give axis_size")
        size = next(iter(found.values()), 0) if axis_size is None else axis_size
        wanted = f"{size}, as " + ("axis_size" if axis_size is not None else paths[self.places[0]])
        raise_problems(
            f"{self._title}: sizes of what is mapped differ",
            [
                Problem(paths[i], f"{own} along the axis of in_axes", wanted)
                for i, own in found.items()
                if own != size
            ],
        )
        return size

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple, dict]:
        """The arguments with these in place of those that are mapped."""
        leaves = list(self.leaves)
        for place, x in zip(self.places, tensors, strict=True):
            leaves[place] = x
        return tree.unflatten(self.structure, leaves)


def _is_axis(leaf: Any) -> bool:
    return leaf is None or (isinstance(leaf, int) and not isinstance(leaf, bool))


def _run(fun: Callable, given: _Mapping, out_axes: tree.Tree) -> tree.Tree:
    structure: Any = None
    dims: list[int | None] = []
    device = next((given.leaves[i].device for i in given.places), None)

    def element(token: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal structure
        args, kwargs = given.fill(tensors)
        out = fun(*args, **kwargs)
        leaves, structure = tree.flatten(out)
        leaves = _as_tensors(out, leaves, device)
        dims[:] = _read_out_axes(out_axes, out, leaves, compat.level_of(token))
        return tuple(leaves)

    run: Any = torch.func.vmap(element, in_dims=(0, *given.dims), randomness="error")
    rows = run(torch.arange(given.size, device=device), *(given.leaves[i] for i in given.places))
    made = [
        x.select(0, 0) if dim is None else x.movedim(0, dim)
        for x, dim in zip(rows, dims, strict=True)
    ]
    return tree.unflatten(structure, made)


def _as_tensors(out: tree.Tree, leaves: list, device: torch.device | None) -> list[torch.Tensor]:
    numbers = (bool, int, float, complex)
    raise_problems(
        f"vmap at {user_line()}",
        [
            Problem(path or "the result", f"a {type(x).__name__}", "a tensor or a number")
            for path, x in zip(tree.paths(out), leaves, strict=True)
            if not isinstance(x, (torch.Tensor, *numbers))
        ],
        TypeError,
    )
    return [x if isinstance(x, torch.Tensor) else torch.full((), x, device=device) for x in leaves]


def _read_out_axes(
    out_axes: tree.Tree, out: tree.Tree, leaves: list[torch.Tensor], level: int
) -> list[int | None]:
    """The axis of each result, which must be one that it has; None must be of one for all."""
    axes = tree.broadcast_prefix(
        out_axes, out, is_leaf=_is_axis, what="out_axes", wanted="an int, None, or containers"
    )
    problems = []
    for path, x, axis in zip(tree.paths(out), leaves, axes, strict=True):
        name = path or "the result"
        if axis is None:
            if compat.is_batched_at(x, level):
                got = "None in out_axes, but it differs between elements"
                fix = "an int in out_axes, or reduce it over the mapped result"
                problems.append(Problem(name, got, "an int", fix))
        elif not -x.dim() - 1 <= axis <= x.dim():
            got = f"out_axes={axis} for an element of shape {tuple(x.shape)}"
            problems.append(Problem(name, got, f"{-x.dim() - 1} to {x.dim()}"))
    raise_problems(f"vmap at {user_line()}", problems)
    return axes
