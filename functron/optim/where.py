"""Several gradient transformations side by side, each for its own leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from functron import tree
from functron.errors import Problem, nearest, public, raise_problems
from functron.optim.transformation import (
    GradientTransformation,
    norm_of_part,
    transformation,
)
from functron.spmd.spec import is_spec


class WhereState(NamedTuple):
    """The states of `where`'s transformations, of parameters that lack each other's leaves.

    Attributes:
        chosen: of the leaves that the mask picks.
        others: of the other leaves.
    """

    chosen: tree.Tree
    others: tree.Tree


@public
def where(
    mask: tree.Tree, chosen: GradientTransformation, others: GradientTransformation
) -> GradientTransformation:
    """`chosen` for the leaves where `mask` is true and `others` for those where it is not.

    Each sees trees with None in place of the other's leaves, and so remembers nothing for them.
    Optax's `masked` is ``where(mask, inner, identity())``. Collectives are theirs.

    Args:
        mask: one bool per parameter.
        chosen: for those that are true.
        others: for those that are false.

    Raises:
        ValueError: (when called) the mask has another structure than the parameters.
    """
    structure, flags = tree.structure(mask), [bool(flag) for flag in tree.leaves(mask)]
    labels = tree.unflatten(structure, flags)
    return _side_by_side(
        {True: chosen, False: others},
        lambda value: labels,
        lambda states: WhereState(*states),
        lambda state: list(state),
        "the mask of where",
    )


class MultiTransformState(NamedTuple):
    """The states of `multi_transform`.

    Attributes:
        inner_states: by label, of parameters that lack the leaves with other labels.
    """

    inner_states: dict[str, tree.Tree]


@public
def multi_transform(
    transforms: Mapping[str, GradientTransformation],
    labels: tree.Tree | Callable[[tree.Tree], tree.Tree],
) -> GradientTransformation:
    """For every leaf the transformation of its label; Optax's `multi_transform` or `partition`.

    Each sees trees with None in place of others' leaves, and so remembers nothing for them; masks
    and other trees for all parameters fit them too. Collectives are theirs.

    Args:
        transforms: by label.
        labels: one label per parameter, or a function that makes such a tree of one with the
            parameters' structure, at whose leaves it must not look (`tree.map_with_path`): they may
            be parameters, gradients or specs.

    Raises:
        ValueError: labels that no transformation has, each with its path; (when called) labels with
            another structure than the parameters.
    """

    def checked(found: tree.Tree) -> tree.Tree:
        rows = zip(tree.paths(found), tree.leaves(found), strict=True)
        known = list(map(str, transforms))
        raise_problems(
            "multi_transform: some parameters have no transformation",
            [
                Problem(path, f"label {x!r}", "that of a transformation", nearest(str(x), known))
                for path, x in rows
                if x not in transforms
            ],
        )
        return found

    fixed = None if callable(labels) else checked(labels)

    def labels_of(value: tree.Tree) -> tree.Tree:
        return checked(labels(value)) if callable(labels) else fixed

    return _side_by_side(
        transforms,
        labels_of,
        lambda states: MultiTransformState(dict(zip(transforms, states, strict=True))),
        lambda state: [state.inner_states[label] for label in transforms],
        "the labels of multi_transform",
    )


def _side_by_side(
    transforms: Mapping[Any, GradientTransformation],
    labels_of: Callable[[tree.Tree], tree.Tree],
    pack: Callable[[list], Any],
    unpack: Callable[[Any], list],
    what: str,
) -> GradientTransformation:
    """A transformation per label, and how their states become one."""
    several = list(transforms.values())
    pure, donating = [t.update for t in several], [t.update_ for t in several]
    clips = [t for t in several if t.norm is not None]
    clipping = clips[0] if len(clips) == 1 else None

    def split(value: tree.Tree, labels: tree.Tree, name: str) -> list[tree.Tree]:
        leaves = tree.same_structure(labels, value, names=(what, name))
        return [_only(labels, leaves, label) for label in transforms]

    def merge(sides: Iterable[tree.Tree], labels: tree.Tree) -> tree.Tree:
        columns = [tree.same_structure(labels, side, names=(what, "updates")) for side in sides]
        by_label = dict(zip(transforms, columns, strict=True))
        rows = enumerate(tree.leaves(labels))
        return tree.unflatten(tree.structure(labels), [by_label[label][i] for i, label in rows])

    def run(methods: Iterable[Any], updates, state, params, **norm):
        labels = labels_of(updates)
        sides = [None] * len(several) if params is None else split(params, labels, "params")
        given = [norm if t is clipping else {} for t in several]
        parts = split(updates, labels, "updates")
        rows = zip(methods, parts, unpack(state), sides, given, strict=True)
        results = [method(part, own, side, **norm) for method, part, own, side, norm in rows]
        updates = merge([updates for updates, _ in results], labels)
        return updates, pack([state for _, state in results])

    def divided(param_specs) -> tuple[tree.Tree, list[tree.Tree]]:
        """The labels, and the specs of each one's parameters."""
        labels = labels_of(tree.map(lambda spec: 0, param_specs, is_leaf=is_spec))
        flat = tree.broadcast_prefix(param_specs, labels, is_leaf=is_spec, what="specs")
        return labels, [_only(labels, flat, label) for label in transforms]

    def grad_specs(param_specs):
        labels, sides = divided(param_specs)
        rows = [
            tree.broadcast_prefix(t.grad_specs(side), labels, is_leaf=is_spec, what="specs")
            for t, side in zip(several, sides, strict=True)
        ]
        by_label = dict(zip(transforms, rows, strict=True))
        pairs = enumerate(tree.leaves(labels))
        return tree.unflatten(tree.structure(labels), [by_label[label][i] for i, label in pairs])

    def specs(param_specs):
        _, sides = divided(param_specs)
        return pack([t.specs(side) for t, side in zip(several, sides, strict=True)])

    def init(params):
        sides = split(params, labels_of(params), "params")
        return pack([t.init(side) for t, side in zip(several, sides, strict=True)])

    def own(updates: tree.Tree) -> tree.Tree:
        """The updates of the one that clips."""
        parts = split(updates, labels_of(updates), "updates")
        return next(part for part, t in zip(parts, several, strict=True) if t is clipping)

    def step_(grads, state, params, **norm):
        _, state = run([t.step_ for t in several], grads, state, params, **norm)
        return params, state

    return transformation(
        init,
        lambda updates, state, params=None, **norm: run(pure, updates, state, params, **norm),
        specs,
        update_=lambda updates, state, params=None, **norm: run(
            donating, updates, state, params, **norm
        ),
        step_=step_,
        grad_specs=grad_specs,
    )._replace(norm=norm_of_part(clipping and clipping.norm, own))


def _only(labels: tree.Tree, leaves: list, label: Hashable) -> tree.Tree:
    rows = zip(tree.leaves(labels), leaves, strict=True)
    chosen = [leaf if own == label else None for own, leaf in rows]
    return tree.unflatten(tree.structure(labels), chosen)
