"""Run by test_layer.py under torchrun with 4 processes: layers of experts against simulation."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

import functron as ft
from functron import DATA_AXES, Mesh, P, lax, tree
from functron.nn.moe import MoEConfig, moe, moe_defs
from functron.spmd import Rules
from functron.spmd import spec as sharding
from functron.spmd.mesh import CONTEXT_AXES
from tests.ranks import on_the_first

MESH = Mesh(ep=2, tp=2)
BATCH, SEQ, EMBED = 4, 8, 4
WHOLE = P(DATA_AXES, CONTEXT_AXES)
SPLIT = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
CONFIG = MoEConfig(
    num_experts=8, top_k=2, expert_dim=6, renormalise=True, shared_dim=4, expert_bias=True,
    aux_loss=0.1, capacity_factor=1.0,
)  # fmt: skip
SUM = (*DATA_AXES, *CONTEXT_AXES)


def compare(bound, config, axes, stream):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    defs = moe_defs(config, EMBED, gated=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    hidden = None if "tp" in axes else "tp"
    rules = Rules({"mlp": "tp", "expert": axes, "expert_mlp": hidden})
    specs = (ft.param_specs(defs, rules), stream, P(DATA_AXES), stream)
    args = (
        tree.map(lambda d: randn(*d.shape), defs),
        randn(BATCH, SEQ, EMBED),
        torch.arange(BATCH),
        torch.arange(SEQ).expand(BATCH, SEQ),
    )

    def step(params, x, rows, positions):
        def loss(params, x):
            y, share, _ = moe(
                params, x, config, activation="silu", stream=stream, axes=axes,
                rows=rows, positions=positions, counted=positions >= 0,
            )  # fmt: skip
            total = lax.psum(y.sin().sum(), sharding.spec_axes(stream))
            return total + lax.psum(share, SUM), y

        (value, y), grads = ft.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return value, y, ft.sync_gradients(grads, specs[:2])

    out = (P(), stream, specs[:2])
    want = on_the_first(lambda: ft.shard_map(step, MESH, specs, out)(*args))
    got = ft.shard_map(step, bound, specs, out)(*ft.shard(args, specs, bound))
    flat = tree.broadcast_prefix(out, want, is_leaf=sharding.is_spec)
    for a, b, spec in zip(tree.leaves(got), tree.leaves(want), flat, strict=True):
        part = sharding.shard(b, spec, MESH, bound.coordinate)
        torch.testing.assert_close(a, part, rtol=1e-10, atol=1e-10)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = MESH.bind()
    dropless = replace(CONFIG, capacity_factor=0.0)
    cases = {
        "etp": lambda: compare(mesh, CONFIG, ("ep",), WHOLE),
        "folded": lambda: compare(mesh, dropless, ("ep", "tp"), SPLIT),
        "two-hop": lambda: [
            compare(
                mesh,
                replace(each, dispatch="two-hop", num_experts=16, top_k=5),
                ("ep", "tp"),
                SPLIT,
            )
            for each in (CONFIG, dropless)
        ],
        "gather": lambda: compare(mesh, replace(CONFIG, dispatch="gather"), ("ep", "tp"), SPLIT),
    }
    for name in sys.argv[1:] or cases:
        cases[name]()
        if mesh.rank == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()
