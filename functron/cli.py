"""The command line: ``functron train | sample | params | trace | schedule``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro

from functron import checkpoint, launch, random, tree
from functron.config import TrainConfig, load, validate, with_model
from functron.errors import nearest
from functron.loop import Outcome, exit_code
from functron.models import gpt
from functron.params import abstract_params, num_params, param_specs
from functron.pipeline import Schedule, make
from functron.sample import generate
from functron.spmd import DATA_AXES, Mesh
from functron.spmd.spec import local_shape
from functron.stage_costs import pipeline_cost
from functron.train import Run, prepare, run_folder, step_program, train

USAGE = """usage: functron COMMAND [OPTIONS]

  train     train a language model; without options, a small one on this Python's own text
  sample    continue a prompt with a trained model
  params    show the parameters of a model, and how a mesh splits them
  trace     show what one rank of a mesh computes, sends and holds in a training step
  schedule  draw a pipeline schedule, with its bubble and its live activations

functron COMMAND --help lists the options.
"""

COMMANDS = ("train", "sample", "params", "trace", "schedule")


@dataclass(frozen=True)
class TrainOptions:
    """Train a language model.

    Attributes:
        config: a TOML file of these options, such as the config.toml of a run folder; options
            given here override it.
    """

    config: Path | None = None
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with a trained model.

    Attributes:
        run: the run folder that training left.
        prompt: the text to continue.
        tokens: how many tokens (bytes) to add.
        temperature: 1 samples from the model's distribution, below 1 from its likelier part, 0
            takes the likeliest.
        seed: of the draws.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Path]
    prompt: str
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class ParamsOptions:
    """Show the parameters of a model, and how a mesh splits them. No memory is needed for them.

    Attributes:
        model: name of a preset.
        mesh: axes and sizes, such as dp=2,tp=4; empty: one rank.
    """

    model: str = "tiny"
    mesh: str = ""


@dataclass(frozen=True)
class TraceOptions:
    """Show what one rank computes, sends and holds in a training step. Nothing is run.

    Attributes:
        model: name of a preset.
        mesh: axes and sizes, such as dp=64,tp=8; empty: one rank.
        seq: tokens per sample; 0: the longest that the model takes.
        global_batch: samples per step over all ranks; 0: one per data-parallel rank and microbatch.
        microbatches: parts of each rank's batch, one after another.
        schedule: who computes which microbatch when, where the mesh has pp; then what each rank of
            the pipeline computes, hands on and holds is shown, stage by stage.
        chunks: stages per pipeline rank; 0: what the schedule is made for.
        layout: which stage has which layers, as in functron train.
        vocab_over_pp: divide the vocabulary among the ranks of the pipeline, as in functron train.
        sequence_parallel: split the residual stream's sequence over tp.
        remat: what backward recomputes, as in functron train.
        program: print the whole program as well (not with pp).
    """

    model: str = "tiny"
    mesh: str = ""
    seq: int = 0
    global_batch: int = 0
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    layout: str = ""
    vocab_over_pp: bool = False
    sequence_parallel: bool = False
    remat: gpt.Remat = "none"
    program: bool = False


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

    name: tyro.conf.Positional[str]
    pp: int = 0
    microbatches: int = 0
    chunks: int = 0
    svg: Path | None = None
    table: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    0 is success, 2 a mistake in what was asked for, 1 any other failure, 128 + n the end by signal
    n after saving.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if given else 2
    command, *rest = given
    if command not in COMMANDS:
        print(f"functron: {command!r}: {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    programs = {
        "train": _train,
        "sample": _sample,
        "params": _params,
        "trace": _trace,
        "schedule": _schedule,
    }
    program = programs[command]
    return launch.guarded(lambda: program(rest))


def parse_train(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that these options ask for: defaults, preset, file, options, in this order.

    A --model among the options replaces the architecture of the file.

    Raises:
        ValueError: an unknown preset, or what `functron.config.load` raises.
        SystemExit: options that do not exist or do not parse (code 2), or --help (code 0).
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--model")
    early, _ = first.parse_known_args(arguments)
    if early.config is not None:
        base = load(early.config, model=early.model)
    else:
        base = with_model(TrainConfig(), early.model) if early.model else TrainConfig()
    return tyro.cli(
        TrainOptions,
        args=arguments,
        default=TrainOptions(early.config, base),
        prog="functron train",
        config=(tyro.conf.AvoidSubcommands,),
    ).options


def device_type(name: str, processes: int = 1) -> str:
    """ "cpu" or "cuda" for the option --device and so many processes on this machine.

    Raises:
        ValueError: cuda is asked for and there is none, or fewer GPUs than processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got cuda; wanted a device of this machine; fix: --device cpu")
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"nproc: got {processes} for {torch.cuda.device_count()} GPUs; wanted a GPU each; "
            "fix: simulate the mesh (--nproc 0), or --device cpu"
        )
    return kind


