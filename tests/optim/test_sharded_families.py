"""Optimizers that look at rows, blocks or whole matrices: on every sharding the numbers of one rank.

Their rules are checked elsewhere; here each is one rank's for float64 over some updates, state and
all, on meshes that split what they look at: by tensor parallelism, by fully sharded parameters, and
by ZeRO, with padding and without.
"""

import functools

import pytest
import torch

import functron as ft
from functron import Mesh, P, Uneven, optim, random, shard_map, tree
from functron.spmd.params import Normal, ParamDef
from functron.spmd.spec import cut_tree, is_spec, take, unpad

STEPS = 4
KIND = (Normal(1.0), torch.float64)
DEFS = {
    "blocks": {
        "q": ParamDef((3, 12, 4, 2), ("layers", "embed", "heads", None), *KIND),
        "out": ParamDef((3, 4, 2, 12), ("layers", "heads", None, "embed"), *KIND),
        "experts": ParamDef((3, 2, 8, 12), ("layers", "expert", "mlp", "embed"), *KIND),
        "norm": ParamDef((3, 12), ("layers", "embed"), *KIND, decay=False),
    },
    "embed": ParamDef((10, 12), ("vocab", "embed"), *KIND),
    "norm": ParamDef((12,), ("embed",), *KIND, decay=False),
}


def values(seed):
    return ft.init_params(random.key(seed), DEFS)


MATRICES = optim.matrices(DEFS)
MAKERS = {
    "lion": lambda specs: optim.lion(0.01),
    "adafactor": lambda specs: optim.adafactor(0.1, 2, momentum=0.9, defs=DEFS, specs=specs),
    "adam mini": lambda specs: optim.adam_mini(0.1, optim.blocks(DEFS), defs=DEFS, specs=specs),
    "soap": lambda specs: optim.soap(0.1, MATRICES, frequency=2, specs=specs),
    "soap, all on every rank": lambda specs: optim.soap(
        0.1, MATRICES, frequency=2, specs=specs, distributed=False
    ),
    "soap on one side": lambda specs: optim.soap(0.1, MATRICES, max_dim=8, specs=specs),
    "muon": lambda specs: optim.muon(0.1, MATRICES, specs=specs, distributed=True),
    "muon, all on every rank": lambda specs: optim.muon(0.1, MATRICES, specs=specs),
    "average": lambda specs: optim.with_average(optim.adamw(0.1), 0.7),
}
DENSE = {name: functools.partial(make, None) for name, make in MAKERS.items()}
RULES = [
    (Mesh(tp=2), {"heads": "tp", "mlp": "tp", "vocab": "tp"}),
    (Mesh(fsdp=2, tp=2), {"heads": "tp", "mlp": "tp", "embed": "fsdp"}),
    (Mesh(ep=2, tp=4), {"expert": "ep", "mlp": "tp", "heads": "tp"}),
]
ZERO = [
    (Mesh(dp=2, tp=2), {"heads": "tp", "mlp": "tp", "vocab": "tp"}),
    (Mesh(dp=5), {}),  # divides no dim but that of the vocabulary: everything else is padded
    (Mesh(dp=2, fsdp=3), {"embed": "fsdp"}),
]
UNEVEN = [
    (Mesh(tp=3), {"heads": Uneven("tp"), "mlp": Uneven("tp"), "vocab": Uneven("tp")}),
    (Mesh(dp=2, fsdp=5), {"embed": Uneven(("dp", "fsdp"))}),
]
UNEVEN_ZERO = [(Mesh(dp=2, tp=3), UNEVEN[0][1]), (Mesh(dp=3, fsdp=5), {"embed": Uneven("fsdp")})]
CASES = [(*case, False) for case in [*RULES, *UNEVEN]]
CASES += [(*case, True) for case in [*ZERO, *UNEVEN_ZERO]]


@functools.cache
def on_one_rank(make):
    """The state that `train` ends with where nothing is sharded; not to be changed in place."""
    return train(make(), values(0), gradients())


def train(optimizer, params, grads):
    state = optimizer.init(params)
    for grad in grads:
        params, state = optimizer.step_(grad, state, params)
    return params, state


def gradients():
    return [values(10 + step) for step in range(STEPS)]


