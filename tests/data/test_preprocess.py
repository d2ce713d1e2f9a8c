"""Text to tokens on disk: against tokens made here, killed, resumed, divided, and refused."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import multiprocessing
import os
import random
import signal
import traceback
from pathlib import Path

import numpy as np
import pytest

from functron.cli.main import main
from functron.core import tree
from functron.data import shards
from functron.data.indexed import IndexedFile, IndexedWriter
from functron.data.preprocess import PreprocessSettings, preprocess
from functron.data.shards import open_tokens, verify
from tests.damage import flip_bit
from tests.data.chats import WORDS, make_tokenizer, tokenizers
from tests.data.megatron_bytes import expected

END = 0
TEXTS = [WORDS[: 7 * i % 60 + 1] + "é\n🙂"[: i % 4] for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def text(tmp_path) -> Path:
    """The texts in files of every kind that needs no package, in order of their names."""
    root = tmp_path / "text"
    root.mkdir()
    lines = [json.dumps({"text": t}) + "\n" for t in TEXTS]
    (root / "a.jsonl").write_text("".join(lines[:30]))
    (root / "b.json.gz").write_bytes(gzip.compress("".join(lines[30:]).encode()))
    return root


def documents(folder: Path, texts=TEXTS, end: int | None = END) -> list[list[list[int]]]:
    """Megatron's input: a list of sequences for every document."""
    reader = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [[[*reader.encode(t).ids, *([] if end is None else [end])]] for t in texts]


def settings(text, folder, out, **options) -> PreprocessSettings:
    inputs = (str(text),) if isinstance(text, Path) else tuple(map(str, text))
    return PreprocessSettings(inputs, str(folder), str(out), **{"workers": 1, **options})


def both(out: Path) -> tuple[bytes, bytes]:
    return Path(f"{out}.bin").read_bytes(), Path(f"{out}.idx").read_bytes()


@pytest.mark.parametrize("chunk_bytes", [50, 500, 1 << 22])
def test_bytes_are_megatrons(tmp_path, text, folder, chunk_bytes):
    out, seen = tmp_path / "out" / "x", []
    done = preprocess(settings(text, folder, out), seen.append, chunk_bytes=chunk_bytes)
    assert both(out) == expected(documents(folder), "uint16")
    verify(IndexedFile(out), vocab_size=300)
    assert (done.documents, done.empty, done.files, done.dtype) == (40, 0, 2, "uint16")
    assert done.tokens == IndexedFile(out).num_tokens
    assert seen[0].done == 0
    assert seen[-1].done == seen[-1].total == done.size
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert sorted(p.name for p in out.parent.iterdir()) == ["x.bin", "x.idx", "x.json"]
    said = json.loads((tmp_path / "out" / "x.json").read_text())
    assert (said["documents"], said["dtype"], said["end_of_text"]) == (40, "uint16", END)
    # again: nothing to do
    again = preprocess(settings(text, folder, out), seen.clear, chunk_bytes=chunk_bytes)
    assert again.progress is None
    assert seen
    assert dataclasses.replace(again, progress=done.progress) == done


def test_other_ends_keys_and_dtypes(tmp_path, text, folder):
    run = preprocess
    run(settings(text, folder, tmp_path / "a", append_eod=False))
    assert both(tmp_path / "a") == expected(documents(folder, end=None), "uint16")
    run(settings(text, folder, tmp_path / "b", end_of_text="<|im_end|>", dtype="int32"))
    assert both(tmp_path / "b") == expected(documents(folder, end=2), "int32")
    (tmp_path / "c.jsonl").write_text('{"text": 1, "body": "the fox"}')
    run(settings(tmp_path / "c.jsonl", folder, tmp_path / "c", key="body"))
    assert both(tmp_path / "c") == expected(documents(folder, ["the fox"]), "uint16")
    run(settings(tmp_path / "c.jsonl", "bytes", tmp_path / "d", key="body"))
    assert both(tmp_path / "d") == expected([[[*b"the fox", 256]]], "uint16")
    run(settings([tmp_path / "c.jsonl"] * 2, "bytes", tmp_path / "e", key="body", append_eod=False,
                 dtype="int32"))  # fmt: skip
    assert both(tmp_path / "e") == expected([[[*b"the fox"]]] * 2, "int32")


