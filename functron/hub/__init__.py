"""Hugging Face models, streamed into our layout and back."""

from functron.hub.format import HubFormat, NameRule
from functron.hub.reader import (
    FORMATS,
    format_for,
    from_tensors,
    load,
    load_model,
    read_config,
    write_config,
)
from functron.hub.writer import save, to_tensors
from functron.models.family import Config, family_of

__all__ = [
    "FORMATS",
    "Config",
    "HubFormat",
    "NameRule",
    "family_of",
    "format_for",
    "from_tensors",
    "load",
    "load_model",
    "read_config",
    "save",
    "to_tensors",
    "write_config",
]
