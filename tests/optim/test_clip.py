"""Global norms and clipping: Optax, and the dense numbers on every sharding."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron import optim
from functron.spmd import Mesh, P, shard_map


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def grads(dtype=torch.float64):
    leaves = {"a": random(4, 8), "b": random(8, seed=1), "c": random(2, 4, 4, seed=2)}
    return {name: leaf.to(dtype) for name, leaf in leaves.items()}


SPECS = [
    {"a": P(), "b": P(), "c": P()},
    {"a": P("dp", "tp"), "b": P("tp"), "c": P()},
    {"a": P(None, ("dp", "tp")), "b": P(), "c": P("dp", None, "tp")},
    {"a": P(("tp", "dp")), "b": P("dp"), "c": P(None, "fsdp", "tp")},
]


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(dp=1, tp=2), Mesh()], ids=str)
def test_global_norm_is_the_dense_norm_on_every_sharding(specs, mesh):
    value = grads()
    expected = np.sqrt(sum(float((g.numpy() ** 2).sum()) for g in value.values()))
    norm = shard_map(lambda g: optim.global_norm(g, specs), mesh, (specs,), P())(value)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(expected, rel=1e-14)
    assert float(optim.global_norm(value)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("specs", SPECS)
def test_clipping_in_place_and_pure_agree_with_optax_on_shards(specs):
    value = grads()
    want, _ = optax.clip_by_global_norm(0.7).update(
        {k: v.numpy().astype(np.float32) for k, v in value.items()}, optax.EmptyState()
    )
    clip = optim.clip_by_global_norm(0.7, specs)

    for method in (clip.update, clip.update_):
        copy = {k: v.clone() for k, v in value.items()}
        got = shard_map(lambda g, m=method: m(g, ())[0], Mesh(dp=2, tp=2), (specs,), specs)(copy)
        for name in value:
            np.testing.assert_allclose(got[name].numpy(), want[name], rtol=1e-6)
        assert (copy["a"] == value["a"]).all() == (method is clip.update)


@given(scale=st.floats(1e-3, 1e3), low=st.booleans())
def test_small_gradients_pass_bitwise_and_large_ones_have_the_maximum(scale, low):
    value = {k: v * scale for k, v in grads(torch.bfloat16 if low else torch.float32).items()}
    norm = float(optim.global_norm(value))
    clipped, state = optim.clip_by_global_norm(1.0).update(value, ())
    assert state == ()
    if norm < 1:
        assert all((clipped[k] == value[k]).all() for k in value)
    else:
        assert float(optim.global_norm(clipped)) == pytest.approx(1.0, rel=4e-3 if low else 1e-6)


def test_zero_gradients_and_no_gradients():
    zeros = {"a": torch.zeros(3)}
    assert optim.clip_by_global_norm(1.0).update(zeros, ())[0]["a"].tolist() == [0, 0, 0]
    assert float(optim.global_norm({})) == 0


def test_not_a_number_is_not_hidden():
    bad = {"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}
    clipped, _ = optim.clip_by_global_norm(1.0).update(bad, ())
    assert clipped["b"].isnan().all()


def test_low_precision_is_accumulated_in_float32():
    """4096 ones in bfloat16: a bfloat16 sum of squares would stop at 256."""
    norm = optim.global_norm({"a": torch.ones(4096, dtype=torch.bfloat16)})
    assert norm.dtype == torch.float32
    assert float(norm) == 64.0


def test_a_shard_without_its_spec_is_refused_by_the_next_update():
    """Clipping without specs scales each rank by its own norm: the replicated leaf then drifts."""
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0))
    params = {"w": torch.zeros(4), "norm": torch.zeros(2)}
    specs = {"w": P("tp"), "norm": P()}

    def step(params, grads):
        return optimizer.step_(grads, optimizer.init(params), params)[0]

    mapped = shard_map(step, Mesh(tp=2), (specs, specs), specs)
    with pytest.raises(ValueError, match="clip_by_global_norm the same specs") as caught:
        mapped(params, {"w": torch.arange(4.0), "norm": torch.ones(2)})
    assert "norm: got gradients that vary over mesh axis 'tp'" in str(caught.value)


def test_elementwise_clip_is_optax():
    value = grads(torch.float32)
    want, _ = optax.clip(0.5).update({k: jnp.asarray(v) for k, v in value.items()}, None)
    clip = optim.clip(0.5)
    pure = clip.update(value, ())[0]
    donated = clip.update_({k: v.clone() for k, v in value.items()}, ())[0]
    for name in value:
        np.testing.assert_array_equal(pure[name].numpy(), want[name])
        np.testing.assert_array_equal(donated[name].numpy(), want[name])


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_a_maximum_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match=r"max_norm=.*wanted a positive number; fix: leave"):
        optim.clip_by_global_norm(bad)
    with pytest.raises(ValueError, match="max_delta"):
        optim.clip(bad)
