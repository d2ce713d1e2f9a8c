"""What `functron doctor` says of this machine, and of others."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import platform
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from functron.cli import doctor
from functron.cli.main import main
from functron.ops import launch, nvrtc
from functron.ops import nvrtc as cubins


def looked_for() -> dict[str, doctor.Finding]:
    return {one.name: one for one in doctor.findings()}


def test_it_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert platform.python_version() in out
    assert torch.__version__ in out
    assert main(["doctor", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    for name in (
        "python",
        "functron",
        "torch",
        "machine",
        "driver",
        "gloo",
        "nccl",
        "nvrtc",
        "cache",
    ):
        assert set(found[name]) == {"name", "found", "state", "fix"}
    assert found["gloo"]["state"] == "ok"
    assert {name for name in found if name.startswith("extra ")} >= {"extra test", "extra kernels"}


def test_a_machine_without_gpus_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    found = looked_for()
    assert found["gpu"] == doctor.Finding("gpu", "none: functron computes on the CPU", "missing")
    assert found["kernels"].found.startswith("no GPU to run them on")


@pytest.mark.parametrize(
    ("cuda", "state", "fix"), [(None, "missing", "pytorch.org"), ("13.0", "broken", "nvidia-smi")]
)
def test_a_gpu_that_torch_does_not_see_is_reported(monkeypatch, cuda, state, fix):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.65.06")
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
    monkeypatch.setattr(doctor, "_driver", lambda: "580.65.06")
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
    assert found["kernels 0"] == doctor.Finding("kernels 0", "usable")
    assert found["nccl"].found == "2.28.9"
    assert found["driver"].found == "580.65.06"
    assert main(["doctor"]) == 0


def test_gpus_whose_kernels_cannot_be_used_say_why_and_are_no_failure(
    two_gpus, monkeypatch, capsys
):
    monkeypatch.setattr(nvrtc, "missing", lambda: "NVRTC: got none; fix: pip install it")
    found = looked_for()
    assert found["nvrtc"] == doctor.Finding("nvrtc", "NVRTC: got none", "missing", nvrtc.INSTALL)
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
    found = {one.name: one for one in [*doctor._packages(), *doctor._extras()]}
    assert found["functron"].found.startswith("not installed at ")
    assert main(["doctor"]) == 1
    text = "got 2.9.1+cu128; wanted >=2.11,<2.14"
    fix = "pip install 'torch>=2.11,<2.14'"
    assert found["torch"] == doctor.Finding("torch", text, "broken", fix)
    assert found["tqdm"].found == "got nothing; wanted tqdm>=4.66"
    assert "numpy" not in found
    assert found["extra wandb"].found == "lacks wandb>=0.19"
    assert found["extra wandb"].fix == "pip install 'functron[wandb]'"
    assert found["extra hub"].found == "lacks jinja2>=3"
    assert found["extra x"].found == "lacks unheard-of"
    assert found["extra y"] == doctor.Finding("extra y", "installed")


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
    folder = cubins.default_folder()
    assert folder is not None
    folder.mkdir(parents=True)
    (folder / f"a{cubins.SUFFIX}").write_bytes(bytes(3 * 2**20))
    (folder / "b.txt").write_bytes(bytes(2**20))
    assert looked_for()["cache"].found.endswith("cubins: 1 cubins, 3.0 MiB")
