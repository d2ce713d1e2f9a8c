"""The local part of vocabulary-parallel cross-entropy, of logits or of the product that makes them.

For one rank's logits x it gives lse = log sum_j exp(x_j) and the target's logit, two numbers per
token, so that ranks exchange little and full logits exist nowhere. Where autograd would keep
several copies of the logits, this keeps the logits alone, and backward makes one tensor: d x = lse'
softmax(x) + target' onehot. Logits are read once, and no probabilities are kept.

For a product x w the logits exist a chunk at a time. Forward computes the logits of some tokens,
keeps two numbers of each, and goes on. Backward recomputes them, for all tokens in some columns:
given the log of the sum, a column's softmax needs no other column, so its part of dw is one matrix
product over all tokens, while dx, the smaller, is summed in float32. Rejected: chunks of tokens in
backward too, as in Liger-Kernel (Hsu et al. 2024): a float32 sum as large as w would be read and
written once per chunk.

Ids that index a table or columns are checked: in vocabulary-parallel lookups an id outside of the
vocabulary looks like one that another rank holds, and would count as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from functron.core import compat
from functron.core.errors import refuse
from functron.core.functions import Function
from functron.core.scopes import in_phase, phase
from functron.core.typing import Bool, Float, Int, Tensor
from functron.ops.launch import cuda, usable
from functron.ops.operations import (
    AUTO,
    PACK_BYTES,
    Gradient,
    Kernels,
    Launch,
    check_contiguous,
    check_shapes,
    define,
    leading,
    rows_of,
    statistics,
    type_name,
    upcast,
)
from functron.program.recorder import active
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.derivatives import jvp

_WARP, _MOST_THREADS, _MOST_COLUMNS = 32, 512, 2**31 - 1


def log_sum_exp_and_target(
    logits: Float[Tensor, "*batch vocab"],
    ids: Int[Tensor, "*batch"],
    valid: Bool[Tensor, " vocab"] | Int[Tensor, ""] | int | None,
    *,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """``(log sum_j exp(x_j), x[id])`` along the last dim, both in float32 at least.

    Args:
        logits: ``[..., vocab]``, floating point.
        ids: ``[...]`` int64 positions in the last dim; others give target logit 0.
        valid: number of leading columns that count; the others are padding. An int64 scalar, or an
            int, below 0 as 0; None without padding. Or ``[vocab]`` bool, False for padding: always
            computed by torch's operations.
        kernels: of ``"cross_entropy"``.

    Returns:
        Two tensors ``[...]``. Where no column counts, the first is finite but so low that its
        exponential beside any other is 0. No collectives.
    """
    is_mask = isinstance(valid, Tensor) and valid.dtype == torch.bool
    if not is_mask and kernels.takes("cross_entropy", logits):
        return CROSS_ENTROPY(logits, ids, _number(valid, logits))
    wide = logits.dtype in (torch.float32, torch.float64)
    if valid is None and wide and compat.taped_alone(logits):
        both: Any = _LossShares.apply(logits, ids)
        return both
    mask = valid if is_mask else _mask(_number(valid, logits), logits)
    both: Any = _LogSumExpTarget.apply(logits, ids, mask)
    return both


def logits_cotangent(
    d_lse: Float[Tensor, "*batch"],
    d_target: Float[Tensor, "*batch"],
    logits: Float[Tensor, "*batch vocab"],
    ids: Int[Tensor, "*batch"],
    lse: Float[Tensor, "*batch"],
    valid: Int[Tensor, ""] | int | None,
    *,
    overwrite: bool = False,
    kernels: Kernels = AUTO,
) -> Float[Tensor, "*batch vocab"]:
    """d x_j = d_lse exp(x_j - lse) + d_target [j = id]; 0 in padding but for that of the target.

    With the lse of more columns than these, it is these columns' part of the cotangent.

    Args:
        d_lse: cotangent of the log of the sum.
        d_target: of the target's logit.
        logits: ``[..., vocab]``.
        ids: as in `log_sum_exp_and_target`.
        lse: what that returned.
        valid: as there, but no mask.
        overwrite: write the result over the logits, which must be plain and contiguous.
        kernels: of ``"cross_entropy"``.

    Returns:
        ``[..., vocab]`` in the logits' dtype. No collectives.
    """
    operands = d_lse, d_target, logits, ids, lse, _number(valid, logits)
    takes = kernels.takes("cross_entropy", logits)
    if overwrite:
        (CROSS_ENTROPY_BACKWARD_ if takes else _overwrite)(*operands)
        return logits
    return CROSS_ENTROPY_BACKWARD(*operands) if takes else _pullback_of_number(*operands)


def _number(valid: Tensor | int | None, logits: Tensor) -> Tensor | None:
    return None if valid is None else compat.constant(valid, logits.device)


def _mask(valid: Tensor | None, logits: Tensor) -> Tensor | None:
    """The columns that count, ``[vocab]``, or ``[..., vocab]`` for numbers ``[...]``."""
    if valid is None:
        return None
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return columns < valid.unsqueeze(-1)


def _floor(dtype: torch.dtype) -> float:
    # finite: a rank whose columns are all padding must give exp(lse - max) = 0, not nan
    return torch.finfo(dtype).min / 4


def _mask_columns(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid, x, _floor(x.dtype))


def _places(ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which ids are columns, and an index for each."""
    return (ids >= 0) & (ids < columns), ids.clamp(0, columns - 1).unsqueeze(-1)


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    """x[id] of each row, 0 of ids that are no columns."""
    inside, at = _places(ids, x.shape[-1])
    found = torch.gather(x, -1, at).squeeze(-1)
    return torch.where(inside, found, torch.zeros_like(found))


