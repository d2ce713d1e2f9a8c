"""Optimizers: Optax's trajectories for `update`, torch.optim's for `step_`, and one for the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from functron import optim, tree
from functron.ops.adamw import halves, joined, remainder
from functron.spmd import Mesh, P, shard_map

STEPS = 6
SHAPES = {"blocks": {"norm": (3, 4), "up": (3, 4, 8)}, "embed": (8, 4), "out_bias": (8,)}
DECAYED = {"blocks": {"norm": False, "up": True}, "embed": True, "out_bias": False}
SPECS = {
    "blocks": {"norm": P(), "up": P(None, None, "tp")},
    "embed": P("tp", "fsdp"),
    "out_bias": P("tp"),
}


def random(seed, dtype=torch.float64):
    generator = np.random.default_rng(seed)  # NumPy: vmap refuses torch's random functions
    return tree.map(
        lambda shape: torch.from_numpy(generator.standard_normal(shape)).to(dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def clone(value):
    return tree.map(torch.clone, value)


def close(got, want, rtol=1e-12, atol=1e-14):
    tree.map(lambda g, w: torch.testing.assert_close(g, w, rtol=rtol, atol=atol), got, want)


def run_pure(optimizer, params, dtype=torch.float64):
    state = optimizer.init(params)
    for step in range(STEPS):
        updates, state = optimizer.update(random(10 + step, dtype), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def run_in_place(optimizer, params, dtype=torch.float64):
    params = clone(params)
    state = optimizer.init(params)
    for step in range(STEPS):
        same, state = optimizer.step_(random(10 + step, dtype), state, params)
        tree.map(lambda a, b: a is b or pytest.fail("not the parameters passed in"), same, params)
    return params, state


def run_optax(optimizer, params):
    """The same in Optax, in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        value = jax.tree.map(lambda t: jnp.asarray(t.numpy()), params)
        state = optimizer.init(value)
        for step in range(STEPS):
            grads = jax.tree.map(lambda t: jnp.asarray(t.numpy()), random(10 + step))
            updates, state = optimizer.update(grads, state, value)
            value = optax.apply_updates(value, updates)
        return jax.tree.map(lambda x: torch.from_numpy(np.array(x)), value)
    finally:
        jax.config.update("jax_enable_x64", before)


