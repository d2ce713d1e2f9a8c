"""``functron train`` that marks its steps in the stand-in's log, and says what memory it took.

Values that decide what the host does are put in: how many targets a batch has that is held out, and
whether SOAP's bases begin or turn in an update.
"""

import ctypes
import importlib
import sys
from dataclasses import dataclass

import torch

from functron.cli.main import main
from functron.core.settings import setting
from functron.training import run
from functron.training.loop import At, LoopHook
from functron.training.run import Session
from functron.training.setup import RunSetup, make_setup


def say(text: str) -> None:
    ctypes.CDLL(None).fake_print(text.encode())


class Marks(LoopHook):
    """The beginning of each step, and at the end the highest memory and what was promised."""

    def __init__(self, session: Session, promised: float):
        self.session, self.promised = session, promised

    def before(self, at: At) -> None:
        say(f'"op": "step", "number": {at.step}')
        if at.index == 1:  # the first one initialises libraries
            torch.cuda.reset_peak_memory_stats()

    def end(self, at: At) -> None:
        peak = torch.cuda.max_memory_allocated() - count_workspaces()
        say(f'"op": "memory", "peak": {peak}, "promised": {self.promised}')


def put_in_values() -> None:
    """Have the host decide by values that it knows, in place of those of kernels."""
    make_program, flags = run.loss_program, iter((True, False, False, True))

    def make_counted(setup: RunSetup):
        program = make_program(setup)
        return lambda params, batch: (program(params, batch)[0], batch["targets"].numel())

    run.loss_program = make_counted

    def read_flag(flag: torch.Tensor) -> bool:
        bool(flag)  # as it does, which waits
        return next(flags, False)

    # of each update whether it is the first, and whether bases turn
    importlib.import_module("functron.optim.soap")._read_flag = read_flag


def count_workspaces() -> int:
    """The bytes that cuBLAS holds, 32 MiB a thread: of libraries' memory nothing is promised."""
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return held - torch.cuda.memory_allocated()


def promise_bytes(setup: RunSetup) -> float:
    """The peak of the fullest rank, of programs traced without memory."""
    plain = make_setup(setup.config, setup.plain_mesh, "cuda")
    if plain.is_pipelined:
        from functron.apps.planner.machines import hardware
        from functron.apps.planner.measurements import estimate_run

        return estimate_run(plain, hardware("h100")).memory_bytes
    return plain.program().memory().peak_bytes


@dataclass(frozen=True)
class MarksConfig:
    """Marks in the log.

    Attributes:
        promise: compare the memory with that of the traced program.
    """

    promise: bool = setting(False)

    def hook(self, session: Session) -> Marks:
        return Marks(session, promise_bytes(session.run.setup) if self.promise else 0)


if __name__ == "__main__":
    put_in_values()
    sys.exit(main(sections={"marks": MarksConfig}))
