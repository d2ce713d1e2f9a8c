"""The decoder in JAX with Optax, on functron's stacked weights: what `jax.jit` is measured with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from peers.models import LEARNING_RATE, WEIGHT_DECAY, Step, initial_weights

from functron import gpt, tree


def rms_norm(x, scale, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x, cos, sin):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block(c: gpt.GPTConfig, w: dict, x, cos, sin):
    y = rms_norm(x, w["attention_norm"]["scale"], c.norm_eps)
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, w["attention"][name]["w"]) for name in "qkv")
    y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", y, w["attention"]["out"]["w"])
    y = rms_norm(x, w["mlp_norm"]["scale"], c.norm_eps)
    mlp = w["mlp"]
    return x + (jax.nn.silu(y @ mlp["gate"]["w"]) * (y @ mlp["up"]["w"])) @ mlp["down"]["w"]


def mean_loss(c: gpt.GPTConfig, scanned: bool, w: dict, tokens, targets):
    half = c.head_size // 2
    freqs = c.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(tokens.shape[1], dtype=jnp.float32)[:, None, None] * freqs
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = w["embed"][tokens]
    if scanned:
        x, _ = jax.lax.scan(lambda x, layer: (block(c, layer, x, cos, sin), None), x, w["blocks"])
    else:
        for i in range(c.num_layers):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], w["blocks"])
            x = block(c, layer, x, cos, sin)
    logits = rms_norm(x, w["norm"]["scale"], c.norm_eps) @ w["unembed"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def jax_step(c: gpt.GPTConfig, batch: dict, *, scanned: bool) -> Step:
    """`jax.jit` of loss, gradients and AdamW with donated weights and moments."""
    weights = tree.map(lambda leaf: jnp.array(leaf.numpy()), initial_weights(c))
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    state = (weights, optimizer.init(weights))
    tokens, targets = (jnp.array(batch[name].numpy(), jnp.int32) for name in ("tokens", "targets"))

    def train(state, tokens, targets):
        weights, moments = state
        loss, grads = jax.value_and_grad(lambda w: mean_loss(c, scanned, w, tokens, targets))(
            weights
        )
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    compiled = jax.jit(train, donate_argnums=0)

    def step() -> float:
        nonlocal state
        state, loss = jax.block_until_ready(compiled(state, tokens, targets))
        return float(loss)

    return step
