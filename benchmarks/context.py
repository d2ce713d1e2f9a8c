"""Attention of one long sequence on two processes: ring, gather and ulysses against one process.

python benchmarks/context.py [--seq 8192 --heads 4 --kv-heads 2 --dim 64] [--only ring,dense]

Every program computes causal attention and the gradients of q, k and v from the same numbers, in
turn with the others, and must find the same loss. "dense" is torch's scaled_dot_product_attention
of the whole sequence in one process with two threads; others have two processes of one thread.
``--bytes`` prints instead what a traced step sends, against the formula of `context_attention`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch.nn import functional as F

import functron as ft
from functron import BoundMesh, Mesh, P, lax
from functron.nn.context import context_attention

SIZES = {"seq": 8192, "heads": 4, "kv-heads": 2, "dim": 64}
AGREE_STEPS, AGREE_WITHIN = 2, 1e-4
RANKS = 2
STREAM = P(None, ("cp", "ulysses"))
PROGRAMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "ring": {"balanced": True},
    "ring jit": {"balanced": True},
    "ring contiguous": {},
    "gather": {"kind": "gather", "balanced": True},
    "ulysses": {},
    "dense window": {"window": 1024},
    "ring window": {"window": 1024},
    "ring packed": {"balanced": True, "packed": True},
}
SAME = ("dense", "ring", "ring jit", "ring contiguous", "gather", "ulysses")


def operands(args: argparse.Namespace) -> list[torch.Tensor]:
    """q, k and v ``[1, seq, heads, dim]``."""
    generator = torch.Generator().manual_seed(0)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    return [torch.randn(1, args.seq, n, args.dim, generator=generator) for n in heads]


def mesh_of(name: str) -> Mesh:
    return Mesh(ulysses=RANKS) if name == "ulysses" else Mesh(cp=RANKS)


def layer(mesh: Mesh | BoundMesh, options: dict[str, Any]) -> Callable:
    """Loss and gradients of context attention, mapped over a mesh."""
    options = dict(options)
    packed = options.pop("packed", False)

    def step(q, k, v, segments):
        def loss(q, k, v):
            out = context_attention(q, k, v, segments=segments if packed else None, **options)
            return lax.psum(out.square().sum(), ("cp", "ulysses"))

        return ft.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return ft.shard_map(step, mesh, STREAM, (P(), (STREAM,) * 3))


def arranged(x: torch.Tensor, balanced: bool) -> torch.Tensor:
    """The whole sequence in the order of the ranks that hold it."""
    if not balanced:
        return x
    chunks = x.chunk(2 * RANKS, 1)
    return torch.cat([chunks[c] for r in range(RANKS) for c in (r, 2 * RANKS - 1 - r)], 1)


def split_step(name: str, args: argparse.Namespace) -> Callable[[], float]:
    """One step of functron on this process's part of the sequence."""
    options, mesh = PROGRAMS[name], mesh_of(name).bind()
    segments = torch.arange(args.seq)[None] // (args.seq // 3)
    whole = [arranged(x, "balanced" in options) for x in (*operands(args), segments)]
    local = ft.shard(whole, STREAM, mesh)
    mapped = layer(mesh, options)
    mapped = ft.jit(mapped) if name.endswith("jit") else mapped
    return lambda: mapped(*local)[0].item()


def dense_step(name: str, args: argparse.Namespace) -> Callable[[], float]:
    """One step of torch's attention on the whole sequence."""
    inputs = [x.transpose(1, 2).contiguous().requires_grad_() for x in operands(args)]
    window, mask = PROGRAMS[name].get("window", 0), None
    if window:
        place = torch.arange(args.seq)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < window)

    def step() -> float:
        q, k, v = inputs
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        loss = out.square().sum()
        torch.autograd.grad(loss, inputs)
        return loss.item()

    return step


def serve(args: argparse.Namespace) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if args.serve.startswith("dense"):
        measure.serve(partial(dense_step, args.serve, args))
        return
    dist.init_process_group("gloo")
    measure.serve(partial(split_step, args.serve, args))
    dist.destroy_process_group()


def measured(names: list[str], args: argparse.Namespace) -> dict[str, measure.Program]:
    """These programs, started, stepped in turn and ended."""
    sizes = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in SIZES]
    with tempfile.TemporaryDirectory() as caches:
        programs = {}
        for name in names:
            ranks = 1 if name.startswith("dense") else RANKS
            programs[name] = measure.start(
                name, [__file__, *sizes, "--serve", name], ranks=ranks, threads=RANKS // ranks,
                caches=Path(caches),
            )  # fmt: skip
        measure.run(list(programs.values()), args.rounds)
    return programs


def table(programs: dict[str, measure.Program]) -> bool:
    """Print what was measured; whether all ran and computed the same losses."""
    print(f"{'program':18}{'step ms':>10}{'x dense':>10}{'MiB grown':>12}")
    done = {name: p for name, p in programs.items() if not p.failure}
    for name, p in programs.items():
        if p.failure:
            print(f"{name:18}  {p.failure}")
            continue
        peer = done.get("dense window" if "window" in name else "dense")
        speed = f"{measure.ratio(peer, p):10.2f}" if peer and "packed" not in name else " " * 10
        print(f"{name:18}{1e3 * p.seconds:10.1f}{speed}{p.steady / 2**20:12.0f}")
    wrong = []
    for group in (SAME, ("dense window", "ring window")):
        losses = {name: done[name].losses for name in group if name in done}
        wrong += measure.disagreement(losses, AGREE_STEPS, AGREE_WITHIN)
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    return not wrong and len(done) == len(programs)


def formula(name: str, args: argparse.Namespace) -> dict[str, int]:
    """The bytes of the operands of the collectives of a step, by kind, on every rank."""
    tokens = args.seq // RANKS
    q, kv = 4 * tokens * args.heads * args.dim, 2 * 4 * tokens * args.kv_heads * args.dim
    steps = RANKS - 1
    if name == "ulysses":
        return {"all_to_all": 2 * (2 * q + kv)}
    if name == "gather":
        return {"all_gather": RANKS * kv, "psum_scatter": RANKS * kv}
    integers = 4 * tokens if "packed" in name else 0
    return {"ppermute": steps * (3 * kv + integers)}


def count_bytes(names: list[str], args: argparse.Namespace) -> bool:
    """Print what the collectives of a step take, traced, and by the formula; if they agree."""
    good = True
    for name in names:
        if name.startswith("dense") or name.endswith("jit"):
            continue
        inputs = [x.to("meta") for x in operands(args)]
        segments = torch.empty(1, args.seq, dtype=torch.int64, device="meta")
        program = ft.trace(layer(mesh_of(name), PROGRAMS[name]))(*inputs, segments)
        found: dict[str, int] = {}
        for row in program.cost().collectives:
            if row.op != "psum":
                found[row.op] = found.get(row.op, 0) + row.payload_bytes
        want = formula(name, args)
        peak = program.memory().peak_bytes
        print(f"{name:18} {found} traced, {want} by the formula; peak {peak / 2**20:.0f} MiB")
        good &= found == want
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {**SIZES, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="programs to run, comma-separated; default all")
    parser.add_argument("--bytes", action="store_true", help="what is sent, by trace and formula")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    names = args.only.split(",") if args.only else list(PROGRAMS)
    sys.exit(0 if (count_bytes if args.bytes else _time)(names, args) else 1)


def _time(names: list[str], args: argparse.Namespace) -> bool:
    return table(measured(names, args))


if __name__ == "__main__":
    main()
