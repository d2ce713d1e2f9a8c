"""Tensors of Megatron-Core's GPT models and their optimizer state: read and written.

| Megatron                                         | here                                        |
|--------------------------------------------------|---------------------------------------------|
| ``linear_qkv``: by key head its queries, key and value | q, k, v                               |
| ``linear_fc1``: gates, then ups                  | gate, up                                    |
| ``experts.E.linear_fc1``                         | rows of experts/gate, experts/up            |
| ``linear_q_down_proj``, ... of latent attention  | q_down, q_norm, q_up, kv_down, kv_norm, kv_up |
| ``mtp.layers.K``                                 | rows of mtp                                 |
| ``router.expert_bias``, no parameter             | router/balance                              |
| rows that pad the vocabulary                     | tokens, which its loss counts               |

Our padding of the vocabulary is written, too: Megatron has ``padded_vocab_size`` rows, and does not
mask them.

`load_tensors` reads weights, moments and masters, each as a tree like the parameters; `read_state`
matches unnamed buckets of the distributed optimizer with parameters; `save_tensors` writes
everything as ``torch_dist``, one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from functron.apps.megatron.checkpoint_files import (
    COMMON,
    METADATA,
    MOMENTS,
    CheckpointBox,
    ChunkedTensors,
    OpenedCheckpoint,
    TensorChunk,
    list_boxes,
    name_state,
)
from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.hub import files, reader
from functron.hub import format as formats
from functron.models.config import GPTConfig
from functron.models.family import GPT

# --- names of tensors

_QKV = ("linear_qkv[q]", "linear_qkv[k]", "linear_qkv[v]", "linear_proj")
EMBEDDING = "embedding.word_embeddings.weight"
"""The embedding, with rows of padding."""
_ROUTER = ("expert embed -> embed expert", "expert -> expert")
_LATENT = "latent embed -> embed latent"
_OF_LATENT = "(heads head) latent -> latent heads head"
BALANCE = "router/balance"
"""The end of paths without optimizer state in Megatron."""


def _list_mlp_rules(name: str, path: str, config: GPTConfig) -> tuple[formats.NameRule, ...]:
    paths = ("gate", "up") if config.gated else ("up",)
    wide = tuple(
        formats.NameRule(
            f"{name}.linear_fc1.{theirs}", dims, tuple(f"{path}/{each}/{ours}" for each in paths)
        )
        for theirs, ours, dims in (("weight", "w", formats.UP[0]), ("bias", "b", formats.UP[1]))
    )
    return (*wide, *formats.linear(f"{name}.linear_fc2", f"{path}/down", *formats.DOWN))


def _list_block_rules(
    name: str, stack: str, config: GPTConfig, *, experts: bool
) -> tuple[formats.NameRule, ...]:
    """The rules of a layer, whose `name` has a field for its number."""
    own, ours = f"{name}.self_attention", f"{stack}/attention"
    mixer = formats.attention(ours, *(f"{own}.{each}" for each in _QKV))
    mixer += formats.norm(f"{own}.q_layernorm", f"{ours}/q_norm", "head")
    mixer += formats.norm(f"{own}.k_layernorm", f"{ours}/k_norm", "head")
    if config.kv_rank:
        mixer = (
            *formats.linear(f"{own}.linear_proj", f"{ours}/out", *formats.OUT),
            formats.NameRule(f"{own}.linear_q_proj.weight", formats.HEADS[0], (f"{ours}/q/w",)),
            formats.NameRule(f"{own}.linear_q_down_proj.weight", _LATENT, (f"{ours}/q_down/w",)),
            *formats.norm(f"{own}.q_layernorm", f"{ours}/q_norm", "latent"),
            formats.NameRule(f"{own}.linear_q_up_proj.weight", _OF_LATENT, (f"{ours}/q_up/w",)),
            formats.NameRule(f"{own}.linear_kv_down_proj.weight", _LATENT, (f"{ours}/kv_down/w",)),
            *formats.norm(f"{own}.kv_layernorm", f"{ours}/kv_norm", "latent"),
            formats.NameRule(f"{own}.linear_kv_up_proj.weight", _OF_LATENT, (f"{ours}/kv_up/w",)),
        )  # fmt: skip
    norms = (
        *formats.norm(f"{name}.input_layernorm", f"{stack}/attention_norm"),
        *formats.norm(f"{name}.pre_mlp_layernorm", f"{stack}/mlp_norm"),
    )
    if not experts:
        return (*norms, *mixer, *_list_mlp_rules(f"{name}.mlp", f"{stack}/mlp", config))
    moe = f"{stack}/moe"
    return (
        *norms,
        *mixer,
        formats.NameRule(f"{name}.mlp.router.weight", _ROUTER[0], (f"{moe}/router/w",)),
        formats.NameRule(f"{name}.mlp.router.bias", _ROUTER[1], (f"{moe}/router/b",)),
        formats.NameRule(f"{name}.mlp.router.expert_bias", _ROUTER[1], (f"{moe}/{BALANCE}",)),
        *_list_mlp_rules(f"{name}.mlp.experts.{{expert}}", f"{moe}/experts", config),
        *_list_mlp_rules(f"{name}.mlp.shared_experts", f"{moe}/shared", config),
        formats.NameRule(f"{name}.mlp.shared_experts.gate_weight", "one embed -> embed one",
             (f"{moe}/shared_gate/w",)),
    )  # fmt: skip


def _list_rules(config: GPTConfig) -> tuple[formats.NameRule, ...]:
    layer, ahead = "decoder.layers.{layer}", "mtp.layers.{layer}"
    sparse = config.moe is not None
    return (
        formats.NameRule(EMBEDDING, formats.EMBED, ("embed",)),
        formats.NameRule(
            "embedding.position_embeddings.weight", "at embed -> at embed", ("positions",)
        ),
        *_list_block_rules(layer, "dense", config, experts=False),
        *_list_block_rules(layer, "blocks", config, experts=sparse),
        *formats.norm("decoder.final_layernorm", "norm"),
        *formats.norm(f"{ahead}.enorm", "mtp/embed_norm"),
        *formats.norm(f"{ahead}.hnorm", "mtp/stream_norm"),
        formats.NameRule(f"{ahead}.eh_proj.weight", "embed both -> both embed", ("mtp/proj/w",)),
        *_list_block_rules(f"{ahead}.transformer_layer", "mtp/block", config, experts=sparse),
        *formats.norm(f"{ahead}.final_layernorm", "mtp/norm"),
        formats.NameRule("output_layer.weight", formats.UNEMBED, ("unembed",)),
    )


def _make_layouts(config: GPTConfig, rows: int | None = None) -> list[formats.HubLayout]:
    """The tensors of a model with `rows` rows of the embedding; None: with padding."""
    family = GPT
    numbers = {**family.numbers(config), "mtp": range(config.mtp_modules)}
    rows = config.padded_vocab if rows is None else rows
    return formats.layouts(_list_rules(config), family.defs(config), rows, numbers)


def _count_rows(opened: OpenedCheckpoint, config: GPTConfig) -> int:
    """Rows of a checkpoint's embedding: all, or, in functron's older ones, without padding."""
    stored, *_ = opened.weights.sizes.get(EMBEDDING) or (config.padded_vocab,)
    return stored if stored == config.vocab_size else config.padded_vocab


def _make_format(config: GPTConfig) -> formats.HubFormat:
    return formats.HubFormat(
        "Megatron",
        "GPTModel",
        _list_rules(config),
        (),
        prefix="",
        unused=(),
        describes="its arguments",
    )


def _split_heads(inner: ChunkedTensors, config: GPTConfig) -> files.TensorSource:
    """Tensors with separate queries, keys and values.

    Megatron interleaves them by group: its queries, then its key, then its value.
    """
    per, size = config.num_heads // config.kv_heads, config.head_size
    rows = {"q": (0, per), "k": (per, per + 1), "v": (per + 1, per + 2)}
    fused: dict[str, tuple[str, str]] = {}
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in inner.shapes().items():
        before, qkv, kind = name.partition(".linear_qkv.")
        if not (qkv and shape and shape[0] % ((per + 2) * size) == 0):
            entries[name] = (shape, dtype)
            continue
        for which, (first, last) in rows.items():
            own = f"{before}.linear_qkv[{which}].{kind}"
            fused[own] = (name, which)
            entries[own] = ((shape[0] // (per + 2) * (last - first), *shape[1:]), dtype)

    def read(name: str, slices: Sequence[slice]) -> torch.Tensor:
        if name not in fused:
            return inner.read(name, slices)
        whole, which = fused[name]
        first, last = rows[which]
        each = (last - first) * size
        start, stop, _ = slices[0].indices(entries[name][0][0])
        low, high = start // each, -(-stop // each)
        group = slice(low * (per + 2) * size, high * (per + 2) * size)
        found = inner.read(whole, (group, *slices[1:]))
        found = found.unflatten(0, (high - low, per + 2, size))[:, first:last].flatten(0, 2)
        return found[start - low * each : stop - low * each]

    return files.TensorSource(entries, read)


# --- the distributed optimizer's buckets

_HEAD = 16
"""The number of leading elements by which parameters are found."""


class _BucketPiece(NamedTuple):
    """A tensor-parallel rank's part of a parameter: consecutive boxes."""

    name: str
    boxes: tuple[CheckpointBox, ...]

    @property
    def numel(self) -> int:
        return sum(_count_elements(box) for box in self.boxes)

    def read(self, tensors: ChunkedTensors) -> torch.Tensor:
        """Its elements, flat."""
        parts = [tensors.read(self.name, [slice(*span) for span in box]) for box in self.boxes]
        return torch.cat([part.flatten() for part in parts])

    def head(self, tensors: ChunkedTensors) -> tuple[int, bytes]:
        """Its number of elements, and the first ones."""
        (start, stop), *rest = self.boxes[0]
        rows = -(-_HEAD // max(_count_elements(rest), 1))
        if _count_elements(self.boxes[0]) < _HEAD:
            return self.numel, _to_bytes(self.read(tensors)[:_HEAD])
        some = _BucketPiece(self.name, (((start, min(start + rows, stop)), *rest),))
        return self.numel, _to_bytes(some.read(tensors)[:_HEAD])


def _count_elements(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in box)


def _to_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


class _BucketPieces:
    """The parts of all parameters, which are found by their values."""

    def __init__(self, weights: ChunkedTensors, args: Mapping[str, Any]):
        self._weights = weights
        self._by_head: dict[tuple[torch.dtype, int, bytes], list[_BucketPiece]] = {}
        for name, shape in weights.sizes.items():
            floating = weights.dtypes[name].is_floating_point
            if name.endswith("router.expert_bias") or not (floating and shape and math.prod(shape)):
                continue  # not a parameter
            for piece in dict.fromkeys(
                _BucketPiece(name, own) for own in list_boxes(name, shape, args)
            ):
                key = (weights.dtypes[name], *piece.head(weights))
                self._by_head.setdefault(key, []).append(piece)
        kinds = {(dtype, numel) for dtype, numel, _ in self._by_head}
        self._kinds = sorted(kinds, key=lambda kind: kind[1], reverse=True)

    def at(self, masters: ChunkedTensors, key: str, start: int) -> list[_BucketPiece]:
        """The largest parts of parameters that the masters from `start` on round to."""
        end = masters.sizes[key][0]
        head = _read_flat(masters, key, start, min(start + _HEAD, end))
        for dtype, numel in self._kinds:
            near = self._by_head.get((dtype, numel, _to_bytes(head[:numel].to(dtype))), [])
            if not near or start + numel > end:
                continue
            whole = _read_flat(masters, key, start, start + numel).to(dtype)
            if found := [each for each in near if torch.equal(whole, each.read(self._weights))]:
                return found
        return []


def _read_flat(tensors: ChunkedTensors, key: str, start: int, stop: int) -> torch.Tensor:
    return tensors.read(key, (slice(start, stop),))


def read_state(opened: OpenedCheckpoint) -> dict[str, ChunkedTensors]:
    """The optimizer's state of a checkpoint by parameter, named as in `OpenedCheckpoint.state`.

    Raises:
        ValueError: buckets cannot be matched with parameters; all such are listed.
    """
    if not opened.buckets.sizes or opened.args is None:  # without args there is no model either
        return dict(opened.state)
    state, problems = _read_buckets(opened.buckets, opened.weights, opened.args)
    raise_problems(f"cannot read the Megatron checkpoint {opened.folder}", problems)
    return name_state(state)


def _read_buckets(
    buckets: ChunkedTensors, weights: ChunkedTensors, args: Mapping[str, Any]
) -> tuple[dict[str, ChunkedTensors], list[Problem]]:
    """The state by parameter of a checkpoint in Megatron-Core's form ``dp_reshardable``.

    A bucket is a concatenation of unnamed parameters, at multiples of 64 elements. They are found
    by their masters, which round to the parameters: the assignment of layers to stages and the
    order of modules, which differ by version, do not matter. Equal parameters must have the same
    moments.
    """
    pieces, problems = _BucketPieces(weights, args), []
    state: dict[str, ChunkedTensors] = {key: ChunkedTensors() for key in (*MOMENTS, "param")}
    taken: dict[_BucketPiece, tuple[str, int, int]] = {}
    for bucket in sorted({key.rpartition(".")[0] for key in buckets.sizes}):
        if lacks := [key for key in state if f"{bucket}.{key}" not in buckets.sizes]:
            got, wanted = f"no {', '.join(lacks)}", "Adam's two moments, and masters"
            problems.append(Problem(bucket, got, wanted))
            continue
        shapes = {buckets.sizes[f"{bucket}.{key}"] for key in state}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            got = f"shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}"
            problems.append(Problem(bucket, got, "the same length"))
            continue
        at = 0
        while at < buckets.sizes[f"{bucket}.param"][0]:
            group = pieces.at(buckets, f"{bucket}.param", at)
            if not group:
                got, wanted = f"no masters of a parameter from {at} on", "masters of the parameters"
                fix = "save it once in Megatron-LM with --dist-ckpt-optim-fully-reshardable"
                problems.append(Problem(bucket, got, wanted, fix))
                break
            place = (bucket, at, at + group[0].numel)
            known = next((taken[each] for each in group if each in taken), place)
            if not all(_is_same(buckets, key, place, known) for key in MOMENTS):
                got = f"other moments from {at} on than elsewhere of {group[0].name}"
                wanted = "the same for equal parameters"
                problems.append(Problem(bucket, got, wanted))
            piece = next((each for each in group if each not in taken), group[0])
            if piece not in taken:
                taken[piece] = place
                for key, into in state.items():
                    _add_piece(into, piece, buckets, f"{bucket}.{key}", at)
            at = -(-place[2] // 64) * 64
    for into in state.values():
        problems += into.close()
    return state, problems


def _is_same(
    buckets: ChunkedTensors, key: str, one: tuple[str, int, int], other: tuple[str, int, int]
) -> bool:
    if one == other:
        return True
    return torch.equal(
        *(_read_flat(buckets, f"{name}.{key}", *span) for name, *span in (one, other))
    )


def _add_piece(
    into: ChunkedTensors, piece: _BucketPiece, buckets: ChunkedTensors, key: str, start: int
) -> None:
    """Add a span of a bucket as boxes of a parameter."""
    for box in piece.boxes:
        stop, shape = start + _count_elements(box), tuple(b - a for a, b in box)

        def load(start=start, stop=stop, shape=shape) -> torch.Tensor:
            return _read_flat(buckets, key, start, stop).view(shape)

        first = tuple(a for a, _ in box)
        into.add(piece.name, buckets.dtypes[key], TensorChunk(first, shape, load, Path(METADATA)))
        start = stop


# --- in


_WITHOUT = "save it in Megatron-LM with --no-save-optim, to read the parameters only"


@dataclass(frozen=True)
class LoadedTensors:
    """The tensors of a Megatron checkpoint, each a tree like the parameters.

    Attributes:
        params: in the config's dtype.
        mu: running means of gradients, in float32; None: the checkpoint has none.
        nu: running means of their squares.
        masters: in float32; None: the parameters are float32.
    """

    params: dict
    mu: dict | None = None
    nu: dict | None = None
    masters: dict | None = None


def load_tensors(opened: OpenedCheckpoint, config: GPTConfig) -> LoadedTensors:
    """All tensors of a checkpoint, whole. Moments of experts' balancing biases are zeros.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape; all offenders are listed.
    """
    found, form = _make_layouts(config, _count_rows(opened, config)), _make_format(config)
    local = reader.local_on_mesh(config, None, None)

    def read(source: ChunkedTensors, kind: GPTConfig, chosen: list[formats.HubLayout]) -> dict:
        split = _split_heads(source, config)
        stored = reader.match(form, config, chosen, split)
        return reader.read_layouts(chosen, stored, kind, split, local)

    params = read(opened.weights, config, found)
    state = read_state(opened)
    if not state:
        return LoadedTensors(params)
    missing = [
        Problem(f"optimizer.state.{name}", "nothing", "it beside the other moment")
        for name in ("exp_avg", "exp_avg_sq")
        if name not in state
    ]
    others = sorted(state.keys() - {"exp_avg", "exp_avg_sq", "master"})
    missing += [
        Problem(f"optimizer.state.{name}", "an optimizer's state", "Adam's", _WITHOUT)
        for name in others
    ]
    raise_problems("cannot read the optimizer's state", missing)
    wide = dataclasses.replace(config, dtype="float32")
    trained = [layout for layout in found if not layout.rule.paths[0].endswith(BALANCE)]
    kept = {}
    for name, source in state.items():
        made = read(source, wide, trained)
        rest = [layout for layout in found if layout.rule.paths[0].endswith(BALANCE)]
        for path in (part.path for layout in rest for part in layout.parts):
            tree.put_leaf(made, path, torch.zeros_like(_find_leaf(params, path)))
        kept[name] = made
    return LoadedTensors(params, kept["exp_avg"], kept["exp_avg_sq"], kept.get("master"))


def _find_leaf(params: Any, path: str) -> torch.Tensor:
    for key in path.split("/"):
        params = params[key]
    return params


# --- out


@dataclass(frozen=True)
class SavedTensors:
    """The contents of a checkpoint that `save_tensors` writes.

    Attributes:
        config: the architecture.
        params: leaves that are read when they are indexed, as of `checkpoint.stored_params`.
        state: trees of optimizer state by Megatron's names (exp_avg, exp_avg_sq, param), or none.
        common: args, iteration, opt_param_scheduler, ... of ``common.pt``.
    """

    config: GPTConfig
    params: Any
    state: Mapping[str, Any]
    common: Mapping[str, Any]


def save_tensors(folder: Path, saving: SavedTensors) -> None:
    """Write a ``torch_dist`` checkpoint into an empty folder, one tensor at a time.

    Megatron-Core loads it with any parallelism, and any optimizer.
    """
    config = saving.config
    found = _make_layouts(config)
    stacked = "dense" not in config.stacks
    with (folder / _SHARD).open("wb") as stream:
        writer = _ShardFile(stream)
        _write_tree(writer, "", config, found, saving.params, stacked)
        trained = [layout for layout in found if not layout.rule.paths[0].endswith(BALANCE)]
        for name, values in saving.state.items():
            _write_tree(writer, f"optimizer.state.{name}.", config, trained, values, stacked)
        for key in _list_extra_states(config, found, stacked):
            writer.add_bytes(key, [None])
        stream.flush()
        os.fsync(stream.fileno())
    with (folder / METADATA).open("wb") as stream:
        pickle.dump(writer.metadata(), stream)
    torch.save(dict(saving.common), folder / COMMON)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
             "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")


_SHARD = "__0_0.distcp"


class _ShardFile:
    """A file of shards, and their metadata."""

    def __init__(self, stream: Any):
        self._stream, self._entries, self._places = stream, {}, {}

    def add(
        self, key: str, tensor: torch.Tensor, start: Sequence[int], whole: Sequence[int]
    ) -> None:
        """Write a shard of the tensor `key`, which begins at `start` of its shape `whole`."""
        known = self._entries.setdefault(
            key,
            dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=tensor.dtype), torch.Size(whole), []
            ),
        )
        index = dcp.MetadataIndex(key, torch.Size(start), len(known.chunks))
        known.chunks.append(dcp.ChunkStorageMetadata(torch.Size(start), tensor.shape))
        self._places[index] = self._dump(tensor)

    def add_bytes(self, key: str, value: Any) -> None:
        """Write an object."""
        self._entries[key] = dcp.BytesStorageMetadata()
        self._places[dcp.MetadataIndex(key)] = self._dump(value)

    def _dump(self, value: Any) -> Any:
        kept = io.BytesIO()
        torch.save(value, kept)
        start = self._stream.tell()
        self._stream.write(kept.getbuffer())
        return filesystem._StorageInfo(_SHARD, start, kept.getbuffer().nbytes)

    def metadata(self) -> dcp.Metadata:
        """That of all shards."""
        return dcp.Metadata(self._entries, None, self._places, dcp.StorageMeta())


