"""A training run, ready for its next step: its set-up, data, programs and state; and its processes.

`functron.training.train` takes its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from functron import checkpoint
from functron.checkpoint.memory import Memory
from functron.checkpoint.saver import Moments, nowhere
from functron.compiler.jit import jit
from functron.core import random, tree
from functron.core.errors import raise_problems, refuse
from functron.data import Blend, Samples
from functron.data.sampling import Gaps, RampUp, drawn, mix
from functron.ops.launch import arch_of, usable
from functron.ops.nvrtc import compile_in_background
from functron.precision.recipe import check_gpu
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.spmd.flight import EVERYWHERE
from functron.training import data, run_folder
from functron.training.config import TrainConfig, configure
from functron.training.costs import check_expert_memory, check_room
from functron.training.dealing import CHECKSUM, HOST_LEAVES, map_steps
from functron.training.evaluation import (
    HeldOut,
    evaluate,
    loss_program,
    measure_programs,
    open_sets,
)
from functron.training.loop import At, LoopHook, Request, close_with, end_process
from functron.training.records import Reporter
from functron.training.resume import restore_state
from functron.training.rooms import LearnedRoom, with_rooms
from functron.training.setup import RunSetup, make_setup, offload_problems
from functron.training.step import State, Watch
from functron.training.tasks import Scores, make_language_model, score_tasks


@dataclass(frozen=True)
class Run:
    """A training run, ready for its next step; made by `prepare`.

    Attributes:
        setup: everything that follows from its configuration and mesh.
        text: where batches come from.
        state: before the first step, which consumes it: global values, or this rank's shards.
        step: ``(state, batch) -> (state, metrics)``, compiled where the set-up says so; of batches
            with targets, see `taking`.
        watch: the step that also measures layers, where it is asked for.
        device: where it runs.
        start: steps taken already.
        held_out: sets that are evaluated, none without `eval_every`.
        held_out_loss: of `functron.training.evaluation.loss_program`; None without sets.
        notes: messages on parts of its checkpoint that were converted, or begin anew.
        begun_from: the checkpoint that it began with, or went on from; None: random parameters.
        around: wraps every program of a step, such as with faults on purpose.
        at: ``at(moment, step)`` is called as this process comes to a moment of the run: "step"
            before the batch of a step, "evaluate" and "save" after so many steps, and what
            `checkpoint.Saver` calls it with.
        memory: the folder of main memory for ``memory_save_every``; None: nothing is kept there.
        from_memory: whether the state comes from there.
        rules: a description of the rules by which its text became tokens.
    """

    setup: RunSetup
    text: Samples
    state: State
    step: Callable
    watch: Watch | None
    device: torch.device
    start: int = 0
    held_out: Sequence[HeldOut] = ()
    held_out_loss: Callable | None = None
    notes: Sequence[str] = ()
    begun_from: Path | None = None
    around: Callable[[Callable], Callable] | None = None
    at: Moments = nowhere
    memory: Path | None = None
    from_memory: bool = False
    rules: str = ""

    @property
    def config(self) -> TrainConfig:
        """The configuration that it was made of."""
        return self.setup.config

    @property
    def mesh(self) -> Mesh | BoundMesh:
        """Its ranks: simulated, or bound to processes."""
        return self.setup.mesh

    @cached_property
    def batches(self) -> RampUp:
        """How many samples each step has, and which one is its first."""
        return self.config.data.batches

    @cached_property
    def gaps(self) -> Gaps:
        """The samples that it leaves out."""
        return self.config.gaps

    def is_first_of_kind(self, step: int) -> bool:
        """Whether a step, from 0, is one of a new kind, which takes longer: it may compile."""
        size = self.batches.batch_size
        grown = step > self.start and size(step) != size(step - 1)
        # stages on processes, which compile as they run, may see a ring for the first time
        dealt = self.setup.dealer is not None and self.setup.rank is not None
        if step == self.start or grown or (dealt and self.setup.is_compiled):
            return True
        return self.watch is not None and self.watch.due(step)

    def samples_of(self, step: int) -> dict[str, Any]:
        """The samples of `step`, for events: ``samples``, ``[first, end]``, and their ``sources``.

        These are the path of the data; of a blend, by source, the numbers of samples in it.
        """
        first, end = (self.batches.first_sample(step + more) for more in (0, 1))
        numbers = self.gaps.number(np.arange(first, end, dtype=np.int64))
        found: dict[str, Any] = {"samples": [int(numbers[0]), int(numbers[-1]) + 1]}
        if not isinstance(self.text, Blend):
            return {**found, "sources": [self.config.data.path]}
        which, own = self.text.mixture.at(numbers)
        sources: dict[str, list[int]] = {}
        for source, number in zip(which.tolist(), own.tolist(), strict=True):
            sources.setdefault(self.text.names[source], []).append(number)
        return {**found, "sources": sources}

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of the batch of `step`, on the device of the state."""
        return self.on_device(self.host_batch(step))

    def host_batch(self, step: int) -> dict[str, torch.Tensor]:
        """This process's part of the batch of `step`, in host memory: pinned for a GPU."""
        first, size = self.batches.first_sample(step), self.batches.batch_size(step)

        def draw(part: tuple[int, int]) -> dict[str, torch.Tensor]:
            return drawn(self.text, first, size, part, self.gaps)

        # sizes of activations are those of the samples, without the padding of a deal
        watched = self.watch is not None and self.watch.due(step)
        if (dealer := self.setup.dealer) is None or watched:
            batch = own_part(self.mesh, draw)
        else:  # which ranks have a document follows from the lengths of all
            together = draw((0, 1))
            whole = dealer.deal(step, together, batch_hash(together))
            batch = own_part(self.mesh, lambda part: _rows_of(whole, part))
        if self.device.type != "cuda":
            return batch
        return {name: value.pin_memory() for name, value in batch.items()}

    def on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch on the device of the state, but for what the host reads."""
        return {
            name: value if name in HOST_LEAVES else value.to(self.device, non_blocking=True)
            for name, value in batch.items()
        }

    def num_targets(self, host: dict[str, torch.Tensor]) -> int:
        """How many targets a batch in host memory has, or this process's part of one."""
        return int(self.config.family.num_targets(host))

    def taking(self, step: Callable, num_targets: int, *, watched: bool = False) -> Callable:
        """`step`, or the step of `watch`, for a batch with so many targets on all ranks.

        That of a batch without any changes neither parameters nor the optimizer's state; it is not
        compiled.
        """
        if num_targets:
            return step
        idle = self.setup.idle_watch if watched else self.setup.idle_step
        return idle if self.around is None else self.around(idle)

    def own_hash(self, host: dict[str, torch.Tensor]) -> int:
        """This process's share of the checksum of a batch, of which it has this part."""
        return own_hash(self.mesh, host)

    def with_config(self, config: TrainConfig) -> Run:
        """The run with another configuration, and so with other programs."""
        return self._with_setup(make_setup(config, self.mesh, self.device.type))

    def _with_setup(self, made: RunSetup, **changes: Any) -> Run:
        step, watch = programs(made, self.around)
        return dataclasses.replace(self, setup=made, step=step, watch=watch, **changes)

    def simulate(self, path: Path) -> Run:
        """The run on ranks that this process simulates, from a checkpoint of it; not compiled."""
        assert isinstance(self.mesh, BoundMesh)
        config = configure(self.config, compile=False, cuda_graph=False, nproc=0)
        made = dataclasses.replace(self.setup, config=config, mesh=self.mesh.mesh)
        return self._with_setup(made, state=begin_state(made, path, self.device)[0])

    def restore(self, out: Path | None, job: Job, most: int, *, forget: bool = False) -> State:
        """The newest state that is saved and has taken at most so many steps. Collective.

        Args:
            out: its folder; None, or without such a state: the one that the run began with.
            job: its processes.
            most: steps.
            forget: remove what was saved after that.
        """

        def find_newest() -> Path | None:
            folder = None if out is None else out / run_folder.CHECKPOINTS
            if folder is None or not folder.is_dir():
                return self.begun_from
            saved = checkpoint.steps(folder)
            newest = max((step for step in saved if step <= most), default=None)
            for step in saved if forget else ():
                if step > (newest or 0):
                    shutil.rmtree(folder / str(step))
            return self.begun_from if newest is None else folder / str(newest)

        return begin_state(self.setup, job.broadcast(find_newest), self.device)[0]

    def evaluate(self, state: State) -> dict[str, dict[str, float]]:
        """The loss, perplexity and number of targets of every held-out set, by its name.

        Collectives: those of `functron.training.evaluation.loss_program`, batch by batch; before,
        where averages are evaluated that ZeRO divides, one all-gather per leaf and axis.
        """

        def batch(held_out: HeldOut, index: int) -> dict[str, torch.Tensor]:
            host = own_part(self.mesh, lambda part: held_out.batch(index, part))
            return self.on_device(host)

        if self.held_out_loss is None:
            return {}
        params, measures = self._average(state), measure_programs(self.setup)
        return evaluate(self.held_out_loss, params, self.held_out, batch, measures)

    def _average(self, state: State) -> dict:
        """The parameters, or their averages where these are evaluated."""
        averaged = self.setup.averaged if self.config.evaluation.averaged else None
        return state.params if averaged is None else averaged(state)

    def score_tasks(self, state: State) -> Scores:
        """The numbers of the tasks of the configuration, by name; see `training.tasks`.

        Collectives: those of `functron.models.scoring`, and of `evaluate`'s averages.
        """
        config, tokenizer = self.config, data.reader_of(self.config)
        assert tokenizer is not None
        size, specs = config.tasks.batch, self.setup.whole_specs
        params = self._average(state)
        model = make_language_model(
            params, config.gpt, tokenizer, self.mesh, batch_size=size, specs=specs
        )
        return score_tasks(model, config.tasks)


