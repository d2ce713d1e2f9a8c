"""multi_transform, masked, apply_if_finite, inject_hyperparams and groups: Optax's, and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, shard_map, tree
from functron.spmd.spec import cut_tree, take

STEPS = 20
SHAPES = {"blocks": {"norm": (3, 4), "up": (3, 4, 8)}, "embed": (8, 6)}
LABELS = {"blocks": {"norm": "slow", "up": "fast"}, "embed": "slow"}
MASK = {"blocks": {"norm": False, "up": True}, "embed": True}


def values(seed):
    generator = np.random.default_rng(seed)
    return tree.map(
        lambda shape: torch.from_numpy(generator.standard_normal(shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def gradients(bad=()):
    """Of each step; those in `bad` have one NaN or infinity, in another leaf each."""
    for step in range(STEPS):
        grads = values(10 + step)
        if step in bad:
            tree.leaves(grads)[step % 3].view(-1)[step % 5] = float("nan" if step % 2 else "inf")
        yield grads


def run(optimizer, bad=(), change=lambda step, state: state):
    """Pure and in place, which must agree, with their state."""
    params, pure = values(0), values(0)
    state, pure_state = optimizer.init(params), optimizer.init(pure)
    for step, grads in enumerate(gradients(bad)):
        copy = tree.map(torch.clone, grads)
        updates, pure_state = optimizer.update(grads, change(step, pure_state), pure)
        pure = optim.apply_updates(pure, updates)
        params, state = optimizer.step_(copy, change(step, state), params)
    close((params, state), (pure, pure_state))
    return params, state


def run_optax(optimizer, bad=(), change=lambda step, state: state):
    arrays = lambda value: jax.tree.map(lambda t: jnp.asarray(t.numpy()), value)
    with jax.enable_x64(True):
        params = arrays(values(0))
        state = optimizer.init(params)
        update = jax.jit(optimizer.update) if bad else optimizer.update
        for step, grads in enumerate(gradients(bad)):
            updates, state = update(arrays(grads), change(step, state), params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: torch.from_numpy(np.array(x)), params), state


def close(got, want, rtol=1e-10):
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, at=path: at + m
        )


def label_by_path(value):
    return tree.map_with_path(lambda path, _: "fast" if path.endswith("up") else "slow", value)


@pytest.mark.parametrize("labels", [LABELS, label_by_path], ids=["tree", "function"])
def test_multi_transform_is_optax(labels):
    make = lambda lib: {"slow": lib.sgd(0.1, 0.9), "fast": lib.adamw(0.1), "none": lib.sgd(1.0)}
    got, state = run(optim.multi_transform(make(optim), labels))
    close(got, run_optax(optax.multi_transform(make(optax), LABELS))[0])
    assert state.inner_states["fast"][0].mu["embed"] is None
    specs = {"blocks": {"norm": P(), "up": P(None, None, "tp")}, "embed": P("tp")}
    laid = optim.multi_transform(make(optim), labels).specs(specs)
    assert laid.inner_states["fast"][0].mu == {
        "blocks": {"norm": None, "up": P(None, None, "tp")},
        "embed": None,
    }
    assert laid.inner_states["slow"][0].trace["embed"] == P("tp")


def test_masked_is_optax():
    """Optax passes the others on as they are."""
    inner = lambda lib: lib.chain(lib.trace(0.9), lib.add_decayed_weights(0.1))
    ours = optim.chain(optim.where(MASK, inner(optim), optim.identity()), optim.sgd(0.1))
    theirs = optax.chain(optax.masked(inner(optax), MASK), optax.sgd(0.1))
    close(run(ours)[0], run_optax(theirs)[0])
    ours = optim.chain(optim.adam(0.1), optim.where(MASK, optim.identity(), optim.set_to_zero()))
    theirs = optax.chain(
        optax.adam(0.1), optax.masked(optax.set_to_zero(), tree.map(lambda x: not x, MASK))
    )
    close(run(ours)[0], run_optax(theirs)[0])


BAD = (0, 4, 5, 9, 10, 11, 12, 13, 17)


@pytest.mark.parametrize("allowed", [10, 5])
def test_apply_if_finite_is_optax(allowed):
    got, state = run(optim.apply_if_finite(optim.adamw(0.1), allowed), BAD)
    want, theirs = run_optax(optax.apply_if_finite(optax.adamw(0.1), allowed), BAD)
    close(got, want)
    assert int(state.total_notfinite) == int(theirs.total_notfinite) == len(BAD)
    assert int(state.notfinite_count) == int(theirs.notfinite_count) == 0
    assert state.last_finite
    assert all(x.isfinite().all() for x in tree.leaves(got))


def test_non_finite_updates_in_a_row_get_through():
    got, _ = run(optim.apply_if_finite(optim.sgd(0.1, 0.9), 2), BAD)
    want, _ = run_optax(optax.apply_if_finite(optax.sgd(0.1, 0.9), 2), BAD)
    close(got, want)
    assert not all(x.isfinite().all() for x in tree.leaves(got))


SPECS = {"blocks": {"norm": P(), "up": P(None, None, "tp")}, "embed": P("tp", "fsdp")}


@pytest.mark.parametrize("zero", [False, True])
def test_ranks_decide_alike_whoever_has_what_is_not_finite(zero):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    seen = optim.shard_specs(values(0), SPECS, mesh) if zero else SPECS
    inner = optim.chain(optim.clip_by_global_norm(1.0, seen), optim.adamw(0.1))
    optimizer = optim.zero(inner, SPECS, seen) if zero else inner
    optimizer = optim.apply_if_finite(optimizer, 5, specs=seen)

    def program(params, grads):
        state = optimizer.init(params)
        for grad in grads:
            rows = zip(tree.leaves(grad), cut_tree(SPECS, seen, grad), strict=True)
            parts = [take(x, cuts) for x, cuts in rows]
            grad = tree.unflatten(tree.structure(grad), parts)
            params, state = optimizer.step_(grad, state, params)
        return params, state

    out = SPECS, optimizer.specs(SPECS)
    mapped = shard_map(program, mesh, (SPECS, [SPECS] * STEPS), out, donate=(0, 1))
    params, state = mapped(values(0), list(gradients(BAD)))
    plain = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
    want, _ = run(optim.apply_if_finite(plain, 5), BAD)
    close(params, want)
    assert state.total_notfinite == len(BAD)


def test_under_vmap_and_in_a_program():
    optimizer = optim.apply_if_finite(optim.sgd(0.5), 3)

    def step(gradient):
        params = {"w": torch.ones(3)}
        grads = {"w": gradient}
        return optimizer.step_(grads, optimizer.init(params), params)

    several = torch.ones(2, 3)
    several[1, 0] = float("nan")
    params, state = torch.func.vmap(step)(several)
    assert params["w"].tolist() == [[0.5] * 3, [1.0] * 3]
    assert state.total_notfinite.tolist() == [0, 1]
    compiled = ft.jit(step, backend="eager")
    for gradient, want in zip(several, params["w"], strict=True):
        assert torch.equal(compiled(gradient)[0]["w"], want)


def test_zero_nans():
    updates = {"w": torch.tensor([1.0, float("nan"), -float("inf")])}
    assert optim.zero_nans().update(updates, ())[0]["w"].tolist() == [1.0, 0.0, -float("inf")]


def test_inject_hyperparams_is_optax():
    rate = lambda count: 0.1 / (1.0 + count)
    decay = lambda count: 0.9 - 0.01 * count

    def change(kind):
        def at(step, state):
            if step == 7:
                state.hyperparams["weight_decay"] = kind(0.5)
            return state

        return at

    make = lambda lib, **rest: lib.inject_hyperparams(lib.adamw, **rest)(rate, b1=decay, mask=MASK)
    got, state = run(make(optim, static_args=("mask",)), change=change(float))
    want, theirs = run_optax(make(optax, static_args=("mask",)), change=change(jnp.asarray))
    close(got, want, 1e-5)  # rates of integer counts are float32
    assert state.hyperparams["weight_decay"] == 0.5
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "weight_decay"}
    assert state.hyperparams["b1"] == pytest.approx(float(theirs.hyperparams["b1"]), rel=1e-6)


def test_injected_numbers_run_fused_and_can_be_differentiated_and_vmapped():
    optimizer = optim.inject_hyperparams(optim.adamw)(0.1, weight_decay=0.3)
    close(run(optimizer)[0], run(optim.adamw(0.1, weight_decay=0.3))[0], 0)

    def end(rate):
        made = optim.inject_hyperparams(optim.adamw)(rate)
        params = values(0)
        state = made.init(params)
        for grads in list(gradients())[:3]:
            updates, state = made.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        return params["embed"].sum()

    rate = torch.tensor(0.1, dtype=torch.float64)
    slope = torch.func.grad(end)(rate)
    torch.testing.assert_close(
        slope, (end(rate + 1e-6) - end(rate - 1e-6)) / 2e-6, rtol=1e-6, atol=0
    )
    both = torch.func.vmap(end)(torch.stack([rate, 2 * rate]))
    torch.testing.assert_close(both, torch.stack([end(rate), end(2 * rate)]))
    with pytest.raises(ValueError, match=r"static_args/maks: got 'maks'.*did you mean 'mask'"):
        optim.inject_hyperparams(optim.adamw, "maks")


def test_injected_state_on_a_mesh():
    make = optim.inject_hyperparams(optim.adamw, static_args="mask")
    optimizer = make(0.1, mask=MASK)

    def program(params, grads):
        return optimizer.step_(grads, optimizer.init(params), params)

    layout = SPECS, optimizer.specs(SPECS)
    params, state = shard_map(program, Mesh(tp=2, fsdp=2), (SPECS, SPECS), layout, donate=(0, 1))(
        values(0), values(1)
    )
    want = optim.adamw(0.1, mask=MASK)
    close(params, want.step_(values(1), want.init(values(0)), values(0))[0])
    assert state.hyperparams["learning_rate"] == 0.1


def test_groups_are_as_many_optimizers():
    groups, problems = optim.parse_groups("embed lr=0.1 decay=0 ; blocks/*norm lr=2;")
    assert not problems
    assert groups == (
        optim.ParameterGroup("embed", 0.1, 0.0),
        optim.ParameterGroup("blocks/*norm", 2.0),
    )
    made = optim.by_group(
        lambda g: optim.adamw(0.1 * g.learning_rate, weight_decay=0.2 * g.weight_decay),
        values(0),
        groups,
    )
    got, state = run(made)
    start = values(0)
    reference = torch.optim.AdamW(
        [
            {"params": start["embed"].requires_grad_(), "lr": 0.01, "weight_decay": 0.0},
            {"params": start["blocks"]["norm"].requires_grad_(), "lr": 0.2},
            {"params": start["blocks"]["up"].requires_grad_()},
        ],
        0.1, weight_decay=0.2,
    )  # fmt: skip
    for grads in gradients():
        for leaf, grad in zip(tree.leaves(start), tree.leaves(grads), strict=True):
            leaf.grad = grad
        reference.step()
    close(got, tree.map(torch.Tensor.detach, start))
    assert set(state.inner_states) == {"group_0", "group_1", "others"}
    labels = {"blocks": {"norm": "group_1", "up": "others"}, "embed": "group_0"}
    assert optim.group_labels(values(0), groups) == labels


def test_bad_groups_and_labels():
    _, problems = optim.parse_groups("embed lr=x rate=2; norm", "optimizer.groups")
    text = "\n".join(map(str, problems))
    assert "optimizer.groups: got lr=x; wanted lr= a finite number of at least 0" in text
    assert "got rate=2; wanted lr=NUMBER or decay=NUMBER" in text
    assert "got 'norm'; wanted a pattern, then lr= or decay=" in text
    groups = [
        optim.ParameterGroup("embet"),
        optim.ParameterGroup("*up"),
        optim.ParameterGroup("blocks/up"),
    ]
    found = optim.group_problems(values(0), groups)
    assert [p.got for p in found] == [
        "pattern 'embet', which is the first to fit no path",
        "pattern 'blocks/up', which is the first to fit no path",
    ]
    assert "did you mean 'embed'" in found[0].fix
    with pytest.raises(ValueError, match=r"embed: got label 'slw'.*did you mean 'slow'"):
        optim.multi_transform({"slow": optim.sgd(0.1)}, {"embed": "slw"})
    with pytest.raises(ValueError, match="max_consecutive_errors: got -1"):
        optim.apply_if_finite(optim.sgd(0.1), -1)


BIG = {"w": torch.ones(8, 4, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
LOOKS = {
    "numel": lambda x: x.numel() >= 32,
    "shape": lambda x: x.shape[0] >= 8,
    "size": lambda x: x.size(0) >= 8,
    "__len__": lambda x: len(x) >= 8,
    "nbytes": lambda x: x.nbytes >= 256,
    "values": lambda x: bool((x.sum() >= 32).item()),
}
LAYOUTS = {
    "zero": (Mesh(dp=2), {"w": P(), "b": P()}, {"w": P("dp"), "b": P("dp")}),
    "tp": (Mesh(tp=2), {"w": P("tp"), "b": P()}, None),
    "fsdp": (Mesh(dp=2), {"w": P(None, "dp"), "b": P("dp")}, None),
}


def decayed(mask, layout, make):
    """Parameters of ones after a step with gradients of 0: those that decay are no longer 1."""
    mesh, specs, shards = LAYOUTS[layout]
    optimizer = make(mask)
    optimizer = optim.zero(optimizer, shards=shards) if shards else optimizer
    optimizer = optimizer.bind(specs)
    grads, wanted = tree.map(torch.zeros_like, BIG), optimizer.grad_specs(specs)

    def step(params, grads):
        return optimizer.step_(grads, optimizer.init(params), params)[0]

    mapped = shard_map(step, mesh, (specs, wanted), specs, donate=(0, 1), check=False)
    return mapped(tree.map(torch.clone, BIG), grads)


@pytest.mark.parametrize("look", list(LOOKS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_masks_by_the_sizes_of_parts_are_refused(kind, layout, look):
    """A rank's part of [8, 4] has 16 elements, and would not decay; of bools it does."""
    make = lambda mask: getattr(optim, kind)(0.1, weight_decay=3.0, mask=mask)
    mask = lambda params: tree.map(LOOKS[look], params)
    with pytest.raises(
        ValueError, match=r"of parameter [wb]: got a function .* fix: give the tree"
    ):
        decayed(mask, layout, make)
    bools = tree.map(lambda x: x.numel() >= 32, BIG)
    named = lambda params: tree.map_with_path(lambda path, x: path == "w" and x.ndim == 2, params)
    for fits in (bools, named):
        got = decayed(fits, layout, make)
        torch.testing.assert_close(got, {"w": (1 - 0.1 * 3.0) * BIG["w"], "b": BIG["b"]})
    one = make(mask)
    zeros = tree.map(torch.zeros_like, BIG)
    updates, _ = one.update(zeros, one.init(BIG), BIG)  # whole ones, on no mesh
    torch.testing.assert_close(updates, {"w": -0.1 * 3.0 * BIG["w"], "b": zeros["b"]})


def test_moments_in_8_bits_by_the_sizes_of_parts_are_refused():
    optimizer, params = optim.adam(0.1, mu_dtype="int8"), {"w": torch.ones(64, 256)}
    init = shard_map(optimizer.init, Mesh(dp=2), ({"w": P("dp")},), P(), check=False)
    with pytest.raises(ValueError, match="of parameter w: got a function that looks at shape"):
        init(params)
