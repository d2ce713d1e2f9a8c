"""A profiler's view of steps: kernels by time, gaps between them, attention."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ATTENTION = ("flash", "fmha", "attention", "sdpa", "cudnn")
"""Parts of the names of all attention kernels that torch may choose."""
STEPS, TOP = 3, 40


def trace_steps(take: Callable, state: Any, device: str) -> list[Mapping[str, Any]]:
    """The events of `STEPS` steps, of which each takes the state of the one before."""
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if device == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[kind]) as traced:
        for _ in range(STEPS):
            state = take(state)
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


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
    if not rows:
        return {}
    by_name: dict[str, list[float]] = {}
    for start, stop, name in rows:
        by_name.setdefault(name, []).append(stop - start)
    gaps, last = [], rows[0]
    for each in rows[1:]:
        if each[0] > last[1]:
            gaps.append({"us": each[0] - last[1], "after": last[2], "before": each[2]})
        last = max(last, each, key=lambda r: r[1])
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
