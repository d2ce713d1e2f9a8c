"""The data of a program: values, equations, blocks, inputs and outputs; all of it immutable.

A `Block` is a list of equations in the order in which they run, each an ATen operation, a
collective of `functron.spmd.axes`, or `ControlFlow` over smaller blocks: a `Scan`, `Switch` or
`While`. It is to functron what a jaxpr is to JAX. What the parts of a value's memory are, by
strides, is here too: `ViewWindow`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.core.scopes import Phase
from functron.spmd.mesh import Mesh
from functron.spmd.spec import P

T = TypeVar("T")


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


class TensorType(NamedTuple):
    """The properties of a tensor that programs depend on; `stride` is in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Var:
    """A tensor of a program: its shape, layout, dtype and memory, without its values.

    Attributes:
        name: unique in its block.
        shape: this rank's.
        stride: in elements.
        device: where it will be.
        storage: values of a block with the same number share memory (views of one another).
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

    @property
    def type(self) -> TensorType:
        """Its properties without name and memory."""
        return TensorType(self.shape, self.stride, self.dtype, self.device)

    def meta(self) -> torch.Tensor:
        """A meta tensor of this shape, layout and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

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
        """Every equation with the number of times it runs, blocks after the operation with them.

        Of a switch each branch counts once, of a loop that runs while something holds its
        `While.trip_count`, or one iteration.
        """
        for equation in self.equations:
            yield equation, 1
            for block, times in getattr(equation.op, "runs", ()):
                yield from ((inner, count * times) for inner, count in block.walk())

    def walk_blocks(self) -> Iterator[Block]:
        """The block itself, then those of its operations, and of theirs."""
        yield self
        for equation in self.equations:
            for block, _ in getattr(equation.op, "runs", ()):
                yield from block.walk_blocks()


@dataclass(frozen=True, eq=False)
class Scan:
    """An operation that runs `body` `length` times: ``carry, y = body(consts, carry, x)``.

    Its operands are the flat ``(*consts, *carry, *xs)``; xs and the results ys are stacked on a
    leading dim of `length`. Its results are the flat ``(*carry, *ys)``. A stacked result has the
    layout of `Var.stacked`, so that its slices are laid out as the body makes them. Operands may be
    views that are never copied, and ys that only another scan reads need not be stacked.

    Attributes:
        body: inputs ``(*consts, *carry, *x)``, outputs ``(*carry, *y)``; outputs may be inputs.
        num_consts: leading operands that every iteration sees whole.
        num_carry: operands after them that each iteration hands to the next.
        reverse: run from the last slice of xs to the first (ys keep the order of xs).
    """

    kind: ClassVar[str] = "scan"
    body: Block
    length: int
    num_consts: int
    num_carry: int
    reverse: bool = False
    name: str = "scan"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The body."""
        return (self.body,)

    @property
    def runs(self) -> tuple[tuple[Block, int], ...]:
        """The body, once for each slice."""
        return ((self.body, self.length),)

    def with_blocks(self, blocks: Sequence[Block]) -> Scan:
        """The same with another body."""
        return replace(self, body=blocks[0])

    @property
    def key(self) -> tuple:
        """Its length, what is carried, and the direction."""
        return self.length, self.num_consts, self.num_carry, self.reverse

    @property
    def first_x(self) -> int:
        """The position of the first of xs among the operands."""
        return self.num_consts + self.num_carry

    def divide(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """The constants, the first carry and the xs among what there is one of per operand."""
        given = list(operands)
        return (
            given[: self.num_consts],
            given[self.num_consts : self.first_x],
            given[self.first_x :],
        )


@dataclass(frozen=True, eq=False)
class Switch:
    """An operation that runs one of `blocks`: ``results = blocks[index](operands)``.

    Its first operand is the index, a scalar that is an integer or a bool; one out of range is the
    nearest in range. Every block has all other operands for inputs, and results of the same shapes,
    layouts and dtypes. Ranks may take different branches, so a branch may communicate only over
    axes on which the index is the same.

    Attributes:
        weights: how often each branch is taken, as parts of 1, for costs; empty: not known.
    """

    kind: ClassVar[str] = "switch"
    branches: tuple[Block, ...]
    weights: tuple[float, ...] = ()
    name: str = "switch"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The branches."""
        return self.branches

    @property
    def runs(self) -> tuple[tuple[Block, int], ...]:
        """Every branch once."""
        return tuple((block, 1) for block in self.branches)

    def with_blocks(self, blocks: Sequence[Block]) -> Switch:
        """The same with other branches."""
        return replace(self, branches=tuple(blocks))

    @property
    def key(self) -> tuple:
        """Weights."""
        return self.weights

    def clamp(self, index: int) -> int:
        """The branch that an index means."""
        return min(max(index, 0), len(self.branches) - 1)


