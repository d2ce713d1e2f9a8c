"""Kernels on a GPU: how near to what memory allows, and against Inductor, torch and Liger-Kernel.

    python benchmarks/kernels.py        everything, in less than 9 minutes
    python benchmarks/kernels.py --device cpu --tiny    the same code where there is no GPU

The floor of a kernel is the time that reading its operands and writing its results would take at
the bandwidth at which this run copies a gigabyte. Times are medians of CUDA events around a call,
with nothing of it in the L2 cache and the call enqueued before the GPU gets to it. Inductor
compiles the op's reference. It prints rows of the table in kernels/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if importlib.util.find_spec("functron") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from kernel_case import FULL, TINY, Clock, Given, bandwidth, difference, liger
from kernel_cases import CASES
from torch.nn import functional as F

from functron import ops
from functron.nn.loss import cross_entropy
from functron.ops.cross_entropy import linear_log_sum_exp_and_target
from functron.ops.launch import usable

BUDGET = 480.0
"""Seconds for everything; what is left when they are over is not compiled by Inductor."""
REPEATS = 20
AGREE_WITHIN = 2e-2
"""Of norms, relative: results are rounded to bfloat16, or to 8 bits."""
OF_COPY, OF_INDUCTOR, OF_LIGER, OF_MEMORY = 0.8, 1.2, 1.0, 0.15
"""The targets: of the bandwidth of a copy, times as fast as, and of the memory of logits."""


@dataclass
class Row:
    """The measurements of a kernel.

    Attributes:
        name: as shown.
        shape: of its operands.
        floor: bytes to read and write.
        seconds: of a call; 0 where it failed.
        off: the relative difference from the reference, in norm.
        others: seconds of the others by their names, or why there are none.
        failure: of the kernel itself.
    """

    name: str
    shape: str = ""
    floor: int = 0
    seconds: float = 0.0
    off: float = 0.0
    others: dict[str, float | str] = field(default_factory=dict)
    failure: str = ""


def attempt(measured: Callable[[], float]) -> float | str:
    """Its result, or in a few words why it raises."""
    try:
        return measured()
    except Exception as error:  # of another library: it must not end the run
        return f"failed ({type(error).__name__})"


def measure(name: str, given: Given, clock: Clock) -> Row:
    """The kernel, and what needs no compiling."""
    row = Row(name)
    try:
        case = CASES[name](given)
        row.shape, row.floor = case.shape, case.floor
        row.off = difference(case)
        row.seconds = clock.median(lambda: case.op.raw(*case.args))
    except Exception as error:
        row.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return row
    for other, program in (("torch", case.builtin), ("Liger", case.liger)):
        if program is not None:
            row.others[other] = attempt(lambda run=program: clock.median(run))
    return row


def measure_inductor(row: Row, given: Given, clock: Clock, backend: str) -> None:
    """The op's reference, compiled."""
    case = CASES[row.name](given)
    torch.compiler.reset()
    compiled = torch.compile(case.op.reference, dynamic=False, backend=backend)
    row.others["Inductor"] = attempt(lambda: clock.median(lambda: compiled(*case.args)))


@dataclass
class Memory:
    """A loss of x w, forward and backward.

    Attributes:
        name: as shown.
        peak: bytes at most beyond the operands; why not, where it failed.
        seconds: of forward and backward.
    """

    name: str
    peak: float | str
    seconds: float | str


def linear_cross_entropy(given: Given, clock: Clock) -> list[Memory]:
    """Cross-entropy of x w: memory and time of fused ones, and of those that keep logits."""
    rows, dim, vocab = 2 * given.sizes.logit_rows, given.sizes.dim // 2, given.sizes.vocab
    x, w = given.normal(rows, dim), given.normal(dim, vocab) * dim**-0.5
    turned = w.mT.contiguous()
    ids = given.integers(vocab, rows)
    kernels = ops.use("kernel")

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        chunk = max(1, rows // 16)
        lse, target = linear_log_sum_exp_and_target(
            x, w, ids, None, chunk_tokens=chunk, kernels=kernels
        )
        return (lse - target).mean()

    def on_logits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x @ w, ids, vocab_size=vocab, kernels=kernels).mean()

    theirs: Any = liger("liger_fused_linear_cross_entropy")
    programs: dict[str, tuple[Callable | None, torch.Tensor]] = {
        "torch, float32 logits": (lambda x, w: F.cross_entropy((x @ w).float(), ids), w),
        "kernel on logits": (on_logits, w),
        "fused": (fused, w),
        "Liger, fused": (theirs and (lambda x, w: theirs(x, w, ids)), turned),
    }
    return [
        Memory(name, *(_of_loss(loss, (x, weight), clock) if loss else ("not installed", "")))
        for name, (loss, weight) in programs.items()
    ]


def _of_loss(
    loss: Callable, operands: tuple[torch.Tensor, ...], clock: Clock
) -> tuple[float | str, float | str]:
    cuda = clock.device.type == "cuda"
    leaves = [x.detach().requires_grad_() for x in operands]

    def run() -> Any:
        out = loss(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, leaves)

    def peak() -> float:
        if not cuda:
            run()
            return 0.0
        run()
        release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return float(torch.cuda.max_memory_allocated() - before)

    memory = attempt(peak)
    return memory, attempt(lambda: clock.median(run)) if isinstance(memory, float) else ""


