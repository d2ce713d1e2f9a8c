"""The linearity that rules of derivatives promise, checked where one of them is transposed.

A linear function of tangents has a transpose that is the same at all tangents. So a rule is taken
at zeros, and what is computed of these zeros is followed through the function and its pullback: if
a cotangent is computed of them, the function is not linear, and what it was taken for at zeros is
wrong elsewhere. JAX finds it as an operation that has no transpose. Torch's formulas for operations
that are linear read no operand that moves, so that none has to be listed; formulas that are given
one for its shape alone are.

Steps (comparisons, signs, rounding) have the derivative zero, which does not tell: a result that is
computed through one is none of a linear function either. Nor does a tangent that is detached, as by
`functron.lax.stop_gradient`: its value counts, and its derivative does not.

Outside of programs that are traced a dispatch mode sees operations as they run, once for each
signature of the call, and results at zeros tell of what is added. In a program the equations are
read: what is added to what is computed of tangents must be, too, or be computed of zeros. Of
operations that are not torch's own nothing is known in a pullback, and they pass.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functron.core import compat, tree
from functron.core.closure import describe_call
from functron.core.errors import is_library, made_public
from functron.program.equations import Block, ControlFlow, Equation, Scan, Switch, Var, While
from functron.program.recorder import Recorder, active
from functron.program.text import COLLECTIVES
from functron.spmd import collectives
from functron.spmd.axes import scope, source_line, user_line
from functron.spmd.simulate import varying_axes

_MOVES, _STEPS, _ADDS = 1, 2, 4
"""Bits of a value that is computed of tangents: at all; through a step, as of comparisons; and of
something else that is added to what is."""


class LinearityCheck:
    """Follows what is computed of tangents, while a function of them is transposed.

    Args:
        title: what is transposed, for the error.
        fix: for the error.
        tangents: where the function is taken: zeros, with memory of their own.
    """

    def __init__(self, title: str, fix: str, tangents: Sequence[torch.Tensor]):
        self._title, self._fix = title, fix
        self._given = [_find_plain(x) for x in tangents]
        self._made: list[torch.Tensor] = []
        self._after_function: Callable[[], None] = lambda: None
        self._detached: dict[Any, str] = {}
        self._ended = False

    def note(self, made: tree.Tree) -> None:
        """Take these for the results of the function, after which its pullback comes."""
        self._made = [_find_plain(x) for x in _floats(made)]
        self._ended = True
        self._after_function()

    @contextlib.contextmanager
    def following(self, key: Hashable) -> Iterator[Callable[[tree.Tree], None]]:
        """A with block for the transposition, and what to give its results to.

        Args:
            key: of the call: where one of the same key was found linear, nothing is done.
        """
        recorder = active()
        if recorder is not None:
            equations = recorder.frames[-1].equations
            ends = [len(equations)]
            self._after_function = lambda: ends.append(len(equations))
            with _Detaching(self._note_detached(recorder.var)):
                yield lambda results: self._read(recorder, equations, ends, results)
            return
        record = _find_record(key) if key is not None else _Record()
        if record.linear:
            yield lambda results: None
            return

        def finish(results: tree.Tree) -> None:
            self._judge(follow, results)
            record.linear = True

        threads = torch.autograd.set_multithreading_enabled(False)
        with (
            threads,
            _Following(self._given) as follow,
            _Detaching(self._note_detached(lambda x: x if follow.bits(x) else None)),
        ):
            self._after_function = follow.begin_pullback
            yield finish

    def _judge(self, follow: _Following, results: tree.Tree) -> None:
        with compat.no_transforms(), compat.no_dispatch_modes():
            for x in self._made:
                if follow.bits(x) & _STEPS:
                    self._refuse(follow.cause(x))
            for line in self._detached.values():
                self._refuse(f"detach at {line}")
            for x in self._made:
                if not (compat.faking() or x.is_meta) and bool(((x != 0) & ~x.isnan()).any()):
                    self._refuse("", "a number that is not zero of tangents that are zero")
        for x in map(_find_plain, _floats(results)):
            if follow.bits(x):
                self._refuse(follow.cause(x))

    def _read(
        self, recorder: Recorder, equations: list[Equation], ends: list[int], results: tree.Tree
    ) -> None:
        bits = dict.fromkeys((recorder.var(x) for x in self._given), _MOVES)
        found = _FoundMoves(dict(bits), self._detached, set())
        found.read(equations[ends[0] : ends[-1]])
        if found.lines:
            self._refuse(f"detach at {found.lines[0]}")
        if any(found.bits.get(recorder.var(x), 0) & _ADDS for x in self._made):
            zeros = _find_zeros(recorder, ends[0])
            found = _FoundMoves(bits, self._detached, zeros)
            found.read(equations[ends[0] : ends[-1]])
        found.read(equations[ends[-1] :], pulls=True)
        for x in self._made:
            if found.bits.get(value := recorder.var(x), 0) & (_STEPS | _ADDS):
                self._refuse(found.tell(value))
        for x in _floats(results):
            if found.bits.get(value := recorder.var(_find_plain(x))):
                self._refuse(found.tell(value))

    def _note_detached(self, find: Callable[[torch.Tensor], Any]) -> Callable:
        """Of a tensor that the function detaches: keep what stands for it, with the line."""

        def note(x: torch.Tensor, line: str) -> None:
            if not self._ended and (value := find(x)) is not None:
                self._detached[value] = line

        return note

    def _refuse(self, cause: str, got: str = "one that is not linear in them") -> None:
        by = f", by {cause}" if cause else ""
        raise ValueError(
            f"{self._title}: got {got}{by}; wanted a linear function, which alone has a transpose; "
            f"fix: {self._fix}"
        )


def _floats(results: tree.Tree) -> list[torch.Tensor]:
    return [x for x in tree.leaves(results) if tree.is_inexact(x)]


def _find_plain(x: torch.Tensor) -> torch.Tensor:
    with compat.no_transforms():
        return compat.plain(x)


def name_rule(rule: Callable) -> str:
    """The name of a function, with its place: ``rule at file.py:3: `def rule(args, tangents):` ``.

    Args:
        rule: a function, perhaps in a partial.
    """
    inner: Any = rule
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = made_public(inner)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    if isinstance(code, types.CodeType):
        return f"{name} at {source_line(code.co_filename, code.co_firstlineno)}"
    return name


def key_of(*given: Any) -> Hashable:
    """A key for a call, by its code, static values, and the shapes and variation of operands.

    None where there is none.
    """
    axes = tuple((name, axis and axis.size) for name, axis in scope().axes.items())

    def describe(x: torch.Tensor) -> Hashable:
        return x.shape, x.dtype, x.device, compat.is_batched(x), varying_axes(x)

    key = describe_call(given, describe), axes
    try:
        hash(key)
    except TypeError:  # of a node of the user's
        return None
    return key


class _Record:
    """Whether a call was found linear."""

    linear = False


@functools.lru_cache(4096)
def _find_record(key: Hashable) -> _Record:
    return _Record()


# --- what is computed of what


_STEP_NAMES = frozenset(
    {
        "sign", "sgn", "floor", "ceil", "round", "trunc", "fix", "heaviside", "floor_divide",
        "signbit", "sign_", "floor_", "ceil_", "round_", "trunc_",
    }
)  # fmt: skip
"""Operations with the derivative zero, on floating-point results; others have none by dtype."""

_ADDED: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("add", "sub", "rsub"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "addcmul", "addcdiv"), (0,)),
    **dict.fromkeys(("linear", "convolution"), (2,)),
}
"""The operands that are added to the others, or to what is computed of them."""

_FROM_ZERO = frozenset(
    {
        "cos", "cosh", "exp", "exp2", "sigmoid", "softplus", "softmax", "_softmax", "rsqrt",
        "reciprocal", "log", "eq", "ge", "le", "logical_not", "bitwise_not", "erfc", "acos",
        "ones_like", "new_ones", "rand_like", "randn_like", "bernoulli",
    }
)  # fmt: skip
"""Operations that make something else of zeros."""

_SHAPES_ALONE: Mapping[str, Sequence[Sequence[int]]] = {
    "convolution_backward": ((1,), (2,), (1, 2)),
    "_linalg_solve_ex": ((), (1,), (1,), (1,)),
    "triangular_solve": ((), (0,)),
    "native_layer_norm": ((), (2, 3), (2, 3)),
    "native_layer_norm_backward": ((6,), (5, 6), (1, 3, 4, 5, 6)),
    "_fused_rms_norm": ((), (2,)),
    "_fused_rms_norm_backward": ((), (4,)),
    "_scaled_dot_product_flash_attention_for_cpu": ((), (2,)),
    "_scaled_dot_product_flash_attention": ((), *[(2,)] * 8),
    "_scaled_dot_product_cudnn_attention": ((), *[(2,)] * 8),
    "_scaled_dot_product_efficient_attention": ((), *[(2,)] * 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ((), (), (3, 4)),
    "_scaled_dot_product_flash_attention_backward": ((), (), (3, 4)),
    "_scaled_dot_product_cudnn_attention_backward": ((), (), (3, 4)),
    "_scaled_dot_product_efficient_attention_backward": ((), (), (3, 5)),
    **dict.fromkeys(
        (
            "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward", "reflection_pad1d_backward",
            "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
            "replication_pad2d_backward", "replication_pad3d_backward",
        ),
        ((1,),),
    ),
}  # fmt: skip
"""Operands, by result, of whose numbers it is not computed."""

_TORCH = frozenset({"aten", "prims", "c10d", "_c10d_functional", "c10d_functional"})


def _spread(
    func: Any, args: Sequence, kwargs: Mapping, dtypes: Sequence, bits_of: Callable, pulls: bool
) -> list[int]:
    """The bits of each result of an operation, from those of its operands.

    Args:
        dtypes: of the results; None of what is no tensor.
        bits_of: an operand to its bits; 0 of what is no tensor.
        pulls: whether it is an operation of a pullback.
    """
    name = _base_name(func)
    if name.endswith("_like") or name.startswith("new_"):
        return [0] * len(dtypes)
    if pulls and func.namespace not in _TORCH and name not in COLLECTIVES | _MARKS:
        return [0] * len(dtypes)
    given = args[:1] if name == "barrier" else args
    rows = [_join(bits_of, value) for value in given]
    rest = _join(bits_of, list(kwargs.values()))
    unread, found = _SHAPES_ALONE.get(name, ()), []
    for place, dtype in enumerate(dtypes):
        own = unread[place] if place < len(unread) else ()
        bits = rest
        for position, row in enumerate(rows):
            bits |= 0 if position in own else row
        is_step = name in _STEP_NAMES or not (
            dtype is None or dtype.is_floating_point or dtype.is_complex
        )
        found.append(bits | _STEPS if bits and is_step else bits)
    return found


def _base_name(op: Any) -> str:
    return op._schema.name.split("::")[1]


_MARKS = frozenset(
    {
        "vary", "assume_replicated", "require_replicated", "assume_share", "require_share",
        "barrier", "checkpoint_name",
    }
)  # fmt: skip
"""Operations of functron's own that return their first operand."""


