"""``functron train`` on the stand-in: every combination runs, on its own card, without waiting."""

from __future__ import annotations

import pytest

from functron.cli.process import ALLOCATOR
from tests.fake_gpu import journal
from tests.fake_gpu.journal import Process

pytestmark = pytest.mark.fake_gpu

DENSE, MIXTURE = ("--model", "llama3-tiny"), ("--model", "mixtral-tiny")
HELD_OUT = ("--format", "text", "--data", __file__, "--eval-every", "2", "--eval-batches", "2")
HELD_OUT += ("--eval-data", f"own={__file__}")
CASES = {
    "one": (1, *DENSE),
    "one compiled": (1, *DENSE, "--compile"),
    "float32": (1, *DENSE, "--precision", "float32"),
    "offload": (1, *DENSE, "--optimizer.offload"),
    "microbatches": (1, *DENSE, "--microbatches", "4"),
    "saves": (1, *DENSE, "--save-every", "1"),
    "held out": (1, *DENSE, *HELD_OUT),
    "soap": (1, *DENSE, "--optimizer.name", "soap"),
    "muon": (1, *DENSE, "--optimizer.name", "muon"),
    "int8 moments": (1, *DENSE, "--optimizer.mu-dtype", "int8", "--optimizer.nu-dtype", "int8"),
    "dp": (2, *DENSE, "--mesh", "dp=2"),
    "dp compiled": (2, *DENSE, "--mesh", "dp=2", "--compile"),
    "dp zero 1": (2, *DENSE, "--mesh", "dp=2", "--zero", "1"),
    "dp zero 2": (2, *DENSE, "--mesh", "dp=2", "--zero", "2", "--microbatches", "2"),
    "dp zero 3": (2, *DENSE, "--mesh", "dp=2", "--zero", "3"),
    "fsdp": (2, *DENSE, "--mesh", "fsdp=2"),
    "fsdp compiled": (2, *DENSE, "--mesh", "fsdp=2", "--compile"),
    "tp": (2, *DENSE, "--mesh", "tp=2"),
    "tp compiled": (2, *DENSE, "--mesh", "tp=2", "--compile"),
    "cp": (2, *DENSE, "--mesh", "cp=2"),
    "cp compiled": (2, *DENSE, "--mesh", "cp=2", "--compile"),
    "pp": (2, *DENSE, "--mesh", "pp=2", "--microbatches", "4"),
    "pp compiled": (2, *DENSE, "--mesh", "pp=2", "--microbatches", "4", "--compile"),
    "pp held out": (2, *DENSE, *HELD_OUT, "--mesh", "pp=2", "--microbatches", "2"),
    "pp zb-h1": (2, *DENSE, "--mesh", "pp=2", "--microbatches", "4", "--schedule", "zb-h1"),
    "pp interleaved": (
        4,
        *DENSE,
        "--mesh",
        "pp=4",
        "--microbatches",
        "4",
        "--schedule",
        "interleaved",
        "--gpt.num-layers",
        "8",
    ),
    "pp dualpipe compiled": (
        2,
        *DENSE,
        "--mesh",
        "pp=2",
        "--microbatches",
        "4",
        "--schedule",
        "dualpipe",
        "--compile",
    ),
    "dp offload saves": (2, *DENSE, "--mesh", "dp=2", "--optimizer.offload", "--save-every", "1"),
    "experts": (1, *MIXTURE),
    "ep": (2, *MIXTURE, "--mesh", "ep=2"),
    "fsdp soap": (2, *DENSE, "--optimizer.name", "soap", "--mesh", "fsdp=2"),
    "dp held out": (2, *DENSE, *HELD_OUT, "--mesh", "dp=2"),
    "dp tp": (4, *DENSE, "--mesh", "dp=2,tp=2"),
    "dp pp": (4, *DENSE, "--mesh", "dp=2,pp=2", "--microbatches", "2"),
    "fsdp tp": (4, *DENSE, "--mesh", "fsdp=2,tp=2"),
    "cp tp": (4, *DENSE, "--mesh", "cp=2,tp=2"),
    "tp pp": (4, *DENSE, "--mesh", "tp=2,pp=2", "--microbatches", "2"),
    "dp cp": (4, *DENSE, "--mesh", "dp=2,cp=2"),
    "dp ep": (4, *MIXTURE, "--mesh", "dp=2,ep=2"),
    "ep tp": (4, *MIXTURE, "--mesh", "ep=2,tp=2"),
    "fsdp cp": (4, *DENSE, "--mesh", "fsdp=2,cp=2"),
    "fsdp pp": (4, *DENSE, "--mesh", "fsdp=2,pp=2", "--microbatches", "2"),
}
WAITING = ("mixtral-tiny", "--optimizer.offload", "--save-every", "--eval-every", "soap")
"""Options with which the host waits in a step: for counts of rows, pieces of state, copies, losses,
and whether bases turn."""
STEPS = 4
FIXED = ("--steps", str(STEPS), "--global-batch", "8", "--seq", "64")


