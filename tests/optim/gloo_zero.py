"""Run by test_processes.py under torchrun with 4 processes, or 2: every rank with its own parts, for real."""

from __future__ import annotations

import functools
import importlib
import sys

import test_stochastic as rounding
import test_zero as cases
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.core import compat
from functron.ops.operations import use
from functron.pipeline import Partition, even_layout, make, pipelined
from functron.spmd.spec import cut_tree, is_spec, take, without_axes
from functron.training import step as steps
from tests.ranks import on_the_first

torch.set_num_threads(1)
adam = importlib.import_module("functron.optim.adam")  # beside the function of its name


def mine(mesh, step: int) -> dict:
    """This rank's part of a batch."""
    part, parts = mesh.coordinate.get("dp", 0), mesh["dp"]
    return {name: value.chunk(parts)[part] for name, value in cases.batch(step).items()}


def compare(mesh, start, state, history, specs, optimizer, name):
    """Parameters and history against one rank's, and the state's parts against its parts."""
    want, want_history = on_the_first(lambda: cases.dense(name))
    cases.close(torch.tensor(history, dtype=torch.float64), want_history)
    cases.close(ft.gather(state.params, specs, mesh), want.params)
    layout = optimizer.specs(specs)
    # as a compiled step returns them, and a checkpoint restores them: no layouts of views
    assert all(x.stride() == torch.empty(x.shape).stride() for x in tree.leaves(start.opt_state))
    whole = ft.gather(state.opt_state, layout, mesh)
    cases.close(cases.unpadded(whole, want.opt_state, layout, mesh.mesh), want.opt_state)


def run(step, state, mesh):
    history = []
    for index in range(cases.STEPS):
        state, metrics = step(state, mine(mesh, index))
        history.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return state, history


def training(sizes, stage, compiled=False):
    """The dense training on a mesh of processes."""
    mesh = Mesh(**sizes).bind()
    defs = gpt.defs(cases.CONFIG)
    specs = ft.param_specs(defs, gpt.rules(cases.CONFIG, mesh))
    optimizer, _ = cases.sharded("adamw", defs, specs, mesh)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        cases.wrap(
            ft.accumulated(
                ft.mean_gradients(lambda p, b, key: gpt.loss(cases.CONFIG, p, b), gpt.num_targets),
                2,
            ),
            scatter=stage == 2,
        ),
        optimizer,
        mesh,
        specs,
    )
    step = ft.jit(step, donate=0, backend="eager") if compiled else step
    start = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    state, history = run(step, state, mesh)
    compare(mesh, start, state, history, specs, optimizer, "adamw")


def pipeline(stage):
    """Two stages of two data-parallel ranks each, which divide the vocabulary among all."""
    mesh = Mesh(pp=2, dp=2).bind()
    rank, config = mesh.coordinate["pp"], cases.CONFIG
    table = make("1f1b", 2, 3)
    partition = Partition(
        even_layout(2, config.num_layers), table.pipes, gpt.uses(config), {"embed": 0, "unembed": 1}
    )

    def stage_of(part, params, x, data, key, total):
        y = gpt.stage_loss(config, part, params, x, data)
        return y / total if part.loss else y

    defs = partition.local_defs(gpt.defs(config), rank)
    specs = ft.param_specs(defs, ft.Rules({}))
    stored = partition.storage_specs(specs)
    shards = without_axes(optim.shard_specs(defs, stored, mesh), ("pp",))
    optimizer = cases.adamw(
        shards, partition.copies(rank), lambda inner: optim.zero(inner, specs, shards)
    )
    state = ft.init_state(random.key(1), defs, stored, optimizer, mesh)
    step = ft.make_step(
        cases.wrap(
            ft.pipeline.gradients(pipelined(stage_of, partition, table), gpt.num_targets),
            scatter=stage == 2,
        ),
        optimizer,
        mesh,
        specs,
    )
    state, history = run(step, state, mesh)
    want, want_history = on_the_first(lambda: cases.dense("adamw"))
    cases.close(torch.tensor(history, dtype=torch.float64), want_history)
    rows = partition.layers(rank)
    held = {name: want.params[name] for name in state.params}
    held["blocks"] = tree.map(lambda x: x[rows], held["blocks"])
    held["embed"] = held["embed"].chunk(2, 0)[rank]
    held["unembed"] = held["unembed"].chunk(2, 1)[rank]
    cases.close(state.params, held)
    moments = tree.leaves(state.opt_state[1][0].mu["embed"])[0]
    assert moments.shape == (config.padded_vocab // 4, config.embed_dim)


def memory(stage):
    """Bytes per parameter: bfloat16 parameters, float32 gradients, masters and moments."""
    mesh, ranks = Mesh(dp=4).bind(), 4
    config = gpt.GPTConfig(
        vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=256, max_seq=8,
        dtype="bfloat16",
    )  # fmt: skip
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, ft.Rules({"embed": "dp"} if stage == 3 else {}))
    optimizer = optim.make_optimizer(
        optim.OptimizerConfig(fp32_masters=True), 1e-3, specs=specs, defs=defs,
        shards=optim.shard_specs(defs, specs, mesh) if stage < 3 else None,
    )  # fmt: skip
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        cases.wrap(
            ft.accumulated(
                ft.mean_gradients(lambda p, b, key: gpt.loss(config, p, b), gpt.num_targets),
                2,
                dtype=torch.float32,
            ),
            scatter=stage >= 2,
            hoist=stage == 3,
        ),
        optimizer,
        mesh,
        specs,
    )
    found, reduce = [], steps.sync_gradients

    def watched(grads, *args, **kwargs):
        leaves = tree.leaves(grads)
        if not compat.is_wrapped(leaves[0]):  # not in the check before the first run
            storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in leaves}
            found.append(sum(storage.nbytes() for storage in storages.values()))
        return reduce(grads, *args, **kwargs)

    steps.sync_gradients = watched
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(mesh.rank))
    state, _ = step(
        state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(2)}
    )
    steps.sync_gradients = reduce
    held = tree.nbytes((state.params, state.opt_state)) + found[-1]
    wanted = {1: 6 + 12 / ranks, 2: 2 + 16 / ranks, 3: 18 / ranks}[stage] * ft.num_params(defs)
    assert abs(held / wanted - 1) < 0.03, (stage, held / ft.num_params(defs))
    if mesh.rank == 0:
        print(f"stage {stage}: {held / ft.num_params(defs):.3f} bytes per parameter")


