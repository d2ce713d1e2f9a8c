"""Gradient norms and clipping that give the same number on every sharding."""

from __future__ import annotations

import math

import torch

from functron import tree
from functron.errors import public
from functron.ops.foreach import foreach_
from functron.ops.global_norm import squares, sum_of_squares
from functron.ops.kernels import AUTO, Kernels
from functron.optim.transformation import (
    GradientTransformation,
    Norm,
    Updates,
    scale,
    scale_,
    stateless,
    transformation,
)
from functron.optim.whole import leaf_specs
from functron.spmd.collectives import psum
from functron.spmd.spec import spec_axes
from functron.spmd.stages import psum_stages


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
            every GPU; see `functron.ops.kernels.use`.

    Raises:
        ValueError: no specs on a mesh; or a leaf varies over an axis that its spec lacks, where a
            simulation is checked (and so on processes, before the program first runs).
    """
    leaves = tree.leaves(updates)
    if not leaves:
        return torch.zeros(())
    counts = tree.broadcast_prefix(copies, updates, what="the copies of updates")
    spec_leaves = leaf_specs(specs, updates, "global_norm (and clip_by_global_norm)")
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for square, spec, count in zip(_squares(leaves, kernels), spec_leaves, counts, strict=True):
        axes = tuple(sorted(spec_axes(spec)))
        square = square.to(leaves[0].device, torch.float64)
        groups.setdefault(axes, []).append(square if count == 1 else square / count)
    sums = [
        psum(torch.stack(each).sum(), axes) if axes else torch.stack(each).sum()
        for axes, each in groups.items()
    ]
    wide = any(leaf.dtype == torch.float64 for leaf in leaves)
    norm = psum_stages(torch.stack(sums).sum()).sqrt()
    return norm if wide else norm.to(torch.float32)


def _squares(leaves: list[torch.Tensor], kernels: Kernels) -> list[torch.Tensor]:
    """The sum of the squares of every leaf."""
    if kernels.takes("global_norm", *leaves):
        return [sum_of_squares(leaf)[0] for leaf in leaves]
    return [squares(leaf) for leaf in leaves]


def norm_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings a value of this norm down to `max_norm`; 1 where it is below. 0-dim.

    NaN and infinite norms give NaN and 0: a non-finite gradient is not hidden by clipping
    (0 times infinity is NaN).
    """
    return torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)


@public
def clip_by_global_norm(
    max_norm: float, specs: tree.Tree = None, copies: tree.Tree = 1, *, kernels: Kernels = AUTO
) -> GradientTransformation:
    """Scales all updates together so that their `global_norm` is at most `max_norm`, as Optax does.

    Updates whose norm is below it pass unchanged. Collectives are those of `global_norm`, and none
    where the norm is given: ``update(updates, state, norm=...)``. A step that also reports the norm
    computes it once that way, as `functron.make_step` does.

    Args:
        max_norm: positive.
        specs: the specs of the parameters (and so of the gradients); needed on any mesh, P() where
            nothing is sharded.
        copies: how many ranks of a pipeline hold each parameter.
        kernels: see `global_norm`.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    _positive("clip_by_global_norm", "max_norm", max_norm)

    def value(updates):
        return global_norm(updates, specs, copies, kernels=kernels)

    def factor(updates, norm=None):
        return norm_scale(value(updates) if norm is None else norm, max_norm)

    return transformation(
        lambda params: (),
        lambda updates, state, params=None, norm=None: (scale(updates, factor(updates, norm)), ()),
        specs=lambda param_specs: (),
        update_=lambda updates, state, params=None, norm=None: (
            scale_(updates, factor(updates, norm)),
            (),
        ),
    )._replace(factor=factor, norm=Norm(lambda updates: updates, value))


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
    )


def _positive(what: str, name: str, value: float) -> None:
    if not value > 0 or math.isnan(value):
        raise ValueError(
            f"{what}: got {name}={value!r}; wanted a positive number; fix: leave {what} out of the "
            "chain to turn clipping off"
        )
