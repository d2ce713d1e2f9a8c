"""Layers that the families of the zoo share: stacks, attention with masks and biases, and checks.

A `Stack` runs layers whose parameters are stacked. `masked_attention` has padding masks and learned
biases on scores, and `cross_attention` is of one sequence to another.
"""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from functron import nn
from functron.core import compat, random, tree
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.core.tree import Tree
from functron.core.typing import Bool, Float, Int, Key, Scalar, Tensor
from functron.models.decoder import embed_tokens, gather_unembedding, run_gathered
from functron.models.gpt import (
    embed_rules,
    fsdp_problems,
    tp_problems,
    uneven_problems,
    uneven_rules,
)
from functron.models.options import DEFAULTS, ModelOptions, check_length, require
from functron.nn.attention import AttentionConfig, KVCache
from functron.nn.layers import (
    column_parallel,
    gather_sequence,
    row_parallel,
    weights,
)
from functron.ops.attention import attention, block, block_backward
from functron.ops.chunked_attention import Visible
from functron.ops.moe import look_up
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import ParamDef
from functron.spmd.spec import Rules
from functron.transforms import Gather, scan
from functron.transforms import remat as rematerialise
from functron.transforms.custom_vjp import custom_vjp


@dataclass(frozen=True, eq=False)
class Stack:
    """How stacks of layers are run: with which options, and which dropout.

    Attributes:
        family: name of the family, for messages.
        options: of the model; `stream`, `remat`, `gather` and `axes` are used.
        key: random key of dropout; None: no dropout.
        rate: dropout rate.
        rows: int64 ``[batch]``, the samples' indices in the global batch.

    Raises:
        ValueError: an option that is not used is set; all such options are listed.
    """

    family: str
    options: ModelOptions
    key: Key | None = None
    rate: float = 0.0
    rows: Tensor | None = None

    def __post_init__(self):
        self.options.require_only(self.family, "stream", "remat", "gather", "axes")

    @property
    def stream(self) -> P:
        """The spec of the residual stream."""
        return self.options.stream

    @property
    def gather(self) -> Gather:
        """How parameters are gathered that are split over data axes."""
        return self.options.gather

    def at(self, name: str) -> Stack:
        """The same for an entry of the parameters, with a random key of its own."""
        key = self.key if self.rate else None
        key = None if key is None else random.fold_in(key, zlib.crc32(name.encode()))
        return replace(self, options=replace(self.options, gather=self.gather.at(name)), key=key)

    def core(self, core: Callable) -> Callable:
        """The core of attention; under remat="selective" backward recomputes it."""
        return rematerialise(core) if self.options.remat == "selective" else core

    def embed(self, weights: Tree, tokens: Tensor, config: Any) -> Tensor:
        """Token embeddings, of the parameter "embed", as the residual stream.

        Raises:
            ValueError: the sequence is longer than the config's `max_seq`, if it has one, or does
                not divide over the ranks that split it.
        """
        check_length(tokens.shape[1], getattr(config, "max_seq", None), self.stream)
        return embed_tokens(config, weights, tokens, self.options)

    def norm_last(self, weights: Tree, x: Tensor, eps: float) -> Tensor:
        """RMSNorm of the stream after the last layer, with the parameter "norm"."""
        with named_scope("norm"):
            return nn.rms_norm(x, self.gather.at("norm")(weights["norm"])["scale"], eps=eps)

    def logits(self, weights: Tree, x: Tensor, *, tied: bool, divisor: float = 1.0) -> Tensor:
        """Logits ``[batch, seq, padded_vocab / tp]`` of the normed stream over `divisor`."""
        with named_scope("unembed"):
            matrix = gather_unembedding(weights, self.gather, tied=tied)
            x = x if divisor == 1 else x / divisor
            matrix = matrix.mT if tied else matrix
            return nn.column_parallel(nn.gather_sequence(x, self.stream), matrix)

    def drop(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Dropout of the stream, or of a sublayer's output."""
        if key is None or not self.rate:
            return x
        rows = self.rows
        if rows is None:
            rows = lax.global_index(x.shape[0], DATA_AXES, device=x.device)
        return nn.dropout(x, key, rate=self.rate, rows=rows, stream=self.stream)

    def keys(self, count: int) -> Tensor | None:
        """A key for each of `count` layers, int64 ``[count, 2]``; None without dropout."""
        return random.split(self.key, count) if self.key is not None and self.rate else None

    def over(self, layer: Callable, x: Tensor, weights: Tree, keys: Tensor | None) -> Tensor:
        """x through layers whose parameters are stacked.

        Args:
            layer: ``(parameters, x, key) -> x``; the key is None without dropout.
            x: the stream.
            weights: this rank's part of the layers' parameters, stacked on a leading dim.
            keys: one per layer, as `keys` makes them.
        """
        gathered = run_gathered(layer, self.options, self.gather.rows())

        def body(x: Tensor, row: tuple) -> tuple[Tensor, None]:
            return gathered(row[0], x, row[1]), None

        return scan(body, x, (weights, keys))[0]


def sum_cross_entropies(*needed: str, classes: str = "vocab_size") -> Callable[..., Callable]:
    """Decorate a function that computes the logits of a batch: it becomes the loss of its family.

    The loss is ``(config, weights, batch, options=DEFAULTS, *, key=None)`` to the sum of the
    cross-entropies of ``batch["targets"]`` over the batch of all ranks of ``options.axes``, where
    targets of `nn.IGNORE_INDEX` do not count; the function takes the same five arguments.

    Args:
        needed: entries that a batch must have.
        classes: the field of the config with the number of columns that are no padding.
    """

    def decorate(logits: Callable[..., Tensor]) -> Callable[..., Scalar]:
        @functools.wraps(logits)
        def loss(config, weights, batch, options=DEFAULTS, *, key=None):
            require(batch, *needed)
            found = logits(config, weights, batch, options, key)
            with named_scope("loss"):
                size = getattr(config, classes)
                losses = nn.cross_entropy(found, batch["targets"], vocab_size=size)
                return lax.psum(losses.sum(), options.axes)

        *first, options, key = (signature := inspect.signature(logits)).parameters.values()
        options = options.replace(default=DEFAULTS)
        key = key.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None)
        vars(loss)["__signature__"] = signature.replace(parameters=[*first, options, key])
        return public(loss)

    return decorate