def _statistics(logits: Tensor, ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    inside, at = _places(ids, logits.shape[-1])
    target = torch.gather(upcast(logits), -1, at).squeeze(-1)
    lse = torch.logsumexp(_mask_columns(upcast(logits), valid), -1)
    return lse, torch.where(inside, target, torch.zeros_like(target))


def _shares(d_lse: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents and logarithms with which rows where nothing counts give 0."""
    some = lse > _floor(lse.dtype) / 2
    nothing = torch.zeros_like(lse)
    return torch.where(some, d_lse, nothing).unsqueeze(-1), torch.where(some, lse, nothing)


def _pullback(*operands: Any) -> Tensor:
    """The cotangent of logits; of (d_lse, d_target, logits, ids, lse, mask of columns or None)."""
    d_lse, d_target, logits, ids, lse, valid = operands
    if compat.transforms_active() and not (torch.is_grad_enabled() or compat.differentiating()):
        made: Any = _Cotangent.apply(*operands)
        return made
    x = _mask_columns(upcast(logits), valid)
    inside, at = _places(ids, logits.shape[-1])
    d_lse, lse = _shares(d_lse, lse)
    d_target = torch.where(inside, d_target, torch.zeros_like(d_target)).unsqueeze(-1)
    if torch.is_grad_enabled() or compat.transforms_active():
        grad = (x - lse.unsqueeze(-1)).exp() * d_lse
        return torch.scatter_add(grad, -1, at, d_target).to(logits.dtype)
    grad = torch.sub(x, lse.unsqueeze(-1)).exp_().mul_(d_lse)
    return grad.scatter_add_(-1, at, d_target).to(logits.dtype)


class _Cotangent(Function):
    """`_pullback` of simulated ranks together, in place, as nothing differentiates it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*operands):  # by this name partition finds its module
        return _pullback(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, *cotangents):
        return (None,) * 6

    @staticmethod
    def vmap(info, in_dims, *operands) -> Any:
        *rest, valid = operands
        size = info.batch_size
        rest = [leading(x, dim, size) for x, dim in zip(rest, in_dims, strict=False)]
        return _Cotangent.apply(*rest, _lead_mask(valid, in_dims[-1], size, rest[2])), 0


class _LogSumExpTarget(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(*operands):  # by this name partition finds its module
        return _statistics(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, ids, valid = inputs
        ctx.has_padding = valid is not None
        saved = [logits, ids, output[0], *([valid] if valid is not None else [])]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        logits, ids, lse, *rest = ctx.saved_tensors
        d_lse, d_target = cotangents
        grad = _pullback(d_lse, d_target, logits, ids, lse, rest[0] if rest else None)
        return grad, None, None

    @staticmethod
    def jvp(ctx, d_logits, *_) -> Any:
        logits, ids, lse, *rest = ctx.saved_tensors
        x = _mask_columns(upcast(logits), rest[0] if rest else None)
        d_lse = ((x - lse.unsqueeze(-1)).exp() * upcast(d_logits)).sum(-1)
        return d_lse, _pick(upcast(d_logits), ids)

    @staticmethod
    def vmap(info, in_dims, logits, ids, valid) -> Any:
        # torch's generated rule counts d_lse once per row where only the ids are batched
        size = info.batch_size
        logits, ids = (
            leading(x, dim, size) for x, dim in zip((logits, ids), in_dims, strict=False)
        )
        valid = _lead_mask(valid, in_dims[2], size, logits)
        return _LogSumExpTarget.apply(logits, ids, valid), (0, 0)


def _lead_mask(valid: Tensor | None, dim: int | None, size: int, like: Tensor) -> Tensor | None:
    """`valid` with a dim for `size` ranks, and those of `like`, where ranks have their own."""
    if valid is None or dim is None:
        return valid
    valid = valid.movedim(dim, 0)
    return valid.reshape(size, *[1] * (like.dim() - valid.dim()), *valid.shape[1:])


class _LossShares(torch.autograd.Function):
    """`_LogSumExpTarget` on torch's tape: softmax(x) in forward, which backward overwrites.

    torch's softmax reuses a row while it is in the processor's cache, so forward and backward each
    read and write the logits once, and exponentials are computed once. At most two tensors of the
    logits' size exist, as otherwise.
    """

    @staticmethod
    def forward(ctx, logits, ids):
        shares = torch.softmax(logits, -1)
        # the largest share is 1 / sum_j exp(x_j - max)
        lse = logits.amax(-1) - shares.amax(-1).log()
        ctx.save_for_backward(logits, ids, lse, shares)
        return lse, _pick(logits, ids)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        logits, ids, lse, shares = ctx.saved_tensors
        d_lse, d_target = cotangents
        if torch.is_grad_enabled():  # to be differentiated again
            return _pullback(d_lse, d_target, logits, ids, lse, None), None
        inside, at = _places(ids, logits.shape[-1])
        multiply = torch.mul if compat.keeps_graph() else torch.Tensor.mul_
        grad = multiply(shares, d_lse.unsqueeze(-1))
        d_target = torch.where(inside, d_target, torch.zeros_like(d_target))
        return grad.scatter_add_(-1, at, d_target.unsqueeze(-1)), None


# --- the op: `valid` is an int64 scalar, or has the dims of ids, of size 1 or theirs


def _kernel(
    launch: Launch, logits: Tensor, ids: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_shapes("cross_entropy", ids=(ids, logits.shape[:-1]))
    x = rows_of(logits)
    limits, step = _limits(valid, ids)
    lse, target = (x.new_empty(ids.shape, dtype=torch.float32) for _ in range(2))
    if len(x):
        launch(
            "cross_entropy", "cross_entropy_forward", len(x), _threads(x, ids),
            x, _flat(ids), limits, lse, target, x.shape[1], x.stride(0), step,
            defines={"ELEMENT": type_name(x, "cross_entropy")},
        )  # fmt: skip
    return lse, target


def _kernel_backward(
    launch: Launch, d_lse, d_target, logits: Tensor, ids, lse, valid, *, in_place: bool = False
) -> Tensor:
    """The cotangent of logits; over them if `in_place`."""
    operands = {"d_lse": d_lse, "d_target": d_target, "ids": ids, "lse": lse}
    shapes = {name: (x, logits.shape[:-1]) for name, x in operands.items()}
    check_shapes("cross_entropy_backward", **shapes)
    if in_place:
        check_contiguous("cross_entropy_backward_", logits)
    out = logits if in_place else logits.new_empty(logits.shape)
    x = rows_of(logits)
    limits, step = _limits(valid, ids)
    if len(x):
        numbers = [_flat(value.float()) for value in (d_lse, d_target)]
        launch(
            "cross_entropy", "cross_entropy_backward", len(x), _threads(x, ids),
            *numbers, x, _flat(ids), _flat(lse.float()), limits, out,
            x.shape[1], x.stride(0), x.shape[1], step,
            defines={"ELEMENT": type_name(x, "cross_entropy")},
        )  # fmt: skip
    return out


def _kernel_backward_(*args: Any) -> None:
    _kernel_backward(*args, in_place=True)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous()


def _limits(valid: Tensor | None, ids: Tensor) -> tuple[Tensor | None, int]:
    """How many columns count, and how far apart the numbers of two rows are."""
    if valid is None:
        return None, 0
    valid = valid.to(torch.int64)
    return (valid, 0) if valid.dim() == 0 else (_flat(valid.expand(ids.shape)), 1)


def _threads(x: Tensor, ids: Tensor) -> int:
    """Of a block, for these rows: each thread reads 16 bytes at a time."""
    columns = x.shape[1]
    if not 1 <= columns <= _MOST_COLUMNS or ids.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy: got {columns} columns and {ids.dtype} ids; wanted 1 to "
            f"{_MOST_COLUMNS} columns and int64 ids; fix: split the vocabulary over more ranks, "
            'or pass kernels=functron.ops.use("reference")'
        )
    packs = -(-columns * x.element_size() // PACK_BYTES)
    return min(_MOST_THREADS, -(-packs // _WARP) * _WARP)


def _reference(logits: Tensor, ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    return _statistics(logits, ids, _mask(valid, logits))


def _pullback_of_number(*operands: Any) -> Tensor:
    *rest, valid = operands
    return _pullback(*rest, _mask(valid, rest[2])).contiguous()


def _overwrite(*operands: Any) -> None:
    d_lse, d_target, logits, ids, lse, valid = operands
    if upcast(logits) is not logits:
        logits.copy_(_pullback_of_number(*operands))
        return
    inside, at = _places(ids, logits.shape[-1])
    d_lse, lse = _shares(d_lse, lse)
    d_target = torch.where(inside, d_target, torch.zeros_like(d_target)).unsqueeze(-1)
    mask = _mask(valid, logits)
    if mask is not None:
        logits.masked_fill_(~mask, _floor(logits.dtype))
    logits.sub_(lse.unsqueeze(-1)).exp_().mul_(d_lse).scatter_add_(-1, at, d_target)


def _batch(size: int, in_dims: tuple, args: tuple, op: Any) -> tuple:
    *tensors, valid = args
    tensors = [leading(x, dim, size) for x, dim in zip(tensors, in_dims, strict=False)]
    if in_dims[-1] is not None:
        valid = _lead_mask(valid, in_dims[-1], size, tensors[1])  # of ids, or of as many cotangents
    elif valid is not None and valid.dim():
        valid = valid.unsqueeze(0)
    out = op(*tensors, valid)
    return out, tuple(0 for _ in out) if isinstance(out, tuple) else 0


CROSS_ENTROPY_BACKWARD = define(
    "cross_entropy_backward(Tensor d_lse, Tensor d_target, Tensor logits, Tensor ids, Tensor lse, "
    "Tensor? valid) -> Tensor",
    kernel=_kernel_backward,
    reference=_pullback_of_number,
    fake=lambda d_lse, d_target, logits, *rest: logits.new_empty(logits.shape),
    batch=_batch,
    gradient=_pullback_of_number,
)
CROSS_ENTROPY_BACKWARD_ = define(
    "cross_entropy_backward_(Tensor d_lse, Tensor d_target, Tensor(a!) logits, Tensor ids, "
    "Tensor lse, Tensor? valid) -> ()",
    kernel=_kernel_backward_,
    reference=_overwrite,
)
CROSS_ENTROPY = define(
    "cross_entropy(Tensor logits, Tensor ids, Tensor? valid) -> (Tensor, Tensor)",
    kernel=_kernel,
    reference=_reference,
    fake=lambda logits, *rest: (statistics(logits), statistics(logits)),
    batch=_batch,
    gradient=Gradient(
        save=lambda args, outputs: (*args, outputs[0]),
        backward=lambda saved, cotangents: (
            CROSS_ENTROPY_BACKWARD(*cotangents, saved[0], saved[1], saved[3], saved[2]),
            None,
            None,
        ),
    ),
)


_ALIGNMENT = 8  # columns of a block: 16 bytes in half precision


def linear_log_sum_exp_and_target(
    x: Float[Tensor, "tokens embed"],
    w: Float[Tensor, "embed vocab"],
    ids: Int[Tensor, " tokens"],
    valid: Int[Tensor, ""] | int | None,
    *,
    chunk_tokens: int,
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """``log_sum_exp_and_target(x @ w, ids, valid)``, with few of the logits alive at a time.

    Saved for backward are x, w, ids and one number per token. Forward and backward hold the logits
    of `chunk_tokens` tokens, or as many elements as x has. Backward recomputes them, a third more
    work than x w and its derivatives, and overwrites them with their cotangents unless traced or
    transformed. Derivatives of derivatives in reverse mode keep all.

    Args:
        x: ``[N, D]``.
        w: ``[D, V]`` in any layout; for tied embeddings ``table.mT``.
        ids: int64 ``[N]``; see `log_sum_exp_and_target`.
        valid: number of columns that count, as there.
        chunk_tokens: number of tokens whose logits exist at a time in forward.
        kernels: of ``"cross_entropy"``.

    Returns:
        Two tensors ``[N]`` in float32 at least. No collectives, in backward neither: dx is the part
        of these columns, to be summed over the ranks that split them.

    Raises:
        ValueError: `chunk_tokens` is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(
            f"linear_log_sum_exp_and_target: got chunk_tokens={chunk_tokens}; wanted 1 or more; "
            "fix: 1024, or cross_entropy(x @ w, ...) to keep all logits"
        )

    def forward(x, w, ids, valid):
        parts = [
            log_sum_exp_and_target(x[rows] @ w, ids[rows], valid, kernels=kernels)
            for rows in _slices(x.shape[0], chunk_tokens)
        ]
        lse, target = (torch.cat(column) for column in zip(*parts, strict=True))
        return (lse, target), (x, w, ids, valid, lse)

    def backward(residuals, cotangents):
        x, w, ids, valid, lse = residuals
        d_lse, d_target = cotangents
        alone = compat.unobserved()
        dw = torch.empty_like(w) if alone else None
        dx, dws = None, []
        width = _block_width(x, w.shape[1], -(-x.shape[0] // chunk_tokens))
        for columns in _slices(w.shape[1], width):
            part, first = w[:, columns], columns.start
            with in_phase("recompute"):
                logits = x @ part
            moved = logits_cotangent(
                d_lse, d_target, logits, ids - first, lse,
                None if valid is None else valid - first,
                overwrite=alone, kernels=kernels,
            )  # fmt: skip
            more = moved @ part.mT
            dx = upcast(more) if dx is None else dx.add_(more) if alone else dx + more
            if dw is None:
                dws.append(x.mT @ moved)
            else:
                torch.mm(x.mT, moved, out=dw[:, columns])
        assert dx is not None
        return dx.to(x.dtype), torch.cat(dws, 1) if dw is None else dw, None, None

    def values(*args):
        return forward(*args)[0]

    push = functools.partial(jvp, values)
    return custom_vjp(values, forward, backward, push)(x, w, ids, valid)


def _slices(size: int, step: int) -> Iterator[slice]:
    """Consecutive parts of `size`; one where it is 0."""
    return (slice(start, min(start + step, size)) for start in range(0, max(size, 1), step))


def _block_width(x: Tensor, columns: int, blocks: int) -> int:
    """Columns of a block, for so many blocks or fewer: a block costs no less than x does."""
    width = max(-(-columns // max(blocks, 1)), min(x.shape[1], columns))
    return -(-width // _ALIGNMENT) * _ALIGNMENT


# --- ids

_IDS = torch.library.Library("functron", "FRAGMENT")
_IDS.define("check_ids(Tensor ids, str name, int size, int? ignored) -> ()")


def check_ids(ids: torch.Tensor, name: str, size: int, ignored: int | None = None) -> None:
    """Check that ids are 0 to ``size - 1``, on every rank; in traced programs, when they run.

    On CPUs, also in compiled programs, the numbers are read. On other devices, and under other
    tracers than `trace`, a device-side assertion checks them without waiting.

    Args:
        ids: integers of any shape.
        name: of the ids in messages.
        size: of the vocabulary.
        ignored: one more id that is allowed; None: none.

    Raises:
        ValueError: an id is outside.
    """
    if phase() == "recompute":
        return
    if torch.compiler.is_compiling():
        _assert_ids(ids, name, size, ignored)
        return
    with compat.no_transforms(), torch.no_grad():
        plain, recorder = compat.plain(ids), active()
        if recorder is not None:
            recorder.effect(torch.ops.functron.check_ids.default, plain, name, size, ignored)
        elif compat.dispatch_modes_active():
            _assert_ids(plain, name, size, ignored)
        else:
            _run_check(plain, name, size, ignored)


def _are_inside(ids: torch.Tensor, size: int, ignored: int | None) -> torch.Tensor:
    inside = (ids >= 0) & (ids < size)
    return inside if ignored is None else inside | (ids == ignored)


def _wanted_ids(size: int, ignored: int | None) -> str:
    return f"0 to {size - 1}" + ("" if ignored is None else f", or {ignored}, which is ignored")


def _assert_ids(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    message = f"{name} outside of the vocabulary; wanted {_wanted_ids(size, ignored)}"
    torch._assert_async(_are_inside(ids, size, ignored).all(), message)


def _check_ids(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    if not ids.numel():
        return
    low, high = ids.aminmax()
    if low >= 0 and high < size:
        return
    bad = ids[~_are_inside(ids, size, ignored)]
    if not bad.numel():
        return
    count = f"{bad.numel()} ids" if bad.numel() > 1 else "one id"
    got = f"{count} outside, from {int(bad.min())} to {int(bad.max())}"
    fix = f"use a model with vocab_size > {int(bad.max())}, or another tokenizer"
    if int(bad.min()) < 0:
        fix = "give no ids below 0"
        if ignored is not None:
            fix += f"; targets that shall not count are {ignored}"
    refuse(f"{name} outside of the vocabulary", name, got, _wanted_ids(size, ignored), fix)


def _check_kernel(launch: Launch, ids: torch.Tensor, size: int, ignored: int | None) -> None:
    """A device-side assertion in one launch, where torch's operations take seven."""
    flat, ignores = _flat(ids.long()), int(ignored is not None)
    blocks = min(-(-len(flat) // _MOST_THREADS), launch.processors(ids.device))
    launch(
        "cross_entropy", "check_ids", blocks, _MOST_THREADS,
        flat, len(flat), size, ignored or 0, ignores, defines={"ELEMENT": "float"},
    )  # fmt: skip


def _run_check(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    if ids.device.type == "cpu":
        _check_ids(ids, name, size, ignored)
    elif ids.device.type == "cuda" and usable(ids.device) is None:
        _check_kernel(cuda, ids, size, ignored)
    else:
        _assert_ids(ids, name, size, ignored)


_IDS.impl("check_ids", _run_check, "CompositeExplicitAutograd")
_IDS.impl("check_ids", lambda *args: None, "Meta")
