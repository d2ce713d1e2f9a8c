"""Launch scripts of Megatron-LM, its logs, and its names of records.

`read_script` reads a launch line, or a plain script with one, without running anything: variables
and arrays that it sets, ``${NAME}``, ``${NAME[@]}`` and ``${NAME:-word}``. Variables that are not
set, and the output of commands, stay open, and are reported as ``${NAME}`` (set them by ``--env``).
Conditions, loops, functions and other expansions are refused.

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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem, raise_problems, refuse
from functron.training import records

TITLE = "cannot read the launch line"
_MOST_TEXT = 100_000  # characters of a script
_MOST_EXPANDED = 1_000_000  # characters of the values of variables in it
_MOST_SHOWN = 40  # characters of a line in a message
_OPEN, _CLOSE, _BREAK, _EMPTY = "\ue000", "\ue001", "\ue002", "\ue003"
"""Delimiters of open variables, and of words, and an empty word; none occur in scripts."""
RUN_IT = "functron migrate FILE --run runs the script, with recorders in place of its launch"
_ADD_LAUNCH = "a file that only sets variables needs a launch, such as pretrain_gpt.py $MODEL_ARGS"


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
        ValueError: the script is incomplete, launches nothing, or needs a shell; its line is named.
    """
    if len(text) > _MOST_TEXT:
        refuse(TITLE, "the script", f"{len(text)} characters", f"at most {_MOST_TEXT}")
    text = text.translate({ord(char): None for char in (_OPEN, _CLOSE, _BREAK, _EMPTY, "\r")})
    is_list = re.match(r"(?:\s*#.*\n)*\s*-", text) is not None
    script = _Script(text, dict(variables or {}))
    words = _find_launch(list(script.read(is_list=is_list)), options)
    if not words:
        got, wanted = "no command with options of Megatron-LM", "one that launches a training"
        refuse(TITLE, "the script", got, wanted, f"{RUN_IT}; {_ADD_LAUNCH}")
    wanted = "$NAME, ${NAME}, ${NAME[@]} or ${NAME:-word}"
    raise_problems(TITLE, [
        Problem(script.name_line(max(0, *map(text.find, (f"${name}", f"${{{name}")))),
                f"${{{name}}}", wanted, RUN_IT)
        for name in dict.fromkeys(name for word in words for name in list_open(word))
        if not re.fullmatch(r"\w+|\([\s\S]*", name)
    ])  # fmt: skip
    return _divide_line(words, _count_batch_processes(text))


