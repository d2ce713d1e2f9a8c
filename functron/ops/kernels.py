"""Which implementation computes an operation: a CUDA kernel of functron, or torch's operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import torch

from functron.errors import nearest
from functron.ops.launch import usable

Choice = Literal["auto", "reference", "kernel"]
"""``"auto"``: the kernel for CUDA tensors of a dtype that it has, on a GPU and an installation that
can run it; otherwise torch's operations. ``"reference"``: torch's operations. ``"kernel"``: the
registered operation, which on the CPU computes its reference, and on CUDA raises where there is no
kernel."""

_HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Kernels:
    """A choice of implementations, passed to what computes with them; `use` makes it.

    Attributes:
        choice: for operations that `by_op` does not name.
        by_op: exceptions, by the name of the operation.
    """

    choice: Choice = "auto"
    by_op: Mapping[str, Choice] = field(default_factory=lambda: MappingProxyType({}))

    def takes(self, op: str, *operands: torch.Tensor | None) -> bool:
        """Whether the operation `op` is to be computed by its registered op on these operands.

        Args:
            op: its name.
            operands: those whose device and dtype decide; None and integers do not.
        """
        choice = self.by_op.get(op, self.choice)
        if choice != "auto":
            return choice == "kernel"
        tensors = [x for x in operands if x is not None]
        floats = [x.dtype for x in tensors if x.is_floating_point()]
        return (
            bool(tensors)
            and all(x.device.type == "cuda" for x in tensors)
            and all(dtype in _HALF_AND_SINGLE for dtype in floats)
            and usable(tensors[0].device) is None
        )


AUTO = Kernels()
"""Kernels where there are, torch's operations elsewhere."""


def use(choice: Choice = "auto", **by_op: Choice) -> Kernels:
    """The choice to pass as ``kernels=``; ``use("auto", rms_norm="reference")`` makes exceptions.

    Raises:
        ValueError: an unknown choice or operation.
    """
    for name, value in {"choice": choice, **by_op}.items():
        if value not in get_args(Choice):
            raise ValueError(f"use: got {name}={value!r}; {nearest(value, get_args(Choice))}")
    unknown = sorted(set(by_op) - OPERATIONS)
    if unknown:
        raise ValueError(f"use: got operation {unknown[0]!r}; {nearest(unknown[0], OPERATIONS)}")
    return Kernels(choice, MappingProxyType(dict(by_op)))


OPERATIONS = frozenset(
    {
        "adamw",
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
        "softmax",
    }
)
"""The names of operations that have kernels: those of the files of ``kernels/``."""
