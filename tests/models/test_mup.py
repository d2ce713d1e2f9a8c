"""Maximal update parametrization: the rules, derived by hand, and that widths change nothing."""

import math
import re
from dataclasses import replace

import pytest
import torch

from functron import gpt, optim, params, random, tree
from functron.models import decoder, mup
from functron.models.options import arranged
from functron.nn.moe import MoEConfig
from functron.pipeline.partition import whole

SEQ, VOCAB, STDDEV, LAYERS = 12, 32, 0.18, 2
BASE, M = 16, 4  # the narrow model's width, and how many times as wide the other is
NARROW = gpt.GPTConfig(
    vocab_size=VOCAB, vocab_multiple=VOCAB, num_layers=LAYERS, embed_dim=BASE, num_heads=2, head_dim=8,
    mlp_dim=2 * BASE, max_seq=SEQ, init_stddev=STDDEV, dtype="float64", mup_base_dim=BASE,
)  # fmt: skip
OUT = STDDEV / math.sqrt(2 * LAYERS)  # of what writes to the stream
VECTOR = r".*(/b|norm/scale|norm/bias|/scale|/sinks|router/balance)"
HIDDEN = {
    r"(blocks|dense|mtp/block)/attention/(q|k|v|gate|q_down|q_up|kv_down|kv_up)/w": STDDEV,
    r"(blocks|dense|mtp/block)/attention/out/w": OUT,
    r"(blocks|dense|mtp/block)/(mlp|moe/experts|moe/shared)/(up|gate)/w": STDDEV,
    r"(blocks|dense|mtp/block)/(mlp|moe/experts|moe/shared)/down/w": OUT,
    r"(blocks|mtp/block)/moe/latent/down/w": STDDEV,
    r"(blocks|mtp/block)/moe/latent/up/w": OUT,
    r"mtp/proj/w": STDDEV,
}
INPUT = {r"embed|positions|unembed": STDDEV}
OUTPUT = {r"(blocks|mtp/block)/moe/(router|shared_gate)/w": STDDEV}


def wide(narrow, m=M, heads="more", **changes):
    """The model m times as wide, by more heads or by wider ones."""
    sizes = {name: m * getattr(narrow, name) for name in ("embed_dim", "mlp_dim")}
    sizes |= {name: m * getattr(narrow, name) for name in ("kv_rank", "q_rank")}
    if heads == "more":
        sizes |= {"num_heads": m * narrow.num_heads, "num_kv_heads": m * narrow.num_kv_heads}
    else:
        sizes |= {"head_dim": m * narrow.head_dim, "mup_base_head_dim": narrow.head_dim}
    if narrow.moe is not None:
        names = ("expert_dim", "shared_dim", "latent_dim")
        moe = {name: m * getattr(narrow.moe, name) for name in names}
        sizes["moe"] = replace(narrow.moe, **moe)
    return replace(narrow, **sizes, **changes)


EXPERTS = MoEConfig(
    4, 2, 2 * BASE, shared_dim=BASE, latent_dim=BASE // 2, shared_gate=True, router_bias=True,
    balance_bias=True,
)  # fmt: skip
MODELS = {
    "llama": replace(NARROW, num_kv_heads=1, qk_norm=True, attention_gate=True, sinks=True),
    "gpt2": replace(NARROW, norm="layer", gated=False, bias=True, positions="learned", tied=True),
    "experts": replace(NARROW, moe=EXPERTS, dense_layers=1, mtp_depth=1),
    "latent": replace(NARROW, kv_rank=8, q_rank=8, rope_head_dim=4, v_head_dim=8),
}


def flat(defs):
    return dict(zip(tree.paths(defs), tree.leaves(defs), strict=True))


def expected(path):
    """Standard deviation at the base (None: not random), times what, and Adam's multiple."""
    for table, shrinks, rate in ((HIDDEN, M**-0.5, 1 / M), (INPUT, 1, 1), (OUTPUT, 1 / M, 1 / M)):
        for pattern, stddev in table.items():
            if re.fullmatch(pattern, path):
                return stddev, shrinks, rate
    assert re.fullmatch(VECTOR, path), path
    return STDDEV if path.endswith("sinks") else None, 1, 1


