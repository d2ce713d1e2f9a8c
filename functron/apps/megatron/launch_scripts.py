"""Launch lines: the words that a shell script would give to a training program. Nothing is run.

A script is read as bash would, as far as launch scripts go: variables and arrays, ``${NAME:-word}``
and its kin, quotes, line continuations, arithmetic, ``if``, ``case``, ``&&`` and functions. What
only a shell can know (the output of a command, a variable of its surroundings) stays open: it is
written ``${NAME}`` in the words, and `variables` says it. Loops are refused.

The launch is the command with most options that are known. Of its launcher (torchrun, srun,
mpirun) the number of processes is read.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from functron.core.errors import Problem, raise_problems, refuse

TITLE = "cannot read the launch line"
_MOST_TEXT = 1_000_000
_MOST_WORDS = 100_000
_MOST_EDITED = 4096  # characters of a value that patterns are taken off
_MOST_DEPTH = 12
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Around what stays open in a text; no script has them."""

_ECHO = "put echo before the command, run it, and give the words that it prints"


@dataclass(frozen=True)
class LaunchLine:
    """The command that starts a training.

    Attributes:
        program: the file of its program, such as ``pretrain_gpt.py``; empty: it names none.
        words: what follows the program.
        processes: how many its launcher starts; 0: it does not say.
    """

    program: str
    words: tuple[str, ...]
    processes: int = 0


def is_open(word: str) -> bool:
    """Whether a word has a variable that nothing sets."""
    return _OPEN in word


def shown(word: str) -> str:
    """A word with its open variables as a script writes them."""
    return word.replace(_OPEN, "${").replace(_CLOSE, "}")


def open_names(word: str) -> list[str]:
    """The variables that are open in a word."""
    return re.findall(f"{_OPEN}([^{_CLOSE}]*)", word)


def read_script(
    text: str, options: Collection[str], variables: Mapping[str, str] | None = None
) -> LaunchLine:
    """The launch line in a script, or in a text that has arguments alone.

    Args:
        text: the script.
        options: names, without dashes, of which the launch has most.
        variables: those that the script does not set, by name; ``"1"`` is its first argument. As in
            a shell, the script's own assignments win.

    Raises:
        ValueError: the script is cut off, has what is not read here, or launches nothing; all such
            places are listed with their lines.
    """
    if len(text) > _MOST_TEXT:
        refuse(TITLE, "the script", f"{len(text)} characters", f"at most {_MOST_TEXT}")
    text = text.translate({ord(_OPEN): None, ord(_CLOSE): None, ord("\r"): None})
    lines = (line.lstrip() for line in text.splitlines())
    plain = next((line for line in lines if line and line[0] != "#"), "").startswith("-")
    shell = _Shell(dict(variables or {}))
    shell.run(_tokens(text, joined=plain, problems=shell.problems))
    raise_problems(TITLE, shell.problems)
    found = _launch(shell, options)
    if found is None:
        got, fix = "no command with options of Megatron-LM", ""
        if shell.left:
            got, fix = shell.left, "--env NAME=VALUE sets a variable, 1=VALUE the first argument"
        refuse(TITLE, "the script", got, "one that launches a training", fix or _ECHO)
    words, line = found
    return _parted(words, line, _batch_processes(text))


# --- tokens


class _Part(NamedTuple):
    """A part of a word: a text, or ``$`` and what is between its braces or brackets."""

    kind: str  # text, var, arith, command
    text: str
    quoted: bool


class _Token(NamedTuple):
    """A word, of parts, or an operator; and the line that it is on."""

    parts: tuple[_Part, ...] | None
    text: str
    line: int


_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|&>>|&>|<<<|>>|<<-?|[<>]&|>\||[;|&<>(){}\n]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")