SCHEDULE = optim.linear(0.1, 8, warmup_steps=2, end=0.05)
OPTAX_SCHEDULE = optax.join_schedules(
    [optax.linear_schedule(0.0, 0.1, 2), optax.linear_schedule(0.1, 0.05, 6)], [2]
)
PAIRS = {
    "adam": (lambda lib, lr: lib.adam(lr, 0.8, 0.9, 1e-6)),
    "adamw": (lambda lib, lr: lib.adamw(lr, 0.9, 0.95, weight_decay=0.1)),
    "adamw defaults": (lambda lib, lr: lib.adamw(lr)),
    "adamw masked": (lambda lib, lr: lib.adamw(lr, weight_decay=0.3, mask=DECAYED)),
    "sgd": (lambda lib, lr: lib.sgd(lr)),
    "momentum": (lambda lib, lr: lib.sgd(lr, momentum=0.9)),
    "nesterov": (lambda lib, lr: lib.sgd(lr, momentum=0.9, nesterov=True)),
    "clipped": (lambda lib, lr: lib.chain(lib.clip_by_global_norm(0.5), lib.adamw(lr))),
    "by hand": (
        lambda lib, lr: lib.chain(
            lib.clip(1.0),
            lib.trace(0.9),
            lib.scale_by_adam(),
            lib.add_decayed_weights(0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
            lib.scale_by_learning_rate(lr),
        )
    ),
    "ends in momentum": (
        lambda lib, lr: lib.chain(lib.scale_by_learning_rate(lr), lib.trace(0.9), lib.identity())
    ),
    "nested chain": (
        lambda lib, lr: lib.chain(lib.chain(lib.identity()), lib.scale_by_learning_rate(lr))
    ),
}


@pytest.mark.parametrize("rate", ["number", "schedule"])
@pytest.mark.parametrize("name", PAIRS)
def test_pure_and_in_place_trajectories_are_optax(name, rate):
    ours = PAIRS[name](optim, 0.1 if rate == "number" else SCHEDULE)
    want = run_optax(PAIRS[name](optax, 0.1 if rate == "number" else OPTAX_SCHEDULE), random(0))
    rtol = 1e-12 if rate == "number" else 1e-6  # schedules are float32
    start = random(0)
    pure, pure_state = run_pure(ours, start)
    close(pure, want, rtol, atol=rtol / 10)
    close(start, random(0), 0, 0)  # nothing pure was overwritten
    donated, donated_state = run_in_place(ours, start)
    close(donated, want, rtol, atol=rtol / 10)
    assert tree.paths(donated_state) == tree.paths(pure_state)
    close(donated_state, pure_state, rtol, atol=rtol / 10)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.adamw(0.1, 0.9, 0.95, 1e-6, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.1, (0.9, 0.95), 1e-6, 0.1)),
        (optim.adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (optim.sgd(0.1, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        (optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    ],
)  # fmt: skip
def test_step_is_torch_optim(ours, theirs):
    leaves = [p.requires_grad_() for p in tree.leaves(random(0))]
    reference = theirs(leaves)
    for step in range(STEPS):
        for leaf, grad in zip(leaves, tree.leaves(random(10 + step)), strict=True):
            leaf.grad = grad
        reference.step()
    got, _ = run_in_place(ours, random(0))
    close(tree.leaves(got), [leaf.detach() for leaf in leaves])


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=4), Mesh(dp=2, fsdp=2, tp=2)], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(SCHEDULE, weight_decay=0.1, mask=DECAYED),
        optim.sgd(SCHEDULE, 0.9, nesterov=True),
        optim.chain(optim.clip_by_global_norm(0.5, SPECS), optim.adamw(0.1)),
        optim.with_fp32_masters(optim.adamw(0.1)),
    ],
    ids=["adamw", "sgd", "clipped", "masters"],
)
def test_steps_on_a_simulated_mesh_are_the_dense_steps_in_place(mesh, optimizer):
    want, want_state = run_in_place(optimizer, random(0))
    params = random(0)
    state_specs = optimizer.specs(SPECS)
    init = shard_map(optimizer.init, mesh, (SPECS,), state_specs)
    specs = (SPECS, state_specs, SPECS)
    step_ = shard_map(optimizer.step_, mesh, specs, (SPECS, state_specs), donate=(0, 1, 2))
    state, memory = init(params), [leaf.data_ptr() for leaf in tree.leaves(params)]
    for step in range(STEPS):
        params, state = step_(random(10 + step), state, params)
        # the global tensors were updated through the shards
        assert [leaf.data_ptr() for leaf in tree.leaves(params)] == memory
    close(params, want, 1e-13)
    close(state, want_state, 1e-13)


def test_gradients_never_synchronised_are_refused_by_leaf():
    optimizer = optim.adamw(0.1)

    def step(params, grads, x):
        grads = {**grads, "embed": grads["embed"] * x.sum()}
        return optimizer.step_(grads, optimizer.init(params), params)[0]

    mapped = shard_map(step, Mesh(dp=2, tp=2), (SPECS, SPECS, P("dp")), SPECS)
    with pytest.raises(ValueError, match="never synchronised") as caught:
        mapped(random(0), random(1), torch.arange(4.0))
    assert "embed: got gradients that vary over mesh axis 'dp'" in str(caught.value)
    assert "blocks" not in str(caught.value)


def test_an_ensemble_of_learning_rates_runs_under_vmap():
    """A rate per member is no single fused call: step_ falls back to the pure update."""

    def train(run, rate):
        return run(optim.adamw(rate, weight_decay=0.1), random(0))[0]

    rates = torch.tensor([0.1, 0.01], dtype=torch.float64)
    want = tree.map(lambda *xs: torch.stack(xs), *[train(run_pure, float(r)) for r in rates])
    close(torch.func.vmap(lambda r: train(run_pure, r))(rates), want)

    def member(rate, params):
        optimizer = optim.adamw(rate, weight_decay=0.1)
        state = optimizer.init(params)
        for step in range(STEPS):
            params, state = optimizer.step_(random(10 + step), state, params)
        return params

    stacked = tree.map(lambda x: torch.stack([x, x]), random(0))
    close(torch.func.vmap(member)(rates, stacked), want)


def test_the_learning_rate_has_a_gradient_through_update():
    def final(rate):
        params, _ = run_pure(optim.adam(rate), random(0))
        return sum(leaf.square().sum() for leaf in tree.leaves(params))

    rate, h = torch.tensor(0.1, dtype=torch.float64), 1e-6
    slope = (final(rate + h) - final(rate - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(final)(rate), slope, rtol=1e-6, atol=0)


def test_transposed_gradients_are_read_right():
    """`x.T @ dy` arrives with any strides; torch's own fused CPU AdamW misreads them."""
    params, grads = {"w": torch.randn(5, 7)}, {"w": torch.randn(7, 5).t()}
    optimizer = optim.adamw(0.1)
    want = optim.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])
    close(optimizer.step_(grads, optimizer.init(params), params)[0], want, 1e-6, 1e-7)


