"""Gradient accumulation: one large batch as a sequence of small ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.program.recorder import Recorder, active
from functron.transforms.scan import scan


@public
def accumulate(
    f: Callable,
    num_microbatches: int,
    *,
    argnums: int | tuple[int, ...] = 1,
    dtype: torch.dtype | None = None,
) -> Callable:
    """The sum of ``f`` over microbatches: F(p, b) = sum over m of f(p, b[m::num_microbatches]).

    Turns a `value_and_grad` function of a batch into one whose activations are those of a
    microbatch. Results are *added*, so `f` should return its microbatch's part of the loss: the sum
    of its tokens' losses divided by the token count of the whole batch. That is exact also when
    microbatches hold different numbers of tokens, where a mean of means is not.

    Microbatch m is every `num_microbatches`-th sample from sample m on, of a rank's own contiguous
    part of a batch as of the whole: the ranks' microbatches m together are the same samples on
    every mesh, as losses need that couple those of a microbatch (`MoEConfig.aux` "batch").

    Args:
        f: returns a tree of tensors, such as ``(loss, gradients)``.
        num_microbatches: how many equal parts the leading dim of the batch is dealt into.
        argnums: the position of the batch argument, or of several; each a tree whose leaves share
            their leading dim.
        dtype: accumulate floating-point results in this dtype, such as torch.float32 for bf16
            gradients; None keeps theirs.

    Raises:
        ValueError: a leading dim does not divide into `num_microbatches`; all offenders are listed.
    """
    if num_microbatches < 1:
        raise ValueError(f"accumulate: got num_microbatches={num_microbatches}; wanted at least 1")

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        recorder = active()
        if recorder is not None and num_microbatches > 1 and not compat.transforms_active():
            one = functools.partial(_one, f, args, kwargs, positions, dtype)
            batch = tuple(_stacked(args[p], num_microbatches, p) for p in positions)
            return _scanned(recorder, one, batch)
        parts = [microbatches(args[p], num_microbatches, f"argument {p}") for p in positions]
        total = _Total(dtype)
        for batch in zip(*parts, strict=True):
            total.add(f(*_chosen(args, positions, batch), **kwargs))
        return total.value

    return wrapped


class _Total:
    """A running sum of trees.

    Attributes:
        dtype: of its floating-point leaves; None: theirs.
        value: the sum; None before the first summand.
    """

    def __init__(self, dtype: torch.dtype | None):
        self.dtype, self.value = dtype, None
        self._own: list[bool] = []

    def add(self, summand: tree.Tree) -> None:
        """Add a tree; in place where the sum so far is memory that only this has seen."""
        leaves, structure = tree.flatten(summand)
        if self.value is None:
            after = [_cast(leaf, self.dtype) for leaf in leaves]
            new = [a is not b for a, b in zip(after, leaves, strict=True)]
        else:
            before = tree.same_structure(summand, self.value)
            in_place = not compat.transforms_active()
            own = zip(before, leaves, self._own, strict=True)
            after = [
                a.add_(b) if in_place and mine and not _tracked(a, b) else a + _cast(b, self.dtype)
                for a, b, mine in own
            ]
            new = [True] * len(after)
        self.value, self._own = tree.unflatten(structure, after), new


def _tracked(*leaves: Any) -> bool:
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)


def _chosen(args: tuple, positions: tuple, batch: tuple) -> list:
    """`args` with its batch arguments replaced by those of one microbatch."""
    full = list(args)
    for position, part in zip(positions, batch, strict=True):
        full[position] = part
    return full


def _one(f: Callable, args: tuple, kwargs: dict, positions: tuple, dtype, batch: tuple) -> Any:
    value = f(*_chosen(args, positions, batch), **kwargs)
    return tree.map(lambda leaf: _cast(leaf, dtype), value)


def _scanned(recorder: Recorder, one: Callable, batch: tuple) -> tree.Tree:
    """The sum over microbatches as one scan, so that a program does not grow with their number."""
    with recorder.frame():  # thrown away: it tells what the sum looks like
        like = one(tree.map(lambda leaf: leaf[0], batch))
    zeros = tree.map(
        lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device), like
    )

    def microbatch(total, part):
        return tree.map(torch.add, total, one(part)), None

    return scan(microbatch, zeros, batch)[0]


def _stacked(batch: tree.Tree, count: int, position: int) -> tree.Tree:
    microbatches(batch, count, f"argument {position}")  # raises where it does not divide
    return tree.map(lambda leaf: leaf.unflatten(0, (-1, count)).movedim(1, 0).contiguous(), batch)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if dtype is not None and floating else leaf


def microbatches(batch: tree.Tree, count: int, where: str = "batch") -> Iterator[tree.Tree]:
    """`count` equal parts of a batch, one after another: part m is of samples m, m + count, ...

    Ranks that hold equal, contiguous parts of a batch so have their parts of the same microbatches.
    Contiguous copies, made when asked for; the batch itself where `count` is 1.

    Raises:
        ValueError: a leading dim does not divide; all offenders are listed, as paths under `where`.
    """
    leaves, structure = tree.flatten(batch)
    raise_problems(
        f"cannot cut the batch into {count} microbatches",
        [
            Problem(
                f"{where}/{path}" if path else where,
                f"shape {tuple(leaf.shape)}",
                f"a leading dim that is a multiple of {count}",
                "change the batch size or num_microbatches",
            )
            for path, leaf in zip(tree.paths(batch), leaves, strict=True)
            if leaf.dim() == 0 or leaf.shape[0] % count
        ],
    )
    if count == 1:
        return iter([batch])
    return (
        tree.unflatten(structure, [leaf[index::count].contiguous() for leaf in leaves])
        for index in range(count)
    )
