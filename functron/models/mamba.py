"""Mamba-2, and hybrids of it with attention and feed-forward layers, by a pattern of layers.

Every layer adds to the stream what its mixer makes of the normed stream: a state space (``M``),
attention without positions (``*``) or a feed-forward layer (``-``), in the order of
`MambaConfig.pattern`, as in Megatron's hybrid models and Nemotron-H (Waleffe et al. 2024, "An
Empirical Study of Mamba-based Language Models"; Blakeman et al. 2025). As for `functron.models.gpt`
there are `defs`, `rules`, `forward` and `loss`; `step` generates, token by token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from functron import nn, params, tree
from functron.errors import public
from functron.models.block import STREAM, WHOLE, Remat
from functron.models.mamba_config import KINDS, PRESETS, MambaConfig
from functron.models.sequence import SAMPLE_AXES, check_length, require
from functron.models.stack import Run, check_gathered, tensor_rules
from functron.nn.linear import sequence_axes
from functron.nn.mamba import MambaCache, mamba, mamba_cache, mamba_defs, mamba_step
from functron.ops.attention import attention
from functron.params import Normal, ParamDef
from functron.program.cost import attended
from functron.scopes import named_scope
from functron.spmd import P
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import Rules
from functron.transforms import Gather
from functron.typing import Float, Int, Key, Scalar, Tensor

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

Cache = tuple[Any, ...]
"""Per layer: a `MambaCache`; keys and values so far; or () of a feed-forward layer."""


@public
def defs(config: MambaConfig) -> dict:
    """The parameters: ``{"embed", "mamba"?, "attention"?, "mlp"?, "norm", "unembed"?}``.

    Those of all layers of a kind are stacked on a leading "layers" dim.
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
    config: MambaConfig, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)
) -> Rules:
    """Tensor parallelism and fully sharded data parallelism for this model and mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer groups of B and C, or
    fewer key/value heads, than ranks, these are replicated and each rank uses those of its heads.

    Args:
        config: the architecture.
        mesh: the ranks: of data axes and tp.
        fsdp: the data axes that parameters are split over; see `gpt.rules`.

    Raises:
        ValueError: tp or fsdp does not divide what it splits, or the mesh has an axis this model
            does not use; all offenders are listed.
    """
    c, tp = config, mesh["tp"]
    split = {"vocab_multiple": c.padded_vocab}
    whole = {}
    if "mamba" in c.counts:
        split["num_heads"] = c.num_heads
        whole["groups"] = c.num_groups < tp and tp % c.num_groups == 0
        split |= {} if whole["groups"] else {"num_groups": c.num_groups}
    if "attention" in c.counts:
        split["attention_heads"] = c.attention_heads
        whole["kv_heads"] = c.kv_heads < tp and tp % c.kv_heads == 0
        split |= {} if whole["kv_heads"] else {"attention_kv_heads": c.kv_heads}
    if "mlp" in c.counts:
        split["mlp_dim"] = c.mlp_dim
    embed = {"embed_dim": c.embed_dim}
    return tensor_rules(mesh, split=split, embed=embed, fsdp=fsdp, replicated=whole)


