"""Hugging Face models in and out: safetensors streamed straight into our layout, and back."""

from functron.hub.config import family_for, read_config, write_config
from functron.hub.families import FAMILIES
from functron.hub.family import Family
from functron.hub.reader import from_tensors, load
from functron.hub.rules import Rule
from functron.hub.writer import save, to_tensors

__all__ = [
    "FAMILIES",
    "Family",
    "Rule",
    "family_for",
    "from_tensors",
    "load",
    "read_config",
    "save",
    "to_tensors",
    "write_config",
]
