"""Layers of experts as config.json says them, and where transformers' math is not ours.

What the layers compute is the same; what training adds to the loss is not, and is therefore not
read: as with dropout, the run says it.

* `MoEConfig.aux_loss`: transformers adds ``router_aux_loss_coef`` times a loss that counts all of a
  token's experts, so it is `top_k` at even routing; ours is 1 in each layer. It takes means over
  all layers before it multiplies them, ours is a sum over layers. With one layer, aux "batch" and
  ``aux_loss = router_aux_loss_coef * top_k`` they are equal (every token having a target).
  transformers leaves it out unless ``output_router_logits`` is set, which config.json as published
  does not.
* Jitter: transformers' Mixtral also gives experts what the noise makes of the stream.
* Precision: transformers takes softmax of routers in float32 (Mixtral, Qwen3-MoE) after a matrix
  product in the model's dtype; DeepSeek-V3's is float32 throughout, and GPT-OSS's in the model's
  dtype throughout. Ours is float32, or float64 in a float64 model.
* Equal scores: ours takes the expert of the lowest number; transformers whatever topk returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from functron.core.errors import Problem
from functron.hub.settings import Aspect, Table, is_a
from functron.models.config import GPTConfig
from functron.nn.moe import MoEConfig

FREE = (
    "aux_loss", "aux", "z_loss", "balance_rate", "jitter", "router_dtype", "dispatch",
    "capacity_factor", "drop",
)  # fmt: skip
"""Fields of `MoEConfig` that are of training, which config.json says nothing about."""

Entry = tuple[Sequence[str], str, Any]
"""Names of an entry (written under all of them, read from the first that is there), the field of
`MoEConfig` that it is, and what transformers takes where it is missing."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def canonical(moe: MoEConfig) -> MoEConfig:
    """`moe` with what is not the model's, or is not used, left at its default."""
    plain = MoEConfig()
    changes: dict[str, Any] = {name: getattr(plain, name) for name in FREE}
    if moe.routing == "expert_choice":
        changes["capacity_factor"] = moe.capacity_factor  # how many tokens experts choose
    if moe.num_groups == 1:
        changes |= {"top_groups": 1, "group_score": plain.group_score}
    if moe.normalise == "after":  # the same, computed another way
        changes |= {"normalise": "before", "renormalise": True}
    return dataclasses.replace(moe, **changes)


def experts(*entries: Entry, shared: Sequence[str] = (), **fixed: Any) -> Aspect:
    """Layers of experts.

    Args:
        entries: what config.json says of them.
        shared: the entry that counts shared experts, each as wide as a routed one; empty: none.
        fixed: fields of `MoEConfig` that every model of the family has the same.
    """

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        values, before = dict(fixed), len(problems)
        for names, field, default in entries:
            value = next((table[name] for name in names if name in table), default)
            if not is_a(value, type(default)):
                problems.append(Problem(names[0], repr(value), _WORDS[type(default)]))
                continue
            values[field] = type(default)(value)
        if shared:
            count = table.get(shared[0], 1)
            if not is_a(count, int) or count < 1:
                problems.append(Problem(shared[0], repr(count), "at least 1 in this family"))
                return {}
            values["shared_dim"] = count * values.get("expert_dim", 1)
        return {"moe": MoEConfig(**values)} if len(problems) == before else {}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        moe = config.moe
        if moe is None:
            problems.append(Problem("moe", "None", "layers of experts in this family", "set it"))
            return {}
        own = {field for _, field, _ in entries} | ({"shared_dim"} if shared else set())
        problems += _misfits(moe, own, fixed)
        out = {name: getattr(moe, field) for names, field, _ in entries for name in names}
        if not shared:
            return out
        if not moe.shared_dim or moe.shared_dim % moe.expert_dim:
            wanted = f"a multiple of expert_dim={moe.expert_dim}"
            problems.append(Problem("moe.shared_dim", str(moe.shared_dim), wanted))
        return {**out, shared[0]: moe.shared_dim // moe.expert_dim}

    names = [name for entry in entries for name in entry[0]]
    return Aspect((*names, *shared), ("moe",), read, write)


def _misfits(moe: MoEConfig, own: set[str], fixed: Mapping[str, Any]) -> list[Problem]:
    """What `moe` has that models of the family do not, which say `own` and have `fixed`."""
    plain = MoEConfig()
    said = {name: getattr(moe, name) for name in own}
    wanted = canonical(dataclasses.replace(plain, **{**fixed, **said}))
    got = canonical(moe)
    found = []
    for field in dataclasses.fields(MoEConfig):
        value, want = getattr(moe, field.name), getattr(wanted, field.name)
        if getattr(got, field.name) != want:
            want = fixed.get(field.name, want)
            found.append(Problem(f"moe.{field.name}", repr(value), f"{want!r} in this family"))
        elif field.name == "capacity_factor" and value:
            fix = "set it to 0 to export the model without it"
            wanted_words = "0: models of this family drop no tokens"
            found.append(Problem("moe.capacity_factor", str(value), wanted_words, fix))
    return found


def dense_layers(theirs: str, default: int) -> Aspect:
    """How many of the first layers are dense (DeepSeek)."""

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        value = table.get(theirs, default)
        if not is_a(value, int):
            problems.append(Problem(theirs, repr(value), "a whole number"))
            return {}
        return {"dense_layers": min(value, values.get("num_layers", value))}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs: config.dense_layers}

    return Aspect((theirs,), ("dense_layers",), read, write)


