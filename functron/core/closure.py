"""The tensors that a function closes over, made explicit operands.

A custom autograd Function and a process group see only the tensors passed to them; a Python closure
(or, in a notebook, a global) hides others, whose gradients would silently be lost. `hoist` finds
those that matter, so that transforms can treat them like arguments.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from functron.core import compat, tree
from functron.core.errors import (
    ORPHAN,
    Problem,
    dataclass_fix,
    is_library,
    made_public,
    raise_problems,
)


def hoist(fn: Callable) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Callable]]:
    """The tensors under differentiation or vmap that `fn` closes over, and `fn` as their function.

    Looks through closure cells, globals that the user's functions refer to, defaults,
    `functools.partial`, bound methods of trees, nested functions and trees held by any of them.

    Returns:
        ``(tensors, close)``; ``close(tensors)`` is `fn` and ``close(others)`` is `fn` with those
        tensors in their place.

    Raises:
        ValueError: one belongs to a simulated rank whose shard_map has returned.
    """
    found = find_tensors(fn)
    if not found:
        return [], lambda tensors: fn
    refuse_orphans(getattr(fn, "__name__", type(fn).__name__), found)
    keys = list(map(id, found))

    def close(tensors: list[torch.Tensor]) -> Callable:
        return _rewrite(fn, dict(zip(keys, tensors, strict=True)), {})

    return found, close


def call_on_tape(fn: Callable, tensors: list[torch.Tensor]) -> tree.Tree:
    """``fn(*tensors)`` computed under torch.func, in a way that torch's tape records.

    For functions that overwrite what they are given unless torch.func differentiates them. The tape
    sees one operation with all derivatives of `fn`, of any order; one of a higher order computes
    `fn` again. Other results than floating-point tensors are constants.

    Args:
        fn: of tensors, to a tree; what it closes over counts as constant (see `hoist`).
        tensors: floating-point ones, that the tape tracks.
    """
    rest: list = []  # None in place of what moves, which no leaf is
    structure: Any = None

    def floats_of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal rest, structure
        leaves, structure = tree.flatten(fn(*values))
        fixed = [None if tree.is_inexact(leaf) else leaf for leaf in leaves]
        rest = [compat.plain(x) if isinstance(x, torch.Tensor) else x for x in fixed]
        return tuple(filter(tree.is_inexact, leaves)) or (torch.zeros(()),)  # vjp wants some

    made = iter(cast(tuple, _OnTape.apply(floats_of, *tensors)))
    return tree.unflatten(structure, [next(made) if x is None else x for x in rest])


class _OnTape(torch.autograd.Function):
    """A function from tensors to a tuple of tensors, differentiated by torch.func."""

    @staticmethod
    def forward(ctx, fn, *tensors):
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        made: Any = torch.func.vjp(fn, *(tensor.detach() for tensor in tensors))
        out, ctx.pull = made
        return tuple(value.detach() for value in out)  # lest a constant of the caller's is tracked

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *ctx.pull(cotangents)

        def pull(*values):
            made: Any = torch.func.vjp(ctx.fn, *values[: len(tensors)])
            return made[1](values[len(tensors) :])

        return None, *_OnTape.apply(pull, *tensors, *cotangents)


def find_tensors(fn: Callable) -> list[torch.Tensor]:
    """The tensors that `hoist` finds, also those that it refuses."""
    found: dict[int, torch.Tensor] = {}
    _collect(fn, found, set())
    return list(found.values())


def find_orphans(leaves: Iterable[Any]) -> list[int]:
    """The places of tensors that were kept from simulated ranks."""
    rows = enumerate(leaves)
    return [i for i, x in rows if isinstance(x, torch.Tensor) and compat.is_orphan(x)]


def refuse_orphans(name: str, leaves: Iterable[Any]) -> None:
    """Raise ValueError, with the name of their user, for tensors kept from simulated ranks."""
    if find_orphans(leaves):
        raise ValueError(f"{name} {ORPHAN}")


def refuse_tracked(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ValueError for tensors, closed over by a program, that something outside tracks.

    A program holds their numbers, so that derivatives and maps of them would be silently lost.

    Args:
        name: of the function that is, or was, traced.
        tensors: those that it closes over.
    """
    wanted = "a constant, or one of its arguments: what a program closes over has no derivative"
    fix = (
        f"pass it to {name} as an argument, and have what differentiates or maps it inside, as in "
        "ft.jit(ft.grad(f)); or detach it outside of the function, or call under torch.no_grad()"
    )
    raise_problems(
        f"{name} closes over a tensor that is differentiated or mapped outside of it",
        [
            Problem("closure", f"a tensor of shape {list(x.shape)}", wanted, fix)
            for x in tensors
            if compat.is_tracked(x)
        ],
    )


