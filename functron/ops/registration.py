"""Operations of one's own: registered with a reference, and what is not given follows from it.

`define` is what functron's own ops are made by, each with shapes, rules and a gradient written
down. `register` needs a function in torch's operations, and derives the rest: it runs on fake
tensors for shapes, under vmap, is differentiated in both modes to any order, and counts FLOPs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from functron.core import compat
from functron.core.closure import copy_views, note_writes
from functron.core.errors import Problem, public, raise_problems
from functron.ops.launch import cuda
from functron.ops.nvrtc import SourceText, read
from functron.ops.operations import (
    Gradient,
    Launch,
    Op,
    build_op,
    map_one_by_one,
    map_rows,
    type_name,
)
from functron.spmd.simulate import explain_error

_OWN_NAMESPACE = "custom"
_DEVICES = {"cuda": "CUDA", "cpu": "CPU"}


@dataclass(frozen=True)
class CudaKernel:
    """A kernel in CUDA C++, compiled by NVRTC when it first runs on a GPU, and kept.

    Its parameters are pointers to the results, then the arguments in order: pointers (null for
    None), ``long long`` for integers and ``float`` for numbers. Tensors are contiguous.

    Attributes:
        text: the source, with ``extern "C" __global__ void NAME(...)``. It may include functron's
            headers, ``#include "numeric.cuh"``, and has a line for each macro with its values,
            ``// build: ELEMENT = float, __half``.
        name: of the kernel.
        grid: ``(*args)`` to the number of blocks, one to three.
        block: threads of a block.
        defines: ``(*args)`` to the values of these macros; None: ELEMENT, if it is one, is the C++
            type of the first tensor.
        shared_bytes: of dynamic shared memory.
    """

    text: str
    name: str
    grid: Callable[..., int | Sequence[int]]
    block: int = 256
    defines: Callable[..., Mapping[str, str]] | None = None
    shared_bytes: int = 0

    def run(self, launch: Launch, results: Sequence[torch.Tensor], args: Sequence) -> None:
        """Fill empty results."""
        source: Any = SourceText(self.name, self.text)
        if self.defines is not None:
            defines = dict(self.defines(*args))
        else:
            first = next(x for x in args if isinstance(x, torch.Tensor))
            named = "ELEMENT" in read(source).macros
            defines = {"ELEMENT": type_name(first, self.name)} if named else {}
        launch(
            source, self.name, self.grid(*args), self.block, *results, *args,
            defines=defines, shared_bytes=self.shared_bytes,
        )  # fmt: skip


class TensorDims(typing.NamedTuple):
    """How the dims of tensors belong together, parsed: a letter for each, after ``...`` or not.

    Attributes:
        operands: of every tensor among the parameters.
        results: of every result.
        rows: which operands have ``...``, leading dims of which every place is independent.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def rows(self) -> tuple[bool, ...]:
        return tuple(text.startswith("...") for text in self.operands)

    def label(
        self, name: str, given: Sequence[bool], shapes: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[str, ...], ...]]:
        """The letters of every dim of the operands that are given and of the results.

        Raises:
            ValueError: a shape has not so many dims.
        """
        words = (*itertools.compress(self.operands, given), *self.results)
        rows = []
        for word, shape in zip(words, shapes, strict=True):
            own = word.removeprefix("...")
            leading = len(shape) - len(own)
            if leading < 0 or (leading and own == word):
                raise ValueError(
                    f"partition: {name} got a tensor of shape {tuple(shape)} for {word!r} of its "
                    f"dims; wanted {len(own)} of them{' or more' * (own != word)}; fix: correct "
                    "dims= of ops.register"
                )
            rows.append((*((f"{i - leading}",) for i in range(leading)), *zip(own)))
        return rows


class _Signature(typing.NamedTuple):
    """The parameters of a reference as a schema has them."""

    signature: inspect.Signature
    types: tuple[str, ...]
    num_results: int

    def schema(self, name: str) -> str:
        """As torch writes it."""
        rows = zip(self.types, self.signature.parameters, strict=True)
        given = ", ".join(f"{kind} {each}" for kind, each in rows)
        results = ", ".join(["Tensor"] * self.num_results)
        return f"{name}({given}) -> {results if self.num_results == 1 else f'({results})'}"

    @property
    def tensors(self) -> list[int]:
        """The positions of tensors."""
        return [i for i, kind in enumerate(self.types) if kind.startswith("Tensor")]


_TYPES = {float: "float", int: "int", bool: "bool", str: "str"}


