"""Mixture of depths (Raposo et al. 2024): a block chooses half of the tokens."""

import torch

import functron as ft
from functron import gpt, optim
from functron.models.decoder import block_defs

mesh = ft.Mesh(dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=32, positions="learned", dtype="float64")  # fmt: skip
text = torch.tensor(list(b"Everything should be made as simple as possible. " * 8))[:264] % 64


def routed(layer, weights, x):
    """The block of the highest half of the tokens, in order, times their scores; others pass."""
    scores = x @ weights["router"]
    chosen = scores.topk(x.shape[1] // 2, dim=1).indices.sort(dim=1).values
    places = chosen[..., None].expand(*chosen.shape, x.shape[-1])
    some = x.gather(1, places)
    y = layer.attention(weights, layer.norm(weights, "attention_norm", some))
    z, _ = layer.feed_forward(weights, layer.norm(weights, "mlp_norm", some + y))
    return x.scatter_add(1, places, (y + z) * scores.gather(1, chosen).sigmoid()[..., None])


def routed_defs(config):
    router = ft.ParamDef((config.embed_dim,), (None,), ft.params.Normal(0.2), torch.double)
    return {**block_defs(config, experts=False), "router": router}


options = ft.ModelOptions(block=ft.Hook(routed, routed_defs))
defs, optimizer = gpt.defs(config, options), optim.adamw(3e-3)
specs = ft.param_specs(defs, gpt.rules(config, mesh))
loss = ft.mean_gradients(lambda w, x, key: gpt.loss(config, w, x, options), gpt.num_targets)
step = ft.make_step(loss, optimizer, mesh, specs)
state = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)
batch = {"tokens": text.view(8, 33)[:, :-1], "targets": text.view(8, 33)[:, 1:]}
result = []
for _ in range(10):
    state, record = step(state, batch)
    result.append(float(record["loss"]))
print(f"loss {result[0]:.4f} -> {result[-1]:.4f} with half of the tokens in each block")
