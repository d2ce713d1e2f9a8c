"""ParamDefs: what the parameters of a model are, before any exists.

A model's tree of defs is its single source of truth. Mapped over, it gives initial values, specs,
abstract shapes and counts. Values depend on the key and the leaf's path only, never on the mesh:
every rank draws its own shard's numbers from their global positions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional as F

from functron.core import random, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.random import Index
from functron.core.tables import shows_differences
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P, Rules, is_spec, local_shape, spans, validate

Initializer = Callable[[torch.Tensor, Sequence[int], torch.dtype, Index], torch.Tensor]
"""``(key, global shape, dtype, index)`` to the values at `index` (all of them where it is None).

One that has an attribute ``joint`` that is true is given the key of all parameters, such as where
these are made together; others have a key of their own, which depends on the path. One that has
``inputs``, 0 or 1, is of the matrix of a linear layer of a module: the dim of its inputs."""


class Width(NamedTuple):
    """How many times as wide a matrix is as in the model for which learning rates were chosen.

    Attributes:
        inputs: times as many numbers are summed for each output.
        outputs: times as many outputs.
    """

    inputs: float = 1.0
    outputs: float = 1.0


@shows_differences
@dataclass(frozen=True)
class ParamDef:
    """One parameter: its global shape, the logical name of each dim, and how it starts.

    >>> ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))
    ParamDef(shape=(8, 4), axes=('mlp', 'embed'), init=Normal(stddev=0.02))

    Attributes:
        axes: logical axis per dim (``"vocab"``, ``"embed"``, ``"heads"``, ``"mlp"``, ``"layers"``),
            None where no rule should ever split it.
        decay: whether weight decay applies (matrices yes, norms and biases no).
        balance: True for the biases that balance the load of experts (`nn.moe`), which are not
            weights: the gradient gives only a direction, and is no part of the gradients' norm.
        history: True for the statistics that quantised products keep from step to step
            (`functron.precision.history_def`), which are not weights: the gradient is this step's.
        width: relative to the base model whose learning rates are used (`models.mup`); optimizers
            divide learning rates by it (`optim.width_multiples`).
        pieces: of a fused parameter, the original ones in order: the name of each one's layer, in
            place of this one's, and its entries of the last dim but one, which no rule may split;
            see `pieces_of`. (): it is not fused.
        matrix: of a linear layer whose products `functron.nn.Matmul` computes, how many of the
            last dims are inputs, and how many are outputs; (): of no such layer.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    dtype: torch.dtype = torch.float32
    decay: bool = True
    balance: bool = False
    history: bool = False
    width: Width = field(default_factory=Width)
    pieces: tuple[tuple[str, int], ...] = ()
    matrix: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"ParamDef: got {len(self.axes)} logical axes {self.axes} for shape {self.shape}; "
                "wanted one per dim (None where there is none)"
            )
        count = sum(size for _, size in self.pieces)
        if self.pieces and (self.shape[-2:-1] != (count,) or self.axes[-2] is not None):
            raise ValueError(
                f"ParamDef: got pieces {self.pieces} for shape {self.shape} with axes {self.axes}; "
                "wanted as many entries in the last dim but one, with the axis None"
            )


class JoinedParam(NamedTuple):
    """One of several parameters that are joined in a leaf.

    Attributes:
        path: that it has alone.
        shape: likewise: its entries of the last dim but one are joined to the dim before, or are
            no dim where there is one entry.
        start: of its entries in the leaf.
    """

    path: str
    shape: tuple[int, ...]
    start: int
    size: int


JOINED = MappingProxyType({"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")})
"""Layers that may be joined, in order, in one: along the last dim but one of its parameters, in
which all but the first have one entry."""


