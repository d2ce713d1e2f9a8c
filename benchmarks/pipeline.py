"""Pipelines on processes against torch.distributed.pipelining, and against what schedules foretell.

python benchmarks/pipeline.py [--ranks 2,4 --microbatches 8 --hidden 128 --layers 8 --batch 16]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from measure import AGREE_STEPS, AGREE_WITHIN, Program, pin
from peers import functron_steps, torch_steps
from peers.models import decoder, make_batch
from torch import Tensor

from functron.pipeline import Action, Schedule, Timeline, make

SIZES = {"hidden": 128, "layers": 8, "seq": 128, "vocab": 256, "batch": 16, "microbatches": 8}

GROUPS: dict[str, tuple[str, ...]] = {
    "one stage per process": (
        "functron 1f1b", "functron gpipe", "functron zb-h1", "functron zb-h2",
        "functron eager 1f1b", "torch 1f1b",
    ),
    "two stages per process": (
        "functron 1f1b", "functron interleaved", "functron zbv", "functron dualpipev",
        "torch interleaved", "torch eager interleaved-zb", "torch eager zbv",
    ),
}  # fmt: skip
"""Programs that take steps in turn; 1F1B, which has one stage, is what the second ones replace."""

Rows = list[tuple[int, Action, float, float]]


@dataclass
class Record:
    """The timings of one rank of functron, by itself.

    Attributes:
        steps: what it did when, by step.
        live: of each stage, the bytes that one microbatch holds after its F and after its I.
        bound: the most bytes that the table lets it hold for backward at once.
        held: the most that it held for backward after any action of a step.
        tensors: by how much the memory of all its tensors grew at most above that before the step.
    """

    steps: list[Rows] = field(default_factory=list)
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    bound: int = 0
    held: int = 0
    tensors: int = 0


class Watch:
    """Told of every action of a pipeline on this rank; what it saw is in `record`."""

    def __init__(self, pipeline, parameters: list[Tensor]):
        self.pipeline, self.record = pipeline, Record()
        self.parameters = sum(p.untyped_storage().nbytes() for p in parameters)
        self.rows: Rows = []
        pipeline.observe = lambda *row: self.rows.append(row)

    def stepping(self, step: Callable[[], float]) -> Callable[[], float]:
        """`step`, keeping what it did when."""

        def watched() -> float:
            self.rows = []
            loss = step()
            self.record.steps.append(self.rows)
            return loss

        return watched

    def weigh(self, step: Callable[[], float], schedule: Schedule, rank: int) -> None:
        """Take one more step, and count after every action what is held."""
        work = self.pipeline.compiled
        stages = {signature[0]: stage for signature, stage in work.stages.items()}
        live = {number: (holds(stage, 0), holds(stage, 1)) for number, stage in stages.items()}
        holding: list[dict] = []
        forward = work.forward

        def counted(call):
            y, held = yield from forward(call)
            holding.append(held.values)
            return y, held

        record, before = self.record, 0

        def after(*row) -> None:
            kept = [value for values in holding for value in values.values()]
            kept = [x for value in kept for x in (value if isinstance(value, list) else [value])]
            record.held = max(record.held, memory(kept, without=own))
            record.tensors = max(record.tensors, memory(all_tensors()) - before)

        # parameters, moments and the batch; values kept for backward may be views of them
        own = {tensor.untyped_storage().data_ptr() for tensor in all_tensors()}
        work.forward, self.pipeline.observe = counted, after
        before = memory(all_tensors()) + self.parameters  # sums of gradients are none of it
        step()
        record.live, record.bound = live, bound(schedule, rank, live)


def holds(stage, index: int) -> int:
    """The bytes that a microbatch holds after a piece of a stage, by its programs: for backward."""
    last = len(stage.pieces) - 1
    if index >= last:
        return 0
    later = {var for piece in stage.pieces[index + 1 :] for var in piece.block.inputs}
    made = {var for piece in stage.pieces[: index + 1] for var in piece.keeps}
    # arguments: parameters, the stage's input, the batch, what is shared, sums, cotangents
    made |= {*stage.arguments[1], *(stage.arguments[5] if index else ())}
    return sum(var.nbytes for var in later & made)


def bound(schedule: Schedule, rank: int, live: dict[int, tuple[int, int]]) -> int:
    """The most bytes that a rank's column lets it hold at once."""
    now = most = 0
    held: dict[tuple, int] = {}
    for _, action in schedule.column(rank):
        stage = schedule.stage_of(rank, action.chunk)[1]
        place = (action.chunk, action.microbatch)
        after = {"F": live[stage][0], "I": live[stage][1]}.get(action.kind, 0)
        now += after - held.get(place, 0)
        held[place], most = after, max(most, now)
    return most


