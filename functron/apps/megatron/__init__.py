"""Coming from Megatron-LM: its launch lines, checkpoints, order of samples, and logs.

- `migrate`: a launch line or YAML as a configuration, with what became of each argument.
- `make_format`: ``functron convert megatron:PATH run:RUN``, and back (`runs`), over the tensors
  (`tensors`) in the files of its checkpoints (`checkpoint_files`).
- `make_order`: ``order = "megatron"``, the samples that it draws, token for token.
- `name_records`: ``log_names = "megatron"``; `make_log_reader`: its logs in ``functron compare``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functron.apps.megatron.launches import make_log_reader, name_records
    from functron.apps.megatron.migration import Migration, migrate
    from functron.apps.megatron.runs import make_format
    from functron.apps.megatron.sample_order import make_order

__all__ = [
    "Migration", "make_format", "make_log_reader", "make_order", "migrate", "name_records",
]  # fmt: skip

_MEMBERS: Mapping[str, str] = MappingProxyType({
    "Migration": "migration", "migrate": "migration", "make_format": "runs",
    "make_log_reader": "launches", "name_records": "launches", "make_order": "sample_order",
})  # fmt: skip
"""Public names, and the modules that they are in."""


def __getattr__(name: str) -> Any:
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MEMBERS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
