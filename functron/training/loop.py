"""The loop of training steps: a generator, and the hooks that look on, act and decide beside it.

`loop` knows a step, its batches and hooks, and nothing of files, signals or processes, for which
there are hooks. Here are the general ones: `every`, `progress`, `record_to`, and those that end a
loop: where numbers are not finite, and after the running step where Ctrl-C, SIGTERM, SIGUSR1 or a
limit of time asks for it.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from functron.core import tree
from functron.core.settings import setting
from functron.core.tables import shows_differences
from functron.program.cost import peak_memory_bytes
from functron.training import records

COMPILE_SECONDS = 1800.0
"""How long one kernel of a step may compile; the other ranks wait so much longer."""

Step = Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
"""``(state, batch) -> (state, metrics)``."""


@shows_differences
@dataclass(frozen=True)
class WaitingConfig:
    """How processes wait for one another.

    Attributes:
        timeout_seconds: after which processes give up on one that has stopped: in collectives, and
            in saves where it shows no sign of life. A fifth of it where nobody else comes at all,
            as far as a process can tell; half an hour more where others may compile.
        check_programs: compare before every collective what its ranks are about to enter, by the
            job's store, and end with what differs, before they wait for one another. Slow: for a
            step that hangs.
    """

    timeout_seconds: float = setting(300.0, least=1)
    check_programs: bool = False

    @property
    def reads_recorder(self) -> bool:
        """Whether collectives are recorded for it."""
        return self.check_programs


@dataclass(eq=False)
class At:
    """One step of a loop, as its hooks see it.

    Attributes:
        index: number of the step, from 0; before any step was taken, one before the first.
        steps: how many steps the whole run has.
        state: before the step, and once it is taken after it.
        take: the function of this step; before it, a hook may put another `Step` there.
        batch: of the step; None once its record was yielded, as are its metrics.
        metrics: of the step; tensors of a GPU are copied to the host.
        record: of the step, which hooks add to; empty until its numbers are read.
        stopped_by: the number that the ranks agreed to stop by, 0 where nobody asked; None: they
            have not been asked yet.
        error: the exception that ends the loop; None where it ends otherwise.
        left: whether the body left the loop: by a ``break``, an exception or ``close()``.
    """

    index: int
    steps: int
    state: Any
    take: Step
    batch: Any = None
    metrics: Any = None
    record: dict[str, Any] = field(default_factory=dict)
    stopped_by: int | None = None
    error: BaseException | None = None
    left: bool = False
    _course: _Course = field(kw_only=True, repr=False)
    _began: float = field(default=0.0, kw_only=True, repr=False)
    _versions: Sequence[tuple[torch.Tensor, int]] = field(default=(), kw_only=True, repr=False)
    _arrived: torch.cuda.Event | None = field(default=None, kw_only=True, repr=False)

    @property
    def step(self) -> int:
        """How many steps have been taken after this one: its number from 1, as in records."""
        return self.index + 1

    @property
    def last(self) -> bool:
        """Whether this is the last step of the run."""
        return self.step == self.steps

    @property
    def keeps(self) -> bool:
        """Whether the state may be saved: no hook has stopped the loop for wrong numbers."""
        return self._course.keeps

    @property
    def newest(self) -> At:
        """The newest step that was started, whose state is whole even where no hook was due."""
        return self._course.newest

    def phase(self, name: str) -> None:
        """Tell all hooks that the loop goes over to this phase of the step."""
        self._course.phase(name, self.index)

    def ask_again(self) -> None:
        """Ask all hooks of all ranks again whether to stop, after what took long. Collective."""
        self.stopped_by = self._course.agree_to_stop(self) or self.stopped_by

    def repair(self) -> bool:
        """Ask hooks in turn whether they repaired the damage that made numbers not finite.

        Collective.
        """
        return any(self._course.ask_each("repair", self))

    def stop(self, *, keeps: bool = True) -> None:
        """End the loop after this step, and those ahead of it. Every rank must decide so alike.

        Args:
            keeps: whether the state may be saved.
        """
        self._course.ending = True
        self._course.keeps &= keeps

    def _start(self, *, ahead: bool) -> None:
        """Take the step; where others start before its numbers are read, these are copies."""
        self.state, self.metrics = self.take(self.state, self.batch)
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree.leaves(self.metrics))
        if on_gpu:  # a copy that is asked for after the next step has started waits for that step
            self.metrics = _map_tensors(lambda x: x.to("cpu", non_blocking=True), self.metrics)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        elif ahead:  # the next step may overwrite them: they may be a part of the state
            self.metrics = _map_tensors(torch.clone, self.metrics)
        if ahead:
            self._versions = [
                (x, x._version)
                for x in tree.leaves(self.state)
                if type(x) is torch.Tensor and not x.is_inference()
            ]

    def _check_whole(self) -> None:
        """Refuse a state into which a step ahead has written, though nobody gave it up."""
        written = sum(type(x) is torch.Tensor and x._version != seen for x, seen in self._versions)
        if written:
            raise ValueError(
                f"step {self.step}: got {written} tensors of its state with what a step ahead "
                "wrote into them; wanted a step that leaves the state which it is given as it is, "
                "or donates it; fix: ahead=0, or ft.shard_map(step, ..., donate=0)"
            )

    def _read(self, settled: float) -> None:
        """Make the record; the step's time began when the one before was `settled`, or later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = {name: x if isinstance(x, int | float) else x.item()
                   for name, x in self.metrics.items()
                   if isinstance(x, int | float) or getattr(x, "ndim", None) == 0}  # fmt: skip
        seconds = time.perf_counter() - max(self._began, settled)
        self.record = {"step": self.step, **numbers, "step_seconds": seconds}


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], metrics: Any) -> Any:
    return tree.map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, metrics)


