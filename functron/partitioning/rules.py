"""Rules of operations: how the dims of operands and results belong together.

A rule gives every dim a letter, as an einsum does: an axis that splits a dim splits all dims with
its letter. ``"mk,kn->mn"`` is a product of matrices; a letter that results lack is reduced, so that
ranks with parts of it hold partial sums. A dim that is a product of several, before or after a
reshape, has several letters, major to minor: ``"b(st)->(bs)t"``. Data and tensor parallelism, split
sequences and split vocabularies all follow from letters.

`TABLE` has the rules of torch's operations by name; operations that torch tags as pointwise need no
row. A rule of one's own is a function of an `Equation` that returns a `PartitionRule`, such as
`product` and `pointwise` make, given to `functron.partition` as ``rules={"name": rule}``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import torch

from functron.partitioning import layers, shards
from functron.partitioning.labels import (
    FIRST_LINEAR,
    Labels,
    MakeRule,
    PartitionRule,
    align_labels,
    broadcast_shapes,
    label_dims,
    make_rule,
    pointwise,
    product,
    read_argument,
    sizes_of,
    without_units,
)
from functron.partitioning.placement import Reduction
from functron.partitioning.shards import RunShard, Travel, dims_of, name_arguments
from functron.program.callbacks import EFFECTS
from functron.program.equations import Equation, Var

_NONE: Mapping[str, Any] = MappingProxyType({})


def _linear_if(is_linear: Callable[[Equation], bool]) -> MakeRule:
    """A rule of an operation on elements that is linear in its first operand where this is true."""
    return lambda e: pointwise((0,))(e) if is_linear(e) else pointwise()(e)


def _keeps_dtype(equation: Equation) -> bool:
    """Whether a copy has the operand's dtype: partial sums would be rounded to another."""
    return len({value.dtype for value in (*equation.operands, *equation.results)}) == 1


# --- reductions and what is computed along dims


def _histogram(equation: Equation) -> PartitionRule:
    """Counts of a part add up; where the range is that of the values themselves, all are needed."""
    (x,) = equation.operands
    labels = label_dims(x.shape)
    fixed = read_argument(equation, "min", 0) != read_argument(equation, "max", 0)
    letters = [row[0] for row in labels if row]
    combined: dict[str, Reduction] = dict.fromkeys(letters, "sum") if fixed else {}
    return make_rule(equation, (labels,), (((),),), combined=combined)


def reduction(
    kind: Reduction | None = None,
    *,
    linear: bool = False,
    run: RunShard | None = None,
    inside: bool = False,
) -> MakeRule:
    """A reduction over the dims of argument ``dim``.

    Args:
        kind: how ranks' results combine; None: the dims are whole, unless `inside`.
        inside: `run` (see `PartitionRule`) combines them itself.
    """

    def rule(equation: Equation) -> PartitionRule:
        (x,) = equation.operands
        dims, keep = dims_of(equation), bool(read_argument(equation, "keepdim", False))
        labels = label_dims(x.shape)
        letters = [labels[dim][0] for dim in dims if labels[dim]]
        kept = tuple(
            () if i in dims else row for i, row in enumerate(labels) if keep or i not in dims
        )
        return make_rule(
            equation,
            (labels,),
            (kept,) * len(equation.results),
            combined=dict.fromkeys(letters, kind) if kind is not None else {},
            inside=frozenset(letters) if inside else frozenset(),
            linear=FIRST_LINEAR if linear else (),
            run=run,
        )

    return rule


def along(
    name: str = "dim", *, split: RunShard | None = None, first: int = 1, linear: bool = False
) -> MakeRule:
    """An operation along the dim of an argument, the same for every place in the others.

    Args:
        split: the computation of a rank where the dim is split; None: it is whole.
        first: how many operands have the dims of the result; others are whole.
        linear: in the first operand.
    """

    def rule(equation: Equation) -> PartitionRule:
        x, labels = equation.operands[0], label_dims(equation.operands[0].shape)
        count = min(first, len(equation.operands))  # a number may stand for an operand
        along = [labels[dim][0] for dim in dims_of(equation, name) if labels[dim]]
        values = (*equation.operands[:count], *equation.results)
        own = [_resize_labels(value.shape, x.shape, labels, along) for value in values]
        # where another operand is smaller elsewhere, such as an index, its places are the first
        whole = {
            letters[0]
            for value in equation.operands[1:count]
            for letters, size, old in zip(labels, value.shape, x.shape, strict=True)
            if letters and letters[0] not in along and size != old
        }
        others = [label_dims(value.shape, "o") for value in equation.operands[count:]]
        operands, sets = (*own[:count], *others), FIRST_LINEAR if linear else ()
        made = make_rule(equation, operands, own[count:], linear=sets, run=split)
        whole |= {letter for row in others for dim in row for letter in dim}
        whole |= {letter for letter in made.sizes if letter.endswith("*")}
        whole |= set(along) if split is None else set()
        return replace(made, whole=frozenset(whole))

    return rule


