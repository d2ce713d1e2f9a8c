"""One save by all processes: the first leads it with Orbax, the others write and report.

Processes talk through a store of their own, never through the process groups of the program that
is being trained: a save runs in a thread of its own, and collectives of two threads could meet in
another order on every rank.

Orbax's part, on the first process, is folders, tree metadata, merging and renaming. It runs as if
that process were alone; what it takes for arrays are descriptions of leaves, whose values all
processes write themselves. Every stock Orbax reader opens the result. Only here, and only inside
functions, are Orbax and JAX imported: that takes longer than importing torch.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from functron.checkpoint import database, manifest, writer
from functron.checkpoint.database import chunk_key
from functron.checkpoint.placement import Division, Leaf, grid
from functron.core.errors import raise_problems, refuse

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds between looks at the store
_BEAT = 1.0  # seconds between signs of life


class Ranks:
    """The processes that save together, as one of them.

    Every process must make as many of these, in the same order, and begin as many saves with each.

    Args:
        rank: which process this is.
        size: how many there are.
        store: that all of them reach, and no other thread uses; None for one process.
        timeout: gives the seconds after which a process without a sign of life is given up; asked
            anew as long as one is waited for.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store | None,
        timeout: Callable[[], float],
    ):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store: Any = store
        self._save = 0
        self._told: list[tuple[int, str]] = []
        self._beaten = 0.0
        if size > 1:
            assert store is not None
            # the store outlives us: each rank counts there how many of these it has made
            number = store.add(f"functron/checkpoint/count/{rank}", 1)
            self._prefix = f"functron/checkpoint/{number}"

    def begin(self) -> None:
        """Begin a save: messages from now on belong to it."""
        self._save += 1
        # a rank that begins this save has read all messages from before the last one
        for save, key in self._told:
            if save < self._save - 1:
                self._store.delete_key(key)
        self._told = [(save, key) for save, key in self._told if save >= self._save - 1]

    def tell(self, what: str, message: dict[str, Any]) -> None:
        """Leave a message of this save under the name `what`."""
        if self.size > 1:
            key = self._key(what, self._save)
            self._store.set(key, json.dumps(message))
            self._told.append((self._save, key))

    def hear(self, what: str, sender: int) -> dict[str, Any]:
        """The message of this save under `what`, from rank `sender`, as soon as it is there.

        Raises:
            TimeoutError: the sender has shown no sign of life for too long.
            OSError: the store is gone, and with it the process that had it.
        """
        key = self._key(what, self._save)
        try:
            return json.loads(self._wait(key, sender))
        except TimeoutError:
            raise
        except Exception as error:
            raise OSError(
                f"cannot save the checkpoint: rank {self.rank} lost the store that the ranks share "
                f"({error}); fix: see why the process that has it (rank 0, or torchrun) ended"
            ) from error

    def leave(self) -> None:
        """Report that this process needs the store no more; rank 0 waits for all reports."""
        self.begin()
        if self.rank:
            self.tell(f"left/{self.rank}", {})
        for rank in range(1, self.size) if self.rank == 0 else ():
            self.hear(f"left/{rank}", rank)

    def beat(self) -> None:
        """Show a sign of life, at most once a second."""
        now = time.monotonic()
        if self.size > 1 and now - self._beaten > _BEAT:
            self._beaten = now
            self._store.add(f"{self._prefix}/beat/{self.rank}", 1)

    def _wait(self, key: str, sender: int) -> bytes:
        pause, seen = _FIRST_PAUSE, None
        heard = time.monotonic()
        while not self._store.check([key]):
            self.beat()
            beats = self._store.add(f"{self._prefix}/beat/{sender}", 0)
            if beats != seen:
                seen, heard = beats, time.monotonic()
            if time.monotonic() - heard > (limit := self.timeout()):
                raise TimeoutError(
                    f"cannot save the checkpoint: got no sign of life from rank {sender} for "
                    f"{limit:g} s; wanted its part of the save; fix: see why it died or "
                    "hangs, or give a longer timeout"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return self._store.get(key)

    def _key(self, what: str, save: int) -> str:
        return f"{self._prefix}/{save}/{what}" if self.size > 1 else what


def own_store(store: dist.Store, timeout: float) -> dist.Store:
    """Another connection to `store`, for another thread."""
    there: Any = store  # torch's declarations lack the method
    mine = there.clone()
    mine.set_timeout(timedelta(seconds=timeout))
    return mine


def commit(
    target: Path,
    leaves: Sequence[Leaf],
    metadata: Mapping[str, Any],
    write: Callable[[Path], None],
    finish: Callable[[Path], None],
) -> None:
    """Make the checkpoint `target` of these leaves, which appears under its name when complete.

    Args:
        target: an absolute path where nothing is; its parents exist.
        leaves: in tree order.
        metadata: for Orbax's own readers.
        write: has all processes write their databases into the unfinished folder that it is given.
        finish: called with that folder when all but the renaming is done.
    """
    ocp = _import_orbax()
    import jax

    nested: dict[str, Any] = {}
    for leaf in leaves:
        *above, name = leaf.path.split("/")
        node = nested
        for key in above:
            node = node.setdefault(key, {})
        node[name] = leaf
    here = jax.process_index()  # not 0 where the program uses jax.distributed for its own purposes
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"functron{here}"
    )
    settings = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "multiprocessing_options": alone,
        "type_handler_registry": ocp.type_handlers.create_type_handler_registry(
            (Leaf, _type_handler(ocp, write))
        ),
    }
    handler = ocp.PyTreeCheckpointHandler(handler_impl=_tree_handler(ocp, finish, settings))
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        arguments = ocp.args.PyTreeSave(nested, custom_metadata={"functron": 1})
        checkpointer.save(target, args=arguments, custom_metadata=dict(metadata))


