"""Layouts: even ones by hand, balanced ones against all there are, and Megatron's language."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functron.pipeline import (
    Layout,
    Part,
    balanced_layout,
    even_layout,
    format_layout,
    parse_layout,
    whole,
)
from functron.pipeline.partition import layout_of

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


def counts(layout: Layout) -> list[int]:
    """How many layers each stage has, once it is sure that the layout is one of a whole model."""
    layers = [layer for part in layout for layer in part.layers]
    assert layers == list(range(len(layers)))
    assert [part.embed for part in layout] == [True] + [False] * (len(layout) - 1)
    assert [part.loss for part in layout] == [False] * (len(layout) - 1) + [True]
    return [len(part.layers) for part in layout]


def test_the_whole_model_is_one_part():
    assert whole(3) == Part(range(3), embed=True, loss=True)
    assert str(whole(3)) == "EtttL"
    assert layout_of([3]) == (whole(3),)
    assert layout_of([2, 0, 1]) == (
        Part(range(2), embed=True),
        Part(range(2, 2)),
        Part(range(2, 3), loss=True),
    )


# --- in equal numbers

EVEN = [
    (1, 5, {}, [5]),
    (2, 3, {}, [2, 1]),
    (3, 4, {}, [1, 2, 1]),
    (3, 5, {}, [2, 2, 1]),
    (4, 4, {}, [1, 1, 1, 1]),
    (4, 6, {}, [1, 2, 2, 1]),
    (4, 7, {}, [2, 2, 2, 1]),
    (5, 8, {}, [1, 2, 2, 2, 1]),
    (4, 8, {"first": 1, "last": 1}, [1, 3, 3, 1]),
    (4, 9, {"first": 1, "last": 2}, [1, 3, 3, 2]),
    (4, 8, {"first": 5}, [5, 1, 1, 1]),
    (4, 8, {"last": 0}, [2, 3, 3, 0]),
    (2, 7, {"first": 0, "last": 7}, [0, 7]),
    (1, 4, {"first": 4}, [4]),
    (1, 4, {"last": 4}, [4]),
]


@pytest.mark.parametrize(("num_stages", "num_layers", "ends", "want"), EVEN)
def test_even_layouts(num_stages, num_layers, ends, want):
    assert counts(even_layout(num_stages, num_layers, **ends)) == want


@given(st.integers(1, 9), st.integers(0, 20))
def test_even_layouts_differ_by_a_layer_that_is_in_the_middle(num_stages, more):
    found = counts(even_layout(num_stages, num_stages + more))
    assert sum(found) == num_stages + more
    least = min(found)
    assert least >= 1
    off_centre = {0: [], 1: []}  # how far from the middle, by how many more than the least
    for stage, count in enumerate(found):
        off_centre[count - least].append(abs(stage - (num_stages - 1) / 2))
    assert max(off_centre[1], default=0) <= min(off_centre[0])


WRONG_EVEN = [
    (5, 3, {}, ["layout: got 3 layers for 5 stages; wanted a layer for every stage; fix: use at most 3 stages, or write"]),
    (2, 0, {}, ["layout: got 0 layers for 2 stages; wanted a layer for every stage; fix: use at most 1 stages, or write"]),
    (4, 4, {"first": 2}, ["layout: got 4 layers for 4 stages with first=2; wanted a layer for every stage; fix: use at most 3 stages, or write"]),
    (4, 4, {"first": 1, "last": 2}, ["layout: got 4 layers for 4 stages with first=1 and last=2; wanted a layer for every stage; fix: use at most 3 stages, or write"]),
    (4, 4, {"first": 2, "last": 3}, ["with first=2 and last=3; wanted ends that add up to at most 4 layers; fix: leave one of the ends out"]),
    (2, 4, {"first": 1, "last": 2}, ["layout: got 4 layers for 2 stages with first=1 and last=2; wanted ends that add up to 4 layers; fix: leave one of the ends out"]),
    (1, 4, {"first": 3}, ["layout: got 4 layers for 1 stages with first=3; wanted ends that add up to 4 layers"]),
    (1, 4, {"first": 2, "last": 2}, ["last: got 2; wanted nothing: the only stage is the first"]),
    (3, 4, {"first": -1, "last": 9}, ["first: got -1; wanted from 0 to 4", "last: got 9; wanted from 0 to 4"]),
]  # fmt: skip


@pytest.mark.parametrize(("num_stages", "num_layers", "ends", "lines"), WRONG_EVEN)
def test_layers_that_do_not_fit_are_taught(num_stages, num_layers, ends, lines):
    with pytest.raises(ValueError, match="the layers cannot be laid out evenly") as caught:
        even_layout(num_stages, num_layers, **ends)
    for line in lines:
        assert line in str(caught.value)
    assert str(caught.value).count("\n") == len(lines)


# --- by cost


def stage_costs(found: list[int], layer_costs: list[int], embed: int, loss: int) -> list[int]:
    given_costs = iter(layer_costs)
    costs = [sum(itertools.islice(given_costs, count)) for count in found]
    costs[0] += embed
    costs[-1] += loss
    return costs


def score(costs: list[int]) -> tuple[int, int]:
    return max(costs), sum(cost**2 for cost in costs)


@st.composite
def cost_problems(draw):
    layer_costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    num_stages = draw(st.integers(1, len(layer_costs)))
    return num_stages, layer_costs, draw(st.integers(0, 12)), draw(st.integers(0, 12))


@given(cost_problems())
def test_balanced_layouts_are_the_best_there_are(problem):
    num_stages, layer_costs, embed, loss = problem
    num_layers = len(layer_costs)
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    ends = [(0, *cut, num_layers) for cut in cuts]
    layouts = [[b - a for a, b in itertools.pairwise(end)] for end in ends]
    best = min(score(stage_costs(each, layer_costs, embed, loss)) for each in layouts)
    found = counts(balanced_layout(num_stages, layer_costs, embed=embed, loss=loss))
    assert found in layouts
    assert score(stage_costs(found, layer_costs, embed, loss)) == best


def test_a_loss_that_costs_two_layers_takes_two_layers_away():
    assert counts(balanced_layout(4, [1.0] * 10, loss=2.0)) == [3, 3, 3, 1]
    assert counts(balanced_layout(3, [1.0] * 9, embed=1.5, loss=3.0)) == [3, 4, 2]
    assert counts(balanced_layout(2, [8.0, 1.0, 1.0, 1.0])) == [1, 3]


def test_ties_are_broken_over_all_stages():
    """The last stage costs 12 however the rest is cut: 10, 2, 5 (129 in squares), not 1, 9, 7 (131).

    A search that keeps the cheapest maximum of every beginning alone finds the latter.
    """
    assert counts(balanced_layout(4, [1, 9, 2, 5, 9], loss=3)) == [2, 1, 1, 1]
    assert counts(balanced_layout(4, [7, 1, 2, 9, 2, 7], loss=13)) == [1, 2, 2, 1]


def test_wrong_costs_are_taught():
    with pytest.raises(ValueError, match="laid out by cost") as caught:
        balanced_layout(4, [1.0, -2.0, float("nan")], embed=-1.0, loss=-0.5)
    for line in (
        "embed: got -1.0; wanted at least 0",
        "loss: got -0.5; wanted at least 0",
        "layer_costs/1: got -2.0; wanted at least 0",
        "layer_costs/2: got nan; wanted at least 0",
        "layout: got 3 layers; wanted at least 4; fix: use at most 3 stages",
    ):
        assert line in str(caught.value)


# --- in Megatron's language

WRITTEN = [
    ("EtttL", [3]),
    ("Et|tt|tL", [1, 2, 1]),
    ("E|t|L", [0, 1, 0]),
    ("E||tL", [0, 0, 1]),
    ("Et*3|tL", [3, 1]),
    ("Et*3|(tt|)*29,t|L", [3, *[2] * 29, 1, 0]),
    ("Et*3|(tt|)*29,L", [3, *[2] * 29, 0]),
    ("E(t|)*3 L", [1, 1, 1, 0]),
    ("E((t|)*2tt|)*2,L", [1, 1, 2, 1, 1, 2, 0]),
    ("E|(t|t)*2|L", [0, 1, 2, 1, 0]),
    ("E t * 2 | t , t | (t) * 1 L ", [2, 2, 1]),
    ("Et|t*0|tL", [1, 0, 1]),
    ("Et|(t|)*0tL", [1, 1]),
    ("Et|()*5tL", [1, 1]),
]


@pytest.mark.parametrize(("text", "want"), WRITTEN)
def test_written_layouts(text, want):
    assert counts(parse_layout(text, sum(want), len(want))) == want


@given(COUNTS)
def test_there_and_back(want):
    layout = layout_of(want)
    text = format_layout(layout)
    assert text == "E" + "|".join("t" * count for count in want) + "L"
    assert parse_layout(text, sum(want), len(want)) == layout


# A random text with what it stands for: layers, stage ends, sequences, repetitions.
BODIES = st.recursive(
    st.sampled_from([("t", "t"), ("|", "|"), (",", ""), (" ", "")]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(
            lambda rows: ("".join(r[0] for r in rows), "".join(r[1] for r in rows))
        ),
        st.tuples(inner, st.integers(0, 3)).map(
            lambda row: (f"({row[0][0]})*{row[1]}", row[0][1] * row[1])
        ),
        st.integers(0, 3).map(lambda count: (f"t*{count}", "t" * count)),
    ),
    max_leaves=8,
)


@given(BODIES)
def test_repetitions_stand_for_what_they_repeat(body):
    text, stands_for = body
    want = [len(stage) for stage in stands_for.split("|")]
    assert counts(parse_layout(f"E{text}L", sum(want), len(want))) == want


WRONG = [
    ("Et|xt|tL", 3, 3, ["layout column 4: got 'x'; wanted one of E t L | ( ) *N ,"]),
    ("Et*3|(tt|)*29,m|L", 62, 32, ["layout column 15: got 'm', a multi-token prediction layer; wanted these to be computed with L"]),
    ("Em|yL", 0, 2, ["layout column 2: got 'm'", "layout column 4: got 'y'"]),
    ("*2Et|tL", 2, 2, ["layout column 2: got '*2'; wanted something before it; fix: write the repeated layer"]),
    ("Et,*2|tL", 3, 2, ["layout column 5: got '*2'; wanted something before it"]),
    ("Et*2*3|tL", 7, 2, ["layout column 6: got '*3'; wanted something before it"]),
    ("Et*|tL", 2, 2, ["layout column 3: got '*'"]),
    ("Et)|tL", 2, 2, ["layout column 3: got ')'; wanted a '(' before it"]),
    ("E(t|(tL", 2, 2, ["layout column 2: got '('; wanted a ')' after it", "layout column 5: got '('; wanted a ')' after it"]),
    ("Et|tL", 3, 2, ["layout: got 2 layers (t); wanted 3, as many as the model has"]),
    ("Et|tL", 2, 4, ["layout: got 2 stages (separated by |); wanted 4: pipeline ranks x chunks"]),
    ("Et|tt|tL", 3, 2, ["got 4 layers (t); wanted 3", "got 3 stages (separated by |); wanted 2"]),
    ("tE|tL", 2, 2, ["layout: got 'tE|tL'; wanted one E, at the very beginning"]),
    ("t|tL", 2, 2, ["wanted one E, at the very beginning"]),
    ("Et|EtL", 2, 2, ["wanted one E, at the very beginning"]),
    ("Et|Lt", 2, 2, ["layout: got 'Et|Lt'; wanted one L, at the very end"]),
    ("Et|t", 2, 2, ["wanted one L, at the very end"]),
    ("EtL|tL", 2, 2, ["wanted one L, at the very end"]),
    ("", 2, 2, ["got 0 layers", "got 1 stages", "one E", "one L"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "num_layers", "num_stages", "lines"), WRONG)
def test_wrong_texts_are_taught(text, num_layers, num_stages, lines):
    with pytest.raises(ValueError, match="cannot use the layout") as caught:
        parse_layout(text, num_layers, num_stages)
    message = str(caught.value)
    assert repr(text) in message.splitlines()[0]
    for line in lines:
        assert line in message
    assert message.count("\n") == len(lines), message
