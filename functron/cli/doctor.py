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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.cuda import nccl

from functron import apps
from functron.cli.launch import choose_device, join, launch, leave, started_problems
from functron.cli.options import parse
from functron.cli.process import Process, current, grow_segments, mistakes, outside
from functron.core.errors import raise_problems, refuse
from functron.core.settings import Need, Needs, never
from functron.ops import launch as kernels
from functron.ops import nvrtc
from functron.spmd import Mesh

if TYPE_CHECKING:
    from functron.apps.planner.measurements import Measurement

planner: Any = apps.find("planner")
"""The planner, which measures meshes; None where it is not installed."""

CheckState = Literal["ok", "missing", "broken"]
"""``"missing"``: absent, and not needed by everybody; ``"broken"``: needed and absent, or present
and not working."""


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine and installation; or, with --nproc or under torchrun, benchmark a mesh.

    The exit code is 1 if something that is needed is broken, or, for a mesh, if a rank or a group
    of ranks is slower than the rest.

    Attributes:
        json: print JSON: a list of name, state, found and fix; for a mesh, the contents of --out.
        mesh: axes and sizes, such as dp=2,tp=4, whose ranks and collectives are measured; empty:
            one axis dp of all processes.
        nproc: processes to start, one per rank of the mesh; 0: those of torchrun, or none.
        device: cpu, cuda, or auto: cuda if available.
        out: write the rates to this JSON file, a picture of the collectives beside it (.svg), and
            the machine for functron plan --hardware (.toml); its disk is measured, too.
        largest_bytes: size of the largest message; 0: 4 MiB on CPUs, 256 MiB on GPUs.
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
        **dict.fromkeys(("device", "out"), _MEASURED),
        "largest_bytes": Need(
            lambda c: c.nproc != 1 and _MEASURED.holds(c), _SEVERAL, "start several: --nproc N"
        ),
    }
)
"""Conditions under which options have an effect, outside of torchrun."""


def _find_needs(here: Process | None) -> Needs:
    if here is None:
        return DOCTOR_NEEDS
    return never(_SEVERAL, "start several", "largest_bytes") if here.world_size == 1 else {}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        found: what there is, or why there is nothing.
        state: whether that is all right.
        fix: how to mend it; empty: nothing to mend.
    """

    name: str
    found: str
    state: CheckState = "ok"
    fix: str = ""


def run(arguments: Sequence[str]) -> int:
    """Print the findings, or the rates of a mesh."""
    here = current()
    options = parse(DoctorOptions, arguments, "doctor", needs=_find_needs(here))
    if here is not None or options.nproc or options.mesh:
        return _measure(options, arguments, here)
    found = list(run_checks())
    rows = [dataclasses.asdict(one) for one in found]
    print(json.dumps(rows, indent=2) if options.json else _format_findings(found))
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
        kind = choose_device(options.device, options.nproc)
        grow_segments(kind)
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
    """The machine as TOML, or as a comment the reason why there is none."""
    try:
        return found.machine().to_toml()
    except ValueError as error:
        return "".join(f"# {line}\n" for line in str(error).splitlines())


def _format_findings(found: Sequence[Check]) -> str:
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        note = "" if one.state == "ok" else f"{one.state}: "
        lines.append(f"{one.name:{width}}  {note}{one.found}")
        lines += [f"{'':{width}}  fix: {one.fix}"] if one.fix else []
    return "\n".join(lines)


def run_checks() -> Iterator[Check]:
    """The results of all checks, in the order to show them."""
    yield Check("python", f"{platform.python_version()} at {sys.executable}")
    yield from _check_packages()
    yield _check_machine()
    yield from _check_devices()
    yield from _check_communication()
    yield from _check_compiler()
    yield _check_cache()
    yield from _check_extras()


def _check_machine() -> Check:
    there = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{usable} of {there} processors, {memory / 2**30:.1f} GiB of memory"
    return Check("machine", f"{text}, {platform.system()} {platform.machine()}")


def _check_packages() -> Iterator[Check]:
    """functron and torch, and the requirements that are not met."""
    requirements, _ = declared()
    yield Check("functron", f"{_find_version('functron') or 'not installed'} at {_HOME}")
    yield Check("torch", f"{torch.__version__} for {_describe_build()}")
    for name, wanted, version in _find_lacking(requirements):
        got = f"{version}; wanted {wanted}" if version else f"nothing; wanted {name}{wanted}"
        yield Check(name, f"got {got}", "broken", f"pip install '{name}{wanted}'")


def _find_lacking(requirements: Iterable[str]) -> Iterator[tuple[str, str, str | None]]:
    """The requirements that are not met: names, versions that are wanted, and those found."""
    for requirement in requirements:
        name, wanted = _split_requirement(requirement)
        version = _find_version(name)
        if version is None or not satisfies(version, wanted):
            yield name, wanted, version


_HOME = Path(__file__).resolve().parent.parent


def _describe_build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPUs"


def declared() -> tuple[list[str], dict[str, list[str]]]:
    """The requirements of functron and of each extra, by the installation or the checkout."""
    try:
        given = metadata.requires("functron") or []
    except metadata.PackageNotFoundError:
        file = _HOME.parent / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"] if file.is_file() else {}
        return project.get("dependencies", []), project.get("optional-dependencies", {})
    extras: dict[str, list[str]] = {}
    for requirement in given:
        text, _, condition = requirement.partition(";")
        extra = re.search(r"extra == ['\"](.+?)['\"]", condition)
        extras.setdefault(extra[1] if extra else "", []).append(text.strip())
    return extras.pop("", []), extras


def _split_requirement(requirement: str) -> tuple[str, str]:
    """``"pyright[nodejs]>=1,<2"`` to ``("pyright", ">=1,<2")``."""
    match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", requirement)
    assert match is not None, requirement
    return match[1], match[2]


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version meets such as ``">=2.11,<2.14"``; ``==13.0.*`` is any 13.0."""
    have = _parse_version(version)
    for one in filter(None, wanted.split(",")):
        match = re.match(r"\s*(>=|<|==)\s*([\w.*]+)", one)
        if match is None:  # no form of functron's own requirements
            continue
        limit = _parse_version(match[2])
        good = {">=": have >= limit, "<": have < limit, "==": have[: len(limit)] == limit}
        if not good[match[1]]:
            return False
    return True


