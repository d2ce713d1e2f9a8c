"""Schedules that split the backward and fill bubbles with weight gradients (Qi et al. 2023, 2024).

Only I, the backward for a stage's input, is waited for by other ranks; W, the backward for its
weights, fits wherever a rank would idle. Times below: tF, tI and tW of F, I and W (the papers
write B for I), p ranks, m microbatches. All schedules admit every p >= 1 and m >= 1, and are made
for tF = tI = tW: other costs are right too, with more bubble.

A *span* is the time from a rank's first action to its last one. The papers count bubbles in spans,
since a rank that ends a step early may begin the next one early. Where all ranks begin and end a
step together, ZB-H2 and ZBV idle for p-1 forwards, in which the first microbatch reaches the ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from functron.errors import Problem, raise_problems
from functron.pipeline.action import Action
from functron.pipeline.schedule import Schedule, place


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule with the memory of 1F1B: ZB-H1, also called ZB1P.

    As 1F1B, but the weight gradients of rank r stay r microbatches behind, which lets cotangents
    leave earlier and fills the wait at the end (arXiv 2401.10241, section 2.1).

    Bubble: (p-1)(tF + tI - tW) for m >= p and tW <= tF, tI; a third of 1F1B's where all are equal.
    Memory: p microbatches on every rank; rank r holds p-r before I and r before W.
    Admits: every number of ranks and microbatches.
    """
    _check_counts("zb-h1", num_ranks, num_microbatches)
    return place(
        "zb-h1",
        [[(rank, 0) for rank in range(num_ranks)]],
        num_microbatches,
        [_delayed(num_microbatches, num_ranks - rank, rank) for rank in range(num_ranks)],
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule that spends memory on it: ZB-H2, also called ZB2P.

    Rank r starts with 2(p-r)-1 forwards, as many as fit before its first cotangent comes, and its
    weight gradients stay 2r microbatches behind (arXiv 2401.10241, section 2.2).

    Bubble: (p-1)(tF + tI - 2tW) in spans for m >= 2p-1 and tW <= tF, tI: none where all are equal.
    Memory: 2p-1 microbatches on every rank; rank r holds 2(p-r)-1 before I and 2r before W.
    Admits: every number of ranks and microbatches; fewer than 2p-1 are too few forwards to fill the
    start, and weight gradients stay less behind, so that a step takes no longer than with ZB-H1.
    """
    _check_counts("zb-h2", num_ranks, num_microbatches)
    missing = max(0, 2 * num_ranks - 1 - num_microbatches)
    columns = [
        _delayed(num_microbatches, 2 * (num_ranks - rank) - 1, max(0, 2 * rank - missing))
        for rank in range(num_ranks)
    ]
    return place("zb-h2", [[(rank, 0) for rank in range(num_ranks)]], num_microbatches, columns)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule in the memory of 1F1B: stages go down the ranks and back up, a V.

    Rank r holds stages r and 2p-1-r. Its second one gets cotangents early, so that memory is freed
    early (arXiv 2401.10241, section 6; called V-ZB in arXiv 2405.15362).

    Bubble: none in spans for m >= 2p-1 where all costs are equal.
    Memory: p microbatches on every rank, counted as pairs of its two stages, as with 1F1B.
    Admits: every number of ranks and microbatches.
    """
    _check_counts("zbv", num_ranks, num_microbatches)
    # Fewer microbatches do what the first ones of 2p-1 do: leaving some out keeps the order right.
    full = max(num_microbatches, 2 * num_ranks - 1)
    columns = []
    for rank in range(num_ranks):
        above = num_ranks - rank  # ranks from here to the tip of the V, this one included
        column = _repeat(
            ("F0", 2 * above - 1),
            ("F1 F0", rank),
            ("F1 I1 W1", above),
            ("F0 I0 W0 F1 I1 W1", full - 2 * num_ranks + 1 + rank),
            ("I0 W0 F1 I1 W1", above - 1),
            ("I0 I1", rank),
            ("I0 W0", above),
            ("W1", rank),
            ("W0", rank),
        )
        columns.append([a for a in column if a.microbatch < num_microbatches])
    return place("zbv", _vee(num_ranks), num_microbatches, columns)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule that holds least: about a third of 1F1B's activations, and less bubble.

    Every stage of the V follows the one before at once, forwards and backwards (V-Min of arXiv
    2405.15362).

    Bubble: about 4p tF in spans where all costs are equal; 1F1B's is 6(p-1) tF, with tF of one of a
    rank's two stages.
    Memory: floor((p+4)/3) microbatches, as pairs of stages. Admits: every count.
    """
    _check_counts("v-min", num_ranks, num_microbatches)
    p = num_ranks
    gap = 2 if p % 3 == 0 else 0  # else the backwards would fall on the slots of forwards
    blocks = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r) for r in range(p)]
    return place("v-min", _vee(p), num_microbatches, _repeat_blocks(blocks, num_microbatches))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule with half of 1F1B's activations and about half of its bubble.

    A stage of the way down follows the one before after one more slot, which costs memory and lets
    the way up overlap with it better than in `v_min` (V-Half of arXiv 2405.15362).

    Bubble: about 3p tF in spans where all costs are equal; 1F1B's is 6(p-1) tF, with tF of one of a
    rank's two stages.
    Memory: floor((p+2)/2) microbatches, as pairs of stages. Admits: every count.
    """
    _check_counts("v-half", num_ranks, num_microbatches)
    p = num_ranks
    gap = 3 if p % 2 == 0 else 0  # else the backwards would fall on the slots of forwards
    blocks = [
        (2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r) for r in range(p)
    ]
    return place("v-half", _vee(p), num_microbatches, _repeat_blocks(blocks, num_microbatches))


def _check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    raise_problems(
        f"{name}: counts that it does not admit",
        [
            Problem(what, str(count), "at least 1", "the nearest admissible count is 1")
            for what, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches))
            if count < 1
        ],
    )


