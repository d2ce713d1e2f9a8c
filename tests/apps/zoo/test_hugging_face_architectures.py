"""Every architecture beside the decoder against Hugging Face transformers, weights copied, float64.

Transformers converts to float32 in norms, the state space and softmax even in a float64 model;
`Float64` makes these conversions to float64, so that agreement can be asked to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F

import functron as ft
from functron import bert, gpt, llava, mamba, nn, t5, vit
from functron.apps.zoo.layers import relative_buckets
from functron.apps.zoo.t5 import respond
from functron.models.generation import Draw
from tests.models.float64_models import (
    TOLERANCE,
    Float64,
    Tensors,
    assert_leaves_close,
    assert_mapped,
    assert_outputs_close,
    drawn,
    gradients,
    pad,
    stacked,
    tensors,
)

VOCAB, EMBED, BATCH, SEQ = 61, 32, 4, 12
# --- Mamba-2 and Nemotron-H

MAMBA = mamba.MambaConfig(
    pattern="MMM", vocab_size=VOCAB, embed_dim=EMBED, num_heads=8, head_dim=8, num_groups=2,
    state_dim=6, chunk=5, attention_heads=4, attention_kv_heads=2, mlp_dim=48, tied=True,
    vocab_multiple=8, dtype="float64",
)  # fmt: skip
MAMBAS = {
    "mamba2": MAMBA,
    "mamba2-untied": replace(MAMBA, tied=False, num_groups=1, bias=True, conv_bias=False),
    "nemotron-h": replace(MAMBA, pattern="M-M*-M", tied=False, dt_min=0.5),
}


def hf_mamba(c: mamba.MambaConfig) -> torch.nn.Module:
    same = {
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "n_groups": c.num_groups,
        "layer_norm_epsilon": c.norm_eps,
        "chunk_size": c.chunk,
        "residual_in_fp32": False,
        "use_conv_bias": c.conv_bias,
        "tie_word_embeddings": c.tied,
    }
    if "-" not in c.pattern:
        return transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                **same, num_heads=c.num_heads, head_dim=c.head_dim, state_size=c.state_dim,
                num_hidden_layers=len(c.pattern), use_bias=c.bias,
            )
        )  # fmt: skip
    return transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **same, hybrid_override_pattern=c.pattern, num_attention_heads=c.attention_heads,
            num_key_value_heads=c.kv_heads, head_dim=EMBED // c.attention_heads,
            intermediate_size=c.mlp_dim, ssm_state_size=c.state_dim, mamba_num_heads=c.num_heads,
            mamba_head_dim=c.head_dim, attn_implementation="eager", time_step_min=c.dt_min,
        )
    )  # fmt: skip


def mamba_mixer(c: mamba.MambaConfig, t: Callable[[str], torch.Tensor | None]) -> dict:
    """The mixer's parameters from tensors by their names in a layer."""
    inner, groups = c.num_heads * c.head_dim, c.num_groups * c.state_dim
    heads, group = (c.num_heads, c.head_dim), (c.num_groups, c.state_dim)
    projected = {"z": heads, "x": heads, "b": group, "c": group, "dt": heads[:1]}
    sizes = (inner, inner, groups, groups, c.num_heads)
    w, bias = (t(f"in_proj.{name}") for name in ("weight", "bias"))
    params: dict = {}
    for place, (name, shape) in enumerate(projected.items()):
        params[name] = {"w": w.split(sizes)[place].T.reshape(EMBED, *shape)}
        if bias is not None:
            params[name]["b"] = bias.split(sizes)[place].reshape(shape)
    kernel, conv_bias = t("conv1d.weight"), t("conv1d.bias")
    params["conv"] = {}
    for place, name in enumerate(("x", "b", "c")):
        shape = projected[name]
        params["conv"][name] = {"w": kernel.split(sizes[1:4])[place].reshape(*shape, -1)}
        if conv_bias is not None:
            params["conv"][name]["b"] = conv_bias.split(sizes[1:4])[place].reshape(shape)
    params |= {"a_log": t("A_log"), "d": t("D"), "dt_bias": t("dt_bias")}
    params["norm"] = {"scale": t("norm.weight").reshape(heads)}
    params["out"] = {"w": t("out_proj.weight").T.reshape(*heads, EMBED)}
    if bias is not None:
        params["out"]["b"] = t("out_proj.bias")
    return params


