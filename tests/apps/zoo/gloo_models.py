"""Loading and exporting on processes: run by test_processes.py under torchrun, with folders."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, hub, tree
from functron.spmd import BoundMesh, gather


def main(folders: list[Path]) -> None:
    dist.init_process_group("gloo")
    bound = {"tp": Mesh(tp=2).bind(), "fsdp": Mesh(fsdp=2).bind()}
    for folder in folders:
        for name, mesh in bound.items():
            check_layout(folder, name, mesh)
    dist.destroy_process_group()


def check_layout(folder: Path, name: str, mesh: BoundMesh) -> None:
    """The whole is what is loaded, and the export is complete, as these models divide themselves."""
    config, params = hub.load_model(folder / "model", mesh=mesh)
    family = hub.family_of(config)
    specs = ft.param_specs(family.defs(config), family.rules(config, mesh))
    together = gather(params, specs, mesh)
    whole = hub.load(folder / "model", config)
    assert all(map(torch.equal, tree.leaves(together), tree.leaves(whole)))
    hub.save(folder / name, config, params, specs=specs, mesh=mesh, like=folder / "model")
    assert (folder / name / "config.json").is_file()
    if dist.get_rank() == 0:
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
