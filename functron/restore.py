"""What a T5 says to a text: the spans that were taken out of it, or an answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functron import tree
from functron.data.text_tokenizer import TextTokenizer
from functron.errors import Problem, raise_problems
from functron.models import t5
from functron.sample import Draw, Steps, check_prompt, drawn

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@torch.no_grad()
def respond(
    params: tree.Tree,
    config: t5.T5Config,
    tokens: Tensor,
    num_tokens: int,
    *,
    draw: Draw,
    key: Tensor | None = None,
    stop: Collection[int] = (),
) -> Tensor:
    """What the decoder says to what the encoder reads, token by token.

    The encoder reads once, the decoder what it has said so far for every token: its time grows with
    the square of that.

    Args:
        params: the parameters of `t5.defs(config)`, whole.
        config: the architecture.
        tokens: int64 ``[batch, seq]``, what is read, with its end.
        num_tokens: how many are said at most.
        draw: how a token is drawn.
        key: of the draws; temperature 0 needs none.
        stop: tokens after which a row has ended: it repeats that token while others go on.

    Returns:
        int64 ``[batch, said]``.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a missing key.
    """
    check_prompt(config, tokens, num_tokens, draw, key)
    memory = t5.encode(config, params, tokens)

    def steps(said: Tensor) -> Steps:
        for _ in range(num_tokens):
            found = t5.decode(config, params, said, memory)
            last = yield found[:, -1, : config.vocab_size].float()
            said = torch.cat([said, last.unsqueeze(1)], 1)

    start = torch.full_like(tokens[:, :1], config.start_id)
    return drawn(steps(start), draw, start, num_tokens, key, stop)[:, 1:]


@dataclass(frozen=True)
class Sentinels:
    """The ids that stand for missing spans, as text: ``<extra_id_0>``, ``<extra_id_1>``, ...

    Attributes:
        first: the id of ``<extra_id_0>``; those of others go down from it by one.
        count: how many there are.
        end: the id at the end of what is read and of what is said.
    """

    first: int
    count: int
    end: int

    def read(self, text: str, tokenizer: TextTokenizer) -> list[int]:
        """The ids of a text with the names of sentinels where spans are missing, and the end.

        Raises:
            ValueError: it names a sentinel that does not exist.
        """
        found: list[int] = []
        for index, piece in enumerate(_SENTINEL.split(text)):
            if index % 2:
                found.append(self._named(int(piece)))
            elif piece:
                found += tokenizer.encode(piece, special=False)
        return [*found, self.end]

    def _named(self, number: int) -> int:
        if number >= self.count:
            wanted = f"<extra_id_0> to <extra_id_{self.count - 1}>, as it was trained"
            problem = Problem("prompt", f"<extra_id_{number}>", wanted, "use those, in order")
            raise_problems("unknown sentinel", [problem])
        return self.first - number

    def written(self, tokens: Sequence[int], tokenizer: TextTokenizer) -> str:
        """The text of ids, with the names of sentinels."""
        text, plain = "", list[int]()
        for token in tokens:
            number = self.first - token
            if 0 <= number < self.count:
                text += tokenizer.decode(plain) + f"<extra_id_{number}>"
                plain = []
            else:
                plain.append(token)
        return text + tokenizer.decode(plain)
