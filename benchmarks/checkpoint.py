"""Saving and restoring a training state on two processes, against torch.distributed.checkpoint.

Run it as ``python benchmarks/checkpoint.py``; it starts its processes with torchrun over gloo. The
state is that of AdamW with float32 masters over bfloat16 parameters, fully sharded. All programs
save and restore the same tensors in turn, round after round, into fresh folders on the same disk,
whose cached pages are dropped before each restore; every figure is the slowest process's, and the
table has medians over the rounds. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import reset_peak, resident
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from functron import Mesh, P, checkpoint, tree
from functron.spmd import BoundMesh
from functron.spmd.spec import dim_axes

RANKS = 2
WIDTH = 1536


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the whole state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; a temporary one by default")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return _rank(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", __file__, "--rank", "--folder", folder]
        command += ["--gigabytes", str(options.gigabytes), "--rounds", str(options.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment).returncode


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Parameters of a decoder with as many layers as give a state of that size, 14 bytes each."""
    layer = {
        "wqkv": (WIDTH, 3 * WIDTH),
        "wo": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    count = sum(map(math.prod, layer.values()))
    layers = max(1, round(gigabytes * 1e9 / 14 / count))
    return {name: (layers, *shape) for name, shape in layer.items()} | {"norm": (layers, WIDTH)}


def make_state(gigabytes: float, mesh: BoundMesh) -> tuple[Any, checkpoint.Placement]:
    """The state of this process, and its placement."""
    params = shapes(gigabytes)
    split = {
        name: P(None, None, "fsdp") if name in ("wqkv", "up") else P(None, "fsdp")
        for name in params
    }

    def abstract(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.empty(s, dtype=dtype, device="meta") for name, s in params.items()}

    like = {"params": abstract(torch.bfloat16)}
    like |= {name: abstract(torch.float32) for name in ("masters", "mu", "nu")}
    placement = checkpoint.Placement.of(like, dict.fromkeys(like, split), mesh)
    generator = torch.Generator().manual_seed(mesh.rank)
    leaves = []
    for leaf in placement.leaves:
        shape = placement.local_shape(leaf, mesh.rank)
        assert shape is not None
        leaves.append(torch.empty(shape, dtype=leaf.dtype).normal_(generator=generator))
    return tree.unflatten(tree.structure(like), leaves), placement


def _rank(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    mesh = Mesh(fsdp=RANKS).bind()
    root = Path(options.folder)
    if mesh.rank == 0:  # libraries are loaded before memory is counted
        checkpoint.save(root / "warm", {"x": torch.ones(2)})
    state, placement = make_state(options.gigabytes, mesh)
    with checkpoint.Saver(root / "background", placement) as saver:
        programs = {
            "functron": Functron(root / "functron", state, placement),
            "functron background": Background(root / "background", state, placement, saver),
            "torch": Torch(root / "torch", state, placement),
        }
        rows: dict[str, list[Row]] = {name: [] for name in programs}
        for _ in range(options.rounds + 1):
            for name, program in programs.items():
                rows[name].append(program.round())
    if mesh.rank == 0:
        _print(rows, tree.nbytes(state))
    dist.barrier()
    dist.destroy_process_group()
    return 0


@dataclass
class Row:
    """The needs of one program in one round: the most of all processes.

    Attributes:
        save: seconds until the checkpoint is complete.
        stall: those of them in which the state may not change.
        restore: seconds.
        save_bytes: by which memory grew while saving.
        restore_bytes: the same while restoring.
    """

    save: float
    stall: float
    restore: float
    save_bytes: float
    restore_bytes: float


class Functron:
    """`checkpoint.save` and `checkpoint.restore_`."""

    def __init__(self, folder: Path, state: Any, placement: checkpoint.Placement):
        self.folder, self.state, self.placement = folder, state, placement

    def save(self, path: Path) -> float:
        """Save, and say how long the state must stay as it is."""
        begun = time.perf_counter()
        checkpoint.save(path, self.state, placement=self.placement)
        return time.perf_counter() - begun

    def restore(self, path: Path, target: Any) -> None:
        """Restore in place."""
        checkpoint.restore_(path, target, placement=self.placement)

    def round(self) -> Row:
        """Save, restore, compare."""
        path = self.folder / "1"
        stalls: list[float] = []
        saved, save_bytes = _timed(lambda: stalls.append(self.save(path)))
        target = tree.map(torch.zeros_like, self.state)
        _drop_pages(path)
        restored, restore_bytes = _timed(lambda: self.restore(path, target))
        _compare(target, self.state)
        _fresh(path)
        return Row(saved, _slowest(stalls[0]), restored, save_bytes, restore_bytes)


class Background(Functron):
    """`checkpoint.Saver`, which writes a copy of the state in a thread."""

    def __init__(self, folder: Path, state: Any, placement: Any, saver: checkpoint.Saver):
        super().__init__(folder, state, placement)
        self.saver = saver

    def save(self, path: Path) -> float:
        """Begin the save, and wait for its end."""
        begun = time.perf_counter()
        self.saver.save(int(path.name), self.state)
        stall = time.perf_counter() - begun
        self.saver.wait()
        return stall


class Torch(Functron):
    """torch.distributed.checkpoint, of the same shards as DTensors."""

    def __init__(self, folder: Path, state: Any, placement: checkpoint.Placement):
        super().__init__(folder, state, placement)
        self.mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))

    def save(self, path: Path) -> float:
        """Save, and say how long the state must stay as it is."""
        begun = time.perf_counter()
        dcp.save(self._wrap(self.state), checkpoint_id=path)
        return time.perf_counter() - begun

    def restore(self, path: Path, target: Any) -> None:
        """Restore in place."""
        dcp.load(self._wrap(target), checkpoint_id=path)

    def _wrap(self, state: Any) -> dict[str, DTensor]:
        rows = zip(self.placement.leaves, tree.leaves(state), strict=True)
        return {leaf.path: self._wrapped(leaf, tensor) for leaf, tensor in rows}

    def _wrapped(self, leaf: Any, tensor: torch.Tensor) -> DTensor:
        dims = [d for d, names in enumerate(dim_axes(leaf.spec, len(leaf.shape))) if names]
        where = ShardPlacement(dims[0]) if dims else Replicate()
        strides = torch.empty(leaf.shape, device="meta").stride()
        size = torch.Size(leaf.shape)
        return DTensor.from_local(
            tensor, self.mesh, [where], run_check=False, shape=size, stride=strides
        )


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `run` takes, and bytes by which memory grows meanwhile; the largest of all."""
    dist.barrier()
    reset_peak()
    memory, begun = resident("VmRSS"), time.perf_counter()
    run()
    seconds = time.perf_counter() - begun
    return _slowest(seconds), _slowest(resident("VmHWM") - memory)


def _slowest(number: float) -> float:
    value = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _fresh(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()


def _drop_pages(folder: Path) -> None:
    """Have the files read from the disk again, rather than from memory."""
    if dist.get_rank() == 0:
        for path in filter(Path.is_file, folder.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


def _compare(got: Any, want: Any) -> None:
    rows = zip(tree.leaves(got), tree.leaves(want), tree.paths(want), strict=True)
    for a, b, path in rows:
        # what all ranks hold whole was written by one of them, from numbers of its own
        if "norm" not in path and not torch.equal(a, b):
            raise AssertionError(f"{path} came back with other values")


def _print(rows: dict[str, list[Row]], local: int) -> None:
    def median(name: str, what: str) -> float:
        return statistics.median(getattr(row, what) for row in rows[name][1:])

    def ratio(name: str, what: str) -> float:
        pairs = zip(rows[name][1:], rows["torch"][1:], strict=True)
        return statistics.median(getattr(mine, what) / getattr(peer, what) for mine, peer in pairs)

    whole = f"{local * RANKS / 1e9:.2f} GB on {RANKS} processes, {len(rows['torch']) - 1} rounds"
    print(f"\nstate: {whole}; one process holds {local / 1e9:.2f} GB")
    titles = ["save s", "x torch", "restore s", "x torch", "stall", "save mem", "restore mem"]
    print(" " * 22 + "".join(f"{title:>13}" for title in titles))
    for name in rows:
        stall = statistics.median(row.stall / row.save for row in rows[name][1:])
        first = rows[name][0]  # when what was never used before is allocated
        cells = [
            f"{median(name, 'save'):.2f}",
            f"{ratio(name, 'save'):.2f}",
            f"{median(name, 'restore'):.2f}",
            f"{ratio(name, 'restore'):.2f}",
            f"{stall:.1%}",
            f"{first.save_bytes / local:.2f}",
            f"{first.restore_bytes / local:.2f}",
        ]
        print(f"{name:22}" + "".join(f"{cell:>13}" for cell in cells))
    print("x torch: time over that of torch.distributed.checkpoint in the same round, the median")
    print("stall: the part of the save in which the state may not change")
    print("mem: by how much memory grew at most in the first round, over the state of a process")


if __name__ == "__main__":
    sys.exit(main())
