"""Run by test_processes.py under torchrun with 4 processes: pipelines on processes against simulated.

The simulation is tested against the dense model in test_composition.py; here the first process
compares what all of them computed, collected from their stages and gathered from their shards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.core import compat
from functron.pipeline import Partition, Schedule, collect, make, pipelined
from functron.pipeline.partition import layout_of
from functron.spmd import BoundMesh
from functron.training.step import make_step
from tests.pipeline.test_composition import (
    CONFIG,
    MLP_USES,
    STREAMS,
    assert_equal,
    batch,
    decoder,
    layers_of_mlp,
    mlp,
    mlp_batch,
    trained_dense,
)
from tests.ranks import on_the_first

TOLERANCE = 1e-12
EVALUATED = {"backend": "eager"}  # compiled programs without Inductor, which takes long


class Case(NamedTuple):
    """A pipeline of the decoder.

    `compile` is the option of `pipelined`; `dropout`, whose bits take most of the time that tracing
    a stage takes, is for some of each kind.
    """

    mesh: Mesh
    name: str
    num_microbatches: int
    layers: tuple[int, ...]
    stream: str = ""
    tied: bool = False
    remat: gpt.Remat = "none"
    compile: Mapping[str, Any] | None = None
    dropout: float = 0.0

    @property
    def config(self) -> gpt.GPTConfig:
        layers = sum(self.layers)
        return replace(CONFIG, num_layers=layers, tied=self.tied, dropout=self.dropout)


PP4, PP2_TP2, DP2_PP2 = Mesh(pp=4), Mesh(pp=2, tp=2), Mesh(dp=2, pp=2)
CASES = {
    "classic": [
        Case(PP4, "1f1b", 5, (1, 2, 1, 0), tied=True),
        Case(PP2_TP2, "gpipe", 3, (1, 1), tied=True, remat="full", dropout=0.3),
        Case(PP2_TP2, "interleaved", 2, (0, 1, 1, 1), "sp", tied=True),
        Case(DP2_PP2, "combined-1f1b", 4, (1, 1), tied=True, dropout=0.3),
    ],
    "more-classic": [
        Case(DP2_PP2, "1f1b", 2, (2, 1)),
        Case(PP4, "interleaved", 4, (1,) * 8, dropout=0.3),
        Case(Mesh(tp=2, pp=2), "combined-1f1b", 4, (2, 1), "sp"),
    ],
    "split": [
        Case(PP4, "zb-h1", 5, (1, 1, 1, 0), tied=True),
        Case(PP2_TP2, "zbv", 3, (0, 1, 0, 1), "sp", remat="full"),
        Case(DP2_PP2, "dualpipe", 4, (1, 1), tied=True),
    ],
    "compiled": [
        Case(PP2_TP2, "interleaved", 2, (0, 1, 0, 1), "sp", compile=EVALUATED),
        Case(DP2_PP2, "zb-h1", 2, (1, 1), tied=True, compile=EVALUATED),
        Case(PP2_TP2, "combined-1f1b", 2, (1, 1), compile=EVALUATED),
    ],
    "linked": [
        Case(PP4, "interleaved", 4, (0, 1, 1, 0, 0, 0, 0, 1)),
        Case(PP4, "zbv", 4, (0, 1, 0, 1, 0, 1, 0, 0), tied=True, compile=EVALUATED),
        Case(DP2_PP2, "dualpipe", 4, (1, 1), tied=True),
    ],
    "more-split": [
        Case(PP2_TP2, "zb-h1", 2, (1, 1), remat="full"),
        Case(PP4, "zbv", 4, (1, 1, 0, 1, 0, 1, 0, 1), tied=True),
        Case(PP2_TP2, "zbv", 3, (0, 1, 0, 1), "sp", dropout=0.3),
        Case(PP4, "dualpipe", 8, (1, 0, 1, 1)),
        Case(DP2_PP2, "dualpipe", 4, (1, 1), tied=True, dropout=0.3),
    ],
    "more-compiled": [
        Case(DP2_PP2, "zb-h1", 2, (1, 1), tied=True, compile=EVALUATED, dropout=0.3),
        Case(PP4, "1f1b", 4, (1, 1, 1, 0), tied=True, compile=EVALUATED),
        Case(PP2_TP2, "zbv", 2, (0, 1, 0, 1), "sp", tied=True, compile=EVALUATED),
        Case(DP2_PP2, "dualpipe", 4, (1, 1), compile=EVALUATED),
    ],
}


def gradients(case: Case, mesh: Mesh | BoundMesh, schedule: Schedule, uses: dict):
    """Loss, gradients and their norm: global values, or this process's."""
    bound = isinstance(mesh, BoundMesh)
    options = {"compile": case.compile} if bound else {}
    layout = layout_of(case.layers)
    stages = decoder(
        case.config, schedule, layout,
        stream=case.stream, remat=case.remat, uses=uses, **options,
    )  # fmt: skip
    rank = mesh.coordinate["pp"] if bound else None
    defs = stages.partition.local_defs(gpt.defs(case.config), rank)
    specs = ft.param_specs(defs, gpt.rules(case.config, case.mesh))
    weights = ft.init_params(random.key(0), defs, specs, mesh)
    data = ft.shard(batch(case.num_microbatches * case.mesh["dp"]), P(ft.DATA_AXES), mesh)

    def program(weights, data, key):
        value, grads = stages.value_and_grad(weights, data, key, gpt.num_targets(data))
        grads = ft.sync_gradients(grads, specs)
        return value, grads, optim.global_norm(grads, specs, stages.partition.copies(rank))

    ins, outs = (specs, P(ft.DATA_AXES), P()), (P(), specs, P())
    mapped = ft.shard_map(program, mesh, ins, outs, stages="pp")
    for _ in range(1 + bound):  # the second time what travels is known
        value, grads, norm = mapped(weights, data, random.key(7))
    if rank is not None and case.compile is not None:  # actions of one cell are one program
        paired = any(len(cell) == 2 for cell in schedule.cells(rank))
        assert bool(stages.compiled.joint) == paired
    return value, ft.gather(grads, specs, mesh), norm, stages.partition


