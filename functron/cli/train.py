"""``functron train | rerun``: steps, and one of them again, in this process or in one per rank."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from functron import apps
from functron.checkpoint.memory import folder_of
from functron.checkpoint.saver import Moments, nowhere
from functron.cli.launch import (
    PROGRAM,
    choose_device,
    count_problems,
    join,
    launch,
    leave,
    supervise,
)
from functron.cli.options import (
    named_fields,
    options_of,
    parse,
    value_of,
    with_names,
    with_values,
)
from functron.cli.process import (
    Process,
    current,
    grow_segments,
    mistakes,
    outside,
    record_failure,
)
from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import sections_of, value_at, with_sections
from functron.data import Blend
from functron.models import lora
from functron.models.family import list_presets
from functron.spmd import Mesh
from functron.spmd.flight import FlightRecorder
from functron.spmd.params import history_mask, num_params
from functron.training import records, run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, load, starting_config, with_model
from functron.training.costs import bubble_note, step_report
from functron.training.data import is_chat, objective_of, reader_of, with_tokenizer
from functron.training.loop import REQUEUE_CODE, RESHAPE_CODE, end_process, exit_code
from functron.training.resume import begun_with, rate_notes
from functron.training.run import Job, Run, prepare, torch_settings
from functron.training.setup import RunSetup, make_setup
from functron.training.train import Outcome, train

if TYPE_CHECKING:
    from functron.apps.planner.machines import Hardware

planner: Any = apps.find("planner")
"""Tells what a step is expected to take; None: runs do without it."""
guard: Any = apps.find("guard")
"""Takes a step again, and starts runs again; None: nobody does."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a language model.

    Attributes:
        config: a TOML or YAML file of these options, such as the config.toml of a run folder;
            options given here override it.
        dry_run: check everything, show what one rank will compute, send and hold in a step, and how
            long it will take on --hardware, or else on this machine, and begin nothing.
        hardware: a machine, by name (h100) or in a TOML file, for which the first lines say what a
            step is expected to take, and the log after 20 steps where it does not; empty: the GPU
            that this is, where a GPT is trained on one that is known.
    """

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    dry_run: bool = False
    hardware: str = ""
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def run(
    arguments: Sequence[str],
    at: Moments = nowhere,
    *,
    sections: Mapping[str, type] = MappingProxyType({}),
) -> int:
    """Train; the exit code is 0, or 128 + the signal that ended it after saving.

    138 also stands for a run whose time was over (--exit-after).

    Args:
        arguments: those after the command.
        at: called by the processes that train as they come to moments of the run; see `Run.at`.
        sections: of the configuration, beside its own; see `functron.cli.main.main`.
    """
    here, began = current(), time.monotonic()
    kind = with_sections(TrainConfig, sections)
    program = (sys.argv[0],) if sections else PROGRAM
    arguments = with_names(arguments, options_of(kind))
    with mistakes():
        options, given = _parse(arguments, kind)
        named = named_fields(arguments, options_of(options.options))
        config, recast = with_tokenizer(options.options, named), _names_precision(arguments)
        validate(
            config,
            processes=here.world_size if here else None,
            recast=recast,
            launched_here=here is not None and here.launched_here,
            given=given,
        )
        machine = _read_machine(options.hardware)
        kind = choose_device(config.compute.device, config.parallelism.nproc)
        if options.dry_run:
            if here is None or here.rank == 0:
                done = run_folder.steps_done(config)
                print("".join(f"{line}\n" for line in _rate_lines(config, done)), end="")
                made = make_setup(config, Mesh.parse(config.parallelism.mesh), kind)
                print(_dry(made, machine, kind))
            return 0
    segments = grow_segments(kind)
    if config.compute.deterministic:  # cuBLAS reads it when it makes its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    restarts = None if guard is None else guard.settings_of_restarts(config)
    if here is None and restarts is not None and restarts.max_restarts:
        with mistakes():
            out = run_folder.claim(config)
        return supervise(config, arguments, out, program=program)
    if here is None and config.parallelism.nproc:
        return launch(config.parallelism.nproc, [*program, "train", *arguments])
    with mistakes():
        made, out = _assemble(config, here, kind, recast, at)
    main_rank = here is None or here.rank == 0
    foreseen = None
    if main_rank:
        lines = _introduction(made, here)
        lines += [f"memory {segments}"] if segments else []
        if machine is None:
            machine = own_machine(config, kind)
        if machine is not None:
            foreseen = planner.estimate_run(made.setup, machine)
            lines.append(f"expect {planner.describe_estimate(foreseen)}, on {machine.name}")
        print("\n".join(lines), flush=True)
    simulated = here is None and made.mesh.size > 1  # other ranks' work takes this process's time
    also = None
    if foreseen is not None and not simulated:
        also = functools.partial(planner.report_comparison, foreseen, tqdm.write)
    with outside():
        outcome = train(made, out, began=began, hung=hung, also=also)
    if main_rank:
        print("\n".join(_conclusion(outcome, out, _prompt(made, out))), flush=True)
    if here is not None and exit_code(outcome.stopped_by) in (REQUEUE_CODE, RESHAPE_CODE):
        dist.barrier()  # the launcher stops all others once one has left with such a code
    leave()
    return exit_code(outcome.stopped_by)


def own_machine(config: TrainConfig, kind: str) -> Hardware | None:
    """The machine of this GPU; None where that is not known, and of runs that say nothing of it.

    A CPU would have to be measured first, and what is no plain GPT to be traced whole, for seconds.
    """
    alone = config.family.name == "gpt" and config.lora.adapters is None
    if planner is None or kind != "cuda" or not alone:
        return None
    return (
        planner.find_this_machine(kind) if planner.is_known(torch.cuda.get_device_name()) else None
    )


def _read_machine(name: str) -> Hardware | None:
    """The machine that ``--hardware`` names; None where it names none."""
    if name and planner is None:
        title, fix = "cannot tell how long a step takes", "leave --hardware out"
        refuse(title, "hardware", "no application planner", "functron with all of it", fix)
    return planner.hardware(name) if name else None


def _dry(made: RunSetup, machine: Hardware | None, kind: str) -> str:
    """The FLOPs, traffic, memory and seconds of a step, as text."""
    if planner is None:
        return step_report(made)
    if made.is_pipelined and made.family.name != "gpt":
        return f"{step_report(made)}\n\nno time is estimated: {made.family.title} in stages"
    where = planner.find_this_machine(kind) if machine is None else machine
    foreseen = planner.describe_estimate(planner.estimate_run(made, where))
    ranks = " with a process for each rank" if made.mesh.size > 1 else ""
    measured = ", measured now" if machine is None and kind == "cpu" else ""
    compiled = made.choose_compiled(not where.host.computes)[1]
    expected = f"expected on {where.name}{measured}{ranks}: {foreseen}"
    return f"{step_report(made)}\n\n{expected}\nsteps are {compiled}"


def hung(text: str, first: bool) -> None:
    """End this process for a hang; see `end_process`.

    Args:
        text: why.
        first: whether this process is the one to say it, where its launcher does not.
    """
    here = current()
    if here is not None and (first or here.launched_here):
        record_failure(here, RuntimeError(text), f"functron: {text}")
        first = False
    end_process(text, first)


def _names_precision(arguments: Sequence[str]) -> bool:
    """Whether the options say in which precision a run that was begun goes on."""
    return any(word.partition("=")[0] in ("--precision", "--products") for word in arguments)


def _assemble(
    config: TrainConfig, here: Process | None, kind: str, recast: bool, at: Moments
) -> tuple[Run, Path]:
    mesh = Mesh.parse(config.parallelism.mesh)
    if here is None:
        out, begin_from = _folder(config)
        return prepare(config, mesh, kind, begin_from, recast=recast, at=at), out
    recorder = FlightRecorder(kind) if config.reads_recorder else None
    bound, device = join(mesh, here, kind, config.watchdog.timeout_seconds, recorder)
    chosen = [_folder(config) if here.rank == 0 else None]
    dist.broadcast_object_list(chosen, device=device)
    assert chosen[0] is not None
    out, begin_from = chosen[0]
    memory = folder_of(config.memory.folder, out) if config.memory.save_every else None
    return prepare(config, bound, device, begin_from, recast=recast, at=at, memory=memory), out


def _folder(config: TrainConfig) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to go on from."""
    out = run_folder.claim(config)
    return out, run_folder.newest(out) if config.resume else None


