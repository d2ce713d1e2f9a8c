"""DiLoCo (Douillard et al. 2023) whose islands exchange their changes of the weights as int8."""

import torch

import functron as ft
from functron import P, gpt, lax, optim

mesh = ft.Mesh(island=2, dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=32, init_stddev=0.2, dtype="float64")  # fmt: skip
defs, within, rows = gpt.defs(config), ("dp", "tp"), P(("island", "dp"))
specs = ft.param_specs(defs, gpt.rules(config, mesh))
inner, outer = optim.sgd(0.1, momentum=0.9), optim.sgd(0.7, momentum=0.9, nesterov=True)


def mean_of_islands(x, spec):
    """The mean over islands of x, rounded to 127 steps of the largest number of its tensor."""
    largest = lax.pmax(x.abs().max(), ("island", *ft.spmd.spec_axes(spec))).clamp_min(1e-30)
    codes = (x / largest * 127).round().to(torch.int8)
    return lax.all_gather(codes, "island").to(x.dtype).mean(0) * largest / 127


def meet(params, state, batches):
    own, local, losses = params, inner.init(params), []
    for batch in batches:
        loss, grads = ft.value_and_grad(
            lambda w, batch: gpt.loss(config, w, batch) / gpt.num_targets(batch), axes=within
        )(own, batch)
        updates, local = inner.update(ft.sync_gradients(grads, specs, axes=within), local, own)
        own = optim.apply_updates(own, updates)
        losses.append(loss)
    change = ft.tree.map(lambda w, v, spec: mean_of_islands(w - v, spec), params, own, specs)
    updates, state = outer.update(change, state, params)
    return optim.apply_updates(params, updates), state, lax.pmean(torch.stack(losses), "island")


kept = outer.specs(specs)
run = ft.shard_map(meet, mesh, (specs, kept, rows), (specs, kept, P()))
params, losses = ft.init_params(ft.random.key(0), defs), []
state, text = outer.init(params), torch.tensor(list(b"As simple as possible, " * 16))[:264] % 64
batch = {"tokens": text.view(8, 33)[:, :-1], "targets": text.view(8, 33)[:, 1:]}
for _ in range(3):
    params, state, found = run(params, state, [batch] * 4)
    losses.append(ft.gather(found, P(), mesh))
result = params, losses
print(f"loss {float(losses[0].max()):.4f} -> {float(losses[-1].min()):.4f} in 3 rounds")
