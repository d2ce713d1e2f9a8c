"""Schedules: pure functions of the number of updates so far, and transformations that use them.

A schedule takes the count as an int or as a 0-dim tensor (under vmap and tracing too) and returns a
0-dim float32 tensor. ``schedule(0)`` is the rate of the first update, as in Optax. Warm-up is
linear from `init` at count 0 to the peak at count `warmup_steps`; after `total_steps` the rate
stays at `end`.

`scale_by_learning_rate` takes a number or a schedule, and counts updates in its state.
`inject_hyperparams` makes any hyperparameter of an optimizer a schedule, or state that may be
changed between steps.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.ops.foreach import foreach_
from functron.optim.transformation import (
    GradientTransformation,
    multiply,
    multiply_,
    purely,
    scale,
    transformation,
)
from functron.program.recorder import readable
from functron.spmd.spec import P

RateSchedule = Callable[[int | torch.Tensor], Any]
"""``schedule(count)``: a 0-dim tensor; of a schedule of one's own, a number will do as well."""

LearningRate = float | RateSchedule


@public
def constant(peak: float, *, warmup_steps: int = 0, init: float = 0.0) -> RateSchedule:
    """`peak` after the warm-up.

    Raises:
        ValueError: negative or non-finite arguments; all are named.
    """
    _check("constant", peak, warmup_steps, init=init)
    return _with_warmup(lambda now: torch.full_like(_tensor(now), peak), peak, warmup_steps, init)


def _make_decay(name: str, decay: str, course: str):
    """A public schedule: warm-up, then one of `_DECAYS` over all steps after it."""

    def schedule(
        peak: float,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        end: float = 0.0,
        init: float = 0.0,
    ) -> RateSchedule:
        return _decay(name, peak, total_steps, warmup_steps, end, init, decay)

    schedule.__name__ = schedule.__qualname__ = name
    schedule.__doc__ = f"""From `peak` after the warm-up to `end` at `total_steps`, {course}.

    Raises:
        ValueError: negative or non-finite arguments, or no steps after the warm-up; all are named.
    """
    return public(schedule)


linear = _make_decay("linear", "linear", "in a straight line")
cosine_decay = _make_decay("cosine_decay", "cosine", "along half a cosine")
exponential = _make_decay("exponential", "exponential", "by one factor per step; `end` is above 0")
"""Optax's `exponential` with ``decay_rate=end / peak`` over the steps of the decay."""


@public
def polynomial_decay(
    peak: float,
    total_steps: int,
    *,
    power: float,
    warmup_steps: int = 0,
    end: float = 0.0,
    init: float = 0.0,
) -> RateSchedule:
    """``end + (peak - end) (1 - progress)^power`` from the end of the warm-up to `total_steps`.

    Optax's ``polynomial_schedule``; `linear` is that with power 1.

    Raises:
        ValueError: negative or non-finite arguments, a power of 0, or no steps after the warm-up;
            all are named.
    """
    return _decay("polynomial_decay", peak, total_steps, warmup_steps, end, init, power=power)


@public
def wsd(
    peak: float,
    total_steps: int,
    decay_steps: int,
    *,
    warmup_steps: int = 0,
    end: float = 0.0,
    decay: str = "linear",
    init: float = 0.0,
) -> RateSchedule:
    """Warm up, stay at `peak`, then decay to `end` over the last `decay_steps` of `total_steps`.

    MiniCPM (Hu et al. 2024). The "sqrt" decay, ``1 - sqrt(progress)``, is from Hägele et al. 2024;
    the "halving" one, ``2 * 2^-progress - 1``, from Megatron-LM, which calls it exponential.

    Args:
        peak: the stable rate.
        total_steps: the count at which `end` is reached.
        decay_steps: length of the decay.
        warmup_steps: length of the warm-up.
        end: the last rate; positive for the "exponential" decay.
        decay: "linear", "cosine", "sqrt", "exponential" or "halving".
        init: where the warm-up begins.

    Raises:
        ValueError: negative or non-finite arguments, phases that overlap, an unknown decay, or an
            exponential decay to 0; all are named.
    """
    return _decay("wsd", peak, total_steps, warmup_steps, end, init, decay, decay_steps)


