"""Damaged files, full disks, dead ranks: errors that say what and where, never other values."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from functron import Mesh, P, checkpoint, tree
from functron.checkpoint import database
from functron.checkpoint import database as index
from functron.checkpoint import folder as folder_module
from functron.checkpoint.folder import COMMITTED, LATER, MANIFEST
from functron.spmd.spec import shard

FLIPS = 200
SPECS = {"large": P("tp"), "small": {"w": P(None, "tp"), "b": P()}, "step": P()}


def values() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(600, 1000, generator=generator),
        "small": {
            "w": torch.randn(30, 40, generator=generator).bfloat16(),
            "b": torch.arange(7.0, dtype=torch.float64),
        },
        "step": torch.tensor(2**53 + 1),
    }


@pytest.fixture
def path(tmp_path, on_ranks) -> Path:
    """A checkpoint that two ranks wrote."""
    whole = values()
    flat = tree.broadcast_prefix(SPECS, whole, is_leaf=lambda s: isinstance(s, P))

    def save(mesh, store):
        leaves = zip(tree.leaves(whole), flat, strict=True)
        mine = [shard(leaf, spec, mesh, mesh.coordinate) for leaf, spec in leaves]
        value = tree.unflatten(tree.structure(whole), mine)
        placement = checkpoint.Placement.of(whole, SPECS, mesh)
        checkpoint.save(tmp_path / "1", value, {"a": 1}, placement=placement, store=store)

    on_ranks(Mesh(tp=2), save)
    return tmp_path / "1"


def assert_right(restored) -> None:
    for a, b in zip(tree.leaves(restored), tree.leaves(values()), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def flip(file: Path, choice: random.Random) -> tuple[int, int]:
    """Flip a bit of a file; where, and what the byte was."""
    at = choice.randrange(file.stat().st_size)
    with file.open("r+b") as handle:
        handle.seek(at)
        (byte,) = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte ^ 1 << choice.randrange(8)]))
    return at, byte


def put_back(file: Path, at: int, byte: int) -> None:
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([byte]))


def error_of(fn: Callable, *args) -> str | None:
    """The message of the ValueError of a call, if it raises one."""
    try:
        fn(*args)
    except ValueError as error:
        return str(error)
    return None


def test_no_flipped_bit_goes_unnoticed(path):
    """`verify` finds each, but in bytes that nothing reads: there the values are the right ones."""
    choice = random.Random(0)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    noticed = 0
    for _ in range(FLIPS):
        file = choice.choice(files)
        at, byte = flip(file, choice)
        found = error_of(checkpoint.verify, path)
        if found is None:
            assert file.name in LATER or file.stat().st_size > 1 << 20, file
        else:
            noticed += 1
            for part in ("got", "wanted", str(path)):
                assert part in found
        if error_of(checkpoint.restore, path) is None:
            assert_right(checkpoint.restore(path))
        else:
            assert found is not None
        put_back(file, at, byte)
    unread = sum(file.name in LATER for file in files) / len(files)
    assert noticed > FLIPS * (1 - unread) * 0.8
    checkpoint.verify(path)


def test_flipped_values_are_named_with_their_leaf_and_file(path):
    """In the large files, whose bytes only the values' own checksums cover."""
    choice = random.Random(1)
    large = [file for file in path.rglob("d/*") if file.stat().st_size > 1 << 20]
    assert large
    for file in large * 5:
        at, byte = flip(file, choice)
        for read in (checkpoint.verify, checkpoint.restore):
            with pytest.raises(ValueError, match="is damaged") as caught:
                read(path)
            text = str(caught.value)
            assert "large: got" in text
            assert str(file) in text
            assert "fix: restore an older checkpoint" in text
        # what is elsewhere can still be read
        like = {"small": tree.map(lambda leaf: leaf.to("meta"), values()["small"])}
        assert torch.equal(checkpoint.restore(path, like)["small"]["b"], values()["small"]["b"])
        put_back(file, at, byte)


def exchange(path: Path, first: str, second: str) -> None:
    """Exchange two stored chunks of equal size, each with the checksum that it ends with."""
    places = {name: location.split(":") for name, location in index._entries(path)}
    files, spans = [], []
    for name in (first, second):
        *_, folder, file, offset, length = places[name]
        files.append(path / unquote(folder + file))
        spans.append((int(offset), int(length)))
    assert spans[0][1] == spans[1][1]
    held = []
    for file, (offset, length) in zip(files, spans, strict=True):
        with file.open("rb") as handle:
            handle.seek(offset)
            held.append(handle.read(length))
    for file, (offset, _), chunk in zip(files, spans, reversed(held), strict=True):
        with file.open("r+b") as handle:
            handle.seek(offset)
            handle.write(chunk)


