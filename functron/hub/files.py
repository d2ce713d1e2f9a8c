"""Safetensors files: read slice by slice, and written tensor by tensor; no code is executed.

A file is the length of its header in eight bytes, the header as JSON (name -> dtype, shape, offsets
of the data), and the data. It is read without a library, so that memory is bounded by one slice and
every error can be named.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch

from functron.core.errors import Problem, local_path, on_hub, raise_problems, refuse

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ENTRANCES = (INDEX, SINGLE)
"""A folder with weights has one of these files."""
MAX_HEADER_BYTES = 100_000_000

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file.

    Attributes:
        file: its path.
        dtype, shape: of the tensor.
        start: its first byte in the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, slices: Sequence[slice]) -> torch.Tensor:
        """A copy of these slices of the tensor, which alone are read."""
        bits = _BITS[self.dtype.itemsize]
        size = math.prod(self.shape) * self.dtype.itemsize
        if not size:
            return torch.empty(self.shape, dtype=self.dtype)[tuple(slices)]
        data = np.memmap(self.file, np.uint8, "r", self.start, (size,))
        part = np.array(data.view(bits).reshape(self.shape)[tuple(slices)], order="C")
        return torch.from_numpy(part).view(self.dtype)


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name, read in slices.

    Attributes:
        entries: shape and dtype of every tensor.
        read: ``(name, slices)`` to these slices of a tensor.
    """

    entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[str, Sequence[slice]], torch.Tensor]

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor."""
        return self.entries


def open_folder(path: str | Path) -> TensorSource:
    """The tensors of ``model.safetensors``, or of all files of its index.

    Only headers are read and checked: their tensors must be adjacent and fill the file.

    Raises:
        ValueError: there are no such files (pickled weights are refused), files are missing, broken
            or unreadable, or the index does not fit them; all offenders are listed.
    """
    folder = local_path(path)
    problems: list[Problem] = []
    index = folder / INDEX
    weight_map = None
    if exists(index):
        table = read_json(index)
        weight_map = _read_index(index, table)
        files = [folder / name for name in sorted(set(weight_map.values()))]
    elif exists(folder / SINGLE):
        files = [folder / SINGLE]
    else:
        files = []
        problems.append(_explain_no_weights(folder))
    stored: dict[str, Stored] = {}
    for file in files:
        found = _open_file(file, problems)
        problems += [
            Problem(file.name, f"{name}, which {stored[name].file.name} has", "every tensor once")
            for name in found
            if name in stored
        ]
        stored |= found
    if weight_map is not None and not problems:
        problems += _check_index(weight_map, stored)
    raise_problems(f"cannot read the weights in {path}", problems)
    entries = {name: (one.shape, one.dtype) for name, one in stored.items()}
    return TensorSource(entries, lambda name, slices: stored[name].read(slices))


def exists(path: Path) -> bool:
    """Whether `path` is a file.

    Raises:
        ValueError: there is no permission to look.
    """
    try:
        return path.is_file()
    except OSError as error:
        _refuse_unreadable(path, error)


def read_json(path: Path) -> Any:
    """The contents of the JSON file `path`.

    Raises:
        ValueError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse_unreadable(path, error)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        fix = "copy or download the file again"
        refuse("cannot read a file", str(path), error, "JSON", fix)


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    found = _describe_os_error(path, error)
    refuse("cannot read a file", found.path, found.got, found.wanted, found.fix)


def _describe_os_error(path: Path, error: OSError) -> Problem:
    fix = on_hub(path.parent if path.suffix else path) or "check the spelling"
    if isinstance(error, PermissionError):
        fix = "let this user read it (chmod, chown)"
    return Problem(str(path), error.strerror or str(error), "a file to read", fix)


def _explain_no_weights(folder: Path) -> Problem:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return _describe_os_error(folder, error)
    wanted = f"{SINGLE}, or {INDEX} and its files"
    pickled = [name for name in names if re.search(r"\.(bin|pt|pth|ckpt)\Z", name)]
    if pickled:
        got = f"{', '.join(pickled[:4])}{', ...' if len(pickled) > 4 else ''}"
        fix = (
            "pickled weights can run code, so they are not read; convert them with "
            "transformers' from_pretrained and save_pretrained (safetensors), in a sandbox"
        )
        return Problem(str(folder), got, wanted, fix)
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        fix = f"the index is missing; rename a single file to {SINGLE}"
        return Problem(str(folder), f"{len(others)} other safetensors files", wanted, fix)
    return Problem(str(folder), "no weights", wanted, "check the path")


def _read_index(index: Path, table: Any) -> dict[str, str]:
    found = table.get("weight_map") if isinstance(table, dict) else None
    names = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        wanted = 'a "weight_map" of tensor names to names of files beside it'
        title, fix = "cannot read the index of the weights", "copy or download it again"
        refuse(title, str(index), "something else", wanted, fix)
    return dict(found or {})


