"""Lion, Adafactor and averages: Optax's and torch.optim's trajectories over 20 updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from functron import optim, tree
from functron.spmd.params import Normal, ParamDef

STEPS = 20
SHAPES = {"blocks": {"norm": (3, 4), "up": (3, 4, 8)}, "embed": (8, 6), "out_bias": (8,)}
DECAYED = {"blocks": {"norm": False, "up": True}, "embed": True, "out_bias": False}


def values(seed, dtype=torch.float64, shapes=SHAPES):
    generator = np.random.default_rng(seed)
    return tree.map(
        lambda shape: torch.from_numpy(generator.standard_normal(shape)).to(dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def close(got, want, rtol=1e-10):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10, msg=lambda m, at=path: at + m)


def run_pure(optimizer, steps=STEPS):
    params = values(0)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(values(10 + step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def run_in_place(optimizer, steps=STEPS, start=None, shapes=SHAPES):
    params = values(0, shapes=shapes) if start is None else start
    state = optimizer.init(params)
    for step in range(steps):
        same, state = optimizer.step_(values(10 + step, shapes=shapes), state, params)
        assert all(map(lambda a, b: a is b, tree.leaves(same), tree.leaves(params)))
    return params, state


def run_optax(optimizer, start=None, grads=lambda step: values(10 + step), steps=STEPS):
    with jax.enable_x64(True):
        value = jax.tree.map(
            lambda t: jnp.asarray(t.numpy()), values(0) if start is None else start
        )
        state = optimizer.init(value)
        update = optimizer.update
        for step in range(steps):
            gradient = jax.tree.map(lambda t: jnp.asarray(t.numpy()), grads(step))
            updates, state = update(gradient, state, value)
            value = optax.apply_updates(value, updates)
        return jax.tree.map(lambda x: torch.from_numpy(np.array(x)), value)


def exact_decay(i, exponent):
    """Optax's own is in float32, whatever the parameters are."""
    return 1.0 - (i + 1.0).astype(jnp.float64) ** (-exponent)


def optax_adafactor(rate, *, scale=True, clip=1.0, momentum=None, decay=None, size=4, offset=0):
    parts = [
        optax.scale_by_factored_rms(True, 0.8, offset, size, decay_rate_fn=exact_decay),
        None if clip is None else optax.clip_by_block_rms(clip),
        None if rate is None else optax.scale_by_learning_rate(rate, flip_sign=False),
        optax.scale_by_param_block_rms() if scale else None,
        None if momentum is None else optax.ema(momentum, debias=False),
        None if decay is None else optax.add_decayed_weights(decay, DECAYED),
        optax.scale(-1),
    ]
    return optax.chain(*(part for part in parts if part is not None))


