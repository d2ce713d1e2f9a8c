"""Whole values from what the ranks of a pipeline hold: for checkpoints and samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from functron import compat, tree
from functron.errors import Problem, raise_problems
from functron.pipeline.partition import Partition
from functron.spmd.mesh import BoundMesh


def collect(
    value: tree.Tree, like: tree.Tree, partition: Partition, mesh: BoundMesh, axis: str = "pp"
) -> tree.Tree:
    """The whole of `value`, parameters or an optimizer's state, on the first rank of the pipeline.

    Other axes must have been gathered before (`functron.gather`). Every rank calls it; each sends
    what it holds to the first. Of parameters that several ranks hold, the first one's are taken.

    Args:
        value: what this rank holds: a part of `like`, with paths of its own.
        like: the structure and shapes of the whole, such as meta tensors.
        partition: who holds what.
        mesh: where it is held.
        axis: the axis of the pipeline.

    Returns:
        The whole on rank 0 of `axis`, on the device of `value`; None on the others.
    """
    held = dict(zip(tree.paths(value), tree.leaves(value), strict=True))
    leaves = {path: _plain(leaf) for path, leaf in held.items()}
    group, me = compat.group(mesh.groups[axis]), mesh.coordinate[axis]
    everyone: list[Any] = [None] * mesh[axis]
    dist.gather_object(leaves, everyone if me == 0 else None, group=group, group_dst=0)
    if me != 0:
        return None
    device = next(leaf.device for leaf in held.values() if isinstance(leaf, torch.Tensor))
    rows = {
        name: [partition.rows(name, rank) for rank in range(mesh[axis])]
        for name in partition.uses
        if partition.stack(name) is not None
    }
    whole, missing = [], []
    for path, wanted in zip(tree.paths(like), tree.leaves(like), strict=True):
        parts = [(rank, ranks[path]) for rank, ranks in enumerate(everyone) if path in ranks]
        entry = next((name for name in path.split("/") if name in partition.uses), "")
        found = _assemble(parts, wanted, rows.get(entry))
        whole.append(found.to(device) if isinstance(found, torch.Tensor) else found)
        if found is None:
            missing.append(Problem(path, "no rank that holds it whole or by layer", "one at least"))
    raise_problems("cannot collect a value from the ranks of a pipeline", missing)
    return tree.unflatten(tree.structure(like), whole)


def _plain(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _assemble(parts: list[tuple[int, Any]], wanted: Any, rows: list[list[int]] | None) -> Any:
    """A whole leaf from those of some ranks, which hold these rows of it; None: all of it."""
    if not parts or rows is None:
        return parts[0][1] if parts else None
    whole = parts[0][1].new_empty(wanted.shape)
    seen = set()
    for rank, part in parts:
        whole[rows[rank]] = part
        seen.update(rows[rank])
    return whole if seen == set(range(len(whole))) else None