def _check_index(weight_map: Mapping[str, str], stored: Mapping[str, Stored]) -> Iterator[Problem]:
    fix = f"copy or download {INDEX} and the files again"
    for name, file in weight_map.items():
        found = stored[name].file.name if name in stored else "no file"
        if found != file:
            yield Problem(name, f"in {found}", f"in {file}, as the index says", fix)


def _open_file(file: Path, problems: list[Problem]) -> dict[str, Stored]:
    """The tensors of one file; if it is broken none, and a problem is added."""
    again = "copy or download the file again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= min(MAX_HEADER_BYTES, size) else b""
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        stored, end = _read_places(file, tensors, 8 + length)
    except OSError as error:
        problems.append(_describe_os_error(file, error))
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        got = "a broken header" if not isinstance(error, _HeaderError) else str(error)
        problems.append(Problem(file.name, got, "a safetensors file", again))
        return {}
    if end != size:
        what = "is cut off" if size < end else "has something after its tensors"
        got = f"{size} bytes: it {what}"
        problems.append(Problem(file.name, got, f"{end} bytes, as its header says", again))
        return {}
    return stored


class _HeaderError(ValueError):
    pass


def _read_places(
    file: Path, tensors: Mapping[str, Any], data: int
) -> tuple[dict[str, Stored], int]:
    """The tensors of a header, and where they end in the file."""
    spans, stored = [], {}
    for name, entry in tensors.items():
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(isinstance(n, int) and n >= 0 for n in (start, stop, *shape)):
            raise _HeaderError(f"sizes that are no sizes for {name}")
        if entry["dtype"] not in _DTYPES:
            raise _HeaderError(f"dtype {entry['dtype']} for {name}, of {', '.join(_DTYPES)}")
        dtype = _DTYPES[entry["dtype"]]
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise _HeaderError(f"{stop - start} bytes for {name}, {entry['dtype']} {list(shape)}")
        spans.append((start, stop))
        stored[name] = Stored(file, dtype, shape, data + start)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise _HeaderError(f"tensors that overlap or leave a gap at byte {data + end}")
        end = stop
    return stored, data + end


@dataclass(frozen=True)
class Planned:
    """One file to be written.

    Attributes:
        name: of the file.
        tensors: name, dtype and shape of each tensor, in order.
    """

    name: str
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return sum(_count_bytes(dtype, shape) for _, dtype, shape in self.tensors)

    def header(self) -> bytes:
        """The bytes before the data."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in self.tensors:
            start, end = end, end + _count_bytes(dtype, shape)
            entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            table[name] = entry
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        return len(text).to_bytes(8, "little") + text


def _count_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def plan(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], max_bytes: int
) -> list[Planned]:
    """Divide tensors among files, in order, each with at most `max_bytes` of data.

    A larger tensor has its own file. A single file is ``model.safetensors``.
    """
    groups: list[list] = [[]]
    size = 0
    for entry in tensors:
        more = _count_bytes(*entry[1:])
        if groups[-1] and size + more > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += more
    if len(groups) == 1:
        return [Planned(SINGLE, tuple(groups[0]))]
    total = len(groups)
    return [
        Planned(f"model-{number:05d}-of-{total:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def index_of(files: Sequence[Planned]) -> dict[str, Any]:
    """The contents of ``model.safetensors.index.json`` for these files."""
    weight_map = {name: file.name for file in files for name, *_ in file.tensors}
    return {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": weight_map,
    }


@dataclass
class TensorWriter:
    """Writes planned files into a folder, tensor by tensor, in the planned order."""

    folder: Path
    files: Sequence[Planned]
    _stream: IO[bytes] | None = field(default=None, init=False)
    _queue: list = field(default_factory=list, init=False)

    def __post_init__(self):
        self._queue = [
            (file, position) for file in self.files for position in range(len(file.tensors))
        ]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor in the planned dtype."""
        file, position = self._queue.pop(0)
        planned, dtype, shape = file.tensors[position]
        assert (planned, shape) == (name, tuple(tensor.shape)), (planned, shape, name, tensor.shape)
        if position == 0:
            self._stream = stream = (self.folder / file.name).open("wb")
            stream.write(file.header())
        assert self._stream is not None
        data = tensor.detach().to("cpu", dtype).contiguous()
        if dtype == torch.float16 and bool((data.isinf() & tensor.isfinite().cpu()).any()):
            got = f"values up to {float(tensor.abs().max()):.3g}"
            title, fix = "the weights do not fit the dtype", "export it as bfloat16"
            refuse(title, name, got, "at most 65504 for float16", fix)
        self._stream.write(data.flatten().view(torch.uint8).numpy().data)
        if position == len(file.tensors) - 1:
            self.close()

    def close(self) -> None:
        """Close the file being written, after its bytes are on the disk."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with stream:
                stream.flush()
                os.fsync(stream.fileno())

    def abandon(self) -> None:
        """Close the file being written, incomplete."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError):  # flushing the buffer may fail, too
                stream.close()
