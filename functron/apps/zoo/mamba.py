"""Mamba-2, and hybrids of it with attention and feed-forward layers, by a pattern of layers.

A layer norms the residual stream and adds the output of its mixer to it: a state space (``M``),
attention without positions (``*``) or a feed-forward layer (``-``), in the order of
`MambaConfig.pattern`, as in Megatron's hybrid models and Nemotron-H (Waleffe et al. 2024, "An
Empirical Study of Mamba-based Language Models"; Blakeman et al. 2025). As for `functron.models.gpt`
there are `defs`, `rules`, `forward` and `loss`; `step` generates, token by token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from functron import nn
from functron.apps.zoo.layers import (
    Stack,
    rate_problems,
    size_problems,
    sum_cross_entropies,
    tensor_rules,
)
from functron.apps.zoo.state_space import (
    Mamba2Config,
    MambaCache,
    mamba,
    mamba_cache,
    mamba_defs,
    mamba_step,
)
from functron.core import tree
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.core.settings import Need, Needs, choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Key, Tensor
from functron.models.config import Named, TextConfig
from functron.models.family import NEXT_TOKEN, UNEVEN, Family
from functron.models.generation import Steps
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets
from functron.ops.attention import attention
from functron.program.cost import tokens_attended
from functron.spmd import P, params
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import Normal, ParamDef
from functron.spmd.spec import Rules

__all__ = [
    "PRESETS",
    "MambaConfig",
    "defs",
    "empty_cache",
    "flops_per_token",
    "forward",
    "loss",
    "num_targets",
    "rules",
    "step",
]


KINDS: Mapping[str, str] = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp"})
"""The kinds of layers by the letters of a pattern, as in Megatron."""


_ATTENTION = Need(lambda c: "*" in c.pattern, "layers of attention", "have a * in pattern")
_MLP = Need(lambda c: "-" in c.pattern, "feed-forward layers", "have a - in pattern")
_SPACE = Need(lambda c: "M" in c.pattern, "state spaces", "have an M in pattern")

MAMBA_NEEDS: Needs = MappingProxyType(
    {
        **dict.fromkeys(
            ("attention_heads", "attention_kv_heads", "attention_head_dim"), _ATTENTION
        ),
        **dict.fromkeys(("mlp_dim", "activation", "gated"), _MLP),
        **dict.fromkeys(
            ("num_heads", "head_dim", "num_groups", "state_dim", "conv_width", "chunk", "conv_bias",
             "dt_min"),
            _SPACE,
        ),
    }
)  # fmt: skip
"""The needs of the fields of a `MambaConfig`, to have an effect."""


@shows_differences
@dataclass(frozen=True, kw_only=True)
class MambaConfig(TextConfig):
    """Architecture of a Mamba-2 model, or a hybrid.

    Attributes:
        pattern: a letter per layer: ``M`` a state space, ``*`` attention, ``-`` a feed-forward
            layer.
        embed_dim: width of the residual stream.
        num_heads: number of heads of the state space; ``num_heads * head_dim`` is twice `embed_dim`
            in Mamba-2.
        head_dim: width of a head of the state space.
        num_groups: groups of B and C; see `functron.apps.zoo.state_space.Mamba2Config`.
        state_dim: numbers of state per feature.
        conv_width: tokens that the short convolution sees.
        chunk: tokens per chunk of the state space; results do not depend on it.
        conv_bias: biases on the convolution.
        dt_min: step sizes are at least this (0.001 in Nemotron-H).
        attention_heads: number of query heads of attention layers.
        attention_kv_heads: number of key/value heads; 0: as many as query heads.
        attention_head_dim: width of a head; 0: ``embed_dim // attention_heads``.
        mlp_dim: width of feed-forward layers.
        activation: of feed-forward layers.
        gated: multiply it by a second projection.
        bias: biases on all linear layers.
        norm_eps: epsilon of all norms.
        tied: one matrix for embedding and unembedding.
        init_stddev: standard deviation of initial matrices; divided by sqrt(2 layers) for those
            whose output is added to the residual stream.
        dtype: of parameters and activations; decays and steps are float32 at least.
    """

    pattern: str = "MMMM"
    embed_dim: int = 256
    num_heads: int = 8
    head_dim: int = 64
    num_groups: int = 1
    state_dim: int = 64
    conv_width: int = 4
    chunk: int = 64
    conv_bias: bool = True
    dt_min: float = 0.0
    attention_heads: int = 8
    attention_kv_heads: int = 0
    attention_head_dim: int = 0
    mlp_dim: int = 1024
    activation: nn.Activation = "relu2"
    gated: bool = False
    bias: bool = False
    norm_eps: float = 1e-5
    tied: bool = True
    init_stddev: float = 0.02

    def __post_init__(self):
        raise_problems("invalid MambaConfig", self._problems())

    def _problems(self) -> list[Problem]:
        sizes = ("vocab_size", "embed_dim", "num_heads", "head_dim", "num_groups", "state_dim")
        sizes = (*sizes, "conv_width", "chunk", "attention_heads", "mlp_dim", "vocab_multiple")
        found = size_problems(self, *sizes)
        others = sorted(set(self.pattern) - set(KINDS))
        if others or not self.pattern:
            known = ", ".join(f"{letter} ({kind})" for letter, kind in KINDS.items())
            found.append(Problem("pattern", repr(self.pattern), f"a letter per layer: {known}"))
        if not found and self.num_heads % self.num_groups:
            got = f"{self.num_groups} for num_heads={self.num_heads}"
            found.append(Problem("num_groups", got, "a divisor of num_heads"))
        if self.attention_heads > 0 and self.attention_heads % max(self.kv_heads, 1):
            got = f"{self.kv_heads} for attention_heads={self.attention_heads}"
            found.append(Problem("attention_kv_heads", got, "a divisor of attention_heads"))
        found += choice_problems(self)
        if self.dt_min < 0:
            found.append(Problem("dt_min", str(self.dt_min), "at least 0"))
        found += rate_problems(self)
        return found

    @property
    def counts(self) -> dict[str, int]:
        """The number of layers of each kind, by its name in the parameters."""
        each = {name: self.pattern.count(letter) for letter, name in KINDS.items()}
        return {name: count for name, count in each.items() if count}

    @property
    def kv_heads(self) -> int:
        """Key/value heads of attention layers."""
        return self.attention_kv_heads or self.attention_heads

    @property
    def mixer(self) -> Mamba2Config:
        """The shapes of the state-space layers."""
        return Mamba2Config(
            self.embed_dim,
            self.num_heads,
            self.head_dim,
            self.num_groups,
            self.state_dim,
            self.conv_width,
            self.chunk,
            bias=self.bias,
            conv_bias=self.conv_bias,
            norm_eps=self.norm_eps,
            dt_limit=(self.dt_min, math.inf),
        )

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of the attention layers."""
        return nn.AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.attention_heads,
            num_kv_heads=self.attention_kv_heads,
            head_dim=self.attention_head_dim,
            bias=self.bias,
        )


