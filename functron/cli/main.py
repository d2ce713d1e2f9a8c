"""The command line: ``functron train | sample | checkpoint | convert | ...``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from functron.cli import doctor, evaluate, inspect, launch, preprocess, sample, store, train
from functron.core.errors import nearest

USAGE = """usage: functron COMMAND [OPTIONS]

  preprocess  make tokens on disk of text, in Megatron-LM's format or numpy's
  train       train a language model; without options, a small one on this Python's own text
  sample      continue a prompt with a trained model
  evaluate    loss and perplexity of a trained model on held-out sets
  checkpoint  list the checkpoints of a run, show what is in one, verify it
  convert     make a run folder of a Hugging Face model, and the other way
  upcycle     make a mixture of experts of a dense run
  params      show the parameters of a model, and how a mesh splits them
  trace       show what one rank of a mesh computes, sends and holds in a training step
  schedule    draw a pipeline schedule, with its bubble and its live activations
  doctor      show what this machine and this installation have, and what is missing

functron COMMAND --help lists the options. Mistakes are messages; with the environment variable
FUNCTRON_FULL_TRACEBACKS=1 they come with the traceback that they have.
"""

COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = MappingProxyType(
    {
        "preprocess": preprocess.run,
        "train": train.run,
        "sample": sample.run,
        "evaluate": evaluate.run,
        "checkpoint": store.run_checkpoint,
        "convert": store.run,
        "upcycle": store.run_upcycle,
        "params": inspect.run_params,
        "trace": inspect.run,
        "schedule": inspect.run_schedule,
        "doctor": doctor.run,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    0 is success, 2 a mistake in what was asked for, 1 any other failure, 128 + n the end by signal
    n after saving.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if given else 2
    command, *rest = given
    if command not in COMMANDS:
        print(f"functron: {command!r}: {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    program = COMMANDS[command]
    return launch.guarded(lambda: program(rest))
