"""Short runs of candidates, and rates of machines that follow from them."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from functron.apps.planner import trials
from functron.apps.planner.estimates import Estimate
from functron.apps.planner.machines import Hardware, hardware
from functron.apps.planner.rates import FUNCTRON
from functron.apps.planner.search import Ranked
from functron.apps.planner.trials import (
    Timing,
    Trial,
    check_machine_is_here,
    fit_rates,
    scale_rates,
    time_steps,
    try_best,
)
from functron.cli.main import main
from functron.spmd import Mesh
from functron.training import prepare
from functron.training.config import TrainConfig, configure, with_precision

CPU, H100 = hardware("cpu"), hardware("h100")
WORK = {  # FLOPs, bytes of memory, bytes over links, kernels: of candidates by their batch
    1: (9e11, 1e9, 1e6, 100),
    2: (1e11, 3e10, 1e6, 100),
    3: (1e11, 1e9, 4e9, 100),
    4: (1e11, 1e9, 1e6, 300_000),
    5: (4e11, 9e9, 1e9, 60_000),
}


@dataclass(frozen=True)
class Sums:
    """Steps that take the sum of what products, memory, links and launches take."""

    machine: Hardware = CPU

    def estimate(self, candidate: TrainConfig, *, exact: bool = False) -> Estimate:
        flops, moved, sent, kernels = WORK[candidate.data.global_batch]
        machine = self.machine
        seconds = flops / machine.peak(torch.float32) + machine.memory_seconds(moved)
        seconds += sent / machine.domain.rate("psum")[0] + kernels * machine.kernel_seconds
        return make_estimate(candidate, seconds)


def make_estimate(candidate: TrainConfig, seconds: float) -> Estimate:
    return Estimate(
        "step", CPU, FUNCTRON, 1, 1, seconds, {"products": seconds}, {}, 0.0, 1.0, 1.0, 1.0,
        MappingProxyType({"all": 1}),
    )  # fmt: skip


def make_candidates(*batches: int) -> list[Ranked]:
    made = [configure(global_batch=batch, seq=8) for batch in batches]
    return [Ranked(one, Sums().estimate(one)) for one in made]


def time_by_hand(batch: int, products: float, memory: float, links: float, launches: float):
    """Seconds on the CPU's file with rates times these factors."""
    flops, moved, sent, kernels = WORK[batch]
    seconds = flops / (150e9 * products) + moved / (20e9 * 0.6 * memory)
    return seconds + sent / (2e9 * 0.6 * links) + kernels * 1e-5 / launches


def make_trials(batches: Any, factors: Any, noise: Any = None) -> list[Trial]:
    found = []
    for i, (candidate, expected) in enumerate(make_candidates(*batches)):
        seconds = time_by_hand(candidate.data.global_batch, *factors)
        seconds *= 1.0 if noise is None else math.exp(noise[i])
        found.append(Trial(candidate, expected, Timing([seconds])))
    return found


def test_rates_are_found_again():
    """Steps that are long by one cause each give away all rates, but for the prior's 1% to 3%."""
    factors = (0.6, 0.8, 1.3, 0.7)
    made, found = fit_rates(Sums(), make_trials([*WORK, *WORK], factors))  # type: ignore[arg-type]
    assert list(found.values()) == pytest.approx(list(factors), rel=0.03)
    assert made.peak_flops["float32"] == pytest.approx(150e9 * found["products"])
    assert made.memory.bytes_per_second == pytest.approx(20e9 * found["memory"])
    assert made.domain.bytes_per_second == pytest.approx(2e9 * found["links"])
    assert made.kernel_seconds == pytest.approx(1e-5 / found["launches"])
    assert (made.calibration.rows, made.calibration.spread) == (10, 0.03)  # no less than the noise
    assert made.calibration.software == "functron"


def test_spread_is_of_candidates_that_are_left_out():
    """The formula equals fits without each candidate in turn."""
    noise = [0.25, -0.2, 0.15, -0.25, 0.2]
    tried = make_trials(WORK, (1, 1, 1, 1), noise)
    made, _ = fit_rates(Sums(), tried)  # type: ignore[arg-type]
    missed = []
    for i, one in enumerate(tried):
        other, _ = fit_rates(Sums(), [*tried[:i], *tried[i + 1 :]])  # type: ignore[arg-type]
        expected = Sums(other).estimate(one.candidate).step_seconds
        missed.append(math.log(one.step_seconds / expected))
    wanted = math.sqrt(np.mean(np.square(missed)))
    assert made.calibration.spread == pytest.approx(wanted, rel=0.1)


def test_a_candidate_alone_moves_the_rates_that_it_depends_on():
    """One of products twice as slow as said: their rate moves, and the others hardly."""
    (tried,) = make_trials([1], (0.5, 1, 1, 1))
    _, found = fit_rates(Sums(), [tried])  # type: ignore[arg-type]
    assert found["products"] == pytest.approx(0.5, rel=0.05)
    for name in ("memory", "links", "launches"):
        assert found[name] == pytest.approx(1, abs=0.03)


def test_rates_of_gpus_stay_below_their_peak(tmp_path):
    made = scale_rates(H100, {"products": 2.0, "links": 0.5})
    assert made.matmul.efficiency == 1.0
    assert max(x for name, x in made.attention.items() if name.endswith("ward")) <= 1.0
    assert made.attention["half_tokens"] == H100.attention["half_tokens"]
    assert made.domain.rate("psum")[0] == pytest.approx(H100.domain.rate("psum")[0] / 2)
    assert made.network == H100.network
    file = tmp_path / "machine.toml"
    file.write_text(made.to_toml())
    assert hardware(file) == made


