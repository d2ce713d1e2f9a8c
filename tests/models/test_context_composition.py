"""Rows of the central table for long contexts: sequences split over ranks, equal to dense."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, random, tree
from tests.models.test_composition import BATCH, MODELS, SEQ, TOLERANCE, assert_equal, batch

ZIGZAG, CONTIGUOUS = gpt.Context(), gpt.Context(order="contiguous")
GATHER = gpt.Context(kind="gather")
CONTEXTS = {
    "ring-zigzag": ZIGZAG,
    "ring-contiguous": CONTIGUOUS,
    "gather-zigzag": GATHER,
    "gather-contiguous": gpt.Context(kind="gather", order="contiguous"),
}
STREAMS = {"": gpt.STREAM, "sequence-parallel": gpt.SEQUENCE_PARALLEL_STREAM}


def packed(data: dict) -> dict:
    """The same tokens as documents of many lengths, cut at other places in every sample."""
    lengths = [[24], [1, 23], [5, 19], [3, 3, 18], [12, 12], [7, 1, 1, 15], [11, 13], [2] * 12]
    assert len(lengths) == BATCH
    assert all(sum(row) == SEQ for row in lengths)
    positions = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    segments = [torch.repeat_interleave(torch.tensor(row)) for row in lengths]
    return {**data, "positions": torch.stack(positions), "segments": torch.stack(segments)}


@functools.cache
def dense(config: gpt.GPTConfig, documents: bool):
    """Parameters, batch, key, and the dense loss and gradients: every document by itself."""
    weights, key = ft.init_params(random.key(0), gpt.defs(config)), random.key(7)
    data = packed(batch()) if documents else batch()
    total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()
    if not documents:
        loss = functools.partial(gpt.loss, config, batch=data, key=key)
        grads, value = torch.func.grad_and_value(lambda w: loss(w) / total)(weights)
        return weights, data, key, value, grads

    def by_document(w):
        out = 0
        for row in range(BATCH):
            segments = data["segments"][row]
            for number in segments.unique():
                chosen = {n: data[n][row][segments == number][None] for n in ("tokens", "targets")}
                out = out + gpt.loss(config, w, chosen)
        return out / total

    grads, value = torch.func.grad_and_value(by_document)(weights)
    return weights, data, key, value, grads


def sharded(config, mesh, stream, context, *, remat="none", documents=False, num_microbatches=1):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    options = ft.ModelOptions(stream, remat, ft.Gather(specs), context)

    def program(weights, data, key):
        total = gpt.num_targets(data)

        def loss(weights, data):
            return gpt.loss(config, weights, data, options, key=key) / total

        value, grads = ft.accumulate(ft.value_and_grad(loss), num_microbatches)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    split = gpt.batch_specs(packed=documents)
    return ft.shard_map(program, mesh, (specs, split, P()), (P(), specs))


MESHES = [
    Mesh(cp=2), Mesh(cp=4), Mesh(cp=3), Mesh(ulysses=2), Mesh(ulysses=4), Mesh(cp=2, ulysses=2),
    Mesh(ulysses=2, cp=2), Mesh(cp=2, tp=2), Mesh(dp=2, cp=2, tp=2), Mesh(cp=2, ulysses=2, tp=2),
    Mesh(fsdp=2, cp=2), Mesh(fsdp=2, cp=2, tp=2), Mesh(dp=2, cp=4), Mesh(ulysses=2, tp=4),
]  # fmt: skip


TABLE = [
    *itertools.product(["llama"], CONTEXTS, MESHES),
    *itertools.product(["llama-multi-query"], ["ring-zigzag", "gather-zigzag"], MESHES[::2]),
    *itertools.product(["gpt2"], ["ring-zigzag", "gather-contiguous"], MESHES[1::2]),
]


def factors(mesh, context, model):
    """Each mesh; each kind of context and each order on each kind of mesh, and with each model."""
    kind, order = context.split("-")
    axes = tuple(axis for axis in ("cp", "ulysses", "tp") if mesh[axis] > 1)
    return [
        {"mesh": mesh}, {"model": model, "context": context},
        {"kind": kind, "axes": axes}, {"order": order, "axes": axes},
    ]  # fmt: skip


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("model", "context", "mesh"), TABLE, ids=str)
def test_composition(mesh, context, model):
    config = replace(MODELS[model], dropout=0.3 if model == "gpt2" else 0.0)
    weights, data, key, value, grads = dense(config, False)
    for stream in STREAMS.values() if mesh["tp"] > 1 else [gpt.STREAM]:
        run = sharded(config, mesh, stream, CONTEXTS[context])
        assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mesh", [Mesh(), *MESHES[1::2]], ids=str)
@pytest.mark.parametrize("model", ["llama"])
def test_packed_documents_do_not_see_one_another(mesh, context, model):
    config = MODELS[model]
    weights, data, key, value, grads = dense(config, True)
    run = sharded(config, mesh, gpt.STREAM, CONTEXTS[context], documents=True)
    assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.pairwise(of=lambda mesh, remat: [{"mesh": mesh}, {"remat": remat}])
@pytest.mark.parametrize("remat", ["full", "selective", "dots"])
@pytest.mark.parametrize("mesh", [Mesh(cp=2, tp=2), Mesh(cp=2, ulysses=2)], ids=str)
def test_remat_and_microbatches(mesh, remat):
    config = replace(MODELS["llama"], dropout=0.2)
    weights, data, key, value, grads = dense(config, False)
    stream = gpt.SEQUENCE_PARALLEL_STREAM
    run = sharded(config, mesh, stream, ZIGZAG, remat=remat, num_microbatches=2)
    assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mesh", [Mesh(cp=2), Mesh(cp=2, ulysses=2, tp=2)], ids=str)
def test_logits_come_in_order(mesh, context):
    config = MODELS["llama"]
    weights, data, *_ = dense(config, False)
    want = gpt.forward(config, weights, data["tokens"])
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    split = gpt.batch_specs()["tokens"]
    forward = ft.shard_map(
        functools.partial(gpt.forward, config, options=ft.ModelOptions(context=CONTEXTS[context])),
        mesh, (specs, split), P(*split, "tp"),
    )  # fmt: skip
    assert (forward(weights, data["tokens"]) - want).abs().max() < TOLERANCE * want.abs().max()


def test_differentiated_from_outside():
    config, mesh = MODELS["llama"], Mesh(dp=2, cp=2)
    weights, data, key, value, grads = dense(config, False)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()
    loss = ft.shard_map(functools.partial(gpt.loss, config), mesh, (specs, gpt.batch_specs()), P())
    got = torch.func.grad_and_value(lambda w: loss(w, data) / total)(weights)
    assert_equal(got[1], got[0], value, grads)
    assert tree.structure(got[0]) == tree.structure(weights)
    assert key is not None


def test_impossible_contexts_are_refused():
    with pytest.raises(ValueError, match="ring_size: got 2 with order='zigzag'"):
        gpt.Context(ring_size=2)


def test_sequences_that_do_not_divide_are_refused():
    config, mesh = MODELS["llama"], Mesh(cp=8)
    weights, data, key, *_ = dense(config, False)
    with pytest.raises(ValueError, match="16"):  # 24 tokens in 2 x 8 parts
        sharded(config, mesh, gpt.STREAM, ZIGZAG)(weights, data, key)


def test_packed_samples_may_be_longer_than_any_document():
    config = replace(MODELS["llama"], max_seq=12)
    data = packed(batch())
    weights = ft.init_params(random.key(0), gpt.defs(config))
    with pytest.raises(ValueError, match="wanted at most max_seq=12"):
        gpt.loss(config, weights, batch())
    rows = [4, 7]  # of two documents of 12 tokens, and twelve of 2
    data = {name: value[rows] for name, value in data.items()}
    assert gpt.loss(config, weights, data).isfinite()
