"""Operations that torch lacks, or has with other derivatives: JAX's names, arguments and rules.

Running sums, products, maxima, minima and logarithms of sums of exponentials along a dim keep their
dtype, run from either end, and have derivatives of any order and mode; those of ties are shared as
in JAX. Over mesh axes the same are `functron.lax.associative_scan`, and sums of ranks before this
one. `optimization_barrier` and `reduce_precision` say something to compilers and of numbers that no
operation of torch says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import public, raise_problems, refuse, tensor_problem
from functron.core.functions import Function
from functron.program.recorder import active, keeper
from functron.spmd.axes import user_line
from functron.transforms.associative_scan import associative_scan
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.remat import tie_all


@public
def cumsum(operand: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
    """y_k = x_0 + ... + x_k along dim `axis`; with `reverse` from the last one on.

    As `torch.cumsum`, but integers keep their dtype.

    >>> lax.cumsum(torch.tensor([1, 2, 3]), reverse=True)
    tensor([6, 5, 3])

    Raises:
        ValueError: there is no such dim.
        TypeError: the operand is no tensor, or bool.
    """
    dim = _check_running("cumsum", operand, axis)
    turned = operand.flip(dim) if reverse else operand
    out = torch.cumsum(turned, dim, dtype=operand.dtype)
    return out.flip(dim) if reverse else out


@public
def cumprod(operand: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
    """y_k = x_0 * ... * x_k along dim `axis`; with `reverse` from the last one on.

    As `torch.cumprod`, but integers keep their dtype, and derivatives read no numbers: with zeros
    among the factors they are exact, in programs that are traced too.

    >>> lax.cumprod(torch.tensor([1, 2, 3]), reverse=True)
    tensor([6, 6, 3])

    Raises:
        ValueError: there is no such dim.
        TypeError: the operand is no tensor, or bool.
    """
    return _run_along("cumprod", torch.mul, operand, axis, reverse)


@public
def cummax(operand: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
    """y_k = max(x_0, ..., x_k) along dim `axis`; with `reverse` from the last one on.

    Values alone, where `torch.cummax` has indices too, and gives the last of equal elements all of
    the cotangent; here each pair of equal ones that meet shares it, as of JAX's.

    >>> lax.cummax(torch.tensor([1, 3, 2]))
    tensor([1, 3, 3])

    Raises:
        ValueError: there is no such dim.
        TypeError: the operand is no tensor, or bool or complex.
    """
    return _run_along("cummax", torch.maximum, operand, axis, reverse, ordered=True)


@public
def cummin(operand: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
    """y_k = min(x_0, ..., x_k) along dim `axis`; with `reverse` from the last one on.

    >>> lax.cummin(torch.tensor([2, 3, 1]))
    tensor([2, 2, 1])

    Raises:
        ValueError, TypeError: as `cummax`.
    """
    return _run_along("cummin", torch.minimum, operand, axis, reverse, ordered=True)


@public
def cumlogsumexp(operand: torch.Tensor, axis: int = 0, reverse: bool = False) -> torch.Tensor:
    """y_k = log(exp(x_0) + ... + exp(x_k)) along dim `axis`; with `reverse` from the last one on.

    Derivatives are zero where all elements are -inf, which a mask makes.

    >>> lax.cumlogsumexp(torch.zeros(3)).exp()
    tensor([1., 2., 3.])

    Raises:
        ValueError: there is no such dim.
        TypeError: the operand is no tensor, or not floating point.
    """
    _check_float("cumlogsumexp", operand)
    return _run_along("cumlogsumexp", _add_exponentials, operand, axis, reverse)


def _add_exponentials(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)), of which -inf twice has the derivative zero."""
    top = torch.maximum(a, b).detach()
    top = torch.where(top.isfinite(), top, 0.0)
    total = torch.exp(a - top) + torch.exp(b - top)
    some = total != 0
    found = torch.log(torch.where(some, total, 1.0)) + top
    return torch.where(some, found, -torch.inf)


def _run_along(
    name: str,
    combine: Callable,
    operand: torch.Tensor,
    axis: int,
    reverse: bool,
    *,
    ordered: bool = False,
) -> torch.Tensor:
    dim = _check_running(name, operand, axis)
    if ordered and operand.is_complex():
        refuse(_title(name), "operand", operand.dtype, "a dtype with an order", "", TypeError)
    return associative_scan(combine, operand, reverse, dim)


