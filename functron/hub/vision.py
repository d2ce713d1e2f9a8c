"""Formats of ViT with its head for classes, and of LLaVA: CLIP's transformer and a decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from functron.core.errors import Problem, nearest
from functron.hub.entries import (
    Entry,
    EntryError,
    Table,
    activation,
    architecture,
    fixed,
    is_a,
    only,
    read_entries,
    same,
    square,
    write_entries,
)
from functron.hub.format import (
    SQUARE,
    Format,
    Rule,
    Surplus,
    attention,
    config_problems,
    linear,
    mlp,
    norm,
    under,
)
from functron.hub.mixtures import DECODERS
from functron.models.family import FAMILIES
from functron.models.llava import LlavaConfig
from functron.models.vit import ViTConfig

_PATCHES = ("embed channels height width -> channels height width embed", "embed -> embed")
_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def _block(at: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """A block's tensors: its norms, queries, keys, values and output, and its MLP."""
    before, after, q, k, v, out, up, down = (f"{at}.{name}" for name in names)
    return (
        *norm(before, "blocks/attention_norm"),
        *attention("blocks/attention", q, k, v, out),
        *norm(after, "blocks/mlp_norm"),
        *mlp("blocks/mlp", up, down),
    )


def _vit_rules(block: tuple[Rule, ...]) -> tuple[Rule, ...]:
    at = "vit.embeddings"
    return (
        Rule(f"{at}.cls_token", "() () embed -> embed", ("class",)),
        Rule(f"{at}.position_embeddings", "() place embed -> place embed", ("positions",)),
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


def _read_labels(table: Table, _: Mapping) -> dict:
    """The number of classes: that of labels, which are called LABEL_0 and so on."""
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


VIT = Format(
    "vit",
    "ViTForImageClassification",
    _vit_rules(_block("vit.encoder.layer.{layer}", _STORED)),
    (
        architecture("ViTForImageClassification"),
        square("image_size", "image_size", 224),
        square("patch_size", "patch_size", 16),
        same("num_channels", "channels", 3),
        same("num_hidden_layers", "num_layers", 12),
        same("hidden_size", "embed_dim", 768),
        same("num_attention_heads", "num_heads", 12),
        same("intermediate_size", "mlp_dim", 3072),
        same("layer_norm_eps", "norm_eps", 1e-12),
        activation("hidden_act", "gelu", _ACTIVATIONS),
        Entry(_LABELS, ("num_classes",), _read_labels, _write_labels),
        only("qkv_bias", True, why="attention without biases"),
        fixed(patch_bias=True, pre_norm=False, final_norm=True),
    ),
    in_memory=_vit_rules(_block("vit.layers.{layer}", _LATER)),
    prefix="vit.",
    max_seq="",
    unused=(r"vit\.pooler\..*",),
    ignored=(
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_stride"),
        *("pooler_output_size", "pooler_act"),
    ),
    family=FAMILIES["vit"],
)

# --- LLaVA

_CLIP = ("q_proj", "k_proj", "v_proj", "out_proj")
_CLIP = ("layer_norm1", "layer_norm2", *(f"self_attn.{n}" for n in _CLIP), "mlp.fc1", "mlp.fc2")


def _clip_rules(at: str) -> tuple[Rule, ...]:
    """CLIP's vision transformer, without the norm after it."""
    places = f"{at}.embeddings.position_embedding.weight"
    found = (
        Rule(f"{at}.embeddings.class_embedding", "embed -> embed", ("class",)),
        *linear(f"{at}.embeddings.patch_embedding", "patches", *_PATCHES),
        Rule(places, "place embed -> place embed", ("positions",)),
        *norm(f"{at}.pre_layrnorm", "pre_norm"),
        *_block(f"{at}.encoder.layers.{{layer}}", _CLIP),
    )
    return under("vision", found)


_LLAVA_DECODERS: Mapping[str, Format] = {
    name: form for name, form in DECODERS.items() if form.prefix == "model."
}
"""Those that may be in a LLaVA: with Llama's names of a model's parts."""


def _fitting(config: LlavaConfig) -> list[Format]:
    """The formats that the decoder of a LLaVA may have."""
    return [form for form in _LLAVA_DECODERS.values() if not config_problems(config.text, form)]


def _llava_namings(config: LlavaConfig) -> list[tuple[Rule, ...]]:
    """Names as published; as transformers 5 writes them; and as they are in its memory."""
    found = []
    for form in _fitting(config):
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
            found.append((*_clip_rules(tower), *layers, *decoder))
    return found


_TOWER = (
    square("image_size", "image_size", 224),
    square("patch_size", "patch_size", 32),
    same("num_channels", "channels", 3),
    same("num_hidden_layers", "num_layers", 12),
    same("hidden_size", "embed_dim", 768),
    same("num_attention_heads", "num_heads", 12),
    same("intermediate_size", "mlp_dim", 3072),
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


def _part(table: Table, name: str, default: Table, known: Mapping | tuple) -> Table:
    """The config of a part, or the default where there is none, with the format it is of."""
    inner = table.get(name)
    if inner is None:
        return default
    if not isinstance(inner, Mapping):
        raise EntryError(Problem(name, type(inner).__name__, "a JSON object"))
    kind = str(inner.get("model_type", default["model_type"]))
    if kind not in known:
        wanted = "a model that ours can be"
        raise EntryError(Problem(f"{name}.model_type", repr(kind), wanted, nearest(kind, known)))
    return {**inner, "model_type": kind}


def _raise_within(part: str, found: list[Problem]) -> None:
    if found:
        raise EntryError(*(replace(problem, path=f"{part}.{problem.path}") for problem in found))


_VISION = ("vision_config", "vision_feature_layer")


def _read_vision(table: Table, _: Mapping) -> dict:
    """The vision transformer, with as many blocks as come before the features that are used."""
    inner = _part(table, _VISION[0], _FIRST, ("clip_vision_model",))
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


def _read_text(table: Table, _: Mapping) -> dict:
    """The decoder; that matrices are tied may stand in either config."""
    inner = _part(table, _TEXT[0], {"model_type": "llama"}, _LLAVA_DECODERS)
    if table.get(_TEXT[1]):
        inner = {**inner, _TEXT[1]: True}
    form = _LLAVA_DECODERS[str(inner["model_type"])]
    found: list[Problem] = []
    values = read_entries(form.entries, form.ignored, inner, found)
    _raise_within(_TEXT[0], found)
    return {"text": values}


def _write_text(config: LlavaConfig) -> dict:
    fit = _fitting(config)
    if not fit:
        wanted, fix = "a decoder of one of the families", "ask hub.format_for(config.text)"
        raise EntryError(Problem("text", "another", wanted, fix))
    inner = {"architectures": [fit[0].architecture], "model_type": fit[0].model_type}
    inner |= write_entries(fit[0].entries, config.text, [])
    return {_TEXT[0]: inner, _TEXT[1]: config.text.tied}


_IMAGE = ("image_token_index", "image_token_id")


def _read_image_token(table: Table, _: Mapping) -> dict:
    given = {table[name] for name in _IMAGE if table.get(name) is not None} or {32000}
    token = given.pop()
    if given or not is_a(token, int):
        got = " and ".join(map(repr, sorted({token, *given}, key=str)))
        raise EntryError(Problem(" and ".join(_IMAGE), got, "one token"))
    return {"image_token": token}


_AT = "vision_tower.vision_model"


def _is_surplus(config: LlavaConfig, name: str) -> bool:
    """Whether a tensor is of CLIP's norm of the class token or of blocks after the features."""
    tower = r"(?:model\.)?vision_tower\.(?:vision_model\.)?"
    if re.fullmatch(tower + r"(post_layernorm\.(weight|bias)|embeddings\.position_ids)", name):
        return True
    found = re.fullmatch(tower + r"encoder\.layers\.(\d+)\..*", name)
    return found is not None and int(found[1]) >= config.vision.num_layers


def _surplus_name(name: str) -> str:
    return re.sub(r"\A(?:model\.)?vision_tower\.(?:vision_model\.)?", f"{_AT}.", name)


def _surplus_constants(config: LlavaConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    shape = (config.vision.embed_dim,)
    return {f"{_AT}.post_layernorm.weight": (shape, 1), f"{_AT}.post_layernorm.bias": (shape, 0)}


LLAVA = Format(
    "llava",
    "LlavaForConditionalGeneration",
    (),
    (
        architecture("LlavaForConditionalGeneration"),
        Entry(_VISION, ("vision",), _read_vision, _write_vision),
        Entry(_TEXT, ("text",), _read_text, _write_text),
        Entry(_IMAGE, ("image_token",), _read_image_token, lambda c: {_IMAGE[0]: c.image_token}),
        # how many tokens an image is, which follows from its patches; processors read it
        Entry(("image_seq_length",), write=lambda c: {"image_seq_length": c.vision.num_patches}),
        activation("projector_hidden_act", "gelu"),
        only("multimodal_projector_bias", True, None, why="connector without biases"),
        only("vision_feature_select_strategy", "default", why="use of the class token"),
    ),
    prefix="",
    max_seq="",
    copies=((r"(language_model\.)?lm_head\.weight", "text/embed"),),
    ignored=("vocab_size", "ignore_index", "projection_dim"),
    naming=_llava_namings,
    surplus=Surplus(_is_surplus, _surplus_name, _surplus_constants),
    family=FAMILIES["llava"],
)
