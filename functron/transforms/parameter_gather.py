"""Fully sharded parameters (ZeRO stage 3), and sharded gradients of whole ones (stage 2).

A parameter whose spec mentions a data axis (``P("fsdp")``) is split over that axis: each rank
holds, updates and saves a part, and `fsdp` gathers the whole where it is used. The transpose of
all-gather is reduce-scatter, so each rank gets the gradient of its own part. This is ZeRO-3
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3) and FSDP (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel"). With parameters of B bytes over d ranks, each rank sends

| pass                                 | bytes                                        |
|--------------------------------------|----------------------------------------------|
| forward: all-gather                  | (d - 1) / d B, in the dtype of computation   |
| backward: all-gather, with `regather`| (d - 1) / d B                                |
| backward: reduce-scatter             | (d - 1) / d B, in the dtype of the reduction |

Sharding over one axis and not over another (``P("fsdp")`` on a mesh with dp) is hybrid sharding:
the shards' gradients are then summed over dp by `sync_gradients`, as any parameter's.

**Codes.** Of a matrix that a product reads quantised (`functron.precision`), an `Encoded` leaf, the
codes of every rank's part are gathered instead of its numbers. Its gradient is reduced and
scattered like any other. A matrix with one code for forward and one for backward is, with
`regather`, gathered by the product, each code where it is read.

Tried and dropped: recomputing the gathers by `remat` with a policy that keeps all else. It runs the
whole block twice through a Python dispatch mode; hooks on saved tensors run nothing twice.

**Stage 2.** Under `scatter_gradients`, a function of whole parameters is differentiated with
respect to every rank's part of them. Forward uses the whole ones, without communication; backward
is that of gathering the parts: it reduces and scatters each gradient as soon as it appears, and no
rank keeps more than its parts. What is differentiated is a stand-in with the part's shape, whose
numbers are never read. Where `functron.scan` runs over a whole stack of parameters, which it
recognises by identity, each slice's gradient is scattered in the scanned body; that of a stack that
was changed before the scan is scattered in one piece, to the same numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.core.functions import Function
from functron.core.scopes import in_phase, in_scopes, named_scope, phase, scope_names
from functron.core.tables import shows_differences
from functron.spmd.axes import Axis, AxisNames, axis_size, lookup, user_line
from functron.spmd.collectives import all_gather
from functron.spmd.mesh import FSDP_AXES
from functron.spmd.primitives import AllGather, AllGatherAs, Dtypes, GatherUnsent
from functron.spmd.spec import (
    BoundCuts,
    Cuts,
    P,
    bound_cuts,
    cut_tree,
    dim_axes,
    dim_sizes,
    entry_axes,
    is_spec,
    part_length,
    part_shape,
    scatter_over,
    spec_axes,
    trim_parts,
)
from functron.transforms.remat import storage_key

MERGED_BYTES = 1 << 20
"""Shards below this size are gathered together: starting a collective takes as long as sending so
many bytes."""


@public
def fsdp(
    block: Callable,
    specs: tree.Tree,
    *,
    axes: AxisNames = ("fsdp",),
    regather: bool = True,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Callable:
    """`block`, with the leaves of its first argument gathered over `axes` before it runs.

    Other axes that the specs mention go on splitting the leaves. Of an `Encoded` leaf the codes are
    gathered. Small leaves are gathered together. Works under every torch.func transform, in `scan`,
    `remat` and pipelines; put it around `remat`, so that the gathers can be started early.

    >>> block = ft.fsdp(lambda w, x: x @ w, P("fsdp"))
    >>> mapped = ft.shard_map(block, ft.Mesh(fsdp=2), (P("fsdp"), P("fsdp")), P("fsdp"))
    >>> mapped(torch.ones(4, 1), torch.ones(2, 4))
    tensor([[4.],
            [4.]])

    Collectives: per block one all-gather over each axis for all small leaves and one per large
    leaf; in backward the same again with `regather`, and as many reduce-scatters of gradients.

    Args:
        block: ``(params, *args) -> out``.
        specs: a prefix tree of the specs of `params`; of one row, where block is scanned.
        axes: the data axes to gather over, as far as the specs mention them. Where several axes
            split one dim these must be the minor ones: ``P(("tp", "fsdp"))``.
        regather: keep the shards, not the gathered copies, between forward and backward, which
            gathers them again; nothing else is computed again. Where a torch.func transform
            differentiates, copies are kept: it has no hooks on saved tensors.
        compute_dtype: cast shards to this dtype before gathering (mixed precision); None: theirs.
            Leaves that are not gathered are cast too.
        reduce_dtype: reduce-scatter gradients in this dtype, such as torch.float32 where bfloat16
            is computed in; None: the dtype of the computation. Gradients of shards have the dtype
            of the shards.

    Raises:
        ValueError: an axis to gather over is major to one that stays, or a spec is longer than the
            rank; all offenders are listed when the block is called.
        TypeError: a dtype is not floating point.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_dtypes(compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)

    @public
    @functools.wraps(block)
    def wrapped(params, *args, **kwargs):
        given = without_codes(params)
        flat = tree.broadcast_prefix(
            specs, given, is_leaf=is_spec, what="the specs of fsdp", wanted="a P, or containers"
        )
        if compute_dtype is None and given is params and not any(map(lookup, names)):
            return block(params, *args, **kwargs)
        encoded = tree.leaves(params, is_encoded)
        places = _find_places(tree.paths(given), tree.leaves(given), flat, names)
        kept = [
            # the axes of more than one rank that go on splitting a leaf
            frozenset(x for x in spec_axes(spec or P()) if x not in names and lookup(x))
            for spec in flat
        ]
        rows = zip(encoded, places, kept, strict=True)
        items = [item for row in rows for item in _iterate_items(*row, regather)]
        leaves, structure = tree.flatten(params)
        gathering = _Gathering(tuple(items), compute_dtype, reduce_dtype)
        splits = [
            _split_codes(*row) if regather else () for row in zip(encoded, places, strict=True)
        ]
        with named_scope("gather"):
            whole = gathering.gather(leaves)
        with _save_shards(gathering, leaves, whole) if regather else contextlib.nullcontext():
            given = _attach_splits(tree.unflatten(structure, whole), splits)
            return block(given, *args, **kwargs)

    return wrapped