PAIRS = {
    "lion": (optim.lion(0.1), lambda: optax.lion(0.1)),
    "lion decayed": (
        optim.lion(0.1, 0.8, 0.95, weight_decay=0.3, mask=DECAYED),
        lambda: optax.lion(0.1, 0.8, 0.95, weight_decay=0.3, mask=DECAYED),
    ),
    "adafactor": (optim.adafactor(0.1, 4), lambda: optax_adafactor(0.1)),
    "adafactor, nothing factored": (optim.adafactor(0.1), lambda: optax_adafactor(0.1, size=128)),
    "adafactor with all": (
        optim.adafactor(0.1, 4, clipping_threshold=0.5, momentum=0.9, weight_decay_rate=0.01,
                        weight_decay_mask=DECAYED),
        lambda: optax_adafactor(0.1, clip=0.5, momentum=0.9, decay=0.01),
    ),
    "adafactor with none": (
        optim.adafactor(None, 4, 0.8, -3, False, None),
        lambda: optax_adafactor(None, scale=False, clip=None, offset=-3),
    ),
    "mean of updates": (
        optim.chain(optim.ema(0.9), optim.scale_by_learning_rate(0.1)),
        lambda: optax.chain(optax.ema(0.9), optax.scale_by_learning_rate(0.1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_trajectories_are_optax(name):
    ours, theirs = PAIRS[name]
    want = run_optax(theirs())
    pure, pure_state = run_pure(ours)
    close(pure, want)
    donated, state = run_in_place(ours)
    close(donated, want)
    assert tree.paths(state) == tree.paths(pure_state)
    close(state, pure_state)


def test_defaults_are_optax():
    close(run_pure(optim.adafactor(0.1))[0], run_optax(optax.adafactor(0.1)), 1e-6)


def test_a_stack_of_layers_is_as_many_parameters():
    """Optax sees each matrix of the stack by itself, and so do the rows, columns and sizes here."""
    shapes = {"up": (2, 2, 6, 8), "norm": (2, 6), "embed": (10, 6)}
    names = {
        "up": ("layers", "expert", "embed", "mlp"),
        "norm": ("layers", "embed"),
        "embed": (None, None),
    }
    defs = {name: ParamDef(shape, names[name], Normal(1.0)) for name, shape in shapes.items()}

    def apart(value):
        return {
            "up": [list(layer.unbind(0)) for layer in value["up"].unbind(0)],
            "norm": list(value["norm"].unbind(0)),
            "embed": value["embed"],
        }

    start = values(0, shapes=shapes)
    want = run_optax(
        optax_adafactor(0.1), apart(start), lambda i: apart(values(10 + i, shapes=shapes))
    )
    optimizer = optim.adafactor(0.1, 4, defs=defs)
    got, state = run_in_place(optimizer, start=start, shapes=shapes)
    close(apart(got), want)
    assert state[0].v_row["up"].shape == (2, 2, 6)
    assert state[0].v_col["up"].shape == (2, 2, 8)
    assert state[0].v["norm"].shape == (2, 6)
    assert state[0].v["up"] is None


def test_relative_steps_are_torchs():
    """torch.optim.Adafactor multiplies min(lr, 1/sqrt(t)) by the parameter's size."""
    shapes = {"w": (6, 8), "b": (8,)}
    start = values(0, shapes=shapes)
    leaves = [p.clone().requires_grad_() for p in tree.leaves(start)]
    reference = torch.optim.Adafactor(leaves, 0.3)
    for step in range(STEPS):
        for leaf, grad in zip(leaves, tree.leaves(values(10 + step, shapes=shapes)), strict=True):
            leaf.grad = grad
        reference.step()
    rate = optim.relative_step(0.3)
    got, _ = run_in_place(optim.adafactor(rate, 2), start=start, shapes=shapes)
    close(tree.leaves(got), [leaf.detach() for leaf in leaves], 1e-6)  # schedules are float32
    assert rate(0) == pytest.approx(0.3)
    assert rate(99) == pytest.approx(0.1)
    assert optim.relative_step(warm_up=True)(9) == pytest.approx(1e-5)


def test_decay_may_be_scheduled():
    rate = lambda count: 0.1 / (count + 1)
    ours = optim.chain(optim.add_decayed_weights(rate, DECAYED), optim.sgd(1.0))
    theirs = optax.chain(optax.add_decayed_weights(rate, DECAYED), optax.sgd(1.0))
    close(run_in_place(ours)[0], run_optax(theirs), 1e-6)  # rates of integer counts are float32


def mean_of(history, decay, start=None):
    """The weighted mean of parameters, written out."""
    total, weight = (0, 0.0) if start is None else (start, 1.0)
    for index, value in enumerate(history):
        d = decay(index) if callable(decay) else decay
        total, weight = d * total + (1 - d) * value, d * weight + (1 - d)
    return total / weight


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(
    "decay", [0.9, lambda count: torch.clamp((1 + count) / (10 + count), max=0.9)]
)
def test_average_of_parameters(decay, debias):
    inner = optim.adamw(0.1)
    optimizer = optim.with_average(inner, decay, debias=debias)
    params, state = values(0), optimizer.init(values(0))
    pure, pure_state, history = values(0), optimizer.init(values(0)), []
    for step in range(STEPS):
        updates, pure_state = optimizer.update(values(10 + step), pure_state, pure)
        pure = optim.apply_updates(pure, updates)
        params, state = optimizer.step_(values(10 + step), state, params)
        history.append(tree.map(torch.clone, params))
    close(params, run_in_place(inner)[0])
    written = (lambda i: min((1 + i) / (10 + i), 0.9)) if callable(decay) else decay
    want = tree.map(
        lambda s, *rows: mean_of(rows, written, None if debias else s), values(0), *history
    )
    rtol = 1e-6 if callable(decay) else 1e-10  # what torch makes of an integer count is float32
    close(optim.averaged(state, params), want, rtol)
    close(optim.averaged(("around", pure_state), pure), want, rtol)


def test_average_of_masters_and_where_it_is_read():
    optimizer = optim.with_fp32_masters(optim.with_average(optim.sgd(1e-4), 0.5))
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    assert torch.equal(optim.averaged(state, params)["w"], params["w"])
    for _ in range(3):
        params, state = optimizer.step_({"w": torch.ones(4, dtype=torch.bfloat16)}, state, params)
    got = state.inner.average["w"] / state.inner.weight
    masters = [1 - 1e-4 * (i + 1) for i in range(3)]
    torch.testing.assert_close(got, torch.full((4,), mean_of(masters, 0.5), dtype=got.dtype))
    assert optim.averaged(state, params)["w"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="state: got 0 averages; wanted one"):
        optim.averaged((), params)
    with pytest.raises(ValueError, match=r"decay: got 1\.0"):
        optim.with_average(optim.sgd(0.1), 1.0)
    with pytest.raises(ValueError, match="with_average: got params=None"):
        optim.with_average(optim.sgd(0.1), 0.5).update({}, ())
