"""Checkpoints: exact there and back, readable by plain Orbax, complete or not there at all."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

from functron import checkpoint, tree


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple


@pytest.fixture
def value():
    generator = torch.Generator().manual_seed(0)
    return {
        "params": {
            "w": torch.randn(3, 4, generator=generator).t(),
            "half": torch.randn(5, generator=generator).bfloat16(),
            "eighth": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        },
        "opt": ((), Pair(torch.tensor(2**53 + 1), ({"mu": torch.randn(2, 2).double()}, None))),
        "mask": [torch.tensor([True, False]), torch.tensor([2**63 - 1, -(2**63)])],
    }


def same(a, b) -> bool:
    assert tree.structure(a) == tree.structure(b)
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


def test_there_and_back(tmp_path, value):
    checkpoint.save(tmp_path / "run" / "7", value, {"step": 7, "why": ["tests"]})
    like = tree.map(lambda leaf: leaf.to("meta"), value)
    restored = checkpoint.restore(tmp_path / "run" / "7", like)
    assert same(restored, value)
    restored["params"]["w"].add_(1)  # tensors of its own
    assert checkpoint.metadata(tmp_path / "run" / "7") == {"step": 7, "why": ["tests"]}


def test_without_a_like_it_is_nested_dicts(tmp_path, value):
    checkpoint.save(tmp_path / "0", value)
    restored = checkpoint.restore(tmp_path / "0")
    assert set(restored) == {"params", "opt", "mask"}
    assert restored["opt"]["1"]["first"].item() == 2**53 + 1
    assert restored["mask"]["1"].tolist() == [2**63 - 1, -(2**63)]
    assert checkpoint.metadata(tmp_path / "0") == {}


def test_a_part_can_be_read_alone(tmp_path, value):
    checkpoint.save(tmp_path / "0", value)
    like = {"params": {"half": value["params"]["half"]}}
    assert same(checkpoint.restore(tmp_path / "0", like), like)


def test_plain_orbax_reads_it(tmp_path, value):
    import orbax.checkpoint as ocp

    checkpoint.save(tmp_path / "0", value)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "0")
    np.testing.assert_array_equal(restored["params"]["w"], value["params"]["w"].numpy())
    assert restored["params"]["half"].dtype.name == "bfloat16"
    half = np.asarray(restored["params"]["half"], dtype=np.float32)
    np.testing.assert_array_equal(half, value["params"]["half"].float().numpy())
    assert int(restored["opt"]["1"]["first"]) == 2**53 + 1


def test_every_leaf_that_does_not_fit_is_named(tmp_path, value):
    checkpoint.save(tmp_path / "0", value)
    like = {
        "params": {"w": torch.ones(4, 4), "half": torch.ones(5), "wide": torch.ones(1)},
        "mask": [value["mask"][0]],
    }
    with pytest.raises(ValueError, match="does not hold what is asked for") as caught:
        checkpoint.restore(tmp_path / "0", like)
    text = str(caught.value)
    assert "params/w: got float32 (4, 3); wanted float32 (4, 4)" in text
    assert "params/half: got bfloat16 (5,); wanted float32 (5,)" in text
    assert "params/wide: got nothing; wanted a leaf; fix: did you mean 'params/w'?" in text
    assert "mask" not in text.split("known:")[0]


def test_what_cannot_be_stored_is_named(tmp_path):
    bad = {
        "a.b": torch.ones(1),
        "": torch.ones(1),
        "number": 3,
        "meta": torch.ones(2, device="meta"),
        "x/y": torch.ones(1),
        "x": {"y": torch.ones(1)},
    }
    with pytest.raises(ValueError, match="cannot save the checkpoint") as caught:
        checkpoint.save(tmp_path / "0", bad)
    text = str(caught.value)
    for path in ("a.b", "", "number", "meta", "x/y"):
        assert f"- {path}: " in text
    assert not (tmp_path / "0").exists()


def test_nothing_is_overwritten(tmp_path, value):
    checkpoint.save(tmp_path / "0", value)
    with pytest.raises(ValueError, match="an existing path"):
        checkpoint.save(tmp_path / "0", {"other": torch.ones(1)})
    assert "params" in checkpoint.restore(tmp_path / "0")


def test_only_complete_checkpoints_count(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint.latest(tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints"
    (folder / "notes").mkdir(parents=True)
    (folder / "30").mkdir()  # begun by something that died
    (folder / "40.orbax-checkpoint-tmp-0").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoint.latest(folder)
    for step in (9, 10):
        checkpoint.save(folder / str(step), {"x": torch.tensor(step)})
    assert checkpoint.steps(folder) == [9, 10]
    assert checkpoint.latest(folder) == folder / "10"
    for path, got in ((folder / "30", "an incomplete checkpoint"), (folder / "5", "nothing there")):
        with pytest.raises(ValueError, match=f"got {got}; wanted a complete checkpoint"):
            checkpoint.restore(path)


def test_a_save_that_fails_leaves_no_checkpoint(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path / "1", {"x": torch.ones(3)})
    assert checkpoint.steps(tmp_path) == []


def test_orbax_and_jax_wait_for_the_first_checkpoint():
    program = "import sys, functron.cli.train; print({'jax', 'orbax'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
