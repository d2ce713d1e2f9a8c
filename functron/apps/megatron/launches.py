"""Launch scripts of Megatron-LM, its logs, and its names of records.

`read_script` finds the command that launches a training, without running anything. It expands the
script's plain variables and arrays: ``${NAME}``, ``${NAME:-word}``, ``${NAME[@]}``. Variables that
are not set, and the output of commands, stay open, and are reported as ``${NAME}`` (set them by
``--env``). Variables that are set in conditions, loops or functions are refused if the launch needs
them.

`record_script` runs such a script in bash, with recorders in place of the programs that launch a
training, which write down their arguments and exit.

`read_log` reads a run's log, and `name_records` names records as Megatron-LM does.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from functron.core.errors import Problem, raise_problems, refuse
from functron.training import records

TITLE = "cannot read the launch line"
_MOST_TEXT = 100_000  # characters of a script, and of what a variable or a command has
_MOST_WORDS = 100_000
_MOST_DEPTH = 50
_OPEN, _CLOSE = "\ue000", "\ue001"
"""Delimiters of open variables, which do not occur in scripts."""
RUN_IT = "functron migrate FILE --run runs the script, with recorders in place of its launch"


@dataclass(frozen=True)
class LaunchLine:
    """The command that starts a training.

    Attributes:
        program: its file, such as ``pretrain_gpt.py``; empty: unknown.
        words: the arguments of the program.
        processes: that the launcher starts; 0: unknown.
    """

    program: str
    words: tuple[str, ...]
    processes: int = 0


def is_open(word: str) -> bool:
    """Whether a word has a variable that is not set."""
    return _OPEN in word


def show_open(word: str) -> str:
    """A word with open variables as in a script."""
    return word.replace(_OPEN, "${").replace(_CLOSE, "}")


def list_open(word: str) -> list[str]:
    """The open variables of a word."""
    return re.findall(f"{_OPEN}([^{_CLOSE}]*)", word)


def read_script(
    text: str, options: Collection[str], variables: Mapping[str, str] | None = None
) -> LaunchLine:
    """The launch line in a script, or in a text of arguments. Nothing is run.

    Args:
        options: names without dashes; the launch is the command with the most of them.
        variables: of the environment, by name; ``"1"`` is the first argument. The script's own
            assignments replace them.

    Raises:
        ValueError: the script is incomplete, launches nothing, or its launch needs a shell; all
            such places are listed with their lines.
    """
    if len(text) > _MOST_TEXT:
        refuse(TITLE, "the script", f"{len(text)} characters", f"at most {_MOST_TEXT}")
    text = text.translate({ord(_OPEN): None, ord(_CLOSE): None, ord("\r"): None})
    lines = (line.lstrip() for line in text.splitlines())
    if next((line for line in lines if line and line[0] != "#"), "").startswith("-"):
        text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text).replace("\\\n", " ").replace("\n", " ")
    script = _Script(dict(variables or {}))
    script.read(text)
    line = _find_launch(script.commands, options) or _join_options(script, options)
    if line is None:
        wanted = "one that launches a training"
        refuse(TITLE, "the script", "no command with options of Megatron-LM", wanted, RUN_IT)
    raise_problems(TITLE, dict.fromkeys(line.problems))
    return _divide_line(line.words, _count_batch_processes(text))


def fill_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$NAME`` and ``${NAME}`` by `variables`; others stay open."""
    return _Script(dict(variables)).join(text, [], 0, quoted=True)


# --- a script as commands, a command as words, a word as pieces


class _Command(NamedTuple):
    """The text of a command, its line, and the operator before it."""

    text: str
    line: int
    after: str


_CLOSERS = {"'": "'", '"': '"', "`": "`", "$((": "))", "$(": ")", "${": "}", "(": ")"}
_IN_QUOTES = ("$((", "$(", "${", "`")
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")


def _find_opener(text: str, at: int, *, quoted: bool) -> str | None:
    """The quote, expansion or, outside of quotes, bracket that begins at `at`; None: none does."""
    known = _IN_QUOTES if quoted else _CLOSERS
    return next((opener for opener in known if text.startswith(opener, at)), None)


