"""Types of values: shape, dtype, and along every mesh axis what a rank holds of the value.

`typeof` is JAX's, with more to say. Along an axis a value is

* replicated: the same on all its ranks,
* split along a dim: ranks hold parts, in order, of one value,
* partial: ranks hold values whose sum it is,
* varying: different, in a way that the program does not tell,
* unknown: processes cannot tell without a word from the others.

That a value is replicated or not is exact, in simulation and in traces (`functron.program.check`).
Split and partial are readings of what differs, and follow from the equations of a trace
(`functron.program.readings`): an equation of this rank's shards is read as one of whole values
where its dims say so. A product that sums over a split dim is partial, a `psum` takes that away.
What follows from no rule is varying: biases added to partial values, softmax along a split dim, an
``arange`` added along one. A reading is therefore a promise: ranks' parts, put together as it says,
are what the same operation gives of whole values.

Types are those of spmd_types (Meta's, of DTensor's lineage) in all of its published examples, but:

* it tells invariant from replicated values, by what their gradients are; there is one kind here, as
  gradients are those of the product of all ranks, and `sync_gradients` adds them up;
* it refuses what would lose a partial sum (its nonlinear functions, its product with another, its
  sum with what is not partial); here that is varying, since a rank may mean its own value, and an
  annotation is what refuses it (`typed`). ``torch.where`` of two partial values is partial;
* ``S(i)`` is a type of its own here, and an error of its global types is varying;
* an ``all_gather`` of what is split is replicated whatever dim is named; in JAX it stays varying;
* converting without communication (replicated to split or partial) is code here: a slice by
  `lax.axis_index` is split where `functron.spmd.spec.take` made it, otherwise varying.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.core.scopes import set_during
from functron.core.typing import Partial, Varying, match_dims
from functron.program.check import varying
from functron.program.equations import (
    Block,
    Code,
    ControlFlow,
    Equation,
    Input,
    Scan,
    Switch,
    Var,
)
from functron.program.readings import (
    FILLS,
    DimSplit,
    DimSplits,
    ValueReading,
    follow_rule,
    join_readings,
    read_spec,
    read_whole,
)
from functron.program.recorder import Recorder, active, keeper
from functron.spmd.axes import BoundAxis, SimulatedAxis, scope, user_line
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, Mesh
from functron.spmd.spec import P, as_entry, dim_axes, local_shape, problems, spec_axes

AxisKind = Literal["replicated", "split", "partial", "varying", "unknown"]


@dataclass(frozen=True)
class AxisType:
    """The type of a value along one mesh axis: which of it the axis' ranks hold.

    Attributes:
        dim: of this rank's value, that the axis splits; None where it splits none.
        inside: axes that split the same dim, and the axis each of their parts.
        blocks: this rank's value has so many blocks along the dim, each of them a part; 1 mostly.
    """

    kind: AxisKind
    dim: int | None = None
    inside: tuple[str, ...] = ()
    blocks: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return self.kind
        text = f"split dim {self.dim}"
        text += f" inside {', '.join(self.inside)}" if self.inside else ""
        return text + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


@dataclass(frozen=True, repr=False)
class ValueType:
    """The type of a value in a per-rank program; see `typeof`.

    ``str(type)`` is ``float64[4, 8] {dp: split dim 0, tp: partial}``, ``type["tp"]`` what the ranks
    of an axis hold.

    Attributes:
        shape: this rank's.
        axes: of every mesh axis with more than one rank its `AxisType`, in the mesh's order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[tuple[str, AxisType], ...] = ()

    def __getitem__(self, axis: str) -> AxisType:
        """Its type along an axis; replicated along one that is not there."""
        return dict(self.axes).get(axis, AxisType("replicated"))

    @property
    def varying(self) -> frozenset[str]:
        """The axes over which ranks may hold different values: JAX's ``vma``."""
        return frozenset(name for name, at in self.axes if at.kind != "replicated")

    @property
    def partial(self) -> frozenset[str]:
        """The axes over whose ranks it is to be summed."""
        return frozenset(name for name, at in self.axes if at.kind == "partial")

    @property
    def spec(self) -> P | None:
        """The spec that says the same; None where none does."""
        entries: list[list[str]] = [[] for _ in self.shape]
        if any(at.kind not in ("replicated", "split") or at.blocks > 1 for _, at in self.axes):
            return None
        for name, at in sorted(self.axes, key=lambda row: len(row[1].inside)):
            if at.dim is not None:
                entries[at.dim].append(name)
        while entries and not entries[-1]:
            entries.pop()
        return P(*map(as_entry, entries))

    def __repr__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        rows = ", ".join(f"{name}: {at}" for name, at in self.axes)
        return f"{text} {{{rows}}}" if rows else text


