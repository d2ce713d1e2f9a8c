"""Looking into programs: printing from every rank, and drawing how a spec lays out a tensor."""

from __future__ import annotations

import builtins
import itertools
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from functron import compat, tree
from functron.drawing import visualize_sharding
from functron.errors import Problem, raise_problems
from functron.program.recorder import active
from functron.scopes import phase
from functron.spmd.axes import BoundAxis, SimulatedAxis, scope, user_line
from functron.spmd.replication import no_share
from functron.spmd.traced import TracedAxis

__all__ = ["print", "visualize_sharding"]

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define(
    "debug_print(str text, Tensor[] values, str[] axes, Tensor[] indices, str[] dims) -> ()"
)


def print(text: str, *args: Any, **kwargs: Any) -> None:  # noqa: A001  (as jax.debug.print)
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
        kwargs: the same by name.

    Raises:
        ValueError: a field has no value, or a value no field.
    """
    form, tensors = _without_statics(text, args, kwargs)
    if phase() == "recompute":
        return
    axes = [axis for axis in scope().axes.values() if axis is not None]
    simulated = {compat.level_of(a.token): a.name for a in axes if isinstance(a, SimulatedAxis)}
    plain = [no_share(value) for value in tensors]
    with compat.no_transforms(), torch.no_grad():
        values, dims = _with_rank_dims(plain, simulated)
        recorder = active()
        if recorder is not None:
            traced = {axis.name: axis.index for axis in axes if isinstance(axis, TracedAxis)}
            op = torch.ops.functron.debug_print.default
            recorder.effect(op, form, values, [*traced], [*traced.values()], dims)
        elif not compat.faking() and not any(map(_is_abstract, values)):
            place = {axis.name: axis.index for axis in axes if isinstance(axis, BoundAxis)}
            _print_lines(form, values, place, dims)


def _is_abstract(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta


def _without_statics(text: str, args: tuple, kwargs: dict) -> tuple[str, list[torch.Tensor]]:
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
                f"debug.print at {user_line()}: got no value for the field {name!r}; wanted an "
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
        parts.append(_escaped(literal))
        if name is None:
            continue
        value = look_up(name or str(next(automatic)))
        tail = (f"!{conversion}" if conversion else "") + (f":{fill(spec)}" if spec else "")
        parts.append(_field(value, tail, tensors))
    unused = [key for key in [*range(len(args)), *kwargs] if key not in used]
    raise_problems(
        f"debug.print at {user_line()}",
        [Problem(f"argument {key}", "no field for it", f"{{{key}}} in {text!r}") for key in unused],
    )
    return "".join(parts), tensors


def _field(value: Any, tail: str, tensors: list[torch.Tensor]) -> str:
    """The part of a format string that shows `value`, whose tensors are appended to `tensors`."""
    leaves, structure = tree.flatten(value)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _escaped(f"{{0{tail}}}".format(value))
    marked: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            marked.append(_Mark(len(tensors)))
            tensors.append(leaf)
        else:
            marked.append(leaf)
    shown = _escaped(repr(tree.unflatten(structure, marked)))
    return re.sub("\0(.*?)\0", lambda found: "{" + found[1] + tail + "}", shown)


@dataclass(frozen=True)
class _Mark:
    """Stands for tensor number `index` where a tree that holds it is shown."""

    index: int

    def __repr__(self) -> str:
        return f"\0{self.index}\0"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _with_rank_dims(
    tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> tuple[list[torch.Tensor], list[str]]:
    """The plain tensors, with a leading dim for each vmap under which any of them is batched.

    Args:
        tensors: possibly wrapped by torch.func transforms.
        names: of the axes, by vmap level; other levels are the user's own vmaps.

    Returns:
        The tensors and the names of their leading dims, outermost vmap first.
    """
    peeled = [compat.physical(value) for value in tensors]
    sizes: dict[int, int] = {}
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
    own_vmaps = [level for level in levels if level not in names]
    given = {level: f"vmap{position or ''}" for position, level in enumerate(own_vmaps)}
    return plain, [names.get(level) or given[level] for level in levels]


def _print_lines(
    text: str, values: Sequence[torch.Tensor], place: Mapping[str, Any], dims: Sequence[str]
) -> None:
    sizes = values[0].shape[: len(dims)] if values else ()
    for row in itertools.product(*map(range, sizes)):
        at = {**place, **dict(zip(dims, row, strict=True))}
        where = " ".join(f"{name}={int(index)}" for name, index in at.items())
        shown = text.format(*(_Shown(value[row]) for value in values))
        builtins.print(f"[{where}] {shown}" if where else shown, flush=True)


@dataclass(frozen=True, eq=False)
class _Shown:
    """A tensor as a field of a format string."""

    value: torch.Tensor

    def __str__(self) -> str:
        return str(self.value.item() if self.value.dim() == 0 else self.value)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return _each(self.value.tolist(), spec) if spec else str(self)


def _each(value: Any, spec: str) -> str:
    """Numbers, or nested lists of them, each in the format `spec`."""
    if isinstance(value, list):
        return f"[{', '.join(_each(item, spec) for item in value)}]"
    return format(value, spec)


def _debug_print(text, values, axes, indices, dims) -> None:
    _print_lines(text, values, dict(zip(axes, indices, strict=True)), dims)


_LIBRARY.impl("debug_print", _debug_print, "CompositeExplicitAutograd")
_LIBRARY.impl("debug_print", lambda *args: None, "Meta")