@public
def inverse_square_root(
    peak: float,
    total_steps: int | None = None,
    *,
    warmup_steps: int = 0,
    end: float = 0.0,
    init: float = 0.0,
) -> RateSchedule:
    """``peak * sqrt(warmup / count)`` after the warm-up, but never below `end`.

    After `total_steps` it is `end`, as in Megatron-LM; None: it goes on. Without warm-up it is
    ``peak / sqrt(count)`` from count 1 on. Source: Vaswani et al. 2017.

    Raises:
        ValueError: negative or non-finite arguments; all are named.
    """
    _check("inverse_square_root", peak, warmup_steps, total_steps, end, init=init)
    start = max(warmup_steps, 1)

    def after(now):
        rate = (peak * (start / _tensor(now).clamp(min=start)).sqrt()).clamp(min=end)
        return rate if total_steps is None else torch.where(now > total_steps, end, rate)

    return _with_warmup(after, peak, warmup_steps, init)


INCREASES = ("constant", "linear", "cosine")


@public
def weight_decay_increase(
    start: float, end: float, total_steps: int, style: str = "linear"
) -> RateSchedule:
    """A weight decay that goes from `start` at count 0 to `end` at `total_steps`, and stays there.

    Along a straight line, or along half a cosine ("cosine"): Megatron-LM's
    ``--weight-decay-incr-style``. "constant" is `end` throughout.

    Raises:
        ValueError: negative or non-finite arguments, or an unknown style; all are named.
    """
    found = problems(start, 0, total_steps, end)
    found = [replace(p, path="start") if p.path == "peak" else p for p in found]
    if style not in INCREASES:
        found.append(Problem("style", repr(style), "a style", nearest(style, INCREASES)))
    raise_problems("weight_decay_increase", found)
    shapes = {
        "constant": torch.ones_like,
        "linear": lambda x: x,
        "cosine": lambda x: 0.5 * (1 - torch.cos(math.pi * x)),
    }

    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        progress = (_tensor(count) / total_steps).clamp(0, 1)
        return start + (end - start) * shapes[style](progress)

    return schedule


@public
def relative_step(limit: float = 0.01, *, warm_up: bool = False) -> RateSchedule:
    """Adafactor's ``min(limit, 1 / sqrt(t))`` at update t, relative to the parameter's size.

    Shazeer and Stern 2018, algorithm 4, whose limit is 0.01.

    Args:
        limit: the rate of the first updates; positive.
        warm_up: begin with 1e-6 per update instead, for models that need it.

    Raises:
        ValueError: a limit that is not positive and finite.
    """
    if not (math.isfinite(limit) and limit > 0):
        refuse("relative_step schedule", "limit", repr(limit), "a positive, finite rate")

    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        step = _tensor(count) + 1
        return torch.minimum(step * 1e-6 if warm_up else torch.full_like(step, limit), step**-0.5)

    return schedule


@public
def join(schedules: Sequence[RateSchedule], boundaries: Sequence[int]) -> RateSchedule:
    """Schedule i before count ``boundaries[i]``; each one counts from its own start.

    ``join([a, b], [100])`` is ``a(count)`` before count 100, then ``b(count - 100)``, as Optax's
    ``join_schedules``.

    Raises:
        ValueError: the number of boundaries is not that of schedules less 1, or they do not
            increase.
    """
    problems = []
    if len(boundaries) != len(schedules) - 1:
        problems.append(
            Problem(
                "boundaries",
                f"{len(boundaries)} for {len(schedules)} schedules",
                f"{max(len(schedules) - 1, 0)}, one between each two neighbours",
            )
        )
    if any(b <= a for a, b in pairwise([0, *boundaries])):
        problems.append(Problem("boundaries", str(list(boundaries)), "increasing positive counts"))
    raise_problems("cannot join schedules", problems)

    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        value = _tensor(schedules[0](count))
        for part, boundary in zip(schedules[1:], boundaries, strict=True):
            is_earlier = _since(count, boundary) < 0
            value = torch.where(is_earlier, value, _tensor(part(count - boundary)))
        return value

    return schedule


