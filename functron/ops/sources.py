"""The sources of kernels: where they are, which variants they have, what they include."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from functron.errors import nearest

FOLDER = Path(__file__).resolve().parent.parent / "kernels"
"""Where functron's own sources are."""

Defines = Mapping[str, str]
"""Macros and their values."""

_BUILD = re.compile(r"^//\s*build:\s*(\w+)\s*=\s*(.+?)\s*$", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A file of kernels, with what it includes.

    Attributes:
        name: the file's, without its suffix.
        path: the file.
        text: what is in it.
        headers: those of functron that it includes, directly or not, by the names that it
            includes them by.
        system_headers: the names of others that these files include.
    """

    name: str
    path: Path
    text: str
    headers: Mapping[str, str]
    system_headers: tuple[str, ...]

    @property
    def macros(self) -> Mapping[str, tuple[str, ...]]:
        """The macros that it is compiled with, each with its values, from its ``// build:`` lines.

        ``// build: T = float, __half`` gives ``{"T": ("float", "__half")}``.
        """
        found = {name: tuple(re.split(r"\s*,\s*", values)) for name, values in _lines(self.text)}
        return MappingProxyType(found)

    @property
    def variants(self) -> tuple[Defines, ...]:
        """Everything that it is compiled with: the product of its macros' values."""
        macros = self.macros
        rows = itertools.product(*macros.values())
        return tuple(MappingProxyType(dict(zip(macros, row, strict=True))) for row in rows)


def _lines(text: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in _BUILD.finditer(text)]


def label(defines: Defines) -> str:
    """Macros in one line: ``"T=float GATE=SILU"``."""
    return " ".join(f"{name}={value}" for name, value in defines.items())


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """The names of all sources: those of the files without ``.cu``, in order."""
    return tuple(sorted(path.stem for path in folder.glob("*.cu")))


def read(name: str, folder: Path = FOLDER) -> Source:
    """The source of this name.

    Raises:
        ValueError: there is none, or it includes a file of functron's that does not exist.
    """
    path = folder / f"{name}.cu"
    if not path.is_file():
        known = names(folder)
        fix = nearest(name, known) if known else "install functron again: its wheel carries them"
        raise ValueError(f"source: got {name!r}, which is not in {folder}; {fix}")
    text = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    system = dict.fromkeys(_included(path, text, headers))
    return Source(name, path, text, MappingProxyType(headers), tuple(system))


def _included(path: Path, text: str, headers: dict[str, str]) -> Iterable[str]:
    """Adds the headers that a file includes, and gives the names of those of others."""
    for own, system in _INCLUDE.findall(text):
        if system:
            yield system
        elif own not in headers:
            header = path.parent / own
            if not header.is_file():
                line = text[: text.index(f'"{own}"')].count("\n") + 1
                raise ValueError(
                    f'{path}, line {line}: got #include "{own}", which is not in {path.parent}; '
                    "wanted a header there; fix: correct the name, or write <...> for CUDA's own"
                )
            headers[own] = header.read_text(encoding="utf-8")
            yield from _included(header, headers[own], headers)


@functools.cache
def digest_of_headers(folder: Path, names: tuple[str, ...]) -> str:
    """A hash over CUDA's headers of these names in `folder`, and all that they include there.

    Their content is what a cubin depends on: their releases change it without changing a version
    that a program could read.
    """
    found: dict[str, str] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name not in found and (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            found[name] = hashlib.sha256(text.encode()).hexdigest()
            wanted += [own or system for own, system in _INCLUDE.findall(text)]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def check_defines(source: Source, defines: Defines) -> None:
    """Refuse macros that the source's ``// build:`` lines do not declare.

    Else what is compiled ahead of time, and tested, would not be what runs.

    Raises:
        ValueError: a macro or a value is missing or unknown.
    """
    macros = source.macros
    if set(defines) != set(macros):
        raise ValueError(
            f"defines of {source.name}: got {sorted(defines)}; wanted {sorted(macros)}, as its "
            f"`// build:` lines say; fix: change the call, or those lines of {source.path}"
        )
    for name, value in defines.items():
        if value not in macros[name]:
            raise ValueError(
                f"defines of {source.name}: got {name}={value}; wanted one of "
                f"{', '.join(macros[name])}; fix: change the call, or the line `// build: {name}` "
                f"of {source.path}"
            )
