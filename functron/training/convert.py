"""Runs made of other models: Hugging Face's, Megatron's, and mixtures of experts of dense ones.

Upcycling makes a mixture of experts begin as the dense model that it is made of. Every expert
begins as the dense feed-forward layer, or as one of equal slices of its hidden features, and
whichever experts a token chooses, together they compute what the layer did (Komatsuzaki et al.
2022, "Sparse upcycling"; He et al. 2024, "Upcycling large language models into mixture of experts",
for slices). Training then lets them differ.

Megatron's runs come with the optimizer's state, and go back:

| Megatron                           | here                                                        |
|------------------------------------|-------------------------------------------------------------|
| ``iteration``                      | ``step``                                                    |
| ``exp_avg``, ``exp_avg_sq``        | ``mu``, ``nu``                                              |
| ``fp32_param`` or ``param``        | masters, of parameters of 16 bits                           |
| the optimizer's ``step``           | Adam's count                                                |
| the scheduler's ``num_steps``      | the schedule's count, times the global batch                |
| ``consumed_train_samples``         | the first sample of the step, which follows from its number |
| ``args``                           | the configuration                                           |
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, local_path, nearest, raise_problems, refuse
from functron.data.blend import ALL, parse_blend
from functron.hub import megatron
from functron.hub.config import CONFIG, read_config, read_table
from functron.hub.megatron_files import LATEST, Opened, open_checkpoint
from functron.hub.reader import load
from functron.hub.writer import MAX_SHARD_BYTES, copy_companions, save
from functron.models import gpt, lora
from functron.models.config import PRESETS, Dtype
from functron.models.family import Config, TrainedConfig, dtype_of, family_of
from functron.models.gpt import GPTConfig
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.program.cost import bytes_text, free_memory_bytes
from functron.spmd import Mesh
from functron.spmd.params import num_params
from functron.training import config, run_folder
from functron.training.config import configure
from functron.training.data import is_on_disk
from functron.training.megatron import Reading, read_arguments
from functron.training.megatron_step import STYLES, WSD, recast, update_settings
from functron.training.migrate import (
    DATA_ARGUMENTS,
    MASKED_VOCABULARY,
    architecture_arguments,
    config_of,
    data_settings,
    problems_of,
    reading_of,
)
from functron.training.setup import make_setup
from functron.training.step import State

SCHEMES = ("hf", "run", "megatron")


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes:
        config: the model's architecture.
        target: the folder that was made.
        files: the names in it that came from the source unchanged.
        recipe: what a run that was made is set to, for the user; empty where none was.
    """

    config: Config
    target: Path
    files: tuple[str, ...]
    recipe: str = ""

    def __str__(self) -> str:
        count = num_params(family_of(self.config).defs(self.config))
        kept = f"; with {', '.join(self.files)}" if self.files else ""
        return f"{count:,} parameters ({dtype_of(self.config)}) in {self.target}{kept}"