def test_numpy(tmp_path, text, folder):
    done = preprocess(settings(text, folder, tmp_path / "x", format="npy"), chunk_bytes=99)
    row = [token for (document,) in documents(folder) for token in document]
    tokens = np.load(tmp_path / "x.npy")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == row
    starts = np.load(tmp_path / "x.documents.npy")
    ends = np.cumsum([len(document) for (document,) in documents(folder)])
    assert starts.tolist() == [0, *ends]
    file = open_tokens(tmp_path / "x.npy")
    assert (file.num_documents, file.num_tokens) == (40, len(row)) == (done.documents, done.tokens)
    assert not (tmp_path / "x.parts").exists()


@pytest.mark.parametrize("kind", ["indexed", "npy"])
def test_every_flipped_bit_is_noticed(tmp_path, text, folder, kind, monkeypatch):
    monkeypatch.setattr(shards, "CHECKED_BYTES", 100)  # several blocks a file
    made = settings(text, folder, tmp_path / "x", format=kind)
    preprocess(made)
    tokens, draw = made.targets[1], random.Random(0)
    assert verify(tokens)
    for file in [*made.targets, made.record] * 30:
        whole = file.read_bytes()
        flip_bit(file, draw.randrange(len(whole)), draw.randrange(8))
        with pytest.raises(ValueError, match="wanted"):
            verify(tokens)
        file.write_bytes(whole)
    flip_bit(made.targets[0], 150, 0)
    with pytest.raises(ValueError, match=r"offsets 100 to 199: got other bytes"):
        verify(tokens)


def test_tokens_without_checksums(tmp_path, text, folder):
    made = settings(text, folder, tmp_path / "x")
    preprocess(made)
    made.record.unlink()
    assert not verify(made.out)
    made.record.write_text("{}")  # another program's
    assert not verify(made.out)
    record = shards.with_checksums({}, made.targets)
    record["files"]["x.bin"]["crc32"] = None
    record["crc32"] = tree.json_checksum({"files": record["files"]})
    made.record.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"x\.json: x\.bin: got .* wanted a size and a checksum"):
        verify(made.out)
    made.targets[0].unlink()
    with pytest.raises(ValueError, match="No such file"):
        verify(made.out)


def test_documents_without_tokens(tmp_path, folder):
    texts = ["the", "", "fox", ""]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    with pytest.raises(ValueError, match="cannot read all of the text") as caught:
        preprocess(settings(file, folder, tmp_path / "x"), chunk_bytes=20)
    for line in (2, 4):
        assert f"{file}:{line}: got an empty text; wanted at least one token; fix: leave it out, or" \
            in str(caught.value)  # fmt: skip
    done = preprocess(settings(file, folder, tmp_path / "y", empty="drop"))
    assert both(tmp_path / "y") == expected(documents(folder, ["the", "fox"]), "uint16")
    assert (done.documents, done.empty) == (2, 2)
    assert "2 documents (2 without tokens left out)" in str(done)
    # as Megatron's preprocess_data.py: a document without sequences, and without an end
    preprocess(settings(file, folder, tmp_path / "z", empty="keep"))
    the, fox = documents(folder, ["the", "fox"])
    assert both(tmp_path / "z") == expected([the, [], fox, []], "uint16")
    file.write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="got no documents with tokens in 1 files"):
        preprocess(settings(file, folder, tmp_path / "none", empty="drop"))


class KilledError(BaseException):
    """Nothing in the code catches it, as nothing catches SIGKILL."""


