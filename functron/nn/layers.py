"""Layers of every transformer: linear, embedding, feed-forward, norm and dropout.

They are tensor-parallel (Shoeybi et al. 2019, section 3), with sequence parallelism. The residual
stream is ``[batch, seq, embed]`` with a spec: ``P(data)`` keeps the sequence whole on every
tensor-parallel rank, ``P(data, "tp")`` splits it (Korthikanti et al. 2022). Between a column- and a
row-parallel layer activations are split over heads or features instead.

| layer                     | enters with      | leaves with                                   |
|---------------------------|------------------|-----------------------------------------------|
| column-parallel: w splits by columns | the stream | its part of the features; nothing exchanged |
| row-parallel: w splits by rows | its features | the stream: psum, or psum_scatter along seq |

No backward rule is written anywhere: the transposes of these collectives are the right ones. The
embedding is split by rows of its vocabulary; norms are over the embedding dim, which is never
split; masks of dropout are the same on every mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import compat, random
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Key, Tensor
from functron.nn.packed import PackedMatrix, as_numbers, multiply_packed
from functron.ops.cross_entropy import check_ids
from functron.ops.glu import glu, glu_linear, halves
from functron.ops.grouped_matmul import grouped_matmul
from functron.ops.moe import look_up
from functron.ops.norms import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    LEAN_LAYER_NORM,
    LEAN_RMS_NORM,
    RMS_NORM,
    is_lean,
    rms_norm_rows_backward,
)
from functron.ops.operations import AUTO, Kernels
from functron.spmd import collectives as lax
from functron.spmd.axes import AxisNames
from functron.spmd.params import JOINED, Constant, Normal, ParamDef, ones, zeros
from functron.spmd.simulate import product
from functron.spmd.spec import DimCut, P, dim_sizes, entry_axes, fill, part_length, take
from functron.transforms.capture import is_watched, name_value
from functron.transforms.parameter_gather import Encoded

SEQ_DIM = 1


class Adapter(NamedTuple):
    """A low-rank addition to a matrix w (Hu et al. 2021): x w becomes x w + scale (x a) b.

    It stands beside w in a layer's parameters, as ``"lora"``; see `functron.lora`.

    Attributes:
        a: ``[*in, rank]``, its leading dims split as w's are.
        b: ``[rank, *out]``, its other dims split as w's are.
        scale: a scalar; a tensor, so that parameters say by themselves what they compute.
        magnitude: of DoRA (Liu et al. 2024, "Weight-Decomposed Low-Rank Adaptation"), ``[*out]``;
            None: there is none. Each column of w + scale a b gets the length |w| + magnitude, |w|
            being that of w's column, and no gradient flows through lengths (section 4.3). As it
            begins as zero, and PEFT's, which is the length, as |w|, both learn the same.
        All of experts have a leading dim of experts, split as w's is.
    """

    a: Any
    b: Any
    scale: Any
    magnitude: Any = None


def find_lengths(
    w: Float[Tensor, "inputs outputs"] | PackedMatrix, adapter: Adapter, inner: AxisNames = ()
) -> Float[Tensor, "both outputs"]:
    """The lengths of the columns of w, and of those of w + scale a b, in float32 at least.

    Args:
        w: perhaps a rank's rows, if axes `inner` split them: then one all-reduce of the results.
    """
    wide = torch.promote_types(adapter.a.dtype, torch.float32)
    matrices = (as_numbers(w, wide), *adapter[:3])
    matrix, a, b, scale = (lax.stop_gradient(x).to(wide) for x in matrices)
    whole = matrix + scale * (a.flatten(0, -2) @ b.flatten(1))
    squares = torch.stack([matrix.square().sum(0), whole.square().sum(0)])
    return lax.psum(squares, inner).sqrt()


def find_growth(lengths: Tensor, magnitude: Tensor) -> Tensor:
    """DoRA's factor of each column: (|w| + magnitude) / |w + scale a b|."""
    before, after = lengths.unbind(0)
    none = after == 0
    grown = (before + magnitude.flatten().to(before.dtype)) / torch.where(none, 1, after)
    return torch.where(none, 1, grown)


