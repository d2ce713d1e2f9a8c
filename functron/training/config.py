"""The configuration of a training run: frozen, complete, checked at once, and TOML on disk.

Files that people write may be YAML as well.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from functron.checkpoint.memory import MemoryConfig
from functron.checkpoint.saver import CheckpointConfig
from functron.core.errors import (
    Problem,
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
from functron.training.loop import WaitingConfig
from functron.training.records import CONFIG, METRICS, LoggingConfig

C = TypeVar("C", bound="TrainConfig")

_LAUNCH_LINES = (
    ".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".txt", ".args", ".json", ".yaml", ".yml",
)  # fmt: skip
"""The endings of files with launch lines, by which old runs tell them from checkpoints."""
_OWN_FORMATS = ("hf", "run")
"""The kinds of sources that are folders of models without an optimizer's state."""


@dataclass(frozen=True)
class ParallelismConfig:
    """The division of a model and its batches among the ranks of a mesh.

    Attributes:
        mesh: axes and sizes, such as dp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        sequence_parallel: split the residual stream's sequence over tp.
        context: what the ranks of cp do, each of which has a part of every sequence: ring: keys and
            values go round; gather: every rank gathers them. Ranks of ulysses, which have parts of
            sequences too, exchange heads for sequence.
        zigzag: ranks of cp each take an early and a late part of every sequence, so that causal
            attention costs all the same.
        expert_axes: the axes that experts are divided over: ep; ep,tp with sequence_parallel, where
            experts are whole (Megatron's folding with expert tensor parallelism 1); cp and ulysses
            may be among them too.
        microbatches: parts of each rank's batch, one after another, to save activation memory and
            to keep all ranks of a pipeline at work.
        schedule: who computes which microbatch when, where the mesh has pp: 1f1b, gpipe,
            interleaved, zb-h1, zb-h2, zbv, dualpipe, dualpipev and others, or the path of a table.
        chunks: stages per pipeline rank; 0: what the schedule is made for.
        layout: which stage has which layers: empty or even; cost: by the cost of the traced
            program; first=N,last=N; or written out, such as "Et|tt|tL" (E embedding, t layer, L
            loss, | between stages, (tt|)*3 repeats).
        vocab_over_pp: divide embedding and unembedding among all ranks of the pipeline, which each
            update a part; the first and last stage gather them for a step.
        zero: what data-parallel ranks divide instead of each holding all of it: 1: the optimizer's
            state; 2: the gradients as well; 3: the parameters as well, as the mesh axis fsdp does
            without being asked.
        gather: when parameters that are so divided are gathered: use: by every block, and again in
            backward; keep: by every block, until backward; step: all at once, before the
            microbatches.
    """

    mesh: str = setting("", "common shapes step")
    nproc: int = setting(0, "common step", least=0)
    sequence_parallel: bool = setting(False, "common step")
    context: Literal["ring", "gather"] = setting("ring", "step")
    zigzag: bool = setting(True, "step")
    expert_axes: str = setting("ep", "shapes step")
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
        return tuple(filter(None, (axis.strip() for axis in self.expert_axes.split(","))))


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed, and on what: which changes its time and memory, not what it is.

    Attributes:
        remat: what backward computes again: none, full (all of a block but its input), selective
            (the core of attention) or dots (all but matrix products and attention).
        kernels: auto: functron's CUDA kernels compute what they can on a GPU; reference: torch's
            operations do; kernel: as auto, but what no kernel can compute is an error.
        loss_chunk_tokens: make logits of so many of a rank's tokens at a time, and again in
            backward, so that they take little memory; 0: of all at once.
        compile: compile the step with Inductor before the first one, which then takes longer.
        cuda_graph: launch a compiled step as one CUDA graph, from the third step on.
        deterministic: a GPU makes the same bits in every run on the same mesh, as CPUs do anyway:
            by torch's deterministic algorithms, some of which are slower (backward of attention, of
            embeddings, and what scatters); an operation that has none is an error.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    remat: gpt.Remat = setting("none", "common step")
    kernels: KernelChoice = setting("auto", "step")
    loss_chunk_tokens: int = setting(0, "step", least=0)
    compile: bool = setting(False, "common")
    cuda_graph: bool = False
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "common")


