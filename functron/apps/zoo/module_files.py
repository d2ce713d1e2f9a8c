"""Convert modules' own files into run folders and back: ``hf-module:`` and ``hf-classifier:PATH``.

What is written is what the module writes: transformers' ``save_pretrained``, or, of a module that
has none, its state dict in model.safetensors. Names, ties, buffers and dtypes are the module's, so
that a run that has taken no step gives back the numbers that it began with. Low-rank additions are
merged, or written alone as PEFT's files.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron import checkpoint
from functron.apps.zoo import heads
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
from functron.hub.adapters import WEIGHTS, make_settings
from functron.hub.reader import ADAPTER
from functron.hub.writer import copy_companions, write_json
from functron.models import lora
from functron.spmd.params import init_params
from functron.training import config, run_folder
from functron.training.config import TrainConfig, configure
from functron.training.convert import Conversion, RunFormat, begin, newest_params, read_stored

_NAMES = {
    "dtype": "the run's: functron train --precision NAME",
    "max_seq": "the module's own",
    "quantise": "nothing: the module's files are as it writes them",
}


def make_format() -> RunFormat:
    """The format of ``functron convert run:PATH hf-module:PATH``, and of a run that begins so."""
    return _make_format(HUB)


def make_classifier_format() -> RunFormat:
    """The same of ``hf-classifier:PATH``."""
    return _make_format(heads.SCHEME)


def _make_format(scheme: str) -> RunFormat:
    refusals = {
        name: Problem(name, "{!r}", wanted, "leave it out") for name, wanted in _NAMES.items()
    }

    def make_run(path: Path, out: Path) -> Conversion:
        return _make_run(scheme, path, out)

    return RunFormat(make_run, write_module, MappingProxyType(refusals))


def _make_run(scheme: str, path: Path, out: Path) -> Conversion:
    """A run that begins with the module of a folder, whose tokenizer is kept with it."""
    run = configure(model=f"{scheme}:{path.absolute()}")
    model: Any = run.architecture
    kept: list[str] = []

    def keep(folder: Path) -> None:
        folder.mkdir()
        kept.extend(copy_companions(path, folder))

    begin(out, run, init_params(random.key(run.seed), run.family.defs(model)), keep)
    return Conversion(model, out, tuple(kept))


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
    if not isinstance(model, ModuleConfig | ClassifierConfig):
        fix = f"functron convert run:{path} hf:{out}"
        refuse("cannot export", str(path), run.family.title, "a run of a module", fix)
    kind, _, origin = model.origin.partition(":")
    if adapter:
        _write_adapter(path, run, out, origin if kind == HUB else "", averaged=averaged)
        return Conversion(model, out, ())
    params = newest_params(path, run, averaged=averaged, read=checkpoint.read_params)
    folders = [path / run_folder.HUB, *([Path(origin)] if kind in (HUB, heads.SCHEME) else [])]

    kept: list[str] = []

    def fill(folder: Path) -> None:
        _save(fill_module(model, params), folder)
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
    tensors = {}
    for name in adapted:
        a, b = (params[f"{name}.{lora.LORA}.{part}"] for part in "ab")
        down, up = (b, a) if linears[name] == 1 else (a.T, b.T)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.contiguous()
    rank = next(iter(tensors.values())).shape[0]
    last = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name in linears if name.rpartition(".")[2] in last}
    settings = make_settings(
        rank,
        float(params[f"{adapted[0]}.{lora.LORA}.scale"]) * rank,
        last if alike == {*adapted} else adapted,
        base=base,
        fan_in_fan_out=dims == {0},
    )
    importlib.import_module("safetensors.torch").save_file(tensors, folder / WEIGHTS)
    write_json(folder / ADAPTER, settings)


def fill_module(model: ModuleConfig | ClassifierConfig, params: tree.Tree) -> torch.nn.Module:
    """The module of a config with these parameters, in the dtypes that it has by itself."""
    one = isinstance(model, ModuleConfig)
    module = build_module(model.origin) if one else build_classifier(model)
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
