"""Decoders whose layers differ from each other, in pipelines and with tokens further ahead.

Which layers have a window, a rope of their own or none is said by their numbers in the whole model,
of which a stage has some; the module that predicts further ahead is at the stage with the loss.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, nn, random
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import layout_of
from tests.models.test_decoder_variants import MODELS
from tests.models.test_moe_composition import assert_equal

ROWS, SEQ, VOCAB = 8, 12, 20
STREAMS = {"": gpt.STREAM, "sp": gpt.SEQUENCE_PARALLEL_STREAM}


def data() -> dict:
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, : 3 * row % SEQ] = nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(ROWS)}


@functools.cache
def dense(config: gpt.GPTConfig):
    """Parameters, batch, and the dense loss, its details and gradients."""
    weights, batch = ft.init_params(random.key(0), gpt.defs(config)), data()
    total = (batch["targets"] != nn.IGNORE_INDEX).sum()

    def loss(w):
        if config.has_details:
            value, details = gpt.loss_and_details(config, w, batch)
            return value / total, details
        return gpt.loss(config, w, batch) / total, {}

    grads, value = torch.func.grad_and_value(loss, has_aux=True)(weights)
    return weights, batch, value, grads


def check(config, mesh, schedule, layers, stream):
    weights, batch, value, grads = dense(config)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def stage(part, params, x, batch, total):
        y = gpt.stage_loss(config, part, params, x, batch, ft.ModelOptions(stream=STREAMS[stream]))
        if not part.loss:
            return y
        return (y[0] / total, y[1]) if config.has_details else y / total

    partition = Partition(layout_of(layers), schedule.pipes, gpt.uses(config))
    stages = pipelined(stage, partition, schedule)

    def program(weights, batch):
        value, grads = stages.value_and_grad(weights, batch, gpt.num_targets(batch))
        value = value if config.has_details else (value, {})
        return value, ft.sync_gradients(grads, specs)

    split = (specs, P(ft.DATA_AXES))
    got = ft.shard_map(program, mesh, split, (P(), specs), stages="pp")(weights, batch)
    assert_equal(*got, value, grads)


@pytest.mark.parametrize(
    ("name", "ahead", "mesh", "schedule", "layers", "stream"),
    [
        ("gemma3", 1, "pp=2", "1f1b", (2, 2), ""),
        ("gemma3", 1, "pp=2,tp=2", "interleaved", (1, 1, 0, 2), "sp"),
        ("smollm3", 0, "pp=2", "1f1b", (1, 3), ""),
        ("smollm3", 2, "pp=2,dp=2", "1f1b", (1, 3), ""),
        ("smollm3", 2, "pp=2,tp=2", "zb-h1", (1, 3), "sp"),
        ("olmo", 0, "pp=2,tp=2", "1f1b", (1, 3), "sp"),
        ("olmo", 1, "pp=2", "1f1b", (2, 2), ""),
        ("neighbours", 1, "pp=2", "1f1b", (3, 1), ""),
    ],
)
def test_layers_that_differ(name, ahead, mesh, schedule, layers, stream):
    config = replace(
        MODELS[name], vocab_size=VOCAB, vocab_multiple=VOCAB, max_seq=SEQ, num_layers=4,
        mtp_depth=ahead, mtp_repeated=ahead == 2, mtp_detached=schedule == "zb-h1",
    )  # fmt: skip
    chunks = (2,) if schedule == "interleaved" else ()
    check(config, Mesh.parse(mesh), make(schedule, 2, 4, *chunks), layers, stream)


@pytest.mark.parametrize(
    ("name", "mesh"), [("gemma3", "cp=2"), ("smollm3", "cp=2"), ("olmo", "tp=2")]
)
def test_tokens_further_ahead(name, mesh):
    """The same without stages."""
    config = replace(MODELS[name], vocab_size=VOCAB, vocab_multiple=VOCAB, mtp_depth=1)
    weights, batch, value, grads = dense(config)
    mesh = Mesh.parse(mesh)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def program(weights, batch):
        total = gpt.num_targets(batch)

        def loss(weights):
            value, details = gpt.loss_and_details(config, weights, batch)
            return value / total, details

        value, grads = ft.value_and_grad(loss, has_aux=True)(weights)
        return value, ft.sync_gradients(grads, specs)

    run = ft.shard_map(program, mesh, (specs, gpt.batch_specs()), (P(), specs))
    assert_equal(*run(weights, batch), value, grads)
