"""Multi-token prediction against the formulas of DeepSeek-V3's paper, on every kind of split."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import DATA_AXES, Mesh, P, lax, nn
from functron.nn.context import context_attention
from functron.nn.multi_token import ahead, merge, multi_token, multi_token_defs, shifted
from functron.spmd.params import Normal, ParamDef

BATCH, SEQ, EMBED, VOCAB, HEADS, HEAD_DIM, DEPTHS = 4, 16, 6, 12, 4, 3, 2
CONTEXT = ("cp", "ulysses")
STREAMS = {"": P(DATA_AXES, CONTEXT), "sp": P(DATA_AXES, (*CONTEXT, "tp"))}
ATTENTION = nn.AttentionConfig(embed_dim=EMBED, num_heads=HEADS, head_dim=HEAD_DIM)
EPS = 1e-3
NORM = functools.partial(nn.norm, eps=EPS)


def zigzag(cp: int) -> torch.Tensor:
    """Which place of the sequence is at which place of what the ranks hold, one after the other."""
    chunks = torch.arange(SEQ).chunk(2 * cp)
    return torch.cat([c for r in range(cp) for c in (chunks[r], chunks[2 * cp - 1 - r])])


def batch(packed: bool):
    """Tokens, targets of which some do not count, and documents."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(BATCH, SEQ, generator=generator) < 0.2] = nn.IGNORE_INDEX
    segments = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    if packed:
        lengths = [(5, 1, 7, 3), (16,), (1, 1, 14), (8, 8)]
        for row, each in enumerate(lengths):
            segments[row] = torch.repeat_interleave(torch.arange(len(each)) + 3, torch.tensor(each))
    return tokens[:, :-1].contiguous(), targets, segments


def defs() -> dict:
    def matrix(shape, axes):
        return ParamDef(shape, axes, Normal(1.0), torch.float64)

    one = {"stddev": 1.0, "dtype": torch.float64}
    return {
        "embed": matrix((VOCAB, EMBED), ("vocab", "embed")),
        "unembed": matrix((EMBED, VOCAB), ("embed", "vocab")),
        "modules": [multi_token_defs(EMBED, **one) for _ in range(DEPTHS)],
        "blocks": [nn.attention_defs(ATTENTION, out_stddev=1.0, **one) for _ in range(DEPTHS)],
    }


def attention(params, x, segments):
    """Causal attention within documents, head by head."""
    total = x
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
    hidden = hidden | (segments[:, :, None] != segments[:, None, :])
    for head in range(HEADS):
        q, k, v = (x @ params[n]["w"][:, head] for n in "qkv")
        scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(hidden, -math.inf)
        total = total + torch.softmax(scores, -1) @ v @ params["out"]["w"][head]
    return total


