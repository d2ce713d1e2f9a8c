"""Mock data: any part by itself, and corpora of any size."""

from __future__ import annotations

import numpy as np
import pytest

from functron.data import MockTokens


def test_parts_are_parts_of_the_whole():
    mock = MockTokens(1000, 77, document=64, seed=3)
    whole = mock.read(0, 1000)
    assert (mock.num_documents, whole.dtype) == (16, np.uint16)
    np.testing.assert_array_equal(mock.read(123, 456), whole[123 : 123 + 456])
    starts = mock.starts(np.arange(17))
    assert starts.tolist() == [*range(0, 1000, 64), 1000]
    wanted = np.searchsorted(starts, np.arange(1000), side="right") - 1
    np.testing.assert_array_equal(mock.documents_of(np.arange(1000)), wanted)
    assert mock.documents_of(np.array(999)) == 15
    assert (MockTokens(1000, 77, seed=4).read(0, 1000) != whole).mean() > 0.9
    with pytest.raises(IndexError, match="mock: got tokens 999 to 1001"):
        mock.read(999, 2)


def test_all_tokens_are_equally_frequent():
    counts = np.bincount(MockTokens(200_000, 100).read(0, 200_000), minlength=100)
    chi = float(((counts - 2000) ** 2 / 2000).sum())
    assert 99 - 5 * 198**0.5 < chi < 99 + 5 * 198**0.5  # the mean and deviation of chi square


def test_sizes_below_one():
    with pytest.raises(ValueError, match=r"num_tokens: got 0; (.|\n)*vocab_size: got -1;"):
        MockTokens(0, -1)
