"""Layouts and partitions: which layers a stage of a pipeline computes, and what a rank holds.

`collect` puts whole values together from what the ranks hold, for checkpoints and samples.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.random import Index
from functron.spmd.mesh import BoundMesh
from functron.spmd.params import Initializer, ParamDef
from functron.spmd.spec import P, Uneven, entry_axes, is_spec

Pipe = tuple[tuple[int, int], ...]
"""Per stage the (rank, chunk) that holds it."""


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
    """The layout of stages with these numbers of layers; embedding and loss at the ends."""
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
_DIGITS, _MOST = 9, 1_000_000
_TOKEN = re.compile(r"\s*(?:([EtmL|()])|\*\s*(\d+)|(,)|(.))")


_ENDS = re.compile(r"\s*(?:first=(\d+))?\s*,?\s*(?:last=(\d+))?\s*")


def parse_layout(text: str, num_layers: int, num_stages: int) -> Layout:
    """The layout written in Megatron's language, such as ``"Et*3|(tt|)*29,t|L"``; or in short.

    "even" is `even_layout`, as is ``"first=N,last=N"`` with its `first` and `last`.
    ``E`` is the embedding, ``t`` a layer, ``L`` the loss (with the final norm and the logits),
    ``|`` ends a stage, ``x*3`` and ``(...)*3`` repeat, commas and blanks are ignored. Stages are in
    the order in which a microbatch goes through them. A stage may be empty of layers.

    Args:
        num_stages: of the pipeline, over all ranks and chunks.

    Raises:
        ValueError: listing everything that is wrong with it.
    """
    if text == "even":
        return even_layout(num_stages, num_layers)
    ends = _ENDS.fullmatch(text)
    if ends is not None and any(ends.groups()):
        first, last = (int(n) if n else None for n in ends.groups())
        return even_layout(num_stages, num_layers, first=first, last=last)
    symbols, found = _expand(text)
    stages = "".join(symbols).split("|")
    if not found:
        found += _layout_problems(stages, num_layers, num_stages)
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
        problem = functools.partial(Problem, f"layout column {column}")
        if other:
            found.append(problem(repr(other), "one of E t L | ( ) *N ,"))
        elif symbol == "m":
            got = "'m', a multi-token prediction layer"
            found.append(problem(got, "these to be computed with L", "leave it out"))
        elif count is not None:
            if last is None:
                fix = "write the repeated layer or group before it"
                found.append(problem(f"'*{count}'", "something before it", fix))
            elif len(count) > _DIGITS or len(done) + len(last) * int(count) > _MOST:
                wanted = f"a layout of at most {_MOST:,} symbols"
                found.append(problem(f"'*{count[:20]}'", wanted))
            else:
                done += last * (int(count) - 1)
                if int(count) == 0:
                    del done[len(done) - len(last) :]
            last = None
        elif symbol == "(":
            open_groups.append((column, done))
            done, last = [], None
        elif symbol == ")" and not open_groups:
            found.append(problem("')'", "a '(' before it"))
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


def _layout_problems(stages: Sequence[str], num_layers: int, num_stages: int) -> list[Problem]:
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


_LETTERS = "EtL"

Use = str | range | tuple[int, ...] | frozenset[str | int]
"""Which stages use an entry of the parameters: letters, a stack's layers, or some of both; see
`Partition`."""


@dataclass(frozen=True)
class Partition:
    """The parameters of a model that each stage and each rank of a pipeline has.

    A process that runs all ranks holds the model's own tree. A rank on a bound mesh holds a smaller
    one: the top-level entries that its stages use, and of those stacked by layer the rows of its
    layers, chunk after chunk. Names and inner structure are the model's on every rank.

    Models whose layers are of several kinds have a stack of each. With three dense layers before 58
    of experts (DeepSeek-V3) on two ranks, the first holds all rows of one stack and some of the
    other, and the second has no entry ``"dense"``::

        >>> from functron.pipeline import even_layout, make
        >>> uses = {"embed": "E", "dense": range(3), "blocks": range(3, 61), "norm": "L"}
        >>> two = Partition(even_layout(2, 61), make("1f1b", 2, 4).pipes, uses)
        >>> two.held(0), two.held(1)
        (['embed', 'dense', 'blocks'], ['blocks', 'norm'])
        >>> len(two.rows("dense", 0)), len(two.rows("blocks", 0)), len(two.rows("blocks", 1))
        (3, 28, 30)

    Attributes:
        pipes: per pipe, per stage, the (rank, chunk) that holds it, as in a `Schedule`.
        uses: which stages use each entry of the parameters, by its path (``"embed"``,
            ``"model/layers/0"``): "E" the one with the embedding, "L" the one with the loss; "EL"
            both, which then hold copies whose gradients are added (tied embeddings); "t" each its
            own layers' rows of a stack with one per layer of the model; a range, as "t", but the
            stack has one row per layer in the range, in order: ``range(3)``, ``range(3, 61)``,
            every second one ``range(1, 48, 2)``; a tuple of layers, the same; a set of letters and
            numbers of layers, such as ``frozenset({4})`` or ``frozenset({"E", 0, 1})``, those with
            one of them, which hold copies if they are several.
        spread: entries of "E" and "L" that are divided among all ranks of the pipeline, by the dim
            that is: between steps each rank holds, and updates, a part of the vocabulary. In a step
            those that use an entry gather it, and its gradient is divided again.

    Raises:
        ValueError: the layout has not one part per stage, a rank would hold nothing, or `uses` has
            a value that is not known.
    """

    layout: Layout
    pipes: tuple[Pipe, ...]
    uses: Mapping[str, Use]
    spread: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        found = [p for name, use in self.uses.items() for p in _use_problems(name, use)]
        found += [
            Problem(f"spread/{name}", f"an entry that uses={self.uses.get(name)!r}", "E, L or both")
            for name in self.spread
            if _is_stacked(self.uses.get(name, "t")) or {*self.uses[name]} - {"E", "L"}
        ]
        if len(self.layout) != len(self.pipes[0]):
            got = f"{len(self.layout)} stages, {format_layout(self.layout)}"
            found.append(Problem("layout", got, f"{len(self.pipes[0])}, as the schedule has"))
        if not found:
            found = [
                Problem(
                    f"layout {format_layout(self.layout)}",
                    f"no parameters on rank {rank}",
                    "some on every rank: a rank without takes part in nothing",
                    "give one of its stages a layer, or use fewer ranks",
                )
                for rank in range(self.num_ranks)
                if not self.held(rank)
            ]
        raise_problems("cannot divide a model among the ranks of a pipeline", found)

    @property
    def num_stages(self) -> int:
        """How many stages a microbatch goes through."""
        return len(self.layout)

    @functools.cached_property
    def num_ranks(self) -> int:
        """How many ranks hold stages."""
        return 1 + max(rank for pipe in self.pipes for rank, _ in pipe)

    def stages(self, rank: int | None) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of its chunks; all of them for None."""
        if rank is None:
            return tuple(range(self.num_stages))
        held = {
            chunk: stage
            for pipe in self.pipes
            for stage, (holder, chunk) in enumerate(pipe)
            if holder == rank
        }
        return tuple(dict.fromkeys(held[chunk] for chunk in sorted(held)))

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage: one, or as many as there are pipes, in order."""
        return tuple(sorted({pipe[stage][0] for pipe in self.pipes}))

    def layers(self, rank: int | None) -> list[int]:
        """The layers of a rank, in the order of its rows; all of them, in order, for None."""
        return [layer for stage in self.stages(rank) for layer in self.layout[stage].layers]

    def stack(self, name: str) -> range | tuple[int, ...] | None:
        """The layers that a top-level entry has rows of, one each; None: it is not stacked."""
        use = self.uses[name]
        if use == "t":
            return range(max((part.layers.stop for part in self.layout if part.layers), default=0))
        return use if isinstance(use, (range, tuple)) else None

    def rows(self, name: str, rank: int | None) -> list[int]:
        """Which rows of the model's stack `name` a rank holds, in its order; all for None.

        Raises:
            ValueError: the entry is not stacked by layer.
        """
        stack = self.stack(name)
        if stack is None:
            raise ValueError(
                f"rows: got {name!r} with uses={self.uses[name]!r}; wanted a stack, with t or a "
                "range of layers; fix: take the whole entry"
            )
        if rank is None:
            return list(range(len(stack)))
        return _rows_in(stack, self.layers(rank))

    def names(self, stage: int) -> list[str]:
        """The entries of the parameters that a stage uses."""
        part = self.layout[stage]
        has = {*("E" * part.embed), *("L" * part.loss), *part.layers}
        return [
            name
            for name, use in self.uses.items()
            if (part.layers and use == "t")
            or (
                _rows_in(use, part.layers)
                if isinstance(use, (range, tuple))
                else not has.isdisjoint(use)
            )
        ]

    def kind(self, stage: int) -> tuple:
        """The kind of a stage: the same for stages that have as many rows of every stack.

        Stages with layers that are no rows of a stack are of a kind each.
        """
        part = self.layout[stage]
        stacks = ((name, self.stack(name)) for name in self.names(stage))
        counts = {name: len(_rows_in(s, part.layers)) for name, s in stacks if s is not None}
        own = tuple(name for name in self.names(stage) if isinstance(self.uses[name], frozenset))
        return part.embed, part.loss, tuple(counts.items()), own

    def sharers(self, name: str) -> tuple[int, ...]:
        """The ranks that hold an entry that is not stacked by layer, in order."""
        stages = [s for s in range(self.num_stages) if name in self.names(s)]
        return tuple(sorted({rank for stage in stages for rank in self.holders(stage)}))

    def is_tied(self, name: str) -> bool:
        """Whether several stages hold copies of an entry, whose gradients are added."""
        return self.stack(name) is None and len({*self.uses[name]}) > 1

    def held(self, rank: int | None) -> list[str]:
        """The entries of the parameters that a rank holds, wholly or some rows of."""
        names = {name for stage in self.stages(rank) for name in self.names(stage)}
        names |= self.spread.keys()
        return [name for name in self.uses if name in names]

    def copies(self, rank: int | None) -> dict[str, int] | int:
        """How many ranks hold what a rank holds, by entry; for `optim.global_norm`.

        Raises:
            ValueError: the pipes meet on some of a rank's stages only, so that its layers are held
                by different numbers of ranks.
        """
        if rank is None:
            return 1
        copies: dict[str, int] = {}
        unequal: dict[str, Problem] = {}  # once for all stacks of the same stages
        for name in self.held(rank):
            if self.stack(name) is None:
                copies[name] = len(self.sharers(name))
                continue
            stages = [s for s in self.stages(rank) if name in self.names(s)]
            counts = {s: len(self.holders(s)) for s in stages}
            copies[name] = max(counts.values())
            if len(set(counts.values())) > 1:
                got = " and ".join(
                    f"{[s for s in counts if counts[s] == n]} with {n}"
                    for n in sorted(set(counts.values()))
                )
                wanted = "as many copies of each, so that the norm can count them"
                fix = "let pipes meet on all stages of a rank or on none"
                path, got = f"pipes, rank {rank}", f"stages {got} copies"
                unequal[got] = Problem(path, got, wanted, fix)
        title = "cannot compute the norm of gradients on these pipes"
        raise_problems(title, unequal.values())
        return self.nest(copies | dict.fromkeys(self.spread, 1))

    def entries(self, value: Mapping[str, Any], names: Iterable[str] | None = None) -> dict:
        """The entries of a tree like the parameters, by name; of some names, or all that it has."""
        chosen = [name for name in self.uses if _has(value, name)] if names is None else names
        return {name: _at(value, name) for name in chosen}

    def name_in(self, path: str) -> str | None:
        """The entry that a leaf of a state belongs to, by its path; None: to none."""
        parts = path.split("/")
        spans = ((i, j) for i in range(len(parts)) for j in range(len(parts), i, -1))
        named = ("/".join(parts[i:j]) for i, j in spans)
        return next((name for name in named if name in self.uses), None)

    def nest(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The tree of entries by name, as the parameters have them."""
        out: dict[str, Any] = {}
        for name, entry in entries.items():
            tree.put_leaf(out, name, entry)
        return out

    def local(self, value: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
        """The entries that a rank holds, whole: of specs, say.

        Raises:
            ValueError: `value` has other entries than `uses`.
        """
        self._check_names(value)
        kept = set(self.uses if rank is None else self.held(rank))
        names = [name for name in _names_in(value, self.uses) if name in kept]
        return self.nest(self.entries(value, names))

    def storage_specs(self, specs: Mapping[str, Any], axis: str = "pp") -> dict[str, Any]:
        """How what a rank holds between steps is split on a bound mesh: `axis` too, where spread.

        For `init_params` and `gather`. A program has the specs without it: in a step the axis is
        that of the pipeline's stages.

        Args:
            specs: one per parameter, of those that the rank holds.
        """

        def spread(spec: P, dim: int) -> P:
            entries = [*spec, *(None for _ in range(dim + 1 - len(spec)))]
            if isinstance(entries[dim], Uneven):
                wanted = f"a size that its axes and {axis} divide"
                fix = "pad the vocabulary (vocab_multiple), or leave vocab_over_pp out"
                title = "cannot divide what several ranks of a pipeline hold"
                refuse(title, f"dim {dim}", f"{spec}", wanted, fix)
            entries[dim] = (*entry_axes(entries[dim]), axis)
            return P(*entries)

        split = {
            name: tree.map(lambda s, d=self.spread[name]: spread(s, d), entry, is_leaf=is_spec)
            for name, entry in specs.items()
            if name in self.spread
        }
        return {**specs, **split}

    def local_defs(self, defs: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
        """The definitions of the parameters that a rank holds: the numbers are the whole model's.

        Raises:
            ValueError: `defs` has other entries than `uses`, a stack is of layers that the layout
                has not, or has not one row per layer.
        """
        kept = self.entries(self.local(defs, rank))
        stacks = {name: stack for name in self.uses if (stack := self.stack(name)) is not None}
        known = self.layers(None)
        found = [
            Problem(f"uses/{name}", f"{stack}", f"some of the layout's {len(known)} layers")
            for name, stack in stacks.items()
            if not {*stack} <= {*known}
        ]
        found += [
            Problem(f"{name}/{path}", f"shape {d.shape}", f"({len(stack)}, ...), a row per layer")
            for name, stack in stacks.items()
            if name in kept
            for path, d in zip(tree.paths(kept[name]), tree.leaves(kept[name]), strict=True)
            if d.shape[:1] != (len(stack),)
        ]
        raise_problems("cannot divide these parameters by layer", found)
        for name in stacks:
            if rank is not None and name in kept:
                rows = self.rows(name, rank)
                kept[name] = tree.map(lambda d, rows=rows: _rows_of(d, rows), kept[name])
        return self.nest(kept)

    def stage_params(self, params: Mapping[str, Any], stage: int, rank: int | None) -> dict:
        """The parameters of a stage, as views, from those that `rank` holds (None: all)."""
        out = self.entries(params, self.names(stage))
        for name in out:
            stack = self.stack(name)
            if stack is not None:  # a stage's layers follow each other: so do its rows
                mine = _rows_in(stack, self.layout[stage].layers)
                first = self.rows(name, rank).index(mine[0])
                at = (0, first, len(mine))
                out[name] = tree.map(lambda leaf, at=at: leaf.narrow(*at), out[name])
        return self.nest(out)

    def join(self, stages: Mapping[int, Mapping[str, Any]], rank: int | None) -> dict[str, Any]:
        """The parameters of `rank`, of those of its stages: rows stacked again, copies added."""
        held = [self.entries(stages[stage]) for stage in self.stages(rank)]
        out = {}
        for name, use in self.uses.items():
            entries = [entry[name] for entry in held if name in entry]
            if len(entries) == 1:
                out[name] = entries[0]
            elif entries and _is_stacked(use):
                out[name] = tree.map(lambda *rows: torch.cat(rows), *entries)
            elif entries:
                out[name] = tree.map(lambda *copies: sum(copies[1:], copies[0]), *entries)
        return self.nest(out)

    def _check_names(self, value: Mapping[str, Any]) -> None:
        wanted = "an entry in uses, which says who needs it"
        names = _names_in(value, self.uses)
        found = [Problem(name, "a parameter", wanted) for name in names if name not in self.uses]
        found += [
            Problem(f"uses/{name}", "an entry", "a parameter of that name")
            for name in self.uses
            if name not in names
        ]
        raise_problems("the partition and the parameters differ", found)


def _is_stacked(use: Use) -> bool:
    return use == "t" or isinstance(use, (range, tuple))


def _at(value: Mapping[str, Any], path: str) -> Any:
    """The part of nested dicts at a path; None: there is none, as where it is no part of a step."""
    found: Any = value
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _has(value: Mapping[str, Any], path: str) -> bool:
    """Whether nested dicts have a part at a path, be it None."""
    above, _, name = path.rpartition("/")
    held = _at(value, above) if above else value
    return isinstance(held, Mapping) and name in held


def _names_in(value: Mapping[str, Any], names: Container[str], above: str = "") -> list[str]:
    """The paths of the parts of nested dicts that have names, or no part that has one."""
    found: list[str] = []
    for key, part in value.items():
        path = f"{above}{key}"
        inner = part if isinstance(part, Mapping) and path not in names else {}
        below = _names_in(inner, names, f"{path}/")
        found += below if any(name in names for name in below) else [path]
    return found


def _rows_in(stack: range | tuple[int, ...], layers: Sequence[int]) -> list[int]:
    """The rows that a stack has for those of `layers` that it has any for."""
    return [stack.index(layer) for layer in layers if layer in stack]


def _use_problems(name: str, use: Use) -> list[Problem]:
    if isinstance(use, (range, tuple)):
        wanted = "layers of the model, in order"
        bad = not use or not all(map(_is_layer, use)) or [*use] != sorted({*use})
        return [Problem(f"uses/{name}", f"{use}", wanted)] if bad else []
    if isinstance(use, frozenset):
        bad = not use or any(x not in ("E", "L") and not _is_layer(x) for x in use)
        return [Problem(f"uses/{name}", repr(use), "E, L and numbers of layers")] if bad else []
    bad = not use or set(use) - set(_LETTERS) or ("t" in use and len(use) > 1)
    return [Problem(f"uses/{name}", repr(use), "t alone, or E, L or both")] if bad else []


def _is_layer(value: object) -> bool:
    return type(value) is int and value >= 0


def _rows_of(d: ParamDef, rows: Sequence[int]) -> ParamDef:
    return replace(d, shape=(len(rows), *d.shape[1:]), init=_Rows(d.init, d.shape[0], tuple(rows)))


@dataclass(frozen=True)
class _Rows:
    """An initialiser of some rows of a parameter, with the numbers of the whole one."""

    init: Initializer
    whole: int
    rows: tuple[int, ...]

    def __call__(
        self, key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, index: Index = None
    ) -> torch.Tensor:
        inner: list[Any] = list(index) if index is not None else [None] * len(shape)
        rows = torch.tensor(self.rows, device=key.device)
        inner[0] = rows if inner[0] is None else rows[inner[0]]
        return self.init(key, (self.whole, *shape[1:]), dtype, inner)


def collect(
    value: tree.Tree, like: tree.Tree, partition: Partition, mesh: BoundMesh, axis: str = "pp"
) -> tree.Tree:
    """The whole of `value`, parameters or an optimizer's state, on the first rank of the pipeline.

    Other axes must have been gathered before (`functron.gather`). Every rank calls it; each sends
    what it holds to the first. Of parameters that several ranks hold, the first one's are taken.

    Args:
        value: what this rank holds: a part of `like`, with paths of its own.
        like: the structure and shapes of the whole, such as meta tensors.

    Returns:
        The whole on rank 0 of `axis`, on the device of `value`; None on the others.
    """
    held = dict(zip(tree.paths(value), tree.leaves(value), strict=True))
    leaves = {
        path: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in held.items()
    }
    group, me = compat.group(mesh.groups[axis]), mesh.coordinate[axis]
    everyone: list[Any] = [None] * mesh[axis]
    dist.gather_object(leaves, everyone if me == 0 else None, group=group, group_dst=0)
    if me != 0:
        return None
    device = next(leaf.device for leaf in held.values() if isinstance(leaf, torch.Tensor))
    rows = {
        name: [partition.rows(name, rank) for rank in range(mesh[axis])]
        for name in partition.uses
        if partition.stack(name) is not None
    }
    whole, missing = [], []
    for path, wanted in zip(tree.paths(like), tree.leaves(like), strict=True):
        parts = [(rank, ranks[path]) for rank, ranks in enumerate(everyone) if path in ranks]
        found = _assemble(parts, wanted, rows.get(partition.name_in(path) or ""))
        whole.append(found.to(device) if isinstance(found, torch.Tensor) else found)
        if found is None:
            missing.append(Problem(path, "no rank that holds it whole or by layer", "one at least"))
    raise_problems("cannot collect a value from the ranks of a pipeline", missing)
    return tree.unflatten(tree.structure(like), whole)


def _assemble(parts: list[tuple[int, Any]], wanted: Any, rows: list[list[int]] | None) -> Any:
    """A whole leaf from those of some ranks, which hold these rows of it; None: all of it."""
    if not parts or rows is None:
        return parts[0][1] if parts else None
    whole = parts[0][1].new_empty(wanted.shape)
    seen = set()
    for rank, part in parts:
        whole[rows[rank]] = part
        seen.update(rows[rank])
    return whole if seen == set(range(len(whole))) else None
