"""The local half of vocabulary-parallel cross-entropy: reads logits once, keeps no probabilities.

For one rank's logits x it gives lse = log sum_j exp(x_j) and the target's logit. Both are one
number per token, so what ranks exchange afterwards is small and the full logits never exist
anywhere. Autograd would keep several copies of the logits; this keeps the logits alone, and
backward makes the one tensor it returns: d x = lse' softmax(x) + target' onehot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from functron import compat
from functron.typing import Bool, Float, Int, Tensor


def log_sum_exp_and_target(
    logits: Float[Tensor, "*batch vocab"],
    ids: Int[Tensor, "*batch"],
    valid: Bool[Tensor, " vocab"] | None,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """``(log sum_j exp(x_j), x[id])`` along the last dim, both in float32 at least.

    Args:
        logits: ``[..., vocab]``, floating point.
        ids: ``[...]`` int64 positions in the last dim; anything outside it gives target logit 0.
        valid: ``[vocab]`` bool, False for columns that are padding; None when there is none.

    Returns:
        Two tensors ``[...]``. No collectives.
    """
    both: Any = _LogSumExpTarget.apply(logits, ids, valid)
    return both


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _masked(x: Tensor, valid: Tensor | None) -> Tensor:
    # a finite floor: a rank whose columns are all padding must give exp(lse - max) = 0, not nan
    return x if valid is None else torch.where(valid, x, torch.finfo(x.dtype).min / 4)


class _LogSumExpTarget(Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(logits, ids, valid):
        x = _masked(_upcast(logits), valid)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        at = ids.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        target = torch.gather(_upcast(logits), -1, at).squeeze(-1)
        return torch.logsumexp(x, -1), torch.where(inside, target, torch.zeros_like(target))

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
        x = _masked(_upcast(logits), rest[0] if rest else None)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        at = ids.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        d_target = torch.where(inside, d_target, torch.zeros_like(d_target)).unsqueeze(-1)
        if torch.is_grad_enabled() or compat.transforms_active():
            grad = (x - lse.unsqueeze(-1)).exp() * d_lse.unsqueeze(-1)
            return torch.scatter_add(grad, -1, at, d_target).to(logits.dtype), None, None
        grad = torch.sub(x, lse.unsqueeze(-1)).exp_().mul_(d_lse.unsqueeze(-1))
        return grad.scatter_add_(-1, at, d_target).to(logits.dtype), None, None

    @staticmethod
    def jvp(ctx, d_logits, *_) -> Any:
        compat.refuse_nested_jvp()
        logits, ids, lse, *rest = ctx.saved_tensors
        x = _masked(_upcast(logits), rest[0] if rest else None)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        at = ids.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        moved = torch.gather(_upcast(d_logits), -1, at).squeeze(-1)
        return (
            ((x - lse.unsqueeze(-1)).exp() * _upcast(d_logits)).sum(-1),
            torch.where(inside, moved, torch.zeros_like(moved)),
        )

    @staticmethod
    def vmap(info, in_dims, logits, ids, valid) -> Any:
        # torch's generated rule counts d_lse once per row where only the ids are batched
        size = info.batch_size
        logits, ids = (
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((logits, ids), in_dims[:2], strict=True)
        )
        if in_dims[2] is not None:
            valid = valid.movedim(in_dims[2], 0)
            valid = valid.reshape(size, *[1] * (logits.dim() - valid.dim()), *valid.shape[1:])
        return _LogSumExpTarget.apply(logits, ids, valid), (0, 0)
