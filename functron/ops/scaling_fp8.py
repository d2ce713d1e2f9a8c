"""Delayed scaling: scales of whole tensors in FP8 that follow from the magnitudes of earlier steps.

The recipe of NVIDIA's Transformer Engine: to know a tensor's largest magnitude before it is cast
takes a pass over it; so the scale is that of the steps before, and the cast finds the magnitude for
those to come in the same pass (`functron.ops.quantise_fp8.cast_fp8`). All in torch's operations on
small tensors: keep the states of many tensors in one, and update them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from functron.ops.quantise_fp8 import FORMATS, MOST

Of = Literal["max", "latest"]


class DelayedScale(NamedTuple):
    """What the next cast of each of some tensors is scaled by, and why.

    Attributes:
        scale: float32, [...], one for each tensor.
        history: float32, [length, ...], their largest magnitudes in the last steps, the latest
            last; 0 where nothing is known.
    """

    scale: torch.Tensor
    history: torch.Tensor


def delayed_scale(
    length: int, shape: Sequence[int] = (), *, device: torch.device | str | None = None
) -> DelayedScale:
    """The state before the first step: scales of 1, and nothing known.

    Args:
        length: how many steps are remembered.
        shape: of the tensors that are scaled: () is one.

    Raises:
        ValueError: length is not positive.
    """
    if length < 1:
        raise ValueError(f"delayed_scale: got length={length}; wanted at least 1 step to remember")
    history = torch.zeros(length, *shape, dtype=torch.float32, device=device)
    return DelayedScale(torch.ones_like(history[0]), history)


def advance(
    state: DelayedScale,
    amax: torch.Tensor,
    format: str = "e4m3",  # noqa: A002  (what it is called)
    *,
    of: Of = "max",
    margin: int = 0,
) -> DelayedScale:
    """The state after a step in which the tensors' largest magnitudes were `amax`. Pure.

    The scale becomes ``most / (2**margin * a)``, with `most` the format's largest number and a the
    largest, or the latest, magnitude remembered; it stays where that is 0. Magnitudes that are not
    finite are remembered as 0: one overflow does not stop the scale for as long as it would be
    remembered. No collectives: take the maximum of `amax` over the ranks that share a tensor first.

    Args:
        state: before.
        amax: float32, [...], as `cast_fp8` returns it.
        format: of the casts, "e4m3" or "e5m2".
        of: "max", or "latest".
        margin: binary orders of magnitude to leave free.
    """
    latest = torch.where(amax.isfinite(), amax, torch.zeros_like(amax))
    history = torch.cat([state.history[1:], latest[None]])
    known = history.amax(0) if of == "max" else latest
    most = torch.full_like(known, MOST[FORMATS[format]])
    scale = (most / known / 2.0**margin).clamp(max=torch.finfo(torch.float32).max)
    return DelayedScale(torch.where(known > 0, scale, state.scale), history)
