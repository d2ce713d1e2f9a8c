"""Stochastic gradient descent, with momentum or without, in Optax's terms."""

from __future__ import annotations

from typing import NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import public, refuse
from functron.ops.foreach import foreach_
from functron.optim.schedules import (
    LearningRate,
    increment_,
    rate_and_count,
    scale_by_learning_rate,
)
from functron.optim.transformation import (
    GradientTransformation,
    chain,
    identity,
    stateless,
    transformation,
    with_step,
)


class TraceState(NamedTuple):
    """Accumulated momentum.

    Attributes:
        trace: ``g + decay * previous trace``, like the parameters.
    """

    trace: tree.Tree


@public
def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum: the updates become ``t = g + decay * t``, or ``g + decay * t`` of that (Nesterov).

    Optax's `trace`; torch's momentum without dampening.
    """

    def update(updates, state, params=None):
        new = tree.map(lambda g, t: g + decay * t, updates, state.trace)
        out = tree.map(lambda g, t: g + decay * t, updates, new) if nesterov else new
        return out, TraceState(new)

    return transformation(
        init=lambda params: TraceState(tree.map(torch.zeros_like, params)),
        update=update,
        specs=lambda param_specs: TraceState(param_specs),
        elementwise=True,
    )


@public
def sgd(
    learning_rate: LearningRate, momentum: float | None = None, nesterov: bool = False
) -> GradientTransformation:
    """SGD: ``chain(trace(momentum, nesterov), scale_by_learning_rate(learning_rate))``, as Optax's.

    `step_` is a few multi-tensor kernels in place, with the gradients as scratch. (Not
    `torch._fused_sgd_`: its CPU kernel gives wrong values in bfloat16 on torch 2.13.) No
    collectives.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        momentum: decay of the trace; None: no momentum and no state for it.
        nesterov: look ahead by one more momentum step.

    Raises:
        ValueError: `nesterov` without momentum.
    """
    if nesterov and not momentum:
        refuse("sgd", "nesterov", "True with momentum=None", "a momentum", "pass momentum=0.9")
    first = identity() if momentum is None else trace(momentum, nesterov)
    plain = chain(first, scale_by_learning_rate(learning_rate))

    def step_(grads, state, params):
        momentum_state, schedule = state
        rate, count = rate_and_count(learning_rate, schedule)
        if isinstance(rate, torch.Tensor) and compat.is_wrapped(rate):
            return plain.step_(grads, state, params)
        traces = momentum_state.trace if momentum is not None else None
        _step_(grads, traces, params, rate, momentum, nesterov)
        increment_([] if count is None else [count])
        return params, (momentum_state, schedule)

    return with_step(plain, step_)


@public
def sign_sgd(learning_rate: float) -> GradientTransformation:
    """``params - learning_rate sign(gradient)``: every entry goes one step of the same length.

    Bernstein et al. 2018; Optax's `sign_sgd`. What balances the load of experts without a loss is
    updated so (DeepSeek-V3, section 2.1.2). Works on tensors as small as those; nothing is fused.
    """
    return stateless(
        lambda updates, params: tree.map(lambda g: -learning_rate * g.sign(), updates),
        elementwise=True,
    )


def _step_(grads, traces, params, rate, momentum, nesterov) -> None:
    def descend(ps, gs):
        factor = -rate.to(gs[0].device) if isinstance(rate, torch.Tensor) else -rate
        torch._foreach_mul_(gs, factor)
        torch._foreach_add_(ps, gs)

    def with_momentum(ps, gs, ts):
        torch._foreach_mul_(ts, momentum)
        torch._foreach_add_(ts, gs)
        if nesterov:
            torch._foreach_add_(gs, ts, alpha=momentum)
        else:
            torch._foreach_copy_(gs, ts)
        descend(ps, gs)

    columns = {
        "parameters": tree.leaves(params),
        "gradients": tree.same_structure(params, grads, names=("params", "grads")),
    }
    if traces is None:
        foreach_(descend, columns, paths=lambda: tree.paths(params))
        return
    columns["traces"] = tree.same_structure(params, traces, names=("params", "the state's trace"))
    foreach_(with_momentum, columns, paths=lambda: tree.paths(params))
