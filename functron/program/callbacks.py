"""Effects: Python functions that a program calls, lines it prints, and checks of its values.

Each is an equation without results in a traced program, ``debug_callback``, ``debug_print`` or
``debug_check``, which `functron.program.interpreter` and compiled code run where they reach it.
They run on the host, which waits for the values: on a GPU each costs a synchronisation, and a CUDA
graph cannot hold them.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import itertools
import pdb
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CellType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from functron.core import compat, tree
from functron.core.closure import find_tensors, refuse_holders
from functron.core.errors import Problem, in_library, public, raise_problems, refuse
from functron.core.scopes import phase, set_during
from functron.program.equations import Equation
from functron.program.recorder import active, aside
from functron.spmd.axes import BoundAxis, Scope, SimulatedAxis, TracedAxis, enter, scope, user_line
from functron.spmd.simulate import no_share

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_REST = (
    "Tensor[] values, str[] axes, Tensor[] indices, str[] dims, *, Tensor[]? where=None, "
    "bool ordered=False) -> ()"
)
_LIBRARY.define(f"debug_print(str text, {_REST}")
_LIBRARY.define(f"debug_check(str text, {_REST}")
_LIBRARY.define(f"debug_callback(str function, {_REST}")
_OPS = torch.ops.functron


@public
def print(  # noqa: A001  (as jax.debug.print)
    text: str, *args: Any, ordered: bool = False, **kwargs: Any
) -> None:
    """Print ``text.format(*args, **kwargs)`` from inside a program, on every rank.

    Works in simulation, on processes, under torch.func transforms and in traced and compiled
    programs, where it runs each time that the program reaches it; never in the second run of a
    function under remat, nor while only shapes are computed. In simulation there is a line for each
    rank on the axes over which a value varies, in rank order, and one line where none does::

        ft.debug.print("norm {norm:.3f}", norm=x.norm())
        [tp=0] norm 1.250
        [tp=1] norm 0.968

    A process, and a rank of a traced program, prints its own line with its place on every axis.
    Under `torch.func.vmap` there is a line per element, marked ``vmap=0`` and so on.

    Args:
        text: a format string, as `str.format` takes it. Formats apply to every element of a tensor.
        args: tensors, trees of them, and other values.
        ordered: keep the order of what is ordered, as of `callback`.

    Raises:
        ValueError: a field has no value, or a value no field.
    """
    form, tensors = _fill_statics("print", text, args, kwargs)
    _emit(_OPS.debug_print.default, form, tensors, ordered=ordered)


@public
def callback(
    fn: Callable, *args: Any, ordered: bool = False, coordinate: bool = False, **kwargs: Any
) -> None:
    """Call ``fn(*args, **kwargs)`` in Python from inside a program, once for every rank.

    As `jax.debug.callback`: for what a function does, such as drawing or keeping numbers; its
    result is dropped. It gets plain tensors, detached copies of this rank's values on their own
    device, which it may keep; other leaves of trees come as they are.

    >>> seen = []
    >>> mesh = ft.Mesh(tp=2)
    >>> def program(x):
    ...     ft.debug.callback(lambda x, coordinate: seen.append((coordinate, x.tolist())), x,
    ...                       coordinate=True)
    ...     return x
    >>> _ = ft.shard_map(program, mesh, P("tp"), P("tp"))(torch.arange(4))
    >>> seen
    [({'tp': 0}, [0, 1]), ({'tp': 1}, [2, 3])]

    Works where `print` does, and as often: in traced and compiled programs each time that these
    reach it, in every iteration of a scan, for every element of a `torch.func.vmap`, once under
    differentiation, and not again in the second run of a function under remat. In simulation ranks
    are called in rank order, also where values do not vary, as each process calls its own. The text
    of a program has the function's name; a program that was read from its text cannot call it.

    Args:
        fn: any function. What it raises ends the program. It runs outside of the program: no axis
            is bound, nothing is traced or differentiated.
        args, kwargs: trees of tensors and other values.
        ordered: run after the ordered callbacks and prints that come before it on this rank, and
            before those after it, in all compiled forms. Others may be moved past one another where
            communication is overlapped or backward is cut.
        coordinate: also pass ``coordinate=``, the place of the rank as a dict: by the names of the
            axes of more than one rank, and ``vmap``.

    Raises:
        TypeError: `fn` is no function; an argument is an object that holds tensors.
        ValueError: `fn` closes over a tensor of the program, whose numbers are not known yet.
    """
    inner = getattr(fn, "func", fn)  # of a partial
    name = getattr(fn, "__name__", None) or getattr(inner, "__name__", type(inner).__name__)
    refuse_holders(f"debug.callback at {user_line()}", "argument", (args, kwargs))
    if any(map(_is_unknown, _find_hidden(fn))):
        got, wanted = "a tensor of the program that it closes over", "an argument"
        fix = f"ft.debug.callback({name}, x), and have {name} take it"
        refuse(f"debug.callback at {user_line()}", name, got, wanted, fix)
    leaves, structure = tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    statics = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(values: Sequence[torch.Tensor], at: dict[str, int]) -> None:
        filled = list(statics)
        for i, value in zip(places, values, strict=False):
            filled[i] = value
        given, named = tree.unflatten(structure, filled)
        fn(*given, **named, **({"coordinate": at} if coordinate else {}))

    function = HostFunction(name, call)
    some = tensors or [torch.zeros(())]  # which ranks are told apart by
    _emit(_OPS.debug_callback.default, function, some, all_ranks=True, ordered=ordered)


def _find_hidden(fn: Callable) -> list[Any]:
    """Tensors that a function closes over, fake ones among them."""
    inner = getattr(fn, "func", fn)  # of a partial
    cells = [cell for cell in getattr(inner, "__closure__", None) or () if cell != CellType()]
    held = [getattr(fn, "args", ()), getattr(fn, "keywords", {})]
    return [*find_tensors(fn), *tree.leaves((held, [cell.cell_contents for cell in cells]))]


def _is_unknown(value: Any) -> bool:
    """Whether it is a tensor without numbers, or without those of one rank."""
    made = isinstance(value, torch.Tensor)
    return made and (isinstance(value, FakeTensor) or compat.is_wrapped(value))


@public
def check(pred: Any, message: str, *args: Any, **kwargs: Any) -> None:
    """Raise ``ValueError(message.format(*args, **kwargs))`` where `pred` does not hold.

    For conditions on numbers, where Python's ``assert`` cannot ask: it works where `print` does,
    also in traced and compiled programs (as JAX's ``checkify``, without a wrapper). The error comes
    from the call of the program, when it is reached, and has the line, the ranks on which `pred`
    fails, and their values. A process raises its own, and the others, that wait for it, end with
    an error as when it had died.

    >>> safe_log = ft.jit(lambda x: ft.debug.check((x > 0).all(), "got {}", x.min()) or x.log(),
    ...                   backend="eager")
    >>> safe_log(torch.tensor([1.0, -2.0]))
    Traceback (most recent call last):
    ValueError: debug.check at ... got -2.0

    On a GPU each check waits for `pred`; `no_checks` leaves all of them out.

    Args:
        pred: a bool, or a tensor of bools, all of which have to hold.
        message: a format string, as of `print`.
        args, kwargs: what it shows.

    Raises:
        ValueError: `pred` fails; a field has no value, or a value no field.
        TypeError: `pred` is no bool.
    """
    form, tensors = _fill_statics("check", message, args, kwargs)
    if not isinstance(pred, bool) and getattr(pred, "dtype", None) != torch.bool:
        got = f"a tensor of {pred.dtype}" if isinstance(pred, torch.Tensor) else repr(pred)
        title, fix = f"debug.check at {user_line()}", "compare it, as in x > 0 or x.isfinite()"
        refuse(title, "pred", got, "a bool, or a tensor of them", fix, TypeError)
    if not _checks.get() or pred is True:
        return
    held = torch.zeros((), dtype=torch.bool) if pred is False else pred
    _emit(_OPS.debug_check.default, form, [held, *tensors])


_checks: contextvars.ContextVar[bool] = contextvars.ContextVar("functron_checks", default=True)


def no_checks() -> AbstractContextManager[None]:
    """Let `check` do nothing in this with block; what is traced or compiled in it has no checks.

    >>> checked = ft.jit(lambda x: ft.debug.check(x > 0, "got {}", x) or x + 1, backend="eager")
    >>> with ft.debug.no_checks():
    ...     checked(torch.tensor(-1))  # compiles
    tensor(0)
    """
    return set_during(_checks, False)


@public
def breakpoint(**values: Any) -> None:  # noqa: A001  (as jax.debug.breakpoint)
    """Stop in Python's debugger at the line that calls this.

    In plain code and on a simulated mesh it is Python's ``breakpoint()``, in the frame of the
    program, with its variables, which hold the values of all ranks at once. Values that are given
    are printed first, by rank.

    A traced or compiled program has no frames any more. There it stops where the program reaches
    it, once for every rank, with the values that are given as variables::

        ft.debug.breakpoint(x=x, norm=x.norm())
        (Pdb) p norm

    ``c`` goes on, ``q`` ends the program or, in a compiled one, this stop. Of another debugger
    (``sys.breakpointhook``) the frame is this function's own: go ``up``.

    Raises:
        ValueError: in a traced program without values; on the processes of a mesh, that have no
            terminal of their own and would keep the others waiting.
    """
    if phase() == "recompute":
        return
    title = f"debug.breakpoint at {(where := user_line())}"
    if active() is not None and not values:
        got = "a program that is being traced or compiled: there are no numbers yet"
        fix = "ft.debug.breakpoint(x=x) stops with these values when it runs; or run it without jit"
        refuse(title, "values", got, "the values to look at", fix)
    if any(isinstance(axis, BoundAxis) for axis in scope().axes.values()):
        _refuse_processes(title)
    if active() is not None:
        stop: Any = functools.partial(_stop_with_values, where)
        stop.__name__ = "breakpoint"
        callback(stop, values, ordered=True, coordinate=True)
    elif not compat.faking():
        for name in values:
            print(f"{name} = {{}}", values[name])
        _stop_at_user(title)


def _refuse_processes(title: str) -> None:
    got = f"process {dist.get_rank()} of {dist.get_world_size()}"
    fix = "run the same program on a simulated mesh, ft.Mesh(...), or torch.distributed.breakpoint"
    refuse(title, "mesh", got, "a terminal, which all processes would share", fix)


def _stop_with_values(where: str, values: dict[str, Any], coordinate: dict[str, int]) -> None:
    """Stop in the debugger with these variables."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _refuse_processes(f"debug.breakpoint at {where}")
    ranks = f"[{_place_text(coordinate)}] " if coordinate else ""
    builtins.print(f"{ranks}{where}: {', '.join(values)}", flush=True)
    pdb.Pdb().runctx("pass", dict(values), {})


def _stop_at_user(title: str) -> None:
    """Stop in the debugger in the innermost frame that is not of a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and in_library(frame):
        frame = frame.f_back
    if sys.breakpointhook is not sys.__breakpointhook__:
        sys.breakpointhook()
    elif frame is not None:
        if sys.stdin is None or sys.stdin.closed:
            refuse(title, "stdin", "none", "a terminal", "print with ft.debug.print")
        _FrameDebugger(frame).set_trace(frame)


class _FrameDebugger(pdb.Pdb):
    """Python's debugger, which stops first in a frame that called the one where it starts."""

    def __init__(self, frame: FrameType):
        super().__init__()
        self._first: FrameType | None = frame

    def set_step(self) -> None:
        """Stop at the next line; at first, of the frame itself, not on the way back to it."""
        frame, self._first = self._first, None
        if frame is None:
            super().set_step()
        else:
            self.set_next(frame)

    set_stepinstr = set_step  # by which later versions of Python begin


# --- what all effects have in common


class HostFunction(str):
    """The name of a Python function that a program calls, and the function itself.

    Text, differences and comparisons of programs know its name alone.
    """

    call: Callable[[Sequence[torch.Tensor], dict[str, int]], None] | None

    def __new__(cls, name: str, call: Callable | None = None) -> HostFunction:
        made = super().__new__(cls, name)
        made.call = call
        return made


def run_effect(equation: Equation) -> Callable[..., None]:
    """The function of an effect's arguments that has the effect, here and now."""
    return functools.partial(EFFECTS[equation.name], line=equation.where.line)


def repeat_effect(
    equation: Equation, *args: Any, where: Sequence[torch.Tensor] = (), ordered: bool = False
) -> None:
    """An effect of a program, on every rank that there is where this runs.

    Each element of the user's own vmaps is one by itself.
    """
    head, values, _, _, dims = args
    all_ranks, line = equation.name == "debug_callback", equation.where.line

    def show(*rows):
        with effects_where(*rows[len(values) :]):
            _emit(equation.op, head, rows[: len(values)], all_ranks, ordered, line)
        return rows

    for _ in dims:
        show = torch.func.vmap(show)
    show(*values, *where)


_masks: contextvars.ContextVar[tuple] = contextvars.ContextVar("functron_effect_masks", default=())


def effects_where(*masks: Any) -> AbstractContextManager[None]:
    """Have the effects of this with block on those ranks and elements alone where masks are true.

    For what runs for all of them, and is then selected: the branches of a predicate that varies.

    Args:
        masks: bools, or scalar tensors of them, possibly wrapped by torch.func transforms; in
            lockstep, those of all ranks (`functron.program.interpreter.RankValues`).
    """
    return set_during(_masks, (*_masks.get(), *masks))


effect_masks = _masks.get
"""``effect_masks()``: all masks of `effects_where` that are in force."""


def _emit(
    op: Any,
    head: str,
    tensors: Sequence[torch.Tensor],
    all_ranks: bool = False,
    ordered: bool = False,
    line: str = "",
) -> None:
    """Have an effect, or record it.

    Args:
        head: what the operation takes before the values.
        tensors: possibly wrapped by torch.func transforms.
        all_ranks: of simulated ranks, have it on all of them, not on those that differ.
    """
    if phase() == "recompute":
        return
    axes = [axis for axis in scope().axes.values() if axis is not None]
    simulated = {a.level: a for a in axes if isinstance(a, SimulatedAxis)}
    masks = [mask for mask in effect_masks() if mask is not True]
    if any(mask is False for mask in masks):
        return
    plain, recorder, faked = [no_share(x) for x in (*tensors, *masks)], active(), compat.faking()
    options: dict[str, Any] = {"ordered": True} if ordered else {}
    with compat.no_transforms(), torch.no_grad():
        if recorder is not None:
            values, dims = _expand_ranks(plain, simulated, all_ranks)
            values, where = values[: len(tensors)], values[len(tensors) :]
            options |= {"where": where} if where else {}
            traced = {axis.name: axis.index for axis in axes if isinstance(axis, TracedAxis)}
            recorder.effect(op, head, values, [*traced], [*traced.values()], dims, **options)
        elif not faked:
            with compat.no_dispatch_modes():  # which would count what is done here as the program's
                values, dims = _expand_ranks(plain, simulated, all_ranks)
                if any(isinstance(v, FakeTensor) or v.is_meta for v in values):
                    return
                values, options["where"] = values[: len(tensors)], values[len(tensors) :]
                place = {axis.name: axis.index for axis in axes if isinstance(axis, BoundAxis)}
                run = EFFECTS[op._schema.name.partition("::")[2]]
                line = line or user_line()
                run(head, values, [*place], [*place.values()], dims, line=line, **options)


def _fill_statics(
    what: str, text: str, args: tuple, kwargs: dict
) -> tuple[str, list[torch.Tensor]]:
    """The format string with all but tensors filled in, which become its fields in order."""
    formatter, automatic = string.Formatter(), itertools.count()
    parts: list[str] = []
    tensors: list[torch.Tensor] = []
    used: set[int | str] = set()

    def look_up(name: str) -> Any:
        try:
            value, root = formatter.get_field(name, args, kwargs)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"debug.{what} at {user_line()}: got no value for the field {name!r}; wanted an "
                "argument of that name or position"
            ) from error
        used.add(root)
        return value

    def fill(spec: str) -> str:
        """A format that takes values itself, as in ``{x:.{digits}f}``."""
        rows = formatter.parse(spec)
        return "".join(
            literal + (str(look_up(name or str(next(automatic)))) if name is not None else "")
            for literal, name, _, _ in rows
        )

    for literal, name, spec, conversion in formatter.parse(text):
        parts.append(_escape_braces(literal))
        if name is None:
            continue
        value = look_up(name or str(next(automatic)))
        tail = (f"!{conversion}" if conversion else "") + (f":{fill(spec)}" if spec else "")
        parts.append(_make_field(value, tail, tensors))
    unused = [key for key in [*range(len(args)), *kwargs] if key not in used]
    raise_problems(
        f"debug.{what} at {user_line()}",
        [Problem(f"argument {key}", "no field for it", f"{{{key}}} in {text!r}") for key in unused],
    )
    return "".join(parts), tensors


