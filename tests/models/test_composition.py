"""The central table: every model x mesh x option gives the numbers of the dense model in float64.

Dense is one rank without a mesh, differentiated by torch.func (not by our own transforms); that the
dense model is the right one is what test_hugging_face.py shows.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, random, tree

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 8, 24, 50

BASE = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=3, embed_dim=24, num_heads=8, head_dim=4, mlp_dim=48, max_seq=SEQ,
    init_stddev=0.3, dtype="float64",
)  # fmt: skip
GPT2 = replace(
    BASE, norm="layer", activation="gelu_tanh", gated=False, bias=True, positions="learned"
)
MODELS = {
    "llama": replace(BASE, num_kv_heads=4, rope_scaling=ft.nn.RopeScaling(original_max_seq=16)),
    "llama-multi-query": replace(
        BASE,
        num_kv_heads=1,
        qk_norm=True,
        z_loss=1e-2,
        qkv_bias=True,
        zero_centered_norm=True,
        embed_scale=5.0,
    ),
    "gpt2": GPT2,
    "llama-fused": replace(BASE, num_kv_heads=4, qk_norm=True, fused_projections=True),
}
MESHES = [
    Mesh(dp=2), Mesh(dp=8), Mesh(tp=2), Mesh(tp=4), Mesh(tp=8), Mesh(dp=2, tp=2),
    Mesh(dp=4, tp=2), Mesh(dp=2, tp=4), Mesh(tp=4, dp=2), Mesh(dp=2, tp=1),
]  # fmt: skip
STREAMS = {"": gpt.STREAM, "sequence-parallel": gpt.SEQUENCE_PARALLEL_STREAM}
TABLE = [
    pytest.param(
        model, mesh, stream, remat, tied, dropout,
        id="-".join(filter(None, [
            model, str(mesh), stream, "remat" * (remat == "full"), "tied" * tied, "dropout" * bool(dropout),
        ])),
    )
    for model, mesh, stream, remat, tied, dropout in itertools.product(
        MODELS, MESHES, STREAMS, ["none", "full"], [False, True], [0.0, 0.3]
    )
    if not (MODELS[model].fused_projections and mesh["tp"] > MODELS[model].kv_heads)  # refused
]  # fmt: skip


def batch() -> dict:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :20] = ft.nn.IGNORE_INDEX  # so that ranks and microbatches hold different counts
    targets[5] = ft.nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


def mean_loss(config, stream, remat, weights, data, key, total):
    return (
        gpt.loss(config, weights, data, ft.ModelOptions(stream=stream, remat=remat), key=key)
        / total
    )


@functools.cache
def dense(config: gpt.GPTConfig, shape: tuple[int, int] = (BATCH, SEQ)):
    """Parameters, batch, key, and the dense loss and gradients."""
    weights = ft.init_params(random.key(0), gpt.defs(config))
    key, data = random.key(7), batch()
    total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()
    loss = functools.partial(mean_loss, config, gpt.STREAM, "none", data=data, key=key, total=total)
    grads, value = torch.func.grad_and_value(lambda w: loss(w))(weights)
    return weights, data, key, value, grads


def sharded(config, mesh, stream, remat, num_microbatches):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def program(weights, data, key):
        total = gpt.num_targets(data)

        def loss(weights, data):
            return mean_loss(config, stream, remat, weights, data, key, total)

        gradients = ft.accumulate(ft.value_and_grad(loss), num_microbatches)
        value, grads = gradients(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs))


def assert_equal(value, grads, want_value, want_grads):
    assert abs(value - want_value) <= TOLERANCE * abs(want_value)
    rows = zip(tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True)
    for path, got, want in rows:
        assert want.abs().max() > 0 or path == "blocks/attention/k/b", path
        error = (got - want).abs().max() / want.abs().max().clamp(min=1e-3)
        assert error <= TOLERANCE, f"{path}: {error}"


@pytest.mark.pairwise
@pytest.mark.parametrize(("model", "mesh", "stream", "remat", "tied", "dropout"), TABLE)
def test_composition(model, mesh, stream, remat, tied, dropout):
    config = replace(MODELS[model], tied=tied, dropout=dropout)
    weights, data, key, value, grads = dense(config)
    got = sharded(config, mesh, STREAMS[stream], remat, 1)(weights, data, key)
    assert_equal(*got, value, grads)


@pytest.mark.pairwise(
    of=lambda model, mesh, remat, num: [
        {"model": model},
        {"remat": remat, "num": num},
        {"mesh": mesh, "num": num},
    ]
)
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp=2), Mesh(dp=2, tp=4)], ids=str)
@pytest.mark.parametrize("remat", ["none", "full", "selective", "dots"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama-fused"])
def test_microbatches_with_uneven_targets_and_dropout(model, mesh, remat, num):
    config = replace(MODELS[model], dropout=0.3)
    weights, data, key, value, grads = dense(config)
    got = sharded(config, mesh, gpt.SEQUENCE_PARALLEL_STREAM, remat, num)(weights, data, key)
    assert_equal(*got, value, grads)


@pytest.mark.parametrize("mesh", [Mesh(tp=3), Mesh(dp=2, tp=3), Mesh(tp=6)], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_sizes_that_are_no_powers_of_two(mesh, stream):
    config = replace(BASE, num_heads=6, dropout=0.2)
    weights, data, key, value, grads = dense(config)
    got = sharded(config, mesh, STREAMS[stream], "full", 1)(weights, data, key)
    assert_equal(*got, value, grads)


@pytest.mark.pairwise
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=4)], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("remat", ["none", "full", "selective", "dots"])
def test_differentiated_from_outside(mesh, stream, remat):
    """Gradients and Hessian-vector products of the mapped loss as a function of global values."""
    config = replace(MODELS["llama"], num_layers=2)
    weights, data, _, value, grads = dense(config)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def program(weights, data):
        total = gpt.num_targets(data)
        return mean_loss(config, STREAMS[stream], remat, weights, data, None, total)

    mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES)), P())
    got_grads, got_value = torch.func.grad_and_value(mapped)(weights, data)
    assert_equal(got_value, got_grads, value, grads)

    total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()
    plain = functools.partial(
        mean_loss, config, gpt.STREAM, "none", data=data, key=None, total=total
    )

    def product(loss):
        """H v by reverse over reverse, v = cos(w)."""
        direction = tree.map(torch.cos, weights)

        def slope(w):
            pairs = zip(tree.leaves(torch.func.grad(loss)(w)), tree.leaves(direction), strict=True)
            return sum((g * v).sum() for g, v in pairs)

        return torch.func.grad(slope)(weights)

    assert_equal(value, product(lambda w: mapped(w, data)), value, product(lambda w: plain(w)))