@contextlib.contextmanager
def refusing_tracked(name: str, fn: Callable, *, aside: bool = False) -> Iterator[None]:
    """Trace `fn` in this with block; raise ValueError where it uses what torch.func tracks outside.

    Operations are recorded below all transforms, where tracked tensors look like constants.

    Args:
        name: of the function in errors.
        fn: what is traced.
        aside: it is traced as if no transforms were running, so that its own count from 1 again.
    """
    levels = compat.transform_levels()
    if not levels:
        yield
        return
    refuse_tracked(name, hoist(fn)[0])
    with _Watch(name, levels, aside):  # for those that objects hold
        yield


class _Watch(TorchFunctionMode):
    """Sees the operands of operations as the user's code does: wrapped."""

    def __init__(self, name: str, levels: Collection[int], aside: bool):
        super().__init__()
        self.name, self.levels, self.aside = name, levels, aside
        self.outside = compat.running_transforms()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Runs `func`, unless an operand is tracked by a level from before the block."""
        for leaf in tree.leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and compat.is_wrapped(leaf):
                self._refuse(leaf)
        return func(*args, **(kwargs or {}))

    def _refuse(self, value: torch.Tensor) -> None:
        if self.aside and compat.transforms_active():
            return  # of one of the function's own
        with compat.with_transforms(self.outside) if self.aside else contextlib.nullcontext():
            if compat.is_tracked(value, self.levels):
                refuse_tracked(self.name, [value])


def find_held_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors that an object holds which is one leaf of trees: in its attributes or closure."""
    if isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
        return []
    if isinstance(leaf, torch.nn.Module):
        return [*leaf.parameters(), *leaf.buffers()]
    if isinstance(leaf, (types.FunctionType, types.MethodType, functools.partial)):
        return hoist(leaf)[0]
    if isinstance(leaf, type) or type(leaf).__module__.partition(".")[0] in ("functron", "torch"):
        return []
    names = [*getattr(leaf, "__dict__", ()), *getattr(type(leaf), "__slots__", ())]
    values = [getattr(leaf, name, None) for name in names]
    return [x for value in values for x in tree.leaves(value) if isinstance(x, torch.Tensor)]


def refuse_holders(title: str, what: str, given: tree.Tree, *, tracked: bool = False) -> None:
    """Raise TypeError for leaves of a tree that hold tensors, which a transform would not see.

    Args:
        title: what is attempted.
        what: the leaves are, such as "argument".
        given: the tree.
        tracked: refuse objects that are no dataclasses only where something differentiates or maps
            their tensors: others are as good as what a function closes over.
    """
    found = []
    for position, leaf in enumerate(tree.leaves(given)):
        fix = dataclass_fix(leaf)
        held = [] if fix else find_held_tensors(leaf)
        if fix or (any(map(compat.is_tracked, held)) if tracked else held):
            fix = fix or (
                f"trees take this {type(leaf).__name__} for one leaf: give its tensors in a dict, "
                "a typing.NamedTuple, or a dataclass that functron.tree.register_dataclass knows"
            )
            where = f"{what} {tree.paths(given)[position]}".strip()
            wanted = "a tensor, or a tree of them"
            found.append(Problem(where, f"a {type(leaf).__name__} with tensors", wanted, fix))
    raise_problems(title, found, TypeError)


def _is_tracked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.requires_grad or compat.is_wrapped(value))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and not tree.is_leaf(value)


def _is_data(value: Any) -> bool:
    """Whether `value`, found under a global name, may hold tensors."""
    kinds = (torch.Tensor, functools.partial, types.MethodType)
    return isinstance(value, kinds) or _is_container(value)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def closed_values(fn: types.FunctionType, *, code: bool = False) -> Iterator[Any]:
    """The values a function closes over: cell contents, defaults, and globals that are data.

    The globals of functron and of the libraries under it are left out: they hold no tensors of a
    program, and walking them took longer than the rest. With `code` there are other functions too
    that have no tensors.
    """
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that has not been filled yet
            continue
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    if is_library(fn.__globals__):
        return
    for name in _global_names(fn.__code__):
        value = fn.__globals__.get(name)
        # a function of another module with nothing closed over holds no tensor of this program
        inner = made_public(value)
        holds = isinstance(inner, types.FunctionType) and (
            code or inner.__globals__ is fn.__globals__ or inner.__closure__
        )
        if holds or _is_data(value):
            yield value


def describe_call(value: Any, describe: Callable[[torch.Tensor], Hashable]) -> Any:
    """A key for functions and operands: equal for equal code, static values and tensors' keys.

    Hashable, but for objects of the user's that have no hash.

    Args:
        value: a function, or a tree of some and of operands.
        describe: a tensor to its key.
    """
    return _describe(value, describe, set())