@public
def register(
    name: str,
    reference: Callable,
    *,
    kernel: Callable | CudaKernel | None = None,
    devices: Sequence[str] = ("cuda",),
    backward: Gradient | Callable | None = None,
    batch: Callable | None = None,
    dims: str | None = None,
    flops: Callable | None = None,
    partition: Callable | None = None,
) -> Op:
    r"""An operation that computes `reference`, by `kernel` where there is one.

    It is one operation in traced and compiled programs, and works under grad, jvp, vmap, remat and
    scan, on simulated meshes and on processes. A Triton kernel, with the function that launches it
    (here for Triton's interpreter, which runs on CPUs; without `devices`, on GPUs):

    >>> import triton, triton.language as tl
    >>> @triton.jit
    ... def scale_rows(out, x, scale, dim, BLOCK: tl.constexpr):
    ...     row, at = tl.program_id(0), tl.arange(0, BLOCK)
    ...     value = tl.load(x + row * dim + at, mask=at < dim)
    ...     factor = tl.load(scale + at, mask=at < dim)
    ...     tl.store(out + row * dim + at, tl.exp(value) * factor, mask=at < dim)
    >>> def launch(x, scale):
    ...     out, dim = torch.empty_like(x), x.shape[-1]
    ...     grid = (x.numel() // dim,)
    ...     scale_rows[grid](out, x, scale, dim, BLOCK=triton.next_power_of_2(dim))
    ...     return out
    >>> exp_scale = ft.ops.register(
    ...     "exp_scale",
    ...     lambda x, scale: x.exp() * scale,
    ...     kernel=launch,
    ...     devices=("cpu", "cuda"),
    ...     dims="...d,d->...d",
    ... )
    >>> exp_scale(torch.zeros(2, 3), torch.arange(3.0))
    tensor([[0., 1., 2.],
            [0., 1., 2.]])
    >>> ft.grad(lambda x: exp_scale(x, torch.ones(2)).sum())(torch.zeros(2))
    tensor([1., 1.])

    A name that is registered again, as by a cell of a notebook that runs twice, is another
    operation (``name_2`` in programs): what was traced before keeps the first.

    Args:
        name: of letters, digits and ``_``, or ``"namespace::name"``; programs show it.
        reference: ``(*args)`` in torch's operations, on any device and floating dtype. Parameters
            are tensors, unless annotated otherwise: float, int, bool, str, ``tuple[int, ...]``, or
            ``Tensor | None``. Several results are annotated, ``-> tuple[Tensor, Tensor]``.
        kernel: ``(*args)`` of contiguous tensors to contiguous results, such as a function that
            launches a Triton kernel, or a Helion kernel; or a `CudaKernel`. None: the reference.
        devices: the types of devices that `kernel` runs on; elsewhere the reference does.
        backward: ``(args, results, cotangents)`` to one cotangent per argument, None for those
            without, in operations that are differentiated again; linear in the tuple `cotangents`.
            Of an argument's own shape and dtype.
            Or a `Gradient`, which says what is kept. None: that of the reference, from the
            arguments. Forward mode is the reference's.
        batch: ``(size, in_dims, args, op) -> (results, out_dims)``, the op under vmap, as of
            `define`. None: as `dims` says; without it the reference under vmap, or with a backward
            of its own `op` once for every element.
        dims: how dims belong together, a letter for each, as an einsum: ``"bd,d->bd"``. The
            operation is independent along a small letter, so that `functron.partition` may split
            it; of one that results lack, results of parts add up. Along a CAPITAL one it is not.
            ``...`` are leading dims of any number, small ones, which vmap adds to.
        flops: ``(*args)`` to the FLOPs of `Program.cost`, of meta tensors; `policies.dots` then
            keeps its results. None: those of the reference.
        partition: the rule of `functron.partition`, a function of the equation, for what `dims`
            cannot say.

    Raises:
        ValueError, TypeError: a name, parameter, device or `dims` that does not fit; and when
            called, what `reference`, `kernel` or `backward` return.
    """
    found = _read_signature(name, reference)
    parsed = None if dims is None else _parse_dims(name, dims, found)
    _check_kernel(name, kernel, devices)
    library, short = _open_library(name)
    library.define(found.schema(short), tags=(torch.Tag.pt2_compliant_tag,))
    plain = functools.partial(_run_reference, name, reference, found.num_results)
    library.impl(short, plain, "CompositeExplicitAutograd")
    host = _host(name, plain, kernel)
    for device in devices if kernel is not None else ():
        library.impl(short, functools.partial(host, cuda), _DEVICES[device])
    given_batch = batch
    names = list(found.signature.parameters)
    gradient = reference if backward is None else _read_backward(name, names, backward)
    if batch is None:
        batch = _derive_batch(name, reference, backward is None, parsed, found)
    op = build_op(
        library, short, reference=reference, kernel=host, fake=plain, batch=batch,
        gradient=gradient, bind=functools.partial(_bind, name, found),
    )  # fmt: skip
    count = functools.partial(_count_flops, reference, flops)
    if flops is not None:
        register_flop_formula(op.raw.overloadpacket, get_raw=True)(count)
    given = {
        "kernel": kernel, "devices": tuple(devices), "backward": backward, "batch": given_batch,
        "dims": dims, "flops": flops, "partition": partition,
    }  # fmt: skip
    again = find_or_register, (f"{library.ns}::{short}", reference, given)
    op.raw.functron_own = OwnOperation(op, parsed, found.tensors, partition, count, again)
    return op


