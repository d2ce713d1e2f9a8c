"""Restoring parts, slices, other dtypes; every dtype and odd shape; plain Orbax and JAX."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from functron import Mesh, P, checkpoint, tree
from functron.checkpoint.database import _BY_NAME


def odd_values() -> dict:
    """Every dtype, with bits of all kinds, and shapes that are easily got wrong."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (7 * 5 * 16,), dtype=torch.uint8, generator=generator)
    out = {}
    for name, dtype in _BY_NAME.items():
        if dtype == torch.bool:
            out[name] = (raw[:35] > 99).view(7, 5)
        else:
            out[name] = raw[: 35 * dtype.itemsize].view(dtype).view(7, 5)
    return {
        "dtypes": out,
        "shapes": {
            "scalar": torch.tensor(3.5),
            "empty": torch.ones(0),
            "flat": torch.ones(3, 0, 2, dtype=torch.int16),
            "strided": torch.arange(24).view(2, 3, 4).permute(2, 0, 1)[1:],
            "deep": torch.arange(32.0).view(1, 2, 1, 2, 2, 2, 2, 1),
        },
    }


def bits(leaf: torch.Tensor) -> bytes:
    return leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_and_shape(tmp_path):
    values = odd_values()
    checkpoint.save(tmp_path / "1", values)
    like = tree.map(lambda leaf: leaf.to("meta"), values)
    restored = checkpoint.restore(tmp_path / "1", like)
    for path, a, b in zip(
        tree.paths(values), tree.leaves(restored), tree.leaves(values), strict=True
    ):
        assert (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b)), path
    checkpoint.verify(tmp_path / "1")


def test_into_tensors_that_are_not_contiguous(tmp_path):
    x = torch.arange(24.0).view(4, 6)
    checkpoint.save(tmp_path / "1", {"x": x, "half": x.bfloat16()})
    state = {"x": torch.zeros(6, 4).t(), "half": torch.zeros(8, 12).bfloat16()[::2, ::2]}
    assert checkpoint.restore_(tmp_path / "1", state) is state
    assert torch.equal(state["x"], x)
    assert torch.equal(state["half"], x.bfloat16())


def test_casting_only_when_asked_and_only_floats(tmp_path):
    x = torch.tensor([1.0, 2.0**-10, 3.14159])
    checkpoint.save(tmp_path / "1", {"x": x, "n": torch.tensor([1, 2])})
    like = {"x": torch.empty(3, dtype=torch.bfloat16), "n": torch.empty(2, dtype=torch.int32)}
    with pytest.raises(ValueError, match="does not hold what is asked for") as caught:
        checkpoint.restore(tmp_path / "1", like)
    assert "x: got float32 (3,); wanted bfloat16 (3,); fix: cast=True" in str(caught.value)
    assert "n: got int64 (2,); wanted int32 (2,)" in str(caught.value)
    with pytest.raises(ValueError, match="n: got int64") as caught:
        checkpoint.restore(tmp_path / "1", like, cast=True)
    assert "x: got" not in str(caught.value)
    restored = checkpoint.restore(tmp_path / "1", {"x": like["x"]}, cast=True)
    assert torch.equal(restored["x"], x.bfloat16())
    wide = checkpoint.restore(tmp_path / "1", {"x": x.double()}, cast=True)
    assert torch.equal(wide["x"], x.double())


def test_only_a_subtree_on_a_mesh(tmp_path, on_ranks):
    whole = {"params": {"w": torch.arange(12.0).view(6, 2)}, "opt": {"mu": torch.ones(6, 2)}}
    checkpoint.save(tmp_path / "1", whole)

    def restore(mesh, store):
        placement = checkpoint.Placement.of({"params": whole["params"]}, P("tp"), mesh)
        like = {"params": {"w": torch.empty(2, 2)}}
        return checkpoint.restore(tmp_path / "1", like, placement=placement)["params"]["w"]

    parts = on_ranks(Mesh(tp=3), restore)
    assert torch.equal(torch.cat(parts), whole["params"]["w"])


