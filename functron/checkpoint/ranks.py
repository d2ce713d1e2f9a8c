"""What processes that save together tell each other, through a store of their own.

Never through the process groups of the program that is being trained: a save runs in a thread of
its own, and collectives of two threads could meet in another order on every rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
        """Begin a save: what is told and heard from now on belongs to it."""
        self._save += 1
        # whoever begins this save has heard all that was told before the last one
        for save, key in self._told:
            if save < self._save - 1:
                self._store.delete_key(key)
        self._told = [(save, key) for save, key in self._told if save >= self._save - 1]

    def tell(self, what: str, message: dict[str, Any]) -> None:
        """Leave a message of this save for whoever asks for `what`."""
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
        """Say that this process needs the store no more; rank 0 waits until all have said so."""
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
