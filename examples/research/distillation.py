"""Distillation (Hinton et al. 2015) of probabilities that tp splits, and of the stream."""

import torch
from torch.nn.functional import cosine_similarity

import functron as ft
from functron import P, gpt, lax, nn, optim

mesh = ft.Mesh(dp=2, tp=2)

teacher = gpt.GPTConfig(vocab_size=60, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64,
                        max_seq=32, init_stddev=0.3, dtype="float64")  # fmt: skip
student = gpt.GPTConfig(**{**vars(teacher), "num_layers": 1})
rules, defs = gpt.rules(teacher, mesh), {"own": gpt.defs(student), "of": gpt.defs(teacher)}
specs = {name: ft.param_specs(each, rules) for name, each in defs.items()}
weights = ft.init_params(ft.random.key(1), defs["of"])
HEAT, COSINE = 2.0, 0.5


def read(config, w, tokens, *layers):
    """Log-probabilities at a temperature, and the stream after some layers."""
    names = [f"blocks/{layer}/out" for layer in layers]
    logits, found = ft.capture(gpt.forward, *names)(config, w, tokens)
    stream = torch.stack([*found.values()])
    return nn.log_softmax(logits / HEAT, vocab_size=config.vocab_size), stream


def loss(w, batch, key):
    """The sum over tokens of KL(teacher, student), and of one minus the cosine of their streams."""
    wanted, there = read(teacher, batch["weights"], batch["tokens"], 1)
    found, here = read(student, w, batch["tokens"], 0)
    apart = lax.psum((wanted.exp() * (wanted - found)).sum(), ("dp", "tp"))
    return apart + COSINE * lax.psum((1 - cosine_similarity(here, there, dim=-1)).sum(), "dp")


tokens = ft.random.randint(ft.random.key(2), (8, 16), 0, 60)
gradients = ft.mean_gradients(loss, lambda batch: 8 * 16, draws=False, checks_sum=False)
optimizer = optim.adamw(3e-3)
given = {"tokens": P("dp"), "weights": specs["of"]}
step = ft.make_step(gradients, optimizer, mesh, specs["own"], batch_specs=given)
state = ft.init_state(ft.random.key(0), defs["own"], specs["own"], optimizer, mesh)
result = []
for _ in range(4):
    state, record = step(state, {"tokens": tokens, "weights": weights})
    result.append(float(record["loss"]))
print(f"distance to the teacher {result[0]:.4f} -> {result[-1]:.4f}")
