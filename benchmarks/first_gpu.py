"""The lessons of a first GPU, in one command of under nine minutes: one JSON file and one table.

    python benchmarks/first_gpu.py        from the source tree; torch, NumPy and optree are enough
    python benchmarks/first_gpu.py --device cpu --tiny    the same code where there is no GPU

Parts run one after the other, each in a process and a time of its own. One that fails leaves its
traceback, and the others go on; the file is written after every part. Send it with a report.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
TOTAL = 520.0
"""Seconds for everything; a part is not begun with less than `LEAST` left."""
LEAST, GRACE = 8.0, 15.0
KERNELS = ("rms_norm + residual", "swiglu", "cross_entropy and backward",
           "qk_norm + rope", "adamw, float32 master")  # fmt: skip
WITHIN = {"bfloat16": 5e-3, "float32": 1e-5}
"""Of norms, relative, by which a kernel may be off its reference."""
PROGRAMS = ("functron jit", "torch.compile", "functron graph", "Hugging Face Liger",
            "Hugging Face compiled", "functron fused")  # fmt: skip
ATTENTION = ("flash", "fmha", "attention", "sdpa", "cudnn")
"""Parts of the names of all attention kernels that torch may choose."""
STEPS, TOP = 3, 40


# --- the parts: each returns what JSON holds, or ends with SystemExit: why it is skipped


def doctor(args: argparse.Namespace) -> dict:
    """The facts of this machine and this installation."""
    import torch

    found = {"torch": torch.__version__, "python": platform.python_version()}
    if args.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    if importlib.util.find_spec("tyro") is None:
        return found | {"doctor": "skipped: it needs tyro"}
    from functron.cli.doctor import run_checks

    return found | {one.name: f"{one.state}: {one.found}" for one in run_checks()}


def check(args: argparse.Namespace) -> dict:
    """Whether compiled and eager steps agree in float32: `gpu.py --check`."""
    if args.tiny:
        raise SystemExit("skip: it compiles for a minute; gpu.py --check --device cpu does it")
    import gpu

    assert gpu.check(args.device), "compiled and eager steps differ"
    return {"agree": True}


def conformance(args: argparse.Namespace) -> dict:
    """By how much the most used kernels are off their references, at sizes that fit and do not."""
    import torch
    from kernel_case import ODD, TINY, Given, difference
    from kernel_cases import CASES

    off, wrong = {}, []
    for name in KERNELS:
        for dtype, within in WITHIN.items():
            for title, sizes in (("tiny", TINY), ("odd", ODD)):
                at = f"{name}, {dtype}, {title}"
                given = Given(sizes, getattr(torch, dtype), torch.device(args.device))
                off[at] = difference(CASES[name](given))
                if not off[at] <= within:
                    wrong.append(f"{at}: off by {off[at]:.1e}; wanted {within:.0e}")
    assert not wrong, "\n".join(wrong)
    return off


def profile(args: argparse.Namespace) -> dict:
    """Three steps by kernels, and the memory of them against what the program promises."""
    import gpu
    import torch
    from peers.functron_steps import training

    import functron as ft

    cuda = args.device == "cuda"
    shape = list(gpu.shapes(args.tiny, args.batch).values())[-1]
    c = shape.config
    train, state = training(c, ft.Mesh(), device=args.device)
    batch = gpu.make_batch(c.vocab_size, shape.batch, c.max_seq, args.device)
    promised = ft.trace(train, donate=0)(state, batch).memory().peak_bytes
    step = train if args.tiny else gpu.jit(train, donate=0)
    for _ in range(1 if args.tiny else 3):
        state, _ = step(state, batch)
    gpu.synchronize(args.device)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as traced:
        for _ in range(STEPS):
            state, _ = step(state, batch)
        gpu.synchronize(args.device)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        traced.export_chrome_trace(file)
        with open(file) as text:
            events = json.load(text)["traceEvents"]
    found = {"shape": shape.name, "promised_bytes": promised, **kernels_of(events, cuda)}
    if cuda:
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak_bytes": peak, "peak_of_promised": peak / promised}
    return found


def kernels_of(events: Sequence[Mapping[str, Any]], cuda: bool = True) -> dict:
    """A profiler's trace of `STEPS` steps: kernels by time, gaps between, attention.

    Args:
        events: those of a Chrome trace, in microseconds.
        cuda: look at what a GPU did; else at calls on the host.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    rows = [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in events
        if e.get("cat") in kinds and e.get("ph") == "X"
    ]
    rows.sort()
    assert rows, "the profiler saw nothing"
    by_name: dict[str, list[float]] = {}
    for start, stop, name in rows:
        by_name.setdefault(name, []).append(stop - start)
    gaps, last = [], rows[0]
    for row in rows[1:]:
        if row[0] > last[1]:
            gaps.append({"us": row[0] - last[1], "after": last[2], "before": row[2]})
        last = max(last, row, key=lambda r: r[1])
    span, idle = last[1] - rows[0][0], sum(gap["us"] for gap in gaps)
    gaps.sort(key=lambda gap: -gap["us"])
    total = sum(sum(times) for times in by_name.values())
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "step_ms": span / STEPS / 1e3,
        "launches_per_step": len(rows) / STEPS,
        "idle_share": idle / span,
        "gaps": gaps[:10],
        "attention": sorted(n for n in by_name if any(word in n.lower() for word in ATTENTION)),
        "top": [
            {
                "name": name,
                "per_step": len(times) / STEPS,
                "ms_per_step": sum(times) / STEPS / 1e3,
                "share": sum(times) / total,
            }
            for name, times in top
        ],
    }


