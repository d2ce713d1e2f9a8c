"""Training runs: a configuration, what follows of it on a mesh, steps, records and folders.

Names are imported when they are first used: a command that reads run folders needs no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functron.training.anomalies import AnomalyConfig, FiniteHook
    from functron.training.config import TrainConfig, configure, load
    from functron.training.costs import step_report
    from functron.training.loop import LoopHook, Meter, every, loop, progress, record_to
    from functron.training.records import compare
    from functron.training.replicas import leaf_hash
    from functron.training.restarts import stop_on_signals
    from functron.training.run import prepare
    from functron.training.run_folder import with_changed_batch
    from functron.training.setup import RunSetup, make_setup
    from functron.training.train import train

__all__ = [
    "AnomalyConfig",
    "FiniteHook",
    "LoopHook",
    "Meter",
    "RunSetup",
    "TrainConfig",
    "compare",
    "configure",
    "every",
    "leaf_hash",
    "load",
    "loop",
    "make_setup",
    "prepare",
    "progress",
    "record_to",
    "step_report",
    "stop_on_signals",
    "train",
    "with_changed_batch",
]

_MEMBERS: Mapping[str, str] = MappingProxyType(
    {
        "AnomalyConfig": "anomalies",
        "FiniteHook": "anomalies",
        "LoopHook": "loop",
        "Meter": "loop",
        "RunSetup": "setup",
        "TrainConfig": "config",
        "compare": "records",
        "configure": "config",
        "every": "loop",
        "leaf_hash": "replicas",
        "load": "config",
        "loop": "loop",
        "make_setup": "setup",
        "prepare": "run",
        "progress": "loop",
        "record_to": "loop",
        "step_report": "costs",
        "stop_on_signals": "restarts",
        "train": "train",
        "with_changed_batch": "run_folder",
    }
)
"""Public names, and the modules that they are in."""


class _Package(ModuleType):
    """A package whose public functions keep their names from the modules that they are in.

    An import of ``functron.training.train`` would otherwise replace the function `train`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MEMBERS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MEMBERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
