"""Norms of parameters and gradients, and clipping: the same numbers on every sharding.

Of all leaves together (`global_norm`), of each leaf or each layer of a stacked one (`norm`), and of
each layer of a model, all its leaves together (`norms_by_layer`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.errors import public
from functron.ops.foreach import foreach_, squares, sum_of_squares
from functron.ops.operations import AUTO, Kernels
from functron.optim.transformation import (
    GradientTransformation,
    Norm,
    Updates,
    bindable,
    multiply,
    multiply_,
    stateless,
    transformation,
)
from functron.optim.zero import STACKED, flat_specs, leaf_specs, num_stacked, total
from functron.spmd.collectives import axis_size, psum, psum_stages
from functron.spmd.spec import dim_axes, spec_axes


@public
def global_norm(
    updates: Updates, specs: tree.Tree = None, copies: tree.Tree = 1, *, kernels: Kernels = AUTO
) -> torch.Tensor:
    """The 2-norm of all leaves together, over all their shards; 0-dim.

    Float32, or float64 when a leaf is float64, and within 1e-6 of the exact norm at any size and on
    every sharding: squares are added up in float32 within small blocks, and beyond them, also over
    ranks, in float64.

    One all-reduce of 8 bytes for each distinct set of mesh axes that the specs mention, and one
    over the ranks of a pipeline.

    Args:
        updates: a tree of tensors, on a mesh this rank's shards; gradients already synchronised.
        specs: how they are sharded (a tree or prefix tree of `P`). None: not at all, which is
            refused inside programs over more than one rank.
        copies: how many ranks of a pipeline hold each leaf (a tree or prefix tree of numbers), as
            `pipeline.Partition.copies` says.
        kernels: whether sums are made by the kernel of "global_norm", which has the same bits on
            every GPU; see `functron.ops.use`.

    Raises:
        ValueError: no specs on a mesh; or a leaf varies over an axis that its spec lacks, where a
            simulation is checked (and so on processes, before the program first runs).
    """
    leaves = tree.leaves(updates)
    if not leaves:
        return torch.zeros(())
    counts = tree.broadcast_prefix(copies, updates, what="the copies of updates")
    flat = leaf_specs(specs, updates, "global_norm (and clip_by_global_norm)")
    if kernels.takes("global_norm", *leaves):
        sums = [sum_of_squares(leaf)[0].to(torch.float64) for leaf in leaves]
    else:
        sums = [squares(leaf) for leaf in leaves]
    sums = [x if count == 1 else x / count for x, count in zip(sums, counts, strict=True)]
    return _narrow(total(sums, flat).sqrt(), leaves)


def _narrow(norm: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A float64 norm in float32, unless one of the leaves is float64."""
    wide = any(leaf.dtype == torch.float64 for leaf in leaves)
    return norm if wide else norm.to(torch.float32)


