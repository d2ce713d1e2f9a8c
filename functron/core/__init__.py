"""The ground that everything stands on, with no meshes and no programs in it.

`tree` (nested containers with paths), `errors` (messages that teach), `random` (counter-based
keys), `scopes` (named scopes and phases), `closure` (tensors a function closes over), `settings`
(configurations in sections, and what fields say of options), `typing` (shapes in signatures),
`tables` (rows as text and HTML), `chart` (SVG), `compat` (private names of torch) and `functions`
(autograd Functions).

`import_lazily` lets a package import its public names when they are first used.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from types import ModuleType
from typing import Any


def import_lazily(package: str) -> None:
    """Let the public names of a package be imported when they are first used.

    The ``__init__`` of the package calls this with ``__name__``. Its public names, and where each
    is from, are told by the imports under ``if TYPE_CHECKING:``, which type checkers read too. So
    ``import functron.nn`` loads no layer, and ``functron.nn.mlp`` loads the module of that layer
    alone. ``dir()`` and ``__all__`` have all of them.

    Args:
        package: its dotted name.
    """
    sys.modules[package].__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    """A package that imports a public name when it is first asked for."""

    @property
    def __all__(self) -> list[str]:
        return sorted(_places(self.__name__))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _places(self.__name__):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, original = _places(self.__name__)[name]
        try:
            if module == self.__name__:
                value = importlib.import_module(f"{module}.{original}")
            else:  # as the statement would: `original` may be a module in a package
                value = getattr(__import__(module, fromlist=[original]), original)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # what that module imports
            left_out = f"{error.name} is not there: restore its folder, or do without this name"
            raise AttributeError(f"{self.__name__}.{name}: {left_out}") from None
        if type(value) is ModuleType and value.__name__.startswith("functron."):
            value.__class__ = _PublicModule
        self.__dict__[name] = value  # it is not asked for again
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # an import of functron.nn.mla would otherwise replace the function `mla` by the module
        place = _places(self.__name__).get(name) if isinstance(value, ModuleType) else None
        if place in (None, (self.__name__, name)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return self.__all__


class _PublicModule(ModuleType):
    """A module that is a public name of a package, such as ``functron.gpt``.

    To `dir`, and so to completion, it has no more than its public names: ``__all__``, or what it
    defines.
    """

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__.get("__all__") or _defined_names(self.__name__))


def _source(module: str) -> ast.Module:
    loader: Any = sys.modules[module].__loader__
    return ast.parse(loader.get_source(module))


@functools.cache
def _defined_names(module: str) -> tuple[str, ...]:
    """The names that a module defines at its top, without those that it imports."""
    found: list[str] = []
    for node in _source(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [
            n.id for each in targets if each for n in ast.walk(each) if isinstance(n, ast.Name)
        ]
    return tuple({name for name in found if not name.startswith("_")})


@functools.cache
def _places(package: str) -> dict[str, tuple[str, str]]:
    """The module and the name there of every public name of a package."""
    branches = (node for node in _source(package).body if isinstance(node, ast.If))
    (typed,) = (node for node in branches if ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