# --- collectives


def _gather(x: ValueReading, axis: str) -> ValueReading:
    """The reading of what an ``all_gather`` stacks on a new leading dim.

    Of axes that split a dim outside of this one the stack has a part, too: it is what they split.
    """
    outer: DimSplits = ()
    dims = list(x.dims)
    if axis in x.split:
        dim = x.split[axis]
        at = [d.axis for d in dims[dim]].index(axis)
        if dims[dim][at].blocks == 1:
            outer, dims[dim] = dims[dim][:at], dims[dim][at:]
    return replace(x.bare, dims=(outer, *dims)).without({axis})


def _scatter(x: ValueReading, axis: str, *, keep: bool) -> ValueReading:
    """The reading of one place of dim 0 for every rank, of a value that ranks have summed.

    Args:
        keep: dim 0 stays, and is of other ranks' places, as in an all_to_all.
    """
    target, (major, *dims) = x.minor_of(0), x.dims
    lost = {axis, *(d.axis for d in major)} if target is None else ()
    if target is not None:
        dims[target - 1] = (*major, DimSplit(1, axis), *dims[target - 1])
    rows = ((), *dims) if keep else tuple(dims)
    minor = () if keep else tuple(m - 1 if m else None for m in x.minor[1:])
    return replace(x.bare, dims=rows, minor=minor).losing(lost)


def _exchange(x: ValueReading, axis: str) -> ValueReading:
    """The reading of what an ``all_to_all`` gives: places of dim 0 for this rank, by source."""
    if axis in x.partial or axis in x.varying or axis in x.unknown or x.minor_of(0) is None:
        return x.bare.losing({axis, *(d.axis for d in x.dims[0])})
    before, stacked, dims = x.split.get(axis), (), list(x.dims)
    if before in (0, x.minor_of(0)):  # the dim that is divided is split by the axis already
        return x.bare.losing({axis})
    if before is not None:
        digits = dims[before]
        at = [d.axis for d in digits].index(axis)
        stacked = digits[:at] if digits[at].blocks == 1 else ()
        dims[before] = (*digits[len(stacked) : at], *digits[at + 1 :])
    made = _scatter(replace(x, dims=tuple(dims)), axis, keep=True)
    return replace(made, dims=(stacked, *made.dims[1:]), minor=(None, *x.minor[1:]))


def _communicate(equation: Equation, x: ValueReading) -> ValueReading | None:
    """The reading of the result of a collective or a statement of one value; None: of another."""
    name, plain = equation.name, replace(x, minor=(), index=None)
    args: Any = equation.args
    axis: Any = args[1] if args[1:] else None
    if name in ("psum", "pbroadcast", "assume_replicated"):
        return plain.without({axis})
    if name in ("pmax", "pmin"):  # not linear
        return plain.losing(x.partial).without({axis})
    if name == "all_gather":
        return _gather(x, axis)
    if name == "psum_scatter":
        return _scatter(x.without({axis}), axis, keep=False)
    if name == "all_to_all":
        return _exchange(x, axis)
    if name == "ppermute":
        # where all ranks receive, every summand is still there once
        once = len({*args[4]}) == args[2]
        return plain if axis in x.partial and once else plain.losing({axis})
    if name == "vary":
        return plain if axis in x.axes else plain.losing({axis})
    if name in ("require_replicated", "assume_share", "require_share", "barrier"):
        return plain
    return None


