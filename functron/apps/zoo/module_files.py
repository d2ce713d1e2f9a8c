"""Convert modules' own files into run folders and back: ``hf-module:``, ``hf-classifier:`` and
``hf-embedder:PATH``.

What is written is what the module writes: transformers' ``save_pretrained``, or, of a module that
has none, its state dict in model.safetensors. Names, ties, buffers and dtypes are the module's, so
that a run that has taken no step gives back the numbers that it began with. Low-rank additions are
merged, or written alone as PEFT's files.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron import checkpoint
from functron.apps.zoo import embedders, heads
from functron.apps.zoo.embedders import EmbedderConfig, build_embedder, read_layout, write_layout
from functron.apps.zoo.heads import ClassifierConfig, build_classifier
from functron.apps.zoo.module_adapters import list_adapted
from functron.apps.zoo.modules import (
    HUB,
    ModuleConfig,
    build_module,
    flatten,
    open_module,
    trained_weights,
)
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.hub import files
from functron.hub.adapters import (
    WEIGHTS,
    AdapterScales,
    count_used,
    fill_ranks,
    find_base,
    has_adapter,
    make_settings,
    read_scales,
)
from functron.hub.reader import ADAPTER
from functron.hub.writer import copy_companions, write_json
from functron.models import lora
from functron.nn import Adapter
from functron.spmd.params import init_params
from functron.training import config, run_folder
from functron.training.config import TrainConfig, configure
from functron.training.convert import Conversion, RunFormat, begin, newest_params, read_stored

_NAMES = {
    "dtype": "the run's: functron train --precision NAME",
    "max_seq": "the module's own",
    "quantise": "nothing: the module's files are as it writes them",
}

_BEFORE, _SIDES = "base_model.model.", ("lora_A.weight", "lora_B.weight")
"""The beginning and the ends of the names of PEFT's tensors."""


def make_format() -> RunFormat:
    """The format of ``functron convert run:PATH hf-module:PATH``, and of a run that begins so."""
    return _make_format(HUB)


def make_classifier_format() -> RunFormat:
    """The same of ``hf-classifier:PATH``."""
    return _make_format(heads.SCHEME)


def make_embedder_format() -> RunFormat:
    """The same of ``hf-embedder:PATH``, in sentence-transformers' layout."""
    return _make_format(embedders.SCHEME)


def _make_format(scheme: str) -> RunFormat:
    refusals = {
        name: Problem(name, "{!r}", wanted, "leave it out") for name, wanted in _NAMES.items()
    }

    def make_run(path: Path, out: Path) -> Conversion:
        return _make_run(scheme, path, out)

    return RunFormat(make_run, write_module, MappingProxyType(refusals))


def _make_run(scheme: str, path: Path, out: Path) -> Conversion:
    """A run that begins with the module of a folder, whose tokenizer is kept with it.

    Of a folder of PEFT it goes on training the adapter, beside the module of its base.
    """
    adapted = scheme == HUB and has_adapter(path)
    base = _find_base(path) if adapted else path
    run = configure(model=f"{scheme}:{base.absolute()}")
    model: Any = run.architecture
    params, title = init_params(random.key(run.seed), run.family.defs(model)), ""
    if adapted:
        run, params = _add_adapter(run, params, path)
        title = f"it goes on training the adapter: functron train --resume --out {out}"
    kept: list[str] = []

    def keep(folder: Path) -> None:
        folder.mkdir()
        source = read_layout(base).model if scheme == embedders.SCHEME else base
        kept.extend(copy_companions(source, folder))

    begin(out, run, params, keep)
    return Conversion(model, out, tuple(kept), title)


def _find_base(path: Path) -> Path:
    base = find_base(path)
    if base == path or (base / ADAPTER).exists():  # transformers would put layers of PEFT into it
        got, wanted = "the adapter and its base in one folder", "a folder for each"
        fix = f"put {ADAPTER} and {WEIGHTS} elsewhere, with this path as base_model_name_or_path"
        refuse("cannot use an adapter", str(base), got, wanted, fix)
    return base