def _train(arguments: list[str]) -> int:
    here = launch.process()
    with launch.mistakes():
        config = parse_train(arguments)
        validate(config, processes=here.world_size if here else None)
        kind = device_type(config.device, config.nproc)
    if here is None and config.nproc:
        return launch.launch(config.nproc, ["-m", "functron", "train", *arguments])
    with launch.mistakes():
        run, out = _assemble(config, here, kind)
    main_rank = here is None or here.rank == 0
    if main_rank:
        print("\n".join(_introduction(run, here)), flush=True)
    outcome = train(run, out)
    launch.leave()
    if main_rank:
        print("\n".join(_conclusion(outcome, out)), flush=True)
    return exit_code(outcome.stopped_by)


def _assemble(config: TrainConfig, here: launch.Process | None, kind: str) -> tuple[Run, Path]:
    mesh = Mesh.parse(config.mesh)
    if here is None:
        return prepare(config, mesh, kind), run_folder(config)
    bound, device = launch.join(mesh, here, kind)
    run = prepare(config, bound, device)
    chosen = [str(run_folder(config)) if here.rank == 0 else None]
    dist.broadcast_object_list(chosen, device=device)
    return run, Path(str(chosen[0]))


def _introduction(run: Run, here: launch.Process | None) -> list[str]:
    config, text = run.config, run.text
    name = config.data or "this Python's documentation and standard library"
    skipped = f", {text.num_skipped} files skipped (not text)" if text.num_skipped else ""
    lines = [
        f"model  {config.model}: {num_params(gpt.defs(config.gpt)):,} parameters",
        f"data   {name}: {text.num_tokens:,} bytes in {text.num_documents} documents{skipped}",
    ]
    if here is not None:
        lines.append(f"mesh   {config.mesh or 'one rank'}: {here.world_size} processes")
    elif run.mesh.size > 1:
        lines.append(
            f"mesh   {config.mesh}: {run.mesh.size} ranks simulated in this process "
            f"(--nproc {run.mesh.size} starts processes)"
        )
    return lines


def _conclusion(outcome: Outcome, out: Path) -> list[str]:
    first, last = outcome.history[0], outcome.history[-1]
    done = f"stopped after step {last['step']}" if outcome.stopped_by else "done"
    return [
        f"{done}: loss {first['loss']:.3f} -> {last['loss']:.3f}; the run is in {out}",
        f"try it: functron sample {out} --prompt 'def '",
    ]


def _sample(arguments: list[str]) -> int:
    options = tyro.cli(SampleOptions, args=arguments, prog="functron sample")
    with launch.mistakes():
        device = device_type(options.device)
        config = load(options.run / "config.toml")
        path = checkpoint.latest(options.run / "checkpoints")
        like = {"params": abstract_params(gpt.defs(config.gpt))}
        params = tree.map(lambda leaf: leaf.to(device), checkpoint.restore(path, like)["params"])
        prompt = torch.tensor([list(options.prompt.encode())], dtype=torch.int64, device=device)
        key = random.key(options.seed).to(device)
        tokens = generate(
            params, config.gpt, prompt, options.tokens, temperature=options.temperature, key=key
        )
    # a model may have more ids than there are bytes
    print(bytes(t for t in tokens[0].tolist() if t < 256).decode(errors="replace"))
    return 0


