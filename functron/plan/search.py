"""The fastest ways to run a model on so many GPUs: candidates, pruned by memory, ranked by time.

A `Candidate` is one way: a mesh, a schedule, microbatches, and what is kept, gathered and computed
again. `Space` enumerates them, a `Model` says of each whether it can be run, what it holds and how
long a step takes, and `search` asks it as little as it can: what cannot be run and what does not
fit is left out before anything is timed, and candidates whose least conceivable time is longer than
what was found already are not timed at all.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from functron.core.chart import line_chart, table
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.plan.estimate import Estimate
from functron.program.cost import bytes_text
from functron.spmd.mesh import Mesh

AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
"""The axes of candidates, in the order of their meshes: ranks of tp are next to one another."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a model.

    Attributes:
        pp, dp, fsdp, cp, ep, tp: sizes of the axes.
        schedule: of the pipeline.
        chunks: stages per rank of the pipeline; 0: what the schedule is made for.
        rows: samples of a rank in one microbatch.
        microbatches: per step.
        remat: what backward computes again.
        sequence_parallel: whether tp splits the sequence of the residual stream.
        zero: what data-parallel ranks divide; see `functron.training.TrainConfig`.
        gather: when parameters that fsdp divides are gathered.
        precision: the name of the policy.
        offload: whether the optimizer's state is in host memory.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    rows: int = 1
    microbatches: int = 1
    remat: str = "none"
    sequence_parallel: bool = False
    zero: int = 0
    gather: str = "use"
    precision: str = "bf16"
    offload: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh, without axes of size 1."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return Mesh(**{axis: size for axis, size in sizes.items() if size > 1})

    @property
    def data_ranks(self) -> int:
        """Ranks that the batch is split over."""
        return self.dp * self.fsdp * self.ep

    def cells(self) -> list[str]:
        """The cells below `COLUMNS`."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        data = f"zero {self.zero}" if self.zero else ""
        data += f" {self.gather}" if self.fsdp > 1 and self.gather != "use" else ""
        flags = ["sp" * self.sequence_parallel, data.strip(), "offload" * self.offload]
        return [
            str(self.mesh) or "one rank",
            f"{self.schedule}{chunks}" if self.pp > 1 else "",
            f"{self.microbatches} of {self.rows}",
            self.remat,
            ", ".join(filter(None, flags)),
            self.precision,
        ]


COLUMNS = ("mesh", "schedule", "microbatches", "remat", "", "precision")

_NUMBERS = (*AXES, "chunks", "rows", "microbatches", "zero")
_NAMES = tuple(f.name for f in dataclasses.fields(Candidate))
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"microbatch": "rows", "micro_batch_size": "rows", "num_microbatches": "microbatches"}
)
_WORDS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
)


def parse_settings(text: str, what: str, *, numbers: bool = False) -> dict[str, Any]:
    """Settings of candidates written as ``"tp=8,pp=16,remat=full"``.

    Args:
        text: these; the empty string is none.
        what: the option that has it.
        numbers: only those that are numbers may be set.

    Raises:
        ValueError: unknown settings, or values that are none of theirs; all are listed.
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
        elif name in ("sequence_parallel", "offload") and value.lower() not in _WORDS:
            problems.append(Problem(what, repr(entry), f"{name}=true or {name}=false"))
        elif name in found:
            problems.append(Problem(what, f"{name} twice", "every setting once"))
        elif name in _NUMBERS:
            found[name] = int(value)
        else:
            found[name] = _WORDS.get(value.lower(), value) if value.lower() in _WORDS else value
    raise_problems(f"cannot read {what} {text!r}", problems)
    return found


