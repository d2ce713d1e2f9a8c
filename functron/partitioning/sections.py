"""Plans of partitioned functions, cut at the layers of a module: before, each layer, and after.

What is cut is the plan of the whole function, so that its sections together compute, and send, what
it does: a value passes from one to another as the plan has it there, also as shares of a sum that
is still to be taken.

An activation, which follows from both parameters and data, is computed in one section: that of its
layer, or of the latest value that it is made of. What follows from data alone, such as positions,
rotary tables and masks, is made once for all sections that run together; what follows from
parameters alone, or in a layer that alone reads it, in each section that reads it. None of these
passes from one stage to another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.closure import refuse_tracked
from functron.core.errors import Problem, public, raise_problems
from functron.partitioning.partition import FunctionPlan, Partitioned, run_plan
from functron.partitioning.placement import ValuePlacement
from functron.partitioning.propagate import LocalBlock, LocalEquation, Move
from functron.program.equations import Block, Var

PlacedVar = tuple[Var, ValuePlacement]
"""A value of a plan, as it lies somewhere."""


@public
def cut_layers(
    mapped: Partitioned, layers: str, data: Sequence[int], *args: tree.Tree
) -> LocalSections:
    r"""The per-rank program of a function, cut into what is before its layers, each, and the rest.

    Args:
        mapped: the function in `functron.partition`.
        layers: a pattern of the paths of the layers' scopes, whose group is the number of one, such
            as ``r"layers\.(\d+)"``.
        data: which arguments are data, by position; the others are parameters.
        args: global values, which may be abstract.

    Raises:
        ValueError: there are no layers, or one computes nothing; or see `functron.partition`.
    """
    made = mapped.plan_for(args, whole=True)
    paths = [path for path, leaf in tree.items(args) if isinstance(leaf, torch.Tensor)]
    return LocalSections(made, layers, paths, tuple(map(str, data)), mapped.name)


class LocalSections:
    """The program of one rank of `cut_layers`, section by section.

    Sections 1, 2, ... are the layers, 0 what comes before them, and the last one what comes after.
    Arguments have their paths: ``0/model.embed.weight`` of the first one's entry.

    Attributes:
        num_layers: how many layers there are.
        params: for each section the paths of the parameters that it reads.
    """

    def __init__(
        self, made: FunctionPlan, layers: str, paths: list[str], data: tuple[str, ...], name: str
    ):
        constants = [f"constant {at}" for at in range(len(made.constants))]
        names = [*paths, *constants]
        self._given = [at for at, path in enumerate(names)
                       if path.partition("/")[0] in data or path in constants]  # fmt: skip
        self._made, self._names, self._name = made, names, name
        self._cut = PlanSections(made.plan, layers, self._given, name)
        self.num_layers = self._cut.num_layers
        self.params = tuple(
            tuple(names[place] for place in section.params) for section in self._cut.sections
        )
        self._data_plans: dict[range, Any] = {}

    def prepare(self, sections: range, data: Mapping[str, torch.Tensor]) -> dict[PlacedVar, Any]:
        """The values that some sections read of those that follow from data alone.

        Args:
            data: this rank's shards, by path.
        """
        if sections not in self._data_plans:
            self._data_plans[sections] = self._cut.data_plan(sections)
        plan, keys = self._data_plans[sections]
        refuse_tracked(self._name, self._made.constants)
        first = len(self._names) - len(self._made.constants)
        shards = [
            data[self._names[at]] if at < first else self._made.constants[at - first].detach()
            for at in self._given
        ]
        return dict(zip(keys, run_plan(plan, self._made.sizes, False, *shards), strict=True))

    def run(
        self,
        at: int,
        params: Mapping[str, torch.Tensor],
        data: Mapping[PlacedVar, torch.Tensor],
        entering: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The activations that enter the next section, or after the last one the results.

        Args:
            params: this rank's shards of those that it reads, by path.
            data: of `prepare`.
            entering: the activations that enter it.
        """
        section, last = self._cut.sections[at], at == self._cut.num_sections - 1
        values = dict(zip(self._cut.entering[at], entering, strict=True))
        shards = [
            *(params[path] for path in self.params[at]),
            *(data[key] for key in section.data),
            *(values[key] for key in section.passed),
        ]
        made = run_plan(section.plan, self._made.sizes, False, *shards)
        if last:
            return made
        values.update(zip(section.results, made, strict=True))
        return [values[key] for key in self._cut.entering[at + 1]]


class PlanItem(NamedTuple):
    """A step of a plan without moves, or one move, with what it reads and makes.

    Attributes:
        layer: the number of the layer that it is in; None: it is in none.
    """

    what: LocalEquation | Move
    reads: tuple[PlacedVar, ...]
    makes: tuple[PlacedVar, ...]
    layer: int | None


