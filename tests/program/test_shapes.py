"""eval_shape against what really comes out, and at sizes that could not be computed."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.program.trace import eval_shape, trace


def described(value):
    return tree.map(lambda leaf: (tuple(leaf.shape), leaf.dtype), value)


def test_describes_what_a_function_returns():
    def fn(x, n):
        return {"sum": x.sum(0), "both": (x.long(), n)}

    got = eval_shape(fn)(torch.ones(3, 2), 4)
    assert got["both"][1] == 4
    assert got["sum"].device.type == "meta"
    assert described(got["sum"]) == ((2,), torch.float32)
    assert described(got["both"][0]) == ((3, 2), torch.int64)


def test_is_global_over_a_mesh():
    f = ft.shard_map(lambda x: lax.all_gather(x, "tp"), Mesh(dp=2, tp=2), P(("dp", "tp")), P("dp"))
    x = torch.ones(8, 3)
    assert described(eval_shape(f)(x.to("meta"))) == described(f(x))


def test_describes_a_state_that_fits_in_no_memory():
    config = gpt.PRESETS["llama3-405b"]
    defs = gpt.defs(config)
    optimizer = optim.adamw(1e-3)
    specs = ft.param_specs(defs, gpt.rules(config, Mesh()))
    state = eval_shape(lambda key: ft.init_state(key, defs, specs, optimizer, Mesh()))(
        random.key(0)
    )
    assert tree.size(state.params) == ft.num_params(defs)
    assert tree.size(state.opt_state) >= 2 * ft.num_params(defs)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
def test_describes_a_training_step(mesh):
    config = gpt.GPTConfig(
        vocab_size=8, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, max_seq=4
    )
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.adamw(1e-2)
    init = lambda key: ft.init_state(key, defs, specs, optimizer, mesh)
    step = ft.make_step(
        ft.mean_gradients(lambda p, b, k: gpt.loss(config, p, b), gpt.num_targets),
        optimizer,
        mesh,
        specs,
    )
    tokens = torch.arange(8).reshape(2, 4)
    batch = {"tokens": tokens, "targets": tokens, "rows": torch.arange(2)}
    state = eval_shape(init)(random.key(0))
    real = init(random.key(0))
    assert described(state) == described(real)
    before = tree.map(torch.clone, real)
    shapes = described(eval_shape(step)(state, batch))
    assert described(eval_shape(step)(real, batch)) == shapes
    for old, new in zip(tree.leaves(before), tree.leaves(real), strict=True):
        assert torch.equal(old, new)  # a step updates its state in place, but not here
    assert shapes == described(step(real, batch))


def inner(x):
    return lax.all_gather(torch.cat([x, lax.psum(x, "tp")]), "tp")


def uses_the_shape(x):
    made = eval_shape(inner)(x)
    assert made.shape == (2, 4)
    return x + torch.ones(made.shape)[0, :2]


def test_works_inside_programs():
    """In simulation, while tracing one rank, and while tracing a simulation."""
    f = ft.shard_map(uses_the_shape, Mesh(tp=2), P("tp"), P("tp"))
    x = torch.arange(4.0)
    assert torch.equal(f(x), x + 1)
    one_rank, everyone = trace(f)(x), trace(f, simulate=True)(x)
    assert [e.name for e in one_rank.block.equations if e.op.namespace == "functron"] == []
    assert torch.equal(one_rank(x), x + 1)
    assert torch.equal(everyone(x), x + 1)


def test_works_with_transforms_and_the_tape():
    w = torch.ones(3, 2, requires_grad=True)
    tape = lambda w: torch.autograd.grad((w**2).sum(), w)[0]
    loss = lambda w: (w**2).sum()
    for fn in (tape, ft.grad(loss), torch.func.grad(loss)):
        got = eval_shape(fn)(w)
        assert described(got) == described(fn(w))
        assert got.is_meta
    seen = []
    torch.func.vmap(lambda x: seen.append(eval_shape(lambda x: x[None])(x).shape) or x)(w.detach())
    assert seen == [(1, 2)]


def test_keywords_statics_and_closures():
    table = torch.arange(3)
    got = eval_shape(lambda x, *, y: (x + y["a"] + table, y["n"], None))(
        torch.ones(3), y={"a": torch.ones((), dtype=torch.float64), "n": "text"}
    )
    assert described(got[0]) == ((3,), torch.float32)
    assert got[1:] == ("text", None)


def test_refuses_shapes_that_depend_on_data():
    with pytest.raises(ValueError, match="number in a tensor"):
        eval_shape(lambda x: x.nonzero())(torch.ones(3))
