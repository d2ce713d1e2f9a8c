"""The command line: ``functron train | sample | checkpoint | convert | ...``.

A command's module is imported when that command runs, so that all else answers at once.
"""

from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from functron import apps
from functron.cli import process
from functron.core.errors import nearest, raise_problems, remote_problem

_ALL: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "preprocess": (
            "store.preprocess",
            "make tokens on disk of text, in Megatron-LM's format or numpy's",
        ),
        "train": (
            "train.run",
            "train a language model; without options, a small one on this Python's own text",
        ),
        "sample": ("evaluate.sample", "continue a prompt with a trained model"),
        "evaluate": ("evaluate.run", "loss and perplexity of a trained model on held-out sets"),
        "compare": ("compare.run", "the settings, losses and speeds of several runs side by side"),
        "rerun": (
            "train.rerun",
            "take a step of a run again, to tell a fault of the hardware from one of the model",
        ),
        "checkpoint": (
            "store.checkpoint",
            "list the checkpoints of a run, show what is in one, verify it",
        ),
        "convert": (
            "store.convert",
            "make a run folder of a Hugging Face model, and the other way",
        ),
        "migrate": (
            "store.migrate",
            "turn a launch script of Megatron-LM into a configuration, and explain each argument",
        ),
        "upcycle": ("store.upcycle", "make a mixture of experts of a dense run"),
        "params": (
            "plan.params",
            "show the parameters of a model, and how a mesh splits them",
        ),
        "trace": (
            "plan.trace",
            "show what one rank of a mesh computes, sends and holds in a training step",
        ),
        "schedule": (
            "plan.schedule",
            "draw a pipeline schedule, with its bubble and its live activations",
        ),
        "plan": (
            "plan.run",
            "find the fastest ways to train a model on so many GPUs, without one of them",
        ),
        "recipe": (
            "plan.recipes",
            "list configurations of large runs that functron plan has made, or show one",
        ),
        "doctor": (
            "doctor.run",
            "show what this machine and this installation have, and what is missing",
        ),
    }
)
_LEFT_OUT = apps.missing_commands()
COMMANDS = MappingProxyType({name: row for name, row in _ALL.items() if name not in _LEFT_OUT})
"""By name: the function of the arguments that gives the exit code, and a line of help."""

USAGE = f"""usage: functron COMMAND [OPTIONS]

{"".join(f"  {name:10}  {line}{chr(10)}" for name, (_, line) in COMMANDS.items())}
functron COMMAND --help lists the options, functron --version the version. Mistakes are messages;
with the environment variable {process.FULL_TRACEBACKS}=1 they come with their traceback.
"""


def main(
    arguments: Sequence[str] | None = None, *, sections: Mapping[str, type] = MappingProxyType({})
) -> int:
    """Run the command line, and return the exit code.

    0 is success, 2 a mistake in what was asked for, 1 any other failure, 128 + n the end by signal
    n after saving.

    A program with a section of its own for ``train`` is a file of these lines, with which it goes
    in place of functron, ``python program.py train --profile.every 10``:

        @dataclass(frozen=True)
        class ProfileConfig:
            '''A profile.

            Attributes:
                every: measure after every so many steps; 0: never.
            '''

            every: int = setting(0, least=0)

            def hook(self, session): ...

        sys.exit(main(sections={"profile": ProfileConfig}))

    Args:
        arguments: those of the command line; None: of this process.
        sections: frozen dataclasses by their names, whose fields are options of ``train`` and stand
            in the config.toml of its runs, beside those of `functron.training.TrainConfig`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if given else 2
    command, *rest = given
    if command in ("-V", "--version"):
        print(f"functron {importlib.import_module('functron').__version__}")
        return 0
    if command not in COMMANDS:
        print(f"functron: {command!r}: {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    return process.run_guarded(lambda: _run(command, rest, sections))


_TEXTS = (
    "--prompt", "--env", "--with", "--pattern", "--tokenizer-pattern", "--end-of-text", "--key",
)  # fmt: skip
"""Options whose values are any text: a place that is named in it is not opened."""
_PLACED = (
    "--config", "--data", "--eval-data", "--hardware", "--memory-folder", "--order-cache", "--out",
    "--picture", "--schedule", "--slots", "--svg", "--timeline", "--tokenizer",
)  # fmt: skip
"""Options whose values are places: the word after another one, such as a switch, is not its own."""
_SEVERAL = ("--env", "--with")
"""Those of `_TEXTS` that take several words, each NAME=VALUE."""
_PAIR = re.compile(r"[\w.-]+=")


def _check_places(arguments: Sequence[str]) -> None:
    """Refuse places that are not on this machine, before anything is imported or made for them."""
    before, found = "", []
    for word in arguments:
        name, _, value = word.partition("=")
        option = name.replace("_", "-") if word.startswith("--") else ""
        several = before in _SEVERAL and not option
        own = _PAIR.match(word) if several else before in (*_TEXTS, *_PLACED)
        of = option or (before if own else "argument")
        if of not in _TEXTS and (problem := remote_problem(of, value if option else word)):
            found.append(problem)
        if not several:
            before = option if "=" not in word else ""
    with process.mistakes():
        raise_problems("there are no such places on this machine", found)


def _run(command: str, arguments: Sequence[str], sections: Mapping[str, type]) -> int:
    _check_places(arguments)
    name, _, function = COMMANDS[command][0].partition(".")
    try:
        module = _import(f"functron.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("functron"):
            raise
        raise process.InputError(
            f"{command}: got no {error.name}; wanted functron installed with what it depends on; "
            "fix: pip install functron"
        ) from None
    more = {"sections": sections} if sections and command == "train" else {}
    return getattr(module, function)(arguments, **more)


def _import(name: str) -> ModuleType:
    """A module of a command: imported without looking for garbage, as what is imported stays.

    That is a sixth of the time of a short command. Where the process has nothing else, garbage is
    not looked for in it later either, nor at the end of the process, which is another sixth.
    """
    if name in sys.modules:
        return sys.modules[name]
    enabled, alone = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        if enabled:
            gc.enable()
    if alone and "triton" not in sys.modules:  # whose bindings would complain of leaks
        gc.freeze()
    return module
