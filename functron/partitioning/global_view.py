"""A function in global view: its program before it is partitioned, with transforms as calls.

A program in global view is traced before it is differentiated. Each call of `value_and_grad`,
`remat` and `custom_vjp` is one equation with the program of its function inside, so that placements
are found for the function as it was written, and the transform is applied to the per-rank program:
backward then has the transposes of forward's collectives, as a handwritten program's has.

`constrain` leaves its spec in such a program. `pin_scope_results` constrains results of scopes,
`recompute_scopes` makes scopes calls of `remat`, and `inline_views` replaces kinds of equations by
others that have rules.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from functron.core import compat, tree
from functron.core.errors import public
from functron.core.functions import Function
from functron.core.scopes import in_phase
from functron.partitioning.backward import as_pullback
from functron.partitioning.layers import fuse_even_bags
from functron.program.equations import Block, Equation, Fresh, Scan, Var, contiguous_strides
from functron.program.recorder import Recorder, active, aside, keeper, keeping
from functron.program.trace import Program, trace
from functron.spmd.axes import Scope, enter, user_line
from functron.spmd.primitives import Annotate
from functron.spmd.spec import P
from functron.transforms.custom_vjp import custom_vjp, leaves_like
from functron.transforms.gradient import (
    TensorSlots,
    check_loss,
    is_differentiated_outside,
    replace_at,
    split_tensors,
    value_and_grad,
)
from functron.transforms.policies import RematPolicy
from functron.transforms.remat import remat

Flat = Callable[..., Sequence[torch.Tensor]]
"""A function of tensors to tensors."""


@dataclass(frozen=True, eq=False)
class TransformCall:
    """An operation that runs `body` under a transform.

    Its operands are the body's inputs. Its results are the body's outputs and, for gradients, then
    those of the first `num_moving` operands.

    Attributes:
        transform: "remat", "value_and_grad" or "custom_vjp".
        wrap: from the functions that a rank runs, of flat operands, to the transformed one.
        num_moving: how many operands are differentiated.
        backward: of a custom_vjp the program from residuals, cotangents and captured values to the
            cotangents of operands.
        num_outputs: the outputs of its body that are results; the others are residuals.
        floats: the results that have cotangents.
        pulled: the operands that `backward` has cotangents of.
    """

    body: Block
    transform: str
    wrap: Callable[..., Flat]
    num_moving: int = 0
    backward: Block | None = None
    num_outputs: int = 0
    floats: tuple[int, ...] = ()
    pulled: tuple[int, ...] = ()

    namespace = "functron"
    tags = ()

    def name(self) -> str:
        """As an operation of torch has."""
        return f"functron::{self.transform}"

    @property
    def runs(self) -> tuple[tuple[Block, int], ...]:
        """The body, once, as operations of a program have them."""
        return ((self.body, 1),)


@dataclass(frozen=True, eq=False)
class DispatchOperation:
    """An operation that sends tokens to their experts, as `functron.nn.moe` does.

    Its operands are parameters of experts, tokens, and the experts, weights and kept choices of
    each token.

    Attributes:
        run: of these, with the axes that split experts and the one that splits their hidden dim.
        structure: of the parameters.
        paths: of the operands; those of parameters as in their tree.
    """

    run: Callable[..., torch.Tensor]
    structure: Any
    paths: tuple[str, ...]

    namespace = "functron"
    tags = ()

    def name(self) -> str:
        """As an operation of torch has."""
        return "functron::dispatched"


_KNOWN = frozenset(
    {
        "functron.ops.attention",
        "functron.ops.cross_entropy",
        "functron.ops.operations",
        "functron.partitioning.global_view",
        "functron.spmd.primitives",
    }
)
"""Modules whose autograd Functions have the derivatives of what they record."""


class Keeper(TorchFunctionMode):
    """Records calls of transforms as equations of the recorder that is active.

    As a mode it sees where gradients are switched off: the program, which is differentiated later,
    must not be differentiated there.
    """

    def __init__(self):
        super().__init__()
        self._grad = True
        self.rules_used: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._set_grad_enabled:
            self._grad = bool(args[0])
        return func(*args, **(kwargs or {}))

    @property
    def overwritten(self) -> Any:
        """The operation on a value and the one that took its place, unseen by torch's tape."""
        return torch.ops.functron.overwritten.default

    def stops_gradients(self, *, written_out: bool = False) -> bool:
        """Whether this runs in a ``torch.no_grad()``.

        Args:
            written_out: derivatives are, as of `functron.jvp`, which Functions are a part of.

        Raises:
            ValueError: it is in the forward of an autograd Function, whose backward is not known.
        """
        if compat.current_autograd_node() is not None:  # what a tape without a tape above makes
            return not torch.is_grad_enabled()
        if self._grad and not torch.is_grad_enabled() and not written_out:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name not in ("forward", "_call"):
                frame = frame.f_back
            module = frame.f_globals.get("__name__", "") if frame is not None else ""
            if module == "torch._functorch.autograd_function":  # in a derivative that is traced
                return False
            if module not in _KNOWN:
                self._refuse_function(module or "an unknown module")
        return not self._grad

    def _refuse_function(self, of: str) -> None:
        raise ValueError(
            f"partition: at {user_line()} the function calls a torch.autograd.Function (of {of}), "
            "whose backward no program in global view has; wanted functions that are "
            "differentiated as they are written; fix: write it with functron.custom_vjp"
        )

    def _note_rule(self) -> None:
        """Of a rule of differentiation that is used up here, as a backward pass is traced."""
        self.rules_used.append(user_line())

    def apply(self, cls, apply: Callable, operands: tuple, named: Mapping[str, Any]) -> Any:
        """The results of an autograd Function, which is a custom_vjp; as torch where it is taped.

        Raises:
            ValueError: it modifies an operand, or differentiates what runs inside, as torch's
                reentrant checkpoint does.
        """
        asked = keeper() is self
        if asked and cls.__module__ == "torch.utils.checkpoint":
            raise ValueError(
                f"partition: at {user_line()} the function calls torch.utils.checkpoint; wanted "
                "functions that are differentiated as they are written; fix: leave it out, and "
                'give partition remat={"layers": functron.policies.nothing}, by scopes'
            )
        if not asked or issubclass(cls, Function) or named or not self._grad:
            return apply(*operands, **named)
        if is_differentiated_outside(cls.forward, operands):
            self._note_rule()
            with keeping(None):
                return apply(*operands)
        return self._function_vjp(cls, operands)

    def _function_vjp(self, cls, operands: tuple) -> Any:
        apart = cls.setup_context is not torch.autograd.Function.setup_context
        moves = tuple(isinstance(x, torch.Tensor) and x.is_floating_point() for x in operands)
        still: list[int] = []

        def forward(*given):
            ctx = _FunctionContext(moves)
            out = cls.forward(*given) if apart else cls.forward(ctx, *given)
            if apart:
                cls.setup_context(ctx, given, out)
            leaves = tree.leaves(out)
            still[:] = [i for i, x in enumerate(leaves) if any(x is y for y in ctx.still)]
            return out, vars(ctx)

        def backward(residuals, cotangents):
            ctx = _FunctionContext(moves)
            vars(ctx).update(residuals)
            given = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents,)
            grads = cls.backward(ctx, *given)
            grads = tuple(grads) if isinstance(grads, (tuple, list)) else (grads,)
            return (*grads, *[None] * len(operands))[: len(operands)]

        out = self.custom_vjp(None, forward, backward, operands)
        leaves, structure = tree.flatten(out)
        return tree.unflatten(
            structure, [x.detach() if i in still else x for i, x in enumerate(leaves)]
        )

    def value_and_grad(self, f, positions, has_aux: bool, args, kwargs) -> tuple[Any, tuple]:
        """The value (with what is auxiliary) and the gradients, as fake tensors."""
        if is_differentiated_outside(f, (args, kwargs)):

            def inside(*args, **kwargs):
                with keeping(self):
                    return f(*args, **kwargs)

            with keeping(None):
                return value_and_grad(inside, positions, has_aux=has_aux)(*args, **kwargs)
        before = len(self.rules_used)
        chosen = tuple(args[position] for position in positions)
        leaves, structure = tree.flatten(chosen)
        outside = TensorSlots(structure, [], [])

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal outside
            out = f(*replace_at(args, positions, tree.unflatten(structure, fresh)), **kwargs)
            value, aux = out if has_aux else (out, None)
            check_loss(value, None)
            tensors, outside = split_tensors(aux)
            return [value, *tensors]

        def wrap(rank: Flat) -> Flat:
            def differentiated(*operands):
                count = len(leaves)

                def loss(*moving):
                    value, *aux = rank(*moving, *operands[count:])
                    return value, aux

                both = value_and_grad(loss, tuple(range(count)), has_aux=True)
                (value, aux), grads = both(*operands[:count])
                return [value, *aux, *grads]

            return differentiated

        made = _record_call("value_and_grad", run, leaves, wrap, moving=True)
        refuse_second_derivatives(self.rules_used[before:])
        value, rest = made[0], made[1 : len(made) - len(leaves)]
        grads = tree.unflatten(structure, made[len(made) - len(leaves) :])
        return ((value, outside.fill(rest)) if has_aux else value), grads

    def remat(self, f, policy: RematPolicy, args, kwargs) -> tree.Tree:
        """The results of `f`, as fake tensors."""
        if is_differentiated_outside(f, (args, kwargs)):  # with what it would have computed again
            return f(*args, **kwargs)
        tensors, given = split_tensors((args, kwargs))
        returned = given

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal returned
            new_args, new_kwargs = given.fill(fresh)
            outputs, returned = split_tensors(f(*new_args, **new_kwargs))
            return outputs

        made = _record_call("remat", run, tensors, functools.partial(rematerialize, policy))
        return returned.fill(made)

    def dispatched(self, run: Callable[..., torch.Tensor], args: tuple) -> torch.Tensor:
        """The experts' results of tokens, as a fake tensor: how tokens travel is decided later."""
        if is_differentiated_outside(run, args):
            raise ValueError(
                f"partition: at {user_line()} experts are differentiated by torch's tape or "
                "torch.func; wanted functron.value_and_grad, of which partition makes a backward "
                "of exchanges; fix: differentiate with functron.value_and_grad or functron.grad"
            )
        recorder, (params, x, *chosen) = active(), args
        assert recorder is not None
        leaves, structure = tree.flatten(params)
        paths = (*tree.paths(params), "tokens", "experts", "weights", "kept")
        operands = [recorder.var(value) for value in (*leaves, x, *chosen)]
        result = x.shape, contiguous_strides(x.shape), x.dtype, x.device
        (out,) = recorder.emit(DispatchOperation(run, structure, paths), operands, [result])
        return out

    def custom_vjp(self, f, forward, backward, args) -> tree.Tree:
        """The results of `forward`, as fake tensors; its backward is traced beside it."""
        if is_differentiated_outside(forward, args):
            self._note_rule()
            with keeping(None):
                return custom_vjp(f, forward, backward)(*args)
        recorder = active()
        assert recorder is not None
        tensors, given = split_tensors(args)
        operands = [recorder.var(value) for value in tensors]
        with recorder.frame() as frame:
            fresh = [_like(recorder, value) for value in tensors]
            inputs = [recorder.input(value, "operand") for value in fresh]
            out, residuals = forward(*given.fill(fresh))
            (outs, returned), (saved, kept) = split_tensors(out), split_tensors(residuals)
            body = recorder.block(inputs, [recorder.var(value) for value in (*outs, *saved)])
        floats = tuple(i for i, x in enumerate(outs) if x.is_floating_point())
        with recorder.frame() as back_frame, in_phase("backward"):
            residuals = [_like(recorder, value) for value in saved]
            cotangents = [recorder.empty(*row) for row in _describe_values(outs[i] for i in floats)]
            back_inputs = [recorder.input(x, "cotangent") for x in (*residuals, *cotangents)]
            cotangents = replace_at([None] * len(outs), floats, cotangents)
            grads = backward(kept.fill(residuals), returned.fill(cotangents))
            leaves = leaves_like(given.fill(tensors), grads)
            found = [leaves[place] for place in given.positions]
            rows = enumerate(zip(found, tensors, strict=True))
            pulled = tuple(i for i, (g, x) in rows if g is not None and x.is_floating_point())
            back = recorder.block(back_inputs, [recorder.var(found[i]) for i in pulled])
        both = {**frame.captured, **back_frame.captured}
        sizes = len(operands), len(outs)
        op = TransformCall(
            Block((*inputs, *both), body.equations, body.outputs),
            "custom_vjp",
            lambda rank, rank_back: _apply_rule(rank, rank_back, *sizes, floats, pulled),
            backward=Block((*back_inputs, *both), back.equations, back.outputs),
            num_outputs=len(outs),
            floats=floats,
            pulled=pulled,
        )
        results = _describe_values(body.outputs[: len(outs)])
        return returned.fill(recorder.emit(op, [*operands, *both.values()], results))


