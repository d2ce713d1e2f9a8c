"""Run by test_product.py under torchrun with 4 processes: bound layers against simulated ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.precision.test_product import MESHES, SPECS, pair, problem

import functron as ft
from functron import lax
from functron.precision import RECIPES
from functron.spmd import Mesh, spec_axes
from functron.spmd import spec as sharding
from tests.ranks import on_the_first

NAME = "dp=2,tp=2 sequence"


def gradients(mesh, recipe):
    """Value and gradients of two layers."""
    stream = MESHES[NAME]
    layer = pair(RECIPES[recipe], stream)

    def inside(dy, params, x):
        def loss(params, x):
            y = layer(params, x)
            return lax.psum((y * dy).sum(), spec_axes(stream)), y

        (_, y), grads = ft.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, ft.sync_gradients(grads, (SPECS, stream))

    simulated = isinstance(mesh, Mesh)
    specs = (stream, SPECS, stream), (stream, (SPECS, stream))
    return ft.shard_map(inside, mesh, *specs, check=simulated), specs


def check(recipe: str) -> None:
    """Processes compute their parts of the simulation's results."""
    mesh = Mesh.parse(NAME.split()[0])
    bound = mesh.bind()
    params, x, dy = problem()
    want = on_the_first(lambda: gradients(mesh, recipe)[0](dy, params, x))
    step, (in_specs, out_specs) = gradients(bound, recipe)
    got = step(*ft.shard((dy, params, x), in_specs, bound))
    pairs = zip(ft.tree.leaves(got), ft.tree.leaves(want), ft.tree.leaves(out_specs), strict=True)
    for mine, whole, spec in pairs:
        part = sharding.shard(whole, spec, mesh, bound.coordinate)
        torch.testing.assert_close(mine, part, rtol=1e-11, atol=1e-11)
    if dist.get_rank() == 0:
        print(f"{recipe}: ok", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for recipe in ("fp8-tensor", "fp8-row", "nvfp4"):
        check(recipe)
    dist.destroy_process_group()