@dataclass(frozen=True)
class EvaluationConfig:
    """When held-out data is evaluated, and which.

    Attributes:
        every: report the loss and perplexity of held-out data after every so many steps, and after
            the last; 0: never.
        batches: how many batches of each set, of global_batch samples; 0: all of it.
        data: held-out sets by name, such as "wiki=PREFIX1 code=PREFIX2", each read as `data` is;
            empty: the validation part of `split`, of every source of a blend by itself.
        averaged: of the average of the parameters that optimizer.ema_decay keeps, rather than of
            the parameters.
    """

    every: int = setting(0, "common", short="eval_every", least=0)
    batches: int = setting(0, short="eval_batches", least=0)
    data: str = setting("", "common path", short="eval_data")
    averaged: bool = setting(False, short="eval_averaged")


def _add_families(kind: type[C]) -> type[C]:
    """A configuration with a section for each family that is trained; None: another one is."""
    others = {name: each.config for name, each in trained_families().items() if name != "gpt"}
    return with_optional_sections(kind, others, Mark(frozenset(("shapes", "step")), box="model"))


@_add_families
@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training run, in sections that stand beside what they configure.

    It is the table of these sections. Tags of settings say which most runs use (common), which are
    paths (path), which a run keeps as it began (kept), and which determine the samples that steps
    see (samples), the parameters of ranks (shapes), and what a step computes, sends and holds
    (step).

    `configure` makes one of the names that options have, such as ``save_every`` for
    ``checkpoint.save_every``; `functron.core.settings.with_sections` adds sections to it, and those
    of the applications that are there (group ``functron.sections``) it has. A section may have:

    - ``problems()`` and ``run_problems(config, mesh, processes, launched_here)``, which
      `functron.training.checks.validate` lists: of itself, and with other sections;
    - ``hook(session)``, which makes a hook of the run's loop of a `functron.training.run.Session`;
    - ``introduce(run)``, lines on what it does, which a run begins with;
    - ``gaps``, the samples that are left out, and ``change_rate(schedule)``;
    - ``limits_updates``: whether its hook sets the limit of `functron.optim.with_limit`;
    - ``reads_recorder``: whether it needs collectives to be recorded.

    Paths are those of this machine: one such as s3://bucket/run is a ValueError.

    Attributes:
        data: what its samples are.
        model: name of a preset; it fills the table of its architecture. Where there is a source it
            is what this calls the architecture.
        source: where the model came from, such as hf:PATH, if it is no preset: what functron
            convert recorded, and no option. launch:FILE: a launch line that describes it, not its
            parameters.
        gpt: the architecture, unless another is given: other families that are trained have a table
            of their name, such as bert, which is None in a run of a GPT.
        lora: low-rank additions to its matrices.
        parallelism: what ranks divide.
        watchdog: ranks that others wait for.
        precision: its dtypes.
        compute: how a step is computed, and on what.
        steps: optimization steps.
        seed: of initial parameters, order of the data, and dropout.
        optimizer: the optimizer.
        learning_rate: its schedule; total_steps 0 stands for steps.
        rate_unit: what the counts of learning_rate are (warmup_steps, decay_steps, total_steps),
            and what a weight decay that changes goes by: steps; or the samples that came before a
            step, as Megatron-LM's --lr-warmup-samples and --lr-decay-samples have it, which differs
            where batches grow.
        out: run folder, new or empty; empty: the next free runs/MODEL-1, runs/MODEL-2, ...
        resume: go on from the newest complete step of the run in the folder `out`, or begin with it
            where none is complete, on the mesh asked for now, and in another precision where
            --precision is given as well; auto: begin a run where there is none as well, such as in
            a job that is started again until it is done.
        change_batch: with resume: go on with another global_batch or ramp_up than the run had, from
            its newest checkpoint and the next sample on. What counts samples goes on: rates of
            rate_unit=samples and the order of an application stay as they were planned, and the
            samples of ramp_up are those of the whole run.
        checkpoint: when it is saved.
        evaluation: of held-out data.
        memory: states that it keeps there, for restarts.
        logging: what is recorded.
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
        """Whether its parameters came from elsewhere, so that no run begins with random ones.

        A launch line has none: launch:FILE.sh, or, as it was called once, FORMAT:FILE.sh, where
        checkpoints, such as of llama-3.1-8b, may have a point in their names as well.
        """
        kind, _, path = self.source.partition(":")
        line = "/" not in path and Path(path).suffix in _LAUNCH_LINES
        return bool(self.source) and not (kind == "launch" or (line and kind not in _OWN_FORMATS))

    @property
    def is_continued(self) -> bool:
        """Whether its first steps may have been taken elsewhere, with the optimizer's state.

        Hugging Face folders and runs that are made of others have none.
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
            ValueError: it counts samples, and `ramp_up` describes no sizes of batches.
        """
        counted = self.rate_unit == "samples"
        total = self.learning_rate.total_steps
        total = total or (self.data.batches.first_sample(self.steps) if counted else self.steps)
        return dataclasses.replace(self.learning_rate, total_steps=total)

    @property
    def counted(self) -> Callable[[RateSchedule], RateSchedule] | None:
        """Makes a schedule of `rate_unit` one of the steps; None where these are the same."""
        if self.rate_unit == "steps":
            return None
        given = self.data.batches.first_steps, self.data.batches.sizes
        return lambda schedule: by_samples(schedule, *given)

    @property
    def reads_rate(self) -> bool:
        """Whether the optimizer takes its rate from `learning_rate`, and has none of its own."""
        own = self.optimizer
        return not (own.name == "adafactor" and own.adafactor.relative_step)

    @property
    def reads_total_steps(self) -> bool:
        """Whether anything goes by the total of `learning_rate`: its rates, or a weight decay."""
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
        """Of how many samples the order of an application is made.

        Raises:
            ValueError: `ramp_up` describes no sizes of batches.
        """
        return self.data.order_samples or self.data.batches.first_sample(self.steps)


