"""Causal attention of sequences that are split over ranks: context parallelism.

Two mesh axes split a sequence. Along `cp` keys and values come to the queries: passed around a
ring (Liu et al. 2023) or gathered (Dubey et al. 2024, Llama 3). Along `ulysses` heads are exchanged
for sequence, so that each rank has whole sequences of some heads (Jacobs et al. 2023). Both
together are a ring of groups (Fang & Zhao 2024). Positions of tokens, packed documents, windows and
sinks are the same as on one device, and so are the numbers.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from functron.errors import Problem, nearest, raise_problems
from functron.nn.ring import Kind, Ring, Tests, needed_steps, ring_attention
from functron.nn.zigzag import own_part
from functron.ops.attention import attention
from functron.ops.kernels import AUTO, Kernels
from functron.spmd import collectives as lax
from functron.typing import Float, Int, Tensor

_SEQ, _HEADS = 1, 2


def context_attention(
    q: Float[Tensor, "batch seq heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"],
    v: Float[Tensor, "batch seq kv_heads value_dim"],
    *,
    positions: Int[Tensor, "*batch seq"] | None = None,
    segments: Int[Tensor, "batch seq"] | None = None,
    window: int | Int[Tensor, ""] = 0,
    sinks: Float[Tensor, " heads"] | None = None,
    kind: Kind = "ring",
    balanced: bool = False,
    scale: float | None = None,
    cap: float = 0.0,
    axis: str = "cp",
    ulysses: str = "ulysses",
    ring_size: int | None = None,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq heads value_dim"]:
    """softmax(scale q k^T + mask) v for this rank's queries over the keys of all ranks.

    The sequence is split over ``(axis, ulysses)``, major to minor. A query sees the keys of its
    document up to itself and, with a window, the last `window` of them.

    Collectives, for n = `ring_size` ranks that exchange, the m steps around the ring at which
    somebody sees keys (n - 1 without a window), u ranks of `ulysses`, and K, V, Q, O the bytes of
    this rank's operands and result (K and V count u / gcd(u, kv_heads) times):

    * `ulysses`: four all-to-alls, of Q, K, V and O; the same backward.
    * "ring": forward m ppermutes of K and m of V over `axis`. Backward the same once more, and m
      of dk and m of dv, which are K and V in float32 at least.
    * "gather": two all-gathers, results n K and n V; backward two reduce-scatters of these.
    * Integers of 4 bytes a token: segments if given; positions if given per sample and with a
      window. Each is all-gathered over `ulysses`, then sent m times ("ring") or all-gathered over
      `axis`; once, in forward.

    Between forward and backward live q, k, v (of a gather: all ranks' k and v), the result, one
    number per query and head, and the integers. Work is that of the visible half of the scores
    where `balanced`, else up to twice that: every rank computes as many blocks as the last.

    Args:
        q: ``[batch, seq, heads, head_dim]``: this rank's heads and part of the sequence.
        k: ``[batch, seq, kv_heads, head_dim]``; each serves heads / kv_heads consecutive heads.
        v: as `k`; its width may be another.
        positions: ``[batch, seq]`` places in the document, increasing by one within each. Needed
            where data was arranged per document (`balanced`, `segments` and a window). None, or
            ``[seq]``: places in the sequence, which follow from the order.
        segments: ``[batch, seq]`` document numbers of packed samples; None where each is one.
        window: how many keys a query sees at most, itself included; 0 for all. An integer tensor
            may differ between layers that are scanned, but every step is then taken.
        sinks: ``[heads]`` logits that join the softmax's denominator only (Xiao et al. 2024;
            gpt-oss). This rank's heads, the same on all ranks of both axes.
        kind: "ring", or "gather": fewer and larger messages, more memory.
        balanced: every rank of `axis` holds an early half and a late half of every document, as
            `functron.nn.zigzag.to_balanced` arranges them; else consecutive parts.
        scale: of the scores; None for 1 / sqrt(head_dim).
        cap: scores s are cap tanh(s / cap) before masks (Gemma 2); 0: as they are. No kernel
            computes that: it is the formula, in chunks.
        axis: along which keys travel.
        ulysses: along which heads are exchanged; it must divide them.
        ring_size: only the aligned groups of so many ranks of `axis` exchange keys: sequences, or
            packed documents, that span no more. Static; a divisor of its size. None for all.
        kernels: of ``"softmax"``, for masked blocks, and of ``"lse_merge"``.

    Returns:
        ``[batch, seq, heads, value_dim]`` in q's dtype.

    Raises:
        ValueError: heads, halves, window or ring size do not fit.
    """
    size = lax.axis_size(axis) if ring_size is None else ring_size
    _check(q, k, window, kind, balanced, axis, ulysses, ring_size)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    static_window = window if isinstance(window, int) else 0
    q, k, v = _exchange_heads(q, k, v, ulysses)
    plain = isinstance(window, int) and window == 0 and segments is None and sinks is None
    if size == 1 and plain and not cap:
        out = _whole(q, k, v, scale)
    else:
        seq = q.shape[_SEQ]
        if balanced and positions is not None and positions.dim() == 2:
            static_window = 0  # parts of short documents are short: near in another sense
        steps = needed_steps(size, seq, static_window, balanced)
        balanced = balanced and size > 1
        ring = Ring(axis, size, kind, balanced, seq, steps, static_window, scale, kernels, cap)
        tests = _tests(ring, q, positions, segments, window, ulysses)
        out = _ring(ring, q, k, v, tests, _own_sinks(sinks, q.shape[_HEADS], ulysses))
    return lax.all_to_all(out, ulysses, _SEQ, _HEADS, tiled=True)


def _check(q, k, window, kind, balanced, axis, ulysses, ring_size) -> None:
    """Raise ValueError for everything that does not fit."""
    size, group = lax.axis_size(axis), lax.axis_size(ulysses)
    heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    ring = size if ring_size is None else ring_size
    problems = []
    if heads % kv_heads:
        problems.append(Problem("k", f"{kv_heads} heads", f"a divisor of q's {heads}"))
    if heads % group:
        problems.append(
            Problem("q", f"{heads} heads", f"a multiple of the {group} ranks of {ulysses!r}",
                    f"split the sequence over {axis!r} instead")
        )  # fmt: skip
    if kind not in ("ring", "gather"):
        problems.append(
            Problem("kind", repr(kind), "ring or gather", nearest(kind, ("ring", "gather")))
        )
    if ring < 1 or size % ring:
        problems.append(
            Problem("ring_size", str(ring), f"a divisor of the {size} ranks of {axis!r}")
        )
    elif kind == "gather" and ring not in (1, size):
        problems.append(
            Problem("ring_size", f'{ring} with kind="gather"', f"1 or {size}", 'use kind="ring"')
        )
    per_rank = q.shape[_SEQ] * group
    if balanced and ring > 1 and per_rank % 2:
        problems.append(
            Problem("balanced", f"{per_rank} tokens on each rank of {axis!r}", "two halves",
                    "pad the sequence, or use the contiguous order")
        )  # fmt: skip
    if isinstance(window, int) and window < 0:
        problems.append(Problem("window", str(window), "0 for no window, or a number of keys"))
    raise_problems("context_attention", problems)


def _exchange_heads(q: Tensor, k: Tensor, v: Tensor, ulysses: str) -> tuple[Tensor, ...]:
    """Whole sequences (of this rank of cp) of this rank's heads."""
    group, kv_heads = lax.axis_size(ulysses), k.shape[_HEADS]
    repeats = group // math.gcd(group, kv_heads)
    if repeats > 1:  # just enough for every rank to have one
        k, v = (x.repeat_interleave(repeats, _HEADS) for x in (k, v))
    return tuple(lax.all_to_all(x, ulysses, _HEADS, _SEQ, tiled=True) for x in (q, k, v))


