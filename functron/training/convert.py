"""Convert other model files into runs and back, and dense models into mixtures of experts.

`convert` converts Hugging Face folders; an application adds its own files as a `RunFormat`.

Upcycling initializes a mixture of experts that computes the same as a dense model. Every expert is
a copy of the dense feed-forward layer, or of one of equal slices of its hidden features, and any
experts that a token chooses together compute what the layer did (Komatsuzaki et al. 2022, "Sparse
upcycling"; He et al. 2024, "Upcycling large language models into mixture of experts", for slices).
"""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, local_path, nearest, raise_problems, refuse
from functron.core.tables import bytes_text
from functron.hub.adapters import find_base, has_adapter, load_with_adapter, save_adapter
from functron.hub.files import read_json
from functron.hub.reader import CONFIG, load, read_config, read_table
from functron.hub.writer import MAX_SHARD_BYTES, copy_companions, save
from functron.models import gpt, lora
from functron.models.config import Dtype, TextConfig
from functron.models.family import Config, family_of, trained_families
from functron.models.gpt import GPTConfig
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.program.cost import free_memory_bytes
from functron.spmd import Mesh
from functron.spmd.params import joined_params, num_params
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
        files: names of the files that were copied from the source.
        recipe: the settings of a run that was made, for the user.
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
    """A format of model files that `convert` converts into runs, and runs into.

    Both functions take the paths of source and target, which does not exist, and as keywords their
    options of `convert`.

    Attributes:
        read: converts files of the format into a run folder.
        write: converts a run folder into files of the format.
        refusals: messages for options that one of them does not take, by name; ``{}`` in ``got``
            and ``fix`` stands for the value.
    """

    read: Callable[..., Conversion]
    write: Callable[..., Conversion]
    refusals: Mapping[str, Problem] = field(default_factory=dict)


def convert(
    source: str, target: str, *, formats: Mapping[str, RunFormat] | None = None, **options: Any
) -> Conversion:
    """Convert a Hugging Face folder into a run (``hf:PATH run:PATH``), or a run into such a folder.

    A run made of a Hugging Face folder is as of `begin`, with the settings of `fine_tuning`. Of a
    run the newest checkpoint is exported. It takes one process, and memory for the model, or, to
    export a run, for one tensor.

    Args:
        source: ``run:PATH``, or ``SCHEME:PATH`` of a format.
        target: the other of the two; it must not exist.
        formats: by scheme; None: Hugging Face's only (`FORMATS`).
        options: of the format's function; None, False and () are left out. From Hugging Face:
            ``dtype`` of the parameters, ``max_seq``, a longest sequence below the model's, and
            ``ignore``, entries of config.json that change nothing. To Hugging Face: ``dtype``,
            ``averaged``, the run's averages of parameters, ``max_shard_bytes`` per file,
            ``adapter``, a run's low-rank additions alone as PEFT has them, and ``quantise``,
            ``fp8-block`` or ``fp8-row``, as in `functron.hub.save`. Quantised weights can be read.
            A folder of PEFT, with its base or its base's path, is a run that goes on training it.

    Raises:
        ValueError: paths have no scheme, or not exactly one is a run; options do not apply; or as
            the format's function.
    """
    formats = FORMATS if formats is None else formats
    kind, path = _parse_path(source, "from", formats)
    other, out = _parse_path(target, "to", formats)
    if (kind == RUN) == (other == RUN):
        fix = "functron convert hf:MODEL run:RUN, or functron convert run:RUN hf:MODEL"
        wanted = f"one run: and one {' or '.join(f'{name}:' for name in formats)}"
        refuse("nothing to convert", "from and to", f"{kind}: and {other}:", wanted, fix)
    chosen = formats[kind if other == RUN else other]
    function = chosen.read if other == RUN else chosen.write
    given = {name: x for name, x in options.items() if x not in (None, False, ())}
    _check_options(given, chosen, function, formats)
    run_folder.refuse_existing(out, "cannot convert")
    return function(path, out, **given)


