"""Denoising objectives, and other samples that are made of samples one by one.

Spans of text to be restored, for encoders with decoders: each span that is taken out of a text
leaves one sentinel in it; the targets are every sentinel, and the tokens that it stands for (Raffel
et al. 2020, section 3.1.4). Which spans these are is a function of the seed and a sample's number:
the same on every mesh, in batches of any size.

    text      Thank you for inviting me to your party last week.
    tokens    Thank you <X> me to your party <Y> week. </s>
    targets   <X> for inviting <Y> last </s>

Masked batches, for models that predict tokens from both sides (Devlin et al. 2019, section 3.1):
which tokens are masked, and by what, is a function of the seed, the step, and each sample's index
in the global batch: the same on every mesh, in every process, and of each sample by itself.

Fill-in-the-middle: documents with their middles at the end, for models that complete code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functron.core import random
from functron.core.errors import Problem, raise_problems, refuse
from functron.data.sampling import IGNORED, Samples
from functron.data.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Spans:
    """How many tokens and spans are taken out of every sample: the same numbers of each.

    They are those of T5's code (``random_spans_helper`` and ``random_spans_noise_mask``): of the
    `length` tokens of a sample ``round(length * rate)`` are `hidden`, in ``round(hidden / mean)``
    spans (`count`).
    """

    length: int
    hidden: int
    count: int

    @property
    def inputs(self) -> int:
        """Tokens that the encoder reads: what stays, the sentinels, and the end."""
        return self.length - self.hidden + self.count + 1

    @property
    def targets(self) -> int:
        """Tokens of the decoder's targets: the sentinels, what was taken out, and the end."""
        return self.hidden + self.count + 1


def spans_of(inputs: int, rate: float = 0.15, mean: float = 3.0) -> Spans:
    """The spans of the longest text of which the encoder reads `inputs` tokens.

    A token more of text is one more that stays, or one more that is taken out and at most one span;
    so there is text of which the encoder reads just as many.

    Args:
        inputs: tokens that the encoder reads, with sentinels and the end.
        rate: the share of tokens that are taken out.
        mean: tokens of a span, in the mean.

    Raises:
        ValueError: values out of range, or no room for a span and a token before each.
    """
    found = []
    if not 0 < rate < 1:
        found.append(Problem("rate", str(rate), "above 0 and below 1", "such as 0.15"))
    if not mean >= 1:
        found.append(Problem("mean", str(mean), "at least 1", "such as 3"))
    elif not found and rate > mean / (1 + mean):
        most = f"at most {mean / (1 + mean):.3g}: a token stays before each span"
        found.append(Problem("rate", str(rate), most, "lower it, or take longer spans"))
    raise_problems("cannot take spans out of text", found)
    made = _spans(1, rate, mean)
    while (longer := _spans(made.length + 1, rate, mean)).inputs <= inputs:
        made = longer
    if made.inputs != inputs or made.length - made.hidden < made.count:
        got = f"{inputs} tokens, {rate} of the text taken out in spans of {mean}"
        fix = "read more tokens, take out fewer, or in longer spans"
        wanted = "room for spans with a token before each"
        refuse("cannot take spans out of text", "inputs", got, wanted, fix)
    return made


def _spans(length: int, rate: float, mean: float) -> Spans:
    hidden = min(max(round(length * rate), 1), max(length - 1, 1))
    return Spans(length, hidden, max(round(hidden / mean), 1))


def take_out(
    tokens: Tensor, numbers: Tensor, spans: Spans, seed: int, *, sentinel: int, end: int
) -> dict[str, Tensor]:
    """Samples of text with random spans taken out, and these.

    A text begins with a token that stays and ends with a span. All ways to cut its hidden tokens,
    and those that stay, into as many runs are equally likely.

    Args:
        tokens: int64 ``[rows, spans.length]``.
        numbers: int64 ``[rows]``, of the samples, counted from the beginning of a run.
        spans: how many tokens and spans.
        seed: of the run.
        sentinel: the id of the first span's sentinel; those of others go down from it by one.
        end: the id at the end of both.

    Returns:
        ``tokens`` int64 ``[rows, spans.inputs]`` and ``targets`` int64 ``[rows, spans.targets]``.
    """
    rows, count = len(tokens), spans.count
    keys = random.split(random.key(seed, device=tokens.device)).unbind(0)
    stay = _runs(keys[0], numbers, spans.length - spans.hidden, count)
    gone = _runs(keys[1], numbers, spans.hidden, count)
    ends = torch.stack([stay, gone], 2).flatten(1).cumsum(1)  # of runs, in turn
    places = torch.arange(spans.length, device=tokens.device).expand(rows, -1).contiguous()
    run = torch.searchsorted(ends, places, right=True)
    hidden = run % 2 == 1
    first = torch.ones_like(hidden)
    first[:, 1:] = run[:, 1:] != run[:, :-1]
    marks = sentinel - run // 2
    inputs = torch.where(hidden, marks, tokens)[~hidden | first].view(rows, -1)
    # each span comes after its sentinel, which stands where the run before it begins
    targets = torch.where(hidden, tokens, marks)[hidden | first].view(rows, -1)
    stop = torch.full_like(tokens[:, :1], end)
    return {"tokens": torch.cat([inputs, stop], 1), "targets": torch.cat([targets, stop], 1)}