class ValueOrigin(NamedTuple):
    """The inputs of a plan that a value follows from.

    Attributes:
        params: the places of the parameters, of what is no activation.
        data: whether from arguments that are data.
        section: of an activation; None: it is none.
    """

    params: frozenset[int] = frozenset()
    data: bool = False
    section: int | None = None


@dataclass(frozen=True, eq=False)
class Section:
    """The computation of one section.

    Attributes:
        plan: from `params`, then `data`, then `passed` to `results`.
        params: the places of the parameters that it reads.
        data: the values that it reads of those that follow from data alone.
        passed: the activations that it reads.
        results: the activations that it makes and others read; of the last one, the function's.
    """

    plan: LocalBlock
    params: tuple[int, ...]
    data: tuple[PlacedVar, ...]
    passed: tuple[PlacedVar, ...]
    results: tuple[PlacedVar, ...]


class PlanSections:
    """A plan cut into sections: what is before its layers, each of them, and what comes after.

    Attributes:
        num_layers: how many layers it has; section n + 1 is layer n.
        sections: as they run.
        entering: of each section, the activations that it and those after it need of those before.
    """

    def __init__(self, plan: LocalBlock, layers: str, data: Collection[int], name: str):
        """Cut a plan.

        Args:
            plan: of the whole function.
            layers: a pattern of the paths of scopes of layers, whose group is the layer's number.
            data: the places of the inputs that are data or constants; others are parameters.
            name: of the function, in messages.

        Raises:
            ValueError: a layer, or any, computes nothing.
        """
        assert not plan.gathers
        rows = zip(plan.block.outputs, plan.outputs, strict=True)
        self._results = tuple((v, p) for v, p in rows if isinstance(v, Var) and p is not None)
        self._items = _live_items(_items_of(plan, layers), self._results)
        self.num_layers = _count_layers(self._items, layers, name)
        self.inputs = tuple(zip(plan.block.inputs, plan.inputs, strict=True))
        self._origins = self._trace_origins(data)
        self._readers = self._find_readers()
        last = self._last_readers()
        self.entering = tuple(
            tuple(key for key, at in self._activations() if at < start <= last[key])
            for start in range(self.num_sections)
        )
        self.sections = tuple(self._make_section(at, last) for at in range(self.num_sections))

    @property
    def num_sections(self) -> int:
        """How many sections there are: two more than layers."""
        return self.num_layers + 2

    def _trace_origins(self, data: Collection[int]) -> dict[PlacedVar, ValueOrigin]:
        found = {
            key: ValueOrigin(data=True) if place in data else ValueOrigin(frozenset({place}))
            for place, key in enumerate(self.inputs)
        }
        for item in self._items:
            given = [found[key] for key in item.reads]
            params = frozenset().union(*(origin.params for origin in given))
            sections = [x.section for x in given if x.section is not None]
            if sections or (params and any(origin.data for origin in given)):
                before = max(sections, default=0)
                own = before if item.layer is None else max(before, item.layer + 1)
                # what reads the last layer's results, and is in none, comes after all layers
                after = item.layer is None and own == self.num_layers
                origin = ValueOrigin(section=self.num_layers + 1 if after else own)
            else:
                origin = ValueOrigin(params, any(origin.data for origin in given))
            found.update(dict.fromkeys(item.makes, origin))
        return found

    def _activations(self) -> Iterator[tuple[PlacedVar, int]]:
        """The activations, in the order in which they are made, and their sections."""
        for item in self._items:
            for key in item.makes:
                section = self._origins[key].section
                if section is not None:
                    yield key, section

    def _section_of(self, item: PlanItem) -> int | None:
        return self._origins[item.makes[0]].section

    def _find_readers(self) -> dict[PlacedVar, frozenset[int]]:
        """The sections that compute with each value, or with what is made of it."""
        found: dict[PlacedVar, frozenset[int]] = {}
        for item in reversed(self._items):
            section = self._section_of(item)
            own = frozenset() if section is None else frozenset({section})
            own = own or frozenset().union(*(found.get(key, own) for key in item.makes))
            for key in item.reads:
                found[key] = found.get(key, frozenset()) | own
        return found

    def _runs_in(self, item: PlanItem, at: int) -> bool:
        """Whether an item is one of a section, that makes it for itself where others have it too.

        What follows from data is, where only the layer that it is in reads it, such as dropout.
        """
        origin = self._origins[item.makes[0]]
        if origin.section is not None:
            return origin.section == at
        readers = frozenset().union(*(self._readers.get(key, ()) for key in item.makes))
        if origin.params:
            return at in readers
        return readers == {at} and item.layer == at - 1

    def _last_readers(self) -> dict[PlacedVar, int]:
        """The last section that reads each activation; -1 of what none does."""
        last = {key: -1 for key, _ in self._activations()}
        for item in self._items:
            section = self._section_of(item)
            for key in item.reads:
                if key in last and section is not None:
                    last[key] = max(last[key], section)
        return last | dict.fromkeys(self._results, self.num_sections)

    def _make_section(self, at: int, last: Mapping[PlacedVar, int]) -> Section:
        """A section, with what it makes again of parameters."""
        results = self._results
        if at < self.num_sections - 1:
            results = tuple(key for key, own in self._activations() if own == at < last[key])
        chosen = [item for item in self._items if self._runs_in(item, at)]
        made = {key for item in chosen for key in item.makes}
        places = {key: place for place, key in enumerate(self.inputs)}
        given = [key for key in dict.fromkeys(key for item in chosen for key in item.reads)
                 if key not in made]  # fmt: skip
        origins = [(key, self._origins[key]) for key in given]
        params = tuple(key for key, origin in origins if origin.params)
        passed = tuple(key for key, origin in origins if origin.section is not None)
        data = tuple(key for key in given if key not in {*params, *passed})
        plan = _assemble((*params, *data, *passed), chosen, results)
        return Section(plan, tuple(places[key] for key in params), data, passed, results)

    def data_plan(self, sections: range) -> tuple[LocalBlock, tuple[PlacedVar, ...]]:
        """The plan, of all inputs that are data, of what some sections read of it, and the keys."""
        keys = dict.fromkeys(key for at in sections for key in self.sections[at].data)
        wanted, chosen = {*keys}, []
        for item in reversed(self._items):
            if not wanted.isdisjoint(item.makes):
                chosen.append(item)
                wanted.update(item.reads)
        inputs = [key for key in self.inputs if not self._origins[key].params]
        return _assemble(inputs, chosen[::-1], tuple(keys)), tuple(keys)