def mamba_tree(c: mamba.MambaConfig, named: Tensors, padding: float) -> dict:
    nemotron = "-" in c.pattern
    layers: dict[str, list] = {name: [] for name in c.counts}
    for index, letter in enumerate(c.pattern):
        prefix = f"model.layers.{index}." if nemotron else f"backbone.layers.{index}."

        def t(name: str, prefix=prefix) -> torch.Tensor | None:
            return named.get(f"{prefix}mixer.{name}")

        if letter == "M":
            kind, mixer = "mamba", mamba_mixer(c, t)
        elif letter == "*":
            kind, shape = "attention", (EMBED, -1, EMBED // c.attention_heads)
            mixer = {n: {"w": t(f"{n}_proj.weight").T.reshape(shape)} for n in "qkv"}
            out = t("o_proj.weight").T.reshape(c.attention_heads, -1, EMBED)
            mixer["out"] = {"w": out}
        else:
            kind = "mlp"
            mixer = {name: {"w": t(f"{name}_proj.weight").T} for name in ("up", "down")}
        layers[kind].append({"norm": {"scale": named[f"{prefix}norm.weight"]}, "mixer": mixer})
    base, embed = ("model", "embeddings") if nemotron else ("backbone", "embeddings")
    out = {
        "embed": pad(named[f"{base}.{embed}.weight"], c.padded_vocab - VOCAB, padding),
        "norm": {"scale": named[f"{base}.norm_f.weight"]},
        **{kind: stacked(rows) for kind, rows in layers.items()},
    }
    if not c.tied:
        out["unembed"] = pad(named["lm_head.weight"], c.padded_vocab - VOCAB, padding).T
    return out


@pytest.mark.parametrize("name", MAMBAS)
def test_mamba(name):
    c = MAMBAS[name]
    model = drawn(lambda: hf_mamba(c))
    weights = mamba_tree(c, tensors(model), 3.0)  # padding must not matter, so it is large
    assert_mapped(weights, mamba.defs(c))
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    with Float64():
        logits = model(tokens, use_cache=False).logits
    ours = mamba.forward(c, weights, tokens)[..., :VOCAB]
    assert_outputs_close(ours, logits)

    targets = F.pad(tokens[:, 1:], (0, 1), value=nn.IGNORE_INDEX)
    expected = F.cross_entropy(logits.mT, targets)
    batch = {"tokens": tokens, "targets": targets}
    loss = lambda w: mamba.loss(c, w, batch) / mamba.num_targets(batch)
    value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=TOLERANCE, atol=0)
    assert_leaves_close(grads, mamba_tree(c, gradients(model, expected), 0.0))


