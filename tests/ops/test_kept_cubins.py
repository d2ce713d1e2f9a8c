"""Who compiles our kernels, and where they are kept; NVRTC itself is not needed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from functron.ops import nvrtc
from functron.ops.nvrtc import CompiledKernel, CompileError

SOURCE = "// build: ELEMENT = float, __half\n// build: ROWS = 0, 1\n"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "twice.cu").write_text(SOURCE)
    return nvrtc.read("twice", tmp_path)


@pytest.fixture
def compiled(monkeypatch):
    """The variants compiled, in order; each takes a while."""
    found: list[str] = []

    def compile_source(source, defines, arch):
        found.append(nvrtc.label(defines))
        time.sleep(0.1)
        if defines["ROWS"] == "1":
            raise CompileError("not this one")
        return CompiledKernel(b"\x7fELF" + nvrtc.label(defines).encode(), ())

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "key", lambda source, defines, arch: f"{sorted(defines.items())}")
    return found


FLOAT = {"ELEMENT": "float", "ROWS": "0"}


def test_one_of_many_compiles_a_kernel(source, compiled, tmp_path):
    """Each opens the file of the lock itself, as processes do."""
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(nvrtc.cubin, source, FLOAT, "sm_90a", tmp_path / "kept") for _ in range(6)
        ]
        (kernel,) = {job.result() for job in jobs}
    assert kernel.cubin == b"\x7fELFELEMENT=float ROWS=0"
    assert compiled == ["ELEMENT=float ROWS=0"]


def test_a_folder_that_cannot_be_written_to_costs_only_time(source, compiled, tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert nvrtc.cubin(source, FLOAT, "sm_90a", tmp_path / "file" / "kept").cubin
    assert len(compiled) == 2


def test_a_folder_can_be_taken_along(source, compiled, tmp_path):
    first = nvrtc.cubin(source, FLOAT, "sm_90a", tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    assert nvrtc.cubin(source, FLOAT, "sm_90a", tmp_path / "elsewhere") == first
    assert len(compiled) == 1


def test_variants_by_the_values_of_macros(source):
    every = nvrtc.variants_of([source], {})
    assert [dict(defines) for _, defines in every] == [
        {"ELEMENT": "float", "ROWS": "0"},
        {"ELEMENT": "float", "ROWS": "1"},
        {"ELEMENT": "__half", "ROWS": "0"},
        {"ELEMENT": "__half", "ROWS": "1"},
    ]
    some = nvrtc.variants_of([source], {"ELEMENT": {"__half"}, "PARAM": {"float"}})
    assert some == every[2:]
    assert nvrtc.variants_of([source], {"ELEMENT": ()}) == []


def test_kernels_compile_beside_other_work(source, compiled, tmp_path):
    """At the end all are there, but for one that does not compile, which whoever launches it hears of."""
    folder = tmp_path / "kept"
    with nvrtc.compile_in_background(nvrtc.variants_of([source], {}), "sm_90a", folder):
        assert threading.active_count() > 1
        assert not list(folder.glob(f"*{nvrtc.SUFFIX}"))
    assert len(compiled) == 4
    assert len(list(folder.glob(f"*{nvrtc.SUFFIX}"))) == 2
    with pytest.raises(CompileError, match="not this one"):
        nvrtc.cubin(source, {"ELEMENT": "float", "ROWS": "1"}, "sm_90a", folder)


def test_an_error_does_not_wait_for_kernels(source, compiled, tmp_path):
    variants = nvrtc.variants_of([source], {}) * 100
    with (
        pytest.raises(KeyError),
        nvrtc.compile_in_background(variants, "sm_90a", tmp_path / "kept"),
    ):
        raise KeyError
    assert len(compiled) < 100
