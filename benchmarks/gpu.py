"""Training steps in bfloat16 on one GPU: functron against torch.compile and Hugging Face.

    python benchmarks/gpu.py            all shapes and programs, in less than 9 minutes
    python benchmarks/gpu.py --check    does the compiled step equal the eager one? (float32)
    python benchmarks/gpu.py --device cpu --tiny    the same code where there is no GPU

MFU (model FLOPs utilisation) is tokens/s times FLOPs per token over the device's peak, with

    FLOPs per token = 6 N + 6 L H D T

of `gpt.flops_per_token`: N parameters that multiply activations (not the embedding, which is looked
up), L layers, H heads of width D, T tokens per sequence. The second term is attention under its
causal mask, half of the 12 L H D T that all T^2 scores would take; with these, MFU is printed
beside it. See README.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

if importlib.util.find_spec("functron") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measure
import torch
from peers.functron_steps import mesh_step, training
from peers.models import Step, decoder, make_batch
from peers.torch_steps import hugging_face_step, plain_step

from functron import Mesh, gpt, tree
from functron.compiler.jit import jit
from functron.program.cost import peak_flops

# in order of importance, in case that time runs out
PROGRAMS = (
    "functron jit", "torch.compile", "functron graph", "functron eager", "Hugging Face",
    "Hugging Face compiled", "Hugging Face Liger", "functron fused",
)  # fmt: skip
OUT_OF_TIME = "not run (out of time)"
WARM_UP = 4
"""Steps before the timed ones: the first compiles, all of them say whether programs agree."""
AGREE_WITHIN = 5e-3
"""Of losses, relative: bfloat16 rounds a logit by up to 4e-3, and their mean by much less."""
BUDGET, TINY_BUDGET, START_SECONDS = 500.0, 105.0, 20.0
"""Seconds for all programs; a program is not started with less than this left."""
CHECK_STEPS, LOSS_WITHIN, PARAMS_WITHIN = 5, 1e-5, 1e-4


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        name: as shown.
        config: the architecture.
        batch: samples per step, of `config.max_seq` tokens.
    """

    name: str
    config: gpt.GPTConfig
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.config.max_seq

    def flops_per_token(self, *, whole: bool = False) -> int:
        """FLOPs of forward and backward by the formula above; `whole`: 12 L H D T in it."""
        return gpt.flops_per_token(self.config, self.config.max_seq, whole=whole)


def shapes(tiny: bool, batch: int) -> dict[str, Shape]:
    """The shapes to measure, by name."""
    bf16 = {"dtype": "bfloat16"}
    if tiny:
        config = decoder(512, 2, 64, 4, 64, mlp=128, num_kv_heads=2, **bf16)
        return {"tiny": Shape("tiny", config, batch)}
    small = decoder(131072, 24, 2048, 16, 4096, mlp=5504, **bf16)
    large = decoder(8192, 4, 4096, 32, 4096, mlp=14336, num_kv_heads=8, **bf16)
    found = [Shape("1.7B", small, batch), Shape("4 layers of 8B", large, batch)]
    return {shape.name: shape for shape in found}


def maker(name: str) -> Callable[..., Step]:
    """``(config, batch, device=...) -> step`` of the program of this name."""
    return {
        "functron jit": partial(mesh_step, mesh=Mesh(), compile_with=partial(jit, donate=0)),
        "functron graph": partial(
            mesh_step, mesh=Mesh(), compile_with=partial(jit, donate=0, graph=True)
        ),
        "functron eager": partial(mesh_step, mesh=Mesh()),
        "functron fused": fused_step,
        "torch.compile": partial(plain_step, compiled=True),
        "Hugging Face": partial(hugging_face_step, compiled=False),
        "Hugging Face compiled": partial(hugging_face_step, compiled=True),
        "Hugging Face Liger": partial(hugging_face_step, compiled=False, liger=True),
    }[name]


def fused_step(c: gpt.GPTConfig, batch: dict, device: str) -> Step:
    """`functron jit` with one matrix for queries, keys and values, and one for gate and up."""
    c = replace(c, fused_projections=True)
    return mesh_step(c, batch, Mesh(), device=device, compile_with=partial(jit, donate=0))