@public
def rewarm(schedule: RateSchedule, at: int, steps: int, *, init: float = 0.0) -> RateSchedule:
    """`schedule`, warmed up again: linearly from `init` at count `at` to it at ``at + steps``.

    ``init + (schedule(count) - init) (count - at) / steps`` in between: for runs that continue with
    another schedule, whose rate would jump.

    Raises:
        ValueError: negative or non-finite arguments, or no steps; all are named.
    """
    wanted = {
        "at": (at, 0, "count updates from 0"),
        "steps": (steps, 1, "warm up over some, or use the schedule as it is"),
        "init": (init, 0, "set it to 0, or leave it out"),
    }
    raise_problems("cannot warm up again", [
        Problem(name, repr(value), f"a finite number of at least {least}", fix)
        for name, (value, least, fix) in wanted.items()
        if not least <= value < math.inf
    ])  # fmt: skip

    def schedule_(count: int | torch.Tensor) -> torch.Tensor:
        since, value = _since(count, at), _tensor(schedule(count))
        share = (since / steps).clamp(0, 1)
        return torch.where(since < 0, value, init + (value - init) * share)

    return schedule_


@public
def by_samples(
    schedule: RateSchedule, first_steps: Sequence[int], sizes: Sequence[int]
) -> RateSchedule:
    """``schedule(samples)``, of the samples of all updates, for batches that change size.

    Before update c they are ``sum over i of (size_i - size_(i-1)) max(c - first_i, 0)``, where
    size_(-1) is 0. Megatron-LM counts warm-up and decay so (``--lr-warmup-samples``,
    ``--lr-decay-samples``).

    Args:
        schedule: of the number of samples.
        first_steps: the first update of each size: from 0, increasing.
        sizes: samples per update, one for each of these.

    Raises:
        ValueError: lengths that differ, or first updates that do not increase from 0.
    """
    problems = []
    if len(sizes) != len(first_steps) or not sizes:
        got = f"{len(sizes)} for {len(first_steps)} first_steps"
        problems.append(Problem("sizes", got, "one of each, and at least one"))
    if list(first_steps[:1]) != [0] or any(b <= a for a, b in pairwise(first_steps)):
        problems.append(Problem("first_steps", str(list(first_steps)), "0, and increasing"))
    raise_problems("cannot count samples", problems)
    grown = [b - a for a, b in pairwise([0, *sizes])]

    def counted(count: int | torch.Tensor) -> Any:
        samples: Any = 0
        for first, more in zip(first_steps, grown, strict=True):
            after = count - first
            after = after.clamp(min=0) if isinstance(after, torch.Tensor) else max(after, 0)
            samples = samples + more * after
        return schedule(samples)

    return counted


def _exponential(progress: torch.Tensor, peak: float, end: float) -> torch.Tensor:
    return peak * torch.exp(progress * math.log(end / peak))


def _interpolate(shape: Callable[[torch.Tensor], torch.Tensor]):
    return lambda progress, peak, end: end + (peak - end) * shape(progress)


_DECAYS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "linear": _interpolate(lambda x: 1 - x),
    "cosine": _interpolate(lambda x: 0.5 * (1 + torch.cos(math.pi * x))),
    "sqrt": _interpolate(lambda x: 1 - x.sqrt()),
    "halving": _interpolate(lambda x: 2 * torch.exp2(-x) - 1),
    "exponential": _exponential,
}