def _tokens(text: str, *, joined: bool, problems: list[Problem]) -> list[_Token]:
    """The words and operators of a script.

    Args:
        text: the script.
        joined: lines go on.
        problems: where quotes and brackets that nothing closes are noted.
    """
    found: list[_Token] = []
    index, line, documents = 0, 1, []
    while index < len(text):
        char = text[index]
        if text.startswith("\\\n", index):
            index, line = index + 2, line + 1
        elif char == "\n":
            if not joined:
                found.append(_Token(None, "\n", line))
            index, line = index + 1, line + 1
            for end in documents:  # of here documents, which say nothing of a launch
                stop = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(text, index)
                after = stop.end() if stop else len(text)
                line += text.count("\n", index, after)
                index = after
            documents = []
        elif char.isspace():
            index += 1
        elif char == "#":
            end = text.find("\n", index)
            index = end if end >= 0 else len(text)
        elif (match := _OPERATOR.match(text, index)) and not _brace_in_word(text, index):
            found.append(_Token(None, match[0], line))
            index = match.end()
            if match[0] in ("<<", "<<-") and (
                word := re.compile(r"\s*[\"']?(\w+)").match(text, index)
            ):
                documents.append(word[1])
        else:
            parts, end, closed = _word(text, index)
            if not closed:
                got, wanted = "a quote or bracket that nothing closes", "one that is closed"
                problems.append(Problem(f"line {line}", got, wanted))
            found.append(_Token(tuple(parts), "", line))
            line += text.count("\n", index, end)
            index = end
    return found


def _brace_in_word(text: str, index: int) -> bool:
    """Whether a brace is part of a word, as in ``{a,b}``, and no bracket of commands."""
    if text[index] not in "{}":
        return False
    return not (index + 1 == len(text) or text[index + 1] in " \t\n;&|)")


def _word(text: str, index: int) -> tuple[list[_Part], int, bool]:
    """The parts of the word at `index`, where it ends, and whether all that it opens is closed."""
    parts: list[_Part] = []
    closed = True
    while index < len(text):
        char = text[index]
        if char == "\\":
            parts += [] if text[index + 1 : index + 2] == "\n" else [
                _Part("text", text[index + 1 : index + 2], True)
            ]  # fmt: skip
            index += 2
        elif char == "'":
            end = text.find("'", index + 1)
            closed &= end >= 0
            end = end if end >= 0 else len(text)
            parts.append(_Part("text", text[index + 1 : end], True))
            index = end + 1
        elif char == '"':
            inner, index, whole = _quoted(text, index + 1)
            parts += inner
            closed &= whole
        elif char in "$`":
            part, index, whole = _dollar(text, index, False)
            parts.append(part)
            closed &= whole
        elif char.isspace() or char in ";|&<>()":
            break
        else:
            end = index + 1
            while end < len(text) and text[end] not in "\\'\"$`;|&<>()" and not text[end].isspace():
                end += 1
            parts.append(_Part("text", text[index:end], False))
            index = end
    return parts, index, closed


def _quoted(text: str, index: int) -> tuple[list[_Part], int, bool]:
    """The parts between double quotes, of which the first is before `index`."""
    parts, plain = [], ""
    while index < len(text) and text[index] != '"':
        char = text[index]
        if char == "\\" and text[index + 1 : index + 2] in ('"', "\\", "$", "`", "\n"):
            plain += text[index + 1].replace("\n", "")
            index += 2
        elif char in "$`":
            parts.append(_Part("text", plain, True))
            part, index, whole = _dollar(text, index, True)
            plain = ""
            parts.append(part)
            if not whole:
                return parts, index, False
        else:
            plain += char
            index += 1
    parts.append(_Part("text", plain, True))
    return parts, index + 1, index < len(text)


