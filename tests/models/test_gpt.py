"""The decoder's configs, rules, presets and FLOP count; its numbers are in test_hugging_face.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jaxtyping
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import functron as ft
from functron import DATA_AXES, Mesh, P, gpt, nn, random, tree

SMALL = gpt.GPTConfig(
    vocab_size=13,
    num_layers=2,
    embed_dim=8,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=12,
    max_seq=8,
    vocab_multiple=4,
    init_stddev=0.3,
    dtype="float64",
)
GPT2 = replace(
    SMALL, num_kv_heads=0, norm="layer", activation="gelu_tanh", gated=False, bias=True,
    positions="learned", tied=True,
)  # fmt: skip


@pytest.fixture
def unchecked():
    """Without the checks of annotations, which only tests have: what a user's typo meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def weights_of(config, seed=0):
    return ft.init_params(random.key(seed), gpt.defs(config))


def tokens_of(config, batch=4, seq=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (batch, seq), generator=generator)


# Configs


@pytest.mark.usefixtures("unchecked")
def test_every_problem_of_a_config_is_listed():
    with pytest.raises(ValueError, match="invalid GPTConfig") as caught:
        gpt.GPTConfig(
            vocab_size=0, num_layers=-1, vocab_multiple=0, head_dim=-2, norm="rmsnorm",
            activation="swish", positions="rotary", dtype="fp32", dropout=1.0,
        )  # fmt: skip
    for name in (
        "vocab_size: got 0", "num_layers: got -1", "vocab_multiple: got 0", "head_dim", "norm: got",
        "activation: got 'swish'", "positions: got 'rotary'", "dtype: got 'fp32'", "dropout: got 1.0",
    ):  # fmt: skip
        assert f"\n  - {name}" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 9


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "embed_dim: got 8; wanted a multiple of num_heads=3"),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3; wanted a divisor of 4"),
        ({"num_kv_heads": 8}, "num_kv_heads: got 8; wanted a divisor of 4"),
        ({"head_dim": 3}, "head_dim: got 3 rotated dims; wanted an even number, for rope"),
        ({"dropout": -0.1}, r"dropout: got -0\.1; wanted at least 0 and below 1"),
        ({"max_seq": 0}, "max_seq: got 0; wanted at least 1"),
        ({"embed_scale": 0.0}, r"embed_scale: got 0\.0; wanted a positive number"),
        ({"embed_scale": float("nan")}, "embed_scale: got nan"),
        ({"activation": "silo"}, "activation: got 'silo'.*did you mean 'silu'"),
        ({"dtype": "float8"}, "dtype: got 'float8'"),
    ],
)
def test_problems_of_a_config(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_misfits_are_listed_together():
    with pytest.raises(ValueError, match="embed_dim") as caught:
        replace(SMALL, num_heads=3, num_kv_heads=2, dropout=2.0)
    assert str(caught.value).count("\n  - ") == 3


def test_derived_sizes():
    assert (SMALL.kv_heads, SMALL.head_size) == (2, 2)
    assert replace(SMALL, num_kv_heads=0).kv_heads == 4
    assert replace(SMALL, head_dim=6).head_size == 6
    assert replace(SMALL, head_dim=3, positions="none").head_size == 3  # only rope needs pairs
    assert [replace(SMALL, vocab_size=v).padded_vocab for v in (12, 13, 16, 17)] == [12, 16, 16, 20]


# Defs and presets


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (SMALL, {"unembed"}),
        (replace(SMALL, tied=True), set()),
        (GPT2, {"positions"}),
        (replace(GPT2, tied=False), {"positions", "unembed"}),
    ],
)
def test_defs(config, extra):
    defs = gpt.defs(config)
    assert set(defs) == {"embed", "blocks", "norm"} | extra
    assert {d.shape[0] for d in tree.leaves(defs["blocks"])} == {2}
    assert {d.axes[0] for d in tree.leaves(defs["blocks"])} == {"layers"}
    assert {d.dtype for d in tree.leaves(defs)} == {torch.float64}


def test_biases_on_queries_keys_and_values_alone():
    attention = gpt.defs(replace(SMALL, qkv_bias=True))["blocks"]["attention"]
    assert {name for name in attention if "b" in attention[name]} == {"q", "k", "v"}
    everything = gpt.defs(replace(SMALL, bias=True))
    assert tree.paths(gpt.defs(replace(SMALL, bias=True, qkv_bias=True))) == tree.paths(everything)


