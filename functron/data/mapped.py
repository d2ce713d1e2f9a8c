"""Files mapped into memory, whose reads see that they are still as long as they were."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from functron.errors import Problem, raise_problems


class Mapped:
    """Numbers in a file, read where they are needed.

    The system ends a process that touches a part of a map which its file has lost (SIGBUS), so
    `values` looks at the file's length each time that it is asked for: a microsecond. A file that
    is cut between that and the use of what came of it can still end the process.

    Args:
        path: the file.
        dtype: of the numbers.
        offset: where they begin, in bytes.
        count: how many there are; at least 1.

    Raises:
        OSError: the file is gone, cannot be read, or is shorter.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, offset: int, count: int):
        self._path, self._needed = path, offset + count * np.dtype(dtype).itemsize
        with path.open("rb") as stream:
            self._check(stream.seek(0, 2))
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._map, dtype, count, offset)

    @property
    def values(self) -> np.ndarray:
        """All of the numbers, ``[count]``; not to be written to.

        Raises:
            OSError: the file was cut short since it was opened.
        """
        self._check(self._map.size())
        return self._values

    def _check(self, size: int) -> None:
        if size < self._needed:
            got = f"{size} bytes: it was cut short while it was being read"
            wanted = f"{self._needed} bytes, as when it was opened"
            fix = (
                f"copy it again ({self._needed - size} bytes are missing) and go on with --resume; "
                "write new data beside the old, and rename it"
            )
            problem = Problem(f"data {self._path}", got, wanted, fix)
            raise_problems("the data changed", [problem], OSError)
