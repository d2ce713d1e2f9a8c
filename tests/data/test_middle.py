"""Filling in the middle: nothing is lost, parts are announced, and samples decide by themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from functron.data import FillInTheMiddle, MockTokens, TokenWindows

P, M, S, END = 1000, 1001, 1002, 999


def sample(lengths: list[int], ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """Documents of different tokens, with END at the end of each but the last."""
    tokens = np.arange(sum(lengths))
    begins = np.cumsum([0, *lengths[:-1]])
    if ends:
        tokens[begins[1:] - 1] = END
    return tokens, begins


def undone(piece: list[int]) -> tuple[list[int], str]:
    """The document that a piece was made of, and its kind."""
    if P not in piece:
        return piece, "plain"
    assert piece[0] == P
    assert sum(token in (P, M, S) for token in piece) == 3
    suffix, middle = piece.index(S), piece.index(M)
    assert suffix < middle
    rest, after = piece[middle + 1 :], piece[suffix + 1 : middle]
    end = [END] if rest and rest[-1] == END else []
    rest = rest[: len(rest) - len(end)]
    return [*piece[1:suffix], *rest, *after, *end], "SPM" if suffix == 1 else "PSM"


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.5, 1.0]),
    ends=st.booleans(),
    number=st.integers(0, 2**62),
)
def test_every_document_can_be_put_together_again(lengths, rate, ends, number):
    tokens, begins = sample(lengths, ends)
    fill = FillInTheMiddle(P, M, S, rate, end=END)
    out, starts = fill.rearranged(tokens, begins, number)
    assert (out.shape, out.dtype, starts[0]) == (tokens.shape, np.int64, 0)
    pieces = [piece.tolist() for piece in np.split(out, starts[1:])]
    for i, piece in enumerate(pieces):
        document, kind = undone(piece)
        whole = tokens[begins[i] :][: lengths[i]].tolist()
        if i + 1 < len(pieces):
            assert document == whole
        else:  # what reaches the end of the sample is cut there
            assert document == whole[: len(document)]
        assert kind == "plain" if rate == 0 else rate < 1 or kind != "plain" or len(piece) < 4
    again, _ = fill.rearranged(tokens, begins, number)
    np.testing.assert_array_equal(again, out)


def kinds(fill: FillInTheMiddle, count: int) -> list[tuple[str, int, int]]:
    """The kinds of `count` samples of one document, and the lengths of their parts."""
    found = []
    for number in range(count):
        piece = fill.rearranged(*sample([23], False), number)[0].tolist()
        kind = undone(piece)[1]
        after = piece.index(M) - piece.index(S) - 1 if kind != "plain" else 0
        before = piece.index(S) - 1 if kind == "PSM" else 0
        found.append((kind, before, after))
    return found


def test_rates_and_places_are_as_asked():
    count = 4000
    found = kinds(FillInTheMiddle(P, M, S, 0.9, 0.25, seed=5), count)
    of = {kind: sum(x[0] == kind for x in found) / count for kind in ("plain", "SPM", "PSM")}
    # two of 21 places, in order; a PSM without a prefix looks like an SPM
    cuts = [min(places) for places in itertools.product(range(21), repeat=2)]
    empty = cuts.count(0) / len(cuts)
    shares = {"plain": 0.1, "SPM": 0.225 + 0.675 * empty, "PSM": 0.675 * (1 - empty)}
    for kind, share in shares.items():  # to five standard deviations
        assert abs(of[kind] - share) < 5 * (share * (1 - share) / count) ** 0.5
    befores = [before for kind, before, _ in found if kind == "PSM"]
    wanted = [cut for cut in cuts if cut]
    assert abs(np.mean(befores) - np.mean(wanted)) < 5 * np.std(wanted) / len(befores) ** 0.5
    assert set(befores) == set(wanted)
    assert found != kinds(FillInTheMiddle(P, M, S, 0.9, 0.25, seed=6), count)


@pytest.mark.parametrize("settings", [
    {"rate": 1.5}, {"spm_rate": -0.1}, {"prefix": -1}, {"end": S}, {"suffix": M}, {"rate": float("nan")},
    {"begin": (1, P)}, {"begin": [M]}, {"begin": (S,)}, {"begin": (-1,)},
])  # fmt: skip
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match="cannot fill in the middle"):
        FillInTheMiddle(**{"prefix": P, "middle": M, "suffix": S, **settings})


@pytest.mark.parametrize("begin", [[END, 7], np.array([END, 7]), (END, np.int32(7))])
def test_beginnings_of_any_sequence_stay(begin):
    """Also where the first of these ids is the one that ends documents, as of one model's."""
    document = np.array([END, 7, *range(10, 20), END, 0, 0, 0])
    for number in range(20):
        fill = FillInTheMiddle(P, M, S, 1.0, end=END, begin=begin)
        out, _ = fill.rearranged(document, np.array([0, 13]), number)
        assert out[:2].tolist() == [END, 7]
        assert out[2] == P
        assert sorted(out[:16].tolist()) == sorted([END, 7, P, M, S, *range(10, 20), END])


def test_beginnings_that_are_no_ids():
    for begin in (1, None, ("<s>",), [1.5]):
        with pytest.raises(TypeError, match=r"begin: got .*; wanted a sequence of ids; fix: such"):
            FillInTheMiddle(P, M, S, begin=begin)  # pyright: ignore[reportArgumentType]


def test_windows_fill_in_the_middle():
    file = MockTokens(10_000, 999, document=13)
    fill = FillInTheMiddle(P, M, S, 1.0, seed=1)
    with pytest.raises(ValueError, match="middle: got id 1002; wanted ids from 0 to 999"):
        TokenWindows(file, 40, vocab_size=1000, middle=fill)
    windows = TokenWindows(file, 40, vocab_size=1003, mask_documents=True, middle=fill)
    batch = windows.batch(3, 4)
    assert (batch["tokens"][:, 0] == P).all()
    # each document begins with what announces its first part, and is masked from the others
    begins = batch["positions"] == 0
    assert (batch["tokens"][begins][:4] == P).all()
    assert (batch["targets"] == P).sum() == 0
    epoch = windows.num_samples
    first, second = (windows.draw(np.arange(n, n + epoch))["tokens"] for n in (0, epoch))
    assert sorted(map(tuple, first.tolist())) != sorted(map(tuple, second.tolist()))  # cut anew
