"""Compiled code that GPUs of one kind share, with Inductor's generation of code for CUDA."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from functron.compiler import inductor

pytestmark = pytest.mark.fake_gpu

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch._inductor.async_compile import AsyncCompile

folder, number, real, into = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "real", sys.argv[4]
triton, wait = AsyncCompile.triton, AsyncCompile.wait
import functron as ft
from functron.compiler import inductor

if real:  # the compiler itself, which needs no GPU
    AsyncCompile.triton, AsyncCompile.wait = triton, wait
compiled, compiling = [], inductor._compile

def note(*given):
    compiled.append(given[2].name)
    return compiling(*given)

inductor._compile = note
torch.cuda.set_device(number)

def f(x, w, ids):
    y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    y = torch.softmax(y @ w, -1) + torch.arange(8, device=x.device)
    y = y.index_add(1, ids, torch.ones(2, len(ids), 4, 8, device=x.device))
    return y.sort(-1).values, (x * w.sum()).mean(), x.nonzero_static(size=3)

small = lambda x: (torch.sin(x) * 2, (x * x).sum(0))
x = torch.ones(2, 8, 4, 8, device="cuda")
given = (x,) if real else (x, torch.ones(8, 8, device="cuda"), torch.arange(4, device="cuda"))
made = ft.jit(small if real else f, cache=folder)
program = made.compile(*given)
program(*given)
with open(into, "w") as file:
    json.dump({"compiled": compiled, "code": program.code}, file)
"""


@pytest.fixture
def compile_on(run: Callable, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``compile_on(folder, number)``: what a process on this GPU compiles, and the code it runs."""

    def start(folder: Path, number: int, kind: str = "stand-in") -> dict[str, Any]:
        into = tmp_path / "said.json"
        run("-c", PROGRAM, str(folder), str(number), kind, str(into))
        return json.loads(into.read_text())

    return start


def without_paths(code: list[str]) -> list[str]:
    lines = "\n".join(code).splitlines()
    return [line for line in lines if not line.startswith("# kernel path")]


def test_the_code_of_another_gpu_is_that_of_the_own_one(compile_on, tmp_path):
    """Inductor writes the same for the fourth GPU that is made of what it wrote for the first."""
    first = compile_on(tmp_path / "a", 0)
    shared = compile_on(tmp_path / "a", 3)
    own = compile_on(tmp_path / "b", 3)
    assert len(first["compiled"]) > 0
    assert shared["compiled"] == []
    assert own["compiled"] == first["compiled"]
    ours, theirs = without_paths(shared["code"]), without_paths(own["code"])
    # names of variables keep the number
    assert [line.replace("stream0", "stream3") for line in ours] == theirs
    assert any("get_raw_stream(3)" in line for line in ours)


def test_a_folder_that_was_moved_has_all_of_triton(compile_on, tmp_path):
    def list_cubins(folder: Path) -> dict[str, int]:
        cubins = folder.rglob("*.cubin")
        return {str(x.relative_to(folder)): x.stat().st_mtime_ns for x in cubins}

    first = compile_on(tmp_path / "a", 0, "real")
    found = list_cubins(tmp_path / "a")
    assert len(first["compiled"]) == 1
    assert len(found) > 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert compile_on(tmp_path / "b", 5, "real")["compiled"] == []
    assert list_cubins(tmp_path / "b") == found


def test_ranks_share_what_one_compiles(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ("--model", "llama3-tiny", "--global-batch", "4", "--seq", "64", "--steps", "2")
    train(*options, "--compile", "--mesh", "dp=2", "--nproc", "2", "--check-replicas-every", "0")
    kept = [pickle.loads(x.read_bytes()) for x in (tmp_path / "kept").rglob("*.kernel")]
    codes = {inductor._renumber(code.source_code, 0) for _, code in kept}
    assert len(codes) == len(kept) > 0
    assert {gpus for gpus, _ in kept} == {(0,), (1,)}  # each compiled a part
    cubins = tmp_path / ".cache" / "functron" / "cubins"
    assert {x.name.split("-")[0] for x in cubins.glob("*json")} >= {"adamw", "rms_norm", "glu"}
