"""Autograd Functions that cost less under torch.func's transforms, and push forward mode on.

With `functron.core.compat` the only module that relies on private names of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch._C._functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import VmapInfo, wrap_outputs_maintaining_identity
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from functron.core.compat import level_of, transform_names, transforms_active, unwrap_if_dead

_INEXACT = frozenset(
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and (each.is_floating_point or each.is_complex)
)
"""The dtypes of tensors that have derivatives."""


class Function(torch.autograd.Function):
    """`torch.autograd.Function` whose `apply` costs less.

    torch binds the arguments of every call to the signature of `forward`, which is read once here:
    that takes longer than a small operation. And at each level of vmap or grad torch dispatches
    calls through an operator, flattens operands and results as trees, and at each level of grad
    makes a class: `_apply_mapped` and `_apply_differentiated` do without.

    At a level of forward mode torch runs `jvp` with forward mode switched off, so that derivatives
    of it in forward mode are silently zero (2.11 to 2.13); `_apply_pushed` runs it below the level,
    where it is computed as anything else is. `push` may do what `forward` and `jvp` do at once.
    """

    _num_operands: int | None  # of `forward`; None: any number
    _single_level: type  # for a level of grad

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        forward = vars(cls).get("forward")
        if isinstance(forward, (staticmethod, classmethod)):
            function: Any = forward.__func__
            function.__signature__ = inspect.signature(function)
        taken = inspect.signature(cls.forward).parameters.values()
        several = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in taken)
        cls._num_operands = None if several else len(taken)
        cls._single_level = _single_level(cls)

    @classmethod
    def apply(cls, *operands: Any, **named: Any) -> Any:
        """The results of `forward`, differentiated and mapped by the other methods."""
        if not transforms_active():
            if len(operands) == cls._num_operands and not named:  # nothing to bind
                above: Any = super(torch.autograd.Function, cls)
                return above.apply(*unwrap_dead_wrappers(operands))
        elif _is_plain(cls, operands, named):
            kind = functorch.peek_interpreter_stack().key()
            if kind == TransformType.Jvp:
                return _apply_pushed(cls, retrieve_current_functorch_interpreter(), operands)
            if torch._C._len_torch_function_stack() and "jvp" not in transform_names():
                return super().apply(*operands)
            if kind == TransformType.Grad:
                return _apply_differentiated(
                    cls, retrieve_current_functorch_interpreter(), operands
                )
            if kind == TransformType.Vmap and not cls.generate_vmap_rule:
                return _apply_mapped(cls, retrieve_current_functorch_interpreter(), operands)
        elif functorch.peek_interpreter_stack().key() == TransformType.Jvp:
            _refuse_nested_jvp()
        return super().apply(*operands, **named)

    @classmethod
    def push(cls, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """The results of `forward`, and their tangents: None where there is none.

        Args:
            primals: the operands.
            tangents: one for each operand; None of those that have none.
        """
        out = cls.apply(*primals)
        ctx = _PushContext(tuple(x is not None for x in tangents))
        cls.setup_context(ctx, tuple(primals), out)
        if ctx.materializes:
            tangents = [
                torch.zeros_like(x)
                if t is None and isinstance(x, torch.Tensor) and x.dtype in _INEXACT
                else t
                for x, t in zip(primals, tangents, strict=True)
            ]
        return out, cls.jvp(ctx, *tangents)


def _is_plain(cls: type[Function], operands: tuple, named: dict[str, Any]) -> bool:
    """Whether a call has all operands in order, and no containers among them."""
    return (
        not named
        and cls._num_operands in (None, len(operands))
        and not any(
            type(x) in pytree.SUPPORTED_NODES or isinstance(x, tuple)
            for x in operands
            if not isinstance(x, torch.Tensor)
        )
    )


def _apply_differentiated(cls: type[Function], interpreter: Any, operands: tuple) -> Any:
    """``cls.apply(*operands)`` at a level of grad, as torch's custom_function_call_grad."""
    lift = interpreter._cptr.lift
    given = (lift(unwrap_if_dead(x)) if isinstance(x, torch.Tensor) else x for x in operands)
    with enable_single_level_autograd_function():
        return cls._single_level.apply(*given)


