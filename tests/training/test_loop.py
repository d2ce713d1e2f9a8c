"""The loop: records, files, numbers that are not finite, and a graceful end."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
import weakref
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from functron import checkpoint, random, tree
from functron.core import chart as plot
from functron.core.settings import with_sections
from functron.spmd import Mesh, P, shard_map
from functron.spmd.donation import Donated
from functron.spmd.mesh import LostRanksError
from functron.training import records
from functron.training.config import TrainConfig, configure
from functron.training.evaluation import EvaluationHook
from functron.training.loop import (
    EXIT_AFTER,
    REQUEUE_CODE,
    RESHAPE,
    RESHAPE_CODE,
    At,
    FiniteHook,
    LoopHook,
    Meter,
    Request,
    StopHook,
    every,
    exit_code,
    loop,
    progress,
    record_to,
    stop_on_signals,
    stop_requests,
)
from functron.training.run import prepare
from functron.training.train import Batches, CheckpointHook, Outcome, _note_checkpoints, train

KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "mfu",
    "peak_memory_bytes",
]  # fmt: skip


def halve(state, batch):
    return state / 2, {"loss": state.clone(), "grad_norm": state * 3}


def batch(step):
    return {"tokens": torch.full((2, 5), step)}


def take(step, state, batches, *, hooks=(), stop=None, **given):
    """All steps of a loop that stops where it is asked to, and is measured."""
    stop, history = stop or stop_on_signals(), []
    for after, record in loop(step, state, batches, hooks=[stop, Meter(), *hooks], **given):
        state = after
        history.append(record)
    return Outcome(state, history, stop.stopped_by)


def save_to(saved):
    return lambda at: saved.append((at.state, at.step))


def test_a_plain_function_needs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = list(loop(halve, torch.tensor(8.0), batch, steps=3))
    assert [state.item() for state, _ in pairs] == [4.0, 2.0, 1.0]
    assert [list(record) for _, record in pairs] == [
        ["step", "loss", "grad_norm", "step_seconds"]
    ] * 3
    assert [record["step"] for _, record in pairs] == [1, 2, 3]
    assert [record["loss"] for _, record in pairs] == [8.0, 4.0, 2.0]
    assert list(tmp_path.iterdir()) == []
    assert list(loop(halve, torch.tensor(8.0), batch, steps=3, start=3)) == []


def test_a_measured_loop_and_its_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state, history, stopped = take(halve, torch.tensor(8.0), batch, steps=3, hooks=[progress()])
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

    state, history, _ = take(step, 0, lambda index: index, steps=5, start=2)
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
    course: Any = None
    at = At(2, 9, None, lambda state, batch: (state, {}), _course=course)
    at.record = {"loss": 1.0, "step_seconds": 0.25}
    meter.after(at)
    record = at.record
    assert (record["lr"], record["tokens"], record["tokens_per_second"]) == (0.25, 300, 400.0)
    assert record["mfu"] == pytest.approx(400 * 6 / 3000)
    assert record["step_seconds"] == 0.25


def test_files(tmp_path):
    saved = []
    files = [records.jsonl(tmp_path / "m.jsonl"), records.loss_picture(tmp_path / "loss.svg")]
    hooks = [*map(record_to, files), every(2, save_to(saved))]
    _, history, _ = take(halve, torch.tensor(8.0), batch, steps=5, hooks=hooks)
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

    take(step, None, batch, steps=3, hooks=[record_to(records.jsonl(tmp_path / "m.jsonl"))])
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
    hooks = [*map(record_to, files), FiniteHook(), every(0, save_to(saved))]
    with pytest.raises(FloatingPointError, match=r"step 3: got loss (nan|inf); wanted a finite"):
        take(step, state, count, steps=9, hooks=hooks)
    assert saved == []
    assert [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").open()] == [1.0, 1.0, None]
    assert ET.parse(tmp_path / "loss.svg")


def test_gradients_that_are_not_finite_stop_the_run_unless_they_are_left_out():
    """With a loss that is finite yet: the state of that step would be saved."""
    saved = []

    def step(state, batch):
        norm = float("inf") if state == 1 else 1.0
        return state + 1, {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(norm)}

    save = every(2, save_to(saved))
    with pytest.raises(FloatingPointError, match="step 2: got gradients of norm inf; wanted a fin"):
        take(step, 0, batch, steps=3, hooks=[FiniteHook(), save])
    assert saved == []
    take(step, 0, batch, steps=3, hooks=[FiniteHook(skips=True), save])
    assert saved == [(2, 2), (3, 3)]


def test_steps_are_started_ahead_of_the_numbers_that_are_read():
    """But before a step's state is saved or evaluated, its numbers are read and written."""
    events = []

    def step(state, batch):
        events.append(f"start {state}")
        return state + 1, {"loss": torch.tensor(1.0 + state)}

    @contextmanager
    def reporter():
        yield lambda record: events.append(f"read {record['step'] - 1}")

    def evaluate(at):
        events.append(f"evaluate {at.state}")
        return {}

    hooks = [EvaluationHook(evaluate, 5), record_to(reporter())]
    hooks += [every(2, lambda at: events.append(f"save {at.step}"))]
    _, history, _ = take(step, 0, batch, steps=5, hooks=hooks, ahead=1)
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
        take(step, 0, batch, steps=9, hooks=[FiniteHook(), every(0, save_to(saved))], ahead=1)
    with pytest.raises(FloatingPointError, match="step 2: got loss nan"):
        take(step, 0, batch, steps=9, hooks=[FiniteHook(), every(3, save_to(saved))], ahead=5)
    assert saved == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_finishes_the_step_and_saves(number):
    def step(state, batch):
        if state == 2:
            os.kill(os.getpid(), number)
        return state + 1, {"loss": torch.tensor(1.0)}

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    saved = []
    outcome = take(step, 0, batch, steps=100, hooks=[every(0, save_to(saved))])
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
        take(step, 0, batch, steps=2)
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
    given = {"agree": agree, "hooks": [every(0, save_to(saved))]}

    def batches(index):
        if index == 1:
            request.ends = time.monotonic()
        return batch(index)

    outcome = take(step, 0, batches, steps=9, stop=StopHook(request), **given)
    assert (outcome.state, outcome.stopped_by, seen) == (2, EXIT_AFTER, [0, EXIT_AFTER])
    assert saved == [(2, 2)]
    assert exit_code(outcome.stopped_by) == REQUEUE_CODE == 128 + signal.SIGUSR1
    done = take(step, 8, batches, steps=9, start=8, stop=StopHook(request), **given)
    assert done.stopped_by is None  # it has all its steps
    request.signal = signal.SIGTERM
    assert request.asked() == signal.SIGTERM