def test_mamba_generates_what_transformers_does():
    model = drawn(lambda: hf_mamba(MAMBA))
    weights = mamba_tree(MAMBA, tensors(model), 3.0)
    prompt = torch.randint(0, VOCAB, (BATCH, 5))
    theirs = model.generate(
        prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    cache = mamba.empty_cache(MAMBA, weights, BATCH)
    ours = prompt
    for t in range(14):
        logits, cache = mamba.step(MAMBA, weights, ours[:, t], cache)
        if t >= 4:
            ours = torch.cat([ours, logits[:, :VOCAB].argmax(-1, keepdim=True)], 1)
    assert torch.equal(ours, theirs)
    assert len(set(ours[:, 5:].flatten().tolist())) > 5


# --- what encoders share: linear layers of [out, in], with biases

HEADS, MLP, LAYERS = 4, 48, 2


def linear(named: Tensors, name: str, *shape: int) -> dict:
    """A linear layer; its weight, transposed, in this shape."""
    w = named[f"{name}.weight"].T
    params = {"w": w.reshape(shape) if shape else w}
    bias = named.get(f"{name}.bias")
    if bias is not None:
        params["b"] = bias.reshape(shape[1:]) if len(shape) == 3 and shape[0] == EMBED else bias
    return params


def norm(named: Tensors, name: str) -> dict:
    params = {"scale": named[f"{name}.weight"]}
    return params | ({"bias": named[f"{name}.bias"]} if f"{name}.bias" in named else {})


def attention(named: Tensors, prefix: str, q: str, k: str, v: str, out: str) -> dict:
    heads = (EMBED, HEADS, EMBED // HEADS)
    params = {n: linear(named, prefix + name, *heads) for n, name in (("q", q), ("k", k), ("v", v))}
    w = named[f"{prefix}{out}.weight"].T.reshape(*heads[1:], EMBED)
    bias = named.get(f"{prefix}{out}.bias")
    return params | {"out": {"w": w} | ({} if bias is None else {"b": bias})}


# --- BERT

BERT = bert.BertConfig(
    vocab_size=VOCAB, num_layers=LAYERS, embed_dim=EMBED, num_heads=HEADS, mlp_dim=MLP, max_seq=24,
    vocab_multiple=8, dtype="float64",
)  # fmt: skip


def bert_tree(named: Tensors, padding: float) -> dict:
    layers = []
    for index in range(LAYERS):
        at = f"bert.encoder.layer.{index}."
        of = "attention.self."
        layers.append(
            {
                "attention": attention(
                    named, at, of + "query", of + "key", of + "value", "attention.output.dense"
                ),
                "attention_norm": norm(named, at + "attention.output.LayerNorm"),
                "mlp": {
                    "up": linear(named, at + "intermediate.dense"),
                    "down": linear(named, at + "output.dense"),
                },
                "mlp_norm": norm(named, at + "output.LayerNorm"),
            }
        )
    embeddings, head = "bert.embeddings.", "cls.predictions."
    missing = BERT.padded_vocab - VOCAB
    return {
        "embed": pad(named[embeddings + "word_embeddings.weight"], missing, padding),
        "positions": named[embeddings + "position_embeddings.weight"],
        "types": named[embeddings + "token_type_embeddings.weight"],
        "embed_norm": norm(named, embeddings + "LayerNorm"),
        "blocks": stacked(layers),
        "head": {
            "dense": linear(named, head + "transform.dense"),
            "norm": norm(named, head + "transform.LayerNorm"),
            "bias": pad(named[head + "bias"], missing, padding),
        },
    }


def test_bert():
    settings = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=EMBED, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=MLP, max_position_embeddings=24, attn_implementation="eager",
    )  # fmt: skip
    model = drawn(lambda: transformers.BertForMaskedLM(settings))
    weights = bert_tree(tensors(model), 3.0)
    assert_mapped(weights, bert.defs(BERT))
    tokens = torch.randint(1, VOCAB, (BATCH, SEQ))  # torch learns nothing of padding's embedding
    mask = torch.arange(SEQ) < torch.tensor([[12], [7], [12], [3]])
    types = (torch.arange(SEQ) > 4).long().expand(BATCH, SEQ)
    targets = torch.where((torch.rand(BATCH, SEQ) < 0.4) & mask, tokens, nn.IGNORE_INDEX)
    with Float64():
        logits = model(tokens, attention_mask=mask.long(), token_type_ids=types).logits
    ours = bert.forward(BERT, weights, tokens, types=types, mask=mask)[..., :VOCAB]
    assert_outputs_close(ours[mask], logits[mask])

    expected = F.cross_entropy(logits.mT, targets)
    batch = {"tokens": tokens, "targets": targets, "types": types, "mask": mask}
    loss = lambda w: bert.loss(BERT, w, batch) / bert.num_targets(batch)
    value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=TOLERANCE, atol=0)
    assert_leaves_close(grads, bert_tree(gradients(model, expected), 0.0))


# --- T5

T5 = t5.T5Config(
    vocab_size=VOCAB, num_layers=2, decoder_layers=3, embed_dim=EMBED, num_heads=HEADS, head_dim=6,
    mlp_dim=MLP, num_buckets=8, max_distance=10, vocab_multiple=8, dtype="float64",
)  # fmt: skip
T5S = {"1.0": replace(T5, activation="relu", gated=False, tied=True), "1.1": T5}


def t5_attention(c: t5.T5Config, named: Tensors, prefix: str) -> dict:
    shape = (EMBED, HEADS, c.head_dim)
    params = {n: {"w": named[f"{prefix}.{n}.weight"].T.reshape(shape)} for n in "qkv"}
    out = named[f"{prefix}.o.weight"].T.reshape(*shape[1:], EMBED)
    return params | {"out": {"w": out}}


