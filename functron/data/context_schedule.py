"""Dynamic context parallelism: over how many ranks, and over which, each document is split.

Split over all ranks, a short document makes chunks of a few tokens, padding, and a journey of keys
and values around the whole ring that nobody needs. Here long documents are split over as many
ranks as it takes to balance them, and short ones stay whole on one rank (ByteScale, Ge et al. 2025;
Megatron-LM's hybrid context parallelism). The plan follows from the lengths alone: every host that
knows them makes the same one.

What it saves, by the cost model with its default coefficients, for 96 documents of a heavy-tailed
distribution (lognormal, median 900 tokens, sigma 1.6, at most 65,536) on 2 rows of cp=8; means of
20 draws. Time is that of the slowest rank, in terms of the last line's:

| documents                                              | time | imbalance | padding |
|--------------------------------------------------------|------|-----------|---------|
| packed first fit, zig-zag of each sample               | 1.39 | 1.29      | 0.1%    |
| packed first fit, zig-zag of each document (`balance`) | 1.21 | 1.12      | 0.4%    |
| scheduled, each over all ranks (``sizes=(8,)``)        | 1.11 | 1.02      | 0.6%    |
| scheduled, each over 1, 2, 4 or 8 ranks                | 1    | 1.10      | 0.2%    |

The last has shorter rings to thank for its time, 4.6 ranks rather than 8 in the mean. With cp=4 the
times are 1.28, 1.15, 1.04 and 1. Of 500 short documents (median 40) on cp=8 they are 1.42, 1.46,
1.45 and 1, and padding is 0.0%, 5.7%, 5.6% and 0.2%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from functron.data.context_plan import Costs, Placement, Plan, room, visible_pairs
from functron.data.packing import refuse_listed, rounded_up
from functron.errors import Problem, raise_problems

_FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""How much of a rank's mean cost one document may take, tried in turn; 0: all over the ring."""


def schedule(
    lengths: Sequence[int],
    cp: int,
    *,
    rows: int = 1,
    limit: int | None = None,
    multiple: int = 1,
    costs: Costs | None = None,
    sizes: Sequence[int] | None = None,
) -> Plan:
    """Choose for every document how many ranks it is split over, and which.

    For every largest ring, and for several bounds on what part of a rank's mean cost one document
    may take, documents get the fewest ranks that keep within it and then, longest first, go to the
    aligned group of ranks that has least to do and room for them (Graham 1969). Of these plans, the
    one whose slowest rank is fastest; `rows` are balanced among one another as well. Every document
    on all ranks is one of them, so that no plan is worse than the zig-zag over all.

    The cost model counts visible pairs, as kernels that skip other documents compute them.
    `functron.ops.chunked` computes all pairs of a ring, half of ``tokens_per_rank ** 2 *
    ring_size`` on every rank alike, and masks: small rings and little padding save time there too,
    balanced pairs do not.

    Args:
        lengths: tokens of every document.
        cp: ranks of that mesh axis.
        rows: samples to fill.
        limit: the most tokens of a rank, padding included: what memory allows; None for any.
        multiple: a rank's tokens are padded to this: ulysses times tp under sequence parallelism.
        costs: coefficients of the cost model; None: `Costs()`.
        sizes: how many ranks documents may be split over, of cp, its half, and so on while even,
            and 1; None: all of these. ``(cp,)`` is the zig-zag over all ranks.

    Returns:
        A `Plan` for `arrange`.

    Raises:
        ValueError: documents are empty, or do not fit within the limit; or an argument is out of
            range.
    """
    model = Costs() if costs is None else costs
    _check_arguments(cp, rows, limit, multiple, sizes)
    even = math.lcm(2, multiple)  # two halves
    most = None if limit is None else limit // even * even
    allowed = sorted(_nested(cp) if sizes is None else set(sizes))
    _check_lengths(lengths, allowed[-1], cp * rows, most)
    best: tuple | None = None
    for ring, chosen in _candidates(lengths, allowed, cp * rows, model):
        for score in _scores(lengths, cp * rows, model, ring):
            places = _placed(
                lengths, chosen, [s for s in allowed if s <= ring], cp * rows, most, score
            )
            if places is None:
                continue
            plan = _plan(lengths, places, cp, rows, even, model)
            key = plan.time, plan.ring_size, sum(x.size for x in plan.placements)
            if best is None or key < best[0]:
                best = key, plan
    if best is None:
        got = f"{sum(lengths):,} tokens on {cp * rows} ranks of at most {most:,}"
        fix = "raise limit, or schedule fewer documents"
        raise_problems("no plan found", [Problem("limit", got, "more room", fix)])
    assert best is not None
    return best[1]


def _nested(cp: int) -> list[int]:
    """cp, its half, ..., and 1: each divides all larger ones, so that groups lie within rings."""
    sizes = [cp]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]