def _linear(x: Tensor, w: Tensor, **where: Any) -> Tensor:
    return product(x, w)


def _multiply_grouped(x: Tensor, w: Tensor, sizes: Tensor, *zeros: bool, **where: Any) -> Tensor:
    return grouped_matmul(x, w, sizes, *zeros)


@shows_differences
class Matmul(NamedTuple):
    """The functions that compute the products of linear layers, in the place of torch's.

    Such as quantised ones (`functron.precision`). Their operands are this rank's parts, and
    arguments name the mesh axes that split each; absent axes, and those of one rank, split nothing.

    Attributes:
        linear: ``linear(x, w, *, name, inner, outer, partial)`` is x w, of x ``[..., inputs]`` and
            w ``[inputs, outputs]``. Axes `inner` split inputs, so that the result is a part of a
            sum; `outer` split outputs. Over `partial` x and w are the same, and cotangents of the
            result are parts of a sum. `name` is the layer's in its block. Where this rank's part of
            a sequence is two runs of consecutive tokens (zigzag), it is passed ``runs=2`` too.
        grouped: ``grouped(x, w, sizes, zeros, zeros_back, *, name, inner, outer, experts)``:
            `functron.ops.grouped_matmul` of experts that the axes `experts` divide.
        draws: whether `linear` draws random numbers, and takes the layer's ``key``; ``rows``, the
            spec of x's leading dims; and ``index``, their global positions.
        remembers: whether both take ``histories``: statistics of earlier steps, by name.
        first: number of leading layers that use torch's products instead.
        last: number of trailing layers that do.
        logits: whether `linear` also computes logits.
    """

    linear: Callable[..., Tensor] = _linear
    grouped: Callable[..., Tensor] = _multiply_grouped
    draws: bool = False
    remembers: bool = False
    first: int = 0
    last: int = 0
    logits: bool = False

    def of_layer(self, layer: int, num_layers: int) -> Matmul:
        """Those of a layer, counted from 0; modules after all layers have those of the last."""
        high = layer < self.first or (self.last > 0 and layer >= num_layers - self.last)
        return MATMUL if high else self

    @property
    def of_logits(self) -> Matmul:
        """Those of the product that makes logits."""
        return self if self.logits else MATMUL


MATMUL = Matmul()
"""Matmul by torch."""


def sequence_axes(stream: P) -> tuple[str, ...]:
    """The mesh axes that split the sequence dim of a stream with this spec."""
    return entry_axes(stream[SEQ_DIM]) if len(stream) > SEQ_DIM else ()


def uneven_length(stream: P) -> int | None:
    """The length of whole sequences, where `stream` splits them as `Uneven`; else None."""
    return dim_sizes(stream, SEQ_DIM + 1)[SEQ_DIM]


def _length_over(stream: P, axis: str) -> int | None:
    """That of the part of an `Uneven` sequence that all ranks of `axis` have together."""
    size, others = uneven_length(stream), (a for a in sequence_axes(stream) if a != axis)
    return None if size is None else part_length(size, [lax.axis_size(a) for a in others])


def name_columns(y: Tensor, name: str, stream: P, axis: str = "tp") -> Tensor:
    """y ``[batch, seq, columns, ...]``, named for `functron.capture`.

    A rank has its part of the columns over `axis`, and all tokens of `axis`.
    """
    if not is_watched():
        return y
    tokens = tuple(each for each in sequence_axes(stream) if each != axis)
    return name_value(y, name, P(stream[0] if len(stream) else None, tokens, axis))


