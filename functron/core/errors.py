"""Errors that teach: where, what was got, what was wanted and the fix, all offenders at once.

What users call is `public`: errors leave it with the frames of the user's own code alone.
"""

from __future__ import annotations

import contextvars
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, NoReturn, TypeVar

from functron.core.scopes import set_during


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what a user passed.

    Attributes:
        path: tree path, field or argument at fault (``"params/blocks/up"``).
        got: what was passed, in the user's terms.
        wanted: what would have been right.
        fix: one thing to do about it.
    """

    path: str
    got: str
    wanted: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: got {self.got}; wanted {self.wanted}"
        return f"{text}; fix: {self.fix}" if self.fix else text


def raise_problems(
    title: str, problems: Iterable[Problem], error: type[Exception] = ValueError
) -> None:
    """Raise one `error` that lists every problem, or return when there is none.

    Args:
        title: what was being attempted, one line.
        problems: the offenders, in the order to show them.
        error: `ValueError` for bad values, `TypeError` for bad kinds.
    """
    found = list(problems)
    if found:
        raise error("\n".join([title, *(f"  - {problem}" for problem in found)]))


def refuse(
    title: str,
    path: str,
    got: object,
    wanted: str,
    fix: str = "",
    error: type[Exception] = ValueError,
) -> NoReturn:
    """Raise one `error` about one thing: `raise_problems` with one `Problem` of these words."""
    raise error(f"{title}\n  - {Problem(path, str(got), wanted, fix)}")


_LISTED = 30
"""More names than these do not help who looks for one."""


def nearest(name: str, known: Iterable[str], first: Iterable[str] = ()) -> str:
    """The sentence that suggests the known name closest to `name`; of a few it lists all.

    One of `first` where one is close to it, and these are listed before others.
    """
    own = sorted(first)
    names = [*own, *sorted(set(known) - set(own))]
    close = difflib.get_close_matches(name, own, n=1) or difflib.get_close_matches(name, names, n=1)
    if close and len(names) > _LISTED:
        return f"did you mean {close[0]!r}?"
    listed = ", ".join(names[:_LISTED]) or "none"
    listed += f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"did you mean {close[0]!r}? (known: {listed})" if close else f"use one of: {listed}"


def load_function(text: str, path: str) -> Callable[..., Any]:
    """The function that ``package.module:name`` names, which a user wrote.

    Args:
        text: the module, which Python finds as in an import, and the name in it.
        path: of the field, for messages.

    Raises:
        ValueError: there is no such module or function. What the module raises itself is raised.
    """
    module, _, name = text.partition(":")
    wanted = "package.module:function"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        fix = f"make {module}.py a module that Python finds: start in its folder, or put this on "
        refuse("no such function", path, repr(text), wanted, f"{fix}PYTHONPATH")
    if not callable(made := getattr(found, name, None)):
        known = [n for n, value in vars(found).items() if inspect.isfunction(value)]
        refuse("no such function", path, repr(text), wanted, nearest(name, known))
    return made


APPLICATIONS = "functron.apps"
"""The module whose `PLUGINS` have the entry points of functron's own applications, by group."""


def find_plugin(group: str, name: str, path: str, own: Iterable[str] = ()) -> str:
    """``package.module:function`` of what an application gives to a setting, by its name.

    Args:
        group: of entry points, such as ``"functron.sample_orders"``. Those of functron's own
            applications stand in a table, so that they are there without an installation; those of
            other distributions are looked for where that has no such name.
        name: of the entry point, or already ``package.module:function``.
        path: of the setting, for messages.
        own: the names that the setting has without an application, for messages.

    Raises:
        ValueError: nothing has this name.
    """
    if ":" in name:
        return name
    if folder := find_left_out(group, name):
        got, wanted = f"{name!r}, of {folder}, which is not there", "that application"
        refuse(f"no such {path}", path, got, wanted, "restore its folder, or leave this out")
    table = _read_plugins(group)
    found = table.get(name)
    others: dict[str, str] = {}
    if found is None:
        metadata = importlib.import_module("importlib.metadata")
        others = {one.name: one.value for one in metadata.entry_points(group=group)}
    if (found := found or others.get(name)) is None:
        fix = nearest(name, [*own, *table, *others])
        refuse(f"no such {path}", path, repr(name), "a known one, or package.module:function", fix)
    return found