def everywhere(value: torch.Tensor) -> list[float]:
    """A number of every process."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, float(value))
    return told


def check(case: Case, schedule: Schedule, uses: dict) -> None:
    bound = case.mesh.bind()
    value, grads, norm, partition = gradients(case, bound, schedule, uses)
    like = ft.params.abstract_params(gpt.defs(case.config))
    first = all(index == 0 for axis, index in bound.coordinate.items() if axis != "pp")
    whole = collect(grads, like, partition, bound) if first else None
    values, norms = everywhere(value), everywhere(norm)
    if dist.get_rank() == 0:
        want_value, want_grads, want_norm, _ = gradients(case, case.mesh, schedule, uses)
        for each, each_norm in zip(values, norms, strict=True):
            assert abs(each - want_value) <= TOLERANCE * want_value
            assert abs(each_norm - want_norm) <= TOLERANCE * want_norm
        assert_equal((value, whole), (want_value, want_grads), TOLERANCE)


def check_cases(cases: list[Case]) -> None:
    for case in cases:
        began = time.perf_counter()
        schedule = make(case.name, case.mesh["pp"], case.num_microbatches)
        check(case, schedule, gpt.uses(case.config))
        if dist.get_rank() == 0:
            print(f"{case.mesh} {case.name}: {time.perf_counter() - began:.1f} s", flush=True)


SHARED = """
microbatches: 4
pipe: 0 1
pipe: 0.1 1.1

# 0     1
  F0    .
  F2.1  F0
  F1    F2.1
  F3.1  F1+B0
  B0    B2.1
  B2.1  F3.1
  .     B3.1
  B3.1  B1
  B1    .
"""


def check_own_tables() -> None:
    """Two pipes through the same copies of the stages, tied the other way round: none counts twice."""
    schedule = Schedule.parse(SHARED)
    for tied in (False, True):
        case = Case(DP2_PP2, "shared", 4, (1, 2), tied=tied)
        uses = gpt.uses(case.config)
        check(case, schedule, {**uses, "embed": "LE"} if tied else uses)


# --- a model of one's own, whose stages pass on a float and an integer


def mlp_value(mesh, schedule, layers, num_rows, kind, **options):
    """A function of the number of rows: ((loss, aux), gradients), those of this process's stages."""
    partition = Partition(layout_of(layers), schedule.pipes, MLP_USES)
    rank = mesh.coordinate["pp"] if isinstance(mesh, BoundMesh) else None
    params, rows = layers_of_mlp(sum(layers), kind), partition.layers(rank)
    held = {name: params[name] for name in partition.held(rank)}
    if "layers" in held:
        held["layers"] = tree.map(lambda leaf: leaf[rows], held["layers"])
    stages = pipelined(mlp, partition, schedule, **options)

    def program(params, data, scale):
        value, grads = stages.value_and_grad(params, data, scale)
        return value, ft.sync_gradients(grads, P())

    mapped = ft.shard_map(program, mesh, (P(), P(ft.DATA_AXES), P()), P(), stages="pp")
    scale = torch.tensor(0.1, dtype=kind)
    values = [
        mapped(held, ft.shard(mlp_batch(n, kind), P(ft.DATA_AXES), mesh), scale) for n in num_rows
    ]
    return values, partition, params


