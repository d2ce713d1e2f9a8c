"""Compile all kernels ahead of time: ``python -m functron.cli.build``.

It needs no GPU. Jobs load the cached kernels of their architecture, instead of compiling them in
the first steps. The table shows the registers and memory of each kernel.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

from functron.cli.process import mistakes, run_guarded
from functron.core.chart import table
from functron.core.errors import local_path
from functron.ops import nvrtc
from functron.ops.nvrtc import CompiledKernel, CompileError, Defines, KernelSource, Resources

_HEADS = ("source", "variant", "arch", "kernel", "registers", "stack", "spills", "shared")


@dataclass(frozen=True)
class BuildOptions:
    """Compile kernels into the cache. The exit code is 1 if one fails, or uses local memory.

    Attributes:
        arch: architectures, such as sm_90a.
        source: names of sources; empty: all.
        cache: folder of compiled kernels; by default .cache/functron/cubins in your home.
        jobs: number of parallel compilations; 0: one per processor.
    """

    arch: tuple[str, ...] = nvrtc.ARCHS
    source: tuple[str, ...] = ()
    cache: Path | None = None
    jobs: int = 0


@dataclass(frozen=True)
class Built:
    """One variant of a source, compiled for one architecture.

    Attributes:
        source: the source.
        defines: the variant.
        arch: the architecture.
        compiled: the result; None: it failed.
        failure: the compiler's message.
    """

    source: KernelSource
    defines: Defines
    arch: str
    compiled: CompiledKernel | None
    failure: str = ""

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

    def one(job: tuple[KernelSource, Defines, str]) -> Built:
        try:
            return Built(*job, nvrtc.cubin(*job, folder))
        except CompileError as error:
            return Built(*job, None, str(error))

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


def run(arguments: Sequence[str]) -> int:
    """Compile, print the table and what is wrong; the exit code is 1 if anything is."""
    options = tyro.cli(BuildOptions, args=arguments, prog="python -m functron.cli.build")
    with mistakes():
        local_path(options.cache or "", "cache")
    begun = time.perf_counter()
    with mistakes():
        chosen = [nvrtc.read(name) for name in options.source or nvrtc.names()]
        done = list(build(chosen, options.arch, options.cache, options.jobs))
    print(table([_HEADS, *(line for built in done for line in rows(built))], left=4))
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
    print(f"\n{len(done)} cubins in {time.perf_counter() - begun:.1f} s, kept in {folder}")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: run(sys.argv[1:])))
