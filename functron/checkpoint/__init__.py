"""Checkpoints: trees of tensors as plain Orbax PyTrees, written by one process."""

from functron.checkpoint.folder import latest, steps
from functron.checkpoint.orbax import metadata, restore, save

__all__ = ["latest", "metadata", "restore", "save", "steps"]
