"""Models as pure functions of their parameters, by family; generation, LoRA, scoring and more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.models import gpt, lora
    from functron.models.generation import generate
    from functron.models.options import Hook, ModelOptions

import_lazily(__name__)