class MatrixCode(NamedTuple):
    """A quantised matrix: the integer matrices that hold its bits, without a derivative.

    They have the leading dims of stacked parameters.

    Attributes:
        both: those with a row for each row or block of rows of the matrix ``[inputs, outputs]``,
            and columns likewise.
        rows: with rows alone, and one column.
        columns: with columns alone, and one row.
        shared: of the whole matrix, the same on all ranks that have a part of it.
    """

    both: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...] = ()
    columns: tuple[torch.Tensor, ...] = ()
    shared: tuple[torch.Tensor, ...] = ()

    def iterate_splits(self, split: AxisSplit) -> Iterator[tuple[torch.Tensor, AxisSplit]]:
        """Its tensors, each with its split dims, where axes split rows (0) or columns (1)."""
        for parts, own in zip(self, ((0, 1), (0,), (1,), ()), strict=True):
            for part in parts:
                yield part, tuple((part.dim() - 2 + s, axes) for s, axes in split if s in own)

    def gather(self, split: AxisSplit) -> MatrixCode:
        """The whole code, where axes split rows or columns; one all-gather per tensor and split."""
        leaves, structure = tree.flatten(self)
        for i, (_, places) in enumerate(self.iterate_splits(split)):
            for dim, axes in places:
                leaves[i] = all_gather(leaves[i], axes, axis=dim, tiled=True)
        return tree.unflatten(structure, leaves)


AxisSplit = tuple[tuple[int, tuple], ...]


