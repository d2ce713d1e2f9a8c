"""Joining attention over two sets of keys by their logsumexps (Liu et al. 2023, ring attention)."""

from __future__ import annotations

from typing import Any

import torch

from functron.core.typing import Float, Tensor
from functron.ops.define import AUTO, Gradient, Kernels, Launch, check_shapes, define, type_name

_ROWS, _THREADS, _QUAD, _MOST_ROWS = 8, 256, 4, 2**31 - 1


def merge(
    out1: Float[Tensor, "*batch seq value_dim"],
    lse1: Float[Tensor, "*batch seq"],
    out2: Float[Tensor, "*batch seq value_dim"],
    lse2: Float[Tensor, "*batch seq"],
    *,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "*batch seq value_dim"], Float[Tensor, "*batch seq"]]:
    """The attention over two sets of keys, from that over each: float32 at least.

    lse = log(exp(lse1) + exp(lse2)), out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse). A set of
    which a row sees nothing has lse -inf and counts nothing, and if both are so the result is
    -inf and 0; there is no nan in derivatives of any order. No collectives.
    """
    if kernels.takes("lse_merge", out1, out2):
        return LSE_MERGE(out1, lse1, out2, lse2)
    return _formula(out1, lse1, out2, lse2)


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that differences with it are no nan."""
    return torch.where(x == float("-inf"), 0, x)


def _weights(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the two sets weigh, and the logarithm of both."""
    top = finite(torch.maximum(lse1, lse2).detach())
    first, second = (lse1 - top).exp(), (lse2 - top).exp()
    total = first + second
    positive = torch.where(total == 0, 1, total)
    lse = torch.where(total == 0, float("-inf"), top + positive.log())
    return first / positive, second / positive, lse


def _formula(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    first, second, lse = _weights(lse1, lse2)
    return upcast(out1) * first.unsqueeze(-1) + upcast(out2) * second.unsqueeze(-1), lse


def _reference(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _formula(out1, lse1, out2, lse2)
    return out.contiguous(), lse.contiguous()


def _backward(
    d_out: Tensor, d_lse: Tensor, out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, second, _ = _weights(lse1, lse2)
    apart = (d_out * (upcast(out1) - upcast(out2))).sum(-1)
    moved = (
        (d_out * first.unsqueeze(-1)).to(out1.dtype),
        first * (d_lse + second * apart),
        (d_out * second.unsqueeze(-1)).to(out2.dtype),
        second * (d_lse - first * apart),
    )
    one, two, three, four = (x.contiguous() for x in moved)
    return one, two, three, four


# --- the kernels: rows are [outer, middle, inner], wherever they lie


def _three(x: Tensor, own: int) -> Tensor:
    """`x`, whose last `own` dims are of a row, with three dims of rows."""
    dims = x.dim() - own
    x = x.reshape(1, *x.shape) if dims < 3 else x
    x = x.reshape(1, *x.shape) if dims < 2 else x
    x = x.reshape(1, *x.shape) if dims < 1 else x
    return x.flatten(0, dims - 3) if dims > 3 else x


def _rows(x: Tensor) -> Tensor:
    x = _three(x, 1)
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _packed(*rows: Tensor) -> bool:
    """Whether every access to `_QUAD` elements is aligned."""
    for x in rows:
        if x.shape[-1] % _QUAD or x.data_ptr() % (_QUAD * x.element_size()):
            return False
        if any(x.stride(i) % _QUAD for i in range(x.dim() - 1) if x.shape[i] > 1):
            return False
    return True


def _launch(
    launch: Launch, kernel: str, given: tuple, operands: tuple, made: tuple, aligned: tuple
) -> None:
    """`given` and `made` are contiguous; `operands` are out1, lse1, out2 and lse2."""
    out1, _, out2, _ = operands
    count = out1.shape[:-1].numel()
    if count > _MOST_ROWS:
        raise ValueError(
            f"lse_merge: got {count} rows; wanted at most {_MOST_ROWS}; "
            'fix: pass kernels=functron.ops.use("reference")'
        )
    if not count:
        return
    strides = [stride for x in operands for stride in x.stride()[:3]]
    launch(
        "lse_merge", kernel, -(-count // _ROWS), _THREADS, *given, *operands, *made, count,
        out1.shape[-1], *out1.shape[1:3], *strides, int(_packed(out1, out2, *aligned)),
        defines={"ELEMENT": type_name(out2, "lse_merge")},
    )  # fmt: skip


def _operands(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, ...]:
    check_shapes(
        "lse_merge",
        out2=(out2, out1.shape),
        lse1=(lse1, out1.shape[:-1]),
        lse2=(lse2, out1.shape[:-1]),
    )
    return _rows(out1.float()), _three(lse1.float(), 0), _rows(out2), _three(lse2.float(), 0)


def _kernel(
    launch: Launch, out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    out = torch.empty(out1.shape, dtype=torch.float32, device=out1.device)
    lse = torch.empty(lse1.shape, dtype=torch.float32, device=out1.device)
    operands = _operands(out1, lse1, out2, lse2)
    _launch(launch, "lse_merge_forward", (), operands, (out, lse), (out,))
    return out, lse


def _kernel_backward(
    launch: Launch,
    d_out: Tensor,
    d_lse: Tensor,
    out1: Tensor,
    lse1: Tensor,
    out2: Tensor,
    lse2: Tensor,
) -> tuple[Tensor, ...]:
    check_shapes("lse_merge", d_out=(d_out, out1.shape), d_lse=(d_lse, lse1.shape))
    given = d_out.float().contiguous(), d_lse.float().contiguous()
    operands = _operands(out1, lse1, out2, lse2)
    made = tuple(
        torch.empty(x.shape, dtype=like.dtype, device=x.device)
        for x, like in zip((out1, lse1, out2, lse2), operands, strict=True)
    )
    aligned = given[0], made[0], made[2]
    _launch(launch, "lse_merge_backward", given, operands, made, aligned)
    return made[0].to(out1.dtype), *made[1:]


def _fake(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(out1, upcast(out1[..., :0]).dtype), _empty(lse1, lse1.dtype)


def _fake_backward(d_out: Tensor, d_lse: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    return tuple(_empty(x, x.dtype) for x in operands)


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def _batch(size: int, in_dims: tuple, args: tuple, op: Any) -> tuple:
    out = op(
        *(
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args, in_dims, strict=True)
        )
    )
    return out, (0,) * len(out)


LSE_MERGE_BACKWARD = define(
    "lse_merge_backward(Tensor d_out, Tensor d_lse, Tensor out1, Tensor lse1, Tensor out2, "
    "Tensor lse2) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_kernel_backward,
    reference=_backward,
    fake=_fake_backward,
    batch=_batch,
    gradient=_backward,
)
LSE_MERGE = define(
    "lse_merge(Tensor out1, Tensor lse1, Tensor out2, Tensor lse2) -> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=_fake,
    batch=_batch,
    gradient=Gradient(
        save=lambda args, outputs: args,
        backward=lambda saved, cotangents: LSE_MERGE_BACKWARD(*cotangents, *saved),
    ),
)
