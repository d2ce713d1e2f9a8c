"""Byte-level text: what batches hold follows from the file, the step and the part alone."""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron.data import TextWindows, check_tokens, mapped_files
from functron.data.mapped_files import MappedRows


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(i % 251 for i in range(1001)))
    return path


def test_windows_tile_the_text(file):
    text = TextWindows(file, 10)
    assert (text.num_tokens, text.num_samples, text.num_documents) == (1001, 100, 1)
    for index in (0, 1, 99):
        start = 10 * index
        assert text.sample(index).tolist() == [i % 251 for i in range(start, start + 11)]
    with pytest.raises(IndexError, match="wanted 0 to 99"):
        text.sample(100)


def test_a_batch_is_tokens_and_the_ones_after_them(file):
    batch = TextWindows(file, 10).batch(3, 8)
    assert {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in batch.items()} == {
        "tokens": (torch.int64, (8, 10)),
        "targets": (torch.int64, (8, 10)),
        "rows": (torch.int64, (8,)),
    }
    assert batch["rows"].tolist() == list(range(8))
    # consecutive bytes of this file differ by one, modulo 251
    assert torch.equal((batch["tokens"] + 1) % 251, batch["targets"])


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(file):
    text = TextWindows(file, 10)
    first = torch.cat([text.batch(step, 20)["tokens"] for step in range(5)])
    second = torch.cat([text.batch(step, 20)["tokens"] for step in range(5, 10)])
    windows = sorted([[(10 * i + j) % 251 for j in range(10)] for i in range(100)])
    assert sorted(first.tolist()) == windows
    assert sorted(second.tolist()) == windows
    assert not torch.equal(first, second)
    assert first.tolist() != windows


def test_a_batch_may_span_epochs(file):
    text = TextWindows(file, 10)
    straddling = text.batch(2, 40)["tokens"]  # samples 80 to 119 of epochs of 100
    assert torch.equal(straddling[:20], text.batch(4, 20)["tokens"])
    assert torch.equal(straddling[20:], text.batch(5, 20)["tokens"])


@given(step=st.integers(0, 10**12), parts=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_parts_make_up_the_batch(step, parts):
    text = TextWindows(__file__, 16)
    whole = text.batch(step, 12)
    pieces = [text.batch(step, 12, (index, parts)) for index in range(parts)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), leaf)


def test_seeds_order_differently_and_reproducibly(file):
    batches = [TextWindows(file, 10, seed=seed).batch(0, 50)["tokens"] for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "z.txt").write_text("second ")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "c.txt").write_text("thïrd")
    (tmp_path / ".git" / "config").write_text("hidden folder")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "empty").touch()
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\1")
    (tmp_path / "latin.txt").write_bytes("naïve text".encode("latin-1"))
    text = TextWindows(tmp_path, 4)
    everything = text.sample(0).tolist()
    for index in range(1, text.num_samples):
        everything += text.sample(index).tolist()[1:]
    assert bytes(everything) == "first second thïrd".encode()[: len(everything)]
    assert (text.num_documents, text.num_skipped) == (3, 3)


def test_a_character_cut_at_the_end_of_what_is_inspected_is_still_text(tmp_path):
    (tmp_path / "long.txt").write_bytes(b"x" + "é".encode() * mapped_files.SNIFFED_BYTES)
    assert TextWindows(tmp_path, 8).num_skipped == 0


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_files, "MAX_OPEN_FILES", 3)
    for index in range(20):
        (tmp_path / f"{index:02d}.txt").write_text(f"{index:02d}")
    parts = mapped_files.byte_parts(mapped_files.find(tmp_path)[0])
    text = mapped_files.Concatenated(parts, tmp_path)
    assert bytes(text.read(0, 40)) == b"".join(b"%02d" % index for index in range(20))
    assert bytes(text.read(3, 4)) == b"1020"
    assert len(text._open) == 3
    assert all(isinstance(file, MappedRows) for file in text._open.values())


def test_the_default_text_is_english_and_code():
    text = TextWindows(None, 128)
    assert text.num_tokens > 4_000_000
    assert text.num_documents > 300
    whole = bytes(text._file.read(0, text.num_tokens))
    assert topics["with"].encode() in whole
    assert Path(sys.modules["os"].__file__).read_bytes() in whole
    again = TextWindows(None, 128)
    assert torch.equal(text.batch(7, 4)["tokens"], again.batch(7, 4)["tokens"])


def test_bad_paths_are_taught(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "folder").mkdir()
    for path, message in [
        ("nowhere", "got nothing there; wanted a file or a folder"),
        ("empty.txt", "got an empty file"),
        ("folder", r"got a folder with no text \(0 files\)"),
        ("short.txt", r"got 3 bytes; wanted at least seq \+ 1 = 11; fix: use at most seq=2"),
    ]:
        with pytest.raises(ValueError, match=message):
            TextWindows(tmp_path / path, 10)


def test_unreadable_is_taught(file, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root
    with pytest.raises(ValueError, match=r"numbers\.txt: got Permission denied"):
        TextWindows(file, 10)


def test_parts_that_do_not_divide_are_taught(file):
    text = TextWindows(file, 10)
    with pytest.raises(
        ValueError,
        match="global_batch: got 10; wanted a positive multiple of 4; fix: use a global batch of 12",
    ):
        text.batch(0, 10, (0, 4))
    with pytest.raises(ValueError, match=r"part: got part \(4, 4\)"):
        text.batch(0, 8, (4, 4))


def test_tokens_outside_the_vocabulary_are_taught():
    good = {"tokens": torch.tensor([[0, 9]]), "targets": torch.tensor([[9, -100]])}
    check_tokens(good, 10)
    bad = {"tokens": torch.tensor([[-1, 12]]), "targets": torch.tensor([[10, -100]])}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_tokens(bad, 10)
    assert "batch/tokens: got 2 ids outside, from -1 to 12; wanted 0 to 9" in str(caught.value)
    assert "batch/targets: got 1 ids outside, from 10 to 10" in str(caught.value)
