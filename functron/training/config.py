"""The configuration of a training run: frozen, complete, checked at once, and TOML on disk.

Files that people write may be YAML as well.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from functron.checkpoint.memory import MemoryConfig
from functron.checkpoint.saver import CheckpointConfig
from functron.core.errors import (
    Problem,
    describe_left_out,
    find_left_out,
    list_plugins,
    load_function,
    nearest,
    on_hub,
    raise_problems,
    refuse,
    remote_problem,
)
from functron.core.settings import (
    Mark,
    Need,
    explain_field,
    names_with_tag,
    nest_table,
    plain_table,
    read_table,
    replace_settings,
    section,
    sections_of,
    setting,
    value_at,
    with_optional_sections,
    with_sections,
)
from functron.core.tables import shows_differences
from functron.data.blend import is_blend
from functron.data.sampling import Gaps
from functron.data.text_files import DataConfig
from functron.models import gpt
from functron.models.config import TextConfig
from functron.models.family import Family, family_of, list_presets, trained_families
from functron.models.gpt import GPTConfig
from functron.models.lora import LoRAConfig, drop_routed
from functron.ops.operations import KernelChoice
from functron.optim import (
    OptimizerConfig,
    RateSchedule,
    ScheduleConfig,
    by_samples,
    make_schedule,
    weight_decay_increase,
)
from functron.optim.config import SCHEDULE_NEEDS, moments_of
from functron.precision import POLICIES, PrecisionPolicy
from functron.precision.recipe import PrecisionConfig
from functron.training.dealing import DealHook, deal_problems, introduce_deals
from functron.training.loop import WaitingConfig
from functron.training.records import CONFIG, METRICS, LoggingConfig
from functron.training.tasks import TasksConfig

C = TypeVar("C", bound="TrainConfig")

_SECTIONS, _FAMILIES = "functron.sections", "functron.families"
"""The groups of plugins that add to `TrainConfig`."""

_LAUNCH_LINES = (
    ".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".txt", ".args", ".json", ".yaml", ".yml",
)  # fmt: skip
"""The endings of files with launch lines, by which old runs tell them from checkpoints."""
_OWN_FORMATS = ("hf", "run")
"""The kinds of sources that are folders of models without an optimizer's state."""


