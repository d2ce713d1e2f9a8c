"""``functron plan | recipe | trace | params | schedule``: runs before they begin; none begins."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from functron import apps
from functron.cli.options import options_of, parse, with_names
from functron.cli.process import mistakes, outside
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import (
    Need,
    Needs,
    always,
    names_with_tag,
    needs_under,
    never,
    section,
    setting,
    settings_of,
)
from functron.models.config import GPT_NEEDS, GPTConfig
from functron.models.gpt import PRESETS
from functron.optim import OptimizerConfig
from functron.optim.config import OPTIMIZER_NEEDS
from functron.pipeline import Schedule, make
from functron.precision import POLICIES
from functron.spmd import DATA_AXES, Mesh
from functron.training import records, run_folder
from functron.training.checks import PRECISION_NEEDS, TOLD_NEEDS, TRAIN_NEEDS, told_in
from functron.training.config import (
    ParallelismConfig,
    TrainConfig,
    configure,
    dump,
    starting_config,
)
from functron.training.costs import parameter_table, step_report
from functron.training.setup import make_setup

if TYPE_CHECKING:
    from functron.apps.planner.search import Choices, SearchResult

planner: Any = apps.find("planner")
"""Of `run` and `recipes`, which are no commands without it; the others do without."""

_SEQ = 2048  # of models that take sequences of any length


@dataclass(frozen=True)
class PlanOptions:
    """Find the fastest ways to train a GPT on so many GPUs, without one of them.

    Meshes, schedules, microbatches, remat, ZeRO, gathering and sequence parallelism are searched:
    what does not fit into memory is left out, by traces of the model's layers, and the others are
    ranked by the time of a step on the machine. The best ten are printed, each with what it loses
    most time by, and an interval that holds the time of nine runs in ten.

    Attributes:
        run: a run folder, or a file like its config.toml, whose model, samples and optimizer are
            planned, and which what is found is written into; none: a preset, by --model.
        gpus: how many.
        seq: tokens per sample; 0: as many as the model takes.
        global_batch: samples per step, over all GPUs.
        precision: the policy, as of functron train; auto: bf16, and on a CPU float32.
        hardware: a machine by name, or a TOML file of one.
        fix: settings that every candidate has, such as tp=8,pp=16,remat=full: pp, dp, fsdp, cp, ep,
            tp, schedule, chunks, rows (samples of a rank in a microbatch), microbatches, remat,
            sequence_parallel, zero, gather, precision, offload.
        at_least: settings that are at least so large, such as microbatches=8,tp=2.
        why: say why candidates with these settings, such as pp=16,tp=4, are not the best.
        explain: show what makes up the time and the memory of the best, figure by figure.
        precisions: policies to try beside one another, such as bf16,fp8-block; empty: --precision.
        top: how many to print.
        tokens: how many are to be trained on, for GPU hours and energy; 0: leave these out.
        cpu_seconds: of this process, after which no further kinds of layers are traced.
        out: a file for the configuration of the best, which functron train --config runs as it is.
        model: name of a preset; it fills the table of its architecture.
        gpt: the architecture.
        optimizer: the optimizer.
        picture: a file for the front of memory and time, as SVG.
        timeline: a file for the ranks' work over time: .svg, or .json for Perfetto.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    gpus: int = 8
    seq: int = 0
    global_batch: int = 1024
    precision: str = "auto"
    hardware: str = "h100"
    fix: str = ""
    at_least: str = ""
    why: str = ""
    explain: bool = False
    precisions: str = ""
    top: int = 10
    tokens: float = 0.0
    cpu_seconds: float = 30.0
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    timeline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    model: str = setting("tiny", "common", box="model")
    gpt: GPTConfig = section(lambda: PRESETS["tiny"], box="model")
    optimizer: OptimizerConfig = section(OptimizerConfig)


def _is_fixed(options: PlanOptions) -> bool:
    """Whether all candidates have a policy that --fix names."""
    return "precision" in planner.parse_settings(options.fix, "fix")


_OF_POLICIES = tuple(
    f"optimizer.{name}" for name in OPTIMIZER_NEEDS if name.startswith("loss_scale.")
)
"""Options that have an effect under some policies, which are those of the candidates."""

