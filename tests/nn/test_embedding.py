"""Vocabulary-parallel embedding and learned positions against one-hot products."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, P, nn

VOCAB, EMBED, MAX_SEQ = 16, 6, 12


@pytest.fixture
def tokens():
    drawn = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    drawn[0, 0], drawn[-1, -1] = 0, VOCAB - 1
    drawn[1] = 5  # one row of the table gathers many gradients
    return drawn


def test_embed_tokens(agrees, randn, mesh, stream, tokens):
    agrees(
        lambda table, tokens: nn.embed_tokens(table, tokens, stream=stream),
        lambda table, tokens: F.one_hot(tokens, VOCAB).double() @ table,
        (randn(VOCAB, EMBED),),
        mesh,
        (P("tp"),),
        stream,
        others=(tokens,),
        other_specs=(P(DATA_AXES),),
    )


def test_scaled_embedding(agrees, randn, mesh, stream, tokens):
    agrees(
        lambda table, tokens: nn.embed_tokens(table, tokens, stream=stream, scale=2.5),
        lambda table, tokens: 2.5 * (F.one_hot(tokens, VOCAB).double() @ table),
        (randn(VOCAB, EMBED),),
        mesh,
        (P("tp"),),
        stream,
        others=(tokens,),
        other_specs=(P(DATA_AXES),),
    )


def test_the_scale_is_rounded_to_the_dtype_of_the_table():
    table = torch.randn(VOCAB, EMBED, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.arange(VOCAB)[None]
    out = nn.embed_tokens(table, tokens, stream=P(DATA_AXES), scale=3072**0.5)  # 55.43
    assert torch.equal(out[0], table * torch.tensor(55.5, dtype=torch.bfloat16))


def test_add_positions(agrees, randn, mesh, stream):
    agrees(
        lambda table, x: nn.add_positions(x, table, stream=stream),
        lambda table, x: x + F.one_hot(torch.arange(8), MAX_SEQ).double() @ table,
        (randn(MAX_SEQ, EMBED), randn(4, 8, EMBED)),
        mesh,
        (P(), stream),
        stream,
    )


def test_stream_positions(mesh, stream):
    def positions(x):
        return nn.stream_positions(x, stream) + torch.zeros(x.shape, dtype=torch.int64)

    out = ft.shard_map(positions, mesh, (stream,), stream, check=False)(torch.zeros(8, 8))
    assert out.tolist() == [list(range(8))] * 8