@shows_differences
@dataclass(frozen=True)
class ParallelismConfig:
    """The division of a model and its batches among the ranks of a mesh.

    Attributes:
        mesh: axes and sizes, such as dp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        sequence_parallel: split the residual stream's sequence over tp.
        context: attention over cp, whose ranks split sequences: ring: keys and values go round;
            gather: every rank gathers them; dynamic: documents of packed samples are dealt to as
            many ranks as it takes to balance them, anew in every step, and keys go round among
            these alone; dynamic-gather: they gather them. (Ranks of ulysses exchange heads for
            sequence, under dynamic as many as a document is dealt to.)
        zigzag: give each rank of cp an early and a late part of every sequence, which balances
            causal attention.
        expert_axes: axes that shard experts: ep; or ep,tp with sequence_parallel, for whole experts
            (Megatron's folding with expert tensor parallelism 1); cp and ulysses may be added;
            ep_node,ep over nodes and within them, for gpt.moe.dispatch=two-hop.
        uneven: logical axes of parameters that the ranks that split them need not divide: some of
            vocab,heads,mlp,embed,expert; the last ranks have padding in their parts.
        microbatches: number of microbatches of a rank's batch, to save activation memory and to
            keep pipeline ranks busy.
        schedule: pipeline schedule of pp: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zbv, dualpipe,
            dualpipe-half, dualpipev and others, or the path of a table.
        chunks: stages per pipeline rank; 0: the schedule's default.
        layout: layers of the pipeline stages: empty or even; cost: balanced by traced cost;
            first=N,last=N; or explicit, such as "Et|tt|tL" (E embedding, t layer, L loss, |
            between stages, (tt|)*3 repeats).
        vocab_over_pp: shard embedding and unembedding over all pipeline ranks, which each update a
            part; the first and last stage gather them in every step.
        zero: ZeRO stage: 1 shards optimizer state over data-parallel ranks, 2 also gradients, 3
            also parameters, as the mesh axis fsdp always does.
        gather: when sharded parameters are gathered: use: by every block, and again in backward;
            keep: by every block, and kept until backward; step: all before the first microbatch.
    """

    mesh: str = setting("", "common shapes step")
    nproc: int = setting(0, "common step", least=0)
    sequence_parallel: bool = setting(False, "common step")
    context: Literal["ring", "gather", "dynamic", "dynamic-gather"] = setting("ring", "step")
    zigzag: bool = setting(True, "step")
    expert_axes: str = setting("ep", "shapes step")
    uneven: str = setting("", "shapes step")
    microbatches: int = setting(1, "common step", least=1)
    schedule: str = setting("1f1b", "common path step")
    chunks: int = setting(0, "step", least=0)
    layout: str = setting("", "step")
    vocab_over_pp: bool = setting(False, "step")
    zero: Literal[0, 1, 2, 3] = setting(0, "common shapes step")
    gather: Literal["use", "keep", "step"] = setting("use", "step")

    @property
    def expert_axis_names(self) -> tuple[str, ...]:
        """`expert_axes`, one by one."""
        return _split_names(self.expert_axes)

    @property
    def uneven_names(self) -> tuple[str, ...]:
        """`uneven`, one by one."""
        return _split_names(self.uneven)

    def run_problems(self, config: Any, mesh: Any, *place: Any) -> Iterator[Problem]:
        """Settings of other sections that do not go with these."""
        return deal_problems(config, mesh)

    def hook(self, session: Any) -> DealHook | None:
        """The hook that records how documents are dealt, where they are."""
        return None if session.run.setup.dealer is None else DealHook(session)

    def introduce(self, run: Any) -> Sequence[str]:
        """How documents are dealt, where they are."""
        return introduce_deals(run)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


@shows_differences
@dataclass(frozen=True)
class ComputeConfig:
    """How steps are computed, which changes their time and memory, but not their result.

    Attributes:
        remat: activation checkpointing, which recomputes in backward: none; full: blocks, of which
            only inputs are kept; selective: the core of attention; dots: everything but matrix
            products and attention.
        kernels: auto: functron's CUDA kernels where they apply, on a GPU; reference: torch's
            operations; kernel: as auto, but an operation without a kernel is an error.
        loss_chunk_tokens: compute logits of N tokens at a time, and again in backward, to save
            memory; 0: all at once.
        compile: compile the step with Inductor, before the first one, as auto does over NCCL:
            compiled steps compute while ranks send, and others wait. It does not with
            optimizer.offload, SOAP, or experts without a capacity that ranks divide.
        cuda_graph: launch a compiled step as one CUDA graph, from the third step on.
        expert_room: for how many rows a rank's experts have room at first, as a multiple of
            balanced ones, such as 1.25, where programs have static shapes: compiled, simulated or
            traced. Later steps have what those before needed, and one that needs more is taken
            again with it: no token is dropped. 0: for the worst case, all tokens of all ranks.
        deterministic: bitwise reproducible results on a GPU, as on CPUs, by torch's deterministic
            algorithms, some of which are slower (backward of attention, scatters);
            an operation without one is an error.
        device: cpu, cuda, or auto: cuda if available.
    """

    remat: gpt.Remat = setting("none", "common step")
    kernels: KernelChoice = setting("auto", "step")
    loss_chunk_tokens: int = setting(0, "step", least=0)
    compile: bool | Literal["auto"] = setting("auto", "common")
    cuda_graph: bool = False
    expert_room: float = setting(0.0, "step")
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "common")

    def problems(self) -> list[Problem]:
        """Everything wrong with these settings by themselves."""
        if self.expert_room == 0 or 1 <= self.expert_room < math.inf:
            return []
        wanted, fix = "0, or at least 1", "take 1.25, from which it is learned"
        return [Problem("expert_room", f"{self.expert_room:g}", wanted, fix)]


_HELD_OUT = Need(lambda evaluation: evaluation.every > 0, "held-out sets", "set eval_every")


