"""`functron doctor` on this machine, and on others."""

from __future__ import annotations

import dataclasses
import importlib.metadata as metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import functron
from functron.cli import doctor
from functron.cli.main import main
from functron.ops import launch, nvrtc


def looked_for() -> dict[str, doctor.Check]:
    return {one.name: one for one in doctor.run_checks()}


def told(*command: str) -> str | None:
    """The output of a command; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.fixture(scope="module")
def here():
    """Its findings on this machine, with nothing patched."""
    return looked_for()


def test_text_and_json_say_the_same(here, capsys):
    broken = any(one.state == "broken" for one in here.values())
    assert main(["doctor"]) == broken
    out = capsys.readouterr().out
    assert main(["doctor", "--json"]) == broken
    assert json.loads(capsys.readouterr().out) == list(map(dataclasses.asdict, here.values()))
    for one in here.values():
        assert re.search(rf"^{one.name} +.*{re.escape(one.found)}$", out, re.MULTILINE)


def test_python_and_packages_are_those_that_are_imported(here):
    text = told(sys.executable, "-c", "import sys; print(*sys.version_info[:3], sep='.')")
    assert here["python"].found == f"{text} at {sys.executable}"
    assert here["functron"].found.endswith(f" at {Path(functron.__file__).parent}")
    assert here["torch"].found.startswith(f"{torch.__version__} for ")
    # those of the installation, which a checkout may be ahead of
    found = metadata.distribution("functron")  # from a wheel, or where an egg-info lies in the tree
    installed = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    extras = re.findall(r"^Provides-Extra: (.+)$", installed, re.MULTILINE)
    assert "test" in extras
    assert {name for name in here if name.startswith("extra ")} == {f"extra {x}" for x in extras}
    assert here["extra test"] == doctor.Check("extra test", "installed")  # it runs this


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="a system that says it elsewhere")
def test_the_machine_is_that_of_the_system(here):
    kib = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert kib is not None
    # which heeds these
    usable = told("env", "-u", "OMP_NUM_THREADS", "-u", "OMP_THREAD_LIMIT", "nproc")
    there = Path("/proc/cpuinfo").read_text().count("processor\t")
    text = f"{usable} of {there} processors, {int(kib[1]) / 2**20:.1f} GiB of memory"
    assert here["machine"].found == f"{text}, {told('uname', '-s')} {told('uname', '-m')}"


def test_gpus_are_those_of_the_driver(here):
    listed = told("nvidia-smi", "-L")
    versions = told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not listed or not versions:
        assert here["driver"] == doctor.Check("driver", "no NVIDIA driver", "missing")
        assert here["gpu"] == doctor.Check("gpu", "none: functron computes on the CPU", "missing")
        assert here["kernels"].found.startswith("no GPU to run them on")
        return
    assert here["driver"].found == versions.splitlines()[0]
    if "gpu" not in here:  # which would say why torch does not use it
        assert f"gpu {len(listed.splitlines()) - 1}" in here


def test_a_driver_that_has_no_kernel_module_here_is_there(monkeypatch):
    monkeypatch.setattr(doctor.Path, "is_file", lambda path: False)
    assert doctor._find_driver() is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._find_driver() == "one that torch finds, without a kernel module here"


def test_gloo_is_there_where_a_process_group_can_be_made(here, tmp_path):
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/a", rank=0, world_size=1)
        dist.barrier()
        dist.destroy_process_group()
        works = True
    except (RuntimeError, ValueError):
        works = False
    assert here["gloo"].state == ("ok" if works else "broken")


def test_nvrtc_is_there_where_a_kernel_compiles(here):
    source = nvrtc.read("global_norm")
    try:
        made = nvrtc.compile_source(source, source.variants[0], "sm_90a")
    except ValueError:
        assert here["nvrtc"].state == "missing"
        return
    assert made.cubin[:4] == b"\x7fELF"
    assert here["nvrtc"].state == "ok"
    assert "sm_90" in here["nvrtc"].found
    at = re.search(r" at (.*), for ", here["nvrtc"].found)
    assert at is not None
    assert at[1] in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("cuda", "state", "fix"), [(None, "missing", "pytorch.org"), ("13.0", "broken", "nvidia-smi")]
)
def test_a_gpu_that_torch_does_not_see_is_reported(monkeypatch, cuda, state, fix):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_find_driver", lambda: "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.nccl, "version", lambda: (2, 28, 9))
    gpu = looked_for()["gpu"]
    assert gpu.state == state
    assert fix in gpu.fix


class Hopper:
    name, total_memory, multi_processor_count = "NVIDIA H200", 140 * 2**30, 132


@pytest.fixture
def two_gpus(monkeypatch):
    for name, value in {
        "is_available": True, "device_count": 2, "get_device_properties": Hopper,
        "get_device_capability": (9, 0), "current_device": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(doctor, "_find_driver", lambda: "580.65.06")
    monkeypatch.setattr(doctor.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    launch._why_not.cache_clear()
    yield
    launch._why_not.cache_clear()


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC here")
def test_gpus_are_listed_with_whether_kernels_run(two_gpus, capsys):
    found = looked_for()
    assert found["gpu 1"].found == "NVIDIA H200, sm_90a, 140.0 GiB, 132 processors"
    assert found["kernels 0"] == doctor.Check("kernels 0", "usable")
    assert found["nccl"].found == "2.28.9"
    assert found["driver"].found == "580.65.06"
    assert main(["doctor"]) == 0


def test_gpus_whose_kernels_cannot_be_used_say_why_and_are_no_failure(
    two_gpus, monkeypatch, capsys
):
    monkeypatch.setattr(nvrtc, "missing", lambda: "NVRTC: got none; fix: pip install it")
    found = looked_for()
    assert found["nvrtc"] == doctor.Check("nvrtc", "NVRTC: got none", "missing", nvrtc.INSTALL)
    assert found["kernels 1"].state == "missing"
    assert found["kernels 1"].found == "NVRTC: got none; fix: pip install it"
    assert main(["doctor"]) == 0
    assert "fix: pip install 'functron[kernels]'" in capsys.readouterr().out


def test_gpus_without_nccl_are_broken(two_gpus, monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert looked_for()["nccl"].state == "broken"
    assert main(["doctor"]) == 1
    assert "broken: not in this torch" in capsys.readouterr().out


def test_what_is_not_installed_or_too_old_is_named_with_the_command(monkeypatch, capsys):
    versions = {"torch": "2.9.1+cu128", "numpy": "2.0.0"}

    def version(name):
        if name in versions:
            return versions[name]
        raise metadata.PackageNotFoundError(name)

    needs = [
        "torch>=2.11,<2.14", "numpy>=1.26", "tqdm>=4.66",
        'wandb>=0.19; extra == "wandb"', "jinja2[i18n]>=3 ; extra == 'hub'", 'numpy; extra == "x"',
        'unheard-of; extra == "x"', 'numpy; extra == "y"',
    ]  # fmt: skip
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    found = {one.name: one for one in [*doctor._check_packages(), *doctor._check_extras()]}
    assert found["functron"].found.startswith("not installed at ")
    assert main(["doctor"]) == 1
    text = "got 2.9.1+cu128; wanted >=2.11,<2.14"
    fix = "pip install 'torch>=2.11,<2.14'"
    assert found["torch"] == doctor.Check("torch", text, "broken", fix)
    assert found["tqdm"].found == "got nothing; wanted tqdm>=4.66"
    assert "numpy" not in found
    assert found["extra wandb"].found == "lacks wandb>=0.19"
    assert found["extra wandb"].fix == "pip install 'functron[wandb]'"
    assert found["extra hub"].found == "lacks jinja2>=3"
    assert found["extra x"].found == "lacks unheard-of"
    assert found["extra y"] == doctor.Check("extra y", "installed")


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9", ">=2.11", False),
        ("13.0.88", "==13.0.*", True),
        ("13.1.2", "==13.0.*", False),
        ("1.1.414", "==1.1.414", True),
        ("5.0", "", True),
    ],
)
def test_versions_are_compared_number_by_number(version, wanted, good):
    assert doctor.satisfies(version, wanted) == good


def test_the_cache_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert looked_for()["cache"].found.endswith("cubins: 0 cubins, 0.0 MiB")
    folder = nvrtc.default_folder()
    assert folder is not None
    folder.mkdir(parents=True)
    (folder / f"a{nvrtc.SUFFIX}").write_bytes(bytes(3 * 2**20))
    (folder / "b.txt").write_bytes(bytes(2**20))
    assert looked_for()["cache"].found.endswith("cubins: 1 cubins, 3.0 MiB")
