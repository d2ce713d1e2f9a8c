"""Gated activations, hidden = act(gate) * up (Shazeer 2020): ``kernels/glu.cu``.

Gate and up are tensors of their own, `GLU`, or halves of one, `GLU_PACKED`, whose gradient is then
made as one as well. Autograd of the plain formula keeps act(gate) beside both and reads them thrice
in backward; this keeps gate and up alone, and computes act(gate) again. The product that follows
would keep hidden, a third of what an MLP keeps; `glu_linear` computes that again too, in the pass
that makes the gradients of gate and up. As this reads the cotangent, no compiler takes the second
computation for the first one.

Rows of experts lie in room for the most that there can be. `count`, of every op here, says how many
are real: kernels leave the others as they find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functron.core import compat
from functron.core.errors import nearest
from functron.core.typing import Float, Int, Tensor
from functron.ops.grouped_matmul import grouped_matmul, grouped_matmul_weight
from functron.ops.operations import (
    PACK_BYTES,
    Gradient,
    Launch,
    check_columns,
    define,
    of_rows,
    packable,
    rows_of,
    type_name,
    upcast,
)
from functron.transforms.custom_vjp import custom_vjp

GLU_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
"""In the order by which kernels number them. The last is (u + 1) g sigmoid(1.702 g) of g =
min(gate, 7) and u = up within [-7, 7] (GPT-OSS)."""

_LIMIT, _SLOPE = 7.0, 1.702
_THREADS = 256
_GRID = (2**31 - 1, 65535)
_REST = "str activation, Tensor? count=None"


def _number(activation: str) -> int:
    if activation not in GLU_ACTIVATIONS:
        known = nearest(activation, GLU_ACTIVATIONS)
        raise ValueError(f"glu: got activation {activation!r}; {known}")
    return GLU_ACTIVATIONS.index(activation)


def _launch(
    launch: Launch,
    kernel: str,
    tensors: Sequence[Any],
    rest: Sequence[int],
    kind: str,
    count: Tensor | None,
) -> None:
    """Run a kernel on rows: of `tensors` the first has the shape, all decide on packs."""
    rows, dim = tensors[0].shape
    check_columns(dim, "glu")
    packed = packable(dim, *tensors)
    places = -(-dim * tensors[0].element_size() // PACK_BYTES) if packed else dim
    lanes = min(_THREADS, max(32, 1 << (places - 1).bit_length()))
    grid = -(-rows * lanes // _THREADS), -(-places // lanes)
    launch(
        "glu", kernel, tuple(map(min, grid, _GRID)), _THREADS,
        *tensors, rows, dim, *rest, lanes, _number(kind), int(packed), count,
        defines={"ELEMENT": type_name(tensors[0], "glu")},
    )  # fmt: skip


def _kernel(
    launch: Launch, gate: Tensor, up: Tensor, activation: str, count: Tensor | None = None
) -> Tensor:
    hidden = gate.new_empty(gate.shape)
    if gate.numel():
        gate, up = rows_of(gate), rows_of(up)
        strides = gate.stride(0), up.stride(0)
        tensors = gate, up, hidden.view(gate.shape)
        _launch(launch, "glu_forward", tensors, strides, activation, count)
    return hidden


def _backward_into(
    launch: Launch,
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    out: Sequence[Tensor],
    kind: str,
    count: Tensor | None,
    hidden: Tensor | None = None,
) -> None:
    """The gradients of gate and up, to rows `out` of one stride; and to `hidden` what it is."""
    d_hidden, gate, up = (rows_of(x) for x in (d_hidden, gate, up))
    tensors = d_hidden, gate, up, *out, hidden
    strides = [x.stride(0) for x in (d_hidden, gate, up, *out[:1])]
    _launch(launch, "glu_backward", tensors, strides, kind, count)


def _backward_kernel(
    launch: Launch,
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if gate.numel():
        flat = [rows_of(x) for x in out]
        _backward_into(launch, d_hidden, gate, up, flat, activation, count)
    return out


def _packed_again_kernel(
    launch: Launch, d_hidden: Tensor, gate_up: Tensor, activation: str, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, hidden = gate_up.new_empty(gate_up.shape), gate_up.new_empty(d_hidden.shape)
    if out.numel():
        into = rows_of(out).chunk(2, -1)
        _backward_into(
            launch, d_hidden, *_halves(gate_up), into, activation, count, rows_of(hidden)
        )
    return out, hidden


def _again_kernel(
    launch: Launch,
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    out = gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if gate.numel():
        *flat, hidden = (rows_of(x) for x in out)
        _backward_into(launch, d_hidden, gate, up, flat, activation, count, hidden)
    return out


def _packed_backward_kernel(
    launch: Launch, d_hidden: Tensor, gate_up: Tensor, activation: str, count: Tensor | None = None
) -> Tensor:
    out = gate_up.new_empty(gate_up.shape)
    if out.numel():
        halves = rows_of(out).chunk(2, -1)
        _backward_into(launch, d_hidden, *_halves(gate_up), halves, activation, count)
    return out


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"glu_packed: got {size} columns; wanted gate's, then as many of up")
    gate, up = x.split(size // 2, -1)  # whose gradients are joined in one go
    return gate, up


def _act(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) and act'(gate)."""
    match GLU_ACTIVATIONS[_number(activation)]:
        case "silu":
            return _swish(gate, 1.0)
        case "gelu":
            below = 0.5 + 0.5 * torch.erf(gate * math.sqrt(0.5))
            density = torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
            return gate * below, below + gate * density
        case "gelu_tanh":
            factor, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
            s = torch.sigmoid(factor * gate * (1 + cubic * gate * gate))
            inner = factor * (1 + 3 * cubic * gate * gate)
            return gate * s, s + gate * s * (1 - s) * inner
        case "relu":
            return torch.relu(gate), (gate > 0).to(gate.dtype)
        case "relu2":
            return torch.relu(gate).square(), 2 * torch.relu(gate)
        case _:
            value, slope = _swish(gate.clamp(max=_LIMIT), _SLOPE)
            return value, slope * (gate <= _LIMIT)


