"""``functron plan | recipe | trace | params | schedule``: inspect runs without starting them."""

from __future__ import annotations

import functools
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from functron import apps
from functron.cli.launch import join, leave, start
from functron.cli.options import options_of, parse, value_of, with_names
from functron.cli.process import (
    OutsideError,
    current,
    grow_segments,
    mistakes,
    outside,
    run_guarded,
)
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import (
    Need,
    Needs,
    names_with_tag,
    needs_under,
    never,
    number_problems,
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
from functron.training.checks import PRECISION_NEEDS, TOLD_NEEDS, TRAIN_NEEDS
from functron.training.config import (
    ComputeConfig,
    ParallelismConfig,
    TrainConfig,
    configure,
    dump,
    load,
    starting_config,
)
from functron.training.costs import parameter_table, step_report
from functron.training.data import objective_of
from functron.training.rooms import EXPERT_ROOM
from functron.training.setup import make_setup

if TYPE_CHECKING:
    from functron.apps.planner.machines import Hardware
    from functron.apps.planner.search import (
        Choices,
        SearchResult,
    )
    from functron.apps.planner.sizing import FoundSizes
    from functron.apps.planner.space import (
        Space,
    )

planner: Any = apps.find("planner")
"""The planner, which `run` and `recipes` need; None where it is not installed."""

_SEQ = 2048  # default for models without a longest sequence
_PLAN_SEQ = 8192


@dataclass(frozen=True)
class PlanOptions:
    """Rank parallel configurations of a GPT for N GPUs by a cost model. No GPU is needed.

    Meshes, schedules, microbatches, activation checkpointing, ZeRO, parameter gathering and
    sequence parallelism are searched. Candidates whose traced layers do not fit into memory are
    dropped; the others are ranked by estimated step time. The best ten are printed, each with its
    largest losses of time and a 90% interval of the step time.

    Attributes:
        run: a run folder or config.toml, whose model, batches and optimizer are planned; default:
            the preset of --model.
        gpus: number of GPUs.
        nodes: nodes x GPUs of each, such as 8x8, in place of --gpus: NVLink connects the GPUs of a
            node (of a rack, if it is one), and the network nodes; empty: as the machine says.
        seq: tokens per sample; 0: 8,192, or the model's longest where that is shorter.
        global_batch: samples per step, over all GPUs.
        precision: precision policy, as for functron train; auto: bf16, or float32 on a CPU.
        hardware: name of a known machine, or the path of a TOML file that describes one.
        fix: settings that all candidates have, such as tp=8,pp=16,remat=full: pp, dp, fsdp, cp, ep,
            tp, schedule, chunks, layout (such as first=0,last=0), rows (samples per rank and
            microbatch), microbatches, remat, sequence_parallel, zero, gather, precision, offload.
        at_least: lower bounds of numeric settings, such as microbatches=8,tp=2.
        why: explain why candidates with these settings, such as pp=16,tp=4, are not the best.
        explain: show how the best step's time and memory add up.
        precisions: precision policies to compare, such as bf16,fp8-block; empty: --precision alone.
        top: number of candidates to print.
        tokens: training tokens, for which GPU hours and energy are printed; 0: not printed.
        target_days: find the fewest GPUs, a multiple of --gpus, that train --tokens in so many
            days, and plan for these; 0: plan for --gpus.
        budget: find the most GPUs, a multiple of --gpus, on which --tokens cost no more dollars, or
            refuse what --target-days takes if it costs more; 0: any sum.
        gpu_hour_dollars: the price of a GPU for an hour.
        try_best: run so many of the best candidates for ten steps each on this machine, which must
            be the one planned for, with a process for each GPU; rank again, and fit the machine's
            rates; 0: run none.
        refit: write the machine with rates fitted to the steps of --try to this TOML file, for
            --hardware.
        cpu_seconds: CPU time, after which no more kinds of layers are traced; batches and numbers
            of GPUs beside those given have a third of it, together.
        out: write the best candidate's configuration to this file, for functron train --config.
        model: name of a preset, which sets the architecture.
        gpt: the architecture.
        optimizer: the optimizer.
        expert_room: the rows for which a rank's experts have room, as for functron train: a little
            more times the balanced ones than the fullest rank is expected to get, whose time
            counts; 0: all of all ranks.
        uneven: logical axes of parameters that ranks need not divide, as for functron train; embed
            is added where fsdp does not divide it.
        picture: write step time over memory of the Pareto-optimal candidates to this file, as SVG.
        timeline: write the best step's timeline to this file: .svg, or .json for Perfetto.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    gpus: int = setting(8, least=1)
    nodes: str = ""
    seq: int = setting(0, least=0)
    global_batch: int = setting(1024, least=1)
    precision: str = "auto"
    hardware: str = "h100"
    fix: str = ""
    at_least: str = ""
    why: str = ""
    explain: bool = False
    precisions: str = ""
    top: int = setting(10, least=1)
    tokens: float = setting(0.0, least=0)
    target_days: float = setting(0.0, least=0)
    budget: float = setting(0.0, least=0)
    gpu_hour_dollars: float = setting(0.0, least=0)
    try_best: Annotated[int, tyro.conf.arg(name="try")] = setting(0, least=0)
    refit: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    cpu_seconds: float = 30.0
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    timeline: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    model: str = setting("tiny", "common", box="model")
    gpt: GPTConfig = section(lambda: PRESETS["tiny"], box="model")
    optimizer: OptimizerConfig = section(OptimizerConfig)
    expert_room: float = setting(EXPERT_ROOM, box="model")
    uneven: str = setting("", box="model")


def _is_fixed(options: PlanOptions) -> bool:
    """Whether --fix sets the precision of all candidates."""
    return "precision" in planner.parse_settings(options.fix, "fix")


PLAN_NEEDS: Needs = MappingProxyType({
    "precision": Need(
        lambda c: c.precision == "auto" or not (c.precisions or _is_fixed(c)),
        "a precision that neither --precisions nor --fix sets",
        "leave these out",
    ),
    "precisions": Need(
        lambda c: not _is_fixed(c), "a precision that --fix does not set", "leave it out of --fix"
    ),
    **never(
        "a dtype that follows from the policy of each candidate",
        "set --precision or --precisions",
        "gpt.dtype", "optimizer.fp32_masters", "optimizer.master_bits",
        "optimizer.stochastic_rounding", "optimizer.mu_dtype", "optimizer.nu_dtype",
        "optimizer.grad_dtype", "optimizer.reduce_dtype", "optimizer.loss_scale.initial",
    ),
    **never("a setting of candidates", "add --fix offload=true", "optimizer.offload"),
    "target_days": Need(lambda c: c.tokens > 0, "training tokens", "add --tokens 1e12, say"),
    "budget": Need(
        lambda c: c.tokens > 0 and c.gpu_hour_dollars > 0,
        "training tokens, and the price of a GPU",
        "add --tokens 1e12 --gpu-hour-dollars 2, say",
    ),
    "gpu_hour_dollars": Need(lambda c: c.tokens > 0, "training tokens", "add --tokens 1e12, say"),
    "refit": Need(lambda c: c.try_best > 0, "steps that were tried", "add --try 5"),
    "expert_room": Need(
        lambda c: c.gpt.moe is not None or c.expert_room == EXPERT_ROOM,
        "experts", "choose a model with some",
    ),
    **needs_under("gpt", GPT_NEEDS),
    **needs_under(
        "optimizer",  # loss scales depend on the candidates' precision
        {n: need for n, need in OPTIMIZER_NEEDS.items() if not n.startswith("loss_scale.")},
    ),
})  # fmt: skip
"""Conditions under which options have an effect; those without an entry always have."""


def run(arguments: Sequence[str]) -> int:
    """Print the best candidates, and write the files that were asked for."""
    with mistakes():
        options, config = _parse_plan(arguments)
        fixed = planner.parse_settings(options.fix, "fix")
        least = planner.parse_settings(options.at_least, "at-least", numbers=True)
        asked = planner.parse_settings(options.why, "why")
        options, machine = _find_machine(options, arguments)
        choices = planner.Choices(config, machine)
        more = {"precisions": _parse_precisions(options.precisions)} if options.precisions else {}
        space = choices.space(options.gpus, fixed=fixed, least=least, **more)
        sized = _find_gpus(options, space, choices)
        space = space if sized is None else replace(space, gpus=sized.chosen.gpus)
        if options.try_best:
            planner.check_machine_is_here(choices.machine, space.gpus)
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
        beside = planner.find_neighbours(
            space, choices, found.best[0], cpu_seconds=options.cpu_seconds / 3
        )
    print(_describe_plan(options, choices, space.gpus))
    if sized is not None:
        print(f"\n{sized}")
    print(f"\n{found}")
    for other in beside:
        print(f"\nbetter: {other}")
    if reasons:
        print(f"\nwhy not {reasons}")
    if options.try_best:
        with outside():
            found = _try_best(options, choices, found)
    best = found.best[0].estimate
    if options.explain:
        print(f"\n{best.explain()}")
        estimate = functools.partial(choices.estimate, found.best[0].candidate, exact=True)
        others = [estimate(software=software) for software in planner.OTHERS.values()]
        print(f"\n{planner.compare_software(others)}")
    if options.tokens:
        hours, joules = best.gpu_hours(options.tokens), best.energy_joules(options.tokens)
        about = f"{hours:,.0f} GPU hours, {joules / 3.6e9:,.0f} MWh"
        if options.gpu_hour_dollars:
            about += f", ${hours * options.gpu_hour_dollars:,.0f}"
        print(f"\n{options.tokens:.3g} tokens: {about}")
    with outside():
        _write(options, arguments, choices, found)
    return 0


_TRIAL = f"import sys; from {__name__} import run_trial; sys.exit(run_trial(*sys.argv[1:]))"
"""Python code of each process of a candidate that is tried."""


def _try_best(options: PlanOptions, choices: Choices, found: SearchResult) -> SearchResult:
    """Run the best candidates here; the result with these in the order of their measured times."""
    kind = planner.check_machine_is_here(choices.machine, _mesh_of(found.best[0].candidate).size)
    say = functools.partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="functron-") as folder:
        run = functools.partial(_start_trial, Path(folder), kind)
        try:
            tried = planner.try_best(found.best, choices, options.try_best, run, say=say)
        except RuntimeError as error:
            raise OutsideError(str(error)) from error
    print(f"\n{tried}")
    if options.refit is not None:
        tried.write_machine(options.refit)
        print(f"\nwrote {options.refit}, for --hardware")
    return replace(found, best=tried.best)


def _start_trial(folder: Path, kind: str, candidate: TrainConfig) -> Any:
    """The times of a candidate's steps, by processes of its own.

    Raises:
        RuntimeError: it failed.
        KeyboardInterrupt: the launcher was told to stop.
    """
    config, out = folder / "config.toml", folder / "timing.json"
    out.unlink(missing_ok=True)
    config.write_text(dump(candidate), encoding="utf-8")
    size = _mesh_of(candidate).size
    ending = start(size, ["-c", _TRIAL, str(config), str(out), kind])
    if ending.code and not ending.text:
        raise KeyboardInterrupt
    if ending.code:
        raise RuntimeError(ending.text)
    return planner.Timing(**json.loads(out.read_text(encoding="utf-8")))


def _mesh_of(config: TrainConfig) -> Mesh:
    return Mesh.parse(config.parallelism.mesh)


def run_trial(config: str, out: str, kind: str) -> int:
    """Be a process of a candidate that is tried: rank 0 writes the times of its steps; exit code.

    Args:
        config: the candidate's file.
        out: the file for a `functron.apps.planner.trials.Timing`, as JSON.
        kind: of device.
    """

    def take() -> int:
        grow_segments(kind)
        here, given = current(), load(config)
        mesh, device = join(_mesh_of(given), here, kind)
        timing = planner.time_steps(given, mesh, device)
        if here is None or here.rank == 0:
            Path(out).write_text(json.dumps(timing._asdict()), encoding="utf-8")
        leave()
        return 0

    return run_guarded(take)


def _find_machine(options: PlanOptions, arguments: Sequence[str]) -> tuple[PlanOptions, Hardware]:
    """The options with the number of GPUs, and their machine.

    Raises:
        ValueError: the machine is not known, or its nodes are no such ones.
    """
    machine = planner.hardware(options.hardware)
    if not options.nodes:
        return options, machine
    gpus, machine = planner.divide_nodes(options.nodes, machine)
    given = value_of("--gpus", arguments)
    if given is not None and options.gpus != gpus:
        got, fix = f"{options.gpus} with --nodes {options.nodes}", "leave one of them out"
        refuse("cannot plan this", "gpus", got, f"{gpus}, as the nodes have", fix)
    return replace(options, gpus=gpus), machine


def _find_gpus(options: PlanOptions, space: Space, choices: Choices) -> FoundSizes | None:
    """How many GPUs a deadline or a budget takes; None: neither is given."""
    if not (options.target_days or options.budget):
        return None
    target = planner.Target(
        options.tokens,
        options.target_days or math.inf,
        options.budget or math.inf,
        options.gpu_hour_dollars,
    )
    return planner.find_gpus(space, choices, target, cpu_seconds=options.cpu_seconds / 3)


def _parse_plan(arguments: Sequence[str]) -> tuple[PlanOptions, TrainConfig]:
    """The options, and the run to be planned.

    Raises:
        ValueError: there is no such run, preset or policy, or numbers are out of range.
    """
    name, base = _read_base(arguments)
    own: dict[str, Any] = {}
    if name:
        own = {"seq": base.data.seq, "global_batch": base.data.global_batch}
    default = PlanOptions(
        run=name, precision=base.precision.name, model=base.model, gpt=base.gpt,
        optimizer=base.optimizer, expert_room=base.compute.expert_room or EXPERT_ROOM,
        uneven=base.parallelism.uneven, **own,
    )  # fmt: skip
    options = parse(PlanOptions, arguments, "plan", default, needs=PLAN_NEEDS)
    _check_is_first(options.run, name, "plan")
    if options.model != base.model:
        refuse("cannot plan two models", "model", f"{base.model} and {options.model}", "one")
    longest = options.gpt.max_seq
    _check(options, longest)
    ranks, precision = base.parallelism, value_of("--precision", arguments)
    config = configure(
        base,
        gpt=options.gpt,
        optimizer=options.optimizer,
        seq=options.seq or min(longest, _PLAN_SEQ),
        global_batch=options.global_batch,
        # the search chooses the others; it knows neither vocab_over_pp nor processes
        parallelism=ParallelismConfig(
            context=ranks.context,
            zigzag=ranks.zigzag,
            expert_axes=ranks.expert_axes,
            uneven=options.uneven,
        ),
        remat="none",
        expert_room=options.expert_room if options.gpt.moe is not None else 0.0,
    )
    return options, config if precision is None else configure(config, precision=options.precision)


def _check(options: PlanOptions, longest: int) -> None:
    """Refuse numbers out of range, and names that are unknown."""
    found = [*number_problems(options)]
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
    found += ComputeConfig(expert_room=options.expert_room).problems()
    raise_problems("cannot plan this", found)


def _parse_precisions(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        if name not in POLICIES:
            refuse("cannot plan this", "precisions", repr(name), f"some of {', '.join(POLICIES)}")
    return names


def _describe_plan(options: PlanOptions, choices: Choices, gpus: int) -> str:
    config, machine = choices.config, choices.machine
    calibration = machine.calibration
    if calibration.rows:
        sure = f"calibrated on {calibration.rows} runs of {calibration.software}"
    else:
        sure = f"from data sheets, with the efficiencies of {calibration.kin or 'none'}"
    nodes = f" in nodes of {machine.domain.gpus}" if options.nodes else ""
    return (
        f"{config.title}: {config.data.global_batch} samples of {config.data.seq} tokens a step on "
        f"{gpus} x {machine.name}{nodes} ({sure})"
    )


def _write(
    options: PlanOptions, arguments: Sequence[str], choices: Choices, found: SearchResult
) -> None:
    best = found.best[0]
    if options.out is not None:
        options.out.write_text(
            f"# {shlex.join(['functron', 'plan', *arguments])}\n"
            f"# {choices.machine.name}: {planner.describe_estimate(best.estimate)}\n"
            f"{dump(best.candidate)}",
            encoding="utf-8",
        )
        print(f"\nwrote {options.out}: functron train --config {options.out}")
    if options.picture is not None:
        options.picture.write_text(found.svg(), encoding="utf-8")
    if options.timeline is not None and not best.estimate.lanes:
        print(f"\nno {options.timeline}: the best pipeline has too many actions to draw")
    elif options.timeline is not None and options.timeline.suffix == ".svg":
        options.timeline.write_text(best.estimate.svg(), encoding="utf-8")
    elif options.timeline is not None:
        best.estimate.chrome_trace(options.timeline)


# --- recipes


@dataclass(frozen=True)
class RecipeOptions:
    """List recipes (complete configurations of large runs, made by functron plan), or show one.

    Attributes:
        action: ls lists the recipes; show prints one, for functron train --config.
        name: the recipe to show.
        sbatch: print a Slurm job script for the recipe instead.
    """

    action: tyro.conf.Positional[Annotated[Literal["ls", "show"], tyro.conf.arg(metavar="ls|show")]]
    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[NAME]")]] = ""
    sbatch: bool = False


def recipes(arguments: Sequence[str]) -> int:
    """List the recipes, or print one."""
    options = parse(RecipeOptions, arguments, "recipe")
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


def _find_needs(read: Collection[str]) -> Needs:
    """The conditions that these settings have in training too."""
    tops = {name.partition(".")[0] for name in read}
    named = {n: need for n, need in TRAIN_NEEDS.items() if n in read or n.partition(".")[0] in tops}
    return named | {name: need for name, need in TOLD_NEEDS.items() if name in tops}


def _need_axes(*names: str) -> Need:
    return Need(
        lambda c: any(Mesh.parse(c.parallelism.mesh)[name] > 1 for name in names),
        f"several ranks of {' or '.join(names)}",
        f"add {names[0]}=N to the mesh",
    )


_GPT = Need(lambda c: c.family.name == "gpt", "a GPT", "choose one")
_SPANS = Need(lambda c: objective_of(c).count_targets is not None, "a T5", "choose one")
_BY_SAMPLES = Need(
    lambda c: c.rate_unit == "samples", "rates that count samples", "set rate_unit to samples"
)

PARAMS_NEEDS: Needs = MappingProxyType({
    **_find_needs(_SHAPES),
    "zero": Need(
        lambda c: c.parallelism.zero == 3 and _need_axes("dp").holds(c),
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
"""Conditions under which options change what functron params shows."""

TRACE_NEEDS: Needs = MappingProxyType({
    **_find_needs(_STEPS),
    **PRECISION_NEEDS,
    "zero": Need(
        lambda c: (
            _need_axes("dp", "fsdp").holds(c)
            if c.parallelism.zero == 3
            else _need_axes("dp", "ep_node", "ep", "cp", "ulysses").holds(c)
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
        lambda c: c.lora.rank > 0 and _need_axes("pp").holds(c),
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
"""Conditions under which options change what functron trace shows."""


@dataclass(frozen=True)
class TraceOptions:
    """Show the computation, communication and memory of one rank in a training step. Nothing runs.

    With a pipeline this is shown for each of its ranks, stage by stage. Options that change nothing
    of it are refused.

    Attributes:
        run: a run folder or config.toml, whose settings other options override; default: the preset
            of --model with the longest samples that it takes (--seq; 2048 tokens where it takes
            any), one for each data-parallel rank and microbatch (--global-batch).
        program: print the whole traced program, too (not with pp).
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    program: bool = False
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def trace(arguments: Sequence[str]) -> int:
    """Print cost and memory, and with --program the traced program."""
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
    """Show the parameters of a model, and how a mesh shards them. None are allocated.

    Options that change nothing of it are refused.

    Attributes:
        run: a run folder or config.toml, whose settings other options override; default: the preset
            of --model.
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
    """Draw a pipeline schedule. Forwards, and backwards for inputs and for weights, take one unit
    of time each.

    Attributes:
        name: gpipe, 1f1b, eager-1f1b, interleaved, breadth-first, combined-1f1b, zb-h1, zb-h2, zbv,
            v-min, v-half, dualpipe, dualpipe-half, dualpipev, forward, or the path of a table.
        pp: pipeline ranks; 0: 4, or those of the table.
        microbatches: per step; 0: 8, or those of the table.
        chunks: stages per rank, where the schedule allows several numbers; 0: its default.
        svg: write the drawing to this file.
        table: print the schedule as a table instead, which can be edited and passed as the name.
    """

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    pp: int = 0
    microbatches: int = 0
    chunks: int = 0
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    table: bool = False


def schedule(arguments: Sequence[str]) -> int:
    """Print the drawing or the table."""
    options = parse(ScheduleOptions, arguments, "schedule")
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
    """The options of a command about a run, which the first argument names, or about a preset.

    Args:
        kind: a dataclass with ``run``, a positional argument, ``options``, a `TrainConfig`, and the
            command's own options.
        needs: conditions under which its options have an effect.
        fields: of the `TrainConfig`, where no run is named.

    Raises:
        ValueError: there is no such run or preset, or it cannot be read.
        functron.cli.process.InputError, SystemExit: as `functron.cli.options.parse`.
    """
    arguments = with_names(arguments, options_of(TrainConfig))
    precision = value_of("--precision", arguments)
    run, base = _read_base(arguments, precision=precision, **fields)
    made = parse(kind, arguments, command, kind(run=run, options=base), needs=needs)
    _check_is_first(made.run, run, command)
    return made


def _read_base(arguments: Sequence[str], **fields: Any) -> tuple[str, TrainConfig]:
    """The run that the first argument names, and its configuration; or "", and a preset's."""
    run = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    file = file_of(Path(run)) if run else None
    return run, starting_config(file, model=value_of("--model", arguments), **fields)


def _check_is_first(run: str, first: str, command: str) -> None:
    if run != first:
        title, fix = "cannot tell which run this is about", f"functron {command} {run} ..."
        refuse(title, "run", repr(run), "the first argument", fix)


def file_of(path: Path) -> Path:
    """The configuration file of a run folder; any other path as it is."""
    if not path.is_dir():
        return path
    if not run_folder.is_run(path):
        near = records.nearest(path)
        fix = "" if near is None else f"name {near}, which is one"
        wanted = f"a run folder, or a file like its {run_folder.CONFIG}"
        refuse("no such run", str(path), "a folder without a run", wanted, fix)
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
