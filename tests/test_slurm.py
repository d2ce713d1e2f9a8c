"""The batch scripts of Slurm, under stubs that run what they say in the environment that Slurm gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from functron import checkpoint
from functron.training import records
from tests.ranks import PORTS, environment

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
SMALL = [
    "--data", re.__file__, "--seq", "16", "--gpt.num-layers", "1", "--gpt.embed-dim", "32",
    "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "48", "--device", "cpu",
    "--global-batch", "4",
]  # fmt: skip

SRUN = """
while [[ "$1" == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$node SLURM_NODEID=$node "$@" &
    pids="$pids $!"
done
worst=0
for pid in $pids; do wait $pid; code=$?; [ $code -gt $worst ] && worst=$code; done
exit $worst
"""
SCONTROL = """
case "$1" in
    show) for node in $(seq $SLURM_NNODES); do echo localhost; done ;;
    requeue) echo "$2" >> "$QUEUE" ;;
esac
"""
PYTHON = f'exec {sys.executable} -m {{}} "$@"\n'


@pytest.fixture
def sbatch(tmp_path):
    """Run a script as a job of so many nodes; its exit code, output, and the jobs queued again."""
    programs = {"srun": SRUN, "scontrol": SCONTROL}
    programs |= {"functron": PYTHON.format("functron")}
    programs |= {"torchrun": PYTHON.format("torch.distributed.run")}

    def run(name, *arguments, nodes=1, stubs=None, job=4711, **given):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for program, text in {**programs, **(stubs or {})}.items():
            (folder / program).write_text("#!/bin/bash\n" + text)
            (folder / program).chmod(0o755)
        script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
        env = environment(ROOT) | {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "QUEUE": str(tmp_path / "queue"),
            "SLURM_JOB_ID": str(job), "SLURM_JOB_NAME": "test", "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes), "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
            "OUT": str(tmp_path / "run"), **given,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", str(script), *map(str, arguments)],
            capture_output=True, text=True, timeout=180, env=env, cwd=tmp_path,
        )  # fmt: skip
        queue = tmp_path / "queue"
        return done, queue.read_text().split() if queue.exists() else []

    return run


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    given = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE)
    assert {"job-name", "nodes", "gpus-per-node", "time", "output"} <= {name for name, _ in given}
    assert len(path.read_text().splitlines()) < 60
    # a launcher whose store was on a machine that is lost waits for it, until Slurm ends it
    assert "srun torchrun" not in path.read_text()


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, False), (2, False), (138, True), (143, True)]
)
def test_a_job_is_queued_again_where_it_saved_and_is_not_done(sbatch, code, again):
    stub = {"functron": f'echo "$@"; exit {code}\n'}
    done, queue = sbatch("one_node", "--steps", 5, stubs=stub, RANKS="2")
    assert (done.returncode, queue) == (code, ["4711"] if again else [])
    assert "train --mesh fsdp=2 --nproc 2 --out" in done.stdout
    assert done.stdout.rstrip().endswith("--steps 5")


def test_a_job_of_several_machines_is_queued_again_by_what_it_recorded(sbatch, tmp_path):
    event = '{"step": 3, "kind": "exit_after"}'
    for stub, again in (
        (f"mkdir -p $OUT; echo '{event}' >> $OUT/events.jsonl; exit 1", 1),
        ("exit 1", 1),
        ("", 1),
    ):
        done, queue = sbatch("many_nodes", nodes=1, stubs={"torchrun": stub + "\n"})
        assert len(queue) == again, done.stderr
        assert done.returncode == int("exit 1" in stub)


@pytest.mark.full  # as the one before, and processes that leave in tests/training/test_loop.py
@pytest.mark.distributed
def test_two_machines_train_until_their_time_is_over(sbatch, tmp_path):
    """Really: two launchers that meet, and a run that leaves, is queued again and ends."""
    port = str(PORTS.start + os.getpid() % len(PORTS))
    given = {"nodes": 2, "RANKS": "1", "MESH": "dp=2", "SAVE_EVERY": "1000", "PORT": port}
    done, queue = sbatch("many_nodes", *SMALL, "--steps", 100000, EXIT_AFTER="12s", **given)
    assert queue == ["4711"], done.stderr
    (event,) = records.read(tmp_path / "run" / "events.jsonl")
    (left,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert (event["kind"], event["step"]) == ("exit_after", left)


@pytest.mark.full  # as the one above, but for the steps
@pytest.mark.distributed
def test_the_look_before_a_flight(sbatch, tmp_path):
    port = str(PORTS.start + os.getpid() % len(PORTS))
    given = {"nodes": 2, "RANKS": "1", "MESH": "dp=2", "PORT": port}
    done, _ = sbatch("preflight", *SMALL[2:], **given)
    assert done.returncode == 0, done.stderr
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [10]
    assert (tmp_path / "run.hardware.json").is_file()
