"""Hugging Face formats of the zoo: BERT, T5, ViT, LLaVA, Mamba-2 and Nemotron-H.

Nemotron-H is a hybrid of Mamba-2 with attention and feed-forward layers. Parts that our models lack
are not read: BERT's pooler and next-sentence head, which transformers' model for masked tokens does
not use either. Dropout rates are not read, as a run configures them. Transformers computes two
things of state spaces differently:

* Step sizes: Mamba-2 limits them to ``time_step_limit``, Nemotron-H to at least ``time_step_min``.
  Our models have a lower limit only, `MambaConfig.dt_min`.
* ``residual_in_fp32``: the residual stream is float32 in models of 16 bits. Ours has the model's
  dtype, so the entry is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from functron.apps.zoo.llava import LlavaConfig
from functron.apps.zoo.mamba import MambaConfig
from functron.apps.zoo.t5 import T5Config
from functron.apps.zoo.vit import ViTConfig
from functron.core.errors import Problem, nearest
from functron.hub.entries import (
    ACTIVATIONS,
    NO_TOKENS,
    EntryError,
    HubEntry,
    HubTable,
    activation,
    architecture,
    derived,
    family_fix,
    fixed,
    is_a,
    only,
    read_entries,
    same,
    square,
    write_entries,
)
from functron.hub.format import (
    EMBED,
    OUT,
    SQUARE,
    UNEMBED,
    HubFormat,
    NameRule,
    Surplus,
    attention,
    config_problems,
    linear,
    mlp,
    norm,
    under,
)
from functron.hub.mixtures import DECODERS
from functron.models.family import families

# --- of text: BERT with its head for masked tokens, and T5, versions 1.0 and 1.1

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
_LAYER = "bert.encoder.layer.{layer}"
_PLACES = "place embed -> place embed"
_ATTENTION = ("self.query", "self.key", "self.value", "output.dense")

BERT_RULES = (
    NameRule(f"{_EMBEDDINGS}.word_embeddings.weight", EMBED, ("embed",)),
    NameRule(f"{_EMBEDDINGS}.position_embeddings.weight", _PLACES, ("positions",)),
    NameRule(f"{_EMBEDDINGS}.token_type_embeddings.weight", _PLACES, ("types",)),
    *norm(f"{_EMBEDDINGS}.LayerNorm", "embed_norm"),
    *attention("blocks/attention", *(f"{_LAYER}.attention.{name}" for name in _ATTENTION)),
    *norm(f"{_LAYER}.attention.output.LayerNorm", "blocks/attention_norm"),
    *mlp("blocks/mlp", f"{_LAYER}.intermediate.dense", f"{_LAYER}.output.dense"),
    *norm(f"{_LAYER}.output.LayerNorm", "blocks/mlp_norm"),
    *linear(f"{_HEAD}.transform.dense", "head/dense", *SQUARE),
    *norm(f"{_HEAD}.transform.LayerNorm", "head/norm"),
    NameRule(f"{_HEAD}.bias", "vocab -> vocab", ("head/bias",)),
)


def _rename_norms(rule: NameRule) -> NameRule:
    """The rule for the first published BERTs, whose norms have TensorFlow's names."""
    name = rule.name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return replace(rule, name=name.replace("LayerNorm.bias", "LayerNorm.beta"))


BERT = HubFormat(
    "bert",
    "BertForMaskedLM",
    BERT_RULES,
    (
        architecture("BertForMaskedLM", "BertForPreTraining"),
        same("vocab_size", "vocab_size", 30522),
        same("hidden_size", "embed_dim", 768),
        same("num_hidden_layers", "num_layers", 12),
        same("num_attention_heads", "num_heads", 12),
        same("intermediate_size", "mlp_dim", 3072),
        same("max_position_embeddings", "max_seq", 512),
        same("type_vocab_size", "num_types", 2),
        same("layer_norm_eps", "norm_eps", 1e-12),
        activation("hidden_act", "gelu"),
        only("position_embedding_type", "absolute", why="relative positions"),
        only("tie_word_embeddings", True, why="head apart from the embedding"),
        only("is_decoder", False, why="mask of later tokens"),
        only("add_cross_attention", False, why="attention to another sequence"),
        only("is_encoder_decoder", False, why="decoder"),
    ),
    naming=lambda *_: (BERT_RULES, tuple(map(_rename_norms, BERT_RULES))),
    prefix="bert.",
    unused=(
        r"bert\.pooler\..*",
        r"cls\.seq_relationship\..*",
        r"bert\.embeddings\.position_ids",
    ),
    copies=(
        (r"cls\.predictions\.decoder\.weight", "embed"),
        (r"cls\.predictions\.decoder\.bias", "head/bias"),
    ),
    ignored=(
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type", "directionality", "gradient_checkpointing"),
    ),
    family=families()["bert"],
)


