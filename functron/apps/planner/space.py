"""Candidates of a search for plans: configurations of one run, with all that is chosen for it."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem, nearest, raise_problems
from functron.core.settings import value_at
from functron.models.config import GPTConfig
from functron.models.gpt import flops_per_token
from functron.pipeline import Layout, even_layout, parse_layout
from functron.spmd import DATA_AXES, Mesh
from functron.training.config import TrainConfig, configure, with_precision

AXES = ("pp", "dp", "fsdp", "cp", "ep_node", "ep", "tp")
"""The axes of candidates' meshes, in order: ranks of tp are adjacent."""


CHOSEN: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in (
            "schedule", "chunks", "layout", "microbatches", "remat", "sequence_parallel", "zero",
            "gather", "precision",
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
    chunks += f" {ranks.layout}" if ranks.layout else ""
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

_NAMES = (*AXES, *itertools.islice(CHOSEN, 3), "rows", *itertools.islice(CHOSEN, 3, None))
_USUAL = MappingProxyType({
    **dict.fromkeys((*AXES, "rows"), 1),
    **{word: value_at(TrainConfig(), name) for word, name in CHOSEN.items()},
})  # fmt: skip
_NUMBERS = tuple(name for name in _NAMES if type(_USUAL[name]) is int)
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"microbatch": "rows", "micro_batch_size": "rows", "num_microbatches": "microbatches"}
)
_BOTH_ENDS = re.compile(r"(layout=first=\d+)\s*,\s*(last=\d+)")
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
    text = _BOTH_ENDS.sub(r"\1;\2", text)  # of which the comma is no end
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
            found[name] = _WORDS.get(value.lower(), value.replace(";", ","))
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
        lighter_ends: whether pipelines are tried whose first and last stage have fewer layers; see
            `lighten_ends`.
    """

    config: TrainConfig
    gpus: int
    domain: int = 8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[int] = (1, 2, 4, 8)
    remats: Sequence[str] = ("none", "dots", "full")
    precisions: Sequence[str] = ("bf16",)
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zbv")
    lighter_ends: bool = True

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
        """All candidates whose counts divide; the model's sizes are for ``Choices.problems``."""
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
                    settings["uneven"] = self._find_uneven(sizes, settings["zero"])
                    ranks = replace(made.parallelism, mesh=mesh, microbatches=count, **settings)
                    yield replace(made, parallelism=ranks)

    def _find_uneven(self, sizes: Mapping[str, int], zero: int) -> str:
        """The logical axes that ranks need not divide: those of the run, and one that fsdp pads."""
        ranks, model = self.config.parallelism, self.config.gpt
        if not (zero == 3 or any(sizes[axis] > 1 for axis in _DIVIDING)):
            return ""  # it would have no effect
        over = sizes["fsdp"] * (sizes["dp"] if zero == 3 else 1)
        latent = 0 if model.moe is None else model.moe.latent_dim
        if "embed" in ranks.uneven_names or not (model.embed_dim % over or latent % over):
            return ranks.uneven
        return ",".join((*ranks.uneven_names, "embed"))

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
            tried = (1, *_FSDP, self.domain, data)
            inside = [n for n in tried if data % n == 0 and n <= data]
            for fsdp in self._list_values("fsdp", sorted(set(inside))):
                if data % fsdp == 0 and self._admits("dp", data // fsdp):
                    found = {"pp": pp, "dp": data // fsdp, "fsdp": fsdp, "cp": cp}
                    yield found | {"ep_node": nodes, "ep": ep, "tp": tp}

    def _list_settings(
        self, sizes: Mapping[str, int]
    ) -> Iterator[tuple[tuple[str, str, bool], dict[str, Any]]]:
        """Precision, remat and offload; and settings of `ParallelismConfig`."""
        replicas = math.prod(sizes[axis] for axis in REPLICA_AXES)
        zeros = (1, 2) if replicas > 1 and sizes["fsdp"] == 1 else (1,) if replicas > 1 else (0,)
        rows = itertools.product(
            self._list_values("precision", self.precisions),
            self._list_values("remat", self.remats),
            self._list_values("sequence_parallel", (sizes["tp"] > 1,)),
            self._list_values("zero", zeros),
            self._list_values("gather", ("use", "keep") if sizes["fsdp"] > 1 else ("use",)),
            self._list_values("offload", (False,)),
            self._list_schedules(sizes["pp"]),
        )
        names = ("sequence_parallel", "zero", "gather", "schedule", "chunks", "layout")
        for precision, remat, sequence_parallel, zero, gather, offload, order in rows:
            values = (sequence_parallel, zero, gather, *order)
            settings: dict[str, Any] = dict(zip(names, values, strict=True))
            yield (precision, remat, offload), settings

    def _list_schedules(self, pp: int) -> Iterator[tuple[str, int, str]]:
        """Schedules, chunks and layouts; one without a pipeline."""
        if pp == 1:
            even = self.fixed.get("layout", "") in _EVEN
            if even and self._admits("schedule", "1f1b") and self._admits("chunks", 0):
                yield "1f1b", 0, ""
            return
        for schedule in self._list_values("schedule", self.schedules):
            tried = self._list_chunks(pp) if schedule in _CHUNKED else (0,)
            for chunks in self._list_values("chunks", tried):
                layouts = self._list_layouts(schedule, pp, chunks)
                yield from ((schedule, chunks, layout) for layout in layouts)

    def _list_chunks(self, pp: int) -> list[int]:
        """Numbers of stages of a rank: those that divide the layers, or that lighter ends even."""
        layers = self._num_layers
        deepest = min(layers // pp, _MOST_CHUNKS)
        many = [n for n in range(2, deepest + 1) if layers % n == 0]
        many = many or [n for n in (2, 3, 4) if n <= deepest]
        if self.lighter_ends:
            tried = range(2, min(-(-layers // pp), _MOST_CHUNKS) + 1)
            many += [n for n in tried if 0 < -layers % (pp * n) <= 2]
        return sorted({*many})

    def _list_layouts(self, schedule: str, pp: int, chunks: int) -> Sequence[str]:
        """Layouts of stages: the even one, and one with lighter ends where that may be faster."""
        if "layout" in self.fixed:
            return ("" if self.fixed["layout"] in _EVEN else self.fixed["layout"],)
        lighter = ""
        if self.lighter_ends:
            model, seq = self.config.gpt, self.config.data.seq
            lighter = lighten_ends(model.num_layers, head_layers(model, seq), schedule, pp, chunks)
        if lighter and pp * count_stages(schedule, chunks) > self._num_layers:
            return (lighter,)  # the even one is impossible
        return ("", lighter) if lighter else ("",)

    def _list_values(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values of a setting that are tried: the fixed one, or those that `least` admits."""
        if name in self.fixed:
            return (self.fixed[name],)
        return [value for value in values if self._admits(name, value)]

    def _admits(self, name: str, value: Any) -> bool:
        return value >= self.least.get(name, value) and value == self.fixed.get(name, value)


# --- stages of pipelines

_CHUNKED = ("interleaved", "breadth-first")
"""Schedules with as many stages of a rank as are asked for."""
_FOLDED = ("zbv", "v-min", "v-half", "dualpipev")
"""Schedules with two stages of a rank, whose first has the last one as well."""
_EVEN = ("", "even")
_TWICE = ("dualpipe", "dualpipe-half")
"""Schedules of two pipelines in opposite directions."""


def count_stages(schedule: str, chunks: int) -> int:
    """Stages of a pipeline rank.

    Args:
        chunks: as configured; 0: the schedule's default.
    """
    return chunks or (2 if schedule in (*_CHUNKED, *_FOLDED) else 1)


@functools.lru_cache(maxsize=64)
def head_layers(model: GPTConfig, seq: int) -> float:
    """The FLOPs of a model's head (logits, and what predicts further tokens), in layers."""
    alike = replace(
        model, dense_layers=0, window=0, global_every=0, nope_every=0, local_rope_theta=0.0
    )
    one, two = (flops_per_token(replace(alike, num_layers=n), seq) for n in (1, 2))
    head = one - (two - one)
    return head * model.num_layers / (flops_per_token(model, seq) - head)


def find_layout(layout: str, num_layers: int, num_stages: int) -> Layout:
    """The stages of a layout that needs no costs of layers, as configured; empty: even.

    Raises:
        ValueError: layers or stages are others.
    """
    return parse_layout(layout or "even", num_layers, num_stages)


def sum_busiest(layout: Layout, schedule: str, pp: int, head: float) -> float:
    """The FLOPs of the rank that has most of them, in layers.

    Args:
        head: of the last stage, in layers.
    """
    each = [len(part.layers) + head * part.loss for part in layout]
    ranks = [0.0] * pp
    for stage, count in enumerate(each):
        folded = schedule in _FOLDED and stage >= pp
        ranks[2 * pp - 1 - stage if folded else stage % pp] += count
    if schedule in _TWICE:  # half of the microbatches each
        ranks = [(a + b) / 2 for a, b in zip(ranks, reversed(ranks), strict=True)]
    return max(ranks)


@functools.lru_cache(maxsize=4096)
def lighten_ends(num_layers: int, head: float, schedule: str, pp: int, chunks: int) -> str:
    """The layout of fewer layers in the last stage whose busiest rank has the least to compute.

    Empty if it has no less than that of the even layout. Where there are one or two stages more
    than layers, the ends are those that have none: as of Llama-3 405B, whose 126 layers are on 128
    stages (Grattafiori et al. 2024, section 3.3.2).

    Args:
        head: the FLOPs of the last stage beside its layers, in layers.
        schedule, pp, chunks: as configured.
    """
    stages = pp * count_stages(schedule, chunks)
    if stages > num_layers:
        return {1: "last=0", 2: "first=0,last=0"}.get(stages - num_layers, "")
    even = even_layout(stages, num_layers)
    best, least = "", sum_busiest(even, schedule, pp, head) * (1 - _LEAST_GAIN)
    for last in reversed(range(len(even[-1].layers))):
        layout = even_layout(stages, num_layers, last=last)
        if (busiest := sum_busiest(layout, schedule, pp, head)) < least:
            best, least = f"last={last}", busiest
    return best


_LEAST_GAIN = 0.01
"""The part of the busiest rank's work that another layout has to save."""

REPLICA_AXES = ("dp", "ep_node", "ep", "cp")
"""The axes over which ranks have the same parameters, of experts but for those that divide them."""
_DIVIDING = ("tp", "fsdp", "ep", "ep_node")
"""Axes that split parameters."""
_LEAST_TOKENS = 4096
"""Tokens per rank of cp, below which attention is too short to hide communication."""
_FSDP = (8, 32, 128)
"""Sizes of fsdp that are tried beside 1, a domain and all data ranks."""
_MOST_CHUNKS = 8
