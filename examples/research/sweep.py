"""A sweep of eight learning rates in one program: vmap of a training loop, on dp and tp."""

import torch

import functron as ft
from functron import P, gpt, optim

mesh = ft.Mesh(dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=32, init_stddev=0.2, dtype="float64")  # fmt: skip
defs = gpt.defs(config)
specs = ft.param_specs(defs, gpt.rules(config, mesh))
rates = 10 ** torch.linspace(-4, -0.5, 8, dtype=torch.double)
unscaled = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.scale_by_adam())
STEPS = 4


def mean_loss(w, batch):
    return gpt.loss(config, w, batch) / gpt.num_targets(batch)


def train(rate, w, batch):
    """The losses of some steps of Adam with one learning rate."""
    state, losses = unscaled.init(w), []
    for _ in range(STEPS):
        value, grads = ft.value_and_grad(mean_loss)(w, batch)
        updates, state = unscaled.update(ft.sync_gradients(grads, specs), state, w)
        w = ft.tree.map(lambda leaf, change: leaf - rate * change, w, updates)
        losses.append(value)
    return torch.stack(losses)


def sweep(rates, w, batch):
    return torch.func.vmap(train, in_dims=(0, None, None))(rates, w, batch)


tokens = ft.random.randint(ft.random.key(1), (4, 17), 0, 64)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
run = ft.shard_map(sweep, mesh, (P(), specs, P("dp")), P())
result = ft.gather(run(rates, ft.init_params(ft.random.key(0), defs), batch), P(), mesh)
last = [float(value) for value in result[:, -1]]
best = min(range(8), key=last.__getitem__)
for rate, value in zip(rates.tolist(), last, strict=True):
    print(f"{rate:.1e}  loss {value:.4f}")
print(f"best: {rates[best]:.1e}")
