"""Generation by a T5: the spans that were taken out of a text, or an answer to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from functron.core import tree
from functron.core.errors import refuse
from functron.core.typing import Tensor
from functron.data.text_tokenizer import TextTokenizer
from functron.models import t5
from functron.models.generation import Draw, Steps, check_prompt, drawn
from functron.models.options import ModelOptions
from functron.params import param_specs
from functron.spmd import DATA_AXES, P, shard_map
from functron.spmd.mesh import BoundMesh, Mesh
from functron.transforms import Gather

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@torch.no_grad()
def respond(
    params: tree.Tree,
    config: t5.T5Config,
    tokens: Tensor,
    num_tokens: int,
    *,
    draw: Draw,
    mask: Tensor | None = None,
    key: Tensor | None = None,
    stop: Collection[int] = (),
    mesh: Mesh | BoundMesh | None = None,
) -> Tensor:
    """The decoder's answer to the text that the encoder reads, drawn token by token.

    The encoder reads once, and keys and values of its result are made once; those of the decoder's
    own tokens are kept (`t5.prefill`, `t5.extend`).

    Args:
        params: the parameters of `t5.defs(config)`, as `mesh` splits them.
        config: the architecture.
        tokens: int64 ``[batch, seq]``, what is read, with its end; on a bound mesh, those of this
            rank's data-parallel part.
        num_tokens: how many are drawn at most.
        draw: how a token is drawn.
        mask: ``[batch, seq]``, 0 or False where a token is padding; None: no token is.
        key: of the draws; temperature 0 needs none.
        stop: tokens after which a row has ended: it repeats that token while others go on.
        mesh: data and tensor-parallel ranks that do it together, simulated or bound; None: one.
            Parameters lie on it as ``t5.rules(config, mesh)`` has it.

    Returns:
        int64 ``[batch, drawn]``.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a missing key, or a mesh on
            which the model cannot run.
    """
    check_prompt(config, tokens, num_tokens, draw, key)
    first, later = _cached(config, mesh, num_tokens, mask)
    start = torch.full_like(tokens[:, :1], config.start_id)

    def steps() -> Steps:
        cache, last = first(params, tokens), start[:, 0]
        for index in range(num_tokens):
            place = torch.tensor(index, device=tokens.device)
            found, cache = later(params, cache, last, place)
            last = yield found.float()

    return drawn(steps(), draw, start, num_tokens, key, stop, mesh=mesh)[:, 1:]


def _cached(
    config: t5.T5Config, mesh: Mesh | BoundMesh | None, room: int, mask: Tensor | None
) -> tuple[Callable, Callable]:
    """`t5.prefill` and `t5.extend` over a mesh."""
    mesh = Mesh() if mesh is None else mesh
    specs = param_specs(t5.defs(config), t5.rules(config, mesh))
    options = ModelOptions(gather=Gather(specs))
    rows, kept = P(DATA_AXES), t5.cache_specs(config)
    masks = None if mask is None else rows

    def read(params, tokens, mask):
        return t5.prefill(config, params, tokens, options, room=room, mask=mask)

    def say(params, cache, tokens, place, mask):
        return t5.extend(config, params, cache, tokens, place, options, mask=mask)

    first = shard_map(read, mesh, (specs, rows, masks), kept)
    later = shard_map(say, mesh, (specs, kept, rows, P(), masks), (rows, kept))
    return (
        lambda params, tokens: first(params, tokens, mask),
        lambda *given: later(*given, mask),
    )


@dataclass(frozen=True)
class Sentinels:
    """The ids that stand for missing spans, as text: ``<extra_id_0>``, ``<extra_id_1>``, ...

    Attributes:
        first: the id of ``<extra_id_0>``; those of others go down from it by one.
        count: how many there are.
        end: the id at the end of the encoder's and of the decoder's text.
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
            got = f"<extra_id_{number}>"
            refuse("unknown sentinel", "prompt", got, wanted, "use those, in order")
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
