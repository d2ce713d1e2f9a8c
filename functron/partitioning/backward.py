"""Backward passes in a program: rules of the operations that differentiation by torch makes.

A function that is partitioned may differentiate by itself, by `torch.func.grad`, torch's tape, or a
backward of its own: then its program holds the operations of a backward pass, in global view as all
others. A letter that a cotangent has and a gradient lacks, such as that of the batch for a
parameter, makes the gradient a sum over ranks, once.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from functron.partitioning import shards
from functron.partitioning.labels import (
    Labels,
    MakeRule,
    PartitionRule,
    align_labels,
    broadcast_shapes,
    label_dims,
    pointwise,
    read_argument,
    sizes_of,
    without_units,
)
from functron.partitioning.layers import POOLS, bags_of, find_rows
from functron.partitioning.placement import Reduction
from functron.partitioning.rules import along
from functron.partitioning.shards import (
    EquationSite,
    RunShard,
    dims_of,
    name_arguments,
    wide_dtype,
)
from functron.program.equations import Equation, Fresh
from functron.spmd import collectives as lax

_LINEAR = (frozenset({0}),)  # backward is linear in the cotangent, its first operand


@dataclass(frozen=True, eq=False)
class Pullback:
    """An operation: the cotangents of the first operands of another, from that of its result.

    Its operands are the cotangent, and those of `forward`.

    Attributes:
        forward: the equation, of one result that has a cotangent.
        num_moving: how many of its operands have cotangents, the first ones.
    """

    forward: Equation
    num_moving: int

    namespace = "functron"
    tags = ()

    def name(self) -> str:
        """As an operation of torch has."""
        return "functron::pullback"


def pull_back_rule(equation: Equation, rule: PartitionRule) -> PartitionRule:
    """The rule of a `Pullback`, from that of its forward, which ranks run again to differentiate.

    Letters that an operand lacks, such as keys those of queries, are summed for its cotangent.
    """
    op: Any = equation.op
    assert rule.run is not None
    rows, moving = (rule.results[0], *rule.operands), rule.operands[: op.num_moving]
    letters = [x for x in rule.sizes if any(x in _letters(row) for row in rows)]
    summed = [x for x in letters if any(x not in _letters(row) for row in moving)]
    return PartitionRule(
        rows, moving, rule.sizes, _sums(x for x in summed if x not in rule.whole),
        whole=rule.whole, only=rule.only, linear=_LINEAR,
        run=functools.partial(shards.pull_back, rule.run, op),
    )  # fmt: skip


_BY_POSITION: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_for_cpu": ("dropout_p", "is_causal"),
        "_scaled_dot_product_flash_attention": ("dropout_p", "is_causal"),
        "_scaled_dot_product_efficient_attention": ("attn_bias", "", "dropout_p", "is_causal"),
        "_scaled_dot_product_cudnn_attention": ("attn_bias", "", "dropout_p", "is_causal"),
    }
)
"""The arguments of attention after queries, keys and values; "" where forward says that it keeps
what its own backward reads."""


def as_pullback(equation: Equation, fresh: Fresh) -> Equation | None:
    """The backward of attention as the `Pullback` of attention; None of other equations.

    What forward leaves for its backward differs by kernel, and by the way in which keys reach
    queries.
    """
    name = equation.name.removesuffix("_backward")
    if name == equation.name or name not in _BY_POSITION:
        return None
    given = name_arguments(equation.op, equation.args, equation.kwargs)
    if given.get("grad_input_mask", (False,))[-1]:  # of numbers that are added to scores, too
        return None
    grad, q, k, v = equation.args[:4]
    rest = [given[each] if each else True for each in _BY_POSITION[name]]
    mask = given.get("attn_mask")
    op: Any = getattr(torch.ops.aten, name).default
    count = len(op._schema.returns)
    outputs = (fresh.like(given["out"], "attention"), *[None] * (count - 1))
    options = {"scale": given.get("scale")} | ({} if mask is None else {"attn_mask": mask})
    forward = Equation(op, (q, k, v, *rest), options, outputs, equation.where)
    moving = equation.outputs[:3]
    pullback: Any = Pullback(forward, 3)  # an operation of this room alone
    return Equation(pullback, (grad, *forward.operands), {}, moving, equation.where)


def _letters(*rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [letter for labels in rows for dim in labels for letter in dim]


def _sums(letters: Iterable[str]) -> dict[str, Reduction]:
    return dict.fromkeys(letters, "sum")


def _make(
    equation: Equation,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    *,
    run: RunShard | None = None,
    summed: Sequence[str] = (),
    inside: Sequence[str] = (),
    whole: Sequence[str] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> PartitionRule:
    """The rule of a backward.

    Args:
        operands: the letters of all arguments that are tensors, in order.
        results: of all results; those that it is not asked for are left out.
        summed: letters whose parts add up in results that lack them.
        inside: letters whose parts `run` adds up itself.
        sizes: of letters that share a dim.
    """
    outputs = equation.outputs
    made = [row for row, var in zip(results, outputs, strict=True) if var is not None]
    values = (*equation.results, *equation.operands)
    known, kept = {**sizes_of(values, (*made, *operands)), **sizes}, frozenset(whole)
    combined = _sums(x for x in summed if x not in kept and any(x not in _letters(r) for r in made))
    return PartitionRule(
        tuple(operands), tuple(made), known, combined, inside=frozenset(inside) - kept, whole=kept,
        linear=_LINEAR, run=run,
    )  # fmt: skip


def _norm(equation: Equation) -> PartitionRule:
    """Of a norm of the last dims: gradients of its scale and bias are sums over all rows."""
    labels, dims = label_dims(equation.operands[0].shape), dims_of(equation)
    own, rows = labels[dims[0] :], labels[: dims[0]]
    means = (*rows, *(() for _ in dims))
    layer = equation.name == "native_layer_norm_backward"
    moments = (means, means) if layer else (means,)
    names = ("weight", "bias") if layer else ("weight",)
    given = [own for name in names if read_argument(equation, name) is not None]
    run = shards.layer_norm_backward if layer else shards.rms_norm_backward
    return _make(
        equation, (labels, labels, *moments, *given), (labels, own, own)[: 2 + layer],
        summed=_letters(rows), run=run,
    )  # fmt: skip


def _embedding(equation: Equation) -> PartitionRule:
    """The table's gradient: a sum over ids of all ranks; of a part of the table, of its own ids."""
    grad, ids = equation.operands
    rows = label_dims(ids.shape, "i")
    width, table = label_dims(grad.shape[-1:], "w"), label_dims(equation.results[0].shape[:1], "v")
    counted = read_argument(equation, "scale_grad_by_freq")  # all ids, each with its row
    return _make(
        equation, ((*rows, *width), rows), ((*table, *width),), summed=_letters(rows),
        whole=_letters(rows, table) if counted else (), run=shards.embedding_backward,
    )  # fmt: skip


