"""Shared by the families of models: how layers are run, and which ranks split parameters.

Each is a module with ``defs(config)``, ``rules(config, mesh)``, ``forward`` and ``loss``; those
beside the decoder run their layers as a `Stack`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from functron import nn
from functron.core import random, tree
from functron.core.errors import Problem, nearest, raise_problems
from functron.core.scopes import named_scope
from functron.core.tree import Tree
from functron.core.typing import Key, Scalar, Tensor
from functron.models.options import ModelOptions, check_gathered
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.params import ParamDef
from functron.spmd.spec import Rules, SpecEntry, as_entry
from functron.transforms import Gather, policies, scan
from functron.transforms import remat as rematerialise


@dataclass(frozen=True, eq=False)
class Stack:
    """Stacks of layers as they are run; options that the family has no place for are refused.

    Attributes:
        family: the module of the model, for messages.
        options: of the model: stream, remat, gather and axes.
        key: of dropout's masks; None: no dropout.
        rate: of dropout.
        rows: int64 ``[batch]``, the samples' indices in the global batch.

    Raises:
        ValueError: other options than these; all are listed.
    """

    family: str
    options: ModelOptions
    key: Key | None = None
    rate: float = 0.0
    rows: Tensor | None = None

    def __post_init__(self):
        self.options.require_only(self.family, "stream", "remat", "gather", "axes")

    @property
    def stream(self) -> P:
        """The spec of the stream."""
        return self.options.stream

    @property
    def gather(self) -> Gather:
        """How parameters that data axes split are gathered."""
        return self.options.gather

    def at(self, name: str) -> Stack:
        """The same for that entry of the parameters, with a key of its own."""
        key = self.key if self.rate else None
        key = None if key is None else random.fold_in(key, zlib.crc32(name.encode()))
        return replace(self, options=replace(self.options, gather=self.gather.at(name)), key=key)

    def core(self, core: Callable) -> Callable:
        """The core of attention, which backward computes again under remat="selective"."""
        return rematerialise(core) if self.options.remat == "selective" else core

    def embed(self, weights: Tree, tokens: Tensor, config: Any) -> Tensor:
        """The stream of embedded tokens, by the table "embed" of the parameters."""
        return embed_tokens(config, weights, tokens, self.options)

    def norm_last(self, weights: Tree, x: Tensor, eps: float) -> Tensor:
        """RMSNorm of the stream after the layers, by "norm" of the parameters."""
        with named_scope("norm"):
            return nn.rms_norm(x, self.gather.at("norm")(weights["norm"])["scale"], eps=eps)

    def logits(self, weights: Tree, x: Tensor, *, tied: bool, divisor: float = 1.0) -> Tensor:
        """``[batch, seq, padded_vocab / tp]`` of the normed stream, divided by `divisor`."""
        with named_scope("unembed"):
            matrix = gather_unembedding(weights, self.gather, tied=tied)
            x = x if divisor == 1 else x / divisor
            matrix = matrix.mT if tied else matrix
            return nn.column_parallel(nn.gather_sequence(x, self.stream), matrix)

    def drop(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Dropout on the stream or on what is added to it."""
        if key is None or not self.rate:
            return x
        rows = self.rows
        if rows is None:
            rows = lax.global_index(x.shape[0], DATA_AXES, device=x.device)
        return nn.dropout(x, key, rate=self.rate, rows=rows, stream=self.stream)

    def keys(self, count: int) -> Tensor | None:
        """A key for each of `count` layers, int64 ``[count, 2]``; None without dropout."""
        return random.split(self.key, count) if self.key is not None and self.rate else None

    def over(self, layer: Callable, x: Tensor, weights: Tree, keys: Tensor | None) -> Tensor:
        """x through layers whose parameters are stacked.

        Args:
            layer: ``(parameters, x, key) -> x``; the key is None without dropout.
            x: the stream.
            weights: this rank's part of the layers' parameters, stacked on a leading dim.
            keys: one per layer, as `keys` makes them.
        """
        gathered = run_gathered(layer, self.options, self.gather.rows())

        def body(x: Tensor, row: tuple) -> tuple[Tensor, None]:
            return gathered(row[0], x, row[1]), None

        return scan(body, x, (weights, keys))[0]


def run_gathered(layer: Callable, options: ModelOptions, gather: Gather) -> Callable:
    """A layer as it is run: parameters gathered around it, activations perhaps computed again.

    Args:
        layer: ``(parameters, *rest)``, of one layer.
        options: of the model, whose remat says what backward computes again.
        gather: of one layer's parameters.
    """
    policy = {"full": policies.nothing, "dots": policies.dots}
    # what is recomputed is inside what is gathered: so gathering depends on parameters alone
    return gather.around(
        rematerialise(layer, policy=policy.get(options.remat, policies.everything))
    )


def embed_tokens(
    config: Any, weights: Tree, tokens: Tensor, options: ModelOptions, scale: float = 1.0
) -> Tensor:
    """`nn.embed_tokens` by the table "embed" of the parameters, with spec ``options.stream``."""
    table = options.gather.at("embed")(weights["embed"])
    check_gathered("embed_dim", table.shape[1], config.embed_dim)
    given = {"scale": scale, "vocab_size": config.vocab_size}
    return nn.embed_tokens(table, tokens, stream=options.stream, **given)


def gather_unembedding(weights: Tree, gather: Gather, *, tied: bool) -> Tensor:
    """The matrix of logits: "unembed", or where they are tied "embed", which is its transpose."""
    name = "embed" if tied else "unembed"
    return gather.at(name)(weights[name])