def _write_tree(
    writer: _ShardFile,
    prefix: str,
    config: GPTConfig,
    found: list[formats.HubLayout],
    params: Any,
    stacked: bool,
) -> None:
    """Write a tree like the parameters, layer by layer."""
    for name, tensor in _fuse_heads(config, _name_tensors(found, params)):
        for each in _list_norm_names(name):
            key, start, lead = _place_shard(each, config, stacked)
            made = tensor.reshape((*[1] * len(lead), *tensor.shape)).clone()
            whole = (*lead, *tensor.shape)
            writer.add(prefix + key, made, (*start, *[0] * tensor.dim()), whole)


def _name_tensors(
    found: list[formats.HubLayout], params: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    for layout, index in formats.tensors(found):
        leaves = [_find_leaf(params, part.path)[index if index else ...] for part in layout.parts]
        yield layout.name(index), layout.to_theirs(leaves)


def _fuse_heads(
    config: GPTConfig, named: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Fuse a layer's queries, keys and values, interleaved by group."""
    waiting: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named:
        if "linear_qkv[" not in name:
            yield name, tensor
            continue
        fused = name[: name.index("[")] + name[name.index("]") + 1 :]
        kept = waiting.setdefault(fused, [])
        kept.append(tensor.unflatten(0, (config.kv_heads, -1, config.head_size)))
        if len(kept) == 3:
            yield fused, torch.cat(waiting.pop(fused), 1).flatten(0, 2)


_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)$")
_EXPERT_NUMBER = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.*)$")


