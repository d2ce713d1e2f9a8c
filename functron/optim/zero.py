"""ZeRO (Rajbhandari et al. 2020): optimizer state divided among ranks that hold the same values.

A parameter that data-parallel ranks hold whole is updated by all of them alike, each with a copy of
the optimizer's state. Under `zero` each rank has the state of one part, updates that part with its
part of the gradient, and gathers the parameter from all parts.

The parts are shards: the parameter's spec with the data axes that it does not mention appended to
one dim (`shard_specs`). So a leaf of the state still has the parameter's shape and dims, a
checkpoint reads it like the parameter, and an optimizer that needs matrices sees parts of matrices.
Any shape works, as with the flat buffers of other implementations: where no dim divides, one is
padded, with zeros that no norm, update or number ever sees (`functron.spmd.shards`).

Stage 1 is `zero`; stage 2 reduces gradients to the same shards in backward already
(``make_step(..., scatter=True)``); in stage 3 the parameters' own specs mention the data axes, and
nothing here is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import public, refuse
from functron.ops.foreach import foreach_
from functron.optim.transformation import GradientTransformation, apply_updates, applying
from functron.program.recorder import active
from functron.spmd.mesh import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.spmd.shards import as_entry, cut_tree, cuts_between, join, padded_shape, take
from functron.spmd.spec import P, entry_axes, is_spec, local_shape, spec_axes

STACKED = "layers"
"""The logical axis along which layers are stacked; never cut, so that each layer is by itself."""


def shard_specs(
    defs: tree.Tree,
    specs: tree.Tree,
    mesh: Mesh | BoundMesh,
    axes: Sequence[str] = (*DATA_AXES, *CONTEXT_AXES),
) -> tree.Tree:
    """The specs of every rank's part of the parameters: their own, cut over data and context axes.

    The axes of `axes` that the mesh has and a leaf's spec does not mention are appended, minor, to
    one of its dims: the first that they divide, or else the one that needs the least padding. Never
    a dim of stacked layers. Leaves without a dim to cut stay replicated.

    Args:
        defs: the parameters' `ParamDef`s; or anything with shapes, where no dim is of layers.
        specs: the parameters' specs, a prefix tree.
        mesh: the ranks.
        axes: that split the batch, by samples or by tokens, major to minor.

    Raises:
        ValueError: a shape cannot be split as its spec says; all offenders are listed.
    """
    leaves, structure = tree.flatten(defs)
    flat = tree.broadcast_prefix(specs, defs, is_leaf=is_spec, what="specs", wanted="a P")
    found = [_shard(leaf, spec, mesh, axes) for leaf, spec in zip(leaves, flat, strict=True)]
    return tree.unflatten(structure, found)


def _shard(leaf: Any, spec: P, mesh: Mesh | BoundMesh, axes: Sequence[str]) -> P:
    missing = tuple(name for name in axes if mesh[name] > 1 and name not in spec_axes(spec))
    names = getattr(leaf, "axes", (None,) * len(leaf.shape))
    dims = [dim for dim, name in enumerate(names) if name != STACKED]
    if not missing or not dims:
        return spec
    local = local_shape(leaf.shape, spec, mesh)
    parts = math.prod(mesh[name] for name in missing)
    # padded size over size; the first of the best, as its parts lie together in memory
    best = min(dims, key=lambda dim: -(-local[dim] // parts) * parts / max(local[dim], 1))
    entries = [*spec, *itertools.repeat(None, len(leaf.shape) - len(spec))]
    entries[best] = as_entry([*entry_axes(entries[best]), *missing])
    return P(*entries)


def padded_shapes(defs: tree.Tree, shards: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """The global shape of every parameter's parts together: the parameter's, and the padding.

    What a leaf of the state that is like a parameter has on a simulated mesh. A checkpoint holds no
    padding: `functron.spmd.shards` has `unpad` and `pad`.
    """
    return tree.map(lambda d, shard: padded_shape(d.shape, shard, mesh), defs, _full(shards, defs))


@public
def zero(
    inner: GradientTransformation, specs: tree.Tree = None, shards: tree.Tree = None
) -> GradientTransformation:
    """`inner` on this rank's part of the parameters only: ZeRO stage 1.

    Its gradients have the specs `shards` (`grad_specs`), as has `inner`'s state. Updates and
    parameters come back whole: one all-gather per leaf and axis, of the parameter's bytes in its
    dtype (of the updates' for `update`). The numbers are those of `inner` alone.

    Inside, `inner` sees shards, and is bound to their specs, as is what is chained before this.
    `init` needs the mesh, so it runs inside a mapped program, as `functron.init_state` does.

    Args:
        inner: elementwise, or aware of how its leaves are sharded (`muon`).
        specs: the parameters' specs; None: those of `bind`.
        shards: those of `shard_specs`.

    Raises:
        ValueError: no `shards`; (when called) they do not append axes to `specs`, or there are none
            of these.
    """
    if shards is None:
        fix = "pass optim.shard_specs(defs, specs, mesh)"
        refuse("zero", "shards", "None", "the specs of every rank's part", fix)
    given, inner = inner, inner.bind(shards)

    def with_specs(param_specs, copies):
        known = param_specs if specs is None else specs
        return zero(given.bind(shards, copies), known, shards)

    def cut(params: tree.Tree) -> list:
        if specs is None:
            fix = "pass specs to zero, or bind them: optimizer.bind(specs), as make_step does"
            refuse("zero", "specs", "None", "the parameters' specs", fix)
        return cut_tree(specs, shards, params)

    def parts(params: tree.Tree) -> tree.Tree:
        leaves, structure = tree.flatten(params)
        taken = [take(leaf, cuts) for leaf, cuts in zip(leaves, cut(params), strict=True)]
        return tree.unflatten(structure, taken)

    def whole(value: tree.Tree, params: tree.Tree) -> tree.Tree:
        rows = zip(tree.leaves(value), cut(params), tree.leaves(params), strict=True)
        joined = [join(leaf, cuts, like.shape) for leaf, cuts, like in rows]
        return tree.unflatten(tree.structure(params), joined)

    def extended(param_specs: tree.Tree) -> tree.Tree:
        return _extend(param_specs, param_specs if specs is None else specs, shards)

    def init(params):
        # copies, lest state made like a view has its strides, or is one
        own = tree.map(
            lambda part: part.clone(memory_format=torch.contiguous_format), parts(params)
        )
        return inner.init(own)

    def run(method: Any, updates, state, params, **norm):
        if params is None:
            raise ValueError(
                "zero: got params=None; wanted the parameters, whose parts are updated; fix: call "
                "update(grads, state, params)"
            )
        updates, state = method(updates, state, parts(params), **norm)
        return whole(updates, params), state

    def step_(grads, state, params, **norm):
        mine = parts(params)
        if active() is not None:  # a traced program is pure
            updates, state = inner.update(grads, state, mine, **norm)
            return whole(apply_updates(mine, updates), params), state
        mine, state = inner.step_(grads, state, mine, **norm)
        return written(mine, params), state

    def written(mine: tree.Tree, params: tree.Tree) -> tree.Tree:
        """`params`, overwritten by what all ranks' parts are now."""
        rows = zip(
            tree.paths(params), tree.leaves(params), tree.leaves(mine), cut(params), strict=True
        )
        for path, param, part, cuts in rows:
            if cuts:  # one after another, so that one leaf at a time is there twice
                _overwrite(param, join(part, cuts, param.shape), path)
        return params

    def one_pass(grads, state, params, fusion):
        if inner.one_pass is None or fusion.masters is not None or fusion.rounding is not None:
            return None  # masters and rounding are of whole parameters
        mine = parts(params)
        together = inner.one_pass(grads, state, mine, fusion)
        if together is None:
            return None

        def run():
            new, inner_state = together()
            return written(new, params), inner_state

        return run

    wrap = applying(run)
    return GradientTransformation(
        init,
        wrap(inner.update),
        lambda param_specs: inner.specs(extended(param_specs)),
        wrap(inner.update_),
        step_,
        lambda param_specs: inner.grad_specs(extended(param_specs)),
        one_pass=one_pass,
        norm=inner.norm,
        with_specs=with_specs if specs is None or given.with_specs is not None else None,
    )


def _overwrite(param: torch.Tensor, value: torch.Tensor, path: str) -> None:
    foreach_(torch._foreach_copy_, {"params": [param]}, {"updates": [value]}, paths=lambda: [path])


def _full(specs: tree.Tree, like: tree.Tree) -> tree.Tree:
    flat = tree.broadcast_prefix(specs, like, is_leaf=is_spec, what="specs", wanted="a P")
    return tree.unflatten(tree.structure(like), flat)


def _extend(given: tree.Tree, specs: tree.Tree, shards: tree.Tree) -> tree.Tree:
    """`given` with the axes appended that `shards` appends to `specs`.

    `given` may split dims that `specs` does not, by the ranks of a pipeline: between steps they
    hold parts of what the program sees.
    """
    flat, structure = tree.flatten(shards, is_spec)
    like = tree.unflatten(structure, [0] * len(flat))
    now, before = (tree.leaves(_full(part, like), is_spec) for part in (given, specs))
    rows = zip(now, before, flat, strict=True)
    return tree.unflatten(structure, [_appended(*row) for row in rows])


def _appended(given: P | None, spec: P, shard: P) -> P | None:
    if given is None:  # another transformation's, as in `where`
        return None
    num_dims = max(len(given), len(spec), len(shard))
    entries = [*given, *itertools.repeat(None, num_dims - len(given))]
    for dim, axes in cuts_between(spec, shard, num_dims):
        entries[dim] = as_entry([*entry_axes(entries[dim]), *axes])
    return P(*entries)
