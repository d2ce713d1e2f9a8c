"""Values inside a function by name: `capture` returns them beside its result, `intervene` replaces.

A value is named by `checkpoint_name`, and by the named scopes and the loops that it is in: the
attention of layer 3 of a decoder is ``blocks/3/attention/out``. The names of decoders are listed at
`functron.models.decoder.transformer_block`.

Nothing is stashed: where a function runs on values of another kind than its caller's (a level of
vmap or grad, a tape, the body of a scan or of `remat`), what is captured inside becomes a result of
that function, so it is differentiated, mapped, stacked and computed again like any other. Only
transforms of torch.func that the captured function calls itself are left by value.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functron.core import compat, tree
from functron.core.closure import hoist
from functron.core.errors import Problem, nearest, public, raise_problems
from functron.core.scopes import in_scopes, scope_names, set_during, watchers
from functron.program.recorder import aside
from functron.spmd.axes import Scope, enter, scope
from functron.spmd.mesh import BoundMesh
from functron.spmd.shard_map import MappedFunction
from functron.spmd.simulate import explain_error, run_ranks, varying_axes
from functron.spmd.spec import P, entry_axes, global_shape, spec_axes, with_axes

ANY_ROW = "#"
"""In the place of a row's number in names inside of a scan that is one equation."""


class ValueWatch(NamedTuple):
    """The values that are asked for. A tuple, so that tensors that functions close over are found.

    Attributes:
        patterns: of names.
        replace: a function for each pattern; empty: values are captured.
        axes: the mesh axes that were bound where it was asked.
    """

    patterns: tuple[str, ...]
    replace: tuple[Callable, ...]
    axes: tuple[str, ...]


class _Sink:
    """One run of a function under a `ValueWatch`.

    Attributes:
        found: what is captured, by name.
        specs: how ranks' parts make it up, as far as the program says so.
        seen: all names.
        depth: how many transforms of torch.func run around it.
    """

    def __init__(self, watch: ValueWatch):
        self.watch, self.depth = watch, len(compat.transform_names())
        self.found: dict[str, torch.Tensor] = {}
        self.specs: dict[str, P] = {}
        self.seen: dict[str, None] = {}

    def see(self, x: torch.Tensor, name: str, spec: P | None) -> torch.Tensor:
        self.seen[name] = None
        hits = [i for i, pattern in enumerate(self.watch.patterns) if _fits(pattern, name)]
        if not hits:
            return x
        self._refuse_inner_ranks(name)
        if self.watch.replace:
            return _replace(self.watch.replace[hits[0]], x, name)
        if name in self.found:
            raise ValueError(
                f"capture: {name!r} names several values; wanted one of that name; fix: give each "
                "call a scope of its own, with ft.named_scope(...)"
            )
        value = compat.leave_transforms(x, self.depth)
        self.found[name] = value
        if spec is not None and value.dim() == x.dim():
            self.specs[name] = spec
        return x

    def _refuse_inner_ranks(self, name: str) -> None:
        inner = [a for a, axis in scope().axes.items() if axis and a not in self.watch.axes]
        if inner:
            raise ValueError(
                f"capture: {name!r} is a value of each rank along {', '.join(map(repr, inner))}, "
                "in a shard_map that the function calls; wanted the function that shard_map "
                "returned; fix: ft.capture(mapped, ...), or capture inside of it"
            )

    def named(self, found: Mapping[str, torch.Tensor] | None = None) -> _Sink:
        """The same with these values; None: without any."""
        again = copy.copy(self)
        again.found = dict(found or {})
        return again

    def by_row(self, rows: Iterable[int], place: int) -> list[_Sink]:
        """One for each row of a scan, whose number is put at this place in names."""

        def at(row: int, name: str) -> str:
            parts = name.split("/")
            return "/".join((*parts[:place], str(row), *parts[place + 1 :]))

        made = []
        for i, row in enumerate(rows):
            each = self.named({at(row, name): value[i] for name, value in self.found.items()})
            each.specs = {at(row, name): spec for name, spec in self.specs.items()}
            each.seen = dict.fromkeys(at(row, name) for name in self.seen)
            made.append(each)
        return made

    def results(self) -> dict[str, torch.Tensor]:
        """The captured values, in the order of the program.

        Raises:
            ValueError: a pattern fits no name; with the nearest ones.
        """
        what = "intervene" if self.watch.replace else "capture"
        _refuse_unknown(what, self.watch.patterns, self.seen)
        return self.ordered()

    def ordered(self) -> dict[str, torch.Tensor]:
        """The same, unchecked."""
        return {name: self.found[name] for name in self.seen if name in self.found}

    def take(self, inner: _Sink) -> None:
        """The results of a run inside of this one, as values of this one."""
        self.seen |= inner.seen
        for name, value in inner.found.items():
            self.see(value, name, inner.specs.get(name))


