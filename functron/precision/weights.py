"""Quantised weights ("codes"): made once per step, and gathered in place of the weights.

Without them `functron.precision.matmul` quantises a weight in every forward and backward of every
microbatch, and fully sharded parameters are gathered in their own dtype. An `encoder` quantises
this rank's shards before the first microbatch. Results have the same bits, as ranks agree on the
scales that they share, and no block spans two shards. Bytes that are gathered:

| format of w in fprop and dgrad     | codes | bytes per weight, of bfloat16's 2      |
|------------------------------------|-------|----------------------------------------|
| tensor, 128x128                    | one   | 1                                      |
| 16x16 (NVFP4)                      | one   | 0.5, and 1/256 of scales               |
| row, 1x128, 1x32                   | two   | 1 where each is read, and scales       |
| 1x16                               | two   | 0.5 likewise                           |

There are two codes where scales lie along the summed dim, as fprop sums over inputs and dgrad over
outputs. Of two codes forward (also when recomputed) gathers one and backward the other; where
parameters stay gathered until backward, or for a step, both are gathered: 2 bytes, no saving.
During a step a rank holds the codes of its shards beside the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem
from functron.core.scopes import named_scope
from functron.core.typing import Tensor
from functron.ops.operations import AUTO, Kernels
from functron.ops.quantise import (
    E2M1,
    Quantised,
    QuantisedFormat,
    copied,
    magnitude,
    quantise,
    undivided,
)
from functron.precision.recipe import Contraction, Recipe, Scaling
from functron.spmd import collectives as lax
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.params import ParamDef
from functron.spmd.spec import P, dim_axes, is_spec, is_uneven, local_shape
from functron.transforms.parameter_gather import AxisSplit, Encoded, MatrixCode

_SQUARES = ("tensor", "128x128", "16x16")


def serves_both(recipe: Recipe) -> bool:
    """Whether fprop and dgrad read the same code of a weight."""
    fprop, dgrad = recipe.fprop, recipe.dgrad
    assert fprop is not None
    assert dgrad is not None
    return fprop.right == dgrad.right and fprop.right.blocks in _SQUARES


def encoder(
    recipe: Recipe, defs: tree.Tree, *, kernels: Kernels = AUTO
) -> Callable[[tree.Tree, tree.Tree], tree.Tree]:
    """``(params, specs)`` to their codes, a per-rank program without a derivative.

    Codes are a tree like the parameters, for `functron.transforms.parameter_gather`: `Encoded`
    where there is a ``ParamDef.matrix``, None elsewhere. Collectives: with ``scaling=global``, one
    pmax for each set of axes that split what shares a scale, of 4 bytes for each scale of tensors
    and rows; with ``scaling=local``, over the axes of fully sharded parameters alone.

    Args:
        recipe: one without `problems_of`.
        defs: the parameters' `ParamDef`s.
        kernels: as in `functron.precision.matmul`.
    """
    emulate = kernels.wants_reference("scaled_matmul")

    def encode(params: tree.Tree, specs: tree.Tree) -> tree.Tree:
        leaves, structure = tree.flatten(params)
        rows = zip(leaves, tree.leaves(defs), tree.leaves(specs, is_spec), strict=True)
        found = [list(_codes(recipe, *row)) if row[1].matrix else [] for row in rows]
        codes = [code for row in found for code in row]  # in the order of leaves
        parts = [(code.magnitude, code.axes) for code in codes if code.magnitude is not None]
        most = iter(agreed(parts, "global"))

        def made(code: _WeightCode) -> Quantised:
            amax = None if code.magnitude is None else next(most)
            return quantise(code.matrix, code.format, amax, emulate=emulate)

        rows = [tuple(_store_code(code.turned, made(code)) for code in row) for row in found]
        return tree.unflatten(structure, [Encoded(None, row) if row else None for row in rows])

    return encode


class _WeightCode(NamedTuple):
    """A weight, or its transpose, that is to be quantised.

    Attributes:
        matrix: ``[..., rows, summed]``.
        format: of the code.
        turned: whether its rows are the weight's outputs.
        magnitude: of this rank's shard.
        axes: the mesh axes over which ranks agree on the magnitude.
    """

    matrix: Tensor
    format: QuantisedFormat
    turned: bool
    magnitude: Tensor | None
    axes: tuple[str, ...]


def _codes(recipe: Recipe, leaf: Tensor, d: ParamDef, spec: P) -> Iterator[_WeightCode]:
    inputs, outputs = d.matrix
    first = leaf.dim() - inputs - outputs
    matrix = lax.stop_gradient(leaf).flatten(first + inputs).flatten(first, first + inputs - 1)
    by_inputs, by_outputs = _axes(d, spec)
    assert recipe.fprop is not None
    assert recipe.dgrad is not None
    wanted = [(recipe.dgrad.right, False, by_outputs)]
    if not serves_both(recipe):
        wanted.insert(0, (recipe.fprop.right, True, by_inputs))
    for form, over, summed in wanted:
        own = matrix.mT if over else matrix
        axes = (*by_inputs, *by_outputs) if form.shared == "tensor" else summed
        if recipe.scaling == "local":
            axes = tuple(name for name in axes if name in FSDP_AXES)
        yield _WeightCode(own, form, over, magnitude(own, form), axes)


def _axes(d: ParamDef, spec: P) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that split inputs, and those that split outputs."""
    split = dim_axes(spec, len(d.shape))
    inputs, outputs = d.matrix
    ends = len(split) - inputs - outputs, len(split) - outputs
    parts = split[ends[0] : ends[1]], split[ends[1] :]
    by_inputs, by_outputs = (tuple(name for dim in part for name in dim) for part in parts)
    return by_inputs, by_outputs


