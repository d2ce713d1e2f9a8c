"""Read Megatron checkpoints of both layouts, as whole tensors by name, without executing code.

| layout         | in ``iter_0000005/``                                                          |
|----------------|-------------------------------------------------------------------------------|
| ``torch_dist`` | ``common.pt``, ``.metadata`` and ``*.distcp`` (torch.distributed.checkpoint)  |
| legacy         | ``mp_rank_TP[_PP][_EP]/model_optim_rng.pt`` and perhaps ``distrib_optim.pt``  |

However a tensor is sharded (tensor, expert and pipeline parallelism, virtual stages, the
distributed optimizer), it has one canonical name, that of Megatron's local layers with global
layer numbers, and is read in slices, a shard at a time.

Both layouts are pickles. ``.pt`` files and shards are read by torch's ``weights_only`` loader, with
a few more classes, all replaced by `Inert`; ``.metadata``, whose protocol that loader lacks, by a
Python unpickler that knows only the names in `_METADATA`.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from functron.core.errors import Problem, local_path, raise_problems, refuse

METADATA, COMMON, LATEST = ".metadata", "common.pt", "latest_checkpointed_iteration.txt"
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTERS = ("fp32_param", "param")
"""Names of master parameters: of plain and distributed optimizers."""
_BROKEN = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, RuntimeError,
    AssertionError, MemoryError, OverflowError, RecursionError, NotImplementedError,
    pickle.UnpicklingError, zipfile.BadZipFile, UnicodeError, ImportError, struct.error,
)  # fmt: skip
_CANNOT = "cannot read the Megatron checkpoint"
_AGAIN = "copy the checkpoint again; if it was always like this, do not trust its author"


class Inert:
    """An object of any class, as its arguments and state."""

    def __init__(self, *values: Any, **named: Any):
        self.values = values
        self.state: Any = named

    def __setstate__(self, state: Any) -> None:
        self.values, self.state = (), state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


_PLAIN = (
    "types.SimpleNamespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "signal.Signals",
    "_io.BytesIO", "io.BytesIO", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar", "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType",
    "megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode", "megatron.core.rerun_state_machine.RerunState",
)  # fmt: skip
"""Classes of Megatron-LM's other objects, which `Inert` replaces."""

