"""Convert modules' own files into run folders and back: ``hf-module:PATH``.

What is written is what the module writes: transformers' ``save_pretrained``, or, of a module that
has none, its state dict in model.safetensors. Names, ties, buffers and dtypes are the module's, so
that a run that has taken no step gives back the numbers that it began with.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron import checkpoint
from functron.apps.zoo.modules import (
    HUB,
    ModuleConfig,
    build_module,
    defs,
    flatten,
    trained_weights,
)
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.hub.writer import copy_companions
from functron.spmd.params import init_params
from functron.training import config, run_folder
from functron.training.config import configure
from functron.training.convert import Conversion, RunFormat, begin, newest_params

_NAMES = {
    "dtype": "the run's: functron train --precision NAME",
    "max_seq": "the module's own",
    "quantise": "nothing: the module's files are as it writes them",
}


def make_format() -> RunFormat:
    """The format of ``functron convert run:PATH hf-module:PATH``, and of a run that begins so."""
    refusals = {
        name: Problem(name, "{!r}", wanted, "leave it out") for name, wanted in _NAMES.items()
    }
    return RunFormat(_make_run, write_module, MappingProxyType(refusals))


def _make_run(path: Path, out: Path) -> Conversion:
    """A run that begins with the module of a folder, whose tokenizer is kept with it."""
    run = configure(model=f"{HUB}:{path.absolute()}")
    model: Any = run.architecture
    kept: list[str] = []

    def keep(folder: Path) -> None:
        folder.mkdir()
        kept.extend(copy_companions(path, folder))

    begin(out, run, init_params(random.key(run.seed), defs(model)), keep)
    return Conversion(model, out, tuple(kept))


def write_module(path: Path, out: Path, *, averaged: bool = False) -> Conversion:
    """The newest parameters of a run of a module as the module's own files; `out` is new.

    Args:
        path: of the run.
        out: of the folder.
        averaged: write the run's averages of its parameters.

    Raises:
        ValueError: it is no run of a module, its origin is gone, or a parameter is missing.
    """
    run = config.load(path / run_folder.CONFIG, known_only=True)
    model = run.architecture
    if not isinstance(model, ModuleConfig):
        fix = f"functron convert run:{path} hf:{out}"
        refuse("cannot export", str(path), run.family.title, "a run of a module", fix)
    params = newest_params(path, run, averaged=averaged, read=checkpoint.read_params)
    kind, _, origin = model.origin.partition(":")
    folders = [path / run_folder.HUB, *([Path(origin)] if kind == HUB else [])]

    kept: list[str] = []

    def fill(folder: Path) -> None:
        _save(fill_module(model, params), folder)
        for source in folders:
            kept.extend([] if kept or not source.is_dir() else copy_companions(source, folder))

    run_folder.make(out, fill)
    return Conversion(model, out, tuple(kept))


def fill_module(model: ModuleConfig, params: tree.Tree) -> torch.nn.Module:
    """The module of a config with these parameters, in the dtypes that it has by itself."""
    module, params = build_module(model.origin), flatten(params)
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
