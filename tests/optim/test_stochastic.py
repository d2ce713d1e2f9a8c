"""Stochastic rounding of parameters: the same numbers on every mesh, and what masters would learn."""

from __future__ import annotations

import zlib

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, random, tree
from functron.ops.adamw import stochastic_round
from functron.ops.operations import use
from functron.optim import StochasticState, with_stochastic_rounding

SHAPES = {"blocks": {"norm": (3, 5), "up": (3, 4, 8)}, "embed": (8, 4), "bias": (7,)}
SPECS = {"blocks": {"norm": P(), "up": P(None, None, "tp")}, "embed": P("tp"), "bias": P()}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 4


def values(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    is_shape = lambda x: isinstance(x, tuple)
    value = tree.map(
        lambda s: torch.randn(s, generator=generator).to(dtype), SHAPES, is_leaf=is_shape
    )
    value["bias"] = value["bias"].float()  # not of low precision
    return value


def inner(kernels=None, **kwargs):
    kernels = use("reference") if kernels is None else kernels
    return optim.adamw(0.02, weight_decay=0.1, kernels=kernels, **kwargs)


def train(optimizer, mesh, specs, dtype=BF16, start=None):
    """The optimizer alone, on gradients that are whole and the same on all ranks."""
    layout, wanted = optimizer.specs(specs), optimizer.grad_specs(specs)
    params = values(0, dtype) if start is None else start
    state = ft.shard_map(optimizer.init, mesh, (specs,), layout, check=False)(params)
    # whole gradients, cut into what the optimizer wants of each rank; padding is of zeros
    cut = lambda grads: tree.unflatten(
        tree.structure(grads),
        [
            ft.spmd.spec.take(g, cuts)
            for g, cuts in zip(
                tree.leaves(grads), ft.spmd.spec.cut_tree(P(), wanted, grads), strict=True
            )
        ],
    )
    step = lambda grads, state, params: optimizer.step_(cut(grads), state, params)
    how = {"check": False, "donate": (0, 1, 2)}
    step = ft.shard_map(step, mesh, (P(), layout, specs), (specs, layout), **how)
    for seed in range(1, STEPS + 1):
        params, state = step(values(seed, dtype), state, params)
    return params, state


def equal(got, want):
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path


def test_one_step_by_hand():
    """p + update in float32, rounded by the bits of the path, the count and the position."""
    optimizer = with_stochastic_rounding(optim.sgd(0.1), seed=5)
    params, grads = values(0, BF16), values(1, BF16)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    got = optim.apply_updates(params, updates)
    for path, p, g, new in zip(
        *map(tree.leaves, (tree.map_with_path(lambda p, _: p, params), params, grads, got)),
        strict=True,
    ):
        value = p.float() - 0.1 * g.float()
        if p.dtype == BF16:
            key = random.fold_in(random.fold_in(random.key(5), 1), zlib.crc32(path.encode()))
            bits = random.bits(key, p.shape, bit_width=16).to(torch.int32)
            value = stochastic_round(value, bits, BF16)
        assert torch.equal(new, value), path
    assert isinstance(state, StochasticState)
    assert state.count.item() == 1
    again, _ = optimizer.step_(grads, optimizer.init(params), tree.map(torch.clone, params))
    equal(again, got)


MESHES = [Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, tp=2), Mesh(tp=4)]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_bits_on_every_mesh(mesh, zero, dtype):
    """With gradients that are the same bits; ZeRO cuts further, and pads."""
    want, _ = train(with_stochastic_rounding(inner()), Mesh(), P(), dtype)
    specs = SPECS if mesh["tp"] > 1 else P()
    defs = values(0, dtype)
    shards = optim.shard_specs(defs, specs, mesh) if zero else specs
    optimizer = with_stochastic_rounding(inner(), defs=defs, specs=shards)
    optimizer = optim.zero(optimizer, specs, shards) if zero else optimizer
    got, state = train(optimizer, mesh, specs, dtype)
    equal(got, want)
    assert state.count.item() == STEPS


