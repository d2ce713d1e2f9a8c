"""An optimizer's state keeps the dtypes and shapes that its init gave it, whatever gradients are.

Checkpoints, compiled steps and donated memory rely on it: a state that widens trains on, and fails
at the first save.
"""

import pytest
import torch

from functron import Mesh, P, optim, shard_map, tree
from functron.optim.config import OPTIMIZERS
from functron.spmd.params import ParamDef, zeros

DEFS = {
    "embed": ParamDef((8, 4), ("vocab", "embed"), zeros),
    "blocks": {"up": ParamDef((2, 4, 6), ("layers", "embed", "mlp"), zeros)},
    "norm": ParamDef((4,), ("embed",), zeros, decay=False),
}
OWN = {
    "adafactor": {"adafactor": optim.AdafactorConfig(min_dim=2, momentum=0.5)},
    "soap": {"soap": optim.SoapConfig(frequency=1)},
}
MOMENTS = {
    "sgd": [("", "")],
    "adafactor": [("", "")],
    "lion": [("", ""), ("bfloat16", ""), ("float32", "")],
    "adam_mini": [("", ""), ("bfloat16", ""), ("float32", "")],
}
ALL = [("", ""), ("bfloat16", "float32"), ("float32", "bfloat16"), ("int8", "int8"), ("fp8", "fp8")]
AROUND = [
    {"fp32_masters": True},
    {"stochastic_rounding": True},
    {"ema_decay": 0.9},
    {"groups": "embed lr=0.5; norm lr=2"},
    {"fp32_masters": True, "ema_decay": 0.9, "skip_nonfinite": 2, "offload": True},
]
DTYPES = [  # of parameters, and of gradients
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]


def values(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda d: torch.randn(d.shape, generator=generator).to(dtype), DEFS)


def layout(value):
    rows = zip(tree.paths(value), tree.leaves(value), strict=True)
    return {path: (leaf.dtype, tuple(leaf.shape)) for path, leaf in rows}


def twice(optimizer, method, state, dtypes):
    """The state and the parameters after two updates."""
    params = values(dtypes[0], 0)
    for step in range(2):
        grads = values(dtypes[1], 1 + step)
        if method == "step_":
            params, state = optimizer.step_(grads, state, params)
        else:
            donated = method == "donated"
            updates, state = optimizer.update(grads, state, params, donated=donated)
            params = optim.apply_updates(params, updates)
    return state, params


def assert_kept(optimizer, dtypes, case):
    for method in ("update", "donated", "step_"):
        state = optimizer.init(values(dtypes[0], 0))
        before = layout(state)
        state, params = twice(optimizer, method, state, dtypes)
        assert layout(state) == before, (case, method)
        assert layout(params) == layout(values(dtypes[0], 0)), (case, method)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_keeps_its_dtypes(name):
    cases = [({"mu_dtype": mu, "nu_dtype": nu}, DTYPES) for mu, nu in MOMENTS.get(name, ALL)]
    cases += [(around, DTYPES[:2]) for around in AROUND]
    for settings, several in cases:
        config = optim.OptimizerConfig(name, **settings, **OWN.get(name, {}))
        optimizer = optim.make_optimizer(config, 1e-2, defs=DEFS)
        for dtypes in several:
            assert_kept(optimizer, dtypes, (settings, dtypes))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_so_does_that_of_zero(name):
    """On the parts of parameters that ranks keep, in a mapped program, which checks it as well."""
    mesh = Mesh(dp=2)
    shards = optim.shard_specs(DEFS, P(), mesh)
    config = optim.OptimizerConfig(name, **OWN.get(name, {}))
    optimizer = optim.make_optimizer(config, 1e-2, defs=DEFS, specs=P(), shards=shards)
    params, specs = values(torch.bfloat16, 0), optimizer.specs(tree.map(lambda _: P(), DEFS))
    state = shard_map(optimizer.init, mesh, P(), specs, check=False)(params)
    before = layout(state)
    wanted = optimizer.grad_specs(tree.map(lambda _: P(), DEFS))
    how = {"check": False, "donate": (0, 1, 2)}
    step = shard_map(optimizer.step_, mesh, (wanted, specs, P()), (P(), specs), **how)
    padded = optim.padded_shapes(DEFS, shards, mesh)
    for _ in range(2):
        grads = tree.map(lambda d, shape: torch.ones(shape), DEFS, padded)
        params, state = step(grads, state, params)
    assert layout(state) == before