PLAN_NEEDS: Needs = MappingProxyType({
    **always(
        "run", "gpus", "seq", "global_batch", "hardware", "fix", "at_least", "why", "explain",
        "top", "tokens", "cpu_seconds", "out", "picture", "timeline", "model",
    ),
    "precision": Need(
        lambda c: c.precision == "auto" or not (c.precisions or _is_fixed(c)),
        "policies that neither --precisions nor --fix names",
        "leave these out",
    ),
    "precisions": Need(
        lambda c: not _is_fixed(c), "policies that --fix does not name", "leave precision out of it"
    ),
    **never(
        "a dtype that follows from the policy of each candidate",
        "name a policy: --precision, or several: --precisions",
        "gpt.dtype", "optimizer.fp32_masters", "optimizer.master_bits",
        "optimizer.stochastic_rounding", "optimizer.mu_dtype", "optimizer.nu_dtype",
        "optimizer.grad_dtype", "optimizer.reduce_dtype", "optimizer.loss_scale.initial",
    ),
    **never("a setting of candidates", "add --fix offload=true", "optimizer.offload"),
    **needs_under("gpt", GPT_NEEDS),
    **needs_under("optimizer", OPTIMIZER_NEEDS),
    **always("gpt", "optimizer", *_OF_POLICIES),
})  # fmt: skip
"""The needs of options, for them to have an effect. Others of a model and an optimizer are in what
is planned, or in the file of it that functron train runs."""


def run(arguments: Sequence[str]) -> int:
    """Print the best ways; write what was asked for."""
    with mistakes():
        options, config = _parsed(arguments)
        fixed = planner.parse_settings(options.fix, "fix")
        least = planner.parse_settings(options.at_least, "at-least", numbers=True)
        asked = planner.parse_settings(options.why, "why")
        choices = planner.Choices(config, planner.hardware(options.hardware))
        more = {"precisions": _precisions(options)} if options.precisions else {}
        space = choices.space(options.gpus, fixed=fixed, least=least, **more)
        search = functools.partial(
            planner.search, model=choices, top=options.top, cpu_seconds=options.cpu_seconds
        )
        found = search(space)
        if not found.best and "offload" not in fixed:
            moved = search(replace(space, fixed={**fixed, "offload": True}))
            found = moved if moved.best else found
        if not found.best:
            raise ValueError(planner.explain_misfit(found))
        reasons = planner.why(found, asked, space, choices) if asked else ""
    print(_title(options, choices))
    print(f"\n{found}")
    if reasons:
        print(f"\nwhy not {reasons}")
    best = found.best[0].estimate
    if options.explain:
        print(f"\n{best.explain()}")
    if options.tokens:
        hours, joules = best.gpu_hours(options.tokens), best.energy_joules(options.tokens)
        about = f"{hours:,.0f} GPU hours, {joules / 3.6e9:,.0f} MWh"
        print(f"\n{options.tokens:.3g} tokens: {about}")
    with outside():
        _write(options, arguments, choices, found)
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[PlanOptions, TrainConfig]:
    """The options, and the run that they are about.

    Raises:
        ValueError: no such run, preset or policy, or numbers that are none.
    """
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    model, precision = value_of("--model", arguments), value_of("--precision", arguments)
    base = starting_config(file_of(Path(name)) if name else None, model=model)
    own: dict[str, Any] = {}
    if name:
        own = {"seq": base.data.seq, "global_batch": base.data.global_batch}
    default = PlanOptions(
        run=name, precision=base.precision.name, model=base.model, gpt=base.gpt,
        optimizer=base.optimizer, **own,
    )  # fmt: skip
    options = parse(PlanOptions, arguments, "plan", default, needs=PLAN_NEEDS)
    if options.run != name:
        title, fix = "cannot tell which run this is about", f"functron plan {options.run} ..."
        refuse(title, "run", repr(options.run), "the first argument", fix)
    if options.model != base.model:
        refuse("cannot plan two models", "model", f"{base.model} and {options.model}", "one")
    longest = getattr(base.architecture, "max_seq", 2048)
    _check(options, longest)
    ranks = base.parallelism
    config = configure(
        base,
        gpt=options.gpt,
        optimizer=options.optimizer,
        seq=options.seq or longest,
        global_batch=options.global_batch,
        # the search finds the others, and has no place for vocab_over_pp and processes
        parallelism=ParallelismConfig(
            context=ranks.context, zigzag=ranks.zigzag, expert_axes=ranks.expert_axes
        ),
        remat="none",
    )
    return options, config if precision is None else configure(config, precision=options.precision)


