"""Rules: every operation under drawn placements and meshes, values and gradients against dense.

A draw gives each operand a spec that fits its shape; the program must compute what the function
does in float64, in values and in the gradient of every floating operand, and pass the check of
replication.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import P
from functron.ops.glu import GLU, GLU_PACKED
from functron.ops.norms import ADD_LAYER_NORM, RMS_NORM

MESHES = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4})
IDS = torch.arange(32).reshape(4, 8) * 7 % 16
STARTS = torch.tensor([0, 5, 5, 20])
MASK = torch.ones(8, 8, dtype=torch.bool).tril()


def weighted(x):
    """Numbers of which no two are alike, so that elements that changed places are found."""
    return x * torch.linspace(1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)


CASES = {
    # products
    "matmul": (lambda a, b: a @ b, (8, 16), (16, 8)),
    "bmm": (lambda a, b: a @ b, (4, 8, 16), (4, 16, 8)),
    "linear": (lambda x, w, b: F.linear(x, w, b), (4, 8, 16), (8, 16), (8,)),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=3), (8, 8), (8, 16), (16, 8)),
    "baddbmm": (lambda b, x, w: torch.baddbmm(b, x, w), (4, 8, 8), (4, 8, 16), (4, 16, 8)),
    "einsum": (lambda x, w: torch.einsum("bsd,dhe->bhse", x, w), (4, 8, 16), (16, 4, 8)),
    "einsum of experts": (lambda x, w: torch.einsum("td,edf->tef", x, w), (8, 16), (4, 16, 8)),
    "mv": (lambda a, b: a @ b, (8, 16), (16,)),
    "dot": (lambda a, b: a @ b, (16,), (16,)),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, 2), (4, 4, 8, 8), (8, 4, 2, 2), (8,)),
    "conv of groups": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), (4, 8, 8, 8), (16, 2, 3, 3), (16,),
    ),
    "conv of each channel": (
        lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=8), (4, 8, 8), (8, 1, 3), (8,),
    ),
    "conv back": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, groups=2), (4, 8, 4, 4), (8, 4, 2, 2), (8,),
    ),
    "conv of neighbours": (
        lambda x, w: F.conv2d(x, w, None, 2, 1), (2, 4, 16, 16), (4, 4, 4, 3),
    ),
    "conv of far neighbours": (
        lambda x, w, b: F.conv1d(x, w, b, padding="same", dilation=2), (2, 4, 16), (8, 4, 2), (8,),
    ),
    "conv that skips": (lambda x, w: F.conv1d(x, w, stride=2), (2, 4, 16), (4, 4, 1)),
    "conv without padding": (lambda x, w: F.conv1d(x, w), (2, 4, 16), (4, 4, 3)),
    "pools": (
        lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.interpolate(x[..., :4], size=(4, 2)),
        (4, 8, 8, 4),
    ),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 2) * x.mean((2, 3), True), (4, 8, 8, 8)),
    # as transformers stores several matrices in one
    "fused qkv": (
        lambda x, w: weighted(torch.cat([*map(weighted, (x @ w.T).split((16, 8, 8), -1))][::-1], -1)),
        (4, 8, 16), (32, 16),
    ),
    "fused qkv alike": (
        lambda x, w: weighted(torch.stack([*map(weighted, (x @ w.T).chunk(3, -1))], 1)),
        (4, 8, 16), (24, 16),
    ),
    "fused qkv of heads": (
        lambda x, w: weighted((x @ w.T).view(4, 8, 4, 3, 4)[..., 1, :]), (4, 8, 16), (48, 16),
    ),
    "packed experts": (
        lambda x, w: weighted(F.silu((y := torch.bmm(x, w).chunk(2, -1))[0]) * y[1]),
        (4, 8, 16), (4, 16, 32),
    ),
    "gru": (lambda *a: _recur(torch.gru, *a), (4, 3, 8), (24, 8), (24, 8), (24,), (24,)),
    "lstm": (lambda *a: _recur(torch.lstm, *a), (4, 3, 8), (32, 8), (32, 8), (32,), (32,)),
    # elements
    "add": (lambda a, b: a + 2 * b, (8, 16), (16,)),
    "mul": (lambda a, b: a * b, (8, 16), (8, 1)),
    "div": (lambda a, b: a / (b.abs() + 1), (8, 16), (8, 16)),
    "where": (lambda a, b: torch.where(a > 0, a, b), (8, 16), (8, 16)),
    "gelu": (lambda a: F.gelu(a), (8, 16)),
    "masked_fill": (lambda a: a.masked_fill(MASK, 0.0), (4, 8, 8)),
    "floor_divide": (lambda a, b: (a * 9).detach() // (b.detach().abs() + 1) * a * b, (8, 16), (16,)),
    "log_sigmoid": (lambda a: F.logsigmoid(a), (8, 16)),
    "prelu": (lambda a, b: F.prelu(a, b), (8, 16, 4), (16,)),
    "rotation": (
        lambda a, b: torch.view_as_real(
            torch.view_as_complex(a.view(4, 8, 4, 4, 2)) * torch.polar(b.exp(), b)[:, None]
        ).flatten(3),
        (4, 8, 4, 8), (8, 4),
    ),
    "absolute": (
        lambda a, b: torch.complex(a, b).abs() + torch.polar(a, b).real - torch.polar(a, b).imag,
        (8, 16), (8, 16),
    ),
    "cast": (lambda a: a.to(torch.float32).double().clone(), (8, 16)),
    # partial sums on their way
    "partial": (lambda a, b, c: (2 * (a @ b) - c * 0 + a @ b).view(4, 2, 8), (8, 16), (16, 8), (8,)),
    "partial twice": (lambda a, b: (a @ b) * (a @ b), (8, 16), (16, 8)),
    # reductions
    "sum": (lambda a: a.sum(1), (8, 16, 4)),
    "sum of all": (lambda a: a.sum(), (8, 16)),
    "mean": (lambda a: a.mean((0, 2), keepdim=True), (8, 16, 4)),
    "logsumexp": (lambda a: a.logsumexp((0, 1)), (8, 16)),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), (8, 16)),
    "norm of 1": (lambda a: torch.linalg.vector_norm(a, 1), (8, 16)),
    "prod": (lambda a: a.prod(1), (8, 16)),
    "var": (lambda a: a.var(1), (8, 16)),
    "any and all": (lambda a: (a > 1).any(1) * a.sum(1) + (a < 2).all(), (8, 16)),
    "largest": (lambda a: a.detach().amax(1) * a.sum(1) - a.detach().amin((0, 1)), (8, 16)),
    "amax": (lambda a: a.amax(1) + a.amax(), (8, 16)),
    "amax of ties": (lambda a: a.clamp(max=0.5).amax((0, 2), keepdim=True) * a, (4, 8, 16)),
    "histogram": (lambda a: a.detach().histc(4, -2, 2) * a.sum(), (8, 16)),
    "histogram of its range": (lambda a: a.detach().histc(4) * a.sum(), (8, 16)),
    "amin": (lambda a: a.clamp(min=-0.5).amin(0) + a.amin((0, 1)), (8, 16)),
    "norm of inf": (lambda a: torch.linalg.vector_norm(a, torch.inf, 1), (8, 16)),
    "norm of -inf": (lambda a: torch.linalg.vector_norm(a.clamp(0.5), -torch.inf), (8, 16)),
    "max": (lambda a: a.max(1).values, (8, 16)),
    # along dims
    "softmax": (lambda a: a.softmax(1), (8, 16)),
    "safe_softmax": (
        lambda a: torch._safe_softmax(a.masked_fill((a > 1) | (a[:, :1] > 0), -torch.inf), 1),
        (8, 16),
    ),
    "log_softmax": (lambda a: a.log_softmax(-1), (4, 8, 16)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), (8, 16), (16,), (16,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w, 1e-5), (8, 16), (16,)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (8, 4, 16), (4,), (4,),
    ),
    "batch_norm of rows": (lambda x: F.batch_norm(x, None, None, training=True), (8, 16)),
    "batch_norm with statistics": (
        lambda x, m, v, w: _normalized(x, m.detach(), v.detach().exp(), w), (8, 4, 4, 2),
        (4,), (4,), (4,),
    ),
    "batch_norm of statistics": (
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach().exp(), w, b), (8, 4, 16),
        (4,), (4,), (4,), (4,),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (8, 8, 4), (8,), (8,)),
    "group_norm of one": (lambda x, w: F.group_norm(x, 1, w), (4, 8, 4, 4), (8,)),
    "group_norm of each": (lambda x, w: F.group_norm(x, 8, w), (4, 8, 4), (8,)),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (8, 8, 4), (8,), (8,),
    ),
    "scatter": (lambda a: a.scatter(1, IDS[:, :4], 2.0) * a, (4, 16)),
    "cumsum": (lambda a: a.cumsum(1), (8, 16)),
    "sort": (lambda a: a.sort(1).values, (8, 16)),
    "topk": (lambda a: a.topk(2, 1).values, (8, 16)),
    "flip": (lambda a: a.flip(1).roll(1, 0), (8, 16)),
    # views
    "view": (lambda a: weighted(a.view(4, 2, 16).view(4, 32)), (8, 16)),
    "unaligned view": (lambda a: weighted(a.reshape(8, 2, 6)), (8, 12)),
    "heads": (lambda a: weighted(a.view(4, 8, 4, 8).transpose(1, 2).reshape(16, 64)), (4, 8, 32)),
    "permute": (lambda a: weighted(a.permute(2, 0, 1).mT), (4, 8, 16)),
    "unsqueeze": (lambda a: weighted(a[:, None].squeeze(1).t()), (8, 16)),
    "expand": (lambda a: weighted(a[:, None].expand(8, 4, 16)), (8, 16)),
    "repeat": (lambda a: weighted(a.repeat(2, 3)), (8, 16)),
    "repeat_interleave": (lambda a: weighted(a.repeat_interleave(2, 1)), (4, 4, 8)),
    "split": (lambda a: torch.stack(a.chunk(2, 1)) * 2, (8, 16)),
    "uneven split": (lambda a: a.split((4, 12), 1)[1] * 2, (8, 16)),
    "halves": (lambda a: torch.cat([-a[:, 8:], a[:, :8]], 1), (8, 16)),
    "cat": (lambda a, b: weighted(torch.cat([a, b], 1)), (8, 16), (8, 16)),
    "uneven cat": (lambda a, b: weighted(torch.cat([a, b], 1)), (8, 16), (8, 4)),
    "cat to nothing": (lambda a: weighted(torch.cat([a.new_zeros(0), a, a[:0]])), (8, 16)),
    "stack": (lambda a, b: weighted(torch.stack([a, b], 1)), (8, 16), (8, 16)),
    "select": (lambda a: a[:, 3], (8, 16)),
    "pad": (lambda a: F.pad(a, (1, 2)), (8, 16)),
    "pad by a shift": (lambda a: F.pad(a, (0, 0, 1, -1)) * a, (4, 8, 16)),
    "pad by shifts": (lambda a: F.pad(a, (-2, 2, 3, -3), value=2.0) * a, (8, 16)),
    "pad around": (lambda a: F.pad(a, (2, -2), mode="circular") * a, (4, 8, 16)),
    "slice of all": (lambda a: a[:, -16:] * a.narrow(0, 0, 8), (8, 16)),
    "roll": (lambda a: a.roll((1, 3), (0, 1)) * a, (8, 16)),
    "put at a place": (lambda a, b: a.select_scatter(b * 2, 1, -1) * a, (8, 16), (8,)),
    "put in a range": (lambda a, b: a.slice_scatter(b * 2, 1, 0, 16) * a, (8, 16), (8, 16)),
    "tril": (lambda a: a.tril(), (8, 8)),
    "write": (lambda a: torch.zeros_like(a[0]).copy_(a[1]) + _shifted(a), (4, 8)),
    "write by a mask": (lambda a, b: _put(a, a > 0, b), (8, 16), ()),
    "write by a mask of rows": (lambda a, b: _put(a, a[:, 0, 0] > 0, b), (8, 16, 4), (16, 4)),
    "write by a mask of a dim": (
        lambda a, b: _put(a, (slice(None), a[0, :, 0] > 0), b[:, None]), (8, 16, 4), (8, 4),
    ),
    "write by a mask of the last": (lambda a, b: _put(a, (..., b > 0), b[:1] * 2), (8, 16), (16,)),
    "add by a mask": (
        lambda a, b: a.clone().index_put_((a[..., 0] > 0,), b, accumulate=True), (8, 4, 16), (1, 16),
    ),
    "write at indices": (lambda a, b: _put(a, (slice(None), IDS[0]), b), (8, 16, 4), (8, 8, 4)),
    "write at two indices": (lambda a, b: _put(a, (IDS[0] % 8, IDS[0]), b), (8, 16, 4), (8, 4)),
    "write at indices apart": (
        lambda a, b: _put(a, (IDS[0] % 8, slice(None), IDS[0] % 4), b[:, None]), (8, 16, 4), (8,),
    ),
    "add at indices": (
        lambda a, b: a.index_put((IDS[1] % 8,), b, accumulate=True), (8, 16), (8, 16),
    ),
    "index_add": (lambda a, b: a.index_add(1, IDS[0], b, alpha=2), (4, 16), (4, 8)),
    "index_copy": (lambda a, b: a.index_copy(-1, IDS[0, :4], b), (4, 8, 16), (4, 8, 4)),
    "index_fill": (lambda a, b: a.index_fill(1, IDS[0], b) * a, (4, 16), ()),
    "scatter numbers": (lambda a, b: a.scatter(1, IDS[:, :4], b), (4, 16), (4, 4)),
    "scatter_add": (lambda a, b: a.scatter_add(0, IDS % 4, b), (4, 8), (4, 8)),
    "scatter_reduce sum": (
        lambda a, b: a.scatter_reduce(1, IDS, b, "sum", include_self=True), (4, 16), (4, 8),
    ),
    "scatter_reduce prod": (
        lambda a, b: a.scatter_reduce(1, IDS, b, "prod", include_self=True), (4, 16), (4, 8),
    ),
    "scatter_reduce mean": (
        lambda a, b: a.scatter_reduce(1, IDS, b, "mean", include_self=False), (4, 16), (4, 8),
    ),
    "scatter_reduce amax": (
        lambda a, b: a.scatter_reduce(1, IDS, b, "amax", include_self=False), (4, 16), (4, 8),
    ),
    "scatter_reduce amin": (
        lambda a, b: a.scatter_reduce(1, IDS, b, "amin", include_self=True), (4, 16), (4, 8),
    ),
    # results that are written to in place
    "batch_norm in place": (
        lambda x, w: _written(F.batch_norm(x, None, None, w, None, True)), (8, 4, 16), (4,),
    ),
    "group_norm in place": (lambda x: _written(F.group_norm(x, 2)), (8, 4, 16)),
    "conv in place": (
        lambda x, w: _written(F.conv1d(x, w, padding=1)), (2, 4, 16), (8, 4, 3),
    ),
    "bags in place": (lambda w: _written(F.embedding_bag(IDS, w, mode="sum")), (16, 8)),
    "losses in place": (
        lambda a, b: _written(F.huber_loss(a, b, "none", 0.5)), (8, 16), (8, 16),
    ),
    # lookups
    "embedding": (lambda w: F.embedding(IDS, w), (16, 8)),
    "gather": (lambda a: a.gather(1, IDS[:, :4]), (4, 16)),
    "index": (lambda a: a[IDS], (16, 8)),
    "index of a middle dim": (lambda a: a[:, IDS[0]], (8, 16, 4)),
    "index of two": (lambda a: a[IDS[:, 0] % 8, IDS[:, 1]], (8, 16)),
    "index_select": (lambda a: a.index_select(1, IDS[0]), (8, 16)),
    "cross_entropy": (lambda a: F.cross_entropy(a, IDS[0]), (8, 16)),
    "ignored targets": (lambda a: F.cross_entropy(a, IDS[0], ignore_index=7, reduction="none"), (8, 16)),
    # bags, of a table and of weights of ids
    "bags": (lambda w: F.embedding_bag(IDS, w, mode="mean"), (16, 8)),
    "bags that are weighted": (
        lambda w, s: F.embedding_bag(IDS, w, per_sample_weights=s, mode="sum"), (16, 8), (4, 8),
    ),
    "bags of largest": (lambda w: F.embedding_bag(IDS, w, mode="max", padding_idx=7), (16, 8)),
    "bags with padding": (lambda w: F.embedding_bag(IDS, w, mode="mean", padding_idx=7), (16, 8)),
    "bags of several sizes": (
        lambda w: F.embedding_bag(IDS.flatten(), w, STARTS, mode="mean", padding_idx=7), (16, 8),
    ),
    "bags that end": (
        lambda w, s: F.embedding_bag(
            IDS.flatten()[:20], w, STARTS, mode="sum", per_sample_weights=s,
            include_last_offset=True,
        ),
        (16, 8), (20,),
    ),
    "largest of several sizes": (
        lambda w: F.embedding_bag(IDS.flatten(), w, STARTS, mode="max"), (16, 8),
    ),
    # losses
    "mse_loss": (lambda a, b: F.mse_loss(a, b), (8, 16), (8, 16)),
    "smooth_l1_loss": (lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), (8, 16), (8, 16)),
    "huber_loss": (lambda a, b: F.huber_loss(a, b, "sum", 0.5), (8, 16), (8, 16)),
    "huber losses": (lambda a, b: F.huber_loss(a, b, "none", 0.5), (8, 16), (8, 16)),
    "bce": (
        lambda a, b, w: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), w.detach()),
        (8, 16), (8, 16), (8, 16),
    ),
    "bce of logits": (
        lambda a, b, w, p: F.binary_cross_entropy_with_logits(
            a, b.sigmoid(), w.detach(), pos_weight=p.detach().exp()
        ),
        (8, 16), (8, 16), (16,), (16,),
    ),
    "bces of logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="none"),
        (8, 16), (8, 16),
    ),
    # attention
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (4, 4, 8, 8), (4, 4, 8, 8), (4, 4, 8, 8),
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK.double(), enable_gqa=True),
        (4, 4, 8, 8), (4, 2, 8, 8), (4, 2, 8, 8),
    ),
    # ops of functron
    "rms_norm op": (lambda x, w: RMS_NORM(x, w, 1e-5, False)[0], (4, 8, 16), (16,)),
    "sum and layer_norm op": (
        lambda x, y, w, b: torch.cat(ADD_LAYER_NORM(x, y, w, b, 1e-5, True)[:2]),
        (8, 16), (8, 16), (16,), (16,),
    ),
    "glu op": (lambda x, y: GLU(x, y, "silu"), (8, 16), (8, 16)),
    "packed glu op": (lambda x: GLU_PACKED(x, "gelu"), (8, 16)),
    # factories
    "arange": (lambda a: a * torch.arange(16) + torch.ones_like(a) + a.new_zeros(8, 1), (8, 16)),
}  # fmt: skip


UNTRACED = {
    *(name for name in CASES if "by a mask" in name), "index_fill", "scatter_reduce prod",
    *(name for name in CASES if name.endswith(" op")),
}  # fmt: skip
"""Cases whose backward has shapes by numbers, or is of an operation of functron."""


def _put(a, index, values):
    out = a * 2
    out[index] = values
    return out


def _recur(layer, x, *weights):
    """One recurrent layer, over dim 1."""
    start = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    begin = (start, start) if layer is torch.lstm else start
    return layer(x, begin, weights, True, 1, 0.0, False, False, True)[0]


def _normalized(x, mean, variance, weight):
    """A batch norm in training, and the running statistics that it leaves."""
    mean, variance = mean.clone(), variance.clone()
    out = F.batch_norm(x, mean, variance, weight, None, True, 0.3)
    return torch.cat([out.flatten(1), mean.repeat(8, 1), variance.repeat(8, 1)], 1)


def _written(out):
    """A result with other numbers in places of its last dim, through views and by products."""
    out[..., 1:].mul_(2)
    out[..., 0] += 3 * out[..., 1]
    return out.add_(1)


def _shifted(a):
    out = torch.zeros_like(a)
    out[:, 1:] = a[:, :-1]
    out[..., 0] = 1.0
    return out


def drawn(shape, sizes, rng: random.Random) -> P:
    """A spec that fits a shape."""
    entries: list[tuple[str, ...]] = [() for _ in shape]
    for axis in sizes:
        dim = rng.randrange(-1, len(shape))
        count = sizes[axis]
        for other in entries[dim] if dim >= 0 else ():
            count *= sizes[other]
        if dim >= 0 and shape[dim] % count == 0:
            entries[dim] += (axis,)
    return P(*(row or None for row in entries))


def compare(name: str, seed: int) -> None:
    fn, *shapes = CASES[name]
    rng = random.Random(zlib.crc32(f"{name}{seed}".encode()))
    sizes = MESHES[seed % 4]
    specs = tuple(drawn(shape, sizes, rng) for shape in shapes)
    torch.manual_seed(seed)
    args = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mapped = ft.partition(fn, ft.Mesh(**sizes), specs, pick="cheapest")
    out, dense = mapped(*args), fn(*args)
    message = f"{name} on {sizes} with {specs}"
    torch.testing.assert_close(out, dense, rtol=1e-12, atol=1e-12, msg=lambda m: f"{message}: {m}")
    positions = tuple(range(len(args)))
    seedling = torch.randn(dense.shape, dtype=torch.float64)

    def gradient(f):
        return torch.func.grad(lambda *a: (f(*a) * seedling).sum(), positions)

    if seed % 3 == 2 and name not in UNTRACED:  # by the rules of backward operations
        inner = gradient(fn)
        step = ft.partition(inner, ft.Mesh(**sizes), specs, pick="cheapest")
    elif seed % 3:  # from inside, where cotangents are known to be equal, or not
        inner = ft.grad(lambda *a: (fn(*a) * seedling).sum(), positions)
        step = ft.partition(inner, ft.Mesh(**sizes), specs, pick="cheapest")
    else:
        step, inner = gradient(mapped), None
    grads, wanted = step(*args), gradient(fn)(*args)
    torch.testing.assert_close(
        grads, wanted, rtol=1e-12, atol=1e-12, msg=lambda m: f"{message}: {m}"
    )
    ft.trace(mapped if inner is None else step)(*args).check()


@pytest.mark.parametrize("name", CASES)
def test_operation(name):
    """By two of the three ways to differentiate."""
    start = zlib.crc32(name.encode()) % 12
    for seed in (start, start + 2):
        compare(name, seed)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_operation_under_many_placements(name):
    for seed in range(48):
        compare(name, seed)


REFUSED = {
    "a number for each place": (lambda a: _put(a, a > 0, torch.arange(3.0)), "torch.where"),
    "two indices": (lambda a: _put(a, (a[:, 0] > 0, IDS[0, :3]), 0.5), "torch.where"),
    "masked_scatter": (lambda a: a.masked_scatter(a > 0, a * 2), "torch.where"),
    "put": (lambda a: a.put(IDS[0], a[0, :8]), r"x\[i, j\] = values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_have_no_rule(name):
    """Each names what to write instead; or every rank does all of it."""
    fn, fix = REFUSED[name]
    a = torch.full((8, 16), -1.0)
    a[1:4, 0] = 1.0
    told = rf"test_rules.*for which there is no rule.*fix: .*{fix}.*fallback=\"replicate\""
    with pytest.raises(ValueError, match=told):
        ft.partition(fn, ft.Mesh(dp=2), P("dp"), P("dp"))(a)
    mapped = ft.partition(fn, ft.Mesh(dp=2), P("dp"), P("dp"), fallback="replicate")
    assert mapped(a).equal(fn(a))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_bags_that_are_scaled_by_counts():
    """By torch's own operation, where every rank has all ids and rows."""
    w = torch.randn(16, 8, dtype=torch.float64)

    def bags(w):
        found = F.embedding_bag(IDS, w, mode="mean", scale_grad_by_freq=True)
        return (found * torch.arange(8.0)).sum()

    mesh, wanted = ft.Mesh(tp=2), torch.func.grad(bags)(w)
    outside = ft.partition(bags, mesh, P("tp"), P())
    inside = ft.partition(ft.grad(bags), mesh, P(None, "tp"), P("tp"))
    for got in (torch.func.grad(outside)(w), inside(w)):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_bags_of_samples_stay_split():
    """Ids of a matrix are bags of one size: split as samples are, and rows are not gathered."""
    w = torch.randn(16, 8, dtype=torch.float64)
    mapped = ft.partition(
        lambda w, ids: F.embedding_bag(ids, w, mode="sum"), ft.Mesh(dp=2), (P(), P("dp"))
    )
    torch.testing.assert_close(mapped(w, IDS), F.embedding_bag(IDS, w, mode="sum"))
    assert mapped.out_specs == P("dp")
    assert ft.trace(mapped)(w, IDS).cost().collectives == ()


