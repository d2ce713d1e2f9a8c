"""benchmarks/first_gpu.py on the stand-in, from end to end: nothing fails there but numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import first_gpu

pytestmark = pytest.mark.fake_gpu
UNSEEN = {"kernels"}
"""The rows that are left out here: the profiler sees what a card does."""


def test_every_part_ends_with_rows(tmp_path):
    out = tmp_path / "first.json"
    # many times the seconds of a GPU, which has more than two processors
    options = ["--tiny", "--seconds", "3000", "--out", str(out)]
    command = [sys.executable, first_gpu.__file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode in (0, 1), done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(first_gpu.PARTS)
    problems = []
    for name, part in parts.items():
        if part["state"] not in ("done", "wrong"):
            problems.append(f"{name}: {part['state']}: {part.get('why')}\n{part.get('output')}")
        for row in part.get("rows", ()):
            state = row.get("state", "done")
            if state == "failed" or (state == "skipped" and row["row"] not in UNSEEN):
                problems.append(f"{name}, {row['row']}: {row.get('why')}")
            assert f"| {name} | {row['row'].replace('|', '/')[:300]} | {state} |" in done.stdout
    assert not problems, "\n".join(problems)
    assert all(part["rows"] for part in parts.values())


def test_a_step_that_waits_is_an_error():
    import first_gpu_parts  # which looks for the card

    args = first_gpu.parse(["--tiny"])
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), first_gpu_parts.not_waiting(args):
        x.item()
    x.item()