class _FunctionContext:
    """The ctx of an autograd Function that is recorded with its backward."""

    def __init__(self, moves: tuple[bool, ...]):
        self.needs_input_grad = moves
        self.saved_tensors: tuple = ()
        self.still: tuple = ()

    def save_for_backward(self, *values: Any) -> None:
        self.saved_tensors = values

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *values: torch.Tensor) -> None:
        self.still = values

    def set_materialize_grads(self, value: bool) -> None:
        pass  # cotangents are always numbers

    def mark_dirty(self, *values: torch.Tensor) -> None:
        raise ValueError(
            f"partition: at {user_line()} a torch.autograd.Function modifies an operand in place; "
            "wanted pure functions; fix: return a new tensor"
        )


def refuse_second_derivatives(rules_used: Sequence[str]) -> None:
    """Refuse to differentiate a traced backward pass in which rules of one's own were used.

    Raises:
        ValueError: there are some, which the program has forgotten.
    """
    if rules_used:
        raise ValueError(
            "partition: a gradient is differentiated again, in which a function with a backward of "
            f"its own was traced, at {rules_used[0]}; wanted its rule, which the trace of that "
            "gradient has not; fix: take the gradient inside by functron.value_and_grad"
        )


def _apply_rule(
    rank: Flat,
    rank_back: Flat,
    num_operands: int,
    num_outputs: int,
    floats: Sequence[int],
    pulled: Sequence[int],
) -> Flat:
    """The custom_vjp of a rank's forward and backward; what they capture is closed over.

    Args:
        floats, pulled: as of a `TransformCall`.
    """

    def function(*operands):
        moving, captured = operands[:num_operands], operands[num_operands:]

        def forward(*values):
            made = rank(*values, *captured)
            return tuple(made[:num_outputs]), tuple(made[num_outputs:])

        def backward(residuals, cotangents):
            found = rank_back(*residuals, *(cotangents[i] for i in floats), *captured)
            return tuple(replace_at([None] * num_operands, pulled, found))

        return custom_vjp(lambda *values: forward(*values)[0], forward, backward)(*moving)

    return function


