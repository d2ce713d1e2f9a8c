"""Differential attention (Ye et al. 2024): the difference of two softmax maps of each head."""

import math

import torch
from torch.nn import functional as F

import functron as ft
from functron import gpt, optim

mesh = ft.Mesh(dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=64, num_layers=3, embed_dim=32, num_heads=4, mlp_dim=64,
                       init_stddev=0.2, rope_pairs="neighbours", dtype="float64")  # fmt: skip
text = torch.tensor(list(b"Everything should be made as simple as possible. " * 8))[:264] % 64


def attend(q, k, v):
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def differential(params, q, k, v, *, layer):
    start = 0.8 - 0.6 * torch.exp(-0.3 * layer.to(q.dtype))
    one, two = (params["q"] * params["k"]).sum(-1).exp().unbind(0)
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    out = attend(q1, k1, v) - (one - two + start) * attend(q2, k2, v)
    return (1 - start) * F.rms_norm(out, out.shape[-1:])


def factors(config):
    row = ft.ParamDef((2, config.head_size // 2), (None, None), ft.params.Normal(0.1), torch.double)
    return {"q": row, "k": row}


options = ft.ModelOptions(attention=ft.Hook(differential, factors))
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
print(f"loss {result[0]:.4f} -> {result[-1]:.4f}")
