"""Donation: the caller gives a tensor's memory to the results, and the tensor is gone.

A donated tensor becomes a `Donated`: it holds no memory, and whatever is done with it raises, with
the call that consumed it. JAX calls such arrays deleted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from functron import tree
from functron.errors import Problem, raise_problems
from functron.program.equations import Var

if TYPE_CHECKING:
    from functron.program.program import Program

FIX = "use the result in its place, or donate a clone"


class Donated(torch.Tensor):
    """What is left of a tensor that a compiled program consumed. Every use of it raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = (x for x in tree.leaves((args, kwargs)) if isinstance(x, Donated))
        what = next(vars(x)["consumed"] for x in found)
        raise ValueError(f"a tensor {what}, and its memory with it; fix: {FIX}")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Donated({vars(self)['consumed']})"


def consume(tensor: torch.Tensor, path: str, program: str) -> torch.Tensor:
    """Another tensor with the memory of `tensor`, which becomes `Donated`."""
    live = tensor.detach()
    release: Any = tensor.set_
    release()
    tensor.__class__ = Donated
    vars(tensor)["consumed"] = f"was donated to {program} as argument {path}"
    return live


def check_consumable(tensors: Sequence[torch.Tensor], donated: Mapping[int, str]) -> None:
    """Check that the memory of every donated argument is its own.

    Args:
        tensors: all arguments, none of them `Donated`.
        donated: the position and path of those that are to be consumed.

    Raises:
        ValueError: it shows the memory of another argument, which would be overwritten.
    """
    owners: dict[int, int] = {}
    memory = [value.untyped_storage().data_ptr() for value in tensors]
    for position, pointer in enumerate(memory):
        owners.setdefault(pointer, position)
    shared = {}
    for position, pointer in enumerate(memory):
        first = owners[pointer]
        if pointer and first != position and (position in donated or first in donated):
            shared[position] = first
    raise_problems(
        "donated arguments share memory",
        [
            Problem(
                f"argument {donated.get(i, i)}",
                f"the memory of {donated.get(j, j)}",
                "memory of its own",
                "donate a clone",
            )
            for i, j in shared.items()
        ],
    )


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
