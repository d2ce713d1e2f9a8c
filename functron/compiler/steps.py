"""Steps: what a compiled block is made of, for a Python driver to run in order. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from functron.program.equations import Equation, Scan, Var


@dataclass(frozen=True, eq=False)
class Kernel:
    """Equations that are compiled as one graph.

    Attributes:
        equations: in the order in which they were traced.
        reads: its operands.
        results: what later steps need of what it computes.
        updates: pairs of an operand and the value that overwrites it in the end.
    """

    equations: tuple[Equation, ...]
    reads: tuple[Var, ...]
    results: tuple[Var, ...]
    updates: tuple[tuple[Var, Var], ...] = ()


@dataclass(frozen=True, eq=False)
class Eager:
    """An equation that the driver runs itself: a view, or a side effect."""

    equation: Equation

    @property
    def reads(self) -> tuple[Var, ...]:
        """Its operands."""
        return tuple(dict.fromkeys(self.equation.operands))

    @property
    def results(self) -> tuple[Var, ...]:
        """What it gives."""
        return tuple(self.equation.results)


@dataclass(frozen=True, eq=False)
class Copy:
    """The driver copies a value into an operand of the block."""

    target: Var
    value: Var

    @property
    def reads(self) -> tuple[Var, ...]:
        """Both."""
        return self.target, self.value

    @property
    def results(self) -> tuple[Var, ...]:
        """None."""
        return ()


@dataclass(frozen=True, eq=False)
class Ahead:
    """What of an iteration runs before it: the driver starts it with the iteration before.

    Attributes:
        plan: from constants and xs, its inputs, to the operands of `gathers`.
        gathers: collectives that the driver starts with these, and waits for where the iteration
            begins, whose inputs their results are.
    """

    plan: Plan
    gathers: tuple[Equation, ...]


@dataclass(frozen=True, eq=False)
class Behind:
    """What of an iteration runs after it: the driver ends it with the iteration after.

    Attributes:
        scatters: collectives that the driver starts where the iteration ends.
        passed: what else the iteration hands over.
        plan: of constants, xs, the results of `scatters`, what is passed and slices of stacks; its
            outputs are ys of columns, then those of updates.
        columns, stacks: how many of the loop's it makes: the last ones.
    """

    scatters: tuple[Equation, ...]
    passed: tuple[Var, ...]
    plan: Plan
    columns: int
    stacks: int


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan.

    Attributes:
        equation: with a `Scan` for its operation.
        body: the steps of an iteration. Its inputs are the body's, then what `ahead` gathered, then
            one slice of each stack; its outputs are the next carry, then the ys of `columns`, then
            those of `updates`, then the operands of what `behind` scatters and what it is passed.
        columns: results that are lists of slices.
        stacks: results that are written into slices of one tensor.
        updates: results that are written into the slices of an operand, and that operand.
        ahead, behind: what runs beside neighbouring iterations, if anything does.
    """

    equation: Equation
    body: Plan
    columns: tuple[Var, ...]
    stacks: tuple[Var, ...]
    updates: tuple[tuple[Var, Var], ...] = ()
    ahead: Ahead | None = None
    behind: Behind | None = None

    @property
    def plans(self) -> list[Plan]:
        """Of all its parts, in the order in which they first run."""
        ahead = [self.ahead.plan] if self.ahead else []
        behind = [self.behind.plan] if self.behind else []
        return [*ahead, self.body, *behind]

    @property
    def op(self) -> Scan:
        """The scan."""
        assert isinstance(self.equation.op, Scan)
        return self.equation.op

    @property
    def carries(self) -> tuple[Var | None, ...]:
        """The results that are the last carry."""
        return self.equation.outputs[: self.op.num_carry]

    @property
    def reads(self) -> tuple[Var, ...]:
        """Its operands."""
        return tuple(dict.fromkeys(self.equation.operands))

    @property
    def results(self) -> tuple[Var, ...]:
        """What it gives."""
        carries = (v for v in self.carries if v is not None)
        return (*carries, *self.columns, *self.stacks, *(value for value, _ in self.updates))


Step = Kernel | Eager | Copy | Loop


@dataclass(frozen=True, eq=False)
class Plan:
    """How a block runs.

    Attributes:
        inputs: of the block, then those that are only written to.
        steps: in order.
        outputs: of the block: values and constants.
        inside: values that live in the memory of an input, and that input.
    """

    inputs: tuple[Var, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    inside: Mapping[Var, Var] = field(default_factory=dict)

    def kernels(self) -> list[Kernel]:
        """All kernels, those of loops' bodies included."""
        found: list[Kernel] = []
        for step in self.steps:
            if isinstance(step, Kernel):
                found.append(step)
            elif isinstance(step, Loop):
                found += [kernel for part in step.plans for kernel in part.kernels()]
        return found
