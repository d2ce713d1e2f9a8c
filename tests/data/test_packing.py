"""Packed samples: no token lost, and every rank with its part of every document."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron import Mesh, gpt, nn
from functron.data import balance, pack
from functron.data.packing import IGNORED
from tests.data.documents import CONFIGS, check_equal, check_whole, documents, texts

SEQ = 24
LENGTHS = st.lists(st.integers(1, SEQ), min_size=1, max_size=30)


def first_fit(lengths: list[int], room: int) -> list[list[int]]:
    samples: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for sample in samples:
            if sum(lengths[j] for j in sample) + lengths[i] <= room:
                sample.append(i)
                break
        else:
            samples.append([i])
    return samples


@given(lengths=LENGTHS, multiple=st.sampled_from([1, 2, 4, 8]), decreasing=st.booleans())
def test_packs_every_token_once(lengths, multiple, decreasing):
    docs = documents(lengths)
    batch = pack(docs, SEQ, multiple=multiple, decreasing=decreasing)
    check_whole(batch, docs)
    assert batch["tokens"].shape[1] == SEQ
    assert batch["rows"].tolist() == list(range(len(batch["tokens"])))
    for row in batch["segments"]:
        numbers, counts = row.unique_consecutive(return_counts=True)
        assert len(numbers.unique()) == len(numbers)  # side by side
        assert (counts % multiple == 0).all()


@given(lengths=LENGTHS)
def test_is_first_fit_longest_first(lengths):
    batch = pack(documents(lengths), SEQ)
    got = [row.unique_consecutive().tolist() for row in batch["segments"]]
    assert got == first_fit(lengths, SEQ)


def test_a_small_example():
    batch = pack([np.array([7, 8, 9]), np.array([5]), np.array([3, 4], np.uint16)], 5, pad=1)
    assert batch["tokens"].tolist() == [[7, 8, 9, 3, 4], [5, 1, 1, 1, 1]]
    assert batch["targets"].tolist() == [[8, 9, IGNORED, 4, IGNORED], [IGNORED] * 5]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch["segments"].tolist() == [[0, 0, 0, 2, 2], [1] * 5]
    assert IGNORED == nn.IGNORE_INDEX


@given(
    lengths=st.lists(st.integers(1, 2 * SEQ), min_size=1, max_size=12).filter(
        lambda x: min(x) <= SEQ
    )
)
def test_overlong_documents(lengths):
    docs = documents(lengths)
    check_whole(pack(docs, SEQ, overlong="cut"), [x[:SEQ] for x in docs])
    fits = [i for i, n in enumerate(lengths) if n <= SEQ]
    check_whole(pack(docs, SEQ, overlong="drop"), docs, fits)


def test_what_cannot_be_packed_is_refused():
    docs = documents([3, 30, 26])
    with pytest.raises(
        ValueError, match=r"documents\[1\]: got 30 tokens; wanted at most seq=24"
    ) as e:
        pack(docs, SEQ)
    assert "documents[2]" in str(e.value)
    assert "raise seq to 30" in str(e.value)
    with pytest.raises(ValueError, match="nothing to pack"):
        pack(docs[1:], SEQ, overlong="drop")
    with pytest.raises(ValueError, match=r"documents\[1\]: got no tokens; .*leave it out"):
        pack([np.arange(2), np.zeros(0, int)], SEQ)
    with pytest.raises(ValueError, match=r"documents\[0\]: got float64 \[2\]"):
        pack([np.zeros(2)], SEQ)
    with pytest.raises(ValueError, match=r"documents\[0\]: got int64 \[2, 2\]"):
        pack([np.zeros((2, 2), np.int64)], SEQ)
    with pytest.raises(ValueError, match="got none"):
        pack([], SEQ)
    with pytest.raises(ValueError, match=r"seq: got 24; .* multiple of 16; fix: use seq=32"):
        pack(docs, SEQ, multiple=16)
    with pytest.raises(ValueError, match="refuse, cut or drop"):
        pack(docs, SEQ, overlong="keep")  # type: ignore  (a wrong word: that is the test)
    with pytest.raises(ValueError, match="first 20 of 25"):
        pack([np.zeros(0, int)] * 25, SEQ)


def test_thousands_of_documents_pack_tightly():
    lengths = np.random.default_rng(0).integers(1, 400, 5000).tolist()
    batch = pack([np.zeros(n, np.int64) for n in lengths], 4096)
    assert len(batch["tokens"]) <= -(-sum(lengths) // 4096) + 1


@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 3, 4]), early_padding=st.booleans())
def test_every_rank_has_equal_parts_of_every_document(lengths, cp, early_padding):
    docs = documents(lengths)
    multiple = 2 * cp if early_padding else 1
    samples = pack(docs, SEQ, multiple=multiple)
    batch = balance(samples, cp)
    check_whole(batch, docs)
    seq = batch["tokens"].shape[1]
    most = max(len(row.unique()) for row in samples["segments"])
    assert seq <= SEQ + (2 * cp - 1) * most
    assert seq == SEQ or multiple == 1
    for segments, positions in zip(batch["segments"], batch["positions"], strict=True):
        for number in segments.unique():
            chunks = [(s == number).sum().item() for s in segments.chunk(2 * cp)]
            assert len(set(chunks)) == 1  # halves of ranks
            chunk = chunks[0]
            for rank in range(cp):
                halves = slice(2 * rank, 2 * rank + 2)
                early, late = (
                    p[s == number].tolist()
                    for s, p in zip(
                        segments.chunk(2 * cp)[halves], positions.chunk(2 * cp)[halves], strict=True
                    )
                )
                other = 2 * cp - 1 - rank
                assert early == list(range(rank * chunk, (rank + 1) * chunk))
                assert late == list(range(other * chunk, (other + 1) * chunk))


def test_a_balanced_example():
    docs = [np.arange(10, 18), np.arange(20, 23)]
    batch = balance(pack(docs, 11), 2, pad=99)
    first, second = [10, 11, 20, 16, 17, 99], [12, 13, 21, 14, 15, 22]
    assert batch["tokens"].tolist() == [first + second]
    assert batch["positions"].tolist() == [[0, 1, 0, 6, 7, 3, 2, 3, 1, 4, 5, 2]]
    rows = torch.tensor([5])
    wide = balance({**pack(docs, 11), "rows": rows}, 2, seq=16, pad=99)
    assert wide["tokens"].shape == (1, 16)
    assert wide["rows"] is rows
    check_whole({**wide, "rows": rows}, docs)


def test_what_cannot_be_balanced_is_refused():
    batch = pack(documents([8, 3]), 11)
    with pytest.raises(ValueError, match=r"seq: got 14; .* 2 cp = 4, at least 12; fix: use seq=16"):
        balance(batch, 2, seq=14)
    with pytest.raises(ValueError, match="seq: got 8"):
        balance(batch, 2, seq=8)
    with pytest.raises(ValueError, match="sample 0: got a document in several places"):
        balance(balance(batch, 2), 2)
    with pytest.raises(ValueError, match="positions that do not count by 1"):
        balance({**batch, "positions": batch["positions"].flip(1)}, 2)
    with pytest.raises(ValueError, match=r"segments.*make it with pack"):
        balance({n: x for n, x in batch.items() if n != "segments"}, 2)
    with pytest.raises(ValueError, match="cp: got 0"):
        balance(batch, 0)
    with pytest.raises(ValueError, match="shapes"):
        balance({**batch, "targets": batch["targets"][:, 1:]}, 2)


LENGTHS_OF_TEXTS = [24, 1, 17, 5, 2, 11, 3, 3, 13, 7, 1, 8]
SEQUENCE_PARALLEL = gpt.SEQUENCE_PARALLEL_STREAM
BALANCED, GATHER = (gpt.Context(kind, "balanced") for kind in ("ring", "gather"))
ROWS = [
    (Mesh(cp=2), BALANCED, "full", gpt.STREAM),
    (Mesh(cp=4), BALANCED, "full", gpt.STREAM),
    (Mesh(cp=4), BALANCED, "window", gpt.STREAM),
    (Mesh(cp=4), BALANCED, "ahead", gpt.STREAM),
    (Mesh(cp=4), GATHER, "full", gpt.STREAM),
    (Mesh(cp=4), GATHER, "mixed", gpt.STREAM),
    (Mesh(dp=2, cp=2), BALANCED, "window", gpt.STREAM),
    (Mesh(cp=2, ulysses=2), BALANCED, "mixed", gpt.STREAM),
    (Mesh(cp=2, tp=2), BALANCED, "full", SEQUENCE_PARALLEL),
]


def factors(mesh, context, config, stream):
    """Each model with each kind of context, and each mesh with a ring."""
    return [{"kind": context.kind, "config": config}, {"mesh": mesh}, {"stream": stream}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("mesh", "context", "config", "stream"), ROWS, ids=str)
def test_trains_as_on_every_document_by_itself(mesh, context, config, stream):
    batch = balance(pack(texts(LENGTHS_OF_TEXTS), SEQ), mesh["cp"], seq=SEQ + 32)
    assert len(batch["tokens"]) % 2 == 0
    check_equal(CONFIGS[config], LENGTHS_OF_TEXTS, batch, mesh, context, stream)


def test_without_a_mesh_it_is_the_packed_batch():
    batch = pack(texts(LENGTHS_OF_TEXTS), SEQ)
    check_equal(CONFIGS["full"], LENGTHS_OF_TEXTS, batch, Mesh(), gpt.Context())
