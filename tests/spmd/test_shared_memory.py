"""Collectives through the memory of one host: values to the bit, and messages where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from functron.spmd import shared_memory

CHECKS = ("values", "layouts", "others", "orders", "transfers", "busy", "mismatch", "late")


def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_shared_memory.py"), 4, *CHECKS, timeout=120)
    for check in CHECKS:  # of the last one two ranks end early
        assert done.stdout.count(f"{check} on ") == (2 if check == "late" else 4)


def test_a_kind_is_a_number_and_back():
    for op in shared_memory._OPS:
        for dtype in shared_memory._DTYPES:
            kind = shared_memory.ExchangeKind(op, dtype, (1 << 56) - 1)
            assert shared_memory.ExchangeKind.decode(kind.encode()) == kind
            assert 0 <= kind.encode() < 1 << 63


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The name of a file for two ranks, as the first tells it to the others."""
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    return shared_memory._make_file(2)


def test_another_host_has_no_such_file(made):
    Path(made.partition(" ")[2]).unlink()
    assert shared_memory._open(made, 1, 2) is None


def test_a_file_of_another_host_is_told_by_its_number(made):
    nonce, _, name = made.partition(" ")
    assert shared_memory._open(f"{'0' * len(nonce)} {name}", 1, 2) is None
    assert shared_memory._open(made, 1, 2) is not None


def test_without_room_for_the_file_there_is_none(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    assert shared_memory._make_file(2) == ""
    assert not [*tmp_path.iterdir()]
    assert shared_memory._open("", 1, 2) is None


def test_who_ends_is_known_by_the_lock_that_the_process_held(made):
    memory = shared_memory._open(made, 0, 2)
    assert memory is not None
    memory.rings.of(torch.float32)[1][0] = 3.0
    assert memory.ended() == [1]  # nobody holds the byte of the other rank