def _introduction(run: Run, here: Process | None) -> list[str]:
    config, text = run.config, run.text
    own = "this Python's documentation and standard library"
    name = "random tokens" if config.data.format == "mock" else config.data.path or own
    defs = run.setup.whole_defs
    base, adapters = lora.split(defs) if config.lora.adapters else (defs, {})
    count = num_params(tree.partition(base, history_mask(base))[1])
    lines = [
        f"model  {config.title}: {count:,} parameters",
        f"dtypes {config.policy}",
        f"data   {name}: {text.summary()}",
    ]
    lines += [
        f"eval   {x.name}: {x.num_batches} x {x.global_batch} samples of {x.samples.summary()}"
        for x in run.held_out
    ]
    if isinstance(text, Blend) and (note := text.note()) is not None:
        lines.append(f"blend  {note}")
    tokenizer = run_folder.tokenizer_path(config)
    if tokenizer is not None:
        lines.append(f"tokens {tokenizer}")
    if run.rules:
        lines.append(f"rules  {run.rules}")
    if config.lora.adapters is not None:
        count = num_params(adapters)
        lines.append(
            f"lora   rank {config.lora.rank}: {count:,} parameters more, which alone train"
        )
        if left := lora.unadapted(lora.plain(defs), config.lora.adapters):
            lines.append(f"lora   these targets have no adapters: {', '.join(left)}")
    if (note := run_folder.describe_old_targets(config)) is not None:
        lines.append(f"lora   {note}")
    if here is not None:
        lines.append(f"mesh   {config.parallelism.mesh or 'one rank'}: {here.world_size} processes")
        if here.is_open:
            lines.append(
                f"open   they meet at {here.meeting_at}, which other machines reach: whoever does "
                "can join them, so its network must be yours alone"
            )
    elif run.mesh.size > 1:
        lines.append(
            f"mesh   {config.parallelism.mesh}: {run.mesh.size} ranks simulated in this process "
            f"(--nproc {run.mesh.size} starts processes)"
        )
    lines.append(f"steps  {run.setup.choose_compiled()[1]}")
    if run.setup.family.name == "gpt":
        lines.append(f"fused  {run.setup.choose_fused(run.device.type)[1]}")
    for section in sections_of(config):
        introduce = getattr(section, "introduce", None)
        lines += [] if introduce is None else introduce(run)
    if (note := bubble_note(run.setup)) is not None:
        lines.append(f"bubble {note}")
    if config.resume:
        done = f"after step {run.start}" if run.start else "with the first step: none is saved yet"
        lines.append(f"resume {config.out}, {done}{', from memory' if run.from_memory else ''}")
        lines += _rate_lines(config, run.start)
    if config.data.earlier_batches and run.start:
        size, first = run.batches.batch_size(run.start), run.batches.first_sample(run.start)
        lines.append(
            f"batch  {size} samples a step from step {run.start + 1} on, whose first is number "
            f"{first:,} of the run; before {config.data.earlier_batches}"
        )
    if run.notes:
        lines.append(f"recast {'; '.join(run.notes)}")
    return lines


