"""Compiling kernels with NVRTC, CUDA's compiler as a library: it needs no GPU, driver or nvcc.

``cuda.bindings`` is imported in functions only, as installations for CPUs lack it.

Compiled kernels are cached on disk. A file has a hash of its content, a line of JSON, then the
cubin; its name has a hash of everything that the cubin depends on. Files are renamed into place and
verified when read, so ranks, jobs and machines may share a folder, or take it along, and damaged
files are compiled again. Of the processes that want a kernel one compiles it, and the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from filelock import FileLock

from functron.core.errors import nearest

FOLDER = Path(__file__).resolve().parent / "kernels"
"""Where functron's own sources are."""

Defines = Mapping[str, str]
"""Macros and their values."""

_BUILD = re.compile(r"^//\s*build:\s*(\w+)\s*=\s*(.+?)\s*$", re.MULTILINE)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
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


class SourceText(NamedTuple):
    """A source that is in no file.

    Attributes:
        name: what it is kept by.
        text: it may include functron's headers.
    """

    name: str
    text: str


def _lines(text: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in _BUILD.finditer(text)]


def label(defines: Defines) -> str:
    """Macros in one line: ``"T=float GATE=SILU"``."""
    return " ".join(f"{name}={value}" for name, value in defines.items())


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """The names of all sources: those of the files without ``.cu``, in order."""
    return tuple(sorted(path.stem for path in folder.glob("*.cu")))


def read(name: str | SourceText, folder: Path = FOLDER) -> KernelSource:
    """The source of this name, or of this text.

    Raises:
        ValueError: there is none, or it includes a file of functron's that does not exist.
    """
    if isinstance(name, SourceText):
        name, text = name
        path = folder / f"{name}.cu"
    elif not (path := folder / f"{name}.cu").is_file():
        known = names(folder)
        fix = nearest(name, known) if known else "install functron again: its wheel carries them"
        raise ValueError(f"source: got {name!r}, which is not in {folder}; {fix}")
    else:
        text = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    system = dict.fromkeys(_add_headers(path, text, headers))
    return KernelSource(name, path, text, MappingProxyType(headers), tuple(system))


def _add_headers(path: Path, text: str, headers: dict[str, str]) -> Iterable[str]:
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
            yield from _add_headers(header, headers[own], headers)


def variants_of(
    sources: Iterable[KernelSource], values: Mapping[str, Collection[str]]
) -> list[tuple[KernelSource, Defines]]:
    """The variants of sources whose macros have one of these values; a macro not named has any."""
    return [
        (source, defines)
        for source in sources
        for defines in source.variants
        if all(value in values.get(name, (value,)) for name, value in defines.items())
    ]


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


def check_defines(source: KernelSource, defines: Defines) -> None:
    """Refuse macros that the source's ``// build:`` lines do not declare.

    Otherwise other variants would run than are compiled ahead of time, and tested.

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


INSTALL = "pip install 'functron[kernels]'"
ARCHS = ("sm_80", "sm_90a", "sm_100a")
"""The architectures that kernels are proven for: Ampere, Hopper and Blackwell of data centres."""

OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")
"""The options of every compilation; lines are for profilers, and cost nothing."""

_OLDEST = 80
"""bfloat16 arithmetic came with it."""


@dataclass(frozen=True)
class Resources:
    """The resources of a multiprocessor that one kernel takes.

    Attributes:
        kernel: its name.
        registers: per thread.
        stack: bytes per thread of local memory that arrays take.
        spills: bytes per thread stored to and loaded from local memory for want of registers.
        shared: bytes per block that the kernel declares itself.
    """

    kernel: str
    registers: int
    stack: int
    spills: int
    shared: int


@dataclass(frozen=True)
class CompiledKernel:
    """A source compiled for one architecture.

    Attributes:
        cubin: what a GPU loads.
        resources: of each kernel, by name.
        warnings: what the compiler warned of, one line each.
    """

    cubin: bytes
    resources: tuple[Resources, ...]
    warnings: tuple[str, ...] = ()


class CompileError(RuntimeError):
    """A source that does not compile: the message is the compiler's, with files and lines."""


