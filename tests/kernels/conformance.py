"""The contract of every op: it is the function of its reference under all transforms.

Float64 on the CPU, where an op computes its reference: so what is tested is the registration, the
rules and the gradients. Kernels are compared with references elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from functron.ops.operations import Op

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


@dataclass(frozen=True, eq=False)
class Case:
    """An op and how to call it.

    Attributes:
        op: the op.
        plain: the function that it computes, in torch's operations that torch differentiates: of
            the same arguments, not reading statistics that depend on others of them.
        args: what both are called with; float64.
        moving: the positions of the arguments that are differentiated; of none, only values are
            compared.
        outputs: which outputs are compared and differentiated; None: all. Leave out statistics.
        twice: whether it has second derivatives.
    """

    op: Op
    plain: Callable
    args: tuple
    moving: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] | None = None
    twice: bool = True

    def __str__(self) -> str:
        return self.op.name

    def values(self, function: Callable) -> Callable:
        """`function` of the arguments `moving`, returning the compared outputs as a tuple."""

        def of_moving(*values: torch.Tensor) -> tuple:
            args: list[Any] = list(self.args)
            for position, value in zip(self.moving, values, strict=True):
                args[position] = value
            out = function(*args)
            out = out if isinstance(out, tuple) else (out,)
            return out if self.outputs is None else tuple(out[i] for i in self.outputs)

        return of_moving

    def scalar(self, function: Callable) -> Callable:
        """A scalar of the floating outputs, whose second derivative does not vanish."""
        of_moving = self.values(function)

        def total(*values: torch.Tensor) -> torch.Tensor:
            parts = [
                (weights(x) * x).sum() + x.square().sum()
                for x in of_moving(*values)
                if x.is_floating_point()
            ]
            return torch.stack(parts).sum()

        return total

    @property
    def operands(self) -> tuple:
        """The arguments `moving`."""
        return tuple(self.args[i] for i in self.moving)

    @property
    def argnums(self) -> tuple[int, ...]:
        """Of `values` and `scalar`."""
        return tuple(range(len(self.moving)))


def weights(x: torch.Tensor) -> torch.Tensor:
    """Numbers without a pattern, of x's own shape."""
    return torch.arange(x.numel(), dtype=x.dtype).mul(0.7).sin().view(x.shape)