def pieces_of(path: str, d: ParamDef) -> tuple[JoinedParam, ...]:
    """The parameters that are joined in the leaf at a path, in order; () where it is one."""
    *above, _, name = path.rsplit("/", 2) if d.pieces else (path, "")
    found, start = [], 0
    for layer, size in d.pieces:
        shape = (*d.shape[:-2], d.shape[-1])
        if size > 1:
            shape = (*d.shape[:-3], d.shape[-3] * size, d.shape[-1])
        found.append(JoinedParam("/".join([*above, layer, name]), shape, start, size))
        start += size
    return tuple(found)


def joined_params(defs: tree.Tree) -> dict[str, ParamDef]:
    """The parameters that are several in one leaf, by path."""
    return {path: d for path, d in tree.items(defs) if d.pieces}


@dataclass(frozen=True)
class Constant:
    """x = value."""

    value: float

    def __call__(self, key, shape, dtype, index=None) -> torch.Tensor:
        return torch.full(_shape_at(shape, index), self.value, dtype=dtype, device=key.device)


zeros, ones = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class Normal:
    """x ~ N(0, stddev^2), drawn in float32 at least and rounded to the dtype."""

    stddev: float

    def __call__(self, key, shape, dtype, index=None) -> torch.Tensor:
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        return random.normal(key, shape, drawn, index=index).mul_(self.stddev).to(dtype)


