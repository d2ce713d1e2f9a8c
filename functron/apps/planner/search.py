"""Search for the fastest parallel configurations: candidates, pruned by memory, ranked by time.

A candidate is the configuration of a run, with a mesh, schedule, microbatches, ZeRO stage and
activation checkpointing. `Space` enumerates candidates. `Choices` says of each whether it can be
run, its memory and the time of a step; layers are traced once per kind. `search` drops candidates
that cannot be run or do not fit before anything is timed, and does not time those whose lower bound
is above the times of the best so far.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from functron import pipeline
from functron.apps.planner.estimates import (
    Estimate,
    PlannedStep,
    StateBytes,
    estimate_memory,
    estimate_step,
)
from functron.apps.planner.machines import Hardware, RankPlacement, hardware
from functron.apps.planner.rates import TracedPieces, trace_pieces
from functron.apps.planner.software import FUNCTRON, UNCOMPILED, Software
from functron.core import random, tree
from functron.core.chart import line_chart
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import value_at
from functron.core.tables import bytes_text, table
from functron.models import gpt
from functron.nn.moe import mean_nodes
from functron.optim import torch_dtype
from functron.spmd import DATA_AXES, Mesh
from functron.spmd.params import joined_params, num_params, param_specs
from functron.spmd.spec import local_shape
from functron.training.config import TrainConfig, configure, with_precision
from functron.training.setup import RunSetup, make_setup

AXES = ("pp", "dp", "fsdp", "cp", "ep_node", "ep", "tp")
"""The axes of candidates' meshes, in order: ranks of tp are adjacent."""


CHOSEN: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in (
            "schedule", "chunks", "microbatches", "remat", "sequence_parallel", "zero", "gather",
            "precision",
        )
    }
    | {"offload": "optimizer.offload"}
)  # fmt: skip
"""The settings that a search chooses, beside the mesh, by their words in ``--fix``."""


_parse_mesh = functools.lru_cache(maxsize=4096)(Mesh.parse)


def mesh_of(config: TrainConfig) -> Mesh:
    """The mesh of a run."""
    return _parse_mesh(config.parallelism.mesh)


def count_data_ranks(config: TrainConfig) -> int:
    """Ranks that split the batch of a run."""
    return math.prod(mesh_of(config)[axis] for axis in DATA_AXES)


def count_rows(config: TrainConfig) -> int:
    """Samples per rank in a microbatch of a run."""
    parts = count_data_ranks(config) * config.parallelism.microbatches
    return config.data.global_batch // parts


def describe_cells(config: TrainConfig) -> list[str]:
    """The cells of a candidate below `COLUMNS`."""
    ranks, mesh = config.parallelism, mesh_of(config)
    chunks = f" x{ranks.chunks}" if ranks.chunks > 1 else ""
    data = f"zero {ranks.zero}" if ranks.zero else ""
    data += f" {ranks.gather}" if mesh["fsdp"] > 1 and ranks.gather != "use" else ""
    flags = [
        "sp" * ranks.sequence_parallel, data.strip(), "offload" * config.optimizer.offload
    ]  # fmt: skip
    return [
        ranks.mesh or "one rank",
        f"{ranks.schedule}{chunks}" if mesh["pp"] > 1 else "",
        f"{ranks.microbatches} of {count_rows(config)}",
        config.compute.remat,
        ", ".join(filter(None, flags)),
        config.precision.name,
    ]


def describe_way(config: TrainConfig) -> str:
    """A candidate in a few words."""
    return " ".join(filter(None, describe_cells(config)))


COLUMNS = ("mesh", "schedule", "microbatches", "remat", "", "precision")

_NAMES = (*AXES, *itertools.islice(CHOSEN, 2), "rows", *itertools.islice(CHOSEN, 2, None))
_USUAL = MappingProxyType({
    **dict.fromkeys((*AXES, "rows"), 1),
    **{word: value_at(TrainConfig(), name) for word, name in CHOSEN.items()},
})  # fmt: skip
_NUMBERS = tuple(name for name in _NAMES if type(_USUAL[name]) is int)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"microbatch": "rows", "micro_batch_size": "rows", "num_microbatches": "microbatches"}
)
_WORDS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
)


