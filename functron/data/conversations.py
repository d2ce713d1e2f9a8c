"""Conversations in JSONL files: one JSON object a line, in the shapes that are in use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functron.data.documents import find
from functron.errors import Problem, nearest, raise_problems

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""What ShareGPT's files call the roles."""


@dataclass(frozen=True)
class Line:
    """A line of a file, read.

    Attributes:
        where: the file and the line's number, from 1.
        messages: what was said, in order; empty where there are problems.
        tools: what the assistant was offered, for templates that describe it; None: nothing.
        problems: what is wrong with it.
    """

    where: str
    messages: tuple[Mapping[str, Any], ...]
    tools: Any = None
    problems: tuple[Problem, ...] = ()


def chat_files(path: str | Path) -> list[Path]:
    """The file `path`, or the ``.jsonl`` files of the folder, at any depth and in order.

    Raises:
        ValueError: nothing is there, it cannot be read, or it is empty.
    """
    root = Path(path)
    if not root.is_dir():
        return find(path)[0]
    inside = sorted(file for file in root.rglob("*.jsonl") if file.is_file())
    files = [f for f in inside if not any(p[0] == "." for p in f.relative_to(root).parts)]
    if not files:
        problem = Problem(f"data {path}", "a folder with no .jsonl file", "at least one")
        raise_problems("cannot read conversations", [problem])
    return files


def read_conversations(files: Sequence[Path]) -> Iterator[Line]:
    """The conversations of files, line after line, right or wrong; blank lines are passed over.

    A line is an object with

    - ``messages``: a list of ``{"role": ..., "content": ...}``, roles being `ROLES`;
    - ``conversations``: a list of ``{"from": ..., "value": ...}``, as ShareGPT has them; or
    - ``prompt`` and ``completion``: text of the user and of the assistant, or lists of messages,

    and, if it likes, ``tools``. Other keys are not read.
    """
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _read(f"{file}:{number}", line)


def _read(where: str, line: bytes) -> Line:
    try:
        found = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        got = f"byte {line[error.start]:#04x} at offset {error.start} of the line"
        return Line(where, (), problems=(Problem(where, got, "UTF-8"),))
    except json.JSONDecodeError as error:
        got = f"{error.msg} at column {error.colno}"
        return Line(where, (), problems=(Problem(where, got, "one JSON object a line"),))
    except RecursionError:
        return Line(where, (), problems=(Problem(where, "JSON too deep to read", "an object"),))
    problems: list[Problem] = []
    messages = _messages(where, found, problems)
    if problems:
        return Line(where, (), problems=tuple(problems))
    return Line(where, tuple(messages), found.get("tools"))


def _messages(where: str, found: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """The messages of a line's object, in one shape; what is wrong goes to `problems`."""
    shapes = '"messages", "conversations", or "prompt" and "completion"'
    if not isinstance(found, dict):
        problems.append(Problem(where, _kind(found), f"an object with {shapes}"))
        return []
    if "messages" in found:
        return _turns(where, "messages", found["messages"], problems)
    if "conversations" in found:
        return _sharegpt(where, found["conversations"], problems)
    if "prompt" in found and "completion" in found:
        both = []
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            value = found[name]
            turns = [{"role": role, "content": value}] if isinstance(value, str) else value
            both += _turns(where, name, turns, problems)
        return both
    keys = ", ".join(map(repr, found)) or "no keys"
    fix = "to train on the file as it is: --format text" if "text" in found else ""
    problems.append(Problem(where, f"an object with {keys}", shapes, fix))
    return []


def _sharegpt(where: str, turns: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """ShareGPT's turns as messages; those that are none are left for `_turns` to refuse."""
    if not isinstance(turns, list):
        return _turns(where, "conversations", turns, problems)
    found = []
    for turn in turns:
        if isinstance(turn, dict) and {"from", "value"} & turn.keys():
            role = turn.get("from")
            known = SHAREGPT.get(role, role) if isinstance(role, str) else role
            turn = {"role": known, "content": turn.get("value")}
        found.append(turn)
    return _turns(where, "conversations", found, problems)


def _turns(where: str, name: str, turns: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """`turns`, if each is a message; what is wrong goes to `problems`."""
    if not isinstance(turns, list) or not turns:
        got = "an empty list" if turns == [] else _kind(turns)
        problems.append(Problem(f"{where}: {name}", got, "at least one message"))
        return []
    before = len(problems)
    for index, turn in enumerate(turns):
        place = f"{where}: {name}[{index}]"
        if not isinstance(turn, dict):
            problems.append(Problem(place, _kind(turn), "an object with role and content"))
            continue
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or role not in ROLES:
            got = repr(role) if "role" in turn else "no role"
            fix = nearest(role, ROLES) if isinstance(role, str) else ""
            problems.append(Problem(f"{place}.role", got, f"one of {', '.join(ROLES)}", fix))
        calls = role == "assistant" and turn.get("tool_calls") and content is None
        if not calls and not (isinstance(content, str) and _is_unicode(content)):
            got = "no content" if content is None else _kind(content)
            got = "half of a surrogate pair" if isinstance(content, str) else got
            problems.append(Problem(f"{place}.content", got, "text"))
    return turns if len(problems) == before else []


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can write and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names[type(value)]
