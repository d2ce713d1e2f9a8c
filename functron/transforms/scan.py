"""Scan: a function applied along the leading dim of a tree, carrying a value."""

from __future__ import annotations

from collections.abc import Callable

import torch

from functron import compat, tree
from functron.errors import Problem, public, raise_problems
from functron.program.recorder import active
from functron.transforms.scattered import by_row
from functron.transforms.traced_scan import traced_scan


@public
def scan(
    f: Callable, init: tree.Tree, xs: tree.Tree, length: int | None = None
) -> tuple[tree.Tree, tree.Tree]:
    """``carry, y = f(carry, x)`` for each slice x of `xs`, in order: the last carry and stacked ys.

    This is how a stack of layers runs: `xs` holds their parameters, stacked on a leading dim.
    Eagerly it is a loop over views; in backward the slices' gradients are stacked once, so cost
    grows linearly with depth. In a program that is being traced it is one equation forward and one
    backward, of any length. Wrap `f` in `remat` to keep only the carries.

    Args:
        f: ``(carry, x) -> (carry, y)``; y may be None.
        init: the first carry.
        xs: a tree of tensors with a common leading dim, or None with `length`.
        length: the number of steps; needed only where `xs` has no leaf.

    Raises:
        ValueError: the leading dims differ, or neither `xs` nor `length` gives a number of steps.
    """
    f, xs = by_row(f, xs)
    leaves, structure = tree.flatten(xs)
    steps = _num_steps(tree.paths(xs), leaves, length)
    recorder = active()
    if recorder is not None and not compat.transforms_active():
        return traced_scan(recorder, f, init, xs, steps, getattr(f, "__name__", "scan"))
    slices = [leaf.unbind(0) for leaf in leaves]
    carry, ys = init, []
    for step in range(steps):
        carry, y = f(carry, tree.unflatten(structure, [column[step] for column in slices]))
        ys.append(y)
    return carry, tree.map(lambda *rows: torch.stack(rows), *ys) if ys else None


def _num_steps(paths: list[str], leaves: list[torch.Tensor], length: int | None) -> int:
    sizes = [leaf.shape[0] if leaf.dim() else None for leaf in leaves]
    steps = length if length is not None else next(iter(sizes), None)
    if steps is None:
        raise ValueError("scan: got no leaves in xs; wanted the number of steps: pass length=")
    raise_problems(
        "scan needs one leading dim of the same size on every leaf",
        [
            Problem(f"xs/{path}" if path else "xs", f"shape {tuple(leaf.shape)}", f"({steps}, ...)")
            for path, leaf, size in zip(paths, leaves, sizes, strict=True)
            if size != steps
        ],
    )
    return steps
