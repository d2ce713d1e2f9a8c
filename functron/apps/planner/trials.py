"""Short real runs of a plan's best candidates, and the machine whose rates follow from them.

`time_steps` is what every process of a candidate runs. `try_best` compares the candidates' measured
and expected times, ranks them again, and fits the rates of the machine.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from functron.apps.planner.machines import Hardware, Links, find_hardware, is_known, write_whole
from functron.apps.planner.report import Estimate
from functron.apps.planner.search import Choices, Ranked
from functron.apps.planner.space import COLUMNS, describe_cells, describe_way
from functron.core.errors import Problem, raise_problems
from functron.core.tables import bytes_text, table
from functron.program import cost
from functron.spmd import BoundMesh, Mesh
from functron.training.config import TrainConfig
from functron.training.run import prepare, torch_settings

NUM_STEPS = 10
"""Steps of a candidate that count."""
_WARM_UP = 3  # the first compiles, and memory is taken in the first two


class Timing(NamedTuple):
    """The measured steps of a candidate.

    Attributes:
        seconds: of each step.
        peak_memory_bytes: of the fullest GPU; 0 on CPUs, where other parts of a process count too.
    """

    seconds: Sequence[float]
    peak_memory_bytes: int = 0


def time_steps(
    config: TrainConfig, mesh: Mesh | BoundMesh, device: torch.device, num_steps: int = NUM_STEPS
) -> Timing:
    """Take steps of a run from random parameters and random tokens; nothing is saved.

    Of the run its model, optimizer, precision, parallelism and sizes count, and nothing else: what
    a plan is about.

    Collectives: those of the steps, and of a GPU's memory a maximum over all processes.

    Args:
        config: of a GPT.
        mesh: bound to processes, which all call this.
    """
    plain = TrainConfig()
    sizes = {"seq": config.data.seq, "global_batch": config.data.global_batch}
    data = replace(plain.data, format="mock", prefetch=0, **sizes)
    names = ("model", "gpt", "optimizer", "precision", "parallelism", "compute")
    given = {name: getattr(config, name) for name in names}
    bare = replace(plain, data=data, **given)
    seconds = []
    with torch_settings(bare):
        run = prepare(bare, mesh, device)
        state = run.state
        for index in range(_WARM_UP + num_steps):
            batch = run.on_device(run.host_batch(index))
            cost.synchronize(device)
            began = time.perf_counter()
            state, metrics = run.step(state, batch)
            float(metrics["loss"])
            cost.synchronize(device)
            seconds.append(time.perf_counter() - began)
    peak = torch.zeros((), dtype=torch.int64, device=device)
    if device.type == "cuda":
        peak += torch.cuda.max_memory_allocated(device)
        if isinstance(mesh, BoundMesh):
            dist.all_reduce(peak, dist.ReduceOp.MAX)
    return Timing(seconds[_WARM_UP:], int(peak))


def check_machine_is_here(machine: Hardware, gpus: int) -> str:
    """The kind of device to try candidates on: "cpu" for a machine of CPUs, or "cuda".

    Raises:
        ValueError: the GPUs here are too few, or of another kind.
    """
    if machine.host.computes:
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    if count < gpus:
        fix = "run it where they are, or plan for fewer: --gpus" if count else "leave --try out"
        found.append(Problem("gpus", f"{count} here", f"{gpus} x {machine.name}", fix))
    name = torch.cuda.get_device_name() if count else ""
    if name and is_known(name) and not machine.name.startswith(find_hardware(name).name):
        fix = "plan for these GPUs: --hardware with their name, or the file of functron doctor"
        found.append(Problem("hardware", machine.name, f"{name}, which is here", fix))
    raise_problems("candidates cannot be tried on this machine", found)
    return "cuda"


# --- measured and expected


class Trial(NamedTuple):
    """A candidate that was tried.

    Attributes:
        candidate: its configuration.
        expected: the estimate before it was tried.
        timing: of its steps; None: it failed.
        failure: the last line of why it failed.
    """

    candidate: TrainConfig
    expected: Estimate
    timing: Timing | None
    failure: str = ""

    @property
    def step_seconds(self) -> float:
        """The median of the measured steps; infinite if it failed."""
        return math.inf if self.timing is None else statistics.median(self.timing.seconds)


@dataclass(frozen=True)
class TriedPlan:
    """Candidates as they were tried, the fastest first; prints as a table.

    Attributes:
        trials: those that ran, by their measured time, and those that failed.
        machine: with rates that were fitted to them; see `fit_rates`.
        factors: what its rates are, times those before.
        best: the fastest of those tried, and the others by their estimates on `machine`.
    """

    trials: tuple[Trial, ...]
    machine: Hardware
    factors: Mapping[str, float]
    best: tuple[Ranked, ...]

    def write_machine(self, path: Path) -> None:
        """Write the machine as a file that `hardware` reads; it is never there in part."""
        write_whole(path, self.machine.to_toml())

    def __str__(self) -> str:
        head = ["", *COLUMNS, "expected", "measured", "ratio", "fitted"]
        rows = [head]
        fitted = {one.candidate: one.estimate.step_seconds for one in self.best}
        for number, one in enumerate(self.trials, 1):
            cells = [str(number), *describe_cells(one.candidate)]
            seconds, wanted = one.step_seconds, one.expected.step_seconds
            if one.timing is None:
                rows.append([*cells, f"{wanted:.3g}", "failed", "", ""])
            else:
                after = f"{fitted[one.candidate]:.3g}"
                times = [f"{wanted:.3g}", f"{seconds:.3g}", f"{seconds / wanted:.2f}", after]
                rows.append([*cells, *times])
        lines = [f"tried, {NUM_STEPS} steps each:", "", table(rows, left=7), ""]
        lines += [f"{i} failed: {x.failure}" for i, x in enumerate(self.trials, 1) if x.failure]
        held = max((x.timing.peak_memory_bytes for x in self.trials if x.timing), default=0)
        lines += [f"memory of the fullest, measured: {bytes_text(held)}"] if held else []
        listed = ", ".join(f"{name} {x:.2f}" for name, x in self.factors.items())
        spread = self.machine.calibration.spread
        lines.append(
            f"rates fitted to these, times what they were: {listed}; leaving each candidate out of "
            f"the fit, it is missed by {spread:.1%}"
        )
        if self.best[0].estimate.step_seconds < self.trials[0].step_seconds * (1 - spread):
            lines.append("by the fitted rates another candidate is faster than all of these")
        return "\n".join(lines)


def try_best(
    ranked: Sequence[Ranked],
    model: Choices,
    count: int,
    run: Callable[[TrainConfig], Timing],
    *,
    say: Callable[[str], None] = lambda text: None,
) -> TriedPlan:
    """Run the best candidates, rank all again, and fit the machine's rates to what was measured.

    Args:
        ranked: candidates with their estimates, the fastest first.
        model: that made the estimates.
        count: how many to run.
        run: runs a candidate and returns its times; an OSError or RuntimeError says that it failed.
        say: is told of each as it begins.

    Raises:
        RuntimeError: all failed; with the reasons.
    """
    found: list[Trial] = []
    for number, (candidate, expected) in enumerate(ranked[:count], 1):
        say(f"trying {number} of {min(count, len(ranked))}: {describe_way(candidate)}")
        timing, failure = None, ""
        try:
            timing = run(candidate)
        except (OSError, RuntimeError) as error:
            failure = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        found.append(Trial(candidate, expected, timing, failure))
    done = [one for one in found if one.timing is not None]
    if not done:
        listed = "\n".join(f"  - {i}: {one.failure}" for i, one in enumerate(found, 1))
        raise RuntimeError(f"all candidates that were tried failed\n{listed}")
    machine, factors = fit_rates(model, done)
    fitted = replace(model, machine=machine)
    again = [Ranked(c, fitted.estimate(c, exact=True)) for c, _ in ranked]
    measured = {one.candidate: one.step_seconds for one in found}

    def order(one: Ranked) -> float:
        return measured.get(one.candidate, one.estimate.step_seconds)

    found.sort(key=lambda one: one.step_seconds)
    return TriedPlan(tuple(found), machine, factors, tuple(sorted(again, key=order)))


# --- fitting rates

RATES: Sequence[str] = ("products", "memory", "links", "launches")
"""The rates that are fitted: of matrix products and attention, of memory, of links within a domain,
and of launches of kernels."""
_PRIOR, _NOISE = 0.3, 0.03
"""Standard deviations of the logarithms of a machine's rates around what its file says, and of the
median of some steps."""
_STEP, _ROUNDS = 0.02, 4


def scale_rates(machine: Hardware, factors: Mapping[str, float]) -> Hardware:
    """The machine with rates times these factors, by the names of `RATES`.

    Products of a GPU reach at most its peak.
    """
    f = {name: factors.get(name, 1.0) for name in RATES}
    memory = replace(machine.memory, bytes_per_second=machine.memory.bytes_per_second * f["memory"])
    host = replace(machine.host, launch_seconds=machine.host.launch_seconds / f["launches"])
    given: dict[str, Any] = {"memory": memory, "host": host}
    given["domain"] = _scale_links(machine.domain, f["links"])
    given["kernel_seconds"] = machine.kernel_seconds / f["launches"]
    if machine.host.computes:  # whose peak is what was measured
        given["peak_flops"] = {n: x * f["products"] for n, x in machine.peak_flops.items()}
    else:
        efficiency = min(1.0, machine.matmul.efficiency * f["products"])
        given["matmul"] = replace(machine.matmul, efficiency=efficiency)
        given["attention"] = MappingProxyType({
            name: min(1.0, x * f["products"]) if name.endswith(("forward", "backward")) else x
            for name, x in machine.attention.items()
        })  # fmt: skip
    return replace(machine, **given)


def _scale_links(links: Any, factor: float) -> Links:
    measured = {
        op: {
            "bytes_per_second": own["bytes_per_second"] * factor,
            "latency_seconds": own["latency_seconds"] / factor,
        }
        for op, own in links.measured.items()
    }
    return dataclasses.replace(
        links, bytes_per_second=links.bytes_per_second * factor,
        latency_seconds=links.latency_seconds / factor, measured=MappingProxyType(measured),
    )  # fmt: skip


def fit_rates(model: Choices, trials: Sequence[Trial]) -> tuple[Hardware, Mapping[str, float]]:
    """The machine whose rates fit measured steps, and the factors by which these differ.

    The most probable factors f: the least of ``sum(log(measured / expected(f))^2) / noise^2 +
    sum(log(f)^2) / prior^2``, by Gauss-Newton steps. A rate that no step depends on stays. The
    calibration's spread is the root of the mean square of errors, each of a candidate that is left
    out of the fit: ``r / (1 - h)`` with its leverage h (Allen 1974, PRESS), and at least the noise.

    Args:
        model: of the run and the machine.
        trials: candidates that ran.
    """
    measured = np.log([one.step_seconds for one in trials])

    def expect(logs: np.ndarray) -> np.ndarray:
        factors = dict(zip(RATES, np.exp(logs), strict=True))
        other = replace(model, machine=scale_rates(model.machine, factors))
        return np.log([other.estimate(x.candidate, exact=True).step_seconds for x in trials])

    logs, inverse = np.zeros(len(RATES)), np.eye(len(RATES)) / _PRIOR**2
    for _ in range(_ROUNDS):
        now = expect(logs)
        shifts = [expect(logs + _STEP * unit) for unit in np.eye(len(RATES))]
        slopes = (np.stack(shifts, axis=1) - now[:, None]) / _STEP
        covariance = np.linalg.inv(slopes.T @ slopes / _NOISE**2 + inverse)
        logs = covariance @ slopes.T @ (measured - now + slopes @ logs) / _NOISE**2
    leverage = np.einsum("ij,jk,ik->i", slopes, covariance, slopes) / _NOISE**2
    missed = (measured - expect(logs)) / (1 - leverage)
    spread = max(_NOISE, math.sqrt(float(np.mean(missed**2))))
    factors = {name: float(x) for name, x in zip(RATES, np.exp(logs), strict=True)}
    made = scale_rates(model.machine, factors)
    software = ", ".join(sorted({one.expected.software.name for one in trials}))
    own = replace(
        made.calibration, rows=len(trials), spread=round(spread, 4), software=software, kin=""
    )
    return replace(made, calibration=own), MappingProxyType(factors)
