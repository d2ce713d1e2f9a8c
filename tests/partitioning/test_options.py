"""Options of operations: each with a value that is not its default, on shards as torch has it.

A rule says what a rank computes, and may forget what an operation was called with. `CALLS` has every
operation of `rules.TABLE` that takes options; what is computed and every gradient are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import P
from functron.partitioning.rules import TABLE

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
    "pointwise": [
        lambda x, y: F.gelu(x, approximate="tanh"),
        lambda x, y: F.leaky_relu(x, 0.3) + F.elu(y, 0.5) + F.softplus(x, 2.0, 1.0),
        lambda x, y: x.clamp(-0.5, 0.7) + F.hardtanh(y, -0.2, 0.3) + F.threshold(x, 0.1, 0.2),
        lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, y, y + 9, value=2),
        lambda x, y: torch.nan_to_num(x.detach() / (y > 0), nan=0.5, posinf=2.0, neginf=-1.0),
        lambda x, y: torch.lerp(x, y, 0.3) + x.round(decimals=1),
    ],
}

NONE = {
    "empty_like", "zeros", "ones", "empty", "new_empty", "scalar_tensor", "eye", "triu_indices",
    # by an operation of functron of that name, which takes none that a rule could drop
    "rms_norm", "layer_norm", "glu_packed",
    # on a GPU, by the rule of the one for CPUs
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}  # fmt: skip

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
