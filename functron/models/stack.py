"""Parts that models other than the decoder share: how layers are run, and which ranks split them.

Each such model is a module with ``defs(config)``, ``rules(config, mesh)``, ``forward`` and
``loss``, and runs its layers as a `Stack`.
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
from functron.spmd.spec import Rules
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
        table = self.gather.at("embed")(weights["embed"])
        check_gathered("embed_dim", table.shape[1], config.embed_dim)
        return nn.embed_tokens(table, tokens, stream=self.stream, vocab_size=config.vocab_size)

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
        policy = {"full": policies.nothing, "dots": policies.dots}
        # what is recomputed is inside what is gathered: so gathering depends on parameters alone
        once = rematerialise(layer, policy=policy.get(self.options.remat, policies.everything))
        gathered = self.gather.rows().around(once)

        def body(x: Tensor, row: tuple) -> tuple[Tensor, None]:
            return gathered(row[0], x, row[1]), None

        return scan(body, x, (weights, keys))[0]


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
    tp = mesh["tp"]
    found = [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in split.items()
        if size % tp
    ]
    for axis in ("pp", *CONTEXT_AXES, "ep"):
        if mesh[axis] > 1:
            fix = "put those ranks on dp, fsdp or tp"
            found.append(Problem("mesh", f"{axis}={mesh[axis]}", f"{axis}=1 for this model", fix))
    unknown = [axis for axis in fsdp if axis not in FSDP_AXES]
    for axis in unknown:
        wanted = "data axes: 'dp', 'fsdp' or both"
        found.append(Problem("fsdp", repr(axis), wanted, "leave it out"))
    ranks = 1 if unknown else math.prod(mesh[axis] for axis in fsdp)
    for name, size in embed.items():
        if size % ranks:
            wanted = f"a multiple of the {ranks} ranks of {', '.join(fsdp)}"
            fix = f"split over {math.gcd(size, ranks)} ranks, or change it"
            found.append(Problem(name, str(size), wanted, fix))
    raise_problems("this model cannot run on this mesh", found)
    axes = tuple(axis for axis in fsdp if mesh[axis] > 1)
    rules = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "groups"), "tp")
    whole = {name for name, stays in (replicated or {}).items() if stays}
    entries = {name: None if name in whole else axis for name, axis in rules.items()}
    return Rules(entries | ({"embed": axes[0] if len(axes) == 1 else axes} if axes else {}))


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