def muon():
    """Matrices of layers, each computed by one of the ranks that hold its parts."""
    mesh = Mesh(dp=2, tp=2).bind()
    defs = gpt.defs(cases.CONFIG)
    specs = ft.param_specs(defs, gpt.rules(cases.CONFIG, mesh))
    shards = optim.shard_specs(defs, specs, mesh)

    def trained(distributed, place):
        config = optim.OptimizerConfig("muon", muon=optim.MuonConfig(distributed=distributed))
        given = {"specs": specs, "shards": shards} if place is mesh else {}
        optimizer = optim.make_optimizer(config, 1e-2, defs=defs, **given)
        split = specs if place is mesh else P()
        state = ft.init_state(random.key(1), defs, split, optimizer, place)
        step = ft.make_step(
            ft.mean_gradients(lambda p, b, key: gpt.loss(cases.CONFIG, p, b), gpt.num_targets),
            optimizer,
            place,
            split,
        )
        for index in range(cases.STEPS):
            data = mine(mesh, index) if place is mesh else cases.batch(index)
            state, _ = step(state, data)
        return ft.gather(state.params, split, place)

    cases.close(trained(True, mesh), on_the_first(lambda: trained(False, Mesh())))


def stochastic():
    """Shards of parameters are rounded by the bits of their global elements, in one pass."""
    mesh = Mesh(dp=2, tp=2).bind()
    defs = rounding.values(0, torch.bfloat16)
    shards = optim.shard_specs(defs, rounding.SPECS, mesh)
    config = optim.OptimizerConfig(b2=0.999, clip_norm=0.0, stochastic_rounding=True)
    made = functools.partial(
        optim.make_optimizer, config, 0.02, mask=None, kernels=use("kernel"), defs=defs
    )
    optimizer = made(specs=rounding.SPECS, shards=shards)
    whole = tree.map(lambda spec: P(), rounding.SPECS, is_leaf=is_spec)
    start = ft.shard_map(lambda x: cut_params(x, whole), mesh, (P(),), rounding.SPECS, check=False)
    places, update = set(), adam.adamw_

    def watched(*args, **kwargs):
        places.add(kwargs["rounding"].place if kwargs["rounding"] else None)
        update(*args, **kwargs)

    adam.adamw_ = watched
    got, _ = rounding.train(optimizer, mesh, rounding.SPECS, start=start(defs))
    adam.adamw_ = update
    assert len(places) == 4  # three of low precision, which lie in different places
    want = on_the_first(lambda: rounding.train(made(specs=P()), Mesh(), P())[0])
    rounding.equal(ft.gather(got, rounding.SPECS, mesh), want)


def cut_params(params, whole):
    rows = zip(tree.leaves(params), cut_tree(whole, rounding.SPECS, params), strict=True)
    return tree.unflatten(tree.structure(params), [take(x, cuts).clone() for x, cuts in rows])


CHECKS = {
    "training": lambda: training({"dp": 4}, 2),
    "more training": lambda: training({"dp": 2, "tp": 2}, 1),
    "pipeline": lambda: pipeline(2),
    "more pipeline": lambda: pipeline(1),
    "compiled": lambda: training({"dp": 2}, 2, compiled=True),
    "more compiled": lambda: training({"dp": 2, "tp": 2}, 2, compiled=True),
    "memory": lambda: [memory(stage) for stage in (1, 2, 3)],
    "muon": muon,
    "stochastic": stochastic,
}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for check in sys.argv[1:]:
        CHECKS[check]()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{check}: ok", flush=True)
    dist.destroy_process_group()