@dataclass
class Result:
    """One program on one shape and what was measured of it.

    Attributes:
        name: of the program.
        shape: what it ran.
        failure: why there is no more; empty where there is.
        device: the device's name.
        device_flops: its peak, FLOP/s in bfloat16.
        losses: of the first steps.
        first: seconds of the first call.
        times: seconds of the timed steps.
        memory: bytes of the device at most while taking the timed steps; on a CPU, by which the
            process grew.
    """

    name: str
    shape: Shape
    failure: str = ""
    device: str = ""
    device_flops: float = 0.0
    losses: list[float] = field(default_factory=list)
    first: float = 0.0
    times: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.times)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.shape.tokens / self.seconds


def serve(name: str, shape: Shape, args: argparse.Namespace) -> dict:
    """The program's side: build it, take the steps, and say what was measured."""
    device, cuda = args.device, args.device == "cuda"
    before = measure.resident("VmRSS")
    c = shape.config
    step = maker(name)(c, make_batch(c.vocab_size, shape.batch, c.max_seq, device), device=device)
    if cuda:
        torch.cuda.empty_cache()  # what drawing the initial weights took
    losses, times = [], []
    for i in range(WARM_UP + args.steps):
        if i == WARM_UP:
            torch.cuda.reset_peak_memory_stats() if cuda else measure.reset_peak()
        synchronize(device)
        begun = time.perf_counter()
        losses.append(step())
        synchronize(device)
        times.append(time.perf_counter() - begun)
    memory = torch.cuda.max_memory_allocated() if cuda else measure.resident("VmHWM") - before
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "device_flops": peak_flops(device, torch.bfloat16),
        "losses": losses[:WARM_UP],
        "first": times[0],
        "times": times[WARM_UP:],
        "memory": memory,
    }


