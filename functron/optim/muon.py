"""Muon (Jordan et al. 2024): momentum whose matrices are orthogonalised by Newton-Schulz steps.

https://kellerjordan.github.io/posts/muon. For the matrices of hidden layers; `muon` leaves all
other parameters to AdamW. An update depends on a whole matrix: sharded ones (tensor parallelism,
FSDP, ZeRO) are gathered, or exchanged so that each rank has some whole matrices of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import tree
from functron.core.errors import Problem, nearest, public, raise_problems
from functron.ops.foreach import squares
from functron.optim.adam import adamw
from functron.optim.masking import Mask, decoupled, where
from functron.optim.schedules import LearningRate
from functron.optim.transformation import (
    GradientTransformation,
    bindable,
    share_problems,
    transformation,
)
from functron.optim.zero import leaf_specs, num_stacked
from functron.spmd.axes import axis_size
from functron.spmd.collectives import all_to_all
from functron.spmd.spec import Cuts, DimCut, P, dim_axes, join, take

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic: steepest at 0, and bounded, rather than convergent, near 1."""

Scale = Literal["adamw", "spectral"]
"""The factor of an orthogonalised matrix of r outputs and c inputs: with "adamw"
0.2 sqrt(max(r, c)), about the size of AdamW's updates, so that both share a learning rate and a
weight decay (Liu et al. 2025); with "spectral" sqrt(max(1, r / c)), Jordan's own."""

SCALES: Mapping[str, Callable[[float, float], float]] = {
    "adamw": lambda r, c: 0.2 * math.sqrt(max(r, c)),
    "spectral": lambda r, c: math.sqrt(max(1, r / c)),
}
"""Those factors, of outputs and inputs."""


@dataclass(frozen=True)
class Matrix:
    """How a parameter is read as matrices: ``[*batch, *inputs, *outputs]``.

    Attributes:
        num_batch: number of leading dims along which matrices are stacked.
        num_inputs: number of dims after these that are flattened to inputs; the rest are outputs.
        inputs, outputs: the products of their global sizes.
        sizes: the global sizes of the dims after `num_batch`, for optimizers that mind padding;
            empty: as seen.
        pieces: sizes, along the last dim but one, of several matrices that are joined in this one
            (`ParamDef.pieces`); empty: it is one matrix.
    """

    num_batch: int
    num_inputs: int
    inputs: int
    outputs: int
    sizes: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()


def matrices(defs: tree.Tree) -> tree.Tree:
    """For every parameter the `Matrix` that Muon updates it as, or False where AdamW does.

    Muon's are the weights of projections: parameters of stacked layers (logical axis "layers") that
    decay and have at least two dims besides "layers" and "expert". Embedding, unembedding,
    positions, norms and biases are AdamW's. Query, key and value, or gate and up, are separate
    matrices, each of all heads together, also where they are stored as one (`ParamDef.pieces`).
    With more than two dims, such as [embed, heads, head_dim], the dims on the other side of "embed"
    are flattened; without "embed" at either end, all but the first.
    """
    return tree.map(_matrix, defs)


def _matrix(d: Any) -> Matrix | Literal[False]:
    num_batch = num_stacked(d)
    names, sizes = d.axes[num_batch:], d.shape[num_batch:]
    if "layers" not in d.axes[:num_batch] or not d.decay or len(names) < 2:
        return False
    num_inputs = len(names) - 1 if names[-1] == "embed" and names[0] != "embed" else 1
    inputs, outputs = math.prod(sizes[:num_inputs]), math.prod(sizes[num_inputs:])
    pieces = tuple(size for _, size in d.pieces)
    return Matrix(num_batch, num_inputs, inputs, outputs, tuple(sizes), pieces)


class ScaleByMuonState(NamedTuple):
    """Muon's momentum.

    Attributes:
        momentum: running mean of the gradients, like the parameters.
    """

    momentum: tree.Tree


def newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Approximately U V^T of matrices x = U S V^T, [..., r, c]: singular values become 0.7 to 1.2.

    Three products of the smaller side per step, in the dtype of x. Rows and columns of zeros stay
    zero and change nothing else.
    """
    a, b, c = coefficients
    flipped = x.shape[-2] > x.shape[-1]
    x = x.mT if flipped else x
    # the largest singular value must be at most 1, and the Frobenius norm is no smaller
    x = x / (squares(x, x.dim() - 2)[..., None, None].sqrt().to(x.dtype) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if flipped else x


@public
@bindable
def scale_by_muon(
    matrices: tree.Tree,
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    scale: Scale = "adamw",
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    specs: tree.Tree = None,
    distributed: bool = False,
    dtype: torch.dtype | None = torch.bfloat16,
) -> GradientTransformation:
    """Updates that are the momentum, orthogonalised matrix by matrix and scaled.

    Args:
        matrices: a `Matrix` for every leaf, a prefix tree.
        momentum: decay of the running mean of gradients, per update.
        nesterov: Nesterov momentum.
        scale: see `Scale`.
        steps, coefficients, eps: see `newton_schulz`.
        specs: how the leaves are sharded, a prefix tree; None: from `bind`.
        distributed: whether each sharded matrix is computed on one rank: two all-to-alls of the
            local bytes, and 1/n of the arithmetic on each of n ranks (stacks are padded to a
            multiple of n). False: every rank computes all: one all-gather of the whole bytes per
            leaf and axis.
        dtype: of matrix products and communication; None: the leaves' own. The authors use
            bfloat16. float64 leaves stay float64.

    Raises:
        ValueError: an unknown `scale`, or a momentum that is not in [0, 1).
    """
    problems = []
    if scale not in SCALES:
        problems.append(Problem("scale", repr(scale), "one of its values", nearest(scale, SCALES)))
    problems += share_problems({"momentum": momentum})
    raise_problems("scale_by_muon", problems)

    def orthogonal(x: torch.Tensor, spec: P, matrix: Matrix) -> torch.Tensor:
        wide = dtype is None or x.dtype == torch.float64
        compute = _compute_exchanged if distributed else _compute_gathered
        cuts = matrix_cuts(spec, x.dim(), matrix)

        def each(whole: torch.Tensor, num_batch: int) -> torch.Tensor:
            split = num_batch + matrix.num_inputs
            flat = whole.flatten(split).flatten(num_batch, split - 1)
            return newton_schulz(flat, steps, coefficients, eps).reshape(whole.shape)

        def joined(whole: torch.Tensor, num_batch: int) -> torch.Tensor:
            # padding of shards comes last, and stays zero
            sizes = [*matrix.pieces, whole.shape[-2] - sum(matrix.pieces)]
            *found, rest = whole.split(sizes, -2)
            return torch.cat([*(each(one, num_batch) for one in found), rest], -2)

        y = compute(
            x if wide else x.to(dtype), cuts, joined if matrix.pieces else each, matrix.num_batch
        )
        return y.to(x.dtype) * _factor(SCALES[scale], x, cuts, matrix)

    def update(updates, state, params=None):
        new = tree.map(lambda g, m: m + (1 - momentum) * (g - m), updates, state.momentum)
        ahead = tree.map(lambda g, m: g + momentum * (m - g), updates, new) if nesterov else new
        shapes = tree.broadcast_prefix(matrices, updates, what="matrices", wanted="a Matrix")
        flat = leaf_specs(specs, updates, "muon")
        return tree.map_columns(orthogonal, ahead, flat, shapes), ScaleByMuonState(new)

    return transformation(
        init=lambda params: ScaleByMuonState(tree.map(torch.zeros_like, params)),
        update=update,
        specs=lambda param_specs: ScaleByMuonState(param_specs),
    )


@public
def muon(
    learning_rate: LearningRate,
    matrices: tree.Tree,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    mask: Mask = None,
    *,
    scale: Scale = "adamw",
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    specs: tree.Tree = None,
    distributed: bool = False,
    dtype: torch.dtype | None = torch.bfloat16,
    others: GradientTransformation | None = None,
) -> GradientTransformation:
    """Muon for matrices, and AdamW for the other parameters.

    Args:
        learning_rate, weight_decay, mask: as of `adamw`.
        matrices: for every parameter a `Matrix`, or False for AdamW's; see `matrices`.
        momentum, nesterov, scale, steps, coefficients, eps, specs, distributed, dtype: see
            `scale_by_muon`.
        others: for the other parameters; None: `adamw` with the same learning rate, decay and mask,
            and its defaults.

    Raises:
        ValueError: as `scale_by_muon`.
    """
    direction = scale_by_muon(
        matrices, momentum, nesterov, scale=scale, steps=steps, coefficients=coefficients,
        eps=eps, specs=specs, distributed=distributed, dtype=dtype,
    )  # fmt: skip
    hidden = decoupled(direction, learning_rate, weight_decay, mask)
    rest = others or adamw(learning_rate, weight_decay=weight_decay, mask=mask)
    return where(tree.map(lambda matrix: matrix is not False, matrices), hidden, rest)


def matrix_cuts(spec: P, num_dims: int, matrix: Matrix) -> Cuts:
    """How the matrices themselves are sharded, without the dims along which they are stacked."""
    rows = list(enumerate(dim_axes(spec, num_dims)))[matrix.num_batch :]
    return tuple(DimCut(dim - num_dims, axes) for dim, axes in rows if axis_size(axes) > 1)


def _factor(
    scale: Callable[[float, float], float], x: torch.Tensor, cuts: Cuts, matrix: Matrix
) -> float | torch.Tensor:
    """That of an orthogonalised matrix; of joined ones, each one's at its entries in x."""
    if not matrix.pieces:
        return scale(matrix.outputs, matrix.inputs)
    one = matrix.outputs // sum(matrix.pieces)
    columns = [x.new_full((n, 1), scale(n * one, matrix.inputs)) for n in matrix.pieces]
    return take(torch.cat(columns), tuple(cut for cut in cuts if cut.dim == -2))


def _compute_gathered(
    x: torch.Tensor, cuts: Cuts, compute: Callable, num_batch: int
) -> torch.Tensor:
    """This rank's part of `compute` of whole matrices, each of which every rank computes."""
    return take(compute(join(x, cuts), num_batch), cuts)


def _compute_exchanged(
    x: torch.Tensor, cuts: Cuts, compute: Callable, num_batch: int
) -> torch.Tensor:
    """The same, each matrix computed by one rank."""
    if not cuts:
        return compute(x, num_batch)
    stack = math.prod(x.shape[:num_batch])
    ranks = math.prod(axis_size(axes) for _, axes in cuts)
    y = x.reshape(stack, *x.shape[num_batch:])
    y = F.pad(y, [0, 0] * (y.dim() - 1) + [0, -stack % ranks])
    for dim, axes in cuts:
        y = all_to_all(y, axes, 0, y.dim() + dim, tiled=True)
    y = compute(y, 1)
    for dim, axes in reversed(cuts):
        y = all_to_all(y, axes, y.dim() + dim, 0, tiled=True)
    return y.narrow(0, 0, stack).reshape(x.shape)