def all_tensors() -> list[Tensor]:
    return [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]


def memory(tensors: Iterable[Tensor], without: Iterable[int] = ()) -> int:
    """The bytes of their storages, each counted once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages[where] for where in storages.keys() - set(without))


def serve(args: argparse.Namespace) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = args.cache
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    c = decoder(args.vocab, args.layers, args.hidden, args.hidden // 64, args.seq)
    batch = make_batch(args.vocab, args.batch, args.seq)
    library, *words = args.serve.split()
    compiled, name = "eager" not in words, words[-1]
    schedule = made(args.serve, ranks, args.microbatches)
    watch, plain = None, None

    def build() -> Callable[[], float]:
        nonlocal watch, plain
        if library == "torch":
            return torch_steps.pipelined_step(c, batch, name, args.microbatches, compiled=compiled)
        settings = {} if compiled else None
        plain, pipeline, parameters = functron_steps.pipelined_step(c, batch, schedule, settings)
        watch = Watch(pipeline, parameters)
        return watch.stepping(plain)

    measure.serve(build)
    if watch is not None and plain is not None:
        if compiled:
            watch.weigh(plain, schedule, rank)
        Path(args.records, f"{args.serve} {rank}").write_bytes(pickle.dumps(watch.record))
    dist.destroy_process_group()


def made(program: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule of one of functron's programs."""
    name = program.split()[-1]
    return make(name if program.startswith("functron") else "1f1b", ranks, microbatches)


def measured(names: list[str], ranks: int, args: argparse.Namespace) -> tuple[list, dict]:
    """These programs, stepped in turn and ended, and what the ranks of functron's saw."""
    shared = [f"--{name}={getattr(args, name)}" for name in (*SIZES, "cache")]
    with tempfile.TemporaryDirectory() as folder:
        programs = [
            measure.start(
                name, [__file__, *shared, "--records", folder, "--serve", name],
                ranks=ranks, threads=1, caches=Path(folder),
            )
            for name in names
        ]  # fmt: skip
        measure.run(programs, args.rounds)
        records = {
            name: [pickle.loads(Path(folder, f"{name} {r}").read_bytes()) for r in range(ranks)]
            for name in names
            if Path(folder, f"{name} 0").exists()
        }
    return programs, records


def speed(title: str, programs: list[Program], args: argparse.Namespace) -> None:
    """The table of a group; its best peer is the fastest of torch's."""
    peers = [p for p in programs if not p.failure and p.name.startswith("torch")]
    best = min(peers, key=lambda p: p.seconds) if peers else None
    heads = ("tokens/s", "x best peer", "step ms", "compile s", "peak MiB", "steady MiB")
    print(f"\n{title:26}" + "".join(f"{head:>13}" for head in heads))
    for p in programs:
        if p.failure:
            print(f"{p.name:26}  {p.failure}")
            continue
        relative = f"{measure.ratio(best, p):13.3f}" if best else f"{'-':>13}"
        print(
            f"{p.name:26}{args.batch * args.seq / p.seconds:13.0f}{relative}"
            f"{1e3 * p.seconds:13.1f}{p.compile_seconds:13.1f}"
            f"{p.peak / 2**20:13.0f}{p.steady / 2**20:13.0f}"
        )


@dataclass
class Foretold:
    """Measured timelines of a program's timed steps, and what `simulate` makes of their costs."""

    measured: list[Timeline]
    simulated: list[Timeline]

    @property
    def ratio(self) -> float:
        pairs = zip(self.measured, self.simulated, strict=True)
        return statistics.median(m.total / s.total for m, s in pairs)


def foretold(schedule: Schedule, records: list[Record]) -> Foretold:
    """Of every timed step the timeline, and the simulated one with the costs measured in it."""
    timelines = [
        Timeline.of(schedule.name, [row for rows in ranks for row in rows])
        for ranks in zip(*(record.steps[1 + measure.WARM_UP :] for record in records), strict=True)
    ]
    costs = [replace(t.costs(schedule), transfer=transfer(schedule, t)) for t in timelines]
    return Foretold(timelines, [schedule.simulate(cost) for cost in costs])


