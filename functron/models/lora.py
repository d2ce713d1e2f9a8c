"""LoRA: low-rank additions to frozen matrices, as a transformation of the tree of ParamDefs.

"LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021): a matrix W is kept as it is,
and x W becomes x W + (alpha / rank) (x A) B with A ``[in, rank]`` random, B ``[rank, out]`` zero,
and only these trained.

Adapters stand beside the matrix in a layer's parameters: ``{"w", "b"?}`` becomes ``{"w", "b"?,
"lora": Adapter(a, b, scale)}``. So W keeps its path, its initial numbers and its place in
checkpoints and other formats: a checkpoint without adapters is a part of one with them. The scale
is a tensor, frozen as W is, so that parameters can be used and merged without a configuration;
folding it into the initial A would be another optimization problem under Adam.

Axes: A has those of W's inputs and B those of its outputs. Where W's columns are split over tp, so
are B's, and every rank computes x A; where its rows are, so are A's, and (x A) B is a part of the
same sum as x W. No collective is added, but with DoRA, where the lengths of columns whose rows are
split are summed over ranks: two numbers a column. Each expert of a mixture has its own A and B,
stacked as the experts are and split with them: (x A) B are two grouped products of the rows that it
has.

Linear layers of a module as it is have ``{"weight", "bias"?}`` and are adapted alike, in the layout
of their matrix: of one ``[out, in]``, as of torch's, `a` is ``[out, rank]`` and begins as zero, and
`b` is ``[rank, in]``, so that scale a b is what is added to any matrix.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.nn import Adapter
from functron.nn.layers import find_growth, find_lengths
from functron.nn.packed import BLOCK, PER_BYTE, PackedMatrix, as_numbers
from functron.nn.packed import pack as pack_matrix
from functron.spmd.params import Constant, Normal, ParamDef, Width, zeros

BaseKind = Literal["plain", "mxfp4"]
LORA = "lora"
"""The name of an `Adapter` among the parameters of its layer."""

_STACKED = ("layers", "expert")  # of leading dims, which count matrices
_STREAM = "embed"


@dataclass(frozen=True)
class LoRA:
    """Which matrices get low-rank additions, and their rank and scale.

    Attributes:
        rank: of the additions.
        alpha: they are multiplied by ``alpha / rank``.
        targets: patterns of linear layers' paths, in which ``*`` stands for anything:
            ``blocks/attention/q``, ``blocks/mlp/*``. Those of a module as it is are names, or their
            last parts: ``q_proj``, ``layers.0.*``; the usual targets are all in its layers.
        dora: the lengths of columns are learned apart (`functron.nn.Adapter.magnitude`).
        base: "mxfp4": the matrices are kept in 4 bits (QLoRA; `functron.nn.packed`).
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("blocks/attention/*", "blocks/mlp/*")
    dora: bool = False
    base: BaseKind = "plain"

    def problems(self, defs: tree.Tree = None, path: str = "lora") -> list[Problem]:
        """Everything wrong with it, and with it for a model with these defs."""
        found = []
        if self.rank < 1:
            found.append(Problem(f"{path}_rank", str(self.rank), "at least 1", "set it to 8"))
        if not 0 < self.alpha < math.inf:
            fix = "twice the rank is usual"
            found.append(Problem(f"{path}_alpha", str(self.alpha), "a positive number", fix))
        if not self.targets:
            fix = "leave it out for all linear layers of blocks"
            found.append(Problem(f"{path}_targets", "nothing", "patterns of linear layers", fix))
        if any(d.width != Width() for d in tree.leaves(defs)):
            got, wanted = "adapters of a model with gpt.mup_base_dim", "none: they have no rule"
            fix = "adapt the model without: functron convert run:RUN hf:MODEL folds it"
            found.append(Problem(f"{path}_rank", got, wanted, fix))
        layers, others = _split_matrices(defs)
        if tree.leaves(defs) and not layers:
            got, fix = "adapters of a model without linear layers", "train all parameters"
            found.append(Problem(f"{path}_rank", got, "some to adapt", fix))
        if _is_module(defs):
            fix = "leave it out, or take a family that functron knows: --model hf:PATH"
            wanted = "plain additions to layers of a module as it is"
            more = {"dora": "DoRA" * self.dora, "base": self.base.removeprefix("plain")}
            found += [
                Problem(f"{path}_{name}", got, wanted, fix) for name, got in more.items() if got
            ]
        match = _make_match(defs, self)
        for target in self.targets if layers else ():
            chosen = [place for place in layers if match(place, target)]
            routed = [x for x in others if others[x] and fnmatch.fnmatchcase(x, target)]
            if routed:
                got = f"{target!r}, which names {', '.join(routed)}"
                wanted = "layers other than routers and what stands between them and experts"
                fix = "leave it out"
                if chosen:
                    fix = f"write {','.join(_patterns(chosen, others))} for the other layers"
                found.append(Problem(f"{path}_targets", got, wanted, fix))
            more = "DoRA" if self.dora else "a base in 4 bits" if self.base != "plain" else ""
            if more and (experts := _list_experts(defs, chosen)):
                got = f"{target!r}, which names {', '.join(experts)}"
                fix = f"leave it out, or {more}"
                found.append(Problem(f"{path}_targets", got, f"no experts with {more}", fix))
            if not chosen and not routed:
                # of each of a module's layers the same names
                names = {x.rpartition("/")[2]: None for x in layers} if _is_module(defs) else layers
                fix = nearest(target, names)
                found.append(Problem(f"{path}_targets", repr(target), "a linear layer", fix))
        packs = self.base != "plain" and not _is_module(defs)
        return found + (self._find_unpackable(defs, path) if packs else [])

    def _find_unpackable(self, defs: tree.Tree, path: str) -> list[Problem]:
        """Matrices that 4-bit numbers have no place in."""
        found = []
        for place, w, routed in _find_matrices(defs):
            chosen = any(fnmatch.fnmatchcase(place, target) for target in self.targets)
            if routed or not chosen or num_inputs(w) is None:
                continue
            if w.shape[-1] % BLOCK:
                got = f"{self.base} of {place}, whose last dim is {w.shape[-1]}"
                wanted, fix = f"a last dim that {BLOCK} divides", "leave it out of the targets"
                found.append(Problem(f"{path}_base", got, wanted, fix))
            if w.pieces:
                got, fix = f"{self.base} of {place}, which is joined", "leave fused_projections out"
                found.append(Problem(f"{path}_base", got, "matrices that are apart", fix))
        return found


_ADDITIONS = Need(lambda lora: lora.rank > 0, "low-rank additions (LoRA)", "set lora_rank")


@shows_differences
@dataclass(frozen=True)
class LoRAConfig:
    """The low-rank additions that a run trains in place of all parameters, if any.

    Attributes:
        rank: of low-rank additions to frozen matrices (LoRA), which alone are trained then; 0:
            train all parameters.
        alpha: they are multiplied by lora_alpha / lora_rank.
        targets: the linear layers that have them: patterns of paths, separated by commas; of a
            module as it is, of names or their last parts, such as q_proj,v_proj.
        dora: they turn the columns of matrices, whose lengths are learned apart (DoRA).
        base: keep the matrices that they are added to in 4 bits: mxfp4 (QLoRA); plain: as they are.
    """

    rank: int = setting(0, "shapes step", short="lora_rank")
    alpha: float = setting(LoRA.alpha, "step", short="lora_alpha", need=_ADDITIONS)
    targets: str = setting(
        ",".join(LoRA.targets), "shapes step", short="lora_targets", need=_ADDITIONS
    )
    dora: bool = setting(False, "shapes step", short="lora_dora", need=_ADDITIONS)
    base: BaseKind = setting("plain", "shapes step", short="lora_base", need=_ADDITIONS)

    @property
    def adapters(self) -> LoRA | None:
        """The additions; None where all parameters are trained."""
        if not self.rank:
            return None
        targets = (target.strip() for target in self.targets.split(","))
        return LoRA(self.rank, self.alpha, tuple(filter(None, targets)), self.dora, self.base)


def lora_defs(defs: tree.Tree, lora: LoRA) -> tree.Tree:
    """`defs` with an `Adapter` of ParamDefs in each linear layer that `lora` targets.

    Linear layers are those of `nn.linear_defs`, ``{"w", "b"?}``, from or to the residual stream,
    stacked or not; in layers of experts those of the experts and of the shared one, and targets
    that name others there are refused. (`unadapted` lists other matrices that targets name and that
    get no `Adapter`.) `a` begins as N(0, 1 / in), so that x a varies about as x does, `b` as zero,
    so that the model begins as it was.

    Raises:
        ValueError: a target names no linear layer, or a router, or the rank or alpha is none; all
            offenders are listed, with the nearest layer.
    """
    raise_problems("cannot adapt this model", lora.problems(defs))
    return _add_adapters(defs, lora)


def drop_routed(targets: Iterable[str], defs: tree.Tree) -> list[str]:
    """Targets that adapt the same layers as these did, and name no router.

    Runs from before such targets were refused have some, and meant what could be adapted: experts,
    which may be by now, were not.
    """
    layers, others = _split_matrices(defs)
    experts = _list_experts(defs, [*layers, *others])
    found: dict[str, None] = {}
    for target in targets:
        chosen = [x for x in fnmatch.filter(layers, target) if x not in experts]
        routed = any(others[place] for place in fnmatch.filter(others, target))
        own = _patterns(chosen, [*others, *experts]) if routed and chosen else [target]
        found |= dict.fromkeys(own)
    return list(found)


def _list_experts(defs: tree.Tree, layers: Iterable[str]) -> list[str]:
    """Those of these layers that are of experts, each its own."""
    every = {each.path for each in _find_matrices(defs) if _STACKED[1] in each.w.axes}
    return [path for path in layers if path in every]


def unadapted(defs: tree.Tree, lora: LoRA) -> list[str]:
    """The paths of matrices that targets of `lora` name and that get no `Adapter`."""
    _, names = _split_matrices(defs)
    match = _make_match(defs, lora)
    return [x for x in names if any(match(x, target) for target in lora.targets)]


def _is_module(defs: tree.Tree) -> bool:
    """Whether its linear layers are those of a module as it is."""
    return any(each.inputs is not None for each in _find_matrices(defs))


def _make_match(defs: tree.Tree, lora: LoRA) -> Callable[[str, str], bool]:
    """``(path, target)`` to whether the target names the linear layer."""
    if not _is_module(defs):
        return fnmatch.fnmatchcase
    usual = lora.targets == LoRA.targets

    def match(path: str, target: str) -> bool:
        if usual:
            return any(part.isdigit() for part in path.split("/"))
        name = "." + path.replace("/", ".")
        return fnmatch.fnmatchcase(name, f"*.{target.replace('/', '.')}")

    return match


def _add_adapters(defs: tree.Tree, lora: LoRA) -> tree.Tree:
    matrices, match = {each.path: each.w for each in _find_matrices(defs)}, _make_match(defs, lora)
    layers, _ = _split_matrices(defs)
    chosen = {x for x in layers if any(match(x, each) for each in lora.targets)}

    def adapted(entry: Any, path: str) -> Any:
        if not isinstance(entry, Mapping):
            return entry
        layer = {name: adapted(part, _under(path, name)) for name, part in entry.items()}
        if path not in chosen:
            return layer
        w = matrices[path]
        added = {LORA: _adapter(w, lora)}
        return {**layer, **({"w": _pack_def(w)} if lora.base != "plain" else {}), **added}

    return adapted(defs, "")


def _pack_def(w: ParamDef) -> PackedMatrix:
    """The defs of a packed matrix; its numbers come from those of the model (`pack`)."""
    parts = (
        ParamDef((*w.shape[:-1], w.shape[-1] // size), w.axes, zeros, torch.uint8, decay=False)
        for size in (PER_BYTE, BLOCK)
    )
    return PackedMatrix(*parts)


def pack(params: tree.Tree) -> tree.Tree:
    """Parameters whose matrices with adapters are in 4 bits; packed ones stay.

    Args:
        params: global values or this rank's shards, whose last dims are multiples of 32.
    """
    if not isinstance(params, Mapping):
        return params
    made = {name: pack(entry) for name, entry in params.items() if name != LORA}
    if LORA not in params:
        return made
    w = params["w"] if isinstance(params["w"], PackedMatrix) else pack_matrix(params["w"])
    return {**made, "w": w, LORA: params[LORA]}


class _Matrix(NamedTuple):
    """A matrix among the parameters, the path of its layer, and whether it can be adapted.

    Routers, and what stands between them and experts (`routed`), multiply their matrices
    themselves, and would not see an adapter.
    """

    path: str
    w: ParamDef
    routed: bool

    @property
    def is_linear(self) -> bool:
        """Whether it is that of a linear layer that can be adapted."""
        return self.inputs is not None or (not self.routed and num_inputs(self.w) is not None)

    @property
    def inputs(self) -> int | None:
        """The dim of the inputs of a module's linear layer; None: it is not of a module."""
        return getattr(self.w.init, "inputs", None)


def _find_matrices(defs: tree.Tree, path: str = "", routed: bool = False) -> Iterator[_Matrix]:
    if not isinstance(defs, Mapping):
        return
    if isinstance(w := defs.get("w"), ParamDef):
        yield _Matrix(path, w, routed)
    weight = defs.get("weight")
    if isinstance(weight, ParamDef) and getattr(weight.init, "inputs", None) is not None:
        yield _Matrix(path, weight, False)
    for name, entry in defs.items():
        inside = routed or ("router" in defs and name not in ("shared", "experts"))
        yield from _find_matrices(entry, _under(path, name), inside)


def linear_layers(defs: tree.Tree) -> list[str]:
    """The paths of all layers that `lora_defs` can adapt."""
    return _split_matrices(defs)[0]


def _split_matrices(defs: tree.Tree) -> tuple[list[str], dict[str, bool]]:
    """Paths of linear layers, and of other matrices, with whether these are routed or route."""
    found = [*_find_matrices(defs)]
    others = {each.path: each.routed for each in found if not each.is_linear}
    return [each.path for each in found if each.is_linear], others


def _patterns(layers: Iterable[str], others: Iterable[str]) -> list[str]:
    """Patterns of these layers that name none of the others."""
    found = {}
    for place in layers:
        beside = place.rpartition("/")[0] + "/*"
        found[place if fnmatch.filter(others, beside) else beside] = None
    return list(found)


def _under(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def num_inputs(w: ParamDef) -> int | None:
    """How many dims of a matrix, after the stacked ones, are its inputs'; None: not linear."""
    axes = w.axes[_num_stacked(w) :]
    if len(axes) < 2 or _STREAM not in (axes[0], axes[-1]):
        return None
    return 1 if axes[0] == _STREAM else len(axes) - 1


def _num_stacked(w: ParamDef) -> int:
    return sum(axis in _STACKED for axis in w.axes)


def _adapter(w: ParamDef, lora: LoRA) -> Adapter:
    dim = getattr(w.init, "inputs", None)
    stacked, inputs = _num_stacked(w), num_inputs(w) if dim is None else 1
    assert inputs is not None
    cut = stacked + inputs
    size = math.prod(w.shape[stacked:cut]) if dim is None else w.shape[dim]
    first, second = Normal(size**-0.5), zeros
    if dim == 1:
        first, second = second, first
    return Adapter(
        ParamDef((*w.shape[:cut], lora.rank), (*w.axes[:cut], None), first, w.dtype),
        ParamDef(
            (*w.shape[:stacked], lora.rank, *w.shape[cut:]),
            (*w.axes[:stacked], None, *w.axes[cut:]),
            second,
            w.dtype,
        ),
        ParamDef(
            w.shape[:stacked],
            w.axes[:stacked],
            Constant(lora.alpha / lora.rank),
            torch.promote_types(w.dtype, torch.float32),
            decay=False,
        ),
        ParamDef(
            (*w.shape[:stacked], *w.shape[cut:]),
            (*w.axes[:stacked], *w.axes[cut:]),
            zeros,
            w.dtype,
            decay=False,
        )
        if lora.dora
        else None,
    )


def trainable(value: tree.Tree) -> tree.Tree:
    """True for `a`, `b` and `magnitude` of adapters, which train; False for all other leaves."""
    return _flags(value, Adapter(True, True, False, True))


def split(value: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
    """The leaves of no adapter, and those of adapters, with None in place of each other's.

    `tree.join` puts them together again.
    """
    return tree.partition(value, _flags(value, Adapter(False, False, False, False), rest=True))


def _flags(value: tree.Tree, flags: Adapter, *, rest: bool = False) -> tree.Tree:
    """A tree of bools: these for adapters, `rest` for all other leaves."""

    def is_adapter(node: Any) -> bool:
        return isinstance(node, Adapter)

    plain = flags._replace(magnitude=None)

    def choose(node: Any) -> Any:
        if not is_adapter(node):
            return rest
        return plain if node.magnitude is None else flags

    return tree.map(choose, value, is_leaf=is_adapter)


def attach(params: tree.Tree, adapters: tree.Tree) -> tree.Tree:
    """`params` with these adapters, as of `split`, in place of those that they had; both stay."""
    if not isinstance(params, Mapping):
        return params
    own = adapters if isinstance(adapters, Mapping) else {}
    found = {k: attach(x, own.get(k)) for k, x in params.items() if k != LORA}
    return {**found, LORA: own[LORA]} if own.get(LORA) is not None else found


def combine(adapters: Iterable[tuple[tree.Tree, float]]) -> tree.Tree:
    """One tree of adapters that adds ``sum of weight * scale A B`` of several, of the ranks' sum.

    Args:
        adapters: trees as `attach` takes them, perhaps of different layers, each with its weight.
    """
    rows = [(each, weight) for each, weight in adapters if isinstance(each, Mapping)]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each, _ in rows for name in each):
        inner = [(each[name], weight) for each, weight in rows if each.get(name) is not None]
        if name != LORA:
            found[name] = combine(inner)
        elif inner:
            found[name] = _concatenate(inner)
    return found


def _concatenate(adapters: list[tuple[Adapter, float]]) -> Adapter:
    """Columns of a and rows of b side by side; the scales are in b."""
    first = adapters[0][0]
    stacked = first.scale.dim()
    columns = []
    if any(each.magnitude is not None for each, _ in adapters):
        fix = "merge each into the parameters by itself: lora.merge"
        refuse("cannot combine adapters", "adapters", "DoRA", "LoRA, which can be summed", fix)
    for (_, b, scale, _), weight in adapters:
        kind = torch.promote_types(b.dtype, torch.float32)
        factor = (scale.to(kind) * weight).reshape(*scale.shape, *[1] * (b.dim() - stacked))
        columns.append((b.to(kind) * factor).to(b.dtype))
    a = torch.cat([each.a for each, _ in adapters], -1)
    return Adapter(a, torch.cat(columns, stacked), torch.ones_like(first.scale))


def has_adapters(paths: Iterable[str]) -> bool:
    """Whether some of these paths of leaves are those of adapters."""
    return any(LORA in path.split("/") for path in paths)


def has_packed(paths: Iterable[str]) -> bool:
    """Whether some of these paths of leaves are those of packed matrices."""
    return any(path.endswith("/w/values") for path in paths)


def defs_in(defs: tree.Tree, lora: LoRA | None, paths: Iterable[str]) -> tree.Tree:
    """The defs of the parameters that a checkpoint with leaves at these paths holds.

    A run with LoRA may have begun from a checkpoint without, and not have saved another yet.

    Args:
        defs: of the model itself.
        lora: what the run adds to it; None: nothing.
        paths: of the checkpoint's leaves.

    Raises:
        ValueError: it holds adapters that the run does not have.
    """
    if not has_adapters(paths):
        return defs
    if lora is None:
        fix = "set it in the run's config.toml to the rank that it was trained with"
        title = "the configuration is not that of the checkpoint"
        refuse(title, "lora_rank", "0, for a checkpoint with adapters", "their rank", fix)
    # as it was made, whatever its targets name besides
    kept = lora.base if has_packed(paths) else "plain"
    targets = tuple(drop_routed(lora.targets, defs))
    return _add_adapters(defs, replace(lora, targets=targets, base=kept))


def plain(value: tree.Tree) -> tree.Tree:
    """`value` (defs, specs or parameters) without adapters: the structure of the model itself.

    Of a packed matrix it has the values alone, whose specs are those of the matrix.
    """
    if not isinstance(value, Mapping):
        return value
    return {
        name: entry.values if isinstance(entry, PackedMatrix) else plain(entry)
        for name, entry in value.items()
        if name != LORA
    }


def merge(params: tree.Tree, *, split: bool = False) -> tree.Tree:
    """The parameters of the model itself that compute the same: W + scale A B for each W.

    Computed in float32 at least and rounded to W's dtype. Of shards, it is the shard: no
    collectives, however W is split, but with DoRA, whose matrices have to be whole. Parameters
    without adapters are themselves.

    Args:
        params: global values or this rank's shards; or leaves that are read where they are indexed
            (`functron.checkpoint.folder.StoredLeaf`), which the results then are as well.
        split: they are a rank's shards.

    Raises:
        ValueError: they are shards, and adapters are of DoRA.
    """
    magnitudes = [path for path in tree.paths(params) if f"{LORA}/magnitude" in path]
    if split and magnitudes:
        wanted, fix = (
            "whole matrices, whose columns have lengths",
            "functron convert run:RUN hf:OUT",
        )
        refuse("cannot merge DoRA", magnitudes[0], "a rank's shards", wanted, fix)
    return _merge(params)


def _merge(params: tree.Tree) -> tree.Tree:
    if not isinstance(params, Mapping):
        return params
    merged = {name: _merge(entry) for name, entry in params.items() if name != LORA}
    if LORA in params:
        name = "w" if "w" in params else "weight"
        w, adapter = params[name], params[LORA]

        def read(index: Any) -> torch.Tensor:
            rows = (None if leaf is None else leaf[index] for leaf in adapter)
            own = (
                PackedMatrix(*(part[index] for part in w))
                if isinstance(w, PackedMatrix)
                else w[index]
            )
            return merge_matrix(own, Adapter(*rows))

        stored = not isinstance(adapter.a, torch.Tensor)
        merged[name] = LazyLeaf(w, read, adapter.a) if stored else merge_matrix(w, adapter)
    return merged


def merge_matrix(w: torch.Tensor | PackedMatrix, adapter: Adapter) -> torch.Tensor:
    """W + scale A B, in W's dtype; of stacked ones, every layer's. With DoRA, W is whole.

    Of a packed W, in A's dtype.
    """
    w = as_numbers(w, adapter.a.dtype)
    stacked = adapter.scale.dim()
    if adapter.magnitude is not None:
        if stacked:
            rows = [Adapter(*each) for each in zip(*adapter, strict=True)]
            return torch.stack([merge_matrix(*each) for each in zip(w, rows, strict=True)])
        matrix = w.flatten(0, adapter.a.dim() - 2).flatten(1)
        growth = find_growth(find_lengths(matrix, adapter), adapter.magnitude)
        merged = merge_matrix(w.to(growth.dtype), adapter._replace(magnitude=None))
        return (merged * growth.view(adapter.magnitude.shape)).to(w.dtype)
    kind = torch.promote_types(w.dtype, torch.float32)
    a = adapter.a.to(kind).flatten(stacked, -2)
    b = adapter.b.to(kind).flatten(stacked + 1)
    scale = adapter.scale.to(kind)[..., None, None]
    return (w.to(kind) + (scale * (a @ b)).reshape(w.shape)).to(w.dtype)


def find_column_lengths(w: torch.Tensor | PackedMatrix, adapter: Adapter) -> torch.Tensor:
    """The lengths of a matrix's columns, of stacked ones of every layer's, as magnitudes stand."""
    kind = torch.promote_types(adapter.a.dtype, torch.float32)
    w = as_numbers(w, kind)
    inputs = tuple(range(adapter.scale.dim(), adapter.a.dim() - 1))
    return torch.linalg.vector_norm(w.to(kind), dim=inputs)


@dataclass(frozen=True, eq=False)
class LazyLeaf:
    """A leaf whose rows are computed when they are indexed, from those of a stored leaf.

    Attributes:
        leaf: has the shape, and the dtype or that of `like`; its rows are tensors.
        read: an index to what is there in its place.
    """

    leaf: Any
    read: Callable[[Any], torch.Tensor]
    like: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the leaf, as `dtype`."""
        return tuple(self.leaf.shape)

    @property
    def dtype(self) -> torch.dtype:
        return (self.leaf if self.like is None else self.like).dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read(index)