def _nll_loss(equation: Equation) -> PartitionRule:
    labels = label_dims(equation.operands[1].shape)
    rows = labels[:-1]
    weight = [labels[-1:]] if read_argument(equation, "weight") is not None else []
    each = rows if read_argument(equation, "reduction") == 0 else ()
    return _make(
        equation, (each, labels, rows, *weight, ()), (labels,),
        whole=labels[-1] if weight else (), run=shards.nll_loss_backward,
    )  # fmt: skip


def _in_shape(equation: Equation) -> PartitionRule:
    """Of a part of a dim, or a diagonal, which are put where they were among zeros."""
    (grad,), (x,) = equation.operands, equation.results
    labels = label_dims(x.shape)
    count = len(labels)
    if equation.name == "diagonal_backward":
        dims = {read_argument(equation, name) % count for name in ("dim1", "dim2")}
        own: Labels = (*(row for i, row in enumerate(labels) if i not in dims), ("cut",))
    else:
        dims = {read_argument(equation, "dim") % count}
        (dim,) = dims
        cut = {"select_backward": (), "unfold_backward": (("cut",),)}
        own = (*labels[:dim], *cut.get(equation.name, (("cut",),)), *labels[dim + 1 :])
        own = (*own, ("window",)) if equation.name == "unfold_backward" else own
    own = tuple(row if size != 1 else () for row, size in zip(own, grad.shape, strict=True))
    whole = [*(x for dim in dims for x in labels[dim]), "cut", "window"]
    return _make(equation, (own,), (labels,), whole=whole, run=shards.put_in_zeros)