@dataclass(frozen=True, eq=False)
class While:
    """An operation that runs ``carry = body(consts, carry)`` while ``cond(consts, carry)`` is true.

    Its operands are the flat ``(*consts, *carry)``, which both blocks have for inputs, its results
    the last carry. Ranks may run different numbers of iterations, so blocks may communicate only
    over axes on which the condition is the same.

    Attributes:
        cond: to one bool, a scalar.
        body: to the next carry, of the same shapes, layouts and dtypes.
        num_consts: leading operands that every iteration sees.
        trip_count: the iterations that costs count; None: not known, and counted as one.
    """

    kind: ClassVar[str] = "while"
    cond: Block
    body: Block
    num_consts: int
    trip_count: int | None = None
    name: str = "while"

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The condition, then the body."""
        return self.cond, self.body

    @property
    def runs(self) -> tuple[tuple[Block, int], ...]:
        """The condition is computed once more than the body."""
        count = 1 if self.trip_count is None else self.trip_count
        return (self.cond, count + 1), (self.body, count)

    def with_blocks(self, blocks: Sequence[Block]) -> While:
        """The same with another condition and body."""
        return replace(self, cond=blocks[0], body=blocks[1])

    @property
    def key(self) -> tuple:
        """The number of constants, and of iterations."""
        return self.num_consts, self.trip_count


ControlFlow = Scan | Switch | While
"""The operations that run blocks of their own; every other one is of torch or functron.

All arguments of their equations are values. They have `blocks`, `runs` (each block and how often it
runs, as far as that is known), `with_blocks`, and a `key` that tells one from others of its `kind`.
"""


@dataclass(frozen=True, eq=False)
class Equation:
    """``outputs = op(*args, **kwargs)``.

    Attributes:
        op: an ATen or functron operation, or `ControlFlow`.
        args: as the operation's schema orders them: `Var`s, lists of them, and constants.
        outputs: the tensors it returns, flat; None where an optional one is missing.
    """

    op: torch._ops.OpOverload | ControlFlow
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Var | None, ...] = ()
    where: Where = Where()

    @property
    def scan(self) -> Scan:
        """Its operation, which is a `Scan`."""
        assert isinstance(self.op, Scan)
        return self.op

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

    @cached_property
    def acts(self) -> bool:
        """Whether it, or an equation inside, is there for its side effect: has no results."""
        if isinstance(self.op, ControlFlow):
            return any(e.acts for block in self.op.blocks for e in block.equations)
        return not self.outputs

    @property
    def ordered(self) -> bool:
        """Whether it is an effect that keeps the order of such (`functron.program.callbacks`)."""
        return not self.outputs and bool(self.kwargs.get("ordered"))

    @property
    def aliases(self) -> bool:
        """Whether it only gives views of operands, and moves no bytes."""
        storages = {value.storage for value in self.operands}
        results = self.results
        return bool(results) and all(value.storage in storages for value in results)

    @property
    def name(self) -> str:
        """The operation's short name: ``mm``, ``psum``, ``scan``."""
        if isinstance(self.op, ControlFlow):
            return self.op.kind
        return self.op.name().split("::")[1].split(".")[0]


def rename_values(equation: Equation, names: Mapping[Var, Var]) -> Equation:
    """The equation with other variables for all of its own."""
    found = equation.args, dict(equation.kwargs), equation.outputs
    args, kwargs, outputs = pytree.tree_map_only(Var, names.__getitem__, found)
    return Equation(equation.op, args, kwargs, outputs, equation.where)


def _find_overload(packet: Any, func: torch._ops.OpOverload) -> Any:
    """The overload that takes what `func` takes, by its name or another; None where none does."""
    wanted = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in sorted(packet.overloads(), key=func._overloadname.__ne__):
        found = getattr(packet, name)  # pow.Scalar, for one, is of a number to a tensor
        if [(x.name, str(x.type)) for x in found._schema.arguments] == wanted:
            return found
    return None