IMAGES = torch.randn(2, 4, 16, 16, dtype=torch.float64)
KERNELS = torch.randn(4, 4, 5, 3, dtype=torch.float64)


def test_images_that_stay_split_send_halos():
    """Of a convolution over both dims, each rank sends neighbours two places before and one after.

    The second reads what the first has sent, as corners are of a neighbour's neighbour.
    """

    def convolve(x, w):
        return F.conv2d(x, w, stride=(2, 1), padding=(2, 1))

    spec = P(None, None, "cp", "tp")
    mapped = ft.partition(convolve, ft.Mesh(cp=2, tp=4), (spec, P()))
    torch.testing.assert_close(mapped(IMAGES, KERNELS), convolve(IMAGES, KERNELS))
    assert mapped.out_specs == spec
    rows = ft.trace(mapped)(IMAGES, KERNELS).cost().collectives
    assert {(row.axis, row.op) for row in rows} == {("cp", "ppermute"), ("tp", "ppermute")}
    sent = {row.axis: row.payload_bytes for row in rows}
    held = 2 * 4 * 8  # bytes of a place of one dim, of both samples and of all channels
    assert sent == {"cp": held * (2 + 1) * 4, "tp": held * 2 * (8 + 2 + 1)}


def test_halos_are_of_neighbours():
    mapped = ft.partition(
        lambda x, w: F.conv2d(x, w, padding="same", dilation=3), ft.Mesh(tp=4),
        (P(None, None, "tp"), P()),
    )  # fmt: skip
    told = r"dim 2 in parts of 4 on the 4 ranks of tp, and reads 6 places beside each.*constrain"
    with pytest.raises(ValueError, match=told):
        mapped(IMAGES, KERNELS)