def check_own_models() -> None:
    """Bits are the same on a mesh without other axes, also of low precision; sizes may change."""
    for name, layers, kind, options in (
        ("1f1b", (1, 2, 1, 0), torch.float64, {}),
        ("zbv", (1,) * 8, torch.bfloat16, {"dtype": torch.float32}),
        ("dualpipe", (1, 0, 1, 1), torch.float64, {}),
        ("interleaved", (1,) * 8, torch.bfloat16, {}),
    ):
        schedule, bound = make(name, 4, 8), PP4.bind()
        sizes = (8, 16, 8)
        got, partition, params = mlp_value(bound, schedule, layers, sizes, kind, **options)
        wholes = [collect(grads, params, partition, bound) for _, grads in got]
        given = schedule, layers, sizes, kind
        want = on_the_first(
            lambda given=given, options=options: mlp_value(PP4, *given, **options)[0]
        )
        for (value, _), whole, (want_value, want_grads) in zip(got, wholes, want, strict=True):
            same = assert_close if name == "dualpipe" else assert_bits  # copies add up otherwise
            same(value, want_value)
            if bound.coordinate["pp"] == 0:
                same(whole, want_grads)


def assert_close(got, want) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def assert_bits(got, want) -> None:
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), (path, a, b)


def check_inductor(mesh: Mesh = DP2_PP2, names: tuple[str, ...] = ("zb-h1",)) -> None:
    """Stages compiled for good."""
    for name in names:
        schedule, bound = make(name, 2, 4), mesh.bind()
        arguments = schedule, (1, 1), (8, 8), torch.float64
        got, partition, params = mlp_value(bound, *arguments, compile={})
        want = on_the_first(lambda arguments=arguments: mlp_value(mesh, *arguments)[0])
        for (value, grads), (want_value, want_grads) in zip(got, want, strict=True):
            whole = collect(grads, params, partition, bound)
            assert_close(value, want_value)
            if bound.coordinate["pp"] == 0:
                assert_close(whole, want_grads)


# --- training and evaluation


TRAINED = (
    (DP2_PP2, "dualpipe", 4, (1, 2), True, {}),
    (PP2_TP2, "1f1b", 4, (1, 2), False, {"compile": EVALUATED}),
)
TRAINED_MORE = (
    (PP2_TP2, "1f1b", 4, (1, 2), False, {"compile": {}}),
    (PP4, "dualpipe", 8, (1, 0, 1, 1), True, {}),
    (PP2_TP2, "zb-h1", 4, (2, 1), True, {}),
    (DP2_PP2, "interleaved", 2, (1, 0, 1, 1), False, {}),
)


def check_training(cases: tuple = TRAINED) -> None:
    """Three steps with AdamW and clipping, which needs the norm over all stages: the dense states."""
    for mesh, name, count, layers, tied, options in cases:
        # whose bits take long to trace: gloo_late.py trains with it uncompiled
        dropout = CONFIG.dropout if name == "1f1b" and not options.get("compile") else 0.0
        config = replace(CONFIG, num_layers=3, tied=tied, dropout=dropout)
        bound, schedule = mesh.bind(), make(name, mesh["pp"], count)
        rank = bound.coordinate["pp"]
        stages = decoder(config, schedule, layout_of(layers), **options)
        defs = stages.partition.local_defs(gpt.defs(config), rank)
        specs = ft.param_specs(defs, gpt.rules(config, mesh))
        copies = stages.partition.copies(rank)
        adamw = optim.adamw(1e-2, weight_decay=0.1, mask=ft.params.decay_mask(defs))
        optimizer = optim.chain(optim.clip_by_global_norm(0.5, specs, copies), adamw)
        state = ft.init_state(random.key(1), defs, specs, optimizer, bound)
        step = make_step(ft.pipeline.gradients(stages, gpt.num_targets), optimizer, bound, specs)
        history = []
        for index in range(3):
            data = batch(8)
            data["tokens"] = (data["tokens"] + 7 * index) % 20
            state, metrics = step(state, ft.shard(data, P(ft.DATA_AXES), bound))
            history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        want_history, want = on_the_first(lambda config=config: trained_dense(config))
        wanted = [[float(m["loss"]), float(m["grad_norm"])] for m in want_history]
        torch.testing.assert_close(history, wanted, rtol=1e-9, atol=0)
        state = ft.gather(state, ft.state_specs(specs, optimizer), bound)
        whole = collect(state, want, stages.partition, bound)
        if dist.get_rank() == 0:
            for path, a, b in zip(
                tree.paths(want), tree.leaves(whole), tree.leaves(want), strict=True
            ):
                assert a.dtype == b.dtype, path
                largest = b.abs().max().clamp(min=1e-9) if b.is_floating_point() else 0
                assert ((a - b).abs() <= 1e-9 * largest).all(), path


