"""Context parallelism against the full matrix of scores in float64, on every kind of split."""

from __future__ import annotations

import math

import pytest
import torch

from functron import Mesh, P
from functron.nn.context import context_attention
from functron.nn.zigzag import to_balanced, to_contiguous

BATCH, SEQ, HEADS, DIM = 2, 16, 4, 4
STREAM = P("dp", ("cp", "ulysses"))
MESHES = [Mesh(cp=2), Mesh(cp=4), Mesh(cp=8), Mesh(cp=2, ulysses=2), Mesh(cp=4, ulysses=2)]
KIND = pytest.mark.parametrize("kind", ["ring", "gather"])
BALANCED = pytest.mark.parametrize("balanced", [False, True], ids=["contiguous", "zigzag"])
ON = pytest.mark.parametrize("mesh", MESHES, ids=str)
# boundaries on and off the boundaries of ranks and chunks; a document of one token
SEGMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7 + [3] * 3, [4] * 8 + [5] * 8])
PLACES = torch.tensor([[*range(5), 0, *range(7), *range(3)], [*range(8), *range(8)]])


def formula(window=0, segments=None, scale=None):
    """Every score of every pair; the mask from the places in the sequence and the documents."""

    def dense(q, k, v, sinks=None):
        group = q.shape[2] // k.shape[2]
        rows = []
        for head in range(q.shape[2]):
            keys, values = k[:, :, head // group], v[:, :, head // group]
            scores = torch.einsum("btd,bsd->bts", q[:, :, head], keys)
            scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
            t = torch.arange(q.shape[1])
            distance = t[:, None] - t[None, :]
            seen = distance >= 0
            if window:
                seen = seen & (distance < window)
            seen = seen[None]
            if segments is not None:
                seen = seen & (segments[:, :, None] == segments[:, None, :])
            weights = torch.where(seen, scores.exp(), 0)
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].exp()
            rows.append((weights / total) @ values)
        return torch.stack(rows, 2)

    return dense


def layer(balanced, **options):
    """The program of a rank: from the contiguous order and back to it."""

    def program(q, k, v, *rest):
        rest = list(rest)
        sinks = rest.pop(0) if rest and rest[0].is_floating_point() else None
        segments = rest.pop(0) if rest else None
        if balanced:
            q, k, v = (to_balanced(x, 1) for x in (q, k, v))
            segments = None if segments is None else to_balanced(segments, 1)
        out = context_attention(
            q, k, v, segments=segments, sinks=sinks, balanced=balanced, **options
        )
        return to_contiguous(out, 1) if balanced else out

    return program


@pytest.fixture
def check(agrees, randn):
    def run(
        mesh, *, kv_heads=2, heads=HEADS, value_dim=DIM, window=0, sinks=False, segments=None,
        static=True, seq=SEQ, **options,
    ):  # fmt: skip
        args = [
            randn(BATCH, seq, heads, DIM),
            randn(BATCH, seq, kv_heads, DIM),
            randn(BATCH, seq, kv_heads, value_dim),
        ]
        specs = [STREAM] * 3
        if sinks:
            args.append(randn(heads))
            specs.append(P())
        balanced = options.pop("balanced", False)
        given = window if static else torch.tensor(window)
        program = layer(balanced, window=given, **options)
        dense = formula(window, segments, options.get("scale"))
        others = () if segments is None else (segments,)
        agrees(
            program,
            lambda *x: dense(*[y for y in x if y.is_floating_point()]),
            tuple(args), mesh, tuple(specs), STREAM, others, (STREAM,) * len(others),
        )  # fmt: skip

    return run


@KIND
@BALANCED
@ON
def test_causal(check, mesh, kind, balanced):
    check(mesh, kind=kind, balanced=balanced)


@KIND
@BALANCED
@ON
def test_packed_documents_with_sinks(check, mesh, kind, balanced):
    check(mesh, kind=kind, balanced=balanced, segments=SEGMENTS, sinks=True)


@KIND
@BALANCED
@pytest.mark.parametrize("window", [1, 3, 6, 40])
def test_windows(check, kind, balanced, window):
    check(Mesh(cp=4), kind=kind, balanced=balanced, window=window)


@BALANCED
@ON
def test_window_packed(check, mesh, balanced):
    check(mesh, balanced=balanced, window=4, segments=SEGMENTS, sinks=True)


@pytest.mark.parametrize("window", [0, 3])
def test_a_window_that_is_a_tensor(check, window):
    check(Mesh(cp=4), balanced=True, window=window, static=False)


@KIND
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6, 12])
def test_key_heads_on_four_ranks_of_ulysses(check, kind, kv_heads):
    check(Mesh(ulysses=4), kind=kind, heads=12, kv_heads=kv_heads)
    check(Mesh(cp=2, ulysses=4), kind=kind, heads=12, kv_heads=kv_heads, balanced=True)


def test_ulysses_alone_with_everything(check):
    check(Mesh(ulysses=2), window=5, segments=SEGMENTS, sinks=True)


@pytest.mark.parametrize("value_dim", [2, 6])
def test_values_of_another_width(check, value_dim):
    check(Mesh(cp=4), value_dim=value_dim, scale=0.3)
    check(Mesh(), value_dim=value_dim, scale=0.3)
    check(Mesh(cp=2), value_dim=value_dim, window=3)


def test_one_device(check):
    for options in ({}, {"window": 3}, {"sinks": True}, {"segments": SEGMENTS}):
        check(Mesh(), **options)
        check(Mesh(dp=2), **options)


def test_with_other_axes(check):
    check(Mesh(dp=2, cp=2, tp=2), balanced=True, segments=SEGMENTS)
    check(Mesh(cp=2, ulysses=2, dp=2))