def test_statistics_of_a_batch_are_those_of_all_ranks():
    """A module in training: what it returns, its gradients, and buffers, as on one device."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.GroupNorm(2, 8), torch.nn.BatchNorm2d(8, track_running_stats=False),
        torch.nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    ).double()  # fmt: skip
    fn, params = ft.from_module(module, train=True, buffers=True)
    buffers = dict(module.named_buffers())

    def step(params, buffers, x):
        def loss(params):
            out, after = fn(params, buffers, x)
            return (out * out.cos()).sum(), after

        return ft.value_and_grad(loss, has_aux=True)(params)

    x = torch.randn(8, 4, 8, 4, dtype=torch.float64)
    wanted = step(params, buffers, x)
    assert not wanted[0][1]["1.running_var"].equal(buffers["1.running_var"])
    for mesh, specs in (
        (ft.Mesh(dp=2, cp=2), (P(), P(), P("dp", None, "cp"))),
        (ft.Mesh(dp=2, tp=2), ({n: P("tp") for n in params}, P(), P("dp"))),
    ):
        mapped = ft.partition(step, mesh, specs, pick="cheapest")
        torch.testing.assert_close(mapped(params, buffers, x), wanted, rtol=1e-9, atol=1e-9)
    traced = ft.trace(step)(params, buffers, x)
    torch.testing.assert_close(traced(params, buffers, x), wanted, rtol=1e-9, atol=1e-9)
    running = [torch.zeros(4).double(), torch.ones(4).double()]
    with pytest.raises(ValueError, match=r"native_batch_norm.* modifies argument 1 in place"):
        ft.trace(lambda x, m, v: F.batch_norm(x, m, v, training=True))(x, *running)


def test_a_mask_of_other_sizes_is_refused_as_torch_refuses_it():
    with pytest.raises(
        ValueError, match=r"a mask of shape \[8, 1\] is the index of dims \[8, 16\]"
    ):
        ft.partition(lambda a: _put(a, a[:, :1] > 0, 0.5), ft.Mesh(dp=2), P("dp"), P("dp"))(
            torch.ones(8, 16)
        )


@pytest.mark.parametrize("look", [
    lambda w, ids: F.embedding(ids, w), lambda w, ids: w[ids],
    lambda w, ids: w.gather(0, ids[:, None].expand(-1, 8)),
    lambda w, ids: F.cross_entropy(w.T[: len(ids)], ids),
], ids=["embedding", "index", "gather", "loss"])  # fmt: skip
def test_ids_that_no_rank_has_are_refused(look):
    """Of a split table, too, whose ranks have zeros for those of others; as it runs."""
    w, ids = torch.randn(16, 8), torch.tensor([3, 16, 5])
    mapped = ft.partition(look, ft.Mesh(tp=2), (P("tp"), P()))
    torch.testing.assert_close(mapped(w, ids - 3), look(w, ids - 3))
    told = r"outside of the vocabulary.*got (one id|8 ids) outside, from 16 to 16.*wanted 0 to 15"
    for run in (mapped, ft.jit(mapped, backend="eager")):
        with pytest.raises(ValueError, match=f"(?s){told}"), torch.no_grad():
            run(w, ids)