def compile_source(source: KernelSource, defines: Defines, arch: str) -> CompiledKernel:
    """Compile for `arch`, such as ``"sm_90a"``. Threads may do so at the same time.

    Raises:
        ValueError: NVRTC or CUDA's headers are missing; an architecture that it does not know or
            that kernels do not support; macros that the source does not declare.
        CompileError: what the source is told of.
    """
    check_arch(arch)
    check_defines(source, defines)
    text = source.text.encode()
    library = _library()
    headers = [text.encode() for text in source.headers.values()]
    included = [name.encode() for name in source.headers]
    path = str(source.path).encode()
    create = library.nvrtcCreateProgram
    program = check_result(create(text, path, len(headers), headers, included))
    try:
        flags = [flag.encode() for flag in options(defines, arch)]
        (status,) = library.nvrtcCompileProgram(program, len(flags), flags)
        log = _text(library, program)
        if int(status):
            raise CompileError(f"{source.name} ({label(defines)}) for {arch}:\n{log}")
        cubin = bytearray(check_result(library.nvrtcGetCUBINSize(program)))
        check_result(library.nvrtcGetCUBIN(program, cubin))
    finally:
        library.nvrtcDestroyProgram(program)
    warned = tuple(line for line in log.splitlines() if ": warning" in line)
    return CompiledKernel(bytes(cubin), resources(log), warned)


def options(defines: Defines, arch: str) -> list[str]:
    """The compiler's options."""
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    return [f"--gpu-architecture={arch}", *OPTIONS, f"-I{include_folder()}", *macros]


def _text(library: Any, program: Any) -> str:
    log = bytearray(check_result(library.nvrtcGetProgramLogSize(program)))
    check_result(library.nvrtcGetProgramLog(program, log))
    return bytes(log).rstrip(b"\0").decode(errors="replace").strip()


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "stores": re.compile(r"(\d+) bytes spill stores"),
    "loads": re.compile(r"(\d+) bytes spill loads"),
    "shared": re.compile(r"(\d+) bytes smem"),
}


def resources(log: str) -> tuple[Resources, ...]:
    """The resources of each kernel, by name, from the output of ``--ptxas-options=-v``."""
    _, *parts = _ENTRY.split(log)
    found = []
    for name, report in zip(parts[::2], parts[1::2], strict=True):
        matches = {key: pattern.search(report) for key, pattern in _NUMBERS.items()}
        n = {key: int(match[1]) if match else 0 for key, match in matches.items()}
        spills = n["stores"] + n["loads"]
        found.append(Resources(name, n["registers"], n["stack"], spills, n["shared"]))
    return tuple(sorted(found, key=lambda one: one.kernel))


def check_arch(arch: str) -> None:
    """Refuse what kernels cannot be compiled for.

    Raises:
        ValueError: no architecture, one before sm_80, or one that this NVRTC does not know.
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"arch: got {arch!r}; wanted a name such as {', '.join(ARCHS)}")
    number = int(match[1])
    if number < _OLDEST:
        raise ValueError(
            f"arch: got {arch}; wanted sm_{_OLDEST} (A100) or newer; "
            'fix: pass kernels=functron.ops.use("reference") on such a GPU'
        )
    if number not in supported():
        known = ", ".join(f"sm_{n}" for n in supported() if n >= _OLDEST)
        raise ValueError(
            f"arch: got {arch}, which NVRTC {version()} does not know; wanted one of {known}; "
            'fix: a newer nvidia-cuda-nvrtc, or pass kernels=functron.ops.use("reference")'
        )


@functools.cache
def supported() -> tuple[int, ...]:
    """The architectures that this NVRTC compiles for: 80, 90, ..."""
    return tuple(check_result(_library().nvrtcGetSupportedArchs()))


@functools.cache
def version() -> str:
    """NVRTC's version: ``"13.0"``."""
    return "{}.{}".format(*check_result(_library().nvrtcVersion()))


@functools.cache
def release() -> str:
    """Its version and, as that is the same for patch releases, the size of its library."""
    return f"{version()}, {library_path().stat().st_size} bytes"


def missing() -> str | None:
    """Why nothing can be compiled here, and what to do about it; None where it can."""
    try:
        _library()
        include_folder()
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def library_path() -> Path:
    """The file of libnvrtc, which is loaded with this.

    Raises:
        ValueError: it is missing, or the package ``cuda-bindings`` is.
    """
    if not _found("cuda.bindings") or not _found("cuda.pathfinder"):
        raise ValueError(
            f"NVRTC: got a Python without cuda-bindings; wanted it to compile kernels; "
            f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
        )
    from cuda import pathfinder

    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:  # its errors differ between versions
        raise ValueError(
            f"NVRTC: got no libnvrtc ({type(error).__name__}); wanted it to compile kernels; "
            f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
        ) from error
    found = Path(str(path)).resolve()
    # libnvrtc looks for its builtins by name when it first compiles, and not beside itself
    for builtins in found.parent.glob("libnvrtc-builtins.so.*"):
        with contextlib.suppress(OSError):  # then its own search may find them
            ctypes.CDLL(str(builtins))
    return found


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


