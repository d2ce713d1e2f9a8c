"""Read Hugging Face folders: config.json as our config and back, weights into our layout.

Each rank reads only the weights that it keeps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

import torch

from functron.checkpoint.placement import Box, Placement
from functron.core import tree
from functron.core.errors import (
    Problem,
    list_plugins,
    load_plugin,
    local_path,
    nearest,
    public,
    raise_problems,
    refuse,
)
from functron.hub import files
from functron.hub.decoders import LACKING
from functron.hub.entries import LONGEST, NO_TOKENS, family_fix, read_entries, write_entries
from functron.hub.files import ENTRY, TensorSource, decode, open_folder, read_scheme
from functron.hub.format import (
    HubFormat,
    HubLayout,
    LeafBox,
    LeafPart,
    config_problems,
    layouts_of,
    tensors,
)
from functron.hub.mixtures import DECODERS
from functron.models.config import Dtype, GPTConfig
from functron.models.family import Config, differing_fields, family_of, field_text
from functron.spmd import BoundMesh, Mesh
from functron.spmd.params import abstract_params, param_specs
from functron.spmd.spec import validate


def _list_formats() -> dict[str, HubFormat]:
    """Those of decoders, and then those of applications (``"functron.hub_formats"``)."""
    group = "functron.hub_formats"
    others = (load_plugin(group, name, "format")() for name in list_plugins(group))
    return {form.model_type: form for forms in (DECODERS.values(), *others) for form in forms}


FORMATS: Mapping[str, HubFormat] = MappingProxyType(_list_formats())
"""By transformers' ``model_type``. Of several that fit a model, the first is chosen."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {name: form.model_type for form in FORMATS.values() for name in form.aliases}
)

CONFIG, ADAPTER = "config.json", "adapter_config.json"
"""The files that describe a model, and an adapter of PEFT."""


@public
def read_config(
    path: str | Path,
    *,
    max_seq: int | None = None,
    dtype: Dtype | None = None,
    ignore: Sequence[str] = (),
) -> Config:
    """The architecture that a folder's config.json describes.

    The number of multi-token prediction modules (DeepSeek-V3) is counted in the weights, if there
    are any: transformers stores models without the modules that config.json has.

    Args:
        max_seq: the longest sequence, if shorter than the model's; models whose sliding windows we
            cannot represent are usable up to the length of a window.
        dtype: of parameters and activations; None: that of the weights (float32 for float16).
        ignore: unknown entries of config.json that do not change what the model computes.

    Returns:
        The config of its family, such as a `GPTConfig`.

    Raises:
        ValueError: the format is unknown, or entries are unknown or describe what our model does
            not compute; all offenders are listed.
    """
    table = read_table(path)
    where = str(Path(path) / CONFIG)
    config = parse(table, max_seq=max_seq, dtype=dtype, ignore=ignore, where=where)
    if not isinstance(config, GPTConfig):
        return config
    if config.mtp_depth and any(files.exists(Path(path) / name) for name in files.ENTRANCES):
        names, first = files.open_folder(path).shapes(), config.num_layers
        layers = range(first, first + config.mtp_depth)
        absent = (i for i in layers if f"model.layers.{i}.eh_proj.weight" not in names)
        return dataclasses.replace(config, mtp_depth=next(absent, layers.stop) - first)
    return config


def read_table(path: str | Path) -> dict[str, Any]:
    """The config.json of a folder, as it is.

    Raises:
        ValueError: it cannot be read, or is not a JSON object; or there is a PEFT adapter beside
            it, without which the weights are another model's.
    """
    file = local_path(path) / CONFIG
    _refuse_adapter(Path(path))
    table = files.read_json(file)
    if not isinstance(table, dict):
        title, got = "cannot read the model's configuration", type(table).__name__
        refuse(title, str(file), got, "a JSON object", "copy it again")
    return table


def _refuse_adapter(folder: Path) -> None:
    """Refuse a folder with a PEFT adapter, of which only the base would be read here."""
    if not files.exists(folder / ADAPTER):
        return
    wanted = "a merged model: only the base would be read"
    out = "PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(OUT)"
    fix = "functron convert hf:FOLDER run:RUN reads both; for the base alone, move it elsewhere"
    got = "an adapter (PEFT)"
    if not files.exists(folder / CONFIG):
        table = files.read_json(folder / ADAPTER)
        base = table.get("base_model_name_or_path") if isinstance(table, Mapping) else None
        got = f"an adapter (PEFT) of {base}" if base else got
        wanted = f"a folder with {CONFIG} and weights"
        fix = f"functron convert hf:FOLDER run:RUN, where the base is local; or merge it: {out}"
    refuse("cannot use an adapter", str(folder / ADAPTER), got, wanted, fix)


