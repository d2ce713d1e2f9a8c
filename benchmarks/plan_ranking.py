"""Whether the planner ranks ways to run a model as they turn out on the processes of a CPU.

python benchmarks/plan_ranking.py [--rounds 7] [--only "WAY; WAY"] [--out FILE]

One small GPT takes the same steps in twenty ways, on 2 and on 4 processes over gloo. Before it,
`functron doctor` measures the machine with as many processes, and the planner estimates all ways on
what that wrote: no rate is fitted to a step. The programs of as many processes are taken in turn by
the same processes, round after round, so that what else happens on the machine happens to all.

Processes that share a processor are measured while they share it. What waits in a pipeline leaves
its share to others, which no machine's file can say: `shared` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import measure
import torch
import torch.distributed as dist

from functron import gpt
from functron.apps.planner import Estimate, Hardware, hardware
from functron.apps.planner.measurements import estimate_run
from functron.core.tables import table
from functron.spmd import Mesh
from functron.training import TrainConfig, configure, make_setup, prepare
from functron.training.config import with_precision

WAYS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "dp=2": {},
        "dp=2 in 4": {"microbatches": 4},
        "dp=2 in 2, full remat": {"microbatches": 2, "remat": "full"},
        "fsdp=2": {},
        "tp=2": {},
        "tp=2 sp": {"sequence_parallel": True},
        "cp=2": {},
        "pp=2 gpipe in 2": {"schedule": "gpipe", "microbatches": 2},
        "pp=2 1f1b in 8": {"microbatches": 8},
        "pp=2 interleaved in 4": {"schedule": "interleaved", "chunks": 2, "microbatches": 4},
        "dp=4": {},
        "dp=4 in 4": {"microbatches": 4},
        "fsdp=4": {},
        "tp=4 sp": {"sequence_parallel": True},
        "dp=2,tp=2": {},
        "dp=2,cp=2": {},
        "pp=2,dp=2 1f1b in 4": {"microbatches": 4},
        "pp=2,tp=2 1f1b in 2": {"microbatches": 2},
        "pp=4 1f1b in 8": {"microbatches": 8},
        "pp=4 zb-h1 in 4": {"schedule": "zb-h1", "microbatches": 4},
    }
)
"""By name, which begins with the mesh: what differs from a step that takes its batch at once."""

MODEL = gpt.GPTConfig(
    vocab_size=1024, num_layers=4, embed_dim=256, num_heads=4, mlp_dim=1024, max_seq=128,
    vocab_multiple=128,
)  # fmt: skip
BATCH, SEQ = 16, 128
AGREE = 1e-3
"""By how much, relatively, losses of first steps may differ: sums have another order."""
WITHIN, WANTED_TAU = 1.05, 0.8


def mesh_of(name: str) -> Mesh:
    """The mesh of a way."""
    return Mesh.parse(name.split()[0])


def config_of(name: str) -> TrainConfig:
    """The run of a way: random tokens, in float32, without a compiler."""
    base = configure(
        gpt=MODEL, seq=SEQ, global_batch=BATCH, format="mock", prefetch=0, mesh=name.split()[0],
    )  # fmt: skip
    return configure(with_precision(base, "float32"), **WAYS[name])


# --- measuring


def serve(names: Sequence[str]) -> None:
    """One process of several: a step of the next of these ways for each request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure.serve(lambda: stepping(names))
    dist.destroy_process_group()


def stepping(names: Sequence[str]) -> Callable[[], float]:
    """A step of one way after the other, and then again of the first; each returns its loss."""
    runs = [prepare(config_of(name), mesh_of(name).bind("cpu")) for name in names]
    states = [run.state for run in runs]
    batches = [run.on_device(run.host_batch(0)) for run in runs]
    turns = itertools.cycle(range(len(names)))

    def step() -> float:
        turn = next(turns)
        states[turn], metrics = runs[turn].step(states[turn], batches[turn])
        return float(metrics["loss"])

    return step


