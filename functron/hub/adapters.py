"""Low-rank adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors.

A matrix ``NAME.weight`` has ``NAME.lora_A.weight`` ``[rank, in]`` and ``NAME.lora_B.weight``
``[out, rank]``, in our names ``Adapter.a`` and ``Adapter.b``, transposed; what their product is
multiplied by follows from adapter_config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem, local_path, raise_problems, refuse
from functron.hub import files
from functron.hub.format import HubFormat, HubLayout, NameRule, layouts, layouts_of, tensors
from functron.hub.reader import (
    ADAPTER,
    CONFIG,
    format_for,
    format_of,
    local_on_mesh,
    parse,
    read_params,
    read_table,
)
from functron.hub.writer import write_json
from functron.models import lora
from functron.models.family import Config, family_of
from functron.models.lora import LoRA
from functron.spmd.params import ParamDef

WEIGHTS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
_TITLE = "cannot use an adapter"
_ABSENT = {
    "bias": "none", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
    "layers_to_transform": None, "modules_to_save": None, "layer_replication": None,
    "target_parameters": None, "lora_bias": False, "use_qalora": False, "alora_invocation_tokens":
    None, "trainable_token_indices": None, "megatron_config": None, "exclude_modules": None,
    "arrow_config": None, "corda_config": None, "eva_config": None,
}  # fmt: skip
"""Entries that change what is computed or stored, at the only values that are read here."""


def has_adapter(path: str | Path) -> bool:
    """Whether a folder has an adapter of PEFT."""
    return files.exists(Path(path) / ADAPTER)


def find_base(path: Path) -> Path:
    """The folder of the model that an adapter is of: the same, or the one that it names.

    Raises:
        ValueError: neither is a folder with a config.json.
    """
    if files.exists(path / CONFIG):
        return path
    base = str(_read_settings(path).get("base_model_name_or_path"))
    if not files.exists(Path(base) / CONFIG):
        fix = "put the adapter's two files into a copy of the base's folder"
        got, wanted = f"an adapter of {base}", "a base in a folder of this machine"
        refuse(_TITLE, str(path / ADAPTER), got, wanted, fix)
    return Path(base)


def load_with_adapter(path: str | Path, **how: Any) -> tuple[Config, dict, LoRA]:
    """A model, its parameters with an adapter beside their matrices, and the adapter's settings.

    Args:
        path: a folder with an adapter and its base, or the path of the base in its settings.
        how: dtype, max_seq and ignore of `functron.hub.read_config`.

    Raises:
        ValueError: as `functron.hub.load`, or `load_adapter`.
    """
    folder = local_path(path)
    base = find_base(folder)
    table = files.read_json(base / CONFIG) if base == folder else read_table(base)
    where = str(base / CONFIG)
    config, form = parse(table, where=where, **how), format_of(table, where)
    source = files.decode(files.open_folder(base), table, where)
    params = read_params(form, config, source, local_on_mesh(config, None, None))
    settings, adapters = load_adapter(folder, config, model_type=form.model_type)
    return config, lora.attach(params, adapters), settings


def load_adapter(
    path: str | Path, config: Config, *, model_type: str | None = None
) -> tuple[LoRA, dict]:
    """The low-rank additions in a folder, and their settings; `lora.attach` puts them to use.

    rsLoRA (``use_rslora``) is LoRA with alpha times the root of the rank. One adapter of matrices
    that are fused in transformers' layers is one of each of ours, with the same `a`.

    Args:
        path: a folder with adapter_config.json and adapter_model.safetensors.
        config: of the model that it is of.
        model_type: the format of its names; None: the first that has such models.

    Returns:
        The settings, whose targets are the layers that have additions, and their tree.

    Raises:
        ValueError: files are missing or broken; or it is not LoRA of matrices that adapters are
            for here (`functron.models.lora.lora_defs`), each in all layers; all are listed.
    """
    folder = local_path(path)
    settings = _read_settings(folder)
    rank, alpha = _read_scale(settings, folder)
    problems: list[Problem] = []
    stored = files.open_file(folder / WEIGHTS, problems)
    raise_problems(_TITLE, problems)
    shapes = {name.removeprefix(_BEFORE): one.shape for name, one in stored.items()}
    whole = family_of(config).defs(config)
    form = format_of({"model_type": model_type}) if model_type else format_for(config)
    most = lora.lora_defs(whole, LoRA(rank, alpha, tuple(_list_layers(whole))))
    found = max(
        (_find_layouts(form, config, rules, most) for rules in form.namings(config)),
        key=lambda each: sum(layout.name(index) in shapes for layout, index in tensors(each)),
    )
    used = [layout for layout in found if any(name in shapes for name in _names(layout))]
    raise_problems(_TITLE, list(_find_problems(used, shapes)))
    targets = tuple(dict.fromkeys(p.path[: -len("/lora/a")] for each in used for p in each.parts))
    made = LoRA(rank, alpha, targets)
    defs = lora.split(lora.lora_defs(whole, made))[1]
    leaves = {
        path: torch.full(d.shape, alpha / rank, dtype=d.dtype)
        if path.endswith("/scale")
        else torch.zeros(d.shape, dtype=d.dtype)
        for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)
    }
    for layout, index in tensors(used):
        every = [slice(0, size) for size in layout.shape]
        tensor = stored[_BEFORE + layout.name(index)].read(every)
        for part in layout.parts:
            box = tuple((0, size) for size in part.real)
            piece = tensor[layout.source(part, box)]
            leaves[part.path][index] = layout.to_ours(part, box, piece).to(leaves[part.path].dtype)
    return made, tree.unflatten(tree.flatten(defs)[1], [leaves[path] for path in tree.paths(defs)])


def save_adapter(
    path: str | Path,
    config: Config,
    params: tree.Tree,
    *,
    model_type: str | None = None,
    base: str = "",
) -> None:
    """Write the low-rank additions among parameters as a folder that PEFT loads.

    Args:
        path: a folder that does not exist.
        params: global values with adapters; or these alone.
        model_type: the format of the base; None: the first that has such models.
        base: its path or name, for ``base_model_name_or_path``.

    Raises:
        ValueError: `path` exists; there are no adapters, or their ranks or scales differ; or they
            are of experts, or of matrices that transformers fuses, which would need one `a`; all
            are listed.
    """
    folder = local_path(path)
    family = family_of(config)
    form = format_of({"model_type": model_type}) if model_type else format_for(config)
    adapters = lora.split(params)[1]
    leaves = dict(zip(tree.paths(adapters), tree.leaves(adapters), strict=True))
    ends = ("/lora/a", "/lora/b", "/lora/scale")
    a, b, scales = ({p: x for p, x in leaves.items() if p.endswith(end)} for end in ends)
    ranks = {x.shape[-1] for x in a.values()}
    factors = {float(one) for x in scales.values() for one in x.flatten()}
    title = "cannot export an adapter"
    if len(ranks) != 1 or len(factors) != 1:
        got = f"ranks {sorted(ranks)} and scales {sorted(factors)}"
        refuse(title, "params", got, "one rank and one scale", "export the merged model")
    rank, scale = ranks.pop(), factors.pop()
    targets, whole = tuple(p[: -len("/lora/a")] for p in a), family.defs(config)
    fix, wanted = "export the merged model: leave --adapter out", "adapters of other layers"
    experts = [x for x in targets if x not in _list_layers(whole)]
    raise_problems(title, [Problem(x, "adapters of experts", wanted, fix) for x in experts])
    defs = lora.lora_defs(whole, LoRA(rank, scale * rank, targets))
    found = _find_layouts(form, config, form.namings(config)[0], defs)
    held: dict[str, list[str]] = {}
    for layout in found:
        for part in layout.parts:
            held.setdefault(layout.rule.name, []).append(part.path)
    raise_problems(
        title,
        [
            Problem(name, f"one of {', '.join(paths)}", "matrices that transformers has apart", fix)
            for name, paths in held.items()
            if len(paths) > 1
        ],
    )
    named = {
        _BEFORE + layout.name(index): layout.to_theirs([(a | b)[layout.parts[0].path][index]])
        for layout, index in tensors(found)
    }
    if folder.exists():
        refuse(title, str(folder), "an existing path", "a new one", "choose another")
    folder.mkdir(parents=True)
    planned = files.Planned(WEIGHTS, tuple((k, x.dtype, tuple(x.shape)) for k, x in named.items()))
    with torch.no_grad():
        files.write_files(folder, [planned], iter(named.items()))
    write_json(folder / ADAPTER, _write_settings(form, config, found, rank, scale, base))


def _list_layers(defs: tree.Tree) -> list[str]:
    """Layers with adapters in PEFT's layout, which names no expert where a tensor has them all."""
    axes = {p: x.axes for p, x in zip(tree.paths(defs), tree.leaves(defs), strict=True)}
    return [x for x in lora.linear_layers(defs) if "expert" not in axes[f"{x}/w"]]


