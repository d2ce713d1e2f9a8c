"""`validate` on tables with one thing wrong each: what it says, where, and how to mend it."""

from __future__ import annotations

import pytest

from functron.pipeline import Schedule, make

RIGHT = "F0 .\nF1 F0\n. B0\nB0 F1\n. B1\nB1 ."
SPLIT = "F0 .\n. F0\n. I0\nI0 W0\nW0 ."


def problems(text: str, **options) -> list[str]:
    with pytest.raises(ValueError, match="schedule table") as caught:
        Schedule.parse(text).validate(**options)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_right_tables():
    Schedule.parse(RIGHT).validate()
    Schedule.parse(RIGHT).validate(max_live=2)
    Schedule.parse(RIGHT).validate(max_live=[2, 1])
    Schedule.parse(SPLIT).validate()
    Schedule.parse("F0 .\nF1 F0\n. F1").validate()
    Schedule.parse("F0 .\n. F0+B0\nB0 .").validate()
    # whole and split backwards may be mixed
    Schedule.parse("F0 .\n. F0\n. B0\nI0 .\nW0 .").validate()


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        # missing
        ("F1 F0\n. B0\nB0 F1\n", "F1 F0\n. .\nB0 F1\n", "rank 1: got no B0; wanted one of each; fix: add it"),
        ("B1 .", ". .", "rank 0: got no B1"),
        # twice
        ("B1 .", "B1 F1", "tick 5, rank 1, F1: got a second one, after the one of tick 3; wanted one; fix: delete it"),
        # backwards of both kinds
        ("B1 .", "B1 I1", "tick 4, rank 1, B1: got B besides its parts I or W; wanted one backward"),
        # too early
        ("F0 .\nF1 F0\n", "F0 F0\nF1 .\n", "tick 0, rank 1, F0: got it needs the activation that rank 0 makes at tick 0; "
         "wanted it after that, at tick 1 or later; fix: move it down to tick 1"),
        ("\n. B0\nB0 F1\n", "\n. .\nB0 B0\n. F1\n", "tick 3, rank 0, B0: got it needs the cotangent that rank 1 makes at tick 3"),
        # what cannot be there
        ("B1 .", "B1 F7", "tick 5, rank 1, F7: got microbatch 7; wanted 0 to 1"),
        ("B1 .", "B1+F0+F0 .", "tick 5, rank 0, B1+F0+F0: got 3 actions; wanted two at most"),
    ],
)  # fmt: skip
def test_one_thing_wrong(wrong, right, message):
    text = "microbatches: 2\n" + RIGHT
    assert wrong in text
    assert message in "\n".join(problems(text.replace(wrong, right)))


def test_weights_come_after_inputs():
    text = SPLIT.replace("I0 W0\nW0 .", "W0 W0\nI0 .")
    message = "tick 3, rank 0, W0: got it needs the cotangent that rank 0 makes at tick 4"
    assert problems(text)[0].startswith(message)
    assert problems(SPLIT.replace("W0 .", ". .")) == [
        "rank 0: got no W0; wanted one of each; fix: add it"
    ]


def test_actions_of_a_cell_run_in_order():
    text = "F0 .\n. B0+F0\nB0 ."
    assert problems(text)[0].startswith("tick 1, rank 1, B0: got it needs the activation that rank")


def test_everything_wrong_is_said_at_once():
    found = problems("microbatches: 3\nF0 F0\nF1 F1\nB0 B0\n. B1\n. B1", max_live=1)
    assert [problem.partition(" got ")[0] for problem in found] == [
        "tick 4, rank 1, B1:",  # a second one
        "rank 0:",  # no F2
        "rank 0:",  # no B1, B2
        "rank 1:",
        "rank 1:",
        "tick 0, rank 1, F0:",  # too early
        "tick 1, rank 1, F1:",
        "tick 2, rank 0, B0:",
        "rank 0:",  # two live activations
        "rank 1:",
    ]
    assert sum("no B1 B2" in problem for problem in found) == 1


def test_a_circle_names_what_each_rank_waits_for():
    # rank 0 wants B0 before it does F1, rank 1 wants F1 before it does B0
    found = "\n".join(problems("F0 .\n. F0\nB0 .\nF1 F1\n. B0\n. B1\nB1 ."))
    assert "rank 0, B0: got a wait for the cotangent of microbatch 0 (B0 of rank 1)" in found
    assert "rank 1, F1: got a wait for the activation of microbatch 1 (F1 of rank 0)" in found


def test_an_action_on_another_rank_or_chunk():
    # the second pipe runs through chunk 1 of both ranks
    text = "pipe: 0 1\npipe: 1.1 0.1\nF0 F1.1\nF1 F0"
    assert problems(text)[0] == (
        "tick 1, rank 0, F1: got chunk 0 of rank 0, no stage of pipe 1; wanted chunk 1, where "
        "microbatch 1 passes; fix: move it to the rank and chunk that hold the stage"
    )


def test_the_bound_on_live_activations():
    gpipe = make("gpipe", 2, 4)
    gpipe.validate(max_live=4)
    with pytest.raises(
        ValueError,
        match=r"rank 0: got 4 live activations, over 2 from F2 on; wanted at most 2; fix: .*before F2\n.*rank 1",
    ):
        gpipe.validate(max_live=2)
    make("1f1b", 2, 4).validate(max_live=(2, 1))
    with pytest.raises(ValueError, match="rank 1: got 1 live activations, over 0 from F0"):
        make("1f1b", 2, 4).validate(max_live=(2, 0))


def test_pipes_and_rows_that_are_none():
    for pipes, row, message in [
        ((), ((),), "pipes: got a pipe without stages"),
        (((),), ((),), "pipes: got a pipe without stages"),
        ((((0, 0),), ((1, 0), (0, 1))), ((), ()), r"pipes: got \[1, 2\] stages"),
        ((((0, 0), (0, 0)),), ((),), "pipes: chunk 0 of rank 0: got two stages"),
        ((((0, 0), (2, 0)),), ((), (), ()), r"pipes: got ranks \[0, 2\]; wanted ranks numbered"),
        ((((0, 1), (1, 0)),), ((), ()), r"pipes: got chunks of rank 0 \[1\]"),
        ((((0, 0), (1, 0)),), ((),), "tick 0: got 1 cells; wanted 2, one per rank"),
    ]:
        with pytest.raises(ValueError, match=message):
            Schedule("wrong", pipes, 1, (row,)).validate()
    with pytest.raises(ValueError, match="num_microbatches: got 0; wanted 1 or more"):
        Schedule("wrong", (((0, 0),),), 0, ()).validate()