def sparse_layers() -> Aspect:
    """Qwen's ``decoder_sparse_step`` and ``mlp_only_layers``: which layers are dense."""
    theirs = ("decoder_sparse_step", "mlp_only_layers")

    def read(table: Table, values: Mapping, problems: list[Problem]) -> dict:
        step, only = table.get(theirs[0], 1), table.get(theirs[1]) or []
        if not is_a(step, int) or step < 1 or not isinstance(only, list):
            got = f"{step!r} and {only!r}"
            problems.append(Problem(" and ".join(theirs), got, "a whole number and a list"))
            return {}
        layers = range(values.get("num_layers", 0))
        dense = [layer for layer in layers if layer in only or (layer + 1) % step]
        if dense != list(range(len(dense))):
            named = ", ".join(map(str, dense[:8])) + (", ..." if len(dense) > 8 else "")
            got = f"{step} and {only}: dense layers {named}"
            wanted = "the first ones dense, and experts in all after them"
            fix = "this decoder has two stacks of layers: it cannot alternate between them"
            problems.append(Problem(" and ".join(theirs), got, wanted, fix))
            return {}
        return {"dense_layers": len(dense)}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs[0]: 1, theirs[1]: list(range(config.dense_layers))}

    return Aspect(theirs, ("dense_layers",), read, write)


def tokens_ahead() -> Aspect:
    """Modules of multi-token prediction, which files need not have although config.json says so."""
    theirs = ("num_nextn_predict_layers", "num_mtp_layers")

    def read(table: Table, _: Mapping, problems: list[Problem]) -> dict:
        value = next((table[name] for name in theirs if name in table), 1)
        if value is not None and not is_a(value, int):
            problems.append(Problem(theirs[0], repr(value), "a whole number or null"))
            return {}
        return {"mtp_depth": value or 0}

    def write(config: GPTConfig, _: list[Problem]) -> dict:
        return {theirs[0]: config.mtp_depth}

    return Aspect(theirs, ("mtp_depth",), read, write)


def exactly(ours: str, wanted: float, why: str) -> Aspect:
    """A field that another aspect gives, and that must be this."""

    def check(value: Any, problems: list[Problem]) -> None:
        if value is not None and value != wanted:
            problems.append(Problem(ours, repr(value), f"{wanted!r}: {why}"))

    def read(_: Table, values: Mapping, problems: list[Problem]) -> dict:
        check(values.get(ours), problems)
        return {}

    def write(config: GPTConfig, problems: list[Problem]) -> dict:
        check(getattr(config, ours), problems)
        return {}

    return Aspect((), (), read, write)
