"""Branches and loops in a program that is being traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from functron.core import tree
from functron.program.recorder import Recorder


def trace_switch(
    recorder: Recorder,
    index: torch.Tensor,
    branches: Sequence[Callable[..., tree.Tree]],
    operands: Sequence[torch.Tensor],
) -> tree.Tree:
    """``branches[index](*operands)`` as one equation of `recorder`.

    Args:
        recorder: of the program.
        index: 0-dim int64, from 0 to ``len(branches) - 1``; no vmap batches it.
        branches: functions of the tensors, to trees of tensors of one structure, with equal shapes
            and dtypes (each has checked that when the last of them has run).
        operands: tensors.
    """
    raise NotImplementedError


def trace_while(
    recorder: Recorder,
    cond_fun: Callable[[tree.Tree], torch.Tensor],
    body_fun: Callable[[tree.Tree], tree.Tree],
    init: tree.Tree,
) -> tree.Tree:
    """``while cond_fun(carry): carry = body_fun(carry)`` as one equation of `recorder`.

    Args:
        recorder: of the program.
        cond_fun: of a carry, to a 0-dim bool tensor that no vmap batches.
        body_fun: of a carry, to one of its structure, shapes and dtypes (which it has checked).
        init: the first carry, a tree of tensors.
    """
    raise NotImplementedError
