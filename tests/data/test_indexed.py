"""Megatron's indexed files: bytes by hand, reading, writing, merging, size, and what is refused."""

from __future__ import annotations

import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functron.data.indexed import IndexedFile, IndexedWriter, merge
from functron.data.shards import verify
from tests.data.megatron_bytes import CODES, expected, write

# two documents, [1, 2, 3] and [500], as uint16, by the layout in functron/data/indexed.py
HAND_BIN = bytes.fromhex("0100 0200 0300 f401")
HAND_IDX = bytes.fromhex(
    "4d4d49444944580000"  # MMIDIDX\0\0
    "0100000000000000"  # version 1
    "08"  # uint16
    "0200000000000000"  # two sequences
    "0300000000000000"  # two documents and one
    "03000000 01000000"  # their lengths
    "0000000000000000 0600000000000000"  # their pointers: bytes
    "0000000000000000 0100000000000000 0200000000000000"  # the documents' first sequences
)


def both(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_bytes_by_hand(tmp_path):
    assert expected([[[1, 2, 3]], [[500]]], "uint16") == (HAND_BIN, HAND_IDX)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.add(np.array([500]))
    assert both(tmp_path / "a") == (HAND_BIN, HAND_IDX)
    file = IndexedFile(write(tmp_path / "b", HAND_BIN, HAND_IDX))
    assert (file.num_documents, file.num_sequences, file.num_tokens) == (2, 2, 4)
    assert file.dtype == np.uint16
    assert file.read(0, 4).tolist() == [1, 2, 3, 500]
    assert [file.document(i).tolist() for i in range(2)] == [[1, 2, 3], [500]]
    assert file.documents_of(np.arange(4)).tolist() == [0, 0, 0, 1]
    assert file.starts(np.arange(3)).tolist() == [0, 3, 4]
    assert [file.lengths.tolist(), file.pointers.tolist()] == [[3, 1], [0, 6]]
    verify(file, vocab_size=501)
    # by a path with either ending, and in another process
    for name in ("b.bin", "b.idx"):
        assert pickle.loads(pickle.dumps(IndexedFile(tmp_path / name))).num_tokens == 4


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype(tmp_path, dtype):
    documents = [[[1, 2], [3]], [[100]]]
    with IndexedWriter(tmp_path / "a", np.dtype(dtype)) as writer:
        writer.add([1, 2, 3], lengths=[2, 1])
        writer.add([100])
    assert both(tmp_path / "a") == expected(documents, dtype)
    file = IndexedFile(tmp_path / "a")
    assert file.dtype == np.dtype(dtype)
    assert [file.sequence(i).tolist() for i in range(3)] == [[1, 2], [3], [100]]
    verify(file)
    for path in (tmp_path / "a", str(tmp_path / "a.bin")):  # as merge takes them
        verify(path)
    with pytest.raises(ValueError, match="nothing there"):
        verify(tmp_path / "b")


@st.composite
def corpora(draw):
    tokens = st.lists(st.integers(0, 40000), min_size=1, max_size=5)
    return draw(st.lists(st.lists(tokens, max_size=3), max_size=6))


@settings(max_examples=25)
@given(corpora(), st.sampled_from(["uint16", "int32", "int64"]))
def test_round_trips(tmp_path_factory, documents, dtype):
    """Written, they are Megatron's bytes; read, they are the documents; empty ones included."""
    prefix = tmp_path_factory.mktemp("round") / "a"
    with IndexedWriter(prefix, np.dtype(dtype), allow_empty=True) as writer:
        for document in documents:
            writer.add([t for s in document for t in s], [len(s) for s in document])
    assert both(prefix) == expected(documents, dtype)
    file = IndexedFile(prefix)
    verify(file, allow_empty=True)
    flat = [[t for s in document for t in s] for document in documents]
    assert [file.document(i).tolist() for i in range(len(flat))] == flat
    owner = [i for i, document in enumerate(flat) for _ in document]
    assert file.documents_of(np.arange(len(owner))).tolist() == owner
    assert file.read(0, len(owner)).tolist() == [t for document in flat for t in document]
    # many documents at once give the same bytes as one after another
    if all(len(document) <= 1 for document in documents):
        with IndexedWriter(prefix.with_name("b"), np.dtype(dtype), allow_empty=True) as writer:
            writer.extend([t for x in flat for t in x], [len(x) for x in flat])
        assert both(prefix.with_name("b")) == both(prefix)


def test_merging(tmp_path):
    parts = [[[[1, 2], [3]], []], [[[4]]], [], [[[5, 6]], [[7]]]]
    for index, part in enumerate(parts):
        write(tmp_path / f"part{index}", *expected(part, "int32"))
    sources = [tmp_path / f"part{index}" for index in range(4)]
    file = merge(tmp_path / "all", sources)
    assert both(tmp_path / "all") == expected([x for part in parts for x in part], "int32")
    assert file.num_documents == 5
    write(tmp_path / "other", HAND_BIN, HAND_IDX)
    with pytest.raises(ValueError, match=r"other\.idx, offset 17: got uint16; wanted int32"):
        merge(tmp_path / "bad", [*sources, tmp_path / "other"])
    with pytest.raises(ValueError, match="sources: got none"):
        merge(tmp_path / "bad", [])
    # lengths that do not add up to what is in .bin, though the last pointer does
    data, index = expected([[[1, 2], [3], [4]]], "int32")
    write(tmp_path / "odd", data, index[:34] + struct.pack("<i", 7) + index[38:])
    with pytest.raises(ValueError, match="got lengths of 9 tokens in all; wanted 4"):
        merge(tmp_path / "bad", [tmp_path / "odd"])
    assert not list(tmp_path.glob("bad*"))
    assert not list(tmp_path.glob(".*"))


def test_modes_of_several_modalities(tmp_path):
    documents, modes = [[[1, 2], [3]], [[4]]], [0, 1, 1]
    for name in "ab":
        with IndexedWriter(tmp_path / name, np.uint8, modes=True) as writer:
            writer.add([1, 2, 3], [2, 1], modes=modes[:2])
            writer.add([4], modes=[1])
    assert both(tmp_path / "a") == expected(documents, "uint8", modes)
    assert IndexedFile(tmp_path / "a").modes.tolist() == modes
    merge(tmp_path / "ab", [tmp_path / "a", tmp_path / "b"])
    assert both(tmp_path / "ab") == expected(documents * 2, "uint8", modes * 2)
    write(tmp_path / "plain", *expected(documents, "uint8"))
    assert IndexedFile(tmp_path / "plain").modes is None
    with pytest.raises(ValueError, match="got without modes; wanted with modes"):
        merge(tmp_path / "bad", [tmp_path / "a", tmp_path / "plain"])


def test_opening_takes_as_long_for_any_size(tmp_path):
    """10^8 documents, and 2 * 10^11 bytes of tokens, as files with holes."""
    count, tokens = 10**8, 1000
    last = 2 * tokens * (count - 1)
    with (tmp_path / "a.idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1))
        for at, form, value in [
            (34 + 4 * (count - 2), "<ii", (tokens, tokens)),
            (34 + 4 * count + 8 * (count - 2), "<qq", (2 * tokens * (count - 2), last)),
            (34 + 12 * count + 8 * (count - 1), "<qq", (count - 1, count)),
        ]:
            stream.seek(at)
            stream.write(struct.pack(form, *value))
    with (tmp_path / "a.bin").open("wb") as stream:
        stream.truncate(2 * tokens * count)
    begun = time.perf_counter()
    file = IndexedFile(tmp_path / "a")
    assert (file.num_documents, file.num_tokens) == (count, tokens * count)
    assert file.read(file.num_tokens - 3, 3).tolist() == [0, 0, 0]
    assert file.starts(np.array([0, count - 1, count])).tolist() == [
        0, tokens * (count - 1), tokens * count,
    ]  # fmt: skip
    file.documents_of(np.array(file.num_tokens - 1))  # bisects, without copying a table
    assert time.perf_counter() - begun < 1


def test_nothing_is_left_of_what_failed(tmp_path):
    writer = IndexedWriter(tmp_path / "a", np.uint16)
    writer.__enter__()
    writer.add([1])
    assert len(list(tmp_path.glob(".a.bin.*/*"))) == 5
    assert not list(tmp_path.glob("a.*"))
    writer.__exit__(RuntimeError, None, None)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "a", HAND_BIN, HAND_IDX)
    with pytest.raises(ValueError, match=r"a\.idx: got an existing file; wanted a new one"):
        IndexedWriter(tmp_path / "a", np.uint16)
    with IndexedWriter(tmp_path / "a", np.uint16, overwrite=True) as writer:
        writer.add([7])
    assert IndexedFile(tmp_path / "a").read(0, 1).tolist() == [7]


def test_what_writers_refuse(tmp_path):
    with pytest.raises(ValueError, match="dtype: got float16; wanted one of uint8"):
        IndexedWriter(tmp_path / "a", np.float16)
    with pytest.raises(ValueError, match=r"got uint16, whose largest id is 65535; .*as int32"):
        IndexedWriter(tmp_path / "a", np.uint16, vocab_size=70000)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add([1, 2])
        for tokens, said in [
            ([], r"a\.bin: document 1, offset 4: got no tokens; wanted at least 1; fix: leave"),
            ([3, 70000], r"document 1, offset 6: got token id 70000; wanted 0 to 65535"),
            ([3, -1], r"document 1, offset 6: got token id -1; wanted 0 to 65535"),
            ([0.5], r"got float64 \[1\]; wanted uint16 \[n\]"),
            ([[1]], r"got int64 \[1, 1\]; wanted uint16 \[n\]"),
        ]:
            with pytest.raises(ValueError, match=said):
                writer.add(tokens)
        with pytest.raises(ValueError, match="got sequences of 3 tokens; wanted 2 tokens"):
            writer.add([1, 2], [3])
        with pytest.raises(ValueError, match="document 2, offset 6: got no tokens"):
            writer.extend([1, 2], [1, 0, 1])
        with pytest.raises(ValueError, match="document 2, offset 8: got token id 99999"):
            writer.extend([1, 2, 99999], [2, 1])
        with pytest.raises(ValueError, match="got 1 modes; wanted none: this file has no modes"):
            writer.add([1], modes=[1])
        writer.add([3])
    assert IndexedFile(tmp_path / "a").read(0, 3).tolist() == [1, 2, 3]
    with (
        IndexedWriter(tmp_path / "b", np.int32, vocab_size=10) as writer,
        pytest.raises(ValueError, match="got token id 10; wanted 0 to 9"),
    ):
        writer.add([9, 10])


@pytest.mark.parametrize(
    ("data", "index", "said"),
    [
        (HAND_BIN, b"XX" + HAND_IDX[2:], r"a\.idx, offset 0: got the bytes b'XX"),
        (HAND_BIN, b"TNTIDX\0\0" + HAND_IDX[8:], "got TNTIDX: a file of Megatron's older kinds"),
        (HAND_BIN, b"", r"a\.idx: got the end of the file at offset 0; wanted a header of 34"),
        (HAND_BIN, HAND_IDX[:33], r"a\.idx: got the end of the file at offset 33"),
        (HAND_BIN, HAND_IDX[:9] + b"\2" + HAND_IDX[10:], r"a\.idx, offset 9: got version 2"),
        (HAND_BIN, HAND_IDX[:17] + b"\11" + HAND_IDX[18:], "offset 17: got dtype code 9; wanted"),
        (HAND_BIN, HAND_IDX[:26] + bytes(8) + HAND_IDX[34:], "offset 26: got 0 document indices"),
        (HAND_BIN, HAND_IDX[:40], "cut off at offset 40, in its lengths"),
        (HAND_BIN, HAND_IDX[:50], "cut off at offset 50, in its pointers"),
        (HAND_BIN, HAND_IDX[:-1], "got 81 bytes; wanted 82 bytes, for 2 sequences and 2 documents"),
        (HAND_BIN, HAND_IDX + b"\0", "the index ends at offset 82"),
        (HAND_BIN[:-1], HAND_IDX, r"a\.bin: got 7 bytes; wanted 8 bytes.*cut off at offset 7"),
        (HAND_BIN + b"\0", HAND_IDX, r"a\.bin: got 9 bytes; .*goes on after offset 8"),
        (HAND_BIN, HAND_IDX[:42] + b"\2" + HAND_IDX[43:], "offset 42: got pointer 2; wanted 0"),
        (HAND_BIN, HAND_IDX[:58] + b"\1" + HAND_IDX[59:], "offset 58: got document index 1"),
        (HAND_BIN, HAND_IDX[:74] + b"\3" + HAND_IDX[75:], "offset 74: got document index 3; wanted 2"),
        (HAND_BIN, HAND_IDX[:18] + b"\xff" * 8 + HAND_IDX[26:], "for 18446744073709551615 seq"),
    ],
)  # fmt: skip
def test_what_opening_refuses(tmp_path, data, index, said):
    write(tmp_path / "a", data, index)
    with pytest.raises(ValueError, match=said) as caught:
        IndexedFile(tmp_path / "a")
    assert "cannot open an indexed file" in str(caught.value)


def test_missing_files_and_small_dtypes(tmp_path):
    with pytest.raises(ValueError, match=r"a\.idx: got No such file or directory"):
        IndexedFile(tmp_path / "a")
    write(tmp_path / "a", HAND_BIN, HAND_IDX)
    with pytest.raises(ValueError, match=r"a\.idx, offset 17: got uint16, whose largest id"):
        IndexedFile(tmp_path / "a", vocab_size=128000)
    file = IndexedFile(tmp_path / "a", vocab_size=65536)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin: got No such file"):
        IndexedFile(tmp_path / "a")
    for wrong in ((-1, 2), (0, 5), (4, 1), (0, -1)):
        with pytest.raises(IndexError, match="wanted a part of 0 to 4"):
            file.read(*wrong)
    with pytest.raises(IndexError):
        file.documents_of(np.array([4]))
    for call in (file.document, file.sequence):
        with pytest.raises(IndexError, match="wanted 0 to 1"):
            call(2)


def test_verify_finds_what_opening_does_not(tmp_path):
    documents = [[[1, 2]], [[3]], [[4, 5]]]
    data, index = expected(documents, "int32")

    def damaged(at: int, form: str, value: int, **options) -> str:
        changed = index[:at] + struct.pack(form, value) + index[at + struct.calcsize(form) :]
        file = IndexedFile(write(tmp_path / "a", data, changed))
        with pytest.raises(ValueError, match="is damaged") as caught:
            verify(file, **options)
        return str(caught.value)

    said = damaged(38, "<i", 2)
    assert "a.idx, offset 62: got pointer 12 of sequence 2; wanted 16" in said
    assert "offset 38: got length -1 of sequence 1" in damaged(38, "<i", -1)
    assert "offset 54: got pointer 9 of sequence 1; wanted 8" in damaged(54, "<q", 9)
    assert "got document 0 from sequence 0 to 7" in damaged(78, "<q", 7)
    assert "offset 78: got document 1 from sequence 2 to 1" not in damaged(78, "<q", 9)
    said = damaged(78, "<q", 0)
    assert "a.idx, offset 70: got document 0 without tokens; wanted at least 1" in said
    file = IndexedFile(write(tmp_path / "a", data, index))
    verify(file, vocab_size=6)
    with pytest.raises(ValueError, match=r"a\.bin, offset 16: got token id 5 in document 2"):
        verify(file, vocab_size=5)
    negative = data[:8] + struct.pack("<i", -7) + data[12:]
    with pytest.raises(ValueError, match=r"a\.bin, offset 8: got token id -7 in document 1"):
        verify(IndexedFile(write(tmp_path / "a", negative, index)))
    empty = expected([[[1]], [], [[2]]], "uint8")
    file = IndexedFile(write(tmp_path / "a", *empty))
    verify(file, allow_empty=True)
    with pytest.raises(ValueError, match="offset 66: got document 1 without tokens"):
        verify(file)
    with pytest.raises(ValueError, match="got uint8, whose largest id is 255"):
        verify(file, vocab_size=300, allow_empty=True)
    many = expected([[[9] * 30]], "uint8")
    with pytest.raises(ValueError, match="the first 20 mistakes"):
        verify(IndexedFile(write(tmp_path / "a", *many)), vocab_size=5)