def _vee(num_ranks: int) -> list[list[tuple[int, int]]]:
    """The one pipe that goes down the ranks' first chunks and back up their second ones."""
    down = [(rank, 0) for rank in range(num_ranks)]
    return [down + [(rank, 1) for rank in reversed(range(num_ranks))]]


def _delayed(num_microbatches: int, ahead: int, behind: int) -> list[Action]:
    """A column with forwards up to `ahead` before I, and W up to `behind` after it."""
    column = [Action("F", m) for m in range(min(ahead, num_microbatches))]
    for m in range(num_microbatches):
        column.append(Action("I", m))
        if m >= behind:
            column.append(Action("W", m - behind))
        if m + ahead < num_microbatches:
            column.append(Action("F", m + ahead))
    first = max(0, num_microbatches - behind)
    return column + [Action("W", m) for m in range(first, num_microbatches)]


def _repeat(*phases: tuple[str, int]) -> list[Action]:
    """A column from patterns and how often they come: "F1 I0" is F of chunk 1, then I of chunk 0.

    Every kind of action of a chunk takes its microbatches in order.
    """
    next_one: Counter[str] = Counter()
    column = []
    for pattern, times in phases:
        for name in pattern.split() * times:
            kind, chunk = name
            column.append(Action.parse(f"{kind}{next_one[name]}.{chunk}"))
            next_one[name] += 1
    return column


def _repeat_blocks(
    blocks: Iterable[tuple[int, int, int, int]], num_microbatches: int
) -> list[list[Action]]:
    """Columns that repeat one microbatch's pattern every six slots.

    Args:
        blocks: per rank the slots of the first microbatch's F of chunk 0, F of chunk 1, I of chunk
            1 and I of chunk 0. Their remainders by six differ, so microbatches never collide and
            two slots in six stay free, which W takes in the order of I.
        num_microbatches: how often to repeat.
    """
    return [_with_weights(_slots(block, num_microbatches)) for block in blocks]


def _slots(block: Sequence[int], num_microbatches: int) -> list[tuple[int, Action]]:
    """When a rank does its forwards and backwards for inputs, in order."""
    first = (Action("F", 0, 0), Action("F", 0, 1), Action("I", 0, 1), Action("I", 0, 0))
    return sorted(
        (slot + 6 * m, Action(a.kind, m, a.chunk))
        for slot, a in zip(block, first, strict=True)
        for m in range(num_microbatches)
    )


def _with_weights(slots: Sequence[tuple[int, Action]]) -> list[Action]:
    """The actions in order, with W of what came before in the free slots between, the rest last."""
    column: list[Action] = []
    waiting: deque[Action] = deque()
    now = slots[0][0]
    for slot, action in slots:
        free = min(slot - now, len(waiting))
        column += [waiting.popleft() for _ in range(free)]
        column.append(action)
        if action.kind == "I":
            waiting.append(Action("W", action.microbatch, action.chunk))
        now = slot + 1
    return [*column, *waiting]
