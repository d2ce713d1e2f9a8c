"""Dynamic context parallelism: plans that balance, batches that are what the plan says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron import Mesh, gpt
from functron.data import (
    ContextCosts,
    ContextPlacement,
    ContextPlan,
    arrange,
    balance,
    deal,
    pack,
    schedule,
)
from functron.data.context_schedule import list_deals
from functron.data.packing import IGNORED
from tests.data.documents import CONFIGS, check_equal, check_whole, documents, texts

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=25)
STEEP = ContextCosts(quadratic=0.02)
"""For short documents what `ContextCosts()` is for long ones."""


def by_rank(x: torch.Tensor, cp: int) -> np.ndarray:
    return x.numpy().reshape(x.shape[0] * cp, -1)


def measured(batch: dict, cp: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Visible pairs and tokens of documents on every rank, counted token by token."""
    segments, positions = by_rank(batch["segments"], cp), by_rank(batch["positions"], cp)
    known = np.array([*lengths, *[0] * (segments.max() + 1)])
    real = positions < known[segments]
    return np.where(real, positions + 1, 0).sum(1), real.sum(1)


def computed(segments: np.ndarray, positions: np.ndarray, cp: int, ring: int) -> set:
    """The pairs of tokens that a ring of halves computes: what nn/ring.py says it does."""
    half, out = segments.shape[1] // 2, set()
    for mine in range(cp):
        for other in range(mine - mine % ring, mine - mine % ring + ring):
            for q in range(2 * half):
                for k in range(2 * half):
                    late_q, late_k = q >= half, k >= half
                    if mine == other:
                        seen = k <= q
                    elif late_q and not late_k:
                        seen = True
                    else:
                        seen = late_q == late_k and (mine < other if late_q else other < mine)
                    if seen and segments[mine, q] == segments[other, k]:
                        number = int(segments[mine, q])
                        out.add((number, int(positions[mine, q]), int(positions[other, k])))
    return out


@given(
    lengths=LENGTHS,
    cp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    rows=st.integers(1, 3),
    multiple=st.sampled_from([1, 2, 3, 4]),
    quadratic=st.sampled_from([0.0, 0.001, 0.02, 1.0]),
)
def test_plans_hold_what_they_say(lengths, cp, rows, multiple, quadratic):
    docs, model = documents(lengths), ContextCosts(quadratic=quadratic)
    plan = schedule(lengths, cp, rows=rows, multiple=multiple, costs=model)
    batch = arrange(docs, plan)
    check_whole({n: x for n, x in batch.items() if n != "rows"}, docs)
    seq = plan.tokens_per_rank
    assert batch["tokens"].shape == (rows, cp * seq)
    assert batch["rows"].tolist() == list(range(rows))
    assert seq % multiple == 0
    assert seq % 2 == 0
    pairs, real = measured(batch, cp, lengths)
    assert pairs.tolist() == list(plan.pairs)
    assert (real <= np.array(plan.tokens)).all()
    per_token = model.linear + model.exchange * (plan.ring_size - 1)
    np.testing.assert_allclose(plan.costs, quadratic * pairs + per_token * np.array(plan.tokens))
    np.testing.assert_allclose(plan.time, quadratic * pairs.max() + per_token * seq)
    even = (quadratic * pairs.sum() + per_token * real.sum()) / (cp * rows)
    np.testing.assert_allclose(plan.imbalance, plan.time / even)
    np.testing.assert_allclose(plan.padding, 1 - real.sum() / (cp * rows * seq))
    segments = by_rank(batch["segments"], cp)
    for i, place in enumerate(plan.placements):
        assert place.length == lengths[i]
        assert plan.ring_size % place.size == 0
        assert place.first % place.size == 0
        at = place.row * cp + place.first
        counts = (segments == i).sum(1)
        assert set(np.flatnonzero(counts)) == set(range(at, at + place.size))
        assert len({int(c) for c in counts if c}) == 1
    assert cp % plan.ring_size == 0
    assert f"ring_size={plan.ring_size}" in str(plan)


@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8), cp=st.sampled_from([2, 4]))
def test_rings_of_halves_compute_what_is_visible(lengths, cp):
    plan = schedule(lengths, cp, costs=STEEP)
    batch = arrange(documents(lengths), plan)
    for kind in ("dynamic", "all"):
        if kind == "all":
            batch = balance(pack(documents(lengths), 24 * 8), cp)
        for row in range(len(batch["tokens"])):
            segments, positions = (
                by_rank(batch[n][row : row + 1], cp) for n in ("segments", "positions")
            )
            got = computed(segments, positions, cp, plan.ring_size if kind == "dynamic" else cp)
            numbers, counts = np.unique(segments, return_counts=True)
            want = {
                (int(s), q, k)
                for s, n in zip(numbers, counts, strict=True)
                for q in range(n)
                for k in range(q + 1)
            }
            assert got == want