def functional_form(func) -> Any:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``; None where none gives the same shape."""
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None or (found := _find_overload(packet, func)) is None:
        return None
    changed = [
        each for each in func._schema.arguments if each.alias_info and each.alias_info.is_write
    ]
    same = changed == list(func._schema.arguments[:1])
    return found if same and len(found._schema.returns) == 1 else None


class Fresh:
    """Makes variables with names and memory that a block, with those inside, does not use yet."""

    def __init__(self, block: Block):
        values = [*block.inputs, *(v for e, _ in block.walk() for v in e.results)]
        values += [v for inner in block.walk_blocks() for v in inner.inputs]
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


def _is_other(value: Any, other: Any) -> bool:
    """Whether a static value is another one: 1, 1.0 and True are equal, and make other programs."""
    numbers = isinstance(value, (bool, int, float))
    both_nan = numbers and value != value and other != other
    return (value != other and not both_nan) or (numbers and type(value) is not type(other))


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

    `functron.program.trace.Program`, which `trace` makes, is this with its analyses as methods.

    Attributes:
        mesh: the ranks it is for. The program is the same on every one of them.
        block: the equations; its inputs are those of `inputs`, its outputs those of `outputs`.
        inputs: arguments first, in the order of their tree, then axis indices and constants.
        outputs: in the order of the result's tree.
        in_structure: the tree of the arguments, as a tuple.
        static: leaves of the arguments that are no tensors, by their position in `in_structure`;
            the program holds for these values only.
        checked: whether shard_map's replication check applies to it.
        stages: the axis whose ranks have other programs: the stages of a pipeline.
        paths: of the leaves of the arguments, for a program that was read from its text: any trees
            with these are its arguments. None: trees of `in_structure` alone.
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
    paths: tuple[str, ...] | None = None

    def flatten(self, args: tuple) -> dict[Var, torch.Tensor]:
        """The tensors among the arguments, by the inputs that they are.

        Raises:
            ValueError: another structure, or other static leaves, than were traced.
        """
        leaves, structure = tree.flatten(args)
        paths = tree.paths(args)
        if self.paths is not None:
            leaves, paths = self._in_order(leaves, paths, self.paths), list(self.paths)
        elif structure != self.in_structure:
            raise ValueError(
                f"{self.name}: got arguments of structure {structure}; wanted {self.in_structure}, "
                "as it was traced; fix: trace it again with these arguments"
            )
        raise_problems(
            f"{self.name} was traced with other values",
            [
                Problem(f"argument {paths[i]}", repr(leaves[i]), repr(value), "trace it again")
                for i, value in self.static.items()
                if _is_other(value, leaves[i])
            ],
        )
        moving = [i for i in range(len(leaves)) if i not in self.static]
        raise_problems(
            f"{self.name} was traced with tensors",
            [
                Problem(f"argument {paths[i]}", repr(leaves[i]), "a tensor", "trace it again")
                for i in moving
                if not isinstance(leaves[i], torch.Tensor)
            ],
        )
        arguments = (given.var for given in self.inputs if given.role == "argument")
        return dict(zip(arguments, (leaves[i] for i in moving), strict=True))

    def _in_order(self, leaves: list, found: Sequence[str], wanted: Sequence[str]) -> list:
        """The leaves with these paths, in the order of the paths that are wanted."""
        at: dict[str, list[int]] = {}
        for i, path in enumerate(found):
            at.setdefault(path, []).append(i)
        missing = sorted((Counter(wanted) - Counter(found)).elements())
        extra = sorted((Counter(found) - Counter(wanted)).elements())
        fix = "give it the trees that it was traced with"
        raise_problems(
            f"{self.name}, which was read from its text, has other arguments",
            [
                *(Problem(f"argument {path}", "nothing", "a leaf", fix) for path in missing),
                *(Problem(f"argument {path}", "a leaf", "nothing", fix) for path in extra),
            ],
        )
        return [leaves[at[path].pop(0)] for path in wanted]


# --- strided views, read and written as pure operations
#
# A program is pure, so that a write through a view is a new value of all the memory that the view
# shows a part of, and views are taken anew from it. torch's own operation for such a write,
# ``as_strided_scatter``, has a wrong derivative with respect to the value that is written to: the
# cotangent of what was overwritten, and nothing of the rest. What is here is made of reshapes,
# slices and `slice_scatter`, whose derivatives, batching rules and placements are right; for a view
# that is no window, such as a diagonal, of a gather and a scatter. All that records or runs such
# operations takes them from here. A view that shows all of the memory costs reshapes alone.

_aten = torch.ops.aten


class Strided(NamedTuple):
    """The layout of a tensor in its memory.

    Attributes:
        size, stride: of its dims, in elements.
        offset: where it begins, in elements from where the memory does.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


def strided_of(x: torch.Tensor, base: torch.Tensor | None = None) -> Strided:
    """The layout of a tensor, in memory that begins where `base` does."""
    start = 0 if base is None else base.storage_offset()
    return Strided(tuple(x.shape), tuple(x.stride()), int(x.storage_offset() - start))


