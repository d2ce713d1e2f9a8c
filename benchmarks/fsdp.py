"""Fully sharded training steps on two processes, functron's against torch's FSDP2.

python benchmarks/fsdp.py [--hidden 512 --layers 8 --seq 512 --vocab 8192 --batch 4] [--bytes]

Every program trains the same decoder from the same weights on the same batch, steps in turn with
the others, and must compute the same losses. Memory is what a process's resident memory grew by
while stepping. ``--bytes`` prints instead what a traced step sends, against the formula.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from models import LEARNING_RATE, WEIGHT_DECAY, decoder, make_batch

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, optim, random, tree
from functron.transforms import Gather

SIZES = {"hidden": 256, "layers": 8, "seq": 128, "vocab": 1024, "batch": 2, "mlp": 0}
AGREE_STEPS, AGREE_WITHIN = 4, 1e-4
RANKS = 2
OURS = {
    "functron": {},
    "functron no overlap": {"prefetch": False},
    "functron keep": {"regather": False},
    "functron eager": {"compiled": False},
    "functron eager keep": {"compiled": False, "regather": False},
}
PEERS = {
    "FSDP2": {"reshard": True},
    "FSDP2 keep": {"reshard": False},
    "FSDP2 eager": {"compiled": False, "reshard": True},
    "FSDP2 eager keep": {"compiled": False, "reshard": False},
}
PAIRS = (
    ("functron", "FSDP2"), ("functron keep", "FSDP2 keep"), ("functron", "functron no overlap"),
    ("functron eager", "FSDP2 eager"), ("functron eager keep", "FSDP2 eager keep"),
)  # fmt: skip


def training(
    c: gpt.GPTConfig, mesh: Mesh | BoundMesh, *, regather: bool = True
) -> tuple[Callable, ft.State]:
    """functron's step with parameters split over fsdp, and the first state (abstract on a Mesh)."""
    defs = gpt.defs(c)
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    optimizer = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    key = random.key(0) if isinstance(mesh, BoundMesh) else random.key(0).to("meta")
    state = ft.init_state(key, defs, specs, optimizer, mesh)
    gather = Gather(specs, regather=regather)

    def loss(params, batch, key):
        return gpt.loss(c, params, batch, ft.ModelOptions(gather=gather), key=key)

    return ft.make_step(ft.gradients(loss, gpt.num_targets), optimizer, mesh, specs), state


def functron_step(
    c: gpt.GPTConfig,
    batch: dict,
    *,
    compiled: bool = True,
    regather: bool = True,
    prefetch: bool = True,
) -> Callable[[], float]:
    """One step of functron on this process's part of the batch."""
    mesh = Mesh(fsdp=RANKS).bind()
    train, state = training(c, mesh, regather=regather)
    if compiled:
        train = ft.jit(train, donate=0, prefetch=prefetch)
    mine = ft.shard(batch, P(ft.DATA_AXES), mesh)

    def step() -> float:
        nonlocal state
        state, metrics = train(state, mine)
        return metrics["loss"].item()

    return step


def fsdp2_step(
    c: gpt.GPTConfig, batch: dict, *, reshard: bool, compiled: bool = True
) -> Callable[[], float]:
    """One step of FSDP2, one unit per block; compiled: each block by torch.compile."""
    import peers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = peers.plain_model(c)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    parameters = list(model.parameters())
    return peers.mean_over_ranks(peers.module_step(model, parameters, *peers.local_rows(batch)))


def maker(name: str) -> Callable:
    """``(config, batch) -> step`` of the program of this name."""
    if name in OURS:
        return partial(functron_step, **OURS[name])
    return partial(fsdp2_step, **PEERS[name])


def serve(args: argparse.Namespace) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    measure.serve(
        partial(maker(args.serve), config(args), make_batch(args.vocab, args.batch, args.seq))
    )
    dist.destroy_process_group()


def config(args: argparse.Namespace) -> gpt.GPTConfig:
    return decoder(args.vocab, args.layers, args.hidden, args.hidden // 64, args.seq, mlp=args.mlp)


def measured(names: list[str], args: argparse.Namespace) -> dict[str, measure.Program]:
    """These programs, started, stepped in turn and ended."""
    sizes = [f"--{name}={getattr(args, name)}" for name in SIZES]
    with tempfile.TemporaryDirectory() as caches:
        programs = {
            name: measure.start(
                name, [__file__, *sizes, "--serve", name], ranks=RANKS, threads=1,
                caches=Path(caches),
            )
            for name in names
        }  # fmt: skip
        measure.run(list(programs.values()), args.rounds)
    return programs


def table(programs: dict[str, measure.Program]) -> bool:
    """Print what was measured; whether all ran and computed the same losses."""
    heads = ("step ms", "compile s", "peak MiB", "steady MiB")
    print(f"{'program':22}" + "".join(f"{head:>12}" for head in heads))
    done = {name: p for name, p in programs.items() if not p.failure}
    for name, p in programs.items():
        if p.failure:
            print(f"{name:22}  {p.failure}")
            continue
        print(
            f"{name:22}{1e3 * p.seconds:12.1f}{p.compile_seconds:12.1f}"
            f"{p.peak / 2**20:12.0f}{p.steady / 2**20:12.0f}"
        )
    for ours, theirs in PAIRS:
        if ours in done and theirs in done:
            ratio = measure.ratio(done[theirs], done[ours])
            print(f"{ours} is {ratio:.2f} times as fast as {theirs}")
    wrong = measure.disagreement(
        {name: p.losses for name, p in done.items()}, AGREE_STEPS, AGREE_WITHIN
    )
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    return not wrong and len(done) == len(programs)


def count_bytes(args: argparse.Namespace) -> bool:
    """Print what each rank sends over fsdp in a step, traced, and by the formula; if they agree."""
    c, mesh = config(args), Mesh(fsdp=RANKS)
    batch = {k: v.to("meta") for k, v in make_batch(args.vocab, args.batch, args.seq).items()}
    good = True
    for regather in (True, False):
        step, state = training(c, mesh, regather=regather)
        program = ft.trace(step, donate=0)(state, batch)
        rows = [row for row in program.cost().collectives if row.op != "psum"]
        sent = sum(row.sent_bytes for row in rows)
        weights = state.params
        total, blocks = tree.nbytes(weights), tree.nbytes(weights["blocks"])
        want = (2 * total + (blocks if regather else 0)) * (RANKS - 1) // RANKS
        held = sum(
            given.var.nbytes for given in program.inputs if given.path.startswith("0/params")
        )
        peak = program.memory().peak_bytes
        print(
            f"regather={regather}: {sent:,} bytes sent, {want:,} by the formula; "
            f"{held:,} of {total:,} bytes of parameters held; peak {peak:,} bytes"
        )
        good &= sent == want and held * RANKS == total
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {**SIZES, "rounds": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="programs to run, comma-separated; default all")
    parser.add_argument("--bytes", action="store_true", help="what is sent, by trace and formula")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    if args.bytes:
        sys.exit(0 if count_bytes(args) else 1)
    names = args.only.split(",") if args.only else [*OURS, *PEERS]
    sys.exit(0 if table(measured(names, args)) else 1)


if __name__ == "__main__":
    main()
