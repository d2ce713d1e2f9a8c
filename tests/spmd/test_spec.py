"""Spec arithmetic against JAX's NamedSharding, and its errors."""

import copy
import pickle

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from functron import Mesh, P, Rules
from functron.spmd import spec as sharding

MESH = Mesh(dp=2, tp=2, ep=2)
JAX_MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("dp", "tp", "ep"))


@st.composite
def specs(draw, num_dims=3):
    axes = draw(st.permutations(["dp", "tp", "ep"]))
    cut = sorted(draw(st.lists(st.integers(0, 3), min_size=num_dims, max_size=num_dims)))
    parts = [tuple(axes[a:b]) for a, b in zip([0, *cut[:-1]], cut, strict=True)]
    entries = [None if not p else p[0] if len(p) == 1 and draw(st.booleans()) else p for p in parts]
    return entries[: draw(st.integers(0, num_dims))]


@given(specs())
def test_shards_are_those_of_jax(entries):
    shape = (8, 16, 24)
    value = np.arange(np.prod(shape)).reshape(shape)
    layout = NamedSharding(JAX_MESH, PartitionSpec(*entries)).devices_indices_map(shape)
    spec = P(*entries)
    shards = []
    for rank, device in enumerate(JAX_MESH.devices.flat):
        where = MESH.coordinate(rank)
        mine = sharding.shard(torch.from_numpy(value), spec, MESH, where)
        np.testing.assert_array_equal(mine, value[layout[device]])
        starts = tuple(s.start or 0 for s in layout[device])
        assert sharding.offsets(shape, spec, MESH, where) == starts
        assert sharding.local_shape(shape, spec, MESH) == tuple(mine.shape)
        assert sharding.global_shape(mine.shape, spec, MESH) == shape
        shards.append(mine)
    np.testing.assert_array_equal(sharding.unshard(shards, spec, MESH), value)


def test_validation_lists_every_offender():
    value = {"a": torch.zeros(3, 4), "b": [torch.zeros(4), torch.zeros(4, 6)]}
    specs = {"a": P("dp"), "b": [P("dp", None), P("tp", "tq")]}
    with pytest.raises(ValueError, match="params cannot be sharded") as error:
        sharding.validate(value, specs, Mesh(dp=2, tp=2), what="params")
    text = str(error.value)
    assert "params/a: got dim 0 of shape (3, 4), 3, split by P('dp')" in text
    assert "pad dim 0 to 4" in text
    assert "params/b/0: got P('dp', None) for shape (4,)" in text
    assert "params/b/1" in text
    assert "use one of" in text or "did you mean 'tp'" in text


def test_entries_must_be_names():
    with pytest.raises(TypeError, match="wanted an axis name"):
        P(0)


@given(specs())
def test_specs_survive_copies(entries):
    spec = P(*entries)
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
    assert type(pickle.loads(pickle.dumps(spec))) is P


def test_rules_map_logical_axes():
    rules = Rules({"heads": "tp", "mlp": ("ep", "tp"), "vocab": None})
    assert rules.spec(("layers", "embed", "heads", None)) == P(None, None, "tp", None)
    assert rules.spec(("mlp", "vocab")) == P(("ep", "tp"), None)


def test_rules_refuse_an_axis_twice():
    with pytest.raises(ValueError, match=r"(?s)blocks/w.*mesh axis 'tp' on one dim at most"):
        Rules({"heads": "tp", "mlp": "tp"}).spec(("heads", "mlp"), path="blocks/w")


def test_unshard_wants_one_shard_per_rank():
    with pytest.raises(ValueError, match="got 3 shards; wanted one per rank, 8"):
        sharding.unshard([torch.zeros(1)] * 3, P("dp"), MESH)