def _take(equation: Equation, readings: Sequence[ValueReading]) -> ValueReading | None:
    """The reading of the place of dim 0 that has this rank's index; None: of something else."""
    x, index = readings
    axis, minor = index.index, x.minor_of(0)
    if equation.args[1] != 0 or axis is None or minor is None or axis in x.axes:
        return None
    major, *dims = x.dims
    dims[minor - 1] = (*major, DimSplit(1, axis), *dims[minor - 1])
    return replace(x.bare, dims=((), *dims))


class ProgramReadings:
    """One pass over a program, as `functron.program.check` makes one.

    Attributes:
        differs: of every value the axes over which it differs, by that.
        readings: of every value; of those in a loop, of all its iterations together.
    """

    def __init__(
        self,
        axes: Iterable[str],
        differs: Mapping[Var, frozenset[str]],
        unknown: Collection[Var] = (),
    ):
        self.axes, self.differs = frozenset(axes), differs
        self.readings = {value: read_whole(value, unknown=self.axes) for value in unknown}

    def add_input(self, given: Input, sizes: Mapping[str, int]) -> None:
        """Read an input by its spec."""
        spec = given.spec if given.spec is not None else P()
        if given.role == "axis_index":
            own = frozenset(spec_axes(spec)) & self.axes
            reading = read_whole(given.var, varying=own, index=given.path)
        else:
            reading = read_spec(spec, len(given.var.shape), sizes)
        self.readings[given.var] = reading

    def read_block(self, block: Block) -> None:
        """Read every result of a block whose inputs are read."""
        for equation in block.equations:
            found = self._read_equation(equation)
            for value, reading in zip(equation.results, found, strict=True):
                more = self.differs[value] - reading.axes
                # zeros like another value vary with it by the check, and are the same all the same
                if equation.name not in FILLS and len(reading.even) < max(len(value.shape), 1):
                    reading = reading.losing(more)
                self.readings[value] = reading

    def _read_equation(self, equation: Equation) -> Sequence[ValueReading]:
        operands = [self.readings[value] for value in equation.operands]
        if isinstance(equation.op, ControlFlow):
            return self._read_flow(equation.op, operands)
        if isinstance(equation.op, torch._ops.OpOverload):
            if equation.op.namespace == "functron" and operands:
                found = _communicate(equation, operands[0])
                if found is not None:
                    return [found]
            if equation.name in FILLS:
                (value,) = equation.results
                every = frozenset(range(len(value.shape)))
                like = operands[0] if operands and equation.name.endswith("_like") else None
                made = read_whole(value) if like is None else like.without(like.partial).bare
                return [replace(made, even=every, zero=not FILLS[equation.name](equation))]
            if equation.name == "index_select" and (taken := _take(equation, operands)):
                return [taken]
            made = follow_rule(equation, operands)
            if made is not None:
                return made
        return [self._lose(value, operands) for value in equation.results]

    def _lose(self, value: Var, operands: Sequence[ValueReading]) -> ValueReading:
        """The reading of a result that no rule tells of."""
        unknown = frozenset().union(*(x.unknown for x in operands))
        axes = frozenset().union(*(x.axes for x in operands))
        return ValueReading(((),) * len(value.shape), varying=axes - unknown, unknown=unknown)

    def _read_flow(self, op: ControlFlow, operands: list[ValueReading]) -> list[ValueReading]:
        """Read blocks; results vary with what chooses a branch, or ends a loop."""
        if isinstance(op, Scan):
            return self._read_scan(op, operands)
        if isinstance(op, Switch):
            rows = [self._read_outputs(block, operands[1:]) for block in op.branches]
            found = [functools.reduce(join_readings, each) for each in zip(*rows, strict=True)]
            return [x.losing(operands[0].axes) for x in found]
        consts, carry = operands[: op.num_consts], operands[op.num_consts :]
        while True:
            (holds,) = self._read_outputs(op.cond, [*consts, *carry])
            after = self._read_outputs(op.body, [*consts, *carry])
            pairs = zip(carry, after, strict=True)
            joined = [join_readings(*pair).losing(holds.axes) for pair in pairs]
            if joined == carry:
                return carry
            carry = joined

    def _read_outputs(self, block: Block, given: Sequence[ValueReading]) -> list[ValueReading]:
        self.readings.update(zip(block.inputs, given, strict=True))
        self.read_block(block)
        return [self.readings[v] if isinstance(v, Var) else ValueReading(()) for v in block.outputs]

    def _read_scan(self, op: Scan, operands: list[ValueReading]) -> list[ValueReading]:
        """Read the body until what the carry has in all iterations repeats."""
        consts, carry, xs = op.divide(operands)
        rows = [replace(x.bare.losing({d.axis for d in x.dims[0]}), dims=x.dims[1:]) for x in xs]
        outputs: list[ValueReading] = []
        while True:
            outputs = self._read_outputs(op.body, [*consts, *carry, *rows])
            joined = [join_readings(*pair) for pair in zip(carry, outputs, strict=False)]
            if joined == carry:
                break
            carry = joined
        ys = [replace(y.bare, dims=((), *y.dims)) for y in outputs[op.num_carry :]]
        return [*outputs[: op.num_carry], *ys]