def _swish(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(scale * x)
    return x * s, s + scale * x * s * (1 - s)


def _lift(up: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """The factor of act(gate), and its derivative."""
    if activation != "clamped_swiglu":
        return up, 1.0
    return up.clamp(-_LIMIT, _LIMIT) + 1, (up.abs() <= _LIMIT).to(up.dtype)


def _reference(gate: Tensor, up: Tensor, activation: str, count: Tensor | None = None) -> Tensor:
    lifted, _ = _lift(upcast(up), activation)
    return (_act(upcast(gate), activation)[0] * lifted).to(gate.dtype).contiguous()


def _backward(
    d_hidden: Tensor, gate: Tensor, up: Tensor, activation: str, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    wide = upcast(d_hidden)
    value, slope = _act(upcast(gate), activation)
    lifted, lift_slope = _lift(upcast(up), activation)
    d_gate, d_up = wide * lifted * slope, wide * value * lift_slope
    return d_gate.to(gate.dtype).contiguous(), d_up.to(up.dtype).contiguous()


def _again(
    d_hidden: Tensor, gate: Tensor, up: Tensor, activation: str, count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return *_backward(d_hidden, gate, up, activation), _reference(gate, up, activation)


def _packed_again(
    d_hidden: Tensor, gate_up: Tensor, activation: str, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    *both, hidden = _again(d_hidden, *_halves(gate_up), activation)
    return torch.cat(both, -1), hidden


def _packed_backward(
    d_hidden: Tensor, gate_up: Tensor, activation: str, count: Tensor | None = None
) -> Tensor:
    return torch.cat(_backward(d_hidden, *_halves(gate_up), activation), -1)


def _of_rows(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
    """The rule of rows: of joined ones the real ones do not come first, so all are computed."""
    kept = [
        (x, dim)
        for x, dim in zip(args, in_dims, strict=True)
        if not isinstance(x, torch.Tensor) or x.is_floating_point()
    ]
    args, in_dims = zip(*kept, strict=True)
    return of_rows(whole=())(size, in_dims, args, op)


GLU_BACKWARD = define(
    f"glu_backward(Tensor d_hidden, Tensor gate, Tensor up, {_REST}) -> (Tensor, Tensor)",
    kernel=_backward_kernel,
    reference=_backward,
    fake=lambda d_hidden, gate, *rest: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    batch=_of_rows,
    gradient=_backward,
)
"""(d_gate, d_up) = d_hidden (up act'(gate), act(gate))."""

GLU_BACKWARD_AGAIN = define(
    f"glu_backward_again(Tensor d_hidden, Tensor gate, Tensor up, {_REST}) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_again_kernel,
    reference=_again,
    fake=lambda d_hidden, gate, *rest: tuple(gate.new_empty(gate.shape) for _ in range(3)),
    batch=_of_rows,
    gradient=_again,
)
"""(d_gate, d_up, hidden): `GLU_BACKWARD`, and `GLU` again."""

GLU = define(
    f"glu(Tensor gate, Tensor up, {_REST}) -> Tensor",
    kernel=_kernel,
    reference=_reference,
    fake=lambda gate, *rest: gate.new_empty(gate.shape),
    batch=_of_rows,
    gradient=Gradient(
        backward=lambda saved, given: (*GLU_BACKWARD(given[0], *saved), *[None] * (len(saved) - 2)),
    ),
)
"""act(gate) * up of tensors ``[..., dim]`` of one shape and dtype; see `GLU_ACTIVATIONS`."""

GLU_PACKED_BACKWARD = define(
    f"glu_packed_backward(Tensor d_hidden, Tensor gate_up, {_REST}) -> Tensor",
    kernel=_packed_backward_kernel,
    reference=_packed_backward,
    fake=lambda d_hidden, gate_up, *rest: gate_up.new_empty(gate_up.shape),
    batch=_of_rows,
    gradient=_packed_backward,
)
"""`GLU_BACKWARD`, both side by side."""

GLU_PACKED_BACKWARD_AGAIN = define(
    f"glu_packed_backward_again(Tensor d_hidden, Tensor gate_up, {_REST}) -> (Tensor, Tensor)",
    kernel=_packed_again_kernel,
    reference=_packed_again,
    fake=lambda d_hidden, gate_up, *rest: (
        gate_up.new_empty(gate_up.shape),
        gate_up.new_empty(d_hidden.shape),
    ),
    batch=_of_rows,
    gradient=_packed_again,
)
"""`GLU_BACKWARD_AGAIN`, the gradients side by side."""

GLU_PACKED = define(
    f"glu_packed(Tensor gate_up, {_REST}) -> Tensor",
    kernel=lambda launch, x, *rest: _kernel(launch, *_halves(x), *rest),
    reference=lambda x, *rest: _reference(*_halves(x), *rest),
    fake=lambda x, *rest: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    batch=_of_rows,
    gradient=Gradient(
        backward=lambda saved, given: (
            GLU_PACKED_BACKWARD(given[0], *saved),
            *[None] * (len(saved) - 1),
        ),
    ),
)
"""`GLU` of the halves of ``[..., 2 dim]``: gate's columns, then up's."""


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up, of which the first may have both side by side."""
    return _halves(gate) if up is None else (gate, up)


def glu(
    gate: Float[Tensor, "*batch inner"],
    up: Float[Tensor, "*batch inner"] | None,
    activation: str,
    count: Int[Tensor, ""] | None = None,
) -> Float[Tensor, "*batch hidden"]:
    """`GLU`, or `GLU_PACKED` of gate alone where that has both; of the first `count` rows."""
    halves = (gate,) if up is None else (gate, up)
    op = GLU_PACKED if up is None else GLU
    return op(*halves, activation) if count is None else op(*halves, activation, count)


def glu_linear(
    gate: Float[Tensor, "*batch inner"],
    up: Float[Tensor, "*batch inner"] | None,
    w: Float[Tensor, "*groups hidden outer"],
    activation: str,
    sizes: Int[Tensor, " groups"] | None = None,
) -> Float[Tensor, "*batch outer"]:
    """``glu(gate, up, activation) @ w``, of which gate, up and w alone are kept for backward.

    The same gradients, bit for bit. No collectives; where w has a part of the rows of a matrix, the
    result is a part of a sum.

    Args:
        gate, up: of one shape and dtype; or both side by side, and None, whose gradient is then
            made as one.
        w: of that dtype.
        activation: one of `GLU_ACTIVATIONS`.
        sizes: of groups of rows ``[R, inner]``, each with a w of its own: see `grouped_matmul`.
            Nothing is computed in rows of no group by a kernel: gradients of gate and up there may
            be anything, and nobody may read them.
    """

    def product(gate, up, w, sizes):
        hidden = glu(gate, up, activation, None if sizes is None else sizes.sum())
        return hidden @ w if sizes is None else grouped_matmul(hidden, w, sizes)

    def forward(gate, up, w, sizes):
        return product(gate, up, w, sizes), (gate, up, w, sizes)

    def backward(residuals, dy):
        gate, up, w, sizes = residuals
        rows = dy.flatten(0, -2)
        flat = rows @ w.mT if sizes is None else grouped_matmul(rows, w.mT, sizes, False)
        d_hidden = flat.view(*gate.shape[:-1], w.shape[-2])
        how = (activation,) if sizes is None else (activation, sizes.sum())
        if not trained:
            if up is None:
                return GLU_PACKED_BACKWARD(d_hidden, gate, *how), None, None, None
            return *GLU_BACKWARD(d_hidden, gate, up, *how), None, None
        if up is None:
            d_gate, hidden = GLU_PACKED_BACKWARD_AGAIN(d_hidden, gate, *how)
            d_up = None
        else:
            d_gate, d_up, hidden = GLU_BACKWARD_AGAIN(d_hidden, gate, up, *how)
        again = hidden.flatten(0, -2)
        if sizes is None:
            return d_gate, d_up, again.mT @ rows, None
        return d_gate, d_up, grouped_matmul_weight(again, rows, sizes, w.shape[0]), None

    if compat.pushing_forward():  # which custom_vjp has no rule for
        return product(gate, up, w, sizes)
    trained = compat.differentiating() or compat.requires_grad(w)
    return custom_vjp(product, forward, backward)(gate, up, w, sizes)