def _convolution(equation: Equation) -> PartitionRule:
    x = equation.operands[1]
    space = [(f"s{i}",) for i in range(len(x.shape) - 2)]
    kernel = [(f"k{i}",) for i in range(len(space))]
    places = [(f"z{i}",) for i in range(len(space))]
    transposed = read_argument(equation, "transposed")
    grouped = transposed or read_argument(equation, "groups") != 1
    filters = (("c",) if transposed else ("o",), ("m",) if grouped else ("c",), *kernel)
    whole = _letters(space, kernel, places) + (["c", "o", "m"] if grouped else [])
    rows = ((("b",), ("o",), *places), (("b",), ("c",), *space), filters)
    made = _make(
        equation, rows, (rows[1], filters, (("o",),)), summed=("b", "o"), whole=whole,
        run=shards.convolution_backward,
    )  # fmt: skip
    return without_units(made)


# --- norms of batches and groups


def _batch_norm(equation: Equation) -> PartitionRule:
    """Of its own batch's moments every gradient needs sums over it; of running ones, two do."""
    x = equation.operands[1]
    labels = label_dims(x.shape)
    rest = [letter for i, row in enumerate(labels) for letter in row if i != 1]
    rows, whole = [labels, labels], []
    for number, value in enumerate(equation.operands[2:]):
        like = value.shape == x.shape[1:2]
        rows.append(labels[1:2] if like else label_dims(value.shape, f"k{number}."))
        whole += [] if like else _letters(rows[-1])
    train = read_argument(equation, "train")
    return _make(
        equation, rows, (labels, labels[1:2], labels[1:2]), whole=whole,
        summed=() if train else rest, inside=rest if train else (), run=_batch_norm_backward,
    )  # fmt: skip


def _batch_norm_backward(
    site: EquationSite, grad, x, weight, mean, var, save_mean, save_scale, train, eps, mask
):
    """The gradients of x, scale and bias of a norm of a batch.

    Collectives: of the batch's own moments two psums of a number per channel, over axes that split
    other dims.
    """
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    global_shape = site.equation.operands[1].shape
    count = math.prod(global_shape) // global_shape[1]
    wide = wide_dtype(x.dtype)
    g, axes = grad.to(wide), [axis for dim in dims for axis in site.split(1, dim)]
    if train:
        mean, scale = save_mean.to(wide), save_scale.to(wide)
    else:
        mean, scale = mean.to(wide), (var.to(wide) + eps).rsqrt()
    normal = (x.to(wide) - mean.view(shape)) * scale.view(shape)
    bias_grad, scale_grad = g.sum(dims), (g * normal).sum(dims)
    if train:
        bias_grad, scale_grad = lax.psum(bias_grad, axes), lax.psum(scale_grad, axes)
        g = g - (bias_grad.view(shape) + normal * scale_grad.view(shape)) / count
    factor = scale if weight is None else scale * weight.to(wide)
    return _masked(site, mask, g * factor.view(shape), scale_grad, bias_grad)


def _masked(site: EquationSite, mask: Sequence[bool], *results: torch.Tensor) -> list:
    """The results that are asked for, in the dtypes that they have."""
    kinds = [None if var is None else var.dtype for var in site.equation.outputs]
    return [
        None if kind is None or not asked else value.to(kind)
        for value, kind, asked in zip(results, kinds, mask, strict=True)
    ]


