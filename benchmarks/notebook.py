"""The cost of calling ranks from a notebook: a step on `Mesh.start`, and the same under torchrun.

Both take the same steps of a small decoder on two processes, eager and compiled, in turns. Losses
must be the same to the bit. A loop reads the loss of every step, or of every tenth. Prints medians
of a step's seconds: of each step, its loss included and its batch not; and of ten steps between two
readings, all that a loop does included, as long as these took from begin to end. Also the seconds
of CPU time that a step took, of all processes together, which other programs do not change much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

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


class Measured(NamedTuple):
    """Steps of a loop.

    Attributes:
        seconds: of each step, or of each of ten together.
        losses: that were read, as they are, in hexadecimal.
        cpu_seconds: of all processes, for each step.
    """

    seconds: list[float]
    losses: list[str]
    cpu_seconds: float


def measure(
    mesh: Any, batch: Any, steps: int, every: int, clock: Callable[[], float], *, compiled: bool
) -> Measured:
    """Take steps, of which the first are not counted, and read the loss of one in `every`."""
    step, state = make(mesh, compiled=compiled)
    seconds, losses, skipped = [], [], 2 * max(every, 3)
    begin = cpu = 0.0
    for index in range(steps + skipped):
        if index == skipped:
            cpu = clock()
        given = batch(index)
        if every == 1:
            begin = time.perf_counter()
        state, metrics = step(state, given)
        if (index + 1) % every == 0:
            losses.append(float(metrics["loss"]).hex())
            now = time.perf_counter()
            seconds.append((now - begin) / every)
            begin = now
    return Measured(seconds[skipped // every :], losses, (clock() - cpu) / steps)


def under_torchrun(steps: int, every: int, *, compiled: bool) -> Measured:
    """`measure` in two processes that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["--rank", "--steps", str(steps), "--every", str(every), *["--compiled"] * compiled]
    done = subprocess.run([*command, __file__, *given], capture_output=True, text=True, check=True)
    return Measured(*json.loads(done.stdout.splitlines()[-1]))


def be_rank(steps: int, every: int, *, compiled: bool) -> None:
    """Be one of the processes of `under_torchrun`."""
    dist.init_process_group("gloo")
    mesh = MESH.bind()

    def batch(index: int) -> Any:
        return ft.shard(batch_at(index), ft.P(ft.DATA_AXES), mesh)

    found = measure(mesh, batch, steps, every, time.process_time, compiled=compiled)
    cpu = torch.tensor(found.cpu_seconds, dtype=torch.float64)
    dist.all_reduce(cpu)
    if dist.get_rank() == 0:
        print(json.dumps(found._replace(cpu_seconds=cpu.item())))
    dist.destroy_process_group()


def on_ranks(mesh: Any, steps: int, every: int, *, compiled: bool) -> Measured:
    """`measure` on a started mesh."""

    def read_clock() -> torch.Tensor:
        return torch.full((1,), time.process_time(), dtype=torch.float64)

    def clock() -> float:
        return time.process_time() + sum(mesh.run(read_clock, specs=ft.P("dp")).tolist())

    return measure(mesh, batch_at, steps, every, clock, compiled=compiled)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.steps, options.every, compiled=options.compiled)
        return
    columns = ("torchrun", "started", "more", "CPU time", "started", "more")
    print(f"{'step':10}{'loss read':>10}{''.join(f'{each:>12}' for each in columns)}{'ratio':>8}")
    with MESH.start("cpu") as mesh:
        for compiled in (False, True):
            for every in (1, 10):
                show(mesh, options.steps, options.rounds, every, compiled=compiled)
    print("losses are the same to the bit")


def show(mesh: Any, steps: int, rounds: int, every: int, *, compiled: bool) -> None:
    """Print a row of the table, of so many rounds in turns."""
    pairs = []
    for _ in range(rounds):
        there = under_torchrun(steps, every, compiled=compiled)
        here = on_ranks(mesh, steps, every, compiled=compiled)
        if here.losses != there.losses:
            sys.exit(f"losses differ: {here.losses[:3]} and {there.losses[:3]}")
        pairs.append((there, here))
    name, read = "compiled" if compiled else "eager", "each" if every == 1 else f"every {every}"
    rows = [[statistics.median(each.seconds) for each in pair] for pair in pairs]
    cpu = [[each.cpu_seconds for each in pair] for pair in pairs]
    print(f"{name:10}{read:>10}", end="")
    for found in (rows, cpu):
        there, here = (statistics.median(pair[side] for pair in found) for side in (0, 1))
        more = statistics.median(pair[1] - pair[0] for pair in found)
        print("".join(f"{1e3 * each:9.3f} ms" for each in (there, here, more)), end="")
    print(f"{statistics.median(here / there for there, here in rows):8.2f}", flush=True)


if __name__ == "__main__":
    main()
