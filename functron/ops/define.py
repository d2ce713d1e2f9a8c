"""Operations of functron's own: registered with torch once, differentiable and mappable everywhere.

An op is an entry of ``torch.ops.functron``: on the CPU it computes its reference, on CUDA its
kernel, on fake tensors shapes. What makes it differentiable is an autograd Function around that
entry, with a vmap rule of its own and kept whole by dynamo; its backward calls another op of this
kind. So one definition works on the tape, under torch.func in any order of grad and vmap, in traced
programs and in compiled ones.

Rejected: ``torch.library.register_autograd``, whose Function refuses torch.func.grad (2.11 to
2.13); and a Function alone over an entry without derivatives, which gives zero gradients, silently,
in torch.compile(torch.func.grad).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch.autograd import Function

from functron import compat
from functron.ops.launch import cuda

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_NO_DEFINES: Mapping[str, str] = MappingProxyType({})

Argument = torch.Tensor | int | float | None


@runtime_checkable  # the tests check annotations
class Launch(Protocol):
    """Runs a kernel: `functron.ops.launch.cuda` on a GPU, in tests an emulator of one."""

    def __call__(
        self,
        source: str,
        kernel: str,
        grid: int | Sequence[int],
        block: int,
        *args: Argument,
        defines: Mapping[str, str] = _NO_DEFINES,
        shared_bytes: int = 0,
    ) -> None:
        """Run ``kernel`` of ``kernels/<source>.cu`` on the tensors' device and current stream.

        Args:
            source: the file's name.
            kernel: the function's.
            grid: blocks; where it is empty, nothing runs.
            block: threads of a block.
            args: tensors are pointers, None a null pointer, integers ``long long``, numbers float.
            defines: the macros that it is compiled with.
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
        save: ``(args, outputs)``, tuples both, to what backward needs: tensors, numbers, None.
        backward: ``(saved, cotangents)``, one per output, zeros where there is none, to one
            cotangent per argument, None for those without. It may call ops, and must be linear.
        auxiliary: the outputs, by position, that have no derivative (statistics that only backward
            reads); integer ones never have.
    """

    save: Callable[[tuple, tuple], Sequence[Any]]
    backward: Callable[[Sequence[Any], tuple[torch.Tensor, ...]], Sequence[torch.Tensor | None]]
    auxiliary: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Op:
    """A registered operation; `define` makes it. Calling it computes it.

    Attributes:
        name: in ``torch.ops.functron``.
        raw: that entry, which knows no derivatives.
        reference: computes it in torch's operations.
        kernel: its host code, ``(launch, *args)``.
        differentiable: whether it has a gradient.
    """

    name: str
    raw: Any
    reference: Callable
    kernel: Callable
    differentiable: bool
    _call: Callable

    def __call__(self, *args: Any) -> Any:
        """The result or results, on the device of the operands."""
        return self._call(*args)


def define(
    schema: str,
    *,
    reference: Callable,
    kernel: Callable,
    fake: Callable,
    batch: Callable | None = None,
    gradient: Gradient | Callable | None = None,
) -> Op:
    """Register the op of this schema.

    Args:
        schema: as torch writes it, ``"name(Tensor x, float eps) -> (Tensor, Tensor)"``. Names that
            end in ``_`` write to their operands (``Tensor(a!) x``): they are called on plain
            tensors, and have neither gradient nor vmap rule.
        reference: ``(*args)`` in torch's operations, on any device and floating dtype; results are
            no views of operands.
        kernel: ``(launch, *args)``: makes results and calls `launch`, a `Launch`.
        fake: ``(*args)`` to empty results of the same shapes, strides, dtypes and device.
        batch: ``(size, in_dims, args, op) -> (results, out_dims)``: the op mapped over dims of its
            arguments (None where one has none), by calling `op`, which takes what this op takes.
        gradient: of reverse mode. A function of the same arguments stands for what torch makes of
            it: the reference itself, or a formula that computes again the statistics which the op
            is passed (a derivative in their direction would be lost: they are auxiliary). None
            refuses.
    """
    name = schema.split("(")[0].split(".")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, functools.partial(kernel, cuda), "CUDA")
    torch.library.register_fake(f"functron::{name}", fake, lib=_LIBRARY)
    raw = getattr(torch.ops.functron, name).default
    if name.endswith("_"):
        assert (batch, gradient) == (None, None), f"{name} writes to its operands"
        in_place = functools.partial(_call_in_place, name, raw)
        return Op(name, raw, reference, kernel, False, in_place)
    assert batch is not None, f"{name} needs a vmap rule"
    function = _function(name, raw, batch, gradient)
    torch.library.register_vmap(f"functron::{name}", _rule(batch, raw), lib=_LIBRARY)

    def call(*args: Any) -> Any:
        return function.apply(*args)

    # dynamo would look inside, and see an entry without derivatives
    compat.allow_in_graph(call)
    return Op(name, raw, reference, kernel, gradient is not None, call)


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


def _function(name: str, raw: Any, batch: Callable, gradient: Gradient | Callable | None) -> Any:
    """The autograd Function around an entry."""
    rule = _of_formula(gradient) if callable(gradient) else gradient

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
                _keep(ctx, rule.save(inputs, outputs))

        @staticmethod
        def backward(ctx, *cotangents) -> Any:
            if rule is None:
                raise ValueError(
                    f"functron::{name} has no derivative; "
                    'fix: pass kernels=functron.ops.use("reference") where higher ones are wanted'
                )
            grads = tuple(rule.backward(_kept(ctx), cotangents))
            assert len(grads) == ctx.num_inputs, name
            return grads

        @staticmethod
        def jvp(ctx, *tangents) -> Any:
            raise ValueError(
                f"got forward-mode differentiation (jvp, jacfwd, hessian) of functron::{name}; "
                'wanted reverse mode; fix: pass kernels=functron.ops.use("reference"), which has '
                "both"
            )

        @staticmethod
        def vmap(info, in_dims, *args) -> Any:
            return batch(info.batch_size, in_dims, args, Node.apply)

    Node.__name__ = Node.__qualname__ = "".join(part.title() for part in name.split("_"))
    return Node


def _without_derivative(ctx: Any, rule: Gradient | None, outputs: tuple) -> None:
    auxiliary = rule.auxiliary if rule is not None else ()
    ctx.mark_non_differentiable(
        *[x for i, x in enumerate(outputs) if i in auxiliary or not x.is_floating_point()]
    )


def _keep(ctx: Any, values: Sequence[Any]) -> None:
    tensors = [isinstance(value, torch.Tensor) for value in values]
    ctx.static = [None if is_one else v for v, is_one in zip(values, tensors, strict=True)]
    ctx.are_tensors = tensors
    ctx.save_for_backward(*[v for v, is_one in zip(values, tensors, strict=True) if is_one])


def _kept(ctx: Any) -> list:
    # the levels of torch.func that made them may have returned since
    saved = iter(map(compat.unwrap_if_dead, ctx.saved_tensors))
    return [
        next(saved) if is_one else value
        for value, is_one in zip(ctx.static, ctx.are_tensors, strict=True)
    ]


def _of_formula(formula: Any) -> Gradient:
    """The gradient that torch gives of a function in its operations."""

    def backward(saved: Sequence[Any], cotangents: tuple) -> list:
        moving = [
            i for i, x in enumerate(saved) if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]

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

    return Gradient(save=lambda args, outputs: args, backward=backward)
