"""This process: its place in a job, its exit code, and its error message.

The only module that reads environment variables: torchrun's, the allocator's, `FULL_TRACEBACKS`,
`TOKEN`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from functron.core.errors import Problem, full_tracebacks, raise_problems

MARK = "functron-"
"""Prefix of the run ids that `functron.cli.launch` gives to torchrun's launcher."""
FULL_TRACEBACKS = "FUNCTRON_FULL_TRACEBACKS"
TOKEN = "FUNCTRON_TOKEN"
"""The word by which a notebook knows the processes of other hosts that join it."""


@dataclass(frozen=True)
class Process:
    """This process among those of a job, by torchrun's environment variables.

    Attributes:
        rank: from 0, over all machines.
        local_rank: from 0, on this machine.
        world_size: number of processes.
        error_file: for the launcher, if this process fails; empty: none.
        launched_here: `functron.cli.launch.launch` started it, and prints that file.
        meeting_at: the host of the rendezvous.
        port: of the rendezvous; 0: not set.
        attempt: number of earlier starts by the launcher, which listens there; None: rank 0
            listens.
    """

    rank: int
    local_rank: int
    world_size: int
    error_file: str
    launched_here: bool
    meeting_at: str
    port: int = 0
    attempt: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether processes of other machines can reach the rendezvous."""
        return not (self.meeting_at == "localhost" or self.meeting_at.startswith(("127.", "::1")))


PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
"""The variables of a process of a job; without one of them it is not in a job."""
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
UNSET = f"unset {' '.join(PLACE)} MASTER_PORT"


def current() -> Process | None:
    """This process in a job that torchrun or `functron.cli.launch.launch` started.

    Returns:
        None: it is not in a job, as one of the variables `PLACE` is not set.

    Raises:
        InputError: the variables are not those of a launcher.
    """
    env = os.environ
    if not all(name in env for name in PLACE):
        return None
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    counts = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", *([_ATTEMPT] * by_agent))
    numbers = {name: _read_number(env[name]) for name in counts if name in env}
    with mistakes():
        raise_problems(
            "the environment does not describe a process of a job", _find_problems(env, numbers)
        )
    return Process(
        numbers["RANK"],
        numbers["LOCAL_RANK"],
        numbers["WORLD_SIZE"],
        env.get("TORCHELASTIC_ERROR_FILE", ""),
        env.get("TORCHELASTIC_RUN_ID", "").startswith(MARK),
        env["MASTER_ADDR"],
        numbers.get("MASTER_PORT", 0),
        numbers.get(_ATTEMPT, 0) if by_agent else None,
    )


def local_world_size(default: int) -> int:
    """The number of processes on this machine, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def read_token() -> bytes:
    """The word in `TOKEN`.

    Raises:
        InputError: there is none.
    """
    if not (token := os.environ.get(TOKEN, "")):
        fix = f"{TOKEN}=... before the command, as mesh.start() shows it"
        problem = Problem(f"environment variable {TOKEN}", "none", "the notebook's word", fix)
        raise InputError(f"cannot join a notebook\n  - {problem}")
    return token.encode()


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with settings of torch's allocator of a GPU's memory, which it reads when it is
first used; the last of them is the newest."""
_SEGMENTS = "expandable_segments:True"
_NVML = "libnvidia-ml.so.1"


def grow_segments(device_type: str) -> str:
    """Have the allocator of a GPU's memory grow its segments, unless the user has set it otherwise.

    Segments of fixed sizes leave gaps that nothing fits into. To be called before memory is used;
    processes that this one starts have the same setting. They stay fixed where NVIDIA's management
    library is missing, as in containers without the capability "utility": torch's allocator calls
    it unseen to map a segment.

    Returns:
        The setting in force, for the user; "" on a CPU, where there is none.
    """
    if device_type != "cuda":
        return ""
    given = next((name for name in ALLOCATOR if name in os.environ), None)
    if given is None and not _has_library(_NVML):
        return f"in segments of fixed sizes: {_NVML} is missing, which growing ones need"
    if given is None:
        os.environ[ALLOCATOR[-1]] = _SEGMENTS
    name = given or ALLOCATOR[-1]
    return f"{name}={os.environ[name]}"


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _read_number(text: str) -> int:
    """The number of a variable; -1: it is not a number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _find_problems(env: Mapping[str, str], numbers: Mapping[str, int]) -> Iterator[Problem]:
    fix = f"start it with torchrun, which sets them; or, where nothing did: {UNSET}"
    size = numbers["WORLD_SIZE"]
    bounds = {"RANK": (0, size), "LOCAL_RANK": (0, size), "MASTER_PORT": (1, 1 << 16)}
    for name, number in numbers.items():
        first, end = bounds.get(name, (int(name == "WORLD_SIZE"), 0))
        last = f" to {end - 1}" if end > 0 else ""
        if number < first or number >= end > 0:
            wanted = f"a whole number from {first}{last}"
            yield Problem(f"environment variable {name}", repr(env[name]), wanted, fix)
    if not env["MASTER_ADDR"].strip():
        got, wanted = repr(env["MASTER_ADDR"]), "the host where processes meet"
        yield Problem("environment variable MASTER_ADDR", got, wanted, fix)


