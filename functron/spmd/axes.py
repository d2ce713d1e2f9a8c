"""The axes that are bound around a running per-rank program: simulated, on processes, or traced.

A traced program says ``psum(x, axis="tp")``; which processes that means is decided when it is
compiled for a bound mesh. Its operations on axis names exist on fake tensors only.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import linecache
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from functron.core import compat
from functron.core.errors import contexts_of, in_library, nearest, public
from functron.core.scopes import named_scope
from functron.spmd.flight import FlightRecorder, SourceLine
from functron.spmd.mesh import STANDARD_AXES, LostRanksError, Membership

LIBRARY = torch.library.Library("functron", "DEF")

_SCHEMAS = {
    "psum": "(Tensor x, str axis, int size, *, bool must_vary=False) -> Tensor",
    "pmax": "(Tensor x, str axis, int size) -> Tensor",
    "pmin": "(Tensor x, str axis, int size) -> Tensor",
    "pbroadcast": "(Tensor x, str axis, int size, int source) -> Tensor",
    "all_gather": "(Tensor x, str axis, int size) -> Tensor",
    "psum_scatter": "(Tensor x, str axis, int size, *, bool must_vary=False) -> Tensor",
    "all_to_all": "(Tensor x, str axis, int size) -> Tensor",
    "ppermute": "(Tensor x, str axis, int size, int[] sources, int[] destinations) -> Tensor",
    "vary": "(Tensor(a) x, str axis) -> Tensor(a)",
    "assume_replicated": "(Tensor(a) x, str axis) -> Tensor(a)",
    "require_replicated": "(Tensor(a) x, str axis) -> Tensor(a)",
    "assume_share": "(Tensor(a) x) -> Tensor(a)",
    "require_share": "(Tensor(a) x, str[] axes) -> Tensor(a)",
}

for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)


def _like(x, *args, **kwargs):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_all_gather(x, axis, size):
    return x.new_empty((size, *x.shape))


def _fake_reduce_scatter(x, axis, size, *, must_vary=False):
    return x.new_empty(x.shape[1:])


def _view(x, *axes):
    return x.view_as(x)


for _name in ("psum", "pmax", "pmin", "pbroadcast", "all_to_all", "ppermute"):
    LIBRARY.impl(_name, _like, "Meta")
LIBRARY.impl("all_gather", _fake_all_gather, "Meta")
LIBRARY.impl("psum_scatter", _fake_reduce_scatter, "Meta")
for _name in ("vary", "assume_replicated", "require_replicated", "assume_share", "require_share"):
    LIBRARY.impl(_name, _view, "CompositeExplicitAutograd")

OPS = torch.ops.functron


_REDUCTIONS = {"sum": "psum", "max": "pmax", "min": "pmin"}


@dataclass(frozen=True, eq=False)
class TracedAxis:
    """An axis of a per-rank program that is being traced.

    Attributes:
        name: of the axis.
        size: the number of ranks on it.
        make_index: gives this rank's index on the axis of that name, an input of the program.
    """

    name: str
    size: int
    make_index: Callable[[str], torch.Tensor]
    token: None = None

    @property
    def index(self) -> torch.Tensor:
        return self.make_index(self.name)

    def all_reduce(self, x: torch.Tensor, operation: str, must_vary: bool) -> torch.Tensor:
        """The sum, max or min of x over the ranks."""
        op = getattr(OPS, _REDUCTIONS[operation])
        named = {"must_vary": True} if must_vary else {}
        return op(x, self.name, self.size, **named)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """x of the rank with this index on the axis; those of others are zeros."""
        return OPS.pbroadcast(x, self.name, self.size, source)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] -> [size, ...]: every rank's x."""
        return OPS.all_gather(x, self.name, self.size)

    def reduce_scatter(self, x: torch.Tensor, must_vary: bool) -> torch.Tensor:
        """[size, ...] -> [...]: this rank's row of the sum of x."""
        named = {"must_vary": True} if must_vary else {}
        return OPS.psum_scatter(x, self.name, self.size, **named)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [size, ...]: this rank's row of every rank's x."""
        return OPS.all_to_all(x, self.name, self.size)

    def permute(self, x: torch.Tensor, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
        """x of the rank that sends here under `perm`; zeros where none does."""
        return OPS.ppermute(x, self.name, self.size, [s for s, _ in perm], [d for _, d in perm])

    def mark(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x with a statement about its replication: vary, assume_ or require_replicated."""
        return getattr(OPS, kind)(x, self.name)

    def assume_share(self, x: torch.Tensor) -> torch.Tensor:
        """x with the statement that it is this rank's share of a gradient."""
        return OPS.assume_share(x)

    def require_share(self, x: torch.Tensor, summed: Sequence[str]) -> torch.Tensor:
        """x with the condition that it is a share, which is about to be summed over these axes."""
        return OPS.require_share(x, list(summed))