def _runs(key: Tensor, numbers: Tensor, total: int, count: int) -> Tensor:
    """Lengths of `count` runs, at least 1 each, that sum to `total`: int64 ``[rows, count]``."""
    drawn = random.uniform(key, (len(numbers), total - 1), torch.float64, index=(numbers, None))
    cuts = drawn.argsort(dim=1, stable=True)[:, : count - 1].sort(dim=1).values + 1
    edge = cuts.new_zeros(len(numbers), 1)
    return torch.cat([edge, cuts, edge + total], 1).diff(dim=1)


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
        "targets": torch.where(chosen, tokens, IGNORED),
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


Transform = Callable[[dict[str, torch.Tensor], np.ndarray], dict[str, torch.Tensor]]
"""``(drawn, numbers)`` to what is drawn instead: a pure function, of each sample by itself."""


class Transformed(Samples):
    """Samples made of others by a function of what is drawn and its numbers.

    As numbers count from the beginning of a run, a sample may be another one in every epoch; it is
    the same on every mesh, in batches of any size, and after resuming.

    Args:
        source: to draw from; has `num_samples`.
        transform: makes other samples of those that were drawn.
        vocab_size: a model of the others needs at least as many token ids.
    """

    def __init__(self, source: Any, transform: Transform, vocab_size: int):
        self._source, self._transform, self.vocab_size = source, transform, vocab_size

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        return self._transform(self._source.draw(numbers), numbers)

    def summary(self) -> str:
        """The source's, in a few words for the user."""
        return self._source.summary()


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
        begin: the ids that documents begin with, and which stay there; any sequence, kept as a
            tuple. They may be `end`, as where a model has one token for both.
        seed: selects documents and places.

    Raises:
        ValueError: rates outside 0 to 1, negative ids, or ids that are not different.
        TypeError: `begin` is no sequence of ids.
    """

    prefix: int
    middle: int
    suffix: int
    rate: float = 0.5
    spm_rate: float = 0.5
    end: int | None = None
    seed: int = 0
    begin: tuple[int, ...] = ()

    def __post_init__(self):
        problems = [
            Problem(name, str(value), "a share from 0 to 1")
            for name, value in (("rate", self.rate), ("spm_rate", self.spm_rate))
            if not 0 <= value <= 1
        ]
        if min(self.ids) < 0 or len(set(self.ids)) < len(self.ids):
            got = ", ".join(map(str, self.ids))
            problems.append(Problem("prefix, middle, suffix, end", got, "different ids from 0"))
        try:
            begin = tuple(operator.index(token) for token in self.begin)
        except TypeError:
            wanted, fix = "a sequence of ids", "such as (1,), or () where documents have none"
            got = repr(self.begin)
            refuse("cannot fill in the middle", "begin", got, wanted, fix, error=TypeError)
        object.__setattr__(self, "begin", begin)  # a list would equal no tuple of tokens
        announced = (self.prefix, self.middle, self.suffix)
        if any(token < 0 or token in announced for token in begin):
            wanted = "ids from 0, other than those of prefix, middle and suffix"
            problems.append(Problem("begin", str(begin), wanted, "give those of the tokenizer"))
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
        """The tokens that a document becomes, `room` at most."""
        chosen, kind, *cuts = draws.tolist()
        marks = 3
        body = document[: room - marks] if room > marks else document[:0]
        if chosen * _UNIT >= self.rate or not len(body):
            return document[:room]
        last = 1 if body[-1] == self.end else 0
        body, end = body[: len(body) - last], body[len(body) - last :]
        first = len(self.begin) * (tuple(body[: len(self.begin)].tolist()) == self.begin)
        begin, body = body[:first], body[first:]
        low, high = sorted(cut * (len(body) + 1) >> 64 for cut in cuts)
        before, inside, after = body[:low], body[low:high], body[high:]
        p, m, s = ([token] for token in (self.prefix, self.middle, self.suffix))
        if kind * _UNIT < self.spm_rate:
            parts = (begin, p, s, after, m, before, inside, end)
        else:
            parts = (begin, p, before, s, after, m, inside, end)
        return np.concatenate([np.asarray(part, np.int64) for part in parts])


_SENTINEL = re.compile(r"<extra_id_(\d+)>")


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

    def encode(self, text: str, tokenizer: TextTokenizer) -> list[int]:
        """The ids of a text with the names of sentinels where spans are missing, and the end.

        Raises:
            ValueError: it names a sentinel that does not exist.
        """
        found: list[int] = []
        for index, piece in enumerate(_SENTINEL.split(text)):
            if index % 2:
                found.append(self._find_id(int(piece)))
            elif piece:
                found += tokenizer.encode(piece, special=False)
        return [*found, self.end]

    def _find_id(self, number: int) -> int:
        if number >= self.count:
            wanted = f"<extra_id_0> to <extra_id_{self.count - 1}>, as it was trained"
            got = f"<extra_id_{number}>"
            refuse("unknown sentinel", "prompt", got, wanted, "use those, in order")
        return self.first - number

    def decode(self, tokens: Sequence[int], tokenizer: TextTokenizer) -> str:
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
