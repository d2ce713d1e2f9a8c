"""Blends: weights, the order of sources, and the same batch on any number of parts."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functron.data import Blend, Exhaustive, Mixture, TextWindows
from functron.data.blend import BLOCK, ChainedExhaustive, GreedyMixture, parse_blend

MAKERS = (Mixture, GreedyMixture)
WEIGHTS = st.lists(st.integers(1, 2000), min_size=1, max_size=7)


def greedy(weights: list, samples: int) -> list[int]:
    """The rule, word by word, in exact fractions."""
    exact = [Fraction(str(w)) for w in weights]
    shares, counts, order = [w / sum(exact) for w in exact], [0] * len(weights), []
    for n in range(samples):
        deficits = [w * (n + 1) - c for w, c in zip(shares, counts, strict=True)]
        order.append(deficits.index(max(deficits)))
        counts[order[-1]] += 1
    return order


# --- the order of all runs that begin now ---------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        seeds, full = map(metafunc.config.getoption, ("--seeds", "--full"))
        default = 300 if full else 6
        metafunc.parametrize("seed", range(default if seeds is None else seeds))


def draw(seed: int) -> list[int]:
    """Weights of up to 64 sources, of a sum below 2^40: alike, wildly different, tiny, adversarial."""
    rng = random.Random(seed)
    k = rng.choice([1, 2, 3, 7, 33, 64, rng.randint(1, 64)])
    kinds = (
        lambda _: 1,
        lambda _: rng.randint(1, 10**6),
        lambda _: int(10 ** (10 * rng.random())) + 1,
        lambda i: int(2**36 * (2 / 3) ** i) + 1,  # each is a third of what is left
        lambda i: 2 ** min(i, 38),
        lambda i: 10**7 if i == 0 else rng.randint(1, 1000),
        lambda i: 3 ** (i % 20),
    )
    weights = [kinds[seed % len(kinds)](i) for i in range(k)]
    rng.shuffle(weights)
    return weights


def check_counts(blend, sizes: list[int], start: int, count: int) -> None:
    """|count_i - w_i n| < 2 for every n from `start` to ``start + count``, in whole numbers."""
    total = sum(sizes)
    sources, own = blend.at(start + np.arange(count))
    before, after = (blend.positions(n).tolist() for n in (start, start + count))
    assert sum(before) == start
    assert sum(after) == start + count
    for i, size in enumerate(sizes):
        mine = np.flatnonzero(sources == i)
        # in their own order, whatever lies between
        np.testing.assert_array_equal(own[mine], np.arange(before[i], after[i]))
        begun = (
            total * before[i] - size * start
        )  # exact; a count is furthest off beside its samples
        ahead = total * np.arange(1, len(mine) + 1) - size * (mine + 1)
        behind = size * mine - total * np.arange(len(mine))
        last = total * after[i] - size * (start + count)
        assert max(int(ahead.max(initial=0)) + begun, last) < 2 * total
        assert max(int(behind.max(initial=0)) - begun, -begun, -last) < 2 * total


def test_counts_are_within_2_of_their_shares(seed, request):
    """The first 1e5 samples, or 1e6, and far out; then where counts change, up to 1e12."""
    sizes, rng = draw(seed), random.Random(seed)
    blend, total = Mixture(sizes), sum(sizes)
    check_counts(blend, sizes, 0, 10**6 if request.config.getoption("--full") else 10**5)
    for most in (10**8, 10**12, 1 << 55):
        check_counts(blend, sizes, rng.randrange(most), 10**4)
    for _ in range(50):
        i, n = rng.randrange(len(sizes)), rng.randrange(10 ** rng.choice([8, 12]))
        halfway = 2 * (n * sizes[i] // total) + 1
        n = max(halfway * total // (2 * sizes[i]) + rng.randint(-1, 1), 0)
        here, then = blend.positions(n), blend.positions(n + 1)
        for counts, size in zip(here.tolist(), sizes, strict=True):
            assert abs(counts * total - size * n) < 2 * total
        source, own = blend.at(np.array(n))
        assert own == here[source]
        assert (then - here).tolist() == [int(x == source) for x in range(len(sizes))]


def test_all_samples_of_sources_are_within_2_of_their_shares(seed):
    sizes = [min(size, 10**6) for size in draw(seed)]
    blend, total = Exhaustive(sizes), sum(sizes)
    check_counts(blend, sizes, 0, min(total, 10**5))
    check_counts(blend, sizes, 3 * total - 500, 1000)
    assert blend.positions(5 * total).tolist() == [5 * size for size in sizes]


def test_small_weights_are_drawn_as_often_as_they_say():
    """Shares that blocks of 2^16 samples cannot have: 2.2e-5 was 31% too seldom."""
    weights = ["0.999877", "1e-4", "2.2e-5", "1e-6"]
    n = 10**8
    for weight, count in zip(weights, Mixture(weights).positions(n).tolist(), strict=True):
        assert abs(count - float(weight) * n) < 2
    before = GreedyMixture(["0.999978", "2.2e-5"]).positions(n)
    assert before[1] == pytest.approx(2200 / (2.2e-5 * BLOCK), abs=1)  # one a block: 31% too few


def divided(sizes: list[int], leaves: list[int], count: int, found: list[int]) -> None:
    """The rule, word by word: counts of the first samples of a node, down to single sources."""
    if len(leaves) == 1:
        found[leaves[0]] = count
        return
    sides: tuple[list[int], list[int]] = ([], [])
    for leaf in sorted(leaves, key=lambda leaf: (-sizes[leaf], leaf)):
        lighter = min(sides, key=lambda side: sum(sizes[x] for x in side))
        lighter.append(leaf)
    one, both = (sum(sizes[leaf] for leaf in some) for some in (sides[0], leaves))
    part = Fraction(round(Fraction(one, both) * 2**64), 2**64)
    first = math.floor(count * part + Fraction(1, 2))
    divided(sizes, sides[0], first, found)
    divided(sizes, sides[1], count - first, found)


@pytest.mark.parametrize("number", range(7))
def test_counts_are_those_of_exact_fractions(number):
    sizes = draw(number)
    blend, rng = Mixture(sizes), random.Random(number)
    for most in (10, 1000, 10**8, 10**12, 1 << 62):
        n, found = rng.randrange(most), [0] * len(sizes)
        divided(sizes, list(range(len(sizes))), n, found)
        assert blend.positions(n).tolist() == found


def test_sources_take_turns():
    """Four alike come one after another, and none of 64 twice within 32 samples."""
    first = Mixture([1] * 4).at(np.arange(4))[0]
    assert sorted(first.tolist()) == [0, 1, 2, 3]
    sources = Mixture([1] * 64).at(np.arange(10**4))[0]
    gaps = [np.diff(np.flatnonzero(sources == i)).min() for i in range(64)]
    assert min(gaps) >= 32
    assert Mixture([7]).at(np.array([[0, 5], [9, 1]]))[1].tolist() == [[0, 5], [9, 1]]
    assert Mixture([1, 1]).at(np.zeros((0, 3), np.int64))[0].shape == (0, 3)


# --- the order of runs that began before ----------------------------------------------------------


def test_ties_by_hand():
    """Deficits of [1, 2, 7] in tenths: 1 2 7, 2 4 4, 3 -4 11, 4 -2 8, 5 0 5."""
    assert GreedyMixture([1, 2, 7]).at(np.arange(5))[0].tolist() == [2, 1, 2, 2, 0]


@settings(max_examples=12, deadline=None)
@given(weights=WEIGHTS)
@example([1, 2, 7])
@example([1, 2, 3])
@example([0.3, 0.7])
@example([0.1, 0.2, 0.3, 0.4])
@example(["0.333333333333", "0.333333333334", "0.333333333333"])
@example([1, 1, 2])
def test_the_largest_deficit_goes_next_and_of_equals_the_first(weights):
    sources, _ = GreedyMixture(weights).at(np.arange(400))
    assert sources.tolist() == greedy(weights, 400)


@settings(max_examples=4, deadline=None)
@given(weights=WEIGHTS)
def test_counts_of_a_block_stay_close_to_their_shares(weights):
    mixture = GreedyMixture(weights)
    sources, own = mixture.at(np.arange(BLOCK))
    k, n = len(weights), np.arange(1, BLOCK + 1)
    behind = sum(1 / j for j in range(2, k + 1))  # by induction on the averages of the largest
    for i, weight in enumerate(mixture.weights):
        mine = sources == i
        counts = np.cumsum(mine)
        deficit = float(weight) * n - counts
        assert deficit.max() <= behind + 1e-6
        assert deficit.min() >= -(1 - 1 / k) - 1e-6
        np.testing.assert_array_equal(own[mine], np.arange(counts[-1]))


@settings(max_examples=4, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 2**50))
def test_positions_are_counts(weights, start):
    mixture = GreedyMixture(weights)
    numbers = start + np.arange(2 * BLOCK + 3)
    sources, own = mixture.at(numbers)
    before, after = mixture.positions(start), mixture.positions(start + len(numbers))
    assert before.sum() == start
    for i in range(len(weights)):
        # every sample of a source once, in order, whatever block they lie in
        np.testing.assert_array_equal(own[sources == i], np.arange(before[i], after[i]))


def chained(sizes: list[int], samples: int) -> list[int]:
    """Counts of the first samples of an epoch: source by source its share of what is left."""
    found, left = [], sum(sizes)
    for size in sizes:
        found.append(math.floor(Fraction(samples * size, left) + Fraction(1, 2)) if left else 0)
        samples, left = samples - found[-1], left - size
    return found


def test_samples_of_all_sources_as_runs_had_them():
    for sizes in ([5], [3, 1, 4], [1] * 9, [50, 2, 2, 50, 7]):
        total, blend = sum(sizes), ChainedExhaustive(sizes)
        sources, own = blend.at(np.arange(2 * total))
        for n in range(total + 1):
            counts = chained(sizes, n)
            assert np.bincount(sources[:n], minlength=len(sizes)).tolist() == counts
            assert blend.positions(n).tolist() == counts
        for i, size in enumerate(sizes):
            assert own[sources == i].tolist() == list(range(2 * size))


def test_a_blend_has_the_order_that_is_asked_for(texts):
    for order, weights, maker in (
        (1, [1, 2, 1], GreedyMixture), (2, [1, 2, 1], Mixture),
        (1, None, ChainedExhaustive), (2, None, Exhaustive),
    ):  # fmt: skip
        assert isinstance(Blend(texts, weights, order=order).mixture, maker)
    with pytest.raises(ValueError, match="order: got 3; wanted one of 1, 2"):
        Blend(texts, [1, 2, 1], order=3)
    small = (texts[:2], ["0.999978", "2.2e-5"], "ab")
    noted = Blend(*small, order=1).note()
    assert noted is not None
    assert noted.startswith("order 1, as the run began: of b come 30.6% too few samples")
    assert Blend(texts, [1, 2, 1], order=1).note() is None
    assert Blend(*small).note() is None


# --- blends ---------------------------------------------------------------------------------------


def test_weights_as_they_are_written():
    wanted = (Fraction(3, 10), Fraction(7, 10))
    for weights in ([0.3, 0.7], ["0.3", "0.7"], [3, 7], ["30", 70.0]):
        assert [maker(weights).weights for maker in MAKERS] == [wanted] * 2
    thirds = Mixture([0.333, 0.333, 0.333]).weights
    assert thirds == (Fraction(1, 3),) * 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.3, 0.3, 0.3], r"0.3, a sum of 0.9; wanted fractions that sum to 1; fix: .*0.3333"),
        ([1, -2, math.nan, 0], r"\[1\]: got -2;(.|\n)*\[2\]: got nan;(.|\n)*\[3\]: got 0;"),
        ([math.inf, 1], r"weights\[0\]: got inf; wanted a finite number above 0"),
        ([], "weights: got nothing, a sum of 0"),
    ],
)
def test_weights_that_make_no_sense(weights, message):
    for maker in MAKERS:
        with pytest.raises(ValueError, match=message):
            maker(weights)


def test_a_block_has_a_sample_of_every_source():
    with pytest.raises(
        ValueError, match=r"weights\[1\]: got 1e-06 of all; wanted at least 1.53e-05"
    ):
        GreedyMixture([10**6, 1])


@pytest.fixture
def texts(tmp_path):
    found = []
    for i, size in enumerate((50, 333, 190)):
        file = tmp_path / f"{i}.txt"
        file.write_bytes(bytes([*b"abc"][i : i + 1]) * (size - 1) + b"\n")
        found.append(TextWindows(file, 8, seed=i))
    return found


def test_a_batch_has_each_source_s_own_samples(texts):
    blend = Blend(texts, [1, 2, 1], ["a", "b", "a"])
    rows = [blend.batch(step, 8) for step in range(40)]
    first = torch.cat([batch["tokens"][:, 0] for batch in rows]).tolist()
    assert first == [b"abc"[i] for i in blend.mixture.at(np.arange(320))[0]]
    own = [texts[i].draw(np.arange(n))["targets"] for i, n in enumerate((80, 160, 80))]
    drawn = torch.cat([batch["targets"] for batch in rows])
    for i, wanted in enumerate(own):
        mine = torch.tensor([byte == b"abc"[i] for byte in first])
        assert torch.equal(drawn[mine], wanted)
    assert blend.positions(320) == {"a": 160, "b": 160}
    assert blend.summary().startswith("0.25 a: 50 bytes in 1 documents; 0.5 b: ")


@pytest.fixture(scope="module")
def blend():
    texts = [TextWindows(None, 8, seed=seed) for seed in (1, 2)]
    return Blend([texts[0], Blend(texts, [0.5, 0.5])], [0.25, 0.75])  # also a blend of a blend


@settings(max_examples=20, deadline=None)
@given(step=st.integers(0, 10**9), parts=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_parts_are_parts_of_one_batch(blend, step, parts):
    whole = blend.batch(step, 12)
    found = [blend.batch(step, 12, (index, parts)) for index in range(parts)]
    assert set(whole) == {"tokens", "targets", "rows"}
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in found]), leaf)


def test_as_many_weights_as_sources(texts):
    with pytest.raises(ValueError, match="weights: got 1 for 3 sources") as caught:
        Blend(texts, [1], ["a", "b"])
    assert "one for each, and at least 1 source; fix: give as many, or None: all" in str(
        caught.value
    )
    assert "names: got 2 for 3 sources" in str(caught.value)
    assert "fix: give as many, or None: numbers" in str(caught.value)
    with pytest.raises(ValueError, match="weights: got 0 for 0 sources"):
        Blend([], [])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_an_exhaustive_blend_has_every_sample_of_every_source_once_an_epoch(sizes):
    blend, total = Exhaustive(sizes), sum(sizes)
    sources, own = blend.at(np.arange(2 * total))
    for epoch in (0, 1):
        part = slice(epoch * total, (epoch + 1) * total)
        for source, size in enumerate(sizes):
            mine = own[part][sources[part] == source]
            assert mine.tolist() == list(range(epoch * size, (epoch + 1) * size))  # in its order
    for samples in {0, 1, total // 2, total, total + 1, 2 * total}:
        counted = np.bincount(sources[:samples], minlength=len(sizes))
        assert blend.positions(samples).tolist() == counted.tolist()
    counts = np.stack([np.cumsum(sources[:total] == i) for i in range(len(sizes))])
    shares = np.outer(sizes, np.arange(1, total + 1)) / total
    assert np.abs(counts - shares).max() < 2  # spread evenly
    at = np.array([[3, 0], [total, 1]])
    assert np.array_equal(blend.at(at)[0].ravel(), blend.at(at.ravel())[0])


def test_an_exhaustive_blend_of_texts(texts):
    sizes = [text.num_samples for text in texts]
    blend, total = Blend(texts, None, "abc"), sum(sizes)
    first = blend.draw(np.arange(total))["tokens"]
    wanted = torch.cat(
        [text.draw(np.arange(n))["tokens"] for text, n in zip(texts, sizes, strict=True)]
    )
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, wanted.tolist()))
    assert blend.progress(total)["b"] == {"samples": sizes[1], "epochs": 1.0}
    assert parse_blend("all a all 'b c'") == [("all", "a"), ("all", "b c")]
    with pytest.raises(ValueError, match=r"got '0\.5' before 'b'; wanted all"):
        parse_blend("all a 0.5 b")
    with pytest.raises(ValueError, match=r"sources\[1\]: got no num_samples"):
        Blend([texts[0], blend], None)
    with pytest.raises(ValueError, match=r"sizes\[1\]: got 0; wanted at least 1"):
        Exhaustive([1, 0])
    with pytest.raises(ValueError, match="fix: give weights in place of all"):
        Exhaustive([1 << 30, 1])
