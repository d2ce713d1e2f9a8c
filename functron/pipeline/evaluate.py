"""Running a block with whatever tensors and axes are at hand: eagerly, simulated, bound, or traced.

Collectives act over the axes that are bound where `evaluate` is called, by name. So one block runs
in plain eager mode, inside the nested vmaps of a simulated mesh, as one process of a bound mesh,
and inside a program that is being traced, which records its equations once more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functron.core import compat
from functron.core.compat import Function
from functron.core.scopes import in_phase, named_scope
from functron.ops.cross_entropy import check_ids
from functron.ops.grouped_matmul import grouped_matmul, grouped_matmul_weight
from functron.program import debug
from functron.program.equations import (
    Block,
    Equation,
    Input,
    Scan,
    Strided,
    Var,
    Where,
    contiguous_strides,
    read_view,
    write_view,
)
from functron.program.recorder import Recorder, active
from functron.program.text import COLLECTIVES
from functron.spmd.axes import Axis, TracedAxis, lookup
from functron.spmd.primitives import (
    AllGather,
    AllToAll,
    AssumeReplicated,
    Broadcast,
    Pmax,
    Pmin,
    Ppermute,
    Psum,
    PsumScatter,
    Vary,
)
from functron.spmd.ragged import RaggedAllToAll, RaggedCall
from functron.spmd.simulate import as_share, no_share
from functron.transforms.policies import checkpoint_name
from functron.transforms.remat import tie

_aten = torch.ops.aten


def ambient(inputs: Iterable[Input]) -> dict[Var, torch.Tensor]:
    """The tensors of those inputs of a program that are no arguments, where this is called.

    This rank's index on an axis is what `lax.axis_index` gives; a constant is itself.
    """
    found: dict[Var, torch.Tensor] = {}
    for given in inputs:
        if given.role == "axis_index":
            index = next((axis.index for axis in lookup(given.path)), 0)
            made = index if isinstance(index, torch.Tensor) else torch.tensor(index)
            found[given.var] = made.to(given.var.device)
        elif given.role == "constant":
            assert given.value is not None
            found[given.var] = given.value
    return found


def evaluate(block: Block, environment: dict[Var, torch.Tensor]) -> list:
    """The outputs of a block, computed in the scope that this is called in, without a tape.

    Args:
        block: of a program, or of a piece of one.
        environment: the tensors of the block's inputs, and perhaps others. They are taken out of it
            when the block has no more use for them, and with them all that it computes, so that
            what only this dict refers to is freed after its last use.

    Raises:
        ValueError: an axis of the block's collectives has another size where this is called.
    """
    with torch.no_grad():
        return _run(block, _last_uses(block), environment)


def _run(block: Block, dead: Sequence[Sequence[Var]], values: dict[Var, Any]) -> list:
    for value in dead[-1]:
        values.pop(value, None)
    for equation, last in zip(block.equations, dead, strict=False):
        marked = contextlib.nullcontext() if active() is None else _marked(equation.where)
        with marked:
            results = _equation(equation, values, last)
        for value in last:
            values.pop(value, None)
        for value, result in zip(equation.outputs, results, strict=True):
            if value is not None and value not in last:
                values[value] = result
        del results
    return [values[value] if isinstance(value, Var) else value for value in block.outputs]


def _last_uses(block: Block) -> list[list[Var]]:
    """For each equation, the values that nothing reads after it; last, those never read."""
    seen = {value for value in block.outputs if isinstance(value, Var)}
    dead: list[list[Var]] = []
    for equation in reversed(block.equations):
        here = dict.fromkeys([*equation.operands, *equation.results])
        dead.append([value for value in here if value not in seen])
        seen.update(here)
    return [*dead[::-1], [value for value in block.inputs if value not in seen]]


@contextlib.contextmanager
def _marked(where: Where) -> Iterator[None]:
    """Equations recorded in this with block get the place of the equation that they come of."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_phase(where.phase))
        for name in where.scopes:
            stack.enter_context(named_scope(name))
        yield


def _equation(equation: Equation, values: dict[Var, Any], last: Sequence[Var]) -> Sequence[Any]:
    if isinstance(equation.op, Scan):
        operands = [values[value] for value in equation.args]
        for value in last:
            values.pop(value, None)
        return _scan(equation, operands)
    args = [_filled(value, values) for value in equation.args]
    kwargs = {name: _filled(value, values) for name, value in equation.kwargs.items()}
    if equation.op.namespace == "functron":
        return _functron(equation, args, kwargs)
    out = _operation(equation)(*args, **kwargs)
    return [out] if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)