def load_plugin(group: str, name: str, path: str, own: Iterable[str] = ()) -> Callable[..., Any]:
    """The function of `find_plugin`; ValueError also where there is no such function."""
    return load_function(find_plugin(group, name, path, own), path)


def list_plugins(group: str) -> dict[str, str]:
    """The names and functions (``module:function``) of a group in the table of applications.

    Applications whose folders were left out have none.
    """
    table = _read_plugins(group)
    return {name: at for name, at in table.items() if has_module(at.partition(":")[0])}


def find_left_out(group: str, name: str) -> str:
    """The folder of the application that has a plugin of this name, if it is not there; else ""."""
    module = _read_plugins(group).get(name, "").partition(":")[0]
    return "" if not module or has_module(module) else "/".join(module.split(".")[:3])


def describe_left_out(*groups: str) -> str:
    """A remark on applications whose plugins of these groups are not there, for a fix; or ""."""
    found = {find_left_out(group, name) for group in groups for name in _read_plugins(group)}
    folders = ", ".join(sorted(found - {""}))
    return f"; not there, with what they have: {folders}" if folders else ""


def has_module(name: str) -> bool:
    """Whether there is a module of this dotted name; it is not imported, its packages are."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _read_plugins(group: str) -> Mapping[str, str]:
    try:
        return importlib.import_module(APPLICATIONS).PLUGINS.get(group, {})
    except ModuleNotFoundError:  # a library without its applications
        return {}


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def on_hub(path: object, kind: str = "") -> str:
    """The fix for a missing path that looks like a name on the Hugging Face hub; else "".

    `kind` is ``"dataset"`` of data, and empty of a model.
    """
    name = str(path)
    if not _HUB_NAME.fullmatch(name):
        return ""
    option = f" --repo-type {kind}" if kind else ""
    return (
        f"functron downloads nothing: if this is a name on the Hugging Face hub, get its files "
        f"first (hf download {name}{option} --local-dir FOLDER), and give that folder"
    )


_STORES = "s3a?|gc?s|az|abfss?|wasbs?|hdfs|https?|ftp|oci|r2|oss|cosn?|dbfs"
_REMOTE = re.compile(rf"(?<![\w+.-])(?:([a-z][a-z0-9+.-]+):/|({_STORES}):)/", re.IGNORECASE)
_REMOTE_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)  # as pathlib leaves of "s3://"


def remote_problem(name: str, value: object) -> Problem | None:
    """The problem of a path that is no local one, such as s3://bucket; None: it is local.

    Args:
        name: of the argument or option.
        value: a path, or text with some in it, as a blend of data has.
    """
    text = str(value)
    path = isinstance(value, PurePath) and not value.is_absolute()
    found = _REMOTE_PATH.match(text) if path else _REMOTE.search(text)
    if found is None:
        return None
    scheme = (found[1] or found[2]).lower()
    fix = "write its path without file://" if scheme == "file" else (
        "name a folder of this machine: a mounted one (s3fs, gcsfuse), or copy to or from it"
    )  # fmt: skip
    wanted = "a path of this machine: nothing is stored by name elsewhere"
    return Problem(name, repr(text), wanted, fix)


def local_path(value: str | PurePath, name: str = "path") -> Path:
    """`value` as a path; ValueError where it names a place elsewhere, such as s3://bucket/run.

    A file system would make a local folder called "s3:" of that.
    """
    problem = remote_problem(name, value)
    raise_problems("not a path of this machine", [problem] if problem else [])
    return Path(value)


# --- whose code an error comes out of

_LIBRARIES = frozenset(("functron", "torch", "optree", "jaxtyping", "beartype", "runpy"))
_GENERATED = ("<@beartype", "<eval_with_key>")

_full: contextvars.ContextVar[bool] = contextvars.ContextVar("functron_tracebacks", default=False)

F = TypeVar("F", bound=Callable)


def in_library(frame: FrameType) -> bool:
    """Whether a frame runs code of functron or of the libraries under it, not of the user."""
    return is_library(frame.f_globals) or frame.f_code.co_filename.startswith(_GENERATED)


def is_library(names: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of functron or of the libraries under it."""
    return _is_library_name(str(names.get("__name__", "")))


