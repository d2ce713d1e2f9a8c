"""Placement: equations that are better not compiled into the kernel around them.

Compilers repeat what is cheap to repeat, and guess what is cheap by counting reads: a learning-rate
schedule or ``1 - b1**t`` has next to none, so it would be computed again for every element that it
scales. And matrix products are calls of a library, which can write where the product is needed, but
compilers let it write elsewhere and copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functron.program.equations import Equation, Scan, Var

_aten = torch.ops.aten

_COSTLY = frozenset(
    f"aten::{name}" for name in ("pow", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh")
)

PRODUCTS: Mapping[Any, Any] = {_aten.mm.default: torch.mm, _aten.bmm.default: torch.bmm}
"""Matrix products, and the functions that can write them to a given place."""


def costly_scalars(equations: Sequence[Equation], inputs: Sequence[Var]) -> list[Equation]:
    """Equations that lead from scalar inputs to scalars that take long to compute, in order."""
    scalars = {value for value in inputs if not value.shape}
    made_by: dict[Var, Equation] = {}
    wanted: list[Equation] = []
    for equation in equations:
        op, results = equation.op, equation.results
        if isinstance(op, Scan) or not results or any(value.shape for value in results):
            continue
        if all(value in scalars for value in equation.operands):
            scalars.update(results)
            made_by.update((value, equation) for value in results)
            if op._schema.name in _COSTLY:
                wanted.append(equation)
    chosen: set[Equation] = set()
    while wanted:
        equation = wanted.pop()
        if equation not in chosen:
            chosen.add(equation)
            wanted += [made_by[value] for value in equation.operands if value in made_by]
    return [equation for equation in equations if equation in chosen]


def products_into(
    equations: Sequence[Equation], into: Mapping[Var, Var], outputs: Sequence[Any]
) -> dict[Var, Equation]:
    """The targets that are nothing but a matrix product, and that product.

    Args:
        equations: of a block.
        into: inputs of the block to overwrite, and the value to write there.
        outputs: what else the block must compute.
    """
    makers: dict[int, Equation] = {}
    readers: dict[int, list[Equation]] = {}
    for equation in equations:
        for value in equation.results:
            makers.setdefault(value.storage, equation)
        for storage in {value.storage for value in equation.operands}:
            readers.setdefault(storage, []).append(equation)
    written = [value.storage for value in into.values()]
    kept = {value.storage for value in outputs if isinstance(value, Var)}
    found: dict[Var, Equation] = {}
    for target, value in into.items():
        product = makers.get(value.storage)
        if product is None or product.op not in PRODUCTS or product.results[0].size != value.size:
            continue
        only = written.count(value.storage) == 1 and value.storage not in kept
        views = all(_shows(e, value.storage) for e in readers.get(value.storage, ()))
        if only and views:
            found[target] = product
    return found


def _shows(equation: Equation, storage: int) -> bool:
    """Whether an equation only views that memory."""
    return all(value.storage == storage for value in equation.results)