def _check(options: PlanOptions, longest: int) -> None:
    """Raise for numbers that are none."""
    least = {"gpus": 1, "top": 1, "global_batch": 1, "seq": 0}
    found = [
        Problem(name, str(getattr(options, name)), f"at least {smallest}")
        for name, smallest in least.items()
        if getattr(options, name) < smallest
    ]
    if options.seq > longest:
        fix = "shorten the samples, or raise it: --gpt.max-seq"
        found.append(Problem("seq", str(options.seq), f"at most gpt.max_seq={longest}", fix))
    if options.precision not in ("auto", *POLICIES):
        fix = nearest(options.precision, POLICIES)
        found.append(Problem("precision", repr(options.precision), "a policy", fix))
    if not options.cpu_seconds > 0:
        found.append(Problem("cpu_seconds", f"{options.cpu_seconds:g}", "above 0"))
    if options.timeline is not None and options.timeline.suffix not in (".svg", ".json"):
        wanted = "a name that ends in .svg or .json"
        found.append(Problem("timeline", str(options.timeline), wanted))
    raise_problems("cannot plan this", found)


def _precisions(options: PlanOptions) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in options.precisions.split(","))))
    for name in names:
        if name not in POLICIES:
            refuse("cannot plan this", "precisions", repr(name), f"some of {', '.join(POLICIES)}")
    return names


def _title(options: PlanOptions, choices: Choices) -> str:
    config, machine = choices.config, choices.machine
    calibration = machine.calibration
    if calibration.rows:
        sure = f"calibrated on {calibration.rows} runs of {calibration.software}"
    else:
        sure = f"from data sheets, with the efficiencies of {calibration.kin or 'none'}"
    return (
        f"{config.title}: {config.data.global_batch} samples of {config.data.seq} tokens a step on "
        f"{options.gpus} x {machine.name} ({sure})"
    )


def _write(
    options: PlanOptions, arguments: Sequence[str], choices: Choices, found: SearchResult
) -> None:
    """The files that were asked for."""
    best = found.best[0]
    if options.out is not None:
        options.out.write_text(
            f"# {shlex.join(['functron', 'plan', *arguments])}\n"
            f"# {planner.describe_best(found, choices.machine)}\n"
            f"{dump(best.candidate)}",
            encoding="utf-8",
        )
        print(f"\nwrote {options.out}: functron train --config {options.out}")
    if options.picture is not None:
        options.picture.write_text(found.svg(), encoding="utf-8")
    if options.timeline is not None and not best.estimate.lanes:
        print(f"\nno {options.timeline}: the pipeline of the best has too many actions to draw")
    elif options.timeline is not None and options.timeline.suffix == ".svg":
        options.timeline.write_text(best.estimate.svg(), encoding="utf-8")
    elif options.timeline is not None:
        best.estimate.chrome_trace(options.timeline)


# --- recipes


@dataclass(frozen=True)
class RecipeOptions:
    """Show the recipes, complete configurations of large runs that functron plan has made; or one.

    Attributes:
        action: ls lists them; show prints one, as functron train --config reads it.
        name: of the recipe to show.
        sbatch: print the Slurm script that fits it in its place.
    """

    action: tyro.conf.Positional[Annotated[Literal["ls", "show"], tyro.conf.arg(metavar="ls|show")]]
    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[NAME]")]] = ""
    sbatch: bool = False


RECIPE_NEEDS: Needs = MappingProxyType(always("action", "name", "sbatch"))
"""The needs of options, for them to have an effect. `recipes` refuses those that ls has no use
for."""


def recipes(arguments: Sequence[str]) -> int:
    """List the recipes, or print one."""
    options = parse(RecipeOptions, arguments, "recipe", needs=RECIPE_NEEDS)
    with mistakes():
        if options.action == "ls":
            if options.name or options.sbatch:
                got = options.name or "--sbatch"
                refuse("recipe ls lists all", "name", repr(got), "nothing", "functron recipe show")
            print(planner.list_recipes())
            return 0
        if not options.name:
            title = "which recipe is to be shown"
            refuse(title, "name", "nothing", f"one of {', '.join(planner.RECIPES)}")
        text = planner.read_recipe(options.name)
        print(planner.make_job_script(options.name) if options.sbatch else text, end="")
    return 0


# --- one run

_DRY = "see functron train --dry-run, which takes all options of a run"
_SHAPES, _STEPS = names_with_tag(TrainConfig, "shapes"), names_with_tag(TrainConfig, "step")
_NAMES = tuple(each.name for each in settings_of(TrainConfig))


