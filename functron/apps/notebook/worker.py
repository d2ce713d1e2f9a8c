"""The program of a rank: it keeps values, and runs on them what a notebook asks for.

A rank has two connections to the notebook. Over one come requests, which it answers in order. Over
the other come questions while it runs: where it is, that it shall stop. A thread answers these; it
also ends the process, and those that it started, when the notebook is gone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from functron.apps.notebook.shipping import (
    LeafReader,
    Packed,
    dump,
    load,
    load_function,
    receive_message,
    send_message,
)  # fmt: skip
from functron.core import compat, tree
from functron.core.errors import is_library, refuse
from functron.spmd import BoundMesh, Mesh, P, gather, shard
from functron.spmd.donation import Donated, refuse_donated
from functron.spmd.flight import FlightRecorder

CONNECT_SECONDS = 300.0
"""How long a process waits for the notebook to listen."""
_LOOK_SECONDS = 2.0
_JOIN_SECONDS = 60.0
_NUM_CALLS = 256


class WorkerPlace(NamedTuple):
    """The place of a process among the ranks, as it is told.

    Attributes:
        rank: of the mesh.
        local_rank, num_local: of those on this machine.
        mesh: names and sizes of its axes.
        device: "cpu" or "cuda".
        timeout_seconds: of collectives.
        store: where all ranks meet: a host and a port.
    """

    rank: int
    local_rank: int
    num_local: int
    mesh: tuple[tuple[str, int], ...]
    device: str
    timeout_seconds: float
    store: tuple[str, int]


class Hello(NamedTuple):
    """The first words of a process that connects.

    Attributes:
        number: of the rank, as the notebook has started it; of the process in torchrun's job, where
            that has.
        kind: of the connection: "requests" or "questions".
        host: the name of its machine; "": that of the notebook.
        local_rank, num_local: of those on this machine.
        device: "cpu" or "cuda".
    """

    number: int
    kind: str
    host: str
    local_rank: int
    num_local: int
    device: str


class Absent(NamedTuple):
    """A value that this rank of a pipeline does not hold."""


class ResultSlot(NamedTuple):
    """The place of a tensor among the results of a call."""

    index: int


class TensorMeta(NamedTuple):
    """The shape, dtype and device of a tensor that a rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def is_number(self) -> bool:
        """Whether it is a number of a CPU, which is sent along with an answer."""
        return not self.shape and self.device == "cpu" and not self.dtype.is_complex


class ResultLayout(NamedTuple):
    """Results of one kind, all of them tensors.

    Attributes:
        number: of it.
        reader: of the results.
        kinds: their shapes, dtypes, layouts and devices.
        scalars: the places of numbers among them.
        num_bytes: of each.
    """

    number: int
    reader: LeafReader
    kinds: tuple[list, list, list, list]
    scalars: list[int]
    num_bytes: list[int]


class KeptResults(NamedTuple):
    """A description of the results that a rank keeps.

    Attributes:
        layout: the number of their structure, shapes and dtypes; 0: they hold values besides
            tensors, and are described each time.
        new: these, where they are new: the pickled structure with `ResultSlot`s, and a
            `TensorMeta` each.
        numbers: scalars of a CPU, by slot.
        sums: checksums of all tensors, where they were asked for.
        seconds: that the call took.
    """

    layout: int
    new: tuple[bytes, tuple[TensorMeta, ...]] | None
    numbers: dict[int, bool | int | float]
    sums: tuple[int, ...] = ()
    seconds: float = 0.0


class TracebackLine(NamedTuple):
    """A line of a traceback."""

    file: str
    number: int
    name: str
    own: bool


class Failure(NamedTuple):
    """An exception that ended a request.

    Attributes:
        error: the exception, pickled; empty: it cannot be.
        kind, text: its type's name and its words.
        frames: of the traceback, the outermost first.
        closed: why this rank left its groups; "": it did not.
        gone: of the values that were given up, those that are lost.
    """

    error: bytes
    kind: str
    text: str
    frames: tuple[TracebackLine, ...]
    closed: str
    gone: tuple[int, ...]


class Answer(NamedTuple):
    """The answer to a request: its value, or a failure; and what was warned of."""

    value: Any = None
    failure: Failure | None = None
    warned: tuple[tuple[type[Warning], str, str, int], ...] = ()

    @property
    def begun(self) -> bool:
        """Whether the request was not left out."""
        return self.failure is None or self.failure.kind != _LEFT_OUT


