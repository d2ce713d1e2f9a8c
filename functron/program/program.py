"""A program as a value: one rank's whole computation, its inputs and outputs named.

Called, it runs equation by equation on every rank of its mesh, in this process
(`functron.program.interpreter`), which is for small meshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from functron.core import tree
from functron.core.errors import public, refuse
from functron.program import text
from functron.program.check import check
from functron.program.cost import Cost, collectives_diff, cost
from functron.program.equations import Code
from functron.program.interpreter import run_in_lockstep
from functron.program.memory import ProgramMemory, memory
from functron.program.timeline import ProgramTimeline, Seconds, timeline


@dataclass(frozen=True, eq=False)
class Program(Code):
    """One rank's program; made by `trace`, compiled by `functron.compiler.compile`.

    Attributes: as in `Code`.
    """

    @public
    def __call__(self, *args: tree.Tree) -> tree.Tree:
        """The results for global arguments: every rank, in lockstep, in this process.

        Nothing is compiled, donated or differentiated (trace the gradient instead). For small
        meshes; see `functron.program.interpreter`.
        """
        return run_in_lockstep(self, *args)

    def __str__(self) -> str:
        """The program as text, which `functron.program.parse.parse` reads."""
        return text.format(self)

    def html(self) -> str:
        """The program as HTML: scans and phases fold, collectives have the colour of their axis."""
        return text.html(self)

    def _repr_html_(self) -> str:
        return text.html(self)

    @public
    def diff(
        self, other: Program | str, *, by: Literal["equations", "collectives"] = "equations"
    ) -> str:
        """How another program, or the text of one, differs: a unified diff, "" for no difference.

        Values are renumbered first, so that only real differences count.

        Args:
            other: a program, such as one written by hand; or the text of one.
            by: "collectives": instead, a table of those that one of them runs more often, by axis,
                operation, phase and payload; for it, `other` is a program.

        Raises:
            ValueError: by collectives, `other` is text.
        """
        if by == "equations":
            return text.diff(self, other)
        if isinstance(other, str):
            got, wanted = "the text of one", "a program"
            fix = "give the program whose text it is, or compare by='equations'"
            refuse("cannot compare collectives", "other", got, wanted, fix)
        return collectives_diff(self, other)

    @public
    def check(self) -> None:
        """Check which values are equal on which ranks, as `shard_map` does in simulation.

        Raises:
            ValueError: an output varies over an axis that its spec lacks, or a reduction is
                redundant; all offenders are listed, each with the user's line and the fix.
        """
        check(self)

    @public
    def cost(self) -> Cost:
        """FLOPs, bytes moved and bytes communicated per axis, of one rank."""
        return cost(self)

    @public
    def memory(self) -> ProgramMemory:
        """The bytes that one rank holds while the program runs: timeline, peak and categories."""
        return memory(self)

    @public
    def timeline(
        self,
        costs: Seconds,
        *,
        overlap: bool = True,
        prefetch: bool = True,
        sequence_parts: int = 1,
    ) -> ProgramTimeline:
        """When one rank computes and communicates, and the communication that nothing hides.

        In the order in which it is compiled; `functron.program.timeline` states the rules.

        Args:
            costs: the seconds of an equation: `functron.program.Rates`, or a function.
            overlap, prefetch, sequence_parts: as of `functron.jit`.
        """
        options = {"overlap": overlap, "prefetch": prefetch, "sequence_parts": sequence_parts}
        return timeline(self, costs, **options)
