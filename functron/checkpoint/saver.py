"""Saving: one checkpoint now, or one after another while training goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functron.checkpoint import database, together
from functron.checkpoint.database import name_of, storable
from functron.checkpoint.folder import Keep, clean, prune
from functron.checkpoint.placement import CHUNK_BYTES, Division, Placement
from functron.checkpoint.together import Ranks, own_store
from functron.checkpoint.writer import Snapshot, live
from functron.core import compat, tree
from functron.core.errors import Problem, raise_problems, refuse

TIMEOUT = 600.0
"""Seconds after which a process that shows no sign of life is given up."""

_LOOK_UP = 0.1  # seconds for which no signal may be noticed while a save is waited for


def save(
    path: str | Path,
    value: tree.Tree,
    metadata: Mapping[str, Any] | None = None,
    *,
    placement: Placement | None = None,
    store: dist.Store | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Write a tree of tensors as the checkpoint `path`, and wait until it is complete.

    It appears under its name only then: a process that dies meanwhile leaves a folder with
    "orbax-checkpoint-tmp" in its name, which readers ignore. Where the placement is that of a bound
    mesh, all ranks call this at the same point and each writes a part; no collectives.

    Args:
        path: a folder that does not exist; its parents are made. All ranks must reach it.
        value: what this process holds; keys without ``/`` or ``.``. Not changed by others
            meanwhile.
        metadata: anything JSON can hold, to be read with `metadata`; rank 0's is taken.
        placement: which part of the whole state `value` is; None: it is the whole.
        store: through which the ranks talk; None: a connection to the process group's.
        timeout: seconds after which a rank that shows no sign of life is given up.

    Raises:
        ValueError: something lies at `path`, or the tree cannot be stored; all offenders listed.
        OSError: it cannot be written: no room, no permission; every rank raises.
        TimeoutError: another rank is dead.
    """
    placement = _whole(value) if placement is None else placement
    ranks = _ranks(placement, store, timeout)
    ranks.begin()
    try:
        division = _divide(placement, CHUNK_BYTES)
        tensors = _tensors(placement, value)
        order = together.Order(Path(path).absolute(), division, _as_json(metadata))
    except BaseException as error:
        together.give_up(ranks, error)
        raise
    together.save_together(order, live(tensors), ranks)
    ranks.leave()