def _join(bits_of: Callable[[Any], int], value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return functools.reduce(lambda bits, x: bits | _join(bits_of, x), value, 0)
    return bits_of(value)


def _name_operation(name: str) -> str:
    """``mul`` of ``MulBackward0`` and ``aten::mul.Tensor``."""
    return (
        name.split("::")[-1]
        .split("Backward")[0]
        .split(".")[0]
        .removesuffix("Generated")
        .lower()
        .strip("_")
    )


class _Following(TorchDispatchMode):
    """Sees what operations of a with block compute of the memory of some tensors."""

    def __init__(self, given: Sequence[torch.Tensor]):
        super().__init__()
        # by memory: its bits, and the operation that first read it in a pullback, or stepped
        self._known = {_memory(x): (_MOVES, "") for x in given}
        self._pulls = False

    def begin_pullback(self) -> None:
        """From here on operations are those of the pullback."""
        self._pulls = True

    def bits(self, x: Any) -> int:
        """The bits of a tensor; 0 of anything else."""
        return self._find(x)[0]

    def cause(self, x: torch.Tensor) -> str:
        """The operation by which it is not what is wanted."""
        return self._find(x)[1]

    def _find(self, x: Any) -> tuple[int, str]:
        if not isinstance(x, torch.Tensor):
            return 0, ""
        return self._known.get(_memory(x), (0, ""))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            return out
        node = compat.current_autograd_node() if self._pulls else None
        leaves = pytree.tree_leaves(out)
        dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in leaves]
        found = _spread(func, args, kwargs, dtypes, self.bits, self._pulls)
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [cause for x in operands if (cause := self._find(x)[1])]
        if func._schema.is_mutable and (bits := _join(self.bits, operands)):
            written = [
                value
                for value, each in zip(args, func._schema.arguments, strict=False)
                if each.alias_info is not None and each.alias_info.is_write
            ]
            leaves, found = [*leaves, *written], [*found, *[bits] * len(written)]
        for x, bits in zip(leaves, found, strict=True):
            if not isinstance(x, torch.Tensor):
                continue
            if not bits:  # memory may have been that of another tensor
                self._known.pop(_memory(x), None)
                continue
            cause = known[0] if known else ""
            if not cause and (self._pulls or bits & _STEPS):
                cause = _name_operation(func.name() if node is None else node.name())
            self._known[_memory(x)] = bits, cause
        return out


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


