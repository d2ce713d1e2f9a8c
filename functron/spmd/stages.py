"""What a program may ask of the axis whose ranks run the stages of a pipeline."""

from __future__ import annotations

import torch

from functron.spmd.axes import BoundAxis, scope
from functron.spmd.primitives import Psum
from functron.spmd.traced import TracedAxis


def psum_stages(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the processes that run other stages of a pipeline; 0-dim or any shape.

    The identity where one process runs all stages, and where there are none. One all-reduce of x's
    bytes otherwise.
    """
    stages = scope().stages
    if stages is None or stages.index is None:
        return x
    make_index = scope().axis_index
    if make_index is not None:
        return Psum.call(x, TracedAxis(stages.name, stages.size, make_index))
    return Psum.call(x, BoundAxis(stages.name, stages.size, stages.index, stages.group))
