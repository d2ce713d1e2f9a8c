"""Rotary positions as config.json says them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functron import nn
from functron.core.errors import Problem, nearest
from functron.hub.settings import LONGEST, Aspect, Table, is_a
from functron.models.config import GPTConfig

_ORIGINAL = "original_max_position_embeddings"
_NUMBERS = MappingProxyType(
    {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _ORIGINAL: "original_max_seq",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    }
)
"""Transformers' names of settings, and ours."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
_NEEDED = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": _LLAMA3,
        "yarn": ("factor", _ORIGINAL),
    }
)
_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""Settings of yarn; null means what `nn.RopeScaling` says where they are not given."""
_SIZES = ("rope_theta", "partial_rotary_factor")


def rope(
    theta: float = 10000.0,
    default: Mapping[str, Any] | None = None,
    partial: float | None = None,
) -> Aspect:
    """Rotary positions: transformers 5's ``rope_parameters``, or what it replaced.

    Args:
        theta: what transformers takes where ``rope_theta`` is missing.
        default: the settings that it takes where there are none.
        partial: the fraction of a head's dims that it rotates where the file does not say; None:
            it rotates all, whatever the file says.
    """
    theirs = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        return _read(table, values, problems, theta, default or {}, partial)

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        entries = _write(config, problems)
        if default and config.rope_scaling is None:  # null would mean that
            entries["rope_scaling"] = {"rope_type": "default", "type": "default"}
        if partial is not None:
            entries["partial_rotary_factor"] = config.rope_fraction
        elif config.rope_fraction != 1:
            got = str(config.rope_fraction)
            problems.append(Problem("rope_fraction", got, "1.0 in this family"))
        return entries

    return Aspect(theirs, ("rope_theta", "rope_scaling", "rope_fraction"), read, write)


def _read(
    table: Table,
    values: Mapping,
    problems: list[Problem],
    base: float,
    default: Mapping[str, Any],
    fraction: float | None,
) -> dict:
    name = "rope_scaling" if table.get("rope_scaling") else "rope_parameters"
    inner = table.get(name) or default
    if not isinstance(inner, Mapping):
        problems.append(Problem(name, repr(inner), "an object or null"))
        return {}
    sizes = {key: table[key] for key in _SIZES if table.get(key) is not None}
    settings = {**sizes, **inner}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    theta = settings.pop("rope_theta", base)
    partial = settings.pop("partial_rotary_factor", fraction or 1.0)
    if not is_a(partial, float) or not (0 < partial <= 1 if fraction else partial == 1):
        wanted = "a number up to 1" if fraction else "1: this family rotates all dims of a head"
        problems.append(Problem("partial_rotary_factor", repr(partial), wanted))
        return {}
    if not is_a(theta, float) or theta <= 0:
        problems.append(Problem("rope_theta", repr(theta), "a positive number"))
        return {}
    if kind not in _NEEDED:
        fix = nearest(str(kind), _NEEDED)
        if kind in ("dynamic", "longrope", "su"):
            fix = f"set {name} to null in config.json and use sequences as long as in pretraining"
        problems.append(Problem(f"{name}.rope_type", repr(kind), " or ".join(_NEEDED), fix))
        return {}
    if kind == "yarn" and settings.get(_ORIGINAL) is None and "max_seq" in values:
        settings[_ORIGINAL] = table.get(LONGEST, values["max_seq"])
    scaling = _scaling(kind, settings, name, problems)
    sizes = {"rope_theta": float(theta), "rope_fraction": float(partial)}
    return {} if scaling is None else {**sizes, **scaling}


def _scaling(
    kind: str, settings: Mapping[str, Any], name: str, problems: list[Problem]
) -> dict[str, Any] | None:
    optional = _OPTIONAL if kind == "yarn" else ()
    given = [key for key in optional if settings.get(key) is not None]
    needed = _NEEDED[kind]
    bad = [key for key in needed if not is_a(settings.get(key), float) or settings[key] <= 0]
    bad += [key for key in given if not is_a(settings[key], bool if key == "truncate" else float)]
    problems += [
        Problem(f"{name}.{key}", repr(settings.get(key)), f"a positive number for {kind!r}")
        for key in bad
    ]
    # a default rope has the sequence length of pretraining written down, and makes no use of it
    problems += [
        Problem(f"{name}.{key}", repr(settings[key]), f"no such setting for {kind!r}")
        for key in sorted(settings.keys() - set(_LLAMA3) - set(optional))
        if settings[key] is not None
    ]
    if bad:
        return None
    if kind == "default":
        return {"rope_scaling": None}
    values: dict[str, Any] = {_NUMBERS[key]: settings[key] for key in (*needed, *given)}
    kinds = {"original_max_seq": int, "truncate": bool}
    values = {key: kinds.get(key, float)(value) for key, value in values.items()}
    values["kind"] = kind
    return {"rope_scaling": nn.RopeScaling(**values)}


def _write(config: GPTConfig, _: list[Problem]) -> dict:
    """The entries of transformers 4, which 5 and other readers understand too."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    keys = [*_NEEDED[scaling.kind]]
    if scaling.kind == "yarn":
        zero = ("mscale", "mscale_all_dim", "attention_factor")  # in ours: not given
        keys += [key for key in _OPTIONAL if key not in zero or getattr(scaling, _NUMBERS[key])]
    values = {key: getattr(scaling, _NUMBERS[key]) for key in keys}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, "type": scaling.kind, **values},
    }
