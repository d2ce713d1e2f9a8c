"""Where the tokens of a batch lie: which rank has which, and what attention may see of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from functron import nn
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.core.typing import Int, Tensor
from functron.nn import zigzag
from functron.nn.context import context_attention
from functron.ops import AUTO, Kernels
from functron.spmd import CONTEXT_AXES, DATA_AXES
from functron.spmd import collectives as lax

Batch = Mapping[str, Tensor]
"""``tokens`` and ``targets`` int64 [B, T], and ``rows`` int64 [B], indices in the global batch; of
packed documents also ``positions`` and ``segments`` int64 [B, T], see `Sequence`; where tokens have
several positions (`GPTConfig.rope_sections`) ``positions`` [B, T, their number]."""

SAMPLE_AXES = (*DATA_AXES, *CONTEXT_AXES)
"""The axes over which losses are summed: those that split the batch, by samples and by tokens."""

Kind = Literal["ring", "gather"]
Order = Literal["zigzag", "contiguous", "balanced"]


@dataclass(frozen=True)
class Context:
    """How attention reaches across the ranks that split sequences, ``cp`` and ``ulysses``.

    Attributes:
        kind: what ranks of ``cp`` do: ``"ring"``: keys and values go round, one rank at a time (Liu
            et al. 2023); ``"gather"``: every rank gathers all of them (Llama 3, section 3.3.2).
            Ranks of ``ulysses`` exchange heads for sequence in either case.
        order: ``"zigzag"``: ranks exchange tokens at the start, after which each has an early and a
            late part of every sequence, so that causal attention costs all the same; the numbers
            are those of ``"contiguous"``, which leaves tokens where they are. ``"balanced"``: the
            batch has been arranged, document by document (`functron.data.packing`).
        ring_size: keys and values go round among so many neighbouring ranks only, where no document
            of the batch lies on more; 0: among all.

    Raises:
        ValueError: a value is none of these.
    """

    kind: Kind = "ring"
    order: Order = "zigzag"
    ring_size: int = 0

    def __post_init__(self):
        found = [
            Problem(name, repr(value), "a known one", nearest(str(value), get_args(kinds)))
            for name, value, kinds in (("kind", self.kind, Kind), ("order", self.order, Order))
            if value not in get_args(kinds)
        ]
        if self.ring_size < 0 or (self.ring_size and self.order != "balanced"):
            got = f"{self.ring_size} with order={self.order!r}"
            wanted = 'at least 0, and 0 unless order="balanced"'
            found.append(Problem("ring_size", got, wanted, "leave it out"))
        raise_problems("this is no way to split sequences", found)

    @property
    def halves(self) -> bool:
        """Whether each rank of cp holds an early and a late half."""
        return self.order != "contiguous"


class Sequence(NamedTuple):
    """A rank's tokens in the order in which it computes: T of them, whole over tp.

    Attributes:
        tokens: int64 ``[B, T]``.
        targets: int64 ``[B, T]``; None where nobody asked.
        rows: int64 ``[B]``, the samples' indices in the global batch.
        slots: int64 ``[T]``, the tokens' places in their samples (as the batch has them).
        positions: int64 ``[T]`` or ``[B, T]``, their places in their documents; ``[B, T, S]``:
            the S places of each, by which parts of a head's dims are rotated.
        segments: int64 ``[B, T]``, the numbers of their documents; None: a sample is one.
        attend: ``(q, k, v, *, window, sinks, cap) -> out``, where attention is done in another way
            than among these tokens: with keys that are kept, for example.
    """

    tokens: Tensor
    targets: Tensor | None
    rows: Tensor
    slots: Tensor
    positions: Tensor
    segments: Tensor | None
    attend: Callable | None = None

    def core(
        self,
        context: Context,
        window: int | Tensor = 0,
        kernels: Kernels = AUTO,
        cap: float = 0.0,
    ) -> Callable:
        """The core of `nn.self_attention`: attention to all that these tokens may see."""
        if self.attend is not None:
            return functools.partial(self.attend, window=window, cap=cap)
        return functools.partial(
            context_attention,
            positions=self.positions if context.order == "balanced" else None,
            segments=self.segments,
            window=window,
            kind=context.kind,
            balanced=context.halves,
            ring_size=context.ring_size or None,
            cap=cap,
            kernels=kernels,
        )


_ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tokens": ("int64 [batch, seq]", "input_ids"),
        "targets": ("int64: of each place what is to be predicted there", "labels"),
        "images": ("a tensor of images", "pixel_values"),
    }
)
"""The entries of a batch, and their names in transformers."""


def require(batch: Batch, *names: str) -> None:
    """Check that a batch has these entries.

    Raises:
        ValueError: it has not; all that are missing are listed.
        TypeError: it is no mapping.
    """
    if not isinstance(batch, Mapping):
        wanted = f"a dict with {' and '.join(map(repr, names))}"
        got = type(batch).__name__
        refuse("the batch cannot be used", "batch", got, wanted, error=TypeError)
    found = []
    for name in names:
        if name not in batch:
            wanted, other = _ELSEWHERE[name]
            fix = f"put it into the batch as {name!r}"
            if other in batch:
                fix = f"call {other!r} so"
                # transformers shifts labels inside of the model
                fix += ", one place to the left: labels[:, 1:] of tokens[:, :-1]" * (
                    other == "labels"
                )
            has = ", ".join(map(str, batch)) or "nothing"
            found.append(Problem(name, f"a batch with {has}", wanted, fix))
    raise_problems("the batch cannot be used", found)


@public
def num_targets(batch: Batch, axes: tuple[str, ...] = SAMPLE_AXES) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce.

    Args:
        batch: this rank's samples; targets of `nn.IGNORE_INDEX` do not count.
        axes: those of the loss's `ModelOptions`.
    """
    require(batch, "targets")
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), axes)


