"""Blends: weights, the order of sources, and the same batch on any number of parts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functron.data import Blend, ByteText, Mixture
from functron.data.blend import BLOCK, Exhaustive, parse_blend

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


def test_ties_by_hand():
    """Deficits of [1, 2, 7] in tenths: 1 2 7, 2 4 4, 3 -4 11, 4 -2 8, 5 0 5."""
    assert Mixture([1, 2, 7]).at(np.arange(5))[0].tolist() == [2, 1, 2, 2, 0]


@settings(max_examples=12, deadline=None)
@given(weights=WEIGHTS)
@example([1, 2, 7])
@example([1, 2, 3])
@example([0.3, 0.7])
@example([0.1, 0.2, 0.3, 0.4])
@example(["0.333333333333", "0.333333333334", "0.333333333333"])
@example([1, 1, 2])
def test_the_largest_deficit_goes_next_and_of_equals_the_first(weights):
    sources, _ = Mixture(weights).at(np.arange(400))
    assert sources.tolist() == greedy(weights, 400)


@settings(max_examples=8, deadline=None)
@given(weights=WEIGHTS)
def test_counts_stay_close_to_their_shares(weights):
    mixture = Mixture(weights)
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


@settings(max_examples=8, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 2**50))
def test_positions_are_counts(weights, start):
    mixture = Mixture(weights)
    numbers = start + np.arange(2 * BLOCK + 3)
    sources, own = mixture.at(numbers)
    before, after = mixture.positions(start), mixture.positions(start + len(numbers))
    assert before.sum() == start
    for i in range(len(weights)):
        # every sample of a source once, in order, whatever block they lie in
        np.testing.assert_array_equal(own[sources == i], np.arange(before[i], after[i]))


def test_weights_as_they_are_written():
    wanted = (Fraction(3, 10), Fraction(7, 10))
    for weights in ([0.3, 0.7], ["0.3", "0.7"], [3, 7], ["30", 70.0]):
        assert Mixture(weights).weights == wanted
    thirds = Mixture([0.333, 0.333, 0.333]).weights
    assert thirds == (Fraction(1, 3),) * 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.3, 0.3, 0.3], r"0.3, a sum of 0.9; wanted fractions that sum to 1; fix: .*0.3333"),
        ([1, -2, math.nan, 0], r"\[1\]: got -2;(.|\n)*\[2\]: got nan;(.|\n)*\[3\]: got 0;"),
        ([math.inf, 1], r"weights\[0\]: got inf; wanted a finite number above 0"),
        ([], "weights: got nothing, a sum of 0"),
        ([10**6, 1], r"weights\[1\]: got 1e-06 of all; wanted at least 1.53e-05"),
    ],
)
def test_weights_that_make_no_sense(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(weights)


@pytest.fixture
def texts(tmp_path):
    found = []
    for i, size in enumerate((50, 333, 190)):
        file = tmp_path / f"{i}.txt"
        file.write_bytes(bytes([*b"abc"][i : i + 1]) * (size - 1) + b"\n")
        found.append(ByteText(file, 8, seed=i))
    return found


def test_a_batch_has_each_source_s_own_samples(texts):
    blend = Blend(texts, [1, 2, 1], ["a", "b", "a"])
    rows = [blend.batch(step, 8) for step in range(40)]
    first = torch.cat([batch["tokens"][:, 0] for batch in rows]).tolist()
    assert first == [b"abc"[i] for i in greedy([1, 2, 1], 320)]
    own = [texts[i].draw(np.arange(n))["targets"] for i, n in enumerate((80, 160, 80))]
    drawn = torch.cat([batch["targets"] for batch in rows])
    for i, wanted in enumerate(own):
        mine = torch.tensor([byte == b"abc"[i] for byte in first])
        assert torch.equal(drawn[mine], wanted)
    assert blend.positions(320) == {"a": 160, "b": 160}
    assert blend.summary().startswith("0.25 a: 50 bytes in 1 documents; 0.5 b: ")


@pytest.fixture(scope="module")
def blend():
    texts = [ByteText(None, 8, seed=seed) for seed in (1, 2)]
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
    with pytest.raises(ValueError, match="weights: got 1 for 3 sources"):
        Blend(texts, [1])
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
    assert np.abs(counts - shares).max() <= 1.5  # spread evenly
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
