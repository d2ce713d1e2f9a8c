"""The memory of ``functron train`` on the stand-in is within what its program promises.

The caching allocator is real, so the peak of allocated bytes is that of a card. Promises are of the
eager program with the reference implementations, which is what ``functron train --dry-run`` prints:
kernels that keep less, and compiled programs, stay below it.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.fake_gpu

MODEL = (
    "--model", "llama3-tiny", "--gpt.embed-dim", "768", "--gpt.mlp-dim", "2048",
    "--gpt.num-heads", "12", "--gpt.num-layers", "6", "--gpt.vocab-size", "4096",
    "--gpt.max-seq", "1024", "--seq", "1024", "--global-batch", "8",
)  # fmt: skip
CASES = {
    "one": (1,),
    "one compiled": (1, "--compile"),
    "microbatches": (1, "--microbatches", "4"),
    "microbatches compiled": (1, "--microbatches", "4", "--compile"),
    "remat full": (1, "--remat", "full"),
    "remat full compiled": (1, "--remat", "full", "--compile"),
    "remat dots compiled": (1, "--remat", "dots", "--compile"),
    "muon": (1, "--optimizer.name", "muon"),
    "dp": (2, "--mesh", "dp=2"),
    "dp zero 1": (2, "--mesh", "dp=2", "--zero", "1"),
    "dp zero 3": (2, "--mesh", "dp=2", "--zero", "3"),
    "fsdp compiled": (2, "--mesh", "fsdp=2", "--compile"),
    "tp": (2, "--mesh", "tp=2"),
    "cp": (2, "--mesh", "cp=2"),
}
PP = (2, "--mesh", "pp=2", "--microbatches", "4")
PIPELINES = {
    "pp": PP,
    "pp remat full": (*PP, "--remat", "full"),
    "pp gpipe remat full": (*PP, "--remat", "full", "--schedule", "gpipe"),
    "pp zb-h1": (*PP, "--schedule", "zb-h1"),
    "pp zb-h1 remat full": (*PP, "--remat", "full", "--schedule", "zb-h1"),
}


@pytest.mark.parametrize(
    "name",
    [*CASES, *(pytest.param(x, marks=pytest.mark.applications("planner")) for x in PIPELINES)],
)
def test_the_peak_is_within_the_promise(train, name):
    """Of a pipeline: what the planner promises."""
    ranks, *options = (CASES | PIPELINES)[name]
    found = train("--marks.promise", "--steps", "3", *MODEL, *options, ranks=ranks)
    sizes = [record for process in found for record in process.having("memory")]
    assert len(sizes) == ranks
    for size in sizes:
        assert 0 < size["peak"] <= 1.03 * size["promised"], size["peak"] / size["promised"]
