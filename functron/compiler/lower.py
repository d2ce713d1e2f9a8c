"""Lowering: the equations of a kernel as an fx graph, with collectives on real process groups.

A traced program says ``psum(x, "tp")``; here that becomes torch's functional all-reduce on the
group of ``tp``, which Inductor knows, overlaps with compute and merges. Group names are the same on
all ranks, and nothing else depends on the rank, so all ranks lower to the same graph.

An operation of functron's with a twin that writes over its operands (``adamw`` and ``adamw_``) is
lowered to the twin, where nothing reads these afterwards: a traced program is pure, and so keeps a
large operand beside its successor.

`unroll` writes out every iteration of scans.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from functron.compiler.segments import Kernel
from functron.core import compat
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Equation,
    Scan,
    Var,
    Where,
    contiguous_strides,
    rename_values,
)
from functron.program.overlap import is_statement, order_equations, waits
from functron.program.text import axis_of
from functron.spmd import ragged
from functron.spmd.axes import STARTS, define_op, permute_ranks

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten

_REDUCTIONS = frozenset(
    (
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.linalg_vector_norm.default,
    )
)
_LONG = 1 << 14

Groups = Mapping[str, str]
"""The name of the process group of every axis."""


def _permute_ranks(x, group, sources, destinations):
    """x of the rank that sends here, begun; zeros where none does. Each looks up its own part.

    One operation for the compiler, since how much is sent where differs by rank. What is sent is a
    copy: the compiler may use x's memory again before the result is waited for.
    """
    ranks, copy = compat.group(group), x.clone(memory_format=torch.contiguous_format)
    return permute_ranks(copy, sources, destinations, False, ranks.rank(), ranks.size(), group)


define_op(
    "permute_ranks(Tensor x, str group, int[] sources, int[] destinations) -> Tensor",
    _permute_ranks,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _mm_into(out, a, b):
    """out = a b, in out's memory; its dims may be those of the product split further."""
    torch.mm(a, b, out=out.view(a.shape[0], b.shape[1]))


def _mm_onto(out, a, b):
    """out += a b, likewise."""
    out.view(a.shape[0], b.shape[1]).addmm_(a, b)


define_op("mm_into(Tensor(a!) out, Tensor a, Tensor b) -> ()", _mm_into, lambda *_: None)
define_op("mm_onto(Tensor(a!) out, Tensor a, Tensor b) -> ()", _mm_onto, lambda *_: None)
define_op(
    "mm_wide(Tensor a, Tensor b) -> Tensor",
    compat.wide_product,
    lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
)
MM_WIDE = torch.ops.functron.mm_wide.default
define_op(
    "causal_flash(Tensor q, Tensor k, Tensor v, float? scale) -> (Tensor, Tensor)",
    compat.causal_flash,
    lambda q, k, v, scale: compat.FLASH(q, k, v, 0.0, True, scale=scale),
)
define_op(
    "causal_flash_backward(Tensor cotangent, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float? scale) -> (Tensor, Tensor, Tensor)",
    compat.causal_flash_backward,
    lambda *given: compat.FLASH_BACKWARD(*given[:-1], 0.0, True, scale=given[-1]),
)

_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_SPLITS = (*_VIEWS, _aten.reshape.default)
_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)


