"""Recording: the ATen operations that a function runs on fake tensors, as equations.

A `Recorder` is a dispatch mode above a fake-tensor mode. Below every torch.func transform and the
autograd tape it sees plain operations on plain tensors, so it records any program, with its
backward pass, in the order in which it runs. It keeps frames: the body of a scan is recorded in a
frame of its own, and what it uses of the frames around it becomes an operand of the scan.

Views, writes and draws of an operation are those that its schema declares.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functron.core import compat
from functron.core.scopes import phase, scope_names, set_during
from functron.program.equations import (
    Block,
    ControlFlow,
    Equation,
    Input,
    Strided,
    Switch,
    TensorType,
    Var,
    Where,
    While,
    as_memory,
    as_value,
    canonical_strides,
    copy_contiguous,
    functional_form,
    memory_order,
    overlaps,
    reaches_outside,
    read_view,
    span_of,
    strided_of,
    write_view,
)
from functron.spmd.axes import user_line
from functron.spmd.simulate import BRANCHES, DRAWS, READS, explain


def draws(func: torch._ops.OpOverload, args: Sequence, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention kernels do only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given))
    return True


class _UnlikeError(Exception):
    """An operand whose results cannot be cached."""


def _describe_operands(value: Any) -> Any:
    """A hashable description of operands: the key under which the results' shapes are cached.

    Raises:
        _UnlikeError: one of them cannot be described.
    """
    kind = type(value)
    if kind is FakeTensor:
        plain = value.layout is torch.strided and not value.dtype.is_complex
        if value.constant is not None or not plain:
            raise _UnlikeError
        return TensorType(tuple(value.shape), value.stride(), value.dtype, value.fake_device)
    if kind is list or kind is tuple:
        return kind, tuple([_describe_operands(item) for item in value])
    if kind is dict:
        return kind, tuple([(name, _describe_operands(item)) for name, item in value.items()])
    if not _is_plain(value):
        raise _UnlikeError
    return kind, value  # 1 and 1.0 are equal


def _make_operands(described: Any, mode: FakeTensorMode) -> Any:
    """Operands of that description."""
    if isinstance(described, TensorType):
        return compat.fake(mode, *described)
    kind, value = described
    if kind is list or kind is tuple:
        return kind([_make_operands(item, mode) for item in value])
    return {name: _make_operands(item, mode) for name, item in value} if kind is dict else value


def _describe_result(x: torch.Tensor) -> TensorType | None:
    """The description of a result with memory of its own; None where it is not complete."""
    if not isinstance(x, FakeTensor) or x.constant is not None or x.layout is not torch.strided:
        return None
    like = TensorType(tuple(x.shape), x.stride(), x.dtype, x.fake_device)
    least = span_of(like.shape, like.stride) * like.dtype.itemsize
    return like if x.untyped_storage().nbytes() == least else None


@functools.lru_cache(1 << 16)
def _infer_results(func: torch._ops.OpOverload, described: Any, dtype: torch.dtype) -> Any:
    """Descriptions of the results of `func`: a `TensorType`, or a type and several.

    None where they are not complete, as of results that share memory.

    Args:
        described: its args and kwargs, by `_describe_operands`.
    """
    asking = active()
    assert asking is not None
    mode = asking.fake  # a new one reads all lines of the stack; the results are the same
    with compat.no_dispatch_modes(), mode:
        operands = _make_operands(described, mode)
        out = func(*operands[0], **operands[1])
    several = type(out) in (list, tuple)
    leaves = list(out) if several else [out]
    likes = [_describe_result(leaf) for leaf in leaves]
    if None in likes:
        return None
    tensors = [*leaves, *(x for x in pytree.tree_leaves(operands) if isinstance(x, FakeTensor))]
    if len({x.untyped_storage()._cdata for x in tensors}) < len(tensors):
        return None
    return (type(out), likes) if several else likes[0]


@functools.cache
def _result_memory(func: Any) -> Literal["new", "view", "other"]:
    """Whether results have new memory or are views of an operand; "other": only torch can tell."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return "other"
    if func is _aten.lift_fresh.default:  # what a constant is made of
        return "other"
    if func is _aten._new_zeros_with_same_feature_meta.default:  # of the same memory, that is
        return "other"
    if not func.is_view:
        return "new"
    return "other" if compat.is_composite(func) else "view"


