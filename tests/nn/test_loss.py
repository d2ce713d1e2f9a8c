"""Vocabulary-parallel cross-entropy against torch's, on logits that are whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, Mesh, P, lax, nn
from functron.spmd import collectives

BATCH, SEQ, PADDED = 4, 6, 16
LOGITS = P(DATA_AXES, None, "tp")


@pytest.fixture(params=["", "dp=2", "tp=2", "tp=4", "tp=8", "dp=2,tp=4"])
def mesh(request) -> Mesh:
    return Mesh.parse(request.param)


def targets(vocab, ignored=True):
    drawn = torch.randint(0, vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    drawn[0, 0], drawn[1, 1] = 0, vocab - 1
    if ignored:
        drawn[2] = nn.IGNORE_INDEX
        drawn[3, 2:4] = nn.IGNORE_INDEX
    return drawn


def dense(vocab, z_loss):
    def losses(logits, ids):
        real = logits[..., :vocab]
        loss = F.cross_entropy(
            real.flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="none"
        ).view(ids.shape)
        normaliser = torch.logsumexp(real, -1)
        return loss + torch.where(ids == -100, 0.0, z_loss * normaliser.square())

    return losses


@pytest.mark.pairwise
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [PADDED, 13, 7, 1])
def test_sharded_vocabulary(agrees, randn, mesh, vocab, z_loss):
    logits = 3 * randn(BATCH, SEQ, PADDED)
    logits[..., vocab:] = 40.0  # padding that counted would show
    agrees(
        lambda x, ids: nn.cross_entropy(x, ids, vocab_size=vocab, z_loss=z_loss),
        dense(vocab, z_loss),
        (logits,),
        mesh,
        (LOGITS,),
        P(DATA_AXES),
        others=(targets(vocab),),
        other_specs=(P(DATA_AXES),),
    )


@pytest.mark.parametrize("vocab", [PADDED, 13, 7, 1])
def test_log_softmax(agrees, randn, mesh, vocab):
    """Of real columns torch's; padding is so low that exp is 0, and has no gradient."""
    logits = 3 * randn(BATCH, SEQ, PADDED)
    logits[..., vocab:] = 40.0  # padding that counted would show
    weights = torch.arange(PADDED) < vocab

    def sharded(x, weights):
        y = nn.log_softmax(x, vocab_size=vocab)
        return torch.where(weights, y, y.exp())  # 0 in padding

    def dense(x, weights):
        return F.pad(F.log_softmax(x[..., :vocab], -1), (0, PADDED - vocab))

    agrees(sharded, dense, (logits,), mesh, (LOGITS,), LOGITS, (weights,), (P("tp"),))


def test_log_softmax_of_large_low_precision_logits():
    logits = torch.zeros(1, 2, PADDED, dtype=torch.bfloat16)
    logits[0, 0, 3], logits[0, 1, 12] = 1e4, -1e4
    mapped = ft.shard_map(
        lambda x: nn.log_softmax(x, vocab_size=PADDED - 1), Mesh(tp=4), (LOGITS,), LOGITS
    )
    found = mapped(logits)
    assert found.dtype == torch.float32
    expected = F.log_softmax(logits[..., : PADDED - 1].double(), -1)
    torch.testing.assert_close(found[..., : PADDED - 1].double(), expected, rtol=1e-6, atol=1e-6)
    assert (found[..., PADDED - 1] * 0 == 0).all()


def test_distillation_by_log_softmax(randn):
    """KL(teacher, student), with a sum over padding too, is the dense one, as is its gradient."""
    student, teacher = randn(2, SEQ, PADDED), randn(2, SEQ, PADDED)

    def kl(x, y):
        log_q, log_p = (nn.log_softmax(z, vocab_size=13) for z in (x, y))
        return lax.psum((log_p.exp() * (log_p - log_q)).sum(), ("tp", *DATA_AXES))

    mapped = ft.shard_map(kl, Mesh(dp=2, tp=4), (LOGITS, LOGITS), P())
    got = torch.func.grad_and_value(mapped)(student, teacher)

    def dense(x, y):
        log_q, log_p = (z[..., :13].log_softmax(-1) for z in (x, y))
        return (log_p.exp() * (log_p - log_q)).sum()

    expected = torch.func.grad_and_value(dense)(student, teacher)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_padding_columns_get_no_gradient(randn):
    logits, ids = randn(BATCH, SEQ, PADDED), targets(7)
    mapped = ft.shard_map(
        lambda x, ids: nn.cross_entropy(x, ids, vocab_size=7), Mesh(tp=8), (LOGITS, P()), P()
    )
    grad = torch.func.grad(lambda x: mapped(x, ids).sum())(logits)
    assert grad[..., 7:].eq(0).all()
    assert grad[0, :, :7].ne(0).all()
    assert grad[2].eq(0).all()  # every target ignored


def test_another_ignore_index(randn):
    logits, ids = randn(BATCH, SEQ, PADDED), targets(PADDED, ignored=False)
    ids[0] = 3
    losses = nn.cross_entropy(logits, ids, vocab_size=PADDED, ignore_index=3)
    expected = F.cross_entropy(logits.mT, ids, ignore_index=3, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert losses[0].eq(0).all()


@pytest.mark.parametrize("tp", [1, 4])
def test_large_logits_do_not_overflow(tp):
    logits = torch.zeros(1, 2, PADDED)
    logits[0, 0, 3], logits[0, 1, 12] = 1e4, -1e4
    ids = torch.tensor([[5, 12]])
    mapped = ft.shard_map(
        lambda x: nn.cross_entropy(x, ids, vocab_size=PADDED), Mesh(tp=tp), (LOGITS,), P(DATA_AXES)
    )
    losses, pullback = torch.func.vjp(mapped, logits)
    expected = F.cross_entropy(logits.mT, ids, reduction="none")
    torch.testing.assert_close(losses, expected)
    grad = pullback(torch.ones(1, 2))[0]
    assert grad.isfinite().all()
    torch.testing.assert_close(grad[0, 0, [3, 5]], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16_logits_give_float32_losses(randn, tp):
    logits, ids = (3 * randn(BATCH, SEQ, PADDED)).bfloat16(), targets(13)
    mapped = ft.shard_map(
        lambda x: nn.cross_entropy(x, ids, vocab_size=13), Mesh(tp=tp), (LOGITS,), P(DATA_AXES)
    )
    losses = mapped(logits)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses.double(), dense(13, 0.0)(logits.double(), ids), rtol=1e-6, atol=1e-6
    )


def test_ranks_exchange_three_numbers_per_token(randn, monkeypatch):
    sizes = []

    def recording(name):
        collective = getattr(lax, name)

        def record(x, *args, **kwargs):
            sizes.append((name, x.numel()))
            return collective(x, *args, **kwargs)

        return record

    for name in ("psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"):
        monkeypatch.setattr(collectives, name, recording(name))
    ids = targets(13)
    ft.shard_map(
        lambda x: nn.cross_entropy(x, ids, vocab_size=13, z_loss=0.1),
        Mesh(tp=4),
        (LOGITS,),
        P(DATA_AXES),
    )(randn(BATCH, SEQ, PADDED))
    assert sorted(sizes) == [("pmax", BATCH * SEQ), ("psum", BATCH * SEQ), ("psum", BATCH * SEQ)]
