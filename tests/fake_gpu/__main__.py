"""``python -m tests.fake_gpu [PYTEST ARGUMENTS]``: the tests of the GPU's host side, without a GPU.

The first time it makes a virtual environment with torch's CUDA build (about 7 GB of disk), in
``build/fake_gpu`` or the folder that ``--folder`` names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCH = "2.13.0"


def make_environment(folder: Path, torch: str) -> Path:
    """The Python of a virtual environment with CUDA's torch, functron and its tests' needs."""
    python = folder / "venv" / "bin" / "python"
    ready = folder / "venv" / f"torch-{torch}"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # === takes the build without a local version, which is CUDA's, also where a CPU build is at hand
        subprocess.run([*pip, f"torch==={torch}"], check=True)
        only = folder / "constraints.txt"
        only.write_text(f"torch=={torch}\n")
        subprocess.run([*pip, "--constraint", only, "--editable", f"{ROOT}[test]"], check=True)
        ready.touch()
    return python


def environment_of(folder: Path) -> dict[str, str]:
    """The variables by which processes find the stand-in."""
    libraries = folder / "lib"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return kept | {
        "FAKE_GPU": str(HERE),
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libfake.so"),
        "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{ROOT}",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "FUNCTRON_FULL_TRACEBACKS": "1",
    }


def main(arguments: list[str] | None = None) -> int:
    """Make what is missing, and run the tests; the exit code of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fake_gpu")
    parser.add_argument("--torch", default=TORCH, help="its version")
    given, rest = parser.parse_known_args(arguments)
    folder = given.folder.resolve()
    python = make_environment(folder, given.torch)
    build = "import sys; from pathlib import Path; from tests.fake_gpu.build import build; build(Path(sys.argv[1]))"
    subprocess.run([python, "-c", build, folder / "lib"], cwd=ROOT, check=True)
    command = [python, "-m", "pytest", "-m", "fake_gpu", *(rest or [str(HERE)])]
    return subprocess.run(command, cwd=ROOT, env=environment_of(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
