"""Tensor-parallel causal self-attention, multi-head to multi-query, with rotary positions.

Rotary position embedding is eq. 34 of Su et al. 2021, with what stretches it to longer sequences.
Pairs of dims are (x_i, x_{i + d/2}), the half-split layout of Llama, or (x_{2i}, x_{2i+1}), the
interleaved one of the paper and of DeepSeek. A model's weights belong to one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from functron.core import compat
from functron.core.errors import raise_problems
from functron.core.settings import choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Tensor
from functron.nn.layers import (
    MATMUL,
    Matmul,
    apart,
    column_parallel,
    gather_sequence,
    linear_defs,
    name_columns,
    norm,
    norm_defs,
    row_parallel,
    weights,
)
from functron.ops.attention import attention
from functron.ops.chunked_attention import attend
from functron.ops.norms import is_lean
from functron.ops.operations import AUTO, Kernels, multiplier, upcast
from functron.ops.qk_norm_rope import QK_NORM_ROPE, qkv_norm_rope, rotate_pairs
from functron.spmd import collectives as lax
from functron.spmd.params import Normal, ParamDef, ones, zeros
from functron.spmd.spec import P
from functron.transforms.custom_vjp import custom_vjp

RopePairs = Literal["halves", "neighbours"]
"""Which dims of a head are rotated together; see `AttentionConfig`."""

_SEQ, _HEADS = 1, 2
_SEVERAL = 3  # dims of positions, where a token has several


@shows_differences
@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, for sequences longer than those of pretraining.

    Attributes:
        factor: how many times longer the longest wavelengths become.
        low_freq_factor: wavelengths above ``original_max_seq / low_freq_factor`` are stretched.
        high_freq_factor: wavelengths below ``original_max_seq / high_freq_factor`` are kept.
        original_max_seq: the sequence length of pretraining, in tokens.
        kind: ``"llama3"`` stretches long wavelengths alone (Grattafiori et al. 2024, section
            3.4.2); ``"yarn"`` those that turn seldom, and makes attention sharper (Peng et al.
            2023, section 3; DeepSeek-V3, GPT-OSS); ``"linear"`` stretches all by `factor` and takes
            no notice of the other fields (Chen et al. 2023); ``"longrope"`` stretches each pair of
            dims by its own of `factors` (Ding et al. 2024; Phi-3).
        beta_fast: yarn keeps wavelengths that turn more often than this in `original_max_seq`.
        beta_slow: yarn stretches by `factor` those that turn less often.
        mscale: together with `mscale_all_dim`, yarn multiplies cos and sin by m(mscale) /
            m(mscale_all_dim), where m(s) = 0.1 s ln(factor) + 1; if one is 0, by m(1).
        mscale_all_dim: see `mscale` and `softmax_factor`.
        truncate: yarn rounds the first and last pair of dims that it blends outwards to whole ones
            (GPT-OSS does not).
        attention_factor: yarn and longrope multiply cos and sin by this; 0: by what `mscale` says,
            or by 1.
        factors: of longrope, one for each rotated pair of dims.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192
    kind: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    attention_factor: float = 0.0
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        raise_problems("invalid RopeScaling", choice_problems(self))

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin: scores of rotated dims by its square."""
        if self.kind == "longrope":
            return self.attention_factor or 1.0
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    @property
    def softmax_factor(self) -> float:
        """DeepSeek's factor of the scores of all dims: m(mscale_all_dim)^2; see `mscale`."""
        return self._sharpness(self.mscale_all_dim) ** 2 if self.kind == "yarn" else 1.0

    def _sharpness(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dims: theta^(-2i / head_dim), float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    freqs = theta**-exponent
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "longrope":
        return freqs / compat.constant(scaling.factors, device)
    if scaling.kind == "yarn":
        kept = _yarn_share(head_dim, theta, scaling, device)
        return freqs / scaling.factor * (1 - kept) + freqs * kept
    wavelength = 2 * math.pi / freqs
    low = scaling.original_max_seq / scaling.low_freq_factor
    high = scaling.original_max_seq / scaling.high_freq_factor
    blend = (scaling.original_max_seq / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1 - blend) * freqs / scaling.factor + blend * freqs
    stretched = torch.where(wavelength > low, freqs / scaling.factor, smooth)
    return torch.where(wavelength < high, freqs, stretched)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """How much of each pair's frequency yarn keeps, from 1 to 0: a ramp over pairs (section 3.2).

    Pair i turns t times in the sequences of pretraining where theta^(2i / d) is original_max_seq /
    (2 pi t): the ramp begins at the pair that turns `beta_fast` times, and ends at `beta_slow`.
    """

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_seq / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    width = last - first if last != first else 1e-3  # a step; as small as where this comes from
    return 1 - ((pairs - first) / width).clamp(0, 1)


def rope_table(
    positions: Int[Tensor, "*places"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    sections: Sequence[int] = (),
) -> tuple[Float[Tensor, "*rows seq half"], Float[Tensor, "*rows seq half"]]:
    """(cos, sin) of position times frequency, times yarn's factor; computed in float32.

    Args:
        positions: int64 ``[seq]``, or ``[batch, seq]`` where samples differ (packed documents), or
            ``[batch, seq, sections]`` where a token has several positions.
        head_dim: number of rotated dims.
        theta: the longest wavelength is about 2 pi theta.
        sections: how many pairs of dims, one after the other, are rotated by each of a token's
            positions (Qwen2-VL, section 2.1: time, height and width).
    """
    freqs = rope_frequencies(head_dim, theta, scaling, positions.device)
    places = positions.to(torch.float32).unsqueeze(-1)
    if positions.dim() == _SEVERAL:  # the position of each pair of dims
        each = zip(places.unbind(-2), sections, strict=True)
        places = torch.cat([x.expand(*x.shape[:-1], size) for x, size in each], -1)
    angles = places * freqs
    factor = 1.0 if scaling is None else scaling.table_factor
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rope(
    x: Float[Tensor, "batch seq heads head_dim"],
    table: tuple[Float[Tensor, "*rows seq half"], Float[Tensor, "*rows seq half"]],
    *,
    interleaved: bool = False,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotate each pair of dims by its angle.

    Args:
        table: cos and sin of `rope_table` for the same positions, of each sample or of all.
        interleaved: pairs are (x_{2i}, x_{2i+1}), as in DeepSeek's models; otherwise (x_i, x_{i +
            d/2}), as in Llama.
        kernels: of ``"qk_norm_rope"``.
    """
    if kernels.takes("qk_norm_rope", x, *table):  # of keys it gets no heads
        return QK_NORM_ROPE(x, x[..., :0, :], None, None, *table, 0.0, False, interleaved)[0]
    return rotate_pairs(x, *table, interleaved=interleaved)


@shows_differences
@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Shapes and options of self-attention.

    Configs of models with all of these options inherit them: `functron.models.config.GPTConfig`.

    Attributes:
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads; 0 means as many as query heads, 1 is multi-query attention,
            numbers between are grouped queries (Ainslie et al. 2023).
        head_dim: width of a head; 0 means ``embed_dim // num_heads``.
        bias: biases on all linear layers.
        qkv_bias: biases on queries, keys and values, also without `bias` (Qwen2).
        out_bias: a bias on the output of attention, also without `bias`.
        qkv_clip: queries, keys and values are clamped to [-qkv_clip, qkv_clip] before norms and
            rotary positions (MPT; OLMo 1); 0: not clamped.
        qk_norm: RMSNorm on the queries and keys of each head (Dehghani et al. 2023; Qwen3).
        qk_norm_across: that norm is over all heads together (OLMo 2), not of each.
        qk_norm_last: it comes after rotary positions (Hunyuan), not before.
        qk_norm_kind: ``"layer"`` is a LayerNorm in its place (Phi), ``"head_layer"`` one without a
            bias, whose scale is each head's own (Command R+; StableLM 2).
        zero_centered_norm: norms multiply by 1 + scale, and scales start at 0 (Gemma).
        norm_eps: epsilon of the norms.
        rope_pairs: pairs of rotated dims are dims i and i + half of them, ``"halves"`` (Llama), or
            2i and 2i + 1, ``"neighbours"`` (GPT-J, GLM); `rope_interleaved` says it of latent
            attention.
        sinks: each head has a learned logit that takes part in the softmax of attention and has no
            value (GPT-OSS).
        attention_scale: multiplies attention scores; 0: 1 / sqrt(head_dim).
        attention_gate: head outputs are multiplied elementwise by sigmoid(x W_gate), x being the
            input of attention (Qiu et al. 2025, "Gated Attention for Large Language Models";
            Qwen3-Next).
        fused_projections: queries, keys and values are one product of one matrix, ``[embed,
            kv_heads, group + 2, head_dim]``: a key head's queries, its key, its value (Megatron's
            linear_qkv). "auto" is False here: a run, which knows its device, decides.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qkv_clip: float = 0.0
    qk_norm: bool = False
    qk_norm_across: bool = False
    qk_norm_last: bool = False
    qk_norm_kind: Literal["rms", "layer", "head_layer"] = "rms"
    zero_centered_norm: bool = False
    norm_eps: float = 1e-6
    rope_pairs: RopePairs = "halves"
    sinks: bool = False
    attention_scale: float = 0.0
    attention_gate: bool = False
    fused_projections: bool | Literal["auto"] = "auto"

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def score_scale(self) -> float:
        """The factor of attention scores; 0: 1 / sqrt(head_size)."""
        return self.attention_scale


def attention_defs(
    config: AttentionConfig, *, stddev: float, out_stddev: float, dtype: torch.dtype
) -> dict:
    """Defs ``{"q", "k", "v", "out", "q_norm"?, "k_norm"?, "sinks"?, "gate"?}``.

    With `AttentionConfig.fused_projections`, ``"qkv"`` in place of the first three.
    """

    def projection(num_heads: int, axis: str, pieces: tuple[tuple[str, int], ...] = ()) -> dict:
        slots = (sum(size for _, size in pieces),) if pieces else ()
        shape = (num_heads, *slots, config.head_size)
        axes = (axis, *(None for _ in slots), None)
        return linear_defs(
            (config.embed_dim, *shape),
            ("embed", *axes),
            stddev=stddev,
            bias=shape if config.bias or config.qkv_bias else None,
            bias_axes=axes,
            dtype=dtype,
            pieces=pieces,
            matrix=(1, len(shape)),
        )

    group = config.num_heads // config.kv_heads
    pieces = (("q", group), ("k", 1), ("v", 1))
    defs: dict = (
        {"qkv": projection(config.kv_heads, "kv_heads", pieces)}
        if config.fused_projections is True
        else {
            "q": projection(config.num_heads, "heads"),
            "k": projection(config.kv_heads, "kv_heads"),
            "v": projection(config.kv_heads, "kv_heads"),
        }
    )
    defs["out"] = out_defs(config, config.head_size, stddev=out_stddev, dtype=dtype)
    if config.attention_gate:
        defs["gate"] = projection(config.num_heads, "heads")
    if config.qk_norm:
        defs |= _qk_norm_defs(config, dtype)
    if config.sinks:
        shape = (config.num_heads,)
        defs["sinks"] = ParamDef(shape, ("heads",), Normal(stddev), dtype, decay=False)
    return defs


def out_defs(config: AttentionConfig, width: int, *, stddev: float, dtype: torch.dtype) -> dict:
    """Defs of the projection from heads of this width to the stream."""
    return linear_defs(
        (config.num_heads, width, config.embed_dim),
        ("heads", None, "embed"),
        stddev=stddev,
        bias=(config.embed_dim,) if config.bias or config.out_bias else None,
        bias_axes=("embed",),
        dtype=dtype,
        matrix=(2, 1),
    )


def _qk_norm_defs(config: AttentionConfig, dtype: torch.dtype) -> dict:
    names, zero_centered = ("q_norm", "k_norm"), config.zero_centered_norm
    kind = config.qk_norm_kind
    if kind != "head_layer" and not config.qk_norm_across:
        each = {"axis": None, "dtype": dtype, "zero_centered": zero_centered}
        return {name: norm_defs(config.head_size, kind, **each) for name in names}
    start, size = zeros if zero_centered else ones, config.head_size
    counts = (("heads", config.num_heads), ("kv_heads", config.kv_heads))
    scale = "scale" if config.qk_norm_across else "layer_scale"
    return {
        name: {scale: ParamDef((count, size), (axis, None), start, dtype, decay=False)}
        for name, (axis, count) in zip(names, counts, strict=True)
    }


def causal_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """`functron.ops.attention.attention` of whole sequences, each query seeing keys up to its own.

    Each head of k and v serves ``heads / kv_heads`` of q's. Scores are multiplied by `scale`; None:
    1 / sqrt(head_dim).
    """
    return attention(q, k, v, causal=True, scale=scale)


def self_attention(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: AttentionConfig,
    *,
    rope: tuple[Tensor, Tensor] | None,
    stream: P,
    axis: str = "tp",
    core: Callable = causal_attention,
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "batch seq embed"]:
    """Causal self-attention over the stream, with the heads split over `axis`.

    Args:
        params: this rank's part of `attention_defs`.
        x: has spec `stream`, as the result.
        rope: tables of `rope_table` for the tokens of all ranks of `axis` together, or None without
            rotary positions. Tables of fewer dims than a head has rotate its first ones.
        core: computes softmax(q k^T) v as `causal_attention` does, of this rank's heads; for
            example `context_attention`, where axes of the mesh split the sequence, or where there
            are sinks, which it is given as ``sinks=``.
        kernels: of ``"qk_norm_rope"`` and ``"rms_norm"``.
        matmul: computes the projections.

    Collectives: one all-reduce of the result's bytes forward and one backward; with a split
    sequence, all-gather and reduce-scatter each. With `qk_norm_across`, two all-reduces of one
    number per token besides, in either direction.
    """
    x, params = gather_sequence(x, stream, axis), apart(params, matmul)
    project = functools.partial(_project, params, x, config, axis, matmul)
    heads = [project(name) for name in (("qkv",) if "qkv" in params else ("q", "k", "v"))]
    if config.qkv_clip:
        heads = [y.clamp(-config.qkv_clip, config.qkv_clip) for y in heads]
    if _is_fused(heads, config, rope, kernels):
        q, k, v = _norm_and_rotate(params, heads, config, rope)
    else:
        q, k, v = heads if "qkv" not in params else _split_heads(heads[0])
        if not config.qk_norm_last:
            q, k = _norm_heads(params, q, k, config, kernels, axis)
        q, k = (_rotate_heads(y, rope, config, kernels) for y in (q, k))
        if config.qk_norm_last:
            q, k = _norm_heads(params, q, k, config, kernels, axis)
    q, k, v = (name_columns(y, n, stream, axis) for n, y in zip("qkv", (q, k, v), strict=True))
    if config.score_scale:  # the core divides scores by the root of the width of heads
        q = q * (config.score_scale * math.sqrt(config.head_size))
    k, v = (_select_own_heads(y, q.shape[-2], config, axis) for y in (k, v))
    y = core(q, k, v, sinks=params["sinks"]) if config.sinks else core(q, k, v)
    if config.attention_gate:
        y = y * torch.sigmoid(project("gate"))
    y = name_columns(y, "heads", stream, axis)
    out: Any = {"name": "attention/out", "matmul": matmul}
    return row_parallel(y, *weights(params["out"]), stream=stream, axis=axis, **out)


def _project(
    params: dict, x: Tensor, config: AttentionConfig, axis: str, matmul: Matmul, name: str
) -> Tensor:
    """Heads of queries, keys, values, or of the gate; keys may be the same on all ranks."""
    w, bias, lora = weights(params[name])
    several = name in ("k", "v") and lax.axis_size(axis) > 1
    replicated = several and w.shape[1] == config.kv_heads
    where: Any = {"name": f"attention/{name}", "axis": axis, "replicated": replicated}
    return column_parallel(x, w, bias, lora, matmul=matmul, **where)


def _is_fused(
    heads: list[Tensor], config: AttentionConfig, rope: tuple[Tensor, Tensor] | None, kernels
) -> bool:
    """Whether one kernel normalises and rotates: it rotates all dims, and norms single heads."""
    if rope is None or 2 * rope[0].shape[-1] != config.head_size:
        return False
    if config.qk_norm_across or config.qk_norm_last or config.qk_norm_kind != "rms":
        return False
    return kernels.takes("qk_norm_rope", *heads[:2], *rope)


def _norm_and_rotate(params: dict, heads: list[Tensor], config: AttentionConfig, rope: Any) -> Any:
    """Queries and keys, normalised and rotated, and values, by a kernel."""
    names = ("q_norm", "k_norm") if config.qk_norm else ()
    q_scale, k_scale = [params[name]["scale"] for name in names] or (None, None)
    interleaved = config.rope_pairs == "neighbours"
    rest = q_scale, k_scale, *rope, config.norm_eps, config.zero_centered_norm, interleaved
    if "qkv" in params:
        return qkv_norm_rope(heads[0], *rest)
    return *QK_NORM_ROPE(*heads[:2], *rest), heads[2]


def _norm_heads(
    params: dict, q: Tensor, k: Tensor, config: AttentionConfig, kernels: Kernels, axis: str
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised if the model does so."""
    if config.qk_norm_across:
        q = _norm_across(params["q_norm"], q, config.num_heads, config, axis)
        k = _norm_across(params["k_norm"], k, config.kv_heads, config, axis)
    elif config.qk_norm and config.qk_norm_kind == "head_layer":
        q, k = (_norm_each(params[f"{n}_norm"], x, config) for n, x in (("q", q), ("k", k)))
    elif config.qk_norm:
        eps, zero_centered = config.norm_eps, config.zero_centered_norm
        own: Any = {"eps": eps, "zero_centered": zero_centered, "kernels": kernels}
        q, k = norm(params["q_norm"], q, **own), norm(params["k_norm"], k, **own)
    return q, k


def _norm_each(params: dict, x: Tensor, config: AttentionConfig) -> Tensor:
    """LayerNorm of each head, times its own scale."""
    normed = norm({}, upcast(x), eps=config.norm_eps)
    scale = multiplier(params["layer_scale"], normed, config.zero_centered_norm)
    return (normed * scale).to(x.dtype)


def _split_heads(qkv: Tensor) -> list[Tensor]:
    """Queries, keys and values of ``[..., kv_heads, group + 2, head_dim]``."""
    pieces = qkv.split((qkv.shape[-2] - 2, 1, 1), -2)
    # a view of which backward keeps one would keep all
    return [piece.flatten(-3, -2).contiguous() for piece in pieces]


def _rotate_heads(
    x: Tensor, rope: tuple[Tensor, Tensor] | None, config: AttentionConfig, kernels: Kernels
) -> Tensor:
    """Heads whose first dims are rotated, as many as there are angles for."""
    if rope is None:
        return x
    size, interleaved = 2 * rope[0].shape[-1], config.rope_pairs == "neighbours"
    first = apply_rope(x[..., :size], rope, interleaved=interleaved, kernels=kernels)
    return first if size == x.shape[-1] else torch.cat([first, x[..., size:]], -1)


def _norm_across(
    params: dict, x: Tensor, num_heads: int, config: AttentionConfig, axis: str
) -> Tensor:
    """RMSNorm over the dims of all heads, of which this rank may have a part."""
    size, center = num_heads * config.head_size, config.zero_centered_norm
    split = x.shape[-2] < num_heads

    def mean(rows: Tensor) -> Tensor:
        sums = rows.sum((-2, -1), keepdim=True)
        return (lax.psum(sums, axis) if split else sums) / size

    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, tuple]:
        wide = upcast(x)
        rstd = torch.rsqrt(mean(wide.square()) + config.norm_eps)
        return (wide * rstd * multiplier(scale, wide, center)).to(x.dtype), (x, scale, rstd)

    def backward(residuals: tuple, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, rstd = residuals
        g, normed = upcast(dy), upcast(x) * rstd
        moved = g * multiplier(scale, g, center)
        dx = rstd * (moved - normed * mean(moved * normed))
        return dx.to(x.dtype), (g * normed).sum_to_size(scale.shape).to(scale.dtype)

    norm = custom_vjp(lambda *args: forward(*args)[0], forward, backward)
    given = x, params["scale"]
    return norm(*given) if is_lean() else forward(*given)[0]


def _select_own_heads(x: Tensor, num_local: int, config: AttentionConfig, axis: str) -> Tensor:
    """The heads of keys or values that this rank's `num_local` query heads use."""
    group = config.num_heads // config.kv_heads
    if x.shape[-2] * group == num_local:
        return x
    # every rank holds all key heads, and takes those of its queries by a mask, since Inductor
    # compiles the gradient of such an index wrongly (see `own_part`)
    heads = lax.global_index(num_local, axis, device=x.device) // group
    if config.num_heads % num_local or group % num_local:  # tp divides neither: one for each query
        own = torch.arange(x.shape[-2], device=x.device) == heads.unsqueeze(-1)
        return own.to(x.dtype) @ x
    own = (torch.arange(x.shape[-2], device=x.device) == heads[:1]).unsqueeze(-1)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(own, x, zero).sum(-2, keepdim=True, dtype=x.dtype)


# --- keys and values of tokens before, in generation


class KVCache(NamedTuple):
    """The keys and values of one layer, this rank's heads.

    Attributes:
        k: ``[batch, length, kv_heads, head_dim]``, rotated; row p is that of the token at place p.
        v: ``[batch, length, kv_heads, value_dim]``.
    """

    k: Tensor
    v: Tensor


def empty_cache(
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    length: int,
) -> KVCache:
    """A cache with room for `length` tokens, like these keys and values; it holds zeros."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :1]).expand(-1, length, -1, -1)

    return KVCache(zeros(k), zeros(v))


def write_cache(
    cache: KVCache,
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    places: Int[Tensor, "batch seq"],
) -> KVCache:
    """The cache with new keys and values at their places, distinct within a row; others stay."""

    def put(kept: Tensor, new: Tensor) -> Tensor:
        at = places[..., None, None].expand(new.shape)
        return kept.scatter(_SEQ, at, new.to(kept.dtype))

    return KVCache(put(cache.k, k), put(cache.v, v))


def cached_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    cache: KVCache,
    places: Int[Tensor, "batch seq"],
    *,
    window: int | Int[Tensor, ""] = 0,
    sinks: Float[Tensor, " heads"] | None = None,
    cap: float = 0.0,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the kept keys, each query seeing those up to its own.

    Args:
        q: ``[batch, seq, heads, head_dim]``, few of them: scores of all are in memory at once.
        cache: with the keys of these tokens in it already.
        places: int64 ``[batch, seq]``, those of the queries.
        window: how many keys a query sees at most, itself included; 0 for all.
        sinks: ``[heads]`` logits that join the softmax's denominator only.
        cap: scores s are cap tanh(s / cap); 0: as they are.

    Returns:
        ``[batch, seq, heads, value_dim]`` in q's dtype. No collectives.
    """
    keys = torch.arange(cache.k.shape[_SEQ], device=q.device)
    distance = places.unsqueeze(-1) - keys
    seen = distance >= 0
    if isinstance(window, Tensor):
        seen = seen & ((distance < window) | (window == 0))
    elif window:
        seen = seen & (distance < window)
    q, k, v = (x.transpose(_SEQ, _HEADS) for x in (q, cache.k, cache.v))
    out, lse = attend(q, k, v, ~seen.unsqueeze(1), 1 / math.sqrt(q.shape[-1]), cap=cap)
    if sinks is not None:
        share = torch.sigmoid(lse - upcast(sinks).unsqueeze(-1))
        out = out * share.unsqueeze(-1)
    return out.to(q.dtype).transpose(_SEQ, _HEADS)
