"""Logs of processes on the stand-in, read and held against what real cards demand.

Each function takes `Process`es and returns problems as sentences; none: all is well.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """The log of one process: its rank, and its records in order."""

    rank: int
    records: tuple[dict, ...]

    def having(self, *ops: str) -> list[dict]:
        """The records of these operations."""
        return [record for record in self.records if record["op"] in ops]


def read(folder: Path) -> list[Process]:
    """The processes that wrote into a folder, by rank; those that never used a card are not there."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        first, *records = (json.loads(line) for line in file.read_text().splitlines())
        if records:
            found.append(Process(first["rank"], tuple(records)))
    return sorted(found, key=lambda process: process.rank)


def find_errors(processes: Iterable[Process]) -> list[str]:
    """Calls that a driver refuses: launches beyond a card's limits, addresses of no memory, ..."""
    return [
        f"rank {process.rank}: {record.get('call', record.get('kernel'))}: {record}"
        for process in processes
        for record in process.having("error", "refused")
    ]


def find_stray_contexts(processes: Iterable[Process], local_size: int = 8) -> list[str]:
    """Processes that opened a context on another card than their own: 0.5 GiB there, each."""
    return [
        f"rank {process.rank}: {record['call']} of thread {record['thread']!r} opened a context on "
        f"GPU {record['device']}"
        for process in processes
        for record in process.having("context")
        if record["device"] != process.rank % local_size
    ]


def find_shared_pages(processes: Iterable[Process]) -> list[str]:
    """Registrations of memory that lie on a page with another one."""
    return [
        f"rank {process.rank}: {record['bytes']} bytes at {record['start']:#x}"
        for process in processes
        for record in process.having("register")
        if not record["good"]
    ]


# --- the streams of all ranks, and the calls of NCCL that bind them

Call = tuple[str, int, int, int]
"""Name, number of elements, dtype, and the peer or root."""
PAIRS = {"Send": "Recv", "Recv": "Send"}
LAUNCH_SECONDS, BYTES_PER_SECOND = 5e-6, 1e11
WORK = ("launch", "copy", "set", "replay", "nccl")


def estimate_seconds(record: Mapping) -> float:
    """A time for one operation, of its bytes where it says them; kernels all take the same."""
    spans = [*record.get("reads", ()), *record.get("writes", ())]
    return LAUNCH_SECONDS + max((size for _, size in spans), default=0) / BYTES_PER_SECOND


@dataclass
class Execution:
    """What comes of running the streams of all ranks.

    Attributes:
        stuck: communicators whose ranks wait for one another for ever, as sentences.
        end_seconds: by rank, when its last operation is done.
        waited_seconds: by rank and communicator, the time from when a rank came to its calls to
            when the others did.
    """

    stuck: list[str]
    end_seconds: dict[int, float]
    waited_seconds: dict[tuple[int, str], float]


@dataclass(eq=False)
class _Task:
    """One operation of a stream, a group of NCCL's calls, or a point of the program's own thread."""

    rank: int
    seconds: float
    group: str = ""
    calls: list[Call] = field(default_factory=list)
    num_before: int = 0
    after: list[_Task] = field(default_factory=list)
    ready_seconds: float = 0.0
    is_done: bool = False


def execute(
    processes: Sequence[Process],
    seconds_of: Callable[[Mapping], float] = estimate_seconds,
    aborted: Collection[str] = (),
) -> Execution:
    """Run the operations of all ranks: each after those that its stream, events and host say.

    A call of NCCL begins when all of its ranks came to it, and the calls of a communicator run in
    each rank's order. The calls at the head of a set of ranks run where all of a collective's
    ranks have it there, and each send of the set has its receive. Calls of `aborted` communicators
    end without the others.
    """
    members: dict[str, dict[int, list[_Task]]] = defaultdict(dict)
    sizes: dict[str, int] = defaultdict(int)
    begun: list[_Task] = []
    for process in processes:
        tasks = _list_tasks(process, seconds_of)
        begun += [task for task in tasks if not task.num_before]
        for record in process.having("communicator"):
            calls = [task for task in tasks if task.group == record["group"]]
            members[record["group"]][record["rank"]] = calls
            sizes[record["group"]] = max(record["size"], sizes[record["group"]])
    done = Execution([], dict.fromkeys((p.rank for p in processes), 0.0), defaultdict(float))
    absent = [name for name in members if len(members[name]) < sizes[name]]
    for name in absent:
        queues = members.pop(name)
        if any(queues.values()):
            done.stuck.append(
                f"communicator {name}: {len(queues)} of {sizes[name]} ranks joined it"
            )
    arrived: set[_Task] = set()
    _finish(begun, done, arrived)
    num_done = dict.fromkeys(members, 0)
    queues = {
        name: {rank: deque(calls) for rank, calls in of.items()} for name, of in members.items()
    }
    while any(_run_heads(queues, name, num_done, done, arrived) for name in queues) or any(
        _abort_calls(queues[name], done, arrived) for name in {*aborted} & {*queues}
    ):
        pass
    for name, left in queues.items():
        if any(left.values()):
            said = {
                rank: [call for task in [*tasks][:3] for call in task.calls]
                for rank, tasks in left.items()
            }
            done.stuck.append(f"communicator {name}: stuck after {num_done[name]} calls at {said}")
    return done


