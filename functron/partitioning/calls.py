"""Transforms recorded whole: calls of `value_and_grad`, `remat` and `custom_vjp` as equations.

A program in global view is traced before it is differentiated. Each call of a transform is one
equation with the program of its function inside, so that placements are found for the function as
it was written, and the transform is applied to the per-rank program: backward then has the
transposes of forward's collectives, as a handwritten program's has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functron.core import tree
from functron.program.equations import Block, Var, contiguous_strides
from functron.program.recorder import Recorder, active
from functron.spmd.axes import user_line
from functron.transforms.gradient import check_loss, value_and_grad
from functron.transforms.policies import Policy
from functron.transforms.remat import remat

Flat = Callable[..., Sequence[torch.Tensor]]
"""A function of tensors to tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """An operation that runs `body` under a transform.

    Its operands are the body's inputs. Its results are the body's outputs and, of a gradient, then
    those of the first `num_moving` operands.

    Attributes:
        body: the function's program, in global view.
        transform: "remat" or "value_and_grad".
        wrap: from the function that a rank runs, of flat operands, to the transformed one.
        num_moving: how many operands are differentiated.
    """

    body: Block
    transform: str
    wrap: Callable[[Flat], Flat]
    num_moving: int = 0

    namespace = "functron"
    tags = ()

    def name(self) -> str:
        """As an operation of torch has."""
        return f"functron::{self.transform}"


class Keeper:
    """Records calls of transforms as equations of the recorder that is active."""

    def value_and_grad(self, f, positions, has_aux: bool, args, kwargs) -> tuple[Any, tuple]:
        """The value (with what is auxiliary) and the gradients, as fake tensors."""
        chosen = tuple(args[position] for position in positions)
        leaves, structure = tree.flatten(chosen)
        kept: dict[str, Any] = {}

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            new = list(args)
            for position, value in zip(positions, tree.unflatten(structure, fresh), strict=True):
                new[position] = value
            out = f(*new, **kwargs)
            value, aux = out if has_aux else (out, None)
            check_loss(value, None)
            kept["aux"] = _Tree(aux)
            return [value, *kept["aux"].tensors]

        def wrap(rank: Flat) -> Flat:
            def differentiated(*operands):
                count = len(leaves)

                def loss(*moving):
                    value, *aux = rank(*moving, *operands[count:])
                    return value, aux

                both = value_and_grad(loss, tuple(range(count)), has_aux=True)
                (value, aux), grads = both(*operands[:count])
                return [value, *aux, *grads]

            return differentiated

        made = _recorded("value_and_grad", run, leaves, wrap, moving=True)
        value, rest = made[0], made[1 : len(made) - len(leaves)]
        grads = tree.unflatten(structure, made[len(made) - len(leaves) :])
        return ((value, kept["aux"].join(rest)) if has_aux else value), grads

    def remat(self, f, policy: Policy, args, kwargs) -> tree.Tree:
        """The results of `f`, as fake tensors."""
        kept: dict[str, Any] = {}
        given = _Tree((args, kwargs))

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            new_args, new_kwargs = given.join(fresh)
            kept["out"] = _Tree(f(*new_args, **new_kwargs))
            return kept["out"].tensors

        def wrap(rank: Flat) -> Flat:
            return remat(lambda *operands: tuple(rank(*operands)), policy=policy)

        made = _recorded("remat", run, given.tensors, wrap)
        return kept["out"].join(made)

    def custom_vjp(self, f, forward, backward, args) -> tree.Tree:
        """Refused: what `backward` means for shards is not known.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"partition: at {user_line()} the function calls a custom_vjp, whose backward is a "
            "program of its own; wanted functions that are differentiated as they are written; "
            "fix: partition a function without it, or write this one per rank with shard_map"
        )


class _Tree:
    """A tree taken apart into its tensors and the rest."""

    def __init__(self, value: tree.Tree):
        leaves, self._structure = tree.flatten(value)
        self._leaves = leaves
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self._places]

    def join(self, tensors: Sequence[torch.Tensor]) -> tree.Tree:
        """The tree with other tensors in their place."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree.unflatten(self._structure, leaves)


def _recorded(
    name: str,
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    given: Sequence[torch.Tensor],
    wrap: Callable[[Flat], Flat],
    *,
    moving: bool = False,
) -> list[torch.Tensor]:
    """The results of `run` as an equation of what it does; with `moving`, gradients too."""
    recorder = active()
    assert recorder is not None
    operands = [recorder.var(value) for value in given]
    with recorder.frame() as frame:
        fresh = [_like(recorder, value) for value in given]
        inputs = [recorder.input(value, "operand") for value in fresh]
        outputs = [recorder.var(value) for value in run(fresh)]
        block = recorder.block(inputs, outputs)
    inputs += list(frame.captured)
    operands += list(frame.captured.values())
    body = Block(tuple(inputs), block.equations, block.outputs)
    results: list[Var] = [*outputs, *(operands[: len(given)] if moving else [])]
    op = Call(body, name, wrap, len(given) if moving else 0)
    described = [(v.shape, contiguous_strides(v.shape), v.dtype, v.device) for v in results]
    return recorder.emit(op, operands, described)


def _like(recorder: Recorder, value: torch.Tensor) -> torch.Tensor:
    return recorder.empty(value.shape, value.stride(), value.dtype, value.device)