def _rate_lines(config: TrainConfig, start: int) -> list[str]:
    """How the rates of a run change that goes on after so many steps."""
    before = begun_with(Path(config.out), start, type(config)) if start else None
    notes = [] if before is None else rate_notes(before, config, start)
    return [f"{'' if i else 'rate':6} {note}" for i, note in enumerate(notes)]


_WORDS = 4  # of a prompt


def _prompt(run: Run, out: Path) -> str | None:
    """A prompt to try the model with, of its data; None where it continues nothing."""
    config = configure(run.config, out=str(out))
    prompt = objective_of(config).prompt
    if prompt is None:
        return None
    if is_chat(config):
        return "'Who are you?' --chat"
    text = _opening(run, config)
    if text is None:
        return None
    return shlex.quote(prompt.format(text))


def _opening(run: Run, config: TrainConfig) -> str | None:
    """Words that the data has; None where no words are known."""
    if config.data.format == "mock":
        return None
    if not config.data.path:
        return "def"
    reader = reader_of(config)
    if reader is None:
        return None
    tokens = run.text.draw(np.zeros(1, np.int64))["tokens"][0].tolist()
    # of a sample that begins within a word, and may begin within a character
    words = [word for word in reader.decode(tokens).split()[1:] if "\ufffd" not in word]
    return " ".join(words[:_WORDS]) or None


def _conclusion(outcome: Outcome, out: Path, prompt: str | None) -> list[str]:
    if not outcome.history:
        return [f"nothing to do: the run in {out} has all its steps; more: --steps"]
    last, losses = outcome.history[-1], [r["loss"] for r in outcome.history]
    losses = [loss for loss in losses if loss is not None]
    change = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "no step had a target"
    done = f"stopped after step {last['step']}" if outcome.stopped_by else "done"
    held_out = [
        f"held out, {name}: loss {numbers['loss']:.3f}, perplexity {numbers['perplexity']:.1f}"
        for name, numbers in last.get(records.EVAL, {}).items()
    ]
    return [
        f"{done}: {change}; the run is in {out}",
        *held_out,
        *([f"try it: functron sample {out} --prompt {prompt}"] if prompt else []),
    ]


