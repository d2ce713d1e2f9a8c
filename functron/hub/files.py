"""Safetensors files: read slice by slice, and written tensor by tensor; no code is executed.

A file is the length of its header in eight bytes, the header as JSON (name -> dtype, shape, offsets
of the data), and the data. It is read without a library, so that memory is bounded by one slice and
every error can be named.

Quantised weights are dequantised when read (`decode`), and written (`encode`):

| quant_method       | files have, of each weight X of a linear layer               | who          |
|--------------------|--------------------------------------------------------------|--------------|
| fp8                | X in E4M3, X_scale_inv of blocks or one of all               | DeepSeek-V3  |
| compressed-tensors | X in E4M3, X_scale of blocks or rows or one of all           | vLLM         |
| mxfp4              | X_blocks, pairs of E2M1, X_scales in E8M0, of 32 numbers each | GPT-OSS     |

Weights are values times scales, in float32. Blocks of "fp8" may be incomplete at the edges. MXFP4's
weights ``[..., outputs, groups, 16]``, the first of a pair in the low bits, represent
``[..., inputs, outputs]``. Only the values and scales of a slice are read. Quantisation of
activations and caches is ignored.

`METHODS` are written: "fp8-block" as "fp8" with blocks of 128x128, "fp8-row" as
"compressed-tensors" with rows, which are a linear layer's outputs. Only projections of attention,
feed-forward layers and experts are quantised. "fp8-block" skips matrices that blocks do not divide,
and matrices that are joined with these, since transformers assumes complete blocks.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

import numpy as np
import torch

from functron.core.errors import Problem, local_path, nearest, on_hub, raise_problems, refuse
from functron.hub.format import HubLayout, tensors
from functron.ops.quantise import E2M1, E4M3, E8M0, QuantisedFormat, magnitude, quantise, unpacked

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
        found = open_file(file, problems)
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


_POINTER = b"version https://git-lfs"
_LFS = ("a pointer of git-lfs, in place of the file", "fetch it: git lfs pull, in that folder")


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
        got, fix = error, "copy or download the file again"
        if path.read_bytes().startswith(_POINTER):
            got, fix = _LFS
        refuse("cannot read a file", str(path), got, "JSON", fix)


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


def open_file(file: Path, problems: list[Problem]) -> dict[str, Stored]:
    """The tensors of one file; if it is broken none, and a problem is added."""
    again = "copy or download the file again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                problems.append(Problem(file.name, _LFS[0], "a safetensors file", _LFS[1]))
                return {}
            stream.seek(0)
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


def write_files(
    folder: Path, files: Sequence[Planned], named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write planned files of tensors, which come in the planned order; the disk holds them then.

    Raises:
        ValueError: a tensor has values that float16 cannot hold.
        OSError: a file cannot be written.
    """
    left = iter(named)
    for file in files:
        with (folder / file.name).open("wb") as stream:
            stream.write(file.header())
            for planned, dtype, shape in file.tensors:
                name, tensor = next(left)
                got = name, tuple(tensor.shape)
                assert (planned, shape) == got, (planned, shape, got)
                write_tensor(stream, name, tensor, dtype)
            stream.flush()
            os.fsync(stream.fileno())