def prepare(
    config: TrainConfig,
    mesh: Mesh | BoundMesh,
    device: torch.device | str = "cpu",
    begin_from: Path | None = None,
    *,
    recast: bool = False,
    around: Callable[[Callable], Callable] | None = None,
    at: Moments = nowhere,
    memory: Path | None = None,
) -> Run:
    """The run that `config` describes, ready for its next step.

    Args:
        config: what is to be run.
        mesh: simulated, or bound to processes.
        device: where it runs.
        begin_from: a checkpoint of this run, made on any mesh, or of parameters alone, with which
            it begins; None: begin with random ones.
        recast: whether that may be of another precision; see `functron.training.resume`.
        around: as of `Run.around`.
        at: called with "open" before its state is read, with "restored" after it, and later as
            `Run.at`.
        memory: as of `Run.memory`; a state there is taken in place of an older one in `begin_from`.

    Raises:
        ValueError: the data cannot be read, the model cannot run on the mesh, the GPU has none of
            the products, or the checkpoint is damaged or another model's.
    """
    tokenizer = data.reader_of(config)  # of its held-out sets, too
    text = data.open_samples(config, reader=lambda _: tokenizer)
    held_out = open_sets(config, reader=lambda _: tokenizer)
    where = torch.device(device)
    made = make_setup(config, mesh, where.type)
    if where.type == "cuda":
        _check_gpu(made, where)
    at("open", 0)
    with _compile_kernels(made, where):
        kept = _find_in_memory(made, memory, begin_from, where)
        if kept is None:
            state, notes = begin_state(made, begin_from, where, recast=recast)
        else:
            state, notes = kept, ()
    at("restored", int(state.step))
    step, watch = programs(made, around)
    program = loss_program(made) if held_out else None
    start = int(state.step)
    return Run(
        made, text, state, step, watch, where, start, held_out, program, notes, begin_from,
        around, at, memory, kept is not None, data.describe_rules(config, tokenizer),
    )  # fmt: skip


