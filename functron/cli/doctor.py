"""``functron doctor``: the parts of this machine and installation, and the rates of a mesh."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import json
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.cuda import nccl

from functron import apps
from functron.cli.launch import device_type, join, launch, leave, started_problems
from functron.cli.options import parse
from functron.cli.process import Process, current, mistakes, outside
from functron.core.errors import raise_problems, refuse
from functron.core.settings import Need, Needs, always, never
from functron.ops import launch as kernels
from functron.ops import nvrtc
from functron.spmd import Mesh

if TYPE_CHECKING:
    from functron.apps.planner.measurements import Measurement

planner: Any = apps.find("planner")
"""Measures meshes; None: all else is looked for."""

State = Literal["ok", "missing", "broken"]
"""``"missing"`` is what not everybody needs; ``"broken"`` what nothing works without, or what is
there and does not work."""


@dataclass(frozen=True)
class DoctorOptions:
    """Show what this machine and this installation have, and what is missing; or, with --nproc or
    under torchrun, measure what the ranks of a mesh can do, before a run is begun on them.

    The exit code is 0 unless something that is needed is broken; of a mesh, unless a rank or a
    group of ranks is slower than the rest.

    Attributes:
        json: print it as JSON: a list of name, state, found and fix; of a mesh, what --out holds.
        mesh: axes and sizes, such as dp=2,tp=4, whose ranks and collectives are measured; empty:
            dp, of all processes.
        nproc: processes to start, one per rank of the mesh; 0: those of torchrun, or none.
        device: cpu, cuda, or auto: cuda where there is one.
        out: the file that rates are written to, with a picture of the collectives beside it
            (.svg), and the machine that functron plan --hardware takes (.toml); the disk that it is
            on is measured.
        largest_bytes: of the messages that are sent; 0: 4 MiB on CPUs, 256 MiB on GPUs.
    """

    json: bool = False
    mesh: str = ""
    nproc: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("hardware.json")
    largest_bytes: int = 0


_MEASURED = Need(
    lambda c: c.nproc > 0 or bool(c.mesh), "ranks that are measured", "start them: --nproc N"
)
_SEVERAL = "ranks that send messages"

DOCTOR_NEEDS: Needs = MappingProxyType(
    {
        **always("json", "mesh", "nproc"),
        **dict.fromkeys(("device", "out"), _MEASURED),
        "largest_bytes": Need(
            lambda c: c.nproc != 1 and _MEASURED.holds(c), _SEVERAL, "start several: --nproc N"
        ),
    }
)
"""The needs of options, for them to have an effect, where torchrun started no processes to
measure."""


def _needs(here: Process | None) -> Needs:
    """Likewise in any process."""
    if here is None:
        return DOCTOR_NEEDS
    alone = never(_SEVERAL, "start several", "largest_bytes") if here.world_size == 1 else {}
    return {**always(*DOCTOR_NEEDS), **alone}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: of it.
        found: what there is, or why not.
        state: how that is.
        fix: what to do about it, where something can be done.
    """

    name: str
    found: str
    state: State = "ok"
    fix: str = ""


def run(arguments: Sequence[str]) -> int:
    """Print the findings, or the rates of a mesh; the exit code is 1 if one is broken, or slow."""
    here = current()
    options = parse(DoctorOptions, arguments, "doctor", needs=_needs(here))
    if here is not None or options.nproc or options.mesh:
        return _measure(options, arguments, here)
    found = list(findings())
    print(_as_json(found) if options.json else _as_text(found))
    return int(any(one.state == "broken" for one in found))