def transfer(schedule: Schedule, timeline: Timeline) -> float:
    """How long a rank that waited went on waiting once another had made what it waited for."""
    made = {schedule.makes(row.rank, row.action): row for row in timeline.rows}
    delays = []
    for before, row in itertools.pairwise(timeline.rows):
        needs = [made[product] for product in schedule.needs(row.rank, row.action)]
        last = max((other.end for other in needs if other.rank != row.rank), default=None)
        if before.rank == row.rank and last is not None and before.end <= last:
            delays.append(row.start - last)
    return max(0.0, statistics.median(delays)) if delays else 0.0


def timelines(found: dict[str, Foretold]) -> None:
    """Print what was measured next to what was foretold, and each schedule next to 1F1B."""
    first = found.get("functron 1f1b")
    heads = ("measured ms", "simulated ms", "ratio", "bubble", "simulated", "of 1f1b", "simulated")
    print(f"\n{'timelines':26}" + "".join(f"{head:>13}" for head in heads))
    for name, f in found.items():
        both = (f.measured, f.simulated)
        totals = [1e3 * statistics.median(t.total for t in ts) for ts in both]
        bubbles = [statistics.median(t.bubble_fraction for t in ts) for ts in both]
        line = f"{name:26}{totals[0]:13.1f}{totals[1]:13.1f}{f.ratio:13.3f}"
        line += "".join(f"{b:13.1%}" for b in bubbles)
        if first is not None:
            firsts = (first.measured, first.simulated)
            line += "".join(f"{shorter(ts, fs):13.3f}" for ts, fs in zip(both, firsts, strict=True))
        print(line)


def shorter(mine: list[Timeline], first: list[Timeline]) -> float:
    """How long mine are in terms of the first ones: the median over rounds."""
    return statistics.median(a.total / b.total for a, b in zip(mine, first, strict=True))


def memories(records: dict[str, list[Record]], args: argparse.Namespace) -> None:
    """Print per rank what was held against what the table lets it hold."""
    heads = ("rank", "activations", "table MiB", "held MiB", "ratio", "tensors MiB")
    print(f"\n{'memory':26}" + "".join(f"{head:>13}" for head in heads))
    for name, ranks in records.items():
        schedule = made(name, len(ranks), args.microbatches)
        for rank, record in enumerate(ranks):
            if record.bound:
                print(
                    f"{name:26}{rank:13}{schedule.peak_live(rank):13}"
                    f"{record.bound / 2**20:13.2f}{record.held / 2**20:13.2f}"
                    f"{record.held / record.bound:13.3f}{record.tensors / 2**20:13.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {**SIZES, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, comma-separated")
    parser.add_argument("--only", default="", help="programs to run, comma-separated; default all")
    parser.add_argument("--threads", type=int, default=2, help="processors to use in all")
    parser.add_argument("--cache", help="a folder in which compiled code is kept for later runs")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--records", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    pin(args.threads)
    chosen = args.only.split(",") if args.only else [n for group in GROUPS.values() for n in group]
    with tempfile.TemporaryDirectory() as folder:
        args.cache = args.cache or folder
        good = everything(chosen, args)
    sys.exit(0 if all(good) else 1)


def everything(chosen: list[str], args: argparse.Namespace) -> list[bool]:
    """Measure all groups, and print their tables as soon as they are there; which went well."""
    good = []
    for ranks in map(int, args.ranks.split(",")):
        shared = f", which share {args.threads} processors" if ranks > args.threads else ""
        print(f"\n{ranks} processes, 1 thread each{shared}", flush=True)
        for title, names in GROUPS.items():
            names = [name for name in names if name in chosen]
            if names:
                good.append(group(title, names, ranks, args))
    return good


def group(title: str, names: list[str], ranks: int, args: argparse.Namespace) -> bool:
    """Measure programs and print their tables; whether all ran, and computed the same losses."""
    programs, records = measured(names, ranks, args)
    speed(title, programs, args)
    timelines(
        {
            name: foretold(made(name, ranks, args.microbatches), rows)
            for name, rows in records.items()
        }
    )
    memories(records, args)
    done = {p.name: p.losses for p in programs if not p.failure}
    wrong = measure.disagreement(done, AGREE_STEPS, AGREE_WITHIN)
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    sys.stdout.flush()
    failed = any(p.failure and p.name.startswith("functron") for p in programs)
    return not wrong and not failed


if __name__ == "__main__":
    main()