_aten = torch.ops.aten
_UNTAPED = {getattr(_aten, f"logical_{name}_").default for name in ("and", "or", "xor", "not")}
"""Writes that torch's tape takes no note of: they leave the derivative of what they overwrite."""
_GROUPED_MM = _aten._grouped_mm.default
_EXPERTS = (
    'for experts of transformers model.config._experts_implementation = "batched_mm", or a '
    "function that you register there and that calls mixture (functron/nn/moe)"
)
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}


@functools.cache
def _is_factory(func: Any) -> bool:
    """Whether results are numbers that are known without those of operands."""
    name = func._schema.name.split("::")[1]
    tensors = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return name.endswith("_like") or name.startswith("new_") or not tensors


_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "functron_recorder", default=None
)


def active() -> Recorder | None:
    """The recorder that records what runs here; None where nothing is being traced."""
    return _active.get()


def not_recording() -> AbstractContextManager[None]:
    """Run a with block without recording it."""
    return set_during(_active, None)


_keeper: contextvars.ContextVar[Any] = contextvars.ContextVar("functron_keeper", default=None)
_origin: contextvars.ContextVar[str] = contextvars.ContextVar("functron_origin", default="")


def keeper() -> Any:
    """The object that records each call of a transform as one operation; None: transforms run.

    Its methods have the names of the transforms. `functron.partition` differentiates and
    recomputes after it has chosen placements.
    """
    return _keeper.get()


def keeping(keeper: Any) -> AbstractContextManager[None]:
    """Let transforms in this with block ask `keeper` to record their calls."""
    return set_during(_keeper, keeper)


def readable(value: torch.Tensor) -> bool:
    """Whether the number in a 0-dim tensor is known where the program that runs can ask for it.

    Not in a program that is traced, compiled or only checked, nor under torch.func transforms that
    batch or differentiate it. Reading waits for the tensor's device.
    """
    if active() is not None or compat.faking() or value.is_meta:
        return False
    return not compat.is_wrapped(value) and not value.requires_grad


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run a with block as if nothing were being traced or transformed around it."""
    with not_recording(), compat.no_transforms(), compat.no_dispatch_modes():
        yield


def from_line(line: str) -> AbstractContextManager[None]:
    """Say that what is recorded in this with block is of that line of the user's program."""
    return set_during(_origin, line)


class Frame:
    """A list of equations being recorded, and the frame around it.

    Attributes:
        stands_for: of inputs that are values of the frame around it whenever it runs, these values.
    """

    def __init__(self, outer: Frame | None = None):
        self.outer = outer
        self.equations: list[Equation] = []
        self.known: set[Var] = set()
        self.captured: dict[Var, Var] = {}
        self.stands_for: dict[Var, Var] = {}