def parts_of(grads, specs, into):
    rows = zip(tree.leaves(grads), cut_tree(specs, into, grads), strict=True)
    return tree.unflatten(tree.structure(grads), [take(x, cuts) for x, cuts in rows])


def close(paths, got, want):
    for path, a, b in zip(paths, got, want, strict=True):
        assert a.shape == b.shape, path
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= 1e-10, f"{path}: {error}"


@pytest.mark.parametrize(("mesh", "rules", "zero"), CASES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_every_sharding_is_one_rank(name, mesh, rules, zero):
    specs = ft.param_specs(DEFS, ft.Rules(rules))
    seen = optim.shard_specs(DEFS, specs, mesh) if zero else specs
    optimizer = MAKERS[name](seen)
    optimizer = optim.zero(optimizer, specs, seen) if zero else optimizer
    layout = optimizer.specs(specs)

    def program(params, grads):
        grads = [parts_of(g, specs, optimizer.grad_specs(specs)) for g in grads]
        return train(optimizer, params, grads)

    mapped = shard_map(program, mesh, (specs, [specs] * STEPS), (specs, layout), donate=(0, 1))
    params, state = mapped(values(0), gradients())
    want, want_state = on_one_rank(DENSE[name])
    close(tree.paths(want), tree.leaves(params), tree.leaves(want))
    flat = tree.broadcast_prefix(layout, want_state, is_leaf=is_spec)
    rows = zip(tree.leaves(state), tree.leaves(want_state), flat, strict=True)
    whole = [unpad(a, b.shape, spec, mesh) for a, b, spec in rows]
    close(tree.paths(want_state), whole, tree.leaves(want_state))


CLIPPED = lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))
PLAIN = ("adafactor", "muon", "around", "rounded")  # which are without ZeRO by default as well
UNBOUND = {
    "adafactor": lambda: optim.adafactor(0.1, 2, momentum=0.9, defs=DEFS),
    "adam mini": lambda: optim.adam_mini(0.1, optim.blocks(DEFS), defs=DEFS),
    "muon": lambda: optim.muon(0.1, MATRICES),
    "soap": lambda: optim.soap(0.1, MATRICES, frequency=2),
    "chain": CLIPPED,
    "where": lambda: optim.where(tree.map(lambda d: d.decay, DEFS), CLIPPED(), optim.sgd(0.1)),
    "only": lambda: optim.only(CLIPPED(), {"blocks": True, "embed": True, "norm": False}),
    "inject": lambda: optim.inject_hyperparams(
        lambda norm: optim.chain(optim.clip_by_global_norm(norm), optim.adamw(0.1))
    )(norm=0.1),
    "around": lambda: optim.apply_if_finite(
        optim.with_average(optim.with_fp32_masters(CLIPPED()), 0.7), 2
    ),
    "rounded": lambda: optim.with_stochastic_rounding(CLIPPED(), defs=DEFS),
    "configured": lambda: optim.make_optimizer(
        optim.OptimizerConfig("muon", ema_decay=0.5, skip_nonfinite=1), 0.1, defs=DEFS
    ),
}


@pytest.mark.parametrize(
    ("name", "mesh", "rules", "zero"),
    [
        *((name, *CASES[3]) for name in UNBOUND),
        *(
            pytest.param(name, *CASES[1], marks=[] if name in PLAIN else pytest.mark.full)
            for name in UNBOUND
        ),
    ],
    ids=str,
)
def test_specs_are_given_once(name, mesh, rules, zero):
    """To the whole optimizer, by `bind`; without, a mesh is refused."""
    specs = ft.param_specs(DEFS, ft.Rules(rules))
    optimizer = UNBOUND[name]()
    if zero:
        optimizer = optim.zero(optimizer, shards=optim.shard_specs(DEFS, specs, mesh))

    def train_on_mesh(optimizer):
        def program(params, grads):
            grads = [parts_of(g, specs, optimizer.grad_specs(specs)) for g in grads]
            return train(optimizer, params, grads)[0]

        return shard_map(program, mesh, (specs, [specs] * STEPS), specs, donate=(0, 1))

    bound = optimizer.bind(specs)
    assert bound.bind(P()).grad_specs(specs) == bound.grad_specs(specs)
    params = train_on_mesh(bound)(values(0), gradients())
    want, _ = on_one_rank(UNBOUND[name])
    close(tree.paths(want), tree.leaves(params), tree.leaves(want))
    if name != "rounded" or zero:
        with pytest.raises(ValueError, match=r"optimizer\.bind\(specs\), as make_step does"):
            train_on_mesh(optimizer)(values(0), gradients())