def _write_settings(
    form: HubFormat,
    config: Config,
    found: Sequence[HubLayout],
    rank: int,
    scale: float,
    base: str,
) -> dict[str, Any]:
    modules = {name.removesuffix(".lora_A.weight") for each in found for name in _names(each)}
    modules = {name for name in modules if not name.endswith(".lora_B.weight")}
    every = {
        name.removesuffix(".weight")
        for layout in layouts_of(form, config)
        for name in _names(layout)
        if name.endswith(".weight")
    }
    # by their last names, where no other module has one of these
    last = {name.rpartition(".")[2] for name in modules}
    alike = {name for name in every if name.rpartition(".")[2] in last}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted(last if alike == modules else modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": form.model_type == "gpt2",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def _read_settings(folder: Path) -> Mapping[str, Any]:
    table = files.read_json(folder / ADAPTER)
    if not isinstance(table, Mapping):
        got = type(table).__name__
        refuse(_TITLE, str(folder / ADAPTER), got, "a JSON object", "copy it again")
    return table


def _read_scale(settings: Mapping[str, Any], folder: Path) -> tuple[int, float]:
    """The rank, and the alpha of LoRA."""
    kind, rank, alpha = (settings.get(name) for name in ("peft_type", "r", "lora_alpha"))
    fix = "merge it with peft: merge_and_unload()"
    problems = [
        Problem(name, repr(settings[name]), repr(usual), fix)
        for name, usual in _ABSENT.items()
        if settings.get(name) not in (usual, None, [], {}, False)
    ]
    if kind != "LORA":
        problems.append(Problem("peft_type", repr(kind), "'LORA'", fix))
    if not isinstance(rank, int) or rank < 1:
        problems.append(Problem("r", repr(rank), "a rank of at least 1"))
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        problems.append(Problem("lora_alpha", repr(alpha), "a positive number"))
    raise_problems(f"{_TITLE}: {folder / ADAPTER}", problems)
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return rank, float(alpha) * (rank**0.5 if settings.get("use_rslora") else 1.0)


def _names(layout: HubLayout) -> list[str]:
    return [each.name(index) for each, index in tensors([layout])]


def _find_problems(
    used: Sequence[HubLayout], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Tensors that are missing, of another shape, or of no matrix that has an adapter here."""
    wanted = {name: layout.shape for layout in used for name in _names(layout)}
    for name in sorted(wanted.keys() - shapes.keys()):
        yield Problem(name, "no such tensor", "one in every layer", "merge it with peft")
    for name in sorted(wanted.keys() & shapes.keys()):
        if shapes[name] != wanted[name]:
            yield Problem(name, str(list(shapes[name])), str(list(wanted[name])))
    kinds = {re.sub(r"\d+", "#", name): name for name in sorted(shapes.keys() - wanted.keys())}
    for name in kinds.values():
        fix = "merge it with peft: merge_and_unload()"
        yield Problem(name, "a tensor", "adapters of linear layers of blocks", fix)
    if not wanted and not kinds:
        yield Problem(WEIGHTS, "no tensors", "an adapter")


def _find_layouts(
    form: HubFormat, config: Config, rules: Sequence[NameRule], defs: tree.Tree
) -> list[HubLayout]:
    """The layouts of the two tensors of every adapter in `defs`."""
    family = family_of(config)
    adapters = lora.split(defs)[1]
    flat = dict(zip(tree.paths(defs), tree.leaves(defs), strict=True))
    sides = [side for rule in rules for side in _make_rules(rule, flat)]
    paths = zip(tree.paths(adapters), tree.leaves(adapters), strict=True)
    held: dict = {}
    for path, leaf in paths:
        if not path.endswith("/scale"):
            tree.put_leaf(held, path, leaf)
    return layouts(sides, held, family.vocab_size(config), family.numbers(config))


def _make_rules(rule: NameRule, flat: Mapping[str, ParamDef]) -> Iterator[NameRule]:
    """The rules of the adapters of a matrix, or of several that a tensor fuses."""
    name, dims, paths = rule.name.removesuffix(".weight"), [], []
    for turn, path in enumerate(rule.paths):
        layer = path.removesuffix("/w")
        if f"{layer}/lora/a" not in flat or layer == path:
            continue
        count, ours = lora.num_inputs(flat[path]), rule.ours(turn)
        left, right = (
            " ".join(f"({' '.join(f)})" for f in rule.theirs(turn) if {*f} & {*part})
            for part in (ours[:count], ours[count:])
        )
        inner, outer = " ".join(ours[:count]), " ".join(ours[count:])
        yield NameRule(
            f"{name}.lora_A.weight", f"rank {left} -> {inner} rank", (f"{layer}/lora/a",)
        )
        dims.append(f"{right} rank -> rank {outer}")
        paths.append(f"{layer}/lora/b")
    if paths:
        found = {"dims": tuple(dims), "paths": tuple(paths), "fused": 0}
        yield replace(rule, name=f"{name}.lora_B.weight", **found)