def _dollar(text: str, index: int, quoted: bool) -> tuple[_Part, int, bool]:
    """The expansion that begins with ``$`` or a backquote at `index`."""
    if text[index] == "`":
        end = text.find("`", index + 1)
        stop = end if end >= 0 else len(text)
        return _Part("command", text[index + 1 : stop], quoted), stop + 1, end >= 0
    for begin, end_text, kind in (
        ("$((", "))", "arith"),
        ("$(", ")", "command"),
        ("${", "}", "var"),
    ):
        if text.startswith(begin, index):
            start = index + len(begin)
            end = _closing(text, start, end_text)
            stop = end if end >= 0 else len(text)
            return _Part(kind, text[start:stop], quoted), stop + len(end_text), end >= 0
    match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, index)
    if match:
        return _Part("var", match[1], quoted), match.end(), True
    return _Part("text", "$", quoted), index + 1, True


def _closing(text: str, index: int, end: str) -> int:
    """Where what closes the bracket before `index` begins; -1: nowhere."""
    opening = {"}": "{", ")": "(", "))": "("}[end]
    depth = 0
    while index < len(text):
        if not depth and text.startswith(end, index):
            return index
        char = text[index]
        if char == "\\":
            index += 1
        elif char == "'" and end == ")":
            index = text.find("'", index + 1)
            if index < 0:
                return -1
        elif char == opening:
            depth += 1
        elif char == end[0]:
            depth -= 1
        index += 1
    return -1


# --- the shell

_LOOPS = ("for", "while", "until", "select")
_QUIET = frozenset(("echo", "printf", "mkdir", "cd", "source", ".", "set", "ulimit", "module"))
_DECLARE = frozenset(("export", "local", "declare", "readonly", "typeset"))


