"""``functron plan | recipe``: the fastest ways to run a model on so many GPUs, and some to keep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import tyro

from functron.cli.inspect import file_of, value_of
from functron.cli.options import parse
from functron.cli.process import mistakes, outside
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.models.config import GPTConfig
from functron.models.gpt import PRESETS
from functron.optim import OptimizerConfig
from functron.plan.hardware import hardware
from functron.plan.search import Found, misfit, parse_settings, search, why
from functron.precision import POLICIES
from functron.training.config import TrainConfig, dump, starting_config
from functron.training.planning import (
    RECIPES,
    Choices,
    job_script,
    recipe,
    recipe_table,
)

_BOXES = MappingProxyType({"model": ("model", "gpt"), "optimizer": ("optimizer",)})
_COMMON = frozenset({"model", "optimizer.name", "optimizer.mu_dtype", "optimizer.nu_dtype"})


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
    model: str = "tiny"
    gpt: GPTConfig = field(default_factory=lambda: PRESETS["tiny"])
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def run(arguments: Sequence[str]) -> int:
    """Print the best ways; write what was asked for."""
    with mistakes():
        options, config = _parsed(arguments)
        fixed = parse_settings(options.fix, "fix")
        least = parse_settings(options.at_least, "at-least", numbers=True)
        asked = parse_settings(options.why, "why")
        choices = Choices(config, hardware(options.hardware))
        more = {"precisions": _precisions(options)} if options.precisions else {}
        space = choices.space(options.gpus, fixed=fixed, least=least, **more)
        found = search(space, choices, top=options.top, cpu_seconds=options.cpu_seconds)
        if not found.best and "offload" not in fixed:
            inside = replace(space, fixed={**fixed, "offload": True})
            moved = search(inside, choices, top=options.top, cpu_seconds=options.cpu_seconds)
            found = moved if moved.best else found
        if not found.best:
            raise ValueError(misfit(found))
        reasons = why(found, asked, space, choices) if asked else ""
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
        own = {"seq": base.seq, "global_batch": base.global_batch}
    default = PlanOptions(
        run=name, precision=base.precision, model=base.model, gpt=base.gpt,
        optimizer=base.optimizer, **own,
    )  # fmt: skip
    options = parse(PlanOptions, arguments, "plan", default, boxes=_BOXES, common=_COMMON)
    if options.run != name:
        title, fix = "cannot tell which run this is about", f"functron plan {options.run} ..."
        refuse(title, "run", repr(options.run), "the first argument", fix)
    if options.model != base.model:
        refuse("cannot plan two models", "model", f"{base.model} and {options.model}", "one")
    longest = getattr(base.architecture, "max_seq", 2048)
    _check(options, longest)
    config = replace(
        base,
        gpt=options.gpt,
        optimizer=options.optimizer,
        seq=options.seq or longest,
        global_batch=options.global_batch,
        **{name: getattr(TrainConfig, name) for name in _SEARCHED},
    )
    return options, config if precision is None else replace(config, precision=options.precision)


_SEARCHED = (
    "mesh", "microbatches", "schedule", "chunks", "layout", "remat", "sequence_parallel", "zero",
    "gather", "nproc", "vocab_over_pp",
)  # fmt: skip
"""What the search finds in place of a run's own, or has no place for."""


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
        f"{config.title}: {config.global_batch} samples of {config.seq} tokens a step on "
        f"{options.gpus} x {machine.name} ({sure})"
    )


def _write(options: PlanOptions, arguments: Sequence[str], choices: Choices, found: Found) -> None:
    """The files that were asked for."""
    best = found.best[0]
    if options.out is not None:
        options.out.write_text(
            f"# {shlex.join(['functron', 'plan', *arguments])}\n"
            f"# {summary(choices, found)}\n{dump(choices.configured(best.candidate))}",
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


def summary(choices: Choices, found: Found) -> str:
    """The best in a line."""
    estimate = found.best[0].estimate
    low, high = estimate.interval
    return (
        f"{choices.machine.name}: {estimate.step_seconds:.3g} s a step "
        f"({low:.3g} to {high:.3g}), MFU {estimate.mfu:.1%}, "
        f"{estimate.memory_bytes / 2**30:.1f} GiB of the fullest rank"
    )


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


def recipes(arguments: Sequence[str]) -> int:
    """List the recipes, or print one."""
    options = parse(RecipeOptions, arguments, "recipe")
    with mistakes():
        if options.action == "ls":
            if options.name or options.sbatch:
                got = options.name or "--sbatch"
                refuse("recipe ls lists all", "name", repr(got), "nothing", "functron recipe show")
            print(recipe_table())
            return 0
        if not options.name:
            title = "which recipe is to be shown"
            refuse(title, "name", "nothing", f"one of {', '.join(RECIPES)}")
        text = recipe(options.name)
        print(job_script(options.name) if options.sbatch else text, end="")
    return 0
