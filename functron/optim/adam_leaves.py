"""AdamW's step of all leaves by `functron.ops.adamw`, with what other transformations add to it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functron import tree
from functron.ops.adamw import adamw_
from functron.ops.foreach import foreach_


class Step(NamedTuple):
    """What a step of AdamW is the same for all leaves in.

    Attributes:
        count: of updates, this one included; int64, 0-dim.
        rate: the learning rate.
        factor: what gradients are multiplied by, 0-dim; None: nothing.
        numbers: b1, b2 and eps.
    """

    count: torch.Tensor
    rate: float | torch.Tensor
    factor: torch.Tensor | None
    numbers: Mapping[str, float]


def adamw_leaves_(
    step: Step,
    params: tree.Tree,
    columns: Sequence[Sequence[torch.Tensor]],
    decays: Sequence[float],
    masters: tree.Tree = None,
    rounding: tree.Tree = None,
) -> None:
    """Overwrites parameters, moments and masters by what they are after the step.

    Args:
        step: what is the same for all.
        params: the parameters.
        columns: the leaves of parameters, gradients, first and second moments.
        decays: the weight decay of each leaf.
        masters: float32 masters of the parameters, None where there is none.
        rounding: how parameters are rounded, an `ops.adamw.Stochastic` each, which is of elements
            in the order of memory; None: to nearest.
    """
    structure = tree.structure(params)
    count = len(decays)
    own = [None] * count if masters is None else structure.flatten_up_to(masters)
    how = [None] * count if rounding is None else structure.flatten_up_to(rounding)
    paths = tree.paths(params)
    rows = list(zip(*columns, own, strict=True))

    def kind(i: int) -> Any:  # what one call can have
        return decays[i], own[i] is None, None if how[i] is None else i

    for _, group in itertools.groupby(sorted(range(count), key=lambda i: str(kind(i))), kind):
        chosen = list(group)
        ps, gs, mu, nu, ms = map(list, zip(*(rows[i] for i in chosen), strict=True))
        first = chosen[0]
        mutated = {"parameters": ps, "first moments": mu, "second moments": nu}
        if own[first] is not None:
            mutated["masters"] = ms
        foreach_(
            _each(step, decays[first], how[first]),
            mutated,
            {"gradients": gs},
            paths=lambda chosen=chosen: [paths[i] for i in chosen],
            dense=True,
        )


def _each(step: Step, decay: float, rounding: Any) -> Any:
    def fn(params, mu, nu, *rest):
        *masters, grads = rest
        device = params[0].device
        real = torch.float64 if params[0].dtype == torch.float64 else torch.float32
        scalars = {
            "count": step.count.to(device),
            "rate": _scalar(step.rate, real, device),
            "clip": None if step.factor is None else _scalar(step.factor, real, device),
        }
        for row in zip(params, grads, mu, nu, *masters, strict=True):
            master = row[4] if masters else None
            adamw_(
                *row[:4],
                **scalars,
                **step.numbers,
                weight_decay=decay,
                master=master,
                rounding=rounding,
            )

    return fn


def _scalar(value: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