def test_specs_that_were_given_stay():
    """As those of the shards, of what is chained before `zero`."""
    clip = optim.clip_by_global_norm(1.0, {"w": P("tp")})
    assert clip.bind({"w": P("dp")}) is clip
    adamw = optim.adamw(0.1)
    assert adamw.bind(P()) is adamw  # fused as before


@pytest.mark.parametrize("name", MAKERS)
def test_pure_updates_are_those_in_place(name):
    optimizer = MAKERS[name](None)
    want, want_state = train(optimizer, values(0), gradients())
    params = values(0)
    state = optimizer.init(params)
    for grad in gradients():
        updates, state = optimizer.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    close(tree.paths(want), tree.leaves(params), tree.leaves(want))
    close(tree.paths(want_state), tree.leaves(state), tree.leaves(want_state))


@pytest.mark.parametrize("name", ["soap", "adafactor", "adam mini"])
def test_under_masters_groups_of_offload_and_vmap(name):
    inner = MAKERS[name](None)
    want, _ = train(inner, values(0), gradients())
    got, state = train(optim.offload(inner, group_bytes=1), values(0), gradients())
    close(tree.paths(want), tree.leaves(got), tree.leaves(want))
    assert tree.paths(state) == tree.paths(inner.init(values(0)))
    optimizer = optim.with_fp32_masters(inner)
    low = tree.map(torch.Tensor.bfloat16, values(0))
    params, state = train(optimizer, low, [tree.map(torch.Tensor.bfloat16, g) for g in gradients()])
    assert all(leaf.dtype == torch.bfloat16 for leaf in tree.leaves(params))
    assert all(leaf.dtype != torch.bfloat16 for leaf in tree.leaves(state))

    def one(rate):
        made = optim.chain(inner, optim.scale_by_learning_rate(-rate))
        params = values(0)
        state = made.init(params)
        for grad in gradients():
            updates, state = made.update(grad, state, params)
            params = optim.apply_updates(params, updates)
        return params

    rates = torch.tensor([1.0, 0.5], dtype=torch.float64)
    several = torch.func.vmap(one)(rates)
    for a, b in zip(tree.leaves(several), tree.leaves(want), strict=True):
        torch.testing.assert_close(a[0], b, rtol=1e-10, atol=1e-10)


def test_a_compiled_update_of_matrices():
    """It cannot know which update it is, computes every possibility and selects."""
    grads, start = ([{"w": v["blocks"]["q"]} for v in (values(s), values(20 + s))] for s in (1, 2))
    optimizer = optim.scale_by_soap({"w": MATRICES["blocks"]["q"]}, frequency=1)
    ends = []
    for method in (optimizer.update, ft.jit(optimizer.update, backend="eager")):
        state = optimizer.init(start[0])
        for grad in [*grads, *start]:
            updates, state = method(grad, state)
        ends.append((updates, state))
    close(tree.paths(ends[0]), tree.leaves(ends[1]), tree.leaves(ends[0]))


def test_errors():
    optimizer = optim.adafactor(0.1)
    with pytest.raises(ValueError, match=r"defs: got None; wanted the parameters' defs, for specs"):
        optimizer.specs({"w": P("tp")})
    assert optimizer.specs({"w": P()})[0].v == {"w": P()}
    optimizer = optim.adafactor(
        0.1, defs=DEFS, specs={**DEFS, "blocks": P(), "embed": P("tp"), "norm": P()}
    )
    with pytest.raises(
        ValueError, match=r"embed: got shape \(5, 12\); wanted \(10, 12\)"
    ) as caught:
        optimizer.init({**values(0), "embed": torch.ones(5, 12)})
    assert "give the optimizer the parameters' defs and specs" in str(caught.value)
    with pytest.raises(ValueError, match="frequency: got 0") as caught:
        optim.scale_by_soap({}, 1.0, frequency=0)
    assert "b1: got 1.0" in str(caught.value)