def measured(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each way, but for the first ones.

    Raises:
        RuntimeError: a way failed, or has other losses than the first one.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(mesh_of(name).size, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            ranks: measure.start(
                f"{ranks} processes", [__file__, "--serve", json.dumps(group)],
                ranks=ranks, threads=1, caches=Path(folder),
            )
            for ranks, group in groups.items()
        }  # fmt: skip
        for _ in range(1 + measure.WARM_UP + rounds):
            for ranks, program in programs.items():
                for _ in groups[ranks]:
                    program.step()
        for program in programs.values():
            program.close()
    found, losses = {}, {}
    for ranks, program in programs.items():
        if program.failure:
            raise RuntimeError(f"{program.name}: {program.failure}")
        for place, name in enumerate(groups[ranks]):
            answers = program.answers[place :: len(groups[ranks])]
            losses[name] = [answer["loss"] for answer in answers]
            found[name] = [answer["seconds"] for answer in answers[1 + measure.WARM_UP :]]
    wrong = measure.disagreement(losses, 2, AGREE)
    if wrong:
        raise RuntimeError("\n  ".join(["not the same model: losses differ", *wrong]))
    return {name: found[name] for name in names}


def machine_of(ranks: int, folder: Path) -> Hardware:
    """The measurement of `functron doctor` with so many processes, each of one thread."""
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "functron", "doctor", "--nproc", str(ranks)]
    given = ["--mesh", f"dp={ranks}", "--device", "cpu", "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *given], env=env, stdout=subprocess.PIPE, text=True)
    if not out.exists():
        raise RuntimeError(f"functron doctor ended with {done.returncode}\n{done.stdout}")
    return hardware(out.with_suffix(".toml"))


# --- predicting


def shared(estimate: Estimate, processes: int, processors: int) -> float:
    """The seconds of a step whose processes share processors.

    The estimate's rates were measured while all shared them. While ranks wait in a pipeline, the
    others are as much faster; so a step takes as long as the work of a rank at these rates, or as
    its critical path with a processor for each rank, whichever is longer.
    """
    whole, bubble = estimate.step_seconds, estimate.bubble_seconds
    if processes <= processors:
        return whole
    return max(whole - bubble, whole * processors / processes)


def predicted(name: str, machine: Hardware, processors: int) -> tuple[float, Estimate]:
    """The seconds that the planner expects of a way's step, and its estimate."""
    found = estimate_run(make_setup(config_of(name), mesh_of(name)), machine)
    return shared(found, mesh_of(name).size, processors), found


# --- comparing


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings of the same things: 1 for the same order, -1 for the reverse.

    The pairs in the same order less those in the other, over the geometric mean of the pairs that
    each ranking tells apart.
    """
    pairs = itertools.combinations(range(len(a)), 2)
    signs = [(_sign(a[i] - a[j]), _sign(b[i] - b[j])) for i, j in pairs]
    apart = sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)
    return sum(x * y for x, y in signs) / apart**0.5


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def compared(
    times: Mapping[str, Sequence[float]], foreseen: Mapping[str, tuple[float, Estimate]]
) -> tuple[str, bool]:
    """The table, the figures of the ranking, and whether they are as they should be."""
    seconds = {name: statistics.median(rows) for name, rows in times.items()}
    order = sorted(seconds, key=lambda name: seconds[name])
    places = sorted(seconds, key=lambda name: foreseen[name][0])
    rows = [["way", "measured ms", "quartiles", "expected ms", "ratio", "place", "expected",
             "loses time by"]]  # fmt: skip
    for place, name in enumerate(order, 1):
        low, _, high = statistics.quantiles(times[name], n=4)
        guess, estimate = foreseen[name]
        rows.append([
            name, f"{1e3 * seconds[name]:.0f}", f"{1e3 * low:.0f} to {1e3 * high:.0f}",
            f"{1e3 * guess:.0f}", f"{guess / seconds[name]:.2f}", str(place),
            str(1 + places.index(name)), estimate.limits,
        ])  # fmt: skip
    loss = seconds[places[0]] / seconds[order[0]]
    names = list(seconds)
    tau = kendall([seconds[n] for n in names], [foreseen[n][0] for n in names])
    lines = [table(rows), ""]
    lines.append(
        f"the planner's best is {places[0]}: {loss - 1:.1%} slower than the best, {order[0]} "
        f"(wanted: at most {WITHIN - 1:.0%})"
    )
    lines.append(f"Kendall's tau of {len(names)} ways: {tau:.2f} (wanted: at least {WANTED_TAU})")
    for size in sorted({mesh_of(name).size for name in names}):
        own = [name for name in names if mesh_of(name).size == size]
        if len(own) > 1:
            tau_of = kendall([seconds[n] for n in own], [foreseen[n][0] for n in own])
            lines.append(f"  of {len(own)} on {size} processes: {tau_of:.2f}")
    return "\n".join(lines), loss <= WITHIN and tau >= WANTED_TAU


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--rounds", type=int, default=7, help="in which every way takes a step")
    parser.add_argument("--only", default="", help="ways, separated by semicolons; default all")
    parser.add_argument("--out", type=Path, help="a file for all times, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(json.loads(args.serve))
    names = [name.strip() for name in args.only.split(";")] if args.only else [*WAYS]
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        parser.error(f"no such way: {', '.join(unknown)}; there are {'; '.join(WAYS)}")
    if args.rounds < 2:
        parser.error("quartiles want at least 2 rounds")
    processors = len(os.sched_getaffinity(0))
    sizes = sorted({mesh_of(name).size for name in names})
    with tempfile.TemporaryDirectory() as folder:
        machines = {size: machine_of(size, Path(folder)) for size in sizes}
    times = measured(names, args.rounds)
    foreseen = {name: predicted(name, machines[mesh_of(name).size], processors) for name in names}
    print(f"{processors} processors, one thread a process, medians of {args.rounds} rounds\n")
    for size, machine in machines.items():
        rate = machine.peak(torch.float32) * machine.matmul.efficiency
        link = machine.domain
        print(
            f"with {size} processes: {rate / 1e9:.0f} GFLOP/s a process, collectives "
            f"{link.bytes_per_second / 1e9:.2f} GB/s and {1e6 * link.latency_seconds:.0f} us a step"
        )
    text, good = compared(times, foreseen)
    print(f"\n{text}")
    if args.out:
        found = {n: {"measured": times[n], "expected": foreseen[n][0]} for n in names}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
