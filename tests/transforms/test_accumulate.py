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


@pytest.mark.parametrize("mesh", [ft.Mesh(dp=2), ft.Mesh(dp=2, ep=2), ft.Mesh(fsdp=4)], ids=str)
def test_microbatches_are_the_same_samples_on_every_mesh(mesh):
    """A loss that couples those of a microbatch: the square of a sum over them, on all ranks."""
    batch = torch.arange(16.0, dtype=torch.float64).view(16, 1).exp()

    def coupled(_, part):
        return ft.lax.psum(part.sum(), ft.DATA_AXES).square()

    def per_rank(batch):
        return ft.accumulate(coupled, 4)(None, batch)

    want = sum(batch[first::4].sum().square() for first in range(4))
    for traced in (False, True):
        run = ft.shard_map(per_rank, mesh, (ft.P(ft.DATA_AXES),), ft.P())
        run = ft.jit(run) if traced and mesh.size == 4 else run
        torch.testing.assert_close(run(batch), want, rtol=1e-12, atol=0)


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


def test_sums_are_added_in_place_and_nobody_elses_memory_is_written():
    """A function may return what it was given; only what accumulate made itself is overwritten."""
    given, seen = torch.ones(3), []

    def f(params, part):
        out = {"gradient": part.sum(0), "given": params}
        seen.append(out["gradient"])
        return out

    batch = torch.arange(12.0).view(4, 3)
    for dtype in (None, torch.float64):
        seen.clear()
        total = ft.accumulate(f, 4, dtype=dtype)(given, batch)
        assert total["gradient"].tolist() == [18.0, 22.0, 26.0]
        assert total["given"].tolist() == [4.0] * 3
        assert given.tolist() == [1.0] * 3
        for part, row in zip(seen, batch, strict=True):
            assert part.tolist() == row.tolist()


def test_low_precision_summands_are_not_cast_one_by_one(peak_bytes):
    """Of bfloat16 summands in a float32 sum, a microbatch's and the sum are there at a time."""
    size = 1 << 20

    def f(params, part):
        return params + part.sum()  # 2 bytes

    params, batch = torch.ones(size, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16)
    peak = peak_bytes(lambda: ft.accumulate(f, 4, dtype=torch.float32)(params, batch))
    assert peak < (4 + 2) * size * 1.1
