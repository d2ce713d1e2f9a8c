"""The cost of calling ranks from a notebook: a step on `Mesh.start`, and the same under torchrun.

Both take the same steps of a small decoder on two processes, eager and compiled, in turns. Losses
must be the same to the bit. Prints medians of a step's seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import functron as ft
from functron import gpt, optim

MESH = ft.Mesh(dp=2)
CONFIG = replace(
    gpt.PRESETS["tiny"], num_layers=2, embed_dim=128, num_heads=4, mlp_dim=256, max_seq=64
)


def batch_at(step: int) -> dict[str, torch.Tensor]:
    """The tokens of a step."""
    text = ft.random.randint(ft.random.key(step), (4, 65), 0, CONFIG.vocab_size)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "rows": torch.arange(4)}


def make(mesh: Any, *, compiled: bool) -> tuple:
    """The step and the first state."""
    torch.set_num_threads(1)
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))

    def loss(params: Any, batch: Any, key: Any) -> torch.Tensor:
        return gpt.loss(CONFIG, params, batch)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    state = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)
    return ft.jit(step, donate=0) if compiled else step, state


def measure(mesh: Any, batch: Any, steps: int, *, compiled: bool) -> tuple[list[float], list[str]]:
    """Seconds of each step after the first three, and the losses as they are, in hexadecimal."""
    step, state = make(mesh, compiled=compiled)
    seconds, losses = [], []
    for index in range(steps + 3):
        given = batch(index)
        begin = time.perf_counter()
        state, metrics = step(state, given)
        losses.append(float(metrics["loss"]).hex())
        seconds.append(time.perf_counter() - begin)
    return seconds[3:], losses


def under_torchrun(steps: int, *, compiled: bool) -> tuple[list[float], list[str]]:
    """`measure` in two processes that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    rest = [__file__, "--rank", "--steps", str(steps), *["--compiled"] * compiled]
    done = subprocess.run([*command, *rest], capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def be_rank(steps: int, *, compiled: bool) -> None:
    """Be one of the processes of `under_torchrun`."""
    dist.init_process_group("gloo")
    mesh = MESH.bind()

    def batch(index: int) -> Any:
        return ft.shard(batch_at(index), ft.P(ft.DATA_AXES), mesh)

    found = measure(mesh, batch, steps, compiled=compiled)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.steps, compiled=options.compiled)
        return
    print(f"{'step':10}{'torchrun':>14}{'Mesh.start':>14}{'more':>12}{'ratio':>8}")
    with MESH.start("cpu") as mesh:
        for compiled in (False, True):
            there, here = [], []
            for _ in range(options.rounds):
                seconds, want = under_torchrun(options.steps, compiled=compiled)
                there.append(statistics.median(seconds))
                seconds, losses = measure(mesh, batch_at, options.steps, compiled=compiled)
                here.append(statistics.median(seconds))
                if losses != want:
                    sys.exit(f"losses differ: {losses[:3]} and {want[:3]}")
            a, b = statistics.median(there) * 1e3, statistics.median(here) * 1e3
            name = "compiled" if compiled else "eager"
            print(f"{name:10}{a:11.3f} ms{b:11.3f} ms{b - a:9.3f} ms{b / a:8.2f}", flush=True)
    print("losses are the same to the bit")


if __name__ == "__main__":
    main()