@public
def forward(
    config: MambaConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    *,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples.
        rows, key, stream, remat, gather: as in `gpt.forward`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per layer: see `nn.mamba`, `nn.self_attention` and `nn.mlp`.

    Raises:
        ValueError: the sequence does not divide over the ranks that split it.
    """
    run = Run(key, stream, remat, gather, config.dropout, rows)
    check_length(tokens.shape[1], None, lax.axis_size(sequence_axes(stream)))
    keys = run.keys(len(config.pattern) + 1)
    with named_scope("embed"):
        table = gather.at("embed")(weights["embed"])
        check_gathered("embed_dim", table.shape[1], config.embed_dim)
        x = nn.embed_tokens(table, tokens, stream=stream, vocab_size=config.vocab_size)
        x = run.drop(x, None if keys is None else keys[-1])
    first, done = dict.fromkeys(KINDS, 0), 0
    for kind, group in itertools.groupby(config.pattern):
        name, count = KINDS[kind], len(list(group))
        start, stop = first[kind], first[kind] + count
        stack = weights[name]
        if count < config.counts[name]:
            stack = tree.map(lambda w, rows=slice(start, stop): w[rows], stack)
        own = None if keys is None else keys[done : done + count]
        x = run.at(name).over(_layer(config, name, run), x, stack, own)
        first[kind], done = stop, done + count
    return _logits(config, weights, x, stream, gather)


def _layer(config: MambaConfig, name: str, run: Run):
    """``(parameters, x, key) -> x`` of one layer of this kind."""
    stream = run.stream

    def layer(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        mixer = weights["mixer"]
        with named_scope(name):
            y = nn.rms_norm(x, weights["norm"]["scale"], eps=config.norm_eps)
            if name == "mamba":
                y = mamba(mixer, y, config.mixer, stream=stream)
            elif name == "attention":
                core = run.core(nn.causal_attention)
                y = nn.self_attention(
                    mixer, y, config.attention, rope=None, core=core, stream=stream
                )
            else:
                y = nn.mlp(mixer, y, activation=config.activation, stream=stream)
            return x + run.drop(y, key)

    return layer


def _logits(config: MambaConfig, weights: dict, x: Tensor, stream: P, gather: Gather) -> Tensor:
    with named_scope("norm"):
        scale = gather.at("norm")(weights["norm"])["scale"]
        x = nn.rms_norm(x, scale, eps=config.norm_eps)
    with named_scope("unembed"):
        name = "embed" if config.tied else "unembed"
        matrix = gather.at(name)(weights[name])
        matrix = matrix.mT if config.tied else matrix
        return nn.column_parallel(nn.gather_sequence(x, stream), matrix)


@public
def loss(
    config: MambaConfig,
    weights: dict,
    batch: Mapping[str, Tensor],
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated over the mesh.

    Divide it by `num_targets` for the mean.

    Args:
        batch: this rank's ``tokens`` and ``targets``, int64 ``[batch, seq]``, and perhaps ``rows``;
            targets of `nn.IGNORE_INDEX` do not count.

    Returns:
        A scalar in float32 at least. Collectives: those of `forward` and `nn.cross_entropy`, and
        one all-reduce of a scalar.

    Raises:
        ValueError: samples are packed of several documents, between which the state would leak.
    """
    if "segments" in batch:
        raise ValueError(
            "mamba.loss: got packed documents (segments); wanted samples of one document each: the "
            "state is not reset between documents; fix: do not pack"
        )
    settings = {"key": key, "stream": stream, "remat": remat, "gather": gather}
    require(batch, "tokens", "targets")
    logits = forward(config, weights, batch["tokens"], rows=batch.get("rows"), **settings)
    with named_scope("loss"):
        losses = nn.cross_entropy(logits, batch["targets"], vocab_size=config.vocab_size)
        return lax.psum(losses.sum(), SAMPLE_AXES)


@public
def num_targets(batch: Mapping[str, Tensor]) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce."""
    require(batch, "targets")
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), SAMPLE_AXES)


def flops_per_token(config: MambaConfig, seq: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 15 S + 6 L H D T.

    N counts the parameters that multiply a token's activations: embedding look-ups do not. S counts
    the numbers of state of all layers: ``h = a h + (dt x) B`` takes 3 operations of each, ``C h``
    two, and backward twice as many; what computing in chunks adds is no part of the model. The last
    term is that of L causal attention layers over `seq` tokens, as in `gpt.flops_per_token`, where
    `whole` is explained too.
    """
    c, counts = config, config.counts
    total = params.num_params(defs(c))
    total -= 0 if c.tied else c.padded_vocab * c.embed_dim
    states = counts.get("mamba", 0) * c.num_heads * c.head_dim * c.state_dim
    heads = c.attention.num_heads * c.attention.head_dim if "attention" in counts else 0
    pairs = counts.get("attention", 0) * attended(seq, whole=whole)
    return round(6 * total + 15 * states + 12 * heads * pairs)


# --- generation


def empty_cache(config: MambaConfig, weights: dict, batch: int) -> Cache:
    """What `step` knows before the first token.

    Args:
        weights: this rank's part of the parameters, whole over data axes.
        batch: how many sequences.
    """
    out: list[Any] = []
    for name, layer in _layers(config, weights):
        if name == "mamba":
            out.append(mamba_cache(layer["mixer"], config.mixer, batch))
        else:
            out.append(())
    return tuple(out)


@public
def step(
    config: MambaConfig, weights: dict, tokens: Int[Tensor, " batch"], cache: Cache
) -> tuple[Float[Tensor, "batch columns"], Cache]:
    """The logits of the token after this one, and the cache with it: `forward` as a recurrence.

    State-space layers take the same time and memory for every token; attention keeps its keys.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters, whole over data axes.
        tokens: int64 ``[batch]``, the next of each sequence.
        cache: after the tokens before; see `empty_cache`.

    Returns:
        ``[batch, padded_vocab / tp]``, and the new cache. Collectives: as `forward` of one token.
    """
    x = nn.embed_tokens(
        weights["embed"], tokens.unsqueeze(1), stream=P(), vocab_size=config.vocab_size
    )
    out = []
    for (name, layer), kept in zip(_layers(config, weights), cache, strict=True):
        mixer = layer["mixer"]
        y = nn.rms_norm(x, layer["norm"]["scale"], eps=config.norm_eps)
        if name == "mamba":
            y, kept = mamba_step(mixer, y, MambaCache(*kept), config.mixer)
        elif name == "attention":
            y, kept = _attention_step(config, mixer, y, kept)
        else:
            y = nn.mlp(mixer, y, activation=config.activation, stream=P())
        x = x + y
        out.append(kept)
    return _logits(config, weights, x, P(), WHOLE)[:, 0], tuple(out)


def _attention_step(config: MambaConfig, mixer: dict, x: Tensor, kept: tuple) -> tuple:
    """Attention of one token to the keys so far and its own, and all of these."""
    all_of_them: list[Tensor] = []

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kept:
            k, v = (torch.cat(pair, 1) for pair in zip(kept, (k, v), strict=True))
        all_of_them[:] = k, v
        group = q.shape[2] // k.shape[2]
        return attention(q, *(y.repeat_interleave(group, 2) for y in (k, v)), causal=False)

    y = nn.self_attention(mixer, x, config.attention, rope=None, stream=P(), core=core)
    return y, tuple(all_of_them)


def _layers(config: MambaConfig, weights: dict):
    """Each layer's kind and parameters, in order."""
    rows = {name: itertools.count() for name in config.counts}
    for kind in config.pattern:
        name = KINDS[kind]
        row = next(rows[name])
        yield name, tree.map(lambda w, row=row: w[row], weights[name])