def _check_gpu(made: RunSetup, device: torch.device) -> None:
    """Refuse a run that this GPU, or GPUs, cannot take steps of."""
    config = made.config
    raise_problems("cannot compile the step", offload_problems(config, "cuda"))
    recipe, experts = config.precision.recipe, config.gpt.moe is not None
    if config.precision.float32_matmul == "high":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            got, wanted = f"high on compute capability {major}.{minor}", "8.0 or more, with TF32"
            refuse("this GPU has no TF32", "float32_matmul", got, wanted, "leave it out")
    check_expert_memory(made, torch.cuda.get_device_properties(device).total_memory)
    if recipe is not None and config.compute.kernels != "reference":
        capability = torch.cuda.get_device_capability(device)
        check_gpu(recipe, config.gpt.torch_dtype, capability, experts=experts)


def _compile_kernels(made: RunSetup, device: torch.device) -> AbstractContextManager[None]:
    """Compiles our kernels beside a with block, where steps will launch any; once a machine."""
    unused = made.config.compute.kernels == "reference"
    if device.type != "cuda" or unused or usable(device) is not None:
        return nullcontext()
    return compile_in_background(made.kernel_variants, arch_of(device))


def programs(
    made: RunSetup, around: Callable[[Callable], Callable] | None = None
) -> tuple[Callable, Watch | None]:
    """The step of a set-up, and that which measures layers; compiled where it says so."""
    watch, room = made.watch, made.room

    def complete(step: Callable) -> Callable:
        # stages on processes compile each alone, as steps do that may be taken again
        if made.is_compiled and made.rank is None and not room:
            step = jit(step, donate=0, **made.jit_settings)
        return step if around is None else around(step)

    if not room:
        measured = watch and dataclasses.replace(watch, step=map_steps(watch.step, complete))
        return map_steps(made.step, complete), measured
    rooms = LearnedRoom(room, functools.partial(check_room, made))

    def find_step(measures: bool, room: float) -> Callable:
        other = dataclasses.replace(made, learned_room=room)
        step = other.watch.step if measures and other.watch else other.step
        return map_steps(step, complete)

    keeps_all = not made.config.compute.cuda_graph
    step, measured = (
        with_rooms(functools.partial(find_step, x), rooms, keeps_all=keeps_all)
        for x in (False, True)
    )
    return step, watch and dataclasses.replace(watch, step=measured)


