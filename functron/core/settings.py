"""Settings: frozen dataclasses of dataclasses, whose fields say how options and files name them.

A field that is a dataclass is a section. A setting has a path, such as ``checkpoint.save_every``,
and a name: its short one, ``save_every``, where the field or its section says so, and its path
otherwise. Options, files, help, needs and messages go by names; what they say of a setting beside
its value stands at the field alone:

    @dataclass(frozen=True)
    class ProfileConfig:
        every: int = setting(0, short="profile_every")

    @dataclass(frozen=True)
    class Config:
        seed: int = setting(0, "common", box="optimizer")
        profile: ProfileConfig = section(ProfileConfig)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from functron.core.errors import Problem, nearest, raise_problems
from functron.core.tables import repr_differences

T = TypeVar("T")

_MARK = "functron"


@dataclass(frozen=True)
class Mark:
    """The metadata of a field that is a setting or a section.

    Attributes:
        tags: words by which settings are found: `names_with_tag`.
        short: its name in place of its path.
        box: of the help; empty: that of the section that it is in.
        instead: what to do instead of setting it, of a value that a run records, and no option.
        least: the smallest number that it may be; None: any.
        need: what it needs of its section to have an effect; None: nothing.
        flat: of a section: its settings have the names of their fields as short ones.
    """

    tags: frozenset[str] = frozenset()
    short: str = ""
    box: str = ""
    instead: str = ""
    least: int | None = None
    need: Need | None = None
    flat: bool = False


def setting(default: T, tags: str = "", **more: Any) -> T:
    """A field of a dataclass that is a setting.

    Args:
        default: its value.
        tags: words, such as ``"common path"``.
        more: what else a `Mark` has: short, box, instead, least, need.
    """
    mark = Mark(frozenset(tags.split()), **more)
    found: Any = dataclasses.field(default=default, metadata={_MARK: mark})
    return found


def section(make: Callable[[], T], tags: str = "", *, box: str = "", flat: bool = False) -> T:
    """A field of a dataclass that is a section: a frozen dataclass of settings; see `Mark`.

    Args:
        make: its class, or what else makes its default.
        tags: words that all its settings have.
        box, flat: as of `Mark`; the box is named as the section where it has no other.
    """
    mark = Mark(frozenset(tags.split()), box=box, flat=flat)
    found: Any = dataclasses.field(default_factory=make, metadata={_MARK: mark})
    return found


def mark_of(field: dataclasses.Field) -> Mark:
    """The `Mark` of a field; an empty one where it has none."""
    return field.metadata.get(_MARK, Mark())


def is_marked(field: dataclasses.Field) -> bool:
    """Whether a field was made by `setting` or `section`."""
    return _MARK in field.metadata


@dataclass(frozen=True)
class Setting:
    """A setting of a configuration.

    Attributes:
        name: as options, files and messages have it.
        path: as Python has it.
        mark: the mark of its field, with the box and the tags of its section.
    """

    name: str
    path: str
    mark: Mark


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass, whose text is compiled to find them."""
    return typing.get_type_hints(kind)


_UNIONS = (typing.Union, types.UnionType)


def section_in(hint: Any) -> tuple[Any, bool]:
    """The dataclass of an annotation ``X`` or ``X | None``, and whether None is allowed."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return (found[0] if found else None), types.NoneType in options


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """All settings of a dataclass, in order, those of sections that may be None among them."""
    return tuple(_settings_in(kind, "", Mark()))


def _settings_in(kind: type, prefix: str, above: Mark) -> Iterator[Setting]:
    """The settings of the section at a path, which has the mark `above`."""
    for field in dataclasses.fields(kind):
        mark, path = mark_of(field), f"{prefix}{field.name}"
        inner, _ = section_in(hints_of(kind)[field.name])
        own_box = field.name if inner is not None and is_marked(field) else ""
        box = mark.box or above.box or own_box
        own = dataclasses.replace(mark, box=box, tags=mark.tags | above.tags)
        if inner is not None:
            yield from _settings_in(inner, f"{path}.", own)
        else:
            yield Setting(mark.short or (field.name if above.flat else path), path, own)


@functools.cache
def paths_of(kind: type) -> Mapping[str, str]:
    """The paths of a dataclass's settings by their names."""
    return MappingProxyType({each.name: each.path for each in settings_of(kind)})


@functools.cache
def _names_of(kind: type) -> Mapping[str, str]:
    return {path: name for name, path in paths_of(kind).items()}


@functools.cache
def names_with_tag(kind: type, tag: str) -> tuple[str, ...]:
    """The names of a dataclass's settings that have this tag."""
    return tuple(each.name for each in settings_of(kind) if tag in each.mark.tags)


