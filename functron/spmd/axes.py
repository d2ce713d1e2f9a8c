"""The axes that are bound around a running per-rank program: simulated, on processes, or traced.

A traced program says ``psum(x, axis="tp")``; which processes that means is decided when it is
compiled for a bound mesh. Its operations on axis names exist on fake tensors only.
"""

from __future__ import annotations

import contextlib
import contextvars
import linecache
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from functron.core import compat
from functron.core.errors import contexts_of, in_library, nearest, public, refuse
from functron.core.scopes import named_scope, set_during
from functron.spmd.flight import FlightRecorder, SourceLine
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, LostRanksError, Membership

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


def _like(x, *args, **kwargs):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _view(x, *axes):
    return x.view_as(x)


_SHAPED = {
    "all_gather": lambda x, axis, size: x.new_empty((size, *x.shape)),
    "psum_scatter": lambda x, axis, size, *, must_vary=False: x.new_empty(x.shape[1:]),
}

for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    if "Tensor(a)" in _schema:
        LIBRARY.impl(_name, _view, "CompositeExplicitAutograd")
    else:
        LIBRARY.impl(_name, _SHAPED.get(_name, _like), "Meta")


def define_op(schema: str, run: Callable, fake: Callable) -> None:
    """Define an operation of functron's by its schema, its function and that for fake tensors."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"functron::{name}", fake, lib=LIBRARY)


OPS = torch.ops.functron


@dataclass(frozen=True, eq=False)
class TracedAxis:
    """An axis of a per-rank program that is being traced.

    Attributes:
        make_index: gives this rank's index on the axis of that name, an input of the program.
    """

    name: str
    size: int
    make_index: Callable[[str], torch.Tensor]
    token: None = None

    @property
    def index(self) -> torch.Tensor:
        return self.make_index(self.name)

    def send(self, op: str, x: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        """A collective of x, an operation of the program by the name that `functron.lax` has."""
        return getattr(OPS, op)(x, self.name, self.size, *operands, **options)

    def mark(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x with a statement about its replication: vary, assume_ or require_replicated."""
        return getattr(OPS, kind)(x, self.name)


AxisNames = str | Sequence[str]
_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten


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

    @property
    def level(self) -> int:
        """That of its vmap, also where levels of grad wrap the token, as in second derivatives."""
        return compat.batch_level_of(self.token)

    def varies(self, value: torch.Tensor) -> bool:
        """Whether `value` differs between the ranks of this axis (is batched at its level)."""
        return compat.is_batched_at(value, self.level)


_SOURCE = re.compile(r"\[[^]]*\bgloo/[^]]*\] ?")
"""The place in gloo's own source that each of its messages has."""


