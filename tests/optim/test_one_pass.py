"""Steps that one kernel computes: the numbers of the transformations that they stand for."""

from __future__ import annotations

import collections
import importlib
import math

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, tree
from functron.compiler.executable import match_donations
from functron.compiler.lower import graph_module
from functron.compiler.segments import procedure
from functron.ops.operations import use
from functron.spmd.spec import is_spec, spec_axes

KERNEL = use("kernel")
SHAPES = {"blocks": {"norm": (3, 5), "up": (3, 4, 8)}, "embed": (8, 4), "bias": (7,)}
SPECS = {"blocks": {"norm": P(), "up": P(None, None, "tp")}, "embed": P("tp"), "bias": P()}
MASK = {"blocks": {"norm": False, "up": True}, "embed": True, "bias": False}
RATE = optim.linear(1e-2, 8, warmup_steps=2, end=1e-3)
STEPS = 5
ONE, WHOLE = Mesh(), P()


def values(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    is_shape = lambda x: isinstance(x, tuple)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return tree.map(draw, SHAPES, is_leaf=is_shape)


def adamw(kernels, **kwargs):
    return optim.adamw(RATE, weight_decay=0.1, mask=MASK, kernels=kernels, **kwargs)


def configured(kernels, specs=None, shards=None, **options):
    """As `adamw` above, with clipping and whatever else is asked for around it."""
    config = optim.OptimizerConfig(b2=0.999, weight_decay=0.1, clip_norm=2.0, **options)
    return optim.make_optimizer(
        config, RATE, specs=specs, mask=MASK, shards=shards, kernels=kernels
    )


def shares(grads, specs, mesh):
    """Each rank's contribution to the gradients: an equal share, as they are whole already."""
    flat = tree.broadcast_prefix(specs, grads, is_leaf=is_spec)
    parts = [math.prod(mesh[n] for n in ("dp", "tp") if n not in spec_axes(s)) for s in flat]
    return tree.map(lambda g, n: g / n, grads, tree.unflatten(tree.structure(grads), parts))


def train(optimizer, dtype, grad_dtype=None, mesh=ONE, specs=WHOLE):
    """Some steps of the optimizer alone, on whole gradients that are the same on every mesh."""
    layout, wanted = optimizer.specs(specs), optimizer.grad_specs(specs)
    params = values(0, dtype)
    state = ft.shard_map(optimizer.init, mesh, (specs,), layout, check=False)(params)

    def step(grads, state, params):
        grads = ft.sync_gradients(shares(grads, specs, mesh), specs, wanted)
        return optimizer.step_(grads, state, params)

    layouts = (specs, layout, specs), (specs, layout)
    step = ft.shard_map(step, mesh, *layouts, check=False, donate=(0, 1, 2))
    for seed in range(1, STEPS + 1):
        params, state = step(values(seed, grad_dtype or dtype), state, params)
    return params, state


def close(got, want, rtol, atol):
    assert tree.paths(got) == tree.paths(want)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=rtol, atol=atol), got, want)


@pytest.fixture
def calls(monkeypatch):
    """Counts the leaves that the op updates."""
    found = []

    def counted(param, *args, **kwargs):
        found.append(kwargs["master"] is not None)
        return inner(param, *args, **kwargs)

    adam = importlib.import_module("functron.optim.adam")  # not the function of that name
    inner = adam.adamw_
    monkeypatch.setattr(adam, "adamw_", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adamw_with_clipping(dtype, calls):
    """Float64 to the rounding of its learning rate, which schedules make in float32."""
    got, want = (train(configured(k), dtype) for k in (KERNEL, use("reference")))
    tolerance = 1e-12 if dtype == torch.float64 else 3e-7
    close(got, want, tolerance, tolerance)
    assert len(calls) == 4 * STEPS


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("moments", ["", "bfloat16"])
def test_masters_and_their_copies(grad_dtype, moments, calls):
    (got, state), (_, want_state) = (
        train(configured(k, fp32_masters=True, mu_dtype=moments), torch.bfloat16, grad_dtype)
        for k in (KERNEL, use("reference"))
    )
    # unfused, a clipped gradient in bfloat16 is rounded once more
    tolerance = 1e-6 if grad_dtype == torch.float32 else 2e-2
    masters, want_masters = state[1].masters, want_state[1].masters
    close(masters, want_masters, tolerance, tolerance)
    close(got, tree.map(torch.Tensor.bfloat16, masters), 0, 0)
    assert calls == [True] * 4 * STEPS
    assert tree.map(lambda x: x.dtype, state) == tree.map(lambda x: x.dtype, want_state)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, tp=2)], ids=str)
def test_zero_on_meshes(mesh, masters, calls):
    specs = tree.map(
        lambda s: s if mesh["tp"] > 1 else P(), SPECS, is_leaf=lambda x: isinstance(x, P)
    )
    defs = values(0)
    shards = optim.shard_specs(defs, specs, mesh)
    dtype = torch.bfloat16 if masters else torch.float32

    def one(kernels):
        return configured(kernels, specs, shards, fp32_masters=masters)

    got, state = train(one(KERNEL), dtype, torch.float32, mesh, specs)
    assert calls == [masters] * 4 * STEPS  # all ranks at once
    want, want_state = train(one(use("reference")), dtype, torch.float32, mesh, specs)
    close(state, want_state, 1e-6, 1e-6)
    close(got, want, 1e-6 if not masters else 2**-7, 1e-6)
    dense = configured(KERNEL, fp32_masters=masters)
    close(got, train(dense, dtype, torch.float32)[0], 1e-6 if not masters else 2**-7, 1e-6)