def dense(params, x, tokens, targets, segments):
    """Equations 21 to 23, token by token; what has no token to go on with goes on with zeros."""

    def normalise(p, x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * p["scale"]

    sums = []
    for k in range(1, DEPTHS + 1):
        module, rows, wanted = params["modules"][k - 1], [], {}
        for b in range(BATCH):
            row = []
            for i in range(SEQ):
                goes_on = i + k < SEQ and segments[b, i + k] == segments[b, i]
                row.append(params["embed"][tokens[b, i + k]] if goes_on else x.new_zeros(EMBED))
                if goes_on and targets[b, i + k] != nn.IGNORE_INDEX:
                    wanted[b, i] = int(targets[b, i + k])
            rows.append(torch.stack(row))
        both = (
            normalise(module["embed_norm"], torch.stack(rows)),
            normalise(module["stream_norm"], x),
        )
        x = attention(params["blocks"][k - 1], torch.cat(both, -1) @ module["proj"]["w"], segments)
        logs = torch.log_softmax(normalise(module["norm"], x) @ params["unembed"], -1)
        sums.append(-sum(logs[b, i, t] for (b, i), t in wanted.items()))
    return torch.stack(sums)


def predict(params, x, tokens, targets, segments, *, stream, order, **options):
    """The layer of a rank."""
    core = functools.partial(context_attention, segments=segments, balanced=order == "zigzag")

    def block(depth, x, given, wanted):
        y = nn.self_attention(
            params["blocks"][depth], x, ATTENTION, rope=None, stream=stream, core=core
        )
        return x + y, (given, wanted)

    def head(x, wanted):
        logits = nn.column_parallel(nn.gather_sequence(x, stream), params["unembed"])
        return nn.cross_entropy(logits, wanted, vocab_size=VOCAB)

    return multi_token(
        params["modules"], x, tokens, targets,
        embed=lambda t: nn.embed_tokens(params["embed"], t, stream=stream),
        block=block, head=head, norm=NORM, order=order, segments=segments, **options,
    )  # fmt: skip


MESHES = [
    Mesh(), Mesh(dp=2), Mesh(tp=2), Mesh(cp=2), Mesh(ulysses=2), Mesh(cp=4), Mesh(cp=2, ulysses=2),
    Mesh(dp=2, cp=2, tp=2), Mesh(ep=2, ulysses=2, tp=2), Mesh(cp=2, ulysses=2, tp=2),
]  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_gradient(agrees, draw, specs, randn, mesh, stream, order, packed):
    if stream == "sp" and mesh["tp"] == 1:
        pytest.skip("the same without tp")
    stream, model = STREAMS[stream], defs()
    place = zigzag(mesh["cp"]) if order == "zigzag" else torch.arange(SEQ)
    data = batch(packed)
    arranged = tuple(each[:, place] for each in data)

    def layer(params, x, tokens, targets, segments):
        segments = segments if packed else None
        found = predict(params, x, tokens, targets, segments, stream=stream, order=order)
        return lax.psum(found.losses, (*DATA_AXES, *CONTEXT))

    def formula(params, x, *_):
        return dense(params, x[:, place.argsort()], *data)

    agrees(
        layer, formula, (draw(model), randn(BATCH, SEQ, EMBED)), mesh, (specs(model), stream), P(),
        arranged, (P(DATA_AXES, CONTEXT),) * 3,
    )  # fmt: skip


def test_the_objective_of_the_paper(draw, randn):
    """Equations 24 and 25, of whole sequences: lambda / D sum_k -1/T sum log P, mean over samples."""
    params, x = draw(defs()), randn(BATCH, SEQ, EMBED)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    found = predict(
        params, x, tokens[:, :-1], tokens[:, 1:], None, stream=STREAMS[""], order="contiguous"
    )
    ours = 0.3 * found.losses.mean() / (BATCH * SEQ)  # the number of ordinary targets

    def normalise(p, x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * p["scale"]

    paper = 0
    for b in range(BATCH):
        h, t = x[b], [int(token) for token in tokens[b]]  # t[i - 1] is the paper's t_i
        for k in range(1, DEPTHS + 1):
            module = params["modules"][k - 1]
            ahead_of = torch.stack([params["embed"][t[i + k - 1]] for i in range(1, SEQ - k + 1)])
            both = [normalise(module["embed_norm"], ahead_of)]
            both.append(normalise(module["stream_norm"], h[: SEQ - k]))
            h = torch.cat(both, -1) @ module["proj"]["w"]
            h = attention(params["blocks"][k - 1], h[None], torch.zeros(1, len(h)))[0]
            logs = torch.log_softmax(normalise(module["norm"], h) @ params["unembed"], -1)
            loss = -sum(logs[i - k - 2, t[i - 1]] for i in range(2 + k, SEQ + 2)) / SEQ
            paper = paper + 0.3 / DEPTHS * loss / BATCH
    torch.testing.assert_close(ours, paper, rtol=1e-12, atol=0)


def test_blocks_are_told_what_they_predict(draw, randn):
    params, x, (tokens, targets, segments) = draw(defs()), randn(BATCH, SEQ, EMBED), batch(True)
    how = {"stream": STREAMS[""], "order": "contiguous"}
    found = predict(params, x, tokens, targets, segments, **how)
    assert found.losses.shape == (DEPTHS,)
    for depth, told in enumerate(found.aux):
        want = ahead(tokens, targets, depth + 1, segments=segments)
        assert all(map(torch.equal, told, want))
    # what is never reached takes no part, whatever its token
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB  # a document of one token
    assert torch.equal(predict(params, x, changed, targets, segments, **how).losses, found.losses)


def test_merge(draw, randn):
    (module, *_), e, x = draw(defs())["modules"], randn(2, 3, EMBED), randn(2, 3, EMBED)

    def normalise(p, x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + p["scale"])

    w = module["proj"]["w"]
    want = normalise(module["embed_norm"], e) @ w[:EMBED]
    want = want + normalise(module["stream_norm"], x) @ w[EMBED:]
    got = merge(module, e, x, norm=functools.partial(NORM, zero_centered=True))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# --- shifting


@st.composite
def shifts(draw):
    cp, ulysses = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    seq = 2 * cp * ulysses * draw(st.integers(1, 3))
    order = draw(st.sampled_from(["contiguous", "zigzag", "balanced"]))
    by, packed = draw(st.integers(0, seq + 2)), draw(st.booleans())
    return Mesh(cp=cp, ulysses=ulysses), seq, order, by, packed, draw(st.integers(0, 10))


@given(shifts())
def test_shifted(case):
    """Number by number; "balanced" with samples in any order, each in another."""
    mesh, seq, order, by, packed, seed = case
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 50, (2, 3, seq), generator=generator)
    segments = torch.rand(3, seq, generator=generator).lt(0.3).cumsum(1) if packed else None
    documents = torch.zeros(3, seq, dtype=torch.int64) if segments is None else segments
    positions = torch.stack(
        [torch.tensor([int((row[:i] == row[i]).sum()) for i in range(seq)]) for row in documents]
    )
    want = torch.full_like(x, -7)
    for row in range(3):
        for i in range(seq - by):
            if documents[row, i] == documents[row, i + by]:
                want[:, row, i] = x[:, row, i + by]

    if order == "balanced":
        place = torch.stack([torch.randperm(seq, generator=generator) for _ in range(3)])
    elif order == "zigzag":
        chunks, cp = torch.arange(seq).chunk(2 * mesh["cp"]), mesh["cp"]
        place = torch.cat([c for r in range(cp) for c in (chunks[r], chunks[2 * cp - 1 - r])])
        place = place.expand(3, seq)
    else:
        place = torch.arange(seq).expand(3, seq)

    def arranged(value):
        return value.gather(-1, place.expand_as(value))

    def program(x, segments, positions):
        segments = segments if packed else None
        return shifted(x, by, fill=-7, order=order, segments=segments, positions=positions)

    last = P(None, CONTEXT)
    mapped = ft.shard_map(
        program, mesh, (P(None, None, CONTEXT), last, last), P(None, None, CONTEXT)
    )
    args = (arranged(x), arranged(documents), arranged(positions))
    assert torch.equal(mapped(*args), arranged(want))
    if seed == 0:
        assert torch.equal(ft.trace(mapped)(*args)(*args), arranged(want))


def test_examples():
    def run(x, order):
        f = ft.shard_map(
            lambda x: shifted(x, 1, fill=9, order=order), Mesh(cp=2), (P("cp"),), P("cp")
        )
        return f(torch.tensor(x)).tolist()

    assert run([0, 1, 2, 3], "contiguous") == [1, 2, 3, 9]
    assert run([0, 3, 1, 2], "zigzag") == [1, 9, 2, 3]


def test_ahead_ends_with_the_sample():
    tokens = torch.tensor([[3, 0, 5, 6]])
    targets = torch.tensor([[0, 5, nn.IGNORE_INDEX, 7]])
    given, wanted = ahead(tokens, targets, 1)
    assert given.tolist() == [[0, 5, 6, 0]]
    assert wanted.tolist() == [[5, nn.IGNORE_INDEX, 7, nn.IGNORE_INDEX]]


def test_one_gather_of_integers():
    """Of tokens, targets and segments together."""
    mesh = Mesh(cp=2, ulysses=2)
    spec = P(None, CONTEXT)

    def program(tokens, targets, segments):
        return ahead(tokens, targets, 1, order="zigzag", segments=segments)

    mapped = ft.shard_map(program, mesh, (spec,) * 3, (spec, spec))
    rows = ft.trace(mapped)(*batch(True)).cost().collectives
    assert {row.op for row in rows} == {"all_gather"}
    assert sum(row.sent_bytes for row in rows) <= 8 * 3 * BATCH * SEQ


def test_taught():
    x = torch.arange(4)[None]
    with pytest.raises(ValueError, match="cannot shift a sequence") as caught:
        shifted(x, -1, fill=0, order="balanced")
    assert "by: got -1; wanted at least 0" in str(caught.value)
    assert "positions: got None; wanted each token's" in str(caught.value)