def test_killed_anywhere_it_ends_with_the_same_bytes(tmp_path, text, folder, monkeypatch):
    """Killed at every point at which a file is written to disk, gets its name or goes."""
    wanted = expected(documents(folder), "uint16")
    points = [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (os, "rmdir"), (os, "unlink")]
    originals = {(owner, name): getattr(owner, name) for owner, name in points}
    left = 0

    def killing(point, after):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            now = left == 0  # some call others of them
            if now and not after:
                os._exit(9)
            result = originals[point](*arguments, **options)
            if now:
                os._exit(9)
            return result

        return call

    for count in range(1, 1000, 9):
        out = tmp_path / f"out{count}"
        pid = os.fork()
        if pid == 0:
            for point in points:
                monkeypatch.setattr(*point, killing(point, after=count % 2))
            left = count
            try:
                preprocess(settings(text, folder, out), chunk_bytes=700)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        preprocess(settings(text, folder, out), chunk_bytes=700)
        assert both(out) == wanted
        assert {p.name for p in tmp_path.glob(f"*out{count}*")} == {
            f"out{count}.{ending}" for ending in ("bin", "idx", "json")
        }
        if code == 0:
            break
    assert count > 30


def test_what_is_finished_is_not_made_again(tmp_path, text, folder):
    class StopError(Exception):
        pass

    def stop(progress):
        if progress.done > 500:
            raise StopError

    out, seen = tmp_path / "x", []
    with pytest.raises(StopError):
        preprocess(settings(text, folder, out), stop, chunk_bytes=300)
    made = {p: p.stat().st_mtime_ns for p in tmp_path.glob("x.parts/*.bin")}
    assert made
    # text that is added, or changes, is all that is read anew
    before = (text / "a.jsonl").read_text()
    after = before.replace(f'"{TEXTS[0]}"', '"h"', 1)
    assert len(after) == len(before)
    (text / "a.jsonl").write_text(after + '{"text": "more"}\n')
    os.utime(text / "a.jsonl", ns=(0, 0))
    (text / "c.jsonl").write_text('{"text": "last"}\n')
    with pytest.raises(StopError):
        preprocess(settings(text, folder, out), stop, chunk_bytes=300)
    assert all(p.stat().st_mtime_ns == time for p, time in made.items())
    done = preprocess(settings(text, folder, out, workers=1), seen.append, chunk_bytes=300)
    assert f"resumed {seen[0].tokens:,} of the tokens were there before" in str(done)
    assert seen[0].done > 500
    assert seen[0].tokens == seen[0].earlier > 0
    texts = ["h", *TEXTS[1:30], "more", *TEXTS[30:], "last"]
    assert both(out) == expected(documents(folder, texts), "uint16")