def _make_preset(num_layers: int, embed_dim: int) -> MambaConfig:
    return MambaConfig(
        pattern="M" * num_layers,
        vocab_size=50277,
        embed_dim=embed_dim,
        num_heads=2 * embed_dim // 64,
        state_dim=128,
        chunk=256,
        vocab_multiple=16,
    )


_SMALL: dict[str, Any] = {
    "embed_dim": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_dim": 16,
    "chunk": 16,
}
PRESETS: Mapping[str, MambaConfig] = Named(
    {
        "mamba2-tiny": MambaConfig(pattern="MM", **_SMALL),
        "mamba2-hybrid-tiny": MambaConfig(
            pattern="M-M*-", num_groups=4, mlp_dim=192, attention_kv_heads=4, **_SMALL
        ),
        "mamba2-130m": _make_preset(24, 768),
        "mamba2-370m": _make_preset(48, 1024),
        "mamba2-780m": _make_preset(48, 1536),
        "mamba2-1.3b": _make_preset(48, 2048),
        "mamba2-2.7b": _make_preset(64, 2560),
        "nemotron-h-8b": MambaConfig(
            pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            vocab_size=131072, embed_dim=4096, num_heads=128, num_groups=8, state_dim=128,
            chunk=128, dt_min=1e-3, attention_heads=32, attention_kv_heads=8,
            attention_head_dim=128, mlp_dim=21504, tied=False, vocab_multiple=128,
        ),
    }
)  # fmt: skip
"""Named configs: the tiny ones train on a laptop; the others have their papers' sizes."""