def name_of(kind: type, path: str) -> str:
    """The name of a setting or section by its path."""
    return _names_of(kind).get(path, path)


def path_of(kind: type, name: str) -> str:
    """The path of a setting or section by its name; `name` itself where it is no short one."""
    return paths_of(kind).get(name, name)


def value_at(config: Any, name: str) -> Any:
    """The value of a setting or section; None where a section above it is None."""
    return follow(config, path_of(type(config), name))


def explain_field(kind: type, name: str) -> str:
    """Why a dataclass has no field of this name, and where its setting is, for messages."""
    path = paths_of(kind).get(name)
    fields = {field.name for field in dataclasses.fields(kind)}
    if path is None or path == name:
        return f"{kind.__name__} has no field {name!r}; fix: {nearest(name, fields)}"
    return (
        f"{kind.__name__} has no field {name!r}, which is a setting of a section; fix: "
        f"config.{path}, or configure(config, {name}=...) for another value"
    )


def follow(config: Any, path: str) -> Any:
    """The value at a path; None where a section above it is None."""
    for part in path.split(".") if path else ():
        config = None if config is None else getattr(config, part)
    return config


def fields_under(config: Any, name: str = "") -> Iterator[str]:
    """The names of all settings of a configuration, or of a section of it, that are in force."""
    paths = _paths_under(config, path_of(type(config), name))
    yield from (name_of(type(config), path) for path in paths)


def _paths_under(config: Any, path: str) -> Iterator[str]:
    found = follow(config, path)
    if not dataclasses.is_dataclass(found):
        yield path
        return
    for each in dataclasses.fields(found):
        yield from _paths_under(config, f"{path}.{each.name}" if path else each.name)


def number_problems(config: Any) -> Iterator[Problem]:
    """The numbers that are below the `least` of their settings, or not finite."""
    for each in settings_of(type(config)):
        value, least = follow(config, each.path), each.mark.least
        if least is None or value is None or least <= value < math.inf:
            continue
        also = ", and finite" if isinstance(value, float) else ""
        yield Problem(each.name, f"{value:g}" if also else str(value), f"at least {least}{also}")


def find_unknown(config: Any) -> Iterator[tuple[str, Any, tuple]]:
    """Fields of a dataclass whose values are not in their `Literal`: name, value, those in it."""
    for name, hint in hints_of(type(config)).items():
        known = typing.get_args(hint)
        if typing.get_origin(hint) is Literal and (value := getattr(config, name)) not in known:
            yield name, value, known


def choice_problems(config: Any) -> list[Problem]:
    """A problem for each field of `find_unknown`."""
    return [
        Problem(name, repr(value), "a known name", nearest(str(value), known))
        for name, value, known in find_unknown(config)
    ]


def sections_of(config: Any) -> Iterator[Any]:
    """The sections of a configuration that are in force, not those in them."""
    values = (getattr(config, field.name) for field in dataclasses.fields(config))
    yield from (value for value in values if dataclasses.is_dataclass(value))


def with_optional_sections(kind: type[T], sections: Mapping[str, type], mark: Mark) -> type[T]:
    """A configuration with sections of these names that are None by default, all of this mark."""
    fields = [
        (name, inner | None, dataclasses.field(default=None, metadata={_MARK: mark}))
        for name, inner in sections.items()
    ]
    return _extend_dataclass(kind, fields)


def _extend_dataclass(kind: type[T], rows: Sequence[tuple[str, Any, Any]]) -> type[T]:
    """A dataclass with more sections, which its docstring names with the first line of theirs."""
    made = dataclasses.make_dataclass(
        kind.__name__, rows, bases=(kind,), frozen=True, namespace={"__repr__": repr_differences}
    )
    doc, attributes, rest = (kind.__doc__ or "").partition("    Attributes:\n")
    if attributes:
        indent = rest[: len(rest) - len(rest.lstrip())]
        own = hints_of(kind)
        inner = {name: section_in(hint)[0] for name, hint, _ in rows if name not in own}
        texts = {
            name: (each.__doc__ or name).strip().partition("\n")[0] for name, each in inner.items()
        }
        rest = rest.rstrip() + "".join(f"\n{indent}{name}: {text}" for name, text in texts.items())
    made.__doc__, made.__module__ = f"{doc}{attributes}{rest}", kind.__module__
    return made


