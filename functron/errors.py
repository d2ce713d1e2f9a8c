"""Errors that teach: where, what was got, what was wanted and the fix, all offenders at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


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
