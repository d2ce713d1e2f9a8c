"""``functron train`` that marks its steps in the stand-in's log."""

import ctypes
import sys
from dataclasses import dataclass

from functron.cli.main import main
from functron.training.loop import At, LoopHook
from functron.training.run import Session


def say(text: str) -> None:
    ctypes.CDLL(None).fake_print(text.encode())


class Marks(LoopHook):
    """The beginning of each step."""

    def before(self, at: At) -> None:
        say(f'"op": "step", "number": {at.step}')


@dataclass(frozen=True)
class MarksConfig:
    """Marks in the log."""

    def hook(self, session: Session) -> Marks:
        return Marks()


if __name__ == "__main__":
    sys.exit(main(sections={"marks": MarksConfig}))
