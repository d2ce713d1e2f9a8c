"""Donation: the caller gives a tensor's memory to the results, and the tensor is gone.

A donated tensor becomes a `Donated`: it holds no memory, and whatever is done with it raises, with
the call that consumed it. JAX calls such arrays deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems

FIX = "use the result in its place, or donate a clone"


class Donated(torch.Tensor):
    """The remains of a tensor that a program consumed. Every use of it raises."""

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


def refuse_donated(leaves: Sequence[Any], paths: Callable[[], Sequence[str]], program: str) -> None:
    """Raise ValueError, with the call that consumed it, where an argument is `Donated`."""
    gone = [isinstance(leaf, Donated) for leaf in leaves]
    if any(gone):
        first = gone.index(True)
        more = f", and {sum(gone) - 1} more like it" if sum(gone) > 1 else ""
        consumed = vars(leaves[first])["consumed"]
        raise ValueError(
            f"{program}: argument {paths()[first]}: got a tensor that {consumed}; {FIX}{more}"
        )


def consume_all(leaves: Mapping[str, Any], results: Sequence[Any], program: str) -> list:
    """The results of a program that ran eagerly, after consuming its donated arguments, by path.

    A result may be an argument itself, or show its memory: that stays. Arguments that a tape or a
    transform tracks are left alone.
    """
    live: dict[int, torch.Tensor] = {}
    kept = []  # so that no other tensor gets the id of one
    for path, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor) or id(leaf) in live or isinstance(leaf, Donated):
            continue
        if not (leaf.requires_grad or compat.is_wrapped(leaf)):
            live[id(leaf)] = consume(leaf, path, program)
            kept.append(leaf)
    return [live.get(id(result), result) for result in results]


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
