"""Mamba-2: state-space duality, by chunks and token by token, and the mixer around it.

Each head has a state S ``[head_dim, state_dim]``, which decays and adds each token's input:

    S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T        y_t = S_t c_t

(Dao & Gu 2024, "Transformers are SSMs", eq. 1 and section 7). `ssd_step` is this recurrence. `ssd`
computes the same of a whole sequence with matrix products: within a chunk it is masked linear
attention, y = (L * (C B^T)) (dt x) with L_ts = exp(a dt_{s+1} + ... + a dt_t) (section 6), and only
one state per chunk is passed to the next chunk.

The mixer is projections, a short convolution, the state space, and a gated norm:

    z, x, B, C, dt = u W_z, u W_x, u W_B, u W_C, u W_dt
    x, B, C = silu(conv(x)), silu(conv(B)), silu(conv(C))
    y = ssd(x, softplus(dt + dt_bias), -exp(a_log), B, C) + d x
    out = (rms_norm(y silu(z)) scale) W_out

(section 7 and figure 6). Heads are split over ranks, and with them x, z and dt. So are groups of B
and C if the number of ranks divides theirs, as in Megatron's MambaMixer; with fewer groups every
rank computes all of B and C and uses those of its heads, and the ranks that share a group add up
the sums of squares of its norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import random
from functron.core.tables import shows_differences
from functron.core.typing import Float, Tensor
from functron.nn.layers import column_parallel, gather_sequence, linear_defs, row_parallel, weights
from functron.spmd import collectives as lax
from functron.spmd.params import ParamDef, ones
from functron.spmd.spec import P
from functron.transforms import scan


def ssd(
    x: Float[Tensor, "batch seq heads head_dim"],
    dt: Float[Tensor, "batch seq heads"],
    a: Float[Tensor, " heads"],
    b: Float[Tensor, "batch seq groups state_dim"],
    c: Float[Tensor, "batch seq groups state_dim"],
    *,
    chunk: int,
    state: Float[Tensor, "batch heads head_dim state_dim"] | None = None,
) -> tuple[
    Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch heads head_dim state_dim"]
]:
    """y_t = S_t c_t for every token, and the last state; see the module.

    Operations grow with ``seq * chunk``, and between forward and backward live, beside the
    operands, ``chunk`` numbers per token and head and a state per chunk and head.

    Args:
        x: ``[batch, seq, heads, head_dim]``; computed in float32 at least.
        dt: ``[batch, seq, heads]``, at least 0: the step sizes.
        a: ``[heads]``, negative: the rates of decay.
        b: ``[batch, seq, groups, state_dim]``; each group serves heads / groups consecutive heads.
        c: as `b`.
        chunk: tokens per chunk; the numbers do not depend on it.
        state: that before the first token; None: zeros.

    Returns:
        y in x's dtype, and the state in float32 at least. No collectives: heads are independent.

    Raises:
        ValueError: the chunk is empty, or groups do not divide heads.
    """
    _check_sizes(x, b, chunk)
    seq, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, seq)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = _split_chunks(dt.to(wide), chunk).unflatten(-1, (groups, -1)).permute(0, 1, 3, 4, 2)
    inputs = _split_chunks(x.to(wide), chunk).unflatten(-2, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    inputs = inputs * steps.unsqueeze(-1)
    b, c = (_split_chunks(y.to(wide), chunk).transpose(2, 3) for y in (b, c))

    # from here on [batch, chunks, groups, heads of a group, ...]: tokens without decay or input,
    # such as those that fill the last chunk, leave the state as it is
    total = (steps * a.to(wide).unflatten(0, (groups, -1)).unsqueeze(-1)).cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    seen = between.masked_fill(later, float("-inf")).exp()
    inside = ((c @ b.mT).unsqueeze(3) * seen) @ inputs

    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    own = (inputs * left).mT @ b.unsqueeze(3)
    first = torch.zeros_like(own[:, 0])
    if state is not None:
        first = state.to(wide).unflatten(1, (groups, -1))
    kept = total[..., -1].exp()[..., None, None]
    last, starts = scan(_pass_state, first, (own.movedim(1, 0), kept.movedim(1, 0)))
    before = (c.unsqueeze(3) @ starts.movedim(0, 1).mT) * total.exp().unsqueeze(-1)

    y = (inside + before).permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    return y[:, :seq].to(x.dtype), last.flatten(1, 2)


def ssd_step(
    state: Float[Tensor, "batch heads head_dim state_dim"],
    x: Float[Tensor, "batch heads head_dim"],
    dt: Float[Tensor, "batch heads"],
    a: Float[Tensor, " heads"],
    b: Float[Tensor, "batch groups state_dim"],
    c: Float[Tensor, "batch groups state_dim"],
) -> tuple[Float[Tensor, "batch heads head_dim"], Float[Tensor, "batch heads head_dim state_dim"]]:
    """One token of `ssd`: S = exp(dt a) S + dt x b^T, y = S c.

    Returns:
        y in x's dtype, and the new state in that of `state`. No collectives.
    """
    group = x.shape[1] // b.shape[1]
    wide = state.dtype
    b, c = (y.to(wide).repeat_interleave(group, 1) for y in (b, c))
    dt = dt.to(wide)
    taken = (dt.unsqueeze(-1) * x.to(wide)).unsqueeze(-1) * b.unsqueeze(-2)
    new = (dt * a.to(wide)).exp()[..., None, None] * state + taken
    return (new @ c.unsqueeze(-1)).squeeze(-1).to(x.dtype), new


def _pass_state(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    own, kept = row
    return kept * state + own, state


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """``[batch, seq, ...]`` as ``[batch, chunks, chunk, ...]``, zeros at the end."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (*((0, 0) * (x.dim() - 2)), 0, missing))
    return x.unflatten(1, (-1, chunk))


