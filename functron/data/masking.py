"""Masked batches, for models that predict tokens from both sides (Devlin et al. 2019, section 3.1).

Which tokens are masked, and by what, is a function of the seed, the step, and each sample's index
in the global batch: the same on every mesh, in every process, and of each sample by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from functron import random
from functron.errors import Problem, raise_problems

_IGNORED = -100  # of nn.IGNORE_INDEX, which is a sibling layer's


def mask_tokens(
    batch: Mapping[str, Tensor],
    seed: int,
    step: int,
    *,
    mask_id: int,
    vocab_size: int,
    special: Sequence[int] = (),
    rate: float = 0.15,
    masked: float = 0.8,
    random_share: float = 0.1,
) -> dict[str, Tensor]:
    """`batch` with some tokens chosen as targets, and most of these hidden.

    Each token is chosen with probability `rate`, by itself. Of those chosen `masked` become
    `mask_id`, `random_share` any token of the vocabulary, and the others stay.

    Args:
        batch: ``tokens`` int64 ``[batch, seq]``; ``rows`` int64 ``[batch]``, the samples' indices
            in the global batch, without which they are the first; perhaps ``mask``, 0 where a token
            is padding, which is never chosen. Any rank's part of it.
        seed: of the run.
        step: which batch.
        mask_id: what chosen tokens become.
        vocab_size: tokens are replaced by one of 0 to ``vocab_size - 1``.
        special: ids that are never chosen, such as those of separators.
        rate, masked, random_share: probabilities.

    Returns:
        The batch with other ``tokens``, and ``targets``: the tokens that were chosen, and
        `nn.IGNORE_INDEX` elsewhere.

    Raises:
        ValueError: a probability is none, or an id is not of the vocabulary; all are listed.
    """
    _check(vocab_size, (mask_id, *special), rate=rate, masked=masked, random_share=random_share)
    tokens = batch["tokens"]
    rows = batch.get("rows")
    rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    root = random.fold_in(random.key(seed, device=tokens.device), step)
    keys, index = random.split(root, 3).unbind(0), (rows, None)
    chosen = random.uniform(keys[0], tokens.shape, index=index) < rate
    for word in special:
        chosen = chosen & (tokens != word)
    if "mask" in batch:
        chosen = chosen & (batch["mask"] != 0)
    kind = random.uniform(keys[1], tokens.shape, index=index)
    others = random.randint(keys[2], tokens.shape, 0, vocab_size, torch.int64, index=index)
    hidden = torch.where(
        kind < masked, mask_id, torch.where(kind < masked + random_share, others, tokens)
    )
    return {
        **batch,
        "tokens": torch.where(chosen, hidden, tokens),
        "targets": torch.where(chosen, tokens, _IGNORED),
    }


def _check(vocab_size: int, ids: Sequence[int], **shares: float) -> None:
    found = [
        Problem(name, str(share), "a probability, from 0 to 1")
        for name, share in shares.items()
        if not 0 <= share <= 1
    ]
    total = shares["masked"] + shares["random_share"]
    if not found and total > 1 + 1e-9:
        fix = "lower one: the rest stay as they are"
        found.append(Problem("masked + random_share", str(total), "at most 1", fix))
    wrong = [number for number in ids if not 0 <= number < vocab_size]
    if wrong:
        wanted = f"0 to {vocab_size - 1}"
        found.append(Problem("mask_id and special", str(wrong), wanted, "raise vocab_size"))
    raise_problems("mask_tokens cannot mask this way", found)