class Recorder(TorchDispatchMode):
    """Records the operations of a with block.

    Attributes:
        constants: real tensors that the program uses without having been passed them, by `Var`.
        given: the inputs of the program, as far as they are known.
    """

    supports_higher_order_operators = True  # to refuse them with an explanation

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake.cache_enabled = False  # see `_compute`
        self.constants: dict[Var, torch.Tensor] = {}
        self.given: list[Input] = []
        self._root = self._frame = Frame()
        self._vars: dict[int, tuple[torch.Tensor, Var]] = {}  # keeps tensors: ids stay theirs
        self._reals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._names: Counter[str] = Counter()
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._bases: dict[int, torch.Tensor] = {}  # the tensor that made a storage, by storage
        self._fixed: dict[int, str] = {}
        self._stale: dict[int, str] = {}
        self._detached: set[int] = set()  # tensors of which a keeper knows no derivative
        self._wheres: dict[int, Where] = {}
        self._node = compat.autograd_sequence_number()
        self._taped = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in this with block."""
        # one thread, so that backward sees this mode and the named scopes
        threads = torch.autograd.set_multithreading_enabled(False)
        with set_during(_active, self), threads, self.fake, self:
            yield

    @contextlib.contextmanager
    def frame(self) -> Iterator[Frame]:
        """Record what runs in this with block in a frame of its own."""
        self._frame = inner = Frame(self._frame)
        try:
            yield inner
        finally:
            assert inner.outer is not None
            self._frame = inner.outer

    @property
    def frames(self) -> list[Frame]:
        """The frames that what runs here is recorded in, from the program's own inwards."""
        found: list[Frame] = [self._frame]
        while (outer := found[0].outer) is not None:
            found.insert(0, outer)
        return found

    @property
    def depth(self) -> int:
        """The number of scan bodies, one in the other, that what runs here is recorded in."""
        return len(self.frames) - 1

    # --- tensors and values

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype, device) -> torch.Tensor:
        """A fake tensor that no equation has made."""
        # plain, as this may be asked for from inside a transform (an axis index, say)
        with compat.no_transforms(), compat.no_dispatch_modes(), self.fake:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)

    def input(
        self, tensor: torch.Tensor, name: str, *, fixed: str | None = None, root: bool = False
    ) -> Var:
        """Declare a fake tensor as an input of the current frame.

        Args:
            fixed: what it is, in the user's words, where it must not be modified in place.
            root: an input of the whole program instead, which inner frames capture.
        """
        var = self.name(tensor, name)
        (self._root if root else self._frame).known.add(var)
        if fixed is not None:
            self._fixed[var.storage] = fixed
        return var

    def emit(self, op: Any, operands: Sequence[Var], results: Sequence[tuple]) -> list:
        """Append an equation; its results, as fake tensors. `results` are arguments of `empty`."""
        tensors = [self.empty(*result) for result in results]
        name = op.kind if isinstance(op, ControlFlow) else op.name().split("::")[1]
        outputs = tuple(self.name(tensor, name) for tensor in tensors)
        self._append(Equation(op, tuple(operands), {}, outputs, self._where()))
        return tensors

    def effect(self, op: Any, *args: Any, **options: Any) -> None:
        """Append an equation without results, which is kept for its side effect."""
        args, options = pytree.tree_map_only(torch.Tensor, self.var, (args, options))
        self._append(Equation(op, args, options, (), self._where()))

    def var(self, tensor: torch.Tensor) -> Var:
        """The value that a tensor stands for in the current frame.

        Raises:
            ValueError: the tensor belongs to no value of this program.
        """
        if not isinstance(tensor, FakeTensor):
            tensor = self._constant(tensor)
        found = self._vars.get(id(tensor))
        if found is None:
            raise ValueError(
                f"trace: at {_line()} the program uses a tensor of shape {tuple(tensor.shape)} "
                "that it never made and was not passed; wanted a value of this program. It was "
                "probably kept from another trace; fix: pass it as an argument"
            )
        if id(tensor) in self._stale:
            self._refresh(tensor)
        return self._resolve(self._frame, self._vars[id(tensor)][1])

    def _resolve(self, frame: Frame, var: Var) -> Var:
        if var in frame.known:
            return var
        if frame.outer is None:
            raise ValueError(
                f"trace: at {_line()} the program uses a tensor of shape {var.shape} that was made "
                "inside a scanned function; wanted what that function returns: it runs many times; "
                "fix: return the tensor as the carry or as y instead of keeping it"
            )
        if var not in frame.captured:
            outer = self._resolve(frame.outer, var)
            frame.captured[var] = outer
        return var

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        if id(real) not in self._reals:
            plain = real.detach()
            fake = self.empty(plain.shape, plain.stride(), plain.dtype, plain.device)
            self._reals[id(real)] = (real, fake)
            var = self.name(fake, "constant")
            self._root.known.add(var)
            self.constants[var] = real
            self._fixed[var.storage] = "a tensor that the function closes over"
        return self._reals[id(real)][1]

    def name(self, tensor: torch.Tensor, name: str) -> Var:
        """A new value for a fake tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages and _is_dense(tensor):
            self._bases[storage._cdata] = tensor
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        name = _identifier(name)
        count = self._names[name]
        self._names[name] += 1
        var = Var(
            f"{name}_{count}" if count or name[-1].isdigit() else name,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            # torch's own attribute is an operation of the mode
            tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device,
            number,
            storage.nbytes(),
        )
        self._vars[id(tensor)] = (tensor, var)
        return var

    # --- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # a tape, of whatever transform, makes its node just before the operation is seen here
        node, before = compat.autograd_sequence_number(), self._node
        self._node, self._taped = node, node != before
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise ValueError(f"trace: at {_line()} the program {explain(BRANCHES, func.name())}")
        if compat.proxies_active():
            raise ValueError(
                f"trace: at {_line()} the program traces a part of itself with another tracer "
                "(torch.func.linearize, make_fx), which would see nothing; wanted transforms of "
                "functions; fix: torch.func.jvp(f, (x,), (v,)) in place of "
                "torch.func.linearize(f, x)[1](v)"
            )
        stops = keeper() is not None and func is _aten.detach.default
        if func in _SAME and isinstance(args[0], torch.Tensor) and not stops:
            return self._record_alias(func, args[0])
        self._refuse(func, args, kwargs)
        if func is _aten._efficientzerotensor.default:
            func = _aten.zeros.default  # with memory: compiled code writes into it
        args, kwargs = map_only(torch.Tensor, self._as_fake, (args, dict(kwargs)))
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        if func in _STRIDED:
            return _STRIDED[func](self, func, args, kwargs)
        if func in _BATCH_NORMS and args[3] is not None and args[5]:
            out = self._normalize_batch(func, args)
        else:
            out = self._record_call(func, args, kwargs)
        # a program that is differentiated once it is recorded needs to know where gradients stop
        return map_only(torch.Tensor, self._stop_gradient, out) if self._stops_gradients() else out

    def _record_call(self, func, args, kwargs):
        out = self._run(func, args, kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _stops_gradients(self) -> bool:
        keep = keeper()
        return keep is not None and keep.stops_gradients()

    def _stop_gradient(self, x: torch.Tensor) -> torch.Tensor:
        out = self._record_call(_aten.detach.default, (x,), {})
        storage = x.untyped_storage()._cdata
        if self._bases.get(storage) is x:
            self._bases[storage] = out  # x itself is not returned
        return out

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)

    def _record_alias(self, func, tensor: torch.Tensor) -> torch.Tensor:
        """An operation that only makes another tensor object of a value."""
        fake = self._as_fake(tensor)
        out = self._compute(func, (fake,), {})
        self._vars[id(out)] = (out, self._vars[id(fake)][1] if id(fake) in self._vars else
                               self.var(fake))  # fmt: skip
        if id(fake) in self._stale:
            self._stale[id(out)] = self._stale[id(fake)]
        return out

    def _refuse(self, func, args, kwargs) -> None:
        if draws(func, args, kwargs):
            raise ValueError(f"trace: at {_line()} the program {explain(DRAWS, func)}")
        if func is _GROUPED_MM and (keeper() is not None or args[0].dtype != torch.bfloat16):
            raise ValueError(
                f"trace: at {_line()} the program multiplies groups of rows ({func}) of "
                f"{args[0].dtype}; wanted shapes that do not depend on data in a function that is "
                "partitioned, and elsewhere torch.bfloat16, of which alone torch knows the shapes; "
                f"fix: {_EXPERTS}"
            )

    def _run(self, func, args, kwargs):
        try:
            return self._compute(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            text = f"trace: at {_line()} the program {explain(READS, func)}"
            text += f"; or {_EXPERTS}" if "expert" in _line() else ""
            raise ValueError(text) from error

    def _compute(self, func, args, kwargs):
        """``func(*args, **kwargs)`` of fake tensors.

        Shapes are known from earlier calls. torch keeps them too, but takes a third of the time of
        a trace to describe operands, and keeps none of operations that are not its own.
        """
        if func is _aten._unsafe_view.default:
            func = _aten.view.default  # it is one, by another name for the tape
        # not what vmap does at the end of a level itself: it would be seen again from inside
        kind = "other" if compat.transforms_active() else _result_memory(func)
        if kind == "view" and type(args[0]) is FakeTensor and args[0].constant is None:
            return compat.fake_view(self.fake, func, args, kwargs)
        if kind != "new":
            return func(*args, **kwargs)
        try:
            described = _describe_operands((args, kwargs))
        except _UnlikeError:
            return func(*args, **kwargs)
        found = _infer_results(func, described, torch.get_default_dtype())
        if found is None:
            return func(*args, **kwargs)
        if isinstance(found, TensorType):
            return compat.fake(self.fake, *found)
        kind, likes = found
        return kind([compat.fake(self.fake, *like) for like in likes])

    def _record(self, func, args, kwargs, out) -> None:
        leaves = [out] if isinstance(out, torch.Tensor) else pytree.tree_flatten(out)[0]
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and leaves:
            return  # a size or a concrete number
        operands, named = map_only(torch.Tensor, self.var, (args, kwargs))
        name = func.name().split("::")[1].split(".")[0]
        outputs = tuple(
            self.name(leaf, name) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )
        self._append(Equation(func, operands, named, outputs, self._where()))
        if keeper() is not None:
            stops = func is _aten.detach.default or _is_factory(func)
            if stops or (func.is_view and id(args[0]) in self._detached):
                self._detached.update(map(id, leaves))

    def _append(self, equation: Equation) -> None:
        self._frame.known.update(equation.results)
        self._frame.equations.append(equation)

    def _where(self) -> Where:
        """Scopes and line; in backward, those of the forward operation being differentiated."""
        node = compat.current_autograd_node()
        if node is None or phase() == "recompute":
            here = Where(phase(), scope_names(), _line())
            # the tape's node was made just before; operations without one come after it
            self._wheres.setdefault(compat.autograd_sequence_number(), here)
            return here
        source = self._wheres.get(node._sequence_nr())
        if source is None:
            return Where(phase(), scope_names(), _line())
        return Where(phase(), source.scopes, source.line)

    # --- in-place operations

    def _mutate(self, func, args, kwargs):
        """Record the functional form of an in-place operation, and rename its operand."""
        functional = functional_form(func)
        if functional is None:
            raise ValueError(
                f"trace: at {_line()} {func} modifies memory and has no functional form; wanted "
                "pure operations; fix: write it out of place"
            )
        targets = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        for target in targets:
            self._check_mutable(target, func)
        if torch.Tag.inplace_view in func.tags:
            return self._reshape(targets[0], func, functional, args, kwargs)
        out = self._compute_functional(func, functional, args, kwargs)
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        for target, result in zip(targets, results, strict=True):
            self._write(target, result, func)
        return args[0] if func._schema.returns else None

    def _compute_functional(self, func, functional, args, kwargs) -> Any:
        """The new values of an in-place operation, by operations that have derivatives."""
        if func is _aten.zero_.default:
            return self._record_call(_aten.zeros_like.default, args, kwargs)
        if func is not _aten.copy_.default:
            return self._record_call(functional, args, kwargs)
        target, source = args[:2]
        with self:
            source = self._convert(source, target)
            if source.shape != target.shape:
                source = source.expand(target.shape)
            return copy_contiguous(source)

    def _convert(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """x in the dtype and on the device of another."""
        assert isinstance(x, FakeTensor)
        assert isinstance(like, FakeTensor)
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.fake_device}
        same = (x.dtype, x.fake_device) == (like.dtype, like.fake_device)
        return x if same else _aten._to_copy.default(x, **kind)

    def _normalize_batch(self, func, args) -> tuple[torch.Tensor, ...]:
        """A batch norm in training, which writes to its running statistics, as results and writes.

        That schema does not say so; what it does to its operands a program must not.
        """
        if func is not _aten.native_batch_norm.default and keeper() is None:
            raise ValueError(
                f"trace: at {_line()} {func} modifies running statistics, and keeps for backward "
                "what no other operation has; wanted one that returns them; fix: "
                "torch.backends.cudnn.flags(enabled=False) around it"
            )
        for target in args[3:5]:
            self._check_mutable(target, func)
        out = self._record_call(_aten._native_batch_norm_legit_functional.default, args, {})
        for target, result in zip(args[3:5], out[3:], strict=True):
            self._write(target, result, func)
        rest = len(func._schema.returns) - 3
        return (*out[:3], *(args[0].new_empty(0, dtype=torch.uint8) for _ in range(rest)))

    def _reshape(self, target: torch.Tensor, func, functional, args, kwargs) -> torch.Tensor:
        """`target` shows its memory in another shape from here on, as after ``squeeze_``."""
        if target.requires_grad and self._bases.get(target.untyped_storage()._cdata) is not target:
            raise ValueError(
                f"trace: at {_line()} {func} changes the shape of a view that is differentiated, "
                "which torch's tape forgets when the view is written to; wanted another tensor; "
                f"fix: use what {functional} returns"
            )
        out = (
            self._restride(target, func, functional, args, kwargs)
            if functional in _STRIDED
            else self._record_call(functional, args, kwargs)
        )
        self._run(func, args, kwargs)
        self._vars[id(target)] = (target, self._vars[id(out)][1])
        return target

    def _restride(self, target: torch.Tensor, func, functional, args, kwargs) -> torch.Tensor:
        """A view of other places of `target`'s memory, of which it may show a part."""
        if self._taped and keeper() is None:
            raise ValueError(
                f"trace: at {_line()} {func} changes what memory a tensor shows that is "
                "differentiated, of which torch's tape forgets the rest; wanted another tensor; "
                f"fix: use what {functional} returns"
            )
        out = _STRIDED[functional](self, functional, args, kwargs)
        storage = target.untyped_storage()._cdata
        if self._bases.get(storage) is target:  # whose other views still need all of it
            self._bases[storage] = self._record_alias(_aten.alias.default, target)
        return out

    def _check_mutable(self, target: torch.Tensor, func) -> None:
        var = self.var(target)
        if var.storage in self._fixed:
            raise ValueError(
                f"trace: at {_line()} {func} modifies {self._fixed[var.storage]} in place; wanted "
                "a pure function of it; fix: return the new value, and donate the argument "
                "(donate=) so that it takes the old one's memory"
            )

    def _write(self, target: torch.Tensor, result: torch.Tensor, func) -> None:
        """From here on `target` means `result`, and so does what shares its memory."""
        if result.shape != target.shape:
            raise ValueError(
                f"trace: at {_line()} {func} gives a result of shape {tuple(result.shape)}, and "
                f"would write it to a tensor of shape {tuple(target.shape)}; wanted operands that "
                "broadcast to what is modified; fix: write the operation out of place"
            )
        if result.dtype != target.dtype:  # a wider operand's, of which the memory takes its own
            with self:
                result = self._convert(result, target)
        base = self._bases.get(target.untyped_storage()._cdata)
        if base is None or self._vars[id(base)][1] is self._vars[id(target)][1]:
            result = self._keep_derivative(target, target, self._match_layout(result, target), func)
            self._rename(target, result, func)
            return
        self._check_window(target, base, func)
        # through a view: put the result into the whole, of which views are then taken anew
        with self:
            place = strided_of(target, base)
            memory = write_view(as_memory(base, base), result, place)
            whole = as_value(memory, base)
        new = self._match_layout(whole, base)
        taped = self._keep_derivative(target, base, new, func)
        shown = self._vars[id(result)][1]
        self._rename(base, taped, func)
        # the result itself, where no view of the whole has its numbers, or its derivative
        all_of_it = target.numel() == base.numel() and shown.stride == tuple(target.stride())
        if all_of_it if taped is new else not self._stops_gradients():
            del self._stale[id(target)]
            self._vars[id(target)] = (target, shown)
            self._detached.discard(id(target))

    def _keep_derivative(self, target, base, new: torch.Tensor, func) -> torch.Tensor:
        """`new`, with the derivative that what `base` shows has after a write to `target`.

        Where torch's tape does not see the write, in a ``no_grad``, through a detached tensor, or
        by an operation that it takes no note of, the derivative stays that of the old value.
        """
        stops = self._stops_gradients() or (keeper() is not None and func in _UNTAPED)
        moves = new.is_floating_point() or new.is_complex()
        if not moves or not (stops or id(target) in self._detached):
            return new
        if id(base) not in self._detached:
            return self._record_call(keeper().overwritten, (base, new), {})
        if stops:
            return self._stop_gradient(new)
        storage = base.untyped_storage()._cdata  # it has one from here on
        for key, (tensor, _) in self._vars.items():
            if tensor.untyped_storage()._cdata == storage:
                self._detached.discard(key)
        return new

    def _check_window(self, target: torch.Tensor, base: torch.Tensor, func) -> None:
        """Refuse a write through a view that is known to torch alone."""
        if target.dtype == base.dtype and not overlaps(target.shape, target.stride()):
            return
        what = "overlap" if target.dtype == base.dtype else f"are those of a {base.dtype} value"
        raise ValueError(
            f"trace: at {_line()} {func} modifies a view in place, of shape {tuple(target.shape)} "
            f"and strides {tuple(target.stride())}, whose elements {what}; wanted a view of "
            "elements that it alone shows; fix: modify a copy, or write the operation out of place"
        )

    def _match_layout(self, result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`result` in the layout of a dense `target`, whose views count on it."""
        strides = [canonical_strides(x.shape, x.stride()) for x in (result, target)]
        if strides[0] == strides[1] or not _is_dense(target):
            return result
        with self:
            return as_value(copy_contiguous(as_memory(result, target)), target)

    def _rename(self, target: torch.Tensor, result: torch.Tensor, func) -> None:
        old, new = self._vars[id(target)][1], self._vars[id(result)][1]
        storage = target.untyped_storage()
        self._storages[storage._cdata] = (new.storage, storage)
        for key, (tensor, var) in list(self._vars.items()):
            if var is old:
                self._vars[key] = (tensor, new)
            elif tensor.untyped_storage()._cdata == storage._cdata:
                self._stale[key] = f"{func} at {_line()}"

    def _refresh(self, tensor: torch.Tensor) -> None:
        """Take a view anew from memory that was modified since the view was taken."""
        base = self._bases.get(tensor.untyped_storage()._cdata)
        reason = self._stale.pop(id(tensor))
        if base is None or id(base) in self._stale or base.dtype != tensor.dtype:
            raise ValueError(
                f"trace: at {_line()} a view is used after the memory it shares was modified in "
                f"place ({reason}); wanted pure operations there; fix: modify a copy, or write "
                "the operation out of place"
            )
        # where the whole is known, and so wherever the view may be used later
        var, frame, here = self._vars[id(base)][1], self._frame, self._frame
        while var not in frame.known and frame.outer is not None:
            frame = frame.outer
        self._frame = frame
        try:
            self._show_view(tensor, base)
        finally:
            self._frame = here

    def _show_view(self, tensor: torch.Tensor, base: torch.Tensor) -> None:
        """Let `tensor` mean what it shows of `base`, whose memory it shares."""
        with self:
            memory = as_memory(base, base)
            view = read_view(memory, strided_of(tensor, base))
            if id(tensor) in self._detached and id(base) not in self._detached:
                view = _aten.detach.default(view)
        self._vars[id(tensor)] = (tensor, self._vars[id(view)][1])

    def _as_strided(self, func, args, kwargs) -> torch.Tensor:
        """A view by strides, as a window of the memory that its operand shows."""
        taped, base = self._taped and keeper() is None, self._find_base(args[0])
        out = self._run(func, args, kwargs)
        if taped:
            self._check_inside(args[0], strided_of(out), func)
        if base is None:
            self._record(func, args, kwargs, out)
        else:
            self.var(args[0])
            self._show_view(out, base)
        return out

    def _as_strided_copy(self, func, args, kwargs) -> torch.Tensor:
        with self:
            taped, self._taped = self._taped, False
            view = self._run(_aten.as_strided.default, args, kwargs)
            if taped and keeper() is None:
                self._check_inside(args[0], strided_of(view), func)
            return copy_contiguous(_aten.as_strided.default(*args, **kwargs))

    def _as_strided_scatter(self, func, args, kwargs) -> torch.Tensor:
        """A copy that is written to, since torch's own operation has a wrong derivative."""
        base = self._find_base(args[0])
        problem = None
        if self._taped and keeper() is None:
            problem = "whose derivative by torch's tape is that of what was overwritten"
        elif base is None:
            problem = "of a view whose memory no value of this program shows densely"
        if problem is not None:
            raise ValueError(
                f"trace: at {_line()} the program runs {func}, {problem}; wanted a write that the "
                "tape sees; fix: whole = x.clone(), then whole.as_strided(...).copy_(source)"
            )
        return self._scatter_copy(base, *args, **kwargs)

    def _scatter_copy(self, base, x, source, size, stride, storage_offset=None) -> torch.Tensor:
        start = int(base.storage_offset())
        place = x.storage_offset() if storage_offset is None else storage_offset
        with self:
            whole = base.clone()
            shown = whole.as_strided(*strided_of(x, base))
            whole.as_strided(size, stride, place - start).copy_(source)
        return shown

    def _find_base(self, x: torch.Tensor) -> torch.Tensor | None:
        """The dense tensor whose memory x shows a part of, in the same dtype; None: unknown."""
        base = self._bases.get(x.untyped_storage()._cdata)
        return base if base is not None and base.dtype == x.dtype else None

    def _check_inside(self, operand: torch.Tensor, view: Strided, func) -> None:
        """Refuse a differentiated view of memory that its operand does not show.

        The tape gives the view's gradient to the operand alone, and drops the rest of it.
        """
        own = strided_of(operand)
        with aside():
            outside = reaches_outside(view, own)
        if outside:
            raise ValueError(
                f"trace: at {_line()} {func} is differentiated, and shows memory that its operand "
                f"does not: shape {view.size}, strides {view.stride} from place {view.offset}, of "
                f"a view of shape {own.size}, strides {own.stride} from place {own.offset}; the "
                "tape drops the gradient of what lies outside; wanted a view of its operand's "
                "elements; fix: call as_strided on the tensor that this is a view of, with the "
                "same arguments"
            )

    # --- results

    def block(self, inputs: Sequence[Var], outputs: Sequence[Any]) -> Block:
        """The current frame as a block, with dead equations removed."""
        equations = live_equations(self._frame.equations, outputs)
        return Block(tuple(inputs), tuple(equations), tuple(outputs))


_BATCH_NORMS = {
    getattr(_aten, f"{name}_batch_norm").default for name in ("native", "cudnn", "miopen")
}
_STRIDED = {
    _aten.as_strided.default: Recorder._as_strided,
    _aten.as_strided_copy.default: Recorder._as_strided_copy,
    _aten.as_strided_scatter.default: Recorder._as_strided_scatter,
}


def _is_dense(tensor: torch.Tensor) -> bool:
    return memory_order(tensor.shape, tensor.stride()) is not None


_REQUIREMENTS = (
    torch.ops.functron.require_replicated.default,
    torch.ops.functron.require_share.default,
)


def live_equations(equations: Sequence[Equation], outputs: Sequence[Any]) -> list[Equation]:
    """The equations that `outputs` need, and those with side effects, in order."""
    needed = {value for value in outputs if isinstance(value, Var)}
    kept = []
    for equation in reversed(equations):
        effect = equation.acts or equation.op in _REQUIREMENTS
        if isinstance(equation.op, Switch | While):  # whose blocks may require something
            effect = effect or any(live_equations(b.equations, ()) for b in equation.op.blocks)
        if effect or any(value in needed for value in equation.results):
            kept.append(equation)
            needed.update(equation.operands)
    return kept[::-1]


@functools.lru_cache(1 << 10)
def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"


def map_only(kind: type, of: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `of` of what is of a kind; pytree's own takes a fifth of the time of a trace."""
    if isinstance(value, kind):
        return of(value)
    if type(value) in (list, tuple):
        return type(value)([map_only(kind, of, item) for item in value])
    if type(value) is dict:
        return {name: map_only(kind, of, item) for name, item in value.items()}
    return value if _is_plain(value) else pytree.tree_map_only(kind, of, value)


_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN)


def _line() -> str:
    line = _origin.get() or user_line()
    return "" if line == "an unknown line" else line
