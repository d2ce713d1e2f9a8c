"""Custom operations: registered once, differentiable, vmappable, with a choice of implementations.

An op is an entry of ``torch.ops.functron``, which computes its reference on CPUs, its kernel on
CUDA, and shapes on fake tensors. An autograd Function around it, with a vmap rule, makes it
differentiable; its backward calls another op of this kind. So one definition works on torch's tape,
under torch.func in any order of grad and vmap, in traced programs and in compiled ones.

Rejected: ``torch.library.register_autograd``, whose Function refuses torch.func.grad (2.11 to
2.13); and a Function over an entry without derivatives, which silently gives zero gradients in
torch.compile(torch.func.grad).

`define` registers an op of functron (`functron.ops.register` one of a user), with a vmap rule of
its own or `map_one_by_one`, `map_rows` or `map_batch`. `use` and `Kernels` choose functron's
kernels or torch's operations. The rest serves the host code of kernels: checks of operands
(`rows_of`, `packable`, `type_name`), and `layout`, the assignment of rows to threads, the host's
side of ``kernels/rows.cuh``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from functron.core import compat, tree
from functron.core.compat import leading
from functron.core.errors import nearest
from functron.core.functions import Function
from functron.core.tables import shows_differences
from functron.core.typing import Tensor
from functron.ops.launch import NO_DEFINES, KernelArgument, cuda, usable
from functron.program.recorder import keeper

_LIBRARY = torch.library.Library("functron", "FRAGMENT")


@runtime_checkable  # the tests check annotations
class Launch(Protocol):
    """Runs a kernel: `functron.ops.launch.cuda` on a GPU, in tests an emulator of one."""

    def __call__(
        self,
        source: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int,
        *args: KernelArgument,
        defines: Mapping[str, str] = NO_DEFINES,
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` of ``kernels/<source>.cu`` on the tensors' device and current stream.

        Args:
            source: the name of the file.
            kernel: the name of the function.
            grid: number of blocks; where it is 0, nothing runs.
            block: number of threads of a block.
            args: tensors become pointers, None a null pointer, integers ``long long``, numbers
                float.
            defines: the macros to compile it with.
            shared_bytes: of dynamic shared memory.
        """
        ...

    def processors(self, device: torch.device) -> int:
        """How many multiprocessors the device has."""
        ...


@dataclass(frozen=True)
class Gradient:
    """How an op is differentiated in reverse.

    Attributes:
        backward: ``(saved, cotangents)``, one cotangent per output, zeros where there is none, to
            one per argument, None for arguments without. It may call ops, and must be linear.
        save: ``(args, outputs)``, both tuples, to what backward needs: tensors, numbers, None; by
            default the arguments.
        auxiliary: positions of outputs that have no derivative (statistics for backward); integer
            outputs never have one.
    """

    backward: Callable[[Sequence[Any], tuple[torch.Tensor, ...]], Sequence[torch.Tensor | None]]
    save: Callable[[tuple, tuple], Sequence[Any]] = lambda args, outputs: args
    auxiliary: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Op:
    """A registered operation, made by `define` or `register`. Calling it computes it.

    Attributes:
        name: in ``torch.ops.functron``, or in the namespace that it was registered in.
        raw: that entry, without derivatives.
        reference: computes it in torch's operations.
        kernel: its host code, ``(launch, *args)``.
        differentiable: whether it has a gradient.
        library: that registered it, for as long as it lives.
    """

    name: str
    raw: Any
    reference: Callable
    kernel: Callable
    differentiable: bool
    library: torch.library.Library
    _call: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result or results, on the device of the operands; of `define`, by position."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        own = getattr(self.raw, "functron_own", None)
        return super().__reduce__() if own is None else own.again