def _params(arguments: list[str]) -> int:
    options = tyro.cli(ParamsOptions, args=arguments, prog="functron params")
    with launch.mistakes():
        print(parameter_table(options.model, Mesh.parse(options.mesh)))
    return 0


def _trace(arguments: list[str]) -> int:
    options = tyro.cli(TraceOptions, args=arguments, prog="functron trace")
    with launch.mistakes():
        mesh = Mesh.parse(options.mesh)
        config = with_model(TrainConfig(), options.model)
        data_ranks = math.prod(mesh[axis] for axis in DATA_AXES)
        config = replace(
            config,
            mesh=options.mesh,
            seq=options.seq or config.gpt.max_seq,
            global_batch=options.global_batch or data_ranks * options.microbatches,
            microbatches=options.microbatches,
            schedule=options.schedule,
            chunks=options.chunks,
            layout=options.layout,
            vocab_over_pp=options.vocab_over_pp,
            sequence_parallel=options.sequence_parallel,
            remat=options.remat,
        )
        samples = f"{config.global_batch} samples of {config.seq} tokens"
        title = (
            f"{options.model}, one of {mesh.size} ranks ({mesh or 'no mesh'}), {samples} per step"
        )
        if mesh["pp"] > 1:
            if options.program:
                raise ValueError(
                    "program: got a mesh with pp, whose ranks run a schedule and not one program; "
                    "wanted pp=1; fix: leave --program out"
                )
            print(f"{title}\n\n{pipeline_cost(config, mesh)}")
            return 0
        program = step_program(config, mesh)
    if options.program:
        print(program)
    print(f"{title}\n")
    print(f"{program.cost()}\n\n{program.memory()}")
    return 0


def _schedule(arguments: list[str]) -> int:
    options = tyro.cli(ScheduleOptions, args=arguments, prog="functron schedule")
    with launch.mistakes():
        own = Schedule.load(options.name) if Path(options.name).is_file() else None
        ranks, microbatches = (own.num_ranks, own.num_microbatches) if own else (4, 8)
        ranks, microbatches = options.pp or ranks, options.microbatches or microbatches
        schedule = make(options.name, ranks, microbatches, options.chunks or None)
        timeline = schedule.simulate()
        if options.svg is not None:
            options.svg.write_text(timeline.svg())
    print(schedule if options.table else schedule_report(schedule), end="")
    return 0


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


def parameter_table(model: str, mesh: Mesh) -> str:
    """The parameters of the preset `model` and their shards on `mesh`, as text.

    Raises:
        ValueError: no such preset, or it cannot run on the mesh.
    """
    config = gpt.PRESETS[model]
    defs = gpt.defs(config)
    specs = param_specs(defs, gpt.rules(config, mesh))
    rows = [("path", "shape", "logical axes", "spec", "local shape", "parameters", "bytes")]
    total_bytes = local_bytes = 0
    for path, d, spec in zip(tree.paths(defs), tree.leaves(defs), tree.leaves(specs), strict=True):
        count, local = math.prod(d.shape), local_shape(d.shape, spec, mesh)
        total_bytes += count * d.dtype.itemsize
        local_bytes += math.prod(local) * d.dtype.itemsize
        axes = " ".join(name or "-" for name in d.axes)
        size = f"{count * d.dtype.itemsize:,}"
        rows.append((path, str(d.shape), axes, str(spec), str(local), f"{count:,}", size))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:5], widths[:5], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[5:], widths[5:], strict=True)]
        lines.append("  ".join(cells))
    total = f"{num_params(defs):,} parameters, {total_bytes:,} bytes"
    return "\n".join([*lines, "", f"{total}; {local_bytes:,} bytes per rank"])