@functools.cache
def _library() -> Any:
    library_path()
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def include_folder() -> Path:
    """The folder of CUDA's headers: beside libnvrtc, in a wheel or a toolkit, or else a toolkit's.

    Raises:
        ValueError: there is none with ``cuda_bf16.h`` and ``cuda_fp8.h``.
    """
    beside = library_path().parent.parent / "include"
    if _has_headers(beside):
        return beside
    from cuda import pathfinder

    # may start a process, and is not in every version
    find = getattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    found = find("cudart")
    if found and _has_headers(Path(found)):
        return Path(found)
    raise ValueError(
        f"CUDA's headers: got none in {beside}; wanted cuda_bf16.h and cuda_fp8.h; "
        f'fix: {INSTALL}, or pass kernels=functron.ops.use("reference")'
    )


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("cuda_bf16.h", "cuda_fp8.h"))


def check_result(result: tuple, says: str = "NVRTC:") -> Any:
    """The value, or values, of a call of ``cuda.bindings``; RuntimeError unless it succeeded."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"{says} {status.name}")
    return values[0] if len(values) == 1 else values


SUFFIX = ".cubin+json"


def default_folder() -> Path | None:
    """``.cache/functron/cubins`` of the user's home; None for users without one."""
    try:
        return Path.home() / ".cache" / "functron" / "cubins"
    except RuntimeError:
        return None


def cubin(
    source: KernelSource, defines: Defines, arch: str, folder: Path | None = None
) -> CompiledKernel:
    """The source compiled for `arch`: from `folder`, or compiled now and kept there.

    A folder that cannot be written to (a full disk, a home that is read-only) costs only the time
    to compile again.

    Args:
        source: what to compile.
        defines: the macros to compile it with.
        arch: such as ``"sm_90a"``.
        folder: of the files; None: `default_folder`.

    Raises:
        ValueError, CompileError: as `compile_source`.
    """
    folder = folder or default_folder()
    if folder is None:
        return compile_source(source, defines, arch)
    path = path_of(source, defines, arch, folder)
    if (found := _read(path)) is not None:
        return found
    with _alone(path):
        if (found := _read(path)) is None:
            found = compile_source(source, defines, arch)
            _write(path, found)
        return found


def path_of(source: KernelSource, defines: Defines, arch: str, folder: Path) -> Path:
    """The file that `cubin` keeps a variant in."""
    return folder / f"{source.name}-{arch}-{key(source, defines, arch)}{SUFFIX}"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One thread of one process at a time is in a with block about this file.

    The operating system lets go for a process that was killed. A folder that cannot be written to
    has no locks: all compile then.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.with_name(f".{path.name}.lock")))
        yield


@contextlib.contextmanager
def compile_in_background(
    variants: Iterable[tuple[KernelSource, Defines]], arch: str, folder: Path | None = None
) -> Iterator[None]:
    """Compile what a folder lacks in threads, beside this with block; at its end all is there.

    What does not compile says so where it is launched. A user without a folder has nothing to gain.
    """
    folder = folder or default_folder()
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        for source, defines in variants if folder is not None else ():
            pool.submit(cubin, source, defines, arch, folder)
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def key(source: KernelSource, defines: Defines, arch: str) -> str:
    """A hash over all that decides a cubin: sources, headers, macros, options, NVRTC."""
    headers = digest_of_headers(include_folder(), source.system_headers)
    parts = (
        source.text,
        sorted(source.headers.items()),
        headers,
        sorted(defines.items()),
        arch,
        OPTIONS,
        release(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> CompiledKernel | None:
    """The content that `_write` wrote; None where there is nothing, or something else."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != _digest(content):
            return None
        line, _, cubin = content.partition(b"\n")
        about = json.loads(line)
        used = tuple(Resources(**one) for one in about["resources"])
        return CompiledKernel(cubin, used, tuple(about["warnings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, compiled: CompiledKernel) -> None:
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
