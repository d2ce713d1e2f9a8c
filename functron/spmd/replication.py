"""The replication check: an output declared replicated must not vary.

In simulation a value varies over an axis exactly when it is batched at that axis' vmap level, so
the check is exact, static and free, also on fake tensors. Reductions of values that are already
replicated are flagged where they are written, in `collectives`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functron import tree
from functron.errors import Problem, raise_problems
from functron.spmd.axes import SimulatedAxis, scope, user_line
from functron.spmd.spec import P, spec_axes


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
