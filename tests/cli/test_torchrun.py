"""The `torchrun` fixture of conftest.py: real processes, bounded, and none left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SUM = """
import sys, torch, torch.distributed as dist, functron
dist.init_process_group("gloo")
x = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(x)
# one write: the lines of two processes do not mix
sys.stdout.write(f"sum {x.item()} {sys.argv[1:]} {torch.get_num_threads()}\\n")
dist.destroy_process_group()
"""


def test_runs_a_program(torchrun, tmp_path):
    done = torchrun(SUM, 2, "--steps", 3)
    assert done.stdout.splitlines() == ["sum 3.0 ['--steps', '3'] 1"] * 2
    script = tmp_path / "script.py"
    script.write_text("print('here')")
    assert torchrun(script, 1).stdout == "here\n"


def test_failures_fail(torchrun):
    program = "raise RuntimeError('taught ' + 'error')"
    done = torchrun(program, 1, check=False)
    assert done.returncode == 1
    assert "taught error" in done.stderr
    with pytest.raises(AssertionError, match="taught error"):
        torchrun(program, 1)


def test_a_hang_is_killed_with_its_workers(torchrun, tmp_path):
    program = f"""
import os, time
open(r"{tmp_path}/" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(600)
"""
    with pytest.raises(pytest.fail.Exception, match="no end after 2 s"):
        torchrun(program, 2, timeout=2)
    for rank in ("0", "1"):
        pid = int(Path(tmp_path, rank).read_text())
        assert _ends(pid), f"worker {pid} of rank {rank} still runs"


def _ends(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":  # dead, and not yet collected by its parent
            return True
        time.sleep(0.1)
    return False
