"""Layouts: which stage of a pipeline computes the embedding, which layers, and the loss."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from functron.core.errors import Problem, raise_problems


@dataclass(frozen=True)
class Part:
    """The part of a model that one stage computes.

    Attributes:
        layers: which of the model's layers, from 0.
        embed: whether it begins with the embedding of the tokens.
        loss: whether it ends with the final norm, the logits and the loss.
    """

    layers: range
    embed: bool = False
    loss: bool = False

    def __str__(self) -> str:
        return "E" * self.embed + "t" * len(self.layers) + "L" * self.loss


Layout = tuple[Part, ...]


def whole(num_layers: int) -> Part:
    """The part that computes everything: a model without a pipeline."""
    return Part(range(num_layers), embed=True, loss=True)


def layout_of(counts: Sequence[int]) -> Layout:
    """The layout whose stages have so many layers; embedding and loss at the ends."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    parts = [Part(range(a, a + n)) for a, n in zip(starts, counts, strict=True)]
    parts[0] = replace(parts[0], embed=True)
    parts[-1] = replace(parts[-1], loss=True)
    return tuple(parts)


def format_layout(layout: Layout) -> str:
    """The layout in Megatron's language, as `parse_layout` reads it: ``"Ett|ttt|ttL"``."""
    return "|".join(map(str, layout))


def even_layout(
    num_stages: int, num_layers: int, *, first: int | None = None, last: int | None = None
) -> Layout:
    """Layers in equal numbers per stage; those left over go to the stages in the middle first.

    The middle first, since embedding and loss are work as well.

    Args:
        num_stages: of the pipeline, over all ranks and chunks.
        num_layers: of the model.
        first, last: how many layers the first and last stage get; None: as the others.

    Raises:
        ValueError: a stage would have no layer (write such a layout out), or `first` and `last` do
            not fit.
    """
    fixed = {0: first} if first is not None else {}
    if last is not None:
        fixed[num_stages - 1] = last
    free = [stage for stage in range(num_stages) if stage not in fixed]
    left = num_layers - sum(fixed.values())
    found = [
        Problem(name, str(value), f"from 0 to {num_layers}")
        for name, value in (("first", first), ("last", last))
        if value is not None and not 0 <= value <= num_layers
    ]
    if first is not None and last is not None and num_stages == 1:
        found.append(Problem("last", str(last), "nothing: the only stage is the first"))
    ends = [f"{n}={v}" for n, v in (("first", first), ("last", last)) if v is not None]
    got = f"{num_layers} layers for {num_stages} stages"
    got += f" with {' and '.join(ends)}" if ends else ""
    if not found and (left < 0 or (left and not free)):
        wanted = f"ends that add up to {'at most ' * bool(free)}{num_layers} layers"
        found.append(Problem("layout", got, wanted, "leave one of the ends out"))
    elif not found and left < len(free):
        most = max(len(fixed) + left, 1)
        fix = f"use at most {most} stages, or write the layout out: {_HINT}"
        found.append(Problem("layout", got, "a layer for every stage", fix))
    raise_problems("the layers cannot be laid out evenly", found)
    counts = [fixed.get(stage, 0) for stage in range(num_stages)]
    if free:
        each, extra = divmod(left, len(free))
        middle = sorted(free, key=lambda stage: abs(2 * stage - num_stages + 1))
        for stage in free:
            counts[stage] = each + (stage in middle[:extra])
    return layout_of(counts)


def balanced_layout(
    num_stages: int, layer_costs: Sequence[float], *, embed: float = 0.0, loss: float = 0.0
) -> Layout:
    """The layout whose most expensive stage is cheapest, each stage having at least one layer.

    Found exactly, by dynamic programming over (stages, layers); ties go to the smaller sum of
    squared costs.

    Args:
        num_stages: of the pipeline.
        layer_costs: of each layer, in any unit.
        embed: of the embedding, which the first stage adds.
        loss: of final norm, logits and loss, which the last stage adds.

    Raises:
        ValueError: fewer layers than stages, or a cost that is negative.
    """
    num_layers = len(layer_costs)
    found = [
        Problem(name, f"{value}", "at least 0")
        for name, value in [
            ("embed", embed),
            ("loss", loss),
            *((f"layer_costs/{i}", c) for i, c in enumerate(layer_costs)),
        ]
        if not value >= 0
    ]
    if num_layers < num_stages:
        fix = f"use at most {num_layers} stages"
        found.append(Problem("layout", f"{num_layers} layers", f"at least {num_stages}", fix))
    raise_problems("the layers cannot be laid out by cost", found)
    before = [0.0]
    for cost in layer_costs:
        before.append(before[-1] + cost)

    def cost_of(stage: int, start: int, end: int) -> float:
        extra = embed * (stage == 0) + loss * (stage == num_stages - 1)
        return before[end] - before[start] + extra

    largest, _ = _best_counts(num_stages, num_layers, cost_of, max)

    def square(stage: int, start: int, end: int) -> float:
        cost = cost_of(stage, start, end)
        return cost**2 if cost <= largest else math.inf

    return layout_of(_best_counts(num_stages, num_layers, square, operator.add)[1])