def _make_type(
    shape: Sequence[int], dtype: torch.dtype, reading: ValueReading, differs: Collection[str],
    axes: Iterable[str],
) -> ValueType:  # fmt: skip
    """The type of a value that differs between the ranks of some axes, by its reading."""
    split = reading.split
    rows = []
    for name in axes:
        at = AxisType("varying" if name in differs else "replicated")
        if name in reading.unknown:
            at = AxisType("unknown")
        elif name in differs and name in reading.partial:
            at = AxisType("partial")
        elif name in differs and name in split:
            digits = reading.dims[split[name]]
            place = [d.axis for d in digits].index(name)
            inside = tuple(d.axis for d in digits[:place])
            at = AxisType("split", split[name], inside, digits[place].blocks)
        rows.append((name, at))
    return ValueType(tuple(shape), dtype, tuple(rows))


def _sizes_of(mesh: Mesh | BoundMesh) -> dict[str, int]:
    return {name: size for name, size in mesh.shape.items() if size > 1}


def read_program(program: Code) -> ProgramReadings:
    """The readings of all values of a program."""
    sizes = _sizes_of(program.mesh)
    flow = ProgramReadings(sizes, varying(program))
    for given in program.inputs:
        flow.add_input(given, sizes)
    flow.read_block(program.block)
    return flow


def type_of_value(program: Code, name: str, flow: ProgramReadings) -> ValueType:
    """The type of a value of a program by its name, from the readings of all."""
    blocks = [*program.block.walk_blocks()]
    values = [v for block in blocks for v in block.inputs]
    values += [v for block in blocks for e in block.equations for v in e.results]
    wanted = name.removeprefix("%")
    found = next((v for v in values if v.name == wanted), None)
    if found is None:
        fix = nearest(f"%{wanted}", {f"%{v.name}" for v in values})
        title = f"{program.name} has no such value"
        refuse(title, "name", repr(name), "one that its text shows", fix)
    reading = flow.readings[found]
    axes = _sizes_of(program.mesh)
    return _make_type(found.shape, found.dtype, reading, flow.differs[found], axes)


def _name_inputs(stands_for: Mapping[Var, Var]) -> Iterator[Equation]:
    """Equations that say of inputs of a branch what they are outside."""
    for inner, outer in stands_for.items():
        yield Equation(torch.ops.aten.alias.default, (outer,), {}, (inner,))


def _type_while_traced(recorder: Recorder, x: torch.Tensor) -> ValueType:
    """The type of a value of the program that is being recorded, by its equations so far."""
    plain, batched, own = compat.physical(x)
    var = recorder.var(plain)
    sizes = {name: size for name, size in scope().traced.items() if size > 1}
    frames = recorder.frames
    equations = tuple(
        equation
        for frame in frames
        for equation in (*_name_inputs(frame.stands_for), *frame.equations)
    )
    made = {value for equation in equations for value in equation.results}
    given = [*recorder.given, *(Input(v, "", P(), role="constant") for v in recorder.constants)]
    known = made | {each.var for each in given}
    # inputs of a body that is not recorded to its end: what they are follows from what it returns
    used = (value for equation in equations for value in equation.operands)
    unknown = dict.fromkeys(value for value in (*used, var) if value not in known)
    inputs = [*given, *(Input(value, "", P(tuple(sizes))) for value in unknown)]
    block = Block(tuple(each.var for each in inputs), equations, ())
    nothing = tree.structure(())
    code = Code("", Mesh(**scope().traced), block, tuple(inputs), (), nothing, nothing)
    flow = ProgramReadings(sizes, varying(code), unknown)
    for each in given:
        flow.add_input(each, sizes)
    flow.read_block(block)
    reading = flow.readings[var]
    if batched:  # the dims of a vmap inside of the program are not this value's
        reading = reading.losing({d.axis for dim in batched.values() for d in reading.dims[dim]})
        reading = replace(reading, dims=tuple(reading.dims[d] for d in own), minor=())
    return _make_type(x.shape, x.dtype, reading, flow.differs[var], sizes)


