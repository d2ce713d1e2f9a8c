"""What a rank does in a cell of a schedule: F3, B3, I3 or W3, with .1 for its second chunk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W"]
What = Literal["activation", "cotangent", "gradient"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_PATTERN = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Action:
    """One computation on one microbatch; prints as ``F3`` (chunk 0) or ``F3.1`` (chunk 1).

    Attributes:
        kind: "F" forward; "B" whole backward; or its parts, "I" backward for the stage's input and
            "W" backward for its weights.
        microbatch: from 0.
        chunk: which of its rank's chunks of layers, from 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`.

        Raises:
            ValueError: it is not of the form F3 or F3.1.
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise ValueError(
                f"action: got {text!r}; wanted one of F B I W, then the microbatch, then .chunk "
                "where that is not 0; fix: write F3 or F3.1"
            )
        kind = cast(Kind, found[1])
        return Action(kind, int(found[2]), int(found[3] or 0))


Cell = tuple[Action, ...]
Pipe = tuple[tuple[int, int], ...]  # per stage the (rank, chunk) that holds it


class Product(NamedTuple):
    """What an action makes and others need, of one microbatch at one stage.

    Attributes:
        what: "activation" (by F), "cotangent" of the stage's input (by B or I) or "gradient" of its
            weights (by W; B makes it too, but nothing waits for it).
        microbatch: from 0.
        pipe: the pipe of the stage.
        stage: the stage.
    """

    what: What
    microbatch: int
    pipe: int
    stage: int