class _NoSink(_Sink):
    """A run in which there is a number of each value that nothing knows before: none, or many."""

    def __init__(self, watch: ValueWatch, where: str):
        super().__init__(watch)
        self.where = where

    def see(self, x: torch.Tensor, name: str, spec: P | None) -> torch.Tensor:
        if any(_fits(pattern, name) for pattern in self.watch.patterns):
            raise ValueError(
                f"capture: got {name!r}, a value in {self.where}, which may run or not; wanted "
                "values that are there in each run; fix: return it, and name the result"
            )
        return x


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits the last parts of a name, one by one."""
    wanted, parts = pattern.split("/"), name.split("/")
    rows = zip(reversed(wanted), reversed(parts), strict=False)
    return len(wanted) <= len(parts) and all(
        part == ANY_ROW or fnmatch.fnmatchcase(part, one) for one, part in rows
    )


def _replace(f: Callable, x: torch.Tensor, name: str) -> torch.Tensor:
    out = f(x, name)
    if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (x.shape, x.dtype):
        got = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, torch.Tensor) else repr(out)
        raise ValueError(
            f"intervene: the function for {name!r} returned {got}; wanted a tensor of "
            f"{tuple(x.shape)} {x.dtype}, as the value that it replaces"
        )
    return out


def name_value(x: torch.Tensor, name: str, spec: P | None = None) -> torch.Tensor:
    """`x`, or what takes its place, where something asks for values of this name; else `x` itself.

    Args:
        spec: how ranks' parts make up the whole; axes over which x does not vary do not count.
    """
    sinks = watchers.get()
    if not sinks:
        return x
    path = "/".join((*scope_names(), name))
    for sink in reversed(sinks):
        x = sink.see(x, path, spec)
    return x


def is_watched() -> bool:
    """Whether values are captured or replaced where this is called."""
    return bool(watchers.get())


def replacing_functions() -> list[Callable]:
    """The functions by which values are replaced where this is called."""
    return [f for sink in watchers.get() for f in sink.watch.replace]


def unwatched() -> AbstractContextManager[None]:
    """A with block in which no value is captured or replaced."""
    return set_during(watchers, ())


def refusing_names(f: Callable, where: str) -> Callable:
    """`f`, run at a place in which ValueError is raised for a value that is asked for."""
    if not (sinks := watchers.get()):
        return f
    none = tuple(_NoSink(sink.watch, where) for sink in sinks)

    @functools.wraps(f)
    def refused(*args):
        with set_during(watchers, none):
            return f(*args)

    return refused


def watched_scope(*names: str | int) -> AbstractContextManager[None]:
    """Named scopes, of which only names of captured values know; numbers are those of a loop."""
    if not watchers.get():
        return contextlib.nullcontext()
    return in_scopes((*scope_names(), *map(str, names)))


class Relay:
    """Hands on what is captured in a function whose values are not those of its caller."""

    def __init__(self):
        self.sinks = watchers.get()
        self.watches = tuple(sink.watch for sink in self.sinks)
        self._known: list[_Sink] = []

    def __bool__(self) -> bool:
        return bool(self.sinks)

    def around(self, f: Callable) -> Callable:
        """`f`, which returns ``(result, captured)``, to be passed to `take` where `f` is called."""
        watches, known = self.watches, self._known

        @functools.wraps(f)
        def watched(*args, **kwargs):
            sinks = tuple(map(_Sink, watches))
            with set_during(watchers, sinks):
                out = f(*args, **kwargs)
            captured = tuple(sink.found for sink in sinks)
            known[:] = [sink.named() for sink in sinks]
            return out, captured

        return watched

    def take(
        self, captured: Sequence[dict[str, torch.Tensor]], rows: Iterable[int] | None = None
    ) -> None:
        """Give the values to who asked for them; with `rows`, those of each row of a scan."""
        place = len(scope_names())
        for sink, values, inner in zip(self.sinks, captured, self._known, strict=True):
            whole = inner.named(values)
            for each in [whole] if rows is None else whole.by_row(rows, place):
                sink.take(each)


def _refuse_unknown(what: str, patterns: Sequence[str], seen: Iterable[str]) -> None:
    names = [*seen]
    known = {"/".join("*" if x.isdigit() else x for x in name.split("/")) for name in names}
    raise_problems(
        f"{what}: the function gives no value such a name",
        [
            Problem(pattern, "a pattern that fits none", "one of a value", nearest(pattern, known))
            for pattern in patterns
            if not any(_fits(pattern, name) for name in names)
        ],
    )


def _watch(f: Callable, watch: ValueWatch, *, checked: bool = True) -> Callable:
    """`f`, which returns ``(result, captured)``; of replaced values its result alone.

    Without `checked`, a pattern may fit no name.
    """

    def watched(*args, **kwargs):
        sink = _Sink(watch._replace(axes=tuple(a for a, axis in scope().axes.items() if axis)))
        with set_during(watchers, (*watchers.get(), sink)):
            out = f(*args, **kwargs)
        found = sink.results() if checked else sink.ordered()
        return out if watch.replace else (out, found)

    return functools.wraps(f)(watched)


class _Watched(MappedFunction):
    """A mapped function of which values are captured, or replaced.

    What there is to capture, and the specs of it, are found before the first call with a signature,
    by a simulation of all ranks on fake tensors.
    """

    def __init__(self, base: MappedFunction, asked: Sequence[tuple[ValueWatch, Mapping[str, P]]]):
        vars(self).update(vars(base))
        self.base, self.asked, self._checked = base, tuple(asked), set()
        for watch, _ in asked:
            self.f = _watch(self.f, watch, checked=False)  # which `_simulate_names` has done
        self._known: dict[Any, Any] = {}
        if (observe := base.observe) is not None:
            self.observe = lambda args, out: observe(args, self._strip(out))

    def _strip(self, out: Any) -> Any:
        """The result of what was mapped."""
        for watch, _ in self.asked:
            out = out if watch.replace else out[0]
        return out

    def also(self, watch: ValueWatch, specs: Mapping[str, P]) -> _Watched:
        """The same, with this besides."""
        return _Watched(self.base, (*self.asked, (watch, specs)))

    def __call__(self, *args, **kwargs) -> Any:
        if not kwargs:
            self.out_specs = self._find_specs(args)
        return super().__call__(*args, **kwargs)

    def _find_specs(self, args: tuple) -> tree.Tree:
        """The specs of all results."""
        leaves, structure, specs, _ = self._flatten(args)
        like = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
        key = structure, scope().axis_index is not None, like
        if key not in self._known:
            whole = isinstance(self.mesh, BoundMesh) and self.mesh[self.stages or ""] > 1
            # of a pipeline on processes each rank knows its own stages alone
            found = None if whole else self._simulate_names(leaves, structure, specs)
            out = self.base.out_specs
            for i, (watch, given) in enumerate(self.asked):
                if not watch.replace:
                    out = out, P() if found is None else _choose_specs(found[i], given)
            self._known[key] = out
        return self._known[key]

    def _simulate_names(self, leaves: list, structure: tree.Structure, specs: list) -> list:
        """Of each watch the names, each with its declared spec, varying axes and number of dims."""
        sharded = isinstance(self.mesh, BoundMesh) or scope().axis_index is not None
        mapped, watches = self.base.f, tuple(watch for watch, _ in self.asked)
        (hidden, close), stages = hoist(lambda: (mapped, watches)), self._stage_axis()
        shapes = [
            global_shape(x.shape, spec, self.mesh) if sharded and spec is not None else x.shape
            for x, spec in zip(leaves, specs, strict=True)
            if isinstance(x, torch.Tensor)
        ]
        kinds = [(x.dtype, x.device) for x in leaves if isinstance(x, torch.Tensor)]
        rows: list[list[_Found]] = [[] for _ in self.asked]
        probe = copy.copy(self)
        probe.out_specs = P()

        def run(*given) -> tuple:
            axes = tuple(name for name, axis in scope().axes.items() if axis)
            sinks = [_Sink(watch._replace(axes=axes)) for watch in asked]
            with set_during(watchers, tuple(reversed(sinks))):
                f(*given)
            for row, sink in zip(rows, sinks, strict=True):
                row[:] = [
                    _Found(name, sink.specs.get(name), varying_axes(value), value.dim())
                    for name, value in sink.results().items()
                ]
            return ()

        with aside(), enter(Scope(stages=stages)), FakeTensorMode(allow_non_fake_inputs=True):
            f, asked = close(
                [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in hidden]
            )()
            made = iter([
                torch.empty(shape, dtype=dtype, device=device)
                for shape, (dtype, device) in zip(shapes, kinds, strict=True)
            ])  # fmt: skip
            empty = [next(made) if isinstance(x, torch.Tensor) else x for x in leaves]
            program = functools.partial(probe._compute, run, structure, None, specs)
            try:
                run_ranks(program, self._mapped.mesh, empty, specs, check=False)
            except (RuntimeError, KeyError) as error:
                if (means := explain_error(error)) is None:
                    raise
                raise ValueError(means).with_traceback(error.__traceback__) from None
        return rows


class _Found(NamedTuple):
    """A captured value of all ranks: its spec, as declared, and the axes over which it varies."""

    name: str
    declared: P | None
    varying: tuple[str, ...]
    num_dims: int


def _choose_specs(found: Sequence[_Found], given: Mapping[str, P]) -> dict[str, P]:
    """The spec of each captured value: given, declared, or P() where all ranks have it."""
    names = [each.name for each in found]
    _refuse_unknown("capture(specs=...)", [*given], names)
    chosen: dict[str, P] = {}
    problems = []
    for each in found:
        own = next((spec for pattern, spec in given.items() if _fits(pattern, each.name)), None)
        if own is None:
            own = _keep_axes(each.declared or P(), each)
        if missing := [name for name in each.varying if name not in spec_axes(own)]:
            over = ", ".join(map(repr, missing))
            example = P(*[None] * (each.num_dims - 1), missing[0])
            problems.append(
                Problem(
                    each.name,
                    f"a value of {each.num_dims} dims that varies over {over}, with spec {own}",
                    "a spec that says how ranks' parts make up the whole",
                    f'ft.capture(..., specs={{"{each.name}": {example}}}), with the dim that the '
                    "axis splits; or reduce it before it is named",
                )
            )
        chosen[each.name] = own
    raise_problems("capture cannot put values of ranks together", problems)
    return chosen


def _keep_axes(spec: P, found: _Found) -> P:
    """The spec without axes over which a value does not vary."""
    rows = [
        with_axes(entry, [name for name in entry_axes(entry) if name in found.varying])
        for entry in spec[: found.num_dims]
    ]
    while rows and not rows[-1]:
        rows.pop()
    return P(*rows)


@public
def capture(f: Callable, *patterns: str, specs: Mapping[str, P] | None = None) -> Callable:
    """The function that returns ``(f(...), values)``, the named values in it as a dict by name.

    >>> def double(x):
    ...     return 3 * ft.checkpoint_name(2 * x, "doubled")
    >>> ft.capture(double, "doubled")(torch.ones(2))
    (tensor([6., 6.]), {'doubled': tensor([2., 2.])})
    >>> capture = ft.capture(gpt.forward, "blocks/*/attention/out")  # of the decoder's layers

    A value has the name that `checkpoint_name` gives it, after those of the scopes
    (`functron.named_scope`) and the numbers of the loops (`functron.scan`, microbatches) that it is
    in; decoders name theirs (`functron.models.decoder.transformer_block`). Values are results as
    any other: differentiated, mapped, traced and compiled with `f`, and computed under remat and in
    scans as without this. Put `functron.jit` and `functron.trace` outermost.

    Of what `shard_map` returned, also by `make_step`, they are put together as its results are:
    global values on a simulated mesh, this rank's parts on a bound one; before the first call with
    a signature `f` runs once on fake tensors, to find them. Of a function inside a mapped program
    they are the rank's own. Under a pipeline they are those of each stage: on processes, those of
    this rank's, which may be none. Under accumulation and pipelines names begin with
    ``microbatches/`` and a number.

    Args:
        patterns: of the ends of names, part by part: ``"out"``, ``"attention/out"``,
            ``"blocks/[01]/*/out"``; ``"*"`` is all.
        specs: where `f` is mapped, specs by such patterns. Without one a value that all ranks have
            is P(), and decoders declare theirs.

    Raises:
        ValueError: a pattern fits no value; several values have one name; or a value varies over an
            axis of which no spec tells.
        TypeError: a compiled function is called, in which no value has a name any more.
    """
    _check_patterns("capture", patterns)
    return _ask(f, ValueWatch(patterns, (), ()), specs or {})


@public
def intervene(f: Callable, replace: Mapping[str, Callable]) -> Callable:
    """`f`, in which named values are replaced: ``g(value, name)`` in place of the value.

    >>> ablated = ft.intervene(gpt.forward, {"blocks/2/mlp/out": lambda value, name: 0 * value})
    >>> def double(x):
    ...     return 3 * ft.checkpoint_name(2 * x, "doubled")
    >>> ft.intervene(double, {"doubled": lambda value, name: value + 1})(torch.ones(2))
    tensor([9., 9.])

    The result of ``g`` takes part in all that follows, gradients too. It gets and returns this
    rank's part of a value, and may use collectives; tensors that it closes over count as arguments
    of `f`, which all ranks have. Around a captured function it comes after what is captured, inside
    before. A scan in which values are replaced is traced row by row. See `capture` for names.

    Raises:
        ValueError: a pattern fits no value, or a function returns another shape or dtype.
        TypeError: a compiled function is called, or what takes a value's place is no function.
    """
    _check_patterns("intervene", [*replace])
    raise_problems(
        "intervene",
        [
            Problem(pattern, repr(g), "a function of a value and its name")
            for pattern, g in replace.items()
            if not callable(g)
        ],
        TypeError,
    )
    return _ask(f, ValueWatch(tuple(replace), tuple(replace.values()), ()), {})


def _check_patterns(what: str, patterns: Sequence[str]) -> None:
    if not patterns:
        raise ValueError(f'{what}: got no patterns; wanted some, such as "blocks/*/attention/out"')


def _ask(f: Callable, watch: ValueWatch, specs: Mapping[str, P]) -> Callable:
    if isinstance(f, _Watched):
        return f.also(watch, specs)
    if isinstance(f, MappedFunction):
        return _Watched(f, [(watch, specs)])
    if specs:
        wanted = "None, as a function that is not mapped has one value of each name"
        fix = "leave it out, and give shard_map the out_specs of what this returns"
        raise_problems("capture", [Problem("specs", f"{dict(specs)}", wanted, fix)])
    return _watch(f, watch)