@public
def typeof(x: Any, spec: P | None = None, mesh: Any = None) -> ValueType:
    """The type of a value: shape, dtype, and what the ranks of every mesh axis hold of it.

    >>> def program(w, x):
    ...     y = x @ w
    ...     print(ft.typeof(y))
    ...     return lax.psum(y, "tp")
    >>> f = ft.shard_map(program, ft.Mesh(dp=2, tp=2), (P("tp"), P("dp", "tp")), P("dp"))
    >>> program = ft.trace(f)(torch.zeros(8, 6), torch.zeros(4, 8))
    float32[2, 6] {dp: split dim 0, tp: partial}
    >>> program.typeof("%psum")
    float32[2, 6] {dp: split dim 0, tp: replicated}

    How much is known of a value in a per-rank program depends on where it runs:

    * traced (`functron.trace`, `functron.jit`): all that follows from the equations so far, see
      `functron.program.types`. In a function that is scanned, values that come from its arguments
      are unknown; the program that is returned knows them.
    * simulated: exactly which axes it varies over. How arguments of the program are split is known
      by their specs; what is computed from them is varying, without a word for how.
    * on processes, arguments by their specs; anything else is unknown, as a rank sees its own value
      alone.

    Elsewhere a value has a shape and a dtype, and axes where it is known how it lies on a mesh.

    Args:
        x: a tensor or number in a program; or a global value, a handle, a `ParamDef`, or anything
            else with a shape and a dtype.
        spec: how `mesh` splits it; handles know it.
        mesh: simulated, where x is a global value, or bound, where it is this rank's shard of one.

    Raises:
        TypeError: x is no value: a tree, say.
        ValueError: there is only one of spec and mesh, the value cannot be split so, or it belongs
            to a program that has ended.
    """
    if isinstance(x, (bool, int, float, complex)):
        dtype = torch.get_default_dtype() if isinstance(x, float) else torch.tensor(x).dtype
        shape: tuple[int, ...] = ()
    elif hasattr(x, "shape") and isinstance(getattr(x, "dtype", None), torch.dtype):
        shape, dtype = tuple(x.shape), x.dtype
    else:
        fix = "ft.tree.map(ft.typeof, tree) for a tree of values"
        refuse("typeof", "x", f"{type(x).__name__}", "a tensor, or a shape with a dtype", fix,
               TypeError)  # fmt: skip
    if not isinstance(x, torch.Tensor) and spec is None and mesh is None:
        spec, mesh = getattr(x, "spec", None), getattr(x, "mesh", None)
    if spec is not None or mesh is not None:
        return _type_by_spec(x, shape, dtype, spec, mesh)
    if isinstance(x, torch.Tensor) and compat.is_orphan(x):
        refuse("typeof", "x", "a tensor of a simulated rank whose shard_map has returned",
               "a value of this program", "return it from the mapped function")  # fmt: skip
    return _type_here(x, shape, dtype)


def _type_by_spec(x: Any, shape: tuple, dtype: torch.dtype, spec: Any, mesh: Any) -> ValueType:
    if spec is None or mesh is None:
        got = "a mesh without a spec" if spec is None else f"{spec} without a mesh"
        refuse("typeof", "spec and mesh", got, "both", "typeof(x, spec, mesh), or typeof(x)")
    if not (isinstance(mesh, BoundMesh) and isinstance(x, torch.Tensor)):
        found = list(problems("x", shape, spec, mesh))
        raise_problems("typeof", found)
        shape = local_shape(shape, spec, mesh)
    sizes = _sizes_of(mesh)
    return _make_type(shape, dtype, read_spec(spec, len(shape), sizes), spec_axes(spec), sizes)


