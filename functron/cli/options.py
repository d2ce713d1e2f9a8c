"""Options from the command line; those that do not exist suggest the ones that were meant.

A run that a command is about: a run folder or a file of options, or a preset, and options.

The device of a command that runs something.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import torch
import tyro

from functron.cli import launch
from functron.core.errors import Problem, raise_problems
from functron.training import run_folder
from functron.training.config import TrainConfig, load, with_model

T = TypeVar("T")

_ALIASES: Mapping[str, str] = MappingProxyType({
    "learning-rate.peak": "lr learning-rate max-lr peak-lr",
    "learning-rate.end": "min-lr min-learning-rate end-lr",
    "learning-rate.name": "lr-decay-style lr-scheduler-type lr-schedule lr-scheduler scheduler",
    "learning-rate.warmup-steps": "warmup warmup-steps warmup-iters lr-warmup-iters "
    "num-warmup-steps",
    "learning-rate.decay-steps": "lr-wsd-decay-iters",
    "learning-rate.total-steps": "lr-decay-iters lr-decay-steps",
    "optimizer.name": "optim optimizer",
    "optimizer.weight-decay": "wd weight-decay",
    "optimizer.b1": "beta1 adam-beta1",
    "optimizer.b2": "beta2 adam-beta2",
    "optimizer.eps": "eps adam-eps adam-epsilon",
    "optimizer.clip-norm": "clip-grad grad-clip max-grad-norm gradient-clip-val clip",
    "global-batch": "batch batch-size bs global-batch-size train-batch-size "
    "per-device-train-batch-size train-micro-batch-size",
    "batch": "batch-size per-device-eval-batch-size eval-batch-size",
    "microbatches": "micro-batch-size gradient-accumulation-steps grad-accum accumulation-steps "
    "accumulate-grad-batches num-microbatches",
    "ramp-up": "rampup-batch-size",
    "seq": "seq-length seq-len sequence-length block-size context-length max-length max-seq-len "
    "max-seq-length",
    "max-seq": "max-position-embeddings",
    "steps": "epochs num-epochs num-train-epochs max-steps max-iters train-iters iterations "
    "num-steps train-steps",
    "gpt.num-layers": "num-layers n-layer n-layers layers depth",
    "gpt.embed-dim": "hidden-size n-embd d-model dim",
    "gpt.num-heads": "num-attention-heads n-head num-heads",
    "gpt.num-kv-heads": "num-query-groups num-key-value-heads",
    "gpt.mlp-dim": "ffn-hidden-size intermediate-size",
    "gpt.vocab-size": "vocab-size",
    "gpt.dtype": "dtype bf16 fp16 fp32 precision mixed-precision torch-dtype params-dtype",
    "remat": "recompute recompute-activations recompute-granularity gradient-checkpointing "
    "activation-checkpointing",
    "zero": "use-distributed-optimizer zero-stage",
    "nproc": "gpus devices nproc-per-node num-processes world-size num-gpus",
    "data": "data-path dataset dataset-name train-data-path train-data train-file input-data",
    "tokenizer": "tokenizer-model tokenizer-name tokenizer-name-or-path tokenizer-type vocab-file",
    "model": "model-name model-name-or-path model-size preset init-from",
    "config": "config-file config-path yaml-cfg",
    "out": "save output output-dir out-dir save-dir output-prefix",
    "resume": "load resume-from-checkpoint resume-from load-dir",
    "save-every": "save-interval save-steps checkpoint-interval",
    "eval-every": "eval-interval eval-steps",
    "eval-batches": "eval-iters",
    "eval-data": "valid-data-path validation-file eval-dataset",
    "seed": "random-seed",
    "wandb": "wandb-log wandb-project report-to",
    "tensorboard": "tensorboard-dir",
    "compile": "torch-compile use-compile",
    "prefetch": "num-workers",
    "workers": "num-workers num-proc",
    "tokens": "max-new-tokens max-tokens num-tokens length max-length tokens-to-generate",
    "temperature": "temp",
    "prompt": "text input start",
    "key": "json-key json-keys text-column",
    "mesh dp=N": "dp data-parallel-size num-replicas",
    "mesh tp=N": "tp tensor-model-parallel-size tensor-parallel-size tensor-parallel",
    "mesh pp=N": "pp pipeline-model-parallel-size pipeline-parallel-size pipeline-parallel",
    "mesh cp=N": "cp context-parallel-size",
    "mesh ep=N": "ep expert-model-parallel-size expert-parallel-size",
    "mesh fsdp=N": "fsdp fully-shard data-parallel-sharding-strategy",
})  # fmt: skip
"""Options, and what those call them who know Megatron-LM, transformers, nanoGPT and others."""


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """The options of ``functron COMMAND`` in `arguments`.

    Args:
        kind: a dataclass, whose fields are the options and whose docstring describes them.
        arguments: what stands after the command.
        command: its name.
        default: an instance with the values of options that are not given; None: the fields' own.

    Raises:
        functron.cli.launch.InputError: options that do not exist, each with the nearest that do.
        SystemExit: what does not parse (code 2), or --help (code 0).
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    made, unknown = tyro.cli(
        kind,
        args=arguments,
        prog=f"functron {command}",
        config=(tyro.conf.AvoidSubcommands,),
        return_unknown_args=True,
        **given,
    )
    known = options_of(kind if default is None else default)
    names = [word for word in unknown if word.startswith("-")] or unknown
    with launch.mistakes():
        raise_problems(
            f"functron {command} has no such options",
            [
                Problem(word, "an unknown option", "a known one", _meant(word, known))
                for word in names
            ],
        )
    return made


