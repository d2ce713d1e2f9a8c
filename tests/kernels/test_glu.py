"""Gated activations: emulated kernels against float64, and the registered ops under all transforms."""

from __future__ import annotations

import math

import pytest
import torch

import functron as ft
from functron.ops.glu import (
    GLU,
    GLU_ACTIVATIONS,
    GLU_BACKWARD,
    GLU_BACKWARD_AGAIN,
    GLU_PACKED,
    GLU_PACKED_BACKWARD,
    GLU_PACKED_BACKWARD_AGAIN,
    glu_linear,
)
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
    again = emulated(GLU_BACKWARD_AGAIN.kernel, d_hidden, gate, up, activation, seeds=(0,))
    assert all(map(torch.equal, again, (*grads, hidden)))
    both = torch.cat([gate, up], -1)
    assert torch.equal(emulated(GLU_PACKED.kernel, both, activation, seeds=(0,)), hidden)
    together = emulated(GLU_PACKED_BACKWARD.kernel, d_hidden, both, activation, seeds=(0,))
    assert torch.equal(together, torch.cat(grads, -1))
    args = d_hidden, both, activation
    again = emulated(GLU_PACKED_BACKWARD_AGAIN.kernel, *args, seeds=(0,))
    assert all(map(torch.equal, again, (together, hidden)))


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
@pytest.mark.parametrize("size", [40, 41], ids=["by packs", "by elements"])
def test_rows_from_the_count_on_stay_as_they_are(size):
    """As new memory is here: NaN."""
    draw = Draw(5)
    gate, up, d_hidden = (draw(7, size, dtype=torch.bfloat16) for _ in range(3))
    both = torch.cat([gate, up], -1)
    for op, args in (
        (GLU, (gate, up)),
        (GLU_PACKED, (both,)),
        (GLU_BACKWARD, (d_hidden, gate, up)),
        (GLU_BACKWARD_AGAIN, (d_hidden, gate, up)),
        (GLU_PACKED_BACKWARD, (d_hidden, both)),
        (GLU_PACKED_BACKWARD_AGAIN, (d_hidden, both)),
    ):
        whole = emulated(op.kernel, *args, "silu", seeds=(0,))
        for count in (0, 3, 9):
            got = emulated(op.kernel, *args, "silu", torch.tensor(count), seeds=(0, 1))
            for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (got, whole)), strict=True):
                assert torch.equal(a[:count], b[:count])
                assert a[count:].isnan().all()