def _parse_path(text: str, name: str, formats: Mapping[str, RunFormat]) -> tuple[str, Path]:
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
    functions = (each for one in formats.values() for each in (one.read, one.write))
    known = set().union(*map(_list_options, functions))
    found = []
    for name in given.keys() - _list_options(function):
        if name not in known:
            found.append(Problem(name, "no such option", "one of a format", nearest(name, known)))
            continue
        usual = Problem(name, "{!r}", "nothing: it is that of the source", "leave it out")
        said = chosen.refusals.get(name, usual)
        got, fix = said.got.format(given[name]), said.fix.format(given[name])
        found.append(replace(said, got=got, fix=fix))
    raise_problems("cannot convert", sorted(found, key=lambda problem: problem.path))


def _list_options(function: Callable) -> set[str]:
    """The keyword-only arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _make_run(
    path: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_seq: int | None = None,
    ignore: Sequence[str] = (),
) -> Conversion:
    # float16 needs a loss scale, which `fine_tuning` does not choose
    known: dict[str, Dtype] = {name: name for name in get_args(Dtype) if name != "float16"}
    if dtype is not None and dtype not in known:
        wanted, fix = "a dtype to train in", nearest(dtype, known)
        refuse("cannot convert", "dtype", repr(dtype), wanted, fix)
    how: dict[str, Any] = {"dtype": known[dtype] if dtype else None}
    how |= {"max_seq": max_seq, "ignore": ignore}
    if has_adapter(path):
        return _make_adapted_run(path, out, how)
    model = read_config(path, **how)
    if family_of(model).objective is None:
        fix = "use it in Python: hub.load_model(path), hub.save"
        others = [each.title for each in trained_families().values() if each.name != "gpt"]
        wanted = f"{', '.join(['a decoder', *others])}: functron train has no others"
        refuse("cannot convert", f"hf:{path}", family_of(model).title, wanted, fix)
    return _fine_tune(model, load(path, model), path, read_table(path)["model_type"], out)


def _make_adapted_run(path: Path, out: Path, how: Mapping[str, Any]) -> Conversion:
    """A run that goes on training an adapter of PEFT beside its base."""
    model, params, settings = load_with_adapter(path, **how)
    base = find_base(path)
    adapters = {
        "lora_rank": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_targets": ",".join(settings.targets),
        "lora_dora": settings.dora,
    }
    kind = read_json(base / CONFIG)["model_type"]
    return _fine_tune(model, params, base, kind, out, **adapters)


def _fine_tune(
    model: Config, params: tree.Tree, source: Path, kind: str, out: Path, **settings: Any
) -> Conversion:
    """A run that begins with a model of a folder, and keeps the files that describe it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run, needed, free = fine_tuning(model, free_memory_bytes(device))
    run = configure(run, model=kind, source=f"hf:{source}", **settings)
    kept: list[str] = []

    def keep(folder: Path) -> None:
        folder.mkdir()
        shutil.copyfile(source / CONFIG, folder / CONFIG)
        kept.extend([CONFIG, *copy_companions(source, folder)])

    begin(out, run, params, keep)
    return Conversion(model, out, tuple(kept), _describe_run(run, out, needed, free))


