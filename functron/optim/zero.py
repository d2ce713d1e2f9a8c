"""ZeRO (Rajbhandari et al. 2020): optimizer state sharded among ranks with the same parameters.

Data-parallel ranks that hold a parameter whole would all update it alike, each with a copy of the
optimizer's state. Under `zero` each rank has the state of one shard, updates that shard with its
shard of the gradient, and gathers the parameter from all shards.

A shard's spec is the parameter's spec with the data axes that it does not mention appended to one
dim (`shard_specs`). So a leaf of the state keeps the parameter's shape and dims, a checkpoint reads
it like the parameter, and an optimizer that needs matrices sees shards of matrices. Where no dim
divides, one is padded with zeros that no norm, update or number ever sees (`functron.spmd.spec`),
so any shape works, as with the flat buffers of other implementations.

Stage 1 is `zero`; stage 2 also reduces gradients to these shards in backward (``make_step(...,
scatter=True)``); in stage 3 the parameters' own specs mention the data axes, and nothing here is
needed.

`WholeLeaf` is for optimizers that are not elementwise: it says how the dims of a parameter are
sharded, and which are stacks of matrices, so that means over rows and the like are those of one
rank that holds every matrix by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.foreach import foreach_, laid_out
from functron.optim.transformation import (
    GradientTransformation,
    ask,
    find_answers,
    need_params,
    purely,
    refuse_scaled,
    refuse_shards,
)
from functron.spmd.axes import axis_size, scope
from functron.spmd.collectives import psum, psum_stages
from functron.spmd.mesh import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.spmd.simulate import varying_axes
from functron.spmd.spec import (
    DimCut,
    P,
    cut_tree,
    cuts_between,
    dim_axes,
    entry_axes,
    is_spec,
    join,
    local_shape,
    padded_shape,
    spec_axes,
    take,
    with_axes,
)

STACKED = "layers"
"""The logical axis along which layers are stacked; never cut, so that each layer is by itself."""


def shard_specs(
    defs: tree.Tree,
    specs: tree.Tree,
    mesh: Mesh | BoundMesh,
    axes: Sequence[str] = (*DATA_AXES, *CONTEXT_AXES),
) -> tree.Tree:
    """The specs of every rank's shard of the parameters: their own, cut over data and context axes.

    The axes of `axes` that the mesh has and a leaf's spec does not mention are appended, minor, to
    one of its dims: the first that they divide, else the one that needs the least padding. Never a
    dim of stacked layers, or of `ParamDef.pieces`. Leaves without another dim stay replicated.

    Args:
        defs: the parameters' `ParamDef`s; or anything with shapes, where no dim is of layers.
        specs: the parameters' specs, a prefix tree.
        mesh: the ranks.
        axes: that split the batch, by samples or by tokens, major to minor.

    Raises:
        ValueError: a shape cannot be split as its spec says; all offenders are listed.
    """

    def one(leaf: Any, spec: P | None) -> P:
        return _shard(leaf, spec or P(), mesh, axes)

    return tree.map_columns(one, defs, flat_specs(specs, defs))


def _shard(leaf: Any, spec: P, mesh: Mesh | BoundMesh, axes: Sequence[str]) -> P:
    missing = tuple(name for name in axes if mesh[name] > 1 and name not in spec_axes(spec))
    names = getattr(leaf, "axes", (None,) * len(leaf.shape))
    entries = len(names) - 2 if getattr(leaf, "pieces", ()) else None
    dims = [dim for dim, name in enumerate(names) if name != STACKED and dim != entries]
    if not missing or not dims:
        return spec
    local = local_shape(leaf.shape, spec, mesh)
    parts = math.prod(mesh[name] for name in missing)
    # padded size over size; the first of the best, as its parts lie together in memory
    best = min(dims, key=lambda dim: -(-local[dim] // parts) * parts / max(local[dim], 1))
    entries = [*spec, *itertools.repeat(None, len(leaf.shape) - len(spec))]
    entries[best] = with_axes(entries[best], [*entry_axes(entries[best]), *missing])
    return P(*entries)


def padded_shapes(defs: tree.Tree, shards: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """The global shape of every sharded parameter, with padding.

    That is the shape, on a simulated mesh, of a leaf of the state that is like a parameter.
    Checkpoints hold no padding: see `unpad` and `pad` of `functron.spmd.spec`.
    """

    def one(d: Any, shard: P | None) -> tuple[int, ...]:
        return padded_shape(d.shape, shard or P(), mesh)

    return tree.map_columns(one, defs, flat_specs(shards, defs))


@public
def zero(
    inner: GradientTransformation, specs: tree.Tree = None, shards: tree.Tree = None
) -> GradientTransformation:
    """`inner` on this rank's shard of the parameters only: ZeRO stage 1.

    Gradients and the state of `inner` have the specs `shards` (`grad_specs`). Updates and
    parameters are gathered: one all-gather per leaf and axis, of the parameter's bytes in its dtype
    (of the updates' for `update`). The numbers are those of `inner` alone.

    `inner`, and transformations chained before this, are bound to `shards`. `init` needs the mesh,
    so it runs inside a mapped program, as `functron.init_state` does.

    Args:
        inner: elementwise, or aware of how its leaves are sharded: as `muon` is, or made by
            ``optim.transformation(..., bind=...)``.
        specs: the parameters' specs; None: from `bind`.
        shards: those of `shard_specs`.

    Raises:
        ValueError: no `shards`, or `inner` takes none; (when called) they do not append axes to
            `specs`, or there are no `specs`.
    """
    if shards is None:
        fix = "pass optim.shard_specs(defs, specs, mesh)"
        refuse("zero", "shards", "None", "the specs of every rank's part", fix)
    inside = ask(inner, shards)
    refuse_scaled("zero", "inner", inside)
    refuse_shards("zero", "inner", inside)
    given, inner = inner, inner.bind(shards)

    def bind(param_specs, copies):
        if (answers := find_answers(param_specs)) is not None:
            answers.divides = True
        bound = given.bind(shards, copies)
        if bound is given and specs is not None:
            return None
        return zero(bound, param_specs if specs is None else specs, shards)

    def extended(param_specs: tree.Tree) -> tree.Tree:
        return _extend(param_specs, param_specs if specs is None else specs, shards)

    def init(params):
        # copies, lest state made like a view has its strides, or is one
        layout, own = torch.contiguous_format, take_parts(params, specs, shards)
        return inner.init(tree.map(lambda part: part.clone(memory_format=layout), own))

    def update(updates, state, params=None, **extra):
        need_params("zero", params, "whose parts are updated")
        mine = take_parts(params, specs, shards)
        updates, state = inner.update(updates, state, mine, **extra)
        return _join_all(updates, params, specs, shards), state

    def step_(grads, state, params, **extra):
        mine, state = inner.step_(grads, state, take_parts(params, specs, shards), **extra)
        return join_parts_(mine, params, specs, shards), state

    return GradientTransformation(
        init,
        update,
        step_,
        lambda param_specs: inner.specs(extended(param_specs)),
        lambda param_specs: inner.grad_specs(extended(param_specs)),
        bind,
    )


def _cuts(params: tree.Tree, specs: tree.Tree, shards: tree.Tree) -> list:
    if specs is None:
        fix = "pass specs to zero, or bind them: optimizer.bind(specs), as make_step does"
        refuse("zero", "specs", "None", "the parameters' specs", fix)
    return cut_tree(specs, shards, params)


def take_parts(params: tree.Tree, specs: tree.Tree, shards: tree.Tree) -> tree.Tree:
    """This rank's shards of parameters with these specs."""
    return tree.map_columns(take, params, _cuts(params, specs, shards))


def join_parts_(
    mine: tree.Tree, params: tree.Tree, specs: tree.Tree, shards: tree.Tree
) -> tree.Tree:
    """The parameters gathered from all ranks' shards: `params`, overwritten, unless `purely`."""
    if purely():
        return tree.map(laid_out, _join_all(mine, params, specs, shards), params)
    columns = tree.paths(params), tree.leaves(params), tree.leaves(mine)
    rows = zip(*columns, _cuts(params, specs, shards), strict=True)
    for path, param, part, cuts in rows:
        if cuts:  # one after another, so that one leaf at a time is there twice
            whole = {"updates": [join(part, cuts, param.shape)]}
            foreach_(torch._foreach_copy_, {"params": [param]}, whole, paths=lambda at=path: [at])
    return params


def _join_all(
    value: tree.Tree, params: tree.Tree, specs: tree.Tree, shards: tree.Tree
) -> tree.Tree:
    rows = zip(tree.leaves(value), _cuts(params, specs, shards), tree.leaves(params), strict=True)
    joined = [join(leaf, cuts, like.shape) for leaf, cuts, like in rows]
    return tree.unflatten(tree.structure(params), joined)


def _extend(given: tree.Tree, specs: tree.Tree, shards: tree.Tree) -> tree.Tree:
    """`given` with the axes appended that `shards` appends to `specs`.

    `given` may also split dims over the ranks of a pipeline, as states between steps are.
    """
    like = tree.map(lambda shard: 0, shards, is_leaf=is_spec)
    columns = flat_specs(given, like), flat_specs(specs, like)
    return tree.map_columns(_append_axes, shards, *columns, is_leaf=is_spec)


def _append_axes(shard: P, given: P | None, spec: P | None) -> P | None:
    if given is None or spec is None:  # another transformation's, as in `where`
        return None
    num_dims = max(len(given), len(spec), len(shard))
    entries = [*given, *itertools.repeat(None, num_dims - len(given))]
    for dim, axes in cuts_between(spec, shard, num_dims):
        entries[dim] = with_axes(entries[dim], [*entry_axes(entries[dim]), *axes])
    return P(*entries)


MATRICES = ("layers", "expert")
"""Logical axes along which parameters of the same kind lie side by side."""


@dataclass(frozen=True)
class WholeLeaf:
    """The global shape and sharding of a parameter.

    Attributes:
        path: for messages.
        shape: the global one; its first `num_stacked` sizes are not used, as pipeline ranks hold
            some of the layers only.
        num_stacked: number of leading dims along which parameters are stacked.
        spec: how the optimizer's view of it is sharded.
    """

    path: str
    shape: tuple[int, ...]
    num_stacked: int = 0
    spec: P = field(default_factory=P)

    @property
    def own(self) -> range:
        """The dims that are not stacked."""
        return range(self.num_stacked, len(self.shape))

    def axes(self, dims: Iterable[int]) -> tuple[str, ...]:
        """The mesh axes that split these dims, in their order."""
        split = dim_axes(self.spec, len(self.shape))
        return tuple(name for dim in dims for name in split[dim])

    def count(self, dims: Iterable[int]) -> int:
        """The global number of elements of these dims together."""
        return math.prod(self.shape[dim] for dim in dims)


def num_stacked(d: Any) -> int:
    """The number of leading stacked dims of a `ParamDef`; 0 without logical axes."""
    names, count = getattr(d, "axes", ()), 0
    while count < len(names) and names[count] in MATRICES:
        count += 1
    return count


def leaf_specs(specs: tree.Tree, value: tree.Tree, what: str) -> list[P]:
    """The spec of every leaf of `value`, for `what`, whose result depends on all shards of a leaf.

    Raises:
        ValueError: there are none, inside a program over more than one rank; or, where a simulation
            is checked, a leaf varies over an axis that its spec lacks. Ranks would silently compute
            different numbers.
    """
    leaves, axes = tree.leaves(value), [n for n, axis in scope().axes.items() if axis is not None]
    if specs is None:
        fix = f"pass the parameters' specs to {what}, or bind them: optimizer.bind(specs), as "
        fix += "make_step does; P() where nothing is sharded"
        got = f"no specs, on a mesh with {', '.join(map(repr, axes))}"
        found = Problem(what, got, "specs, or every rank computes a number of its own", fix)
        raise_problems("the shards of a leaf are not known", [found] if axes and leaves else [])
        return [P()] * len(leaves)
    flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="the specs", wanted="a P")
    rows = zip(tree.paths(value), leaves, flat, strict=True) if scope().check else ()
    raise_problems(
        f"{what}: the specs are not those of the leaves",
        [
            Problem(
                path or "(root)",
                f"a leaf that varies over {name!r}, and {spec}",
                "a spec that mentions each axis that splits the leaf",
                "give it the specs of the parameters; if it is a gradient, call "
                "sync_gradients(grads, specs) first",
            )
            for path, leaf, spec in rows
            for name in varying_axes(leaf)
            if name not in spec_axes(spec)
        ],
    )
    return flat