def t5_block(c: t5.T5Config, named: Tensors, at: str, cross: bool) -> dict:
    last = 2 if cross else 1
    dense = f"{at}{last}.DenseReluDense."
    names = {"gate": "wi_0", "up": "wi_1"} if c.gated else {"up": "wi"}
    params = {
        "attention_norm": norm(named, f"{at}0.layer_norm"),
        "attention": t5_attention(c, named, f"{at}0.SelfAttention"),
        "mlp_norm": norm(named, f"{at}{last}.layer_norm"),
        "mlp": {n: linear(named, dense + name) for n, name in (names | {"down": "wo"}).items()},
    }
    if cross:
        params["cross_norm"] = norm(named, f"{at}1.layer_norm")
        params["cross"] = t5_attention(c, named, f"{at}1.EncDecAttention")
    return params


def t5_tree(c: t5.T5Config, named: Tensors, padding: float) -> dict:
    missing = c.padded_vocab - VOCAB
    out = {"embed": pad(named["shared.weight"], missing, padding)}
    for name, count in c.layers.items():
        table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows = [
            t5_block(c, named, f"{name}.block.{i}.layer.", name == "decoder") for i in range(count)
        ]
        out[name] = {
            "relative": named[table],
            "blocks": stacked(rows),
            "norm": norm(named, f"{name}.final_layer_norm"),
        }
    if not c.tied:
        out["unembed"] = pad(named["lm_head.weight"], missing, padding).T
    return out


def hf_t5(c: t5.T5Config) -> torch.nn.Module:
    settings = transformers.T5Config(
        vocab_size=VOCAB, d_model=EMBED, d_kv=c.head_dim, d_ff=MLP, num_layers=c.num_layers,
        num_decoder_layers=c.decoder_layers, num_heads=HEADS, dropout_rate=0.0,
        relative_attention_num_buckets=c.num_buckets, tie_word_embeddings=c.tied,
        relative_attention_max_distance=c.max_distance, attn_implementation="eager",
        feed_forward_proj="gated-gelu" if c.gated else "relu",
        decoder_start_token_id=c.start_id, pad_token_id=c.start_id,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(settings)
    if not c.tied:  # transformers ties them in any case
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, EMBED))
    return model


@pytest.mark.parametrize("version", T5S)
def test_t5(version):
    c = T5S[version]
    model = drawn(lambda: hf_t5(c))
    weights = t5_tree(c, tensors(model), 3.0)
    assert_mapped(weights, t5.defs(c))
    tokens, targets = torch.randint(1, VOCAB, (BATCH, SEQ)), torch.randint(1, VOCAB, (BATCH, 9))
    mask = torch.arange(SEQ) < torch.tensor([[12], [7], [12], [3]])
    targets[1, 5:] = targets[3, :2] = nn.IGNORE_INDEX
    with Float64():
        logits = model(tokens, attention_mask=mask.long(), labels=targets).logits
    given = t5.shift_right(targets, c.start_id)
    ours = t5.forward(c, weights, tokens, given, mask=mask)[..., :VOCAB]
    assert_outputs_close(ours, logits)

    expected = F.cross_entropy(logits.mT, targets)
    batch = {"tokens": tokens, "targets": targets, "mask": mask}
    loss = lambda w: t5.loss(c, w, batch) / t5.num_targets(batch)
    value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=TOLERANCE, atol=0)
    assert_leaves_close(grads, t5_tree(c, gradients(model, expected), 0.0))


@pytest.mark.parametrize("version", T5S)
def test_t5_generates_what_transformers_does(version):
    c = T5S[version]
    model = drawn(lambda: hf_t5(c))
    with torch.no_grad():  # what blocks say must outweigh what they read, or it is said again
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if name.endswith(("o.weight", "wo.weight")) else 1)
    weights = t5_tree(c, tensors(model), 3.0)
    tokens, mask = torch.randint(1, VOCAB, (BATCH, SEQ)), torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, 7:] = 0
    with Float64():
        # without their cache, which has a layer per one of the encoder's
        theirs = model.generate(
            tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None,
            use_cache=False,
        )  # fmt: skip
    ours = respond(weights, c, tokens, 20, mask=mask, draw=Draw(0.0))
    assert torch.equal(ours, theirs[:, 1:])
    assert len(set(ours.flatten().tolist())) > 5


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 10), (16, 100)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets(buckets, distance, bidirectional):
    """At every distance, in the float32 that published models were trained with."""
    ours = relative_buckets(
        400, 400, num_buckets=buckets, max_distance=distance, bidirectional=bidirectional
    )
    ahead = torch.arange(400) - torch.arange(400)[:, None]
    find = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    assert torch.equal(ours, find(ahead, bidirectional, buckets, distance))