class Span(NamedTuple):
    """The part of a dim that a window shows.

    Attributes:
        start: the first place.
        step: from one to the next.
    """

    start: int
    size: int
    step: int = 1


class ViewWindow(NamedTuple):
    """A strided view as spans of the dims of a shape that the memory is seen in.

    Attributes:
        shape: of the memory.
        owners: the dim of the view that each of these is a part of, major to minor; None: a place.
    """

    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    owners: tuple[int | None, ...]

    @property
    def cut(self) -> list[int]:
        """The dims of which it shows a part."""
        pairs = zip(self.spans, self.shape, strict=True)
        return [dim for dim, (span, size) in enumerate(pairs) if span.size != size]

    @property
    def order(self) -> list[int]:
        """Among the dims that are owned, the order in which the view has them."""
        kept = [owner for owner in self.owners if owner is not None]
        return sorted(range(len(kept)), key=lambda place: kept[place])


def memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims from the major one on in the memory of a dense tensor; None of one with gaps."""
    if 0 in size:
        return list(range(len(size)))
    # a dim of one place lies anywhere: where it stands
    wide = sorted((i for i, n in enumerate(size) if n != 1), key=lambda i: -stride[i])
    place = iter(wide)
    order = [next(place) if n != 1 else i for i, n in enumerate(size)]
    shape, step = [size[i] for i in order], [stride[i] for i in order]
    return order if canonical_strides(shape, step) == contiguous_strides(shape) else None


def as_memory(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """x, of the shape of a dense `base`, with its dims as that has them in memory."""
    order = memory_order(base.shape, base.stride())
    assert order is not None
    return _permute(x, order)


def as_value(memory: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_memory`."""
    order = memory_order(base.shape, base.stride())
    assert order is not None
    return _permute(memory, sorted(range(len(order)), key=order.__getitem__))


