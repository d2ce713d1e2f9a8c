"""The loop: records, files, numbers that are not finite, and a graceful end."""

from __future__ import annotations

import json
import os
import signal
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from functron import checkpoint
from functron.core import chart as plot
from functron.spmd import Mesh
from functron.spmd.mesh import LostRanksError
from functron.training import records
from functron.training.config import TrainConfig
from functron.training.run import prepare
from functron.training.train import (
    EXIT_AFTER,
    REQUEUE_CODE,
    RESHAPE,
    RESHAPE_CODE,
    Meter,
    Request,
    _noting_checkpoints,
    exit_code,
    loop,
    stop_requests,
    train,
)

KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "mfu",
    "peak_memory_bytes",
]  # fmt: skip


def halve(state, batch):
    return state / 2, {"loss": state.clone(), "grad_norm": state * 3}


def batch(step):
    return {"tokens": torch.full((2, 5), step)}


def test_a_plain_function_needs_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state, history, stopped = loop(halve, torch.tensor(8.0), batch, steps=3)
    assert (state.item(), stopped) == (1.0, None)
    assert [list(record) for record in history] == [KEYS] * 3
    assert [record["loss"] for record in history] == [8.0, 4.0, 2.0]
    assert [record["grad_norm"] for record in history] == [24.0, 12.0, 6.0]
    assert [record["step"] for record in history] == [1, 2, 3]
    assert [record["tokens"] for record in history] == [10, 20, 30]
    assert [(record["lr"], record["mfu"]) for record in history] == [(None, None)] * 3
    assert list(tmp_path.iterdir()) == []
    assert "loss=2.0000" in capsys.readouterr().err


def test_batches_that_are_no_dicts_and_metrics_without_a_norm():
    def step(state, batch):
        return state + batch, {"loss": torch.tensor(1.0)}

    state, history, _ = loop(step, 0, lambda index: index, steps=5, start=2, reporters=[])
    assert state == 2 + 3 + 4
    assert [record["step"] for record in history] == [3, 4, 5]
    assert (
        history[0]["grad_norm"] is history[0]["tokens"] is history[0]["tokens_per_second"] is None
    )


def test_the_meter_multiplies_out():
    meter = Meter(
        lambda step: 0.5**step,
        tokens_seen=lambda steps: 100 * steps,
        flops_per_token=6.0,
        peak_flops=3000.0,
    )
    record = meter.record(2, None, {"loss": 1.0}, 0.25)
    assert (record["lr"], record["tokens"], record["tokens_per_second"]) == (0.25, 300, 400.0)
    assert record["mfu"] == pytest.approx(400 * 6 / 3000)
    assert record["step_seconds"] == 0.25


