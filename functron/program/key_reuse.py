"""Keys of random numbers that are used twice in a program, without running it.

Every element of an integer tensor that could be a part of a key has a number, and operations that
only move elements move these: views, rows, stacks. What chooses, such as ``where`` or a row at an
index that is not known, has numbers of its own, and they may be the same as those of what is chosen
from. So have rows of scans, carries and results of branches. What a loop returns comes of what its
body made in one of the iterations, which another one may have used as it is: of the same value, but
another version. Two uses are one too many if they may be of the same element.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.random import watching_keys
from functron.core.scopes import phase
from functron.program.equations import Block, Equation, Input, Switch, Var, Where
from functron.program.faults import line_of, trace_ranks
from functron.program.recorder import active, keeper
from functron.program.text import word
from functron.program.trace import Program
from functron.spmd.shard_map import MappedFunction


@public
def check_key_reuse(f: Callable) -> Callable[..., None]:
    """The function that, called with the arguments of `f`, checks that no key is used twice in it.

    As `jax.experimental.key_reuse`. A key gives the same numbers each time, so two draws with one
    key are the same or correlated, as are a draw and what follows from `split` of its key. Found
    are also a key that every iteration of a scan draws with, keys that are made alike (``key(0)``
    or ``fold_in(key, 0)`` twice), and a row of keys that are used as a whole. `f` is traced, and
    nothing computed: arguments may be abstract. Parts of one array (``index=``) may be drawn one by
    one, and a key may be split alike again, if its parts are not used again.

    >>> def f(key):
    ...     return ft.random.normal(key, (2,)) + ft.random.uniform(key, (2,))
    >>> try:
    ...     ft.debug.check_key_reuse(f)(ft.random.key(0))
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    f uses random keys more than once

    Ranks of a mesh, and elements of a `torch.func.vmap`, may share a key, and rows that are chosen
    by the number of an iteration are taken for different ones. Keys are followed through views,
    rows, stacks and choices (``torch.where``, ``select_n``, ``dynamic_index_in_dim``), which may be
    any of what they choose from, and through what branches and loops return; not through reshapes
    of more than 16,384 numbers, whose rows count as one key. Partitioned functions that `f` calls
    are not looked into.

    Args:
        f: a function of positional trees of tensors, as `trace` takes it.

    Raises:
        ValueError: (when called) a key is used twice, with both lines; all are listed.
        TypeError: `f` is itself made by `functron.partition`, `capture` or `intervene`.
    """
    name = getattr(f, "__name__", type(f).__name__)
    if isinstance(f, MappedFunction) and type(f) is not MappedFunction:
        got = f"a {type(f).__name__}, which keeps what it made of the function, without keys"
        fix = "give check_key_reuse the function that partition, capture or intervene was given"
        refuse("check_key_reuse", name, got, "the function itself", fix, TypeError)

    @public
    def checked(*args: tree.Tree) -> None:
        with watching_keys(_record_use):
            program = trace_ranks(f, args)
        uses = _KeyUses()
        uses.read(program)
        fix = "first, second = ft.random.split(key), or fold_in(key, i) for each i"
        raise_problems(
            f"{name} uses random keys more than once",
            [
                Problem(f"the key of {where}", got, "one use of every key", fix)
                for where, got in dict(uses.problems()).items()
            ],
        )

    return checked


_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("use_key(Tensor key, Tensor[] index, str sampler, int[] shape) -> ()")
_LIBRARY.impl("use_key", lambda *args: None, "CompositeExplicitAutograd")
_LIBRARY.impl("use_key", lambda *args: None, "Meta")


def _record_use(sampler: str, key: torch.Tensor, shape: Sequence[int], index: Any) -> None:
    recorder = active()
    if recorder is None or keeper() is not None or phase() != "forward":
        return  # backward repeats draws of forward
    places = [at for at in index or () if at is not None]
    with compat.no_transforms():
        plain = [compat.plain(value) for value in (key, *places)]
        op = torch.ops.functron.use_key.default
        recorder.effect(op, plain[0], plain[1:], sampler, [*shape])


@dataclass(frozen=True, eq=False)
class _Loop:
    """A loop of several iterations, of `length` if that is known."""

    name: str
    length: int | None


@dataclass(frozen=True)
class _Branch:
    """One of the branches of an equation, of which one runs."""

    switch: Equation
    number: int


_Around = tuple[_Loop | _Branch, ...]
"""The loops and branches around an equation, outermost first."""


@dataclass(frozen=True, eq=False)
class _KeyValue:
    """A value of a program.

    Attributes:
        name: a number; the same for what is made alike.
        moving: the loops in whose iterations it differs.
        elements: the numbers of its elements, in its shape; None of what is no part of a key.
    """

    name: int
    moving: frozenset[_Loop]
    elements: torch.Tensor | None


@dataclass(frozen=True)
class _Link:
    """Elements that others may be the same as.

    Attributes:
        of: numbers of elements, ``[choices, size]``; ``[choices, 1]`` for all alike.
        branch: the branch that must have run; None: any.
        same: the value itself; False: that of another iteration.
    """

    of: torch.Tensor
    branch: _Branch | None = None
    same: bool = True


@dataclass(eq=False)
class _Elements:
    """Elements that were made together, from number `start` on, and what they may be."""

    start: int
    links: list[_Link] = field(default_factory=list)


_Found = Mapping[int, set[frozenset[_Branch]]]
"""By number of an element, the branches that must have run for it to be meant."""


@dataclass(frozen=True, eq=False)
class _KeyUse:
    """A use of a key.

    Attributes:
        elements: of the key.
        how: the sampler and the shape.
        places: positions of `index`, by name.
        moving: the loops in whose iterations it differs.
        around: the loops and branches that it is in.
    """

    elements: frozenset[int]
    how: tuple[str, tuple[int, ...]]
    places: tuple[int, ...]
    moving: frozenset[_Loop]
    around: _Around
    where: Where

    @property
    def text(self) -> str:
        """``normal at file.py:3``."""
        scopes = f" in {'/'.join(self.where.scopes)}" if self.where.scopes else ""
        return f"{self.how[0]} at {line_of(self.where)}{scopes}"

    @property
    def branches(self) -> frozenset[_Branch]:
        """The branches around it."""
        return frozenset(each for each in self.around if isinstance(each, _Branch))


def _can_meet(one: Iterable[_Branch], other: Iterable[_Branch]) -> bool:
    """Whether all these branches may run in one run."""
    chosen: dict[Equation, int] = {}
    return all(
        chosen.setdefault(each.switch, each.number) == each.number for each in (*one, *other)
    )


class _KeyUses:
    """Finds the uses of keys in a program."""

    def __init__(self):
        self.uses: list[_KeyUse] = []
        self._names: dict[Any, int] = {}
        self._made: dict[int, _Elements] = {}  # by name
        self._starts: list[int] = []
        self._groups: list[_Elements] = []
        self._next = 0

    def read(self, program: Program) -> None:
        """Find the uses of a program."""
        environment = {given.var: self._read_input(given) for given in program.inputs}
        self._read_block(program.block, environment, (), keep=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Each place where a key is used again, and how."""
        for use in self.uses:
            for loop in use.around if use.how[0] != "split" else ():
                if isinstance(loop, _Loop) and loop not in use.moving:
                    each = f"each of the {loop.length} iterations of scan"
                    each = "each iteration of loop" if loop.length is None else each
                    yield use.text, f"used in {each} {word(loop.name)}"
        found = [self._find_sources(use) for use in self.uses]
        rows = zip(self.uses, found, strict=True)
        for (one, mine), (two, others) in itertools.combinations(rows, 2):
            # the same keys are made by the same split: those who draw with them tell
            apart = one.places != two.places or one.how[0] == "split"
            if one.how == two.how and apart:
                continue
            pairs = ((mine[0], others[0]), (mine[1], others[0]), (mine[0], others[1]))
            around = one.branches | two.branches
            if _can_meet(around, ()) and any(_may_overlap(a, b, around) for a, b in pairs):
                yield two.text, f"used before, by {one.text}"

    def _find_sources(self, use: _KeyUse) -> tuple[_Found, _Found]:
        """The elements that a use may be of, itself and in other iterations."""
        none: frozenset[_Branch] = frozenset()
        stack = [(number, none, True) for number in use.elements]
        seen = set(stack)
        while stack:
            number, branches, same = stack.pop()
            group = self._groups[bisect.bisect_right(self._starts, number) - 1]
            for link in group.links:
                needed = branches | ({link.branch} if link.branch else none)
                place = min(number - group.start, link.of.shape[1] - 1)
                for other in link.of[:, place].tolist():
                    item = other, needed, same and link.same
                    if item not in seen:
                        seen.add(item)
                        stack.append(item)
        itself: dict[int, set] = {}
        versions: dict[int, set] = {}
        for number, branches, same in seen:
            (itself if same else versions).setdefault(number, set()).add(branches)
        return itself, versions

    # --- values

    def _name(self, made: Any) -> int:
        return self._names.setdefault(made, len(self._names))

    def _make(
        self,
        made: Any,
        like: Var,
        moving: frozenset[_Loop] = frozenset(),
        links: Sequence[_Link] = (),
    ) -> _KeyValue:
        """A value with elements of its own; `made` tells it from others."""
        name = self._name(made)
        if like.dtype != torch.int64:
            return _KeyValue(name, moving, None)
        size = like.size if like.size <= _MOST else 1
        group = self._made.get(name)
        if group is None:
            group = self._made[name] = _Elements(self._next)
            self._starts.append(self._next)
            self._groups.append(group)
            self._next += max(size, 1)
        group.links[:] = links
        numbers = torch.arange(group.start, group.start + size)
        if size < like.size:
            return _KeyValue(name, moving, numbers.expand(like.shape))
        return _KeyValue(name, moving, numbers.view(like.shape))

    def _moved(self, elements: torch.Tensor, moving: frozenset[_Loop]) -> _KeyValue:
        """A value whose elements are those of others."""
        made = "elements", tuple(elements.shape), tuple(elements.flatten().tolist())
        return _KeyValue(self._name(made), moving, elements)

    def _read_input(self, given: Input) -> _KeyValue:
        value = given.value
        if value is not None and value.numel() <= 16 and not isinstance(value, FakeTensor):
            made = "constant", value.dtype, (*value.shape,), str(value.tolist())
            return self._make(made, given.var)
        return self._make(given.var, given.var)

    # --- equations

    def _read_block(
        self, block: Block, values: dict[Var, _KeyValue], around: _Around, *, keep: bool
    ) -> list[Any]:
        """The values of a block's outputs; `values` has those of its inputs."""
        for equation in block.equations:
            if isinstance(equation.op, Switch):
                self._read_switch(equation, equation.op, values, around, keep)
            elif hasattr(equation.op, "body"):
                self._read_loop(equation, values, around, keep)
            elif equation.name == "use_key":
                if keep:
                    self.uses.append(self._read_use(equation, values, around))
            else:
                self._read_equation(equation, values)
        return [values[v] if isinstance(v, Var) else None for v in block.outputs]

    def _read_use(self, equation: Equation, values, around: _Around) -> _KeyUse:
        key, index, sampler, shape = equation.args
        elements, places = values[key].elements, tuple(values[at].name for at in index)
        moving = frozenset().union(*(values[x].moving for x in (key, *index)))
        numbers = frozenset(elements.flatten().tolist())
        how = sampler, tuple(shape)
        return _KeyUse(numbers, how, places, moving, around, equation.where)

    def _read_equation(self, equation: Equation, values: dict[Var, _KeyValue]) -> None:
        moving = frozenset().union(*(values[v].moving for v in equation.operands))
        results, name = equation.results, equation.name
        if name in _SAME and len(results) == 1 and equation.operands:
            operand = equation.operands[0]
            if (results[0].shape, results[0].dtype) == (operand.shape, operand.dtype):
                values[results[0]] = values[operand]
                return
        if name in _MOVES and (parts := _move(equation, values)) is not None:
            for value, part in zip(equation.outputs, parts, strict=True):
                if value is not None:
                    values[value] = self._moved(part, moving)
            return
        links = _find_choices(equation, values)
        made = (str(equation.op), _freeze(equation.args, values),
                _freeze(sorted(equation.kwargs.items()), values))  # fmt: skip
        for position, value in enumerate(equation.outputs):
            if value is not None:
                values[value] = self._make((*made, position), value, moving, links)

    def _read_switch(
        self, equation: Equation, op: Switch, values, around: _Around, keep: bool
    ) -> None:
        """Branches, of which one runs: their uses do not meet."""
        given = [values[v] for v in equation.args]
        rows = []
        for number, block in enumerate(op.blocks):
            branch = _Branch(equation, number)
            inner = dict(zip(block.inputs, given[1:], strict=True))
            rows.append((branch, self._read_block(block, inner, (*around, branch), keep=keep)))
        for position, value in enumerate(equation.outputs):
            if value is None:
                continue
            made = [(branch, outputs[position]) for branch, outputs in rows]
            moving = frozenset().union(given[0].moving, *(x.moving for _, x in made if x))
            links = [
                _Link(x.elements.reshape(1, -1), branch)
                for branch, x in made
                if x is not None and x.elements is not None
            ]
            values[value] = self._make((equation, "result", position), value, moving, links)

    def _read_loop(self, equation: Equation, values, around: _Around, keep: bool) -> None:
        op: Any = equation.op
        given = [values[v] for v in equation.args]
        length = getattr(op, "length", None)  # not known of one that runs while something holds
        count = getattr(op, "num_carry", len(given) - op.num_consts)
        loop = _Loop(op.name, length)
        once = length == 1
        inside = around if once else (*around, loop)
        first, last = op.num_consts, op.num_consts + count
        turns = [not once] * count
        stays = [once] * count  # carries that the body gets as the loop does
        rows = [
            self._enter_row(loop, var, value, inner, once)
            for var, value, inner in zip(
                equation.args[last:], given[last:], op.body.inputs[last:], strict=True
            )
        ]

        def run(keep: bool) -> tuple[list[_KeyValue], list[Any]]:
            carries = [
                value
                if stays[i]
                else self._make(
                    (loop, "carry", i),
                    op.body.inputs[first + i],
                    value.moving | ({loop} if turns[i] else set()),
                    _links_to(value.elements),
                )
                for i, value in enumerate(given[first:last])
            ]
            entered = [*given[:first], *carries, *rows]
            outputs: list[Any] = []
            for block in (*(b for b in getattr(op, "blocks", ()) if b is not op.body), op.body):
                inner = dict(zip(block.inputs, entered, strict=True))
                outputs = self._read_block(block, inner, inside, keep=keep)
            return carries, outputs

        while not once and count:
            carries, outputs = run(False)
            still = [
                out is not None and carry.name == out.name
                for carry, out in zip(carries, outputs, strict=False)
            ]
            moves = _find_moving(loop, carries, outputs)
            if still == stays and moves == turns:
                break
            stays, turns = [a or b for a, b in zip(still, stays, strict=True)], moves
        carries, outputs = run(keep)
        for carry, out, staying in zip(carries, outputs, stays, strict=False):
            if not staying and carry.elements is not None and out is not None:
                self._made[carry.name].links += _links_to(out.elements, same=False)
        self._return(equation, values, loop, given, outputs, count, stays, once)

    def _enter_row(
        self, loop: _Loop, var: Var, value: _KeyValue, inner: Var, once: bool
    ) -> _KeyValue:
        """A slice of what a scan goes through."""
        elements = value.elements
        if elements is None:
            same = var.stride[0] == 0  # the same row again and again
            moving = value.moving if same or once else value.moving | {loop}
            return self._make((loop, "x", value.name), inner, moving)
        if once:
            return self._moved(elements[0], value.moving)
        flat = elements.reshape(len(elements), -1)
        apart = flat.unique().numel() == sum(row.unique().numel() for row in flat)
        moving = value.moving | {loop} if apart else value.moving
        return self._make((loop, "x", value.name), inner, moving, [_Link(flat)])

    def _return(
        self, equation: Equation, values, loop: _Loop, given, outputs, count: int, stays, once: bool
    ) -> None:
        """The results of a loop: its carries, then stacked rows."""
        op: Any = equation.op
        for position, value in enumerate(equation.outputs):
            if value is None:
                continue
            out = outputs[position] if position < len(outputs) else None
            if position < count and stays[position] and not once:
                values[value] = given[op.num_consts + position]
                continue
            if out is None:
                values[value] = self._make((loop, "result", position), value)
                continue
            moving, elements = out.moving - {loop}, out.elements
            if once and elements is not None:
                whole = elements if position < count else elements.unsqueeze(0)
                values[value] = self._moved(whole, moving)
                continue
            links = []
            if elements is not None:
                flat = elements.flatten()
                repeats = 1 if position < count else value.shape[0]
                large = flat.numel() * repeats > _MOST
                of = flat[:, None] if large else flat.repeat(repeats)[None]
                links = [_Link(of, same=loop not in out.moving)]
            values[value] = self._make((loop, "result", position), value, moving, links)


