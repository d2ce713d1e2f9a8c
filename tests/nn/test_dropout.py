"""Dropout: one mask, JAX's, on every mesh and for every way of cutting the batch."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
import torch

import functron as ft
from functron import DATA_AXES, P, nn, random

BATCH, SEQ, EMBED, RATE, SEED = 8, 8, 6, 0.3, 7
WHOLE = P(DATA_AXES)


def mask(seed=SEED, rate=RATE, shape=(BATCH, SEQ, EMBED)) -> torch.Tensor:
    """True where an element is kept, by jax.random."""
    keep = jax.random.bernoulli(jax.random.key(seed), 1 - rate, shape)
    return torch.from_numpy(np.array(keep))


def drop(x, rows, stream=WHOLE, rate=RATE, seed=SEED):
    return nn.dropout(x, random.key(seed), rate=rate, rows=rows, stream=stream)


def test_every_mesh_and_sequence_split(mesh, stream, agrees, randn):
    agrees(
        lambda x, rows: drop(x, rows, stream),
        lambda x, rows: x * mask() / (1 - RATE),
        (randn(BATCH, SEQ, EMBED),),
        mesh,
        (stream,),
        stream,
        others=(torch.arange(BATCH),),
        other_specs=(P(DATA_AXES),),
    )


@pytest.mark.parametrize("rows", [[0, 1], [5, 6, 7], [3], [6, 0, 3]])
def test_rows_of_a_microbatch(rows):
    at = torch.tensor(rows)
    out = drop(torch.ones(len(rows), SEQ, EMBED), at)
    assert torch.equal(out != 0, mask()[at])


def test_microbatches_on_a_mesh():
    mesh = ft.Mesh(dp=2, tp=2)

    def halves(x, rows):
        parts = [
            drop(part, part_rows, P(DATA_AXES, "tp"))
            for part, part_rows in zip(x.chunk(2), rows.chunk(2), strict=True)
        ]
        return torch.cat(parts)

    specs = (P(DATA_AXES, "tp"), P(DATA_AXES))
    out = ft.shard_map(halves, mesh, specs, P(DATA_AXES, "tp"))(
        torch.ones(BATCH, SEQ, EMBED), torch.arange(BATCH)
    )
    assert torch.equal(out != 0, mask())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_keep_rate(rate):
    shape = (32, 64, 64)
    out = drop(torch.ones(shape), torch.arange(32), rate=rate)
    count = math.prod(shape)
    kept = int((out != 0).sum())
    assert abs(kept - count * (1 - rate)) < 5 * math.sqrt(count * rate * (1 - rate))
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - rate)]))


def test_the_mean_is_kept():
    x = torch.full((64, 64, 64), 3.0)
    out = drop(x, torch.arange(64))
    sigma = 3.0 * math.sqrt(RATE / (1 - RATE) / x.numel())
    assert abs(out.double().mean() - 3.0) < 5 * sigma


def test_other_key_other_mask():
    x, rows = torch.ones(BATCH, SEQ, EMBED), torch.arange(BATCH)
    first, second = drop(x, rows), drop(x, rows, seed=SEED + 1)
    assert torch.equal(second != 0, mask(SEED + 1))
    assert not torch.equal(first, second)


def test_no_dropout(randn):
    x, rows = randn(BATCH, SEQ, EMBED), torch.arange(BATCH)
    assert torch.equal(nn.dropout(x, None, rate=0.5, rows=rows, stream=WHOLE), x)
    assert torch.equal(drop(x, rows, rate=0.0), x)


def test_dropped_elements_are_zero_also_for_infinities():
    x = torch.full((BATCH, SEQ, EMBED), float("inf"))
    out = drop(x, torch.arange(BATCH))
    assert torch.equal(out == 0, ~mask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype_and_mask_do_not_interact(dtype):
    out = drop(torch.ones(BATCH, SEQ, EMBED, dtype=dtype), torch.arange(BATCH))
    assert out.dtype == dtype
    assert torch.equal(out != 0, mask())


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match=f"got rate={rate}; wanted at least 0 and below 1"):
        drop(torch.ones(BATCH, SEQ, EMBED), torch.arange(BATCH), rate=rate)