def _list_tasks(process: Process, seconds_of: Callable[[Mapping], float]) -> list[_Task]:
    """The operations of a process, each bound to those that it comes after."""
    tasks: list[_Task] = []
    last: dict[Any, list[_Task]] = defaultdict(list)  # by stream, event and communicator
    host: list[_Task] = []
    grouped: dict[str, list[Mapping]] | None = None
    depth = 0

    def add(records: Sequence[Mapping], after: list[_Task], group: str = "") -> _Task:
        calls = [
            (r["name"], r["count"], r["type"], r["peer"]) for r in records if r["op"] == "nccl"
        ]
        new = _Task(process.rank, max(map(seconds_of, records), default=0.0), group, calls)
        for task in {*after, *host}:
            task.after.append(new)
            new.num_before += 1
        tasks.append(new)
        return new

    def add_calls(name: str, records: Sequence[Mapping]) -> None:
        stream = records[-1].get("stream", name)
        last[stream] = last[name] = [add(records, last[stream] + last[name], name)]

    for record in process.records:
        op, stream = record["op"], record.get("stream", -1)
        event = ("event", record.get("event"))
        if op == "group":
            depth += 1
            grouped = defaultdict(list) if depth == 1 else grouped
        elif op == "end":
            depth -= 1
            if depth == 0:
                for name, records in (grouped or {}).items():
                    add_calls(name, records)
                grouped = None
        elif op == "nccl":
            if grouped is None:
                add_calls(record["group"], [record])
            else:
                grouped[record["group"]].append(record)
        elif op in WORK:
            last[stream] = [add([record], last[stream])]
        elif op == "record":
            last[event] = last[stream]
        elif op == "wait":
            last[stream] = [*last[stream], *last[event]]
        elif op == "synchronize":
            streams = [key for key in last if isinstance(key, int)] if stream < 0 else [stream]
            keys = [event] if record.get("event") else streams
            host = [add([], [task for key in keys for task in last[key]])]
    return tasks


def _finish(begun: Iterable[_Task], done: Execution, arrived: set[_Task]) -> None:
    """Run what is ready, and what becomes so; calls of NCCL arrive, and wait for other ranks."""
    ready = list(begun)
    while ready:
        task = ready.pop()
        if task.group and not task.is_done:
            arrived.add(task)
            continue
        task.is_done = True
        end = task.ready_seconds + task.seconds
        done.end_seconds[task.rank] = max(done.end_seconds[task.rank], end)
        for other in task.after:
            other.ready_seconds = max(other.ready_seconds, end)
            other.num_before -= 1
            if not other.num_before:
                ready.append(other)


def _run_heads(
    queues: Mapping[str, dict[int, deque[_Task]]],
    name: str,
    num_done: dict[str, int],
    done: Execution,
    arrived: set[_Task],
) -> bool:
    """Whether the first calls of some ranks of a communicator could run; then they have."""
    own = queues[name]
    heads = {rank: tasks[0] for rank, tasks in own.items() if tasks and tasks[0] in arrived}
    ready = _find_ready({rank: task.calls for rank, task in heads.items()}, len(own))
    starts = {}
    for rank in ready:
        peers = [peer for call, *_, peer in heads[rank].calls if call in PAIRS]
        shared = ready if len(peers) < len(heads[rank].calls) else {rank, *peers}
        starts[rank] = max(heads[each].ready_seconds for each in shared)
    for rank, start in starts.items():
        task = own[rank].popleft()
        done.waited_seconds[task.rank, name] += start - task.ready_seconds
        task.ready_seconds, task.is_done = start, True
        _finish([task], done, arrived)
    num_done[name] += bool(ready)
    return bool(ready)


def _abort_calls(queues: Mapping[int, deque[_Task]], done: Execution, arrived: set[_Task]) -> bool:
    """Whether there were calls that wait in a communicator; they have ended."""
    waiting = [task for tasks in queues.values() for task in tasks if task in arrived]
    for tasks in queues.values():
        kept = [task for task in tasks if task not in arrived]
        tasks.clear()
        tasks.extend(kept)
    for task in waiting:
        task.is_done = True
    _finish(waiting, done, arrived)
    return bool(waiting)


def find_unmatched(processes: Sequence[Process], aborted: Collection[str] = ()) -> list[str]:
    """Communicators whose ranks wait for one another for ever, beside those that were aborted."""
    return execute(processes, aborted=aborted).stuck


