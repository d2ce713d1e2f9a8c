"""Transformations for a subset of the parameters, chosen by masks, labels or paths.

Weight decay and its mask (`add_decayed_weights`); an optimizer for some parameters (`only`);
several side by side (`where`, `multi_transform`); and multiples of learning rates and weight decays
for groups of parameters, by patterns of their paths (`by_group`).
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.optim.schedules import LearningRate, scale_by_learning_rate, scheduled
from functron.optim.transformation import (
    GradientTransformation,
    Params,
    ask,
    chain,
    find_answers,
    keep_specs,
    name_norm,
    need_params,
    stateless,
    transformation,
)
from functron.optim.zero import flat_specs
from functron.spmd.axes import scope
from functron.spmd.spec import P, is_spec

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
            one; None decays every leaf. On more than one rank a function may look at paths, dtypes
            and numbers of dims, but not at sizes or values, as it may see shards.

    Raises:
        ValueError: (when called) no parameters given, or `mask` does not fit them, or looks at
            sizes or values of shards.
    """

    def decay(updates, params, factor, donated=False):
        need_params("add_decayed_weights", params, "to decay")
        flags = tree.unflatten(tree.structure(params), mask_leaves(mask, params))
        return tree.map(
            lambda u, p, flag: (u + factor * p.to(u.dtype)).to(u.dtype) if flag else u,
            updates,
            params,
            flags,
        )

    # of another function nobody knows whether it looks at shapes
    elementwise = not callable(mask) or mask is not_norm_or_bias
    if not callable(weight_decay):
        # of a tensor, whose value is not read, there is some
        some = isinstance(weight_decay, torch.Tensor) or bool(weight_decay)
        return stateless(
            lambda u, p: decay(u, p, weight_decay) if some else u, elementwise=elementwise
        )._replace(bind=keep_specs)
    return scheduled(weight_decay, decay, elementwise=elementwise)._replace(bind=keep_specs)


def decoupled(
    direction: GradientTransformation,
    learning_rate: LearningRate,
    weight_decay: LearningRate,
    mask: Mask,
) -> GradientTransformation:
    """`direction`, decoupled weight decay and the learning rate, one after the other."""
    decay = add_decayed_weights(weight_decay, mask)
    return chain(direction, decay, scale_by_learning_rate(learning_rate))