def begin_state(
    made: RunSetup, begin_from: Path | None, device: torch.device, *, recast: bool = False
) -> tuple[State, Sequence[str]]:
    """The state that a run begins with, or goes on with, and messages on what was converted.

    Args:
        made: the set-up of the run.
        begin_from: a checkpoint of it, or of parameters; None: random parameters.
        device: of the state.
        recast: as of `prepare`.
    """
    key = random.key(made.config.seed)
    if begin_from is None:
        return made.init(key.to(device)), ()
    return restore_state(begin_from, made, key, device, recast=recast)


@contextmanager
def deterministic() -> Iterator[None]:
    """Torch's operations give the same bits in every run inside this with block, or raise.

    It is a setting of the process. Products of cuBLAS need CUBLAS_WORKSPACE_CONFIG in its
    environment as well, or raise; `functron train` puts it there.
    """
    filled: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        filled.fill_uninitialized_memory,
    )
    try:
        torch.use_deterministic_algorithms(True)
        filled.fill_uninitialized_memory = False  # nobody reads it, and it would be written twice
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filled.fill_uninitialized_memory = before[2]


@contextmanager
def torch_settings(config: TrainConfig) -> Iterator[None]:
    """Torch computes as `config` says inside this with block; these are settings of the process."""
    before = torch.get_float32_matmul_precision()
    with deterministic() if config.compute.deterministic else nullcontext():
        try:
            torch.set_float32_matmul_precision(config.precision.float32_matmul)
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def count_samples(run: Run, steps: int) -> dict[str, Any]:
    """The number of ``samples`` in the first `steps` steps; by ``sources`` of a blend as well.

    A source has its number of ``samples``, and the ``epochs`` of it. Nothing is read.
    """
    samples = run.batches.first_sample(steps)
    found: dict[str, Any] = {"samples": samples}
    if isinstance(run.text, Blend):
        found["sources"] = run.text.progress(run.gaps.number(samples))
    return found


