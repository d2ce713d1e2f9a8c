"""Batches made ahead: the same, in order, no more than asked for, and errors where they belong."""

from __future__ import annotations

import threading
import time

import pytest

from functron.training.data import prefetch


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_batches_come_in_order_whatever_the_depth(depth):
    made = []

    def batch(step):
        made.append(step)
        return [step]

    with prefetch(batch, 3, 40, depth) as take:
        assert [take(step) for step in range(3, 40)] == [[step] for step in range(3, 40)]
        assert made == list(range(3, 40))  # each once
        assert take(7) == [7]  # of any other step too
    assert alive() == []


def test_no_more_than_depth_wait():
    made, ready = [], threading.Semaphore(0)

    def batch(step):
        made.append(step)
        ready.release()
        return step

    with prefetch(batch, 0, 100, 3) as take:
        for _ in range(4):  # three wait, and one more is at hand when there is room for it
            assert ready.acquire(timeout=10)
        assert not ready.acquire(timeout=0.05)
        assert take(0) == 0
        assert ready.acquire(timeout=10)
        assert not ready.acquire(timeout=0.05)
    assert made == [0, 1, 2, 3, 4]
    assert alive() == []


def test_a_batch_is_made_while_a_step_runs():
    begun = threading.Event()

    def batch(step):
        if step == 1:
            begun.set()
        return step

    with prefetch(batch, 0, 2, 1) as take:
        take(0)
        assert begun.wait(10)  # nobody has asked for step 1


def test_an_error_comes_with_its_step():
    def batch(step):
        if step == 2:
            raise ValueError("the file has lost its end")
        return step

    with prefetch(batch, 0, 9, 4) as take:
        assert [take(step) for step in range(2)] == [0, 1]  # those before it are not lost
        with pytest.raises(ValueError, match="lost its end"):
            take(2)
        assert take(3) == 3  # and later ones can still be asked for
    assert alive() == []


def test_leaving_early_waits_for_no_batch_but_the_one_being_made():
    slow = []

    def batch(step):
        time.sleep(0.01)
        slow.append(step)
        return step

    def interrupted():
        with prefetch(batch, 0, 10**6, 2) as take:
            take(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert alive() == []
    assert len(slow) < 6


def test_nothing_to_do_starts_no_thread():
    with prefetch(str, 5, 5, 2) as take:
        assert alive() == []
        assert take(5) == "5"