@pytest.mark.parametrize("second", ["out/c/0/0", "in/c/1/0"], ids=["leaves", "places"])
def test_chunks_that_changed_places_are_found(tmp_path, second):
    """Each is whole, and has the checksum of its bytes: two leaves, or two parts of one."""
    whole = {"in": torch.randn(2400, 1000), "out": torch.randn(2400, 1000)}
    path = tmp_path / "1"
    checkpoint.save(path, whole)
    exchange(path, "in/c/0/0", second)
    other = second.split("/")[0]
    with pytest.raises(ValueError, match="is damaged") as caught:
        checkpoint.verify(path)
    text = str(caught.value)
    assert "in: got another chunk at [0, 0], whose CRC-32C is" in text
    assert f"{other}: got another chunk at {[int(i) for i in second.split('/')[2:]]}" in text
    assert f"in {path}/ocdbt.process_0/d/" in text
    stored = checkpoint.Checkpoint(path)
    into = tree.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), whole)
    readers = (
        lambda: checkpoint.restore(path),
        lambda: checkpoint.restore_(path, into, cast=True),
        lambda: stored["in"][5:7],
    )
    for read in readers:
        with pytest.raises(ValueError, match="got another chunk at"):
            read()
    assert torch.equal(stored["out"][1300], whole["out"][1300])  # in a chunk that stayed
    exchange(path, "in/c/0/0", second)
    checkpoint.verify(path)


def test_a_checkpoint_without_checksums_of_chunks_says_what_is_not_checked(path):
    """As functron wrote them once: readable, but not called verified."""
    assert checkpoint.Checkpoint(path).unbound == ""
    assert "all files and checksums are right" in checkpoint.verify_text(path)
    file = path / MANIFEST
    content = json.loads(file.read_text())["content"]
    for entry in content["leaves"].values():
        assert all(isinstance(number, int) for number in entry.pop("crc32c"))
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps({"crc32": crc32, "content": content}))
    with pytest.warns(UserWarning, match="changed places would not be noticed; fix: restore it"):
        assert_right(checkpoint.restore(path))
    text = checkpoint.verify_text(path)
    assert "checksums are right" not in text
    assert f"not checked: {path} was written by Orbax alone or by an older functron" in text


