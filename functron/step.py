"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`make_step` is meant to be read, copied into a notebook, and changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron import optim, random, tree
from functron.params import init_params
from functron.pipeline.execute import Pipeline
from functron.program.jit import jit
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

    def gradients(params, batch, key, total):
        def mean_loss(params, microbatch):
            return loss(params, microbatch, key) / total

        return accumulate(value_and_grad(mean_loss), num_microbatches)(params, batch)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        key = random.fold_in(state.key, state.step)
        value, grads = gradients(state.params, batch, key, num_targets(batch))
        state, norm = update(state, grads, optimizer, specs)
        return state, {"loss": value, "grad_norm": norm}

    layout = state_specs(specs, optimizer)
    return shard_map(step, mesh, (layout, P(DATA_AXES)), (layout, P()))


def update(
    state: State,
    grads: tree.Tree,
    optimizer: optim.GradientTransformation,
    specs: tree.Tree,
    copies: tree.Tree = 1,
) -> tuple[State, torch.Tensor]:
    """The state after a step, from every rank's shares of the gradients, and the gradients' norm.

    Donates `state` and `grads`. Collectives: those of `sync_gradients`, `optim.global_norm` and the
    optimizer.

    Args:
        state: before the step.
        grads: as `value_and_grad` returns them.
        optimizer: the gradient transformation.
        specs: the parameters' specs.
        copies: how many ranks of a pipeline hold each parameter.
    """
    with named_scope("sync"):
        grads = sync_gradients(grads, specs)
    with named_scope("update"):
        norm = optim.global_norm(grads, specs, copies)
        params, opt_state = optimizer.step_(grads, state.opt_state, state.params)
    return State(state.step + 1, params, opt_state, state.key), norm


def make_pipelined_step(
    stages: Pipeline,
    num_targets: Callable,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    axis: str = "pp",
    compile: bool = False,  # noqa: A002  (as the function that it is for)
) -> Callable:
    """`make_step` for a model whose stages are divided among the ranks of `axis`.

    State and batch are those of `make_step`; on a bound mesh the state is that of the parameters
    that `Partition.local_defs` says this rank holds, and the optimizer's gradient norm must know
    `Partition.copies`.

    Args:
        stages: the stages under a schedule, which cuts the batch; they share ``(key, total)``: the
            step's key, and the number of targets by which the last stage divides its loss.
        num_targets, optimizer, mesh: as in `make_step`.
        specs: the specs of the parameters that this process holds.
        axis: the mesh axis of the pipeline's ranks.
        compile: compile the update, on a bound mesh, as `pipelined` compiles the stages. Of a
            simulated mesh, `jit` compiles the whole step instead.

    Returns:
        The step; see `make_step`. Its metrics have ``aux`` too where the last stage returns that.
    """
    rank = mesh.coordinate[axis] if isinstance(mesh, BoundMesh) and mesh[axis] > 1 else None
    copies = stages.partition.copies(rank)

    layout = state_specs(specs, optimizer)

    def gradients(state: State, batch: tree.Tree) -> tuple[Any, tree.Tree]:
        key = random.fold_in(state.key, state.step)
        return stages.value_and_grad(state.params, batch, key, num_targets(batch))

    def updated(state: State, grads: tree.Tree) -> tuple[State, torch.Tensor]:
        return update(state, grads, optimizer, specs, copies)

    if compile and isinstance(mesh, BoundMesh):
        # every rank's own shares leave the first program as they are, and enter the second
        first = shard_map(gradients, mesh, (layout, P(DATA_AXES)), P(), stages=axis, check=False)
        last = shard_map(updated, mesh, (layout, specs), (layout, P()), stages=axis, check=False)
        second = jit(last, donate=0)
    else:
        first, second = gradients, updated

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        value, grads = first(state, batch)
        state, norm = second(state, grads)
        loss, *aux = value if isinstance(value, tuple) else (value,)
        metrics = {"loss": loss, "grad_norm": norm}
        return state, {**metrics, "aux": aux[0]} if aux else metrics

    if first is not gradients:
        return step
    return shard_map(step, mesh, (layout, P(DATA_AXES)), (layout, P()), stages=axis)
