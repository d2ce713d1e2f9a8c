"""Which rotary options of a decoder fit each other and its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from functron.errors import Problem


@runtime_checkable
class Rotary(Protocol):
    """The fields of a `GPTConfig` that say how heads are rotated."""

    @property
    def positions(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def local_rope_theta(self) -> float: ...
    @property
    def rope_fraction(self) -> float: ...
    @property
    def rope_sections(self) -> Sequence[int]: ...
    @property
    def rotated_dims(self) -> int: ...


_DEFAULTS = (
    *(("local_rope_theta", 0), ("rope_fraction", 1), ("nope_every", 0)),
    *(("rope_pairs", "halves"), ("rope_sections", ())),
)


def rope_problems(config: Rotary) -> list[Problem]:
    """Rotary options that fit neither each other nor the heads."""
    found, turns = [], config.positions == "rope" and not config.kv_rank
    found += [
        Problem(name, str(getattr(config, name)), f"{default} without rope over a head's dims")
        for name, default in _DEFAULTS
        if not turns and getattr(config, name) != default
    ]
    if not turns:
        return found
    if config.local_rope_theta and not config.window:
        got = f"{config.local_rope_theta} without a window"
        found.append(Problem("local_rope_theta", got, "0", "set window, or leave it out"))
    if not 0 < config.rope_fraction <= 1 or config.rotated_dims < 2:
        got, wanted = str(config.rope_fraction), "above 0, for 2 dims at least, and at most 1"
        found.append(Problem("rope_fraction", got, wanted))
    elif config.rotated_dims % 2:
        got = f"{config.rotated_dims} rotated dims"
        found.append(Problem("head_dim", got, "an even number, for rope"))
    elif sections := config.rope_sections:
        pairs = config.rotated_dims // 2
        if min(sections) < 1 or sum(sections) != pairs or len(sections) < 2:
            wanted = f"two numbers or more, each at least 1, that sum to the {pairs} rotated pairs"
            found.append(Problem("rope_sections", str(tuple(sections)), wanted))
    return found
