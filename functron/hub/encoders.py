"""BERT with its head for masked tokens, and T5, versions 1.0 and 1.1.

What transformers' models have beyond these is not read: BERT's pooler and next-sentence head, which
its model for masked tokens has no use for either, and rates of dropout, which the run says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from functron.core.errors import Problem, nearest
from functron.hub import settings
from functron.hub import settings as entries
from functron.hub.family import DOWN, HEADS, OUT, UP, Family, Rule, linear, norm
from functron.hub.kinds import BERT as BERTS
from functron.hub.kinds import T5 as T5S
from functron.hub.settings import Aspect, Table
from functron.models.t5 import T5Config

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
_LAYER = "bert.encoder.layer.{layer}"
_PLACES = "place embed -> place embed"
SQUARE = ("out embed -> embed out", "out -> out")
"""Dims of a linear layer whose sides are both the stream's width."""

BERT_RULES = (
    Rule(f"{_EMBEDDINGS}.word_embeddings.weight", "vocab embed -> vocab embed", ("embed",)),
    Rule(f"{_EMBEDDINGS}.position_embeddings.weight", _PLACES, ("positions",)),
    Rule(f"{_EMBEDDINGS}.token_type_embeddings.weight", _PLACES, ("types",)),
    *norm(f"{_EMBEDDINGS}.LayerNorm", "embed_norm"),
    *linear(f"{_LAYER}.attention.self.query", "blocks/attention/q", *HEADS),
    *linear(f"{_LAYER}.attention.self.key", "blocks/attention/k", *HEADS),
    *linear(f"{_LAYER}.attention.self.value", "blocks/attention/v", *HEADS),
    *linear(f"{_LAYER}.attention.output.dense", "blocks/attention/out", *OUT),
    *norm(f"{_LAYER}.attention.output.LayerNorm", "blocks/attention_norm"),
    *linear(f"{_LAYER}.intermediate.dense", "blocks/mlp/up", *UP),
    *linear(f"{_LAYER}.output.dense", "blocks/mlp/down", *DOWN),
    *norm(f"{_LAYER}.output.LayerNorm", "blocks/mlp_norm"),
    *linear(f"{_HEAD}.transform.dense", "head/dense", *SQUARE),
    *norm(f"{_HEAD}.transform.LayerNorm", "head/norm"),
    Rule(f"{_HEAD}.bias", "vocab -> vocab", ("head/bias",)),
)
"""BERT's names."""


def _first_names(rule: Rule) -> Rule:
    """The rule for the first BERTs, which have TensorFlow's names of norms."""
    name = rule.name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return replace(rule, name=name.replace("LayerNorm.bias", "LayerNorm.beta"))


_same = settings.same