@dataclass
class _Shell:
    """The state of a script so far: its variables, and the commands that it would have run."""

    variables: dict[str, Any]
    commands: list[tuple[list[str], int]] = field(default_factory=list)
    functions: dict[str, list[_Token]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    left: str = ""
    depth: int = 0

    def run(self, tokens: Sequence[_Token]) -> bool | None:
        """Go through commands; whether the last one was true, None: only a shell could tell."""
        self.depth += 1
        truth: bool | None = True
        index = 0
        if self.depth > _MOST_DEPTH:
            self._cannot(tokens[0].line if tokens else 0, "commands within commands", _ECHO)
            index = len(tokens)
        while index < len(tokens) and not self.left and len(self.problems) < 20:
            index, truth = self._command(tokens, index, truth)
        self.depth -= 1
        return truth

    def _cannot(self, line: int, got: str, fix: str = _ECHO) -> None:
        self.problems.append(Problem(f"line {line}", got, "a script without it", fix))

    def _command(
        self, tokens: Sequence[_Token], index: int, truth: bool | None
    ) -> tuple[int, bool | None]:
        """Do what begins at `index`; where it ends, and whether it was true."""
        token = tokens[index]
        word = _literal(token)
        if token.parts is None and token.text in ("&&", "||"):
            end = _end_of_command(tokens, index + 1)
            goes_on = truth if token.text == "&&" else None if truth is None else not truth
            if goes_on:
                return index + 1, truth
            if goes_on is None and _matters(tokens[index + 1 : end]):
                self._cannot(token.line, "a condition that only a shell can tell")
            return end, truth
        if word == "if":
            return self._if(tokens, index)
        if word == "case":
            return self._case(tokens, index)
        if word in _LOOPS:
            self._cannot(token.line, f"a loop: {word}")
            return len(tokens), truth
        if token.parts is None:
            if token.text in ("(", "{"):
                end = _matching(tokens, index)
                if token.text == "(" and _next_is(tokens, index, "("):  # (( expression ))
                    return end, None
                return end, self.run(tokens[index + 1 : end - 1])
            return index + 1, truth
        if word == "function" or _is_function(tokens, index):
            name = index + 1 if word == "function" else index
            start = next((i for i in range(name, len(tokens)) if tokens[i].text == "{"), None)
            if start is None:
                return len(tokens), truth
            end = _matching(tokens, start)
            self.functions[_literal(tokens[name]) or ""] = list(tokens[start + 1 : end - 1])
            return end, truth
        end = _end_of_command(tokens, index)
        return end, self._simple(tokens[index:end])

    def _if(self, tokens: Sequence[_Token], index: int) -> tuple[int, bool | None]:
        """An ``if`` with all its branches."""
        end, marks = _branches(tokens, index, ("then", "elif", "else", "fi"))
        pieces = [
            (_literal(tokens[a]), tokens[a + 1 : b])
            for a, b in zip([index, *marks], marks, strict=False)
        ]
        truth: bool | None = False
        for name, body in pieces:
            if name in ("if", "elif"):
                truth = self.run(body)
            elif name == "then" and truth is None:
                # a guard that ends the script is taken for not met
                if not _exits(body) and _matters(body):
                    self._cannot(tokens[index].line, "a condition that only a shell can tell")
                truth = False
            elif (name == "then" and truth) or name == "else":
                return end, self.run(body)
        return end, True

    def _case(self, tokens: Sequence[_Token], index: int) -> tuple[int, bool | None]:
        """A ``case``: the first pattern that fits."""
        end, _ = _branches(tokens, index, ("esac",))
        value = "".join(self.expand(tokens[index + 1])) if index + 1 < end else ""
        at = index + 3
        while at < end - 1:
            close = next((i for i in range(at, end) if tokens[i].text == ")"), end - 1)
            patterns = [_text(t) for t in tokens[at:close] if t.parts is not None]
            stop = close + 1
            while stop < end - 1 and tokens[stop].text not in (";;", ";&", ";;&"):
                inner = _literal(tokens[stop])
                stop = _branches(tokens, stop, ("esac",))[0] if inner == "case" else stop + 1
            if any(fnmatch.fnmatchcase(_closed(value), pattern) for pattern in patterns):
                return end, self.run(tokens[close + 1 : stop])
            at = stop + 1
            while at < end - 1 and tokens[at].text == "\n":
                at += 1
        return end, True

    def _simple(self, tokens: Sequence[_Token]) -> bool | None:
        """Assignments, a test, or a command that is noted."""
        tokens = _without_redirections(tokens)
        index = 0
        line = tokens[0].line if tokens else 0
        first = _literal(tokens[0]) if tokens else None
        if first in _DECLARE:
            tokens = [t for t in tokens[1:] if not (_literal(t) or "").startswith("-")]
        while index < len(tokens) and (match := _ASSIGN.match(_text(tokens[index]))):
            index = self._assign(tokens, index, match)
        if first in _DECLARE or index == len(tokens):
            return True
        whole = first == "[["  # whose words are not split
        words = [
            word
            for token in tokens[index:]
            for word in ([self._joined(token.parts or ())] if whole else self.expand(token))
        ]
        if not words:
            return True
        name = words[0]
        if name in ("[", "[[", "test"):
            return _test([_closed(word) for word in words[1:] if word not in ("]", "]]")])
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("exit", "return"):
            self.left = f"exit in line {line}" if name == "exit" else self.left
            return True
        if name in self.functions:
            return self._call(name, words[1:])
        if name == "shift":
            count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            self._shift(count)
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word, None)
        elif name not in _QUIET:
            self.commands.append((words, line))
            return None
        return True

    def _call(self, name: str, words: Sequence[str]) -> bool | None:
        outer = {k: v for k, v in self.variables.items() if k.isdigit()}
        for key in outer:
            del self.variables[key]
        self.variables |= {str(n): word for n, word in enumerate(words, 1)}
        truth = self.run(self.functions[name])
        for key in [k for k in self.variables if k.isdigit()]:
            del self.variables[key]
        self.variables |= outer
        return truth

    def _shift(self, count: int) -> None:
        numbers = sorted(int(k) for k in self.variables if k.isdigit())
        moved = {str(n - count): self.variables.pop(str(n)) for n in numbers}
        self.variables |= {k: v for k, v in moved.items() if int(k) > 0}

    def _assign(self, tokens: Sequence[_Token], index: int, match: re.Match) -> int:
        """Do an assignment; where it ends."""
        name, adds = match[1], bool(match[2])
        rest = _after(tokens[index], match.end())
        before = self.variables.get(name)
        if not rest and _next_is(tokens, index, "("):
            end = _matching(tokens, index + 1)
            items = [w for t in tokens[index + 2 : end - 1] if t.parts for w in self.expand(t)]
            old = before if isinstance(before, list) else [before] if before else []
            self.variables[name] = [*old, *items] if adds else items
            if len(self.variables[name]) > _MOST_WORDS:
                line, wanted = f"line {tokens[index].line}", f"at most {_MOST_WORDS} words"
                refuse(TITLE, line, "an array without end", wanted)
            return end
        value = self._joined(rest)
        if adds and isinstance(before, list):
            before[:1] = [(before[0] if before else "") + value]
        else:
            self.variables[name] = (before or "") + value if adds else value
        return index + 1

    # --- expansion

    def expand(self, token: _Token) -> list[str]:
        """The words that a word becomes."""
        if token.parts is None:
            return []
        words: list[str] = []
        current: str | None = None
        for part in token.parts:
            pieces = self._pieces(part)
            if part.quoted or part.kind == "text":
                listed = part.kind == "var" and _is_all(part.text, "@")
                if listed and not pieces:
                    continue
                current = (current or "") + (pieces[0] if pieces else "")
                for piece in pieces[1:]:
                    words.append(current)
                    current = piece
            else:
                text = " ".join(pieces)
                fields = _FIELD.findall(text)
                if not fields:
                    continue
                if text[:1].isspace() and current is not None:
                    words.append(current)
                    current = None
                current = (current or "") + fields[0]
                words += [current, *fields[1:-1]] if len(fields) > 1 else []
                current = fields[-1] if len(fields) > 1 else current
        if sum(map(len, words)) + len(current or "") > _MOST_TEXT:
            refuse(TITLE, f"line {token.line}", "a word without end", f"{_MOST_TEXT} characters")
        return words if current is None else [*words, current]

    def _joined(self, parts: Sequence[_Part]) -> str:
        """The text of parts, which is not split."""
        text = "".join(" ".join(self._pieces(part)) for part in parts)
        if len(text) > _MOST_TEXT:
            refuse(TITLE, "a variable", "a text without end", f"{_MOST_TEXT} characters")
        return text

    def _pieces(self, part: _Part) -> list[str]:
        if part.kind == "text":
            return [part.text]
        if part.kind == "arith":
            value = _arithmetic(self._inside(part.text), self._number)
            return [_opened(f"(({part.text}))") if value is None else str(value)]
        if part.kind == "command":
            return [_opened(f"({' '.join(part.text.split())})")]
        return self._variable(part.text)

    def _inside(self, text: str) -> str:
        """A text with its variables, as between brackets."""
        if self.depth + 1 > _MOST_DEPTH:
            return text
        self.depth += 1
        parts, _, _ = _quoted(text.replace('"', '\\"'), 0)
        found = self._joined(parts)
        self.depth -= 1
        return found

    def _number(self, name: str) -> int | None:
        value = self.variables.get(name, 0)
        text = str(value[0] if isinstance(value, list) and value else value)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None

    def _variable(self, text: str) -> list[str]:
        """The values of what is between the braces of ``${...}``."""
        if text in ("@", "*"):
            numbers = sorted(int(k) for k in self.variables if k.isdigit())
            return [self._joined_value(str(n)) for n in numbers]
        if text == "#":
            return [str(sum(k.isdigit() for k in self.variables))]
        if text.startswith("#"):
            value = self.variables.get(re.split(r"\[", text[1:])[0], "")
            return [str(len(value))]
        if text.startswith("!"):
            return self._variable(self._joined_value(text[1:]) or "0")
        match = re.fullmatch(r"(\w+)(?:\[([^\]]*)\])?(.*)", text, re.DOTALL)
        if match is None:
            return [_opened(text)]
        name, place, rest = match.groups()
        value = self.variables.get(name)
        if isinstance(value, list):
            if place in ("@", "*") and not rest:
                return list(value)
            number = _arithmetic(self._inside(place or "0"), self._number)
            here = number is not None and -len(value) <= number < len(value)
            value = value[number] if here and number is not None else None
        return [self._changed(name, value, rest)]

    def _joined_value(self, name: str) -> str:
        value = self.variables.get(name, "")
        return " ".join(value) if isinstance(value, list) else value

    def _changed(self, name: str, value: str | None, rest: str) -> str:
        """The value of ``${name rest}``."""
        if not rest:
            return _opened(name) if value is None else value
        match = re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if match:
            empty = value is None or (bool(match[1]) and not _closed(value))
            if match[2] == "+":
                return "" if empty else self._inside(_unquoted(match[3]))
            if not empty and value is not None:
                return value
            if match[2] == "?":
                return _opened(name)
            made = self._inside(_unquoted(match[3]))
            if match[2] == "=":
                self.variables[name] = made
            return made
        if value is None:
            return _opened(name)
        return _edited(value, rest) if not is_open(value) and len(value) <= _MOST_EDITED else value