def _shape_at(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    rows = index if index is not None else (None,) * len(shape)
    return tuple(
        size if row is None else row.numel() for size, row in zip(shape, rows, strict=True)
    )


def stack(defs: tree.Tree, num_layers: int) -> tree.Tree:
    """The defs of `num_layers` copies, stacked on a leading dim with the logical axis "layers"."""
    return tree.map(
        lambda d: replace(d, shape=(num_layers, *d.shape), axes=("layers", *d.axes)), defs
    )


@public
def param_specs(defs: tree.Tree, rules: Rules) -> tree.Tree:
    """The spec of every parameter under `rules`.

    >>> defs = {"w": ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))}
    >>> ft.param_specs(defs, ft.Rules({"mlp": "tp"}))
    {'w': P('tp', None)}

    Raises:
        ValueError: the rules split one parameter twice by the same mesh axis.
        TypeError: leaves that are no `ParamDef`.
    """
    _check_defs(defs)
    return tree.map_with_path(lambda path, d: rules.spec(d.axes, path=path, shape=d.shape), defs)


def _check_defs(defs: tree.Tree) -> None:
    """Raise TypeError unless the leaves are `ParamDef`s."""
    rows = zip(tree.paths(defs), tree.leaves(defs), strict=True)
    fix = "such as gpt.defs(config), or ParamDef(shape, axes, init)"
    raise_problems(
        "these are no definitions of parameters",
        [
            Problem(f"defs/{path}" if path else "defs", type(leaf).__name__, "a ParamDef", fix)
            for path, leaf in rows
            if not isinstance(leaf, ParamDef)
        ],
        TypeError,
    )


@public
def abstract_params(defs: tree.Tree) -> tree.Tree:
    """The parameters as meta tensors: shapes and dtypes without memory, also for 405B.

    >>> defs = {"w": ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))}
    >>> ft.abstract_params(defs)["w"]
    tensor(..., device='meta', size=(8, 4))
    """
    return tree.map(lambda d: torch.empty(d.shape, dtype=d.dtype, device="meta"), defs)


def decay_mask(defs: tree.Tree) -> tree.Tree:
    """True where weight decay applies."""
    return tree.map(lambda d: d.decay, defs)


def weight_mask(defs: tree.Tree) -> tree.Tree:
    """True for weights, False for what balances the load of experts, and for histories."""
    return tree.map(lambda d: not (d.balance or d.history), defs)


def history_mask(defs: tree.Tree) -> tree.Tree:
    """True for the histories of quantised products."""
    return tree.map(lambda d: d.history, defs)


@public
def num_params(defs: tree.Tree) -> int:
    """The number of parameters.

    >>> defs = {"w": ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))}
    >>> ft.num_params(defs)
    32
    """
    return sum(math.prod(d.shape) for d in tree.leaves(defs))


@public
def init_params(
    key: torch.Tensor,
    defs: tree.Tree,
    specs: tree.Tree | None = None,
    mesh: Mesh | BoundMesh | None = None,
) -> tree.Tree:
    """The initial parameters: bitwise the same numbers on every mesh.

    Each leaf's key is `key` folded with a checksum of its path, so adding a parameter does not
    change the others. On a bound mesh only this rank's shards are generated.

    `functron.init_state` of the same key has other ones: those of ``random.split(key)[0]``.

    >>> defs = {"w": ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))}
    >>> ft.init_params(ft.random.key(0), defs)["w"].shape
    torch.Size([8, 4])

    Args:
        key: a key of `functron.random`; values are made on its device.
        specs: a prefix tree of specs; needed with a bound mesh.
        mesh: where the parameters will live; None or a simulated mesh gives global values.

    Raises:
        ValueError: a shape cannot be split as its spec says; all offenders are listed.
    """
    _check_defs(defs)
    if mesh is not None and specs is not None:
        validate(abstract_params(defs), specs, mesh, what="params")
    if isinstance(mesh, BoundMesh) and specs is None:
        wanted, fix = "the parameters' specs", "pass param_specs(defs, rules)"
        refuse("init_params on a bound mesh", "specs", None, wanted, fix)
    known = P() if specs is None else specs
    flat = tree.broadcast_prefix(known, defs, is_leaf=is_spec, what="specs")
    leaves, structure = tree.flatten(defs)
    rows = zip(tree.paths(defs), leaves, flat, strict=True)
    return tree.unflatten(structure, [_init_one(key, *row, mesh) for row in rows])


def _init_one(key, path: str, d: ParamDef, spec: P, mesh) -> torch.Tensor:
    index = None
    bound = isinstance(mesh, BoundMesh)
    sizes = local_shape(d.shape, spec, mesh) if bound else d.shape
    if random.is_abstract(key):
        return torch.empty(sizes, dtype=d.dtype, device=key.device)
    if bound:
        mine = spans(d.shape, spec, mesh, mesh.coordinate)
        index = [
            None if end - start == whole else torch.arange(start, end, device=key.device)
            for (start, end, _), whole in zip(mine, d.shape, strict=True)
        ]
        index = None if all(row is None for row in index) else index
    drawn = _draw(key, path, d, index)
    if drawn.shape == torch.Size(sizes):
        return drawn
    rows = zip(reversed(sizes), reversed(drawn.shape), strict=True)
    return F.pad(drawn, [n for size, real in rows for n in (0, size - real)])


def _draw(key: torch.Tensor, path: str, d: ParamDef, index: Index) -> torch.Tensor:
    """The values of a parameter at `index`."""
    if not d.pieces:
        own = key if getattr(d.init, "joint", False) else _key_at(key, path)
        return d.init(own, d.shape, d.dtype, index)
    like = _shape_at(d.shape, index)
    drawn = [  # the numbers that it has alone
        d.init(_key_at(key, one.path), one.shape, d.dtype, _index_alone(index, one)).reshape(
            *like[:-2], one.size, like[-1]
        )
        for one in pieces_of(path, d)
    ]
    return torch.cat(drawn, -2)


def _key_at(key: torch.Tensor, path: str) -> torch.Tensor:
    return random.fold_in(key, zlib.crc32(path.encode()))


def _index_alone(index: Index, piece: JoinedParam) -> Index:
    """The index of a joined leaf, in the dims of one of its pieces."""
    if index is None:
        return None
    *before, _, last = index
    if piece.size > 1 and before[-1] is not None:
        rows = before[-1]
        inner = torch.arange(piece.size, device=rows.device)
        before[-1] = (rows.unsqueeze(-1) * piece.size + inner).flatten()
    return (*before, last)
