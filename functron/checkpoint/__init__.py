"""Checkpoints: trees of sharded tensors as Orbax PyTrees, saved on any mesh, restored on any other.

| name                          |                                                                 |
|-------------------------------|-----------------------------------------------------------------|
| `save`, `restore`, `restore_` | one checkpoint: written; read into new tensors; into given ones |
| `Saver`, `Keep`               | saves in the background; which of its checkpoints stay          |
| `Placement`                   | which boxes of which leaves each process of a mesh holds        |
| `read_params`, `stored_params`| a run's parameters or their averages, as tensors or on disk     |
| `Checkpoint`                  | one opened for reading: leaves, slices, metadata                |
| `steps`, `latest`, `metadata` | the complete ones of a folder; the metadata of one              |
| `verify`                      | reads all of one and compares the checksums                     |
| `list_text`, `show_text`, `verify_text` | the same for people                                   |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.checkpoint.folder import (
        Checkpoint,
        Keep,
        latest,
        list_text,
        show_text,
        steps,
        verify,
        verify_text,
    )
    from functron.checkpoint.placement import Placement
    from functron.checkpoint.restore import metadata, read_params, restore, restore_, stored_params
    from functron.checkpoint.saver import Saver, save

import_lazily(__name__)
