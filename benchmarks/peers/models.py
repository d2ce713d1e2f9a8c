"""The decoder of all benchmarks: functron's config, and the same model as a plain `nn.Module`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functron as ft
from functron import gpt, random
from functron.pipeline import Layout, balanced_layout, even_layout

Step = Callable[[], float]
"""One step of training, which gives its loss."""

SEED = 0
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


def decoder(vocab: int, layers: int, hidden: int, heads: int, seq: int, **options) -> gpt.GPTConfig:
    """RMSNorm, RoPE, SwiGLU, no biases, embedding and unembedding apart; nothing is padded."""
    return gpt.GPTConfig(
        vocab_size=vocab, num_layers=layers, embed_dim=hidden, num_heads=heads,
        mlp_dim=options.pop("mlp", 0) or 4 * hidden, max_seq=seq,
        vocab_multiple=math.gcd(vocab, 128), **options,
    )  # fmt: skip


def layout(c: gpt.GPTConfig, stages: int, *, balanced: bool) -> Layout:
    """The layers of each stage: as many in all, or by their FLOPs, with the head in the last."""
    if not balanced:
        return even_layout(stages, c.num_layers)
    width, attended = c.num_heads * c.head_size, c.max_seq / 2  # of each token, under the mask
    layer = c.embed_dim * (2 * width + 2 * c.kv_heads * c.head_size + 3 * c.mlp_dim)
    layer += 2 * width * attended
    return balanced_layout(stages, [layer] * c.num_layers, loss=c.embed_dim * c.padded_vocab)


def make_batch(vocab: int, batch: int, seq: int, device: str = "cpu") -> dict[str, Tensor]:
    """Random tokens, the same for every program."""
    tokens = torch.randint(
        0, vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(SEED)
    )
    parts = {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "rows": torch.arange(batch),
    }
    return {name: part.to(device) for name, part in parts.items()}


def initial_weights(config: gpt.GPTConfig, device: str = "cpu") -> dict:
    """The parameters that functron's `init_state` starts from: every peer copies them."""
    key = random.split(random.key(SEED, device=device))[0]
    return ft.init_params(key, gpt.defs(config))


class Attention(nn.Module):
    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.head_dim = c.head_size
        self.grouped = c.kv_heads < c.num_heads
        wide, narrow = c.num_heads * c.head_size, c.kv_heads * c.head_size
        self.q = nn.Linear(c.embed_dim, wide, bias=False)
        self.k = nn.Linear(c.embed_dim, narrow, bias=False)
        self.v = nn.Linear(c.embed_dim, narrow, bias=False)
        self.out = nn.Linear(wide, c.embed_dim, bias=False)

    def forward(self, x, cos, sin):
        # the number of heads is left open: tensor parallelism leaves each rank some of them
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in
                   (self.q, self.k, self.v))  # fmt: skip
        q, k = (rotate(y, cos, sin) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def rope(c: gpt.GPTConfig, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair of dims."""
    half = c.head_size // 2
    exponent = torch.arange(half, dtype=torch.float32, device=device) / half
    angles = torch.arange(seq, device=device)[:, None] * c.rope_theta**-exponent
    return angles.cos().to(c.torch_dtype), angles.sin().to(c.torch_dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.up = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.gate = nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.down = nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.norm1 = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.norm2 = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.mlp = FeedForward(c)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """The same decoder, as one would write it without functron."""

    def __init__(self, c: gpt.GPTConfig):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.padded_vocab, c.embed_dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.embed_dim, eps=c.norm_eps)
        self.unembed = nn.Linear(c.embed_dim, c.padded_vocab, bias=False)

    def logits(self, tokens):
        cos, sin = rope(self.config, tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.unembed(self.norm(x))

    def forward(self, tokens, targets):
        logits = self.logits(tokens).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def plain_model(c: gpt.GPTConfig, device: str = "cpu") -> Plain:
    """`Plain` with functron's initial weights."""
    with torch.device("meta"):
        model = Plain(c).to(c.torch_dtype)
    model.to_empty(device=device)
    model.load_state_dict(named_weights(c, ("embed", "norm", "unembed"), "blocks", {}, device))
    return model


def named_weights(
    c: gpt.GPTConfig, top: Sequence[str], blocks: str, inside: Mapping[str, str], device: str
) -> dict[str, Tensor]:
    """The initial weights as the `state_dict` of a module that gives them its own names.

    Args:
        c: the architecture.
        top: the embedding, the last norm and the unembedding.
        blocks: the list of blocks.
        inside: the parts of a block, by the names of `Block`, as far as they differ from these.
        device: where the weights are made.
    """
    weights = initial_weights(c, device)
    outside = (weights["embed"], weights["norm"]["scale"], weights["unembed"].T)
    values = dict(zip(top, outside, strict=True))
    for i in range(c.num_layers):
        for name, weight in block_weights(weights["blocks"], i).items():
            values[f"{blocks}.{i}.{inside.get(name, name)}"] = weight
    return {f"{name}.weight": value for name, value in values.items()}


def block_weights(blocks: dict, layer: int) -> dict[str, Tensor]:
    """One layer's weights by the names of `Block`, each as `nn.Linear` holds it: [out, in]."""
    attention, mlp = blocks["attention"], blocks["mlp"]
    values = {
        "norm1": blocks["attention_norm"]["scale"][layer],
        "norm2": blocks["mlp_norm"]["scale"][layer],
        "attention.out": attention["out"]["w"][layer].flatten(0, 1).T,
    }
    for name in ("q", "k", "v"):
        values[f"attention.{name}"] = attention[name]["w"][layer].flatten(1).T
    for name in ("up", "gate", "down"):
        values[f"mlp.{name}"] = mlp[name]["w"][layer].T
    return values