def test_candidates_are_ranked_by_what_they_took():
    """Those that were not tried by what they are expected to take with the fitted rates."""
    ranked = make_candidates(2, 3, 5, 1, 4)
    said: list[str] = []

    def run(candidate: TrainConfig) -> Timing:
        if candidate.data.global_batch == 5:
            raise RuntimeError("Traceback\nOutOfMemoryError: none is left")
        return Timing([9.0, {2: 8.0, 3: 3.0, 1: 4.0}[candidate.data.global_batch], 1.0])

    tried = try_best(ranked, Sums(), 4, run, say=said.append)  # type: ignore[arg-type]
    assert len(said) == 4
    assert "trying 1 of 4: one rank 1 of 2 none" in said[0]
    assert [x.candidate.data.global_batch for x in tried.trials] == [3, 1, 2, 5]
    assert [x.step_seconds for x in tried.trials] == [3.0, 4.0, 8.0, math.inf]
    four = Sums(tried.machine).estimate(ranked[4].candidate).step_seconds
    order = {3: 3.0, 1: 4.0, 2: 8.0, 5: math.inf, 4: four}
    assert [x.candidate.data.global_batch for x in tried.best] == sorted(
        order, key=order.__getitem__
    )
    assert "4 failed: OutOfMemoryError: none is left" in str(tried)
    assert f"{3.0 / ranked[1].estimate.step_seconds:.2f}" in str(tried)

    def fail(candidate: TrainConfig) -> Timing:
        raise OSError("no space")

    with pytest.raises(
        RuntimeError, match="all candidates that were tried failed\n  - 1: no space"
    ):
        try_best(ranked, Sums(), 1, fail)  # type: ignore[arg-type]


def test_a_machine_that_is_elsewhere(monkeypatch):
    assert check_machine_is_here(CPU, 64) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"gpus: got 0 here; wanted 8 x NVIDIA H100.*leave --try out"
    ):
        check_machine_is_here(H100, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ValueError, match=r"hardware: got NVIDIA H100.*; wanted NVIDIA A100"):
        check_machine_is_here(H100, 8)
    with pytest.raises(ValueError, match=r"gpus: got 8 here; wanted 16 x NVIDIA A100.*--gpus"):
        check_machine_is_here(hardware("a100"), 16)
    assert check_machine_is_here(
        replace(hardware("a100"), name=f"{hardware('a100').name}, measured on 1 x 8"), 8
    )


def test_steps_are_those_of_the_run(monkeypatch):
    """As many as are asked for and three before, of the run's sizes, which data does not matter to."""
    given = configure(
        gpt={"num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_seq": 8}, seq=8, global_batch=2,
        data__path="missing.jsonl", data__format="text", eval_every=1,
    )  # fmt: skip
    config = configure(with_precision(given, "float32"), compile=False)
    seen: list[Any] = []

    def prepare_and_look(config: Any, *rest: Any) -> Any:
        run = prepare(config, *rest)
        seen.append((run.config.gpt, run.config.data.seq, run.config.data.global_batch))

        def step(state: Any, batch: Any) -> Any:
            seen.append(tuple(batch["tokens"].shape))
            return run.step(state, batch)

        return replace(run, step=step)

    monkeypatch.setattr(trials, "prepare", prepare_and_look)
    timing = time_steps(config, Mesh(), torch.device("cpu"), 2)
    assert len(timing.seconds) == 2
    assert min(timing.seconds) > 0
    assert seen == [(config.gpt, 8, 2), *[(2, 8)] * 5]


SMALL = shlex.split(
    "--hardware cpu --gpt.num-layers 2 --gpt.embed-dim 32 --gpt.num-heads 2 --gpt.max-seq 32 "
    "--global-batch 4 --cpu-seconds 3 --fix offload=true,remat=none,rows=2"  # which is not compiled
)


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.full)])
def test_plan_tries(gpus, tmp_path, capsys):
    machine, out = tmp_path / "machine.toml", tmp_path / "best.toml"
    given = ["--gpus", str(gpus), "--try", str(gpus), "--refit", str(machine), "--out", str(out)]
    assert main(["plan", *SMALL, *given]) == 0
    printed = capsys.readouterr().out
    rows = printed.partition("tried, 10 steps each:")[2].splitlines()[3 : 3 + gpus]
    measured = [float(row.split()[-3]) for row in rows]
    assert measured == sorted(measured)
    made = hardware(machine)
    assert (made.calibration.rows, made.calibration.kin) == (gpus, "")
    assert made.peak_flops != CPU.peak_flops
    assert "wrote" in printed
    assert out.is_file()


def test_plan_does_not_search_what_it_cannot_try(capsys):
    given = [
        "--hardware",
        "h100",
        "--gpus",
        "4096",
        "--try",
        "5",
        "--model",
        "llama3-8b",
        "--global-batch",
        "4096",
    ]
    assert main(["plan", *given]) == 2
    assert "candidates cannot be tried on this machine" in capsys.readouterr().err
    assert main(["plan", "--refit", "x.toml"]) == 2
    assert "add --try 5" in capsys.readouterr().err