def _of(read: Collection[str]) -> Needs:
    """Of these settings, the needs that they have in training too."""
    tops = {name.partition(".")[0] for name in read}
    named = {n: need for n, need in TRAIN_NEEDS.items() if n in read or n.partition(".")[0] in tops}
    told = {name: told_in(name) for name in TOLD_NEEDS if name in tops}
    return {**always(*(n for n in read if n not in (*named, *told))), **named, **told}


def _axes(*names: str) -> Need:
    """The need of settings for ranks of any of these axes."""
    return Need(
        lambda c: any(Mesh.parse(c.parallelism.mesh)[name] > 1 for name in names),
        f"several ranks of {' or '.join(names)}",
        f"add {names[0]}=N to the mesh",
    )


_GPT = Need(lambda c: c.family.name == "gpt", "a GPT", "choose one")
_SPANS = Need(lambda c: c.family.objective == "spans", "a T5", "choose one")
_BY_SAMPLES = Need(
    lambda c: c.rate_unit == "samples", "rates that count samples", "set rate_unit to samples"
)

PARAMS_NEEDS: Needs = MappingProxyType({
    **always("run"),
    **_of(_SHAPES),
    "zero": Need(
        lambda c: c.parallelism.zero == 3 and _axes("dp").holds(c),
        "parameters that ranks divide",
        "set it to 3, and add dp=N to the mesh",
    ),
    "products": Need(
        lambda c: c.precision.recipe is not None and c.precision.recipe.scaling == "delayed",
        "products that remember magnitudes",
        "choose fp8-delayed",
    ),
    **never(
        "a setting of what parameters there are",
        _DRY,
        *(name for name in _NAMES if name not in _SHAPES),
    ),
})  # fmt: skip
"""The needs of options, for them to have an effect on the parameters that functron params shows."""

TRACE_NEEDS: Needs = MappingProxyType({
    **always("run", "program"),
    **_of(_STEPS),
    **PRECISION_NEEDS,
    "zero": Need(
        lambda c: (
            _axes("dp", "fsdp").holds(c)
            if c.parallelism.zero == 3
            else _axes("dp", "ep", "cp", "ulysses").holds(c)
        ),
        "several ranks that hold the same",
        "add dp=N to the mesh",
    ),
    "products": _GPT,
    "loss_chunk_tokens": Need(
        lambda c: _GPT.holds(c) and not c.gpt.logit_cap, "a GPT whose logits have no cap",
        "choose one",
    ),
    "nproc": Need(
        lambda c: c.lora.rank > 0 and _axes("pp").holds(c),
        "stages of a pipeline that train adapters",
        _DRY,
    ),
    **{
        name: Need(lambda c: c.limits_updates, "skip, of which a step itself knows", _DRY)
        for name in ("anomalies.on_spike",)
        if name in _NAMES
    },
    **dict.fromkeys(("mask_documents", "pack"), _GPT),
    **dict.fromkeys(("mask_rate", "mean_span"), _SPANS),
    **dict.fromkeys(("ramp_up", "earlier_batches"), _BY_SAMPLES),
    **never(
        "a setting of what a step computes, sends or holds",
        _DRY,
        *(name for name in _NAMES if name not in _STEPS),
    ),
})  # fmt: skip
"""The needs of options, for them to have an effect on what functron trace shows of a step."""


@dataclass(frozen=True)
class TraceOptions:
    """Show what one rank computes, sends and holds in a training step. Nothing is run.

    Of a pipeline it is what each of its ranks computes, hands on and holds, stage by stage. Options
    of a run that change none of it are refused.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model, with the longest samples that it takes (--seq), or 2048 tokens
            where it takes any, and one of them for each data-parallel rank and microbatch
            (--global-batch).
        program: print the whole program as well (not with pp).
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    program: bool = False
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def trace(arguments: Sequence[str]) -> int:
    """Print cost and memory, and the program where that is asked for."""
    with mistakes():
        options = _parse(TraceOptions, arguments, "trace", TRACE_NEEDS, seq=0, global_batch=0)
        config: TrainConfig = options.options
        mesh = Mesh.parse(config.parallelism.mesh)
        data_ranks = math.prod(mesh[axis] for axis in DATA_AXES)
        config = configure(
            config,
            seq=config.data.seq or getattr(config.architecture, "max_seq", _SEQ),
            global_batch=config.data.global_batch or data_ranks * config.parallelism.microbatches,
        )
        text = step_report(make_setup(config, mesh), program=options.program)
    print(text)
    return 0


@dataclass(frozen=True)
class ParamsOptions:
    """Show the parameters of a model, and how a mesh splits them. No memory is needed for them.

    Options of a run that change none of it are refused.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def params(arguments: Sequence[str]) -> int:
    """Print the table."""
    with mistakes():
        config: TrainConfig = _parse(ParamsOptions, arguments, "params", PARAMS_NEEDS).options
        print(parameter_table(make_setup(config, Mesh.parse(config.parallelism.mesh))))
    return 0


