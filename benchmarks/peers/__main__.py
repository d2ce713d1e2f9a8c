"""Training steps on CPUs, functron's beside those of its peers: one command, one table.

    python benchmarks/peers [--shape small|base|large] [--rounds 5] [--only ROW,ROW]

All programs of a row start from the same weights, train on the same batch with the same AdamW, and
must have the same losses to seven digits, in bfloat16 nearly. They step in turn, each in processes
of its own: one with two threads, or two with a thread each over gloo. The row of checkpoints saves
a training state.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measure
import torch
import torch.distributed as dist
from measure import Program
from peers.models import Step, decoder, make_batch

from functron import gpt

SHAPES = {
    "small": {"vocab": 1024, "layers": 2, "hidden": 128, "heads": 2, "seq": 64, "mlp": 352},
    "base": {"vocab": 4096, "layers": 4, "hidden": 256, "heads": 4, "seq": 256, "mlp": 704},
    "large": {"vocab": 8192, "layers": 8, "hidden": 512, "heads": 8, "seq": 512, "mlp": 1408},
}
BATCH = 4
AGREE_STEPS = 3
STATE_GB = 1.0
"""Of the state whose checkpoints are saved: 14 bytes a parameter (see `checkpoint.py`)."""


@dataclass(frozen=True)
class Row:
    """Programs that take steps in turn.

    Attributes:
        ours: of functron.
        peers: what it is compared with; the fastest counts.
        wanted: how many times as fast as that it should be.
        ranks: the processes of each.
        usual: it is measured where no row is named.
        within: how much the first losses may differ, relative.
    """

    ours: str
    peers: tuple[str, ...]
    wanted: float = 1.0
    ranks: int = 2
    usual: bool = True
    within: float = 5e-7


ROWS = {
    "eager": Row("functron eager", ("torch eager", "transformers eager"), ranks=1),
    "compiled": Row(
        "functron", ("torch.compile", "transformers compiled", "JAX", "JAX scan"), 1.05, ranks=1
    ),
    "bf16": Row(
        "functron bf16", ("torch.compile bf16", "transformers compiled bf16"), ranks=1, within=2e-3
    ),
    "dp": Row("functron dp", ("DDP",), 1.15),
    "fsdp": Row("functron fsdp", ("FSDP2",), 1.3),
    "tp": Row("functron tp", ("Megatron-core tp", "DTensor tp"), 1.3),
    "sp": Row("functron tp sp", ("Megatron-core tp", "Megatron-core tp sp", "DTensor tp sp"), 1.2),
    "pp": Row("functron pp", ("torch pp", "torch pp eager"), 1.15),
    "simulated": Row("functron simulated", ("functron eager",), 0.7, ranks=1),
    "checkpoint": Row("functron checkpoint", ("torch checkpoint",)),
    "pp-whole": Row("functron pp whole", ("torch pp",), 1.15, usual=False),
    "pp-zb-h1": Row("functron pp zb-h1", ("torch pp", "torch pp eager"), 1.15, usual=False),
    "pp-balanced": Row("functron pp balanced", ("torch pp balanced",), 1.15, usual=False),
    "dp-eager": Row("functron dp eager", ("DDP eager",), usual=False),
    "fsdp-keep": Row("functron fsdp keep", ("FSDP2 keep",), usual=False),
    "fsdp-eager": Row("functron fsdp eager", ("FSDP2 eager",), usual=False),
    "tp-eager": Row("functron tp eager", ("DTensor tp eager",), usual=False),
    "unrolled": Row("functron", ("functron unrolled",), ranks=1, usual=False),
}
for _name in ("dp", "fsdp", "tp", "sp"):
    _sockets = f"{ROWS[_name].ours} sockets"
    ROWS[f"{_name}-sockets"] = replace(ROWS[_name], ours=_sockets, wanted=1.0, usual=False)


def maker(name: str) -> Callable[[gpt.GPTConfig, dict], Step]:
    """``(config, batch) -> step`` of the program of this name; imports what it needs."""
    library, *words = name.split()
    compiled = "eager" not in words
    if library == "JAX":
        try:
            steps = importlib.import_module("peers.jax_steps")
        except ImportError as error:
            raise SystemExit(f"skip: {error}; install functron[test]") from None
        return partial(steps.jax_step, scanned="scan" in words)
    if library == "Megatron-core":
        steps = importlib.import_module("peers.megatron_steps")
        return partial(steps.tensor_parallel_step, sequence="sp" in words)
    if library == "functron":
        return partial(importlib.import_module("peers.functron_steps").named_step, words)
    steps = importlib.import_module("peers.torch_steps")
    if "pp" in words:
        return partial(
            steps.pipelined_step, name="1f1b", microbatches=BATCH,
            compiled=compiled, balanced="balanced" in words,
        )  # fmt: skip
    low = "bf16" in words
    made = {
        "torch": partial(steps.plain_step, low=low),
        "torch.compile": partial(steps.plain_step, low=low),
        "transformers": partial(steps.hugging_face_step, low=low),
        "DDP": partial(steps.ddp_step),
        "FSDP2": partial(steps.fsdp_step, reshard="keep" not in words),
        "DTensor": partial(steps.dtensor_step, sequence="sp" in words),
    }[library]
    return partial(made, compiled=compiled)


def config(shape: str) -> gpt.GPTConfig:
    """The Llama of this shape, with half as many heads of keys as of queries, but at least two."""
    sizes = dict(SHAPES[shape])
    return decoder(**sizes, num_kv_heads=max(2, sizes["heads"] // 2))


def serve(args: argparse.Namespace) -> None:
    """Be one program, or a rank of it."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if args.serve.endswith("checkpoint"):
        serve_checkpoint(args.serve, Path(args.folder))
    else:
        c = config(args.shape)
        measure.serve(partial(maker(args.serve), c, make_batch(c.vocab_size, BATCH, c.max_seq)))
    if dist.is_initialized():
        dist.destroy_process_group()