def _may_overlap(one: _Found, other: _Found, around: frozenset[_Branch]) -> bool:
    """Whether two uses may be of the same element."""
    small, large = sorted((one, other), key=len)
    return any(
        _can_meet(a | b, around)
        for number in small
        if number in large
        for a in small[number]
        for b in large[number]
    )


def _links_to(elements: torch.Tensor | None, *, same: bool = True) -> list[_Link]:
    return [] if elements is None else [_Link(elements.reshape(1, -1), same=same)]


def _find_moving(loop: _Loop, carries: Sequence[_KeyValue], outputs: Sequence) -> list[bool]:
    """Which carries differ in all iterations: none that come round, or are set to what stays."""
    owners = {
        number: i
        for i, carry in enumerate(carries)
        if carry.elements is not None
        for number in carry.elements.flatten().tolist()
    }
    before = [
        {owners[n] for n in out.elements.flatten().tolist() if n in owners}
        if out is not None and out.elements is not None
        else set()
        for out in outputs[: len(carries)]
    ]

    def comes_round(start: int) -> bool:
        seen: set[int] = set()
        stack = [*before[start]]
        while stack:
            if (at := stack.pop()) not in seen:
                seen.add(at)
                stack += before[at]
        return start in seen

    return [
        out is not None and loop in out.moving and not comes_round(i)
        for i, out in enumerate(outputs[: len(carries)])
    ]