def test_moments_may_have_another_dtype():
    optimizer = optim.adamw(0.1, mu_dtype=torch.bfloat16, nu_dtype=torch.bfloat16)
    params, state = run_in_place(optimizer, random(0, torch.float32), torch.float32)
    assert {leaf.dtype for leaf in tree.leaves((state[0].mu, state[0].nu))} == {torch.bfloat16}
    exact, _ = run_in_place(optim.adamw(0.1), random(0))
    close(tree.map(torch.Tensor.double, params), exact, 0.05, 0.05)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 32), (torch.float16, 32), (torch.bfloat16, 16)], ids=str
)
def test_masters_keep_what_rounding_would_lose(dtype, bits):
    """600 updates of 1e-4 from 1: bfloat16 alone (last bit 2^-8) would not move at all."""
    optimizer = optim.with_fp32_masters(optim.sgd(1e-4), bits=bits)
    params = {"low": torch.ones(4, 4, dtype=dtype).t(), "high": torch.ones(3)}
    state = optimizer.init(params)
    assert state.masters["high"] is None
    pure, pure_state = clone(params), optimizer.init(params)
    for _ in range(600):
        grads = tree.map(torch.ones_like, params)
        params, state = optimizer.step_(grads, state, params)
        updates, pure_state = optimizer.update(tree.map(torch.ones_like, pure), pure_state, pure)
        pure = optim.apply_updates(pure, updates)
    close(params["low"], torch.full((4, 4), 0.94, dtype=dtype), 0, 0)
    close(params["high"], torch.full((3,), 0.94), 1e-4)
    close(pure, params, 0, 0)
    close(pure_state, state, 1e-6)


def test_halves_of_masters_are_masters_to_the_bit():
    """All signs, exponents and upper halves, with lower halves around the middle and at the ends."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(-(2**15), 2**15).unsqueeze(1) * 2**16 + low).to(torch.int32)
    x = bits.view(torch.float32)
    upper, lower = halves(x)
    real, middle = ~x.isnan(), (bits & 0xFFFF) == 0x8000
    assert (upper.element_size(), lower.element_size()) == (2, 2)
    assert torch.equal(joined(upper, lower)[real].view(torch.int32), bits[real])
    assert upper[~real].isnan().all()
    assert joined(upper, lower)[~real].isnan().all()
    even = x.bfloat16()
    assert torch.equal(upper[real & ~middle], even[real & ~middle])
    assert (upper[real & middle].double().abs() > x[real & middle].double().abs()).all()
    off = joined(even, remainder(x)).view(torch.int32)[real] - bits[real]
    assert (off[~middle[real]] == 0).all()
    assert set(off[middle[real]].tolist()) == {0, -1}


@pytest.mark.parametrize("steps", ["step_", "update"])
def test_masters_of_16_bits_are_those_of_32(steps):
    """Also where a parameter becomes a million times smaller at once."""
    ends = {}
    for bits in (16, 32):
        optimizer = optim.with_fp32_masters(optim.sgd(1.0, 0.5), bits=bits)
        params = random(0, torch.bfloat16)
        state = optimizer.init(params)
        for step in range(STEPS):
            grads = tree.map(torch.Tensor.float, random(10 + step, torch.bfloat16))
            if step == 1:
                found = zip(
                    *map(tree.leaves, (params, state.masters, grads, state.inner)), strict=True
                )
                near = [
                    (joined(p, m) if bits == 16 else m) - 0.5 * trace - 1e-6 * g
                    for p, m, g, trace in found
                ]
                grads = tree.unflatten(tree.structure(params), near)
            if steps == "step_":
                params, state = optimizer.step_(grads, state, params)
            else:
                updates, state = optimizer.update(grads, state, params)
                params = optim.apply_updates(params, updates)
            if step == 1:
                assert all(leaf.abs().max() < 1e-4 for leaf in tree.leaves(params))
        ends[bits] = params, state
    (low, halved), (_, whole) = ends[16], ends[32]
    assert {leaf.dtype for leaf in tree.leaves(halved.masters)} == {torch.int16}
    for p, half, master in zip(
        *map(tree.leaves, (low, halved.masters, whole.masters)), strict=True
    ):
        assert torch.equal(joined(p, half), master)
        assert torch.equal(p, halves(master)[0])


def test_masters_round_exactly_in_the_pure_update():
    optimizer = optim.with_fp32_masters(optim.adamw(0.3))
    pure, pure_state = run_pure(optimizer, random(0, torch.bfloat16), torch.bfloat16)
    close(pure, tree.map(torch.Tensor.bfloat16, pure_state.masters), 0, 0)
    wide = tree.map(torch.Tensor.float, random(0, torch.bfloat16))
    state = optim.adamw(0.3).init(wide)
    for step in range(STEPS):
        grads = tree.map(torch.Tensor.float, random(10 + step, torch.bfloat16))
        wide, state = optim.adamw(0.3).step_(grads, state, wide)
    close(pure_state.masters, wide, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [optim.adamw(0.1), optim.sgd(0.1, 0.9)], ids=["adamw", "sgd"])
def test_low_precision_steps_are_the_float64_steps_rounded(optimizer, dtype):
    start = tree.map(lambda x: x.to(dtype).double(), random(0))
    exact, _ = run_in_place(optimizer, start)
    got, _ = run_in_place(optimizer, random(0, dtype), dtype)
    close(tree.map(torch.Tensor.double, got), exact, 0.03, 0.06)


def test_fused_step_keeps_the_same_tensors():
    """Donation: parameters, moments and counters are updated where they are."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE))
    params = random(0)
    state = optimizer.init(params)
    before = [leaf.data_ptr() for leaf in tree.leaves((params, state))]
    after = optimizer.step_(random(1), state, params)
    assert [leaf.data_ptr() for leaf in tree.leaves(after)] == before