def raise_lost(error: RuntimeError, where: str) -> None:
    """Explain `error`, if the backend of collectives raised it; else return.

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


def permute_ranks(
    x: torch.Tensor,
    sources: Sequence[int],
    destinations: Sequence[int],
    wait: bool,
    index: int,
    size: int,
    group: str,
) -> torch.Tensor:
    """x of the rank that sends to rank `index` of a group; zeros where none does.

    Without `wait` it may still be on its way, and x must stay as it is until then.
    """
    target = dict(zip(sources, destinations, strict=True))
    source = {to: rank for rank, to in target.items()}
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

    def find_line(self) -> SourceLine | None:
        """The line of the program that is about to communicate; None: not recorded."""
        return None if self.recorder is None else self.recorder.find_line(2)

    def set_line(self, line: SourceLine | None, backward: bool) -> None:
        """Attribute the next collective over the axis to this line."""
        if self.recorder is not None:
            self.recorder.set_line(line, backward)

    def record(self, op: str, value: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Record a collective that takes as long as a with block."""
        if self.membership is not None:
            self.membership.entered += 1
        if self.recorder is None:
            return contextlib.nullcontext()
        return self.recorder.record(op, self.name, value)

    @contextlib.contextmanager
    def record_wait(self) -> Iterator[None]:
        """Record that this process waits, in a with block, for what it entered last."""
        if self.recorder is not None:
            self.recorder.resume(self.name)
        yield
        if self.recorder is not None:
            self.recorder.leave()

    def send(self, op: str, x: torch.Tensor, *operands: Any, **_: Any) -> torch.Tensor:
        """A collective of x by the name that `functron.lax` has, waited for and recorded."""
        recorder = self.recorder
        if self.membership is not None:
            self.membership.entered += 1
        if recorder is not None:
            recorder.wait(recorder.enter(op, self.name, x))
        try:
            if op == "ppermute":
                sources, targets, wait = operands
                place = self.index, self.size, self.group
                result = permute_ranks(x, sources, targets, wait, *place)
            else:
                start = STARTS[op](_call, self.group, x, self.size, *operands)
                result = _c10d.wait_tensor(start)
        except RuntimeError as error:
            raise_lost(error, f"{op} over {self.name!r} at {user_line()}")
            raise
        if recorder is not None:
            recorder.leave()
        return result.squeeze(0) if op == "psum_scatter" else result

    def mark(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x: a statement about its replication, for those who check it."""
        return x.view_as(x)


def _call(op: Callable, args: tuple) -> torch.Tensor:
    return op(*args)


STARTS: Mapping[str, Callable[..., Any]] = {
    "psum": lambda call, group, x, size: call(_c10d.all_reduce.default, (x, "sum", group)),
    "pmax": lambda call, group, x, size: call(_c10d.all_reduce.default, (x, "max", group)),
    "pmin": lambda call, group, x, size: call(_c10d.all_reduce.default, (x, "min", group)),
    "pbroadcast": lambda call, group, x, size, source: call(
        _c10d.broadcast.default, (x, source, group)
    ),
    "all_gather": lambda call, group, x, size: call(
        _c10d.all_gather_into_tensor.default, (call(_aten.unsqueeze.default, (x, 0)), size, group)
    ),
    "psum_scatter": lambda call, group, x, size: call(
        _c10d.reduce_scatter_tensor.default, (x, "sum", size, group)
    ),
    "all_to_all": lambda call, group, x, size: call(
        _c10d.all_to_all_single.default, (x, [1] * size, [1] * size, group)
    ),
}
"""The start of each collective over the processes of a group; its result must be waited for.

``call(operation, args)`` runs an operation, or makes a node of a graph.
"""

Axis = SimulatedAxis | BoundAxis | TracedAxis


@dataclass(frozen=True, eq=False)
class StageAxis:
    """An axis whose ranks run different programs: the stages of a pipeline.

    It is not mapped. One process runs the programs of all its ranks in turn, or, on a bound mesh,
    of its own rank.

    Attributes:
        index: this process's rank on it; None where this process runs them all.
        group: the process group; "" where there is none.
        recorder: of what goes over it; None: not recorded.
        mesh: that it is an axis of; None where there are no processes.
    """

    name: str
    size: int
    index: int | None = None
    group: str = ""
    recorder: FlightRecorder | None = None
    mesh: BoundMesh | None = None

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
        uneven: the axes of which not all ranks may come to a collective here: each with a function
            of the collective's name and the axis', which is called before it starts.
        given: the values that the program was called with on this rank, each with its spec.
    """

    axes: dict[str, Axis | None] = field(default_factory=dict)
    check: bool = False
    axis_index: Callable[[str], torch.Tensor] | None = None
    traced: Mapping[str, int] = field(default_factory=dict)
    stages: StageAxis | None = None
    shares: SimulatedAxis | None = None
    named: set[str] | None = None
    uneven: Mapping[str, Callable[[str, str], object]] = field(default_factory=dict)
    given: Sequence[tuple[Any, Any]] = ()


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
    uneven = {name: by for name, by in outer.uneven.items() if merged[name] is outer.axes[name]}
    with enter(replace(outer, axes=merged, check=check, shares=shares, uneven=uneven)):
        yield


def enter(scope: Scope) -> contextlib.AbstractContextManager[None]:
    """Put exactly `scope` in force inside a with block."""
    return set_during(_scope, scope)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """`named_scope`, whose time is counted separately where the mesh has a recorder."""
    found = (getattr(axis, "recorder", None) for axis in (*scope().axes.values(), scope().stages))
    recorder = next(filter(None, found), None)
    marking = contextlib.nullcontext() if recorder is None else recorder.measure(name)
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


def refuse_uneven(by: str, op: str, name: str) -> None:
    """Raise ValueError for a collective to which not all ranks of an axis may come, `by` this."""
    refuse(
        f"{op} at {user_line()}",
        f"{op} over {name!r}",
        f"a collective that ranks of {name!r} may not all come to: {by}, which varies over "
        f"{name!r}. On processes those that come would wait for the others for ever",
        f"collectives over axes along which that is the same, or none over {name!r}",
        f"make it the same on all ranks, as lax.pmax(..., {name!r}) or lax.psum does; or take the "
        "collective out, and choose between results with torch.where",
    )


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