def test_zero_centered_norms_are_the_same_model_at_first():
    """Scales of 0 that 1 is added to: of the stream's norms and of those of queries and keys."""
    tokens = tokens_of(SMALL)
    plain, centered = (
        replace(SMALL, qk_norm=True, zero_centered_norm=flag) for flag in (False, True)
    )
    scales = [w for path, w in zip(tree.paths(weights_of(centered)), tree.leaves(weights_of(centered)), strict=True)
              if path.endswith("scale")]  # fmt: skip
    assert len(scales) == 5
    assert all(scale.eq(0).all() for scale in scales)
    out, expected = (gpt.forward(c, weights_of(c), tokens) for c in (centered, plain))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_projections_into_the_stream_start_smaller():
    blocks = gpt.defs(SMALL)["blocks"]
    assert blocks["mlp"]["up"]["w"].init.stddev == 0.3
    for d in (blocks["mlp"]["down"]["w"], blocks["attention"]["out"]["w"]):
        assert d.init.stddev == pytest.approx(0.3 / (2 * 2) ** 0.5)


def test_presets():
    assert {
        "tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b",
        "llama3-tiny", "llama3-8b", "llama3-70b", "llama3-405b",
    } <= set(gpt.PRESETS)  # fmt: skip
    assert len(gpt.PRESETS) == len(list(gpt.PRESETS))
    for name, config in gpt.PRESETS.items():
        assert ft.num_params(gpt.defs(config)) > 0
        assert gpt.rules(config, Mesh(dp=4, tp=2 if name != "gpt2-xl" else 1))["mlp"] == "tp"


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'llama3-8b'"):
        gpt.PRESETS["lama3-8b"]


# Rules


def test_rules():
    specs = ft.param_specs(gpt.defs(SMALL), gpt.rules(SMALL, Mesh(dp=2, tp=2)))
    assert specs["embed"] == P("tp", None)
    assert specs["unembed"] == P(None, "tp")
    attention = specs["blocks"]["attention"]
    assert attention["q"]["w"] == attention["k"]["w"] == P(None, None, "tp", None)
    assert attention["out"]["w"] == P(None, "tp", None, None)
    assert specs["blocks"]["mlp"]["down"]["w"] == P(None, "tp", None)
    assert specs["norm"]["scale"] == P(None)


def test_few_key_heads_are_replicated():
    specs = ft.param_specs(gpt.defs(SMALL), gpt.rules(SMALL, Mesh(tp=4)))
    attention = specs["blocks"]["attention"]
    assert attention["q"]["w"] == P(None, None, "tp", None)
    assert attention["k"]["w"] == attention["v"]["w"] == P(None, None, None, None)


def test_every_problem_of_a_mesh_is_listed():
    with pytest.raises(ValueError, match="this model cannot run on this mesh") as caught:
        gpt.rules(replace(SMALL, mlp_dim=11), Mesh(pp=2, fsdp=7, cp=2, ep=2, tp=3))
    for text in (
        "num_heads: got 4; wanted a multiple of tp=3", "mlp_dim: got 11", "num_kv_heads: got 2",
        "vocab_multiple: got 4", "fix: set vocab_multiple=12", "a multiple of fsdp=7", "ep=2",
    ):  # fmt: skip
        assert text in str(caught.value)


def test_the_suggested_vocabulary_multiple_works():
    config = replace(SMALL, num_heads=3, num_kv_heads=3, head_dim=2)
    with pytest.raises(ValueError, match="set vocab_multiple=12"):
        gpt.rules(config, Mesh(tp=3))
    assert gpt.rules(replace(config, vocab_multiple=12), Mesh(tp=3))["vocab"] == "tp"


# Programs


def test_too_long_sequences():
    with pytest.raises(ValueError, match="got 9 tokens per sample; wanted at most max_seq=8"):
        gpt.forward(SMALL, weights_of(SMALL), tokens_of(SMALL, seq=9))


def test_sequences_that_do_not_split():
    mesh = Mesh(tp=2)
    specs = ft.param_specs(gpt.defs(SMALL), gpt.rules(SMALL, mesh))
    forward = ft.shard_map(
        lambda w, t: gpt.forward(SMALL, w, t, ft.ModelOptions(stream=gpt.SEQUENCE_PARALLEL_STREAM)),
        mesh,
        (specs, P(DATA_AXES)),
        P(DATA_AXES, None, "tp"),
    )
    with pytest.raises(ValueError, match="got 7 tokens per sample; wanted a multiple of 2"):
        forward(weights_of(SMALL), tokens_of(SMALL, seq=7))


