"""One step of a run on packed samples, against losses and gradients that were found otherwise."""

from __future__ import annotations

import torch

from functron import tree
from functron.spmd import Mesh
from functron.training.config import TrainConfig, configure
from functron.training.run import prepare

TOLERANCE = 1e-10


def check_step(config: TrainConfig, mesh: str, wanted, **options) -> dict[str, torch.Tensor]:
    """Compare a step on a mesh with `wanted`: weights, mean loss and its gradients; the batch.

    The optimizer is one that subtracts gradients.
    """
    run = prepare(configure(config, mesh=mesh, **options), Mesh.parse(mesh))
    before = tree.map(torch.clone, run.state.params)
    weights, value, grads = wanted
    assert all(map(torch.equal, tree.leaves(before), tree.leaves(weights)))
    batch = run.batch(0)
    state, metrics = run.step(run.state, batch)
    assert abs(float(metrics["loss"]) - float(value)) <= TOLERANCE * float(value)
    rows = zip(tree.paths(grads), *map(tree.leaves, (before, state.params, grads)), strict=True)
    for path, old, new, gradient in rows:
        assert gradient.abs().max() > 0, path
        error = (old - new - gradient).abs().max() / gradient.abs().max()
        assert error <= TOLERANCE, f"{path}: {error}"
    return batch
