"""The config.json of a model as a `GPTConfig`, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from functron.errors import Problem, nearest, raise_problems
from functron.hub import experts, files
from functron.hub.families import FAMILIES, LACKING
from functron.hub.family import Family
from functron.hub.settings import GENERAL, LONGEST
from functron.models.config import Dtype, GPTConfig

CONFIG = "config.json"

_NO_TOKENS = MappingProxyType({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})

FREE = ("dropout", "z_loss", "init_stddev", "vocab_multiple", "dtype", "mtp_weight")
"""Fields of `GPTConfig` that config.json says nothing about: they do not change what the model is
(but for the rounding of its dtype). Nor does it say what `experts.FREE` has."""

_UNQUANTISED = (
    "quantised weights are not read: use the model's files in bfloat16, or make them: "
    "transformers' from_pretrained with the method's dequantize=True, then save_pretrained"
)


def read_config(
    path: str | Path,
    *,
    max_seq: int | None = None,
    dtype: Dtype | None = None,
    ignore: Sequence[str] = (),
) -> GPTConfig:
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

    Raises:
        ValueError: the family is unknown, or the file asks for something that this decoder does
            not have or that is not known; all offenders are listed.
    """
    table = read_table(path)
    where = str(Path(path) / CONFIG)
    config = parse(table, max_seq=max_seq, dtype=dtype, ignore=ignore, where=where)
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
        ValueError: it names none, or one that this decoder cannot be.
    """
    name = str(table.get("model_type"))
    if name in FAMILIES:
        return FAMILIES[name]
    fix = nearest(name, FAMILIES)
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
) -> GPTConfig:
    """`read_config` of a config.json that is at hand.

    Raises:
        ValueError: as `read_config`.
    """
    family = family_of(table, where)
    known = {*GENERAL, *family.ignored, *ignore}
    known |= {name for aspect in family.aspects for name in aspect.theirs}
    fix = "if it does not change what the model computes, pass ignore=[{name!r}]"
    problems = [
        Problem(name, repr(value), "no such entry", _UNQUANTISED)
        if name == "quantization_config"
        else Problem(name, repr(value), "an entry that is known here", fix.format(name=name))
        for name, value in table.items()
        # null and empty containers switch nothing on, and names with _ are transformers' own
        if name not in known
        and not (name.startswith("_") or name.endswith("_token_id"))
        and value not in (None, {}, [], "")
    ]
    if max_seq is not None:
        problems += _shorten_problems(family, table, max_seq)
        longest = {LONGEST: table[family.max_seq]} if family.max_seq in table else {}
        table = {**table, family.max_seq: max_seq, **longest}
    values: dict[str, Any] = {}
    for aspect in family.aspects:
        values |= aspect.read(table, values, problems)
    raise_problems(f"cannot use {where}", problems)
    return GPTConfig(**values, dtype=dtype or stored_dtype(table))


def _shorten_problems(family: Family, table: Mapping[str, Any], max_seq: int) -> list[Problem]:
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


def differences(config: GPTConfig, other: GPTConfig) -> list[str]:
    """The fields in which two configs describe different models."""
    one, two = (_canonical(c) for c in (config, other))
    return [
        f.name
        for f in dataclasses.fields(GPTConfig)
        if f.name not in FREE and getattr(one, f.name) != getattr(two, f.name)
    ]


def _canonical(config: GPTConfig) -> GPTConfig:
    """`config` with what is derived written out, and what nothing reads left at its default."""
    changes: dict[str, Any] = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "qkv_bias": config.bias or config.qkv_bias,
    }
    if not config.kv_rank:
        changes["attention_scale"] = config.attention_scale or config.head_size**-0.5
    if config.nope_every > config.num_layers:
        changes["nope_every"] = 0
    if config.local_rope_theta == config.rope_theta and config.rope_scaling is None:
        changes["local_rope_theta"] = 0.0
    if config.positions != "rope":
        changes |= {"rope_theta": GPTConfig.rope_theta, "rope_scaling": None}
    if not config.kv_rank:
        changes["rope_interleaved"] = GPTConfig.rope_interleaved
    if config.moe is not None:
        changes["moe"] = experts.canonical(config.moe)
        changes |= {} if config.dense_layers else {"mlp_dim": GPTConfig.mlp_dim}
    return dataclasses.replace(config, **changes)


def write_config(
    config: GPTConfig,
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
    name = dtype or config.dtype
    if kept is not None and _still_describes(kept, config, family):
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


def _still_describes(kept: Mapping[str, Any], config: GPTConfig, family: Family) -> bool:
    longest = kept.get(family.max_seq)
    shorter = config.max_seq if longest is not None and longest > config.max_seq else None
    try:
        before = parse(kept, ignore=tuple(kept), max_seq=shorter)
    except ValueError:  # another family's, or positions that were cut off
        return False
    return kept.get("model_type") == family.model_type and not differences(before, config)


def config_problems(config: GPTConfig, family: Family) -> list[Problem]:
    """Why models of this family are not like `config`; empty where they are."""
    problems: list[Problem] = []
    for aspect in family.aspects:
        aspect.write(config, problems)
    covered = {name for aspect in family.aspects for name in aspect.ours}
    for f in dataclasses.fields(GPTConfig):
        value = getattr(config, f.name)
        if f.name not in covered and f.name not in FREE and value != f.default:
            problems.append(Problem(f.name, repr(value), f"{f.default!r} in this family"))
    return problems


def family_for(config: GPTConfig) -> Family:
    """The first family whose models are like `config`.

    Raises:
        ValueError: there is none; what each would need is listed.
    """
    reasons = []
    for family in FAMILIES.values():
        problems = config_problems(config, family)
        if not problems:
            return family
        reasons += [dataclasses.replace(p, path=f"{family.model_type}: {p.path}") for p in problems]
    raise_problems("no Hugging Face family has models like this", reasons)
    raise AssertionError("unreachable")