def test_later_tokens_do_not_matter():
    weights, tokens = weights_of(SMALL), tokens_of(SMALL)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % SMALL.vocab_size
    before, after = (gpt.forward(SMALL, weights, t) for t in (tokens, changed))
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=1e-12, atol=1e-12)
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("config", [SMALL, GPT2], ids=["llama", "gpt2"])
def test_the_loss_is_a_sum_over_counted_targets(config):
    config = replace(config, z_loss=0.01)
    weights, tokens = weights_of(config), tokens_of(config)
    targets = tokens.roll(-1, 1)
    targets[:, -1], targets[2] = nn.IGNORE_INDEX, nn.IGNORE_INDEX
    batch = {"tokens": tokens, "targets": targets, "rows": torch.arange(4)}
    logits = gpt.forward(config, weights, tokens)[..., :13]
    z = torch.logsumexp(logits, -1).square()[targets != -100].sum()
    expected = F.cross_entropy(logits.mT, targets, reduction="sum") + 0.01 * z
    torch.testing.assert_close(gpt.loss(config, weights, batch), expected, rtol=1e-12, atol=0)
    assert gpt.num_targets(batch).item() == 3 * 7


def test_vocabulary_padding_does_not_change_the_loss():
    small, large = replace(SMALL, vocab_multiple=1), replace(SMALL, vocab_multiple=64)
    weights = weights_of(large)
    cut = {**weights, "embed": weights["embed"][:13], "unembed": weights["unembed"][:, :13]}
    tokens = tokens_of(SMALL)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(4)}
    expected = gpt.loss(small, cut, batch)
    torch.testing.assert_close(gpt.loss(large, weights, batch), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", ["given", "derived"])
def test_dropout_is_the_same_on_a_mesh(rows):
    config = replace(SMALL, dropout=0.4)
    weights, tokens, key = weights_of(config), tokens_of(config), random.key(1)
    mesh = Mesh(dp=2, tp=2)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def program(weights, tokens, at):
        return gpt.forward(config, weights, tokens, rows=at if rows == "given" else None, key=key)

    forward = ft.shard_map(
        program, mesh, (specs, P(DATA_AXES), P(DATA_AXES)), P(DATA_AXES, None, "tp")
    )
    dense = program(weights, tokens, torch.arange(4))
    actual = forward(weights, tokens, torch.arange(4))
    torch.testing.assert_close(actual, dense, rtol=1e-10, atol=1e-10)
    undropped = gpt.forward(config, weights, tokens)
    assert (dense - undropped).abs().max() > 1e-3


def test_dropout_differs_between_rows_layers_and_keys():
    config = replace(SMALL, dropout=0.4)
    weights = weights_of(config)
    tokens = tokens_of(config)[:1].expand(4, 8)
    out = gpt.forward(config, weights, tokens, key=random.key(1))
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations(out, 2))
    assert not torch.allclose(out, gpt.forward(config, weights, tokens, key=random.key(2)))


def test_without_dropout_a_key_costs_nothing(no_random_numbers):
    experts = nn.moe.MoEConfig(num_experts=4, top_k=2, expert_dim=8)
    config = replace(SMALL, moe=experts, dense_layers=1, mtp_depth=1)
    weights, tokens = weights_of(config), tokens_of(config)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(4)}
    with no_random_numbers():
        value = gpt.loss(config, weights, batch, key=random.key(1))
    assert value == gpt.loss(config, weights, batch)


AHEAD = replace(
    SMALL, dtype="float64", init_stddev=0.4, mtp_depth=2,
    moe=nn.moe.MoEConfig(num_experts=4, top_k=2, expert_dim=8, aux_loss=0.1),
)  # fmt: skip


