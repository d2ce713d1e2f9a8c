"""The examples run, simulated and on processes, with the same losses; and they stay short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRETRAIN = ROOT / "examples" / "pretrain_gpt.py"
BERT = ROOT / "examples" / "pretrain_bert.py"
ON_DISK = ROOT / "examples" / "pretrain_on_disk.py"
SMALL_BERT = ("--seq", "32", "--global-batch", "8", "--steps", "3")
SMALL = ("--model", "llama3-tiny", "--seq", "32", "--global-batch", "4", "--steps", "12")


def losses(printed: str) -> dict[int, float]:
    """The losses an example printed, by step."""
    found = re.findall(r"^step +(\d+) +loss ([\d.]+)$", printed, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def simulate(*args: str, script: Path = PRETRAIN) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    small = SMALL if script == PRETRAIN else SMALL_BERT
    command = [sys.executable, str(script), *small, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dense() -> str:
    return simulate()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_is_short(path):
    assert len(path.read_text().splitlines()) < 100


def test_trains_and_samples(dense):
    found = losses(dense)
    assert sorted(found) == [0, 10, 11]
    assert found[11] < found[0] - 0.3
    assert "\nThe " in dense


def test_simulated_mesh_gives_the_same_losses(dense):
    args = ("--mesh", "dp=2,tp=4", "--sequence-parallel", "--prompt", "")
    assert losses(simulate(*args)) == pytest.approx(losses(dense), rel=1e-5)


@pytest.mark.distributed
def test_processes_give_the_same_losses(dense, torchrun):
    done = torchrun(PRETRAIN, 4, *SMALL, "--mesh", "dp=2,tp=2", timeout=300)
    assert losses(done.stdout) == pytest.approx(losses(dense), rel=1e-5)
    assert "\nThe " in done.stdout


@pytest.mark.distributed
def test_too_few_processes_is_a_taught_error(torchrun):
    done = torchrun(PRETRAIN, 2, *SMALL, "--mesh", "dp=2,tp=2", check=False)
    assert done.returncode != 0
    assert "cannot bind the mesh to processes" in done.stderr
    assert "torchrun --nproc-per-node 4" in done.stderr


@pytest.mark.distributed
def test_bert_on_processes_gives_the_losses_of_one(torchrun):
    mesh = ("--mesh", "fsdp=2,tp=2", "--sequence-parallel")
    found = losses(torchrun(BERT, 4, *SMALL_BERT, *mesh, timeout=300).stdout)
    assert sorted(found) == [0, 2]
    assert found == pytest.approx(losses(simulate(script=BERT)), rel=1e-5)


def test_from_text_to_a_model_that_writes(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sizes = ("--megabytes", "0.5", "--vocab-size", "600", "--steps", "20", "--seq", "32")
    options = ("--eval-every", "10", "--eval-batches", "2", "--mesh", "dp=2", "--pack", "best-fit")
    command = [sys.executable, str(ON_DISK), "--out", str(tmp_path / "work"), *sizes, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step +(\d+)  validation perplexity ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [10, 20]
    first, last = (float(perplexity) for _, perplexity in found)
    assert last < 0.9 * first < 600  # the vocabulary, which knowing nothing would give
    assert re.search(r"^def ", done.stdout, re.MULTILINE)
    apart = re.search(r"with and without the cache: (\S+) apart", done.stdout)
    assert apart is not None
    assert float(apart[1]) < 1e-4  # float32, logits of size 1
