"""The compiled training step against torch.compile, JAX, FSDP2, DDP and DTensor: see README.md.

python benchmarks/compiled.py [--hidden 512 --layers 8 --seq 512 --vocab 8192 --batch 4]
python benchmarks/compiled.py --depth
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from measure import Program
from models import decoder, make_batch

from functron import Mesh, gpt

SIZES = {"hidden": 128, "layers": 8, "seq": 128, "vocab": 1024, "batch": 2, "mlp": 0}
AGREE_STEPS, AGREE_WITHIN = 4, 1e-4

ONE, DATA, TENSOR = "1 process, 2 threads", "dp=2, 1 thread each", "tp=2, 1 thread each"
GROUPS: dict[str, tuple[str, ...]] = {
    ONE: ("functron jit", "functron eager", "torch.compile", "JAX jit", "JAX jit scan"),
    DATA: ("functron dp jit", "functron dp eager", "DDP", "FSDP2", "FSDP2 no reshard"),
    TENSOR: (
        "functron tp jit", "functron tp sp jit", "functron tp eager", "DTensor tp", "DTensor tp sp",
    ),
}  # fmt: skip


def maker(name: str) -> Callable:
    """``(config, batch) -> step`` of the program of this name; imports what it needs."""
    if name.startswith("JAX"):
        try:
            from jax_decoder import jax_step
        except ImportError as error:
            raise SystemExit(f"skip: {error}; install functron[test]") from None
        return partial(jax_step, scanned=name.endswith("scan"))
    import peers

    if name.startswith("functron"):
        return partial(functron_step, name.split())
    return {
        "torch.compile": partial(peers.plain_step, compiled=True),
        "DDP": peers.ddp_step,
        "FSDP2": partial(peers.fsdp_step, reshard=True),
        "FSDP2 no reshard": partial(peers.fsdp_step, reshard=False),
        "DTensor tp": partial(peers.dtensor_step, sequence=False),
        "DTensor tp sp": partial(peers.dtensor_step, sequence=True),
    }[name]


def functron_step(words: list[str], c: gpt.GPTConfig, batch: dict) -> Callable[[], float]:
    """functron on the mesh that `words` name, eager or compiled."""
    import peers

    mesh = Mesh()
    if dist.is_initialized():
        mesh = (Mesh(dp=2) if "dp" in words else Mesh(tp=2)).bind()
    compile_with = None
    if "jit" in words:
        from functron.compiler.jit import jit

        options = {"unroll": True} if "unrolled" in words else {}
        compile_with = partial(jit, donate=(0,), **options)
    stream = gpt.SEQUENCE_PARALLEL_STREAM if "sp" in words else gpt.STREAM
    return peers.functron_step(c, batch, mesh, stream=stream, compile_with=compile_with)


def serve(args: argparse.Namespace) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    c = decoder(args.vocab, args.layers, args.hidden, args.hidden // 64, args.seq, mlp=args.mlp)
    batch = make_batch(args.vocab, args.batch, args.seq)
    measure.serve(partial(maker(args.serve), c, batch))
    if dist.is_initialized():
        dist.destroy_process_group()


def measured(names: Sequence[str], args: argparse.Namespace, ranks: int, *more: str) -> list:
    """These programs, started, stepped in turn and ended."""
    sizes = [f"--{name}={getattr(args, name)}" for name in SIZES]
    with tempfile.TemporaryDirectory() as caches:
        programs = [
            measure.start(
                name, [__file__, *sizes, *more, "--serve", name], ranks=ranks,
                threads=max(1, args.threads // ranks), caches=Path(caches),
            )
            for name in names
        ]  # fmt: skip
        measure.run(programs, args.rounds)
    return programs


def table(title: str, programs: list[Program], args: argparse.Namespace) -> bool:
    """Print the group; whether functron ran and all programs that did compute the same losses."""
    done = [p for p in programs if not p.failure]
    peers = [p for p in done if not p.name.startswith("functron")]
    best = min(peers, key=lambda p: p.seconds) if peers else None
    heads = ("tokens/s", "x best peer", "step ms", "compile s", "peak MiB", "steady MiB")
    print(f"\n{title}\n{'program':20}" + "".join(f"{head:>13}" for head in heads))
    for p in programs:
        if p.failure:
            print(f"{p.name:20}  {p.failure}")
            continue
        rate = args.batch * args.seq / p.seconds
        relative = f"{measure.ratio(best, p):13.3f}" if best else f"{'-':>13}"
        print(
            f"{p.name:20}{rate:13.0f}{relative}{1e3 * p.seconds:13.1f}{p.compile_seconds:13.1f}"
            f"{p.peak / 2**20:13.0f}{p.steady / 2**20:13.0f}"
        )
    wrong = measure.disagreement({p.name: p.losses for p in done}, AGREE_STEPS, AGREE_WITHIN)
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    sys.stdout.flush()
    failed = any(p.failure and p.name.startswith("functron") for p in programs)
    return not wrong and not failed


def depth(args: argparse.Namespace) -> bool:
    """The cost of tracing and compiling 8 times as many layers, and of reuse in step time."""
    few, many = (measured(["functron jit"], args, 1, f"--layers={n}")[0] for n in (8, 64))
    both = measured(["functron jit", "functron jit unrolled"], args, 1, "--layers=8")
    failures = [f"{p.name}: {p.failure}" for p in (few, many, *both) if p.failure]
    if failures:
        print(*failures, sep="\n")
        return False
    times = few.compile_seconds, many.compile_seconds
    print("trace and compile: 8 layers {:.1f} s, 64 layers {:.1f} s".format(*times), end=": ")
    print(f"{times[1] / times[0]:.2f}x")
    region, unrolled = (1e3 * p.seconds for p in both)
    print(f"a step of 8 layers: one region {region:.1f} ms, unrolled {unrolled:.1f} ms", end=": ")
    print(f"{measure.ratio(*both):.3f}x; unrolled compiles in {both[1].compile_seconds:.1f} s")
    return True


def pin(threads: int) -> None:
    """Keep this process and its children to so many processors: XLA has no option for threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {**SIZES, "rounds": 25, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="programs to run, comma-separated; default all")
    parser.add_argument("--depth", action="store_true", help="compile time of 8 and 64 layers")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    pin(args.threads)
    if args.depth:
        sys.exit(0 if depth(args) else 1)
    chosen = args.only.split(",") if args.only else [n for names in GROUPS.values() for n in names]
    good = []
    for title, names in GROUPS.items():
        names = [name for name in names if name in chosen]
        if names:
            good.append(table(title, measured(names, args, 1 if title == ONE else 2), args))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
