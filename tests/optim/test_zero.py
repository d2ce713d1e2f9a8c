"""ZeRO: every stage on every mesh gives the dense numbers, with each rank holding its part only."""

from __future__ import annotations

import functools

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.nn import IGNORE_INDEX
from functron.pipeline import Partition, even_layout, make, pipelined
from functron.spmd.shards import unpad
from functron.spmd.spec import is_spec

TOLERANCE = 1e-10
STEPS, BATCH, SEQ, VOCAB = 3, 24, 6, 20

CONFIG = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=SEQ,
    init_stddev=0.3, dtype="float64",
)  # fmt: skip


def batch(step: int) -> dict:
    """Samples of which every one has another number of targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, : row % SEQ] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


def adamw(specs, copies=1, clip=0.0, wrap=lambda t: t):
    """AdamW that decays all but norms, and what is around it; `wrap` is between both."""
    rate = optim.linear(1e-2, 10)
    inner = wrap(optim.adamw(rate, weight_decay=0.1, mask=optim.not_norm_or_bias))
    return optim.chain(optim.clip_by_global_norm(clip, specs, copies), inner) if clip else inner


OPTIMIZERS = {
    "adamw": adamw,
    "clip": functools.partial(adamw, clip=0.05),
    "momentum": lambda specs, copies=1, wrap=lambda t: t: wrap(optim.sgd(0.1, 0.9)),
}


def sharded(name, defs, specs, mesh, copies=1):
    """The optimizer under ZeRO, and the specs of parts."""
    shards = optim.shard_specs(defs, specs, mesh)
    wrap = lambda inner: optim.zero(inner, specs, shards)
    return OPTIMIZERS[name](shards, copies=copies, wrap=wrap), shards


def run(step, state, steps=STEPS):
    history = []
    for index in range(steps):
        state, metrics = step(state, batch(index))
        history.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return state, torch.tensor(history, dtype=torch.float64)


@functools.cache
def dense(name):
    """One rank, one microbatch, nothing sharded."""
    optimizer = OPTIMIZERS[name](P())
    state = ft.init_state(random.key(1), gpt.defs(CONFIG), P(), optimizer, Mesh())
    step = ft.make_step(
        lambda p, b, key: gpt.loss(CONFIG, p, b), gpt.num_targets, optimizer, Mesh(), P()
    )
    return run(step, state)


def close(got, want, tolerance=TOLERANCE):
    rows = zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True)
    for path, a, b in rows:
        assert a.shape == b.shape, path
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{path}: {error}"


def unpadded(state, like, specs, mesh):
    """A state of a simulated mesh in its canonical form."""
    flat = tree.broadcast_prefix(specs, like, is_leaf=is_spec)
    rows = zip(tree.leaves(state), tree.leaves(like), flat, strict=True)
    leaves = [unpad(a, b.shape, spec, mesh) for a, b, spec in rows]
    return tree.unflatten(tree.structure(like), leaves)


CASES = [
    (Mesh(dp=2), gpt.STREAM),
    (Mesh(dp=4), gpt.STREAM),
    (Mesh(dp=3), gpt.STREAM),
    (Mesh(dp=2, tp=2), gpt.STREAM),
    (Mesh(dp=2, tp=2), gpt.SEQUENCE_PARALLEL_STREAM),
    (Mesh(tp=2, dp=3), gpt.STREAM),
]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("mesh", "stream"), CASES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_are_the_dense_training(name, mesh, stream, stage, num_microbatches):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer, _ = sharded(name, defs, specs, mesh)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        lambda p, b, key: gpt.loss(CONFIG, p, b, stream=stream), gpt.num_targets, optimizer, mesh,
        specs, num_microbatches=num_microbatches, scatter=stage == 2,
    )  # fmt: skip
    state, history = run(step, state)
    want, want_history = dense(name)
    close(history, want_history)
    close(state.params, want.params)
    specs_of_state = ft.state_specs(specs, optimizer).opt_state
    close(unpadded(state.opt_state, want.opt_state, specs_of_state, mesh), want.opt_state)


RULES = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "embed": "fsdp"}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=2, dp=3)], ids=str)
def test_fully_sharded_parameters_gathered_once_per_step(mesh, zero, scatter, num_microbatches):
    """ZeRO-3 between steps; hybrid with dp, over which the state may be cut as well."""
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES))
    if zero:
        optimizer, _ = sharded("clip", defs, specs, mesh)
    else:
        optimizer = OPTIMIZERS["clip"](specs)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        lambda p, b, key: gpt.loss(CONFIG, p, b), gpt.num_targets, optimizer, mesh, specs,
        num_microbatches=num_microbatches, scatter=scatter, hoist=True,
    )  # fmt: skip
    state, history = run(step, state)
    want, want_history = dense("clip")
    close(history, want_history)
    close(state.params, want.params)


@pytest.mark.parametrize("hoist", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(schedule, stage, hoist):
    mesh = Mesh(pp=2, dp=2, fsdp=2 if hoist else 1)
    table = make(schedule, 2, 3)
    partition = Partition(even_layout(2, CONFIG.num_layers), table.pipes, gpt.uses(CONFIG))

    def stage_of(part, params, x, data, key, total):
        y = gpt.stage_loss(CONFIG, part, params, x, data)
        return y / total if part.loss else y

    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES if hoist else {}))
    optimizer, _ = sharded("clip", defs, specs, mesh)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_pipelined_step(
        pipelined(stage_of, partition, table), gpt.num_targets, optimizer, mesh, specs,
        scatter=stage == 2, hoist=hoist,
    )  # fmt: skip
    state, history = run(step, state)
    want, want_history = dense("clip")
    close(history, want_history)
    close(state.params, want.params)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=3)], ids=str)
def test_compiled_and_traced(mesh, stage):
    """The program of the step, evaluated (backend eager): simulated ranks of one process."""
    defs = gpt.defs(CONFIG)
    optimizer, _ = sharded("clip", defs, P(), mesh)
    state = ft.init_state(random.key(1), defs, P(), optimizer, mesh)
    step = ft.make_step(
        lambda p, b, key: gpt.loss(CONFIG, p, b), gpt.num_targets, optimizer, mesh, P(),
        num_microbatches=2, scatter=stage == 2,
    )  # fmt: skip
    state, history = run(ft.jit(step, donate=0, backend="eager"), state)
    want, want_history = dense("clip")
    close(history, want_history)
    close(state.params, want.params)
