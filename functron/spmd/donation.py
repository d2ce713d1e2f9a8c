"""Donation: tensors that a call of a program consumes, all of them or none.

A caller may give a tensor's memory to a program's results. The tensor then becomes a `Donated`,
which holds no memory and raises where it is used, with the call that consumed it. JAX calls such
arrays deleted.

A call that fails, or that Ctrl-C interrupts, leaves what was donated to it as it was, if nothing of
it had been written; else all of it is gone, since a part of a new state beside the rest of an old
one would train on with wrong numbers. Ctrl-C may come between any two steps of Python, so nothing
here depends on code that runs after it: a tensor is a `Donated` from before the first write on, and
whether it is whole follows from the versions that torch counts, when it is next used. The fused and
compiled kernels of this library, of whose writes torch counts none, count before they write.

Of other writes that torch does not count nothing is known: through ``x.data``, ``x.numpy()`` or
DLPack, and by `torch._fused_adamw_` and its like or a kernel of one's own called without
`functron.ops.foreach.foreach_`. A call that fails after these alone leaves its arguments as if
nothing had been written, yet with what was. ``torch.autograd.graph.increment_version(x)``
before such a write makes it count.

Some functions of torch ask no subclass, so that they cannot raise: `torch.tensor`, ``new_tensor``,
`torch.Tensor` and `torch.utils.dlpack.to_dlpack` make an empty tensor of one that is gone, and
`torch.as_tensor` and `torch.asarray` return it as it is. Copies by ``clone()`` raise.

Other tensors that show the memory of what is donated, as those do of which it is a view, are
overwritten with it, and nothing tells: donate clones of views. Arguments of one call that share
memory are refused, and results of `functron.lax` and `functron.scan` are no views of operands: they
have memory of their own, or are an operand, which is gone as well.

Within `snapshot_donated` programs are given copies, and what was donated is whole again wherever a
call does not finish.

A tensor that torch's tape tracks is not donated, nor is anything beside it (see `shard_map`), but
where no tape runs: then it is updated in place and stays what it is.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems
from functron.core.scopes import set_during
from functron.spmd.mesh import JointCall

FIX = "use the result in its place, or donate a clone"
RESTORE = "go on from the newest checkpoint, or from a new state"

_copies: contextvars.ContextVar[bool] = contextvars.ContextVar("functron_snapshots", default=False)


@contextlib.contextmanager
def snapshot_donated() -> Iterator[None]:
    """Keep what is donated in this with block, or by a decorated function, until calls finish.

    Programs are given copies of it. So a step that fails, or that Ctrl-C interrupts, leaves its
    state as it was before, and a notebook can go on from there; what a step that finishes consumed
    is gone as ever. Costs the memory of what is donated once more, and a copy of it in each step.

    >>> step = ft.debug.snapshot_donated()(ft.jit(step, donate=0))

    Tensors that require gradients, such as a module's parameters, are updated in their own memory,
    and a call that fails after that loses all that was donated to it, as without this.

    Raises:
        ValueError: a CUDA graph is called, which updates the memory that it was recorded with.
    """
    with set_during(_copies, True):
        yield


def keeps_snapshots() -> bool:
    """Whether programs are given copies of what is donated to them."""
    return _copies.get()


class Donated(torch.Tensor):
    """The remains of a tensor that a program consumed. Every use of it raises that torch lets see.

    Unless the program failed before it wrote anything: then it becomes the tensor that it was.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Donated)]
        gone = [x for x in found if not _donation(x).restore(x)]
        if gone:
            raise ValueError(f"a tensor that {describe_fate(gone[0])}")
        return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        donation = _donation(self)
        if donation.restore(self):
            return repr(self)
        return f"Donated({describe_fate(self)})"


def _donation(tensor: Donated) -> Donation:
    return vars(tensor)["donation"]


def describe_fate(tensor: Donated) -> str:
    """The fate of a tensor, and the fix: words to follow "a tensor that"."""
    return _donation(tensor).describe(vars(tensor)["path"])


def refuse_donated(leaves: Sequence[Any], paths: Callable[[], Sequence[str]], program: str) -> None:
    """Raise ValueError, with the call that consumed it, where an argument is `Donated`."""
    if not any(isinstance(leaf, Donated) for leaf in leaves):
        return
    gone = [isinstance(leaf, Donated) and not _donation(leaf).restore(leaf) for leaf in leaves]
    if any(gone):
        first = gone.index(True)
        more = f", and {sum(gone) - 1} more like it" if sum(gone) > 1 else ""
        fate = f"{describe_fate(leaves[first])}{more}"
        raise ValueError(f"{program}: argument {paths()[first]}: got a tensor that {fate}")


