"""Reading a line of a program's text from left to right: names, values, types, comments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from functron.errors import Problem, raise_problems
from functron.program.equations import Var, Where
from functron.program.notation import DTYPES, Opaque, Type, contiguous, dtype_text
from functron.scopes import Phase
from functron.spmd.spec import P

_PHASES: Mapping[str, Phase] = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
}
_STRING = r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_NUMBER = r"(-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?))(?![\w.])"
_WORD = r"[\w./<>+*-]+"
_VALUE = "a value: %name, a number, a string, [..], (..), P(..), a dtype, a layout or a device"


class Line:
    """A line and how far it has been read.

    Attributes:
        number: of the line in the text, from 1.
        text: the line without the spaces around it.
        at: the position up to which it has been read.
    """

    def __init__(self, number: int, text: str):
        self.number, self.text, self.at = number, text.strip(), 0

    def fail(self, wanted: str, got: str = "", fix: str = "") -> NoReturn:
        """Raise a ValueError that says what was wanted in place of the rest of the line."""
        rest = self.text[self.at :].strip()
        got = got or (repr(rest) if rest else "the end of the line")
        problem = Problem(f"line {self.number}", got, wanted, fix)
        raise_problems("cannot parse the program", [problem])
        raise AssertionError("unreachable")

    def match(self, pattern: str) -> re.Match | None:
        """Step over `pattern` and the spaces before it, if it comes next."""
        found = re.compile(rf"\s*(?:{pattern})").match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def take(self, pattern: str, wanted: str) -> re.Match:
        """Step over `pattern`, which must come next."""
        return self.match(pattern) or self.fail(wanted)

    def end(self) -> None:
        """Check that nothing follows."""
        if self.text[self.at :].strip():
            self.fail("the end of the line")

    def word(self, wanted: str, pattern: str = _WORD) -> str:
        """A plain or quoted word."""
        if quoted := self.match(_STRING):
            return self._literal(quoted[1])
        return self.take(f"({pattern})", wanted)[1]

    def _literal(self, text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            self.fail("a Python literal", got=text)

    # --- values

    def value(self, lookup: Callable[[str], Var]) -> Any:
        """A variable, which `lookup` finds by its name, or a constant."""
        if name := self.match(r"%(\w+)"):
            return lookup(name[1])
        if text := self.match(_STRING):
            return self._literal(text[1])
        if number := self.match(_NUMBER):
            plain = re.fullmatch(r"-?\d+", number[1])
            return int(number[1]) if plain else float(number[1])
        if self.match(r"\["):
            return self._sequence(lookup, r"\]")
        if self.match(r"\("):
            return tuple(self._sequence(lookup, r"\)"))
        if self.match(r"P\("):
            return self._spec(self._sequence(lookup, r"\)"))
        if self.match(r"opaque\("):
            text = self.take(rf"{_STRING}\)", "opaque('...')")
            return Opaque(self._literal(text[1]))
        return self._named()

    def _sequence(self, lookup: Callable[[str], Var], close: str) -> list:
        values = []
        while not self.match(close):
            values.append(self.value(lookup))
            if not self.match(","):
                self.take(close, f"',' or {close[-1]!r}")
                break
        return values

    def _spec(self, entries: list) -> P:
        try:
            return P(*entries)
        except TypeError as error:
            self.fail("P of axis names, tuples of them, and None", got=str(error))

    def _named(self) -> Any:
        start = self.at
        name = self.take(r"([a-z]\w*(?::\d+)?|True|False|None)", _VALUE)[1]
        if name in ("True", "False", "None"):
            return ast.literal_eval(name)
        found = _dtype(name) or getattr(torch, name, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        try:
            return torch.device(name)
        except RuntimeError:
            self.at = start
            self.fail(_VALUE)

    def spec(self) -> P | None:
        """A partition spec; None where none comes next."""
        return self.value(self.no_variable) if self.match(r"(?=P\()") else None

    def no_variable(self, name: str) -> NoReturn:
        """The lookup where a constant is wanted."""
        self.fail("a constant", got=f"%{name}")

    # --- declarations and comments

    def declared(self) -> tuple[str, Type]:
        """``%name: type``."""
        name = self.take(r"%(\w+):", "%name: type")[1]
        return name, self.type()

    def result(self) -> tuple[str, Type] | None:
        """``%name: type``; None for ``_``."""
        return None if self.match(r"_(?!\w)") else self.declared()

    def type(self) -> Type:
        """``dtype[shape]{strides}@device``."""
        found = self.take(
            r"(\w+)\[([\d,]*)\](?:\{([\d,]*)\})?(?:@(\w+(?::\d+)?))?", "a type, such as f32[4,8]"
        )
        dtype = _dtype(found[1])
        if dtype is None:
            self.fail("a type, such as f32[4,8]", got=repr(found[0].strip()))
        shape = _numbers(found[2])
        stride = contiguous(shape) if found[3] is None else _numbers(found[3])
        if len(stride) != len(shape):
            self.fail(f"{len(shape)} strides", got=repr(found[0].strip()))
        return Type(shape, stride, dtype, torch.device(found[4] or "cpu"))

    def where(self) -> Where:
        """The comment of an equation, without what it says of bytes."""
        if not self.match("#"):
            return Where()
        phase = self.take("(forward|recompute|backward)", "forward, recompute or backward")[1]
        scopes = self._field("named scopes", _WORD)
        line = self._field("file:line", r"[\w./<>+*:-]+")
        return Where(_PHASES[phase], tuple(scopes.split("/")) if scopes else (), line)

    def _field(self, wanted: str, pattern: str) -> str:
        at_end = not self.text[self.at :].strip()
        return "" if at_end or self.match(r"-(?!\S)") else self.word(wanted, pattern)


def _dtype(name: str) -> torch.dtype | None:
    found = DTYPES.get(name) or getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and dtype_text(found) == name else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
