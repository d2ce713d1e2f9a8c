"""Handles: leaves of trees whose values the ranks of a started mesh hold."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from functron.apps.notebook.processes import RESTART, RankError
from functron.apps.notebook.shipping import Packed, dump
from functron.apps.notebook.worker import ResultSlot, TensorMeta, is_slot
from functron.core import tree
from functron.core.errors import Problem, public, raise_problems
from functron.spmd import Mesh, P
from functron.spmd import spec as sharding
from functron.spmd.spec import is_spec


class Kind:
    """The shape, dtype, spec and device of handles; the same object for all that are alike."""

    __slots__ = ("device", "dtype", "local", "shape", "spec")

    def __init__(self, shape: tuple, dtype: torch.dtype, spec: P, device: str, local: Any):
        self.shape, self.dtype, self.spec, self.device = torch.Size(shape), dtype, spec, device
        self.local: Mapping[int, tuple] | None = local


class Handle:
    """A value that the ranks of a started mesh hold.

    ``float(h)``, ``h.item()``, ``h.numpy()``, ``h.gather()`` and ``print(h)`` fetch it. It goes
    into functions that are mapped over the mesh, and into nothing else of torch.

    Attributes:
        shape: of the whole value.
        dtype: of its elements.
        spec: how it is split over ranks.
        device: where the ranks have it: "cpu" or "cuda".
    """

    __slots__ = ("__weakref__", "_fate", "_kind", "_number", "_ranks", "_scalar")

    def __init__(self, ranks: Any, kind: Kind, number: int | dict, scalar: Any = None):
        self._fate = ""
        self._ranks, self._kind, self._number, self._scalar = ranks, kind, number, scalar

    shape = property(lambda self: self._look()._kind.shape)
    dtype = property(lambda self: self._look()._kind.dtype)
    spec = property(lambda self: self._look()._kind.spec)
    device = property(lambda self: torch.device(self._look()._kind.device))
    ndim = property(lambda self: len(self.shape))
    mesh = property(lambda self: self._ranks.mesh)
    nbytes = property(lambda self: self.numel() * self.dtype.itemsize)

    def _look(self) -> Handle:
        """Itself, once the call that makes it has ended."""
        late = self._ranks._late
        if late is not None and late.makes(self):
            self._ranks.block_until_ready()
        return self

    def dim(self) -> int:
        """The number of dims."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements of the whole value."""
        return self.shape.numel()

    @public
    def gather(self) -> torch.Tensor:
        """The whole value, on the CPU of this process."""
        return self._ranks._fetch([self])[0]

    cpu = gather

    def numpy(self) -> np.ndarray:
        """The whole value.

        Raises:
            TypeError: numpy has no such dtype.
        """
        whole = self.gather()
        try:
            return whole.numpy()
        except TypeError:
            name = str(self.dtype).removeprefix("torch.")
            fix = f"fix: handle.gather().float().numpy(), or handle.gather(), a tensor of {name}"
            raise TypeError(f"numpy has no {name}; {fix}") from None

    def item(self) -> bool | int | float:
        """The number that it is."""
        self._check()
        return self.gather().item() if self._scalar is None else self._scalar

    def tolist(self) -> Any:
        """The whole value, in lists."""
        return self.gather().tolist()

    @public
    def clone(self) -> Handle:
        """A copy on the ranks, to keep a value that is to be donated."""
        self._check()
        return self._ranks.run(torch.clone, self, specs=self.spec)

    def detach(self) -> Handle:
        """The value itself: the ranks record no tape."""
        return self

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Handle cannot be pickled: its value is with the ranks; fix: ft.gather(tree), and "
            "pickle that, or a checkpoint"
        )

    def _check(self) -> None:
        if self._look()._fate:
            raise ValueError(f"a value that {self._fate}")

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __round__(self, digits: int | None = None) -> int | float:
        return round(self.item(), digits)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, text: str) -> str:
        return format(self.item(), text) if text and not self.ndim else str(self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a Handle of a number; fix: handle.item(), or handle.gather()")
        return self.shape[0]

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")  # which waits for the call that makes it
        text = f"Handle({list(self.shape)}, {kind}, {self.spec}"
        if self._fate:
            return f"{text}, {self._fate.partition(';')[0]})"
        if self._kind.local is not None:
            return f"{text}, of the ranks {sorted(self._kind.local)})"
        if self.numel() > 64 or not self._ranks._can_fetch(self):
            return f"{text})"
        return f"{text}, {self.gather() if self.ndim else self.item()})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"Handle has no attribute {name!r}")
        raise AttributeError(_refusal(f".{name}"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Copies by torch.clone; raises TypeError for anything else of torch."""
        if func is torch.clone and isinstance(args[0], Handle):
            return args[0].clone()
        raise TypeError(_refusal(getattr(func, "__name__", str(func))))

    def __treescope_ndarray_adapter__(self) -> _TreescopeAdapter:
        return _TreescopeAdapter()

    def __del__(self) -> None:
        if not self._fate:
            self._ranks._free.append(self._number)


class _TreescopeAdapter:
    """Shows handles in treescope, which has been imported by whoever asks: numbers and sharding.

    See ``treescope.ndarray_adapters.NDArrayAdapter``.
    """

    def __init__(self) -> None:
        self._types: Any = sys.modules["treescope.ndarray_adapters"]

    def get_axis_info_for_array_data(self, array: Handle) -> tuple:
        return tuple(self._types.PositionalAxisInfo(*row) for row in enumerate(array.shape))

    def get_array_data_with_truncation(
        self, array: Handle, mask: Any, edge_items_per_axis: tuple[int | None, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        whole = array.gather()
        shown = np.broadcast_to(
            np.ones((), bool) if mask is None else np.asarray(mask), whole.shape
        )
        for dim, count in enumerate(edge_items_per_axis):
            if count is not None:  # first ones, one for the gap, last ones
                ends = [*range(count + 1), *range(whole.shape[dim] - count, whole.shape[dim])]
                whole, shown = whole[(slice(None),) * dim + (ends,)], shown.take(ends, dim)
                shown[(slice(None),) * dim + (count,)] = False
        return (whole.float() if whole.dtype is torch.bfloat16 else whole).numpy(), shown

    def get_array_summary(self, array: Handle, fast: bool) -> str:
        return repr(array).partition(", tensor(")[0]

    def get_numpy_dtype(self, array: Handle) -> np.dtype:
        kind = torch.float32 if array.dtype is torch.bfloat16 else array.dtype
        return torch.empty(0, dtype=kind).numpy().dtype

    def get_sharding_info_for_array_data(self, array: Handle) -> Any:
        parts = sharding.windows(tuple(array.shape), array.spec, array.mesh)
        local = sharding.local_shape(array.shape, array.spec, array.mesh)
        whole = tuple((0, size) for size in array.shape)
        slices = {
            rank: tuple(
                slice(None) if ends == all_of else slice(*ends)
                for ends, all_of in zip(part, whole, strict=True)
            )
            for rank, part in enumerate(parts)
        }
        return self._types.ShardingInfo(local, slices, array.device.type, parts[0] == whole)

    def should_autovisualize(self, array: Handle) -> bool:
        return array._ranks._can_fetch(array)


def _refusal(what: str) -> str:
    return (
        f"{what}: got a Handle, whose value the ranks of a started mesh hold; wanted a tensor; "
        "fix: compute it in a function that ft.shard_map maps over the mesh, or fetch the value: "
        "handle.gather(), ft.gather(tree, specs, mesh)"
    )


def _make_refuser(name: str) -> Callable:
    def refuse_operator(self: Handle, *rest: Any) -> Any:
        raise TypeError(_refusal(name))

    return refuse_operator


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "radd", "rsub", "rmul",
    "rtruediv", "rpow", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "getitem", "setitem",
    "iter", "and", "or", "xor", "invert", "eq", "ne",
):  # fmt: skip
    setattr(Handle, f"__{_name}__", _make_refuser(f"__{_name}__"))
Handle.__hash__ = object.__hash__


class Deferred:
    """An argument that the ranks make: the value of a function, of which each takes its shard."""

    __slots__ = ("args", "function")

    def __init__(self, function: Any, args: tuple):
        self.function, self.args = function, args


class KnownResults(NamedTuple):
    """The results that a call is expected to have.

    Attributes:
        generation: of the groups of ranks that had them.
        layouts: by rank the number of their structure.
        rows, structure: of which handles are made.
        count: of tensors.
    """

    generation: int
    layouts: tuple[int, ...]
    rows: list
    structure: tree.Structure
    count: int


@dataclass
class Plan:
    """How calls with arguments of one kind are sent.

    Attributes:
        arguments: the number by which ranks know their structure.
        specs: of each leaf.
        windows: of tensors among them: the parts that differ, and the one of each rank; None: they
            are padded.
        num_bytes: of these tensors.
        deferred: which leaves ranks make.
        moves: of handles that are split in another way.
        consumed: which handles among the leaves are given up.
        paths: of the leaves.
        out_specs: of the results.
        plain: whether leaves are tensors, or are made by ranks.
        results: how these become handles, by the number that ranks give their structure.
        known: the results there were; None: they vary, or cannot be known.
        shared: what ranks are told of calls that expect these, in bytes.
        seconds: that the last call took.
    """

    arguments: int
    specs: list[P | None]
    windows: dict[int, tuple[list[tuple], list[int]] | None]
    num_bytes: int
    deferred: list[int]
    moves: dict[int, tuple[P, P]]
    consumed: list[int]
    paths: list[str]
    out_specs: tree.Tree
    plain: bool
    results: dict[int, tuple[list, tree.Structure]] = field(default_factory=dict)
    known: KnownResults | None = None
    shared: tuple[Any, bytes] = (), b""
    seconds: float = math.inf


class SentCall(NamedTuple):
    """A call that all ranks were sent.

    Attributes:
        function: that is called.
        plan: how its arguments are sent.
        consumed: the handles that it consumes.
        first: the number of the first result.
        sent: what ranks are to answer: `SentRequests`.
    """

    function: Any
    plan: Plan
    consumed: list[Handle]
    first: int
    sent: Any

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__


class LateCall(NamedTuple):
    """A call that has returned before the ranks have answered.

    Attributes:
        call: what was sent.
        known: the results that it should have.
        made: its results.
        args: its arguments.
        where: the user's line.
    """

    call: SentCall
    known: KnownResults
    made: list[Handle]
    args: tuple
    where: str

    def makes(self, handle: Handle) -> bool:
        """Whether a handle is one of its results."""
        number = handle._number
        return type(number) is int and 0 <= number - self.call.first < len(self.made)


class Row(NamedTuple):
    """A result that becomes a handle: its place among the tensors, and its kind."""

    index: int
    kind: Kind


def for_rank(leaf: Any, rank: int) -> Any:
    """The part of what is sent, of a list or dict by rank, that is this rank's."""
    if isinstance(leaf, list):
        return leaf[rank]
    return leaf.get(rank, -1) if isinstance(leaf, dict) else leaf


def find_twin(handle: Handle, number: int, dead: Sequence[int]) -> int | None:
    """A living rank that holds the same part of a value as a dead one; None: there is none."""
    mesh = handle.mesh
    if handle._kind.local is not None:
        return None
    split = set(sharding.spec_axes(handle.spec))
    here = mesh.coordinate(number)
    for other in range(mesh.size):
        there = mesh.coordinate(other)
        if other not in dead and all(here[a] == there[a] for a in here if a in split):
            return other
    return None


def cut(value: torch.Tensor, spec: P, mesh: Mesh) -> list[Packed]:
    """The shards of a tensor, in the order of ranks."""
    if not sharding.is_uneven(spec):
        whole = Packed.of(value)
        windows = sharding.windows(tuple(value.shape), spec, mesh)
        return [whole.part(each) for each in make_slices(windows)]
    places = map(mesh.coordinate, range(mesh.size))
    return [Packed.of(sharding.shard(value, spec, mesh, place)) for place in places]


def make_slices(windows: Sequence[tuple]) -> list[tuple]:
    """Indices of parts, of which each is given by its ends in all dims."""
    return [(*[slice(*ends) for ends in window], ...) for window in windows]


def join_parts(
    handle: Handle, parts: Mapping[tuple, int], found: Mapping[int, Mapping[int, Packed]]
) -> torch.Tensor:
    """The whole value of a handle.

    Args:
        handle: of it.
        parts: its windows, each with the rank that it was fetched from.
        found: what was fetched, by rank and number.

    Raises:
        RankError: a part is with no rank that runs.
    """
    sizes = [[end - begin for begin, end in part] for part in parts]
    if sum(map(math.prod, sizes)) < handle.numel():
        raise RankError(f"a part of {handle.spec} died with its rank; fix: {RESTART}")
    whole = torch.empty(handle.shape, dtype=handle.dtype)
    for (part, rank), real in zip(parts.items(), sizes, strict=True):
        value = found[rank][for_rank(handle._number, rank)].tensor()
        value = value[tuple(slice(size) for size in real)]
        whole[tuple(slice(*ends) for ends in part)] = value
    return whole


def deal(
    shared: bytes, leaves: list, first: int, before: Sequence[tuple[str, tuple]], size: int
) -> dict[int, list[tuple[str, tuple]]]:
    """The requests of each rank that end with a call.

    Args:
        shared: see `functron.apps.notebook.worker.Worker.call`; and `first`.
        leaves: the same for all ranks, or a list or dict by rank.
        before: the requests before the call.
        size: how many ranks there are.
    """
    differ = [i for i, leaf in enumerate(leaves) if type(leaf) is list or type(leaf) is dict]
    if not differ:
        requests = [*before, ("call", (shared, leaves, first))]
        return dict.fromkeys(range(size), requests)
    calls = {}
    for rank in range(size):
        own = leaves.copy()
        for i in differ:
            own[i] = for_rank(leaves[i], rank)
        calls[rank] = [*before, ("call", (shared, own, first))]
    return calls


def list_kinds(leaves: Sequence[Any]) -> tuple:
    """The parts of leaves that a plan depends on."""
    return tuple([leaf._kind if type(leaf) is Handle else _kind_of(leaf) for leaf in leaves])


def _kind_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def find_rows(
    out_specs: tree.Tree, shown: Any, metas: Sequence[TensorMeta], mesh: Mesh, kind: Callable
) -> tuple[list, tree.Structure]:
    """The leaves of results, with a `Row` for each tensor, and their structure.

    Args:
        out_specs: of the results.
        shown: these, with slots.
        metas: of the tensors.
        mesh: the ranks.
        kind: the `Kind` of a shape, dtype, spec and device.
    """
    flat = tree.broadcast_prefix(out_specs, shown, is_leaf=is_spec, what="out_specs")
    leaves, structure = tree.flatten(shown, is_leaf=is_slot)
    refuse_split_statics(tree.paths(shown, is_slot), leaves, flat)
    rows: list[Any] = []
    for leaf, spec in zip(leaves, flat, strict=True):
        if isinstance(leaf, ResultSlot):
            meta = metas[leaf.index]
            spec = spec if isinstance(spec, P) else P()
            shape = sharding.global_shape(meta.shape, spec, mesh)
            leaf = Row(leaf.index, kind(shape, meta.dtype, spec, meta.device))
        rows.append(leaf)
    return rows, structure


def merge_trees(first: Any, second: Any) -> Any:
    """Two trees of which dicts may lack entries of the other."""
    if isinstance(first, dict) and isinstance(second, dict):
        both = {**second, **first}
        return {k: merge_trees(first.get(k, v), second.get(k, v)) for k, v in both.items()}
    if isinstance(first, tuple) and hasattr(first, "_fields") and not isinstance(first, ResultSlot):
        return type(first)(*map(merge_trees, first, second))
    if type(first) in (list, tuple) and len(first) == len(second):
        made: Any = type(first)
        return made(map(merge_trees, first, second))
    return second if first is None else first


def join_stages(
    layouts: Mapping[int, tuple[Any, Sequence[TensorMeta]]], out_specs: tree.Tree, first: int,
    make: Callable[[TensorMeta, P, dict[int, int], dict[int, tuple]], Handle],
) -> Any:  # fmt: skip
    """Results of which ranks hold different parts, as those of a pipeline's stages.

    Args:
        layouts: of each rank the structure, with slots, and its tensors.
        out_specs: of the results.
        first: the number of each rank's first tensor.
        make: a handle of a tensor, its spec, and by rank its number and shape.
    """
    paths: dict[str, dict[int, tuple[int, TensorMeta]]] = {}
    for rank, (shown, metas) in layouts.items():
        for path, leaf in tree.items(shown, is_slot):
            if isinstance(leaf, ResultSlot):
                paths.setdefault(path, {})[rank] = first + leaf.index, metas[leaf.index]
    whole = functools.reduce(merge_trees, (shown for shown, _ in layouts.values()))
    flat = tree.broadcast_prefix(out_specs, whole, is_leaf=is_spec, what="out_specs")
    leaves, structure = tree.flatten(whole, is_leaf=is_slot)
    out = []
    for path, leaf, spec in zip(tree.paths(whole, is_slot), leaves, flat, strict=True):
        if (held := paths.get(path)) is None:
            out.append(leaf)
            continue
        numbers = {rank: number for rank, (number, _) in held.items()}
        shapes = {rank: meta.shape for rank, (_, meta) in held.items()}
        _, meta = next(iter(held.values()))
        out.append(make(meta, spec if isinstance(spec, P) else P(), numbers, shapes))
    return tree.unflatten(structure, out)


def compare_sums(
    rows: list, structure: tree.Structure, sums: Mapping[int, Sequence[int]], mesh: Mesh
) -> None:
    """Raise ValueError for results that differ on ranks which should have the same part.

    Args:
        rows: of the results, with a `Row` for each tensor.
        structure: of them.
        sums: by rank the checksums of all tensors.
        mesh: the ranks.
    """
    problems, held = [], tree.unflatten(structure, [[row] for row in rows])
    for path, (row,) in tree.items(held, lambda each: isinstance(each, list)):
        if not isinstance(row, Row):
            continue
        seen: dict[tuple, tuple[int, int]] = {}
        for rank in range(mesh.size):
            mine, place = sums[rank][row.index], mesh.coordinate(rank)
            at = sharding.offsets(row.kind.shape, row.kind.spec, mesh, place)
            other, sum_of_other = seen.setdefault(at, (rank, mine))
            if mine != sum_of_other:
                got = f"other numbers on rank {rank} than on rank {other}"
                fix = 'say how they are parts of a whole: specs=P("dp"), say'
                wanted = f"the same, by {row.kind.spec}"
                problems.append(Problem(f"result {path}".strip(), got, wanted, fix))
                break
    raise_problems("ranks returned different values", problems)


def compare_shown(shown: Mapping[int, tuple[Any, Sequence[TensorMeta]]]) -> None:
    """Raise ValueError for results of ranks that differ in more than tensors' numbers.

    Args:
        shown: of each rank the structure, with slots and what is no tensor, and its tensors.
    """
    first, *others = shown
    problems: dict[str, Problem] = {}
    wanted = dict(tree.items(shown[first][0], is_slot))
    for rank in others:
        found = dict(tree.items(shown[rank][0], is_slot))
        for path in dict.fromkeys((*wanted, *found)):
            mine, theirs = (_describe(side, path) for side in (found, wanted))
            metas = shown[rank][1], shown[first][1]
            fix = 'return a tensor with specs=P("dp"), say, or torch.distributed.all_gather_object'
            if isinstance(mine, ResultSlot) and isinstance(theirs, ResultSlot):
                mine, theirs = metas[0][mine.index], metas[1][theirs.index]
                fix = "give parts one shape; of a pipeline's ranks say stages=, its axis"
            if not _is_alike(mine, theirs):
                got = f"{_shorten(mine)} on rank {rank}, {_shorten(theirs)} on rank {first}"
                where = f"result {path}".strip()
                problems.setdefault(path, Problem(where, got, "the same on all ranks", fix))
    raise_problems("ranks returned different values", list(problems.values()))


def _describe(side: Mapping[str, Any], path: str) -> Any:
    return side.get(path, "nothing")


def _shorten(value: Any) -> str:
    if isinstance(value, TensorMeta):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = "a tensor" if isinstance(value, ResultSlot) else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values that came from ranks are the same, not a number being one too."""
    try:
        if dump(one)[0] == dump(other)[0]:
            return True
        same: Any = one == other  # such as sets, which every process orders in its own way
        return type(one) is type(other) and bool(same)
    except Exception:  # an array of bools, or an object's own method
        return False


def refuse_split_statics(paths: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any]) -> None:
    """Raise ValueError for results that are parts of whole ones by their specs, and no tensors."""
    problems = [
        Problem(f"result {path}".strip(), f"{_shorten(leaf)} with the spec {spec}", "a tensor",
                "return torch.tensor(...), or give it the spec None")
        for path, leaf, spec in zip(paths, leaves, specs, strict=True)
        if not isinstance(leaf, ResultSlot | None) and isinstance(spec, P)
        and sharding.spec_axes(spec)
    ]  # fmt: skip
    raise_problems("only tensors are split over ranks", problems)


def abstract(given: Any) -> Any:
    """Meta tensors in place of handles."""
    return tree.map(lambda x: _meta(x._look()._kind) if isinstance(x, Handle) else x, given)


def _meta(kind: Kind) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta")