def test_a_run_grows_where_it_saves_and_evaluates_before():
    def step(state, batch):
        return state + 1, {"loss": torch.tensor(1.0)}

    saved, request = [], Request(grown=lambda: True)
    save = every(3, save_to(saved))
    stop = StopHook(request, save.due)
    hooks = [EvaluationHook(lambda at: {"held": {"loss": float(at.state)}}, 3), save]
    outcome = take(step, 0, batch, steps=9, stop=stop, hooks=hooks)
    assert (outcome.state, outcome.stopped_by, saved) == (3, RESHAPE, [(3, 3)])
    assert outcome.history[-1]["eval"] == {"held": {"loss": 3.0}}
    assert exit_code(outcome.stopped_by) == RESHAPE_CODE
    assert take(step, 8, batch, steps=9, start=8, stop=stop).stopped_by is None


def test_why_a_run_left_is_an_event(tmp_path):
    config = configure(steps=3, global_batch=2, seq=16, format="mock", exit_after="1h")
    run = prepare(config, Mesh())
    outcome = train(run, tmp_path / "r", began=time.monotonic() - 3600)
    assert outcome.stopped_by == EXIT_AFTER
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == [1]
    run = prepare(configure(config, exit_after=""), Mesh())

    def step(state, batch):
        os.kill(os.getpid(), signal.SIGUSR1)
        return run.step(state, batch)

    assert train(replace(run, step=step), tmp_path / "s").stopped_by == signal.SIGUSR1
    (event,) = records.read(tmp_path / "r" / "events.jsonl")
    assert (event["kind"], event["step"], event["code"]) == ("exit_after", 1, 138)
    (event,) = records.read(tmp_path / "s" / "events.jsonl")
    assert (event["kind"], event["step"], event["signal"]) == ("signal", 1, "SIGUSR1")