_LEFT_OUT = "LeftOutError"
"""The kind of failure of a call that was not begun, since what was to be run before it failed."""


class Call(NamedTuple):
    """The common part of calls of a function with arguments of one kind, as all ranks have it.

    Attributes:
        function: its key.
        arguments: the structure, by a key, with `ResultSlot`s for leaves; new ones come pickled.
        dtypes: by slot: of tensors that come with a call.
        moves: by slot: the specs that a value has, and that it shall have.
        consumed: slots of values that the function consumes.
        sums: whether checksums of the results are wanted.
        expected: by rank the layout that the notebook takes the results to have; empty: it waits.
    """

    function: bytes
    arguments: int
    dtypes: dict[int, torch.dtype]
    moves: dict[int, tuple[P, P]]
    consumed: list[int]
    sums: bool
    expected: tuple[int, ...]


@dataclass
class Worker:
    """A rank: its place in the mesh, its values and its functions.

    Attributes:
        values: by number.
        spans: of tensors among them, the memory: its begin and its end.
        closed: the tensors that each function was sent with, by its key, and their memory.
        functions: by key, as they came.
        made: these, for the groups there are.
        arguments: structures of arguments by number; as they came, until they are used.
        running: the serial number of the requests of which a call runs; 0: none does.
        interrupted: that of those that were interrupted last.
        stopped: that of the last ones that failed, or returned what was not expected. Calls are
            left out that the notebook sent before it knew.
        consuming: the values that this call consumes.
        calls: the common parts of calls, by the bytes that they came in.
        last: by these bytes the layout of the last results.
        owed: results that are not kept yet: the number of the first one, all of them, their layout
            the values that were consumed for them, and what they were computed of.
        leaving: held while groups are left, by this program or by the thread beside it.
    """

    place: WorkerPlace
    store: dist.Store
    generation: int = 0
    bound: Any = None
    values: dict[int, Any] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    closed: dict[bytes, list[tuple[torch.Tensor, tuple[int, int]]]] = field(default_factory=dict)
    functions: dict[bytes, bytes] = field(default_factory=dict)
    made: dict[bytes, Any] = field(default_factory=dict)
    arguments: dict[int, Any] = field(default_factory=dict)
    layouts: dict[Any, ResultLayout] = field(default_factory=dict)
    num_layouts: int = 0
    running: int = 0
    interrupted: int = 0
    stopped: int = 0
    consuming: Sequence[int] = ()
    calls: dict[bytes, Call] = field(default_factory=dict)
    last: dict[bytes, ResultLayout] = field(default_factory=dict)
    owed: tuple[int, list[torch.Tensor], ResultLayout, Sequence[int], Any] | None = None
    leaving: threading.Lock = field(default_factory=threading.Lock)

    def join(self, generation: int, next_number: int) -> None:
        """Meet the other ranks, in groups of their own for each generation. Collective.

        Values from `next_number` on are of calls that were given up.
        """
        self.values = {n: value for n, value in self.values.items() if n < next_number}
        place = self.place
        self.num_layouts = self.num_layouts or generation << 32  # as others had, died and came back
        self.made, self.closed, self.spans = {}, {}, {}
        self.layouts, self.last = {}, {}  # of answers that were given up
        with self.leaving:
            self.generation = generation
            if self.bound is not None and not self.bound.membership.closed:
                self.bound.leave("the groups are made anew")
            if dist.is_initialized():
                dist.destroy_process_group()
            self.bound = None
        mesh, device = Mesh(**dict(place.mesh)), torch.device(place.device)
        timeout = timedelta(seconds=place.timeout_seconds)
        rest: dict[str, Any] = {"backend": "gloo"}
        if place.device == "cuda":
            device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(device)
            rest = {"backend": "nccl", "device_id": device}
        store = dist.PrefixStore(f"generation/{generation}", self.store)
        store.set_timeout(min(timeout, timedelta(seconds=_JOIN_SECONDS)))  # if one dies in this
        dist.init_process_group(
            store=store, rank=place.rank, world_size=mesh.size, timeout=timeout, **rest
        )
        recorder = FlightRecorder(place.device)
        self.bound = mesh.bind(place.device, place.timeout_seconds, recorder)
        store.set_timeout(timeout)
        torch.set_default_device(device if place.device == "cuda" else None)

    def find(self, name: Any) -> Any:
        """The object that a name stands for in what the notebook sends."""
        kind, key = name
        if kind == "mesh":
            return self.bound
        if kind == "value":
            here = key.get(self.place.rank, -1) if isinstance(key, dict) else key
            return self.values.get(here, Absent())
        assert kind == "function", name
        return self.function(key)

    def function(self, key: bytes) -> Any:
        """The function of this key, made for the groups that there are now."""
        if key not in self.made:
            sent = self.functions[key]
            (make, args, kwargs), tensors = load_function(sent, self.find, self.device)
            self.closed[key] = [(x, _span(x)) for x in tensors]
            self.made[key] = make(*_without_absent(args), **kwargs)
        return self.made[key]

    def call(self, shared: bytes, leaves: Sequence[Any], first: int) -> KeptResults:
        """Call a function; its tensors are kept under numbers from `first` on.

        Results like the last ones are kept after the answer: see `settle`.

        Args:
            shared: the pickled `Call`.
            leaves: for each slot the number of a value, the numbers of a tensor and its shape, or
                anything else as it is.
            first: the number of the first result.
        """
        call = self.calls.get(shared) or self._read_call(shared)
        self.consuming = consuming = [leaves[i] for i in call.consumed]
        function = self.made.get(call.function) or self.function(call.function)
        values, moves, absent = self.values, call.moves, Absent()
        given = [
            values.get(leaf, absent)
            if type(leaf) is int and not moves
            else self._leaf(i, leaf, call)
            for i, leaf in enumerate(leaves)
        ]
        structure = self.arguments[call.arguments]
        if type(structure) is bytes:
            structure = tree.flatten(load(structure, self.find), is_leaf=is_slot)[1]
            self.arguments[call.arguments] = structure
        args = tree.unflatten(structure, given)
        if Absent in map(type, given):
            args = _without_absent(args)
        del given
        before = [(x, x._version) for tensors in self.closed.values() for x, _ in tensors]
        began = time.perf_counter()
        out = function(*args)
        seconds = time.perf_counter() - began
        if before:
            _warn_of_writes(before)
        last = None if call.sums else self.last.get(shared)
        results = None if last is None else last.reader.read(out)
        if last is not None and results is not None and _kinds(results) == last.kinds:
            self.owed = first, results, last, consuming, args
            numbers = {index: results[index].item() for index in last.scalars}
            kept = KeptResults(last.number, None, numbers, (), seconds)
        else:
            del args
            results, structure = tree.flatten(out)
            for number in consuming:
                values.pop(number, None)
            kept = self.keep(results, structure, first, shared)._replace(seconds=seconds)
        if call.expected and kept.layout != call.expected[self.place.rank]:
            self.stopped = self.running
        if not call.sums:
            return kept
        held = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        sent: list[Any] = [Packed.of(x.contiguous()).numbers for x in held]
        return kept._replace(sums=tuple(map(zlib.crc32, sent)))

    def _read_call(self, shared: bytes) -> Call:
        if len(self.calls) > _NUM_CALLS:  # of functions that are no more, for the most part
            self.calls, self.last = {}, {}
        return self.calls.setdefault(shared, pickle.loads(shared))

    def settle(self) -> None:
        """Keep results of which the notebook has been told already, while it goes on."""
        assert self.owed is not None
        (first, results, layout, consumed, args), self.owed = self.owed, None
        del args
        values, spans = self.values, self.spans
        for number in consumed:
            values.pop(number, None)
            spans.pop(number, None)
        begins = map(torch.Tensor.data_ptr, results)
        new = [(at, at + size) for at, size in zip(begins, layout.num_bytes, strict=True)]
        if not all(map(torch.Tensor.is_contiguous, results)):
            new = list(map(_span, results))
        values.update(enumerate(self._own(results, new, first), first))

    def _leaf(self, index: int, leaf: Any, call: Call) -> Any:
        if type(leaf) is int:
            value = self.values.get(leaf, Absent())
            if index in call.moves and isinstance(value, torch.Tensor):
                had, wanted = call.moves[index]
                value = shard(gather(value, had, self.bound), wanted, self.bound)
            return value
        if index in call.dtypes:
            (data, shape), dtype = leaf, call.dtypes[index]
            if not data:
                return torch.empty(shape, dtype=dtype, device=self.device)
            found = torch.frombuffer(data, dtype=dtype).view(shape)
            if self.place.device == "cpu" and not (dtype.is_floating_point or dtype.is_complex):
                return found
            # in memory of torch's own, which is aligned as under torchrun
            return found.to(self.device, copy=True)
        kind, *rest = leaf
        if kind == "as it is":
            return rest[0]
        assert kind == "made", kind
        key, args, specs = rest
        return shard(self.function(key)(*args), specs, self.bound)

    @property
    def device(self) -> torch.device:
        """Where this rank's values are."""
        if self.place.device == "cuda":
            return torch.device("cuda", self.place.local_rank)
        return torch.device("cpu")

    def _own(self, leaves: list, new: Sequence[tuple[int, int]], first: int) -> list:
        """Results with copies of those that share memory with others, or with what is kept.

        A later update in place of one, where it is donated, would change the other in silence.

        Args:
            leaves: the results.
            new: the memory of each.
            first: the number of the first tensor among them.
        """
        values, spans = self.values, self.spans
        if values.keys() != spans.keys():
            for number in spans.keys() - values.keys():
                del spans[number]
            for number in values.keys() - spans.keys():
                spans[number] = _span(values[number])
        closed = [span for tensors in self.closed.values() for _, span in tensors]
        held, reached = sorted([*spans.values(), *closed, *new]), 0
        for begin, end in held:
            if begin < reached:
                break
            reached = end
        else:
            spans.update(enumerate([s for s, x in zip(new, leaves, strict=True)
                                    if isinstance(x, torch.Tensor)], first))  # fmt: skip
            return leaves
        taken, out, number = [*spans.values(), *closed], [], first
        for leaf, (begin, end) in zip(leaves, new, strict=True):
            mine = leaf
            if isinstance(leaf, torch.Tensor):
                if any(begin < other and start < end for start, other in taken):
                    mine = leaf.clone()
                spans[number] = _span(mine)
                taken.append(spans[number])
                number += 1
            out.append(mine)
        return out

    def keep(
        self, results: list, structure: tree.Structure, first: int, shared: bytes
    ) -> KeptResults:
        """Keep the tensors among results: see `call`."""
        refuse_donated(results, lambda: ["of the result"] * len(results), "the call")
        leaves = self._own(results, [_span(leaf) for leaf in results], first)
        plain = all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if plain:
            kinds = _kinds(leaves)
            assert kinds is not None
            key = structure, *map(tuple, kinds)
            known = self.layouts.get(key)
            if known is not None:
                self.values.update(enumerate(leaves, first))
                if leaves is results and all(x.layout is torch.strided for x in leaves):
                    self.last[shared] = known
                numbers = {index: leaves[index].item() for index in known.scalars}
                return KeptResults(known.number, None, numbers)
        held = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.values.update(enumerate(held, first))
        slots = map(ResultSlot, itertools.count())
        shown = [next(slots) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        metas = [TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.device.type) for leaf in held]
        scalars = [i for i, meta in enumerate(metas) if meta.is_number()]
        self.num_layouts += plain
        number = self.num_layouts if plain else 0
        if plain:
            sizes = [leaf.numel() * leaf.itemsize for leaf in leaves]
            found = ResultLayout(number, LeafReader(structure), kinds, scalars, sizes)
            self.layouts[key] = found
        try:
            structured = dump(tree.unflatten(structure, shown))[0]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            wanted = "tensors, numbers and other values that pickle can send"
            refuse("the notebook cannot have the results", "result", error, wanted, error=TypeError)
        numbers = {index: held[index].item() for index in scalars}
        return KeptResults(number, (structured, tuple(metas)), numbers)