class LoopHook:
    """A part of a training loop beside its steps. Every method does nothing: override some.

    The order in which they are called is in `loop`. A function ``f(at)`` is a hook, too: its
    `after`.

    Attributes:
        judges: of a section's hook, whether it comes after those that write records, and before
            those that save: it looks at records, and may stop the loop for them.
    """

    judges: ClassVar[bool] = False

    def begin(self, at: At) -> None:
        """Before the first step; ``at.step`` steps have been taken."""

    def before(self, at: At) -> None:
        """Before a step: may replace ``at.state``, ``at.batch`` and ``at.take``."""

    def ask(self, at: At) -> int:
        """A number above 0 asks to stop after this step; one rank may ask alone."""
        return 0

    def due(self, step: int) -> bool:
        """Whether it needs the state after so many steps, alike on all ranks; the last it has."""
        return False

    def after(self, at: At) -> None:
        """After a step: ``at.record`` is there, and may be added to or replaced."""

    def end(self, at: At) -> None:
        """At the end, however it comes; ``at`` is the last step whose record was read."""

    def go_on(self, session: Any) -> bool:
        """Whether a training run whose loop has ended goes on with ``session.run``. Collective.

        `loop` itself does not ask. The hook may put another run there: from an earlier state, or
        with another configuration. A run that somebody stopped does not go on.

        Args:
            session: a `functron.training.run.Session`, whose run has the state after the last step.
        """
        return False

    def repair(self, at: At) -> bool:
        """Numbers are not finite: whether `At.newest` was damaged in memory, and is repaired."""
        return False

    def phase(self, name: str, index: int) -> None:
        """The loop goes over to this phase of step `index`, from 0."""

    def __str__(self) -> str:
        return type(self).__name__


