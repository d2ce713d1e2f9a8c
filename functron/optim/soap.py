"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioner.

"SOAP: Improving and Stabilizing Shampoo using Adam", https://arxiv.org/abs/2409.11321. For the
matrices of hidden layers, as in `muon`; `soap` leaves all other parameters to AdamW. Its state
belongs to whole matrices. Sharded gradients (tensor parallelism, FSDP, ZeRO) are gathered, or
exchanged so that each rank has some whole matrices of a stack and their state. (Rejected:
preconditioners of the shards, as in distributed Shampoo: no exchange, but numbers depend on the
mesh.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import public, raise_problems
from functron.optim.adam import adamw
from functron.optim.masking import Mask, decoupled, where
from functron.optim.muon import Matrix, matrix_cuts
from functron.optim.schedules import LearningRate, new_count
from functron.optim.transformation import (
    GradientTransformation,
    bindable,
    least_problems,
    map_to_trees,
    share_problems,
    transformation,
)
from functron.optim.zero import flat_specs, leaf_specs
from functron.program.recorder import readable
from functron.spmd.axes import axis_size
from functron.spmd.collectives import all_to_all
from functron.spmd.spec import Cuts, P, as_entry, dim_axes, fill, join, take, trim


class ScaleBySoapState(NamedTuple):
    """The state of SOAP, as matrices: [*stacked, inputs, outputs]; unstacked ones have a leading 1.

    Float32 at least.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients.
        nu: running mean of the squared gradients, in the bases.
        left: running mean of G G^T, [*stacked, inputs, inputs]; None where that is too large.
        right: of G^T G, [*stacked, outputs, outputs], likewise.
        left_basis: approximate eigenvectors of `left`, as columns.
        right_basis: of `right`.
    """

    count: Any
    mu: tree.Tree
    nu: tree.Tree
    left: tree.Tree
    right: tree.Tree
    left_basis: tree.Tree
    right_basis: tree.Tree


@public
@bindable
def scale_by_soap(
    matrices: tree.Tree,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    precondition_decay: float | None = None,
    frequency: int = 10,
    max_dim: int = 10000,
    specs: tree.Tree = None,
    distributed: bool = True,
) -> GradientTransformation:
    """Adam's updates, computed in a slowly changing basis: algorithm 3 of the paper.

    With ``G' = Ql^T G Qr`` and M' likewise of the mean of gradients, updates are ``Ql (M' /
    (sqrt(nu) + eps)) Qr^T sqrt(1 - b2^t) / (1 - b1^t)``, where nu is the running mean of G'^2. Then
    ``left = b left + (1 - b) G G^T`` and right likewise. Every `frequency` updates the bases take a
    step of the power iteration, orthogonalised by QR, and nu is permuted alike. As in the authors'
    code the first update is 0: it only makes the bases, by an eigendecomposition.

    If a first gradient is rank-deficient, rounding chooses the basis of its null space in the
    authors' code; here it does not depend on rounding. A traced or compiled step cannot know which
    update it is, and computes eigenvectors and QR in every one.

    Collectives: for each sharded leaf two all-to-alls of the local bytes if `distributed`, else one
    all-gather of the whole bytes per axis.

    Args:
        matrices: a `Matrix` for every leaf, a prefix tree; see `matrices`.
        b1, b2: decays of the means of gradients and of squared gradients, per update.
        eps: added to the root.
        precondition_decay: decay of `left` and `right`, per update; None: `b2`.
        frequency: number of updates between two changes of the bases.
        max_dim: larger sides of a matrix are not preconditioned.
        specs: how the leaves are sharded, a prefix tree; None: from `bind`.
        distributed: whether each rank computes, and keeps the state of, some whole matrices of a
            sharded stack. False: every rank does so for all.

    Raises:
        ValueError: decays that are not in [0, 1), or a frequency or size below 1.
    """
    decay = b2 if precondition_decay is None else precondition_decay
    problems = share_problems({"b1": b1, "b2": b2, "precondition_decay": decay})
    problems += least_problems([("frequency", frequency, 1), ("max_dim", max_dim, 1)])
    raise_problems("scale_by_soap", problems)

    def layouts_of(value: tree.Tree) -> list[_SoapLayout]:
        shapes = tree.broadcast_prefix(matrices, value, what="matrices", wanted="a Matrix")
        rows = zip(tree.leaves(value), leaf_specs(specs, value, "soap"), shapes, strict=True)
        return [_SoapLayout(x, spec, matrix, distributed) for x, spec, matrix in rows]

    def init(params):
        def start(p: torch.Tensor, layout: _SoapLayout) -> tuple:
            return _zeros(layout.gather(torch.zeros_like(p)), max_dim)

        parts = map_to_trees(6, start, params, layouts_of(params))
        return ScaleBySoapState(new_count(params), *parts)

    def update(updates, state, params=None):
        first = _read_flag(state.count == 0)
        due = _read_flag((state.count % frequency == 0) & (state.count > 0))

        def one(g: torch.Tensor, layout: _SoapLayout, *parts: Any) -> tuple:
            moments, direction = _step(
                layout.gather(g).to(parts[0].dtype), ScaleBySoapState(None, *parts),
                (b1, b2, decay, eps), state.count, first, due,
            )  # fmt: skip
            return layout.give(direction.to(g.dtype)), *moments[1:]

        columns = [tree.same_structure(updates, part) for part in state[1:]]
        out, *new = map_to_trees(7, one, updates, layouts_of(updates), *columns)
        return out, ScaleBySoapState(state.count + 1, *new)

    def state_specs(param_specs):
        def one(matrix: Matrix | bool, spec: P | None) -> tuple:
            if spec is None or not isinstance(matrix, Matrix):
                return (None,) * 6
            entry = _stack_spec(spec, matrix, distributed)
            left = entry if matrix.inputs <= max_dim else None
            right = entry if matrix.outputs <= max_dim else None
            return entry, entry, left, right, left, right

        parts = map_to_trees(6, one, matrices, flat_specs(param_specs, matrices))
        return ScaleBySoapState(P(), *parts)

    return transformation(init, update, state_specs)


def _read_flag(flag: torch.Tensor) -> bool | torch.Tensor:
    """The flag as a bool, where the program that runs may ask for it."""
    return bool(flag) if readable(flag) else flag


def _stack_spec(spec: P, matrix: Matrix, distributed: bool) -> P:
    """The spec of state of whole matrices: of the stacks, and of who has which matrices."""
    names = dim_axes(spec, matrix.num_batch + len(matrix.sizes or spec[matrix.num_batch :]))
    stacked = [list(axes) for axes in names[: matrix.num_batch]] or [[]]
    if distributed:
        stacked[0] += [name for axes in names[matrix.num_batch :] for name in axes]
    return P(*map(as_entry, stacked))


class _SoapLayout:
    """How a rank's part of a parameter becomes whole matrices, and the reverse."""

    def __init__(self, x: torch.Tensor, spec: P | None, matrix: Matrix, distributed: bool):
        self.matrix, self.distributed, self.shape = matrix, distributed, x.shape
        self.cuts: Cuts = matrix_cuts(spec or P(), x.dim(), matrix)
        sizes = list(matrix.sizes or x.shape[matrix.num_batch :])
        if not matrix.sizes:
            for dim, axes in self.cuts:
                sizes[dim] *= axis_size(axes)
        self.sizes = sizes
        self.names = tuple(name for _, axes in self.cuts for name in axes)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[*stacked, inputs, outputs]: all matrices, or those that are this rank's."""
        batch = self.shape[: self.matrix.num_batch]
        x = x if batch else x.unsqueeze(0)
        if not self.distributed or not self.cuts:
            x = join(x, self.cuts, (*(batch or (1,)), *self.sizes))
        else:
            x = fill(x, 0, self.names)
            for dim, axes in self.cuts:
                x = all_to_all(x, axes, 0, x.dim() + dim, tiled=True)
            for dim, axes in self.cuts:
                x = trim(x, dim, axes, self.sizes[dim])
        split = x.dim() - len(self.sizes) + self.matrix.num_inputs
        return x.flatten(split).flatten(split - self.matrix.num_inputs, split - 1)

    def give(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter, from what `gather` gives."""
        y = y.reshape(*y.shape[:-2], *self.sizes)
        if not self.distributed or not self.cuts:
            return take(y, self.cuts).reshape(self.shape)
        for dim, axes in self.cuts:
            y = fill(y, dim, axes)
        for dim, axes in reversed(self.cuts):
            y = all_to_all(y, axes, y.dim() + dim, 0, tiled=True)
        stack = self.shape[0] if self.matrix.num_batch else 1
        return trim(y, 0, self.names, stack).reshape(self.shape)


def _zeros(like: torch.Tensor, max_dim: int) -> tuple:
    """The state of matrices like these before the first update."""
    zeros = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    gram = lambda x: torch.zeros_like(x @ x.mT) if x.shape[-2] <= max_dim else None  # noqa: E731
    left, right = gram(zeros), gram(zeros.mT)
    copies = [None if x is None else torch.zeros_like(x) for x in (left, right)]
    return zeros, torch.zeros_like(zeros), left, right, *copies


def _step(g, state: ScaleBySoapState, decays, count, first, due) -> tuple[tuple, torch.Tensor]:
    """The state of one parameter after an update, and its direction."""
    b1, b2, decay, eps = decays
    bases = state.left_basis, state.right_basis
    steps = count.to(torch.float64).clamp(min=1)  # the first update is not one of Adam's
    correction = ((1 - b2**steps).sqrt() / (1 - b1**steps)).to(g.dtype)
    mu = b1 * state.mu + (1 - b1) * g
    nu = b2 * state.nu + (1 - b2) * _rotate_matrix(g, *bases).square()
    direction = _rotate_matrix(mu, *bases) / (nu.sqrt() + eps) * correction
    direction = _rotate_matrix(direction, *(None if q is None else q.mT for q in bases))
    kept = [
        None if before is None else decay * before + (1 - decay) * (x @ x.mT)
        for x, before in ((g, state.left), (g.mT, state.right))
    ]
    usual = state._replace(mu=mu, nu=nu, left=kept[0], right=kept[1])
    begun = lambda: (_start_bases(state, kept), torch.zeros_like(direction))  # noqa: E731
    turned = lambda: (_rotate_bases(usual), direction)  # noqa: E731
    return _choose(first, begun, lambda: _choose(due, turned, lambda: (usual, direction)))


def _choose(flag, chosen, other):
    if isinstance(flag, bool):
        return chosen() if flag else other()
    return tree.map(lambda a, b: torch.where(flag, a, b), chosen(), other())


def _rotate_matrix(x, left, right) -> torch.Tensor:
    """``left^T x right``; None is the identity."""
    x = x if left is None else left.mT @ x
    return x if right is None else x @ right


def _start_bases(before: ScaleBySoapState, grams: list) -> ScaleBySoapState:
    """The state after the first update: eigenvectors, those of large eigenvalues first."""
    left, right = (None if x is None else _eigenvectors(x) for x in grams)
    return before._replace(left=grams[0], right=grams[1], left_basis=left, right_basis=right)


def _eigenvectors(gram: torch.Tensor) -> torch.Tensor:
    """Eigenvectors as columns, those of the largest eigenvalues first.

    A first gradient is often rank-deficient, and any basis of its null space consists of
    eigenvectors: rounding would choose one, another on every mesh. The null space has those of a
    fixed matrix instead.
    """
    values, basis = torch.linalg.eigh(gram)
    size, numbers = gram.shape[-1], torch.finfo(gram.dtype)
    largest = values[..., -1:].clamp(min=numbers.tiny)
    null = (values <= 16 * size * numbers.eps * largest).to(gram.dtype)
    hidden = basis * null.unsqueeze(-2)
    distinct = 1 + torch.arange(size, device=gram.device, dtype=gram.dtype) / size
    below = hidden @ ((hidden.mT * distinct) @ hidden) @ hidden.mT
    seen = (basis * (values * (1 - null)).unsqueeze(-2)) @ basis.mT
    vectors = torch.linalg.eigh(seen - largest.unsqueeze(-1) * below)[1]
    return vectors.flip(-1).contiguous()


def _rotate_bases(state: ScaleBySoapState) -> ScaleBySoapState:
    """The state with its bases a step of the power iteration nearer to the eigenvectors."""
    nu, bases = state.nu, []
    sides = ((state.left, state.left_basis, -2), (state.right, state.right_basis, -1))
    for gram, basis, dim in sides:
        if gram is None:
            bases.append(None)
            continue
        turned = gram @ basis
        order = (basis * turned).sum(-2).sort(dim=-1, descending=True, stable=True).indices
        turned = turned.take_along_dim(order.unsqueeze(-2), -1)
        nu = nu.take_along_dim(order.unsqueeze(-1 if dim == -2 else -2), dim)
        bases.append(torch.linalg.qr(turned)[0].contiguous())
    return state._replace(nu=nu, left_basis=bases[0], right_basis=bases[1])


@public
def soap(
    learning_rate: LearningRate,
    matrices: tree.Tree,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask = None,
    *,
    precondition_decay: float | None = None,
    frequency: int = 10,
    max_dim: int = 10000,
    specs: tree.Tree = None,
    distributed: bool = True,
    others: GradientTransformation | None = None,
) -> GradientTransformation:
    """SOAP for matrices, and AdamW for the other parameters.

    Args:
        learning_rate, weight_decay, mask: as of `adamw`.
        matrices: for every parameter a `Matrix`, or False for AdamW's; see `matrices`.
        b1, b2, eps, precondition_decay, frequency, max_dim, specs, distributed: see
            `scale_by_soap`.
        others: for the other parameters; None: `adamw` with the same learning rate, decays and
            mask.

    Raises:
        ValueError: as `scale_by_soap`.
    """
    direction = scale_by_soap(
        matrices, b1, b2, eps, precondition_decay=precondition_decay, frequency=frequency,
        max_dim=max_dim, specs=specs, distributed=distributed,
    )  # fmt: skip
    hidden = decoupled(direction, learning_rate, weight_decay, mask)
    rest = others or adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    return where(tree.map(lambda matrix: matrix is not False, matrices), hidden, rest)