def _kinds(results: Sequence[Any]) -> tuple[list, list, list, list] | None:
    """Shapes, dtypes, layouts and devices; None: one is no tensor, or was consumed."""
    for kind in set(map(type, results)):
        if not issubclass(kind, torch.Tensor) or kind is Donated:
            return None
    shapes, dtypes = [x.shape for x in results], [x.dtype for x in results]
    return shapes, dtypes, [x.layout for x in results], [x.device for x in results]


def _warn_of_writes(before: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Warn of tensors that a function closes over, and has written to; once for each."""
    found = [tuple(x.shape) for x, version in before if x._version != version]
    if found:
        warnings.warn(
            f"a function modified a tensor of shape {found[0]} in place that it closes over: each "
            "rank has changed a copy of its own, and the notebook's is as it was; fix: pass it as "
            "an argument, and return the new value",
            stacklevel=1,
        )


def _span(value: Any) -> tuple[int, int]:
    """The memory of a tensor: the addresses of its first byte, and of the first one after it.

    Empty for what is no tensor, and for one without numbers of its own.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0, 0
    if type(value) is Donated or not (begin := value.data_ptr()):
        return 0, 0
    if value.is_contiguous():
        return begin, begin + value.nbytes
    rows = zip(value.shape, value.stride(), strict=True)
    count = 1 + sum([(size - 1) * stride for size, stride in rows])
    return begin, begin + count * value.itemsize


def is_slot(leaf: Any) -> bool:
    """Whether a leaf is the place of a tensor."""
    return isinstance(leaf, ResultSlot)


def _without_absent(value: Any) -> Any:
    """A tree without the entries of dicts that this rank does not hold."""
    if isinstance(value, dict):
        rest = {key: _without_absent(each) for key, each in value.items()}
        here = {key: each for key, each in rest.items() if not isinstance(each, Absent)}
        return here if here or not rest else Absent()
    if isinstance(value, tuple) and not isinstance(value, Absent) and hasattr(value, "_fields"):
        made: Any = type(value)
        return made(*map(_without_absent, value))
    if type(value) in (list, tuple):
        plain: Any = type(value)
        return plain(map(_without_absent, value))
    return value


def _requests(worker: Worker) -> dict[str, Callable[..., Any]]:
    """The requests of a notebook, by name."""

    def put(values: dict[int, Packed]) -> None:
        worker.values.update((n, p.tensor().to(worker.device)) for n, p in values.items())

    def fetch(numbers: Sequence[int]) -> dict[int, Packed]:
        found = {n: worker.values[n] for n in numbers if n in worker.values}
        return {number: Packed.of(value) for number, value in found.items()}

    def memory() -> dict[str, int]:
        held = {id(x): x.nbytes for x in worker.values.values() if isinstance(x, torch.Tensor)}
        taken = torch.cuda.memory_allocated() if worker.place.device == "cuda" else 0
        return {"num_values": len(held), "held_bytes": sum(held.values()), "taken_bytes": taken}

    def define(key: bytes, blob: bytes) -> None:
        worker.functions[key] = blob

    def structure(key: int, blob: bytes) -> None:
        worker.arguments[key] = blob

    def forget(keys: Sequence[bytes]) -> None:
        for key in keys:
            worker.functions.pop(key, None)
            worker.made.pop(key, None)
            worker.closed.pop(key, None)

    return {
        "call": worker.call,
        "define": define,
        "structure": structure,
        "forget": forget,
        "put": put,
        "fetch": fetch,
        "memory": memory,
        "default_dtype": torch.set_default_dtype,
        "join": worker.join,
    }


def serve(worker: Worker, requests: Connection) -> None:
    """Answer requests until the notebook is gone."""
    functions = _requests(worker)
    while True:
        try:
            serial, known, free, batch = pickle.loads(receive_message(requests))
        except (EOFError, OSError):
            return
        for number in free:
            worker.values.pop(number, None)
        answers, leaves_out = [], worker.stopped > known
        for name, args in batch:
            if name == "call" and leaves_out:
                failure = Failure(b"", _LEFT_OUT, "a call before it failed", (), "", ())
                answers.append(Answer(failure=failure))
                break
            call = serial if name == "call" else 0
            answers.append(_answer(worker, functions[name], call, args))
            if answers[-1].failure is not None:
                worker.stopped = serial
                break
        sys.stdout.flush()
        sys.stderr.flush()
        send_message(requests, _encode(answers))
        if worker.owed is not None:
            os.sched_yield()  # to the notebook, if it waits for this processor
            worker.settle()


def _encode(answers: list[Answer]) -> bytes:
    """Answers as bytes: of a call like those before it plain values, see `read_answers`."""
    value, *rest = answers[0]
    alone = len(answers) == 1 and rest == [None, ()] and type(value) is KeptResults
    if alone and value.new is None and not value.sums:
        return pickle.dumps((value.layout, value.numbers, value.seconds), protocol=5)
    try:
        return pickle.dumps(answers, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # a result that cannot be sent
        failure = Failure(
            b"", type(error).__name__, f"the result cannot be sent: {error}", (), "", ()
        )
        return pickle.dumps([*[Answer()] * (len(answers) - 1), Answer(failure=failure)])


def read_answers(data: bytes) -> list[Answer]:
    """The answers that a rank has sent."""
    found = pickle.loads(data)
    if type(found) is tuple:
        layout, numbers, seconds = found
        return [Answer(KeptResults(layout, None, numbers, (), seconds))]
    return found


def _answer(worker: Worker, function: Callable, call: int, args: tuple) -> Answer:
    """The answer to a request; `call` is its serial number, if it is a call's."""
    warned, show = [], warnings.showwarning
    try:
        if call:
            warnings.showwarning = _collect_into(warned)
        try:
            worker.running, worker.consuming = call, []
            if call and worker.interrupted == call:
                raise KeyboardInterrupt
            value = function(*args)
            worker.running = 0
        finally:
            warnings.showwarning = show
        return Answer(value, None, tuple(warned))
    except BaseException as error:
        worker.running, worker.owed = 0, None
        consumed = worker.consuming if call else []
        failure = _describe(worker, error, consumed)
        del error
        return Answer(None, failure, tuple(warned))


def _collect_into(warned: list) -> Callable[..., None]:
    """A function that puts warnings into a list, each with the place that it is about."""

    def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        warned.append((category, str(message), filename, lineno))

    return show


def _describe(worker: Worker, error: BaseException, consumed: Sequence[int]) -> Failure:
    frames = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        frames.append(TracebackLine(code.co_filename, number, code.co_name, _is_own(frame)))
    traceback.clear_frames(error.__traceback__)
    gone = []
    for number in consumed:
        value = worker.values.get(number)
        if value is None or _is_gone(value):
            gone.append(number)
            worker.values.pop(number, None)
    closed = worker.bound.membership.closed if isinstance(worker.bound, BoundMesh) else ""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    try:
        sent = dump(error)[0]
        load(sent, worker.find)
    except Exception:
        sent = b""
    text, kind = str(error), type(error).__name__
    return Failure(sent, kind, text, tuple(frames), closed, tuple(gone))


def _is_own(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    installed = is_library(frame.f_globals) or name.startswith(("importlib", "contextlib"))
    return not installed and frame.f_code.co_filename != "<string>"  # which starts this program


def _is_gone(value: Any) -> bool:
    """Whether a value that was given up was consumed, or written to."""
    if not isinstance(value, Donated):
        return False
    try:
        refuse_donated([value], lambda: [""], "")
    except ValueError:
        return True
    return False


def _watch(
    worker: Worker, questions: Connection, lock: threading.Lock, main: int, host: str
) -> None:
    """Answer questions while the program runs; end this process when the notebook is gone."""
    parent = os.getppid()
    try:
        while True:
            while not questions.poll(_LOOK_SECONDS):
                if not host and os.getppid() != parent:  # another child of it keeps it open
                    return
            question = questions.recv()
            if question == "where":
                with lock:
                    questions.send(_where(worker, main))
            elif question[0] == "interrupt":
                worker.interrupted = question[1]
                if worker.running == question[1]:
                    signal.pthread_kill(main, signal.SIGINT)
            elif question[0] == "release":
                _release(worker, question[1])
    except (EOFError, OSError):
        pass
    finally:
        end_process(host)


def _release(worker: Worker, generation: int) -> None:
    """Leave the groups of a generation, in which this program or another rank's still waits."""
    with worker.leaving:  # the program may have ended, and be making the next ones
        bound = worker.bound if worker.generation == generation else None
        if isinstance(bound, BoundMesh) and not bound.membership.closed:
            with contextlib.suppress(Exception):
                bound.leave("the program was interrupted")
                if worker.place.device == "cpu":  # where the user's own collectives wait
                    dist.destroy_process_group()


def _where(worker: Worker, main: int) -> dict[str, Any]:
    """Where the program is: its line, and the collective that it waits in."""
    recorder = worker.bound.recorder if isinstance(worker.bound, BoundMesh) else None
    waiting = recorder.waiting if recorder is not None else None
    frame: Any = sys._current_frames().get(main)
    own = None
    while frame is not None:
        if own is None and _is_own(frame):
            own = TracebackLine(
                frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, True
            )
        frame = frame.f_back
    for_seconds = 0.0 if waiting is None else time.perf_counter() - waiting.since
    described = None if waiting is None else (str(waiting.kind), for_seconds)
    return {"running": bool(worker.running), "line": own, "waiting": described}


def end_process(host: str) -> None:
    """End this process, and what it has started; torchrun, on another host, sees no failure."""
    if not host and hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def find_device(wanted: str, num_local: int) -> str:
    """ "cuda" or "cpu", for so many ranks on this machine.

    Raises:
        ValueError: it has not a GPU for each.
    """
    count = 0 if wanted == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    if wanted == "cuda" and count < num_local:
        raise ValueError(
            f"device: got cuda for {num_local} ranks on a machine with {count} GPUs; wanted a GPU "
            'each; fix: mesh.start("cpu"), or a smaller mesh'
        )
    return "cuda" if count >= num_local and wanted != "cpu" else "cpu"


def main(given: Mapping[str, Any]) -> None:
    """Be one of the ranks of a notebook, which has said where it is, and where it finds modules."""
    numbers = given["number"], given["num_local"], given["device"]
    address = given["address"] if isinstance(given["address"], str) else tuple(given["address"])
    run(address, bytes.fromhex(given["token"]), *numbers)


def run(
    address: tuple[str, int] | str, token: bytes, number: int, num_local: int, device: str,
    local_rank: int | None = None, host: str = "",
) -> None:  # fmt: skip
    """Be a rank until the notebook is gone.

    Args:
        address: of the notebook: a host and a port, or the name of a socket.
        token: that both sides know, and nobody else.
        number: see `Hello`.
        num_local: processes on this machine.
        device: "auto", "cpu" or "cuda".
        local_rank: on this machine; None: `number`.
        host: the name of this machine, if torchrun has started this process; what is printed here
            is then also sent to the notebook.

    Raises:
        ValueError: no such device; or the token is another one.
    """
    found = find_device(device, num_local)
    at = number if local_rank is None else local_rank
    hello = Hello(number, "requests", host, at, num_local, found)
    try:
        requests: Any = _connect(address, token, may_wait=bool(host))
        requests.send(hello)
        questions: Any = _connect(address, token, may_wait=bool(host))
        questions.send(hello._replace(kind="questions"))
    except AuthenticationError as error:
        raise ValueError(f"token: another one than the notebook's at {address}") from error
    place = WorkerPlace(*requests.recv())
    store = dist.TCPStore(*place.store, is_master=False, wait_for_workers=False)
    worker = Worker(place, store)

    def interrupted(number: int, frame: Any) -> None:
        if worker.running and worker.running == worker.interrupted:
            worker.running = 0  # a second one would interrupt the report of the first
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    lock, me = threading.Lock(), threading.get_ident()
    if host:
        sys.stdout = _Forward(questions, lock, sys.stdout, is_error=False)
        sys.stderr = _Forward(questions, lock, sys.stderr, is_error=True)
    threading.Thread(target=_watch, args=(worker, questions, lock, me, host), daemon=True).start()
    compat.keep_freed_memory()
    gc.freeze()
    serve(worker, requests)
    end_process(host)


def _connect(address: tuple[str, int] | str, token: bytes, *, may_wait: bool) -> Connection:
    """A connection to the notebook, which may not listen yet; or not any more, if it is here."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            made: Any = Client(address, authkey=token)
            return made
        except ConnectionRefusedError:
            if not may_wait or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class _Forward(io.TextIOBase):
    """A stream whose text goes to the notebook as well."""

    def __init__(self, connection: Connection, lock: threading.Lock, to: Any, *, is_error: bool):
        self._connection, self._lock, self._to, self._is_error = connection, lock, to, is_error

    def write(self, text: str) -> int:
        """Pass it on."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(("output", self._is_error, text))
        return self._to.write(text)

    def flush(self) -> None:
        """Pass it on."""
        self._to.flush()