@functools.cache
def _is_library_name(module: str) -> bool:
    """Asked for each frame of each operation that is traced; there are few modules."""
    return module.partition(".")[0] in _LIBRARIES


def full_tracebacks(full: bool = True) -> AbstractContextManager[None]:
    """Show the frames of functron and torch too in the tracebacks of errors in this with block.

    Without it they have the user's frames alone, down to the line that the error is about. With
    ``full=False`` they are left out again, in a block within such a block.
    """
    return set_during(_full, full)


_UNCOMPILED = (
    "functron looks up the mesh's axes and other context while it runs, which torch.compile would "
    "keep from its first call; fix: functron.jit(f) in place of torch.compile(f)"
)


def public(fn: F) -> F:
    """`fn` as users call it: its arguments are checked, its errors leave the library's frames out.

    Checked against the annotations, before `fn` runs: numbers, functions, and the nouns of functron
    (a `Mesh`, `Rules`, an optimizer, a config); trees and tensors are for `fn` itself to check.
    The exception stays the same object; `full_tracebacks` keeps its frames.

    An argument whose class has a method ``__functron_call__(fn, args, kwargs)`` makes the call in
    place of `fn`, as ``__array_function__`` does for NumPy; a mesh in other processes is one.

    Raises:
        TypeError: (when called) arguments of another kind; all offenders are listed.
    """
    wanted: tuple[_Wanted, ...] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal wanted
        try:
            for given in (*args, *kwargs.values()):
                if hasattr(type(given), "__functron_call__"):
                    if _is_public(vars(type(given)).get(fn.__name__), fn):  # a method of its own
                        break
                    return given.__functron_call__(_find_public(fn), args, kwargs)
            if wanted is None:  # later than where annotations are written, which may look ahead
                wanted = _checkable_arguments(fn)
            if wanted and (found := [p for one in wanted for p in one.problems(args, kwargs)]):
                raise_problems(f"{fn.__name__} cannot use these arguments", found, TypeError)
            return fn(*args, **kwargs)
        except Exception as error:
            told = _of_dataclass(fn.__name__, error) or of_orphan(fn.__name__, error)
            if not _full.get():
                _trim(told or error)
            if told is not None:
                raise told from None
            raise  # without an argument, so that this frame is not added again

    made: Any = call
    # which torch.compile looks for, and the message that it shows
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, _UNCOMPILED
    return made


def _is_public(value: object, fn: Callable) -> bool:
    """Whether `value` is what `public` has made of `fn`."""
    return getattr(value, "__wrapped__", None) is fn


def _find_public(fn: Callable) -> Callable:
    """`fn` as users call it: it cannot refer to that itself, in a circle that keeps its values."""
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found if _is_public(found, fn) else public(fn)


def dataclass_fix(value: object) -> str:
    """How to make a tree of a dataclass with tensors in it; "" for anything else."""
    cls = type(value)
    if not dataclasses.is_dataclass(cls) or cls.__module__.partition(".")[0] == "functron":
        return ""
    if not any(_has_tensor(getattr(value, f.name, None)) for f in dataclasses.fields(cls)):
        return ""
    return (
        f"{cls.__name__} is a dataclass, which trees take for one leaf: call "
        f"functron.tree.register_dataclass({cls.__name__}) once, or make it a typing.NamedTuple"
    )


def tensor_problem(path: str, leaf: object) -> Problem:
    """The problem of a leaf that should be a tensor and is none."""
    fix = dataclass_fix(leaf) or "use torch.tensor"
    return Problem(path, type(leaf).__name__, "a tensor", fix)


