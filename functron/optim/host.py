"""Which tensors an optimizer may read on the host, to decide what to run."""

from __future__ import annotations

import torch

from functron import compat
from functron.program.recorder import active


def readable(value: torch.Tensor) -> bool:
    """Whether the number in a 0-dim tensor is known where the program that runs can ask for it.

    Not in a program that is traced, compiled or only checked, nor under torch.func transforms that
    batch or differentiate it. Reading waits for the tensor's device.
    """
    if active() is not None or compat.faking() or value.is_meta:
        return False
    return not compat.is_wrapped(value) and not value.requires_grad