def _describe(value: Any, describe: Callable[[torch.Tensor], Hashable], seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return type(value), value
    if id(value) in seen:
        return None
    seen.add(id(value))
    kind: Any = type(value)
    if isinstance(value, types.FunctionType):
        kind, parts = value.__code__, closed_values(value, code=True)
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        parts = value.__func__, value.__self__
    elif tree.is_leaf(value):
        return _Identity(value)
    else:
        parts, kind = tree.flatten(value)
    return kind, *(_describe(part, describe, seen) for part in parts)


class _Identity:
    """An object, equal to itself as long as it lives."""

    def __init__(self, value: Any):
        self.hash = id(value)
        try:
            self.find: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.find = lambda: value

    def __eq__(self, other: object) -> bool:
        found = self.find()
        return isinstance(other, _Identity) and found is not None and found is other.find()

    def __hash__(self) -> int:
        return self.hash


def note_writes(title: str, *values: Any) -> Callable[[], None]:
    """A function that raises ValueError where tensors were written to since this was called.

    Args:
        title: of the error, with the function that must not write to them.
        values: trees of what it is given, and functions whose closures it sees.
    """
    plain = [compat.plain(x) for x in _find_all(values)]
    before = [(x, x._version) for x in plain if not x.is_inference()]

    def check() -> None:
        written = [x for x, version in before if x._version != version]
        if written:
            more = f" and {len(written) - 1} more" if written[1:] else ""
            raise ValueError(
                f"{title} modified a tensor of shape {tuple(written[0].shape)}{more} in place, "
                "which it was given or closes over, and whose old values are lost; wanted a pure "
                "function; fix: modify a clone, x = x.clone(), or write the operation out of place"
            )

    return check


def copy_views(out: tree.Tree, *given: Any) -> tree.Tree:
    """`out` with tensors of its own: copies where they share memory, with `given` or another.

    A later update in place of one, such as of a donated argument, would change the other in
    silence. So results are values, as those of the equations of a program.

    Args:
        out: a tree.
        given: trees, and functions whose closures it sees.
    """
    memory = set(map(_memory, _find_all(given)))

    def own(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if (place := _memory(x)) in memory:
            return x.clone()
        memory.add(place)
        return x

    return tree.map(own, out)


def _find_all(values: tree.Tree) -> list[torch.Tensor]:
    """The tensors in a tree, and those that functions in it close over."""
    found: dict[int, torch.Tensor] = {}
    for leaf in tree.leaves(values):
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        elif callable(leaf):
            _collect(leaf, found, set(), lambda x: isinstance(x, torch.Tensor))
    return list(found.values())


def _memory(x: torch.Tensor) -> int:
    return compat.plain(x).untyped_storage()._cdata


def _collect(
    value: Any,
    found: dict[int, torch.Tensor],
    seen: set[int],
    is_wanted: Callable[[Any], bool] = _is_tracked,
) -> None:
    if is_wanted(value):
        found[id(value)] = value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable = ()
    if isinstance(value, types.FunctionType):
        parts = closed_values(value)
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        parts = value.__func__, value.__self__
    elif _is_container(value):
        parts = tree.leaves(value)
    for part in parts:
        _collect(part, found, seen, is_wanted)


def _rewrite(value: Any, new: dict[int, torch.Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if id(value) in memo:
        return memo[id(value)]
    found: dict[int, torch.Tensor] = {}
    _collect(value, found, set())
    if found.keys().isdisjoint(new):
        return value
    if isinstance(value, types.FunctionType):
        return _rewrite_function(value, new, memo)
    if isinstance(value, functools.partial):
        func, args, keywords = (
            _rewrite(part, new, memo) for part in (value.func, value.args, value.keywords)
        )
        return functools.partial(func, *args, **keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(
            _rewrite(value.__func__, new, memo), _rewrite(value.__self__, new, memo)
        )
    return tree.map(lambda leaf: _rewrite(leaf, new, memo), value)


def _rewrite_function(fn: types.FunctionType, new: dict, memo: dict) -> types.FunctionType:
    names = set(_global_names(fn.__code__)) & fn.__globals__.keys()
    changed = {}
    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    placeholder = types.FunctionType(
        fn.__code__, dict(fn.__globals__), fn.__name__, None, cells or None
    )
    memo[id(fn)] = placeholder  # before its parts, so that recursive functions find themselves
    for name in names:
        before = fn.__globals__[name]
        if isinstance(before, types.FunctionType) or _is_data(before):
            after = _rewrite(before, new, memo)
            if after is not before:
                changed[name] = after
    placeholder.__globals__.update(changed)
    for cell, old in zip(cells, fn.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _rewrite(old.cell_contents, new, memo)
        except ValueError:  # left empty, as it was
            continue
    placeholder.__defaults__ = _rewrite(fn.__defaults__, new, memo)
    placeholder.__kwdefaults__ = _rewrite(fn.__kwdefaults__, new, memo)
    functools.update_wrapper(placeholder, fn)
    return placeholder