def find_or_register(name: str, reference: Callable, given: dict[str, Any]) -> Op:
    """The operation of this name; registered, if this process has none: as it travels to ranks."""
    namespace, short = name.split("::")
    entry = getattr(getattr(torch.ops, namespace), short, None)
    own = getattr(getattr(entry, "default", None), "functron_own", None)
    return register(name, reference, **given) if own is None else own.op


class OwnOperation(typing.NamedTuple):
    """A registered operation, as the attribute ``functron_own`` of its entry in torch.ops.

    Attributes:
        op: with its derivative.
        dims: how its dims belong together; None: not said.
        tensors: the positions of tensors among its arguments.
        partition: the rule of its equations; None: by `dims`.
        flops: ``(*args)`` to FLOPs, of meta tensors.
        again: a function and its arguments, which make the operation in another process.
    """

    op: Op
    dims: TensorDims | None
    tensors: Sequence[int]
    partition: Callable | None
    flops: Callable[..., int]
    again: tuple[Callable, tuple]


def _open_library(name: str) -> tuple[torch.library.Library, str]:
    """A library of the namespace of a name, and the name in it, or the next one that is free."""
    parts = name.split("::")
    namespace, short = parts if len(parts) == 2 else (_OWN_NAMESPACE, parts[0])
    if len(parts) > 2 or not (namespace.isidentifier() and re.fullmatch(r"[A-Za-z]\w*", short)):
        raise ValueError(
            f"register: got name={name!r}; wanted a word of letters, digits and _, or two, "
            '"namespace::name"; fix: rename it'
        )
    if short.endswith("_"):
        raise ValueError(
            f"register: got name={name!r}; wanted one that does not end in _, as of operations "
            "that write to their operands; fix: return results, and rename it"
        )
    entries, free = getattr(torch.ops, namespace), short
    for number in itertools.count(2):
        if not hasattr(entries, free):
            break
        if not hasattr(getattr(getattr(entries, free), "default", None), "functron_own"):
            raise ValueError(
                f"register: got name={name!r}, an operation of torch or of a library; wanted one "
                "that is free; fix: rename it"
            )
        free = f"{short}_{number}"
    return torch.library.Library(namespace, "FRAGMENT"), free


def _read_signature(name: str, reference: Callable) -> _Signature:
    signature = inspect.signature(reference)
    try:
        hints = typing.get_type_hints(reference)
    except (NameError, TypeError):  # of names that are only known to type checkers
        hints = {}
    types, problems = [], []
    for each in signature.parameters.values():
        kind = _type_of(hints.get(each.name, each.annotation))
        if each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            problems.append(
                Problem(each.name, str(each), "a positional parameter", "name each operand")
            )
        elif kind is None:
            wanted = "no annotation or Tensor, float, int, bool, str, tuple[int, ...], X | None"
            got = repr(hints.get(each.name, each.annotation))
            problems.append(Problem(each.name, got, wanted, "pass it flat, or close over it"))
        types.append(kind or "Tensor")
    raise_problems(f"register {name}: parameters of the reference", problems, TypeError)
    returned = hints.get("return", signature.return_annotation)
    several = typing.get_origin(returned) is tuple
    return _Signature(signature, tuple(types), len(typing.get_args(returned)) if several else 1)


def _type_of(hint: Any) -> str | None:
    """The type of a parameter in a schema; None: there is none."""
    if isinstance(hint, str):  # which could not be resolved
        word = hint.replace(" ", "").removesuffix("|None")
        own = [kind for kind in _TYPES if word == kind.__name__]
        hint = own[0] if own else torch.Tensor
    args = [x for x in typing.get_args(hint) if x is not type(None)]
    if type(None) in typing.get_args(hint) and len(args) == 1:
        kind = _type_of(args[0])
        return None if kind is None else f"{kind}?"
    if hint in _TYPES:
        return _TYPES[hint]
    if args and set(args) <= {int, ...} and typing.get_origin(hint) in (tuple, list, Sequence):
        return "int[]"
    is_tensor = hint in (inspect.Parameter.empty, torch.Tensor) or hasattr(hint, "array_type")
    return "Tensor" if is_tensor else None