def _find_end(text: str, start: int, opener: str, depth: int = 0) -> int:  # noqa: RET503
    """The end of the quotes, brackets or expansion that begin at `start`.

    Raises:
        ValueError: they are not closed.
    """
    at = start + len(opener)
    while at < len(text) and depth < _MOST_DEPTH:
        if text.startswith(_CLOSERS[opener], at):
            return at + len(_CLOSERS[opener])
        if opener == "'":
            at += 1
        elif text[at] == "\\":
            at += 2
        elif opener == "(" and text[at] == "#" and text[at - 1].isspace():
            at = _find_line_end(text, at)
        elif (inner := _find_opener(text, at, quoted=opener == '"')) is not None:
            at = _find_end(text, at, inner, depth + 1)
        else:
            at += 1
    line = text.count("\n", 0, start) + 1
    got, wanted = "a quote or bracket that is not closed", "a closed one"
    refuse(TITLE, f"line {line}", got, wanted)


def _find_line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return found if found >= 0 else len(text)


_SEPARATOR = re.compile(r"&&|\|\||;;&|;;|;&|[;|\n()]|&(?!>)")
_HERE = re.compile(r"<<-?\s*[\"']?(\w+)")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")


def _split_commands(text: str) -> Iterator[_Command]:
    """The commands of a script in order, without comments and here documents."""
    begin = at = counted = 0
    line, after = 1, ""
    parts: list[str] = []
    ends: list[str] = []  # of here documents
    while at <= len(text):
        match = _SEPARATOR.match(text, at) if text[at - 1 : at] not in ("<", ">") else None
        if at == len(text) or (match and not (text[at] == "(" and _ARRAY.search(text, begin, at))):
            yield _Command("".join([*parts, text[begin:at]]).strip(), line, after)
            at = match.end() if match else at + 1
            after, parts = match[0] if match else "", []
            while after == "\n" and ends:
                stop = re.compile(rf"^\t*{re.escape(ends.pop(0))}$", re.MULTILINE).search(text, at)
                at = stop.end() if stop else len(text)
            line, counted, begin = line + text.count("\n", counted, at), at, at
        elif text.startswith("\\\n", at):
            parts += [text[begin:at], " "]
            at = begin = at + 2
        elif text[at] == "\\":
            at += 2
        elif text[at] == "#" and (at == begin or text[at - 1].isspace()):
            parts.append(text[begin:at])
            at = begin = _find_line_end(text, at)
        elif here := _HERE.match(text, at):
            ends.append(here[1])
            at = here.end()
        elif (opener := _find_opener(text, at, quoted=False)) is not None:
            at = _find_end(text, at, opener)
        else:
            at += 1


def _find_word_end(text: str, at: int) -> int:
    while at < len(text) and not text[at].isspace():
        if text[at] == "\\":
            at += 2
        elif (opener := _find_opener(text, at, quoted=False)) is not None:
            at = _find_end(text, at, opener)
        else:
            at += 1
    return at


def _split_pieces(text: str, *, quoted: bool) -> Iterator[tuple[str, str]]:
    """The pieces of a word, or of a text in double quotes, with their kinds.

    ``text``; ``literal``: quoted or escaped; ``quoted``: in double quotes; ``value``: the inside of
    ``${...}``; ``shell``: the output of a command.
    """
    at = begin = 0
    while at < len(text):
        opener, name = _find_opener(text, at, quoted=quoted), _NAME.match(text, at)
        escaped = text[at] == "\\" and (not quoted or text[at + 1 : at + 2] in ('"', *"\\$`\n"))
        if not (escaped or name) and opener in (None, "("):
            at += 1
            continue
        if text[begin:at]:
            yield "text", text[begin:at]
        if escaped:
            yield "literal", text[at + 1 : at + 2].replace("\n", "")
            at += 2
        elif opener is not None:
            end = _find_end(text, at, opener)
            inner = text[at + len(opener) : end - len(_CLOSERS[opener])]
            yield {"'": "literal", '"': "quoted", "${": "value"}.get(opener, "shell"), inner
            at = end
        elif name:
            yield "value", name[1]
            at = name.end()
        begin = at
    if text[begin:]:
        yield "text", text[begin:]


# --- the variables that a script sets, and the commands that it has


@dataclass
class _CommandLine:
    """The words of a command, its line, and what only a shell can evaluate of it."""

    words: list[str]
    line: int
    problems: list[Problem] = field(default_factory=list)


