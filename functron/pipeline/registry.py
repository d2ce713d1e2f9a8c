"""Schedules by name, or by the path of a text file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from functron.errors import Problem, nearest, raise_problems
from functron.pipeline import classic, dualpipe, zero_bubble
from functron.pipeline.schedule import Schedule

_GENERATORS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": classic.gpipe,
        "1f1b": classic.one_f_one_b,
        "eager-1f1b": classic.eager_one_f_one_b,
        "interleaved": classic.interleaved,
        "breadth-first": classic.breadth_first,
        "combined-1f1b": classic.combined_one_f_one_b,
        "zb-h1": zero_bubble.zb_h1,
        "zb-h2": zero_bubble.zb_h2,
        "zbv": zero_bubble.zbv,
        "v-min": zero_bubble.v_min,
        "v-half": zero_bubble.v_half,
        "dualpipe": dualpipe.dualpipe,
        "dualpipev": dualpipe.dualpipev,
        "forward": classic.forward,
    }
)

NAMES = tuple(_GENERATORS)
"""The names that `make` knows."""


def make(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    **options: int | None,
) -> Schedule:
    """The schedule of this name for these counts, or the one in a text file.

    Args:
        name: one of `NAMES`, or the path of a file that `Schedule.load` reads; it is validated.
        num_ranks: how many ranks there are.
        num_microbatches: microbatches per step.
        num_chunks: stages per rank; None: what the schedule has, 2 for interleaved and
            breadth-first, 1 where both are possible.
        options: more arguments of the schedule's function: `group_size` of interleaved and
            combined-1f1b.

    Raises:
        ValueError: no such name, file or option; counts that the schedule does not admit; a table
            in a file that is invalid, or for other counts.
    """
    if name not in _GENERATORS:
        return _from_file(name, num_ranks, num_microbatches, num_chunks, options)
    generator = _GENERATORS[name]
    known = [*inspect.signature(generator).parameters][2:]
    problems = _unknown_options(options, [k for k in known if k != "num_chunks"])
    given = {key: value for key, value in options.items() if value is not None}
    if num_chunks is not None and "num_chunks" in known:
        given["num_chunks"] = num_chunks
    raise_problems(f"schedule {name}", problems)
    schedule = generator(num_ranks, num_microbatches, **given)
    if num_chunks is not None:
        raise_problems(f"schedule {name}", _wrong(schedule, num_chunks=num_chunks))
    return schedule


def _unknown_options(options: Mapping[str, object], known: list[str]) -> list[Problem]:
    return [
        Problem(key, f"{key}={value}", "an option of this schedule", nearest(key, known))
        for key, value in options.items()
        if key not in known
    ]


def _from_file(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    options: Mapping[str, object],
) -> Schedule:
    """The validated schedule in the file `name`, if it has these counts."""
    if not Path(name).is_file():
        fix = f"{nearest(name, NAMES)}, or the path of a table"
        raise_problems("schedule", [Problem("name", repr(name), "a schedule", fix)])
    schedule = Schedule.load(name)
    schedule.validate()
    problems = _unknown_options(options, [])
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    problems += _wrong(schedule, **counts)
    if num_chunks is not None:
        problems += _wrong(schedule, num_chunks=num_chunks)
    raise_problems(f"schedule {name}", problems)
    return schedule


def _wrong(schedule: Schedule, **counts: int) -> list[Problem]:
    """The counts that are not the schedule's."""
    return [
        Problem(key, str(count), f"{wanted}, as in the schedule", f"give {wanted}")
        for key, count in counts.items()
        if count != (wanted := getattr(schedule, key))
    ]