def format_of(table: Mapping[str, Any], where: str = CONFIG) -> HubFormat:
    """The format that config.json names.

    Raises:
        ValueError: it names none, or one that is not supported.
    """
    name = str(table.get("model_type"))
    name = _ALIASES.get(name, name)
    if name not in FORMATS:
        fix = family_fix(name, FORMATS)
        if name in LACKING:
            fix = f"this decoder has no {LACKING[name]} yet; {fix}"
        refuse(f"cannot use {where}", "model_type", repr(name), "a family that functron has", fix)
    return FORMATS[name]


def parse(
    table: Mapping[str, Any],
    *,
    max_seq: int | None = None,
    dtype: Dtype | None = None,
    ignore: Sequence[str] = (),
    where: str = CONFIG,
) -> Config:
    """`read_config` of the contents of a config.json.

    Raises:
        ValueError: as `read_config`.
    """
    form = format_of(table, where)
    problems: list[Problem] = []
    if max_seq is not None:
        problems += _check_max_seq(form, table, max_seq)
        longest = {LONGEST: table[form.max_seq]} if form.max_seq in table else {}
        table = {**table, form.max_seq: max_seq, **longest}
    read_scheme(table, problems, ignore)
    values = read_entries(form.entries, form.ignored, table, problems, (*ignore, ENTRY))
    raise_problems(f"cannot use {where}", problems)
    make, constructor = form.family.make, cast(Callable[..., Config], form.family.config)
    dtype = dtype or _read_dtype(table)
    return make(values, dtype) if make else constructor(**values, dtype=dtype)


def _check_max_seq(form: HubFormat, table: Mapping[str, Any], max_seq: int) -> list[Problem]:
    if not form.max_seq:
        wanted = "nothing: config.json of this family has no longest sequence"
        return [Problem("max_seq", str(max_seq), wanted, "leave it out")]
    learned = any("positions" in rule.paths for rule in form.rules)
    stored = table.get(form.max_seq)
    if not isinstance(stored, int) or (max_seq == stored if learned else 1 <= max_seq <= stored):
        return []
    wanted, fix = f"at most {stored}, as in config.json", "leave it out"
    if learned:
        wanted = f"{stored}: as many as there are learned positions"
        fix = "leave it out; samples may be shorter"
    return [Problem("max_seq", str(max_seq), wanted, fix)]


def _read_dtype(table: Mapping[str, Any]) -> Dtype:
    """The dtype of the weights by config.json; float32 for float16, which training must scale."""
    name = str(table.get("dtype") or table.get("torch_dtype") or "").removeprefix("torch.")
    kept = (known for known in get_args(Dtype) if known == name != "float16")
    return next(kept, "float32")


def differences(config: Config, other: Config) -> list[str]:
    """Paths of fields, such as ``moe.top_k``, in which two configs describe different models."""
    family = family_of(config)
    found = differing_fields(family.canonical(config), family.canonical(other))
    return [path for path, _, _ in found if path not in family.free]


