"""Which outputs of a program each of its values leads to, through scans of any nesting.

A set of outputs is a whole number whose bits are outputs, so that unions are cheap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from functron.program.equations import Block, Equation, Scan, Var
from functron.program.recorder import live_equations

EFFECT = 1
"""The bit of values that lead to a side effect, such as a print."""

AROUND = 2
"""The bit of values that lead to something through later iterations of a scan."""

FIRST = 2
"""Outputs have the bits from this one on."""


def is_effect(equation: Equation) -> bool:
    """Whether an equation is there for its side effect, and not for its results."""
    return bool(live_equations([equation], ()))


def reach(block: Block, wanted: Sequence[int]) -> Mapping[Var, int]:
    """The bits of every value of a block; values that lead nowhere are missing.

    Args:
        block: of a program, or the body of a scan.
        wanted: the bits of each of its outputs.
    """
    found: defaultdict[Var, int] = defaultdict(int)
    for value, bits in zip(block.outputs, wanted, strict=True):
        if isinstance(value, Var) and bits:
            found[value] |= bits
    for equation in reversed(block.equations):
        if isinstance(equation.op, Scan):
            inner, _ = reach_in_scan(equation.op, result_bits(equation, found))
            for value, operand in zip(equation.op.body.inputs, equation.args, strict=True):
                if value in inner:
                    found[operand] |= inner[value]
            continue
        bits = EFFECT if is_effect(equation) else 0
        for value in equation.results:
            bits |= found.get(value, 0)
        for operand in equation.operands if bits else ():
            found[operand] |= bits
    return dict(found)


def result_bits(equation: Equation, found: Mapping[Var, int]) -> list[int]:
    """The bits of each output of an equation, 0 for missing ones."""
    return [0 if value is None else found.get(value, 0) for value in equation.outputs]


def reach_in_scan(op: Scan, bits: Sequence[int]) -> tuple[Mapping[Var, int], list[int]]:
    """The bits of every value of a scan's body, and those of the body's outputs.

    A carry leads to whatever the next iteration's carry leads to, and the first one to the last.

    Args:
        op: the scan.
        bits: those of its results.
    """
    carried = [0] * op.num_carry
    inputs = op.body.inputs[op.num_consts :][: op.num_carry]
    while True:
        wanted = [own | more for own, more in zip(bits, carried, strict=False)]
        wanted += bits[op.num_carry :]
        found = reach(op.body, wanted)
        before, carried = carried, [found.get(value, 0) for value in inputs]
        for position, own in enumerate(bits[: op.num_carry]):
            if carried[position] & ~own & ~(EFFECT | AROUND):
                carried[position] |= AROUND
        if carried == before:
            break
    rows = zip(inputs, wanted, strict=False)
    return {**found, **{v: found.get(v, 0) | bits for v, bits in rows if bits}}, wanted