def _measure(options: DoctorOptions, arguments: Sequence[str], here: Process | None) -> int:
    processes = here.world_size if here else options.nproc
    with mistakes():
        if planner is None:
            title, fix = "cannot measure this mesh", "leave --mesh and --nproc out"
            refuse(title, "mesh", "no application planner", "functron with all of it", fix)
        raise_problems("cannot measure like this", started_problems(options.nproc, here))
        mesh = Mesh.parse(options.mesh) if options.mesh else Mesh(dp=max(processes, 1))
        if not processes or processes != mesh.size:
            fix = f"--nproc {mesh.size}, or torchrun with as many" if mesh.size > 1 else "--nproc 1"
            got = f"{processes} for a mesh of {mesh.size}"
            refuse("cannot measure this mesh", "nproc", got, "a process for each rank", fix)
        kind = device_type(options.device, options.nproc)
    if here is None:
        code = launch(options.nproc, ["-m", "functron", "doctor", *arguments])
        return code or int(bool(planner.Measurement.load(options.out).slow()))
    with mistakes():
        bound, device = join(mesh, here, kind)
        folder = options.out.resolve().parent
        found = planner.measure(bound, device, folder, largest_bytes=options.largest_bytes)
    leave()
    if here.rank == 0:
        with outside():
            found.save(options.out)
            options.out.with_suffix(".svg").write_text(found.picture(), encoding="utf-8")
            options.out.with_suffix(".toml").write_text(_describe_machine(found), encoding="utf-8")
        print(options.out.read_text(encoding="utf-8") if options.json else found, flush=True)
    return 0 if here.launched_here else int(bool(found.slow()))


def _describe_machine(found: Measurement) -> str:
    """The file of the machine, or why there is none, as a comment."""
    try:
        return found.machine().to_toml()
    except ValueError as error:
        return "".join(f"# {line}\n" for line in str(error).splitlines())


def _as_json(found: Sequence[Finding]) -> str:
    return json.dumps([dataclasses.asdict(one) for one in found], indent=2)


def _as_text(found: Sequence[Finding]) -> str:
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        note = "" if one.state == "ok" else f"{one.state}: "
        lines.append(f"{one.name:{width}}  {note}{one.found}")
        lines += [f"{'':{width}}  fix: {one.fix}"] if one.fix else []
    return "\n".join(lines)


def findings() -> Iterator[Finding]:
    """Everything that was looked for, in the order to show it."""
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")
    yield from _packages()
    yield _machine()
    yield from _devices()
    yield from _communication()
    yield from _compiler()
    yield _cache()
    yield from _extras()


