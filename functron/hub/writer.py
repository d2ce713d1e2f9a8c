"""Write our parameters as Hugging Face folders, one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from functron.checkpoint.folder import sync
from functron.core import tree
from functron.core.errors import Problem, local_path, nearest, public, raise_problems, refuse
from functron.hub.files import (
    ENTRY,
    INDEX,
    SINGLE,
    Planned,
    TensorSource,
    check_method,
    choose_quantised,
    decode,
    describe_scales,
    encode,
    exists,
    index_of,
    open_folder,
    plan,
    write_entry,
    write_files,
)
from functron.hub.format import HubFormat, HubLayout, LeafPart, layouts_of, tensors
from functron.hub.reader import (
    CONFIG,
    format_for,
    format_of,
    read_table,
    still_describes,
    write_config,
)
from functron.models import lora, mup
from functron.models.config import GPTConfig
from functron.models.family import Config, family_of
from functron.nn.moe.room import find_part
from functron.spmd import BoundMesh, Mesh, P, gather
from functron.spmd.spec import (
    Uneven,
    as_entry,
    dim_axes,
    global_shape,
    is_spec,
    num_shards,
)

MAX_SHARD_BYTES = 5_000_000_000

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
          "float64": torch.float64}  # fmt: skip

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of a tokenizer."""

COMPANIONS = ("generation_config.json", *TOKENIZER_FILES, "preprocessor_config.json")
"""Files beside the weights: of the tokenizer, generation and preprocessing."""