def _check_sizes(x: Tensor, b: Tensor, chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"ssd: got chunk={chunk}; wanted at least 1 token; 64 to 256 are fast")
    if x.shape[2] % b.shape[2]:
        raise ValueError(
            f"ssd: got {x.shape[2]} heads and {b.shape[2]} groups of b and c; wanted a number of "
            "groups that divides the heads; change one"
        )


@shows_differences
@dataclass(frozen=True)
class Mamba2Config:
    """Shapes and options of the mixer.

    Attributes:
        embed_dim: width of the stream.
        num_heads: heads of the state space.
        head_dim: width of a head; ``num_heads * head_dim`` is the inner width.
        num_groups: groups of B and C, each serving consecutive heads; the gated norm is over the
            heads of a group.
        state_dim: numbers of state per feature.
        conv_width: number of tokens that the convolution sees.
        chunk: tokens per chunk of `ssd`.
        bias: biases on the projections in and out.
        conv_bias: biases on the convolution.
        norm_eps: epsilon of the gated norm.
        dt_limit: lower and upper limit of step sizes.
        dt_init: initial step sizes lie between these, evenly on a log scale.
        a_init: initial decays a lie evenly between minus these.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    num_groups: int = 1
    state_dim: int = 128
    conv_width: int = 4
    chunk: int = 256
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
    dt_init: tuple[float, float] = (1e-3, 1e-1)
    a_init: tuple[float, float] = (1.0, 16.0)


class MambaCache(NamedTuple):
    """The state of generation after some tokens, of one layer and this rank's heads and groups.

    Attributes:
        x: ``[batch, conv_width - 1, heads, head_dim]``, inputs that the convolution will still see.
        b, c: ``[batch, conv_width - 1, groups, state_dim]``, likewise.
        state: ``[batch, heads, head_dim, state_dim]`` in float32 at least.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    state: Tensor


@dataclass(frozen=True)
class _Uniform:
    """x ~ U(low, high), then its log, or the inverse of softplus of its exponential."""

    low: float
    high: float
    then: Literal["", "log", "inverse_softplus_exp"] = ""

    def __call__(self, key, shape, dtype, index=None) -> Tensor:
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        x = random.uniform(key, shape, drawn, self.low, self.high, index=index)
        if self.then == "log":
            x = x.log()
        elif self.then == "inverse_softplus_exp":
            step = x.exp()
            x = step + (-torch.expm1(-step)).log()
        return x.to(dtype)