@shows_differences
@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out data.

    Attributes:
        every: report loss and perplexity on held-out data every N steps, and after the last; 0:
            never.
        batches: batches of each set, of global_batch samples; 0: the whole set.
        data: held-out sets by name, such as "wiki=PREFIX1 code=PREFIX2", each read as `data`;
            empty: the validation part of `split`, separately for the sources of a blend.
        averaged: evaluate the averages of parameters that optimizer.ema_decay keeps.
    """

    every: int = setting(0, "common", short="eval_every", least=0)
    batches: int = setting(0, short="eval_batches", least=0, need=_HELD_OUT)
    data: str = setting("", "common path", short="eval_data", need=_HELD_OUT)
    averaged: bool = setting(False, short="eval_averaged", need=_HELD_OUT)


def _add_families(kind: type[C]) -> type[C]:
    """A configuration with a section for each family that is trained; None: another one is."""
    others = {name: each.config for name, each in trained_families().items() if name != "gpt"}
    return with_optional_sections(kind, others, Mark(frozenset(("shapes", "step")), box="model"))


@_add_families
@shows_differences
@dataclass(frozen=True)
class TrainConfig:
    """The configuration of a training run: sections, which are defined beside what they configure.

    Tags of settings mark those that most runs use (common), paths (path), those that a run keeps
    (kept), and those that determine the samples of steps (samples), the parameters of ranks
    (shapes), and the computation, communication and memory of a step (step).

    `configure` takes settings by the names of options, such as ``save_every`` for
    ``checkpoint.save_every``. `functron.core.settings.with_sections` adds sections; those of
    applications (group ``functron.sections``) are there. A section may have:

    - ``problems()`` and ``run_problems(config, mesh, processes, launched_here)``, which
      `functron.training.checks.validate` lists: of itself, and with other sections;
    - ``hook(session)``, which makes a hook of the run's loop of a `functron.training.run.Session`;
    - ``introduce(run)``, lines on what it does, which a run begins with;
    - ``gaps``, the samples that are left out, and ``change_rate(schedule)``;
    - ``limits_updates``: whether its hook sets the limit of `functron.optim.with_limit`;
    - ``reads_recorder``: whether it needs collectives to be recorded.

    Paths must be local: one such as s3://bucket/run is a ValueError.

    Attributes:
        data: training data.
        model: name of a preset, which sets the architecture; hf-module:FOLDER, a decoder of
            transformers as it is; module:PACKAGE.FUNCTION, what it returns; or, with a source, a
            name for that.
        source: origin of the model, such as hf:PATH, if it is not a preset; recorded by functron
            convert, and not an option. launch:FILE: a launch line describes it.
        gpt: the architecture, unless another is given: other families have a table of their name,
            such as bert, which is None in a run of a GPT.
        lora: low-rank adapters.
        parallelism: parallelism over the mesh.
        watchdog: time limits of collectives.
        precision: dtypes.
        compute: how steps are computed.
        steps: optimization steps.
        seed: of initial parameters, order of the data, and dropout.
        optimizer: the optimizer.
        learning_rate: its schedule; total_steps 0 stands for steps.
        rate_unit: unit of learning_rate's warmup_steps, decay_steps and total_steps, and of a
            changing weight decay: steps, or samples before the step, as with Megatron-LM's
            --lr-warmup-samples and --lr-decay-samples, which differ if batches grow.
        out: run folder, new or empty; empty: the next free runs/MODEL-1, runs/MODEL-2, ...
        resume: continue the run in `out` from its newest complete checkpoint, if there is one, on
            this mesh, and in another precision if --precision is given; auto: start a run if there
            is none, for jobs that are requeued.
        change_batch: with resume: change global_batch or ramp_up of the run, from its newest
            checkpoint on. Counts of samples continue: schedules of rate_unit=samples and an
            application's order of samples stay as planned, and ramp_up counts those of the whole
            run.
        checkpoint: when checkpoints are saved.
        evaluation: evaluation on held-out data.
        tasks: evaluation on tasks.
        memory: checkpoints in memory, for restarts.
        logging: records.
    """

    data: DataConfig = section(DataConfig, flat=True)
    model: str = setting("tiny", "common shapes step", box="model")
    source: str = setting(
        "",
        box="model",
        instead="functron convert hf:PATH run:RUN loads a model, and functron train --resume --out "
        "RUN trains it",
    )
    gpt: GPTConfig = section(lambda: gpt.PRESETS["tiny"], "shapes step", box="model")
    lora: LoRAConfig = section(LoRAConfig, box="model")
    parallelism: ParallelismConfig = section(ParallelismConfig, flat=True)
    watchdog: WaitingConfig = section(WaitingConfig, box="parallelism", flat=True)
    precision: PrecisionConfig = section(PrecisionConfig, flat=True)
    compute: ComputeConfig = section(ComputeConfig, box="precision", flat=True)
    steps: int = setting(200, "common step", box="optimizer", least=1)
    seed: int = setting(0, "common samples", box="optimizer", least=0)
    optimizer: OptimizerConfig = section(OptimizerConfig, "step")
    learning_rate: ScheduleConfig = section(
        lambda: ScheduleConfig(name="cosine", peak=2e-3, total_steps=0, end_fraction=0.05),
        "step",
        box="optimizer",
    )
    rate_unit: Literal["steps", "samples"] = setting("steps", "step", box="optimizer")
    out: str = setting("", "common path", box="checkpoint")
    resume: bool | Literal["auto"] = setting(False, "common", box="checkpoint")
    change_batch: bool = setting(False, box="checkpoint")
    checkpoint: CheckpointConfig = section(CheckpointConfig, flat=True)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    tasks: TasksConfig = section(TasksConfig, box="evaluation")
    memory: MemoryConfig = section(MemoryConfig, box="resilience")
    logging: LoggingConfig = section(LoggingConfig)

    def __new__(cls, *sections: Any, **named: Any):
        wrong = named.keys() - cls.__dataclass_fields__.keys()
        if wrong:
            raise TypeError("; ".join(explain_field(cls, name) for name in sorted(wrong)))
        return super().__new__(cls)

    if not TYPE_CHECKING:  # for which any name would be an attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(explain_field(type(self), name), name=name, obj=self)

    def __post_init__(self):
        found = (
            remote_problem(name, value_at(self, name))
            for name in names_with_tag(type(self), "path")
        )
        raise_problems("there are no such places on this machine", filter(None, found))

    @property
    def reads_recorder(self) -> bool:
        """Whether a section needs the collectives of processes to be recorded."""
        return any(getattr(each, "reads_recorder", False) for each in sections_of(self))

    @property
    def architecture(self) -> TextConfig:
        """The model to train: that of another family where one is given, and `gpt` otherwise."""
        others = (getattr(self, name) for name in trained_families() if name != "gpt")
        return next(filter(None, others), self.gpt)

    @property
    def has_origin(self) -> bool:
        """Whether its parameters were converted, so that no run begins with random ones.

        A launch line has none: launch:FILE.sh, or, in old runs, FORMAT:FILE.sh; names of
        checkpoints, such as llama-3.1-8b, may have a dot, too.
        """
        kind, _, path = self.source.partition(":")
        line = "/" not in path and Path(path).suffix in _LAUNCH_LINES
        return bool(self.source) and not (kind == "launch" or (line and kind not in _OWN_FORMATS))

    @property
    def is_continued(self) -> bool:
        """Whether it continues a run of another program, with optimizer state.

        Hugging Face folders and runs that were made of other runs have none.
        """
        kind, colon, _ = self.source.partition(":")
        return self.has_origin and bool(colon) and kind not in _OWN_FORMATS

    @property
    def title(self) -> str:
        """The name of the model for the user: the preset, or the architecture and its source."""
        if self.source:
            return f"{self.model} of {self.source}"
        same = list_presets().get(self.model) == self.architecture
        return self.model if same else f"{self.model} with changes"

    @property
    def family(self) -> Family:
        """The family of `architecture`."""
        return family_of(self.architecture)

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes in force."""
        own = self.optimizer
        moments = {name: getattr(own, name) for name in moments_of(own.name)}
        halved = own.master_bits < OptimizerConfig.master_bits
        masters = "remainder" if halved else "float32" if own.fp32_masters else ""
        return PrecisionPolicy(
            self.architecture.dtype,
            "stochastic" if own.stochastic_rounding else masters,
            own.grad_dtype,
            own.reduce_dtype,
            moments.get("mu_dtype", ""),
            moments.get("nu_dtype", ""),
            own.loss_scale.initial,
            self.precision.products,
            self.precision.gather_as,
        )

    @property
    def rate_schedule(self) -> ScheduleConfig:
        """`learning_rate` with its total_steps filled in, in `rate_unit`.

        Raises:
            ValueError: it counts samples, and `ramp_up` is invalid.
        """
        counted = self.rate_unit == "samples"
        total = self.learning_rate.total_steps
        total = total or (self.data.batches.first_sample(self.steps) if counted else self.steps)
        return dataclasses.replace(self.learning_rate, total_steps=total)

    @property
    def counted(self) -> Callable[[RateSchedule], RateSchedule] | None:
        """Converts schedules from `rate_unit` to steps; None: it is steps."""
        if self.rate_unit == "steps":
            return None
        given = self.data.batches.first_steps, self.data.batches.sizes
        return lambda schedule: by_samples(schedule, *given)

    @property
    def reads_rate(self) -> bool:
        """Whether the optimizer uses `learning_rate`."""
        own = self.optimizer
        return not (own.name == "adafactor" and own.adafactor.relative_step)

    @property
    def reads_total_steps(self) -> bool:
        """Whether total_steps of `learning_rate` has an effect."""
        scheduled = self.reads_rate and SCHEDULE_NEEDS["total_steps"].holds(self.learning_rate)
        return scheduled or self.optimizer.weight_decay_incr_style != "constant"

    @property
    def rate(self) -> Callable[[Any], Any]:
        """The learning rate of each step, from 0."""
        schedule = make_schedule(self.rate_schedule)
        schedule = schedule if self.counted is None else self.counted(schedule)
        for each in sections_of(self):
            change = getattr(each, "change_rate", None)
            schedule = schedule if change is None else change(schedule)
        return schedule

    @property
    def gaps(self) -> Gaps:
        """The samples that a section leaves out of the order of the data.

        Raises:
            ValueError: it does not describe them.
        """
        return next((each.gaps for each in sections_of(self) if hasattr(each, "gaps")), Gaps())

    @property
    def limits_updates(self) -> bool:
        """Whether a section has updates left out whose gradients are above a limit."""
        return any(getattr(each, "limits_updates", False) for each in sections_of(self))

    @property
    def weight_decay(self) -> Callable[[Any], Any]:
        """The weight decay of each step, from 0."""
        own = self.optimizer
        if own.weight_decay_incr_style == "constant":
            return lambda count: own.weight_decay
        ends = own.start_weight_decay, own.end_weight_decay
        total, style = self.rate_schedule.total_steps, own.weight_decay_incr_style
        made = weight_decay_increase(*ends, total, style)
        return made if self.counted is None else self.counted(made)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return self.checkpoint.save_every > 0 and step % self.checkpoint.save_every == 0

    @property
    def ordered_samples(self) -> int:
        """The number of samples of an application's order.

        Raises:
            ValueError: `ramp_up` is invalid.
        """
        return self.data.order_samples or self.data.batches.first_sample(self.steps)


