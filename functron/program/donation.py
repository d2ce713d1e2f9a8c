"""Whose memory the results of a compiled program take, of the arguments that were donated to it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from functron.program.equations import Var

if TYPE_CHECKING:
    from functron.program.program import Program


def takers(program: Program) -> dict[Var, Var]:
    """Results, and the donated input whose memory each may take: by path, else by likeness."""
    returned = [output for output in program.outputs if isinstance(output.value, Var)]
    outputs = {output.value for output in returned}
    free = {i.path: i.var for i in program.inputs if i.donated and i.var not in outputs}
    inputs = set(program.block.inputs)
    returned = [output for output in returned if output.value not in inputs]  # these have memory
    found: dict[Var, Var] = {}

    def take(value: Var, path: str) -> bool:
        fits = value not in found and path in free and _alike(free[path], value)
        if fits:
            found[value] = free.pop(path)
        return fits

    inner = {path.partition("/")[2]: path for path in free}
    for output in returned:
        _ = take(output.value, output.path) or take(
            output.value, inner.get(output.path.partition("/")[2], "")
        )
    for output in returned:
        any(take(output.value, path) for path in list(free))
    return found


def _alike(a: Var, b: Var) -> bool:
    return (a.shape, a.stride, a.dtype, a.device) == (b.shape, b.stride, b.dtype, b.device)


def warn_unused(program: Program, taken: Mapping[Var, Var]) -> None:
    """Warn of donated arguments whose memory no result takes."""
    returned = {output.value for output in program.outputs if isinstance(output.value, Var)}
    used = {*taken.values(), *returned}
    left = [i.path for i in program.inputs if i.donated and i.var not in used]
    if left:
        warnings.warn(
            f"{program.name}: got donated arguments whose memory no result can take: "
            f"{', '.join(left)}; wanted a result of the same shape, layout and dtype for each; "
            "fix: do not donate them, or return their new values",
            stacklevel=4,
        )