def _bind(name: str, found: _Signature, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments in order."""
    try:
        bound = found.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{found.signature}: {error}") from None
    bound.apply_defaults()
    rows = zip(found.types, bound.arguments.items(), strict=True)
    raise_problems(
        f"{name} cannot use these arguments",
        [
            Problem(each, repr(value), "a tensor", f"make it one, or annotate {each} as it is")
            for kind, (each, value) in rows
            if kind == "Tensor" and not isinstance(value, torch.Tensor)
        ],
        TypeError,
    )
    return bound.args


def _run_reference(name: str, reference: Callable, count: int, *args: Any) -> Any:
    """Results as an operation returns them: contiguous, and no views of operands."""
    out = _call_reference(name, reference, *args)
    made = out if isinstance(out, (tuple, list)) else (out,)
    _check_count(name, "reference", made, count)
    own = [x.contiguous() for x in made]
    return own[0] if count == 1 else tuple(own)


def _call_reference(name: str, reference: Callable, *args: Any) -> Any:
    """The reference's results, with memory of their own; refused where it writes to operands."""
    check_writes = note_writes(f"{name}: the reference", [x for x in args if x is not None])
    out = reference(*args)
    check_writes()
    return copy_views(out, args)


def _check_count(name: str, what: str, made: Sequence, count: int) -> None:
    if len(made) != count or not all(isinstance(x, torch.Tensor) for x in made):
        got = ", ".join(type(x).__name__ for x in made)
        returns = "Tensor" if len(made) == 1 else f"tuple[{', '.join(['Tensor'] * len(made))}]"
        raise ValueError(
            f"{name}: {what} returned ({got}); wanted {count} tensors, as the reference is "
            f"annotated; fix: annotate the reference -> {returns}, or correct what it returns"
        )


def _check_kernel(name: str, kernel: Any, devices: Sequence[str]) -> None:
    if type(kernel).__module__.startswith("triton."):
        raise TypeError(
            f"register {name}: got a Triton kernel by itself; wanted a function of the reference's "
            "arguments that makes results and launches it; fix: kernel=lambda x: ..."
        )
    unknown = [device for device in devices if device not in _DEVICES]
    if unknown or isinstance(devices, str):
        raise ValueError(
            f'register {name}: got devices={devices!r}; wanted a tuple of "cuda" and "cpu"; '
            'fix: devices=("cuda",)'
        )
    if isinstance(kernel, CudaKernel) and tuple(devices) != ("cuda",):
        raise ValueError(
            f'register {name}: got devices={tuple(devices)} for CUDA text; wanted ("cuda",); fix: '
            "leave devices out"
        )


def _host(name: str, plain: Callable, kernel: Callable | CudaKernel | None) -> Callable:
    """``(launch, *args)`` to the kernel's results, of the shapes of the reference's."""

    @functools.lru_cache(256)
    def results_of(key: tuple) -> list[tuple]:
        made = plain(*[_meta(row) if type(row) is _TensorRow else row for row in key])
        return [(tuple(x.shape), x.dtype) for x in _as_tuple(made)]

    def run(launch: Launch, *args: Any) -> Any:
        if kernel is None:
            return plain(*args)
        args = tuple(x.contiguous() if isinstance(x, torch.Tensor) else x for x in args)
        wanted = results_of(tuple(map(_describe, args)))
        if isinstance(kernel, CudaKernel):
            device = next(x.device for x in args if isinstance(x, torch.Tensor))
            out = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]
            kernel.run(launch, out, args)
            return out[0] if len(out) == 1 else tuple(out)
        out = kernel(*args)
        made = out if isinstance(out, (tuple, list)) else (out,)
        _check_count(name, "kernel", made, len(wanted))
        raise_problems(
            f"{name}: the kernel's results are not those of the reference",
            [
                Problem(f"result {i}", f"{tuple(x.shape)} {x.dtype}", f"{shape} {dtype}")
                for i, (x, (shape, dtype)) in enumerate(zip(made, wanted, strict=True))
                if (tuple(x.shape), x.dtype) != (shape, dtype)
            ],
        )
        own = [x.contiguous() for x in made]
        return own[0] if len(own) == 1 else tuple(own)

    return run


