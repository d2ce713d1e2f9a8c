"""Transfers on processes find one another in any schedule, as NCCL runs them; simulated by hand.

Each rank's part is run by the executor itself, with stages that compute nothing, and a log of what
is issued in the place of torch's transfers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from functron.core import compat
from functron.pipeline import NAMES, Partition, Schedule, even_layout, execute, make, p2p
from functron.pipeline.timeline import Action
from functron.spmd import mesh as meshes
from functron.spmd.axes import StageAxis
from functron.spmd.mesh import BoundMesh, Mesh
from tests.fake_gpu import journal

X = torch.zeros(2)
BOUNDARY = p2p.Boundary.of(X)
WHOLE = "pp"  # the group of all ranks


class Batch(NamedTuple):
    """Transfers to or from a rank that are issued together in a group.

    Attributes:
        blocks: the process goes on when they have ended.
    """

    number: int
    group: str
    kind: str
    peer: int
    count: int
    blocks: bool = False


class Wait(NamedTuple):
    """What is issued after it runs when a batch has ended."""

    number: int


class Compute(NamedTuple):
    action: Action


Program = list[Batch | Wait | Compute]


class Log:
    """What one process issues; in the place of what it calls in torch.distributed."""

    def __init__(self, rank: int, regroup: Callable[[int, str, int], str] | None):
        self.program: Program = []
        self.rank, self.regroup, self.connecting = rank, regroup, False

    def batch(self, operations: Sequence[Any]) -> list[Any]:
        (key,) = {(op.group, op.op.__name__, op.group_peer) for op in operations}
        return [self.add(*key, len(operations), self.connecting)]

    def add(self, group: str, kind: str, peer: int, count: int, blocks: bool = False) -> Any:
        number, kind = len(self.program), kind.removeprefix("i")
        group = self.regroup(self.rank, kind, peer) if self.regroup else group
        self.program.append(Batch(number, group, kind, peer, count, blocks))
        wait = lambda: None if blocks else self.program.append(Wait(number))
        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def send_objects(self, objects: list, group: str, group_dst: int, device: Any) -> None:
        self.add(WHOLE, "send", group_dst, 1, blocks=True)

    def receive_objects(self, objects: list, group: str, group_src: int, device: Any) -> None:
        objects[0] = BOUNDARY
        self.add(WHOLE, "recv", group_src, 1, blocks=True)

    @contextmanager
    def replacing_torch(self) -> Iterator[None]:
        connect = BoundMesh.connect

        def connecting(*arguments: Any) -> Any:
            self.connecting = True
            found = connect(*arguments)
            self.connecting = False
            return found

        operation = lambda op, tensor, group, group_peer: SimpleNamespace(
            op=op, group=group, group_peer=group_peer
        )
        with (
            mock.patch.object(compat, "group", lambda name: name),
            mock.patch.object(compat, "find_group", lambda name: name),
            mock.patch.object(compat, "name_group"),
            mock.patch.object(compat, "runs_gloo", return_value=False),
            mock.patch.object(meshes, "_copy_group", lambda group, device, name: name),
            mock.patch.object(BoundMesh, "connect", connecting),
            mock.patch.object(dist, "P2POp", operation),
            mock.patch.object(dist, "batch_isend_irecv", self.batch),
            mock.patch.object(dist, "send_object_list", self.send_objects),
            mock.patch.object(dist, "recv_object_list", self.receive_objects),
        ):
            yield


class NoWork:
    """Stages that compute nothing; see `functron.pipeline.stage_backward.Pullbacks`."""

    def forward(self, call):
        yield from ()
        return X, None

    def backward(self, residuals, cotangent, sums):
        yield from ()
        return [X], sums

    def backward_input(self, residuals, cotangent):
        yield from ()
        return [X], residuals

    def backward_weight(self, residuals, sums):
        yield from ()
        return sums


def programs_of(schedule: Schedule, *, times: int = 2, regroup: Any = None) -> list[Program]:
    """What each rank issues in some steps: shapes are known from the second one on."""
    p, found, run_actions = schedule.num_ranks, [], execute._Execution._run_actions
    layout = even_layout(schedule.num_stages, schedule.num_stages)
    partition = Partition(layout, schedule.pipes, {"w": "t"})
    for rank in range(p):
        mesh, log = Mesh(pp=p), Log(rank, regroup)
        bound = BoundMesh(mesh, rank, mesh.coordinate(rank), {"pp": WHOLE}, "cpu")
        axis = StageAxis("pp", p, rank, WHOLE, None, bound)
        pipeline: Any = SimpleNamespace(
            stage=lambda *given: X,
            partition=partition,
            dtype=None,
            known={},
            work=lambda _: NoWork(),
        )
        params = {"w": torch.zeros(len(partition.layers(rank)), 1)}

        def running(self, rank, cell, observe, log=log):
            run_actions(self, rank, cell, observe)
            log.program += map(Compute, cell)

        with (
            log.replacing_torch(),
            mock.patch.object(execute, "_stage_axis", lambda schedule, axis=axis: axis),
            mock.patch.object(execute._Execution, "_run_actions", running),
        ):
            for _ in range(times):
                batch = torch.zeros(schedule.num_microbatches)
                execute._Execution(pipeline, schedule, params, batch, ()).all_ticks(None)
        found.append(log.program)
    return found


# --- the simulation


def find_stuck(programs: list[Program]) -> str:
    """Where ranks wait for one another for ever; "" where they get through.

    As on a GPU with one queue for all streams, the worst there is: a rank begins what it issued in
    that order, each when what it comes after has ended: a transfer those before it in its group, all
    else what is waited for. A transfer ends when both sides have begun it.
    """
    at, begun, ended = [0] * len(programs), defaultdict(dict), [set() for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                one = program[at[rank]]
                before = program[at[rank] - 1] if at[rank] else None
                if isinstance(before, Batch) and before.blocks and before.number not in ended[rank]:
                    break
                if isinstance(one, Wait) and one.number not in ended[rank]:
                    break
                if isinstance(one, Batch):
                    if rank in begun[one.group]:
                        break
                    begun[one.group][rank] = one
                at[rank], moved = at[rank] + 1, True
        for group, open_now in begun.items():
            for rank, one in list(open_now.items()):
                other = open_now.get(one.peer)
                if rank in open_now and other is not None and other.peer == rank:
                    if (one.kind, other.kind, one.count) not in (
                        ("send", "recv", other.count),
                        ("recv", "send", other.count),
                    ):
                        return f"{group}: rank {rank} has {one}, rank {one.peer} has {other}"
                    for here, batch in ((rank, one), (one.peer, other)):
                        ended[here].add(batch.number)
                        del open_now[here]
                    moved = True
    left = [program[place:][:1] for place, program in zip(at, programs, strict=True)]
    return f"ranks wait at {left}" if any(left) or any(begun.values()) else ""


def as_logs(programs: list[Program]) -> list[journal.Process]:
    """The programs as the stand-in of a GPU logs them, for its judge of each group by itself."""
    groups = {one.group for program in programs for one in program if isinstance(one, Batch)}
    found = []
    for rank, program in enumerate(programs):
        records: list[dict] = [
            {"op": "communicator", "group": group, "rank": rank, "size": len(programs)}
            for group in sorted(groups)
        ]
        for one in program:
            if isinstance(one, Batch):
                call = {"op": "nccl", "name": one.kind.title(), "group": one.group, "count": 2}
                call |= {"type": 7, "peer": one.peer}
                records += [{"op": "group"}, *[call] * one.count, {"op": "end"}]
        found.append(journal.Process(rank, tuple(records)))
    return found


# --- schedules

# Ranks whose neighbours in the pipeline are not the next ones, and two pipes.
CROOKED = """
microbatches: 2
pipe: 0 2 1
pipe: 1.1 2.1 0.1

