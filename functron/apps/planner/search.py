"""Search for the fastest parallel configurations: candidates, pruned by memory, ranked by time.

A candidate is the configuration of a run, with a mesh, schedule, microbatches, ZeRO stage and
activation checkpointing. `Space` enumerates candidates. `Choices` says of each whether it can be
run, its memory and the time of a step; layers are traced once per kind. `search` drops candidates
that cannot be run or do not fit before anything is timed, and does not time those whose lower bound
is above the times of the best so far.
"""

from __future__ import annotations

import dataclasses
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
from functron.apps.planner.space import (
    COLUMNS,
    REPLICA_AXES,
    Space,
    count_rows,
    count_stages,
    describe_cells,
    describe_way,
    find_layout,
    head_layers,
    mesh_of,
    sum_busiest,
)
from functron.core import random, tree
from functron.core.chart import line_chart
from functron.core.errors import refuse
from functron.core.tables import bytes_text, table
from functron.models import gpt
from functron.nn.moe import mean_nodes
from functron.optim import torch_dtype
from functron.spmd import Mesh
from functron.spmd.params import joined_params, num_params, param_specs
from functron.spmd.spec import local_shape
from functron.training.config import TrainConfig, configure
from functron.training.setup import RunSetup, make_setup


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
    order = _CandidateOrder(bounded)
    for guess, bound, candidate in order:
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
            order.learn(candidate, timed[-1].estimate.step_seconds / guess)
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


class _CandidateOrder:
    """Candidates by their guessed time, as corrected by what others with their mesh took.

    Guesses leave out what is particular to a split of layers, so that they are too small, by a
    factor that candidates of one split have in common. Those of a split that was not timed are
    taken at their guess: each split that may be among the best comes up before others are refined.
    """

    def __init__(self, found: Sequence[tuple[float, float, TrainConfig]]):
        self._factors: dict[tuple, float] = {}
        self._heap = [(guess, i, 1.0, bound, c) for i, (guess, bound, c) in enumerate(found)]
        self._guesses = [guess for guess, _, _ in found]

    def __iter__(self) -> Iterator[tuple[float, float, TrainConfig]]:
        heap = self._heap  # in the order of guesses, so that it is one
        while heap:
            _, i, factor, bound, candidate = heapq.heappop(heap)
            now = self._find_factor(candidate)
            if now > factor:
                heapq.heappush(heap, (self._guesses[i] * now, i, now, bound, candidate))
            else:
                yield self._guesses[i], bound, candidate

    def _find_factor(self, c: TrainConfig) -> float:
        exact, alike = _list_splits(c)
        return self._factors.get(exact, self._factors.get(alike, 1.0))

    def learn(self, candidate: TrainConfig, factor: float) -> None:
        """Expect of candidates with this split of layers that they take so much of their guess."""
        for key in _list_splits(candidate):
            self._factors[key] = min(factor, self._factors.get(key, math.inf))


def _list_splits(c: TrainConfig) -> tuple[tuple, tuple]:
    """The split of a candidate's layers over ranks: with what is kept of them, and without."""
    mesh = mesh_of(c)
    sizes = tuple(mesh[axis] for axis in ("tp", "cp", "ep_node", "ep"))
    return (*sizes, c.compute.remat, c.precision.name), sizes


def _halve_rows(c: TrainConfig) -> TrainConfig | None:
    """The candidate with half the rows, which needs less memory if its pipeline is full."""
    ranks = c.parallelism
    if count_rows(c) % 2 or ranks.microbatches < mesh_of(c)["pp"]:
        return None
    return replace(c, parallelism=replace(ranks, microbatches=2 * ranks.microbatches))


_COUNTS = ("candidates", "cannot run", "too large", "slower at best", "not looked at", "timed")