def _opened(name: str) -> str:
    return f"{_OPEN}{name}{_CLOSE}"


_FIELD = re.compile(f"(?:{_OPEN}[^{_CLOSE}]*{_CLOSE}|\\S)+")
"""Runs of characters that a shell makes words of; what is open stays whole."""


def _closed(word: str) -> str:
    """A word as a shell has it where nothing sets its open variables: they are empty."""
    return re.sub(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}", "", word)


def _unquoted(text: str) -> str:
    """A default without the quotes around it."""
    whole = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if whole else text


def _is_all(text: str, sign: str) -> bool:
    return text == sign or text.endswith(f"[{sign}]")


def _edited(value: str, rest: str) -> str:
    """A value without its ends, or with something replaced, as a shell's operators do it."""
    for sign in ("%%", "%", "##", "#"):
        if rest.startswith(sign):
            pattern, length = rest[len(sign) :], range(len(value) + 1)
            most = reversed(length) if len(sign) == 2 else length
            for n in most:
                cut = value[len(value) - n :] if sign[0] == "%" else value[:n]
                if fnmatch.fnmatchcase(cut, pattern):
                    return value[: len(value) - n] if sign[0] == "%" else value[n:]
            return value
    if match := re.match(r"(//?)([^/]*)/?(.*)", rest, re.DOTALL):
        return (
            value.replace(match[2], match[3], -1 if match[1] == "//" else 1) if match[2] else value
        )
    cases: Mapping[str, Callable[[str], str]] = {"^^": str.upper, ",,": str.lower}
    return cases[rest](value) if rest in cases else value