def release() -> None:
    """Free what is left of earlier cases."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def milliseconds(value: float | str | None) -> str:
    """A time as shown."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{1e3 * value:.3f}"


def table(rows: Sequence[Row], copies: float, has_liger: bool) -> str:
    """The rows as Markdown."""
    heads = ("kernel", "shape", "floor ms", "ms", "of copy", "Inductor ms", "torch ms", "Liger ms")
    lines = [f"| {' | '.join(heads)} | off by |", "|" + "---|" * (len(heads) + 1)]
    for row in rows:
        if row.failure:
            lines.append(f"| {row.name} | {row.shape} | {row.failure} |")
            continue
        floor = row.floor / copies
        theirs = [milliseconds(row.others.get(name)) for name in ("Inductor", "torch", "Liger")]
        theirs[2] = theirs[2] if has_liger else "not installed"
        ours = [milliseconds(floor), milliseconds(row.seconds), f"{floor / row.seconds:.0%}"]
        cells = [row.name, row.shape, *ours, *theirs, f"{row.off:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def misses(rows: Sequence[Row], copies: float, memories: Sequence[Memory]) -> list[str]:
    """Which targets were missed, by which kernels."""
    found = []
    for row in (row for row in rows if not row.failure):
        fraction = row.floor / copies / row.seconds
        if fraction < OF_COPY:
            found.append(f"{row.name}: {fraction:.0%} of the copy's bandwidth")
        for name, factor in (("Inductor", OF_INDUCTOR), ("Liger", OF_LIGER)):
            other = row.others.get(name)
            if isinstance(other, float) and other < factor * row.seconds:
                found.append(f"{row.name}: {other / row.seconds:.2f}x as fast as {name}")
    peaks = {memory.name: memory.peak for memory in memories}
    logits, fused = peaks.get("torch, float32 logits"), peaks.get("fused")
    if isinstance(logits, float) and isinstance(fused, float) and fused > OF_MEMORY * logits > 0:
        found.append(f"fused linear + cross-entropy: {fused / logits:.0%} of the memory of logits")
    return found


def report(
    rows: Sequence[Row], copies: float, memories: Sequence[Memory], given: Given, cuda: bool
) -> bool:
    """Print everything; whether all kernels ran and agree with their references."""
    name = torch.cuda.get_device_name() if cuda else platform.machine()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    print(
        f"\n{name}, {given.dtype}, copies at {copies / 1e9:.0f} GB/s, torch {torch.__version__}, "
    )
    print(f"Python {platform.python_version()}, {datetime.date.today()}\n")
    print(table(rows, copies, has_liger))
    sizes = given.sizes
    shape = f"{2 * sizes.logit_rows} x {sizes.dim // 2} x {sizes.vocab}"
    print(f"\nlinear + cross-entropy, forward and backward, {shape}:\n")
    print("| program | peak GiB beyond operands | ms |\n|---|---|---|")
    for memory in memories:
        peak = memory.peak if isinstance(memory.peak, str) else f"{memory.peak / 2**30:.2f}"
        print(f"| {memory.name} | {peak} | {milliseconds(memory.seconds)} |")
    if cuda:
        missed = misses(rows, copies, memories)
        print("\nall targets met" if not missed else "\ntargets missed:", *missed, sep="\n  ")
    wrong = [
        f"{r.name}: {r.failure or r.off}" for r in rows if r.failure or not r.off < AGREE_WITHIN
    ]
    if wrong:
        print("\nFAILED, OR NOT THE REFERENCE'S RESULT:", *wrong, sep="\n  ")
    return not wrong


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small operands, to test this script")
    parser.add_argument(
        "--only", default="", help="cases whose names begin so, separated by commas"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    return parser.parse_args()


def main() -> None:
    args = parse()
    begun = time.monotonic()
    device = torch.device(args.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return print(
                "skipped: torch finds no CUDA device; --device cpu --tiny tests the script"
            )
        if reason := usable(torch.device("cuda", 0)):
            return print(f"skipped: kernels cannot be used here: {reason}")
    begins = tuple(args.only.split(","))
    names = [name for name in CASES if name.startswith(begins)]
    if not names:
        sys.exit(f"--only: got {args.only}; wanted the beginnings of some of {list(CASES)}")
    given = Given(TINY if args.tiny else FULL, getattr(torch, args.dtype), device)
    clock = Clock(device, 2 if args.tiny else REPEATS)
    copies = bandwidth(clock, args.tiny)
    rows = []
    for name in names:
        rows.append(measure(name, given, clock))
        release()
        said = rows[-1].failure or f"{milliseconds(rows[-1].seconds)} ms"
        print(f"  {name}: {said} ({time.monotonic() - begun:.0f} s)", flush=True)
    memories = linear_cross_entropy(given, clock)
    release()
    backend = "eager" if args.tiny else "inductor"
    for row in (row for row in rows if not row.failure):
        if time.monotonic() - begun > args.budget:
            row.others["Inductor"] = "not run (out of time)"
            continue
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            measure_inductor(row, given, clock, backend)
        release()
        said = milliseconds(row.others.get("Inductor"))
        print(f"  {row.name}, Inductor: {said} ms ({time.monotonic() - begun:.0f} s)", flush=True)
    sys.exit(0 if report(rows, copies, memories, given, device.type == "cuda") else 1)


if __name__ == "__main__":
    main()