MambaCaches = tuple[Any, ...]
"""For each layer a `MambaCache`, or the keys and values so far, or () for a feed-forward layer."""


@public
def defs(config: MambaConfig) -> dict:
    """The parameters: ``{"embed", "mamba"?, "attention"?, "mlp"?, "norm", "unembed"?}``.

    Parameters of layers of one kind are stacked on a leading "layers" dim.
    """
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    layers = {"stddev": c.init_stddev, "dtype": dtype}
    layers["out_stddev"] = c.init_stddev / math.sqrt(2 * len(c.pattern))
    norm = nn.norm_defs(c.embed_dim, "rms", axis="embed", dtype=dtype)
    model: dict = {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype),
        "norm": norm,
    }
    for name, count in c.counts.items():
        if name == "mamba":
            mixer = mamba_defs(c.mixer, **layers)
        elif name == "attention":
            mixer = nn.attention_defs(c.attention, **layers)
        else:
            shape = {"gated": c.gated, "bias": c.bias}
            mixer = nn.mlp_defs(c.embed_dim, c.mlp_dim, **shape, **layers)
        model[name] = params.stack({"norm": norm, "mixer": mixer}, count)
    if not c.tied:
        shape, axes = (c.embed_dim, c.padded_vocab), ("embed", "vocab")
        model["unembed"] = ParamDef(shape, axes, normal, dtype)
    return model


@public
def rules(
    config: MambaConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    uneven: tuple[str, ...] = (),
) -> Rules:
    """Rules for tensor parallelism and FSDP of this model on this mesh.

    Heads, feed-forward features and vocabulary are split over ``tp``. With fewer groups of B and C,
    or fewer key/value heads, than ranks, every rank holds all of them and uses those of its heads.
    Arguments and errors are those of `gpt.rules`; the mesh has data axes and tp, and heads are
    always split evenly.
    """
    c, tp = config, mesh["tp"]
    split = {"vocab_multiple": ("vocab", c.padded_vocab)}
    whole = {}
    if "mamba" in c.counts:
        split["num_heads"] = "heads", c.num_heads
        whole["groups"] = c.num_groups < tp and tp % c.num_groups == 0
        split |= {} if whole["groups"] else {"num_groups": ("groups", c.num_groups)}
    if "attention" in c.counts:
        split["attention_heads"] = "heads", c.attention_heads
        whole["kv_heads"] = c.kv_heads < tp and tp % c.kv_heads == 0
        split |= {} if whole["kv_heads"] else {"attention_kv_heads": ("kv_heads", c.kv_heads)}
    if "mlp" in c.counts:
        split["mlp_dim"] = "mlp", c.mlp_dim
    embed = {"embed_dim": c.embed_dim}
    return tensor_rules(
        mesh, split=split, embed=embed, fsdp=fsdp, replicated=whole, uneven=uneven,
        can_be_uneven=("vocab", "mlp", "embed"),
    )  # fmt: skip


