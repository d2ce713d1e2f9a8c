"""Functions, classes and values on their way from a notebook to its ranks, by value.

A function of a notebook, or of a module of the user's, goes to the ranks as it is now: its code,
and the values of the globals and variables that it uses. So ranks never run an older version of a
file than the notebook does. What is installed (in ``site-packages``, and this library) is imported
there by its name.

Of each value that a function uses and that could be changed in place there is a state, by which it
is seen whether it changed since it was sent: what it consists of, written as bytes and hashed.
Functions are told by their code, defaults and attributes, arrays by their numbers, small lists and
dicts of what cannot be changed by the identities of their items. Two things are not seen: fields of
frozen dataclasses that ``object.__setattr__`` changed, and single numbers of tensors of more than
256 KiB that were written behind torch's back, through ``.data`` (of these a sample is looked at; of
memory that numpy or others own, every number).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import io
import marshal
import operator
import os
import pickle
import sys
import sysconfig
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from functron.compiler.executable import compile as compile_program
from functron.core import compat, tree
from functron.core.errors import Problem, is_library, raise_problems, refuse
from functron.program.parse import parse
from functron.program.text import Opaque
from functron.program.trace import Program
from functron.spmd import Mesh
from functron.spmd.spec import is_spec

try:
    import cloudpickle as _cloudpickle
except ModuleNotFoundError:  # an extra
    _cloudpickle = None

cloudpickle: Any = _cloudpickle
_Pickler: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler

_READ_BYTES = 1 << 20
_CONTAINERS = ("NONE", "TUPLE", "LIST", "DICT", "NAMEDTUPLE")
_CACHED: Any = type(functools.lru_cache(abs))
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32})  # by their bytes


def require_cloudpickle() -> None:
    """Raise ValueError where cloudpickle is not installed."""
    if cloudpickle is None:
        wanted, fix = "it, to send functions to the ranks", 'pip install "functron[notebooks]"'
        refuse("cannot start the ranks", "cloudpickle", "not installed", wanted, fix)


class Packed(NamedTuple):
    """A tensor's numbers on the way between processes: integers where numpy lacks the dtype."""

    numbers: np.ndarray
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Packed:
        """The numbers of a tensor of any device; one of a CPU may share its memory."""
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            refuse("a tensor cannot go between processes", "tensor", f"one of layout {kind}",
                   "a dense one", "to_dense(), or make it inside of the function")  # fmt: skip
        try:
            return cls(tensor.numpy(), tensor.dtype)
        except (TypeError, RuntimeError):  # of another device or dtype, or on a tape, or conjugated
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        try:
            return cls(plain.numpy(), plain.dtype)
        except TypeError:
            return cls(plain.view(_INTEGERS[plain.itemsize]).numpy(), plain.dtype)

    def part(self, window: tuple) -> Packed:
        """The numbers of a part; they may share the memory of these."""
        return Packed(self.numbers[window], self.dtype)

    def sent(self) -> tuple[pickle.PickleBuffer, tuple[int, ...]]:
        """The bytes of the numbers, and their shape."""
        whole: Any = np.ascontiguousarray(self.numbers)
        return pickle.PickleBuffer(whole), self.numbers.shape

    def tensor(self) -> torch.Tensor:
        """A tensor with memory of its own."""
        writable = self.numbers if self.numbers.flags.writeable else self.numbers.copy()
        return torch.from_numpy(writable).view(self.dtype)


def send_message(connection: Connection, data: bytes) -> None:
    """Send bytes, after how many they are; without the layers of ``connection.send_bytes``."""
    number, size = connection.fileno(), len(data).to_bytes(8, "little")
    for part in (size + data,) if len(data) < _READ_BYTES else (size, data):
        left = memoryview(part)
        while left:
            left = left[os.write(number, left) :]


def receive_message(connection: Connection) -> bytes:
    """The bytes that `send_message` has sent.

    Raises:
        EOFError: the other process has closed the connection.
    """
    number = connection.fileno()
    size = int.from_bytes(_read(number, 8), "little")
    return _read(number, size)


