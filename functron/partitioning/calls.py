"""Transforms recorded whole: calls of `value_and_grad`, `remat` and `custom_vjp` as equations.

A program in global view is traced before it is differentiated. Each call of a transform is one
equation with the program of its function inside, so that placements are found for the function as
it was written, and the transform is applied to the per-rank program: backward then has the
transposes of forward's collectives, as a handwritten program's has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functron.core import tree
from functron.core.scopes import in_phase
from functron.program.equations import Block, Var, contiguous_strides
from functron.program.recorder import Recorder, active
from functron.spmd.axes import user_line
from functron.transforms.custom_vjp import custom_vjp, leaves_like
from functron.transforms.gradient import check_loss, value_and_grad
from functron.transforms.policies import Policy
from functron.transforms.remat import remat

Flat = Callable[..., Sequence[torch.Tensor]]
"""A function of tensors to tensors."""


@dataclass(frozen=True, eq=False)
class Call:
    """An operation that runs `body` under a transform.

    Its operands are the body's inputs. Its results are the body's outputs and, of a gradient, then
    those of the first `num_moving` operands.

    Attributes:
        body: the function's program, in global view.
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


_KNOWN = frozenset(
    {
        "functron.ops.attention",
        "functron.ops.cross_entropy",
        "functron.ops.define",
        "functron.partitioning.partition",
        "functron.transforms.policies",
    }
)
"""Modules whose autograd Functions have the derivatives of what they record."""


