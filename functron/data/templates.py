"""Templates: conversations as text, and which of their tokens are the assistant's.

Templates come with models and are not trusted: they run in Jinja's sandbox, for `TEMPLATE_SECONDS`
and to `TEMPLATE_CHARACTERS` at most.
"""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse
from functron.data.mapped_files import SpecialNames

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and what else the template reads."""

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
"""The names of settings with special tokens, which templates know by these names."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as a model reads it.

    Attributes:
        text: what the template made of the messages.
        tokens, assistant: int64 ``[seq]``, and bool ``[seq]``: which of them are the assistant's,
            for the mask of a loss.
        spans: from where to where in `text` the assistant speaks.
        silent: how many of these have no token that something predicts.
        names: how many names of special tokens there are in the messages.
    """

    text: str
    tokens: torch.Tensor
    assistant: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    silent: int = 0
    names: int = 0


class Rendered(str):
    """A text that a template wrote; the spans `literal` of it are names of special tokens that are
    text, as they come from messages and not from the template.
    """

    literal: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """Jinja source that writes conversations as text.

    Args:
        source: of the template.
        folder: where it is, for messages.
        special: variables: special tokens by what they are for.
        names: of special tokens, which are text where messages have them.
    """

    def __init__(self, source: str, folder: Path, special: Mapping[str, str], names: SpecialNames):
        self._source, self._folder, self._special, self._names = source, folder, special, names
        self._mark = uuid.uuid4().hex  # which no message can have in it
        self._break = str(uuid.uuid4().int)  # likewise; the same in upper case
        self._environment = _make_environment(self._mark)

    def render_answers(
        self, messages: Sequence[Message], more: Mapping[str, Any]
    ) -> tuple[Rendered, list[tuple[int, int]]]:
        """The text, and the spans of it in which the assistant speaks: those that are marked, or
        what its messages add; ValueError where these depend on those after them.
        """
        text, spans = self.render(messages, False, more)
        if spans or re.search(r"{%-?\s*generation\s*-?%}", self._source):
            return text, spans
        problems = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self.render(messages[:index], True, more)[0]
            upto = self.render(messages[: index + 1], False, more)[0]
            if not (upto.startswith(prompt) and text.startswith(upto)):
                got = "text that changes with what stands around it"
                wanted = "a template that writes message after message"
                fix = "mark the assistant's text in it: {% generation %} ... {% endgeneration %}"
                problems.append(Problem(f"messages[{index}]", got, wanted, fix))
                continue
            spans.append((len(prompt), len(upto.rstrip())))
        raise_problems("cannot find the text of the assistant", problems)
        return text, spans

    def render(
        self, messages: Sequence[Message], prompt: bool, more: Mapping[str, Any]
    ) -> tuple[Rendered, list[tuple[int, int]]]:
        """The text, which ends with what makes the model answer where it is a `prompt`, and the
        spans of it that the template marks; ValueError where it refuses these messages.
        """
        given = {name: value for name, value in more.items() if name not in SPECIAL}
        found = count_names(self._names, messages, given)
        if not found:
            return self._remove_marks(self._run_template(messages, prompt, more))
        broken, others = self._mark_names(list(messages)), self._mark_names(given)
        text, spans = self._remove_marks(self._run_template(broken, prompt, {**more, **others}))
        plain = self._remove_marks(self._run_template(messages, prompt, more))
        if plain != (text, spans):
            got = f"{found} names of special tokens, on which what the template writes depends"
            wanted = "messages whose text the template writes as it is"
            fix = "take them out, or read them as special tokens: --special-tokens parse"
            refuse("the template reads special tokens in messages", "messages", got, wanted, fix)
        return text, spans

    @functools.cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self._source)

    def _run_template(
        self, messages: Sequence[Message], prompt: bool, more: Mapping[str, Any]
    ) -> str:
        """The text that the template writes, with marks."""
        from jinja2 import TemplateError

        variables = {"messages": list(messages), "add_generation_prompt": prompt, "tools": None}
        variables |= {"documents": None, **self._special, **more}
        try:
            self._environment.begin()
            pieces = []
            for piece in self._template.generate(**variables):
                self._environment.check(len(piece))
                pieces.append(piece)
            return "".join(pieces)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            refuse(
                "the template refuses this conversation",
                "messages",
                error,
                "messages that the model's template takes",
            )
        except (ArithmeticError, AttributeError, IndexError, MemoryError, RecursionError) as error:
            got = f"{type(error).__name__}: {error}"
            refuse("the template fails", str(self._folder), got, "a template that writes text")

    def _mark_names(self, value: Any) -> Any:
        """`value` with a mark inside of every name of a special token, at any depth."""
        if isinstance(value, str) and self._names.pattern is not None:
            return self._names.pattern.sub(lambda m: m[0][0] + self._break + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self._mark_names(name): self._mark_names(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_names(each) for each in value]
        return value

    def _remove_marks(self, marked: str) -> tuple[Rendered, list[tuple[int, int]]]:
        """A text without its marks, the spans that stood between them, and the names with one."""
        pieces, breaks, edges, size = [], [], [], 0
        for piece in re.split(f"({self._mark}|{self._break})", marked):
            if piece == self._mark:
                edges.append(size)
            elif piece == self._break:
                breaks.append(size - 1)
            else:
                pieces.append(piece)
                size += len(piece)
        text, pattern = Rendered("".join(pieces)), self._names.pattern
        found = [] if pattern is None else [pattern.match(text, start) for start in breaks]
        text.literal = tuple(match.span() for match in found if match is not None)
        return text, list(zip(edges[::2], edges[1::2], strict=True))


def count_names(names: SpecialNames, *values: Any) -> int:
    """How many names of special tokens there are in texts, at any depth."""
    found = 0
    for value in values:
        if isinstance(value, str):
            found += names.count(value)
        elif isinstance(value, Mapping):
            found += count_names(names, *value, *value.values())
        elif isinstance(value, list | tuple):
            found += count_names(names, *value)
    return found


def find_targets(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, int]:
    """Which tokens of a text lie in spans of it, and how many spans have none that is predicted.

    A token lies in a span if one of its own characters does. Spaces are not counted among these
    where it has others: ``" Paris"`` is in the span that ``Paris`` is, whoever wrote the space, and
    in no span that ends with that space. A token of spaces alone has those of its offsets, or,
    where a tokenizer leaves them out of offsets, those between the token before it and itself. What
    stands between the first and the last token of a span, such as a token that no character of the
    text stands for, is in it too: as in the mask of transformers' `apply_chat_template`, which is
    the same wherever it finds a token at both ends of a span. In a span of no characters, such as
    that of an empty answer, lies no token, whatever stands around it.

    Args:
        text: any.
        offsets: of its tokens, in characters.
        spans: from where to where, in characters.

    Returns:
        bool ``[tokens]``, and the number of spans without a token beyond the first of the text,
        which nothing predicts.
    """
    found = torch.zeros(len(offsets), dtype=torch.bool)
    own, end = [], 0
    for start, stop in offsets:
        left_out = not text[start:stop].strip() and not text[end:start].strip()
        own.append((min(start, end) if left_out else start, stop))
        end = max(end, stop)
    begins, ends = np.array(own, np.int64).reshape(-1, 2).T
    silent = 0
    for first, last in spans:
        if first >= last:
            silent += 1
            continue
        touching = np.flatnonzero((begins < last) & (first < ends)).tolist()
        inside = functools.partial(_lies_in, text, own, (first, last))
        begin = next(filter(inside, touching), None)
        final = next(filter(inside, reversed(touching)), None)
        if begin is not None and final is not None:
            found[begin : final + 1] = True
        silent += not final  # nothing predicts the first token
    return found, silent


def _lies_in(text: str, own: Sequence[tuple[int, int]], span: tuple[int, int], index: int) -> bool:
    """Whether a token, which touches a span, has more than spaces there, or is of spaces alone."""
    start, stop = own[index]
    shared = text[max(start, span[0]) : min(stop, span[1])]
    return bool(shared.strip()) or not text[start:stop].strip()


def find_by_first(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, int]:
    """As `find_targets`, by the first characters of tokens alone: version 1 of the rules."""
    found, end = torch.zeros(len(offsets), dtype=torch.bool), 0
    begins = []
    for start, stop in offsets:
        begins.append(min(start, end) if not text[end:start].strip() else start)
        end = max(end, stop)
    for index, start in enumerate(begins):
        found[index] = any(first <= start < max(last, first) for first, last in spans)
    silent = sum(not any(a <= start < b for start in begins[1:]) for a, b in spans)
    return found, silent


TEMPLATE_SECONDS = 10.0
"""How long a template may take to write a conversation."""

TEMPLATE_CHARACTERS = 1 << 24
"""How many characters a template may write, and join in a text of its own."""


def _make_generation_tag(mark: str) -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """``{% generation %} ... {% endgeneration %}`` around the assistant's text."""

        tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (nodes.Output([nodes.TemplateData(mark)]) for _ in range(2))
            return [first.set_lineno(line), *body, last.set_lineno(line)]

    return Generation


