"""Other sizes of a run: batches and numbers of GPUs that suit it better, and those that a deadline
or a budget takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from functron.apps.planner.search import (
    Choices,
    Ranked,
    search,
)
from functron.apps.planner.space import (
    Space,
    describe_way,
)
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.tables import table
from functron.training.config import configure

_WINDOW = 1 / 8
"""How far from what was asked for other batches and numbers of GPUs are tried, as a fraction."""
_MOST_TRIED = 6
_SECONDS_PER_DAY = 86400
_MOST_GPUS = 1 << 18


class Neighbour(NamedTuple):
    """Another batch or number of GPUs, and its best candidate.

    Attributes:
        gpus: number of GPUs.
        global_batch: samples of a step.
        best: the fastest candidate.
        gain: how many more tokens a second and GPU it takes, as a fraction.
    """

    gpus: int
    global_batch: int
    best: Ranked
    gain: float

    def __str__(self) -> str:
        return (
            f"{self.global_batch} samples a step on {self.gpus} GPUs: {self.gain:.0%} more tokens "
            f"a second and GPU, {describe_way(self.best.candidate)}"
        )


def find_neighbours(
    space: Space, model: Choices, best: Ranked, *, cpu_seconds: float, least_gain: float = 0.05
) -> list[Neighbour]:
    """Batches and numbers of GPUs close to those of a plan that use each GPU better, best first.

    Tried are the nearest multiples of numbers of data-parallel ranks and stages that the batch is
    no multiple of, and numbers of GPUs that a higher power of two divides.

    Args:
        space: of the plan.
        model: as of `search`.
        best: the plan's fastest candidate.
        cpu_seconds: CPU time for all of them.
        least_gain: of those that are returned.
    """
    sizes = [*_list_batches(space), *_list_gpus(space)]
    rate = _tokens_per_gpu_second(best, space.gpus)
    found = []
    for gpus, batch in sizes:
        one = _find_best(space, model, gpus, batch, cpu_seconds / len(sizes))
        if one is not None:
            gain = _tokens_per_gpu_second(one, gpus) / rate - 1
            found.append(Neighbour(gpus, batch, one, gain))
    return sorted((x for x in found if x.gain > least_gain), key=lambda x: -x.gain)


def _tokens_per_gpu_second(one: Ranked, gpus: int) -> float:
    return one.estimate.tokens_per_second / gpus


def _list_batches(space: Space) -> list[tuple[int, int]]:
    """The GPUs of a plan with other batches, the nearest first."""
    batch, gpus = space.config.data.global_batch, space.gpus
    parts = [n for n in range(2, gpus + 1) if gpus % n == 0 and batch % n]
    near = {batch - batch % n + more for n in parts for more in (0, n)}
    inside = [x for x in near if x > 0 and abs(x - batch) <= batch * _WINDOW]
    return [(gpus, x) for x in sorted(inside, key=lambda x: abs(x - batch))[:_MOST_TRIED]]


def _list_gpus(space: Space) -> list[tuple[int, int]]:
    """Other numbers of GPUs with the batch of a plan, those of the highest powers of two first."""
    gpus = space.gpus
    inside = range(math.ceil(gpus * (1 - _WINDOW)), math.floor(gpus * (1 + _WINDOW)) + 1)
    near = {n for n in (*inside, gpus - 1, gpus + 1) if n > 0 and n & -n > gpus & -gpus}
    ranked = sorted(near, key=lambda n: (-(n & -n), abs(n - gpus)))
    return [(n, space.config.data.global_batch) for n in ranked[:2]]


def _find_best(
    space: Space, model: Choices, gpus: int, global_batch: int, cpu_seconds: float
) -> Ranked | None:
    """The fastest candidate of a space with other sizes; None: none can be run, or fits."""
    try:
        config = configure(space.config, global_batch=global_batch)
        other = replace(space, gpus=gpus, config=config)
        found = search(other, model, top=1, cpu_seconds=cpu_seconds)
    except ValueError:  # the sizes do not go together
        return None
    return found.best[0] if found.best else None


@dataclass(frozen=True)
class Target:
    """The limits of a whole training run, in time and money.

    Attributes:
        tokens: that it trains on.
        days: until it ends; infinite: any time.
        dollars: that it may cost; infinite: any sum.
        gpu_hour_dollars: the price of a GPU for an hour.
    """

    tokens: float
    days: float = math.inf
    dollars: float = math.inf
    gpu_hour_dollars: float = 0.0

    def __post_init__(self):
        counts = {"tokens": self.tokens, "days": self.days, "dollars": self.dollars}
        found = [Problem(name, f"{x:g}", "above 0") for name, x in counts.items() if not x > 0]
        if math.isfinite(self.dollars) and not self.gpu_hour_dollars > 0:
            got = f"{self.gpu_hour_dollars:g} with a budget"
            found.append(Problem("gpu_hour_dollars", got, "above 0", "give the price of a GPU"))
        raise_problems("no such target", found)


class SizedPlan(NamedTuple):
    """The fastest candidate on so many GPUs, and its whole run.

    Attributes:
        gpus: number of GPUs.
        best: the fastest candidate.
        days, dollars: of the whole run.
    """

    gpus: int
    best: Ranked
    days: float
    dollars: float

    @classmethod
    def of(cls, gpus: int, best: Ranked, target: Target) -> SizedPlan:
        """The run of a candidate on all tokens of a target."""
        hours = best.estimate.gpu_hours(target.tokens)
        return cls(gpus, best, hours / gpus / 24, hours * target.gpu_hour_dollars)


class FoundSizes(NamedTuple):
    """The result of `find_gpus`; prints as a table.

    Attributes:
        chosen: the one that meets the target.
        tried: all, by their number of GPUs.
        target: that was asked for.
    """

    chosen: SizedPlan
    tried: tuple[SizedPlan, ...]
    target: Target

    def __str__(self) -> str:
        rows = [["GPUs", "mesh", "step seconds", "days", "GPU hours", "MWh"]]
        priced = self.target.gpu_hour_dollars > 0
        rows[0] += ["dollars"] * priced
        for each in self.tried:
            estimate, tokens = each.best.estimate, self.target.tokens
            megawatt_hours = estimate.energy_joules(tokens) / 3.6e9
            cells = [
                f"{each.gpus:,}", each.best.candidate.parallelism.mesh or "one rank",
                f"{estimate.step_seconds:.3g}", f"{each.days:,.1f}",
                f"{estimate.gpu_hours(tokens):,.0f}", f"{megawatt_hours:,.0f}",
            ]  # fmt: skip
            rows.append(cells + [f"{each.dollars:,.0f}"] * priced)
        return f"{table(rows, left=2)}\n\n{self.summary()}"

    def summary(self) -> str:
        """The number of GPUs, in a line."""
        dollars = f" and ${self.chosen.dollars:,.0f}" * (self.target.gpu_hour_dollars > 0)
        return (
            f"{self.target.tokens:.3g} tokens take {self.chosen.gpus:,} GPUs "
            f"{self.chosen.days:,.1f} days{dollars}"
        )


def find_gpus(
    space: Space, model: Choices, target: Target, *, cpu_seconds: float = 30.0
) -> FoundSizes:
    """The fewest GPUs that train in time; without a limit of time the most that the budget pays.

    Tried are multiples of the space's GPUs by 1, 2, 3, 4, 6, 8, 12 and so on. A run never gets
    faster by more than the GPUs that are added to it, so that many are left out.

    Args:
        space: its GPUs are those of which multiples are tried, such as those of a machine.
        model: as of `search`.
        target: of the run.
        cpu_seconds: CPU time for each number of GPUs.

    Raises:
        ValueError: no number meets the target.
    """
    tried: list[SizedPlan] = []
    least = 0.0
    for gpus in _list_counts(space.gpus):
        if gpus < least:
            continue
        best = _find_best(space, model, gpus, space.config.data.global_batch, cpu_seconds)
        if best is None and tried:
            break  # the batch is too small for more
        if best is None:
            continue
        tried.append(SizedPlan.of(gpus, best, target))
        least = 0.99 * gpus * tried[-1].days / target.days
        if tried[-1].days <= target.days < math.inf or tried[-1].dollars > target.dollars:
            break
    met = [x for x in tried if x.days <= target.days and x.dollars <= target.dollars]
    if not met:
        _refuse_target(space, target, tried)
    pick: Any = max if math.isinf(target.days) else min
    return FoundSizes(pick(met, key=lambda x: x.gpus), tuple(tried), target)


def _list_counts(unit: int) -> Iterator[int]:
    """Multiples of a number of GPUs by powers of two, and by three times these."""
    factor = 1
    while unit * factor <= _MOST_GPUS:
        yield unit * factor
        if factor > 1:
            yield unit * factor * 3 // 2
        factor *= 2


def _refuse_target(space: Space, target: Target, tried: list[SizedPlan]) -> None:
    wanted = [f"{target.days:g} days"] * math.isfinite(target.days)
    wanted += [f"${target.dollars:,.0f}"] * math.isfinite(target.dollars)
    if tried:
        fastest = min(tried, key=lambda x: x.days)
        cheapest = min(tried, key=lambda x: x.dollars)
        got = f"{fastest.days:,.1f} days on {fastest.gpus:,} GPUs at best"
        if target.gpu_hour_dollars:
            got += f", ${cheapest.dollars:,.0f} on {cheapest.gpus:,} at least"
    else:
        got = f"no number of GPUs, a multiple of {space.gpus}, on which it can be run"
    fix = "raise --global-batch or the target, or take fewer tokens or another --hardware"
    refuse("no number of GPUs meets the target", "gpus", got, " and ".join(wanted), fix)