def _decay(
    name: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    end: float,
    init: float,
    decay: str = "linear",
    decay_steps: int | None = None,
    power: float = 1.0,
) -> RateSchedule:
    """Warm-up, `peak`, `decay` over the last `decay_steps` or all after the warm-up, then `end`.

    `power` is that of a linear decay.
    """
    _check(name, peak, warmup_steps, total_steps, end, decay_steps, decay, init, power)
    start = warmup_steps if decay_steps is None else total_steps - decay_steps
    shape = _DECAYS[decay] if power == 1 else _interpolate(lambda x: (1 - x) ** power)

    def after(now):
        return shape((_since(now, start) / (total_steps - start)).clamp(0, 1), peak, end)

    return _with_warmup(after, peak, warmup_steps, init)


def _with_warmup(
    after: Callable[[torch.Tensor], torch.Tensor], peak: float, warmup_steps: int, init: float
) -> RateSchedule:
    """Warm-up, then `after`, a function of the count as a tensor (`_exact`)."""

    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        now = _exact(count)
        if not warmup_steps:
            return after(now)
        warm = init + _tensor(now) * ((peak - init) / warmup_steps)
        return torch.where(now < warmup_steps, warm, after(now))

    return schedule


def _tensor(value: Any) -> torch.Tensor:
    """`value` as float32, which has whole numbers up to 2^24 and rounds others to 1 in 2^24."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32)
    return torch.tensor(value, dtype=torch.float32)


def _exact(count: int | torch.Tensor) -> torch.Tensor:
    """A count as a tensor: int64, to be compared and subtracted from exactly, if it is whole.

    Counts of samples soon pass 2^24, from where on float32 knows every second one at most.
    """
    if isinstance(count, torch.Tensor):
        return count if count.is_floating_point() else count.to(torch.int64)
    whole = isinstance(count, Integral)
    return torch.tensor(count, dtype=torch.int64 if whole else torch.float32)


def _since(count: int | torch.Tensor, start: float) -> torch.Tensor:
    """``count - start`` as float32: rounded once, at the end, where the count is whole."""
    now = _exact(count)
    if now.is_floating_point():
        return now.to(torch.float32) - start
    if start == int(start):
        return (now - int(start)).to(torch.float32)
    return (now.to(torch.float64) - start).to(torch.float32)


def problems(
    peak: float,
    warmup_steps: int,
    total_steps: int | None = None,
    end: float = 0.0,
    decay_steps: int | None = None,
    decay: str = "linear",
    init: float = 0.0,
    power: float = 1.0,
) -> list[Problem]:
    """The problems of a schedule's arguments; None for those that it does not take."""
    found = []
    for name, rate in (("peak", peak), ("end", end), ("init", init)):
        if not (math.isfinite(rate) and rate >= 0):
            found.append(Problem(name, repr(rate), "a finite rate of at least 0"))
    if not (math.isfinite(power) and power > 0):
        found.append(Problem("power", repr(power), "a finite number above 0"))
    steps = (
        ("warmup_steps", warmup_steps, 0),
        ("total_steps", total_steps, 1),
        ("decay_steps", decay_steps, 1),
    )
    for name, value, least in steps:
        if value is not None and (not isinstance(value, int) or value < least):
            found.append(Problem(name, repr(value), f"a whole number of at least {least}"))
    if not found and total_steps is not None:
        busy = warmup_steps + (decay_steps or 0)
        if busy > total_steps or warmup_steps == total_steps:
            found.append(
                Problem(
                    "total_steps",
                    f"{total_steps} for {warmup_steps} of warm-up"
                    + (f" and {decay_steps} of decay" if decay_steps else ""),
                    f"at least {max(busy, warmup_steps + 1)}",
                    "shorten the warm-up or the decay, or train longer",
                )
            )
    if decay not in _DECAYS:
        found.append(Problem("decay", repr(decay), "a shape of decay", nearest(decay, _DECAYS)))
    if decay == "exponential" and not (end > 0 and peak > 0):
        found.append(
            Problem("end", repr(end), "more than 0 for an exponential decay", f"use {peak / 100:g}")
        )
    return found


