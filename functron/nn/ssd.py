"""State-space duality: the selective state space of Mamba-2, by chunks and token by token.

Per head, a state S ``[head_dim, state_dim]`` decays, takes up each token's input, and is read:

    S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T        y_t = S_t c_t

(Dao & Gu 2024, "Transformers are SSMs", eq. 1 and section 7). `ssd_step` is this recurrence. `ssd`
computes the same of a whole sequence with matrix products: within a chunk it is masked linear
attention, y = (L * (C B^T)) (dt x) with L_ts = exp(a dt_{s+1} + ... + a dt_t) (section 6), and only
one state per chunk is handed from each chunk to the next.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from functron.transforms import scan
from functron.typing import Float, Tensor


def ssd(
    x: Float[Tensor, "batch seq heads head_dim"],
    dt: Float[Tensor, "batch seq heads"],
    a: Float[Tensor, " heads"],
    b: Float[Tensor, "batch seq groups state_dim"],
    c: Float[Tensor, "batch seq groups state_dim"],
    *,
    chunk: int,
    state: Float[Tensor, "batch heads head_dim state_dim"] | None = None,
) -> tuple[
    Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch heads head_dim state_dim"]
]:
    """y_t = S_t c_t for every token, and the last state; see the module.

    Operations grow with ``seq * chunk``, and between forward and backward live, beside the
    operands, ``chunk`` numbers per token and head and a state per chunk and head.

    Args:
        x: ``[batch, seq, heads, head_dim]``; computed in float32 at least.
        dt: ``[batch, seq, heads]``, at least 0: the step sizes.
        a: ``[heads]``, negative: the rates of decay.
        b: ``[batch, seq, groups, state_dim]``; each group serves heads / groups consecutive heads.
        c: as `b`.
        chunk: tokens per chunk; the numbers do not depend on it.
        state: that before the first token; None: zeros.

    Returns:
        y in x's dtype, and the state in float32 at least. No collectives: heads are independent.

    Raises:
        ValueError: the chunk is empty, or groups do not divide heads.
    """
    _check(x, b, chunk)
    seq, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, seq)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = _chunks(dt.to(wide), chunk).unflatten(-1, (groups, -1)).permute(0, 1, 3, 4, 2)
    inputs = _chunks(x.to(wide), chunk).unflatten(-2, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    inputs = inputs * steps.unsqueeze(-1)
    b, c = (_chunks(y.to(wide), chunk).transpose(2, 3) for y in (b, c))

    # from here on [batch, chunks, groups, heads of a group, ...]: tokens without decay or input,
    # such as those that fill the last chunk, leave the state as it is
    total = (steps * a.to(wide).unflatten(0, (groups, -1)).unsqueeze(-1)).cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    seen = between.masked_fill(later, float("-inf")).exp()
    inside = ((c @ b.mT).unsqueeze(3) * seen) @ inputs

    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    own = (inputs * left).mT @ b.unsqueeze(3)
    first = torch.zeros_like(own[:, 0]) if state is None else _grouped(state.to(wide), groups)
    kept = total[..., -1].exp()[..., None, None]
    last, starts = scan(_hand_on, first, (own.movedim(1, 0), kept.movedim(1, 0)))
    before = (c.unsqueeze(3) @ starts.movedim(0, 1).mT) * total.exp().unsqueeze(-1)

    y = (inside + before).permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    return y[:, :seq].to(x.dtype), last.flatten(1, 2)


def ssd_step(
    state: Float[Tensor, "batch heads head_dim state_dim"],
    x: Float[Tensor, "batch heads head_dim"],
    dt: Float[Tensor, "batch heads"],
    a: Float[Tensor, " heads"],
    b: Float[Tensor, "batch groups state_dim"],
    c: Float[Tensor, "batch groups state_dim"],
) -> tuple[Float[Tensor, "batch heads head_dim"], Float[Tensor, "batch heads head_dim state_dim"]]:
    """One token of `ssd`: S = exp(dt a) S + dt x b^T, y = S c.

    Returns:
        y in x's dtype, and the new state in that of `state`. No collectives.
    """
    group = x.shape[1] // b.shape[1]
    wide = state.dtype
    b, c = (y.to(wide).repeat_interleave(group, 1) for y in (b, c))
    dt = dt.to(wide)
    taken = (dt.unsqueeze(-1) * x.to(wide)).unsqueeze(-1) * b.unsqueeze(-2)
    new = (dt * a.to(wide)).exp()[..., None, None] * state + taken
    return (new @ c.unsqueeze(-1)).squeeze(-1).to(x.dtype), new


def _hand_on(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    own, kept = row
    return kept * state + own, state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """``[batch, seq, ...]`` as ``[batch, chunks, chunk, ...]``, zeros at the end."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (*((0, 0) * (x.dim() - 2)), 0, missing))
    return x.unflatten(1, (-1, chunk))


def _grouped(state: Tensor, groups: int) -> Tensor:
    return state.unflatten(1, (groups, -1))


def _check(x: Tensor, b: Tensor, chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"ssd: got chunk={chunk}; wanted at least 1 token; 64 to 256 are fast")
    if x.shape[2] % b.shape[2]:
        raise ValueError(
            f"ssd: got {x.shape[2]} heads and {b.shape[2]} groups of b and c; wanted a number of "
            "groups that divides the heads; change one"
        )
