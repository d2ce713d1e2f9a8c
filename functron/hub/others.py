"""All families that can be read and written: decoders, and the other kinds of models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from functron.hub.encoders import BERT, T5
from functron.hub.families import FAMILIES
from functron.hub.family import Family
from functron.hub.state_spaces import MAMBA2, NEMOTRON_H
from functron.hub.vision import LLAVA, VIT

OTHERS = (MAMBA2, NEMOTRON_H, BERT, T5, VIT, LLAVA)
"""Families beside decoders."""

ALL: Mapping[str, Family] = MappingProxyType(
    {**FAMILIES, **{family.model_type: family for family in OTHERS}}
)
"""Families by transformers' name in config.json. Of those that fit a model, the first is chosen."""