def _check(name: str, *args, **kwargs) -> None:
    raise_problems(f"{name} schedule", problems(*args, **kwargs))


class ScaleByScheduleState(NamedTuple):
    """The state of a scheduled learning rate.

    Attributes:
        count: number of updates so far; int64, 0-dim.
    """

    count: Any


@public
def scale_by_learning_rate(
    learning_rate: LearningRate, *, flip_sign: bool = True
) -> GradientTransformation:
    """Updates times minus the learning rate, as in Optax, to be added to the parameters.

    Args:
        learning_rate: a number (state ``()``), or a schedule: a function of the count of updates so
            far to a number or a 0-dim tensor.
        flip_sign: False: times the learning rate itself.
    """
    sign = -1 if flip_sign else 1
    if not callable(learning_rate):
        return scale(sign * learning_rate)

    def times(updates, params, rate, donated):
        return (multiply_ if donated else multiply)(updates, sign * rate)

    return scheduled(learning_rate, times, elementwise=True)


def scheduled(
    schedule: RateSchedule, fn: Callable[..., tree.Tree], *, elementwise: bool
) -> GradientTransformation:
    """Updates that are a function of the value of a schedule, which counts them in the state.

    Args:
        schedule: of the count of updates so far.
        fn: ``(updates, params, value, donated)`` to the updates.
        elementwise: as of `transformation`.
    """

    def update(updates, state, params=None, *, donated=False):
        updates = fn(updates, params, schedule(state.count), donated)
        if donated:
            increment_([state.count])
            return updates, state
        return updates, ScaleByScheduleState(state.count + 1)

    return transformation(
        lambda params: ScaleByScheduleState(new_count(params)),
        update,
        lambda param_specs: ScaleByScheduleState(P()),
        elementwise=elementwise,
    )


def rate_and_count(
    learning_rate: LearningRate, state: ScaleByScheduleState | tuple[()]
) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """The learning rate of the coming update, and the count of the schedule if it is one."""
    if not callable(learning_rate):
        return learning_rate, None
    assert isinstance(state, ScaleByScheduleState)
    return learning_rate(state.count), state.count


def increment_(counts: list[torch.Tensor]) -> None:
    """Adds 1 to each count, in place."""
    foreach_(lambda values: torch._foreach_add_(values, 1), {"counts": counts})


