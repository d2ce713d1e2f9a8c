"""The schedules of the literature, by name, or by the path of a text file.

Each function makes the columns of the ranks, which `place` turns into a table; p are ranks, m
microbatches and v chunks, the stages of a rank. All numbers are 1 or more. With several chunks the
stages go round the ranks: rank r holds stages r, r + p, ...; in a V they go down the ranks and back
up, and rank r holds stages r and 2p-1-r. All raise ValueError for counts that they do not admit,
with the nearest that they do.

- Whole backwards: GPipe, 1F1B, interleaved, breadth-first; and forwards alone.
- Zero bubble (Qi et al. 2023, 2024): the backward is split, and weight gradients fill bubbles. Only
  I, the backward for a stage's input, is waited for by other ranks; W, the backward for its
  weights, fits wherever a rank would idle. Times: tF, tI and tW of F, I and W (the papers write B
  for I). These admit every p and m, and are made for tF = tI = tW: other costs are right too, with
  more bubble. A *span* is the time from a rank's first action to its last one. The papers count
  bubbles in spans, since a rank that ends a step early may begin the next one early. Where all
  ranks begin and end a step together, ZB-H2 and ZBV idle for p-1 forwards, in which the first
  microbatch reaches the ranks.
- DualPipe (DeepSeek-AI): a pipeline is fed from both ends, and forwards overlap with backwards: a
  forward and a backward of different microbatches in one cell hide each other's communication, as
  that of experts. Times: tF, tB, tW of a forward, a whole backward and one for weights, tFB of such
  a combined cell. On 2h ranks, ranks r and 2h-1-r do the same, on opposite directions: what rank r
  of a V on h ranks does on its way down and its way up. That V alone is DualPipeV.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.pipeline.partition import Pipe
from functron.pipeline.schedule import Schedule, place
from functron.pipeline.timeline import Action, ActionKind, ScheduleCell


def round_pipe(num_ranks: int, num_chunks: int = 1) -> Pipe:
    """The pipe through chunk 0 of every rank, then through chunk 1, and so on."""
    return tuple((rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: bubble (p - 1) / (m + p - 1), m live activations.

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism".
    """
    return _by_chunks("gpipe", num_ranks, num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int, *, split: int | None = None) -> Schedule:
    """Backwards as early as can be: GPipe's bubble, but min(m, p - r) live activations at rank r.

    After p - 1 - r forwards, a rank alternates: one forward, one backward. Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), and Megatron-LM. With
    `split` a backward is I, and W right after it: cotangents leave before the gradients of weights
    are computed, so the ranks before wait for tI where they would for tI + tW. ZB-H1 moves W too.
    """
    return _alternating("1f1b", num_ranks, num_microbatches, hop=1, split=bool(split))


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the forwards ahead: transfers have time, for min(m, 2 (p - r) - 1) live.

    After 2 (p - 1 - r) forwards, a rank alternates: one forward, one backward. Then every tensor
    is sent a whole action before it is needed. Zhuang et al. 2023, "On Optimizing the Communication
    of Model Parallelism", section 4.
    """
    return _alternating("eager-1f1b", num_ranks, num_microbatches, hop=2)


def interleaved(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2, *, group_size: int | None = None
) -> Schedule:
    """1F1B over several chunks per rank: bubble (p - 1) / (v m + p - 1), more transfers.

    A rank takes a group of microbatches through its first chunk, then the same group through its
    next chunk, and so on ("depth-first"). Narayanan et al. 2021, "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", section 2.2; the order is Megatron-LM's.

    Args:
        num_ranks: p.
        num_microbatches: m: the last group must be whole, or at least p.
        num_chunks: v, 2 or more.
        group_size: p to m; by default p. More gives transfers time and keeps more activations.
    """
    group = num_ranks if group_size is None else group_size
    found = _count_problems(num_ranks, num_microbatches)
    if num_chunks < 2:
        found.append(Problem("num_chunks", str(num_chunks), "2 or more", "or take 1f1b"))
    found += _group_problems(num_ranks, num_microbatches, group)
    raise_problems("schedule interleaved", found)
    columns = [
        [cell for pair in pairs for cell in pair]
        for pairs in _list_pairs(num_ranks, num_microbatches, num_chunks, group)
    ]
    return place("interleaved", [round_pipe(num_ranks, num_chunks)], num_microbatches, columns)


def combined_one_f_one_b(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B whose forwards and backwards run in pairs, to hide expert all-to-all.

    One more forward goes ahead, so that no pair is of one microbatch: while one half of a pair
    communicates, the other computes. Live activations grow by one. As Megatron-LM does with
    ``--overlap-moe-expert-parallel-comm``; the pairs are those of DeepSeek-AI 2024, "DeepSeek-V3
    Technical Report", section 3.2.1.

    Args are as in `interleaved`, but for one chunk m may be any.
    """
    group = num_ranks if group_size is None else group_size
    found = _count_problems(num_ranks, num_microbatches, num_chunks)
    if num_chunks > 1:  # else groups do not matter
        found += _group_problems(num_ranks, num_microbatches, group)
    raise_problems("schedule combined-1f1b", found)
    columns = _list_pairs(num_ranks, num_microbatches, num_chunks, group, ahead=1)
    return place("combined-1f1b", [round_pipe(num_ranks, num_chunks)], num_microbatches, columns)


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next chunk: GPipe with v chunks.

    The bubble is (p - 1) / (v m + p - 1), v m activations are live, and a chunk's parameters are
    gathered, and its gradients reduced, once per step, which suits fsdp. Lamy-Poirier 2022,
    "Breadth-First Pipeline Parallelism". With fewer than p microbatches the bubble is larger.
    """
    return _by_chunks("breadth-first", num_ranks, num_microbatches, num_chunks)


def forward(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forwards alone, for evaluation: all microbatches through a chunk before the next chunk.

    For the stages of another schedule, use its `forward_only`.
    """
    return _by_chunks("forward", num_ranks, num_microbatches, num_chunks, backward=False)


