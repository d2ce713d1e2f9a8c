"""Hugging Face models on two processes, eager and compiled: loss and gradients equal dense ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from test_module import MODELS, RING, model

import functron as ft
from functron import P

NAMES = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "bert": {"num_hidden_layers": 1},
}
TOKENS = torch.arange(64).reshape(4, 16) * 7 % 60 + 1


def check(name: str, mesh: ft.BoundMesh, **options: Any) -> None:
    fn, params = ft.from_module(model(name, "", **NAMES[name]))
    specs = ft.Rules(MODELS[name][3]).specs(params)

    def step(params, tokens):
        return ft.value_and_grad(lambda p: fn(p, input_ids=tokens, labels=tokens).loss)(params)

    mapped = ft.partition(step, mesh, (specs, P(None, "cp")), (P(), specs), **options)
    dense, local = step(params, TOKENS), ft.shard(params, specs, mesh)
    tokens = ft.shard(TOKENS, P(None, "cp"), mesh)
    for run in (mapped, ft.jit(mapped)):
        loss, grads = run(local, tokens)
        whole = loss, ft.gather(grads, specs, mesh)
        torch.testing.assert_close(whole, dense, rtol=1e-5, atol=2e-6)


torch.set_num_threads(1)
dist.init_process_group("gloo")
bound = ft.Mesh(tp=2).bind()
for each in NAMES:
    check(each, bound)
    print(each, "equal", flush=True)
check("llama", ft.Mesh(cp=2).bind(), **RING)
print("llama around a ring, equal", flush=True)
dist.destroy_process_group()
