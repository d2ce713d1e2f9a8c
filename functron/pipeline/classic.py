"""Schedules with whole backwards: GPipe, 1F1B, interleaved, breadth-first; and forwards alone.

Each function makes the columns of the ranks, which `place` turns into a table. With several chunks,
the stages go round the ranks: rank r holds stages r, r + num_ranks, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from functron.errors import Problem, raise_problems
from functron.pipeline.action import Action, Pipe
from functron.pipeline.schedule import Schedule, place


def round_pipe(num_ranks: int, num_chunks: int = 1) -> Pipe:
    """The pipe that goes through chunk 0 of every rank, then through chunk 1, and so on."""
    return tuple((rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: bubble (p - 1) / (m + p - 1), m live activations.

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism".

    Args:
        num_ranks: p, 1 or more.
        num_microbatches: m, 1 or more.
    """
    raise_problems("schedule gpipe", _count_problems(num_ranks, num_microbatches))
    column = [Action(kind, m) for kind in ("F", "B") for m in range(num_microbatches)]
    return place("gpipe", [round_pipe(num_ranks)], num_microbatches, [column] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Backwards as early as can be: GPipe's bubble, but min(m, p - r) live activations at rank r.

    After p - 1 - r forwards, a rank alternates: one forward, one backward. Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), and Megatron-LM.

    Args:
        num_ranks: p, 1 or more.
        num_microbatches: m, 1 or more.
    """
    return _alternating("1f1b", num_ranks, num_microbatches, hop=1)


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the forwards ahead: transfers have time, for min(m, 2 (p - r) - 1) live.

    After 2 (p - 1 - r) forwards, a rank alternates: one forward, one backward. Then every tensor
    is sent a whole action before it is needed. Zhuang et al. 2023, "On Optimizing the Communication
    of Model Parallelism", section 4.

    Args:
        num_ranks: p, 1 or more.
        num_microbatches: m, 1 or more.
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
        num_ranks: p, 1 or more.
        num_microbatches: m: the last group must be whole, or at least p.
        num_chunks: v, stages per rank.
        group_size: p to m; by default p. More gives transfers time and keeps more activations.

    Raises:
        ValueError: counts that it does not admit; the error names the nearest ones that it does.
    """
    group = num_ranks if group_size is None else group_size
    found = _count_problems(num_ranks, num_microbatches)
    if num_chunks < 2:
        found.append(Problem("num_chunks", str(num_chunks), "2 or more", "or take 1f1b"))
    found += _group_problems(num_ranks, num_microbatches, group)
    raise_problems("schedule interleaved", found)
    columns = [
        [cell for pair in pairs for cell in pair]
        for pairs in _pairs(num_ranks, num_microbatches, num_chunks, group)
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

    Args:
        num_ranks: p, 1 or more.
        num_microbatches: m: for one chunk any, else the last group must be whole, or at least p.
        num_chunks: v, stages per rank.
        group_size: as in `interleaved`.

    Raises:
        ValueError: counts that it does not admit; the error names the nearest ones that it does.
    """
    group = num_ranks if group_size is None else group_size
    found = _count_problems(num_ranks, num_microbatches, num_chunks)
    if num_chunks > 1:  # else groups do not matter
        found += _group_problems(num_ranks, num_microbatches, group)
    raise_problems("schedule combined-1f1b", found)
    columns = _pairs(num_ranks, num_microbatches, num_chunks, group, ahead=1)
    return place("combined-1f1b", [round_pipe(num_ranks, num_chunks)], num_microbatches, columns)


def breadth_first(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next chunk: GPipe with v chunks.

    The bubble is (p - 1) / (v m + p - 1), v m activations are live, and a chunk's parameters are
    gathered, and its gradients reduced, once per step, which suits fsdp. Lamy-Poirier 2022,
    "Breadth-First Pipeline Parallelism".

    Args:
        num_ranks: p, 1 or more.
        num_microbatches: m, 1 or more; below p the bubble is larger.
        num_chunks: v, stages per rank.
    """
    raise_problems(
        "schedule breadth-first", _count_problems(num_ranks, num_microbatches, num_chunks)
    )
    chunks = range(num_chunks)
    column = [Action("F", m, c) for c in chunks for m in range(num_microbatches)]
    column += [Action("B", m, c) for c in reversed(chunks) for m in range(num_microbatches)]
    pipe = round_pipe(num_ranks, num_chunks)
    return place("breadth-first", [pipe], num_microbatches, [column] * num_ranks)


def forward(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Forwards alone, for evaluation: all microbatches through a chunk before the next chunk.

    Args:
        num_ranks: 1 or more.
        num_microbatches: 1 or more.
        num_chunks: stages per rank. For the stages of another schedule, use its `forward_only`.
    """
    raise_problems("schedule forward", _count_problems(num_ranks, num_microbatches, num_chunks))
    column = [Action("F", m, c) for c in range(num_chunks) for m in range(num_microbatches)]
    pipe = round_pipe(num_ranks, num_chunks)
    return place("forward", [pipe], num_microbatches, [column] * num_ranks)


def _alternating(name: str, num_ranks: int, num_microbatches: int, hop: int) -> Schedule:
    """1F1B that has `hop` forwards ahead per rank that follows."""
    raise_problems(f"schedule {name}", _count_problems(num_ranks, num_microbatches))
    forwards = [Action("F", m) for m in range(num_microbatches)]
    backwards = [Action("B", m) for m in range(num_microbatches)]
    columns = []
    for rank in range(num_ranks):
        ahead = hop * (num_ranks - 1 - rank)
        columns.append([cell for pair in _zip_ahead(forwards, backwards, ahead) for cell in pair])
    return place(name, [round_pipe(num_ranks)], num_microbatches, columns)


def _zip_ahead(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[tuple[Action, ...]]:
    """`ahead` forwards, pairs of a forward and a backward, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    warmup = [(f,) for f in forwards[:ahead]]
    steady = [*zip(forwards[ahead:], backwards, strict=False)]
    return [*warmup, *steady, *((b,) for b in backwards[len(steady) :])]


def _pairs(
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
    """What is wrong with the numbers of ranks, microbatches and chunks, where they are given."""
    names = ("num_ranks", "num_microbatches", "num_chunks")
    pairs = zip(names, counts, strict=False)
    return [Problem(name, str(count), "1 or more") for name, count in pairs if count < 1]


def _group_problems(num_ranks: int, num_microbatches: int, group: int) -> list[Problem]:
    """What is wrong with a group size, and with the number of microbatches for it."""
    if num_ranks < 1:  # that is said already
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