class Encoded(NamedTuple):
    """A parameter whose matrix product reads quantised codes in place of its numbers, for `fsdp`.

    Attributes:
        like: the parameter, for its gradient; gathered, it is NaN that takes no memory. None: not
            attached (`attach_codes`).
        codes: one that forward and backward read, or one for each. See
            `functron.precision.encoder`.
        split: of codes that the product is to gather, as for `MatrixCode.gather`.
    """

    like: Any
    codes: tuple[MatrixCode, ...]
    split: AxisSplit = ()

    @property
    def shape(self) -> torch.Size:
        """Of the parameter, as `dtype` and `dim`."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def dim(self) -> int:
        return self.like.dim()

    def flatten(self, start: int = 0, end: int = -1) -> Encoded:
        """The same matrix, with dims of the parameter flattened."""
        return self._replace(like=self.like.flatten(start, end))


def is_encoded(value: Any) -> bool:
    """Whether it is an `Encoded`."""
    return isinstance(value, Encoded)


def without_codes(params: tree.Tree) -> tree.Tree:
    """Parameters without their codes; the same tree where none of them has any."""
    if all(map(tree.is_float, tree.leaves(params))):  # codes are integers
        return params

    def one(leaf: Any) -> Any:
        return leaf.like if is_encoded(leaf) else leaf

    return tree.map(one, params, is_leaf=is_encoded)


def attach_codes(params: tree.Tree, codes: tree.Tree) -> tree.Tree:
    """Parameters with codes: a tree like them of `Encoded` without ``like``, and of None."""

    def one(code: Encoded | None, leaf: Any) -> Any:
        return leaf if code is None else code._replace(like=leaf)

    return tree.map(one, codes, params, is_leaf=lambda x: x is None or is_encoded(x))


def detach_codes(params: tree.Tree) -> tree.Tree:
    """The codes of parameters that have them, as `attach_codes` takes them."""

    def one(leaf: Any) -> Encoded | None:
        return leaf._replace(like=None) if is_encoded(leaf) else None

    return tree.map(one, params, is_leaf=is_encoded)


@shows_differences
@dataclass(frozen=True)
class Gather:
    """How the parameters of a model are gathered at use: arguments of `fsdp` for all blocks.

    ``Gather()`` gathers nothing: the same program runs on one device.

    >>> ft.ModelOptions(gather=ft.Gather(P("fsdp"), compute_dtype=torch.bfloat16))
    ModelOptions(gather=Gather(specs=P('fsdp'), compute_dtype=torch.bfloat16))

    Attributes:
        specs: of all parameters, or one for all of them.
        axes: the data axes to gather over, as far as specs mention them.
        regather, compute_dtype, reduce_dtype: as in `fsdp`.
    """

    specs: tree.Tree = field(default_factory=P)
    axes: tuple[str, ...] = FSDP_AXES
    regather: bool = True
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def at(self, name: str) -> Gather:
        """The same for that entry of the parameters alone."""
        return self if is_spec(self.specs) else replace(self, specs=self.specs[name])

    def rows(self) -> Gather:
        """The same for one row of parameters that are stacked on a leading dim."""

        def row(spec: P | None) -> P:
            return P(*list(spec or ())[1:])

        return replace(self, specs=tree.map(row, self.specs, is_leaf=is_spec))

    def __call__(self, params: tree.Tree) -> tree.Tree:
        """The parameters, gathered, and kept so for backward."""
        return self.around(lambda whole: whole, regather=False)(params)

    def around(self, block: Callable, *, regather: bool = True) -> Callable:
        """`block` with its first argument gathered; `regather` as far as this does at all."""
        return fsdp(
            block,
            self.specs,
            axes=self.axes,
            regather=self.regather and regather,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
        )


def _check_dtypes(**dtypes: Any) -> None:
    raise_problems(
        "fsdp",
        [
            Problem(name, repr(dtype), "a floating-point torch.dtype, or None")
            for name, dtype in dtypes.items()
            if dtype is not None
            and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        ],
        TypeError,
    )


class GatheredDim(NamedTuple):
    """A dim to gather.

    Attributes:
        dim: which.
        axes: of more than one rank, major to minor.
        size: once it is gathered, without padding; None: parts have none.
    """

    dim: int
    axes: tuple[Axis, ...]
    size: int | None = None


Places = tuple[GatheredDim, ...]
"""The dims of one leaf to gather."""


def _find_places(
    paths: Sequence[str], leaves: Sequence[Any], specs: Sequence[P | None], names: Sequence[str]
) -> list[Places]:
    found: list[Places] = []
    problems: list[Problem] = []
    for path, leaf, spec in zip(paths, leaves, specs, strict=True):
        entries = spec or P()
        if isinstance(leaf, torch.Tensor) and len(entries) > leaf.dim():
            got = f"{entries} for shape {tuple(leaf.shape)}"
            fix = "give a scanned block the specs of one row: without the stacked dim"
            problems.append(Problem(path or "params", got, f"at most {leaf.dim()} entries", fix))
            continue
        problems += _order_problems(path or "params", entries, names)
        dims = dim_axes(entries, len(entries))
        places = [
            GatheredDim(
                dim,
                tuple(lookup([name for name in row if name in names])),
                size and part_length(size, [axis_size(name) for name in row if name not in names]),
            )
            for dim, (row, size) in enumerate(zip(dims, dim_sizes(entries, len(dims)), strict=True))
        ]
        found.append(tuple(place for place in places if place.axes))
    raise_problems(f"fsdp cannot gather these parameters at {user_line()}", problems)
    return found


def _order_problems(path: str, spec: P, names: Sequence[str]) -> list[Problem]:
    """Gathering an axis that is major to one that stays would put parts in the wrong order."""
    found = []
    for entry in spec:
        split = [name for name in entry_axes(entry) if lookup(name)]
        kept = [name for name in split if name not in names]
        wanted = [*kept, *(name for name in split if name in names)]
        if split != wanted:
            text = ", ".join(map(repr, wanted))
            problem = "the axes to gather minor to those that stay"
            found.append(Problem(path, f"{spec}", problem, f"write that dim as ({text})"))
    return found


class _Item(NamedTuple):
    """A tensor of one call.

    Attributes:
        places: where it is gathered.
        kept: the axes that go on splitting it. Only tensors that the same axes split are gathered
            together: one that is replicated over an axis would seem to vary over it otherwise.
        sent: False: of a parameter whose codes are gathered instead.
    """

    places: Places
    kept: frozenset[str]
    sent: bool = True


def _iterate_items(
    leaf: Any, places: Places, kept: frozenset[str], regather: bool
) -> Iterator[_Item]:
    """Those of a leaf, in the order of its tensors."""
    if not is_encoded(leaf):
        yield _Item(places, kept)
        return
    yield _Item(places, kept, False)
    later = regather and _split_codes(leaf, places)
    for code in leaf.codes:
        for _, own in code.iterate_splits(() if later else _find_sides(leaf, places)):
            yield _Item(tuple(GatheredDim(*row) for row in own), kept)


def _find_sides(leaf: Encoded, places: Places) -> AxisSplit:
    """Whether rows or columns of the matrix are to be gathered, 0 or 1, and over which axes."""
    first = leaf.codes[0].both[0].dim() - 2  # of the dims that are inputs
    assert all(place.dim >= first for place in places), "stacks are not gathered"
    assert all(place.size is None for place in places), "encoders refuse uneven splits"
    return tuple((int(place.dim > first), place.axes) for place in places)


def _split_codes(leaf: Any, places: Places) -> AxisSplit:
    """The splits of codes that the product is to gather, as forward reads only one of several."""
    if not is_encoded(leaf) or len(leaf.codes) == 1:
        return ()
    sides = _find_sides(leaf, places)
    return tuple((side, tuple(axis.name for axis in axes)) for side, axes in sides)


def _attach_splits(params: tree.Tree, splits: Sequence[AxisSplit]) -> tree.Tree:
    """The parameters, with the splits of the codes that products are to gather."""

    def one(leaf: Any, split: AxisSplit) -> Any:
        return leaf._replace(split=split) if split else leaf

    return tree.map_columns(one, params, splits, is_leaf=is_encoded)


@dataclass(frozen=True, eq=False)
class _Gathering:
    """How the tensors of one call are gathered, without the tensors.

    Attributes:
        items: per tensor, in order.
        compute: the dtype of the whole; None: that of the shards.
        reduce: the dtype that gradients are added in; None: `compute`.
    """

    items: tuple[_Item, ...]
    compute: torch.dtype | None
    reduce: torch.dtype | None

    def gather(self, shards: Sequence[Any]) -> list:
        """The leaves from this rank's shards; a leaf with nothing to gather or cast is itself."""
        out = list(shards)
        for turn in range(max((len(item.places) for item in self.items), default=0)):
            groups: dict[Any, list[int]] = {}
            for i, (places, kept, sent) in enumerate(self.items):
                if turn < len(places):
                    axes = places[turn].axes
                    alone = i if out[i].nbytes >= MERGED_BYTES else -1
                    last = turn + 1 == len(places)
                    names = tuple(axis.name for axis in axes)
                    # what is not differentiated travels apart: nothing is reduced for it
                    moves = out[i].requires_grad
                    key = (out[i].dtype, last, sent, alone, names, kept, moves)
                    groups.setdefault(key, []).append(i)
            for (dtype, last, sent, *_), group in groups.items():
                made = self._gather_group(
                    [out[i] for i in group],
                    [self.items[i].places[turn] for i in group],
                    self._dtypes(dtype, shards[group[0]].dtype, last),
                    sent,
                )
                for i, whole in zip(group, made, strict=True):
                    out[i] = whole
        cast = self.compute
        return [x.to(cast) if cast is not None and tree.is_float(x) else x for x in out]

    def _dtypes(self, operand: torch.dtype, shard: torch.dtype, last: bool) -> Dtypes:
        sent = (self.compute or shard) if shard.is_floating_point else shard
        summed = (self.reduce or sent) if shard.is_floating_point else shard
        return Dtypes(operand, sent, sent if last else summed, summed)

    def _gather_group(
        self, shards: list, places: Sequence[GatheredDim], dtypes: Dtypes, sent: bool
    ) -> list:
        """Shards gathered over the same axes, each along its dim."""
        axes = places[0].axes
        if len(shards) == 1:
            return [_join_ranks(_all_gather(shards[0], axes, dtypes, sent), places[0])]
        flat = torch.cat([shard.reshape(-1) for shard in shards])
        whole = _all_gather(flat, axes, dtypes, sent)
        parts = whole.split([shard.numel() for shard in shards], dim=1)
        rows = zip(parts, shards, places, strict=True)
        return [
            _join_ranks(part.unflatten(1, shard.shape or (1,)), place)
            for part, shard, place in rows
        ]


