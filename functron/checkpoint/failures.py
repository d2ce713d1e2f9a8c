"""What went wrong on disk, in words that say where and what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from functron.errors import Problem, raise_problems

_FULL = ("no space left", "file too large", "quota exceeded", "resource_exhausted")
_DENIED = ("permission denied", "permission_denied", "read-only file system")
_FULL_CODES = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def of_writing(error: Exception, what: str, folder: Path) -> Problem:
    """The problem behind an error of writing `what`, a leaf or a file, into `folder`."""
    text = one_line(error)
    low = text.lower()
    code = error.errno if isinstance(error, OSError) else None
    if code in _FULL_CODES or any(word in low for word in _FULL):
        fix = "free space on that disk, or save fewer checkpoints"
        return Problem(what, text, f"room for it in {folder}", fix)
    if isinstance(error, PermissionError) or any(word in low for word in _DENIED):
        return Problem(what, text, f"permission to write in {folder}", "save somewhere else")
    return Problem(what, text, f"to be written in {folder}", "see that the disk works")


@contextmanager
def reading(what: str, file: Callable[[], str], checkpoint: Path) -> Iterator[None]:
    """Turn an error of reading the leaf `what` in a with block into one that names the file."""
    try:
        yield
    except Exception as error:
        problem = of_reading(error, what, file())
        raise_problems(f"the checkpoint {checkpoint} is damaged", [problem])


def of_reading(error: Exception, what: str, file: str) -> Problem:
    """The problem behind an error of reading the leaf `what`, which lies in `file`."""
    fix = "restore an older checkpoint, or copy this one again"
    return Problem(what, f"{one_line(error)}, in {file}", "the values that were saved", fix)


def one_line(error: BaseException) -> str:
    """An error's message without the line breaks and addresses inside the libraries."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
