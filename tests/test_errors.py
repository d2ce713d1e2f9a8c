"""functron.errors: what a message says, word for word."""

from __future__ import annotations

import pytest

from functron.errors import Problem, nearest, raise_problems


def test_a_problem_in_words():
    problem = Problem("params/up", "shape (3,)", "a size that tp=2 divides", "pad it to 4")
    assert str(problem) == (
        "params/up: got shape (3,); wanted a size that tp=2 divides; fix: pad it to 4"
    )
    assert str(Problem("seed", "-1", "an int >= 0")) == "seed: got -1; wanted an int >= 0"


def test_nothing_wrong_raises_nothing():
    raise_problems("title", [])
    raise_problems("title", iter(()))


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_all_problems_in_order(error):
    problems = (Problem(name, "1", "2", "add 1") for name in ("b", "a"))
    with pytest.raises(error) as caught:
        raise_problems("cannot shard", problems, error)
    assert type(caught.value) is error
    assert caught.value.args == (
        "cannot shard\n  - b: got 1; wanted 2; fix: add 1\n  - a: got 1; wanted 2; fix: add 1",
    )


def test_value_error_is_the_default():
    with pytest.raises(ValueError, match=r"^title\n  - x: got 1; wanted 2$"):
        raise_problems("title", [Problem("x", "1", "2")])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("emebd", "did you mean 'embed'? (known: embed, heads, mlp)"),
        ("head", "did you mean 'heads'? (known: embed, heads, mlp)"),
        ("zzz", "use one of: embed, heads, mlp"),
    ],
)
def test_nearest(name, expected):
    assert nearest(name, ["mlp", "heads", "embed"]) == expected


def test_nearest_of_nothing():
    assert nearest("x", []) == "use one of: none"