def _filled(argument: Any, values: Mapping[Var, Any]) -> Any:
    """An argument of an operation, with tensors for values."""
    if isinstance(argument, Var):
        return values[argument]
    if isinstance(argument, (list, tuple)):
        return [_filled(item, values) for item in argument]
    return argument


# --- scans


def _scan(equation: Equation, operands: list) -> Sequence[Any]:
    op, recorder = equation.op, active()
    assert isinstance(op, Scan)
    if recorder is not None and _fits(equation, operands):
        return _recorded(recorder, equation, operands)
    split = op.num_consts + op.num_carry
    consts, carry = operands[: op.num_consts], operands[op.num_consts : split]
    columns = [value.unbind(0) for value in operands[split:]]
    operands.clear()
    dead = _last_uses(op.body)
    stacks = [_Stack(value, op.length) for value in op.body.outputs[op.num_carry :]]
    for index in range(op.length)[:: -1 if op.reverse else 1]:
        x = [column[index] for column in columns]
        inner = dict(zip(op.body.inputs, [*consts, *carry, *x], strict=True))
        carry = []
        out = _run(op.body, dead, inner)
        carry = out[: op.num_carry]
        for stack, row in zip(stacks, out[op.num_carry :], strict=True):
            stack.put(index, row)
        del inner, out
    return [*carry, *(stack.take() for stack in stacks)]


class _Stack:
    """A result of a scan that is being put together, in the layout of `Var.stacked`."""

    def __init__(self, like: Var, length: int):
        self.like, (self.shape, self.stride) = like, like.stacked(length)
        # plain rows are written to their place at once; others cannot be: they are stacked at last
        self.plain = not compat.transforms_active() and not compat.dispatch_modes_active()
        self.rows: list[Any] = [None] * length
        self.whole: torch.Tensor | None = None

    def put(self, index: int, row: torch.Tensor) -> None:
        """Let `row` be the slice at `index`."""
        if not self.plain:
            self.rows[index] = row
            return
        if self.whole is None:
            kind = {"dtype": row.dtype, "device": row.device}
            self.whole = torch.empty_strided(self.shape, self.stride, **kind)
        self.whole[index].copy_(row)

    def take(self) -> torch.Tensor:
        """The stack."""
        if self.whole is not None:
            return self.whole
        if not self.rows:
            return torch.zeros(self.shape, dtype=self.like.dtype, device=self.like.device)
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim))
        inner = [dim - 1 for dim in order if dim]  # the leading dim has the largest stride
        stacked = torch.stack([row.permute(inner) for row in self.rows])
        self.rows.clear()
        return stacked.permute([0, *(1 + inner.index(dim) for dim in range(len(inner)))])


def _fits(equation: Equation, operands: Sequence[torch.Tensor]) -> bool:
    """Whether a scan can be recorded as it is: its body holds for operands of these layouts."""
    if compat.transforms_active() or None in equation.outputs:
        return False
    rows = zip(equation.args, operands, strict=True)
    return all(value.stride == tuple(operand.stride()) for value, operand in rows)


def _recorded(recorder: Recorder, equation: Equation, operands: Sequence[Any]) -> list:
    kinds = [(v.shape, v.stride, v.dtype, v.device) for v in equation.results]
    return recorder.emit(equation.op, [recorder.var(x) for x in operands], kinds)


# --- collectives, and other operations of functron's own