class _TensorRow(typing.NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorRow(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _meta(row: _TensorRow) -> torch.Tensor:
    return torch.empty(row.shape, dtype=row.dtype, device="meta")


def _as_tuple(out: Any) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _read_backward(name: str, names: Sequence[str], backward: Gradient | Callable) -> Gradient:
    if isinstance(backward, Gradient):
        rule = backward
    else:
        given: Callable = backward

        def of_all(saved: Sequence, cotangents: tuple) -> Any:
            count, *values = saved
            return given(tuple(values[:count]), tuple(values[count:]), cotangents)

        rule = Gradient(of_all, save=lambda args, outputs: (len(args), *args, *outputs))

    def checked(saved: Sequence, cotangents: tuple) -> Sequence:
        kinds, *values = saved
        check_writes = note_writes(f"{name}: backward", cotangents, values)
        grads = rule.backward(values, cotangents)
        check_writes()
        if not isinstance(grads, (tuple, list)):
            raise TypeError(
                f"{name}: backward returned {type(grads).__name__}; wanted a tuple with one "
                "cotangent for each argument; fix: return (x,)"
            )
        _check_cotangents(name, names, kinds, grads)
        return grads

    def save(args: tuple, outputs: tuple) -> tuple:
        kinds = tuple(_describe(x) if isinstance(x, torch.Tensor) else None for x in args)
        return (kinds, *rule.save(args, outputs))

    return Gradient(checked, save, rule.auxiliary)


def _check_cotangents(
    name: str, names: Sequence[str], kinds: Sequence[_TensorRow | None], grads: Sequence
) -> None:
    """Refuse cotangents that are not like the arguments, of these kinds (None: no tensor)."""
    if len(grads) != len(kinds):
        raise ValueError(
            f"{name}: backward returned {len(grads)} cotangents; wanted one for each of the "
            f"{len(kinds)} arguments ({', '.join(names)}); fix: return None for those without"
        )
    problems = []
    for operand, kind, grad in zip(names, kinds, grads, strict=True):
        if grad is None or (kind is not None and not kind.dtype.is_floating_point):
            continue
        got = _describe(grad) if isinstance(grad, torch.Tensor) else type(grad).__name__
        if kind is None:
            problems.append(Problem(operand, f"{got}", "None, as it is no tensor"))
        elif not isinstance(got, _TensorRow):
            problems.append(Problem(operand, got, f"a tensor, {kind}", "torch.full_like(...)"))
        elif got != kind:
            fix = (
                "sum it over dims that the operand lacks" if got.shape != kind.shape else "cast it"
            )
            problems.append(Problem(operand, f"{got}", f"{kind}, as the operand", fix))
    raise_problems(f"{name}: backward returned cotangents that are not like the operands", problems)


def _derive_batch(
    name: str, reference: Callable, derived: bool, dims: TensorDims | None, found: _Signature
) -> Callable:
    if dims is not None and any(dims.rows):
        own = zip(found.tensors, dims.rows, strict=True)
        return map_rows(whole=[i for i, is_rows in own if not is_rows])
    if not derived:
        return map_one_by_one
    run = functools.partial(_call_reference, name, reference)

    def batch(size: int, in_dims: tuple, args: tuple, op: Callable) -> tuple[Any, Any]:
        try:
            out = torch.func.vmap(run, in_dims)(*args)
        except (RuntimeError, KeyError) as error:
            if (means := explain_error(error)) is None:
                raise
            means = means.removeprefix("shard_map: ").replace("the program", "its reference", 1)
            raise ValueError(f"{name} under vmap: {means}") from error
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return batch


def _count_flops(
    reference: Callable, flops: Callable | None, *args: Any, out_val: Any = None
) -> int:
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    if flops is not None:
        return int(flops(*meta))
    with compat.no_dispatch_modes(), FlopCounterMode(display=False) as counter:
        reference(*meta)
    return counter.get_total_flops()


def _parse_dims(name: str, text: str, found: _Signature) -> TensorDims:
    sides = text.replace(" ", "").split("->")
    wanted = (len(found.tensors), found.num_results)
    if len(sides) == 2:
        made = TensorDims(*(tuple(side.split(",")) for side in sides))
        words = [word.removeprefix("...") for word in (*made.operands, *made.results)]
        fits = (len(made.operands), len(made.results)) == wanted
        good = all(re.fullmatch("[A-Za-z]*", word) and len({*word}) == len(word) for word in words)
        if fits and good and {*"".join(made.results)} <= {*"".join(made.operands)}:
            return made
    raise ValueError(
        f"register {name}: got dims={text!r}; wanted letters for {wanted[0]} tensors, ->, and "
        f"those for {wanted[1]} results, each letter once in a tensor and none of results alone; "
        'fix: as an einsum, such as "...d,d->...d"'
    )
