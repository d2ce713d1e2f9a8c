"""The peak memory of eager runs as torch's profiler sees it, against `memory`'s prediction.

Used by test_memory.py, which also runs this under torchrun, with two processes over gloo and the names
of the cases of `GLOO`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, optim, random, tree
from functron.program.memory import ProgramMemory, memory
from functron.program.trace import trace


def measured_peak(fn: Callable, *args) -> int:
    """The most bytes that the tensors of this process hold while `fn` runs, `args` included."""
    storages = {leaf.untyped_storage()._cdata: leaf for leaf in tree.leaves(args)}
    given = sum(leaf.untyped_storage().nbytes() for leaf in storages.values())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        fn(*args)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak + given


def decoder_step(
    mesh: Mesh | BoundMesh,
    *,
    samples: int = 4,
    seq: int = 64,
    remat: str = "none",
    num_microbatches: int = 1,
    stream: P = gpt.STREAM,
    **changes,
):
    """A training step of a small decoder with its state and batch."""
    sizes = {"vocab_size": 384, "num_layers": 4, "embed_dim": 64, "num_heads": 4, "mlp_dim": 256}
    config = gpt.GPTConfig(**{**sizes, "max_seq": seq, **changes})
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.adamw(1e-2))

    def loss(params, batch, key):
        return gpt.loss(config, params, batch, ft.ModelOptions(stream=stream, remat=remat), key=key)

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), num_microbatches),
        optimizer,
        mesh,
        specs,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 384, (samples, seq + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    batch["rows"] = torch.arange(samples)
    batch = tree.map(torch.clone, ft.shard(batch, P(ft.DATA_AXES), mesh))
    return step, ft.init_state(random.key(0), defs, specs, optimizer, mesh), batch


def predicted_and_measured(
    step: Callable, state, batch, runs: int = 1
) -> tuple[ProgramMemory, int]:
    """The peak that `memory` predicts of a step that donates its state, and the smallest measured one.

    Several runs are for process groups, whose threads let go of what was sent a moment later.
    """
    found = memory(trace(step, donate=0)(state, batch))
    states = [tree.map(torch.clone, state) for _ in range(runs)]
    step(state, batch)  # what torch allocates once
    return found, min(measured_peak(step, each, batch) for each in states)


GLOO = {
    "dp": (Mesh(dp=2), {}),
    "tp": (Mesh(tp=2), {}),
    "tp sequence": (Mesh(tp=2), {"stream": gpt.SEQUENCE_PARALLEL_STREAM}),
    "dp microbatches": (Mesh(dp=2), {"num_microbatches": 2}),
    "tp tied": (Mesh(tp=2), {"tied": True, "norm": "layer", "bias": True, "gated": False}),
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        mesh, settings = GLOO[name]
        found, measured = predicted_and_measured(
            *decoder_step(mesh.bind(), samples=8, **settings), runs=10
        )
        if dist.get_rank() == 0:
            print(f"{name}: {found.peak_bytes} {measured}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)
