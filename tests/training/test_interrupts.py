"""An interrupted step leaves a state that is whole or gone: 12 points of each way, or 200.

See `tests.training.interrupts`.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from jupyter_client.manager import start_new_kernel

import functron as ft
from functron import P, debug, optim
from tests.training import interrupts


@pytest.mark.parametrize("way", interrupts.WAYS)
def test_a_state_is_whole_or_gone(way, request):
    full = request.config.getoption("--full")
    found = interrupts.check(way, 200 if full else 12)
    assert found["whole"] or way == "compiled", found
    assert found["gone"], found


@pytest.mark.distributed
def test_no_rank_goes_on_with_one_that_was_interrupted(torchrun, request):
    full = request.config.getoption("--full")
    count = 50 if full else 2
    program = Path(interrupts.__file__)
    said = torchrun(program, 2, "ranks", count, 0, timeout=60 + 12 * 4 * count).stdout
    assert said.count(" ends") == 2 * len(interrupts.ON_RANKS), said


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.full) if way == "pipeline" else way
        for way in interrupts.WAYS
    ],
)
def test_a_state_of_which_copies_are_given_is_always_whole(way, request):
    full = request.config.getoption("--full")
    with debug.snapshot_donated():
        found = interrupts.check(way, 200 if full else 12)
    assert found["whole"], found
    assert not found["gone"], found


class _Slow:
    """SGD that has written half of the parameters when it waits."""

    def __init__(self):
        self.writing, self.go_on = threading.Event(), threading.Event()

    def step(self, params):
        first, *rest = params.values()
        first.sub_(1.0)
        self.writing.set()
        while not self.go_on.wait(0.01):  # which leaves room for signals
            pass
        for leaf in rest:
            leaf.sub_(1.0)
        return params


def interrupt(update: _Slow) -> None:
    update.writing.wait()
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def python_handles_interrupts():
    """As where a user types Ctrl-C: processes of parallel tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("mesh", [ft.Mesh(), ft.Mesh(dp=2)], ids=["", "dp=2"])
def test_a_real_interrupt_in_the_middle_of_an_update(mesh):
    """Of two donated tensors one was written: without copies both are gone, with them none is."""

    def fresh():
        return {name: torch.full((4,), 2.0) for name in "ab"}

    for snapshots in (False, True):
        update, params = _Slow(), fresh()
        step = ft.shard_map(update.step, mesh, (P("dp"),), P("dp"), donate=0)
        step = debug.snapshot_donated()(step) if snapshots else step
        sender = threading.Thread(target=interrupt, args=(update,))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            step(params)
        sender.join()
        if not snapshots:
            with pytest.raises(ValueError, match="was being updated when step was interrupted"):
                params["b"] + 1
            continue
        assert all(torch.equal(leaf, torch.full((4,), 2.0)) for leaf in params.values())
        update.go_on.set()
        done = step(params)
        assert all(torch.equal(leaf, torch.ones(4)) for leaf in done.values())
        with pytest.raises(ValueError, match="was donated to step"):  # one that finished
            params["a"] + 1


def test_a_graph_and_parameters_of_modules_are_said_to_be_without_copies():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.sgd(0.1)

    def fail(params, gone):
        optimizer.step_(params, optimizer.init(params), params)
        raise RuntimeError("after the update")

    with debug.snapshot_donated(), torch.no_grad(), pytest.raises(RuntimeError):
        ft.shard_map(fail, ft.Mesh(), (P(), P()), P(), donate=(0, 1))(weight, torch.ones(2))
    with pytest.raises(ValueError, match="was being updated"):
        weight + 1


CELL = """
import time, torch
from functron import training

def step(state, batch):
    print("in step", int(state) + 1, flush=True)
    for _ in range(30):
        time.sleep(0.01)
    return state + 1, {"loss": state}

state = torch.zeros(())
for state, record in training.loop(step, state, lambda index: None, steps=100):
    pass
print("after the loop", float(state) == record["step"] == 2)
"""


def test_a_loop_in_a_notebook_ends_at_the_first_interrupt():
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    try:
        text = run_cell(client, CELL, lambda text: "step 2" in text and manager.interrupt_kernel())
        assert text.rstrip().endswith("after the loop True"), text
        assert text.count("interrupted: the loop ends after this step") == 1
        # in the body, and after the loop, interrupts are Python's own
        body = CELL.replace("    pass", '    print("in the body", flush=True); time.sleep(9)')
        text = run_cell(client, body, lambda t: "in the body" in t and manager.interrupt_kernel())
        assert "KeyboardInterrupt" in text
        assert "after the loop" not in text
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client, source, act) -> str:
    """What a cell prints and raises; `act` is called with what it printed so far, until it acts."""
    client.execute(source)
    text, acted = "", False
    while True:
        message = client.get_iopub_msg(timeout=60)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return text
        text += content.get("text", "") if kind == "stream" else ""
        text += content["ename"] if kind == "error" else ""
        acted = acted or act(text) is not False
