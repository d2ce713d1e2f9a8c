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
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from functron.apps.notebook.used_values import (
    UsedNames,
    UsedValue,
    attributes_of,
    contents_of,
    imports_of,
    is_own,
    names_of,
    own_modules,
    values_of,
    variables_of,
)
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
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
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
            shipper.seen += [UsedValue.of(lambda n=n: sys.modules[n]) for n in shipper.imports]
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