def _by_chunks(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, *, backward: bool = True
) -> Schedule:
    """All microbatches through a chunk before the next chunk; then backward, if it is wanted."""
    raise_problems(f"schedule {name}", _count_problems(num_ranks, num_microbatches, num_chunks))
    chunks = range(num_chunks)
    column = [Action("F", m, c) for c in chunks for m in range(num_microbatches)]
    if backward:
        column += [Action("B", m, c) for c in reversed(chunks) for m in range(num_microbatches)]
    pipe = round_pipe(num_ranks, num_chunks)
    return place(name, [pipe], num_microbatches, [column] * num_ranks)


def _alternating(
    name: str, num_ranks: int, num_microbatches: int, hop: int, split: bool = False
) -> Schedule:
    """1F1B that has `hop` forwards ahead per rank that follows."""
    raise_problems(f"schedule {name}", _count_problems(num_ranks, num_microbatches))
    forwards = [Action("F", m) for m in range(num_microbatches)]
    backwards = [Action("B", m) for m in range(num_microbatches)]
    columns = []
    for rank in range(num_ranks):
        ahead = hop * (num_ranks - 1 - rank)
        column = [cell for pair in _zip_ahead(forwards, backwards, ahead) for cell in pair]
        kinds: dict[ActionKind, tuple[ActionKind, ...]] = {
            "F": ("F",),
            "B": ("I", "W") if split else ("B",),
        }
        columns.append([Action(k, a.microbatch) for a in column for k in kinds[a.kind]])
    return place(name, [round_pipe(num_ranks)], num_microbatches, columns)


