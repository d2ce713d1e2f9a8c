"""Rematerialisation: keep a function's inputs instead of its intermediates, and run it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". `torch.utils.checkpoint` fails
under torch.func transforms; this is one autograd Function that re-runs the program with its mesh
axes as explicit operands, so it composes with vmap, grad, jvp-free higher orders and collectives.
A policy (`functron.transforms.policies`) may keep some intermediates, which are then not computed
again (`functron.transforms.remember`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from functron import compat, tree
from functron.errors import public
from functron.program.recorder import active
from functron.scopes import in_phase
from functron.transforms.barrier import Reach, tie
from functron.transforms.gradient import rule_vjp
from functron.transforms.policies import Policy, nothing
from functron.transforms.remember import Memory
from functron.transforms.rerun import Site, differentiated, fresh, map_level, partial_of


@public
def remat(f: Callable | None = None, *, policy: Policy = nothing) -> Callable:
    """The function that computes `f` and, in backward, computes it again instead of storing it.

    Memory between forward and backward falls from all intermediates of `f` to its tensor arguments
    (tensors it closes over included) and what the policy keeps; the price is one more forward,
    without what was kept. Collectives inside run again too, unless their results are kept.
    Randomness inside must come from keys (`functron.random`), so that both runs agree.

    Kept values are freed as soon as backward has used them. Backward called again
    (``retain_graph=True``) computes everything again. In a program that is being traced, values
    inside a scan that `f` contains are not kept: put remat around the scanned function.

    Without `f` it is a decorator: ``@remat(policy=policies.dots)``.

    Args:
        f: what to run twice.
        policy: what to keep, of `functron.policies`: nothing, everything, dots,
            ``names("a", ...)``, ``offload("a", ...)``, or several joined by ``|``.

    Raises:
        ValueError: in forward-mode differentiation (jvp), where there is nothing to save; a name of
            the policy that `f` never marks with `checkpoint_name`.
        TypeError: the policy is none.
    """
    if f is None:
        return functools.partial(remat, policy=policy)
    if policy.keep_all:
        return f
    function = f

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        site = Site(function, (args, kwargs))
        memory = Memory(policy, needed=differentiated(site.tensors))
        result: list[tree.Structure] = []

        def flat(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with site.entered(operands) as (closed, arguments), memory.watch():
                new_args, new_kwargs = arguments
                outputs, out_structure = tree.flatten(closed(*new_args, **new_kwargs))
            result[:] = [out_structure]
            return tuple(outputs)

        program = _Program(flat, memory, compat.innermost_is_grad())
        outputs = _Remat.apply(program, *site.operands)
        return tree.unflatten(result[0], outputs)

    return wrapped


@dataclass(frozen=True, eq=False)
class _Program:
    """A flat function, opaque to functorch.

    Attributes:
        f: of the sequence of operands; returns a tuple of tensors.
        memory: what is kept for backward, shared by all vmap levels of one call.
        tracked: whether a torch.func level will run its backward, rather than torch's tape.
    """

    f: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    memory: Memory
    tracked: bool

    def forward(self, operands: tuple) -> tuple[torch.Tensor, ...]:
        """The outputs; where results are remembered, computed as backward will compute them.

        Torch takes some operations apart differently under differentiation, and what is remembered
        is found again by its place among the operations.
        """
        if self.memory.state != "fresh" or active() is not None:
            return self.f(operands)
        if self.tracked:
            return _under_grad(self.f, operands)
        if any(value.requires_grad for value in operands):
            return rule_vjp(lambda *values: self.f(values), *operands)[0]
        return self.f(operands)


def _under_grad(f: Callable, operands: tuple) -> tuple[torch.Tensor, ...]:
    floats = [i for i, value in enumerate(operands) if value.is_floating_point()]
    partial = partial_of(f, operands, floats)

    def split(*values):
        outputs = partial(*values)
        return [x for x in outputs if x.is_floating_point()], outputs  # vjp refuses integers

    made: Any = torch.func.vjp(split, *(operands[i] for i in floats), has_aux=True)
    return made[2]


class _Remat(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(program: _Program, *operands):
        if active() is not None and program.memory.needed:
            with Reach(operands) as reach:
                outputs = program.forward(operands)
            program.memory.tied = reach.choose()
        else:
            outputs = program.forward(operands)
        return fresh(outputs, operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.program = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        program: _Program = ctx.program
        operands = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        after = next((value for value in cotangents if value is not None), None)
        if after is None:
            return None, *(None for _ in operands)
        with in_phase("recompute"):
            if active() is not None:
                for position in program.memory.tied:
                    operands[position] = tie(operands[position], after)
            moving = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
            with program.memory.recalling(after):
                partial = partial_of(program.f, operands, moving)
                outputs, pullback = rule_vjp(partial, *(operands[i] for i in moving))
        given = tuple(
            torch.zeros_like(out) if value is None else value
            for out, value in zip(outputs, cotangents, strict=True)
        )
        grads: list[Any] = [None] * len(operands)
        for i, grad in zip(moving, pullback(given), strict=True):
            grads[i] = grad
        return None, *grads

    @staticmethod
    def jvp(ctx, *tangents):
        raise ValueError("remat in forward-mode differentiation: call the function itself instead")

    @staticmethod
    def vmap(info, in_dims, program, *operands):
        varying: list[bool] = []

        def batched(values):
            outputs, varying[:] = map_level(program.forward, info.batch_size, in_dims[1:], values)
            return outputs

        outer = _Program(batched, program.memory, compat.innermost_is_grad())
        outputs = _Remat.apply(outer, *operands)
        return outputs, tuple(0 if batch else None for batch in varying)
