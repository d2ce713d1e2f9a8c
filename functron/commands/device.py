"""The device of a command that runs something."""

from __future__ import annotations

import torch


def device_type(name: str, processes: int = 1) -> str:
    """ "cpu" or "cuda" for the option --device and so many processes on this machine.

    Raises:
        ValueError: cuda is asked for and there is none, or fewer GPUs than processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got cuda; wanted a device of this machine; fix: --device cpu")
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"nproc: got {processes} for {torch.cuda.device_count()} GPUs; wanted a GPU each; "
            "fix: simulate the mesh (--nproc 0), or --device cpu"
        )
    return kind