def test_missing_and_truncated_files_are_named(path, tmp_path):
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) >= 8
    for file in files:
        for damage in ("missing", "truncated"):
            copy = tmp_path / "copy"
            shutil.copytree(path, copy)
            target = copy / file.relative_to(path)
            if damage == "missing":
                target.unlink()
            else:
                os.truncate(target, target.stat().st_size // 2)
            if file.name in LATER:
                assert_right(checkpoint.restore(copy))  # Orbax's notes, which nothing reads
            else:
                with pytest.raises(ValueError, match="damaged") as caught:
                    checkpoint.restore(copy)
                assert str(target) in str(caught.value)
                got = "no such file" if damage == "missing" else r"\d+ bytes|damaged contents"
                assert re.search(f"got ({got})", str(caught.value))
            shutil.rmtree(copy)


def test_all_damaged_files_are_listed(path):
    (path / "_METADATA").write_text("{}")
    index = path / "manifest.ocdbt"
    index.unlink()
    with pytest.raises(ValueError, match="damaged") as caught:
        checkpoint.Checkpoint(path)
    assert f"{path / '_METADATA'}: got 2 bytes" in str(caught.value)
    assert f"{index}: got no such file" in str(caught.value)


def test_a_checkpoint_without_marks_of_completion_does_not_exist(path):
    for name in (MANIFEST, COMMITTED):
        (path / name).unlink()
    assert checkpoint.steps(path.parent) == []
    with pytest.raises(ValueError, match="an incomplete checkpoint"):
        checkpoint.restore(path)


# --- writing


def save_with_limit(folder: Path, nbytes: int) -> subprocess.CompletedProcess[str]:
    """Save 4 MB in a process whose files may only have so many bytes, like a disk that is full."""
    program = (
        "import resource, sys, torch\n"
        "from functron import checkpoint\n"
        f"checkpoint.save({str(folder / 'first')!r}, {{'x': torch.ones(2)}})\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, {nbytes}))\n"
        "try:\n"
        f"    checkpoint.save({str(folder / '1')!r}, {{'big': torch.ones(1000, 1000)}})\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_full_disk(tmp_path):
    done = save_with_limit(tmp_path, 1 << 20)
    assert done.returncode == 0, done.stderr
    assert "big: got" in done.stdout
    assert f"wanted room for it in {tmp_path}" in done.stdout
    assert "fix: free space on that disk" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


def test_an_error_that_the_disk_reports_once_is_not_lost(tmp_path, monkeypatch):
    """Linux reports an error of writing back once: who asks again is told that all is well."""
    real, told = folder_module.sync, []

    def once(path):
        if path.parent.name == "d" and not told:
            told.append(path)
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(folder_module, "sync", once)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(tmp_path / "1", {"x": torch.ones(1000, 1000)})
    assert told
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_a_checkpoint_are_synced_after_their_last_change(tmp_path, monkeypatch):
    real, sizes = os.fsync, {}

    def noting(handle):
        sizes[os.stat(handle).st_ino] = os.stat(handle).st_size
        real(handle)

    monkeypatch.setattr(os, "fsync", noting)
    checkpoint.save(tmp_path / "1", {"x": torch.ones(1000, 1000), "y": torch.ones(3)})
    for path in [tmp_path, *tmp_path.rglob("*")]:
        assert path.stat().st_ino in sizes, path
        assert path.is_dir() or path.stat().st_size == sizes[path.stat().st_ino], path


def test_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory") as caught:
        checkpoint.save(tmp_path / "file" / "checkpoints" / "1", {"x": torch.ones(1)})
    assert "wanted to be written in" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(OSError, match="wanted permission to write in") as caught:
        checkpoint.save(folder / "1", {"x": torch.ones(1)})
    assert "fix: save somewhere else" in str(caught.value)


def test_a_chunk_that_a_rank_did_not_write_is_noticed(tmp_path, on_ranks, monkeypatch):
    """As where the ranks' folder is not the same: what rank 1 writes goes elsewhere."""
    real = database.writing

    def elsewhere(folder, leaf, chunk):
        if folder.name.endswith("_1"):
            folder = tmp_path / "elsewhere" / folder.name
            folder.mkdir(parents=True, exist_ok=True)
        return real(folder, leaf, chunk)

    monkeypatch.setattr(database, "writing", elsewhere)
    whole = {"x": torch.ones(4, 4)}

    def save(mesh, store):
        placement = checkpoint.Placement.of(whole, P("tp"), mesh)
        value = {"x": whole["x"][:2]}
        with pytest.raises(OSError, match=r"x: got 1 of 3 chunks missing; wanted all of them"):
            checkpoint.save(tmp_path / "c" / "1", value, placement=placement, store=store)

    on_ranks(Mesh(tp=2), save)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_rank_that_dies_does_not_hang_the_others(tmp_path, on_ranks):
    whole = {"x": torch.ones(4, 4)}

    def save(mesh, store):
        if mesh.rank == 1:
            return  # dead
        placement = checkpoint.Placement.of(whole, P("tp"), mesh)
        missing = "rank 1" if mesh.rank == 0 else "rank 0|no sign of life from rank 1"
        with pytest.raises(OSError, match=f"{missing}.*"):
            checkpoint.save(
                tmp_path / "1", {"x": whole["x"][:1]}, placement=placement, store=store, timeout=1
            )

    on_ranks(Mesh(tp=4), save)
    assert checkpoint.steps(tmp_path) == []


def test_a_timeout_is_asked_anew_while_a_rank_is_waited_for(tmp_path, on_ranks):
    whole = {"x": torch.ones(2, 4)}
    seconds = iter([600.0, 600.0, 600.0])  # then it is in a hurry

    def save(mesh, store):
        if mesh.rank == 1:
            return  # dead
        placement = checkpoint.Placement.of(whole, P("tp"), mesh)
        saver = checkpoint.Saver(
            tmp_path, placement, store=store, timeout=lambda: next(seconds, 0.5)
        )
        with pytest.raises(TimeoutError, match=r"no sign of life from rank 1 for 0\.5 s"):
            saver.save(1, {"x": whole["x"][:1]}, wait=True)

    on_ranks(Mesh(tp=2), save)


def test_a_rank_that_fails_tells_the_others(tmp_path, on_ranks):
    whole = {"x": torch.ones(4, 4)}

    def save(mesh, store):
        placement = checkpoint.Placement.of(whole, P("tp"), mesh)
        shape = (2, 4) if mesh.rank == 0 else (3, 4)
        with pytest.raises(ValueError, match=r"x: got torch.float32 \(3, 4\)") as caught:
            checkpoint.save(
                tmp_path / "1", {"x": torch.ones(shape)}, placement=placement, store=store
            )
        return str(caught.value)

    texts = on_ranks(Mesh(tp=2), save)
    assert texts[0].startswith("rank 1 could not save the checkpoint")
    assert checkpoint.steps(tmp_path) == []


def test_ranks_that_disagree_are_noticed(tmp_path, on_ranks):
    def save(mesh, store):
        whole = {"x": torch.ones(4, 4 + 2 * mesh.rank)}
        placement = checkpoint.Placement.of(whole, P("tp"), mesh)
        with pytest.raises(ValueError, match="rank 1: got another state, mesh or specs"):
            checkpoint.save(tmp_path / "1", {"x": whole["x"][:2]}, placement=placement, store=store)

    on_ranks(Mesh(tp=2), save)
    assert checkpoint.steps(tmp_path) == []