def _best_counts(
    num_stages: int,
    num_layers: int,
    cost_of: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least combined cost of stages with a layer or more each, and how many each one has.

    Args:
        num_stages, num_layers: how many there are.
        cost_of: stage, its first layer and the one after its last, to its cost.
        combine: makes one cost of two: max or a sum.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the layers so far
    for stage in range(num_stages):
        later = num_stages - 1 - stage
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (cost, counts) in best.items():
            for end in range(start + 1, num_layers - later + 1):
                total = combine(cost, cost_of(stage, start, end))
                if end not in after or total < after[end][0]:
                    after[end] = (total, (*counts, end - start))
        best = after
    return best[num_layers]


_HINT = "such as 'Et|tt|tL' (E embedding, t layer, L loss, | between stages, (tt|)*3 repeats)"
_TOKEN = re.compile(r"\s*(?:([EtmL|()])|\*\s*(\d+)|(,)|(.))")


def parse_layout(text: str, num_layers: int, num_stages: int) -> Layout:
    """The layout written in Megatron's language, such as ``"Et*3|(tt|)*29,t|L"``.

    ``E`` is the embedding, ``t`` a layer, ``L`` the loss (with the final norm and the logits),
    ``|`` ends a stage, ``x*3`` and ``(...)*3`` repeat, commas and blanks are ignored. Stages are in
    the order in which a microbatch goes through them. A stage may be empty of layers.

    Args:
        text: the layout.
        num_layers: of the model.
        num_stages: of the pipeline, over all ranks and chunks.

    Raises:
        ValueError: listing everything that is wrong with it.
    """
    symbols, found = _expand(text)
    stages = "".join(symbols).split("|")
    if not found:
        found += _problems(stages, num_layers, num_stages)
    raise_problems(f"cannot use the layout {text!r}", found)
    return layout_of([stage.count("t") for stage in stages])


def _expand(text: str) -> tuple[list[str], list[Problem]]:
    """The symbols of a layout with repetitions written out, and what is wrong with its syntax."""
    found: list[Problem] = []
    open_groups: list[tuple[int, list[str]]] = []
    done: list[str] = []
    last: list[str] | None = None  # what a following *N repeats
    for match in _TOKEN.finditer(text.rstrip()):
        symbol, count, comma, other = match.groups()
        column = match.start(match.lastindex or 0) + 1
        if other:
            found.append(Problem(f"layout column {column}", repr(other), "one of E t L | ( ) *N ,"))
        elif symbol == "m":
            got, wanted = "'m', a multi-token prediction layer", "these to be computed with L"
            found.append(Problem(f"layout column {column}", got, wanted, "leave it out"))
        elif count is not None:
            if last is None:
                fix = "write the repeated layer or group before it"
                found.append(
                    Problem(f"layout column {column}", f"'*{count}'", "something before it", fix)
                )
            else:
                done += last * (int(count) - 1)
                if int(count) == 0:
                    del done[len(done) - len(last) :]
            last = None
        elif symbol == "(":
            open_groups.append((column, done))
            done, last = [], None
        elif symbol == ")" and not open_groups:
            found.append(Problem(f"layout column {column}", "')'", "a '(' before it"))
        elif symbol == ")":
            _, outer = open_groups.pop()
            last, done = done, outer + done
        elif symbol is not None:
            done.append(symbol)
            last = [symbol]
        elif comma:
            last = None
    for column, outer in reversed(open_groups):
        found.append(Problem(f"layout column {column}", "'('", "a ')' after it"))
        done = outer + done
    return done, found


def _problems(stages: Sequence[str], num_layers: int, num_stages: int) -> list[Problem]:
    found = []
    symbols = "".join(stages)
    if symbols.count("t") != num_layers:
        got = f"{symbols.count('t')} layers (t)"
        found.append(Problem("layout", got, f"{num_layers}, as many as the model has"))
    if len(stages) != num_stages:
        got = f"{len(stages)} stages (separated by |)"
        found.append(Problem("layout", got, f"{num_stages}: pipeline ranks x chunks"))
    if symbols.count("E") != 1 or not stages[0].startswith("E"):
        found.append(Problem("layout", repr("|".join(stages)), "one E, at the very beginning"))
    if symbols.count("L") != 1 or not stages[-1].endswith("L"):
        found.append(Problem("layout", repr("|".join(stages)), "one L, at the very end"))
    return found