def total(numbers: Sequence[torch.Tensor], specs: Sequence[P]) -> torch.Tensor:
    """The sum of one number for each leaf over all leaves, their shards and a pipeline's ranks.

    One all-reduce of a number for each distinct set of mesh axes that the specs mention, and one
    over the ranks of a pipeline.

    Args:
        numbers: 0-dim, of this rank's shard of each leaf; at least one.
        specs: of these leaves.
    """
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for number, spec in zip(numbers, specs, strict=True):
        axes = tuple(sorted(spec_axes(spec)))
        groups.setdefault(axes, []).append(number.to(numbers[0].device))
    sums = [
        psum(torch.stack(each).sum(), axes) if axes else torch.stack(each).sum()
        for axes, each in groups.items()
    ]
    return psum_stages(torch.stack(sums).sum())


def wholes(value: tree.Tree, defs: tree.Tree = None, specs: tree.Tree = None) -> list[WholeLeaf]:
    """The `WholeLeaf` of every tensor in `value`.

    Args:
        value: parameters, gradients or updates, on a mesh this rank's shards.
        defs: the parameters' `ParamDef`s, or anything with global shapes; None: what is seen is
            whole, and nothing is stacked.
        specs: how `value` is sharded, a prefix tree of `P`; None: not at all.

    Raises:
        ValueError: some tensor has not the shape of a shard of its def; all are listed.
    """
    leaves, paths = tree.leaves(value), tree.paths(value)
    known = leaves
    if defs is not None:
        wanted = "a ParamDef, or containers"
        known = tree.broadcast_prefix(defs, value, what="the defs", wanted=wanted)
    flat = leaf_specs(specs, value, "an optimizer that looks at whole parameters")
    rows = zip(paths, known, flat, strict=True)
    found = [WholeLeaf(path, tuple(d.shape), num_stacked(d), spec) for path, d, spec in rows]
    rows = [_unlike(one, x) for one, x in zip(found, leaves, strict=True)]
    raise_problems(
        "parameters that are looked at as a whole are not what their defs and specs say",
        filter(None, rows),
    )
    return found


