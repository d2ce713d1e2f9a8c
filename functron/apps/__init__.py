"""Applications: programs made with the library, which knows nothing of them.

Each is a folder that can be read, tested and deleted by itself; none imports another. An
application hands plain functions to the library's registries. Those of functron's own applications
stand in the table here, by the groups that other distributions have entry points of.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functron.core.errors import load_plugin

PLUGINS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "functron.formats": {"megatron": "functron.apps.megatron.runs:make_format"},
        "functron.logs": {"megatron": "functron.apps.megatron.launches:make_log_reader"},
        "functron.record_names": {"megatron": "functron.apps.megatron.launches:name_records"},
        "functron.sample_orders": {"megatron": "functron.apps.megatron.sample_order:make_order"},
    }
)
"""By group and name, ``module:function``.

| group | the function | read by |
|---|---|---|
| ``functron.formats`` | returns a `functron.training.convert.RunFormat` | ``functron convert`` |
| ``functron.logs`` | returns a `functron.training.records.LogReader` | ``functron compare`` |
| ``functron.record_names`` | is a `functron.training.records.Naming` of samples | log_names |
| ``functron.sample_orders`` | returns a `functron.data.sampling.SampleOrder` | order |
"""


def load_plugins(group: str, *wanted: str) -> dict[str, Any]:
    """Call the functions of a group: of ``functron.formats`` the formats, by their names.

    Args:
        group: of the table.
        wanted: names; entry points of other distributions are read where the table lacks one.
    """
    found = {name: load_plugin(group, name, group)() for name in PLUGINS.get(group, ())}
    if set(wanted) - found.keys():
        others = importlib.import_module("importlib.metadata").entry_points(group=group)
        found |= {one.name: one.load()() for one in others if one.name in wanted}
    return found
