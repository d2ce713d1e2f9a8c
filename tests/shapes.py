"""Holding calls against the shapes in annotations: of functions of modules and classes."""

from __future__ import annotations

import ast
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


def checked(function: Callable) -> Callable:
    """`beartype`, by a name of its own: by it compiled files are told apart from jaxtyping's."""
    return beartype.beartype(function)


def install(packages: Sequence[str]) -> None:
    """Check the annotations of every function in these packages; it must precede their import."""
    _import_hook.JaxtypingTransformer = _Outer
    install_import_hook(packages, f"{__name__}.{checked.__name__}")
