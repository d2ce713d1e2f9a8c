"""Runs over two machines: launched by torchrun on each, and what a network does to them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from functron.cli.main import main
from functron.training import records
from tests.hosts import ADDRESSES, NAMES, ROOT, Hosts
from tests.ranks import environment

pytestmark = pytest.mark.distributed

SMALL = [
    "--model", "llama3-tiny", "--data", re.__file__, "--seq", "16", "--global-batch", "8",
    "--device", "cpu", "--steps", "6",
]  # fmt: skip
WATCHED = ["--steps", "100000", "--hang-after", "3", "--timeout-seconds", "120"]


@pytest.fixture
def hosts(tmp_path, torchrun):
    with Hosts(tmp_path, torchrun) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    return read_losses(out)


def read_losses(out: Path) -> list[float]:
    return [record["loss"] for record in records.read(out / "metrics.jsonl")]


def await_steps(out: Path, number: int, seconds: float = 200) -> None:
    """Wait until so many steps are recorded."""
    until, file = time.monotonic() + seconds, out / "metrics.jsonl"
    while not file.exists() or file.read_text().count("\n") < number:
        assert time.monotonic() < until, f"no {number} steps in {seconds} s"
        time.sleep(0.05)


def test_they_train_as_one_process_and_one_machine_goes_on(hosts, alone, in_processes, tmp_path):
    out = tmp_path / "run"
    options = ["train", *SMALL, "--save-every", 3, "--out", out]
    told = hosts.launch(*options, "--mesh", "dp=2,tp=2").wait(200)
    assert [code for code, _ in told] == [0, 0], told
    assert f"they meet at {NAMES[0]}, which other machines reach" in told[0][1]
    assert read_losses(out) == pytest.approx(alone, rel=1e-5)
    shutil.rmtree(out / "checkpoints" / "6")
    in_processes(2, *options, "--mesh", "fsdp=2", "--resume", "auto")
    assert read_losses(out) == pytest.approx(alone, rel=1e-5)


@pytest.mark.applications("guard")
def test_a_cable_that_is_cut_is_named_on_both_sides(hosts, tmp_path):
    out = tmp_path / "run"
    launched = hosts.launch("train", *SMALL, *WATCHED, "--mesh", "dp=2,tp=2", "--out", out)
    await_steps(out, 3)
    hosts.cut()
    began = time.monotonic()
    for index in range(2):
        # torch's launcher waits on for the store of the other machine
        while len(hosts.list_processes(index)) > 1:
            assert time.monotonic() < began + 60, launched.read(index)
            time.sleep(0.2)
        said = launched.read(index)
        assert re.search(r"step \d+ hangs: .* did not come through at p\w+ over 'dp'", said), said
        assert "look at the network of its machine" in said
    (event,) = records.read(out / "events.jsonl")
    assert (event["kind"], event["reason"], event["axis"]) == ("hang", "connection", "dp")


@pytest.mark.parametrize(
    "dies", [0, pytest.param(1, marks=pytest.mark.full)]
)  # that of rank 0, where launchers meet, or the other one
def test_a_machine_whose_processes_die_ends_the_other(hosts, tmp_path, dies):
    out = tmp_path / "run"
    launched = hosts.launch("train", *SMALL, *WATCHED, "--mesh", "dp=2,tp=2", "--out", out)
    await_steps(out, 3)
    hosts.kill(dies)
    ends = launched.wait(60 if dies == 0 else 30)
    code, said = ends[1 - dies]
    assert (ends[dies][0], code) == (-9, 1)
    assert re.search(r"LostRanksError: p\w+ over 'dp' .* lost the others", said), said
    assert ADDRESSES[dies] in said


RATE = 20_000_000  # bits per second, of a slow cable


@pytest.mark.full
@pytest.mark.applications("planner")
def test_a_slow_cable_is_measured(hosts, tmp_path):
    hosts.slow(RATE)
    file = tmp_path / "hardware.json"
    options = ["--mesh", "dp=2,tp=2", "--largest-bytes", 1 << 16]
    told = hosts.launch("doctor", *options, "--out", file).wait(200)
    assert file.exists(), told  # the exit code says whether a rank is slow, as here one may be
    assert {one["host"] for one in json.loads(file.read_text())["ranks"]} == {*NAMES}
    machine = tomllib.loads(file.with_suffix(".toml").read_text())
    assert machine["domain"]["gpus"] == 2
    # the cable is shared by two ranks of each machine, which send at the same time
    share = RATE / 8 / 2
    within, between = (machine[name]["bytes_per_second"] for name in ("domain", "network"))
    assert 0.2 * share < between < 1.6 * share, told
    assert within > 3 * between, told
    assert re.search(r"^dp +all_gather .* 1\.\d\d MB/s$", told[0][1], re.MULTILINE), told


@pytest.mark.full  # as two machines with a fast one
def test_a_slow_cable_changes_no_loss(hosts, alone, tmp_path):
    hosts.slow(RATE)
    out = tmp_path / "run"
    told = hosts.launch("train", *SMALL, "--mesh", "dp=2,tp=2", "--out", out).wait(200)
    assert [code for code, _ in told] == [0, 0], told
    assert read_losses(out) == pytest.approx(alone, rel=1e-5)


SRUN = """
while [[ "$1" == --* ]]; do shift; done
SLURM_PROCID=0 SLURM_NODEID=0 {0} "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 {1} "$@" & second=$!
wait $first; code=$?
wait $second || code=$?
exit $code
"""


@pytest.mark.full  # the processes as above; the scripts as in tests/test_slurm.py
def test_scripts_of_slurm_train_on_them(hosts, alone, tmp_path):
    programs = {
        "srun": SRUN.format(*(" ".join(hosts.inside(index)) for index in range(2))),
        "scontrol": f'[ "$1" = show ] && printf "%s\\\\n" {" ".join(NAMES)}\n',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
        "functron": f'exec {sys.executable} -m functron "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "test", "SLURM_NNODES": "2", "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "machine-[a-b]",
    }  # fmt: skip

    def sbatch(name: str, *given: str, **more: str) -> None:
        script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
        done = subprocess.run(
            ["bash", str(script), *given], cwd=tmp_path, capture_output=True, text=True,
            timeout=240, env=environment(ROOT) | variables | more,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    look, run = tmp_path / "look", tmp_path / "run"
    # of more than two ranks one may be found to be slow, where few processors run them all
    sbatch("preflight", *SMALL[:2], *SMALL[4:-2], OUT=str(look), RANKS="1", MESH="dp=2")
    assert len(read_losses(look)) == 10
    sbatch("many_nodes", *SMALL, OUT=str(run), RANKS="2")  # dp=2,fsdp=2
    assert read_losses(run) == pytest.approx(alone, rel=1e-5)
