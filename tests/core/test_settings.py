"""Settings by short names and paths, their replacement at any depth, tables of files, sections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest

from functron.core.errors import Problem
from functron.core.settings import (
    Mark,
    Need,
    fields_under,
    follow,
    names_with_tag,
    nest_table,
    number_problems,
    path_of,
    plain_table,
    read_table,
    replace_settings,
    section,
    sections_of,
    setting,
    settings_of,
    unused_problems,
    value_at,
    with_optional_sections,
    with_sections,
)


@dataclass(frozen=True)
class Inner:
    rate: float = setting(0.5, least=0)


@dataclass(frozen=True)
class Saving:
    every: int = setting(0, "common", short="save_every", least=0)
    keep: int = 3
    inner: Inner = section(Inner)


@dataclass(frozen=True)
class Files:
    data: str = setting("", "path")
    seq: int = setting(8, least=1)


@dataclass(frozen=True)
class Whole:
    steps: int = setting(10, "common", box="optimizer", least=1)
    files: Files = section(Files, box="data", flat=True)
    saving: Saving = section(Saving)
    extra: Inner | None = setting(None)


def test_names_paths_boxes_and_tags():
    rows = {each.path: (each.name, each.mark.box) for each in settings_of(Whole)}
    assert rows == {
        "steps": ("steps", "optimizer"),
        "files.data": ("data", "data"),
        "files.seq": ("seq", "data"),
        "saving.every": ("save_every", "saving"),
        "saving.keep": ("saving.keep", "saving"),
        "saving.inner.rate": ("saving.inner.rate", "saving"),
        "extra.rate": ("extra.rate", "extra"),
    }
    assert names_with_tag(Whole, "common") == ("steps", "save_every")
    assert names_with_tag(Whole, "path") == ("data",)
    assert (path_of(Whole, "seq"), path_of(Whole, "saving.keep")) == ("files.seq", "saving.keep")


def test_values_by_name_and_path():
    whole = Whole(files=Files("x", 4))
    assert (value_at(whole, "data"), follow(whole, "files.data"), value_at(whole, "seq")) == (
        "x",
        "x",
        4,
    )
    assert value_at(whole, "extra.rate") is None
    assert list(fields_under(whole)) == [
        "steps", "data", "seq", "save_every", "saving.keep", "saving.inner.rate", "extra",
    ]  # fmt: skip
    assert list(fields_under(whole, "saving")) == ["save_every", "saving.keep", "saving.inner.rate"]
    assert list(sections_of(whole)) == [whole.files, whole.saving]


def test_settings_are_replaced_at_any_depth():
    whole = replace_settings(
        Whole(),
        {"seq": 2, "saving__keep": 1, "saving.inner.rate": 0.1, "extra": {"rate": 0.2}, "steps": 3},
    )
    assert whole == Whole(3, Files("", 2), Saving(0, 1, Inner(0.1)), Inner(0.2))
    assert replace_settings(whole, {"extra": None}).extra is None
    # a section as a whole, and what changes in it
    both = {"saving__keep": 9, "saving": Saving(every=7), "saving__inner__rate": 0.3}
    for given in (both, dict(reversed(both.items()))):
        assert replace_settings(whole, given).saving == Saving(7, 9, Inner(0.3))
    parts = {"saving__inner__rate": 0.3, "saving": {"keep": 4, "inner": {}}}
    assert replace_settings(whole, parts).saving == Saving(0, 4, Inner(0.3))
    assert replace_settings(whole, {"saving": {"inner": {"rate": 1.0}}}).saving == Saving(
        0, 1, Inner(1.0)
    )
    assert replace_settings(whole, {}) is whole


def test_what_cannot_be_replaced_is_listed():
    given = {"sek": 2, "saving__kep": 1, "saving": {"inner": {"rat": 1}}, "nothing.at.all": 0}
    with pytest.raises(TypeError) as caught:
        replace_settings(Whole(), given)
    text = str(caught.value)
    for line in (
        "sek: got an unknown name; wanted a known one; fix: did you mean 'seq'",
        "saving.kep: got an unknown name; wanted a known one; fix: did you mean 'saving.keep'",
        "saving.inner.rat: got an unknown name; wanted a known one; fix: did you mean 'rate'",
        "nothing.at.all: got an unknown name",
    ):
        assert line in text
    twice = {
        "seq": 2, "files__seq": 3, "saving": {"inner": {"rate": 1.0}}, "saving__inner__rate": 0.1,
        "extra": None, "extra__rate": 0.5,
    }  # fmt: skip
    with pytest.raises(TypeError) as caught:
        replace_settings(Whole(), twice)
    for path in ("files.seq", "saving.inner.rate", "extra.rate"):
        assert f"  - {path}: got twice; wanted once" in str(caught.value)


def test_tables_are_read_by_short_names_and_by_sections():
    problems: list[Problem] = []

    def read(table):
        return replace_settings(Whole(), read_table(nest_table(table, Whole), Whole(), problems))

    by_name = {"steps": 4, "data": "x", "save_every": 2, "extra": {"rate": 2}}
    by_path = {"steps": 4, "files": {"data": "x"}, "saving": {"every": 2}, "extra": {"rate": 2}}
    assert read(by_name) == read(by_path) == Whole(4, Files("x"), Saving(2), Inner(2.0))
    both = {"data": "x", "files": {"seq": 1}}
    assert read(both).files == Files("x", 1)
    assert read(plain_table(read(by_path))) == read(by_path)
    assert problems == []
    with pytest.raises(ValueError, match=r"save_every: got twice; wanted once: at the top"):
        read({"save_every": 1, "saving": {"every": 2}})


def test_what_tables_have_wrong_is_listed():
    problems: list[Problem] = []
    table = {"stepz": 1, "seq": "two", "saving": {"keep": 1.5, "kep": 1}, "extra": 3}
    read_table(nest_table(table, Whole), Whole(), problems)
    assert {problem.path for problem in problems} == {
        "stepz", "files.seq", "saving.keep", "saving.kep", "extra",
    }  # fmt: skip


def test_numbers_below_the_least():
    found = list(number_problems(Whole(0, Files(seq=0), Saving(-1))))
    assert [(each.path, each.got, each.wanted) for each in found] == [
        ("steps", "0", "at least 1"), ("seq", "0", "at least 1"), ("save_every", "-1", "at least 0"),
    ]  # fmt: skip
    for rate, got in ((-0.5, "-0.5"), (float("inf"), "inf"), (float("nan"), "nan")):
        (found,) = number_problems(Whole(saving=Saving(inner=Inner(rate))))
        assert (found.path, found.got) == ("saving.inner.rate", got)
        assert found.wanted == "at least 0, and finite"
    assert not list(number_problems(Whole(extra=Inner(0.0))))


def test_settings_without_effect_are_named_as_users_write_them():
    needs = {"seq": Need(lambda c: c.files.data, "some data", "name it")}
    needs |= {"saving": Need(lambda c: c.steps > 5, "steps", "take more")}
    whole = Whole(5, Files("", 4), Saving(0, 4))
    found = list(unused_problems(whole, needs, given=["save_every"]))
    assert [each.path for each in found] == ["seq", "saving.keep"]
    assert found[0].fix == "leave --seq out, or name it"
    assert not list(
        unused_problems(dataclasses.replace(whole, steps=6), {"saving": needs["saving"]})
    )


def test_sections_are_added_to_a_class_of_its_own():
    @dataclass(frozen=True)
    class Profile:
        every: int = setting(0, least=0)
        top: int = setting(5, short="profile_top")

    kind = with_sections(Whole, {"profile": Profile})
    assert with_sections(Whole, {"profile": Profile}) is kind
    assert with_sections(Whole, {}) is Whole
    made = replace_settings(kind(), {"profile__every": 2, "profile_top": 1, "steps": 7})
    assert (made.profile, made.steps, isinstance(made, Whole)) == (Profile(2, 1), 7, True)
    names = [each.name for each in settings_of(kind)]
    assert names == [*(each.name for each in settings_of(Whole)), "profile.every", "profile_top"]
    assert "profile" not in {field.name for field in dataclasses.fields(Whole)}

    @dataclass(frozen=True)
    class Taken:
        more: int = setting(0, short="save_every")

    with pytest.raises(ValueError, match=r"save_every: got a name that is taken"):
        with_sections(Whole, {"taken": Taken})
    with pytest.raises(ValueError, match=r"saving: got a name that is taken"):
        with_sections(Whole, {"saving": Profile})

    @dataclass(frozen=True)
    class Boxed:
        MARK: ClassVar[Mark] = Mark(box="results", flat=True)

        save_every: int = 0
        depth: int = 3

    with pytest.raises(ValueError, match=r"save_every: got a name that is taken"):
        with_sections(Whole, {"boxed": Boxed})

    @dataclass(frozen=True)
    class LongerSaving(Saving):
        MARK: ClassVar[Mark] = Mark(box="results", flat=True)

        depth: int = 3

    longer = with_sections(Whole, {"saving": LongerSaving})  # in the place of what it extends
    assert [each.name for each in dataclasses.fields(longer)] == [
        each.name for each in dataclasses.fields(Whole)
    ]
    depth = next(each for each in settings_of(longer) if each.path == "saving.depth")
    assert (depth.name, depth.mark.box) == ("depth", "results")
    assert longer().saving == LongerSaving()

    @dataclass
    class Loose:
        more: int = 0

    with pytest.raises(ValueError, match=r"loose: got Loose, which can be changed; .*frozen=True"):
        with_sections(Whole, {"loose": Loose})


def test_sections_may_be_none():
    mark = Mark(frozenset(["step"]), box="model")
    kind = with_optional_sections(Whole, {"saver": Saving, "files": Files}, mark)
    assert (kind().saver, kind().files) == (None, None)
    assert replace_settings(kind(), {"files__seq": 3}).files == Files(seq=3)
    assert plain_table(kind())["saver"] == "none"
    added = [each for each in settings_of(kind) if each.path.startswith("files.")]
    assert [(each.name, each.mark.box) for each in added] == [
        ("files.data", "model"),
        ("files.seq", "model"),
    ]
    assert all("step" in each.mark.tags for each in added)


def test_values_of_another_kind_are_refused():
    for name, value, wanted in (
        ("steps", "x", "a whole number"),
        ("steps", True, "a whole number"),
        ("data", 3, "text"),
        ("saving", 3, "a Saving, or a mapping of its settings"),
    ):
        error = TypeError if name == "saving" else ValueError
        with pytest.raises(error, match=f"{name}: got {value!r}; wanted {wanted}"):
            replace_settings(Whole(), {name: value})


def test_a_section_whose_values_no_file_can_hold_is_refused():
    @dataclass(frozen=True)
    class Names:
        names: tuple[str, ...] = ()

    with pytest.raises(ValueError, match=r"named\.names: got values of .*; wanted text, numbers"):
        with_sections(Whole, {"named": Names})
