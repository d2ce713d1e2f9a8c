"""Runs made of other models and back, and mixtures of experts made of dense ones.

`convert` makes a run folder of another kind of model files, or such files of a run. Hugging Face
folders are known here; an application adds its own kind as a `RunFormat`.

Upcycling makes a mixture of experts begin as the dense model that it is made of. Every expert
begins as the dense feed-forward layer, or as one of equal slices of its hidden features, and
whichever experts a token chooses, together they compute what the layer did (Komatsuzaki et al.
2022, "Sparse upcycling"; He et al. 2024, "Upcycling large language models into mixture of experts",
for slices). Training then lets them differ.
"""

from __future__ import annotations

import inspect
import itertools
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, local_path, nearest, raise_problems, refuse
from functron.hub.reader import CONFIG, load, read_config, read_table
from functron.hub.writer import MAX_SHARD_BYTES, copy_companions, save
from functron.models import gpt, lora
from functron.models.config import Dtype, TextConfig
from functron.models.family import Config, family_of, trained_families
from functron.models.gpt import GPTConfig
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.program.cost import bytes_text, free_memory_bytes
from functron.spmd import Mesh
from functron.spmd.params import num_params
from functron.training import config, run_folder
from functron.training.config import configure
from functron.training.setup import make_setup

RUN = "run"
"""The scheme of run folders: ``run:PATH``."""


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
        return f"{count:,} parameters ({self.config.dtype}) in {self.target}{kept}"


@dataclass(frozen=True)
class RunFormat:
    """A kind of model files that `convert` makes runs of, and makes of runs.

    Both functions take the paths of source and target, and as keywords the options of `convert`
    that they know; the target does not exist.

    Attributes:
        read: makes a run folder of such files.
        write: makes such files of a run folder.
        refusals: what to say of options that one of them does not take, by name; ``{}`` in ``got``
            and ``fix`` stands for the value.
    """

    read: Callable[..., Conversion]
    write: Callable[..., Conversion]
    refusals: Mapping[str, Problem] = field(default_factory=dict)


def convert(
    source: str, target: str, *, formats: Mapping[str, RunFormat] | None = None, **options: Any
) -> Conversion:
    """Make a run folder of a Hugging Face folder (``hf:PATH run:PATH``), or the other way.

    Other `formats` have schemes of their own.

    A run folder made of a Hugging Face folder has step 0 of a training run in it: the parameters,
    without state of an optimizer, and the settings that `fine_tuning` chooses. The newest
    checkpoint of a run is what is exported. One process does it: into a run in as much memory as
    its state takes, from one in as much as one tensor takes.

    Args:
        source: ``run:PATH``, or ``SCHEME:PATH`` of a format.
        target: the other of the two; it must not exist.
        formats: by scheme; None: Hugging Face's alone (`FORMATS`).
        options: those that the format's function takes; None and False are left out. Of Hugging
            Face folders, into a run: ``dtype`` of the parameters, ``max_seq``, the longest
            sequence, where the model could take longer ones, and ``fused_projections``, see
            `GPTConfig`.
            From a run: ``dtype``, ``averaged``, the run's averages of its parameters,
            ``max_shard_bytes``, the most data in one file, and ``quantise``, ``fp8-block`` or
            ``fp8-row``, as in `functron.hub.save`. Quantised weights are read in any case.

    Raises:
        ValueError: paths without a scheme, or none or both of them a run; options that have no
            place; and what the format raises.
    """
    formats = FORMATS if formats is None else formats
    (kind, path), (other, out) = (
        _parse_place(text, name, formats) for text, name in ((source, "from"), (target, "to"))
    )
    if (kind == RUN) == (other == RUN):
        fix = "functron convert hf:MODEL run:RUN, or functron convert run:RUN hf:MODEL"
        wanted = f"one run: and one {' or '.join(f'{name}:' for name in formats)}"
        refuse("nothing to convert", "from and to", f"{kind}: and {other}:", wanted, fix)
    chosen = formats[kind if other == RUN else other]
    function = chosen.read if other == RUN else chosen.write
    given = {name: x for name, x in options.items() if x is not None and x is not False}
    _check_options(given, chosen, function, formats)
    run_folder.refuse_existing(out, "cannot convert")
    return function(path, out, **given)


def _parse_place(text: str, name: str, formats: Mapping[str, RunFormat]) -> tuple[str, Path]:
    """The scheme and the path of a source or target."""
    schemes = [*formats, RUN]
    kind, colon, path = text.partition(":")
    if not colon or kind not in schemes or not path:
        fix = nearest(kind, schemes) if colon else f"hf:{text} or run:{text}"
        *most, last = (f"{scheme}:PATH" for scheme in schemes)
        wanted = f"{', '.join(most)} or {last}"
        refuse("cannot tell what to convert", name, repr(text), wanted, fix)
    return kind, local_path(path, name)


