"""Compiled kernels on disk, so that each is compiled once.

A file is a hash of the rest, a line of JSON, then the cubin; its name has a hash of everything that
the cubin depends on. Files appear whole (they are renamed into place) and are verified when they
are read, so ranks, jobs and machines may share a folder, and what is damaged is compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import uuid
from pathlib import Path

from functron.ops import nvrtc, sources
from functron.ops.nvrtc import Compiled, Resources
from functron.ops.sources import Defines, Source

SUFFIX = ".cubin+json"


def default_folder() -> Path | None:
    """``.cache/functron/cubins`` of the user's home; None for users without one."""
    try:
        return Path.home() / ".cache" / "functron" / "cubins"
    except RuntimeError:
        return None


def cubin(source: Source, defines: Defines, arch: str, folder: Path | None = None) -> Compiled:
    """The source compiled for `arch`: from `folder`, or compiled now and kept there.

    A folder that cannot be written to (a full disk, a home that is read-only) costs only the time
    to compile again.

    Args:
        source: what to compile.
        defines: the macros to compile it with.
        arch: such as ``"sm_90a"``.
        folder: of the files; None: `default_folder`.

    Raises:
        ValueError, CompileError: as `nvrtc.compile_source`.
    """
    nvrtc.check_arch(arch)
    sources.check_defines(source, defines)
    folder = folder or default_folder()
    if folder is None:
        return nvrtc.compile_source(source, defines, arch)
    path = folder / f"{source.name}-{arch}-{key(source, defines, arch)}{SUFFIX}"
    found = _read(path)
    if found is None:
        found = nvrtc.compile_source(source, defines, arch)
        _write(path, found)
    return found


def key(source: Source, defines: Defines, arch: str) -> str:
    """A hash over all that decides a cubin: sources, headers, macros, options, NVRTC."""
    headers = sources.digest_of_headers(nvrtc.include_folder(), source.system_headers)
    parts = (
        source.text,
        sorted(source.headers.items()),
        headers,
        sorted(defines.items()),
        arch,
        nvrtc.OPTIONS,
        nvrtc.release(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> Compiled | None:
    """What `_write` wrote; None where there is nothing, or something else."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != _digest(content):
            return None
        line, _, cubin = content.partition(b"\n")
        about = json.loads(line)
        used = tuple(Resources(**one) for one in about["resources"])
        return Compiled(cubin, used, tuple(about["warnings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, compiled: Compiled) -> None:
    about = dataclasses.asdict(compiled)
    cubin = about.pop("cubin")
    content = json.dumps(about).encode() + b"\n" + cubin
    # a name of its own for each writer; whose file is the last does not matter
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # it is a cache
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(_digest(content) + b"\n" + content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