def _type_here(x: Any, shape: tuple, dtype: torch.dtype) -> ValueType:
    """The type of a value in the program that runs here, if any does."""
    here, recorder = scope(), active()
    axes = {name: axis for name, axis in here.axes.items() if axis is not None}
    tensor = isinstance(x, torch.Tensor)
    if any(isinstance(axis, SimulatedAxis) for axis in axes.values()) or recorder is None:
        bound = any(isinstance(axis, BoundAxis) for axis in axes.values())
        spec = next((s for v, s in here.given if _is_same(v, x)), None) if tensor else None
        reading = read_spec(spec or P(), len(shape), {name: a.size for name, a in axes.items()})
        differs: Collection[str] = spec_axes(spec or P())
        if not bound:
            simulated = [axis for axis in axes.values() if isinstance(axis, SimulatedAxis)]
            differs = [axis.name for axis in simulated if tensor and axis.varies(x)]
        elif spec is None:
            reading = replace(reading, unknown=frozenset(axes))
        return _make_type(shape, dtype, reading, differs, axes)
    if keeper() is not None or here.axis_index is None:  # of whole values
        return ValueType(shape, dtype)
    if not tensor:
        sizes = [name for name, size in here.traced.items() if size > 1]
        return _make_type(shape, dtype, ValueReading(()), (), sizes)
    return _type_while_traced(recorder, x)


def _is_same(given: Any, x: torch.Tensor) -> bool:
    """Whether x is this value, also where a gradient inside of the program sees it."""
    if not isinstance(given, torch.Tensor):
        return False
    mine, other = compat.physical(given), compat.physical(x)
    return mine[0] is other[0] and mine[1:] == other[1:]


# --- annotations

_checking: contextvars.ContextVar[bool] = contextvars.ContextVar("functron_types", default=False)
F = TypeVar("F", bound=Callable)


def check_types() -> AbstractContextManager[None]:
    """Check the calls of functions that are `typed` against their annotations in this with block.

    Simulated, traced, and before a program first runs on processes; see `typed`.

    >>> with ft.debug.check_types():
    ...     pass
    """
    return set_during(_checking, True)


def typed(fn: F) -> F:
    """`fn`, whose calls are checked against its annotations where `check_types` asks for it.

    An annotation of a tensor says its dims, and behind an ``@`` how it lies on the mesh: the names
    of `functron.core.typing`, a `P` for the dims that axes split, `Partial` for axes over which it
    is to be summed, and `Varying` for those over which it differs in another way. Over all other
    axes it is replicated. ``Annotated[Float[Tensor, "batch mlp"], P("dp")]`` is the same, for those
    who check types before they run.

    >>> from functron.core.typing import Float, Partial, Tensor
    >>> @ft.debug.typed
    ... def down(
    ...     x: Float[Tensor, "batch mlp"] @ P("dp", "tp"), w: Float[Tensor, "mlp embed"] @ P("tp")
    ... ) -> Float[Tensor, "batch embed"] @ P("dp") @ Partial("tp"):
    ...     return x @ w

    Sizes are this rank's; the same word is the same size within one call. Dims and dtypes are
    checked where jaxtyping is installed. Tuples, lists and dicts of annotations work.

    What `typeof` cannot tell passes with a warning that says so: in simulation whether a value that
    varies is split or partial; in a trace that too, where it follows from no rule, as of a partial
    value by `torch.relu` or with a bias added, and all that comes from the arguments of a loop's
    body. Arguments of branches are known. On processes nothing is told of computed values, which is
    why they check on fake tensors first.

    Raises:
        TypeError: there is no annotation.
        ValueError: (when called, being checked) arguments or results are not what annotations say:
            all of them, each with its path and what to do; or an annotation says nothing sensible.
    """
    if not getattr(fn, "__annotations__", None):
        name = getattr(fn, "__name__", type(fn).__name__)
        refuse("typed", name, "a function without annotations", "some to check",
               'x: Float[Tensor, "batch embed"] @ P("dp")', TypeError)  # fmt: skip
    hints: dict[str, Any] | None = None
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints
        if not _checking.get():
            return fn(*args, **kwargs)
        hints = _evaluate_hints(fn) if hints is None else hints
        given = signature.bind(*args, **kwargs).arguments
        sizes: dict[str, Any] = {}
        where = f"{fn.__name__}, called at {user_line()}"
        rows = [(name, hints[name], value) for name, value in given.items() if name in hints]
        found = [p for name, hint, value in rows for p in _problems_of(name, hint, value, sizes)]
        raise_problems(f"{where}: arguments are not what its annotations say", found)
        result = fn(*args, **kwargs)
        if "return" in hints:
            found = list(_problems_of("result", hints["return"], result, sizes))
            raise_problems(f"{where}: what it returns is not what its annotation says", found)
        return result

    made: Any = call
    return made


