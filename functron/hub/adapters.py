"""Low-rank adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors.

A matrix ``NAME.weight`` has ``NAME.lora_A.weight`` ``[rank, in]`` and ``NAME.lora_B.weight``
``[out, rank]``, in our names ``Adapter.a`` and ``Adapter.b``, transposed; what their product is
multiplied by follows from adapter_config.json. With DoRA there is ``NAME.lora_magnitude_vector``
``[out]``, the lengths of columns, of which ``Adapter.magnitude`` is the difference to the base's.

Matrices of smaller ranks (``rank_pattern``) are filled up with zeros, which stay zeros in training,
as both factors' are, and are left out again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from functron.nn import Adapter
from functron.spmd.params import ParamDef

WEIGHTS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
_TITLE = "cannot use an adapter"
_ABSENT = {
    "bias": "none", "layers_to_transform": None, "modules_to_save": None, "layer_replication": None,
    "target_parameters": None, "lora_bias": False, "use_qalora": False, "alora_invocation_tokens":
    None, "trainable_token_indices": None, "megatron_config": None, "exclude_modules": None,
    "arrow_config": None, "corda_config": None, "eva_config": None,
}  # fmt: skip
"""Entries that change what is computed or stored, at the only values that are read here."""
_CHOICES = ("layers_to_transform", "exclude_modules")  # of these, names of tensors are the outcome


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
    settings, adapters = load_adapter(folder, config, model_type=form.model_type, base=params)
    return config, lora.attach(params, adapters), settings


def load_adapter(
    path: str | Path,
    config: Config,
    *,
    model_type: str | None = None,
    base: tree.Tree = None,
) -> tuple[LoRA, dict]:
    """The low-rank additions in a folder, and their settings; `lora.attach` puts them to use.

    rsLoRA (``use_rslora``) is LoRA with alpha times the root of the rank. One adapter of matrices
    that are fused in transformers' layers is one of each of ours, with the same `a`.

    Args:
        path: a folder with adapter_config.json and adapter_model.safetensors.
        config: of the model that it is of.
        model_type: the format of its names; None: the first that has such models.
        base: the model's parameters, which DoRA needs.

    Returns:
        The settings, whose targets are the layers that have additions and whose rank is their
        largest, and their tree.

    Raises:
        ValueError: files are missing or broken; or it is not LoRA of matrices that adapters are
            for here (`functron.models.lora.lora_defs`), each in all layers; all are listed.
    """
    folder = local_path(path)
    scales = read_scales(folder)
    problems: list[Problem] = []
    stored = files.open_file(folder / WEIGHTS, problems)
    raise_problems(_TITLE, problems)
    shapes = {name.removeprefix(_BEFORE): one.shape for name, one in stored.items()}
    whole = family_of(config).defs(config)
    form = format_of({"model_type": model_type}) if model_type else format_for(config)
    every = LoRA(1, scales.alpha, tuple(_list_layers(whole)), scales.dora)

    def find(rules: Sequence[NameRule], rank: int) -> list[HubLayout]:
        """The layouts of adapters of this rank that have tensors."""
        most = lora.lora_defs(whole, replace(every, rank=rank))
        found = _find_layouts(form, config, rules, most)
        return [
            layout
            for layout in found
            if any(_module_of(name) in modules for name in _names(layout))
        ]

    modules = {_module_of(name) for name in shapes}
    rules = max(form.namings(config), key=lambda each: len(find(each, 1)))
    names = [name for layout in find(rules, 1) for name in _names(layout)]
    rank = max((scales.find_rank(name) for name in names), default=scales.rank)
    used = find(rules, rank)
    problems = list(_find_problems(used, shapes, scales))
    if scales.dora and base is None:
        got, fix = "None, for an adapter of DoRA", "pass base="
        problems.append(Problem("base", got, "the parameters that it is of", fix))
    raise_problems(_TITLE, problems)
    targets = dict.fromkeys(_layer_of(p.path) for each in used for p in each.parts)
    made = replace(every, rank=rank, targets=tuple(targets))
    defs = lora.split(lora.lora_defs(whole, made))[1]
    leaves = {
        path: torch.zeros(d.shape, dtype=d.dtype)
        for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)
    }
    for layout, index in tensors(used):
        name = layout.name(index)
        tensor = stored[_BEFORE + name].read([slice(0, size) for size in shapes[name]])
        tensor = fill_ranks(tensor, layout.shape)
        for part in layout.parts:
            box = tuple((0, size) for size in part.real)
            piece = layout.to_ours(part, box, tensor[layout.source(part, box)])
            leaves[part.path][index] = piece.to(leaves[part.path].dtype)
            leaves[f"{_layer_of(part.path)}/lora/scale"][index] = scales.find_scale(name)
    adapters = tree.unflatten(tree.flatten(defs)[1], [leaves[path] for path in tree.paths(defs)])
    return made, _move_lengths(adapters, base, -1) if scales.dora else adapters


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
        params: global values with adapters; or these alone, unless they are of DoRA.
        model_type: the format of the base; None: the first that has such models.
        base: its path or name, for ``base_model_name_or_path``.

    Raises:
        ValueError: `path` exists; there are no adapters; or they are of experts, or of matrices
            that transformers fuses, which would need one `a`, or of DoRA without the matrices; all
            are listed.
    """
    folder = local_path(path)
    family = family_of(config)
    form = format_of({"model_type": model_type}) if model_type else format_for(config)
    adapters = _widen(lora.split(_move_lengths(params, params, 1))[1])
    leaves = dict(zip(tree.paths(adapters), tree.leaves(adapters), strict=True))
    targets = tuple(_layer_of(path) for path in leaves if path.endswith("/lora/a"))
    title, whole = "cannot export an adapter", family.defs(config)
    if not targets:
        fix = "export the model: leave --adapter out"
        refuse(title, "params", "no adapters", "parameters with adapters", fix)
    rank = leaves[f"{targets[0]}/lora/a"].shape[-1]
    dora = f"{targets[0]}/lora/magnitude" in leaves
    fix = "export the merged model: leave --adapter out"
    wanted = "adapters of other layers: PEFT has one A for an expert's gate and up, ours two"
    experts = [x for x in targets if x not in _list_layers(whole)]
    raise_problems(title, [Problem(x, "adapters of experts", wanted, fix) for x in experts])
    found = _find_layouts(
        form,
        config,
        form.namings(config)[0],
        lora.lora_defs(whole, LoRA(rank, 1.0, targets, dora)),
    )
    raise_problems(title, list(_find_joined(found, fix)))
    named, ranks, alphas = {}, {}, {}
    for layout, index in tensors(found):
        path = layout.parts[0].path
        name, layer = layout.name(index), _layer_of(path)
        a, b, scale = (leaves[f"{layer}/lora/{x}"][index] for x in ("a", "b", "scale"))
        own = count_used(a, b)
        module = _module_of(name)
        ranks[module], alphas[module] = own, float(scale) * own
        tensor = layout.to_theirs([leaves[path][index]])
        cut = {"a": (slice(own),), "b": (slice(None), slice(own)), "magnitude": ()}
        named[_BEFORE + name] = tensor[cut[path.rpartition("/")[2]]].contiguous()
    if folder.exists():
        refuse(title, str(folder), "an existing path", "a new one", "choose another")
    folder.mkdir(parents=True)
    planned = files.Planned(WEIGHTS, tuple((k, x.dtype, tuple(x.shape)) for k, x in named.items()))
    with torch.no_grad():
        files.write_files(folder, [planned], iter(named.items()))
    write_json(folder / ADAPTER, _write_settings(form, config, ranks, alphas, base, dora))


