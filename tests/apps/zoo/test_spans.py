"""Spans taken out of text: T5's lengths, the text out of its two halves, and their odds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from functron.apps.zoo.denoising import spans_of, take_out

SENTINEL, END = 999, 900


def t5_lengths(inputs_length: int, noise_density: float, mean_noise_span_length: float):
    """As section 3.1.4's code computes them: tokens of text, read and said."""

    def lengths(tokens_length: int) -> tuple[int, int]:
        num_noise = round(tokens_length * noise_density)
        num_spans = round(num_noise / mean_noise_span_length)
        return tokens_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    tokens_length = inputs_length
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    return tokens_length, *lengths(tokens_length)


@pytest.mark.parametrize("inputs", [16, 33, 64, 100, 128, 511, 512, 1024])
def test_lengths_are_those_of_t5(inputs):
    spans = spans_of(inputs)
    assert (spans.length, spans.inputs, spans.targets) == t5_lengths(inputs, 0.15, 3.0)
    assert spans.inputs == inputs
    # the paper's own: 512 tokens read, 114 said, of 568
    assert inputs != 512 or (spans.length, spans.targets) == (568, 114)


def restored(read: list[int], said: list[int], count: int) -> list[int]:
    """The text out of what is read and said, by splitting at sentinels."""
    assert read[-1] == said[-1] == END
    spans: dict[int, list[int]] = {}
    for token in said[:-1]:
        if token > END:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == [SENTINEL - index for index in range(count)]
    assert all(spans.values())
    return [x for token in read[:-1] for x in spans.get(token, [token])]


@given(
    inputs=st.integers(4, 90),
    rate=st.floats(0.01, 0.7),
    mean=st.floats(1, 9),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 2**40),
)
def test_both_halves_give_back_the_text(inputs, rate, mean, seed, first):
    try:
        spans = spans_of(inputs, rate, mean)
    except ValueError:
        assume(False)
        raise
    assert min(spans.length - spans.hidden, spans.hidden) >= spans.count
    assert abs(spans.hidden - rate * spans.length) <= 1
    assert abs(spans.count - spans.hidden / mean) <= 1
    text = torch.randint(0, END, (3, spans.length), generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(first, first + 3)
    made = take_out(text, numbers, spans, seed, sentinel=SENTINEL, end=END)
    assert made["tokens"].shape == (3, inputs)
    assert made["targets"].shape == (3, spans.targets)
    rows = zip(text.tolist(), made["tokens"].tolist(), made["targets"].tolist(), strict=True)
    for row, read, said in rows:
        assert restored(read, said, spans.count) == row
        assert read[0] == row[0]  # a text begins with what stays
        assert read[-2] == SENTINEL - spans.count + 1  # and ends with a span
    # each sample by itself
    alone = take_out(text[1:2], numbers[1:2], spans, seed, sentinel=SENTINEL, end=END)
    assert torch.equal(alone["targets"], made["targets"][1:2])


def test_all_ways_to_cut_are_equally_likely():
    spans = spans_of(13, 0.4, 2.0)  # 6 of 15 tokens in 3 spans: 10 ways, and 28 of those that stay
    assert (spans.length, spans.hidden, spans.count) == (15, 6, 3)
    text = torch.arange(15).expand(20000, -1).contiguous()
    made = take_out(text, torch.arange(20000), spans, 7, sentinel=SENTINEL, end=END)
    for halves, ways in ((made["targets"], 10), (made["tokens"], 28)):
        lengths = (halves >= END).int()  # where sentinels stand among the others says the cut
        counts = torch.unique(lengths, dim=0, return_counts=True)[1].double()
        assert len(counts) == ways
        chi = float(((counts - 20000 / ways) ** 2 / (20000 / ways)).sum())
        assert chi < ways - 1 + 5 * (2 * (ways - 1)) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((64, 1.0, 0.5), "rate: got 1.0; wanted above 0"),
        ((64, 0.1, 0.5), "mean: got 0.5; wanted at least 1"),
        ((2, 0.15, 3.0), "inputs: got 2 tokens"),
        ((64, 0.7, 1.0), "rate: got 0.7; wanted at most 0.5: a token stays before each span"),
    ],
)
def test_what_cannot_be_taken_out(arguments, said):
    with pytest.raises(ValueError, match="cannot take spans out of text") as caught:
        spans_of(*arguments)
    assert said in str(caught.value)