def write_config(
    config: Config,
    form: HubFormat,
    *,
    kept: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The config.json of a model, as transformers reads it.

    Args:
        form: the format to store it in.
        kept: the config.json that the model came with. It is kept if it still describes the model
            (whose longest sequence may be shorter); otherwise its entries are updated.
        dtype: of the stored weights; None: of the config.

    Raises:
        ValueError: the format has no such models; all offenders are listed.
    """
    title = f"this model cannot be stored as {form.model_type}"
    raise_problems(title, config_problems(config, form))
    if kept is not None and still_describes(kept, config, form):
        out = dict(kept)
    else:
        out = dict(NO_TOKENS) if kept is None else dict(kept)
        out.pop("rope_parameters", None)
        out |= {"architectures": [form.architecture], "model_type": form.model_type}
        out |= write_entries(form.entries, config, [])
    out.pop(ENTRY, None)  # which is of the original files
    entry = "dtype" if "dtype" in out else "torch_dtype"
    return {**out, entry: dtype or config.dtype}


def still_describes(kept: Mapping[str, Any], config: Config, form: HubFormat) -> bool:
    """Whether `config` is the model of a config.json, perhaps with a shorter longest sequence."""
    try:
        before = parse(kept, ignore=tuple(kept), max_seq=shorter(kept, config, form))
    except ValueError:  # another format's, or positions that were cut off
        return False
    same = kept.get("model_type") in (form.model_type, *form.aliases)
    return same and not differences(before, config)


def shorter(table: Mapping[str, Any], config: Config, form: HubFormat) -> int | None:
    """The longest sequence of `config` if that of config.json is no shorter; else None."""
    longest = table.get(form.max_seq)
    wanted = getattr(config, "max_seq", None)
    return wanted if wanted is not None and longest is not None and wanted <= longest else None


def format_for(config: Config) -> HubFormat:
    """The first format that has models like `config`.

    Raises:
        ValueError: there is none; the reasons are listed by format.
    """
    reasons: list[Problem] = []
    for form in FORMATS.values():
        if form.family is not family_of(config):
            continue
        problems = config_problems(config, form)
        if not problems:
            return form
        reasons += [dataclasses.replace(p, path=f"{form.model_type}: {p.path}") for p in problems]
    raise_problems("no Hugging Face family has models like this", reasons)
    raise AssertionError("every family has a format")


# --- weights


Local = tuple[tuple[int, ...], tuple[Box, ...]]
"""The part of a leaf that this process keeps: the shape of its tensor, and the pieces in it."""


def local_on_mesh(
    config: Config, specs: tree.Tree | None, mesh: Mesh | BoundMesh | None
) -> dict[str, Local]:
    """This process's part of parameters with these specs: everything, or a box of each leaf."""
    like = abstract_params(family_of(config).defs(config))
    if isinstance(mesh, BoundMesh) and specs is None:
        title, fix = "cannot load onto a bound mesh", "pass param_specs(defs, rules)"
        refuse(title, "specs", None, "the parameters' specs", fix)
    if mesh is not None and specs is not None:
        validate(like, specs, mesh, what="params")
    return _find_local(Placement.of(like, specs, mesh), "")


def _find_local(placement: Placement, at: str) -> dict[str, Local]:
    """This process's part of a state's leaves under `at`."""
    found = {}
    for leaf in placement.leaves:
        shape = placement.local_shape(leaf, placement.here)
        path = leaf.path.removeprefix(f"{at}/") if at else leaf.path
        if shape is not None and (not at or path != leaf.path):
            found[path] = shape, placement.boxes(leaf, placement.here)
    return found


COMPARED_ROWS = 1 << 10
MOST_ELEMENTS = 1 << 24
"""The most elements to read at a time; quantised weights take 8 bytes each while they are read."""


@public
def load(
    path: str | Path,
    config: Config | None = None,
    *,
    specs: tree.Tree | None = None,
    mesh: Mesh | BoundMesh | None = None,
    placement: Placement | None = None,
    at: str = "params",
    device: torch.device | str = "cpu",
) -> dict:
    """The parameters of a Hugging Face model, in the layout of its family's ``defs(config)``.

    Reads safetensors files, one slice at a time: beside the result it needs memory for one slice
    of one tensor, of about 2^24 elements at most. Rows of padding in the vocabulary are zeros.
    Weights in FP8 (DeepSeek-V3, compressed-tensors) and MXFP4 (GPT-OSS) are multiplied by their
    scales in float32, and then rounded once. No collectives.

    Args:
        path: a folder with config.json and model.safetensors, or an index and its files.
        config: the config of `read_config`, with changes that leave the model the same (dtype,
            dropout, vocab_multiple, a smaller max_seq, auxiliary losses of experts, no multi-token
            prediction modules); None: that config.
        specs: the parameters' specs, a prefix tree; needed on a bound mesh.
        mesh: on a bound mesh this rank's shards are read, else everything.
        placement: in place of specs and mesh: of a state that has the parameters, perhaps split
            among a pipeline's ranks.
        at: the parameters' path in that state; empty: they are all of it.

    Returns:
        The tree of parameters in the config's dtype: global values, or this rank's shards, without
        entries that its part of a pipeline does not use.

    Raises:
        ValueError: files, tensors or entries of config.json are missing, broken, unknown or of
            another shape; all offenders are listed.
    """
    table = read_table(path)
    where = str(Path(path) / CONFIG)
    form = format_of(table, where)
    if config is None:
        config = read_config(path)
    else:
        _check_config(config, table, where)
    source = decode(open_folder(path), table, where)
    local = (
        _find_local(placement, at) if placement is not None else local_on_mesh(config, specs, mesh)
    )
    return read_params(form, config, source, local, device=device)


@public
def load_model(
    path: str | Path,
    *,
    mesh: Mesh | BoundMesh | None = None,
    max_seq: int | None = None,
    dtype: Dtype | None = None,
    ignore: Sequence[str] = (),
    uneven: tuple[str, ...] = (),
    device: torch.device | str = "cpu",
) -> tuple[Config, dict]:
    """A Hugging Face model of any family, `read_config` and `load` in one.

    Args:
        path: a folder with config.json and weights.
        mesh: on a bound mesh each rank reads its shards, by its family's ``rules(config, mesh)``;
            else everything is read.
        max_seq, dtype, ignore: as in `read_config`.
        uneven: logical axes that ranks of the mesh need not divide, of the family's rules.

    Returns:
        The config of its family, such as a `GPTConfig`, and the parameters. The specs of shards are
        ``param_specs(defs(config), rules(config, mesh))``, with `uneven` where there is any.

    Raises:
        ValueError: as `read_config` and `load`, or the mesh does not divide the model.
    """
    config = read_config(path, max_seq=max_seq, dtype=dtype, ignore=ignore)
    family, specs = family_of(config), None
    if mesh is not None:
        chosen: Any = {"uneven": uneven} if uneven else {}
        specs = param_specs(family.defs(config), family.rules(config, mesh, **chosen))
    return config, load(path, config, specs=specs, mesh=mesh, device=device)


def _check_config(config: Config, table: Mapping, where: str) -> None:
    form = format_of(table)
    if family_of(config) is not form.family:
        wanted = f"{form.family.config.__name__}: {where} is of {form.family.title}"
        title, fix = "the config is of another family of models", "pass hub.read_config(path)"
        refuse(title, "config", type(config).__name__, wanted, fix)
    longest = shorter(table, config, form)
    stored = parse(table, max_seq=longest, ignore=tuple(table), where=where)
    if form.looks_ahead and isinstance(config, GPTConfig):
        # the tensors tell whether there are such modules
        stored = dataclasses.replace(stored, mtp_depth=config.mtp_depth)
    fix = "start from hub.read_config, and change only what leaves the model the same"
    problems = []
    for name in differences(config, stored):
        got, wanted = (field_text(attrgetter(name)(each)) for each in (config, stored))
        problems.append(Problem(name, got, f"{wanted}, as stored", fix))
    raise_problems(f"the config is not that of {where}", problems)


def from_tensors(model_type: str, config: Config, named: Mapping[str, torch.Tensor]) -> dict:
    """Our tree of parameters, or of gradients, from tensors by Hugging Face names.

    Args:
        model_type: the format, such as ``"llama"``.
        named: a state dict, with the names of files or of transformers' models; tied tensors are
            optional.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape; all offenders are listed.
    """
    form = format_of({"model_type": model_type})
    raise_problems(f"no {model_type} model is like that", config_problems(config, form))
    entries = {name: (tuple(value.shape), value.dtype) for name, value in named.items()}
    source = TensorSource(entries, lambda name, slices: named[name].detach()[tuple(slices)])
    return read_params(form, config, source, local_on_mesh(config, None, None))


def read_params(
    form: HubFormat,
    config: Config,
    source: TensorSource,
    local: Mapping[str, Local],
    *,
    device: torch.device | str = "cpu",
) -> dict:
    """`load` from any source of tensors."""
    found = _find_layouts(form, config, source)
    stored = match(form, config, found, source)
    return read_layouts(found, stored, config, source, local, device=device)


def read_layouts(
    found: Sequence[HubLayout],
    stored: Mapping[str, str],
    config: Config,
    source: TensorSource,
    local: Mapping[str, Local],
    *,
    device: torch.device | str = "cpu",
) -> dict:
    """The leaves of some layouts, whose tensors `match` has found."""
    defs = family_of(config).defs(config)
    dtypes = {p: d.dtype for p, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)}
    params: dict = {}
    leaves: dict[str, torch.Tensor] = {}
    broken: set[str] = set()
    for layout, part in [(each, part) for each in found for part in each.parts]:
        if part.path not in local:
            continue
        shape, boxes = local[part.path]
        if part.path not in leaves:
            # zeros, as padding of the vocabulary and of shards is never read
            leaf = torch.zeros(shape, dtype=dtypes[part.path], device=device)
            leaves[part.path] = leaf
            tree.put_leaf(params, part.path, leaf)
        leaf = leaves[part.path]
        for start, size, at in boxes:
            view = leaf
            for dim, (first, count) in enumerate(zip(at, size, strict=True)):
                view = view.narrow(dim, first, count)
            box = tuple((a, a + n) for a, n in zip(start, size, strict=True))
            broken |= _fill_(view, layout, part, box, stored, source)
    fix = "copy or download the files again; training that went wrong makes such weights, too"
    problems = [Problem(name, "NaN", "numbers", fix) for name in sorted(broken)]
    raise_problems("these weights are not numbers", problems)
    return params


