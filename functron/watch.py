"""Steps that also say how large every layer's parameters, gradients and results are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entries = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Watch:
    """A step that says more than the usual one, of which it is a twin, and when it is taken.

    Only its own program computes what it says: other steps cost what they cost without it.

    Attributes:
        step: ``(state, batch) -> (state, metrics)``, metrics with ``layers``, the norms of `update`
            (see `functron.make_step`), and perhaps ``aux`` with ``stream`` of `gpt.Details`.
        every: it is taken in place of the usual step at multiples of this step, and at the first.
        names: what the entries of the norms are of.
        stream: what the entries of the residual stream's sizes are of; empty: nothing says them.
    """

    step: Callable
    every: int
    names: Sequence[str]
    stream: Sequence[str] = ()

    def due(self, index: int) -> bool:
        """Whether step `index` (from 0) is one of these."""
        return index == 0 or (index + 1) % self.every == 0

    def layers(self, metrics: Mapping[str, Any]) -> Entries:
        """What a step said, by layer, in numbers on the host.

        Returns:
            For each layer of a stack (``blocks/3``) and each other entry of the parameters
            (``embed``): ``param_norm``, the 2-norm of its parameters before the update;
            ``grad_norm``, that of their gradients before clipping; and ``activation_rms``, the root
            mean square over the batch of the residual stream after the layer, or after the
            embedding. What does not exist is left out.
        """
        found: Entries = {name: {} for name in (*self.names, *self.stream)}
        for what, values in metrics["layers"].items():
            for name, value in zip(self.names, values.tolist(), strict=True):
                found[name][what] = value
        if self.stream:
            said = metrics["aux"]["stream"]
            squares = (said["squares"].double() / said["count"]).tolist()
            for name, value in zip(self.stream, squares, strict=True):
                found[name]["activation_rms"] = math.sqrt(value)
        return found