def loop(
    step: Step,
    state: Any,
    batches: Callable[[int], Any],
    *,
    steps: int,
    start: int = 0,
    hooks: Sequence[LoopHook | Callable[[At], Mapping[str, Any] | None]] = (),
    agree: Callable[[int], int] = int,
    ahead: int = 0,
) -> Generator[tuple[Any, dict[str, Any]], None, None]:
    """Take steps `start` to ``steps - 1``, and yield the state after each, with its record.

    ``for state, record in loop(step, state, batches, steps=200, hooks=[every(100, save)]): ...``

    A record has ``step``, counted from 1, every metric that is one number, ``step_seconds``, and
    what hooks add to it.

    **The order at one step.** Hooks are called in the order of their list, on every rank alike:

    1. phase "data": ``batches(index)``;
    2. phase "step": `LoopHook.before` of each, then the step;
    3. phase "agree": `LoopHook.ask` of each; `agree` makes the largest number that of all ranks. If
       it is not 0, this is the last step, and the number is ``at.stopped_by``;
    4. phase "record": the numbers are read, which waits for the step, then `LoopHook.after` of
       each;
    5. phase "body": the state and the record are yielded.

    `LoopHook.begin` comes before all of it. At the end, in phase "end", `LoopHook.end` is called in
    the reverse order.

    **Replacing a step or a state.** `LoopHook.before` may put another step into ``at.take`` for
    once, which later hooks may wrap. There, and after a step for which it is due, a hook may change
    ``at.state`` in place or replace it: that is yielded, and the next step takes it.

    **Steps ahead.** Where a device computes while Python goes on, ``ahead=1`` keeps it busy: 4 and
    5 of a step come after 1 to 3 of the next. The state that is yielded is always that of the
    record beside it; newer ones are private until their records have been read. A step that donates
    its state has then consumed the one that is yielded, and to use it raises. So a hook says by
    `LoopHook.due` after which steps it needs the state: there, at the last step, and where the loop
    is to stop, all records are read before another step is started.

    **Deciding together.** All that hooks decide but whether to stop, such as when they are due, or
    ``at.stop()`` after a record, they must decide by what all ranks know alike; so must a body that
    leaves.

    **Interrupts.** In a cell of a notebook the first one ends the loop after the running step,
    which is recorded and yielded, so that the state is whole. The second one raises
    KeyboardInterrupt at once, as the first does in the body and elsewhere
    (`functron.debug.snapshot_donated` saves the state from it). A hook of `stop_on_signals` takes
    the place of this.

    **Ending.** Where the body leaves the loop (``break``, an exception, ``close()``, or nobody
    refers to it any more: one that has a name is left by ``steps.close()``), the steps ahead are
    finished, recorded and not yielded, and then hooks end: ``at.left`` is true, and the state is
    whole, to be saved. Where a step, a batch or a hook raises, the exception has a note of which
    hook it was, ``at.error`` is that exception, and the state may be incomplete: nobody should save
    it. All hooks that began end, whatever the others raise; the last exception is raised, with the
    earlier ones as its context. Python prints, and does not raise, what hooks raise as a ``break``
    ends them: ``with contextlib.closing(loop(...)) as steps`` raises it.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
        state: before step `start`.
        batches: the batch of each step, a pure function of its number from 0.
        steps: how many steps the whole run has.
        start: how many of them are done.
        hooks: what is done beside the steps.
        agree: the largest of all ranks' numbers.
        ahead: how many steps are started before the numbers of one are read.

    Raises:
        TypeError: a hook is neither a `LoopHook` nor a function of a step, or returns what is no
            mapping; or `batches` is no function.
        ValueError: a hook replaced a state that a step ahead had taken already; or a step ahead
            wrote into the state that is to be yielded.
    """
    if not callable(batches):
        got = type(batches).__name__
        raise TypeError(f"batches: got a {got}; wanted a function of a step's number, from 0; fix: "
                        "lambda index: batches[index]")  # fmt: skip
    known = [as_hook(hook) for hook in hooks]
    if _in_notebook() and not any(isinstance(hook, StopHook) for hook in known):
        known = [StopHook(Request(signals=(signal.SIGINT,), note=_ENDS), listens=True), *known]
    course = _Course(known, agree)
    course.newest = course.at = At(start - 1, steps, state, step, _course=course)
    started: deque[At] = deque()
    with ExitStack() as ends:
        ends.callback(course.forget)
        for hook in course.hooks:
            course.call(hook, "begin", course.at)
            ends.push(functools.partial(course.end, hook))
        ends.callback(lambda: course.at.phase("end"))
        try:
            for index in range(start, steps):
                began = time.perf_counter()
                course.phase("data", index)
                batch = batches(index)
                course.phase("step", index)
                new = At(index, steps, state, step, batch, _course=course, _began=began)
                course.tell("before", new)
                new._start(ahead=ahead > 0)
                started.append(new)
                course.newest, state = new, new.state
                new.phase("agree")
                new.stopped_by = course.agree_to_stop(new)
                settles = new.last or new.stopped_by or any(course.ask_each("due", new.step))
                while len(started) > (0 if settles or course.ending else ahead):
                    at = course.settle(started)
                    at.phase("body")
                    yield at.state, at.record
                    course.resume()
                if not started:
                    state = course.at.state
                if course.ending:
                    return
        except GeneratorExit:
            while started:
                course.settle(started)
            course.at.left = True
            raise


_ENDS = "interrupted: the loop ends after this step; a second interrupt ends it at once"


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask is not None and hasattr(ask(), "kernel")


