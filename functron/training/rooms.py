"""Steps whose experts have as much room as they need: learned, and taken again where it was less.

Programs of static shapes have room for so many rows on a rank's experts, and count how many there
were (`functron.nn.moe.room`). `with_rooms` reads the counts of every step. Where some rank had more
rows than room, nothing was updated, and the same step is taken again with more, so that no token is
ever dropped: its numbers are those of a step with room for all tokens. How much there is changes
memory and time alone, and is no part of a run's state.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from functron.nn.moe.room import ROOMS, needed_room, overflowed, room_at_least

MARGIN = 1.0625
"""Times what was needed: so much room there is to be, for steps whose routing differs a little."""

EXPERT_ROOM = 1.25
"""The assumption of plans on routing: the fullest rank needs so much room, with `MARGIN`."""

_STEPS = 64  # that room is learned of before there is less of it
_WORTH = 2  # places in `ROOMS`: programs of a little less room are not worth compiling


@dataclass(eq=False)
class LearnedRoom:
    """The room of the next step, as learned from those before.

    Attributes:
        room: of `ROOMS`; 0: for the worst case.
        check: called with a room before its first step; raises where memory does not hold it.
        recent: the rooms that the last steps needed; 0 is the worst case.
    """

    room: float
    check: Callable[[float], None] = lambda room: None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def enlarge(self, needed: float) -> None:
        """Make more room, after a step that needed so much or, where others were cut off, more."""
        at = ROOMS.index(self.room) + 1
        more = ROOMS[at] if at < len(ROOMS) else 0.0
        self.room = max(more, room_at_least(needed * MARGIN)) if more and needed else 0.0
        self.recent.clear()

    def learn(self, needed: float) -> None:
        """Remember what a step needed; make less room where many steps needed less."""
        self.recent.append(needed)
        if len(self.recent) < _STEPS or 0.0 in self.recent:
            return
        wanted = room_at_least(max(self.recent) * MARGIN)
        if wanted and (not self.room or ROOMS.index(self.room) - ROOMS.index(wanted) >= _WORTH):
            self.room = wanted
            self.recent.clear()


def find_fill(found: Mapping[str, Any]) -> torch.Tensor:
    """The counts of how full ranks were, in what the loss of a GPT found beside itself."""
    return found["aux"]["routers"][-1]


def is_too_full(room: float, found: Mapping[str, Any]) -> torch.Tensor:
    """Whether a step with this room had not enough, for `functron.transforms.retaken`."""
    return overflowed(find_fill(found), room)


def with_rooms(
    make: Callable[[float], Callable], rooms: LearnedRoom, *, keeps_all: bool = True
) -> Callable:
    """The step ``(state, batch) -> (state, metrics)`` with the room that `rooms` says.

    Args:
        make: of a room, its step; called once for each. Where there was not enough, the step must
            leave the state as it is (`functron.transforms.retaken`).
        rooms: learns from its steps.
        keeps_all: keep the steps of all rooms that there were; else that of the last one alone, and
            make others anew: CUDA graphs each hold the memory of a step.

    Returns:
        The step, which donates its state. Its metrics have ``expert_room``, as a multiple of
        balanced rows (0: for the worst case), and ``reruns``, how often the step was taken again.
        All ranks of a bound mesh do so alike, since they count the rows of all.
    """
    made: dict[float, Callable] = {}

    def step(state: Any, batch: Any) -> tuple[Any, dict]:
        reruns = 0
        while True:
            room = rooms.room
            if room not in made:
                rooms.check(room)
                if not keeps_all:
                    made.clear()
                    gc.collect()  # graphs are in cycles
                made[room] = make(room)
            state, metrics = made[room](state, batch)
            fill = find_fill(metrics).cpu()
            if not overflowed(fill, room):
                break
            rooms.enlarge(needed_room(fill))
            reruns += 1
        rooms.learn(needed_room(fill))
        return state, {**metrics, "expert_room": room, "reruns": reruns}

    return step
