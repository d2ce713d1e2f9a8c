"""The data of a program: values, equations, blocks, inputs and outputs; all of it immutable.

A `Block` is a list of equations in the order in which they run, each an ATen operation, a
collective of `functron.spmd.axes`, or a `Scan` over a smaller block. It is to functron what a
jaxpr is to JAX.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.core.scopes import Phase
from functron.spmd.mesh import Mesh
from functron.spmd.spec import P


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    return tuple(math.prod(max(size, 1) for size in shape[k + 1 :]) for k in range(len(shape)))


def canonical_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """`stride` with a new tensor's in dims of size 1, where any stride means the same layout."""
    found, inner = list(stride), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            found[dim] = inner
        inner = found[dim] * max(shape[dim], 1)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Var:
    """A tensor of a program: what is known of it before there are numbers.

    Attributes:
        name: unique in its block.
        shape: this rank's.
        stride: in elements.
        dtype: of its elements.
        device: where it will be.
        storage: values of a block with the same number share memory (views of one another).
        storage_bytes: the size of that memory.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    storage_bytes: int

    def stacked(self, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and stride of `length` such values on a leading dim, each in this one's layout.

        A layout with gaps or repeated elements becomes the contiguous one.
        """
        expected = 1
        stride = self.stride
        rows = zip(self.stride, self.shape, strict=True)
        for step, count in sorted(row for row in rows if row[1] != 1):
            if step != expected:
                stride = contiguous_strides(self.shape)
                break
            expected *= count
        return (length, *self.shape), (self.size, *stride)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Where:
    """Where an equation comes from.

    Attributes:
        phase: "forward", "recompute" (a forward operation that backward runs again) or "backward".
        scopes: the named scopes around it, outermost first; in backward, those of the forward
            operation that is differentiated.
        line: ``file:line: `source` `` of the user's program, or "".
    """

    phase: Phase = "forward"
    scopes: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, eq=False)
class Block:
    """Equations from inputs to outputs.

    Attributes:
        inputs: what it is a function of; every value that it uses is one of these or is computed.
        equations: in the order in which they run.
        outputs: values, or Python numbers and None.
    """

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Any, ...]

    def walk(self) -> Iterator[tuple[Equation, int]]:
        """Every equation with the number of times it runs, bodies of scans after their scan."""
        for equation in self.equations:
            yield equation, 1
            if isinstance(equation.op, Scan):
                for inner, count in equation.op.body.walk():
                    yield inner, count * equation.op.length


@dataclass(frozen=True, eq=False)
class Scan:
    """An operation that runs `body` `length` times: ``carry, y = body(consts, carry, x)``.

    Its operands are the flat ``(*consts, *carry, *xs)``; xs and the results ys are stacked on a
    leading dim of `length`. Its results are the flat ``(*carry, *ys)``. A stacked result has the
    layout of `Var.stacked`, so that its slices are laid out as the body makes them. Operands may be
    views that are never copied, and nobody needs to stack ys that only another scan reads.

    Attributes:
        body: inputs ``(*consts, *carry, *x)``, outputs ``(*carry, *y)``; outputs may be inputs.
        length: the number of iterations.
        num_consts: leading operands that every iteration sees whole.
        num_carry: operands after them that each iteration hands to the next.
        reverse: run from the last slice of xs to the first (ys keep the order of xs).
        name: of the function that was scanned.
    """

    body: Block
    length: int
    num_consts: int
    num_carry: int
    reverse: bool = False
    name: str = "scan"


@dataclass(frozen=True, eq=False)
class Equation:
    """``outputs = op(*args, **kwargs)``.

    Attributes:
        op: an ATen or functron operation, or a `Scan`.
        args: as the operation's schema orders them: `Var`s, lists of them, and constants.
        kwargs: the same by name.
        outputs: the tensors it returns, flat; None where an optional one is missing.
        where: its origin.
    """

    op: torch._ops.OpOverload | Scan
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Var | None, ...] = ()
    where: Where = Where()

    @cached_property
    def operands(self) -> tuple[Var, ...]:
        """The `Var`s among its arguments, in order, with repetitions."""
        found: list[Var] = []
        for argument in (*self.args, *self.kwargs.values()):
            items = argument if isinstance(argument, list | tuple) else (argument,)
            found += (item for item in items if isinstance(item, Var))
        return tuple(found)

    @property
    def results(self) -> list[Var]:
        """Its outputs without the missing ones."""
        return [value for value in self.outputs if value is not None]

    @property
    def aliases(self) -> bool:
        """Whether it only gives views of operands, and moves no bytes."""
        storages = {value.storage for value in self.operands}
        results = self.results
        return bool(results) and all(value.storage in storages for value in results)

    @property
    def name(self) -> str:
        """The operation's short name: ``mm``, ``psum``, ``scan``."""
        return "scan" if isinstance(self.op, Scan) else self.op.name().split("::")[1].split(".")[0]


class Fresh:
    """Makes values that a block, with the scans in it, does not have yet."""

    def __init__(self, block: Block):
        values = [*block.inputs, *(v for e, _ in block.walk() for v in e.results)]
        bodies = (e.op.body for e, _ in block.walk() if isinstance(e.op, Scan))
        values += [v for body in bodies for v in body.inputs]
        self._names = {value.name for value in values}
        self._counts: Counter[str] = Counter()
        self._storages = itertools.count(1 + max((v.storage for v in values), default=0))

    def like(self, value: Var, suffix: str = "new", **changes: Any) -> Var:
        """A new value like this one but for `changes`; in memory of its own, unless they say."""
        stem = f"{value.name}_{suffix}"
        while (name := f"{stem}_{self._counts[stem] + 1}") in self._names:
            self._counts[stem] += 1
        self._names.add(name)
        made = replace(value, name=name, **{"storage": next(self._storages), **changes})
        own = "storage" not in changes and "storage_bytes" not in changes
        return replace(made, storage_bytes=made.nbytes) if own else made

    def stacked(self, value: Var, length: int) -> Var:
        """A value for `length` values like this one, stacked."""
        shape, stride = value.stacked(length)
        return self.like(value, "kept", shape=shape, stride=stride)


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
class Code:
    """One rank's program as data, from the flat arguments to the flat results.

    `functron.program.program.Program`, which `trace` makes, is this with its analyses as methods.

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