if not TYPE_CHECKING:  # which knows the library's own sections
    _found = {name: load_function(at, _SECTIONS) for name, at in list_plugins(_SECTIONS).items()}
    TrainConfig = with_sections(TrainConfig, _found)


@overload
def configure(**settings: Any) -> TrainConfig: ...
@overload
def configure(base: C, /, **settings: Any) -> C: ...
def configure(base: Any = None, /, **settings: Any) -> Any:
    """A configuration with settings replaced, at any depth.

        configure(steps=100, mesh="dp=2,tp=2", optimizer={"name": "muon"}, gpt__dropout=0.1)

    Args:
        base: a `TrainConfig`; None: the default one.
        settings: by the names of options, ``save_every``; by paths with ``__``,
            ``checkpoint__save_every``; or sections, as instances or mappings of changes. A `model`
            without an architecture or a `source` is a preset, which sets the architecture as
            `with_model` does.

    Raises:
        TypeError: settings are unknown; the nearest are named.
        ValueError: values are of another kind, or there is no such preset.
    """
    base = TrainConfig() if base is None else base
    if "model" in settings and not {*trained_families(), "source"} & settings.keys():
        name, known = settings["model"], list_presets()
        if name not in known:
            fix = nearest(str(name), known) + describe_left_out(_FAMILIES)
            refuse("no such model", "model", repr(name), "a preset", fix)
        base = with_model(base, name)
    return replace_settings(base, settings)


