"""Fill-in-the-middle: documents with their middles at the end, for models that complete code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from functron.errors import Problem, raise_problems

_DRAWS = 4
_UNIT = 2.0**-64


@dataclass(frozen=True)
class FillInTheMiddle:
    """Some documents as PREFIX SUFFIX MIDDLE, each part after a token that announces it.

    A document is cut at two places, drawn from all those between, before and after its tokens; with
    ``<p>``, ``<m>`` and ``<s>`` for `prefix`, `middle` and `suffix` it becomes

    | kind | tokens                                             |
    |------|----------------------------------------------------|
    | PSM  | ``<p>`` prefix ``<s>`` suffix ``<m>`` middle       |
    | SPM  | ``<p> <s>`` suffix ``<m>`` prefix middle           |

    What is drawn is a function of `seed` and the sample's number alone.

    Source: Bavarian et al. 2022, "Efficient training of language models to fill in the middle",
    sections 3 and appendix D (SPM in its second variant), at the level of tokens.

    Attributes:
        prefix, middle, suffix: the ids of the tokens that announce them.
        rate: the share of documents that are rearranged.
        spm_rate: the share of these that are SPM.
        end: the id that ends a document, and stays at its end; None: there is none.
        seed: selects documents and places.

    Raises:
        ValueError: rates outside 0 to 1, negative ids, or ids that are not different.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5
    end: int | None = None
    seed: int = 0

    def __post_init__(self):
        problems = [
            Problem(name, str(value), "a share from 0 to 1")
            for name, value in (("rate", self.rate), ("spm_rate", self.spm_rate))
            if not 0 <= value <= 1
        ]
        if min(self.ids) < 0 or len(set(self.ids)) < len(self.ids):
            got = ", ".join(map(str, self.ids))
            problems.append(Problem("prefix, middle, suffix, end", got, "different ids from 0"))
        raise_problems("cannot fill in the middle", problems)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids that it gives a meaning."""
        found = (self.prefix, self.middle, self.suffix)
        return found if self.end is None else (*found, self.end)

    def rearranged(
        self, tokens: np.ndarray, begins: np.ndarray, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A sample with some of its documents rearranged, as long as before.

        Each of these gets three tokens longer, so the sample loses as many at its end. A document
        that reaches the end is cut before it is rearranged: it has all its parts.

        Args:
            tokens: integers ``[n]``.
            begins: where documents begin in them, increasing, from 0.
            number: of the sample.

        Returns:
            The tokens, int64 ``[n]``, and where documents begin now, int64 ``[at most documents]``.
        """
        size, key = len(tokens), np.array([self.seed % 2**64, number], np.uint64)
        # raw words of a counter: their values are part of the algorithm's definition
        draws = np.random.Philox(key=key).random_raw(_DRAWS * len(begins))
        out, starts, at = np.empty(size, np.int64), [], 0
        ends = [*begins[1:].tolist(), size]
        for i, (begin, stop) in enumerate(zip(begins.tolist(), ends, strict=True)):
            piece = self._piece(tokens[begin:stop], size - at, draws[_DRAWS * i : _DRAWS * (i + 1)])
            starts.append(at)
            out[at : at + len(piece)] = piece
            at += len(piece)
            if at == size:
                break
        return out, np.array(starts, np.int64)

    def _piece(self, document: np.ndarray, room: int, draws: np.ndarray) -> np.ndarray:
        """What becomes of a document, in at most `room` tokens."""
        chosen, kind, *cuts = draws.tolist()
        marks = 3
        body = document[: room - marks] if room > marks else document[:0]
        if chosen * _UNIT >= self.rate or not len(body):
            return document[:room]
        last = 1 if body[-1] == self.end else 0
        body, end = body[: len(body) - last], body[len(body) - last :]
        low, high = sorted(cut * (len(body) + 1) >> 64 for cut in cuts)
        before, inside, after = body[:low], body[low:high], body[high:]
        p, m, s = ([token] for token in (self.prefix, self.middle, self.suffix))
        if kind * _UNIT < self.spm_rate:
            parts = (p, s, after, m, before, inside, end)
        else:
            parts = (p, before, s, after, m, inside, end)
        return np.concatenate([np.asarray(part, np.int64) for part in parts])
