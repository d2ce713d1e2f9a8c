"""Hashes of the state's bits and of batches, and replicas that differ."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from functron.apps.guard.corruption import (
    COLUMNS,
    ROWS,
    Finding,
    _minority,
    leaf_hash,
    words,
)
from functron.apps.guard.faults import flip_
from functron.cli.main import main
from functron.training import run_folder
from functron.training.run import batch_hash

MASK = 2**64 - 1


def split_mix(x: int) -> int:
    """The finaliser of SplitMix64 in Python's integers; Steele, Lea and Flood 2014."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def odd(position: int, key: int) -> int:
    return split_mix(position + key * 0x9E3779B97F4A7C15 % 2**63 & MASK) | 1


def hashed(raw: bytes) -> int:
    """The hash of bytes, word by word in Python's integers."""
    width, total = 4 * COLUMNS, len(raw)
    for row in range(-(-len(raw) // width)):
        part = raw[row * width : (row + 1) * width].ljust(width, b"\0")
        ints = np.frombuffer(part, "<i4").tolist()
        inner = sum(x * odd(column, 1) for column, x in enumerate(ints)) & MASK
        total += split_mix(inner) * odd(row, 2)
    return split_mix(total & MASK)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("size", [1, 7, 2 * COLUMNS + 3])
def test_a_hash_is_what_integers_say(dtype, size):
    x = (torch.randn(size) * 3).to(dtype)
    assert int(leaf_hash(x)) & MASK == hashed(x.view(torch.uint8).numpy().tobytes())


def test_rows_beyond_those_that_are_hashed_at_a_time_count():
    x = torch.zeros((ROWS + 2) * COLUMNS, dtype=torch.int32)
    seen = {int(leaf_hash(x))}
    for place in (0, ROWS * COLUMNS - 1, ROWS * COLUMNS, (ROWS + 2) * COLUMNS - 1):
        flip_(x, place, 31)
        seen.add(int(leaf_hash(x)))
    assert len(seen) == 5


def test_every_flipped_bit_another_order_and_another_sign_are_seen():
    rng, x = random.Random(0), torch.randn(3001)
    before, found = int(leaf_hash(x)), {}
    for _ in range(300):
        where = rng.randrange(3001), rng.randrange(32)
        flip_(x, *where)
        assert found.setdefault(int(leaf_hash(x)), where) == where
        flip_(x, *where)
    assert int(leaf_hash(x)) == before
    assert before not in found
    assert before != int(leaf_hash(-x)) != int(leaf_hash(x.flip(0))) != before
    assert int(leaf_hash(x.reshape(1, 3001).expand(2, -1)[1])) == before


def test_parts_of_a_batch_add_up():
    rng = torch.Generator().manual_seed(0)
    batch = {
        "tokens": torch.randint(0, 99, (8, 32), generator=rng),
        "weights": torch.randn(8, 32, generator=rng),
        "rows": torch.arange(8),
    }

    def part(rows: slice, columns: slice) -> int:
        own = {k: v[rows, columns] if v.dim() > 1 else v[rows] for k, v in batch.items()}
        return batch_hash(own, columns.start)

    whole, halves = batch_hash(batch), (slice(0, 16), slice(16, 32))
    assert sum(part(slice(r, r + 2), c) for r in range(0, 8, 2) for c in halves) % 2**64 == whole
    for name in ("tokens", "rows"):
        batch[name] = batch[name].clone()
        batch[name].view(-1)[3] += 1
        assert batch_hash(batch) != whole


def test_most_say_who_is_wrong():
    assert _minority([5, 5, 5]) == ([], True)
    assert _minority([5, 7, 5]) == ([1], True)
    assert _minority([7, 5]) == ([0, 1], False)
    assert _minority([1, 1, 2, 2]) == ([0, 1, 2, 3], False)
    assert _minority([1, 2, 3, 1, 1]) == ([1, 2], True)


def test_a_message_names_ranks_and_leaves():
    text = words([Finding(f"params/{i}", (3,), 4, True) for i in range(6)], "step 8: corrupted")
    assert "params/0, params/1, params/2, params/3 and 2 more: got bits on rank 3 unlike" in text


def test_records_have_a_checksum_of_the_batch_whatever_the_mesh(tmp_path):
    small = [
        "--data", argparse.__file__, "--seq", "16", "--global-batch", "4", "--steps", "2",
        "--gpt.num-layers", "1", "--gpt.embed-dim", "16", "--gpt.num-heads", "2",
        "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "16",
    ]  # fmt: skip
    found = []
    for name, more in (("one", []), ("mesh", ["--mesh", "dp=2,cp=2"]), ("seed", ["--seed", "1"])):
        assert main(["train", *small, "--out", str(tmp_path / name), *more]) == 0
        found.append([r["batch"] for r in run_folder.records(tmp_path / name)])
    assert found[0] == found[1] != found[2]
    assert all(len(each) == 16 for each in found[0])


@pytest.mark.distributed
def test_flipped_bits_are_found_named_and_repaired(torchrun, tmp_path):
    torchrun(
        Path(__file__).with_name("gloo_corruption.py"), 4, tmp_path, argparse.__file__, timeout=300
    )