def _resize_labels(shape, whole, labels: Labels, along: Collection[str]) -> Labels:
    """The letters of dims like those of a whole, ``a*`` where one has another size than ``a``."""
    rows = list(zip(whole, labels, strict=True))
    if len(shape) < len(rows):  # without the dim of a reduction
        rows = [(size, row) for size, row in rows if not row or row[0] not in along]
    return tuple(
        row if size == old or not row else (f"{row[0]}*",) if size != 1 else ()
        for size, (old, row) in zip(shape, rows, strict=True)
    )


def _layer_norm(equation: Equation) -> PartitionRule:
    labels = label_dims(equation.operands[0].shape)
    count = len(read_argument(equation, "normalized_shape"))
    rows = [labels, *(labels[-count:] for _ in equation.operands[1:])]
    means = tuple(() if i >= len(labels) - count else row for i, row in enumerate(labels))
    results = (labels, *(means for _ in equation.results[1:]))
    name = "layer_norm" if equation.name == "native_layer_norm" else "rms_norm"
    return make_rule(equation, rows, results, run=getattr(shards, name))


def _rows_of(equation: Equation) -> PartitionRule:
    """An op of functron on rows, the last dim, with vectors that all rows share."""
    labels = label_dims(equation.operands[0].shape)
    operands = [
        labels if len(value.shape) == len(labels) else labels[-1:] for value in equation.operands
    ]
    results = [labels[: len(value.shape)] for value in equation.results]
    return make_rule(equation, operands, results, whole=labels[-1], run=shards.run_own_op)


def _glu(equation: Equation) -> PartitionRule:
    """functron's operation on two tensors; torch's of that name is of halves of a dim."""
    own = getattr(equation.op, "namespace", "") == "functron"
    return (pointwise(run=shards.run_own_op) if own else along())(equation)


def _own_operation(equation: Equation) -> PartitionRule | None:
    """An operation that users registered, by its rule or by how its dims belong together."""
    own = cast(Any, equation.op).functron_own
    if own.partition is not None:
        made = own.partition(equation)
        return made if made.run is not None else replace(made, run=shards.run_registered)
    if own.dims is None:
        return None
    given = [isinstance(equation.args[i], Var) for i in own.tensors]
    shapes = [value.shape for value in (*equation.operands, *equation.results)]
    labels = own.dims.label(equation.name, given, shapes)
    operands, results = labels[: sum(given)], labels[sum(given) :]
    letters, kept = (
        {x for row in side for dim in row for x in dim} for side in (operands, results)
    )
    whole = set(filter(str.isupper, letters))
    combined: dict[str, Reduction] = dict.fromkeys(letters - kept - whole, "sum")
    run = shards.run_registered
    return make_rule(equation, operands, results, whole=whole, combined=combined, run=run)


def _packed_glu_rule(equation: Equation) -> PartitionRule:
    rows = label_dims(equation.results[0].shape)
    packed = (*rows[:-1], ("half", *rows[-1]))
    operands = packed, *[()] * (len(equation.operands) - 1)  # a count is a number
    return make_rule(
        equation, operands, (rows,), sizes={"half": 2}, whole=("half",), run=shards.run_own_op
    )


# --- views and joins


def _view(equation: Equation) -> PartitionRule:
    (x,), (y,) = equation.operands, equation.results
    if x.dtype == y.dtype:
        before, after, sizes, whole = reshape_labels(x.shape, y.shape)
        given: dict[str, Any] = {"sizes": sizes, "whole": whole, "linear": FIRST_LINEAR}
        return make_rule(equation, (before,), (after,), **given, run=shards.reshape)
    # bits as numbers of another dtype, of which there may be more or fewer in the last dim
    before, after, cut = label_dims(x.shape), label_dims(y.shape), ()
    if x.shape != y.shape:
        after = (*after[:-1], ("cut",) if y.shape[-1] != 1 else ())
        cut = (*before[-1], "cut")
    return make_rule(equation, (before,), (after,), whole=cut, run=shards.reinterpret)


