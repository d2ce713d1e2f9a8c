"""ParamDefs: published counts, values that do not depend on the mesh, and the errors."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

import functron as ft
from functron import Mesh, P, ParamDef, Rules, gpt, random, tree
from functron.spmd import BoundMesh
from functron.spmd.params import Normal, decay_mask, ones, stack, zeros
from functron.spmd.spec import shard

DEFS = {
    "embed": ParamDef((16, 6), ("vocab", "embed"), Normal(0.5)),
    "block": {
        "up": ParamDef((6, 8), ("embed", "mlp"), Normal(2.0), torch.float64),
        "scale": ParamDef((6,), ("embed",), ones, decay=False),
        "bias": ParamDef((8,), ("mlp",), zeros, torch.bfloat16, decay=False),
    },
}
RULES = Rules({"vocab": "tp", "mlp": ("dp", "tp")})
SPECS = {
    "embed": P("tp", None),
    "block": {"up": P(None, ("dp", "tp")), "scale": P(None), "bias": P(("dp", "tp"))},
}
KEY = random.key(3)


def bound(mesh: Mesh, rank: int) -> BoundMesh:
    """One rank of a mesh, without processes: drawing parameters communicates nothing."""
    return BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")


# Counts

# As transformers counts the published checkpoints. GPT-2's embedding is counted once (it is tied).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_counts(name):
    config = gpt.PRESETS[name]
    padding = (config.padded_vocab - config.vocab_size) * config.embed_dim
    tables = 1 if config.tied else 2
    assert ft.num_params(gpt.defs(config)) - tables * padding == PUBLISHED[name]
    # GPT-2's 50257 tokens become 50304 rows; Llama's 128256 need no padding
    assert config.padded_vocab - config.vocab_size == (47 if name.startswith("gpt2") else 0)


def test_gpt3_has_the_size_of_its_paper():
    config = gpt.PRESETS["gpt3-175b"]
    assert (config.num_layers, config.embed_dim, config.num_heads) == (96, 12288, 96)
    assert ft.num_params(gpt.defs(config)) == pytest.approx(175e9, rel=5e-3)


def test_num_params():
    assert ft.num_params(DEFS) == 16 * 6 + 6 * 8 + 6 + 8
    assert ft.num_params({}) == 0


# Abstract parameters


def test_abstract_parameters_take_no_memory():
    abstract = ft.abstract_params(gpt.defs(gpt.PRESETS["llama3-405b"]))  # 1.6 TB in float32
    assert {leaf.device.type for leaf in tree.leaves(abstract)} == {"meta"}
    assert sum(leaf.numel() for leaf in tree.leaves(abstract)) == PUBLISHED["llama3-405b"]
    assert abstract["blocks"]["attention"]["q"]["w"].shape == (126, 16384, 128, 128)
    assert abstract["blocks"]["attention"]["k"]["w"].shape == (126, 16384, 8, 128)


def test_abstract_and_real_parameters_have_one_shape():
    def kinds(values):
        return tree.map(lambda leaf: (tuple(leaf.shape), leaf.dtype), values)

    expected = tree.map(lambda d: (d.shape, d.dtype), DEFS)
    assert kinds(ft.abstract_params(DEFS)) == expected
    assert kinds(ft.init_params(KEY, DEFS)) == expected


# Specs, masks and stacks


def test_param_specs():
    assert ft.param_specs(DEFS, RULES) == SPECS


def test_rules_that_split_one_parameter_twice():
    with pytest.raises(ValueError, match=r"(?s)block/up.*mesh axis 'tp' on one dim at most"):
        ft.param_specs(DEFS, Rules({"embed": "tp", "mlp": "tp"}))


def test_decay_mask():
    assert decay_mask(DEFS) == {
        "embed": True,
        "block": {"up": True, "scale": False, "bias": False},
    }


def test_stack():
    stacked = stack(DEFS["block"], 5)
    assert stacked["up"] == replace(
        DEFS["block"]["up"], shape=(5, 6, 8), axes=("layers", "embed", "mlp")
    )
    assert not stacked["scale"].decay
    values = ft.init_params(KEY, stacked)["up"]
    assert not torch.equal(values[0], values[1])  # layers start different


def test_axes_for_every_dim():
    with pytest.raises(ValueError, match=r"got 1 logical axes \('embed',\) for shape \(2, 3\)"):
        ParamDef((2, 3), ("embed",), ones)


# Values


def test_values_are_those_of_jax():
    """Each leaf's key is the given one folded with the CRC-32 of its path."""
    with jax.enable_x64(True):
        drawn = ft.init_params(KEY, DEFS)
        for path, value, stddev in (
            ("embed", drawn["embed"], 0.5),
            ("block/up", drawn["block"]["up"], 2.0),
        ):
            key = jax.random.fold_in(jax.random.key(3), np.uint32(zlib.crc32(path.encode())))
            dtype = str(value.dtype).removeprefix("torch.")
            expected = stddev * np.array(jax.random.normal(key, value.shape, dtype))
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert drawn["block"]["scale"].tolist() == [1.0] * 6
    assert drawn["block"]["bias"].tolist() == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_statistics(dtype):
    count, stddev = 400 * 500, 0.02
    d = ParamDef((400, 500), (None, None), Normal(stddev), dtype)
    value = ft.init_params(KEY, {"w": d})["w"]
    assert value.dtype == dtype
    x = value.double() / stddev
    assert abs(x.mean()) < 5 / math.sqrt(count)
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / count)
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)  # the fourth moment of a normal
    within = float((x.abs() < 1).double().mean())
    assert abs(within - 0.682689) < 5 * math.sqrt(0.6827 * 0.3173 / count)


