"""Saving: one checkpoint now, or one after another while training goes on.

Each process copies its pieces and writes them into a database of its own. The first leads the save
with Orbax, the others report to it. Processes talk through a store of their own, never through the
process groups of the program that is being trained: a save runs in a thread of its own, and
collectives of two threads could meet in another order on every rank.

Orbax's part, on the first process, is folders, tree metadata, merging and renaming. It runs as if
that process were alone; in place of arrays it gets descriptions of leaves, whose values all
processes write themselves. Every stock Orbax reader opens the result. Orbax and JAX are imported
only here, and only inside functions: that takes longer than importing torch.
"""

from __future__ import annotations

import functools
import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from functron.checkpoint import database
from functron.checkpoint.database import as_array, chunk_key, from_name, name_of
from functron.checkpoint.folder import (
    LATER,
    Keep,
    WriteBehind,
    clean,
    make_manifest,
    prune,
    sync,
    sync_all,
)
from functron.checkpoint.memory import BackgroundThread, Snapshot, slice_values
from functron.checkpoint.placement import CHUNK_BYTES, Division, Leaf, Piece, Placement, grid
from functron.core import compat, tree
from functron.core.closure import refuse_orphans
from functron.core.errors import Problem, local_path, raise_problems, refuse, tensor_problem
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.spmd.shared_memory import CUDA

Moments = Callable[[str, int], None]
"""``at(moment, step)`` is called as a process comes to a moment of a run; for tests of faults."""


def nowhere(moment: str, step: int) -> None:
    """Do nothing at any moment."""


_REMOVED = Need(
    lambda saving: saving.keep_last > 0, "checkpoints of which some are removed", "set keep_last"
)


@shows_differences
@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, and which of its checkpoints stay.

    Attributes:
        save_every: save every N steps, and at the end; 0: only at the end.
        keep_last: how many of the newest checkpoints stay; 0: all.
        keep_every: checkpoints of multiples of this step stay in any case; 0: none do.
    """

    save_every: int = setting(0, "common", least=0)
    keep_last: int = setting(0, least=0)
    keep_every: int = setting(0, least=0, need=_REMOVED)


Source = Callable[[int, Piece], np.ndarray]
"""``source(leaf index, piece)``: the values of a piece on the host, which stay as they are."""


def write_pieces(
    folder: Path,
    division: Division,
    source: Source,
    *,
    in_flight: int = database.IN_FLIGHT,
    progress: Callable[[], None] | None = None,
) -> dict[str, int]:
    """Write this process's pieces into its database in `folder`; process 0 describes the arrays.

    Args:
        folder: of the checkpoint that is being made.
        division: who writes what.
        source: where the values are.
        in_flight: bytes that are written at the same time.
        progress: called after each piece.

    Returns:
        The CRC-32C that was written with each piece, by `database.chunk_key`.

    Raises:
        OSError: something could not be written; its leaf is named.
    """
    import tensorstore as ts

    placement = division.placement
    mine = folder / f"{database.PROCESS}{placement.here}"
    first = placement.here == 0
    mode: dict[str, Any] = {"create": True} if first else {"assume_metadata": True}
    shared = database.context()
    opening = {
        index: ts.open(database.writing(mine, leaf, chunk), open=True, context=shared, **mode)
        for index, (leaf, chunk) in enumerate(zip(placement.leaves, division.chunks, strict=True))
        if first or division.pieces[index]
    }
    with WriteBehind(mine) as behind:

        def written() -> None:
            behind.go_on()
            if progress is not None:
                progress()

        window = database.Window(in_flight, written)
        try:
            for index, future in opening.items():
                leaf = placement.leaves[index]
                array = _name_errors(leaf, folder, future.result)()
                for piece in division.pieces[index]:
                    begin = functools.partial(
                        array[piece.region()].write,
                        source(index, piece),
                        can_reference_source_data_indefinitely=True,
                    )
                    size = database.nbytes_of(piece.size, leaf.dtype.itemsize)
                    window.add(size, lambda b=begin, at=leaf: _name_errors(at, folder, b().result))
            window.drain()
        finally:
            window.abandon()
    if not mine.exists():  # all of this process's values are other ones' to write
        return {}
    checksums = _read_checksums(mine, division, shared)
    sync_all(mine, progress)
    return checksums


def _read_checksums(mine: Path, division: Division, shared: Any) -> dict[str, int]:
    """The checksums that this process's pieces ended with: a few bytes of each are read."""
    begin = database.open_checksums(mine, shared)
    rows = zip(division.placement.leaves, division.pieces, strict=True)
    keys = [chunk_key(leaf.path, piece.cell) for leaf, pieces in rows for piece in pieces]
    waiting = {key: begin(key) for key in keys}
    return {key: wait() for key, wait in waiting.items()}


