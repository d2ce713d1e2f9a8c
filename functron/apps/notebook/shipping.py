"""Functions, classes and values on their way from a notebook to its ranks, by value.

A function of a notebook, or of a module of the user's, goes to the ranks as it is now: its code,
and the values of the globals and variables that it uses. So ranks never run an older version of a
file than the notebook does. What is installed (in ``site-packages``, and this library) is imported
there by its name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import marshal
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from functron.compiler.executable import compile as compile_program
from functron.core import tree
from functron.core.errors import Problem, is_library, raise_problems, refuse
from functron.program.parse import parse
from functron.program.text import Opaque
from functron.program.trace import Program
from functron.spmd import Mesh

try:
    import cloudpickle as _cloudpickle
except ModuleNotFoundError:  # an extra
    _cloudpickle = None

cloudpickle: Any = _cloudpickle
_Pickler: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32})  # by their bytes
_MANY_BYTES = 1 << 16  # of a value whose changes are not looked for


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
        plain = tensor.detach().cpu().contiguous()
        try:
            return cls(plain.numpy(), plain.dtype)
        except TypeError:
            return cls(plain.view(_INTEGERS[plain.itemsize]).numpy(), plain.dtype)

    def part(self, window: tuple[tuple[int, int], ...]) -> Packed:
        """A copy of the numbers between the ends of each dim."""
        return self._replace(numbers=self.numbers[tuple([slice(*ends) for ends in window])].copy())

    def tensor(self) -> torch.Tensor:
        """A tensor with memory of its own."""
        writable = self.numbers if self.numbers.flags.writeable else self.numbers.copy()
        return torch.from_numpy(writable).view(self.dtype)


class UsedValue(NamedTuple):
    """A value that a function uses: where it was found, and what it was.

    Attributes:
        read: returns it as it is now.
        value: what was found.
        fixed: it cannot be changed in place.
        state: of a value that may be changed in place; see `_state`.
        looked: objects that the state tells apart by their identity, which they keep while they are
            here.
    """

    read: Callable[[], Any]
    value: Any
    fixed: bool
    state: Any
    looked: list[Any]

    @classmethod
    def of(cls, read: Callable[[], Any]) -> UsedValue:
        """The value as it is now."""
        value, looked = read(), []
        return cls(read, value, _is_fixed(value), _state(value, looked), looked)

    def changed(self) -> bool:
        """Whether another value, or another state of it, is there now."""
        try:
            value = self.read()
        except (KeyError, ValueError):  # deleted
            return True
        if value is not self.value or self.fixed:
            return value is not self.value
        return _state(value, []) != self.state


_FIXED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type, str, int, float,
    bool, complex, bytes, type(None), torch.dtype, torch.device,
)  # fmt: skip

_BY_IDENTITY = type, types.ModuleType, torch.Generator


def _is_fixed(value: Any) -> bool:
    """Whether a value consists of what cannot be changed in place, as configurations do."""
    if isinstance(value, (tuple, frozenset)):
        return not hasattr(value, "__dict__") and all(map(_is_fixed, value))
    params = vars(type(value)).get("__dataclass_params__")
    if params is not None and params.frozen:
        own = {each.name for each in fields(value)}
        held = getattr(value, "__dict__", {}).keys()
        return held <= own and all(_is_fixed(getattr(value, name, None)) for name in own)
    return isinstance(value, _FIXED)


def _state(value: Any, looked: list[Any]) -> Any:
    """Something that is another one after a value was changed in place.

    Of arrays of many bytes and collections of many objects only the sizes are looked at.
    """
    if _is_fixed(value):
        return None
    if isinstance(value, types.FunctionType):  # autoreload changes its code
        found = [value.__code__, *(value.__defaults__ or ())]
        looked += found
        return [*map(id, found)]
    if isinstance(value, (list, dict, set)) and len(value) > _MANY_BYTES // 8:
        return len(value)
    file = io.BytesIO()
    try:
        _Looker(file, looked).dump(value)
    except Exception:  # raised by an object's own methods
        return None
    return hash(file.getvalue())


class _Looker(pickle.Pickler):
    """Pickles what an object consists of, and identities in place of what cannot change."""

    def __init__(self, file: Any, looked: list[Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._looked = looked

    def reducer_override(self, obj: Any) -> Any:
        """Identities of tensors, with their versions, and of what cannot be pickled."""
        kept: tuple | None = ()
        if obj is _Seen:
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            kept = () if obj.is_inference() else (obj._version,)
        elif isinstance(obj, np.ndarray):
            kept = None if obj.nbytes < _MANY_BYTES else (obj.shape,)
        elif isinstance(obj, types.FunctionType):
            kept = tuple(_state(obj, self._looked))
        elif not isinstance(obj, _BY_IDENTITY) and not hasattr(type(obj), "__functron_call__"):
            kept = self._parts(obj)
        if kept is None:
            return NotImplemented
        self._looked.append(obj)
        return _Seen, (id(obj), *kept)

    def _parts(self, obj: Any) -> tuple | None:
        """The attributes of an object that cannot be pickled; None: it can be."""
        try:
            obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:
            return tuple(getattr(obj, "__dict__", {}).items())
        return None


class _Seen:
    """The name under which `_Looker` writes objects."""


class Shipper(_Pickler):
    """Pickles a value for the ranks.

    Args:
        refer: the name by which the ranks know an object already; None: it is pickled.

    Attributes:
        seen: what functions use that were pickled by value.
        tensor_bytes: of tensors that functions close over.
    """

    def __init__(self, file: Any, refer: Callable[[Any], Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._refer = refer
        self.seen: list[UsedValue] = []
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
        made: Any = super().reducer_override(obj)
        if made is NotImplemented or not isinstance(made, tuple):
            return made
        if isinstance(obj, types.FunctionType):
            if is_library(obj.__globals__):
                return _within_library(obj, made)
            self.seen += _values_of(obj)
        elif isinstance(obj, type):
            self.seen += _globals_of(vars(obj), _attributes(obj))
        elif isinstance(obj, types.ModuleType):
            self.seen += _globals_of(vars(obj), [n for n in vars(obj) if not n.startswith("__")])
        return made


def _attributes(kind: type) -> Iterator[str]:
    """The names of what a class defines: methods, and values that they may use."""
    for name, value in vars(kind).items():
        if isinstance(value, types.FunctionType) or not name.startswith("_"):
            yield name


def _values_of(function: types.FunctionType) -> Iterator[UsedValue]:
    """A function's code, and the globals and variables of enclosing functions that it uses."""
    yield UsedValue.of(lambda: function)
    yield from _globals_of(function.__globals__, set(_names(function.__code__)))
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield UsedValue.of(lambda cell=cell: cell.cell_contents)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _globals_of(names: Mapping[str, Any], used: Iterable[str]) -> Iterator[UsedValue]:
    for name in sorted(used):
        if name in names:
            yield UsedValue.of(lambda name=name: names[name])


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


def own_modules() -> list[types.ModuleType]:
    """The imported modules that are the user's own files, and not installed."""
    found = {id(m): m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    return [m for m in found.values() if m.__name__ != "__main__" and _is_own(m)]


def _is_own(module: types.ModuleType) -> bool:
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


class Receiver(pickle.Unpickler):
    """Reads what `dump` wrote; `find` returns the object of a name; tensors go to a device."""

    def __init__(self, data: bytes, find: Callable[[Any], Any], device: torch.device | str):
        super().__init__(io.BytesIO(data))
        self._find, self._device = find, device

    def persistent_load(self, pid: Any) -> Any:
        """The object of this name."""
        if isinstance(pid, tuple) and pid[0] == "tensor":
            found = pid[1].tensor().to(self._device)
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
    found = {n: function.__globals__.get(n) for n in _names(function.__code__)}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found
