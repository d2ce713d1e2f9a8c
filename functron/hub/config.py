"""The config.json of a model as a `GPTConfig`, and back.

All families that can be read and written: decoders, and the other kinds of models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from functron.core.errors import Problem, nearest, public, raise_problems
from functron.hub import files
from functron.hub.encoders import BERT, T5
from functron.hub.families import FAMILIES, LACKING
from functron.hub.family import Family, config_problems
from functron.hub.kinds import Config, dtype_of, kind_of
from functron.hub.settings import LONGEST, values_of
from functron.hub.state_spaces import MAMBA2, NEMOTRON_H
from functron.hub.vision import LLAVA, VIT
from functron.models.config import Dtype, GPTConfig

OTHERS = (MAMBA2, NEMOTRON_H, BERT, T5, VIT, LLAVA)
"""Families beside decoders."""

ALL: Mapping[str, Family] = MappingProxyType(
    {**FAMILIES, **{family.model_type: family for family in OTHERS}}
)
"""Families by transformers' name in config.json. Of those that fit a model, the first is chosen."""


CONFIG = "config.json"

_NO_TOKENS = MappingProxyType({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})


@public
def read_config(
    path: str | Path,
    *,
    max_seq: int | None = None,
    dtype: Dtype | None = None,
    ignore: Sequence[str] = (),
) -> Config:
    """The architecture that a folder's config.json describes, and its weights.

    The weights say how many modules predict tokens further ahead (DeepSeek-V3): config.json counts
    them even where transformers has stored the model without. Without weights it is believed.

    Args:
        path: the folder.
        max_seq: the longest sequence, if not as long as the model can take; a shorter one makes
            models usable whose sliding windows, in layers that we cannot have them in, cover it.
        dtype: of parameters and activations; None: that of the weights (float32 for float16).
        ignore: entries of config.json that do not change what the model computes, in case it has
            some that are not known here.

    Returns:
        The config of its kind: `GPTConfig`, `MambaConfig`, `BertConfig`, `T5Config`, `ViTConfig` or
        `LlavaConfig`.

    Raises:
        ValueError: the family is unknown, or the file asks for something that our model does not
            have or that is not known; all offenders are listed.
    """
    table = read_table(path)
    where = str(Path(path) / CONFIG)
    config = parse(table, max_seq=max_seq, dtype=dtype, ignore=ignore, where=where)
    if not isinstance(config, GPTConfig):
        return config
    if config.mtp_depth and any(files.exists(Path(path) / name) for name in files.ENTRANCES):
        return dataclasses.replace(config, mtp_depth=modules_ahead(config, files.open_folder(path)))
    return config


def modules_ahead(config: GPTConfig, source: files.Tensors) -> int:
    """How many modules of multi-token prediction there are, at most as many as config.json says."""
    names = source.shapes()
    found = 0
    while (
        found < config.mtp_depth
        and f"model.layers.{config.num_layers + found}.eh_proj.weight" in names
    ):
        found += 1
    return found


def read_table(path: str | Path) -> dict[str, Any]:
    """The config.json of a folder, as it is.

    Raises:
        ValueError: there is none, it cannot be read or it is no JSON object.
    """
    file = Path(path) / CONFIG
    table = files.read_json(file)
    if not isinstance(table, dict):
        problem = Problem(str(file), type(table).__name__, "a JSON object", "copy it again")
        raise_problems("cannot read the model's configuration", [problem])
    return table


def family_of(table: Mapping[str, Any], where: str = CONFIG) -> Family:
    """The family of models that config.json names.

    Raises:
        ValueError: it names none, or one that our models cannot be.
    """
    name = str(table.get("model_type"))
    if name in ALL:
        return ALL[name]
    fix = nearest(name, ALL)
    if name in LACKING:
        fix = f"this decoder has no {LACKING[name]} yet; {fix}"
    problem = Problem("model_type", repr(name), "a family that functron has", fix)
    raise_problems(f"cannot use {where}", [problem])
    raise AssertionError("unreachable")


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
    family = family_of(table, where)
    problems: list[Problem] = []
    if max_seq is not None:
        problems += _shorten_problems(family, table, max_seq)
        longest = {LONGEST: table[family.max_seq]} if family.max_seq in table else {}
        table = {**table, family.max_seq: max_seq, **longest}
    values = values_of(family.aspects, family.ignored, table, problems, ignore)
    raise_problems(f"cannot use {where}", problems)
    return family.kind.make(values, dtype or stored_dtype(table))