def _name_errors(leaf: Leaf, folder: Path, wait: Callable[[], Any]) -> Callable[[], Any]:
    """`wait`, whose errors say which leaf it was."""

    def waiting() -> Any:
        try:
            return wait()
        except Exception as error:
            problem = database.explain_writing(error, leaf.path, folder)
            raise_problems(f"cannot write the checkpoint {folder}", [problem], OSError)

    return waiting


def check_complete(folder: Path, division: Division) -> None:
    """Raise OSError unless every chunk of every leaf is in exactly one process's database in
    `folder`.
    """
    import tensorstore as ts

    shared = database.context()
    written: dict[str, int] = {}
    for rank in range(division.placement.num_ranks):
        mine = folder / f"{database.PROCESS}{rank}"
        if (mine / "manifest.ocdbt").exists():
            opened = ts.KvStore.open(database.store(mine), context=shared).result()
            for key in opened.list().result():
                written[key.decode()] = written.get(key.decode(), 0) + 1
    found = []
    for leaf, chunk in zip(division.placement.leaves, division.chunks, strict=True):
        name = database.key_of(leaf.path)
        wanted = [f"{name}/zarr.json"]
        wanted += [database.chunk_key(leaf.path, cell) for cell in grid(leaf.shape, chunk)]
        counts = [written.pop(key, 0) for key in wanted]
        if missing := counts.count(0):
            fix = f"see that all processes reach the same {folder.parent}"
            got = f"{missing} of {len(wanted)} chunks missing"
            found.append(Problem(leaf.path, got, "all of them", fix))
        if max(counts) > 1:
            found.append(Problem(leaf.path, "a chunk written twice", "each by one process"))
    found += [Problem(key, "a chunk that no leaf has", "none") for key in written]
    raise_problems(f"the checkpoint {folder} is not complete", found, OSError)


_BEAT = 1.0  # seconds between signs of life
_POLL_SECONDS = 0.004  # between the first looks for a message; later ones are up to _BEAT / 4 apart


