"""Checkpoints: trees of sharded tensors as Orbax PyTrees, saved on any mesh, restored on any other.

| name                          | what it is                                                      |
|-------------------------------|-----------------------------------------------------------------|
| `save`, `restore`, `restore_` | one checkpoint: written; read into new tensors; into given ones |
| `Saver`, `Keep`               | saves in the background; which of its checkpoints stay          |
| `Placement`, `place`          | which boxes of which leaves each process of a mesh holds        |
| `Checkpoint`                  | one opened for reading: leaves, slices, metadata                |
| `steps`, `latest`, `metadata` | what a folder holds; what was stored with one                   |
| `verify`                      | reads all of one and compares the checksums                     |
| `list_text`, `show_text`, `verify_text` | the same for people                                   |
"""

from functron.checkpoint.folder import Keep, latest, steps
from functron.checkpoint.listing import list_text, show_text, verify, verify_text
from functron.checkpoint.placement import Placement, place
from functron.checkpoint.restore import metadata, restore, restore_
from functron.checkpoint.saver import Saver, save
from functron.checkpoint.stored import Checkpoint

__all__ = [
    "Checkpoint",
    "Keep",
    "Placement",
    "Saver",
    "latest",
    "list_text",
    "metadata",
    "place",
    "restore",
    "restore_",
    "save",
    "show_text",
    "steps",
    "verify",
    "verify_text",
]