def arranged(batch: Batch, context: Context) -> Sequence:
    """This rank's tokens as `context` orders them.

    Collectives: none, except that under zigzag every entry of the batch with a sequence is
    exchanged along cp (`nn.zigzag.to_balanced`).

    Raises:
        ValueError: the sequence does not divide.
    """

    def moved(x: Int[Tensor, "batch seq *several"] | None) -> Tensor | None:
        if x is None or context.order != "zigzag":
            return x
        return zigzag.to_balanced(x, 1)

    require(batch, "tokens")
    tokens = batch["tokens"]
    rows = batch.get("rows")
    if rows is None:
        rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)
    order = "zigzag" if context.order == "zigzag" else "contiguous"
    slots = zigzag.positions(tokens.shape[1], order, device=tokens.device)
    positions = moved(batch.get("positions"))
    return Sequence(
        tokens=tokens if context.order != "zigzag" else zigzag.to_balanced(tokens, 1),
        targets=moved(batch.get("targets")),
        rows=rows,
        slots=slots,
        positions=slots if positions is None else positions,
        segments=moved(batch.get("segments")),
    )


def check_positions(sequence: Sequence, sections: tuple[int, ...], context: Context) -> None:
    """Raise ValueError unless each token has one position, or one for each of the sections.

    Args:
        sequence: the rank's tokens.
        sections: `GPTConfig.rope_sections`.
        context: how sequences are split.
    """
    shape, tokens = tuple(sequence.positions.shape), tuple(sequence.tokens.shape)
    several = (*tokens, len(sections))
    if shape == tokens[1:] or shape == tokens:
        return
    wanted = f"{tokens}, or {several}" if sections else f"{tokens}, one for each token"
    if len(shape) == len(several) and not sections:
        fix = "set rope_sections, if dims of a head are to be rotated by different positions"
    elif shape == several and context.order == "balanced":
        wanted, fix = f'{tokens} with order="balanced"', 'use order="zigzag"'
    elif shape == several:
        return
    else:
        fix = "transformers' [sections, batch, seq] is positions.permute(1, 2, 0) here"
    refuse("the batch cannot be used", "positions", shape, wanted, fix)


def check_length(seq: int, max_seq: int | None, split: int) -> None:
    """Raise ValueError unless samples of which ranks hold `seq` tokens each are short enough.

    Args:
        seq: the tokens of a rank.
        max_seq: the most of a whole sample; None: of any number, as each is several documents.
        split: how many ranks of tp split these again.
    """
    whole = seq * lax.axis_size(CONTEXT_AXES)
    if max_seq is not None and whole > max_seq:
        raise ValueError(
            f"forward: got {whole} tokens per sample; wanted at most max_seq={max_seq}; "
            "shorten the samples or raise max_seq"
        )
    if seq % split:
        raise ValueError(
            f"forward: got {whole} tokens per sample; wanted a multiple of {split * whole // seq}, "
            "the ranks that split the sequence; change its length"
        )
