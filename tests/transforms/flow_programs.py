"""Switches and loops as a program records them, and the same of Python where nothing is traced."""

from __future__ import annotations

import torch

from functron import tree
from functron.program.recorder import active
from functron.transforms.traced_flow import trace_switch, trace_while


def switch(index, branches, *operands):
    """Traced: an equation. Else all branches, of which each rank or row has its own."""
    if (recorder := active()) is not None:
        named = {f"branch {k}": branch for k, branch in enumerate(branches)}
        return trace_switch(recorder, torch.as_tensor(index), named, operands)
    if not isinstance(index, torch.Tensor):
        return branches[min(max(index, 0), len(branches) - 1)](*operands)
    out = branches[0](*operands)
    for k, branch in enumerate(branches[1:], 1):
        chosen = index >= k if k == len(branches) - 1 else index == k
        out = tree.map(lambda a, b, m=chosen: torch.where(m, a, b), branch(*operands), out)
    return out


def loop(cond, body, init):
    """Traced: an equation. Else a loop, whose condition must be one for all that runs."""
    if (recorder := active()) is not None:
        return trace_while(recorder, cond, body, init)
    while cond(init):
        init = body(init)
    return init
