"""Gated activations, hidden = act(gate) * up (Shazeer 2020): ``kernels/glu.cu``.

Gate and up are separate tensors, `GLU`, or halves of one, `GLU_PACKED`, with a single gradient.
Autograd of the formula saves act(gate) beside both and reads them three times in backward; this
saves gate and up alone, and recomputes act(gate). The following product would save hidden, a third
of an MLP's saved tensors; `glu_linear` recomputes that too, in the pass that makes the gradients of
gate and up. As that pass reads the cotangent, no compiler merges the recomputation with the first
one.

Rows of experts have room for the most that there can be. Every op takes `count`, the number of real
rows; kernels leave the others undefined.
"""

from __future__ import annotations

import functools
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
    Op,
    check_columns,
    define,
    map_rows,
    packable,
    rows_of,
    type_name,
    upcast,
)
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.derivatives import jvp

GLU_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
"""In the order by which kernels number them. The last is (u + 1) g sigmoid(1.702 g) of g =
min(gate, 7) and u = up within [-7, 7] (GPT-OSS)."""

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
"""Of "clamped_swiglu"."""

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
    count: Tensor | None = None,
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
            value, slope = _swish(gate.clamp(max=SWIGLU_LIMIT), SWIGLU_SLOPE)
            return value, slope * (gate <= SWIGLU_LIMIT)


