"""Spans of text to be restored: what an encoder reads, and what a decoder is to say.

Each span that is taken out of a text leaves one sentinel in it; the decoder says every sentinel,
and the tokens that it stands for (Raffel et al. 2020, section 3.1.4). Which spans these are is a
function of the seed and a sample's number: the same on every mesh, in batches of any size.

    text      Thank you for inviting me to your party last week.
    tokens    Thank you <X> me to your party <Y> week. </s>
    targets   <X> for inviting <Y> last </s>
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from functron import random
from functron.errors import Problem, raise_problems


@dataclass(frozen=True)
class Spans:
    """How many tokens and spans are taken out of every sample: the same numbers of each.

    They are those of T5's code (``random_spans_helper`` and ``random_spans_noise_mask``): of a
    sample of `length` tokens ``round(length * rate)``, in ``round(hidden / mean)`` spans.

    Attributes:
        length: tokens of text in a sample.
        hidden: tokens that are taken out.
        count: spans that these are.
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
        """Tokens that the decoder says: the sentinels, what was taken out, and the end."""
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
        raise_problems("cannot take spans out of text", [Problem("inputs", got, wanted, fix)])
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
        end: the id at the end of what is read and of what is said.

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
    read = torch.where(hidden, marks, tokens)[~hidden | first].view(rows, -1)
    # each span is said after its sentinel, which stands where the run before it begins
    said = torch.where(hidden, tokens, marks)[hidden | first].view(rows, -1)
    stop = torch.full_like(tokens[:, :1], end)
    return {"tokens": torch.cat([read, stop], 1), "targets": torch.cat([said, stop], 1)}


def _runs(key: Tensor, numbers: Tensor, total: int, count: int) -> Tensor:
    """Lengths of `count` runs, at least 1 each, that sum to `total`: int64 ``[rows, count]``."""
    drawn = random.uniform(key, (len(numbers), total - 1), torch.float64, index=(numbers, None))
    cuts = drawn.argsort(dim=1, stable=True)[:, : count - 1].sort(dim=1).values + 1
    edge = cuts.new_zeros(len(numbers), 1)
    return torch.cat([edge, cuts, edge + total], 1).diff(dim=1)