def check_forward() -> None:
    """Logits of every microbatch are on every rank of the pipeline, and gradients are not asked for."""
    for mesh, name, count, layers, stream in (
        (PP4, "1f1b", 3, (1, 1, 1, 0), ""),
        (PP2_TP2, "zbv", 2, (0, 1, 1, 1), "sp"),
        (DP2_PP2, "dualpipe", 4, (1, 2), ""),
    ):
        config = replace(CONFIG, num_layers=3)
        schedule, bound = make(name, mesh["pp"], count), mesh.bind()
        partition = Partition(layout_of(layers), schedule.pipes, gpt.uses(config))
        defs = partition.local_defs(gpt.defs(config), bound.coordinate["pp"])
        specs = ft.param_specs(defs, gpt.rules(config, mesh))
        weights = ft.init_params(random.key(0), defs, specs, bound)
        data = batch(count * mesh["dp"])

        def stage(part, params, x, batch, config=config, stream=stream):
            return gpt.stage(
                config, part, params, x, batch, ft.ModelOptions(stream=STREAMS[stream])
            )

        stages = pipelined(stage, partition, schedule)

        def gathered(weights, data, stages=stages):
            logits = torch.stack(stages.forward(weights, data), 1).flatten(0, 1)
            return lax.all_gather(logits, "tp", axis=-1, tiled=True)

        program = ft.shard_map(
            gathered, bound, (specs, P(ft.DATA_AXES)), P(ft.DATA_AXES), stages="pp"
        )
        got = program(weights, ft.shard(data, P(ft.DATA_AXES), bound))
        whole = ft.init_params(random.key(0), gpt.defs(config))
        given = config, whole, data["tokens"]
        logits = on_the_first(lambda given=given: gpt.forward(*given))
        want = ft.shard(logits, P(ft.DATA_AXES), bound)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not got.requires_grad


def check_links() -> None:
    """A process group for each link of a rank, as on GPUs: made once, used in order, and left."""
    with mock.patch.object(compat, "runs_gloo", return_value=False):
        check_cases(CASES["linked"])
        bound = PP4.bind()
        ring = {(rank, (rank + 1) % 4) for rank in range(4)}
        first = dict(bound.connect("pp", {(0, 1), (1, 2)}))
        names = bound.connect("pp", ring)
        assert names.keys() == ring
        assert first.items() <= names.items()
        assert len({*names.values()}) == 2  # 0 to 1 and 2 to 3, 1 to 2 and 3 to 0
        me, sent = dist.get_rank(), torch.zeros(1)
        to, source = (
            compat.group(names[link]) for link in ((me, (me + 1) % 4), ((me - 1) % 4, me))
        )
        leaving: Any = dist.isend(torch.tensor([float(me)]), group=to, group_dst=(me + 1) % 4)
        dist.recv(sent, group=source, group_src=(me - 1) % 4)
        leaving.wait()
        assert sent.item() == (me - 1) % 4
        dist.barrier()
        bound.leave("the end of the test")
        for name in {*names.values()}:
            with pytest.raises(RuntimeError):
                compat.find_group(name)


CHECKS = {
    "links": check_links,
    "own-tables": check_own_tables,
    "own-models": check_own_models,
    "inductor": check_inductor,
    "more-inductor": lambda: check_inductor(names=("1f1b",)),
    "training": check_training,
    "more-training": lambda: check_training(TRAINED_MORE),
    "forward": check_forward,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for chosen in sys.argv[1:]:
        if chosen in CASES:
            check_cases(CASES[chosen])
        else:
            CHECKS[chosen]()
        if dist.get_rank() == 0:
            print(f"{chosen}: ok", flush=True)
    dist.destroy_process_group()