def write_tensor(stream: IO[bytes], name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Write the elements of a tensor in `dtype`; ValueError where these are not what they were."""
    data = tensor.detach().to("cpu", dtype).contiguous()
    if dtype == torch.float16 and bool((data.isinf() & tensor.isfinite().cpu()).any()):
        got = f"values up to {float(tensor.abs().max()):.3g}"
        title, fix = "the weights do not fit the dtype", "export it as bfloat16"
        refuse(title, name, got, "at most 65504 for float16", fix)
    stream.write(data.flatten().view(torch.uint8).numpy().data)


# --- reading quantised weights

ENTRY = "quantization_config"
"""The entry of config.json that describes quantised weights."""

_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "fp8": (
        "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "scale_fmt", "expert_dtype", "modules_to_convert", "dequantize",
    ),
    "compressed-tensors": (
        "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio",
        "kv_cache_scheme", "sparsity_config", "transform_config", "version", "dequantize",
        "run_compressed",
    ),
    "mxfp4": ("modules_to_not_convert", "dequantize"),
})  # fmt: skip
"""The known methods, and their entries."""

_MAKE = (
    "use the model's files in bfloat16, or make them: "
    "transformers' from_pretrained with {}, then save_pretrained"
)
_OTHERWISE = _MAKE.format("the method's dequantize=True")
_DEQUANTISED: Mapping[str, str] = MappingProxyType(
    {
        "bitsandbytes": "model.dequantize()",
        "metal": "dequantize=True",
        "gguf": "dequantize=True",
    }
)
"""How transformers makes 16-bit weights of methods that are not read here; it cannot of others."""


def _find_other_files(method: str) -> str:
    """The fix for a method that is not read: what exists for it."""
    if not method or method in _KNOWN:
        return _OTHERWISE
    if how := _DEQUANTISED.get(method):
        return _MAKE.format(how)
    return (
        f"use the model in bfloat16 that this was made of (base_model of its card): transformers "
        f"cannot make one of {method}"
    )


_UNUSED = re.compile(r".*\.(input_scale|activation_scale|output_scale|[qkv]_scale)")
"""Scales of other tensors than weights."""


@dataclass(frozen=True)
class QuantisedScheme:
    """The quantisation of a folder's weights, by its config.json.

    Attributes:
        method: a key of `_KNOWN`.
        block: rows and columns that share a scale; None: the whole tensor, or a row
            ("compressed-tensors").
        kept: modules that are not quantised.
    """

    method: str
    block: tuple[int, int] | None = None
    kept: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether the tensor `name` is of a module that is not quantised."""
        module = name.rpartition(".")[0]
        return any(
            module == one or module.startswith(f"{one}.") or module.endswith(f".{one}")
            for one in self.kept
        )


def read_scheme(
    table: Mapping[str, Any], problems: list[Problem], ignore: Sequence[str] = ()
) -> QuantisedScheme | None:
    """The quantisation that config.json describes; None: there is none.

    Args:
        problems: unknown entries and methods are added to these.
        ignore: entries to ignore, such as "quantization_config.NAME", or all of it.
    """
    entry = table.get(ENTRY)
    if entry in (None, {}):
        return None
    method = str(entry.get("quant_method", "")) if isinstance(entry, Mapping) else ""
    if method not in _KNOWN:
        name, got = (f"{ENTRY}.quant_method", method) if method else (ENTRY, entry)
        wanted = f"{'' if method else 'quant_method '}{', '.join(_KNOWN)}"
        if ENTRY not in ignore:
            problems.append(Problem(name, repr(got), wanted, _find_other_files(method)))
        return None
    for name, value in entry.items():
        known = name in ("quant_method", *_KNOWN[method]) or {ENTRY, f"{ENTRY}.{name}"} & {*ignore}
        if not known and value not in (None, {}, [], ""):
            fix = f"if it does not change what weights are, pass ignore=['{ENTRY}.{name}']"
            wanted = "an entry that is known here"
            problems.append(Problem(f"{ENTRY}.{name}", repr(value), wanted, fix))
    kept = entry.get("modules_to_not_convert") or entry.get("ignored_layers") or entry.get("ignore")
    if not isinstance(kept, list | None) or not all(isinstance(one, str) for one in kept or ()):
        problems.append(Problem(f"{ENTRY}, modules", repr(kept), "a list of names"))
        kept = None
    for name, allowed in (
        ("fmt", ("e4m3",)), ("scale_fmt", ("float", "ue8m0")), ("expert_dtype", ("fp8",)),
    ) if method == "fp8" else ():  # fmt: skip
        if entry.get(name) not in (None, *allowed):
            wanted = " or ".join(map(repr, allowed))
            problems.append(Problem(f"{ENTRY}.{name}", repr(entry[name]), wanted, _OTHERWISE))
    sizes = entry.get("weight_block_size") if method == "fp8" else None
    block = _read_block(sizes, f"{ENTRY}.weight_block_size", problems)
    if method == "compressed-tensors":
        block = _read_compressed(entry, problems)
    return QuantisedScheme(method, block, tuple(kept or ()))


def _read_block(value: Any, where: str, problems: list[Problem]) -> tuple[int, int] | None:
    """Rows and columns of a block; None: null."""
    if value is None:
        return None
    pair = value if isinstance(value, list | tuple) and len(value) == 2 else ()
    if not pair or not all(type(size) is int and size > 0 for size in pair):
        problems.append(Problem(where, repr(value), "two positive whole numbers, or null"))
        return None
    return pair[0], pair[1]


def _read_compressed(entry: Mapping[str, Any], problems: list[Problem]) -> tuple[int, int] | None:
    """The block of compressed-tensors; anything but FP8 weights with scales is a problem."""
    for name in ("sparsity_config", "transform_config"):
        value = entry.get(name)
        dense = isinstance(value, Mapping) and value.get("format") == "dense"
        if value and not dense:
            problems.append(Problem(f"{ENTRY}.{name}", repr(value), "none", _OTHERWISE))
    groups, blocks = entry.get("config_groups"), set()
    if not isinstance(groups, Mapping) or not groups:
        problems.append(Problem(f"{ENTRY}.config_groups", repr(groups), "groups of modules"))
        return None
    for key, group in groups.items():
        where = f"{ENTRY}.config_groups.{key}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            got = repr(weights)
            problems.append(Problem(f"{where}.weights", got, "a scheme of weights", _OTHERWISE))
            continue
        kind = group.get("format") or entry.get("format")
        if kind not in ("float-quantized", "naive-quantized"):
            wanted = "'float-quantized'"
            problems.append(Problem(f"{where}.format", repr(kind), wanted, _OTHERWISE))
            continue
        for name, allowed in (
            ("type", ("float",)), ("num_bits", (8,)), ("symmetric", (True,)),
            ("dynamic", (False, None)), ("strategy", ("tensor", "channel", "block")),
        ):  # fmt: skip
            if weights.get(name) not in allowed:
                wanted = " or ".join(repr(one) for one in allowed if one is not None)
                got = repr(weights.get(name))
                problems.append(Problem(f"{where}.weights.{name}", got, wanted, _OTHERWISE))
        if weights.get("strategy") == "block":
            at = f"{where}.weights.block_structure"
            blocks.add(_read_block(weights.get("block_structure") or 0, at, problems))
    if len(blocks) > 1:
        got = " and ".join(map(str, blocks))
        problems.append(Problem(f"{ENTRY}.config_groups", got, "blocks of one size", _OTHERWISE))
    return next(iter(blocks), None)


@dataclass(frozen=True)
class _Weight:
    """A quantised tensor of a folder.

    Attributes:
        values, scales: names of tensors in files.
        shape: of the weight.
        block: elements per scale along each dim; empty: one scale.
        pairs: MXFP4.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    pairs: bool = False

    def read(self, source: TensorSource, slices: Sequence[slice]) -> torch.Tensor:
        """These slices of it, in float32."""
        if self.pairs:
            return self._read_pairs(source, slices)
        values = source.read(self.values, slices).float()
        if not self.block:
            shape = source.shapes()[self.scales][0]
            scale = self._read_scales(source, [slice(0, size) for size in shape])
            return values.mul_(scale.reshape(()))
        found = [
            _find_blocks(part, size, block)
            for part, size, block in zip(slices, self.shape, self.block, strict=True)
        ]
        scales = self._read_scales(source, [part for part, _ in found])
        for dim, (_, at) in enumerate(found):
            scales = scales.index_select(dim, at)
        return values.mul_(scales)

    def _read_pairs(self, source: TensorSource, slices: Sequence[slice]) -> torch.Tensor:
        *lead, inputs, outputs = slices
        groups, at = _find_blocks(inputs, self.shape[-2], _GROUP)
        scales = self._read_scales(source, [*lead, outputs, groups])
        where = [*lead, outputs, groups, slice(0, _GROUP // 2)]
        codes = source.read(self.values, where)
        # a table of the two numbers of each byte is ten times as fast as `unpacked`
        pairs = unpacked(torch.arange(256, dtype=torch.uint8).view(E2M1)).view(torch.int64)
        values = pairs.index_select(0, codes.flatten().int()).view(torch.float32)
        values = values.view(*scales.shape, _GROUP).mul_(scales.unsqueeze(-1)).flatten(-2)
        first = groups.start * _GROUP
        within = torch.arange(*inputs.indices(self.shape[-2])) - first
        return (values if len(at) == values.shape[-1] else values[..., within]).mT

    def _read_scales(self, source: TensorSource, slices: Sequence[slice]) -> torch.Tensor:
        scales = source.read(self.scales, slices)
        scales = (scales.view(E8M0) if scales.dtype == torch.uint8 else scales).float()
        if not bool(scales.isfinite().all()):
            fix = "copy or download the file again"
            title, got = "these quantised weights cannot be read", "infinite ones or NaN"
            refuse(title, self.scales, got, "finite scales", fix)
        return scales


_GROUP = 32
"""Elements of MXFP4 per scale."""


def _find_blocks(part: slice, size: int, block: int) -> tuple[slice, torch.Tensor]:
    """The blocks of a slice of a dim, and the block of each of its elements."""
    at = torch.arange(*part.indices(size)) // block
    if not len(at):
        return slice(0, 0), at
    return slice(int(at[0]), int(at[-1]) + 1), at - at[0]


def decode(source: TensorSource, table: Mapping[str, Any], where: str) -> TensorSource:
    """The tensors of a folder, with quantised ones in float32.

    Args:
        where: its path, for messages.

    Raises:
        ValueError: the method is unknown, or scales are missing, of another shape or dtype, or of
            modules that should not be quantised; all offenders are listed. Reading raises it for
            scales that are not finite.
    """
    problems: list[Problem] = []
    entry = table.get(ENTRY)
    known = [f"{ENTRY}.{name}" for name in entry] if isinstance(entry, Mapping) else []
    scheme = read_scheme(table, problems, known)
    raise_problems(f"cannot read the weights that {where} describes", problems)
    if scheme is None:
        return source
    shapes = source.shapes()
    find = _find_mxfp4 if scheme.method == "mxfp4" else _find_fp8
    weights = dict(find(scheme, shapes, problems))
    for name in weights:
        if scheme.keeps(name):
            fix = f"remove it from the list in {ENTRY} if its scales are right"
            wanted = f"a plain tensor, as {where} lists the module"
            problems.append(Problem(name, "a quantised tensor", wanted, fix))
    raise_problems(f"quantised weights are not as {where} says", problems)
    used = {name for w in weights.values() for name in (w.values, w.scales)}
    used |= {*filter(_UNUSED.fullmatch, shapes)}
    entries = {name: entry for name, entry in shapes.items() if name not in used}
    entries |= {name: (weight.shape, torch.float32) for name, weight in weights.items()}

    def read(name: str, slices: Sequence[slice]) -> torch.Tensor:
        found = weights.get(name)
        return source.read(name, slices) if found is None else found.read(source, slices)

    return TensorSource(entries, read)


_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_AGAIN = "are all files there? does config.json belong to these weights?"


def _find_fp8(
    scheme: QuantisedScheme, shapes: _Shapes, problems: list[Problem]
) -> Iterator[tuple[str, _Weight]]:
    """Weights in E4M3, with their scales."""
    for name, (shape, dtype) in shapes.items():
        if dtype != E4M3:
            continue
        scales = next((f"{name}{end}" for end in _ENDS if f"{name}{end}" in shapes), None)
        if scales is None:
            problems.append(Problem(name, "no scales", f"{name}{_ENDS[0]} beside it", _AGAIN))
            continue
        got, kind = shapes[scales]
        if kind not in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0):
            problems.append(Problem(scales, str(kind), "scales of 32, 16 or 8 bits", _AGAIN))
        block = _find_block(scheme, shape, got)
        if block is None:
            allowed = _list_grids(scheme, shape)
            wanted = f"{' or '.join(str(list(grid)) for grid in allowed)}, for {list(shape)}"
            problems.append(Problem(scales, str(list(got)), wanted, _AGAIN))
            continue
        yield name, _Weight(name, scales, shape, block)


_ENDS = ("_scale_inv", "_scale")


def _list_grids(scheme: QuantisedScheme, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that a tensor's scales may have, besides a single scale."""
    rows = [] if scheme.method == "fp8" else [(*shape[:-1], 1)]
    return [*rows, () if scheme.block is None else _count_blocks(shape, scheme.block)]


def _find_block(
    scheme: QuantisedScheme, shape: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The number of elements per scale along each dim; None: unknown scales."""
    by_rows, block = scheme.method != "fp8", scheme.block
    if math.prod(scales) == 1 and (block is None or (by_rows and len(scales) < len(shape))):
        return ()
    if by_rows and scales == (*shape[:-1], 1):
        return (*[1] * (len(shape) - 1), shape[-1])
    if block is None or len(shape) < 2 or scales != _count_blocks(shape, block):
        return None
    return (*[1] * (len(shape) - 2), *block)


def _count_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks along each dim, incomplete ones included."""
    *lead, rows, cols = (1, *shape)[-max(len(shape), 2) :]
    return (*lead, -(-rows // block[0]), -(-cols // block[1]))


def _find_mxfp4(
    scheme: QuantisedScheme, shapes: _Shapes, problems: list[Problem]
) -> Iterator[tuple[str, _Weight]]:
    """Weights in MXFP4, with their scales."""
    del scheme
    for name, (shape, dtype) in shapes.items():
        if not name.endswith("_blocks"):
            continue
        whole, wanted = name.removesuffix("_blocks"), ((*shape[:-1],), torch.uint8)
        scales = f"{whole}_scales"
        if dtype != torch.uint8 or len(shape) < 3 or shape[-1] != _GROUP // 2:
            got = f"{dtype} {list(shape)}"
            wanted_text = f"uint8 [..., outputs, groups, {_GROUP // 2}]"
            problems.append(Problem(name, got, wanted_text, _AGAIN))
        elif shapes.get(scales) != wanted:
            found = shapes.get(scales)
            got = "nothing" if found is None else f"{found[1]} {list(found[0])}"
            problems.append(Problem(scales, got, f"uint8 {list(shape[:-1])}", _AGAIN))
        else:
            *lead, outputs, groups, _ = shape
            yield whole, _Weight(name, scales, (*lead, groups * _GROUP, outputs), (), pairs=True)


# --- writing quantised weights


METHODS: Mapping[str, QuantisedFormat] = MappingProxyType({
    "fp8-block": QuantisedFormat.parse("e4m3@128x128"),
    "fp8-row": QuantisedFormat.parse("e4m3@row"),
})  # fmt: skip
"""Formats of matrices, outputs by inputs, by name."""

_MATRIX = re.compile(r"(.*/)?(attention|mlp|experts|shared)/(\w+)/w")
_JOINED: Mapping[str, str] = MappingProxyType(
    {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up",
     "q_down": "down", "kv_down": "down"}
)  # fmt: skip
"""Matrices that other software joins, and the joined one."""


def choose_quantised(method: str, found: Sequence[HubLayout]) -> set[str]:
    """The names of a model's tensors that `method` quantises.

    Raises:
        ValueError: there are none, or some are not matrices of linear layers.
    """
    height, width = METHODS[method].block
    groups: dict[tuple, list[HubLayout]] = {}
    for layout in found:
        match = _MATRIX.fullmatch(layout.rule.paths[0])
        if match is None:
            continue
        part = layout.parts[0]
        linear = layout.rule.name.endswith(".weight") and part.ours[0] in part.theirs[-1]
        if len(layout.shape) != 2 or not linear:
            fix = "export it as it is"
            wanted = "weights of linear layers, [outputs, inputs]"
            got = f"{list(layout.shape)} of many experts or of another order"
            refuse(f"cannot export as {method}", layout.rule.name, got, wanted, fix)
        kind = match[1], match[2], _JOINED.get(match[3], match[3])
        groups.setdefault(kind, []).append(layout)
    fitting = [
        layout
        for group in groups.values()
        if not any(x.shape[0] % height or x.shape[1] % width for x in group)
        for layout in group
    ]
    if not fitting:
        fix = "choose fp8-row" if groups else "export it as it is"
        got = f"none whose sides are multiples of {height}" if groups else "none"
        wanted = "matrices of attention, feed-forward layers or experts"
        refuse(f"cannot export as {method}", "the model", got, wanted, fix)
    return {layout.name(index) for layout, index in tensors(fitting)}


def describe_scales(method: str, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the scales of the tensor `name`."""
    height, width = METHODS[method].block
    if METHODS[method].blocks == "row":
        return f"{name}_scale", (shape[0], 1)
    return f"{name}_scale_inv", (shape[0] // height, shape[1] // width)


def encode(method: str, name: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8_e4m3fn, and its float32 scales, of the shape of `describe_scales`.

    Raises:
        ValueError: it has infinite elements or NaN.
    """
    f = METHODS[method]
    matrix = matrix.detach().float()
    made = quantise(matrix, f, amax=magnitude(matrix, f) if f.shared else None)
    if not bool(made.scales.isfinite().all()):
        title, fix = f"cannot export as {method}", "does the run's loss stay finite?"
        refuse(title, name, "infinite elements or NaN", "finite weights", fix)
    return made.values, made.scales


def write_entry(method: str, converted: set[str], names: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        method: of `METHODS`.
    """
    plain = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    kept = [name for name in plain if f"{name}.weight" not in converted]
    # transformers' model has this layer even if weights are tied, and stored once
    kept += [] if "lm_head" in kept else ["lm_head"]
    if method == "fp8-block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(METHODS[method].block),
            "modules_to_not_convert": kept,
        }
    of_all = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**of_all, "strategy": "channel", "dynamic": False},
        "input_activations": {**of_all, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def check_method(method: str) -> None:
    """Refuse a name that is not in `METHODS`.

    Raises:
        ValueError: the nearest is named.
    """
    if method not in METHODS:
        fix = nearest(method, METHODS)
        refuse("cannot export the model", "quantise", repr(method), "a known method", fix)