@public
def save(
    path: str | Path,
    config: Config,
    params: tree.Tree,
    *,
    specs: tree.Tree | None = None,
    mesh: Mesh | BoundMesh | None = None,
    like: str | Path | None = None,
    model_type: str | None = None,
    dtype: str | None = None,
    quantise: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers, vLLM and TensorRT-LLM load.

    The folder appears under its name once it is complete. Tied weights are written once, and the
    vocabulary without padding.

    On a bound mesh every rank calls it, with a path and `like` that all of them see; rank 0 writes.
    Collectives: one all-gather per tensor and axis that shards it, so that each rank needs memory
    for one whole tensor beside its shards (for one of each layer, if layers are sharded; with
    `GPTConfig.fused_projections`, for a layer's fused ones), and two all-reduces of a number. A
    failure to write is raised on all ranks.

    Args:
        path: a folder that does not exist; its parents are made.
        params: as its family's ``defs(config)``: global values, or this rank's shards. Low-rank
            adapters (`functron.lora`) are merged, and muP's factors folded (`mup.folded`).
        specs: their specs, a prefix tree; needed on a bound mesh.
        like: the folder that the model was loaded from, whose tokenizer, config.json and generation
            settings are copied.
        model_type: the format; None: that of `like`, or the first that has such models.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``; None: the parameters'. Biases
            that balance routers are always float32; so are decays and steps of state spaces,
            unless a dtype is given.
        quantise: write projections of a decoder's attention, feed-forward layers and experts in FP8
            (E4M3): ``fp8-block`` with scales of 128x128 blocks, as DeepSeek-V3; ``fp8-row`` with
            one per output, as compressed-tensors; see `functron.hub.files`. None: no.
        max_shard_bytes: the most data in one file; a larger tensor has its own.

    Raises:
        ValueError: no format has such models, the parameters are not those of the config, or `path`
            exists or cannot be written; all offenders are listed.
    """
    path = local_path(path)
    split = isinstance(mesh, BoundMesh)
    params, specs = lora.merge(params, split=split), lora.plain(specs)
    if isinstance(config, GPTConfig):
        config, params = mup.folded(config, params)
    kept = read_table(like) if like is not None else None
    table = {"model_type": model_type} if model_type else kept
    form = format_of(table) if table is not None else format_for(config)
    _check_arguments(dtype, max_shard_bytes)
    if quantise is not None:
        check_method(quantise)
        if not isinstance(config, GPTConfig):
            got, fix = family_of(config).title, "export it as it is"
            refuse(f"cannot export as {quantise}", "model", got, "a decoder", fix)
    flat = _match_specs(config, params, specs, mesh)
    kind = DTYPES[dtype] if dtype else tree.leaves(params)[0].dtype
    name = str(kind).removeprefix("torch.")
    entries = write_config(config, form, kept=kept, dtype=name)
    found = layouts_of(form, config, form.namings(config, entries)[0])
    listed = _list_tensors(config, found, kind, all_of_it=dtype is not None)
    source = None
    if kept is not None and like is not None and form.surplus is not None:
        same = still_describes(kept, config, form)
        source = decode(open_folder(like), kept, f"{like}/{CONFIG}") if same else None
    surplus = _find_surplus(form, config, source, kind)
    listed += [(name, kind, shape) for name, (shape, _) in surplus.items()]
    converted: set[str] = set()
    if quantise is not None:
        converted = choose_quantised(quantise, found)
        entries[ENTRY] = write_entry(quantise, converted, [row[0] for row in listed])
        listed = list(_add_scales(listed, converted, quantise))
    export = _Export(Path(path), plan(listed, max_shard_bytes), entries, like, mesh)
    leaves = _Leaves(params, flat, mesh)

    def gather_all() -> Iterator[tuple[str, torch.Tensor]]:
        for layout, index in tensors(found):
            yield layout.name(index), leaves.whole(layout, index)
        for name, (_, read) in surplus.items():
            yield name, read()

    with torch.no_grad():
        export.run(gather_all(), partial(_encode_some, quantise or "", converted))


def _encode_some(
    method: str, converted: set[str], named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name, where those in `converted` are in 8 bits, followed by their scales."""
    for name, whole in named:
        if name not in converted:
            yield name, whole
            continue
        values, scales = encode(method, name, whole)
        yield name, values
        yield describe_scales(method, name, tuple(whole.shape))[0], scales


def _list_tensors(
    config: Config, found: Sequence[HubLayout], kind: torch.dtype, *, all_of_it: bool
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    defs = family_of(config).defs(config)
    leaves = dict(zip(tree.paths(defs), tree.leaves(defs), strict=True))
    usual = min((d.dtype for d in leaves.values()), key=lambda dtype: dtype.itemsize)
    kinds = {
        path: d.dtype if d.balance or (d.dtype != usual and not all_of_it) else kind
        for path, d in leaves.items()
    }
    return [
        (layout.name(index), kinds[layout.parts[0].path], layout.shape)
        for layout, index in tensors(found)
    ]


def _add_scales(
    listed: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], converted: set[str], method: str
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """The tensors of a file, where those in `converted` are in 8 bits, followed by their scales."""
    for name, dtype, shape in listed:
        if name not in converted:
            yield name, dtype, shape
            continue
        yield name, torch.float8_e4m3fn, shape
        scales, sizes = describe_scales(method, name, shape)
        yield scales, torch.float32, sizes


def _find_surplus(
    form: HubFormat, config: Config, source: TensorSource | None, kind: torch.dtype
) -> Mapping[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """The shape of each tensor of `Surplus` that is stored, and what reads it, by name."""
    if form.surplus is None:
        return {}
    found = {
        name: (shape, partial(torch.full, shape, value, dtype=kind))
        for name, (shape, value) in form.surplus.constants(config).items()
    }
    if source is None:
        return found
    for name, (shape, _) in source.shapes().items():
        if form.surplus.holds(config, name):
            whole = tuple(slice(0, size) for size in shape)
            found[form.surplus.name(name)] = shape, partial(source.read, name, whole)
    return found


def to_tensors(
    config: Config, params: tree.Tree, model_type: str | None = None
) -> dict[str, torch.Tensor]:
    """A state dict with Hugging Face's names from our tree of global values.

    Args:
        params: parameters, or gradients of them.
        model_type: the format; None: the first that has such models.

    Raises:
        ValueError: the format has no such models; all offenders are listed.
    """
    form = format_of({"model_type": model_type}) if model_type else format_for(config)
    rules = form.namings(config, write_config(config, form))[0]
    leaves = _Leaves(params, _match_specs(config, params, None, None), None)
    return {
        layout.name(index): leaves.whole(layout, index)
        for layout, index in tensors(layouts_of(form, config, rules))
    }


class _Leaves:
    """Parameters read row by row; leaves that several tensors share, once per layer."""

    def __init__(self, params: tree.Tree, flat: dict[str, P], mesh: Mesh | BoundMesh | None):
        self._leaves = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
        self._flat, self._mesh = flat, mesh
        self._layer: tuple[int, ...] = ()
        self._shared: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def whole(self, layout: HubLayout, index: tuple[int, ...]) -> torch.Tensor:
        """One Hugging Face tensor, on every rank."""
        if index[:1] != self._layer:
            self._layer = index[:1]
            self._shared.clear()
        return layout.to_theirs([self._read_row(part, index) for part in layout.parts])

    def _read_row(self, part: LeafPart, index: tuple[int, ...]) -> torch.Tensor:
        key = part.path, index
        if key in self._shared:
            return self._shared[key]
        row = _gather_row(self._leaves[part.path], self._flat[part.path], index, self._mesh)
        if part.joined:
            self._shared[key] = row
        return row


def _gather_row(
    leaf: torch.Tensor, spec: P, index: tuple[int, ...], mesh: Mesh | BoundMesh | None
) -> torch.Tensor:
    """Row `index` of the stacked dims of a sharded leaf."""
    if not isinstance(mesh, BoundMesh):
        return leaf[index]
    # Where a stacked dim is sharded, each rank gives its row at the owner's local index, and the
    # owner's is picked.
    axes = dim_axes(spec, leaf.dim())
    entries = [*spec, *[None] * (leaf.dim() - len(spec))]
    owners = []
    for dim, wanted in enumerate(index):
        entries[dim] = as_entry(axes[dim])  # as many rows as ranks
        entry, ranks = spec[dim] if dim < len(spec) else None, [mesh[name] for name in axes[dim]]
        real = entry.size if isinstance(entry, Uneven) else None
        real = leaf.shape[dim] * math.prod(ranks) if real is None else real
        owner, place = find_part(wanted, real, ranks)
        leaf = leaf.narrow(dim, place, 1)
        owners.append(owner)
    if any(num_shards(names, mesh) > 1 for names in axes):
        leaf = gather(leaf.contiguous(), P(*entries), mesh)
    return leaf[tuple(owners)]


def _check_arguments(dtype: str | None, max_shard_bytes: int) -> None:
    problems = []
    if dtype is not None and dtype not in DTYPES:
        fix = nearest(str(dtype), DTYPES)
        problems.append(Problem("dtype", repr(dtype), "a dtype of weights", fix))
    if max_shard_bytes < 1:
        problems.append(Problem("max_shard_bytes", str(max_shard_bytes), "at least 1"))
    raise_problems("cannot export the model", problems)


def _match_specs(
    config: Config, params: tree.Tree, specs: tree.Tree | None, mesh: Mesh | BoundMesh | None
) -> dict[str, P]:
    """The spec of every leaf by path; refuses parameters that are not the config's."""
    defs = family_of(config).defs(config)
    leaves = tree.same_structure(defs, params, names=("the config's model", "the parameters"))
    if isinstance(mesh, BoundMesh) and specs is None:
        title, fix = "cannot export from a bound mesh", "pass those of the parameters"
        refuse(title, "specs", None, "the parameters' specs", fix)
    flat: Sequence[P | None] = (
        tree.broadcast_prefix(specs, defs, is_leaf=is_spec, what="specs")
        if isinstance(mesh, BoundMesh)
        else [P()] * len(leaves)
    )
    found, problems = {}, []
    rows = zip(tree.paths(defs), tree.leaves(defs), leaves, flat, strict=True)
    for path, d, leaf, spec in rows:
        found[path] = spec = spec if spec is not None else P()
        shape = tuple(leaf.shape)
        whole = global_shape(shape, spec, mesh) if isinstance(mesh, BoundMesh) else shape
        if whole != tuple(d.shape):
            wanted = f"{list(d.shape)}, as the config says"
            problems.append(Problem(path, str(list(whole)), wanted))
    raise_problems("these are not the parameters of the config", problems)
    return found


class _Export:
    """The files of an export, which rank 0 writes.

    A failure is raised on all ranks at the end: until then they wait for rank 0 in collectives.
    """

    def __init__(
        self,
        target: Path,
        planned: Sequence[Planned],
        entries: dict,
        like: str | Path | None,
        mesh: Mesh | BoundMesh | None,
    ):
        self._target, self._planned, self._entries = target, planned, entries
        self._like = None if like is None else Path(like)
        self._mesh = mesh if isinstance(mesh, BoundMesh) else None
        self._folder = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
        self._main = self._mesh is None or self._mesh.rank == 0
        self._failure: Exception | None = None

    def run(
        self,
        named: Iterator[tuple[str, torch.Tensor]],
        encoded: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        """Make the folder under a temporary name, write what is `encoded` of `named` tensors, for
        which all ranks gather these, and the other files; then rename it.
        """
        try:
            self._attempt(self._prepare)
            self._agree()
            self._attempt(lambda: write_files(self._folder, self._planned, encoded(named)))
            for _ in named:
                pass  # of other ranks, and where writing failed
            self._attempt(self._finish)
            self._agree()
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        if self._main:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self._main or self._failure is not None:
            return
        try:
            action()
        except (OSError, ValueError) as error:
            self._failure = error
            self._remove()

    def _agree(self) -> None:
        failed = self._failure is not None
        if self._mesh is not None:
            flag = torch.tensor(int(failed), device=self._mesh.device_type)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            failed = bool(flag)
        if not failed:
            return
        title = f"cannot export the model to {self._target}"
        if self._failure is None:
            refuse(title, str(self._target), "a failure on rank 0", "no failure", "see its message")
        if not isinstance(self._failure, OSError):
            raise self._failure
        got = self._failure.strerror or str(self._failure)
        fix = "choose a folder with free space that this user may write to"
        refuse(title, str(self._failure.filename or self._target), got, "a new file", fix)

    def _prepare(self) -> None:
        if os.path.lexists(self._target):
            fix = "choose another"
            refuse(
                "cannot export the model", str(self._target), "an existing path", "a new one", fix
            )
        self._folder.mkdir(parents=True)

    def _finish(self) -> None:
        write_json(self._folder / CONFIG, self._entries)
        if [file.name for file in self._planned] != [SINGLE]:
            write_json(self._folder / INDEX, index_of(self._planned))
        if self._like is not None:
            copy_companions(self._like, self._folder)
        for place in (self._folder, self._target.parent):
            sync(place)
            if place == self._folder:
                self._folder.rename(self._target)


def write_json(path: Path, table: dict) -> None:
    """Write JSON as transformers does: indented, with a newline at the end."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(table, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the `COMPANIONS` that `source` has into `target`, and return their names."""
    found = [name for name in COMPANIONS if exists(source / name)]
    for name in found:
        shutil.copyfile(source / name, target / name)
        sync(target / name)
    return found