def reshape_labels(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Labels, Labels, dict[str, int], frozenset[str]]:
    """Labels of a shape and of another with as many elements, sizes, and what must be whole.

    Dims between places where both shapes have as many elements belong together; they are cut into
    letters wherever one of the shapes cuts them. Where these cuts do not nest, such as of 6 x 4 and
    4 x 6, the dims are whole.
    """
    if math.prod(before) == 0:
        sides = label_dims(before, "x"), label_dims(after, "y")
        sizes = {r[0]: n for row, s in zip(sides, (before, after), strict=True)
                 for r, n in zip(row, s, strict=True) if r}  # fmt: skip
        return *sides, sizes, frozenset(sizes)
    ends = [[*itertools.accumulate(shape, operator.mul, initial=1)] for shape in (before, after)]
    shared, cuts = sorted({*ends[0]} & {*ends[1]}), sorted({*ends[0], *ends[1]})
    groups = [[c for c in cuts if a <= c <= b] for a, b in itertools.pairwise(shared)]
    nested = [all(b % a == 0 for a, b in itertools.pairwise(group)) for group in groups]
    letters = {
        start: (f"r{start}", end // start)
        for group, nests in zip(groups, nested, strict=True)
        for start, end in itertools.pairwise(group if nests else [])
    }
    sizes, whole, labels = dict(letters.values()), set(), []
    for side, shape, own in zip("xy", (before, after), ends, strict=True):
        rows = []
        for i, (start, end) in enumerate(itertools.pairwise(own)):
            row = tuple(letters[c][0] for c in cuts if start <= c < end and c in letters)
            if start < end and not row:
                row = (f"{side}{i}",)
                sizes[row[0]] = shape[i]
                whole.add(row[0])
            rows.append(row)
        labels.append(tuple(rows))
    return labels[0], labels[1], sizes, frozenset(whole)


def _reorder_rule(
    order: Callable[[Equation, int], Sequence[int]], *, run: RunShard | None = None
) -> MakeRule:
    """A view with the operand's dims in another order; None in it is a new dim of size 1."""

    def rule(equation: Equation) -> PartitionRule:
        (x,) = equation.operands
        labels = label_dims(x.shape)
        rows = tuple(() if i is None else labels[i] for i in order(equation, len(labels)))
        return make_rule(equation, (labels,), (rows,), linear=FIRST_LINEAR, run=run)

    return rule


def _transpose_order(equation: Equation, num_dims: int) -> list[int]:
    order = list(range(num_dims))
    a, b = (read_argument(equation, name) % num_dims for name in ("dim0", "dim1"))
    order[a], order[b] = order[b], order[a]
    return order


def _unsqueeze_order(equation: Equation, num_dims: int) -> list:
    order: list = list(range(num_dims))
    order.insert(read_argument(equation, "dim") % (num_dims + 1), None)
    return order


def _squeeze_order(equation: Equation, num_dims: int) -> list[int]:
    shape = equation.operands[0].shape
    dims = dims_of(equation)
    return [i for i in range(num_dims) if i not in dims or shape[i] != 1]


def _repeat_rule(equation: Equation) -> PartitionRule:
    (x,), (y,) = equation.operands, equation.results
    offset = len(y.shape) - len(x.shape)
    labels, repeats = label_dims(x.shape), read_argument(equation, "repeats")
    times = {f"t{i}": count for i, count in enumerate(repeats) if count != 1}
    rows = []
    for i in range(len(repeats)):
        inner = labels[i - offset] if i >= offset else ()
        rows.append((f"t{i}", *inner) if f"t{i}" in times else inner)
    linear = FIRST_LINEAR
    return make_rule(equation, (labels,), (tuple(rows),), sizes=times, whole=times, linear=linear)


def _split_rule(equation: Equation) -> PartitionRule:
    """Parts of a dim: where they are equal, each has the same letter of it."""
    (x,), results = equation.operands, equation.results
    dim, labels = dims_of(equation)[0], label_dims(x.shape)
    outer, sizes, own, whole = labels[dim], {}, [labels[dim]], ()
    sum_, parts = x.shape[dim], {value.shape[dim] for value in results}
    even = len(parts) == 1 and len(results) * min(parts) == sum_
    if even and len(results) > 1:
        inner = ("part",) if min(parts) != 1 else ()
        outer, own, whole = ("parts", *inner), [inner] * len(results), ("parts",)
        sizes = {"parts": len(results)}
    elif not even:
        own = [("cut",) if value.shape[dim] != 1 else () for value in results]
        whole, sizes = (*outer, "cut"), {"cut": 0}
    before, *after = (_replace_dim(labels, dim, row) for row in (outer, *own))
    return make_rule(
        equation, (before,), after, sizes=sizes, whole=whole, linear=FIRST_LINEAR,
        run=shards.cut_parts,
    )  # fmt: skip


def _replace_dim(labels: Labels, dim: int, letters: tuple[str, ...]) -> Labels:
    return (*labels[:dim], letters, *labels[dim + 1 :])


def _select_rule(equation: Equation) -> PartitionRule:
    """One place, or a range, of a dim, which is whole unless the range is all of it."""
    (x,), (y,) = equation.operands, equation.results
    dim, labels = dims_of(equation)[0], label_dims(x.shape)
    rows, whole, run = _label_part(labels, dim, y), (*labels[dim], "cut"), None
    same = len(y.shape) == len(x.shape) and y.shape[dim] == x.shape[dim]
    if same and read_argument(equation, "step", 1) == 1:
        rows, whole, run = labels, (), shards.same
    return make_rule(equation, (labels,), (rows,), whole=whole, linear=FIRST_LINEAR, run=run)


def _label_part(labels: Labels, dim: int, part: Var) -> Labels:
    """The letters of a value that is one place, or a range, of a dim."""
    if len(part.shape) < len(labels):
        return (*labels[:dim], *labels[dim + 1 :])
    return _replace_dim(labels, dim, ("cut",) if part.shape[dim] != 1 else ())


def _concatenate_rule(equation: Equation) -> PartitionRule:
    """Parts one after another along a dim; where they are equal, with one letter for all."""
    operands, (y,) = equation.operands, equation.results
    count, linear = len(operands), (range(len(operands)),)
    dim, labels = (read_argument(equation, "dim") or 0) % len(y.shape), label_dims(y.shape)
    stacked = equation.name == "stack"
    parts = {1} if stacked else {x.shape[dim] if x.shape != (0,) else 0 for x in operands}
    if stacked or (len(parts) == 1 and count > 1):
        inner = ("part",) if min(parts) != 1 else ()
        before = (*labels[:dim], *([] if stacked else [inner]), *labels[dim + 1 :])
        after = _replace_dim(labels, dim, ("parts", *inner))
        sizes, whole = {"parts": count}, ("parts",)
        return make_rule(
            equation, (before,) * count, (after,), sizes=sizes, whole=whole, linear=linear
        )
    # beside nothing but empty parts, one is all of it, such as of a cache that begins
    alone = {value.shape[dim] for value in operands if len(value.shape) == len(y.shape)}
    alone = alone <= {0, y.shape[dim]} and math.prod(y.shape) > 0
    rows, whole = [], set() if alone else set(labels[dim])
    for number, value in enumerate(operands):
        if len(value.shape) != len(y.shape):
            rows.append(label_dims(value.shape, f"e{number}."))
            whole |= {letter for row in rows[-1] for letter in row}
            continue
        own = (f"p{number}",) if value.shape[dim] != 1 else ()
        own = labels[dim] if value.shape[dim] == y.shape[dim] else own
        rows.append(_replace_dim(labels, dim, own))
        whole |= set() if alone and own == labels[dim] else set(own)
    return make_rule(equation, rows, (labels,), whole=whole, linear=linear)


def _pad_rule(equation: Equation) -> PartitionRule:
    (x,), (y,) = equation.operands, equation.results
    labels = label_dims(x.shape)
    widths = read_argument(equation, "pad")  # of the last dim first, before and after
    count, last = len(widths) // 2, len(labels) - 1
    # also by widths that cancel: then all places move on, from one rank's part to the next
    changed = sorted(last - i for i in range(count) if widths[2 * i] or widths[2 * i + 1])
    rows = tuple(
        (f"q{i}",) if i in changed and y.shape[i] != 1 else row for i, row in enumerate(labels)
    )
    whole = [letter for i in changed for letter in (*labels[i], *rows[i])]
    linear = () if read_argument(equation, "value", 0) else FIRST_LINEAR
    return make_rule(equation, (labels,), (rows,), whole=whole, linear=linear)


def _overwritten(equation: Equation) -> PartitionRule:
    """A value with other numbers at one place, or in a range, of a dim, which is whole."""
    x, source = equation.operands
    dim, labels = read_argument(equation, "dim") % len(x.shape), label_dims(x.shape)
    rows = _label_part(labels, dim, source)
    run = shards.select_scatter if equation.name == "select_scatter" else None
    whole = (*labels[dim], "cut")
    return make_rule(equation, (labels, rows), (labels,), whole=whole, linear=((0, 1),), run=run)


# --- lookups


def _embedding(equation: Equation) -> PartitionRule:
    weight, ids = equation.operands
    if read_argument(equation, "sparse"):
        raise ValueError(
            f"partition: at {equation.where.line} embedding has sparse=True; wanted gradients that "
            "are dense, as parameters are; fix: sparse=False"
        )
    rows = label_dims(ids.shape, "i")
    table = label_dims(weight.shape, "w")
    counted = read_argument(equation, "scale_grad_by_freq")  # all ids, each with its row
    whole = [letter for dim in (*rows, table[0]) for letter in dim] if counted else ()
    return make_rule(
        equation, (table, rows), ((*rows, table[1]),), combined=dict.fromkeys(table[0], "sum"),
        whole=whole, linear=FIRST_LINEAR, run=shards.embedding,
    )  # fmt: skip


def _gather(equation: Equation) -> PartitionRule:
    x, index = equation.operands
    dim = read_argument(equation, "dim") % max(len(x.shape), 1)
    table, rows, whole = [], [], set()
    for i, (size, count) in enumerate(zip(x.shape, index.shape, strict=True)):
        if i == dim or size != count:
            table.append((f"v{i}",) if size != 1 else ())
            rows.append((f"i{i}",) if count != 1 else ())
            whole |= set(table[-1]) if i != dim else set()
        else:
            table.append((f"d{i}",) if size != 1 else ())
            rows.append(table[-1])
    combined = dict.fromkeys(table[dim], "sum") if table else {}
    return make_rule(
        equation, (tuple(table), tuple(rows)), (tuple(rows),), combined=combined, whole=whole,
        linear=FIRST_LINEAR, run=shards.gather,
    )  # fmt: skip


def _index(equation: Equation) -> PartitionRule:
    """Advanced indexing with integer tensors; with one of them, along a dim that may be split."""
    x, *found = equation.operands
    if equation.name == "index_select":
        dims = [read_argument(equation, "dim") % max(len(x.shape), 1)]
    else:
        dims = [i for i, index in enumerate(equation.args[1]) if index is not None]
    shape = broadcast_shapes([index.shape for index in found])
    rows = label_dims(shape, "i")
    labels = label_dims(x.shape, "x")
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    place = dims[0] if adjacent else 0
    rest = [row for i, row in enumerate(labels) if i not in dims]
    operands = (labels, *(align_labels(index, shape, rows) for index in found))
    sizes = sizes_of([x], [labels]) | {
        row[0]: size for row, size in zip(rows, shape, strict=True) if row
    }
    indexed = {letter for dim in dims for letter in labels[dim]}
    one = len(dims) == 1
    return PartitionRule(
        operands,
        ((*rest[:place], *rows, *rest[place:]),),
        sizes,
        dict.fromkeys(indexed, "sum") if one else {},
        whole=frozenset() if one else frozenset(indexed),
        linear=(frozenset({0}),),
        run=shards.index if one else None,
    )


def _index_put(equation: Equation) -> PartitionRule | None:
    """Writes at indices, along dims that are whole; by one boolean mask, of any dims.

    Of values that are added ranks may have parts.
    """
    _, *found, values = equation.operands
    if any(index.dtype in (torch.bool, torch.uint8) for index in found):
        return _mask_put(equation)
    read = _index(replace(equation, args=equation.args[:2], kwargs={}))
    (rows,) = read.results
    shape = [read.sizes[row[0]] if row else 1 for row in rows]
    kept = {letter for row in rows for letter in row if letter.startswith("x")}
    added = bool(read_argument(equation, "accumulate"))
    places = [letter for letter in read.sizes if letter.startswith("i") and added]
    return PartitionRule(
        (*read.operands, align_labels(values, shape, rows)),
        read.operands[:1],
        read.sizes,
        dict.fromkeys(places, "sum"),
        whole=frozenset(read.sizes) - kept - {*places},
        linear=(frozenset({0, 1 + len(found)}),),
        run=shards.index_add_rows if added else None,
    )


def _mask_put(equation: Equation) -> PartitionRule | None:
    """Writes where a mask is true; None where values depend on how many places that are."""
    x, *found, values = equation.operands
    start = next(i for i, index in enumerate(equation.args[1]) if index is not None)
    labels, end = label_dims(x.shape), start + len(found[0].shape)
    if found[0].shape != x.shape[start:end]:  # of which fake tensors know nothing
        raise ValueError(
            f"partition: at {equation.where.line} a mask of shape {list(found[0].shape)} is the "
            f"index of dims {list(x.shape[start:end])}; wanted a mask of these sizes; fix: "
            "torch.where(mask, values, x), whose operands broadcast"
        )
    place = len(values.shape) - 1 - (len(x.shape) - end)
    if len(found) > 1 or (place >= 0 and values.shape[place] != 1):
        return None
    # of what a read gives, whose dim of the places that are true stands for all of the mask's
    rows, shape = (*labels[:start], (), *labels[end:]), (*x.shape[:start], 1, *x.shape[end:])
    operands = labels, labels[start:end], align_labels(values, shape, rows)
    return make_rule(equation, operands, (labels,), linear=((0, 2),), run=shards.mask_put)


def _index_write(equation: Equation) -> PartitionRule:
    """Slices along a dim, which is whole, that are written or added at an index."""
    x, index, *source = equation.operands
    dim, labels = read_argument(equation, "dim") % max(len(x.shape), 1), label_dims(x.shape)
    rows = [labels, label_dims(index.shape, "i")]
    for value in source:
        own = label_dims(value.shape, "o")
        same = len(value.shape) == len(labels)
        rows.append((*labels[:dim], *own[dim : dim + 1], *labels[dim + 1 :]) if same else own)
    kept = {letter for i, row in enumerate(labels) if i != dim for letter in row}
    linear = ((0, 2),) if source and equation.name != "index_reduce" else ()
    run = shards.index_fill if equation.name == "index_fill" else None
    made = make_rule(equation, rows, (labels,), linear=linear, run=run)
    return replace(made, whole=frozenset(made.sizes) - kept)


def _nll_loss(equation: Equation) -> PartitionRule:
    x, target, *weight = equation.operands
    labels = label_dims(x.shape)
    rows = labels[:-1]
    results = (rows if read_argument(equation, "reduction") == 0 else (), ())
    operands = (labels, rows[: len(target.shape)], *((labels[-1],) for _ in weight))
    whole = frozenset(labels[-1]) if weight else frozenset()
    run = getattr(shards, equation.name.removesuffix("_forward"))
    inside = frozenset(letter for row in labels for letter in row) - whole
    return make_rule(equation, operands, results, inside=inside, whole=whole, run=run)


def _attention(equation: Equation) -> PartitionRule:
    """Attention: batch and heads split, and queries where no causal mask counts their places."""
    given = name_arguments(equation.op, equation.args, equation.kwargs)
    q, k = equation.operands[:2]
    groups = q.shape[1] // k.shape[1]
    heads = ("h", "g") if groups > 1 else ("h",)
    rows = [(("b",), heads, ("s",), ("d",)), (("b",), ("h",), ("t",), ("d",)),
            (("b",), ("h",), ("t",), ("e",))]  # fmt: skip
    for mask in equation.operands[3:]:
        full = (rows[0][0], heads, ("s",), ("t",))
        full = full[4 - len(mask.shape) :]
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])[4 - len(mask.shape) :]
        pairs = zip(full, mask.shape, shape, strict=True)
        rows.append(tuple(row if size == whole else () for row, size, whole in pairs))
    out = (rows[0][0], heads, ("s",), ("e",))
    lse = out[:3]
    results = [
        out,
        *(lse if len(r.shape) == 3 else ((),) * len(r.shape) for r in equation.results[1:]),
    ]
    whole = {"d", "t", "e", *(["s"] if given.get("is_causal") else [])}
    sizes, run = {"h": k.shape[1], "g": groups}, shards.attention
    return without_units(make_rule(equation, rows, results, whole=whole, sizes=sizes, run=run))


