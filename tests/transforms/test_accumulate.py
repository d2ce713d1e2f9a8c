"""accumulate: sums over microbatches equal the whole batch."""

import pytest
import torch

import functron as ft

X = torch.arange(24, dtype=torch.float64).view(8, 3).sin()
W = torch.arange(6, dtype=torch.float64).view(3, 2).cos()


def part(w, batch):
    """This microbatch's part of the mean over the whole batch of 8."""
    return torch.tanh(batch["x"] @ w).square().sum() / 8


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_equals_the_whole_batch(num):
    want = torch.func.grad_and_value(part)(W, {"x": X})
    value, grads = ft.accumulate(ft.value_and_grad(part), num)(W, {"x": X})
    torch.testing.assert_close((grads, value), want, rtol=1e-12, atol=1e-12)


def test_accumulates_in_the_dtype_asked_for():
    w = W.bfloat16()
    f = ft.accumulate(ft.grad(lambda w, x: (x @ w).sum()), 8, dtype=torch.float32)
    got = f(w, X.bfloat16())
    assert got.dtype == torch.float32
    rows = [X[i].bfloat16().float() for i in range(8)]
    torch.testing.assert_close(got, sum(rows)[:, None].expand(3, 2))
    assert ft.accumulate(ft.grad(lambda w, x: (x @ w).sum()), 8)(w, X.bfloat16()).dtype == w.dtype


def test_other_positions():
    f = ft.accumulate(lambda a, b, w: (a * b).sum() * w, 2, argnums=(0, 1))
    torch.testing.assert_close(f(X, X, 2.0), 2 * X.square().sum())


def test_errors_name_every_leaf():
    batch = {"x": torch.ones(6, 2), "y": torch.ones(5), "z": torch.ones(())}
    with pytest.raises(ValueError, match=r"(?s)1/y: got shape \(5,\).*1/z: got shape \(\)") as e:
        ft.accumulate(lambda w, b: w, 3)(1.0, batch)
    assert "1/x" not in str(e.value)
    with pytest.raises(ValueError, match="num_microbatches=0"):
        ft.accumulate(lambda w, b: w, 0)
