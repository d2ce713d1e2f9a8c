"""config.json of a model as a config of ours, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

from functron.core.errors import Problem, local_path, public, raise_problems, refuse
from functron.hub import files
from functron.hub.decoders import LACKING
from functron.hub.entries import LONGEST, NO_TOKENS, family_fix, read_entries, write_entries
from functron.hub.families import BERT, LLAVA, MAMBA2, NEMOTRON_H, T5, VIT
from functron.hub.format import Format, config_problems
from functron.hub.mixtures import DECODERS
from functron.hub.quantised import ENTRY, read_scheme
from functron.models.config import Dtype, GPTConfig
from functron.models.family import Config, differing_fields, dtype_of, family_of

FORMATS: Mapping[str, Format] = MappingProxyType(
    {**DECODERS, **{form.model_type: form for form in (MAMBA2, NEMOTRON_H, BERT, T5, VIT, LLAVA)}}
)
"""By transformers' name in config.json. Of those that fit a model, the first is chosen."""

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
    """The architecture that a folder's config.json describes, and its weights.

    How many modules predict tokens further ahead (DeepSeek-V3) is counted in the weights:
    config.json has them even where transformers has stored the model without. Without weights it
    is believed.

    Args:
        path: the folder.
        max_seq: the longest sequence, if not as long as the model can take; a shorter one makes
            models usable whose sliding windows, in layers that we cannot have them in, cover it.
        dtype: of parameters and activations; None: that of the weights (float32 for float16).
        ignore: entries of config.json that do not change what the model computes, in case it has
            some that are not known here.

    Returns:
        A `GPTConfig`, `MambaConfig`, `BertConfig`, `T5Config`, `ViTConfig` or `LlavaConfig`.

    Raises:
        ValueError: the format is unknown, or the file asks for something that our model does not
            have or that is not known; all offenders are listed.
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
        ValueError: there is none, it cannot be read or it is no JSON object; or there is an adapter
            of PEFT beside it, without which the weights are another model's.
    """
    file = local_path(path) / CONFIG
    _refuse_adapter(Path(path))
    table = files.read_json(file)
    if not isinstance(table, dict):
        title, got = "cannot read the model's configuration", type(table).__name__
        refuse(title, str(file), got, "a JSON object", "copy it again")
    return table


def _refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT, whose base alone would be read, in silence."""
    if not files.exists(folder / ADAPTER):
        return
    wanted = "a model that is whole: the base alone would be read"
    out = "PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(OUT)"
    fix = f"merge it with peft: {out}; or move it elsewhere, for the base alone"
    got = "an adapter (PEFT)"
    if not files.exists(folder / CONFIG):
        table = files.read_json(folder / ADAPTER)
        base = table.get("base_model_name_or_path") if isinstance(table, Mapping) else None
        got = f"an adapter (PEFT) of {base}" if base else got
        wanted, fix = f"a folder with {CONFIG} and weights", f"merge it with peft: {out}"
    refuse("cannot use an adapter", str(folder / ADAPTER), got, wanted, fix)


def format_of(table: Mapping[str, Any], where: str = CONFIG) -> Format:
    """The format that config.json names.

    Raises:
        ValueError: it names none, or one that our models cannot be.
    """
    name = str(table.get("model_type"))
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
    """`read_config` of a config.json that is at hand.

    Raises:
        ValueError: as `read_config`.
    """
    form = format_of(table, where)
    problems: list[Problem] = []
    if max_seq is not None:
        problems += _shorten_problems(form, table, max_seq)
        longest = {LONGEST: table[form.max_seq]} if form.max_seq in table else {}
        table = {**table, form.max_seq: max_seq, **longest}
    read_scheme(table, problems, ignore)
    values = read_entries(form.entries, form.ignored, table, problems, (*ignore, ENTRY))
    raise_problems(f"cannot use {where}", problems)
    make, constructor = form.family.make, cast(Callable[..., Config], form.family.config)
    dtype = dtype or _stored_dtype(table)
    return make(values, dtype) if make else constructor(**values, dtype=dtype)


def _shorten_problems(form: Format, table: Mapping[str, Any], max_seq: int) -> list[Problem]:
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


def _stored_dtype(table: Mapping[str, Any]) -> Dtype:
    """The dtype of the weights by config.json; float32 for float16, which training must scale."""
    name = str(table.get("dtype") or table.get("torch_dtype") or "").removeprefix("torch.")
    kept = (known for known in get_args(Dtype) if known == name != "float16")
    return next(kept, "float32")


def differences(config: Config, other: Config) -> list[str]:
    """The fields in which two configs of a family describe different models: ``moe.top_k``."""
    family = family_of(config)
    found = differing_fields(family.canonical(config), family.canonical(other))
    return [path for path, _, _ in found if path not in family.free]


def write_config(
    config: Config,
    form: Format,
    *,
    kept: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The config.json of a model, for transformers and those who read the same.

    Args:
        config: the architecture.
        form: the format that it is to be stored in.
        kept: the config.json that the model came with. It is written again as it is if it still
            describes the model, sequences that are now shorter aside; else what changed is.
        dtype: of the stored weights; None: of the config.

    Raises:
        ValueError: models of this format are not like that; all offenders are listed.
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
    out.pop(ENTRY, None)  # of the files that the model came in
    entry = "dtype" if "dtype" in out else "torch_dtype"
    return {**out, entry: dtype or dtype_of(config)}


def still_describes(kept: Mapping[str, Any], config: Config, form: Format) -> bool:
    """Whether the config.json that a model came with is that of `config`, if of a longer one."""
    try:
        before = parse(kept, ignore=tuple(kept), max_seq=shorter(kept, config, form))
    except ValueError:  # another format's, or positions that were cut off
        return False
    return kept.get("model_type") == form.model_type and not differences(before, config)


def shorter(table: Mapping[str, Any], config: Config, form: Format) -> int | None:
    """The longest sequence of `config` where config.json has a longer one; else None."""
    longest = table.get(form.max_seq)
    wanted = getattr(config, "max_seq", None)
    return wanted if wanted is not None and longest is not None and wanted < longest else None


def format_for(config: Config) -> Format:
    """The first format whose models are like `config`.

    Raises:
        ValueError: there is none; what each would need is listed.
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
