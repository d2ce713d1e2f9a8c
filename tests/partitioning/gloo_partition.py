"""A partitioned training step on four processes equals the dense one, eager and traced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

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


def convolve(params, buffers, x):
    """A convolution and a batch norm in training: gradients, and the statistics that they leave."""

    def loss(params):
        mean, variance = buffers["mean"].clone(), buffers["variance"].clone()
        out = F.conv2d(x, params["kernel"], stride=(2, 1), padding=1)
        out = F.batch_norm(out, mean, variance, params["scale"], training=True)
        return out.cos().sum(), {"mean": mean, "variance": variance}

    return ft.value_and_grad(loss, has_aux=True)(params)


images = torch.randn(4, 4, 8, 8, dtype=torch.float64)
weights = {"kernel": torch.randn(8, 4, 4, 3, dtype=torch.float64), "scale": X[0, :8]}
buffers = {"mean": torch.zeros(8, dtype=torch.float64), "variance": X[1, :8].exp()}
by_samples, by_channels = P("dp", None, "tp"), {"kernel": P("tp"), "scale": P("tp")}
for spec, own in ((by_samples, P()), (P(None, None, "dp", "tp"), P()), (P("dp"), by_channels)):
    mapped = ft.partition(convolve, mesh, (own, P(), spec), ((P(), P()), P()), pick="cheapest")
    found = mapped(ft.shard(weights, own, mesh), buffers, ft.shard(images, spec, mesh))
    torch.testing.assert_close(found, convolve(weights, buffers, images))
print("equal", flush=True)
dist.destroy_process_group()
