"""``functron build``: compile our CUDA kernels ahead of time.

It needs no GPU. Jobs load the cached kernels of their architecture, instead of compiling those that
their steps launch before the first one. The folder can be taken to another machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.core.errors import local_path
from functron.core.tables import table
from functron.ops import nvrtc
from functron.ops.launch import arch_of
from functron.ops.nvrtc import CompiledKernel, CompileError, Defines, KernelSource, Resources

_HEADS = ("source", "variant", "arch", "kernel", "registers", "stack", "spills", "shared")
_SUMMARY = ("source", "arch", "variants", "compiled", "seconds", "MiB")


@dataclass(frozen=True)
class BuildOptions:
    """Compile kernels into the cache. The exit code is 1 if one fails, or uses local memory.

    Attributes:
        arch: architectures, such as sm_90a; by default this GPU's, or without one all that kernels
            are proven for.
        source: names of sources; empty: all.
        cache: folder of compiled kernels; by default .cache/functron/cubins in your home.
        jobs: number of parallel compilations; 0: one per processor.
        resources: show the registers and memory of each kernel.
    """

    arch: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    cache: Path | None = None
    jobs: int = 0
    resources: bool = False


@dataclass(frozen=True)
class Built:
    """One variant of a source, compiled for one architecture.

    Attributes:
        source: the source.
        defines: the variant.
        arch: the architecture.
        compiled: the result; None: it failed.
        failure: the compiler's message.
        seconds: of compiling; 0: it was there.
    """

    source: KernelSource
    defines: Defines
    arch: str
    compiled: CompiledKernel | None
    failure: str = ""
    seconds: float = 0.0

    @property
    def local(self) -> tuple[Resources, ...]:
        """The kernels that use local memory, which is slow: a stack or spilled registers."""
        used = self.compiled.resources if self.compiled else ()
        return tuple(one for one in used if one.stack or one.spills)


def build(
    chosen: Iterable[KernelSource],
    archs: Sequence[str] = nvrtc.ARCHS,
    folder: Path | None = None,
    jobs: int = 0,
) -> Iterator[Built]:
    """Compile every variant of the sources for every architecture, and give them in this order.

    Args:
        folder: of the cache; None: the default one.
        jobs: threads, which NVRTC allows; 0: one per processor.

    Raises:
        ValueError: NVRTC is missing, or an architecture is not supported.
    """
    if reason := nvrtc.missing():
        raise ValueError(reason)
    for arch in archs:
        nvrtc.check_arch(arch)

    kept = folder or nvrtc.default_folder()

    def one(job: tuple[KernelSource, Defines, str]) -> Built:
        there = kept is not None and nvrtc.path_of(*job, kept).is_file()
        begun = time.perf_counter()
        try:
            compiled = nvrtc.cubin(*job, folder)
        except CompileError as error:
            return Built(*job, None, str(error))
        return Built(*job, compiled, seconds=0.0 if there else time.perf_counter() - begun)

    jobs_to_do = [(s, defines, arch) for s in chosen for defines in s.variants for arch in archs]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        yield from pool.map(one, jobs_to_do)


def rows(built: Built) -> list[tuple[str, ...]]:
    """The lines of the table for one variant, a kernel each."""
    if built.compiled is None:
        return []
    variant = (built.source.name, nvrtc.label(built.defines), built.arch)
    return [
        (*variant, r.kernel, *map(str, (r.registers, r.stack, r.spills, r.shared)))
        for r in built.compiled.resources
    ]


def summarise(done: Iterable[Built]) -> list[tuple[str, ...]]:
    """The lines of the table of sources, one for each architecture."""
    lines = []
    by_source = sorted(done, key=lambda built: (built.source.name, built.arch))
    for (name, arch), group in groupby(by_source, lambda built: (built.source.name, built.arch)):
        some = list(group)
        cubins = [built.compiled.cubin for built in some if built.compiled]
        new = [built.seconds for built in some if built.seconds]
        counts = (str(len(some)), str(len(new)), f"{sum(new):.1f}")
        lines.append((name, arch, *counts, f"{sum(map(len, cubins)) / 2**20:.1f}"))
    return lines


def run(arguments: Sequence[str]) -> int:
    """Compile, print the tables and what is wrong; the exit code is 1 if anything is."""
    with mistakes():
        options = parse(BuildOptions, arguments, "build")
        local_path(options.cache or "", "cache")
    begun = time.perf_counter()
    with mistakes():
        chosen = [nvrtc.read(name) for name in options.source or nvrtc.names()]
        here = (arch_of(torch.device("cuda")),) if torch.cuda.is_available() else nvrtc.ARCHS
        done = list(build(chosen, options.arch or here, options.cache, options.jobs))
    if options.resources:
        print(table([_HEADS, *(line for built in done for line in rows(built))], left=4))
    print(table([_SUMMARY, *summarise(done)], left=2))
    problems = [built.failure for built in done if built.failure]
    for built in done:
        what = f"{built.source.name} ({nvrtc.label(built.defines)}) for {built.arch}"
        problems += [
            f"{what}: {one.kernel} uses local memory: {one.stack} bytes of stack, "
            f"{one.spills} of spills, per thread"
            for one in built.local
        ]
        for warning in built.compiled.warnings if built.compiled else ():
            print(f"{what}: {warning}", file=sys.stderr)
    folder = options.cache or nvrtc.default_folder()
    new = sum(built.seconds > 0 for built in done)
    took = f"{new} of {len(done)} compiled in {time.perf_counter() - begun:.1f} s"
    print(f"\n{took}, kept in {'no folder: this user has no home' if folder is None else folder}")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0