BERT = Family(
    "bert",
    "BertForMaskedLM",
    BERT_RULES,
    (
        entries.architecture("BertForMaskedLM", "BertForPreTraining"),
        _same("vocab_size", "vocab_size", 30522),
        _same("hidden_size", "embed_dim", 768),
        _same("num_hidden_layers", "num_layers", 12),
        _same("num_attention_heads", "num_heads", 12),
        _same("intermediate_size", "mlp_dim", 3072),
        _same("max_position_embeddings", "max_seq", 512),
        _same("type_vocab_size", "num_types", 2),
        _same("layer_norm_eps", "norm_eps", 1e-12),
        entries.choice("hidden_act", "activation", "gelu", entries.ACTIVATIONS),
        entries.only_entry("position_embedding_type", "absolute", why="relative positions"),
        entries.only_entry("tie_word_embeddings", True, why="head apart from the embedding"),
        entries.only_entry("is_decoder", False, why="mask of later tokens"),
        entries.only_entry("add_cross_attention", False, why="attention to another sequence"),
        entries.only_entry("is_encoder_decoder", False, why="decoder"),
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
    kind=BERTS,
)


def _block(stack: str, *, cross: bool) -> tuple[Rule, ...]:
    """The names of a stack's blocks."""
    at, ours = f"{stack}.block.{{layer}}.layer", f"{stack}/blocks"
    last = 2 if cross else 1

    def attention(name: str, path: str) -> tuple[Rule, ...]:
        inner = [rule for n in "qkv" for rule in linear(f"{name}.{n}", f"{path}/{n}", *HEADS)]
        return (*inner, *linear(f"{name}.o", f"{path}/out", *OUT))

    other = (
        *norm(f"{at}.1.layer_norm", f"{ours}/cross_norm"),
        *attention(f"{at}.1.EncDecAttention", f"{ours}/cross"),
    )
    return (
        *norm(f"{at}.0.layer_norm", f"{ours}/attention_norm"),
        *attention(f"{at}.0.SelfAttention", f"{ours}/attention"),
        *(other if cross else ()),
        *norm(f"{at}.{last}.layer_norm", f"{ours}/mlp_norm"),
    )


def _mlp(stack: str, *, cross: bool, gated: bool) -> tuple[Rule, ...]:
    """The names of a stack's feed-forward layers, which say whether there is a gate."""
    at = f"{stack}.block.{{layer}}.layer.{2 if cross else 1}.DenseReluDense"
    ours = f"{stack}/blocks/mlp"
    up = "wi_1" if gated else "wi"
    gate = linear(f"{at}.wi_0", f"{ours}/gate", *UP) if gated else ()
    return (
        *gate,
        *linear(f"{at}.{up}", f"{ours}/up", *UP),
        *linear(f"{at}.wo", f"{ours}/down", *DOWN),
    )


def t5_rules(gated: bool) -> tuple[Rule, ...]:
    """T5's names: of version 1.1, or, without gates, of version 1.0."""
    found = [Rule("shared.weight", "vocab embed -> vocab embed", ("embed",))]
    for stack in ("encoder", "decoder"):
        cross = stack == "decoder"
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(Rule(table, "bucket heads -> bucket heads", (f"{stack}/relative",)))
        found += _block(stack, cross=cross)
        found += _mlp(stack, cross=cross, gated=gated)
        found += norm(f"{stack}.final_layer_norm", f"{stack}/norm")
    return (*found, Rule("lm_head.weight", "vocab embed -> embed vocab", ("unembed",)))


def _feed_forward() -> Aspect:
    """``relu``, or ``gated-gelu``, by which the tanh approximation is meant."""
    names = {**entries.ACTIVATIONS, "gated-gelu": "gelu_tanh"}
    names |= {f"gated-{name}": ours for name, ours in entries.ACTIVATIONS.items() if name != "gelu"}
    theirs = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs[0], "relu")
        if not isinstance(value, str) or value not in names:
            wanted, fix = "one that our model has", nearest(str(value), names)
            problems.append(Problem(theirs[0], repr(value), wanted, fix))
            return {}
        ours, gated = names[value], value.startswith("gated-")
        # transformers 5 writes down what it made of the entry, and believes that later
        act, gate = table.get(theirs[1]), table.get(theirs[2], gated)
        if (act is not None and entries.ACTIVATIONS.get(act) != ours) or gate is not gated:
            got, wanted = f"{act!r} and {gate!r}", f"what {theirs[0]}={value!r} says"
            problems.append(Problem(f"{theirs[1]} and {theirs[2]}", got, wanted, "leave them out"))
        return {"activation": ours, "gated": gated}

    def write(config: T5Config, problems: list[Problem]) -> dict:
        here = [name for name, ours in names.items() if ours == config.activation]
        here = [name for name in here if name.startswith("gated-") == config.gated]
        if not here:
            got = f"{config.activation!r} with gated={config.gated}"
            problems.append(Problem("activation", got, f"one of {', '.join(names)}"))
            return {}
        found = "gated-gelu" if "gated-gelu" in here else here[0]
        act = next(name for name, ours in entries.ACTIVATIONS.items() if ours == config.activation)
        return dict(zip(theirs, (found, act, config.gated), strict=True))

    return Aspect(theirs, ("activation", "gated"), read, write)


def _tied() -> Aspect:
    """Whether the decoder's result is divided by sqrt(d_model), which is whether matrices are tied.

    Transformers 5 says that it ties them in any case, and has a head of its own where files do.
    """
    theirs = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        tied = table.get(theirs[0], True)
        scaled = table.get(theirs[1], tied)
        if not isinstance(scaled, bool) or not isinstance(tied, bool) or (scaled and not tied):
            got = f"{tied!r} and {scaled!r}"
            wanted = "true and true (1.0), or false: our model divides where matrices are tied"
            problems.append(Problem(" and ".join(theirs), got, wanted))
            return {}
        return {"tied": scaled}

    def write(config: T5Config, _: list[Problem]) -> dict:
        return dict.fromkeys(theirs, config.tied)

    return Aspect(theirs, ("tied",), read, write)


def _start() -> Aspect:
    """The token that the decoder begins with: padding's, where it is not given."""
    theirs = ("decoder_start_token_id", "pad_token_id")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        found = [table[name] for name in theirs if table.get(name) is not None]
        start = found[0] if found else 0
        if not isinstance(start, int):
            problems.append(Problem(theirs[0], repr(start), "a token"))
            return {}
        return {"start_id": start}

    def write(config: T5Config, _: list[Problem]) -> dict[str, Any]:
        return dict.fromkeys(theirs, config.start_id)

    return Aspect(theirs, ("start_id",), read, write)


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    (),
    (
        entries.architecture("T5ForConditionalGeneration", "T5WithLMHeadModel"),
        _same("vocab_size", "vocab_size", 32128),
        _same("d_model", "embed_dim", 512),
        _same("num_layers", "num_layers", 6),
        entries.size("num_decoder_layers", "decoder_layers", None, lambda c: c.layers["decoder"]),
        _same("num_heads", "num_heads", 8),
        entries.size("d_kv", "head_dim", 64, lambda c: c.attention.head_dim),
        _same("d_ff", "mlp_dim", 2048),
        _same("relative_attention_num_buckets", "num_buckets", 32),
        _same("relative_attention_max_distance", "max_distance", 128),
        _same("layer_norm_epsilon", "norm_eps", 1e-6),
        _feed_forward(),
        _tied(),
        _start(),
        entries.only_entry("is_encoder_decoder", True, why="encoder or decoder alone"),
        entries.only_entry("is_decoder", False, why="decoder alone"),
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
    kind=T5S,
)
