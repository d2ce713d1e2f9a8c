"""Multi-head latent attention (DeepSeek-V2, section 2.1; DeepSeek-V3), split over heads.

Keys and values of all heads are linear in one narrow latent c per token, and one rotary key is
shared by all heads; generation caches only c and that key:

    c = norm(x W_c)            k_rope = rope(x W_kr)            queries: norm(x W_cq) W_q, or x W_q
    k_h = [c W_uk,h ; k_rope]  v_h = c W_uv,h                   q_h = [q_nope,h ; rope(q_rope,h)]
    y = sum_h softmax(q_h k_h^T scale) v_h W_o,h

`mla` computes that. `mla_absorbed` computes the same from latents of `mla_cache`: q k^T = (q_nope
W_uk^T) c^T + q_rope k_rope^T, and (p c) W_uv: one key head of width kv_rank + rope_head_dim, which
is more work per pair of tokens and far less to read.

| parameter           | over tp                                                                    |
|---------------------|----------------------------------------------------------------------------|
| q_down, kv_down, norms | replicated; with a split sequence each rank computes its own tokens'    |
| q_up (or q), kv_up  | columns: this rank's heads                                                 |
| out                 | rows: this rank's heads                                                    |

Gradients of replicated parameters are sums over ranks, by `sync_gradients`, as specs do not mention
tp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functron.core.errors import Problem, raise_problems
from functron.core.tables import shows_differences
from functron.core.typing import Bool, Float, Tensor
from functron.nn.attention import (
    AttentionConfig,
    RopeScaling,
    apply_rope,
    causal_attention,
    out_defs,
)
from functron.nn.layers import (
    MATMUL,
    Matmul,
    column_parallel,
    gather_sequence,
    linear_defs,
    name_columns,
    norm,
    norm_defs,
    row_parallel,
    sequence_axes,
    weights,
)
from functron.ops.operations import AUTO, Kernels
from functron.spmd.spec import P

Linear = Callable[[str, Tensor], Tensor]
"""A linear layer of the parameters, by name, and its input."""


@shows_differences
@dataclass(frozen=True, kw_only=True)
class MLAConfig(AttentionConfig):
    """Shapes and options of multi-head latent attention.

    | model            | heads | q_rank | kv_rank | head_dim, rope_head_dim, v_head_dim |
    |------------------|-------|--------|---------|-------------------------------------|
    | DeepSeek-V2-Lite | 16    | 0      | 512     | 128, 64, 128                        |
    | DeepSeek-V3      | 128   | 1536   | 512     | 128, 64, 128                        |

    Attributes:
        kv_rank: width of the latent that keys and values are projected from, which generation
            caches with a rotary key: multi-head latent attention (DeepSeek-V2, section 2.1); 0:
            keys and values are projected from the stream. With it `head_dim` is the number of dims
            of a query and key that are not rotated.
        q_rank: width of the latent that queries are projected from; 0: the stream.
        rope_head_dim: rotated dims of a query and key, under latent attention.
        v_head_dim: dims of a value, under latent attention.
        rope_interleaved: under latent attention, rotated pairs are neighbouring dims, as in
            DeepSeek's weights; otherwise dim i and i + half of them.
        latent_eps: epsilon of the norms of latents; 0: `norm_eps`.
        rope_scaling: stretching of the rotary frequencies for longer sequences, or None.

    Raises:
        ValueError: a size is not positive, an odd number of dims would be rotated, or an option
            is set that latent attention does not have.
    """

    kv_rank: int = 0
    q_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleaved: bool = True
    latent_eps: float = 0.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("embed_dim", "num_heads", "kv_rank")}
        sizes |= {"head_dim": self.head_size} if self.num_heads > 0 else {}
        found = [Problem(name, str(size), "at least 1") for name, size in sizes.items() if size < 1]
        raise_problems("invalid latent attention", found + latent_problems(self))

    @property
    def qk_head_dim(self) -> int:
        """Dims of a query and key."""
        return self.head_size + self.rope_head_dim

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of the norms of latents."""
        return self.latent_eps or self.norm_eps

    @property
    def softmax_factor(self) -> float:
        """Multiplies 1 / sqrt(qk_head_dim); see `RopeScaling.softmax_factor`."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.softmax_factor


def latent_problems(config: MLAConfig) -> list[Problem]:
    """Options that do not fit latent attention, or that have no effect without it."""
    names = ("q_rank", "rope_head_dim", "v_head_dim", "latent_eps")
    sizes: dict[str, float] = {name: getattr(config, name) for name in names}
    if not config.kv_rank:
        return [
            Problem(name, str(size), "0 without kv_rank", "set kv_rank, or leave it out")
            for name, size in sizes.items()
            if size
        ]
    wrong = {
        "qk_norm": config.qk_norm,
        "qkv_clip": bool(config.qkv_clip),
        "sinks": config.sinks,
        "attention_scale": bool(config.attention_scale),
        "attention_gate": config.attention_gate,
        "num_kv_heads": config.kv_heads != config.num_heads,
    }
    found = [
        Problem(name, repr(getattr(config, name)), "its default with kv_rank", "leave it out")
        for name, bad in wrong.items()
        if bad
    ]
    if config.q_rank < 0:
        found.append(Problem("q_rank", str(config.q_rank), "at least 0, which compresses none"))
    if min(config.rope_head_dim, config.v_head_dim) < 1:
        got = f"rope_head_dim={config.rope_head_dim}, v_head_dim={config.v_head_dim}"
        found.append(Problem("kv_rank", got, "dims of rotated keys and of values", "set both"))
    if config.rope_head_dim % 2:
        found.append(Problem("rope_head_dim", str(config.rope_head_dim), "pairs: an even number"))
    if not 0 < config.softmax_factor < math.inf:
        got = f"a factor of scores of {config.softmax_factor}"
        found.append(Problem("rope_scaling", got, "a positive one", "change mscale_all_dim"))
    return found


class Latents(NamedTuple):
    """The cache of tokens for generation; the same on all ranks of tp.

    Attributes:
        c: ``[batch, seq, kv_rank]``, normed: keys and values of all heads are linear in it.
        k_rope: ``[batch, seq, rope_head_dim]``, rotated: the shared key.
    """

    c: Tensor
    k_rope: Tensor


def mla_defs(config: MLAConfig, *, stddev: float, out_stddev: float, dtype: torch.dtype) -> dict:
    """Defs ``{"q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up", "out"}``.

    Without queries' latents ``{"q"}`` takes the place of the first three. Columns of ``kv_down``
    are those of the latent, then those of the shared key; those of ``q_up``, ``q`` and ``kv_up``
    are heads, in each the dims without positions, then those rotated, or those of values: as in
    DeepSeek's checkpoints. The rows of ``q_up`` and ``kv_up`` have the logical axis "latent".
    """
    c = config

    def down(width: int) -> dict:
        bias = (width,) if c.bias else None
        axes = ("embed", None)
        return linear_defs(
            (c.embed_dim, width), axes, stddev=stddev, bias=bias, bias_axes=(None,), dtype=dtype,
            matrix=(1, 1),
        )  # fmt: skip

    def up(width: int, axis: str, head_dim: int) -> dict:
        shape, axes = (width, c.num_heads, head_dim), (axis, "heads", None)
        return linear_defs(shape, axes, stddev=stddev, dtype=dtype, matrix=(1, 2))

    defs = {
        "kv_down": down(c.kv_rank + c.rope_head_dim),
        "kv_norm": norm_defs(c.kv_rank, "rms", axis=None, dtype=dtype),
        "kv_up": up(c.kv_rank, "latent", c.head_size + c.v_head_dim),
        "out": out_defs(c, c.v_head_dim, stddev=out_stddev, dtype=dtype),
    }
    if not c.q_rank:
        return {"q": up(c.embed_dim, "embed", c.qk_head_dim), **defs}
    queries = {
        "q_down": down(c.q_rank),
        "q_norm": norm_defs(c.q_rank, "rms", axis=None, dtype=dtype),
        "q_up": up(c.q_rank, "latent", c.qk_head_dim),
    }
    return {**queries, **defs}


def mla(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: MLAConfig,
    *,
    rope: tuple[Tensor, Tensor],
    stream: P,
    axis: str = "tp",
    core: Callable = causal_attention,
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "batch seq embed"]:
    """Multi-head latent attention over the stream, with the heads split over `axis`.

    Args:
        params: this rank's part of `mla_defs`.
        x: has spec `stream`, as the result.
        rope: tables of `rope_table` of width `rope_head_dim`, for the tokens of all ranks of `axis`
            together.
        core: computes softmax(q k^T / sqrt(q's dims)) v of this rank's heads, ``(q, k, v) -> out``,
            v being of `v_head_dim`; for example `context_attention`.
        kernels: of norms and of rotation.
        matmul: computes the projections.

    Collectives: one all-reduce of the result's bytes forward and one backward; with a split
    sequence one all-gather of the latents (q_rank + kv_rank + rope_head_dim numbers per token,
    where other attention gathers embed_dim) and one reduce-scatter of the result, and the
    transposes of both backward.
    """
    c = config
    linear = functools.partial(_apply_linear, params, stream, axis, matmul)
    query_latent = _project_query_latent(params, x, c, linear, kernels)
    narrow = (query_latent, *_project_latents(params, x, c, linear, kernels))
    query_latent, latent, k_rope = _gather_tokens(narrow, stream, axis)
    q = torch.cat(_project_queries(query_latent, c, rope, linear, kernels), -1)
    k_nope, v = linear("kv_up", latent).split([c.head_size, c.v_head_dim], -1)
    rotation: Any = {"interleaved": c.rope_interleaved, "kernels": kernels}
    shared = apply_rope(k_rope.unsqueeze(-2), rope, **rotation)
    # one key for all heads: expanding it is what sums its gradient over them
    k = torch.cat([k_nope, shared.expand(*k_nope.shape[:-1], -1)], -1)
    out: Any = {"name": "attention/out", "matmul": matmul}
    q, k, v = (name_columns(y, n, stream, axis) for n, y in zip("qkv", (q, k, v), strict=True))
    y = name_columns(core(q, k, v), "heads", stream, axis)
    return row_parallel(y, *weights(params["out"]), stream=stream, axis=axis, **out)


def mla_cache(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: MLAConfig,
    *,
    rope: tuple[Tensor, Tensor],
    stream: P,
    axis: str = "tp",
) -> Latents:
    """The latents of tokens that `mla_absorbed` attends to; arguments are those of `mla`.

    Collectives: with a split sequence one all-gather of the result.
    """
    linear = functools.partial(_apply_linear, params, stream, axis, MATMUL)
    latent, k_rope = _gather_tokens(_project_latents(params, x, config, linear), stream, axis)
    shared = apply_rope(k_rope.unsqueeze(-2), rope, interleaved=config.rope_interleaved)
    return Latents(latent, shared.squeeze(-2))


def mla_absorbed(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    cache: Latents,
    config: MLAConfig,
    *,
    rope: tuple[Tensor, Tensor],
    stream: P,
    axis: str = "tp",
    visible: Bool[Tensor, "*rows queries keys"] | None = None,
) -> Float[Tensor, "batch seq embed"]:
    """`mla` from latents alone, keys and values never formed (DeepSeek-V2, section 2.1.2).

    Args:
        x: the tokens that attend; this and others as for `mla`.
        cache: of all tokens that are attended to, those of x among them; on every rank of `axis`.
        rope: the tables for the tokens of x.
        visible: which cached tokens each query sees, ``[queries, keys]`` or ``[batch, queries,
            keys]``; None: x are the last tokens of the cache, each sees those up to itself.

    Collectives: as `mla`.
    """
    c = config
    linear = functools.partial(_apply_linear, params, stream, axis, MATMUL)
    query_latent = gather_sequence(_project_query_latent(params, x, c, linear), stream, axis)
    nope, rotated = _project_queries(query_latent, c, rope, linear)
    w_uk, w_uv = params["kv_up"]["w"].split([c.head_size, c.v_head_dim], -1)
    absorbed = torch.einsum("bqhn,rhn->bqhr", nope, w_uk)
    scores = torch.einsum("bqhr,bkr->bhqk", absorbed, cache.c)
    scores = scores + torch.einsum("bqhn,bkn->bhqk", rotated, cache.k_rope)
    if visible is None:
        queries, keys = (torch.arange(n, device=x.device) for n in scores.shape[-2:])
        visible = keys <= queries.unsqueeze(-1) + (scores.shape[-1] - scores.shape[-2])
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = scores / math.sqrt(c.qk_head_dim)
    scores = scores.masked_fill(~visible.unsqueeze(-3), float("-inf"))
    p = torch.softmax(scores, -1).to(x.dtype)
    mixed = torch.einsum("bhqk,bkr->bqhr", p, cache.c)
    y = torch.einsum("bqhr,rhv->bqhv", mixed, w_uv)
    return row_parallel(y, *weights(params["out"]), stream=stream, axis=axis)


def _gather_tokens(parts: tuple[Tensor, ...], stream: P, axis: str) -> tuple[Tensor, ...]:
    """Tensors of the stream's tokens with these whole over `axis`: one all-gather for all."""
    if axis not in sequence_axes(stream):
        return parts
    together = gather_sequence(torch.cat(parts, -1), stream, axis)
    return together.split([part.shape[-1] for part in parts], -1)


def _apply_linear(
    params: dict, stream: P, axis: str, matmul: Matmul, name: str, x: Tensor
) -> Tensor:
    """The linear layer `name`: to latents, whose columns every rank has, or to its heads."""
    own = weights(params[name])
    if not name.endswith("down"):
        return column_parallel(x, *own, name=f"attention/{name}", axis=axis, matmul=matmul)
    # of tokens that axis splits, nothing is a part of a sum over it
    same = axis not in sequence_axes(stream)
    where: Any = {"name": f"attention/{name}", "axis": axis if same else (), "replicated": same}
    return column_parallel(x, *own, matmul=matmul, **where)


def _project_query_latent(
    params: dict, x: Tensor, config: MLAConfig, linear: Linear, kernels: Kernels = AUTO
) -> Tensor:
    """The input that queries are linear in: their latent, or the stream."""
    if not config.q_rank:
        return x
    down = linear("q_down", x)
    return norm(params["q_norm"], down, eps=config.latent_norm_eps, kernels=kernels)


def _project_latents(
    params: dict, x: Tensor, config: MLAConfig, linear: Linear, kernels: Kernels = AUTO
) -> tuple[Tensor, Tensor]:
    """The latent of keys and values, normed, and the shared key, not yet rotated."""
    down = linear("kv_down", x)
    latent, k_rope = down.split([config.kv_rank, config.rope_head_dim], -1)
    return norm(params["kv_norm"], latent, eps=config.latent_norm_eps, kernels=kernels), k_rope


def _project_queries(
    query_latent: Tensor,
    config: MLAConfig,
    rope: tuple[Tensor, Tensor],
    linear: Linear,
    kernels: Kernels = AUTO,
) -> tuple[Tensor, Tensor]:
    """This rank's queries, times `softmax_factor`: the dims without positions, and the rotated."""
    c = config
    q = linear("q_up" if c.q_rank else "q", query_latent)
    q = q * c.softmax_factor if c.softmax_factor != 1 else q
    nope, rotated = q.split([c.head_size, c.rope_head_dim], -1)
    return nope, apply_rope(rotated, rope, interleaved=c.rope_interleaved, kernels=kernels)