def _machine() -> Finding:
    there = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{usable} of {there} processors, {memory / 2**30:.1f} GiB of memory"
    return Finding("machine", f"{text}, {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    """functron and torch, and those of functron's needs that are not met."""
    requirements, _ = declared()
    yield Finding("functron", f"{_version('functron') or 'not installed'} at {_home()}")
    yield Finding("torch", f"{torch.__version__} for {_build()}")
    for requirement in requirements:
        name, wanted = _parts(requirement)
        version = _version(name)
        if version is None or not satisfies(version, wanted):
            got = f"{version}; wanted {wanted}" if version else f"nothing; wanted {name}{wanted}"
            yield Finding(name, f"got {got}", "broken", f"pip install '{name}{wanted}'")


def _home() -> Path:
    return Path(__file__).resolve().parent.parent


def _build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPUs"


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """The requirements of functron and of each extra, as installed, or as in a checkout."""
    try:
        given = metadata.requires("functron") or []
    except metadata.PackageNotFoundError:
        file = _home().parent / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"] if file.is_file() else {}
        return project.get("dependencies", []), project.get("optional-dependencies", {})
    extras: dict[str, list[str]] = {}
    for requirement in given:
        text, _, condition = requirement.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", condition)
        extras.setdefault(extra[1] if extra else "", []).append(text.strip())
    return extras.pop("", []), extras


def _parts(requirement: str) -> tuple[str, str]:
    """``"pyright[nodejs]>=1,<2"`` to ``("pyright", ">=1,<2")``."""
    match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", requirement)
    assert match is not None, requirement
    return match[1], match[2]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is within such as ``">=2.11,<2.14"``; ``==13.0.*`` is any 13.0."""
    have = _numbers(version)
    for one in filter(None, wanted.split(",")):
        match = re.match(r"\s*(>=|<|==)\s*([\w.*]+)", one)
        if match is None:  # what functron's own requirements do not use
            continue
        limit = _numbers(match[2])
        good = {">=": have >= limit, "<": have < limit, "==": have[: len(limit)] == limit}
        if not good[match[1]]:
            return False
    return True


def _numbers(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in leading[0].split(".")] if leading else []


def _devices() -> Iterator[Finding]:
    driver = _driver()
    yield Finding("driver", driver or "no NVIDIA driver", "ok" if driver else "missing")
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
            yield Finding("gpu", "this torch is for CPUs, on a machine with a GPU", "missing", fix)
        elif driver:
            fix = (
                "nvidia-smi shows whether the driver works; CUDA_VISIBLE_DEVICES may hide the GPUs"
            )
            yield Finding("gpu", "torch finds none, though there is a driver", "broken", fix)
        else:
            yield Finding("gpu", "none: functron computes on the CPU", "missing")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        text = f"{about.name}, {kernels.arch_of(device)}, {about.total_memory / 2**30:.1f} GiB"
        yield Finding(f"gpu {index}", f"{text}, {about.multi_processor_count} processors")


def _driver() -> str | None:
    """The version of NVIDIA's kernel module; None where there is none."""
    file = Path("/proc/driver/nvidia/version")
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return match[1] if match else None


def _communication() -> Iterator[Finding]:
    fix = "install a build of torch with torch.distributed"
    if not dist.is_available():
        yield Finding("distributed", "this torch has no torch.distributed", "broken", fix)
        return
    gloo = dist.is_gloo_available()
    yield Finding("gloo", "in torch" if gloo else "not in this torch", "ok" if gloo else "broken")
    if dist.is_nccl_available() and torch.version.cuda is not None:
        yield Finding("nccl", ".".join(map(str, nccl.version())))
    else:
        many = torch.cuda.is_available() and torch.cuda.device_count() > 1
        yield Finding("nccl", "not in this torch", "broken" if many else "missing")


def _compiler() -> Iterator[Finding]:
    """NVRTC, and whether kernels can be used."""
    reason = nvrtc.missing()
    if reason is None:
        archs = ", ".join(f"sm_{number}" for number in nvrtc.supported())
        yield Finding("nvrtc", f"{nvrtc.version()} at {nvrtc.library_path()}, for {archs}")
    else:
        yield Finding("nvrtc", reason.split(";")[0], "missing", nvrtc.INSTALL)
    if not torch.cuda.is_available():
        can = "; they compile here (python -m functron.cli.build)" if reason is None else ""
        yield Finding("kernels", f"no GPU to run them on{can}", "missing")
        return
    for index in range(torch.cuda.device_count()):
        why_not = kernels.usable(torch.device("cuda", index))
        found = why_not or "usable"
        yield Finding(f"kernels {index}", found, "missing" if why_not else "ok")


def _cache() -> Finding:
    folder = nvrtc.default_folder()
    if folder is None:
        return Finding("cache", "none: this user has no home, so kernels compile in every process")
    sizes = [path.stat().st_size for path in folder.glob(f"*{nvrtc.SUFFIX}")]
    return Finding("cache", f"{folder}: {len(sizes)} cubins, {sum(sizes) / 2**20:.1f} MiB")


def _extras() -> Iterator[Finding]:
    """The extras of the installation; that for developing functron only where it is complete."""
    for extra, requirements in declared()[1].items():
        lacking = [
            name + wanted
            for name, wanted in map(_parts, requirements)
            if (version := _version(name)) is None or not satisfies(version, wanted)
        ]
        name = f"extra {extra}"
        if not lacking:
            yield Finding(name, "installed")
        else:
            fix = f"pip install 'functron[{extra}]'"
            yield Finding(name, f"lacks {', '.join(lacking)}", "missing", fix)