def test_slices_of_an_opened_checkpoint(tmp_path):
    x = torch.randn(300, 40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    checkpoint.save(tmp_path / "1", {"a": {"x": x}, "n": torch.tensor(5)}, {"note": "hello"})
    stored = checkpoint.Checkpoint(tmp_path / "1")
    assert list(stored) == ["a/x", "n"]
    assert stored.metadata == {"note": "hello"}
    leaf = stored["a/x"]
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == ((300, 40, 8), torch.bfloat16, x.nbytes)
    for where in (
        slice(0, 10),
        (3,),
        (slice(2, 9), 4),
        (..., slice(1, 3)),
        (299, 39, 7),
        (),
        -1,
        (slice(-3, None), slice(None, None, 7)),
        slice(9, 3),
        slice(290, 999),
    ):
        assert torch.equal(leaf[where], x[where])
    assert stored["n"][()].item() == 5
    for wrong in (300, -301, (0, 0, 0, 0), (None, 1), slice(None, None, -1)):
        with pytest.raises(IndexError, match="got"):
            leaf[wrong]
    with pytest.raises(KeyError, match="did you mean 'a/x'"):
        stored["a/y"]


def test_a_slice_reads_only_its_chunks(tmp_path):
    import tensorstore as ts

    checkpoint.save(tmp_path / "1", {"x": torch.ones(64, 1 << 18)})  # 64 MiB in chunks of 8

    def bytes_read() -> int:
        found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in found for value in metric["values"])

    before = bytes_read()
    assert checkpoint.Checkpoint(tmp_path / "1")["x"][5, :3].tolist() == [1, 1, 1]
    assert 0 < bytes_read() - before < 9 << 20


def test_plain_orbax_and_jax_read_what_many_ranks_wrote(tmp_path, on_ranks):
    whole = {"w": torch.arange(48.0).view(8, 6), "n": torch.tensor(2**40), "z": torch.ones(0, 3)}
    specs = {"w": P("dp", "tp"), "n": P(), "z": P()}

    def save(mesh, store):
        i, j = mesh.coordinate["dp"], mesh.coordinate["tp"]
        value = {**whole, "w": whole["w"][4 * i : 4 * i + 4, 3 * j : 3 * j + 3]}
        placement = checkpoint.Placement.of(whole, specs, mesh)
        checkpoint.save(tmp_path / "1", value, {"a": [1]}, placement=placement, store=store)

    on_ranks(Mesh(dp=2, tp=2), save)
    read = ocp.PyTreeCheckpointer().restore(tmp_path / "1")
    np.testing.assert_array_equal(read["w"], whole["w"].numpy())
    assert int(read["n"]) == 2**40
    assert read["z"].shape == (0, 3)

    # and as JAX arrays, sharded over other devices
    devices = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("x",))
    sharding = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, "x"))
    wanted = {"w": jax.ShapeDtypeStruct((8, 6), np.float32, sharding=sharding)}
    arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        array = checkpointer.restore(
            tmp_path / "1",
            args=ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True),
        )["w"]
        assert checkpointer.metadata(tmp_path / "1").custom_metadata == {"a": [1]}
    assert len(array.addressable_shards) == 3
    np.testing.assert_array_equal(array, whole["w"].numpy())


@pytest.mark.parametrize("zarr3", [False, True])
def test_what_plain_orbax_wrote_can_be_read(tmp_path, zarr3):
    values = {"a": {"x": np.arange(12.0).reshape(3, 4)}, "b": [np.ones(3, np.int32), np.float32(2)]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)) as checkpointer:
        arguments = ocp.args.PyTreeSave(values)
        checkpointer.save(tmp_path / "1", args=arguments, custom_metadata={"by": "orbax"})
    like = {"a": {"x": torch.empty(3, 4, dtype=torch.float64)}, "b": [torch.empty(3).int()]}
    restored = checkpoint.restore(tmp_path / "1", like)
    assert restored["a"]["x"].tolist() == values["a"]["x"].tolist()
    assert restored["b"][0].tolist() == [1, 1, 1]
    assert checkpoint.metadata(tmp_path / "1") == {"by": "orbax"}


# --- what people see


def test_texts(tmp_path):
    state = {"params": {"w": torch.ones(4, 256)}, "step": torch.tensor(3)}
    for step in (3, 12):
        checkpoint.save(tmp_path / str(step), state, {"loss": step / 4})
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    lines = checkpoint.list_text(tmp_path).splitlines()
    assert lines[0].split() == ["step", "bytes", "leaves", "mesh", "made", "metadata"]
    assert [line.split()[0] for line in lines[1:3]] == ["3", "12"]
    assert '{"loss": 3.0}' in lines[2]
    assert lines[3] == "unfinished: 20.orbax-checkpoint-tmp"

    text = checkpoint.show_text(tmp_path / "12")
    assert "2 leaves, 4.01 KiB of values in" in text
    assert '"loss": 3.0' in text
    row = next(line for line in text.splitlines() if "params/w" in line)
    assert row.split("  ")[1:] == ["params/w", "float32", "(4, 256)", "4.00 KiB", "(4, 256)"]
    assert "all files and checksums are right" in checkpoint.verify_text(tmp_path / "12")

    (tmp_path / "12" / "_METADATA").unlink()
    assert "damaged" in checkpoint.list_text(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        checkpoint.verify_text(tmp_path / "12")
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint.list_text(tmp_path / "nothing")
