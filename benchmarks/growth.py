"""How costs grow: what should stay as it is while a model, a mesh or a corpus grows.

    python benchmarks/growth.py [--only CURVE,CURVE] [--out FOLDER]

Each curve doubles one size and times one thing, in processor seconds of this process unless it
waits for a disk; the table shows the times, and how many times as long the largest takes as the
smallest. With `--out` there is a chart of each curve (SVG).

* **trace by depth**, **trace by ranks**: making the program of a training step. Layers are scanned
  and the program is one rank's, so that both stay flat.
* **compile by depth**: compiling such a step with an empty cache. Flat.
* **step by simulated ranks**: an eager step on one batch, divided among more and more ranks that
  one process simulates. The products are the same in all, and collectives are added.
* **save by bytes**: a checkpoint, to the disk and synced, in seconds. Linear.
* **open by corpus**: a dataset of documents on disk, from opening its index to the first batch.
  Flat.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from data import write_index
from peers.functron_steps import training
from peers.models import decoder, make_batch

import functron as ft
from functron import Mesh, checkpoint
from functron.core.chart import line_chart
from functron.core.tables import table
from functron.data import IndexedFile, TokenWindows

SEQ, VOCAB = 64, 512
Runs = Iterator[tuple[int, Callable[[], object]]]
"""Sizes, with what to time at each; or what gives the seconds that it took, as a float."""


@dataclass(frozen=True)
class Curve:
    """One thing that is timed for sizes that grow.

    Attributes:
        runs: sizes, with what to time at each; given a folder that is empty at the start.
        size: what grows, with its unit.
        should: how the time should grow.
        clock: of seconds.
        rounds: of which the median counts.
    """

    runs: Callable[[Path], Runs]
    size: str
    should: str
    clock: Callable[[], float] = time.process_time
    rounds: int = 5


def _step(mesh: Mesh, layers: int, batch: int) -> tuple[Callable, tuple]:
    """A training step of a decoder of 64 features, with its state and batch."""
    config = decoder(hidden=64, layers=layers, heads=8, mlp=128, vocab=VOCAB, seq=SEQ)
    train, state = training(config, mesh)
    return train, (state, make_batch(VOCAB, batch, SEQ))


def traces_by_depth(folder: Path) -> Runs:
    """Programs of steps of more and more layers on dp=2, tp=2."""
    for layers in (2, 4, 8, 16, 32, 64):
        train, arguments = _step(Mesh(dp=2, tp=2), layers, 2)
        yield layers, partial(ft.trace(train, donate=0), *arguments)


def traces_by_ranks(folder: Path) -> Runs:
    """Programs of steps on more and more ranks, of two samples each."""
    for dp in (1, 4, 16, 64, 256):
        train, arguments = _step(Mesh(dp=dp, tp=4), 2, 2 * dp)
        yield 4 * dp, partial(ft.trace(train, donate=0), *arguments)


def compilations_by_depth(folder: Path) -> Runs:
    """First calls of compiled steps, each in a process and with caches of its own."""
    for layers in (2, 4, 8, 16, 32):
        yield layers, partial(_first_call, layers, folder / str(layers))


def _first_call(layers: int, cache: Path) -> float:
    """How long the first call of a compiled step takes in a new process."""
    command = [sys.executable, __file__, "--compile", str(layers)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def _compile(layers: int) -> None:
    train, arguments = _step(Mesh(), layers, 2)
    begun = time.perf_counter()
    ft.jit(train, donate=0)(*arguments)
    print(time.perf_counter() - begun)


def steps_by_simulated_ranks(folder: Path) -> Runs:
    """Steps on 16 samples that 1 to 16 ranks divide."""
    for dp in (1, 2, 4, 8, 16):
        train, (state, batch) = _step(Mesh(dp=dp), 2, 16)
        held = [state]

        def step(train=train, held=held, batch=batch) -> None:
            held[0], metrics = train(held[0], batch)
            metrics["loss"].item()

        step()
        yield dp, step


def saves_by_bytes(folder: Path) -> Runs:
    """Checkpoints of one to sixteen tensors of 32 MiB, each in a fresh folder."""
    for count in (1, 2, 4, 8, 16):
        state = {f"w{i}": torch.randn(8 << 20) for i in range(count)}
        names = (folder / f"{count}.{i}" for i in range(100))
        yield 32 * count, lambda state=state, names=names: checkpoint.save(next(names), state)


def openings_by_corpus(folder: Path) -> Runs:
    """Datasets of ten thousand to a hundred million documents of a thousand tokens."""
    for documents in (10**4, 10**5, 10**6, 10**7, 10**8):
        prefix = folder / "tokens"
        write_index(prefix, documents, 1000)
        yield documents, lambda prefix=prefix: TokenWindows(IndexedFile(prefix), SEQ).batch(0, 16)


CURVES: Mapping[str, Curve] = {
    "trace by depth": Curve(traces_by_depth, "layers", "flat"),
    "trace by ranks": Curve(traces_by_ranks, "ranks", "flat"),
    "compile by depth": Curve(compilations_by_depth, "layers", "flat", time.perf_counter, 1),
    "step by simulated ranks": Curve(
        steps_by_simulated_ranks, "ranks that divide one batch", "flat, but for collectives"
    ),
    "save by bytes": Curve(saves_by_bytes, "MiB", "linear", time.perf_counter),
    "open by corpus": Curve(openings_by_corpus, "documents", "flat", time.perf_counter),
}


def measured(curve: Curve) -> Iterator[tuple[int, float]]:
    """Sizes and median seconds."""
    with tempfile.TemporaryDirectory() as folder:
        for size, run in curve.runs(Path(folder)):
            times = []
            for _ in range(curve.rounds + (curve.rounds > 1)):  # the first to warm up
                begun = curve.clock()
                took = run()
                times.append(took if isinstance(took, float) else curve.clock() - begun)
            yield size, statistics.median(times[-curve.rounds :])


def main() -> int:
    """Print the table of the curves asked for, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CURVES), help="curves, separated by commas")
    parser.add_argument("--out", type=Path, help="a folder for charts")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        _compile(args.compile)
        return 0
    names = args.only.split(",")
    if unknown := sorted({*names} - {*CURVES}):
        parser.error(f"--only: got {', '.join(unknown)}; wanted of {', '.join(CURVES)}")
    rows = [["", "seconds", "sizes", "times as large", "as long", "wanted"]]
    for name in names:
        curve = CURVES[name]
        points = list(measured(curve))
        (first, least), (last, most) = points[0], points[-1]
        seconds = " ".join(f"{value:.3g}" for _, value in points)
        sizes = f"{first:,} to {last:,} {curve.size}"
        rows.append([name, seconds, sizes, f"{last / first:,.0f}", f"{most / least:.2f}",
                     curve.should])  # fmt: skip
        print(f"{name}: {seconds}", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            x, y = zip(*points, strict=True)
            chart = line_chart(x, y, title=name, x_label=curve.size, y_label="seconds")
            (args.out / f"{name.replace(' ', '-')}.svg").write_text(chart)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
