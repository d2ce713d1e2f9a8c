"""Plans of dynamic context parallelism: which ranks have which documents, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from functron.data.packing import (
    as_batch,
    check_documents,
    entries,
    refuse_listed,
    rounded_up,
    zigzag,
)
from functron.errors import Problem, raise_problems
from functron.typing import Tensor


@dataclass(frozen=True)
class Costs:
    """The time that documents take on a rank: linear in tokens, quadratic in a document's length.

    The unit is a token's matmuls. The defaults are those of a layer of Llama 3 8B: a token takes
    436 MFLOP forward, a visible pair 16,384 FLOP (0.000038), and the key and value of a token, 4
    KiB, take 82 ns over a link of 50 GB/s, in which 400 TFLOP/s compute 0.075 tokens; backward
    has about the same ratios. Exchanges that hide behind computation count for less.

    Attributes:
        linear: of a token.
        quadratic: of a query and a key that it sees.
        exchange: of a token's key and value, for every step that they travel around the ring.

    Raises:
        ValueError: one is negative, or the first two are 0.
    """

    linear: float = 1.0
    quadratic: float = 3.8e-5
    exchange: float = 0.075

    def __post_init__(self):
        given = vars(self).items()
        problems = [Problem(k, str(v), "a number, at least 0") for k, v in given if not v >= 0]
        if not problems and not self.linear + self.quadratic:
            problems.append(Problem("linear, quadratic", "0", "one more than 0"))
        raise_problems("these are no costs", problems)

    def of(self, pairs: np.ndarray, tokens: np.ndarray, ring_size: int) -> np.ndarray:
        """The cost of so many visible pairs and tokens, elementwise."""
        return self.quadratic * pairs + self.per_token(ring_size) * tokens

    def per_token(self, ring_size: int) -> float:
        """What every token of a rank costs besides its pairs; keys of all of them travel."""
        return self.linear + self.exchange * (ring_size - 1)


@dataclass(frozen=True)
class Placement:
    """Where a document lies.

    Attributes:
        length: its tokens.
        row: the sample of the batch that it is in.
        first: the first of its ranks of cp.
        size: how many ranks it is split over; a divisor of `first`.
    """

    length: int
    row: int
    first: int
    size: int


@dataclass(frozen=True)
class Plan:
    """Who has what, and what it costs.

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
    placements: tuple[Placement, ...]
    tokens_per_rank: int
    pairs: tuple[int, ...]
    tokens: tuple[int, ...]
    model: Costs

    @property
    def ring_size(self) -> int:
        """The most ranks that a document is split over: for ``Context(order="balanced")``."""
        return max(x.size for x in self.placements)

    @property
    def costs(self) -> tuple[float, ...]:
        """What each rank's documents cost it; the ranks' padding is not among it."""
        of = self.model.of(np.array(self.pairs), np.array(self.tokens), self.ring_size)
        return tuple(of.tolist())

    @property
    def time(self) -> float:
        """What the slowest rank takes: all compute `tokens_per_rank` tokens."""
        places = np.array([self.tokens_per_rank])
        return float(self.model.of(np.array([max(self.pairs)]), places, self.ring_size)[0])

    @property
    def imbalance(self) -> float:
        """`time`, in terms of what it would be if all ranks had equal shares and no padding."""
        total = np.array([sum(self.pairs)]), np.array([sum(x.length for x in self.placements)])
        return self.time * len(self.pairs) / float(self.model.of(*total, self.ring_size)[0])

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
    plan: Plan,
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
    refuse_listed("cannot arrange", problems)
    count = plan.rows * plan.cp
    early, own, late = ([[] for _ in range(count)] for _ in range(3))
    for i, (x, place) in enumerate(zip(documents, places, strict=True)):
        at = place.row * plan.cp + place.first
        piece = entries(x, i, room(place.length, place.size), pad)
        if place.size == 1:
            own[at].append(piece)
            continue
        for rank, (first, second) in enumerate(zigzag(piece, place.size), at):
            early[rank].append(first)
            late[rank].append(second)
    parts = []
    for rank in range(count):
        rest = seq - plan.tokens[rank]
        own[rank].append(entries(np.zeros(0, np.int64), len(documents) + rank, rest, pad))
        parts.append(np.concatenate(early[rank] + own[rank] + late[rank], 1))
    return as_batch([np.concatenate(parts[i : i + plan.cp], 1) for i in range(0, count, plan.cp)])


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