def test_state_specs_cover_the_state():
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE))
    is_spec = lambda x: isinstance(x, P)
    state = optimizer.init(random(0))
    specs = tree.broadcast_prefix(optimizer.specs(SPECS), state, is_leaf=is_spec)
    found = dict(zip(tree.paths(state), specs, strict=True))
    assert found["1/0/count"] == P()
    assert found["1/2/count"] == P()
    assert found["1/0/mu/blocks/up"] == found["1/0/nu/blocks/up"] == P(None, None, "tp")


def test_default_mask_goes_by_name():
    assert optim.not_norm_or_bias(random(0)) == DECAYED
    names = ["final_norm", "q_norm/scale", "bias", "mlp/up_bias", "biased_router", "head"]
    kept = {name: optim.not_norm_or_bias({name: 0})[name] for name in names}
    assert [name for name in names if kept[name]] == ["biased_router", "head"]


def test_steps_trace_on_fake_tensors_to_the_fused_kernel():
    from torch.fx.experimental.proxy_tensor import make_fx

    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE))
    params, state = random(0), optimizer.init(random(0))
    step_ = lambda grads, state, params: optimizer.step_(grads, state, params)
    graph = make_fx(step_, tracing_mode="fake")(random(1), state, params)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten._fused_adamw_.tensor_lr") == 1
    want, _ = optimizer.step_(random(1), optimizer.init(params), clone(params))
    graph(random(1), state, params)
    close(params, want, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: optim.adamw(0.1).update(random(0), optim.adamw(0.1).init(random(0))),
            "add_decayed_weights: got params=None",
        ),
        (
            lambda: optim.with_fp32_masters(optim.sgd(0.1)).update({}, optim.MastersState({}, ((), ()))),
            "with_fp32_masters: got params=None",
        ),
        (
            lambda: optim.adamw(0.1, mask={"embed": 1}).step_(
                {"embed": torch.ones(1)}, optim.adamw(0.1).init({"embed": torch.ones(1)}), {"embed": torch.ones(1)}
            ),
            "mask/embed: got 1; wanted True or False",
        ),
        (
            lambda: optim.adamw(0.1, mask={"embd": True}).step_(random(0), optim.adamw(0.1).init(random(0)), random(0)),
            "mask is not a prefix",
        ),
        (
            lambda: optim.sgd(0.1).step_({"b": torch.ones(1)}, ((), ()), {"a": torch.ones(1)}),
            "grads does not match the structure of params",
        ),
        (
            lambda: optim.chain(optim.sgd(0.1)).step_({}, ((), ()), {}),
            "state of 2 entries; wanted the tuple",
        ),
        (lambda: optim.sgd(0.1, nesterov=True), "nesterov: got True with momentum=None"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
