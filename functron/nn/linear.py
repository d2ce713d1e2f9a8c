"""Tensor-parallel linear layers (Shoeybi et al. 2019, section 3), with sequence parallelism.

The residual stream is ``[batch, seq, embed]`` with a spec: ``P(data)`` keeps the sequence whole on
every tensor-parallel rank, ``P(data, "tp")`` splits it (Korthikanti et al. 2022). Between a column-
and a row-parallel layer activations are split over heads or features instead.

| layer                     | enters with      | leaves with                                   |
|---------------------------|------------------|-----------------------------------------------|
| column-parallel: w splits by columns | the stream | its part of the features; nothing exchanged |
| row-parallel: w splits by rows | its features | the stream: psum, or psum_scatter along seq |

No backward rule is written anywhere: the transposes of these collectives are the right ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from functron.core.typing import Float, Tensor
from functron.params import Normal, ParamDef, zeros
from functron.spmd import collectives as lax
from functron.spmd.spec import P, entry_axes

SEQ_DIM = 1


class Adapter(NamedTuple):
    """A low-rank addition to a matrix w (Hu et al. 2021): x w becomes x w + scale (x a) b.

    It stands beside w in a layer's parameters, as ``"lora"``; see `functron.lora`.

    Attributes:
        a: ``[*in, rank]``, its leading dims split as w's are.
        b: ``[rank, *out]``, its other dims split as w's are.
        scale: a scalar; a tensor, so that parameters say by themselves what they compute.
    """

    a: Any
    b: Any
    scale: Any


def sequence_axes(stream: P) -> tuple[str, ...]:
    """The mesh axes that split the sequence dim of a stream with this spec."""
    return entry_axes(stream[SEQ_DIM]) if len(stream) > SEQ_DIM else ()


def gather_sequence(
    x: Float[Tensor, "batch seq embed"], stream: P, axis: str = "tp"
) -> Float[Tensor, "batch whole_seq embed"]:
    """The stream with its sequence whole over `axis`: ``[B, T / n, D]`` to ``[B, T, D]``.

    Identity unless `stream` splits the sequence by `axis`; then one all-gather of the result's
    bytes, and in backward one reduce-scatter.
    """
    return lax.all_gather(x, axis, axis=SEQ_DIM, tiled=True) if axis in sequence_axes(stream) else x


def reduce_partial(
    y: Float[Tensor, "batch whole_seq embed"], stream: P, axis: str = "tp"
) -> Float[Tensor, "batch seq embed"]:
    """The stream from every rank's part of a sum over `axis`.

    One all-reduce of y's bytes; where `stream` splits the sequence by `axis`, one reduce-scatter to
    ``[B, T / n, D]`` instead. Backward: all-reduce, or all-gather.
    """
    if axis in sequence_axes(stream):
        return lax.psum_scatter(y, axis, scatter_dimension=SEQ_DIM, tiled=True)
    return lax.psum(y, axis)


def _product(x: Tensor, w: Tensor, lora: Adapter | None) -> Tensor:
    """x w + scale (x a) b for a matrix w ``[in, out]``; w + scale a b is never formed.

    Linear in x and in the rows of w and a, so that it may be any rank's part of a sum.
    """
    y = x @ w
    if lora is None:
        return y
    narrow = x @ lora.a.flatten(0, -2)
    return y + (narrow * lora.scale.to(narrow.dtype)) @ lora.b.flatten(1)


def column_parallel(
    x: Float[Tensor, "*batch embed"],
    w: Float[Tensor, "embed *features"],
    bias: Float[Tensor, "*features"] | None = None,
    lora: Adapter | None = None,
) -> Float[Tensor, "*outputs"]:
    """y = x w + b, with the columns of w split.

    Args:
        x: ``[..., embed]``, the same on all ranks of the axis (call `gather_sequence` first).
        w: ``[embed, *features]``, this rank's columns; several feature dims are kept apart.
        bias: ``[*features]``.
        lora: a low-rank addition to w, this rank's columns of its b.

    Returns:
        ``[..., *features]``, this rank's features. No collectives.
    """
    y = _product(x, w.flatten(1), lora)
    y = y.unflatten(-1, w.shape[1:]) if w.dim() > 2 else y
    return y if bias is None else y + bias


def row_parallel(
    x: Float[Tensor, "batch whole_seq *features"],
    w: Float[Tensor, "*features embed"],
    bias: Float[Tensor, " embed"] | None = None,
    lora: Adapter | None = None,
    *,
    stream: P,
    axis: str = "tp",
) -> Float[Tensor, "batch seq embed"]:
    """y = sum over ranks of x w, plus b once, with the rows of w split.

    Args:
        x: ``[batch, seq, *features]``, this rank's features.
        w: ``[*features, embed]``, this rank's rows.
        bias: ``[embed]``, replicated.
        lora: a low-rank addition to w, this rank's rows of its a.
        stream: the spec of the result; decides between all-reduce and reduce-scatter.
        axis: the mesh axis that splits the features.

    Returns:
        ``[batch, seq, embed]`` with spec `stream`. Collectives: as `reduce_partial`.
    """
    y = reduce_partial(_product(x.flatten(SEQ_DIM + 1), w.flatten(0, -2), lora), stream, axis)
    return y if bias is None else y + bias


def linear_defs(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    stddev: float,
    bias: tuple[int, ...] | None = None,
    bias_axes: tuple[str | None, ...] = (),
    dtype,
) -> dict[str, ParamDef]:
    """Defs ``{"w", "b"}`` of a linear layer; without `bias` (its shape) there is no ``"b"``."""
    defs = {"w": ParamDef(shape, axes, Normal(stddev), dtype)}
    if bias is not None:
        defs["b"] = ParamDef(bias, bias_axes, zeros, dtype, decay=False)
    return defs


def weights(layer: dict) -> tuple[Tensor, Tensor | None, Adapter | None]:
    """The matrix, the bias and the low-rank addition of a linear layer's parameters."""
    return layer["w"], layer.get("b"), layer.get("lora")