def steps(args: argparse.Namespace) -> dict:
    """Training steps against torch.compile and Hugging Face, with and without Liger: `gpu.py`."""
    import gpu

    shapes = list(gpu.shapes(args.tiny, args.batch).values())[::-1]  # 8B's layers first
    if args.tiny:
        name = "functron eager"
        results = [gpu.Result(name, shapes[0], **gpu.serve(name, shapes[0], args))]
    else:
        results = gpu.run(shapes, PROGRAMS, args)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        mine = [r for r in results if r.shape is shape]
        peers = [r.rate for r in mine if not r.failure and not r.name.startswith("functron")]
        for r in mine:
            row: dict[str, Any] = {"shape": shape.name, "program": r.name}
            if r.failure:
                rows.append(row | {"failure": r.failure})
                continue
            row |= {"ms": 1e3 * r.seconds, "tokens_per_s": r.rate, "compile_s": r.first - r.seconds}
            row |= {"peak_gib": r.memory / 2**30, "losses": r.losses}
            row["mfu"] = r.rate * shape.flops_per_token() / r.device_flops
            rows.append(row | ({"of_best_peer": r.rate / max(peers)} if peers else {}))
        done = {r.name: r.losses for r in mine if not r.failure}
        if wrong := gpu.measure.disagreement(done, gpu.WARM_UP, gpu.AGREE_WITHIN):
            rows.append({"shape": shape.name, "NOT THE SAME PROGRAM": wrong})
    return {"programs": rows}


def bandwidth(args: argparse.Namespace) -> dict:
    """Five kernels against the time in which a copy moves as many bytes: `kernels.py`."""
    import torch

    kernels: Any = importlib.import_module("kernels")  # of this folder, not the sources

    device = torch.device(args.device)
    given = kernels.Given(kernels.TINY if args.tiny else kernels.FULL, torch.bfloat16, device)
    clock = kernels.Clock(device, 2 if args.tiny else kernels.REPEATS)
    copies = kernels.bandwidth(clock, args.tiny)
    found: dict[str, Any] = {"copy_gb_per_s": copies / 1e9}
    for name in KERNELS:
        row = kernels.measure(name, given, clock)
        kernels.release()
        times = {other: 1e3 * s if isinstance(s, float) else s for other, s in row.others.items()}
        found[name] = {"failure": row.failure} if row.failure else {
            "ms": 1e3 * row.seconds, "of_copy": row.floor / copies / row.seconds,
            "off": row.off, "others_ms": times,
        }  # fmt: skip
    return found


class Part(NamedTuple):
    """The parts that are run, and the seconds that each may take on a GPU."""

    run: Callable[[argparse.Namespace], dict]
    seconds: float


PARTS: dict[str, Part] = {
    "doctor": Part(doctor, 40),
    "check": Part(check, 90),
    "conformance": Part(conformance, 70),
    "profile": Part(profile, 100),
    "bandwidth": Part(bandwidth, 70),
    "steps": Part(steps, 400),
}
"""In order of importance, the last as long as there is time."""


# --- running them