def test_global_norm_of_shards_and_its_gradient():
    value = values(0)
    mesh = Mesh(dp=2, tp=2)

    def norm(kernels):
        f = lambda x: optim.global_norm(x, SPECS, kernels=kernels)
        return ft.shard_map(f, mesh, (SPECS,), P())(value)

    want = torch.cat([x.double().flatten() for x in tree.leaves(value)]).norm().item()
    assert norm(KERNEL).item() == pytest.approx(want, rel=1e-6)
    assert norm(use("reference")).item() == pytest.approx(want, rel=1e-6)
    got = torch.func.grad(lambda x: optim.global_norm(x, kernels=KERNEL))(value)
    close(got, tree.map(lambda x: (x.double() / want).float(), value), 1e-6, 1e-7)


def test_what_the_kernel_does_not_have_is_computed_without():
    """Moments in 8 bits, and a learning rate of each row of a vmap."""
    eight = optim.adamw(0.1, mu_dtype="int8", quantised=True, kernels=KERNEL)
    params, grads = {"w": torch.ones(4, 64)}, {"w": torch.full((4, 64), 0.5)}
    eight.step_(grads, eight.init(params), params)
    assert torch.allclose(params["w"], torch.full((4, 64), 0.9), atol=1e-3)

    def one(rate):
        optimizer = optim.adamw(lambda count: rate, kernels=KERNEL)
        start = {"w": torch.ones(3)}
        updates, _ = optimizer.update({"w": torch.ones(3)}, optimizer.init(start), start)
        return updates["w"]

    assert torch.allclose(
        torch.func.vmap(one)(torch.tensor([0.1, 0.2]))[:, 0], -torch.tensor([0.1, 0.2]), atol=1e-4
    )


def calls_of(jitted, *args):
    """The operations that a compiled function is lowered to."""
    program = jitted.trace(*args)
    steps = procedure(program.block, program.block.outputs, donated=match_donations(program))
    nodes = [node for kernel in steps.kernels() for node in graph_module(kernel, {}).graph.nodes]
    return collections.Counter(str(node.target) for node in nodes if node.op == "call_function")


@pytest.mark.parametrize("around", ["fp32_masters", "stochastic_rounding"])
def test_compiled_steps_are_the_kernel_s(around):
    """One operation per leaf, over donated memory and nothing else; the bits of eager steps."""
    optimizer = configured(KERNEL, **{around: True})
    step = lambda state, params, grads: optimizer.step_(grads, state, params)
    jitted = ft.jit(step, donate=(0, 1), backend="eager")
    results = []
    for f in (step, jitted):
        params = values(0, torch.bfloat16)
        params["embed"] = params["embed"].t().contiguous().t()  # not as its gradients lie
        state = optimizer.init(params)
        where = [x.data_ptr() for x in tree.leaves(params)]
        for seed in (1, 2):
            params, state = f(state, params, values(seed))
        assert [x.data_ptr() for x in tree.leaves(params)] == where
        results.append((params, state))
    close(*results, 0, 0)
    params = values(0, torch.bfloat16)
    found = calls_of(jitted, optimizer.init(params), params, values(1))
    assert found["functron.adamw_.default"] == 4
    assert not found["functron.adamw.default"]
    counters = 2 if around == "fp32_masters" else 3
    assert found["aten.copy_.default"] == counters


@pytest.mark.parametrize("kept", ["nothing is donated", "read later", "returned"])
def test_compiled_steps_leave_alone_what_is_needed(kept):
    optimizer = adamw(KERNEL)

    def step(params, state, grads):
        new, state = optimizer.step_(grads, state, params)
        beside = {
            "read later": lambda: tree.map(torch.sub, params, new),
            "returned": lambda: tree.map(lambda x: x.flatten()[1:], params),
        }.get(kept, lambda: ())
        return new, state, beside()

    donate = () if kept == "nothing is donated" else (0, 1)
    jitted = ft.jit(step, donate=donate, backend="eager")
    params = values(0)
    state, grads = optimizer.init(params), values(1)
    want = ft.jit(step, backend="eager")(params, state, grads)
    assert calls_of(jitted, params, state, grads)["functron.adamw.default"] == 4
    before = tree.map(torch.clone, params)
    close(jitted(params, state, grads), want, 0, 0)
    if not donate:
        close(params, before, 0, 0)


def test_compiled_steps_of_simulated_meshes():
    """Batched leaves: the op's own rule, and what it returns lies as the donated arguments do."""
    mesh, specs = Mesh(dp=2, tp=2), SPECS
    shards = optim.shard_specs(values(0), specs, mesh)
    optimizer = configured(KERNEL, specs, shards)
    layout, wanted = optimizer.specs(specs), optimizer.grad_specs(specs)

    def step(grads, state, params):
        grads = ft.sync_gradients(shares(grads, specs, mesh), specs, wanted)
        return optimizer.step_(grads, state, params)

    layouts = (specs, layout, specs), (specs, layout)
    step = ft.shard_map(step, mesh, *layouts, check=False, donate=(1, 2))
    jitted = ft.jit(step, donate=(1, 2), backend="eager")
    results = []
    for f in (step, jitted):
        params = values(0)
        state = ft.shard_map(optimizer.init, mesh, (specs,), layout, check=False)(params)
        for seed in (1, 2):
            params, state = f(values(seed), state, params)
        results.append((params, state))
    close(*results, 0, 0)
    assert "adamw(" in str(jitted.trace(values(1), state, params))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_chain_checks_its_state_before_anything_changes(by_hand):
    chained = lambda: optim.chain(optim.clip_by_global_norm(2.0), adamw(KERNEL))
    optimizer = chained() if by_hand else configured(KERNEL)
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="chain of 2 transformations: got a state of 1 entries"):
        optimizer.step_({"w": torch.ones(2)}, ((),), params)
    assert params["w"].tolist() == [1.0, 1.0]
