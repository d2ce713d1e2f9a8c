"""Products of matrices that oneDNN multiplies, against torch's in double precision."""

from __future__ import annotations

import pytest
import torch

from functron.core import compat
from functron.spmd.simulate import product

pytestmark = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="this processor has no AVX-512"
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(compat, "_WIDE_FLOPS", 0)
    monkeypatch.setattr(compat, "_COPIED_COLUMNS", 24)


def operands(columns, turned):
    torch.manual_seed(columns)
    x = torch.randn(2, 4, 16)
    w = torch.randn(columns, 16).t() if turned else torch.randn(16, columns)
    return x.requires_grad_(), w.requires_grad_()


def derivatives(fn, x, w):
    """The value, its gradients, and those of a function of the gradients."""
    y = fn(x, w)
    first = torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)
    squares = torch.stack([g.square().sum() for g in first]).sum()
    second = torch.autograd.grad(squares, (x, w))
    return [y, *first, *second]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("columns", [8, 24, 40])
def test_values_and_derivatives(columns, turned):
    x, w = operands(columns, turned)
    found = derivatives(product, x, w)
    assert "_WideProductBackward" in str(getattr(found[0].grad_fn, "next_functions", ""))
    double = (v.detach().double().requires_grad_() for v in (x, w))
    for got, want in zip(found, derivatives(torch.matmul, *double), strict=True):
        assert (got.double() - want).norm() < 1e-5 * want.norm()
    torch.testing.assert_close(product(x, w), x @ w, rtol=1e-5, atol=1e-5)


def test_torch_multiplies_what_something_else_sees():
    x, w = operands(24, False)
    assert not isinstance(torch.func.grad(lambda w: product(x, w).sum())(w), type(None))
    with torch.autocast("cpu", torch.bfloat16):
        assert product(x, w).dtype == torch.bfloat16
    seen = torch.func.vmap(product, (0, None))(x, w)
    torch.testing.assert_close(seen, x @ w)
    for other in (x.double(), w.double()):
        assert not compat.is_wide(other.reshape(-1, other.shape[-1]), w)
    assert not compat.is_wide(x.detach().view(8, 16)[:, ::2], w[::2])