def test_products_of_float32_are_those_of_the_configuration_in_a_run_alone():
    seen, before = [], torch.get_float32_matmul_precision()
    for chosen in ("highest", "high"):
        run = prepare(configure(steps=1, global_batch=2, seq=16, float32_matmul=chosen), Mesh())

        def step(state, batch, run=run):
            matmul = torch.backends.cuda.matmul
            seen.append((matmul.allow_tf32, matmul.fp32_precision))
            return run.step(state, batch)

        train(replace(run, step=step), None)
        assert torch.get_float32_matmul_precision() == before
    assert seen == [(False, "ieee"), (True, "tf32")]


def test_another_ranks_signal_stops_this_one():
    asked = []

    def agree(number):
        asked.append(number)
        return signal.SIGTERM if len(asked) == 2 else number

    outcome = take(halve, torch.tensor(1.0), batch, steps=9, agree=agree)
    assert (len(outcome.history), outcome.stopped_by) == (2, signal.SIGTERM)


def test_steps_of_a_deterministic_run_are_deterministic_and_nothing_after():
    """A CPU makes the same bits either way."""
    seen, losses = [], []
    for chosen in (False, True):
        config = configure(steps=2, global_batch=2, seq=16, deterministic=chosen)
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
    with pytest.raises(kind) as caught, _note_checkpoints(tmp_path):
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


# --- the contract of hooks


class Told(LoopHook):
    """Notes all that it is told."""

    def __init__(self, events, name="", **more):
        self.events, self.name = events, name
        self.__dict__.update(more)

    def __str__(self):
        return f"Told {self.name}"

    def _note(self, moment, step):
        self.events.append(f"{self.name}{moment} {step}")

    def begin(self, at):
        self._note("begin", at.step)

    def before(self, at):
        self._note("before", at.step)

    def ask(self, at):
        self._note("ask", at.step)
        return 0

    def after(self, at):
        self._note("after", at.step)

    def end(self, at):
        self._note("end", at.step)


def count_up(state, batch):
    return state + 1, {"loss": torch.tensor(float(state))}


def test_the_order_of_hooks_and_phases():
    events = []

    class Phases(LoopHook):
        def phase(self, name, index):
            events.append(f"[{name} {index}]")

    def step(state, batch):
        events.append("step")
        return count_up(state, batch)

    def batches(index):
        events.append("batch")
        return batch(index)

    def agree(number):
        events.append("agree")
        return number

    hooks = [Phases(), Told(events, "a."), Told(events, "b.")]
    for state, record in loop(step, 0, batches, steps=2, start=1, hooks=hooks, agree=agree):
        events.append(f"body {state} {record['step']}")
    assert events == [
        "a.begin 1", "b.begin 1",
        "[data 1]", "batch", "[step 1]", "a.before 2", "b.before 2", "step",
        "[agree 1]", "a.ask 2", "b.ask 2", "agree",
        "[record 1]", "a.after 2", "b.after 2", "[body 1]", "body 1 2",
        "[end 1]", "b.end 2", "a.end 2",
    ]  # fmt: skip


