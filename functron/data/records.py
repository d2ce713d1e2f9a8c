"""A text that a reader found, or what is wrong with what it found."""

from __future__ import annotations

from typing import NamedTuple

from functron.errors import Problem


class Text(NamedTuple):
    """One document of a file.

    Attributes:
        text: what it says; empty where there is a problem.
        place: where it is in what was read, for the reader's ``where``.
        problem: why it cannot be read; None where it can.
    """

    text: str
    place: int
    problem: Problem | None = None


def kind_of(value: object) -> str:
    """What the user calls a JSON value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