def gather_sequence(
    x: Float[Tensor, "batch seq embed"], stream: P, axis: str = "tp"
) -> Float[Tensor, "batch whole_seq embed"]:
    """The stream with its sequence whole over `axis`: ``[B, T / n, D]`` to ``[B, T, D]``.

    Identity unless `stream` splits the sequence by `axis`; then one all-gather of the result's
    bytes, and in backward one reduce-scatter. Padding of an `Uneven` sequence is left out.
    """
    if axis not in sequence_axes(stream):
        return x
    x, length = lax.all_gather(x, axis, axis=SEQ_DIM, tiled=True), _length_over(stream, axis)
    return x if length in (None, x.shape[SEQ_DIM]) else x.narrow(SEQ_DIM, 0, length)


def reduce_partial(
    y: Float[Tensor, "batch whole_seq embed"], stream: P, axis: str = "tp"
) -> Float[Tensor, "batch seq embed"]:
    """The stream from every rank's part of a sum over `axis`.

    One all-reduce of y's bytes; where `stream` splits the sequence by `axis`, one reduce-scatter to
    ``[B, T / n, D]`` instead, of an `Uneven` sequence with padding of zeros. Backward: all-reduce,
    or all-gather.
    """
    if axis not in sequence_axes(stream):
        return lax.psum(y, axis)
    if uneven_length(stream) is not None:
        y = fill(y, SEQ_DIM, (axis,))
    return lax.psum_scatter(y, axis, scatter_dimension=SEQ_DIM, tiled=True)


def _product(
    x: Tensor,
    w: Tensor | Encoded | PackedMatrix,
    lora: Adapter | None,
    matmul: Matmul,
    where: Mapping[str, Any],
) -> Tensor:
    """x w + scale (x a) b for a matrix w ``[in, out]``; w + scale a b is formed for DoRA alone.

    Linear in x and in the rows of w and a, so that it may be any rank's part of a sum.
    """
    if isinstance(w, PackedMatrix):
        assert matmul is MATMUL
        y = multiply_packed(x, w)
    else:
        y = matmul.linear(x, w, **where)
    if lora is None:
        return y
    narrow = x @ lora.a.flatten(0, -2)
    y = y + (narrow * lora.scale.to(narrow.dtype)) @ lora.b.flatten(1)
    if lora.magnitude is None:
        return y
    assert not isinstance(w, Encoded)
    return y * find_growth(find_lengths(w, lora, where["inner"]), lora.magnitude).to(y.dtype)


def column_parallel(
    x: Float[Tensor, "*batch embed"],
    w: Float[Tensor, "embed *features"] | Encoded | PackedMatrix,
    bias: Float[Tensor, "*features"] | None = None,
    lora: Adapter | None = None,
    *,
    name: str = "linear",
    axis: AxisNames = "tp",
    replicated: bool = False,
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "*outputs"]:
    """y = x w + b, with the columns of w split.

    Args:
        x: the same on all ranks of the axis (call `gather_sequence` first).
        w: this rank's columns; several feature dims are kept apart. With codes, for `matmul` that
            read them; or packed.
        lora: a low-rank addition to w, this rank's columns of its b.
        name: of the layer, for `matmul`.
        axis: the mesh axis that splits the columns; () where all ranks have them all.
        replicated: it does not split them, and x is the same on its ranks.
        matmul: computes x w.

    Returns:
        ``[..., *features]``, this rank's features. No collectives but those of `matmul`.
    """
    own: Any = {"outer": (), "partial": axis} if replicated else {"outer": axis, "partial": ()}
    where = {"name": name, "inner": (), **own}
    y = _product(x, w.flatten(1), lora, matmul, where)
    y = y.unflatten(-1, w.shape[1:]) if w.dim() > 2 else y
    return y if bias is None else y + bias


