"""kernels/cross_entropy.cu and its op, against formulas in float64."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import DATA_AXES, Mesh, P, nn, ops
from functron.ops import cross_entropy
from functron.ops.cross_entropy import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_BACKWARD_,
    log_sum_exp_and_target,
    logits_cotangent,
)
from tests.kernels.conformance import Case, conform
from tests.kernels.emulator import EmulationError, emulated

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL = ops.use("kernel")
# a statistic is float32, and exponents are rounded before they are taken; a cotangent is rounded
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6},
}


def draw(rows, columns, dtype=torch.float32, seed=0):
    """Logits that end at odd places in memory, ids in and out of range, and cotangents."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    ids = torch.randint(-2, columns + 2, (rows,), generator=generator)
    d_lse, d_target = torch.randn(2, rows, generator=generator)
    return logits, ids, d_lse, d_target


def statistics(logits, ids, count=None):
    """In float64, of the first `count` columns, one row at a time."""
    lse, target = [], []
    for row, (x, i) in enumerate(zip(logits.double(), ids.tolist(), strict=True)):
        real = x if count is None else x[: max(0, int(count.reshape(-1)[row % count.numel()]))]
        lse.append(real.exp().sum().log())
        target.append(x[i] if 0 <= i < len(x) else x.new_zeros(()))
    return torch.stack(lse), torch.stack(target)


def cotangent(d_lse, d_target, logits, ids, count=None):
    """In float64, by the definition of softmax; 0 in rows where nothing counts."""
    x, columns = logits.double(), torch.arange(logits.shape[1])
    limit = torch.tensor(len(columns)) if count is None else count.reshape(-1)
    weights = torch.where(columns < limit.expand(len(x)).unsqueeze(1), x, float("-inf")).exp()
    softmax = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    onehot = (columns == ids.unsqueeze(1)).double()
    return d_lse.double().unsqueeze(1) * softmax + d_target.double().unsqueeze(1) * onehot


def check(logits, ids, d_lse, d_target, count=None):
    lse, target = emulated(cross_entropy._kernel, logits, ids, count)
    wanted = statistics(logits, ids, count)
    assert lse.dtype == target.dtype == torch.float32
    some = wanted[0] > float("-inf")
    torch.testing.assert_close(lse[some].double(), wanted[0][some], **TOLERANCE[torch.float32])
    assert torch.equal(target.double(), wanted[1])
    operands = d_lse, d_target, logits, ids, lse, count
    grad = emulated(cross_entropy._kernel_backward, *operands)
    expected = cotangent(d_lse, d_target, logits, ids, count)
    torch.testing.assert_close(grad.double(), expected, **TOLERANCE[logits.dtype])
    assert grad.dtype == logits.dtype
    assert grad.is_contiguous()
    return lse, grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 33, 1000])
def test_numbers(dtype, columns):
    check(*draw(3, columns, dtype))


