"""Programs in processes of their own, stepped in turn by one parent, so that none disturbs another.

Each program gets a fresh process, or with torchrun one per rank, and cold compiler caches. It
sleeps while another one is timed; before each step there is a pause in which it falls asleep.
Parent and program exchange one line per step over pipes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

WARM_UP = 2
PAUSE_SECONDS = 0.1
"""Threads of a pool look for work a while after a step; the next program was 5% slower for it."""
AGREE_STEPS, AGREE_WITHIN = 4, 1e-4
"""How many first losses of programs are compared, and by how much they may differ, relative."""


def resident(name: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most so far (ru_maxrss has the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"this benchmark needs Linux: /proc/self/status has no {name}")


def reset_peak() -> None:
    """Let "VmHWM" start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def pin(threads: int) -> None:
    """Keep this process and its children to so many processors: XLA has no option for threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def serve(
    make: Callable[[], Callable[[], float]],
    between: Callable[[], object] = lambda: None,
    notes: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """The program's side: build it when told to, then take the steps that the parent asks for.

    `between` is called after every step, outside of what is timed; `notes` are added to answers.
    """
    lead = not dist.is_initialized() or dist.get_rank() == 0
    # whatever else prints must not mix with the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    before = resident("VmRSS")
    step = None
    while _next_request(lead):
        begun = time.perf_counter()
        if step is None:
            step = make()
            begun = time.perf_counter()
        loss = step()
        answer = {
            "seconds": time.perf_counter() - begun,
            "loss": loss,
            "grown": resident("VmHWM") - before,
            **notes(),
        }
        reset_peak()
        between()
        if lead:
            print(json.dumps(answer), file=answers, flush=True)


def _next_request(lead: bool) -> bool:
    request = [sys.stdin.readline().strip() if lead else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(request)
    return request[0] == "step"


@dataclass
class Program:
    """One running program and what was measured of it.

    Attributes:
        name: as shown.
        process: the program, or torchrun above its ranks.
        errors: what it writes to standard error.
        answers: one per step so far, the first of them the one that compiles.
        failure: why it ended early; empty where it did not.
    """

    name: str
    process: subprocess.Popen[str]
    errors: IO[str]
    answers: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    def step(self) -> None:
        """Have the program take a step; remember the answer, or why there is none."""
        if self.failure:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            self.answers.append(json.loads(line))
        else:
            self.process.wait()
            self.errors.seek(0)
            self.failure = reason(self.errors.read())

    def close(self) -> None:
        """End the program."""
        if self.process.stdin is not None and self.process.poll() is None:
            self.process.stdin.close()  # an empty request ends it
        self.process.wait(timeout=60)
        self.errors.close()

    @property
    def times(self) -> list[float]:
        """Seconds per step, without the first ones."""
        return [answer["seconds"] for answer in self.answers[1 + WARM_UP :]]

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.times)

    @property
    def compile_seconds(self) -> float:
        """How much longer the first call took than a step."""
        return self.answers[0]["seconds"] - self.seconds

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [answer["loss"] for answer in self.answers]

    @property
    def peak(self) -> int:
        """By how much resident memory grew at most, compilation included; bytes of one process."""
        return max(answer["grown"] for answer in self.answers)

    @property
    def steady(self) -> int:
        """The same while taking steps after the first ones."""
        return max(answer["grown"] for answer in self.answers[1 + WARM_UP :])


def reason(errors: str) -> str:
    """The line of a traceback that says what went wrong, in the rank where it did."""
    lines = [line.strip() for line in errors.splitlines() if "Error" in line or "skip:" in line]
    lines.sort(key=lambda line: "by peer" in line)  # what the other ranks say of it
    return (lines or [errors.strip() or "it ended without a word"])[0][:300]


def start(
    name: str, arguments: Sequence[str], *, ranks: int, threads: int, caches: Path
) -> Program:
    """Start ``python *arguments`` as a program with `threads` threads per rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), *arguments]
    folder = caches / name.replace(" ", "-")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
    }
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the program)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
    )
    return Program(name, process, errors)


def run(programs: Sequence[Program], rounds: int) -> None:
    """First calls one after the other, then `rounds` rounds in which every program steps once."""
    for program in programs:
        for _ in range(1 + WARM_UP):
            program.step()
    for _ in range(rounds):
        for program in programs:
            time.sleep(PAUSE_SECONDS)
            program.step()
    for program in programs:
        program.close()


def ratio(other: Program, program: Program) -> float:
    """How many times as fast as `other` the program is: the median over rounds."""
    pairs = zip(other.times, program.times, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def disagreement(losses: Mapping[str, Sequence[float]], steps: int, tolerance: float) -> list[str]:
    """The programs whose loss differs from the first one's in any of the first `steps` steps."""
    found = []
    (first, reference), *others = losses.items() if losses else [("", ())]
    for name, mine in others:
        pairs = list(zip(reference, mine, strict=False))[:steps]
        worst = max(abs(b - a) / max(abs(a), 1e-30) for a, b in pairs)
        if not worst <= tolerance:
            found.append(f"{name}: {mine[:steps]} (by {worst:.1e})")
    if found:
        found.insert(0, f"{first}: {reference[:steps]}")
    return found


Row = dict[str, Any]
"""A result: its name ("row"), its state where that is not "done", and figures."""


def row(name: str, *, ok: bool = True, why: str = "", **figures: Any) -> Row:
    """A row; one that is not `ok` has other numbers than it should."""
    state = {} if ok else {"state": "wrong"}
    return {"row": name, **state, **({"why": why} if why else {}), **figures}


def tried(name: str, function: Callable[..., Row], *args: Any, **given: Any) -> Row:
    """``function(name, ...)``, or the row of how it failed: those that follow are not lost."""
    try:
        return function(name, *args, **given)
    except SystemExit as reason:
        return {"row": name, "state": "skipped", "why": str(reason).removeprefix("skip: ")}
    except Exception:
        return {"row": name, "state": "failed", "why": traceback.format_exc()}
