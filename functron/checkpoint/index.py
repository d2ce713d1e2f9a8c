"""The index of a checkpoint's database: which file each chunk lies in, for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from functron.checkpoint import database


def file_of(folder: Path, key: str) -> str:
    """The path of the file that holds a key; that of the folder where the index does not say."""
    try:
        found = next((location for name, location in _entries(folder) if name == key), None)
    except Exception:  # the index is damaged too
        found = None
    if found is None:
        return str(folder)
    # "value:<folder>:<file in it>:<offset>:<length>", percent-encoded
    parts = found.split(":")
    return str(folder / unquote("".join(parts[1:-2])))


def _entries(folder: Path) -> Iterator[tuple[str, str]]:
    """The keys of all values that do not lie in the index itself, and where they do."""
    import tensorstore as ts

    shared = database.context()
    spec = {"driver": "file", "path": f"{folder}/"}
    base = ts.KvStore.open(spec, context=shared).result()
    whole = ts.ocdbt.dump(base, context=shared).result()
    waiting = [(version["root"]["location"], b"") for version in whole["versions"][-1:]]
    while waiting:
        location, prefix = waiting.pop()
        node: Any = ts.ocdbt.dump(base, location, context=shared).result()
        for entry in node["entries"]:
            if node.get("height", 0):
                common = entry.get("subtree_common_prefix", b"")
                waiting.append((entry["location"], prefix + common))
            elif "indirect_value" in entry:
                yield (prefix + entry["key"]).decode(), str(entry["indirect_value"])
