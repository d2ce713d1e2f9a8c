"""The flight recorder: which collectives a process entered and left in a step, in their order.

It says what a process waits for when nothing moves any more, how long it waited over each axis,
and, by choice, that ranks are about to enter different collectives, which would wait for one
another for ever (`Agreement`).

A mesh is bound with a recorder (`Mesh.bind`) and hands it to its axes. Eager collectives record
themselves. Those in compiled code are called by torch, which finds a process group by its name:
there the group is a `RecordedGroup`. Without a recorder there is neither.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from functron.core.errors import is_library

EVERYWHERE = "all ranks"
"""The name of an axis where all processes of a job take part."""

MAX_ENTRIES = 1 << 17  # of one step; beyond, the first are forgotten

_BELOW = ("functron.core.", "functron.spmd.", "functron.transforms.", "functron.spmd.params")
_COMPILED = ("functron.compiler.", "functron.program.")


class SourceLine(NamedTuple):
    """A place in a program.

    Attributes:
        backward: whether the collective is the transpose of the one that is written there.
    """

    file: str
    number: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.number}{' (backward)' if self.backward else ''}"


class CollectiveKind(NamedTuple):
    """The kind of a collective: ranks that do the same enter the same kinds in the same order.

    Attributes:
        op: as functron.lax names it, or "send" and "receive" between stages of a pipeline.
        bytes: of the operand.
        dtype: of it, by its name.
        line: that asks for it; None: a compiled program does.
        peer: the rank that a send goes to or a receive comes from; None: all of the axis.
    """

    op: str
    axis: str
    bytes: int
    dtype: str
    line: SourceLine | None
    peer: int | None = None

    def __str__(self) -> str:
        over = f" over {self.axis!r}" if self.axis != EVERYWHERE else f" of {EVERYWHERE}"
        peer = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} {self.peer}"
        at = f" at {self.line}" if self.line is not None else ""
        return f"{self.op}{peer}{over}, {self.bytes:,} bytes of {self.dtype}{at}"

    @property
    def matched(self) -> tuple | None:
        """The part that all ranks of the axis have in common; None: none, of transfers of two."""
        if self.peer is not None:
            return None
        # ranks send as much as they have
        size = -1 if self.op.endswith("all_to_all") else self.bytes
        return self.op, self.axis, size, self.dtype


class Waiting(NamedTuple):
    """A collective that has not ended.

    Attributes:
        ordinal: its number among those of the step, from 0.
        since: when this process began to wait, of `time.perf_counter`.
        start: the same on a GPU's stream; None: there is none.
    """

    kind: CollectiveKind
    ordinal: int
    since: float
    start: Any = None


class FlightRecorder:
    """The collectives one process enters and leaves. A call costs a microsecond or two.

    Attributes:
        ranks: by axis, the ranks of the job that this process meets there, itself among them.
        kinds: every kind that was entered, in order of appearance.
        sequence: what the step entered so far, as indices of `kinds`.
        before: what the step before it did.
        dropped: how many entries of the step were forgotten.
        waiting: for what this process waits; None: for nothing.
        seconds: by axis, how long it has waited in all.
        marked: seconds of the processor in sections of a step that mark themselves, in all.
        compiling: since when this process has been compiling a kernel, of `time.monotonic`; None:
            it is not.
        compiled: when it last ended to compile one.
    """

    def __init__(self, device_type: str = "cpu"):
        self.step = 0
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.kinds: list[CollectiveKind] = []
        self.sequence: list[int] = []
        self.before: list[int] = []
        self.dropped = 0
        self.waiting: Waiting | None = None
        self.seconds: dict[str, float] = {}
        self.marked: dict[str, float] = {}
        self.compiling: float | None = None
        self.compiled = -math.inf
        self.device: DeviceClock | None = DeviceClock() if device_type == "cuda" else None
        self.agreement: Agreement | None = None
        self._numbers: dict[CollectiveKind, int] = {}
        self._places: dict[CodeType, str] = {}
        self._names: dict[torch.dtype, str] = {}
        self._at: SourceLine | None = None

    def begin(self, step: int) -> None:
        """From here on collectives are those of `step`."""
        self.step, self.before, self.sequence, self.dropped = step, self.sequence, [], 0
        if self.agreement is not None:
            self.agreement.forget()

    def find_line(self, depth: int = 1) -> SourceLine | None:
        """The line, outside what collectives are made of, of the caller that many frames up."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            # one look-up per code object: there are twenty frames and few codes
            code = frame.f_code
            place = self._places.get(code)
            if place is None:
                place = self._places[code] = _locate(frame)
            if place == "program":
                return SourceLine(code.co_filename, frame.f_lineno)
            if place == "compiled":
                return None
            frame = frame.f_back
        return None

    def set_line(self, line: SourceLine | None, backward: bool) -> None:
        """The next collective is of this line."""
        self._at = line if line is None or not backward else line._replace(backward=True)

    def enter(
        self, op: str, axis: str, value: torch.Tensor | None, peer: int | None = None
    ) -> Waiting:
        """Record that a collective over `axis` of `value` was entered."""
        line, self._at = self._at, None
        if line is None:
            line = self.find_line(2)
        if value is None:
            kind = CollectiveKind(op, axis, 0, "no values", line, peer)
        else:
            name = self._names.get(value.dtype)
            if name is None:
                name = self._names[value.dtype] = str(value.dtype).removeprefix("torch.")
            kind = CollectiveKind(op, axis, value.nbytes, name, line, peer)
        number = self._numbers.get(kind)
        if number is None:
            number = self._numbers[kind] = len(self.kinds)
            self.kinds.append(kind)
        self.sequence.append(number)
        if len(self.sequence) > MAX_ENTRIES:
            half = MAX_ENTRIES // 2
            self.dropped += half
            del self.sequence[:half]
        entry = Waiting(kind, self.dropped + len(self.sequence) - 1, 0.0)
        if self.agreement is not None and kind.matched is not None:
            self.waiting = entry._replace(since=time.perf_counter())
            self.agreement.check(self.step, kind, self.ranks[axis])
        return entry

    def wait(self, entry: Waiting) -> None:
        """Record that this process waits for the end of what it has entered."""
        start = None if self.device is None else self.device.mark()
        self.waiting = Waiting(entry.kind, entry.ordinal, time.perf_counter(), start)

    def leave(self) -> None:
        """Record that what it waited for has ended."""
        entry = self.waiting
        if entry is not None:
            axis, now = entry.kind.axis, time.perf_counter()
            self.seconds[axis] = self.seconds.get(axis, 0.0) + now - entry.since
            self.waiting = None
            if self.device is not None:
                self.device.ended(entry)

    @contextlib.contextmanager
    def record(
        self, op: str, axis: str, value: torch.Tensor | None, peer: int | None = None
    ) -> Iterator[None]:
        """Record a collective that takes as long as the with block, in which it is waited for."""
        self.set_line(self._at or self.find_line(3), False)
        self.wait(self.enter(op, axis, value, peer))
        try:
            yield
        finally:
            self.leave()

    def resume(self, axis: str) -> None:
        """Record that this process waits for the last collective over `axis`."""
        for back, number in enumerate(reversed(self.sequence)):
            if self.kinds[number].axis == axis:
                ordinal = self.dropped + len(self.sequence) - 1 - back
                self.wait(Waiting(self.kinds[number], ordinal, 0.0))
                return

    def ordinal_over(self, waiting: Waiting) -> int:
        """How many collectives over the same axis the step had entered before this one."""
        before = self.sequence[: max(0, waiting.ordinal - self.dropped)]
        return sum(self.kinds[number].axis == waiting.kind.axis for number in before)

    @contextlib.contextmanager
    def compile(self) -> Iterator[Callable[[], None]]:
        """Record that this process compiles in a with block, while others may wait for it.

        Yields:
            What is to be called after each kernel.
        """

        def go_on() -> None:
            self.compiling = time.monotonic()

        go_on()
        try:
            yield go_on
        finally:  # in this order: another thread reads them in the other
            self.compiled = time.monotonic()
            self.compiling = None

    @contextlib.contextmanager
    def measure(self, section: str) -> Iterator[None]:
        """Count the processor's time of this thread in a with block as that of a section."""
        before = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - before
            self.marked[section] = self.marked.get(section, 0.0) + seconds


