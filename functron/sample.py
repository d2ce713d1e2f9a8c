"""Sampling: tokens drawn one after another from a model's next-token distribution."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from functron import random, tree
from functron.errors import Problem, raise_problems
from functron.models import gpt


@torch.no_grad()
def generate(
    params: tree.Tree,
    config: gpt.GPTConfig,
    tokens: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    key: Tensor | None = None,
    stop: Collection[int] = (),
    logits: Callable[[tree.Tree, Tensor], Tensor] | None = None,
) -> Tensor:
    """Continue each row of `tokens` by `num_tokens` draws from softmax(logits / temperature).

    Each new token reads its whole context (the last `max_seq` tokens) again.

    Args:
        params: the parameters of `gpt.defs(config)`; or what `logits` takes.
        config: the architecture.
        tokens: int64 ``[batch, seq]``, at least one token each.
        num_tokens: how many to add.
        temperature: 0 takes the most likely token; needs no key.
        key: the key of the draws.
        stop: tokens after which a row has ended: it repeats that token while others go on, and
            when all rows have ended no more are drawn.
        logits: ``(params, tokens)`` to the logits of every next token, ``[batch, seq, vocab]``; the
            same on all ranks. None: `gpt.forward` on one rank. A mapped forward runs on a mesh, and
            one through a `pipeline.Pipeline` on the ranks of a pipeline.

    Returns:
        int64 ``[batch, seq + num_tokens]``, or shorter where all rows have ended.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a negative temperature, or a
            missing key.
    """
    raise_problems("cannot sample", _problems(config, tokens, num_tokens, temperature, key))
    stops = torch.tensor(sorted(stop), dtype=tokens.dtype, device=tokens.device)
    ended = torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    for index in range(num_tokens):
        context = tokens[:, -config.max_seq :]
        found = logits(params, context) if logits else gpt.forward(config, params, context)
        last = found[:, -1, : config.vocab_size].float()
        if temperature > 0 and key is not None:
            # the argmax of logits plus Gumbel noise is a draw from their softmax
            uniform = random.uniform(random.fold_in(key, index), last.shape, minval=1e-20)
            last = last / temperature - (-uniform.log()).log()
        drawn = torch.where(ended, tokens[:, -1:], last.argmax(-1, keepdim=True))
        tokens = torch.cat([tokens, drawn], dim=1)
        if stop:
            ended = torch.isin(drawn, stops)
            if bool(ended.all()):
                break
    return tokens


def _problems(config, tokens, num_tokens, temperature, key) -> list[Problem]:
    found = []
    if tokens.dim() != 2 or not tokens.numel():
        got = f"shape {tuple(tokens.shape)}"
        found.append(Problem("tokens", got, "[batch, seq] with seq >= 1", "give a prompt"))
    elif int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        got = f"ids from {int(tokens.min())} to {int(tokens.max())}"
        found.append(Problem("tokens", got, f"ids from 0 to {config.vocab_size - 1}"))
    if num_tokens < 0:
        found.append(Problem("num_tokens", str(num_tokens), "at least 0"))
    if temperature < 0:
        found.append(Problem("temperature", str(temperature), "at least 0"))
    elif temperature > 0 and key is None:
        found.append(Problem("key", "None", "a key", "pass random.key(seed), or temperature=0"))
    return found