def mamba_defs(
    config: Mamba2Config, *, stddev: float, out_stddev: float, dtype: torch.dtype
) -> dict:
    """Defs ``{"z", "x", "b", "c", "dt", "conv", "a_log", "d", "dt_bias", "norm", "out"}``.

    The logical axes are "embed", "heads" and "groups". Decays, skips and steps are float32 at
    least, whatever `dtype` is.
    """
    n = config
    heads, groups = (n.num_heads, n.head_dim), (n.num_groups, n.state_dim)
    wide = torch.promote_types(dtype, torch.float32)

    def project(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> dict:
        return linear_defs(
            (n.embed_dim, *shape),
            ("embed", *axes),
            stddev=stddev,
            bias=shape if n.bias else None,
            bias_axes=axes,
            dtype=dtype,
        )

    def conv(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> dict:
        bound = 1 / math.sqrt(n.conv_width)
        start = _Uniform(-bound, bound)
        defs = {"w": ParamDef((*shape, n.conv_width), (*axes, None), start, dtype)}
        if n.conv_bias:
            defs["b"] = ParamDef(shape, axes, start, dtype, decay=False)
        return defs

    def per_head(start) -> ParamDef:
        return ParamDef((n.num_heads,), ("heads",), start, wide, decay=False)

    by_head, by_group = ("heads", None), ("groups", None)
    low, high = n.dt_init
    steps = _Uniform(math.log(low), math.log(high), "inverse_softplus_exp")
    return {
        "z": project(heads, by_head),
        "x": project(heads, by_head),
        "b": project(groups, by_group),
        "c": project(groups, by_group),
        "dt": project(heads[:1], by_head[:1]),
        "conv": {
            "x": conv(heads, by_head),
            "b": conv(groups, by_group),
            "c": conv(groups, by_group),
        },
        "a_log": per_head(_Uniform(*n.a_init, "log")),
        "d": per_head(ones),
        "dt_bias": per_head(steps),
        "norm": {"scale": ParamDef(heads, by_head, ones, dtype, decay=False)},
        "out": linear_defs(
            (*heads, n.embed_dim),
            (*by_head, "embed"),
            stddev=out_stddev,
            bias=(n.embed_dim,) if n.bias else None,
            bias_axes=("embed",),
            dtype=dtype,
        ),
    }


def causal_conv(
    x: Float[Tensor, "batch seq *features"],
    w: Float[Tensor, "*features width"],
    bias: Float[Tensor, "*features"] | None = None,
    before: Float[Tensor, "batch past *features"] | None = None,
) -> Float[Tensor, "batch seq *features"]:
    """y_t = sum_j w_j x_{t - width + 1 + j} + bias: a convolution of each feature by itself.

    Args:
        x: ``[batch, seq, *features]``.
        w: ``[*features, width]``.
        bias: ``[*features]``.
        before: ``[batch, width - 1, *features]``, the tokens before; None: zeros.
    """
    width, seq = w.shape[-1], x.shape[1]
    if before is None:
        x = F.pad(x, (*((0, 0) * (x.dim() - 2)), width - 1, 0))
    else:
        x = torch.cat([before, x], 1)
    y = x[:, :seq] * w[..., 0]
    for place in range(1, width):
        y = y + x[:, place : place + seq] * w[..., place]
    return y if bias is None else y + bias


def gated_norm(
    y: Float[Tensor, "batch seq heads head_dim"],
    z: Float[Tensor, "batch seq heads head_dim"],
    scale: Float[Tensor, "heads head_dim"],
    *,
    num_groups: int,
    eps: float,
    axis: str = "tp",
) -> Float[Tensor, "batch seq heads head_dim"]:
    """g / sqrt(mean(g^2) + eps) * scale with g = y silu(z), the mean over the heads of a group.

    Args:
        y: ``[batch, seq, heads, head_dim]``, this rank's heads; computed in float32 at least.
        z: as `y`.
        scale: ``[heads, head_dim]``.
        num_groups: over all ranks of `axis`.

    Returns:
        In z's dtype. Collectives: none where ranks have whole groups; else one all-reduce of
        `num_groups` numbers per token forward and one backward.
    """
    ranks = lax.axis_size(axis)
    wide = torch.promote_types(z.dtype, torch.float32)
    g = y.to(wide) * F.silu(z.to(wide))
    local = num_groups // ranks if num_groups % ranks == 0 else 1
    each = g.unflatten(2, (local, -1))
    mean = each.square().mean((-1, -2))
    if num_groups % ranks:
        mean = _mean_over_ranks(mean, num_groups, axis)
    normed = (each * torch.rsqrt(mean + eps)[..., None, None]).flatten(2, 3)
    return (normed * scale.to(wide)).to(z.dtype)


def _mean_over_ranks(
    mean: Float[Tensor, "batch seq 1"], num_groups: int, axis: str
) -> Float[Tensor, "batch seq 1"]:
    """The mean over a group's ranks, from that over this rank's part of the group."""
    sharing = lax.axis_size(axis) // num_groups
    if num_groups == 1:
        return lax.psum(mean, axis) / sharing
    own = _find_own_group(num_groups, axis, mean.device).to(mean.dtype)
    return (lax.psum(mean * own, axis) * own).sum(-1, keepdim=True) / sharing


def _find_own_group(num_groups: int, axis: str, device: torch.device) -> Tensor:
    """``[num_groups]``: which group this rank's heads are of, where several ranks share one."""
    sharing = lax.axis_size(axis) // num_groups
    return torch.arange(num_groups, device=device) == lax.axis_index(axis) // sharing


def _select_groups(x: Tensor, config: Mamba2Config, axis: str) -> Tensor:
    """The groups of b or c that this rank's heads use."""
    if x.shape[-2] * lax.axis_size(axis) == config.num_groups or config.num_groups == 1:
        return x
    own = _find_own_group(config.num_groups, axis, x.device).unsqueeze(-1)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(own, x, zero).sum(-2, keepdim=True, dtype=x.dtype)


class _Inputs(NamedTuple):
    """The inputs of the state space, made of the stream; the first three before the convolution."""

    x: Tensor
    b: Tensor
    c: Tensor
    z: Tensor
    dt: Tensor


def _project_inputs(params: dict, u: Tensor, config: Mamba2Config) -> _Inputs:
    x, b, c, z, dt = (column_parallel(u, *weights(params[n])) for n in ("x", "b", "c", "z", "dt"))
    wide = torch.promote_types(dt.dtype, torch.float32)
    dt = F.softplus(dt.to(wide) + params["dt_bias"].to(wide))
    low, high = config.dt_limit
    if low > 0 or high < math.inf:
        dt = dt.clamp(low, high)
    return _Inputs(x, b, c, z, dt)


def _compute_decays(params: dict) -> Tensor:
    a_log = params["a_log"]
    return -a_log.to(torch.promote_types(a_log.dtype, torch.float32)).exp()


def _convolve(params: dict, x: Tensor, before: Tensor | None) -> Tensor:
    return F.silu(causal_conv(x, params["w"], params.get("b"), before))


def _gate_output(
    params: dict, y: Tensor, x: Tensor, z: Tensor, config: Mamba2Config, axis: str
) -> Tensor:
    """The skip and the gated norm."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = y.to(wide) + params["d"].to(wide).unsqueeze(-1) * x.to(wide)
    settings = {"num_groups": config.num_groups, "eps": config.norm_eps, "axis": axis}
    return gated_norm(y, z, params["norm"]["scale"], **settings)


def mamba(
    params: dict,
    u: Float[Tensor, "batch seq embed"],
    config: Mamba2Config,
    *,
    stream: P,
    axis: str = "tp",
) -> Float[Tensor, "batch seq embed"]:
    """The mixer over whole sequences; see the module.

    Args:
        params: this rank's part of `mamba_defs`.
        u: ``[batch, seq, embed]`` with spec `stream`.
        stream: the spec of u and of the result. Its sequence may be split over `axis` alone.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `row_parallel`, with a split
        sequence also `gather_sequence`; and those of `gated_norm`.
    """
    u = gather_sequence(u, stream, axis)
    made = _project_inputs(params, u, config)
    x, b, c = (_convolve(params["conv"][n], getattr(made, n), None) for n in ("x", "b", "c"))
    b, c = (_select_groups(y, config, axis) for y in (b, c))
    y, _ = ssd(x, made.dt, _compute_decays(params), b, c, chunk=config.chunk)
    y = _gate_output(params, y, x, made.z, config, axis)
    return row_parallel(y, *weights(params["out"]), stream=stream, axis=axis)


def mamba_cache(params: dict, config: Mamba2Config, batch: int) -> MambaCache:
    """The cache before the first token.

    Args:
        params: this rank's part of `mamba_defs`.
        batch: number of sequences.
    """

    def past(name: str) -> Tensor:
        w = params["conv"][name]["w"]
        return w.new_zeros(batch, config.conv_width - 1, *w.shape[:-1])

    w = params["conv"]["x"]["w"]
    wide = torch.promote_types(w.dtype, torch.float32)
    state = w.new_zeros(batch, *w.shape[:-1], config.state_dim, dtype=wide)
    return MambaCache(past("x"), past("b"), past("c"), state)


def mamba_step(
    params: dict,
    u: Float[Tensor, "batch 1 embed"],
    cache: MambaCache,
    config: Mamba2Config,
    *,
    axis: str = "tp",
) -> tuple[Float[Tensor, "batch 1 embed"], MambaCache]:
    """The mixer over the next token, and the cache after it: `mamba` as a recurrence.

    Args:
        params: this rank's part of `mamba_defs`.
        u: ``[batch, 1, embed]``, whole on every rank of `axis`.
        cache: after the tokens before.

    Returns:
        Collectives: as `mamba` of one token.
    """
    made = _project_inputs(params, u, config)
    x, b, c = (
        _convolve(params["conv"][n], getattr(made, n), getattr(cache, n)) for n in ("x", "b", "c")
    )
    own_b, own_c = (_select_groups(y, config, axis)[:, 0] for y in (b, c))
    y, state = ssd_step(cache.state, x[:, 0], made.dt[:, 0], _compute_decays(params), own_b, own_c)
    y = _gate_output(params, y.unsqueeze(1), x, made.z, config, axis)
    out = row_parallel(y, *weights(params["out"]), stream=P(), axis=axis)
    past = {n: torch.cat([getattr(cache, n), getattr(made, n)], 1)[:, 1:] for n in ("x", "b", "c")}
    return out, MambaCache(**past, state=state)