def define(
    schema: str,
    *,
    reference: Callable,
    kernel: Callable,
    fake: Callable = lambda *args: None,
    batch: Callable | None = None,
    gradient: Gradient | Callable | None = None,
) -> Op:
    """Register an op.

    Args:
        schema: as torch writes it, ``"name(Tensor x, float eps) -> (Tensor, Tensor)"``. Ops whose
            name ends in ``_`` write to their operands (``Tensor(a!) x``): they take plain tensors
            only, and have neither gradient nor vmap rule.
        reference: ``(*args)`` in torch's operations, on any device and floating dtype; results are
            not views of operands.
        kernel: ``(launch, *args)``: makes results and calls `launch`, a `Launch`.
        fake: ``(*args)`` to empty results of the same shapes, strides, dtypes and device; by
            default there are none.
        batch: ``(size, in_dims, args, op) -> (results, out_dims)``: computes the op mapped over
            dims of its arguments (None where one has none) by calling `op`.
        gradient: of reverse mode: a `Gradient`, or a function of the same arguments that torch
            differentiates: the reference, or a formula that recomputes the statistics which the op
            is passed (their derivatives would be lost: they are auxiliary). None: not
            differentiable.
    """
    name = schema.split("(")[0].split(".")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, functools.partial(kernel, cuda), "CUDA")
    if name.endswith("_"):
        assert (batch, gradient) == (None, None), f"{name} writes to its operands"
        torch.library.register_fake(f"functron::{name}", fake, lib=_LIBRARY)
        raw = getattr(torch.ops.functron, name).default
        in_place = functools.partial(_call_in_place, name, raw)
        return Op(name, raw, reference, kernel, False, _LIBRARY, in_place)
    assert batch is not None, f"{name} needs a vmap rule"
    return build_op(
        _LIBRARY, name, reference=reference, kernel=kernel, fake=fake, batch=batch,
        gradient=gradient,
    )  # fmt: skip


def build_op(
    library: torch.library.Library,
    name: str,
    *,
    reference: Callable,
    kernel: Callable,
    fake: Callable,
    batch: Callable,
    gradient: Gradient | Callable | None,
    bind: Callable | None = None,
) -> Op:
    """The op of an entry of a library that has its implementations: shapes, rules and derivatives.

    Args:
        reference, kernel, fake, batch, gradient: as of `define`.
        bind: ``(args, kwargs)`` to all arguments by position; None: they are.
    """
    entry = f"{library.ns}::{name}"
    torch.library.register_fake(entry, fake, lib=library)
    raw = getattr(getattr(torch.ops, library.ns), name).default
    function = _function(entry, raw, batch, gradient, reference)
    torch.library.register_vmap(entry, _rule(batch, raw), lib=library)
    call = _calling(function)
    if bind is not None:
        inner = call
        call = lambda *args, **kwargs: inner(*bind(args, kwargs))  # noqa: E731
    return Op(name, raw, reference, kernel, gradient is not None, library, call)