# --- words and brackets


def _literal(token: _Token) -> str | None:
    """A word of one unquoted text; None: anything else."""
    parts = token.parts
    plain = parts is not None and len(parts) == 1 and parts[0].kind == "text"
    return parts[0].text if plain and parts and not parts[0].quoted else None


def _text(token: _Token) -> str:
    """The text that a word begins with, up to the first variable."""
    text = ""
    for part in token.parts or ():
        if part.kind != "text":
            break
        text += part.text
    return text


def _after(token: _Token, count: int) -> list[_Part]:
    """The parts of a word after so many characters of its text."""
    found = []
    for part in token.parts or ():
        cut = min(count, len(part.text)) if part.kind == "text" else 0
        count -= cut
        if part.text[cut:] or part.quoted or part.kind != "text":
            found.append(part._replace(text=part.text[cut:]))
    return found


def _next_is(tokens: Sequence[_Token], index: int, text: str) -> bool:
    following = tokens[index + 1 : index + 2]
    return bool(following) and following[0].parts is None and following[0].text == text


def _is_function(tokens: Sequence[_Token], index: int) -> bool:
    named = _NAME.fullmatch(_literal(tokens[index]) or "")
    return bool(named) and _next_is(tokens, index, "(") and _next_is(tokens, index + 1, ")")


