"""Safetensors files against the safetensors library, and broken ones."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functron.hub import files
from functron.hub.files import Planned, index_of, open_folder, plan, write_files

safetensors = pytest.importorskip("safetensors")
library = pytest.importorskip("safetensors.torch")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def some(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn > 0) if dtype == torch.bool else (3 * drawn).to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    named = {f"kind.{i}": some((3, i + 1), dtype, i) for i, dtype in enumerate(DTYPES)}
    return {**named, "scalar": some(()), "empty": torch.zeros(0, 4), "vector": some((7,))}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def everything(shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def write(folder: Path, named: dict, max_bytes: int = 10**9) -> list[Planned]:
    listed = [(name, value.dtype, tuple(value.shape)) for name, value in named.items()]
    planned = plan(listed, max_bytes)
    write_files(folder, planned, named.items())
    if len(planned) > 1:
        (folder / files.INDEX).write_text(json.dumps(index_of(planned)))
    return planned


def test_reads_what_the_library_writes(tmp_path):
    library.save_file(tensors(), tmp_path / files.SINGLE, metadata={"format": "pt"})
    found = open_folder(tmp_path)
    assert found.shapes() == {k: (tuple(v.shape), v.dtype) for k, v in tensors().items()}
    for name, value in tensors().items():
        got = found.read(name, everything(value.shape))
        assert got.dtype == value.dtype
        assert got.shape == value.shape
        assert torch.equal(bits(got), bits(value)), name


def test_the_library_reads_what_is_written(tmp_path):
    write(tmp_path, tensors())
    with safetensors.safe_open(tmp_path / files.SINGLE, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(tensors())
        for name, value in tensors().items():
            got = opened.get_tensor(name)
            assert got.dtype == value.dtype
            assert torch.equal(bits(got), bits(value)), name


@given(
    st.tuples(*[st.tuples(st.integers(0, n), st.integers(0, n)) for n in (5, 4, 6)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    st.integers(0, 3),
)
def test_any_slice(tmp_path_factory, bounds, dtype, shift):
    """Also of data that is not aligned: the header may end anywhere."""
    folder = tmp_path_factory.mktemp("slices")
    value = some((5, 4, 6), dtype)
    library.save_file({"x": value}, folder / files.SINGLE)
    data = (folder / files.SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    moved = struct.pack("<Q", length + shift) + data[8 : 8 + length] + b" " * shift
    (folder / files.SINGLE).write_bytes(moved + data[8 + length :])
    slices = tuple(slice(*pair) for pair in bounds)
    got = open_folder(folder).read("x", slices)
    assert torch.equal(got, value[slices])


def test_files_hold_no_more_than_they_may(tmp_path):
    named = {f"x{i}": some((10,), seed=i) for i in range(7)}
    named["large"] = some((100,))
    planned = write(tmp_path, named, max_bytes=80)
    assert [len(file.tensors) for file in planned] == [2, 2, 2, 1, 1]
    assert [file.nbytes for file in planned] == [80, 80, 80, 40, 400]
    assert planned[0].name == "model-00001-of-00005.safetensors"
    index = json.loads((tmp_path / files.INDEX).read_text())
    assert index["metadata"]["total_size"] == 680
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), named[name])
    found = open_folder(tmp_path)
    assert all(torch.equal(found.read(k, everything(v.shape)), v) for k, v in named.items())


def test_values_that_float16_cannot_hold(tmp_path):
    planned = plan([("x", torch.float16, (2,))], 10**9)
    with pytest.raises(ValueError, match=r"x: got values up to 7e\+04; wanted at most 65504"):
        write_files(tmp_path, planned, [("x", torch.tensor([7e4, 1.0]))])
    # it was not finite before
    write_files(tmp_path, planned, [("x", torch.tensor([float("inf"), 1.0]))])


# Broken files


def message(folder: Path) -> str:
    with pytest.raises(ValueError, match="cannot read") as caught:
        open_folder(folder)
    assert "wanted" in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path, {f"x{i}": some((10,), seed=i) for i in range(6)}, max_bytes=80)
    return tmp_path


def test_every_broken_file_is_named(folder):
    one, two, three = sorted(folder.glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-5])
    two.write_bytes(two.read_bytes() + b"more")
    three.unlink()
    text = message(folder)
    assert f"{one.name}: got" in text
    assert "bytes: it is cut off; wanted" in text
    assert f"{two.name}: got" in text
    assert "bytes: it has something after its tensors; wanted" in text
    assert f"{three}: got No such file or directory" in text
    assert text.count("\n  - ") == 3


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))
    text = message(tmp_path)
    assert "got pytorch_model.bin; wanted model.safetensors" in text
    assert "pickled weights can run code" in text
    assert "save_pretrained" in text


def test_nothing_to_read(tmp_path):
    assert "no weights" in message(tmp_path)
    assert "No such file or directory" in message(tmp_path / "missing")
    library.save_file({"x": some((2,))}, tmp_path / "consolidated.safetensors")
    assert "1 other safetensors files" in message(tmp_path)


def test_an_index_that_does_not_fit(folder):
    index = json.loads((folder / files.INDEX).read_text())
    index["weight_map"]["x0"] = "model-00003-of-00003.safetensors"
    index["weight_map"]["y"] = "model-00001-of-00003.safetensors"
    (folder / files.INDEX).write_text(json.dumps(index))
    text = message(folder)
    assert "x0: got in model-00001-of-00003.safetensors; wanted in model-00003" in text
    assert "y: got in no file" in text
    for wrong in (
        "{}",
        '{"weight_map": ["x"]}',
        '{"weight_map": {"x": "../x"}}',
        "[]",
        "{",
        "[" * 10**5,
    ):
        (folder / files.INDEX).write_text(wrong)
        message(folder)


def test_a_tensor_in_two_files(folder):
    first, second, _ = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    text = message(folder)
    assert f"{second.name}: got x0, which {first.name} has" in text
    assert f"{second.name}: got x1, which {first.name} has" in text


def header(table, length=None, data=b"\0" * 8) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "a broken header"),
        (b"\1\2\3", "a broken header"),
        (header(entry(), length=10**18), "a broken header"),
        (header(b"[1, 2"), "a broken header"),
        (header(b"[1, 2]"), "a broken header"),
        (header(b"\xff\xfe{}"), "a broken header"),
        (header(b"[" * 10**5), "a broken header"),
        (header({"x": 3}), "a broken header"),
        (header({"x": {"dtype": "F32"}}), "a broken header"),
        (header(entry(dtype="F12")), "dtype F12 for x"),
        (header(entry(shape=[-2])), "sizes that are no sizes for x"),
        (header(entry(shape=[2.0])), "sizes that are no sizes for x"),
        (header(entry(data_offsets=[-8, 0])), "sizes that are no sizes for x"),
        (header(entry(shape=[3])), r"8 bytes for x, F32 \[3\]"),
        (header(entry(data_offsets=[8, 16])), "tensors that overlap or leave a gap"),
        (header({**entry(), "y": entry()["x"]}), "tensors that overlap or leave a gap"),
    ],
)  # fmt: skip
def test_broken_headers(tmp_path, content, reason):
    (tmp_path / files.SINGLE).write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors: got .*{reason}"):
        open_folder(tmp_path)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_damage_is_noticed_or_harmless(tmp_path_factory, place, change, cut):
    """A flipped byte of a header, or a file cut off anywhere: refused, or the same tensors."""
    folder = tmp_path_factory.mktemp("damage")
    value = some((4, 3))
    write(folder, {"a.weight": value, "b.weight": some((2,))})
    file = folder / files.SINGLE
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    if cut:
        del data[place % len(data) :]
    else:
        data[place % (8 + length)] ^= change
    file.write_bytes(bytes(data))
    try:
        found = open_folder(folder)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal, shapes = "", found.shapes()
    if refusal:
        assert refusal.startswith("cannot read the weights")
        assert "model.safetensors: got" in refusal
        return
    assert not cut
    # names, order of dims and kinds of the same width are not guarded: those are checked on import
    for name, (shape, dtype) in shapes.items():
        assert found.read(name, everything(shape)).dtype == dtype


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_files_without_permission(folder):
    first = min(folder.glob("*.safetensors"))
    first.chmod(0)
    assert f"{first}: got Permission denied" in message(folder)
    assert "chmod" in message(folder)
    folder.chmod(0)
    try:
        assert "Permission denied" in message(folder)
    finally:
        folder.chmod(0o700)


def test_permission_errors_are_taught(folder, monkeypatch):
    """As above, for those who run this as the superuser."""

    usual = Path.open

    def refuse(path, *more, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *more, **options)

    monkeypatch.setattr(Path, "open", refuse)
    text = message(folder)
    assert text.count("got Permission denied; wanted a file to read; fix: let this user") == 3