@dataclass(frozen=True)
class Space:
    """The candidates that are looked at.

    Attributes:
        gpus: ranks of every mesh.
        global_batch: samples per step.
        seq: tokens of a sample.
        num_layers: of the model: pipelines have at most so many stages.
        num_experts: of a layer; 1: there are none.
        domain: GPUs that reach one another fastest; tp stays among them unless it is fixed.
        fixed: settings that all candidates have.
        least: settings that are at least so large in all of them.
        rows, remats, precisions, schedules: the values that are tried.
    """

    gpus: int
    global_batch: int
    seq: int
    num_layers: int
    num_experts: int = 1
    domain: int = 8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[int] = (1, 2, 4)
    remats: Sequence[str] = ("none", "dots", "full")
    precisions: Sequence[str] = ("bf16",)
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zbv")

    def __post_init__(self):
        counts = ("gpus", "global_batch", "seq", "num_layers", "num_experts", "domain")
        found = [
            Problem(name, str(getattr(self, name)), "at least 1")
            for name in counts
            if getattr(self, name) < 1
        ]
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
        raise_problems("no mesh is like this", found)

    @property
    def emptiness(self) -> str:
        """Why there is no candidate, where there is none."""
        return (
            f"{self.global_batch} samples are not divided by its data-parallel ranks and rows, "
            f"or {self.num_layers} layers are too few for its stages"
        )

    def candidates(self) -> Iterator[Candidate]:
        """Every way that the counts admit, of each kind once.

        What only a `Model` knows, such as whether tp divides its heads, is not looked at.
        """
        for sizes in self._meshes():
            data = sizes["dp"] * sizes["fsdp"] * sizes["ep"]
            for rows in self._of("rows", self.rows):
                if self.global_batch % (data * rows):
                    continue
                count = self.global_batch // (data * rows)
                if not self._admits("microbatches", count):
                    continue
                for settings in self._settings(sizes):
                    yield Candidate(**sizes, rows=rows, microbatches=count, **settings)

    def _meshes(self) -> Iterator[dict[str, int]]:
        """The sizes of the axes."""
        divisors = [n for n in range(1, self.gpus + 1) if self.gpus % n == 0]
        small = [n for n in divisors if n <= self.domain]
        cps = [n for n in divisors if n == 1 or self.seq // n >= _LEAST_TOKENS]
        eps = [n for n in divisors if self.num_experts % n == 0]
        pps = [n for n in divisors if n <= self.num_layers]
        rows = itertools.product(
            self._of("tp", small), self._of("cp", cps), self._of("ep", eps), self._of("pp", pps)
        )
        for tp, cp, ep, pp in rows:
            if self.gpus % (tp * cp * ep * pp):
                continue
            data = self.gpus // (tp * cp * ep * pp)
            inside = [n for n in (1, *_FSDP, data) if data % n == 0 and n <= data]
            for fsdp in self._of("fsdp", sorted(set(inside))):
                if data % fsdp == 0 and self._admits("dp", data // fsdp):
                    sizes = {"pp": pp, "dp": data // fsdp, "fsdp": fsdp, "cp": cp, "ep": ep}
                    yield sizes | {"tp": tp}

    def _settings(self, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """The settings beside mesh and microbatches, which depend on the mesh."""
        replicas = sizes["dp"] * sizes["ep"] * sizes["cp"]
        zeros = (1, 2) if replicas > 1 and sizes["fsdp"] == 1 else (1,) if replicas > 1 else (0,)
        rows = itertools.product(
            self._of("precision", self.precisions),
            self._of("remat", self.remats),
            self._of("sequence_parallel", (sizes["tp"] > 1,)),
            self._of("zero", zeros),
            self._of("gather", ("use",)),
            self._of("offload", (False,)),
            self._schedules(sizes["pp"]),
        )
        names = ("precision", "remat", "sequence_parallel", "zero", "gather", "offload")
        for *values, (schedule, chunks) in rows:
            yield dict(zip(names, values, strict=True)) | {"schedule": schedule, "chunks": chunks}

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules and chunks; one of them without a pipeline."""
        if pp == 1:
            if self._admits("schedule", "1f1b") and self._admits("chunks", 0):
                yield "1f1b", 0
            return
        deepest = self.num_layers // pp
        many = [n for n in range(2, min(deepest, _MOST_CHUNKS) + 1) if not self.num_layers % n]
        many = many or [n for n in (2, 3, 4) if n <= deepest]
        for schedule in self._of("schedule", self.schedules):
            tried = many if schedule in ("interleaved", "breadth-first") else (0,)
            yield from ((schedule, chunks) for chunks in self._of("chunks", tried))

    def _of(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values that are tried of a setting: the fixed one, or those that are admitted."""
        if name in self.fixed:
            return (self.fixed[name],)
        return [value for value in values if self._admits(name, value)]

    def _admits(self, name: str, value: Any) -> bool:
        if name in self.least and value < self.least[name]:
            return False
        return name not in self.fixed or value == self.fixed[name]


_LEAST_TOKENS = 4096
"""Of a sequence on one rank of cp: below, attention is too little to hide what is sent."""
_FSDP = (8, 32, 128)
"""Sizes of fsdp that are tried beside all data ranks: parameters divided among some of them."""
_MOST_CHUNKS = 8


class Model(Protocol):
    """The answers that a search wants of candidates, in this order, each if the last let it by."""

    @property
    def capacity_bytes(self) -> int:
        """The memory that a rank has for them."""
        ...

    def problems(self, candidate: Candidate) -> Sequence[str]:
        """Why a candidate cannot be run; empty if it can."""
        ...

    def state_bytes(self, candidate: Candidate) -> float:
        """The least that a rank holds between steps, found without a trace."""
        ...

    def least_seconds(self, candidate: Candidate) -> float:
        """A time that no step of it can be below, found without a trace."""
        ...

    def guess(self, candidate: Candidate) -> float:
        """About how long a step takes, found without a trace: what is looked at first."""
        ...

    def memory(self, candidate: Candidate) -> Mapping[str, int]:
        """Bytes of the fullest rank, by category."""
        ...

    def estimate(self, candidate: Candidate, *, exact: bool = False) -> Estimate:
        """The time of a step, its parts, and what it holds; exactly, or by quick formulas."""
        ...

    def traced(self, candidate: Candidate) -> bool:
        """Whether `memory` would trace nothing new."""
        ...


@dataclass(frozen=True)
class Ranked:
    """A candidate that fits, and its step.

    Attributes:
        candidate: the way.
        estimate: its step.
    """

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True)
class Found:
    """The findings of `search`; prints as a table.

    Attributes:
        best: the fastest candidates, the fastest first.
        front: those than which none that was timed is both faster and smaller, fastest first.
        counts: how many candidates there were, and what became of them.
        smallest: where none fits: the one that needs the least, and what that is, by category.
        capacity_bytes: the memory that a rank has.
        reasons: of those that cannot be run, the commonest reasons, each with its count.
        complete: whether every candidate that could be among the best was looked at.
        seconds: CPU time that it took.
    """

    best: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    counts: Mapping[str, int]
    smallest: tuple[Candidate, Mapping[str, int]] | None
    capacity_bytes: int
    reasons: tuple[tuple[str, int], ...]
    complete: bool
    seconds: float

    def __str__(self) -> str:
        head = ["", *COLUMNS, "seconds", "90%", "MFU", "memory", "limited by"]
        rows = [head]
        for number, (candidate, estimate) in enumerate(_pairs(self.best), 1):
            low, high = estimate.interval
            rows.append(
                [str(number), *candidate.cells(), f"{estimate.step_seconds:.3g}",
                 f"{low:.3g} to {high:.3g}", f"{estimate.mfu:.1%}",
                 bytes_text(estimate.memory_bytes), estimate.limits]
            )  # fmt: skip
        return f"{table(rows, left=7)}\n\n{self.summary()}"

    def summary(self) -> str:
        """How many candidates there were, and what became of them, in a line or two."""
        names = ", ".join(f"{count:,} {what}" for what, count in self.counts.items() if count)
        text = f"{names}; {self.seconds:.0f} s of CPU time"
        if not self.complete:
            text += (
                "\nnot all that could be among the best were timed: "
                "give it more with --cpu-seconds, or fewer to look at with --fix"
            )
        return text

    def svg(self) -> str:
        """Seconds over memory of the front, and of the best, as an SVG document."""
        rows = sorted(self.front, key=lambda one: one.estimate.memory_bytes)
        points = [(r.estimate.memory_bytes / 2**30, r.estimate.step_seconds) for r in rows]
        best = [
            (r.estimate.memory_bytes / 2**30, r.estimate.step_seconds)
            for r in sorted(self.best, key=lambda one: one.estimate.memory_bytes)
        ]
        return line_chart(
            [x for x, _ in points],
            [y for _, y in points],
            title="the fastest step for each amount of memory",
            x_label="GiB of the fullest rank",
            y_label="seconds of a step",
            others={"the best ten": best},
        )


def _pairs(rows: Sequence[Ranked]) -> Iterator[tuple[Candidate, Estimate]]:
    return ((row.candidate, row.estimate) for row in rows)


def search(
    space: Space, model: Model, *, top: int = 10, cpu_seconds: float = 30.0, slack: float = 1.0
) -> Found:
    """The fastest candidates that fit.

    Steps are timed by formulas, and the best of them exactly in the end. Candidates are looked at
    in the order of guesses, without those whose least conceivable times
    are longer than what the last of the best takes: these cannot be among them. Once `cpu_seconds`
    have passed, only candidates whose layers are traced already are looked at.

    Args:
        space: the candidates.
        model: what is run, and where.
        top: how many are wanted.
        cpu_seconds: of this process, after which nothing new is traced; half as many more end it.
        slack: looks at candidates with bounds up to so many times that of the last of the best,
            for a fuller front.

    Raises:
        ValueError: the space has no candidates, or none can be run; the commonest reasons are
            listed.
    """
    began = time.process_time()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    bounded, small = _bounded(space, model, counts, reasons)
    timed: list[Ranked] = []
    kth = math.inf
    full: set[Candidate] = set()
    for bound, candidate in bounded:
        spent = time.process_time() - began
        if bound > slack * kth:
            counts["slower at best"] += 1
        elif spent > 1.5 * cpu_seconds or (spent > cpu_seconds and not model.traced(candidate)):
            counts["not looked at"] += 1
        elif _fewer_rows(candidate) in full:
            full.add(candidate)
            counts["too large"] += 1
        elif (held := sum(model.memory(candidate).values())) > model.capacity_bytes:
            full.add(candidate)
            counts["too large"] += 1
            small.append((held, candidate))
        else:
            timed.append(Ranked(candidate, model.estimate(candidate)))
            kth = _kth(timed, top)
    timed.sort(key=_order)
    counts["timed"] = len(timed)
    smallest = None
    if not timed and small:
        smallest = _smallest(model, small)
    listed = {name: counts[name] for name in _COUNTS}
    best = [Ranked(one.candidate, model.estimate(one.candidate, exact=True)) for one in timed[:top]]
    return Found(
        tuple(sorted(best, key=_order)),
        _front(timed),
        MappingProxyType(listed),
        smallest,
        model.capacity_bytes,
        tuple(reasons.most_common(3)),
        not counts["not looked at"],
        time.process_time() - began,
    )


def _fewer_rows(c: Candidate) -> Candidate | None:
    """The candidate with half the rows, which needs less where its pipeline is as full."""
    if c.rows % 2 or c.microbatches < c.pp:
        return None
    return dataclasses.replace(c, rows=c.rows // 2, microbatches=2 * c.microbatches)


_COUNTS = ("candidates", "cannot run", "too large", "slower at best", "not looked at", "timed")


def _bounded(
    space: Space, model: Model, counts: Counter[str], reasons: Counter[str]
) -> tuple[list[tuple[float, Candidate]], list[tuple[float, Candidate]]]:
    """Candidates that may fit, with their bounds, in the order of guesses; and those whose state
    alone does not, with its bytes."""
    found: list[tuple[float, float, Candidate]] = []
    too_large: list[tuple[float, Candidate]] = []
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
        got = f"{counts['candidates']:,} candidates on {space.gpus} GPUs, none of which can be run"
        fix = "take another number of GPUs, another --global-batch, or leave out what is fixed"
        refuse("no mesh is like this", "gpus", f"{got} ({listed})", "some that can", fix)
    found.sort(key=lambda one: (one[0], one[2].rows))
    return [(bound, candidate) for _, bound, candidate in found], too_large


def _kth(timed: list[Ranked], top: int) -> float:
    """The time of the last of the best; infinity where there are not so many."""
    if len(timed) < top:
        return math.inf
    return heapq.nsmallest(top, (one.estimate.step_seconds for one in timed))[-1]


def _order(one: Ranked) -> tuple:
    """By time; of equals the one with less memory, and with less of a pipeline."""
    estimate, candidate = one.estimate, one.candidate
    return estimate.step_seconds, estimate.memory_bytes, candidate.pp, candidate.tp


def _smallest(
    model: Model, found: Sequence[tuple[float, Candidate]]
) -> tuple[Candidate, Mapping[str, int]]:
    """The one that needs the least, of the first few by bytes, rows and what is recomputed."""

    def order(one: tuple[float, Candidate]) -> tuple:
        return one[0], one[1].rows, one[1].remat != "full"

    tried = [candidate for _, candidate in heapq.nsmallest(_TRIED, found, key=order)]
    pairs = [(one, model.memory(one)) for one in tried]
    return min(pairs, key=lambda pair: sum(pair[1].values()))


_TRIED = 4


def _front(timed: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Those than which none is both faster and smaller; `timed` is sorted by time."""
    front: list[Ranked] = []
    for one in timed:
        if not front or one.estimate.memory_bytes < front[-1].estimate.memory_bytes:
            front.append(one)
    return tuple(front)


def misfit(found: Found) -> str:
    """Why nothing fits: by how much, what takes it, and what would make it fit."""
    assert found.smallest is not None
    candidate, memory = found.smallest
    needed, has = sum(memory.values()), found.capacity_bytes
    parts = sorted(memory.items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{bytes_text(size)} of {name}" for name, size in parts if size)
    fixes = []
    if not candidate.offload:
        fixes.append("--fix offload=true keeps the optimizer's state in host memory")
    activations = memory.get("activations", 0)
    state = needed - activations
    if state > has:
        fixes.append(f"about {math.ceil(state / has)} times as many GPUs")
    if candidate.remat != "full":
        fixes.append("--fix remat=full")
    if activations > has / 2:
        fixes.append("shorter samples (--seq), or more context-parallel ranks (--fix cp=2)")
    fixes.append("GPUs with more memory (--hardware)")
    rest = found.counts["not looked at"]
    nothing = "nothing fits"
    if rest:
        nothing = f"nothing of what was looked at fits, and {rest:,} candidates were not"
        fixes.insert(0, "--cpu-seconds with more of them, or --fix, such as remat=full,rows=1")
    return (
        f"{nothing}: {' '.join(filter(None, candidate.cells()))} needs the least, "
        f"{bytes_text(needed)} of the {bytes_text(has)} that a GPU has "
        f"({bytes_text(needed - has)} too much): {listed}; fix: {'; or '.join(fixes)}"
    )


def why(found: Found, given: Mapping[str, Any], space: Space, model: Model) -> str:
    """Why candidates with these settings are not the best, as text.

    The best of them is put beside the best of all, part by part; where none fits, the one that
    needs the least is shown, and where none can be run, the reasons.

    Args:
        found: what the search found.
        given: the settings, such as pp=16.
        space: that was searched.
        model: as of `search`.

    Raises:
        ValueError: the GPUs are no multiple of these sizes.
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
        return f"{text}: {misfit(own)}"
    mine = own.best[0]
    if not found.best or _order(mine) <= _order(found.best[0]):
        return f"{text}: it is the best: {' '.join(filter(None, mine.candidate.cells()))}"
    return f"{text}\n{compare(mine, found.best[0])}"


def compare(one: Ranked, best: Ranked) -> str:
    """Two candidates side by side, part by part: the largest losses of the first one first."""
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
        f"it        {'  '.join(filter(None, one.candidate.cells()))}",
        f"the best  {'  '.join(filter(None, best.candidate.cells()))}",
    ]
    return "\n".join([*title, "", table(text), "", f"memory: {memory[0]}, the best {memory[1]}"])