def _read(number: int, size: int) -> bytes:
    found, parts = os.read(number, min(size, _READ_BYTES)), []
    if len(found) == size:
        return found
    while found:
        parts.append(found)
        size -= len(found)
        found = os.read(number, min(size, _READ_BYTES))
    if size:
        raise EOFError
    return b"".join(parts)


class LeafReader:
    """Takes the leaves out of trees of one structure, in a third of the time of `tree.flatten`.

    What stands in the place of a leaf is not looked at: it may be another tree.

    Args:
        structure: of dicts, lists, tuples and named tuples; no tree is told to be of another one.
    """

    def __init__(self, structure: tree.Structure):
        self._nodes: list[tuple[int, Any, int, Any]] = []
        self._places: list[int] = []
        self._num_slots = 1
        self._add(structure, 0)

    def _add(self, node: tree.Structure, at: int) -> None:
        """Add the part of the structure whose value will be in a slot."""
        if node.is_leaf():
            self._places.append(at)
            return
        kind: Any = node.type if node.kind.name in _CONTAINERS else _Seen  # of which there is none
        keys, first = node.entries(), self._num_slots
        self._nodes.append((at, kind, len(keys), operator.itemgetter(*keys) if keys else None))
        self._num_slots += len(keys)
        for index, child in enumerate(node.children(), first):
            self._add(child, index)

    def read(self, value: Any) -> list | None:
        """The leaves of a tree, as `tree.flatten` orders them; None: it may be of another kind."""
        slots = [value]
        try:
            for at, kind, size, read in self._nodes:
                node = slots[at]
                if type(node) is not kind or (len(node) != size if node else size):
                    return None
                if size == 1:
                    slots.append(read(node))
                elif size:
                    slots += read(node)
        except LookupError:
            return None
        return [slots[at] for at in self._places]