def _group_norm(equation: Equation) -> PartitionRule:
    """Sums over groups and places for x; over samples and places for scale and bias."""
    x = equation.operands[1]
    groups = read_argument(equation, "group")
    sizes = {"g": groups, "m": x.shape[1] // groups}
    channels = tuple(letter for letter in "gm" if sizes[letter] != 1)
    rest = label_dims(x.shape[2:])
    labels: Labels = (("b",), channels, *rest)
    moments = (("b",), tuple(letter for letter in channels if letter == "g"))
    given = [(channels,) for _ in equation.operands[4:]]
    made = _make(
        equation, (labels, labels, moments, moments, *given), (labels, (channels,), (channels,)),
        summed=("b",), inside=_letters(rest), sizes=sizes, run=_group_norm_backward,
    )  # fmt: skip
    return without_units(made)


def _group_norm_backward(
    site: EquationSite, grad, x, mean, scale, weight, n, channels, places, groups, mask
):
    """The gradients of x, scale and bias of a norm of groups of channels.

    Collectives: two psums of a number per group and sample, over axes that split groups or places,
    and two of a number per channel, over axes that split places.
    """
    wide, shape = wide_dtype(x.dtype), [1, -1, *[1] * (x.dim() - 2)]
    around = [axis for dim in range(2, x.dim()) for axis in site.split(1, dim)]
    rows = (x.shape[0], site.held("g"), -1)
    mean, scale = (v.to(wide).reshape(x.shape[0], -1, 1) for v in (mean, scale))
    g, normal = grad.to(wide), (x.to(wide).reshape(rows) - mean) * scale
    dims = [0, *range(2, x.dim())]
    sums = (lax.psum(v.sum(dims), around) for v in (g * normal.reshape(x.shape), g))
    g = (g if weight is None else g * weight.to(wide).view(shape)).reshape(rows)
    axes, count = site.names("m") + around, channels // groups * places
    first, second = (lax.psum(v.sum(-1, keepdim=True), axes) / count for v in (g, g * normal))
    moved = (g - first - normal * second) * scale
    return _masked(site, mask, moved.reshape(x.shape), *sums)


# --- pools and resized images


def _pool(equation: Equation) -> PartitionRule:
    """Of all samples and channels alike, places whole."""
    (_, *others), (x,) = equation.operands, equation.results
    count = int(re.findall(r"(\d)d", equation.name)[0])
    kept = label_dims(x.shape[: len(x.shape) - count])
    ins, outs = ((*kept, *((f"{s}{i}",) for i in range(count))) for s in "xy")
    rows = [outs, *(outs if v.dtype == torch.int64 else ins for v in others)]
    whole = [*_letters(ins[len(kept) :], outs[len(kept) :])]
    return _make(equation, rows, (ins,), whole=whole, run=_pool_backward)


def _pool_backward(site: EquationSite, *args, **kwargs):
    """The gradient of this rank's samples and channels; of resized images by the rank's shape."""
    given = name_arguments(site.op, args, kwargs)
    if "input_size" in given:
        given["input_size"] = list(site.shapes[0])
    return site.op(*given.values())


# --- losses and elements


def _loss(equation: Equation) -> PartitionRule:
    """Of each element, with broadcasting; the cotangent of a sum or a mean is one number."""
    (grad, *operands), (x,) = equation.operands, equation.results
    shape = broadcast_shapes([value.shape for value in operands])
    labels = label_dims(shape)
    rows = [align_labels(value, shape, labels) for value in operands]
    each = align_labels(grad, shape, labels)
    return _make(
        equation, (each, *rows), (align_labels(x, shape, labels),),
        whole=_letters(labels) if x.shape != shape else (), run=_loss_backward,
    )  # fmt: skip


def _loss_backward(site: EquationSite, *args, **kwargs):
    """The gradient of this rank's elements, divided by the global count for a mean."""
    given = name_arguments(site.op, args, kwargs)
    (result,), mean = site.equation.results, given["reduction"] == 1
    if not mean:
        return site.op(*given.values())
    wide = wide_dtype(result.dtype)
    given = {k: v.to(wide) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    summed = site.op(*{**given, "reduction": 2}.values())
    return (summed / math.prod(result.shape)).to(result.dtype)


def _log_sigmoid(equation: Equation) -> PartitionRule:
    """Of elements, with what a CPU keeps and a GPU does not."""
    (x,) = equation.results
    labels, kept = label_dims(x.shape), equation.operands[2]
    row = labels if kept.shape == x.shape else label_dims(kept.shape, "k")
    whole = [] if row == labels else _letters(row)
    return _make(equation, (labels, labels, row), (labels,), whole=whole)


# --- bags of embeddings


def _bags(equation: Equation) -> PartitionRule:
    """The table's gradient: every rank has all bags, of parts of columns, and of rows its own."""
    grad, *others = equation.operands
    width, table = label_dims(grad.shape[-1:], "w"), label_dims(equation.results[0].shape[:1], "v")
    rows: list[Labels] = [(*label_dims(grad.shape[:1], "b"), *width)]
    for number, value in enumerate(others):
        own = label_dims(value.shape, f"o{number}.")
        rows.append((*own[:1], *width) if value.shape[1:] == grad.shape[1:] else own)
    whole = set(_letters(*rows)) - {*_letters(width)}
    if read_argument(equation, "mode") == 2:
        whole |= {*_letters(table)}
    return _make(equation, rows, ((*table, *width),), whole=[*whole], run=_bags_backward)


def _bags_backward(site: EquationSite, *args, **kwargs):
    """The gradient of this rank's part of a table, of the ids that are in it."""
    given = name_arguments(site.op, args, kwargs)
    grad, ids, offsets = (given[name] for name in ("grad", "indices", "offsets"))
    table = grad.new_zeros(site.shapes[0])
    if given["mode"] == 2:
        some = (given["bag_size"][: grad.shape[0]] != 0).unsqueeze(-1)
        return table.scatter_add(0, given["maximum_indices"], torch.where(some, grad, 0))
    bag = bags_of(ids, offsets)
    counts = ids != given["padding_idx"]
    inside = bag < grad.shape[0]  # ids from the last offset on are in no bag where it is an end
    rows = grad[torch.where(inside, bag, 0)]
    if given["mode"] == 1:
        number = rows.new_zeros(len(offsets)).index_add(0, bag, counts.to(rows.dtype))
        rows = rows / number.clamp(min=1)[bag].unsqueeze(-1)
    scales = given["per_sample_weights"]
    rows = rows if scales is None else rows * scales.unsqueeze(-1)
    if given["scale_grad_by_freq"]:
        often = rows.new_zeros(given["num_weights"]).index_add(0, ids, torch.ones_like(rows[:, 0]))
        rows = rows / often[ids].unsqueeze(-1)
    local, here = site.local(ids, "v0") if site.names(["v0"]) else (ids, counts)
    here = here & counts & inside
    return table.index_add(0, torch.where(here, local, 0), torch.where(here.unsqueeze(-1), rows, 0))


def _bag_weights(equation: Equation) -> PartitionRule:
    """The gradient of weights of ids: of parts of rows and of columns parts of sums."""
    grad, weight, *others = equation.operands
    table = label_dims(weight.shape, "w")
    rows: list[Labels] = [(*label_dims(grad.shape[:1], "b"), table[1]), table]
    rows += [label_dims(value.shape, f"o{i}.") for i, value in enumerate(others)]
    (out,) = equation.results
    whole = {*_letters(*rows)} - {*_letters(table)}
    return _make(
        equation, rows, (rows[2][: len(out.shape)],), whole=[*whole], summed=_letters(table),
        run=_bag_weights_backward,
    )  # fmt: skip


def _bag_weights_backward(site: EquationSite, grad, weight, ids, offsets, *args, **kwargs):
    """The gradient of weights of ids, of this rank's part of the table."""
    given = name_arguments(site.op, (grad, weight, ids, offsets, *args), kwargs)
    bag = bags_of(ids, offsets)
    counts = (ids != given["padding_idx"]) & (bag < grad.shape[0])
    found = (grad[torch.where(counts, bag, 0)] * find_rows(site, weight, ids, 1)).sum(-1)
    return torch.where(counts, found, 0)


_ELEMENTS = (
    "gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward elu_backward "
    "hardsigmoid_backward hardtanh_backward leaky_relu_backward softplus_backward "
    "hardswish_backward mish_backward softshrink_backward hardshrink_backward "
    "_prelu_kernel_backward"
)
_LOSSES = (
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward"
)

BACKWARD: Mapping[str, MakeRule] = MappingProxyType(
    {
        **dict.fromkeys(_ELEMENTS.split(), pointwise((0,))),
        "_softmax_backward_data": along(first=2, linear=True, split=shards.softmax_backward),
        "_log_softmax_backward_data": along(
            first=2, linear=True, split=shards.log_softmax_backward
        ),
        "native_layer_norm_backward": _norm,
        "_fused_rms_norm_backward": _norm,
        "embedding_dense_backward": _embedding,
        "nll_loss_backward": _nll_loss,
        **dict.fromkeys(
            ("select_backward", "slice_backward", "diagonal_backward", "unfold_backward"),
            _in_shape,
        ),
        "glu_backward": along(first=2, linear=True),
        "convolution_backward": _convolution,
        "native_batch_norm_backward": _batch_norm,
        "native_group_norm_backward": _group_norm,
        **{f"{name}_backward": _pool for name in POOLS},
        **dict.fromkeys(_LOSSES.split(), _loss),
        "log_sigmoid_backward": _log_sigmoid,
        "_embedding_bag_backward": _bags,
        "_embedding_bag_per_sample_weights_backward": _bag_weights,
    }
)
"""The rules of operations of backward passes, by the name that `Equation.name` has."""
