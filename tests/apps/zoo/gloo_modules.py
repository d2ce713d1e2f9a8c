"""Runs of modules on two processes: run by test_modules.py under torchrun, with origins."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from functron import Mesh
from functron.training.config import configure
from functron.training.run import prepare
from functron.training.train import train


def main(settings: str, meshes: str, origins: list[str]) -> None:
    dist.init_process_group("gloo")
    for mesh in meshes.split(";"):
        bound = Mesh.parse(mesh).bind()
        for origin in origins:
            config = configure(model=origin, mesh=mesh, nproc=2, **json.loads(settings))
            history = train(prepare(config, bound), None).history
            if dist.get_rank() == 0:
                print(json.dumps([record["loss"] for record in history]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