def attention_over(travel: Mapping[str, Travel]) -> MakeRule:
    """Attention whose sequences axes may split, each with the way in which keys reach queries.

    Queries, keys and values have one letter for their places, which these axes alone may split.
    A mask that says which pairs are seen has rows as queries are split, and all columns. Where it
    is one of numbers, or of heads, or keys are of another number, they are gathered, and only
    queries are split.

    Args:
        travel: by axis; see `functron.partition`.
    """

    def rule(equation: Equation) -> PartitionRule:
        made, masks = _attention(equation), equation.operands[3:]
        biased = any(m.dtype != torch.bool or m.shape[-3:-2] not in ((), (1,)) for m in masks)
        if biased or made.sizes["s"] != made.sizes["t"]:
            return replace(made, run=functools.partial(shards.masked_attention, travel))
        q, k, v = ((*row[:2], ("s",), row[3]) for row in made.operands[:3])
        sizes, operands = made.sizes, (q, k, v, *made.operands[3:])
        whole = (made.whole - {"s"}) | ({"s"} if sizes["s"] == 1 else frozenset())
        run = functools.partial(shards.context_attention, travel)
        sent = functools.partial(shards.context_attention_sent, travel)
        return replace(made, operands=operands, whole=whole, only={"s": travel}, run=run, sent=sent)

    return rule


