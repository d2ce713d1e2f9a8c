"""Applications: what is made with the library, each a folder that works, and goes, by itself.

The tables here are all that the house knows of them. An application hands plain functions to the
library, which finds them by the names of settings (`functron.core.errors.load_plugin`), as it finds
those of other distributions by their entry points. No application imports another.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from functron.core.errors import has_module, list_plugins, load_plugin

APPLICATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "guard": ("rerun",),
        "megatron": ("migrate",),
        "notebook": ("join",),
        "planner": ("plan", "recipe"),
        "zoo": (),
    }
)
"""By the name of its folder: the commands that there are only with an application."""

PLUGINS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "functron.families": {
            "mamba": "functron.apps.zoo.mamba:make_family",
            "bert": "functron.apps.zoo.bert:make_family",
            "t5": "functron.apps.zoo.t5:make_family",
            "vit": "functron.apps.zoo.vit:make_family",
            "llava": "functron.apps.zoo.llava:make_family",
            "module": "functron.apps.zoo.modules:make_family",
            "classifier": "functron.apps.zoo.heads:make_family",
            "embedder": "functron.apps.zoo.embedders:make_family",
        },
        "functron.formats": {
            "megatron": "functron.apps.megatron.runs:make_format",
            "hf-module": "functron.apps.zoo.module_files:make_format",
            "hf-classifier": "functron.apps.zoo.module_files:make_classifier_format",
            "hf-embedder": "functron.apps.zoo.module_files:make_embedder_format",
        },
        "functron.hub_formats": {"zoo": "functron.apps.zoo.formats:list_formats"},
        "functron.logs": {"megatron": "functron.apps.megatron.launches:make_log_reader"},
        "functron.record_names": {"megatron": "functron.apps.megatron.launches:name_records"},
        "functron.sample_orders": {"megatron": "functron.apps.megatron.sample_order:make_order"},
        "functron.sections": {
            "anomalies": "functron.apps.guard.anomalies:AnomalyConfig",
            "replicas": "functron.apps.guard.corruption:ReplicasConfig",
            "restarts": "functron.apps.guard.restarts:RestartsConfig",
            "stragglers": "functron.apps.guard.stragglers:StragglersConfig",
            "watchdog": "functron.apps.guard.watchdog:WatchdogConfig",
        },
        "functron.started_meshes": {"processes": "functron.apps.notebook.session:start"},
        "functron.worker_programs": {"processes": "functron.apps.notebook.worker:run"},
    }
)
"""By group and name, ``module:function``.

| group | the function | read by |
|---|---|---|
| ``functron.families`` | returns a `functron.models.family.Family` | `functron.models.family` |
| ``functron.formats`` | returns a `functron.training.convert.RunFormat` | ``functron convert`` |
| ``functron.hub_formats`` | returns `functron.hub.HubFormat`s | `functron.hub` |
| ``functron.logs`` | returns a `functron.training.records.LogReader` | ``functron compare`` |
| ``functron.record_names`` | is a `functron.training.records.Naming` of samples | log_names |
| ``functron.sample_orders`` | returns a `functron.data.sampling.SampleOrder` | order |
| ``functron.sections`` | is the class of a section | `functron.training.config.TrainConfig` |
| ``functron.started_meshes`` | starts the ranks of a mesh | `functron.Mesh.start` |
| ``functron.worker_programs`` | is a rank of such a mesh | ``functron join`` |
"""


def find(name: str) -> ModuleType | None:
    """The application of this name; None where its folder was left out."""
    assert name in APPLICATIONS, name
    module = f"{__name__}.{name}"
    return importlib.import_module(module) if has_module(module) else None


def missing_commands() -> dict[str, str]:
    """The commands of applications that were left out, and the folder of each."""
    left_out = [name for name in APPLICATIONS if not has_module(f"{__name__}.{name}")]
    return {each: f"functron/apps/{name}" for name in left_out for each in APPLICATIONS[name]}


def load_plugins(group: str, *wanted: str) -> dict[str, Any]:
    """Call the functions of a group: of ``functron.formats`` the formats, by their names.

    Args:
        group: of the table.
        wanted: names; entry points of other distributions are read where the table lacks one.
    """
    found = {name: load_plugin(group, name, group)() for name in list_plugins(group)}
    if set(wanted) - found.keys():
        others = importlib.import_module("importlib.metadata").entry_points(group=group)
        found |= {one.name: one.load()() for one in others if one.name in wanted}
    return found