def row_parallel(
    x: Float[Tensor, "batch whole_seq *features"],
    w: Float[Tensor, "*features embed"] | Encoded | PackedMatrix,
    bias: Float[Tensor, " embed"] | None = None,
    lora: Adapter | None = None,
    *,
    stream: P,
    axis: str = "tp",
    name: str = "linear",
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "batch seq embed"]:
    """y = sum over ranks of x w, plus b once, with the rows of w split.

    Args:
        x: this rank's features.
        w: this rank's rows. With codes, as of `column_parallel`.
        bias: replicated.
        lora: a low-rank addition to w, this rank's rows of its a.
        stream: the spec of the result; decides between all-reduce and reduce-scatter.
        axis: the mesh axis that splits the features.
        name: of the layer, for `matmul`.
        matmul: computes x w.

    Collectives: as `reduce_partial`, and those of `matmul`.
    """
    where = {"name": name, "inner": axis, "outer": (), "partial": ()}
    y = _product(x.flatten(SEQ_DIM + 1), w.flatten(0, -2), lora, matmul, where)
    y = reduce_partial(y, stream, axis)
    return y if bias is None else y + bias


def linear_defs(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    stddev: float,
    bias: tuple[int, ...] | None = None,
    bias_axes: tuple[str | None, ...] = (),
    dtype,
    pieces: tuple[tuple[str, int], ...] = (),
    matrix: tuple[int, ...] = (),
) -> dict[str, ParamDef]:
    """Defs ``{"w", "b"}`` of a linear layer; without `bias` (its shape) there is no ``"b"``.

    With `pieces` it is several that are joined; with `matrix` `Matmul` computes it. See
    `ParamDef`.
    """
    defs = {"w": ParamDef(shape, axes, Normal(stddev), dtype, pieces=pieces, matrix=matrix)}
    if bias is not None:
        defs["b"] = ParamDef(bias, bias_axes, zeros, dtype, decay=False, pieces=pieces)
    return defs


def weights(layer: dict) -> tuple[Tensor | Encoded | PackedMatrix, Tensor | None, Adapter | None]:
    """The matrix, the bias and the low-rank addition of a linear layer's parameters."""
    return layer["w"], layer.get("b"), layer.get("lora")


def apart(params: dict, matmul: Matmul) -> dict:
    """The parameters of several layers, with joined matrices apart, unless products are torch's.

    Others scale, draw random numbers and cut into blocks by the columns of a matrix, and a rank's
    part of two joined matrices is no run of columns.
    """
    if matmul is MATMUL:
        return params
    made = dict(params)
    for joined, names in JOINED.items():
        if joined in made:
            layer = made.pop(joined)
            own: list[dict] = [{} for _ in names]
            for key, value in layer.items():
                for one, part in zip(own, _split_joined(value, len(names)), strict=True):
                    one[key] = part
            made |= zip(names, own, strict=True)
    return made


def _split_joined(value: Any, count: int) -> list:
    if isinstance(value, Adapter):
        sides = [_split_joined(value.b, count), [None] * count]
        if value.magnitude is not None:
            sides[1] = _split_joined(value.magnitude, count)
        return [value._replace(b=b, magnitude=m) for b, m in zip(*sides, strict=True)]
    sizes = (value.shape[-2] - count + 1, *[1] * (count - 1))
    parts = value.split(sizes, -2)
    return [x.flatten(-3, -2) if x.shape[-2] > 1 else x.squeeze(-2) for x in parts]


def embed_tokens(
    table: Float[Tensor, "rows embed"],
    tokens: Int[Tensor, "batch whole_seq"],
    *,
    stream: P,
    axis: str = "tp",
    scale: float = 1.0,
    vocab_size: int | None = None,
) -> Float[Tensor, "batch seq embed"]:
    """x_t = scale table[token_t], with the rows of the table split over `axis`.

    Every rank looks up the tokens whose rows it holds and contributes zeros for the others.

    Args:
        table: ``[vocab / n, embed]``, this rank's rows.
        tokens: int64, the whole sequence on every rank.
        stream: the spec of the result.
        scale: rounded to the table's dtype before it multiplies (Gemma).
        vocab_size: how many rows over all ranks are no padding; None: all.

    Collectives: as `reduce_partial`.

    Raises:
        ValueError: a token is outside of the vocabulary; on CUDA a device-side assertion.
    """
    whole = table.shape[0] * lax.axis_size(axis) if vocab_size is None else vocab_size
    check_ids(tokens, "tokens", whole)
    rows = tokens - lax.axis_index(axis) * table.shape[0]
    found = look_up(table, rows, whole=lax.axis_size(axis) == 1)
    if scale != 1:
        found = found * torch.full((), scale, dtype=found.dtype, device=found.device)
    return reduce_partial(found, stream, axis)


