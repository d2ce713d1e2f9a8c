"""Learning-rate schedules: pure functions of the number of updates so far.

A schedule takes the count as an int or as a 0-dim tensor (under vmap and tracing too) and returns
a 0-dim float32 tensor. ``schedule(0)`` is the rate of the first update, as in Optax. Warm-up is
linear from 0 at count 0 to the peak at count `warmup_steps`; after `total_steps` the rate stays at
`end`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from functron.errors import Problem, nearest, raise_problems

Schedule = Callable[[int | torch.Tensor], torch.Tensor]


def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """`peak` after the warm-up.

    Raises:
        ValueError: negative or non-finite arguments; all are named.
    """
    _check("constant", peak, warmup_steps)
    return _with_warmup(lambda count: torch.full_like(count, peak), peak, warmup_steps)


def linear(peak: float, total_steps: int, *, warmup_steps: int = 0, end: float = 0.0) -> Schedule:
    """From `peak` at the end of the warm-up in a straight line to `end` at `total_steps`.

    Raises:
        ValueError: negative or non-finite arguments, or no steps after the warm-up; all are named.
    """
    _check("linear", peak, warmup_steps, total_steps, end)
    return _decay(_DECAYS["linear"], peak, end, warmup_steps, warmup_steps, total_steps)


def cosine_decay(
    peak: float, total_steps: int, *, warmup_steps: int = 0, end: float = 0.0
) -> Schedule:
    """Half a cosine from `peak` at the end of the warm-up to `end` at `total_steps`.

    Raises:
        ValueError: negative or non-finite arguments, or no steps after the warm-up; all are named.
    """
    _check("cosine_decay", peak, warmup_steps, total_steps, end)
    return _decay(_DECAYS["cosine"], peak, end, warmup_steps, warmup_steps, total_steps)


def wsd(
    peak: float,
    total_steps: int,
    decay_steps: int,
    *,
    warmup_steps: int = 0,
    end: float = 0.0,
    decay: str = "linear",
) -> Schedule:
    """Warm up, stay at `peak`, then decay to `end` over the last `decay_steps` of `total_steps`.

    Source: MiniCPM (Hu et al. 2024); the "sqrt" decay, ``1 - sqrt(progress)``: Hägele et al.
    2024.

    Args:
        peak: the stable rate.
        total_steps: the count at which `end` is reached.
        decay_steps: length of the decay, at the end of the `total_steps`.
        warmup_steps: length of the warm-up.
        end: the last rate; positive for the "exponential" decay.
        decay: "linear", "cosine", "sqrt" or "exponential".

    Raises:
        ValueError: negative or non-finite arguments, phases that overlap, an unknown decay, or an
            exponential decay to 0; all are named.
    """
    _check("wsd", peak, warmup_steps, total_steps, end, decay_steps, decay)
    return _decay(_DECAYS[decay], peak, end, warmup_steps, total_steps - decay_steps, total_steps)


def inverse_square_root(peak: float, *, warmup_steps: int = 0, end: float = 0.0) -> Schedule:
    """``peak * sqrt(warmup / count)`` after the warm-up, but never below `end`.

    Without warm-up it is ``peak / sqrt(count)`` from count 1 on. Source: Vaswani et al. 2017.

    Raises:
        ValueError: negative or non-finite arguments; all are named.
    """
    _check("inverse_square_root", peak, warmup_steps, end=end)
    start = max(warmup_steps, 1)

    def after(count):
        return (peak * (start / count.clamp(min=start)).sqrt()).clamp(min=end)

    return _with_warmup(after, peak, warmup_steps)


def relative_step(limit: float = 0.01, *, warm_up: bool = False) -> Schedule:
    """Adafactor's ``min(limit, 1 / sqrt(t))`` at update t, to be times the parameter's size.

    Source: Shazeer and Stern 2018, algorithm 4, whose limit is 0.01.

    Args:
        limit: the rate of the first updates; positive.
        warm_up: begin with 1e-6 per update instead, for models that need it.

    Raises:
        ValueError: a limit that is not positive and finite.
    """
    if not (math.isfinite(limit) and limit > 0):
        wanted = "a positive, finite rate"
        raise_problems("relative_step schedule", [Problem("limit", repr(limit), wanted)])

    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        step = _tensor(count) + 1
        return torch.minimum(step * 1e-6 if warm_up else torch.full_like(step, limit), step**-0.5)

    return schedule


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Schedule i up to, not including, ``boundaries[i]``; each one counts from its own start.

    Optax's `join_schedules`: ``join([a, b], [100])`` is ``a(count)`` up to count 99, then
    ``b(count - 100)``.

    Raises:
        ValueError: not one boundary fewer than schedules, or boundaries that do not increase.
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
            value = torch.where(_tensor(count) < boundary, value, _tensor(part(count - boundary)))
        return value

    return schedule


def _exponential(progress: torch.Tensor, peak: float, end: float) -> torch.Tensor:
    return peak * torch.exp(progress * math.log(end / peak))


def _interpolate(shape: Callable[[torch.Tensor], torch.Tensor]):
    return lambda progress, peak, end: end + (peak - end) * shape(progress)


_DECAYS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "linear": _interpolate(lambda x: 1 - x),
    "cosine": _interpolate(lambda x: 0.5 * (1 + torch.cos(math.pi * x))),
    "sqrt": _interpolate(lambda x: 1 - x.sqrt()),
    "exponential": _exponential,
}


def _decay(shape, peak: float, end: float, warmup_steps: int, start: int, stop: int) -> Schedule:
    """Warm-up, `peak` until `start`, `shape` from there to `stop`, `end` from then on."""

    def after(count):
        return shape(((count - start) / (stop - start)).clamp(0, 1), peak, end)

    return _with_warmup(after, peak, warmup_steps)


def _with_warmup(
    after: Callable[[torch.Tensor], torch.Tensor], peak: float, warmup_steps: int
) -> Schedule:
    def schedule(count: int | torch.Tensor) -> torch.Tensor:
        count = _tensor(count)
        if not warmup_steps:
            return after(count)
        return torch.where(count < warmup_steps, count * (peak / warmup_steps), after(count))

    return schedule


def _tensor(value: Any) -> torch.Tensor:
    """`value` as float32: counts are exact in it up to 2^24 updates."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32)
    return torch.tensor(value, dtype=torch.float32)


def problems(
    peak: float,
    warmup_steps: int,
    total_steps: int | None = None,
    end: float = 0.0,
    decay_steps: int | None = None,
    decay: str = "linear",
) -> list[Problem]:
    """What is wrong with these arguments of a schedule; None for one that it does not take."""
    found = []
    for name, rate in (("peak", peak), ("end", end)):
        if not (math.isfinite(rate) and rate >= 0):
            found.append(Problem(name, repr(rate), "a finite rate of at least 0"))
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