def rematerialize(policy: RematPolicy, rank: Flat) -> Flat:
    """`remat` of what a rank runs."""
    return remat(lambda *operands: tuple(rank(*operands)), policy=policy)


def _record_call(
    name: str,
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    given: Sequence[torch.Tensor],
    wrap: Callable[[Flat], Flat],
    *,
    moving: bool = False,
) -> list[torch.Tensor]:
    """The results of `run` as an equation of what it does; with `moving`, gradients too."""
    recorder = active()
    assert recorder is not None
    operands = [recorder.var(value) for value in given]
    with recorder.frame() as frame:
        fresh = [_like(recorder, value) for value in given]
        inputs = [recorder.input(value, "operand") for value in fresh]
        outputs = [recorder.var(value) for value in run(fresh)]
        block = recorder.block(inputs, outputs)
    inputs += list(frame.captured)
    operands += list(frame.captured.values())
    body = Block(tuple(inputs), block.equations, block.outputs)
    results: list[Var] = [*outputs, *(operands[: len(given)] if moving else [])]
    op = TransformCall(body, name, wrap, len(given) if moving else 0)
    return recorder.emit(op, operands, _describe_values(results))


def _describe_values(values: Iterable[Var | torch.Tensor]) -> list[tuple]:
    """Shape, contiguous strides, dtype and device of each."""
    return [(v.shape, contiguous_strides(v.shape), v.dtype, v.device) for v in values]