def with_model(config: C, name: str) -> C:
    """`config` with the architecture of the preset `name`.

    Raises:
        ValueError: there is no such preset; the nearest is suggested.
    """
    return dataclasses.replace(config, model=name, source="", **_tables(list_presets()[name]))


def with_precision(config: C, name: str) -> C:
    """`config` with the dtypes of the policy `name`, of `functron.precision.POLICIES`.

    Raises:
        ValueError: there is no such policy; the nearest is suggested.
    """
    if name not in POLICIES:
        refuse("no such precision", "precision", repr(name), "a policy", nearest(name, POLICIES))
    policy, before = POLICIES[name], config.optimizer
    moments = {"mu_dtype": policy.mu, "nu_dtype": policy.nu}
    has = moments_of(before.name)
    optimizer = dataclasses.replace(
        before,
        fp32_masters=policy.masters == "float32",
        master_bits=OptimizerConfig.master_bits,
        stochastic_rounding=policy.masters == "stochastic",
        grad_dtype=policy.grads,
        reduce_dtype=policy.reduce,
        loss_scale=dataclasses.replace(before.loss_scale, initial=policy.loss_scale),
        **{name: value for name, value in moments.items() if name in has},
    )
    model = dataclasses.replace(config.architecture, dtype=policy.params)
    # the type checker does not know that the keys of POLICIES are the words of this setting
    precision = PrecisionConfig(name, policy.products, policy.gather_as)  # type: ignore[arg-type]
    own: dict[str, Any] = {config.family.name: model}
    return dataclasses.replace(config, precision=precision, optimizer=optimizer, **own)