@public
def only(
    inner: GradientTransformation,
    mask: tree.Tree,
    others: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> GradientTransformation:
    """`inner` for the parameters that `mask` picks; the others stay as they are, bit for bit.

    The others have no state and need no gradients: gradients and updates have None in their places,
    as in ``tree.partition(params, mask)[0]``. Put it around the whole optimizer (`zero`, clipping),
    which then sees such trees. Collectives are those of `inner`.

    Args:
        inner: for the parameters that train.
        mask: a tree or prefix tree of bools.
        others: ``(parameter, gradient)`` to the new value of each of the other parameters, exact in
            `step_`; their gradients are sharded as the parameters are.
    """

    def chosen(value: tree.Tree) -> tree.Tree:
        return tree.partition(value, mask)[0]

    def rest(value: tree.Tree) -> tree.Tree:
        return tree.partition(value, mask)[1]

    def update(updates, state, params=None, **extra):
        mine = None if params is None else chosen(params)
        extra = name_norm(extra, updates)
        found, state = inner.update(chosen(updates), state, mine, **extra)
        if others is None or params is None:
            return found, state
        kept = rest(params)
        new = tree.map(others, kept, rest(updates))
        return tree.join(found, tree.map(torch.sub, new, kept)), state

    def step_(grads, state, params, **extra):
        mine, kept = chosen(params), rest(params)
        mine, state = inner.step_(chosen(grads), state, mine, **name_norm(extra, grads))
        if others is not None:
            kept = tree.map(others, kept, rest(grads))
        return tree.join(mine, kept), state

    def grad_specs(param_specs):
        wanted = inner.grad_specs(param_specs)
        if others is None:
            return wanted
        both = flat_specs(wanted, mask), flat_specs(param_specs, mask)
        return tree.map_columns(lambda flag, a, b: a if flag else b, mask, *both)

    def bind(param_specs, copies):
        own = param_specs if find_answers(param_specs) is None else own_specs(param_specs)
        bound = inner.bind(own, copies)
        return None if bound is inner else only(bound, mask, others)

    def own_specs(param_specs):
        """None for what is left alone as a whole; specs and mask may each be a prefix tree."""
        picked = [path and f"{path}/" for path, flag in tree.items(mask) if flag]

        def one(path: str, spec: P | None) -> P | None:
            at = path and f"{path}/"
            return spec if any(p.startswith(at) or at.startswith(p) for p in picked) else None

        return tree.map_with_path(one, param_specs, is_leaf=is_spec)

    return GradientTransformation(
        lambda params: inner.init(chosen(params)),
        update,
        step_,
        inner.specs,
        grad_specs,
        bind,
        elementwise=inner.elementwise and others is None,
    )


def mask_leaves(mask: Mask, params: Params) -> list[bool]:
    """One bool per leaf of `params`: whether `mask` picks it.

    Raises:
        ValueError: `mask` is not a prefix tree of bools, and every offender is named; or it is a
            function that looks at sizes or values where ranks may have parts of the parameters.
    """
    chosen = mask(_seen_by(mask, params)) if callable(mask) else mask
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


def _seen_by(mask: Callable, params: Params) -> Params:
    """The argument of a mask function: where leaves may be shards, a `_Part` of each."""
    split = any(axis is not None for axis in scope().axes.values()) or scope().stages is not None
    if mask is not_norm_or_bias or not split:
        return params

    def part(path: str, leaf: Any) -> Any:
        return _Part(path, leaf) if isinstance(leaf, torch.Tensor) else leaf

    return tree.map_with_path(part, params)


class _Part(torch.Tensor):
    """A leaf that may be a shard: it gives what is true of the whole leaf, and refuses the rest.

    A mask that went by the size of a shard would pick other leaves on other meshes.
    """

    path: str

    def __new__(cls, path: str, leaf: torch.Tensor) -> _Part:
        like = torch.empty([0] * leaf.dim(), dtype=leaf.dtype, device="meta")
        part = like.as_subclass(cls)
        part.path = path
        return part

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _OF_PARTS:
            found = [x.path for x in tree.leaves((args, kwargs)) if isinstance(x, _Part)]
            name = getattr(getattr(func, "__self__", None), "__name__", None) or func.__name__
            refuse(
                "a mask cannot be told what it asks for",
                f"mask, of parameter {found[0]}" if found else "mask",
                f"a function that looks at {name}, where ranks may have parts of parameters",
                "one of paths, dtypes and numbers of dims, which are the same for parts",
                "give the tree of bools that it makes of whole parameters, or of their ParamDefs",
            )
        return super().__torch_function__(func, types, args, kwargs)


_OF_PARTS = frozenset(
    {
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_floating_point,
        torch.is_complex,
        *(getattr(torch.Tensor, name).__get__ for name in ("ndim", "dtype", "itemsize")),
    }
)
"""The functions of tensors whose results for parts are those for wholes."""


def not_norm_or_bias(params: Params) -> tree.Tree:
    """The usual decay mask: True except for leaves named as norms or biases.

    A leaf is exempt when a component of its path contains ``norm``, or is ``bias`` or ends with
    ``_bias``. Decided by name, as stacked layers make the number of dims useless for it.
    """

    def decays(path: str, _) -> bool:
        names = path.lower().split("/")
        return not any("norm" in n or n == "bias" or n.endswith("_bias") for n in names)

    return tree.map_with_path(decays, params)


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

    Each sees trees with None in place of the other's leaves, and has no state for them. Optax's
    `masked` is ``where(mask, inner, identity())``. Collectives are theirs.

    Args:
        mask: one bool per parameter.
        chosen: for leaves that are true.
        others: for leaves that are false.

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
    """The transformation of its label for every leaf; Optax's `multi_transform` or `partition`.

    Each sees trees with None in place of others' leaves, and has no state for them; masks and other
    trees of all parameters fit these too. Collectives are theirs.

    Args:
        transforms: by label.
        labels: one label per parameter, or a function from a tree with the parameters' structure to
            such a tree, which must not look at the leaves (`tree.map_with_path`): they may be
            parameters, gradients or specs.

    Raises:
        ValueError: labels without a transformation, each with its path; (when called) labels with
            another structure than the parameters.
    """

    def checked(found: tree.Tree) -> tree.Tree:
        known = list(map(str, transforms))
        raise_problems(
            "multi_transform: some parameters have no transformation",
            [
                Problem(path, f"label {x!r}", "that of a transformation", nearest(str(x), known))
                for path, x in tree.items(found)
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

    def split(value: tree.Tree, labels: tree.Tree, name: str) -> list[tree.Tree]:
        leaves = tree.same_structure(labels, value, names=(what, name))
        return [_only(labels, leaves, label) for label in transforms]

    def merge(columns: Iterable[list], labels: tree.Tree) -> tree.Tree:
        """Of each label's leaves those that are its own."""
        by_label = dict(zip(transforms, columns, strict=True))
        rows = enumerate(tree.leaves(labels))
        return tree.unflatten(tree.structure(labels), [by_label[label][i] for i, label in rows])

    def run(methods: Iterable[Any], updates, state, params, **extra):
        labels, extra = labels_of(updates), name_norm(extra, updates)
        sides = [None] * len(several) if params is None else split(params, labels, "params")
        parts = split(updates, labels, "updates")
        rows = zip(methods, parts, unpack(state), sides, strict=True)
        results = [method(*row, **extra) for method, *row in rows]
        found = [tree.same_structure(labels, out, names=(what, "updates")) for out, _ in results]
        return merge(found, labels), pack([state for _, state in results])

    def update(updates, state, params=None, **extra):
        return run([t.update for t in several], updates, state, params, **extra)

    def step_(grads, state, params, **extra):
        _, state = run([t.step_ for t in several], grads, state, params, **extra)
        return params, state

    def divided(param_specs) -> tuple[tree.Tree, list[tree.Tree]]:
        """The labels, and the specs of each one's parameters."""
        labels = labels_of(tree.map(lambda spec: 0, param_specs, is_leaf=is_spec))
        flat = flat_specs(param_specs, labels)
        return labels, [_only(labels, flat, label) for label in transforms]

    def grad_specs(param_specs):
        labels, sides = divided(param_specs)
        rows = [
            flat_specs(t.grad_specs(side), labels) for t, side in zip(several, sides, strict=True)
        ]
        return merge(rows, labels)

    def specs(param_specs):
        _, sides = divided(param_specs)
        return pack([t.specs(side) for t, side in zip(several, sides, strict=True)])

    def init(params):
        sides = split(params, labels_of(params), "params")
        return pack([t.init(side) for t, side in zip(several, sides, strict=True)])

    def bind(param_specs, copies):
        alike = find_answers(param_specs) is None or param_specs == P()  # those of no parameters
        sides = [param_specs] * len(several) if alike else divided(param_specs)[1]
        bound = [t.bind(side, copies) for t, side in zip(several, sides, strict=True)]
        if all(map(operator.is_, bound, several)):
            return None
        by_label = dict(zip(transforms, bound, strict=True))
        return _side_by_side(by_label, labels_of, pack, unpack, what)

    if sum(bool(ask(t).scales) for t in several) > 1:
        refuse(what, "transforms", "several that scale the loss", "one", "let one do it for all")
    return transformation(
        init,
        update,
        specs,
        step_=step_,
        grad_specs=grad_specs,
        elementwise=all(t.elementwise for t in several),
    )._replace(bind=bind)


def _only(labels: tree.Tree, leaves: list, label: Hashable) -> tree.Tree:
    rows = zip(tree.leaves(labels), leaves, strict=True)
    chosen = [leaf if own == label else None for own, leaf in rows]
    return tree.unflatten(tree.structure(labels), chosen)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate or weight decay that is a multiple of the others'.

    Attributes:
        pattern: of whole paths, such as ``embed`` or ``blocks/*/norm/*`` (`*`, `?` and `[...]` as
            in a shell, where `*` is any text, slashes too).
        learning_rate: the multiple of the learning rate; 0 freezes these parameters.
        weight_decay: the multiple of the weight decay, in addition to that of the learning rate.
    """

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float = 1.0


_NAMES = {"lr": "learning_rate", "decay": "weight_decay"}


def parse_groups(
    text: str, path: str = "groups"
) -> tuple[tuple[ParameterGroup, ...], list[Problem]]:
    """The groups that a line describes, and its problems.

    ``"embed lr=0.1; blocks/*/router/* lr=0.5 decay=0"`` is two groups.

    Args:
        text: groups separated by semicolons, each a pattern and multiples by name.
        path: where the text is from, for messages.
    """
    groups, problems = [], []
    for row in filter(None, (part.strip() for part in text.split(";"))):
        pattern, *settings = row.split()
        values = {}
        for setting in settings:
            name, _, number = setting.partition("=")
            value = _number(number)
            if name not in _NAMES:
                fix = nearest(name, _NAMES)
                problems.append(Problem(path, setting, "lr=NUMBER or decay=NUMBER", fix))
            elif value is None:
                problems.append(Problem(path, setting, f"{name}= a finite number of at least 0"))
            else:
                values[_NAMES[name]] = value
        if not settings:
            fix = f"write {pattern} lr=0.1"
            problems.append(Problem(path, repr(row), "a pattern, then lr= or decay=", fix))
        groups.append(ParameterGroup(pattern, **values))
    return tuple(groups), problems


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def group_problems(
    params: tree.Tree, groups: Sequence[ParameterGroup], path: str = "groups"
) -> list[Problem]:
    """The groups that match no parameter of a whole model, each with the nearest path.

    Args:
        params: the parameters, or their `ParamDef`s.
        groups: the groups.
        path: where they are from, for messages.
    """
    paths = tree.paths(params)
    used = set(tree.leaves(group_labels(params, groups)))
    return [
        Problem(
            path,
            f"pattern {group.pattern!r}, which is the first to fit no path",
            "one that fits some",
            nearest(group.pattern, paths),
        )
        for i, group in enumerate(groups)
        if _name(i) not in used
    ]


def group_labels(params: tree.Tree, groups: Sequence[ParameterGroup]) -> tree.Tree:
    """For every parameter the label of the first group whose pattern matches its path, or "others".

    Labels are "group_0" and so on, as patterns are no names for what is saved.

    Args:
        params: the parameters, or their `ParamDef`s.
        groups: the groups.
    """

    def label(path: str, _) -> str:
        fits = (i for i, g in enumerate(groups) if fnmatch.fnmatchcase(path, g.pattern))
        found = next(fits, None)
        return _OTHERS if found is None else _name(found)

    return tree.map_with_path(label, params)


_OTHERS = "others"


def _name(index: int) -> str:
    return f"group_{index}"


def by_group(
    make: Callable[[ParameterGroup], GradientTransformation],
    params: tree.Tree,
    groups: Sequence[ParameterGroup],
    multiples: Mapping[str, float] = MappingProxyType({}),
) -> GradientTransformation:
    """`multi_transform` of one optimizer per group, and one for the parameters in no group.

    ``by_group(lambda g: adamw(g.learning_rate * 1e-3, weight_decay=g.weight_decay * 0.1), ...)``;
    with a schedule, ``lambda count: g.learning_rate * schedule(count)``. Every group has state, so
    that counts agree between pipeline ranks that hold none of its parameters; `group_problems`
    finds patterns that match nothing at all.

    Args:
        make: the optimizer of a group, which sees None in place of others' parameters.
        params: the parameters, or their `ParamDef`s.
        groups: a parameter belongs to the first group whose pattern matches its path.
        multiples: by path, multiples of learning rates, by which decays are divided, as
            `width_multiples` gives them for a whole model; 1 for other paths.
    """
    if not groups and not multiples:
        return make(ParameterGroup("*"))
    named = {_name(i): group for i, group in enumerate(groups)} | {_OTHERS: ParameterGroup("*")}
    values = [1.0, *sorted(set(multiples.values()) - {1.0})]

    def scaled(group: ParameterGroup, by: float) -> ParameterGroup:
        rate, decay = group.learning_rate * by, group.weight_decay / by
        return replace(group, learning_rate=rate, weight_decay=decay)

    def label(name: str, by: float) -> str:
        return name if by == 1 else f"{name}_width_{values.index(by)}"

    made = {label(name, by): make(scaled(named[name], by)) for name in named for by in values}
    labels = tree.map_with_path(
        lambda path, name: label(name, multiples.get(path, 1.0)), group_labels(params, groups)
    )
    return multi_transform(made, labels)
