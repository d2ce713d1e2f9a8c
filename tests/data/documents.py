"""Documents of given lengths, and what training on each of them by itself gives."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import torch

import functron as ft
from functron import P, gpt, random
from functron.data.packing import IGNORED
from tests.models.test_composition import MODELS, VOCAB, assert_equal

_FULL = replace(MODELS["llama"], num_layers=2, max_seq=512)
CONFIGS = {
    "full": _FULL,
    "window": replace(_FULL, window=5),
    "mixed": replace(_FULL, window=5, global_every=2, sinks=True),
    "ahead": replace(_FULL, mtp_depth=2),
}


def documents(lengths) -> list[np.ndarray]:
    """Tokens that are all different, so that none can stand for another."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(a, b) for a, b in itertools.pairwise(ends)]


def texts(lengths) -> list[np.ndarray]:
    """Tokens that a small model knows."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n) for n in lengths]


def recovered(batch: dict, number: int) -> dict[str, np.ndarray]:
    """Everything of one document, ordered by its positions, padding included."""
    mine = batch["segments"].numpy() == number
    order = np.argsort(batch["positions"].numpy()[mine], kind="stable")
    return {n: x.numpy()[mine][order] for n, x in batch.items() if n != "rows"}


def check_whole(batch: dict, docs: list[np.ndarray], known: list[int] | None = None) -> None:
    """Nothing lost, doubled or mixed up; targets right; all else is padding without targets."""
    targets = 0
    for number, tokens in enumerate(docs):
        if known is not None and number not in known:
            assert not (batch["segments"] == number).any()
            continue
        found = recovered(batch, number)
        n = len(tokens)
        np.testing.assert_array_equal(found["tokens"][:n], tokens)
        np.testing.assert_array_equal(found["targets"][: n - 1], tokens[1:])
        assert (found["targets"][n - 1 :] == IGNORED).all()
        np.testing.assert_array_equal(found["positions"], np.arange(len(found["positions"])))
        rows = (batch["segments"] == number).any(1)
        assert int(rows.sum()) == 1
        targets += n - 1
    assert int((batch["targets"] != IGNORED).sum()) == targets
    assert {x.dtype for x in batch.values()} == {torch.int64}


@functools.cache
def dense(config: gpt.GPTConfig, lengths: tuple[int, ...]):
    """Weights, and the mean loss and gradients of every document by itself."""
    weights = ft.init_params(random.key(0), gpt.defs(config))

    def mean(w):
        total = torch.zeros((), dtype=torch.float64)
        for tokens in texts(lengths):
            targets = torch.tensor([*tokens[1:], -100])
            total = total + gpt.loss(
                config, w, {"tokens": torch.tensor(tokens)[None], "targets": targets[None]}
            )
        return total / (sum(lengths) - len(lengths))

    grads, value = torch.func.grad_and_value(mean)(weights)
    return weights, value, grads


def check_equal(config, lengths, batch, mesh, context, stream=gpt.STREAM) -> None:
    """Training on `batch` over `mesh` gives the dense loss and gradients."""
    weights, value, grads = dense(config, tuple(lengths))
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    options = ft.ModelOptions(stream=stream, context=context, gather=ft.Gather(specs))

    def program(weights, data):
        total = gpt.num_targets(data)

        def loss(weights, data):
            return gpt.loss(config, weights, data, options) / total

        got, grads = ft.value_and_grad(loss)(weights, data)
        return got, ft.sync_gradients(grads, specs)

    run = ft.shard_map(program, mesh, (specs, gpt.batch_specs(packed=True)), (P(), specs))
    assert_equal(*run(weights, batch), value, grads)
