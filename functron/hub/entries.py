"""Reading a whole config.json, and entries that architectures beside the decoder have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from functron.errors import Problem, nearest
from functron.hub.settings import GENERAL, Aspect, Table, is_a

_UNQUANTISED = (
    "quantised weights are not read: use the model's files in bfloat16, or make them: "
    "transformers' from_pretrained with the method's dequantize=True, then save_pretrained"
)


def values_of(
    aspects: Sequence[Aspect],
    ignored: Sequence[str],
    table: Table,
    problems: list[Problem],
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of ours that a config.json gives.

    Args:
        aspects: what the family's config.json says.
        ignored: its entries that change nothing, beside `GENERAL`.
        table: the config.json.
        problems: what is wrong or unknown is added to them.
        ignore: further entries that are passed over.
    """
    known = {*GENERAL, *ignored, *ignore, *(name for aspect in aspects for name in aspect.theirs)}
    fix = "if it does not change what the model computes, pass ignore=[{name!r}]"
    problems += [
        Problem(name, repr(value), "no such entry", _UNQUANTISED)
        if name == "quantization_config"
        else Problem(name, repr(value), "an entry that is known here", fix.format(name=name))
        for name, value in table.items()
        # null and empty containers switch nothing on, and names with _ are transformers' own
        if name not in known
        and not (name.startswith("_") or name.endswith("_token_id"))
        and value not in (None, {}, [], "")
    ]
    values: dict[str, Any] = {}
    for aspect in aspects:
        values |= aspect.read(table, values, problems)
    return values


def only(theirs: str, *allowed: Any, why: str) -> Aspect:
    """An entry that may be missing, or have one of these values: our models have no others."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            problems.append(Problem(theirs, repr(value), wanted, f"our model has no {why}"))
        return {}

    return Aspect((theirs,), (), read, lambda *_: {})


def architecture(name: str, *others: str) -> Aspect:
    """The class of model that was stored: `name`, or one of which it is a part."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        found = table.get("architectures") or [name]
        if not set(found) & {name, *others}:
            fix = f"store it as one: transformers' {name}.from_pretrained, then save_pretrained"
            problems.append(Problem("architectures", repr(found), f"[{name!r}]", fix))
        return {}

    return Aspect(("architectures",), (), read, lambda *_: {})


def choice(theirs: str, ours: str, default: str, names: Mapping[str, str]) -> Aspect:
    """An entry that chooses one of several things, by the names of both sides.

    Args:
        theirs: the entry.
        ours: the field.
        default: what transformers takes where the entry is missing.
        names: ours by theirs; of several with one meaning the first is written.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if isinstance(value, str) and value in names:
            return {ours: names[value]}
        wanted = "one that our model has"
        problems.append(Problem(theirs, repr(value), wanted, nearest(str(value), names)))
        return {}

    def write(config: Any, problems: list[Problem]) -> dict:
        value = getattr(config, ours)
        found = [name for name, meaning in names.items() if meaning == value]
        if not found:
            wanted = f"one of {', '.join(sorted(set(names.values())))} in this family"
            problems.append(Problem(ours, repr(value), wanted))
            return {}
        return {theirs: default if default in found else found[0]}

    return Aspect((theirs,), (ours,), read, write)


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "relu2": "relu2",
    }
)
"""Our activations by transformers' names."""


def size(
    theirs: str, ours: str, default: int | None, used: Callable[[Any], int] | None = None
) -> Aspect:
    """A whole number, whose null is our 0 where there is `used`: what is written of a config."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not (is_a(value, int) or (value is None and used is not None)):
            wanted = "a whole number" + (" or null" if used else "")
            problems.append(Problem(theirs, repr(value), wanted))
            return {}
        return {ours: value or 0}

    def write(config: Any, _: list[Problem]) -> dict:
        return {theirs: used(config) if used else getattr(config, ours)}

    return Aspect((theirs,), (ours,), read, write)


def square(theirs: str, ours: str, default: int) -> Aspect:
    """A side of a square: one number, or two that are equal."""

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        sides = value if isinstance(value, list) and value else [value]
        if not all(is_a(side, int) and side == sides[0] for side in sides) or len(sides) > 2:
            wanted, fix = "one number, or two that are equal", "our images are squares"
            problems.append(Problem(theirs, repr(value), wanted, fix))
            return {}
        return {ours: sides[0]}

    return Aspect((theirs,), (ours,), read, lambda config, _: {theirs: getattr(config, ours)})