def _parse_version(version: str) -> list[int]:
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in leading[0].split(".")] if leading else []


def _check_devices() -> Iterator[Check]:
    driver = _find_driver()
    yield Check("driver", driver or "no NVIDIA driver", "ok" if driver else "missing")
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
            yield Check("gpu", "this torch is for CPUs, on a machine with a GPU", "missing", fix)
        elif driver:
            fix = (
                "nvidia-smi shows whether the driver works; CUDA_VISIBLE_DEVICES may hide the GPUs"
            )
            yield Check("gpu", "torch finds none, though there is a driver", "broken", fix)
        else:
            yield Check("gpu", "none: functron computes on the CPU", "missing")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        text = f"{about.name}, {kernels.arch_of(device)}, {about.total_memory / 2**30:.1f} GiB"
        yield Check(f"gpu {index}", f"{text}, {about.multi_processor_count} processors")


def _find_driver() -> str | None:
    """The version of NVIDIA's kernel module; None: no driver."""
    file = Path("/proc/driver/nvidia/version")
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    if match is None and torch.cuda.is_available():  # Windows has it, beside its Linux
        return "one that torch finds, without a kernel module here"
    return match[1] if match else None


def _check_communication() -> Iterator[Check]:
    fix = "install a build of torch with torch.distributed"
    if not dist.is_available():
        yield Check("distributed", "this torch has no torch.distributed", "broken", fix)
        return
    gloo = dist.is_gloo_available()
    yield Check("gloo", "in torch" if gloo else "not in this torch", "ok" if gloo else "broken")
    if dist.is_nccl_available() and torch.version.cuda is not None:
        yield Check("nccl", ".".join(map(str, nccl.version())))
    else:
        many = torch.cuda.is_available() and torch.cuda.device_count() > 1
        yield Check("nccl", "not in this torch", "broken" if many else "missing")


def _check_compiler() -> Iterator[Check]:
    reason = nvrtc.missing()
    if reason is None:
        archs = ", ".join(f"sm_{number}" for number in nvrtc.supported())
        yield Check("nvrtc", f"{nvrtc.version()} at {nvrtc.library_path()}, for {archs}")
    else:
        yield Check("nvrtc", reason.split(";")[0], "missing", nvrtc.INSTALL)
    if not torch.cuda.is_available():
        can = "; they compile here (functron build)" if reason is None else ""
        yield Check("kernels", f"no GPU to run them on{can}", "missing")
        return
    for index in range(torch.cuda.device_count()):
        why_not = kernels.usable(torch.device("cuda", index))
        yield Check(f"kernels {index}", why_not or "usable", "missing" if why_not else "ok")


def _check_cache() -> Check:
    folder = nvrtc.default_folder()
    if folder is None:
        return Check("cache", "none: this user has no home, so kernels compile in every process")
    sizes = [path.stat().st_size for path in folder.glob(f"*{nvrtc.SUFFIX}")]
    return Check("cache", f"{folder}: {len(sizes)} cubins, {sum(sizes) / 2**20:.1f} MiB")


def _check_extras() -> Iterator[Check]:
    for extra, requirements in declared()[1].items():
        lacking = [name + wanted for name, wanted, _ in _find_lacking(requirements)]
        name = f"extra {extra}"
        if not lacking:
            yield Check(name, "installed")
        else:
            fix = f"pip install 'functron[{extra}]'"
            yield Check(name, f"lacks {', '.join(lacking)}", "missing", fix)