def _end_of_command(tokens: Sequence[_Token], index: int) -> int:
    """Where a simple command ends; arrays are in brackets."""
    start = index
    while index < len(tokens):
        token = tokens[index]
        if token.parts is None and token.text == "(" and index > start:
            index = _matching(tokens, index)
            continue
        if token.parts is None and token.text in ("\n", ";", "&", "|", "&&", "||", ";;", ")", "}"):
            break
        index += 1
    return max(index, start + 1)


def _matching(tokens: Sequence[_Token], index: int) -> int:
    """One more than where the bracket at `index` is closed."""
    opening = tokens[index].text
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for at in range(index, len(tokens)):
        if tokens[at].parts is None:
            depth += (tokens[at].text == opening) - (tokens[at].text == closing)
            if not depth:
                return at + 1
    return len(tokens)


def _branches(tokens: Sequence[_Token], index: int, names: Sequence[str]) -> tuple[int, list[int]]:
    """Where the ``if`` or ``case`` at `index` ends, and where these words of its own are."""
    closers = {"if": "fi", "case": "esac"}
    depth, marks = 0, []
    begins = True
    for at in range(index, len(tokens)):
        word = _literal(tokens[at]) if begins else None
        if word in closers:
            depth += 1
        elif word in closers.values():
            depth -= 1
        if (depth == 1 and word in names) or not depth:
            marks.append(at)
        if not depth:
            return at + 1, marks
        begins = tokens[at].parts is None or word in ("then", "else", "do", "elif", "if")
    return len(tokens), [*marks, len(tokens)]


def _without_redirections(tokens: Sequence[_Token]) -> list[_Token]:
    """The words of a command, and brackets of arrays, without what is written where."""
    found, skip = [], False
    for token in tokens:
        operator_ = token.text if token.parts is None else ""
        if operator_ and operator_[0] in "<>&" and operator_ != "&":
            if found and (_literal(found[-1]) or "") in ("1", "2"):
                found.pop()
            skip = True
        elif skip and token.parts is not None:
            skip = False
        elif operator_ not in ("\n",) or any(t.text == "(" for t in found if t.parts is None):
            found.append(token)
    return found


def _matters(tokens: Sequence[_Token]) -> bool:
    """Whether commands may change what a launch is: they assign or have options."""
    texts = [_text(token) for token in tokens if token.parts is not None]
    return any(_ASSIGN.match(text) or text.startswith("--") for text in texts)


def _exits(tokens: Sequence[_Token]) -> bool:
    return any(_literal(token) in ("exit", "return") for token in tokens)


# --- conditions and numbers

_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def _test(words: list[str]) -> bool | None:
    """Whether the test of these words holds; None: only a shell could tell."""
    if words[:1] == ["!"]:
        inner = _test(words[1:])
        return None if inner is None else not inner
    for sign, one in (("-o", any), ("||", any), ("-a", all), ("&&", all)):
        if sign in words:
            at = words.index(sign)
            parts = [_test(words[:at]), _test(words[at + 1 :])]
            return None if None in parts else one(parts)
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n", "-v"):
        return None if words[0] == "-v" else bool(words[1]) == (words[0] == "-n")
    if words in (["-n"], ["-z"]):
        return words == ["-z"]
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left, right)
    whole = all(re.fullmatch(r"-?\d{1,18}", word) for word in (left, right))
    return _COMPARE[sign](int(left), int(right)) if sign in _COMPARE and whole else None


def _quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: _quotient(a, b), ast.Mod: lambda a, b: a - b * _quotient(a, b),
    ast.Pow: lambda a, b: a ** min(max(b, 0), 64),
}  # fmt: skip


