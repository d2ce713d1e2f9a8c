"""Hugging Face models, streamed into our layout and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
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

import_lazily(__name__)
