"""ops.cross_entropy against torch's logsumexp, indexing and cross_entropy."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.nn import functional as F

from functron.ops.cross_entropy import log_sum_exp_and_target

TOKENS, VOCAB, REAL = 6, 7, 5
VALID = torch.arange(VOCAB) < REAL


def data(*lead, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((*lead, TOKENS, VOCAB), generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, REAL, (*lead, TOKENS), generator=generator)


def formula(logits, ids, valid=None):
    """The real columns' logsumexp and the target's logit, by masks instead of indexing."""
    columns = torch.arange(logits.shape[-1])
    picked = torch.where(ids.unsqueeze(-1) == columns, logits, 0.0).sum(-1)
    real = logits if valid is None else logits[..., : int(valid.sum())]
    return real.exp().sum(-1).log(), picked


def scalar(function, ids, valid=None):
    """Nonlinear in both outputs, so that second derivatives see all of them."""

    def value(logits):
        lse, target = function(logits, ids, valid)
        return (lse.square() + (lse * target).sin()).sum()

    return value


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_cross_entropy_of_torch():
    logits, ids = data()
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    lse, target = log_sum_exp_and_target(ours, ids, None)
    close(lse, torch.logsumexp(logits, -1))
    weights = torch.randn(TOKENS, dtype=torch.float64)
    expected = F.cross_entropy(theirs, ids, reduction="none")
    close(lse - target, expected)
    ((lse - target) * weights).sum().backward()
    (expected * weights).sum().backward()
    close(ours.grad, theirs.grad)


def test_separate_cotangents():
    logits, ids = data()
    for picks in ((1.0, 0.0), (0.0, 1.0)):
        value, pullback = vjp(lambda x: log_sum_exp_and_target(x, ids, None), logits)
        seed = tuple(torch.full_like(part, pick) for part, pick in zip(value, picks, strict=True))
        onehot = F.one_hot(ids, VOCAB).double()
        expected = picks[0] * torch.softmax(logits, -1) + picks[1] * onehot
        close(pullback(seed)[0], expected)


def test_padding_columns_take_no_part():
    logits, ids = data()
    logits[:, REAL:] = 50.0  # would dominate the sum
    leaf = logits.clone().requires_grad_()
    lse, target = log_sum_exp_and_target(leaf, ids, VALID)
    close(lse - target, F.cross_entropy(logits[:, :REAL], ids, reduction="none"))
    (lse - target).sum().backward()
    real = logits[:, :REAL].clone().requires_grad_()
    F.cross_entropy(real, ids, reduction="sum").backward()
    close(leaf.grad[:, :REAL], real.grad)
    assert leaf.grad[:, REAL:].eq(0).all()


@pytest.mark.parametrize("outside", [-100, -1, VOCAB, VOCAB + 1000])
def test_ids_of_other_ranks_give_zero(outside):
    logits, ids = data()
    ids[::2] = outside
    leaf = logits.clone().requires_grad_()
    lse, target = log_sum_exp_and_target(leaf, ids, None)
    assert target[::2].eq(0).all()
    close(target[1::2], logits[1::2].gather(1, ids[1::2, None])[:, 0])
    target.sum().backward()
    expected = torch.zeros_like(logits)
    expected[torch.arange(1, TOKENS, 2), ids[1::2]] = 1
    assert torch.equal(leaf.grad, expected)
    close(lse, torch.logsumexp(logits, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shard_without_real_columns(dtype):
    logits, ids = data(dtype=dtype)
    leaf = logits.clone().requires_grad_()
    lse, _ = log_sum_exp_and_target(leaf, ids, torch.zeros(VOCAB, dtype=torch.bool))
    assert lse.isfinite().all()
    top = torch.tensor(3.0, dtype=lse.dtype)  # the largest local logsumexp of the other ranks
    part = (lse - top).exp()
    assert part.eq(0).all()
    part.sum().backward()
    assert leaf.grad.eq(0).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    lse, target = log_sum_exp_and_target(logits, torch.tensor([1]), None)
    assert lse.item() == 1e4
    (lse - target).sum().backward()
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_bfloat16_logits():
    logits, ids = data(dtype=torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    lse, target = log_sum_exp_and_target(leaf, ids, None)
    assert lse.dtype == target.dtype == torch.float32
    reference = logits.double().requires_grad_()
    expected = F.cross_entropy(reference, ids, reduction="none")
    close((lse - target).double(), expected, 1e-6)
    (lse - target).sum().backward()
    expected.sum().backward()
    assert leaf.grad.dtype == torch.bfloat16
    close(leaf.grad.double(), reference.grad, 2**-8)


@pytest.mark.parametrize("valid", [None, VALID], ids=["whole", "padded"])
def test_gradcheck(valid):
    logits, ids = data()
    ids[0] = -100
    logits.requires_grad_()

    def outputs(x):
        return log_sum_exp_and_target(x, ids, valid)

    assert gradcheck(outputs, (logits,), check_forward_ad=True)
    assert gradgradcheck(outputs, (logits,), check_fwd_over_rev=True)


@pytest.mark.parametrize("valid", [None, VALID], ids=["whole", "padded"])
def test_second_derivatives(valid):
    logits, ids = data()
    ids[0] = -100
    expected = hessian(scalar(formula, ids, valid))(logits)
    ours = scalar(log_sum_exp_and_target, ids, valid)
    close(torch.func.jacrev(grad(ours))(logits), expected)
    close(torch.func.jacfwd(grad(ours))(logits), expected)
    close(torch.func.jacrev(torch.func.jacfwd(ours))(logits), expected)


def test_forward_over_forward():
    # torch's rule of Functions would give wrong numbers without a word
    logits, ids = data()
    f, jac = scalar(log_sum_exp_and_target, ids), torch.func.jacfwd
    want = torch.func.jacrev(torch.func.jacrev(f))(logits)
    torch.testing.assert_close(jac(jac(f))(logits), want)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 1), (0, None), (None, 0)])
def test_vmap(in_dims):
    logits, ids = data(3)
    operands = [
        x[0] if dim is None else x.movedim(0, dim)
        for x, dim in zip((logits, ids), in_dims, strict=True)
    ]
    actual = vmap(lambda x, i: log_sum_exp_and_target(x, i, VALID), in_dims)(*operands)
    expected = [
        formula(
            *(
                x if dim is None else x.select(dim, row)
                for x, dim in zip(operands, in_dims, strict=True)
            ),
            VALID,
        )
        for row in range(3)
    ]
    lse, target = (torch.stack(part) for part in zip(*expected, strict=True))
    # an output that no batched operand enters is the same in every row
    close(actual, (lse, target))

    def of(function):
        return lambda x, i: scalar(function, i, VALID)(x)

    expected = vmap(grad(of(formula)), in_dims)(*operands)
    close(vmap(grad(of(log_sum_exp_and_target)), in_dims)(*operands), expected)

    def total(function):
        return lambda x: vmap(of(function), in_dims)(x, operands[1]).square().sum()

    close(grad(total(log_sum_exp_and_target))(operands[0]), grad(total(formula))(operands[0]))


def test_padding_that_varies_over_ranks():
    logits, ids = data(2)
    valid = torch.stack([torch.ones(VOCAB, dtype=torch.bool), VALID])

    def value(x, i, v):
        lse, target = log_sum_exp_and_target(x, i, v)
        return (lse.square() - target).sum()

    actual = vmap(grad(value))(logits, ids, valid)
    for row in range(2):
        reference = logits[row, :, : int(valid[row].sum())].clone().requires_grad_()
        picked = reference.gather(1, ids[row, :, None])[:, 0]
        (torch.logsumexp(reference, -1).square() - picked).sum().backward()
        close(actual[row, :, : reference.shape[1]], reference.grad)
        assert actual[row, :, reference.shape[1] :].eq(0).all()


def test_nested_vmaps_and_hessian_vector_products():
    logits, ids = data(2, 3)
    tangents, _ = data(2, 3, seed=1)

    def products(function):
        def one(x, i, t):
            gradient = grad(scalar(function, i, VALID))
            return vjp(gradient, x)[1](t)[0], jvp(gradient, (x,), (t,))[1]

        return vmap(vmap(one))(logits, ids, tangents)

    reverse, forward = products(formula)
    close(products(log_sum_exp_and_target), (reverse, forward))
    close(forward, reverse)


def test_operands_are_left_as_they_were():
    logits, ids = data()
    before, leaf = logits.clone(), logits.requires_grad_()
    lse, target = log_sum_exp_and_target(leaf, ids, VALID)
    d_lse = torch.ones_like(lse)
    torch.autograd.grad((lse, target), leaf, (d_lse, d_lse))
    assert torch.equal(leaf.detach(), before)
    assert d_lse.eq(1).all()


def test_backward_twice_and_again_differentiated():
    logits, _ = data()
    leaf, ids = logits.requires_grad_(), torch.tensor([0, VOCAB - 1, -1, VOCAB]).repeat(TOKENS)
    ids = ids[:TOKENS]

    def total(x):
        lse, target = log_sum_exp_and_target(x, ids, None)
        return (lse * lse - 3 * target).sum()

    lse = torch.logsumexp(logits.detach(), -1, keepdim=True)
    inside = ((ids >= 0) & (ids < VOCAB)).unsqueeze(-1)
    onehot = F.one_hot(ids.clamp(0, VOCAB - 1), VOCAB).double() * inside
    expected = 2 * lse * torch.softmax(logits.detach(), -1) - 3 * onehot
    value = total(leaf)
    for keep in (True, False):
        close(torch.autograd.grad(value, leaf, retain_graph=keep)[0], expected)
    assert torch.autograd.gradgradcheck(total, (leaf,))
