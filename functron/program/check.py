"""The replication check of a traced program: which values may differ between which ranks.

Types flow through the equations. An input varies over the axes of its spec, and a result over
whatever its operands do, except that sums, extrema and gathers over an axis make their result equal
on its ranks, while scatters, exchanges and ``vary`` make it differ. The simulator's check
(`functron.spmd.simulate`) finds the same by running; this one needs no ranks.

Every variation carries its origin, so that a message can tell where it entered the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functron.core.errors import Problem, raise_problems
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Equation,
    Input,
    Output,
    Scan,
    Switch,
    Var,
    While,
)
from functron.program.recorder import draws
from functron.program.text import axis_of
from functron.spmd.primitives import describe_redundant
from functron.spmd.simulate import LOSS_FIX, share_problem, unreduced_problems
from functron.spmd.spec import spec_axes

_EQUAL_AFTER = {"psum", "pmax", "pmin", "pbroadcast", "all_gather", "assume_replicated"}
_SHARE = "a share"  # not an axis: marks a rank's share of a gradient
_DIFFER_AFTER = {"psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all"}


@dataclass(frozen=True)
class Origin:
    """Where a variation entered a program.

    Attributes:
        what: what brought it, in the user's words.
        line: the user's line of the equation that first used or made it; "" until one has.
    """

    what: str
    line: str = ""


VaryingAxes = frozenset[str]
Variation = Mapping[str, Origin]
"""The axes over which a value may differ between ranks, each with its origin."""


def varying(program: Code) -> Mapping[Var, VaryingAxes]:
    """The axes over which each value may differ between ranks, values inside blocks included.

    In a loop a value varies over what it does in any of its iterations.
    """
    return _Inference(program).seen


def check(program: Code) -> None:
    """Check which values are equal on which ranks, as `shard_map` does in simulation.

    Only what the program still holds is checked: tracing drops equations that nothing needs, so a
    redundant reduction whose result is unused passes. Outputs without a spec pass as well, and
    programs of functions that were mapped with ``check=False``, but for collectives that some of
    their ranks would never reach.

    Raises:
        ValueError: an output varies over an axis that its spec lacks, a loss that must be
            replicated varies, a reduction is redundant, or a collective is over an axis over which
            the index or condition of a switch or loop around it varies; all offenders are listed,
            each with the user's line and the fix.
    """
    if not program.checked and all(block is program.block for block in program.block.walk_blocks()):
        return
    inferred = _Inference(program)
    found = [*inferred.divided]
    found += [*inferred.problems, *_check_outputs(program, inferred)] if program.checked else []
    raise_problems(
        f"{program.name} is not a correct program for Mesh({program.mesh})",
        # a line that runs several times (in remat, in each iteration) is reported once
        dict.fromkeys(found),
    )


def refuse_divided(program: Code) -> None:
    """Raise ValueError for collectives in branches and loops that some of their ranks never reach.

    This part of `check` holds for whatever runs a program, however it was mapped.
    """
    equations = (e for block in program.block.walk_blocks() for e in block.equations)
    if any(isinstance(equation.op, Switch | While) for equation in equations):
        title = f"{program.name} would not end on the processes of Mesh({program.mesh})"
        raise_problems(title, dict.fromkeys(_Inference(program).divided))


class _Inference:
    """One pass over a program.

    Attributes:
        values: the variation of every value of the outer block.
        seen: the axes of every value anywhere, over all iterations.
        makers: the equations of the outer block, by result.
        problems: reductions and losses that cannot be right.
        divided: collectives that some of their ranks would never reach.
    """

    def __init__(self, program: Code):
        self.axes = [name for name, size in program.mesh.axes if size > 1]
        self.seen: dict[Var, VaryingAxes] = {}
        self.problems: list[Problem] = []
        self.divided: list[Problem] = []
        self.values: dict[Var, Variation] = {g.var: self._infer_input(g) for g in program.inputs}
        self.makers = {v: e for e in program.block.equations for v in e.results}
        self._infer_block(program.block, self.values)

    def _infer_input(self, given: Input) -> Variation:
        what = (
            f"lax.axis_index({given.path!r})"
            if given.role == "axis_index"
            else f"{given.role} {given.path}, split by {given.spec}"
        )
        names = spec_axes(given.spec) if given.spec is not None else ()
        return {name: Origin(what) for name in names if name in self.axes}

    def _infer_block(self, block: Block, values: dict[Var, Variation]) -> None:
        """Add the variation of every result to `values`, which has that of the inputs."""
        for equation in block.equations:
            if isinstance(equation.op, ControlFlow):
                results = self._infer_flow(equation, values)
            else:
                self._examine(equation, values)
                results = self._infer_results(equation, values)
            pairs = zip(equation.outputs, results, strict=True)
            values.update((value, result) for value, result in pairs if value is not None)
        for value in (*block.inputs, *(v for e in block.equations for v in e.results)):
            self.seen[value] = self.seen.get(value, frozenset()) | (values[value].keys() - {_SHARE})

    def _infer_results(
        self, equation: Equation, values: Mapping[Var, Variation]
    ) -> list[Variation]:
        """The variation of every output of an equation that has no blocks."""
        if not equation.name.startswith("_foreach_"):
            return [self._infer_result(equation, values)] * len(equation.outputs)
        # a list operation is as many operations: output i is computed from element i of each list
        given = [*equation.args, *equation.kwargs.values()]
        rows = [
            [arg[i] if isinstance(arg, (list, tuple)) else arg for arg in given]
            for i in range(len(equation.outputs))
        ]
        return [
            _union([values[v] for v in row if isinstance(v, Var)], equation.where.line)
            for row in rows
        ]

    def _infer_result(self, equation: Equation, values: Mapping[Var, Variation]) -> Variation:
        assert not isinstance(equation.op, ControlFlow)
        own, name, line = equation.op.namespace == "functron", equation.name, equation.where.line
        # a barrier's other operand says when it runs, not what it gives
        operands = equation.operands[: 1 if own and name == "barrier" else None]
        result = _union([values[value] for value in operands], line)
        if own and name in _EQUAL_AFTER:
            result.pop(equation.args[1], None)
        elif own and name == "vary":  # what a gradient varied over before is of no interest
            result[equation.args[1]] = Origin("each rank's own share of a gradient", line)
            result[_SHARE] = result[equation.args[1]]
        elif own and name == "assume_share":
            result[_SHARE] = Origin("a declared share of a gradient", line)
        elif own and name == "require_share":
            result.pop(_SHARE, None)
        elif own and name in _DIFFER_AFTER:
            result.setdefault(equation.args[1], Origin(f"lax.{name}", line))
        elif draws(equation.op, equation.args, equation.kwargs):
            result = {axis: Origin(f"random numbers of {name}", line) for axis in self.axes}
        return result

    def _infer_flow(self, equation: Equation, values: Mapping[Var, Variation]) -> list[Variation]:
        """The variation of every output of an equation that runs blocks."""
        if isinstance(equation.op, Scan):
            return self._infer_scan(equation, equation.op, values)
        given = [values[value] for value in equation.operands]
        if isinstance(equation.op, Switch):
            self._examine_blocks(equation, equation.op.blocks, given[0])
            rows = [self._infer_outputs(block, given[1:]) for block in equation.op.branches]
            chosen = [_union([given[0]], equation.where.line)] * len(equation.outputs)
            return [*(_union(each, "") for each in zip(*rows, chosen, strict=True))]
        assert isinstance(equation.op, While)
        return [*self._infer_while(equation, equation.op, given)]

    def _infer_outputs(self, block: Block, given: Sequence[Variation]) -> list[Variation]:
        inner = dict(zip(block.inputs, given, strict=True))
        self._infer_block(block, inner)
        return [inner[v] if isinstance(v, Var) else {} for v in block.outputs]

    def _infer_while(
        self, equation: Equation, op: While, given: Sequence[Variation]
    ) -> Sequence[Variation]:
        """Add what the body and the condition make of the carry to it, until that adds nothing.

        Ranks that stop at different iterations have different carries.
        """
        consts, carry = given[: op.num_consts], given[op.num_consts :]
        while True:
            (holds,) = self._infer_outputs(op.cond, [*consts, *carry])
            after = self._infer_outputs(op.body, [*consts, *carry])
            stops = _union([holds], equation.where.line)
            before = carry
            carry = [*(_union((*pair, stops), "") for pair in zip(carry, after, strict=True))]
            if all(a.keys() == b.keys() for a, b in zip(carry, before, strict=True)):
                self._examine_blocks(equation, op.blocks, holds)
                return carry

    def _examine_blocks(
        self, equation: Equation, blocks: Sequence[Block], chosen: Variation
    ) -> None:
        """Find collectives that only some of their ranks would take part in."""
        for each in (e for block in blocks for e, _ in block.walk()):
            axis = axis_of(each)
            if axis is not None and axis in chosen:
                self.divided.append(_find_divided(equation, each, axis, chosen[axis]))

    def _infer_scan(self, equation: Equation, op: Scan, values: Mapping[Var, Variation]) -> list:
        """Run the body on types until the carry's types repeat, usually after two iterations.

        This is what the simulator sees, which unrolls.
        """
        consts, carry, xs = op.divide([values[value] for value in equation.operands])
        ys: list[Variation] = [{} for _ in op.body.outputs[op.num_carry :]]
        if op.length == 0:  # values of a body that never runs have types, and no faults
            counts = len(self.problems), len(self.divided)
            self._infer_block(
                op.body, dict(zip(op.body.inputs, [*consts, *carry, *xs], strict=True))
            )
            del self.problems[counts[0] :], self.divided[counts[1] :]
            return [*carry, *ys]
        before: list[Sequence[Variation]] = []  # the carry before every iteration
        place: dict[Any, int] = {}
        for step in range(op.length):
            key = tuple(frozenset(variation) for variation in carry)
            if key in place:
                first = place[key]
                carry = before[first + (op.length - first) % (step - first)]
                break
            place[key] = step
            before.append(carry)
            inner = dict(zip(op.body.inputs, [*consts, *carry, *xs], strict=True))
            self._infer_block(op.body, inner)
            outputs = [inner[v] if isinstance(v, Var) else {} for v in op.body.outputs]
            carry = outputs[: op.num_carry]
            ys = [_union(pair, "") for pair in zip(ys, outputs[op.num_carry :], strict=True)]
        return [*carry, *ys]

    def _examine(self, equation: Equation, values: Mapping[Var, Variation]) -> None:
        if equation.name == "require_replicated":
            value, axis = equation.args[:2]
            if axis in values[value]:
                self.problems.append(_find_unequal(equation, axis, values[value][axis]))
        elif equation.name == "require_share":
            value, summed = equation.args[:2]
            over = [a for a in self.axes if a in summed and a not in values[value]]
            made = _SHARE in values[value]
            if self.axes and (over or not made):
                where = f"sync_gradients at {equation.where.line or 'an unknown line'}"
                got, *rest = share_problem(over, made)
                got = got.replace("gradient", f"gradient of shape {value.shape}", 1)
                self.problems.append(Problem(where, got, *rest))
        elif equation.kwargs.get("must_vary") and equation.args[1] not in values[equation.args[0]]:
            self.problems.append(_find_redundant(equation))


def _union(variations: Sequence[Variation], line: str) -> dict[str, Origin]:
    """The variation of what is computed at `line` from values with these."""
    result: dict[str, Origin] = {}
    for variation in variations:
        for axis, origin in variation.items():
            if axis not in result:
                result[axis] = origin if origin.line else replace(origin, line=line)
    return result


def _check_outputs(program: Code, inferred: _Inference) -> list[Problem]:
    """Outputs that vary over an axis that their spec lacks."""
    return unreduced_problems(
        (output.path, axis, output.spec, _describe_origin(output, axis, inferred))
        for output in program.outputs
        if output.spec is not None and isinstance(output.value, Var)
        for axis in inferred.axes
        if axis in inferred.values[output.value] and axis not in spec_axes(output.spec)
    )


def _describe_origin(output: Output, axis: str, inferred: _Inference) -> str:
    origin = inferred.values[output.value][axis]
    maker = inferred.makers.get(output.value)
    made = maker.where.line if maker is not None else ""
    return (f", made at {made}" if made else "") + _describe_since(origin, made)


def _describe_since(origin: Origin, made: str) -> str:
    if origin.line in ("", made):
        return f", from {origin.what}"
    return f"; it varies since {origin.line}, from {origin.what}"


_MUST_BE_EQUAL = {
    "forward": ("grad at", "a loss that", "one replicated over the mesh", LOSS_FIX),
    "backward": (
        "psum over {axis!r} at",
        "a cotangent that",
        "one that all its ranks have, as equal_cotangents=True says",
        "leave equal_cotangents out, and they are summed",
    ),
    "rows": (
        "a collective over {axis!r} in a branch at",
        "the predicate or index of each row of a vmap that",
        "one that is the same along the axis: a derivative counts on ranks that took the branch",
        "make it the same, as lax.pmax(..., {axis!r}) does; or choose results with torch.where",
    ),
}
"""Words for what ``require_replicated`` finds to vary, by the phase that it is in; of rows, any."""

ROW_INDEX = "index of rows"
"""The named scope of statements about the index by which rows of a vmap choose a branch."""


def _find_unequal(equation: Equation, axis: str, origin: Origin) -> Problem:
    of_rows, line = ROW_INDEX in equation.where.scopes, equation.where.line
    kind = "backward" if equation.where.phase == "backward" else "forward"
    place, what, *rest = _MUST_BE_EQUAL["rows" if of_rows else kind]
    got = f"{what} varies over {axis!r}{_describe_since(origin, line)}"
    wanted, fix = (words.format(axis=axis) for words in rest)
    return Problem(f"{place.format(axis=axis)} {line or 'an unknown line'}", got, wanted, fix)


def _find_divided(around: Equation, equation: Equation, axis: str, origin: Origin) -> Problem:
    what = "index of a switch" if isinstance(around.op, Switch) else "condition of a while loop"
    line, outer = (each.where.line or "an unknown line" for each in (equation, around))
    since = _describe_since(origin, around.where.line)
    return Problem(
        f"{equation.name} over {axis!r} at {line}",
        f"inside a branch or loop at {outer}, and the {what} varies over {axis!r}{since}: ranks "
        "would wait for others that never come",
        f"collectives over axes on which the {what} is the same",
        f"make it the same, as by lax.pmax(..., {axis!r}), or communicate outside",
    )


def _find_redundant(equation: Equation) -> Problem:
    value, axis, size = equation.args[:3]
    words = describe_redundant(equation.name, axis, size, value.shape)
    line = equation.where.line or "an unknown line"
    return Problem(f"{equation.name} over {axis!r} at {line}", *words)
