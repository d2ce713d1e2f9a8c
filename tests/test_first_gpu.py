"""benchmarks/first_gpu.py, as far as a CPU can run it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import first_gpu
import first_gpu_parts
import traces

from functron.ops import nvrtc

NEEDS_GPU = {"tests", "graph"}


@pytest.mark.parametrize(
    "chosen",
    [
        ["facts", "train", "tests", "fp8"],
        pytest.param([*first_gpu.PARTS], marks=pytest.mark.full),
    ],
)
def test_parts_run_and_a_failing_one_leaves_its_traceback(chosen, tmp_path, monkeypatch, capsys):
    def fails(args):
        yield {"row": "the first", "figure": 1.5}
        raise FloatingPointError("planted")

    monkeypatch.setattr(first_gpu_parts, "fp8", fails)
    out = tmp_path / "first.json"
    arguments = ["--device=cpu", "--tiny", "--here", f"--only={','.join(chosen)}", f"--out={out}"]
    assert first_gpu.main(arguments) == 1
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == chosen
    assert "FloatingPointError: planted" in parts["fp8"]["why"]
    assert parts["fp8"]["rows"] == [{"row": "the first", "figure": 1.5}]
    states = {name: part["state"] for name, part in parts.items()}
    wanted = {name: "skipped" if name in NEEDS_GPU else "done" for name in chosen}
    assert states == wanted | {"fp8": "failed"}
    (trained,) = parts["train"]["rows"]
    assert len(trained["loss"]) == first_gpu_parts.TRAIN_STEPS
    assert trained["promised_gib"] > 2**-10
    assert "masters float32" in trained["policy"]
    assert trained["read_seconds"] > 0  # of a save that had the state's numbers
    said = capsys.readouterr().out
    assert "| fp8 | the first | done | figure 1.5 |" in said
    assert "failed | FloatingPointError: planted |" in said
    if "profile" in chosen:
        (kernels,) = [row for row in parts["profile"]["rows"] if row["row"] == "kernels"]
        assert any("flash" in name for name in kernels["attention"])
        offs = [row for row in parts["conformance"]["rows"] if "float32" in row]
        assert {row["float32"] for row in offs} == {0}  # kernels are their references here
        assert [row["row"] for row in parts["peer"]["rows"]] == ["functron eager"]


def test_a_part_has_a_process_of_its_own_for_so_long():
    args = first_gpu.parse(["--device=cpu", "--tiny"])
    found = first_gpu.in_process("tests", args, 60)
    assert (found["state"], found["output"]) == ("skipped", "")
    found = first_gpu.in_process("facts", args, 0.01)
    assert (found["state"], found["why"]) == ("failed", "ended after 0 s")


def test_numbers_that_are_wrong_are_told_from_what_breaks(tmp_path, monkeypatch, capsys):
    def some(args):
        yield first_gpu_parts.row("a kernel", ok=False, why="wanted 0", off=0.5)
        yield first_gpu_parts.tried("another", lambda name: 1 / 0)

    args = ["--device=cpu", "--here", "--only=conformance", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(first_gpu_parts, "conformance", some)
    assert first_gpu.main(args) == 1
    said = capsys.readouterr().out
    assert "| conformance | a kernel | wrong | wanted 0; off 0.5 |" in said
    assert "| conformance | another | failed | ZeroDivisionError: division by zero |" in said


@pytest.mark.full
def test_a_session_of_pytest_in_rows(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_wrong(): assert 1 == 2\n"
        "def test_broken(): raise TypeError('signature')\n"
        "@pytest.mark.skip(reason='no')\ndef test_left_out(): pass\n"
    )
    (tmp_path / "test_other.py").write_text("import not_there\n")
    found = first_gpu_parts.Results(time.monotonic() + 60)
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--continue-on-collection-errors"]
    pytest.main([*options, f"--rootdir={tmp_path}", "-c/dev/null", str(tmp_path)], plugins=[found])
    counts = {name.rpartition("/")[2]: count for name, count in found.counts.items()}
    assert counts["test_some.py"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert counts["test_other.py"] == {"skipped": 1}
    states = {row["row"].rpartition("/")[2]: row["state"] for row in found.rows}
    assert states == {
        "test_other.py": "skipped",
        "test_some.py::test_wrong": "wrong",
        "test_some.py::test_broken": "failed",
    }


def test_all_files_with_tests_on_a_gpu_are_run():
    tests = Path(__file__).parent
    marked = {
        str(file.relative_to(tests))
        for file in tests.rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b|marks=pytest\.mark\.gpu", file.read_text())
    }
    assert {*first_gpu_parts.TESTS} == marked - {Path(__file__).name}


def test_compiled_kernels_go_with_the_cache(tmp_path, monkeypatch):
    own, kept = tmp_path / "own", tmp_path / "cache" / "cubins"
    monkeypatch.setattr(first_gpu_parts.nvrtc, "default_folder", lambda: own)
    own.mkdir()
    (own / f"a{nvrtc.SUFFIX}").write_text("a")
    first_gpu_parts.share_kernels(tmp_path / "cache")
    (kept / f"b{nvrtc.SUFFIX}").write_text("b")
    first_gpu_parts.share_kernels(tmp_path / "cache")
    for folder in (own, kept):
        assert {file.read_text() for file in folder.iterdir()} == {"a", "b"}


def test_a_trace_by_hand():
    def event(name, start, length, kind="kernel"):
        return {"name": name, "ts": start, "dur": length, "cat": kind, "ph": "X"}

    found = traces.kernels_of([
        event("gemm", 0, 300), event("flash_fwd", 200, 300), event("copy", 600, 30, "gpu_memcpy"),
        event("gemm", 700, 300), event("host", 0, 9999, "cpu_op"),
    ])  # fmt: skip
    assert found["step_ms"] == 1 / traces.STEPS
    assert found["launches_per_step"] == 4 / traces.STEPS
    assert found["idle_share"] == 0.17
    assert found["gaps"] == [
        {"us": 100, "after": "flash_fwd", "before": "copy"},
        {"us": 70, "after": "copy", "before": "gemm"},
    ]
    assert found["attention"] == ["flash_fwd"]
    assert next((row["name"], row["per_step"]) for row in found["top"]) == ("gemm", 2 / 3)
