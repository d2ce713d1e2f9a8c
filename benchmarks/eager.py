"""The eager training step against the same model as a plain nn.Module, and against its simulation.

    python benchmarks/eager.py [--hidden 512 --layers 8 --seq 512 --vocab 8192 --batch 4]

Prints medians of interleaved step times and their ratios, and the peak resident memory that each
program adds, measured in a process of its own. The peer is a `torch.nn.Module` with `.backward()`
and `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from measure import resident
from models import decoder, make_batch
from peers import functron_step, plain_step

from functron import Mesh

PROGRAMS = ("plain", "functron", "simulated")


def make(program: str, args: argparse.Namespace) -> Callable[[], float]:
    config = decoder(
        args.vocab, args.layers, args.hidden, args.hidden // 64, args.seq, mlp=args.mlp
    )
    batch = make_batch(args.vocab, args.batch, args.seq)
    if program == "plain":
        return plain_step(config, batch, compiled=False)
    mesh = Mesh(dp=2, tp=4) if program == "simulated" else Mesh()
    return functron_step(config, batch, mesh)


def peak_bytes(program: str, argv: list[str]) -> int:
    """The growth of a fresh process's peak resident memory over three steps."""
    command = [sys.executable, __file__, "--peak-of", program, *argv]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("hidden", 512), ("layers", 8), ("seq", 512), ("vocab", 8192),
                          ("batch", 4), ("mlp", 0), ("rounds", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak-of", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        before = resident("VmHWM")
        step = make(args.peak_of, args)
        for _ in range(3):
            step()
        print(resident("VmHWM") - before)
        return
    times = measure({name: make(name, args) for name in PROGRAMS}, args.rounds)
    argv = [a for a in sys.argv[1:] if not a.startswith("--peak-of")]
    plain = times["plain"]
    peak = {name: peak_bytes(name, argv) for name in PROGRAMS}
    print(f"{'program':12}{'median s':>10}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}")
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, plain, strict=True))
        print(f"{name:12}{statistics.median(values):10.3f}{ratio:8.3f}"
              f"{peak[name] / 2**20:10.0f}{peak[name] / peak['plain']:8.3f}")  # fmt: skip
    dense = times["functron"]
    ratio = statistics.median(a / b for a, b in zip(times["simulated"], dense, strict=True))
    print(f"simulating dp=2,tp=4 costs {ratio:.2f}x the dense step")


if __name__ == "__main__":
    main()
