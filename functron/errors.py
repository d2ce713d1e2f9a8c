"""Errors that teach: where, what was got, what was wanted and the fix, all offenders at once.

What users call is `public`: errors leave it with the frames of the user's own code alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what a user passed.

    Attributes:
        path: tree path, field or argument at fault (``"params/blocks/up"``).
        got: what was passed, in the user's terms.
        wanted: what would have been right.
        fix: one thing to do about it.
    """

    path: str
    got: str
    wanted: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: got {self.got}; wanted {self.wanted}"
        return f"{text}; fix: {self.fix}" if self.fix else text


def raise_problems(
    title: str, problems: Iterable[Problem], error: type[Exception] = ValueError
) -> None:
    """Raise one `error` that lists every problem, or return when there is none.

    Args:
        title: what was being attempted, one line.
        problems: the offenders, in the order to show them.
        error: `ValueError` for bad values, `TypeError` for bad kinds.
    """
    found = list(problems)
    if found:
        raise error("\n".join([title, *(f"  - {problem}" for problem in found)]))


_LISTED = 30
"""More names than these do not help who looks for one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that suggests the known name closest to `name`, of many no others."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close and len(names) > _LISTED:
        return f"did you mean {close[0]!r}?"
    listed = ", ".join(names[:_LISTED]) or "none"
    listed += f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"did you mean {close[0]!r}? (known: {listed})" if close else f"use one of: {listed}"


# --- whose code an error comes out of

_LIBRARIES = frozenset(("functron", "torch", "optree", "jaxtyping", "beartype", "runpy"))
_GENERATED = ("<@beartype", "<eval_with_key>")

_full: contextvars.ContextVar[bool] = contextvars.ContextVar("functron_tracebacks", default=False)

F = TypeVar("F", bound=Callable)


def in_library(frame: FrameType) -> bool:
    """Whether a frame runs code of functron or of the libraries under it, not of the user."""
    name = str(frame.f_globals.get("__name__", ""))
    filename = frame.f_code.co_filename
    return name.partition(".")[0] in _LIBRARIES or filename.startswith(_GENERATED)


@contextlib.contextmanager
def full_tracebacks(full: bool = True) -> Iterator[None]:
    """Show the frames of functron and torch too in the tracebacks of errors in this with block.

    Without it they have the user's frames alone, down to the line that the error is about.

    Args:
        full: False leaves them out again, in a block within such a block.
    """
    token = _full.set(full)
    try:
        yield
    finally:
        _full.reset(token)


def public(fn: F) -> F:
    """`fn`, whose errors leave out the frames of the library: of what users call and nothing else.

    The exception stays the same object; `full_tracebacks` keeps its frames.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if not _full.get():
                _trim(error)
            raise  # without an argument, so that this frame is not added again

    made: Any = call
    return made


def made_public(value: Any) -> Any:
    """The function that `public` made `value` of; `value` itself where it did not."""
    is_public = getattr(value, "__code__", None) is _PUBLIC
    return value.__wrapped__ if is_public else value


_PUBLIC = public(lambda: None).__code__

_NOTE = (
    "(frames of functron and torch are left out; with functron.debug.full_tracebacks(): shows them)"
)


def _trim(error: BaseException) -> None:
    """Leave the user's frames in the traceback of `error` and of what it came from."""
    told = _is_told(error)
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = _users(found.__traceback__)
        before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if before is not None and _users(before.__traceback__) is None:
            # it came about in the library, so that what was raised of it says more
            found.__cause__, found.__context__, found.__suppress_context__ = None, before, True
        found = before
    if not told and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _is_told(error: BaseException) -> bool:
    """Whether `error` says it all: it is the user's own, or one that functron has words for."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not in_library(last.tb_frame):
        return True
    own = str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "functron"
    return own and isinstance(error, (ValueError, TypeError))


def _users(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        if not in_library(traceback.tb_frame):
            frames.append(traceback)
        traceback = traceback.tb_next
    kept = None
    for at in reversed(frames):
        kept = TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return kept
