"""Muon: the authors' rule on one rank, and that on every sharding."""

import math

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, optim, random, shard_map, tree
from functron.spmd.params import Normal, ParamDef
from functron.spmd.spec import cut_tree, is_spec, take, unpad

STEPS = 3
DEFS = {
    "blocks": {
        "q": ParamDef((3, 16, 4, 2), ("layers", "embed", "heads", None), Normal(1.0), torch.float64),
        "out": ParamDef((3, 4, 2, 16), ("layers", "heads", None, "embed"), Normal(1.0), torch.float64),
        "qkv": {
            "w": ParamDef(
                (3, 16, 2, 5, 12), ("layers", "embed", "kv_heads", None, None), Normal(1.0),
                torch.float64, pieces=(("q", 3), ("k", 1), ("v", 1)),
            )
        },
        "up": ParamDef((3, 16, 20), ("layers", "embed", "mlp"), Normal(1.0), torch.float64),
        "experts": ParamDef(
            (3, 2, 20, 16), ("layers", "expert", "mlp", "embed"), Normal(1.0), torch.float64
        ),
        "norm": ParamDef((3, 16), ("layers", "embed"), Normal(1.0), torch.float64, decay=False),
        "bias": ParamDef((3, 4, 2), ("layers", "heads", None), Normal(1.0), torch.float64, decay=False),
    },
    "embed": ParamDef((10, 16), ("vocab", "embed"), Normal(1.0), torch.float64),
    "positions": ParamDef((8, 16), (None, "embed"), Normal(1.0), torch.float64),
    "norm": ParamDef((16,), ("embed",), Normal(1.0), torch.float64, decay=False),
}  # fmt: skip
MUON = {
    "blocks": {
        "q": True, "out": True, "up": True, "experts": True, "norm": False, "bias": False,
        "qkv": {"w": True},
    },
    "embed": False, "positions": False, "norm": False,
}  # fmt: skip


def test_hidden_matrices_are_muons_and_the_rest_is_not():
    found = optim.matrices(DEFS)
    assert tree.map(lambda m: m is not False, found) == MUON
    assert found["blocks"]["q"] == optim.Matrix(1, 1, 16, 8, (16, 4, 2))
    assert found["blocks"]["out"] == optim.Matrix(1, 2, 8, 16, (4, 2, 16))
    assert found["blocks"]["up"] == optim.Matrix(1, 1, 16, 20, (16, 20))
    assert found["blocks"]["qkv"]["w"] == optim.Matrix(1, 1, 16, 120, (16, 2, 5, 12), (3, 1, 1))
    assert found["blocks"]["experts"] == optim.Matrix(2, 1, 20, 16, (20, 16))
    model = optim.matrices(gpt.defs(gpt.PRESETS["gpt2"]))
    chosen = [p for p, m in zip(tree.paths(model), tree.leaves(model), strict=True) if m]
    assert chosen == [
        "blocks/attention/k/w", "blocks/attention/out/w", "blocks/attention/q/w",
        "blocks/attention/v/w", "blocks/mlp/down/w", "blocks/mlp/up/w",
    ]  # fmt: skip


def values(seed):
    return ft.init_params(random.key(seed), DEFS)


def orthogonal(g, steps=5):
    """Jordan's zeropower_via_newtonschulz5, of one matrix."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        big_a = x @ x.T
        x = a * x + (b * big_a + c * big_a @ big_a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


QKV = slice(0, 3), slice(3, 4), slice(4, 5)


def rule(g, shape, scale):
    flat = g.reshape(shape).mT
    r, c = flat.shape[1:]
    factor = 0.2 * math.sqrt(max(r, c)) if scale == "adamw" else math.sqrt(max(1, r / c))
    return factor * torch.stack([orthogonal(row) for row in flat]).mT.reshape(g.shape)


def written_out(params, scale, nesterov):
    """The authors' rule, matrix by matrix as torch.nn.Linear has them, and AdamW."""
    others = {
        p: x.clone().requires_grad_()
        for p, x in zip(tree.paths(params), tree.leaves(params), strict=True)
    }
    flags = dict(zip(tree.paths(params), tree.leaves(MUON), strict=True))
    adam = torch.optim.AdamW([x for p, x in others.items() if not flags[p]], 0.1, weight_decay=0.2)
    momenta = {p: torch.zeros_like(x) for p, x in others.items()}
    for step in range(STEPS):
        grads = dict(zip(others, tree.leaves(values(10 + step)), strict=True))
        for path, x in others.items():
            x.grad = grads[path]
            if not flags[path]:
                continue
            m = momenta[path]
            m.lerp_(grads[path], 1 - 0.9)
            g = grads[path].lerp(m, 0.9) if nesterov else m
            shape = {"q": (3, 16, 8), "out": (3, 8, 16), "up": (3, 16, 20), "experts": (6, 20, 16)}
            name = path.split("/")[1]
            if name == "qkv":  # a matrix of 72 outputs, and two of 24
                pieces = [rule(g[:, :, :, rows], (3, 16, -1), scale) for rows in QKV]
                o = torch.cat(pieces, 3)
            else:
                o = rule(g, shape[name], scale)
            with torch.no_grad():
                x.mul_(1 - 0.1 * 0.2).sub_(0.1 * o)
        adam.step()
    return tree.unflatten(tree.structure(params), [x.detach() for x in others.values()])


