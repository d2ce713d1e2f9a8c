"""Learning rates and weight decays of their own for some parameters, by the path in the tree."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from functron import tree
from functron.errors import Problem, nearest
from functron.optim.transformation import GradientTransformation
from functron.optim.where import multi_transform


@dataclass(frozen=True)
class Group:
    """Parameters whose learning rate or weight decay is a multiple of that of the others.

    Attributes:
        pattern: of whole paths, such as ``embed`` or ``blocks/*/norm/*`` (`*`, `?` and `[...]` as
            in a shell, where `*` is any text, slashes too).
        learning_rate: the multiple of the learning rate; 0 keeps these parameters as they are.
        weight_decay: that of the weight decay, which is times the learning rate besides.
    """

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float = 1.0


_NAMES = {"lr": "learning_rate", "decay": "weight_decay"}


def parse_groups(text: str, path: str = "groups") -> tuple[tuple[Group, ...], list[Problem]]:
    """The groups that a line describes, and what is wrong with it.

    ``"embed lr=0.1; blocks/*/router/* lr=0.5 decay=0"`` is two groups.

    Args:
        text: groups separated by semicolons; of each the pattern, then multiples by name.
        path: where it is written, for messages.
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
        groups.append(Group(pattern, **values))
    return tuple(groups), problems


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def group_problems(
    params: tree.Tree, groups: Sequence[Group], path: str = "groups"
) -> list[Problem]:
    """The groups that have no parameter of a whole model, with the nearest path of one.

    Args:
        params: the parameters, or their `ParamDef`s.
        groups: those that there are.
        path: where they are written, for messages.
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


def group_labels(params: tree.Tree, groups: Sequence[Group]) -> tree.Tree:
    """Of every parameter the label of the first group whose pattern fits its path, or "others".

    Labels are "group_0" and so on, as patterns are no names for what is saved.

    Args:
        params: the parameters, or their `ParamDef`s.
        groups: those that there are.
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
    make: Callable[[Group], GradientTransformation],
    params: tree.Tree,
    groups: Sequence[Group],
    multiples: Mapping[str, float] = MappingProxyType({}),
) -> GradientTransformation:
    """`multi_transform` of an optimizer per group, and one for the parameters in none.

    ``by_group(lambda g: adamw(g.learning_rate * 1e-3, weight_decay=g.weight_decay * 0.1), ...)``;
    of a schedule, give ``lambda count: g.learning_rate * schedule(count)``. Every group has
    state, so that ranks of a pipeline that hold none of its parameters have the same counts; see
    `group_problems` for patterns that fit nothing at all.

    Args:
        make: the optimizer of a group, which sees None in place of others' parameters.
        params: the parameters, or their `ParamDef`s.
        groups: the first whose pattern fits a path has the parameter; none: `make` of the others.
        multiples: by path, what learning rates are multiplied by besides, and decays divided by, as
            `width_multiples` says of a whole model; of those that are not named nothing is.
    """
    if not groups and not multiples:
        return make(Group("*"))
    named = {_name(i): group for i, group in enumerate(groups)} | {_OTHERS: Group("*")}
    values = [1.0, *sorted(set(multiples.values()) - {1.0})]

    def scaled(group: Group, by: float) -> Group:
        rate, decay = group.learning_rate * by, group.weight_decay / by
        return replace(group, learning_rate=rate, weight_decay=decay)

    def label(name: str, by: float) -> str:
        return name if by == 1 else f"{name}_width_{values.index(by)}"

    made = {label(name, by): make(scaled(named[name], by)) for name in named for by in values}
    labels = tree.map_with_path(
        lambda path, name: label(name, multiples.get(path, 1.0)), group_labels(params, groups)
    )
    return multi_transform(made, labels)