def incremented(counts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each count and 1 more: the counts themselves, unless `purely`."""
    if purely():
        return [count + 1 for count in counts]
    increment_(counts)
    return counts


def new_count(params: tree.Tree) -> torch.Tensor:
    """A zero count of updates: int64, 0-dim, on the device of the first leaf."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


class InjectHyperparamsState(NamedTuple):
    """The state of `inject_hyperparams`, as Optax's.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        hyperparams: the numbers by name, of the last update where they are scheduled; float64,
            0-dim, in host memory. Others may be replaced between steps, by numbers too.
        inner_state: of the transformation that has them.
    """

    count: Any
    hyperparams: dict[str, Any]
    inner_state: tree.Tree


def read_schedule_count(state: tree.Tree) -> torch.Tensor | None:
    """The count that schedules in an optimizer's state will see next; None without schedules.

    It is below the number of steps where updates were skipped.
    """
    counts: list[torch.Tensor] = []
    _with_counts(state, lambda count: counts.append(count) or count)
    return counts[0] if counts else None


def advance_schedules(state: tree.Tree) -> tree.Tree:
    """The state of an optimizer after a skipped update: counts of schedules go on.

    The optimizer's own counters stay. Overwrites the counts, unless traced.
    """
    return _with_counts(state, lambda count: incremented([count])[0])


def _with_counts(state: tree.Tree, change: Callable[[torch.Tensor], torch.Tensor]) -> tree.Tree:
    """A state with the counts of its schedules changed."""
    if isinstance(state, Mapping):
        return {name: _with_counts(inner, change) for name, inner in state.items()}
    if not isinstance(state, tuple | list):
        return state
    if isinstance(state, ScaleByScheduleState | InjectHyperparamsState) and state.count is not None:
        state = state._replace(count=change(state.count))
    found = [_with_counts(inner, change) for inner in state]
    return cast(Any, getattr(state, "_make", type(state)))(found)


@public
def inject_hyperparams(
    factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """`factory`, whose numbers may be schedules, and are state that can be read and changed.

    Optax's `inject_hyperparams`. ``inject_hyperparams(adamw)(learning_rate=1e-3, b2=schedule)`` has
    ``state.hyperparams["learning_rate"]``, which checkpoints include. Every argument that is a
    number becomes such state, and every function a schedule of the count of updates. Eager updates
    run with plain numbers, so as fused as ever; traced, compiled, vmapped or differentiated ones
    with 0-dim tensors.

    Args:
        factory: makes a transformation of arguments that may be 0-dim tensors.
        static_args: names of arguments to leave alone: functions that are not schedules, such as
            masks, and numbers that decide what is computed.

    Raises:
        ValueError: `factory` has no such argument.
    """
    fixed = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(factory)
    names = list(signature.parameters)
    raise_problems(
        "inject_hyperparams",
        [
            Problem(f"static_args/{name}", repr(name), "an argument", nearest(name, names))
            for name in sorted(fixed)
            if name not in names
        ],
    )

    @functools.wraps(factory)
    def make(*args, **kwargs) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        schedules, numbers = {}, {}
        for name, value in bound.arguments.items():
            if name in fixed or isinstance(value, bool):
                continue
            if callable(value):
                schedules[name] = value
            elif isinstance(value, (int, float)) or _is_number(value):
                numbers[name] = value

        def build(hyperparams: Mapping[str, Any]) -> GradientTransformation:
            given = inspect.BoundArguments(signature, bound.arguments | dict(hyperparams))
            return factory(*given.args, **given.kwargs)

        return _inject(build, schedules, numbers)

    return make


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _inject(build: Callable, schedules: Mapping, numbers: Mapping) -> GradientTransformation:
    def now(count, others: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The hyperparameters of the update with this count."""
        found = {name: others[name] for name in numbers}
        found |= {name: schedule(count) for name, schedule in schedules.items()}
        return {name: _keep_number(value) for name, value in found.items()}

    def init(params):
        count = new_count(params)
        hyperparams = now(count, numbers)
        return InjectHyperparamsState(count, hyperparams, build(_given(hyperparams)).init(params))

    def run(name: str, updates, state, params, **extra):
        hyperparams = now(state.count, state.hyperparams)
        method = getattr(build(_given(hyperparams)), name)
        out, kept = method(updates, state.inner_state, params, **extra)
        return out, InjectHyperparamsState(state.count + 1, hyperparams, kept)

    def anything() -> GradientTransformation:
        return build(_given(now(torch.zeros((), dtype=torch.int64), numbers)))

    def bind(param_specs, copies):
        return _inject(lambda h: build(h).bind(param_specs, copies), schedules, numbers)

    def specs(param_specs):
        hyperparams = {name: P() for name in (*numbers, *schedules)}
        return InjectHyperparamsState(P(), hyperparams, anything().specs(param_specs))

    def update(updates, state, params=None, **extra):
        return run("update", updates, state, params, **extra)

    return transformation(
        init,
        update,
        specs,
        step_=functools.partial(run, "step_"),
        grad_specs=lambda param_specs: anything().grad_specs(param_specs),
        elementwise=anything().elementwise,
    )._replace(bind=bind)


def _keep_number(value: Any) -> torch.Tensor:
    value = torch.as_tensor(value, dtype=torch.float64)
    return value.cpu() if readable(value) else value


def _given(hyperparams: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The factory's arguments: plain numbers, where they are known and not differentiated."""
    return {name: x.item() if readable(x) else x for name, x in hyperparams.items()}
