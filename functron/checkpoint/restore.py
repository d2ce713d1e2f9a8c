"""Restoring: a checkpoint's values into the tensors of any mesh, each process its own boxes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from functron.checkpoint import database
from functron.checkpoint.chunks import from_name, name_of
from functron.checkpoint.placement import Leaf, Placement, place
from functron.checkpoint.stored import Checkpoint, StoredLeaf
from functron.core import tree
from functron.core.errors import Problem, nearest, raise_problems


def restore(
    path: str | Path,
    like: tree.Tree | None = None,
    *,
    placement: Placement | None = None,
    cast: bool = False,
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
        like = _nested(stored)
    place_of = _placement(stored, like, placement)
    fitting = _matched(stored, like, place_of, cast)
    made = tree.map(lambda leaf: _empty(leaf, device), like)
    _fill(fitting, dict(zip(tree.paths(made), tree.leaves(made), strict=True)), place_of)
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
        placement: which part of the whole state that is, on any mesh; None: it is the whole.
        cast: convert floating-point values to the tensors' dtypes.
        in_flight: bytes that are read at the same time.

    Raises:
        ValueError: nothing is there, it is incomplete or damaged, or leaves are missing or have
            another shape or dtype; all offenders are listed.
    """
    stored = Checkpoint(path)
    place_of = _placement(stored, state, placement)
    fitting = _matched(stored, state, place_of, cast)
    tensors = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    abstract = [name for name, tensor in tensors.items() if tensor.is_meta]
    found = [Problem(name, "a meta tensor", "a tensor to read into") for name in abstract]
    raise_problems(f"cannot restore the checkpoint {path}", found)
    _fill(fitting, tensors, place_of, in_flight)
    return state


def metadata(path: str | Path) -> dict[str, Any]:
    """What was passed to `save` as metadata.

    Raises:
        ValueError: nothing is there, or it is incomplete or damaged.
    """
    return Checkpoint(path).metadata


def _placement(stored: Checkpoint, like: tree.Tree, placement: Placement | None) -> Placement:
    """The placement that was given, checked; or that of a process which wants all of `like`."""
    if placement is None:
        return place(like)
    title = f"cannot restore the checkpoint {stored.path}"
    placement.check(like, what=title, some=True)
    return placement


def _matched(
    stored: Checkpoint, like: tree.Tree, placement: Placement, cast: bool
) -> list[tuple[Leaf, StoredLeaf]]:
    """The leaves that are wanted, with what the checkpoint holds of them."""
    wanted = set(tree.paths(like))
    leaves = [leaf for leaf in placement.leaves if leaf.path in wanted]
    stored.open([leaf.path for leaf in leaves if leaf.path in stored])
    found: list[Problem] = []
    for leaf in leaves:
        if leaf.path not in stored:
            found.append(Problem(leaf.path, "nothing", "a leaf", nearest(leaf.path, stored)))
            continue
        held = stored[leaf.path]
        castable = cast and leaf.dtype.is_floating_point
        castable = castable and held.dtype is not None and held.dtype.is_floating_point
        if held.shape != leaf.shape or not (held.dtype == leaf.dtype or castable):
            got = f"{held.dtype_name} {held.shape}"
            fix = ""
            if held.shape == leaf.shape and leaf.dtype.is_floating_point and not cast:
                fix = "cast=True converts floating-point values"
            wanted_text = f"{name_of(leaf.dtype)} {leaf.shape}"
            found.append(Problem(leaf.path, got, wanted_text, fix))
    raise_problems(f"the checkpoint {stored.path} does not hold what is asked for", found)
    return [(leaf, stored[leaf.path]) for leaf in leaves]


def _fill(
    fitting: list[tuple[Leaf, StoredLeaf]],
    tensors: Mapping[str, torch.Tensor],
    placement: Placement,
    in_flight: int = database.IN_FLIGHT,
) -> None:
    window = database.Window(in_flight)
    with torch.no_grad():
        try:
            for leaf, held in fitting:
                boxes = placement.boxes(leaf, placement.here)
                tensor = tensors[leaf.path]
                if tensor.numel() != sum(database.nbytes_of(box.size, 1) for box in boxes):
                    tensor.zero_()  # the rest is padding
                held.read(boxes, tensor, window)
            window.drain()
        finally:
            window.abandon()


def _empty(leaf: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)


def _nested(stored: Checkpoint) -> dict[str, Any]:
    """Meta tensors for all leaves of a checkpoint, in dicts by the parts of their paths."""
    out: dict[str, Any] = {}
    found = []
    for path, held in stored.items():
        dtype = from_name(held.dtype_name)
        if dtype is None:
            found.append(Problem(path, held.dtype_name, "a dtype that torch has"))
            continue
        *above, name = path.split("/")
        node = out
        for key in above:
            node = node.setdefault(key, {})
        node[name] = torch.empty(held.shape, dtype=dtype, device="meta")
    raise_problems(f"cannot restore the checkpoint {stored.path}", found)
    return out
