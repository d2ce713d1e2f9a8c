"""Attention with masks in one kernel: torch's FlexAttention (Dong et al. 2024).

A query sees a key of its own segment, at or after its first position, and, if causal, at or before
its own index. Chunks of 128 queries and keys without a visible pair, judged by the extremes of
these numbers, are skipped: exact where the numbers grow along the sequence; otherwise some chunks
are computed in vain.

What runs is a graph of a few ATen operations and torch's higher-order operation, made without
dynamo and compiled by Inductor once for each shape. Its backward takes any logsumexp, such as that
over all keys of a ring, unlike torch's public function. On CPUs the graph runs uncompiled as a
formula of torch's, which tests compare with ours. torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from functron.core import compat
from functron.core.typing import Tensor
from functron.ops.chunked_attention import (
    Visible,
    attend,
    attend_backward,
    chunked_block,
    chunked_block_backward,
)
from functron.ops.operations import Gradient, define, leading, map_batch, statistics
from functron.program.equations import Var

SIZE = 128
"""Queries and keys of a chunk that is computed or not."""

_BEYOND = 2**30  # any segment or position is nearer to 0
_LN2 = math.log(2)  # the kernels' logsumexps are of base 2


@dataclass(frozen=True)
class FlexSettings:
    """The settings that a kernel is compiled for, besides its operands.

    Attributes:
        causal: a query sees no keys after its own place in the block.
        scale: of the scores.
        cap: scores s are cap tanh(s / cap); 0: as they are.
        segments: whether segments of queries and of keys are given.
        positions: whether first positions of queries, and positions of keys, are given.
    """

    causal: bool
    scale: float
    cap: float
    segments: bool
    positions: bool


def _run_compiled(
    is_backward: bool, operands: tuple[Tensor, ...], static: FlexSettings
) -> Sequence[Tensor]:
    """The results of `graph`'s program for these operands."""
    facts = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in operands)
    return _program(is_backward, facts, static)(list(operands))


@functools.cache
def _program(is_backward: bool, facts: tuple, static: FlexSettings) -> Callable[[list], Sequence]:
    """The function that Inductor makes of `graph`."""
    from functron.compiler import inductor  # takes two seconds, and only this needs it

    variables = []
    for i, (shape, stride, dtype, device) in enumerate(facts):
        elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        nbytes = elements * dtype.itemsize
        variables.append(Var(f"x{i}", shape, stride, dtype, device, i, nbytes))
    made = graph(is_backward, facts, static)
    with inductor.directory(None) as folder:
        found = inductor.compile_graph(made, variables, {}, folder)
    assert found is not None
    return found[0]


def graph(is_backward: bool, facts: Sequence[tuple], static: FlexSettings) -> fx.GraphModule:
    """The graph of the op or of its backward, for the shape, stride, dtype and device of operands.

    Its operands are, in order, q, k, v; for backward the cotangent, the result, the logsumexp and
    its cotangent; the tests.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # as above
    from torch.fx.experimental.proxy_tensor import make_fx

    with compat.no_dispatch_modes(), compat.no_transforms(), torch.no_grad(), FakeTensorMode():
        operands = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in facts
        ]
        made = make_fx(functools.partial(_run_flex, is_backward, static))(*operands)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def _run_flex(
    is_backward: bool, static: FlexSettings, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
):
    from torch._higher_order_ops.flex_attention import (  # as above
        flex_attention,
        flex_attention_backward,
    )

    tests = rest[4:] if is_backward else rest
    mask = _block_mask(q, k, tests, static, is_backward)
    # ROWS_GUARANTEED_SAFE: whether every query sees something
    options = {
        "BACKEND": "TRITON", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }  # fmt: skip
    score = functools.partial(_score, static.cap)
    if not is_backward:
        settings = score, mask, static.scale, options, (), tests
        out, lse, _ = flex_attention(q, k, v, *settings)
        return out, lse * _LN2
    cotangent, out, lse, lse_cotangent = rest[:4]
    joint: Any = functools.partial(_score_backward, static.cap)
    settings = score, joint, mask, static.scale, options, (), tests
    # kernels differentiate with respect to the logsumexp of base 2
    given = out, lse / _LN2, cotangent, lse_cotangent * _LN2
    return flex_attention_backward(q, k, v, *given, *settings)[:3]


def _score(cap: float, score: Tensor, batch, head, query, key) -> Tensor:
    return torch.tanh(score / cap) * cap if cap else score


def _score_backward(cap: float, score: Tensor, batch, head, query, key, cotangent: Tensor) -> list:
    if cap:
        cotangent = cotangent * (1 - torch.tanh(score / cap).square())
    return [cotangent, None, None, None, None]


def _sees_key(static: FlexSettings, batch, head, query, key, *tests: Tensor) -> Tensor:
    """Whether one query sees one key."""
    seen = key <= query if static.causal else key >= 0
    if static.segments:
        seen = seen & (tests[0][batch, query] == tests[1][batch, key])
    if static.positions:
        seen = seen & (tests[-2][batch, query] <= tests[-1][batch, key])
    return seen


def _block_mask(
    q: Tensor, k: Tensor, tests: Sequence[Tensor], static: FlexSettings, both: bool
) -> tuple:
    """The chunks in the form in which torch's operation takes them; `both`: also those of keys."""
    from torch.nn.attention.flex_attention import BlockMask  # as above

    needed = chunks(q.shape[0], q.shape[2], k.shape[2], tests, static, q.device).unsqueeze(1)
    found: list[Any] = [*_list_needed(needed)]
    found += [None, None, *(_list_needed(needed.mT) if both else (None, None)), None, None]
    seen = functools.partial(_sees_key, static)
    lengths = q.shape[2], k.shape[2]
    return BlockMask(lengths, *found, BLOCK_SIZE=(SIZE, SIZE), mask_mod=seen).as_tuple()


