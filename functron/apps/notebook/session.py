"""A started mesh: ranks that are processes, called from a notebook as a simulated mesh is.

>>> with ft.Mesh(dp=2, tp=2).start() as mesh:
...     step = ft.jit(ft.make_step(gradients, optimizer, mesh, specs), donate=0)
...     state = ft.init_state(key, defs, specs, optimizer, mesh)
...     state, metrics = step(state, batch)

Functions take and return whole values. Those that the ranks hold are `Handle`s here: leaves with a
shape, a dtype and a spec, fetched when they are looked at. What is made of a started mesh is made
again on each rank, of the bound mesh there, from the same arguments; so a program is the one that
torchrun would run, to the bit.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import math
import pickle
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from functron.apps.notebook.handles import (
    Deferred,
    Handle,
    Kind,
    Plan,
    Row,
    abstract,
    compare_shown,
    compare_sums,
    deal,
    for_rank,
    join_stages,
    kind_of,
    refuse_split_statics,
)
from functron.apps.notebook.processes import (
    GRACE_SECONDS,
    RESTART,
    Hosts,
    InterruptedCallError,
    Processes,
    RankError,
    raise_failures,
    show_warnings,
)  # fmt: skip
from functron.apps.notebook.shipping import (
    Packed,
    SentProgram,
    compile_sent,
    dump,
    dump_function,
    load,
    refuse_unsendable,
    require_cloudpickle,
)  # fmt: skip
from functron.apps.notebook.used_values import UsedValue, UsedValues, is_specs
from functron.apps.notebook.worker import Answer, Call, KeptResults, ResultSlot, TensorMeta, is_slot
from functron.compiler.executable import compile as compile_program
from functron.compiler.jit import Jitted, jit
from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.models.generation import generate
from functron.program.faults import nans
from functron.program.key_reuse import check_key_reuse
from functron.program.trace import Program, eval_shape, trace
from functron.spmd import DATA_AXES, Mesh, P, gather, shard
from functron.spmd import spec as sharding
from functron.spmd.flight import list_ranks
from functron.spmd.mesh import NamedAxes
from functron.spmd.params import init_params
from functron.spmd.shard_map import MappedFunction
from functron.spmd.spec import is_spec
from functron.training.step import init_state, state_specs
from functron.transforms import capture, intervene

_WHOLE = P()
_TIMEOUT_SECONDS = 300.0


class RemoteFunction:
    """A function over a started mesh: made and called on each of its ranks.

    Attributes:
        twin: the same function over the simulated mesh; None: there is none.
        in_specs, out_specs: of its arguments and results.
        donate: positions of arguments that it consumes.
        by_stage: whether results are what each rank of a pipeline holds.
        sums: whether results that ranks have in common are compared.
    """

    def __init__(
        self, ranks: StartedMesh, make: Callable, args: tuple, kwargs: Mapping[str, Any],
        *, twin: Any = None, in_specs: Any = (), out_specs: Any = None, stages: str | None = None,
    ):  # fmt: skip
        self._sent: tuple[bytes, UsedValues] | None = None
        self.ranks, self.twin, self.in_specs, self.out_specs = ranks, twin, in_specs, out_specs
        self._recipe, self._once = (make, args, dict(kwargs)), False
        self._plans: dict[Any, Plan] = {}
        self._find_mapped(stages)
        named = twin if twin is not None else args[0] if args else make
        self.__name__ = getattr(named, "__name__", "function")
        self.__doc__ = getattr(named, "__doc__", None)

    def _find_mapped(self, stages: str | None = None) -> None:
        inner, self.donate = self.twin, set()
        while isinstance(inner, Jitted):
            self.donate |= set(inner.donate)
            inner = inner.fn
        if isinstance(inner, MappedFunction):
            self.donate |= set(inner.donate)
            self.in_specs, stages = inner.in_specs, inner.stages
        self.by_stage, self.sums = self.ranks.mesh[stages or ""] > 1, False
        self._mapped = inner if isinstance(inner, MappedFunction) else None
        # of what is traced for its results' specs, values of arguments count too
        self.traces = self._mapped is not None and type(self._mapped) is not MappedFunction

    def renew(self) -> None:
        """Forget what was found by tracing: what it is made of has changed."""
        self._plans.clear()
        make, args, kwargs = self._recipe
        if self.twin is None:
            return
        if make is nans:
            self.twin = args[0].twin
            return
        self.twin = make(*_local(args), **_local_dict(kwargs))
        self._find_mapped()

    def list_given(self) -> list[UsedValue]:
        """The values that it is made of; of one that is called once, none."""
        make, args, kwargs = self._recipe
        given = [] if self._once else [make, *args, *kwargs.values()]
        return [
            UsedValue.of(lambda each=each: each)
            for each in given
            if not isinstance(each, StartedMesh | RemoteFunction)
            and not (self.twin is not None and is_specs(each))  # copies of our own
        ]

    def __repr__(self) -> str:
        return f"<{self.__name__} on {self.ranks}>"

    def find_out_specs(self, args: tuple) -> tree.Tree:
        """The specs of the results of such arguments; `partition` and `capture` trace for them."""
        if self._mapped is None:
            return self.out_specs
        if self.traces:
            eval_shape(self._mapped)(*abstract(args))
        return self._mapped.out_specs

    def __del__(self) -> None:
        if self._sent is not None:
            self.ranks._unused.append(self._sent[0])

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of all ranks, as handles.

        Raises:
            ValueError: what the function itself refuses; a handle that was consumed or lost; or
                under a transform of torch.func, or with tensors that require gradients.
            RankError: a rank died; or a rank raised what cannot be raised here.
        """
        if kwargs:
            raise TypeError(f"{self.__name__}: got keyword arguments; wanted positional ones")
        return self.ranks._call(self, args)

    def __functron_call__(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of a function of the library for this one: compiled, traced, or refused."""
        if fn is nans and self.twin is not None:
            made = RemoteFunction(self.ranks, fn, args, kwargs, twin=self.twin)
            made.donate = set()
            return made
        if fn in (trace, eval_shape, check_key_reuse) and self.twin is not None:
            made = fn(*_local(args), **_local_dict(kwargs))
            return lambda *given, **rest: made(*abstract(given), **abstract(rest))
        if fn in _MAPPING:
            twin = fn(*_local(args), **_local_dict(kwargs))
            return RemoteFunction(self.ranks, fn, args, kwargs, twin=twin)
        wanted = "a function of this process"
        got = f"{self.__name__}, which runs on other processes"
        fix = "apply it inside of the mapped function, or to one over a simulated mesh"
        title = f"{getattr(fn, '__name__', 'this')} cannot transform a function on a started mesh"
        return refuse(title, "fn", got, wanted, fix, TypeError)


_MAPPING = (jit, capture, intervene)
"""Functions that return a mapped function for one."""


def _local(args: Iterable[Any]) -> tuple:
    """Arguments with simulated meshes, and functions over these, in place of started ones."""
    return tuple(
        x.mesh if isinstance(x, StartedMesh) else x.twin if isinstance(x, RemoteFunction) else x
        for x in args
    )


def copy_specs(value: Any) -> Any:
    """A tree of specs of its own, which nobody changes; anything else as it is."""
    return tree.map(lambda spec: spec, value, is_leaf=is_spec) if is_specs(value) else value


def _local_dict(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _local(kwargs.values()), strict=True))


class StartedMesh(NamedAxes):
    """A mesh whose ranks are processes that this one has started; see `functron.Mesh.start`.

    Attributes:
        mesh: names and sizes of its axes.
    """

    def __init__(self, mesh: Mesh, device: str, hosts: Hosts, timeout_seconds: float):
        self.mesh = mesh
        self._processes = Processes(mesh.axes, device, hosts, timeout_seconds, _write)
        self._free: deque = deque()
        self._kinds: dict[Any, Kind] = {}
        self._layouts: list[dict[int, tuple[Any, tuple[TensorMeta, ...]]]] = [
            {} for _ in range(mesh.size)
        ]
        self._blobs: dict[bytes, bytes] = {}
        self._structures: dict[bytes, int] = {}
        self._pending: list[tuple[str, tuple]] = []
        self._numbers = 0
        self._uses: Counter[bytes] = Counter()
        self._unused: deque[bytes] = deque()
        self._apart = True
        self._metas: dict[tuple[TensorMeta, ...], tuple[TensorMeta, ...]] = {}
        self._default_dtype = torch.float32
        self._closed = ""
        self._end = weakref.finalize(self, self._processes.close)
        try:
            with self._processes.alone():
                self._processes.start(range(mesh.size))
                self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StartedMesh:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks; their values are lost."""
        with self._processes.alone():
            self._closed = self._closed or "it was closed"
            self._end()

    def __repr__(self) -> str:
        text = f"StartedMesh({self.mesh}) on {self.device}"
        dead = [rank.number for rank in self._processes.ranks if rank.died]
        if self._closed or not dead:
            return f"{text}, closed" if self._closed else f"{text}, {self.size} processes"
        return f"{text}, {list_ranks(dead)} died"

    __str__ = __repr__

    @property
    def device(self) -> str:
        """Where the ranks compute: "cpu" or "cuda"."""
        return self._processes.device

    @property
    def pids(self) -> list[int]:
        """The process of each rank on this machine."""
        ranks = self._processes.ranks
        return [rank.process.pid for rank in ranks if rank.process is not None]

    def __functron_call__(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of a function of the library for this mesh in place of a simulated one."""
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
        if fn is shard:
            return self._shard(given["value"], given["specs"])
        if fn is gather:
            return self._gather(given["value"])
        if fn is generate:
            split = [name for name in ("tokens", "lengths") if name in given]
            given |= {name: self._shard(given[name], P(DATA_AXES)) for name in split}
            return self._place(fn, (), given, P(DATA_AXES))
        if fn is init_params:
            specs = given.get("specs")
            return self._place(fn, args, kwargs, P() if specs is None else specs)
        if fn is init_state:
            for name in ("params", "masters"):  # whole here; each rank is given its own shards
                if not isinstance(given.get(name), bool | None):
                    given[name] = self._shard(self._gather(given[name]), given["specs"])
            return self._place(fn, (), given, state_specs(given["specs"], given["optimizer"]))
        if fn is compile_program:
            program, rest = given.pop("program"), {k: v for k, v in given.items() if k != "mesh"}
            return self._compile(program, rest)
        args = tuple(map(copy_specs, args))
        kwargs = {name: copy_specs(each) for name, each in kwargs.items()}
        made = fn(*_local(args), **_local_dict(kwargs))
        if isinstance(made, MappedFunction | Jitted):
            return RemoteFunction(self, fn, args, kwargs, twin=made)
        return made

    def _compile(self, program: Program, options: Mapping[str, Any]) -> RemoteFunction:
        """The executable of a program on each rank, over whole values."""
        sent = SentProgram.of(program, self.mesh)
        given = [each for each in program.inputs if each.role == "argument"]
        split = iter(given)
        specs = [P() if i in sent.static else next(split).spec for i in range(sent.num_leaves)]
        in_specs = tree.unflatten(program.in_structure, specs)
        out_specs = tree.unflatten(program.out_structure, [each.spec for each in program.outputs])
        rest = {"in_specs": in_specs, "out_specs": out_specs}
        made = RemoteFunction(self, compile_sent, (sent, self), options, **rest)
        made.__name__ = program.name
        made.donate = {int(each.path.partition("/")[0]) for each in given if each.donated}
        return made

    @public
    def run(
        self, function: Callable, *args: Any, specs: tree.Tree = _WHOLE, stages: str | None = None
    ) -> Any:
        """``function(*args)`` on each rank, with its own shards, and a bound mesh for this one.

        Args:
            function: of what each rank has; it may use torch.distributed, files and devices.
            args: trees; handles are each rank's shards, a started mesh the bound one.
            specs: a prefix tree: how the tensors of the results are parts of whole ones.
            stages: the axis of a pipeline whose ranks hold different parts of the results.

        Raises:
            ValueError: ranks that should have the same part by `specs` returned others.
        """
        return self._place(function, args, {}, specs, stages, sums=True)

    @public
    def build(
        self, make: Callable, *args: Any, in_specs: tree.Tree, out_specs: tree.Tree,
        stages: str | None = None,
    ) -> RemoteFunction:  # fmt: skip
        """The function that ``make(*args)`` returns on each rank, which may differ among them.

        For what is made of a rank's place, such as the step of a pipeline's stages:

        >>> def make(mesh):
        ...     defs = partition.local_defs(gpt.defs(config), mesh.coordinate["pp"])
        ...     return ft.make_step(ft.pipeline.gradients(stages, num_targets), ..., mesh, ...)
        >>> specs = {"in_specs": (P(), P(ft.DATA_AXES)), "out_specs": P()}
        >>> step = mesh.build(make, mesh, **specs, stages="pp")

        Args:
            make: called once on each rank.
            args: of `make`; as in `run`.
            in_specs, out_specs: prefix trees of the function's arguments and results.
            stages: the axis of a pipeline, whose ranks hold different parts of them.
        """
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        specs = {name: copy_specs(each) for name, each in specs.items()}
        return RemoteFunction(self, make, args, {}, stages=stages, **specs)

    @public
    def batches(self, function: Callable[[int], tree.Tree]) -> Callable[[int], Deferred]:
        """The batches of a function of a step's number, which ranks call: nothing is sent.

        Each rank makes the whole batch and takes its shard: ``train.loop(step, state,
        mesh.batches(batch_at), steps=100)``.
        """
        made = RemoteFunction(self, functools.partial, (function,), {})
        return lambda *args: Deferred(made, args)

    @public
    def memory(self) -> list[dict[str, int]]:
        """Of each rank that runs: ``num_values``, ``held_bytes`` of them, and ``taken_bytes``.

        The last are all that torch has taken of its GPU; 0 on CPUs.
        """
        answers = self._ask([("memory", ())])
        return [answers[number][0].value for number in sorted(answers)]

    @public
    def restart(self) -> list[Handle]:
        """Start the ranks that died again; the handles whose values are lost with them.

        A value of which another rank has the same part comes back from there; see `Handle.spec`.
        """
        with self._processes.alone():
            self._processes.find_dead()
            dead = [rank.number for rank in self._processes.ranks if rank.died]
            if not dead:
                return []
            self._refuse_closed(among_living=True)
            lost, parts = self._find_lost(dead)
            self._processes.start(dead)
            try:
                self._bring_back(dead, parts)
            except BaseException:
                self._processes.end(dead, "its restart did not end")
                raise
            for handle in lost:
                handle._fate = f"died with {list_ranks(dead)}; fix: make it again"
                self._free.append(handle._number)
        if lost:
            rows = "".join(f"\n  {handle!r}" for handle in lost[:8])
            more = f"\n  and {len(lost) - 8} more" if lost[8:] else ""
            _write(f"{list_ranks(dead)} died with {len(lost)} values:{rows}{more}\n", True)
        return lost

    def _find_lost(self, dead: Sequence[int]) -> tuple[list[Handle], dict[int, dict[int, Packed]]]:
        """The handles whose values are lost, and for each rank those that others have."""
        lost = []
        parts: dict[int, dict[int, Packed]] = {number: {} for number in dead}
        for handle in self._list_handles():
            sources = [self._twin_of(handle, number, dead) for number in dead]
            if any(source is None for source in sources):
                lost.append(handle)
                continue
            for number, source in zip(dead, sources, strict=True):
                assert source is not None
                assert isinstance(handle._number, int)
                parts[number].update(self._fetch_from(source, [handle._number]))
        return lost, parts

    def _bring_back(self, dead: Sequence[int], parts: Mapping[int, dict[int, Packed]]) -> None:
        """Give ranks that were started again what the others have."""
        for number in dead:
            self._layouts[number] = {}
        self._join()
        again: list[tuple[str, tuple]] = [("default_dtype", (self._default_dtype,))]
        again += [("define", item) for item in self._blobs.items()]
        again += [("structure", (n, blob)) for blob, n in self._structures.items()]
        for number in dead:
            self._ask([*again, ("put", (parts[number],))], [number])

    def _twin_of(self, handle: Handle, number: int, dead: Sequence[int]) -> int | None:
        """A living rank that holds the same part of a value as a dead one."""
        if handle._kind.local is not None:
            return None
        split = set(sharding.spec_axes(handle.spec))
        here = self.mesh.coordinate(number)
        for other in range(self.size):
            there = self.mesh.coordinate(other)
            if other not in dead and all(here[a] == there[a] for a in here if a in split):
                return other
        return None

    def _join(self) -> None:
        """Have all ranks make their groups."""
        self._apart = True
        self._processes.generation += 1
        request = [("join", (self._processes.generation, self._numbers))]
        self._exchange("joining the ranks", dict.fromkeys(range(self.size), request))
        self._apart = False

    def _exchange(
        self, name: str, requests: Mapping[int, Sequence[tuple[str, tuple]]]
    ) -> dict[int, list[Answer]]:
        """Ask ranks for what Ctrl-C does not interrupt; raises what they raise."""
        try:
            answers = self._processes.ask(requests, self._freed(), interruptible=False)
        except InterruptedCallError as error:
            late = f"{list_ranks(error.busy)} did not answer to {name}"
            raise KeyboardInterrupt(f"{late}: the next call waits for it") from None
        asked = [rank for rank in self._processes.ranks if rank.number in requests]
        raise_failures(name, answers, asked, self.size)
        return answers

    def _refuse_closed(self, *, among_living: bool = False) -> None:
        if self._closed:
            raise RankError(f"{self!r}: {self._closed}; fix: start another: mesh.start()")
        self._processes.find_dead()
        dead = [rank for rank in self._processes.ranks if rank.died]
        if dead and not among_living:
            ends = ", ".join(f"rank {rank.number} ({rank.died})" for rank in dead)
            fix = f"{RESTART}, which brings back what other ranks have, and names what is lost"
            raise RankError(f"{ends} died; wanted all ranks of {self.mesh}; fix: {fix}")

    def _ask(
        self, requests: Sequence, numbers: Iterable[int] | None = None
    ) -> dict[int, list[Answer]]:
        """Ask ranks for what needs no others; raises what they raise."""
        self._refuse_closed(among_living=True)
        living = [rank.number for rank in self._processes.living]
        wanted = living if numbers is None else [n for n in numbers if n in living]
        return self._exchange("a request", dict.fromkeys(wanted, requests))

    def _freed(self) -> list[int]:
        freed = []
        while self._free:
            number = self._free.popleft()
            freed.extend(number.values() if isinstance(number, dict) else [number])
        return freed

    def _fetch_from(self, rank: int, numbers: Sequence[int]) -> dict[int, Packed]:
        answers = self._ask([("fetch", (numbers,))], [rank])
        if rank not in answers:
            raise RankError(f"rank {rank} died; fix: {RESTART}")
        return answers[rank][0].value

    def _fetch(self, handles: Sequence[Handle]) -> list[torch.Tensor]:
        """The whole values, each part from one rank that has it."""
        with self._processes.alone():
            return self._fetch_alone(handles)

    def _can_fetch(self, handle: Handle) -> bool:
        """Whether a handle can be shown: all parts of its value are with ranks that run."""
        dead = [rank.number for rank in self._processes.ranks if rank.died]
        there = all(self._twin_of(handle, number, dead) is not None for number in dead)
        return there and not self._closed

    def _fetch_alone(self, handles: Sequence[Handle]) -> list[torch.Tensor]:
        if self._closed:
            self._refuse_closed()
        wanted: dict[int, list[int]] = {}
        places: list[dict[tuple, int]] = []
        living = {rank.number for rank in self._processes.living}
        for handle in handles:
            handle._check()
            if handle._ranks is not self:
                raise ValueError("a handle of another started mesh; fix: fetch it there")
            if len(handle._kind.local or ()) > 1:
                refuse("cannot fetch a value", "handle", f"{handle!r}, of a pipeline's stages",
                       "a value that every rank has a part of",
                       "collect it on the ranks: mesh.run(ft.pipeline.collect, ...)")  # fmt: skip
            parts: dict[tuple, int] = {}
            windows = sharding.windows(tuple(handle.shape), handle.spec, self.mesh)
            for rank in sorted(living.intersection(handle._kind.local or living)):
                parts.setdefault(windows[rank], rank)
            places.append(parts)
            for rank in parts.values():
                wanted.setdefault(rank, []).append(for_rank(handle._number, rank))
        found = {rank: self._fetch_from(rank, numbers) for rank, numbers in wanted.items()}
        out = []
        for handle, parts in zip(handles, places, strict=True):
            sizes = [[end - begin for begin, end in part] for part in parts]
            if sum(map(math.prod, sizes)) < handle.numel():
                raise RankError(f"a part of {handle.spec} died with its rank; fix: {RESTART}")
            whole = torch.empty(handle.shape, dtype=handle.dtype)
            for (part, rank), real in zip(parts.items(), sizes, strict=True):
                value = found[rank][for_rank(handle._number, rank)].tensor()
                value = value[tuple(slice(size) for size in real)]
                whole[tuple(slice(*ends) for ends in part)] = value
            out.append(whole)
        return out

    def _gather(self, value: tree.Tree) -> tree.Tree:
        leaves, structure = tree.flatten(value)
        handles = [leaf for leaf in leaves if isinstance(leaf, Handle)]
        found = iter(self._fetch(handles))
        out = [next(found) if isinstance(leaf, Handle) else leaf for leaf in leaves]
        return tree.unflatten(structure, out)

    def _shard(self, value: tree.Tree, specs: tree.Tree) -> tree.Tree:
        with self._processes.alone():
            return self._shard_alone(value, specs)

    def _shard_alone(self, value: tree.Tree, specs: tree.Tree) -> tree.Tree:
        flat = sharding.validate(value, specs, self.mesh)
        leaves, structure = tree.flatten(value)
        held = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Handle)}
        if held:
            own = tuple(P() if flat[i] is None else flat[i] for i in held)
            copy, specs_of = (tree.map, torch.clone), {"in_specs": (own,), "out_specs": own}
            copies = RemoteFunction(self, functools.partial, copy, {}, **specs_of)
            for i, copied in zip(held, self._call(copies, (tuple(held.values()),)), strict=True):
                leaves[i] = copied
        puts: list[dict[int, Packed]] = [{} for _ in range(self.size)]
        out = []
        for leaf, spec in zip(leaves, flat, strict=True):
            if not isinstance(leaf, torch.Tensor) or spec is None:
                out.append(leaf)
                continue
            number = self._number(1)
            for rank, packed in enumerate(self._cut(leaf, spec)):
                puts[rank][number] = packed
            out.append(Handle(self, self._kind(leaf.shape, leaf.dtype, spec), number))
        self._refuse_closed()
        requests = {rank: [("put", (values,))] for rank, values in enumerate(puts)}
        self._exchange("shard", requests)
        return tree.unflatten(structure, out)

    def _cut(self, value: torch.Tensor, spec: P) -> list[Packed]:
        """The shards of a tensor, in the order of ranks."""
        whole = Packed.of(value)
        if not sharding.spec_axes(spec):
            return [whole] * self.size
        made: dict[tuple, Packed] = {}
        windows = sharding.windows(tuple(value.shape), spec, self.mesh)
        for rank, window in enumerate(windows):
            if window not in made and sharding.is_uneven(spec):
                place = self.mesh.coordinate(rank)
                made[window] = Packed.of(sharding.shard(value, spec, self.mesh, place))
            elif window not in made:
                made[window] = whole.part(window)
        return [made[window] for window in windows]

    def _number(self, count: int) -> int:
        self._numbers += count
        return self._numbers - count

    def _kind(
        self, shape: Sequence[int], dtype: torch.dtype, spec: P, device: str = "", local: Any = None
    ) -> Kind:
        key = tuple(shape), dtype, spec, device or self.device, local and tuple(local.items())
        if key not in self._kinds:
            self._kinds[key] = Kind(*key[:4], local)
        return self._kinds[key]

    def _list_handles(self) -> list[Handle]:
        """The handles that there are."""
        gc.unfreeze()  # else some would not be found
        found = [each for each in gc.get_objects() if type(each) is Handle]
        return [handle for handle in found if handle._ranks is self and not handle._fate]

    def _place(
        self, fn: Callable, args: tuple, kwargs: Mapping[str, Any], specs: Any,
        stages: str | None = None, *, sums: bool = False,
    ) -> Any:  # fmt: skip
        """``fn(*args, **kwargs)`` on each rank: tensors are parts of whole ones by `specs`."""
        made = RemoteFunction(
            self, functools.partial, (fn, *args), kwargs, out_specs=specs, stages=stages
        )
        made.sums, made._once = sums, True
        try:
            return self._call(made, ())
        finally:
            if made._sent is not None:
                self._unused.append(made._sent[0])
                made._sent = None

    def _forget_unused(self) -> None:
        """Have the ranks forget functions that are no more, with the next call."""
        while self._unused:
            key = self._unused.popleft()
            self._uses[key] -= 1
            if self._uses[key] <= 0:
                del self._uses[key]
                self._pending.append(("forget", ([key],)))
                self._blobs.pop(key, None)

    def _define(self, function: RemoteFunction) -> bytes:
        """The key of a function as it is now, which the ranks are told with the next call."""
        if function._sent is not None and not function._sent[1].changed():
            return function._sent[0]

        used: list[UsedValue] = []

        def refer(obj: Any) -> Any:
            if obj is self:
                return "mesh", None
            if isinstance(obj, Handle):
                obj._check()
                return "value", obj._number
            if isinstance(obj, RemoteFunction):
                used.append(UsedValue.of(lambda: self._define(obj)))
                return "function", used[-1].value
            if isinstance(obj, StartedMesh):
                raise ValueError(f"{obj!r} is used by a function on {self!r}; wanted one of them")
            return None

        try:
            blob, shipper = dump_function(function._recipe, refer)
        except ValueError as error:  # of `refer`
            raise error.with_traceback(None) from None
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            refuse_unsendable(function.__name__, function._recipe, refer, error)
        key = hashlib.sha256(blob).digest()[:16]
        if shipper.tensor_bytes > 1 << 20 and key not in self._blobs:
            size = f"{shipper.tensor_bytes / 2**20:.1f} MiB"
            _write(
                f"{function.__name__} closes over tensors of {size}, which each rank gets\n", True
            )
        if key not in self._blobs:
            self._pending.append(("define", (key, blob)))
            self._blobs[key] = blob
        self._uses[key] += 1
        if function._sent is not None:
            self._unused.append(function._sent[0])
            if function._sent[0] != key:
                function.renew()
        function._sent = key, UsedValues([*used, *shipper.seen, *function.list_given()])
        return key

    def _plan(self, function: RemoteFunction, args: tuple) -> tuple[Plan, list]:
        """How arguments like these are sent, and their leaves."""
        leaves, structure = tree.flatten(args)
        kinds = tuple([leaf._kind if type(leaf) is Handle else kind_of(leaf) for leaf in leaves])
        key: Any = structure, kinds
        if function.traces:
            key = *key, *[x for x in leaves if not isinstance(x, Handle | torch.Tensor)]
        try:
            plan = function._plans.get(key)
        except TypeError:  # a static argument without a hash: anew every time
            key, plan = object(), None
            function._plans.clear()
        if plan is not None:
            return plan, leaves
        out_specs = function.find_out_specs(args)
        specs, paths, moves = self._bind_specs(function, args), tree.paths(args), {}
        for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(leaf, Handle) and isinstance(spec, P) and leaf._kind.local is None:
                ndim = leaf.ndim
                if sharding.dim_axes(leaf.spec, ndim) != sharding.dim_axes(spec, ndim):
                    moves[index] = leaf.spec, spec
        consumed = [
            i
            for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
            if isinstance(leaf, Handle) and int(path.partition("/")[0]) in function.donate
        ]
        slots = tree.unflatten(structure, [ResultSlot(i) for i in range(len(leaves))])
        blob = dump(slots)[0]
        if blob not in self._structures:
            self._pending.append(("structure", (len(self._structures), blob)))
        number = self._structures.setdefault(blob, len(self._structures))
        plan = function._plans[key] = Plan(number, specs, moves, consumed, paths, out_specs, {})
        return plan, leaves

    def _bind_specs(self, function: RemoteFunction, args: tuple) -> list:
        """A spec for each leaf of the arguments; for one that ranks make, its prefix tree."""
        if isinstance(function.in_specs, P):
            prefix: tuple = (function.in_specs,) * len(args)
        else:
            prefix = tuple(function.in_specs)
        if len(prefix) != len(args):
            raise ValueError(
                f"{function.__name__}: got {len(args)} arguments; wanted {len(prefix)}"
            )
        specs = []
        mapped = function._mapped
        if mapped is not None and not any(isinstance(a, Deferred) for a in args):
            # sizes are checked as a simulated mesh checks them
            return list(mapped._flatten(abstract(args))[2])
        for arg, each in zip(args, prefix, strict=True):
            if isinstance(arg, Deferred):
                specs.append(each)
            else:
                specs += tree.broadcast_prefix(each, arg, is_leaf=is_spec, what="in_specs")
        return specs

    def _call(self, function: RemoteFunction, args: tuple) -> Any:
        """Call a function on all ranks."""
        with self._processes.lock:
            self._refuse_closed()
            if compat.transforms_active():
                raise ValueError(f"{function.__name__}: got a function on a started mesh under a "
                                 "transform of torch.func; fix: transform the function that is "
                                 "mapped")  # fmt: skip
            self._forget_unused()
            key = self._define(function)
            if torch.get_default_dtype() is not self._default_dtype:
                self._default_dtype = torch.get_default_dtype()
                self._pending.append(("default_dtype", (self._default_dtype,)))
            plan, leaves = self._plan(function, args)
            with self._processes.alone(GRACE_SECONDS if plan.consumed else 0.0):
                return self._call_alone(function, key, plan, leaves)

    def _call_alone(self, function: RemoteFunction, key: bytes, plan: Plan, leaves: list) -> Any:
        name = function.__name__
        if self._apart:
            self._join()
        sent = [
            leaf._number
            if type(leaf) is Handle and not leaf._fate and leaf._ranks is self
            else self._encode(name, plan, i, leaf)
            for i, leaf in enumerate(leaves)
        ]
        consumed = [leaves[i] for i in plan.consumed]
        given_up = [handle._number for handle in consumed]
        first = self._numbers
        call = Call(key, plan.arguments, sent, plan.moves, given_up, first, function.sums)
        calls = deal(call, plan.consumed, self._pending, self.size)
        try:
            answers = self._processes.ask(calls, self._freed())
            self._pending = []
        except InterruptedCallError as interrupt:
            if not interrupt.sent:
                raise KeyboardInterrupt(f"{name} was not called") from None
            self._pending = []
            self._abandon(name, interrupt.answers, consumed, first, "Ctrl-C")
            told = f"{name} was interrupted on all ranks"
            if interrupt.busy:
                told = f"{name} was given up, but {list_ranks(interrupt.busy)} could not be "
                told += "interrupted: the next call waits for the end of it; or end the process, "
                pids = [self._processes.ranks[n].process for n in interrupt.busy]
                numbers = " ".join(str(each.pid) for each in pids if each is not None)
                told += f"kill -9 {numbers}, and start it again: mesh.restart()"
            raise KeyboardInterrupt(told) from None
        failed = len(answers) < self.size or any(a[-1].failure for a in answers.values())
        show_warnings(answers, self.size)
        if failed:
            self._abandon(name, answers, consumed, first, "an error")
            raise_failures(name, answers, self._processes.ranks, self.size)
        fate = f"was donated to {name}; fix: use the result in its place, or donate a clone"
        for handle in consumed:
            handle._fate = fate
        return self._results_of(function, plan, {n: a[-1].value for n, a in answers.items()}, first)

    def _encode(self, name: str, plan: Plan, index: int, leaf: Any) -> Any:
        """A leaf as it is sent: a list of one for each rank, or the same for all."""
        if isinstance(leaf, Handle):
            if leaf._fate:
                raise ValueError(
                    f"{name}: argument {plan.paths[index]}: got a value that {leaf._fate}"
                )
            if leaf._ranks is not self:
                raise ValueError(f"{name}: argument {plan.paths[index]} is of another started mesh")
            return leaf._number
        spec = plan.specs[index]
        if isinstance(leaf, Deferred):
            return "made", self._define(leaf.function), leaf.args, spec
        if isinstance(leaf, torch.Tensor) and spec is not None:
            if leaf.requires_grad and torch.is_grad_enabled():
                fix = "detach it, or compute gradients inside of the function"
                what = f"{name}: argument {plan.paths[index]} requires gradients, which end here"
                raise ValueError(f"{what}; fix: {fix}")
            return self._cut(leaf, spec)
        return "as it is", leaf

    def _abandon(
        self,
        name: str,
        answers: dict[int, list[Answer]],
        consumed: Sequence[Handle],
        first: int,
        why: str,
    ) -> None:
        """Make the ranks and handles consistent again after a call that did not end everywhere."""
        ends = {number: found[-1] for number, found in answers.items()}
        failures = {number: end.failure for number, end in ends.items() if end.failure}
        done = [number for number, end in ends.items() if end.failure is None]
        begun = len(ends) < self.size or bool(done)
        for handle in consumed:
            numbers = handle._number
            gone = begun or any(
                for_rank(numbers, rank) in failure.gone for rank, failure in failures.items()
            )
            if gone:
                handle._fate = f"was being updated when {name} was ended by {why}; fix: go on from "
                handle._fate += "the newest checkpoint, or from a new state"
                self._free.append(numbers)
        for number in done:
            kept = ends[number].value
            if isinstance(kept, KeptResults):
                _, metas = self._layout(number, kept)
                self._number(max(0, first + len(metas) - self._numbers))
                self._free.extend(range(first, first + len(metas)))
        ways = {(failure.kind, failure.frames) for failure in failures.values()}
        closed = any(failure.closed for failure in failures.values())
        # some may have sent what others do not wait for, unless all failed at one place
        if why == "Ctrl-C" or begun or closed or len(ways) > 1:
            self._apart = True
            if len(ends) == self.size:
                self._join()

    def _layout(self, rank: int, kept: KeptResults) -> tuple[Any, tuple[TensorMeta, ...]]:
        known = self._layouts[rank]
        if kept.new is None:
            return known[kept.layout]
        metas = self._metas.setdefault(kept.new[1], kept.new[1])
        found = load(kept.new[0]), metas
        if kept.layout:
            known[kept.layout] = found
        return found

    def _results_of(
        self, function: RemoteFunction, plan: Plan, kept: dict[int, KeptResults], first: int
    ) -> Any:
        """The results of a call, with handles in the place of tensors."""
        layouts = {rank: self._layout(rank, each) for rank, each in sorted(kept.items())}
        shown, metas = layouts[0]
        most = max(len(each) for _, each in layouts.values())
        self._number(most)
        key = kept[0].layout
        if not function.by_stage:
            texts = {each.new[0] for each in kept.values() if not each.layout and each.new}
            if len(texts) > 1 or any(each[1] is not metas for each in layouts.values()):
                compare_shown(layouts)
        if function.by_stage or any(each[1] is not metas for each in layouts.values()):
            return self._results_by_stage(plan, layouts, first)
        found = plan.results.get(key)
        if found is None:
            flat = tree.broadcast_prefix(plan.out_specs, shown, is_leaf=is_spec, what="out_specs")
            leaves, structure = tree.flatten(shown, is_leaf=is_slot)
            refuse_split_statics(tree.paths(shown, is_slot), leaves, flat)
            rows: list[Any] = []
            for leaf, spec in zip(leaves, flat, strict=True):
                if isinstance(leaf, ResultSlot):
                    meta = metas[leaf.index]
                    spec = spec if isinstance(spec, P) else P()
                    shape = sharding.global_shape(meta.shape, spec, self.mesh)
                    leaf = Row(leaf.index, self._kind(shape, meta.dtype, spec, meta.device))
                rows.append(leaf)
            found = rows, structure
            if key:
                plan.results[key] = found
        if function.sums:
            compare_sums(*found, {rank: each.sums for rank, each in kept.items()}, self.mesh)
        scalars = kept[0].numbers.get
        out = [
            Handle(self, row.kind, first + row.index, scalars(row.index))
            if type(row) is Row
            else row
            for row in found[0]
        ]
        return tree.unflatten(found[1], out)

    def _results_by_stage(self, plan: Plan, layouts: dict, first: int) -> Any:
        def make(meta: TensorMeta, spec: P, numbers: dict, shapes: dict) -> Handle:
            shape = sharding.global_shape(meta.shape, spec, self.mesh)
            kind = self._kind(shape, meta.dtype, spec, meta.device, shapes if shape else None)
            return Handle(self, kind, numbers)

        return join_stages(layouts, plan.out_specs, first, make)


def _write(text: str, is_error: bool) -> None:
    stream = sys.stderr if is_error else sys.stdout
    stream.write(text)
    stream.flush()


def start(
    mesh: Mesh,
    device: str = "auto",
    *,
    hosts: str = "",
    num_local: int | None = None,
    token: str = "",
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> StartedMesh:
    """Start a process for each rank of a mesh; see `functron.Mesh.start`.

    Args:
        mesh: names and sizes of axes.
        device: "auto", "cpu" or "cuda".
        hosts: an address of this machine, "host:port", where ranks of other hosts join, which
            torchrun starts there: ``FUNCTRON_TOKEN=... torchrun --nproc-per-node 4 -m functron join
            host:port``. What comes over these connections is run: use an address of a network of
            your own. Empty: all ranks run on this machine, and no other one reaches it.
        num_local: how many ranks run on this machine, the first ones; None: all.
        token: the word that processes of other hosts must have; empty: a new one, which is shown.
        timeout_seconds: after which a collective gives up on ranks that do not come to it.

    Raises:
        ValueError: no such device or address; or cloudpickle is not installed.
        RuntimeError: a process did not start, or did not come.
    """
    require_cloudpickle()
    here = mesh.size if num_local is None else num_local
    found = []
    if device not in ("auto", "cpu", "cuda"):
        found.append(Problem("device", repr(device), '"auto", "cpu" or "cuda"'))
    if not 0 <= here <= mesh.size:
        found.append(Problem("num_local", str(here), f"from 0 to {mesh.size} ranks"))
    elif (here < mesh.size) != bool(hosts):
        got, wanted = (
            f"{here} of {mesh.size} ranks here, hosts={hosts!r}",
            "an address for the rest",
        )
        found.append(Problem("num_local", got, wanted, "give both, or neither"))
    if hosts and not (hosts.rpartition(":")[0] and hosts.rpartition(":")[2].isdecimal()):
        found.append(Problem("hosts", repr(hosts), 'an address such as "10.0.0.1:29400"'))
    raise_problems("cannot start the ranks", found)
    return StartedMesh(mesh, device, Hosts(hosts, here, token), timeout_seconds)
