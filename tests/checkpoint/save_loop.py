"""A program for torchrun: save a state that says which step it is of, again and again.

Arguments: the folder, the number of steps, and a file to which rank 0 appends every step whose
save is known to be complete. Each rank first leaves its process id in ``<file>.<rank>``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from functron import Mesh, P, checkpoint, tree
from functron.spmd.spec import shard

SPECS = {"a": P("tp"), "b": {"c": P(None, "tp"), "d": P()}, "step": P()}


def state(step: int) -> dict:
    """The whole state after a step."""
    numbers = torch.arange(200_000, dtype=torch.float32).view(400, 500) + step
    return {
        "a": numbers,
        "b": {"c": -numbers.bfloat16(), "d": numbers[0].double()},
        "step": torch.tensor(step),
    }


def main() -> None:
    folder, steps, log = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    mesh = Mesh(tp=dist.get_world_size()).bind()
    Path(f"{log}.{mesh.rank}").write_text(str(os.getpid()))
    placement = checkpoint.Placement.of(state(0), SPECS, mesh)
    flat = tree.broadcast_prefix(SPECS, state(0), is_leaf=lambda s: isinstance(s, P))
    keep = checkpoint.Keep(last=2)
    with checkpoint.Saver(folder, placement, keep=keep, timeout=20) as saver:
        for step in range(1, steps + 1):
            whole = state(step)
            leaves = [
                shard(leaf, spec, mesh, mesh.coordinate).clone()
                for leaf, spec in zip(tree.leaves(whole), flat, strict=True)
            ]
            mine = tree.unflatten(tree.structure(whole), leaves)
            saver.save(step, mine, {"step": step})
            for leaf in leaves:
                leaf.zero_()  # training goes on while the copy is written
            saver.wait()
            if mesh.rank == 0:
                with log.open("a") as file:
                    print(step, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
