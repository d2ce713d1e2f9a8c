"""eval_shape against what really comes out, and at sizes that could not be computed."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.program.shapes import eval_shape


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


def test_refuses_shapes_that_depend_on_data():
    with pytest.raises(ValueError, match="number in a tensor"):
        eval_shape(lambda x: x.nonzero())(torch.ones(3))