def _place_shard(
    name: str, config: GPTConfig, stacked: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The key of a tensor in ``torch_dist``; indices and sizes of its stacked dims."""
    place: list[int] = []
    sizes: list[int] = []
    if stacked and (match := _NUMBER.match(name)):
        place, sizes, name = [int(match[2])], [config.num_layers], match[1] + match[3]
    if (match := _EXPERT_NUMBER.match(name)) and config.moe is not None:
        place.append(int(match[2]))
        sizes.append(config.moe.num_experts)
        name = f"{match[1]}experts.{match[3]}"
    return name, tuple(place), tuple(sizes)


_NORMS = MappingProxyType(
    {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
        ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
        ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
    }
)


def _list_norm_names(name: str) -> list[str]:
    """The names of a tensor; a norm has also that in the layer after it.

    Local and Transformer Engine's layers load different ones; norms are small.
    """
    others = [name.replace(part, new) for part, new in _NORMS.items() if part in name]
    return [name, *others]


def _list_extra_states(
    config: GPTConfig, found: list[formats.HubLayout], stacked: bool
) -> list[str]:
    """Keys of empty FP8 states, which Megatron needs to load."""
    modules: dict[str, None] = {}
    for layout, index in formats.tensors(found):
        name, _, kind = re.sub(r"\[\w\]", "", layout.name(index)).rpartition(".")
        if kind == "weight" and name.rpartition(".")[2].startswith(("linear_", "eh_proj")):
            modules[name] = None
            if name.endswith(".linear_proj"):
                modules[name.replace("linear_proj", "core_attention")] = None
    keys = []
    for name in modules:
        key, place, sizes = _place_shard(f"{name}.", config, stacked)
        places = [".".join(map(str, each or (end,))) for each, end in ((place, 0), (sizes, 1))]
        keys.append(f"{key}_extra_state/shard_{'_'.join(places)}")
    return keys
