"""Proportions that a user writes: of the parts of a corpus, and of the sources of a blend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from functron.errors import Problem, raise_problems

TOLERANCE = Fraction(1, 1000)
"""By how much fractions may miss 1: as much as rounding them to some digits does."""


def proportions(
    values: Sequence[float | int | str | Fraction], what: str, *, zero: bool = False
) -> tuple[Fraction, ...]:
    """``value / sum(values)``, exactly.

    Whole numbers are shares of their sum, whatever that is: 969, 30 and 1 say the same as 0.969,
    0.03 and 0.001. Where one of them is no whole number, all are fractions of one whole, and
    make it: a sum other than 1 means that one is missing or mistyped.

    Args:
        values: numbers, or how they are written.
        what: the name of `values` in errors.
        zero: allow zeros, though not zeros alone.

    Raises:
        ValueError: no numbers, NaN or infinite, negative, zero, or fractions that do not sum to 1;
            all of them are listed.
    """
    raise_problems(f"these {what} make no sense", _mistakes(values, what, zero))
    exact = [Fraction(str(value)) for value in values]
    total = sum(exact)
    whole = all(value.denominator == 1 for value in exact)
    if not total or (not whole and abs(total - 1) > TOLERANCE):
        got = f"{', '.join(map(str, values)) or 'nothing'}, a sum of {float(total):g}"
        fix = "add what is missing, or give whole numbers, which are shares of their sum"
        if total:
            written = ", ".join(f"{float(value / total):.4g}" for value in exact)
            fix += f"; for the same proportions: {written}"
        problem = Problem(what, got, "fractions that sum to 1", fix)
        raise_problems(f"these {what} make no sense", [problem])
    return tuple(value / total for value in exact)


def _mistakes(values: Sequence, what: str, zero: bool) -> Iterator[Problem]:
    wanted = "a finite number, at least 0" if zero else "a finite number above 0"
    for index, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            fix = "" if zero or number != 0 else "leave out what is not to be used"
            yield Problem(f"{what}[{index}]", str(value), wanted, fix)