def value_and_grad_of(config, weights):
    tokens = tokens_of(config)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(4)}
    return ft.value_and_grad(lambda w: gpt.loss(config, w, batch))(weights)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_ahead_that_are_detached(tied):
    """The model learns as without modules, and these as where gradients go on from them."""
    config = replace(AHEAD, tied=tied)
    weights = weights_of(config)
    value, grads = value_and_grad_of(replace(config, mtp_detached=True), weights)
    attached, modules = value_and_grad_of(config, weights)
    _, model = value_and_grad_of(replace(config, mtp_depth=0), {**weights, "mtp": {}})
    assert value == attached
    torch.testing.assert_close(grads, {**model, "mtp": modules["mtp"]}, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(grads["embed"], modules["embed"])


def test_a_module_ahead_that_is_repeated():
    """It is modules with the same parameters, whose gradients are added up."""
    repeated = replace(AHEAD, mtp_repeated=True)
    weights = weights_of(repeated)
    assert {len(leaf) for leaf in tree.leaves(weights["mtp"])} == {1}
    twice = tree.map(lambda w: torch.cat([w, w]), weights["mtp"])
    value, grads = value_and_grad_of(repeated, weights)
    want, wanted = value_and_grad_of(AHEAD, {**weights, "mtp": twice})
    assert value == want
    sums = tree.map(lambda g: g.sum(0, keepdim=True), wanted["mtp"])
    torch.testing.assert_close(grads, {**wanted, "mtp": sums}, rtol=1e-12, atol=1e-14)
    assert gpt.flops_per_token(repeated, 8) == gpt.flops_per_token(AHEAD, 8)


def test_jitter_needs_the_key():
    experts = nn.moe.MoEConfig(num_experts=4, top_k=2, expert_dim=8, jitter=0.5)
    config = replace(SMALL, moe=experts)
    weights, tokens = weights_of(config), tokens_of(config)
    assert not torch.equal(
        gpt.forward(config, weights, tokens, key=random.key(1)),
        gpt.forward(config, weights, tokens),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(dtype):
    config = replace(SMALL, dtype=dtype)
    weights, tokens = weights_of(config), tokens_of(config)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(4)}
    assert gpt.forward(config, weights, tokens).dtype == config.torch_dtype
    loss, grads = ft.value_and_grad(lambda w: gpt.loss(config, w, batch))(weights)
    assert loss.dtype == torch.float32
    assert {g.dtype for g in tree.leaves(grads)} == {config.torch_dtype}
    exact = gpt.loss(SMALL, tree.map(torch.Tensor.double, weights), batch)
    torch.testing.assert_close(
        loss.double(), exact, rtol=3e-2 if dtype == "bfloat16" else 1e-5, atol=0
    )


# FLOPs


def written_out(q, k, v):
    heads = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), *heads, is_causal=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, tied=True), GPT2, replace(GPT2, tied=False), replace(SMALL, head_dim=6)],
    ids=["llama", "llama-tied", "gpt2", "gpt2-untied", "wide-heads"],
)
def test_flops_per_token(config):
    """The matrix products that torch counts, and 6 for each entry of a norm or bias.

    Of attention, those of the formula: kernels compute one again in backward.
    """
    options = ft.ModelOptions(attention=written_out)
    tokens = tokens_of(config)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(4)}
    weights = tree.map(torch.Tensor.requires_grad_, weights_of(config))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt.loss(config, weights, batch, options).backward()
    vectors = [w for path, w in zip(tree.paths(weights), tree.leaves(weights), strict=True)
               if path.rsplit("/")[-1] in ("scale", "bias", "b")]  # fmt: skip
    entries = sum(leaf.numel() for leaf in vectors)
    whole = gpt.flops_per_token(config, 8, whole=True)
    assert whole - 6 * entries == counter.get_total_flops() / tokens.numel()


def test_flops_of_llama():
    """By hand: 6 for each weight of the 8B model without its embedding, and the attention term."""
    config = gpt.PRESETS["llama3-8b"]
    weights = 8_030_261_248 - 128256 * 4096
    # 6 N + 12 L H Q T of PaLM, appendix B; and with causal attention as half
    whole = 6 * weights + 12 * 32 * 32 * 128 * 8192
    assert gpt.flops_per_token(config, 8192, whole=True) == whole
    assert gpt.flops_per_token(config, 8192) == whole - 6 * 32 * 32 * 128 * 8192
    # of 8192 tokens 512 see all before them, half of 512, and the others 512: 512 - 512^2 / 2 / 8192
    near = replace(config, window=512)
    seen = 12 * 32 * 32 * 128 * 496
    assert gpt.flops_per_token(near, 8192) == 6 * weights + seen


def test_watched_names_are_of_the_embedding_and_every_block():
    config = replace(gpt.PRESETS["tiny"], num_layers=2)
    assert gpt.watched_names(config) == ("embed", "blocks/0", "blocks/1")