def _like(recorder: Recorder, value: torch.Tensor) -> torch.Tensor:
    return recorder.empty(value.shape, value.stride(), value.dtype, value.device)


_aten = torch.ops.aten


# --- constraints

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("constrain(Tensor(a) x, int pin) -> Tensor(a)")
_LIBRARY.define("overwritten(Tensor before, Tensor after) -> Tensor")
_LIBRARY.impl("overwritten", lambda before, after: after.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("constrain", lambda x, pin: compat.alias(x), "CompositeExplicitAutograd")

_pins: contextvars.ContextVar[list[P] | None] = contextvars.ContextVar(
    "functron_pins", default=None
)


@public
def constrain(x: tree.Tree, spec: P) -> tree.Tree:
    """y = x, which lies as `spec` says in what `partition` makes of the function around it.

    The cotangent is left where it comes. Outside of `partition` it is x itself.

    >>> def two_layers(up, down, x):
    ...     return ft.constrain(x @ up, P(None, "tp")) @ down
    >>> f = ft.partition(two_layers, ft.Mesh(tp=2), (P(None, "tp"), P("tp"), P()), P())
    >>> f(torch.ones(2, 4), torch.ones(4, 1), torch.ones(1, 2))
    tensor([[8.]])

    Args:
        x: a tree of tensors, in global view, all with this spec.

    Raises:
        ValueError: (from `partition`) an axis that the mesh lacks, or that does not divide its dim.
    """
    pins = _pins.get()
    if pins is None:
        return x

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pins.append(spec)
        return _Constrain.apply(torch.ops.functron.constrain.default, leaf, len(pins) - 1)

    return tree.map(one, x)


class _Constrain(Annotate):
    @staticmethod
    def vmap(info, in_dims, op, x, pin):
        return x, in_dims[1]  # one of several samples has no spec


# --- the program, and what is changed in it


def fake_leaves(leaves: Sequence[Any], shapes: Sequence[Any]) -> list:
    """Fake tensors of these shapes in the place of tensors, and static values as they are."""
    with aside(), FakeTensorMode():
        return [
            torch.empty(shape, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x
            for x, shape in zip(leaves, shapes, strict=True)
        ]


def global_program(fn: Callable, args: tuple) -> tuple[Program, list[P], list[str]]:
    """The program of a function of whole values, with calls of transforms, and its constraints.

    Arguments are fake tensors, and static values. Then the lines where it differentiates by rules
    that the program does not have any more; see `refuse_second_derivatives`.
    """
    pins: list[P] = []
    token = _pins.set(pins)
    try:
        keep = Keeper()
        functions = compat.applying_functions_by(keep.apply)
        with aside(), enter(Scope()), torch.enable_grad(), keep, keeping(keep), functions:
            return trace(fn, simulate=True)(*args), pins, keep.rules_used
    finally:
        _pins.reset(token)


def pin_scope_results(block: Block, pattern: str, spec: P, pin: int) -> tuple[Block, int]:
    """The block with a `constrain` of the results of scopes with a pattern, and their number."""
    fresh = Fresh(block)

    def inside(equation: Equation) -> bool:
        return re.search(pattern, "/".join(equation.where.scopes)) is not None

    def one(block: Block) -> tuple[Block, int]:
        read = {v for v in block.outputs if isinstance(v, Var)}
        read |= {v for e in block.equations if not inside(e) for v in e.operands}
        renamed: dict[Var, Var] = {}
        equations, count = [], 0
        for equation in block.equations:
            op: Any = equation.op
            if hasattr(op, "body"):
                body, found = one(op.body)
                op, count = replace(op, body=body), count + found
            args, kwargs = pytree.tree_map_only(
                Var, lambda v: renamed.get(v, v), (equation.args, dict(equation.kwargs))
            )
            equations.append(replace(equation, op=op, args=args, kwargs=kwargs))
            for var in equation.results if inside(equation) else ():
                if var in read and var.dtype.is_floating_point and len(var.shape) >= len(spec):
                    renamed[var] = fresh.like(var, "pinned", storage=var.storage)
                    constrained = torch.ops.functron.constrain.default
                    outputs = (renamed[var],)
                    equations.append(Equation(constrained, (var, pin), {}, outputs, equation.where))
        outputs = tuple(renamed.get(v, v) if isinstance(v, Var) else v for v in block.outputs)
        return replace(block, equations=tuple(equations), outputs=outputs), count + len(renamed)

    return one(block)


def recompute_scopes(block: Block, policies: Mapping[str, RematPolicy]) -> tuple[Block, set[str]]:
    """The block with scopes as calls of `remat`, and the patterns that were found.

    Consecutive equations of one scope are one call; its results are the values that others read.
    The body of a scan is in a scope of the name of the scanned function.
    """
    found: set[str] = set()

    def scope_of(equation: Equation, name: str = "") -> tuple[str, tuple[str, ...]] | None:
        """The pattern that holds, and the outermost scope that it does for."""
        scopes = (*equation.where.scopes, name) if name else equation.where.scopes
        for pattern in policies:
            for end in range(1, len(scopes) + 1):
                if re.search(pattern, "/".join(scopes[:end])):
                    return pattern, scopes[:end]
        return None

    def inner(equation: Equation) -> Equation:
        op: Any = equation.op
        if not hasattr(op, "body") or getattr(op, "transform", "") == "custom_vjp":
            return equation
        whole = scope_of(equation, op.name) if isinstance(op, Scan) else None
        return replace(equation, op=replace(op, body=one(op.body, whole)))

    def one(block: Block, whole: tuple[str, tuple[str, ...]] | None = None) -> Block:
        runs = [(key, [*run]) for key, run in itertools.groupby(block.equations, scope_of)]
        runs = runs if whole is None else [(whole, [*block.equations])]
        reads = Counter(v for e in block.equations for v in {*e.operands})
        reads.update({v for v in block.outputs if isinstance(v, Var)})
        equations: list[Equation] = []
        for key, run in runs:
            if key is None:
                equations += map(inner, run)
                continue
            pattern, scopes = key
            found.add(pattern)
            inside = Counter(v for e in run for v in {*e.operands})
            made = [v for e in run for v in e.results]
            given = tuple(dict.fromkeys(v for e in run for v in e.operands if v not in {*made}))
            outputs = tuple(v for v in made if reads[v] > inside[v])
            wrap = functools.partial(rematerialize, policies[pattern])
            op: Any = TransformCall(Block(given, tuple(run), outputs), "remat", wrap)
            where = replace(run[0].where, scopes=scopes)
            equations.append(Equation(op, given, {}, outputs, where))
        return replace(block, equations=tuple(equations))

    return one(block), found


def scopes_text(block: Block, *, scans: bool = False) -> str:
    """The named scopes of a block, and with `scans` functions that are scanned, for messages."""
    scopes = {"/".join(e.where.scopes) for e, _ in block.walk()} - {""}
    for equation, _ in block.walk() if scans else ():
        if isinstance(equation.op, Scan):
            scopes.add("/".join((*equation.where.scopes, equation.op.name)))
    return ", ".join(sorted(scopes)) or "no scopes: the function names none"


def inline_views(block: Block) -> Block:
    """The block, in which every view is taken once, and ``bias + a @ b`` is a product and a sum.

    A value that several products read through equal views is then gathered once for all. A loss of
    a log-softmax that nothing else reads is one operation, attention has the boolean mask that it
    was called with, and bags of embeddings know where they are of one size.
    """
    fresh = Fresh(block)
    return _inline_block(block, fresh)


def _inline_block(block: Block, fresh: Fresh) -> Block:
    equations: list[Equation] = []
    views = fuse_even_bags(_drop_repeated_views(block))
    for equation in _fuse_losses(_use_boolean_masks(views, block), block):
        op: Any = equation.op
        if hasattr(op, "body"):
            back = getattr(op, "backward", None)
            more = {"backward": _inline_block(back, fresh)} if back else {}
            op = replace(op, body=_inline_block(op.body, fresh), **more)
            equations.append(replace(equation, op=op))
        elif equation.name in ("addmm", "baddbmm") or (
            equation.name == "convolution" and equation.args[2] is not None
        ):
            equations += _split_bias(equation, fresh)
        elif (pulled := as_pullback(equation, fresh)) is not None:
            equations.append(pulled)
        else:
            equations.append(equation)
    return replace(block, equations=tuple(equations))


def _drop_repeated_views(block: Block) -> list[Equation]:
    """The equations, without views that repeat an earlier one."""
    first: dict[Any, Sequence[Var]] = {}
    same: dict[Var, Var] = {}
    kept = []
    outputs = {value for value in block.outputs if isinstance(value, Var)}
    for equation in block.equations:
        if any(value in same for value in equation.operands):
            args, kwargs = pytree.tree_map_only(
                Var, lambda v: same.get(v, v), (equation.args, dict(equation.kwargs))
            )
            equation = replace(equation, args=args, kwargs=kwargs)
        if equation.aliases and not outputs & {*equation.results}:
            key = repr((str(equation.op), pytree.tree_map_only(Var, id, equation.args)))
            if key in first:
                same.update(zip(equation.results, first[key], strict=True))
                continue
            first[key] = equation.results
        kept.append(equation)
    return kept


_MASKS = ("attn_mask", "attn_bias")


def _use_boolean_masks(equations: list[Equation], block: Block) -> list[Equation]:
    """The equations; attention reads boolean masks instead of numbers made from them."""
    made = {v: e for e in equations for v in e.results}

    def number(value: Any) -> Any:
        scalar = made.get(value) if isinstance(value, Var) else None
        known = scalar is not None and scalar.name == "scalar_tensor"
        return scalar.args[0] if scalar is not None and known else value

    pairs: dict[Var, Var] = {}
    for value, equation in made.items():
        if equation.name == "where" and [*map(number, equation.args[1:])] == [0, -math.inf]:
            pairs[value] = equation.args[0]
    kept = []
    for equation in equations:
        if "dot_product" in equation.name:
            kwargs = {name: pairs.get(value, value) if name in _MASKS else value
                      for name, value in equation.kwargs.items()}  # fmt: skip
            equation = replace(equation, kwargs=kwargs)
        kept.append(equation)
    read = {v for e in kept for v in e.operands} | {*block.outputs}
    return [e for e in kept if read & {*e.results} or not pairs.keys() & {*e.results}]


def _fuse_losses(equations: list[Equation], block: Block) -> Iterator[Equation]:
    """The equations, with `nll_loss` of `log_softmax` as one."""
    readers = Counter(v for e in equations for v in e.operands)
    readers.update(v for v in block.outputs if isinstance(v, Var))
    made = {v: e for e in equations for v in e.results if e.name == "_log_softmax"}
    joined = {
        equation.operands[0]: made[equation.operands[0]]
        for equation in equations
        if equation.name == "nll_loss_forward"
        and equation.operands[0] in made
        and readers[equation.operands[0]] == 1
    }
    joined = {v: e for v, e in joined.items() if e.args[1] % len(v.shape) == len(v.shape) - 1}
    for equation in equations:
        first = equation.operands[:1]
        if equation.results and equation.results[0] in joined:
            continue
        if equation.name == "nll_loss_forward" and first[0] in joined:
            x, _, half_to_float = joined[first[0]].args
            args = (x, *equation.args[1:], half_to_float)
            op = torch.ops.functron.cross_entropy_loss.default
            equation = replace(equation, op=op, args=args)
        yield equation


def _split_bias(equation: Equation, fresh: Fresh) -> list[Equation]:
    (y,), where = equation.results, equation.where
    product = fresh.like(y, "product")
    if equation.name == "convolution":
        x, w, bias, *rest = equation.args
        shape = [1, bias.shape[0], *[1] * (len(y.shape) - 2)]
        view = fresh.like(bias, "bias", shape=tuple(shape), stride=contiguous_strides(shape))
        return [
            replace(equation, args=(x, w, None, *rest), outputs=(product,)),
            Equation(_aten.view.default, (bias, shape), {}, (view,), where),
            Equation(_aten.add.Tensor, (product, view), {}, (y,), where),
        ]
    bias, a, b = equation.args[:3]
    beta, alpha = (equation.kwargs.get(name, 1) for name in ("beta", "alpha"))
    op = _aten.mm.default if equation.name == "addmm" else _aten.bmm.default
    made = [Equation(op, (a, b), {}, (product,), where)]
    if beta != 1:
        scaled = fresh.like(bias, "scaled")
        made.append(Equation(_aten.mul.Tensor, (bias, beta), {}, (scaled,), where))
        bias = scaled
    kwargs = {"alpha": alpha} if alpha != 1 else {}
    return [*made, Equation(_aten.add.Tensor, (bias, product), kwargs, (y,), where)]
