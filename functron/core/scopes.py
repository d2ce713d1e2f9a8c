"""Where in a program an operation belongs: its named scopes, and forward, recompute or backward.

Nothing here changes what a program computes; `functron.program` writes it next to every operation.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

Phase = Literal["forward", "recompute", "backward"]
T = TypeVar("T")

_names: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "functron_named_scopes", default=()
)
_phase: contextvars.ContextVar[Phase] = contextvars.ContextVar("functron_phase", default="forward")


class set_during(Generic[T]):  # noqa: N801  (called as a function)
    """Give a context variable a value in this with block, whatever ends it.

    No generator: of one that Ctrl-C leaves unfinished Python runs the end when it is freed, after
    the blocks around it have ended, and that would give the variable their value for good.
    """

    def __init__(self, variable: contextvars.ContextVar[T], value: T):
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._token)


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
    with set_during(_names, (*_names.get(), name)):
        yield


in_scopes = functools.partial(set_during, _names)
"""``in_scopes(names)``: a with block in which exactly these named scopes are in force."""

in_phase = functools.partial(set_during, _phase)
"""``in_phase(phase)``: a with block in which what runs is forward, recompute or backward."""

watchers: contextvars.ContextVar[tuple] = contextvars.ContextVar("functron_watchers", default=())
"""Who asks for named values where a function runs (`functron.transforms.capture`)."""

scope_names = _names.get
"""``scope_names()``: the named scopes in force, outermost first."""

phase = _phase.get
"""``phase()``: which part of a differentiated program is running; "forward" where nothing is."""