def check_consumable(tensors: Sequence[torch.Tensor], donated: Mapping[int, str]) -> None:
    """Check that the memory of every donated argument is its own.

    Args:
        tensors: all arguments, none of them `Donated`.
        donated: the position and path of those that are to be consumed.

    Raises:
        ValueError: it shows the memory of another argument, which would be overwritten.
    """
    owners: dict[int, int] = {}
    memory = [value.untyped_storage().data_ptr() for value in tensors]
    for position, pointer in enumerate(memory):
        owners.setdefault(pointer, position)
    shared = {}
    for position, pointer in enumerate(memory):
        first = owners[pointer]
        if pointer and first != position and (position in donated or first in donated):
            shared[position] = first
    raise_problems(
        "donated arguments share memory",
        [
            Problem(
                f"argument {donated.get(i, i)}",
                f"the memory of {donated.get(j, j)}",
                "memory of its own",
                "donate a clone",
            )
            for i, j in shared.items()
        ],
    )


class Donation:
    """The tensors that one call of a program consumes, within a with block.

    ``take`` all of them, ``start``, run the program on what was taken, ``finish``. Where the block
    ends otherwise they are whole, or gone if any was written.

    Attributes:
        why: what ended the call, if it did not finish.
    """

    def __init__(self, call: JointCall):
        self.why = ""
        self._call = call
        self._taken: dict[int, _Taken] = {}
        self._versions: list[tuple[torch.Tensor, int | None]] = []
        self._tracked: list[torch.Tensor] = []
        self._copies = keeps_snapshots()
        self._started = self._running = self._finished = False
        self._whole: bool | None = None

    def take(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor with the memory of `tensor`, which becomes `Donated`.

        A tensor that a tape tracks stays what it is, as long as the program does not fail.
        """
        if tensor.requires_grad:
            self._versions.append((tensor, tensor._version))
            self._tracked.append(tensor)
            return tensor
        live, kind = tensor.detach(), type(tensor)
        with compat.no_overrides():
            # in this order: whenever it is interrupted, `restore` finds what is missing
            self._taken[id(tensor)] = _Taken(tensor, live, kind)
            vars(tensor)["donation"], vars(tensor)["path"] = self, path
            tensor.__class__ = Donated
            release: Any = tensor.set_
            release()
        if self._copies:
            return live.clone()
        self._versions.append((live, None if live.is_inference() else live._version))
        return live

    def start(self) -> None:
        """From here on the program runs."""
        self._started = self._running = True

    def finish(self) -> None:
        """The program has its results: what was donated is gone."""
        self._finished = True
        self._call.gone = bool(self._taken)
        self._forget_tensors()

    def __enter__(self) -> Donation:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._running = False
        if self._finished or error is None:
            return
        self.why = type(error).__name__
        if self._is_whole():
            for taken in self._taken.values():
                self.restore(taken.tensor)
            return
        self._call.gone = True
        for tensor in self._tracked:
            vars(tensor)["donation"], vars(tensor)["path"] = self, "that requires gradients"
            tensor.__class__ = Donated
        self._forget_tensors()
        error.add_note(f"{self._call.program} was updating what was donated to it; fix: {RESTORE}")

    def _forget_tensors(self) -> None:
        self._taken, self._versions, self._tracked = {}, [], []

    def _is_whole(self) -> bool:
        """Whether nothing had been written when this was first asked."""
        if self._whole is None:
            self._whole = all(
                tensor._version == version if version is not None else not self._started
                for tensor, version in self._versions
            )
        return self._whole

    def restore(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was taken is whole: it is what it was, then."""
        if self._finished or self._running or not self._is_whole():
            return False
        taken = self._taken[id(tensor)]
        with compat.no_overrides():
            give_back: Any = tensor.set_
            give_back(taken.live)
            tensor.__class__ = taken.kind
            for name in ("donation", "path"):
                vars(tensor).pop(name, None)
        return True

    def describe(self, path: str) -> str:
        """The fate of an argument, and the fix: words to follow "a tensor that"."""
        name = self._call.program
        if self._finished:
            return f"was donated to {name} as argument {path}, and its memory with it; fix: {FIX}"
        if self._running:
            return f"{name} is updating as argument {path}; fix: use that argument in its place"
        return f"was being updated when {name} was interrupted ({self.why}); fix: {RESTORE}"


class _Taken(NamedTuple):
    """A tensor that was taken, what has its memory, and the type that it had."""

    tensor: torch.Tensor
    live: torch.Tensor
    kind: type[torch.Tensor]
