"""What a rank does for an action: a stage's forward, and its backward, whole or in two parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.pipeline.layout import Part
from functron.transforms.gradient import check_loss, loss_seed, rule_vjp

StageFunction = Callable[..., Any]
"""``(part, params, x, batch, *shared) -> y``.

`x` is what the stage before returned, a tree of tensors (None at the first stage); `batch` is one
microbatch, and `shared` what all microbatches share. The last stage returns the microbatch's part
of the loss, a scalar replicated over the mesh, or ``(loss, aux)`` with a tree of tensors to sum.
Where it is traced (backward in two parts, or compiled) tensors that it closes over are constants:
pass what changes as `shared`.
"""


class Call(NamedTuple):
    """One stage of one microbatch.

    Attributes:
        stage: its number.
        part: what it computes.
        last: whether it returns the loss.
        params: its parameters.
        x: what the stage before returned; None at the first.
        batch: the microbatch.
        shared: what all microbatches share.
        memo: what may be remembered for the other microbatches of the stage in this execution.
    """

    stage: int
    part: Part
    last: bool
    params: tree.Tree
    x: tree.Tree
    batch: tree.Tree
    shared: tuple
    memo: dict[str, Any]


class Work(Protocol):
    """How stages are computed. `held` is opaque: what a backward needs of its forward."""

    def forward(self, call: Call) -> tuple[tree.Tree, Any]:
        """What the stage returns, and what its backward will need."""
        ...

    def backward(
        self, held: Any, cotangent: list | None, sums: tree.Tree
    ) -> tuple[list, tree.Tree]:
        """The cotangents of x's floating-point leaves, and `sums` and the weights' gradients.

        `cotangent` has those of y's floating-point leaves; None at the last stage.
        """
        ...

    def backward_input(self, held: Any, cotangent: list | None) -> tuple[list, Any]:
        """The cotangents of x's floating-point leaves, and what is needed for the weights'."""
        ...

    def backward_weight(self, held: Any, sums: tree.Tree) -> tree.Tree:
        """`sums` and the weights' gradients."""
        ...


class Pullbacks:
    """Stages differentiated by `vjp`: both gradients at once, those of weights held until asked."""

    def __init__(self, stage: StageFunction):
        self.stage = stage

    def forward(self, call: Call) -> tuple[tree.Tree, Any]:
        def f(params: tree.Tree, x: tree.Tree) -> Any:
            return self.stage(call.part, params, x, call.batch, *call.shared)

        y, pull = rule_vjp(f, call.params, call.x)
        check_output(call, y)
        # of what is passed on only the kinds of leaves are kept: the next stage has the numbers
        return y, (seeds(y) if call.last else are_floats(y), call.last, pull)

    def backward(
        self, held: Any, cotangent: list | None, sums: tree.Tree
    ) -> tuple[list, tree.Tree]:
        x, gradients = self.backward_input(held, cotangent)
        return x, add(sums, gradients)

    def backward_input(self, held: Any, cotangent: list | None) -> tuple[list, Any]:
        y, last, pull = held
        params, x = pull(y if last else with_floats(y, cotangent))
        return floats(x), params

    def backward_weight(self, held: Any, sums: tree.Tree) -> tree.Tree:
        return add(sums, held)


def loss_of(y: Any) -> Any:
    """The loss among what a last stage returned."""
    return y[0] if isinstance(y, tuple) else y


def seeds(y: Any) -> Any:
    """The cotangent of what a last stage returned: of the loss its share of 1, of the rest 0."""
    seed = loss_seed(loss_of(y))
    return (seed, tree.map(torch.zeros_like, y[1])) if isinstance(y, tuple) else seed


def add(sums: tree.Tree, gradients: tree.Tree) -> tree.Tree:
    """`sums` plus `gradients`, in the dtypes of `sums`."""
    return tree.map(lambda total, leaf: total + leaf.to(total.dtype), sums, gradients)


def floats(value: tree.Tree) -> list[torch.Tensor]:
    """The floating-point leaves, which have cotangents."""
    return [leaf for leaf in tree.leaves(value) if leaf.is_floating_point()]


def are_floats(value: tree.Tree) -> tree.Tree:
    """A tree of bools: which leaves are floating-point."""
    return tree.map(lambda leaf: leaf.is_floating_point(), value)


def with_floats(flags: tree.Tree, leaves: list | None) -> tree.Tree:
    """`leaves` in the places that `are_floats` says; None in the others."""
    given = iter(leaves or ())
    return tree.map(lambda is_float: next(given) if is_float else None, flags)


def check_output(call: Call, y: tree.Tree) -> None:
    """Raise ValueError or TypeError where a stage returns no loss, or what cannot be passed on."""
    if call.last:
        check_loss(loss_of(y))
    check_tensors(call, y)


def check_tensors(call: Call, y: tree.Tree) -> None:
    """Raise TypeError where a stage returns what cannot be sent to other ranks."""
    raise_problems(
        f"stage {call.stage} ({call.part}) returned what cannot be sent to other ranks",
        [
            Problem(f"output {path}", type(leaf).__name__, "a tensor", "return tensors only")
            for path, leaf in zip(tree.paths(y), tree.leaves(y), strict=True)
            if not isinstance(leaf, torch.Tensor)
        ],
        TypeError,
    )