def parse_settings(text: str, what: str, *, numbers: bool = False) -> dict[str, Any]:
    """Settings of candidates written as ``"tp=8,pp=16,remat=full"``.

    Args:
        text: the settings; empty: none.
        what: the option that has the text.
        numbers: only numeric settings are allowed.

    Raises:
        ValueError: settings are unknown or have invalid values; all are listed.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    known = _NUMBERS if numbers else _NAMES
    for entry in filter(None, (part.strip() for part in text.replace(" ", ",").split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        name = name.replace("-", "_")
        name = _OTHER_NAMES.get(name, name)
        if name not in known:
            wanted = f"one of {', '.join(known)}"
            problems.append(Problem(what, repr(name), wanted, nearest(name, known)))
        elif name in _NUMBERS and not value.isdigit():
            problems.append(Problem(what, repr(entry), f"a whole number, such as {name}=8"))
        elif type(_USUAL[name]) is bool and value.lower() not in _WORDS:
            problems.append(Problem(what, repr(entry), f"{name}=true or {name}=false"))
        elif name in found:
            problems.append(Problem(what, f"{name} twice", "every setting once"))
        elif name in _NUMBERS:
            found[name] = int(value)
        else:
            found[name] = _WORDS.get(value.lower(), value)
    raise_problems(f"cannot read {what} {text!r}", problems)
    return found


@dataclass(frozen=True)
class Space:
    """The candidates of a search: configurations of one run, for ``functron train``.

    Attributes:
        config: the run of a GPT: model, batches, optimizer; a search replaces its other settings.
        gpus: ranks of every mesh.
        domain: GPUs that NVLink connects; tp stays within them unless it is fixed.
        fixed: settings that all candidates have, by the words of `parse_settings`.
        least: lower bounds of settings.
        rows, remats, precisions, schedules: the values that are tried.
    """

    config: TrainConfig
    gpus: int
    domain: int = 8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[int] = (1, 2, 4)
    remats: Sequence[str] = ("none", "dots", "full")
    precisions: Sequence[str] = ("bf16",)
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zbv")

    def __post_init__(self):
        counts = {name: getattr(self, name) for name in ("gpus", "domain")}
        counts |= {name: getattr(self.config.data, name) for name in ("global_batch", "seq")}
        found = [Problem(name, str(n), "at least 1") for name, n in counts.items() if n < 1]
        axes = math.prod(self.fixed.get(axis, 1) for axis in AXES)
        if not found and (axes < 1 or self.gpus % axes):
            got = ",".join(f"{axis}={self.fixed[axis]}" for axis in AXES if axis in self.fixed)
            fix = f"take {self.gpus - self.gpus % max(axes, 1) or axes} GPUs, or other sizes"
            found.append(Problem("gpus", f"{self.gpus} for {got}", f"a multiple of {axes}", fix))
        clash = [n for n, size in self.least.items() if n in self.fixed and self.fixed[n] < size]
        found += [
            Problem(name, f"{self.fixed[name]}", f"at least {self.least[name]}", "leave one out")
            for name in clash
        ]
        raise_problems("there is no such mesh", found)
        chosen = {CHOSEN[name]: x for name, x in self.fixed.items() if name in CHOSEN}
        configure(self.config, **chosen)  # checks the kinds of values

    @property
    def _num_layers(self) -> int:
        return self.config.gpt.num_layers

    @property
    def emptiness(self) -> str:
        """The reason if there are no candidates."""
        return (
            f"{self.config.data.global_batch} samples are not divided by its data-parallel ranks "
            f"and rows, or {self._num_layers} layers are too few for its stages"
        )

    def candidates(self) -> Iterator[TrainConfig]:
        """All candidates whose counts divide; `Choices.problems` knows of the model's sizes."""
        batch = self.config.data.global_batch

        @functools.cache
        def base(precision: str, remat: str, offload: bool) -> TrainConfig:  # whatever the mesh
            made = with_precision(self.config, precision)
            return configure(made, remat=remat, optimizer__offload=offload, compile=not offload)

        for sizes in self._list_meshes():
            data = math.prod(sizes[axis] for axis in DATA_AXES)
            mesh = str(Mesh(**{axis: size for axis, size in sizes.items() if size > 1}))
            for rows in self._list_values("rows", self.rows):
                if batch % (data * rows):
                    continue
                count = batch // (data * rows)
                if not self._admits("microbatches", count):
                    continue
                for key, settings in self._list_settings(sizes):
                    made = base(*key)
                    names, moe = made.parallelism.expert_axis_names, self.config.gpt.moe
                    if moe and moe.dispatch == "two-hop" and "ep_node" not in names:
                        settings["expert_axes"] = ",".join(("ep_node", *names))
                    ranks = replace(made.parallelism, mesh=mesh, microbatches=count, **settings)
                    if not (ranks.zero == 3 or any(sizes[axis] > 1 for axis in _DIVIDING)):
                        ranks = replace(ranks, uneven="")  # which would have no effect
                    yield replace(made, parallelism=ranks)

    def _list_meshes(self) -> Iterator[dict[str, int]]:
        divisors = [n for n in range(1, self.gpus + 1) if self.gpus % n == 0]
        small = [n for n in divisors if n <= self.domain]
        cps = [n for n in divisors if n == 1 or self.config.data.seq // n >= _LEAST_TOKENS]
        moe = self.config.gpt.moe
        experts = 1 if moe is None else moe.num_experts
        eps = [n for n in divisors if experts % n == 0]
        if "expert" in self.config.parallelism.uneven_names:
            eps = [n for n in divisors if n <= experts]
        pps = [n for n in divisors if n <= self._num_layers]
        rows = itertools.product(
            self._list_values("tp", small),
            self._list_values("cp", cps),
            self._list_values("ep", eps),
            # nodes of experts are whole domains, unless both are given
            self._list_values("ep_node", eps if moe and moe.dispatch == "two-hop" else (1,)),
            self._list_values("pp", pps),
        )
        for tp, cp, ep, nodes, pp in rows:
            if self.gpus % (tp * cp * ep * nodes * pp):
                continue
            uneven = ep * tp != self.domain or (moe and moe.num_experts % (nodes * ep))
            if nodes > 1 and uneven and not {"ep", "ep_node"} <= self.fixed.keys():
                continue
            data = self.gpus // (tp * cp * ep * nodes * pp)
            inside = [n for n in (1, *_FSDP, data) if data % n == 0 and n <= data]
            for fsdp in self._list_values("fsdp", sorted(set(inside))):
                if data % fsdp == 0 and self._admits("dp", data // fsdp):
                    found = {"pp": pp, "dp": data // fsdp, "fsdp": fsdp, "cp": cp}
                    yield found | {"ep_node": nodes, "ep": ep, "tp": tp}

    def _list_settings(
        self, sizes: Mapping[str, int]
    ) -> Iterator[tuple[tuple[str, str, bool], dict[str, Any]]]:
        """Precision, remat and offload; and settings of `ParallelismConfig`."""
        replicas = math.prod(sizes[axis] for axis in _REPLICAS)
        zeros = (1, 2) if replicas > 1 and sizes["fsdp"] == 1 else (1,) if replicas > 1 else (0,)
        rows = itertools.product(
            self._list_values("precision", self.precisions),
            self._list_values("remat", self.remats),
            self._list_values("sequence_parallel", (sizes["tp"] > 1,)),
            self._list_values("zero", zeros),
            self._list_values("gather", ("use",)),
            self._list_values("offload", (False,)),
            self._list_schedules(sizes["pp"]),
        )
        names = ("sequence_parallel", "zero", "gather", "schedule", "chunks")
        for precision, remat, sequence_parallel, zero, gather, offload, order in rows:
            values = (sequence_parallel, zero, gather, *order)
            settings: dict[str, Any] = dict(zip(names, values, strict=True))
            yield (precision, remat, offload), settings

    def _list_schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules and chunks; one without a pipeline."""
        if pp == 1:
            if self._admits("schedule", "1f1b") and self._admits("chunks", 0):
                yield "1f1b", 0
            return
        deepest = self._num_layers // pp
        many = [n for n in range(2, min(deepest, _MOST_CHUNKS) + 1) if not self._num_layers % n]
        many = many or [n for n in (2, 3, 4) if n <= deepest]
        for schedule in self._list_values("schedule", self.schedules):
            tried = many if schedule in ("interleaved", "breadth-first") else (0,)
            yield from ((schedule, chunks) for chunks in self._list_values("chunks", tried))

    def _list_values(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values of a setting that are tried: the fixed one, or those that `least` admits."""
        if name in self.fixed:
            return (self.fixed[name],)
        return [value for value in values if self._admits(name, value)]

    def _admits(self, name: str, value: Any) -> bool:
        return value >= self.least.get(name, value) and value == self.fixed.get(name, value)


_REPLICAS = ("dp", "ep_node", "ep", "cp")
"""The axes over which ranks have the same parameters, of experts but for those that divide them."""
_DIVIDING = ("tp", "fsdp", "ep", "ep_node")
"""Axes that split parameters."""
_LEAST_TOKENS = 4096
"""Tokens per rank of cp, below which attention is too short to hide communication."""
_FSDP = (8, 32, 128)
"""Sizes of fsdp that are tried beside 1 and all data ranks."""
_MOST_CHUNKS = 8


class Ranked(NamedTuple):
    """A candidate that fits, and the estimate of its step."""

    candidate: TrainConfig
    estimate: Estimate


@dataclass(frozen=True)
class SearchResult:
    """The result of `search`; prints as a table.

    Attributes:
        best: the fastest candidates, the fastest first.
        front: Pareto-optimal candidates of those that were timed, by time and memory.
        counts: numbers of candidates by outcome.
        smallest: if none fits: the candidate that needs the least memory, and its bytes by
            category.
        smallest_of_all: whether no candidate can need less: otherwise, the least of those traced.
        capacity_bytes: memory of a rank.
        reasons: the most frequent reasons why candidates cannot be run, with counts.
        complete: whether every candidate that could be among the best was timed.
        seconds: CPU time of the search.
    """

    best: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    counts: Mapping[str, int]
    smallest: tuple[TrainConfig, Mapping[str, int]] | None
    smallest_of_all: bool
    capacity_bytes: int
    reasons: tuple[tuple[str, int], ...]
    complete: bool
    seconds: float

    def __str__(self) -> str:
        head = ["", *COLUMNS, "seconds", "90%", "MFU", "memory", "limited by"]
        rows = [head]
        for number, (candidate, estimate) in enumerate(self.best, 1):
            low, high = estimate.interval
            rows.append(
                [str(number), *describe_cells(candidate), f"{estimate.step_seconds:.3g}",
                 f"{low:.3g} to {high:.3g}", f"{estimate.mfu:.1%}",
                 bytes_text(estimate.memory_bytes), estimate.limits]
            )  # fmt: skip
        return f"{table(rows, left=7)}\n\n{self.summary()}"

    def summary(self) -> str:
        """Numbers of candidates by outcome, in a line or two."""
        names = ", ".join(f"{count:,} {what}" for what, count in self.counts.items() if count)
        text = f"{names}; {self.seconds:.0f} s of CPU time"
        if not self.complete:
            text += (
                "\nnot all candidates that could be among the best were timed: "
                "raise --cpu-seconds, or leave fewer candidates with --fix"
            )
        return text

    def svg(self) -> str:
        """Time over memory of the front and the best, as an SVG document."""
        front, best = (
            sorted((x.memory_bytes / 2**30, x.step_seconds) for _, x in rows)
            for rows in (self.front, self.best)
        )
        return line_chart(
            [x for x, _ in front],
            [y for _, y in front],
            title="the fastest step for each amount of memory",
            x_label="GiB of the fullest rank",
            y_label="seconds of a step",
            others={"the best ten": best},
        )


def search(
    space: Space,
    model: Choices,
    *,
    top: int = 10,
    cpu_seconds: float = 30.0,
    slack: float = 1.0,
) -> SearchResult:
    """The fastest candidates that fit.

    Steps are timed by formulas, and the best of them exactly in the end. Candidates are timed in
    the order of guesses, except those whose lower bound is above the slowest of the best.

    Args:
        model: of the run and the machine.
        top: number of candidates to find.
        cpu_seconds: CPU time, after which no more layers are traced; the search ends after 1.5
            times as much.
        slack: times candidates with lower bounds up to this factor above, for a fuller front.

    Raises:
        ValueError: the space has no candidates, or none can be run.
    """
    began = time.process_time()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    bounded, small = _bound_candidates(space, model, counts, reasons)
    timed: list[Ranked] = []
    traced: dict[TrainConfig, Mapping[str, int]] = {}
    kth = math.inf
    full: set[TrainConfig] = set()
    for bound, candidate in bounded:
        spent = time.process_time() - began
        if bound > slack * kth:
            counts["slower at best"] += 1
        elif spent > 1.5 * cpu_seconds or (spent > cpu_seconds and not model.traced(candidate)):
            counts["not looked at"] += 1
            small.append((model.state_bytes(candidate), candidate))
        elif _halve_rows(candidate) in full:
            full.add(candidate)
            counts["too large"] += 1
        elif sum((memory := model.memory(candidate)).values()) > model.capacity_bytes:
            full.add(candidate)
            counts["too large"] += 1
            traced[candidate] = memory
        else:
            timed.append(Ranked(candidate, model.estimate(candidate)))
            times = (one.estimate.step_seconds for one in timed)
            kth = heapq.nsmallest(top, itertools.chain(times, [math.inf] * top))[-1]
    timed.sort(key=_rank_key)
    counts["timed"] = len(timed)
    smallest, of_all = None, True
    if not timed:
        smallest, of_all = _find_smallest(model, small, traced, cpu_seconds / 2)
    listed = {name: counts[name] for name in _COUNTS}
    best = [Ranked(one.candidate, model.estimate(one.candidate, exact=True)) for one in timed[:top]]
    return SearchResult(
        tuple(sorted(best, key=_rank_key)),
        _find_front(timed),
        MappingProxyType(listed),
        smallest,
        of_all,
        model.capacity_bytes,
        tuple(reasons.most_common(3)),
        not counts["not looked at"],
        time.process_time() - began,
    )


def _halve_rows(c: TrainConfig) -> TrainConfig | None:
    """The candidate with half the rows, which needs less memory if its pipeline is full."""
    ranks = c.parallelism
    if count_rows(c) % 2 or ranks.microbatches < mesh_of(c)["pp"]:
        return None
    return replace(c, parallelism=replace(ranks, microbatches=2 * ranks.microbatches))


_COUNTS = ("candidates", "cannot run", "too large", "slower at best", "not looked at", "timed")


def _bound_candidates(
    space: Space, model: Choices, counts: Counter[str], reasons: Counter[str]
) -> tuple[list[tuple[float, TrainConfig]], list[tuple[float, TrainConfig]]]:
    """Candidates that may fit, with lower bounds, in the order of guesses; and those whose state
    alone does not fit, with its bytes."""
    found: list[tuple[float, float, TrainConfig]] = []
    too_large: list[tuple[float, TrainConfig]] = []
    for candidate in space.candidates():
        counts["candidates"] += 1
        wrong = model.problems(candidate)
        if wrong:
            counts["cannot run"] += 1
            reasons.update(wrong)
            continue
        state = model.state_bytes(candidate)
        if state > model.capacity_bytes:
            counts["too large"] += 1
            too_large.append((state, candidate))
            continue
        found.append((model.guess(candidate), model.least_seconds(candidate), candidate))
    if not found and not too_large:
        listed = "; ".join(text for text, _ in reasons.most_common(3)) or space.emptiness
        got = f"{counts['candidates']:,} candidates on {space.gpus} GPUs, of which none can be run"
        fix = "take another number of GPUs, another --global-batch, or leave out what is fixed"
        refuse("there is no such mesh", "gpus", f"{got} ({listed})", "some that can", fix)
    found.sort(key=lambda one: (one[0], count_rows(one[2])))
    return [(bound, candidate) for _, bound, candidate in found], too_large


def _rank_key(one: Ranked) -> tuple:
    """By time, then memory, then pipeline ranks."""
    estimate, mesh = one.estimate, mesh_of(one.candidate)
    return estimate.step_seconds, estimate.memory_bytes, mesh["pp"], mesh["tp"]


def _find_smallest(
    model: Choices,
    bounded: Sequence[tuple[float, TrainConfig]],
    traced: Mapping[TrainConfig, Mapping[str, int]],
    cpu_seconds: float,
) -> tuple[tuple[TrainConfig, Mapping[str, int]], bool]:
    """The candidate that needs the least memory, and whether no other can need less.

    Args:
        bounded: candidates that were not traced, with lower bounds of their bytes. They are traced
            in the order of guesses, those that may need less than the least so far.
        traced: bytes by category of others.
        cpu_seconds: after which no more are traced.
    """
    began = time.process_time()
    found = min(traced.items(), key=lambda pair: sum(pair[1].values()), default=None)
    least = sum(found[1].values()) if found else math.inf

    def order(one: tuple[float, TrainConfig]) -> tuple:
        return one[0] + model.guess_activations(one[1]), one[0], count_rows(one[1])

    for bound, candidate in sorted((one for one in bounded if one[0] < least), key=order):
        if bound >= least:
            continue
        if found and time.process_time() - began > cpu_seconds:
            return found, False
        memory = model.memory(candidate)
        if sum(memory.values()) < least:
            found, least = (candidate, memory), sum(memory.values())
    assert found is not None, "every candidate is traced or bounded"
    return found, True


def _find_front(timed: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """The Pareto-optimal candidates; `timed` is sorted by time."""
    front: list[Ranked] = []
    for one in timed:
        if not front or one.estimate.memory_bytes < front[-1].estimate.memory_bytes:
            front.append(one)
    return tuple(front)


def explain_misfit(found: SearchResult) -> str:
    """Why nothing fits: the excess by category, and what would make it fit."""
    assert found.smallest is not None
    candidate, memory = found.smallest
    needed, has = sum(memory.values()), found.capacity_bytes
    parts = sorted(memory.items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{bytes_text(size)} of {name}" for name, size in parts if size)
    fixes = []
    if not candidate.optimizer.offload:
        fixes.append("--fix offload=true keeps the optimizer's state in host memory")
    activations = memory.get("activations", 0)
    state = needed - activations
    if state > has:
        fixes.append(f"about {math.ceil(state / has)} times as many GPUs")
    if candidate.compute.remat != "full":
        fixes.append("--fix remat=full")
    if activations > has / 2:
        fixes.append("shorter samples (--seq), or more context-parallel ranks (--fix cp=2)")
    fixes.append("GPUs with more memory (--hardware)")
    rest = found.counts["not looked at"]
    nothing = "nothing fits"
    if rest:
        nothing = f"no candidate that was tried fits, and {rest:,} were not tried"
        fixes.insert(0, "a larger --cpu-seconds, or --fix, such as remat=full,rows=1")
    least = "needs the least" if found.smallest_of_all else "needs the least of those tried"
    return (
        f"{nothing}: {describe_way(candidate)} {least}, "
        f"{bytes_text(needed)} of the {bytes_text(has)} that a GPU has "
        f"({bytes_text(needed - has)} too much): {listed}; fix: {'; or '.join(fixes)}"
    )


def why(found: SearchResult, given: Mapping[str, Any], space: Space, model: Choices) -> str:
    """Explain why candidates with these settings are not the best.

    The best of them is compared with the best of all, part by part. If none fits, the one that
    needs the least memory is shown; if none can be run, the reasons.

    Args:
        given: the settings, such as pp=16.
        model: as of `search`.

    Raises:
        ValueError: the number of GPUs is not a multiple of these sizes.
    """
    text = ",".join(f"{name}={value}" for name, value in given.items())
    inside = dataclasses.replace(space, fixed={**space.fixed, **given})
    if not any(True for _ in inside.candidates()):
        return f"{text}: no candidate has it: {inside.emptiness}"
    try:
        own = search(inside, model, top=1, cpu_seconds=10.0)
    except ValueError as error:
        return f"{text}: {str(error).partition('got ')[2].partition('; wanted some')[0] or error}"
    if not own.best:
        return f"{text}: {explain_misfit(own)}"
    mine = own.best[0]
    if not found.best or _rank_key(mine) <= _rank_key(found.best[0]):
        return f"{text}: it is the best: {describe_way(mine.candidate)}"
    return f"{text}\n{compare(mine, found.best[0])}"


def compare(one: Ranked, best: Ranked) -> str:
    """Compare two candidates part by part: the largest losses of the first one first."""
    names = dict.fromkeys([*best.estimate.parts, *one.estimate.parts])
    rows = [
        (name, one.estimate.parts.get(name, 0.0), best.estimate.parts.get(name, 0.0))
        for name in names
    ]
    rows.sort(key=lambda row: row[2] - row[1])
    total = ("total", one.estimate.step_seconds, best.estimate.step_seconds)
    text = [["seconds of", "it", "the best", "more"]]
    text += [[name, f"{a:.3f}", f"{b:.3f}", f"{a - b:+.3f}"] for name, a, b in [*rows, total]]
    memory = [bytes_text(x.estimate.memory_bytes) for x in (one, best)]
    title = [
        f"it        {'  '.join(filter(None, describe_cells(one.candidate)))}",
        f"the best  {'  '.join(filter(None, describe_cells(best.candidate)))}",
    ]
    return "\n".join([*title, "", table(text), "", f"memory: {memory[0]}, the best {memory[1]}"])


# --- runs of a GPT

_RESERVED = 0.04
"""The fraction of a GPU's memory that fragmentation takes."""
_FAR = 1.2
"""Candidates whose guessed activations are this factor above the free memory are tried last."""
_LATE = 1e9

_SPLIT = ("zb-h1", "zb-h2", "zbv", "v-min", "v-half", "dualpipe", "dualpipe-half", "dualpipev")
"""Schedules that split backward into two parts."""
_STAGES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("zbv", "v-min", "v-half", "dualpipev"), 2)
)
"""Stages per rank of schedules that are made for several."""
_ALL_COUNTS = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "zbv", "v-min", "v-half")
"""Schedules for any number of microbatches."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The candidates of a GPT's run on a machine: whether they run, and their memory and time.

    `search` asks in the order of the methods, each only if the ones before let a candidate by.

    Attributes:
        config: the run: model, batches, optimizer; candidates replace its other settings.
        machine: to run it on.
        known: a cache of traces, by what they depend on.
    """

    config: TrainConfig
    machine: Hardware
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.config.family.name != "gpt":
            title, got = "cannot plan this model", self.config.family.title
            fix = "estimate one mesh: functron train --dry-run --hardware NAME --mesh MESH"
            refuse(title, "model", got, "a GPT", fix)
        if self.config.lora.adapters is not None:
            title, wanted = "cannot plan adapters", "0: plans are for training all parameters"
            refuse(title, "lora_rank", str(self.config.lora.rank), wanted, "leave it out")
        computing = self.machine.computing(self.config.precision.float32_matmul)
        object.__setattr__(self, "machine", computing)

    def space(self, gpus: int, **given: Any) -> Space:
        """The candidates on so many GPUs; `given` are further fields of `Space`."""
        usual = "bf16" if self.machine.name != hardware("cpu").name else "float32"
        policy = self.config.precision.name
        own = {"precisions": (usual if policy == "auto" else policy,)}
        return Space(self.config, gpus, self.machine.domain.gpus, **{**own, **given})

    def _make_once(self, key: Any, made: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = made()
        return self.known[key]

    @property
    def capacity_bytes(self) -> int:
        """The memory of a rank, without what fragmentation takes."""
        return round(self.machine.memory_bytes * (1 - _RESERVED))

    def problems(self, candidate: TrainConfig) -> Sequence[str]:
        """Why a candidate cannot be run; empty if it can."""
        c = candidate
        found = list(
            self._make_once(("rules", _split_key(c)), lambda: self._find_split_problems(c))
        )
        model, seq, ranks, mesh = c.gpt, c.data.seq, c.parallelism, mesh_of(c)
        parts = mesh["cp"] * (2 if mesh["cp"] > 1 and ranks.zigzag else 1)
        parts *= mesh["tp"] if ranks.sequence_parallel else 1
        if seq % parts:
            found.append(f"seq={seq} is not a multiple of {parts}")
        if ranks.sequence_parallel and mesh["tp"] == 1:
            found.append("sequence_parallel without tp")
        if ranks.zero in (1, 2) and math.prod(mesh[axis] for axis in _REPLICAS) == 1:
            found.append(f"zero={ranks.zero} without data-parallel ranks")
        if ranks.zero == 3 and mesh["dp"] * mesh["fsdp"] == 1:
            found.append("zero=3 on one data rank")
        if ranks.gather != "use" and mesh["fsdp"] == 1 and ranks.zero != 3:
            found.append(f"gather={ranks.gather} without fsdp")
        if mesh["pp"] == 1:
            return found
        stages = mesh["pp"] * count_chunks(c)
        if stages > model.num_layers:
            found.append(f"{model.num_layers} layers for {stages} stages")
        if ranks.schedule == "interleaved" and ranks.microbatches % mesh["pp"]:
            found.append(f"interleaved needs a multiple of pp={mesh['pp']} microbatches")
        elif ranks.schedule not in (*_ALL_COUNTS, "interleaved"):
            key = "schedule", ranks.schedule, mesh["pp"], ranks.microbatches, ranks.chunks
            found += self._make_once(key, lambda: _explain_refusal(c))
        return found

    def _find_split_problems(self, candidate: TrainConfig) -> list[str]:
        """Why the model cannot be sharded like this."""
        try:
            _ = self._make_plan(candidate).rules
        except ValueError as error:
            return _split_message(error)
        return []

    def _make_plan(self, c: TrainConfig) -> RunSetup:
        return RunSetup(c, mesh_of(c), self._make_defs(c))

    def _make_defs(self, c: TrainConfig) -> dict:
        return self._make_once(("defs", c.precision.name), lambda: c.family.defs(c.architecture))

    def state_bytes(self, candidate: TrainConfig) -> float:
        """A lower bound of a rank's bytes between steps: its share of the layers. No traces."""
        c, mesh, zero = candidate, mesh_of(candidate), candidate.parallelism.zero
        key = "local", c.precision.name, _split_key(c)
        layers, others = self._make_once(key, lambda: self._count_local_params(c))
        count = layers / mesh["pp"] + (others if mesh["pp"] == 1 else 0)
        state = self._find_state(c)
        parts = math.prod(mesh[axis] for axis in _REPLICAS) if zero in (1, 2) else 1
        grads = state.grad / (parts if zero == 2 else 1)
        optimizer = 0 if c.optimizer.offload else state.optimizer
        return count * (c.gpt.torch_dtype.itemsize + grads + optimizer / parts)

    def _count_local_params(self, c: TrainConfig) -> tuple[int, int]:
        """Parameters of one rank: of all layers, and of the rest."""
        made = self._make_plan(c)
        specs, stacks = param_specs(made.whole_defs, made.rules), self.config.gpt.stacks
        found = [0, 0]
        for name, entry in made.whole_defs.items():
            rows = zip(tree.leaves(entry), tree.leaves(specs[name]), strict=True)
            shapes = (local_shape(d.shape, spec, made.plain_mesh) for d, spec in rows)
            found[name not in stacks] += sum(math.prod(shape) for shape in shapes)
        return found[0], found[1]

    def _find_state(self, c: TrainConfig) -> StateBytes:
        return self._make_once(("state", c.precision.name), lambda: count_state_bytes(c))

    def least_seconds(self, candidate: TrainConfig) -> float:
        """A lower bound of a step: model and recomputed FLOPs at the best rate, and the bubble."""
        c, mesh = candidate, mesh_of(candidate)
        flops = self._make_once("flops", lambda: gpt.flops_per_token(c.gpt, c.data.seq))
        rates = self._make_once(("rate", c.precision.name), lambda: self._find_rate(c))
        again = 4 / 3 if c.compute.remat == "full" else 1.0
        seconds = flops * again * c.data.global_batch * c.data.seq / (mesh.size * rates)
        waits = c.parallelism.schedule not in _SPLIT
        slots = count_chunks(c) * c.parallelism.microbatches
        return seconds * (1 + waits * (mesh["pp"] - 1) / slots)

    def _find_rate(self, c: TrainConfig) -> float:
        """An upper bound of FLOP/s."""
        peaks, peak = self.machine.peak_flops, self.machine.peak(c.gpt.torch_dtype)
        if c.precision.recipe is not None:
            peak = max(peak, *(rate for name, rate in peaks.items() if name.startswith("float")))
        return peak * max(self.machine.matmul.efficiency, self.machine.attention["forward"])

    def guess(self, candidate: TrainConfig) -> float:
        """About the time of a step: `least_seconds`, and half of the layers' communication over tp,
        ep and fsdp. Candidates that are probably far too large come last.
        """
        c, model, mesh, ranks = candidate, candidate.gpt, mesh_of(candidate), candidate.parallelism
        placement = self._make_once(
            ("placement", mesh), lambda: RankPlacement.on(mesh, self.machine)
        )
        tokens = count_rows(c) * c.data.seq // mesh["cp"]
        stream = tokens * model.embed_dim * model.torch_dtype.itemsize
        sent = 0.0
        if mesh["tp"] > 1:  # two gathers and two scatters, in forward and backward
            sent += 8 * self.machine.collective_seconds("all_gather", stream, placement.reach("tp"))
        moe, nodes = model.moe, mesh["ep_node"]
        share = stream / (mesh["tp"] if ranks.sequence_parallel else 1)
        if nodes > 1 and moe is not None:
            each = share * mean_nodes(moe.num_experts, moe.top_k, nodes, moe.most_nodes(nodes))
            reach = placement.reach("ep_node")
            sent += 4 * self.machine.collective_seconds("all_to_all", each, reach)
        if mesh["ep"] > 1 and moe is not None:
            share, reach = share * moe.top_k, placement.reach("ep")
            sent += 4 * self.machine.collective_seconds("all_to_all", share, reach)
        if mesh["fsdp"] > 1 and ranks.gather != "step":
            layer = 2 * self._make_once("num_params", lambda: num_params(self._make_defs(c)))
            layer /= model.num_layers * mesh["tp"] * mesh["ep"] * nodes
            reach = placement.reach("fsdp")
            sent += 3 * self.machine.collective_seconds("all_gather", layer, reach)
        layers = model.num_layers / mesh["pp"] * ranks.microbatches
        seconds = self.least_seconds(c) + sent * layers / 2
        if ranks.schedule in _SPLIT:  # weights' gradients fill a part of 1f1b's bubble
            filled = min(2 / 3, 2 / 3 * ranks.microbatches / mesh["pp"])
            seconds *= 1 + (1 - filled) * (mesh["pp"] - 1) / ranks.microbatches
        free = self.capacity_bytes - self.state_bytes(c)
        return seconds + (self.guess_activations(c) >= _FAR * free) * _LATE

    def guess_activations(self, c: TrainConfig) -> float:
        """Bytes of a rank's activations, scaled from those of another split of the layers."""
        mesh, ranks = mesh_of(c), c.parallelism
        key = "like", c.compute.remat, c.precision.name, mesh["ep"], mesh["ep_node"]
        pieces = self._make_once(key, lambda: self._trace_pieces(_set_one_row(c)))
        held = sum(piece.held_bytes[0] * len(same) for piece, same in pieces.layers.values())
        split = pieces.mesh["tp"] * pieces.mesh["cp"] / (mesh["tp"] * mesh["cp"])
        live = min(ranks.microbatches, mesh["pp"]) / mesh["pp"]
        return held * split * count_rows(c) * live

    def traced(self, candidate: TrainConfig) -> bool:
        """Whether the candidate's layers have been traced."""
        return ("pieces", _trace_key(candidate)) in self.known

    def memory(self, candidate: TrainConfig) -> Mapping[str, int]:
        """Bytes of the fullest rank, by category."""
        return estimate_memory(self._make_step(candidate))

    def estimate(
        self, candidate: TrainConfig, *, exact: bool = False, software: Software | None = None
    ) -> Estimate:
        """The step's time and memory: by simulating its pipeline exactly, or by formulas.

        Args:
            software: that runs it, such as one of `OTHERS`; None: functron.
        """
        if software is None:
            software = FUNCTRON if candidate.compute.compile is True else UNCOMPILED
        step = self._make_step(candidate)
        return estimate_step(step, self.machine, software=software, exact=exact)

    def _make_step(self, c: TrainConfig) -> PlannedStep:
        ranks = c.parallelism
        return PlannedStep(
            self._trace_pieces(c), mesh_of(c), ranks.microbatches, ranks.schedule,
            count_chunks(c), None, ranks.zero, self._find_state(c), c.optimizer.offload,
        )  # fmt: skip

    def _trace_pieces(self, c: TrainConfig) -> TracedPieces:
        return self._make_once(
            ("pieces", _trace_key(c)), lambda: trace_run(self._make_plan(c), count_rows(c))
        )


def _split_key(c: TrainConfig) -> tuple:
    """The settings that a rank's share of the parameters depends on."""
    mesh, whole = mesh_of(c), c.parallelism.zero == 3
    axes = ("tp", "cp", "ep", "ep_node", "fsdp")
    return (*(mesh[a] for a in axes), mesh["dp"] if whole else 1, whole)


def _trace_key(c: TrainConfig) -> tuple:
    """The settings that the traced pieces of a candidate depend on."""
    mesh, ranks = mesh_of(c), c.parallelism
    whole = ranks.zero == 3
    gathered = ranks.gather != "step" and (mesh["fsdp"] > 1 or whole)
    fsdp = (ranks.gather, mesh["fsdp"], mesh["dp"] if whole else 1) if gathered else ("step",)
    split = mesh["pp"] > 1 and ranks.schedule in _SPLIT
    own = c.compute.remat, ranks.sequence_parallel, c.precision.name, split
    sizes = (mesh[axis] for axis in ("tp", "cp", "ep", "ep_node"))
    return *sizes, *fsdp, count_rows(c), *own


_CHUNKED = ("interleaved", "breadth-first")


def count_chunks(c: TrainConfig) -> int:
    """Stages of a rank of a run's pipeline."""
    schedule = c.parallelism.schedule
    return c.parallelism.chunks or _STAGES.get(schedule, 2 if schedule in _CHUNKED else 1)


def _set_one_row(c: TrainConfig) -> TrainConfig:
    """The same split of layers, with microbatches of one sample and parameters gathered before."""
    alone = c.data.global_batch // count_data_ranks(c)
    plain = {"schedule": "1f1b", "chunks": 0, "gather": "step", "microbatches": alone}
    return replace(c, parallelism=replace(c.parallelism, **plain))


def _explain_refusal(c: TrainConfig) -> list[str]:
    """Why a schedule is impossible with these counts."""
    ranks = c.parallelism
    try:
        made = pipeline.make(
            ranks.schedule, mesh_of(c)["pp"], ranks.microbatches, ranks.chunks or None
        )
    except ValueError as error:
        return _split_message(error)
    return [] if made.has_backward else [f"{ranks.schedule} has no backward"]


def _split_message(error: ValueError) -> list[str]:
    """The problems in a message, without its title."""
    return [line.strip(" -") for line in str(error).splitlines()[1:]] or [str(error)]


def trace_run(made: RunSetup, rows: int) -> TracedPieces:
    """Trace the layers, embedding and head of a run's model, for `rows` samples of a rank.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    config = made.config
    over = ("dp", "fsdp") if config.parallelism.zero == 3 else ("fsdp",)
    divided = config.parallelism.gather != "step" and any(made.mesh[axis] > 1 for axis in over)
    # reductions of gradients over data-parallel ranks are not part of a layer
    left_out = {"pp", "dp", "fsdp"} - {*(over if divided else ())}
    axes = {axis: n for axis, n in made.plain_mesh.axes if axis not in left_out}
    split = made.mesh["pp"] > 1 and config.parallelism.schedule in _SPLIT
    room = replace(made, mesh=made.plain_mesh).room  # that processes have for the rows that came
    return trace_pieces(
        replace(config.gpt, fused_projections=bool(joined_params(made.whole_defs))),
        Mesh(**axes),
        replace(made.options, gather=gpt.WHOLE, expert_room=room),
        rows=rows,
        seq=config.data.seq,
        gather=config.parallelism.gather if divided else "step",
        fsdp=over,
        expert_axes=config.parallelism.expert_axis_names,
        uneven=config.parallelism.uneven_names,
        split=split,
        grad_dtype=torch_dtype(config.optimizer.grad_dtype),
    )


def count_state_bytes(config: TrainConfig) -> StateBytes:
    """Bytes per parameter of gradients and of the optimizer's state.

    The latter are counted in the abstract state for a model of one or two layers.
    """
    model, own = config.gpt, config.gpt.torch_dtype.itemsize
    dense = min(1, model.dense_layers)
    small = replace(model, num_layers=1 + dense, dense_layers=dense)
    alone = {"mesh": "", "zero": 0, "gather": "use", "schedule": "1f1b", "chunks": 0}
    one = configure(config, gpt=small, optimizer__offload=False, **alone)
    made = make_setup(one, Mesh())
    held = tree.nbytes(made.init(random.key(0).to("meta")).opt_state)
    grad, reduce = (
        own if dtype is None else dtype.itemsize
        for dtype in map(torch_dtype, (config.optimizer.grad_dtype, config.optimizer.reduce_dtype))
    )
    return StateBytes(grad, round(held / num_params(made.defs)), reduce)
