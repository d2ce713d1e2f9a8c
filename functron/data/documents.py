"""Files mapped into memory: as rows of numbers, read as if they stood one after another.

Reads see that the files are still as long as they were. And the files of text in a folder.
"""

from __future__ import annotations

import mmap
import os
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

from functron.core.errors import Problem, on_hub, raise_problems, refuse


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
            refuse("the data changed", f"data {self._path}", got, wanted, fix, error=OSError)


MAX_LISTED = 20
SNIFFED_BYTES = 1 << 16
MAX_OPEN_FILES = 128
_CANNOT = "cannot read the training text"


def raise_listed(title: str, problems: Sequence[Problem]) -> None:
    """Raise a ValueError that lists the first `MAX_LISTED` problems, if there are any."""
    count = len(problems)
    more = f": the first {MAX_LISTED} of {count} mistakes" if count > MAX_LISTED else ""
    raise_problems(title + more, problems[:MAX_LISTED])


class Part(NamedTuple):
    """Numbers in a file.

    Attributes:
        path: the file.
        dtype: of the numbers.
        offset: where they begin, in bytes.
        count: how many there are.
    """

    path: Path
    dtype: np.dtype
    offset: int
    count: int


class Concatenated:
    """Files of numbers, read as if concatenated; only what is read is copied into memory.

    Files are memory-mapped when first read, and at most `MAX_OPEN_FILES` stay mapped, so there may
    be more of them than a process may open.

    Args:
        parts: of files, or arrays that lie in none; all of one dtype, at least one.

    Attributes:
        ends: int64 ``[parts]``: where each part ends in the whole.
    """

    def __init__(self, parts: Sequence[Part | np.ndarray]):
        self._parts = list(parts)
        sizes = [len(p) if isinstance(p, np.ndarray) else p.count for p in self._parts]
        self.ends = np.cumsum(np.asarray(sizes, np.int64))
        self._open: OrderedDict[int, Mapped] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """The numbers from `start` on, ``[length]``; a view where they lie in one part."""
        index = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while length > 0:
            begin = start - (int(self.ends[index - 1]) if index else 0)
            piece = self._part(index)[begin : begin + length]
            pieces.append(piece)
            start, length, index = start + len(piece), length - len(piece), index + 1
        if len(pieces) == 1:
            return pieces[0]
        first = self._parts[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, first.dtype)

    def _part(self, index: int) -> np.ndarray:
        part = self._parts[index]
        if isinstance(part, np.ndarray):
            return part
        if index in self._open:
            self._open.move_to_end(index)
        else:
            self._open[index] = Mapped(*part)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[index].values


def byte_parts(files: Iterable[Path | bytes]) -> list[Part | np.ndarray]:
    """The bytes of files, and byte strings, for `Concatenated`."""
    kind = np.dtype(np.uint8)
    return [
        np.frombuffer(x, kind) if isinstance(x, bytes) else Part(x, kind, 0, x.stat().st_size)
        for x in files
    ]


def find(path: str | Path) -> tuple[list[Path], int]:
    """The text files at `path`, and how many files there were left out.

    A file is taken as it is, whatever its bytes. Of a folder, all regular files at any depth, in
    sorted order, except those that are hidden or lie in a hidden folder, are empty, or do not look
    like UTF-8 text in their first 64 KiB.

    Raises:
        ValueError: nothing is there, it cannot be read, or it holds no text.
    """
    root = Path(path)
    try:
        if root.is_dir():
            found = sorted(_walk(root))
            taken = [file for file in found if _is_text(file)]
        elif root.is_file():
            with root.open("rb"):
                found = taken = [root] if root.stat().st_size else []
        else:
            fix = on_hub(path, "dataset") or "check the spelling"
            refuse(_CANNOT, f"data {path}", "nothing there", "a file or a folder", fix)
    except OSError as error:
        where, got = error.filename or path, error.strerror or str(error)
        refuse(_CANNOT, f"data {where}", got, "something readable")
    if not taken:
        what = "an empty file" if root.is_file() else f"a folder with no text ({len(found)} files)"
        refuse(_CANNOT, f"data {path}", what, "at least one file with text")
    return taken, len(found) - len(taken)


def python_text() -> list[Path | bytes]:
    """The English and code that every Python installation carries: some 10 MB, the same each time.

    The language reference's help topics, then the sources of the standard library in sorted order,
    without tests, generated tables and installed packages.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
    files = [
        file
        for file in sorted(_walk(library, skipped))
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata") and _is_text(file)
    ]
    english = "\n\n".join(topics[name] for name in sorted(topics))
    return [english.encode(), *files]


def _walk(root: Path, skipped: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    """Regular files under `root`, except hidden ones and those under folders named in `skipped`."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        paths = (Path(folder, name) for name in files if name[0] != ".")
        found += [path for path in paths if path.is_file()]
    return found


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(SNIFFED_BYTES)
    if not head or b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # a character cut in two at the end of what was read is fine
        return len(head) == SNIFFED_BYTES and error.start >= len(head) - 3
    return True