def _make_stack_rules(stack: str, gated: bool) -> list[NameRule]:
    """The rules of T5's encoder or decoder."""
    ours, cross = f"{stack}/blocks", stack == "decoder"
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = [NameRule(table, "bucket heads -> bucket heads", (f"{stack}/relative",))]
    parts = [("attention_norm", "attention", "SelfAttention")]
    parts += [("cross_norm", "cross", "EncDecAttention")] if cross else []
    for number, (before, path, name) in enumerate(parts):
        at = f"{stack}.block.{{layer}}.layer.{number}"
        found += norm(f"{at}.layer_norm", f"{ours}/{before}")
        found += attention(f"{ours}/{path}", *(f"{at}.{name}.{n}" for n in "qkvo"))
    at = f"{stack}.block.{{layer}}.layer.{len(parts)}"
    names = ("wi_0", "wi_1", "wo") if gated else ("wi", "wo")
    found += norm(f"{at}.layer_norm", f"{ours}/mlp_norm")
    found += mlp(f"{ours}/mlp", *(f"{at}.DenseReluDense.{name}" for name in names))
    return [*found, *norm(f"{stack}.final_layer_norm", f"{stack}/norm")]


def make_t5_rules(gated: bool) -> tuple[NameRule, ...]:
    """T5's rules: of version 1.1 if gated, else of version 1.0."""
    stacks = (*_make_stack_rules("encoder", gated), *_make_stack_rules("decoder", gated))
    unembed = NameRule("lm_head.weight", UNEMBED, ("unembed",))
    return (NameRule("shared.weight", EMBED, ("embed",)), *stacks, unembed)


_FORWARD = ("feed_forward_proj", "dense_act_fn", "is_gated_act")
_GATED = {f"gated-{name}": ours for name, ours in ACTIVATIONS.items() if name != "gelu"}
_FORWARD_NAMES: Mapping[str, str] = {**ACTIVATIONS, "gated-gelu": "gelu_tanh", **_GATED}
"""Such as ``relu``, or ``gated-gelu``, which means the tanh approximation of gelu."""


def _read_forward(table: HubTable, _: Mapping) -> dict:
    value = table.get(_FORWARD[0], "relu")
    if not isinstance(value, str) or value not in _FORWARD_NAMES:
        wanted, fix = "one that our model has", nearest(str(value), _FORWARD_NAMES)
        raise EntryError(Problem(_FORWARD[0], repr(value), wanted, fix))
    ours, gated = _FORWARD_NAMES[value], value.startswith("gated-")
    # transformers 5 writes two entries that it derives from this one, and reads those later
    act, gate = table.get(_FORWARD[1]), table.get(_FORWARD[2], gated)
    if (act is not None and ACTIVATIONS.get(act) != ours) or gate is not gated:
        got, wanted = f"{act!r} and {gate!r}", f"those of {_FORWARD[0]}={value!r}"
        raise EntryError(Problem(f"{_FORWARD[1]} and {_FORWARD[2]}", got, wanted, "leave them out"))
    return {"activation": ours, "gated": gated}


def _write_forward(config: T5Config) -> dict:
    here = [name for name, ours in _FORWARD_NAMES.items() if ours == config.activation]
    here = [name for name in here if name.startswith("gated-") == config.gated]
    if not here:
        got = f"{config.activation!r} with gated={config.gated}"
        raise EntryError(Problem("activation", got, f"one of {', '.join(_FORWARD_NAMES)}"))
    act = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    return dict(zip(_FORWARD, (here[0], act, config.gated), strict=True))


_TIED = ("tie_word_embeddings", "scale_decoder_outputs")


def _read_tied(table: HubTable, _: Mapping) -> dict:
    """Whether the decoder's output is divided by sqrt(d_model): so it is where matrices are tied.

    Transformers 5 writes that matrices are tied in any case, and reads a head where files have one.
    """
    tied = table.get(_TIED[0], True)
    scaled = table.get(_TIED[1], tied)
    if not isinstance(scaled, bool) or not isinstance(tied, bool) or (scaled and not tied):
        got = f"{tied!r} and {scaled!r}"
        wanted = "true and true (1.0), or false: our model divides if matrices are tied"
        raise EntryError(Problem(" and ".join(_TIED), got, wanted))
    return {"tied": scaled}


