"""``functron migrate``: a launch line of Megatron-LM as a configuration, and what became of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.core.errors import Problem, raise_problems, refuse
from functron.training.migrate import Migration, migrate


@dataclass(frozen=True)
class MigrateOptions:
    """Make a configuration of a launch line of Megatron-LM, and show what became of its arguments.

    Nothing is run: a script is read. Arguments without a counterpart here are listed, with what to
    do; unknown ones, and sizes that do not fit, are errors.

    Attributes:
        source: a shell script, a list of arguments, or YAML of Megatron-LM, Megatron-Bridge or
            NeMo.
        out: the file to write, for functron train --config.
        env: variables that the script's surroundings set, such as DATA_PATH=/data/text; 1=PATH is
            the script's first argument.
        extra: arguments after those of the line, such as vocab-size=151936 or bf16, which win.
        without: arguments to leave out, such as those of a fork.
        processes: ranks; 0: as many as the launcher starts.
        closest: where functron has another model of the kind, make that one.
        strict: arguments without a counterpart are errors, too.
        json: print a JSON object instead of a table.
    """

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE")]]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("config.toml")
    env: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    extra: Annotated[tuple[str, ...], tyro.conf.arg(name="with", metavar="NAME=VALUE")] = ()
    without: tuple[str, ...] = ()
    processes: int = 0
    closest: bool = False
    strict: bool = False
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Write the configuration, and print the table."""
    options = parse(MigrateOptions, arguments, "migrate")
    with mistakes():
        made = migrate(
            options.source,
            variables=_variables(options.env),
            extra=shlex.join(options.extra),
            without=options.without,
            processes=options.processes,
            closest=options.closest,
        )
        if options.strict:
            fix = "leave --strict out, where that is understood"
            raise_problems("these arguments have no counterpart", [
                Problem(row.name, row.value, row.why, fix) for row in made.of("not supported")
            ])  # fmt: skip
        _write(options.out, made)
    if options.json:
        print(json.dumps([asdict(row) for row in made.rows], indent=2))
    else:
        print("\n".join([str(made), "", *_conclusion(options.out, made)]))
    return 0


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Variables by name.

    Raises:
        ValueError: a word is no name and value; all such are listed.
    """
    pairs = [word.partition("=") for word in words]
    raise_problems("cannot read --env", [
        Problem("--env", word, "NAME=VALUE", "write --env NAME=VALUE")
        for word, (name, equals, _) in zip(words, pairs, strict=True)
        if not (name and equals)
    ])  # fmt: skip
    return {name: value for name, _, value in pairs}


def _write(path: Path, made: Migration) -> None:
    title, fix = "cannot write the configuration", "name another: --out FILE"
    if path.exists():
        refuse(title, str(path), "a file that is there", "a new one", fix)
    try:
        path.write_text(made.toml(), encoding="utf-8")
    except OSError as error:
        refuse(title, str(path), error.strerror or str(error), "a file to write", fix)


_A_NODE = 8  # GPUs of most machines


def _conclusion(path: Path, made: Migration) -> list[str]:
    config, missing = made.config, len(made.of("not supported"))
    lines = [f"{path}: {config.title}, on {config.mesh or 'one rank'}"]
    if missing:
        plural = "argument has" if missing == 1 else "arguments have"
        lines.append(f"{missing} {plural} no counterpart: see above, and the head of the file")
    if not made.told:
        lines.append(
            f"nothing says how many processes there are, so they are {made.processes}, as few as "
            "the sizes allow: --processes N"
        )
    if made.absent:
        lines.append(f"not on this machine, and so not looked into: {', '.join(made.absent)}")
    lines.append(f"look at it: functron train --config {path} --dry-run")
    start = f"torchrun --nproc-per-node N -m functron train --config {path}"
    lines.append(
        f"start it:   {start if made.processes > 1 else f'functron train --config {path}'}"
    )
    return lines
