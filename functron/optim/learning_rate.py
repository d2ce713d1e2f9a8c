"""The learning rate, as a number or as a schedule with its own count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron import tree
from functron.errors import public
from functron.ops.foreach import foreach_
from functron.optim.transformation import (
    GradientTransformation,
    scale,
    scale_,
    stateless,
    transformation,
)
from functron.spmd.spec import P

Schedule = Callable[[int | torch.Tensor], float | torch.Tensor]
LearningRate = float | Schedule


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
    """Updates times minus the learning rate, as in Optax: what comes out is added to parameters.

    Args:
        learning_rate: a number (state ``()``), or a schedule, a function of the count of updates
            so far that returns a number or a 0-dim tensor: the first update uses ``schedule(0)``.
        flip_sign: False: times the learning rate itself.
    """
    sign = -1 if flip_sign else 1
    if not callable(learning_rate):
        return stateless(
            lambda updates, params: scale(updates, sign * learning_rate),
            lambda updates, params: scale_(updates, sign * learning_rate),
        )

    def init(params):
        return ScaleByScheduleState(new_count(params))

    def update(updates, state, params=None):
        rate = learning_rate(state.count)
        return scale(updates, sign * rate), ScaleByScheduleState(state.count + 1)

    def update_(updates, state, params=None):
        updates = scale_(updates, sign * learning_rate(state.count))
        increment_([state.count])
        return updates, state

    return transformation(
        init,
        update,
        specs=lambda param_specs: ScaleByScheduleState(P()),
        update_=update_,
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


def new_count(params: tree.Tree) -> torch.Tensor:
    """A zero count of updates: int64, 0-dim, on the device of the first leaf."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