# --- ViT, CLIP's vision tower, and LLaVA

VIT = vit.ViTConfig(
    image_size=8, patch_size=2, num_layers=LAYERS, embed_dim=EMBED, num_heads=HEADS, mlp_dim=MLP,
    num_classes=5, class_multiple=8, dtype="float64",
)  # fmt: skip
CLIP = replace(
    VIT, activation="quick_gelu", patch_bias=False, pre_norm=True, num_classes=0, norm_eps=1e-5
)
SIZES = {
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "image_size": 8,
    "patch_size": 2,
    "attn_implementation": "eager",
}


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 3, 8, 8, dtype=torch.float64)


def patches(named: Tensors, name: str) -> dict:
    params = {"w": named[f"{name}.weight"].permute(1, 2, 3, 0)}
    return params | ({"b": named[f"{name}.bias"]} if f"{name}.bias" in named else {})


def vit_tree(named: Tensors, padding: float) -> dict:
    layers = []
    for index in range(LAYERS):
        at = f"vit.layers.{index}."
        heads = ("q_proj", "k_proj", "v_proj", "o_proj")
        layers.append(
            {
                "attention_norm": norm(named, at + "layernorm_before"),
                "attention": attention(named, at + "attention.", *heads),
                "mlp_norm": norm(named, at + "layernorm_after"),
                "mlp": {"up": linear(named, at + "mlp.fc1"), "down": linear(named, at + "mlp.fc2")},
            }
        )
    missing = VIT.padded_classes - 5
    head = {
        n: pad(named[f"classifier.{name}"], missing, padding)
        for n, name in (("w", "weight"), ("b", "bias"))
    }
    return {
        "patches": patches(named, "vit.embeddings.patch_embeddings.projection"),
        "class": named["vit.embeddings.cls_token"][0, 0],
        "positions": named["vit.embeddings.position_embeddings"][0],
        "blocks": stacked(layers),
        "norm": norm(named, "vit.layernorm"),
        "head": {"w": head["w"].T, "b": head["b"]},
    }


def clip_tree(named: Tensors, layers: int) -> dict:
    rows = []
    for index in range(layers):
        at = f"encoder.layers.{index}."
        heads = ("q_proj", "k_proj", "v_proj", "out_proj")
        rows.append(
            {
                "attention_norm": norm(named, at + "layer_norm1"),
                "attention": attention(named, at + "self_attn.", *heads),
                "mlp_norm": norm(named, at + "layer_norm2"),
                "mlp": {"up": linear(named, at + "mlp.fc1"), "down": linear(named, at + "mlp.fc2")},
            }
        )
    return {
        "patches": patches(named, "embeddings.patch_embedding"),
        "class": named["embeddings.class_embedding"],
        "positions": named["embeddings.position_embedding.weight"],
        "pre_norm": norm(named, "pre_layrnorm"),
        "blocks": stacked(rows),
    }


def test_vit():
    settings = transformers.ViTConfig(**SIZES, num_labels=5, layer_norm_eps=VIT.norm_eps)
    model = drawn(lambda: transformers.ViTForImageClassification(settings))
    weights = vit_tree(tensors(model), 3.0)
    assert_mapped(weights, vit.defs(VIT))
    batch = {"images": images(BATCH), "targets": torch.tensor([0, 3, 4, 1])}
    with Float64():
        logits = model(batch["images"]).logits
    assert_outputs_close(vit.forward(VIT, weights, batch["images"])[:, :5], logits)
    expected = F.cross_entropy(logits, batch["targets"])
    value, grads = ft.value_and_grad(lambda w: vit.loss(VIT, w, batch) / BATCH)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=TOLERANCE, atol=0)
    assert_leaves_close(grads, vit_tree(gradients(model, expected), 0.0))


