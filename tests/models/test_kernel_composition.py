"""Registered operations in place of torch's, and chunked losses: dense numbers on every mesh.

Without a GPU the operations compute their references, so this is about their rules under torch.func
and on meshes; tests/kernels compares kernels with them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, random, tree
from functron.nn.moe import MoEConfig
from functron.ops import AUTO, use

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 4, 16, 50
BASE = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=24, max_seq=SEQ,
    vocab_multiple=16, init_stddev=0.3, num_kv_heads=2, qk_norm=True, dtype="float64",
)  # fmt: skip
MODELS = {
    "llama": BASE,
    "gemma": replace(
        BASE, activation="gelu_tanh", zero_centered_norm=True, tied=True, z_loss=1e-2, dropout=0.2
    ),
    "gpt2": replace(BASE, norm="layer", gated=False, bias=True, positions="learned", qk_norm=False),
    "olmo": replace(BASE, norm="bare_layer", qkv_clip=0.7, rope_pairs="neighbours"),
    "glm": replace(
        BASE, head_dim=8, rope_pairs="neighbours", rope_fraction=0.5, qkv_bias=True, qk_norm=False
    ),
    "experts": replace(
        BASE,
        moe=MoEConfig(4, 2, 12, aux_loss=1e-2, score="sigmoid", num_groups=2, top_groups=1),
    ),
    "fused": replace(BASE, num_heads=8, num_kv_heads=4, fused_projections=True),
    "fused experts": replace(
        BASE, num_heads=8, num_kv_heads=4, qk_norm=False, qkv_clip=0.7, fused_projections=True,
        moe=MoEConfig(4, 2, 12, aux_loss=1e-2, shared_dim=8),
    ),
}  # fmt: skip
MESHES = ["", "dp=2", "tp=2", "dp=2,tp=2", "tp=4", "fsdp=2,tp=2", "cp=2"]


def batch() -> dict:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :9] = ft.nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


@functools.cache
def dense(config: gpt.GPTConfig):
    weights = ft.init_params(random.key(0), gpt.defs(config))
    data, key = batch(), random.key(7)

    def loss(weights):
        return gpt.loss(config, weights, data, ft.ModelOptions(kernels=use("reference")), key=key)

    grads, value = torch.func.grad_and_value(loss)(weights)
    return weights, data, key, value, grads


def sharded(config, mesh, kernels, stream, remat, chunk):
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def program(weights, data, key):
        def loss(weights):
            return gpt.loss(config, weights, data, ft.ModelOptions(stream=stream, remat=remat, kernels=kernels, loss_chunk_tokens=chunk, gather=ft.Gather(specs)), key=key)  # fmt: skip

        value, grads = ft.value_and_grad(loss)(weights)
        return value, ft.sync_gradients(grads, specs)

    specs_in = (specs, gpt.batch_specs(), P())
    return ft.shard_map(program, mesh, specs_in, (P(), specs))


def check(config, mesh, kernels, stream=gpt.STREAM, remat="none", chunk=0):
    weights, data, key, value, grads = dense(config)
    program = sharded(config, Mesh.parse(mesh), kernels, stream, remat, chunk)
    got_value, got = program(weights, data, key)
    assert abs(got_value - value) <= TOLERANCE * abs(value)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(grads), strict=True):
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= TOLERANCE, f"{path}: {error}"


@pytest.mark.pairwise(
    of=lambda model, mesh: [{"model": model, "tp": "tp=" in mesh}, {"mesh": mesh}]
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_registered_operations(model, mesh):
    check(MODELS[model], mesh, use("kernel"), chunk=5)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "ep=2,tp=2"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_sequence_parallel(mesh, remat):
    model = "experts" if "ep" in mesh else "gemma"
    stream = gpt.SEQUENCE_PARALLEL_STREAM
    check(MODELS[model], mesh, use("kernel"), stream, remat, chunk=7)


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2", "fsdp=2,tp=2", "cp=2"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_losses_of_torch(mesh, chunk):
    check(MODELS["gemma"], mesh, AUTO, chunk=chunk)


# tests/kernels compiles each operation for good, with what derives it
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_the_step_compiles_with_them(backend):
    config = replace(BASE, dtype="float32")
    weights, data = ft.init_params(random.key(0), gpt.defs(config)), batch()

    def step(kernels, weights, data):
        def loss(weights):
            return gpt.loss(
                config, weights, data, ft.ModelOptions(kernels=kernels, loss_chunk_tokens=16)
            )

        return ft.value_and_grad(loss)(weights)

    value, grads = ft.jit(functools.partial(step, use("kernel")), backend=backend)(weights, data)
    want, want_grads = step(use("reference"), weights, data)
    torch.testing.assert_close(value, want, rtol=1e-5, atol=0)
    for a, b in zip(tree.leaves(grads), tree.leaves(want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