def _swish(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(scale * x)
    return x * s, s + scale * x * s * (1 - s)


def _lift(up: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """The factor of act(gate), and its derivative."""
    if activation != "clamped_swiglu":
        return up, 1.0
    return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1, (up.abs() <= SWIGLU_LIMIT).to(up.dtype)


def _reference(gate: Tensor, up: Tensor, activation: str, count: Tensor | None = None) -> Tensor:
    lifted, _ = _lift(upcast(up), activation)
    return (_act(upcast(gate), activation)[0] * lifted).to(gate.dtype).contiguous()


def _gradients(d_hidden: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple:
    wide = upcast(d_hidden)
    value, slope = _act(upcast(gate), activation)
    lifted, lift_slope = _lift(upcast(up), activation)
    d_gate, d_up = wide * lifted * slope, wide * value * lift_slope
    return d_gate.to(gate.dtype).contiguous(), d_up.to(up.dtype).contiguous()


def _map_rows(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
    """The rule of rows: of joined ones the real ones do not come first, so all are computed."""
    kept = [
        (x, dim)
        for x, dim in zip(args, in_dims, strict=True)
        if not isinstance(x, torch.Tensor) or x.is_floating_point()
    ]
    args, in_dims = zip(*kept, strict=True)
    return map_rows(whole=())(size, in_dims, args, op)


def _split(args: tuple, packed: bool) -> tuple:
    """Gate and up, and what comes after them among the arguments of an op."""
    return (*_halves(args[0]), *args[1:]) if packed else args


def _define_backward(name: str, operands: str, packed: bool, again: bool) -> Op:
    num = 1 if packed else 2

    def results(found: Sequence[Tensor]) -> Any:
        return tuple(found) if len(found) > 1 else found[0]

    def reference(d_hidden: Tensor, *args: Any) -> Any:
        gate, up, activation, *_ = _split(args, packed)
        grads = _gradients(d_hidden, gate, up, activation)
        found = [torch.cat(grads, -1)] if packed else [*grads]
        return results([*found, _reference(gate, up, activation)] if again else found)

    def empty(d_hidden: Tensor, *args: Any) -> list[Tensor]:
        shapes = [x.shape for x in (*args[:num], *[d_hidden] * again)]
        return [args[0].new_empty(shape) for shape in shapes]

    def kernel(launch: Launch, d_hidden: Tensor, *args: Any) -> Any:
        gate, up, activation, *count = _split(args, packed)
        found = empty(d_hidden, *args)
        if d_hidden.numel():
            rows = [rows_of(x) for x in found]
            into = rows[0].chunk(2, -1) if packed else rows[:2]
            read = [rows_of(x) for x in (d_hidden, gate, up)]
            tensors = *read, *into, rows[-1] if again else None
            strides = [x.stride(0) for x in (*read, into[0])]
            _launch(launch, "glu_backward", tensors, strides, activation, *count)
        return results(found)

    made = ", ".join(["Tensor"] * (num + again))
    return define(
        f"{name}_backward{'_again' * again}(Tensor d_hidden, {operands}, {_REST}) -> "
        + (f"({made})" if num + again > 1 else made),
        kernel=kernel,
        reference=reference,
        fake=lambda d_hidden, *args: results(empty(d_hidden, *args)),
        batch=_map_rows,
        gradient=reference,
    )


def _define_glu(packed: bool) -> tuple[Op, Op, Op]:
    """The op, its backward, and a backward that computes the result again beside the gradients.

    Args:
        packed: one operand has gate's columns, then up's; False: they are two operands.
    """
    name = "glu_packed" if packed else "glu"
    operands = "Tensor gate_up" if packed else "Tensor gate, Tensor up"
    backward, again = (_define_backward(name, operands, packed, each) for each in (False, True))

    def kernel(launch: Launch, *args: Any) -> Tensor:
        gate, up, activation, *count = _split(args, packed)
        hidden = gate.new_empty(gate.shape)
        if gate.numel():
            gate, up = rows_of(gate), rows_of(up)
            strides = gate.stride(0), up.stride(0)
            tensors = gate, up, hidden.view(gate.shape)
            _launch(launch, "glu_forward", tensors, strides, activation, *count)
        return hidden

    def gradient(saved: Sequence, cotangents: tuple) -> tuple:
        found = backward(cotangents[0], *saved)
        grads = (found,) if packed else found
        return *grads, *[None] * (len(saved) - len(grads))

    def fake(x: Tensor, *rest: Any) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if packed else 1))

    op = define(
        f"{name}({operands}, {_REST}) -> Tensor",
        kernel=kernel,
        reference=lambda *args: _reference(*_split(args, packed)),
        fake=fake,
        batch=_map_rows,
        gradient=Gradient(gradient),
    )
    return op, backward, again


GLU, GLU_BACKWARD, GLU_BACKWARD_AGAIN = _define_glu(packed=False)
"""act(gate) * up of tensors ``[..., dim]`` of one shape and dtype, see `GLU_ACTIVATIONS`; backward

(d_gate, d_up) = d_hidden (up act'(gate), act(gate)); and

(d_gate, d_up, hidden): these, and `GLU` again."""

GLU_PACKED, GLU_PACKED_BACKWARD, GLU_PACKED_BACKWARD_AGAIN = _define_glu(packed=True)
"""The same of the halves of ``[..., 2 dim]``, gate's columns and then up's, and so their gradients.
"""


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
    operands = (gate,) if up is None else (gate, up)
    op = GLU_PACKED if up is None else GLU
    return op(*operands, activation, *_if_given(count))


def _if_given(count: Tensor | None) -> tuple[Tensor, ...]:
    return () if count is None else (count,)


def glu_linear(
    gate: Float[Tensor, "*batch inner"],
    up: Float[Tensor, "*batch inner"] | None,
    w: Float[Tensor, "*groups hidden outer"],
    activation: str,
    sizes: Int[Tensor, " groups"] | None = None,
) -> Float[Tensor, "*batch outer"]:
    """``glu(gate, up, activation) @ w``, which saves only gate, up and w for backward.

    The same gradients, bit for bit. No collectives; with a shard of the rows of w, the result is a
    partial sum.

    Args:
        gate, up: of one shape and dtype; or both side by side, and None, with a single gradient.
        w: of that dtype.
        activation: one of `GLU_ACTIVATIONS`.
        sizes: of groups of rows ``[R, inner]``, each with its own w: see `grouped_matmul`. Kernels
            leave rows of no group undefined, as are their gradients of gate and up, which must not
            be read.
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
        if up is None:
            operands, op = (gate,), GLU_PACKED_BACKWARD_AGAIN if trained else GLU_PACKED_BACKWARD
        else:
            operands, op = (gate, up), GLU_BACKWARD_AGAIN if trained else GLU_BACKWARD
        count = None if sizes is None else sizes.sum()
        found = op(d_hidden, *operands, activation, *_if_given(count))
        d_gate, *rest = (found,) if isinstance(found, Tensor) else found
        d_up = None if up is None else rest[0]
        if not trained:
            return d_gate, d_up, None, None
        hidden = rest[-1].flatten(0, -2)
        if sizes is None:
            return d_gate, d_up, hidden.mT @ rows, None
        return d_gate, d_up, grouped_matmul_weight(hidden, rows, sizes, w.shape[0]), None

    trained = compat.differentiating() or compat.requires_grad(w)
    push = functools.partial(jvp, product)
    return custom_vjp(product, forward, backward, push)(gate, up, w, sizes)