@public
def norm(value: tree.Tree, specs: tree.Tree = None, *, defs: tree.Tree = None) -> tree.Tree:
    """The 2-norm of every leaf over all its shards, and of every layer of a stacked leaf by itself.

    For layerwise optimizers (LARS, LAMB) and clipping by layer: ``tree.map(lambda u, p, n: u * p /
    n, updates, norm(params, specs), norm(updates, specs))``. As precise as `global_norm`, whose
    square is the sum of the squares of these.

    One all-reduce of a float64 number per leaf and layer, together for all leaves that the same
    mesh axes split alike.

    Args:
        value: a tree of tensors such as parameters or (synchronised) gradients, on a mesh this
            rank's shards.
        specs: as in `global_norm`.
        defs: the `ParamDef`s of these leaves, which tell stacked dims (layers, experts); None:
            nothing is stacked.

    Returns:
        A tree like `value`, of norms that broadcast against its leaves: 0-dim, or ``[*stacked, 1,
        ..., 1]`` with the stacked dims of the leaf, sharded as the leaf's are; float64 for float64
        leaves, else float32.

    Raises:
        ValueError: as `global_norm`.
    """
    leaves, structure = tree.flatten(value)
    flat = leaf_specs(specs, value, "norm")
    stacks = [0] * len(leaves)
    if defs is not None:
        wanted = "a ParamDef, or containers"
        known = tree.broadcast_prefix(defs, value, what="the defs", wanted=wanted)
        stacks = [num_stacked(d) for d in known]
    sums = [squares(x, count) for x, count in zip(leaves, stacks, strict=True)]
    groups: dict[tuple, list[int]] = {}
    for i, (x, spec, count) in enumerate(zip(leaves, flat, stacks, strict=True)):
        dims = dim_axes(spec, x.dim())
        axes = tuple(sorted(itertools.chain(*dims[count:])))
        # what varies over the axes of stacked dims is not joined to what does not
        groups.setdefault((axes, *itertools.chain(*dims[:count])), []).append(i)
    for (axes, *_), members in groups.items():
        if axes:
            joined = psum(torch.cat([sums[i].reshape(-1) for i in members]), axes)
            parts = joined.split([sums[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                sums[i] = part.view(sums[i].shape)
    norms = [
        _narrow(s.sqrt(), [x]).reshape(s.shape + (1,) * (x.dim() - s.dim() if s.dim() else 0))
        for s, x in zip(sums, leaves, strict=True)
    ]
    return tree.unflatten(structure, norms)


def norm_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings a value of this norm down to `max_norm`; 1 where it is below. 0-dim.

    NaN and infinite norms give NaN and 0: a non-finite gradient is not hidden by clipping
    (0 times infinity is NaN).
    """
    return torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)


@public
@bindable
def clip_by_global_norm(
    max_norm: float, specs: tree.Tree = None, copies: tree.Tree = 1, *, kernels: Kernels = AUTO
) -> GradientTransformation:
    """Scales all updates together so that their `global_norm` is at most `max_norm`, as Optax does.

    Collectives are those of `global_norm`, and none where the norm is given: ``update(updates,
    state, norm=...)``, a tensor, or an `optim.Norm` of these updates. A step that also reports the
    norm computes it once that way, as `functron.make_step` does.

    Args:
        max_norm: positive.
        specs: the parameters' specs (and so the gradients'), P() where nothing is sharded; None:
            from `bind`, needed on any mesh.
        copies: number of pipeline ranks that hold each parameter; from `bind` without `specs`.
        kernels: see `global_norm`.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    _positive("clip_by_global_norm", "max_norm", max_norm)

    def update(updates, state, params=None, *, norm=None, donated=False):
        found = find_norm(updates, norm, specs, copies, kernels=kernels)
        return (multiply_ if donated else multiply)(updates, norm_scale(found, max_norm)), ()

    return transformation(lambda params: (), update, lambda param_specs: ())


def find_norm(
    updates: Updates,
    norm: Norm | torch.Tensor | None,
    specs: tree.Tree,
    copies: tree.Tree,
    *,
    kernels: Kernels = AUTO,
) -> torch.Tensor:
    """The norm of updates: that given as the extra argument, if it is theirs, or computed."""
    known = norm.known_of(updates) if isinstance(norm, Norm) else norm
    return global_norm(updates, specs, copies, kernels=kernels) if known is None else known


@public
def clip(max_delta: float) -> GradientTransformation:
    """Clips every element of the updates to ``[-max_delta, max_delta]``, as Optax does.

    Raises:
        ValueError: `max_delta` is not positive.
    """
    _positive("clip", "max_delta", max_delta)

    def clamp_(updates: list[torch.Tensor]) -> None:
        torch._foreach_clamp_max_(updates, max_delta)
        torch._foreach_clamp_min_(updates, -max_delta)

    def in_place(updates, params):
        foreach_(clamp_, {"updates": tree.leaves(updates)}, paths=lambda: tree.paths(updates))
        return updates

    return stateless(
        lambda updates, params: tree.map(lambda u: u.clamp(-max_delta, max_delta), updates),
        in_place,
        elementwise=True,
    )


def _positive(what: str, name: str, value: float) -> None:
    if not value > 0:  # nor is NaN
        raise ValueError(
            f"{what}: got {name}={value!r}; wanted a positive number; fix: leave {what} out of the "
            "chain to turn clipping off"
        )


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
        defs: the `ParamDef`s of the whole model; None for parameters that do not count.
        rows: by top-level entry, the layers that this process holds, if not all: those of a
            pipeline rank.
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
        values: by name, trees like the parameters (None for leaves that do not count), such as
            reduced gradients, and their specs, prefix trees of `P`.
        layers: of these parameters.
        copies: as in `global_norm`.

    Returns:
        By name, ``[len(layers.names)]`` in their order, the same on every rank: float64 if a leaf
        is, else float32.
    """
    tables = [_leaves(value, specs, copies) for value, specs in values.values()]
    rows = [*itertools.chain(*tables)]
    over = tuple(dict.fromkeys(axis for _, _, spec, _ in rows for axis in spec_axes(spec)))
    parts = [_by_part(table, layers, over) for table in tables]
    norms = psum_stages(psum(torch.stack(parts), over)).sqrt()
    norms = _narrow(norms, [leaf for _, leaf, _, _ in rows])
    return dict(zip(values, norms.unbind(0), strict=True))


def _leaves(value: tree.Tree, specs: tree.Tree, copies: tree.Tree) -> list[tuple]:
    """Path, leaf, spec and copies of every leaf."""
    flat = flat_specs(specs, value)
    counts = tree.broadcast_prefix(copies, value, what="the copies of values")
    return list(zip(tree.paths(value), tree.leaves(value), flat, counts, strict=True))


def _by_part(leaves: Sequence[tuple], layers: Layers, over: Sequence[str]) -> torch.Tensor:
    """This rank's shares of the sums of squares, one for each of ``layers.names``; float64."""
    whole: dict[str, torch.Tensor] = {}  # by part
    stacks: dict[str, torch.Tensor] = {}  # by entry, [layers that this process holds]
    for path, leaf, spec, count in leaves:
        entry, stacked = path.split("/")[0], path in layers.stacked
        # what the axes do not split would be counted by each of their ranks
        share = 1 / (count * axis_size([a for a in over if a not in spec_axes(spec)]))
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
    index = compat.constant(order, zero.device)
    return torch.cat([*pieces, zero]).index_select(0, index)


def set_to_zero() -> GradientTransformation:
    """Updates of 0, which freeze parameters in `multi_transform` or `where`."""
    return stateless(lambda updates, params: tree.map(torch.zeros_like, updates), elementwise=True)
