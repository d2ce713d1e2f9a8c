"""Compiles CUDA kernels with g++ for the emulator, see emulator.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from functron.ops import nvrtc

HERE = Path(__file__).parent
KERNELS = nvrtc.FOLDER
COMPILER = "g++"

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+__launch_bounds__\(((?:[^()]|\([^()]*\))*)\)\s*(\w+)\s*\('
)
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*|alignas\(\d+\)\s*)?([\w:<>\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_SANITIZE = "alignment,null,bounds,signed-integer-overflow,integer-divide-by-zero,shift,return"
_OPTIONS = (
    "-std=c++20", "-O1", "-fPIC", "-w", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE", f"-fsanitize={_SANITIZE}", f"-fno-sanitize-recover={_SANITIZE}",
)  # fmt: skip
# what NVIDIA's headers include that wheels of the CUDA runtime lack; emulator.h defines their macros
_STUBS = {
    "crt/host_defines.h": "",
    "nv/target": "#pragma once\n"
    "#define NV_IF_ELSE_TARGET(target, then, otherwise) otherwise\n"
    "#define NV_IF_TARGET(target, ...)\n",
}


class Parameter(NamedTuple):
    """A parameter of a kernel, as its source says.

    Attributes:
        written: a pointer to what is not const.
        restrict: a pointer with ``__restrict__``.
    """

    written: bool
    restrict: bool


class Program(NamedTuple):
    """A compiled source.

    Attributes:
        library: of which emulator.h makes ``emulated_<kernel>``.
        kernels: the parameters of each.
    """

    library: ctypes.CDLL
    kernels: dict[str, tuple[Parameter, ...]]


def missing() -> str | None:
    """The part of the emulator that this machine lacks; None if nothing."""
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER}"
    if headers() is None:
        return "no headers of the CUDA runtime; pip install nvidia-cuda-runtime"
    return None


@functools.cache
def headers() -> Path | None:
    """The folder of cuda_bf16.h: that of a wheel, or of an installed toolkit."""
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(Path(root).glob("*/include"), reverse=True)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        found += [Path(home) / "include"] if home else []
    return next((path for path in found if (path / "cuda_bf16.h").exists()), None)


@functools.cache
def load(
    source: str,
    defines: tuple[tuple[str, str], ...],
    edits: tuple[tuple[str, str], ...] = (),
    folder: Path = KERNELS,
) -> Program:
    """The compiled ``<source>.cu``; skips the test where nothing can compile it.

    Raises:
        ValueError: macros that it does not declare, or an edit that does not apply.
    """
    nvrtc.check_defines(nvrtc.read(source, folder), dict(defines))  # as the launcher does
    lack = missing()
    if lack:
        pytest.skip(f"emulator: {lack}")
    text = _expanded(folder / f"{source}.cu", set())
    for old, new in edits:
        if old not in text:
            raise ValueError(f"edit: {source}.cu has no {old!r}")
        text = text.replace(old, new)
    found = list(_KERNEL.finditer(text))
    kernels = {match[2]: _parameters(text, match.end()) for match in found}
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic);", text)
    lines = [f"#define {name} {value}" for name, value in defines]
    # unnamed: g++ puts shared variables of inline functions and of others into one section only if
    # all of them are local to the file
    lines += ["namespace {", text, "}"]
    lines += [
        f"EMULATED_KERNEL({name}, {bound})" for bound, name in (match.groups() for match in found)
    ]
    return Program(ctypes.CDLL(str(_compiled(source, "\n".join(lines)))), kernels)


def _parameters(text: str, start: int) -> tuple[Parameter, ...]:
    """Of the kernel whose parameters start there."""
    listed = text[start : text.index(")", start)].split(",")
    return tuple(
        Parameter("*" in one and not re.match(r"\s*const\b", one), "__restrict__" in one)
        for one in listed
        if one.strip()
    )


def _expanded(path: Path, seen: set[Path]) -> str:
    """The source with those of the project's headers that it includes."""
    if path in seen:
        return ""
    seen.add(path)
    text = re.sub(r"#\s*pragma\s+once", "", path.read_text())

    def included(match: re.Match) -> str:
        line = text.count("\n", 0, match.start()) + 2
        inner = path.parent / match[1]
        return f'{_expanded(inner, seen)}\n#line {line} "{path}"' if inner.exists() else match[0]

    return f'#line 1 "{path}"\n' + _LOCAL_INCLUDE.sub(included, text)


def _compiled(name: str, text: str) -> Path:
    """The shared library of a program, from the cache or compiled; by one process of several."""
    folder = _prepared()
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    with FileLock(f"{library}.lock"), tempfile.TemporaryDirectory(dir=folder) as work:
        if not library.exists():
            program, compiled = Path(work) / f"{name}.o", Path(work) / f"{name}.so"
            header = ["-include", str(folder / "emulator.h")]
            _run([*_options(folder), *header, "-x", "c++", "-c", "-", "-o", str(program)], text)
            # linked apart from -fsanitize: emulator.h has what it calls
            _run(["-shared", str(program), "-o", str(compiled)], "")
            os.replace(compiled, library)
    return library


@functools.cache
def _prepared() -> Path:
    """The folder of this version's artefacts: with stubs, and emulator.h precompiled."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    about = [(HERE / "emulator.h").read_text(), repr(_OPTIONS), repr(_STUBS), str(headers())]
    key = hashlib.sha256("\n".join(about).encode() + version + _processor()).hexdigest()[:16]
    cache = Path(tempfile.gettempdir()) / f"functron-emulator-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / key
    with FileLock(cache / f"{key}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _prepare(Path(work) / key, about[0])
                os.replace(Path(work) / key, folder)
    return folder


def _prepare(folder: Path, text: str) -> None:
    for stub, content in _STUBS.items():
        (folder / stub).parent.mkdir(parents=True, exist_ok=True)
        (folder / stub).write_text(content)
    header = folder / "emulator.h"
    header.write_text(text)
    _run([*_options(folder), "-x", "c++-header", str(header), "-o", f"{header}.gch"], "")


def _options(folder: Path) -> list[str]:
    return [*_OPTIONS, *_poisoned_locals(), f"-I{folder}", "-isystem", str(headers())]


@functools.cache
def _poisoned_locals() -> tuple[str, ...]:
    """The flag that makes uninitialised variables -1e37 (integers: about -2^24); g++ has it from 12."""
    option = "-ftrivial-auto-var-init=pattern"
    asked = [COMPILER, option, "-E", "-x", "c++", "/dev/null"]
    known = subprocess.run(asked, capture_output=True).returncode == 0
    return (option,) if known else ()


def _processor() -> bytes:
    """The meaning of -march=native here."""
    asked = [COMPILER, "-march=native", "-Q", "--help=target"]
    return subprocess.run(asked, capture_output=True, check=True).stdout


def _run(options: list[str], text: str) -> None:
    done = subprocess.run([COMPILER, *options], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} cannot compile for the emulator:\n{done.stderr[:4000]}")
