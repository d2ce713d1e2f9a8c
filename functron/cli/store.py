"""``functron checkpoint | convert | migrate | upcycle | preprocess``: commands on files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tqdm import tqdm

from functron import apps, data
from functron.checkpoint import latest, list_text, show_text, steps, verify_text
from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.core.errors import Problem, raise_problems, refuse
from functron.data.preprocess import SETTINGS_NEEDS, PreprocessSettings, Progress
from functron.data.preprocess import preprocess as make_tokens
from functron.data.shards import is_tokens
from functron.nn.moe import MoEConfig
from functron.training import config, run_folder
from functron.training import convert as conversion
from functron.training.convert import upcycle_run

if TYPE_CHECKING:
    from functron.apps.megatron import Migration

megatron: Any = apps.find("megatron")
"""Reads launch scripts; None where it is not installed."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a Hugging Face model or a Megatron checkpoint into a run folder, or back.

    Attributes:
        source: hf:PATH, a folder with config.json and safetensors; megatron:PATH, a checkpoint of
            Megatron-LM (torch_dist or mp_rank_*); hf-module:PATH, a decoder of transformers that
            trains as it is; or run:PATH, the newest checkpoint of a run.
        target: run:PATH; or hf:PATH, megatron:PATH or hf-module:PATH from a run; it must not exist.
        dtype: of the target's parameters; empty: unchanged.
        averaged: export the averages of parameters that the run keeps (--optimizer.ema-decay).
        max_seq: the run's longest sequence, at most the model's; 0: the model's.
        quantise: write the matrices of attention, feed-forward layers and experts in FP8: fp8-block
            with scales of 128x128 blocks, as DeepSeek-V3, if 128 divides both sides; fp8-row with
            one scale per output, as compressed-tensors; empty: no.
        adapter: export the low-rank additions of a run alone, as PEFT has them: adapter_config.json
            and adapter_model.safetensors.
        model: preset for a Megatron checkpoint without arguments, of which only the parameters are
            read.
        ignore: entries of config.json that do not change what the model computes, which are refused
            otherwise, as they are not known.
        expert_parallel: ranks of expert parallelism of the Megatron run that will load the target;
            with more than 1, experts have a separate optimizer.
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    averaged: bool = False
    max_seq: int = 0
    quantise: Literal["", "fp8-block", "fp8-row"] = ""
    adapter: bool = False
    model: str = ""
    ignore: tuple[str, ...] = ()
    expert_parallel: int = 1


def convert(arguments: Sequence[str]) -> int:
    """Convert, and print a summary."""
    options = parse(ConvertOptions, arguments, "convert")
    with mistakes():
        schemes = {text.partition(":")[0] for text in (options.source, options.target)}
        others = schemes - {conversion.RUN, *conversion.FORMATS}
        done = conversion.convert(
            options.source,
            options.target,
            formats={**conversion.FORMATS, **apps.load_plugins("functron.formats", *others)},
            dtype=options.dtype or None,
            averaged=options.averaged,
            max_seq=options.max_seq or None,
            quantise=options.quantise or None,
            adapter=options.adapter,
            model=options.model or None,
            ignore=options.ignore,
            expert_parallel=options.expert_parallel if options.expert_parallel != 1 else None,
        )
        print(done)
        if done.recipe:
            print(done.recipe)
    return 0


@dataclass(frozen=True)
class CheckpointOptions:
    """List checkpoints, show the contents of one, or verify it.

    Attributes:
        action: ls lists a run's checkpoints; show shows the contents of one; verify reads one, or
            preprocessed tokens, and compares checksums.
        path: a run folder, a folder of checkpoints, or a checkpoint; show and verify use the newest
            of several. verify also takes tokens made by functron preprocess.
    """

    action: tyro.conf.Positional[Literal["ls", "show", "verify"]]
    path: tyro.conf.Positional[Path]


