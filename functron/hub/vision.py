"""ViT with its head for classes, and LLaVA: CLIP's vision transformer and a decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from functron.core.errors import Problem, nearest
from functron.hub import settings
from functron.hub import settings as entries
from functron.hub.families import FAMILIES
from functron.hub.family import (
    DOWN,
    HEADS,
    OUT,
    UP,
    Family,
    Rule,
    Surplus,
    config_problems,
    linear,
    norm,
)
from functron.hub.kinds import LLAVA as LLAVAS
from functron.hub.kinds import VIT as VITS
from functron.hub.settings import Aspect, Table, is_a
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
    """A block's tensors: its norms, queries, keys, values and what they become, and its MLP."""
    before, after, q, k, v, out, up, down = (f"{at}.{name}" for name in names)
    return (
        *norm(before, "blocks/attention_norm"),
        *linear(q, "blocks/attention/q", *HEADS),
        *linear(k, "blocks/attention/k", *HEADS),
        *linear(v, "blocks/attention/v", *HEADS),
        *linear(out, "blocks/attention/out", *OUT),
        *norm(after, "blocks/mlp_norm"),
        *linear(up, "blocks/mlp/up", *UP),
        *linear(down, "blocks/mlp/down", *DOWN),
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


def _labels() -> Aspect:
    """How many classes there are: as many as labels, which are called LABEL_0 and so on."""
    theirs = ("id2label", "label2id", "num_labels")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        labels, count = table.get(theirs[0]), table.get(theirs[2])
        found = len(labels) if isinstance(labels, Mapping) else count if count is not None else 2
        if not is_a(found, int) or found < 1 or (labels and count not in (None, found)):
            got = f"{found!r} labels, num_labels={count!r}"
            problems.append(Problem("id2label", got, "a label for each class"))
            return {}
        return {"num_classes": found}

    def write(config: ViTConfig, problems: list[Problem]) -> dict:
        if not config.num_classes:
            problems.append(Problem("num_classes", "0", "classes, in this family"))
        names = [f"LABEL_{i}" for i in range(config.num_classes)]
        by_name = {name: i for i, name in enumerate(names)}
        return {theirs[0]: {str(i): name for i, name in enumerate(names)}, theirs[1]: by_name}

    return Aspect(theirs, ("num_classes",), read, write)


_same = settings.same
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

VIT = Family(
    "vit",
    "ViTForImageClassification",
    _vit_rules(_block("vit.encoder.layer.{layer}", _STORED)),
    (
        entries.architecture("ViTForImageClassification"),
        entries.square("image_size", "image_size", 224),
        entries.square("patch_size", "patch_size", 16),
        _same("num_channels", "channels", 3),
        _same("num_hidden_layers", "num_layers", 12),
        _same("hidden_size", "embed_dim", 768),
        _same("num_attention_heads", "num_heads", 12),
        _same("intermediate_size", "mlp_dim", 3072),
        _same("layer_norm_eps", "norm_eps", 1e-12),
        entries.choice("hidden_act", "activation", "gelu", _ACTIVATIONS),
        _labels(),
        entries.only_entry("qkv_bias", True, why="attention without biases"),
        settings.fixed("patch_bias", True),
        settings.fixed("pre_norm", False),
        settings.fixed("final_norm", True),
    ),
    in_memory=_vit_rules(_block("vit.layers.{layer}", _LATER)),
    prefix="vit.",
    max_seq="",
    unused=(r"vit\.pooler\..*",),
    ignored=(*_DROPOUTS, "encoder_stride", "pooler_output_size", "pooler_act"),
    kind=VITS,
)

# LLaVA

_CLIP = ("q_proj", "k_proj", "v_proj", "out_proj")
_CLIP = ("layer_norm1", "layer_norm2", *(f"self_attn.{n}" for n in _CLIP), "mlp.fc1", "mlp.fc2")


def _clip_rules(at: str) -> tuple[Rule, ...]:
    """CLIP's vision transformer, without the norm after it."""
    found = (
        Rule(f"{at}.embeddings.class_embedding", "embed -> embed", ("class",)),
        *linear(f"{at}.embeddings.patch_embedding", "patches", *_PATCHES),
        Rule(
            f"{at}.embeddings.position_embedding.weight",
            "place embed -> place embed",
            ("positions",),
        ),
        *norm(f"{at}.pre_layrnorm", "pre_norm"),
        *_block(f"{at}.encoder.layers.{{layer}}", _CLIP),
    )
    return _under("vision", found)


def _under(name: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of a model that is a part of another."""
    return tuple(replace(r, paths=tuple(f"{name}/{path}" for path in r.paths)) for r in rules)


def _llava_ways(config: LlavaConfig) -> list[tuple[Rule, ...]]:
    """Names as published; as transformers 5 writes them; and as they are in its memory."""
    found = []
    for family in _decoders():
        if config_problems(config.text, family):
            continue
        text = _under("text", family.rules)
        stored = tuple(replace(r, name=f"language_model.{r.name}") for r in text)
        memory = tuple(
            replace(r, name=re.sub(r"\Amodel\.", "model.language_model.", r.name)) for r in text
        )
        for tower, connector, decoder in (
            ("vision_tower.vision_model", "multi_modal_projector", stored),
            ("vision_tower", "multi_modal_projector", stored),
            ("model.vision_tower", "model.multi_modal_projector", memory),
        ):
            layers = (
                *linear(f"{connector}.linear_1", "connector/up", *_CONNECTOR),
                *linear(f"{connector}.linear_2", "connector/down", *_CONNECTOR),
            )
            found.append((*_clip_rules(tower), *layers, *decoder))
    return found


_CONNECTOR = ("out embed -> embed out", "out -> out")


def _decoders() -> list[Family]:
    """Families of decoders that may be in a LLaVA: those with Llama's names of a model's parts."""
    return [family for family in FAMILIES.values() if family.prefix == "model."]


_TOWER = (
    entries.square("image_size", "image_size", 224),
    entries.square("patch_size", "patch_size", 32),
    _same("num_channels", "channels", 3),
    _same("num_hidden_layers", "num_layers", 12),
    _same("hidden_size", "embed_dim", 768),
    _same("num_attention_heads", "num_heads", 12),
    _same("intermediate_size", "mlp_dim", 3072),
    _same("layer_norm_eps", "norm_eps", 1e-5),
    entries.choice("hidden_act", "activation", "quick_gelu", _ACTIVATIONS),
    settings.fixed("patch_bias", False),
    settings.fixed("pre_norm", True),
    settings.fixed("final_norm", False),
    settings.fixed("num_classes", 0),
)
"""What the config.json of CLIP's vision transformer says."""
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


def _vision() -> Aspect:
    """The vision transformer, with as many blocks as come before the features that are used."""
    part, layer = "vision_config", "vision_feature_layer"

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        inner = _part(table, part, _FIRST, ("clip_vision_model",), problems)
        found: list[Problem] = []
        values = entries.values_of(_TOWER, _UNREAD, inner, found)
        problems += _within(part, found)
        blocks, used = values.get("num_layers", 1), table.get(layer, -2)
        if not is_a(used, int) or not 1 <= (used if used >= 0 else blocks + 1 + used) <= blocks:
            wanted = f"the result of one of the {blocks} blocks, such as -2"
            problems.append(Problem(layer, repr(used), wanted))
            return {}
        # transformers counts what the blocks begin with as the first result
        return {"vision": {**values, "num_layers": used if used >= 0 else blocks + 1 + used}}

    def write(config: LlavaConfig, problems: list[Problem]) -> dict:
        found: list[Problem] = []
        inner: dict[str, Any] = {"model_type": "clip_vision_model"}
        for aspect in _TOWER:
            inner |= aspect.write(config.vision, found)
        problems += _within("vision", found)
        return {part: inner, layer: -1}

    return Aspect((part, layer), ("vision",), read, write)


def _text() -> Aspect:
    """The decoder; that matrices are tied is said by either config."""
    part, tie = "text_config", "tie_word_embeddings"

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        decoders = {family.model_type: family for family in _decoders()}
        before = len(problems)
        inner = _part(table, part, {"model_type": "llama"}, decoders, problems)
        if len(problems) > before:
            return {}
        if table.get(tie):
            inner = {**inner, tie: True}
        family = decoders[str(inner["model_type"])]
        found: list[Problem] = []
        values = entries.values_of(family.aspects, family.ignored, inner, found)
        problems += _within(part, found)
        return {"text": values}

    def write(config: LlavaConfig, problems: list[Problem]) -> dict:
        fit = [family for family in _decoders() if not config_problems(config.text, family)]
        if not fit:
            wanted, fix = "a decoder of one of the families", "ask hub.family_for(config.text)"
            problems.append(Problem("text", "another", wanted, fix))
            return {}
        inner: dict[str, Any] = {
            "architectures": [fit[0].architecture],
            "model_type": fit[0].model_type,
        }
        for aspect in fit[0].aspects:
            inner |= aspect.write(config.text, problems)
        return {part: inner, tie: config.text.tied}

    return Aspect((part, tie), ("text",), read, write)


def _part(
    table: Table, name: str, default: Table, known: Mapping | tuple, problems: list[Problem]
) -> Table:
    """The config of a part, or the default where there is none, with the family it is of."""
    inner = table.get(name)
    if inner is None:
        return default
    if not isinstance(inner, Mapping):
        problems.append(Problem(name, type(inner).__name__, "a JSON object"))
        return default
    kind = str(inner.get("model_type", default["model_type"]))
    if kind not in known:
        wanted = "a model that ours can be"
        problems.append(Problem(f"{name}.model_type", repr(kind), wanted, nearest(kind, known)))
    return {**inner, "model_type": kind}


def _within(part: str, found: list[Problem]) -> list[Problem]:
    return [replace(problem, path=f"{part}.{problem.path}") for problem in found]


def _image_token() -> Aspect:
    theirs = ("image_token_index", "image_token_id")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        given = {table[name] for name in theirs if table.get(name) is not None} or {32000}
        token = given.pop()
        if given or not is_a(token, int):
            got = " and ".join(map(repr, sorted({token, *given}, key=str)))
            problems.append(Problem(" and ".join(theirs), got, "one token"))
            return {}
        return {"image_token": token}

    return Aspect(theirs, ("image_token",), read, lambda c, _: {theirs[0]: c.image_token})


def _image_length() -> Aspect:
    """How many tokens an image is, which follows from its patches; processors read it."""
    theirs = "image_seq_length"
    return Aspect((theirs,), (), lambda *_: {}, lambda c, _: {theirs: c.vision.num_patches})


def _is_surplus(config: LlavaConfig, name: str) -> bool:
    """Whether a tensor is of CLIP's norm of the class token or of blocks after the features."""
    tower = r"(?:model\.)?vision_tower\.(?:vision_model\.)?"
    if re.fullmatch(tower + r"(post_layernorm\.(weight|bias)|embeddings\.position_ids)", name):
        return True
    found = re.fullmatch(tower + r"encoder\.layers\.(\d+)\..*", name)
    return found is not None and int(found[1]) >= config.vision.num_layers


def _surplus_name(name: str) -> str:
    return re.sub(r"\A(?:model\.)?vision_tower\.(?:vision_model\.)?", f"{_AT}.", name)


_AT = "vision_tower.vision_model"


def _surplus_constants(config: LlavaConfig) -> dict[str, tuple[tuple[int, ...], float]]:
    shape = (config.vision.embed_dim,)
    return {f"{_AT}.post_layernorm.weight": (shape, 1), f"{_AT}.post_layernorm.bias": (shape, 0)}


LLAVA = Family(
    "llava",
    "LlavaForConditionalGeneration",
    (),
    (
        entries.architecture("LlavaForConditionalGeneration"),
        _vision(),
        _text(),
        _image_token(),
        _image_length(),
        entries.choice("projector_hidden_act", "activation", "gelu", entries.ACTIVATIONS),
        entries.only_entry("multimodal_projector_bias", True, None, why="connector without biases"),
        entries.only_entry(
            "vision_feature_select_strategy", "default", why="use of the class token"
        ),
    ),
    prefix="",
    max_seq="",
    unused=(r".*rotary_emb\.inv_freq",),
    copies=((r"(language_model\.)?lm_head\.weight", "text/embed"),),
    ignored=("vocab_size", "ignore_index", "projection_dim"),
    naming=_llava_ways,
    surplus=Surplus(_is_surplus, _surplus_name, _surplus_constants),
    kind=LLAVAS,
)
