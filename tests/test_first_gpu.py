"""benchmarks/first_gpu.py, as far as a CPU can run it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import first_gpu


@pytest.mark.parametrize(
    "chosen",
    [["profile", "check"], pytest.param([*first_gpu.PARTS], marks=pytest.mark.full)],
)
def test_parts_run_and_a_failing_one_leaves_its_traceback(chosen, tmp_path, monkeypatch, capsys):
    def fails(args):
        raise FloatingPointError("planted")

    monkeypatch.setitem(first_gpu.PARTS, "check", first_gpu.Part(fails, 90))
    out = tmp_path / "first.json"
    arguments = ["--device=cpu", "--tiny", "--here", f"--only={','.join(chosen)}", f"--out={out}"]
    assert first_gpu.main(arguments) == 1
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == chosen
    assert "FloatingPointError: planted" in parts["check"]["why"]
    assert {part["state"] for name, part in parts.items() if name != "check"} == {"done"}
    result = {name: part.get("result") for name, part in parts.items()}
    assert result["profile"]["promised_bytes"] > 1 << 20
    assert any("flash" in name for name in result["profile"]["attention"])
    said = capsys.readouterr().out
    assert "failed: FloatingPointError: planted" in said
    if "bandwidth" in chosen:
        assert [row["program"] for row in result["steps"]["programs"]] == ["functron eager"]
        assert {*first_gpu.KERNELS} < result["bandwidth"].keys()
        assert "% of it" in said
        assert set(result["conformance"].values()) == {0}  # kernels are their references here


def test_a_part_has_a_process_of_its_own_for_so_long(tmp_path):
    args = first_gpu.parse(["--device=cpu", "--tiny"])
    found = first_gpu.in_process("check", args, 60)
    assert (found["state"], found["output"]) == ("skipped", "")
    found = first_gpu.in_process("doctor", args, 0.01)
    assert (found["state"], found["why"]) == ("failed", "ended after 0 s")


def test_a_trace_by_hand():
    def event(name, start, length, kind="kernel"):
        return {"name": name, "ts": start, "dur": length, "cat": kind, "ph": "X"}

    found = first_gpu.kernels_of([
        event("gemm", 0, 300), event("flash_fwd", 200, 300), event("copy", 600, 30, "gpu_memcpy"),
        event("gemm", 700, 300), event("host", 0, 9999, "cpu_op"),
    ])  # fmt: skip
    assert found["step_ms"] == 1 / first_gpu.STEPS
    assert found["launches_per_step"] == 4 / first_gpu.STEPS
    assert found["idle_share"] == 0.17
    assert found["gaps"] == [
        {"us": 100, "after": "flash_fwd", "before": "copy"},
        {"us": 70, "after": "copy", "before": "gemm"},
    ]
    assert found["attention"] == ["flash_fwd"]
    assert next((row["name"], row["per_step"]) for row in found["top"]) == ("gemm", 2 / 3)