def attempt(name: str, args: argparse.Namespace) -> dict:
    """A part in this process: its state, and its result or why there is none."""
    begun = time.monotonic()
    try:
        found: dict[str, Any] = {"state": "done", "result": PARTS[name].run(args)}
    except SystemExit as reason:
        found = {"state": "skipped", "why": str(reason).removeprefix("skip: ")}
    except Exception:
        found = {"state": "failed", "why": traceback.format_exc()}
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def in_process(name: str, args: argparse.Namespace, limit: float) -> dict:
    """A part in a process of its own, which is ended after `limit` seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(answer)]
        command += [f"--device={args.device}", f"--batch={args.batch}", f"--budget={limit - GRACE}"]
        process = subprocess.Popen(
            [*command, *(["--tiny"] if args.tiny else [])],
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=limit)
            found = {"state": "failed", "why": f"it ended with {process.returncode}"}
        except subprocess.TimeoutExpired:
            found = {"state": "failed", "why": f"ended after {limit:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if answer.exists():
            found = json.loads(answer.read_text())
        said.seek(0)
        found["output"] = said.read()[-4000:]
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The parts as rows, and below them what they found."""
    lines = ["", f"{'part':14}{'s':>7}  state"]
    for name, part in found.items():
        why = str(part.get("why", "")).strip().splitlines()
        lines.append(f"{name:14}{part['seconds']:7.1f}  {': '.join([part['state'], *why[-1:]])}")
    result = {name: part.get("result") or {} for name, part in found.items()}
    lines += [f"{name}: {text}" for name, text in result.get("doctor", {}).items()]
    if rows := result.get("profile"):
        lines.append(
            f"\n{rows['shape']}: {rows['step_ms']:.2f} ms and {rows['launches_per_step']:.0f} "
            f"launches a step, idle {rows['idle_share']:.1%}, attention by {rows['attention']}"
        )
        if "peak_bytes" in rows:
            lines.append(f"memory: {rows['peak_of_promised']:.3f} of what the program promises")
        for r in rows["top"]:
            lines.append(f"{r['ms_per_step']:10.3f} ms {r['share']:6.1%}  {r['name'][:90]}")
    if rows := result.get("bandwidth"):
        lines.append(f"\na copy moves {rows['copy_gb_per_s']:.0f} GB/s")
        lines += [
            f"{name:30}"
            + (row.get("failure") or f"{row['ms']:9.3f} ms {row['of_copy']:6.0%} of it")
            for name, row in rows.items()
            if isinstance(row, dict)
        ]
    if rows := result.get("steps"):
        lines.append("")
        for r in rows["programs"]:
            title = f"{r['shape']:16} {r.get('program', ''):22}"
            if "ms" not in r:
                lines.append(title + str(r.get("failure") or r))
                continue
            relative = f"{r['of_best_peer']:7.3f} x best peer" if "of_best_peer" in r else ""
            lines.append(f"{title}{r['ms']:9.1f} ms {r['mfu']:7.1%} MFU{relative}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, nothing compiled")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("first_gpu.json"), help="the file")
    parser.add_argument("--batch", type=int, default=4, help="samples a step")
    parser.add_argument("--here", action="store_true", help="parts in this process, for debuggers")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=TOTAL, help="seconds for everything")
    args = parser.parse_args(arguments)
    return argparse.Namespace(**vars(args), steps=2 if args.tiny else 8, limit=90.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed."""
    args = parse(arguments)
    if args.part:
        args.out.write_text(json.dumps(attempt(args.part, args)))
        return 0
    chosen = args.only.split(",")
    if unknown := sorted({*chosen} - {*PARTS}):
        sys.exit(f"--only: got {unknown}; wanted some of {list(PARTS)}")
    begun, found = time.monotonic(), {}
    for name in chosen:
        limit = min(PARTS[name].seconds, args.budget - (time.monotonic() - begun))
        if limit < LEAST:
            found[name] = {"state": "skipped", "why": "out of time", "seconds": 0.0}
        else:
            found[name] = attempt(name, args) if args.here else in_process(name, args, limit)
        print(f"{name}: {found[name]['state']} ({found[name]['seconds']:.0f} s)", flush=True)
        about = {"date": str(datetime.date.today()), "device": args.device, "tiny": args.tiny}
        args.out.write_text(json.dumps(about | {"parts": found}, indent=1))
    print(table(found), f"\nall of it: {args.out}")
    return int(any(part["state"] == "failed" for part in found.values()))


sys.path[:0] = [str(HERE)] if str(HERE) not in sys.path else []
if importlib.util.find_spec("functron") is None:  # a checkout that is not installed
    sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    sys.exit(main())