def split_keys(key: Tensor | None, num: int) -> tuple[Tensor | None, ...]:
    """`num` random keys made of `key`; as many None where it is None."""
    return (None,) * num if key is None else random.split(key, num).unbind(0)


def share_head_axis(defs: Tree) -> Tree:
    """Defs of attention with the axis "kv_heads" renamed "heads": one rule splits both."""

    def one(d: ParamDef) -> ParamDef:
        axes = tuple("heads" if name == "kv_heads" else name for name in d.axes)
        return replace(d, axes=axes)

    return tree.map(one, defs)


def size_problems(config: object, *names: str) -> list[Problem]:
    """A problem for each of these attributes that is not at least 1."""
    return [
        Problem(name, str(getattr(config, name)), "at least 1")
        for name in names
        if getattr(config, name) < 1
    ]


def rate_problems(config: Any) -> list[Problem]:
    """A problem where the dropout rate is out of range."""
    good = 0 <= config.dropout < 1
    return [] if good else [Problem("dropout", str(config.dropout), "at least 0 and below 1")]


def head_problems(heads: str, width: int, count: int) -> list[Problem]:
    """A problem where `count` heads do not divide the width of the residual stream."""
    if count < 1 or width % count == 0:
        return []
    return [Problem(heads, str(count), f"a divisor of embed_dim={width}", "or set head_dim")]


