"""Rematerialisation: keep a function's inputs instead of its intermediates, and run it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". `torch.utils.checkpoint` fails
under torch.func transforms; this is one autograd Function that re-runs the program with its mesh
axes as explicit operands, so it composes with vmap, grad, jvp-free higher orders and collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from functron import compat, tree
from functron.closure import hoist
from functron.spmd.axes import SimulatedAxis, enter, scope
from functron.transforms.gradient import vjp


def remat(f: Callable) -> Callable:
    """The function that computes `f` and, in backward, computes it again instead of storing it.

    Memory between forward and backward falls from all intermediates of `f` to its tensor arguments
    (tensors it closes over included); the price is one more forward. Collectives inside run again
    too. Randomness inside must come from keys (`functron.random`), so that both runs agree.

    Raises:
        ValueError: in forward-mode differentiation (jvp), where there is nothing to save.
    """

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        hidden, close = hoist(f)
        leaves, structure = tree.flatten((args, kwargs))
        outer = scope()
        simulated = [axis for axis in outer.axes.values() if isinstance(axis, SimulatedAxis)]
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in positions]
        result: list[tree.Structure] = []

        def flat(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # axes are rebound to the tokens of whatever vmap level this runs at
            num_axes, num_hidden = len(simulated), len(hidden)
            axes = {
                axis.name: replace(axis, token=token)
                for axis, token in zip(simulated, operands[:num_axes], strict=True)
            }
            full = list(leaves)
            for i, value in zip(positions, operands[num_axes + num_hidden :], strict=True):
                full[i] = value
            closed = close(list(operands[num_axes : num_axes + num_hidden]))
            new_args, new_kwargs = tree.unflatten(structure, full)
            with enter(replace(outer, axes={**outer.axes, **axes})):
                outputs, out_structure = tree.flatten(closed(*new_args, **new_kwargs))
            result[:] = [out_structure]
            return tuple(outputs)

        tokens = [axis.token for axis in simulated]
        outputs = _Remat.apply(_Program(flat), *tokens, *hidden, *tensors)
        return tree.unflatten(result[0], outputs)

    return wrapped


@dataclass(frozen=True, eq=False)
class _Program:
    """A flat function, opaque to functorch."""

    f: Callable[..., tuple[torch.Tensor, ...]]


class _Remat(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(program: _Program, *operands):
        # an operand returned as it is must not be mistaken for one modified in place
        return tuple(
            value.view_as(value) if any(value is operand for operand in operands) else value
            for value in program.f(*operands)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.program = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        operands = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        _, pullback = vjp(ctx.program.f, *operands)
        return None, *pullback(tuple(cotangents))

    @staticmethod
    def jvp(ctx, *tangents):
        raise ValueError("remat in forward-mode differentiation: call the function itself instead")

    @staticmethod
    def vmap(info, in_dims, program, *operands):
        varying: list[bool] = []

        def batched(*values):
            def ranks(token, *rest):
                outputs = program.f(*rest)
                level = compat.level_of(token)
                varying[:] = [compat.is_batched_at(value, level) for value in outputs]
                return outputs

            token = torch.arange(info.batch_size)
            dims = (0, *in_dims[1:])
            outputs = torch.func.vmap(ranks, in_dims=dims, randomness="error")(token, *values)
            # vmap gives every output a batch dim; one that does not vary must stay without, or
            # it would no longer count as replicated
            pairs = zip(outputs, varying, strict=True)
            return tuple(value if batch else value.select(0, 0) for value, batch in pairs)

        outputs = _Remat.apply(_Program(batched), *operands)
        return outputs, tuple(0 if batch else None for batch in varying)