def _layer_of(path: str) -> str:
    """The layer of a leaf of an adapter."""
    return path.rpartition("/lora/")[0]


_SIDES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def _module_of(name: str) -> str:
    """The module of a tensor of an adapter."""
    return name.rpartition(".lora_")[0]


def fill_ranks(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with zeros up to the largest rank."""
    after = [wanted - size for size, wanted in zip(tensor.shape, shape, strict=True)]
    return torch.nn.functional.pad(tensor, [x for size in reversed(after) for x in (0, size)])


def _widen(adapters: tree.Tree) -> tree.Tree:
    """Adapters of the largest rank among these, by zeros."""
    flat = zip(tree.paths(adapters), tree.leaves(adapters), strict=True)
    rank = max((x.shape[-1] for path, x in flat if path.endswith("/lora/a")), default=1)

    def widen(node: Any) -> Any:
        if not _is_adapter(node):
            return node
        at = node.scale.dim()
        shape = (*node.b.shape[:at], rank, *node.b.shape[at + 1 :])
        a = fill_ranks(node.a, (*node.a.shape[:-1], rank))
        return node._replace(a=a, b=fill_ranks(node.b, shape))

    return tree.map(widen, adapters, is_leaf=_is_adapter)


def _is_adapter(node: Any) -> bool:
    return isinstance(node, Adapter)


def count_used(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many columns of `a` and rows of `b` there are before those that are zeros to the end."""
    zeros = (a == 0).flatten(0, -2).all(0) & (b == 0).flatten(1).all(1)
    used = (~zeros).nonzero()
    return int(used[-1]) + 1 if len(used) else len(zeros)


def _move_lengths(params: tree.Tree, base: tree.Tree, sign: int) -> tree.Tree:
    """`params` whose magnitudes have `sign` times the lengths of the base's columns added.

    Raises:
        ValueError: the base lacks a matrix.
    """
    if not isinstance(params, Mapping):
        return params
    inside = base if isinstance(base, Mapping) else {}
    made = {k: _move_lengths(x, inside.get(k), sign) for k, x in params.items()}
    adapter = params.get(lora.LORA)
    if adapter is None or adapter.magnitude is None:
        return made
    if inside.get("w") is None:
        wanted = "the parameters with their adapters: magnitudes are told by both"
        refuse(
            "cannot use DoRA", "params", "adapters alone", wanted, "lora.attach(params, adapters)"
        )
    lengths = lora.find_column_lengths(inside["w"], adapter)
    moved = adapter.magnitude.to(lengths.dtype) + sign * lengths
    return {**made, lora.LORA: adapter._replace(magnitude=moved.to(adapter.magnitude.dtype))}


def _find_joined(found: Sequence[HubLayout], fix: str) -> Iterator[Problem]:
    """Tensors that would be of several of our matrices."""
    held: dict[str, list[str]] = {}
    for layout in found:
        for part in layout.parts:
            held.setdefault(layout.rule.name, []).append(part.path)
    wanted = "matrices that transformers has apart"
    for name, paths in held.items():
        if len(paths) > 1:
            yield Problem(name, f"one of {', '.join(paths)}", wanted, fix)


def _list_layers(defs: tree.Tree) -> list[str]:
    """Layers with adapters in PEFT's layout, which names no expert where a tensor has them all."""
    axes = {p: x.axes for p, x in zip(tree.paths(defs), tree.leaves(defs), strict=True)}
    return [x for x in lora.linear_layers(defs) if "expert" not in axes[f"{x}/w"]]


def _write_settings(
    form: HubFormat,
    config: Config,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    base: str,
    dora: bool,
) -> dict[str, Any]:
    every = {
        name.removesuffix(".weight")
        for layout in layouts_of(form, config)
        for name in _names(layout)
        if name.endswith(".weight")
    }
    stacked = form.model_type == "gpt2"
    return make_settings(ranks, alphas, every, base=base, fan_in_fan_out=stacked, dora=dora)


def make_settings(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    every: Iterable[str],
    *,
    base: str,
    fan_in_fan_out: bool,
    dora: bool = False,
) -> dict[str, Any]:
    """The table of adapter_config.json.

    Args:
        ranks, alphas: of the modules that have additions, by name.
        every: the names of all modules that PEFT might take for one of these.
        base: the path or name of the model; empty: it has none.
        fan_in_fan_out: whether matrices are ``[in, out]``.
        dora: whether there are lengths of columns.
    """
    # by their last names, where no other module has one of these
    last = {name.rpartition(".")[2] for name in ranks}
    alike = {name for name in every if name.rpartition(".")[2] in last}
    rank, alpha = max(ranks.values()), Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(last if alike == ranks.keys() else ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "use_rslora": False,
        "use_dora": dora,
        "inference_mode": True,
        "rank_pattern": _make_pattern(ranks, rank),
        "alpha_pattern": _make_pattern(alphas, alpha),
    }


def _make_pattern(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """The values that differ from the usual one, by last names where all of one are alike."""
    by_last: dict[str, set] = {}
    for name, value in values.items():
        by_last.setdefault(name.rpartition(".")[2], set()).add(value)
    found = {}
    for name, value in values.items():
        last = name.rpartition(".")[2]
        if len(by_last[last]) == 1 and value != usual:
            found[last] = value
        elif value != usual:
            found[re.escape(name)] = value
    return found


def _read_settings(folder: Path) -> Mapping[str, Any]:
    table = files.read_json(folder / ADAPTER)
    if not isinstance(table, Mapping):
        got = type(table).__name__
        refuse(_TITLE, str(folder / ADAPTER), got, "a JSON object", "copy it again")
    return table


@dataclass(frozen=True)
class AdapterScales:
    """The ranks and scales of an adapter's matrices.

    Attributes:
        rank: of matrices that `ranks` does not name.
        alpha: of those that `alphas` does not name.
        ranks, alphas: by patterns of modules' names.
        stabilised: rsLoRA: products are multiplied by alpha / sqrt(rank), not by alpha / rank.
        dora: magnitudes are learned apart.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    stabilised: bool
    dora: bool

    def find_rank(self, name: str) -> int:
        """That of a tensor's module."""
        return _find_by_pattern(self.ranks, _module_of(name), self.rank)

    def find_scale(self, name: str) -> float:
        """The factor of the product of a module's two matrices."""
        rank = self.find_rank(name)
        alpha = _find_by_pattern(self.alphas, _module_of(name), self.alpha)
        return alpha / (rank**0.5 if self.stabilised else rank)


def _find_by_pattern(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that a name, or its end after a dot, matches, as of PEFT."""
    matches = (x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, usual)


def read_scales(folder: Path, *, by_name: bool = False) -> AdapterScales:
    """The ranks and scales of the adapter in a folder.

    Args:
        by_name: the names of tensors say which layers have additions, of any model.

    Raises:
        ValueError: it is not LoRA, or has entries that change more; all are listed.
    """
    settings = _read_settings(folder)
    kind, rank, alpha = (settings.get(name) for name in ("peft_type", "r", "lora_alpha"))
    fix = "merge it with peft: merge_and_unload()"
    problems = [
        Problem(name, repr(settings[name]), repr(usual), fix)
        for name, usual in _ABSENT.items()
        if settings.get(name) not in (usual, None, [], {}, False)
        and not (by_name and name in _CHOICES)
    ]
    if kind != "LORA":
        problems.append(Problem("peft_type", repr(kind), "'LORA'", fix))
    if not _is_rank(rank):
        problems.append(Problem("r", repr(rank), "a rank of at least 1"))
    if not _is_alpha(alpha):
        problems.append(Problem("lora_alpha", repr(alpha), "a positive number"))
    patterns = []
    for name, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        value = settings.get(name) or {}
        patterns.append(value)
        if not isinstance(value, Mapping) or not all(
            _is_pattern(key) and fits(x) for key, x in value.items()
        ):
            problems.append(Problem(name, repr(value), "patterns of names, each with a number"))
    raise_problems(f"{_TITLE}: {folder / ADAPTER}", problems)
    ranks, alphas = patterns
    flags = (bool(settings.get(name)) for name in ("use_rslora", "use_dora"))
    return AdapterScales(rank, float(alpha), ranks, alphas, *flags)  # type: ignore[arg-type]  # checked


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _names(layout: HubLayout) -> list[str]:
    return [each.name(index) for each, index in tensors([layout])]


def _find_problems(
    used: Sequence[HubLayout], shapes: Mapping[str, tuple[int, ...]], scales: AdapterScales
) -> Iterator[Problem]:
    """Tensors that are missing, of another shape, or of no matrix that has an adapter here."""
    wanted = {
        name: _with_rank(name, layout.shape, scales.find_rank(name))
        for layout in used
        for name in _names(layout)
    }
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


def _with_rank(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of a tensor of an adapter of this rank."""
    if name.endswith(_SIDES[0]):
        return (rank, *shape[1:])
    return (*shape[:-1], rank) if name.endswith(_SIDES[1]) else shape


def _find_layouts(
    form: HubFormat, config: Config, rules: Sequence[NameRule], defs: tree.Tree
) -> list[HubLayout]:
    """The layouts of the tensors of every adapter in `defs`."""
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
    name, rows = rule.name.removesuffix(".weight"), []
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
        yield NameRule(f"{name}.{_SIDES[0]}", f"rank {left} -> {inner} rank", (f"{layer}/lora/a",))
        rows.append((layer, right, outer))
    kinds = (("b", _SIDES[1], " rank", "rank "), ("magnitude", _SIDES[2], "", ""))
    for kind, side, theirs, mine in kinds:
        if rows and f"{rows[0][0]}/lora/{kind}" in flat:
            dims = tuple(f"{right}{theirs} -> {mine}{outer}" for _, right, outer in rows)
            paths = tuple(f"{layer}/lora/{kind}" for layer, _, _ in rows)
            yield replace(rule, name=f"{name}.{side}", dims=dims, paths=paths, fused=0)