def summed_loss(logits: Tensor, targets: Tensor, vocab_size: int, options: ModelOptions) -> Scalar:
    """The sum of the cross-entropies over the batch of all ranks of ``options.axes``."""
    with named_scope("loss"):
        losses = nn.cross_entropy(logits, targets, vocab_size=vocab_size)
        return lax.psum(losses.sum(), options.axes)


def keys_of(key: Tensor | None, num: int) -> tuple[Tensor | None, ...]:
    """`num` keys, or None as often."""
    return (None,) * num if key is None else random.split(key, num).unbind(0)


def whole_heads(defs: Tree) -> Tree:
    """Defs of attention with a key head per query head: what splits heads splits those of keys."""

    def one(d: ParamDef) -> ParamDef:
        axes = tuple("heads" if name == "kv_heads" else name for name in d.axes)
        return replace(d, axes=axes)

    return tree.map(one, defs)


def size_problems(config: object, *names: str) -> list[Problem]:
    """A problem for each of these attributes that is not at least 1."""
    return [
        Problem(name, str(getattr(config, name)), "at least 1")
        for name in names
        if getattr(config, name) < 1
    ]


def choice_problems(config: object, choices: Mapping[str, object]) -> list[Problem]:
    """A problem for each attribute that is none of the values of its literal type."""
    return [
        Problem(name, repr(value), "a known name", nearest(str(value), get_args(kind)))
        for name, kind in choices.items()
        if (value := getattr(config, name)) not in get_args(kind)
    ]


def rate_problems(config: Any) -> list[Problem]:
    """A problem where the rate of dropout is out of range."""
    good = 0 <= config.dropout < 1
    return [] if good else [Problem("dropout", str(config.dropout), "at least 0 and below 1")]


def head_problems(heads: str, width: int, count: int) -> list[Problem]:
    """A problem where `count` heads do not divide the width of the stream."""
    if count < 1 or width % count == 0:
        return []
    return [Problem(heads, str(count), f"a divisor of embed_dim={width}", "or set head_dim")]


def tp_problems(sizes: Mapping[str, int], tp: int) -> list[Problem]:
    """A problem for each of these sizes, by its name, that tp does not divide."""
    return [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in sizes.items()
        if size % tp
    ]


def fsdp_problems(
    sizes: Mapping[str, int], mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]
) -> list[Problem]:
    """Axes that are no data axes; else sizes, by their names, that these do not divide."""
    wanted = "data axes: 'dp', 'fsdp' or both"
    found = [
        Problem("fsdp", repr(axis), wanted, "leave it out")
        for axis in fsdp
        if axis not in FSDP_AXES
    ]
    if found:
        return found
    ranks = math.prod(mesh[axis] for axis in fsdp)
    named = " * ".join(f"{axis}={mesh[axis]}" for axis in fsdp if mesh[axis] > 1)
    for name, size in sizes.items():
        if size % ranks:
            below, above = math.gcd(size, ranks), -(-size // ranks) * ranks
            fix = f"split over {below} ranks, or set {name}={above}"
            found.append(Problem(name, str(size), f"a multiple of {named}", fix))
    return found


def embed_rules(mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]) -> dict[str, SpecEntry]:
    """The rule of dims called "embed", if ranks of `fsdp` split them."""
    axes = [axis for axis in fsdp if mesh[axis] > 1]
    return {"embed": as_entry(axes)} if axes else {}


def text_rules(config: Any, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)) -> Rules:
    """Tensor parallelism and fully sharded data parallelism on data axes and tp, as `gpt.rules`."""
    c = config
    split = {"num_heads": c.num_heads, "mlp_dim": c.mlp_dim, "vocab_multiple": c.padded_vocab}
    return tensor_rules(mesh, split=split, embed={"embed_dim": c.embed_dim}, fsdp=fsdp)


def tensor_rules(
    mesh: Mesh | BoundMesh,
    *,
    split: Mapping[str, int],
    embed: Mapping[str, int],
    fsdp: tuple[str, ...],
    replicated: Mapping[str, bool] | None = None,
) -> Rules:
    """Megatron's tensor parallelism and fully sharded data parallelism, for sizes that fit.

    Args:
        mesh: the ranks, on data axes and tp.
        split: sizes of the config that tp must divide, by their names.
        embed: sizes that the ranks of `fsdp` must divide: those of dims called "embed".
        fsdp: the data axes that parameters are split over; see `gpt.rules`.
        replicated: logical axes that stay whole on every rank where True.

    Returns:
        Rules for "vocab", "heads", "kv_heads", "mlp", "groups" and "embed".

    Raises:
        ValueError: tp or fsdp does not divide what it splits, or the mesh has ranks on an axis
            that nothing splits; all offenders are listed.
    """
    found = tp_problems(split, mesh["tp"])
    for axis in ("pp", *CONTEXT_AXES, "ep"):
        if mesh[axis] > 1:
            fix = "put those ranks on dp, fsdp or tp"
            found.append(Problem("mesh", f"{axis}={mesh[axis]}", f"{axis}=1 for this model", fix))
    found += fsdp_problems(embed, mesh, fsdp)
    raise_problems("this model cannot run on this mesh", found)
    rules = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "groups"), "tp")
    whole = {name for name, stays in (replicated or {}).items() if stays}
    entries = {name: None if name in whole else axis for name, axis in rules.items()}
    return Rules(entries | embed_rules(mesh, fsdp))


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
