"""Norms of parameters and gradients layer by layer: the same numbers on every sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron import tree
from functron.ops.global_norm import squares
from functron.optim.zero import STACKED
from functron.spmd import collectives as lax
from functron.spmd.spec import is_spec, spec_axes
from functron.spmd.stages import psum_stages


@dataclass(frozen=True)
class Layers:
    """The parts of a model that have norms of their own; made by `layers_of`.

    Attributes:
        names: of all parts of the whole model: ``embed``, ``blocks/0``, ``blocks/1``, ``norm``.
        stacked: the paths of the parameters with a leading dim of layers.
        places: by top-level entry of the parameters, where among `names` the layers are that this
            process holds, in the order of its rows.
    """

    names: tuple[str, ...]
    stacked: frozenset[str]
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)


def layers_of(defs: Mapping[str, Any], rows: Mapping[str, Sequence[int]] | None = None) -> Layers:
    """Every layer of stacked parameters by itself, and every other top-level entry.

    Args:
        defs: the `ParamDef`s of the whole model; None in places of parameters that do not count.
        rows: by top-level entry which layers this process holds, where it does not hold all of
            them: those of a rank of a pipeline.
    """
    names: list[str] = []
    stacked: set[str] = set()
    places: dict[str, Sequence[int]] = {}
    for entry, part in defs.items():
        found = tree.leaves(part)
        paths = [f"{entry}/{path}" if path else entry for path in tree.paths(part)]
        counts = [d.shape[0] if d.axes[:1] == (STACKED,) else 0 for d in found]
        stacked.update(path for path, count in zip(paths, counts, strict=True) if count)
        if 0 in counts:
            names.append(entry)
        if any(counts):
            mine = (rows or {}).get(entry, range(max(counts)))
            places[entry] = [len(names) + row for row in mine]
            names += [f"{entry}/{layer}" for layer in range(max(counts))]
    return Layers(tuple(names), frozenset(stacked), places)


def norms_by_layer(
    values: Mapping[str, tuple[tree.Tree, tree.Tree]], layers: Layers, copies: tree.Tree = 1
) -> dict[str, torch.Tensor]:
    """The 2-norms of all parts of `layers`, of several trees at once.

    The squares of `optim.global_norm` are the sums of the squares of these. Collectives: one
    all-reduce of one number per part and tree for each mesh axis that splits any of the leaves, and
    one over the ranks of a pipeline.

    Args:
        values: by name, trees of tensors like the parameters (None where a leaf does not count),
            such as gradients that have been reduced, and their specs, prefix trees of `P`.
        layers: of these parameters.
        copies: how many ranks of a pipeline hold each leaf, a prefix tree of numbers; see
            `pipeline.Partition.copies`.

    Returns:
        By name, ``[len(layers.names)]`` in their order, the same on every rank: float64 where a
        leaf is, or else float32.
    """
    rows = [row for value, specs in values.values() for row in _leaves(value, specs, copies)]
    over = tuple(dict.fromkeys(axis for _, _, spec, _ in rows for axis in spec_axes(spec)))
    wide = any(leaf.dtype == torch.float64 for _, leaf, _, _ in rows)
    parts = [
        _by_part(_leaves(value, specs, copies), layers, over) for value, specs in values.values()
    ]
    norms = psum_stages(lax.psum(torch.stack(parts), over)).sqrt()
    norms = norms if wide else norms.to(torch.float32)
    return dict(zip(values, norms.unbind(0), strict=True))


def _leaves(value: tree.Tree, specs: tree.Tree, copies: tree.Tree) -> list[tuple]:
    """Path, leaf, spec and copies of every leaf."""
    flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="specs", wanted="a P")
    counts = tree.broadcast_prefix(copies, value, what="the copies of values")
    return list(zip(tree.paths(value), tree.leaves(value), flat, counts, strict=True))


def _by_part(leaves: Sequence[tuple], layers: Layers, over: Sequence[str]) -> torch.Tensor:
    """This rank's shares of the sums of squares, one for each of `layers.names`; float64."""
    whole: dict[str, torch.Tensor] = {}  # by part
    stacks: dict[str, torch.Tensor] = {}  # by entry, [layers that this process holds]
    for path, leaf, spec, count in leaves:
        entry, stacked = path.split("/")[0], path in layers.stacked
        # what the axes do not split would be counted by each of their ranks
        share = 1 / (count * lax.axis_size([a for a in over if a not in spec_axes(spec)]))
        sums = squares(leaf, int(stacked)) * share
        into = stacks if stacked else whole
        into[entry] = into[entry] + sums if entry in into else sums
    pieces = [*(total.reshape(1) for total in whole.values()), *stacks.values()]
    places = [layers.names.index(entry) for entry in whole]
    places += [place for entry in stacks for place in layers.places[entry]]
    order = [len(places)] * len(layers.names)  # of what is not here, the zero at the end
    for position, place in enumerate(places):
        order[place] = position
    zero = pieces[0].new_zeros(1)
    index = torch.tensor(order, device=zero.device)
    return torch.cat([*pieces, zero]).index_select(0, index)
