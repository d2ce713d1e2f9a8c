"""Other sizes of a run, where each GPU's share of the work is known by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from functron.apps.planner.estimates import Estimate
from functron.apps.planner.machines import hardware
from functron.apps.planner.rates import FUNCTRON
from functron.apps.planner.search import (
    Ranked,
    search,
)
from functron.apps.planner.sizing import Target, find_gpus, find_neighbours
from functron.apps.planner.space import (
    Space,
    mesh_of,
)
from functron.cli.main import main
from functron.cli.plan import _parse_plan
from functron.training.config import configure, with_precision
from tests.apps.planner.test_plan import SMALL

A100 = hardware("a100")
SEQ = 100


@dataclass(frozen=True)
class Bubbles:
    """Samples take a second of a GPU each; pipelines wait, and many GPUs wait for each other.

    Attributes:
        slower: by how much each GPU makes all others slower.
    """

    slower: float = 0.0
    capacity_bytes: int = 1
    asked: list[int] = field(default_factory=list)

    def problems(self, candidate):
        mesh = mesh_of(candidate)
        return ["tp"] * (mesh["tp"] * mesh["cp"] > 1)

    def state_bytes(self, candidate):
        return 0

    def memory(self, candidate):
        return {}

    def traced(self, candidate):
        return True

    def least_seconds(self, candidate):
        mesh, config = mesh_of(candidate), candidate
        bubble = (mesh["pp"] - 1) / config.parallelism.microbatches
        alone = config.data.global_batch / mesh.size * (1 + bubble)
        return alone * (1 + self.slower * mesh.size)

    guess = least_seconds

    def estimate(self, candidate, *, exact=False):
        size, seconds = mesh_of(candidate).size, self.least_seconds(candidate)
        if not self.asked or self.asked[-1] != size:
            self.asked.append(size)
        return Estimate(
            "step", A100, FUNCTRON, size, candidate.data.global_batch * SEQ, seconds,
            {"products": seconds}, {}, 0.0, 1.0, 1.0, 1.0, MappingProxyType({"all": 1}),
        )  # fmt: skip


def space(gpus: int, batch: int, **given: Any) -> Space:
    config = configure(gpt={"num_layers": 420}, seq=SEQ, global_batch=batch)
    return Space(with_precision(config, "bf16"), gpus, schedules=("1f1b",), **given)


def best_of(given: Space, model: Any) -> Ranked:
    return search(given, model, top=1).best[0]


def test_batches_and_gpus_that_divide_are_named():
    """Of 32 samples seven GPUs make a pipeline, with a bubble of 6 / 32; and six one of 2 / 16."""
    model = Bubbles()
    given = space(7, 32)
    best = best_of(given, model)
    assert mesh_of(best.candidate)["pp"] == 7
    found = find_neighbours(given, model, best, cpu_seconds=1e9)
    gains = {(one.gpus, one.global_batch): one.gain for one in found}
    alone, six = 6 / 32, (1 + 6 / 32) / (1 + 2 / 16) - 1
    assert gains == pytest.approx({(7, 28): alone, (7, 35): alone, (8, 32): alone, (6, 32): six})
    assert [one.gain for one in found] == sorted(gains.values(), reverse=True)
    said = [str(one).partition(",")[0] for one in found]
    assert "28 samples a step on 7 GPUs: 19% more tokens a second and GPU" in said


def test_what_gains_little_is_not_named():
    model = Bubbles()
    given = space(8, 64)
    assert find_neighbours(given, model, best_of(given, model), cpu_seconds=1e9) == []
    given = space(7, 32)
    best = best_of(given, model)
    found = find_neighbours(given, model, best, cpu_seconds=1e9, least_gain=0.1)
    assert (6, 32) not in [(one.gpus, one.global_batch) for one in found]


def test_the_fewest_gpus_that_end_in_time():
    """A GPU takes 100 tokens a second; 20 of them so many in a day, and multiples of 8 are 24."""
    model, day = Bubbles(), 86400 * SEQ
    found = find_gpus(space(8, 960), model, Target(20 * day, days=1.0), cpu_seconds=1e9)
    assert found.chosen.gpus == 24
    assert found.chosen.days == pytest.approx(20 / 24)
    assert [each.gpus for each in found.tried] == [8, 24] == model.asked  # 16 cannot be enough
    assert "24 GPUs 0.8 days" in str(found)


def test_the_most_gpus_that_a_budget_pays():
    """With n GPUs a token takes 1 + n / 64 times as long, and costs so much more."""
    model, hour = Bubbles(slower=1 / 64), 3600 * SEQ
    target = Target(1000 * hour, dollars=2000 * 1.3, gpu_hour_dollars=2.0)
    found = find_gpus(space(8, 960), model, target, cpu_seconds=1e9)
    assert [each.dollars for each in found.tried] == pytest.approx(
        [2000 * (1 + n / 64) for n in (8, 16, 24)]
    )
    assert found.chosen.gpus == 16
    assert "$2,500" in str(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"days": 1e-6}, "days on 8 GPUs at best; wanted 1e-06 days"),
        ({"dollars": 1.0, "gpu_hour_dollars": 1.0}, r"\$1,125 on 8 at least; wanted \$1;"),
        ({"days": 1.0, "dollars": 1.0, "gpu_hour_dollars": 1.0}, r"wanted 1 days and \$1;"),
    ],
)
def test_targets_that_nothing_meets(given, said):
    """Eight samples are for eight GPUs without a pipeline; each takes 1 + 8 / 64 times as long."""
    target = Target(1000 * 3600 * SEQ, **given)
    with pytest.raises(ValueError, match=f"(?s)no number of GPUs meets the target.*{said}"):
        find_gpus(space(8, 8, fixed={"pp": 1}), Bubbles(1 / 64), target, cpu_seconds=1e9)


def test_a_budget_needs_a_price():
    with pytest.raises(ValueError, match="gpu_hour_dollars: got 0 with a budget"):
        Target(1e9, dollars=1e6)
    with pytest.raises(ValueError, match="tokens: got 0; wanted above 0"):
        Target(0.0, days=1.0)


def test_the_command_sizes_a_run(capsys):
    sizes = ["--tokens", "1e11", "--gpu-hour-dollars", "2"]
    assert main([*SMALL, *sizes, "--target-days", "100"]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("1e+11 tokens take"))
    _, _, _, gpus, _, days, *_ = line.split()
    assert float(days) <= 100
    assert f"tokens a step on {gpus} x" in said
    assert main([*SMALL, "--target-days", "40"]) == 2
    assert "target_days" in capsys.readouterr().err


def test_samples_are_as_long_as_the_model_takes():
    """At most 8,192 tokens, if nothing is said; of a model that is made longer they may be more."""
    given = [word for word in SMALL[1:] if word not in ("--seq", "64")]
    long = ["--gpt.max-seq", "16384"]
    for more, seq in ((long, 8192), ([*long, "--seq", "16384"], 16384), (["--seq", "64"], 64)):
        assert _parse_plan([*given, *more])[1].data.seq == seq
    with pytest.raises(ValueError, match="seq: got 16384"):
        _parse_plan([*given, "--seq", "16384"])