@public
def forward(
    config: MambaConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples.
        options: stream, remat, gather and axes; others are refused.
        rows, key: as in `gpt.forward`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per layer: see `functron.apps.zoo.state_space.mamba`,
        `nn.self_attention` and `nn.mlp`.

    Raises:
        ValueError: the sequence does not divide over the ranks that split it.
    """
    stack = Stack("mamba", options, key, config.dropout, rows)
    keys = stack.keys(len(config.pattern) + 1)
    with named_scope("embed"):
        x = stack.embed(weights, tokens, config)
        x = stack.drop(x, None if keys is None else keys[-1])
    first, done = dict.fromkeys(KINDS, 0), 0
    for kind, group in itertools.groupby(config.pattern):
        name, count = KINDS[kind], len(list(group))
        start, stop = first[kind], first[kind] + count
        layers = weights[name]
        if count < config.counts[name]:
            layers = tree.map(lambda w, rows=slice(start, stop): w[rows], layers)
        own = None if keys is None else keys[done : done + count]
        x = stack.at(name).over(_make_layer(config, name, stack), x, layers, own)
        first[kind], done = stop, done + count
    return _compute_logits(config, weights, x, stack)


def _make_layer(config: MambaConfig, name: str, stack: Stack):
    """``(parameters, x, key) -> x`` of one layer of this kind."""
    stream = stack.stream

    def layer(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        mixer = weights["mixer"]
        with named_scope(name):
            y = nn.rms_norm(x, weights["norm"]["scale"], eps=config.norm_eps)
            if name == "mamba":
                y = mamba(mixer, y, config.mixer, stream=stream)
            elif name == "attention":
                core = stack.core(nn.causal_attention)
                y = nn.self_attention(
                    mixer, y, config.attention, rope=None, core=core, stream=stream
                )
            else:
                y = nn.mlp(mixer, y, activation=config.activation, stream=stream)
            return x + stack.drop(y, key)

    return layer


def _compute_logits(config: MambaConfig, weights: dict, x: Tensor, stack: Stack) -> Tensor:
    return stack.logits(weights, stack.norm_last(weights, x, config.norm_eps), tied=config.tied)


@sum_cross_entropies("tokens", "targets")
def loss(config: MambaConfig, weights: dict, batch: Batch, options: ModelOptions, key: Key | None):
    """The sum of all tokens' losses over the batch of all ranks; replicated, as `gpt.loss`.

    Args:
        batch: this rank's ``tokens`` and ``targets``, int64 ``[batch, seq]``, and perhaps ``rows``;
            targets of `nn.IGNORE_INDEX` do not count.

    Raises:
        ValueError: samples have several documents, between which the state would leak.
    """
    if "segments" in batch:
        raise ValueError(
            "mamba.loss: got packed documents (segments); wanted samples of one document each: the "
            "state is not reset between documents; fix: do not pack"
        )
    return forward(config, weights, batch["tokens"], options, rows=batch.get("rows"), key=key)


def flops_per_token(config: MambaConfig, seq: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 15 S + 6 L H D T.

    N counts the parameters that multiply a token's activations, without look-ups of embeddings. S
    counts the numbers in the states of all layers: ``h = a h + (dt x) B`` takes 3 operations for
    each, ``C h`` two, and backward twice as many; the cost of computing in chunks is not counted.
    The last term is that of L causal attention layers over `seq` tokens; see `gpt.flops_per_token`
    for it and for `whole`.
    """
    c, counts = config, config.counts
    total = params.num_params(defs(c))
    total -= 0 if c.tied else c.padded_vocab * c.embed_dim
    states = counts.get("mamba", 0) * c.num_heads * c.head_dim * c.state_dim
    heads = c.attention_heads * c.attention.head_size if "attention" in counts else 0
    pairs = counts.get("attention", 0) * tokens_attended(seq, whole=whole)
    return round(6 * total + 15 * states + 12 * heads * pairs)


# --- generation


def empty_cache(config: MambaConfig, weights: dict, batch: int) -> MambaCaches:
    """The cache of `step` before the first token.

    Args:
        weights: this rank's part of the parameters, whole over data axes.
        batch: number of sequences.
    """
    out: list[Any] = []
    for name, layer in _list_layers(config, weights):
        if name == "mamba":
            out.append(mamba_cache(layer["mixer"], config.mixer, batch))
        else:
            out.append(())
    return tuple(out)


@public
def step(
    config: MambaConfig, weights: dict, tokens: Int[Tensor, " batch"], cache: MambaCaches
) -> tuple[Float[Tensor, "batch columns"], MambaCaches]:
    """The logits of the token after `tokens`, and the new cache: `forward` as a recurrence.

    State-space layers take the same time and memory for every token; attention caches its keys.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters, whole over data axes.
        tokens: int64 ``[batch]``, the next token of each sequence.
        cache: after the tokens before; at first that of `empty_cache`.

    Returns:
        ``[batch, padded_vocab / tp]``, and the new cache. Collectives: as `forward` of one token.
    """
    x = nn.embed_tokens(
        weights["embed"], tokens.unsqueeze(1), stream=P(), vocab_size=config.vocab_size
    )
    out = []
    for (name, layer), kept in zip(_list_layers(config, weights), cache, strict=True):
        mixer = layer["mixer"]
        y = nn.rms_norm(x, layer["norm"]["scale"], eps=config.norm_eps)
        if name == "mamba":
            y, kept = mamba_step(mixer, y, MambaCache(*kept), config.mixer)
        elif name == "attention":
            y, kept = _attend_step(config, mixer, y, kept)
        else:
            y = nn.mlp(mixer, y, activation=config.activation, stream=P())
        x = x + y
        out.append(kept)
    stack = Stack("mamba", ModelOptions(stream=P()))
    return _compute_logits(config, weights, x, stack)[:, 0], tuple(out)


def _attend_step(config: MambaConfig, mixer: dict, x: Tensor, kept: tuple) -> tuple:
    """Attention of one token to the cached keys and its own, and the new cache."""
    all_of_them: list[Tensor] = []

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kept:
            k, v = (torch.cat(pair, 1) for pair in zip(kept, (k, v), strict=True))
        all_of_them[:] = k, v
        return attention(q, k, v, causal=False)

    y = nn.self_attention(mixer, x, config.attention, rope=None, stream=P(), core=core)
    return y, tuple(all_of_them)


def _list_layers(config: MambaConfig, weights: dict):
    """Each layer's kind and parameters, in order."""
    rows = {name: itertools.count() for name in config.counts}
    for kind in config.pattern:
        name = KINDS[kind]
        row = next(rows[name])
        yield name, tree.map(lambda w, row=row: w[row], weights[name])


def iterate_logits(
    weights: dict, config: MambaConfig, tokens: Int[Tensor, "batch seq"], num_tokens: int
) -> Steps:
    """The logits of each of `num_tokens` next tokens, for `functron.models.generation.generate`."""
    cache = empty_cache(config, weights, tokens.shape[0])
    for index in range(tokens.shape[1] - 1):
        _, cache = step(config, weights, tokens[:, index], cache)
    last = tokens[:, -1]
    for _ in range(num_tokens):
        found, cache = step(config, weights, last, cache)
        last = yield found[:, : config.vocab_size].float()


# --- the family


def make_family() -> Family:
    """The family of Mamba-2 models and hybrids."""
    return Family(
        "mamba", "a Mamba-2 model", MambaConfig, PRESETS, defs, rules, loss, num_targets,
        flops_per_token, objective=NEXT_TOKEN,
        free=("dropout", "init_stddev", "vocab_multiple", "dtype", "chunk"), needs=MAMBA_NEEDS,
        unread=_unread_fields, canonical=_write_out, numbers=_layer_numbers,
        iterate_logits=iterate_logits, draws=lambda config, options: config.dropout > 0,
        rules_settings=UNEVEN,
    )  # fmt: skip


def _layer_numbers(config: MambaConfig) -> dict[str, list[int]]:
    names = [KINDS[letter] for letter in config.pattern]
    return {name: [i for i, each in enumerate(names) if each == name] for name in set(names)}


def _unread_fields(config: MambaConfig) -> tuple[str, ...]:
    return tuple(
        name for name, need in MAMBA_NEEDS.items() if name != "chunk" and not need.holds(config)
    )


def _write_out(config: MambaConfig) -> MambaConfig:
    """The config with derived sizes written out, and what nothing reads at its default."""
    derived = {
        "attention_kv_heads": config.kv_heads,
        "attention_head_dim": config.attention.head_size,
    }
    plain = {name: getattr(MambaConfig, name) for name in _unread_fields(config)}
    return replace(config, **{**derived, **plain})