def _locate(frame: FrameType) -> str:
    name = str(frame.f_globals.get("__name__", ""))
    if name.startswith(_COMPILED):
        return "compiled"
    own = name.partition(".")[0] == "functron"
    if name.startswith(_BELOW) or (is_library(frame.f_globals) and not own):
        return "below"
    if frame.f_code.co_filename.startswith("<"):  # generated: dataclasses, signatures
        return "below"
    return "program"


# --- compiled code


class RecordedWork(dist._Work):
    """A collective of compiled code that is under way; waiting for it is recorded."""

    def __init__(self, work: Any, entry: Waiting, recorder: FlightRecorder):
        super().__init__()
        self._work, self._entry, self._recorder = work, entry, recorder

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for its end."""
        recorder = self._recorder
        recorder.wait(self._entry)
        done = self._work.wait(timeout) if timeout else self._work.wait()
        recorder.leave()
        return done

    def get_future(self) -> Any:
        """The future of its results."""
        return self._work.get_future()


def _recorded_method(name: str, op: str = "", operand: int = 0) -> Callable[..., RecordedWork]:
    """A method of `RecordedGroup`: that of its group, recorded.

    Args:
        op: of the collective; "": the reduction that the last argument asks for.
        operand: the argument that is sent: a tensor, or a list of them.
    """

    def call(self: RecordedGroup, *args: Any) -> RecordedWork:
        value = args[operand] if isinstance(args[operand], torch.Tensor) else args[operand][0]
        recorder = self._recorder
        entry = recorder.enter(op or reduction(args[-1]), self._axis, value)
        return RecordedWork(getattr(self._group, name)(*args), entry, recorder)

    return call


class RecordedGroup(dist.ProcessGroup):
    """A process group whose collectives, of functional ones in compiled code, are recorded."""

    def __init__(self, group: dist.ProcessGroup, axis: str, recorder: FlightRecorder):
        rank_and_size: tuple[Any, ...] = (group.rank(), group.size())
        super().__init__(*rank_and_size)
        # weak: a process that leaves the others frees the group, which ends its threads
        self._whole, self._axis, self._recorder = weakref.ref(group), axis, recorder

    @property
    def _group(self) -> Any:
        return self._whole()

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The name that torch has for it."""
        return "recorded"

    allreduce = _recorded_method("allreduce")
    allreduce_coalesced = _recorded_method("allreduce_coalesced")
    broadcast = _recorded_method("broadcast", "pbroadcast")
    allgather_into_tensor_coalesced = _recorded_method(
        "allgather_into_tensor_coalesced", "all_gather", operand=1
    )
    reduce_scatter_tensor_coalesced = _recorded_method(
        "reduce_scatter_tensor_coalesced", "psum_scatter", operand=1
    )
    alltoall_base = _recorded_method("alltoall_base", "all_to_all", operand=1)


