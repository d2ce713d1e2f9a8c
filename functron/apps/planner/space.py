"""Candidates of a search for plans: configurations of one run, with all that is chosen for it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem, nearest, raise_problems
from functron.core.settings import value_at
from functron.spmd import DATA_AXES, Mesh
from functron.training.config import TrainConfig, configure, with_precision

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
    rows: Sequence[int] = (1, 2, 4, 8)
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


REPLICA_AXES = ("dp", "ep_node", "ep", "cp")
"""The axes over which ranks have the same parameters, of experts but for those that divide them."""
_DIVIDING = ("tp", "fsdp", "ep", "ep_node")
"""Axes that split parameters."""
_LEAST_TOKENS = 4096
"""Tokens per rank of cp, below which attention is too short to hide communication."""
_FSDP = (8, 32, 128)
"""Sizes of fsdp that are tried beside 1 and all data ranks."""
_MOST_CHUNKS = 8