_START = ("decoder_start_token_id", "pad_token_id")


def _read_start(table: HubTable, _: Mapping) -> dict:
    """The first token of the decoder's input; the padding token where it is not given."""
    start = next((table[name] for name in _START if table.get(name) is not None), 0)
    if not isinstance(start, int):
        raise EntryError(Problem(_START[0], repr(start), "a token"))
    return {"start_id": start}


T5 = HubFormat(
    "t5",
    "T5ForConditionalGeneration",
    (),
    (
        architecture("T5ForConditionalGeneration", "T5WithLMHeadModel"),
        same("vocab_size", "vocab_size", 32128),
        same("d_model", "embed_dim", 512),
        same("num_layers", "num_layers", 6),
        derived("num_decoder_layers", "decoder_layers", None, lambda c: c.layers["decoder"]),
        same("num_heads", "num_heads", 8),
        derived("d_kv", "head_dim", 64, lambda c: c.attention.head_size),
        same("d_ff", "mlp_dim", 2048),
        same("relative_attention_num_buckets", "num_buckets", 32),
        same("relative_attention_max_distance", "max_distance", 128),
        same("layer_norm_epsilon", "norm_eps", 1e-6),
        HubEntry(_FORWARD, ("activation", "gated"), _read_forward, _write_forward),
        HubEntry(_TIED, ("tied",), _read_tied, lambda c: dict.fromkeys(_TIED, c.tied)),
        HubEntry(_START, ("start_id",), _read_start, lambda c: dict.fromkeys(_START, c.start_id)),
        only("is_encoder_decoder", True, why="encoder or decoder alone"),
        only("is_decoder", False, why="decoder alone"),
    ),
    naming=lambda config, _: (make_t5_rules(config.gated),),
    prefix="",
    max_seq="",
    # a table of the first published T5s, which is not used
    unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    copies=(
        (r"(encoder|decoder)\.embed_tokens\.weight", "embed"),
        (r"lm_head\.weight", "embed"),
    ),
    # transformers 5 ties what it makes in any case
    stand_ins=(("lm_head.weight", "shared.weight"),),
    ignored=(
        *("dropout_rate", "classifier_dropout", "initializer_factor", "n_positions"),
        *("output_past", "gradient_checkpointing"),
    ),
    family=families()["t5"],
)


# --- of images: ViT with its head for classes, and LLaVA, CLIP's transformer and a decoder

_PATCHES = ("embed channels height width -> channels height width embed", "embed -> embed")
_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def _make_block_rules(at: str, names: tuple[str, ...]) -> tuple[NameRule, ...]:
    """A block's tensors: its norms, queries, keys, values and output, and its MLP."""
    before, after, q, k, v, out, up, down = (f"{at}.{name}" for name in names)
    return (
        *norm(before, "blocks/attention_norm"),
        *attention("blocks/attention", q, k, v, out),
        *norm(after, "blocks/mlp_norm"),
        *mlp("blocks/mlp", up, down),
    )


def _make_vit_rules(block: tuple[NameRule, ...]) -> tuple[NameRule, ...]:
    at = "vit.embeddings"
    return (
        NameRule(f"{at}.cls_token", "() () embed -> embed", ("class",)),
        NameRule(f"{at}.position_embeddings", "() place embed -> place embed", ("positions",)),
        *linear(f"{at}.patch_embeddings.projection", "patches", *_PATCHES),
        *block,
        *norm("vit.layernorm", "norm"),
        *linear("classifier", "head", "vocab embed -> embed vocab", "vocab -> vocab"),
    )


_NORMS = ("layernorm_before", "layernorm_after")
_STORED = tuple(f"attention.{n}" for n in ("attention.query", "attention.key", "attention.value"))
_STORED = (*_NORMS, *_STORED, "attention.output.dense", "intermediate.dense", "output.dense")
_LATER = tuple(f"attention.{n}_proj" for n in "qkvo")
_LATER = (*_NORMS, *_LATER, "mlp.fc1", "mlp.fc2")


_LABELS = ("id2label", "label2id", "num_labels")


def _read_labels(table: HubTable, _: Mapping) -> dict:
    """The number of classes, which is that of the labels."""
    labels, count = table.get(_LABELS[0]), table.get(_LABELS[2])
    found = len(labels) if isinstance(labels, Mapping) else count if count is not None else 2
    if not is_a(found, int) or found < 1 or (labels and count not in (None, found)):
        got = f"{found!r} labels, num_labels={count!r}"
        raise EntryError(Problem("id2label", got, "a label for each class"))
    return {"num_classes": found}