def stream_positions(
    x: Float[Tensor, "batch seq *features"],
    stream: P,
    positions: Int[Tensor, "*batch whole_seq"] | None = None,
    axis: str = "tp",
) -> Int[Tensor, "*batch seq"]:
    """The positions in the sequence, int64 ``[seq]``, of the part of the stream that x holds.

    Those of padding (`Uneven`) are 0.

    Args:
        x: this rank's part of the stream.
        stream: its spec.
        positions: those of the tokens that all ranks of `axis` hold together, ``[whole_seq]`` or
            ``[batch, whole_seq]``; None: they are in order (see `functron.nn.context`).
    """
    size, axes = x.shape[SEQ_DIM], sequence_axes(stream)
    length = uneven_length(stream)
    if positions is None and length is not None:
        return take(torch.arange(length, device=x.device), (DimCut(-1, axes),))
    if positions is None:
        return lax.global_index(size, axes, device=x.device)
    if axis not in axes or lax.axis_size(axis) == 1:
        return positions
    if length is not None:
        return take(positions, (DimCut(-1, (axis,)),))
    return torch.index_select(positions, -1, lax.global_index(size, axis, device=x.device))


def add_positions(
    x: Float[Tensor, "batch seq embed"],
    table: Float[Tensor, "max_seq embed"],
    *,
    stream: P,
    positions: Int[Tensor, "*batch whole_seq"] | None = None,
) -> Float[Tensor, "batch seq embed"]:
    """x_t + table[t] (learned absolute positions; Radford et al. 2019).

    The table is replicated; x has spec `stream`, and positions are as in `stream_positions`.
    """
    return x + look_up(table, stream_positions(x, stream, positions), whole=True)


Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "silu": F.silu,
    }
)


_XIELU_LINEAR, _XIELU_LAST = 0.5, -1e-6


def xielu_defs(dtype: torch.dtype) -> dict:
    """Defs ``{"positive", "negative"}`` of `xielu`, scalars."""
    starts = {"positive": 0.8, "negative": 0.8 - _XIELU_LINEAR}
    return {
        name: ParamDef((), (), Constant(math.log(math.expm1(start))), dtype, decay=False)
        for name, start in starts.items()
    }


def xielu(params: dict, x: Tensor) -> Tensor:
    """a x^2 + x / 2 of positive x, b (e^x - 1 - x) + x / 2 of others (Huang & Schlag 2024).

    a = softplus(positive) and b = 1 / 2 + softplus(negative) are learned (Apertus).
    """
    above, below = (F.softplus(params[name].to(x.dtype)) for name in ("positive", "negative"))
    curved = torch.expm1(x.clamp(max=_XIELU_LAST)) - x
    return _XIELU_LINEAR * x + torch.where(x > 0, above * x * x, (_XIELU_LINEAR + below) * curved)


GATE_UP = (("gate", 1), ("up", 1))
"""The pieces of ``"gate_up"``, in the last dim but one."""