def text_rules(
    config: Any,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    uneven: tuple[str, ...] = (),
) -> Rules:
    """Rules of a text model for tensor parallelism and FSDP; see `tensor_rules` and `gpt.rules`."""
    c = config
    split = {"num_heads": ("heads", c.num_heads), "mlp_dim": ("mlp", c.mlp_dim)}
    split["vocab_multiple"] = "vocab", c.padded_vocab
    embed = {"embed_dim": c.embed_dim}
    return tensor_rules(mesh, split=split, embed=embed, fsdp=fsdp, uneven=uneven)


def tensor_rules(
    mesh: Mesh | BoundMesh,
    *,
    split: Mapping[str, tuple[str, int]],
    embed: Mapping[str, int],
    fsdp: tuple[str, ...],
    replicated: Mapping[str, bool] | None = None,
    uneven: tuple[str, ...] = (),
    can_be_uneven: tuple[str, ...] = ("vocab", "heads", "mlp", "embed"),
) -> Rules:
    """Rules for Megatron's tensor parallelism and fully sharded data parallelism.

    Args:
        mesh: the ranks, on data axes and tp.
        split: by field of the config a logical axis and its size, which tp must divide.
        embed: sizes of "embed" dims, which the ranks of `fsdp` must divide, by field.
        fsdp: the data axes that parameters are split over; see `gpt.rules`.
        replicated: logical axes that every rank holds whole, where True.
        uneven: logical axes that what splits them need not divide; see `gpt.rules`.
        can_be_uneven: of this model.

    Returns:
        Rules for "vocab", "heads", "kv_heads", "mlp", "groups" and "embed".

    Raises:
        ValueError: tp or fsdp does not divide a size, or the mesh has ranks on an axis that splits
            nothing in this model; all offenders are listed.
    """
    found = uneven_problems(uneven, can_be_uneven)
    wanted = {field: size for field, (axis, size) in split.items() if axis not in uneven}
    found += tp_problems(wanted, mesh["tp"])
    found += [
        Problem(field, "1", f"at least 2 for tp={mesh['tp']}", "use tp=1")
        for field, (axis, size) in split.items()
        if axis == "heads" and axis in uneven and size == 1 < mesh["tp"]
    ]
    for axis in ("pp", *CONTEXT_AXES, "ep_node", "ep"):
        if mesh[axis] > 1:
            fix = "put those ranks on dp, fsdp or tp"
            found.append(Problem("mesh", f"{axis}={mesh[axis]}", f"{axis}=1 for this model", fix))
    found += fsdp_problems({} if "embed" in uneven else embed, mesh, fsdp)
    raise_problems("this model cannot run on this mesh", found)
    rules = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "groups"), "tp")
    whole = {name for name, stays in (replicated or {}).items() if stays}
    entries = {name: None if name in whole else axis for name, axis in rules.items()}
    return uneven_rules(entries | embed_rules(mesh, fsdp), uneven)


def round_up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


# --- encoders that attend from everywhere to everywhere


def encoder_defs(config: Any) -> dict:
    """Defs of a block: ``{"attention", "attention_norm", "mlp", "mlp_norm"}``.

    Linear layers have biases, and norms are LayerNorms. All matrices begin with the same deviation.
    """
    c, dtype = config, config.torch_dtype
    norm = nn.norm_defs(c.embed_dim, "layer", axis="embed", dtype=dtype)
    start = {"stddev": c.init_stddev, "out_stddev": c.init_stddev, "dtype": dtype}
    return {
        "attention": share_head_axis(nn.attention_defs(c.attention, **start)),
        "attention_norm": norm,
        "mlp": nn.mlp_defs(c.embed_dim, c.mlp_dim, gated=False, bias=True, **start),
        "mlp_norm": norm,
    }