def _check_running(name: str, operand: torch.Tensor, axis: int) -> int:
    """The dim, counted from the first one."""
    if not isinstance(operand, torch.Tensor):
        raise_problems(_title(name), [tensor_problem("operand", operand)], TypeError)
    if operand.dtype == torch.bool:
        refuse(_title(name), "operand", "bool", "numbers", "x.to(torch.int32)", TypeError)
    num = operand.dim()
    if isinstance(axis, bool) or not -num <= axis < num:
        wanted = f"{-num} to {num - 1}" if num else "an operand with dims"
        fix = 'over ranks of a mesh axis: lax.associative_scan(..., axis="cp")'
        shape = tuple(operand.shape)
        refuse(_title(name), "axis", axis, f"{wanted}, as operand has shape {shape}", fix)
    return axis % num


def _check_float(name: str, operand: torch.Tensor) -> None:
    if not isinstance(operand, torch.Tensor):
        raise_problems(_title(name), [tensor_problem("operand", operand)], TypeError)
    if not operand.is_floating_point():
        fix = f"x.to({torch.get_default_dtype()})"
        refuse(_title(name), "operand", operand.dtype, "a floating-point dtype", fix, TypeError)


@public
def clamp(
    min: torch.Tensor | float,  # noqa: A002  (as jax.lax.clamp)
    x: torch.Tensor,
    max: torch.Tensor | float,  # noqa: A002
) -> torch.Tensor:
    """y = min where x < min, max where x > max, else x, element by element.

    As `torch.clamp`, but for derivatives, which are JAX's: an element that equals a limit has none,
    where torch's has all of it; and limits have theirs.

    >>> lax.clamp(0.0, torch.tensor([-1.0, 0.5, 2.0]), 1.0)
    tensor([0.0000, 0.5000, 1.0000])
    >>> ft.grad(lambda x: lax.clamp(0.0, x, 1.0).sum())(torch.tensor([-1.0, 0.5, 1.0]))
    tensor([0., 1., 0.])

    Args:
        min, max: numbers, or tensors of the dtype of x that are 0-dim or of its shape. Where they
            are not in order the result is `max`. NaN gives NaN.

    Raises:
        ValueError: a limit has another shape.
        TypeError: x is no tensor, or bool or complex, or a limit has another dtype.
    """
    title = _title("clamp")
    if not isinstance(x, torch.Tensor):
        raise_problems(title, [tensor_problem("x", x)], TypeError)
    if x.dtype == torch.bool or x.is_complex():
        refuse(title, "x", x.dtype, "a dtype with an order", "torch.where", TypeError)
    low, high = _as_limit("min", min, x), _as_limit("max", max, x)
    in_order = low <= high
    out = torch.clamp(x, low, high).detach()
    out = torch.where((high < x) & in_order, high, out)
    out = torch.where((low > x) & in_order, low, out)
    out = torch.where((low < x) & (x < high), x, out)
    return torch.where(low > high, high, out)


def _as_limit(name: str, limit: Any, x: torch.Tensor) -> torch.Tensor:
    title, wanted = _title("clamp"), f"a number, or a tensor of {x.dtype}, as x is"
    if not isinstance(limit, torch.Tensor):
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            refuse(title, name, repr(limit), wanted, "", TypeError)
        if isinstance(limit, float) and not x.is_floating_point():
            refuse(title, name, repr(limit), f"an int, as x is {x.dtype}", "int(...)", TypeError)
        return torch.full((), limit, dtype=x.dtype, device=x.device)
    if limit.dtype != x.dtype:
        refuse(title, name, str(limit.dtype), wanted, f"{name}.to({x.dtype})", TypeError)
    if limit.dim() and limit.shape != x.shape:
        wanted = f"(), or {tuple(x.shape)}, as x has"
        refuse(title, name, f"shape {tuple(limit.shape)}", wanted, f"{name}.expand(x.shape)")
    return limit


# --- precision

_PARTS = {  # of floating-point dtypes: integers of their size, exponent bits, mantissa bits
    torch.float16: (torch.int16, 5, 10),
    torch.bfloat16: (torch.int16, 8, 7),
    torch.float32: (torch.int32, 8, 23),
    torch.float64: (torch.int64, 11, 52),
}


