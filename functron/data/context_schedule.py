"""Dynamic context parallelism: over how many ranks, and over which, each document is split.

A short document that is split over all ranks makes chunks of a few tokens, padding, and needless
exchanges of keys and values around the whole ring. Here long documents are split over as many
ranks as it takes to balance them, and short ones stay whole on one rank (ByteScale, Ge et al. 2025;
Megatron-LM's hybrid context parallelism). The plan, which ranks have which documents and at which
cost, follows from the lengths alone: every host that knows them makes the same one.

Savings by the cost model with its default coefficients, for 96 documents of a heavy-tailed
distribution (lognormal, median 900 tokens, sigma 1.6, at most 65,536) on 2 rows of cp=8; means of
20 draws. Time is that of the slowest rank, in units of the last line's:

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse
from functron.core.typing import Tensor
from functron.data.mapped_files import raise_listed
from functron.data.packing import (
    LEAVES,
    as_batch,
    check_documents,
    entries,
    extend_document,
    separate_documents,
    zigzag,
)
from functron.data.sampling import IGNORED, rounded_up

_TARGETS, _POSITIONS, _SEGMENTS = map(LEAVES.index, ("targets", "positions", "segments"))


@dataclass(frozen=True)
class ContextCosts:
    """The time that documents take on a rank: linear in tokens, quadratic in a document's length.

    The unit is a token's matmuls. The defaults are those of a layer of Llama 3 8B: a token takes
    436 MFLOP forward, a visible pair 16,384 FLOP (0.000038), and the key and value of a token, 4
    KiB, take 82 ns over a link of 50 GB/s, in which 400 TFLOP/s compute 0.075 tokens; backward
    has about the same ratios. Its queries, keys, values and results of all heads are 20 KiB.
    Exchanges that hide behind computation count for less.

    Attributes:
        linear: of a token.
        quadratic: of a query and a key that it sees.
        exchange: of a token's key and value, for every step that they travel around the ring.
        heads: of a token's query, key, value and result, sent to other ranks as heads are exchanged
            for sequence.

    Raises:
        ValueError: one is negative, or the first two are 0.
    """

    linear: float = 1.0
    quadratic: float = 3.8e-5
    exchange: float = 0.075
    heads: float = 0.375

    def __post_init__(self):
        given = vars(self).items()
        problems = [Problem(k, str(v), "a number, at least 0") for k, v in given if not v >= 0]
        if not problems and not self.linear + self.quadratic:
            problems.append(Problem("linear, quadratic", "0", "one more than 0"))
        raise_problems("invalid ContextCosts", problems)

    def cost_of(self, pairs: Any, tokens: Any, ring_size: int) -> Any:
        """The cost of these numbers of visible pairs and tokens, elementwise."""
        return self.quadratic * pairs + self.per_token(ring_size) * tokens

    def per_token(self, ring_size: int) -> float:
        """The cost of every token of a rank besides its pairs; keys of all of them travel."""
        return self.linear + self.exchange * (ring_size - 1)

    def of_group(self, size: int) -> ContextCosts:
        """The costs of what `size` ranks hold together, which exchange heads for sequence."""
        linear = self.linear + self.heads * (size - 1) / size
        return ContextCosts(linear / size, self.quadratic / size, self.exchange / size, 0.0)


@dataclass(frozen=True)
class ContextPlacement:
    """Where a document of `length` tokens lies: in sample `row`, on `size` ranks of cp from `first`
    on.

    `size` divides `first`.
    """

    length: int
    row: int
    first: int
    size: int


@dataclass(frozen=True)
class ContextPlan:
    """The ranks that have each document, and the cost of it.

    Attributes:
        cp: ranks that share a sample.
        rows: samples: as many as ranks split the batch, or a multiple.
        placements: of every document, in the order of their lengths.
        tokens_per_rank: the places of every rank, padding included.
        pairs: of every rank, the pairs of query and key that are visible; ``rows * cp``, row major.
        tokens: of every rank, the places that documents take, with their own padding.
        model: what these cost.
    """

    cp: int
    rows: int
    placements: tuple[ContextPlacement, ...]
    tokens_per_rank: int
    pairs: tuple[int, ...]
    tokens: tuple[int, ...]
    model: ContextCosts

    @property
    def ring_size(self) -> int:
        """The most ranks that a document is split over: for ``Context(order="balanced")``."""
        return max(x.size for x in self.placements)

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each rank's documents, without the padding of the rank."""
        pairs, tokens = np.array(self.pairs), np.array(self.tokens)
        return tuple(self.model.cost_of(pairs, tokens, self.ring_size).tolist())

    @property
    def time(self) -> float:
        """The time of the slowest rank: all compute `tokens_per_rank` tokens."""
        return float(self.model.cost_of(max(self.pairs), self.tokens_per_rank, self.ring_size))

    @property
    def imbalance(self) -> float:
        """`time`, over what it would be if all ranks had equal shares and no padding."""
        tokens = sum(x.length for x in self.placements)
        total = self.model.cost_of(sum(self.pairs), tokens, self.ring_size)
        return self.time * len(self.pairs) / float(total)

    @property
    def padding(self) -> float:
        """Which part of all places is padding."""
        return 1 - sum(x.length for x in self.placements) / (self.tokens_per_rank * len(self.pairs))

    def __str__(self) -> str:
        lengths = [x.length for x in self.placements]
        lines = [
            f"{len(lengths)} documents, {sum(lengths):,} tokens, on {self.rows} x cp={self.cp}: "
            f"{self.tokens_per_rank:,} tokens a rank, {self.padding:.1%} of them padding; "
            f"imbalance {self.imbalance:.3f}, ring_size={self.ring_size}"
        ]
        for size, count in sorted(Counter(x.size for x in self.placements).items()):
            some = [x.length for x in self.placements if x.size == size]
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            lines.append(f"  on {ranks}: {count} of {min(some):,} to {max(some):,} tokens")
        for row in range(self.rows):
            part = self.costs[row * self.cp : (row + 1) * self.cp]
            lines.append(f"  row {row}: costs " + ", ".join(f"{cost:,.0f}" for cost in part))
        return "\n".join(lines)


