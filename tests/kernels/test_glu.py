"""Gated activations: emulated kernels against float64, and the registered ops under all transforms."""

from __future__ import annotations

import math

import pytest
import torch

from functron.ops.glu import GLU, GLU_ACTIVATIONS, GLU_BACKWARD, GLU_PACKED, GLU_PACKED_BACKWARD
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import Emulator, emulated, missing
from tests.kernels.norms import FEWER, LAYOUTS, Draw, conform_uncompiled, near, seeds

kernels = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SHAPES = [(70, 5), (2, 3, 100), (0, 8), (3, 1027), (2, 8192)]


def clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


FORMULAS = {
    "silu": lambda g, u: g / (1 + torch.exp(-g)) * u,
    "gelu": lambda g, u: g / 2 * (1 + torch.erf(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: (
        g / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    ),
    "relu": lambda g, u: torch.where(g <= 0, 0.0, g) * u,
    "relu2": lambda g, u: torch.where(g <= 0, 0.0, g * g) * u,
    "clamped_swiglu": clamped,
}
ACTIVATIONS = pytest.mark.parametrize("activation", list(FORMULAS))


def test_every_activation_has_a_formula_here():
    assert tuple(FORMULAS) == GLU_ACTIVATIONS


def gradients(gate, up, d_hidden, activation):
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    return torch.autograd.grad(FORMULAS[activation](gate, up), (gate, up), d_hidden.double())


@pytest.mark.pairwise
@kernels
@pytest.mark.parametrize("dtype", FEWER, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ACTIVATIONS
def test_against_float64(shape, dtype, activation):
    draw = Draw()
    gate, up, d_hidden = (3 * draw(*shape, dtype=dtype) for _ in range(3))  # beyond the clamps too
    orders = seeds(shape)
    hidden = emulated(GLU.kernel, gate, up, activation, seeds=orders)
    near(hidden, FORMULAS[activation](gate.double(), up.double()), dtype)
    grads = emulated(GLU_BACKWARD.kernel, d_hidden, gate, up, activation, seeds=orders)
    wanted = gradients(gate, up, d_hidden, activation)
    for got, exact in zip(grads, wanted, strict=True):
        near(got, exact, dtype)
    both = torch.cat([gate, up], -1)
    assert torch.equal(emulated(GLU_PACKED.kernel, both, activation, seeds=(0,)), hidden)
    together = emulated(GLU_PACKED_BACKWARD.kernel, d_hidden, both, activation, seeds=(0,))
    assert torch.equal(together, torch.cat(grads, -1))


@kernels
@pytest.mark.parametrize("kind", list(LAYOUTS))
@ACTIVATIONS
def test_rows_keep_their_layout(kind, activation):
    draw, lay = Draw(1), LAYOUTS[kind]
    gate, up, d_hidden = (draw(6, 96, dtype=torch.bfloat16) for _ in range(3))
    got = emulated(GLU.kernel, lay(gate), lay(up), activation, seeds=(0, 1))
    assert torch.equal(got, emulated(GLU.kernel, gate, up, activation, seeds=(0,)))
    args = d_hidden, gate, up
    grads = emulated(GLU_BACKWARD.kernel, *map(lay, args), activation, seeds=(0, 1))
    wanted = emulated(GLU_BACKWARD.kernel, *args, activation, seeds=(0,))
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


@kernels
@ACTIVATIONS
@pytest.mark.parametrize("size", [4, 8], ids=["by elements", "by packs"])
def test_what_is_not_finite_goes_through_and_what_is_large_stays_finite(activation, size):
    gate = torch.tensor([[math.nan, -1e4, 1e4, 7.0] * (size // 4)])[:, : size - (size == 4)]
    up = torch.full_like(gate, 2.0)
    exact = FORMULAS[activation](gate.double(), up.double())
    exact = torch.where(exact.isnan() & ~gate.isnan(), 0.0, exact)  # exp of 1e4 over itself
    got = emulated(GLU.kernel, gate, up, activation)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    for grad in emulated(GLU_BACKWARD.kernel, up, gate, up, activation):
        assert grad[0, 1:4].isfinite().all()


def test_what_is_refused():
    x = torch.ones(2, 7)
    with pytest.raises(ValueError, match="activation 'sliu'"):
        GLU(x, x, "sliu")
    with pytest.raises(ValueError, match="7 columns"):
        GLU_PACKED(x, "silu")
    with pytest.raises(TypeError, match=r"float64.*fix"):
        GLU.kernel(Emulator(), x.double(), x.double(), "silu")


def _operands():
    draw = Draw(2)
    # none near the corners of clamps, beside which second derivatives jump
    gate, up, d_hidden = (3 * draw(3, 2, 6).double() for _ in range(3))
    return gate, up, d_hidden


def _halved(activation):
    return lambda x, _: FORMULAS[activation](*x.chunk(2, -1))


def _cases() -> list[Case]:
    gate, up, _ = _operands()
    formula = lambda g, u, name: FORMULAS[name](g, u)
    return [Case(GLU, formula, (gate, up, "silu"), (0, 1))]


def _other_cases() -> list[Case]:
    gate, up, d_hidden = _operands()
    both = torch.cat([gate, up], -1)

    def plain(d_hidden, gate, up, name):
        return torch.func.vjp(FORMULAS[name], gate, up)[1](d_hidden)

    def plain_packed(d_hidden, x, name):
        return torch.func.vjp(lambda x: _halved(name)(x, name), x)[1](d_hidden)

    args = d_hidden, gate, up
    formula = lambda g, u, name: FORMULAS[name](g, u)
    return [
        *[
            Case(GLU, formula, (gate, up, name), (0, 1))
            for name in ("gelu", "relu", "relu2", "clamped_swiglu")
        ],
        Case(GLU_PACKED, _halved("gelu_tanh"), (both, "gelu_tanh"), (0,)),
        Case(GLU_BACKWARD, plain, (*args, "clamped_swiglu"), (0, 1, 2)),
        Case(GLU_BACKWARD, plain, (*args, "gelu"), (0, 1, 2)),
        Case(GLU_PACKED_BACKWARD, plain_packed, (d_hidden, both, "silu"), (0, 1)),
    ]


@conform(_cases())
def test_conformance(case, check):
    check(case)


@conform_uncompiled(_other_cases())
def test_conformance_of_others(case, check):
    check(case)