AxisNames = str | Sequence[str]
F = TypeVar("F", bound=Callable)
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False)
class SimulatedAxis:
    """An axis that is one level of nested vmaps.

    The token is ``arange(size)`` batched at exactly this level: it is this rank's index, and passed
    to a primitive it tells the vmap rule of that primitive which level is its own.
    """

    name: str
    size: int
    token: torch.Tensor

    @property
    def index(self) -> torch.Tensor:
        return self.token

    def varies(self, value: torch.Tensor) -> bool:
        """Whether `value` differs between the ranks of this axis (is batched at its level)."""
        return compat.is_batched_at(value, compat.level_of(self.token))


_SOURCE = re.compile(r"\[[^]]*\bgloo/[^]]*\] ?")
"""The place in gloo's own source that each of its messages has."""


def raise_lost(error: RuntimeError, where: str) -> None:
    """Say in words what `error` means, if the backend of collectives raised it; else return.

    Args:
        error: that a program on processes raised.
        where: the collectives that it may be of, their axes and the user's lines.

    Raises:
        LostRanksError: another process ended, or is in another collective.
    """
    if not (isinstance(error, dist.DistError) or _SOURCE.search(str(error))):
        return
    rank = f"process {dist.get_rank()} of {dist.get_world_size()}"
    message = _SOURCE.sub("", str(error)).partition(". ")[0].strip()
    told = LostRanksError(
        f"{where}: {rank} lost the others ({message}); wanted all ranks of the axis in "
        "the same collective with the same shapes; fix: look at the process that ended first: its "
        "own error says why, or the system ended it (out of memory, a signal)"
    )
    raise told.with_traceback(error.__traceback__) from None


_RECORDED = {
    "all_reduce": "psum",
    "broadcast": "pbroadcast",
    "all_gather": "all_gather",
    "reduce_scatter": "psum_scatter",
    "all_to_all": "all_to_all",
    "permute": "ppermute",
}


def _communicates(method: F) -> F:
    """`method` of a `BoundAxis`, recorded, which names itself, axis and line where it fails."""
    op = _RECORDED[method.__name__]

    @functools.wraps(method)
    def call(self: BoundAxis, *args: Any) -> Any:
        recorder, member = self.recorder, self.membership
        if member is not None:
            member.entered += 1
        if recorder is not None:
            name = _REDUCTIONS[args[1]] if op == "psum" else op
            recorder.wait(recorder.begun(name, self.name, args[0]))
        try:
            result = method(self, *args)
        except RuntimeError as error:
            raise_lost(error, f"{method.__name__} over {self.name!r} at {user_line()}")
            raise
        if recorder is not None:
            recorder.left()
        return result

    made: Any = call
    return made


def permute_ranks(
    x: torch.Tensor,
    perm: Sequence[tuple[int, int]],
    index: int,
    size: int,
    group: str,
    wait: bool,
) -> torch.Tensor:
    """x of the rank that sends to rank `index` of a group; zeros where none does.

    Without `wait` it may still be on its way, and x must stay as it is until then.
    """
    target, source = dict(perm), {d: s for s, d in perm}
    sends, receives = [0] * size, [0] * size
    if index in target:
        sends[target[index]] = x.numel()
    if index in source:
        receives[source[index]] = x.numel()
    flat = x.reshape(-1) if index in target else x.reshape(-1)[:0]
    got = _c10d.all_to_all_single(flat, receives, sends, group)
    if wait or index not in source:
        got = _c10d.wait_tensor(got)
    return got.view(x.shape) if index in source else torch.zeros_like(x)