class Saver:
    """Saves one state again and again, in the background, into a folder of checkpoints.

    ``saver.save(step, state)`` copies what this process has to write and returns; a thread writes
    the copy while training goes on. At most one save is under way: the next one waits for it, and
    raises what went wrong with it. The copies are made into the same memory every time.

    On a bound mesh every rank makes one of these, at the same point, and calls the same methods.

    >>> with Saver("run/checkpoints", Placement.of(state), keep=Keep(last=3)) as saver:
    ...     saver.save(100, state, {"loss": 2.5})

    Args:
        folder: where the checkpoints go, ``folder/<step>``; all ranks must reach it. What earlier
            saves left there unfinished is removed.
        placement: of the state that will be saved.
        keep: which checkpoints stay.
        store: through which the ranks talk; None: a connection to the process group's.
        timeout: seconds after which a rank that shows no sign of life is given up; or what gives
            them, asked by the saving thread while it waits: fewer once this process is to end, say.
        chunk_bytes: how large the chunks are that leaves are cut into.
        in_flight: bytes that this process writes at the same time.

    Raises:
        ValueError: the state cannot be stored; all offenders are listed.
    """

    def __init__(
        self,
        folder: str | Path,
        placement: Placement,
        *,
        keep: Keep | None = None,
        store: dist.Store | None = None,
        timeout: float | Callable[[], float] = TIMEOUT,
        chunk_bytes: int = CHUNK_BYTES,
        in_flight: int = database.IN_FLIGHT,
    ):
        self._folder = Path(folder).absolute()
        self._placement = placement
        self._division = _divide(placement, chunk_bytes)
        self._keep = Keep() if keep is None else keep
        self._in_flight = in_flight
        self._snapshot = Snapshot(self._division)
        self._ranks = _ranks(placement, store, timeout)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if placement.here == 0:
            clean(self._folder)

    def save(
        self,
        step: int,
        state: tree.Tree,
        metadata: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Begin to save the state after `step`; returns when it may change again.

        Args:
            step: the checkpoint's name.
            state: what this process holds of it.
            metadata: anything JSON can hold, such as the data position, the config, a metric that
                `Keep` goes by; rank 0's is taken.
            wait: return when the checkpoint is complete instead.

        Raises:
            OSError, TimeoutError: the save before, or with `wait` this one, failed.
            ValueError: the state is another one than was announced, or the step is saved already.
        """
        self.wait()
        self._ranks.begin()
        try:
            self._snapshot.take(_tensors(self._placement, state))
            target = self._folder / str(int(step))
            order = together.Order(target, self._division, _as_json(metadata), self._in_flight)
        except BaseException as error:
            together.give_up(self._ranks, error)
            raise
        # a daemon: a program that fails elsewhere ends, and leaves an unfinished checkpoint
        self._thread = threading.Thread(
            target=self._run, args=(order,), name=f"save {step}", daemon=True
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the save that is under way is complete, and raise what went wrong with it."""
        if self._thread is not None:
            _join(self._thread)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the last save; rank 0, whose process may have the store, for all ranks'.

        Raises what `wait` does.
        """
        self.wait()
        self._ranks.leave()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._thread is not None and self._ranks.size == 1 and isinstance(error, Exception):
            _join(self._thread)  # no other rank can hold it up, and it must not end within a write

    def _run(self, order: together.Order) -> None:
        try:
            together.save_together(order, self._snapshot.source, self._ranks)
            if self._placement.here == 0:
                prune(self._folder, self._keep)
        except BaseException as error:
            self._error = error


def _join(thread: threading.Thread) -> None:
    # Python handles signals in the main thread alone, which one that another thread of the process
    # receives does not wake: without looking up, a rank would not learn that it is to end
    while thread.is_alive():
        thread.join(_LOOK_UP)


def _whole(value: tree.Tree) -> Placement:
    """The placement of a tree that this process has all of; checked so that all faults are named.

    Raises:
        ValueError: it is no container of tensors with values.
    """
    found = []
    if tree.is_leaf(value) or not tree.leaves(value):
        found.append(Problem("(root)", type(value).__name__, "a container with tensors"))
    else:
        found += _unnamable(tree.paths(value))
    for path, leaf in zip(tree.paths(value), tree.leaves(value), strict=True):
        if not isinstance(leaf, torch.Tensor):
            found.append(Problem(path, type(leaf).__name__, "a tensor", "use torch.tensor"))
        elif leaf.is_meta:
            found.append(Problem(path, "a meta tensor", "a tensor with values"))
    raise_problems("cannot save the checkpoint", found)
    return Placement.of(value)


def _divide(placement: Placement, chunk_bytes: int) -> Division:
    """The division of a placement, worked out, all of whose leaves can be stored.

    Raises:
        ValueError: some cannot; all of them are listed.
    """
    found = _unnamable([leaf.path for leaf in placement.leaves])
    found += [
        Problem(leaf.path, name_of(leaf.dtype), "a dtype that NumPy has a name for")
        for leaf in placement.leaves
        if not storable(leaf.dtype)
    ]
    raise_problems("cannot save the checkpoint", found)
    division = Division(placement, chunk_bytes)
    assert len(division.pieces) == len(placement.leaves)
    return division


def _unnamable(paths: Sequence[str]) -> list[Problem]:
    """Paths that cannot be names of arrays, which have dots where paths have slashes."""
    found = [
        Problem(path, "a key with a dot, or empty", "other characters")
        for path in paths
        if "." in path or "" in path.split("/")
    ]
    parts = [path.split("/") for path in paths]
    above = {"/".join(some[:n]) for some in parts for n in range(1, len(some))}
    clash = sorted({path for path in paths if paths.count(path) > 1 or path in above})
    return found + [Problem(path, "two entries", "one", "no / in keys") for path in clash]


def _tensors(placement: Placement, value: tree.Tree) -> list[torch.Tensor | None]:
    """This process's tensor of every leaf, or None."""
    given = placement.check(value, what="cannot save the checkpoint")
    abstract = [path for path, leaf in given.items() if leaf.is_meta]
    found = [Problem(path, "a meta tensor", "a tensor with values") for path in abstract]
    raise_problems("cannot save the checkpoint", found)
    return [given.get(leaf.path) for leaf in placement.leaves]


def _ranks(
    placement: Placement, store: dist.Store | None, timeout: float | Callable[[], float]
) -> Ranks:
    limit = timeout if callable(timeout) else lambda: timeout
    if placement.num_ranks == 1:
        return Ranks(0, 1, None, limit)
    shared = own_store(compat.default_store() if store is None else store, limit())
    return Ranks(placement.here, placement.num_ranks, shared, limit)


def _as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError) as error:
        title, fix = "cannot save the checkpoint", "convert it to text"
        refuse(title, "metadata", error, "what JSON can hold", fix)