def donating():
    """A step that consumes its state, as training steps do."""
    step = shard_map(lambda state: state.add_(1.0), Mesh(), P(), P(), donate=0)

    def taken(state, batch):
        loss = state.clone()
        return step(state), {"loss": loss}

    return taken


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_state_that_is_yielded_is_that_of_its_record(ahead):
    pairs = [
        (state, record["step"], record["loss"])
        for state, record in loop(count_up, 0, batch, steps=5, ahead=ahead)
    ]
    assert pairs == [(step, step, step - 1.0) for step in range(1, 6)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_state_does_not_outlive_the_loop(leaves):
    """Without a collection of garbage: it may be most of the memory of a GPU."""
    held = []

    def step(state, batch):
        state = state + 1.0
        held.append(weakref.ref(state))
        return state, {"loss": torch.tensor(1.0)}

    steps = loop(step, torch.zeros(3), batch, steps=2, hooks=[every(1, lambda at: None)])
    gc.disable()
    try:
        for _ in steps:
            if leaves:
                break
        del _, steps
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_state_that_a_step_ahead_consumed_raises_and_one_that_is_due_is_whole():
    """A newer one in its place would be that of no record that was read."""
    due, seen = [], {}
    hooks = [every(3, lambda at: due.append((at.step, at.state.item())))]
    given = {"steps": 5, "hooks": hooks, "ahead": 1}
    for state, record in loop(donating(), torch.tensor(0.0), batch, **given):
        seen[record["step"]] = repr(state) if type(state) is Donated else state.item()
        if type(state) is Donated:
            with pytest.raises(ValueError, match="a tensor that was donated"):
                state.item()
    assert {step for step, value in seen.items() if isinstance(value, str)} == {1, 2, 4}
    assert (seen[3], seen[5]) == (3.0, 5.0)
    assert due == [(3, 3.0), (5, 5.0)]


def test_a_step_ahead_that_writes_into_a_state_that_nobody_gave_up_is_refused():
    def add(state, batch):
        return state.add_(1), {"loss": torch.tensor(0.0)}

    with pytest.raises(ValueError, match=r"step 1: got 1 tensors .* fix: ahead=0, or ft.shard_map"):
        next(loop(add, torch.zeros(3), batch, steps=3, ahead=1))
    *_, (state, _) = loop(add, torch.zeros(3), batch, steps=3)
    assert state.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batches": [batch(0)]}, r"batches: got a list; .* fix: lambda index: batches\[index\]"),
        (
            {"hooks": [progress]},
            r"got progress, .* fix: if progress\(\.\.\.\) makes the hook, call",
        ),
        ({"hooks": [every]}, r"got every, which takes other arguments than a step"),
    ],
)
def test_what_is_no_function_of_a_step_is_refused_with_the_call(given, message):
    with pytest.raises(TypeError, match=message):
        next(loop(halve, torch.tensor(8.0), **{"batches": batch, "steps": 1, **given}))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_metric_may_be_a_part_of_the_state(ahead):
    """As the scale of the loss is, in the state of an optimizer."""
    step = shard_map(lambda state: state.add_(1.0), Mesh(), P(), P(), donate=0)

    def taken(state, batch):
        state = step(state)
        return state, {"loss": state}

    pairs = loop(taken, torch.tensor(0.0), batch, steps=3, ahead=ahead)
    assert [record["loss"] for _, record in pairs] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("how", ["break", "raise", "close"])
def test_leaving_the_body_finishes_what_is_ahead_and_ends_all_hooks(how, ahead):
    saved, history, ends = [], [], []
    hooks = [
        Told(ends, "first "),
        record_to(history.append),
        every(100, save_to(saved)),
        Told(ends, "last "),
    ]

    def leave(steps, name):
        for _, record in steps:
            if record["step"] == 4:
                if how == "raise":
                    raise RuntimeError("of the body")
                if how == "break":
                    break
                name.close()

    def make():
        return loop(count_up, 0, batch, steps=50, hooks=hooks, ahead=ahead)

    if how == "raise":
        with pytest.raises(RuntimeError, match="of the body"):
            leave(make(), None)
    elif how == "break":
        leave(make(), None)
    else:
        named = make()
        leave(named, named)
    done = 4 + ahead
    assert saved == [(done, done)]
    assert [record["step"] for record in history] == list(range(1, done + 1))
    assert ends[-2:] == [f"last end {done}", f"first end {done}"]