def _check_options(
    given: Mapping[str, Any],
    chosen: RunFormat,
    function: Callable,
    formats: Mapping[str, RunFormat],
) -> None:
    """Refuse options that a format's function does not take; all are listed."""
    known = {
        name
        for one in formats.values()
        for name in (*_options_of(one.read), *_options_of(one.write))
    }
    found = []
    for name in given.keys() - _options_of(function):
        if name not in known:
            found.append(Problem(name, "no such option", "one of a format", nearest(name, known)))
            continue
        usual = Problem(name, "{!r}", "nothing: that is the source's", "leave it out")
        said = chosen.refusals.get(name, usual)
        got, fix = said.got.format(given[name]), said.fix.format(given[name])
        found.append(replace(said, got=got, fix=fix))
    raise_problems("cannot convert", sorted(found, key=lambda problem: problem.path))


def _options_of(function: Callable) -> set[str]:
    """The keywords of a function that are no positional arguments as well."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _make_run(
    path: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_seq: int | None = None,
    fused_projections: bool = False,
) -> Conversion:
    """Make a run folder of a Hugging Face folder."""
    kind: Dtype | None = None
    if dtype is not None:
        # float16 wants a loss scale, which `fine_tuning` does not choose
        known: dict[str, Dtype] = {name: name for name in get_args(Dtype) if name != "float16"}
        if dtype not in known:
            wanted, fix = "a dtype to train in", nearest(dtype, known)
            refuse("cannot convert", "dtype", repr(dtype), wanted, fix)
        kind = known[dtype]
    model = read_config(path, dtype=kind, max_seq=max_seq)
    if family_of(model).objective is None:
        fix = "use it in Python: hub.load_model(path), hub.save"
        others = [each.title for each in trained_families().values() if each.name != "gpt"]
        wanted = f"{', '.join(['a decoder', *others])}: functron train has no others"
        refuse("cannot convert", f"hf:{path}", family_of(model).title, wanted, fix)
    if fused_projections and not isinstance(model, GPTConfig):
        wanted = "False: only decoders have such a layout"
        refuse("cannot convert", "fused_projections", "True", wanted, "leave it out")
    if isinstance(model, GPTConfig):
        model = replace(model, fused_projections=fused_projections)
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


def fine_tuning(model: TextConfig, free_bytes: int) -> tuple[config.TrainConfig, int, int]:
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


def _write_hub_folder(
    path: Path,
    out: Path,
    *,
    averaged: bool = False,
    dtype: str | None = None,
    quantise: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Make a Hugging Face folder of the newest checkpoint in a run folder."""
    run = config.load(path / run_folder.CONFIG, known_only=True)
    model = run.architecture
    params = newest_params(path, run, averaged=averaged, read=checkpoint.stored_params)
    kept = path / run_folder.HUB if (path / run_folder.HUB / CONFIG).is_file() else None
    save(
        out,
        model,
        params,
        like=kept,
        dtype=dtype,
        quantise=quantise,
        max_shard_bytes=max_shard_bytes,
    )
    if kept is None:  # a run that began with random weights may have a tokenizer all the same
        return Conversion(model, out, tuple(copy_companions(path / run_folder.HUB, out)))
    names = tuple(sorted(entry.name for entry in kept.iterdir()))
    return Conversion(model, out, names)


_REFUSALS = {
    "averaged": Problem(
        "averaged",
        "true from a Hugging Face folder",
        "a run, which keeps averages",
        "leave it out",
    ),
    "quantise": Problem(
        "quantise",
        "{!r}",
        "nothing: a run keeps parameters to train",
        "leave it out; functron train --precision {} quantises products",
    ),
}
FORMATS: Mapping[str, RunFormat] = MappingProxyType(
    {"hf": RunFormat(_make_run, _write_hub_folder, MappingProxyType(_REFUSALS))}
)
"""The formats of `convert` by their schemes, beside run folders."""


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
    w = _repeat(torch.stack(layer["w"].chunk(parts, dim), 1), copies)
    out = {"w": w * parts if name == "down" else w}
    if "b" in layer:
        b = layer["b"]
        slices = b.unsqueeze(1) if name == "down" else torch.stack(b.chunk(parts, -1), 1)
        out["b"] = _repeat(slices, moe.num_experts // slices.shape[1])
    return out


def _repeat(x: torch.Tensor, copies: int) -> torch.Tensor:
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
