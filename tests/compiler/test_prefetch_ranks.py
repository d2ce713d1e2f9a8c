"""Overlapping iterations on processes over gloo, against the simulation in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.compiler import compile as compile_program
from functron.spmd.params import Normal
from tests.compiler.test_prefetch import batch, training
from tests.ranks import on_the_first

STEPS = 2
PROGRAM = "import sys; from tests.compiler.test_prefetch_ranks import main; main(*sys.argv[1:])"

EAGER, PLAIN, COMPILED = ("eager", True), ("eager", False), ("inductor", True)
CASES = {
    "inductor": (Mesh(fsdp=2), {"small": True}, [COMPILED]),
    # random bits take long to trace and to compile
    "compiled": (Mesh(fsdp=2), {"dropout": 0.0}, [COMPILED]),
    "plain": (Mesh(fsdp=2), {"dropout": 0.0}, [None, EAGER, PLAIN]),
    "remat": (Mesh(fsdp=2), {"remat": "full", "microbatches": 2, "dropout": 0.0}, [EAGER]),
    "twice": (Mesh(dp=2, fsdp=2), {"dropout": 0.0}, [EAGER]),  # sums of what was scattered
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
        ("inductor", "plain", "remat"),
        ("tp", "both", "twice"),
        # its program is in "plain", Inductor's loops that overlap in "inductor"
        pytest.param(("compiled",), marks=pytest.mark.full),
        # its axes are in "both", remat in "remat"
        pytest.param(("hybrid",), marks=pytest.mark.full),
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


def made(mesh, *, small: bool = False, **options) -> tuple:
    """A step of a decoder, its state and specs; or of layers of one matrix each."""
    if not small:
        return training(mesh, **options)
    kind = {"dtype": torch.float64}
    defs = {
        "embed": ft.ParamDef((32, 8), (None, None), Normal(0.3), **kind),
        "layers": ft.ParamDef((3, 8, 8), (None, "embed", None), Normal(0.3), **kind),
    }
    specs = ft.param_specs(defs, ft.Rules({"embed": "fsdp"}))

    def loss(params, data, key):
        def layer(x, w):
            return torch.tanh(x @ lax.all_gather(w, "fsdp", axis=0, tiled=True)), None

        x, _ = ft.scan(layer, params["embed"][data["tokens"]], params["layers"])
        error = x - params["embed"][data["targets"]]
        return lax.psum(error.square().sum(), ft.DATA_AXES)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optim.sgd(0.1), mesh, specs)
    return step, ft.init_state(random.key(1), defs, specs, optim.sgd(0.1), mesh), specs


def simulated(mesh: Mesh, options: dict) -> tuple:
    """The parameters after some steps, and their losses."""
    step, state, _ = made(mesh, **options)
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
    _, _, specs = made(bound, **options)
    whole = ft.shard(params, specs, bound)
    program = None
    for way in ways:
        step, state, _ = made(bound, **options)
        if way is not None:
            program = program or ft.trace(step, donate=0)(state, data)
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
