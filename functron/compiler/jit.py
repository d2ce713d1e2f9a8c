"""`jit`: compile a function at its first call, and run what was compiled from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functron.compiler.executable import Backend, Executable, describe
from functron.compiler.executable import compile as compile_program
from functron.core import compat, tree
from functron.core.closure import refuse_orphans, refuse_tracked
from functron.core.errors import (
    Problem,
    dataclass_fix,
    public,
    raise_problems,
    refuse,
)
from functron.core.scopes import watchers
from functron.core.tables import Table, shows_table
from functron.program.check import refuse_divided
from functron.program.equations import TensorType, canonical_strides
from functron.program.overlap import divide_sequences
from functron.program.recorder import active
from functron.program.trace import Program, trace
from functron.spmd.axes import unwinding
from functron.spmd.donation import refuse_donated
from functron.spmd.mesh import BoundMesh, JointCall
from functron.spmd.shard_map import MappedFunction


@public
def jit(
    fn: Callable | None = None,
    *,
    donate: int | Sequence[int] = (),
    static: int | Sequence[int] = (),
    num_signatures: int = 1,
    cache: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    overlap: bool = True,
    prefetch: bool = True,
    sequence_parts: int = 1,
    unroll: bool = False,
    graph: bool = False,
    backend: Backend = "inductor",
) -> Callable:
    """The function that computes `fn` as one compiled program; see `Jitted`.

    The first call traces `fn` and compiles the trace with Inductor, layers that are scanned once at
    any depth; later calls run it. Put it outermost: ``jit(grad(f))``, not ``grad(jit(f))``.

    >>> double = ft.jit(lambda x: 2 * x, donate=0, backend="eager")
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])

    Each branch of `lax.cond` and `lax.switch`, and the condition and the body of
    `lax.while_loop`, are compiled by themselves, and the host reads which of them runs next: on a
    GPU it waits there until that is computed. What rarely differs is cheaper by `torch.where`.

    Of what `shard_map` returned over a bound mesh, every rank calls it, and each compiles a part of
    the kernels. Over a simulated mesh, the simulation of all ranks is compiled.

    From its first call on the C library keeps the memory that this process frees, up to 2 GiB.

    It takes the place of torch.compile, which stops at every public function of this library: they
    look up the mesh's axes and other context, which dynamo would keep from its first call.

    Without `fn` it is a decorator: ``@jit(donate=0)``.

    Args:
        fn: a function of trees of tensors, positional, as `trace` takes it.
        donate: positions of arguments whose memory results take, as far as shapes, layouts and
            dtypes agree; they are gone afterwards, and using them raises.
        static: positions of arguments without tensors, that `fn` is compiled for anew where they
            change. Any other leaf that is no tensor must stay what it was.
        num_signatures: how many structures, shapes and dtypes of the other arguments to compile
            for, at most, with the same static arguments. The next one raises: compiling takes long,
            and a shape that changes is more often a mistake than a wish.
        cache: where compiled code is kept for later processes; None: where torch.compile keeps its.
        options: of Inductor (`torch._inductor.config`), such as ``{"max_autotune": True}``.
        overlap: issue collectives early and wait for them late, and merge small reductions.
        prefetch: gather the parameters of a scanned layer while the one before is computed, and
            reduce its gradients while the next one is; see `functron.program.overlap`.
        sequence_parts: cut gathers and scatters of sequences, as tensor parallelism has them, and
            the products beside them into this number of parts, each under the product of another;
            see `functron.program.overlap`. Products are smaller then.
        unroll: compile scans as one long graph instead of their body once: compile time then grows
            with depth, and kernels may fuse across iterations.
        graph: launch the whole program as one CUDA graph, from the third call with a signature on.
            Give the donated arguments as the last call returned them: their memory is the graph's.
        backend: "eager" runs the same graphs without compiling them, for tests.

    Raises:
        ValueError: a position is both donated and static.
    """
    settings = {
        "cache": cache,
        "options": options,
        "overlap": overlap,
        "prefetch": prefetch,
        "sequence_parts": sequence_parts,
        "unroll": unroll,
        "graph": graph,
        "backend": backend,
    }
    if fn is None:
        return functools.partial(
            jit, donate=donate, static=static, num_signatures=num_signatures, **settings
        )
    if num_signatures < 1:
        raise ValueError(f"jit: got num_signatures={num_signatures}; wanted 1 or more")
    donated, fixed = ((x,) if isinstance(x, int) else tuple(x) for x in (donate, static))
    both = sorted(set(donated) & set(fixed))
    if both:
        raise ValueError(f"jit: got arguments {both} both as donate and as static; wanted one")
    return Jitted(fn, donated, frozenset(fixed), num_signatures, settings)


@shows_table
class Jitted:
    """A function and what it was compiled to, by the abstract values of its arguments.

    Attributes:
        num_signatures: the most programs that are kept for one set of static arguments.
    """

    def __init__(
        self,
        fn: Callable,
        donate: tuple[int, ...],
        static: frozenset[int],
        num_signatures: int,
        settings: Mapping[str, Any],
    ):
        functools.update_wrapper(self, fn)
        self.fn, self.donate, self.static = fn, donate, static
        self.num_signatures, self.settings = num_signatures, settings
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._made: dict[Any, dict[Any, _Entry]] = {}

    @public
    def __call__(self, *args: tree.Tree, **kwargs: Any) -> tree.Tree:
        """The results of `fn`.

        Raises:
            TypeError: keyword arguments, or a static one that cannot be hashed.
            ValueError: a signature beyond `num_signatures`, with what changed; a donated tensor;
                memory shared by donated arguments; under a transform or with tensors that require
                gradients; and what `trace` and `compile` raise.
        """
        if kwargs:
            raise TypeError(
                f"jit: {self.name} got keyword arguments {sorted(kwargs)}; wanted positional ones"
            )
        if active() is not None:  # a part of a larger program
            return self.fn(*args)
        if watchers.get():
            raise TypeError(
                f"capture or intervene around the compiled function {self.name}: its values have "
                "no names any more; wanted them around what is compiled; fix: "
                "ft.jit(ft.capture(f, ...))"
            )
        leaves, structure = tree.flatten(args)
        with unwinding():
            if isinstance(self.fn, MappedFunction) and self.fn.aside is not None:
                self._check_tensors(args, leaves)
                if self.fn.aside(args):
                    return self.fn(*args)
            executable = self._executable(args, leaves, structure)
            out = executable.run(list(_tensors(leaves)))
        if isinstance(self.fn, MappedFunction) and self.fn.observe is not None:
            self.fn.observe(args, out)
        return out

    @public
    def trace(self, *args: tree.Tree) -> Program:
        """The program for such arguments, which may be abstract, uncompiled."""
        simulate = not (isinstance(self.fn, MappedFunction) and isinstance(self.fn.mesh, BoundMesh))
        return trace(self.fn, donate=self.donate, simulate=simulate)(*args)

    @public
    def compile(self, *args: tree.Tree) -> Executable:
        """The executable of a call with these arguments; compiled now, if there is none yet."""
        return self._executable(args, *tree.flatten(args))

    def _table(self) -> Table:
        given, made = self.fn, [each for kept in self._made.values() for each in kept.values()]
        inner = given._table() if isinstance(given, MappedFunction) else Table(self.name, ())
        notes = [f"donates {', '.join(map(str, self.donate))}"] if self.donate else []
        for entry in made[:3]:
            first = ", ".join(f"{path}: {text}" for path, text in [*entry.arguments.items()][:3])
            count = len(entry.arguments)
            leaves = "leaf" if count == 1 else "leaves"
            notes.append(f"compiled for {count} {leaves}: {first}{', ...' * (count > 3)}")
        notes += [] if made else ["not compiled yet"]
        notes += [f"... {len(made) - 3} more programs"] if len(made) > 3 else []
        return replace(inner, title=f"jit({inner.title})", notes=[*inner.notes, *notes])

    def _executable(self, args: tuple, leaves: list, structure: tree.Structure) -> Executable:
        self._check_tensors(args, leaves)
        static = self._static_key(args)
        signature = (structure, tuple(map(_abstractify, leaves)))
        try:
            entries = self._made.setdefault(static, {})
            entry = entries.get(signature)
        except TypeError as error:
            raise TypeError(f"{self.name}: {_explain_unhashable(args)}") from error
        if entry is None:
            if len(entries) == self.num_signatures:
                self._refuse_more([entry.arguments for entry in entries.values()], args)
            program = self.trace(*args)
            refuse_divided(program)
            self._check_parts(program)
            mesh = self.fn.mesh if isinstance(self.fn, MappedFunction) else None
            bound = mesh if isinstance(mesh, BoundMesh) else None
            described = {path: text for path, (_, text) in _describe_leaves(args).items()}
            with JointCall(f"compiling {self.name}", bound, alike=True):
                constants = tuple(x.value for x in program.inputs if x.value is not None)
                made = compile_program(program, bound, **self.settings)
                entry = _Entry(made, described, constants)
            entries[signature] = entry
        elif _may_differentiate():
            refuse_tracked(self.name, entry.constants)
        return entry.executable

    def _check_parts(self, program: Program) -> None:
        """Refuse to cut products beside gathers of sequences where there are none."""
        parts = self.settings["sequence_parts"]
        if parts > 1 and divide_sequences(program.block, parts) == program.block:
            refuse(
                f"{self.name} has nothing to cut",
                "sequence_parts",
                f"{parts}",
                "a program with gathers or scatters of sequences beside products, and rows on each "
                f"rank that {parts} divides",
                "split the sequence over tp (sequence_parallel), or leave it out",
            )

    def _check_tensors(self, args: tuple, leaves: list) -> None:
        refuse_donated(leaves, lambda: tree.paths(args), self.name)
        refuse_orphans(self.name, leaves)
        if compat.transforms_active():
            raise ValueError(
                f"{self.name}: got a compiled function under a torch.func transform; wanted jit "
                "outermost; fix: jit(grad(f)) instead of grad(jit(f)), and so on"
            )
        if _may_differentiate() and any(map(compat.is_tracked, _tensors(leaves))):
            raise ValueError(
                f"{self.name}: got tensors that require gradients or have tangents, and "
                "derivatives end at compiled code; fix: compute gradients inside, as in "
                "jit(ft.grad(f)), or "
                "detach the arguments"
            )

    def _static_key(self, args: tuple) -> tuple:
        bad = [i for i in self.static if not 0 <= i < len(args)]
        if bad:
            raise ValueError(f"jit: got static={bad}; wanted positions of {len(args)} arguments")
        parts = [(i, *tree.flatten(args[i])) for i in sorted(self.static)]
        raise_problems(
            f"{self.name}: static arguments",
            [
                Problem(f"argument {i}", "a tensor", "other values", "leave it out of static")
                for i, leaves, _ in parts
                if any(isinstance(leaf, torch.Tensor) for leaf in leaves)
            ],
            TypeError,
        )
        return tuple(
            (tuple(map(_abstractify, leaves)), structure) for _, leaves, structure in parts
        )

    def _refuse_more(self, known: list[dict[str, str]], args: tuple) -> None:
        """Say what is different from the nearest signature."""
        here = _describe_leaves(args)
        differences = []
        for there in known:
            paths = dict.fromkeys([*there, *here])
            text = {path: here[path][1] if path in here else "nothing" for path in paths}
            differences.append(
                [
                    Problem(
                        f"argument {p}", text[p], there.get(p, "nothing"), _signature_fix(p, here)
                    )
                    for p in paths
                    if there.get(p) != text[p]
                ]
            )
        raise_problems(
            f"{self.name} is compiled for {len(known)} signatures of arguments, as many as it may",
            min(differences, key=len)
            or [Problem("arguments", "other containers", "the same types of containers")],
        )


class _Entry(NamedTuple):
    executable: Executable
    arguments: dict[str, str]
    constants: tuple[torch.Tensor, ...]


def _abstractify(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        stride = canonical_strides(leaf.shape, leaf.stride())
        return TensorType(leaf.shape, stride, leaf.dtype, leaf.device)
    return type(leaf), leaf  # since True == 1 == 1.0


def _tensors(leaves: Sequence[Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _may_differentiate() -> bool:
    return torch.is_grad_enabled() or compat.pushing_forward()


def _describe_leaves(args: tuple) -> dict[str, tuple[bool, str]]:
    """Of every leaf whether it is a tensor, and what it is."""
    rows = zip(tree.paths(args), tree.leaves(args), strict=True)
    return {
        path: (True, describe(leaf)) if isinstance(leaf, torch.Tensor) else (False, repr(leaf))
        for path, leaf in rows
    }


def _signature_fix(path: str, here: dict[str, tuple[bool, str]]) -> str:
    if here.get(path, (True, ""))[0]:
        return "pass arguments alike, or allow more with jit(..., num_signatures=...)"
    return "make it a tensor, or give its position in jit(..., static=...)"


def _explain_unhashable(args: tuple) -> str:
    for path, leaf in zip(tree.paths(args), tree.leaves(args), strict=True):
        try:
            hash(_abstractify(leaf))
        except TypeError:
            kind, fix = type(leaf).__name__, dataclass_fix(leaf)
            if fix:
                return f"got a {kind} as argument {path}; wanted a tree of tensors; fix: {fix}"
            return f"got a {kind} as argument {path}; wanted a tensor, or what can be hashed"
    raise AssertionError("every leaf can be hashed")