_DCP, _CORE = "torch.distributed.checkpoint", "megatron.core.dist_checkpointing.strategies"
_METADATA: Mapping[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    **{
        name: type(name.rsplit(".", 1)[1], (Inert,), {})
        for name in (
            *(f"{_DCP}.metadata.{n}" for n in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex",
                "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )),
            f"{_DCP}.filesystem._StorageInfo", f"{_DCP}.planner.SavePlan",
            f"{_DCP}.planner.WriteItem", f"{_DCP}.planner.WriteItemType",
            f"{_DCP}.planner.TensorWriteData",
            "torch.serialization._get_layout", f"{_CORE}.torch.MCoreMetadata",
            f"{_CORE}.torch.MCoreSavePlan", "pathlib.PosixPath", "pathlib._local.PosixPath",
        )
    },
}  # fmt: skip
"""The names that a ``.metadata`` may have, and their replacements."""


def _refuse(
    path: Path | str,
    error: BaseException | str,
    wanted: str = "a file of Megatron's",
    fix: str = _AGAIN,
) -> NoReturn:
    got = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL (\S+)", got)
        got = f"a pickle that calls {found[1]}" if found else got
        wanted = "tensors and plain values; other pickles could run code, and were not loaded"
    refuse(_CANNOT, str(path), got.splitlines()[0][:300], wanted, fix)


class _Metadata(pickle._Unpickler):  # in Python, as that in C allocates as much as the file claims
    dispatch: ClassVar[dict] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code])
        not in (
            *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
            *(pickle.INST, pickle.OBJ, pickle.BYTEARRAY8, pickle.NEXT_BUFFER),
            pickle.READONLY_BUFFER,
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _METADATA:
            return _METADATA[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"GLOBAL {full} is not allowed")


def read_metadata(file: Path) -> Any:
    """The contents of a ``.metadata``, with `Inert` objects.

    Raises:
        ValueError: it is broken, or has unexpected objects.
    """
    try:
        return _Metadata(io.BytesIO(file.read_bytes())).load()
    except _BROKEN as error:
        _refuse(file, error)


def read_pickle(file: Path, start: int = 0, length: int | None = None) -> Any:
    """The contents of a file of torch.save, or of `length` bytes of it from `start` on.

    Tensors of a whole file are mapped into memory, and read when they are used.

    Raises:
        ValueError: it is broken, or has other objects than tensors and plain values.
    """
    try:
        where: Any = file
        size = file.stat().st_size if length is None else length
        if length is not None:
            with file.open("rb") as stream:
                stream.seek(start)
                where = io.BytesIO(stream.read(length))
        with zipfile.ZipFile(where) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("a compressed archive, which torch.save does not write")
            if sum(entry.file_size for entry in entries) > size:
                raise ValueError("an archive that claims more bytes than it has")
        if length is not None:
            where.seek(0)
        allowed: list[Any] = [argparse.Namespace, *((Inert, name) for name in _PLAIN)]
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(
                where, map_location="cpu", weights_only=True, mmap=True if length is None else None
            )
    except _BROKEN as error:
        _refuse(file, error)


def _check_tensor(tensor: Any, file: Path, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Refuse what is not a tensor with as much data as its shape needs."""
    if type(tensor) is torch.nn.Parameter:
        tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        _refuse(file, f"{type(tensor).__name__} in the place of a tensor", "a plain tensor")
    if tensor.is_meta or tensor.numel() > tensor.untyped_storage().nbytes() // tensor.itemsize:
        got = f"a tensor of shape {list(tensor.shape)} with less data"
        _refuse(file, got, "as much as its shape needs")
    if shape is not None and tuple(tensor.shape) != shape:
        _refuse(
            file, f"a shard of shape {list(tensor.shape)}", f"{list(shape)}, as {METADATA} says"
        )
    return tensor.detach()


# --- tensors made of shards


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor.

    Attributes:
        start: per dim.
        shape: its sizes.
        load: reads it.
        file: that has it.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    file: Path


@dataclass
class ChunkedTensors:
    """Whole tensors by name, made of chunks, like a `functron.hub.files.TensorSource`.

    Attributes:
        chunks, dtypes: of each tensor.
        sizes: shapes of the whole tensors, computed by `close`.
    """

    chunks: dict[str, list[TensorChunk]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, name: str, dtype: torch.dtype, chunk: TensorChunk) -> None:
        """Add a chunk of the tensor `name`, unless it is there."""
        known = self.chunks.setdefault(name, [])
        if all(each.start != chunk.start for each in known):
            known.append(chunk)
        self.dtypes.setdefault(name, dtype)

    def close(self) -> list[Problem]:
        """Compute whole shapes; the problems of tensors that chunks do not fill."""
        found = []
        for name, chunks in self.chunks.items():
            rank = len(chunks[0].shape)
            if any(len(c.shape) != rank or len(c.start) != rank for c in chunks):
                found.append(Problem(name, "shards of different ranks", "the same"))
                continue
            spans = [
                sorted({(c.start[d], c.start[d] + c.shape[d]) for c in chunks}) for d in range(rank)
            ]
            whole = tuple(each[-1][1] for each in spans)
            tiled = all(
                each[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(each))
                for each in spans
            )
            if not tiled or len(chunks) != math.prod(len(each) for each in spans):
                got = f"{len(chunks)} shards that leave gaps or overlap"
                wanted = "shards that fill the tensor: are all files of the checkpoint there?"
                found.append(Problem(name, got, wanted, _AGAIN))
            self.sizes[name] = whole
        return found

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor."""
        return {name: (shape, self.dtypes[name]) for name, shape in self.sizes.items()}

    def read(self, name: str, slices: Sequence[slice]) -> torch.Tensor:
        """These slices of the tensor `name`, read one shard at a time."""
        shape = self.sizes[name]
        spans = [part.indices(size) for part, size in zip(slices, shape, strict=True)]
        assert all(step == 1 for _, _, step in spans), slices
        out = torch.empty([stop - start for start, stop, _ in spans], dtype=self.dtypes[name])
        for chunk in self.chunks[name]:
            box = [
                (max(first, at), min(last, at + size))
                for (first, last, _), at, size in zip(spans, chunk.start, chunk.shape, strict=True)
            ]
            if any(first >= last for first, last in box):
                continue
            part = _check_tensor(chunk.load(), chunk.file, chunk.shape)
            view = out
            for dim, (first, last) in enumerate(box):
                part = part.narrow(dim, first - chunk.start[dim], last - first)
                view = view.narrow(dim, first - spans[dim][0], last - first)
            view.copy_(part)
        return out


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A Megatron checkpoint.

    Attributes:
        folder: of the iteration.
        common: everything but tensors: args, iteration, opt_param_scheduler, ...
        weights: of the model.
        state: of the optimizer, by `MOMENTS` and "master"; empty: none.
        step: number of the optimizer's updates.
        buckets: state in the form ``dp_reshardable``, without names of parameters, which
            `functron.apps.megatron.tensors.read_state` finds.
    """

    folder: Path
    common: Mapping[str, Any]
    weights: ChunkedTensors
    state: Mapping[str, ChunkedTensors]
    step: int
    buckets: ChunkedTensors = field(default_factory=ChunkedTensors)

    @property
    def args(self) -> Mapping[str, Any] | None:
        """The arguments of the run; None: there are none."""
        found = self.common.get("args")
        if found is None:
            return None
        return dict(found) if isinstance(found, Mapping) else dict(vars(found))


def open_checkpoint(path: str | Path) -> OpenedCheckpoint:
    """Open the checkpoint in the folder of an iteration, or the latest in a folder of several.

    Raises:
        ValueError: there is none, or files are missing, broken, of another format, or have
            unexpected contents; all offenders are listed.
    """
    folder = _find_iteration(local_path(path))
    if (folder / METADATA).is_file():
        return _open_sharded(folder)
    ranks = sorted(p for p in folder.glob("mp_rank_*") if (p / MODEL).is_file())
    if not ranks:
        names = sorted(p.name for p in folder.iterdir())[:6] if folder.is_dir() else []
        wanted = f"{METADATA} and *.distcp (torch_dist), or mp_rank_*/{MODEL}"
        fix = "save it again with --ckpt-format torch_dist" if names else "check the path"
        refuse("not a Megatron checkpoint", str(folder), ", ".join(names) or "nothing", wanted, fix)
    return _open_ranks(folder, ranks)


def _find_iteration(path: Path) -> Path:
    latest = path / LATEST
    if not latest.is_file():
        return path
    try:
        text = latest.read_text(encoding="utf-8").strip()
    except _BROKEN as error:
        _refuse(latest, error, "the number of an iteration")
    if text == "release":
        return path / "release"
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        _refuse(latest, repr(text[:40]), "the number of an iteration, or release")
    return path / f"iter_{int(text):07d}"


# --- names

_LAYER = r"(?P<layer>decoder\.layers|mtp\.layers)"
_ALIASES = (
    (r"^(?:module\.|model\.)+", ""),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$",
     r"self_attention.\1_layernorm.\2"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.mlp\.experts\.local_experts\.", ".mlp.experts."),
    (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.\3.\1.\2"),
    (r"\.mtp_model_layer\.", ".transformer_layer."),
)  # fmt: skip
"""Patterns of names of Megatron's layers and versions, and their canonical replacements.

Transformer Engine's linear layers contain the norms before them; grouped experts number weights.
"""
_PASSED = re.compile(
    r".*_extra_state(/.*)?$|rng_state.*|rerun_state_machine_state.*|.*rotary_pos_emb\.inv_freq|"
    r".*local_tokens_per_expert.*|.*global_tokens_per_expert.*"
)
"""Names that are ignored: states of FP8 scaling, generators, counters of one step."""


def canonical_name(name: str) -> str:
    """The canonical name of a tensor."""
    for pattern, new in _ALIASES:
        name = re.sub(pattern, new, name)
    return name


def _unstack(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple]:
    """The tensors in a chunk of a stacked one: name, index within the chunk, start and shape."""
    prefix = re.match(r"decoder\.layers\.(?!\d)", name)
    experts = re.search(r"\.mlp\.experts\.experts\.(?!\d)", name)
    name = re.sub(r"\.mlp\.experts\.experts\.(?=\d)", ".mlp.experts.", name)
    count = bool(prefix) + bool(experts)
    if len(shape) < count:
        raise ValueError(f"{name} has {len(shape)} dims, and is stacked")
    for index in itertools.product(*(range(size) for size in shape[:count])):
        numbers = [at + i for at, i in zip(start, index, strict=False)]
        made = name
        if prefix:
            made = made.replace("decoder.layers.", f"decoder.layers.{numbers.pop(0)}.", 1)
        if experts:
            made = made.replace(".mlp.experts.experts.", f".mlp.experts.{numbers.pop(0)}.", 1)
        yield made, index, start[count:], shape[count:]


# --- torch_dist


def _open_sharded(folder: Path) -> OpenedCheckpoint:
    file = folder / METADATA
    metadata, common = read_metadata(file), read_pickle(folder / COMMON)
    if not isinstance(common, dict):
        _refuse(folder / COMMON, type(common).__name__, "a dict")
    weights, buckets, state, problems = ChunkedTensors(), ChunkedTensors(), {}, []
    optimizers = []
    try:
        places = _list_places(folder, metadata)
        entries = dict(metadata.state_dict_metadata)
        for key, entry in entries.items():
            if type(entry).__name__ != "TensorStorageMetadata":
                if re.search(r"optimizer\.distributed\.\w+\.optimizer/", key):
                    optimizers.append(_read_object(places[key, None]))
                elif "optimizer.distributed." not in key and not _PASSED.match(key):
                    problems.append(Problem(key, "an object", "a tensor"))
                continue
            parts = re.match(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.*)$", key)
            into = state.setdefault(parts[1], ChunkedTensors()) if parts else weights
            into = buckets if "optimizer.distributed." in key else into
            _add_chunks(into, parts[2] if parts else key, key, entry, places)
    except _BROKEN as error:
        if isinstance(error, ValueError) and "\n" in str(error):
            raise
        _refuse(file, error, "the metadata of tensors")
    for tensors in (weights, buckets, *state.values()):
        problems += tensors.close()
    problems += _find_other_forms(common)
    raise_problems(f"{_CANNOT} {folder}", problems)
    common = {**common, "optimizer": optimizers} if optimizers else common
    return OpenedCheckpoint(folder, common, weights, name_state(state), _find_step(common), buckets)


def _find_other_forms(common: Mapping[str, Any]) -> Iterator[Problem]:
    """Forms of the distributed optimizer's state that are not read."""
    read = ("fully_reshardable", "dp_reshardable", "fully_sharded_bucket_space")
    found = {
        repr(each.get("param_state_sharding_type", read[0])) for each in _list_optimizers(common)
    }
    for form in sorted(found):
        if form not in map(repr, read):
            fix = "load it in a Megatron-Core that reads it, and save it as fully_reshardable; or "
            fix += "with --no-save-optim: the parameters alone are read then"
            wanted = f"{read[0]} or {read[1]}: Megatron-Core no longer writes others"
            yield Problem("param_state_sharding_type", form[:100], wanted, fix)


def _read_object(place: tuple[Path, int, int]) -> Any:
    """An object among the shards, which Megatron-Core writes as a list of one."""
    found = read_pickle(*place)
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, Mapping):
        _refuse(place[0], type(found).__name__, "the settings of an optimizer")
    return found


def _list_places(folder: Path, metadata: Any) -> dict[tuple, tuple[Path, int, int]]:
    """File, first byte and length of each chunk, by key and start."""
    found, sizes = {}, {}
    for index, info in dict(metadata.storage_data).items():
        name, start, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            _refuse(folder / METADATA, f"a shard in {name!r}", "files of this folder alone")
        if getattr(info, "transform_descriptors", None):
            _refuse(folder / METADATA, "compressed shards", "plain ones")
        if name not in sizes:
            file = folder / name
            if file.is_symlink() and folder.resolve() not in file.resolve().parents:
                _refuse(file, f"a link to {file.resolve()}", "a file of this folder")
            sizes[name] = file.stat().st_size if file.is_file() else -1
        numbers = all(type(n) is int and n >= 0 for n in (start, length))
        if not numbers or start + length > sizes[name]:
            size = sizes[name]
            got = "no such file" if size < 0 else f"{size} bytes, of which one shard ends at "
            got = got if size < 0 else f"{got}{start + length if numbers else (start, length)}"
            _refuse(folder / name, got, f"all shards that {METADATA} lists")
        offset = getattr(index, "offset", None)
        key = (index.fqn, tuple(offset) if offset is not None else None)
        found[key] = (folder / name, start, length)
    return found


def _add_chunks(into: ChunkedTensors, name: str, key: str, entry: Any, places: Mapping) -> None:
    dtype, whole = entry.properties, tuple(entry.size)
    dtype = dtype.state[0] if isinstance(dtype.state, tuple) else dtype.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has the dtype {dtype!r}")
    name, total = canonical_name(name), 0
    for chunk in entry.chunks:
        start, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        if not all(type(n) is int and n >= 0 for n in (*start, *shape, *whole)):
            raise ValueError(f"{key} has invalid sizes")
        place = places.get((key, start)) or places.get((key, None))
        if place is None:
            raise ValueError(f"{key} has a shard without a place")
        file, at, length = place
        if math.prod(shape) * dtype.itemsize > length:
            raise ValueError(f"{key} claims a shard of shape {list(shape)} in {length} bytes")
        if any(a + n > size for a, n, size in zip(start, shape, whole, strict=True)):
            raise ValueError(f"{key} has a shard beyond its shape {list(whole)}")
        total += math.prod(shape)
        for made, index, first, size in _unstack(name, start, shape):
            half = re.match(r"(.*linear_fc1\.(?:weight|bias))_([wv])$", made)
            if half:  # separate gate and up
                made, before = half[1], whole[len(index)] if half[2] == "v" else 0
                first = (first[0] + before, *first[1:])
            load = _make_loader(file, at, length, shape, index)
            into.add(made, dtype, TensorChunk(first, size, load, file))
    if total != math.prod(whole):
        raise ValueError(f"{key} has shards of {total} numbers, and is {list(whole)}")


def _make_loader(file: Path, start: int, length: int, shape: tuple, index: tuple) -> Callable:
    def load() -> torch.Tensor:
        return _check_tensor(read_pickle(file, start, length), file, shape)[index]

    return load


def name_state(state: Mapping[str, ChunkedTensors]) -> dict[str, ChunkedTensors]:
    """The optimizer's state, with masters named "master"."""
    found = {name: tensors for name, tensors in state.items() if name not in MASTERS}
    masters = [state[name] for name in MASTERS if name in state]
    return found | ({"master": masters[0]} if masters else {})


def _list_optimizers(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of a checkpoint's optimizers: one, or that of experts and that of the rest."""
    found = common.get("optimizer")
    if isinstance(found, Mapping) and found and all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    return found if isinstance(found, list) else [found] if isinstance(found, Mapping) else []


def _unwrap(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's state dict of one of Megatron's optimizers."""
    return optimizer["optimizer"] if isinstance(optimizer.get("optimizer"), Mapping) else optimizer


def _find_step(common: Mapping[str, Any]) -> int:
    """The number of updates; the iteration if the optimizer does not have it."""
    steps = set()
    for optimizer in _list_optimizers(common):
        inner = _unwrap(optimizer)
        state = inner.get("state", {})
        found = [state.get("common_step")] if isinstance(state, Mapping) else []
        if isinstance(state, Mapping):
            found += [each.get("step") for each in state.values() if isinstance(each, Mapping)]
        found += [group.get("step") for group in inner.get("param_groups", ())]
        steps |= {int(each) for each in found if each is not None}
    if len(steps) > 1:
        got = f"updates {', '.join(map(str, sorted(steps)))} of different parameters"
        _refuse("optimizer", got, "the same number", "")
    iteration = common.get("iteration", 0)
    return steps.pop() if steps else iteration if isinstance(iteration, int) else 0


# --- the legacy layout

_COLUMNS = re.compile(
    r"(embedding\.word_embeddings|output_layer)\.weight$|"
    r".*\.(linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(weight|bias)$"
)
_ROWS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight$")
_DOWN = re.compile(r".*\.(linear_q_down_proj|linear_kv_down_proj)\.weight$")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)(\..*)$")
_NUMBERED = re.compile(r"(decoder\.layers\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class _ModelRank:
    """A file of the legacy layout, and its ranks."""

    file: Path
    table: Mapping[str, Any]
    tp: int
    pp: int
    ep: int

    @property
    def models(self) -> list[Mapping[str, Any]]:
        """Its chunks of the model."""
        if "model" in self.table:
            return [self.table["model"]]
        names = itertools.takewhile(
            self.table.__contains__, (f"model{n}" for n in itertools.count())
        )
        return [self.table[name] for name in names]


@dataclass(frozen=True)
class _Owned:
    """A tensor of one rank: its canonical name, and its boxes in the whole tensor."""

    name: str
    tensor: torch.Tensor
    parts: tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...]
    expert: bool
    trained: bool


def _open_ranks(folder: Path, paths: Sequence[Path]) -> OpenedCheckpoint:
    first = read_pickle(paths[0] / MODEL)
    if not isinstance(first, dict) or "args" not in first:
        fix = "save it again with --ckpt-format torch_dist, in the Megatron-LM that made it"
        got, wanted = "no args", "those of a Megatron-LM run, with its parallel sizes"
        _refuse(paths[0] / MODEL, got, wanted, fix)
    args = OpenedCheckpoint(folder, first, ChunkedTensors(), {}, 0).args or {}
    ranks = _open_rank_files(folder, paths, args, first)
    weights, state, problems = ChunkedTensors(), {}, []
    offsets = _find_layer_offsets(ranks, args)
    for rank in ranks:
        try:
            owned = _list_owned(rank, args, offsets)
            for each in owned:
                _place_tensor(weights, each, each.tensor, rank.file, repeated=problems)
            for name, number, flat in _read_rank_state(rank, owned, args):
                _place_tensor(
                    state.setdefault(name, ChunkedTensors()), owned[number], flat, rank.file
                )
        except _BROKEN as error:
            if isinstance(error, ValueError) and "\n" in str(error):
                raise
            _refuse(rank.file, error)
    for tensors in (weights, *state.values()):
        problems += tensors.close()
    raise_problems(f"{_CANNOT} {folder}", problems)
    return OpenedCheckpoint(folder, first, weights, name_state(state), _find_step(first))


def _open_rank_files(
    folder: Path, paths: Sequence[Path], args: Mapping, first: Mapping
) -> list[_ModelRank]:
    sizes = [
        _parse_whole(args, f"{kind}_model_parallel_size")
        for kind in ("tensor", "pipeline", "expert")
    ]
    tp, pp, ep = sizes
    etp = args.get("expert_tensor_parallel_size") or tp
    if ep > 1 and etp != tp:
        fix = "save it again with --ckpt-format torch_dist"
        got = f"{etp}, with tensor_model_parallel_size={tp}"
        _refuse("expert_tensor_parallel_size", got, "the same in the legacy layout", fix)
    found, missing = [], []
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        file = folder / name / MODEL
        if not file.is_file():
            missing.append(Problem(f"{name}/{MODEL}", "no such file", f"tp={tp}, pp={pp}, ep={ep}"))
            continue
        table = first if file.parent == paths[0] else read_pickle(file)
        if not isinstance(table, dict):
            _refuse(file, type(table).__name__, "a dict")
        found.append(_ModelRank(file, table, t, p, e))
    known = {rank.file.parent.name for rank in found}
    missing += [
        Problem(path.name, "a rank", f"none but those of tp={tp}, pp={pp}, ep={ep}")
        for path in paths
        if path.name not in known
    ]
    raise_problems(f"{_CANNOT} {folder}", missing)
    return found


def _parse_whole(args: Mapping, name: str, default: int = 1) -> int:
    value = args.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 20:
        _refuse(name, repr(value), "a positive number", "")
    return value


def _find_layer_offsets(ranks: Sequence[_ModelRank], args: Mapping) -> dict[tuple[int, int], int]:
    """The global number of the first layer of each chunk, by pipeline rank and virtual stage.

    Chunks are ordered by virtual stage, and then by rank.
    """
    counts = {
        (number, rank.pp): 1 + max(
            (int(m[2]) for m in map(_NUMBERED.match, map(canonical_name, model)) if m), default=-1
        )
        for rank in ranks
        if rank.tp == rank.ep == 0
        for number, model in enumerate(rank.models)
    }  # fmt: skip
    total = itertools.accumulate((counts[key] for key in sorted(counts)), initial=0)
    found = {(pp, number): at for (number, pp), at in zip(sorted(counts), total, strict=False)}
    if sum(counts.values()) != args.get("num_layers"):
        got = f"{sum(counts.values())} layers in all files"
        _refuse("num_layers", got, str(args.get("num_layers")), "")
    return found


def _list_owned(
    rank: _ModelRank, args: Mapping, offsets: Mapping[tuple[int, int], int]
) -> list[_Owned]:
    """The tensors of a rank, in the order of its model and its optimizer."""
    found = []
    experts = (args.get("num_experts") or 0) // _parse_whole(args, "expert_model_parallel_size")
    for number, model in enumerate(rank.models):
        if not isinstance(model, Mapping):
            _refuse(rank.file, type(model).__name__, "the state dict of a model")
        for key, value in model.items():
            if not isinstance(key, str) or _PASSED.match(key):
                continue
            name = canonical_name(key)
            if m := _NUMBERED.match(name):
                name = f"{m[1]}{int(m[2]) + offsets[rank.pp, number]}{m[3]}"
            expert = _EXPERT.match(name)
            if expert:
                name = f"{expert[1]}{int(expert[2]) + rank.ep * experts}{expert[3]}"
            tensor = _check_tensor(value, rank.file)
            parts = _split_tensor(name, tensor, rank, args)
            trained = not name.endswith("router.expert_bias")
            found.append(_Owned(name, tensor, parts, bool(expert), trained))
    return found


def _find_division(name: str, args: Mapping) -> tuple[int | None, int]:
    """The dim that tensor parallelism splits (None: none), and the number of matrices along it."""
    if _COLUMNS.match(name):
        return 0, 2 if "linear_fc1." in name and args.get("swiglu") else 1
    return (1, 1) if _ROWS.match(name) else (None, 1)


def _split_spans(size: int, count: int, parts: int, rank: int) -> list[tuple[int, int]]:
    """The rank's span of each of `count` matrices along a dim of `size`."""
    each = size // count // parts
    starts = [(at * parts + rank) * each for at in range(count)]
    return [(start, start + each) for start in starts]


CheckpointBox = tuple[tuple[int, int], ...]
"""Start and end of a part of a tensor, per dim."""


def list_boxes(
    name: str, shape: Sequence[int], args: Mapping[str, Any]
) -> Iterator[tuple[CheckpointBox, ...]]:
    """By tensor-parallel rank, the boxes that it may have of a parameter."""
    tp = _parse_whole(args, "tensor_model_parallel_size")
    if _EXPERT.match(name):
        tp = _parse_whole(args, "expert_tensor_parallel_size", tp)
    dim, count = _find_division(name, args)
    if tp == 1 or dim is None:
        yield (tuple((0, size) for size in shape),)
    if _DOWN.match(name):
        dim = 0  # in some versions, which values tell
    if tp == 1 or dim is None or shape[dim] % (count * tp):
        return
    for rank in range(tp):
        yield tuple(
            tuple((start, stop) if d == dim else (0, size) for d, size in enumerate(shape))
            for start, stop in _split_spans(shape[dim], count, tp, rank)
        )


def _split_tensor(name: str, tensor: torch.Tensor, rank: _ModelRank, args: Mapping) -> tuple:
    """Starts of this rank's boxes in the whole tensor, and their slices in its own."""
    tp = _parse_whole(args, "tensor_model_parallel_size")
    zeros, all_of = (0,) * tensor.dim(), (slice(None),) * tensor.dim()
    dim, count = _find_division(name, args)
    if down := _DOWN.match(name):
        ranks = {"linear_q_down_proj": args.get("q_lora_rank")}
        both = (args.get("kv_lora_rank"), args.get("qk_pos_emb_head_dim"))
        ranks["linear_kv_down_proj"] = sum(each or 0 for each in both)
        dim = 0 if tensor.shape[0] != ranks[down[1]] else None
    if tp == 1 or dim is None:
        return ((zeros, all_of),)
    size, found = tensor.shape[dim], []
    for (start, _), own in zip(
        _split_spans(size * tp, count, tp, rank.tp), _split_spans(size, count, 1, 0), strict=True
    ):
        place, box = list(zeros), list(all_of)
        place[dim], box[dim] = start, slice(*own)
        found.append((tuple(place), tuple(box)))
    return tuple(found)


def _place_tensor(
    into: ChunkedTensors,
    owned: _Owned,
    value: torch.Tensor,
    file: Path,
    repeated: list[Problem] | None = None,
) -> None:
    """Add a rank's tensor, unless another rank has added it already."""
    for start, box in owned.parts:
        view = value[box]
        known = into.chunks.get(owned.name, [])
        same = next((c for c in known if c.start == start), None)
        if same is None:
            chunk = TensorChunk(start, tuple(view.shape), lambda view=view: view, file)
            into.add(owned.name, value.dtype, chunk)
        elif repeated is not None and not torch.equal(same.load(), view):
            got, fix = f"other numbers than in {same.file.parent.name}", _AGAIN
            path = f"{file.parent.name}: {owned.name}"
            repeated.append(Problem(path, got, "the same on ranks that share it", fix))


# --- the optimizer of the legacy layout


def _read_rank_state(
    rank: _ModelRank, owned: Sequence[_Owned], args: Mapping
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """A rank's optimizer state: its kind, index in `owned`, and tensor."""
    optimizers = _list_optimizers(rank.table)
    split = len(optimizers) > 1  # that of experts by itself
    if not optimizers:
        return
    groups = [_unwrap(each).get("param_groups", ()) for each in optimizers]
    flags = [any(group.get("is_expert_parallel") for group in each) for each in groups]
    members = [
        [n for n, each in enumerate(owned) if each.trained and (not split or each.expert == flag)]
        for flag in flags
    ]
    if args.get("use_distributed_optimizer"):
        yield from _read_flat_state(rank, owned, args, members)
        return
    for optimizer, mine in zip(optimizers, members, strict=True):
        yield from _read_plain_state(rank, owned, optimizer, mine)


def _read_plain_state(
    rank: _ModelRank, owned: Sequence[_Owned], optimizer: Mapping, members: Sequence[int]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    inner, masters = _unwrap(optimizer), optimizer.get("fp32_from_fp16_params")
    state, places = inner.get("state", {}), {}
    for number, group in enumerate(inner.get("param_groups", ())):
        plain = group.get("wd_mult", 1.0) == 0.0
        mine = [n for n in members if _is_undecayed(owned[n]) == plain]
        ids = list(group.get("params", ()))
        if len(ids) != len(mine):
            got = f"{len(ids)} parameters {'without' if plain else 'with'} weight decay"
            wanted = f"{len(mine)}: all of the model's matrices decay, and no vectors"
            _refuse(rank.file, got, wanted)
        places |= dict(zip(ids, mine, strict=True))
        for at, n in enumerate(mine if masters is not None else ()):
            yield "fp32_param", n, _match_shape((masters or ())[number][at], owned[n], rank.file)
    for key, n in places.items():
        for name in MOMENTS:
            yield name, n, _match_shape(state[key][name], owned[n], rank.file)


def _is_undecayed(owned: _Owned) -> bool:
    return owned.name.endswith(".bias") or owned.tensor.dim() == 1


def _match_shape(value: Any, owned: _Owned, file: Path) -> torch.Tensor:
    found = _check_tensor(value, file)
    if found.shape != owned.tensor.shape:
        got = f"state of shape {list(found.shape)} for {owned.name}"
        _refuse(file, got, f"{list(owned.tensor.shape)}, as the parameter")
    return found


def _read_flat_state(
    rank: _ModelRank, owned: Sequence[_Owned], args: Mapping, members: Sequence[Sequence[int]]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The state in ``distrib_optim.pt``: all parameters are concatenated, the last one first.

    Each begins at a multiple of 64 elements. Masters must round to the parameters.
    """
    file = rank.file.parent / OPTIMIZER
    tables = read_pickle(file)
    tables = tables if isinstance(tables, list) else [tables]
    if isinstance(tables[0], Mapping) and not {0, "buckets_coalesced"} & tables[0].keys():
        got = "an older format of the distributed optimizer"
        _refuse(file, got, "that of Megatron-Core 0.7 or later")
    tables += [None] * (len(members) - len(tables))
    for table, mine in zip(tables, members, strict=True):
        if table is None:  # another rank of expert parallelism has it
            continue
        buffers = [table[key] for key in sorted(key for key in table if isinstance(key, int))]
        for buffer, numbers in zip(buffers, _group_by_chunk(rank, owned, mine), strict=True):
            if len(buffer) != 1:
                _refuse(file, f"buffers of {len(buffer)} dtypes", "of one")
            (flat,) = buffer.values()
            yield from _read_flat(file, flat, owned, numbers, args)


def _group_by_chunk(
    rank: _ModelRank, owned: Sequence[_Owned], mine: Sequence[int]
) -> list[list[int]]:
    """Group `mine` by the chunks of the model."""
    sizes = [sum(not _PASSED.match(key) for key in model) for model in rank.models]
    ends = list(itertools.accumulate(sizes, initial=0))
    made = [[n for n in mine if a <= n < b] for a, b in itertools.pairwise(ends)]
    return [each for each in made if each]


def _read_flat(
    file: Path, flat: Mapping, owned: Sequence[_Owned], numbers: Sequence[int], args: Mapping
) -> Iterator[tuple[str, int, torch.Tensor]]:
    tensors = {key: _check_tensor(flat[key], file) for key in (*MOMENTS, "param")}
    start = 0
    for n in reversed(numbers):
        parameter = owned[n].tensor
        start = -(-start // 64) * 64
        stop = start + parameter.numel()
        if any(stop > each.numel() for each in tensors.values()):
            _refuse(file, "fewer elements than the parameters", "as many, in the same order")
        own = {key: each[start:stop].view(parameter.shape) for key, each in tensors.items()}
        if not torch.equal(own["param"].to(parameter.dtype), parameter):
            got = f"another parameter in the place of {owned[n].name}"
            fix = "load it in Megatron-LM and save it with --ckpt-format torch_dist"
            title = "cannot match the distributed optimizer's state with parameters"
            refuse(title, str(file), got, "a master that rounds to it", fix)
        yield from ((key, n, each) for key, each in own.items())
        start = stop