def test_columns_beyond_the_reach_of_a_block():
    # more than 512 threads of 8 elements take in one turn, and no whole number of packs
    check(*draw(2, 5027, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_contiguous_and_begin_anywhere(dtype):
    wide, ids, d_lse, d_target = draw(4, 121, dtype)
    for start, stop in ((3, 120), (8, 105)):
        check(wide[:, start:stop], ids, d_lse, d_target)
    check(wide[::2, 1:], ids[::2], d_lse[::2], d_target[::2])
    check(wide[:4].mT.contiguous().mT[:, :30], ids, d_lse, d_target)


@pytest.mark.parametrize("count", [[4], [40], [4, 0, -3, 100], [64]])
def test_padding(count):
    logits, ids, d_lse, d_target = draw(4, 64, torch.bfloat16)
    logits[:, 60:] = 80.0  # that would show
    number = torch.tensor(count)
    number = number[0] if len(count) == 1 else number
    lse, grad = check(logits, ids, d_lse, d_target, number)
    for row in range(4):
        if int(number.reshape(-1)[row % len(count)]) <= 0:
            assert lse[row].isfinite()
            assert (lse[row] - 100).exp() == 0  # beside a rank whose columns count
            others = torch.arange(64) != ids[row]
            assert grad[row][others].eq(0).all()


def test_batch_dims_are_rows():
    logits, ids, d_lse, d_target = draw(6, 40)
    count = torch.tensor([[[7]], [[40]]])
    shape = (2, 1, 3)
    operands = (x.reshape(*shape, *x.shape[1:]) for x in (d_lse, d_target, logits, ids))
    d_lse, d_target, logits, ids = operands
    lse, target = emulated(cross_entropy._kernel, logits, ids, count)
    assert lse.shape == target.shape == ids.shape
    got = emulated(cross_entropy._kernel_backward, d_lse, d_target, logits, ids, lse, count)
    flat = [x.flatten(0, 2) for x in (d_lse, d_target, logits, ids)]
    expected = cotangent(*flat, torch.tensor([7, 7, 7, 40, 40, 40]))
    torch.testing.assert_close(got.flatten(0, 2).double(), expected, **TOLERANCE[torch.float32])


def test_rows_of_infinities():
    logits, ids, d_lse, d_target = draw(3, 70)
    logits[0] = float("-inf")
    logits[1, 1:] = float("-inf")
    logits[2, :64] = float("-inf")
    ids = torch.tensor([-1, 0, 65])
    lse, grad = check(logits, ids, d_lse, d_target)
    assert lse[0] == float("-inf")
    assert lse[1] == logits[1, 0]
    assert grad[0].eq(0).all()
    assert not grad.isnan().any()


def test_what_is_not_a_number_shows():
    logits, ids, *_ = draw(3, 70)
    logits[0, 69], logits[1, 3], logits[2] = float("nan"), float("inf"), float("nan")
    lse, _ = emulated(cross_entropy._kernel, logits, ids, None)
    assert lse[[0, 2]].isnan().all()
    assert lse[1] == float("inf")


def test_large_logits():
    logits, ids, d_lse, d_target = draw(2, 300)
    logits[:, 7] = 300.0
    lse, _ = emulated(cross_entropy._kernel, 1000 * logits, ids, None)
    assert lse.eq(3e5).all()
    check(20 * logits.clamp(-20, 20), ids, d_lse, d_target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place(dtype):
    logits, ids, d_lse, d_target = draw(3, 77, dtype)
    count = torch.tensor(70)
    lse, _ = emulated(cross_entropy._kernel, logits, ids, count)
    operands = d_lse, d_target, logits, ids, lse, count
    wanted = emulated(cross_entropy._kernel_backward, *operands)

    def overwritten(launch):
        mine = logits.clone()
        cross_entropy._kernel_backward_(launch, d_lse, d_target, mine, ids, lse, count)
        return (mine,)

    assert torch.equal(emulated(overwritten)[0], wanted)
    for kernels in (ops.use(), KERNEL):
        mine = logits.clone()
        got = logits_cotangent(
            d_lse, d_target, mine, ids, lse, count, overwrite=True, kernels=kernels
        )
        assert got.data_ptr() == mine.data_ptr()
        expected = cotangent(d_lse, d_target, logits, ids, count)
        torch.testing.assert_close(got.double(), expected, **TOLERANCE[dtype])


def test_ignored_tokens_are_not_read():
    logits, ids, d_lse, d_target = draw(2, 33)
    lse, _ = emulated(cross_entropy._kernel, logits, ids, None)
    d_lse[0] = d_target[0] = 0
    logits[0] = float("nan")
    got = emulated(cross_entropy._kernel_backward, d_lse, d_target, logits, ids, lse, None)
    assert got[0].eq(0).all()


def test_no_tokens():
    logits, ids, d_lse, d_target = draw(0, 9)
    lse, target = emulated(cross_entropy._kernel, logits, ids, None)
    assert lse.shape == target.shape == (0,)
    got = emulated(cross_entropy._kernel_backward, d_lse, d_target, logits, ids, lse, None)
    assert got.shape == (0, 9)


def test_bad_operands_are_refused():
    logits, ids, d_lse, d_target = draw(2, 8)
    with pytest.raises(ValueError, match="int64 ids"):
        emulated(cross_entropy._kernel, logits, ids.int(), None)
    with pytest.raises(ValueError, match="got ids of shape"):
        emulated(cross_entropy._kernel, logits, ids[:1], None)
    with pytest.raises(ValueError, match="0 columns"):
        emulated(cross_entropy._kernel, logits[:, :0], ids, None)
    with pytest.raises(TypeError, match=r'ops\.use\("reference"\)'):
        emulated(cross_entropy._kernel, logits.double(), ids, None)
    with pytest.raises(ValueError, match="contiguous"):
        emulated(cross_entropy._kernel_backward_, d_lse, d_target, logits[:, ::2], ids, d_lse, None)
    with pytest.raises(ValueError, match="as optim's step_ does"):
        torch.func.vmap(lambda x: CROSS_ENTROPY_BACKWARD_(d_lse, d_target, x, ids, d_lse, None))(
            torch.stack([logits, logits])
        )


COUNT = torch.tensor(5)
X = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IDS = torch.tensor([0, 6, -1, 3])
LSE = X[:, :5].logsumexp(-1)
D = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def plain(logits, ids, count):
    picked = torch.where(ids.unsqueeze(-1) == torch.arange(7), logits, 0.0).sum(-1)
    return logits[..., :5].exp().sum(-1).log(), picked


def plain_backward(d_lse, d_target, logits, ids, lse, count):
    columns = torch.arange(7)
    share = (logits - lse.unsqueeze(-1)).exp() * d_lse.unsqueeze(-1)
    onehot = torch.where(ids.unsqueeze(-1) == columns, d_target.unsqueeze(-1), 0.0)
    return torch.where(columns < 5, share, 0.0) + onehot


CASES = [
    Case(CROSS_ENTROPY, plain, (X, IDS, COUNT)),
    Case(CROSS_ENTROPY_BACKWARD, plain_backward, (*D, X, IDS, LSE, COUNT), moving=(0, 1, 2, 4)),
]


@conform(CASES)
def test_conformance(case, check):
    check(case)


def test_numbers_of_columns_that_vary_over_ranks():
    logits, ids = torch.stack([X, 2 * X, -X]), torch.stack([IDS, IDS, IDS.flip(0)])
    count = torch.tensor([5, 0, 9])

    def both(x, i, n):
        def total(x):
            lse, target = log_sum_exp_and_target(x, i, n, kernels=KERNEL)
            return (lse.clamp(min=-1e3).square() - target).sum(), (lse, target)

        return torch.func.grad(total, has_aux=True)(x)

    grads, (lse, target) = torch.func.vmap(both)(logits, ids, count)
    flat = logits.flatten(0, 1), ids.flatten()
    counts = count.repeat_interleave(4)
    wanted_lse, wanted_target = statistics(*flat, counts)
    some = wanted_lse > float("-inf")
    torch.testing.assert_close(lse.flatten()[some], wanted_lse[some])
    torch.testing.assert_close(target.flatten(), wanted_target)
    wanted = cotangent(2 * wanted_lse.clamp(min=-1e3), -torch.ones(12), *flat, counts)
    torch.testing.assert_close(grads.flatten(0, 1), wanted)


@pytest.mark.parametrize("mesh", ["", "tp=4", "dp=2,tp=2", "tp=8"])
@pytest.mark.parametrize("vocab", [16, 9])
def test_on_meshes(mesh, vocab):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2, 3, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (2, 3), generator=generator)
    targets[0, 1] = nn.IGNORE_INDEX

    def losses(x, ids):
        return nn.cross_entropy(x, ids, vocab_size=vocab, z_loss=0.1, kernels=KERNEL)

    specs = (P(DATA_AXES, None, "tp"), P(DATA_AXES))
    mapped = ft.shard_map(losses, Mesh.parse(mesh), specs, P(DATA_AXES))
    got, pull = torch.func.vjp(lambda x: mapped(x, targets), logits)

    def dense(x):
        lse = x[..., :vocab].exp().sum(-1).log()
        picked = x.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(targets == nn.IGNORE_INDEX, 0.0, lse - picked + 0.1 * lse.square())

    wanted, pull_dense = torch.func.vjp(dense, logits)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    given = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(pull(given)[0], pull_dense(given)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ignored", [None, -100])
def test_ids_are_asserted_by_one_launch(ignored):
    """Of any number of them; the kernel refuses what the checks of numbers refuse."""

    def check(launch, ids):
        cross_entropy._check_kernel(launch, ids, 40, ignored)
        return ids

    many = torch.arange(40).repeat(100)
    for good in (many, many[:1], many.int().view(2, -1), many[:0]):
        emulated(check, good)
    if ignored is not None:
        emulated(check, torch.where(many == 7, ignored, many))
    for bad in (-1, 40, 2**40, -(2**40), -100 if ignored is None else -99):
        ids = many.clone()
        ids[3990] = bad
        with pytest.raises(EmulationError, match="are in the vocabulary"):
            emulated(check, ids)
