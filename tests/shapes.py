"""Holding calls against the shapes in annotations: of functions of modules and classes.

Of each function the first calls of a case: those that follow are of later layers and steps, with
the shapes of the first, and to hold them took a tenth of the time of all tests.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Sequence

import beartype
from jaxtyping import _import_hook, install_import_hook


class _Outer(_import_hook.JaxtypingTransformer):
    """Leaves functions inside of functions as they are.

    They would be decorated again whenever the function around them is called, which takes a
    millisecond or two each, of all tests a tenth of the time.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:  # noqa: N802 - as ast names it
        body, node.body = node.body, []
        super().visit_FunctionDef(node)
        node.body = body
        return node


FIRST_CALLS = 4
_done: list[Callable] = []  # functions that are not held any more in this case
_counts: dict[str, int] = {}  # by name, the calls in this case


def begin(all_calls: bool) -> None:
    """Begin a case, of which each function's first calls are held, or all."""
    for function in _done:
        vars(function).pop("__no_type_check__")
    _done.clear()
    _counts.clear()
    _counts[""] = sys.maxsize if all_calls else FIRST_CALLS


def first_calls(function: Callable) -> Callable:
    """`beartype` of what jaxtyping makes of a function's signature, which it calls to hold a call.

    The name of this function is of its own: by it compiled files are told apart from jaxtyping's.
    """
    held, name = beartype.beartype(function), f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(held)
    def counted(*args, **kwargs):
        _counts[name] = count = _counts.get(name, 0) + 1
        if count == 2 * _counts.get("", sys.maxsize):  # once before a call, and once after it
            original = _original(function)
            if original is not None:
                original.__no_type_check__ = True  # which jaxtyping asks for at each call
                _done.append(original)
        return held(*args, **kwargs)

    return counted


def _original(like: Callable) -> Callable | None:
    """The function of that module and name; None where it is not to be found by them."""
    found = sys.modules.get(like.__module__)
    for name in like.__qualname__.split("."):
        found = inspect.getattr_static(found, name, None)
    found = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else None
    same = getattr(found, "__qualname__", "") == like.__qualname__
    return found if inspect.isfunction(found) and same else None


def install(packages: Sequence[str]) -> None:
    """Check the annotations of every function in these packages; it must precede their import."""
    _import_hook.JaxtypingTransformer = _Outer
    install_import_hook(packages, f"{__name__}.{first_calls.__name__}")
