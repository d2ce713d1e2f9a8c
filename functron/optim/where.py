"""Two gradient transformations side by side, each for its own leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from functron import tree
from functron.optim.transformation import GradientTransformation, transformation
from functron.spmd.spec import is_spec


class WhereState(NamedTuple):
    """The states of `where`'s transformations, of parameters that lack each other's leaves.

    Attributes:
        chosen: of the leaves that the mask picks.
        others: of the other leaves.
    """

    chosen: tree.Tree
    others: tree.Tree


def where(
    mask: tree.Tree, chosen: GradientTransformation, others: GradientTransformation
) -> GradientTransformation:
    """`chosen` for the leaves where `mask` is true and `others` for those where it is not.

    Each sees trees with None in place of the other's leaves, and so remembers nothing for them.
    Collectives are theirs.

    Args:
        mask: one bool per parameter.
        chosen: for those that are true.
        others: for those that are false.

    Raises:
        ValueError: (when called) the mask has another structure than the parameters.
    """
    both = (chosen, others)
    structure, flags = tree.structure(mask), [bool(flag) for flag in tree.leaves(mask)]

    def split(value: tree.Tree, what: str) -> tuple[tree.Tree, tree.Tree]:
        leaves = tree.same_structure(mask, value, names=("the mask of where", what))
        return tuple(
            tree.unflatten(
                structure,
                [x if flag is side else None for x, flag in zip(leaves, flags, strict=True)],
            )
            for side in (True, False)
        )

    def merge(first: tree.Tree, second: tree.Tree) -> tree.Tree:
        names = "the mask of where", "updates"
        sides = (tree.same_structure(mask, side, names=names) for side in (first, second))
        rows = zip(*sides, flags, strict=True)
        return tree.unflatten(structure, [x if flag else y for x, y, flag in rows])

    def run(methods: Iterable[Any], updates, state: WhereState, params):
        sides = (None, None) if params is None else split(params, "params")
        results = [
            method(part, side_state, side)
            for method, part, side_state, side in zip(
                methods, split(updates, "updates"), state, sides, strict=True
            )
        ]
        (first, kept), (second, also) = results
        return merge(first, second), WhereState(kept, also)

    def sides_of(param_specs):
        flat = tree.broadcast_prefix(param_specs, mask, is_leaf=is_spec, what="specs")
        return split(tree.unflatten(structure, flat), "specs")

    def specs(param_specs):
        first, second = sides_of(param_specs)
        return WhereState(chosen.specs(first), others.specs(second))

    def grad_specs(param_specs):
        rows = (
            tree.broadcast_prefix(t.grad_specs(side), mask, is_leaf=is_spec, what="specs")
            for t, side in zip(both, sides_of(param_specs), strict=True)
        )
        chosen_rows = [x if flag else y for x, y, flag in zip(*rows, flags, strict=True)]
        return tree.unflatten(structure, chosen_rows)

    def step_(grads, state, params):
        _, state = run([chosen.step_, others.step_], grads, state, params)
        return params, state

    return transformation(
        lambda params: WhereState(
            *(t.init(side) for t, side in zip(both, split(params, "params"), strict=True))
        ),
        lambda updates, state, params=None: run([t.update for t in both], updates, state, params),
        specs,
        update_=lambda updates, state, params=None: run(
            [t.update_ for t in both], updates, state, params
        ),
        step_=step_,
        grad_specs=grad_specs,
    )