def _tables(architecture: TextConfig) -> dict[str, Any]:
    """The fields of all families, if this architecture is trained."""
    tables = {name: getattr(TrainConfig(), name) for name in trained_families()}
    return tables | {family_of(architecture).name: architecture}


def load(
    path: str | Path,
    *,
    model: str | None = None,
    precision: str | None = None,
    begun: TrainConfig | None = None,
    kind: type[TrainConfig] = TrainConfig,
    known_only: bool = False,
) -> TrainConfig:
    """The configuration in a file; missing settings have the preset's or default values.

    The file of a run folder is complete: settings that it lacks are newer than the run, and have
    the values of that time (first order of blends, first rules of text). If its lora_targets name
    routed experts, which new runs may not, they become those of what was adapted.

    Args:
        path: a TOML file, or YAML 1.2 (.yaml or .yml: ``off`` and ``12:30`` are text, ``1e-3`` is a
            number).
        model: a preset that replaces the file's model and its table, such as [gpt].
        precision: a policy for a file that names none, and for dtypes that it lacks.
        begun: the run that continues with it, whose settings with the tag "kept" replace missing
            ones.
        kind: `TrainConfig`, or one with more sections.
        known_only: ignore unknown tables, such as sections of another program.

    Raises:
        ValueError: the file cannot be read, is not TOML or YAML, has unknown keys or values of the
            wrong kind, all of which are listed, or describes an impossible model; or the package
            for YAML is not installed.
    """
    table = nest_table(_read_file(Path(path)), kind)
    if known_only:
        known = {field.name for field in dataclasses.fields(kind)}
        table = {k: x for k, x in table.items() if k in known or not isinstance(x, Mapping)}
    if begun is not None:
        kept = {name: value_at(begun, name) for name in names_with_tag(type(begun), "kept")}
        table = _with_kept(table, kept, kind)
    elif _is_of_run(Path(path)):
        table = _with_kept(table, _first_versions(table), kind)
        made = read_settings(table, str(path), model=model, precision=precision, kind=kind)
        return _drop_routed_targets(made)
    return read_settings(table, str(path), model=model, precision=precision, kind=kind)