@dataclass(frozen=True)
class Job:
    """The processes of a run, which exchange numbers on the host.

    Attributes:
        bound: whether there are several.
        main: whether this is the one that writes files.
        group: of gloo, where theirs is of NCCL, which would make the host wait for the GPU.
        entered: records a collective for as long as a with block takes; None: nobody asks.
    """

    bound: bool
    main: bool
    group: Any = None
    entered: Callable[..., AbstractContextManager[None]] | None = None

    @classmethod
    def of(cls, run: Run) -> Job:
        """That of the processes of `run`. Collective."""
        if not isinstance(run.mesh, BoundMesh):
            return cls(False, True)
        seconds = timedelta(seconds=run.config.watchdog.timeout_seconds)
        on_gpus = run.device.type == "cuda"
        group = dist.new_group(backend="gloo", timeout=seconds) if on_gpus else None
        recorder = run.mesh.recorder
        entered = None if recorder is None else recorder.record
        return cls(True, run.mesh.rank == 0, group, entered)

    def across(self, number: float, operation: Any) -> float:
        """A number of all ranks, summed or the largest. Collective."""
        if not self.bound:
            return number
        value = torch.tensor(number, dtype=torch.float64)
        with self._record_collective("psum", value):
            dist.all_reduce(value, operation, group=self.group)
        return float(value)

    def _record_collective(
        self, op: str, value: torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        recorded = self.entered
        return nullcontext() if recorded is None else recorded(op, EVERYWHERE, value)

    def start_sum(self, *numbers: int) -> Callable[[], list[int]]:
        """Begin one all-reduce of numbers; returns a function that waits for sums modulo 2^64."""
        signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
        value = torch.tensor(signed, dtype=torch.int64)
        work = dist.all_reduce(value, group=self.group, async_op=True) if self.bound else None

        def wait() -> list[int]:
            nonlocal work
            if work is not None:
                with self._record_collective("psum", value):
                    work.wait()
                work = None
            return [total % 2**64 for total in value.tolist()]

        return wait

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank. Collective."""
        if not self.bound:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        with self._record_collective("all_gather"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, find: Callable[[], Any]) -> Any:
        """The value that rank 0 finds, on every rank. Collective."""
        if not self.bound:
            return find()
        found = [find() if self.main else None]
        with self._record_collective("pbroadcast"):
            dist.broadcast_object_list(found, group=self.group)
        return found[0]


def _memory_of(made: RunSetup, memory: Path | None) -> Memory | None:
    """The states in memory of a run; None where none are kept. Collective."""
    if memory is None or not isinstance(made.mesh, BoundMesh):
        return None
    like = made.init(random.key(made.config.seed).to("meta"))
    samples = made.config.gaps  # which a state has not seen
    earlier = made.config.data.earlier_batches  # after which it has seen others
    seen = f"{made.config.seed} {samples}" + (f" {earlier}" if earlier else "")
    return Memory(memory, made.mesh, like, seen)


def _find_in_memory(
    made: RunSetup, memory: Path | None, begin_from: Path | None, device: torch.device
) -> State | None:
    """The state in memory, unless a checkpoint on disk is newer. Collective."""
    there = _memory_of(made, memory)
    if there is None:
        return None
    on_disk = int(begin_from.name) if begin_from and begin_from.name.isdigit() else 0
    found = there.newest(at_least=max(on_disk, 1))
    return None if found is None else tree.map(lambda leaf: leaf.to(device), found[1])


class MemoryHook(LoopHook):
    """Keeps the state of a run in main memory every so many steps, until its end. Collective.

    Args:
        run: what is trained.
        memory: its states.
    """

    def __init__(self, run: Run, memory: Memory):
        self._every, self._start, self._memory = run.config.memory.save_every, run.start, memory

    def begin(self, at: At) -> None:
        """Forget the states of steps that will be taken again."""
        self._memory.forget(but=self._start)

    def due(self, step: int) -> bool:
        """Whether to keep the state after so many steps."""
        return self._every > 0 and step % self._every == 0

    def after(self, at: At) -> None:
        """Keep it."""
        if at.keeps and self.due(at.step):
            self._memory.save(at.step, at.state)

    def end(self, at: At) -> None:
        """Forget all states, unless the end is an exception."""
        close_with(self._memory, at.error)


def memory_hook(run: Run) -> MemoryHook | None:
    """The hook that keeps a run in memory; None where it is not asked for. Collective."""
    memory = _memory_of(run.setup, run.memory)
    return None if memory is None else MemoryHook(run, memory)


@dataclass
class Session:
    """A run while it is trained, for the hooks of its sections.

    Attributes:
        run: what is trained; another one where a hook has it go on with other steps.
        out: its folder; None: no files.
        job: its processes.
        write: writes an event, as of `functron.training.records.event_log`.
        stop: whether someone asked to stop.
        peak_flops: FLOP/s of all devices together.
        began: when the process did, by ``time.monotonic()``.
        end_process: ends this process of a job that hangs, without saving; called with the reason,
            and whether this process is the one that prints it.
        also: makes one more reporter of records, for rank 0.
        history: the records of the steps taken, up to where the run now begins.
        blocks: with blocks that are left when the training ends, to which hooks add theirs.
        hooks: of the sections, each made once; phase "restore" comes between two loops.
    """

    run: Run
    out: Path | None
    job: Job
    write: Callable[..., None]
    stop: Request
    peak_flops: float | None = None
    began: float = 0.0
    end_process: Callable[[str, bool], None] = end_process
    also: Callable[[], Reporter] | None = None
    blocks: ExitStack = field(default_factory=ExitStack)
    hooks: list[LoopHook] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def read_records(self) -> list[dict[str, Any]]:
        """The records in the run's folder."""
        return [] if self.out is None else run_folder.records(self.out)

    def write_config(self) -> None:
        """Write the configuration of the run into its folder, where this process is to."""
        if self.job.main and self.out is not None:
            run_folder.write_config(self.out, self.run.config)


def own_part(
    mesh: Mesh | BoundMesh, rows: Callable[[tuple[int, int]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """This process's part of a batch: all of it where it simulates the mesh.

    Args:
        mesh: the ranks.
        rows: makes the samples of the part ``(index, count)`` of the batch.
    """
    if not isinstance(mesh, BoundMesh):
        return rows((0, 1))
    host = rows(part_of(mesh, DATA_AXES))
    index, count = part_of(mesh, CONTEXT_AXES)
    return {
        name: x.chunk(count, 1)[index].contiguous() if x.dim() > 1 else x
        for name, x in host.items()
    }


def _rows_of(whole: Mapping[str, torch.Tensor], part: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The rows of one of the equal, contiguous parts of a batch."""
    index, count = part
    return {name: leaf.chunk(count)[index] for name, leaf in whole.items()}


def batch_hash(batch: Mapping[str, torch.Tensor], first_column: int = 0) -> int:
    """A 64-bit checksum of rows of a batch, on the host, that adds up over its rows and columns.

    It is the sum modulo 2^64 of all integers times odd factors by leaf, row and column.

    Args:
        batch: with ``rows``, the numbers of its rows; leaves of one dim are the same in all parts
            by columns.
        first_column: of this part of the sequences.
    """
    rows, total = batch["rows"].numpy().astype(np.uint64), 0
    for number, name in enumerate(sorted(batch)):
        if batch[name].dim() == 1 and first_column:
            continue  # the first part of these rows has counted it
        x = batch[name].numpy()
        if x.dtype.kind == "f":
            x = x.view(f"i{x.dtype.itemsize}")
        x = x.reshape(len(rows), -1).astype(np.uint64)
        places = np.arange(first_column, first_column + x.shape[1], dtype=np.uint64)
        columns, weights = (
            mix(places, number, 0) | np.uint64(1),
            mix(rows, number, 1) | np.uint64(1),
        )
        total += int((((x + np.uint64(1)) * columns).sum(1) * weights).sum())
    return total % 2**64


def own_hash(mesh: Mesh | BoundMesh, batch: Mapping[str, torch.Tensor]) -> int:
    """This process's share of the `batch_hash` of a batch, of which it has this part.

    Of the ranks that have the same part one counts it. Of a dealt batch it is that of its samples
    as they were drawn.
    """
    dealt = CHECKSUM in batch
    splits = {*DATA_AXES} if dealt else {*DATA_AXES, *CONTEXT_AXES}
    others = mesh.coordinate.items() if isinstance(mesh, BoundMesh) else ()
    if any(place for axis, place in others if axis not in splits):
        return 0
    if dealt:
        return int(batch[CHECKSUM].sum()) % 2**64
    if not isinstance(mesh, BoundMesh):
        return batch_hash(batch)
    index, _ = part_of(mesh, CONTEXT_AXES)
    longest = max((x.shape[1] for x in batch.values() if x.dim() > 1), default=0)
    return batch_hash(batch, index * longest)


def part_of(mesh: BoundMesh, axes: Sequence[str]) -> tuple[int, int]:
    """Which part of what `axes` split this rank gets, ``(index, count)``: row-major over them."""
    index, count = 0, 1
    for axis in axes:
        index = index * mesh[axis] + mesh.coordinate.get(axis, 0)
        count *= mesh[axis]
    return index, count
