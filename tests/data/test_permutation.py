"""Shuffles by formula: bijections, different for every key, and well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functron.data import permute
from functron.data.sampling import Gaps


@given(size=st.integers(1, 3000), key=st.integers(-(2**70), 2**70))
def test_is_a_bijection(size, key):
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


@given(
    size=st.integers(2**40, 2**62),
    key=st.integers(0, 2**64 - 1),
    indices=st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=200, unique=True),
)
def test_huge_domains_stay_in_range_and_injective(size, key, indices):
    image = permute(np.array(indices), size, key)
    assert image.min() >= 0
    assert image.max() < size
    assert len(set(image.tolist())) == len(indices)


def test_one_index_at_a_time_is_the_same_function():
    whole = permute(np.arange(97), 97, 5)
    assert [int(permute(np.array(i), 97, 5)) for i in range(97)] == whole.tolist()
    np.testing.assert_array_equal(
        permute(np.arange(96).reshape(8, 12), 97, 5), whole[:96].reshape(8, 12)
    )


def test_keys_give_unrelated_orders():
    a, b = (permute(np.arange(10_000), 10_000, key) for key in (0, 1))
    # two random permutations agree in one place on average; ten has probability 1e-7
    assert (a == b).sum() < 10
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a, np.arange(10_000))[0, 1]) < 0.05


def test_every_place_is_equally_likely():
    # where index 0 of 10 goes, over 1000 keys: chi-squared with 9 degrees of freedom, p < 1e-4
    counts = np.bincount([int(permute(np.array(0), 10, key)) for key in range(1000)], minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 33.7


def test_indices_outside_are_refused():
    with pytest.raises(ValueError, match="got indices from 0 to 5; wanted 0 to 4"):
        permute(np.array([0, 5]), 5, 0)
    with pytest.raises(ValueError, match="from -1"):
        permute(np.array([-1]), 5, 0)


def test_gaps_leave_out_what_they_say():
    gaps = Gaps.parse("40:44, 8:10 42:48")
    assert str(gaps) == "8:10 40:48"
    left = [n for n in range(100) if not (8 <= n < 10 or 40 <= n < 48)]
    assert [gaps.number(count) for count in range(90)] == left
    assert gaps.number(np.arange(90)).tolist() == left
    # what comes as 30 ... 49 is left out as well, whatever lies between
    more = gaps.without(30, 50)
    assert [more.number(count) for count in range(70)] == [*left[:30], *left[50:90]]
    assert Gaps.of([]).number(5) == 5
    for text in ("4", "4:x", "8:8"):
        with pytest.raises(ValueError, match="leave out"):
            Gaps.parse(text)