def test_an_error_ends_all_hooks_and_has_a_note_of_whose_it_is(tmp_path):
    saved, ends, errors = [], [], []

    class Fails(LoopHook):
        def after(self, at):
            if at.step == 2:
                raise RuntimeError("of the hook")

        def end(self, at):
            errors.append(at.error)
            raise ValueError("at the end")

    picture = record_to(records.loss_picture(tmp_path / "loss.svg"))
    hooks = [Told(ends, "a."), picture, Fails(), Told(ends, "b."), every(1, save_to(saved))]
    with pytest.raises(ValueError, match="at the end") as caught:
        list(loop(count_up, 0, batch, steps=9, hooks=hooks))
    assert caught.value.__notes__ == ["raised by end() of the hook Fails at step 2"]
    first = caught.value.__context__
    assert str(first) == "of the hook"
    assert first.__notes__ == ["raised by after() of the hook Fails at step 2"]
    assert errors == [first]
    assert [e for e in ends if "end" in e] == ["b.end 2", "a.end 2"]
    assert saved == [(1, 1)]
    assert ET.parse(tmp_path / "loss.svg")


def test_an_exception_that_is_thrown_into_the_loop_is_one_of_its_own():
    """As `train` does with an interrupt of one rank: others would not save with it."""
    saved, events = [], []
    steps = loop(count_up, 0, batch, steps=9, hooks=[Told(events), every(0, save_to(saved))])
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert (saved, events[-1]) == ([], "end 1")


def test_a_hook_may_be_used_by_one_loop_after_another():
    saved = []
    hooks = [every(0, save_to(saved))]
    for _ in range(2):
        for _, record in loop(count_up, 0, batch, steps=9, hooks=hooks):
            if record["step"] == 3:
                break
    assert saved == [(3, 3), (3, 3)]


def test_hooks_that_did_not_begin_do_not_end():
    events = []

    class Fails(LoopHook):
        def begin(self, at):
            raise OSError("no room")

        def end(self, at):
            events.append("never")

    with pytest.raises(OSError, match="no room"):
        list(loop(count_up, 0, batch, steps=1, hooks=[Told(events), Fails(), Told(events, "b.")]))
    assert events == ["begin 0", "end 0"]


def test_no_handler_stays_where_a_loop_is_abandoned():
    mine = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

    def now():
        return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

    within = []

    def step(state, batch):
        within.append(now() != mine)
        return count_up(state, batch)

    saved, ended = [], []

    def save(at):
        ended.append(now() != mine)
        saved.append(at.step)

    steps = loop(step, 0, batch, steps=9, hooks=[stop_on_signals(), every(0, save)])
    assert now() == mine  # nothing runs before the first step is asked for
    next(steps)
    next(steps)
    assert within == [True, True]
    assert now() == mine  # nobody may ever go on with it
    del steps
    assert now() == mine
    assert (saved, ended) == ([2], [True])  # a Ctrl-C does not end the save


def test_ctrl_c_in_the_body_raises_there_and_the_loop_ends():
    saved = []
    mine = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored

    def body():
        hooks = [stop_on_signals(), every(0, save_to(saved))]
        for _, record in loop(count_up, 0, batch, steps=9, hooks=hooks):
            if record["step"] == 3:
                signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            body()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, mine)
    assert saved == [(3, 3)]