def _make_field(value: Any, tail: str, tensors: list[torch.Tensor]) -> str:
    """The part of a format string that shows `value`, whose tensors are appended to `tensors`."""
    leaves, structure = tree.flatten(value)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _escape_braces(f"{{0{tail}}}".format(value))
    marked: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            marked.append(_Mark(len(tensors)))
            tensors.append(leaf)
        else:
            marked.append(leaf)
    shown = _escape_braces(repr(tree.unflatten(structure, marked)))
    return re.sub("\0(.*?)\0", lambda found: "{" + found[1] + tail + "}", shown)


@dataclass(frozen=True)
class _Mark:
    """Stands for tensor number `index` where a tree that holds it is shown."""

    index: int

    def __repr__(self) -> str:
        return f"\0{self.index}\0"


def _escape_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _expand_ranks(
    tensors: Sequence[torch.Tensor], axes: Mapping[int, SimulatedAxis], all_ranks: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """The plain tensors, with a leading dim for each vmap under which any of them is batched.

    Args:
        tensors: possibly wrapped by torch.func transforms.
        axes: by vmap level; other levels are the user's own vmaps.
        all_ranks: with a dim for each of the axes.

    Returns:
        The tensors and the names of their leading dims, outermost vmap first.
    """
    peeled = [compat.physical(value) for value in tensors]
    sizes = {level: axis.size for level, axis in axes.items() if all_ranks}
    for value, dims, _ in peeled:
        sizes.update({level: value.shape[dim] for level, dim in dims.items()})
    levels = sorted(sizes)
    plain = []
    for value, dims, own in peeled:
        value = value.detach()
        if levels:
            value = value.permute([*(dims[level] for level in levels if level in dims), *own])
            for position, level in enumerate(levels):
                value = value if level in dims else value.unsqueeze(position)
            shape = [*(sizes[level] for level in levels), *value.shape[len(levels) :]]
            value = value.expand(shape)
        plain.append(value)
    own_vmaps = [level for level in levels if level not in axes]
    given = {level: f"vmap{position or ''}" for position, level in enumerate(own_vmaps)}
    return plain, [axes[level].name if level in axes else given[level] for level in levels]


@dataclass(frozen=True, eq=False)
class _Shown:
    """A tensor as a field of a format string."""

    value: torch.Tensor

    def __str__(self) -> str:
        return str(self.value.item() if self.value.dim() == 0 else self.value)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return _format_each(self.value.tolist(), spec) if spec else str(self)


def _format_each(value: Any, spec: str) -> str:
    """Numbers, or nested lists of them, each in the format `spec`."""
    if isinstance(value, list):
        return f"[{', '.join(_format_each(item, spec) for item in value)}]"
    return format(value, spec)


# --- what each of them does with the values of all ranks and elements that are here


def _lanes(
    values: Sequence[torch.Tensor],
    axes: Sequence[str],
    indices: Sequence[Any],
    dims: Sequence[str],
    where: Sequence[torch.Tensor] | None,
) -> Iterator[tuple[dict[str, int], tuple[int, ...]]]:
    """The place of each rank and element, and where its values are along the leading dims."""
    place = {name: int(index) for name, index in zip(axes, indices, strict=True)}
    sizes = next((x.shape[: len(dims)] for x in (*values, *(where or ()))), ())
    for row in itertools.product(*map(range, sizes)):
        if all(bool(mask[row]) for mask in where or ()):
            yield {**place, **dict(zip(dims, row, strict=True))}, row


def _place_text(at: Mapping[str, int]) -> str:
    return " ".join(f"{name}={index}" for name, index in at.items())


def _print_lines(text, values, axes, indices, dims, *, where=None, ordered=False, line="") -> None:
    for at, row in _lanes(values, axes, indices, dims, where):
        builtins.print(_line_of(at, text, [value[row] for value in values]), flush=True)


def _line_of(at: Mapping[str, int], text: str, values: Sequence[torch.Tensor]) -> str:
    shown = text.format(*map(_Shown, values))
    return f"[{_place_text(at)}] {shown}" if at else shown


_FEW = 8  # ranks that a message lists


def _raise_failed(text, values, axes, indices, dims, *, where=None, ordered=False, line="") -> None:
    held, *shown = values
    if bool(held.all()):
        return
    lanes = _lanes(values, axes, indices, dims, where)
    failed = [lane for lane in lanes if not held[lane[1]].all()]
    if not failed:
        return
    lines = [_line_of(at, text, [value[row] for value in shown]) for at, row in failed[:_FEW]]
    lines += [f"... and {len(failed) - _FEW} more"] if len(failed) > _FEW else []
    head = f"debug.check at {line or 'an unknown line'}:"
    many = len(lines) > 1
    raise ValueError("\n  ".join([head, *lines]) if many else f"{head} {lines[0]}")


def _call_function(
    function, values, axes, indices, dims, *, where=None, ordered=False, line=""
) -> None:
    call = getattr(function, "call", None)
    if call is None:
        got, wanted = "its name alone, as a program's text has it", "the function"
        fix = "trace the program again, or take the equation out of the text"
        refuse(f"debug.callback at {line}", str(function), got, wanted, fix)
    for at, row in _lanes(values, axes, indices, dims, where):
        copies = [value[row].clone(memory_format=torch.contiguous_format) for value in values]
        try:
            with aside(), enter(Scope()):
                call(copies, at)
        except Exception as error:
            rank = f" for {_place_text(at)}" if at else ""
            error.add_note(f"in the callback {str(function)!r} at {line}{rank}")
            raise


EFFECTS: Mapping[str, Callable[..., None]] = {
    "debug_print": _print_lines,
    "debug_check": _raise_failed,
    "debug_callback": _call_function,
}
"""The functions of effects, by the names of their operations."""

for _name, _run in EFFECTS.items():
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, lambda *args, **kwargs: None, "Meta")