def _find_layouts(form: HubFormat, config: Config, source: TensorSource) -> list[HubLayout]:
    """The layouts of the naming of which the source has most names."""
    names = {name.removeprefix(form.prefix) for name in source.shapes()}

    def count(found: list[HubLayout]) -> float:
        wanted = [layout.name(index).removeprefix(form.prefix) for layout, index in tensors(found)]
        return sum(name in names for name in wanted) / len(wanted)

    namings = form.namings(config)
    return max((layouts_of(form, config, rules) for rules in namings), key=count)


def _fill_(
    leaf: torch.Tensor,
    layout: HubLayout,
    part: LeafPart,
    box: LeafBox,
    stored: Mapping[str, str],
    source: TensorSource,
) -> set[str]:
    """Read the intersection of a part and `box` of its leaf, row by row of the stacked dims.

    Returns:
        The names of tensors with NaN.
    """
    count, broken = len(layout.stacked), set()
    begins = [
        max(first - start, 0) for first, (start, _) in zip(part.begin, box[count:], strict=True)
    ]
    inner = tuple(
        (max(start - first, 0), min(stop - first, real))
        for first, (start, stop), real in zip(part.begin, box[count:], part.real, strict=True)
    )
    if any(start >= stop for start, stop in inner):
        return broken  # padding, or other pieces
    for index in itertools.product(*(range(*rows) for rows in box[:count])):
        name = stored[layout.name(index)]
        row = leaf[tuple(i - start for i, (start, _) in zip(index, box[:count], strict=True))]
        for piece in _cut(part, inner):
            target = row
            for dim, (start, stop) in enumerate(piece):
                at = begins[dim] + start - inner[dim][0]
                target = target.narrow(dim, at, stop - start)
            read = source.read(name, layout.source(part, piece))
            target.copy_(layout.to_ours(part, piece, read))
            if read.isnan().any():
                broken.add(name)
    return broken