def _all_gather(x: torch.Tensor, axes: Sequence[Axis], dtypes: Dtypes, sent: bool) -> torch.Tensor:
    """[...] -> [n, ...] over one or several axes, the minor ones first; NaN if not `sent`."""
    shape = x.shape
    for position, axis in enumerate(reversed(axes)):
        last = position + 1 == len(axes)
        # between two axes the values must carry cotangents as precisely as they are added
        here = Dtypes(x.dtype, dtypes.sent, dtypes.result if last else dtypes.summed, dtypes.summed)
        alike = here.operand == here.sent == here.result == here.summed
        if not sent:  # its numbers are not to be read
            x = GatherUnsent.call(x, axis, dtypes=here)
        else:
            x = AllGather.call(x, axis) if alike else AllGatherAs.call(x, axis, dtypes=here)
    return x.reshape(math.prod(axis.size for axis in axes), *shape)


def _join_ranks(parts: torch.Tensor, place: GatheredDim) -> torch.Tensor:
    """[n, ..., d, ...] -> [..., n d, ...]: the ranks' parts of a dim, without padding."""
    whole = parts.movedim(0, place.dim).flatten(place.dim, place.dim + 1)
    if place.size is None:
        return whole
    return trim_parts(whole, place.dim, place.size, [axis.size for axis in place.axes])


