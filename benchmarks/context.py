"""Attention of one long sequence on two processes: ring, gather and ulysses against one process.

python benchmarks/context.py [--seq 8192 --heads 4 --kv-heads 2 --dim 64] [--only ring,dense]
python benchmarks/context.py --deals [--microbatches 4] | --deals-plan

Every program computes causal attention and the gradients of q, k and v from the same numbers, in
turn with the others, and must find the same loss. "dense" is torch's scaled_dot_product_attention
of the whole sequence in one process with two threads; others have two processes of one thread.
``--bytes`` prints instead what a traced step sends, against the formula of `context_attention`.

``--deals`` takes training steps of a small GPT on four processes, of packed documents with a long
tail of lengths: "static" is the zig-zag of each sample over cp=4, "document" that of each document
(`functron.data.balance`), "dynamic" what ``--context dynamic`` does. All must find the same losses.
``--deals-plan`` measures nothing: 128k tokens a sample of Llama 3 8B on 32 GPUs, by the planner's
seconds of products, attention and exchanges, for several distributions of lengths.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, lax
from functron.apps.planner import hardware
from functron.apps.planner.measurements import estimate_run
from functron.data import ContextCosts, IndexedWriter, balance, deal, open_tokens
from functron.data.packing import PackedTokens
from functron.nn.context import context_attention
from functron.training.config import TrainConfig, configure, with_model, with_precision
from functron.training.run import Run, own_part, prepare
from functron.training.setup import make_setup

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
    parser.add_argument("--deals", action="store_true", help="training steps of packed documents")
    parser.add_argument("--deals-plan", action="store_true", help="the same on 32 GPUs, computed")
    parser.add_argument("--microbatches", type=int, default=1, help="of --deals")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return (serve_deals if args.serve in DEALS else serve)(args)
    if args.deals_plan:
        return plan_deals()
    if args.deals:
        sys.exit(0 if time_deals(args) else 1)
    names = args.only.split(",") if args.only else list(PROGRAMS)
    sys.exit(0 if (count_bytes if args.bytes else _time)(names, args) else 1)


def _time(names: list[str], args: argparse.Namespace) -> bool:
    return table(measured(names, args))


# --- documents dealt to ranks

DEALS = ("static", "document", "dynamic")
DEAL_RANKS, DEAL_SEQ, DEAL_BATCH = 4, 4000, 4


def long_tailed(count: int, median: int, sigma: float, most: int, seed: int = 0) -> list[int]:
    """Lengths of documents, most of them short: lognormal, at most `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(drawn, 2, most).astype(int).tolist()


def deal_run(args: argparse.Namespace, folder: Path, context: str) -> Run:
    """A run of a small GPT on four processes, on a file of documents."""
    drawn = np.random.default_rng(0)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for size in long_tailed(2000, 60, 1.6, DEAL_SEQ):
            writer.add(drawn.integers(0, 512, size))
    model = gpt.GPTConfig(
        vocab_size=512, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, mlp_dim=256,
        max_seq=DEAL_SEQ,
    )  # fmt: skip
    config = configure(
        gpt=model, data=str(folder / "text"), pack="best-fit", seq=DEAL_SEQ, steps=1000,
        global_batch=DEAL_BATCH, microbatches=args.microbatches, mesh=f"cp={DEAL_RANKS}",
        context=context,
    )  # fmt: skip
    return prepare(config, Mesh(cp=DEAL_RANKS).bind())


def deal_step(args: argparse.Namespace, folder: Path) -> Callable[[], float]:
    """A step of one of `DEALS`, each time of the next batch, which was made before."""
    name, steps = args.serve, args.rounds + 1 + measure.WARM_UP
    run = deal_run(args, folder, "dynamic" if name == "dynamic" else "ring")
    step, batches = run.step, [run.batch(index) for index in range(steps)]
    if name == "document":
        step = replace(run.setup, ring_size=DEAL_RANKS).step
        whole = [run.text.batch(index, DEAL_BATCH) for index in range(steps)]
        longest = max(balance(batch, DEAL_RANKS)["tokens"].shape[1] for batch in whole)
        arranged = (balance(batch, DEAL_RANKS, seq=longest) for batch in whole)
        batches = [own_part(run.mesh, lambda part, x=batch: x) for batch in arranged]
    state, left = run.state, iter(batches)

    def take() -> float:
        nonlocal state
        state, metrics = step(state, next(left))
        return float(metrics["loss"])

    return take


def serve_deals(args: argparse.Namespace) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        measure.serve(partial(deal_step, args, Path(folder)))
    dist.destroy_process_group()


def time_deals(args: argparse.Namespace) -> bool:
    """Print the steps of `DEALS`; whether all ran and computed the same losses."""
    given = [f"--microbatches={args.microbatches}", f"--rounds={args.rounds}"]
    with tempfile.TemporaryDirectory() as caches:
        programs = {
            name: measure.start(
                name, [__file__, *given, "--serve", name], ranks=DEAL_RANKS, threads=1,
                caches=Path(caches),
            )
            for name in DEALS
        }  # fmt: skip
        measure.run(list(programs.values()), args.rounds)
    print(f"{'deal':10}{'step ms':>10}{'x static':>10}")
    for name, p in programs.items():
        if p.failure:
            print(f"{name:10}  {p.failure}")
        elif not programs["static"].failure:
            print(f"{name:10}{1e3 * p.seconds:10.0f}{measure.ratio(programs['static'], p):10.2f}")
    losses = {name: p.losses for name, p in programs.items() if not p.failure}
    wrong = measure.disagreement(losses, AGREE_STEPS, AGREE_WITHIN)
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    return not wrong and len(losses) == len(DEALS)


PLAN_SEQ, PLAN_CP, PLAN_PARTS = 131_072, 8, 4


@cache
def planned_costs() -> tuple[ContextCosts, float]:
    """The planner's seconds of a token, a visible pair and an exchange on 32 GPUs; of a step."""
    config = with_precision(with_model(TrainConfig(), "llama3-8b"), "bf16")
    mesh = f"fsdp={PLAN_PARTS},cp={PLAN_CP}"
    config = configure(
        config, gpt=replace(config.gpt, max_seq=PLAN_SEQ), seq=PLAN_SEQ, mesh=mesh,
        global_batch=PLAN_PARTS, remat="full", compile=True,
    )  # fmt: skip
    found = estimate_run(make_setup(config, Mesh.parse(mesh)), hardware("h100"))
    tokens, pairs = PLAN_SEQ / PLAN_CP, PLAN_SEQ**2 / 2 / PLAN_CP
    attention, sent = found.parts["attention"], found.parts.get("over cp", 0.0)
    other = found.step_seconds - attention - sent
    exchange = sent / tokens / (PLAN_CP - 1)
    # heads of queries and results are four times those of keys and values
    costs = ContextCosts(other / tokens, attention / pairs, exchange, 5 * exchange)
    return costs, found.step_seconds


def plan_deals(draws: int = 4, samples: int = 8) -> None:
    """Print by distribution and microbatches what dealing saves, by the planner's seconds."""
    costs, seconds = planned_costs()
    print(f"one document a sample: {seconds:.2f} s a step of {PLAN_PARTS} samples")
    print(f"{'median':>8}{'sigma':>7}{'microbatches':>14}{'static s':>10}{'dynamic s':>11}"
          f"{'ratio':>7}{'idle':>14}{'least':>7}{'sent':>7}")  # fmt: skip
    for median, sigma in ((900, 1.6), (2000, 2.0), (4000, 1.6)):
        for microbatches in (1, 2):
            rows = []
            for seed in range(draws):
                batch = planned_batch(median, sigma, samples, seed)
                given = {"parts": PLAN_PARTS, "microbatches": microbatches, "costs": costs}
                made = deal(batch, PLAN_CP, **given)
                rows.append((made.static_time, made.time, made.static_idle, made.idle,
                             least_idle(batch, costs), made.sent / made.static_sent))  # fmt: skip
            static, dynamic, before, idle, least, sent = np.mean(rows, 0)
            print(f"{median:8}{sigma:7}{microbatches:14}{static:10.2f}{dynamic:11.2f}"
                  f"{static / dynamic:7.2f}{before:7.1%}{idle:7.1%}{least:7.1%}"
                  f"{sent:7.2f}")  # fmt: skip


def least_idle(batch: dict[str, torch.Tensor], costs: ContextCosts) -> float:
    """The idle share that no deal is below: the longest document lies on the ranks of one part."""
    seen = batch["positions"].double() + 1
    tokens, ranks = seen.numel() / PLAN_CP / PLAN_PARTS, PLAN_CP * PLAN_PARTS
    longest = float(seen.max())
    slowest = max(float(seen.sum()) / ranks, longest * (longest + 1) / 2 / PLAN_CP)
    needed = costs.cost_of(float(seen.sum()) / ranks, tokens, 1)
    return 1 - float(needed / costs.cost_of(slowest, tokens, 1))


def planned_batch(median: int, sigma: float, samples: int, seed: int) -> dict[str, torch.Tensor]:
    """Full samples of such documents, as a run packs them."""
    lengths = long_tailed(20_000, median, sigma, PLAN_SEQ, seed)
    with tempfile.TemporaryDirectory() as folder:
        total, path = 0, Path(folder) / "text"
        with IndexedWriter(path, np.uint16) as writer:
            for size in lengths:
                writer.add(np.zeros(size, np.uint16))
                if (total := total + size) > 2 * samples * PLAN_SEQ:
                    break
        return PackedTokens(open_tokens(path), PLAN_SEQ, seed=seed).batch(0, samples)


if __name__ == "__main__":
    main()