def _list_needed(needed: Tensor) -> tuple[Tensor, Tensor]:
    """How many chunks of each row are needed, and their numbers, those that are not at the end."""
    order = torch.sort(needed.to(torch.int32), dim=-1, descending=True, stable=True)[1]
    return needed.sum(-1, dtype=torch.int32), order.to(torch.int32)


def chunks(
    batch: int,
    seq: int,
    keys: int,
    tests: Sequence[Tensor],
    static: FlexSettings,
    device: torch.device,
) -> Tensor:
    """The chunks that may have visible pairs, bool ``[batch, rows, columns]``: a superset."""
    rows = torch.arange(-(-seq // SIZE), device=device).unsqueeze(1)
    columns = torch.arange(-(-keys // SIZE), device=device).unsqueeze(0)
    needed = (columns <= rows if static.causal else columns + rows >= 0).unsqueeze(0)
    needed = needed.expand(batch, -1, -1)
    if static.segments:
        low, high = _extremes(tests[0])
        key_low, key_high = _extremes(tests[1])
        needed = needed & (low.unsqueeze(2) <= key_high.unsqueeze(1))
        needed = needed & (key_low.unsqueeze(1) <= high.unsqueeze(2))
    if static.positions:
        first, last = _extremes(tests[-2])[0], _extremes(tests[-1])[1]
        needed = needed & (first.unsqueeze(2) <= last.unsqueeze(1))
    return needed


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each chunk."""
    missing = -x.shape[-1] % SIZE
    low, high = (F.pad(x, (0, missing), value=end) for end in (_BEYOND, -_BEYOND))
    return low.unflatten(-1, (-1, SIZE)).amin(-1), high.unflatten(-1, (-1, SIZE)).amax(-1)


def fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """`x` with its vmap dim folded into the batch dim."""
    return leading(x, dim, size).flatten(0, 1)


def unfold(outputs: Any, size: int) -> tuple[Tensor, ...]:
    """The inverse of `fold`, of each."""
    return tuple(x.unflatten(0, (size, -1)) for x in outputs)


def narrow(x: Tensor, like: Tensor) -> Tensor:
    """The first columns of `x`, as many as `like` has."""
    return x if x.shape[-1] == like.shape[-1] else x.narrow(-1, 0, like.shape[-1])


def laid_out(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each ``[batch, heads, seq, dim]``, in memory ``[batch, seq, heads, dim]`` without gaps."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


def tests_of(q: Tensor, k: Tensor, visible: Visible | None) -> tuple[Tensor | None, ...]:
    """The numbers that the op tests: segments of queries and keys, first and key positions.

    int32 ``[batch, seq]`` and ``[batch, keys]``, each None where it is not tested.
    """
    none = (None, None)
    if visible is None:
        return (*none, *none)
    segments: tuple[Any, Any] = none
    places: tuple[Any, Any] = none
    if visible.query_segments is not None and visible.key_segments is not None:
        segments = visible.query_segments, visible.key_segments
    if visible.query_positions is not None and visible.key_positions is not None:
        first = visible.query_positions - visible.window + 1
        if isinstance(visible.window, Tensor):
            first = torch.where(visible.window == 0, torch.full_like(first, -_BEYOND), first)
        places = first, visible.key_positions
    rows = zip((*segments, *places), (q, k, q, k), strict=True)
    return tuple(
        None if x is None else x.to(torch.int32).expand(like.shape[0], -1) for x, like in rows
    )


def _collect_tests(
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    first: Tensor | None,
    positions: Tensor | None,
    causal: bool,
    scale: float,
    cap: float,
) -> tuple[list[Tensor], FlexSettings]:
    """The tests that there are, and the rest."""
    tests = (query_segments, key_segments, first, positions)
    given = [x.contiguous() for x in tests if x is not None]
    return given, FlexSettings(causal, scale, cap, query_segments is not None, first is not None)


def _attend_in_chunks(q, k, v, *rest) -> tuple[Tensor, Tensor]:
    """The reference of the op: in chunks, by the formula."""
    *tests, causal, scale, cap = rest
    fn = functools.partial(attend, cap=cap)
    out, lse = chunked_block(q, k, v, _seen_by(tests), causal, scale, fn)
    return laid_out(out)[0], lse


def _seen_by(tests: Sequence[Any]) -> Visible:
    """The inverse of `tests_of`: keys before the first position are out of a window of 1."""
    query_segments, key_segments, first, positions = tests
    return Visible(query_segments, key_segments, first, positions, 1)


def _masked_kernel(launch, q, k, v, *rest) -> tuple[Tensor, Tensor]:
    given, static = _collect_tests(*rest)
    out, lse = _run_compiled(False, (*laid_out(q, k, v), *given), static)
    return laid_out(out)[0], lse.contiguous()


def _masked_backward(cotangent, q, k, v, out, lse, d_lse, *rest) -> tuple[Tensor, ...]:
    """The reference of the op of backward."""
    *tests, causal, scale, cap = rest
    wide, result = v, out
    if d_lse is not None:
        # dS = P (dO V^T - rowsum(dO O) + dL), as of one more value, 0, and a result of -1
        column = d_lse.unsqueeze(-1).to(cotangent.dtype)
        cotangent = torch.cat([cotangent, column], -1)
        wide, result = F.pad(v, (0, 1)), F.pad(out, (0, 1), value=-1.0)
    fn = functools.partial(attend_backward, cap=cap)
    operands = (cotangent, q, k, wide, result, lse)
    dq, dk, dv = chunked_block_backward(*operands, _seen_by(tests), causal, scale, fn)
    return laid_out(dq, dk, narrow(dv, v))


def _masked_backward_kernel(launch, cotangent, q, k, v, out, lse, d_lse, *rest):
    given, static = _collect_tests(*rest)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    rows = lse.contiguous(), d_lse.contiguous()
    return laid_out(
        *_run_compiled(True, (*laid_out(q, k, v, cotangent, out), *rows, *given), static)
    )


def _empty(like: Tensor, width: int) -> Tensor:
    batch, heads, seq = like.shape[:3]
    return like.new_empty(batch, seq, heads, width).transpose(1, 2)


def _masked_fake(q, k, v, *rest) -> tuple[Tensor, Tensor]:
    return _empty(q, v.shape[-1]), statistics(q)


def _masked_backward_fake(cotangent, q, k, v, *rest) -> tuple[Tensor, ...]:
    return tuple(_empty(x, x.shape[-1]) for x in (q, k, v))


def _masked_pullback(saved: Sequence[Any], cotangents: tuple) -> tuple:
    q, k, v, *rest, out, lse = saved
    moved = MASKED_ATTENTION_BACKWARD(cotangents[0], q, k, v, out, lse, cotangents[1], *rest)
    return (*moved, *(None for _ in rest))


_TESTS = "Tensor? query_segments, Tensor? key_segments, Tensor? first, Tensor? positions"

MASKED_ATTENTION_BACKWARD = define(
    "masked_attention_backward(Tensor cotangent, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor? d_lse, {_TESTS}, bool causal, float scale, float cap) "
    "-> (Tensor, Tensor, Tensor)",
    reference=_masked_backward,
    kernel=_masked_backward_kernel,
    fake=_masked_backward_fake,
    batch=map_batch(11),
    gradient=_masked_backward,
)
"""`block_backward` with masks and caps in one kernel: FlexAttention on CUDA."""

MASKED_ATTENTION = define(
    f"masked_attention(Tensor q, Tensor k, Tensor v, {_TESTS}, bool causal, float scale, "
    "float cap) -> (Tensor, Tensor)",
    reference=_attend_in_chunks,
    kernel=_masked_kernel,
    fake=_masked_fake,
    batch=map_batch(7),
    gradient=Gradient(_masked_pullback, save=lambda args, outputs: (*args, *outputs)),
)
"""`block` with masks and caps in one kernel: FlexAttention on CUDA.

A query sees the keys of its segment, at or after its first position."""


def _pairs(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool) -> int:
    """The FLOPs of two products over all pairs, or half of them."""
    batch, heads, seq, width = q
    return batch * heads * seq * k[2] * 2 * (width + v[3]) // (2 if causal else 1)


@register_flop_formula(torch.ops.functron.masked_attention)
def _masked_flops(q, k, v, *rest, out_shape=None) -> int:
    return _pairs(q, k, v, rest[4])


@register_flop_formula(torch.ops.functron.masked_attention_backward)
def _masked_backward_flops(cotangent, q, k, v, *rest, out_shape=None) -> int:
    return _pairs(q, k, v, rest[7]) * 2 + _pairs(q, k, k, rest[7]) // 2
