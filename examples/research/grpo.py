"""GRPO (Shao et al. 2024): groups of samples judged by their mean, and two clipped steps."""

import torch

import functron as ft
from functron import P, gpt, lax, nn, optim

mesh = ft.Mesh(dp=2, tp=2)

config = gpt.GPTConfig(vocab_size=16, num_layers=1, embed_dim=32, num_heads=4, mlp_dim=64,
                       max_seq=16, init_stddev=0.2, dtype="float64")  # fmt: skip
PROMPTS, GROUP, PROMPT, NEW, WANTED, BETA = 4, 8, 4, 6, 3, 0.02
defs, optimizer = gpt.defs(config), optim.adamw(1e-2)
specs = ft.param_specs(defs, gpt.rules(config, mesh))


def log_probs(w, tokens):
    """Of each new token, from columns of the vocabulary that tp splits."""
    logits = gpt.forward(config, w, tokens[:, :-1])[:, PROMPT - 1 :]
    each = nn.log_softmax(logits, vocab_size=config.vocab_size)
    columns = torch.arange(each.shape[-1]) + each.shape[-1] * lax.axis_index("tp")
    mine = tokens[:, PROMPT:, None] == columns
    return lax.psum(torch.where(mine, each, 0).sum(-1), "tp")


def loss(w, batch, key):
    now, before, first = log_probs(w, batch["tokens"]), batch["before"], batch["first"]
    ratio, advantage = (now - before).exp(), batch["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    apart = (first - now).exp() - (first - now) - 1
    return lax.psum((BETA * apart - gain).sum(), "dp")


rows = P("dp")
read = ft.shard_map(log_probs, mesh, (specs, rows), rows)
count = PROMPTS * GROUP * NEW
gradients = ft.mean_gradients(loss, lambda batch: count, draws=False)
step = ft.make_step(gradients, optimizer, mesh, specs)
state = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)
reference = ft.init_params(ft.random.split(ft.random.key(0)).unbind(0)[0], defs)
prompts = ft.random.randint(ft.random.key(1), (PROMPTS, PROMPT), 0, 16).repeat_interleave(GROUP, 0)
result = []
for turn in range(4):
    key = ft.random.fold_in(ft.random.key(2), turn)
    tokens = ft.generate(state.params, config, prompts, NEW, key=key, mesh=mesh)
    tokens = ft.gather(tokens, P(ft.DATA_AXES), mesh)
    reward = (tokens[:, PROMPT:] == WANTED).double().mean(1).view(PROMPTS, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    before, first = read(state.params, tokens), read(reference, tokens)
    batch = {"tokens": tokens, "before": before, "first": first, "advantage": advantage.flatten()}
    for _ in range(2):
        state, record = step(state, batch)
    result.append((float(reward.mean()), float(record["loss"])))
print(f"reward {result[0][0]:.3f} -> {result[-1][0]:.3f}")
