"""Runs and machines that they could be on: the fastest ways, and what a run is expected to take.

`Choices` is what `functron.plan.search` asks about candidates: each is a `TrainConfig`, whose
layers are traced once per kind. `expected` is the step of one configuration on a machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron.core import random, tree
from functron.core.chart import table
from functron.core.errors import nearest, refuse
from functron.models import gpt
from functron.models.config import GPTConfig
from functron.optim import torch_dtype
from functron.pipeline.registry import make
from functron.plan.estimate import Estimate, StateBytes, Step, estimate, step_estimate, step_memory
from functron.plan.hardware import Hardware, Placement, hardware, hardware_of
from functron.plan.pieces import Pieces, pieces
from functron.plan.rates import FUNCTRON, Software
from functron.plan.search import Candidate, Space
from functron.program.cost import bytes_text
from functron.spmd import DATA_AXES, Mesh
from functron.spmd.params import num_params, param_specs
from functron.spmd.spec import local_shape
from functron.training.config import ParallelismConfig, TrainConfig, configure, load, with_precision
from functron.training.hardware import free_memory_bytes, measured_bandwidth, measured_flops
from functron.training.records import Record
from functron.training.setup import RunSetup, make_setup

_RESERVED = 0.04
"""Of a GPU's memory, which the allocator loses between its blocks."""

_FAR = 1.2
"""How many times too many activations of a guess are not looked at before all others."""
_LATE = 1e9