def _evaluate_hints(fn: Callable) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        refuse(f"the annotations of {fn.__name__}", "typed", f"{type(error).__name__}: {error}",
               "names that its module knows, outside of TYPE_CHECKING", "import them")  # fmt: skip


@dataclass(frozen=True)
class _Wanted:
    """An annotation of a tensor, read.

    Attributes:
        dtypes: names; None: any.
        dims: its words for dims; None: any.
        axes: by axis; None: it says nothing of them.
    """

    dtypes: tuple[str, ...] | None
    dims: str | None
    axes: Mapping[str, AxisType] | None

    def __str__(self) -> str:
        kinds = "any dtype" if self.dtypes is None else _dtype_words(self.dtypes)
        rows = ", ".join(f"{name}: {at}" for name, at in (self.axes or {}).items())
        text = kinds if self.dims is None else f"{kinds}[{self.dims}]"
        return f"{text} {{{rows}}}" if rows else text


def _dtype_words(dtypes: tuple[str, ...]) -> str:
    stems = {re.sub(r"(?<=[a-z])\d.*", "", name).removeprefix("b") for name in dtypes}
    return dtypes[0] if len(dtypes) == 1 else "/".join(sorted(stems))


def _read_hint(path: str, hint: Any) -> _Wanted | None:
    """An annotation of a tensor, read; None: it is of something else."""
    marks: Sequence[Any] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
    dtypes = dims = None
    if hasattr(hint, "dim_str"):  # jaxtyping's
        dtypes = tuple(hint.dtypes) if isinstance(hint.dtypes, (list, tuple)) else None
        dims = hint.dim_str
    elif hint is not torch.Tensor:
        return None
    placed = [m for m in marks if isinstance(m, (P, Partial, Varying))]
    return _Wanted(dtypes, dims, _read_marks(path, placed) if placed else None)