# 0     1     2
  F0    F1.1  .
  .     .     F0+F1.1
  F1.1  F0    .
  B1.1  B0    .
  .     .     B0+B1.1
  B0    B1.1  .
"""


def schedules() -> Iterator[Schedule]:
    yield Schedule.parse(CROOKED, "crooked")
    for name in NAMES:
        for p in (2, 3, 4, 6):
            for m in (1, p, 2 * p, 2 * p + 3):
                for v in (1, 2, 3) if p < 4 else (1, 2):
                    try:
                        yield make(name, p, m, v)
                    except ValueError:  # counts that it does not admit
                        continue


ALL = list(schedules())


def test_every_schedule_is_among_them():
    assert {schedule.name for schedule in ALL} == {*NAMES, "crooked"}


@pytest.mark.parametrize("name", ["crooked", *NAMES])
def test_no_order_of_transfers_deadlocks(name):
    for schedule in (s for s in ALL if s.name == name):
        for each in {schedule, schedule.forward_only()}:
            programs = programs_of(each)
            where = f"{each!r}: "
            assert find_stuck(programs) == "", where
            assert journal.find_unmatched(as_logs(programs)) == [], where


@pytest.mark.parametrize("name", ["crooked", *NAMES])
def test_receives_are_posted_before_the_ranks_own_part(name):
    """And sends after it: a receive does not wait for the cell that may run while it is under way."""
    for schedule in (s for s in ALL if s.name == name and s.num_ranks < 6):
        first, both = (programs_of(schedule, times=times) for times in (1, 2))
        for rank, (program, longer) in enumerate(zip(first, both, strict=True)):
            step: list[Any] = longer[len(program) :]
            issued = iter(one for one in step if not isinstance(one, Wait))
            for tick, row in enumerate(schedule.table):
                ends = [t[:2] for t in schedule.transfers_by_rank[rank][tick]]
                receives = Counter(("recv", sender) for sender, to in ends if to == rank)
                sends = Counter(("send", to) for sender, to in ends if sender == rank)
                before = [next(issued) for _ in receives]
                assert {(b.kind, b.peer): b.count for b in before} == receives, (schedule, tick)
                assert [next(issued).action for _ in row[rank]] == [*row[rank]]
                after = [next(issued) for _ in sends]
                assert {(b.kind, b.peer): b.count for b in after} == sends, (schedule, tick)
            assert next(issued, None) is None


@pytest.mark.parametrize("name", ["crooked", *NAMES])
def test_number_of_groups(name):
    """A rank sends and receives on each side: four groups, where the ranks can be told by turns."""
    for schedule in (s for s in ALL if s.name == name):
        programs = programs_of(schedule, times=1)
        groups = {one.group for q in programs for one in q if isinstance(one, Batch)} - {WHOLE}
        p = schedule.num_ranks
        ring = (p - 1, 0) in schedule.links and p > 2
        assert len(groups) <= (2 if p == 2 else 6 if ring and p % 2 else 4), schedule
        for group in groups:
            peers = [
                {
                    (one.kind, one.peer)
                    for one in program
                    if isinstance(one, Batch) and one.group == group
                }
                for program in programs
            ]
            assert all(len(each) <= 1 for each in peers), "a rank has two links in one group"


def by_direction(rank: int, kind: str, peer: int) -> str:
    sender, receiver = (rank, peer) if kind == "send" else (peer, rank)
    return "to the next" if (receiver - sender) % 4 == 1 else "to the one before"


@pytest.mark.parametrize(
    ("regroup", "name"),
    [(lambda *_: WHOLE, "1f1b"), (lambda *_: WHOLE, "zbv"), (by_direction, "interleaved")],
)
def test_transfers_that_share_groups_would_deadlock(regroup, name):
    """A send behind a receive posted ahead: what the groups, and this simulation, are for."""
    assert find_stuck(programs_of(make(name, 4, 8), regroup=regroup))


def test_a_receive_in_another_order_would_deadlock():
    programs = programs_of(make("1f1b", 2, 4))
    at = [i for i, one in enumerate(programs[1]) if isinstance(one, Batch) and one.kind == "recv"]
    programs[1][at[-1]], programs[1][at[-2]] = programs[1][at[-2]], programs[1][at[-1]]
    assert find_stuck(programs)