def parse_train(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that these options ask for: defaults, preset, file, options, in this order.

    A --model among the options replaces the architecture of the file, a --precision its dtypes.
    Where neither names a precision, that of a GPU is bf16. With --resume the file is
    that of the run, unless another one is given.

    Raises:
        ValueError: an unknown preset, or what `functron.training.config.load` raises.
        functron.cli.process.InputError: options that do not exist, with those that were meant.
        SystemExit: options that do not parse (code 2), or --help (code 0).
    """
    return _parse(with_names(arguments, options_of(TrainConfig)))[0].options


@functools.cache
def _options_kind(kind: type[TrainConfig]) -> type[TrainOptions]:
    """The options of a configuration of this kind."""
    if kind is TrainConfig:
        return TrainOptions
    rows = [("options", Annotated[kind, tyro.conf.arg(name="")], field(default_factory=kind))]
    bases, doc = (TrainOptions,), {"__doc__": TrainOptions.__doc__}
    return make_dataclass("TrainOptions", rows, bases=bases, frozen=True, namespace=doc)


def _parse(
    arguments: Sequence[str], kind: type[TrainConfig] = TrainConfig
) -> tuple[TrainOptions, frozenset[str]]:
    """The options, and the fields that they set, rather than set back to what is usual."""
    arguments = with_values(arguments, options_of(kind))
    file, model, precision, device, out, resume = (
        value_of(f"--{name}", arguments)
        for name in ("config", "model", "precision", "device", "out", "resume")
    )
    begun = Path(out) / run_folder.CONFIG if resume in ("True", "auto") and out else None
    begun = begun if begun is not None and begun.is_file() else None
    given = Path(file) if file else None
    on_gpu = device != "cpu" and torch.cuda.is_available()
    base = starting_config(
        given or begun,
        model=model,
        precision=precision,
        default_precision="bf16" if on_gpu else None,
        begun=begun,
        kind=kind,
    )
    options_kind = _options_kind(kind)
    default = options_kind(given, options=base)
    made = parse(options_kind, arguments, "train", default)
    made = replace(made, options=run_folder.with_changed_batch(made.options))
    plain, now = kind(), made.options
    plain = with_model(plain, now.model) if now.model in list_presets() else plain

    def is_set_back(path: str) -> bool:
        return value_at(now, path) == value_at(plain, path) != value_at(base, path)

    named = named_fields(arguments, options_of(now))
    return made, frozenset(path for path in named if not is_set_back(path))


# --- a step again


@dataclass(frozen=True, kw_only=True)
class RerunOptions:
    """Take a step of a run again, and say what its numbers come from.

    From the newest checkpoint before it the steps up to it are taken, whose losses and gradient
    norms are compared with the records bit for bit; then the step, twice; and by every rank by
    itself, where there are several. Nothing in the run folder changes.

    Attributes:
        run: the run folder that training left.
        step: which one, from 1 as in metrics.jsonl.
        mesh: axes and sizes, such as pp=2,tp=2; run: that of the run. On another one numbers are
            compared to one in a thousand, as sums are of another order.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh; -1: as the run.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    step: int
    mesh: str = "run"
    nproc: int = -1
    device: Literal["auto", "cpu", "cuda"] = "auto"


def rerun(arguments: Sequence[str]) -> int:
    """Print the verdict."""
    options = parse(RerunOptions, arguments, "rerun")
    here = current()
    with mistakes():
        config, exact = _of_run(options, here)
        kind = choose_device(config.compute.device, config.parallelism.nproc)
        grow_segments(kind)
    if here is None and config.parallelism.nproc:
        return launch(config.parallelism.nproc, ["-m", "functron", "rerun", *arguments])
    mesh = Mesh.parse(config.parallelism.mesh)
    with mistakes():
        made = prepare(config, *join(mesh, here, kind, config.watchdog.timeout_seconds))
    with torch_settings(config):
        verdict = guard.attribute_fault(
            made, options.run, Job.of(made), options.step, (), exact=exact
        )
    leave()
    if here is None or here.rank == 0:
        print(verdict, flush=True)
    return 0


def _of_run(options: RerunOptions, here: Process | None) -> tuple[TrainConfig, bool]:
    """The run on the ranks that are asked for, and whether these are its own."""
    begun = load(options.run / run_folder.CONFIG, known_only=True)
    mesh = begun.parallelism.mesh if options.mesh == "run" else options.mesh
    nproc = begun.parallelism.nproc if options.nproc < 0 else options.nproc
    steps = [record["step"] for record in records.read(options.run / records.METRICS)]
    found = []
    if not 1 <= options.step <= max(steps, default=begun.steps):
        wanted = f"one of the {max(steps, default=begun.steps)} that the run took"
        found.append(Problem("step", str(options.step), wanted))
    processes = here.world_size if here else nproc
    raise_problems(
        "cannot take the step again", [*found, *count_problems(processes, Mesh.parse(mesh))]
    )
    same = Mesh.parse(mesh) == Mesh.parse(begun.parallelism.mesh)
    exact = same and (
        begun.parallelism.nproc == processes or (here is not None and options.nproc < 0)
    )
    device = begun.compute.device if options.device == "auto" else options.device
    changed = configure(
        begun, mesh=mesh, nproc=nproc, device=device, out=str(options.run), resume=False
    )
    return configure(changed, eval_every=0, tensorboard=False, wandb=False), exact
