"""Precision: what each policy sends, multiplies and holds, and how long its steps take on a GPU.

    python benchmarks/precision.py            both parts
    python benchmarks/precision.py --only traced
    python benchmarks/precision.py --only gpu --device cpu --tiny    its code, where there is no GPU

* **traced**: one rank's program of a step of llama3-8b on 64 ranks, by policy: bytes sent by
  collective and dtype, FLOPs by dtype, memory, and what quantisation adds to a layer. Nothing runs.
* **gpu**: compiled steps of four layers of 8B, every recipe that the GPU has against bf16; and the
  quantising kernels against the time in which a copy moves as many bytes. Skipped without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if importlib.util.find_spec("functron") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peers.models import LEARNING_RATE, WEIGHT_DECAY, decoder, make_batch

from functron import Mesh, jit, random
from functron.core.tables import align_columns, bytes_text, count_text
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.precision import Recipe
from functron.precision.recipe import check_gpu
from functron.program.cost import sent_bytes
from functron.program.equations import Scan
from functron.program.text import axis_of, dtype_text
from functron.program.trace import Program
from functron.training.config import TrainConfig, configure, with_model, with_precision
from functron.training.setup import make_setup

MODEL, SEQ = "llama3-8b", 8192
MESHES = ("dp=8,tp=8", "fsdp=8,tp=8")
POLICIES = (
    "float32", "bf16", "bf16-pure", "fp8-delayed", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8",
    "nvfp4",
)  # fmt: skip
SENT_AS = {"float32": "bfloat16", **dict.fromkeys(POLICIES[4:], "quantised")}
"""As what parameters may be gathered that fsdp splits, beside as they are."""
GPU_STEPS, GPU_WARM_UP = 8, 4
FASTER, OF_COPY = 1.35, 0.8
"""The targets on a GPU: a step in 8 bits as times as fast as in 16, and of a copy's bandwidth."""


# --- what a program sends, multiplies and holds


@dataclass(frozen=True)
class Traced:
    """The facts of a traced program.

    Attributes:
        sent: bytes by axis, collective and dtype, per rank.
        flops: by dtype.
        peak: bytes held at most; `rest`: of parameters and the optimizer's state.
        equations: how many compute something, of scanned layers each time.
        counts: of some of them, by name.
    """

    sent: Mapping[tuple[str, str, str], float]
    flops: Mapping[str, float]
    peak: int
    rest: int
    equations: int
    counts: Mapping[str, int]


def facts(program: Program) -> Traced:
    """Those of one rank's program."""
    sent: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[str] = Counter()
    for equation, times in program.block.walk():
        if isinstance(equation.op, Scan) or equation.aliases:
            continue
        counts[equation.name] += times
        axis = axis_of(equation)
        if axis is not None:
            dtype = dtype_text(equation.operands[0].dtype)
            sent[axis, equation.name, dtype] += round(sent_bytes(equation) * times)
    flops = {dtype_text(dtype): n for dtype, n in program.cost().flops_by_dtype.items()}
    memory = program.memory()
    rest = sum(given.var.nbytes for given in program.inputs if given.path.startswith("0/"))
    return Traced(sent, flops, memory.peak_bytes, rest, counts.total(), counts)


def configured(name: str, mesh: str, **fields: Any) -> TrainConfig:
    """A step of the model under a policy, one sample for each rank of data."""
    config = with_precision(with_model(TrainConfig(), MODEL), name)
    return configure(
        config, mesh=mesh, seq=SEQ, global_batch=8, sequence_parallel=True, remat="full", **fields
    )


def traced(args: argparse.Namespace) -> bool:
    """The tables of all meshes."""
    for mesh in MESHES:
        rows = {name: configured(name, mesh) for name in POLICIES}
        if "fsdp" in mesh:
            for name, how in SENT_AS.items():
                rows[f"{name}, sent {how}"] = configure(rows[name], gather_as=how)
        found = {name: facts(make_setup(c, Mesh.parse(mesh)).program()) for name, c in rows.items()}
        layers = with_model(TrainConfig(), MODEL).gpt.num_layers
        print(f"\n{MODEL}, one of 64 ranks ({mesh}, sequence parallel, full recomputation),")
        print(f"8 samples of {SEQ} tokens a step\n")
        print("\n".join(align_columns(table(found, layers))), flush=True)
    return True


def table(found: Mapping[str, Traced], layers: int) -> list[list[str]]:
    """A row of each policy; what quantisation adds is beside bf16."""
    rows = [["policy", "sent", "FLOPs", "at rest", "peak", "per layer, beside bf16"]]
    plain = found["bf16"]
    for name, one in found.items():
        more = (one.equations - plain.equations) / layers
        added = [f"{more:+.0f} equations"]
        for what in ("quantise", "scaled_matmul", "hadamard", "pmax"):
            count = one.counts.get(what, 0) - plain.counts.get(what, 0)
            added += [f"{count / layers:.0f} {what}"] if count else []
        flops = ", ".join(f"{count_text(n)} {dtype}" for dtype, n in one.flops.items())
        total = bytes_text(sum(one.sent.values()))
        rows.append(
            [name, total, flops, bytes_text(one.rest), bytes_text(one.peak), ", ".join(added)]
        )
        for (axis, op, dtype), sent in sorted(one.sent.items(), key=lambda item: -item[1]):
            if sent >= 2**20:
                rows.append(["", f"{bytes_text(sent)} {axis} {op} {dtype}", "", "", "", ""])
        scales = sum(sent for (_, op, _), sent in one.sent.items() if op == "pmax")
        rows.append(["", f"{bytes_text(scales)} in {one.counts.get('pmax', 0)} pmax", *[""] * 4])
    return rows