def graph_module(kernel: Kernel, groups: Groups, *, overlap: bool = False) -> fx.GraphModule:
    """The graph of a kernel: operands in, a tuple of its results out, updates written at the end.

    Args:
        overlap: start collectives early and wait for them late, as `functron.program.overlap` says;
            else wait for each where it starts.

    Raises:
        ValueError: an operation returns what a graph cannot hold.
    """
    graph = fx.Graph()
    nodes: dict[Var, fx.Node] = {}
    for position, value in enumerate(kernel.reads):
        nodes[value] = graph.placeholder(f"operand_{position}")
    kernel = (
        replace(kernel, equations=tuple(order_equations(kernel.equations))) if overlap else kernel
    )
    placed, gone = _place_products(kernel)
    inside = {target for _, target in placed.values()}
    overwriting = in_place(kernel)
    due = waits(kernel.equations)
    for equation, waited in zip(kernel.equations, due, strict=False):
        for collective in waited if overlap else ():
            _wait_for(graph, collective, nodes)
        if equation in placed:
            op, target = placed[equation]
            graph.call_function(op, tuple(nodes[v] for v in (target, *equation.operands)))
        elif equation in overwriting:
            _overwrite(graph, equation, overwriting[equation], nodes)
        elif equation not in gone:
            _lower_equation(graph, equation, nodes, groups)
            if not overlap and axis_of(equation) is not None:
                _wait_for(graph, equation, nodes)
    for collective in due[-1] if overlap else ():
        _wait_for(graph, collective, nodes)
    for target, value in kernel.updates:
        if target not in inside and nodes[target] is not nodes[value]:
            graph.call_function(_aten.copy_.default, (nodes[target], nodes[value]))
    # other kernels were traced, and are compiled, for results in torch's own layout
    graph.output(tuple(_match_layout(graph, nodes[value], value) for value in kernel.results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _place_products(kernel: Kernel) -> tuple[dict[Equation, tuple[Any, Var]], set[Equation]]:
    """Products that are written to their destination, and equations that need not run then.

    A weight's gradient is a product of matrices that nothing else reads, and overwrites a row of
    the gradients of all layers, or is added to the gradient of the microbatches before. Inductor
    would compute it elsewhere, and copy it.
    """
    read = [*kernel.results, *(v for e in kernel.equations for v in e.operands)]
    uses = Counter([*read, *(value for _, value in kernel.updates)])
    made = {value: equation for equation in kernel.equations for value in equation.results}

    def source(value: Var) -> tuple[Equation | None, list[Equation]]:
        """The equation that makes a value for one reader alone, and views that show it."""
        way: list[Equation] = []
        while value in made and made[value].op in _SPLITS and uses[value] == 1:
            way.append(made[value])
            value = way[-1].operands[0]
        return made.get(value) if uses[value] == 1 else None, way

    placed: dict[Equation, tuple[Any, Var]] = {}
    gone: set[Equation] = set()
    for target, value in kernel.updates:
        op, reads = torch.ops.functron.mm_into.default, 0
        product, way = source(value)
        if product is not None and product.op is _aten.add.Tensor and not product.kwargs:
            rest = [x for x in product.operands if x is not target]
            if target in product.operands and len(rest) == 1:
                op, reads = torch.ops.functron.mm_onto.default, 1
                way.append(product)
                product, views = source(rest[0])
                way += views
        if product is None or product.op is not _aten.mm.default:
            continue
        (made_of,) = product.results
        contiguous = target.stride == contiguous_strides(target.shape)
        if contiguous and target.dtype == made_of.dtype and uses[target] == reads:
            placed[product] = op, target
            gone.update(way)
    return placed, gone


def _lower_equation(
    graph: fx.Graph, equation: Equation, nodes: dict[Var, fx.Node], groups: Groups
) -> None:
    args, kwargs = pytree.tree_map_only(
        Var, nodes.__getitem__, (equation.args, dict(equation.kwargs))
    )
    assert isinstance(equation.op, torch._ops.OpOverload)
    if axis_of(equation) is not None:
        x, axis, size, *operands = args
        start = _LOWERINGS[equation.name]
        nodes[equation.results[0]] = start(graph.call_function, groups[axis], x, size, *operands)
        return
    if is_statement(equation):
        nodes[equation.results[0]] = args[0]
        return
    if equation.name == "sum_rows":  # into memory that the compiler knows, and uses again
        x, ids, _ = args
        like = equation.results[0]
        made = {"dtype": like.dtype, "device": like.device}
        nodes[like] = graph.call_function(_aten.full.default, (list(like.shape), 0), made)
        graph.call_function(torch.ops.functron.put_row_sums_.default, (nodes[like], x, ids))
        return
    if equation.op is _aten._foreach_norm.Scalar and args[1:2] in ((), (2,)):
        for value, x in zip(equation.outputs, args[0], strict=True):
            if value is not None:
                nodes[value] = _lower_norm(graph, x, value.dtype)
        return
    if _is_long_reduction(equation):
        result = equation.results[0]
        wide = graph.call_function(equation.op, args, {**kwargs, "dtype": torch.float64})
        nodes[result] = graph.call_function(
            _aten._to_copy.default, (wide,), {"dtype": result.dtype}
        )
        return
    if equation.op is _aten.mm.default and compat.is_wide(*equation.operands):
        nodes[equation.results[0]] = graph.call_function(MM_WIDE, args)
        return
    op, args, kwargs = _choose_attention(equation, args, kwargs)
    # what Inductor makes of an operation may be laid out otherwise than torch's own result, which
    # was traced: a view of that is then a copy, and places in its memory are those of a copy
    op = _aten.reshape.default if op in _VIEWS else op
    if op in _STRIDED:
        args = (_match_layout(graph, args[0], equation.args[0]), *args[1:])
    node = graph.call_function(op, args, kwargs)
    returns = equation.op._schema.returns
    if len(returns) == 1 and not isinstance(returns[0].type, torch.ListType):
        nodes[equation.results[0]] = node
        return
    if any(isinstance(value.type, torch.ListType) for value in returns[1:]):
        raise ValueError(
            f"compile: {equation.op} returns lists among other values; wanted tensors or one list; "
            f"fix: write {equation.where.line or 'it'} with another operation"
        )
    for position, value in enumerate(equation.outputs):
        if value is not None:
            nodes[value] = graph.call_function(operator.getitem, (node, position))


def in_place(kernel: Kernel) -> dict[Equation, Any]:
    """The equations of a kernel that may write over operands, and the operation that does.

    A twin's written operands are, in order, what the pure operation returns. Each must be a whole
    value that no later equation reads and no result shows, in memory that the kernel made, or that
    of an operand of the kernel which the result is to overwrite anyhow.
    """
    given = {value.storage for value in kernel.reads}
    ends = (*kernel.results, *(value for _, value in kernel.updates))
    wanted = {value.storage for value in ends}
    *due, at_end = waits(kernel.equations)
    wanted.update(_storages_read(at_end))  # a collective reads its operand until it is waited for
    found: dict[Equation, Any] = {}
    for equation, waited in zip(reversed(kernel.equations), reversed(due), strict=True):
        twin = _find_twin(equation.op)
        operands = [value.storage for value in equation.operands]
        if twin is not None:
            pairs = [pair for pair in _find_written(equation, twin) if pair[0] is not None]
            if all(
                old.storage not in wanted
                and operands.count(old.storage) == 1
                and old.nbytes == old.storage_bytes
                and (old.shape, old.stride, old.dtype) == (new.shape, new.stride, new.dtype)
                and (old.storage not in given or (old, new) in kernel.updates)
                for old, new in pairs
            ):
                found[equation] = twin
        wanted.update([*operands, *_storages_read(waited)])
    return found


def _storages_read(equations: Sequence[Equation]) -> list[int]:
    return [value.storage for equation in equations for value in equation.operands]


def _find_twin(op: Any) -> Any:
    """The operation that does in place what `op` does, and returns nothing; None: none does."""
    if isinstance(op, ControlFlow) or op.namespace != "functron":
        return None
    packet = getattr(torch.ops.functron, f"{op._opname}_", None)
    return None if packet is None or packet.default._schema.returns else packet.default


def _find_written(equation: Equation, twin: Any) -> list[tuple[Any, Any]]:
    """The operands that the twin writes to, and the result that each becomes."""
    arguments = zip(twin._schema.arguments, equation.args, strict=True)
    written = [value for argument, value in arguments if argument.is_write]
    return list(zip(written, equation.outputs, strict=True))


def _overwrite(graph: fx.Graph, equation: Equation, twin: Any, nodes: dict[Var, fx.Node]) -> None:
    args = pytree.tree_map_only(Var, nodes.__getitem__, equation.args)
    graph.call_function(twin, args)
    for old, new in _find_written(equation, twin):
        if old is not None:
            nodes[new] = nodes[old]


def _is_long_reduction(equation: Equation) -> bool:
    """Whether this reduces, on a CPU, more elements to one than Inductor adds up well in float32.

    Torch itself adds them up in a tree, as a GPU does; compiled loops do not, and lose up to 6e-5.
    """
    if equation.op not in _REDUCTIONS:
        return False
    x, result = equation.args[0], equation.results[0]
    assert isinstance(x, Var)
    return (
        x.device.type == "cpu"
        and result.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and math.prod(x.shape) > _LONG * math.prod(result.shape)
    )


def _choose_attention(equation: Equation, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The call of an equation; of causal attention on a CPU, that which skips hidden scores."""
    op, ours = equation.op, torch.ops.functron
    twins = {compat.FLASH: ours.causal_flash, compat.FLASH_BACKWARD: ours.causal_flash_backward}
    if op not in twins:
        return op, args, kwargs
    names = [argument.name for argument in op._schema.arguments]
    query, count = names.index("query"), names.index("dropout_p")
    given = {**dict(zip(names[count:], args[count:], strict=False)), **kwargs}
    plain = not given.get("dropout_p") and given.get("attn_mask") is None
    if not (plain and given.get("is_causal") and compat.skips_hidden(*equation.args[query:][:2])):
        return op, args, kwargs
    return twins[op].default, (*args[:count], given.get("scale")), {}


def _match_layout(graph: fx.Graph, x: fx.Node, like: Var) -> fx.Node:
    """x in the layout of `like`, where that has neither gaps nor repeated elements."""
    order = sorted(range(len(like.shape)), key=lambda dim: (-like.stride[dim], dim))
    shape = [like.shape[dim] for dim in order]
    rows = zip(order, shape, contiguous_strides(shape), strict=True)
    if any(size != 1 and like.stride[dim] != stride for dim, size, stride in rows):
        return x
    if order == sorted(order):
        return graph.call_function(_aten.contiguous.default, (x,))
    x = graph.call_function(_aten.permute.default, (x, order))
    x = graph.call_function(_aten.contiguous.default, (x,))
    inverse = [order.index(dim) for dim in range(len(order))]
    return graph.call_function(_aten.permute.default, (x, inverse))


def _lower_norm(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The 2-norm, written out so that it is compiled: torch's runs on one thread."""
    wide = graph.call_function(_aten._to_copy.default, (x,), {"dtype": dtype})
    square = graph.call_function(_aten.mul.Tensor, (wide, wide))
    total = graph.call_function(_aten.sum.default, (square,), {"dtype": torch.float64})
    root = graph.call_function(_aten.sqrt.default, (total,))
    return graph.call_function(_aten._to_copy.default, (root,), {"dtype": dtype})


# --- collectives


def _wait_for(graph: fx.Graph, equation: Equation, nodes: dict[Var, fx.Node]) -> None:
    """From here on the result of a collective is there."""
    (result,) = equation.results
    node = graph.call_function(_c10d.wait_tensor.default, (nodes[result],))
    if equation.name == "psum_scatter":
        node = graph.call_function(_aten.squeeze.dim, (node, 0))
    elif equation.name == "ragged_all_to_all":
        x, _, _, _, receives, capacity, *more = equation.args
        if more and ragged.pads(x.device, more[0]):
            args = (node, nodes[receives], capacity, more[0])
            node = graph.call_function(torch.ops.functron.ragged_end.default, args)
    nodes[result] = node


_LOWERINGS: dict[str, Callable[..., fx.Node]] = {
    **STARTS,
    "ppermute": lambda call, group, x, size, sources, destinations: call(
        torch.ops.functron.permute_ranks.default, (x, group, list(sources), list(destinations))
    ),
    "ragged_all_to_all": lambda call, group, x, size, sends, receives, capacity, room=0, _=0: call(
        torch.ops.functron.ragged_ranks.default, (x, group, sends, receives, capacity, room)
    ),
}
"""The node that starts a collective, made by ``graph.call_function``."""


def unroll(program: Code) -> Code:
    """The program with the body of every scan repeated in its place.

    What a scan hands to another one, slice by slice, is then never stacked.
    """
    block = _Unroller().block(program.block)
    rows = zip(program.outputs, block.outputs, strict=True)
    outputs = tuple(replace(output, value=value) for output, value in rows)
    return replace(program, block=block, outputs=outputs)


class _Unroller:
    """Copies equations, giving their results new names."""

    def __init__(self):
        self.count = 0
        self.columns: dict[Var, list[Var]] = {}  # of a stacked value, its slices

    def fresh(self, like: Var, **changes: Any) -> Var:
        self.count += 1
        numbered = {"name": f"{like.name}_u{self.count}", "storage": 1_000_000 + self.count}
        return replace(like, **{**numbered, **changes})

    def block(self, block: Block) -> Block:
        known: dict[Var, Var] = {value: value for value in block.inputs}
        equations: list[Equation] = []
        self.run(block, known, equations)
        outputs = tuple(known[v] if isinstance(v, Var) else v for v in block.outputs)
        return Block(block.inputs, tuple(equations), outputs)

    def run(self, block: Block, known: dict[Var, Var], into: list[Equation]) -> None:
        """Append the equations of a block, whose inputs are `known`."""
        storages = {old.storage: new.storage for old, new in known.items()}
        for equation in block.equations:
            if isinstance(equation.op, Scan):
                self.scan(equation, known, into)
                storages |= {v.storage: known[v].storage for v in equation.results}
                continue
            for value in equation.results:
                storage = storages.get(value.storage)
                known[value] = self.fresh(
                    value, **({} if storage is None else {"storage": storage})
                )
                storages[value.storage] = known[value].storage
            into.append(rename_values(equation, known))

    def scan(self, equation: Equation, known: dict[Var, Var], into: list[Equation]) -> None:
        op = equation.scan
        consts, carry, xs = op.divide([known[value] for value in equation.args])
        made: list[list[Any]] = [[None] * op.length for _ in op.body.outputs[op.num_carry :]]
        for index in range(op.length)[:: -1 if op.reverse else 1]:
            x = [self.slice(value, index, into, equation.where) for value in xs]
            inner = dict(zip(op.body.inputs, [*consts, *carry, *x], strict=True))
            self.run(op.body, inner, into)
            results = [inner[value] for value in op.body.outputs]
            carry = results[: op.num_carry]
            for column, value in zip(made, results[op.num_carry :], strict=True):
                column[index] = value
        known.update(
            (v, c) for v, c in zip(equation.outputs[: op.num_carry], carry, strict=True) if v
        )
        for result, column in zip(equation.outputs[op.num_carry :], made, strict=True):
            if result is not None:
                known[result] = self.stack(result, column, into, equation.where)

    def slice(self, value: Var, index: int, into: list[Equation], where: Where) -> Var:
        """One slice of a stacked value: what was stacked, or a view."""
        if value in self.columns:
            return self.columns[value][index]
        shape, stride = value.shape[1:], value.stride[1:]
        out = self.fresh(value, shape=shape, stride=stride, storage=value.storage)
        into.append(Equation(_aten.select.int, (value, 0, index), {}, (out,), where))
        return out

    def stack(self, like: Var, column: list[Var], into: list[Equation], where: Where) -> Var:
        """The stacked value, in the layout of `like`; dead if only slices of it are read."""
        order = sorted(range(len(like.shape)), key=lambda dim: (-like.stride[dim], dim))
        inverse = [order.index(dim) for dim in range(len(order))]
        inner = [dim - 1 for dim in order if dim]  # the leading dim has the largest stride

        def permuted(value: Var, dims: list[int]) -> Var:
            out = self.fresh(
                value,
                shape=tuple(value.shape[d] for d in dims),
                stride=tuple(value.stride[d] for d in dims),
                storage=value.storage,
            )
            into.append(Equation(_aten.permute.default, (value, dims), {}, (out,), where))
            return out

        same = inner == list(range(len(inner)))
        rows = column if same else [permuted(value, inner) for value in column]
        shape = tuple(like.shape[dim] for dim in order)
        stacked = self.fresh(like, shape=shape, stride=contiguous_strides(shape))
        if rows:
            into.append(Equation(_aten.stack.default, (rows,), {}, (stacked,), where))
        else:  # no iteration has run
            kwargs = {"dtype": like.dtype, "device": like.device}
            into.append(Equation(_aten.full.default, (shape, 0), kwargs, (stacked,), where))
        out = stacked if same else permuted(stacked, inverse)
        self.columns[out] = column
        return out
