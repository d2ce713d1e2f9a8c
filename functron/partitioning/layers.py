"""Layers of networks: rules of convolutions, norms of batches and groups, pools, losses and bags.

A convolution has channels, of groups, inputs and results, and places. An axis that splits channels
of the input makes results partial sums; one that splits places sends a halo: the places beside a
rank's own that its results read, from its neighbours. Norms of a batch sum moments over all axes
that split it, so that statistics are those of the whole batch. Losses are sums over elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from functron.ops.moe import look_up
from functron.partitioning.labels import (
    FIRST_LINEAR,
    PartitionRule,
    align_labels,
    broadcast_shapes,
    label_dims,
    make_rule,
    pointwise,
    read_argument,
    without_units,
)
from functron.partitioning.placement import Reduction
from functron.partitioning.shards import EquationSite, name_arguments, wide_dtype
from functron.program.equations import Equation
from functron.spmd import collectives as lax

_aten = torch.ops.aten


# --- convolutions


def _convolution(equation: Equation) -> PartitionRule:
    """Channels are groups of some; places are split where all ranks need halos of one width."""
    (x, w, *bias), (y,) = equation.operands, equation.results
    transposed, groups = (read_argument(equation, name) for name in ("transposed", "groups"))
    sizes = {"g": groups, "i": x.shape[1] // groups, "o": y.shape[1] // groups}
    ins, outs = (tuple(k for k in ("g", letter) if sizes[k] != 1) for letter in "io")
    first, second = (ins, outs) if transposed else (outs, ins)
    kernel = [first, tuple(k for k in second if k != "g")]
    kernel += [(f"k{i}",) if size != 1 else () for i, size in enumerate(w.shape[2:])]
    places, results, whole = [], [], {letter for row in kernel[2:] for letter in row}
    for i, size in enumerate(y.shape[2:]):
        even = _halo(equation, i) is not None
        places.append((f"z{i}",))
        results.append(places[-1] if even else (f"y{i}",))
        whole |= set() if even else {f"z{i}", f"y{i}"}
        sizes |= {f"z{i}": size} if even else {}
    rows = [(("b",), ins, *places), tuple(kernel), *((outs,) for _ in bias)]
    combined = {} if bias or sizes["i"] == 1 else {"i": "sum"}
    whole |= {"i"} if bias else set()
    made = make_rule(
        equation, rows, ((("b",), outs, *results),), sizes=sizes, combined=combined, whole=whole,
        linear=() if bias else ((0,), (1,)), run=_convolve,
    )  # fmt: skip
    return without_units(made)


def _halo(equation: Equation, place: int) -> tuple[int, int] | None:
    """How many places before and after a rank's part its results read; less than 0: not all of it.

    None: ranks need other numbers, since results are not as many as steps of the stride.
    """
    (x, w, *_), (y,) = equation.operands, equation.results
    given = (read_argument(equation, name) for name in ("stride", "padding", "dilation"))
    stride, padding, dilation = (row[place if len(row) > 1 else 0] for row in given)
    if read_argument(equation, "transposed") or x.shape[place + 2] != y.shape[place + 2] * stride:
        return None
    return padding, dilation * (w.shape[place + 2] - 1) + 1 - stride - padding


def _convolve(
    site: EquationSite, x, w, bias, stride, padding, dilation, transposed, output_padding, groups
):
    """The convolution of a rank's channels and places.

    Collectives: over axes that split places two ppermutes each, of halos, where they have any.
    """
    padding = [*padding] * ((x.dim() - 2) // len(padding))
    for i in range(x.dim() - 2):
        if site.names([f"z{i}"]):
            halo = _halo(site.equation, i)
            assert halo is not None
            x, padding[i] = _extend(site, x, i, halo), 0
    groups = site.held("g")
    return site.op(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)


def _extend(site: EquationSite, x: torch.Tensor, place: int, halo: tuple[int, int]) -> torch.Tensor:
    """x with the places of neighbours that a halo has; zeros, which are padding, at both ends."""
    dim, (before, after), size = place + 2, halo, x.shape[place + 2]
    axes, outer = site.names([f"z{place}"]), 1
    for blocks, axis in site.letters[f"z{place}"]:
        if blocks != outer:
            raise ValueError(
                f"partition: at {site.equation.where.line} a convolution gets dim {dim} split by "
                f"{' and '.join(axes)} in parts that are no neighbours; wanted consecutive parts; "
                "fix: split it so, or gather it, by functron.constrain"
            )
        outer *= site.axes[axis]
    if max(before, after) > size:
        raise ValueError(
            f"partition: at {site.equation.where.line} a convolution gets dim {dim} in parts of "
            f"{size} on the {outer} ranks of {' and '.join(axes)}, and reads {max(before, after)} "
            "places beside each; wanted no more than a neighbour has; fix: split it over fewer "
            "ranks, or gather it by functron.constrain"
        )
    parts = [x.narrow(dim, 0, size + min(after, 0))]
    pairs = [(rank, rank + 1) for rank in range(outer - 1)]
    if before:
        parts.insert(0, lax.ppermute(x.narrow(dim, size - before, before), axes, pairs))
    if after > 0:
        back = [(target, source) for source, target in pairs]
        parts.append(lax.ppermute(x.narrow(dim, 0, after), axes, back))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _pool(equation: Equation) -> PartitionRule:
    """Pools and resized images: of all samples and channels alike, places whole."""
    x, count = equation.operands[0], int(re.findall(r"(\d)d", equation.name)[0])
    kept = label_dims(x.shape[: len(x.shape) - count])
    places, outs = ((kept, tuple((f"{s}{i}",) for i in range(count))) for s in "xy")
    results = [(*outs[0], *outs[1])] * len(equation.results)
    whole = [row[0] for row in (*places[1], *outs[1])]
    linear = FIRST_LINEAR if "max" not in equation.name else ()
    return make_rule(equation, ((*kept, *places[1]),), results, whole=whole, linear=linear)


# --- norms


def _batch_norm(equation: Equation) -> PartitionRule:
    """Channels, dim 1, and all others, over which moments are taken."""
    x, *vectors = equation.operands
    labels = label_dims(x.shape)
    inside = {letter for i, row in enumerate(labels) for letter in row if i != 1}
    results, whole = [labels], set()
    for number, value in enumerate(equation.results[1:]):
        like = value.shape == x.shape[1:2]
        results.append(labels[1:2] if like else label_dims(value.shape, f"r{number}."))
        whole |= set() if like else {letter for row in results[-1] for letter in row}
    rows = [labels, *(labels[1:2] for _ in vectors)]
    return make_rule(
        equation, rows, results, inside=frozenset(inside), whole=whole, run=_normalize_batch
    )


def _normalize_batch(
    site: EquationSite, x, weight, bias, running_mean, running_var, training, momentum, eps
):
    """x with moments of 0 and 1 over the whole batch, the moments, and new running ones.

    Collectives: two psums of a number per channel, over axes that split other dims.
    """
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    global_shape = site.equation.operands[0].shape
    count = math.prod(global_shape) // global_shape[1]
    h, found = x.to(wide_dtype(x.dtype)), []
    if training:
        axes = [axis for dim in dims for axis in site.split(0, dim)]
        mean = lax.psum(h.sum(dims), axes) / count
        h = h - mean.view(shape)
        variance = lax.psum(h.square().sum(dims), axes) / count
        scale = (variance + eps).rsqrt()
        found = [mean, scale]
    else:
        mean, variance = (lax.stop_gradient(v).to(h.dtype) for v in (running_mean, running_var))
        h, scale = h - mean.view(shape), (variance + eps).rsqrt()
        found = [h.new_empty(held) for held in site.shapes[1:3]]
    h = h * scale.view(shape)
    h = h if weight is None else h * weight.view(shape)
    h = h if bias is None else h + bias.view(shape)
    if len(site.equation.outputs) == 5:
        unbiased = variance * (count / (count - 1)) if count > 1 else variance
        for old, new in ((running_mean, mean), (running_var, unbiased)):
            found.append(old + momentum * (lax.stop_gradient(new).to(old.dtype) - old))
    return h.to(x.dtype), *found


def _group_norm(equation: Equation) -> PartitionRule:
    """Groups of channels, over which, and over places, moments are taken."""
    x, *vectors = equation.operands
    groups = read_argument(equation, "group")
    sizes = {"g": groups, "m": x.shape[1] // groups}
    channels = tuple(letter for letter in "gm" if sizes[letter] != 1)
    rest = label_dims(x.shape[2:])
    labels = (("b",), channels, *rest)
    moments = (("b",), tuple(letter for letter in channels if letter == "g"))
    inside = {letter for row in rest for letter in row} | ({"m"} & {*channels})
    rows = [labels, *((channels,) for _ in vectors)]
    results = [labels, *(moments for _ in equation.results[1:])]
    made = make_rule(
        equation, rows, results, sizes=sizes, inside=frozenset(inside), run=_normalize_groups
    )
    return without_units(made)


def _normalize_groups(site: EquationSite, x, weight, bias, n, channels, places, groups, eps):
    """x with moments of 0 and 1 over each group of channels, and the moments.

    Collectives: two psums of a number per group and sample, over axes that split groups or places.
    """
    per_group = channels // groups * places
    h = x.to(wide_dtype(x.dtype)).reshape(x.shape[0], site.held("g"), -1)
    axes = site.names("m") + [axis for dim in range(2, x.dim()) for axis in site.split(0, dim)]
    mean = lax.psum(h.sum(-1, keepdim=True), axes) / per_group
    h = h - mean
    scale = (lax.psum(h.square().sum(-1, keepdim=True), axes) / per_group + eps).rsqrt()
    h, shape = (h * scale).reshape(x.shape), [1, -1, *[1] * (x.dim() - 2)]
    h = h if weight is None else h * weight.view(shape)
    h = h if bias is None else h + bias.view(shape)
    kinds = [value.dtype for value in site.equation.results[1:]]
    moments = (y.squeeze(-1).to(kind) for y, kind in zip((mean, scale), kinds, strict=False))
    return h.to(x.dtype), *moments


# --- losses


def _loss(equation: Equation) -> PartitionRule:
    """A loss of each element, with broadcasting, their sum or their mean."""
    shape = broadcast_shapes([value.shape for value in equation.operands])
    labels = label_dims(shape)
    rows = [align_labels(value, shape, labels) for value in equation.operands]
    if read_argument(equation, "reduction") == 0:
        return make_rule(equation, rows, (labels,), run=_add_losses)
    combined: dict[str, Reduction] = {letter: "sum" for row in labels for letter in row}
    return make_rule(equation, rows, ((),), combined=combined, run=_add_losses)


def _add_losses(site: EquationSite, *args, **kwargs):
    """This rank's part of a loss: of its elements, divided by the global count for a mean."""
    given = name_arguments(site.op, args, kwargs)
    reduction, (result,) = given["reduction"], site.equation.results
    each = site.op(*{**given, "reduction": 0}.values())
    if reduction == 0:
        return each
    shape = broadcast_shapes([value.shape for value in site.equation.operands])
    summed = each.sum(dtype=wide_dtype(each.dtype))  # a sum of halves may overflow
    return (summed / math.prod(shape) if reduction == 1 else summed).to(result.dtype)