def test_a_product_of_groups_tells_how_many_rows_are_real():
    """And where ranks are simulated, whose rows lie side by side, all are computed."""
    draw, sizes = Draw(6), torch.tensor([[1, 2], [0, 1]])
    gate, up = draw(2, 4, 8), draw(2, 4, 8)
    w, d_y = draw(2, 8, 4), draw(2, 4, 4)

    def grads(gate, up, w, d_y, sizes):
        real = (torch.arange(4) < sizes.sum()).unsqueeze(1)
        loss = lambda gate, up, w: (glu_linear(gate, up, w, "silu", sizes) * d_y).sum()
        *rows, d_w = ft.grad(loss, (0, 1, 2))(gate, up, w)
        return *(torch.where(real, x, 0.0) for x in rows), d_w

    program = ft.trace(grads)(gate[0], up[0], w, d_y[0], sizes[0])
    found = [e.operands[-1] for e, _ in program.block.walk() if e.name.startswith("glu")]
    assert [(v.shape, v.dtype) for v in found] == [((), torch.int64)] * 2
    mapped = torch.vmap(grads, in_dims=(0, 0, None, 0, 0))(gate, up, w, d_y, sizes)
    for index in range(2):
        alone = grads(gate[index], up[index], w, d_y[index], sizes[index])
        for a, b in zip(mapped, alone, strict=True):
            torch.testing.assert_close(a[index], b, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_keeps_gate_and_up_alone(dtype):
    """The bits of what autograd gives, which keeps hidden too; traced and scanned as well."""
    draw, layers = Draw(3), 3
    x, d_y = draw(2, 64, 8, dtype=dtype), draw(2, 64, 8, dtype=dtype)
    params = {
        "gate": draw(layers, 8, 64, dtype=dtype),
        "up": draw(layers, 8, 64, dtype=dtype),
        "down": draw(layers, 64, 8, dtype=dtype),
    }

    def loss_of(product):
        def layer(x, w):
            return x + product(x @ w["gate"], x @ w["up"], w["down"]), ()

        return lambda params, x: (ft.scan(layer, x, params)[0] * d_y).float().sum()

    plain = loss_of(lambda g, u, w: GLU(g, u, "silu") @ w)
    ours = loss_of(lambda g, u, w: glu_linear(g, u, w, "silu"))
    packed = loss_of(lambda g, u, w: glu_linear(torch.cat([g, u], -1), None, w, "silu"))
    want = ft.grad(plain, (0, 1))(params, x)
    jitted = ft.jit(ft.grad(ours, (0, 1)), backend="eager")
    for grads in (
        ft.grad(ours, (0, 1))(params, x),
        torch.func.grad(ours, (0, 1))(params, x),
        jitted(params, x),
        ft.grad(packed, (0, 1))(params, x),
        torch.func.grad(packed, (0, 1))(params, x),
    ):
        assert all(map(torch.equal, ft.tree.leaves(grads), ft.tree.leaves(want)))

    def growth(loss):  # of the peak, by three more layers
        deeper = ft.tree.map(lambda w: torch.cat([w, w]), params)
        program = ft.trace(ft.grad(loss, (0, 1)))
        return program(deeper, x).memory().peak_bytes - program(params, x).memory().peak_bytes

    if dtype == torch.bfloat16:
        hidden = 2 * 64 * 64 * dtype.itemsize
        assert growth(plain) - growth(ours) == layers * hidden

    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    shapes = (2, 5, 64), (2, 5, 64), (64, 8)
    gate, up, w = (draw(*shape, dtype=dtype).requires_grad_() for shape in shapes)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        glu_linear(gate, up, w, "silu")
    assert sum(kept.values()) <= gate.nbytes + up.nbytes + w.nbytes + 64  # and what has no elements


def test_a_product_with_a_frozen_matrix_has_no_gradient_of_it():
    draw = Draw(5)
    args = draw(3, 5), draw(3, 5), draw(5, 2)
    loss = lambda *args: glu_linear(*args, "silu").sum()
    names = [
        {equation.name for equation in ft.trace(ft.grad(loss, moving))(*args).block.equations}
        for moving in ((0, 1), (0, 1, 2))
    ]
    assert ["glu_backward_again" in found for found in names] == [False, True]
    grads = ft.grad(loss, (0, 1, 2))(*args)
    assert all(map(torch.equal, ft.grad(loss, (0, 1))(*args), grads))
    both, w = torch.cat(args[:2], -1), args[2]
    joined = ft.grad(lambda both: glu_linear(both, None, w, "silu").sum())(both)
    assert torch.equal(joined, torch.cat(grads[:2], -1))


def test_a_product_has_second_derivatives():
    draw = Draw(4)
    args = draw(3, 5).double(), draw(3, 5).double(), draw(5, 2).double()

    def twice(product):
        def penalty(*args):
            grads = torch.func.grad(lambda *a: product(*a).sin().sum(), (0, 1, 2))(*args)
            return sum(g.square().sum() for g in grads)

        return torch.func.grad(penalty, (0, 1, 2))(*args)

    want = twice(lambda g, u, w: FORMULAS["silu"](g, u) @ w)
    for ours in (
        lambda g, u, w: glu_linear(g, u, w, "silu"),
        lambda g, u, w: glu_linear(torch.cat([g, u], -1), None, w, "silu"),
    ):
        for a, b in zip(twice(ours), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


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

    def again(d_hidden, gate, up, name):
        return *plain(d_hidden, gate, up, name), FORMULAS[name](gate, up)

    def plain_packed(d_hidden, x, name):
        return torch.func.vjp(lambda x: _halved(name)(x, name), x)[1](d_hidden)

    def packed_again(d_hidden, x, name):
        return plain_packed(d_hidden, x, name)[0], _halved(name)(x, name)

    args = d_hidden, gate, up
    packed = (d_hidden / 3, both / 3, "silu")
    formula = lambda g, u, name: FORMULAS[name](g, u)
    return [
        *[
            Case(GLU, formula, (gate, up, name), (0, 1))
            for name in ("gelu", "relu", "relu2", "clamped_swiglu")
        ],
        Case(GLU_PACKED, _halved("gelu_tanh"), (both, "gelu_tanh"), (0,)),
        Case(GLU_BACKWARD, plain, (*args, "clamped_swiglu"), (0, 1, 2)),
        Case(GLU_BACKWARD, plain, (*args, "gelu"), (0, 1, 2)),
        Case(GLU_BACKWARD_AGAIN, again, (*(x / 3 for x in args), "silu"), (0, 1, 2)),
        Case(GLU_PACKED_BACKWARD, plain_packed, (d_hidden, both, "silu"), (0, 1)),
        Case(GLU_PACKED_BACKWARD_AGAIN, packed_again, packed, (0, 1)),
    ]


@conform(_cases())
def test_conformance(case, check):
    check(case)


@conform_uncompiled(_other_cases())
def test_conformance_of_others(case, check):
    check(case)