def checkpoint(arguments: Sequence[str]) -> int:
    """Print the list, the contents, or the result of verification."""
    options = parse(CheckpointOptions, arguments, "checkpoint")
    with mistakes():
        folder = options.path
        if options.action == "verify" and is_tokens(folder):
            checked = data.verify(folder)
            left = "" if checked else "; not checked: its tokens, which have no checksums"
            print(f"{folder}: no damage found{left}")
            return 0
        if run_folder.is_run(folder):
            folder = folder / run_folder.CHECKPOINTS
        if options.action == "ls":
            print(list_text(folder))
            return 0
        one = latest(folder) if steps(folder) else folder
        text = show_text if options.action == "show" else verify_text
        print(text(one))
    return 0


@dataclass(frozen=True)
class MigrateOptions:
    """Convert a Megatron-LM launch script into a configuration, and explain each argument.

    Nothing is run: the script is only read, unless --run is given. Arguments without a counterpart
    are listed, with alternatives; unknown ones, and sizes that do not fit, are errors.

    Attributes:
        source: a shell script, a list of arguments, or YAML of Megatron-LM, Megatron-Bridge or
            NeMo.
        out: the configuration file to write, for functron train --config.
        env: environment variables of the script, such as DATA_PATH=/data/text; 1=PATH is its first
            argument.
        extra: more arguments, such as vocab-size=151936 or bf16, which replace the script's.
        without: arguments to ignore, such as those of a fork.
        processes: number of ranks; 0: as the launcher starts.
        closest: use functron's most similar model, if it lacks the script's.
        run: run the script in bash, if it does more than set variables and arrays, and launch,
            with recorders in place of torchrun, python, srun and similar programs, which start
            nothing. Its other effects, such as writing files, are real; it runs in an empty folder,
            for at most 30 seconds.
        strict: arguments without a counterpart are errors, too.
        json: print a JSON object instead of a table.
    """

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FILE")]]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("config.toml")
    env: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    extra: Annotated[tuple[str, ...], tyro.conf.arg(name="with", metavar="NAME=VALUE")] = ()
    without: tuple[str, ...] = ()
    processes: int = 0
    closest: bool = False
    run: bool = False
    strict: bool = False
    json: bool = False


def migrate(arguments: Sequence[str]) -> int:
    """Write the configuration, and print the table."""
    options = parse(MigrateOptions, arguments, "migrate")
    with mistakes():
        made = megatron.migrate(
            options.source,
            variables=_parse_variables(options.env),
            extra=shlex.join(options.extra),
            without=options.without,
            processes=options.processes,
            closest=options.closest,
            run=options.run,
        )
        if options.strict:
            fix = "leave --strict out, where that is understood"
            raise_problems("these arguments have no counterpart", [
                Problem(row.name, row.value, row.why, fix) for row in made.rows_of("not supported")
            ])  # fmt: skip
        _write_config(options.out, made)
    if options.json:
        print(json.dumps([asdict(row) for row in made.rows], indent=2))
    else:
        print("\n".join([str(made), "", *_describe_result(options.out, made)]))
    return 0


def _parse_variables(words: Sequence[str]) -> dict[str, str]:
    """Variables by name.

    Raises:
        ValueError: a word is no name and value; all such are listed.
    """
    pairs = [word.partition("=") for word in words]
    raise_problems("cannot read --env", [
        Problem("--env", word, "NAME=VALUE", "write --env NAME=VALUE")
        for word, (name, equals, _) in zip(words, pairs, strict=True)
        if not (name and equals)
    ])  # fmt: skip
    return {name: value for name, _, value in pairs}


def _write_config(path: Path, made: Migration) -> None:
    title, fix = "cannot write the configuration", "name another: --out FILE"
    if path.exists():
        refuse(title, str(path), "a file that is there", "a new one", fix)
    try:
        path.write_text(made.toml(), encoding="utf-8")
    except OSError as error:
        refuse(title, str(path), error.strerror or str(error), "a file to write", fix)