def _write_labels(config: ViTConfig) -> dict:
    if not config.num_classes:
        raise EntryError(Problem("num_classes", "0", "classes, in this family"))
    names = [f"LABEL_{i}" for i in range(config.num_classes)]
    by_name = {name: i for i, name in enumerate(names)}
    return {_LABELS[0]: {str(i): name for i, name in enumerate(names)}, _LABELS[1]: by_name}


_SIZES = (
    same("num_channels", "channels", 3),
    same("num_hidden_layers", "num_layers", 12),
    same("hidden_size", "embed_dim", 768),
    same("num_attention_heads", "num_heads", 12),
    same("intermediate_size", "mlp_dim", 3072),
)
"""The sizes of ViT and of CLIP's vision transformer, which have the same defaults."""

VIT = HubFormat(
    "vit",
    "ViTForImageClassification",
    _make_vit_rules(_make_block_rules("vit.encoder.layer.{layer}", _STORED)),
    (
        architecture("ViTForImageClassification"),
        square("image_size", "image_size", 224),
        square("patch_size", "patch_size", 16),
        *_SIZES,
        same("layer_norm_eps", "norm_eps", 1e-12),
        activation("hidden_act", "gelu", _ACTIVATIONS),
        HubEntry(_LABELS, ("num_classes",), _read_labels, _write_labels),
        only("qkv_bias", True, why="attention without biases"),
        fixed(patch_bias=True, pre_norm=False, final_norm=True),
    ),
    in_memory=_make_vit_rules(_make_block_rules("vit.layers.{layer}", _LATER)),
    prefix="vit.",
    max_seq="",
    unused=(r"vit\.pooler\..*",),
    ignored=(
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride"),
        *("pooler_output_size", "pooler_act"),
    ),
    family=families()["vit"],
)

# --- LLaVA

_CLIP = ("q_proj", "k_proj", "v_proj", "out_proj")
_CLIP = ("layer_norm1", "layer_norm2", *(f"self_attn.{n}" for n in _CLIP), "mlp.fc1", "mlp.fc2")


def _make_clip_rules(at: str) -> tuple[NameRule, ...]:
    """The rules of CLIP's vision transformer, without its last norm."""
    places = f"{at}.embeddings.position_embedding.weight"
    found = (
        NameRule(f"{at}.embeddings.class_embedding", "embed -> embed", ("class",)),
        *linear(f"{at}.embeddings.patch_embedding", "patches", *_PATCHES),
        NameRule(places, "place embed -> place embed", ("positions",)),
        *norm(f"{at}.pre_layrnorm", "pre_norm"),
        *_make_block_rules(f"{at}.encoder.layers.{{layer}}", _CLIP),
    )
    return under("vision", found)


_LLAVA_DECODERS: Mapping[str, HubFormat] = {
    name: form
    for name, form in DECODERS.items()
    if form.prefix == "model." and form.surplus is None and name not in ("granite", "phi")
}
"""Those that may be in a LLaVA: with Llama's names of a model's parts, and no tensors beside ours.

Granite multiplies features of images as it does tokens, and Phi's head has a bias.
"""
_OF_HEADS: Mapping[str, Any] = {"logit_cap": 0.0, "logit_scale": 1.0}
"""Options of decoders' heads that LLaVA's has not, at the values that do nothing."""


def _find_decoders(config: LlavaConfig) -> list[HubFormat]:
    """The formats that the decoder of a LLaVA may have."""
    return [form for form in _LLAVA_DECODERS.values() if not config_problems(config.text, form)]


def _list_llava_namings(config: LlavaConfig, table: HubTable) -> list[tuple[NameRule, ...]]:
    """Names as published; as transformers 5 writes them; and as they are in its memory.

    Of decoders that fit, that of config.json comes first: Phi-3's names are other than Llama's.
    """
    found, here = [], (table.get(_TEXT[0]) or {}).get("model_type")
    for form in sorted(_find_decoders(config), key=lambda form: form.model_type != here):
        text = under("text", form.rules)
        stored = tuple(replace(r, name=f"language_model.{r.name}") for r in text)
        memory = tuple(
            replace(r, name=re.sub(r"\Amodel\.", "model.language_model.", r.name)) for r in text
        )
        for tower, connector, decoder in (
            (_AT, "multi_modal_projector", stored),
            ("vision_tower", "multi_modal_projector", stored),
            ("model.vision_tower", "model.multi_modal_projector", memory),
        ):
            layers = (
                *linear(f"{connector}.linear_1", "connector/up", *SQUARE),
                *linear(f"{connector}.linear_2", "connector/down", *SQUARE),
            )
            found.append((*_make_clip_rules(tower), *layers, *decoder))
    return found