class _Detaching(TorchFunctionMode):
    """Tells of tensors that the user's functions detach in a with block.

    The recorder and dispatch modes see how torch and this library detach, too, where derivatives
    are kept by other means.
    """

    def __init__(self, note: Callable[[torch.Tensor, str], None]):
        super().__init__()
        self._note = note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _DETACHING and _is_asked():
            self._note(_find_plain(args[0]), user_line())
        return func(*args, **(kwargs or {}))


_DATA: Any = torch.Tensor.data
_DETACHING = (torch.Tensor.detach, torch.Tensor.detach_, torch.detach, _DATA.__get__)


def _is_asked() -> bool:
    """Whether the user's function, or `stop_gradient` for it, called what a mode sees."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_globals is collectives.__dict__ or not is_library(frame.f_globals)


def _find_zeros(recorder: Recorder, end: int) -> set[Var]:
    """The values that are zeros where the current frame has so many equations."""
    with compat.no_transforms(), compat.no_dispatch_modes():
        closed = recorder.constants.items()
        zeros = {v for v, x in closed if not x.is_meta and not bool(x.any())}
    for frame in recorder.frames:
        zeros |= {inner for inner, around in frame.captured.items() if around in zeros}
        known = _FoundMoves({}, {}, zeros)
        known.read(frame.equations if frame is not recorder.frames[-1] else frame.equations[:end])
    return zeros


class _FoundMoves:
    """The bits of values of a program.

    Attributes:
        bits: of each value that has some.
        zeros: values without bits that are, or may be, zeros.
        lines: of where values with bits are detached.
    """

    def __init__(self, bits: dict[Var, int], detached: Mapping[Var, str], zeros: set[Var]):
        self.bits, self.zeros = bits, zeros
        self.lines = [detached[value] for value in bits if value in detached]
        self._detached = detached
        self._causes: dict[Var, Equation] = {}

    def read(self, equations: Sequence[Equation], *, pulls: bool = False) -> None:
        """Follow values through equations, of the function or of its pullback."""
        for equation in equations:
            found = self._read_equation(equation, pulls)
            known = [self._causes[v] for v in equation.operands if v in self._causes]
            for value, bits in zip(equation.outputs, found, strict=True):
                if value is not None and bits:
                    self.bits[value] = bits
                    if value in self._detached:
                        self.lines.append(self._detached[value])
                    tells = pulls or bits & (_STEPS | _ADDS)
                    if known or (tells and equation.name not in _MARKS):
                        self._causes[value] = known[0] if known else equation

    def _find(self, value: Any) -> int:
        return self.bits.get(value, 0) if isinstance(value, Var) else 0

    def _read_equation(self, equation: Equation, pulls: bool) -> Sequence[int]:
        op, given = equation.op, [self._find(value) for value in equation.args]
        if isinstance(op, ControlFlow):
            flows = any(given)
            zeros = [self._is_zero(value) for value in equation.args]
            if flows:
                return self._read_flow(op, given, zeros, pulls)
            self.zeros.update(equation.results if any(zeros) else ())
            return [0] * len(equation.outputs)
        if not isinstance(op, torch._ops.OpOverload):  # a transform that is kept whole
            return [_join(self._find, list(equation.operands))] * len(equation.outputs)
        dtypes = [v and v.dtype for v in equation.outputs]
        found = _spread(op, equation.args, equation.kwargs, dtypes, self._find, pulls)
        if pulls:
            return found
        if not any(found):
            if self._makes_zeros(equation):
                self.zeros.update(equation.results)
            return found
        if not self._adds_others(equation):
            return found
        return [bits and bits | _ADDS for bits in found]

    def _adds_others(self, equation: Equation) -> bool:
        """Whether something that is not of tangents, nor zeros, is added to what is."""
        op: Any = equation.op
        places = _ADDED.get(_base_name(op), ())
        rows = [(bool(self._find(x)), self._is_zero(x)) for x in equation.args]
        rest = [row for i, row in enumerate(rows) if i not in places]
        terms = [row for i, row in enumerate(rows) if i in places]
        if len(places) == 1:  # to a product of the rest
            moves, zeros = zip(*rest, strict=True)
            terms.append((any(moves), any(zeros)))
        return any(moves for moves, _ in terms) and not all(any(term) for term in terms)

    def _is_zero(self, value: Any) -> bool:
        return value in self.zeros if isinstance(value, Var) else not value

    def _makes_zeros(self, equation: Equation) -> bool:
        """Whether results may be zeros, computed of some; sums are of zeros alone."""
        op: Any = equation.op
        name, args = _base_name(op), equation.args
        if name in ("zeros", "zeros_like", "new_zeros", "empty", "empty_like"):
            return True
        fills = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1}
        if name in fills:
            return self._is_zero(args[fills[name]])
        if name in ("add", "sub", "rsub"):
            return all(map(self._is_zero, args[:2]))
        if name in ("mul", "where") and any(not isinstance(x, Var) and x == 0 for x in args):
            return True
        return name not in _FROM_ZERO and any(v in self.zeros for v in equation.operands)

    def _read_block(
        self, block: Block, given: Sequence[int], zeros: Sequence[bool], pulls: bool
    ) -> tuple[list[int], list[bool]]:
        """The bits of results, and which may be zeros, from those of operands."""
        bits = {v: own for v, own in zip(block.inputs, given, strict=True) if own}
        still = {v for v, is_zero in zip(block.inputs, zeros, strict=True) if is_zero}
        inner = _FoundMoves(bits, self._detached, still)
        inner.read(block.equations, pulls=pulls)
        self.lines += inner.lines
        return [inner._find(v) for v in block.outputs], [v in inner.zeros for v in block.outputs]

    def _read_flow(
        self, op: ControlFlow, given: list[int], zeros: list[bool], pulls: bool
    ) -> Sequence[int]:
        if isinstance(op, Switch):
            chosen, *rest = given
            made = [self._read_block(block, rest, zeros[1:], pulls)[0] for block in op.branches]
            least = _MOVES | _STEPS if chosen else 0
            return [
                functools.reduce(int.__or__, column, least) for column in zip(*made, strict=True)
            ]
        first = op.num_consts
        last = op.first_x if isinstance(op, Scan) else len(given)
        carry, none, stops = given[first:last], zeros[first:last], 0
        while True:
            inner = [*given[:first], *carry, *given[last:]]
            still = [*zeros[:first], *none, *zeros[last:]]
            if isinstance(op, While) and any(self._read_block(op.cond, inner, still, pulls)[0]):
                stops = _MOVES | _STEPS
            made, made_zeros = self._read_block(op.body, inner, still, pulls)
            after = [a | b | stops for a, b in zip(carry, made, strict=False)]
            later = [a and b for a, b in zip(none, made_zeros, strict=False)]
            if (after, later) == (carry, none):
                return [*carry, *made[len(carry) :]]
            carry, none = after, later

    def tell(self, value: Var) -> str:
        """The operation by which a value is not what is wanted, and its line."""
        equation = self._causes.get(value)
        if equation is None:
            return ""
        line = f" at {equation.where.line}" if equation.where.line else ""
        return f"{_name_operation(equation.name)}{line}"
