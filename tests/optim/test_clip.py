"""Global norms and clipping: Optax, and the dense numbers on every sharding."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import optim, tree
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

    for donated in (False, True):
        copy = {k: v.clone() for k, v in value.items()}
        clipped = lambda g, donated=donated: clip.update(g, (), donated=donated)[0]
        donate = 0 if donated else ()
        got = shard_map(clipped, Mesh(dp=2, tp=2), (specs,), specs, donate=donate)(copy)
        for name in value:
            np.testing.assert_allclose(got[name].numpy(), want[name], rtol=1e-6)
        if not donated:
            assert torch.equal(copy["a"], value["a"])


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


GRADS = {"w": torch.arange(4.0), "norm": torch.ones(2)}
SPLIT = {"w": P("tp"), "norm": P()}
NEEDS_SPECS = {
    "global_norm": lambda g, specs: optim.global_norm(g, specs),
    "clip_by_global_norm": lambda g, specs: optim.clip_by_global_norm(0.1, specs).update(g, ())[0],
    "all_finite": lambda g, specs: optim.all_finite(g, specs),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", ["global_norm", "clip_by_global_norm", "all_finite"])
def test_no_rank_has_a_norm_of_its_own(name, check):
    """Without specs a mesh gave per-rank norms: each shard was scaled by its own."""
    run = lambda specs: shard_map(
        lambda g: NEEDS_SPECS[name](g, specs), Mesh(tp=2), (SPLIT,),
        SPLIT if name == "clip_by_global_norm" else P(), check=check,
    )  # fmt: skip
    message = rf"(?s){name}.*got no specs, on a mesh with 'tp'; wanted.*pass the parameters' specs"
    for call in (lambda: run(None)(GRADS), lambda: ft.trace(run(None))(GRADS)):
        with pytest.raises(ValueError, match=message):
            call()
    NEEDS_SPECS[name](GRADS, None)
    shard_map(
        lambda g: NEEDS_SPECS[name](g, None), Mesh(), (SPLIT,), SPLIT if "clip" in name else P()
    )(GRADS)
    # sqrt(0 + 1 + 4 + 9 + 1 + 1) = 4
    want = {
        "global_norm": torch.tensor(4.0),
        "clip_by_global_norm": {k: v / 40 for k, v in GRADS.items()},
        "all_finite": torch.tensor(True),
    }[name]
    torch.testing.assert_close(run(SPLIT)(GRADS), want)


def test_a_leaf_that_varies_where_its_spec_does_not_say_so_is_refused():
    norm = lambda g: optim.global_norm(g, {"w": P(), "norm": P()})
    with pytest.raises(ValueError, match=r"w: got a leaf that varies over 'tp', and P\(\)"):
        shard_map(norm, Mesh(tp=2), (SPLIT,), P())(GRADS)


def test_a_step_tells_its_optimizer_the_specs():
    """Through make_step, chain, only and zero; by hand, an optimizer without them is refused."""
    mesh, params = Mesh(dp=2, tp=2), {"w": torch.ones(4, 2), "norm": torch.ones(2)}
    specs = {"w": P("tp"), "norm": P()}

    def loss(p, x, key):
        total = ft.lax.psum(p["w"].sum(), "tp")
        return ft.lax.psum((x * p["norm"] * total).sum(), "dp")

    # of ones: 8 by each of 8 weights, 32 by each of 2 norms
    norm = (8 * 8**2 + 2 * 32**2) ** 0.5
    plain = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0))
    shards = optim.shard_specs(params, specs, mesh)
    for optimizer in (plain, optim.only(plain, True), optim.zero(plain, shards=shards)):
        defs = {
            k: ft.ParamDef(tuple(v.shape), (None,) * v.dim(), ft.params.ones)
            for k, v in params.items()
        }
        state = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)
        gradients = ft.mean_gradients(loss, lambda x: 1, checks_sum=False)
        step = ft.make_step(gradients, optimizer, mesh, specs)
        state, metrics = step(state, torch.ones(4, 2))
        torch.testing.assert_close(metrics["grad_norm"], torch.tensor(norm))
        want = {"w": torch.full((4, 2), 1 - 0.8 / norm), "norm": torch.full((2,), 1 - 3.2 / norm)}
        torch.testing.assert_close(state.params, want)
        step_ = optimizer.step_
        alone = shard_map(lambda g, f=step_: f(g, ((), ((), ())), g)[0], mesh, (specs,), specs)
        with pytest.raises(ValueError, match=r"optimizer\.bind\(specs\)"):
            alone(params)


def test_elementwise_clip_is_optax():
    value = grads(torch.float32)
    want, _ = optax.clip(0.5).update({k: jnp.asarray(v) for k, v in value.items()}, None)
    clip = optim.clip(0.5)
    pure = clip.update(value, ())[0]
    donated = clip.update({k: v.clone() for k, v in value.items()}, (), donated=True)[0]
    for name in value:
        np.testing.assert_array_equal(pure[name].numpy(), want[name])
        np.testing.assert_array_equal(donated[name].numpy(), want[name])


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(ep=2, tp=2, dp=2)], ids=str)
def test_norm_of_each_leaf_and_layer(mesh):
    """Against sums of squares by hand; with a layerwise trust ratio, as LARS has it."""
    shapes = {"up": (3, 2, 4, 8), "bias": (3, 8), "embed": (6, 4)}
    axes = {
        "up": ("layers", "expert", None, "mlp"),
        "bias": ("layers", "mlp"),
        "embed": (None,) * 2,
    }
    defs = {k: ft.ParamDef(shapes[k], axes[k], ft.params.zeros) for k in shapes}
    specs = ft.param_specs(defs, ft.Rules({"expert": "ep", "mlp": "tp"}))
    value = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}

    def ratios(value):
        norms = optim.norm(value, specs, defs=defs)
        assert tree.structure(norms) == tree.structure(value)
        return tree.map(lambda x, n: x / n, value, norms)

    got = shard_map(ratios, mesh, (specs,), specs)(value)
    own = {"up": (2, 3), "bias": 1, "embed": (0, 1)}
    for name, x in value.items():
        want = x / x.square().sum(own[name], keepdim=True).sqrt()
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=0)
    leaves = shard_map(lambda v: optim.norm(v, specs), mesh, (specs,), P())(value)
    assert leaves["up"].shape == ()
    together = sum(n.square() for n in leaves.values()).sqrt()
    torch.testing.assert_close(together, optim.global_norm(value), rtol=1e-12, atol=0)
    low = optim.norm({"a": random(700, 700).bfloat16()})["a"]
    assert low.dtype == torch.float32
    assert float(low) == pytest.approx(float(random(700, 700).bfloat16().double().norm()), rel=1e-6)


def test_norm_of_shards_needs_their_specs():
    with pytest.raises(ValueError, match=r"(?s)norm: got no specs, on a mesh with 'tp'"):
        shard_map(optim.norm, Mesh(tp=2), (SPLIT,), P())(GRADS)


@pytest.mark.parametrize("factor", [0.5, -1.0, 1e-3])
def test_scale_is_optax(factor):
    value = grads(torch.float32)
    want, _ = optax.scale(factor).update({k: jnp.asarray(v) for k, v in value.items()}, ())
    ours = optim.chain(optim.scale(factor), optim.scale(1.0))
    pure, _ = ours.update(value, ours.init(value))
    copy = {k: v.clone() for k, v in value.items()}
    donated, _ = ours.update(copy, ours.init(value), donated=True)
    for name in value:
        np.testing.assert_array_equal(pure[name].numpy(), want[name])
        np.testing.assert_array_equal(donated[name].numpy(), want[name])


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_a_maximum_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match=r"max_norm=.*wanted a positive number; fix: leave"):
        optim.clip_by_global_norm(bad)
    with pytest.raises(ValueError, match="max_delta"):
        optim.clip(bad)


@pytest.mark.parametrize("size", [1, 511, 512, 600, 1024])
def test_norms_of_small_leaves_are_traced(size):
    """Also where a block of the sum is the only one, whose dim fake tensors of torch 2.11 keep."""
    value = {"w": torch.full((size,), 2.0), "b": torch.ones(3)}
    got = ft.jit(optim.global_norm, backend="eager")(value)
    assert got.shape == ()
    assert got.item() == pytest.approx((4 * size + 3) ** 0.5, rel=1e-6)


def large(kind):
    """Leaves on which a float32 sum of squares in one accumulator errs by 1e-4 and more."""
    generator = torch.Generator().manual_seed(0)
    if kind == "equal":
        return {"w": torch.full((2, 600, 1001), 0.1), "b": torch.full((1_200_002,), 0.3)}
    flat = torch.rand(2 * 600 * 1001, generator=generator)
    return {"w": flat.view(2, 1001, 600).mT, "b": torch.rand(1_200_002, generator=generator)}


@pytest.mark.parametrize(("kind", "near"), [("equal", 1e-6), ("random", 1e-7)])
def test_norms_of_large_leaves_are_those_of_float64_on_every_sharding(kind, near):
    value = large(kind)
    want = sum(leaf.double().square().sum() for leaf in value.values()).sqrt().item()
    for specs in ({"w": P(), "b": P()}, {"w": P(None, "tp"), "b": P("tp")}):
        norm = lambda g, specs=specs: optim.global_norm(g, specs)
        got = shard_map(norm, Mesh(tp=2), (specs,), P())(value)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(want, rel=near)
    for method in (optim.global_norm, ft.jit(optim.global_norm)):
        assert method(value).item() == pytest.approx(want, rel=near)
    layers = optim.Layers(("w/0", "w/1", "b"), frozenset({"w"}), {"w": [0, 1]})
    norms = optim.norms_by_layer({"g": (value, P())}, layers)["g"]
    rows = [*value["w"].double().flatten(1).norm(dim=1), value["b"].double().norm()]
    assert norms.tolist() == pytest.approx(torch.stack(rows).tolist(), rel=near)