def waits_in_steps(process: Process) -> list[dict]:
    """The waits of the program's thread in all but the first step and the last one.

    An event is waited for where numbers of the step before are read, which costs nothing.
    """
    at, found = 0, []
    for record in process.records:
        at = record["number"] if record["op"] == "step" else at
        waits = record["op"] == "synchronize" and record["call"] != "cudaEventSynchronize"
        if waits and record["thread"].startswith("python") and 1 < at < STEPS:
            found.append({"step": at, **record})
    return found


@pytest.mark.parametrize("name", CASES)
def test_runs(train, name):
    ranks, *options = CASES[name]
    found = train(*FIXED, *options, ranks=ranks)
    assert [process.rank for process in found] == list(range(ranks))
    for find in (
        journal.find_errors,
        journal.find_stray_contexts,
        journal.find_shared_pages,
        journal.find_unmatched,
    ):
        assert find(found) == []
    assert [problem for process in found for problem in journal.find_races(process)] == []
    if not {*WAITING} & {*options}:
        assert [wait for process in found for wait in waits_in_steps(process)] == []


@pytest.mark.parametrize(
    "name", ["offload", "saves", "dp", "dp zero 2", "fsdp", "tp", "cp", "pp", "ep", "cp tp"]
)
def test_no_stream_races_with_torchs_own_kernels(train, name):
    """They do not say in the log what they use; torch's sanitizer sees them where nothing is compiled."""
    ranks, *options = CASES[name]
    assert train(*FIXED, *options, ranks=ranks, sanitized=True)


@pytest.mark.parametrize(
    ("axis", "hidden"),
    [
        ("dp", {"AllReduce": "attention backward"}),  # sums of a layer, beside the one before
        ("fsdp", {"ReduceScatter": "attention backward", "AllGather": "attention backward"}),
        ("tp", {"AllReduce": "Gemm"}),  # gradients of activations, beside those of weights
    ],
)
def test_what_is_sent_over_nccl_is_hidden(train, axis, hidden):
    """Gradient sums start before the backward pass has ended, where nobody chooses to compile."""
    found = train(*FIXED, *DENSE, "--mesh", f"{axis}=2", ranks=2, auto=True)
    assert len(found) == 2
    for process in found:
        beside = [(call["name"], " ".join(names)) for call, names in journal.list_hiding(process)]
        for name, kernel in hidden.items():
            assert any(call == name and kernel in names for call, names in beside), name


def count_launches(process: Process) -> int:
    """Of the last step but one."""
    begun = [i for i, record in enumerate(process.records) if record["op"] == "step"]
    return sum(record["op"] == "launch" for record in process.records[begun[-2] : begun[-1]])


@pytest.mark.parametrize("layers", [2, 3])
def test_projections_are_fused(train, layers):
    """Three products of q, k, v and two of gate and up are one each, and so are their gradients.

    For each product left out there are three, forward and backward, of which two in backward for
    its operands: 9 a layer. Sums of the gradients of x, and what moves heads, come on top.
    """
    options = (*FIXED, *DENSE, "--gpt.num-layers", str(layers))
    (apart,) = train(*options, "--gpt.no-fused-projections")
    both = train(*options, "--out", "again")
    (fused,) = (process for process in both if process != apart)
    assert count_launches(apart) - count_launches(fused) >= 9 * layers


@pytest.mark.parametrize("ranks", [1, 2])
def test_segments_of_memory_grow_unless_the_user_says_otherwise(train, monkeypatch, ranks):
    for variable in ALLOCATOR:
        monkeypatch.delenv(variable, raising=False)
    more = ("--mesh", "dp=2", "--check-replicas-every", "0") if ranks > 1 else ()
    fixed = ("--steps", "2", "--global-batch", "2", "--seq", "64", "--nproc", str(ranks), *more)
    found = train(*DENSE, *fixed, auto=True)
    assert len(found) == ranks
    assert journal.find_errors(found) == journal.find_stray_contexts(found) == []
    # memory that does not grow is taken by cudaMalloc, which is logged
    assert [x for each in found for x in each.records if x["op"] == "malloc"] == []


def test_a_setting_of_the_allocator_stays(train, monkeypatch):
    for variable in ALLOCATOR:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    (process,) = train(*DENSE, "--steps", "2", "--global-batch", "2", "--seq", "64")
    assert [x for x in process.records if x["op"] == "malloc"]