def _type_handler(ocp: Any, write: Callable[[Path], None]) -> Any:
    """The handler that Orbax saves all leaves with: the processes write, and it waits for them."""

    class LeafHandler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "np.ndarray"  # so that every reader knows what to do

        async def serialize(self, values, infos, args=None):
            write(Path(infos[0].parent_dir))
            return []

        async def metadata(self, infos):
            raise AssertionError("leaves are only saved through this handler")

        async def deserialize(self, infos, args=None):
            raise AssertionError("leaves are only saved through this handler")

    return LeafHandler()


def _tree_handler(ocp: Any, finish: Callable[[Path], None], settings: dict[str, Any]) -> Any:
    """Orbax's handler of trees, with a last word before the checkpoint gets its name."""

    class TreeHandler(ocp.BasePyTreeCheckpointHandler):
        def finalize(self, directory):
            super().finalize(directory)
            finish(Path(directory))

    return TreeHandler(enable_pinned_host_transfer=False, **settings)


def _import_orbax() -> Any:
    if "jax" not in sys.modules:
        import jax

        # no GPU memory and no search for accelerators: arrays never become JAX arrays here
        jax.config.update("jax_platforms", "cpu")
    # what goes wrong is raised, once; Orbax's threads would log their tracebacks before
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    import orbax.checkpoint as ocp

    return ocp


@dataclass(frozen=True)
class Order:
    """One save: of what, where and by whom.

    Attributes:
        target: the checkpoint's folder.
        division: who writes what.
        metadata: the user's, as JSON holds it.
        in_flight: bytes that each process writes at the same time.
    """

    target: Path
    division: Division
    metadata: Mapping[str, Any]
    in_flight: int = database.IN_FLIGHT


def save_together(order: Order, source: writer.Source, ranks: Ranks) -> None:
    """Write a checkpoint, on all processes at once; returns when it is complete and has its name.

    Raises:
        OSError: some process could not write; all of them raise.
        TimeoutError: some process is dead, or hangs.
        ValueError: something lies at the target.
    """
    if ranks.rank == 0:
        _lead(order, source, ranks)
    else:
        _follow(order, source, ranks)


