"""Logs of processes on the stand-in, read and held against what real cards demand.

Each function takes `Process`es and returns problems as sentences; none: all is well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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


# --- the order of NCCL's calls

Call = tuple[str, int, int, int]
"""Name, number of elements, dtype, and the peer or root."""


def _list_calls(process: Process) -> dict[str, list[list[Call]]]:
    """By communicator: its calls in order, those of one group together."""
    found: dict[str, list[list[Call]]] = defaultdict(list)
    depth, group = 0, defaultdict(list)
    for record in process.having("nccl", "group", "end"):
        if record["op"] == "group":
            depth += 1
        elif record["op"] == "end":
            depth -= 1
            if depth == 0:
                for name, calls in group.items():
                    found[name].append(calls)
                group = defaultdict(list)
        else:
            call = (record["name"], record["count"], record["type"], record["peer"])
            if depth:
                group[record["group"]].append(call)
            else:
                found[record["group"]].append([call])
    return found


def find_unmatched(processes: Sequence[Process]) -> list[str]:
    """Communicators whose ranks wait for one another for ever.

    Each runs its calls in order; the calls at the head of a set of ranks run where all of a
    collective's ranks have it there, and each send of the set has its receive.
    """
    members: dict[str, dict[int, list[list[Call]]]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for process in processes:
        calls = _list_calls(process)
        for record in process.having("communicator"):
            members[record["group"]][record["rank"]] = calls.get(record["group"], [])
            sizes[record["group"]] = max(record["size"], sizes.get(record["group"], 0))
    problems = []
    for name, queues in members.items():
        size = max(sizes[name], len(queues))
        if len(queues) < size and any(queues.values()):
            problems.append(f"communicator {name}: {len(queues)} of {size} ranks joined it")
            continue
        left, done = {rank: list(calls) for rank, calls in queues.items()}, 0
        while any(left.values()):
            heads = {rank: calls[0] for rank, calls in left.items() if calls}
            ready = _find_ready(heads, size)
            if not ready:
                said = {rank: calls[:3] for rank, calls in heads.items()}
                problems.append(f"communicator {name}: stuck after {done} calls at {said}")
                break
            for rank in ready:
                left[rank].pop(0)
            done += 1
    return problems


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
    pairs = {"Send": "Recv", "Recv": "Send"}
    shared = [call for call in heads[rank] if call[0] not in pairs]
    if shared:
        others = [[call for call in heads[r] if call[0] not in pairs] for r in ready]
        if len(ready) < size or any(other != shared for other in others):
            return False
    for name, _, _, peer in heads[rank]:
        if name not in pairs:
            continue
        if peer not in ready:
            return False
        mine = [c[1:3] for c in heads[rank] if c[0] == name and c[3] == peer]
        theirs = [c[1:3] for c in heads[peer] if c[0] == pairs[name] and c[3] == rank]
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