def reduction(opts: Any) -> str:
    """The reduction that options of torch's ask for, as `functron.lax` names it if it has it."""
    name = str(opts.reduceOp.op.name).lower()
    return {"sum": "psum", "max": "pmax", "min": "pmin"}.get(name, name)


# --- on GPUs


class DeviceClock:
    """Pairs of events around the collectives of a GPU, which go on after the host has.

    Args:
        make_event: of a point in the current stream, with ``record``, ``query``, ``elapsed_time``.
        capturing: whether a graph is being captured, which events must not be part of.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] | None = None,
        capturing: Callable[[], bool] | None = None,
    ):
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._capturing = capturing or torch.cuda.is_current_stream_capturing
        self._spare: list[Any] = []
        self._open: deque[tuple[Waiting, Any]] = deque()

    def mark(self) -> Any:
        """An event here; None while a graph is captured."""
        if self._capturing():
            return None
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        return event

    def ended(self, entry: Waiting) -> None:
        """The stream goes on here once the collective has ended."""
        end = None if entry.start is None else self.mark()
        if end is not None:
            self._open.append((entry, end))

    def collect(self) -> dict[str, float]:
        """By axis, the seconds of those that ended and were not collected before."""
        found: dict[str, float] = {}
        while self._open and self._open[0][1].query():
            entry, end = self._open.popleft()
            seconds = entry.start.elapsed_time(end) / 1000
            found[entry.kind.axis] = found.get(entry.kind.axis, 0.0) + seconds
            self._spare += [entry.start, end]
        return found

    def stuck(self) -> Waiting | None:
        """The first that has not ended; it may not have begun."""
        return next((entry for entry, end in list(self._open) if not end.query()), None)


# --- agreement


class DisagreementError(RuntimeError):
    """Ranks are about to enter different collectives, or one does not come to any."""


class Agreement:
    """Compares, before each collective, what the ranks that are to meet in it are about to enter.

    Each tells the others by the job's store, and reads what they tell: nothing of a process group
    is used, and a rank that tells nothing within `seconds` is an error too.

    Args:
        store: of this process alone, as another thread may wait in the job's.
        seconds: that the others have; may be set anew.
        one_order: all ranks enter all of their collectives in one order. Stages of a pipeline,
            which run different programs, do not: only collectives over the same axis are compared
            then; for the others it is reported that a rank is missing.
    """

    def __init__(self, store: dist.Store, rank: int, seconds: float, one_order: bool = True):
        self._store, self._rank, self.seconds = store, rank, seconds
        self._one_order = one_order
        self._counts: Counter[tuple] = Counter()
        self._told: deque[list[str]] = deque([[]])

    def check(self, step: int, kind: CollectiveKind, ranks: Sequence[int]) -> None:
        """Return when all `ranks` have come to this collective.

        Raises:
            DisagreementError: one of them is about to enter another, or does not come.
        """
        among = () if self._one_order else (kind.axis, *ranks)
        place = "/".join(map(str, (*among, self._counts[among])))
        self._counts[among] += 1
        self._told[-1].append(f"agree/{place}/{self._rank}")
        self._store.set(self._told[-1][-1], f"{step}|{kind.matched}|{kind}")
        others = [rank for rank in ranks if rank != self._rank]
        keys = [f"agree/{place}/{rank}" for rank in others]
        try:
            self._store.wait(keys, timedelta(seconds=self.seconds))
        except RuntimeError as error:
            late = [r for r, key in zip(others, keys, strict=True) if not self._store.check([key])]
            raise DisagreementError(
                f"collective {place}, step {step + 1}: got nothing from rank "
                f"{', '.join(map(str, late))} for {self.seconds:g} s; wanted it in {kind}"
            ) from error
        for rank, key in zip(others, keys, strict=True):
            theirs, matched, text = self._store.get(key).decode().split("|", 2)
            if (theirs, matched) != (str(step), str(kind.matched)):
                # in the order of ranks: the first of the two to say it may be the only one
                (lower, wanted, its), (upper, got, at) = sorted(
                    [(rank, text, int(theirs) + 1), (self._rank, str(kind), step + 1)]
                )
                raise DisagreementError(
                    f"collective {place}: got {got} (step {at}) on rank {upper} where "
                    f"rank {lower} has {wanted} (step {its}); wanted the same on both, "
                    "which would otherwise wait for one another for ever; fix: decide by "
                    "lax.axis_index and torch.where, not by a Python branch on the rank"
                )

    def forget(self) -> None:
        """Take back what was told two steps ago: everybody has read it."""
        self._told.append([])
        if len(self._told) > 2:
            for key in self._told.popleft():
                self._store.delete_key(key)


def describe(recorder: FlightRecorder, waiting: Waiting | None) -> Mapping[str, Any] | None:
    """A collective that has not ended, as a report has it."""
    if waiting is None:
        return None
    kind = waiting.kind
    return {
        "op": kind.op,
        "axis": kind.axis,
        "ranks": list(recorder.ranks[kind.axis]) if kind.peer is None else [kind.peer],
        "bytes": kind.bytes,
        "dtype": kind.dtype,
        "ordinal": waiting.ordinal,
        "ordinal_over_axis": recorder.ordinal_over(waiting),
        "line": None if kind.line is None else str(kind.line),
        "seconds": round(time.perf_counter() - waiting.since, 3) if waiting.since else None,
    }


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``"rank 1"``, ``"ranks 1, 2"``."""
    if not ranks:
        return "no other rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