_MOST = 1 << 14
"""Elements of a value that are told apart."""

_SAME = frozenset(
    {
        "alias", "detach", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy", "view", "reshape",
        "expand", "contiguous", "barrier", "vary", "assume_replicated", "require_replicated",
        "assume_share", "require_share",
    }
)  # fmt: skip
"""Operations that return the numbers of their first operand, where the shape stays."""

_MOVES = frozenset(
    {
        "select", "slice", "unbind", "split", "split_with_sizes", "view", "_unsafe_view", "reshape",
        "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "cat", "stack", "flip",
        "roll", "repeat", "select_scatter", "slice_scatter",
    }
)  # fmt: skip
"""Operations whose results have elements of their operands, at places that are known."""

_CHOOSES: Mapping[str, Sequence[int]] = {
    "index": (0,), "gather": (0,), "take": (0,), "index_copy": (0, 3), "index_put": (0, 2),
    "scatter": (0, 3),
}  # fmt: skip
"""By operation, the operands whose elements results have at places that are not known."""


def _move(equation: Equation, values: Mapping[Var, _KeyValue]) -> list[torch.Tensor] | None:
    """The elements of each result; None where an operand is no part of a key."""
    if any(values[v].elements is None for v in equation.operands):
        return None

    def fill(value: Any) -> Any:
        if isinstance(value, Var):
            return values[value].elements
        return [*map(fill, value)] if isinstance(value, list | tuple) else value

    run: Any = torch.reshape if equation.name in ("view", "_unsafe_view") else equation.op
    out = run(*fill(equation.args), **{name: fill(x) for name, x in equation.kwargs.items()})
    return [out] if isinstance(out, torch.Tensor) else [*out]


