"""Running a function apart from its call: at another vmap level, or later, in backward.

An autograd Function runs its parts where no vmap level of the call is in force, or others are. So
what the function needs from around it goes in as operands: the tokens of simulated mesh axes, which
name the level of each, the tensors it closes over, and its arguments. `Site` gathers these and puts
them back in force; `map_level` runs a function of operands under one vmap level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import hoist
from functron.core.scopes import named_scope, scope_names
from functron.spmd.axes import SimulatedAxis, enter, scope


class Site:
    """Where a function was called, and on what.

    Attributes:
        operands: tensors: a token per simulated axis, what the function closes over, and the
            tensors among its arguments.
        num_tokens: how many of them are tokens.
        positions: which leaves of the arguments are tensors; these are the last operands.
    """

    def __init__(self, function: Callable, arguments: tree.Tree):
        hidden, self._close = hoist(function)
        self._leaves, self._structure = tree.flatten(arguments)
        self._scope, self._names = scope(), scope_names()
        self._simulated = [x for x in self._scope.axes.values() if isinstance(x, SimulatedAxis)]
        if self._scope.shares is not None:
            self._simulated.append(self._scope.shares)
        leaves = enumerate(self._leaves)
        self.positions = [i for i, leaf in leaves if isinstance(leaf, torch.Tensor)]
        tokens = [axis.token for axis in self._simulated]
        self.num_tokens, self._num_hidden = len(tokens), len(hidden)
        self.operands = [*tokens, *hidden, *(self._leaves[i] for i in self.positions)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The operands that are no tokens."""
        return self.operands[self.num_tokens :]

    @property
    def first_argument(self) -> int:
        """The operand at which the arguments begin."""
        return self.num_tokens + self._num_hidden

    @contextlib.contextmanager
    def entered(
        self, operands: Sequence[torch.Tensor], *, check: bool = True
    ) -> Iterator[tuple[Callable, tree.Tree]]:
        """The function and its arguments, made of these operands, with its axes in force.

        Axes are rebound to the tokens, whatever vmap level those belong to. Without `check`,
        reductions may be of replicated values, as those of transposes are.
        """
        bound = [
            replace(axis, token=token)
            for axis, token in zip(self._simulated, operands[: self.num_tokens], strict=True)
        ]
        shares = bound.pop() if self._scope.shares is not None else None
        axes = {axis.name: axis for axis in bound}
        leaves = list(self._leaves)
        for i, value in zip(self.positions, operands[self.first_argument :], strict=True):
            leaves[i] = value
        function = self._close(list(operands[self.num_tokens : self.first_argument]))
        arguments = tree.unflatten(self._structure, leaves)
        inside = replace(
            self._scope,
            axes={**self._scope.axes, **axes},
            check=check and self._scope.check,
            shares=shares,
        )
        with enter(inside), _named(self._names):
            yield function, arguments


@contextlib.contextmanager
def _named(names: tuple[str, ...]) -> Iterator[None]:
    """Put those named scopes in force that backward, which runs elsewhere, is not in."""
    here = scope_names()
    same = 0
    while same < min(len(here), len(names)) and here[same] == names[same]:
        same += 1
    with contextlib.ExitStack() as stack:
        for name in names[same:]:
            stack.enter_context(named_scope(name))
        yield


def differentiated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there will be a backward run through what is computed of these."""
    taped = torch.is_grad_enabled() and any(compat.requires_grad(x) for x in tensors)
    return taped or compat.differentiating()


def partial_of(f: Callable, operands: Sequence, moving: Sequence[int]) -> Callable:
    """`f`, a function of a sequence, as a function of the operands at these positions."""

    def partial(*values):
        full = list(operands)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return f(full)

    return partial


def map_level(
    f: Callable[[Sequence], Sequence[torch.Tensor]],
    size: int,
    in_dims: Sequence[int | None],
    values: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], list[bool]]:
    """``f(values)`` under one vmap over `in_dims`, and which results it batches.

    Batched results have their batch dim first. vmap gives every result one; those that do not vary
    come without, or they would no longer count as replicated.
    """
    varying: list[bool] = []

    def rows(token, *rest):
        outputs = f(rest)
        level = compat.level_of(token)
        varying[:] = [compat.is_batched_at(value, level) for value in outputs]
        return tuple(outputs)

    token = torch.arange(size)
    mapped: Any = torch.func.vmap(rows, in_dims=(0, *in_dims), randomness="error")
    outputs = mapped(token, *values)
    pairs = zip(outputs, varying, strict=True)
    return tuple(value if batched else value.select(0, 0) for value, batched in pairs), varying


def fresh(outputs: Sequence[torch.Tensor], operands: Sequence) -> tuple[torch.Tensor, ...]:
    """The outputs; an operand among them must not be mistaken for one modified in place."""
    return tuple(
        value.view_as(value) if any(value is operand for operand in operands) else value
        for value in outputs
    )
