"""Schedules that feed a pipeline from both ends and overlap forwards with backwards (DeepSeek-AI).

A forward and a backward of different microbatches in one cell hide each other's communication, as
that of experts. Times below: tF, tB, tW of a forward, a whole backward and one for weights, tFB of
such a combined cell.

In DualPipe on 2h ranks, ranks r and 2h-1-r do the same, on opposite directions: what rank r of a V
on h ranks does on its way down and its way up. That V alone is DualPipeV, DualPipe cut in half.
"""

from __future__ import annotations

from collections import Counter, deque

from functron.errors import Problem, raise_problems
from functron.pipeline.action import Action, Cell
from functron.pipeline.schedule import Schedule, place


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """The bidirectional schedule of DeepSeek-V3 (arXiv 2412.19437, section 3.2.1, figure 5).

    Half of the microbatches go down the ranks, half go up through copies of the stages: chunk 0 of
    rank r is stage r of the first pipe, chunk 1 is stage p-1-r of the second.

    Bubble: (p/2-1)(tFB + tB - 3tW), where tF = tB - tW >= tW.
    Memory: activations of p+1 stages, parameters of 2, on every rank.
    Admits: an even number of ranks; an even number of microbatches, at least twice the ranks.

    Raises:
        ValueError: counts that it does not admit, with the nearest ones that it does.
    """
    _check_counts("dualpipe", num_ranks, num_microbatches, even=True)
    half, each = num_ranks // 2, num_microbatches // 2
    columns = []
    for rank in range(num_ranks):
        mirrored = rank >= half
        column = _column(min(rank, num_ranks - 1 - rank), half, each)
        columns.append([tuple(_direct(a, mirrored, each) for a in cell) for cell in column])
    down = [(rank, 0) for rank in range(num_ranks)]
    up = [(rank, 1) for rank in reversed(range(num_ranks))]
    return place("dualpipe", [down, up], num_microbatches, columns)


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: each rank runs one direction as the way down of a V, one as the way up.

    From Sea AI Lab's note "DualPipe could be better without the Dual" and DeepSeek's DualPipeV; it
    needs no copies of the parameters. Rank r holds stages r and 2p-1-r.

    Bubble: (p-1)(tFB + tB - 3tW), where tF = tB - tW >= tW, with times of one of the 2p stages.
    Memory: activations of 2p+1 stages on every rank.
    Admits: any number of ranks; at least twice as many microbatches.

    Raises:
        ValueError: counts that it does not admit, with the nearest ones that it does.
    """
    _check_counts("dualpipev", num_ranks, num_microbatches, even=False)
    down = [(rank, 0) for rank in range(num_ranks)]
    up = [(rank, 1) for rank in reversed(range(num_ranks))]
    columns = [_column(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return place("dualpipev", [down + up], num_microbatches, columns)


def _check_counts(name: str, num_ranks: int, num_microbatches: int, even: bool) -> None:
    problems = []
    every = 2 if even else 1
    if num_ranks < every or num_ranks % every:
        wanted = "an even number, at least 2" if even else "at least 1"
        problems.append(_problem("num_ranks", num_ranks, wanted, every, every))
    least = 2 * max(num_ranks, 1)
    if num_microbatches < least or num_microbatches % every:
        parity = "an even number, " if even else ""
        wanted = f"{parity}at least twice the {num_ranks} ranks"
        problems.append(_problem("num_microbatches", num_microbatches, wanted, least, every))
    raise_problems(f"{name}: counts that it does not admit", problems)


def _problem(what: str, count: int, wanted: str, least: int, every: int) -> Problem:
    """What is wrong with a count, and the admissible ones beside it."""
    below = max(least, count - count % every)
    above = max(least, count + -count % every)
    fix = f"use {below}" if below == above else f"use {below} or {above}"
    return Problem(what, str(count), wanted, fix)


def _direct(action: Action, mirrored: bool, each: int) -> Action:
    """An action of `_column` in DualPipe: the second half of the ranks swaps the directions.

    Microbatches of the second direction follow the `each` of the first.
    """
    chunk = action.chunk ^ mirrored
    return Action(action.kind, action.microbatch + chunk * each, chunk)


class _Column:
    """A column that grows cell by cell; each chunk takes its microbatches in order."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self._next: Counter[tuple[str, int]] = Counter()
        self._waiting: deque[Action] = deque()  # weight gradients that were split off

    def forward(self, chunk: int) -> None:
        self.cells.append((self._forward(chunk),))

    def backward(self, chunk: int, split: bool = False) -> None:
        """A whole backward, or the one for inputs, whose weights wait for `weights`."""
        whole = self._backward(chunk)
        if split:
            self.cells.append((Action("I", whole.microbatch, chunk),))
            self._waiting.append(Action("W", whole.microbatch, chunk))
        else:
            self.cells.append((whole,))

    def both(self, forward: int, backward: int) -> None:
        """A forward of one chunk combined with a backward of the other."""
        self.cells.append((self._forward(forward), self._backward(backward)))

    def weights(self) -> None:
        """The weight gradient that waits longest."""
        self.cells.append((self._waiting.popleft(),))

    def _forward(self, chunk: int) -> Action:
        self._next["F", chunk] += 1
        return Action("F", self._next["F", chunk] - 1, chunk)

    def _backward(self, chunk: int) -> Action:
        self._next["B", chunk] += 1
        return Action("B", self._next["B", chunk] - 1, chunk)


def _column(rank: int, num_ranks: int, num_microbatches: int) -> list[Cell]:
    """What a rank of a V does, in the eight steps of DeepSeek's DualPipe.

    Chunk 0 is its way down, chunk 1 its way up.
    """
    after, upto = num_ranks - rank - 1, rank + 1  # ranks nearer to the tip; those from the start on
    column = _Column()
    for _ in range(2 * after):  # 1: forwards, until the first one comes back up
        column.forward(0)
    for _ in range(upto):  # 2: forwards of both
        column.forward(0)
        column.forward(1)
    for _ in range(after):  # 3: backwards begin; weights fill the wait for the next forward
        column.backward(1, split=True)
        column.weights()
        column.forward(1)
    for i in range(num_microbatches - 2 * num_ranks + upto):  # 4: the steady state, all combined
        if i == 0 and after == 0:  # at the tip a backward alone starts the others' sooner
            column.forward(0)
            column.backward(1)
        else:
            column.both(0, 1)
        column.both(1, 0)
    for _ in range(after):  # 5: no forwards of the way down are left
        column.backward(1)
        column.both(1, 0)
    # 6: no forwards at all; the second half of the cells keeps its weights for the waits to come
    for i in range(2 * upto):
        column.backward(1 - i % 2, split=i >= upto)
    for _ in range(after):  # 7: weights fill the waits for the last cotangents
        column.weights()
        column.backward(0, split=True)
    for _ in range(upto):  # 8
        column.weights()
    return column.cells
