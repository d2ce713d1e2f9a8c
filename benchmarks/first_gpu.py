"""The lessons of a first GPU, in one command of nine minutes: one JSON file and one table.

    python benchmarks/first_gpu.py        from the source tree; torch, NumPy and optree are enough
    python benchmarks/first_gpu.py --device cpu --tiny    the same code where there is no GPU

Parts run one after the other, each in a process and a time of its own. One that fails leaves its
traceback, and the others go on; the file is written after every part. Send it with a report.
`--cache FOLDER` has compiled code, of Inductor and of our kernels; taken along from call to call,
and filled beforehand (benchmarks/README.md), it leaves the time to what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOTAL = 540.0
"""Seconds for everything; a part is not begun with less than `LEAST` left."""
LEAST = 8.0
ENDED = "it was ended"
PARTS = {
    "facts": 30.0, "conformance": 60.0, "tests": 120.0, "train": 50.0, "offload": 40.0,
    "profile": 80.0, "graph": 50.0, "fused": 50.0, "fp8": 50.0, "peer": 70.0,
}  # fmt: skip
"""In their order, with the seconds of `TOTAL` that each has, beside what those before have left."""


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write JSON, so that the file is whole at all times."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(found, indent=1))
    unfinished.replace(path)


def attempt(name: str, args: argparse.Namespace, out: Path | None = None) -> dict:
    """A part in this process: its state, rows, and why it ended early; `out` is kept up to date."""
    begun, rows = time.monotonic(), []
    args = argparse.Namespace(**vars(args), ends=begun + args.seconds)
    found: dict[str, Any] = {"state": "failed", "why": ENDED, "rows": rows}

    def say() -> dict:
        found["seconds"] = round(time.monotonic() - begun, 1)
        if out is not None:
            write(out, found)
        return found

    try:
        parts = importlib.import_module("ceilings" if name == "facts" else "first_gpu_parts")
        if args.cache and name != "facts":
            parts.share_kernels(args.cache)
        for one in getattr(parts, name)(args):
            rows.append(one)
            say()
        states = {one.get("state", "done") for one in rows}
        found["state"] = next((each for each in ("failed", "wrong") if each in states), "done")
        del found["why"]
    except SystemExit as reason:
        found |= {"state": "skipped", "why": str(reason).removeprefix("skip: ")}
    except Exception:
        found["why"] = traceback.format_exc()
    return say()


def in_process(name: str, args: argparse.Namespace, limit: float) -> dict:
    """A part in a process of its own, which is ended after `limit` seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--part", name, "--out", str(answer)]
        command += [f"--device={args.device}", f"--batch={args.batch}", f"--seconds={limit}"]
        command += [f"--cache={args.cache}"] if args.cache else []
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(args.cache / "inductor")} if args.cache else {}
        process = subprocess.Popen(
            [*command, *(["--tiny"] if args.tiny else [])],
            stdout=said, stderr=said, start_new_session=True, env=os.environ | caches,
        )  # fmt: skip
        try:
            process.wait(timeout=limit)
            why = f"it ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"ended after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = {"state": "failed", "why": ENDED}
        if answer.exists():
            found = json.loads(answer.read_text())
        if found.get("why") == ENDED:
            found["why"] = why
        said.seek(0)
        found["output"] = said.read()[-4000:]
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def show(value: Any) -> str:
    """A figure in a cell of the table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        ends = value if len(value) < 3 else [value[0], "..", value[-1]]
        return " ".join(map(show, ends))
    return str(value)


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each part and each of its rows, in Markdown."""
    lines = ["| part | row | state | figures |", "|---|---|---|---|"]
    for name, part in found.items():
        own = {
            "row": f"{part['seconds']:.0f} s",
            "state": part["state"],
            "why": part.get("why", ""),
        }
        for one in (own, *part.get("rows", ())):
            said = str(one.get("why", "")).strip().splitlines()
            # of pytest's tracebacks the line that says what was wrong, of Python's the last
            why = [line[1:].strip() for line in said if line.startswith("E  ")][:1] or said[-1:]
            figures = [
                f"{key} {show(value)}"
                for key, value in one.items()
                if key not in ("row", "state", "why") and value not in ([], "")
                and not (isinstance(value, list) and isinstance(value[0], dict))
            ]  # fmt: skip
            cells = name, one["row"], one.get("state", "done"), "; ".join([*why, *figures])
            lines.append(f"| {' | '.join(cell.replace('|', '/')[:300] for cell in cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this script")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("first_gpu.json"), help="the file")
    parser.add_argument("--cache", type=Path, help="folder of compiled code, which is kept")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for everything")
    parser.add_argument("--batch", type=int, default=4, help="samples a step")
    parser.add_argument("--here", action="store_true", help="parts in this process, for debuggers")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed, or has other numbers than it should."""
    args = parse(arguments)
    if args.part:
        attempt(args.part, args, args.out)
        return 0
    chosen = args.only.split(",")
    if unknown := sorted({*chosen} - {*PARTS}):
        sys.exit(f"--only: got {unknown}; wanted some of {list(PARTS)}")
    args.cache = args.cache and args.cache.absolute()
    begun, found, given = time.monotonic(), {}, 0.0
    about = {"date": str(datetime.date.today()), "device": args.device, "tiny": args.tiny}
    for name in chosen:
        share, passed = PARTS[name] * args.seconds / TOTAL, time.monotonic() - begun
        # what those before have left, but for tests, which would take all of it
        spare = 0.0 if name == "tests" else max(0.0, given - passed)
        limit, given = min(share + spare, args.seconds - passed), given + share
        if limit < LEAST:
            found[name] = {"state": "skipped", "why": "out of time", "seconds": 0.0}
        else:
            found[name] = attempt(name, args) if args.here else in_process(name, args, limit)
        print(f"{name}: {found[name]['state']} ({found[name]['seconds']:.0f} s)", flush=True)
        write(args.out, about | {"parts": found})
    print(f"\n{table(found)}\n\nall of it: {args.out}")
    return int(any(part["state"] in ("failed", "wrong") for part in found.values()))


sys.path[:0] = [str(HERE)] if str(HERE) not in sys.path else []
if importlib.util.find_spec("functron") is None:  # a checkout that is not installed
    sys.path.insert(0, str(HERE.parent))

if __name__ == "__main__":
    sys.exit(main())