# --- freeing gathered copies between forward and backward


@contextlib.contextmanager
def _save_shards(gathering: _Gathering, shards: Sequence[Any], whole: Sequence[Any]):
    """The tape keeps shards in place of gathered leaves that it saves inside this with block."""
    # a second run of a rematerialised function is differentiated at once
    kept = compat.transforms_active() or phase() == "recompute" or not torch.is_grad_enabled()
    rows = [] if kept else list(enumerate(zip(shards, whole, gathering.items, strict=True)))
    made = {
        storage_key(value): i
        for i, (shard, value, item) in rows
        if value is not shard and item.sent
    }
    if not made:
        yield
        return
    source = _SavedShards(
        gathering, [x.detach() if isinstance(x, torch.Tensor) else x for x in shards], scope_names()
    )
    originals = {i: whole[i].storage_offset() for i in made.values()}

    def pack(value: torch.Tensor) -> Any:
        i = made.get(storage_key(value))
        if i is None:
            return value
        source.count += 1
        start = value.storage_offset() - originals[i]
        return functools.partial(source.take, i, value.shape, value.stride(), start)

    def unpack(saved: Any) -> torch.Tensor:
        return saved() if isinstance(saved, functools.partial) else saved

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass(eq=False)
class _SavedShards:
    """The shards of one call, which backward gathers once for all saved views of gathered leaves.

    Attributes:
        gathering: how they are gathered.
        shards: of all leaves.
        names: the named scopes of the call.
        count: how many views were saved.
        taken: how many of them this backward has read.
        whole: the gathered leaves while backward needs them.
    """

    gathering: _Gathering
    shards: list
    names: tuple[str, ...]
    count: int = 0
    taken: int = 0
    whole: list | None = None

    def take(self, index: int, shape: torch.Size, stride: tuple, start: int) -> torch.Tensor:
        """A saved tensor, which is a view of a gathered leaf."""
        whole = self.leaf(index)
        if start == 0 and (whole.shape, whole.stride()) == (shape, stride):
            return whole
        if start == 0 and whole.is_contiguous() and math.prod(shape) == whole.numel():
            plain = whole.view(shape)
            if plain.stride() == stride:
                return plain
        return whole.as_strided(shape, stride, whole.storage_offset() + start)

    def leaf(self, index: int) -> torch.Tensor:
        """A gathered leaf; the last read frees all."""
        if self.whole is None:
            with torch.no_grad(), in_phase("recompute"), in_scopes((*self.names, "gather")):
                self.whole = self.gathering.gather(self.shards)
        whole = self.whole[index]
        self.taken += 1
        if self.taken == self.count:
            self.taken, self.whole = 0, None
        return whole