def close(got, want, tolerance=1e-10):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.shape == b.shape, path
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{path}: {error}"


def train(optimizer, params, grads=None):
    state = optimizer.init(params)
    for step in range(STEPS):
        params, state = optimizer.step_(
            values(10 + step) if grads is None else grads[step], state, params
        )
    return params, state


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale", ["adamw", "spectral"])
def test_one_rank_is_the_authors_rule(scale, nesterov):
    optimizer = optim.muon(
        0.1, optim.matrices(DEFS), 0.9, nesterov, weight_decay=0.2, scale=scale,
        others=optim.adamw(0.1, weight_decay=0.2),
    )  # fmt: skip
    want = written_out(values(0), scale, nesterov)
    got, _ = train(optimizer, values(0))
    close(got, want)
    params, state = values(0), optimizer.init(values(0))
    for step in range(STEPS):
        updates, state = optimizer.update(values(10 + step), state, params)
        params = optim.apply_updates(params, updates)
    close(params, want)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has none")
def test_torch_has_the_same_rule():
    """Both multiply in bfloat16: 2^-9 of every product, which five steps make some percent."""
    start = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    theirs = start.T.clone().requires_grad_()
    reference = torch.optim.Muon([theirs], 0.1, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    matrix = {"w": optim.Matrix(0, 1, 24, 16)}
    ours = optim.muon(0.1, matrix, 0.95, weight_decay=0.1)
    params = {"w": start.clone()}
    state = ours.init(params)
    for step in range(STEPS):
        grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(10 + step))
        theirs.grad = grad.T.clone()
        reference.step()
        params, state = ours.step_({"w": grad}, state, params)
    moved = (start - params["w"]).norm()
    assert (params["w"] - theirs.detach().T).norm() < 0.04 * moved


RULES = [
    (Mesh(tp=2), {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}),
    (Mesh(fsdp=2, tp=2), {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "embed": "fsdp"}),
    (Mesh(fsdp=4), {"embed": "fsdp"}),
    (Mesh(ep=2, tp=2), {"expert": "ep", "mlp": "tp", "heads": "tp"}),
    (Mesh(tp=4), {"mlp": "tp"}),
]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [*RULES, (Mesh(dp=2), {}), (Mesh(dp=3, tp=2), {"mlp": "tp"}), (Mesh(dp=5), {})],
    ids=str,
)
def test_every_sharding_is_one_rank(mesh, rules, distributed, zero):
    specs = ft.param_specs(DEFS, ft.Rules(rules))
    seen = optim.shard_specs(DEFS, specs, mesh) if zero else specs
    optimizer = optim.muon(0.1, optim.matrices(DEFS), specs=seen, distributed=distributed)
    want, want_state = train(optim.muon(0.1, optim.matrices(DEFS)), values(0))
    optimizer = optim.zero(optimizer, specs, seen) if zero else optimizer
    layout = optimizer.specs(specs)

    def program(params, grads):
        grads = [parts_of(g, specs, optimizer.grad_specs(specs)) for g in grads]
        return train(optimizer, params, grads)

    grads = [values(10 + step) for step in range(STEPS)]
    mapped = shard_map(program, mesh, (specs, [specs] * STEPS), (specs, layout), donate=(0, 1))
    params, state = mapped(values(0), grads)
    close(params, want)
    flat = tree.broadcast_prefix(layout, want_state, is_leaf=is_spec)
    rows = zip(tree.leaves(state), tree.leaves(want_state), flat, strict=True)
    close([unpad(a, b.shape, spec, mesh) for a, b, spec in rows], tree.leaves(want_state))


def parts_of(grads, specs, into):
    rows = zip(tree.leaves(grads), cut_tree(specs, into, grads), strict=True)
    return tree.unflatten(tree.structure(grads), [take(x, cuts) for x, cuts in rows])


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"scale: got 'adam'; .*did you mean 'adamw'") as caught:
        optim.scale_by_muon({}, 1.0, scale="adam")
    assert "momentum: got 1.0" in str(caught.value)


def test_singular_values_become_about_one():
    """Jordan: the coefficients leave singular values between about 0.7 and 1.2."""
    x = torch.randn(5, 32, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = torch.linalg.svdvals(optim.newton_schulz(x))
    assert 0.6 < s.min() < s.max() < 1.25
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    aligned = u.mT @ optim.newton_schulz(x) @ vh.mT
    close(
        [aligned - torch.diag_embed(aligned.diagonal(dim1=1, dim2=2)) + 1],
        [torch.ones_like(aligned)],
    )