def _log_sigmoid(equation: Equation) -> PartitionRule:
    """Of elements, with what a CPU keeps for backward and a GPU does not."""
    (x,) = equation.operands
    labels, (_, *kept) = label_dims(x.shape), equation.results
    rows = [labels if value.shape == x.shape else label_dims(value.shape, "k") for value in kept]
    whole = {letter for row in rows if row != labels for dim in row for letter in dim}
    return make_rule(equation, (labels,), (labels, *rows), whole=whole, run=_run_log_sigmoid)


def _run_log_sigmoid(site: EquationSite, x):
    """The logarithm of the sigmoid, and exp(-|x|)."""
    like = tuple(site.shapes[-1]) == tuple(x.shape)
    return F.logsigmoid(x), lax.stop_gradient((-x.abs()).exp() if like else x.new_empty(0))


# --- complex numbers


def _complex_view(equation: Equation) -> PartitionRule:
    """Pairs of numbers, in the last dim, as one number, or one as two."""
    (x,), (y,) = equation.operands, equation.results
    labels = label_dims(min(x.shape, y.shape, key=len))
    pairs = (*labels, ("pair",))
    inward = equation.name == "view_as_complex"
    rows = (pairs, labels) if inward else (labels, pairs)
    run = _join_pairs if inward else None
    return make_rule(equation, rows[:1], rows[1:], whole={"pair"}, linear=FIRST_LINEAR, run=run)