def give_up(ranks: Ranks, error: BaseException) -> None:
    """Tell the others, who are about to save, that this process cannot."""
    if ranks.rank == 0:
        ranks.tell("begin", _failure(error))
    ranks.tell(f"done/{ranks.rank}" if ranks.rank else "end", _failure(error))


def _lead(order: Order, source: writer.Source, ranks: Ranks) -> None:
    unfinished: list[Path] = []
    checksums: dict[str, int] = {}
    try:
        _check_target(order.target)

        def write(folder: Path) -> None:
            unfinished.append(folder)
            ranks.tell("begin", {"folder": str(folder)})
            checksums.update(_write(order, folder, source, ranks))
            for rank in range(1, ranks.size):
                answer = ranks.hear(f"done/{rank}", rank)
                _check_answer(answer, rank, order)
                checksums.update(answer["crc32c"])
            writer.check_complete(folder, order.division)

        def finish(folder: Path) -> None:
            leaves = [
                (leaf, chunk, [checksums[chunk_key(leaf.path, c)] for c in grid(leaf.shape, chunk)])
                for leaf, chunk in zip(
                    order.division.placement.leaves, order.division.chunks, strict=True
                )
            ]
            manifest.make(folder, leaves, order.metadata, _origin(order), ranks.beat)

        leaves = order.division.placement.leaves
        commit(order.target, leaves, order.metadata, write, finish)
        for name in manifest.LATER:
            if (order.target / name).exists():
                manifest.sync(order.target / name)
        manifest.sync(order.target.parent)
    except BaseException as error:
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        give_up(ranks, error)
        _raise_plainly(error, order)
    ranks.tell("end", {})


def _follow(order: Order, source: writer.Source, ranks: Ranks) -> None:
    begin = ranks.hear("begin", 0)
    _raise_failure(begin, 0, order)
    try:
        checksums = _write(order, Path(begin["folder"]), source, ranks)
    except BaseException as error:
        give_up(ranks, error)
        _raise_plainly(error, order)
    ranks.tell(f"done/{ranks.rank}", {"digest": order.division.digest, "crc32c": checksums})
    _raise_failure(ranks.hear("end", 0), 0, order)


def _write(order: Order, folder: Path, source: writer.Source, ranks: Ranks) -> dict[str, int]:
    division, beat = order.division, ranks.beat
    return writer.write(folder, division, source, in_flight=order.in_flight, progress=beat)


def _check_target(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = database.of_writing(error, str(target.parent), target.parent)
        raise_problems("cannot save the checkpoint", [problem], OSError)
    if target.exists():
        title, got = "cannot save the checkpoint", "an existing path"
        refuse(title, str(target), got, "a new one", "choose another")


def _origin(order: Order) -> dict[str, Any]:
    placement = order.division.placement
    return {
        "mesh": str(placement.mesh),
        "processes": placement.num_ranks,
        "time": time.time(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _check_answer(answer: Mapping[str, Any], rank: int, order: Order) -> None:
    _raise_failure(answer, rank, order)
    if answer["digest"] != order.division.digest:
        title, got = f"cannot save the checkpoint {order.target}", "another state, mesh or specs"
        fix = "build the placement from the same configuration everywhere"
        refuse(title, f"rank {rank}", f"{got} than rank 0", "the same on all ranks", fix)


def _failure(error: BaseException) -> dict[str, Any]:
    text = str(error) or type(error).__name__
    return {"error": text, "input": isinstance(error, ValueError)}


def _raise_failure(message: Mapping[str, Any], rank: int, order: Order) -> None:
    """Raise what went wrong on another rank, if something did."""
    if "error" in message:
        kind = ValueError if message["input"] else OSError
        raise kind(f"rank {rank} could not save the checkpoint {order.target}:\n{message['error']}")


def _raise_plainly(error: BaseException, order: Order) -> None:
    """Raise `error`, or an OSError in our words where the system's alone would be seen."""
    if isinstance(error, OSError) and error.errno is not None:
        what = str(error.filename or order.target)
        problem = database.of_writing(error, what, order.target.parent)
        raise OSError(
            error.errno, f"cannot save the checkpoint {order.target}\n  - {problem}"
        ) from error
    raise error