def synchronize(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measured(name: str, shape: Shape, args: argparse.Namespace, limit: float) -> Result:
    """The program in a process of its own, which is ended after `limit` s.

    Its caches of compiled code are empty, unless ``args.warm``.
    """
    own = ["--serve", name, "--shape", shape.name, "--device", args.device]
    own += [f"--steps={args.steps}", f"--batch={shape.batch}", *(["--tiny"] if args.tiny else [])]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        answer = Path(folder) / "answer.json"
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
        caches = () if args.warm else caches
        process = subprocess.Popen(
            [sys.executable, __file__, *own, "--answer", str(answer)],
            stdout=errors, stderr=errors, start_new_session=True,
            env=os.environ | {cache: os.path.join(folder, cache) for cache in caches},
        )  # fmt: skip
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return Result(name, shape, f"ended after {limit:.0f} s (out of time)")
        finally:
            end(process)
        if answer.exists():
            return Result(name, shape, **json.loads(answer.read_text()))
        errors.seek(0)
        return Result(name, shape, measure.reason(errors.read()))


def end(process: subprocess.Popen) -> None:
    """End the program and what it started: compilers that outlive it would take time of others."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(chosen: Sequence[Shape], names: Sequence[str], args: argparse.Namespace) -> list[Result]:
    """Every program on every shape, as far as the budget lasts."""
    ends = time.monotonic() + args.budget
    results = []
    for name in names:
        for shape in chosen:
            left = ends - time.monotonic()
            begun = time.monotonic()
            if left < START_SECONDS:
                result = Result(name, shape, OUT_OF_TIME)
            else:
                result = measured(name, shape, args, min(left, args.limit))
            results.append(result)
            said = result.failure or f"{1e3 * result.seconds:.1f} ms a step"
            took = time.monotonic() - begun
            print(f"  {shape.name}, {name}: {said} ({took:.0f} s in all)", flush=True)
    return results


def table(shape: Shape, results: list[Result], device_flops: float) -> bool:
    """Print the rows of one shape; whether functron ran and all computed the same losses."""
    done = [r for r in results if not r.failure]
    peers = [r for r in done if not r.name.startswith("functron")]
    best = max((r.rate for r in peers), default=0.0)
    heads = ("tokens/s", "x best peer", "step ms", "peak GiB", "compile s", "MFU", "MFU (whole)")
    print(f"\n{shape.name}: {shape.batch} x {shape.config.max_seq} tokens a step, ", end="")
    flops, whole = shape.flops_per_token(), shape.flops_per_token(whole=True)
    print(f"{flops / 1e9:.4g} GFLOP per token ({whole / 1e9:.4g} with whole attention)")
    print(f"{'program':22}" + "".join(f"{head:>12}" for head in heads))
    for r in results:
        if r.failure:
            print(f"{r.name:22}  {r.failure}")
            continue
        relative = f"{r.rate / best:12.3f}" if best else f"{'-':>12}"
        mfu, of_whole = (r.rate * each / device_flops for each in (flops, whole))
        print(
            f"{r.name:22}{r.rate:12.0f}{relative}{1e3 * r.seconds:12.1f}{r.memory / 2**30:12.2f}"
            f"{r.first - r.seconds:12.1f}{mfu:12.1%}{of_whole:12.1%}"
        )
    print("losses of the first steps:")
    for r in done:
        print(f"{r.name:22}" + "".join(f"{loss:12.5f}" for loss in r.losses))
    wrong = measure.disagreement({r.name: r.losses for r in done}, WARM_UP, AGREE_WITHIN)
    if wrong:
        print("NOT THE SAME PROGRAM: losses differ", *wrong, sep="\n  ")
    return not wrong and not any(r.failure and r.name.startswith("functron") for r in results)


def check(device: str) -> bool:
    """Print by how much compiled and eager steps differ in float32; whether it is little."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    c = decoder(512, 4, 256, 8, 128, mlp=512, num_kv_heads=2)
    batch = make_batch(c.vocab_size, 4, c.max_seq, device)
    train, want = training(c, Mesh(), device=device)
    got = tree.map(torch.clone, want)
    initial = [leaf.clone() for leaf in tree.leaves(want.params)]
    compiled = jit(train, donate=0)
    good = True
    for i in range(CHECK_STEPS):
        want, eager = train(want, batch)
        got, ours = compiled(got, batch)
        losses = eager["loss"].item(), ours["loss"].item()
        off = abs(losses[1] - losses[0]) / abs(losses[0])
        good &= off <= LOSS_WITHIN
        print(f"step {i}: loss eager {losses[0]:.7f}, compiled {losses[1]:.7f}, off by {off:.1e}")
    leaves = [tree.leaves(state.params) for state in (got, want)]
    differences = [
        (a - b).double().norm() / b.double().norm() for a, b in zip(*leaves, strict=True)
    ]
    moved = [
        (b - a).double().norm() / b.double().norm() for a, b in zip(initial, leaves[1], strict=True)
    ]
    print(f"parameters: off by {max(differences):.1e}, and moved by {min(moved):.1e} at least")
    good &= bool(max(differences) <= PARAMS_WITHIN)
    print("compiled and eager steps agree" if good else "COMPILED AND EAGER STEPS DIFFER")
    return good


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="one small shape, to test this script")
    parser.add_argument("--check", action="store_true", help="compiled against eager, in float32")
    parser.add_argument("--only", default="", help=f"programs, of: {', '.join(PROGRAMS)}")
    parser.add_argument("--shape", default="", help=f"shapes, of: {', '.join(shapes(False, 1))}")
    parser.add_argument("--batch", type=int, default=4, help="samples a step")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--budget", type=float, help="seconds for all programs")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one program")
    parser.add_argument(
        "--warm", action="store_true", help="with the code that is compiled already"
    )
    parser.add_argument("--peak-tflops", type=float, help="of the device; default: by its name")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.budget = args.budget or (TINY_BUDGET if args.tiny else BUDGET)
    return args


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        return print("skipped: torch finds no CUDA device; --device cpu --tiny tests the script")
    if args.check:
        sys.exit(0 if check(args.device) else 1)
    known = shapes(args.tiny, args.batch)
    wanted = args.shape.split(",") if args.shape else list(known)
    if unknown := sorted({*wanted} - {*known}):
        sys.exit(f"--shape: got {unknown}; wanted some of {list(known)}")
    chosen = [known[name] for name in wanted]
    if args.serve:
        args.answer.write_text(json.dumps(serve(args.serve, chosen[0], args)))
        return None
    # the tiny run is there to run much code, so what needs no compiler comes before what does
    order = sorted(PROGRAMS, key=lambda name: "compile" in name) if args.tiny else PROGRAMS
    names = args.only.split(",") if args.only else order
    if unknown := sorted({*names} - {*PROGRAMS}):
        sys.exit(f"--only: got {unknown}; wanted some of {list(PROGRAMS)}")
    results = run(chosen, names, args)
    done = [r for r in results if not r.failure]
    if not done:
        sys.exit("no program ran")
    peak = 1e12 * args.peak_tflops if args.peak_tflops else done[0].device_flops
    print(
        f"\n{done[0].device}, peak {peak / 1e12:.4g} TFLOP/s, torch {torch.__version__}, ", end=""
    )
    print(f"Python {platform.python_version()}, {datetime.date.today()}")
    good = [table(s, [r for r in results if r.shape is s], peak) for s in chosen]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