def test_several_processes_of_which_one_dies(tmp_path, text, folder):
    def kill(progress):
        if progress.done and not killed:
            killed.append(multiprocessing.active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    out = tmp_path / "x"
    chosen = settings(text, folder, out, workers=2)
    with pytest.raises(
        ValueError, match=r"workers: got a process that died \(SIGKILL\) in .*jsonl"
    ):
        preprocess(chosen, kill, chunk_bytes=100)
    assert not multiprocessing.active_children()
    assert not out.with_suffix(".idx").exists()
    seen = []
    preprocess(chosen, seen.append, chunk_bytes=100)
    assert seen[0].done > 0
    assert both(out) == expected(documents(folder), "uint16")
    assert not multiprocessing.active_children()
    # what cannot be read comes back from other processes too, from all chunks
    with (text / "a.jsonl").open("a") as stream:
        stream.write('{"text": 5}\n{}\n')
    with pytest.raises(ValueError, match="cannot read all of the text") as caught:
        preprocess(settings(text, folder, tmp_path / "y", workers=2), chunk_bytes=20)
    assert f"{text}/a.jsonl:31: got a number as 'text'; wanted text" in str(caught.value)
    assert f"{text}/a.jsonl:32: got an object without 'text'" in str(caught.value)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_what_is_refused(tmp_path, text, folder):
    def refused(said: str, **options):
        with pytest.raises(ValueError, match=said) as caught:
            preprocess(settings(text, folder, tmp_path / "x", **options))
        return str(caught.value)

    refused("workers: got -1; wanted at least 0", workers=-1)
    said = refused("unknown special token", end_of_text="<|endofttext|>")
    assert "did you mean '<|endoftext|>'?" in said
    refused(
        r"end_of_text: got '<\|im_end\|>'; wanted none", end_of_text="<|im_end|>", append_eod=False
    )
    refused(
        "dtype: got uint8, whose largest id is 255; wanted .* up to 299; .*uint16", dtype="uint8"
    )
    assert not list(tmp_path.glob("x*"))
    (tmp_path / "x.idx").touch()
    refused(r"x\.idx: got an existing file; wanted a new one")
    (tmp_path / "x.idx").unlink()
    preprocess(settings(text, folder, tmp_path / "x"))
    refused("an existing file, made with another end_of_text", append_eod=False)
    (text / "c.jsonl").write_text('{"text": "last"}\n')
    refused("an existing file, made with another text")
    (tmp_path / "x.bin").unlink()
    (tmp_path / "x.idx").unlink()
    (text / "c.jsonl").write_text('{"text": "\\ud83d"}\n{"text": ""}\n')
    said = refused("cannot read all of the text")
    assert f"{text}/c.jsonl:1: got half of a surrogate pair at character 0; wanted text" in said
    said = refused("unfinished parts of other settings", empty="drop")
    assert "x.parts: empty_documents: got 'refuse'; wanted 'drop'" in said
    (text / "c.jsonl").write_text("not JSON\n" * 50)
    assert refused(": the first 20 places").count("c.jsonl:") == 20
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.jsonl").touch()
    with pytest.raises(ValueError, match="got no documents with tokens in 1 files"):
        preprocess(settings(tmp_path / "empty", folder, tmp_path / "y"))


def test_one_at_a_time_and_text_that_changes(tmp_path, text, folder):
    def again(progress):
        preprocess(settings(text, folder, tmp_path / "x"))

    with pytest.raises(ValueError, match="got another process at work there"):
        preprocess(settings(text, folder, tmp_path / "x"), again)

    def change(progress):
        os.utime(text / "a.jsonl", ns=(1, progress.done))

    with pytest.raises(ValueError, match=r"a\.jsonl: got text that changed while it was read"):
        preprocess(settings(text, folder, tmp_path / "x"), change)
    preprocess(settings(text, folder, tmp_path / "x"))
    assert both(tmp_path / "x") == expected(documents(folder), "uint16")


def test_a_full_disk(tmp_path, text, folder, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(IndexedWriter, "extend", full)
        with pytest.raises(ValueError, match=r"got No space left on device; wanted .*start again"):
            preprocess(settings(text, folder, tmp_path / "x"))
    preprocess(settings(text, folder, tmp_path / "x"))
    assert both(tmp_path / "x") == expected(documents(folder), "uint16")


def test_command(tmp_path, text, folder, capsys):
    out = tmp_path / "x"
    command = [
        "preprocess",
        str(text / "a.jsonl"),
        str(text / "b.json.gz"),
        "--tokenizer",
        str(folder),
    ]
    command += ["--out", str(out), "--workers", "1"]
    assert main(command) == 0
    printed = capsys.readouterr()
    count = IndexedFile(out).num_tokens
    assert f"tokens  {count:,} in 40 documents, uint16" in printed.out
    assert f"written {out}.bin, {out}.idx" in printed.out
    assert "tokens/s on 1 process" in printed.out
    assert "tokens/s" in printed.err  # the bar
    assert main(command) == 0
    assert "nothing to do: this was complete" in capsys.readouterr().out
    assert main([*command, "--no-append-eod"]) == 2
    assert "an existing file, made with another end_of_text" in capsys.readouterr().err
    assert main([*command[:-4], "--out", str(tmp_path / "y"), "--end-of-text", "</s>"]) == 2
    assert "functron: unknown special token" in capsys.readouterr().err
    assert both(out) == expected(documents(folder), "uint16")