class Keeper(TorchFunctionMode):
    """Records calls of transforms as equations of the recorder that is active.

    As a mode it sees where gradients are switched off, which a trace of whole values is not: the
    program is differentiated later, and must not be there.
    """

    def __init__(self):
        super().__init__()
        self._grad = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._set_grad_enabled:
            self._grad = bool(args[0])
        return func(*args, **(kwargs or {}))

    def stops_gradients(self) -> bool:
        """Whether what runs here is in a ``torch.no_grad()``.

        Raises:
            ValueError: it is in the forward of an autograd Function, whose backward is not known.
        """
        if self._grad and not torch.is_grad_enabled():
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name not in ("forward", "_call"):
                frame = frame.f_back
            module = frame.f_globals.get("__name__", "") if frame is not None else ""
            if module not in _KNOWN:
                raise ValueError(
                    f"partition: at {user_line()} the function calls a torch.autograd.Function (of "
                    f"{module or 'an unknown module'}), whose backward no program in global view "
                    "has; wanted functions that are differentiated as they are written; fix: write "
                    "it with functron.custom_vjp"
                )
        return not self._grad

    def value_and_grad(self, f, positions, has_aux: bool, args, kwargs) -> tuple[Any, tuple]:
        """The value (with what is auxiliary) and the gradients, as fake tensors."""
        chosen = tuple(args[position] for position in positions)
        leaves, structure = tree.flatten(chosen)
        kept: dict[str, Any] = {}

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            new = list(args)
            for position, value in zip(positions, tree.unflatten(structure, fresh), strict=True):
                new[position] = value
            out = f(*new, **kwargs)
            value, aux = out if has_aux else (out, None)
            check_loss(value, None)
            kept["aux"] = _Tree(aux)
            return [value, *kept["aux"].tensors]

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

        made = _recorded("value_and_grad", run, leaves, wrap, moving=True)
        value, rest = made[0], made[1 : len(made) - len(leaves)]
        grads = tree.unflatten(structure, made[len(made) - len(leaves) :])
        return ((value, kept["aux"].join(rest)) if has_aux else value), grads

    def remat(self, f, policy: Policy, args, kwargs) -> tree.Tree:
        """The results of `f`, as fake tensors."""
        kept: dict[str, Any] = {}
        given = _Tree((args, kwargs))

        def run(fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            new_args, new_kwargs = given.join(fresh)
            kept["out"] = _Tree(f(*new_args, **new_kwargs))
            return kept["out"].tensors

        wrap = functools.partial(rematerialized, policy)
        made = _recorded("remat", run, given.tensors, wrap)
        return kept["out"].join(made)

    def custom_vjp(self, f, forward, backward, args) -> tree.Tree:
        """The results of `forward`, as fake tensors; its backward is traced beside it."""
        recorder = active()
        assert recorder is not None
        given = _Tree(args)
        operands = [recorder.var(value) for value in given.tensors]
        with recorder.frame() as frame:
            fresh = [_like(recorder, value) for value in given.tensors]
            inputs = [recorder.input(value, "operand") for value in fresh]
            out, residuals = forward(*given.join(fresh))
            outs, kept = _Tree(out), _Tree(residuals)
            outputs = [recorder.var(value) for value in (*outs.tensors, *kept.tensors)]
            body = recorder.block(inputs, outputs)
        pull = _Pull.traced(recorder, given, outs, kept, backward)
        both = {**frame.captured, **pull.captured}
        captured, around = [*both], [*both.values()]
        count = len(outs.tensors)
        op = Call(
            Block((*inputs, *captured), body.equations, body.outputs),
            "custom_vjp",
            lambda rank, rank_back: _ruled(rank, rank_back, len(operands), count, pull),
            backward=Block((*pull.inputs, *captured), pull.equations, tuple(pull.outputs)),
            num_outputs=count,
            floats=pull.floats,
            pulled=pull.pulled,
        )
        results = _described(outputs[:count])
        return outs.join(recorder.emit(op, [*operands, *around], results))


@dataclass(frozen=True, eq=False)
class _Pull:
    """The backward of a custom_vjp, traced.

    Attributes:
        inputs: residuals, then the cotangents of results.
        equations, outputs: to the cotangents of operands.
        captured: values from around it, by what they are there.
        floats: the results that have cotangents.
        pulled: the operands whose cotangents the outputs are.
    """

    inputs: Sequence[Var]
    equations: tuple
    outputs: Sequence[Var]
    captured: Mapping[Var, Var]
    floats: tuple[int, ...]
    pulled: tuple[int, ...]

    @classmethod
    def traced(cls, recorder: Recorder, given: _Tree, outs: _Tree, kept: _Tree, backward) -> _Pull:
        """`backward` on residuals and cotangents like those that forward has made."""
        floats = tuple(i for i, x in enumerate(outs.tensors) if x.is_floating_point())
        with recorder.frame() as frame, in_phase("backward"):
            saved = [_like(recorder, value) for value in kept.tensors]
            cotangents: list[Any] = [None] * len(outs.tensors)
            for i in floats:
                like = outs.tensors[i]
                stride = contiguous_strides(like.shape)
                cotangents[i] = recorder.empty(like.shape, stride, like.dtype, like.device)
            fresh = [*saved, *(cotangents[i] for i in floats)]
            inputs = [recorder.input(value, "cotangent") for value in fresh]
            grads = backward(kept.join(saved), outs.join(cotangents))
            leaves = leaves_like(given.join(given.tensors), grads)
            rows = [leaves[place] for place in given.places]
            pulled = tuple(
                i
                for i, (row, x) in enumerate(zip(rows, given.tensors, strict=True))
                if row is not None and x.is_floating_point()
            )
            outputs = [recorder.var(rows[i]) for i in pulled]
            block = recorder.block(inputs, outputs)
        return cls(inputs, block.equations, outputs, dict(frame.captured), floats, pulled)


def _ruled(rank: Flat, rank_back: Flat, num_operands: int, num_outputs: int, pull: _Pull) -> Flat:
    """The custom_vjp of a rank's forward and backward; what they capture is closed over."""

    def function(*operands):
        moving, captured = operands[:num_operands], operands[num_operands:]

        def forward(*values):
            made = rank(*values, *captured)
            return tuple(made[:num_outputs]), tuple(made[num_outputs:])

        def backward(residuals, cotangents):
            given = [cotangents[i] for i in pull.floats]
            found = iter(rank_back(*residuals, *given, *captured))
            return tuple(next(found) if i in pull.pulled else None for i in range(num_operands))

        return custom_vjp(lambda *values: forward(*values)[0], forward, backward)(*moving)

    return function


def rematerialized(policy: Policy, rank: Flat) -> Flat:
    """`remat` of what a rank runs."""
    return remat(lambda *operands: tuple(rank(*operands)), policy=policy)


class _Tree:
    """A tree taken apart into its tensors and the rest."""

    def __init__(self, value: tree.Tree):
        leaves, self._structure = tree.flatten(value)
        self._leaves = leaves
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self.places]

    def join(self, tensors: Sequence[torch.Tensor]) -> tree.Tree:
        """The tree with other tensors in their place."""
        leaves = list(self._leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree.unflatten(self._structure, leaves)


def _recorded(
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
    op = Call(body, name, wrap, len(given) if moving else 0)
    return recorder.emit(op, operands, _described(results))


def _described(values: Sequence[Var]) -> list[tuple]:
    return [(v.shape, contiguous_strides(v.shape), v.dtype, v.device) for v in values]


def _like(recorder: Recorder, value: torch.Tensor) -> torch.Tensor:
    return recorder.empty(value.shape, value.stride(), value.dtype, value.device)
