"""Placement: equations that are better not compiled into the kernel around them.

Compilers repeat what is cheap to repeat, and guess what is cheap by counting reads: a learning-rate
schedule or ``1 - b1**t`` has next to none, so it would be computed again for every element that it
scales.

Tried and dropped: letting the driver write weight gradients straight into the rows of their stack,
instead of a copy in the kernel. It keeps the factors of all products alive until the kernel ends,
and on CPUs the fresh memory costs more than the copies (a step took 4% to 10% longer).
"""

from __future__ import annotations

from collections.abc import Sequence

from functron.program.equations import Equation, Scan, Var

_COSTLY = frozenset(
    f"aten::{name}" for name in ("pow", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh")
)


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
