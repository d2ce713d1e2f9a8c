"""Runs made of other models: Hugging Face's, Megatron's, and mixtures of experts of dense ones.

Upcycling makes a mixture of experts begin as the dense model that it is made of. Every expert
begins as the dense feed-forward layer, or as one of equal slices of its hidden features, and
whichever experts a token chooses, together they compute what the layer did (Komatsuzaki et al.
2022, "Sparse upcycling"; He et al. 2024, "Upcycling large language models into mixture of experts",
for slices). Training then lets them differ.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.hub.config import CONFIG, read_config, read_table
from functron.hub.reader import load
from functron.hub.writer import MAX_SHARD_BYTES, copy_companions, save
from functron.models import gpt, lora
from functron.models.config import Dtype
from functron.models.family import Config, TrainedConfig, dtype_of, family_of
from functron.models.gpt import GPTConfig
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.program.cost import bytes_text
from functron.spmd import Mesh
from functron.spmd.params import num_params
from functron.training import config, megatron, run_folder
from functron.training.hardware import free_memory_bytes
from functron.training.plan import plan

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
    back (``run:PATH megatron:PATH``), as `torch_dist`. See `functron.training.megatron`.

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
    return kind, Path(path)


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
    run = replace(run, model=read_table(path)["model_type"], source=f"hf:{path}")
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
    defs = lora.defs_in(run.family.defs(run.architecture), run.lora, stored)
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
    whole = config.TrainConfig(**table)

    def peak(run: config.TrainConfig) -> int:
        return plan(run, Mesh()).program().memory().peak_bytes

    chunked = "loss_chunk_tokens" in family.settings and not getattr(model, "logit_cap", 0.0)
    chunk = _CHUNK if chunked and longest > _CHUNK else 0
    ladder: list[dict[str, Any]] = [{"microbatches": count} for count in (1, 2, 4, 8)]
    ladder += [{"microbatches": _ROWS, "loss_chunk_tokens": chunk}] if chunk else []
    ladder += [{**ladder[-1], "remat": "full"}]
    seqs = [longest]
    while seqs[-1] >= 2 * _LEAST_SEQ:
        seqs.append(seqs[-1] // 2)
    least = replace(whole, seq=seqs[-1], **ladder[-1])
    if (needed := peak(whole)) <= _SHARE * free_bytes:
        return whole, needed, free_bytes
    if (needed := peak(least)) <= _SHARE * free_bytes:
        for seq, rung in itertools.islice(itertools.product(seqs, ladder), 1, None):
            run = replace(whole, seq=seq, **rung)
            if (found := peak(run)) <= _SHARE * free_bytes:
                return run, found, free_bytes
    return least, needed, free_bytes


def _summary(run: config.TrainConfig, out: Path, needed: int, free: int) -> str:
    """The settings of a run, and the command that begins it."""
    most = getattr(run.architecture, "max_seq", run.seq)
    of = f" (the model reads up to {most})" if most > run.seq else ""
    parts = f" in {run.microbatches} microbatches" if run.microbatches > 1 else ""
    more = ", blocks computed again in backward" if run.remat == "full" else ""
    fits = f"{bytes_text(needed)} a rank, of {bytes_text(free)} free here"
    lines = [
        f"set to fine-tune: learning rate up to {run.learning_rate.peak:g} after a warm-up over "
        f"{run.learning_rate.warmup_ratio:.0%} of the steps, weight decay "
        f"{run.optimizer.weight_decay:g} (0 on norms and biases)",
        f"steps of {run.global_batch} samples{parts} of seq {run.seq}{of}{more}: {fits}",
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
    run = config.load(path / run_folder.CONFIG)
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
    run, state = megatron.read(path, model=model)
    step = int(state.step)

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        kept: Any = state if step else {"params": state.params}
        about = {"step": step, "samples": run.batches.first_sample(step)}
        checkpoint.save(folder / run_folder.CHECKPOINTS / str(step), kept, about)

    run_folder.make(out, fill)
    lines = [
        f"at step {step} of {run.steps}, after {run.batches.first_sample(step):,} samples of "
        f"{run.seq} tokens",
        f"go on: functron train --resume --out {shlex.quote(str(out))} --data TOKENS",
    ]
    return Conversion(run.architecture, out, (), "\n".join(lines))


def _export_megatron(path: Path, out: Path, expert_parallel: int) -> Conversion:
    run_folder.refuse_existing(out, "cannot convert")
    run = config.load(path / run_folder.CONFIG)
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    run_folder.make(
        out, lambda folder: megatron.write(folder, run, stored, expert_parallel=expert_parallel)
    )
    return Conversion(run.architecture, out, ())


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


_DIVIDED = (
    "sequence_parallel", "context", "zigzag", "expert_axes", "schedule", "chunks", "layout",
    "vocab_over_pp", "zero", "gather",
)  # fmt: skip
"""Settings of the dense run's division among ranks, which other models divide in other ways."""


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
    settings = config.load(source / run_folder.CONFIG)
    if settings.architecture is not settings.gpt:
        refuse("cannot upcycle", str(source), settings.family.title, "a run of a dense GPT")
    params = newest_params(source, settings, averaged=averaged, read=checkpoint.read_params)
    params, made = upcycle(params, settings.gpt, moe, seed=seed)
    # the dense run's recipe: of one that was imported it is for fine-tuning
    run = replace(
        settings, model=f"{settings.model}-experts", source=f"run:{source}", gpt=made, lora_rank=0,
        mesh="", nproc=0, out="", resume=False,
        **{name: getattr(config.TrainConfig, name) for name in _DIVIDED},
    )  # fmt: skip

    def keep(folder: Path) -> None:
        if (source / run_folder.HUB).is_dir():
            shutil.copytree(source / run_folder.HUB, folder)

    begin(target, run, params, keep)
    count = num_params(gpt.defs(made))
    return f"{moe.num_experts} experts, {count:,} parameters ({made.dtype}) in {target}"