def read_settings(
    table: Mapping[str, Any],
    name: str,
    *,
    model: str | None = None,
    precision: str | None = None,
    kind: type[TrainConfig] = TrainConfig,
) -> TrainConfig:
    """The configuration in nested dicts, as `load` reads it from a file of this name.

    Settings are in the tables of sections, or at the top by short names, as in functron 0.1.
    """
    table = nest_table(table, kind)
    if model is not None:
        table = {k: value for k, value in table.items() if k not in (*trained_families(), "source")}
        table["model"] = model
    problems: list[Problem] = []
    preset, base = table.get("model", "tiny"), kind()
    if not table.get("source"):
        if preset in list_presets():
            base = with_model(base, preset)
        else:
            fix = nearest(str(preset), list_presets()) + describe_left_out(_FAMILIES)
            problems.append(Problem("model", repr(preset), "a preset", fix))
    table = {k: x for k, x in table.items() if x != "none" or not find_left_out(_FAMILIES, k)}
    values = read_table(table, base, problems)
    raise_problems(f"cannot use the configuration {name}", map(_explain_left_out, problems))
    made = replace_settings(base, values)
    named = made.precision.name if made.precision.name != "auto" else precision
    # the policy fills in what the file lacks, for the file's model
    return made if named is None else replace_settings(with_precision(made, named), values)


def _explain_left_out(problem: Problem) -> Problem:
    """A problem, told as a missing application where its setting belongs to one."""
    top = problem.path.partition(".")[0]
    folder = find_left_out(_SECTIONS, top) or find_left_out(_FAMILIES, top)
    if not folder:
        return problem
    fix = f"restore {folder}, or remove this from the file"
    return Problem(problem.path, problem.got, f"{folder}, which is not there", fix)


def _with_kept(
    table: Mapping[str, Any], kept: Mapping[str, Any], kind: type[TrainConfig]
) -> dict[str, Any]:
    """A table, with these values where it lacks them."""
    filled = nest_table(kept, kind)
    for name, value in table.items():
        both = isinstance(value, Mapping) and isinstance(filled.get(name), Mapping)
        filled[name] = {**filled[name], **value} if both else value
    return filled