def _functron(equation: Equation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    name = equation.name
    if name in _OTHERS:
        return _OTHERS[name](*args)
    if name not in COLLECTIVES and name not in _STATEMENTS:  # it brings its own vmap rule
        op: Any = equation.op
        return pytree.tree_leaves(op(*args, **kwargs))
    x, axis, *sizes = args
    found = lookup(axis)
    if name in _STATEMENTS:
        return [_STATEMENTS[name](x, found[0]) if found else x]
    here = found[0].size if found else 1
    if here != sizes[0]:
        raise ValueError(
            f"evaluate: {name} over {axis!r} was traced for {sizes[0]} ranks, and there are {here} "
            "here; wanted the mesh that the program was traced for; fix: trace it for this one"
        )
    if name == "ppermute":
        return [Ppermute.call(x, found[0], tuple(zip(*sizes[1:], strict=True)))]
    if name == "pbroadcast":
        return [Broadcast.call(x, found[0], source=sizes[1])]
    if name == "ragged_all_to_all":
        _, sends, receives, capacity, *room = sizes
        call = RaggedCall(found[0], capacity, room=sum(room))
        return [RaggedAllToAll.apply(x, sends, receives, found[0].token, call)]
    return [_COLLECTIVES[name].call(x, found[0], **kwargs)]


def _require_replicated(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return axis.mark(x, "require_replicated") if isinstance(axis, TracedAxis) else x


def _check_ids(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> Sequence[Any]:
    check_ids(ids, name, size, ignored)
    return []


def _debug_print(text: str, values: Sequence[Any], axes, indices, dims: Sequence[str]) -> list:
    """Print on every rank that there is here, each element of the user's own vmaps by itself."""

    def show(*rows):
        debug.print(text, *rows)
        return rows

    for _ in dims:
        show = torch.func.vmap(show)
    show(*values)
    return []


_OTHERS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "barrier": lambda x, dep: [x if active() is None else tie(x, dep)],
    "check_ids": _check_ids,
    "checkpoint_name": lambda x, name: [checkpoint_name(x, name)],
    "debug_print": _debug_print,
    "grouped_matmul": lambda *args: [grouped_matmul(*args)],
    "grouped_matmul_weight": lambda *args: [grouped_matmul_weight(*args)],
    "assume_share": lambda x: [as_share(x)],
    "require_share": lambda x, axes: [no_share(x, axes)],
}
_STATEMENTS: Mapping[str, Callable[[torch.Tensor, Axis], torch.Tensor]] = {
    "vary": Vary.call,
    "assume_replicated": AssumeReplicated.call,
    "require_replicated": _require_replicated,
}
_COLLECTIVES: Mapping[str, Any] = {
    "psum": Psum,
    "pmax": Pmax,
    "pmin": Pmin,
    "all_gather": AllGather,
    "psum_scatter": PsumScatter,
    "all_to_all": AllToAll,
}


# --- operations of torch that need more than a call


def _operation(equation: Equation) -> Callable:
    """A function that does an equation's operation on values of any layout, also under vmaps."""
    op: Any = equation.op
    if op in (_aten.view.default, _aten._unsafe_view.default):
        return torch.reshape  # values may be laid out otherwise than they were traced
    if op in _STRIDED and equation.args[0].stride == contiguous_strides(equation.args[0].shape):
        return _STRIDED[op]
    if compat.transforms_active():
        if op in _BATCHED and equation.kwargs.get("attn_mask") is None:
            return lambda *args, **kwargs: _folded(op, *args, **kwargs)
        if op._schema.name.startswith("aten::_foreach_"):
            return lambda *args, **kwargs: _foreach(op, args, kwargs)
    return op


def _as_strided(x, size, stride, offset=None):
    return read_view(x, Strided(tuple(size), tuple(stride), offset or 0))


def _as_strided_scatter(x, source, size, stride, offset=None):
    return write_view(x, source, Strided(tuple(size), tuple(stride), offset or 0))


_STRIDED: Mapping[Any, Callable] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}

_BATCHED: Mapping[Any, int] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
    _aten._scaled_dot_product_flash_attention.default: 2,
    _aten._scaled_dot_product_flash_attention_backward.default: 3,
    _aten._scaled_dot_product_cudnn_attention.default: 2,
    _aten._scaled_dot_product_cudnn_attention_backward.default: 3,
}
"""Operations without a batching rule, and how many of their results there are without dropout.

These results lead with a dim of samples, and so do the operands that are no vectors.
"""


def _folded(op: Any, *args: Any, **kwargs: Any) -> list:
    """An operation of `_BATCHED` under vmaps; None for the results that dropout has."""
    found = _Folded.apply(functools.partial(op, **kwargs), _BATCHED[op], *args)
    return [*found, *[None] * (len(op._schema.returns) - len(found))]


class _Folded(Function):
    """The first `count` results of an operation, with simulated ranks among the samples."""

    generate_vmap_rule = False

    @staticmethod
    def forward(op, count, *args):
        return tuple(op(*args)[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, op, count, *args):
        size = info.batch_size

        def fold(x: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None and x.dim() == 1:
                return x  # what dropout would need
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        rows = zip(args, in_dims[2:], strict=True)
        folded = [fold(x, dim) if isinstance(x, torch.Tensor) else x for x, dim in rows]
        out: Any = _Folded.apply(op, count, *folded)
        return tuple(x.unflatten(0, (size, -1)) for x in out), (0,) * len(out)


def _norm(x: torch.Tensor, order: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, order, dtype=dtype)


def _foreach(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
    """A multi-tensor operation, which vmap does not know, tensor by tensor."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    one: Callable = _norm if name == "norm" else getattr(torch, name)
    if name in ("addcmul", "addcdiv") and len(args) == 4:
        args, kwargs = args[:3], {"value": args[3]}

    def at(index: int, value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    return [
        one(*(at(i, x) for x in args), **{key: at(i, x) for key, x in kwargs.items()})
        for i in range(len(args[0]))
    ]
