"""Running a loop whose iterations overlap: gathers for the next one, reductions of the last one.

The order in which collectives start is the same on every rank: those of the next layer's gathers
before this layer's own, and the reductions of this layer's gradients after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functron.program.equations import Equation
from functron.program.steps import Loop, Plan

_c10d = torch.ops._c10d_functional

Run = Callable[[list], list]
"""Runs a plan: takes its inputs in a list, which it empties; gives its outputs."""


@dataclass(frozen=True, eq=False)
class Part:
    """A plan beside the iterations, and where among constants and xs its first inputs are."""

    run: Run
    reads: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What runs beside the iterations of a loop.

    Attributes:
        num_carry: of the scan.
        num_columns, num_rows: how many columns, and rows of stacks, an iteration itself makes.
        num_ends: how many of its outputs, the last ones, are for `behind`.
        ahead: what computes the operands of `gathers`.
        behind: what computes the late ys.
        gathers, scatters: each starts a collective; what they return must be waited for.
    """

    num_carry: int
    num_columns: int
    num_rows: int
    num_ends: int
    ahead: Part | None
    behind: Part | None
    gathers: tuple[Callable, ...]
    scatters: tuple[Callable, ...]

    def run(
        self,
        body: Run,
        order: Sequence[int],
        fixed: list,
        carry: list,
        take: Callable[[int], list],
        give: Callable[[int, Sequence, int], None],
        rows: Sequence[Sequence[torch.Tensor]],
    ) -> list:
        """The last carry.

        Args:
            body: runs an iteration.
            order: the indices of iterations.
            fixed: the constants.
            carry: the first carry; it is emptied.
            take: gives the xs of an index, once.
            give: takes columns of an index, from the column with that number on.
            rows: the slices of each stack.
        """
        early, late = rows[: self.num_rows], rows[self.num_rows :]
        end_last: Callable[[], None] | None = None
        x = take(order[0])
        under_way = self._gather(fixed, x)
        for position, index in enumerate(order, start=1):
            gathered = [_wait(value) for value in under_way]
            kept = [] if self.behind is None else _chosen(self.behind, fixed, x)
            inputs = [*fixed, *carry, *x, *gathered, *(row[index] for row in early)]
            carry.clear()
            x, under_way = [], []
            del gathered
            if position < len(order):
                x = take(order[position])
                under_way = self._gather(fixed, x)
            outputs = body(inputs)
            carry = outputs[: self.num_carry]
            give(index, outputs[self.num_carry : self.num_carry + self.num_columns], 0)
            ends = outputs[len(outputs) - self.num_ends :]
            del outputs
            if self.behind is not None:
                end = self._reduce(self.behind, kept, ends, [row[index] for row in late])
                if end_last is not None:
                    end_last()
                end_last = functools.partial(self._end, end, index, give)
        if end_last is not None:
            end_last()
        return carry

    def _gather(self, fixed: list, x: list) -> list:
        """The next iteration's gathers, started."""
        if self.ahead is None:
            return []
        operands = self.ahead.run(_chosen(self.ahead, fixed, x))
        return [start(value) for start, value in zip(self.gathers, operands, strict=True)]

    def _reduce(self, behind: Part, kept: list, ends: list, rows: list) -> Callable[[], list]:
        """Starts an iteration's reductions; the result waits for them and gives its late ys."""
        count = len(self.scatters)
        started = [start(value) for start, value in zip(self.scatters, ends, strict=False)]
        inputs = [*kept, *started, *ends[count:], *rows]
        ends.clear()

        def end() -> list:
            first = len(kept)
            for i in range(first, first + count):
                inputs[i] = _wait(inputs[i]).squeeze(0)
            kept.clear()
            return behind.run(inputs)

        return end

    def _end(self, end: Callable[[], list], index: int, give: Callable) -> None:
        give(index, end(), self.num_columns)


def neighbours(
    step: Loop, routine: Callable[[Plan], Run], groups: Mapping[str, str]
) -> Neighbours | None:
    """What runs beside the iterations of a loop; None where nothing does.

    Args:
        step: the loop.
        routine: makes a plan ready to run.
        groups: the name of the process group of every axis.
    """
    ahead, behind, op = step.ahead, step.behind, step.op
    if ahead is None and behind is None:
        return None
    inputs = op.body.inputs
    fixed = (*inputs[: op.num_consts], *inputs[op.num_consts + op.num_carry :])
    place = {value: i for i, value in enumerate(fixed)}

    def part(plan: Plan) -> Part:
        return Part(routine(plan), tuple(place[v] for v in plan.inputs if v in place))

    return Neighbours(
        op.num_carry,
        len(step.columns) - (behind.columns if behind else 0),
        len(step.stacks) - (behind.stacks if behind else 0),
        len(behind.scatters) + len(behind.passed) if behind else 0,
        part(ahead.plan) if ahead else None,
        part(behind.plan) if behind else None,
        tuple(_gather(e, groups) for e in ahead.gathers) if ahead else (),
        tuple(_scatter(e, groups) for e in behind.scatters) if behind else (),
    )


def _chosen(part: Part, fixed: list, x: list) -> list:
    count = len(fixed)
    return [fixed[i] if i < count else x[i - count] for i in part.reads]


def _gather(equation: Equation, groups: Mapping[str, str]) -> Callable:
    _, axis, size = equation.args
    group = groups[axis]

    def start(x: torch.Tensor) -> torch.Tensor:
        row = x.contiguous().unsqueeze(0)
        return _c10d.all_gather_into_tensor(row, size, group)

    return start


def _scatter(equation: Equation, groups: Mapping[str, str]) -> Callable:
    _, axis, size = equation.args
    group = groups[axis]

    def start(x: torch.Tensor) -> torch.Tensor:
        return _c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group)

    return start


def _wait(value: Any) -> torch.Tensor:
    return _c10d.wait_tensor(value)
