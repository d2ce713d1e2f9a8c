"""The eager training step against the same model as a plain nn.Module, and against its simulation.

    python benchmarks/eager.py [--hidden 512 --layers 8 --seq 512 --vocab 8192 --batch 4]

Prints medians of interleaved step times and their ratios, and the peak resident memory that each
program adds, measured in a process of its own. The peer is a `torch.nn.Module` with `.backward()`
and `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import functron as ft
from functron import Mesh, gpt, optim, random

PROGRAMS = ("plain", "functron", "simulated")


class Attention(nn.Module):
    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.heads = c.num_heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(c.embed_dim, c.embed_dim, bias=False) for _ in range(4)
        )

    def forward(self, x, cos, sin):
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in
                   (self.q, self.k, self.v))  # fmt: skip
        q, k = (rotate(y, cos, sin) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.norm2 = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.up = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.gate = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.down = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    """The same decoder, as one would write it without functron."""

    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.padded_vocab, c.embed_dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.unembed = nn.Linear(c.embed_dim, c.padded_vocab, bias=False)

    def forward(self, tokens, targets):
        half = self.config.head_size // 2
        exponent = torch.arange(half, dtype=torch.float32) / half
        angles = torch.arange(tokens.shape[1])[:, None] * self.config.rope_theta**-exponent
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits = self.unembed(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(c: gpt.GPTConfig, batch: dict) -> Callable[[], float]:
    model = Plain(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> float:
        loss = model(batch["tokens"], batch["targets"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def functron_step(c: gpt.GPTConfig, batch: dict, mesh: Mesh) -> Callable[[], float]:
    defs = gpt.defs(c)
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    optimizer = optim.adamw(3e-4, weight_decay=0.01)
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)

    def loss(params, batch, key):
        return gpt.loss(c, params, batch, key=key)

    train = ft.make_step(loss, gpt.num_targets, optimizer, mesh, specs)

    def step() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"].item()

    return step


def make(program: str, args: argparse.Namespace) -> Callable[[], float]:
    config = gpt.GPTConfig(
        vocab_size=args.vocab, num_layers=args.layers, embed_dim=args.hidden,
        num_heads=args.hidden // 64, mlp_dim=args.mlp or 4 * args.hidden, max_seq=args.seq,
        vocab_multiple=math.gcd(args.vocab, 128),
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1))
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "rows": torch.arange(args.batch),
    }
    if program == "plain":
        return plain_step(config, batch)
    mesh = Mesh(dp=2, tp=4) if program == "simulated" else Mesh()
    return functron_step(config, batch, mesh)


def resident_bytes() -> int:
    """The peak resident memory of this process so far (ru_maxrss would include the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("this benchmark needs Linux: /proc/self/status has no VmHWM")


def peak_bytes(program: str, argv: list[str]) -> int:
    """What the peak resident memory of a fresh process grows by over three steps."""
    command = [sys.executable, __file__, "--peak-of", program, *argv]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("hidden", 512), ("layers", 8), ("seq", 512), ("vocab", 8192),
                          ("batch", 4), ("mlp", 0), ("rounds", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak-of", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        before = resident_bytes()
        step = make(args.peak_of, args)
        for _ in range(3):
            step()
        print(resident_bytes() - before)
        return
    times = measure({name: make(name, args) for name in PROGRAMS}, args.rounds)
    argv = [a for a in sys.argv[1:] if not a.startswith("--peak-of")]
    plain = times["plain"]
    peak = {name: peak_bytes(name, argv) for name in PROGRAMS}
    print(f"{'program':12}{'median s':>10}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}")
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, plain, strict=True))
        print(f"{name:12}{statistics.median(values):10.3f}{ratio:8.3f}"
              f"{peak[name] / 2**20:10.0f}{peak[name] / peak['plain']:8.3f}")  # fmt: skip
    dense = times["functron"]
    ratio = statistics.median(a / b for a, b in zip(times["simulated"], dense, strict=True))
    print(f"simulating dp=2,tp=4 costs {ratio:.2f}x the dense step")


if __name__ == "__main__":
    main()