def _cut(part: LeafPart, box: LeafBox) -> Iterator[LeafBox]:
    """Cut a box along the tensor's first dim, into parts of `MOST_ELEMENTS` at most."""
    dim = next((part.ours.index(names[0]) for names in part.theirs if names), None)
    if dim is None:
        yield box
        return
    first, last = box[dim]
    rows = MOST_ELEMENTS * (last - first) // math.prod(stop - start for start, stop in box)
    for start in range(first, last, max(rows, 1)):
        yield (*box[:dim], (start, min(start + max(rows, 1), last)), *box[dim + 1 :])


def match(
    form: HubFormat, config: Config, found: Sequence[HubLayout], source: TensorSource
) -> dict[str, str]:
    """The source's name of each tensor of `found`; it must have them all, and no others.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape; all offenders are listed.
    """
    shapes = source.shapes()
    bare = not any(name.startswith(form.prefix) for name in shapes)
    wanted = {layout.name(index): layout for layout, index in tensors(found)}
    stored = {name: name.removeprefix(form.prefix) if bare else name for name in wanted}
    for name, other in form.stand_ins:
        if name in stored and stored[name] not in shapes:
            stored[name] = stored[other]
    problems = list(_find_missing(form, found, stored, shapes))
    unknown = shapes.keys() - set(stored.values())
    extra = [name for name in unknown if not _is_passed_over(form, config, name)]
    repeated = _find_repeated(form, config, extra)
    unused = [name for name in extra if name not in repeated]
    problems += _explain_unused(form, unused, stored.values())
    for name, layout in wanted.items():
        shape, dtype = shapes.get(stored[name], (layout.shape, torch.float32))
        if shape != layout.shape:
            fix = f"does {form.describes} belong to these weights?"
            problems.append(Problem(name, str(list(shape)), str(list(layout.shape)), fix))
        elif not dtype.is_floating_point or dtype.itemsize == 1:
            fix = f"if it is quantised, {CONFIG} must say how: quantization_config"
            problems.append(Problem(name, str(dtype), "a floating dtype of 16 bits or more", fix))
    problems += [] if problems else list(_check_constants(form, config, source))
    if not problems:
        by_path = {path: name for name, layout in wanted.items() for path in layout.rule.paths}
        for name, path in repeated.items():
            path = path if path in by_path else "embed"
            problems += _compare_tied(source, name, stored[by_path[path]], path, shapes)
    raise_problems(f"these are not the weights of this {form.model_type} model", problems)
    return stored