def _shorten_problems(family: Family, table: Mapping[str, Any], max_seq: int) -> list[Problem]:
    if not family.max_seq:
        wanted = "nothing: config.json of this family has no longest sequence"
        return [Problem("max_seq", str(max_seq), wanted, "leave it out")]
    learned = any("positions" in rule.paths for rule in family.rules)
    stored = table.get(family.max_seq)
    if not isinstance(stored, int) or (max_seq == stored if learned else 1 <= max_seq <= stored):
        return []
    wanted, fix = f"at most {stored}, as config.json says", "leave it out"
    if learned:
        wanted = f"{stored}: as many as there are learned positions"
        fix = "leave it out; samples may be shorter"
    return [Problem("max_seq", str(max_seq), wanted, fix)]


def stored_dtype(table: Mapping[str, Any]) -> Dtype:
    """The dtype of the weights as config.json says; float32 where we do not compute in it."""
    name = str(table.get("dtype") or table.get("torch_dtype") or "").removeprefix("torch.")
    return next((known for known in get_args(Dtype) if known == name), "float32")


def differences(config: Config, other: Config) -> list[str]:
    """The fields in which two configs of a kind describe different models."""
    kind = kind_of(config)
    one, two = (kind.canonical(c) for c in (config, other))
    return [
        f.name
        for f in dataclasses.fields(kind.config)
        if f.name not in kind.free and getattr(one, f.name) != getattr(two, f.name)
    ]


def write_config(
    config: Config,
    family: Family,
    *,
    kept: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """The config.json of a model, for transformers and those who read the same.

    Args:
        config: the architecture.
        family: what it is to be stored as.
        kept: the config.json that the model came with. It is written again as it is if it still
            describes the model, sequences that are now shorter aside; else what changed is.
        dtype: of the stored weights; None: of the config.

    Raises:
        ValueError: models of this family are not like that; all offenders are listed.
    """
    problems = config_problems(config, family)
    raise_problems(f"this model cannot be stored as {family.model_type}", problems)
    name = dtype or dtype_of(config)
    if kept is not None and still_describes(kept, config, family):
        out = dict(kept)
    else:
        # without these, readers take the special tokens of the family's first model
        out = dict(_NO_TOKENS) if kept is None else dict(kept)
        out.pop("rope_parameters", None)
        out |= {"architectures": [family.architecture], "model_type": family.model_type}
        for aspect in family.aspects:
            out |= aspect.write(config, [])
    entry = "dtype" if "dtype" in out else "torch_dtype"
    return {**out, entry: name}


def still_describes(kept: Mapping[str, Any], config: Config, family: Family) -> bool:
    """Whether the config.json that a model came with is that of `config`, if of a longer one."""
    try:
        before = parse(kept, ignore=tuple(kept), max_seq=shorter(kept, config, family))
    except ValueError:  # another family's, or positions that were cut off
        return False
    return kept.get("model_type") == family.model_type and not differences(before, config)


def shorter(table: Mapping[str, Any], config: Config, family: Family) -> int | None:
    """The longest sequence of `config` where config.json has a longer one; else None."""
    longest = table.get(family.max_seq)
    wanted = getattr(config, "max_seq", None)
    return wanted if wanted is not None and longest is not None and wanted < longest else None


def family_for(config: Config) -> Family:
    """The first family whose models are like `config`.

    Raises:
        ValueError: there is none; what each would need is listed.
    """
    reasons = []
    for family in ALL.values():
        if family.kind is not kind_of(config):
            continue
        problems = config_problems(config, family)
        if not problems:
            return family
        reasons += [dataclasses.replace(p, path=f"{family.model_type}: {p.path}") for p in problems]
    raise_problems("no Hugging Face family has models like this", reasons)
    raise AssertionError("unreachable")
