"""A run that a command is about: a run folder or a file of options, or a preset, and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from functron import run_folder
from functron.commands.parsing import parse
from functron.config import TrainConfig, load, with_model
from functron.errors import Problem, raise_problems
from functron.recipe import step_program
from functron.spmd import Mesh
from functron.stage_costs import pipeline_cost


def parse_run(kind: Any, arguments: Sequence[str], command: str, **fields: Any) -> Any:
    """The options of a command: of the run that the first argument names, or of a preset.

    Args:
        kind: a dataclass with ``run``, a positional argument, ``options``, a `TrainConfig`, and
            what the command takes besides; options override what the run says.
        arguments: as they were given. A run comes first.
        command: its name.
        fields: of the `TrainConfig`, where no run is named.

    Raises:
        ValueError: there is no such run or preset, or it cannot be read.
        launch.InputError, SystemExit: as `functron.commands.parsing.parse`.
    """
    run = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    model = _value_of("--model", arguments)
    if run:
        base = load(_file_of(Path(run)), model=model)
    else:
        base = replace(TrainConfig(), **fields)
        base = base if model is None else with_model(base, model)
    made = parse(kind, arguments, command, kind(run=run, options=base))
    if made.run != run:
        fix = f"functron {command} {made.run} ..."
        problem = Problem("run", repr(made.run), "the first argument", fix)
        raise_problems("cannot tell which run this is about", [problem])
    return made


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of an option; None: it has none, or the parser will say what is wrong."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option and following:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _file_of(path: Path) -> Path:
    """The file that has the options of a run."""
    if not path.is_dir() or run_folder.is_run(path):
        return path / run_folder.CONFIG if path.is_dir() else path
    near = run_folder.nearest(path)
    fix = "" if near is None else f"name {near}, which is one"
    wanted = f"a run folder, or a file like its {run_folder.CONFIG}"
    raise_problems("no such run", [Problem(str(path), "a folder where no run is", wanted, fix)])
    raise AssertionError("unreachable")


def step_report(config: TrainConfig, mesh: Mesh, *, program: bool = False) -> str:
    """The cost and memory of one rank in the training step of `config`, as text.

    Args:
        config: the run.
        mesh: its ranks.
        program: have the whole program in it as well (not with pp).

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    samples = f"{config.global_batch} samples of {config.seq} tokens"
    title = (
        f"{config.title}, one of {mesh.size} ranks ({str(mesh) or 'no mesh'}), {samples} per step"
    )
    if mesh["pp"] > 1:
        if program:
            raise ValueError(
                "program: got a mesh with pp, whose ranks run a schedule and not one program; "
                "wanted pp=1; fix: leave --program out"
            )
        return f"{title}\n\n{pipeline_cost(config, mesh)}"
    traced = step_program(config, mesh)
    whole = f"{traced}\n" if program else ""
    return f"{whole}{title}\n\n{traced.cost()}\n\n{traced.memory()}"
