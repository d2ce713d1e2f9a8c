"""Readers of text: JSONL, compressed or not, Parquet, and plain files; cut, and damaged."""

from __future__ import annotations

import gzip
import json

import pytest

from functron.data import mapped_files, text_files
from functron.data.text_files import cut, find_files, read, read_jsonl

TEXTS = ["one", "", "zwei Äpfel", "三 🙂\nlines", "x" * 50, "last"]


def lines(texts=TEXTS, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, key: t}, ensure_ascii=False) + "\n" for t in texts).encode()


def found(chunks, key: str = "text") -> list[str]:
    everything = [text for chunk in chunks for text in read(chunk, key)]
    assert all(text.problem is None for text in everything)
    return [text.text for text in everything]


def problems(chunks, key: str = "text") -> list[str]:
    return [str(t.problem) for chunk in chunks for t in read(chunk, key) if t.problem]


@pytest.mark.parametrize("size", [1, 2, 7, 20, 25, 29, 33, 100, 10**6])
def test_cut_anywhere_every_line_is_read_once(tmp_path, size):
    data = lines().replace(b"\n", b"\n\n  \n", 2)  # blank lines are no documents
    (tmp_path / "a.jsonl").write_bytes(data.removesuffix(b"\n"))
    (tmp_path / "b.jsonl").write_bytes("\ufeff".encode() + lines(["with a mark"]))
    chunks = cut(find_files([tmp_path]), "text", size)
    assert found(chunks) == [*TEXTS, "with a mark"]
    assert sum(chunk.size for chunk in chunks) == len(data) - 1 + len(lines(["with a mark"])) + 3


def test_compressed(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    half = len(lines()) // 2
    frames = [zstandard.compress(lines()[:half]), zstandard.compress(lines()[half:])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "a.json.gz").write_bytes(
        gzip.compress(lines()[:half]) + gzip.compress(lines()[half:])
    )
    chunks = cut(find_files([tmp_path]), "text", 10)
    assert len(chunks) == 2  # read from the beginning only
    assert found(chunks) == TEXTS * 2
    for name, said in [("a.json.gz", "end-of-stream"), ("b.jsonl.zst", "middle of a frame")]:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-12])
        (got,) = problems(cut([tmp_path / name], "text", 10))
        assert said in got
        assert f"{name}:" in got
        assert "bytes of text; wanted the rest of the file; fix: copy or download" in got
    (tmp_path / "b.jsonl.zst").write_bytes(b"no Zstandard")
    assert "damaged data" in problems(cut([tmp_path / "b.jsonl.zst"], "text", 10))[0]
    (tmp_path / "a.json.gz").write_bytes(b"no gzip")
    assert "Not a gzipped file" in problems(cut([tmp_path / "a.json.gz"], "text", 10))[0]


def test_lines_that_cannot_be_read(tmp_path):
    file = tmp_path / "a.jsonl"
    wrong = {
        b'{"text": 5}': "got a number as 'text'; wanted text",
        b'{"text": null}': "got null as 'text'; wanted text",
        b'{"txt": "a"}': "got an object without 'text'; wanted one with it; fix: --key: did you mean 'txt'",
        b"{}": "got an object without 'text'; wanted one with it",
        b'["text"]': "got a list; wanted an object with 'text'",
        b'{"text": "a"': "got Expecting ',' delimiter at column 13; wanted one JSON object a line",
        b'{"text": "\xff"}': "got byte 0xff at offset",
        b"[" * 100_000: "got JSON too deep to read; wanted an object",
    }
    good = b'{"text": "good"}\n'
    file.write_bytes(b"".join(good + line + b"\n" for line in wrong))
    for size in (1000, 10**6):
        chunks = cut([file], "text", size)
        assert [t.text for c in chunks for t in read(c) if not t.problem] == ["good"] * len(wrong)
        for number, (got, said) in enumerate(zip(problems(chunks), wrong.values(), strict=True), 1):
            assert got.startswith(f"{file}:{2 * number}: {said}")
    texts = list(read_jsonl(file))
    assert [texts[index].where() for index in (0, 2)] == [f"{file}:1", f"{file}:3"]


def table(tmp_path, columns, name="a.parquet", **options):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / name
    pq.write_table(pa.table(columns), file, **options)
    return file


def test_parquet(tmp_path):
    table(tmp_path, {"text": TEXTS, "n": range(6)}, row_group_size=2)
    for size, count in [(1, 3), (10**9, 1)]:
        chunks = cut(find_files([tmp_path]), "text", size)
        assert len(chunks) == count
        assert found(chunks) == TEXTS
    pa = pytest.importorskip("pyarrow")
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        other = table(tmp_path, {"body": pa.array(TEXTS).cast(kind)}, "b.parquet")
        assert found(cut([other], "body", 100), "body") == TEXTS