def _check_constants(form: HubFormat, config: Config, source: TensorSource) -> Iterator[Problem]:
    """Tensors that ours lack, which have other numbers than ours has in its code."""
    if form.surplus is None or not form.surplus.exact:
        return
    shapes = source.shapes()
    for name, (shape, value) in form.surplus.constants(config).items():
        if name not in shapes:
            continue
        found = source.read(name, tuple(slice(0, size) for size in shapes[name][0]))
        if found.shape != shape or not torch.equal(found, torch.full_like(found, value)):
            yield Problem(name, str(found.tolist()), f"{value:g}, as in all published models")


def _is_passed_over(form: HubFormat, config: Config, name: str) -> bool:
    """Whether a tensor is not needed, such as those of a part that the model lacks."""
    if any(re.fullmatch(pattern, name) for pattern in form.unused):
        return True
    if form.surplus is not None and form.surplus.holds(config, name):
        return True
    if not form.looks_ahead or not isinstance(config, GPTConfig):
        return False
    ahead = [r.pattern() for r in form.rules if r.paths[0].startswith("mtp/")]
    found = [p.match(name) for p in [*ahead, *(re.compile(copy) for copy, _ in form.copies)]]
    return any(m and int(m[1]) >= config.num_layers + config.mtp_depth for m in found)


def _find_repeated(form: HubFormat, config: Config, extra: Sequence[str]) -> dict[str, str]:
    """Tensors that repeat another one, such as tied ones, and the paths of the leaves."""
    heads = [rule.name for rule in form.rules if rule.paths == ("unembed",)]
    tied = getattr(config, "tied", False)
    found = {name: "embed" for name in heads if tied and name in extra}
    for pattern, path in form.copies:
        found |= {name: path for name in extra if re.fullmatch(pattern, name)}
    return found


def _compare_tied(
    source: TensorSource, name: str, other: str, path: str, shapes: Mapping
) -> Iterator[Problem]:
    shape = shapes[name][0]
    if shape != shapes[other][0]:
        yield Problem(name, str(list(shape)), f"{list(shapes[other][0])}, as {other}")
        return
    for start in range(0, shape[0], COMPARED_ROWS):
        rows = (slice(start, start + COMPARED_ROWS), *(slice(0, size) for size in shape[1:]))
        if not torch.equal(source.read(name, rows), source.read(other, rows)):
            fix = 'set "tie_word_embeddings" to false in config.json if they are meant to differ'
            wanted = "the same, as config.json ties them"
            if "layers" in name:
                wanted, fix = "the same: this decoder's modules share it", "read it without them"
            path = "embedding" if path.endswith("embed") else path
            yield Problem(name, f"other numbers than the {path}", wanted, fix)
            return


def _find_missing(
    form: HubFormat, found: Sequence[HubLayout], stored: Mapping[str, str], shapes: Mapping
) -> Iterator[Problem]:
    fix = f"are all files there? does {form.describes} belong to these weights?"
    for layout in found:
        indices = itertools.product(*map(range, layout.stacked))
        names = [name for name in map(layout.name, indices) if stored[name] not in shapes]
        if names:
            others = f", nor {len(names) - 1} more of that name" if len(names) > 1 else ""
            got = f"no such tensor{others}"
            yield Problem(names[0], got, f"one of shape {list(layout.shape)}", fix)


def _explain_unused(
    form: HubFormat, extra: Iterable[str], known: Iterable[str]
) -> Iterator[Problem]:
    """One problem for all names that differ only by numbers."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(extra):
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for names in kinds.values():
        got = "a tensor" if len(names) == 1 else f"a tensor, and {len(names) - 1} like it"
        fix = nearest(names[0], known).split(" (known")[0]
        if not fix.startswith("did you mean"):
            fix = f"does {form.describes} belong to these weights?"
        yield Problem(names[0], got, "none of this name: nothing would use it", fix)