def begin(
    out: Path, run: config.TrainConfig, params: tree.Tree, keep: Callable[[Path], None]
) -> None:
    """Make a run folder with a checkpoint of step 0: parameters without optimizer state.

    ``functron train --resume --out OUT`` trains it.

    Args:
        out: its path, which does not exist.
        params: global values.
        keep: makes the folder of the model's config.json and tokenizer.
    """

    def fill(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        keep(folder / run_folder.HUB)
        state, joined = {"params": params}, joined_params(run.family.defs(run.architecture))
        placement = checkpoint.Placement.of(state, joined=joined)
        saved = folder / run_folder.CHECKPOINTS / "0"
        checkpoint.save(saved, state, {"step": 0}, placement=placement)

    run_folder.make(out, fill)


def newest_params(
    path: Path, run: config.TrainConfig, *, averaged: bool, read: Callable
) -> tree.Tree:
    """The parameters of a run's newest checkpoint, with adapters merged.

    Args:
        averaged: read the run's averages of its parameters.
        read: `checkpoint.read_params`, or `checkpoint.stored_params` to read rows lazily.
    """
    return lora.merge(read_stored(path, run, averaged=averaged, read=read))


def read_stored(
    path: Path, run: config.TrainConfig, *, averaged: bool, read: Callable
) -> tree.Tree:
    """The parameters of a run's newest checkpoint, with adapters beside their matrices.

    Args:
        averaged, read: as of `newest_params`.
    """
    stored = checkpoint.Checkpoint(checkpoint.latest(path / run_folder.CHECKPOINTS))
    defs = lora.defs_in(run.family.defs(run.architecture), run.lora.adapters, stored)
    return read(stored, defs, averaged=averaged)


_PEAK, _WARMUP, _DECAY = 2e-5, 0.05, 0.01
_ROWS, _SEQ, _LEAST_SEQ, _CHUNK = 8, 2048, 128, 1024
_SHARE = 0.8
"""The fraction of free memory that traced programs may use; the allocator rounds up."""


def fine_tuning(model: TextConfig, free_bytes: int) -> tuple[config.TrainConfig, int, int]:
    """Settings to fine-tune trained parameters: a small learning rate, and steps that fit.

    AdamW with a learning rate of 2e-5 after a warm-up, a cosine to 0, weight decay 0.01 (0 on norms
    and biases), and float32 masters of 16-bit parameters. Steps have 8 samples of the model's
    longest sequence, at most 2048 tokens. If that needs too much memory on one rank, batches are
    cut into microbatches; then logits are chunked; then activations are checkpointed; and then
    samples are shortened.

    Args:
        free_bytes: memory of a rank, of which 80% is used.

    Returns:
        The settings, the peak memory of a rank's traced step, and `free_bytes`. If nothing fits,
        the settings that need the least.
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
    # from the fastest steps to those that need the least memory
    changes: list[dict[str, Any]] = [{"microbatches": count} for count in (1, 2, 4, 8)]
    changes += [{"microbatches": _ROWS, "loss_chunk_tokens": chunk}] if chunk else []
    changes += [{**changes[-1], "remat": "full"}]
    seqs = [longest]
    while seqs[-1] >= 2 * _LEAST_SEQ:
        seqs.append(seqs[-1] // 2)
    tried = [configure(whole, seq=seq, **change) for seq in seqs for change in changes]
    needed = 0
    for run in tried:
        if (found := peak(run)) <= _SHARE * free_bytes:
            return run, found, free_bytes
        if not needed and (needed := peak(tried[-1])) > _SHARE * free_bytes:
            break  # none of them fits
    return tried[-1], needed, free_bytes


def _describe_run(run: config.TrainConfig, out: Path, needed: int, free: int) -> str:
    most, count = getattr(run.architecture, "max_seq", run.data.seq), run.parallelism.microbatches
    of = f" (the model reads up to {most})" if most > run.data.seq else ""
    parts = f" in {count} microbatches" if count > 1 else ""
    more = ", with activation checkpointing" if run.compute.remat == "full" else ""
    fits = f"{bytes_text(needed)} a rank, of {bytes_text(free)} free here"
    lines = [
        f"set to fine-tune: learning rate up to {run.learning_rate.peak:g} after a warm-up over "
        f"{run.learning_rate.warmup_ratio:.0%} of the steps, weight decay "
        f"{run.optimizer.weight_decay:g} (0 on norms and biases)",
        f"steps of {run.data.global_batch} samples{parts} of seq {run.data.seq}{of}{more}: {fits}",
    ]
    if needed > _SHARE * free:
        lines.append(
            "which does not fit here: shard it (--mesh fsdp=N --nproc N), or train adapters "
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
    adapter: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    run, hub = config.load(path / run_folder.CONFIG, known_only=True), path / run_folder.HUB
    model = run.architecture
    if adapter:
        given = [("dtype", dtype), ("quantise", quantise), ("averaged", averaged or None)]
        wanted, fix = "nothing with adapter: it is stored as it was trained", "leave it out"
        found = [Problem(name, repr(x), wanted, fix) for name, x in given if x is not None]
        if not run.lora.rank:
            got = "a run that trains all parameters"
            found.append(Problem("adapter", got, "one with lora_rank", "leave --adapter out"))
        raise_problems("cannot export an adapter", found)
        params = read_stored(path, run, averaged=False, read=checkpoint.read_params)
        table = read_json(hub / CONFIG) if (hub / CONFIG).is_file() else {}
        source = run.source.removeprefix("hf:") if run.source.startswith("hf:") else ""
        save_adapter(out, model, params, model_type=table.get("model_type"), base=source)
        return Conversion(model, out, ())
    params = newest_params(path, run, averaged=averaged, read=checkpoint.stored_params)
    kept = hub if (hub / CONFIG).is_file() else None
    options: dict[str, Any] = {"quantise": quantise, "max_shard_bytes": max_shard_bytes}
    save(out, model, params, like=kept, dtype=dtype, **options)
    if kept is None:  # a run that began with random weights may have a tokenizer
        return Conversion(model, out, tuple(copy_companions(hub, out)))
    return Conversion(model, out, tuple(sorted(entry.name for entry in kept.iterdir())))


_TRAIN_IN = "leave it out; functron train --precision {} quantises products"
_REFUSALS = (
    ("averaged", "true from a Hugging Face folder", "a run, which keeps averages", "leave it out"),
    ("quantise", "{!r}", "nothing: a run keeps parameters to train", _TRAIN_IN),
    ("adapter", "true from a Hugging Face folder", "a run: adapters are read", "leave it out"),
)
_HUB = RunFormat(_make_run, _write_hub_folder, {row[0]: Problem(*row) for row in _REFUSALS})
FORMATS: Mapping[str, RunFormat] = MappingProxyType({"hf": _HUB})
"""The formats of `convert`, by scheme."""


def upcycled_config(dense: GPTConfig, moe: MoEConfig) -> GPTConfig:
    """The architecture of `dense` with experts in place of feed-forward layers.

    Raises:
        ValueError: it has experts already, or experts with these settings cannot compute what the
            dense layer does; all reasons are listed.
    """
    parts = dense.mlp_dim // moe.expert_dim
    found = []
    if dense.moe is not None:
        found.append(Problem("model", "one with experts", "a dense one"))
    if dense.mlp_dim % moe.expert_dim:
        wanted, fix = f"a divisor of {dense.mlp_dim}", f"set it to {dense.mlp_dim} for whole copies"
        found.append(Problem("expert_dim", str(moe.expert_dim), wanted, fix))
    for name, count in (("num_experts", moe.num_experts), ("top_k", moe.top_k)):
        if parts and count % parts:
            wanted = f"a multiple of {parts}, the slices of mlp_dim={dense.mlp_dim}"
            fix = f"set it to {-(-count // parts) * parts}"
            found.append(Problem(name, str(count), wanted, fix))
    plain = replace(moe, aux_loss=0.0, z_loss=0.0, aux="sequence", jitter=0.0, dispatch="alltoall")
    like = MoEConfig(
        moe.num_experts, moe.top_k, moe.expert_dim,
        score=moe.score, normalise=moe.normalise, renormalise=moe.renormalise,
        router_bias=moe.router_bias, balance_bias=moe.balance_bias, balance_rate=moe.balance_rate,
        balance_by=moe.balance_by, balance_decay=moe.balance_decay,
        expert_bias=dense.bias, router_dtype=moe.router_dtype,
    )  # fmt: skip
    sums_to_one = moe.normalise == "after" or moe.renormalise
    if plain != like or not sums_to_one:
        got = "capacity, groups, scale, shared or latent experts, or weights whose sum is not 1"
        wanted = "tokens that choose experts, are not dropped, and have weights of sum 1"
        found.append(Problem("moe", got, wanted, "set renormalise, and leave the others out"))
    raise_problems("cannot make experts of this model", found)
    return replace(dense, moe=moe)


def upcycle(
    params: tree.Tree, dense: GPTConfig, moe: MoEConfig, *, seed: int = 0
) -> tuple[tree.Tree, GPTConfig]:
    """Parameters of a mixture of experts that computes the same as a dense model, and its config.

    With expert_dim = mlp_dim / g, experts come in groups of g slices. A group's experts share a
    router column, so that tokens choose complete groups, and their output matrices are multiplied
    by g, as each has 1 / g of the group's weight.

    Args:
        params: of the dense model: global values.
        seed: of the routers' random weights.

    Raises:
        ValueError: as `upcycled_config`.
    """
    made = upcycled_config(dense, moe)
    blocks = dict(params["blocks"])
    mlp, parts = blocks.pop("mlp"), dense.mlp_dim // moe.expert_dim
    blocks["moe"] = {
        "router": _make_router(made, seed, parts, mlp["down"]["w"]),
        "experts": {name: _copy_layer(name, layer, moe, parts) for name, layer in mlp.items()},
    }
    return {**params, "blocks": blocks}, made


def _make_router(config: GPTConfig, seed: int, parts: int, like: torch.Tensor) -> dict:
    defs = gpt.defs(config)["blocks"]["moe"]["router"]
    groups = (*defs["w"].shape[:-1], defs["w"].shape[-1] // parts)
    key = random.key(seed).to(like.device)
    w = defs["w"].init(key, groups, like.dtype, None)
    zeros = {x: torch.zeros(d.shape, dtype=d.dtype, device=like.device) for x, d in defs.items()}
    return zeros | {"w": w.repeat_interleave(parts, -1)}


def _copy_layer(name: str, layer: dict, moe: MoEConfig, parts: int) -> dict:
    """Copies of a linear layer, stacked by expert after the dim of layers."""
    is_down, copies = name == "down", moe.num_experts // parts
    dim = (
        -2 if is_down else -1
    )  # of the hidden features, which the bias of the output does not have
    out = {}
    for kind, x in layer.items():
        whole = is_down and kind == "b"
        slices = torch.stack([x] * parts if whole else x.chunk(parts, dim), 1)
        out[kind] = slices.repeat(1, copies, *[1] * (slices.dim() - 2))
    return out | {"w": out["w"] * parts} if is_down else out


def upcycle_run(
    source: Path, target: Path, moe: MoEConfig, *, seed: int = 0, averaged: bool = False
) -> str:
    """Upcycle the newest checkpoint of a dense run into a run folder; see `begin`.

    Args:
        seed: of the routers' random weights.
        averaged: start from the dense run's averages of its parameters.

    Returns:
        A summary in a line.

    Raises:
        ValueError: `source` is not a run, `target` exists, or as `upcycled_config`.
    """
    run_folder.refuse_existing(target, "cannot upcycle")
    settings = config.load(source / run_folder.CONFIG, known_only=True)
    if settings.architecture is not settings.gpt:
        refuse("cannot upcycle", str(source), settings.family.title, "a run of a dense GPT")
    params = newest_params(source, settings, averaged=averaged, read=checkpoint.read_params)
    params, made = upcycle(params, settings.gpt, moe, seed=seed)
    # the dense run's settings but its parallelism, which may not fit experts
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