def with_sections(kind: type[T], sections: Mapping[str, type]) -> type[T]:
    """A configuration with more sections than `kind` has: a dataclass of its own.

    Args:
        kind: a frozen dataclass.
        sections: by their names, frozen dataclasses all of whose fields have defaults. One may say
            its box and whether its settings have short names in a class attribute ``MARK``, a
            `Mark`. One that is a subclass of the section of its name takes its place.

    Raises:
        ValueError: a section, or a short name of its settings, is there already; or it is not
            frozen.
    """
    return _extend_settings(kind, tuple(sections.items())) if sections else kind


_FROZEN = "write @dataclass(frozen=True) above it"


@functools.cache
def _extend_settings(kind: type, sections: tuple[tuple[str, type], ...]) -> Any:
    own = {each.name: section_in(hints_of(kind)[each.name])[0] for each in dataclasses.fields(kind)}
    extended = {n for n, inner in sections if own.get(n) and issubclass(inner, own[n])}
    marks = {x.name: mark_of(x) for x in dataclasses.fields(kind) if x.name in extended}
    marks |= {name: inner.MARK for name, inner in sections if hasattr(inner, "MARK")}
    marks |= {name: Mark() for name, _ in sections if name not in marks}
    settings = [x for name, inner in sections for x in _settings_in(inner, f"{name}.", marks[name])]
    taken = {n for n, path in paths_of(kind).items() if path.partition(".")[0] not in extended}
    taken |= own.keys() - extended
    added = [*(name for name, _ in sections), *(each.name for each in settings)]
    raise_problems(
        "cannot add these sections",
        [
            Problem(name, "a name that is taken", "another name")
            for index, name in enumerate(added)
            if name in taken or name in added[:index]
        ]
        + [
            Problem(name, f"{inner.__name__}, which can be changed", "a frozen dataclass", _FROZEN)
            for name, inner in sections
            if not vars(inner)["__dataclass_params__"].frozen
        ]
        + [
            Problem(f"{name}.{each.path}", f"values of {hint}", _KINDS, "write it as text")
            for name, inner in sections
            for each in settings_of(inner)
            if not _is_supported(hint := _hint_at(inner, each.path))
        ],
    )
    rows = [
        (name, inner, dataclasses.field(default_factory=inner, metadata={_MARK: marks[name]}))
        for name, inner in sections
    ]
    return _extend_dataclass(kind, rows)


# --- replacing


def replace_settings(base: T, given: Mapping[str, Any]) -> T:
    """`base` with settings and sections replaced, at any depth.

    Args:
        base: a dataclass.
        given: values by names or paths, with ``__`` or a dot between their parts; a section as
            a whole, or as a mapping of what changes in it.

    Raises:
        TypeError: names that it does not have, each with the nearest that it has.
        ValueError: values of another kind.
    """
    problems: list[Problem] = []
    values: list[Problem] = []
    tree = _nest_changes(base, given, "", problems, values)
    raise_problems("cannot replace these settings", problems, TypeError)
    raise_problems("settings cannot have these values", values)
    return _rebuild(base, tree)


_WHOLE = ""  # the key of a section as a whole among what changes in it


def _nest_changes(
    base: Any,
    given: Mapping[str, Any],
    prefix: str,
    problems: list[Problem],
    values: list[Problem],
) -> dict:
    """The changes of a dataclass, as nested dicts; wrong names are added to `problems`."""
    tree: dict[str, Any] = {}
    for word, value in given.items():
        name = word.replace("__", ".")
        path, inner = _find_path(type(base), name, value)
        if path is None:
            problems.append(_explain_name(type(base), name, word, value, prefix))
            continue
        if inner is not None and isinstance(value, Mapping):
            own = follow(base, path)
            value = _nest_changes(
                inner() if own is None else own, value, f"{prefix}{path}.", problems, values
            )
        elif inner is not None and value is not None:
            value = {_WHOLE: value}
        elif (
            inner is None
            and (wanted := _wanted_kind(_hint_at(type(base), path), value)) is not None
        ):
            values.append(Problem(f"{prefix}{name}", repr(value), wanted))
        for twice in _put_value(tree, path.split("."), value):
            fix = "leave one of them out"
            problems.append(Problem(f"{prefix}{twice}", "twice", "once", fix))
    return tree


def _explain_name(kind: type, name: str, word: str, value: Any, prefix: str) -> Problem:
    """Why nothing can be replaced by this name: it is a section's, or none."""
    inner, _ = _section_at(kind, name)
    if inner is not None:
        wanted = f"a {inner.__name__}, or a mapping of its settings"
        fix = f"{word}={{{next(iter(hints_of(inner)))!r}: ...}}"
        return Problem(f"{prefix}{name}", repr(value), wanted, fix)
    known = {*paths_of(kind), *(field.name for field in dataclasses.fields(kind))}
    return Problem(f"{prefix}{name}", "an unknown name", "a known one", nearest(name, known))


