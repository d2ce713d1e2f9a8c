"""Build the stand-in's libraries with the C compiler at hand, for the torch of this environment."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PREFIXES = ("cuda", "cublas", "nccl")
TORCH = (
    "libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so",
    "libtorch_python.so",
)  # fmt: skip
STATUS = 'EXPORT int {0}(void) {{ fake_count("{0}"); return 0; }}\n'
"""The source of a function that torch calls and runtime.c lacks: "success", and a count."""


def find_torch() -> Path:
    """The folder of torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed")
    return Path(spec.origin).parent


def list_undefined(library: Path) -> set[str]:
    """The names of CUDA, cuBLAS and NCCL that a library wants of others."""
    out = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    names = (line.split()[-1].partition("@")[0] for line in out.splitlines())
    return {name for name in names if re.match(rf"(__)?({'|'.join(PREFIXES)})[A-Z]", name)}


def build(folder: Path) -> tuple[Path, Path]:
    """Compile both libraries into a folder: that which is loaded before others, and libcuda."""
    torch = find_torch()
    folder.mkdir(parents=True, exist_ok=True)
    source = (HERE / "runtime.c").read_text()
    written = set(re.findall(rf"EXPORT [\w ]+?\*?((?:__)?(?:{'|'.join(PREFIXES)})\w+)\(", source))
    libraries = [torch / "lib" / name for name in TORCH]
    wanted = set().union(*(list_undefined(each) for each in libraries if each.is_file()))
    stubs = "".join(STATUS.format(name) for name in sorted(wanted - written))
    (folder / "runtime.c").write_text(f"{source}\n{stubs}")
    # the runtime's headers, and what they include, which comes with Triton
    headers = [
        *torch.parent.glob("nvidia/cu1*/include"),
        torch.parent / "triton/backends/nvidia/include",
    ]
    compiler = shutil.which("cc") or shutil.which("gcc") or sys.exit("no C compiler is installed")
    options = [
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        "-fvisibility=hidden",
        *(f"-I{each}" for each in (HERE, *headers)),
    ]
    runtime, driver = folder / "libfake.so", folder / "libcuda.so.1"
    for into, name in ((runtime, folder / "runtime.c"), (driver, HERE / "driver.c")):
        subprocess.run([compiler, *options, "-o", into, name, "-lpthread", "-ldl"], check=True)
    nvml = folder / "libnvidia-ml.so.1"
    nvml.unlink(missing_ok=True)
    nvml.symlink_to(driver.name)
    return runtime, driver