class Ranks:
    """The processes that save together, as one of them.

    Every process must make as many of these, in the same order, and begin as many saves with each.

    Args:
        rank, size: which of how many processes this is.
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
        begun = heard = time.monotonic()
        seen = None
        # not the wait of a store, which logs two lines of a warning whenever its time is over
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
            # at most a quarter of what was waited for comes on top, and no more than _BEAT / 4
            waited = time.monotonic() - begun
            time.sleep(min(max(waited, 4 * _POLL_SECONDS), _BEAT) / 4)
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
        tree.put_leaf(nested, leaf.path, leaf)
    here = jax.process_index()  # not 0 where the program uses jax.distributed for its own purposes
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"functron{here}"
    )
    settings = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "multiprocessing_options": alone,
        "type_handler_registry": ocp.type_handlers.create_type_handler_registry(
            (Leaf, _make_type_handler(ocp, write))
        ),
    }
    handler = ocp.PyTreeCheckpointHandler(handler_impl=_make_tree_handler(ocp, finish, settings))
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        arguments = ocp.args.PyTreeSave(nested, custom_metadata={"functron": 1})
        checkpointer.save(target, args=arguments, custom_metadata=dict(metadata))


def _make_type_handler(ocp: Any, write: Callable[[Path], None]) -> Any:
    """The handler that Orbax saves all leaves with: the processes write, and it waits for them."""

    class LeafHandler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "np.ndarray"  # so that every reader knows what to do

        async def serialize(self, values, infos, args=None):
            write(Path(infos[0].parent_dir))
            return []

        async def deserialize(self, infos, args=None):
            raise AssertionError("leaves are only saved through this handler")

        metadata = deserialize

    return LeafHandler()


def _make_tree_handler(ocp: Any, finish: Callable[[Path], None], settings: dict[str, Any]) -> Any:
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
class SaveRequest:
    """One save: of what, where and by whom.

    Attributes:
        target: the checkpoint's folder.
        division: who writes what.
        metadata: the user's, as JSON holds it.
        in_flight: bytes that each process writes at the same time.
        at: called with "write" before this process's pieces are written and "written" after it; by
            the first with "commit" when all but the renaming is done, and "committed" after it.
    """

    target: Path
    division: Division
    metadata: Mapping[str, Any]
    in_flight: int = database.IN_FLIGHT
    at: Callable[[str], None] = lambda moment: None


def save_together(request: SaveRequest, source: Source, ranks: Ranks) -> None:
    """Write a checkpoint, on all processes at once; returns when it is complete and has its name.

    Raises:
        OSError: some process could not write; all of them raise.
        TimeoutError: some process is dead, or hangs.
        ValueError: something lies at the target.
    """
    compat.keep_freed_memory()  # before Orbax is imported, whose threads have heaps of their own
    if ranks.rank == 0:
        _lead_save(request, source, ranks)
    else:
        _follow_save(request, source, ranks)


@contextmanager
def _telling_failure(ranks: Ranks) -> Iterator[None]:
    """Begin a save, whose other ranks are told if this one cannot prepare it in a with block."""
    ranks.begin()
    try:
        yield
    except BaseException as error:
        _tell_failure(ranks, error)
        raise


def _tell_failure(ranks: Ranks, error: BaseException) -> None:
    """Tell the others, who are about to save, that this process cannot."""
    message = {"error": str(error) or type(error).__name__, "input": isinstance(error, ValueError)}
    if ranks.rank == 0:
        ranks.tell("begin", message)
    ranks.tell(f"done/{ranks.rank}" if ranks.rank else "end", message)


def _lead_save(request: SaveRequest, source: Source, ranks: Ranks) -> None:
    unfinished: list[Path] = []
    checksums: dict[str, int] = {}
    try:
        _check_target(request.target)

        def write(folder: Path) -> None:
            unfinished.append(folder)
            ranks.tell("begin", {"folder": str(folder)})
            checksums.update(_write_request(request, folder, source, ranks))
            for rank in range(1, ranks.size):
                answer = ranks.hear(f"done/{rank}", rank)
                _raise_failure(answer, rank, request)
                if answer["digest"] != request.division.digest:
                    title = f"cannot save the checkpoint {request.target}"
                    got = "another state, mesh or specs than rank 0"
                    fix = "build the placement from the same configuration everywhere"
                    refuse(title, f"rank {rank}", got, "the same on all ranks", fix)
                checksums.update(answer["crc32c"])
            check_complete(folder, request.division)

        def finish(folder: Path) -> None:
            leaves = [
                (leaf, chunk, [checksums[chunk_key(leaf.path, c)] for c in grid(leaf.shape, chunk)])
                for leaf, chunk in zip(
                    request.division.placement.leaves, request.division.chunks, strict=True
                )
            ]
            make_manifest(folder, leaves, request.metadata, _describe_origin(request), ranks.beat)
            request.at("commit")

        leaves = request.division.placement.leaves
        commit(request.target, leaves, request.metadata, write, finish)
        request.at("committed")
        for name in LATER:
            if (request.target / name).exists():
                sync(request.target / name)
        sync(request.target.parent)
    except BaseException as error:
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        _tell_failure(ranks, error)
        _raise_in_words(error, request)
    ranks.tell("end", {})


def _follow_save(request: SaveRequest, source: Source, ranks: Ranks) -> None:
    begin = ranks.hear("begin", 0)
    _raise_failure(begin, 0, request)
    try:
        checksums = _write_request(request, Path(begin["folder"]), source, ranks)
    except BaseException as error:
        _tell_failure(ranks, error)
        _raise_in_words(error, request)
    ranks.tell(f"done/{ranks.rank}", {"digest": request.division.digest, "crc32c": checksums})
    _raise_failure(ranks.hear("end", 0), 0, request)


def _write_request(
    request: SaveRequest, folder: Path, source: Source, ranks: Ranks
) -> dict[str, int]:
    division, beat = request.division, ranks.beat
    request.at("write")
    found = write_pieces(folder, division, source, in_flight=request.in_flight, progress=beat)
    request.at("written")
    return found


def _check_target(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = database.explain_writing(error, str(target.parent), target.parent)
        raise_problems("cannot save the checkpoint", [problem], OSError)
    if target.exists():
        title, got = "cannot save the checkpoint", "an existing path"
        refuse(title, str(target), got, "a new one", "choose another")


def _describe_origin(request: SaveRequest) -> dict[str, Any]:
    placement = request.division.placement
    return {
        "mesh": str(placement.mesh),
        "processes": placement.num_ranks,
        "time": time.time(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _raise_failure(message: Mapping[str, Any], rank: int, request: SaveRequest) -> None:
    """Raise what went wrong on another rank, if something did."""
    if "error" in message:
        kind = ValueError if message["input"] else OSError
        raise kind(
            f"rank {rank} could not save the checkpoint {request.target}:\n{message['error']}"
        )


def _raise_in_words(error: BaseException, request: SaveRequest) -> None:
    """Raise `error`, or an OSError in our words where the system's alone would be seen."""
    if isinstance(error, OSError) and error.errno is not None:
        what = str(error.filename or request.target)
        problem = database.explain_writing(error, what, request.target.parent)
        raise OSError(
            error.errno, f"cannot save the checkpoint {request.target}\n  - {problem}"
        ) from error
    raise error


