"""One layer of experts, forward and backward, against transformers' and against a dense layer.

    python benchmarks/moe.py [--tokens 2048 --hidden 512 --mlp 1024 --experts 8 --top-k 2 --compile]

All layers have the same router and gated experts, the same input and the same cotangent; gradients
are those of the input and of all parameters. Transformers' `MixtralSparseMoeBlock` runs with each
of its own implementations of experts: "eager" (a loop over experts), "grouped_mm" and "batched_mm"
(which copies the weights of each assignment). The dense layer multiplies as much per token: it is
`nn.mlp`, of the width of `top_k` experts. Prints medians of interleaved rounds, and medians of the
ratios within a round. ``--compile`` adds ft.jit and torch.compile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import functron as ft
from functron import DATA_AXES, P, nn
from functron.nn.moe import MoEConfig, moe

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("tokens", 2048), ("hidden", 512), ("mlp", 1024), ("experts", 8),
                          ("top-k", 2), ("rounds", 9)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--most-gib", type=float, default=4.0, help="for copies of weights")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="*", help="names from the table")
    args = parser.parse_args()
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
