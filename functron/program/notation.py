"""How programs write their parts down: types, constants, operations and calls."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functron.program.equations import Equation, Scan, Var
from functron.spmd.spec import P

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "f8_e4m3fn": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
}
"""Short names as JAX writes them; other dtypes go by torch's names."""

_SHORT = {dtype: name for name, dtype in DTYPES.items()}

COLLECTIVES = frozenset(
    {
        "psum", "pmax", "pmin", "pbroadcast", "all_gather", "psum_scatter", "all_to_all",
        "ppermute", "ragged_all_to_all",
    }
)  # fmt: skip
"""The operations of `functron.spmd.traced` and `functron.spmd.ragged` that communicate."""

_WORD = re.compile(r"[\w./<>+*-]+")


@dataclass(frozen=True)
class Type:
    """What the text says of a variable: ``bf16[4,8]{1,4}@cuda:0``. Fields as those of `Var`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Opaque:
    """What a parsed program holds for a Python object that has no notation: its repr."""

    text: str


def declaration(var: Var | None) -> str:
    """``%name: type``; ``_`` for a result that is missing."""
    return "_" if var is None else f"{var!r}: {type_text(var)}"


def type_text(var: Var | Type) -> str:
    """``bf16[4,8]``, with ``{1,4}`` for strides of 1 and 4 and ``@cuda:0`` off the cpu."""
    strides = "" if var.stride == contiguous(var.shape) else f"{{{_numbers(var.stride)}}}"
    device = "" if var.device.type == "cpu" else f"@{var.device}"
    return f"{dtype_text(var.dtype)}[{_numbers(var.shape)}]{strides}{device}"


def span_bytes(var: Var | Type) -> int:
    """The bytes from the first element to the last."""
    spans = (stride * (size - 1) for size, stride in zip(var.shape, var.stride, strict=True))
    return 0 if 0 in var.shape else (1 + sum(spans)) * var.dtype.itemsize


def _numbers(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    return tuple(math.prod(max(size, 1) for size in shape[k + 1 :]) for k in range(len(shape)))


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for float32."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def word(text: str) -> str:
    """`text`, quoted unless it is made of letters, digits and ``_./<>+*-``."""
    return text if _WORD.fullmatch(text) else repr(text)


def value_text(value: Any) -> str:
    """An operand or a constant: ``%x``, ``1e-05``, ``[1, 2]``, ``f32``, ``'tp'``."""
    if isinstance(value, (list, torch.Size)):
        return f"[{', '.join(map(value_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(value_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, (torch.layout, torch.memory_format, torch.device)):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (Var, P)) or type(value) in (bool, int, float, str):
        return repr(value)
    if isinstance(value, Opaque):
        return f"opaque({value.text!r})"
    without_address = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return f"opaque({without_address!r})"


def op_text(op: torch._ops.OpOverload) -> str:
    """``mm``, ``add.Tensor``, ``prims::sum``: ATen's and functron's names stand alone."""
    namespace, name = op.name().split("::")
    hidden = namespace == "functron" or (
        namespace == "aten" and not hasattr(torch.ops.functron, name.split(".")[0])
    )
    return name if hidden else f"{namespace}::{name}"


def call_text(equation: Equation) -> str:
    """``op(operands, keyword=value)`` without keywords that have their default value."""
    op = equation.op
    assert not isinstance(op, Scan)
    defaults = {
        argument.name: argument.default_value
        for argument in op._schema.arguments
        if argument.has_default_value()
    }
    arguments = [value_text(value) for value in equation.args]
    arguments += [
        f"{name}={value_text(value)}"
        for name, value in equation.kwargs.items()
        if not (name in defaults and _same(value, defaults[name]))
    ]
    return f"{op_text(op)}({', '.join(arguments)})"


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def axis_of(equation: Equation) -> str | None:
    """The mesh axis of a collective; None for other equations."""
    op = equation.op
    if isinstance(op, Scan) or op.namespace != "functron" or equation.name not in COLLECTIVES:
        return None
    return equation.args[1] if len(equation.args) > 1 else equation.kwargs["axis"]


def payload_bytes(equation: Equation) -> int:
    """The bytes of a collective's operand, or of an all_gather's result, on one rank.

    Of a ragged exchange, the smaller of operand and result: what ranks send on average is what they
    receive, and each has room for more than that on the side where it cannot know.
    """
    if equation.name == "ragged_all_to_all":
        return min(equation.operands[0].nbytes, equation.results[0].nbytes)
    gathers = equation.name == "all_gather"
    return (equation.results if gathers else equation.operands)[0].nbytes