@given(
    lengths=LENGTHS,
    cp=st.sampled_from([1, 2, 4, 6]),
    rows=st.integers(1, 3),
    room=st.integers(0, 12),
)
def test_limits_are_kept(lengths, cp, rows, room):
    limit = -(-sum(lengths) // (cp * rows)) + room
    try:
        plan = schedule(lengths, cp, rows=rows, limit=limit, costs=STEEP)
    except ValueError as error:
        assert "limit" in str(error)  # noqa: PT017
        assert room < 2 * len(lengths) or max(lengths) > cp * limit // 2
        return
    assert plan.tokens_per_rank <= limit
    check_whole(arrange(documents(lengths), plan), documents(lengths))


@given(lengths=LENGTHS, cp=st.sampled_from([2, 4, 8]), rows=st.integers(1, 3))
def test_no_plan_is_worse_than_all_ranks_for_all(lengths, cp, rows):
    plan = schedule(lengths, cp, rows=rows, costs=STEEP)
    everywhere = schedule(lengths, cp, rows=rows, costs=STEEP, sizes=(cp,))
    assert {x.size for x in everywhere.placements} == {cp}
    assert plan.time <= everywhere.time
    assert plan == schedule(lengths, cp, rows=rows, costs=STEEP)


def test_a_small_example():
    places = (
        ContextPlacement(8, 0, 0, 2),
        ContextPlacement(3, 0, 1, 1),
        ContextPlacement(5, 0, 0, 1),
    )
    plan = ContextPlan(
        2, 1, places, tokens_per_rank=10, pairs=(33, 24), tokens=(9, 7), model=ContextCosts()
    )
    batch = arrange([np.arange(10, 18), np.arange(20, 23), np.arange(30, 35)], plan, pad=99)
    first = [10, 11, 30, 31, 32, 33, 34, 99, 16, 17]
    second = [12, 13, 20, 21, 22, 99, 99, 99, 14, 15]
    assert batch["tokens"].tolist() == [first + second]
    assert batch["segments"].tolist() == [
        [0] * 2 + [2] * 5 + [3] + [0] * 2 + [0] * 2 + [1] * 3 + [4] * 3 + [0] * 2
    ]
    targets = batch["targets"][0].tolist()
    assert targets[:10] == [11, 12, 31, 32, 33, 34, IGNORED, IGNORED, 17, IGNORED]
    # visible pairs: 1 + 2 + 7 + 8 of the shared document, and all of the own ones
    assert measured(batch, 2, [8, 3, 5])[0].tolist() == [18 + 15, 18 + 6]
    assert (
        str(plan)
        .splitlines()[0]
        .startswith("3 documents, 16 tokens, on 1 x cp=2: 10 tokens a rank, 20.0%")
    )


def test_long_documents_are_split_and_short_ones_are_not():
    plan = schedule([80, 5, 5, 5, 5], 4, costs=STEEP)
    assert [x.size for x in plan.placements] == [4, 1, 1, 1, 1]
    assert sorted(x.first for x in plan.placements[1:]) == [0, 1, 2, 3]
    assert (plan.ring_size, plan.tokens_per_rank) == (4, 26)
    assert schedule([20] * 4, 4).ring_size == 1


def heavy_tailed(seed: int, median: int = 900, count: int = 96) -> list[int]:
    """A few documents are tens of times as long as most."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.6, count)
    return np.clip(drawn, 1, 65_536).astype(int).tolist()


def plain(lengths: list[int], cp: int, rows: int, balanced: bool) -> tuple[float, float, float]:
    """Time, imbalance and padding of packed samples, all of them over all ranks, by `ContextCosts()`.

    Samples are as short as first fit in `rows` of them allows.
    """
    docs = [np.zeros(n, np.int64) for n in lengths]
    seq = max(-(-sum(lengths) // rows), *lengths)
    while True:
        seq = -(-seq // (2 * cp)) * 2 * cp
        batch = pack(docs, seq, multiple=2 * cp if balanced else 1)
        if len(batch["tokens"]) <= rows:
            break
        seq += seq // 1000 + 1
    if balanced:
        batch = balance(batch, cp)
    else:  # chunks r and 2 cp - 1 - r of the sample
        chunks = [c for r in range(cp) for c in (r, 2 * cp - 1 - r)]
        batch = {
            n: x.reshape(len(x), 2 * cp, -1)[:, chunks].flatten(1)
            for n, x in batch.items()
            if n != "rows"
        }
    pairs, tokens = measured(batch, cp, lengths)
    per_token = ContextCosts().per_token(cp)
    time = ContextCosts().quadratic * pairs.max() + per_token * seq / cp
    even = (ContextCosts().quadratic * pairs.sum() + per_token * tokens.sum()) / (rows * cp)
    return time, time / even, 1 - tokens.sum() / (rows * seq)


def savings(cp: int, *, draws: int, **distribution: int) -> dict[str, np.ndarray]:
    """Time in terms of the plan's, imbalance and padding, as the module's docstring has them."""
    found: dict[str, list] = {}
    for seed in range(draws):
        lengths = heavy_tailed(seed, **distribution)
        plans = {
            "dynamic": schedule(lengths, cp, rows=2),
            "all": schedule(lengths, cp, rows=2, sizes=(cp,)),
        }
        each = {name: (x.time, x.imbalance, x.padding) for name, x in plans.items()}
        each["sample"], each["document"] = (plain(lengths, cp, 2, by) for by in (False, True))
        for name, (time, *rest) in each.items():
            found.setdefault(name, []).append((time / plans["dynamic"].time, *rest))
    return {name: np.mean(x, 0) for name, x in found.items()}


@pytest.mark.parametrize("cp", [4, 8])
def test_heavy_tails_are_balanced(cp):
    found = savings(cp, draws=5)
    time, imbalance = ({name: x[i] for name, x in found.items()} for i in (0, 1))
    assert time["sample"] > 1.2  # against ranks of samples' zig-zag
    assert time["document"] > 1.1
    assert time["all"] > 1.02
    assert imbalance["dynamic"] < imbalance["document"] < imbalance["sample"]


def test_short_documents_are_not_padded():
    padding = {name: x[2] for name, x in savings(8, draws=2, median=40, count=500).items()}
    assert padding["document"] > 0.04
    assert padding["dynamic"] < 0.01


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="cp: got 0") as e:
        schedule([3], 0, rows=0, multiple=0)
    assert "rows: got 0" in str(e.value)
    assert "multiple: got 0" in str(e.value)
    with pytest.raises(ValueError, match=r"sizes: got \(3,\); wanted some of 4, 2, 1"):
        schedule([3], 4, sizes=(3,))
    with pytest.raises(
        ValueError, match="limit: got 2; wanted at least 6, two halves and multiple=3"
    ):
        schedule([3], 2, limit=2, multiple=3)
    with pytest.raises(ValueError, match=r"lengths\[1\]: got 0 tokens; .*leave the document out"):
        schedule([3, 0], 2)
    with pytest.raises(ValueError, match="lengths: got none"):
        schedule([], 2)
    with pytest.raises(
        ValueError, match=r"lengths\[1\]: got 90 tokens; wanted at most 80, 20 on each of 4"
    ):
        schedule([3, 90], 4, limit=20)
    with pytest.raises(ValueError, match="90 tokens in all; wanted at most 80"):
        schedule([30] * 3, 2, rows=2, limit=20)
    with pytest.raises(ValueError, match=r"no plan found.*\n.*raise limit"):
        schedule([13] * 3, 2, limit=20, sizes=(1,))
    with pytest.raises(ValueError, match="quadratic: got -1"):
        ContextCosts(quadratic=-1)
    with pytest.raises(ValueError, match="one more than 0"):
        ContextCosts(linear=0, quadratic=0)


def test_documents_must_be_those_of_the_plan():
    plan = schedule([8, 3], 2)
    with pytest.raises(ValueError, match=r"documents\[1\]: got 4 tokens; wanted the 3 of the plan"):
        arrange(documents([8, 4]), plan)
    with pytest.raises(ValueError, match="documents: got 1; wanted the plan's 2"):
        arrange(documents([8]), plan)
    with pytest.raises(ValueError, match="got no tokens"):
        arrange([np.arange(8), np.arange(0)], plan)
    with pytest.raises(ValueError, match="tokens_per_rank: got 7; wanted an even number"):
        arrange(documents([8, 3]), plan, tokens_per_rank=7)


TEXTS = [60, 24, 1, 17, 5, 2, 31, 3, 3, 13, 7, 1, 8]
ROWS = [
    (Mesh(cp=2), "full", None, 1),
    (Mesh(cp=2), "full", (1,), 1),
    (Mesh(cp=4), "full", None, 1),
    (Mesh(cp=4), "full", (2, 1), 1),
    (Mesh(cp=4), "window", None, 1),
    (Mesh(cp=4), "ahead", None, 1),
    (Mesh(cp=4), "mixed", None, 1),
    (Mesh(dp=2, cp=2), "full", None, 1),
    (Mesh(fsdp=2, cp=4), "window", None, 1),
    (Mesh(cp=2, ulysses=2), "full", None, 2),
    (Mesh(cp=2, ulysses=2, tp=2), "mixed", None, 4),
]


@pytest.mark.pairwise(
    of=lambda mesh, config, sizes, multiple: [{"mesh": mesh}, {"config": config}, {"sizes": sizes}]
)
@pytest.mark.parametrize(("mesh", "config", "sizes", "multiple"), ROWS, ids=str)
def test_trains_as_on_every_document_by_itself(mesh, config, sizes, multiple):
    rows = mesh["dp"] * mesh["fsdp"]
    plan = schedule(TEXTS, mesh["cp"], rows=rows, multiple=multiple, costs=STEEP, sizes=sizes)
    assert len({x.size for x in plan.placements}) > 1 or sizes == (1,)
    context = gpt.Context(order="balanced", ring_size=plan.ring_size)
    stream = gpt.SEQUENCE_PARALLEL_STREAM if mesh["tp"] > 1 else gpt.STREAM
    check_equal(CONFIGS[config], TEXTS, arrange(texts(TEXTS), plan), mesh, context, stream)


def test_ranks_of_dp_may_have_plans_of_their_own():
    docs, ours = texts(TEXTS), [TEXTS[:2], TEXTS[2:]]
    plans = [schedule(ours[0], 2, costs=STEEP, sizes=(2,)), schedule(ours[1], 2, costs=STEEP)]
    assert {x.size for x in plans[1].placements} == {1}
    seq = max(plan.tokens_per_rank for plan in plans)
    both = [
        arrange(mine, plan, tokens_per_rank=seq)
        for mine, plan in zip((docs[:2], docs[2:]), plans, strict=True)
    ]
    batch = {name: torch.cat([x[name] for x in both]) for name in both[0]}
    batch["rows"] = torch.arange(2)
    context = gpt.Context(order="balanced", ring_size=max(plan.ring_size for plan in plans))
    check_equal(CONFIGS["full"], TEXTS, batch, Mesh(dp=2, cp=2), context)


@pytest.mark.parametrize(
    ("mesh", "config", "kind", "sizes"),
    [
        (Mesh(cp=4), "window", "gather", (2, 1)),
        (Mesh(cp=4, tp=2), "mixed", "gather", (2, 1)),
        (Mesh(cp=2, ulysses=2), "ahead", "gather", (2, 1)),
        (Mesh(ulysses=4), "window", "ring", 2),
        (Mesh(ulysses=4), "mixed", "ring", 2),
        (Mesh(ulysses=4), "ahead", "ring", 1),
        (Mesh(cp=2, ulysses=2, tp=2), "mixed", "ring", 1),
        (Mesh(dp=2, ulysses=2), "full", "ring", 1),
    ],
    ids=str,
)
def test_some_ranks_gather_keys_or_exchange_heads(mesh, config, kind, sizes):
    ranks, shape = mesh["cp"], {"multiple": mesh["ulysses"], "rows": mesh["dp"]}
    if isinstance(sizes, int):  # groups of so many ranks, dealt to as one
        ranks, shape["multiple"] = mesh["cp"] * mesh["ulysses"] // sizes, sizes
    plan = schedule(
        TEXTS, ranks, **shape, costs=STEEP, sizes=(1,) if isinstance(sizes, int) else sizes
    )
    exchange = sizes if isinstance(sizes, int) else mesh["ulysses"]
    context = gpt.Context(kind, "balanced", plan.ring_size, exchange)
    check_equal(CONFIGS[config], TEXTS, arrange(texts(TEXTS), plan), mesh, context)


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_larger_rings_give_the_same(kind):
    plan = schedule(TEXTS, 4, costs=STEEP, sizes=(2, 1))
    assert plan.ring_size == 2
    context = gpt.Context(kind, "balanced")
    check_equal(CONFIGS["full"], TEXTS, arrange(texts(TEXTS), plan), Mesh(cp=4), context)


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=10),
    cp=st.sampled_from([1, 2, 3, 4]),
    parts=st.integers(1, 2),
    microbatches=st.integers(1, 2),
    multiple=st.sampled_from([1, 2]),
)
def test_deals_have_few_shapes_and_lose_no_target(lengths, cp, parts, microbatches, multiple):
    seq, rows = 24, parts * microbatches
    samples = len(pack(documents(lengths), seq)["tokens"])
    packed = pack(documents([*lengths, *[seq] * (-samples % rows)]), seq)
    shape = {"parts": parts, "microbatches": microbatches, "multiple": multiple}
    made = deal(packed, cp, **shape, costs=STEEP)
    shapes = list_deals(cp, seq, len(packed["tokens"]), **shape)
    assert (made.ring_size, made.exchange_size, made.tokens_per_rank) in shapes
    assert made.batch["tokens"].shape == (rows, cp * made.tokens_per_rank)
    assert made.time <= made.static_time
    assert int(made.batch["positions"].max()) < seq

    def learnt(batch):
        chosen = batch["targets"] != IGNORED
        rows = (batch[n][chosen].tolist() for n in ("tokens", "targets", "positions"))
        return sorted(zip(*rows, strict=True))

    assert learnt(made.batch) == learnt(packed)
    # a token that predicts sees every one before it in its document, and no other
    for row in range(rows):
        segments, positions, targets = (
            by_rank(made.batch[n][row : row + 1], cp) for n in ("segments", "positions", "targets")
        )
        seen: dict = {}
        for number, q, k in computed(segments, positions, cp, made.ring_size):
            seen.setdefault((number, q), set()).add(k)
        real = targets != IGNORED
        for number, q in zip(segments[real].tolist(), positions[real].tolist(), strict=True):
            assert seen[number, q] == set(range(q + 1))


@pytest.mark.parametrize("cp", [4, 8])
def test_dealt_ranks_idle_half_as_long(cp):
    idle, static = 0.0, 0.0
    for seed in range(3):
        lengths = [n for n in heavy_tailed(seed, median=2000, count=400) if n < 65_536]
        packed = pack([np.zeros(n, np.int64) for n in lengths], 65_536)
        full = {n: x[:16] for n, x in packed.items()}
        made = deal(full, cp, parts=4)
        idle, static = idle + made.idle, static + made.static_idle
        assert made.sent < made.static_sent * 33 / 32 + 1
    assert idle <= static / 2


@pytest.mark.parametrize(
    ("mesh", "config", "microbatches"),
    [
        (Mesh(cp=4), "full", 1),
        (Mesh(cp=4), "ahead", 1),
        (Mesh(dp=2, cp=2), "mixed", 1),
        (Mesh(cp=2, ulysses=2, tp=2), "window", 1),
    ],
    ids=str,
)
def test_deals_train_as_on_every_document_by_itself(mesh, config, microbatches):
    stream = gpt.SEQUENCE_PARALLEL_STREAM if mesh["tp"] > 1 else gpt.STREAM
    multiple = mesh["ulysses"] * mesh["tp"]
    made = deal(
        pack(texts(TEXTS), 96), mesh["cp"], parts=mesh["dp"], multiple=multiple, costs=STEEP
    )
    context = gpt.Context(order="balanced", ring_size=made.ring_size)
    check_equal(CONFIGS[config], TEXTS, made.batch, mesh, context, stream)


def test_batches_that_cannot_be_dealt_are_refused():
    batch = pack(texts([10, 6]), 16)
    with pytest.raises(ValueError, match=r"seq: got 16; wanted a multiple of 12: .* set it to 24"):
        deal(batch, 6)
    with pytest.raises(ValueError, match="global_batch: got 1; wanted a multiple of 4: 2 parts of"):
        deal(batch, 2, parts=2, microbatches=2)
    with pytest.raises(ValueError, match=r"cannot deal.*\n.*segments'.: got nothing"):
        deal({n: x for n, x in batch.items() if n != "segments"}, 2)


def test_plans_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule([3], 2).cp = 4  # type: ignore  (frozen: that is the test)


if __name__ == "__main__":
    for cp, kind in ((4, {}), (8, {}), (8, {"median": 40, "count": 500})):
        for name, row in savings(cp, draws=20, **kind).items():
            print(cp, kind, name, row.round(4))
