"""A program as a value: one rank's whole computation, its inputs and outputs named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from functron import tree
from functron.errors import Problem, public, raise_problems
from functron.program import compile as compiling
from functron.program import text
from functron.program.check import check
from functron.program.cost import Cost, cost
from functron.program.equations import Block, Var
from functron.program.html import html
from functron.program.interpret import interpret
from functron.program.memory import Memory, memory
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P

Role = Literal["argument", "constant", "axis_index"]


@dataclass(frozen=True, eq=False)
class Input:
    """An input of a program.

    Attributes:
        var: its value: this rank's shard.
        path: tree path among the arguments (``"0/params/embed"``: in the first argument); the name
            of the axis for an axis index; "" for a constant.
        spec: how the global value is sharded; None where that is not known.
        donated: the caller gives its memory to the results.
        role: an argument; a tensor that the function closed over; or this rank's index on an axis,
            an int64 scalar, which keeps one program the same on every rank.
        value: the tensor, for a constant.
    """

    var: Var
    path: str
    spec: P | None = None
    donated: bool = False
    role: Role = "argument"
    value: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Output:
    """An output of a program.

    Attributes:
        value: a `Var`, or a Python value that does not depend on the arguments.
        path: tree path in the result.
        spec: how the global value is sharded; None where that is not known.
    """

    value: Any
    path: str
    spec: P | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's program, from the flat arguments to the flat results; made by `trace`.

    Attributes:
        name: of the function that was traced.
        mesh: the ranks it is for. The program is the same on every one of them.
        block: the equations; its inputs are those of `inputs`, its outputs those of `outputs`.
        inputs: arguments first, in the order of their tree, then axis indices and constants.
        outputs: in the order of the result's tree.
        in_structure: the tree of the arguments, as a tuple.
        out_structure: the tree of the result.
        static: leaves of the arguments that are no tensors, by their position in `in_structure`;
            the program holds for these values only.
        checked: whether shard_map's replication check applies to it.
        stages: the axis whose ranks have other programs: the stages of a pipeline.
    """

    name: str
    mesh: Mesh
    block: Block
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_structure: tree.Structure
    out_structure: tree.Structure
    static: Mapping[int, Any] = field(default_factory=dict)
    checked: bool = True
    stages: str | None = None

    def flatten(self, args: tuple) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, by path.

        Raises:
            ValueError: another structure, or other static leaves, than were traced.
        """
        leaves, structure = tree.flatten(args)
        if structure != self.in_structure:
            raise ValueError(
                f"{self.name}: got arguments of structure {structure}; wanted {self.in_structure}, "
                "as it was traced; fix: trace it again with these arguments"
            )
        paths = tree.paths(args)
        raise_problems(
            f"{self.name} was traced with other values",
            [
                Problem(f"argument {paths[i]}", repr(leaves[i]), repr(value), "trace it again")
                for i, value in self.static.items()
                if leaves[i] != value
            ],
        )
        rows = zip(paths, leaves, strict=True)
        return {path: leaf for path, leaf in rows if isinstance(leaf, torch.Tensor)}

    @public
    def __call__(self, *args: tree.Tree) -> tree.Tree:
        """The results for global arguments: every rank, in lockstep, in this process.

        Nothing is compiled or donated. For small meshes; see `functron.program.interpret`.
        """
        return interpret(self, *args)

    def __str__(self) -> str:
        """The program as text, which `Program.parse` reads."""
        return text.format(self)

    def html(self) -> str:
        """The program as HTML: scans and phases fold, collectives have the colour of their axis."""
        return html(self)

    def _repr_html_(self) -> str:
        return html(self)

    def diff(self, other: Program | str) -> str:
        """How another program, or the text of one, differs: a unified diff, "" for no difference.

        Values are renumbered first, so that only real differences count.
        """
        return text.diff(self, other)

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
    def memory(self) -> Memory:
        """The bytes that one rank holds while the program runs: timeline, peak and categories."""
        return memory(self)

    @public
    def compile(
        self,
        mesh: BoundMesh | None = None,
        *,
        cache: Path | str | None = None,
        options: Mapping[str, Any] | None = None,
        overlap: bool = True,
        prefetch: bool = True,
        unroll: bool = False,
        backend: compiling.Backend = "inductor",
    ) -> compiling.Executable:
        """What runs it, compiled with Inductor; see `functron.program.compile.compile`."""
        return compiling.compile(
            self,
            mesh,
            cache=cache,
            options=options,
            overlap=overlap,
            prefetch=prefetch,
            unroll=unroll,
            backend=backend,
        )
