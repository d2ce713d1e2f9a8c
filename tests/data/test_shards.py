"""Shards of tokens as numpy, nanoGPT and llm.c write them, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from functron.data import mapped_files, shards
from functron.data.shards import Shards, is_tokens, open_tokens
from tests.data.megatron_bytes import expected, write


def llm_c(tokens: list[int], magic: int = 20240520, version: int = 1) -> bytes:
    """A file as llm.c's write_datafile writes it: 256 int32, and the tokens."""
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(4 * 253)
    letter = "H" if version == 1 else "I"
    return header + struct.pack(f"<{len(tokens)}{letter}", *tokens)


def test_every_kind(tmp_path):
    (tmp_path / "a.npy").touch()
    np.save(tmp_path / "a.npy", np.array([5, 6, 7], np.uint16))
    (tmp_path / "b.u16").write_bytes(struct.pack("<3H", 5, 6, 7))
    (tmp_path / "c.u32").write_bytes(struct.pack("<3I", 5, 6, 70000))
    (tmp_path / "d.bin").write_bytes(llm_c([5, 6, 7]))
    (tmp_path / "e.bin").write_bytes(llm_c([5, 6, 70000], 20240801, 7))
    (tmp_path / "f.bin").write_bytes(struct.pack("<3i", 5, 6, 70000))
    write(tmp_path / "g", *expected([[[5, 6]], [[7]]], "int32"))
    wide = {"c.u32", "e.bin", "f.bin"}
    for name in ("a.npy", "b.u16", "c.u32", "d.bin", "e.bin", "f.bin", "g", "g.bin", "g.idx"):
        file = open_tokens(tmp_path / name, dtype="int32" if name == "f.bin" else None)
        assert file.read(0, 3).tolist() == [5, 6, 70000 if name in wide else 7]
        assert file.num_tokens == 3
        assert file.num_documents == (2 if name[0] == "g" else 1)
        assert is_tokens(tmp_path / name)
    assert open_tokens(tmp_path / "d.bin").dtype == np.uint16
    assert open_tokens(tmp_path / "e.bin").dtype == np.uint32
    (tmp_path / "text.txt").write_text("text")
    assert not is_tokens(tmp_path / "text.txt")
    assert not is_tokens(tmp_path)
    assert not is_tokens(tmp_path / "nothing")


def test_many_files_are_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_files, "MAX_OPEN_FILES", 2)
    pieces = [list(range(10 * i, 10 * i + 3 + i)) for i in range(5)]
    for index, piece in enumerate(pieces):
        (tmp_path / f"train_{index:06}.bin").write_bytes(llm_c(piece))
    (tmp_path / ".hidden.bin").write_bytes(b"")
    file, row = open_tokens(tmp_path), [token for piece in pieces for token in piece]
    assert is_tokens(tmp_path)
    assert file.num_tokens == len(row)
    for start in range(len(row)):
        for length in range(len(row) - start + 1):
            assert file.read(start, length).tolist() == row[start : start + length]
    assert file.num_documents == 5
    assert file.starts(np.arange(6)).tolist() == [0, 3, 7, 12, 18, 25]
    owner = [index for index, piece in enumerate(pieces) for _ in piece]
    assert file.documents_of(np.arange(25)).tolist() == owner
    assert file.documents_of(np.array(24)) == 4
    for wrong in ((-1, 1), (20, 6)):
        with pytest.raises(IndexError, match="wanted a part of 0 to 25"):
            file.read(*wrong)
    with pytest.raises(IndexError):
        file.documents_of(np.array(25))


def test_documents_that_an_id_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SCANNED", 4)  # ends in every place of a block
    np.save(tmp_path / "0.npy", np.array([1, 2, 0, 3, 0], np.uint16))
    np.save(tmp_path / "1.npy", np.array([4, 5, 6, 0, 7], np.uint16))
    file = open_tokens(tmp_path, end_of_text=0)
    assert file.starts(np.arange(5)).tolist() == [0, 3, 5, 9, 10]
    assert file.documents_of(np.arange(10)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert open_tokens(tmp_path).num_documents == 2
    assert open_tokens(tmp_path / "0.npy", end_of_text=0).num_documents == 2
    # a table beside says it without reading
    np.save(tmp_path / "0.documents.npy", np.array([0, 1, 5]))
    one = open_tokens(tmp_path / "0.npy", end_of_text=0)
    assert one.starts(np.arange(3)).tolist() == [0, 1, 5]
    np.save(tmp_path / "1.documents.npy", np.array([0, 5]))
    assert open_tokens(tmp_path).starts(np.arange(4)).tolist() == [0, 1, 5, 10]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.bin", b"\1\0\2\0", "got neither an .idx beside it nor llm.c's header; .*such as uint16"),
        ("a.u16", b"\1\0\2", "got 3 bytes; wanted a multiple of 2, for uint16; .*half a token at offset 2"),
        ("a.u16", b"", "got no tokens; wanted at least 1"),
        ("a.bin", llm_c([1, 2])[:-1], r"got 1027 bytes; wanted 1028, for the 2 tokens of its header"),
        ("a.npy", b"\x93NUMPX", r"a\.npy, offset 0: got no \.npy file"),
        ("a.npy", b"", r"a\.npy, offset 0: got no \.npy file"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        open_tokens(tmp_path / name)


def test_what_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got nothing there; wanted .*a folder of shards"):
        open_tokens(tmp_path / "nothing")
    with pytest.raises(ValueError, match="got a folder without shards"):
        open_tokens(tmp_path)
    for name, array in {
        "floats": np.zeros(3), "matrix": np.zeros((2, 2), np.int32), "big": np.zeros(3, ">i4"),
    }.items():  # fmt: skip
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ValueError, match=r"wanted a row of integers, as numpy.save writes it"):
            open_tokens(tmp_path / f"{name}.npy")
    with pytest.raises(ValueError, match="the first") as caught:
        Shards([tmp_path / "floats.npy"] * 21)
    assert str(caught.value).count("floats.npy") == 20
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"got 137 bytes; wanted 138, for the 5 tokens"):
        open_tokens(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(whole)
    (tmp_path / "b.u32").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"got uint32; wanted uint16, as .*a\.npy has") as caught:
        Shards([tmp_path / "a.npy", tmp_path / "b.u32", tmp_path / "c.u32"])
    assert "c.u32: got No such file" in str(caught.value)
    with pytest.raises(ValueError, match=r"got float32; wanted a dtype|got dtype float32"):
        open_tokens(tmp_path / "b.u32", dtype="float32")
    with pytest.raises(ValueError, match=r"a\.npy: got uint16, whose largest id is 65535"):
        open_tokens(tmp_path / "a.npy", vocab_size=100000)
    with pytest.raises(ValueError, match=r"got both .*npy and b.u32; wanted shards of one kind"):
        open_tokens(tmp_path)
    with pytest.raises(ValueError, match="shards: got none"):
        Shards([])
    for table in (np.array([0, 4]), np.array([0.0, 5.0]), np.array([1, 5]), np.array([0])):
        np.save(tmp_path / "a.documents.npy", table)
        with pytest.raises(ValueError, match=r"wanted int64, from 0 to the 5 tokens of .*a\.npy"):
            _ = open_tokens(tmp_path / "a.npy").num_documents
    (tmp_path / "a.documents.npy").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.documents\.npy: got no \.npy file"):
        _ = open_tokens(tmp_path / "a.npy").num_documents
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "x", *expected([[[1]]], "int32"))
    with pytest.raises(ValueError, match="got a folder of indexed files; wanted a prefix"):
        open_tokens(tmp_path / "c")