def _find_ready(heads: Mapping[int, list[Call]], size: int) -> set[int]:
    """The ranks whose first calls all have their counterparts among the first calls of others."""
    ready = set(heads)
    while True:
        bad = {rank for rank in ready if not _has_counterparts(rank, heads, ready, size)}
        if not bad:
            return ready
        ready -= bad


def _has_counterparts(
    rank: int, heads: Mapping[int, list[Call]], ready: set[int], size: int
) -> bool:
    shared = [call for call in heads[rank] if call[0] not in PAIRS]
    if shared:
        others = [[call for call in heads[r] if call[0] not in PAIRS] for r in ready]
        if len(ready) < size or any(other != shared for other in others):
            return False
    for name, _, _, peer in heads[rank]:
        if name not in PAIRS:
            continue
        if peer not in ready:
            return False
        mine = [c[1:3] for c in heads[rank] if c[0] == name and c[3] == peer]
        theirs = [c[1:3] for c in heads[peer] if c[0] == PAIRS[name] and c[3] == rank]
        if mine != theirs:
            return False
    return True


# --- what is sent behind computation


def list_hiding(process: Process) -> list[tuple[dict, list[str]]]:
    """Each of NCCL's calls, and the kernels launched after it before another stream waits for it."""
    found: list[tuple[dict, list[str]]] = []
    waited: set[int] = set()
    covered: dict[int, list[int]] = {}  # by event: the calls that were on its stream before it
    for record in process.records:
        if record["op"] == "nccl":
            found.append((record, []))
        elif record["op"] == "record":
            streams = enumerate(call["stream"] for call, _ in found)
            covered[record["event"]] = [i for i, s in streams if s == record["stream"]]
        elif record["op"] == "wait":
            before = covered.get(record["event"], [])
            waited |= {i for i in before if found[i][0]["stream"] != record["stream"]}
        elif record["op"] == "launch":
            for number, (call, kernels) in enumerate(found):
                if number not in waited and call["stream"] != record["stream"]:
                    kernels.append(record["kernel"])
    return found


# --- memory that two streams use


@dataclass
class _Use:
    start: int
    stop: int
    stream: int
    tick: int
    what: str

    def covers(self, other: _Use) -> bool:
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and self.stream == other.stream


def find_races(process: Process) -> list[str]:
    """Memory that a stream uses while another one may still write it, or writes while it is read.

    An operation comes after those before it in its stream, and after what its stream waited for by
    events; what the host waited for, or found done, comes before all that it starts then. Copies,
    collectives and Inductor's kernels say what they use; torch's own kernels do not:
    torch.cuda._sanitizer watches those.
    """
    clocks: dict[int, Clock] = defaultdict(dict)
    events: dict[int, Clock] = {}
    host: Clock = {}
    used: dict[str, list[_Use]] = {"reads": [], "writes": []}
    problems: list[str] = []
    for record in process.records:
        op, stream = record["op"], record.get("stream", -1)
        if op == "record":
            events[record["event"]] = dict(clocks[stream])
        elif op == "wait":
            _merge(clocks[stream], events.get(record["event"], {}))
        elif op in ("synchronize", "query") and record.get("event"):
            _merge(host, events.get(record["event"], {}))
        elif op == "synchronize":
            for each in clocks if stream < 0 else [stream]:
                _merge(host, clocks[each])
        elif not used.keys().isdisjoint(record):
            clock = clocks[stream]
            _merge(clock, host)
            clock[stream] = clock.get(stream, 0) + 1
            clashes = _find_clashes(record, clock, used)
            problems += [f"rank {process.rank}: {clash}" for clash in clashes]
            _add_uses(record, clock[stream], used)
    return problems


Clock = dict[int, int]
"""By stream, how many of its operations have come before."""


def _merge(into: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


def _name_use(record: Mapping) -> str:
    return record.get("kernel") or record.get("name") or record.get("call") or record["op"]


def _find_clashes(record: Mapping, clock: Clock, used: Mapping[str, list[_Use]]) -> Iterator[str]:
    """Uses of the record's memory that its stream does not come after, of which one writes."""
    for kind, others in (("reads", ("writes",)), ("writes", ("writes", "reads"))):
        earlier = [use for other in others for use in used[other]]
        for start, size in record.get(kind, ()):
            for use in earlier:
                overlaps = use.start < start + size and start < use.stop
                if overlaps and clock.get(use.stream, 0) < use.tick:
                    yield (
                        f"{_name_use(record)} on stream {record['stream']} {kind} {size} bytes "
                        f"while {use.what} on stream {use.stream} may still use them"
                    )


def _add_uses(record: Mapping, tick: int, used: Mapping[str, list[_Use]]) -> None:
    """Remember the record's uses, which stand for those before of the same stream in their place."""
    stream, what = record["stream"], _name_use(record)
    for kind, known in used.items():
        for start, size in record.get(kind, ()):
            new = _Use(start, start + size, stream, tick, what)
            known[:] = [use for use in known if not new.covers(use)] + [new]
