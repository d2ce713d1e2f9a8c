"""Batch sizes that grow during training, as a pure function of the step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from functron.errors import Problem, raise_problems


@dataclass(frozen=True)
class RampUp:
    """Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``, without its counter.

    The batch size goes from `start` to `final` in steps of `increment`, each of which lasts for the
    same number of samples: with n increments, after c samples it is
    ``start + increment * floor(c n / samples)``, and `final` once c is `samples`. A step reads what
    there is before it begins, so that sizes change between steps only, and a size is left out where
    one step goes beyond all of its samples.

    Which samples a step has follows in closed form, so data order, resuming and changing the mesh
    stay arithmetic.

    Attributes:
        start: the size of the first batches.
        increment: what is added each time.
        samples: over how many samples the size grows.
        final: the size afterwards.

    Raises:
        ValueError: sizes below 1, a final size that increments do not reach, or fewer samples than
            increments.
    """

    start: int
    increment: int
    samples: int
    final: int

    def __post_init__(self):
        problems = [
            Problem(name, repr(value), "a whole number of at least 1")
            for name in ("start", "increment", "samples", "final")
            if not isinstance(value := getattr(self, name), int) or value < 1
        ]
        if not problems:
            problems = list(_impossible(self))
        raise_problems("batch sizes cannot grow like this", problems)

    @cached_property
    def _stages(self) -> tuple[list[int], list[int], list[int]]:
        """Of every size that comes up: its first step, the samples before that, and the size."""
        increments = (self.final - self.start) // self.increment
        step = consumed = 0
        rows = []
        for stage in range(increments):
            size = self.start + stage * self.increment
            # the first count of samples that is floor(c * increments / samples) > stage
            end = -(-(stage + 1) * self.samples // increments)
            count = max(0, -(-(end - consumed) // size))
            if count:
                rows.append((step, consumed, size))
            step, consumed = step + count, consumed + count * size
        rows.append((step, consumed, self.final))
        steps, samples, sizes = zip(*rows, strict=True)
        return list(steps), list(samples), list(sizes)

    def batch_size(self, step: int) -> int:
        """How many samples the step has; the first step is 0."""
        steps, _, sizes = self._stages
        return sizes[bisect.bisect_right(steps, step) - 1]

    def first_sample(self, step: int) -> int:
        """How many samples all steps before this one have together: where it begins."""
        steps, samples, sizes = self._stages
        stage = bisect.bisect_right(steps, step) - 1
        return samples[stage] + (step - steps[stage]) * sizes[stage]

    def step_of(self, sample: int) -> int:
        """The step that has this sample."""
        steps, samples, sizes = self._stages
        stage = bisect.bisect_right(samples, sample) - 1
        return steps[stage] + (sample - samples[stage]) // sizes[stage]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that come up, ascending: what a mesh must be able to divide."""
        return tuple(self._stages[2])


def _impossible(ramp: RampUp) -> Iterator[Problem]:
    grown = ramp.final - ramp.start
    if grown < 0 or grown % ramp.increment:
        yield Problem(
            "final",
            str(ramp.final),
            f"{ramp.start} and a multiple of {ramp.increment}",
            f"set it to {ramp.start + max(0, round(grown / ramp.increment)) * ramp.increment}",
        )
    elif ramp.samples < grown // ramp.increment:
        yield Problem(
            "samples", str(ramp.samples), f"at least the {grown // ramp.increment} increments"
        )