def _add_adapter(run: TrainConfig, params: tree.Tree, path: Path) -> tuple[TrainConfig, tree.Tree]:
    """A run and its parameters with the adapter of a folder of PEFT."""
    model: Any = run.architecture
    linears, flat = open_module(model).linears, flatten(params)
    shapes = {name: tuple(flat[f"{name}.weight"].shape) for name in linears}
    found, scales = read_adapter(path, linears, shapes)
    rank = found[next(iter(found))][0].shape[1]
    last = {name.rpartition(".")[2] for name in found}
    alike = {name for name in linears if name.rpartition(".")[2] in last}
    run = configure(
        run,
        lora_rank=rank,
        lora_alpha=Counter(scales.values()).most_common(1)[0][0] * rank,
        lora_targets=",".join(sorted(last if alike == found.keys() else found)),
    )
    adapters = run.lora.adapters
    assert adapters is not None
    own = dict(tree.items(lora.lora_defs(run.family.defs(model), adapters)))
    made = {}
    for name, (a, b) in found.items():
        rows = {"a": a, "b": b, "scale": torch.tensor(scales[name])}
        where = f"{name}.{lora.LORA}".replace(".", "/")
        values = {part: x.to(own[f"{where}/{part}"].dtype) for part, x in rows.items()}
        tree.put_leaf(made, where, Adapter(**values))
    return run, lora.attach(params, made)


def read_adapter(
    path: Path, linears: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, float]]:
    """The additions to a module's layers in a folder of PEFT, and their factors, by layer.

    Those of smaller ranks are filled up with zeros to the largest.

    Args:
        linears: as of `functron.apps.zoo.module_adapters.find_linears`.
        shapes: of the layers' matrices.

    Raises:
        ValueError: files are missing or broken; or it is not LoRA, or of what is no such layer, or
            of another shape; all are listed.
    """
    title, scales = f"cannot use the adapter {path}", read_scales(path, by_name=True)
    problems: list[Problem] = []
    if scales.dora:
        fix = "merge it with peft: merge_and_unload()"
        problems.append(Problem("use_dora", "true", "LoRA, for a module as it is", fix))
    stored = files.open_file(path / WEIGHTS, problems)
    raise_problems(title, problems)
    wanted = dict(_expect_tensors({*stored}, scales, linears, shapes))
    raise_problems(title, list(_find_odd({k: x.shape for k, x in stored.items()}, wanted)))
    names = dict.fromkeys(name.rpartition(".lora_")[0].removeprefix(_BEFORE) for name in wanted)
    rank = max(map(scales.find_rank, wanted))
    found, factors = {}, {}
    for name in names:
        down, up = (
            stored[full].read([slice(0, size) for size in wanted[full]])
            for full in (f"{_BEFORE}{name}.{side}" for side in _SIDES)
        )
        a, b = (up, down) if linears[name] == 1 else (down.T, up.T)
        found[name] = (
            fill_ranks(a, (a.shape[0], rank)).contiguous(),
            fill_ranks(b, (rank, b.shape[1])).contiguous(),
        )
        factors[name] = scales.find_scale(f"{name}.{_SIDES[0]}")
    return found, factors


