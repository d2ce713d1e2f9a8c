"""Formats of BERT with its head for masked tokens, and of T5, versions 1.0 and 1.1.

What transformers' models have beyond these is not read: BERT's pooler and next-sentence head, which
its model for masked tokens has no use for either, and rates of dropout, which a run configures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from functron.core.errors import Problem, nearest
from functron.hub.entries import (
    ACTIVATIONS,
    Entry,
    EntryError,
    Table,
    activation,
    architecture,
    derived,
    only,
    same,
)
from functron.hub.format import EMBED, SQUARE, UNEMBED, Format, Rule, attention, linear, mlp, norm
from functron.models.family import FAMILIES
from functron.models.t5 import T5Config

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
_LAYER = "bert.encoder.layer.{layer}"
_PLACES = "place embed -> place embed"
_ATTENTION = ("self.query", "self.key", "self.value", "output.dense")

BERT_RULES = (
    Rule(f"{_EMBEDDINGS}.word_embeddings.weight", EMBED, ("embed",)),
    Rule(f"{_EMBEDDINGS}.position_embeddings.weight", _PLACES, ("positions",)),
    Rule(f"{_EMBEDDINGS}.token_type_embeddings.weight", _PLACES, ("types",)),
    *norm(f"{_EMBEDDINGS}.LayerNorm", "embed_norm"),
    *attention("blocks/attention", *(f"{_LAYER}.attention.{name}" for name in _ATTENTION)),
    *norm(f"{_LAYER}.attention.output.LayerNorm", "blocks/attention_norm"),
    *mlp("blocks/mlp", f"{_LAYER}.intermediate.dense", f"{_LAYER}.output.dense"),
    *norm(f"{_LAYER}.output.LayerNorm", "blocks/mlp_norm"),
    *linear(f"{_HEAD}.transform.dense", "head/dense", *SQUARE),
    *norm(f"{_HEAD}.transform.LayerNorm", "head/norm"),
    Rule(f"{_HEAD}.bias", "vocab -> vocab", ("head/bias",)),
)


def _first_names(rule: Rule) -> Rule:
    """The rule for the first BERTs, which have TensorFlow's names of norms."""
    name = rule.name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return replace(rule, name=name.replace("LayerNorm.bias", "LayerNorm.beta"))


BERT = Format(
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
    naming=lambda _: (BERT_RULES, tuple(map(_first_names, BERT_RULES))),
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
    family=FAMILIES["bert"],
)


def _stack(stack: str, gated: bool) -> list[Rule]:
    """The names of T5's encoder or decoder."""
    ours, cross = f"{stack}/blocks", stack == "decoder"
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = [Rule(table, "bucket heads -> bucket heads", (f"{stack}/relative",))]
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


def t5_rules(gated: bool) -> tuple[Rule, ...]:
    """T5's names: of version 1.1, or, without gates, of version 1.0."""
    stacks = (*_stack("encoder", gated), *_stack("decoder", gated))
    unembed = Rule("lm_head.weight", UNEMBED, ("unembed",))
    return (Rule("shared.weight", EMBED, ("embed",)), *stacks, unembed)


_FORWARD = ("feed_forward_proj", "dense_act_fn", "is_gated_act")
_GATED = {f"gated-{name}": ours for name, ours in ACTIVATIONS.items() if name != "gelu"}
_FORWARD_NAMES: Mapping[str, str] = {**ACTIVATIONS, "gated-gelu": "gelu_tanh", **_GATED}
"""``relu``, or ``gated-gelu``, by which the tanh approximation is meant."""


def _read_forward(table: Table, _: Mapping) -> dict:
    value = table.get(_FORWARD[0], "relu")
    if not isinstance(value, str) or value not in _FORWARD_NAMES:
        wanted, fix = "one that our model has", nearest(str(value), _FORWARD_NAMES)
        raise EntryError(Problem(_FORWARD[0], repr(value), wanted, fix))
    ours, gated = _FORWARD_NAMES[value], value.startswith("gated-")
    # transformers 5 writes down what it made of the entry, and believes that later
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


def _read_tied(table: Table, _: Mapping) -> dict:
    """Whether the decoder's result is divided by sqrt(d_model), which is whether matrices are tied.

    Transformers 5 has true for tied in any case, and has a head of its own where files do.
    """
    tied = table.get(_TIED[0], True)
    scaled = table.get(_TIED[1], tied)
    if not isinstance(scaled, bool) or not isinstance(tied, bool) or (scaled and not tied):
        got = f"{tied!r} and {scaled!r}"
        wanted = "true and true (1.0), or false: our model divides where matrices are tied"
        raise EntryError(Problem(" and ".join(_TIED), got, wanted))
    return {"tied": scaled}


_START = ("decoder_start_token_id", "pad_token_id")


def _read_start(table: Table, _: Mapping) -> dict:
    """The token that the decoder begins with: padding's, where it is not given."""
    start = next((table[name] for name in _START if table.get(name) is not None), 0)
    if not isinstance(start, int):
        raise EntryError(Problem(_START[0], repr(start), "a token"))
    return {"start_id": start}


T5 = Format(
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
        derived("d_kv", "head_dim", 64, lambda c: c.attention.head_dim),
        same("d_ff", "mlp_dim", 2048),
        same("relative_attention_num_buckets", "num_buckets", 32),
        same("relative_attention_max_distance", "max_distance", 128),
        same("layer_norm_epsilon", "norm_eps", 1e-6),
        Entry(_FORWARD, ("activation", "gated"), _read_forward, _write_forward),
        Entry(_TIED, ("tied",), _read_tied, lambda c: dict.fromkeys(_TIED, c.tied)),
        Entry(_START, ("start_id",), _read_start, lambda c: dict.fromkeys(_START, c.start_id)),
        only("is_encoder_decoder", True, why="encoder or decoder alone"),
        only("is_decoder", False, why="decoder alone"),
    ),
    naming=lambda config: (t5_rules(config.gated),),
    prefix="",
    max_seq="",
    # in the first T5s, of a table that nothing reads
    unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    copies=(
        (r"(encoder|decoder)\.embed_tokens\.weight", "embed"),
        (r"lm_head\.weight", "embed"),
    ),
    ignored=(
        *("dropout_rate", "classifier_dropout", "initializer_factor", "n_positions"),
        *("output_past", "gradient_checkpointing"),
    ),
    family=FAMILIES["t5"],
)
