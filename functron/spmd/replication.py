"""The replication check: an output declared replicated must not vary.

In simulation a value varies over an axis exactly when it is batched at that axis' vmap level, so
the check is exact, static and free, also on fake tensors. Reductions of values that are already
replicated are flagged where they are written, in `collectives`.

Whether a value is a rank's share of a gradient is such a type too: shares, and what is computed
from them, are batched at a level of their own, of size 1. Only they may be summed as gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.spmd.axes import SimulatedAxis, TracedAxis, scope, user_line
from functron.spmd.primitives import AssumeShare, RequireShare
from functron.spmd.spec import P, spec_axes

LOSS_FIX = (
    "return lax.psum(loss, ...) of the ranks' parts of the loss, or lax.pmean(loss, ...) of their "
    "means, and differentiate that with ft.grad, whose results sync_gradients adds up"
)


def share_problem(over: Sequence[str], made: bool) -> tuple[str, str, str]:
    """(got, wanted, fix) of a gradient that must not be synchronised.

    Args:
        over: the axes over which it would be summed and does not vary.
        made: whether it is a share.
    """
    got = "a gradient that is no rank's share: ft.grad did not make it, or it is synchronised"
    if over:
        got = f"a gradient that is already summed over {', '.join(map(repr, over))}"
    once = "call sync_gradients once, and do not psum gradients before it"
    other = (
        f"{once}; differentiate with ft.grad, not torch.func.grad, which counts the loss once per "
        "rank; or declare shares that you made otherwise with ft.assume_shares"
    )
    return got, "every rank's own share of it, as ft.grad returns it", once if made else other


class VaryingOutputError(ValueError):
    """Outputs that vary over axes their specs do not mention."""


class LineRecorder(TorchFunctionMode):
    """Remembers which line of the user's program made each tensor."""

    def __init__(self):
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree.leaves(out):
            if isinstance(leaf, torch.Tensor):
                # holding the tensor keeps its id from being given to another
                self._made[id(leaf)] = (leaf, user_line())
        return out

    def line(self, value: torch.Tensor) -> str | None:
        """``file:line: source`` of the operation that made `value`, where it was seen."""
        made = self._made.get(id(value))
        return made[1] if made else None


def varying_axes(value: Any) -> tuple[str, ...]:
    """The simulated axes over which `value` differs between ranks."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(
        name
        for name, axis in scope().axes.items()
        if isinstance(axis, SimulatedAxis) and axis.varies(value)
    )


def as_share(value: torch.Tensor) -> torch.Tensor:
    """`value`, declared a rank's share of a gradient where a program is checked."""
    axis = _share_axis()
    return value if axis is None or not lacks_share(value) else AssumeShare.call(value, axis)


def lacks_share(value: torch.Tensor) -> bool:
    """Whether the check knows that `value` is no share; a trace's own check finds out later."""
    axis = _share_axis()
    return axis is not None and not (isinstance(axis, SimulatedAxis) and axis.varies(value))


def no_share(value: torch.Tensor, summed: Sequence[str] | None = None) -> torch.Tensor:
    """`value` without the type of a share; with `summed`, a trace keeps that it had to have it."""
    axis = _share_axis()
    if isinstance(axis, SimulatedAxis):
        return RequireShare.call(value, axis) if axis.varies(value) else value
    if axis is None or summed is None:
        return value
    return RequireShare.call(value, axis, summed=tuple(summed))


def _share_axis() -> SimulatedAxis | TracedAxis | None:
    """The mark of shares: a simulation's level of shares, or any traced axis."""
    if scope().shares is not None or not scope().check:
        return scope().shares
    return next((axis for axis in scope().axes.values() if isinstance(axis, TracedAxis)), None)


def check_outputs(
    outputs: Sequence[Any],
    specs: Sequence[P | None],
    paths: Sequence[str],
    axes: Sequence[str],
    where: str,
    recorder: LineRecorder | None,
) -> None:
    """Check that no output varies over one of `axes` that its spec does not mention.

    Raises:
        VaryingOutputError: with the path, the axis, the line and the fix of every offender.
    """
    rows = zip(outputs, specs, paths, strict=True)
    problems = [
        problem
        for value, spec, path in rows
        if spec is not None
        for problem in _unreduced(value, spec, path, axes, recorder)
    ]
    raise_problems(f"{where} returns values that vary where out_specs say they do not", problems,
                   VaryingOutputError)  # fmt: skip


def _unreduced(
    value: Any, spec: P, path: str, axes: Sequence[str], recorder: LineRecorder | None
) -> Iterator[Problem]:
    for axis in varying_axes(value):
        if axis in axes and axis not in spec_axes(spec):
            line = recorder.line(value) if recorder else None
            yield Problem(
                f"output {path}" if path else "output",
                f"a value that varies over {axis!r}" + (f", made at {line}" if line else ""),
                f"one replicated over {axis!r}, as its out_spec {spec} declares",
                f"reduce it with lax.psum(..., {axis!r}) (or pmean, all_gather) before returning "
                f"it; if it is a gradient, call sync_gradients; or put {axis!r} in its out_spec",
            )
