"""How layers are checked: on a mesh against a dense formula in float64, by every route to gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functron as ft
from functron import DATA_AXES, P, lax, tree
from functron.spmd import Mesh, Rules, spec_axes

TOLERANCE = 1e-10
STREAMS = {"whole": P(DATA_AXES), "sequence": P(DATA_AXES, "tp")}
RULES = Rules({"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"})


@pytest.fixture(params=["", "tp=2", "dp=2", "dp=2,tp=2", "tp=4", "tp=2,dp=2,fsdp=2"])
def mesh(request) -> Mesh:
    return Mesh.parse(request.param)


@pytest.fixture(params=list(STREAMS))
def stream(request) -> P:
    """The spec of the residual stream: the sequence whole, or split over tp."""
    return STREAMS[request.param]


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def draw(randn) -> Callable:
    """Values for a tree of defs, none of them special: norms and biases are no ones and zeros."""
    return lambda defs: tree.map(lambda d: randn(*d.shape), defs)


@pytest.fixture
def specs() -> Callable:
    """The specs of a tree of defs under Megatron's tensor parallelism, with changes."""
    return lambda defs, **changes: ft.param_specs(defs, Rules({**RULES, **changes}))


def apart(params: dict, group: int = 1) -> dict:
    """The parameters of a layer, joined ones cut: ``"qkv"`` and ``"gate_up"``."""
    params = dict(params)
    if qkv := params.pop("qkv", None):
        params["q"] = {name: x[..., :group, :].flatten(-3, -2) for name, x in qkv.items()}
        params["k"] = {name: x[..., group, :] for name, x in qkv.items()}
        params["v"] = {name: x[..., group + 1, :] for name, x in qkv.items()}
    if gate_up := params.pop("gate_up", None):
        params["gate"] = {name: x[..., 0, :] for name, x in gate_up.items()}
        params["up"] = {name: x[..., 1, :] for name, x in gate_up.items()}
    return params


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture
def agrees(randn) -> Callable:
    """Check a per-rank layer on a mesh against a dense formula.

    ``agrees(layer, dense, args, mesh, in_specs, out_spec, others=(), other_specs=())`` compares, for
    functions of trees `args` (differentiated) and `others` (not), the value, the pullback of a
    random cotangent taken outside of the mesh, and the gradient taken inside and synchronised.
    """

    def check(layer, dense, args, mesh, in_specs, out_spec, others=(), other_specs=()):
        expected, pullback = torch.func.vjp(lambda *moving: dense(*moving, *others), *args)
        cotangent = randn(*expected.shape)
        gradients = pullback(cotangent)

        mapped = ft.shard_map(layer, mesh, (*in_specs, *other_specs), out_spec)
        close(mapped(*args, *others), expected)
        value, pull = torch.func.vjp(lambda *moving: mapped(*moving, *others), *args)
        close(value, expected)
        close(pull(cotangent), gradients)

        def inside(cotangent, *operands):
            def loss(*moving):
                out = layer(*moving, *operands[len(args) :])
                return lax.psum((out * cotangent).sum(), spec_axes(out_spec))

            positions = tuple(range(len(args)))
            loss_value, grads = ft.value_and_grad(loss, positions)(*operands[: len(args)])
            return loss_value, ft.sync_gradients(grads, in_specs)

        step = ft.shard_map(
            inside, mesh, (out_spec, *in_specs, *other_specs), (P(), tuple(in_specs))
        )
        loss, grads = step(cotangent, *args, *others)
        close(loss, (expected * cotangent).sum())
        close(grads, gradients)

    return check