def _expect_tensors(
    names: set[str],
    scales: AdapterScales,
    linears: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of layers of which there is one, and their shapes."""
    for name, dim in linears.items():
        both = [f"{_BEFORE}{name}.{side}" for side in _SIDES]
        if names.intersection(both):
            rank, shape = scales.find_rank(f"{name}.{_SIDES[0]}"), shapes[name]
            yield both[0], (rank, shape[dim])
            yield both[1], (shape[1 - dim], rank)


def _find_odd(
    shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    fix = "merge it with peft: merge_and_unload()"
    for name in sorted(shapes.keys() | wanted.keys()):
        if name not in wanted:
            yield Problem(name, "a tensor", "additions to linear layers of the module", fix)
        elif name not in shapes:
            yield Problem(name, "no such tensor", "both matrices of an addition", "copy it again")
        elif tuple(shapes[name]) != wanted[name]:
            yield Problem(name, str(list(shapes[name])), str(list(wanted[name])))
    if not shapes:
        yield Problem(WEIGHTS, "no tensors", "an adapter")


def write_module(
    path: Path, out: Path, *, averaged: bool = False, adapter: bool = False
) -> Conversion:
    """The newest parameters of a run of a module as the module's own files; `out` is new.

    Low-rank additions are merged.

    Args:
        path: of the run.
        out: of the folder.
        averaged: write the run's averages of its parameters.
        adapter: write the low-rank additions alone, as PEFT's files.

    Raises:
        ValueError: it is no run of a module, its origin is gone, or a parameter is missing; or it
            has no low-rank additions.
    """
    run = config.load(path / run_folder.CONFIG, known_only=True)
    model = run.architecture
    if not isinstance(model, ModuleConfig | ClassifierConfig | EmbedderConfig):
        fix = f"functron convert run:{path} hf:{out}"
        refuse("cannot export", str(path), run.family.title, "a run of a module", fix)
    kind, _, origin = model.origin.partition(":")
    if adapter:
        _write_adapter(path, run, out, origin if kind == HUB else "", averaged=averaged)
        return Conversion(model, out, ())
    params = newest_params(path, run, averaged=averaged, read=checkpoint.read_params)
    folders = [path / run_folder.HUB, *([Path(origin)] if kind in (HUB, heads.SCHEME) else [])]
    if isinstance(model, EmbedderConfig):
        folders.append(read_layout(Path(origin)).model)

    kept: list[str] = []

    def fill(folder: Path) -> None:
        _save(fill_module(model, params), folder)
        if isinstance(model, EmbedderConfig):
            write_layout(folder, model)
        for source in folders:
            kept.extend([] if kept or not source.is_dir() else copy_companions(source, folder))

    run_folder.make(out, fill)
    return Conversion(model, out, tuple(kept))


def _write_adapter(path: Path, run: TrainConfig, out: Path, base: str, *, averaged: bool) -> None:
    title, fix = "cannot export an adapter", "leave --adapter out"
    if averaged:
        refuse(title, "averaged", "true", "nothing with adapter: it is as it was trained", fix)
    if not run.lora.rank:
        got = "a run that trains all parameters"
        refuse(title, "adapter", got, "one with lora_rank", fix)
    params = read_stored(path, run, averaged=False, read=checkpoint.read_params)
    if not lora.has_adapters(tree.paths(params)):
        refuse(title, str(path), "a checkpoint of before its first step", "a later one")
    model: Any = run.architecture
    linears = open_module(model).linears
    run_folder.make(out, lambda folder: _save_adapter(folder, flatten(params), linears, base))


def _save_adapter(
    folder: Path, params: Mapping[str, torch.Tensor], linears: Mapping[str, int], base: str
) -> None:
    """Write the additions among parameters as files that PEFT loads.

    Args:
        folder: an empty one.
        params: by the module's names.
        linears: as of `find_linears`.
        base: the path of the module's folder; empty: it has none.

    Raises:
        ValueError: a layer has inputs in another dim than others, for which PEFT has one setting.
    """
    adapted = list_adapted(params)
    dims = {linears[name] for name in adapted}
    if len(dims) > 1:
        title, got = "cannot export an adapter", "Linear and Conv1D layers together"
        fix = "export the merged module: leave --adapter out, or adapt one kind by lora_targets"
        refuse(title, "lora_targets", got, "layers of one kind", fix)
    tensors, ranks, alphas = {}, {}, {}
    for name in adapted:
        a, b, scale = (params[f"{name}.{lora.LORA}.{part}"] for part in ("a", "b", "scale"))
        rank = count_used(a, b)  # additions of smaller ranks are filled up with zeros
        down, up = (b, a) if linears[name] == 1 else (a.T, b.T)
        for side, x in zip(_SIDES, (down[:rank], up[:, :rank]), strict=True):
            tensors[f"{_BEFORE}{name}.{side}"] = x.contiguous()
        ranks[name], alphas[name] = rank, float(scale) * rank
    stacked = dims == {0}
    settings = make_settings(ranks, alphas, linears, base=base, fan_in_fan_out=stacked)
    importlib.import_module("safetensors.torch").save_file(tensors, folder / WEIGHTS)
    write_json(folder / ADAPTER, settings)


def fill_module(
    model: ModuleConfig | ClassifierConfig | EmbedderConfig, params: tree.Tree
) -> torch.nn.Module:
    """The module of a config with these parameters, in the dtypes that it has by itself."""
    if isinstance(model, ModuleConfig):
        module = build_module(model.origin)
    elif isinstance(model, ClassifierConfig):
        module = build_classifier(model)
    else:
        module = build_embedder(model)
    params = flatten(params)
    own = trained_weights(module)
    raise_problems(
        f"the module {model.origin} is not that of the run",
        [
            Problem(name, "a parameter of one alone", "the same parameters in both")
            for name in sorted(own.keys() ^ params.keys())
        ],
    )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(params[name])
    return module


def _save(module: torch.nn.Module, folder: Path) -> None:
    save: Any = getattr(module, "save_pretrained", None)
    if save is not None:
        save(folder)
        return
    safetensors = importlib.import_module("safetensors.torch")
    safetensors.save_model(module, str(folder / "model.safetensors"))