def _arithmetic(text: str, number: Callable[[str], int | None]) -> int | None:
    """The value of a shell's arithmetic expression; None where it is not known."""
    try:
        node = ast.parse(text.strip().replace("$", "")[:200], mode="eval").body
        return _evaluated(node, number)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.AST, number: Callable[[str], int | None]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and (value := number(node.id)) is not None:
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand, number)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        sides = _evaluated(node.left, number), _evaluated(node.right, number)
        if max(map(abs, sides)) < 10**18:
            return _BINARY[type(node.op)](*sides)
    raise ValueError(ast.dump(node))


# --- the launch


def _launch(shell: _Shell, options: Collection[str]) -> tuple[list[str], int] | None:
    """The words of the command with most known options, and its line; of a file that only sets
    variables those with options, one after the other."""

    def known(words: Sequence[str]) -> int:
        return sum(w.startswith("--") and w[2:].partition("=")[0] in options for w in words)

    best: tuple[int, list[str], int] = (0, [], 0)
    for words, line in _nested(shell):
        if (count := known(words)) > best[0]:
            best = (count, words, line)
    if best[0]:
        return best[1], best[2]
    together: list[str] = []
    for value in shell.variables.values():
        words = value if isinstance(value, list) else str(value).split()
        words = [piece for word in words for piece in word.split()]
        if known(words) and words[0].startswith("-"):
            together += words
    return (together, 0) if together else None


def _nested(shell: _Shell) -> Iterator[tuple[list[str], int]]:
    """The commands, and those that a shell within one would run (``bash -c``, ``eval``)."""
    for words, line in shell.commands:
        yield words, line
        at, inner = (0, " ".join(words[1:])) if words[0] == "eval" else (0, "")
        for place, word in enumerate(words[:-2]):
            named = word.rpartition("/")[2] in ("bash", "sh")
            if named and re.fullmatch(r"-\w*c", words[place + 1]):
                at, inner = place, words[place + 2]
        if inner:
            again = _Shell(dict(shell.variables))
            again.variables |= {name: _opened(name) for name in open_names(inner)}
            again.run(_tokens(shown(inner), joined=False, problems=again.problems))
            shell.problems += again.problems
            yield from (([*words[:at], *found], line) for found, _ in again.commands)


_PER_NODE = ("nproc_per_node", "nproc", "ntasks_per_node", "gpus_per_node", "num_gpus")
_NODES = ("nnodes", "nodes", "num_nodes")
_ALL = ("n", "np", "ntasks", "world_size")
_SHORT = {"N": "nodes", "n": "ntasks", "np": "np"}


def _parted(words: list[str], line: int, batch: int) -> LaunchLine:
    """A command as program, what it is given, and the processes that the launcher starts."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words)) - 1
    program = words[at] if at >= 0 and words[at].endswith(".py") else ""
    return LaunchLine(program, tuple(words[at + 1 :]), _processes(words[:at]) or batch)


def _processes(words: Sequence[str]) -> int:
    """How many processes a launcher starts; 0: it does not say."""
    given: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name) if not word.startswith("--") else name
        given[name.replace("-", "_")] = value if equals else following
    counts = {name: int(v) for name, v in given.items() if v.isdigit() and len(v) < 10}
    per_node = next((counts[name] for name in _PER_NODE if name in counts), 0)
    nodes = next((counts[name] for name in _NODES if name in counts), 1)
    if any(name in given and name not in counts for name in _NODES):
        return 0  # a range of them, or a variable
    return per_node * nodes or next((counts[name] for name in _ALL if name in counts), 0)


def _batch_processes(text: str) -> int:
    """The processes of a batch script's own lines (``#SBATCH --nodes=4``)."""
    lines = re.findall(r"^#SBATCH[ \t]+([^#\n]*)", text, re.MULTILINE)
    return _processes([word for line in lines for word in line.split()])
