"""Where in a program an operation belongs: its named scopes, and forward, recompute or backward.

Nothing here changes what a program computes; `functron.program` writes it next to every operation.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

Phase = Literal["forward", "recompute", "backward"]

_names: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "functron_named_scopes", default=()
)
_phase: contextvars.ContextVar[Phase] = contextvars.ContextVar("functron_phase", default="forward")


@contextlib.contextmanager
def named_scope(name: str) -> Iterator[None]:
    """Call what runs in this with block, or in this decorated function, `name`; scopes nest.

    The names show in traced programs, joined with slashes, and operations of the backward pass
    carry those of the forward operations that they differentiate. As `jax.named_scope`.

    Raises:
        ValueError: the name is empty or holds a slash.
    """
    if not name or "/" in name:
        raise ValueError(f"named_scope: got {name!r}; wanted a name without slashes")
    token = _names.set((*_names.get(), name))
    try:
        yield
    finally:
        _names.reset(token)


@contextlib.contextmanager
def in_scopes(names: tuple[str, ...]) -> Iterator[None]:
    """Let exactly these named scopes be in force in this with block: those of another place."""
    token = _names.set(names)
    try:
        yield
    finally:
        _names.reset(token)


@contextlib.contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Say that what runs in this with block is forward, recompute or backward."""
    token = _phase.set(phase)
    try:
        yield
    finally:
        _phase.reset(token)


def scope_names() -> tuple[str, ...]:
    """The named scopes in force, outermost first."""
    return _names.get()


def phase() -> Phase:
    """Which part of a differentiated program is running; "forward" where nothing is."""
    return _phase.get()