def _make_environment(mark: str) -> Any:
    """Jinja as chat templates expect it, in a sandbox: no attribute of Python's can be reached.

    What a template marks as the assistant's comes out with `mark` before and after it. Every turn
    of a loop and call of a macro looks at the clock, and operators that make texts at their length.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Limited(ImmutableSandboxedEnvironment):
        """A sandbox that a template cannot keep busy or fill."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def begin(self) -> None:
            """Give a template its time and characters."""
            self.deadline, self.left = time.monotonic() + TEMPLATE_SECONDS, TEMPLATE_CHARACTERS

        def check(self, written: int = 0) -> str:
            """Raise where time is over, or more is written than may be."""
            self.left -= written
            if self.left < 0:
                raise TemplateError(f"it writes more than {TEMPLATE_CHARACTERS} characters")
            if time.monotonic() > self.deadline:
                raise TemplateError(f"it takes longer than {TEMPLATE_SECONDS:g} seconds")
            return ""

        def joined(self, *parts: Any) -> str:
            """The text of `parts`, one after another."""
            texts = [str(part) for part in parts]
            return self._short(sum(map(len, texts))) or "".join(texts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """The result of an operator, where it is not too long."""
            long = [len(x) for x in (left, right) if isinstance(x, (str, list, tuple))]
            whole = [abs(x) for x in (left, right) if isinstance(x, int)]
            if operator == "+":
                self._short(sum(long))
            elif operator == "*" and long:
                self._short(long[0] * max(whole, default=0))
            elif operator in ("*", "**") and len(whole) == 2:
                bits = whole[0].bit_length() * (whole[1] if operator == "**" else 1)
                self._short(bits + whole[1].bit_length())
            return super().call_binop(context, operator, left, right)

        def _short(self, count: int) -> str:
            if count > TEMPLATE_CHARACTERS:
                raise TemplateError(
                    f"it makes a text of more than {TEMPLATE_CHARACTERS} characters"
                )
            return ""

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for found in list(tree.find_all(nodes.Concat)):
                found.nodes = [_make_call(nodes, "joined", found.nodes)]
            for found in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
                found.body.insert(0, nodes.ExprStmt(_make_call(nodes, "check", [])))
            return tree

    environment = Limited(
        trim_blocks=True, lstrip_blocks=True, extensions=[_make_generation_tag(mark), loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _make_call(nodes: Any, name: str, arguments: Sequence[Any]) -> Any:
    """The call of a method of the environment, in a template."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