def _dispatch_rule(equation: Equation) -> PartitionRule:
    """Tokens and experts, both of which an axis may split, and the hidden dim of experts."""
    op: Any = equation.op
    *params, _, experts, weights, kept = equation.operands
    rows = []
    for path, value in zip(op.paths, params, strict=False):
        layer, _, kind = path.rpartition("/")
        dims = [("e",), *((f"{path}.{i}",) for i in range(1, len(value.shape)))]
        if layer != "down":
            dims[-1] = ("f",)
        elif kind == "w":
            dims[1] = ("f",)
        rows.append(tuple(dims))
    tokens = (("n",), ("d",))
    operands = (*rows, tokens, *((("n",), ("choice",)) for _ in (experts, weights, kept)))
    made = make_rule(
        equation, operands, (tokens,), combined={"f": "sum"}, inside=frozenset({"e"}),
        beside={"e": "n"}, run=shards.dispatch_tokens,
    )  # fmt: skip
    return replace(made, whole=frozenset(made.sizes) - {"e", "f", "n"})


def whole(equation: Equation) -> PartitionRule:
    """An operation that every rank runs on replicated operands, if any, for all of the results.

    Of new tensors of known numbers each rank makes all, and takes its part where it is used.
    """
    results = [label_dims(value.shape, f"n{i}.") for i, value in enumerate(equation.results)]
    operands = [label_dims(value.shape, f"o{i}.") for i, value in enumerate(equation.operands)]
    made = make_rule(equation, operands, results)
    return replace(made, whole=frozenset(made.sizes))