if not TYPE_CHECKING:  # which knows the library's own sections
    _GROUP = "functron.sections"
    _found = {name: load_function(at, _GROUP) for name, at in list_plugins(_GROUP).items()}
    TrainConfig = with_sections(TrainConfig, _found)


@overload
def configure(**settings: Any) -> TrainConfig: ...
@overload
def configure(base: C, /, **settings: Any) -> C: ...
def configure(base: Any = None, /, **settings: Any) -> Any:
    """A configuration with settings replaced, at any depth.

        configure(steps=100, mesh="dp=2,tp=2", optimizer={"name": "muon"}, gpt__dropout=0.1)

    Args:
        base: a `TrainConfig`; None: the usual one.
        settings: by the names that options have, ``save_every``; by their paths, with ``__``
            between the parts, ``checkpoint__save_every``; or sections, whole or as mappings of
            what changes. A `model` without an architecture beside it, or a `source`, is a
            preset, and fills its table as `with_model` does.

    Raises:
        TypeError: there are no such settings, of which the nearest are named.
        ValueError: values of another kind, or no such preset.
    """
    base = TrainConfig() if base is None else base
    if "model" in settings and not {*trained_families(), "source"} & settings.keys():
        name, known = settings["model"], list_presets()
        if name not in known:
            refuse("no such model", "model", repr(name), "a preset", nearest(str(name), known))
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
    """The values of all families' fields where this is what is trained."""
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
    """The configuration in a file: what it leaves out has the preset's or default value.

    The file of a run folder is complete. What it leaves out came after the run: a blend there has
    the first order, and text became tokens by the first rules. Where its lora_targets name routed
    experts, which new runs may not, they are here those of what was adapted.

    Args:
        path: a TOML file; YAML where its name ends in .yaml or .yml, of which true, false, null and
            numbers are what YAML 1.2 calls so (``off`` and ``12:30`` are text, ``1e-3`` a number).
        model: a preset that replaces the file's model and its table, such as [gpt].
        precision: a policy for a file that names none, and for the dtypes that it leaves out.
        begun: the run that goes on with it, as it began in what the file leaves out and has the
            tag "kept".
        kind: `TrainConfig`, or one with more sections.
        known_only: leave out tables that are no sections of it, as of a run of a program that has
            more, whose model is all that is asked for.

    Raises:
        ValueError: the file cannot be read, is no TOML or YAML, has unknown keys, values of the
            wrong kind, or describes an impossible model. All unknown keys and wrong kinds are
            listed. Or it is YAML, and the package that reads it is not installed.
    """
    table = nest_table(_table(Path(path)), kind)
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
    """The configuration in nested dicts, as `load` reads it out of the file of this name.

    Settings stand in the table of their section, or at the top by their short names, as all did in
    files of functron 0.1.
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
            fix = nearest(str(preset), list_presets())
            problems.append(Problem("model", repr(preset), "a preset", fix))
    values = read_table(table, base, problems)
    raise_problems(f"cannot use the configuration {name}", problems)
    made = replace_settings(base, values)
    named = made.precision.name if made.precision.name != "auto" else precision
    # the policy fills what the file leaves out, of the model that the file has
    return made if named is None else replace_settings(with_precision(made, named), values)


def _with_kept(
    table: Mapping[str, Any], kept: Mapping[str, Any], kind: type[TrainConfig]
) -> dict[str, Any]:
    """A table with these values, by their names, where it leaves them out."""
    filled = nest_table(kept, kind)
    for name, value in table.items():
        both = isinstance(value, Mapping) and isinstance(filled.get(name), Mapping)
        filled[name] = {**filled[name], **value} if both else value
    return filled


def _first_versions(table: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of a run that began before they had versions."""
    data = table.get("data", {})
    data = data if isinstance(data, Mapping) else {}
    blends = data.get("order", "arithmetic") == "arithmetic" and is_blend(data.get("path", ""))
    return {"text_rules": 1} | ({"blend_order": 1} if blends else {})