_SPLIT = ("zb-h1", "zb-h2", "zbv", "v-min", "v-half", "dualpipe", "dualpipev")
"""Schedules that have the two parts of backward apart."""
_STAGES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("zbv", "v-min", "v-half", "dualpipev"), 2)
)
"""Stages per rank, where a schedule is made for several."""
_ALL_COUNTS = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "zbv", "v-min", "v-half")
"""Schedules that admit every number of microbatches."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The ways to run a model on a machine, as `functron.plan.search` asks about them.

    Attributes:
        config: the run: model, samples, optimizer. What candidates say replaces its own.
        machine: what it is run on.
        known: what was traced, by what it depends on.
    """

    config: TrainConfig
    machine: Hardware
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.config.family.name != "gpt":
            title, got = "cannot plan this model", self.config.family.title
            fix = "give its mesh to functron train --dry-run --hardware NAME, which costs it"
            refuse(title, "model", got, "a GPT, whose layers can be traced one by one", fix)
        if self.config.lora.adapters is not None:
            title, wanted = "cannot plan adapters", "0: a plan is for training all parameters"
            refuse(title, "lora_rank", str(self.config.lora.rank), wanted, "leave it out")

    def space(self, gpus: int, **given: Any) -> Space:
        """The candidates of this model on so many GPUs; `given` are further fields."""
        model = self.config.gpt
        experts = model.moe.num_experts if model.moe is not None else 1
        common = (
            gpus,
            self.config.data.global_batch,
            self.config.data.seq,
            model.num_layers,
            experts,
        )
        usual = "bf16" if self.machine.name != hardware("cpu").name else "float32"
        policy = self.config.precision.name
        own = {"precisions": (usual if policy == "auto" else policy,)}
        return Space(*common, domain=self.machine.domain.gpus, **{**own, **given})

    def configured(self, candidate: Candidate) -> TrainConfig:
        """The run of a candidate, which `functron train` takes as it is."""
        base = self._precise(candidate.precision)
        pipelined = candidate.pp > 1
        return configure(
            base,
            mesh=str(candidate.mesh),
            microbatches=candidate.microbatches,
            schedule=candidate.schedule if pipelined else ParallelismConfig.schedule,
            chunks=candidate.chunks if pipelined else 0,
            remat=candidate.remat,
            sequence_parallel=candidate.sequence_parallel,
            zero=candidate.zero,
            gather=candidate.gather,
            optimizer=replace(base.optimizer, offload=candidate.offload),
            compile=True,  # as estimates have it
        )

    def _precise(self, precision: str) -> TrainConfig:
        return self._once(("precision", precision), lambda: with_precision(self.config, precision))

    def _once(self, key: Any, made: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = made()
        return self.known[key]

    # --- as of ``Model`` of functron/plan/search.py

    @property
    def capacity_bytes(self) -> int:
        """The memory that a rank has: of the machine's what nothing else takes."""
        return round(self.machine.memory_bytes * (1 - _RESERVED))

    def problems(self, candidate: Candidate) -> Sequence[str]:
        """Why a candidate cannot be run; empty if it can."""
        found = list(
            self._once(("rules", self._split_key(candidate)), lambda: self._rules(candidate))
        )
        model, c = self.config.gpt, candidate
        parts = c.cp * (2 if c.cp > 1 and self.config.parallelism.zigzag else 1)
        parts *= c.tp if c.sequence_parallel else 1
        if self.config.data.seq % parts:
            found.append(f"seq={self.config.data.seq} is no multiple of {parts}")
        if c.sequence_parallel and c.tp == 1:
            found.append("sequence_parallel without tp")
        if c.zero in (1, 2) and c.dp * c.ep * c.cp == 1:
            found.append(f"zero={c.zero} without ranks that hold the same")
        if c.zero == 3 and c.dp * c.fsdp == 1:
            found.append("zero=3 on one data rank")
        if c.gather != "use" and c.fsdp == 1 and c.zero != 3:
            found.append(f"gather={c.gather} without fsdp")
        if c.pp == 1:
            return found
        stages = c.pp * self._chunks(c)
        if stages > model.num_layers:
            found.append(f"{model.num_layers} layers for {stages} stages")
        if c.schedule == "interleaved" and c.microbatches % c.pp:
            found.append(f"interleaved wants a multiple of pp={c.pp} microbatches")
        elif c.schedule not in (*_ALL_COUNTS, "interleaved"):
            found += self._once(
                ("schedule", c.schedule, c.pp, c.microbatches, c.chunks), lambda: _refused(c)
            )
        return found

    def _split_key(self, c: Candidate) -> tuple:
        return c.tp, c.cp, c.ep, c.fsdp, c.dp if c.zero == 3 else 1, c.zero == 3

    def _rules(self, candidate: Candidate) -> list[str]:
        """Why the model cannot be split like this."""
        try:
            _ = self._plan(candidate).rules
        except ValueError as error:
            return [line.strip(" -") for line in str(error).splitlines()[1:]] or [str(error)]
        return []

    def _plan(self, c: Candidate) -> RunSetup:
        return RunSetup(self.configured(c), c.mesh, self._defs(c.precision))

    def _defs(self, precision: str) -> dict:
        config = self._precise(precision)
        return self._once(("defs", precision), lambda: config.family.defs(config.architecture))

    def _chunks(self, c: Candidate) -> int:
        return c.chunks or _STAGES.get(c.schedule, 2 if c.schedule in _CHUNKED else 1)

    def state_bytes(self, candidate: Candidate) -> float:
        """The least that a rank holds between steps: its share of the layers alone.

        The optimizer's part is divided among all ranks that could; gradients are counted whole,
        unless ZeRO-2 or fsdp divide them.
        """
        c = candidate
        layers, others = self._once(
            ("local", c.precision, self._split_key(c)), lambda: self._local(c)
        )
        count = layers / c.pp + (others if c.pp == 1 else 0)
        state = self._state(c)
        parts = c.dp * c.ep * c.cp if c.zero in (1, 2) else 1
        grads = state.grad / (parts if c.zero == 2 else 1)
        own = self._precise(c.precision).gpt.torch_dtype.itemsize
        optimizer = 0 if c.offload else state.optimizer
        return count * (own + grads + optimizer / parts)

    def _local(self, c: Candidate) -> tuple[int, int]:
        """Parameters of one rank: of all layers, and of the rest."""
        made = self._plan(c)
        specs, stacks = param_specs(made.whole_defs, made.rules), self.config.gpt.stacks
        found = [0, 0]
        for name, entry in made.whole_defs.items():
            rows = zip(tree.leaves(entry), tree.leaves(specs[name]), strict=True)
            shapes = (local_shape(d.shape, spec, made.plain_mesh) for d, spec in rows)
            found[name not in stacks] += sum(math.prod(shape) for shape in shapes)
        return found[0], found[1]

    def _state(self, c: Candidate) -> StateBytes:
        """Bytes per parameter of gradients and the optimizer's state."""
        return self._once(("state", c.precision), lambda: state_bytes(self._precise(c.precision)))

    def least_seconds(self, candidate: Candidate) -> float:
        """Model FLOPs, and what remat repeats, at the rate of the best products, and the bubble."""
        c, config = candidate, self.config
        flops = self._once("flops", lambda: gpt.flops_per_token(config.gpt, config.data.seq))
        rates = self._once(("rate", c.precision), lambda: self._rate(c.precision))
        again = 4 / 3 if c.remat == "full" else 1.0
        ranks = c.mesh.size
        seconds = flops * again * config.data.global_batch * config.data.seq / (ranks * rates)
        waits = c.schedule not in _SPLIT
        return seconds * (1 + waits * (c.pp - 1) / (self._chunks(c) * c.microbatches))

    def _rate(self, precision: str) -> float:
        """FLOP/s that no step is above."""
        config, peaks = self._precise(precision), self.machine.peak_flops
        peak = self.machine.peak(config.gpt.torch_dtype)
        if config.precision.recipe is not None:
            peak = max(peak, *(rate for name, rate in peaks.items() if name.startswith("float")))
        return peak * max(self.machine.matmul.efficiency, *self.machine.attention.values())

    def guess(self, candidate: Candidate) -> float:
        """`least_seconds`, and half of what layers send over tp, ep and fsdp, which may be hidden.

        Of what is far too large for a rank, by activations that are guessed from those of another
        split of the same layer, it is more than any of the others.
        """
        c, model = candidate, self.config.gpt
        placement = self._once(("placement", c.mesh), lambda: Placement.on(c.mesh, self.machine))
        tokens = c.rows * self.config.data.seq // c.cp
        stream = tokens * model.embed_dim * model.torch_dtype.itemsize
        sent = 0.0
        if c.tp > 1:  # twice there and back, in forward and in backward
            sent += 8 * self.machine.collective_seconds("all_gather", stream, placement.reach("tp"))
        if c.ep > 1 and model.moe is not None:
            share = stream * model.moe.top_k / (c.tp if c.sequence_parallel else 1)
            sent += 4 * self.machine.collective_seconds("all_to_all", share, placement.reach("ep"))
        if c.fsdp > 1 and c.gather != "step":
            layer = 2 * self._once("num_params", lambda: num_params(self._defs(c.precision)))
            layer /= model.num_layers * c.tp * c.ep
            reach = placement.reach("fsdp")
            sent += 3 * self.machine.collective_seconds("all_gather", layer, reach)
        layers = model.num_layers / c.pp * c.microbatches
        seconds = self.least_seconds(c) + sent * layers / 2
        if c.schedule in _SPLIT:  # weights' gradients fill a part of 1f1b's bubble
            filled = min(2 / 3, 2 / 3 * c.microbatches / c.pp)
            seconds *= 1 + (1 - filled) * (c.pp - 1) / c.microbatches
        return seconds if self._activations(c) < _FAR * self._left(c) else _LATE + seconds

    def _left(self, c: Candidate) -> float:
        """The bytes that a candidate's state leaves."""
        return self.capacity_bytes - self.state_bytes(c)

    def _activations(self, c: Candidate) -> float:
        """Bytes of a rank's activations, in proportion to those of another split of a layer."""
        key = c.remat, c.precision, c.ep
        found = self._once(("like", *key), lambda: c)
        like = replace(found, schedule="1f1b", chunks=0, gather="step", rows=1)
        pieces = self._pieces(like)
        held = sum(piece.held_bytes[0] * len(same) for piece, same in pieces.layers.values())
        split = like.tp * like.cp / (c.tp * c.cp)
        live = min(c.microbatches, c.pp) / c.pp
        return held * split * c.rows * live

    def traced(self, candidate: Candidate) -> bool:
        """Whether the layers of a candidate have been traced."""
        return ("pieces", self._key(candidate)) in self.known

    def memory(self, candidate: Candidate) -> Mapping[str, int]:
        """Bytes of the fullest rank of a candidate, by category."""
        return step_memory(self._step(candidate))

    def estimate(self, candidate: Candidate, *, exact: bool = False) -> Estimate:
        """The step of a candidate: its pipeline simulated and drawn, or by formulas."""
        return step_estimate(self._step(candidate), self.machine, exact=exact)

    def _step(self, c: Candidate) -> Step:
        pieces = self._pieces(c)
        return Step(
            pieces, c.mesh, c.microbatches, c.schedule, self._chunks(c), None, c.zero,
            self._state(c), c.offload,
        )  # fmt: skip

    def _key(self, c: Candidate) -> tuple:
        """The settings that the pieces of a candidate depend on."""
        gathered = c.gather != "step" and (c.fsdp > 1 or c.zero == 3)
        fsdp = (c.gather, c.fsdp, c.dp if c.zero == 3 else 1) if gathered else ("step",)
        split = c.pp > 1 and c.schedule in _SPLIT
        return c.tp, c.cp, c.ep, *fsdp, c.rows, c.remat, c.sequence_parallel, c.precision, split

    def _pieces(self, c: Candidate) -> Pieces:
        return self._once(("pieces", self._key(c)), lambda: pieces_of(self._plan(c), c.rows))


_CHUNKED = ("interleaved", "breadth-first")


def _refused(c: Candidate) -> list[str]:
    """Why a schedule does not admit these counts."""
    try:
        made = make(c.schedule, c.pp, c.microbatches, c.chunks or None)
    except ValueError as error:
        return [line.strip(" -") for line in str(error).splitlines()[1:]] or [str(error)]
    return [] if made.has_backward else [f"{c.schedule} has no backward"]


def pieces_of(made: RunSetup, rows: int) -> Pieces:
    """The traced layers, embedding and head of a plan's model, for so many samples of a rank.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    config = made.config
    over = ("dp", "fsdp") if config.parallelism.zero == 3 else ("fsdp",)
    divided = config.parallelism.gather != "step" and any(made.mesh[axis] > 1 for axis in over)
    # what the other data-parallel ranks do with gradients is no part of a layer
    left_out = {"pp", "dp", "fsdp"} - {*(over if divided else ())}
    axes = {axis: n for axis, n in made.plain_mesh.axes if axis not in left_out}
    split = made.mesh["pp"] > 1 and config.parallelism.schedule in _SPLIT
    return pieces(
        config.gpt,
        Mesh(**axes),
        replace(made.options, gather=gpt.WHOLE),
        rows=rows,
        seq=config.data.seq,
        gather=config.parallelism.gather if divided else "step",
        fsdp=over,
        experts=config.parallelism.experts,
        split=split,
        grad_dtype=torch_dtype(config.optimizer.grad_dtype),
    )


def state_bytes(config: TrainConfig) -> StateBytes:
    """Bytes per parameter of the sum of its gradients, and of the optimizer's state.

    The optimizer's are counted in the state that it makes for a model of one or two layers, on
    abstract tensors.
    """
    model, own = config.gpt, config.gpt.torch_dtype.itemsize
    dense = min(1, model.dense_layers)
    small = replace(model, num_layers=1 + dense, dense_layers=dense)
    one = configure(config, gpt=small, mesh="", zero=0, gather="use", schedule="1f1b", chunks=0)
    made = make_setup(one, Mesh())
    held = tree.nbytes(made.init(random.key(0).to("meta")).opt_state)
    grad, reduce = (
        own if dtype is None else dtype.itemsize
        for dtype in map(torch_dtype, (config.optimizer.grad_dtype, config.optimizer.reduce_dtype))
    )
    return StateBytes(grad, round(held / num_params(made.defs)), reduce)


# --- one run


def expected(made: RunSetup, machine: Hardware) -> Estimate:
    """The step of a run on a machine, with a process for each rank of its mesh.

    Of a GPT the layers are traced; of another architecture, and with adapters, the whole step,
    which takes longer and cannot have a pipeline.

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    config, mesh = made.config, made.plain_mesh
    if config.family.name != "gpt" or config.lora.adapters is not None:
        if made.is_pipelined:
            title, got = "cannot tell what this step takes", f"{config.title} with pp"
            refuse(title, "mesh", got, "a GPT without adapters, or no pp", "leave --hardware out")
        program = made.without_pipeline.program()
        tokens = config.data.global_batch * config.data.seq
        software = _software(config)
        return estimate(
            program, machine, Placement.on(mesh, machine), software=software, tokens=tokens
        )
    rows = (
        config.data.global_batch
        // config.parallelism.microbatches
        // math.prod(mesh[a] for a in DATA_AXES)
    )
    step = Step(
        pieces_of(made, rows),
        mesh,
        config.parallelism.microbatches,
        config.parallelism.schedule,
        made.schedule.num_chunks if made.is_pipelined else 1,
        made.partition.layout if made.is_pipelined else None,
        config.parallelism.zero,
        state_bytes(config),
        config.optimizer.offload,
    )
    return step_estimate(step, machine, software=_software(config))


def _software(config: TrainConfig) -> Software:
    """How a run's programs are run: fused and overlapping where they are compiled."""
    if config.compute.compile:
        return FUNCTRON
    return replace(
        FUNCTRON, name="functron without --compile", fusion="none", sums_in_products=False,
        overlap=False, overlap_grads=False, overlap_params=False,
    )  # fmt: skip


def this_machine(device: torch.device | str) -> Hardware:
    """The machine that this process is on: a GPU that is known by its name, or the CPU, measured.

    On a CPU the rate of products and of memory is measured, in tenths of a second.

    Raises:
        ValueError: no machine is known for this GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        base = hardware("cpu")
        names = [name for name in base.peak_flops if name in ("float32", "bfloat16")]
        found = {n: measured_flops(device, getattr(torch, n)) for n in names}
        peaks = {name: rate / base.matmul.efficiency for name, rate in found.items()}
        memory = replace(
            base.memory,
            bytes_per_second=measured_bandwidth(device) / base.memory.efficiency,
            num_bytes=free_memory_bytes(device),
        )
        return replace(base, peak_flops={**base.peak_flops, **peaks}, memory=memory)
    return hardware_of(torch.cuda.get_device_name(device))


def expectation_text(estimate: Estimate) -> str:
    """The expected seconds and memory of a step, in a line."""
    low, high = estimate.interval
    return (
        f"{estimate.step_seconds:.3g} s a step ({low:.3g} to {high:.3g}), "
        f"{estimate.tokens_per_second:,.0f} tokens/s, MFU {estimate.mfu:.1%}, "
        f"{bytes_text(estimate.memory_bytes)} of the fullest rank"
    )


COMPARED_STEPS = 20
"""After so many steps a run says what was expected of it, and what it takes."""
_WARM_UP = 4


@contextmanager
def compared(estimate: Estimate, say: Callable[[str], None]) -> Iterator[Callable[[Record], None]]:
    """A reporter that says, after `COMPARED_STEPS` steps, expected against measured.

    The median of the steps after the first four is compared, and what ranks measured of their
    sections (see `functron.training.stragglers`), where they did.

    Args:
        estimate: of the run's step.
        say: prints a text.
    """
    records: list[Record] = []

    def write(record: Record) -> None:
        if len(records) < COMPARED_STEPS:
            records.append(record)
            if len(records) == COMPARED_STEPS:
                say(comparison(estimate, records))

    yield write


def comparison(estimate: Estimate, records: Sequence[Record]) -> str:
    """Expected against measured, and where they part, as text."""
    later = records[_WARM_UP:] or records
    measured = statistics.median(record["step_seconds"] for record in later)
    low, high = estimate.interval
    ratio = measured / estimate.step_seconds - 1
    verdict = "as expected" if low <= measured <= high else f"{ratio:+.0%}"
    lines = [
        f"expected {estimate.step_seconds:.3g} s a step ({low:.3g} to {high:.3g}), measured "
        f"{measured:.3g}, the median of steps {later[0]['step']} to {later[-1]['step']}: {verdict}"
    ]
    for name, foreseen, found in _sections(estimate, later):
        lines.append(f"  {name:20} expected {foreseen:8.3g} s, measured {found:8.3g} s")
    peak = max(record.get("peak_memory_bytes") or 0 for record in later)
    if peak:
        held = bytes_text(estimate.memory_bytes)
        lines.append(f"  {'memory at its peak':20} expected {held}, measured {bytes_text(peak)}")
    return "\n".join(lines)


def _sections(estimate: Estimate, records: Sequence[Record]) -> Iterator[tuple[str, float, float]]:
    """Name, expected and measured seconds of what ranks measured, where they part most first."""
    rows = [rank for record in records for rank in record.get("ranks", {}).values()]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    measured = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    waits = {f"wait/{axis}": seconds for axis, seconds in estimate.exposed.items()}
    idle = estimate.bubble_fraction * estimate.step_seconds
    own = max(estimate.step_seconds - sum(waits.values()) - idle, 0.0)
    foreseen = {"compute": own, **waits}
    found = [(name, foreseen.get(name, 0.0), seconds) for name, seconds in measured.items()]
    found.sort(key=lambda row: -abs(row[2] - row[1]))
    yield from (row for row in found if max(row[1:]) > 0.005 * estimate.step_seconds)


# --- recipes

_FOLDER = Path(__file__).parent / "recipes"
RECIPES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of the recipes."""


def recipe(name: str) -> str:
    """The file of a recipe, a configuration that `functron.training.config.load` reads.

    Raises:
        ValueError: there is no such recipe; the nearest is suggested.
    """
    if name not in RECIPES:
        wanted = "a recipe: functron recipe ls lists them"
        refuse("no such recipe", "name", repr(name), wanted, nearest(name, RECIPES))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def recipe_config(name: str) -> TrainConfig:
    """The run of a recipe.

    Raises:
        ValueError: as `recipe`.
    """
    recipe(name)
    return load(_FOLDER / f"{name}.toml")


def recipe_table() -> str:
    """The recipes with their meshes, and what the planner expects of them, as text."""
    rows = [["recipe", "GPUs", "mesh", "samples x tokens", "expected"]]
    for name in RECIPES:
        config = recipe_config(name)
        size = Mesh.parse(config.parallelism.mesh).size
        batch = f"{config.data.global_batch} x {config.data.seq}"
        rows.append([name, str(size), config.parallelism.mesh, batch, _comments(name)[1]])
    return table(rows, left=5)


def _comments(name: str) -> list[str]:
    """The lines above a recipe: the command that made it, and what it expects."""
    lines = recipe(name).splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


_GPUS_PER_NODE = 8


def job_script(name: str) -> str:
    """The Slurm script of a recipe: so many machines of eight GPUs, requeued until all is done.

    Raises:
        ValueError: as `recipe`.
    """
    size = Mesh.parse(recipe_config(name).parallelism.mesh).size
    ranks = min(size, _GPUS_PER_NODE)
    text = (_FOLDER / "job.sbatch").read_text(encoding="utf-8")
    fields = {"NAME": name, "NODES": str(size // ranks), "RANKS": str(ranks)}
    for field_name, value in fields.items():
        text = text.replace(f"@{field_name}@", value)
    return text


def shrunk(config: TrainConfig, *, steps: int = 3) -> TrainConfig:
    """The same way to run, small enough to be simulated: a model of a few thousand parameters.

    Axes of the mesh that have several ranks have 2, ranks of a pipeline as many stages as before,
    but at most 2, and layers keep their kinds: grouped heads, latent attention, experts, dense
    layers before these. Tokens are random, everything is in float32, and nothing is compiled.

    Args:
        config: the run of a GPT.
        steps: that it takes.
    """
    sizes = {axis: min(size, 2) for axis, size in Mesh.parse(config.parallelism.mesh).axes}
    few = configure(config, gpt=_few_parameters(config, sizes.get("pp", 1)))
    microbatches = min(config.parallelism.microbatches, 4)
    data_ranks = math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
    return configure(
        with_precision(few, "float32"),
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()),
        chunks=min(config.parallelism.chunks, 2),
        seq=32,
        microbatches=microbatches,
        global_batch=data_ranks * microbatches,
        steps=steps,
        learning_rate=replace(config.learning_rate, name="constant", warmup_steps=0),
        format="mock",
        data="",
        prefetch=0,
        compile=False,
        layout="",
    )


def _few_parameters(config: TrainConfig, pp: int) -> GPTConfig:
    """The architecture of the same kinds of layers, with four heads of eight dims."""
    model, moe = config.gpt, config.gpt.moe
    stages = pp * (min(config.parallelism.chunks, 2) or _STAGES.get(config.parallelism.schedule, 1))
    dense = min(model.dense_layers, 1)
    latent = {"kv_rank": 8, "rope_head_dim": 8, "v_head_dim": 8, "q_rank": 16 * bool(model.q_rank)}
    if moe is not None:
        groups = min(moe.num_groups, 2)
        moe = replace(
            moe, num_experts=4, top_k=2, expert_dim=16, shared_dim=16 * bool(moe.shared_dim),
            num_groups=groups, top_groups=min(moe.top_groups, groups),
        )  # fmt: skip
    return replace(
        model,
        num_layers=max(stages, 1 + dense),
        dense_layers=dense,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2 if model.kv_heads < model.num_heads else 0,
        head_dim=8,
        mlp_dim=48,
        vocab_size=120,
        vocab_multiple=16,
        max_seq=64,
        window=min(model.window, 16),
        rope_scaling=None,
        moe=moe,
        **(latent if model.kv_rank else {}),
    )