_OPENING = {
    "if": "a condition", "case": "a condition", "for": "a loop", "while": "a loop",
    "until": "a loop", "select": "a loop", "function": "a function", "{": "a function",
}  # fmt: skip
_CLOSING = ("fi", "esac", "done", "}")
_BETWEEN = ("then", "elif", "else", "do", "!", "time")
_DECLARE = re.compile(r"(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*")
_WORD = re.compile(r"(\S+)\s*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-+])(.*))?", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(?:&>>|&>|>>|>\||>&|>|<)(.*)", re.DOTALL)
_FIELD = re.compile(f"(?:{_OPEN}[^{_CLOSE}]*{_CLOSE}|\\S)+")
"""Words of a value; open variables are not split."""


@dataclass
class _Script:
    """The variables and commands of a script, and variables that only a shell can evaluate."""

    variables: dict[str, str | list[str]]
    untold: dict[str, Problem] = field(default_factory=dict)
    commands: list[_CommandLine] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Note what the commands of a text set, and their words."""
        for command in _split_commands(text):
            text, line, at = command.text, command.line, self._skip_keywords(command.text)
            declared = _DECLARE.match(text, at)
            at = declared.end() if declared else at
            is_certain = not self.inside and command.after not in ("&&", "||")
            while match := _ASSIGN.match(text, at):
                at = _find_word_end(text, match.end())
                value = text[match.end() : at]
                self._assign(match[1], value, line, adds=bool(match[2]), certain=is_certain)
                at += len(text[at:]) - len(text[at:].lstrip())
            if at < len(text) and not declared:
                problems: list[Problem] = []
                self.note(self.split(text[at:], problems, line), line, problems)

    def _skip_keywords(self, text: str) -> int:
        """Note words of conditions and loops; returns where the command begins after them."""
        at = 0
        while match := _WORD.match(text, at):
            word = match[1]
            if word in _OPENING:
                self.inside.append(word)
            elif word in _CLOSING:
                self.inside[-1:] = []
            elif word not in _BETWEEN:
                break
            at = match.end()
            if word in ("for", "select", "case"):  # the rest is their list
                return len(text)
        return at

    def _assign(self, name: str, text: str, line: int, *, adds: bool, certain: bool) -> None:
        problems: list[Problem] = []
        made = self.split(text[1:-1], problems, line) if text.startswith("(") else None
        value = made if made is not None else self.join(text, problems, line)
        before = self.variables.get(name) if adds else None
        if isinstance(before, str) and isinstance(value, str):
            value = before + value
        elif before is not None:
            value = [*([before] if isinstance(before, str) else before), *value]
        size = len(value) if isinstance(value, str) else sum(len(one) + 1 for one in value)
        if size > _MOST_TEXT:
            got, wanted = f"{name} of {size} characters", f"at most {_MOST_TEXT}"
            problems = [Problem(f"line {line}", got, wanted)]
        elif not certain:
            got = f"{name}, which is set conditionally"
            problems = [Problem(f"line {line}", got, "one that is always set", RUN_IT)]
        if not problems and not (adds and name in self.untold):
            self.variables[name] = value
            self.untold.pop(name, None)
        elif problems:
            self.untold[name] = problems[0]

    def note(self, words: list[str], line: int = 0, problems: Iterable[Problem] = ()) -> None:
        """Note the words of a command, and of what it gives a shell (``srun bash -c "..."``)."""
        problems = list(problems)
        if self.inside and any(word.startswith("--") for word in words):
            got = f"a launch in {_OPENING[self.inside[-1]]}: {self.inside[-1]}"
            problems.append(Problem(f"line {line}", got, "one that is always reached", RUN_IT))
        self.commands.append(_CommandLine(words, line, problems))
        for at, word in enumerate(words[:-2]):
            named = word.rpartition("/")[2] in ("bash", "sh")
            if named and re.fullmatch(r"-\w*c", words[at + 1]):
                inner = _Script(
                    {name: f"{_OPEN}{name}{_CLOSE}" for name in list_open(words[at + 2])}
                )
                inner.read(show_open(words[at + 2]))
                found = [
                    _CommandLine([*words[:at], *x.words], line, x.problems) for x in inner.commands
                ]
                self.commands += found
                return

    def split(self, text: str, problems: list[Problem], line: int) -> list[str]:
        """The words of a command, without redirections."""
        words: list[str] = []
        at = size = 0
        is_place = False
        while at < len(text) and size <= _MOST_TEXT:
            if text[at].isspace():
                at += 1
            elif text[at] == "#":
                at = _find_line_end(text, at)
            else:
                end = _find_word_end(text, at)
                match = _REDIRECTION.fullmatch(text, at, end)
                if not match and not is_place:
                    more = self._split_word(text[at:end], problems, line)
                    size += sum(map(len, more))
                    words += more
                is_place, at = match is not None and not match[1], end
        if at < len(text):
            problems.append(Problem(f"line {line}", "a command without end", "fewer words"))
        return words

    def _split_word(self, word: str, problems: list[Problem], line: int) -> list[str]:
        """The words of one: unquoted values are split at spaces, as in a shell."""
        found: list[str] = []
        goes_on = False  # whether the next piece continues the last word
        for kind, text in _split_pieces(word, quoted=False):
            ends = False
            array = re.fullmatch(r"\$(?:\{(\w+\[@\])\}|(@))", text) if kind == "quoted" else None
            if array:
                pieces = self._expand_values(array[1] or array[2], problems, line)
            elif kind == "value" and (default := self._find_default(text)) is not None:
                pieces = self._split_word(default, problems, line)
            elif kind == "value":
                value = " ".join(self._expand_values(text, problems, line))
                pieces = _FIELD.findall(value)
                goes_on = goes_on and not value[:1].isspace()
                ends = value[-1:].isspace()
            else:
                pieces = [self._expand(kind, text, problems, line)]
            if goes_on and pieces:
                found[-1] += pieces.pop(0)
            found += pieces
            goes_on = bool(found) and not ends
        return found

    def join(self, text: str, problems: list[Problem], line: int, *, quoted: bool = False) -> str:
        """The value of a word that is not split, or of a text in double quotes."""
        pieces = _split_pieces(text, quoted=quoted)
        return "".join(self._expand(*piece, problems, line) for piece in pieces)

    def _expand(self, kind: str, text: str, problems: list[Problem], line: int) -> str:
        if kind == "quoted":
            return self.join(text, problems, line, quoted=True)
        if kind == "value":
            return " ".join(self._expand_values(text, problems, line))
        return f"{_OPEN}({text}){_CLOSE}" if kind == "shell" else text

    def _expand_values(self, text: str, problems: list[Problem], line: int) -> list[str]:
        """The values of ``${...}``: one, or those of an array."""
        match = _EXPANSION.fullmatch(text)
        if match is None:
            wanted = "a variable, its default, or all of an array"
            problems.append(Problem(f"line {line}", f"${{{text}}}", wanted, RUN_IT))
            return []
        name, several, sign, _ = match.groups()
        if name in ("@", "*"):
            numbers = sorted(int(key) for key in self.variables if key.isdigit())
            return [str(self.variables[str(number)]) for number in numbers]
        if name in self.untold:
            problems.append(self.untold[name])
            return []
        if (default := self._find_default(text)) is not None:
            return [self.join(default, problems, line)]
        value = self.variables.get(name)
        if value is None:
            return [] if sign else [f"{_OPEN}{name}{_CLOSE}"]
        return [value] if isinstance(value, str) else value if several else value[:1]

    def _find_default(self, text: str) -> str | None:
        """The word of ``${NAME:-word}`` or ``${NAME:+word}`` if it replaces the variable."""
        match = _EXPANSION.fullmatch(text)
        name, _, sign, word = match.groups() if match else ("", "", "", "")
        if not sign or name in self.untold:
            return None
        value = self.variables.get(name)
        is_set = value is not None and (sign[0] != ":" or bool(value))
        return word if is_set == (sign[-1] == "+") else None


# --- the launch


def _find_launch(commands: Sequence[_CommandLine], options: Collection[str]) -> _CommandLine | None:
    """The first command with the most known options."""
    best = max(commands, key=lambda line: _count_known(line.words, options), default=None)
    return best if best is not None and _count_known(best.words, options) else None


def _count_known(words: Sequence[str], options: Collection[str]) -> int:
    return sum(w.startswith("--") and w[2:].partition("=")[0] in options for w in words)


def _join_options(script: _Script, options: Collection[str]) -> _CommandLine | None:
    """The options in the variables of a file that only sets variables."""
    together: list[str] = []
    for value in script.variables.values():
        words = [
            piece
            for word in ([value] if isinstance(value, str) else value)
            for piece in word.split()
        ]
        if _count_known(words, options) and words[0].startswith("-"):
            together += words
    return _CommandLine(together, 0) if together else None


_PER_NODE = ("nproc_per_node", "nproc", "ntasks_per_node", "gpus_per_node", "num_gpus")
_NODES = ("nnodes", "nodes", "num_nodes")
_ALL = ("n", "np", "ntasks", "world_size")
_SHORT = {"N": "nodes", "n": "ntasks", "np": "np"}


def _divide_line(words: list[str], batch: int) -> LaunchLine:
    """A command as program, its arguments, and the number of processes."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words)) - 1
    program = words[at] if at >= 0 and words[at].endswith(".py") else ""
    return LaunchLine(program, tuple(words[at + 1 :]), _count_processes(words[:at]) or batch)


def _count_processes(words: Sequence[str]) -> int:
    """The number of processes that a launcher starts; 0: unknown."""
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


def _count_batch_processes(text: str) -> int:
    """The number of processes by the lines of a batch script (``#SBATCH --nodes=4``)."""
    lines = re.findall(r"^#SBATCH[ \t]+([^#\n]*)", text, re.MULTILINE)
    return _count_processes([word for line in lines for word in line.split()])


# --- running a script

_RECORDED = (
    "accelerate", "apptainer", "bash", "deepspeed", "docker", "env", "mpiexec", "mpirun", "nice",
    "nohup", "numactl", "podman", "python", "python3", "sbatch", "setsid", "sh", "singularity",
    "srun", "timeout", "torchrun", "uv",
)  # fmt: skip
"""Programs that launch others, which recorders replace."""
_TOOLS = (
    "awk", "basename", "bc", "cat", "cut", "date", "dirname", "expr", "grep", "head",
    "hostname", "ls", "nproc", "readlink", "realpath", "sed", "seq", "sort", "tail", "tr", "uname",
    "uniq", "wc",
)  # fmt: skip
"""Programs that a script may call; it finds no others."""
_PLACES = "/usr/local/bin:/usr/bin:/bin"
_SECONDS = 30
_RECORDER = """#!/bin/sh
printf '%s\\0' "$0" "$@" > '{calls}'/$$
"""
_PRELUDE = r"""
command_not_found_handle() { return 0; }
functron_records() {  # what is named by its place, or looked for elsewhere, is recorded and not run
    local words word is_elsewhere= text=${BASH_COMMAND%%[<>]*}
    PATH='@bin@'
    [[ $BASH_COMMAND == */* || $BASH_COMMAND == *command* ]] || return 1
    case $BASH_COMMAND in "(("* | "[["* | "[ "* | "for "* | "case "* | "select "*) return 1 ;; esac
    [[ $BASH_COMMAND =~ ^([a-z]+\ (-[a-zA-Z]+\ )*)?[A-Za-z_][A-Za-z_0-9]*\+?=\( ]] && return 1
    text=${text%%\$(*} && text=${text%%\`*}  # what they print is not needed to know the program
    eval "words=($text)" 2>/dev/null || eval "words=($text\")" 2>/dev/null || return 0
    for word in "${words[@]}" ""; do
        case $word in
            PATH=*) is_elsewhere=1 ;;
            [A-Za-z_]*=* | exec | command | builtin) ;;
            -[vV]) break ;;
            -* | */*) is_elsewhere=1; break ;;
            *) break ;;
        esac
    done
    [[ $is_elsewhere && $word ]] && eval "functron-record $BASH_COMMAND"
}
shopt -s extdebug
trap '! functron_records' DEBUG  # a command is skipped where its trap is false
. "$0"
"""


def record_script(
    path: Path, options: Collection[str], variables: Mapping[str, str] | None = None
) -> LaunchLine:
    """Run a script in bash, with recorders in place of the programs that launch a training.

    It runs in an empty folder, finds only the recorders and `_TOOLS`, and has only the given
    variables; commands with a path, such as ``/opt/bin/python``, are recorded as well. Its other
    effects, such as writing files, are real.

    Args:
        options: as of `read_script`.
        variables: of the environment, by name; ``"1"`` is the first argument.

    Raises:
        ValueError: there is no bash, or the script launches nothing within 30 seconds.
    """
    bash = shutil.which("bash", path=_PLACES)
    if bash is None:
        refuse(TITLE, str(path), "no bash to run it", "bash", "put echo before the command")
    with tempfile.TemporaryDirectory(prefix="functron-migrate-") as made:
        folder = Path(made).resolve()
        status, said = _run_recorded(bash, path.resolve(), folder, variables or {})
        script = _Script({})
        # times of files may be equal for processes that follow each other closely
        calls = (
            (one.stat().st_mtime_ns, int(one.name), one) for one in (folder / "calls").iterdir()
        )
        for _, _, file in sorted(calls):
            first, *rest = file.read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
            name = first.rpartition("/")[2]
            words = rest if name == "functron-record" else [name, *rest]
            script.note([w.replace(str(folder / "cwd"), str(path.resolve().parent)) for w in words])
    line = _find_launch(script.commands, options)
    if line is None:
        got = f"its end with status {status}, without a launch" + (f" ({said})" if said else "")
        fix = "--env NAME=VALUE sets a variable, 1=VALUE the first argument"
        refuse(TITLE, str(path), got, "one that launches a training", fix)
    raise_problems(TITLE, dict.fromkeys(line.problems))
    text = path.read_text(encoding="utf-8", errors="replace")
    return _divide_line(line.words, _count_batch_processes(text))


def _run_recorded(
    bash: str, path: Path, folder: Path, variables: Mapping[str, str]
) -> tuple[str, str]:
    """Run a script; its exit status, and the last line of its errors."""
    for name in ("bin", "calls", "cwd"):
        (folder / name).mkdir()
    recorder = folder / "bin" / "functron-record"
    recorder.write_text(_RECORDER.format(calls=folder / "calls"), encoding="utf-8")
    recorder.chmod(0o755)
    for name in _RECORDED:
        (folder / "bin" / name).symlink_to(recorder)
    for name in _TOOLS:
        if (found := shutil.which(name, path=_PLACES)) is not None:
            (folder / "bin" / name).symlink_to(found)
    for name in ("gpt", "bert", "t5", "mamba"):  # which scripts check for
        (folder / "cwd" / f"pretrain_{name}.py").touch()
    named = {name: value for name, value in variables.items() if not name.isdigit()}
    count = max((int(name) for name in variables if name.isdigit()), default=0)
    places = [variables.get(str(n), "") for n in range(1, min(count, _MOST_WORDS) + 1)]
    prelude = _PRELUDE.replace("@bin@", str(folder / "bin"))
    env = {"HOME": str(folder), **named, "PATH": str(folder / "bin"), "BASH_ENV": ""}
    process = subprocess.Popen(
        [bash, "-c", prelude, str(path), *places], cwd=folder / "cwd", env=env,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"none after {_SECONDS} seconds", ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = errors.decode("utf-8", "replace").splitlines()
    return str(process.returncode), lines[-1][:200] if lines else ""


# --- its logs and records

_NAMES = MappingProxyType({
    "loss": "lm loss", "lr": "learning-rate", "grad_norm": "grad-norm", "loss_scale": "loss-scale",
    "step_seconds": "iteration-time", "peak_memory_bytes": "mem-max-allocated-bytes",
})  # fmt: skip
"""Numbers of a record by their names in Megatron-LM (``training_log`` of its training.py)."""

_BY_STEP = ("iteration-time", "mem-max-allocated-bytes")
"""Those that Megatron-LM does not draw over samples."""


def name_records(samples_after: Callable[[int], int]) -> records.Naming:
    """Name the numbers of records as Megatron-LM does, if it has names for them.

    They are drawn over steps and, as ``NAME vs samples``, over samples.

    Args:
        samples_after: the number of samples by the number of steps.
    """

    def named(record: records.Record) -> Iterator[tuple[str, Any, int]]:
        step = record["step"]
        seen = samples_after(step)
        known = dict(_NAMES)
        if "next_token_loss" in record:  # the loss has other terms, which Megatron-LM does not log
            known |= {"next_token_loss": known.pop("loss")}
        rows = {known.get(name, name): v for name, v in record.items() if name != records.EVAL}
        rows["batch-size"] = seen - samples_after(step - 1)
        sets = record.get(records.EVAL, {})
        for name, numbers in sets.items():
            key = "lm loss validation" if len(sets) == 1 else f"lm loss validation {name}"
            rows |= {key: numbers["loss"], f"{key} ppl": numbers["perplexity"]}
        drawn = (*_NAMES.values(), "batch-size")
        for name, value in records.flat(rows).items():
            yield name, value, step
            over = name in drawn and name not in _BY_STEP
            if over or name.startswith("lm loss validation"):
                yield f"{name} vs samples", value, seen
        yield "samples vs steps", seen, step

    return named


def has_iterations(file: Path) -> bool:
    """Whether a file has Megatron-LM's lines of iterations."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return any(_ITERATION.search(line) for line in lines)
    except OSError:
        return False


_ITERATION = re.compile(r"iteration\s+(\d{1,15})/\s*\d+\s*\|(.*)")
_HELD_OUT = re.compile(r"validation loss at iteration\s+(\d{1,15})\b[^|]*\|(.*)")
_MOST_SETTING = 400  # characters of a line that has one
_SETTING = re.compile(r"^\s*(?:\S+:\s+)?(\w+) \.{2,} (\S.*?)\s*$")
_SETTINGS = MappingProxyType({
    "seq_length": "data.seq", "global_batch_size": "data.global_batch",
    "train_iters": "steps", "seed": "seed",
    "lr": "learning_rate.peak", "min_lr": "learning_rate.end",
    "lr_warmup_iters": "learning_rate.warmup_steps", "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2", "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay", "clip_grad": "optimizer.clip_norm",
})  # fmt: skip
"""Arguments that Megatron-LM prints, and the same settings."""


def make_log_reader() -> records.LogReader:
    """The reader of Megatron-LM's logs for ``functron compare``."""
    return records.LogReader(
        "a log of Megatron-LM with its lines of iterations", has_iterations, read_log
    )


def read_log(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and records in a log of Megatron-LM.

    A record has ``step``, ``loss`` (the mean since the last line), ``grad_norm``, ``lr``,
    ``samples``, ``step_seconds``, and, if the log has the arguments, ``tokens`` and
    ``tokens_per_second``; missing numbers are None. Of an iteration that is repeated after a
    restart the last line counts. Settings are from the arguments at the beginning, if there.

    Raises:
        ValueError: the file cannot be read.
    """
    settings: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    held_out: dict[int, dict[str, Any]] = {}
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        refuse("cannot compare", str(file), error.strerror or str(error), "a readable log")
    for line in text.splitlines():
        if match := _ITERATION.search(line):
            rows[int(match[1])] = _make_record(int(match[1]), _read_numbers(match[2]))
        elif match := _HELD_OUT.search(line):
            numbers = _read_numbers(match[2])
            loss, ppl = numbers.get("lm loss value"), numbers.get("lm loss PPL")
            held_out[int(match[1])] = {"validation": {"loss": loss, "perplexity": ppl}}
        elif rows or len(line) > _MOST_SETTING:
            continue
        elif (match := _SETTING.match(line)) and match[1] in _SETTINGS:
            value = _parse_setting(match[2])
            settings |= {} if value is None else {_SETTINGS[match[1]]: value}
    seq = settings.get("data.seq")
    for step, row in rows.items():
        if isinstance(seq, int) and row["samples"] is not None:
            row["tokens"] = row["samples"] * seq
            seconds, batch = row["step_seconds"], row["batch"]
            if seconds and batch is not None:
                row["tokens_per_second"] = batch * seq / seconds
        row.pop("batch", None)
        if step in held_out:
            row[records.EVAL] = held_out[step]
    return settings, [rows[step] for step in sorted(rows)]


def _read_numbers(text: str) -> dict[str, float | None]:
    """The numbers of ``name: number | name: number``."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): _parse_number(value) for name, colon, value in pairs if colon}


def _parse_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parse_setting(text: str) -> int | float | None:
    """An int if there is no point, as in a configuration."""
    number = _parse_number(text)
    whole = number is not None and re.fullmatch(r"-?\d+", text)
    return int(text) if whole else number


def _make_record(step: int, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    milliseconds = numbers.get("elapsed time per iteration (ms)")
    samples, batch = numbers.get("consumed samples"), numbers.get("global batch size")
    return {
        "step": step,
        "loss": numbers.get("lm loss", numbers.get("loss")),
        "grad_norm": numbers.get("grad norm"),
        "lr": numbers.get("learning rate"),
        "samples": None if samples is None else int(samples),
        "batch": None if batch is None else int(batch),
        "tokens": None,
        "tokens_per_second": None,
        "step_seconds": None if milliseconds is None else milliseconds / 1000,
    }
