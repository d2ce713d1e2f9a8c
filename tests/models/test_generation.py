"""Generation with a cache against reading everything again, on every mesh."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, nn, random
from functron.models import generation
from functron.models import generation as sample
from functron.nn.moe import MoEConfig

BASE = gpt.GPTConfig(
    vocab_size=37,
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    max_seq=16,
    vocab_multiple=8,
    init_stddev=0.4,
    dtype="float64",
)
CONFIGS = {
    "grouped": BASE,
    "one key head": replace(BASE, num_kv_heads=1, tied=True),
    "learned positions": replace(BASE, positions="learned", norm="layer", bias=True, gated=False),
    "window": replace(BASE, window=3, rope_scaling=nn.RopeScaling(4.0, kind="linear")),
    "some windows and sinks": replace(BASE, window=3, global_every=2, sinks=True),
    "capped, with norms around": replace(
        BASE, window=3, global_every=2, score_cap=2.0, logit_cap=3.0, sublayer_norms="both",
        attention_scale=0.8, local_rope_theta=50.0,
    ),
    "norms after, and across heads": replace(
        BASE, sublayer_norms="after", qk_norm=True, qk_norm_across=True, rope_fraction=0.5,
        attention_gate=True,
        nope_every=2,
    ),
    "norms without scales, clipped": replace(BASE, norm="bare_layer", qkv_clip=0.7),
    "neighbouring pairs": replace(
        BASE, head_dim=6, rope_pairs="neighbours", rope_fraction=0.7, qkv_bias=True,
        sublayer_norms="both",
    ),
    "sections": replace(BASE, head_dim=8, rope_sections=(1, 1, 2), rope_pairs="neighbours"),
    "latent": replace(
        BASE, kv_rank=8, q_rank=8, rope_head_dim=4, v_head_dim=6, num_kv_heads=4, head_dim=4
    ),
    "parallel": replace(
        BASE, parallel_residual=True, sublayer_norms="shared", residual_scale=0.5, logit_scale=2.0,
    ),
    "temperatures": replace(
        BASE, temperature=0.7, temperature_seq=3, qk_norm=True, qk_norm_last=True,
        norm="scaled_layer", activation="xielu", gated=False, unembed_bias=True,
    ),
    "experts": replace(BASE, moe=MoEConfig(4, 2, 12), dense_layers=1),
    "fused": replace(BASE, num_heads=8, num_kv_heads=4, qk_norm=True, fused_projections=True),
}  # fmt: skip
MESHES = ["", "tp=2", "dp=2,tp=2", "fsdp=2", "tp=4"]
PROMPT, NEW = 5, 4


def factors(name, mesh):
    """Each config; each kind of heads on one rank, and over ranks; and each mesh."""
    config = CONFIGS[name]
    kind = config.num_kv_heads, config.kv_rank > 0, config.moe is not None, config.sinks
    return [{"name": name}, {"kind": kind, "tp": "tp=" in mesh}, {"mesh": mesh}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(
    ("name", "mesh"), [*itertools.product(CONFIGS, MESHES), ("experts", "ep=2,tp=2")]
)
def test_logits_are_those_of_forward(name, mesh):
    config = CONFIGS[name]
    weights = ft.init_params(random.key(0), gpt.defs(config))
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 37, (4, PROMPT + NEW), generator=drawn)
    whole = gpt.forward(config, weights, tokens)[..., : config.vocab_size]
    rows, lengths = torch.arange(4), torch.tensor([4, 2, 5, 1])
    start, step = sample.cached(config, Mesh.parse(mesh), PROMPT + NEW)
    logits, cache = start(weights, tokens[:, :PROMPT], lengths)
    for ahead in range(NEW + 1):
        wanted = whole[rows, lengths + ahead - 1]
        torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-10)
        if ahead < NEW:
            places = lengths + ahead
            logits, cache = step(weights, cache, tokens[rows, places], places)


@pytest.mark.parametrize(
    "mesh", ["dp=2", pytest.param("tp=2", marks=pytest.mark.full), "fsdp=2,tp=2"]
)
def test_draws_are_the_same_on_every_mesh(mesh):
    weights = ft.init_params(random.key(0), gpt.defs(BASE))
    tokens = torch.randint(0, 37, (4, 3), generator=torch.Generator().manual_seed(2))
    options = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "key": random.key(5)}
    dense = ft.generate(weights, BASE, tokens, 8, **options)
    assert torch.equal(
        ft.generate(weights, BASE, tokens, 8, mesh=Mesh.parse(mesh), **options), dense
    )


@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.full), "fsdp=2,tp=2"])
def test_a_mesh_goes_on_beyond_the_context(mesh):
    weights = ft.init_params(random.key(0), gpt.defs(BASE))
    tokens = torch.randint(0, 37, (2, 11), generator=torch.Generator().manual_seed(2))
    options = {"temperature": 1.5, "key": random.key(5)}
    wanted = ft.generate(weights, BASE, tokens, 9, **options)
    assert torch.equal(
        ft.generate(weights, BASE, tokens, 9, mesh=Mesh.parse(mesh), **options), wanted
    )


def test_prompts_of_different_lengths_do_not_mix():
    weights = ft.init_params(random.key(0), gpt.defs(BASE))
    tokens = torch.randint(0, 37, (3, 6), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([6, 1, 3])
    out = ft.generate(weights, BASE, tokens, 4, lengths=lengths, temperature=0)
    assert out.shape == (3, 10)
    for row, length in enumerate(lengths.tolist()):
        alone = ft.generate(weights, BASE, tokens[row : row + 1, :length], 4, temperature=0)
        assert torch.equal(out[row, : length + 4], alone[0])
        assert set(out[row, length + 4 :].tolist()) <= {int(alone[0, -1])}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (7, 0.5), (1, 1e-9)])
def test_filters_are_those_of_transformers(top_k, top_p):
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 37, generator=torch.Generator().manual_seed(4)) * 3
    wanted = logits
    if top_k:
        wanted = TopKLogitsWarper(top_k)(torch.zeros(50, 1, dtype=torch.int64), wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(torch.zeros(50, 1, dtype=torch.int64), wanted)
    assert torch.equal(sample.Draw(1.0, top_k, top_p).filtered(logits), wanted)


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (replace(BASE, moe=MoEConfig(4, 2, 12, capacity_factor=1.0)), "", "compete for experts"),
        (BASE, "cp=2", "mesh: got cp=2; wanted data, expert and tensor-parallel axes"),
        (BASE, "pp=2", "mesh: got pp=2"),
    ],
)
def test_what_has_no_cache(config, mesh, message):
    with pytest.raises(ValueError, match=message):
        generation.check(config, Mesh.parse(mesh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p: got 0.0; wanted above 0"),
        ({"top_k": -1}, "top_k: got -1"),
        (
            {"lengths": torch.tensor([0, 3])},
            r"lengths: got \[0, 3\]; wanted one per row, from 1 to 3",
        ),
        (
            {"num_tokens": 99, "lengths": torch.tensor([1, 3])},
            "num_tokens: got 102 tokens in all; wanted at most max_seq=16 with lengths",
        ),
        ({"logits": gpt.forward, "mesh": Mesh(tp=2)}, "logits: got a function; wanted None"),
    ],
)
def test_errors(options, message):
    weights = ft.init_params(random.key(0), gpt.defs(BASE))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    given = {"num_tokens": 2, "key": random.key(0), **options}
    with pytest.raises(ValueError, match=message):
        ft.generate(weights, BASE, tokens, given.pop("num_tokens"), **given)