def _first_versions(table: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of rules of a run from before they had versions."""
    data = table.get("data", {})
    data = data if isinstance(data, Mapping) else {}
    blends = data.get("order", "arithmetic") == "arithmetic" and is_blend(data.get("path", ""))
    return {"text_rules": 1} | ({"blend_order": 1} if blends else {})


def _drop_routed_targets(config: TrainConfig) -> TrainConfig:
    """An old run whose adapter targets name routed experts, with the targets that it adapted."""
    lora, family = config.lora.adapters, config.family
    if lora is None or not family.adapters:
        return config
    targets = drop_routed(lora.targets, family.defs(config.architecture))
    if targets == list(lora.targets):
        return config
    return configure(config, lora_targets=",".join(targets))


def _is_of_run(path: Path) -> bool:
    """Whether this is the configuration of a run with records or checkpoints."""
    beside = (path.parent / name for name in ("checkpoints", METRICS))
    return path.name == CONFIG and any(found.exists() for found in beside)


def starting_config(
    file: Path | None,
    *,
    model: str | None = None,
    precision: str | None = None,
    default_precision: str | None = None,
    begun: Path | None = None,
    kind: type[TrainConfig] = TrainConfig,
    **settings: Any,
) -> TrainConfig:
    """The configuration that a command's options override: of a file, or of a preset.

    Args:
        file: as of `load`; None: there is none.
        model: a preset that the options name.
        precision: a policy that they name, which fills what a file says too; None or "auto": none.
        default_precision: the policy where neither they nor the file name one.
        begun: the configuration of the run that goes on with it; None: it begins.
        kind: `TrainConfig`, or one with more sections.
        settings: as of `configure`, where there is no file.

    Raises:
        ValueError: an unknown preset or policy, or what `load` raises.
    """
    if file is not None:
        kept = None if begun is None or begun == file else load(begun, kind=kind)
        base = load(file, model=model, precision=default_precision, begun=kept, kind=kind)
    else:
        base = configure(kind(), **settings)
        base = base if model is None else with_model(base, model)
        if default_precision is not None:
            filled = with_precision(base, default_precision)
            base = configure(filled, precision=base.precision.name)
    return base if precision in (None, "auto") else with_precision(base, precision)


def _read_file(path: Path) -> dict[str, Any]:
    """The keys and values in a configuration: of YAML by its name, or else of TOML."""
    title = "cannot read the configuration"
    if path.suffix in _YAML:
        return read_yaml(path, title, ", or write it as TOML")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(title, str(path), reason, "a readable TOML file", _another(path, error))


def read_yaml(path: Path, title: str = "cannot read YAML", otherwise: str = "") -> dict[str, Any]:
    """The mapping in a file of YAML, or of JSON, which is YAML too.

    Args:
        path: of the file.
        title: of errors.
        otherwise: what can be done without the package for YAML.

    Raises:
        ValueError: it cannot be read, or the package that reads it is not installed.
    """
    if path.is_file() and importlib.util.find_spec("yaml") is None:
        fix = f"pip install 'functron[yaml]'{otherwise}"
        refuse(title, "pyyaml", "no such package", f"it, to read {path}", fix)
    try:
        return _from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(title, str(path), reason, "a readable YAML file", _another(path, error))


def _from_yaml(text: str) -> dict[str, Any]:
    """The mapping in a YAML document, whose plain words are those of YAML 1.2.

    Raises:
        ValueError: it is no YAML, has a key twice, or is something else than a mapping.
    """
    yaml = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            keys = [key.value for key, _ in node.value if key.tag != _YAML_MERGE]
            if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
                line = node.start_mark.line + 1
                raise ValueError(f"{', '.join(twice)} twice in the mapping of line {line}")
            return {str(key): value for key, value in super().construct_mapping(node, deep).items()}

    for kind, pattern, first in _YAML_WORDS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first))
    try:
        table = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(table, dict | None):
        raise ValueError(f"a {type(table).__name__}, where keys and values should be")
    return table or {}


_YAML = (".yaml", ".yml")
_YAML_MERGE = "tag:yaml.org,2002:merge"
_YAML_WORDS = (
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("merge", r"<<$", "<"),
)
"""The kinds of plain words of YAML 1.2 that configurations have, and how they begin."""


def _another(path: Path, error: Exception) -> str:
    """The fix for what is no TOML: YAML, JSON, a Hugging Face model's file, or no file at all."""
    if isinstance(error, OSError):
        return on_hub(path.parent)
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if isinstance(table, dict) and "model_type" in table:
        return f"this describes a Hugging Face model: functron convert hf:{path.parent} run:RUN"
    if path.suffix in _YAML:
        return ""
    write = "write it as TOML, with steps = 10 for a value and [gpt] above those of a table; "
    write += "functron train leaves a complete config.toml in its run folder to begin from"
    if table is not None or path.suffix == ".json":
        return f"this is JSON: {write}"
    like = re.search(r"^\s*[\w.-]+:(\s|$)", text, re.MULTILINE)
    return f"this is YAML: give it a name that ends in .yaml, or {write}" if like else ""


def dump(config: TrainConfig) -> str:
    """`config` as TOML text that `load` reads back: complete, down to every default.

    Only an architecture that is not in force, and nobody changed, is left out.
    """
    import tomli_w

    table = plain_table(config)
    if config.architecture is not config.gpt and config.gpt == TrainConfig().gpt:
        del table["gpt"]
    return tomli_w.dumps(table)