def _put_value(tree: dict[str, Any], path: Sequence[str], value: Any) -> Iterator[str]:
    """Put a value, or changes of a section, into a tree; the paths that have one already."""
    node, place = tree, ".".join(path)
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):  # the section as a whole is to be None
            yield place
            return
    last = path[-1]
    if last not in node:
        node[last] = value
    elif isinstance(value, dict) and isinstance(node[last], dict):
        for name, each in value.items():
            yield from (f"{place}.{twice}" for twice in _put_value(node[last], [name], each))
    else:
        yield place


def _find_path(kind: type, name: str, value: Any) -> tuple[str | None, Any]:
    """The path of what `value` is given for by this name, and its dataclass if it is a section.

    A name may be that of a section and of a setting, as ``data`` is: the kind of value decides.
    """
    inner, optional = _section_at(kind, name)
    whole = isinstance(value, Mapping) or dataclasses.is_dataclass(value)
    if inner is not None and (whole or (optional and value is None)):
        return name, inner
    names = paths_of(kind)
    found = names.get(name) or (name if name in names.values() else None)
    return found, None


def _section_at(kind: type, path: str) -> tuple[Any, bool]:
    """The dataclass of the section at a path, and whether it may be None; None: there is none."""
    optional = False
    for part in path.split("."):
        hint = hints_of(kind).get(part) if dataclasses.is_dataclass(kind) else None
        inner, optional = section_in(hint)
        if inner is None:
            return None, False
        kind = inner
    return kind, optional


def _hint_at(kind: type, path: str) -> Any:
    """The annotation of the setting at a path."""
    *sections, last = path.split(".")
    inner = _section_at(kind, ".".join(sections))[0] if sections else kind
    return hints_of(inner)[last]