def encoder_block(
    config: Any, stack: Stack, seen: Tensor | None, mlp: Callable, *, norm_first: bool
) -> Callable[[Tree, Tensor, Tensor | None], Tensor]:
    """``(parameters, x, key) -> x``: one block, of the parameters of `encoder_defs`.

    Args:
        config: the architecture.
        stack: how it is run.
        seen: ``[batch or 1, seq]``, False where a place is padding; None: none is.
        mlp: ``(parameters, x) -> y``, the feed-forward layer.
        norm_first: norm the input of each sublayer (ViT), rather than the sum after it (BERT).
    """
    core = stack.core(partial(masked_attention, seen=seen))
    given = {"rope": None, "stream": stack.stream, "core": core}

    def attend(weights: dict, x: Tensor) -> Tensor:
        return nn.self_attention(weights, x, config.attention, **given)

    def block(weights: dict, x: Tensor, key: Tensor | None) -> Tensor:
        first, second = split_keys(key, 2)
        for name, layer, own in (("attention", attend, first), ("mlp", mlp, second)):
            norm = partial(nn.norm, weights[f"{name}_norm"], eps=config.norm_eps)
            with named_scope(name):
                y = layer(weights[name], norm(x) if norm_first else x)
                x = x + stack.drop(y, own)
                x = x if norm_first else norm(x)
        return x

    return block


# --- attention


