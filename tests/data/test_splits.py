"""Parts of a file of tokens: every document in one, and each a file of tokens of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from functron.data import IndexedWriter, open_tokens, split, split_documents


@given(
    documents=st.integers(1, 10**9),
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
)
def test_every_document_is_in_exactly_one_part(documents, weights):
    total = sum(weights)
    # a larger share than one document cannot round to none of them
    assume(all(not weight or weight * documents > total for weight in weights))
    parts = split_documents(documents, weights)
    ranges = list(parts.values())
    assert (ranges[0].start, ranges[-1].stop) == (0, documents)
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    for name, weight in zip(("train", "validation", "test"), weights, strict=False):
        assert (name in parts) == (weight > 0)
        if weight:
            # both bounds are within a half of where they would be
            assert abs(len(parts[name]) * total - weight * documents) <= total


def test_weights_as_they_are_written():
    wanted = {"train": range(969), "validation": range(969, 999), "test": range(999, 1000)}
    ways = ("969,30,1", "0.969, 0.03, 0.001", [0.969, 0.03, 0.001], [96.9e-2, "0.03", 1e-3])
    for weights in ways:
        assert split_documents(1000, weights) == wanted
    assert split_documents(7, "1") == {"train": range(7)}
    assert split_documents(7, "0,1,0") == {"validation": range(7)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("0.9,0.05", "split: got 0.9, 0.05, a sum of 0.95; wanted fractions that sum to 1; fix"),
        ("90,nan,-1", r"split\[1\]: got nan; wanted a finite number(.|\n)*split\[2\]: got -1"),
        ("0,0,0", "a sum of 0"),
        ("", "got ; wanted a finite number"),
        ("9,1,x", r"split\[2\]: got x"),
        ("1,1,1,1", "split: got 4 weights; wanted at most 3: train, validation, test"),
        ("999,1,1", "split, validation: got 0.000999 of 20 documents, which is none of them"),
    ],
)
def test_weights_that_make_no_sense(weights, message):
    with pytest.raises(ValueError, match=message):
        split_documents(20, weights)


def test_parts_are_files_of_tokens(tmp_path):
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 200, size) for size in (4, 1, 30, 7, 12, 3, 5, 6, 2, 9)]
    with IndexedWriter(tmp_path / "text", np.uint16) as writer:
        for document in documents:
            writer.add(document)
    parts = split(open_tokens(tmp_path / "text"), "5,3,2")
    row = [parts[name].read(0, parts[name].num_tokens) for name in parts]
    np.testing.assert_array_equal(np.concatenate(row), np.concatenate(documents))
    part = parts["validation"]
    assert (part.num_documents, part.num_tokens, part.dtype) == (3, 14, np.uint16)
    assert part.starts(np.arange(4)).tolist() == [0, 3, 8, 14]
    assert part.documents_of(np.arange(14)).tolist() == [0] * 3 + [1] * 5 + [2] * 6
    assert part.documents_of(np.array(13)) == 2
    for start, length in ((-1, 2), (13, 2)):
        with pytest.raises(IndexError, match=r"text \(validation\)"):
            part.read(start, length)
    with pytest.raises(IndexError):
        part.documents_of(np.array(14))