def test_added_leaves_change_no_others():
    more = {**DEFS, "a_new_one": ParamDef((4,), (None,), Normal(1.0))}
    more["block"] = {**DEFS["block"], "zz": ParamDef((4,), (None,), Normal(1.0))}
    before, after = ft.init_params(KEY, DEFS), ft.init_params(KEY, more)
    assert torch.equal(after["embed"], before["embed"])
    assert torch.equal(after["block"]["up"], before["block"]["up"])


def test_keys_and_paths_make_values_differ():
    twins = {name: ParamDef((64,), (None,), Normal(1.0)) for name in ("a", "b")}
    drawn, other = ft.init_params(KEY, twins), ft.init_params(random.key(4), twins)
    assert not torch.equal(drawn["a"], drawn["b"])
    assert not torch.equal(drawn["a"], other["a"])
    assert torch.equal(drawn["a"], ft.init_params(KEY, twins)["a"])


@pytest.mark.parametrize("text", ["tp=2", "dp=2", "dp=2,tp=4", "tp=4,dp=2"])
def test_every_rank_draws_its_shard_of_the_same_values(text):
    mesh = Mesh.parse(text)
    whole = ft.init_params(KEY, DEFS)
    simulated = ft.init_params(KEY, DEFS, SPECS, mesh)
    assert all(map(torch.equal, tree.leaves(simulated), tree.leaves(whole)))
    for rank in range(mesh.size):
        mine = ft.init_params(KEY, DEFS, SPECS, bound(mesh, rank))
        expected = tree.map(
            lambda value, spec, rank=rank: shard(value, spec, mesh, mesh.coordinate(rank)),
            whole,
            SPECS,
        )
        assert tree.paths(mine) == tree.paths(expected)
        assert all(map(torch.equal, tree.leaves(mine), tree.leaves(expected)))


def test_a_rank_draws_only_its_own_numbers():
    """A parameter of 4 TB, of which each of 2^30 ranks holds one row."""
    d = ParamDef((2**30, 1024), ("vocab", None), Normal(1.0))
    mesh = Mesh(tp=2**30)
    rows = [
        ft.init_params(KEY, {"w": d}, {"w": P("tp")}, bound(mesh, rank))["w"]
        for rank in (0, 777, 2**30 - 1)
    ]
    assert {row.shape for row in rows} == {(1, 1024)}
    assert len({row.sum().item() for row in rows}) == 3


# Errors


@pytest.mark.parametrize("where", ["simulated", "bound"])
def test_specs_that_do_not_divide_are_all_named(where):
    mesh = Mesh(tp=4)
    specs = {"embed": P(None, "tp"), "block": {"up": P("tp"), "scale": P("tp"), "bias": P("tp")}}
    with pytest.raises(ValueError, match="cannot be sharded") as caught:
        ft.init_params(KEY, DEFS, specs, mesh if where == "simulated" else bound(mesh, 0))
    for path in ("params/embed", "params/block/up", "params/block/scale"):
        assert path in str(caught.value)
    assert "params/block/bias" not in str(caught.value)  # 8 divides by 4
    assert "multiple of 4" in str(caught.value)


def test_specs_of_another_tree():
    with pytest.raises(ValueError, match="params"):
        ft.init_params(KEY, DEFS, {"embed": P()}, Mesh(tp=2))


def test_a_bound_mesh_needs_specs():
    with pytest.raises(ValueError, match=r"specs: got None.*fix: pass param_specs"):
        ft.init_params(KEY, DEFS, mesh=bound(Mesh(tp=2), 0))


def test_constant_initializers_at_an_index():
    index = [torch.tensor([1, 4]), None]
    for init, value in ((zeros, 0.0), (ones, 1.0)):
        drawn = init(KEY, (6, 3), torch.float64, index)
        assert drawn.dtype == torch.float64
        assert drawn.tolist() == [[value] * 3] * 2
