"""One layer of experts, forward and backward, against transformers' and against a dense layer.

    python benchmarks/moe.py [--tokens 2048 --hidden 512 --mlp 1024 --experts 8 --top-k 2 --compile]
    python benchmarks/moe.py --rooms [--rounds 32]

All layers have the same router and gated experts, the same input and the same cotangent; gradients
are those of the input and of all parameters. Transformers' `MixtralSparseMoeBlock` runs with each
of its own implementations of experts: "eager" (a loop over experts), "grouped_mm" and "batched_mm"
(which copies the weights of each assignment). The dense layer multiplies as much per token: it is
`nn.mlp`, of the width of `top_k` experts. Prints medians of interleaved rounds, and medians of the
ratios within a round. ``--compile`` adds ft.jit and torch.compile.

``--rooms`` takes compiled training steps of mixtral-tiny on four processes, of a text with random
weights. Experts have room for all rows of all ranks (``--expert-room 0``), or for so many times the
balanced ones as they need, at first 1.25. Both must find the same losses. Peaks are those that are
promised, and by how much resident memory grows in steps after the first ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist

import functron as ft
from functron import DATA_AXES, Mesh, P, nn
from functron.nn.moe import MoEConfig, moe
from functron.training.config import TrainConfig, configure, with_model
from functron.training.costs import peak_bytes_with
from functron.training.run import prepare
from functron.training.setup import make_setup

Step = Callable[[], dict[str, torch.Tensor]]
STREAM = P(DATA_AXES)


def weights(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The router ``[D, E]``, experts ``[E, in, out]``, the input and the output's cotangent."""
    generator = torch.Generator().manual_seed(0)
    d, f, e, n = args.hidden, args.mlp, args.experts, args.tokens

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    return {
        "router": randn(d, e, scale=d**-0.5),
        "gate": randn(e, d, f, scale=d**-0.5),
        "up": randn(e, d, f, scale=d**-0.5),
        "down": randn(e, f, d, scale=f**-0.5),
        "x": randn(1, n, d),
        "cotangent": randn(1, n, d),
    }


def functron_layer(args: argparse.Namespace, w: dict, compiled: bool) -> Step:
    config = MoEConfig(
        num_experts=args.experts, top_k=args.top_k, expert_dim=args.mlp, renormalise=True
    )
    positions = torch.arange(args.tokens).unsqueeze(0)
    rows, counted = torch.zeros(1, dtype=torch.int64), torch.ones_like(positions, dtype=torch.bool)

    def step(w: dict, cotangent: torch.Tensor) -> dict:
        def loss(w: dict) -> torch.Tensor:
            params = {
                "router": {"w": w["router"]},
                "experts": {name: {"w": w[name]} for name in ("gate", "up", "down")},
            }
            y, _, _ = moe(
                params, w["x"], config, activation="silu", stream=STREAM,
                rows=rows, positions=positions, counted=counted,
            )  # fmt: skip
            return (y * cotangent).sum()

        return ft.grad(loss)(w)

    run = ft.jit(step) if compiled else step
    moving = {name: value for name, value in w.items() if name != "cotangent"}
    return lambda: run(moving, w["cotangent"])


def dense_layer(args: argparse.Namespace, w: dict, compiled: bool) -> Step:
    """`nn.mlp`, of as many FLOPs; its weights are those of the first experts."""

    def wide(name: str) -> torch.Tensor:
        dim = 0 if name == "down" else 1
        return torch.cat(w[name][: args.top_k].unbind(0), dim)

    moving = {name: wide(name) for name in ("gate", "up", "down")} | {"x": w["x"]}

    def step(w: dict, cotangent: torch.Tensor) -> dict:
        def loss(w: dict) -> torch.Tensor:
            params = {name: {"w": w[name]} for name in ("gate", "up", "down")}
            return (nn.mlp(params, w["x"], activation="silu", stream=STREAM) * cotangent).sum()

        return ft.grad(loss)(w)

    run = ft.jit(step) if compiled else step
    return lambda: run(moving, w["cotangent"])


def transformers_layer(args: argparse.Namespace, w: dict, kind: str, compiled: bool) -> Step:
    from transformers.models.mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config: Any = MixtralConfig(
        hidden_size=args.hidden, intermediate_size=args.mlp, num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
    )  # fmt: skip
    config._experts_implementation = kind
    block: Any = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(w["router"].mT)
        block.experts.gate_up_proj.copy_(torch.cat([w["gate"], w["up"]], 2).mT)
        block.experts.down_proj.copy_(w["down"].mT)
    layer: Any = torch.compile(block) if compiled else block
    parameters = list(block.parameters())

    def step() -> dict:
        x = w["x"].clone().requires_grad_()
        found = torch.autograd.grad((layer(x) * w["cotangent"]).sum(), [x, *parameters])
        dx, router, gate_up, down = found
        gate, up = gate_up.mT.chunk(2, -1)
        return {"x": dx, "router": router.mT, "gate": gate, "up": up, "down": down.mT}

    return step


def batched_gib(args: argparse.Namespace) -> float:
    """The bytes of weights that "batched_mm" copies, in each direction."""
    return args.tokens * args.top_k * 3 * args.hidden * args.mlp * 4 / 2**30


