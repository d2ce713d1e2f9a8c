"""A diffusion transformer (Peebles and Xie 2023): adaLN-zero blocks that learn to undo noise."""

from functools import partial

import torch
from torch.nn.functional import layer_norm

import functron as ft
from functron import P, lax, nn, optim
from functron.ops.attention import attention

mesh = ft.Mesh(dp=2, tp=2)

WIDTH, PATCHES, COUNT, DTYPE = 32, 16, 16, torch.float64
config, stream = nn.AttentionConfig(embed_dim=WIDTH, num_heads=4), P("dp")
given = {"rope": None, "stream": stream, "core": partial(attention, causal=False)}
init = {"stddev": 0.1, "out_stddev": 0.1, "dtype": DTYPE}
shapes = {"in": (4, WIDTH), "places": (PATCHES, WIDTH), "out": (WIDTH, 4)}
defs = {k: ft.ParamDef(s, (None, None), ft.params.Normal(0.1), DTYPE) for k, s in shapes.items()}
defs["blocks"] = ft.params.stack({
    "attention": nn.attention_defs(config, **init),
    "mlp": nn.mlp_defs(WIDTH, 4 * WIDTH, gated=False, bias=False, **init),
    "modulation": ft.ParamDef((WIDTH, 6 * WIDTH), (None, None), ft.params.zeros, DTYPE),
}, 2)  # fmt: skip
specs = ft.param_specs(defs, ft.Rules({"heads": "tp", "kv_heads": "tp", "mlp": "tp"}))


def velocity(w, x, time):
    waves = time[:, None] * 2.0 ** torch.arange(WIDTH // 2)
    when = torch.cat([waves.sin(), waves.cos()], -1)

    def block(x, w):
        a, b, c, d, e, f = (when @ w["modulation"])[:, None].chunk(6, -1)
        y = layer_norm(x, (WIDTH,)) * (1 + a) + b
        x = x + c * nn.self_attention(w["attention"], y, config, **given)
        y = layer_norm(x, (WIDTH,)) * (1 + d) + e
        return x + f * nn.mlp(w["mlp"], y, activation="gelu", stream=stream), None

    return ft.scan(ft.remat(block), x @ w["in"] + w["places"], w["blocks"])[0] @ w["out"]


def loss(w, batch, key):
    image, noise, time = batch["image"], batch["noise"], batch["time"]
    noisy = image + time[:, None, None] * (noise - image)
    return lax.psum((velocity(w, noisy, time) - (noise - image)).square().mean((1, 2)).sum(), "dp")


keys = ft.random.split(ft.random.key(1), 3).unbind(0)
image = (ft.random.uniform(keys[0], (COUNT, 1), DTYPE) * 6 + torch.arange(PATCHES * 4) / 5).sin()
batch = {"image": image.view(COUNT, PATCHES, 4), "time": ft.random.uniform(keys[1], (16,), DTYPE)}
batch["noise"] = ft.random.normal(keys[2], (COUNT, PATCHES, 4), DTYPE)
gradients, optimizer = ft.mean_gradients(loss, lambda batch: COUNT, draws=False), optim.adamw(3e-3)
step = ft.make_step(gradients, optimizer, mesh, specs)
state, result = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh), []
for _ in range(20):
    state, record = step(state, batch)
    result.append(float(record["loss"]))
print(f"loss {result[0]:.4f} -> {result[-1]:.4f}")