class InputError(Exception):
    """Invalid input of the user, which is shown as a message without traceback."""


class OutsideError(Exception):
    """A failure of the environment, such as a disk, which is shown without traceback."""


@contextmanager
def outside() -> Iterator[None]:
    """Turn an OSError in a with block, whose input is valid, into an `OutsideError`."""
    try:
        yield
    except OSError as error:
        raise OutsideError(_describe_error(error)) from error


def _describe_error(error: OSError) -> str:
    if error.filename is None:
        return error.strerror or str(error)
    problem = Problem(
        str(error.filename),
        error.strerror or type(error).__name__,
        "to read or write it",
        "see that its folder and disk are there, and that this user may; then go on with --resume",
    )
    return f"cannot go on\n  - {problem}"


@contextmanager
def mistakes() -> Iterator[None]:
    """Turn a ValueError or TypeError in a with block that checks input into an `InputError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def run_guarded(program: Callable[[], int]) -> int:
    """Run a program, print its errors, and return the exit code of the process.

    An `InputError` is printed as a message, with exit code 2; an `OutsideError` (a full disk) and a
    FloatingPointError (a loss that is not finite) as well, with 1; anything else as a traceback,
    with 1. With the environment variable `FULL_TRACEBACKS` messages have a traceback, too.
    """
    try:
        here = current()
    except InputError as error:
        print(f"functron: {error}", file=sys.stderr)
        return 2
    try:
        with full_tracebacks():  # anything but a message is a bug of functron
            return program()
    except SystemExit as error:  # of the option parser, which has printed why
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader of our output has left, as head does; Python must not flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (InputError, OutsideError, FloatingPointError) as error:
        text, code = f"functron: {error}", 2 if isinstance(error, InputError) else 1
        if os.environ.get(FULL_TRACEBACKS):
            text = f"{traceback.format_exc()}{text}"
        failure: Exception = error
    except Exception as error:
        text, code = traceback.format_exc(), 1
        failure = error
    if here is not None:
        record_failure(here, failure, text)
        # others may wait for this process in a collective: exit without waiting for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(text, file=sys.stderr)
    return code


def record_failure(here: Process, error: BaseException, text: str) -> None:
    """Write an error to the launcher's file, or print it if no launcher of ours reads that.

    The file has torch.distributed.elastic's format, for torchrun's summary; it also says whether a
    restart would fail in the same way.
    """
    if not here.launched_here:
        lines = "".join(f"rank {here.rank}: {line}\n" for line in text.splitlines())
        print(lines, end="", file=sys.stderr, flush=True)
    if here.error_file:
        now = time.time()
        info = {"py_callstack": text, "timestamp": str(int(now)), "time": now}
        info["final"] = isinstance(error, FloatingPointError)  # another start would end so, too
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
        # whole or not at all: the launcher may stop this process while it writes
        unfinished = Path(here.error_file + ".unfinished")
        unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
        unfinished.replace(here.error_file)