@public
def reduce_precision(operand: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """y = x rounded to a format with so many bits of exponent and mantissa, in the dtype of x.

    To the nearest, ties to even. Numbers above the format's largest become infinite, those below
    its smallest normal one zero; the derivative is rounded as well. bfloat16 is (8, 7), float16
    (5, 10), of which it has no subnormal numbers here.

    >>> lax.reduce_precision(torch.tensor([1.1, 1e30, 1e-30]), 5, 2)
    tensor([1., inf, 0.])

    Raises:
        ValueError: `exponent_bits` is less than 1, or `mantissa_bits` than 0.
        TypeError: the operand is not floating point, or has 8 bits.
    """
    name = "reduce_precision"
    _check_float(name, operand)
    if operand.dtype not in _PARTS:
        wanted = ", ".join(str(dtype) for dtype in _PARTS)
        refuse(_title(name), "operand", operand.dtype, wanted, "x.to(torch.float32)", TypeError)
    for label, bits, least in (("exponent", exponent_bits, 1), ("mantissa", mantissa_bits, 0)):
        if bits < least:
            refuse(_title(name), f"{label}_bits", bits, f"at least {least}")
    reduce = functools.partial(_round_bits, exponent_bits, mantissa_bits)

    def again(x: torch.Tensor) -> torch.Tensor:
        return reduced(x) if keeper() is None else reduce(x)

    def rule(args: tuple, tangents: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        return again(*args), again(*tangents)

    pair = (lambda x: (again(x), None)), (lambda _, cotangent: (again(cotangent),))
    reduced = custom_vjp(reduce, *pair, rule)
    return reduced(operand)


def _round_bits(exponent_bits: int, mantissa_bits: int, x: torch.Tensor) -> torch.Tensor:
    integer, own_exponent, own_mantissa = _PARTS[x.dtype]
    magnitude = x.abs().view(integer)
    if mantissa_bits < own_mantissa:
        lost = own_mantissa - mantissa_bits
        odd = (magnitude >> lost) & 1
        magnitude = ((magnitude + ((1 << (lost - 1)) - 1) + odd) >> lost) << lost
    out = magnitude.view(x.dtype)
    if exponent_bits < own_exponent:
        top = (1 << (exponent_bits - 1)) - 1  # the exponent of the largest numbers
        smallest, above = 2.0 ** (1 - top), 2.0 ** (top + 1)
        out = torch.where(out < smallest, 0.0, torch.where(out >= above, torch.inf, out))
    return torch.where(x.isnan(), x, torch.copysign(out, x))


# --- barriers


@public
def optimization_barrier(operand: tree.Tree) -> tree.Tree:
    """y = x, of a tree of tensors, none of which compilers compute before all of x are there.

    What is computed of y is not merged with what is computed of x, nor moved before it. So are
    tangents and cotangents. In a program that is traced, and where nothing is compiled, it is a
    copy of each tensor.

    >>> lax.optimization_barrier({"a": torch.tensor(1.0), "b": torch.tensor(2)})
    {'a': tensor(1.), 'b': tensor(2)}

    Raises:
        TypeError: a leaf is no tensor.
    """
    leaves, structure = tree.flatten(operand)
    rows = zip(tree.paths(operand), leaves, strict=True)
    wrong = [
        tensor_problem(at or "operand", x) for at, x in rows if not isinstance(x, torch.Tensor)
    ]
    raise_problems(_title("optimization_barrier"), wrong, TypeError)
    if not leaves:
        return operand
    made: Any = _Barrier.apply(*leaves)
    return tree.unflatten(structure, made)


class _Barrier(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(*values):
        return tuple(x.clone() for x in values) if active() is None else tie_all(values)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*(x for x in output if not _moves(x)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return _hold_back(cotangents)

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        return _hold_back(tangents)

    @staticmethod
    def vmap(info, in_dims, *values):
        return _Barrier.apply(*values), in_dims


def _moves(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _hold_back(values: Any) -> tuple:
    """A barrier of those that are there."""
    given = [x for x in values if x is not None]
    made: Any = iter(_Barrier.apply(*given) if given else ())
    return tuple(None if x is None else next(made) for x in values)


def _title(name: str) -> str:
    return f"{name} at {user_line()}"
