"""A partitioned training step on four processes equals the dense one, eager and traced."""

from __future__ import annotations

import torch
import torch.distributed as dist

import functron as ft
from functron import P

torch.manual_seed(0)
X = torch.randn(8, 16, dtype=torch.float64)
PARAMS = {
    "down": torch.randn(32, 16, dtype=torch.float64),
    "up": torch.randn(16, 32, dtype=torch.float64),
}
SPECS = {"down": P("tp"), "up": P(None, "tp")}


def step(params, x):
    return ft.value_and_grad(lambda p: (torch.relu(x @ p["up"]) @ p["down"]).square().mean())(
        params
    )


def by_torch(params, x):
    """The same, whose backward pass is traced."""
    grads, value = torch.func.grad_and_value(
        lambda p: (torch.relu(x @ p["up"]) @ p["down"]).square().mean()
    )(params)
    return value, grads


dist.init_process_group("gloo")
mesh = ft.Mesh(dp=2, tp=2).bind()
mapped, traced = (
    ft.partition(each, mesh, (SPECS, P("dp")), (P(), SPECS)) for each in (step, by_torch)
)
local = ft.shard(PARAMS, SPECS, mesh), ft.shard(X, P("dp"), mesh)
for run in (mapped, ft.jit(mapped, backend="eager"), traced, ft.jit(traced)):
    loss, grads = run(*local)
    torch.testing.assert_close((loss, ft.gather(grads, SPECS, mesh)), step(PARAMS, X))
print("equal", flush=True)
dist.destroy_process_group()