def _has_tensor(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return hasattr(value, "dtype") and hasattr(value, "untyped_storage")


def _of_dataclass(name: str, error: Exception) -> TypeError | None:
    """The meaning of an attribute that a dataclass lacks, where a tensor was wanted; else None."""
    value = error.obj if isinstance(error, AttributeError) else None
    fix = "" if value is None else dataclass_fix(value)
    got = f"{name}: got a {type(value).__name__}; wanted a tensor, or a tree of them; fix: {fix}"
    return TypeError(got) if fix else None


ORPHAN_PATTERN = r"may have escaped from inside a function|INTERNAL ASSERT FAILED.*functorch"
"""Of torch's messages for a tensor of a vmap that is not running any more."""

ORPHAN = (
    "uses a tensor of a simulated rank after the shard_map that it belongs to returned; wanted "
    "a value of this program; it was probably kept in a list or an attribute; fix: return it from "
    "the mapped function, and pass the result as an argument"
)


def of_orphan(name: str, error: Exception) -> ValueError | None:
    """The meaning of torch's error for a tensor kept from a simulated rank; else None."""
    if isinstance(error, RuntimeError) and re.search(ORPHAN_PATTERN, str(error)):
        return None if is_of_interrupt(error) else ValueError(f"{name} {ORPHAN}")
    return None


def is_of_interrupt(error: BaseException) -> bool:
    """Whether an error was raised while a KeyboardInterrupt was handled, whose effect it is."""
    return any(isinstance(each, KeyboardInterrupt) for each in contexts_of(error))


def contexts_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those in whose handling it was raised."""
    while error is not None:
        yield error
        error = None if error.__suppress_context__ else error.__context__


def made_public(value: Any) -> Any:
    """The function that `public` made `value` of; `value` itself where it did not."""
    is_public = getattr(value, "__code__", None) is _PUBLIC
    return value.__wrapped__ if is_public else value


_PUBLIC = public(lambda: None).__code__

_NOTE = (
    "(frames of functron and torch are left out; with functron.debug.full_tracebacks(): shows them)"
)


def _trim(error: BaseException) -> None:
    """Leave the user's frames in the traceback of `error` and of what it came from."""
    told = _is_told(error)
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = _users(found.__traceback__)
        before = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if before is not None and _users(before.__traceback__) is None:
            # it was raised inside the library: the error raised from it explains more
            found.__cause__, found.__context__, found.__suppress_context__ = None, before, True
        found = before
    if not told and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _is_told(error: BaseException) -> bool:
    """Whether `error` needs no note: it is the user's own, or one that functron has words for."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not in_library(last.tb_frame):
        return True
    own = str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "functron"
    return own and isinstance(error, (ValueError, TypeError))


def _users(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        if not in_library(traceback.tb_frame):
            frames.append(traceback)
        traceback = traceback.tb_next
    kept = None
    for at in reversed(frames):
        kept = TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return kept


# --- kinds of arguments


@dataclass(frozen=True)
class _Wanted:
    """The values that may be passed as one argument.

    Attributes:
        name: of the argument.
        position: where it stands; None: it has a name only.
        several: whether all from there on are of the same kind.
        kinds: classes, of which it is an instance.
        number, function, none: whether it may be that.
    """

    name: str
    position: int | None
    several: bool
    kinds: tuple[type, ...]
    number: bool
    function: bool
    none: bool

    def problems(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Problem]:
        """The problems of the values that were passed for it."""
        given: tuple = (kwargs[self.name],) if self.name in kwargs else ()
        if self.position is not None and self.position < len(args):
            given = args[self.position :] if self.several else (args[self.position],)
        for value in given:
            if not self._fits(value):
                yield Problem(self.name, _show_value(value), self._words(), self._fix(value))

    def _fits(self, value: Any) -> bool:
        if value is None:
            return self.none
        if isinstance(value, self.kinds) or (self.function and callable(value)):
            return True
        # tensors and numbers of all libraries; a string is never one
        return self.number and any(hasattr(type(value), name) for name in _NUMBERS)

    def _words(self) -> str:
        words = [_article(_PUBLIC_NAMES.get(kind.__name__, kind.__name__)) for kind in self.kinds]
        words += ["a number"] * self.number + ["a function"] * self.function
        return " or ".join([*words, *(["None"] * self.none)])

    def _fix(self, value: Any) -> str:
        names = {kind.__name__ for kind in self.kinds}
        if "Mesh" in names and isinstance(value, (dict, str)):
            made = f"parse({value!r})" if isinstance(value, str) else f"Mesh(**{value!r})"
            return f"ft.Mesh.{made}" if isinstance(value, str) else f"ft.{made}"
        if "Rules" in names and isinstance(value, dict):
            return "ft.Rules({...}) of the same mapping"
        if "GradientTransformation" in names:
            module = getattr(value, "__module__", type(value).__module__)
            if str(module).startswith("torch.optim"):
                return (
                    "optim.adamw(1e-3) of functron.optim, or another there: torch's optimizers own "
                    "the parameters that they update, these are functions of them"
                )
            return "call it, as in optim.adamw(1e-3)" if callable(value) else ""
        if "RematPolicy" in names:
            return "one of functron.policies: nothing, everything, dots, names(...), offload(...)"
        config = next((name for name in sorted(names) if name.endswith("Config")), "")
        if config and isinstance(value, str):
            return f"PRESETS[{value!r}] of the model's module, or {config}(...)"
        if config and isinstance(value, dict):
            return f"{config}(**config)"
        return f"write {value}, without quotes" if self.number and is_number(value) else ""


_NUMBERS = ("__float__", "__index__")
_PUBLIC_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "Mesh": "functron.Mesh",
        "BoundMesh": "functron.BoundMesh",
        "Rules": "functron.Rules",
        "P": "functron.P",
        "GradientTransformation": "optim.GradientTransformation",
        "Gather": "functron.Gather",
        "Schedule": "pipeline.Schedule",
        "Partition": "pipeline.Partition",
    }
)


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeio' else 'a'} {noun}"


def _show_value(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = repr(value), type(value).__name__
    short = len(text) <= _SHOWN and not text.startswith("<") and "\n" not in text
    return f"{text} ({kind})" if short else getattr(value, "__name__", _article(kind))


_SHOWN = 60


def is_number(text: Any) -> bool:
    """Whether a text is written as a number."""
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return isinstance(text, str)


def _checkable_arguments(fn: Callable) -> tuple[_Wanted, ...]:
    """The arguments of `fn` whose annotations can be checked; of what is not of Python none."""
    plain = inspect.unwrap(fn)
    if not (hasattr(plain, "__code__") and plain.__annotations__):
        return ()
    names = getattr(plain, "__globals__", {})
    found = []
    for position, parameter in enumerate(inspect.signature(plain).parameters.values()):
        kind = parameter.kind
        options = _options(parameter.annotation, names)
        if kind is parameter.VAR_KEYWORD or not options:
            continue
        classes = tuple(
            x for x in options if isinstance(x, type) and x.__module__.startswith("functron.")
        )
        functions = [x for x in options if x is Callable or typing.get_origin(x) is Callable]
        numbers = [x for x in options if x in (int, float)]
        nones = [x for x in options if x is types.NoneType]
        if len(classes) + len(functions) + len(numbers) + len(nones) < len(options):
            continue  # something else may be passed too, which only `fn` can tell
        none = bool(nones) or parameter.default is None
        several = kind is parameter.VAR_POSITIONAL
        place = None if kind is parameter.KEYWORD_ONLY else position
        found.append(
            _Wanted(parameter.name, place, several, classes, bool(numbers), bool(functions), none)
        )
    return tuple(found)


def _options(annotation: Any, names: dict[str, Any]) -> tuple:
    """The alternatives of an annotation; () where it cannot be evaluated or says nothing."""
    if annotation is inspect.Parameter.empty:
        return ()
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, names)
        except (NameError, TypeError, AttributeError):
            return ()
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)