def _unlike(whole: WholeLeaf, x: torch.Tensor) -> Problem | None:
    """The problem of taking x for a shard, which may be padded; None: there is none."""
    own = list(whole.own)
    sizes = [-(-whole.shape[dim] // axis_size(whole.axes([dim]))) for dim in own]
    if x.dim() == len(whole.shape) and [x.shape[dim] for dim in own] == sizes:
        return None
    return Problem(
        whole.path or "(root)",
        f"shape {tuple(x.shape)}",
        f"{(*x.shape[: whole.num_stacked], *sizes)}, of the global {whole.shape} under "
        f"{whole.spec}",
        "give the optimizer the parameters' defs and specs (under ZeRO, those of the shards); what "
        "ranks of a pipeline divide (vocab_over_pp) needs an elementwise optimizer",
    )


def mean(x: torch.Tensor, dims: Sequence[int], whole: WholeLeaf) -> torch.Tensor:
    """The mean of x over these dims, which keep size 1, over all shards.

    One all-reduce of the result where they are sharded. Padding is zero, and not counted.
    """
    summed = x.sum(tuple(dims), keepdim=True) if dims else x
    axes = whole.axes(dims)
    return (psum(summed, axes) if axes else summed) / whole.count(dims)


def root_mean_square(x: torch.Tensor, whole: WholeLeaf) -> torch.Tensor:
    """``sqrt(mean(x^2))`` of every one of the stacked parameters, [*stacked, 1, ...]."""
    return mean(x.square(), list(whole.own), whole).sqrt()


def unpadded(x: torch.Tensor, dim: int, whole: WholeLeaf) -> torch.Tensor:
    """x with zeros in the padding of a dim.

    Args:
        x: like this rank's shard of the parameter, but other dims may have size 1.
        dim: one of its dims.
        whole: the parameter.
    """
    axes, size = whole.axes([dim]), whole.shape[dim]
    if x.shape[dim] * axis_size(axes) == size:
        return x
    ones = take(torch.ones(size, dtype=x.dtype, device=x.device), (DimCut(-1, axes),))
    return x * ones.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def without(spec: P, dims: Iterable[int]) -> P:
    """`spec` without these dims."""
    gone = set(dims)
    return P(*(entry for dim, entry in enumerate(spec) if dim not in gone))


def flat_specs(param_specs: tree.Tree, like: tree.Tree) -> list[P | None]:
    """One spec for every leaf of `like`, of a prefix tree."""
    return tree.broadcast_prefix(param_specs, like, is_leaf=is_spec, what="specs", wanted="a P")