def _describe_result(path: Path, made: Migration) -> list[str]:
    config, missing = made.config, len(made.rows_of("not supported"))
    lines = [f"{path}: {config.title}, on {config.parallelism.mesh or 'one rank'}"]
    if missing:
        plural = "argument has" if missing == 1 else "arguments have"
        lines.append(f"{missing} {plural} no counterpart: see above, and the head of the file")
    if not made.told:
        lines.append(
            f"the number of processes is unknown; {made.processes} is the smallest that fits: set "
            "another with --processes N"
        )
    if made.absent:
        lines.append(f"not on this machine, and so not checked: {', '.join(made.absent)}")
    lines.append(f"look at it: functron train --config {path} --dry-run")
    start = f"torchrun --nproc-per-node N -m functron train --config {path}"
    lines.append(
        f"start it:   {start if made.processes > 1 else f'functron train --config {path}'}"
    )
    return lines


@dataclass(frozen=True)
class UpcycleOptions:
    """Initialise a mixture of experts from a dense run's newest checkpoint.

    Attributes:
        source: the run folder of the dense model.
        target: the run folder to make; train it with functron train --resume --out TARGET.
        experts: experts per layer.
        top_k: experts per token.
        expert_dim: hidden width of an expert, a fraction of the dense layer's; 0: the same.
        aux_loss: weight of the load-balancing loss.
        seed: of the routers' random weights.
        averaged: use the averages of parameters that the run keeps (--optimizer.ema-decay).
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    experts: int = 8
    top_k: int = 2
    expert_dim: int = 0
    aux_loss: float = 0.01
    seed: int = 0
    averaged: bool = False


def upcycle(arguments: Sequence[str]) -> int:
    """Make the run folder, and print a summary."""
    options = parse(UpcycleOptions, arguments, "upcycle")
    with mistakes():
        dense = config.load(Path(options.source) / run_folder.CONFIG, known_only=True).gpt
        moe = MoEConfig(
            options.experts,
            options.top_k,
            options.expert_dim or dense.mlp_dim,
            renormalise=True,
            aux_loss=options.aux_loss,
            expert_bias=dense.bias,
        )
        source, target = Path(options.source), Path(options.target)
        done = upcycle_run(source, target, moe, seed=options.seed, averaged=options.averaged)
        print(done)
    return 0


@dataclass(frozen=True)
class PreprocessOptions(PreprocessSettings):
    """Tokenise text into files, on all processors; if it is interrupted, start it again.

    Attributes:
        inputs: files and folders: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, or plain text, a
            document per file.
        tokenizer: a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder with one of
            these, or bytes.
        out: prefix of the output: OUT.bin and OUT.idx, as Megatron-LM reads them.
        pattern: how a .tiktoken tokenizer splits text: gpt2, cl100k, o200k, llama3 or a regular
            expression; empty: by the file's name.
    """

    inputs: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT [INPUT ...]")]
    ]


def preprocess(arguments: Sequence[str]) -> int:
    """Make the tokens, and print a summary."""
    settings = parse(PreprocessOptions, arguments, "preprocess", needs=SETTINGS_NEEDS)
    with mistakes(), _show_progress() as report:
        summary = make_tokens(settings, report)
    print(summary)
    return 0


@contextmanager
def _show_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar over the bytes of the text, with tokens per second."""
    bars: list[tqdm] = []

    def report(progress: Progress) -> None:
        if not bars:
            options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True}
            bars.append(tqdm(total=progress.total, initial=progress.done, **options))
        bar = bars[0]
        shown = f"{tqdm.format_sizeof(progress.tokens)} tokens"
        if progress.seconds:
            shown += f", {tqdm.format_sizeof(progress.tokens_per_second)} tokens/s"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield report
    finally:
        for bar in bars:
            bar.close()
