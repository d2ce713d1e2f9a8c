"""What config.json says of attention in later families: caps, scales, ropes of some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from functron.errors import Problem
from functron.hub.rope import rope
from functron.hub.settings import Aspect, Table, is_a
from functron.models.config import GPTConfig


def cap(theirs: str, ours: str, default: float | None) -> Aspect:
    """A cap whose null is our 0; `default` is what transformers takes where it is missing."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if value is not None and not (is_a(value, float) and 0 <= value < math.inf):
            problems.append(Problem(theirs, repr(value), "a positive number or null"))
            return {}
        return {ours: float(value or 0.0)}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs: getattr(config, ours) or None}

    return Aspect((theirs,), (ours,), read, write)


def query_scalar(default: int) -> Aspect:
    """Gemma's ``query_pre_attn_scalar`` s, a whole number: scores are multiplied by 1 / sqrt(s)."""
    theirs = "query_pre_attn_scalar"

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not is_a(value, float) or value <= 0:
            problems.append(Problem(theirs, repr(value), "a positive number"))
            return {}
        return {"attention_scale": value**-0.5}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        scale = config.attention_scale
        scalar = max(round(scale**-2), 1) if scale else config.head_size
        if scale and not math.isclose(scalar**-0.5, scale, rel_tol=1e-6):
            wanted = "one over the root of a whole number"
            problems.append(Problem("attention_scale", str(scale), wanted))
        return {theirs: scalar}

    return Aspect((theirs,), ("attention_scale",), read, write)


_LOCAL = "rope_local_base_freq"


def local_rope(theta: float, local: float) -> Aspect:
    """Gemma 3's two ropes; it comes after the aspect of windows.

    Args:
        theta: of layers without a window, where ``rope_theta`` is missing.
        local: of layers with one, where ``rope_local_base_freq`` is missing.
    """
    of_global = rope(theta)

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        both = table.get("rope_parameters")
        base = table.get(_LOCAL, local)
        if isinstance(both, Mapping) and "full_attention" in both:
            here = both.get("sliding_attention") or {}
            base = here.get("rope_theta", base)
            kind = here.get("rope_type", "default")
            if kind != "default":
                name = "rope_parameters.sliding_attention.rope_type"
                problems.append(Problem(name, repr(kind), "'default'"))
            table = {**table, "rope_parameters": both["full_attention"]}
        found = of_global.read(table, values, problems)
        if not is_a(base, float) or base <= 0:
            problems.append(Problem(_LOCAL, repr(base), "a positive number"))
            return found
        if "layer_types" in table and not values.get("window"):
            if "sliding_attention" not in (table["layer_types"] or ()):
                return {**found, "local_rope_theta": 0.0}
            wanted = "every layer, or all but every n-th: the others have another rope"
            problems.append(Problem("layer_types", "windows here and there", wanted))
        return {**found, "local_rope_theta": float(base) if values.get("window") else 0.0}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        if config.window and not config.local_rope_theta:
            same = config.rope_scaling is None
            if not same:
                wanted = "a theta of local layers, which nothing stretches"
                problems.append(Problem("local_rope_theta", "0", wanted))
            return {**of_global.write(config, problems), _LOCAL: config.rope_theta}
        base = config.local_rope_theta or local
        return {**of_global.write(config, problems), _LOCAL: base}

    ours = (*of_global.ours, "local_rope_theta")
    return Aspect((*of_global.theirs, _LOCAL), ours, read, write)


def unrotated_layers() -> Aspect:
    """SmolLM3's layers without rope: every n-th."""
    theirs = ("no_rope_layers", "no_rope_layer_interval")

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        every = table.get("no_rope_layer_interval", 4)
        listed = table.get("no_rope_layers")
        count = values.get("num_layers", 0)
        if not is_a(every, int) or every < 1 or not isinstance(listed, list | None):
            got = f"{listed!r} and {every!r}"
            problems.append(Problem(" and ".join(theirs), got, "a list or null, and a number"))
            return {}
        if listed is None:
            return {"nope_every": every}
        turns = [bool(each) for each in listed[:count]]
        every = turns.index(False) + 1 if False in turns else 0
        if turns != [not every or (i + 1) % every != 0 for i in range(count)]:
            wanted = "0 for every n-th layer, and 1 for the others"
            problems.append(Problem("no_rope_layers", str(listed), wanted))
        return {"nope_every": every}

    def write(config: GPTConfig, _: list[Problem]) -> dict[str, Any]:
        entries: dict[str, Any] = {"no_rope_layers": [int(not each) for each in config.unrotated]}
        return entries | {"no_rope_layer_interval": config.nope_every or config.num_layers + 1}

    return Aspect(theirs, ("nope_every",), read, write)