def convert(
    source: str,
    target: str,
    *,
    dtype: str | None = None,
    averaged: bool = False,
    max_seq: int | None = None,
    fused_projections: bool = False,
    quantise: str | None = None,
    model: str | None = None,
    expert_parallel: int = 1,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Make a run folder of a Hugging Face folder (``hf:PATH run:PATH``), or the other way.

    Or of a Megatron checkpoint (``megatron:PATH run:PATH``), with the optimizer's state, steps and
    settings, so that ``functron train --resume`` takes the step that Megatron would have taken; and
    back (``run:PATH megatron:PATH``), as `torch_dist`, with the arguments of model, optimizer,
    schedule and data. See `read_megatron`.

    A run folder made of a Hugging Face folder has step 0 of a training run in it: the parameters,
    without state of an optimizer, and the settings that `fine_tuning` chooses. The newest
    checkpoint of a run is what is exported. One process does it: into a run in as much memory as
    its state takes, from one in as much as one tensor takes.

    Args:
        source: ``hf:PATH``, ``megatron:PATH`` or ``run:PATH``.
        target: ``run:PATH`` of the first two, or either of these of a run; it must not exist.
        dtype: of the parameters in the target; None: as they are.
        averaged: export the run's averages of its parameters (from a run only).
        max_seq: the longest sequence, where the model could take longer ones (to a run only).
        fused_projections: see `GPTConfig` (to a run only).
        quantise: ``fp8-block`` or ``fp8-row``, as in `functron.hub.save` (from a run only); None:
            weights are written in `dtype`. Quantised ones are read in any case.
        model: a preset, of a Megatron checkpoint that has no arguments, whose parameters alone are
            then read; None: it has them.
        expert_parallel: ranks of expert parallelism of the Megatron run that is to load what is
            written; it loads on any others with as many optimizers: one, or two if it is above 1.
        max_shard_bytes: the most data in one file (from a run only).

    Raises:
        ValueError: paths without a scheme, or none or both of them a run; options that have no
            place; and what `load` and `save` raise.
    """
    (kind, path), (other, out) = _parse(source, "from"), _parse(target, "to")
    if (kind == "run") == (other == "run"):
        fix = "functron convert hf:MODEL run:RUN, or functron convert run:RUN hf:MODEL"
        got = f"{kind}: and {other}:"
        refuse("nothing to convert", "from and to", got, "one run: and one hf: or megatron:", fix)
    if "megatron" in (kind, other):
        given = {
            "dtype": dtype, "averaged": averaged or None, "max_seq": max_seq,
            "fused_projections": fused_projections or None, "quantise": quantise,
        }  # fmt: skip
        wanted, fix = "nothing: Megatron's checkpoints are taken as they are", "leave it out"
        found = [Problem(n, repr(v), wanted, fix) for n, v in given.items() if v is not None]
        raise_problems("cannot convert", found)
        if kind == "megatron" and expert_parallel == 1:
            return _import_megatron(path, out, model)
    if expert_parallel != 1 and other != "megatron":
        wanted = "1: it is of a Megatron checkpoint that is written"
        refuse("cannot convert", "expert_parallel", expert_parallel, wanted, "leave it out")
    if model is not None:
        wanted = "a Megatron checkpoint, which may lack its arguments"
        refuse("cannot convert", "model", repr(model), wanted, "leave it out")
    if other == "megatron":
        return _export_megatron(path, out, expert_parallel)
    if kind == "hf":
        if averaged:
            got = "true from a Hugging Face folder"
            wanted = "a run, which keeps averages"
            refuse("cannot convert", "averaged", got, wanted, "leave it out")
        if quantise is not None:
            fix = f"leave it out; functron train --precision {quantise} quantises products"
            wanted = "nothing: a run keeps parameters to train"
            refuse("cannot convert", "quantise", repr(quantise), wanted, fix)
        return _import(path, out, dtype=dtype, max_seq=max_seq, fused=fused_projections)
    for name, value in (("max_seq", max_seq), ("fused_projections", fused_projections or None)):
        if value is not None:
            refuse("cannot convert", name, value, "nothing: it is the run's", "leave it out")
    settings = {"dtype": dtype, "quantise": quantise, "max_shard_bytes": max_shard_bytes}
    return _export(path, out, averaged=averaged, settings=settings)


def _parse(text: str, name: str) -> tuple[str, Path]:
    kind, colon, path = text.partition(":")
    if not colon or kind not in SCHEMES or not path:
        fix = nearest(kind, SCHEMES) if colon else f"hf:{text} or run:{text}"
        wanted = "hf:PATH, megatron:PATH or run:PATH"
        refuse("cannot tell what to convert", name, repr(text), wanted, fix)
    return kind, local_path(path, name)


def _import(
    path: Path, out: Path, *, dtype: str | None, max_seq: int | None, fused: bool
) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    kind: Dtype | None = None
    if dtype is not None:
        # float16 wants a loss scale, which `fine_tuning` does not choose
        known: dict[str, Dtype] = {name: name for name in get_args(Dtype) if name != "float16"}
        if dtype not in known:
            wanted, fix = "a dtype to train in", nearest(dtype, known)
            refuse("cannot convert", "dtype", repr(dtype), wanted, fix)
        kind = known[dtype]
    model = read_config(path, dtype=kind, max_seq=max_seq)
    if not isinstance(model, TrainedConfig):
        fix = "use it in Python: hub.load_model(path), hub.save"
        wanted = "a decoder, Mamba-2, a hybrid, BERT or T5: functron train has no others"
        refuse("cannot convert", f"hf:{path}", family_of(model).title, wanted, fix)
    if fused and not isinstance(model, GPTConfig):
        wanted = "False: only decoders have such a layout"
        refuse("cannot convert", "fused_projections", "True", wanted, "leave it out")
    if isinstance(model, GPTConfig):
        model = replace(model, fused_projections=fused)
    params = load(path, model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run, needed, free = fine_tuning(model, free_memory_bytes(device))
    run = configure(run, model=read_table(path)["model_type"], source=f"hf:{path}")
    kept: list[str] = []

    def keep(folder: Path) -> None:
        folder.mkdir()
        shutil.copyfile(path / CONFIG, folder / CONFIG)
        kept.extend([CONFIG, *copy_companions(path, folder)])

    begin(out, run, params, keep)
    return Conversion(model, out, tuple(kept), _summary(run, out, needed, free))


def begin(
    out: Path, run: config.TrainConfig, params: tree.Tree, keep: Callable[[Path], None]
) -> None:
    """Make the run folder `out` with step 0 of a training run: parameters without optimizer state.

    Args:
        out: where nothing is.
        run: its configuration.
        params: whole.
        keep: makes the folder of the config.json and the tokenizer that belong to the model.
    """

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        keep(folder / run_folder.HUB)
        checkpoint.save(folder / run_folder.CHECKPOINTS / "0", {"params": params}, {"step": 0})

    run_folder.make(out, fill)


def newest_params(
    path: Path, run: config.TrainConfig, *, averaged: bool, read: Callable
) -> tree.Tree:
    """The parameters of the newest checkpoint in a run's folder, adapters merged.

    Args:
        path: the folder.
        run: its configuration.
        averaged: the averages of its parameters that the run keeps.
        read: `checkpoint.read_params`, or `checkpoint.stored_params` to read rows where they are
            used.
    """
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    defs = lora.defs_in(run.family.defs(run.architecture), run.lora.adapters, stored)
    return lora.merge(read(stored, defs, averaged=averaged))


_PEAK, _WARMUP, _DECAY = 2e-5, 0.05, 0.01
_ROWS, _SEQ, _LEAST_SEQ, _CHUNK = 8, 2048, 128, 1024
_SHARE = 0.8
"""Of free memory: some is needed beside the traced program, by the allocator's rounding say."""


def fine_tuning(model: TrainedConfig, free_bytes: int) -> tuple[config.TrainConfig, int, int]:
    """Settings to go on with trained parameters: a small learning rate, and steps that fit.

    AdamW with a peak of 2e-5 after a warm-up and a cosine to 0, weight decay 0.01 (0 on norms and
    biases, as always), and float32 masters of parameters of 16 bits, whose updates would be lost.
    Steps have 8 samples of as many tokens as the model reads, at most 2048. Where that needs too
    much memory on one rank they are cut into microbatches; then logits are made of some tokens at a
    time; then blocks are computed again in backward; and then samples are shorter.

    Args:
        model: its architecture.
        free_bytes: memory of a rank; four fifths of it are used.

    Returns:
        The settings, what one rank holds at most in a step by its traced program, and what was
        free. Where nothing fits they are those that need least.
    """
    family = family_of(model)
    longest = min(getattr(model, "max_seq", _SEQ), _SEQ)
    table: dict[str, Any] = {
        family.name: model,
        "seq": longest,
        "global_batch": _ROWS,
        "optimizer": OptimizerConfig(
            b2=0.999, weight_decay=_DECAY, fp32_masters=model.torch_dtype.itemsize == 2
        ),
        "learning_rate": ScheduleConfig(
            "cosine", peak=_PEAK, warmup_ratio=_WARMUP, total_steps=0, end=0.0
        ),
    }
    whole = config.configure(**table)

    def peak(run: config.TrainConfig) -> int:
        return make_setup(run, Mesh()).program().memory().peak_bytes

    chunked = "loss_chunk_tokens" in family.settings and not getattr(model, "logit_cap", 0.0)
    chunk = _CHUNK if chunked and longest > _CHUNK else 0
    ladder: list[dict[str, Any]] = [{"microbatches": count} for count in (1, 2, 4, 8)]
    ladder += [{"microbatches": _ROWS, "loss_chunk_tokens": chunk}] if chunk else []
    ladder += [{**ladder[-1], "remat": "full"}]
    seqs = [longest]
    while seqs[-1] >= 2 * _LEAST_SEQ:
        seqs.append(seqs[-1] // 2)
    least = configure(whole, seq=seqs[-1], **ladder[-1])
    if (needed := peak(whole)) <= _SHARE * free_bytes:
        return whole, needed, free_bytes
    if (needed := peak(least)) <= _SHARE * free_bytes:
        for seq, rung in itertools.islice(itertools.product(seqs, ladder), 1, None):
            run = configure(whole, seq=seq, **rung)
            if (found := peak(run)) <= _SHARE * free_bytes:
                return run, found, free_bytes
    return least, needed, free_bytes


def _summary(run: config.TrainConfig, out: Path, needed: int, free: int) -> str:
    """The settings of a run, and the command that begins it."""
    most = getattr(run.architecture, "max_seq", run.data.seq)
    of = f" (the model reads up to {most})" if most > run.data.seq else ""
    parts = (
        f" in {run.parallelism.microbatches} microbatches"
        if run.parallelism.microbatches > 1
        else ""
    )
    more = ", blocks computed again in backward" if run.compute.remat == "full" else ""
    fits = f"{bytes_text(needed)} a rank, of {bytes_text(free)} free here"
    lines = [
        f"set to fine-tune: learning rate up to {run.learning_rate.peak:g} after a warm-up over "
        f"{run.learning_rate.warmup_ratio:.0%} of the steps, weight decay "
        f"{run.optimizer.weight_decay:g} (0 on norms and biases)",
        f"steps of {run.data.global_batch} samples{parts} of seq {run.data.seq}{of}{more}: {fits}",
    ]
    if needed > _SHARE * free:
        lines.append(
            "which does not fit here: divide it (--mesh fsdp=N --nproc N), or train adapters "
            "(--lora-rank 8)"
        )
    folder = shlex.quote(str(out))
    return "\n".join([*lines, f"fine-tune it: functron train --resume --out {folder} --data TEXT"])


def _export(path: Path, out: Path, *, averaged: bool, settings: Mapping[str, Any]) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    run = config.load(path / run_folder.CONFIG, known_only=True)
    model = run.architecture
    params = newest_params(path, run, averaged=averaged, read=checkpoint.stored_params)
    kept = path / run_folder.HUB if (path / run_folder.HUB / CONFIG).is_file() else None
    save(out, model, params, like=kept, **settings)
    if kept is None:  # a run that began with random weights may have a tokenizer all the same
        return Conversion(model, out, tuple(copy_companions(path / run_folder.HUB, out)))
    names = tuple(sorted(entry.name for entry in kept.iterdir()))
    return Conversion(model, out, names)


def _import_megatron(path: Path, out: Path, model: str | None) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    run, state = read_megatron(path, model=model)
    step = int(state.step)

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        kept: Any = state if step else {"params": state.params}
        about = {"step": step, "samples": run.data.batches.first_sample(step)}
        checkpoint.save(folder / run_folder.CHECKPOINTS / str(step), kept, about)

    run_folder.make(out, fill)
    return Conversion(run.architecture, out, (), _going_on(run, step, out))


def _going_on(run: config.TrainConfig, step: int, out: Path) -> str:
    """How far a run of Megatron's was, which sample is its next, and the command that takes it."""
    samples = run.data.batches.first_sample(step)
    lines = [f"at step {step} of {run.steps}, after {samples:,} samples of {run.data.seq} tokens"]
    command = f"functron train --resume --out {shlex.quote(str(out))}"
    if run.data.order == "megatron":
        lines.append(
            f"the next is sample {samples:,} of the {run.data.order_samples:,} in Megatron-LM's "
            f"order, of {run.data.path}"
        )
    elif run.data.path:
        lines.append("samples come in another order than there, where they were shuffled otherwise")
    elif run.data.format != "mock":
        total = "N" if run.data.ramp_up else run.data.batches.first_sample(run.steps)
        lines.append("its arguments do not name its data, whose split is 969,30,1 by default")
        command += f" --data PREFIX --split 969,30,1 --order megatron --order-samples {total}"
    return "\n".join([*lines, f"go on: {command}"])


def _export_megatron(path: Path, out: Path, expert_parallel: int) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    run = config.load(path / run_folder.CONFIG, known_only=True)
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    run_folder.make(
        out, lambda folder: write_megatron(folder, run, stored, expert_parallel=expert_parallel)
    )
    notes = []
    if padding := run.gpt.padded_vocab - run.gpt.vocab_size:
        notes.append(
            f"{padding} rows of padding are tokens to Megatron-LM, whose softmax counts them: its "
            "loss is higher, and falls as it trains; back here they are padding again"
        )
    if run.data.path and not is_on_disk(run):
        notes.append("its data is no files of tokens: functron preprocess makes them, --data-path")
    elif run.data.path and run.data.order != "megatron":
        notes.append("samples come in Megatron-LM's order from here on, which is another than ours")
    if run.data.pack:
        notes.append(f"samples are not packed there: pack = {run.data.pack}")
    return Conversion(run.architecture, out, (), "\n".join(notes))


def upcycled_config(dense: GPTConfig, moe: MoEConfig) -> GPTConfig:
    """The architecture of `dense` with its feed-forward layers made layers of experts.

    Raises:
        ValueError: it has experts already, or the experts' settings do not allow that they compute
            together what the dense layer does; all reasons are listed.
    """
    parts = dense.mlp_dim // moe.expert_dim
    found = []
    if dense.moe is not None:
        found.append(Problem("model", "one with experts", "a dense one"))
    if dense.mlp_dim % moe.expert_dim:
        fix = f"set it to {dense.mlp_dim} for whole copies"
        found.append(
            Problem("expert_dim", str(moe.expert_dim), f"a divisor of {dense.mlp_dim}", fix)
        )
    for name, count in (("num_experts", moe.num_experts), ("top_k", moe.top_k)):
        if parts and count % parts:
            wanted = f"a multiple of {parts}, the slices of mlp_dim={dense.mlp_dim}"
            found.append(
                Problem(name, str(count), wanted, f"set it to {-(-count // parts) * parts}")
            )
    plain = replace(moe, aux_loss=0.0, z_loss=0.0, aux="sequence", jitter=0.0, dispatch="alltoall")
    like = MoEConfig(
        moe.num_experts, moe.top_k, moe.expert_dim,
        score=moe.score, normalise=moe.normalise, renormalise=moe.renormalise,
        router_bias=moe.router_bias, balance_bias=moe.balance_bias, balance_rate=moe.balance_rate,
        expert_bias=dense.bias, router_dtype=moe.router_dtype,
    )  # fmt: skip
    sums_to_one = moe.normalise == "after" or moe.renormalise
    if plain != like or not sums_to_one:
        got = "capacity, groups, scale, shared or latent experts, or weights whose sum is not 1"
        wanted = "tokens that choose, are not dropped, and weigh their experts by parts of 1"
        found.append(Problem("moe", got, wanted, "set renormalise, and leave the others out"))
    raise_problems("cannot make experts of this model", found)
    return replace(dense, moe=moe)


def upcycle(
    params: tree.Tree, dense: GPTConfig, moe: MoEConfig, *, seed: int = 0
) -> tuple[tree.Tree, GPTConfig]:
    """Parameters of a mixture of experts that computes what the dense model does, and its config.

    With expert_dim a fraction 1 / g of mlp_dim, experts come in groups of g slices. A group's
    experts have one router column, so that a token chooses whole groups, and their output matrices
    are multiplied by g, as each weighs 1 / g of the group's weight.

    Args:
        params: of the dense model, whole.
        dense: its architecture.
        moe: the experts.
        seed: of the routers' random weights.

    Raises:
        ValueError: as `upcycled_config`.
    """
    made = upcycled_config(dense, moe)
    blocks = dict(params["blocks"])
    mlp, parts = blocks.pop("mlp"), dense.mlp_dim // moe.expert_dim
    blocks["moe"] = {
        "router": _router(made, seed, parts, mlp["down"]["w"]),
        "experts": {name: _experts(name, layer, moe, parts) for name, layer in mlp.items()},
    }
    return {**params, "blocks": blocks}, made


def _router(config: GPTConfig, seed: int, parts: int, like: torch.Tensor) -> dict:
    defs = gpt.defs(config)["blocks"]["moe"]["router"]
    groups = (*defs["w"].shape[:-1], defs["w"].shape[-1] // parts)
    key = random.key(seed).to(like.device)
    w = defs["w"].init(key, groups, like.dtype, None)
    zeros = {
        name: torch.zeros(d.shape, dtype=d.dtype, device=like.device)
        for name, d in defs.items()
        if name != "w"
    }
    return {"w": w.repeat_interleave(parts, -1), **zeros}


def _experts(name: str, layer: dict, moe: MoEConfig, parts: int) -> dict:
    """Copies of one linear layer, stacked by expert after the dim of layers."""
    copies = moe.num_experts // parts
    dim = -2 if name == "down" else -1  # of the hidden features in the matrix
    w = _repeated(torch.stack(layer["w"].chunk(parts, dim), 1), copies)
    out = {"w": w * parts if name == "down" else w}
    if "b" in layer:
        b = layer["b"]
        slices = b.unsqueeze(1) if name == "down" else torch.stack(b.chunk(parts, -1), 1)
        out["b"] = _repeated(slices, moe.num_experts // slices.shape[1])
    return out


def _repeated(x: torch.Tensor, copies: int) -> torch.Tensor:
    return x.repeat(1, copies, *[1] * (x.dim() - 2))


def upcycle_run(
    source: Path, target: Path, moe: MoEConfig, *, seed: int = 0, averaged: bool = False
) -> str:
    """Make a run folder with a mixture of experts of the newest checkpoint in a dense run's folder.

    It has step 0 of a training run in it: the parameters, without state of an optimizer;
    ``functron train --resume --out TARGET`` goes on from there.

    Args:
        source: the dense run's folder.
        target: the folder to make.
        moe: the experts.
        seed: of the routers' random weights.
        averaged: begin as the dense run's average of its parameters.

    Returns:
        A line with the number of experts and parameters, and the folder.

    Raises:
        ValueError: `source` is no run, `target` exists, or as `upcycled_config`.
    """
    run_folder.refuse_existing(target, "cannot upcycle")
    settings = config.load(source / run_folder.CONFIG, known_only=True)
    if settings.architecture is not settings.gpt:
        refuse("cannot upcycle", str(source), settings.family.title, "a run of a dense GPT")
    params = newest_params(source, settings, averaged=averaged, read=checkpoint.read_params)
    params, made = upcycle(params, settings.gpt, moe, seed=seed)
    # the dense run's recipe: of one that was imported it is for fine-tuning; not its division among
    # ranks, which other models divide in other ways
    alone = config.ParallelismConfig(microbatches=settings.parallelism.microbatches)
    run = configure(
        settings, model=f"{settings.model}-experts", source=f"run:{source}", gpt=made, lora_rank=0,
        parallelism=alone, out="", resume=False,
    )  # fmt: skip

    def keep(folder: Path) -> None:
        if (source / run_folder.HUB).is_dir():
            shutil.copytree(source / run_folder.HUB, folder)

    begin(target, run, params, keep)
    count = num_params(gpt.defs(made))
    return f"{moe.num_experts} experts, {count:,} parameters ({made.dtype}) in {target}"


# --- Megatron's runs

_OF_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
"""Options of torch's Adam and Transformer Engine's, which take groups from a checkpoint whole."""


def read_megatron(path: Path, *, model: str | None = None) -> tuple[config.TrainConfig, State]:
    """The run in a Megatron checkpoint, and its state, whole.

    Args:
        path: the folder of an iteration, or the one above, with the latest's number.
        model: a preset, for a checkpoint without arguments, of which the parameters are read; None:
            they are there.

    Raises:
        ValueError: as `hub.megatron_files.open_checkpoint`, `config_of` and `load`; or
            what the checkpoint says of samples, steps and schedule does not fit together.
    """
    opened = open_checkpoint(path)
    args = opened.args
    if args is None:
        if model is None:
            fix = f"pass --model: one of {', '.join(sorted(PRESETS)[:4])}, ..."
            got, wanted = "none in it", "the arguments of its run"
            refuse(f"cannot tell the model of {path}", "args", got, wanted, fix)
        run = config.with_model(config.TrainConfig(), model)
    elif model is not None:
        got, fix = repr(model), "leave it out"
        refuse("cannot convert", "model", got, "nothing: the checkpoint has its arguments", fix)
    else:
        run = settings_of(args, opened)
    if not isinstance(run.architecture, GPTConfig):
        refuse("cannot convert", "model", run.family.title, "a GPT")
    run = configure(run, source=f"megatron:{Path(path).absolute()}")
    loaded = megatron.load(opened, run.gpt)
    made = make_setup(run, Mesh())
    state = made.init(random.key(run.seed), loaded.masters or loaded.params)
    if args is None or loaded.mu is None:
        return run, state
    return run, _with_state(state, loaded, opened, run)


def _with_state(
    state: State, loaded: megatron.Loaded, opened: Opened, run: config.TrainConfig
) -> State:
    """`state` with the moments, masters and counts of the checkpoint."""
    iteration = opened.common.get("iteration", 0)
    scheduler = opened.common.get("opt_param_scheduler") or {}
    updates = scheduler.get("num_steps", opened.step * run.data.global_batch)
    found = {"mu": loaded.mu, "nu": loaded.nu, "masters": loaded.masters}
    flat = {
        name: dict(zip(tree.paths(values), tree.leaves(values), strict=True))
        for name, values in found.items()
        if values is not None
    }
    scheduled = iteration if run.data.ramp_up else updates // run.data.global_batch
    parents = {path.rpartition("/mu/")[0] for path in tree.paths(state.opt_state) if "/mu/" in path}

    def one(path: str, leaf: torch.Tensor) -> torch.Tensor:
        role = re.search(r"(?:^|/)(mu|nu|masters)/(.*)$", path)
        if role:
            return flat[role[1]][role[2]].to(leaf.dtype) if role[1] in flat else leaf
        if path.endswith("count"):
            adam = path.rpartition("/")[0] in parents
            return torch.full_like(leaf, opened.step if adam else scheduled)
        return leaf

    opt_state = tree.map_with_path(one, state.opt_state)
    params = loaded.params if loaded.masters is not None else state.params
    step = torch.full_like(state.step, iteration)
    return state._replace(step=step, params=params, opt_state=opt_state)


def settings_of(args: Mapping[str, Any], opened: Opened) -> config.TrainConfig:
    """The configuration of a run that goes on as Megatron-LM would with these arguments.

    Raises:
        ValueError: some say what we have no counterpart of; all are listed.
    """
    args = _with_rows(args, opened)
    architecture = config_of(args, where=str(opened.folder))
    title = f"cannot go on with the run in {opened.folder}"
    raise_problems(title, _problems(args))
    reading = reading_of(_as_scheduled(args, opened.common))
    settings = update_settings(reading, "gpt", Mesh())
    run = configure(config.configure(model="megatron", gpt=architecture), **settings)
    run = recast(reading, run)
    raise_problems(title, problems_of(reading))
    run = configure(run, gpt=architecture, **_data_of(args, opened))
    _check_samples(args, opened, run)
    return run


def _with_rows(args: Mapping[str, Any], opened: Opened) -> Mapping[str, Any]:
    """The arguments; of what we once wrote without the rows of padding, with how many there are."""
    rows, *_ = opened.weights.sizes.get(megatron.EMBEDDING) or (None,)
    once = rows is not None and rows == args.get("vocab_size") != args.get("padded_vocab_size")
    return {**args, MASKED_VOCABULARY: rows} if once else args


def _as_scheduled(args: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the counts of the scheduler's state, which goes before them.

    It counts samples. Of steps and samples that the run ends after the checkpoint has both.
    """
    scheduler = common.get("opt_param_scheduler")
    scheduler = scheduler if isinstance(scheduler, Mapping) else {}
    pairs = {
        "max_lr": "lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style",
        "lr_warmup_steps": "lr_warmup_samples", "lr_decay_steps": "lr_decay_samples",
    }  # fmt: skip
    own = {theirs: scheduler[kept] for kept, theirs in pairs.items() if kept in scheduler}
    left = {"train_samples"} if args.get("train_iters") else set()
    left |= {"lr_warmup_iters", "lr_warmup_fraction"} if "lr_warmup_samples" in own else set()
    left |= {"lr_decay_iters"} if "lr_decay_samples" in own else set()
    if not args.get("train_iters") and not args.get("train_samples"):
        own["train_iters"] = common.get("iteration")
    return {name: value for name, value in args.items() if name not in left} | own


def _problems(args: Mapping[str, Any]) -> list[Problem]:
    """Arguments whose values a launch line may have, and a checkpoint not."""
    only = {
        "optimizer": (("adam", None), "its state is not read"),
        "decoupled_lr": ((None,), "its state is not read"),
        "decoupled_weight_decay": ((True, None), "there is no such thing here"),
        "attention_dropout": ((0, None), "our attention drops nothing"),
    }
    found = []
    for name, (allowed, fix) in only.items():
        if args.get(name) not in allowed:
            found.append(Problem(name, repr(args[name]), repr(allowed[0]), fix))
    return found


def _data_of(args: Mapping[str, Any], opened: Opened) -> dict[str, Any]:
    """The seed, and where samples come from: in Megatron-LM's order, if the arguments say of what.

    Raises:
        ValueError: they say it in a way that there is not; all offenders are listed.
    """
    given = {name: args[name] for name in ("seed", *DATA_ARGUMENTS) if name in args}
    reading = Reading(read_arguments(given))
    found = {"seed": reading("seed")}
    if any(map(reading, DATA_ARGUMENTS[:5])):
        found |= data_settings(reading, "gpt", args["global_batch_size"])
    problems = [*reading.arguments.problems, *reading.problems]
    raise_problems(f"cannot go on with the data of the run in {opened.folder}", problems)
    return found


def _check_samples(args: Mapping[str, Any], opened: Opened, run: config.TrainConfig) -> None:
    """Refuse a run that has not read as many samples as its steps would have."""
    step, consumed = opened.common.get("iteration", 0), args.get("consumed_train_samples")
    expected = run.data.batches.first_sample(step)
    if consumed is not None and consumed != expected:
        wanted = f"{expected}: {step} steps of {run.data.global_batch}"
        fix = "its batches were not always of this size: the data would not go on where it was"
        title = "the run has read other samples than its steps have"
        refuse(title, "consumed_train_samples", str(consumed), wanted, fix)


def arguments_of(
    run: config.TrainConfig, step: int, *, expert_parallel: int = 1
) -> argparse.Namespace:
    """Megatron-LM's arguments of a run at a step, on so many ranks of expert parallelism.

    Raises:
        ValueError: Megatron has no such model, optimizer or schedule; all offenders are listed.
    """
    table = architecture_arguments(run.gpt, seq=run.data.seq)
    own, rate = run.optimizer, run.rate_schedule
    styles = {ours: theirs for theirs, ours in STYLES.items()}
    found = [
        Problem(name, repr(value), wanted)
        for name, value, wanted, good in (
            ("optimizer.name", own.name, "'adamw'", own.name == "adamw"),
            ("learning_rate.name", rate.name, " or ".join(styles), rate.name in styles),
            ("optimizer.groups", own.groups, "''", not own.groups),
            ("lora_rank", run.lora.rank, "0: merge adapters first", not run.lora.rank),
            ("learning_rate.rewarm_steps", rate.rewarm_steps, "0", _is_rewarmed(run, step)),
        )
        if not good
    ]
    raise_problems("Megatron has no such run", found)
    unit = "samples" if run.rate_unit == "samples" else "iters"
    ordered, moe = run.data.order == "megatron", run.gpt.moe
    # experts' capacity is that of a microbatch there
    over_batch = moe is not None and moe.capacity_over == "batch"
    samples = run.data.global_batch // run.parallelism.microbatches if over_batch else 1
    decays = (own.start_weight_decay, own.end_weight_decay)
    decays = decays if own.weight_decay_incr_style != "constant" else (own.weight_decay,) * 2
    table |= {
        MASKED_VOCABULARY: run.gpt.vocab_size,
        "global_batch_size": run.data.global_batch, "micro_batch_size": samples,
        "train_iters": run.steps,
        "rampup_batch_size": [int(n) for n in run.data.ramp_up.split()] or None,
        "optimizer": "adam", "adam_beta1": own.b1, "adam_beta2": own.b2, "adam_eps": own.eps,
        "clip_grad": own.clip_norm, "weight_decay": own.weight_decay,
        "start_weight_decay": decays[0], "end_weight_decay": decays[1],
        "weight_decay_incr_style": own.weight_decay_incr_style, "lr": rate.peak,
        "min_lr": rate.last, "lr_decay_style": styles[rate.name], "lr_warmup_init": rate.init,
        f"lr_decay_{unit}": rate.total_steps, f"lr_warmup_{unit}": rate.num_warmup_steps,
        f"lr_wsd_decay_{unit}": rate.decay_steps if rate.name == "wsd" else None,
        "train_samples": run.ordered_samples if unit == "samples" or ordered else None,
        "lr_wsd_decay_style": {ours: theirs for theirs, ours in WSD.items()}.get(rate.decay),
        "seed": run.seed, "iteration": step,
        "consumed_train_samples": run.data.batches.first_sample(step),
        "consumed_valid_samples": 0, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "expert_model_parallel_size": expert_parallel,
        "use_distributed_optimizer": True, "ckpt_format": "torch_dist",
    }  # fmt: skip
    return argparse.Namespace(**table, **_data_arguments(run))


def _data_arguments(run: config.TrainConfig) -> dict[str, Any]:
    """Where samples come from, of what Megatron-LM reads: files of tokens, or random ones."""
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    found: dict[str, Any] = dict.fromkeys(names, run.data.packed)
    found |= {"split": run.data.split or None, "dataloader_type": "single"}
    if run.evaluation.every:
        found |= {"eval_interval": run.evaluation.every, "eval_iters": run.evaluation.batches}
        found |= {"full_validation": not run.evaluation.batches}
    if run.data.format == "mock":
        return found | {"mock_data": True}
    if not run.data.path or not is_on_disk(run):
        return found
    pairs = parse_blend(run.data.path) or [(ALL, run.data.path)]
    words = [word for pair in pairs for word in pair if word != ALL]
    found |= {"mock_data": False, "data_path" if run.data.split else "train_data_path": words}
    if run.evaluation.data and not run.data.split:
        found["valid_data_path"] = [
            word.partition("=")[2] for word in shlex.split(run.evaluation.data)
        ]
    if run.data.order == "megatron":
        found |= {
            "data_cache_path": run.data.order_cache or None,
            "mid_level_dataset_surplus": run.data.blend_surplus,
            "add_extra_token_to_sequence": run.data.extra_token,
        }  # fmt: skip
    return found


def write_megatron(
    folder: Path,
    run: config.TrainConfig,
    stored: checkpoint.Checkpoint,
    *,
    expert_parallel: int = 1,
) -> None:
    """Write a checkpoint of a run as Megatron's, into an empty folder, with its optimizer's state.

    Args:
        folder: where.
        run: its configuration.
        stored: the checkpoint.
        expert_parallel: ranks of expert parallelism of the Megatron run that is to load it: with
            more than one it has an optimizer for experts alone, whose settings are apart.

    Raises:
        ValueError: as `arguments_of`; or the checkpoint's optimizer keeps no moments in float32.
    """
    step = int(stored["step"][...]) if "step" in stored else 0
    if expert_parallel < 1 or (expert_parallel > 1 and run.gpt.moe is None):
        wanted = "1 without experts" if run.gpt.moe is None else "at least 1"
        refuse("cannot convert", "expert_parallel", expert_parallel, wanted)
    args = arguments_of(run, step, expert_parallel=expert_parallel)
    params = checkpoint.stored_params(stored, run.family.defs(run.architecture))
    trees: dict[str, Any] = {"exp_avg": {}, "exp_avg_sq": {}, "param": {}}
    names = {"mu": "exp_avg", "nu": "exp_avg_sq", "masters": "param"}
    counts, parents = {}, set()
    for path in stored:
        role = re.search(r"(?:^|/)(mu|nu|masters)/(.*)$", path)
        if path.startswith("opt_state/") and role:
            _put(trees[names[role[1]]], role[2], stored[path])
            parents.add(path[: role.start()])
        elif path.startswith("opt_state/") and path.endswith("/count"):
            counts[path.rpartition("/")[0]] = int(stored[path][...])
    if bool(trees["exp_avg"]) != bool(trees["exp_avg_sq"]):
        got = "one of the moments in float32"
        refuse("Megatron has no such run", "optimizer", got, "Adam's two moments")
    if not trees["param"]:
        trees["param"] = params
    state = trees if trees["exp_avg"] else {}
    updates = next((n for parent, n in counts.items() if parent in parents), step)
    common = _common_of(run, args, step, updates if state else 0, bool(state))
    inside = folder / f"iter_{step:07d}"
    inside.mkdir()
    megatron.save(inside, megatron.Saving(run.gpt, params, _with_masters(state), common))
    (folder / LATEST).write_text(str(step), encoding="utf-8")


def _with_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state by all names: plain optimizers call masters otherwise than the distributed one."""
    return {**state, "fp32_param": state["param"]} if state else {}


def _is_rewarmed(run: config.TrainConfig, step: int) -> bool:
    """Whether the rate of a run is that of its schedule from this step on, as Megatron has it."""
    rate, by_samples = run.learning_rate, run.rate_unit == "samples"
    count = run.data.batches.first_sample(step) if by_samples else step
    return not rate.rewarm_steps or count >= rate.rewarm_at + rate.rewarm_steps


def _put(into: dict, path: str, leaf: Any) -> None:
    *above, name = path.split("/")
    for key in above:
        into = into.setdefault(key, {})
    into[name] = leaf


def _common_of(
    run: config.TrainConfig, args: argparse.Namespace, step: int, updates: int, has_state: bool
) -> dict[str, Any]:
    """The contents of ``common.pt``: for one optimizer, distributed or not."""
    rate, rows = run.rate_schedule, 1 if run.rate_unit == "samples" else run.data.global_batch
    # Megatron's steps of a rate are samples; after other batches than now its steps are ours
    by_samples = run.rate_unit == "samples" or bool(run.data.ramp_up)
    made: dict[str, Any] = {
        "args": args, "checkpoint_version": 3.0, "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {
            "max_lr": args.lr, "min_lr": args.min_lr, "lr_decay_style": args.lr_decay_style,
            "lr_warmup_steps": rate.num_warmup_steps * rows,
            "lr_decay_steps": rate.total_steps * rows,
            "num_steps": run.data.batches.first_sample(step) if by_samples else step * rows,
            "start_wd": args.start_weight_decay, "end_wd": args.end_weight_decay,
            "wd_incr_style": args.weight_decay_incr_style,
            "wd_incr_steps": args.train_samples or run.steps * run.data.global_batch,
        },
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        },
    }  # fmt: skip
    if not has_state:
        return made

    def optimizer(experts: bool) -> dict[str, Any]:
        groups = [
            {
                "is_expert_parallel": experts, "default_config": True, "wd_mult": share,
                "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": args.lr, "min_lr": args.min_lr,
                "lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps,
                "weight_decay": args.weight_decay * share, "step": float(updates), **_OF_ADAM,
            }
            for share in (1.0, 0.0)
            if not experts or share or run.gpt.bias
        ]  # fmt: skip
        # the first two are the distributed optimizer's, the others a plain one's: of parameters of
        # 16 bits it lies under "optimizer"
        plain = {"state": {"common_step": torch.tensor(float(updates))}, "param_groups": groups}
        form = "fully_reshardable"
        return {"optimizer": plain, "param_state_sharding_type": form, **plain}

    several = args.expert_model_parallel_size > 1
    made["optimizer"] = {n: optimizer(bool(n)) for n in (0, 1)} if several else optimizer(False)
    return made