def _drop_routed_targets(config: TrainConfig) -> TrainConfig:
    """A run from before targets that name routed experts were refused, with those that it meant."""
    lora, family = config.lora.adapters, config.family
    if lora is None or not family.adapters:
        return config
    targets = drop_routed(lora.targets, family.defs(config.architecture))
    if targets == list(lora.targets):
        return config
    return configure(config, lora_targets=",".join(targets))


def _is_of_run(path: Path) -> bool:
    """Whether this is the configuration of a run that took steps, or saved what it began with."""
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


def _table(path: Path) -> dict[str, Any]:
    """The keys and values in a file."""
    is_yaml = path.suffix in _YAML
    title, kind = "cannot read the configuration", "YAML" if is_yaml else "TOML"
    if is_yaml and path.is_file() and importlib.util.find_spec("yaml") is None:
        fix = "pip install 'functron[yaml]', or write it as TOML"
        refuse(title, "pyyaml", "no such package", f"it, to read {path}", fix)
    try:
        text = path.read_text(encoding="utf-8")
        return _from_yaml(text) if is_yaml else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(title, str(path), reason, f"a readable {kind} file", _another(path, error))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file of YAML, or of JSON, which is YAML too.

    Raises:
        ValueError: it cannot be read, or the package that reads it is not installed.
    """
    if importlib.util.find_spec("yaml") is None:
        fix = "pip install 'functron[yaml]'"
        refuse("cannot read YAML", "pyyaml", "no such package", f"it, to read {path}", fix)
    try:
        return _from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse("cannot read YAML", str(path), reason, "a readable file")


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