def test_traced():
    """A program that is traced is pure, and has the same bits."""
    mesh, specs, defs = Mesh(tp=2), {"w": P(None, "tp")}, {"w": torch.ones(3, 4)}
    optimizer = with_stochastic_rounding(optim.sgd(0.1), defs=defs, specs=specs)
    layout = optimizer.specs(specs)
    how = {"check": False, "donate": (0, 1, 2)}
    step = ft.shard_map(optimizer.step_, mesh, (specs, layout, specs), (specs, layout), **how)
    results = []
    for one in (step, ft.jit(step, backend="eager")):
        params = {"w": torch.linspace(-1, 1, 12).view(3, 4).to(BF16)}
        state = ft.shard_map(optimizer.init, mesh, (specs,), layout, check=False)(params)
        for seed in (1, 2):
            grads = {"w": torch.full((3, 4), 0.01 * seed, dtype=BF16)}
            params, state = one(grads, state, params)
        results.append(params)
    equal(*results)


def test_one_pass_has_the_same_bits():
    """The op's reference, which the kernel is equal to (tests/kernels), rounds by the same bits."""
    want, want_state = train(with_stochastic_rounding(inner()), Mesh(), P())
    config = optim.OptimizerConfig(b2=0.999, clip_norm=0.0, stochastic_rounding=True)
    optimizer = optim.make_optimizer(config, 0.02, mask=None, kernels=use("kernel"))
    params = values(0, BF16)
    state = optimizer.init(params)
    for seed in range(1, STEPS + 1):
        params, state = optimizer.step_(values(seed, BF16), state, params)
    rows = list(zip(tree.leaves(params), tree.leaves(want), strict=True))
    same = torch.cat([(a == b).flatten() for a, b in rows if a.dtype == BF16])
    assert same.float().mean() > 0.99  # what differs in the last bit of float32 may round elsewhere
    for a, b in rows:
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
    assert state.count.item() == state.inner[0].count.item() == STEPS
    assert tree.map(lambda x: x.dtype, state) == tree.map(lambda x: x.dtype, want_state)


@pytest.mark.parametrize("kernels", [use("reference"), use("kernel")], ids=["apart", "one pass"])
def test_learns_what_masters_learn(kernels):
    """Updates of an eighth of the last bit: lost to nearest, kept with masters and on average."""
    target = torch.linspace(0.55, 0.65, 256)

    def run(wrap):
        optimizer = wrap(optim.adamw(5e-4, weight_decay=0.0, mu_dtype=BF16, kernels=kernels))
        params = {"w": torch.full((256,), 0.6, dtype=BF16)}
        state = optimizer.init(params)
        for _ in range(120):
            grads = {"w": 2 * (params["w"].float() - target)}
            params, state = optimizer.step_(grads, state, params)
        return (params["w"].float() - target).square().mean().sqrt().item()

    nearest = run(lambda t: t)
    masters = run(optim.with_fp32_masters)
    ours = run(with_stochastic_rounding)
    assert nearest > 0.028  # where it began
    assert masters < nearest / 4
    assert ours < nearest / 4, (nearest, masters, ours)


def test_around_and_inside_other_transformations():
    """Under clipping, offload and where; float32 parameters are the inner transformation's."""
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.offload(with_stochastic_rounding(inner()), group_bytes=1),
    )
    want = optim.chain(optim.clip_by_global_norm(1.0), with_stochastic_rounding(inner()))
    results = []
    for one in (optimizer, want):
        params = values(0, BF16)
        state = one.init(params)
        for seed in (1, 2):
            params, state = one.step_(values(seed, BF16), state, params)
        results.append(params)
    equal(*results)
    with pytest.raises(ValueError, match="with_stochastic_rounding: got params=None"):
        want.update(values(1, BF16), want.init(values(0, BF16)))


@pytest.mark.parametrize("kernels", [use("reference"), use("kernel")], ids=["apart", "one pass"])
def test_from_a_configuration(kernels):
    config = optim.OptimizerConfig(stochastic_rounding=True, clip_norm=1.0, mu_dtype="bfloat16")
    optimizer = optim.make_optimizer(config, 0.01, mask=lambda p: True, kernels=kernels)
    params = values(0, BF16)
    state = optimizer.init(params)
    params, state = optimizer.step_(values(1, BF16), state, params)
    assert isinstance(state[1], StochasticState)
    assert state[1].inner[0].mu["embed"].dtype == BF16
    assert state[1].inner[0].nu["embed"].dtype == F32
    both = optim.OptimizerConfig(stochastic_rounding=True, fp32_masters=True)
    with pytest.raises(ValueError, match=r"optimizer.stochastic_rounding: got true; wanted false"):
        optim.make_optimizer(both, 0.01)
