"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`make_step` is meant to be read, copied into a notebook, and changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron import optim, random, tree
from functron.params import init_params
from functron.scopes import named_scope
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, shard_map
from functron.transforms import accumulate, sync_gradients, value_and_grad


class State(NamedTuple):
    """Everything a step reads and replaces.

    Attributes:
        step: int64 scalar, the number of steps taken.
        params: the parameters.
        opt_state: what the optimizer remembers.
        key: the key that every step's randomness is derived from.
    """

    step: Any
    params: tree.Tree
    opt_state: tree.Tree
    key: Any


def state_specs(specs: tree.Tree, optimizer: optim.GradientTransformation) -> State:
    """The specs of a `State` whose parameters have these specs."""
    return State(P(), specs, optimizer.specs(specs), P())


def init_state(
    key: torch.Tensor,
    defs: tree.Tree,
    specs: tree.Tree,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
) -> State:
    """The state before the first step: the same numbers on every mesh.

    Args:
        key: a key of `functron.random`; the state lives on its device.
        defs: the parameters' `ParamDef`s.
        specs: their specs, one per parameter.
        optimizer: the gradient transformation that will update them.
        mesh: simulated (global values) or bound (this rank's shards).
    """
    init_key, step_key = random.split(key).unbind(0)
    weights = init_params(init_key, defs, specs, mesh)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    return State(zero, weights, optimizer.init(weights), step_key)


def make_step(
    loss: Callable,
    num_targets: Callable,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    num_microbatches: int = 1,
) -> Callable:
    """The function ``(state, batch) -> (state, metrics)`` that takes one optimization step.

    Donates the state: its tensors are updated in place and returned. On a bound mesh state and
    batch are this rank's shards, on a simulated one global values.

    Args:
        loss: ``(params, batch, key)`` to the *sum* of the losses over the batch of all ranks.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        optimizer: the gradient transformation.
        mesh: the ranks; the batch is split over its data axes.
        specs: the parameters' specs, one per parameter.
        num_microbatches: parts that each rank's batch is cut into to save activation memory.

    Returns:
        The step. Its metrics are float scalars ``loss`` (mean over targets) and ``grad_norm``
        (before clipping). Raises ValueError where the batch does not divide.
    """

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        key = random.fold_in(state.key, state.step)
        total = num_targets(batch)

        def mean_loss(params, microbatch):
            return loss(params, microbatch, key) / total

        gradients = accumulate(value_and_grad(mean_loss), num_microbatches)
        value, grads = gradients(state.params, batch)
        with named_scope("sync"):
            grads = sync_gradients(grads, specs)
        with named_scope("update"):
            norm = optim.global_norm(grads, specs)
            params, opt_state = optimizer.step_(grads, state.opt_state, state.params)
        metrics = {"loss": value, "grad_norm": norm}
        return State(state.step + 1, params, opt_state, state.key), metrics

    layout = state_specs(specs, optimizer)
    return shard_map(step, mesh, (layout, P(DATA_AXES)), (layout, P()))
