"""Backward passes in a program: rules of the operations that differentiation by torch makes.

A function that is partitioned may differentiate by itself, by `torch.func.grad`, torch's tape, or a
backward of its own: then its program holds the operations of a backward pass, in global view as all
others. A letter that a cotangent has and a gradient lacks, such as that of the batch for a
parameter, makes the gradient a sum over ranks, once.
"""

from __future__ import annotations

import functools
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
    label_dims,
    pointwise,
    read_argument,
    sizes_of,
    without_units,
)
from functron.partitioning.placement import Reduction
from functron.partitioning.rules import along
from functron.partitioning.shards import RunShard, dims_of, name_arguments
from functron.program.equations import Equation, Fresh

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
    whole: Sequence[str] = (),
) -> PartitionRule:
    """The rule of a backward.

    Args:
        operands: the letters of all arguments that are tensors, in order.
        results: of all results; those that it is not asked for are left out.
        summed: letters whose parts add up in results that lack them.
    """
    outputs = equation.outputs
    made = [row for row, var in zip(results, outputs, strict=True) if var is not None]
    values = (*equation.results, *equation.operands)
    sizes, kept = sizes_of(values, (*made, *operands)), frozenset(whole)
    combined = _sums(x for x in summed if x not in kept and any(x not in _letters(r) for r in made))
    return PartitionRule(
        tuple(operands), tuple(made), sizes, combined, whole=kept, linear=_LINEAR, run=run
    )


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


_ELEMENTS = (
    "gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward elu_backward "
    "hardsigmoid_backward hardtanh_backward leaky_relu_backward softplus_backward"
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
    }
)
"""The rules of operations of backward passes, by the name that `Equation.name` has."""
