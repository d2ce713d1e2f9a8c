"""A started mesh: ranks that are processes, called from a notebook as a simulated mesh is.

>>> with ft.Mesh(dp=2, tp=2).start() as mesh:
...     step = ft.jit(ft.make_step(gradients, optimizer, mesh, specs), donate=0)
...     state = ft.init_state(key, defs, specs, optimizer, mesh)
...     state, metrics = step(state, batch)

Functions take and return whole values. Those that the ranks hold are `Handle`s here: leaves with a
shape, a dtype and a spec, fetched when they are looked at. What is made of a started mesh is made
again on each rank, of the bound mesh there, from the same arguments; so a program is the one that
torchrun would run, to the bit.

A short call whose results are known to be like those of the calls before returns at once, and the
next one is sent while the ranks run it: see `StartedMesh.block_until_ready`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from functron.apps.notebook.handles import (
    Deferred,
    Handle,
    Kind,
    KnownResults,
    LateCall,
    Plan,
    Row,
    SentCall,
    compare_shown,
    compare_sums,
    cut,
    deal,
    find_rows,
    find_twin,
    for_rank,
    join_parts,
    join_stages,
)
from functron.apps.notebook.processes import (
    GRACE_SECONDS,
    RESTART,
    Hosts,
    InterruptedCallError,
    Processes,
    RankError,
    raise_failures,
    show_text,
    show_warnings,
)  # fmt: skip
from functron.apps.notebook.remote_functions import (
    RemoteFunction,
    copy_specs,
    find_own_line,
    local,
    local_dict,
    wait_after_cells,
)
from functron.apps.notebook.shipping import (
    Packed,
    SentProgram,
    compile_sent,
    load,
    require_cloudpickle,
)  # fmt: skip
from functron.apps.notebook.worker import Answer, Call, KeptResults, TensorMeta
from functron.compiler.executable import compile as compile_program
from functron.compiler.jit import Jitted
from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.models.generation import generate
from functron.program.trace import Program
from functron.spmd import DATA_AXES, Mesh, P, gather, shard
from functron.spmd import spec as sharding
from functron.spmd.flight import list_ranks
from functron.spmd.mesh import NamedAxes
from functron.spmd.params import init_params
from functron.spmd.shard_map import MappedFunction
from functron.training.step import init_state, state_specs

_WHOLE = P()
_TIMEOUT_SECONDS = 300.0
_AHEAD_SECONDS = GRACE_SECONDS / 3
"""Longer calls are waited for: Ctrl-C has no time to let one end, and another one behind it."""
_BEHIND_BYTES = 1 << 16
"""More are not sent to a rank that runs: the sender would have to wait until it takes them."""
_FROM_CHECKPOINT = "go on from the newest checkpoint, or from a new state"


class StartedMesh(NamedAxes):
    """A mesh whose ranks are processes that this one has started; see `functron.Mesh.start`.

    Attributes:
        mesh: names and sizes of its axes.
        given: the arguments of the last call that failed after it had returned, where what it was
            to consume is whole; see `block_until_ready`.
    """

    def __init__(self, mesh: Mesh, device: str, hosts: Hosts, timeout_seconds: float):
        self.mesh = mesh
        self._processes = Processes(mesh.axes, device, hosts, timeout_seconds, show_text)
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
        self._late: LateCall | None = None
        self._warned: deque[dict[int, list[Answer]]] = deque()
        self.given: tuple | None = None
        self._closed = ""
        self._unregister = wait_after_cells(self)
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

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None:
            self._late = None  # one error is enough; what failed is shown
        self.close()

    def close(self) -> None:
        """End the ranks; their values are lost. Raises what a call raised that was not awaited."""
        with self._processes.alone():
            try:
                if not self._closed:
                    self.block_until_ready()
            finally:
                self._closed = self._closed or "it was closed"
                self._unregister()
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
        started = type(self)
        made = fn(*local(args, started), **local_dict(kwargs, started))
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
            try:
                self.block_until_ready()
            except (Exception, KeyboardInterrupt) as error:  # it is to go on after an error
                show_text(f"{type(error).__name__}: {error}\n", True)
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
            show_text(f"{list_ranks(dead)} died with {len(lost)} values:{rows}{more}\n", True)
        return lost

    def _find_lost(self, dead: Sequence[int]) -> tuple[list[Handle], dict[int, dict[int, Packed]]]:
        """The handles whose values are lost, and for each rank those that others have."""
        lost = []
        parts: dict[int, dict[int, Packed]] = {number: {} for number in dead}
        for handle in self._list_handles():
            sources = [find_twin(handle, number, dead) for number in dead]
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
        self.block_until_ready()
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
            self.block_until_ready()  # which names the call in which they died
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
        there = all(find_twin(handle, number, dead) is not None for number in dead)
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
        return [join_parts(*each, found) for each in zip(handles, places, strict=True)]

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
            for rank, packed in enumerate(cut(leaf, spec, self.mesh)):
                puts[rank][number] = packed
            out.append(Handle(self, self._kind(leaf.shape, leaf.dtype, spec), number))
        self._refuse_closed()
        requests = {rank: [("put", (values,))] for rank, values in enumerate(puts)}
        self._exchange("shard", requests)
        return tree.unflatten(structure, out)

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
                self._blobs.pop(key, None)
                self._pending.append(("forget", ([key],)))

    def _call(self, function: RemoteFunction, args: tuple) -> Any:
        """Call a function on all ranks."""
        self._processes.check_owner()  # a fork has the lock as it was, which nobody may release
        with self._processes.lock:
            self._refuse_closed()
            self._show_warnings()  # filters may raise them: nothing has been sent yet
            if compat.transforms_active():
                raise ValueError(f"{function.__name__}: got a function on a started mesh under a "
                                 "transform of torch.func; fix: transform the function that is "
                                 "mapped")  # fmt: skip
            self._forget_unused()
            late, key = self._late, function.define()
            if torch.get_default_dtype() is not self._default_dtype:
                wanted = torch.get_default_dtype()  # Ctrl-C may come between any two lines
                self._pending.append(("default_dtype", (wanted,)))
                self._default_dtype = wanted
            plan, leaves = function.plan(args)
            known = self._foresee(function, plan)
            for index in plan.deferred:
                leaves[index].function.define()
            if known is None or self._pending or plan.num_bytes > _BEHIND_BYTES:
                self.block_until_ready()
            if self._late is not late:  # its results may be of other kinds
                plan, leaves = function.plan(args)
                known = self._foresee(function, plan)
            grace = GRACE_SECONDS if plan.consumed or known is not None else 0.0
            with self._processes.alone(grace):
                try:
                    return self._call_alone(function, key, plan, leaves, known, args)
                finally:
                    if self._late is None:
                        self._show_warnings()

    def _call_alone(
        self, function: RemoteFunction, key: bytes, plan: Plan, leaves: list,
        known: KnownResults | None, args: tuple,
    ) -> Any:  # fmt: skip
        call = self._send(function, key, plan, leaves, known)
        before, self._late = self._late, None
        if before is not None and self._finish(before, call):
            return self._call(function, args)
        kept = self._answers_of(call) if known is None else None
        fate = f"was donated to {call.name}; fix: use the result in its place, or donate a clone"
        for handle in call.consumed:
            handle._fate = fate
        if kept is not None:
            return self._results_of(call, kept)
        assert known is not None
        return self._expect(call, known, args)

    def _foresee(self, function: RemoteFunction, plan: Plan) -> KnownResults | None:
        """The results that a call will have, where it need not be waited for; None: it must be.

        Ctrl-C leaves such a call, and one before it, the time to end.
        """
        known = plan.known
        if known is None or not plan.plain or plan.seconds > _AHEAD_SECONDS or function.sums:
            return None
        current = known.generation == self._processes.generation and not self._apart
        return known if current else None

    def _expect(self, call: SentCall, known: KnownResults, args: tuple) -> Any:
        """The results of a call that is not waited for."""
        self._number(known.count)
        made = [Handle(self, row.kind, i) for i, row in enumerate(known.rows, call.first)]
        self._late = LateCall(call, known, made, args, find_own_line())
        return tree.unflatten(known.structure, made)

    @public
    def block_until_ready(self) -> bool:
        """Wait for the call that was not waited for, if there is one; whether there was.

        A call whose results are known to be like those before returns at once, and the ranks
        begin with it when they have ended the one before. Looking at its results waits for it, and
        so do the next call, all else that is asked of the ranks, and the end of a notebook's cell.
        These raise what it raised, with its line.

        Raises:
            RankError: a rank died in it. What ranks raised in it is raised as well.
        """
        if self._late is None:
            return False
        with self._processes.alone():
            late, self._late = self._late, None
            try:
                if late is not None:
                    self._finish(late)
            finally:
                self._show_warnings()
        return late is not None

    def _show_warnings(self) -> None:
        while self._warned:
            show_warnings(self._warned.popleft(), self.size)

    def _finish(self, late: LateCall, behind: SentCall | None = None) -> bool:
        """Wait for a call whose results are handles already.

        Args:
            late: the call.
            behind: the one that was sent after it.

        Returns:
            Whether ranks have left out the one behind it, since results are of other kinds.
        """
        call, known = late.call, late.known
        kept = self._answers_of(call, late, behind)
        scalars = kept[0].numbers
        call.plan.seconds = max(each.seconds for each in kept.values())
        if all(kept[rank].layout == number for rank, number in enumerate(known.layouts)):
            for index, number in scalars.items():
                late.made[index]._scalar = number
            self.given = None
            return False
        call.plan.known = None
        try:
            out = self._results_of(call, kept)
        except Exception as error:
            error.add_note(late.where)
            answers = {number: [Answer(each)] for number, each in kept.items()}
            self._give_up([(call, answers), *self._end_behind(behind)], late, "its results")
            raise
        ended = self._end_behind(behind)
        if any(each[-1].begun for _, found in ended for each in found.values()):
            self._give_up(ended, None, "results of other kinds on some ranks")
        self._replace_made(late, out)
        return True

    def _replace_made(self, late: LateCall, out: Any) -> None:
        """Have handles stand for results of other kinds than expected.

        Raises:
            ValueError: the tree is another one; handles stand for what is at their place in it.
        """
        name, structure, real = late.call.name, tree.structure(out), dict(tree.items(out))
        paths = tree.paths(tree.unflatten(late.known.structure, late.made))
        for path, handle in zip(paths, late.made, strict=True):
            other = real.get(path)
            if type(other) is Handle:
                handle._kind, handle._number = other._kind, other._number
                handle._scalar, other._fate = other._scalar, "has another handle"
            else:
                handle._fate = f"was not made: {name} returned other results; fix: call it again"
        if structure == late.known.structure and not any(each._fate for each in late.made):
            return
        self.given = None if late.call.consumed else late.args
        got, wanted = f"{structure}", f"{late.known.structure}, as in the calls before"
        fix = "go on with what both have; the next call waits for its results"
        try:
            refuse("a call returned what was not expected", name, got, wanted, fix)
        except ValueError as error:
            error.add_note(late.where)
            raise

    def _send(
        self, function: RemoteFunction, key: bytes, plan: Plan, leaves: list,
        known: KnownResults | None,
    ) -> SentCall:  # fmt: skip
        """Send a call to all ranks."""
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
        expected = () if known is None else known.layouts
        if plan.shared[0] != (key, expected):
            dtypes, slots = {i: leaves[i].dtype for i in plan.windows}, (plan.moves, plan.consumed)
            call = Call(key, plan.arguments, dtypes, *slots, function.sums, expected)
            plan.shared = (key, expected), pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        first = self._numbers
        calls = deal(plan.shared[1], sent, first, self._pending, self.size)
        grace = GRACE_SECONDS if consumed or expected else 0.0
        try:
            asked = self._processes.send(calls, self._freed(), grace_seconds=grace)
        except InterruptedCallError:
            raise KeyboardInterrupt(f"{name} was not called") from None
        self._pending = []
        return SentCall(function, plan, consumed, first, asked)

    def _answers_of(
        self, call: SentCall, late: LateCall | None = None, behind: SentCall | None = None
    ) -> dict[int, KeptResults]:
        """The answers of ranks to a call; raises what ended it."""
        name, ranks = call.name, self._processes.ranks
        try:
            answers = self._processes.collect(call.sent)
        except InterruptedCallError as interrupt:
            self._give_up([(call, interrupt.answers), *self._end_behind(behind)], late, "Ctrl-C")
            told = f"{name} was interrupted on all ranks"
            if interrupt.busy:
                told = f"{name} was given up, but {list_ranks(interrupt.busy)} could not be "
                told += "interrupted: the next call waits for the end of it; or end the process, "
                pids = [ranks[n].process for n in interrupt.busy]
                numbers = " ".join(str(each.pid) for each in pids if each is not None)
                told += f"kill -9 {numbers}, and start it again: mesh.restart()"
            raise KeyboardInterrupt(told) from None
        self._warned.append(answers)
        if len(answers) < self.size or any(a[-1].failure for a in answers.values()):
            self._give_up([(call, answers), *self._end_behind(behind)], late, "an error")
            raise_failures(name, answers, ranks, self.size, late.where if late else "")
        return {number: answer[-1].value for number, answer in answers.items()}

    def _end_behind(self, behind: SentCall | None) -> list[tuple[SentCall, dict]]:
        """End a call that was sent after one that failed; and its answers."""
        if behind is None:
            return []
        try:
            return [(behind, self._processes.collect(behind.sent, ends=True))]
        except InterruptedCallError as interrupt:
            return [(behind, interrupt.answers)]

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
            return "made", leaf.function.define(), leaf.args, spec
        if isinstance(leaf, torch.Tensor) and spec is not None:
            if leaf.requires_grad and torch.is_grad_enabled():
                fix = "detach it, or compute gradients inside of the function"
                what = f"{name}: argument {plan.paths[index]} requires gradients, which end here"
                raise ValueError(f"{what}; fix: {fix}")
            windows = plan.windows[index]
            if windows is None:
                return [part.sent() for part in cut(leaf, spec, self.mesh)]
            numbers = Packed.of(leaf).numbers
            parts = [Packed(numbers[window], leaf.dtype).sent() for window in windows[0]]
            return [parts[i] for i in windows[1]]
        return "as it is", leaf

    def _give_up(
        self,
        calls: Sequence[tuple[SentCall, dict[int, list[Answer]]]],
        late: LateCall | None,
        why: str,
    ) -> None:
        """Make the ranks and handles consistent again after calls that did not end everywhere.

        Args:
            calls: these, with the answers that came.
            late: the first of them, if its results are handles already.
            why: it ended.
        """
        apart, ended = why == "Ctrl-C", True
        for call, answers in calls:
            ends = {number: found[-1] for number, found in answers.items()}
            failures = {number: end.failure for number, end in ends.items() if end.failure}
            done = [number for number, end in ends.items() if end.failure is None]
            begun = len(ends) < self.size or bool(done)
            for handle in call.consumed:
                numbers = handle._number
                gone = begun or any(
                    for_rank(numbers, rank) in failure.gone for rank, failure in failures.items()
                )
                handle._fate = ""
                if gone:
                    told = f"was being updated when {call.name} was ended by {why}"
                    handle._fate = f"{told}; fix: {_FROM_CHECKPOINT}"
                    self._free.append(numbers)
            for number in done:
                kept = ends[number].value
                if isinstance(kept, KeptResults):
                    _, metas = self._layout(number, kept)
                    self._number(max(0, call.first + len(metas) - self._numbers))
                    self._free.extend(range(call.first, call.first + len(metas)))
            ways = {(failure.kind, failure.frames) for failure in failures.values()}
            closed = any(failure.closed for failure in failures.values())
            # some may have sent what others do not wait for, unless all failed at one place
            apart |= begun or closed or len(ways) > 1
            ended &= len(ends) == self.size
        if late is not None:
            whole = not any(handle._fate for handle in late.call.consumed)
            fix = "what it was given is whole: mesh.given" if whole else _FROM_CHECKPOINT
            self.given = late.args if whole else None
            for handle in late.made:
                handle._fate = f"was not made: {late.call.name} was ended by {why}; fix: {fix}"
        if apart:
            self._apart = True
            if ended:
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

    def _results_of(self, call: SentCall, kept: dict[int, KeptResults]) -> Any:
        """The results of a call, with handles in the place of tensors."""
        function, plan, first = call.function, call.plan, call.first
        layouts = {rank: self._layout(rank, each) for rank, each in sorted(kept.items())}
        shown, metas = layouts[0]
        most = max(len(each) for _, each in layouts.values())
        self._number(max(0, first + most - self._numbers))
        key = kept[0].layout
        if not function.by_stage:
            texts = {each.new[0] for each in kept.values() if not each.layout and each.new}
            if len(texts) > 1 or any(each[1] is not metas for each in layouts.values()):
                compare_shown(layouts)
        if function.by_stage or any(each[1] is not metas for each in layouts.values()):
            return self._results_by_stage(plan, layouts, first)
        rows, structure = plan.results.get(key) or find_rows(
            plan.out_specs, shown, metas, self.mesh, self._kind
        )
        if key:
            plan.results[key] = rows, structure
            same = all(each == (rows, structure) for each in plan.results.values())
            numbers = tuple([each.layout for _, each in sorted(kept.items())])
            known = KnownResults(self._processes.generation, numbers, rows, structure, len(metas))
            plan.known = known if same else None
            plan.seconds = max(each.seconds for each in kept.values())
        if function.sums:
            compare_sums(
                rows, structure, {rank: each.sums for rank, each in kept.items()}, self.mesh
            )
        scalars = kept[0].numbers.get
        out = [
            Handle(self, row.kind, first + row.index, scalars(row.index))
            if type(row) is Row
            else row
            for row in rows
        ]
        return tree.unflatten(structure, out)

    def _results_by_stage(self, plan: Plan, layouts: dict, first: int) -> Any:
        def make(meta: TensorMeta, spec: P, numbers: dict, shapes: dict) -> Handle:
            shape = sharding.global_shape(meta.shape, spec, self.mesh)
            kind = self._kind(shape, meta.dtype, spec, meta.device, shapes if shape else None)
            return Handle(self, kind, numbers)

        return join_stages(layouts, plan.out_specs, first, make)


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
        got, wanted = f"{here} of {mesh.size} ranks here, {hosts=}", "an address for the rest"
        found.append(Problem("num_local", got, wanted, "give both, or neither"))
    if hosts and not (hosts.rpartition(":")[0] and hosts.rpartition(":")[2].isdecimal()):
        found.append(Problem("hosts", repr(hosts), 'an address such as "10.0.0.1:29400"'))
    raise_problems("cannot start the ranks", found)
    return StartedMesh(mesh, device, Hosts(hosts, here, token), timeout_seconds)