@dataclass(frozen=True, eq=False)
class BoundAxis:
    """An axis whose ranks are the processes of a torch.distributed group.

    Attributes:
        name: of the axis.
        size: the number of ranks on it.
        index: of this process on it.
        group: the process group.
        recorder: of what goes over it; None: not recorded.
        membership: that counts collectives as they are entered; None: not counted.
    """

    name: str
    size: int
    index: int
    group: str
    token: None = None
    recorder: FlightRecorder | None = None
    membership: Membership | None = None

    def line(self) -> SourceLine | None:
        """The line of a program that is about to communicate over this axis, if one is asked."""
        return None if self.recorder is None else self.recorder.line(2)

    def about(self, line: SourceLine | None, backward: bool) -> None:
        """Mark what goes over the axis next as of this line."""
        if self.recorder is not None:
            self.recorder.about(line, backward)

    def entered(self, op: str, value: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Record a collective that takes as long as a with block."""
        if self.membership is not None:
            self.membership.entered += 1
        if self.recorder is None:
            return contextlib.nullcontext()
        return self.recorder.entered(op, self.name, value)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Record that this process waits, in a with block, for what it entered last."""
        if self.recorder is not None:
            self.recorder.resume(self.name)
        yield
        if self.recorder is not None:
            self.recorder.left()

    @_communicates
    def all_reduce(self, x: torch.Tensor, operation: str, must_vary: bool) -> torch.Tensor:
        """The sum, max or min ("sum", "max", "min") of x over the ranks."""
        return _c10d.wait_tensor(_c10d.all_reduce(x, operation, self.group))

    @_communicates
    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """x of the rank with this index on the axis."""
        return _c10d.wait_tensor(_c10d.broadcast(x, source, self.group))

    @_communicates
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] -> [size, ...]: every rank's x."""
        gathered = _c10d.all_gather_into_tensor(x.unsqueeze(0), self.size, self.group)
        return _c10d.wait_tensor(gathered)

    @_communicates
    def reduce_scatter(self, x: torch.Tensor, must_vary: bool) -> torch.Tensor:
        """[size, ...] -> [...]: this rank's row of the sum of x."""
        part = _c10d.reduce_scatter_tensor(x, "sum", self.size, self.group)
        return _c10d.wait_tensor(part).squeeze(0)

    @_communicates
    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [size, ...]: this rank's row of every rank's x."""
        splits = [1] * self.size
        return _c10d.wait_tensor(_c10d.all_to_all_single(x, splits, splits, self.group))

    @_communicates
    def permute(
        self, x: torch.Tensor, perm: Sequence[tuple[int, int]], wait: bool = True
    ) -> torch.Tensor:
        """x of the rank that sends here under `perm`; zeros where none does.

        Without `wait` it may still be on its way; ``_c10d_functional.wait_tensor`` gives it.
        """
        return permute_ranks(x, perm, self.index, self.size, self.group, wait)

    def mark(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x: a statement about its replication, for those who check it."""
        return x.view_as(x)


Axis = SimulatedAxis | BoundAxis | TracedAxis


@dataclass(frozen=True, eq=False)
class StageAxis:
    """An axis whose ranks run different programs: the stages of a pipeline.

    It is not mapped. One process runs the programs of all its ranks in turn, or, on a bound mesh,
    of its own rank.

    Attributes:
        name: of the axis.
        size: its ranks.
        index: this process's rank on it; None where this process runs them all.
        group: the process group; "" where there is none.
        recorder: of what goes over it; None: not recorded.
    """

    name: str
    size: int
    index: int | None = None
    group: str = ""
    recorder: FlightRecorder | None = None

    @property
    def here(self) -> Sequence[int]:
        """The ranks of the axis whose programs this process runs."""
        return range(self.size) if self.index is None else (self.index,)


@dataclass(frozen=True, eq=False)
class Scope:
    """The axes and checks in force where a program runs.

    Attributes:
        axes: the bound axes, by name.
        check: whether the program's own reductions are checked.
        axis_index: while a per-rank program is being traced, gives this rank's index on an axis as
            an input of the program; shard_map then runs the program of one rank, on its shards.
        traced: the axes' sizes of the mesh that this program is traced for.
        stages: the axis whose ranks run different programs, if there is one.
        shares: in a simulation that is checked, a level of size 1 at which ranks' shares of
            gradients are batched, and so is what is computed from them (`functron.spmd.simulate`).
        named: collects the axes that programs name; None: not collected.
    """

    axes: dict[str, Axis | None] = field(default_factory=dict)
    check: bool = False
    axis_index: Callable[[str], torch.Tensor] | None = None
    traced: Mapping[str, int] = field(default_factory=dict)
    stages: StageAxis | None = None
    shares: SimulatedAxis | None = None
    named: set[str] | None = None