_TOWER = (
    square("image_size", "image_size", 224),
    square("patch_size", "patch_size", 32),
    *_SIZES,
    same("layer_norm_eps", "norm_eps", 1e-5),
    activation("hidden_act", "quick_gelu", _ACTIVATIONS),
    fixed(patch_bias=False, pre_norm=True, final_norm=False, num_classes=0),
)
"""The entries of CLIP's vision transformer."""
_FIRST = {
    "model_type": "clip_vision_model",
    "image_size": 336,
    "patch_size": 14,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
"""The transformer that transformers takes where the config of a LLaVA has none."""
_UNREAD = ("projection_dim", "initializer_factor", "vocab_size", "dropout")


def _read_part(table: HubTable, name: str, default: HubTable, known: Mapping | tuple) -> HubTable:
    """The config of a part, or the default where there is none, with the format it is of."""
    inner = table.get(name)
    if inner is None:
        return default
    if not isinstance(inner, Mapping):
        raise EntryError(Problem(name, type(inner).__name__, "a JSON object"))
    kind = str(inner.get("model_type", default["model_type"]))
    if kind not in known:
        wanted = "a model that ours can be"
        fix = family_fix(kind, known)
        raise EntryError(Problem(f"{name}.model_type", repr(kind), wanted, fix))
    return {**inner, "model_type": kind}


def _raise_within(part: str, found: list[Problem]) -> None:
    if found:
        raise EntryError(*(replace(problem, path=f"{part}.{problem.path}") for problem in found))


_VISION = ("vision_config", "vision_feature_layer")


def _read_vision(table: HubTable, _: Mapping) -> dict:
    """The vision transformer, with as many blocks as come before the features that are used."""
    inner = _read_part(table, _VISION[0], _FIRST, ("clip_vision_model",))
    found: list[Problem] = []
    values = read_entries(_TOWER, _UNREAD, inner, found)
    blocks, used = values.get("num_layers", 1), table.get(_VISION[1], -2)
    _raise_within(_VISION[0], found)
    if not is_a(used, int) or not 1 <= (used if used >= 0 else blocks + 1 + used) <= blocks:
        wanted = f"the result of one of the {blocks} blocks, such as -2"
        raise EntryError(Problem(_VISION[1], repr(used), wanted))
    # transformers counts what the blocks begin with as the first result
    return {"vision": {**values, "num_layers": used if used >= 0 else blocks + 1 + used}}


def _write_vision(config: LlavaConfig) -> dict:
    found: list[Problem] = []
    inner = {"model_type": "clip_vision_model"} | write_entries(_TOWER, config.vision, found)
    _raise_within("vision", found)
    return {_VISION[0]: inner, _VISION[1]: -1}


_TEXT = ("text_config", "tie_word_embeddings")


def _read_text(table: HubTable, _: Mapping) -> dict:
    """The decoder; either config may say that matrices are tied."""
    inner = _read_part(table, _TEXT[0], {"model_type": "llama"}, _LLAVA_DECODERS)
    if table.get(_TEXT[1]):
        inner = {**inner, _TEXT[1]: True}
    form = _LLAVA_DECODERS[str(inner["model_type"])]
    found: list[Problem] = []
    values = read_entries(form.entries, form.ignored, inner, found)
    _raise_within(_TEXT[0], found)
    # the head of transformers' LLaVA neither caps logits, as a Gemma's does, nor scales them
    return {"text": {name: value for name, value in values.items() if name not in _OF_HEADS}}


def _write_text(config: LlavaConfig) -> dict:
    found = [
        Problem(f"text.{name}", str(value), f"{plain:g}: the head of this family does not")
        for name, plain in _OF_HEADS.items()
        if (value := getattr(config.text, name)) != plain
    ]
    if found:
        raise EntryError(*found)
    fit = _find_decoders(config)
    if not fit:  # the problems of the nearest format
        found = [config_problems(config.text, form) for form in _LLAVA_DECODERS.values()]
        _raise_within("text", min(found, key=len))
    inner = {"architectures": [fit[0].architecture], "model_type": fit[0].model_type, **NO_TOKENS}
    inner |= write_entries(fit[0].entries, config.text, [])
    return {_TEXT[0]: inner, _TEXT[1]: config.text.tied}


_IMAGE = ("image_token_index", "image_token_id")


def _read_image_token(table: HubTable, _: Mapping) -> dict:
    given = {table[name] for name in _IMAGE if table.get(name) is not None} or {32000}
    token = given.pop()
    if given or not is_a(token, int):
        got = " and ".join(map(repr, sorted({token, *given}, key=str)))
        raise EntryError(Problem(" and ".join(_IMAGE), got, "one token"))
    return {"image_token": token}


_AT = "vision_tower.vision_model"


def _is_surplus(config: LlavaConfig, name: str) -> bool:
    """Whether a tensor is CLIP's norm of the class token, or of a block after the features."""
    tower = r"(?:model\.)?vision_tower\.(?:vision_model\.)?"
    if re.fullmatch(tower + r"(post_layernorm\.(weight|bias)|embeddings\.position_ids)", name):
        return True
    found = re.fullmatch(tower + r"encoder\.layers\.(\d+)\..*", name)
    return found is not None and int(found[1]) >= config.vision.num_layers


def _name_surplus(name: str) -> str:
    return re.sub(r"\A(?:model\.)?vision_tower\.(?:vision_model\.)?", f"{_AT}.", name)


def _make_surplus(config: LlavaConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    shape = (config.vision.embed_dim,)
    return {f"{_AT}.post_layernorm.weight": (shape, 1), f"{_AT}.post_layernorm.bias": (shape, 0)}


LLAVA = HubFormat(
    "llava",
    "LlavaForConditionalGeneration",
    (),
    (
        architecture("LlavaForConditionalGeneration"),
        HubEntry(_VISION, ("vision",), _read_vision, _write_vision),
        HubEntry(_TEXT, ("text",), _read_text, _write_text),
        HubEntry(_IMAGE, ("image_token",), _read_image_token, lambda c: {_IMAGE[0]: c.image_token}),
        # the number of tokens of an image, which processors read, follows from its patches
        HubEntry(("image_seq_length",), write=lambda c: {"image_seq_length": c.vision.num_patches}),
        activation("projector_hidden_act", "gelu"),
        only("multimodal_projector_bias", True, None, why="connector without biases"),
        only("vision_feature_select_strategy", "default", why="use of the class token"),
    ),
    prefix="",
    max_seq="",
    copies=((r"(language_model\.)?lm_head\.weight", "text/embed"),),
    ignored=("vocab_size", "ignore_index", "projection_dim"),
    naming=_list_llava_namings,
    surplus=Surplus(_is_surplus, _name_surplus, _make_surplus),
    family=families()["llava"],
)

# --- state spaces: Mamba-2, and its hybrid Nemotron-H

_PROJECTED = ("z", "x", "b", "c", "dt")
_CONVOLVED = ("x", "b", "c")
_MIXER_HEAD, _GROUP = "heads head", "groups state"
_INNER: Mapping[str, str] = {
    "z": _MIXER_HEAD,
    "x": _MIXER_HEAD,
    "b": _GROUP,
    "c": _GROUP,
    "dt": "heads",
}


def _fuse(name: str, kind: str, parts: tuple[str, ...], at: str, dims: str) -> NameRule:
    """The rule of a tensor that is the concatenation of the leaves of `parts`."""
    all_dims = tuple(dims.format(_INNER[part]) for part in parts)
    return NameRule(name, all_dims, tuple(f"mamba/mixer/{at}{part}/{kind}" for part in parts))


def _make_mamba_rules(base: str) -> tuple[NameRule, ...]:
    """The rules of all layers, under ``backbone`` or ``model``."""
    layer = f"{base}.layers.{{layer}}"
    mixer, ours = f"{layer}.mixer", "mamba/mixer"
    each = "heads -> heads"
    return (
        NameRule(f"{base}.embeddings.weight", EMBED, ("embed",)),
        *norm(f"{layer}.norm", "mamba/norm"),
        _fuse(f"{mixer}.in_proj.weight", "w", _PROJECTED, "", "({0}) embed -> embed {0}"),
        _fuse(f"{mixer}.in_proj.bias", "b", _PROJECTED, "", "({0}) -> {0}"),
        _fuse(f"{mixer}.conv1d.weight", "w", _CONVOLVED, "conv/", "({0}) () width -> {0} width"),
        _fuse(f"{mixer}.conv1d.bias", "b", _CONVOLVED, "conv/", "({0}) -> {0}"),
        NameRule(f"{mixer}.A_log", each, (f"{ours}/a_log",)),
        NameRule(f"{mixer}.D", each, (f"{ours}/d",)),
        NameRule(f"{mixer}.dt_bias", each, (f"{ours}/dt_bias",)),
        NameRule(
            f"{mixer}.norm.weight", f"({_MIXER_HEAD}) -> {_MIXER_HEAD}", (f"{ours}/norm/scale",)
        ),
        *linear(f"{mixer}.out_proj", f"{ours}/out", *OUT),
        *norm(f"{layer}.norm", "attention/norm"),
        *attention("attention/mixer", *(f"{mixer}.{name}_proj" for name in "qkvo")),
        *norm(f"{layer}.norm", "mlp/norm"),
        *mlp("mlp/mixer", f"{mixer}.up_proj", f"{mixer}.down_proj"),
        *norm(f"{base}.norm_f", "norm"),
        NameRule("lm_head.weight", UNEMBED, ("unembed",)),
    )


def _read_count(table: HubTable, _: Mapping) -> dict:
    """Mamba-2's pattern: all layers are state spaces."""
    count = table.get("num_hidden_layers", 64)
    if not is_a(count, int) or count < 1:
        raise EntryError(Problem("num_hidden_layers", repr(count), "a whole number from 1 on"))
    return {"pattern": "M" * count}


def _write_count(config: MambaConfig) -> dict:
    if set(config.pattern) != {"M"}:
        raise EntryError(Problem("pattern", repr(config.pattern), "only M in this family"))
    return {"num_hidden_layers": len(config.pattern)}


_LAYERS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "mamba": "M",
    "attention": "*",
}
"""Letters of a pattern by transformers' names of layers: of version 5, then older ones."""
_PATTERN = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")


def _read_pattern(table: HubTable, _: Mapping) -> dict:
    """Nemotron-H's pattern, from a list of names of layers or as it is."""
    types, pattern = table.get(_PATTERN[0]), table.get(_PATTERN[1])
    name, found = (_PATTERN[0], types) if types is not None else (_PATTERN[1], pattern)
    letters = [_LAYERS.get(str(kind)) for kind in types or ()] or list(pattern or "")
    others = [str(kind) for kind in found or () if kind not in {*_LAYERS, *_LAYERS.values()}]
    if others or not letters:
        got = ", ".join(sorted(set(others))) or repr(found)
        wanted = "state spaces (M), attention (*) and feed-forward layers (-)"
        raise EntryError(Problem(name, got, wanted, "our model has no others"))
    return {"pattern": "".join(str(letter) for letter in letters)}


def _write_pattern(config: MambaConfig) -> dict:
    names = {letter: name for name, letter in reversed([*_LAYERS.items()])}
    types = [names[letter] for letter in config.pattern]
    return dict(zip(_PATTERN, (types, config.pattern, len(types)), strict=True))


def _make_step_limits(*, lower: bool) -> HubEntry:
    """Limits of step sizes: Mamba-2 has a lower one; Nemotron-H has none in this entry."""
    theirs = "time_step_limit"

    def read(table: HubTable, _: Mapping) -> dict:
        value = table.get(theirs) or [0.0, math.inf]
        limits = [_read_number(each) for each in value] if isinstance(value, list) else []
        if len(limits) != 2 or limits[0] is None or limits[1] != math.inf:
            wanted, fix = "a number and infinity", "our model has no upper limit"
            raise EntryError(Problem(theirs, repr(value), wanted, fix))
        if not lower and limits[0] != 0:
            wanted = "0 and infinity: time_step_min is the limit"
            raise EntryError(Problem(theirs, repr(value), wanted))
        return {"dt_min": limits[0]} if lower else {}

    def write(config: MambaConfig) -> dict:
        return {theirs: [config.dt_min, {"__float__": "Infinity"}]} if lower else {}

    return HubEntry((theirs,), ("dt_min",) if lower else (), read, write)


def _read_number(value: Any) -> float | None:
    """A number of JSON; infinity as transformers 5 or older versions write it."""
    if isinstance(value, Mapping):
        return math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if is_a(value, float) else None


def _read_expand(table: HubTable, values: Mapping) -> dict:
    """Check that the inner width is this multiple of the stream's, as Mamba-2 requires."""
    expand = table.get("expand", 2)
    inner = values.get("num_heads", 0) * values.get("head_dim", 0)
    if inner != values.get("embed_dim", 0) * (expand if is_a(expand, int) else 0):
        wanted = f"{inner}, num_heads times head_dim, over hidden_size"
        raise EntryError(Problem("expand", repr(expand), wanted))
    return {}


def _write_expand(config: MambaConfig) -> dict:
    inner = config.num_heads * config.head_dim
    if inner % config.embed_dim:
        wanted = f"a multiple of embed_dim={config.embed_dim} in this family"
        raise EntryError(Problem("num_heads times head_dim", str(inner), wanted))
    return {"expand": inner // config.embed_dim}


_BIASES: Mapping[str, str] = {"use_bias": "M", "attention_bias": "*", "mlp_bias": "-"}


def _read_biases(table: HubTable, values: Mapping) -> dict:
    """Nemotron-H's biases by kind of layer; our model has them on all kinds or on none."""
    pattern = values.get("pattern", "")
    used = {name: bool(table.get(name)) for name, kind in _BIASES.items() if kind in pattern}
    if len(set(used.values())) > 1:
        got = ", ".join(f"{name}={value}" for name, value in used.items())
        wanted = "the same: our model has biases on all linear layers or none"
        raise EntryError(Problem("biases", got, wanted))
    return {"bias": any(used.values())}


_SHARED = (
    same("hidden_size", "embed_dim", 4096),
    same("n_groups", "num_groups", 8),
    same("conv_kernel", "conv_width", 4),
    same("use_conv_bias", "conv_bias", True),
    same("layer_norm_epsilon", "norm_eps", 1e-5),
    same("tie_word_embeddings", "tied", False),
)
_IGNORED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor"),
    *("time_step_rank", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    *("hidden_dropout", "max_position_embeddings"),
)
_TIED_HEAD = ((r"lm_head\.weight", "embed"),)

MAMBA2 = HubFormat(
    "mamba2",
    "Mamba2ForCausalLM",
    _make_mamba_rules("backbone"),
    (
        architecture("Mamba2ForCausalLM"),
        HubEntry(("num_hidden_layers",), ("pattern",), _read_count, _write_count),
        same("vocab_size", "vocab_size", 32768),
        *_SHARED,
        same("num_heads", "num_heads", 128),
        same("head_dim", "head_dim", 64),
        same("state_size", "state_dim", 128),
        same("chunk_size", "chunk", 256),
        same("use_bias", "bias", False),
        _make_step_limits(lower=True),
        HubEntry(("expand",), (), _read_expand, _write_expand),
        only("hidden_act", "silu", "swish", why="other activation of state spaces"),
        only("rms_norm", True, why="state space without its norm"),
    ),
    prefix="backbone.",
    max_seq="",
    copies=_TIED_HEAD,
    ignored=(*_IGNORED, "time_step_min", "norm_before_gate"),  # transformers norms after the gate
    family=families()["mamba"],
)
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "output_router_logits", "moe_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
"""Entries about experts, which `_read_pattern` refuses, and about modules that predict tokens
further ahead."""

NEMOTRON_H = HubFormat(
    "nemotron_h",
    "NemotronHForCausalLM",
    _make_mamba_rules("backbone"),
    (
        architecture("NemotronHForCausalLM"),
        HubEntry(_PATTERN, ("pattern",), _read_pattern, _write_pattern),
        same("vocab_size", "vocab_size", 131072),
        *_SHARED,
        same("mamba_num_heads", "num_heads", 128),
        same("mamba_head_dim", "head_dim", 64),
        same("ssm_state_size", "state_dim", 128),
        same("chunk_size", "chunk", 128),
        same("time_step_min", "dt_min", 0.001),
        same("num_attention_heads", "attention_heads", 32),
        derived("num_key_value_heads", "attention_kv_heads", 8, lambda c: c.kv_heads),
        derived("head_dim", "attention_head_dim", 128, lambda c: c.attention.head_size),
        same("intermediate_size", "mlp_dim", 21504),
        activation("mlp_hidden_act", "relu2"),
        _make_step_limits(lower=False),
        HubEntry(tuple(_BIASES), ("bias",), _read_biases, lambda c: dict.fromkeys(_BIASES, c.bias)),
        fixed(gated=False),
        only("mamba_hidden_act", "silu", "swish", why="other activation of state spaces"),
        only("mamba_proj_bias", False, None, why="biases of state spaces alone"),
        only("sliding_window", None, why="window in attention layers"),
        only("num_nextn_predict_layers", 0, why="modules for tokens further ahead"),
    ),
    in_memory=_make_mamba_rules("model"),
    prefix="backbone.",
    max_seq="",
    copies=_TIED_HEAD,
    ignored=(*_IGNORED, *_OF_EXPERTS, "expand", "auto_map"),
    family=families()["mamba"],
)


def list_formats() -> tuple[HubFormat, ...]:
    """All formats of the zoo; of those that fit a model, the first is chosen."""
    return MAMBA2, NEMOTRON_H, BERT, T5, VIT, LLAVA