def span_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are in memory from a strided tensor's first to its last."""
    spans = ((n - 1) * step for n, step in zip(size, stride, strict=True))
    return 0 if 0 in size else 1 + sum(spans)


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether places of a strided view may share memory."""
    reach = 0
    for step, count in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step <= reach:
            return True
        reach += (count - 1) * step
    return False


def reaches_outside(view: Strided, operand: Strided) -> bool:
    """Whether a strided view shows places, in the memory of both, that its operand does not."""
    if 0 in view.size:
        return False
    if 0 in operand.size or view.offset < operand.offset or _end(view) > _end(operand):
        return True
    if memory_order(operand.size, operand.stride) is not None:
        return False
    shown = torch.zeros(_end(operand), dtype=torch.bool)
    shown.as_strided(*operand).fill_(True)
    return not bool(shown.as_strided(*view).all())


def _end(view: Strided) -> int:
    """The place after the last one that a view shows."""
    return view.offset + span_of(view.size, view.stride)


def window_of(shape: Sequence[int], view: Strided) -> ViewWindow | None:
    """The window of a contiguous tensor that a strided view shows; None: it shows no window.

    Args:
        view: of its memory, without overlaps.
    """
    total = math.prod(shape)
    own = {step for step, n in zip(contiguous_strides(shape), shape, strict=True) if n != 1}
    steps = {step for step, n in zip(view.stride, view.size, strict=True) if n != 1}
    for cuts in (own | steps, steps, own):
        found = _fit_window(_split_memory(total, cuts), view)
        if found is not None:
            return found
    return None


def _split_memory(total: int, cuts: set[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the dims of contiguous memory that has these strides; else nothing."""
    ends = [total, *sorted(cuts | {1}, reverse=True)]
    pairs = list(itertools.pairwise(ends))
    if any(b == 0 or a % b for a, b in pairs):
        return []
    return [(a // b, b) for a, b in pairs]


def _fit_window(dims: list[tuple[int, int]], view: Strided) -> ViewWindow | None:
    if not dims:
        return None
    starts, rest = [], view.offset
    for _, step in dims:
        start, rest = divmod(rest, step)
        starts.append(start)
    spans: list[Span] = [Span(start, 1) for start in starts]
    owners: list[int | None] = [None] * len(dims)
    for number, (count, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        if count == 1:
            continue
        dim = next((i for i, (_, step) in enumerate(dims) if stride % step == 0), None)
        if dim is None:
            return None
        step = stride // dims[dim][1]
        while count != 1:
            size, start = dims[dim][0], starts[dim]
            if owners[dim] is not None:
                return None
            owners[dim] = number
            if start + (count - 1) * step < size:
                spans[dim], count = Span(start, count, step), 1
            elif dim and step == 1 and start == 0 and count % size == 0:
                spans[dim], count, dim = Span(0, size), count // size, dim - 1
            else:
                return None
    pairs = zip(spans, dims, strict=True)
    inside = all(span.start < size for span, (size, _) in pairs)
    return ViewWindow(tuple(n for n, _ in dims), tuple(spans), tuple(owners)) if inside else None


def read_view(memory: torch.Tensor, view: Strided) -> torch.Tensor:
    """The values that a strided view of a contiguous tensor shows, in the shape of the view.

    Args:
        memory: the tensor; how it is laid out where this runs does not matter.
        view: of it, as it is when contiguous.
    """
    if 0 in view.size:
        return memory.new_zeros(view.size)
    # what is the same in all places of a dim is read once
    rows = list(zip(view.size, view.stride, strict=True))
    once = tuple(1 if step == 0 else n for n, step in rows)
    seen = view._replace(size=once)
    found = None if overlaps(seen.size, seen.stride) else window_of(memory.shape, seen)
    if found is None:
        # laid out in the view's own order, so that it has the views that this has
        order = sorted(range(len(once)), key=lambda dim: -seen.stride[dim])
        size, stride = (tuple(row[dim] for dim in order) for row in seen[:2])
        turned = Strided(size, stride, seen.offset)
        line = _reshape(memory, (memory.numel(),))
        x = _reshape(line.index_select(0, _places(turned, memory.device)), turned.size)
        x = _permute(x, sorted(range(len(order)), key=order.__getitem__))
    else:
        x = _read_spans(_reshape(memory, found.shape), found, found.cut)
        gone = [dim for dim, owner in enumerate(found.owners) if owner is None]
        x = _reshape(x, [n for dim, n in enumerate(x.shape) if dim not in gone])
        x = _reshape(_permute(x, found.order), once)
    return x if once == view.size else x.expand(view.size)


def write_view(memory: torch.Tensor, values: torch.Tensor, view: Strided) -> torch.Tensor:
    """A contiguous tensor with other values where a strided view without overlaps shows it.

    Args:
        memory: the tensor; how it is laid out where this runs does not matter.
        values: of the shape of the view.
        view: of it, as it is when contiguous.
    """
    if 0 in view.size:
        return memory
    found = window_of(memory.shape, view)
    if found is None:
        line, places = _reshape(memory, (memory.numel(),)), _places(view, memory.device)
        filled = line.scatter(0, places, _reshape(values, (values.numel(),)))
        return _reshape(filled, memory.shape)
    sizes = [s.size for s, o in zip(found.spans, found.owners, strict=True) if o is not None]
    x = _reshape(values, [sizes[place] for place in found.order])
    x = _permute(x, [found.order.index(place) for place in range(len(sizes))])
    x = _reshape(x, [span.size for span in found.spans])
    return _reshape(_write_spans(_reshape(memory, found.shape), x, found, found.cut), memory.shape)


def _write_spans(
    whole: torch.Tensor, part: torch.Tensor, found: ViewWindow, cut: list[int]
) -> torch.Tensor:
    """`whole` with `part` in the spans of the dims that are cut."""
    if not cut:
        return part
    dim, *others = cut
    inner = _write_spans(_read_spans(whole, found, [dim]), part, found, others) if others else part
    start, size, step = found.spans[dim]
    end = start + (size - 1) * step + 1
    return _aten.slice_scatter.default(whole, inner, dim, start, end, step)


def _read_spans(x: torch.Tensor, found: ViewWindow, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        start, size, step = found.spans[dim]
        x = _aten.slice.Tensor(x, dim, start, start + (size - 1) * step + 1, step)
    return x


def copy_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x in memory of its own, contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


def _reshape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`torch.reshape`, which a recorder would take for one operation."""
    shape = tuple(shape)
    if tuple(x.shape) == shape:
        return x
    try:
        return x.view(shape)
    except RuntimeError:  # of strides that no view has
        return copy_contiguous(x).view(shape)


def _permute(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return x if list(order) == list(range(len(order))) else x.permute(tuple(order))


def _places(view: Strided, device: torch.device) -> torch.Tensor:
    """The places in memory that a view shows, in order."""
    found: torch.Tensor | None = None
    count = len(view.size)
    for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        if size != 1:
            start = view.offset if found is None else 0
            row = torch.arange(size, device=device) * stride + start
            row = _reshape(row, (size, *[1] * (count - 1 - dim)))
            found = row if found is None else found + row
    if found is None:
        return torch.full((1,), view.offset, device=device)
    return _reshape(found, (found.numel(),))
