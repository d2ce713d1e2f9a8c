"""The arguments of functions with rules of their own, and rules that are given after the function.

As JAX's decorators: arguments at `nondiff_argnums` come before what a rule is given of the others,
keywords and defaults are put in their places, and ``f.defvjp``, ``f.defjvp`` and ``f.defjvps`` say
what the rules are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.spmd.axes import user_line


def check_rules(name: str, f: Callable, rules: Mapping[str, Any]) -> None:
    """Raise TypeError for rules that are no functions."""
    raise_problems(
        f"{name} of {name_of(f)} at {user_line()}",
        [
            Problem(rule, repr(given), "a function", "give positions as nondiff_argnums=(...)")
            for rule, given in rules.items()
            if not callable(given)
        ],
        TypeError,
    )


def find_positions(name: str, f: Callable, nondiff_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """The positions of arguments without derivatives, from 0 and in order.

    Raises:
        ValueError: `f` has no parameter at one, or one is there twice.
        TypeError: one is no int.
    """
    given = [nondiff_argnums] if isinstance(nondiff_argnums, int) else [*nondiff_argnums]
    title, wanted = f"{name} of {name_of(f)} at {user_line()}", "positions of arguments of f"
    if any(isinstance(i, bool) or not isinstance(i, int) for i in given):
        refuse(title, "nondiff_argnums", repr(nondiff_argnums), wanted, "(0,)", TypeError)
    count = _count_parameters(f)
    if count is None and any(i < 0 for i in given):
        refuse(title, "nondiff_argnums", repr(nondiff_argnums), f"{wanted}, counted from 0")
    if count is not None:
        if any(not -count <= i < count for i in given):
            many = f"{count} positional argument{'s' * (count != 1)}"
            refuse(title, "nondiff_argnums", repr(nondiff_argnums), f"{wanted}, which has {many}")
        given = [i % count for i in given]
    if len({*given}) < len(given):
        refuse(title, "nondiff_argnums", repr(nondiff_argnums), f"{wanted}, each once")
    return tuple(sorted(given))


def _count_parameters(f: Callable) -> int | None:
    """The number of positional parameters; None where it is not known, or not bounded."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return None
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in by_place for kind in kinds)


def place_arguments(name: str, f: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """All arguments by position, with the defaults of `f` for those that are not given.

    Raises:
        TypeError: they do not fit, or one can be given by keyword alone.
    """
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except ValueError:  # of a function that is not Python's
        if kwargs:
            _refuse_keywords(name, f, kwargs)
        return args
    bound.apply_defaults()
    if bound.kwargs:
        _refuse_keywords(name, f, bound.kwargs)
    return bound.args


def _refuse_keywords(name: str, f: Callable, kwargs: Mapping[str, Any]) -> NoReturn:
    title, got = f"{name} of {name_of(f)} at {user_line()}", ", ".join(kwargs)
    wanted = "arguments that have a position, by which rules return derivatives"
    refuse(title, "keywords", got, wanted, "take them by position", TypeError)


class SplitArguments:
    """The arguments of a call, of which some have no derivatives.

    Attributes:
        fixed: those, in order.
        rest: the others.
    """

    def __init__(self, name: str, f: Callable, args: tuple, positions: Sequence[int]):
        if positions and positions[-1] >= len(args):
            got, wanted = f"{len(args)} arguments", f"one at {positions[-1]}, of nondiff_argnums"
            refuse(f"{name} of {name_of(f)} at {user_line()}", "arguments", got, wanted)
        self.fixed = tuple(args[i] for i in positions)
        self.rest = tuple(x for i, x in enumerate(args) if i not in positions)
        wanted = "a value that nothing differentiates"
        fix = "take it out of nondiff_argnums, with None for its cotangent; or lax.stop_gradient"
        raise_problems(
            f"{name} of {name_of(f)} at {user_line()}",
            [
                Problem(f"argument {i}", "a tensor that is differentiated", wanted, fix)
                for i, x in zip(positions, self.fixed, strict=True)
                for leaf in tree.leaves(x)
                if isinstance(leaf, torch.Tensor) and compat.is_tracked(leaf, mapped=False)
            ],
        )

    def in_place(self, function: Callable, positions: Sequence[int]) -> Callable:
        """A function of all arguments as one of the rest."""
        fixed = self.fixed  # in a cell of its own, in which transforms see tensors

        def of_rest(*rest: tree.Tree) -> tree.Tree:
            own, others = iter(fixed), iter(rest)
            count = len(fixed) + len(rest)
            return function(*(next(own if i in positions else others) for i in range(count)))

        return of_rest

    def in_front(self, rule: Callable) -> Callable:
        """A rule that takes those without derivatives first as one of what comes after them."""
        return functools.partial(rule, *self.fixed)


def name_of(f: Callable) -> str:
    """The name of a function in messages."""
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def refuse_missing_rules(name: str, f: Callable, way: str) -> NoReturn:
    """Raise ValueError for a call before the rules are known."""
    title, got = f"{name} of {name_of(f)} at {user_line()}", "a call before its rules are given"
    refuse(title, "rules", got, f"{name_of(f)}.{way}", f"call {way} after the definition of f")


def sum_tangents(wrapped: Callable, rules: Sequence[Callable | None]) -> Callable:
    """The rule of ``defjvps``: a tangent for each argument, added up.

    Args:
        wrapped: the function with its rule, by which derivatives of derivatives are its own too.
        rules: for each argument ``(tangent, out, *args) -> tangent of out``; None: it is zero.
    """

    def rule(args: tuple, tangents: tuple) -> tuple[tree.Tree, tree.Tree]:
        if len(rules) != len(args):
            got, wanted = f"{len(rules)} rules", f"one for each of {len(args)} arguments, or None"
            refuse(f"defjvps of {name_of(wrapped)}", "jvps", got, wanted)
        out = wrapped(*args)
        moved = tree.map(lambda x: torch.zeros_like(x) if tree.is_inexact(x) else None, out)
        leaves, structure = tree.flatten(moved, _is_none)
        for one, tangent in zip(rules, tangents, strict=True):
            if one is None or not tree.leaves(tangent):
                continue
            own = tree.same_structure(
                out, one(tangent, out, *args), names=("the result", "the rule's tangent")
            )
            leaves = [_add(x, y) for x, y in zip(leaves, own, strict=True)]
        return out, tree.unflatten(structure, leaves)

    return rule


def _add(total: torch.Tensor | None, tangent: Any) -> torch.Tensor | None:
    if total is None or tangent is None:
        return total
    is_tensor = isinstance(tangent, torch.Tensor)
    if not is_tensor or (tangent.shape, tangent.dtype) != (total.shape, total.dtype):
        got = f"{tuple(tangent.shape)} {tangent.dtype}" if is_tensor else repr(tangent)
        wanted = f"{tuple(total.shape)} {total.dtype}, as the result has"
        refuse("a rule of defjvps", "its tangent", got, wanted, "expand or convert it")
    return total + tangent


def _is_none(leaf: Any) -> bool:
    return leaf is None