def arrange(
    documents: Sequence[np.ndarray],
    plan: ContextPlan,
    *,
    tokens_per_rank: int | None = None,
    pad: int = 0,
) -> dict[str, Tensor]:
    """The batch of a plan, for ``Context(order="balanced", ring_size=plan.ring_size)``.

    A larger ring, such as the static one of other plans or 0, all ranks, gives the same numbers;
    ``kind="gather"`` takes 0 only, or 1.

    Every rank has, in this order: the early chunks of documents that it shares, its own documents,
    padding, and the late chunks. Shared documents are padded to 2 chunks a rank, which continues
    them; the rank's padding is a document by itself, with a number after all others. So a token
    comes after all those of its document that it sees, on every rank and in both halves; a
    document that lies on one rank may stand anywhere, across the halves as well.

    Args:
        documents: token ids, integers ``[n]`` each, of the lengths that were scheduled.
        plan: what `schedule` made of these.
        tokens_per_rank: to pad ranks to, so that shapes stay the same whatever the plan; None:
            the plan's own.
        pad: the token id of padding.

    Returns:
        int64 ``[plan.rows, cp * tokens_per_rank]`` ``tokens``, ``targets``, ``positions`` and
        ``segments`` as of `functron.data.pack`, and ``rows``.

    Raises:
        ValueError: documents are not those of the plan, or `tokens_per_rank` is odd or too small.
    """
    check_documents(documents)
    places = plan.placements
    problems = []
    if len(documents) != len(places):
        problems.append(Problem("documents", f"{len(documents)}", f"the plan's {len(places)}"))
    for i, (x, place) in enumerate(zip(documents, places, strict=False)):
        if len(x) != place.length:
            got = f"{len(x)} tokens"
            problems.append(Problem(f"documents[{i}]", got, f"the {place.length} of the plan"))
    seq = plan.tokens_per_rank if tokens_per_rank is None else tokens_per_rank
    if seq < plan.tokens_per_rank or seq % 2:
        wanted = f"an even number, at least the plan's {plan.tokens_per_rank}"
        problems.append(Problem("tokens_per_rank", str(seq), wanted))
    raise_listed("cannot arrange", problems)
    pieces = [
        entries(x, i, room(place.length, place.size), pad)
        for i, (x, place) in enumerate(zip(documents, places, strict=True))
    ]
    return as_batch(_lay_out(pieces, plan, seq, pad))


