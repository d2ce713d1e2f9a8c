"""The values that a function of a notebook uses, and whether they changed since they were sent.

Of each value that could be changed in place there is a state: what it consists of, written as bytes
and hashed. Functions are told by their code, defaults and attributes, arrays by their numbers.
Two things are not seen: fields of frozen dataclasses that ``object.__setattr__`` changed, and
single numbers of tensors of more than 256 KiB that were written behind torch's back, through
``.data`` (of these a sample is looked at; of memory that numpy or others own, every number).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import pickle
import sys
import sysconfig
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from functron.core import compat, tree
from functron.core.errors import is_library
from functron.spmd.spec import is_spec

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_SAMPLED_BYTES = 1 << 18
"""Of more, tensors that torch counts the writes of have only a sample of their numbers hashed."""


class UsedValue(NamedTuple):
    """A value that a function uses: where it was found, and what it was.

    Attributes:
        read: returns it as it is now.
        value: what was found.
    """

    read: Callable[[], Any]
    value: Any

    @classmethod
    def of(cls, read: Callable[[], Any]) -> UsedValue:
        """The value as it is now."""
        return cls(read, read())


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
        self._rows = [x for x in each if isinstance(x, UsedValue)]
        values = {id(x): x for row in self._rows for x in _expand(row.value)}.values()
        self._plain = [(x, x.__code__) for x in values if _is_plain(x)]
        given = [x for x in values if not _is_plain(x)]
        self._looked: list[Any] = []
        self._state = _state(given, self._looked)
        if self._state is None:  # an object's own methods raise
            given = [x for x in given if _state([x], []) is not None]
            self._state = _state(given, self._looked)
        self._given = given

    def changed(self) -> bool:
        """Whether a value is another one now, or was changed in place."""
        try:
            if any(read() is not value for read, value in self._rows):
                return True
        except (KeyError, ValueError):  # deleted
            return True
        if any(f.__code__ is not code or _extras(f) for f, code in self._plain):
            return True
        if any(names.changed() for names in self._names):
            return True
        return bool(self._given) and _state(self._given, []) != self._state


_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device)
_FIXED = types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type
_BY_IDENTITY = type, types.ModuleType, torch.Generator
_VIEWS = type({}.keys()), type({}.values()), type({}.items())


def _is_fixed(value: Any) -> bool:
    """Whether a value consists of what cannot be changed in place, as configurations do."""
    if isinstance(value, (tuple, frozenset)):
        return not hasattr(value, "__dict__") and all(map(_is_fixed, value))
    params = vars(type(value)).get("__dataclass_params__")
    if params is not None and params.frozen:
        own = {each.name for each in fields(value)}
        held = getattr(value, "__dict__", {}).keys()
        return held <= own and all(_is_fixed(getattr(value, name, None)) for name in own)
    if isinstance(value, _PLAIN):  # a class of one's own may give a number attributes
        return not hasattr(value, "__dict__")
    return isinstance(value, _FIXED)


def _expand(value: Any) -> Iterator[Any]:
    """The parts of a value that may be changed in place: itself, or parts of what cannot be."""
    if type(value) is types.FunctionType and is_library(value.__globals__):
        return
    if isinstance(value, tuple) and not hasattr(value, "__dict__"):
        for part in value:
            yield from _expand(part)
    elif not _is_fixed(value):
        yield value


def _is_plain(value: Any) -> bool:
    """Whether it is a function of which only the code could be replaced, as autoreload does."""
    return type(value) is types.FunctionType and not _extras(value)


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
    found = function.__defaults__, function.__kwdefaults__, function.__dict__
    return found if any(found) else None


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
        elif not isinstance(obj, _BY_IDENTITY) and not hasattr(type(obj), "__functron_call__"):
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
    yield UsedValue.of(lambda: function)
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
            found = UsedValue.of(lambda cell=cell: cell.cell_contents)
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
            yield UsedValue.of(lambda name=name: names[name])


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