@dataclass(frozen=True)
class ScheduleOptions:
    """Draw a pipeline schedule: who computes what when, where forwards, and backwards for inputs
    and for weights, take a unit of time each.

    Attributes:
        name: gpipe, 1f1b, eager-1f1b, interleaved, breadth-first, combined-1f1b, zb-h1, zb-h2, zbv,
            v-min, v-half, dualpipe, dualpipev, forward, or the file of a table.
        pp: ranks; 0: 4, or those of the table.
        microbatches: per step; 0: 8, or those of the table.
        chunks: stages per rank, where the schedule lets choose; 0: what it has by default.
        svg: write the drawing into this file.
        table: print the table instead, as a file that can be edited and given as the name.
    """

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    pp: int = 0
    microbatches: int = 0
    chunks: int = 0
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    table: bool = False


SCHEDULE_NEEDS: Needs = MappingProxyType(
    always("name", "pp", "microbatches", "chunks", "svg", "table")
)
"""The needs of options, for them to have an effect. `functron.pipeline.make` refuses counts that a
schedule does not have."""


def schedule(arguments: Sequence[str]) -> int:
    """Print the drawing or the table."""
    options = parse(ScheduleOptions, arguments, "schedule", needs=SCHEDULE_NEEDS)
    with mistakes():
        own = Schedule.load(options.name) if Path(options.name).is_file() else None
        ranks, microbatches = (own.num_ranks, own.num_microbatches) if own else (4, 8)
        ranks, microbatches = options.pp or ranks, options.microbatches or microbatches
        made = make(options.name, ranks, microbatches, options.chunks or None)
        if options.svg is not None:
            options.svg.write_text(made.simulate().svg())
    print(made if options.table else schedule_report(made), end="")
    return 0


def _parse(kind: Any, arguments: Sequence[str], command: str, needs: Needs, **fields: Any) -> Any:
    """The options of a command: of the run that the first argument names, or of a preset.

    Args:
        kind: a dataclass with ``run``, a positional argument, ``options``, a `TrainConfig`, and
            what the command takes besides; options override those of the run.
        arguments: as they were given. A run comes first.
        command: its name.
        needs: of its options.
        fields: of the `TrainConfig`, where no run is named.

    Raises:
        ValueError: there is no such run or preset, or it cannot be read.
        functron.cli.process.InputError, SystemExit: as `functron.cli.options.parse`.
    """
    arguments = with_names(arguments, options_of(TrainConfig))
    run = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    model = value_of("--model", arguments)
    file, precision = file_of(Path(run)) if run else None, value_of("--precision", arguments)
    base = starting_config(file, model=model, precision=precision, **fields)
    default = kind(run=run, options=base)
    made = parse(kind, arguments, command, default, needs=needs)
    if made.run != run:
        title, fix = "cannot tell which run this is about", f"functron {command} {made.run} ..."
        refuse(title, "run", repr(made.run), "the first argument", fix)
    return made


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of an option; None: it has none, or the parser will say what is wrong."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if word == option and following:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def file_of(path: Path) -> Path:
    """The file that has the options of a run."""
    if not path.is_dir():
        return path
    if not run_folder.is_run(path):
        near = records.nearest(path)
        fix = "" if near is None else f"name {near}, which is one"
        wanted = f"a run folder, or a file like its {run_folder.CONFIG}"
        refuse("no such run", str(path), "a folder where no run is", wanted, fix)
    return path / run_folder.CONFIG


def schedule_report(schedule: Schedule) -> str:
    """The Gantt chart of a schedule, its bubble and its live activations, as text.

    F, I and W take 1 each, B 2.
    """
    timeline = schedule.simulate()
    each = [schedule.peak_live(rank) for rank in range(schedule.num_ranks)]
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    lines = [
        f"{schedule.name}: {schedule.num_ranks} ranks{chunks}, "
        f"{schedule.num_microbatches} microbatches",
        "",
        timeline.gantt(),
        "",
        f"bubble            {timeline.bubble_fraction:.1%} of the ranks' time",
        f"live activations  {' '.join(map(str, each))}: the most per rank, of one microbatch "
        "and stage each",
    ]
    return "\n".join(lines) + "\n"