def _effect(equation: Equation) -> PartitionRule:
    """A print, a callback or a check, which every rank has of whole values."""
    return replace(whole(equation), run=shards.effect)


def _like(equation: Equation) -> PartitionRule:
    """A new tensor of the dtype and device of another, wherever that lies."""
    made = whole(equation)
    read = frozenset(letter for row in made.operands for dim in row for letter in dim)
    return replace(made, inside=read, whole=made.whole - read, run=shards.fresh)


ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""The operations that `torch.nn.functional.scaled_dot_product_attention` is traced to."""

_FIRST = pointwise((0,))
_BOTH = pointwise((0, 1))


def _rows(names: str, rule: MakeRule) -> dict[str, MakeRule]:
    return dict.fromkeys(names.split(), rule)


TABLE: Mapping[str, Callable[[Equation], PartitionRule | None]] = MappingProxyType(
    {
        "mm": product("mk,kn->mn"),
        "bmm": product("bmk,bkn->bmn"),
        "mv": product("mk,k->m"),
        "dot": product("k,k->"),
        "dispatched": _dispatch_rule,
        **_rows("add sub rsub", _BOTH),
        "overwritten": pointwise(run=shards.overwritten),
        "fill": pointwise(run=shards.fill),
        "mul": pointwise((0,), (1,)),
        "div": _linear_if(lambda e: not e.kwargs.get("rounding_mode")),
        "floor_divide": pointwise(),
        "where": pointwise((1, 2)),
        **_rows("neg clone alias detach lift_fresh_copy contiguous", _FIRST),
        **_rows("conj real positive", _FIRST),
        "constrain": pointwise((0,), run=shards.same),
        "checkpoint_name": pointwise((0,), run=shards.name),
        "_to_copy": _linear_if(_keeps_dtype),
        "masked_fill": _linear_if(lambda e: e.args[2] == 0),
        **_rows("zero zeros_like ones_like full_like empty_like check_ids", pointwise()),
        **_rows("arange full zeros ones scalar_tensor empty eye linspace", whole),
        **dict.fromkeys(EFFECTS, _effect),
        **_rows("tril_indices triu_indices", whole),
        **_rows("new_zeros new_ones new_full new_empty", _like),
        "sum": reduction("sum", linear=True),
        "mean": reduction("sum", linear=True, run=shards.mean),
        **_rows("amax amin", reduction(run=shards.extremum, inside=True)),
        "any": reduction("max"),
        "all": reduction("min"),
        **_rows("prod var std argmax argmin max min var_mean", reduction()),
        "histc": _histogram,
        "logsumexp": reduction(run=shards.logsumexp, inside=True),
        "linalg_vector_norm": reduction(run=shards.norm, inside=True),
        "_softmax": along(split=shards.softmax),
        "_safe_softmax": along(split=shards.safe_softmax),
        "_log_softmax": along(split=shards.log_softmax),
        "cumsum": along(linear=True),
        **_rows("cumprod sort topk argsort kthvalue logcumsumexp", along()),
        "flip": along("dims", linear=True),
        "roll": along("dims", linear=True),
        **_rows("native_layer_norm _fused_rms_norm", _layer_norm),
        **_rows("rms_norm add_rms_norm layer_norm add_layer_norm", _rows_of),
        "glu": _glu,
        "glu_packed": _packed_glu_rule,
        **_rows("view _unsafe_view reshape _reshape_alias", _view),
        "t": _reorder_rule(lambda e, n: list(range(n))[::-1]),
        "transpose": _reorder_rule(_transpose_order),
        "permute": _reorder_rule(lambda e, n: [dim % n for dim in read_argument(e, "dims")]),
        "unsqueeze": _reorder_rule(_unsqueeze_order),
        "squeeze": _reorder_rule(
            _squeeze_order, run=shards.reshape
        ),  # one place may be a rank's part
        "expand": pointwise((0,), run=shards.expand),
        "repeat": _repeat_rule,
        **_rows("split split_with_sizes unsafe_split chunk", _split_rule),
        **_rows("select slice narrow", _select_rule),
        **_rows("cat stack", _concatenate_rule),
        "constant_pad_nd": _pad_rule,
        **_rows(
            "tril triu diagonal unfold unbind",
            lambda e: replace(whole(e), linear=(frozenset({0}),)),
        ),
        **_rows("slice_scatter select_scatter", _overwritten),
        "embedding": _embedding,
        "gather": _gather,
        **_rows("index index_select", _index),
        "index_put": _index_put,
        **_rows("index_add index_copy index_fill index_reduce", _index_write),
        **_rows("scatter scatter_add scatter_reduce", along(first=3)),
        **_rows("nll_loss_forward cross_entropy_loss", _nll_loss),
        **layers.TABLE,
        **dict.fromkeys(ATTENTION, _attention),
    }
)
"""The rules of operations, by the name that `Equation.name` has."""


def rule_of(equation: Equation, own: Mapping[str, MakeRule] = _NONE) -> PartitionRule | None:
    """The rule of an equation: one of the caller's own, of `TABLE`, or by torch's tags; or None."""
    make = own.get(equation.name) or TABLE.get(equation.name)
    if hasattr(equation.op, "functron_own"):
        make = own.get(equation.name) or _own_operation
    if make is None and torch.Tag.pointwise in getattr(equation.op, "tags", ()):
        make = pointwise()
    return None if make is None else make(equation)