def serve_checkpoint(name: str, folder: Path) -> None:
    """Save a state into a fresh folder, again and again."""
    import checkpoint

    from functron import Mesh, tree

    state, placement = checkpoint.make_state(STATE_GB, Mesh(fsdp=checkpoint.RANKS).bind())
    kind = checkpoint.Functron if name.startswith("functron") else checkpoint.Torch
    program, path = kind(folder, state, placement), folder / name

    def step() -> float:
        program.save(path)
        dist.barrier()
        return float(tree.nbytes(state))

    def between() -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()

    measure.serve(lambda: step, between)


def measured(row: Row, args: argparse.Namespace) -> list[Program]:
    """The row's programs, started, stepped in turn and ended."""
    threads = max(1, args.threads // row.ranks)
    with tempfile.TemporaryDirectory() as folder:
        own = [__file__, "--shape", args.shape, "--folder", folder]
        start = partial(
            measure.start, ranks=row.ranks, threads=threads, caches=Path(args.cache or folder)
        )
        programs = [start(name, [*own, "--serve", name]) for name in (row.ours, *row.peers)]
        measure.run(programs, args.rounds)
    return programs


def table(title: str, row: Row, programs: list[Program], tokens: int) -> str:
    """Print what was measured of the row; its line of the last table, "" where it has none."""
    ours, *peers = programs
    done = [p for p in peers if not p.failure]
    best = min(done, key=lambda p: p.seconds) if done and not ours.failure else None
    threads = "2 threads" if row.ranks == 1 else "1 thread each"
    print(f"\n{title}: {row.ranks} process{'es' * (row.ranks > 1)}, {threads}")
    heads = ("step ms", "quartiles", "x best peer", "compile s", "peak MiB", "steady MiB")
    print(f"{'program':22}" + "".join(f"{head:>13}" for head in heads))
    for p in programs:
        if p.failure:
            print(f"{p.name:22}  {p.failure}")
            continue
        low, high = spread(p.times)
        ratio = f"{measure.ratio(best, p):13.3f}" if best else " " * 13
        print(
            f"{p.name:22}{1e3 * p.seconds:13.1f}{f'{1e3 * low:.0f} to {1e3 * high:.0f}':>13}{ratio}"
            f"{p.compile_seconds:13.1f}{p.peak / 2**20:13.0f}{p.steady / 2**20:13.0f}"
        )
    losses = {p.name: p.losses for p in programs if not p.failure}
    if wrong := measure.disagreement(losses, AGREE_STEPS, row.within):
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
        return ""
    sys.stdout.flush()
    if best is None:
        return ""
    ratios = [b / a for a, b in zip(ours.times, best.times, strict=True)]
    rates = "".join(f"{tokens / p.seconds:10,.0f}" for p in (ours, best))
    low, high = spread(ratios)
    return (
        f"{title:12}{rates}  {best.name:22}{statistics.median(ratios):6.2f}"
        f"{f'{low:.2f} to {high:.2f}':>15}{row.wanted:8.2f}"
    )


def spread(values: list[float]) -> tuple[float, float]:
    """The quartiles below and above the median."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def main() -> int:
    """Measure rows, or be one of their programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--only", default="", help=f"rows, comma-separated, of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="processors to use in all")
    parser.add_argument("--cache", help="a folder in which compiled code is kept for later runs")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return 0
    measure.pin(args.threads)
    chosen = args.only.split(",") if args.only else [n for n, row in ROWS.items() if row.usual]
    tokens = BATCH * config(args.shape).max_seq
    lines = [
        table(name, ROWS[name], measured(ROWS[name], args), tokens if name != "checkpoint" else 1)
        for name in chosen
    ]
    print(f"\n{'tokens/s':12}{'functron':>10}{'best peer':>10}{'':24}{'ratio':>6}{'quartiles':>15}"
          f"{'wanted':>8}")  # fmt: skip
    print(*filter(None, lines), sep="\n")
    return 0 if all(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
