"""Applications: what is made with the library, each a folder that works, and goes, by itself.

This table is all that the house knows of them. The command line asks it for them, and the library
never does: what an application adds is passed to the library as an argument.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

APPLICATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "planner": ("plan", "recipe"),
    }
)
"""By the name of its folder: the commands that there are only with an application."""


def find(name: str) -> ModuleType | None:
    """The application of this name; None where its folder was left out."""
    assert name in APPLICATIONS, name
    return importlib.import_module(f"{__name__}.{name}") if _is_there(name) else None


def missing_commands() -> frozenset[str]:
    """The commands of applications that were left out."""
    left_out = (commands for name, commands in APPLICATIONS.items() if not _is_there(name))
    return frozenset(command for commands in left_out for command in commands)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{__name__}.{name}") is not None
    except ModuleNotFoundError:
        return False
