"""Masked batches: the shares they promise, and the same numbers on every mesh."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P
from functron.apps.zoo.denoising import mask_tokens

VOCAB, MASK = 1000, 999
WAY = {"mask_id": MASK, "vocab_size": VOCAB}


@pytest.fixture
def batch():
    tokens = torch.randint(5, MASK, (64, 256), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "rows": torch.arange(64)}


def test_shares(batch):
    """15 % are chosen; of these 80 % hidden, 10 % any token, 10 % themselves: within 4 deviations."""
    out = mask_tokens(batch, 0, 0, **WAY)
    chosen = out["targets"] != ft.nn.IGNORE_INDEX
    count = chosen.sum().item()
    assert abs(count - 0.15 * chosen.numel()) < 4 * (chosen.numel() * 0.15 * 0.85) ** 0.5
    assert torch.equal(out["targets"][chosen], batch["tokens"][chosen])
    assert torch.equal(out["tokens"][~chosen], batch["tokens"][~chosen])
    now, was = out["tokens"][chosen], batch["tokens"][chosen]
    for share, found in (
        (0.8, now == MASK),
        (0.1, now == was),
        (0.1, (now != was) & (now != MASK)),
    ):
        assert abs(found.sum().item() - share * count) < 4 * (count * share * (1 - share)) ** 0.5
    assert len(now[(now != was) & (now != MASK)].unique()) > 100


def test_special_tokens_and_padding_stay(batch):
    mask = torch.arange(256).expand(64, -1) < 200
    batch["tokens"][:, ::2] = 7
    out = mask_tokens(batch | {"mask": mask}, 0, 0, special=(7,), **WAY)
    chosen = out["targets"] != ft.nn.IGNORE_INDEX
    assert not chosen[:, ::2].any()
    assert not chosen[:, 200:].any()
    assert chosen[:, 1:200:2].any()


def test_seeds_steps_and_rows_differ(batch):
    tokens = {"tokens": batch["tokens"][:1].expand(64, -1), "rows": batch["rows"]}
    first = mask_tokens(tokens, 0, 0, **WAY)["targets"]
    assert len(first.unique(dim=0)) == 64
    for other in (mask_tokens(tokens, 1, 0, **WAY), mask_tokens(tokens, 0, 1, **WAY)):
        assert not torch.equal(other["targets"], first)


@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(dp=2, fsdp=2, tp=2)], ids=str)
def test_every_mesh_masks_the_same(batch, mesh):
    want = mask_tokens(batch, 3, 5, **WAY)
    spec = P(ft.DATA_AXES)
    mapped = ft.shard_map(lambda part: mask_tokens(part, 3, 5, **WAY), mesh, (spec,), spec)
    got = mapped(batch)
    assert all(torch.equal(got[name], want[name]) for name in want)
    some = {name: value[40:44] for name, value in batch.items()}
    assert torch.equal(mask_tokens(some, 3, 5, **WAY)["tokens"], want["tokens"][40:44])


def test_what_cannot_be_is_listed(batch):
    with pytest.raises(ValueError, match=r"rate(.|\n)*mask_id") as error:
        mask_tokens(batch, 0, 0, mask_id=5000, vocab_size=VOCAB, rate=1.5)
    assert "0 to 999" in str(error.value)
    with pytest.raises(ValueError, match="at most 1"):
        mask_tokens(batch, 0, 0, masked=0.95, **WAY)