def _zip_ahead(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[tuple[Action, ...]]:
    """`ahead` forwards, pairs of a forward and a backward, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    warmup = [(f,) for f in forwards[:ahead]]
    steady = [*zip(forwards[ahead:], backwards, strict=False)]
    return [*warmup, *steady, *((b,) for b in backwards[len(steady) :])]


def _list_pairs(
    num_ranks: int, num_microbatches: int, num_chunks: int, group: int, ahead: int = 0
) -> list[list[tuple[Action, ...]]]:
    """Per rank the warm-up, pairs and cool-down of interleaved 1F1B, `ahead` forwards deeper."""
    starts = range(0, num_microbatches, group)
    groups = [range(start, min(start + group, num_microbatches)) for start in starts]
    chunks = range(num_chunks)
    forwards = [Action("F", m, c) for g in groups for c in chunks for m in g]
    backwards = [Action("B", m, c) for g in groups for c in reversed(chunks) for m in g]
    return [
        _zip_ahead(
            forwards, backwards, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * group + ahead
        )
        for rank in range(num_ranks)
    ]


def _count_problems(*counts: int) -> list[Problem]:
    """Numbers of ranks, microbatches and chunks, where they are given, below 1."""
    names = ("num_ranks", "num_microbatches", "num_chunks")
    pairs = zip(names, counts, strict=False)
    return [Problem(name, str(count), "1 or more") for name, count in pairs if count < 1]


def _group_problems(num_ranks: int, num_microbatches: int, group: int) -> list[Problem]:
    """A group size that is too small, or a number of microbatches that it does not admit."""
    if num_ranks < 1:  # a problem already
        return []
    if group < num_ranks:
        wanted = f"{num_ranks} (the number of ranks) or more: ranks would wait within each group"
        return [Problem("group_size", str(group), wanted)]

    def admitted(count: int) -> bool:
        rest = count % group
        return count >= group and (rest == 0 or rest >= num_ranks)

    if admitted(num_microbatches):
        return []
    below = [count for count in range(group, num_microbatches) if admitted(count)][-1:]
    above = next(count for count in itertools.count(max(num_microbatches, 1)) if admitted(count))
    wanted = f"a multiple of the group size, {group}"
    if group > num_ranks:
        wanted += f", or {num_ranks} or more over one"
    fix = f"take {' or '.join(map(str, [*below, above]))}"
    return [Problem("num_microbatches", str(num_microbatches), wanted, fix)]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule with the memory of 1F1B: ZB-H1, also called ZB1P.

    As 1F1B, but the weight gradients of rank r stay r microbatches behind, which lets cotangents
    leave earlier and fills the wait at the end (arXiv 2401.10241, section 2.1).

    Bubble: (p-1)(tF + tI - tW) for m >= p and tW <= tF, tI; a third of 1F1B's where all are equal.
    Memory: p microbatches on every rank; rank r holds p-r before I and r before W.
    """
    _check_counts("zb-h1", num_ranks, num_microbatches)
    columns = [
        _delay_backwards(num_microbatches, num_ranks - rank, rank) for rank in range(num_ranks)
    ]
    return place("zb-h1", [round_pipe(num_ranks)], num_microbatches, columns)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule that spends memory on it: ZB-H2, also called ZB2P.

    Rank r starts with 2(p-r)-1 forwards, as many as fit before its first cotangent comes, and its
    weight gradients stay 2r microbatches behind (arXiv 2401.10241, section 2.2).

    Bubble: (p-1)(tF + tI - 2tW) in spans for m >= 2p-1 and tW <= tF, tI: none where all are equal.
    Memory: 2p-1 microbatches on every rank; rank r holds 2(p-r)-1 before I and 2r before W.
    Fewer microbatches than 2p-1 are too few forwards to fill the start, and weight gradients stay
    less behind, so that a step takes no longer than with ZB-H1.
    """
    _check_counts("zb-h2", num_ranks, num_microbatches)
    missing = max(0, 2 * num_ranks - 1 - num_microbatches)
    columns = [
        _delay_backwards(num_microbatches, 2 * (num_ranks - rank) - 1, max(0, 2 * rank - missing))
        for rank in range(num_ranks)
    ]
    return place("zb-h2", [round_pipe(num_ranks)], num_microbatches, columns)


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """The zero-bubble schedule in the memory of 1F1B: stages go down the ranks and back up, a V.

    Rank r holds stages r and 2p-1-r. Its second one gets cotangents early, so that memory is freed
    early (arXiv 2401.10241, section 6; called V-ZB in arXiv 2405.15362).

    Bubble: none in spans for m >= 2p-1 where all costs are equal.
    Memory: p microbatches on every rank, counted as pairs of its two stages, as with 1F1B.
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
        columns.append([cell for cell in column if cell[0].microbatch < num_microbatches])
    return place("zbv", [_v_pipe(num_ranks)], num_microbatches, columns)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule that holds least: about a third of 1F1B's activations, and less bubble.

    Every stage of the V follows the one before at once, forwards and backwards (V-Min of arXiv
    2405.15362).

    Bubble: about 4p tF in spans where all costs are equal; 1F1B's is 6(p-1) tF, with tF of one of a
    rank's two stages.
    Memory: floor((p+4)/3) microbatches, as pairs of stages.
    """
    _check_counts("v-min", num_ranks, num_microbatches)
    p = num_ranks
    gap = 2 if p % 3 == 0 else 0  # else the backwards would fall on the slots of forwards
    blocks = [(r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r) for r in range(p)]
    return place("v-min", [_v_pipe(p)], num_microbatches, _repeat_blocks(blocks, num_microbatches))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule with half of 1F1B's activations and about half of its bubble.

    A stage of the way down follows the one before after one more slot, which costs memory and lets
    the way up overlap with it better than in `v_min` (V-Half of arXiv 2405.15362).

    Bubble: about 3p tF in spans where all costs are equal; 1F1B's is 6(p-1) tF, with tF of one of a
    rank's two stages.
    Memory: floor((p+2)/2) microbatches, as pairs of stages.
    """
    _check_counts("v-half", num_ranks, num_microbatches)
    p = num_ranks
    gap = 3 if p % 2 == 0 else 0  # else the backwards would fall on the slots of forwards
    blocks = [
        (2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r) for r in range(p)
    ]
    return place("v-half", [_v_pipe(p)], num_microbatches, _repeat_blocks(blocks, num_microbatches))


def _check_counts(
    name: str, num_ranks: int, num_microbatches: int, *, every: int = 1, per_rank: int = 0
) -> None:
    """Refuse counts below 1, no multiples of `every` (1 or 2), or too few microbatches."""
    found = []
    parity = "an even number, " if every > 1 else ""
    if num_ranks < every or num_ranks % every:
        wanted = f"{parity}at least {every}"
        found.append(_count_problem("num_ranks", num_ranks, wanted, every, every))
    least = max(per_rank * max(num_ranks, 1), 1)
    if num_microbatches < least or num_microbatches % every:
        wanted = f"{parity}at least " + (f"twice the {num_ranks} ranks" if per_rank else "1")
        found.append(_count_problem("num_microbatches", num_microbatches, wanted, least, every))
    raise_problems(f"{name}: counts that it does not admit", found)


def _count_problem(what: str, count: int, wanted: str, least: int, every: int) -> Problem:
    """A count that is not admitted, and the admissible ones beside it."""
    below = max(least, count - count % every)
    above = max(least, count + -count % every)
    fix = f"use {below}" if below == above else f"use {below} or {above}"
    return Problem(what, str(count), wanted, fix)


def _v_pipe(num_ranks: int) -> Pipe:
    """The pipe that goes down the ranks' first chunks and back up their second ones."""
    ranks = range(num_ranks)
    return (*((rank, 0) for rank in ranks), *((rank, 1) for rank in reversed(ranks)))


def _delay_backwards(num_microbatches: int, ahead: int, behind: int) -> list[Action]:
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


def _repeat(*phases: tuple[str, int]) -> list[ScheduleCell]:
    """A column from patterns and how often they come.

    "F1 I0" is F of chunk 1, then I of chunk 0; "F0+B1" is one cell of both; "W" is that of the I
    that has waited longest. Every kind of action of a chunk takes its microbatches in order, and I
    is B's.
    """
    next_one: Counter[str] = Counter()
    waiting: deque[ScheduleCell] = deque()
    column: list[ScheduleCell] = []
    for pattern, times in phases:
        for names in pattern.split() * times:
            if names == "W":
                column.append(waiting.popleft())
                continue
            cell = []
            for kind, chunk in names.split("+"):
                row = kind.replace("I", "B") + chunk
                cell.append(Action.parse(f"{kind}{next_one[row]}.{chunk}"))
                next_one[row] += 1
            if cell[0].kind == "I":
                waiting.append((Action("W", cell[0].microbatch, cell[0].chunk),))
            column.append(tuple(cell))
    return column


def _repeat_blocks(
    blocks: Iterable[tuple[int, int, int, int]], num_microbatches: int
) -> list[list[Action]]:
    """Columns that repeat one microbatch's pattern every six slots.

    Args:
        blocks: per rank the slots of the first microbatch's F of chunk 0, F of chunk 1, I of chunk
            1 and I of chunk 0. Their remainders by six differ, so microbatches never collide and
            two slots in six stay free, which W takes in the order of I.
    """
    return [_fill_weights(_list_slots(block, num_microbatches)) for block in blocks]


def _list_slots(block: Sequence[int], num_microbatches: int) -> list[tuple[int, Action]]:
    """When a rank does its forwards and backwards for inputs, in order."""
    first = (Action("F", 0, 0), Action("F", 0, 1), Action("I", 0, 1), Action("I", 0, 0))
    return sorted(
        (slot + 6 * m, Action(a.kind, m, a.chunk))
        for slot, a in zip(block, first, strict=True)
        for m in range(num_microbatches)
    )


def _fill_weights(slots: Sequence[tuple[int, Action]]) -> list[Action]:
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


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """The bidirectional schedule of DeepSeek-V3 (arXiv 2412.19437, section 3.2.1, figure 5).

    Half of the microbatches go down the ranks, half go up through copies of the stages: chunk 0 of
    rank r is stage r of the first pipe, chunk 1 is stage p-1-r of the second.

    Bubble: (p/2-1)(tFB + tB - 3tW), where tF = tB - tW >= tW.
    Memory: activations of p+1 stages, parameters of 2, on every rank.
    Admits: an even number of ranks; an even number of microbatches, at least twice the ranks.
    """
    return _make_dualpipe("dualpipe", num_ranks, num_microbatches, 1.0)


def dualpipe_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe with half of the gradients of weights that it keeps for waits in the end.

    Those at the tip, ranks p/2-1 and p/2, keep p/4 of them in place of p/2, each as large as the
    operands of all of a stage's products; the last waits are as much longer as these take.
    Admits what `dualpipe` does, with which it agrees on 2 ranks.
    """
    return _make_dualpipe("dualpipe-half", num_ranks, num_microbatches, 0.5)


def _make_dualpipe(name: str, num_ranks: int, num_microbatches: int, kept: float) -> Schedule:
    _check_counts(name, num_ranks, num_microbatches, every=2, per_rank=2)
    half, each = num_ranks // 2, num_microbatches // 2
    columns = []
    for rank in range(num_ranks):
        mirrored = rank >= half
        column = _dualpipe_column(min(rank, num_ranks - 1 - rank), half, each, kept)
        columns.append([tuple(_swap_direction(a, mirrored, each) for a in cell) for cell in column])
    down, up = _v_pipe(num_ranks)[:num_ranks], _v_pipe(num_ranks)[num_ranks:]
    return place(name, [down, up], num_microbatches, columns)


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: each rank runs one direction as the way down of a V, one as the way up.

    From Sea AI Lab's note "DualPipe could be better without the Dual" and DeepSeek's DualPipeV; it
    needs no copies of the parameters. Rank r holds stages r and 2p-1-r.

    Bubble: (p-1)(tFB + tB - 3tW), where tF = tB - tW >= tW, with times of one of the 2p stages.
    Memory: activations of 2p+1 stages on every rank.
    Admits: any number of ranks; at least twice as many microbatches.
    """
    _check_counts("dualpipev", num_ranks, num_microbatches, per_rank=2)
    columns = [_dualpipe_column(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return place("dualpipev", [_v_pipe(num_ranks)], num_microbatches, columns)


def _swap_direction(action: Action, mirrored: bool, each: int) -> Action:
    """An action of `_dualpipe_column`, where the second half of the ranks swaps directions.

    Microbatches of the second direction follow the `each` of the first.
    """
    chunk = action.chunk ^ mirrored
    return Action(action.kind, action.microbatch + chunk * each, chunk)


def _dualpipe_column(
    rank: int, num_ranks: int, num_microbatches: int, kept: float = 1.0
) -> list[ScheduleCell]:
    """The cells of a rank of a V, in the eight steps of DeepSeek's DualPipe.

    Chunk 0 is its way down, chunk 1 its way up; `kept` is the part of the gradients of weights that
    wait for the end of those of DeepSeek's, at least one.
    """
    after, upto = num_ranks - rank - 1, rank + 1  # ranks nearer to the tip; those from the start on
    tip, steady = int(after == 0), num_microbatches - 2 * num_ranks + upto
    late = math.ceil(upto * kept)
    last = [f"{'I' if i >= 2 * upto - late else 'B'}{1 - i % 2}" for i in range(2 * upto)]
    return _repeat(
        ("F0", 2 * after),  # 1: forwards, until the first one comes back up
        ("F0 F1", upto),  # 2: forwards of both
        ("I1 W F1", after),  # 3: backwards begin; weights fill the wait for the next forward
        ("F0 B1 F1+B0", tip),  # 4: all combined; at the tip a backward alone starts others' sooner
        ("F0+B1 F1+B0", steady - tip),
        ("B1 F1+B0", after),  # 5: no forwards of the way down are left
        (" ".join(last), 1),  # 6: no forwards; the second half keeps its weights for later waits
        ("W I0", after),  # 7: weights fill the waits for the last cotangents
        ("W", late),  # 8
    )


_GENERATORS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_one_f_one_b,
        "interleaved": interleaved,
        "breadth-first": breadth_first,
        "combined-1f1b": combined_one_f_one_b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zbv": zbv,
        "v-min": v_min,
        "v-half": v_half,
        "dualpipe": dualpipe,
        "dualpipe-half": dualpipe_half,
        "dualpipev": dualpipev,
        "forward": forward,
    }
)

NAMES = tuple(_GENERATORS)
"""The names that `make` knows."""


def make(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    **options: int | None,
) -> Schedule:
    """The schedule of this name for these counts, or the one in a text file.

    Args:
        name: one of `NAMES`, or the path of a file that `Schedule.load` reads; it is validated.
        num_chunks: stages per rank; None: what the schedule has, 2 for interleaved and
            breadth-first, 1 where both are possible.
        options: more arguments of the schedule's function: `group_size` of interleaved and
            combined-1f1b, `split` of 1f1b.

    Raises:
        ValueError: no such name, file or option; counts that the schedule does not admit; a table
            in a file that is invalid, or for other counts.
    """
    if name not in _GENERATORS:
        return _from_file(name, num_ranks, num_microbatches, num_chunks, options)
    generator = _GENERATORS[name]
    known = [*inspect.signature(generator).parameters][2:]
    unknown = _unknown_options(options, [k for k in known if k != "num_chunks"])
    raise_problems(f"schedule {name}", unknown)
    given = {key: value for key, value in options.items() if value is not None}
    if num_chunks is not None and "num_chunks" in known:
        given["num_chunks"] = num_chunks
    schedule = generator(num_ranks, num_microbatches, **given)
    if num_chunks is not None:
        raise_problems(f"schedule {name}", _count_differences(schedule, num_chunks=num_chunks))
    return schedule


def _unknown_options(options: Mapping[str, object], known: list[str]) -> list[Problem]:
    return [
        Problem(key, f"{key}={value}", "an option of this schedule", nearest(key, known))
        for key, value in options.items()
        if key not in known
    ]


def _from_file(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    options: Mapping[str, object],
) -> Schedule:
    """The validated schedule in the file `name`, if it has these counts."""
    if not Path(name).is_file():
        fix = f"{nearest(name, NAMES)}, or the path of a table"
        refuse("schedule", "name", repr(name), "a schedule", fix)
    schedule = Schedule.load(name)
    schedule.validate()
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    counts |= {} if num_chunks is None else {"num_chunks": num_chunks}
    problems = [*_unknown_options(options, []), *_count_differences(schedule, **counts)]
    raise_problems(f"schedule {name}", problems)
    return schedule


def _count_differences(schedule: Schedule, **counts: int) -> list[Problem]:
    """The counts that are not the schedule's."""
    return [
        Problem(key, str(count), f"{wanted}, as in the schedule", f"give {wanted}")
        for key, count in counts.items()
        if count != (wanted := getattr(schedule, key))
    ]