def _lay_out(
    pieces: Sequence[np.ndarray], plan: ContextPlan, seq: int, pad: int
) -> list[np.ndarray]:
    """The samples ``[4, cp * seq]`` of a plan, of its documents with their own padding."""
    count = plan.rows * plan.cp
    early, own, late = ([[] for _ in range(count)] for _ in range(3))
    for piece, place in zip(pieces, plan.placements, strict=True):
        at = place.row * plan.cp + place.first
        if place.size == 1:
            own[at].append(piece)
            continue
        for rank, (first, second) in enumerate(zigzag(piece, place.size), at):
            early[rank].append(first)
            late[rank].append(second)
    parts = []
    beyond = 1 + max(int(piece[_SEGMENTS].max()) for piece in pieces)
    for rank in range(count):
        rest = seq - plan.tokens[rank]
        own[rank].append(entries(np.zeros(0, np.int64), beyond + rank, rest, pad))
        parts.append(np.concatenate(early[rank] + own[rank] + late[rank], 1))
    return [np.concatenate(parts[i : i + plan.cp], 1) for i in range(0, count, plan.cp)]


def room(length: int, size: int) -> int:
    """The places that a document takes, on all of its ranks together."""
    return length if size == 1 else rounded_up(length, 2 * size)


def visible_pairs(length: int, size: int) -> np.ndarray:
    """Pairs of a query and a key that it sees, of each of a document's ranks: int64 ``[size]``."""
    if size == 1:
        return np.array([length * (length + 1) // 2])
    ends = np.arange(2 * size + 1) * (room(length, size) // (2 * size))
    before = np.minimum(ends, length)  # padding has no queries that count
    chunks = np.diff(before * (before + 1) // 2)
    return chunks[:size] + chunks[: size - 1 : -1]


_FRACTIONS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""How much of a rank's mean cost one document may take, tried in turn; 0: all over the ring."""


def schedule(
    lengths: Sequence[int],
    cp: int,
    *,
    rows: int = 1,
    limit: int | None = None,
    multiple: int = 1,
    costs: ContextCosts | None = None,
    sizes: Sequence[int] | None = None,
) -> ContextPlan:
    """Choose for every document how many ranks it is split over, and which.

    For every largest ring, and for several bounds on what part of a rank's mean cost one document
    may take, documents get the fewest ranks that keep within it and then, longest first, go to the
    aligned group of ranks that has least to do and room for them (Graham 1969). Of these plans, the
    one whose slowest rank is fastest; `rows` are balanced among one another as well. Every document
    on all ranks is one of them, so that no plan is worse than the zig-zag over all.

    The cost model counts visible pairs, as kernels that skip other documents compute them.
    `functron.ops.attention` computes all pairs of a ring, half of ``tokens_per_rank ** 2 *
    ring_size`` on every rank alike, and masks: small rings and little padding save time there too,
    balanced pairs do not.

    Args:
        lengths: tokens of every document.
        cp: ranks of that mesh axis.
        rows: samples to fill.
        limit: the most tokens of a rank, padding included: what memory allows; None for any.
        multiple: a rank's tokens are padded to this: ulysses times tp under sequence parallelism.
        costs: coefficients of the cost model; None: `ContextCosts()`.
        sizes: how many ranks documents may be split over, of cp, its half, and so on while even,
            and 1; None: all of these. ``(cp,)`` is the zig-zag over all ranks.

    Returns:
        A `ContextPlan` for `arrange`.

    Raises:
        ValueError: documents are empty, or do not fit within the limit; or an argument is out of
            range.
    """
    model = ContextCosts() if costs is None else costs
    _check_arguments(cp, rows, limit, multiple, sizes)
    even = math.lcm(2, multiple)  # two halves
    most = None if limit is None else limit // even * even
    allowed = sorted(list_ring_sizes(cp) if sizes is None else set(sizes))
    _check_lengths(lengths, allowed[-1], cp * rows, most)
    best = _find_plan(lengths, cp, rows, most, even, model, allowed)
    if best is None:
        got = f"{sum(lengths):,} tokens on {cp * rows} ranks of at most {most:,}"
        fix = "raise limit, or schedule fewer documents"
        refuse("no plan found", "limit", got, "more room", fix)
    assert best is not None
    return best


def _find_plan(
    lengths: Sequence[int],
    cp: int,
    rows: int,
    most: int | None,
    even: int,
    model: ContextCosts,
    allowed: Sequence[int],
) -> ContextPlan | None:
    """The fastest plan that is found; None where each leaves a document without room."""
    best: tuple | None = None
    for ring in allowed:
        for places in _list_places(lengths, allowed, ring, cp * rows, most, model):
            plan = _make_plan(lengths, places, cp, rows, even, model)
            key = plan.time, plan.ring_size, sum(x.size for x in plan.placements)
            if best is None or key < best[0]:
                best = key, plan
    return None if best is None else best[1]


ContextPlaces = list[tuple[int, int]]
"""Of every document the first of its ranks, counted through all rows, and how many they are."""


def _list_places(
    lengths: Sequence[int],
    allowed: Sequence[int],
    ring: int,
    ranks: int,
    most: int | None,
    model: ContextCosts,
) -> Iterator[ContextPlaces]:
    """Places on `ranks` ranks, no document on more than `ring` of them, in several ways."""
    sizes = [s for s in allowed if s <= ring]
    for chosen in _propose_sizes(lengths, sizes, ranks, model):
        for score in _make_scores(lengths, ranks, model, ring):
            places = _place_documents(lengths, chosen, sizes, ranks, most, score)
            if places is not None:
                yield places


def list_ring_sizes(cp: int) -> list[int]:
    """cp, its half, ..., and 1: each divides all larger ones, so that groups lie within rings."""
    sizes = [cp]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]


def _propose_sizes(
    lengths: Sequence[int], sizes: Sequence[int], ranks: int, model: ContextCosts
) -> Iterator[list[int]]:
    """How many ranks each document might be split over, of these sizes."""
    n = np.array(lengths, np.int64)
    whole, seen = model.cost_of(n * (n + 1) / 2, n, sizes[-1]), set()
    for fraction in _FRACTIONS:
        bound = fraction * whole.sum() / ranks
        chosen = np.full(len(n), sizes[-1])
        for size in reversed(sizes):
            chosen[whole / size <= bound] = size
        key = tuple(chosen.tolist())
        if key not in seen:
            seen.add(key)
            yield list(key)


ContextScore = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
"""How badly a document suits ranks: their pairs and tokens, and what it adds to each."""


def _make_scores(
    lengths: Sequence[int], ranks: int, model: ContextCosts, ring: int
) -> Iterator[ContextScore]:
    """Two scores, as pairs and tokens are to be balanced both: neither is always the best.

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


def _place_documents(
    lengths: Sequence[int],
    chosen: Sequence[int],
    allowed: Sequence[int],
    ranks: int,
    limit: int | None,
    score: ContextScore,
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


def _make_plan(
    lengths: Sequence[int],
    places: Sequence[tuple[int, int]],
    cp: int,
    rows: int,
    even: int,
    model: ContextCosts,
) -> ContextPlan:
    pairs, tokens = np.zeros(cp * rows, np.int64), np.zeros(cp * rows, np.int64)
    for length, (first, size) in zip(lengths, places, strict=True):
        pairs[first : first + size] += visible_pairs(length, size)
        tokens[first : first + size] += room(length, size) // size
    return ContextPlan(
        cp=cp,
        rows=rows,
        placements=tuple(
            ContextPlacement(length, first // cp, first % cp, size)
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
    known = list_ring_sizes(cp) if cp >= 1 else []
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
    raise_listed("cannot schedule", problems)


# --- batches of fixed shapes


SLACK = (1 / 64, 1 / 8)
"""How much longer a rank's part of a dealt row is than without padding: few, for few shapes."""


@dataclass(frozen=True)
class ContextDeal:
    """A packed batch whose documents were dealt to ranks, and the zig-zag of samples beside it.

    Attributes:
        batch: for ``Context(order="balanced", ring_size=ring_size, exchange_size=exchange_size)``:
            ``rows`` rows of ``cp * ulysses * tokens_per_rank`` tokens.
        places: int64, as its tokens: the place of each in the samples of the batch as it was, one
            after the other; of padding any.
        ring_size: the most ranks of cp that a document is split over.
        exchange_size: how many ranks of ulysses exchange heads; all, unless `ring_size` is 1.
        tokens_per_rank: the places of every rank in a row, padding included.
        padding: which part of all places is padding.
        idle, static_idle: which part of all ranks' time they wait for the slowest, or compute
            padding, of this deal and of the zig-zag of each sample over all ranks; by the cost
            model.
        time, static_time: of a step, by the cost model.
        sent, static_sent: tokens whose keys and values a rank sends in one layer's forward.
        exchanged, static_exchanged: tokens whose heads a rank sends there.
    """

    batch: dict[str, Tensor]
    places: Tensor
    ring_size: int
    exchange_size: int
    tokens_per_rank: int
    padding: float
    idle: float
    static_idle: float
    time: float
    static_time: float
    sent: int
    static_sent: int
    exchanged: float
    static_exchanged: float


def list_degrees(cp: int, ulysses: int = 1) -> list[tuple[int, int]]:
    """Every ``(ring_size, exchange_size)`` of deals, of fewest ranks first.

    Neighbours are ranks of ulysses: documents go to some of these, to all, or to all of several
    ranks of cp.
    """
    inner = [(1, size) for size in reversed(list_ring_sizes(ulysses))]
    return inner + [(size, ulysses) for size in reversed(list_ring_sizes(cp)) if size > 1]


def list_deals(
    cp: int,
    seq: int,
    global_batch: int,
    *,
    ulysses: int = 1,
    parts: int = 1,
    microbatches: int = 1,
    multiple: int = 1,
) -> list[tuple[int, int, int]]:
    """Every ``(ring_size, exchange_size, tokens_per_rank)`` that `deal` may return for batches of
    this shape.
    """
    base, even = _count_places(cp, seq, global_batch, parts, microbatches, multiple * ulysses)
    sizes = [each // ulysses for each in _list_sizes(base, even)]
    dealt = ((*degree, size) for degree in list_degrees(cp, ulysses) for size in sizes)
    return [(cp, ulysses, base // ulysses), *dealt]


def _list_sizes(base: int, even: int) -> list[int]:
    return sorted({rounded_up(math.ceil(base * (1 + more)), even) for more in SLACK})


def _count_places(
    cp: int, seq: int, global_batch: int, parts: int, microbatches: int, multiple: int
) -> tuple[int, int]:
    """A cp rank's tokens in a row without padding, and what they are to be a multiple of."""
    rows, even, problems = parts * microbatches, math.lcm(min(cp, 2), multiple), []
    if seq % (cp * even):
        wanted = f"a multiple of {cp * even}: two halves on each of {cp} ranks"
        wanted += f", and multiple={multiple}" if even > 2 else ""
        fix = f"set it to {rounded_up(seq, cp * even)}"
        problems.append(Problem("seq", str(seq), wanted, fix))
    if global_batch % rows:
        wanted = f"a multiple of {rows}: {parts} parts of {microbatches} microbatches"
        problems.append(Problem("global_batch", str(global_batch), wanted))
    raise_problems("cannot deal documents to ranks", problems)
    return seq * global_batch // rows // cp, even


def deal(
    batch: Mapping[str, Tensor],
    cp: int,
    *,
    ulysses: int = 1,
    parts: int = 1,
    microbatches: int = 1,
    stages: int = 1,
    multiple: int = 1,
    costs: ContextCosts | None = None,
    pad: int = 0,
) -> ContextDeal:
    """The documents of a whole packed batch, over the ranks that `schedule` chooses for each.

    A row of the result is what the ranks of cp and ulysses compute together at a time: a microbatch
    of the samples of one part. Any document may come to any of them. Losses are sums over tokens,
    which stay the same: those after a document's last target, which no loss sees, alone are left
    out.

    Ranks of a row wait for one another in every layer, and parts of the batch at the end of a step.
    So documents go to parts first, by their pairs, then to the rows of each, either alike or the
    longest together, and in every row to ranks, as balances that row best: rows of a part need not
    take equally long. Where `stages` of a pipeline do wait for it, that counts.

    Groups of `exchange_size` ranks, which have equal shares of all they hold together, are dealt to
    as one rank: no document of theirs is padded.

    Shapes are few, `list_deals`, so that there are as few compiled programs. Where the zig-zag of
    each sample over all ranks is faster, or nothing else fits, that is what is dealt, which needs
    no padding.

    Args:
        batch: all samples of a step, as `functron.data.pack` or `functron.data.PackedTokens` make
            them.
        cp: ranks that share a row, and keys and values.
        ulysses: ranks that share what each of these has, and heads.
        parts: ranks that split the batch by samples.
        microbatches: of each of these; all have one `ring_size` and shape.
        stages: of a pipeline, in which microbatches that take longer than others cost more.
        multiple, costs: as in `schedule`.
        pad: the token id of padding.

    Raises:
        ValueError: the batch is not packed, its documents are torn apart or out of order, or it
            does not divide.
    """
    title, model = "cannot deal documents to ranks", ContextCosts() if costs is None else costs
    samples, rows = separate_documents(batch, title=title), parts * microbatches
    sizes = batch["tokens"].shape[1], len(samples)
    base, even = _count_places(cp, *sizes, parts, microbatches, multiple * ulysses)
    documents = [x for sample in samples for x in sample]
    for number, document in enumerate(documents):
        document[_SEGMENTS] = number
    starts = _list_starts(samples, batch)
    static = _plan_samples(samples, cp, rows, base, model.of_group(ulysses))
    documents = [_cut_after_targets(x) for x in documents]
    lengths = [x.shape[1] for x in documents]
    found = _Search(lengths, parts, microbatches, stages)
    found.take(static, (cp, ulysses))
    still, idle = found.time, found.idle
    # fewer ranks first, and the rest only where they might still be faster
    for ring, group in list_degrees(cp, ulysses):
        one, allowed = model.of_group(group), [s for s in list_ring_sizes(cp)[::-1] if s <= ring]
        for size in _list_sizes(base, even):
            shape = cp * ulysses // group, size * group // ulysses
            found.look(*shape, one, allowed if group == ulysses else [1], (ring, group))
    best, (ring, group) = found.plan, found.degree
    assert best is not None
    if best is static:
        documents = [np.concatenate(sample, 1) for sample in samples]
    pieces = [
        extend_document(x, room(place.length, place.size), pad)
        for x, place in zip(documents, best.placements, strict=True)
    ]
    made = as_batch(_lay_out(pieces, best, best.tokens_per_rank, pad))
    places = starts[made["segments"].clamp(max=len(starts) - 1)] + made["positions"]
    # padding of a rank may be longer than any document, for which a model has no positions
    made["positions"].clamp_(max=sizes[0] - 1)
    # of a rank of cp, and what one of ulysses has of it
    size, before = best.tokens_per_rank * ulysses // group, base
    exchanged, all_exchanged = (
        each / ulysses * (1 - 1 / ranks) * microbatches
        for each, ranks in ((size, group), (before, ulysses))
    )
    return ContextDeal(
        batch=made, places=places, ring_size=ring, exchange_size=group,
        tokens_per_rank=size // ulysses,
        padding=1 - sum(lengths) / (size * cp * rows),
        idle=found.idle, static_idle=idle, time=found.time, static_time=still,
        sent=size * (ring - 1) * microbatches, static_sent=before * (cp - 1) * microbatches,
        exchanged=exchanged, static_exchanged=all_exchanged,
    )  # fmt: skip


def _list_starts(samples: Sequence[Sequence[np.ndarray]], batch: Mapping[str, Tensor]) -> Tensor:
    """The place in all samples at which each document would have had its position 0."""
    found, seq = [], batch["tokens"].shape[1]
    numbers = batch["rows"].tolist() if "rows" in batch else range(len(samples))
    for number, sample in zip(numbers, samples, strict=True):
        at = number * seq
        for document in sample:
            found.append(at - int(document[_POSITIONS, 0]))
            at += document.shape[1]
    return torch.tensor(found)


class _Search:
    """The fastest plan of those that were looked at, by the time of a step."""

    def __init__(self, lengths: Sequence[int], parts: int, each: int, stages: int):
        self.lengths, self.parts, self.each, self.stages = lengths, parts, each, stages
        self.plan: ContextPlan | None = None
        self.degree, self.time, self.idle = (0, 0), math.inf, 0.0
        n = np.array(lengths, np.int64)
        self._pairs = n * (n + 1) // 2
        self._parts: dict[int, list[list[list[int]]]] = {}

    def take(self, plan: ContextPlan, degree: tuple[int, int]) -> None:
        """Keep a plan if it is faster than those before."""
        useful = int(self._pairs.sum()), sum(self.lengths)
        time, idle = _measure_waste(plan, self.parts, self.stages, useful)
        if time < self.time:
            self.plan, self.degree, self.time, self.idle = plan, degree, time, idle

    def look(
        self,
        ranks: int,
        size: int,
        model: ContextCosts,
        allowed: Sequence[int],
        degree: tuple[int, int],
    ) -> None:
        """Try deals to rows of so many ranks of `size` tokens."""
        ring, rows = allowed[-1], self.parts * self.each
        least = float(self._pairs.max()) / ring
        if model.cost_of(least, size * self.each, ring) >= self.time:
            return
        if ranks * size not in self._parts:
            self._parts[ranks * size] = list(self._list_parts(ranks * size))
        for groups in self._parts[ranks * size]:
            pairs = max(least, *(self._pairs[mine].sum() / ranks for mine in groups))
            if model.cost_of(pairs, size * self.each, ring) >= self.time:
                continue
            chosen: ContextPlaces = [(0, 0)] * len(self.lengths)
            worst = 0.0
            # those that all will wait for first
            for part in sorted(range(self.parts), key=lambda p: -self._pairs[groups[p]].sum()):
                mine = groups[part]
                found = self._place_part(mine, ranks, size, model, allowed, worst)
                if found is None:
                    break
                worst = max(worst, found[0])
                for i, (first, count) in zip(mine, found[1], strict=True):
                    chosen[i] = part * self.each * ranks + first, count
            else:
                made = _make_plan(self.lengths, chosen, ranks, rows, 1, model)
                self.take(replace(made, tokens_per_rank=size), degree)
        # or to ranks of all rows at once, which must balance rows as well
        for places in _list_places(self.lengths, allowed, ring, ranks * rows, size, model):
            made = _spread_rows(_make_plan(self.lengths, places, ranks, rows, 1, model), self.parts)
            self.take(replace(made, tokens_per_rank=size), degree)

    def _list_parts(self, most: int) -> Iterator[list[list[int]]]:
        """The documents of every part, whose rows have room for so many tokens; best ones first."""
        everything, found = list(range(len(self.lengths))), {}
        for limit in (most - most // _RESERVE, most):
            for way in ("pairs", "both"):
                groups = _group_documents(
                    self.lengths, everything, self.parts, limit * self.each, way
                )
                if groups is not None:
                    found[max(int(self._pairs[mine].sum()) for mine in groups)] = groups
            if found:
                break
        yield from (found[key] for key in sorted(found))

    def _place_part(
        self,
        members: Sequence[int],
        ranks: int,
        size: int,
        model: ContextCosts,
        allowed: Sequence[int],
        worst: float,
    ) -> tuple[float, ContextPlaces] | None:
        """The pairs that the rows of one part take together, with places; None without room.

        Another part takes the `worst`, so that little more than fewest will do.
        """
        best: tuple[float, dict[int, tuple[int, int]]] | None = None
        ideal = float(self._pairs[members].sum()) / ranks
        near = min(max(_NEAR, worst / max(ideal, 1)), 1.05)
        for groups in _list_rows(self.lengths, members, self.each, ranks * size):
            chosen, slowest = {}, []
            for row, mine in enumerate(groups):
                taken = [self.lengths[i] for i in mine]
                found = _place_row(taken, allowed, ranks, size, model, near)
                if found is None:
                    break
                slowest.append(found[0])
                for i, (first, count) in zip(mine, found[1], strict=True):
                    chosen[i] = row * ranks + first, count
            else:
                late = (self.stages - 1) * (max(slowest) - sum(slowest) / self.each)
                if best is None or sum(slowest) + late < best[0]:
                    best = sum(slowest) + late, chosen
                if best[0] <= near * ideal:
                    break
        return None if best is None else (best[0], [best[1][i] for i in members])


_RESERVE, _NEAR = 128, 1.005
"""Of how many tokens one is kept for padding; how near to the best a deal may be to be taken."""


def _list_rows(
    lengths: Sequence[int], members: Sequence[int], count: int, most: int
) -> Iterator[list[list[int]]]:
    """These documents in `count` rows of at most so many tokens, in several ways."""
    if count == 1:
        yield [list(members)]
        return
    for limit in (most - most // _RESERVE, most):
        ways = (_group_documents(lengths, members, count, limit, way) for way in _GROUPINGS)
        found = [groups for groups in ways if groups is not None]
        yield from found
        if found:
            return


_GROUPINGS = ("both", "tokens", "pairs")
"""Quantities of which groups of documents have about as much: either, tokens, or pairs."""


def _group_documents(
    lengths: Sequence[int], members: Sequence[int], count: int, limit: int, way: str
) -> list[list[int]] | None:
    """These documents in `count` groups of at most `limit` tokens; None where that is not found.

    Longest first, to where there is least.
    """
    groups, pairs, tokens = [[] for _ in range(count)], [0] * count, [0] * count
    whole = sum(lengths[i] for i in members), sum(lengths[i] ** 2 for i in members)
    for i in sorted(members, key=lambda i: -lengths[i]):
        n = lengths[i]
        free = [group for group in range(count) if tokens[group] + n <= limit]
        if not free:
            return None
        if way == "pairs":
            at = min(free, key=pairs.__getitem__)
        elif way == "tokens":
            at = min(free, key=tokens.__getitem__)
        else:  # as of `_make_scores`
            p, t = n * n / whole[1] ** 2, n / whole[0] ** 2
            at = min(
                free, key=[p * x + t * y for x, y in zip(pairs, tokens, strict=True)].__getitem__
            )
        groups[at].append(i)
        pairs[at] += n * n
        tokens[at] += n
    return groups


def _place_row(
    lengths: Sequence[int],
    allowed: Sequence[int],
    ranks: int,
    size: int,
    model: ContextCosts,
    near: float,
) -> tuple[int, ContextPlaces] | None:
    """The fewest pairs that the slowest rank of a row has, with places; None without room.

    `near` times their mean are few enough.
    """
    if not lengths:
        return 0, []
    best: tuple[int, ContextPlaces] | None = None
    least = sum(n * (n + 1) // 2 for n in lengths) / ranks
    for places in _list_places(lengths, allowed, allowed[-1], ranks, size, model):
        pairs = np.zeros(ranks, np.int64)
        for length, (first, count) in zip(lengths, places, strict=True):
            pairs[first : first + count] += visible_pairs(length, count)
        worst = int(pairs.max())
        if best is None or worst < best[0]:
            best = worst, places
        if worst <= near * least:
            break
    return best


def _plan_samples(
    samples: Sequence[Sequence[np.ndarray]], cp: int, rows: int, base: int, model: ContextCosts
) -> ContextPlan:
    """The plan that splits every sample over all ranks, `rows` rows of as many samples."""
    each, places = len(samples) // rows, []
    pairs = np.zeros((rows, cp), np.int64)
    for index, sample in enumerate(samples):
        seen = np.concatenate([x[_POSITIONS] + 1 for x in sample])
        if cp == 1:
            pairs[index // each] += seen.sum()
        else:
            chunks = seen.reshape(2 * cp, -1).sum(1)
            pairs[index // each] += chunks[:cp] + chunks[: cp - 1 : -1]
        places.append(ContextPlacement(len(seen), index // each, 0, cp))
    tokens = (base,) * (rows * cp)
    return ContextPlan(cp, rows, tuple(places), base, tuple(pairs.ravel().tolist()), tokens, model)


def _spread_rows(plan: ContextPlan, parts: int) -> ContextPlan:
    """The plan with its rows in another order: slow ones, longest first, go to different parts."""
    each = plan.rows // parts
    pairs, tokens = (np.array(x).reshape(plan.rows, plan.cp) for x in (plan.pairs, plan.tokens))
    loads, rows = np.zeros(parts), [[] for _ in range(parts)]
    for row in np.argsort(-pairs.max(1), kind="stable").tolist():
        free = [part for part in range(parts) if len(rows[part]) < each]
        part = min(free, key=lambda part: loads[part])
        loads[part] += pairs[row].max()
        rows[part].append(row)
    order = [row for part in rows for row in part]
    places = {row: place for place, row in enumerate(order)}
    return replace(
        plan,
        placements=tuple(replace(x, row=places[x.row]) for x in plan.placements),
        pairs=tuple(pairs[order].ravel().tolist()),
        tokens=tuple(tokens[order].ravel().tolist()),
    )


def _cut_after_targets(document: np.ndarray) -> np.ndarray:
    """A document ``[4, n]`` up to the token that its last target stands for; one token at least."""
    found = np.flatnonzero(document[_TARGETS] != IGNORED)
    return document[:, : found[-1] + 2 if len(found) else 1]


def _measure_waste(
    plan: ContextPlan, parts: int, stages: int, useful: tuple[int, int]
) -> tuple[float, float]:
    """The time of a plan, and the part of it in which ranks compute nothing that is `useful`.

    Ranks of a row wait for one another in every layer, parts of the batch at the end of a step, and
    stages of a pipeline for as much as the slowest microbatch takes longer than others.
    """
    pairs, ring = np.array(plan.pairs).reshape(parts, -1, plan.cp), plan.ring_size
    slowest = plan.model.cost_of(pairs.max(2), plan.tokens_per_rank, ring)
    late = (stages - 1) * (slowest.max(1) - slowest.mean(1))
    time = float((slowest.sum(1) + late).max())
    needed = plan.model.cost_of(*useful, ring)
    return time, 1 - float(needed) / (parts * plan.cp) / time