TIMEOUT = 600.0
"""Seconds after which a process that shows no sign of life is given up."""


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
    From the first save on the C library keeps the memory that this process frees, up to 2 GiB.

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
    placement = _place_whole(value) if placement is None else placement
    ranks = _connect_ranks(placement, store, timeout)
    with _telling_failure(ranks):
        division = _divide_storable(placement, CHUNK_BYTES)
        tensors = _list_tensors(placement, value)
        request = SaveRequest(local_path(path).absolute(), division, _as_json(metadata))

    def read(index: int, piece: Piece) -> np.ndarray:
        return as_array(slice_values(tensors, index, piece).cpu().reshape(piece.size))

    save_together(request, read, ranks)
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
        device: of the state; on a GPU host memory for the copies is locked from now on, in the
            background, and not by the first save, which would wait for it.
        at: called by the saving thread at the moments of `SaveRequest.at`.

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
        device: torch.device | str | None = None,
        at: Moments = nowhere,
    ):
        self._at = at
        self._folder = local_path(folder, "folder").absolute()
        self._placement = placement
        self._division = _divide_storable(placement, chunk_bytes)
        self._keep = Keep() if keep is None else keep
        self._in_flight = in_flight
        self._snapshot = Snapshot(self._division, CUDA)
        if device is not None and torch.device(device).type == "cuda":
            self._snapshot.reserve(locked=True)
        self._ranks = _connect_ranks(placement, store, timeout)
        self._thread = BackgroundThread()
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
        with _telling_failure(self._ranks):
            self._snapshot.take(_list_tensors(self._placement, state))
            target = self._folder / str(int(step))
            written = _as_json(metadata)
            request = SaveRequest(
                target, self._division, written, self._in_flight, lambda at: self._at(at, int(step))
            )
        self._thread.start(functools.partial(self._write, request), f"save {step}")
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the save that is under way is complete, and raise what went wrong with it."""
        self._thread.wait()

    def close(self) -> None:
        """Wait for the last save; rank 0, whose process may have the store, for all ranks'.

        Errors are those of `wait`.
        """
        self.wait()
        self._ranks.leave()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._ranks.size == 1 and isinstance(error, Exception):
            self._thread.join()  # no other rank can hold it up; it must not end within a write

    def _write(self, request: SaveRequest) -> None:
        save_together(request, self._snapshot.source, self._ranks)
        if self._placement.here == 0:
            prune(self._folder, self._keep)


def _place_whole(value: tree.Tree) -> Placement:
    """The placement of a tree that this process holds whole; ValueError lists all mistakes."""
    found = []
    refuse_orphans("checkpoint.save", tree.leaves(value))
    if tree.is_leaf(value) or not tree.leaves(value):
        found.append(Problem("(root)", type(value).__name__, "a container with tensors"))
    else:
        found += _find_bad_names(tree.paths(value))
    for path, leaf in tree.items(value):
        if not isinstance(leaf, torch.Tensor):
            found.append(tensor_problem(path, leaf))
        elif leaf.is_meta:
            found.append(Problem(path, "a meta tensor", "a tensor with values"))
    raise_problems("cannot save the checkpoint", found)
    return Placement.of(value)


def _divide_storable(placement: Placement, chunk_bytes: int) -> Division:
    """The division of a placement; ValueError lists all leaves that cannot be stored."""
    found = _find_bad_names([leaf.path for leaf in placement.leaves])
    found += [
        Problem(leaf.path, name_of(leaf.dtype), "a dtype that NumPy has a name for")
        for leaf in placement.leaves
        if from_name(name_of(leaf.dtype)) is None
    ]
    raise_problems("cannot save the checkpoint", found)
    division = Division(placement, chunk_bytes)
    assert len(division.pieces) == len(placement.leaves)
    return division


def _find_bad_names(paths: Sequence[str]) -> list[Problem]:
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


def _list_tensors(placement: Placement, value: tree.Tree) -> list[torch.Tensor | None]:
    """This process's tensor of every leaf, or None."""
    given = placement.check(value, what="cannot save the checkpoint")
    abstract = [path for path, leaf in given.items() if leaf.is_meta]
    found = [Problem(path, "a meta tensor", "a tensor with values") for path in abstract]
    raise_problems("cannot save the checkpoint", found)
    apart = placement.separate(given)
    return [apart.get(leaf.path) for leaf in placement.leaves]


def _connect_ranks(
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