def fill_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$NAME`` and ``${NAME}`` by `variables`; others stay open."""
    return _Script(text, dict(variables)).expand(text, quoted=True)


# --- a script that sets variables and arrays, and launches a training

_BLANK = re.compile(rf"({_OPEN}[^{_CLOSE}]*{_CLOSE})|\s")
"""Where a value that is not quoted is split, beside open variables, which are not."""
# the parts of a word: quotes, the output of a command, a variable, and plain characters
_OUTPUT = r"\$\((?:[^()]|\([^()]*\))*+\)|`[^`]*`"
_VALUE = r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])|\$\{(?:[^{}]|\{[^{}]*\})*+\}"
_QUOTED = rf'"(?:\\[\s\S]|{_OUTPUT}|{_VALUE}|(?!\$[({{])[^"\\`])*+"'
_PART = rf"(?>'[^']*'|{_QUOTED}|\\[\s\S]|{_OUTPUT}|{_VALUE}|(?!\$[({{])[^\s'\"\\;&|()<>`])"
_TOKEN = re.compile(rf"""(?x)
    (?P<skip> [^\S\n]+ | \\\n | \#[^\n]*
        | >\([^()]*\) | \d*(?:&>>?|>[>&|]?|<(?!<)&?)[^\S\n]*{_PART}*+ )
    | (?P<end> && | \|[|&]? | [;&\n] )
    | (?P<word> [A-Za-z_]\w*\+?=\((?:(?<=[\s(])\#[^\n]*|\s|{_PART})*+\) | {_PART}++ )
    | (?P<other> [\s\S] )""")
_INNER = rf"(?P<output>{_OUTPUT})|(?P<value>{_VALUE})"
_PIECE = re.compile(
    rf"'(?P<literal>[^']*)'|(?P<quoted>{_QUOTED})|\\(?P<escaped>[\s\S])|(?P<blank>\s)|{_INNER}"
)
_PIECE_IN_QUOTES = re.compile(rf'\\(?P<escaped>[\n"$\\`])|{_INNER}')
_EXPANSION = re.compile(r"(\w+|[@*])(\[[@*]\])?(?:(:?-)([\s\S]*))?")
_ASSIGN = re.compile(r"([A-Za-z_]\w*(?:\[[^]]*\])?)(\+?)=")
_NEEDS_SHELL = re.compile(
    r"(?:if|case|for|while|until|select|function|\{|declare|local|readonly|typeset|eval|getopts|let"
    r"|mapfile|read|readarray|set --|shift|unset)(?!\S)"
)


@dataclass
class _Script:
    """A script and its variables; the words of arrays are divided by `_BREAK`."""

    text: str
    variables: dict[str, str]
    fix: str = RUN_IT
    expanded: int = 0

    def read(self, *, is_list: bool = False) -> Iterator[list[str]]:
        """The words of its commands; a list of arguments is one."""
        tokens: list[re.Match[str]] = []
        after = ""
        for token in _TOKEN.finditer(self.text + "\n"):
            kind, text = token.lastgroup, token[0]
            if kind == "word":
                tokens.append(token)
            elif kind == "other" or (kind == "end" and is_list and text != "\n"):
                at = token.start()
                got = self.text[at : at + _MOST_SHOWN].partition("\n")[0]
                wanted = "closed quotes and brackets, and no subshell, function or here document"
                fix = "put such values in quotes" if is_list else self.fix
                refuse(TITLE, self.name_line(at), got, wanted, fix)
            elif kind == "end" and not is_list and (tokens or text != "\n"):
                yield from self._read_command(tokens, after)
                tokens, after = [], text
        yield from self._read_command(tokens, after)

    def name_line(self, at: int) -> str:
        """The line of a place in the text."""
        return f"line {self.text.count(chr(10), 0, at) + 1}"

    def _read_command(self, tokens: list[re.Match[str]], after: str) -> Iterator[list[str]]:
        """The words of a command, or none for assignments, which are noted."""
        text = " ".join(token[0] for token in tokens)
        sets = [(token, match) for token in tokens if (match := _ASSIGN.match(token[0]))]
        is_setting = text.startswith("export ") or len(sets) == len(tokens)
        is_odd = after in ("&&", "||") or any(m[1] == "IFS" or "[" in m[1] for _, m in sets)
        if _NEEDS_SHELL.match(text) or (tokens and is_setting and is_odd):
            wanted = "variables and arrays that are simply set, and one launch"
            refuse(TITLE, self.name_line(tokens[0].start()), text[:_MOST_SHOWN], wanted, self.fix)
        if not is_setting:
            yield from _list_commands([w.replace(_EMPTY, "") for w in self.split(tokens)])
            return
        # export expands all of its words before it sets any
        found = {} if text.startswith("export ") else self.variables
        for token, match in sets:
            name, value = match[1], token[0][match.end() :]
            old = self.variables.get(name, "")
            if value.startswith("("):
                begin = token.start() + match.end() + 1
                words = self.split(_TOKEN.finditer(self.text, begin, token.end() - 1))
                found[name] = _BREAK.join(filter(None, (old if match[2] else "", *words)))
            else:
                first, gap, rest = old.partition(_BREAK)
                value = (first if match[2] else "") + self.expand(value).replace(_BREAK, " ")
                found[name] = (value.replace(_EMPTY, "") or _EMPTY) + gap + rest
        self.variables |= found

    def split(self, tokens: Iterable[re.Match[str]]) -> list[str]:
        """The words of a command or array."""
        found: list[str] = []
        for text in (token[0] for token in tokens if token.lastgroup == "word"):
            words = [word for word in self.expand(text).split(_BREAK) if word]
            found += words or [_EMPTY] * (text[0] in "\"'" and "@" not in text)
        return found

    def expand(self, text: str, *, quoted: bool = False) -> str:
        """A word, or a text in double quotes, with its variables; `_BREAK` is where it is split."""

        def replace(match: re.Match[str]) -> str:
            kind, text = match.lastgroup, match[match.lastgroup or 0]
            if kind == "quoted":
                return self.expand(text[1:-1], quoted=True)
            if kind == "output":
                return f"{_OPEN}({text.strip('$`').removeprefix('(').removesuffix(')')}){_CLOSE}"
            if kind == "value":
                return self._evaluate(text[2:-1] if text[1] == "{" else text[1:], quoted=quoted)
            return {"blank": _BREAK, "escaped": text.strip("\n")}.get(str(kind), text)

        return (_PIECE_IN_QUOTES if quoted else _PIECE).sub(replace, text)

    def _evaluate(self, text: str, *, quoted: bool) -> str:
        """The value of ``${NAME}``, ``${NAME[@]}``, ``${NAME:-word}`` or ``$@``."""
        match = _EXPANSION.fullmatch(text)
        if match is None:
            return f"{_OPEN}{text}{_CLOSE}"
        name, array, sign, word = match.groups()
        value = self.variables.get(name)
        if name in "@*":
            numbers = sorted(int(key) for key in self.variables if key.isdigit())
            array, value = name, _BREAK.join(self.variables[str(number)] for number in numbers)
        if value is None or (sign == ":-" and value.partition(_BREAK)[0] in ("", _EMPTY)):
            if sign is None:
                return f"{_OPEN}{name}{_CLOSE}"
            # a default within quotes may have quotes of its own
            return self.expand(re.sub(r'(?<!\\)"', "", word) if quoted else word, quoted=quoted)
        self.expanded += len(value)
        if self.expanded > _MOST_EXPANDED:
            got, wanted = "values of variables", f"at most {_MOST_EXPANDED} characters in all"
            refuse(TITLE, f"${{{text}}}", got, wanted)
        value = value if array else value.partition(_BREAK)[0]
        value = value if "@" in (array or "") else value.replace(_BREAK, " ").replace(_EMPTY, "")
        return (
            value
            if quoted
            else _BLANK.sub(lambda blank: blank[1] or _BREAK, value).replace(_EMPTY, "")
        )


def _list_commands(words: list[str]) -> Iterator[list[str]]:
    """A command, and those that it gives a shell, as in ``srun bash -c "..."``."""
    yield words
    for at, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-\w*c", words[at + 1]):
            if "--" in words[at + 2]:
                fix = f"write the launch without {word} -c"
                inner = _Script(show_open(words[at + 2]), {}, fix).read()
                yield from ([*words[:at], *command] for command in inner)
            return


def _find_launch(commands: Sequence[list[str]], options: Collection[str]) -> list[str]:
    """The first command with the most known options; empty: none has any."""

    def count(words: list[str]) -> int:
        return sum(w.startswith("--") and w[2:].partition("=")[0] in options for w in words)

    return max([[], *commands], key=count)


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
        commands: list[list[str]] = []
        # times of files may be equal for processes that follow each other closely
        calls = (
            (one.stat().st_mtime_ns, int(one.name), one) for one in (folder / "calls").iterdir()
        )
        for _, _, file in sorted(calls):
            first, *rest = file.read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
            name = first.rpartition("/")[2]
            words = rest if name == "functron-record" else [name, *rest]
            here = str(path.resolve().parent)
            commands += _list_commands([w.replace(str(folder / "cwd"), here) for w in words])
    words = _find_launch(commands, options)
    if not words:
        got = f"its end with status {status}, without a launch" + (f" ({said})" if said else "")
        fix = f"--env NAME=VALUE sets a variable, 1=VALUE the first argument; {_ADD_LAUNCH}"
        refuse(TITLE, str(path), got, "one that launches a training", fix)
    text = path.read_text(encoding="utf-8", errors="replace")
    return _divide_line(words, _count_batch_processes(text))


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
    places = [variables.get(str(n), "") for n in range(1, min(count, _MOST_TEXT) + 1)]
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
