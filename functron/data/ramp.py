"""Batch sizes that grow during training, as a pure function of the step."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from functron.core.errors import Problem, raise_problems, refuse


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
        problems = list(_problems(self.start, self.increment, self.samples, self.final))
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

    def batch_size_after(self, samples: int) -> int:
        """How many samples a step has that begins after so many, as Megatron's calculator has it.

        ``batch_size_after(first_sample(step)) == batch_size(step)``; after any other number of
        samples, as where a run goes on that had other sizes before, it is what comes next.
        """
        if samples >= self.samples:
            return self.final
        increments = (self.final - self.start) // self.increment
        return self.start + self.increment * (max(samples, 0) * increments // self.samples)

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


def parse_ramp_up(text: str, final: int) -> RampUp:
    """The batch sizes that ``"START INCREMENT SAMPLES"`` describes; of empty text, `final` always.

    Args:
        text: three whole numbers, as Megatron-LM's --rampup-batch-size takes them.
        final: the size afterwards.

    Raises:
        ValueError: it is no such text, or what `RampUp` raises, in the words of `TrainConfig`.
    """
    words = text.split() or [str(final), "1", "1"]
    if len(words) != 3 or not all(word.isdecimal() for word in words):
        part = max(final // 4, 1)
        fix = f'write --ramp-up "{part} {part} 1000", or leave it out'
        wanted = "three whole numbers: START INCREMENT SAMPLES"
        refuse("batch sizes cannot grow like this", "ramp_up", repr(text), wanted, fix)
    start, increment, samples = map(int, words)
    if text.strip():
        names = [f"ramp_up={text!r}: {name}" for name in ("START", "INCREMENT", "SAMPLES")]
        problems = list(_problems(start, increment, samples, final, (*names, "global_batch")))
        raise_problems("batch sizes cannot grow like this", problems)
    return RampUp(start, increment, samples, final)


def _problems(
    start: int,
    increment: int,
    samples: int,
    final: int,
    names: Sequence[str] = ("start", "increment", "samples", "final"),
) -> Iterator[Problem]:
    """The mistakes of a ramp whose four numbers have these names."""
    values = (start, increment, samples, final)
    small = [
        Problem(name, repr(value), "a whole number of at least 1")
        for name, value in zip(names, values, strict=True)
        if not isinstance(value, int) or value < 1
    ]
    yield from small
    if small:
        return
    grown = final - start
    if grown < 0 or grown % increment:
        fix = f"set it to {start + max(0, round(grown / increment)) * increment}"
        yield Problem(names[3], str(final), f"{start} and a multiple of {increment}", fix)
    elif samples < grown // increment:
        wanted = f"at least the {grown // increment} increments"
        yield Problem(names[2], str(samples), wanted, f"set it to {grown // increment} or more")