def _own_sinks(sinks: Tensor | None, heads: int, ulysses: str) -> Tensor | None:
    return None if sinks is None else own_part(sinks, heads, 0, ulysses)


def _whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain causal attention of whole sequences, at the speed of the device's best kernel."""
    width, value_width = q.shape[-1], v.shape[-1]
    if value_width < width:
        v = F.pad(v, (0, width - value_width))
    elif value_width > width:
        q, k = (F.pad(x, (0, value_width - width)) for x in (q, k))
    kernel_scale = 1 / math.sqrt(q.shape[-1])
    q = q if scale == kernel_scale else q * (scale / kernel_scale)
    group = q.shape[_HEADS] // k.shape[_HEADS]
    if group > 1:
        k, v = (x.repeat_interleave(group, _HEADS) for x in (k, v))
    return attention(q, k, v, causal=True)[..., :value_width]


def _ring(ring: Ring, q: Tensor, k: Tensor, v: Tensor, tests: Tests, sinks: Tensor | None):
    q, k, v = (x.transpose(_SEQ, _HEADS) for x in (q, k, v))
    if ring.kind == "gather" and ring.size > 1:
        k, v = lax.all_gather((k, v), ring.axis)
    return ring_attention(ring, q, k, v, tests, sinks).transpose(_SEQ, _HEADS)


def _tests(
    ring: Ring,
    q: Tensor,
    positions: Tensor | None,
    segments: Tensor | None,
    window: int | Tensor,
    ulysses: str,
) -> Tests:
    """The integers of this rank's tokens and of those of every step's source."""
    given: dict[str, Tensor] = {}
    if segments is not None:
        given["segments"] = segments
    has_window = isinstance(window, Tensor) or window > 0
    if has_window and positions is not None and positions.dim() == 2:
        given["positions"] = positions
    found = {name: _from_sources(ring, x, ulysses) for name, x in given.items()}
    if has_window and "positions" not in found:
        found["positions"] = [_places(ring, step, q.device) for step in (0, *ring.steps)]
    return Tests(**found, window=window)


def _from_sources(ring: Ring, x: Tensor, ulysses: str) -> list[Tensor]:
    x = lax.all_gather(x.to(torch.int32), ulysses, axis=_SEQ, tiled=True)
    if ring.size == 1:
        return [x]
    if ring.kind == "ring":
        return [x, *(ring.shift(x, step) for step in ring.steps)]
    everywhere, rank = lax.all_gather(x, ring.axis), ring.rank()
    sources = [torch.as_tensor((rank - step) % ring.size, device=x.device) for step in ring.steps]
    return [x, *(torch.index_select(everywhere, 0, s.reshape(1)).squeeze(0) for s in sources)]


def _places(ring: Ring, step: int, device: torch.device) -> Tensor:
    """``[1, seq]``: where in the sequence the tokens of the source of this step are."""
    source = (ring.rank() - step) % ring.size
    here = torch.arange(ring.seq, device=device)
    if not ring.balanced:
        return (here + source * ring.seq)[None]
    chunk = ring.seq // 2
    late = here - chunk + (2 * ring.size - 1 - source) * chunk
    return torch.where(here < chunk, here + source * chunk, late)[None]