def agreed(parts: Sequence[tuple[Tensor, tuple[str, ...]]], scaling: Scaling) -> list[Tensor]:
    """The maxima of magnitudes over the ranks of their axes: one pmax for all with the same."""
    found = [value for value, _ in parts]
    for axes in dict.fromkeys(axes for _, axes in parts) if scaling == "global" else ():
        if lax.axis_size(axes) == 1:
            continue
        at = [i for i, (_, own) in enumerate(parts) if own == axes]
        flat = torch.cat([found[i].reshape(-1) for i in at])
        whole = lax.pmax(flat, axes).split([found[i].numel() for i in at])
        for i, part in zip(at, whole, strict=True):
            found[i] = part.reshape(found[i].shape)
    return found


# --- codes as bits, and back


def _bits(x: Tensor) -> Tensor:
    """x's bits as integers, which collectives send unchanged and nothing differentiates."""
    return copied(x, torch.int32 if x.dtype == torch.float32 else torch.uint8)


def _store_code(over: bool, x: Quantised) -> MatrixCode:
    """A code as a `MatrixCode`, of matrices that lie as the weight does."""
    values, scales = (_bits(part).mT if over else _bits(part) for part in (x.values, x.scales))
    parts: dict[str, tuple[Tensor, ...]] = {"both": (values,), "shared": ()}
    where = _place(x.blocks, over)
    parts[where] = (*parts.get(where, ()), scales)
    if x.whole is not None:
        parts["shared"] = (_bits(x.whole),)
    return MatrixCode(**parts)


def _place(blocks: str, over: bool) -> str:
    """The field of a `MatrixCode` that has the scales."""
    return {"tensor": "shared", "row": "columns" if over else "rows"}.get(blocks, "both")


