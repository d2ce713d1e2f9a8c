"""Gantt charts: text by hand, SVG as a picture with a box per action."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from functron.pipeline import NAMES, Action, Costs, Timeline, make
from functron.pipeline.registry import combined_one_f_one_b, interleaved, one_f_one_b

SVG = "{http://www.w3.org/2000/svg}"


def test_ticks_as_text():
    assert one_f_one_b(2, 2).gantt() == (
        "rank 0 │F0 F1    B0    B1│\n"
        "rank 1 │   F0 B0 F1 B1   │"
    )  # fmt: skip
    assert interleaved(2, 2).gantt().splitlines()[1] == (
        "rank 1 │   F0 F1  F0₁ B0₁ F1₁ B1₁ B0  B1   │"
    )
    assert combined_one_f_one_b(2, 2).gantt() == (
        "rank 0 │F0 F1       B0 B1│\n"
        "rank 1 │   F0 F1+B0 B1   │"
    )  # fmt: skip


def test_time_as_text_is_to_scale():
    assert str(one_f_one_b(2, 2).simulate()) == (
        "1f1b: total 9, bubble 33.3%\n"
        "rank 0 │F0 F1       B0===    B1=== │\n"
        "rank 1 │   F0 B0=== F1 B1===       │"
    )
    split = make("zb-h1", 1, 1).simulate(Costs(forward=2, backward_input=3, backward_weight=2))
    assert split.gantt() == "rank 0 │F0· I0--- W0~ │"
    narrow = one_f_one_b(2, 2).simulate().gantt(width=9 + 2 * 9).splitlines()
    assert narrow == [
        "rank 0 │0 1     B0=   B1= │",
        "rank 1 │  0 B0= 1 B1=     │",
    ]
    assert len(one_f_one_b(2, 2).simulate().gantt(width=3).splitlines()) == 2


def test_measured_time_as_text():
    rows = [
        (0, Action("F", 0), 0.0, 0.01),
        (1, Action("F", 0), 0.01, 0.03),
        (0, Action("F", 1), 0.02, 0.02),
    ]
    assert Timeline.of("run", rows).gantt(60).splitlines() == [
        "rank 0 │F0       │",
        "rank 1 │   F0··· │",
    ]
    late = Timeline.of("run", [(0, Action("F", 0), 0.0, 1.0), (0, Action("B", 0), 1.0, 1.0001)])
    assert late.gantt(20) == "rank 0 │F0········0│"
    assert Timeline("empty", (), 2).gantt() == "rank 0 │ │\nrank 1 │ │"


@pytest.mark.parametrize("name", NAMES)
def test_svg_has_a_box_per_action(name):
    schedule = make(name, 4, 8)
    actions = sorted(str(a) for r in range(4) for _, a in schedule.column(r))
    for svg in (schedule.svg(), schedule.simulate().svg(), schedule._repr_html_()):
        root = ET.fromstring(svg)
        titles = [title.text for title in root.iter(f"{SVG}title")]
        assert sorted(map(str, titles)) == actions
        boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for box in boxes:
            x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height
        assert [t.text for t in root.iter(f"{SVG}text") if t.text == "rank 3"]
        kinds = {action[0] for action in actions}
        colours = {box.attrib["fill"] for box in boxes}
        assert len(colours) == len(kinds) * schedule.num_chunks or name == "dualpipe"


def test_measured_svg():
    timeline = Timeline.of(
        "a < b", [(0, Action("F", 0), 0.0, 1e-3), (0, Action("B", 0), 1e-3, 1e-3)]
    )
    root = ET.fromstring(timeline._repr_html_())
    assert any("a < b: total 0.001" in str(text.text) for text in root.iter(f"{SVG}text"))
    ET.fromstring(Timeline("empty", (), 1).svg())