def _find_choices(equation: Equation, values: Mapping[Var, _KeyValue]) -> list[_Link]:
    """Links of the results of an operation that chooses."""
    name, args = equation.name, equation.args
    if not any(result.dtype == torch.int64 for result in equation.results):
        return []
    if name == "where" and len(args) == 3:
        shape = equation.results[0].shape
        found = [values[v].elements for v in args[1:] if isinstance(v, Var)]
        return [_Link(x.expand(shape).reshape(1, -1)) for x in found if x is not None]
    if name == "index_select" and (x := values[args[0]].elements) is not None and x.dim():
        dim, size = args[1] % x.dim(), equation.results[0].shape[args[1] % x.dim()]
        rows = [row.unsqueeze(dim).repeat_interleave(size, dim).flatten() for row in x.unbind(dim)]
        return [_Link(torch.stack(rows))] if rows and rows[0].numel() else []
    places = [args[i] for i in _CHOOSES.get(name, ()) if i < len(args)]
    found = [values[v].elements for v in places if isinstance(v, Var)]
    return [_Link(x.flatten().unique()[:, None]) for x in found if x is not None]


def _freeze(value: Any, values: Mapping[Var, _KeyValue]) -> Any:
    """A hashable description of an argument."""
    if isinstance(value, Var):
        return ("%", values[value].name)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, values) for item in value)
    return type(value).__name__, repr(value)