class Codes(NamedTuple):
    """The operands of a product of an `Encoded`, beside the weight its gradient is of."""

    made: tuple[MatrixCode, ...]
    split: AxisSplit = ()

    def read(self, recipe: Recipe, number: int) -> Quantised:
        """The code for product `number`: ``[..., outputs, inputs]`` of fprop, 0, or the transpose.

        Collectives: all-gathers of the code, if `split` names axes.
        """
        once = serves_both(recipe)
        with named_scope("gather"):
            code = self.made[0 if once else number].gather(self.split)
        part = recipe.dgrad if once or number else recipe.fprop
        assert part is not None
        form, over = part.right, number == 0
        where = _place(form.blocks, over)
        values, scales = code.both[0], getattr(code, where)[int(where == "both")]
        if over and not once:  # it was made of the transpose
            values, scales, over = values.mT, scales.mT, False
        kind = torch.float32 if scales.dtype == torch.int32 else form.scale_dtype
        two_levels = form.dtype == E2M1 and form.shared
        whole = copied(code.shared[0], torch.float32) if two_levels else None
        values, scales = copied(values, form.dtype, turn=over), copied(scales, kind, turn=over)
        return Quantised(values, scales, form.blocks, whole)


# --- weights that cannot be gathered as codes


def problems_of(
    recipe: Recipe, defs: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh
) -> Iterator[Problem]:
    """Why weights cannot be gathered as codes: problems of the recipe, and of how they are sharded.

    Args:
        recipe: of the products.
        defs: of all parameters.
        specs: theirs, one each.
        mesh: the ranks.
    """
    wrong = list(_recipe_problems(recipe))
    yield from wrong
    rows = zip(tree.paths(defs), tree.leaves(defs), tree.leaves(specs, is_spec), strict=True)
    for path, d, spec in rows:
        if not d.matrix or wrong:
            continue
        if d.pieces:
            fix = "set gpt.fused_projections to false"
            yield Problem(path, "several matrices in one", "one each, with its own scales", fix)
            continue
        yield from _split_problems(recipe, path, d, spec, mesh)


def _recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.scaling == "delayed":
        fix = "take scaling=global, or gather weights as they are"
        yield Problem("scaling", "delayed", "scales of the weights that are gathered", fix)
    for name in ("fprop", "dgrad"):
        part: Contraction | None = getattr(recipe, name)
        fix = "take another recipe, or gather weights as they are"
        if part is None:
            yield Problem(name, "high", "a product that reads w in codes", fix)
        elif part.hadamard or part.right.stochastic:
            yield Problem(name, str(part), "w rounded to nearest, as it is", fix)


def _split_problems(
    recipe: Recipe, path: str, d: ParamDef, spec: P, mesh: Mesh | BoundMesh
) -> Iterator[Problem]:
    """Shards of a weight that blocks do not divide, or that are not runs of rows or columns.

    Blocks of 128 may be incomplete along dims that are whole on every rank.
    """
    inputs, outputs = d.matrix
    if is_uneven(spec):
        fix = "pad the dim in the model's config, or gather weights as they are"
        yield Problem(path, f"{spec}", "axes that divide what they split", fix)
        return
    local = local_shape(d.shape, spec, mesh)
    first = len(local) - inputs - outputs
    sizes, split = local[first:], dim_axes(spec, len(local))[first:]
    names = {name for name in FSDP_AXES if mesh[name] > 1}
    for dim, axes in enumerate(split):
        if names.intersection(axes) and dim not in (0, inputs):
            wanted = f"the first dim of inputs or outputs for {', '.join(sorted(names))}"
            yield Problem(path, f"{spec}", wanted, "give that dim another rule")
    sides = (
        ("inputs", math.prod(sizes[:inputs]), split[:inputs]),
        ("outputs", math.prod(sizes[inputs:]), split[inputs:]),
    )
    found: dict[tuple, Problem] = {}  # fprop and dgrad may want the same
    for number, part in enumerate((recipe.fprop, recipe.dgrad)):
        assert part is not None
        along = part.right.block if number else part.right.block[::-1]
        for block, (name, size, axes) in zip(along, sides, strict=True):
            over = ", ".join(f"{a}={mesh[a]}" for dim in axes for a in dim if mesh[a] > 1)
            if size % block and (over or part.right.complete):
                got, wanted, fix = undivided(size, block, str(part.right))
                fix += f" on every rank: split {over or 'it'} over fewer, or gather w as it is"
                found[name, block] = Problem(f"{path}, {name}", got, wanted, fix)
    yield from found.values()