def mlp_defs(
    embed_dim: int,
    mlp_dim: int,
    *,
    gated: bool,
    bias: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
    fused: bool = False,
) -> dict:
    """Defs ``{"up", "gate"?, "down"}``, each ``{"w", "b"?}``.

    With `fused`, where there is a gate, ``"gate_up"`` in place of both: ``[embed, 2, mlp]``.
    """

    def widen(*joined: int, pieces: tuple[tuple[str, int], ...] = ()) -> dict:
        apart = (None,) * len(joined)
        return linear_defs(
            (embed_dim, *joined, mlp_dim),
            ("embed", *apart, "mlp"),
            stddev=stddev,
            bias=(*joined, mlp_dim) if bias else None,
            bias_axes=(*apart, "mlp"),
            dtype=dtype,
            pieces=pieces,
            matrix=(1, 1 + len(joined)),
        )

    down = {
        "down": linear_defs(
            (mlp_dim, embed_dim),
            ("mlp", "embed"),
            stddev=out_stddev,
            bias=(embed_dim,) if bias else None,
            bias_axes=("embed",),
            dtype=dtype,
            matrix=(1, 1),
        )
    }
    if gated and fused:
        return {"gate_up": widen(2, pieces=GATE_UP), **down}
    return {"up": widen(), **down, **({"gate": widen()} if gated else {})}


def mlp(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    *,
    activation: Activation | Literal["xielu"],
    stream: P,
    axis: str = "tp",
    kernels: Kernels = AUTO,
    matmul: Matmul = MATMUL,
) -> Float[Tensor, "batch seq embed"]:
    """y = act(x up) down, or (act(x gate) * (x up)) down where there is a gate (Shazeer 2020).

    Args:
        params: this rank's part of `mlp_defs`; with "xielu", which has no gate, those of
            `xielu_defs` as ``"activation"``.
        x: has spec `stream`, as the result.
        kernels: of ``"glu"``.
        matmul: computes the products. Other ones than torch's keep the gated features for
            backward.

    Collectives: one all-reduce forward and one backward; with a split sequence, all-gather and
    reduce-scatter each.
    """
    params = apart(params, matmul)
    x = gather_sequence(x, stream, axis)
    if activation == "xielu":
        assert "up" in params
        assert "gate" not in params
        act = functools.partial(xielu, params["activation"])
    else:
        act = ACTIVATIONS[activation]
    w, bias, lora = weights(params["down"])
    narrow: Any = {"stream": stream, "axis": axis, "name": "mlp/down", "matmul": matmul}

    def linear(name: str) -> Tensor:
        own: Any = {"name": f"mlp/{name}", "axis": axis, "matmul": matmul}
        return column_parallel(x, *weights(params[name]), **own).flatten(SEQ_DIM + 1)

    gate, up = widen(params, linear)
    if gate is None:
        assert up is not None
        hidden = act(up)
    elif not kernels.takes("glu", gate, up) or is_watched():
        gate, up = halves(gate, up)
        hidden = act(gate) * up
    elif lora is None and matmul is MATMUL:
        assert isinstance(w, Tensor)
        assert activation != "xielu"
        y = reduce_partial(glu_linear(gate, up, w, activation), stream, axis)
        return y if bias is None else y + bias
    else:
        assert activation != "xielu"
        hidden = glu(gate, up, activation)
    hidden = name_columns(hidden, "hidden", stream, axis)
    return row_parallel(hidden, w, bias, lora, **narrow)


