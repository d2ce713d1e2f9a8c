"""Distillation (Hinton et al. 2015) of a vocabulary that tp splits, and of the streams' directions."""

import torch
from torch.nn.functional import cosine_similarity

import functron as ft
from functron import P, gpt, lax, nn, optim

mesh = ft.Mesh(dp=2, tp=2)

teacher = gpt.GPTConfig(vocab_size=60, num_layers=4, embed_dim=32, num_heads=4, mlp_dim=64,
                        max_seq=32, init_stddev=0.3, dtype="float64")  # fmt: skip
student = gpt.GPTConfig(**{**vars(teacher), "num_layers": 2})
rules, defs = gpt.rules(teacher, mesh), {"own": gpt.defs(student), "of": gpt.defs(teacher)}
specs = {name: ft.param_specs(each, rules) for name, each in defs.items()}
weights = ft.init_params(ft.random.key(1), defs["of"])
HEAT, COSINE = 2.0, 0.5


def read(config, w, tokens, *layers):
    """Log-probabilities at a temperature, and the stream after some layers."""
    names = [f"blocks/{layer}/out" for layer in layers]
    logits, found = ft.capture(gpt.forward, *names)(config, w, tokens)
    return nn.log_softmax(logits / HEAT, vocab_size=config.vocab_size), torch.stack(
        [*found.values()]
    )


def loss(w, batch, key):
    """The sum over tokens of KL(teacher, student), and of one minus the cosine of their streams."""
    wanted, there = read(teacher, batch["weights"], batch["tokens"], 1, 3)
    found, here = read(student, w, batch["tokens"], 0, 1)
    apart = lax.psum((wanted.exp() * (wanted - found)).sum(), ("dp", "tp"))
    return apart + COSINE * lax.psum((1 - cosine_similarity(here, there, dim=-1)).sum(), "dp")


tokens = ft.random.randint(ft.random.key(2), (8, 32), 0, 60)
optimizer, gradients = optim.adamw(3e-3), ft.mean_gradients(loss, lambda b: 8 * 32, draws=False)
given = {"tokens": P("dp"), "weights": specs["of"]}
step = ft.make_step(gradients, optimizer, mesh, specs["own"], batch_specs=given)
state = ft.init_state(ft.random.key(0), defs["own"], specs["own"], optimizer, mesh)
result = []
for _ in range(20):
    state, record = step(state, {"tokens": tokens, "weights": weights})
    result.append(float(record["loss"]))
print(f"distance to the teacher {result[0]:.4f} -> {result[-1]:.4f}")
