"""Running kernels on a GPU."""

from __future__ import annotations

import torch


def usable(device: torch.device) -> str | None:
    """Why kernels cannot run on this device; None where they can."""
    return f"{device} is no GPU"


def cuda(*args, **kwargs) -> None:
    """Run a kernel."""
    raise NotImplementedError