class Shipper(_Pickler):
    """Pickles a value for the ranks.

    Args:
        refer: the name by which the ranks know an object already; None: it is pickled.

    Attributes:
        seen: what functions use that were pickled by value.
        imports: the user's modules that these import when they run.
        tensor_bytes: of tensors that functions close over.
    """

    def __init__(self, file: Any, refer: Callable[[Any], Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._refer = refer
        self.seen: list[UsedValue | UsedNames] = []
        self.imports: dict[str, None] = {}
        self.tensor_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        """The name of an object that the ranks have; None: it is pickled."""
        if isinstance(obj, torch.Tensor) and obj.is_meta:
            return "meta", tuple(obj.shape), obj.dtype
        if isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            self.tensor_bytes += obj.nbytes
            wants = obj.requires_grad and type(obj) is torch.nn.Parameter
            return "tensor", Packed.of(obj), wants
        return self._refer(obj)

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle functions, classes and modules; NotImplemented: by name."""
        if isinstance(obj, types.CodeType):  # with the names of files, for tracebacks
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, _CACHED):
            module = sys.modules.get(obj.__module__)
            if obj.__module__ == "__main__" or module is None or is_own(module):
                return _cache_again, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, types.ModuleType) and is_own(obj):
            self.seen += contents_of(obj)
        made: Any = super().reducer_override(obj)
        if made is NotImplemented or not isinstance(made, tuple):
            return made
        if isinstance(obj, types.FunctionType):
            if is_library(obj.__globals__):
                self.seen += variables_of(obj)
                return _within_library(obj, made)
            self.seen += values_of(obj)
            self.imports.update(dict.fromkeys(imports_of(obj)))
        elif isinstance(obj, type):
            self.seen += attributes_of(obj)
        return made


def _cache_again(function: Callable, parameters: dict[str, Any]) -> Callable:
    return functools.lru_cache(**parameters)(function)


class _Globals:
    """The globals of a module, pickled by the module's name."""

    def __init__(self, module: str):
        self.module = module

    def __reduce__(self) -> tuple:
        return _find_globals, (self.module,)


def _find_globals(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


def _within_library(function: types.FunctionType, made: tuple) -> tuple:
    """The reduction of a function that a function of this library returned.

    It keeps the globals of its module: copies of these would be other objects.
    """
    make, (code, _, *rest), (own, slots), *more = made
    names = _Globals(function.__globals__["__name__"])
    return make, (code, names, *rest), (own, {**slots, "__globals__": {}}), *more


class SentProgram(NamedTuple):
    """A traced program on its way to a rank: its text, and what the text does not hold.

    Attributes:
        text: of the program.
        arguments, results: trees like those that were traced, with numbers for leaves.
        static: see `functron.program.equations.Code`.
        constants: the tensors that it closes over, in the order of its inputs.
    """

    text: str
    arguments: tuple
    results: tree.Tree
    static: dict[int, Any]
    constants: list[torch.Tensor]

    @property
    def num_leaves(self) -> int:
        """How many leaves the arguments have."""
        return len(tree.leaves(self.arguments))

    @classmethod
    def of(cls, program: Program, mesh: Mesh) -> SentProgram:
        """The program for the ranks of a mesh.

        Raises:
            ValueError: it is for another mesh or for stages of a pipeline, or says not how all of
                its arguments and results are split; or it calls Python, which its text only names.
        """
        text, found = str(program), []
        if program.mesh != mesh:
            found.append(Problem("mesh", f"Mesh({program.mesh})", f"Mesh({mesh})", "trace it so"))
        if program.stages:
            fix = "give `build` what makes each rank's step"
            found.append(Problem("program", f"stages over {program.stages}", "one program", fix))
        ends = [each for each in program.inputs if each.role == "argument"]
        for each in [*ends, *program.outputs]:
            if each.spec is None:
                fix = "trace a function of `shard_map`"
                path = f"{'argument' if each in ends else 'result'} {each.path}".strip()
                found.append(Problem(path, "a value of no spec", "one that is mapped", fix))
        whole, read = (
            [x for equation, _ in each.block.walk() for x in tree.leaves(equation.args)]
            for each in (program, parse(text))
        )
        # a callback is a name that has its function with it
        if any(isinstance(x, str) and type(x) is not str for x in whole) or any(
            isinstance(x, Opaque) for x in read
        ):
            fix = "jit the function, which goes to the ranks itself"
            found.append(Problem("program", "calls of Python", "operations alone", fix))
        raise_problems(f"{program.name} cannot be sent to the ranks", found)
        num_leaves = program.in_structure.num_leaves
        arguments = tree.unflatten(program.in_structure, list(range(num_leaves)))
        results = tree.unflatten(program.out_structure, list(range(len(program.outputs))))
        constants = [x.value for x in program.inputs if x.value is not None]
        return cls(text, arguments, results, dict(program.static), constants)

    def program(self) -> Program:
        """The program, as it was traced."""
        made, constants = parse(self.text), iter(self.constants)
        inputs = [
            replace(each, value=next(constants)) if each.role == "constant" else each
            for each in made.inputs
        ]
        return replace(
            made,
            inputs=tuple(inputs),
            in_structure=tree.structure(self.arguments),
            out_structure=tree.structure(self.results),
            static=self.static,
            paths=None,
        )


def compile_sent(sent: SentProgram, mesh: Any, **options: Any) -> Any:
    """The executable of a program that was sent; see `functron.compiler.compile`."""
    return compile_program(sent.program(), mesh, **options)


def _refer_to_nothing(obj: Any) -> None:
    return None


def _find_nothing(name: Any) -> Any:
    raise AssertionError(name)


def dump(value: Any, refer: Callable[[Any], Any] = _refer_to_nothing) -> tuple[bytes, Shipper]:
    """`value` as bytes, and what was met on the way; by default nothing is known there by name."""
    file, taken = io.BytesIO(), cloudpickle.list_registry_pickle_by_value()
    own = [module for module in own_modules() if module.__name__ not in taken]
    shipper = Shipper(file, refer)
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        shipper.dump(value)
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue(), shipper


def dump_function(recipe: tuple, refer: Callable[[Any], Any]) -> tuple[bytes, Shipper]:
    """The bytes of what makes a function, and the user's modules that it imports when it runs.

    Args:
        recipe: what is called, its arguments, and those with names.
        refer: see `Shipper`.
    """
    modules: list[types.ModuleType] = []
    while True:
        blob, shipper = dump((*recipe, modules), refer)
        found = [sys.modules[name] for name in shipper.imports if name in sys.modules]
        if len(found) == len(modules):
            shipper.seen += globals_of(sys.modules, shipper.imports)
            return blob, shipper
        modules = found


def load_function(
    data: bytes, find: Callable[[Any], Any], device: torch.device
) -> tuple[tuple, list[torch.Tensor]]:
    """The recipe that `dump_function` wrote, and the tensors that came with it.

    Its modules are put where Python imports them.
    """
    receiver = Receiver(data, find, device)
    *recipe, modules = receiver.load()
    sys.modules.update((module.__name__, module) for module in modules)
    return tuple(recipe), receiver.tensors


class Receiver(pickle.Unpickler):
    """Reads what `dump` wrote; `find` returns the object of a name; tensors go to a device.

    Attributes:
        tensors: those that it has read.
    """

    def __init__(self, data: bytes, find: Callable[[Any], Any], device: torch.device | str):
        super().__init__(io.BytesIO(data))
        self._find, self._device = find, device
        self.tensors: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> Any:
        """The object of this name."""
        if isinstance(pid, tuple) and pid[0] == "tensor":
            found = pid[1].tensor().to(self._device)
            self.tensors.append(found)
            return torch.nn.Parameter(found) if pid[2] else found
        if pid[0] == "meta":
            return torch.empty(pid[1], dtype=pid[2], device="meta")
        return self._find(pid)


def load(
    data: bytes, find: Callable[[Any], Any] = _find_nothing, device: torch.device | str = "cpu"
) -> Any:
    """The value that `dump` wrote, with its tensors on a device."""
    return Receiver(data, find, device).load()


def refuse_unsendable(
    name: str, recipe: Any, refer: Callable[[Any], Any], error: Exception
) -> NoReturn:
    """Raise TypeError with the name of what a function uses that cannot be pickled."""
    path = [each for each in _find_unsendable(recipe, refer) if each]
    wanted = "what pickle can send"
    refuse(
        f"{name} cannot be sent to the ranks", " in ".join(reversed(path)) or "function", error,
        wanted, "make it inside of the function, which each rank runs", TypeError,
    )  # fmt: skip


def _find_unsendable(value: Any, refer: Callable[[Any], Any]) -> Iterator[str]:
    """The names that lead to what cannot be pickled, the outermost first."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, types.FunctionType):
        parts = [(name, v) for name, v in sorted(_used(value).items())]
        parts += [(f"module {name}", sys.modules[name]) for name in imports_of(value)]
    elif isinstance(value, functools.partial):
        parts = [("", value.func), ("", value.args), *value.keywords.items()]
    elif isinstance(value, (tuple, list)):
        parts = [("", each) for each in value]
    elif isinstance(value, dict):
        parts = [(repr(key), each) for key, each in value.items()]
    for name, part in parts:
        try:
            dump(part, refer)
        except Exception:
            yield name
            yield from _find_unsendable(part, refer)
            return


def _used(function: types.FunctionType) -> dict[str, Any]:
    """The globals and variables that a function uses, by name."""
    found = {n: function.__globals__.get(n) for n in names_of(function.__code__)}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


# --- values that functions use

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_SAMPLED_BYTES = 1 << 18
"""Of more, tensors that torch counts the writes of have only a sample of their numbers hashed."""


class UsedValue(NamedTuple):
    """A value that a function uses: where it was found, and what it was.

    Attributes:
        value: what was found.
        cell: of a variable that holds it; or None.
        names: globals of which it is one; or None.
        name: its name among these.
        read: returns it as it is now; None: it is another one only where `cell` or `names` are.
    """

    value: Any
    cell: types.CellType | None = None
    names: Mapping[str, Any] | None = None
    name: str = ""
    read: Callable[[], Any] | None = None


class UsedNames(NamedTuple):
    """Which names there are: of a class, or of those globals that a function looks for in vain.

    Attributes:
        names: the names that there are now.
        absent: those that a function uses, and that were not there; None: all are told.
        count: how many there were.
    """

    names: Mapping[str, Any]
    absent: frozenset[str] | None
    count: int

    def changed(self) -> bool:
        """Whether there are others now."""
        if self.absent is None:
            return len(self.names) != self.count
        return not self.names.keys().isdisjoint(self.absent)


class UsedValues:
    """All that a function uses, as it is when this is made.

    Values that may be changed in place are looked at together, so that each is looked at once.
    """

    def __init__(self, found: Iterable[UsedValue | UsedNames]):
        each = list(found)
        self._names = [x for x in each if isinstance(x, UsedNames)]
        rows = [x for x in each if isinstance(x, UsedValue)]
        cells = {id(x.cell): (x.cell, x.value) for x in rows if x.cell is not None}.values()
        self._cells, self._held = [x for x, _ in cells], [x for _, x in cells]
        named = {(id(x.names), x.name): x for x in rows if x.names is not None}.values()
        self._named: list[tuple[Any, str, Any]] = [(x.names, x.name, x.value) for x in named]
        self._rows = [(x.read, x.value) for x in rows if x.read is not None]
        values = {id(x): x for row in rows for x in _expand(row.value)}.values()
        self._plain = [(x, x.__code__) for x in values if _is_plain(x)]
        self._flat = [(x, _contents(x)) for x in values if _is_flat(x)]
        seen = (_is_plain, _is_flat, _is_told_by_identity)
        given = [x for x in values if not any(is_seen(x) for is_seen in seen)]
        self._looked: list[Any] = []
        self._state = _state(given, self._looked)
        if self._state is None:  # an object's own methods raise
            given = [x for x in given if _state([x], []) is not None]
            self._state = _state(given, self._looked)
        self._given = given

    def changed(self) -> bool:
        """Whether a value is another one now, or was changed in place."""
        try:
            if not all(map(operator.is_, map(_read_cell, self._cells), self._held)):
                return True
            for names, name, value in self._named:
                if names[name] is not value:
                    return True
            for read, value in self._rows:
                if read() is not value:
                    return True
        except (KeyError, ValueError):  # deleted
            return True
        for f, code in self._plain:
            if f.__code__ is not code or _extras(f):
                return True
        if any(names.changed() for names in self._names):
            return True
        if not all(map(_has_contents, self._flat)):
            return True
        return bool(self._given) and _state(self._given, []) != self._state


_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device)
_FIXED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type,
    inspect.Parameter,
)  # fmt: skip
_FLAT, _FEW = (list, dict, MappingProxyType), 64
_BY_IDENTITY = type, types.ModuleType, torch.Generator
_read_cell = operator.attrgetter("cell_contents")
_VIEWS = type({}.keys()), type({}.values()), type({}.items())


def _is_fixed(value: Any) -> bool:
    """Whether a value consists of what cannot be changed in place, as configurations do."""
    if isinstance(value, (tuple, frozenset)):
        return not hasattr(value, "__dict__") and all(map(_is_fixed, value))
    parts = _fields(value)
    if parts is not None:
        return all(map(_is_fixed, parts))
    if isinstance(value, _PLAIN):  # a class of one's own may give a number attributes
        return not hasattr(value, "__dict__")
    return isinstance(value, _FIXED)


def _fields(value: Any) -> list | None:
    """The fields of a frozen dataclass that has nothing else; None: it is another value."""
    params = vars(type(value)).get("__dataclass_params__")
    if params is None or not params.frozen or isinstance(value, type):
        return None
    own = {each.name for each in fields(value)}
    held = getattr(value, "__dict__", {}).keys()
    return [getattr(value, name, None) for name in own] if held <= own else None


def _expand(value: Any) -> Iterator[Any]:
    """The parts of a value that may be changed in place: itself, or parts of what cannot be."""
    if type(value) is types.FunctionType and is_library(value.__globals__):
        return
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        for part in value:
            yield from _expand(part)
    elif not _is_fixed(value):
        parts = _fields(value)
        if parts is None or hasattr(type(value), "__functron_call__"):
            yield value
        else:
            for part in parts:
                yield from _expand(part)


def _is_plain(value: Any) -> bool:
    """Whether it is a function of which only the code could be replaced, as autoreload does."""
    return type(value) is types.FunctionType and not _extras(value)


def _is_told_by_identity(value: Any) -> bool:
    return isinstance(value, _BY_IDENTITY) or hasattr(type(value), "__functron_call__")


def _is_flat(value: Any) -> bool:
    """Whether it is a list or dict of a few values that cannot be changed in place."""
    if type(value) not in _FLAT or len(value) > _FEW:
        return False
    return all(map(_is_fixed, _contents(value)))


def _contents(value: Any) -> list:
    """The items of a list; or the keys of a dict, and its values."""
    return [*value] if type(value) is list else [*value, *value.values()]


def _has_contents(row: tuple[Any, list]) -> bool:
    """Whether a list or dict consists of the same objects as before, in their order."""
    value, before = row
    now = _contents(value)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _state(values: list[Any], looked: list[Any]) -> int | None:
    """A number that is another one after one of the values was changed in place; None: none is."""
    file = io.BytesIO()
    try:
        _Looker(file, looked).dump(values)
    except Exception:  # raised by an object's own methods
        return None
    return hash(file.getvalue())


def _extras(function: types.FunctionType) -> tuple | None:
    """A function's parts besides its code: defaults and attributes; None: nothing."""
    defaults, named, own = function.__defaults__, function.__kwdefaults__, function.__dict__
    return (defaults, named, own) if defaults or named or own else None


def _look_at(tensor: torch.Tensor) -> tuple:
    """Something that is another one when a tensor, or its numbers, were changed.

    Writes that torch counts cost nothing. Others are seen in the numbers themselves, on CPUs.
    """
    counted = not tensor.is_inference()
    version = tensor._version if counted else 0
    if tensor.layout is not torch.strided or tensor.is_meta or compat.is_wrapped(tensor):
        return version, tuple(tensor.shape)
    told = version, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    if tensor.device.type != "cpu" and counted:
        return told
    with torch.no_grad():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        if counted and flat.nbytes > _SAMPLED_BYTES and flat.untyped_storage().resizable():
            flat = flat[:: flat.nbytes // _SAMPLED_BYTES + 1]
        return *told, zlib.crc32(flat.contiguous().view(torch.uint8).numpy().data)


class _Looker(pickle.Pickler):
    """Pickles what an object consists of, and identities in place of what cannot change."""

    def __init__(self, file: Any, looked: list[Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._looked = looked

    def reducer_override(self, obj: Any) -> Any:
        """Identities of objects, with what tells how they are now; NotImplemented: as usual."""
        told: tuple = ()
        parts: Any = None
        if obj is _Seen:
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            told = _look_at(obj)
        elif isinstance(obj, np.ndarray):
            if obj.dtype.hasobject:
                return NotImplemented
            told = (
                obj.shape,
                obj.strides,
                str(obj.dtype),
                zlib.crc32(np.ascontiguousarray(obj).data),
            )
        elif isinstance(obj, types.FunctionType):
            self._looked.append(obj.__code__)
            told = (id(obj.__code__),)
            parts = None if is_library(obj.__globals__) else _extras(obj)
        elif isinstance(obj, MappingProxyType):
            parts = dict(obj)
        elif isinstance(obj, memoryview):
            parts = obj.tobytes()
        elif isinstance(obj, _VIEWS):
            parts = list(obj)
        elif not _is_told_by_identity(obj):
            if _can_pickle(obj):
                return NotImplemented
            parts = _parts(obj)
        self._looked.append(obj)
        # what is a state may refer to the object itself
        return (_Seen, (id(obj), *told)) if parts is None else (_Seen, (id(obj), *told), parts)


class _Seen:
    """The name under which `_Looker` writes objects."""


def _can_pickle(obj: Any) -> bool:
    try:
        obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _parts(obj: Any) -> dict[str, Any] | None:
    """The attributes of an object that cannot be pickled."""
    slots = [n for kind in type(obj).__mro__ for n in vars(kind).get("__slots__", ())]
    found = {n: getattr(obj, n) for n in slots if n != "__weakref__" and hasattr(obj, n)}
    return {**found, **getattr(obj, "__dict__", {})} or None


def values_of(function: types.FunctionType) -> Iterator[UsedValue | UsedNames]:
    """A function itself, and the globals and variables of enclosing functions that it uses."""
    used, names = set(names_of(function.__code__)), function.__globals__
    yield UsedValue(function)
    yield from globals_of(names, used)
    yield UsedNames(names, frozenset(used - names.keys()), 0)
    later = frozenset(n for n in _imports(function.__code__) if n not in sys.modules)
    if later:
        yield UsedNames(sys.modules, later, 0)
    yield from variables_of(function)


def variables_of(function: types.FunctionType) -> Iterator[UsedValue]:
    """The variables of enclosing functions that a function uses."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found = UsedValue(cell.cell_contents, cell)
            if not is_library(function.__globals__) or not is_specs(found.value):
                yield found


def is_specs(value: Any) -> bool:
    """Whether it is a tree of specs and nothing else."""
    leaves = tree.leaves(value, is_spec)
    return bool(leaves) and all(map(is_spec, leaves))


def attributes_of(kind: type) -> Iterator[UsedValue | UsedNames]:
    """The parts of a class: methods, and values that they may use."""
    names = vars(kind)
    plain = [n for n in names if not (n.startswith("__") and n.endswith("__")) and n != "_abc_impl"]
    special = [n for n, value in names.items() if isinstance(value, types.FunctionType)]
    yield from globals_of(names, {*plain, *special})
    yield UsedNames(names, None, len(names))


def contents_of(module: types.ModuleType) -> Iterator[UsedValue]:
    """The globals of a module."""
    yield from globals_of(vars(module), [n for n in vars(module) if not n.startswith("__")])


def names_of(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)


def globals_of(names: Mapping[str, Any], used: Iterable[str]) -> Iterator[UsedValue]:
    """Those of some names that there are."""
    for name in sorted(used):
        if name in names:
            yield UsedValue(names[name], None, names, name)


def imports_of(function: types.FunctionType) -> list[str]:
    """The user's own modules that a function imports when it runs, each after its packages."""
    package, found = function.__globals__.get("__package__") or "", {}
    for name in _imports(function.__code__):
        for full in (name, f"{package}.{name}" if name else package):
            parts = full.split(".")
            for path in (".".join(parts[: k + 1]) for k in range(len(parts))):
                module = sys.modules.get(path)
                if isinstance(module, types.ModuleType) and is_own(module):
                    found[path] = None
    return list(found)


def _imports(code: types.CodeType) -> Iterator[str]:
    imports = dis.opmap["IMPORT_NAME"] in code.co_code[::2]
    for each in dis.get_instructions(code) if imports else ():
        if each.opname == "IMPORT_NAME":
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


def own_modules() -> list[types.ModuleType]:
    """The imported modules that are the user's own files, and not installed."""
    found = {id(m): m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    return [m for m in found.values() if m.__name__ != "__main__" and is_own(m)]


def is_own(module: types.ModuleType) -> bool:
    """Whether a module is a file of the user's, and not installed."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether a file is one of Python's, of a package that was installed, or of this library."""
    path = Path(file).resolve()
    if _INSTALLED & {*path.parts, *Path(file).parts}:
        return True
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return any(path.is_relative_to(folder) for folder in [*folders, Path(__file__).parents[2]])