def test_a_hook_takes_another_step_and_a_later_one_wraps_it():
    taken = []

    class Twin(LoopHook):
        def before(self, at):
            if at.step % 2 == 0:
                at.take = lambda state, batch: (state + 10, {"loss": torch.tensor(0.0), "twin": 1})

    class Wraps(LoopHook):
        def before(self, at):
            inner = at.take

            def counted(state, batch):
                taken.append(at.step)
                return inner(state, batch)

            at.take = counted

    pairs = list(loop(count_up, 0, batch, steps=4, hooks=[Twin(), Wraps()]))
    assert [state for state, _ in pairs] == [1, 11, 12, 22]
    assert [record.get("twin") for _, record in pairs] == [None, 1, None, 1]
    assert taken == [1, 2, 3, 4]


def test_a_hook_repairs_the_state_where_it_is_due():
    class Repairs(LoopHook):
        def due(self, step):
            return step == 3

        def after(self, at):
            if self.due(at.step):
                at.state = 100

    states = [state for state, _ in loop(count_up, 0, batch, steps=5, hooks=[Repairs()], ahead=2)]
    assert states == [1, 2, 100, 101, 102]


def test_a_repair_that_a_step_ahead_would_miss_is_refused():
    class Repairs(LoopHook):
        def after(self, at):
            at.state = 100

    steps = loop(count_up, 0, batch, steps=5, hooks=[Repairs()], ahead=1)
    with pytest.raises(ValueError, match=r"step 1: got another state from a hook.*due"):
        next(steps)


def test_a_hook_stops_the_loop_and_may_keep_its_state_from_being_saved():
    for keeps in (True, False):
        saved = []

        def judge(at, keeps=keeps):
            if at.record["loss"] == 2.0:
                at.stop(keeps=keeps)

        pairs = list(loop(count_up, 0, batch, steps=9, hooks=[judge, every(3, save_to(saved))]))
        assert [state for state, _ in pairs] == [1, 2, 3]
        assert saved == ([(3, 3)] if keeps else [])


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Told, "hooks: got .*Told.*; wanted a LoopHook or a function.*call it"),
        (3, "hooks: got 3; wanted a LoopHook"),
        (lambda at: 3, "got int from it; wanted entries of the record, or None"),
        (lambda at: progress(), "got _Writer from it; .* fix: call it to make the hook"),
    ],
)
def test_what_is_no_hook_is_refused(hook, message):
    with pytest.raises(TypeError, match=message):
        list(loop(count_up, 0, batch, steps=1, hooks=[hook]))
    with pytest.raises(ValueError, match="every: got -1"):
        every(-1, print)


def test_what_a_function_returns_is_in_the_record_of_later_hooks():
    history = []
    hooks = [every(2, lambda at: {"twice": 2 * at.state}), record_to(history.append)]
    pairs = list(loop(count_up, 0, batch, steps=3, hooks=hooks))
    assert [record.get("twice") for record in history] == [None, 4, 6]
    assert [record for _, record in pairs] == history


def test_the_time_of_the_body_and_of_hooks_is_not_that_of_a_step():
    for ahead in (0, 1):
        found = []
        hooks = [every(1, lambda at: time.sleep(0.1))]
        for _, record in loop(count_up, 0, batch, steps=3, hooks=hooks, ahead=ahead):
            time.sleep(0.1)
            found.append(record["step_seconds"])
        assert max(found) < 0.1


def test_the_sums_of_a_batch_begin_while_the_step_before_is_taken():
    """So that a step does not wait for them; and a batch that cannot be made is no surprise."""
    events = []

    class Ranks:
        def start_sum(self, share, targets):
            events.append(f"begin {targets}")
            return lambda: events.append(f"wait {targets}") or [16 * share, 3 * targets]

    def make(index):
        if index == 3:
            raise OSError("unreadable")
        return {"tokens": index}, index, index

    config = SimpleNamespace(steps=5)
    run = SimpleNamespace(
        config=config, on_device=lambda x: x, at=lambda *a: events.append(f"step {a[1]}")
    )
    batches = Batches(SimpleNamespace(run=run, job=Ranks()), make)  # pyright: ignore
    assert [batches.take(index)["tokens"] for index in range(3)] == [0, 1, 2]
    assert events == ["step 0", "begin 0", "begin 1", "step 1", "begin 2", "step 2", "begin 0"]
    assert (batches.num_targets(2), batches.checksum(2)) == (6, f"{32:016x}")
    with pytest.raises(OSError, match="unreadable"):
        batches.take(3)