def stand_ins(
    params: tree.Tree, specs: tree.Tree, into: tree.Tree, *, dtype: torch.dtype | None = None
) -> tree.Tree:
    """Stand-ins to differentiate with respect to, in place of `params`; they take no memory.

    Args:
        params: local values with `specs`, a prefix tree.
        into: the specs of the gradients: `specs` with axes appended.
        dtype: of the gradients; None: the parameters' own.

    Returns:
        A tree like `params`, of tensors with the shapes of this rank's parts; a parameter that is
        not cut stands for itself.
    """

    def one(leaf: torch.Tensor, cuts: Cuts) -> torch.Tensor:
        if not cuts and dtype in (None, leaf.dtype):
            return leaf
        zero = torch.zeros((), dtype=dtype or leaf.dtype, device=leaf.device)
        return zero.expand(part_shape(leaf.shape, cuts))

    return tree.map_columns(one, params, cut_tree(specs, into, params))


@contextlib.contextmanager
def scatter_gradients(
    parts: tree.Tree,
    params: tree.Tree,
    specs: tree.Tree,
    into: tree.Tree,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tree.Tree]:
    """`params` as a function of `parts`, in a with block around what uses them.

    Collectives: none forward; in backward one reduce-scatter per use of a leaf and axis.

    Args:
        parts: the result of `stand_ins`, or a transform's value of it.
        params, specs, into: as for `stand_ins`.
        dtype: reduce gradients in this dtype; None: in that of the parameters.
    """
    leaves, structure = tree.flatten(params)
    rows = zip(tree.leaves(parts), leaves, cut_tree(specs, into, params), strict=True)
    out, found = [], {}
    for part, whole, cuts in rows:
        if not cuts and part.dtype == whole.dtype:
            out.append(part)
            continue
        pair = _Pair(part, whole, cuts, dtype)
        value = pair.value()
        out.append(value)
        found[id(value)] = (value, pair)  # kept, so that no other tensor gets this id
    token = _pairs.set({**_pairs.get(), **found})
    try:
        yield tree.unflatten(structure, out)
    finally:
        _pairs.reset(token)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A part that is differentiated, and the whole value that is used."""

    part: torch.Tensor
    whole: torch.Tensor
    cuts: Cuts
    dtype: torch.dtype | None

    def value(self) -> torch.Tensor:
        """The whole value as a function of the part."""
        cuts = bound_cuts(self.whole.shape, self.cuts)
        out: Any = _WholeOfPart.apply(
            self.part, self.whole, _Use(cuts, self.dtype, self.part.dtype)
        )
        return out


_pairs: contextvars.ContextVar[dict[int, tuple[torch.Tensor, _Pair]]] = contextvars.ContextVar(
    "functron_scattered",
    default={},  # noqa: B039  (never written to)
)


def by_row(f: Callable, xs: tree.Tree) -> tuple[Callable, tree.Tree]:
    """`f` and `xs` of a scan, in which `f` scatters the gradients of slices of whole parameters."""
    pairs = _pairs.get()
    if not pairs:
        return f, xs
    leaves, structure = tree.flatten(xs)
    found = [pairs[id(leaf)][1] if id(leaf) in pairs else None for leaf in leaves]
    if not any(found):
        return f, xs

    @functools.wraps(f)
    def body(carry, columns):
        rows = [
            column
            if pair is None
            else _Pair(column["part"], column["whole"], pair.cuts, pair.dtype).value()
            for column, pair in zip(columns, found, strict=True)
        ]
        return f(carry, tree.unflatten(structure, rows))

    return body, [
        leaf if pair is None else {"part": pair.part, "whole": pair.whole}
        for leaf, pair in zip(leaves, found, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Use:
    """How the gradient of a whole value is reduced; opaque to functorch."""

    cuts: BoundCuts
    reduced: torch.dtype | None
    result: torch.dtype


class _WholeOfPart(Function):
    """y = whole, as the gathering of parts: its cotangent is summed over ranks and scattered."""

    @staticmethod
    def forward(part, whole, use):
        return whole.view_as(whole)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.use = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None, None
        use: _Use = ctx.use
        share = cotangent if use.reduced is None else cotangent.to(use.reduced)
        return scatter_over(share, use.cuts).to(use.result), None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise ValueError(
            "forward-mode differentiation (jvp, jacfwd) of parameters that are gathered once for "
            "several uses; wanted reverse mode; fix: differentiate the function of gathered ones"
        )

    @staticmethod
    def vmap(info, in_dims, part, whole, use):
        return whole.view_as(whole), in_dims[1]
