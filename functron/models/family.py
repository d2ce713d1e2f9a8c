"""What an architecture is to a training step: a table of its functions, and of what it trains on.

All are pure functions of a config: a training run asks the family of its config, and does not ask
which architecture that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from functron.models import bert, gpt, mamba, t5
from functron.models.stack import Named

Config = gpt.GPTConfig | mamba.MambaConfig | bert.BertConfig | t5.T5Config
"""An architecture that ``functron train`` trains."""

Setting = Literal["context", "experts", "kernels", "loss_chunk_tokens"]
"""What the losses of some families take, beside the key, stream, remat and gather of all."""


@dataclass(frozen=True)
class Family:
    """An architecture's functions, each of its config first.

    Attributes:
        name: of its table in a configuration.
        title: what the user calls it.
        kind: of its configs.
        presets: named configs.
        defs: ``(config)`` to the definitions of the parameters.
        rules: ``(config, mesh, *, fsdp)`` to how a mesh splits them.
        loss: ``(config, params, batch, *, key, stream, remat, gather)`` to the sum of the losses.
        num_targets: ``(batch)`` to how many terms that sum has.
        flops_per_token: ``(config, seq)`` to those of a step, forward and backward; with
            ``objective="spans"`` also of how many targets a sample has.
        settings: what `loss` takes besides.
        rules_settings: what `rules` takes besides.
        adapters: whether LoRA has a place in it.
        objective: what it learns: the next token, masked ones, or spans that are taken out.
    """

    name: str
    title: str
    kind: type
    presets: Mapping[str, Any]
    defs: Callable[..., dict]
    rules: Callable
    loss: Callable
    num_targets: Callable
    flops_per_token: Callable[..., int]
    settings: frozenset[Setting] = field(default_factory=frozenset)
    rules_settings: frozenset[str] = field(default_factory=frozenset)
    adapters: bool = False
    objective: Literal["next", "masked", "spans"] = "next"

    def has_details(self, config: Config) -> bool:
        """Whether the loss of `config` has several terms: those of `gpt.loss_and_details`."""
        return isinstance(config, gpt.GPTConfig) and config.has_details


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": Family(
            "gpt", "a GPT", gpt.GPTConfig, gpt.PRESETS, gpt.defs, gpt.rules, gpt.loss,
            gpt.num_targets, gpt.flops_per_token,
            settings=frozenset({"context", "experts", "kernels", "loss_chunk_tokens"}),
            rules_settings=frozenset({"experts"}), adapters=True,
        ),
        "mamba": Family(
            "mamba", "a Mamba-2 model", mamba.MambaConfig, mamba.PRESETS, mamba.defs, mamba.rules,
            mamba.loss, mamba.num_targets, mamba.flops_per_token,
        ),
        "bert": Family(
            "bert", "a BERT", bert.BertConfig, bert.PRESETS, bert.defs, bert.rules, bert.loss,
            bert.num_targets, bert.flops_per_token, objective="masked",
        ),
        "t5": Family(
            "t5", "a T5", t5.T5Config, t5.PRESETS, t5.defs, t5.rules, t5.loss, t5.num_targets,
            t5.flops_per_token, objective="spans",
        ),
    }
)  # fmt: skip
"""All of them, by the name of their tables."""

PRESETS: Mapping[str, Config] = Named(
    {name: config for family in FAMILIES.values() for name, config in family.presets.items()}
)
"""The presets of all families; no two have the same name."""


def family_of(config: object) -> Family:
    """The family that a config belongs to.

    Raises:
        TypeError: it belongs to none of them.
    """
    for family in FAMILIES.values():
        if isinstance(config, family.kind):
            return family
    known = ", ".join(family.kind.__name__ for family in FAMILIES.values())
    raise TypeError(f"family_of: got {type(config).__name__}; wanted one of {known}")
