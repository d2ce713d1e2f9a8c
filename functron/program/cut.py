"""Cutting a program into pieces that run one after another and together compute what it computes.

A pipeline cuts the joint program of a stage, from parameters, input and cotangent to output and
gradients, into a forward piece (F), the gradient of the stage's input (I) and the gradients of its
weights (W). Nothing is computed twice: what a later piece reads is kept by the one that makes it.
This is the split of the backward pass of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from functron import tree
from functron.errors import Problem, raise_problems
from functron.program.donation import takers
from functron.program.equations import Block, Var
from functron.program.levels import Fresh, Levels, Part
from functron.program.program import Input, Output, Program
from functron.program.reach import AROUND, FIRST


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a program; made by `cut`.

    Attributes:
        block: its inputs are values of the whole program: those of its arguments that the piece
            reads, then what earlier pieces keep for it, then the axis indices and constants that it
            reads. Its outputs are those of `outputs`, then `keeps`.
        outputs: the positions of the program's outputs that it computes.
        keeps: values that later pieces read, each in memory of its own. One of them may be an
            output of this piece as well, and an output may be a view of one.
        arrivals: what it reads of earlier pieces.
        spends: those of `arrivals` that no later piece reads: their memory can be given up.
    """

    block: Block
    outputs: tuple[int, ...]
    keeps: tuple[Var, ...]
    arrivals: tuple[Var, ...]
    spends: tuple[Var, ...]

    @property
    def kept_bytes(self) -> int:
        """The bytes of what it keeps for later pieces."""
        return sum(value.nbytes for value in self.keeps)

    def program(self, original: Program, donate: Collection[Var] = ()) -> Program:
        """The piece as a program, from flat tensors to flat tensors, which can be compiled.

        Its arguments are those of `block.inputs` that are no axis indices or constants, in order;
        its result is a list of the block's outputs. `Executable.run` takes the arguments as a list
        that it empties, so what only this list refers to is freed after its last use.

        Args:
            original: the program that was cut.
            donate: inputs whose memory results may take: accumulators, and what the piece spends.
                Only those are donated that some result is like, in shape, layout and dtype.
        """
        known = {given.var: given for given in original.inputs}
        inputs: list[Input] = []
        for position, var in enumerate(self.block.inputs):
            given = known.get(var)
            if given is None:
                given = Input(var, f"{position}/kept_{var.name}")
            elif given.role == "argument":
                inner = given.path.partition("/")[2]
                given = replace(given, path=f"{position}/{inner}" if inner else f"{position}")
            inputs.append(replace(given, donated=var in donate and given.role == "argument"))
        outputs = [
            _renumber(original.outputs[position], index)
            for index, position in enumerate(self.outputs)
        ]
        for value in self.keeps:
            outputs.append(Output(value, f"{len(outputs)}/kept_{value.name}"))
        arguments = [_argument(given) for given in inputs if given.role == "argument"]
        made = Program(
            original.name,
            original.mesh,
            self.block,
            tuple(inputs),
            tuple(outputs),
            tree.structure(tuple(arguments)),
            tree.structure([0] * len(outputs)),
            checked=False,
            stages=original.stages,
        )
        taken = {*takers(made).values()}
        kept = tuple(replace(given, donated=given.var in taken) for given in inputs)
        return replace(made, inputs=kept)


def _renumber(output: Output, index: int) -> Output:
    inner = output.path.partition("/")[2]
    return replace(output, path=f"{index}/{inner}" if inner else f"{index}")


def _argument(given: Input) -> tree.Tree:
    """A tree whose one leaf has the path of an input, behind its position."""
    inner = given.path.partition("/")[2]
    return {inner: 0} if inner else 0


def held_bytes(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The bytes of what is kept for later pieces after each piece has run."""
    held, after = 0, []
    for piece in pieces:
        held += piece.kept_bytes - sum(value.nbytes for value in piece.spends)
        after.append(held)
    return tuple(after)


def cut(
    program: Program, groups: Sequence[Sequence[int]], *, early: bool = True
) -> tuple[Piece, ...]:
    """The pieces of a program, one per group of its outputs.

    An equation runs in the first piece with an output that it leads to, and its results are kept
    for later pieces that read them, as they are. Views are made again instead of kept, and so are
    constants, and casts of what is no larger or an input. Equations there for a side effect run as
    soon as their operands are there. Cheap elementwise equations and sums run earlier where that
    makes less to keep.

    A scan is cut like the program: the first piece with one of its results runs it, without what
    only other results need; a later piece runs another scan of the same length for these, which
    reads what it needs of the first one's iterations, stacked.

    Args:
        program: what `trace` made.
        groups: positions of the program's outputs, each in one group; later groups may need what
            earlier ones compute, never the other way round.
        early: let a group that is empty, but not the first, take from the next one the equations
            that lead to two or more of its outputs. A pipeline's first stage has no gradient of its
            input; its chain of activations' cotangents then still runs in the piece of I, and only
            the weights' gradients at its sides are left for W.

    Raises:
        ValueError: the groups do not have each output once.
    """
    _check(program, groups)
    values = [output.value for output in program.outputs]
    distinct = dict.fromkeys(value for value in values if isinstance(value, Var))
    bit = {value: 1 << (FIRST + position) for position, value in enumerate(distinct)}
    wanted = [bit[value] if isinstance(value, Var) else 0 for value in values]
    masks = [sum({wanted[position] for position in group}) for group in groups]
    levels = Levels(program.block, wanted, _rule(masks, early), Fresh(program.block))
    parts = levels.divide(
        {level: [values[position] for position in group] for level, group in enumerate(groups)}
    )
    pieces = []
    for level, group in enumerate(groups):
        later = {v for other, part in parts.items() if other > level for v in part.arrivals}
        pieces.append(_piece(program, parts[level], tuple(group), later))
    return tuple(pieces)


def _check(program: Program, groups: Sequence[Sequence[int]]) -> None:
    counts = Counter(position for group in groups for position in group)
    known = range(len(program.outputs))
    raise_problems(
        f"cannot cut {program.name}",
        [
            Problem(
                f"output {position}",
                f"in {counts[position]} groups",
                "in one group" if position in known else f"outputs 0 to {len(known) - 1}",
                "give every output of the program to one group",
            )
            for position in sorted({*known, *counts})
            if counts[position] != 1 or position not in known
        ],
    )


def _rule(masks: Sequence[int], early: bool) -> Callable[[int], int]:
    """From the outputs that a value leads to, as bits, to the piece that makes it."""

    def level_of(bits: int) -> int:
        level = next(level for level, mask in enumerate(masks) if bits & mask)
        before = level - 1
        if early and before > 0 and not masks[before]:
            several = (bits & masks[level]).bit_count() > 1 or bits & AROUND
            return before if several else level
        return level

    return level_of


def _piece(program: Program, part: Part, group: tuple[int, ...], later: set[Var]) -> Piece:
    read = set(part.inputs)
    arguments = [i.var for i in program.inputs if i.role == "argument" and i.var in read]
    hidden = [i.var for i in program.inputs if i.role != "argument" and i.var in read]
    outputs = (*(program.outputs[position].value for position in group), *part.keeps)
    block = Block((*arguments, *part.arrivals, *hidden), part.equations, outputs)
    spends = tuple(value for value in part.arrivals if value not in later)
    return Piece(block, group, part.keeps, part.arrivals, spends)