def _bound_candidates(
    space: Space, model: Choices, counts: Counter[str], reasons: Counter[str]
) -> tuple[list[tuple[float, float, TrainConfig]], list[tuple[float, TrainConfig]]]:
    """Candidates that may fit, with guesses and lower bounds, in the order of the former; and those
    whose state alone does not fit, with its bytes."""
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
    return found, too_large


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
        seq, ranks, mesh = c.data.seq, c.parallelism, mesh_of(c)
        parts = mesh["cp"] * (2 if mesh["cp"] > 1 and ranks.zigzag else 1)
        parts *= mesh["tp"] if ranks.sequence_parallel else 1
        if seq % parts:
            found.append(f"seq={seq} is not a multiple of {parts}")
        if ranks.sequence_parallel and mesh["tp"] == 1:
            found.append("sequence_parallel without tp")
        if ranks.zero in (1, 2) and math.prod(mesh[axis] for axis in REPLICA_AXES) == 1:
            found.append(f"zero={ranks.zero} without data-parallel ranks")
        if ranks.zero == 3 and mesh["dp"] * mesh["fsdp"] == 1:
            found.append("zero=3 on one data rank")
        if ranks.gather != "use" and mesh["fsdp"] == 1 and ranks.zero != 3:
            found.append(f"gather={ranks.gather} without fsdp")
        if mesh["pp"] == 1:
            return found
        found += self._find_layout_problems(c)
        if ranks.schedule == "interleaved" and ranks.microbatches % mesh["pp"]:
            found.append(f"interleaved needs a multiple of pp={mesh['pp']} microbatches")
        elif ranks.schedule not in (*_ALL_COUNTS, "interleaved"):
            key = "schedule", ranks.schedule, mesh["pp"], ranks.microbatches, ranks.chunks
            found += self._make_once(key, lambda: _explain_refusal(c))
        return found

    def _find_layout_problems(self, c: TrainConfig) -> list[str]:
        """Why the layers cannot be divided among the stages like this."""
        layers, stages = c.gpt.num_layers, mesh_of(c)["pp"] * count_chunks(c)
        if c.parallelism.layout in ("", "even", "cost"):
            return [f"{layers} layers for {stages} stages"] if stages > layers else []
        key = "layout problems", c.parallelism.layout, stages

        def find() -> list[str]:
            try:
                find_layout(c.parallelism.layout, layers, stages)
            except ValueError as error:
                return _split_message(error)
            return []

        return self._make_once(key, find)

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
        parts = math.prod(mesh[axis] for axis in REPLICA_AXES) if zero in (1, 2) else 1
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
        """About the time of a step: what its FLOPs take where layers are not split, half of the
        layers' communication over tp, cp, ep and fsdp, and the reading of weights that so few rows
        do not hide. Candidates that are probably far too large come last.
        """
        c, mesh, ranks = candidate, mesh_of(candidate), candidate.parallelism
        least, layers = self.least_seconds(c), c.gpt.num_layers / mesh["pp"] * ranks.microbatches
        layer = self._count_layer_bytes(c)
        reading = 3 * layer / self.machine.memory.bytes_per_second  # forward and twice backward
        waiting = self._guess_communication(c, layer) / 2 + max(0.0, reading - least / layers)
        seconds = least * self._find_slowdown(c) * self._find_imbalance(c) + waiting * layers
        if ranks.schedule in _SPLIT:  # weights' gradients fill a part of 1f1b's bubble
            filled = min(2 / 3, 2 / 3 * ranks.microbatches / mesh["pp"])
            seconds *= 1 + (1 - filled) * (mesh["pp"] - 1) / ranks.microbatches
        free = self.capacity_bytes - self.state_bytes(c)
        if mesh["fsdp"] > 1 and ranks.gather != "use":
            free -= layer * c.gpt.num_layers / mesh["pp"]
        return seconds + (self.guess_activations(c) >= _FAR * free) * _LATE

    def _find_imbalance(self, c: TrainConfig) -> float:
        """The work of the busiest rank of a pipeline, as a part of that of the even layout."""
        ranks, pp = c.parallelism, mesh_of(c)["pp"]
        stages, layers = pp * count_chunks(c), c.gpt.num_layers
        if pp == 1 or ranks.layout in ("", "even", "cost") or stages > layers:
            return 1.0

        def find() -> float:
            head = head_layers(c.gpt, c.data.seq)
            own, even = (
                sum_busiest(find_layout(layout, layers, stages), ranks.schedule, pp, head)
                for layout in (ranks.layout, "even")
            )
            return own / even

        return self._make_once(("imbalance", ranks.schedule, pp, stages, ranks.layout), find)

    def _count_layer_bytes(self, c: TrainConfig) -> float:
        """About the parameters of a layer on a rank, in 16 bits, where fsdp has gathered them."""
        count = self._make_once("num_params", lambda: num_params(self._make_defs(c)))
        mesh = mesh_of(c)
        return 2 * count / (c.gpt.num_layers * mesh["tp"] * mesh["ep"] * mesh["ep_node"])

    def _guess_communication(self, c: TrainConfig, layer_bytes: float) -> float:
        """About the seconds that one layer of one microbatch communicates over tp, cp, ep, fsdp."""
        model, mesh, ranks, sent = c.gpt, mesh_of(c), c.parallelism, 0.0
        placement = self._make_once(
            ("placement", mesh), lambda: RankPlacement.on(mesh, self.machine)
        )

        def send(op: str, count: float, num_bytes: float, axis: str) -> float:
            if mesh[axis] == 1:
                return 0.0
            return count * self.machine.collective_seconds(op, num_bytes, placement.reach(axis))

        tokens = count_rows(c) * c.data.seq // mesh["cp"]
        stream = tokens * model.embed_dim * model.torch_dtype.itemsize
        # two gathers and two scatters, in forward and backward
        sent += send("all_gather", 8, stream, "tp")
        kv = 2 * stream * model.kv_heads * model.head_size / model.embed_dim / mesh["tp"]
        # keys and values forward and again backward, with their gradients
        sent += send("all_gather", 4, kv * mesh["cp"], "cp")
        moe, nodes = model.moe, mesh["ep_node"]
        share = stream / (mesh["tp"] if ranks.sequence_parallel else 1)
        if moe is not None:
            each = share * mean_nodes(moe.num_experts, moe.top_k, nodes, moe.most_nodes(nodes))
            sent += send("all_to_all", 4, each, "ep_node")
            sent += send("all_to_all", 4, share * moe.top_k, "ep")
        if ranks.gather != "step":
            sent += send("all_gather", 2 if ranks.gather == "keep" else 3, layer_bytes, "fsdp")
        return sent

    def guess_activations(self, c: TrainConfig) -> float:
        """Bytes of a rank's activations, scaled from those of another split of the layers."""
        mesh, ranks = mesh_of(c), c.parallelism
        other = self._make_reference(c)
        pieces = self._trace_pieces(other)
        held = sum(piece.held_bytes[0] * len(same) for piece, same in pieces.layers.values())
        live = min(ranks.microbatches, mesh["pp"]) / mesh["pp"]
        if not c.compute.expert_room:  # room for all rows of all ranks
            live *= max(1.0, mesh["ep"] * mesh["ep_node"] / mesh_of(other)["ep"])
        return held / (mesh["tp"] * mesh["cp"]) * count_rows(c) * live

    def _find_slowdown(self, c: TrainConfig) -> float:
        """How many times the bound of its FLOPs another split of the layers takes to compute."""
        other = self._make_reference(c)
        key = "slowdown", other
        parts = self._make_once(key, lambda: self.estimate(other).parts)
        computing = sum(parts.get(name, 0.0) for name in ("products", "memory", "attention"))
        return max(1.0, computing / self.least_seconds(other))

    def _make_reference(self, c: TrainConfig) -> TrainConfig:
        """The run with a sample on each rank, and no layer split but experts over one domain."""
        size, domain = mesh_of(c).size, self.machine.domain.gpus
        experts = 1 if c.gpt.moe is None else c.gpt.moe.num_experts
        key = "reference", c.compute.remat, c.precision.name, size

        def make() -> TrainConfig:
            ep = math.gcd(math.gcd(experts, domain), size)
            mesh = ",".join(f"{a}={n}" for a, n in (("dp", size // ep), ("ep", ep)) if n > 1)
            ranks = replace(
                c.parallelism, mesh=mesh, microbatches=1, schedule="1f1b", chunks=0, zero=0,
                gather="use", sequence_parallel=False, uneven="", layout="",
            )  # fmt: skip
            return replace(c, parallelism=ranks, data=replace(c.data, global_batch=size))

        return self._make_once(key, make)

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
            count_chunks(c), self._make_layout(c), ranks.zero, self._find_state(c),
            c.optimizer.offload,
        )  # fmt: skip

    def _make_layout(self, c: TrainConfig) -> pipeline.Layout | None:
        """The layers of the stages; None: even, or no pipeline."""
        mesh, ranks = mesh_of(c), c.parallelism
        if mesh["pp"] == 1 or not ranks.layout:
            return None
        stages = mesh["pp"] * count_chunks(c)
        if ranks.layout == "cost":  # by traces of the layers
            return self._make_once(
                ("layout", *_trace_key(c), stages), lambda: self._make_plan(c).partition.layout
            )
        key = "layout", ranks.layout, stages
        return self._make_once(key, lambda: find_layout(ranks.layout, c.gpt.num_layers, stages))

    def _trace_pieces(self, c: TrainConfig) -> TracedPieces:
        return self._make_once(
            ("pieces", _trace_key(c)), lambda: trace_run(self._make_plan(c), count_rows(c))
        )


def _split_key(c: TrainConfig) -> tuple:
    """The settings that a rank's share of the parameters depends on."""
    mesh, whole = mesh_of(c), c.parallelism.zero == 3
    axes = ("tp", "cp", "ep", "ep_node", "fsdp")
    data = mesh["dp"] if whole else 1
    return (*(mesh[a] for a in axes), data, whole, c.parallelism.uneven)


def _trace_key(c: TrainConfig) -> tuple:
    """The settings that the traced pieces of a candidate depend on."""
    mesh, ranks = mesh_of(c), c.parallelism
    whole = ranks.zero == 3
    gathered = ranks.gather != "step" and (mesh["fsdp"] > 1 or whole)
    fsdp = (ranks.gather, mesh["fsdp"], mesh["dp"] if whole else 1) if gathered else ("step",)
    split = mesh["pp"] > 1 and ranks.schedule in _SPLIT
    own = c.compute.remat, ranks.sequence_parallel, c.precision.name, split, ranks.uneven
    sizes = (mesh[axis] for axis in ("tp", "cp", "ep", "ep_node"))
    return *sizes, *fsdp, count_rows(c), *own


def count_chunks(c: TrainConfig) -> int:
    """Stages of a rank of a run's pipeline."""
    return count_stages(c.parallelism.schedule, c.parallelism.chunks)


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
    dense = int("dense" in model.stacks)
    small = replace(model, num_layers=1 + dense, dense_layers=dense, dense_at=())
    alone = {"mesh": "", "zero": 0, "gather": "use", "schedule": "1f1b"}
    alone |= {"chunks": 0, "layout": ""}
    one = configure(config, gpt=small, optimizer__offload=False, **alone)
    made = make_setup(one, Mesh())
    held = tree.nbytes(made.init(random.key(0).to("meta")).opt_state)
    grad, reduce = (
        own if dtype is None else dtype.itemsize
        for dtype in map(torch_dtype, (config.optimizer.grad_dtype, config.optimizer.reduce_dtype))
    )
    return StateBytes(grad, round(held / num_params(made.defs)), reduce)