# --- steps


def training(config: TrainConfig, device: str, eager: bool = False) -> Callable[[dict], float]:
    """The compiled step of a configuration on one device, as a function of a batch to its loss."""
    made = make_setup(config, Mesh())
    state = made.init(random.key(0, device=device))
    step = made.step if eager else jit(made.step, donate=0)

    def take(batch: dict) -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"].item()

    return take


def run_of(model: Any, name: str, **fields: Any) -> TrainConfig:
    """A run of AdamW without clipping and decay of the rate: what `module_step` does."""
    rate = ScheduleConfig(name="constant", peak=LEARNING_RATE)
    own = OptimizerConfig(name="adamw", weight_decay=WEIGHT_DECAY, clip_norm=0.0, b2=0.999)
    base = configure(gpt=model, seq=model.max_seq, optimizer=own, learning_rate=rate, **fields)
    return with_precision(base, name)


def gpu(args: argparse.Namespace) -> bool:
    """Steps by recipe, and kernels by bandwidth; whether the targets are met, on a GPU."""
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("\nsteps in 8 bits and quantising kernels on a GPU: not run, as torch finds no GPU")
        return True
    sizes = (256, 2, 512, 4, 128) if args.tiny else (8192, 4, 4096, 32, 4096)
    model = decoder(*sizes, mlp=512 if args.tiny else 14336, num_kv_heads=sizes[3] // 4)
    batch = make_batch(model.vocab_size, 4, model.max_seq, args.device)
    name = torch.cuda.get_device_name() if cuda else "this CPU, whose times mean nothing"
    print(f"\n{model.num_layers} layers on {name}, 4 x {model.max_seq} tokens a step:")
    seconds: dict[str, float] = {}
    configs = {name: run_of(model, name, device=args.device) for name in POLICIES[1:]}
    for name in [name for name, how in SENT_AS.items() if how == "quantised"]:
        configs[f"{name}, w once"] = configure(configs[name], gather_as="quantised")
    for name, config in configs.items():
        try:
            if cuda and config.precision.products:
                capability = torch.cuda.get_device_capability()
                check_gpu(Recipe.parse(config.precision.products), torch.bfloat16, capability)
        except ValueError as error:
            print(f"  {name:18} not on this GPU: {str(error).splitlines()[-1].strip()}")
            continue
        seconds[name] = timed(partial(training(config, args.device, args.tiny), batch), args.tiny)
        ratio = seconds["bf16"] / seconds[name]
        print(f"  {name:18} {1e3 * seconds[name]:9.1f} ms, {ratio:.2f} times as fast as bf16")
        torch.cuda.empty_cache()
    eight = [each for name, each in seconds.items() if name.startswith("fp8")]
    good = bool(eight) and seconds["bf16"] >= FASTER * min(eight)
    kernels: Any = importlib.import_module("kernels")  # of this folder, not the sources
    given = kernels.Given(
        kernels.TINY if args.tiny else kernels.FULL, torch.bfloat16, torch.device(args.device)
    )
    clock = kernels.Clock(given.device, 2 if args.tiny else kernels.REPEATS)
    copies = kernels.bandwidth(clock, args.tiny)
    for name in (n for n in kernels.CASES if "quantise" in n):
        row = kernels.measure(name, given, clock)
        kernels.release()
        share = 0.0 if row.failure else row.floor / copies / row.seconds
        print(f"  {name:30} {row.failure or f'{share:.0%} of the bandwidth of a copy'}", flush=True)
        good &= share >= OF_COPY
    if not cuda:
        return True
    print("all targets met" if good else "TARGETS MISSED", f"({FASTER} x, {OF_COPY:.0%})")
    return good


def timed(step: Callable[[], float], tiny: bool) -> float:
    """The median step's seconds."""
    times, warm_up = [], 1 if tiny else GPU_WARM_UP
    for _ in range(warm_up + (2 if tiny else GPU_STEPS)):
        begun = time.perf_counter()
        step()  # the loss is brought to the host
        times.append(time.perf_counter() - begun)
    return statistics.median(times[warm_up:])


PARTS: Mapping[str, Callable[[argparse.Namespace], bool]] = {
    "traced": traced,
    "gpu": gpu,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of the part gpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes in it, not compiled")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    chosen = args.only.split(",")
    if unknown := sorted({*chosen} - {*PARTS}):
        sys.exit(f"--only: got {unknown}; wanted some of {list(PARTS)}")
    good = {name: PARTS[name](args) for name in chosen}
    sys.exit(0 if all(good.values()) else 1)


if __name__ == "__main__":
    main()
