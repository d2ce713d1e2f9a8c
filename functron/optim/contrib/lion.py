"""Lion (Chen et al. 2023): the sign of a momentum, which is all that it remembers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import public
from functron.ops.foreach import foreach_
from functron.optim.mask import Mask, add_decayed_weights
from functron.optim.schedules import LearningRate, increment_, new_count, scale_by_learning_rate
from functron.optim.transformation import GradientTransformation, chain, transformation
from functron.spmd.spec import P


class ScaleByLionState(NamedTuple):
    """Lion's momentum.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters.
    """

    count: Any
    mu: tree.Tree


@public
def scale_by_lion(
    b1: float = 0.9, b2: float = 0.99, *, mu_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Updates ``sign(b1 mu + (1 - b1) g)``, and then ``mu = b2 mu + (1 - b2) g``.

    "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675, algorithm 2;
    Optax's `scale_by_lion`. `update_` computes in the memory of gradients and momentum. No
    collectives: each element by itself.

    Args:
        b1: weight of the momentum in the update.
        b2: decay of the momentum, per update.
        mu_dtype: how it is stored; None: as the parameter is.
    """

    def init(params):
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByLionState(new_count(params), mu)

    def update(updates, state, params=None):
        out = tree.map(lambda g, m: ((1 - b1) * g + b1 * m).sign().to(g.dtype), updates, state.mu)
        mu = tree.map(lambda g, m: ((1 - b2) * g + b2 * m).to(m.dtype), updates, state.mu)
        return out, ScaleByLionState(state.count + 1, mu)

    def update_(updates, state, params=None):
        momenta = tree.same_structure(updates, state.mu, names=("updates", "the state's mu"))
        gradients = tree.leaves(updates)
        if any(g.dtype != m.dtype for g, m in zip(gradients, momenta, strict=True)):
            return update(updates, state, params)
        columns = {"momenta": momenta, "gradients": gradients}
        foreach_(_combine(b1, b2), columns, paths=lambda: tree.paths(updates))
        increment_([state.count])
        return updates, state

    return transformation(
        init,
        update,
        specs=lambda param_specs: ScaleByLionState(P(), param_specs),
        update_=update_,
        elementwise=True,
    )


def _combine(b1: float, b2: float):
    def kernel(momenta: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        ahead = torch._foreach_mul(gradients, 1 - b1)
        torch._foreach_add_(ahead, torch._foreach_mul(momenta, b1))
        torch._foreach_mul_(momenta, b2)
        torch._foreach_mul_(gradients, 1 - b2)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_copy_(gradients, torch._foreach_sign(ahead))

    return kernel


@public
def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay, with Optax's argument names, defaults and state layout.

    ``chain(scale_by_lion(...), add_decayed_weights(...), scale_by_learning_rate(...))``: half of
    AdamW's memory. The authors use a learning rate 3 to 10 times smaller than AdamW's, and as much
    more decay.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        b1, b2, mu_dtype: see `scale_by_lion`.
        weight_decay, mask: see `add_decayed_weights`; the decay is multiplied by the learning rate.
    """
    return chain(
        scale_by_lion(b1, b2, mu_dtype=mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
