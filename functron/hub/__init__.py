"""Hugging Face models in and out: safetensors streamed straight into our layout, and back."""

from functron.hub.config import ALL, family_for, read_config, write_config
from functron.hub.families import FAMILIES
from functron.hub.family import Family, Rule
from functron.hub.kinds import KINDS, Config, Kind, kind_of
from functron.hub.reader import from_tensors, load, load_model
from functron.hub.writer import save, to_tensors

__all__ = [
    "ALL",
    "FAMILIES",
    "KINDS",
    "Config",
    "Family",
    "Kind",
    "Rule",
    "family_for",
    "from_tensors",
    "kind_of",
    "load",
    "load_model",
    "read_config",
    "save",
    "to_tensors",
    "write_config",
]
