"""The command line: ``functron train | sample | checkpoint | convert | ...``.

A command's module is imported when the command runs, so that help is fast.
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
            "tokenise text into files of Megatron-LM's format or numpy's",
        ),
        "train": (
            "train.run",
            "train a model; without options, a small one on the source code of Python",
        ),
        "sample": ("evaluate.sample", "continue a prompt with a trained model"),
        "evaluate": (
            "evaluate.run",
            "evaluate a trained model: loss and perplexity on held-out data",
        ),
        "compare": ("compare.run", "compare settings, losses and speeds of several runs"),
        "rerun": (
            "train.rerun",
            "repeat a step of a run, to tell hardware faults from instabilities of the model",
        ),
        "checkpoint": (
            "store.checkpoint",
            "list a run's checkpoints, show the contents of one, or verify it",
        ),
        "convert": (
            "store.convert",
            "convert a Hugging Face model or Megatron checkpoint into a run, or back",
        ),
        "migrate": (
            "store.migrate",
            "convert a Megatron-LM launch script into a configuration, and explain each argument",
        ),
        "upcycle": ("store.upcycle", "initialise a mixture of experts from a dense run"),
        "params": ("plan.params", "show a model's parameters, and how a mesh shards them"),
        "trace": (
            "plan.trace",
            "show the computation, communication and memory of one rank in a step",
        ),
        "schedule": (
            "plan.schedule",
            "draw a pipeline schedule, with its bubble and activation memory",
        ),
        "plan": (
            "plan.run",
            "rank parallel configurations for N GPUs by a cost model (needs no GPU)",
        ),
        "recipe": (
            "plan.recipes",
            "list or show configurations of large runs, made by functron plan",
        ),
        "build": ("build.run", "compile the CUDA kernels ahead of time (needs no GPU)"),
        "join": (
            "launch.join_notebook",
            "be ranks of a mesh that a notebook on another host has started (with torchrun)",
        ),
        "doctor": ("doctor.run", "check this machine and installation, or benchmark a mesh"),
    }
)
_LEFT_OUT = apps.missing_commands()
COMMANDS = MappingProxyType({name: row for name, row in _ALL.items() if name not in _LEFT_OUT})
"""By name: a function of the arguments that returns the exit code, and a line of help."""

USAGE = f"""usage: functron COMMAND [OPTIONS]

{"".join(f"  {name:10}  {line}{chr(10)}" for name, (_, line) in COMMANDS.items())}
functron COMMAND --help lists the options of a command, functron --version the version. The
environment variable {process.FULL_TRACEBACKS}=1 adds tracebacks to error messages.
"""


def main(
    arguments: Sequence[str] | None = None, *, sections: Mapping[str, type] = MappingProxyType({})
) -> int:
    """Run the command line, and return the exit code.

    0: success; 2: invalid input; 1: any other failure; 128 + n: ended by signal n, after saving.

    A program that adds a section to the configuration of ``train`` has these lines, and is used in
    place of functron, ``python program.py train --profile.every 10``:

        @dataclass(frozen=True)
        class ProfileConfig:
            '''A profile.

            Attributes:
                every: measure every N steps; 0: never.
            '''

            every: int = setting(0, least=0)

            def hook(self, session): ...

        sys.exit(main(sections={"profile": ProfileConfig}))

    Args:
        arguments: those of the command line; None: of this process.
        sections: frozen dataclasses by name, whose fields are options of ``train`` and settings in
            config.toml, beside those of `functron.training.TrainConfig`.
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
        own = _LEFT_OUT.get(command)
        fix = f"a command of {own}, which is not there" if own else nearest(command, COMMANDS)
        print(f"functron: {command!r}: {fix}", file=sys.stderr)
        return 2
    return process.run_guarded(lambda: _run(command, rest, sections))


_TEXTS = (
    "--prompt", "--env", "--with", "--pattern", "--tokenizer-pattern", "--end-of-text", "--key",
)  # fmt: skip
"""Options whose values are any text, in which paths are not opened."""
_PLACED = (
    "--config", "--data", "--eval-data", "--hardware", "--memory-folder", "--order-cache", "--out",
    "--picture", "--refit", "--schedule", "--slots", "--svg", "--timeline", "--tokenizer",
)  # fmt: skip
"""Options whose values are paths; a word after any other option may be an argument."""
_SEVERAL = ("--env", "--with")
"""Those of `_TEXTS` that take several words, each NAME=VALUE."""
_PAIR = re.compile(r"[\w.-]+=")


def _check_places(arguments: Sequence[str]) -> None:
    """Refuse paths on other machines, such as s3://, before anything is imported or made."""
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
    """Import a command's module without garbage collection, a sixth of a short command's time.

    In a process of its own, imported objects are never collected, not even at its end: another
    sixth.
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