def options_of(value: Any, prefix: str = "") -> list[str]:
    """The names of the options, without dashes, of a dataclass or an instance of it."""
    names = []
    hints = typing.get_type_hints(
        value if isinstance(value, type) else type(value), include_extras=True
    )
    for field in dataclasses.fields(value):
        hint, marks = hints[field.name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        if tyro.conf.Positional in marks:
            continue
        flat = any(getattr(mark, "name", None) == "" for mark in marks)
        inner = hint if isinstance(value, type) else getattr(value, field.name)
        name = "" if flat else f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(inner):
            names += options_of(inner, f"{name}." if name else prefix)
        else:
            names.append(name)
    return names


def _meant(word: str, known: Sequence[str]) -> str:
    """The fix for an option that does not exist."""
    typed = re.split("=", word.lstrip("-").replace("_", "-").lower(), maxsplit=1)[0]
    found = list(dict.fromkeys(_candidates(typed.removeprefix("no-"), known)))
    return f"did you mean {' or '.join(found[:3])}?" if found else "see --help"


def _candidates(typed: str, known: Sequence[str]) -> list[str]:
    """Options that go by this name elsewhere, or that end in it; else those nearest to it."""
    meant = [o for o, names in _ALIASES.items() if typed in names.split() and o.split()[0] in known]
    last = {option: option.rpartition(".")[2] for option in known}
    meant += [option for option in known if last[option] == typed]
    if not meant:
        close = difflib.get_close_matches(typed, [*known, *last.values()], n=1)
        meant = [option for option in known if {option, last[option]} & {*close}]
    return [f"--{option}" for option in meant]


def parse_run(kind: Any, arguments: Sequence[str], command: str, **fields: Any) -> Any:
    """The options of a command: of the run that the first argument names, or of a preset.

    Args:
        kind: a dataclass with ``run``, a positional argument, ``options``, a `TrainConfig`, and
            what the command takes besides; options override what the run says.
        arguments: as they were given. A run comes first.
        command: its name.
        fields: of the `TrainConfig`, where no run is named.

    Raises:
        ValueError: there is no such run or preset, or it cannot be read.
        launch.InputError, SystemExit: as `functron.cli.options.parse`.
    """
    run = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    model = _value_of("--model", arguments)
    if run:
        base = load(_file_of(Path(run)), model=model)
    else:
        base = replace(TrainConfig(), **fields)
        base = base if model is None else with_model(base, model)
    made = parse(kind, arguments, command, kind(run=run, options=base))
    if made.run != run:
        fix = f"functron {command} {made.run} ..."
        problem = Problem("run", repr(made.run), "the first argument", fix)
        raise_problems("cannot tell which run this is about", [problem])
    return made


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of an option; None: it has none, or the parser will say what is wrong."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option and following:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _file_of(path: Path) -> Path:
    """The file that has the options of a run."""
    if not path.is_dir() or run_folder.is_run(path):
        return path / run_folder.CONFIG if path.is_dir() else path
    near = run_folder.nearest(path)
    fix = "" if near is None else f"name {near}, which is one"
    wanted = f"a run folder, or a file like its {run_folder.CONFIG}"
    raise_problems("no such run", [Problem(str(path), "a folder where no run is", wanted, fix)])
    raise AssertionError("unreachable")


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