def _join_pairs(site: EquationSite, x):
    """Complex numbers of pairs, which lie beside each other as torch wants them."""
    return torch.view_as_complex(x.contiguous())


# --- bags of embeddings

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define(
    "embedding_bags(Tensor weight, Tensor indices, Tensor? per_sample_weights, int num_bags, "
    "int mode, int padding_idx) -> Tensor"
)

_SUM, _MEAN, _MAX = range(3)


def fuse_even_bags(equations: Sequence[Equation]) -> list[Equation]:
    """The equations, with bags of as many ids each as one operation that knows so.

    `torch.nn.functional.embedding_bag` makes it of a matrix of ids: they are split as it is.
    """
    made: dict[Any, Equation] = {}
    found = []
    for equation in equations:
        source = equation if equation.name == "arange" else None
        if equation.name == "detach":
            source = made.get(equation.operands[0])
        if source is not None:
            made.update(dict.fromkeys(equation.results, source))
        if equation.name == "_embedding_bag_forward_only":
            given = name_arguments(equation.op, equation.args, equation.kwargs)
            source, (ids,) = made.get(given["offsets"]), equation.operands[1].shape
            bags = equation.results[0].shape[0]
            even = bags and source is not None and source.args == (0, ids, ids // bags)
            if even and ids % bags == 0 and not (given["sparse"] or given["scale_grad_by_freq"]):
                names = ("weight", "indices", "per_sample_weights")
                args = (*(given[name] for name in names), bags, given["mode"], given["padding_idx"])
                op = torch.ops.functron.embedding_bags.default
                outputs = equation.outputs[:1]
                equation = replace(equation, op=op, args=args, kwargs={}, outputs=outputs)
        found.append(equation)
    return found


def _even_bags(equation: Equation) -> PartitionRule:
    """Bags of as many ids each: split as samples are."""
    weight, *others = equation.operands
    bags, mode = (read_argument(equation, name) for name in ("num_bags", "mode"))
    table, sizes = label_dims(weight.shape, "w"), {"b": bags, "k": others[0].shape[0] // bags}
    ids = tuple(letter for letter in "bk" if sizes[letter] != 1)
    combined: dict[str, Reduction] = {} if mode == _MAX else dict.fromkeys(table[0], "sum")
    whole = {"k", *(table[0] if mode == _MAX else ())}
    rows = (table, *((ids,) for _ in others))
    result = (ids[:1] if bags != 1 else (), table[1])
    return make_rule(
        equation, rows, (result,), sizes=sizes, combined=combined, whole=whole, run=_fill_even_bags
    )


def find_rows(site: EquationSite, weight, ids, operand: int = 0) -> torch.Tensor:
    """Rows of a table; zeros for those that are in another rank's part of it.

    Args:
        operand: which of the equation's the table is.
    """
    letters = site.operands[operand][0]
    if not site.names(letters):
        return look_up(weight, ids, whole=True)
    local, here = site.local(ids, letters[0])
    return look_up(weight, torch.where(here, local, -1))


def _fill_even_bags(site: EquationSite, weight, ids, scales, bags, mode, padding_idx):
    """The sum, mean or maximum of the rows of each bag, of this rank's part of the table."""
    ids = ids.reshape(site.held("b"), -1)
    rows, counts = find_rows(site, weight, ids), (ids != padding_idx).unsqueeze(-1)
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
    if mode == _MAX:
        most = torch.where(counts, rows, -math.inf).amax(1)
        return torch.where(counts.any(1), most, zero)
    rows = rows if scales is None else rows * scales.reshape(*ids.shape, 1)
    summed = torch.where(counts, rows, zero).sum(1)
    return summed if mode == _SUM else summed / counts.sum(1).clamp(min=1)


def _bags(equation: Equation) -> PartitionRule:
    """Bags that begin at offsets among all ids: every rank has all of them, of parts of rows."""
    if read_argument(equation, "sparse"):
        raise ValueError(
            f"partition: at {equation.where.line} embedding_bag has sparse=True; wanted gradients "
            "that are dense, as parameters are; fix: sparse=False"
        )
    weight, *others = equation.operands
    table = label_dims(weight.shape, "w")
    parts = read_argument(equation, "mode") != _MAX
    parts = parts and not read_argument(equation, "scale_grad_by_freq")
    rows = [label_dims(value.shape, f"o{i}.") for i, value in enumerate(others)]
    kept = [label_dims(value.shape, f"r{i}.") for i, value in enumerate(equation.results)]
    kept[0] = (*kept[0][:1], table[1])
    if len(kept) > 3 and len(kept[3]) == 2:  # of each column, the row that is largest
        kept[3] = (*kept[3][:1], table[1])
    whole = {letter for row in (*rows, *kept) for dim in row for letter in dim} - {*table[1]}
    whole |= set() if parts else {*table[0]}
    combined: dict[str, Reduction] = dict.fromkeys(table[0], "sum") if parts else {}
    return make_rule(equation, (table, *rows), kept, combined=combined, whole=whole, run=_fill_bags)


def _fill_bags(site: EquationSite, *args, **kwargs):
    """The sum, mean or maximum of the rows of each bag, of this rank's part of the table.

    And, where it is read, what torch keeps for backward.
    """
    given = name_arguments(site.op, args, kwargs)
    weight, ids, offsets = (given[name] for name in ("weight", "indices", "offsets"))
    bag, counts = bags_of(ids, offsets), ids != given["padding_idx"]
    if given["scale_grad_by_freq"]:  # a trace has the operation that has no derivative
        filled = _aten._embedding_bag(*args, **kwargs)[0]
        return filled, *_kept_of_bags(site, ids, offsets, bag, counts, None, filled)
    rows = find_rows(site, weight, ids)
    scales, mode, shape = (
        given["per_sample_weights"],
        given["mode"],
        (len(offsets), weight.shape[1]),
    )
    rows = rows if scales is None else rows * scales.unsqueeze(-1)
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
    if mode == _MAX:
        rows = torch.where(counts.unsqueeze(-1), rows, -math.inf)
        index = bag.unsqueeze(-1).expand_as(rows)
        filled = rows.new_full(shape, -math.inf).scatter_reduce(0, index, rows, "amax")
        filled = torch.where(filled == -math.inf, zero, filled)
    else:
        rows = torch.where(counts.unsqueeze(-1), rows, zero)
        filled = rows.new_zeros(shape).index_add(0, bag, rows)
    if mode == _MEAN:
        number = rows.new_zeros(len(offsets)).index_add(0, bag, counts.to(rows.dtype))
        filled = filled / number.clamp(min=1).unsqueeze(-1)
    kept = _kept_of_bags(site, ids, offsets, bag, counts, rows, filled)
    # ids from the last offset on are in no bag where it is an end
    return (filled[:-1] if given["include_last_offset"] else filled), *kept


def _kept_of_bags(site: EquationSite, ids, offsets, bag, counts, rows, filled) -> list:
    """The bag of each id, how many count in each, and which row is the largest, in their shapes.

    On the first rank of those that split rows, as these are parts of sums there; zeros on others.
    """
    shapes = [None if var is None else var.shape for var in site.equation.outputs[1:]]
    found = [bag, ids.new_zeros(len(offsets)).index_add(0, bag, counts.to(ids.dtype))]
    if len(shapes) > 2 and shapes[2] is not None:
        found.append(ids.new_zeros(0))
        if len(shapes[2]) == 2:
            found[-1] = _largest_ids(ids, bag, counts, *map(lax.stop_gradient, (rows, filled)))
    first = torch.ones((), dtype=torch.bool, device=ids.device)
    for axis in site.names(site.operands[0][0]):
        first = first & (lax.axis_index(axis) == 0)
    made = []
    for value, shape in zip(found, shapes, strict=False):
        if shape is None:
            made.append(None)
        else:
            value = value[: shape[0]] if shape[0] <= len(value) else value.new_zeros(shape)
            made.append(torch.where(first, value, 0))
    return made


def _largest_ids(ids, bag, counts, rows, filled) -> torch.Tensor:
    """The first id of each bag whose row has its maximum, by column; 0 of bags that are empty."""
    count = len(ids)
    places = torch.arange(count, device=ids.device).unsqueeze(-1)
    first = torch.where((rows == filled[bag]) & counts.unsqueeze(-1), places, count)
    index = bag.unsqueeze(-1).expand_as(first)
    first = first.new_full(filled.shape, count).scatter_reduce(0, index, first, "amin")
    return torch.where(first < count, ids[first.clamp(max=count - 1)], 0)


def bags_of(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The bag of each id; that of the last offset, where it is an end, of those that follow."""
    places = torch.arange(ids.shape[0], dtype=offsets.dtype, device=ids.device)
    return torch.searchsorted(offsets, places, right=True) - 1


_LOSSES = (
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
_PLACES = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
POOLS = tuple(_PLACES.split())
"""Operations of places of images, each sample and channel alike, by name."""

TABLE: Mapping[str, Callable[[Equation], PartitionRule | None]] = MappingProxyType(
    {
        "convolution": _convolution,
        **dict.fromkeys(POOLS, _pool),
        "native_batch_norm": _batch_norm,
        "_native_batch_norm_legit_functional": _batch_norm,
        "native_group_norm": _group_norm,
        **dict.fromkeys(_LOSSES.split(), _loss),
        "log_sigmoid_forward": _log_sigmoid,
        **dict.fromkeys(("_prelu_kernel", "hardswish"), pointwise()),
        "view_as_complex": _complex_view,
        "view_as_real": _complex_view,
        **dict.fromkeys(
            ("_conj", "_conj_physical", "conj_physical", "resolve_conj"), pointwise((0,))
        ),
        "complex": pointwise((0, 1)),
        "polar": pointwise((0,)),
        "embedding_bags": _even_bags,
        "_embedding_bag_forward_only": _bags,
        "_embedding_bag": _bags,
    }
)
"""The rules of these operations, by the name that `Equation.name` has."""