def test_leaving_the_loop_of_a_run_saves_it(tmp_path):
    run = prepare(configure(steps=5, global_batch=2, seq=16, format="mock"), Mesh())
    hooks = [CheckpointHook(run, tmp_path, Request())]
    for _, record in loop(run.step, run.state, run.batch, steps=5, hooks=hooks):
        if record["step"] == 2:
            break
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]


def test_a_section_of_the_configuration_adds_its_hook(tmp_path):
    """In the record that files have, with the run's folder, events and processes at hand."""

    @dataclass(frozen=True)
    class Weights:
        """Weights.

        Attributes:
            every: count them after so many steps; 0: never.
        """

        every: int = 2

        def hook(self, session):
            def measure(at):
                session.write("weighed", at.step)
                return {"weight": sum(x.numel() for x in tree.leaves(at.state.params))}

            return every(self.every, measure) if self.every else None

    kind = with_sections(TrainConfig, {"weights": Weights})
    run = prepare(configure(kind(), steps=3, global_batch=2, seq=16, format="mock"), Mesh())
    history = train(run, tmp_path).history
    total = sum(x.numel() for x in tree.leaves(run.setup.init(random.key(0)).params))
    assert [record.get("weight") for record in history] == [None, total, total]
    assert records.read(tmp_path / "metrics.jsonl") == history
    assert [e["step"] for e in records.read(tmp_path / "events.jsonl")] == [2, 3]


def test_the_hook_of_a_section_judges_and_has_a_run_go_on(tmp_path):
    """After a loop that it stopped, from an earlier state: the steps again, as if nothing was."""
    heard = []

    class Again(LoopHook):
        judges = True

        def __init__(self):
            self.answers = 0

        def after(self, at):
            heard.append(
                (at.step, (tmp_path / "metrics.jsonl").read_text().count("\n"), at.repair())
            )
            if at.step == 3 and not self.answers:
                at.stop(keeps=False)

        def repair(self, at):
            return at.newest.step == 2

        def phase(self, name, index):
            if name == "restore":
                heard.append((name, index))

        def go_on(self, session):
            if self.answers:
                return False
            self.answers += 1
            assert [record["step"] for record in session.history] == [1, 2, 3]
            assert (session.run.start, int(session.run.state.step)) == (3, 3)
            state = session.run.restore(session.out, session.job, 2)
            session.run = dataclasses.replace(session.run, state=state, start=int(state.step))
            return True

    @dataclass(frozen=True)
    class Once:
        every: int = 2

        def hook(self, session):
            return Again()

    kind = with_sections(TrainConfig, {"once": Once})
    given = {"steps": 4, "global_batch": 2, "seq": 16, "format": "mock", "save_every": 2}
    history = train(prepare(configure(kind(), **given), Mesh()), tmp_path).history
    plain = train(prepare(configure(**given), Mesh()), None).history
    assert [record["loss"] for record in history] == [record["loss"] for record in plain]
    assert [record["step"] for record in records.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    wrote = [(1, 1, False), (2, 2, True), (3, 3, False)]
    assert heard == [*wrote, ("restore", 3), (3, 3, False), (4, 4, False), ("restore", 4)]


def test_ticks_are_round_and_enclose():
    assert plot.ticks(0.3, 5.7) == [0, 1, 2, 3, 4, 5, 6]
    assert plot.ticks(2, 2)[0] < 2 < plot.ticks(2, 2)[-1]
    assert plot.ticks(0, 1e-20) == [0, 2e-21, 4e-21, 6e-21, 8e-21, 1e-20]
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
