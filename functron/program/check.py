"""The replication check of a traced program: which values may differ between which ranks.

Types flow through the equations. An input varies over the axes of its spec, and a result over
whatever its operands do, except that sums, extrema and gathers over an axis make their result equal
on its ranks, while scatters, permutations and `vary` make it differ. The simulator's check
(`functron.spmd.replication`) finds the same by running; this one needs no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from functron.errors import Problem, raise_problems
from functron.program.equations import Block, Equation, Scan, Var
from functron.spmd.spec import spec_axes

if TYPE_CHECKING:
    from functron.program.program import Program

Axes = frozenset[str]
_JOINS = {"psum", "pmax", "pmin", "all_gather", "assume_replicated"}
_PARTS = {"psum_scatter", "all_to_all", "ppermute", "vary"}


def varying(program: Program) -> Mapping[Var, Axes]:
    """The axes over which each value may differ between ranks, values inside scans included.

    In a scan a value varies over what it does in any of its iterations.
    """
    return _Types(program).axes


def check(program: Program) -> None:
    """Check which values are equal on which ranks.

    Raises:
        ValueError: an output varies over an axis that its spec lacks, a loss that must be
            replicated varies, or a reduction is redundant; all offenders are listed.
    """
    types = _Types(program)
    raise_problems(
        f"{program.name} is not a correct program for {program.mesh.shape}",
        [*types.outputs(program), *types.statements(program.block)],
    )


class _Types:
    """The inferred types of a program, and which equation each variation comes from."""

    def __init__(self, program: Program):
        self.axes: dict[Var, Axes] = {}
        self.made: dict[Var, Equation] = {}
        self.paths = {given.var: given.path for given in program.inputs}
        sizes = program.mesh.shape
        for given in program.inputs:
            names = spec_axes(given.spec) if given.spec is not None else ()
            self.axes[given.var] = frozenset(name for name in names if sizes.get(name, 1) > 1)
        self._block(program.block)

    def _block(self, block: Block) -> None:
        for equation in block.equations:
            self.made.update(dict.fromkeys(equation.results, equation))
            if isinstance(equation.op, Scan):
                self._scan(equation.op, equation)
                continue
            axes = frozenset().union(*(self.axes[value] for value in equation.operands))
            if _is_functron(equation) and equation.name in _JOINS:
                axes -= {equation.args[1]}
            elif _is_functron(equation) and equation.name in _PARTS:
                axes |= {equation.args[1]}
            self.axes.update(dict.fromkeys(equation.results, axes))

    def _scan(self, op: Scan, equation: Equation) -> None:
        """Infer the body until what it carries varies over nothing more than what it is given."""
        operands = [self.axes[value] for value in equation.operands]
        start, stop = op.num_consts, op.num_consts + op.num_carry
        while True:
            self.axes.update(zip(op.body.inputs, operands, strict=True))
            self._block(op.body)
            outputs = [self._of(value) for value in op.body.outputs]
            carry = [a | b for a, b in zip(operands[start:stop], outputs, strict=False)]
            if carry == operands[start:stop]:
                break
            operands[start:stop] = carry
        results = [*carry, *outputs[op.num_carry :]]
        for value, axes in zip(equation.outputs, results, strict=True):
            if value is not None:
                self.axes[value] = axes

    def _of(self, value: Any) -> Axes:
        return self.axes[value] if isinstance(value, Var) else frozenset()

    def outputs(self, program: Program) -> Iterator[Problem]:
        """Outputs that vary where their spec says that they do not."""
        for output in program.outputs:
            if not program.checked or output.spec is None or not isinstance(output.value, Var):
                continue
            for axis in sorted(self.axes[output.value] - set(spec_axes(output.spec))):
                line = self._line(output.value, axis)
                yield Problem(
                    f"output {output.path}" if output.path else "output",
                    f"a value that varies over {axis!r}" + (f", made at {line}" if line else ""),
                    f"one replicated over {axis!r}, as its out_spec {output.spec} declares",
                    f"reduce it with lax.psum(..., {axis!r}) (or pmean, all_gather) before "
                    "returning it; if it is a gradient, call sync_gradients; or put "
                    f"{axis!r} in its out_spec",
                )

    def statements(self, block: Block) -> Iterator[Problem]:
        """Losses that vary, and reductions of what is equal on all ranks already."""
        for equation in block.equations:
            if isinstance(equation.op, Scan):
                yield from self.statements(equation.op.body)
            elif equation.name == "require_replicated":
                yield from self._loss(equation)
            elif equation.kwargs.get("must_vary") and _is_functron(equation):
                yield from self._redundant(equation)

    def _loss(self, equation: Equation) -> Iterator[Problem]:
        value, axis = equation.args
        if axis in self.axes[value]:
            yield Problem(
                f"grad at {equation.where.line or 'an unknown line'}",
                f"a loss that varies over {axis!r}",
                "one replicated over the mesh",
                "return lax.psum(loss, ...) of the ranks' parts of the loss, or lax.pmean(loss, "
                "...) of their means",
            )

    def _redundant(self, equation: Equation) -> Iterator[Problem]:
        value, axis = equation.args[:2]
        if axis not in self.axes[value]:
            yield Problem(
                f"{equation.name} over {axis!r} at {equation.where.line or 'an unknown line'}",
                f"a value of shape {value.shape} that is already replicated over {axis!r}",
                f"one that varies over it: it would be counted {equation.args[2]} times",
                f"drop {axis!r} from this {equation.name}; synchronise gradients once",
            )

    def _line(self, value: Var, axis: str) -> str:
        """The user's line of the last operation on the way to `value` along which `axis` came."""
        while value in self.made:
            equation = self.made[value]
            if equation.where.line:
                return equation.where.line
            sources: Sequence[Var] = [v for v in equation.operands if axis in self.axes[v]]
            if not sources:
                break
            value = sources[0]
        return f"argument {self.paths[value]}" if value in self.paths else ""


def _is_functron(equation: Equation) -> bool:
    return not isinstance(equation.op, Scan) and equation.op.namespace == "functron"