def _items_of(plan: LocalBlock, layers: str) -> list[PlanItem]:
    """The items of a plan as they run; a value that is moved somewhere twice is moved there once.

    A later section would make it again otherwise, and those before wait for it.
    """
    found: dict[tuple[PlacedVar, ...], PlanItem] = {}
    for item in _list_items(plan, layers):
        found.setdefault(item.makes, item)
    return [*found.values()]


def _list_items(plan: LocalBlock, layers: str) -> Iterator[PlanItem]:
    def of(each: Move, layer: int | None) -> PlanItem:
        return PlanItem(each, ((each.var, each.source),), ((each.var, each.target),), layer)

    for step in plan.steps:
        found = re.search(layers, "/".join(step.equation.where.scopes))
        layer = None if found is None else int(found[1])
        yield from (of(each, layer) for each in step.moves)
        reads = tuple(zip(step.equation.operands, step.operands, strict=True))
        makes = tuple(zip(step.equation.results, step.results, strict=True))
        yield PlanItem(replace(step, moves=(), after=()), reads, makes, layer)
        yield from (of(each, layer) for each in step.after)
    yield from (of(each, None) for each in plan.moves)


def _live_items(items: Sequence[PlanItem], results: Iterable[PlacedVar]) -> list[PlanItem]:
    """The items that results follow from."""
    wanted, live = {*results}, []
    for item in reversed(items):
        if not wanted.isdisjoint(item.makes):
            live.append(item)
            wanted.update(item.reads)
    return live[::-1]


def _count_layers(items: Iterable[PlanItem], layers: str, name: str) -> int:
    found = {item.layer for item in items if item.layer is not None}
    wanted = "layers of a torch.nn.ModuleList that forward calls one by one"
    problems = [] if found else [Problem("layers", f"no scope like {layers!r}", wanted)]
    problems += [
        Problem(f"layer {at}", "nothing that the result follows from", "operations, as of others")
        for at in range(max(found, default=0))
        if at not in found
    ]
    raise_problems(f"{name} cannot be cut into layers", problems)
    return 1 + max(found)


def _assemble(
    inputs: Sequence[PlacedVar], items: Iterable[PlanItem], results: Sequence[PlacedVar]
) -> LocalBlock:
    """The plan of some items of another one."""
    steps: list[LocalEquation] = []
    moves: list[Move] = []
    for item in items:
        if isinstance(item.what, Move):
            moves.append(item.what)
        else:
            steps.append(replace(item.what, moves=tuple(moves)))
            moves = []
    block = Block(
        tuple(var for var, _ in inputs),
        tuple(step.equation for step in steps),
        tuple(var for var, _ in results),
    )
    places = tuple(place for _, place in inputs), tuple(place for _, place in results)
    return LocalBlock(block, places[0], tuple(steps), tuple(moves), places[1])