class _Course:
    """The hooks of a loop while it runs, and what they have decided."""

    def __init__(self, hooks: Sequence[LoopHook], agree: Callable[[int], int]):
        self.hooks, self._agree = hooks, agree
        self.at: At
        self.newest: At
        self.ending, self.keeps = False, True
        self._settled = 0.0

    def call(self, hook: LoopHook, moment: str, given: Any) -> Any:
        """Call one method of a hook; what it raises gets a note that names them."""
        try:
            return getattr(hook, moment)(given)
        except BaseException as error:
            when = f" at step {given.step}" if isinstance(given, At) else ""
            error.add_note(f"raised by {moment}() of the hook {hook}{when}")
            raise

    def tell(self, moment: str, at: At) -> None:
        for hook in self.hooks:
            self.call(hook, moment, at)

    def ask_each(self, moment: str, given: Any) -> Iterator[Any]:
        """The results of this method of each hook, in turn."""
        return (self.call(hook, moment, given) for hook in self.hooks)

    def agree_to_stop(self, at: At) -> int:
        return self._agree(max(self.ask_each("ask", at), default=0))

    def phase(self, name: str, index: int) -> None:
        for hook in self.hooks:
            hook.phase(name, index)

    def settle(self, started: deque[At]) -> At:
        """Read the record of the oldest step that was started, and tell it to the hooks."""
        at = self.at = started.popleft()
        at.phase("record")
        at._read(self._settled)
        if started:
            at._check_whole()
        given = at.state
        self.tell("after", at)
        if at.state is not given and started:
            raise ValueError(
                f"step {at.step}: got another state from a hook, when the next step had taken this "
                f"one; wanted a hook that is due after step {at.step}; fix: have its due() say so"
            )
        self.ending |= bool(at.stopped_by)
        self._settled = time.perf_counter()
        return at

    def resume(self) -> None:
        """The body is done: its time is not that of a step."""
        self.at.batch = self.at.metrics = None
        self._settled = time.perf_counter()

    def forget(self) -> None:
        """Refer to no step: in a circle of references states would outlive the loop."""
        del self.at, self.newest

    def end(self, hook: LoopHook, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.at.error = None if kind is GeneratorExit else error
        self.call(hook, "end", self.at)


def as_hook(given: Any) -> LoopHook:
    """The hook that was given, or that of a function of a step; TypeError for anything else."""
    if isinstance(given, LoopHook):
        return given
    if isinstance(given, type) or not callable(given):
        raise TypeError(
            f"hooks: got {given!r}; wanted a LoopHook or a function of a step; fix: "
            + ("make one of it: call it" if callable(given) else "leave it out")
        )
    try:
        inspect.signature(given).bind(None)
    except TypeError:
        name = _name_of(given)
        raise TypeError(f"hooks: got {name}, which takes other arguments than a step; wanted a "
                        f"function of a step; fix: if {name}(...) makes the hook, call it"
                        ) from None  # fmt: skip
    except ValueError:  # such as a function of C, which does not say
        pass
    return _Function(given)


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


class _Function(LoopHook):
    """Calls a function of a step, and adds what it returns to the record."""

    def __init__(self, function: Callable[[At], Any]):
        self._function = function

    def after(self, at: At) -> None:
        found = self._function(at)
        if not isinstance(found, Mapping | None):
            raise TypeError(
                f"{self}: got {type(found).__name__} from it; wanted entries of the record, or "
                "None; fix: "
                + ("call it to make the hook" if isinstance(found, LoopHook) else "return a dict")
            )
        at.record.update(found or {})

    def __str__(self) -> str:
        return _name_of(self._function)


class _Every(_Function):
    """The hook that `every` makes."""

    def __init__(self, n: int, function: Callable, at_end: bool):
        super().__init__(function)
        self._n, self._at_end = n, at_end
        self._called = -1

    def begin(self, at: At) -> None:
        self._called = -1

    def due(self, step: int) -> bool:
        return self._n > 0 and step % self._n == 0

    def after(self, at: At) -> None:
        if self.due(at.step) or (self._at_end and (at.last or at.stopped_by)):
            self._call(at)

    def end(self, at: At) -> None:
        whole = at.error is None and at.record
        if self._at_end and whole and self._called != at.step:
            self._call(at)

    def _call(self, at: At) -> None:
        if at.keeps:
            self._called = at.step
            super().after(at)

    def __str__(self) -> str:
        return f"every({self._n}, {super().__str__()})"


def every(
    n: int, function: Callable[[At], Mapping[str, Any] | None], *, at_end: bool = True
) -> LoopHook:
    """A hook that calls a function with a whole state after every `n` steps, and after the last.

    Not called with a state that another hook has stopped the loop for, nor where the loop ends with
    an exception.

    Args:
        n: after multiples of so many steps; 0: at the end alone.
        function: of the step; what it returns is added to the record, for later hooks as well.
        at_end: whether it is called after the last step, too: that of the run, the one at which the
            loop was asked to stop, or after which the body left it.
    """
    if n < 0 or not callable(function):
        raise ValueError(
            f"every: got {n!r} and {function!r}; wanted a number of steps and a function; fix: "
            "every(100, save), where save(at) is a function of the step"
        )
    return _Every(n, function, at_end)


class PhaseHook(LoopHook):
    """Calls a function ``f(name, index)`` at every phase, with the index of its step, from 0."""

    def __init__(self, function: Callable[[str, int], None]):
        self._function = function

    def phase(self, name: str, index: int) -> None:
        """Pass it on."""
        self._function(name, index)


class _Writer(LoopHook):
    """Passes each record to what a with block yields, which is left at the end of the loop."""

    def __init__(self, opened: Callable[[At], AbstractContextManager]):
        self._opened, self._stack = opened, ExitStack()
        self._write: Callable[[dict[str, Any]], Any] = dict

    def begin(self, at: At) -> None:
        self._write = self._stack.enter_context(self._opened(at))

    def after(self, at: At) -> None:
        self._write(at.record)

    def end(self, at: At) -> None:
        close_with(self._stack, at.error)

    def __str__(self) -> str:
        return f"record_to({_name_of(self._write)})"


def close_with(block: AbstractContextManager, error: BaseException | None) -> None:
    """Leave a with block as an exception would leave it; None: as its end."""
    trace = None if error is None else error.__traceback__
    block.__exit__(None if error is None else type(error), error, trace)


def record_to(
    writer: records.Reporter | Callable[[dict[str, Any]], Any],
) -> LoopHook:
    """A hook that passes each record on, with what hooks before it in the list have added.

    Args:
        writer: a function of a record, such as ``history.append``, or a context manager that yields
            one, such as ``functron.training.records.jsonl(path)``; its block is left at the end.
    """
    block = writer if isinstance(writer, AbstractContextManager) else nullcontext(writer)
    return _Writer(lambda at: block)


def progress() -> LoopHook:
    """A hook that shows a bar: loss, gradient norm, tokens per second, MFU, time left.

    Losses of held-out sets, too. It is updated in place, in a notebook in the cell that runs.
    """
    return _Writer(lambda at: records.progress(at.steps, at.step))


LOSS_AND_NORM = ("loss", "grad_norm")
"""The numbers of a record by which a run is judged."""


def check_finite(record: Mapping[str, Any], names: Sequence[str] = LOSS_AND_NORM) -> None:
    """Raise FloatingPointError where one of these numbers of a record is not finite."""
    for name in names:
        if not math.isfinite(record.get(name) or 0.0):
            what = {"loss": "loss", "grad_norm": "gradients of norm"}[name]
            raise FloatingPointError(
                f"step {record['step']}: got {what} {record[name]}; wanted a finite number; fix: "
                "lower the learning rate, lengthen the warm-up, clip gradients, or train in float32"
            )


class FiniteHook(LoopHook):
    """Ends a loop with FloatingPointError where loss or gradients are not finite.

    After the hooks that write records, and before those that save.

    Args:
        skips: whether gradients need not be, since the step leaves out such updates.
    """

    def __init__(self, *, skips: bool = False):
        self._names = LOSS_AND_NORM[:1] if skips else LOSS_AND_NORM

    def after(self, at: At) -> None:
        """Check the record."""
        check_finite(at.record, self._names)


class OverflowHook(LoopHook):
    """Ends a loop where gradients overflow in step after step at the smallest loss scale.

    Args:
        patience: raise FloatingPointError after so many steps in a row.
        layers: ``(state, batch)`` to the names of the layers whose gradients then are not finite,
            for the message; it may give up the state. None: nobody knows.
    """

    def __init__(self, patience: int, layers: Callable[[Any, Any], Sequence[str]] | None = None):
        self._patience, self._layers = patience, layers

    def after(self, at: At) -> None:
        """Look at how many steps the optimizer has left out in a row."""
        if at.metrics.get("stuck", 0) < self._patience:
            return
        newest = at.newest  # the one whose state is whole
        names = [] if self._layers is None else self._layers(newest.state, newest.batch)
        where = f", in {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
        raise FloatingPointError(
            f"step {at.step}: got gradients that are not finite in {self._patience} steps in a row"
            f"{where}, with the loss times {at.record['loss_scale']:g}, the least; wanted finite "
            "ones; fix: train in bf16 (--precision bf16), lower the learning rate, or lengthen the "
            "warm-up"
        )


@dataclass(frozen=True)
class Meter(LoopHook):
    """A hook that completes the record of a step, before others: rates, FLOPs, and memory.

    Attributes:
        learning_rate: of each update, from 0: of the count that the optimizer took it by, where
            the metrics have it as ``updates``, and else of the step.
        tokens_seen: tokens that all ranks together train on in the first so many steps; None
            counts ``batch["tokens"]``, of which all steps have as many.
        flops_per_token: model FLOPs of a token, forward and backward.
        peak_flops: FLOP/s of all devices together.
        device: whose memory is recorded.
        details: makes more entries of a record out of what a step's metrics have as ``aux``.
        position: more entries of a record, by the number of steps taken: where the data is.
    """

    learning_rate: Callable[[int], Any] | None = None
    tokens_seen: Callable[[int], int] | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    device: torch.device | str = "cpu"
    details: Callable[[Any], Mapping[str, float]] | None = None
    position: Callable[[int], Mapping[str, Any]] | None = None

    def after(self, at: At) -> None:
        """Put what is known into the record: every key, None where unknown.

        ``step`` and ``tokens`` count from the beginning, this step included; ``mfu`` is model
        FLOPs per second over `peak_flops`; ``stuck`` and ``updates`` of the optimizer are left out.
        """
        given, seconds = at.record, at.record["step_seconds"]
        count, seen = self._count_tokens(at)
        rate = mfu = None
        if count is not None:
            rate = count / seconds
            if self.flops_per_token and self.peak_flops:
                mfu = rate * self.flops_per_token / self.peak_flops
        updates = int(given.get("updates", at.index))
        floats = {name: float(given[name]) for name in ("grad_norm", "loss_scale")
                  if given.get(name) is not None}  # fmt: skip
        at.record = {
            "step": at.step,
            "loss": float(given["loss"]),
            "grad_norm": None,
            **floats,
            "lr": None if self.learning_rate is None else float(self.learning_rate(updates)),
            "tokens": seen,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "mfu": mfu,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **({} if self.position is None else self.position(at.step)),
        }
        known = {*at.record, "stuck", "updates"}
        at.record |= {name: value for name, value in given.items() if name not in known}
        at.record |= {} if self.details is None else self.details(at.metrics["aux"])

    def _count_tokens(self, at: At) -> tuple[int | None, int | None]:
        """The tokens of a step, and of all steps up to it."""
        if self.tokens_seen is not None:
            seen = self.tokens_seen(at.step)
            return seen - self.tokens_seen(at.index), seen
        tokens = at.batch.get("tokens") if isinstance(at.batch, Mapping) else None
        count = tokens.numel() if isinstance(tokens, torch.Tensor) else None
        return count, None if count is None else at.step * count


# --- requests to stop


EXIT_AFTER = int(signal.NSIG)
"""Beside the numbers of signals: a run's time is over."""
RESHAPE = EXIT_AFTER + 1
"""Likewise: a run goes on with more ranks."""

REQUEUE_CODE = 128 + signal.SIGUSR1
"""The exit code of a run that saved and left before its end, to be started again: 138."""
RESHAPE_CODE = 75
"""That of a run that saved, to be started with more ranks at once: EX_TEMPFAIL of sysexits.h."""

HANG_CODE = 124
"""The exit code of processes of a job that hung: that of timeout(1)."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 2.0


def exit_code(stopped_by: int | None) -> int:
    """The exit code of a run that was stopped: 128 + the signal's number, as shells have it."""
    if stopped_by is None:
        return 0
    return {EXIT_AFTER: REQUEUE_CODE, RESHAPE: RESHAPE_CODE}.get(stopped_by, 128 + stopped_by)


def end_process(text: str, first: bool) -> None:
    """End this process for a hang with `HANG_CODE`; the first one of each machine says why."""
    if first:
        print(f"functron: {text}", file=sys.stderr, flush=True)
    os._exit(HANG_CODE)  # other threads are blocked: nothing is waited for


@dataclass
class Request:
    """Whether someone asked to stop.

    Attributes:
        signal: the signal that asked, or None.
        ends: when the time of the run is over, by ``time.monotonic()``.
        grown: whether there are processes for a larger mesh; asked where a checkpoint is saved.
        signals: that it listens to.
        note: printed when the first one comes.
    """

    signal: int | None = None
    ends: float = math.inf
    grown: Callable[[], bool] | None = None
    signals: tuple[int, ...] = _SIGNALS
    note: str = ""
    _asked_at: float = field(default=0.0, init=False, repr=False)
    _previous: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    def asked(self, *, saving: bool = False) -> int:
        """The number of the signal, or `EXIT_AFTER` or `RESHAPE`; 0 where nobody asked."""
        if self.signal is not None:
            return self.signal
        if time.monotonic() >= self.ends:
            return EXIT_AFTER
        return RESHAPE if saving and self.grown is not None and self.grown() else 0

    def listen(self) -> None:
        """Install the handlers of `stop_requests`, in the main thread, unless they are."""
        if not self._previous and threading.current_thread() is threading.main_thread():
            # noted before each is installed, so that `restore` is right whenever it is interrupted
            for number in self.signals:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers that were installed before."""
        for number, handler in self._previous.items():
            # a handler that was not installed from Python comes as None and cannot be put back
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: object) -> None:
        recent = time.monotonic() - self._asked_at < _ECHO_SECONDS
        echo = number == signal.SIGUSR1 or (number == self.signal == signal.SIGTERM and recent)
        if self.signal in (None, signal.SIGUSR1):
            self.signal, self._asked_at = number, time.monotonic()
            if self.note:
                print(self.note, file=sys.stderr, flush=True)
        elif not echo:
            raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[Request]:
    """Turn the first SIGINT, SIGTERM or SIGUSR1 within the with block into a `Request`.

    The second one raises KeyboardInterrupt at once, but for SIGUSR1, which only ever asks, and a
    SIGTERM that comes twice within 2 seconds: a scheduler sends it to every process of a job, and
    its launcher passes it on. The handlers of before are put back at the end. Outside the main
    thread, where Python allows no handlers, nothing changes.
    """
    request = Request()
    try:
        request.listen()
        yield request
    finally:
        request.restore()


class StopHook(LoopHook):
    """Has a loop stop for a `Request`, on all ranks after the same step.

    Args:
        request: asked at every step; after what took long, for its signal alone.
        saves: whether a checkpoint is saved after so many steps; the mesh may grow there.
        listens: whether it turns signals into requests itself, as `stop_on_signals` says.

    Attributes:
        stopped_by: the signal that ended the loop early, whichever rank received it, `EXIT_AFTER`
            or `RESHAPE`; None where it did not.
    """

    def __init__(
        self,
        request: Request,
        saves: Callable[[int], bool] = lambda step: False,
        *,
        listens: bool = False,
    ):
        self.request, self._saves, self._listens = request, saves, listens
        self.stopped_by: int | None = None

    def begin(self, at: At) -> None:
        """Listen from here on."""
        self.stopped_by = None
        if self._listens:
            self.request.signal = None
            self.request.listen()

    def phase(self, name: str, index: int) -> None:
        """Listen while the loop runs, and not in its body, which may never come back."""
        if self._listens:
            (self.request.restore if name == "body" else self.request.listen)()

    def ask(self, at: At) -> int:
        """The request of this rank."""
        if at.stopped_by is not None:
            return self.request.signal or 0
        asked = self.request.asked(saving=self._saves(at.step) and not at.last)
        return 0 if at.last and asked == EXIT_AFTER else asked

    def end(self, at: At) -> None:
        """Keep why the loop ended, and put back the handlers of before."""
        self.stopped_by = at.stopped_by or None
        if self._listens:
            self.request.restore()


def stop_on_signals() -> StopHook:
    """A hook with which the first Ctrl-C, SIGTERM or SIGUSR1 ends a loop after its running step.

    The second one raises KeyboardInterrupt, as of `stop_requests`. Handlers are installed only
    while the loop itself runs: in the body signals do what they did before. For a body that takes
    long take `StopHook` of ``with stop_requests() as request``. First in the list of hooks, it
    listens until all others have ended.
    """
    return StopHook(Request(), listens=True)
