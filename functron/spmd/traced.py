"""Collectives of a program that is being traced: operations on axis names, without processes.

A traced program says ``psum(x, axis="tp")``; which processes that means is decided when it is
compiled for a bound mesh. The operations exist on fake tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

LIBRARY = torch.library.Library("functron", "DEF")

_SCHEMAS = {
    "psum": "(Tensor x, str axis, int size, *, bool must_vary=False) -> Tensor",
    "pmax": "(Tensor x, str axis, int size) -> Tensor",
    "pmin": "(Tensor x, str axis, int size) -> Tensor",
    "pbroadcast": "(Tensor x, str axis, int size, int source) -> Tensor",
    "all_gather": "(Tensor x, str axis, int size) -> Tensor",
    "psum_scatter": "(Tensor x, str axis, int size, *, bool must_vary=False) -> Tensor",
    "all_to_all": "(Tensor x, str axis, int size) -> Tensor",
    "ppermute": "(Tensor x, str axis, int size, int[] sources, int[] destinations) -> Tensor",
    "vary": "(Tensor(a) x, str axis) -> Tensor(a)",
    "assume_replicated": "(Tensor(a) x, str axis) -> Tensor(a)",
    "require_replicated": "(Tensor(a) x, str axis) -> Tensor(a)",
    "assume_share": "(Tensor(a) x) -> Tensor(a)",
    "require_share": "(Tensor(a) x, str[] axes) -> Tensor(a)",
}

for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)


def _like(x, *args, **kwargs):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gathered(x, axis, size):
    return x.new_empty((size, *x.shape))


def _scattered(x, axis, size, *, must_vary=False):
    return x.new_empty(x.shape[1:])


def _view(x, *axes):
    return x.view_as(x)


for _name in ("psum", "pmax", "pmin", "pbroadcast", "all_to_all", "ppermute"):
    LIBRARY.impl(_name, _like, "Meta")
LIBRARY.impl("all_gather", _gathered, "Meta")
LIBRARY.impl("psum_scatter", _scattered, "Meta")
for _name in ("vary", "assume_replicated", "require_replicated", "assume_share", "require_share"):
    LIBRARY.impl(_name, _view, "CompositeExplicitAutograd")

OPS = torch.ops.functron


_REDUCTIONS = {"sum": "psum", "max": "pmax", "min": "pmin"}


@dataclass(frozen=True, eq=False)
class TracedAxis:
    """An axis of a per-rank program that is being traced.

    Attributes:
        name: of the axis.
        size: the number of ranks on it.
        make_index: gives this rank's index on the axis of that name, an input of the program.
    """

    name: str
    size: int
    make_index: Callable[[str], torch.Tensor]
    token: None = None

    @property
    def index(self) -> torch.Tensor:
        return self.make_index(self.name)

    def all_reduce(self, x: torch.Tensor, operation: str, must_vary: bool) -> torch.Tensor:
        """The sum, max or min of x over the ranks."""
        op = getattr(OPS, _REDUCTIONS[operation])
        named = {"must_vary": True} if must_vary else {}
        return op(x, self.name, self.size, **named)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """x of the rank with this index on the axis; those of others are zeros."""
        return OPS.pbroadcast(x, self.name, self.size, source)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] -> [size, ...]: every rank's x."""
        return OPS.all_gather(x, self.name, self.size)

    def reduce_scatter(self, x: torch.Tensor, must_vary: bool) -> torch.Tensor:
        """[size, ...] -> [...]: this rank's row of the sum of x."""
        named = {"must_vary": True} if must_vary else {}
        return OPS.psum_scatter(x, self.name, self.size, **named)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [size, ...]: this rank's row of every rank's x."""
        return OPS.all_to_all(x, self.name, self.size)

    def permute(self, x: torch.Tensor, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
        """x of the rank that sends here under `perm`; zeros where none does."""
        return OPS.ppermute(x, self.name, self.size, [s for s, _ in perm], [d for _, d in perm])

    def mark(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x with a statement about its replication: vary, assume_ or require_replicated."""
        return getattr(OPS, kind)(x, self.name)

    def assume_share(self, x: torch.Tensor) -> torch.Tensor:
        """x with the statement that it is this rank's share of a gradient."""
        return OPS.assume_share(x)

    def require_share(self, x: torch.Tensor, summed: Sequence[str]) -> torch.Tensor:
        """x with the condition that it is a share, which is about to be summed over these axes."""
        return OPS.require_share(x, list(summed))