def widen(params: dict, linear: Callable[[str], Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The gate and the other features of a feed-forward layer, each the result of its `linear`.

    ``(both, None)`` where they are joined in one dim, and ``(None, features)`` without a gate.
    """
    if "gate_up" in params:
        return linear("gate_up"), None
    up = linear("up")
    return linear("gate") if "gate" in params else None, up


NormKind = Literal["rms", "layer", "scaled_layer", "bare_layer"]


def norm_defs(
    size: int,
    kind: NormKind,
    *,
    axis: str | None,
    dtype: torch.dtype,
    zero_centered: bool = False,
) -> dict:
    """Defs ``{"scale"}`` of an RMSNorm, or ``{"scale", "bias"}`` of a LayerNorm, over `size`.

    A "scaled_layer" is a LayerNorm without a bias, ``{"layer_scale"}``, a "bare_layer" one without
    parameters, ``{}``. The scale starts at 1; with `zero_centered` it is what is added to 1, and
    starts at 0.
    """
    if kind == "bare_layer":
        return {}
    start = zeros if zero_centered else ones
    if kind == "scaled_layer":
        return {"layer_scale": ParamDef((size,), (axis,), start, dtype, decay=False)}
    defs = {"scale": ParamDef((size,), (axis,), start, dtype, decay=False)}
    if kind == "layer":
        defs["bias"] = ParamDef((size,), (axis,), zeros, dtype, decay=False)
    return defs


def rms_norm(
    x: Float[Tensor, "*batch embed"], scale: Float[Tensor, " embed"], *, eps: float
) -> Float[Tensor, "*batch embed"]:
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dim (Zhang & Sennrich 2019, eq. 4).

    Computed in float32 at least, and returned in x's dtype. For backward x, the scale and a number
    for each row are kept.
    """
    plain = x.dtype == scale.dtype in (torch.float32, torch.float64)
    if plain and compat.taped_alone(x, scale):
        normed: Any = _RMSNorm.apply(x, scale, eps)
        return normed
    fused = x.is_cuda and x.dtype == scale.dtype  # torch has the same for these
    if fused or not is_lean():
        return F.rms_norm(x, scale.shape, scale, eps)
    return LEAN_RMS_NORM(x, scale, eps, False)[0]


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` for torch's tape alone, in fewer passes over memory than torch composes it of."""

    @staticmethod
    def forward(ctx, x, scale, eps):
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, rstd)
        ctx.eps = eps
        return torch.mul(x, rstd).mul_(scale)

    @staticmethod
    def backward(ctx, *cotangents):
        (dy,), (x, scale, rstd) = cotangents, ctx.saved_tensors
        size = x.shape[-1]
        if torch.is_grad_enabled():  # which differentiates this too
            dx, dscale = rms_norm_rows_backward(dy, x, scale, ctx.eps, False)
            return dx, dscale.sum_to_size(scale.shape), None
        normed = x * rstd
        product = dy * normed
        dscale = product.sum_to_size(scale.shape)
        share = (product @ scale).unsqueeze_(-1).div_(-size)
        dx = torch.mul(dy, scale, out=product).addcmul_(normed, share).mul_(rstd)
        return dx, dscale, None


def layer_norm(
    x: Float[Tensor, "*batch embed"],
    scale: Float[Tensor, " embed"],
    bias: Float[Tensor, " embed"],
    *,
    eps: float,
) -> Float[Tensor, "*batch embed"]:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last dim (Ba et al. 2016)."""
    return _layer_norm(x, scale, bias, eps)


def _layer_norm(x: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not compat.pushing_forward():
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps)
    # torch takes the mean and the deviation for constants where its tangent is differentiated
    # again (grad of jvp; 2.11 to 2.13)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if scale is None else y * scale.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def norm(
    params: dict,
    x: Float[Tensor, "*batch embed"],
    *,
    eps: float,
    zero_centered: bool = False,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "*batch embed"]:
    """The norm whose parameters these are: LayerNorm with a bias or nothing, RMSNorm with a scale.

    Args:
        params: as `norm_defs`; ``{}``: LayerNorm without scale and bias (OLMo; Groeneveld et al.
            2024); ``{"layer_scale"}``: without a bias (Cohere). No kernel computes these two.
        zero_centered: multiply by 1 + scale (Gemma; Megatron's zero-centered gamma).
        kernels: of ``"rms_norm"`` and ``"layer_norm"``.
    """
    if not params:
        return _layer_norm(x, None, None, eps)
    if "layer_scale" in params:
        wide = torch.promote_types(x.dtype, torch.float32)
        around = 1.0 if zero_centered else 0.0
        scale = params["layer_scale"].to(wide) + around
        return _layer_norm(x.to(wide), scale, None, eps).to(x.dtype)
    scale, bias, dtype = params["scale"], params.get("bias"), x.dtype
    if kernels.takes("rms_norm" if bias is None else "layer_norm", x, scale, bias):
        if bias is None:
            return RMS_NORM(x, scale, eps, zero_centered)[0]
        return LAYER_NORM(x, scale, bias, eps, zero_centered)[0]
    if zero_centered:
        if x.dtype != torch.promote_types(dtype, torch.float32) and is_lean():
            lean = LEAN_RMS_NORM if bias is None else LEAN_LAYER_NORM
            return lean(*(v for v in (x, scale, bias) if v is not None), eps, True)[0]
        # in bfloat16, 1 + scale would lose the digits that this parametrisation is there to keep
        wide = torch.promote_types(dtype, torch.float32)
        x, scale, bias = x.to(wide), 1 + scale.to(wide), None if bias is None else bias.to(wide)
    if bias is not None:
        return layer_norm(x, scale, bias, eps=eps).to(dtype)
    return rms_norm(x, scale, eps=eps).to(dtype)


def add_norm(
    params: dict,
    x: Float[Tensor, "*batch embed"],
    residual: Float[Tensor, "*batch embed"],
    *,
    eps: float,
    zero_centered: bool = False,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "*batch embed"], Float[Tensor, "*batch embed"]]:
    """``(norm(x + residual), x + residual)``: the input of the next layer, and the residual stream.

    Kernels compute both in one pass. Arguments are those of `norm`.
    """
    scale, bias = params.get("scale"), params.get("bias")
    op = "rms_norm" if bias is None else "layer_norm"
    alike = x.dtype == residual.dtype and x.shape == residual.shape
    if scale is not None and alike and kernels.takes(op, x, residual, scale, bias):
        if bias is None:
            return ADD_RMS_NORM(x, residual, scale, eps, zero_centered)[:2]
        return ADD_LAYER_NORM(x, residual, scale, bias, eps, zero_centered)[:2]
    total = x + residual
    return norm(params, total, eps=eps, zero_centered=zero_centered, kernels=kernels), total


def dropout(
    x: Float[Tensor, "batch seq *features"],
    key: Key | None,
    *,
    rate: float,
    rows: Int[Tensor, " batch"],
    stream: P,
    positions: Int[Tensor, " whole_seq"] | None = None,
    places: Int[Tensor, "batch whole_seq"] | None = None,
) -> Float[Tensor, "batch seq *features"]:
    """y = x * mask / (1 - rate), mask ~ Bernoulli(1 - rate) (Srivastava et al. 2014).

    The mask is a function of the key and of the *global* position of each element, so data,
    sequence and microbatch splits all see the same one. Each rank draws only its own elements.

    Args:
        x: has spec `stream`.
        key: a key, or None for no dropout (evaluation).
        rate: the fraction dropped; 0 is the identity.
        rows: int64, the index of each sample within the global batch.
        positions: as in `stream_positions`, of places in the sample and not in its documents.
        places: of tokens in the whole batch, sample after sample, where their order is another;
            `rows` and `positions` are then not read.

    Raises:
        ValueError: the rate is not in [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: got rate={rate}; wanted at least 0 and below 1")
    if key is None or rate == 0:
        return x
    # the size of the first dim does not enter the numbers: it is the slowest of the counter
    if places is not None:
        lead = (stream_positions(x, stream, places).flatten(),)
        shape = (lead[0].shape[0],)
    else:
        lead = (rows, stream_positions(x, stream, positions))
        seq = uneven_length(stream) or x.shape[SEQ_DIM] * lax.axis_size(sequence_axes(stream))
        shape = (x.shape[0], seq)
    features = x.shape[SEQ_DIM + 1 :]
    index = (*lead, *[None] * len(features))
    keep = random.bernoulli(key, 1 - rate, (*shape, *features), index=index).view(x.shape)
    return torch.where(keep, x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device))