def test_clip_vision():
    """Its norm at the end, which is of the class token alone there, is of every token here."""
    settings = transformers.CLIPVisionConfig(**SIZES, layer_norm_eps=CLIP.norm_eps)
    model = drawn(lambda: transformers.CLIPVisionModel(settings))
    named = tensors(model)
    weights = clip_tree(named, LAYERS)
    assert_mapped(weights | {"norm": norm(named, "post_layernorm")}, vit.defs(CLIP))
    some = images(BATCH)
    with Float64():
        out = model(some)
    bare = replace(CLIP, final_norm=False)
    assert_outputs_close(vit.features(bare, weights, some), out.last_hidden_state)
    weights["norm"] = norm(named, "post_layernorm")
    assert_outputs_close(vit.features(CLIP, weights, some)[:, 0], out.pooler_output)


LLAVA = llava.LlavaConfig(
    replace(CLIP, num_layers=LAYERS - 1, final_norm=False),
    gpt.GPTConfig(
        vocab_size=VOCAB, num_layers=LAYERS, embed_dim=EMBED, num_heads=HEADS, num_kv_heads=2,
        mlp_dim=MLP, max_seq=64, vocab_multiple=8, dtype="float64",
    ),
    image_token=7,
)  # fmt: skip


def llava_tree(named: Tensors, padding: float) -> dict:
    def under(prefix: str) -> Tensors:
        return {n.removeprefix(prefix): x for n, x in named.items() if n.startswith(prefix)}

    language = under("model.language_model.")
    rows = []
    for index in range(LAYERS):
        at = f"layers.{index}."
        shape = (EMBED, -1, EMBED // HEADS)
        heads = {
            n: {"w": language[f"{at}self_attn.{n}_proj.weight"].T.reshape(shape)} for n in "qkv"
        }
        out = language[f"{at}self_attn.o_proj.weight"].T.reshape(HEADS, -1, EMBED)
        rows.append(
            {
                "attention_norm": norm(language, at + "input_layernorm"),
                "attention": heads | {"out": {"w": out}},
                "mlp_norm": norm(language, at + "post_attention_layernorm"),
                "mlp": {n: linear(language, f"{at}mlp.{n}_proj") for n in ("gate", "up", "down")},
            }
        )
    missing = LLAVA.text.padded_vocab - VOCAB
    connector = under("model.multi_modal_projector.")
    return {
        "vision": clip_tree(under("model.vision_tower."), LAYERS - 1),
        "connector": {"up": linear(connector, "linear_1"), "down": linear(connector, "linear_2")},
        "text": {
            "embed": pad(language["embed_tokens.weight"], missing, padding),
            "blocks": stacked(rows),
            "norm": norm(language, "norm"),
            "unembed": pad(named["lm_head.weight"], missing, padding).T,
        },
    }


def test_llava():
    vision = transformers.CLIPVisionConfig(**SIZES, layer_norm_eps=CLIP.norm_eps)
    text = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=EMBED, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64,
        rms_norm_eps=LLAVA.text.norm_eps, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    settings = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=7, vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    with Float64():  # rotary frequencies, too, and so ours below
        model = drawn(lambda: transformers.LlavaForConditionalGeneration(settings))
    weights = llava_tree(tensors(model), 3.0)
    assert_mapped(weights, llava.defs(LLAVA))
    tokens = torch.randint(8, VOCAB, (BATCH, 40))
    tokens[:, 3:19] = 7  # two images, the second not in one piece
    tokens[:, 20:28] = tokens[:, 30:38] = 7
    batch = {"tokens": tokens, "images": images(BATCH, 2)}
    batch["targets"] = F.pad(tokens[:, 1:], (0, 1), value=nn.IGNORE_INDEX)
    llava.check_batch(LLAVA, batch)
    with Float64():
        logits = model(input_ids=tokens, pixel_values=batch["images"].flatten(0, 1)).logits
        ours = llava.forward(LLAVA, weights, tokens, batch["images"])[..., :VOCAB]
    assert_outputs_close(ours, logits)

    expected = F.cross_entropy(logits.mT, batch["targets"].masked_fill(batch["targets"] == 7, -100))
    loss = lambda w: llava.loss(LLAVA, w, batch) / llava.num_targets(LLAVA, batch)
    with Float64():
        value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=TOLERANCE, atol=0)
    names, leaves = zip(*model.named_parameters(), strict=True)
    theirs = torch.autograd.grad(expected, leaves, allow_unused=True)  # a block that is not read
    assert_leaves_close(grads, llava_tree(dict(zip(names, theirs, strict=True)), 0.0))