KINDS = [("latent", "more"), *((m, h) for m in MODELS for h in ("more", "wider") if m != "latent")]


@pytest.mark.parametrize(("model", "heads"), KINDS)
def test_rules_are_those_of_the_table(model, heads):
    narrow, config = MODELS[model], wide(MODELS[model], heads=heads)
    base, defs = flat(gpt.defs(narrow)), flat(gpt.defs(config))
    rates = optim.width_multiples(optim.OptimizerConfig("adamw"), gpt.defs(config))
    assert base.keys() == defs.keys()
    assert base == flat(gpt.defs(replace(narrow, mup_base_dim=0)))
    for path, d in defs.items():
        stddev, shrinks, rate = expected(path)
        if stddev is not None:
            assert base[path].init.stddev == pytest.approx(stddev, rel=1e-12), path
            assert d.init.stddev == pytest.approx(stddev * shrinks, rel=1e-12), path
        else:
            assert d.init == base[path].init, path
        assert rates.get(path, 1) == pytest.approx(rate, rel=1e-12), path


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_scores_have_their_factors(tied):
    config = wide(replace(NARROW, tied=tied), heads="wider")
    weights = params.init_params(random.key(0), gpt.defs(config))
    tokens = torch.arange(SEQ).unsqueeze(0)
    # the standard parametrization with the scale sqrt(8) / 32 written out
    plain = replace(config, mup_base_dim=0, mup_base_head_dim=0, attention_scale=8**0.5 / 32)
    want = gpt.forward(plain, weights, tokens) / 4
    torch.testing.assert_close(gpt.forward(config, weights, tokens), want, rtol=1e-12, atol=1e-14)
    capped = gpt.forward(replace(config, logit_cap=0.5), weights, tokens)
    torch.testing.assert_close(capped, 0.5 * torch.tanh(want / 0.5), rtol=1e-12, atol=1e-14)
    data = batch()
    losses = [
        gpt.loss(config, weights, data, gpt.ModelOptions(loss_chunk_tokens=chunk)).item()
        for chunk in (0, SEQ // 2)
    ]
    log_p = (gpt.forward(plain, weights, data["tokens"]) / 4).log_softmax(-1)
    want = -log_p.gather(-1, data["targets"].unsqueeze(-1)).sum().item()
    assert losses == pytest.approx([want, want], rel=1e-12)


def batch():
    tokens = torch.randint(0, VOCAB, (4, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def changes(config, optimizer, rate, steps=4):
    """By how much (rms) stream and logits change in a few updates."""
    defs, data = gpt.defs(config), batch()
    weights = params.init_params(random.key(3), defs)
    mask = params.decay_mask(defs)
    rule = optim.make_optimizer(optimizer, rate, defs=defs, mask=mask)
    state = rule.init(weights)

    @torch.no_grad()
    def seen():
        options = gpt.ModelOptions()
        part, sequence = whole(config.num_layers), arranged(data, options.context)
        stream, _ = decoder.stream(config, part, weights, None, sequence, options, None)
        return stream, decoder.logits(config, weights, stream, options)

    before = seen()
    for _ in range(steps):
        leaves, structure = tree.flatten(weights)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        loss = gpt.loss(config, tree.unflatten(structure, leaves), data)
        loss = (loss[0] if isinstance(loss, tuple) else loss) / data["targets"].numel()
        grads = tree.unflatten(structure, list(torch.autograd.grad(loss, leaves)))
        with torch.no_grad():
            updates, state = rule.update(grads, state, weights)
            weights = optim.apply_updates(weights, updates)
    return [(y - x).square().mean().sqrt().item() for x, y in zip(before, seen(), strict=True)]


def slopes(narrow, optimizer, rate, heads, widths):
    """How fast the changes grow with the width: exponents, by least squares."""
    rows = [changes(wide(narrow, m, heads), optimizer, rate) for m in widths]
    x = torch.tensor(widths, dtype=torch.float64).log()
    x = x - x.mean()
    y = torch.tensor(rows, dtype=torch.float64).log()
    return ((x @ y) / x.square().sum()).tolist()


def setting(name, **own):
    return optim.OptimizerConfig(name, clip_norm=0, eps=1e-12, **own)


CHECKS = {
    "adamw": (setting("adamw"), 2e-2, {}, "more"),
    "adamw-clipped-tied": (replace(setting("adamw"), clip_norm=0.1), 2e-2, {"tied": True}, "wider"),
    "experts": (setting("adamw"), 2e-2, {"moe": MoEConfig(4, 2, 2 * BASE)}, "more"),
    "muon": (setting("muon", muon=optim.MuonConfig(dtype="")), 2e-2, {}, "more"),
    "muon-spectral": (
        setting("muon", muon=optim.MuonConfig(dtype="", scale="spectral")), 5e-2, {}, "more"
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_coordinates_change_as_much_at_every_width(check):
    optimizer, rate, changed, heads = CHECKS[check]
    narrow = replace(NARROW, **changed)
    widths = (2, 4, 8)
    stream, logits = slopes(narrow, optimizer, rate, heads, widths)
    # a part of the change of logits falls with the width: that with the unembedding's first values
    assert abs(stream) < 0.2
    assert -0.35 < logits < 0.1
    if check not in ("adamw", "muon"):
        return
    standard = replace(narrow, mup_base_dim=0)
    stream, logits = slopes(standard, optimizer, rate, heads, widths)
    assert stream > 1.2
    assert logits > 0.35


REFUSED = {
    "wider heads without a base": ({"mup_base_dim": 0, "mup_base_head_dim": 8}, "set mup_base_dim"),
    "scale": ({"mup_base_head_dim": 4, "attention_scale": 0.5}, "give attention_scale as"),
    "latent": (
        {"mup_base_head_dim": 4, "kv_rank": 8, "rope_head_dim": 4, "v_head_dim": 8},
        "let heads grow in number",
    ),
    "heads": ({"mup_base_dim": 12}, "1.5 heads of 8 dims"),
    "derived heads": (
        {"head_dim": 0, "mup_base_dim": 8}, "set it to 8 if there were fewer heads, or to 4 if"
    ),
    "derived dims of latent heads": (
        {"head_dim": 0, "mup_base_dim": 8, "kv_rank": 8, "rope_head_dim": 4, "v_head_dim": 8},
        "set head_dim, the same at every width",
    ),
    "embedding": ({"mup_base_dim": 8, "embed_scale": 4.0}, "set it to 2.82843"),
    "negative": ({"mup_base_dim": -1}, "mup_base_dim: got -1; wanted at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_do(case):
    changed, words = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(NARROW, **changed)


FOLDS = {
    "untied": {},
    "tied": {"tied": True, "norm": "layer", "bias": True},
    "gemma": {"tied": True, "zero_centered_norm": True, "qk_norm": True, "logit_cap": 2.0},
    "further ahead": {"mtp_depth": 1, "moe": MoEConfig(4, 2, 16), "dense_layers": 1},
}


@pytest.mark.parametrize("case", FOLDS)
def test_folded_parameters_compute_the_same(case):
    config = wide(replace(NARROW, **FOLDS[case]), heads="wider")
    defs = gpt.defs(config)
    weights = params.init_params(random.key(1), defs)
    weights = tree.map(lambda w: w + 0.1 * torch.randn(w.shape).double(), weights)
    plain, made = mup.folded(config, weights)
    assert plain == replace(config, mup_base_dim=0, mup_base_head_dim=0)
    data = batch()
    for f in (lambda c, w: gpt.forward(c, w, data["tokens"]), lambda c, w: gpt.loss(c, w, data)):
        torch.testing.assert_close(f(plain, made), f(config, weights), rtol=1e-10, atol=1e-12)
    assert mup.folded(plain, made) == (plain, made)


UNFOLDED = {
    "mtp_depth": {"tied": True, "mtp_depth": 1},
    "norm": {"tied": True, "norm": "bare_layer"},
    "qkv_clip": {"qkv_clip": 2.0},
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_what_has_no_parameter_to_be_folded_into(name):
    config = wide(replace(NARROW, **UNFOLDED[name]), heads="wider")
    with pytest.raises(ValueError, match=f"- {name}: got .*; fix: train with"):
        mup.folded(config, params.init_params(random.key(1), gpt.defs(config)))
