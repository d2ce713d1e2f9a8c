"""Restoring: a checkpoint's values into the tensors of any mesh, each process its own boxes.

Also its parameters alone, or the averages of them that an optimizer keeps: to sample, to export
and to upcycle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron.checkpoint import database
from functron.checkpoint.database import from_name, name_of
from functron.checkpoint.folder import Checkpoint, StoredLeaf, normalise_index
from functron.checkpoint.placement import Box, Leaf, Placement
from functron.core import tree
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.spmd import BoundMesh, Mesh, Rules
from functron.spmd.params import JOINED, ParamDef, abstract_params, param_specs, pieces_of
from functron.spmd.spec import local_shape


def restore(
    path: str | Path,
    like: tree.Tree | None = None,
    *,
    placement: Placement | None = None,
    cast: bool = False,
    sources: Mapping[str, str | Computed] = MappingProxyType({}),
    device: torch.device | str = "cpu",
) -> tree.Tree:
    """Read a checkpoint, or a part of it, into new tensors.

    Args:
        path: a complete checkpoint.
        like: a tree of tensors, meta tensors for instance, whose structure, shapes and dtypes are
            wanted; leaves of the checkpoint that it lacks are not read. With a placement they are
            what this process holds. None reads everything.
        placement: which part of the whole state `like` is, on any mesh; None: it is the whole.
        cast: convert floating-point values to the dtype wanted.
        sources: by the path of a leaf that is wanted, that of the leaf of the checkpoint that it is
            read from, where it has another name there; or what it is computed of.
        device: of the tensors.

    Returns:
        In the structure of `like`, or nested dicts. Padding is zero.

    Raises:
        ValueError: nothing is there, it is incomplete or damaged, or leaves are missing or have
            another shape or dtype; all offenders are listed.
    """
    stored = Checkpoint(path)
    if like is None:
        stored.open()
        like = _nest_leaves(stored)
    target = _check_placement(stored, like, placement)
    fitting = _match_leaves(stored, like, target, cast, sources)
    empty = partial(torch.empty, device=device)
    made = tree.map(lambda leaf: empty(leaf.shape, dtype=leaf.dtype), like)
    _fill(fitting, dict(tree.items(made)), target)
    return made


def restore_(
    path: str | Path,
    state: tree.Tree,
    *,
    placement: Placement | None = None,
    cast: bool = False,
    in_flight: int = database.IN_FLIGHT,
) -> tree.Tree:
    """Read a checkpoint, or a part of it, into the tensors of `state`, and return that.

    Takes no memory beyond the tensors but for what is in flight. No collectives; every process of
    a bound mesh reads its own boxes. If it raises while reading, the tensors hold some values of
    the checkpoint: do not go on with them.

    Args:
        path: a complete checkpoint.
        state: what this process holds; leaves of the checkpoint that it lacks are not read.
        placement, cast: as in `restore`.
        in_flight: bytes that are read at the same time.

    Raises:
        ValueError: as in `restore`, or some tensors are meta ones; all offenders are listed.
    """
    stored = Checkpoint(path)
    target = _check_placement(stored, state, placement)
    fitting = _match_leaves(stored, state, target, cast)
    tensors = dict(tree.items(state))
    abstract = [name for name, tensor in tensors.items() if tensor.is_meta]
    found = [Problem(name, "a meta tensor", "a tensor to read into") for name in abstract]
    raise_problems(f"cannot restore the checkpoint {path}", found)
    _fill(fitting, tensors, target, in_flight)
    return state


def metadata(path: str | Path) -> dict[str, Any]:
    """The metadata that was passed to `save`; ValueError as of `Checkpoint`."""
    return Checkpoint(path).metadata


def _check_placement(stored: Checkpoint, like: tree.Tree, placement: Placement | None) -> Placement:
    """The placement that was given, checked; or that of a process which wants all of `like`."""
    if placement is None:
        return Placement.of(like)
    title = f"cannot restore the checkpoint {stored.path}"
    placement.check(like, what=title, some=True)
    return placement


def _match_leaves(
    stored: Checkpoint,
    like: tree.Tree,
    placement: Placement,
    cast: bool,
    sources: Mapping[str, str | Computed] = MappingProxyType({}),
) -> list[tuple[Leaf, StoredLeaf | Computed]]:
    """The leaves that are wanted, with what the checkpoint holds of them."""
    wanted = set(tree.paths(like))
    leaves = [leaf for leaf in placement.leaves if leaf.held.path in wanted]
    separate(stored, [leaf.path.removeprefix("params/") for leaf in leaves])
    given = {leaf.path: sources.get(leaf.path, leaf.path) for leaf in leaves}
    names = [source for source in given.values() if isinstance(source, str)]
    stored.open([name for name in names if name in stored])
    found: list[Problem] = []
    fitting: list[tuple[Leaf, StoredLeaf | Computed]] = []
    for leaf in leaves:
        source = given[leaf.path]
        if isinstance(source, str) and source not in stored:
            found.append(Problem(leaf.path, "nothing", "a leaf", nearest(leaf.path, stored)))
            continue
        there = stored[source] if isinstance(source, str) else source
        fitting.append((leaf, there))
        castable = cast and leaf.dtype.is_floating_point
        castable = castable and there.dtype is not None and there.dtype.is_floating_point
        if there.shape != leaf.shape or not (there.dtype == leaf.dtype or castable):
            got = f"{there.dtype_name} {there.shape}"
            fix = ""
            if there.shape == leaf.shape and leaf.dtype.is_floating_point and not cast:
                fix = "cast=True converts floating-point values"
            wanted_text = f"{name_of(leaf.dtype)} {leaf.shape}"
            found.append(Problem(leaf.path, got, wanted_text, fix))
    raise_problems(f"the checkpoint {stored.path} does not hold what is asked for", found)
    return fitting


@dataclass(frozen=True, eq=False)
class Computed:
    """A leaf that is made of leaves on disk, each part of it where it is read.

    Attributes:
        shape: global and unpadded.
        dtype: of its elements.
        rows: an index, such as a slice for each dim, to these elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[Any], torch.Tensor]

    def __getitem__(self, where: Any) -> torch.Tensor:
        """The values there, as of `StoredLeaf`."""
        return self.rows(where)

    @property
    def dtype_name(self) -> str:
        """Of `dtype`, as `StoredLeaf` has it."""
        return name_of(self.dtype)

    def read(self, boxes: Sequence[Box], out: torch.Tensor, window: database.Window) -> None:
        """Read boxes of it into `out`, some rows at a time; nothing is left in `window`."""
        del window
        for box in boxes:
            spans = list(zip(box.start, box.size, box.local, strict=True))
            first, count, at = spans[0] if len(spans) > 1 else (0, 1, 0)
            step = max(_ELEMENTS // max(math.prod(box.size[1:]), 1), 1)
            for row in range(0, count, step):
                if len(spans) > 1:
                    spans[0] = (first + row, min(step, count - row), at + row)
                part = self.rows(tuple(slice(start, start + size) for start, size, _ in spans))
                out[tuple(slice(to, to + size) for _, size, to in spans)].copy_(part)


_ELEMENTS = 1 << 22
"""That are computed at a time, but for those of a row."""


def _fill(
    fitting: list[tuple[Leaf, StoredLeaf | Computed]],
    tensors: Mapping[str, torch.Tensor],
    placement: Placement,
    in_flight: int = database.IN_FLIGHT,
) -> None:
    window = database.Window(in_flight)
    with torch.no_grad():
        try:
            for leaf, there in fitting:
                boxes = placement.boxes(leaf, placement.here)
                tensor = leaf.view(tensors[leaf.held.path])
                if tensor.numel() != sum(database.nbytes_of(box.size, 1) for box in boxes):
                    tensor.zero_()  # the rest is padding
                if leaf.group == 1:
                    there.read(boxes, tensor, window)
                    continue
                alone = torch.zeros(tensor.shape, dtype=tensor.dtype).flatten(-3, -2)
                there.read(boxes, alone, window)
                window.drain()
                tensor.copy_(alone.view(tensor.shape))
            window.drain()
        finally:
            window.abandon()


def _nest_leaves(stored: Checkpoint) -> dict[str, Any]:
    """Meta tensors for all leaves of a checkpoint, in dicts by the parts of their paths."""
    out: dict[str, Any] = {}
    found = []
    for path, leaf in stored.items():
        dtype = from_name(leaf.dtype_name)
        if dtype is None:
            found.append(Problem(path, leaf.dtype_name, "a dtype that torch has"))
            continue
        tree.put_leaf(out, path, torch.empty(leaf.shape, dtype=dtype, device="meta"))
    raise_problems(f"cannot restore the checkpoint {stored.path}", found)
    return out


# --- parameters that are joined with others


def separate(stored: Checkpoint, params: Iterable[str]) -> None:
    """Have a checkpoint hold parameters that it has joined, and what is like them, apart.

    Runs with fused projections stored them so once.

    Args:
        stored: the checkpoint.
        params: the paths of parameters that are wanted.
    """
    found: dict[str, Sequence[str]] = {}
    for path in params:
        *above, layer, name = ["", *path.split("/")]
        for joined, names in JOINED.items():
            whole = "/".join([*above, joined, name]).lstrip("/")
            missing = layer in names and f"params/{path}" not in stored
            if missing and f"params/{whole}" in stored:
                found[whole] = names
    made: dict[str, Computed] = {}
    gone = []
    for path in stored if found else ():
        for whole, names in found.items():
            before, own, after = f"/{path}/".partition(f"/{whole}/")
            if own:
                gone.append(path)
                *above, _, name = ["", *whole.split("/")]
                for index, layer in enumerate(names):
                    alone = "/".join([before, *above[1:], layer, name, after]).strip("/")
                    made[alone] = _part_of(stored[path], index, len(names))
    stored.present(made, without=gone)


def _part_of(leaf: StoredLeaf, index: int, count: int) -> Computed:
    """One of so many leaves that are joined as `JOINED` says."""
    *outer, entries, last = leaf.shape
    first = entries - count + 1
    start, size = (0, first) if index == 0 else (first + index - 1, 1)
    if size > 1:
        outer[-1] *= size
    shape = (*outer, last)

    def rows(where: Any) -> torch.Tensor:
        *before, within = normalise_index(where, shape)
        if size == 1:
            return leaf[(*before, start, within)]
        *before, at = before
        span = at if isinstance(at, slice) else slice(at, at + 1)
        groups = slice(span.start // size, -(-span.stop // size))
        found = leaf[(*before, groups, slice(start, start + size), slice(None))].flatten(-3, -2)
        skipped = groups.start * size
        if isinstance(at, int):
            return found[..., at - skipped, within]
        return found[..., slice(at.start - skipped, at.stop - skipped, at.step), within]

    assert leaf.dtype is not None
    return Computed(shape, leaf.dtype, rows)


def _join_parts(leaves: Sequence[StoredLeaf | Computed], d: ParamDef) -> Computed:
    """The parameter whose pieces these are."""

    def rows(where: Any) -> torch.Tensor:
        *before, entry, last = normalise_index(where, d.shape)
        made = []
        for (_, size), leaf in zip(d.pieces, leaves, strict=True):
            if size == 1:
                made.append(leaf[(*before, slice(None))].unsqueeze(-2))
                continue
            *outer, at = before
            span = at if isinstance(at, slice) else slice(at, at + 1, 1)
            part = leaf[(*outer, slice(span.start * size, span.stop * size), slice(None))]
            part = part.unflatten(-2, (-1, size))[..., :: span.step, :, :]
            made.append(part if isinstance(at, slice) else part.squeeze(-3))
        return torch.cat(made, -2)[..., entry, last]

    dtype = leaves[0].dtype
    assert dtype is not None
    return Computed(d.shape, dtype, rows)


# --- parameters alone


def stored_params(stored: Checkpoint, defs: tree.Tree, *, averaged: bool = False) -> tree.Tree:
    """A checkpoint's parameters as leaves that are read where they are indexed.

    With `averaged` they are the means that `optim.with_average` keeps (``optimizer.ema_decay``),
    ``sum_t w_t params_t / sum_t w_t`` as `optim.averaged` reads them, in the parameters' dtypes:
    of a checkpoint made on any mesh, pipeline or ZeRO stage, without the optimizer. Parameters
    that no mean is kept of, such as those that LoRA leaves alone, are as they are; all are before
    the first update. Adapters are averaged by themselves, before they are merged.

    Args:
        stored: a checkpoint of a run.
        defs: of the parameters that it holds; see `functron.lora.defs_in`.
        averaged: read the means.

    Returns:
        Leaves with shape and dtype whose slices are tensors, in the structure of `defs`.

    Raises:
        ValueError: parameters are missing, or have other shapes than the defs (all are listed); or
            it keeps no average, or several.
    """
    separate(stored, _shapes_apart(defs))
    _check_params(stored, defs)
    at = _place_of_average(stored) if averaged else ""
    weight = stored[f"{at}weight"][...] if averaged else torch.zeros(())
    some = bool(weight > 0)  # else of no parameters yet

    def one(path: str) -> Any:
        now: Any = stored[f"params/{path}"]
        name = f"{at}average/{path}"
        return _average(stored[name], weight, now.dtype) if some and name in stored else now

    def read(path: str, d: ParamDef) -> Any:
        parts = [one(part.path) for part in pieces_of(path, d)]
        return _join_parts(parts, d) if parts else one(path)

    return tree.map_with_path(read, defs)


def _shapes_apart(defs: tree.Tree) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, pieces apart, by path."""
    found: dict[str, tuple[int, ...]] = {}
    for path, d in tree.items(defs):
        found |= {part.path: part.shape for part in pieces_of(path, d)} or {path: tuple(d.shape)}
    return found


def _average(total: StoredLeaf | Computed, weight: torch.Tensor, dtype: torch.dtype) -> Computed:
    """The mean whose weighted sum `total` is, rounded to the dtype of the parameter."""

    def rows(where: Any) -> torch.Tensor:
        part = total[where]
        return (part / weight.to(part.dtype)).to(dtype)

    return Computed(total.shape, dtype, rows)


def read_params(
    stored: Checkpoint,
    defs: tree.Tree,
    *,
    averaged: bool = False,
    rules: Rules | None = None,
    mesh: Mesh | BoundMesh | None = None,
) -> tree.Tree:
    """`stored_params` as tensors in host memory, in the dtypes of `defs`.

    A run that goes on in another precision has a checkpoint in the former one until it saves.

    Args:
        stored, defs, averaged: as in `stored_params`.
        rules: how a mesh splits the parameters; None: not at all.
        mesh: on a bound one this rank's shards are read, and nothing else; otherwise whole leaves.

    Raises:
        ValueError: what `stored_params` raises, or values are damaged.
    """
    found = tree.items(stored_params(stored, defs, averaged=averaged))
    computed = {f"params/{path}": leaf for path, leaf in found if isinstance(leaf, Computed)}
    like, placement = abstract_params(defs), None
    if rules is not None and isinstance(mesh, BoundMesh):
        specs = param_specs(defs, rules)
        placement = Placement.of({"params": like}, {"params": specs}, mesh)
        like = tree.map(lambda x, spec: x.new_empty(local_shape(x.shape, spec, mesh)), like, specs)
    made = restore(stored.path, {"params": like}, placement=placement, cast=True, sources=computed)
    return made["params"]


def _check_params(stored: Checkpoint, defs: tree.Tree) -> None:
    """Raise where the parameters are not those of `defs`."""
    wanted = {f"params/{path}": list(shape) for path, shape in _shapes_apart(defs).items()}
    stored.open([path for path in wanted if path in stored])
    problems = [
        Problem(path, "no such leaf", "a parameter, as in config.toml")
        if path not in stored
        else Problem(path, str(list(stored[path].shape)), f"{shape}, as in the config")
        for path, shape in wanted.items()
        if path not in stored or list(stored[path].shape) != shape
    ]
    raise_problems(f"{stored.path} is not a checkpoint of this run's model", problems)


def _place_of_average(stored: Checkpoint) -> str:
    """Where in the optimizer's state its `AverageState` is: a prefix of paths."""
    states = [path for path in stored if path.startswith("opt_state/")]
    heads = [path.removesuffix("weight") for path in states if path.endswith("/weight")]
    kept = [
        head
        for head in heads
        if f"{head}count" in stored and any(path.startswith(f"{head}average/") for path in states)
    ]
    if len(kept) != 1:
        fix = "leave --averaged out, or train with --optimizer.ema-decay 0.999"
        got = f"a checkpoint with {len(kept) or 'no'} averages"
        title = f"cannot read averages from {stored.path}"
        refuse(title, "averaged", got, "the averages that a run keeps", fix)
    return kept[0]
