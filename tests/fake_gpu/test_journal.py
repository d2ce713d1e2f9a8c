"""The logs' judges find what is planted, and nothing else. They need no stand-in."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.fake_gpu import journal
from tests.fake_gpu.journal import Process


def make(rank: int, *records: dict) -> Process:
    return Process(rank, records)


def member(rank: int, size: int = 2, group: str = "g") -> dict:
    return {"op": "communicator", "group": group, "rank": rank, "size": size}


def call(name: str, count: int = 8, peer: int = -1, group: str = "g") -> dict:
    return {"op": "nccl", "name": name, "group": group, "count": count, "type": 7, "peer": peer}


BEGIN, END = {"op": "group"}, {"op": "end"}


def test_logs_are_read_by_rank(tmp_path):
    for pid, rank in (("11", 1), ("22", 0)):
        lines = [{"op": "process", "rank": rank}, {"op": "malloc", "bytes": 512}]
        (tmp_path / f"{pid}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "33.jsonl").write_text(json.dumps({"op": "process", "rank": 0}) + "\n")
    assert [process.rank for process in journal.read(tmp_path)] == [0, 1]


def test_collectives_in_one_order_match():
    calls = (call("AllReduce"), call("AllGather", 4))
    assert journal.find_unmatched([make(r, member(r), *calls) for r in range(2)]) == []


def test_collectives_in_two_orders_are_stuck():
    one = make(0, member(0), call("AllReduce"), call("AllGather", 4))
    other = make(1, member(1), call("AllGather", 4), call("AllReduce"))
    (problem,) = journal.find_unmatched([one, other])
    assert "stuck after 0 calls" in problem


def test_collectives_of_two_sizes_are_stuck():
    pair = [make(r, member(r), call("AllReduce", 8 + r)) for r in range(2)]
    assert len(journal.find_unmatched(pair)) == 1


def test_a_rank_that_never_joins_is_named():
    (problem,) = journal.find_unmatched([make(0, member(0), call("AllReduce"))])
    assert "1 of 2 ranks" in problem


def test_transfers_match_in_a_group_and_not_in_turn():
    both = [
        make(r, member(r), BEGIN, call("Send", peer=1 - r), call("Recv", peer=1 - r), END)
        for r in range(2)
    ]
    assert journal.find_unmatched(both) == []
    turned = [
        make(r, member(r), call("Send", peer=1 - r), call("Recv", peer=1 - r)) for r in range(2)
    ]
    assert len(journal.find_unmatched(turned)) == 1  # each waits for the other's receive
    chain = [make(0, member(0), call("Send", peer=1)), make(1, member(1), call("Recv", peer=0))]
    assert journal.find_unmatched(chain) == []


def kernel(stream: int, microseconds: int = 10) -> dict:
    return {"op": "launch", "stream": stream, "kernel": "k", "us": microseconds}


def priced(record: Mapping) -> float:
    return record.get("us", 0) * 1e-6


def test_ranks_wait_for_the_last_one_to_come():
    summed = call("AllReduce") | {"stream": 2, "us": 5}
    ranks = [
        make(r, member(r), kernel(1, 10 + 30 * r), kernel(3, 7), record(1), wait(2), summed)
        for r in range(2)
    ]
    done = journal.execute(ranks, priced)
    assert done.stuck == []
    assert done.waited_seconds == pytest.approx({(0, "g"): 30e-6, (1, "g"): 0})
    assert done.end_seconds == pytest.approx({0: 45e-6, 1: 45e-6})


def test_the_host_waits_before_what_it_starts_next():
    # by hand: 10 us, the host waits for them, then 10 us of another stream, beside 25 of a third
    steps = (kernel(1), {"op": "synchronize", "stream": 1}, kernel(2))
    assert journal.execute([make(0, *steps)], priced).end_seconds == pytest.approx({0: 20e-6})
    assert journal.execute([make(0, kernel(3, 25), *steps)], priced).end_seconds == pytest.approx(
        {0: 25e-6}
    )


def test_two_communicators_that_wait_for_one_another_are_stuck():
    def make_rank(rank: int, first: str, second: str) -> Process:
        calls = [call("AllReduce", group=name) | {"stream": ord(name)} for name in (first, second)]
        between = [record(ord(first)), wait(ord(second))]
        return make(
            rank, member(rank, group="a"), member(rank, group="b"), calls[0], *between, calls[1]
        )

    assert journal.find_unmatched([make_rank(r, "a", "b") for r in range(2)]) == []
    assert len(journal.find_unmatched([make_rank(0, "a", "b"), make_rank(1, "b", "a")])) == 2


def use(stream: int, *, reads: tuple = (), writes: tuple = ()) -> dict:
    return {"op": "copy", "stream": stream, "reads": list(reads), "writes": list(writes)}


def record(stream: int, event: int = 1) -> dict:
    return {"op": "record", "stream": stream, "event": event}


def wait(stream: int, event: int = 1) -> dict:
    return {"op": "wait", "stream": stream, "event": event}


def test_calls_of_an_aborted_communicator_end():
    first, second = member(0), member(0, group="h")
    host = {"op": "synchronize", "stream": -1}
    on_stream = {**call("AllReduce"), "stream": 1}
    lone = make(0, first, second, on_stream, host, call("AllGather", group="h"))
    other = make(1, member(1), member(1, group="h"), call("AllGather", group="h"))
    assert len(journal.find_unmatched([lone, other])) == 2
    assert journal.find_unmatched([lone, other], aborted=["g"]) == []


def test_two_streams_without_an_event_race():
    made = make(0, use(1, writes=[(100, 50)]), use(2, reads=[(120, 4)]))
    (problem,) = journal.find_races(made)
    assert "stream 2 reads 4 bytes" in problem
    assert len(journal.find_races(make(0, use(1, reads=[(0, 8)]), use(2, writes=[(4, 8)])))) == 1
    assert journal.find_races(make(0, use(1, reads=[(0, 8)]), use(2, reads=[(4, 8)]))) == []
    assert journal.find_races(make(0, use(1, writes=[(0, 8)]), use(2, reads=[(8, 8)]))) == []
    assert journal.find_races(make(0, use(1, writes=[(0, 8)]), use(1, reads=[(0, 8)]))) == []


def test_events_and_the_host_order_streams():
    write, read = use(1, writes=[(0, 8)]), use(2, reads=[(0, 8)])
    assert journal.find_races(make(0, write, record(1), wait(2), read)) == []
    assert len(journal.find_races(make(0, record(1), write, wait(2), read))) == 1
    through = (write, record(1, 1), wait(3, 1), record(3, 2), wait(2, 2), read)
    assert journal.find_races(make(0, *through)) == []
    assert journal.find_races(make(0, write, {"op": "synchronize", "stream": 1}, read)) == []
    assert len(journal.find_races(make(0, write, {"op": "synchronize", "stream": 2}, read))) == 1
    done = {"op": "query", "event": 1}
    assert journal.find_races(make(0, write, record(1), done, read)) == []
    assert len(journal.find_races(make(0, record(1), write, done, read))) == 1


def test_what_is_launched_before_a_collective_is_waited_for_hides_it():
    send = {"op": "nccl", "name": "AllReduce", "stream": 1}
    launches = [{"op": "launch", "kernel": name, "stream": 0} for name in "abcd"]
    late = make(0, launches[0], send, record(1), launches[1], wait(0), launches[2])
    assert journal.list_hiding(late) == [(send, ["b"])]
    at_once = make(0, launches[0], send, record(1), wait(0), launches[1])
    assert journal.list_hiding(at_once) == [(send, [])]
    other = make(0, send, record(1, 2), record(2, 3), wait(1, 2), launches[0], wait(0, 3))
    assert journal.list_hiding(other) == [(send, ["a"])]


def test_contexts_and_pages():
    stray = {"op": "context", "device": 0, "call": "cudaHostRegister", "thread": "saver"}
    assert journal.find_stray_contexts([make(0, stray)]) == []
    (problem,) = journal.find_stray_contexts([make(1, stray)])
    assert "'saver' opened a context on GPU 0" in problem
    pages = {"op": "register", "bytes": 10, "start": 4096, "good": False}
    assert len(journal.find_shared_pages([make(0, pages)])) == 1