def _read_marks(path: str, marks: Sequence[Any]) -> dict[str, AxisType]:
    """The types by axis that a P, a Partial and a Varying say together."""
    rows: list[tuple[str, AxisType]] = []
    specs = [mark for mark in marks if isinstance(mark, P)]
    for spec in specs:
        for dim, names in enumerate(dim_axes(spec, len(spec))):
            rows += [(n, AxisType("split", dim, names[:i])) for i, n in enumerate(names)]
    for mark in marks:
        if not isinstance(mark, P):
            kind: Any = "partial" if isinstance(mark, Partial) else "varying"
            rows += [(name, AxisType(kind)) for name in mark.axes]
    names = [name for name, _ in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or len(specs) > 1:
        got = " @ ".join(map(repr, marks))
        wanted = "every axis once" if twice else "one P"
        refuse("an annotation says no type", path, got, wanted, "name each axis in one of them")
    return dict(rows)


def _problems_of(path: str, hint: Any, value: Any, sizes: dict[str, Any]) -> Iterator[Problem]:
    """The problems of a value by its annotation, whose words for dims have these sizes."""
    options = [hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = list(inner)
    elif origin in (tuple, list) and isinstance(value, (tuple, list)) and inner:
        same = origin is list or inner[1:] == (...,)
        for i, each in enumerate(value):
            if same or i < len(inner):
                yield from _problems_of(f"{path}/{i}", inner[0 if same else i], each, sizes)
        return
    elif origin is dict and isinstance(value, dict):
        for key, each in value.items():
            yield from _problems_of(f"{path}/{key}", inner[1], each, sizes)
        return
    wanted = [_read_hint(path, option) for option in options]
    if None in wanted and not isinstance(value, torch.Tensor):
        return  # something else, which is not checked
    tried = []
    for one in filter(None, wanted):
        own = dict(sizes)
        found = list(_check_one(path, one, value, own))
        if not found:
            sizes.update(own)
            return
        tried.append((found, own))
    if tried:
        sizes.update(tried[0][1])
        yield from tried[0][0]


def _check_one(path: str, wanted: _Wanted, value: Any, sizes: dict[str, Any]) -> Iterator[Problem]:
    if not isinstance(value, torch.Tensor):
        yield Problem(path, type(value).__name__, f"a tensor, {wanted}")
        return
    own = typeof(value)
    got = repr(own)
    dtype = str(own.dtype).removeprefix("torch.")
    if wanted.dtypes is not None and dtype not in wanted.dtypes:
        yield Problem(path, got, f"{wanted}", f"cast it, or annotate {dtype}")
    if wanted.dims is not None and (fix := match_dims(path, wanted.dims, own.shape, sizes)):
        yield Problem(path, got, f"{wanted}", fix)
    if wanted.axes is None or not own.axes:
        return
    known = {*STANDARD_AXES, *scope().axes, *(name for name, _ in own.axes)}
    for name in wanted.axes:
        if name not in known:
            yield Problem(path, f"an annotation with axis {name!r}", "axes of the mesh",
                          nearest(name, known, scope().axes))  # fmt: skip
    untold = []
    for name, at in own.axes:
        want = wanted.axes.get(name, AxisType("replicated"))
        if _refutes(at, want):
            yield Problem(path, got, f"{name}: {want}", _fix_axis(name, at, want))
        elif at != want and want.kind != "varying":
            untold.append(f"{name}: {want}")
    if untold and not any(isinstance(axis, BoundAxis) for axis in scope().axes.values()):
        _warn_untold(path, got, untold)


def _warn_untold(path: str, got: str, untold: Sequence[str]) -> None:
    """Say of a value that it may be what its annotation says, or not."""
    traced = active() is not None
    why = (
        "it comes of an operation that is not linear, or has no rule, or of the arguments of a loop"
        if traced
        else "a simulation knows what varies, and not how; ft.trace knows more"
    )
    warnings.warn(
        f"typed at {user_line()}: cannot be told here whether {path} is {', '.join(untold)}: got "
        f"{got}; {why}",
        stacklevel=2,
    )


def _refutes(got: AxisType, wanted: AxisType) -> bool:
    """Whether a value is certainly not what is wanted along an axis."""
    if got.kind == "unknown" or got == wanted:
        return False
    if "replicated" in (got.kind, wanted.kind):
        return True
    # what varies may be split, or partial
    return "varying" not in (got.kind, wanted.kind)


def _fix_axis(name: str, got: AxisType, wanted: AxisType) -> str:
    pair = got.kind, wanted.kind
    tiled = f"lax.{{}}(x, {name!r}, {{}}, tiled=True)"
    if pair == ("partial", "replicated"):
        return f"add it up: lax.psum(x, {name!r})"
    if pair == ("partial", "split"):
        return tiled.format("psum_scatter", f"scatter_dimension={wanted.dim}")
    if pair == ("split", "replicated"):
        return tiled.format("all_gather", f"axis={got.dim}")
    if pair == ("split", "split") and got.dim != wanted.dim:
        return tiled.format("all_to_all", f"{wanted.dim}, {got.dim}")
    if wanted.kind == "replicated":
        return f"reduce it with lax.psum(x, {name!r}) (or pmean, all_gather), or annotate Varying"
    if got.kind == "replicated":
        return f"split it in in_specs, or leave {name!r} out of the annotation"
    return f"annotate what it is, {got}"
