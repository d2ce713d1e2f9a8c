"""Multi-token prediction (DeepSeek-V3, section 2.2): modules that predict tokens further ahead.

The model's last hidden state h_i^0 of token i predicts token i + 1. Module k = 1, 2, ..., D takes
the state of module k - 1 and the token that this predicts, and predicts the one after it:

    h'_i = [norm(embedding(t_{i+k})) ; norm(h_i^{k-1})] W_k        h_i^k = block_k(h')_i
    loss_k = sum_i cross_entropy(norm(h_i^k) unembedding, t_{i+k+1})

with the model's own embedding and unembedding. W_k's rows are in the order of DeepSeek's
checkpoints (the paper writes h first).

The sequence may be split over the ranks of ``cp`` and ``ulysses`` in any order, where the next
token may be on any of them: `shifted` gathers the numbers of tokens, which are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F

from functron.core.errors import Problem, nearest, raise_problems
from functron.core.typing import Float, Int, Tensor
from functron.nn.context import own_positions
from functron.nn.layers import NormKind, column_parallel, linear_defs, norm_defs, weights
from functron.nn.loss import IGNORE_INDEX
from functron.spmd import collectives as lax

SequenceOrder = Literal["contiguous", "zigzag", "balanced"]


class Predictions(NamedTuple):
    """The results of modules of multi-token prediction.

    Attributes:
        losses: float32 at least ``[depths]``, each the sum over this rank's counted targets; the
            same on all ranks of tp. Their psum over the axes that split the batch and the sequence
            is the sum of all tokens.
        aux: what each block returned beside its result.
    """

    losses: Tensor
    aux: list[Any]


def multi_token_defs(
    embed_dim: int,
    *,
    stddev: float,
    dtype: torch.dtype,
    kind: NormKind = "rms",
    zero_centered: bool = False,
) -> dict:
    """Defs ``{"embed_norm"?, "stream_norm"?, "proj", "norm"?}`` of one module, beside its block's.

    Norms without parameters are left out.

    The projection is whole on every rank of tp: with a split sequence each computes its own tokens.
    """

    def scale() -> dict:
        return norm_defs(embed_dim, kind, axis="embed", dtype=dtype, zero_centered=zero_centered)

    proj = linear_defs((2 * embed_dim, embed_dim), ("embed", None), stddev=stddev, dtype=dtype)
    module = {"embed_norm": scale(), "stream_norm": scale(), "proj": proj, "norm": scale()}
    return {name: part for name, part in module.items() if part}


def multi_token(
    modules: Sequence[dict],
    x: Float[Tensor, "batch seq embed"],
    tokens: Int[Tensor, "batch whole_seq"],
    targets: Int[Tensor, "batch whole_seq"],
    *,
    embed: Callable,
    block: Callable,
    head: Callable,
    norm: Callable,
    order: SequenceOrder = "contiguous",
    segments: Int[Tensor, "batch whole_seq"] | None = None,
    positions: Int[Tensor, "*rows whole_seq"] | None = None,
) -> Predictions:
    """The losses of every module, each going on from the one before.

    DeepSeek-V3's objective is ``weight * losses.mean()``, added to the sum of the ordinary losses
    before that is divided by the number of ordinary targets: its equation 24 divides by the whole
    length T at every depth too, although depth k predicts only T - k tokens, and equation 25
    averages over depths. (Megatron divides each depth by its own number of tokens, which is a
    little more.) In the last tokens of a sample, and of a packed document, nothing is predicted.

    Args:
        modules: this rank's part of `multi_token_defs`, one per depth.
        x: the residual stream after the model's layers.
        tokens: int64, this rank's part of the sequence, whole over tp.
        targets: as `tokens`: the next token of each, or `IGNORE_INDEX`.
        embed: the model's embedding: ``tokens -> stream``.
        block: ``(depth, stream, tokens, targets) -> (stream, aux)``, depth from 0; tokens and
            targets are those that this module is given and predicts. Masks, positions and rotary
            tables are those of the model: h' has h's places.
        head: the model's unembedding and loss: ``(stream, targets) -> losses [batch, seq]``.
        norm: the model's norm: ``(params, x) -> y``, with ``{}`` where it has no parameters.
        order, segments, positions: as for `shifted`.

    Collectives: those of embed, block and head, and one all-gather of token ids per depth.
    """
    losses, aux = [], []
    for depth, module in enumerate(modules):
        given, wanted = ahead(
            tokens, targets, depth + 1, order=order, segments=segments, positions=positions
        )
        merged = merge(module, embed(given), x, norm=norm)
        x, extra = block(depth, merged, given, wanted)
        y = norm(module.get("norm", {}), x)
        losses.append(head(y, wanted).sum())
        aux.append(extra)
    return Predictions(torch.stack(losses), aux)


def merge(
    params: dict,
    embedded: Float[Tensor, "batch seq embed"],
    x: Float[Tensor, "batch seq embed"],
    *,
    norm: Callable,
) -> Float[Tensor, "batch seq embed"]:
    """[norm(embedded) ; norm(x)] W: the input of a module's block. No collectives.

    Args:
        params: this rank's part of `multi_token_defs`.
        embedded: the embeddings of the module's tokens.
        x: the residual stream, with the same spec.
        norm: as for `multi_token`.
    """
    both = [
        norm(params.get(name, {}), y) for name, y in (("embed_norm", embedded), ("stream_norm", x))
    ]
    return column_parallel(torch.cat(both, -1), *weights(params["proj"]))


def ahead(
    tokens: Int[Tensor, "batch seq"],
    targets: Int[Tensor, "batch seq"],
    by: int,
    *,
    order: SequenceOrder = "contiguous",
    segments: Int[Tensor, "batch seq"] | None = None,
    positions: Int[Tensor, "*rows seq"] | None = None,
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """The inputs and targets of a module: the tokens `by` places on, and the ones after these.

    Arguments are as for `multi_token` and `shifted`. Where the sample or document ends before, the
    target is `IGNORE_INDEX` and the token 0, on which no counted loss depends under causal
    attention.
    """
    pair = torch.stack([tokens, targets])
    moved = shifted(
        pair, by, fill=IGNORE_INDEX, order=order, segments=segments, positions=positions
    )
    given, wanted = moved.unbind(0)
    return torch.where(given == IGNORE_INDEX, torch.zeros_like(given), given), wanted


def shifted(
    x: Int[Tensor, "*leading seq"],
    by: int,
    *,
    fill: int,
    order: SequenceOrder = "contiguous",
    segments: Int[Tensor, "batch seq"] | None = None,
    positions: Int[Tensor, "*rows seq"] | None = None,
    axis: str = "cp",
    ulysses: str = "ulysses",
) -> Int[Tensor, "*leading seq"]:
    """y_i = x_{i + by} along the whole sequence, of which every rank has a part.

    On two ranks of cp, ``[0, 1 | 2, 3]`` shifted by 1 is ``[1, 2 | 3, fill]``; in zig-zag order
    ``[0, 3 | 1, 2]`` becomes ``[1, fill | 2, 3]``.

    Args:
        by: how many places, at least 0.
        fill: where the sample, or the document, ends before.
        order: ``"contiguous"`` and ``"zigzag"`` as in `functron.nn.context`; ``"balanced"``: any
            order, told by `positions` and `segments`.
        segments: ``[batch, seq]`` document numbers of packed samples; nothing comes from another.
        positions: ``[batch, seq]`` places in the document; read for "balanced" alone.
        axis, ulysses: the mesh axes that split the sequence, major to minor.

    Collectives: one all-gather, of x, and of segments and, in "balanced" order, positions.

    Raises:
        ValueError: `by` is negative, there is no such order, or "balanced" without positions.
    """
    _check(by, order, positions)
    rows = [x.flatten(0, -2)] if x.dim() > 1 else [x.unsqueeze(0)]
    batch = x.shape[-2] if x.dim() > 1 else 1
    for each in (segments, positions if order == "balanced" else None):
        rows += [] if each is None else [each.expand(batch, -1)]
    sizes = [row.shape[0] for row in rows]
    whole = lax.all_gather(torch.cat(rows), (axis, ulysses), axis=1, tiled=True)
    parts = list(whole.split(sizes))
    if order == "balanced":
        place = parts.pop()
        place = place if segments is None else place + parts[1] * place.shape[1]
        moved = _shift_by_place(parts, place, by, fill)
        mine = lax.global_index(x.shape[-1], (axis, ulysses), device=x.device)
    else:
        parts = [_in_order(part, order, axis) for part in parts]
        moved = [_shift_left(part, by, fill) for part in parts]
        mine = own_positions(x.shape[-1], order, axis=axis, ulysses=ulysses, device=x.device)
    out, *documents = (torch.index_select(part, 1, mine) for part in moved)
    out = out.view(x.shape)
    if segments is None:
        return out
    same = documents[0] == segments
    return torch.where(same, out, torch.full_like(out, fill))


def _check(by: int, order: str, positions: Tensor | None) -> None:
    found = []
    if by < 0:
        found.append(Problem("by", str(by), "at least 0: only what is ahead"))
    if order not in (known := get_args(SequenceOrder)):
        found.append(Problem("order", repr(order), "a known one", nearest(order, known)))
    if order == "balanced" and positions is None:
        fix = "pass the batch's positions"
        found.append(Problem("positions", "None", "each token's, as data arranged them", fix))
    raise_problems("cannot shift a sequence", found)


def _in_order(whole: Tensor, order: str, axis: str) -> Tensor:
    """The parts of all ranks, one after the other, in the order of the sequence."""
    size = lax.axis_size(axis)
    if order == "contiguous" or size == 1:
        return whole
    chunks = whole.chunk(2 * size, 1)  # rank r: chunks r and 2 size - 1 - r
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], 1)


def _shift_left(x: Tensor, by: int, fill: int) -> Tensor:
    by = min(by, x.shape[1])
    return F.pad(x[:, by:], (0, by), value=fill)


def _shift_by_place(rows: list[Tensor], place: Tensor, by: int, fill: int) -> list[Tensor]:
    """Rows shifted along increasing places; each result is where its place is."""
    sort = place.argsort(1)
    back = sort.argsort(1)
    out = []
    for row in rows:
        times = row.shape[0] // place.shape[0]
        there, here = (each.repeat(times, 1) for each in (sort, back))
        out.append(_shift_left(row.gather(1, there), by, fill).gather(1, here))
    return out