def differentiate(name: str, formula: Callable, gradient: Gradient | Callable) -> Callable:
    """The function ``(*args)`` that computes `formula` and is differentiated as an op would be.

    It is none: programs and compilers see torch's operations. Both modes and all orders of grad and
    vmap work.

    Args:
        name: of its node on the tape.
        formula: in torch's operations, of one result or a tuple.
        gradient: as of `define`. Where the function is mapped torch maps, and differentiates, this
            if it is a function, and else `formula`.
    """
    mapped = gradient if callable(gradient) else formula

    def batch(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple[Any, Any]:
        out = torch.func.vmap(mapped, in_dims)(*args)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return _calling(_function(name, formula, batch, gradient, mapped))


def _calling(function: Any) -> Callable:
    def call(*args: Any) -> Any:
        return function.apply(*args)

    # dynamo would look inside, and see an entry without derivatives
    compat.allow_in_graph(call)
    return call


def _call_in_place(name: str, raw: Any, *args: Any) -> Any:
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(map(compat.is_wrapped, tensors)):
        raise ValueError(
            f"{name}: got tensors that torch.func transforms; wanted plain ones, as it writes to "
            "them; fix: call it outside of the transform, as optim's step_ does"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            f"{name}: got tensors that the tape differentiates; wanted ones that need no gradient, "
            "as it writes to them; fix: call it under torch.no_grad()"
        )
    return raw(*args)


def _rule(batch: Callable, op: Callable) -> Callable:
    def rule(info: Any, in_dims: tuple, *args: Any) -> Any:
        return batch(info.batch_size, in_dims, args, op)

    return rule


def _function(
    name: str,
    raw: Any,
    batch: Callable,
    gradient: Gradient | Callable | None,
    formula: Callable,
) -> Any:
    """The autograd Function around an entry; tangents are those of `gradient` or of `formula`."""
    rule = _of_formula(gradient) if callable(gradient) else gradient
    pushed = gradient if callable(gradient) else formula

    class Node(Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(*args):
            return raw(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.num_inputs = len(inputs)
            _without_derivative(ctx, rule, outputs)
            if rule is not None:
                _save_values(ctx, rule.save(inputs, outputs))

        @staticmethod
        def backward(ctx, *cotangents) -> Any:
            if rule is None:
                raise _underivable(name)
            grads = tuple(rule.backward(_load_saved(ctx), cotangents))
            if len(grads) != ctx.num_inputs:
                raise ValueError(
                    f"{name}: backward returned {len(grads)} cotangents; wanted one for each of "
                    f"the {ctx.num_inputs} arguments; fix: return None for those without"
                )
            return grads

        @staticmethod
        def jvp(ctx, *tangents) -> Any:
            raise ValueError(
                f"got torch.autograd.forward_ad of {name}, whose tangents it switches "
                "off; wanted a transform; fix: functron.jvp or torch.func.jvp"
            )

        @classmethod
        def push(cls, primals, tangents) -> Any:
            if rule is None:
                raise _underivable(name)
            out = cls.apply(*primals)
            return out, _push_formula(pushed, rule.auxiliary, primals, tangents)

        @staticmethod
        def vmap(info, in_dims, *args) -> Any:
            return batch(info.batch_size, in_dims, args, Node.apply)

    words = name.split("::")[-1].split("_")
    Node.__name__ = Node.__qualname__ = "".join(part.title() for part in words)
    return Node


def _underivable(name: str) -> ValueError:
    return ValueError(
        f"{name} has no derivative; "
        'fix: pass kernels=functron.ops.use("reference") where higher ones are wanted'
    )


def _push_formula(
    formula: Callable, auxiliary: Sequence[int], primals: Sequence, tangents: Sequence
) -> Any:
    """The tangents of the results of a formula; None of those that have no derivative."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
    derivable: list[bool] = []  # one per result
    single = False

    def of_moving(*values: torch.Tensor) -> tuple:
        nonlocal single
        args = list(primals)
        for i, value in zip(moving, values, strict=True):
            args[i] = value
        out = formula(*args)
        single = isinstance(out, torch.Tensor)
        outputs = (out,) if single else out
        derivable[:] = [tree.is_float(x) and i not in auxiliary for i, x in enumerate(outputs)]
        return tuple(itertools.compress(outputs, derivable))

    given = tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
    moved = iter(torch.func.jvp(of_moving, *given)[1])
    found = tuple(next(moved) if one else None for one in derivable)
    return found[0] if single else found


def _without_derivative(ctx: Any, rule: Gradient | None, outputs: tuple) -> None:
    auxiliary = rule.auxiliary if rule is not None else ()
    ctx.mark_non_differentiable(
        *[x for i, x in enumerate(outputs) if i in auxiliary or not x.is_floating_point()]
    )


def _save_values(ctx: Any, values: Sequence[Any]) -> None:
    tensors = [isinstance(value, torch.Tensor) for value in values]
    ctx.static = [None if is_one else v for v, is_one in zip(values, tensors, strict=True)]
    ctx.are_tensors = tensors
    ctx.save_for_backward(*[v for v, is_one in zip(values, tensors, strict=True) if is_one])


def _load_saved(ctx: Any) -> list:
    # the levels of torch.func that made them may have returned since
    saved = iter(map(compat.unwrap_if_dead, ctx.saved_tensors))
    return [
        next(saved) if is_one else value
        for value, is_one in zip(ctx.static, ctx.are_tensors, strict=True)
    ]


def _of_formula(formula: Any) -> Gradient:
    """The gradient that torch derives of a function in its operations."""

    def backward(saved: Sequence[Any], cotangents: tuple) -> list:
        moving = [i for i, x in enumerate(saved) if tree.is_float(x)]

        def of_moving(*values: torch.Tensor) -> tuple:
            args = list(saved)
            for i, value in zip(moving, values, strict=True):
                args[i] = value
            out = formula(*args)
            out = out if isinstance(out, tuple) else (out,)
            return tuple(x for x in out if x.is_floating_point())

        pullback = torch.func.vjp(of_moving, *[saved[i] for i in moving])[1]
        given = tuple(x for x in cotangents if x.is_floating_point())
        grads: list[Any] = [None] * len(saved)
        for i, grad in zip(moving, pullback(given), strict=True):
            grads[i] = grad
        return grads

    return Gradient(backward)


def map_one_by_one(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
    """The op called once for each element of the mapped dim, results stacked: right for all ops."""
    calls = [
        op(*[x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)])
        for i in range(size)
    ]
    if isinstance(calls[0], torch.Tensor):
        return torch.stack(calls), 0
    return tuple(torch.stack(column) for column in zip(*calls, strict=True)), (0,) * len(calls[0])


def map_rows(whole: Sequence[int]) -> Callable:
    """The rule of an op whose operands are rows, except those at the positions `whole`.

    Rows are independent, and have any number of leading dims: the mapped dim becomes the first of
    these, unless an operand in `whole` is mapped.
    """

    def rule(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
        if any(in_dims[i] is not None for i in whole):
            return map_one_by_one(size, in_dims, args, op)
        folded = [
            x if i in whole or not isinstance(x, torch.Tensor) else leading(x, dim, size)
            for i, (x, dim) in enumerate(zip(args, in_dims, strict=True))
        ]
        out = op(*folded)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return rule


def map_batch(num: int) -> Callable:
    """The rule of an op whose first `num` operands, and all results, have a leading batch dim.

    The mapped dim is merged into it; the other arguments are not mapped.
    """

    def rule(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
        folded = [
            leading(x, dim, size).flatten(0, 1) if isinstance(x, torch.Tensor) else x
            for x, dim in zip(args[:num], in_dims[:num], strict=True)
        ]
        out = op(*folded, *args[num:])
        if isinstance(out, torch.Tensor):
            return out.unflatten(0, (size, len(out) // size)), 0
        return tuple(x.unflatten(0, (size, len(x) // size)) for x in out), (0,) * len(out)

    return rule


TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "float",
        torch.float16: "__half",
        torch.bfloat16: "__nv_bfloat16",
    }
)
"""The C++ names of the floating-point types that kernels are compiled for."""

PACK_BYTES = 16


def type_name(x: torch.Tensor, op: str) -> str:
    """The C++ name of `x`'s dtype, for a macro of a kernel.

    Raises:
        TypeError: kernels have no such type.
    """
    if x.dtype not in TYPES:
        known = ", ".join(str(dtype) for dtype in TYPES)
        raise TypeError(
            f"{op}: got {x.dtype}; wanted one of {known}; fix: convert it, or pass "
            f'kernels=functron.ops.use("reference")'
        )
    return TYPES[x.dtype]


def check_shapes(op: str, **operands: tuple[torch.Tensor | None, Sequence[int]]) -> None:
    """Refuse operands of other shapes than those given beside them, which kernels would misread.

    Raises:
        ValueError: an operand, if not None, has another shape.
    """
    for name, (x, wanted) in operands.items():
        if x is not None and tuple(x.shape) != tuple(wanted):
            raise ValueError(
                f"{op}: got {name} of shape {tuple(x.shape)}; wanted {tuple(wanted)}; "
                "fix: expand it, or correct the operand"
            )


def check_contiguous(op: str, *tensors: torch.Tensor) -> None:
    """Refuse to write over tensors that are not contiguous.

    Raises:
        ValueError: one of them.
    """
    for x in tensors:
        if not x.is_contiguous():
            raise ValueError(
                f"{op}: got strides {x.stride()}; wanted contiguous tensors, to write to; "
                "fix: use the op that returns results"
            )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as ``[rows, dim]`` with a contiguous last dim; a view where the layout allows it."""
    dim = x.shape[-1]
    rows = x.reshape(-1, dim) if x.numel() else x.reshape(x.shape[:-1].numel(), dim)
    return rows if dim <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def packable(dim: int, *tensors: torch.Tensor | None) -> bool:
    """Whether rows of `dim` elements can be read and written 16 bytes at a time.

    Tensors are as `rows_of` returns them: addresses, row strides and `dim` must be multiples of 16
    bytes.
    """
    for x in tensors:
        if x is None:
            continue
        size = x.element_size()
        strides = [x.stride(i) for i in range(x.dim() - 1) if x.shape[i] > 1]
        if x.data_ptr() % PACK_BYTES or any(s * size % PACK_BYTES for s in (dim, *strides)):
            return False
    return True


KernelChoice = Literal["auto", "reference", "kernel"]
"""``"auto"``: the kernel for CUDA tensors of a dtype that it has, on a GPU and an installation that
can run it; otherwise torch's operations. ``"reference"``: torch's operations. ``"kernel"``: the
registered operation, which on the CPU computes its reference, and on CUDA raises where there is no
kernel."""


@shows_differences
@dataclass(frozen=True)
class Kernels:
    """A choice of implementations, passed to functions that compute with ops; `use` makes it.

    Attributes:
        choice: for operations that `by_op` does not name.
        by_op: exceptions, by the name of the operation.
    """

    choice: KernelChoice = "auto"
    by_op: Mapping[str, KernelChoice] = field(default_factory=lambda: MappingProxyType({}))

    def takes(self, op: str, *operands: torch.Tensor | None) -> bool:
        """Whether `op` is to be computed by its registered op on these operands.

        Args:
            op: the name of the operation.
            operands: their devices and floating dtypes decide; None and integers do not.
        """
        choice = self.by_op.get(op, self.choice)
        if choice != "auto":
            return choice == "kernel"
        tensors = [x for x in operands if x is not None]
        if not (tensors and all(x.is_cuda for x in tensors)):
            return False
        if keeper() is not None and op not in PARTITIONED:
            return False
        floats = [x.dtype for x in tensors if x.is_floating_point()]
        return all(d in TYPES for d in floats) and usable(tensors[0].device) is None

    def wants_reference(self, op: str) -> bool:
        """Whether the reference of the operation `op` is asked for."""
        return self.by_op.get(op, self.choice) == "reference"


AUTO = Kernels()
"""Kernels where there are, torch's operations elsewhere."""


def use(choice: KernelChoice = "auto", **by_op: KernelChoice) -> Kernels:
    """The choice to pass as ``kernels=``; ``use("auto", rms_norm="reference")`` makes exceptions.

    Raises:
        ValueError: an unknown choice or operation.
    """
    for name, value in {"choice": choice, **by_op}.items():
        if value not in get_args(KernelChoice):
            raise ValueError(f"use: got {name}={value!r}; {nearest(value, get_args(KernelChoice))}")
    unknown = sorted(set(by_op) - OPERATIONS)
    if unknown:
        raise ValueError(f"use: got operation {unknown[0]!r}; {nearest(unknown[0], OPERATIONS)}")
    return Kernels(choice, MappingProxyType(dict(by_op)))


OPERATIONS = frozenset(
    {
        "adamw",
        "attention",
        "cross_entropy",
        "global_norm",
        "glu",
        "layer_norm",
        "lse_merge",
        "moe_permute",
        "moe_router",
        "moe_sort",
        "qk_norm_rope",
        "quantise",
        "rms_norm",
        "scaled_matmul",
        "softmax",
    }
)
"""The names of operations that have kernels: those of the files of ``kernels/``,
``"attention"`` with masks or caps, torch's FlexAttention, and ``"scaled_matmul"``, torch's."""


PARTITIONED = frozenset({"glu", "layer_norm", "rms_norm"})
"""The operations whose ops `functron.partition` has rules for; of others it takes the reference."""


FORWARD_THREADS = 1024
"""Of a multiprocessor, and the most of a block: 64 registers for each."""

BACKWARD_THREADS = 512
"""The same, with 128 registers."""

SHARED_BYTES = 96 * 1024
"""Of a block: what small GPUs have; others have as much for two blocks."""

_KEPT = 2  # packs of a row that a thread keeps
_MOST_COLUMNS = 2**30


@dataclass(frozen=True)
class RowLayout:
    """The assignment of rows to threads; see ``kernels/rows.cuh``.

    Attributes:
        lanes: number of threads per row.
        block: number of threads of a block, which has one row or, with a warp for each, several.
        columns: of a row of partial sums: the row's, rounded up to a multiple of all lanes'
            elements.
    """

    lanes: int
    block: int
    columns: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block // self.lanes

    def grid(self, launch: Launch, x: Tensor, resident: int) -> int:
        """The number of blocks that run at once, if a multiprocessor holds `resident` threads."""
        at_a_time = launch.processors(x.device) * max(1, resident // self.block)
        return min(-(-x.shape[0] // self.rows), at_a_time)


def check_columns(dim: int, op: str) -> None:
    """Raise ValueError where rows are longer than 32-bit columns reach."""
    if dim > _MOST_COLUMNS:
        raise ValueError(
            f"{op}: got rows of {dim} elements; wanted at most {_MOST_COLUMNS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )


def layout(dim: int, element_size: int, most: int) -> RowLayout:
    """The layout of rows of `dim` elements, for blocks of `most` threads or less.

    Raises:
        ValueError: see `check_columns`.
    """
    check_columns(dim, "norm")
    size = PACK_BYTES // element_size
    lanes = min(most, 32 * -(-dim // (size * _KEPT * 32)))
    width = lanes * size
    # blocks of backward each end with a row of sums: fewer, larger ones
    block = lanes if lanes > 32 else 256 if most > BACKWARD_THREADS else BACKWARD_THREADS
    return RowLayout(lanes, block, -(-dim // width) * width)


def vector(x: Tensor, weights: Tensor) -> tuple[Tensor, int]:
    """Weights as kernels take them, and whether they are float32 while rows are narrower."""
    if weights.dtype != x.dtype:
        weights = weights.float()
    return weights.contiguous(), int(weights.dtype != x.dtype)


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def multiplier(scale: Tensor, like: Tensor, zero_centered: bool) -> Tensor:
    """The scale, or 1 + scale, in the dtype of `like`."""
    scale = scale.to(like.dtype)
    return 1 + scale if zero_centered else scale


def as_rows(*tensors: Tensor | None) -> list[Any]:
    """Each as `rows_of` makes it."""
    return [None if x is None else rows_of(x) for x in tensors]


def row_stride(x: Tensor | None) -> int:
    """Elements from a row to the next."""
    return 0 if x is None else x.stride(0)


def dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each contiguous, as results of ops are."""
    return tuple(x.contiguous() for x in tensors)


def summed_rows(rows: Tensor) -> Tensor:
    """The sum over all dims but the last."""
    return rows.sum(list(range(rows.dim() - 1))) if rows.dim() > 1 else rows.clone()


def statistics(x: Tensor) -> Tensor:
    """An empty tensor with one number per row, in the dtype of `upcast`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[:-1], dtype=wide)