_scope: contextvars.ContextVar[Scope] = contextvars.ContextVar("functron_scope", default=Scope())  # noqa: B039


def scope() -> Scope:
    """The axes in force where this is called."""
    return _scope.get()


@contextlib.contextmanager
def bind(
    axes: Sequence[Axis],
    *,
    absent: Sequence[str] = (),
    check: bool = False,
    shares: SimulatedAxis | None = None,
) -> Iterator[None]:
    """Put `axes` in force, and the names `absent` with size 1, inside a with block."""
    outer = _scope.get()
    merged = {**outer.axes, **dict.fromkeys(absent), **{axis.name: axis for axis in axes}}
    shares = outer.shares if shares is None else shares
    with enter(replace(outer, axes=merged, check=check, shares=shares)):
        yield


@contextlib.contextmanager
def enter(scope: Scope) -> Iterator[None]:
    """Put exactly `scope` in force inside a with block."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """`named_scope`, whose time the recorder of the mesh counts by itself, where there is one."""
    found = (getattr(axis, "recorder", None) for axis in (*scope().axes.values(), scope().stages))
    recorder = next(filter(None, found), None)
    marking = contextlib.nullcontext() if recorder is None else recorder.marking(name)
    with named_scope(name), marking:
        yield


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Leave, where a with block ends by an exception, all that was entered in it.

    Every with block leaves what it entered, but Ctrl-C may come between entering and noting it:
    axes would stay bound, or a level of vmap on the stack, for all programs after it. What then
    fails on the way is no error of its own: KeyboardInterrupt is raised. Frames are cleared first,
    as generators among their values put levels back when they are freed.
    """
    outer, ambient = _scope.get(), compat.Ambient.here()
    try:
        yield
    except BaseException as error:
        chain = list(contexts_of(error))
        interrupt = next((e for e in chain if isinstance(e, KeyboardInterrupt)), None)
        if interrupt is not None:
            for each in chain:
                traceback.clear_frames(each.__traceback__)
        ambient.put_back()
        _scope.set(outer)
        if interrupt is None or interrupt is error:
            raise
        raise interrupt from None


def lookup(names: AxisNames) -> list[Axis]:
    """The bound axes with these names, without those of size 1.

    Raises:
        ValueError: a name is neither bound nor a standard axis (which has size 1 when absent), or
            is the axis of a pipeline's stages.
    """
    found = []
    here = _scope.get()
    bound, stages = here.axes, here.stages
    for name in (names,) if isinstance(names, str) else names:
        if here.named is not None:
            here.named.add(name)
        if stages is not None and name == stages.name:
            raise ValueError(
                f"at {user_line()}: got axis {name!r}, whose ranks run the stages of a pipeline; "
                "wanted an axis whose ranks run one program; fix: let the pipeline pass values "
                "from stage to stage, or map the axis (shard_map without stages=)"
            )
        if name not in bound and name not in STANDARD_AXES:
            raise ValueError(
                f"unbound axis name {name!r} at {user_line()}: "
                f"{nearest(name, {*bound, *STANDARD_AXES}, bound)}"
            )
        axis = bound.get(name)
        if axis is not None:
            found.append(axis)
    return found


@public
def axis_size(names: AxisNames) -> int:
    """The number of ranks along one axis, or along several together; a plain int.

    ``axis_size("tp")`` is 4 on ``Mesh(dp=2, tp=4)`` and 1 where the mesh has no ``tp``.
    """
    return math.prod(axis.size for axis in lookup(names))


@public
def axis_index(names: AxisNames) -> torch.Tensor | int:
    """This rank's index along one axis, or its row-major index along several.

    An int on a bound mesh, an int64 scalar tensor that varies over the axis in simulation and while
    a program is traced, and 0 for an absent axis.
    """
    index: torch.Tensor | int = 0
    for axis in lookup(names):
        index = index * axis.size + axis.index
    return index


def user_line() -> str:
    """``file:line: source`` of the innermost caller outside functron and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        if not in_library(frame):
            return source_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"


def source_line(filename: str, lineno: int) -> str:
    """``file:line: source`` for a place in a file, or in a notebook cell."""
    text = linecache.getline(filename, lineno).strip()
    return f"{filename}:{lineno}: `{text}`" if text else f"{filename}:{lineno}"