def _candidates(
    lengths: Sequence[int], allowed: Sequence[int], ranks: int, model: Costs
) -> Iterator[tuple[int, list[int]]]:
    """Largest rings, and how many ranks each document might be split over then."""
    n = np.array(lengths, np.int64)
    pairs, seen = n * (n + 1) / 2, set()
    for ring in allowed:
        whole = model.of(pairs, n, ring)
        for fraction in _FRACTIONS:
            bound = fraction * whole.sum() / ranks
            chosen = np.full(len(n), ring)
            for size in reversed([s for s in allowed if s <= ring]):
                chosen[whole / size <= bound] = size
            key = (ring, *chosen.tolist())
            if key not in seen:
                seen.add(key)
                yield ring, chosen.tolist()


Score = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""How badly a document suits ranks: their pairs and tokens, and what it adds to each."""


def _scores(lengths: Sequence[int], ranks: int, model: Costs, ring: int) -> Iterator[Score]:
    """Two opinions, as pairs and tokens are to be balanced both: neither is always the best.

    The first is how much the squares of both loads grow, but for a constant: a long document looks
    for a rank with few pairs, a short one for a rank with few tokens (Panigrahy et al. 2011, dot
    product). The second is the worse of both loads.
    """
    n = np.array(lengths, np.int64)
    mean_pairs, mean_tokens = (n * (n + 1) / 2).sum() / ranks, n.sum() / ranks
    by_pairs = model.quadratic / mean_pairs
    by_tokens = model.per_token(ring) / mean_tokens
    yield lambda pairs, tokens, p, t: by_pairs * pairs * p + by_tokens * tokens * t
    yield lambda pairs, tokens, p, t: np.maximum(
        (pairs + p) / mean_pairs, (tokens + t) / mean_tokens
    )


def _placed(
    lengths: Sequence[int],
    chosen: Sequence[int],
    allowed: Sequence[int],
    ranks: int,
    limit: int | None,
    score: Score,
) -> list[tuple[int, int]] | None:
    """The first rank and the size of every document's group; None where one finds no room."""
    pairs, tokens = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    out = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for size in (s for s in allowed if s >= chosen[i]):
            more, taken = visible_pairs(lengths[i], size), room(lengths[i], size) // size
            held = tokens.reshape(-1, size)
            load = score(pairs.reshape(-1, size), held, more, taken).max(1)
            if limit is not None:
                load[held.max(1) + taken > limit] = np.inf
            group = int(load.argmin())
            if load[group] < np.inf:
                mine = slice(group * size, (group + 1) * size)
                pairs[mine] += more
                tokens[mine] += taken
                out[i] = group * size, size
                break
        else:
            return None
    return out


def _plan(
    lengths: Sequence[int],
    places: Sequence[tuple[int, int]],
    cp: int,
    rows: int,
    even: int,
    model: Costs,
) -> Plan:
    pairs, tokens = np.zeros(cp * rows, np.int64), np.zeros(cp * rows, np.int64)
    for length, (first, size) in zip(lengths, places, strict=True):
        pairs[first : first + size] += visible_pairs(length, size)
        tokens[first : first + size] += room(length, size) // size
    return Plan(
        cp=cp,
        rows=rows,
        placements=tuple(
            Placement(length, first // cp, first % cp, size)
            for length, (first, size) in zip(lengths, places, strict=True)
        ),
        tokens_per_rank=rounded_up(int(tokens.max()), even),
        pairs=tuple(pairs.tolist()),
        tokens=tuple(tokens.tolist()),
        model=model,
    )


def _check_arguments(
    cp: int, rows: int, limit: int | None, multiple: int, sizes: Sequence[int] | None
) -> None:
    given = {"cp": cp, "rows": rows, "limit": limit, "multiple": multiple}
    problems = [
        Problem(name, str(value), "at least 1")
        for name, value in given.items()
        if value is not None and value < 1
    ]
    if not problems and limit is not None and limit < math.lcm(2, multiple):
        wanted = f"at least {math.lcm(2, multiple)}, two halves and multiple={multiple}"
        problems.append(Problem("limit", str(limit), wanted))
    known = _nested(cp) if cp >= 1 else []
    if known and sizes is not None and (not sizes or set(sizes) - set(known)):
        wanted = f"some of {', '.join(map(str, known))}"
        problems.append(Problem("sizes", str(tuple(sizes)), wanted))
    raise_problems("cannot schedule", problems)


def _check_lengths(lengths: Sequence[int], widest: int, ranks: int, limit: int | None) -> None:
    problems = [
        Problem(f"lengths[{i}]", f"{n} tokens", "at least 1", "leave the document out")
        for i, n in enumerate(lengths)
        if n < 1
    ]
    if not len(lengths):
        problems.append(Problem("lengths", "none", "at least 1"))
    if limit is not None and not problems:
        most = limit * widest
        fix = "raise limit or cp, or cut the document"
        wanted = f"at most {most}, {limit} on each of {widest} ranks"
        problems = [
            Problem(f"lengths[{i}]", f"{n} tokens", wanted, fix)
            for i, n in enumerate(lengths)
            if n > most
        ]
        if not problems and sum(lengths) > ranks * limit:
            got = f"{sum(lengths)} tokens in all"
            wanted = f"at most {ranks * limit}, {limit} on each of {ranks} ranks"
            fix = "raise limit, or schedule fewer documents"
            problems.append(Problem("lengths", got, wanted, fix))
    refuse_listed("cannot schedule", problems)