def programs(args: argparse.Namespace) -> dict[str, Step]:
    w = weights(args)
    made = {
        "functron": functron_layer(args, w, False),
        "dense": dense_layer(args, w, False),
        "transformers eager": transformers_layer(args, w, "eager", False),
        "transformers grouped_mm": transformers_layer(args, w, "grouped_mm", False),
    }
    if batched_gib(args) < args.most_gib:
        made["transformers batched_mm"] = transformers_layer(args, w, "batched_mm", False)
    else:
        print(
            f"skip: transformers batched_mm: it would copy {batched_gib(args):.0f} GiB of weights"
        )
    if args.compile:
        made["functron jit"] = functron_layer(args, w, True)
        made["dense jit"] = dense_layer(args, w, True)
        made["transformers grouped_mm compiled"] = transformers_layer(args, w, "grouped_mm", True)
    return {name: step for name, step in made.items() if not args.only or name in args.only}


def disagreements(steps: dict[str, Step]) -> list[str]:
    """Programs whose gradients differ from those of the first, all but the dense one's."""
    found, reference = [], None
    for name, step in steps.items():
        got = step()
        if name.startswith("dense"):
            continue
        if reference is None:
            reference = got
        worst = max(float((got[k] - v).abs().max() / v.abs().max()) for k, v in reference.items())
        if not worst < 1e-4:
            found.append(f"{name}: gradients differ by {worst:.1e}")
    return found


# --- rooms

MESHES, ROOMS = ("ep=4", "ep=2,dp=2"), (0.0, 1.25)


def room_config(mesh: str, room: float) -> TrainConfig:
    given = {"seq": 256, "global_batch": 32, "data": argparse.__file__, "compile": True}
    config = with_model(TrainConfig(), "mixtral-tiny")
    return configure(config, mesh=mesh, expert_room=room, **given)


def serve_room(args: argparse.Namespace) -> None:
    """Steps on one mesh with one room, each of the next batch."""
    mesh, _, room = args.serve.partition(" ")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}

    def make() -> Callable[[], float]:
        run = prepare(room_config(mesh, float(room)), Mesh.parse(mesh).bind())
        batches = iter([run.batch(index) for index in range(args.rounds + 1 + measure.WARM_UP)])
        state = run.state

        def take() -> float:
            nonlocal state
            state, metrics = run.step(state, next(batches))
            found["reruns"] = metrics.get("reruns", 0)
            found["room"] = metrics.get("expert_room", 0.0)
            return float(metrics["loss"])

        return take

    measure.serve(make, notes=lambda: found)
    dist.destroy_process_group()


def time_rooms(args: argparse.Namespace) -> bool:
    """Print steps by mesh and room; whether all ran and computed the same losses."""
    print(f"{'mesh':11}{'room':>6}{'step ms':>9}{'x worst':>9}{'promised':>10}{'grown':>8}  reruns")
    wrong: list[str] = []
    given = [__file__, f"--rounds={args.rounds}"]
    for mesh in args.only or MESHES:
        with tempfile.TemporaryDirectory() as caches:
            programs = [
                measure.start(
                    name, [*given, "--serve", name], ranks=4, threads=1, caches=Path(caches)
                )
                for name in (f"{mesh} {room}" for room in ROOMS)
            ]
            measure.run(programs, args.rounds)
        for p, first in zip(programs, ROOMS, strict=True):
            if p.failure:
                wrong.append(f"{p.name}: {p.failure}")
                continue
            last = p.answers[-1]["room"] if first else 0.0
            made = make_setup(room_config(mesh, first), Mesh.parse(mesh))
            ratio = measure.ratio(programs[0], p) if not programs[0].failure else float("nan")
            print(
                f"{mesh:11}{last or 'all':>6}{1e3 * p.seconds:9.0f}{ratio:9.2f}"
                f"{peak_bytes_with(made, last) / 2**20:6.0f} MiB{p.steady / 2**20:4.0f} MiB"
                f"  {sum(answer['reruns'] for answer in p.answers)} of {len(p.answers)}"
            )
        losses = {p.name: p.losses for p in programs if not p.failure}
        wrong += measure.disagreement(losses, AGREE_STEPS, AGREE_WITHIN)
    print(*wrong, sep="\n")
    return not wrong


AGREE_STEPS, AGREE_WITHIN = 8, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("tokens", 2048), ("hidden", 512), ("mlp", 1024), ("experts", 8),
                          ("top-k", 2), ("rounds", 9)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--most-gib", type=float, default=4.0, help="for copies of weights")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="*", help="names from the table; of --rooms, meshes")
    parser.add_argument("--rooms", action="store_true", help="training steps of four processes")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_room(args)
    elif args.rooms:
        sys.exit(0 if time_rooms(args) else 1)
    else:
        time_layers(args)


def time_layers(args: argparse.Namespace) -> None:
    """Print the times of one layer's programs; exit where their gradients differ."""
    steps = programs(args)
    wrong = disagreements(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begun)
    flops = 3 * args.tokens * args.top_k * 6 * args.hidden * args.mlp
    peers = {k: v for k, v in times.items() if k.startswith("transformers")}
    fastest = min(peers, key=lambda name: statistics.median(peers[name]), default=None)
    print(f"{args.tokens} tokens, {args.experts} experts, top {args.top_k}, "
          f"{args.hidden} x {args.mlp}, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"{'program':34}{'median ms':>10}{'GFLOP/s':>9}{'x fastest peer':>16}{'x dense':>9}")
    for name, values in times.items():
        median = statistics.median(values)
        ratios = []
        for other in (fastest, "dense"):
            pairs = zip(times.get(other or "", values), values, strict=True)
            ratios.append(statistics.median(theirs / ours for theirs, ours in pairs))
        print(f"{name:34}{median * 1e3:10.1f}{flops / median / 1e9:9.1f}"
              f"{ratios[0]:16.2f}{ratios[1]:9.2f}")  # fmt: skip
    print(f"fastest of transformers: {fastest}; above 1 is faster")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