def _single_level(cls: type[Function]) -> type:
    """The function that a level of grad tapes for `cls`, as torch's generate_single_level_function.

    torch makes one for every call, which has the level; here its forward looks which is running.
    """

    def forward(*operands: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        given = [
            functorch._unwrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x
            for x in operands
        ]
        # the tape of this level has turned off all others
        with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
            output = cls.apply(*given)

        def wrapped(value: torch.Tensor) -> torch.Tensor:
            return functorch._wrap_for_grad(value, level)

        if isinstance(output, torch.Tensor):
            same = [x for x, own in zip(operands, given, strict=True) if own is output]
            return same[0] if same else wrapped(output)
        return wrap_outputs_maintaining_identity(output, given, operands, wrapped)

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, *cotangents: cls.backward(ctx, *cotangents)),
        "jvp": staticmethod(lambda ctx, *tangents: cls.jvp(ctx, *tangents)),
        "setup_context": staticmethod(lambda ctx, given, out: cls.setup_context(ctx, given, out)),
    }
    return type(f"{cls.__name__}Generated", (_SingleLevelFunction,), methods)


def _apply_mapped(cls: type[Function], interpreter: Any, operands: tuple) -> Any:
    """``cls.apply(*operands)`` at a level of vmap, as torch's custom_function_call_vmap_helper."""
    level, given, dims = interpreter.level(), [], []
    for x in operands:
        dim = None
        if isinstance(x, torch.Tensor):
            x, dim = functorch._unwrap_batched(unwrap_if_dead(x), level)
        given.append(x)
        dims.append(dim)
    if all(dim is None for dim in dims):
        with interpreter.lower():
            return cls.apply(*given)
    info = VmapInfo(interpreter.batch_size(), interpreter.randomness())
    with interpreter.lower():
        output, out_dims = cls.vmap(info, tuple(dims), *given)

    def wrapped(value: torch.Tensor, dim: int | None) -> torch.Tensor:
        return value if dim is None else functorch._add_batch_dim(value, dim, level)

    if isinstance(output, torch.Tensor) and (out_dims is None or isinstance(out_dims, int)):
        same = [x for x, own in zip(operands, given, strict=True) if own is output]
        return same[0] if same else wrapped(output, out_dims)
    return wrap_outputs_maintaining_identity(output, given, operands, wrapped, out_dims=out_dims)


def _apply_pushed(cls: type[Function], interpreter: Any, operands: tuple) -> Any:
    """``cls.apply(*operands)`` at a level of forward mode."""
    level, primals, tangents = interpreter.level(), [], []
    for x in operands:
        tangent = None
        if isinstance(x, torch.Tensor):
            x = unwrap_if_dead(x)
            if level_of(x) == level:
                x, tangent = (
                    value if value is None else functorch._unwrap_for_grad(value, level)
                    for value in forward_ad.unpack_dual(x, level=0)
                )
        primals.append(x)
        tangents.append(tangent)
    if all(tangent is None for tangent in tangents):
        with interpreter.lower():
            return cls.apply(*primals)
    with interpreter.lower():
        out, moved = cls.push(primals, tangents)

    def dual(value: Any, tangent: Any) -> Any:
        return value if tangent is None else forward_ad.make_dual(value, tangent, level=0)

    if not isinstance(out, tuple):
        return dual(out, moved)
    rows = moved if isinstance(moved, tuple) else (moved,) * len(out)
    return tuple(dual(*row) for row in zip(out, rows, strict=True))


class _PushContext:
    """The context in which `Function.setup_context` keeps values for `jvp`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad, self.materializes = needs_input_grad, True
        self.saved_tensors: tuple = ()

    def save_for_forward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    def mark_non_differentiable(self, *outputs: Any) -> None:
        pass


def _refuse_nested_jvp() -> None:
    """Raise where forward mode runs inside forward mode, and torch applies an autograd Function."""
    if transform_names().count("jvp") > 1:
        raise ValueError(
            "got forward-mode differentiation of forward-mode differentiation (jvp of jvp, jacfwd "
            "of jacfwd), for which torch's autograd Functions give wrong numbers; wanted at most "
            "one of the two forward; fix: use torch.func.grad, vjp or jacrev for one of them "
            "(hessian is jacfwd of jacrev)"
        )
