"""Overlapping iterations on processes over gloo, against the simulation in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, gpt, tree
from functron.compiler import compile as compile_program
from tests.compiler.test_prefetch import batch, training
from tests.ranks import on_the_first

STEPS = 2
PROGRAM = "import sys; from tests.compiler.test_prefetch_ranks import main; main(*sys.argv[1:])"

EAGER, PLAIN, COMPILED = ("eager", True), ("eager", False), ("inductor", True)
CASES = {
    # random bits take long to trace and to compile
    "compiled": (Mesh(fsdp=2), {"dropout": 0.0}, [None, EAGER, PLAIN, COMPILED]),
    "remat": (Mesh(fsdp=2), {"remat": "full", "microbatches": 2, "dropout": 0.0}, [EAGER]),
    "hybrid": (
        Mesh(dp=2, fsdp=2),
        {"remat": "dots", "microbatches": 2, "dropout": 0.0},
        [None, EAGER],
    ),
    "tp": (Mesh(fsdp=2, tp=2), {"stream": gpt.SEQUENCE_PARALLEL_STREAM}, [EAGER]),
    "both": (Mesh(dp=2, fsdp=2), {"axes": ("dp", "fsdp"), "dropout": 0.0}, [EAGER]),
}
"""Mesh, options, and ways to run: not traced (None), or a backend and whether iterations overlap."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [
        ("compiled", "remat"),
        ("tp", "both"),
        pytest.param(
            ("hybrid",), marks=pytest.mark.full
        ),  # its axes are in "both", remat in "remat"
    ],
    ids="-".join,
)
def test_processes_compute_what_the_simulation_does(torchrun, names):
    (nproc,) = {CASES[name][0].size for name in names}
    out = torchrun(PROGRAM, nproc, *names, timeout=300).stdout
    assert out.count("right") == nproc * len(names), out


def main(*names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        check(*CASES[name])
        print("right", flush=True)
    dist.destroy_process_group()


def simulated(mesh: Mesh, options: dict) -> tuple:
    """The parameters after some steps, and their losses."""
    step, state, _ = training(mesh, **options)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        losses.append(metrics["loss"].item())
    return tree.map(torch.clone, state.params), losses


def check(mesh: Mesh, options: dict, ways: list) -> None:
    """Steps, eager and compiled with and without overlap, against the simulation."""
    bound = mesh.bind()
    params, losses = on_the_first(lambda: simulated(mesh, options))
    data = ft.shard(batch(), P(ft.DATA_AXES), bound)
    _, _, specs = training(bound, **options)
    whole = ft.shard(params, specs, bound)
    for way in ways:
        step, state, _ = training(bound, **options)
        if way is not None:
            program = ft.trace(step, donate=0)(state, data)
            step = compile_program(program, bound, backend=way[0], prefetch=way[1])
        # Inductor rounds the float32 tables of rotary positions otherwise
        tolerance = 1e-8 if way and way[0] == "inductor" else 1e-12
        for loss in losses:
            state, metrics = step(state, data)
            assert abs(metrics["loss"].item() - loss) < tolerance * loss, (mesh, way)
        rows = zip(tree.paths(whole), tree.leaves(state.params), tree.leaves(whole), strict=True)
        for path, a, b in rows:
            torch.testing.assert_close(
                a, b, rtol=1e-6, atol=100 * tolerance, msg=lambda m, at=(way, path): f"{at} {m}"
            )