def masked_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    seen: Bool[Tensor, "_ keys"] | None = None,
    bias: Float[Tensor, "heads seq keys"] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "batch seq heads head_dim"]:
    """softmax(scale q k^T + bias) v over the keys that are not padding.

    A `core` for `nn.self_attention` and `cross_attention`. Without a bias, torch's flash kernels
    compute it where `functron.ops.attention` has them; a bias needs the whole matrix of scores in
    memory.

    Args:
        q: ``[batch, seq, heads, head_dim]``.
        k: ``[batch, keys, heads, head_dim]``.
        v: as `k`.
        seen: ``[batch or 1, keys]``, False where a key is padding; None: no key is. A query that
            may attend to no key gets zeros.
        bias: ``[heads, seq, keys]``, added to the scores; differentiated.
        causal: each query attends to keys up to its own position only.
        scale: of the scores; None for 1 / sqrt(head_dim).

    Returns:
        ``[batch, seq, heads, head_dim]`` in q's dtype. No collectives.
    """
    if bias is None and seen is None and scale is None:
        return attention(q, k, v, causal=causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if bias is None:
        y = _attend_by_kernels(q, k, v, seen, causal, scale)
    else:
        y = _attend_with_bias(q, k, v, seen, bias, causal, scale)
    return y.transpose(1, 2)


def _attend_by_kernels(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention by kernels, with their backward, which is right where a query has no keys."""
    options: dict[str, Any] = {"causal": causal, "scale": scale}

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None):
        out, lse = block(q, k, v, _hide_padding(q, seen), **options)
        return out, (q, k, v, seen, out, lse)

    def backward(kept: tuple, cotangent: Tensor):
        q, k, v, seen, out, lse = kept
        hidden = _hide_padding(q, seen)
        return *block_backward(cotangent, q, k, v, out, lse, hidden, **options), None

    return custom_vjp(lambda *args: forward(*args)[0], forward, backward)(q, k, v, seen)


def _hide_padding(q: Tensor, seen: Tensor | None) -> Visible | None:
    if seen is None:
        return None
    queries = torch.zeros(1, q.shape[2], dtype=torch.int32, device=q.device)
    return Visible(query_segments=queries, key_segments=(~seen).to(torch.int32))


def _attend_with_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    bias: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    """The formula, with scores and softmax in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * scale + bias.to(wide)
    lowest = torch.finfo(wide).min  # not -inf: derivatives of rows without keys would be NaN
    hidden = None if seen is None else ~seen[:, None, None, :]
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        hidden = later if hidden is None else hidden | later
    if hidden is not None:
        scores = scores.masked_fill(hidden, lowest)
    p = torch.softmax(scores, -1)
    if hidden is not None:
        p = p.masked_fill(hidden, 0)
    return p.to(v.dtype) @ v


def cross_keys(params: dict, memory: Float[Tensor, "batch keys embed"]) -> KVCache:
    """The keys and values of `cross_attention`, to be cached where many queries read them.

    Args:
        params: as in `cross_attention`.
        memory: ``[batch, keys, embed]``, the encoder's output, whole on every rank of tp.

    Returns:
        ``[batch, keys, heads, head_dim]`` each, of this rank's heads. No collectives.
    """
    return KVCache(*(column_parallel(memory, *weights(params[n])) for n in ("k", "v")))


def cross_attention(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    memory: Float[Tensor, "batch keys embed"] | KVCache,
    config: AttentionConfig,
    *,
    stream: P,
    axis: str = "tp",
    core: Callable = masked_attention,
) -> Float[Tensor, "batch seq embed"]:
    """Attention of one sequence to another, with the heads split over `axis`.

    Args:
        params: this rank's part of `nn.attention_defs`, with as many key heads as query heads.
        x: ``[batch, seq, embed]`` with spec `stream`, the input of the queries.
        memory: ``[batch, keys, embed]``, whole on every rank of `axis`, the input of keys and
            values; or the result of `cross_keys`.
        stream: the spec of x and of the result.
        core: computes softmax(q k^T) v; for example `masked_attention` with a mask.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `nn.self_attention`.

    Raises:
        ValueError: the config has grouped heads, norms of queries, or sinks.
    """
    if config.kv_heads != config.num_heads or config.qk_norm or config.sinks:
        raise ValueError(
            f"cross_attention: got {config}; wanted a key head per query head, without qk_norm and "
            "sinks; set num_kv_heads=num_heads and leave these out"
        )
    x = gather_sequence(x, stream, axis)
    q = column_parallel(x, *weights(params["q"]))
    kept = memory if isinstance(memory, KVCache) else cross_keys(params, memory)
    return row_parallel(core(q, *kept), *weights(params["out"]), stream=stream, axis=axis)


def relative_buckets(
    queries: int,
    keys: int,
    *,
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
    first: int | Int[Tensor, ""] = 0,
    device: torch.device | str | None = None,
) -> Int[Tensor, "queries keys"]:
    """The bucket of each query's distance to each key (Raffel et al. 2020, section 2.1).

    Half the buckets are for one distance each, the others for ranges that grow geometrically up to
    `max_distance`; the last one has all larger distances. Between distance e, the number of the
    first ones, and M = `max_distance`, the bucket of distance d is
    ``e + floor((n - e) log(d / e) / log(M / e))``, computed in integers. If `bidirectional`, half
    of the buckets are for keys after the query; else such keys count as at distance 0. The first
    query is at the position of key `first`.

    Returns:
        int64 ``[queries, keys]`` in ``[0, num_buckets)``.
    """
    places = torch.arange(queries, device=device) + first
    ahead = torch.arange(keys, device=device) - places[:, None]
    count = num_buckets // 2 if bidirectional else num_buckets
    distance = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
    exact = count // 2
    starts = compat.constant(_find_range_starts(exact, count - exact, max_distance), places.device)
    far = exact + torch.bucketize(distance, starts, right=True)
    bucket = torch.where(distance < exact, distance, far)
    return bucket + (ahead > 0) * count if bidirectional else bucket


def _find_range_starts(exact: int, ranges: int, max_distance: int) -> list[int]:
    """The first distance of each range after the first: the least d with d^n >= M^k e^(n - k)."""
    starts, distance = [], exact
    for k in range(1, ranges):
        least = max_distance**k * exact ** (ranges - k)
        while distance**ranges < least:
            distance += 1
        starts.append(distance)
    return starts


def relative_bias(
    table: Float[Tensor, "buckets heads"], buckets: Int[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """T5's biases of attention scores, for this rank's heads: a number per bucket and head."""
    return look_up(table, buckets, whole=True).permute(2, 0, 1).contiguous()