def equal(got: Any, wanted: Any) -> None:
    """Assert that two tuples of tensors are equal to rounding."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, **TOLERANCE)


def values(case: Case) -> None:
    equal(case.values(case.op)(*case.operands), case.values(case.plain)(*case.operands))


def fakes(case: Case) -> None:
    """Shapes, strides and dtypes on fake tensors are those of real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = case.op(
            *[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in case.args]
        )
    real = case.op(*case.args)
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)
    for a, b in zip(as_tuple(fake), as_tuple(real), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def tape(case: Case) -> None:
    operands = [x.clone().requires_grad_() for x in case.operands]
    case.scalar(case.op)(*operands).backward()
    equal([x.grad for x in operands], grad(case.scalar(case.plain), case.argnums)(*case.operands))


def func_grad(case: Case) -> None:
    got, wanted = (
        grad(case.scalar(f), case.argnums)(*case.operands) for f in (case.op, case.plain)
    )
    equal(got, wanted)


def _stacked(case: Case) -> tuple:
    return tuple(torch.stack([x, x.flip(-1) * 0.5, x * 1.5]) for x in case.operands)


def _dims(case: Case) -> list[tuple]:
    """All operands mapped, and each alone."""
    n = len(case.moving)
    alone = [tuple(0 if i == j else None for j in range(n)) for i in range(n)] if n > 1 else []
    return [(0,) * n, *alone]


def _mapped_operands(case: Case, dims: tuple) -> tuple:
    pairs = zip(_stacked(case), case.operands, dims, strict=True)
    return tuple(x if dim is None else stacked for stacked, x, dim in pairs)


def mapped(case: Case) -> None:
    for dims in _dims(case):
        operands = _mapped_operands(case, dims)
        got, wanted = (vmap(case.values(f), dims)(*operands) for f in (case.op, case.plain))
        equal(got, wanted)


def mapped_twice(case: Case) -> None:
    """One operand mapped inside, all outside."""
    for dims in _dims(case)[1:] or [(0,)]:
        inner = lambda f, dims=dims: vmap(case.values(f), dims)
        operands = tuple(torch.stack([x, 2 * x]) for x in _mapped_operands(case, dims))
        equal(*(vmap(inner(f))(*operands) for f in (case.op, case.plain)))


def mapped_grad(case: Case) -> None:
    for dims in _dims(case):
        operands = _mapped_operands(case, dims)
        got, wanted = (
            vmap(grad(case.scalar(f), case.argnums), dims)(*operands) for f in (case.op, case.plain)
        )
        equal(got, wanted)


def grad_mapped(case: Case) -> None:
    for dims in _dims(case):
        operands = _mapped_operands(case, dims)

        def total(f, dims=dims):
            return lambda *xs: vmap(case.scalar(f), dims)(*xs).square().sum()

        got, wanted = (grad(total(f), case.argnums)(*operands) for f in (case.op, case.plain))
        equal(got, wanted)


def grad_grad(case: Case) -> None:
    def total(f):
        inner = grad(case.scalar(f), case.argnums)
        return lambda *xs: torch.stack([(weights(g) * g).sum() for g in inner(*xs)]).sum()

    if not case.twice:
        with pytest.raises(ValueError, match="no derivative"):
            grad(total(case.op), case.argnums)(*case.operands)
        return
    got, wanted = (grad(total(f), case.argnums)(*case.operands) for f in (case.op, case.plain))
    equal(got, wanted)


def jvp(case: Case) -> None:
    floats = lambda f: lambda *xs: tuple(x for x in case.values(f)(*xs) if x.is_floating_point())
    given = case.operands, tuple(weights(x) for x in case.operands)
    got, wanted = (torch.func.jvp(floats(f), *given)[1] for f in (case.op, case.plain))
    equal(got, wanted)
    stacked = tuple(torch.stack([x, x * 1.5]) for x in case.operands)
    push = lambda f: lambda *xs: torch.func.jvp(floats(f), xs, given[1])[1]
    got, wanted = (vmap(push(f))(*stacked) for f in (case.op, case.plain))
    equal(got, wanted)


def jvp_grad(case: Case) -> None:
    if not case.twice:
        return
    given = case.operands, tuple(weights(x) for x in case.operands)
    got, wanted = (
        torch.func.jvp(grad(case.scalar(f), case.argnums), *given)[1] for f in (case.op, case.plain)
    )
    equal(got, wanted)


def traced(case: Case) -> None:
    """make_fx keeps the op and its backward as single nodes, which compute the same."""
    tensors = [i for i, x in enumerate(case.args) if isinstance(x, torch.Tensor)]

    def f(*values):  # of all tensors, or fake ones would meet real ones
        args = list(case.args)
        for position, value in zip(tensors, values, strict=True):
            args[position] = value
        here = replace(case, args=tuple(args))
        return grad(here.scalar(here.op), here.argnums)(*here.operands)

    given = [case.args[i] for i in tensors]
    for mode in ("real", "fake"):
        graph = make_fx(f, tracing_mode=mode)(*given)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert f"functron.{case.op.name}.default" in names
    equal(graph(*given), f(*given))


def compiled(case: Case) -> None:
    """Inductor, whole graph, of values and of gradients.

    Cotangents are given, so that hardly anything but the op and its backward is compiled.
    """
    torch._dynamo.reset()

    def floats(function: Callable) -> Callable:
        of_moving = case.values(function)
        return lambda *xs: tuple(x for x in of_moving(*xs) if x.is_floating_point())

    def both(function: Callable) -> Callable:
        def pulled(xs: tuple, cotangents: tuple):
            out, pull = torch.func.vjp(floats(function), *xs)
            return case.values(function)(*xs), out, pull(cotangents)

        return pulled

    cotangents = tuple(weights(x) for x in floats(case.plain)(*case.operands))
    got = torch.compile(both(case.op), fullgraph=True)(case.operands, cotangents)
    for one, wanted in zip(got, both(case.plain)(case.operands, cotangents), strict=True):
        equal(one, wanted)


def compiled_tape(case: Case) -> None:
    """AOTAutograd splits forward from backward."""
    torch._dynamo.reset()
    operands = [x.clone().requires_grad_() for x in case.operands]
    torch.compile(case.scalar(case.op), fullgraph=True, backend="aot_eager")(*operands).backward()
    equal([x.grad for x in operands], grad(case.scalar(case.plain), case.argnums)(*case.operands))


CHECKS: Mapping[str, Callable[[Case], None]] = {
    check.__name__: check
    for check in (
        values, fakes, tape, func_grad, mapped, mapped_twice, mapped_grad, grad_mapped, grad_grad,
        jvp, jvp_grad, traced, compiled, compiled_tape,
    )
}  # fmt: skip
"""By name; those from `tape` on but `mapped` need derivatives."""

VALUES = ("values", "fakes", "mapped", "mapped_twice")
"""The checks of an op that has no derivative."""


def conform(cases: list[Case]) -> Any:
    """The decorator that makes ``test(case, check)`` run every check of every case.

    Inductor takes seconds, and compiles a backward op with the gradient of its forward op: not
    once more by itself.
    """
    pairs = [
        pytest.param(case, check, id=f"{case}-{name}")
        for case in cases
        for name, check in CHECKS.items()
        if case.op.differentiable or name in VALUES
        if name != "compiled" or not case.op.name.endswith("_backward")
    ]
    return pytest.mark.parametrize(("case", "check"), pairs)
