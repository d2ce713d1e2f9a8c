"""Options of operations: each with a value that is not its default, on shards as torch has it.

A rule says what a rank computes, and may forget what an operation was called with. `CALLS` has every
operation of `rules.TABLE` that takes options, and `WRITES` every one that writes in place; what is
computed and every gradient are torch's, or partition refuses in words. ``--full`` takes all splits
of operands.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import P
from functron.partitioning.backward import BACKWARD
from functron.partitioning.rules import TABLE
from tests.partitioning.test_rules import CASES

Call = Callable[..., torch.Tensor]
DTYPE, F32 = torch.float64, torch.float32


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


X, Y = _draw(4, 6, 8, seed=0), _draw(4, 6, 8, seed=1)
IDS = torch.arange(24).reshape(4, 6) * 5 % 8  # 2 comes more often with some samples
IDS[0] = 2
CLASS = _draw(8, seed=2).abs()


def _attention(x, y, **options):
    q, k, v = (z.unflatten(-1, (2, 4)).transpose(1, 2) for z in (x, y, x * y))
    return F.scaled_dot_product_attention(q, k, v, **options)


def _grouped(x, y):
    q, k = (z.transpose(1, 2) for z in (x.unflatten(-1, (4, 2)), y.unflatten(-1, (4, 2))[:, :, :2]))
    return F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True, is_causal=True)


def _loss(x, **options):
    return F.cross_entropy(x.flatten(0, 1), IDS.flatten(), **options)


def _table(x):
    return x.sum(0)[:4].reshape(8, 4)


CALLS: Mapping[str, list[Call]] = {
    "add": [lambda x, y: torch.add(x, y, alpha=2)],
    "sub": [lambda x, y: torch.sub(x, y, alpha=0.5)],
    "rsub": [lambda x, y: torch.rsub(x, y, alpha=2)],
    "addmm": [lambda x, y: torch.addmm(y[0], x[1, :, :6], y[2], beta=0.5, alpha=2)],
    "baddbmm": [lambda x, y: torch.baddbmm(y.mT @ x, x.mT, y, beta=0.5, alpha=3)],
    "div": [lambda x, y: torch.div(x * 9, y, rounding_mode="floor") * x],
    "_to_copy": [lambda x, y: (x.to(F32) + y.to(torch.bfloat16)).to(DTYPE)],
    "zeros_like": [lambda x, y: torch.zeros_like(x, dtype=F32) + x],
    "ones_like": [lambda x, y: torch.ones_like(x, dtype=F32)],
    "full_like": [lambda x, y: torch.full_like(x, 2.5, dtype=F32) * y],
    "fill": [lambda x, y: x.clone().fill_(y.sum()) * x],
    "arange": [lambda x, y: torch.arange(1, 17, 2, dtype=F32) * x],
    "full": [lambda x, y: torch.full((6, 8), 2, dtype=F32) * x],
    "linspace": [lambda x, y: torch.linspace(0, 1, 8, dtype=F32) * x],
    "tril_indices": [lambda x, y: torch.tril_indices(4, 4, offset=-1, dtype=torch.int32)],
    "new_zeros": [lambda x, y: x.new_zeros(6, 8, dtype=F32) + y],
    "new_ones": [lambda x, y: x.new_ones(6, 8, dtype=F32) * y],
    "new_full": [lambda x, y: x.new_full((6, 8), 0.1, dtype=F32) * y],
    "sum": [
        lambda x, y: x.to(torch.bfloat16).sum(-1, keepdim=True, dtype=DTYPE),
        lambda x, y: (x > 0).sum(dtype=torch.int32),
    ],
    "mean": [
        lambda x, y: x.mean((0, -1), keepdim=True),
        lambda x, y: x.to(F32).mean(1, dtype=DTYPE),
        lambda x, y: (x.abs() + 60000).half().mean().to(DTYPE),  # a sum of halves overflows
    ],
    "amax": [lambda x, y: x.detach().amax((0, 2), keepdim=True) * y],
    "amin": [lambda x, y: x.detach().amin(-1, keepdim=True) * y],
    "histc": [
        lambda x, y: torch.histc(x.detach(), 5, min=-2, max=2),
        lambda x, y: torch.histc(x.detach(), bins=4),
    ],
    "any": [lambda x, y: (x > 2).any(-1, keepdim=True)],
    "all": [lambda x, y: (x > -1).all(0, keepdim=True)],
    "prod": [lambda x, y: x.prod(-1, keepdim=True), lambda x, y: x.to(F32).prod(1, dtype=DTYPE)],
    "var": [lambda x, y: x.var((0, 1), correction=0, keepdim=True)],
    "std": [lambda x, y: x.std(-1, correction=2)],
    "var_mean": [lambda x, y: torch.var_mean(x, -1, correction=0, keepdim=True)[0]],
    "argmax": [lambda x, y: x.argmax(-1, keepdim=True)],
    "argmin": [lambda x, y: x.argmin(0, keepdim=True), lambda x, y: x.argmin()],
    "max": [lambda x, y: x.max(1, keepdim=True)[0]],
    "min": [lambda x, y: x.min(-1, keepdim=True)[0]],
    "logsumexp": [lambda x, y: x.logsumexp((0, -1), keepdim=True)],
    "linalg_vector_norm": [
        lambda x, y: torch.linalg.vector_norm(x, 3, (1, 2), keepdim=True),
        lambda x, y: torch.linalg.vector_norm(x.detach(), ord=float("inf"), dim=-1),
        lambda x, y: torch.linalg.vector_norm(x.to(F32), dtype=DTYPE),
        lambda x, y: torch.linalg.vector_norm(x * (y[:, :1] > 0), dim=-1),  # also where it is 0
        lambda x, y: F.normalize(x * (y[:, :, :1] > 0), dim=-1),
    ],
    "_softmax": [lambda x, y: x.to(torch.bfloat16).softmax(-1, dtype=F32)],
    "_log_softmax": [lambda x, y: x.to(torch.bfloat16).log_softmax(1, dtype=F32)],
    "_safe_softmax": [lambda x, y: torch._safe_softmax(x.masked_fill(y < 0.3, -torch.inf), -1)],
    "cumsum": [lambda x, y: x.to(F32).cumsum(1, dtype=DTYPE)],
    "cumprod": [lambda x, y: x.to(F32).cumprod(-1, dtype=DTYPE)],
    "sort": [lambda x, y: torch.sort(x, stable=True, dim=1, descending=True)[0]],
    "topk": [lambda x, y: x.topk(3, 1, largest=False)[0]],
    "argsort": [lambda x, y: x.argsort(0, descending=True)],
    "kthvalue": [lambda x, y: x.kthvalue(2, 1, keepdim=True)[0], lambda x, y: x.kthvalue(2, 1)[0]],
    "glu": [lambda x, y: F.glu(x, 1), lambda x, y: F.glu(x)],
    "roll": [lambda x, y: x.roll(3), lambda x, y: x.roll((1, 2), (0, 2))],
    "native_layer_norm": [
        lambda x, y: F.layer_norm(x, (6, 8), y[0], y[1], eps=0.1),
        lambda x, y: F.layer_norm(x, (8,), bias=y[0, 0], eps=0.5),
    ],
    "_fused_rms_norm": [
        lambda x, y: F.rms_norm(x, (8,), y[0, 0], eps=0.1),
        lambda x, y: F.rms_norm(x, (8,)),
    ],
    "view": [
        lambda x, y: x.view(torch.int64) & 3,
        lambda x, y: x.view(torch.int32).view(torch.float64) * 2,
    ],
    "squeeze": [lambda x, y: x[:, :2].squeeze(1) * 2, lambda x, y: x[:, :, None, :2].squeeze()],
    "repeat": [lambda x, y: x.repeat(2, 1, 3)],
    "expand": [lambda x, y: x[:, :1].expand(-1, 6, -1) * y],
    "split": [lambda x, y: x.split(4, -1)[1] * 2],
    "split_with_sizes": [lambda x, y: x.split([3, 5], -1)[1] * 2],
    "unsafe_split": [lambda x, y: torch.unsafe_split(x, 3, 1)[1] * 2],
    "chunk": [lambda x, y: x.chunk(2, 1)[1] * 2],
    "slice": [lambda x, y: x[:, 1:6:2] * 2],
    "cat": [lambda x, y: torch.cat([x, y], -1)],
    "stack": [lambda x, y: torch.stack([x, y], -2)],
    "constant_pad_nd": [lambda x, y: F.pad(x, (1, 2, 0, 1), value=0.5)],
    "tril": [lambda x, y: x.tril(-1)],
    "triu": [lambda x, y: x.triu(2)],
    "diagonal": [lambda x, y: x.diagonal(1, 1, 2) * 2],
    "unbind": [lambda x, y: x.unbind(1)[2] * 2],
    "slice_scatter": [lambda x, y: x.slice_scatter(y[:, :2], 1, 1, 5, 2)],
    "select_scatter": [lambda x, y: x.select_scatter(y[:, 1], 1, -1)],
    "embedding": [
        lambda x, y: F.embedding(IDS, _table(x), padding_idx=2),
        lambda x, y: F.embedding(IDS, _table(x), padding_idx=-1),
        lambda x, y: F.embedding(IDS, _table(x), scale_grad_by_freq=True),
        lambda x, y: F.embedding(IDS, _table(x), padding_idx=3, scale_grad_by_freq=True),
    ],
    "gather": [
        lambda x, y: x.gather(-1, IDS[..., None]),
        lambda x, y: x.gather(1, IDS[:2, :, None] % 6),
    ],
    "index": [lambda x, y: x[:, IDS[0] % 6, 1]],
    "index_select": [lambda x, y: x.index_select(-1, IDS[1])],
    "scatter": [
        lambda x, y: x.scatter(-1, IDS[..., None], y[..., :1]),
        lambda x, y: x.scatter(-1, IDS[..., None], 1.5),
        lambda x, y: x.scatter(1, IDS[:2, :3, None] % 6, y[:2, :3, :1]),  # of some samples
    ],
    "scatter_add": [lambda x, y: x.scatter_add(1, IDS[:2, :3, None] % 6, y[:2, :3, :1])],
    "scatter_reduce": [
        lambda x, y: x.scatter_reduce(-1, IDS[..., None], y[..., :1], "mean", include_self=False),
    ],
    "index_put": [lambda x, y: x.index_put((IDS[0] % 4,), y[:1], accumulate=True)],
    "index_add": [lambda x, y: x.index_add(1, IDS[0] % 6, y, alpha=0.5)],
    "index_reduce": [
        lambda x, y: x.index_reduce(1, IDS[0] % 6, y, "mean", include_self=False),
    ],
    "nll_loss_forward": [
        lambda x, y: F.nll_loss(x.log_softmax(-1)[0], IDS[1], CLASS, reduction="none"),
        lambda x, y: F.nll_loss(x.flatten(0, 1), IDS.flatten(), ignore_index=2, reduction="sum"),
    ],
    "cross_entropy_loss": [
        lambda x, y: _loss(x, ignore_index=2),
        lambda x, y: _loss(x, weight=CLASS, ignore_index=3),
        lambda x, y: _loss(x, reduction="none"),
        lambda x, y: _loss(x, weight=CLASS, label_smoothing=0.2),
        lambda x, y: _loss(x, label_smoothing=0.1, reduction="sum", ignore_index=2),
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1).softmax(-1), weight=CLASS),
    ],
    "_scaled_dot_product_flash_attention_for_cpu": [
        lambda x, y: _attention(x, y, scale=0.3),
        lambda x, y: _attention(x, y, is_causal=True, scale=2.0),
        lambda x, y: _attention(x, y, attn_mask=torch.ones(6, 6).tril(1) > 0, scale=0.7),
        lambda x, y: _attention(x, y, attn_mask=torch.linspace(-1, 1, 36, dtype=DTYPE).view(6, 6)),
        _grouped,
    ],
    "convolution": [
        lambda x, y: F.conv1d(x, y[:2, :, :3], stride=2, padding=1),
        lambda x, y: F.conv1d(x, y[:2, :, :3], y[0, 0, :2], dilation=2),
        lambda x, y: F.conv1d(x, y.flatten(0, 1)[:12, :6].reshape(12, 3, 2), groups=2),
        lambda x, y: F.conv_transpose1d(
            x, y.flatten(0, 1)[:6, :6].reshape(6, 3, 2), stride=2, output_padding=1
        ),
    ],
    "max_pool2d_with_indices": [
        lambda x, y: F.max_pool2d(x[:, None], (3, 2), (2, 1), (1, 0), (1, 2), True),
    ],
    "avg_pool1d": [lambda x, y: F.avg_pool1d(x, 3, 2, 1, True, False)],
    "avg_pool2d": [
        lambda x, y: F.avg_pool2d(x, (2, 3), 2, 1, True, False),
        lambda x, y: F.avg_pool2d(x[None], 2, divisor_override=3),
    ],
    "max_pool3d_with_indices": [
        lambda x, y: F.max_pool3d(x[:, None, None], (1, 3, 2), (1, 2, 1), (0, 1, 0), 1, True),
    ],
    "avg_pool3d": [
        lambda x, y: F.avg_pool3d(x[:, None], (1, 2, 3), 2, (0, 1, 1), True, False),
        lambda x, y: F.avg_pool3d(x[:, None], (1, 2, 2), divisor_override=3),
    ],
    "upsample_nearest1d": [lambda x, y: F.interpolate(x, scale_factor=1.5)],
    "upsample_nearest3d": [lambda x, y: F.interpolate(x[:, None, None], scale_factor=(1, 1.5, 2))],
    **{
        f"_upsample_nearest_exact{n}d": [
            lambda x, y, n=n: F.interpolate(
                x[(slice(None), *[None] * (n - 1))], scale_factor=1.5, mode="nearest-exact"
            )
        ]
        for n in (1, 2, 3)
    },
    "upsample_linear1d": [
        lambda x, y: F.interpolate(x, 11, mode="linear", align_corners=True),
        lambda x, y: F.interpolate(x, scale_factor=1.5, mode="linear"),
    ],
    "upsample_bicubic2d": [
        lambda x, y: F.interpolate(x[:, None], (9, 5), mode="bicubic", align_corners=True),
        lambda x, y: F.interpolate(x[:, None], scale_factor=1.5, mode="bicubic"),
    ],
    "upsample_trilinear3d": [
        lambda x, y: F.interpolate(
            x[:, None, None], (1, 9, 5), mode="trilinear", align_corners=True
        ),
        lambda x, y: F.interpolate(x[:, None, None], scale_factor=1.5, mode="trilinear"),
    ],
    **{
        f"_upsample_{mode}2d_aa": [
            lambda x, y, mode=mode: F.interpolate(
                x[:, None], (4, 5), mode=mode, align_corners=True, antialias=True
            ),
            lambda x, y, mode=mode: F.interpolate(
                x[:, None], scale_factor=0.6, mode=mode, antialias=True
            ),
        ]
        for mode in ("bilinear", "bicubic")
    },
    "soft_margin_loss": [
        lambda x, y, reduction=reduction: F.soft_margin_loss(
            x, torch.where(y > 0, 1.0, -1.0).to(x.dtype), reduction=reduction
        )
        for reduction in ("none", "mean", "sum")
    ],
    "upsample_nearest2d": [lambda x, y: F.interpolate(x[:, None], scale_factor=(1.5, 2.0))],
    "upsample_bilinear2d": [
        lambda x, y: F.interpolate(x[:, None], (9, 4), mode="bilinear", align_corners=True),
        lambda x, y: F.interpolate(x[:, None], scale_factor=1.3, mode="bilinear"),
    ],
    "_embedding_bag_forward_only": [
        lambda x, y: F.embedding_bag(
            IDS, _table(x), mode="sum", padding_idx=2, per_sample_weights=y[:, :, 0]
        ),
    ],
    "mse_loss": [lambda x, y: F.mse_loss(x, y, reduction="none")],
    "smooth_l1_loss": [lambda x, y: F.smooth_l1_loss(x, y, reduction="sum", beta=0.3)],
    "huber_loss": [lambda x, y: F.huber_loss(x, y, reduction="mean", delta=0.3)],
    "binary_cross_entropy": [
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), CLASS, reduction="sum"),
    ],
    "binary_cross_entropy_with_logits": [
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), CLASS, reduction="mean", pos_weight=CLASS + 1
        ),
    ],
    "pointwise": [
        lambda x, y: F.gelu(x, approximate="tanh"),
        lambda x, y: F.leaky_relu(x, 0.3) + F.elu(y, 0.5) + F.softplus(x, 2.0, 1.0),
        lambda x, y: x.clamp(-0.5, 0.7) + F.hardtanh(y, -0.2, 0.3) + F.threshold(x, 0.1, 0.2),
        lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, y, y + 9, value=2),
        lambda x, y: torch.nan_to_num(x.detach() / (y > 0), nan=0.5, posinf=2.0, neginf=-1.0),
        lambda x, y: torch.lerp(x, y, 0.3) + x.round(decimals=1),
        lambda x, y: x.sigmoid() + y.tanh() + F.silu(x) + F.mish(y) + (x.sigmoid() / 2).logit(0.1),
        lambda x, y: F.hardsigmoid(x) + F.hardsigmoid(y * 2),
    ],
    "logcumsumexp": [lambda x, y: x.logcumsumexp(-1)],
    "unfold": [lambda x, y: x.unfold(1, 2, 2) * 2],
}

NONE = {
    "empty_like", "zeros", "ones", "empty", "new_empty", "scalar_tensor", "eye", "triu_indices",
    "_embedding_bag",  # which is called only where a tape records it
    # by an operation of functron of that name, which takes none that a rule could drop
    "rms_norm", "layer_norm", "glu_packed",
    # on a GPU, by the rule of the one for CPUs
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}  # fmt: skip

ELSEWHERE = NONE | {
    # traced as others, on CPUs or always
    "_fused_rms_norm", "_fused_rms_norm_backward", "_reshape_alias", "add_rms_norm", "alias",
    "argsort", "chunk", "conj", "contiguous", "lift_fresh_copy", "narrow", "positive", "real",
    "reshape", "zero", "floor_divide",
    # by torch's tape alone, in test_partition; of functron, in test_rules
    "silu_backward", "add_layer_norm",
    # in test_partition, test_module and with the recipes of functron's own models
    "check_ids", "checkpoint_name", "constrain", "dispatched", "debug_callback", "debug_check",
    "debug_print",
}  # fmt: skip
"""Operations of the tables that no call here is traced to."""

LAYOUTS: Mapping[str, tuple[dict[str, int], P]] = {
    "samples": ({"dp": 2}, P("dp")),
    "sequence": ({"tp": 2}, P(None, "tp")),
    "features": ({"tp": 2}, P(None, None, "tp")),
    "all": ({"dp": 2, "tp": 2}, P("dp", None, "tp")),
}


def test_every_operation_with_options_is_called():
    layout = {"layout", "device", "pin_memory", "non_blocking", "memory_format", "implicit"}
    wanted = set()
    for name in TABLE:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            schema: Any = getattr(packet, overload)._schema
            options = {a.name for a in schema.arguments if a.has_default_value() or a.kwarg_only}
            if options - layout and "out" not in overload:
                wanted.add(name)
    assert wanted <= {*CALLS} | NONE
    assert not {*CALLS} & NONE


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n == "all" else [pytest.mark.full]) for n in LAYOUTS],
)
def test_options_are_those_of_the_call(name, layout):
    sizes, spec = LAYOUTS[layout]
    for call in CALLS[name]:
        made = call(X, Y)

        def step(x, y, call=call, floats=made.dtype.is_floating_point):
            def loss(x, y):
                out = call(x, y)
                return (out * (out + 0.5).cos()).sum(), out

            return ft.value_and_grad(loss, (0, 1), has_aux=True)(x, y) if floats else call(x, y)

        mapped = ft.partition(step, ft.Mesh(**sizes), (spec, spec), P(), pick="cheapest")
        rounded = made.dtype in (F32, torch.bfloat16) or {"bfloat16", "F32"} & {
            *call.__code__.co_names
        }
        close: dict[str, Any] = (
            {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-9, "atol": 1e-9}
        )
        torch.testing.assert_close(mapped(X, Y), step(X, Y), **close)


@pytest.mark.full
def test_every_rule_is_used():
    """By a call, or a write, or by what differentiates them."""
    names: set[str] = set()
    for call in (*itertools.chain(*CALLS.values()), *WRITES.values()):

        def gradient(x, y, call=call):
            return torch.func.grad(lambda x, y: call(x, y).sum(), (0, 1))(x, y)

        for traced in (call, gradient):
            if traced is gradient and not call(X, Y).dtype.is_floating_point:
                continue
            try:
                mapped = ft.partition(traced, ft.Mesh(dp=2), (P("dp"), P("dp")), pick="cheapest")
                lines = mapped.explain(X, Y)
            except ValueError:
                continue
            names.update(re.findall(r" = (\w+)\(", lines))
    own = {name for name in CASES if name in TABLE}
    assert {*TABLE, *BACKWARD} <= names | ELSEWHERE | own, (
        {*TABLE, *BACKWARD} - names - ELSEWHERE - own
    )


def _wanted_closeness(call: Call, made: torch.Tensor) -> dict[str, Any]:
    low = {"bfloat16", "half", "F32"} & {*call.__code__.co_names}
    rounded = made.dtype in (F32, torch.bfloat16) or low
    return {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-9, "atol": 1e-9}


def _compare(name: str, call: Call, specs: Sequence[P], ways: Sequence[str]) -> None:
    """Values, and gradients in these ways, on a mesh and dense; or a refusal in words."""
    made = call(X, Y)
    floats = made.dtype.is_floating_point

    def loss(x, y):
        out = call(x, y)
        return (out * (out + 0.5).cos()).sum(), out

    def kept(x, y):
        return ft.value_and_grad(loss, (0, 1), has_aux=True)(x, y)

    def traced(x, y):
        grads, (value, out) = torch.func.grad_and_value(loss, (0, 1), has_aux=True)(x, y)
        return (value, out), grads

    steps = {"kept": kept, "traced": traced}
    for way in ways if floats else ("value",):
        step = steps.get(way, call)
        mapped = ft.partition(step, ft.Mesh(dp=2, tp=2), tuple(specs), P(), pick="cheapest")
        try:
            got = mapped(X, Y)
        except ValueError as refusal:
            if name in REFUSED and str(refusal).startswith(("partition:", "trace:")):
                continue
            raise
        want = (kept if floats else call)(X, Y)
        torch.testing.assert_close(
            got, want, **_wanted_closeness(call, made),
            msg=lambda m, way=way: f"{way}, {specs}: {m}",
        )  # fmt: skip


REFUSED = {"polygamma_", "index_fill_"}
"""Refusals of partition: torch has no such operation out of place, or a gradient by numbers."""


def _splits() -> list[P]:
    """Every way in which two axes may split dims of X, each at most one."""
    found = []
    for dims in itertools.product((None, 0, 1, 2), repeat=2):
        entries: list[Any] = [None] * 3
        for axis, dim in zip(("dp", "tp"), dims, strict=True):
            if dim is not None:
                entries[dim] = axis if entries[dim] is None else (entries[dim], axis)
        fits = all(size % (2 if isinstance(e, str) else 4) == 0 or e is None
                   for e, size in zip(entries, X.shape, strict=True))  # fmt: skip
        found += [P(*entries)] if fits else []
    return found


SPLITS = _splits()


@pytest.mark.parametrize("name", CALLS)
def test_operands_are_split_apart(name, request):
    """Each operand in a way of its own, and gradients in both ways: a sample of them, or all."""
    rng = random.Random(zlib.crc32(name.encode()))
    for number, call in enumerate(CALLS[name]):
        if request.config.getoption("--full"):
            for specs in itertools.product(SPLITS, repeat=2):
                _compare(name, call, specs, [rng.choice(("kept", "traced"))])
        elif number == 0:
            _compare(name, call, rng.choices(SPLITS, k=2), [rng.choice(("kept", "traced"))])


# --- writes in place


def _write(op: str, *args: Any, **options: Any) -> Call:
    """A product that an operation overwrites, and is then read with what it was made of."""

    def call(x, y):
        h = (x * 0.2).sin() * 0.3 + 0.5 + 0 * y  # where all of them have derivatives
        given = [y.sin() * 0.2 + 0.4 if each is Y else each for each in args]
        getattr(h, op)(*given, **options)
        return h + x

    return call


_INDEX = IDS[0, :2] % 4
_SELF = (
    "abs acos asin atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac "
    "lgamma log log10 log1p log2 logit neg rad2deg reciprocal relu round rsqrt sgn sigmoid sign sin "
    "sinc sinh sqrt square tan tanh trunc zero i0 nan_to_num"
)
_OTHER = (
    "add sub mul div atan2 copysign fmod hypot remainder pow xlogy "
    "eq ne lt le gt ge logical_and logical_or logical_xor"
)
WRITES: Mapping[str, Call] = {
    **{f"{name}_": _write(f"{name}_") for name in _SELF.split()},
    **{f"{name}_": _write(f"{name}_", Y) for name in _OTHER.split()},
    "logical_not_": _write("logical_not_"),
    "clamp_": _write("clamp_", 0.4, 0.6),
    "clamp_min_": _write("clamp_min_", 0.5),
    "clamp_max_": _write("clamp_max_", 0.5),
    "clip_": _write("clip_", 0.45, 0.6),
    "addcmul_": _write("addcmul_", Y, Y, value=0.5),
    "addcdiv_": _write("addcdiv_", Y, Y, value=2),
    "lerp_": _write("lerp_", Y, 0.3),
    "div_ by rounding": lambda x, y: (x * 9).div_(y, rounding_mode="trunc") + x,
    "add_ by a factor": _write("add_", Y, alpha=0.5),
    "copy_": _write("copy_", Y),
    "fill_": _write("fill_", 0.25),
    "float_power_": _write("float_power_", 1.5),
    "masked_fill_": _write("masked_fill_", Y > 0, 0.3),
    "mvlgamma_": lambda x, y: (x.abs() + 2).mvlgamma_(2) + y,
    "polygamma_": _write("polygamma_", 1),
    "elu_": lambda x, y: F.elu(x * 2, 0.3, inplace=True) + y,
    "celu_": lambda x, y: F.celu(x * 2, 0.5, inplace=True) + y,
    "selu_": lambda x, y: F.selu(x * 2, inplace=True) + y,
    "silu_": lambda x, y: F.silu(x * 2, inplace=True) + y,
    "mish_": lambda x, y: F.mish(x * 2, inplace=True) + y,
    "relu6_": lambda x, y: F.relu6(x * 9, inplace=True) + y,
    "hardtanh_": lambda x, y: F.hardtanh(x * 2, -0.5, 0.7, inplace=True) + y,
    "hardsigmoid_": lambda x, y: F.hardsigmoid(x * 2, inplace=True) + y,
    "leaky_relu_": lambda x, y: F.leaky_relu(x * 2, 0.3, inplace=True) + y,
    "threshold_": lambda x, y: F.threshold(x * 2, 0.1, 0.2, inplace=True) + y,
    "gelu_": lambda x, y: torch.ops.aten.gelu_(x * 2, approximate="tanh") + y,
    "cumsum_": _write("cumsum_", -1),
    "cumprod_": _write("cumprod_", 1),
    "tril_": _write("tril_", -1),
    "triu_": _write("triu_", 1),
    "index_put_": _write("index_put_", (_INDEX,), Y[:2], accumulate=True),
    "index_add_": _write("index_add_", 0, _INDEX, Y[:2], alpha=0.5),
    "index_copy_": _write("index_copy_", 1, torch.tensor([1, 3]), Y[:, :2]),
    "index_fill_": _write("index_fill_", -1, _INDEX, 0.7),
    "index_reduce_": _write("index_reduce_", 0, torch.tensor([1, 3]), Y[:2] + 3, "mean"),
    "scatter_": _write("scatter_", -1, IDS[..., None], 0.7),
    "scatter_add_": _write("scatter_add_", -1, IDS[..., None], Y[..., :1]),
    "scatter_reduce_": _write("scatter_reduce_", -1, IDS[..., None], Y[..., :1], "mean"),
    "squeeze_": lambda x, y: (x[:, :1] * 2).squeeze_(1) + y[:, 0],
    "unsqueeze_": lambda x, y: (x * 2).unsqueeze_(1).mul_(y[:, None]),
    "transpose_": lambda x, y: (x * 2).transpose_(1, -1) + y.mT,
    "t_": lambda x, y: (x[0] * 2).t_() + y[0].T,
    "unsafe views": lambda x, y: (x * 2).view(4, 48).mul_(y.reshape(4, 48)),
}
"""Calls that write, by the operation; a few by two options."""

NO_WRITES = {
    "rrelu_",  # which draws numbers
    "asinh_", "acosh_", "atanh_", "floor_divide_",  # which torch does not differentiate
    # of integers, or of two of one dtype
    "bitwise_and_", "bitwise_or_", "bitwise_xor_", "bitwise_not_", "bitwise_left_shift_",
    "bitwise_right_shift_",
    "gcd_", "lcm_", "ldexp_", "detach_", "heaviside_", "nextafter_", "arcsin_", "signbit_",
    # special functions without derivatives to one operand, or that take numbers
    "igamma_", "igammac_", "rsub_", "hardswish_",
    # of a product that is added; the sum itself is one of those above
    "true_divide_", "conj_physical_", "fmax_", "fmin_", "positive_",
}  # fmt: skip


def test_every_write_in_place_is_called():
    aten: Any = torch.ops.aten
    known = torch._C._dispatch_get_all_op_names()
    rows = [name.removeprefix("aten::").partition(".") for name in known if "aten::" in name]
    pointwise = {
        name
        for name, _, overload in rows
        if torch.Tag.pointwise in getattr(getattr(aten, name), overload or "default").tags
    }
    forms = {f"{name}_" for name in {*TABLE} | pointwise if not name.endswith("_")}
    wanted = forms & {name for name, *_ in rows}
    assert wanted <= {*WRITES} | NO_WRITES, wanted - {*WRITES} - NO_WRITES


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_place_are_torchs(name, request):
    rng = random.Random(zlib.crc32(name.encode()))
    if request.config.getoption("--full"):
        for specs in itertools.product(SPLITS, repeat=2):
            _compare(name, WRITES[name], specs, [rng.choice(("kept", "traced"))])
    else:
        _compare(name, WRITES[name], rng.choices(SPLITS, k=2), [rng.choice(("kept", "traced"))])
