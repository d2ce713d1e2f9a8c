"""Tests that need the stand-in run where `python -m tests.fake_gpu` started them, and are skipped elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_gpu import journal
from tests.fake_gpu.journal import Process

HERE = Path(__file__).parent
STARTED = "FAKE_GPU" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("fake_gpu") and not STARTED:
            reason = "needs the stand-in of a GPU: python -m tests.fake_gpu"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[Process]]:
    """``run(*command)``: the logs of a Python program's processes, which ends well.

    With ``sanitized`` torch watches which streams use a tensor, and raises where two race.
    """

    def start(*command: str, seconds: float = 300, sanitized: bool = False) -> list[Process]:
        log = tmp_path / "log"
        log.mkdir(exist_ok=True)
        environment = {**os.environ, "FAKE_GPU_LOG": str(log)}
        environment |= {"TORCH_CUDA_SANITIZER": "1"} if sanitized else {}
        done = subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return journal.read(log)

    return start


@pytest.fixture
def train(run: Callable, tmp_path: Path) -> Callable[..., list[Process]]:
    """``train(*options)``: the logs of ``functron train`` with these options.

    With ``ranks``, as many processes. Steps are not compiled without ``--compile``, unless ``auto``.
    """

    def start(*options: str, ranks: int = 1, auto: bool = False, **given: float) -> list[Process]:
        fixed = ("--device", "cuda", "--format", "mock", "--out", str(tmp_path / "run"))
        # replicas would differ, as nothing is sent
        more = ("--nproc", str(ranks), "--check-replicas-every", "0") if ranks > 1 else ()
        more += () if auto or "--compile" in options else ("--no-compile",)
        return run(str(HERE / "train.py"), "train", *fixed, *options, *more, **given)

    return start