def _rebuild(base: Any, tree: Mapping[str, Any]) -> Any:
    """`base` with what `_nest_changes` found replaced."""
    hints, new = hints_of(type(base)), {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner = value.get(_WHOLE, getattr(base, key))
            inner = section_in(hints[key])[0]() if inner is None else inner
            value = _rebuild(inner, {name: x for name, x in value.items() if name != _WHOLE})
        new[key] = value
    return dataclasses.replace(base, **new) if new else base


# --- from and to nested dicts, as files have them


def nest_table(table: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The table of a file, with settings that stand at its top by short names in their sections.

    Unknown keys stay where they are. ValueError where a setting stands at the top and in its
    section.
    """
    names, twice = paths_of(kind), []
    out: dict[str, Any] = {}
    for key, value in table.items():
        inner, _ = _section_at(kind, key)
        whole = inner is not None and isinstance(value, Mapping)
        path = key if whole else names.get(key, key)
        twice += _put_value(out, path.split("."), copy.deepcopy(value))
    wanted, fix = "once: at the top, or in its table", "leave one of them out"
    found = [Problem(name_of(kind, path), "twice", wanted, fix) for path in twice]
    raise_problems("cannot use these settings", found)
    return out


def read_table(
    table: Mapping[str, Any], base: Any, problems: list[Problem], prefix: str = ""
) -> dict[str, Any]:
    """Nested dicts, checked against the fields of `base`, a dataclass, for `replace_settings`.

    Args:
        table, base: as of `nest_table`, and an instance.
        problems: what is wrong with the table is added to these, with `prefix` before their paths.
    """
    hints = hints_of(type(base))
    names = [f.name for f in dataclasses.fields(base)]
    out = {}
    for key, value in table.items():
        where = f"{prefix}{key}"
        if key not in names:
            known = names if prefix else [*names, *paths_of(type(base))]
            fix = nearest(key, known)
            problems.append(Problem(where, "an unknown key", "a known one", fix))
            continue
        inner, optional = section_in(hints[key])
        if inner is not None and isinstance(value, Mapping):
            own = getattr(base, key)
            own = inner() if own is None else own
            out[key] = read_table(value, own, problems, f"{where}.")
        elif optional and value in ("none", None):
            out[key] = None
        elif inner is None and (kind := _wanted_kind(hints[key], value)) is None:
            out[key] = _convert_value(hints[key], value)
        else:
            kind = "a table" if inner is not None else _wanted_kind(hints[key], value)
            problems.append(Problem(where, repr(value), str(kind)))
    return out


def plain_table(config: Any) -> dict[str, Any]:
    """A dataclass as nested dicts for TOML, which has no null, values of a table before tables."""
    rows = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    tables = {key: plain_table(x) for key, x in rows.items() if dataclasses.is_dataclass(x)}
    values = {key: "none" if x is None else x for key, x in rows.items() if key not in tables}
    return values | tables


def _convert_value(hint: Any, value: Any) -> Any:
    """A value of the annotated kind from what TOML has for it."""
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return float(value) if hint is float else value


_KINDS = "text, numbers, true or false, one of several words, or whole numbers in a row"


def _is_supported(hint: Any) -> bool:
    """Whether options and files can have values of the annotated kind."""
    if typing.get_origin(hint) in _UNIONS:
        return all(each is types.NoneType or _is_supported(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint) == (int, ...)
    return hint in (int, float, str, bool) or typing.get_origin(hint) is Literal


def _wanted_kind(hint: Any, value: Any) -> str | None:
    """The kind that is wanted where `value` is not of it, else None."""
    if typing.get_origin(hint) is Literal:
        options = typing.get_args(hint)
        return None if value in options else f"one of {', '.join(map(repr, options))}"
    if typing.get_origin(hint) in _UNIONS:
        kinds = [_wanted_kind(option, value) for option in typing.get_args(hint)]
        return None if None in kinds else " or ".join(map(str, kinds))
    if typing.get_origin(hint) is tuple:  # of any number of numbers
        kind = typing.get_args(hint)[0]
        ok = isinstance(value, list | tuple) and all(
            _wanted_kind(kind, each) is None for each in value
        )
        return None if ok else f"a list of {'whole ' * (kind is int)}numbers"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    fits = (int, float) if hint is float else (hint,)
    ok = isinstance(value, fits) and (hint is bool or not isinstance(value, bool))
    return None if ok else words.get(hint, str(hint))


# --- what settings need to have an effect


@dataclass(frozen=True)
class Need:
    """A condition of an option's effect; tables of these stand beside the configurations.

    Attributes:
        holds: of the configuration that the table is for: whether the option has an effect.
        wanted: what it is an option of.
        fix: how to have that.
        whole: of a setting's `need`: whether the whole configuration is asked, not its section.
    """

    holds: Callable[[Any], bool]
    wanted: str
    fix: str
    whole: bool = False


Needs = Mapping[str, Need]
"""By the name of a setting, such as ``optimizer.b1``; that of a section stands for all under it."""


def never(wanted: str, fix: str, *names: str) -> Needs:
    """The needs of options that have no effect in any case."""
    return dict.fromkeys(names, Need(lambda config: False, wanted, fix))


def needs_under(path: str, needs: Needs, find: Callable[[Any], Any] | None = None) -> Needs:
    """The needs of a section as those of the configuration that has it.

    Args:
        path: of the section.
        needs: its own.
        find: the section in a configuration; None: by its path. Where it is None nothing needs
            anything.
    """
    find = functools.partial(follow, path=path) if find is None else find
    return {f"{path}.{name}": _apply_to_section(need, find) for name, need in needs.items()}


def needs_of(kind: type) -> Needs:
    """The needs that the settings of a configuration's sections say themselves."""
    found = {}
    for each in settings_of(kind):
        if each.mark.need is not None:
            find = functools.partial(follow, path=each.path.rpartition(".")[0])
            found[each.name] = _apply_to_section(each.mark.need, find)
    return found


def _apply_to_section(need: Need, find: Callable[[Any], Any]) -> Need:
    if need.whole:
        return need

    def holds(config: Any) -> bool:
        found = find(config)
        return found is None or need.holds(found)

    return Need(holds, need.wanted, need.fix)


def unused_problems(
    config: Any, needs: Needs, usual: Iterable[Any] = (), given: Collection[str] = ()
) -> Iterator[Problem]:
    """The options that were set and that have no effect.

    Args:
        config: a dataclass, perhaps of others.
        needs: of its fields.
        usual: configurations whose values count as not set: a preset's, a file's. Those of a
            field's own class are usual, too.
        given: names of settings that were set, to whatever value; 0, False and empty ones say
            that there is nothing, which is so.
    """
    seen = set()

    def was_set(name: str) -> bool:
        above, _, field = path_of(type(config), name).rpartition(".")
        value, owner = value_at(config, name), follow(config, above)
        if owner is None:
            return False
        plain = [value_at(one, name) for one in usual]
        plain += [x.default for x in dataclasses.fields(owner) if x.name == field]
        return value not in plain or bool(value and name in given)

    for name, need in needs.items():
        found = [each for each in fields_under(config, name) if each not in seen and was_set(each)]
        if not found or need.holds(config):
            continue
        seen.update(found)
        for each in found:
            fix = f"leave --{each.replace('_', '-')} out, or {need.fix}"
            got = f"{value_at(config, each)!r}, which has no effect"
            yield Problem(each, got, need.wanted, fix)
