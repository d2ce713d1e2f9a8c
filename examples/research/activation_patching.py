"""Activation patching (Meng et al. 2022): where a model keeps what distinguishes two prompts."""

import torch

import functron as ft
from functron import P, gpt, lax

mesh = ft.Mesh(dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=60, num_layers=3, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=8, init_stddev=0.3, dtype="float64")  # fmt: skip
defs, options = gpt.defs(config), ft.ModelOptions(remat="full")
specs = ft.param_specs(defs, gpt.rules(config, mesh))
PLACE, SEQ = 2, 8  # the token that differs


def forward(w, tokens):
    """The logits of the last token."""
    return lax.all_gather(gpt.forward(config, w, tokens, options)[:, -1], "tp", axis=1, tiled=True)


def patch(w, tokens, clean, wanted):
    """The distance to the wanted logits for each layer and place that is put back."""

    def distance(layer, place):
        def put(value, name):
            here = torch.arange(SEQ)[:, None] == place
            return torch.where(here, clean[f"blocks/{layer}/out"], value)

        logits = ft.intervene(forward, {f"blocks/{layer}/out": put})(w, tokens)
        return lax.psum((logits - wanted).square().sum(), "dp").sqrt()

    places = torch.arange(SEQ)
    return torch.stack([
        torch.func.vmap(lambda place, layer=layer: distance(layer, place))(places)
        for layer in range(config.num_layers)
    ])  # fmt: skip


weights, rows = ft.init_params(ft.random.key(0), defs), P("dp")
prompts = ft.random.randint(ft.random.key(1), (4, SEQ), 0, 60)
corrupted = prompts.clone()
corrupted[:, PLACE] = (corrupted[:, PLACE] + 1) % 60
mapped = ft.shard_map(forward, mesh, (specs, rows), rows)
wanted, clean = ft.capture(mapped, "blocks/*/out")(weights, prompts)
run = ft.shard_map(patch, mesh, (specs, rows, rows, rows), P())
result = ft.gather(run(weights, corrupted, clean, wanted), P(), mesh)
for layer, row in enumerate(result):
    print(f"layer {layer}:", *(f"{float(value):6.3f}" for value in row))