def test_parquet_that_cannot_be_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    # pandas writes None, and NaN among texts, as null
    nulls = table(tmp_path, {"text": ["a", "b", "c", None, "e", None]}, row_group_size=2)
    got = problems(cut([nulls], "text", 1))
    assert got[0].startswith(
        f"{nulls}, row group 1, row 1: got null (None or NaN) in column 'text'"
    )
    assert f"{nulls}, row group 2, row 1: got null" in got[1]
    assert len(got) == 2
    read_texts = [text for text in read(cut([nulls], "text", 1)[1]) if not text.problem]
    assert [text.where() for text in read_texts] == [f"{nulls}, row group 1, row 0"]
    numbers = table(tmp_path, {"text": [float("nan")] * 2, "texts": ["a", "b"]}, "b.parquet")
    with pytest.raises(
        ValueError, match=r"column 'text': got double; wanted strings; .*NaN"
    ) as caught:
        cut([numbers, table(tmp_path, {"body": ["a"]}, "c.parquet")], "text", 1)
    assert "c.parquet: got no column 'text'" in str(caught.value)
    names = table(tmp_path, {"text": ["a"], "column": ["b"]}, "d.parquet").read_bytes()
    for damaged in (b"PAR1 but no footer", names.replace(b"column", b"\xf8olumn")):
        (tmp_path / "d.parquet").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"d\.parquet: got .*; wanted a Parquet file"):
            cut([tmp_path / "d.parquet"], "text", 1)
    plain = {"compression": "none", "use_dictionary": False, "row_group_size": 2}
    text = pa.array([b"abcdefgh", b"bad \xff bytes", b"c", b"d"]).cast(pa.string(), safe=False)
    bad = table(tmp_path, {"text": text}, "e.parquet", **plain)
    got = problems(cut([bad], "text", 1))
    assert "row group 0, row 0 or one of the 1 after it: got byte 0xff in column 'text'" in got[0]
    whole = bad.read_bytes()
    at = whole.index(b"abcdefgh") - 20
    bad.write_bytes(whole[:at] + b"\xff" * 16 + whole[at + 16 :])
    got = problems(cut([bad], "text", 1))
    assert "row group 0, row 0 or after: got damaged data" in got[0]
    assert len(got) == 1


def test_plain_files_and_what_folders_hold(tmp_path):
    for name, data in {
        "b.txt": b"two",
        "a.md": b"one",
        "c/d.py": b"three",
        "picture": b"\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "settings.json").write_bytes(b"{}")
    assert [f.name for f in find_files([tmp_path])] == ["a.md", "b.txt", "d.py", "settings.json"]
    (tmp_path / "settings.json").unlink()
    for size, count in [(1, 3), (6, 2), (100, 1)]:
        chunks = cut(find_files([tmp_path]), "text", size)
        assert len(chunks) == count
        assert found(chunks) == ["one", "two", "three"]
    assert list(read(chunks[0]))[1].where() == str(tmp_path / "b.txt")
    (tmp_path / "late.txt").write_bytes(b"a" * (1 << 16) + b"\xff")
    (got,) = problems(cut(find_files([tmp_path]), "text", 100))
    assert got.startswith(f"{tmp_path}/late.txt: got byte 0xff at offset 65536; wanted UTF-8")
    # a folder with files of documents is these, and no others
    (tmp_path / "c" / "x.jsonl").write_bytes(lines())
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "y.jsonl").write_bytes(lines())
    assert find_files([tmp_path]) == [tmp_path / "c" / "x.jsonl"]
    (tmp_path / "one.json").write_bytes(lines())
    assert found(cut(find_files([tmp_path / "one.json"]), "text", 50)) == TEXTS
    with pytest.raises(ValueError, match=r"nothing1: got nothing there") as caught:
        find_files([tmp_path / "nothing1", tmp_path, tmp_path / "nothing2"])
    assert "nothing2: got nothing there" in str(caught.value)
    with pytest.raises(ValueError, match="inputs: got none"):
        find_files([])


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_files, "find_spec", lambda name: None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"zstandard: got no such package.*functron\[zstd\]"):
        list(read_jsonl(tmp_path / "a.jsonl.zst"))
    with pytest.raises(ValueError, match=r"pyarrow: got no such package.*functron\[parquet\]"):
        text_files.cut([tmp_path / "a.parquet"], "text", 1)
