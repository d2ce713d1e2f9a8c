"""Weight decay, and the masks that say which leaves it is for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from functron import tree
from functron.errors import Problem, public, raise_problems
from functron.optim.learning_rate import LearningRate, ScaleByScheduleState, new_count
from functron.optim.transformation import (
    GradientTransformation,
    Params,
    norm_of_part,
    stateless,
    transformation,
)
from functron.spmd.spec import P

Mask = tree.Tree | Callable[[Params], tree.Tree] | None


@public
def add_decayed_weights(
    weight_decay: LearningRate = 0.0, mask: Mask = None
) -> GradientTransformation:
    """``updates + weight_decay * params``, on the leaves that `mask` picks, as in Optax.

    Args:
        weight_decay: the factor, a number (state ``()``) or a schedule; not yet multiplied by the
            learning rate.
        mask: a tree or prefix tree of bools (True: decay), or a function from the parameters to
            one; None decays every leaf.

    Raises:
        ValueError: (when called) no parameters given, or `mask` does not fit them.
    """

    def decay(updates, params, factor):
        if params is None:
            raise ValueError(
                "add_decayed_weights: got params=None; wanted the parameters to decay; fix: call "
                "update(grads, state, params)"
            )
        flags = tree.unflatten(tree.structure(params), mask_leaves(mask, params))
        return tree.map(
            lambda u, p, flag: (u + factor * p.to(u.dtype)).to(u.dtype) if flag else u,
            updates,
            params,
            flags,
        )

    if not callable(weight_decay):
        return stateless(lambda u, p: decay(u, p, weight_decay) if _some(weight_decay) else u)

    def update(updates, state, params=None):
        out = decay(updates, params, weight_decay(state.count))
        return out, ScaleByScheduleState(state.count + 1)

    return transformation(
        lambda params: ScaleByScheduleState(new_count(params)),
        update,
        specs=lambda param_specs: ScaleByScheduleState(P()),
    )


def _some(weight_decay: float | torch.Tensor) -> bool:
    """Whether there is any decay, as far as one can know: of a tensor that is not asked for."""
    return isinstance(weight_decay, torch.Tensor) or bool(weight_decay)


@public
def masked(inner: GradientTransformation, mask: tree.Tree) -> GradientTransformation:
    """`inner` for the parameters that `mask` picks; the others are left alone, bit for bit.

    Nothing is remembered for those that are left alone, and no gradients are needed of them: both
    gradients and updates have None in their places, as ``tree.partition(params, mask)[0]`` has.
    Put it around all that belongs to the optimizer (`zero`, clipping), which then sees such trees.
    Collectives are those of `inner`.

    Args:
        inner: for the parameters that train.
        mask: a tree or prefix tree of bools.
    """

    def chosen(value: tree.Tree) -> tree.Tree:
        return tree.partition(value, mask)[0]

    def run(method: Callable, updates, state, params, **norm):
        return method(chosen(updates), state, None if params is None else chosen(params), **norm)

    def step_(grads, state, params, **norm):
        mine, others = tree.partition(params, mask)
        mine, state = inner.step_(chosen(grads), state, mine, **norm)
        return tree.join(mine, others), state

    return GradientTransformation(
        lambda params: inner.init(chosen(params)),
        lambda updates, state, params=None, **norm: run(
            inner.update, updates, state, params, **norm
        ),
        inner.specs,
        lambda updates, state, params=None, **norm: run(
            inner.update_, updates, state, params, **norm
        ),
        step_,
        inner.grad_specs,
        norm=norm_of_part(inner.norm, chosen),
    )


def mask_leaves(mask: Mask, params: Params) -> list[bool]:
    """One bool per leaf of `params`: whether `mask` picks it.

    Raises:
        ValueError: `mask` is not a prefix tree of bools; every offender is named.
    """
    chosen = mask(params) if callable(mask) else mask
    if chosen is None:
        return [True] * len(tree.leaves(params))
    flags = tree.broadcast_prefix(chosen, params, what="mask", wanted="a bool, or containers")
    raise_problems(
        "mask does not say for every leaf whether it is decayed",
        [
            Problem(f"mask/{path}", repr(flag), "True or False", "use bool(...)")
            for path, flag in zip(tree.paths(params), flags, strict=True)
            if not isinstance(flag, bool)
        ],
    )
    return flags


def not_norm_or_bias(params: Params) -> tree.Tree:
    """The usual decay mask: True except for leaves named as norms or biases.

    A leaf is exempt when a component of its path contains ``norm``, or is ``bias`` or ends with
    ``_bias``. Decided by name, as stacked layers make the number of dims useless for it.
    """

    def decays(path: str, _) -> bool:
        names = path.lower().split("/")
        return not any("norm" in n or n == "bias" or n.endswith("_bias") for n in names)

    return tree.map_with_path(decays, params)