def test_files(tmp_path):
    saved = []
    files = [records.jsonl(tmp_path / "m.jsonl"), records.loss_picture(tmp_path / "loss.svg")]
    _, history, _ = loop(
        halve,
        torch.tensor(8.0),
        batch,
        steps=5,
        reporters=files,
        save=lambda state, step: saved.append((state.item(), step)),
        save_every=2,
    )
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history
    assert saved == [(2.0, 2), (0.5, 4), (0.25, 5)]
    assert ET.parse(tmp_path / "loss.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_records_are_on_disk_while_the_run_goes_on(tmp_path):
    seen = []

    def step(state, batch):
        path = tmp_path / "m.jsonl"
        seen.append(len(path.read_text().splitlines()))
        return state, {"loss": torch.tensor(1.0)}

    loop(step, None, batch, steps=3, reporters=[records.jsonl(tmp_path / "m.jsonl")])
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, value):
    saved = []

    def step(state, batch):
        return state, {"loss": torch.tensor(value if state[0] == 2 else 1.0)}

    def count(index):
        state[0] = index
        return batch(index)

    state = [0]
    files = [records.jsonl(tmp_path / "m.jsonl"), records.loss_picture(tmp_path / "loss.svg")]
    with pytest.raises(FloatingPointError, match=r"step 3: got loss (nan|inf); wanted a finite"):
        loop(step, state, count, steps=9, reporters=files, save=lambda *a: saved.append(a))
    assert saved == []
    assert [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").open()] == [1.0, 1.0, None]
    assert ET.parse(tmp_path / "loss.svg")


def test_gradients_that_are_not_finite_stop_the_run_unless_they_are_left_out():
    """With a loss that is finite yet: the state of that step would be saved."""
    saved = []

    def step(state, batch):
        norm = float("inf") if state == 1 else 1.0
        return state + 1, {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(norm)}

    given = {"save": lambda state, taken: saved.append(taken), "save_every": 2}
    with pytest.raises(FloatingPointError, match="step 2: got gradients of norm inf; wanted a fin"):
        loop(step, 0, batch, steps=3, reporters=[], **given)
    assert saved == []
    loop(step, 0, batch, steps=3, reporters=[], skips=True, **given)
    assert saved == [2, 3]


def test_steps_are_started_ahead_of_the_numbers_that_are_read():
    """But before a step's state is saved or evaluated, its numbers are read and written."""
    events = []

    def step(state, batch):
        events.append(f"start {state}")
        return state + 1, {"loss": torch.tensor(1.0 + state)}

    @contextmanager
    def reporter():
        yield lambda record: events.append(f"read {record['step'] - 1}")

    def evaluate(state):
        events.append(f"evaluate {state}")
        return {}

    given = {"save": lambda state, taken: events.append(f"save {taken}"), "save_every": 2}
    given |= {"evaluate": evaluate, "evaluate_every": 5}
    _, history, _ = loop(step, 0, batch, steps=5, reporters=[reporter()], ahead=1, **given)
    assert events == [
        "start 0", "start 1", "read 0", "read 1", "save 2",
        "start 2", "start 3", "read 2", "read 3", "save 4",
        "start 4", "evaluate 5", "read 4", "save 5",
    ]  # fmt: skip
    assert [record["loss"] for record in history] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_step_that_was_ahead_of_a_loss_that_is_not_finite_is_not_saved():
    saved = []

    def step(state, batch):
        return state + 1, {"loss": torch.tensor(float("nan") if state == 1 else 1.0)}

    with pytest.raises(FloatingPointError, match="step 2: got loss nan"):
        loop(step, 0, batch, steps=9, reporters=[], save=lambda *a: saved.append(a), ahead=1)
    given = {"save": lambda state, taken: saved.append(taken), "save_every": 3}
    with pytest.raises(FloatingPointError, match="step 2: got loss nan"):
        loop(step, 0, batch, steps=9, reporters=[], ahead=5, **given)
    assert saved == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_finishes_the_step_and_saves(number):
    def step(state, batch):
        if state == 2:
            os.kill(os.getpid(), number)
        return state + 1, {"loss": torch.tensor(1.0)}

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    saved = []
    outcome = loop(step, 0, batch, steps=100, reporters=[], save=lambda *args: saved.append(args))
    assert (outcome.state, outcome.stopped_by, len(outcome.history)) == (3, number, 3)
    assert saved == [(3, 3)]
    assert exit_code(outcome.stopped_by) == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_second_signal_raises_at_once():
    before = signal.getsignal(signal.SIGINT)
    reached = []

    def step(state, batch):
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(state)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still running")

    with pytest.raises(KeyboardInterrupt):
        loop(step, 0, batch, steps=2, reporters=[])
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_that_ask_again_do_not_end_a_save(monkeypatch):
    """A scheduler warns with SIGUSR1, and sends SIGTERM to a process and to its launcher."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with stop_requests() as request:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.signal == signal.SIGTERM
        clock[0] += 2.5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with stop_requests():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_leaves_when_its_time_is_over():
    seen, saved = [], []

    def step(state, batch):
        return state + 1, {"loss": torch.tensor(1.0)}

    def agree(number):
        seen.append(number)
        return number

    request = Request(ends=time.monotonic() + 3600)
    given = {"reporters": [], "stop": request, "agree": agree, "save": lambda *a: saved.append(a)}

    def batches(index):
        if index == 1:
            request.ends = time.monotonic()
        return batch(index)

    outcome = loop(step, 0, batches, steps=9, **given)
    assert (outcome.state, outcome.stopped_by, seen) == (2, EXIT_AFTER, [0, EXIT_AFTER])
    assert saved == [(2, 2)]
    assert exit_code(outcome.stopped_by) == REQUEUE_CODE == 128 + signal.SIGUSR1
    assert loop(step, 8, batches, steps=9, start=8, **given).stopped_by is None  # it is done
    request.signal = signal.SIGTERM
    assert request.asked() == signal.SIGTERM


def test_a_run_grows_where_it_saves_and_evaluates_before():
    def step(state, batch):
        return state + 1, {"loss": torch.tensor(1.0)}

    saved, request = [], Request(grown=lambda: True)
    outcome = loop(
        step, 0, batch, steps=9, reporters=[], stop=request,
        save=lambda *a: saved.append(a), save_every=3,
        evaluate=lambda state: {"held": {"loss": float(state)}}, evaluate_every=3,
    )  # fmt: skip
    assert (outcome.state, outcome.stopped_by, saved) == (3, RESHAPE, [(3, 3)])
    assert outcome.history[-1]["eval"] == {"held": {"loss": 3.0}}
    assert exit_code(outcome.stopped_by) == RESHAPE_CODE
    assert loop(step, 8, batch, steps=9, start=8, reporters=[], stop=request).stopped_by is None


def test_why_a_run_left_is_an_event(tmp_path):
    config = TrainConfig(steps=3, global_batch=2, seq=16, format="mock", exit_after="1h")
    run = prepare(config, Mesh())
    outcome = train(run, tmp_path / "r", began=time.monotonic() - 3600)
    assert outcome.stopped_by == EXIT_AFTER
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == [1]
    run = prepare(replace(config, exit_after=""), Mesh())

    def step(state, batch):
        os.kill(os.getpid(), signal.SIGUSR1)
        return run.step(state, batch)

    assert train(replace(run, step=step), tmp_path / "s").stopped_by == signal.SIGUSR1
    (event,) = records.read(tmp_path / "r" / "events.jsonl")
    assert (event["kind"], event["step"], event["code"]) == ("exit_after", 1, 138)
    (event,) = records.read(tmp_path / "s" / "events.jsonl")
    assert (event["kind"], event["step"], event["signal"]) == ("signal", 1, "SIGUSR1")


def test_another_ranks_signal_stops_this_one():
    asked = []

    def agree(number):
        asked.append(number)
        return signal.SIGTERM if len(asked) == 2 else number

    outcome = loop(halve, torch.tensor(1.0), batch, steps=9, reporters=[], agree=agree)
    assert (len(outcome.history), outcome.stopped_by) == (2, signal.SIGTERM)


def test_steps_of_a_deterministic_run_are_deterministic_and_nothing_after():
    """A CPU makes the same bits either way."""
    seen, losses = [], []
    for chosen in (False, True):
        config = TrainConfig(steps=2, global_batch=2, seq=16, deterministic=chosen)
        run = prepare(config, Mesh())

        def step(state, batch, run=run):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return run.step(state, batch)

        _, history, _ = train(replace(run, step=step), None)
        losses.append([record["loss"] for record in history])
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    assert seen == [False, False, True, True]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, LostRanksError])
@pytest.mark.parametrize("fault", [OSError("stale handle"), ValueError("no folder of steps"), None])
def test_an_interrupt_stays_one_where_checkpoints_cannot_be_read(
    kind, fault, monkeypatch, tmp_path
):
    def newest(path):
        if fault is not None:
            raise fault
        return path / "checkpoints" / "3"

    monkeypatch.setattr("functron.training.run_folder.newest", newest)
    with pytest.raises(kind) as caught, _noting_checkpoints(tmp_path):
        raise kind
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (fault is None)


def test_handlers_of_others_survive():
    def mine(number, frame): ...

    previous = signal.signal(signal.SIGTERM, mine)
    try:
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_ticks_are_round_and_enclose():
    assert plot.ticks(0.3, 5.7) == [0, 1, 2, 3, 4, 5, 6]
    assert plot.ticks(2, 2)[0] < 2 < plot.ticks(2, 2)[-1]
    assert plot.ticks(0, 1000) == [0, 200, 400, 600, 800, 1000]


def test_the_chart_places_points_to_scale():
    chart = plot.line_chart(
        [0, 5, 10], [0, 1, float("nan")], title="<a&b>", x_label="x", y_label="y"
    )
    root = ET.fromstring(chart)
    name = "{http://www.w3.org/2000/svg}"
    points = root.find(f"{name}polyline").attrib["points"]
    low = (plot.LEFT, plot.HEIGHT - plot.BOTTOM)
    high = (plot.WIDTH - plot.RIGHT, plot.TOP)
    # x runs 0..5 and y 0..1 over the whole frame
    assert points == " ".join(f"{a:.1f},{b:.1f}" for a, b in (low, high))
    assert {"<a&b>", "x", "y", "5", "1"} <= {text.text for text in root.iter(f"{name}text")}


def test_long_charts_stay_small_and_smooth():
    y = [1.0 + (-1) ** i for i in range(20_000)]
    chart = plot.line_chart(range(20_000), y, title="t", x_label="x", y_label="y")
    assert len(chart) < 60_000
    assert len(ET.fromstring(chart).findall("{http://www.w3.org/2000/svg}polyline")) == 2
    middle = plot.smooth(list(enumerate(y)))[10_000][1]
    assert middle == pytest.approx(1.0, abs=0.01)
    assert ET.fromstring(plot.line_chart([], [], title="t", x_label="x", y_label="y")) is not None
