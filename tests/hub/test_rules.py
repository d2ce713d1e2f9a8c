"""Name rules: every tensor used once, every layout undone, every slice the right one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import gpt, hub, tree
from functron.hub.format import NameRule, layouts, layouts_of, tensors
from functron.hub.mixtures import DECODERS
from functron.nn.moe import MoEConfig

SMALL = gpt.GPTConfig(
    vocab_size=13, num_layers=3, embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=10,
    max_seq=7, vocab_multiple=4, tied=True,
)  # fmt: skip
CONFIGS = {
    "llama": SMALL,
    "llama-biases": replace(SMALL, bias=True, tied=False),
    "qwen2": replace(SMALL, qkv_bias=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "mistral": replace(SMALL, tied=False),
    "gemma": replace(
        SMALL, activation="gelu_tanh", zero_centered_norm=True, embed_scale=math.sqrt(12)
    ),
    "phi3": replace(SMALL, tied=False),
    "gpt2": replace(
        SMALL, num_kv_heads=0, head_dim=0, norm="layer", activation="gelu_tanh", gated=False,
        bias=True, positions="learned",
    ),
    "gpt_neox": replace(
        SMALL, embed_dim=16, num_kv_heads=0, head_dim=0, norm="layer", activation="gelu", gated=False, bias=True,
        parallel_residual=True, tied=False,
    ),
    "falcon": replace(
        SMALL, embed_dim=16, head_dim=0, norm="layer", activation="gelu", gated=False, parallel_residual=True,
        bias=True,
    ),
    "mixtral": replace(SMALL, tied=False, moe=MoEConfig(3, 2, 10, renormalise=True)),
    "qwen3_moe-dense": replace(
        SMALL, qk_norm=True, dense_layers=1, moe=MoEConfig(4, 2, 5, renormalise=True)
    ),
    "deepseek_v3": replace(
        SMALL, num_kv_heads=0, norm_eps=1e-6, kv_rank=9, q_rank=8, rope_head_dim=4, v_head_dim=5,
        dense_layers=2, mtp_depth=2, tied=False,
        moe=MoEConfig(4, 2, 5, score="sigmoid", renormalise=True, balance_bias=True, shared_dim=10),
    ),
    "gpt_oss": replace(
        SMALL, bias=True, sinks=True, activation="clamped_swiglu", tied=False,
        moe=MoEConfig(3, 2, 5, normalise="after", router_bias=True, expert_bias=True),
    ),
}  # fmt: skip


def numbered(config) -> dict:
    """Parameters without two equal entries: 1, 2, 3, ... throughout the tree."""
    config = replace(config, dtype="float64")
    start, leaves = 1, []
    for d in tree.leaves(gpt.defs(config)):
        stop = start + math.prod(d.shape)
        leaves.append(torch.arange(start, stop, dtype=d.dtype).reshape(d.shape))
        start = stop
    return tree.unflatten(tree.structure(gpt.defs(config)), leaves)


def real(config, params) -> dict:
    """The parameters with zeros for the padding of the vocabulary."""
    params = {**params, "embed": params["embed"].clone()}
    params["embed"][config.vocab_size :] = 0
    if "unembed" in params:
        params["unembed"] = params["unembed"].clone()
        params["unembed"][:, config.vocab_size :] = 0
    return params


@pytest.fixture(params=list(CONFIGS))
def case(request):
    """A family and a model of it in float64, whose padding is not zero."""
    config = replace(CONFIGS[request.param], dtype="float64")
    return request.param.split("-")[0], config, numbered(config)


def test_every_number_is_exported_once(case):
    name, config, params = case
    named = hub.to_tensors(config, params, name)
    exported = sorted(x for value in named.values() for x in value.flatten().tolist())
    kept = sorted(x for leaf in tree.leaves(real(config, params)) for x in leaf[leaf != 0].tolist())
    assert exported == kept


def test_import_undoes_export(case):
    name, config, params = case
    named = hub.to_tensors(config, params, name)
    back = hub.from_tensors(name, config, named)
    assert tree.paths(back) == tree.paths(params)
    for path, got, want in zip(
        tree.paths(back), tree.leaves(back), tree.leaves(real(config, params)), strict=True
    ):
        assert torch.equal(got, want), path
    again = hub.to_tensors(config, back, name)
    assert again.keys() == named.keys()
    assert all(torch.equal(again[key], named[key]) for key in named)


def test_names_are_matched_by_their_rules_alone(case):
    """Each name of a tensor matches the pattern of one rule, whose fields are its numbers.

    Layers of two stacks have the same names where they have the same parts: the numbers tell.
    """
    name, config, _ = case
    rules = DECODERS[name].namings(config)[0]
    found = list(tensors(layouts_of(DECODERS[name], config)))
    names = [layout.name(index) for layout, index in found]
    assert len(names) == len(set(names))
    for (layout, index), tensor in zip(found, names, strict=True):
        matches = {rule.name: rule.pattern().match(tensor) for rule in rules}
        hits = {rule: match for rule, match in matches.items() if match}
        assert list(hits) == [layout.rule.name]
        first, *rest = [*index, None]
        numbers = () if first is None else (layout.numbers[first], *rest[:-1])
        assert tuple(map(int, hits[layout.rule.name].groups())) == numbers


def test_layouts_by_hand():
    """Where entries of Llama's and GPT-2's tensors stand, written out."""
    llama = replace(CONFIGS["mistral"], dtype="float64")
    params = numbered(llama)
    named = hub.to_tensors(llama, params, "mistral")
    block, layer = params["blocks"], "model.layers.2."
    q, out = block["attention"]["q"]["w"], block["attention"]["out"]["w"]
    assert named[layer + "self_attn.q_proj.weight"].shape == (24, 12)
    assert named[layer + "self_attn.q_proj.weight"][3 * 6 + 5, 7] == q[2, 7, 3, 5]
    assert named[layer + "self_attn.o_proj.weight"][7, 3 * 6 + 5] == out[2, 3, 5, 7]
    assert named[layer + "mlp.up_proj.weight"][9, 7] == block["mlp"]["up"]["w"][2, 7, 9]
    assert named["lm_head.weight"].shape == (13, 12)
    assert named["lm_head.weight"][11, 5] == params["unembed"][5, 11]

    phi3 = hub.to_tensors(llama, params, "phi3")
    fused = phi3[layer + "self_attn.qkv_proj.weight"]
    assert fused.shape == (24 + 12 + 12, 12)
    assert fused[24 + 1 * 6 + 5, 7] == block["attention"]["k"]["w"][2, 7, 1, 5]
    assert fused[24 + 12 + 1 * 6 + 5, 7] == block["attention"]["v"]["w"][2, 7, 1, 5]
    assert phi3[layer + "mlp.gate_up_proj.weight"][10 + 9, 7] == block["mlp"]["up"]["w"][2, 7, 9]

    gpt2 = replace(CONFIGS["gpt2"], dtype="float64")
    params = numbered(gpt2)
    named = hub.to_tensors(gpt2, params, "gpt2")
    attention = params["blocks"]["attention"]
    fused = named["transformer.h.1.attn.c_attn.weight"]
    assert fused.shape == (12, 36)
    assert fused[7, 12 + 3 * 3 + 2] == attention["k"]["w"][1, 7, 3, 2]
    bias = named["transformer.h.1.attn.c_attn.bias"]
    assert bias[24 + 3 * 3 + 2] == attention["v"]["b"][1, 3, 2]
    up = params["blocks"]["mlp"]["up"]["w"]
    assert named["transformer.h.1.mlp.c_fc.weight"][7, 9] == up[1, 7, 9]

    neox = replace(CONFIGS["gpt_neox"], dtype="float64")
    params = numbered(neox)
    attention = params["blocks"]["attention"]
    fused = hub.to_tensors(neox, params, "gpt_neox")
    fused = fused["gpt_neox.layers.1.attention.query_key_value.weight"]
    assert fused.shape == (4 * 3 * 4, 16)
    assert fused[2 * 12 + 4 + 3, 7] == attention["k"]["w"][1, 7, 2, 3]
    falcon = replace(CONFIGS["falcon"], dtype="float64")  # two query heads for each key head
    params = numbered(falcon)
    attention = params["blocks"]["attention"]
    bias = hub.to_tensors(falcon, params, "falcon")
    bias = bias["transformer.h.1.self_attention.query_key_value.bias"]
    assert bias.shape == (2 * 4 * 4,)
    assert bias[16 + 4 + 3] == attention["q"]["b"][1, 3, 3]
    assert bias[16 + 12 + 3] == attention["v"]["b"][1, 1, 3]


def test_layouts_of_experts_by_hand():
    """Where entries of tensors with experts stand, written out."""
    config = replace(CONFIGS["mixtral"], dtype="float64")
    params = numbered(config)
    moe = params["blocks"]["moe"]
    named = hub.to_tensors(config, params, "mixtral")
    layer = "model.layers.2.block_sparse_moe."
    assert named[layer + "gate.weight"][2, 7] == moe["router"]["w"][2, 7, 2]
    w1, w2, w3 = (named[f"{layer}experts.1.w{i}.weight"] for i in (1, 2, 3))
    assert (w1.shape, w2.shape, w3.shape) == ((10, 12), (12, 10), (10, 12))
    assert w1[9, 7] == moe["experts"]["gate"]["w"][2, 1, 7, 9]
    assert w2[7, 9] == moe["experts"]["down"]["w"][2, 1, 9, 7]
    assert w3[9, 7] == moe["experts"]["up"]["w"][2, 1, 7, 9]

    config = replace(CONFIGS["gpt_oss"], dtype="float64")
    params = numbered(config)
    moe = params["blocks"]["moe"]["experts"]
    named = hub.to_tensors(config, params, "gpt_oss")
    fused = named["model.layers.1.mlp.experts.gate_up_proj"]
    assert fused.shape == (3, 12, 10)
    assert fused[2, 7, 2 * 4] == moe["gate"]["w"][1, 2, 7, 4]
    assert fused[2, 7, 2 * 4 + 1] == moe["up"]["w"][1, 2, 7, 4]
    bias = named["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert bias[2, 2 * 3] == moe["gate"]["b"][1, 2, 3]
    assert bias[2, 2 * 3 + 1] == moe["up"]["b"][1, 2, 3]
    assert torch.equal(named["model.layers.1.mlp.experts.down_proj"], moe["down"]["w"][1])

    config = replace(CONFIGS["deepseek_v3"], dtype="float64")
    params = numbered(config)
    named = hub.to_tensors(config, params, "deepseek_v3")
    dense, sparse, ahead = params["dense"], params["blocks"], params["mtp"]["block"]
    up = "mlp.up_proj.weight"
    assert named[f"model.layers.1.{up}"][9, 7] == dense["mlp"]["up"]["w"][1, 7, 9]
    assert f"model.layers.2.{up}" not in named
    for layer, block in ((2, (sparse, 0)), (3, (ahead, 0)), (4, (ahead, 1))):
        stack, row = block
        experts = stack["moe"]["experts"]
        name = f"model.layers.{layer}."
        got = named[f"{name}mlp.experts.3.up_proj.weight"]
        assert got[4, 7] == experts["up"]["w"][row, 3, 7, 4]
        latent = named[f"{name}self_attn.kv_b_proj.weight"]
        assert latent.shape == (4 * (6 + 5), 9)
        assert latent[2 * 11 + 10, 8] == stack["attention"]["kv_up"]["w"][row, 8, 2, 10]
        bias = named[f"{name}mlp.gate.e_score_correction_bias"]
        assert bias[3] == stack["moe"]["router"]["balance"][row, 3]
    assert named["model.layers.4.eh_proj.weight"][7, 20] == params["mtp"]["proj"]["w"][1, 20, 7]


def test_stacks_of_two_fields():
    """A tensor for each expert of each layer: one leaf with two stacked dims."""
    rule = NameRule("l.{layer}.e.{expert}.up", "mlp embed -> embed mlp", ("up",))
    shape = (2, 3, 4, 5)
    leaf = torch.arange(120.0).reshape(shape)
    defs = {"up": ft.ParamDef(shape, (None,) * 4, lambda *_: leaf)}
    (layout,) = layouts([rule], defs, 9)
    names = [layout.name(index) for _, index in tensors([layout])]
    assert names == [f"l.{i}.e.{j}.up" for i, j in itertools.product(range(2), range(3))]
    assert layout.shape == (5, 4)
    assert torch.equal(layout.to_theirs([leaf[1, 2]]), leaf[1, 2].T)


def boxes(shape):
    """Any part of a value of this shape with something in it."""

    def part(size):
        return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
            lambda pair: (pair[0], max(pair[0] + 1, pair[1]))
        )

    return st.tuples(*map(part, shape))


PATTERNS = [
    ("(heads head) embed -> embed heads head", {"embed": 5, "heads": 4, "head": 3}),
    ("embed (heads head) -> heads head embed", {"embed": 5, "heads": 4, "head": 3}),
    ("(a b c) -> c a b", {"a": 2, "b": 3, "c": 4}),
    ("a (b c) -> b a c", {"a": 2, "b": 3, "c": 4}),
    ("vocab embed -> embed vocab", {"embed": 5, "vocab": 9}),
]


@given(st.data())
def test_any_box_of_a_leaf_is_read_from_the_slices_named(data):
    dims, sizes = data.draw(st.sampled_from(PATTERNS))
    fused = data.draw(st.integers(0, len(NameRule("", dims, ()).theirs()) - 1))
    rule = NameRule("x", dims, ("one", "two"), fused, data.draw(st.booleans()))
    shape = tuple(sizes[name] for name in rule.ours())
    one, two = torch.arange(2.0 * math.prod(shape)).reshape(2, *shape)
    if "vocab" in sizes:
        rule = NameRule("x", dims, ("one",))  # never fused with another
    defs = {path: ft.ParamDef(shape, (None,) * len(shape), lambda *_: one) for path in rule.paths}
    (layout,) = layouts([rule], defs, sizes.get("vocab", 0) - 2)
    stored = layout.to_theirs([one, two][: len(rule.paths)])
    assert tuple(stored.shape) == layout.shape
    part, leaf = data.draw(st.sampled_from(list(zip(layout.parts, (one, two), strict=False))))
    box = data.draw(boxes(part.real))
    piece = stored[layout.source(part, box)]
    expected = leaf[tuple(slice(*entry) for entry in box)]
    assert torch.equal(layout.to_ours(part, box, piece), expected)


@given(st.data())
def test_any_box_of_a_leaf_in_groups(data):
    """Queries of which each key head has three, and what stands beside them."""
    rule = NameRule("x", "(heads head) embed -> embed heads head", ("q", "k", "v"), grouped=True)
    leaves = [torch.randn(4, heads, 3) for heads in (6, 2, 2)]
    defs = {
        n: ft.ParamDef(tuple(x.shape), (None,) * 3, None)
        for n, x in zip("qkv", leaves, strict=True)
    }
    (layout,) = layouts([rule], defs, 0)
    stored = layout.to_theirs(leaves)
    assert torch.equal(stored[15 + 3 : 15 + 6].T, leaves[0][:, 4])
    part, leaf = data.draw(st.sampled_from(list(zip(layout.parts, leaves, strict=True))))
    box = data.draw(boxes(part.real))
    got = layout.to_ours(part, box, stored[layout.source(part, box)])
    assert torch.equal(got, leaf[tuple(slice(*entry) for entry in box)])


def test_a_model_that_the_family_has_no_names_for():
    with pytest.raises(ValueError, match="no tensors of this family hold positions"):
        layouts(DECODERS["llama"].rules, gpt.defs(CONFIGS["gpt2"]), 13)
