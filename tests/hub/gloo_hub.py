"""Loading and exporting on processes: run by test_processes.py under torchrun, with folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, Rules, gpt, hub, tree
from functron.spmd import gather
from functron.spmd.spec import shard

QUANTISED = ("qwen2", "deepseek-v3")
MEGATRON = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp"}
LAYOUTS = {
    "tp": (Mesh(tp=2), MEGATRON),
    "dp": (Mesh(dp=2), {}),
    "fsdp": (Mesh(fsdp=2), {"embed": "fsdp"}),
    "pp": (Mesh(pp=2), {"layers": "pp"}),
    "ep": (Mesh(ep=2), {"expert": "ep"}),
}
# every layout of a dense model and of a mixture, and every model with tp; where there are no experts,
# ep is dp; pytest --full has all of all
CHOSEN = {
    "qwen2": ("tp", "dp", "fsdp", "pp"),
    "gpt2": ("tp", "pp"),
    "mixtral": ("tp", "fsdp", "ep"),
    "gpt-oss": ("tp", "pp", "ep"),
    "deepseek-v3": tuple(LAYOUTS),
}


def layouts_of(name: str, full: bool) -> tuple[str, ...]:
    return tuple(LAYOUTS) if full else CHOSEN[name]


def main(full: bool, folders: list[Path]) -> None:
    dist.init_process_group("gloo")
    bound = {name: (mesh.bind(), Rules(table)) for name, (mesh, table) in LAYOUTS.items()}
    for folder in folders:
        for name in layouts_of(folder.name, full):
            check_layout(folder, name, *bound[name])
        check_failures(folder, bound["tp"][0])
        check_numbers(folder, bound["tp"][0])
    dist.destroy_process_group()


def check_layout(folder: Path, name: str, mesh, rules: Rules) -> None:
    """Shards are those of the whole, and the export of all ranks is what came in."""
    config = hub.read_config(folder / "model")
    specs = ft.param_specs(gpt.defs(config), rules)
    whole = hub.load(folder / "model", config)
    params = hub.load(folder / "model", config, specs=specs, mesh=mesh)
    for leaf, value, spec in zip(
        tree.leaves(params), tree.leaves(whole), tree.leaves(specs), strict=True
    ):
        assert torch.equal(leaf, shard(value, spec, mesh, mesh.coordinate))
    together = gather(params, specs, mesh)
    assert all(map(torch.equal, tree.leaves(together), tree.leaves(whole)))
    options = {"like": folder / "model", "max_shard_bytes": 20_000}
    hub.save(folder / name, config, params, specs=specs, mesh=mesh, **options)
    assert (folder / name / "config.json").is_file()  # on every rank, once it has returned
    report(f"{name}: ok")


def check_failures(folder: Path, mesh) -> None:
    """A failure of rank 0 is raised on every rank, and none waits for another."""
    config = hub.read_config(folder / "model")
    specs = ft.param_specs(gpt.defs(config), Rules(MEGATRON))
    params = hub.load(folder / "model", config, specs=specs, mesh=mesh)
    # an infinity appears in float16 in a tensor in the middle, on rank 0's file
    params["blocks"]["attention"]["out"]["w"][1] *= 1e9
    for target, dtype, message in (
        (folder / "model", None, "got an existing path"),
        (folder / "model" / "config.json" / "x", None, "Not a directory"),
        (folder / "half", "float16", "at most 65504 for float16"),
    ):
        with pytest.raises(ValueError, match=message if mesh.rank == 0 else "a failure on rank 0"):
            hub.save(target, config, params, specs=specs, mesh=mesh, dtype=dtype)
    with pytest.raises(ValueError, match="specs: got None"):
        hub.save(folder / "half", config, params, mesh=mesh)
    assert not (folder / "half").exists()
    report("failures: ok")


def check_numbers(folder: Path, mesh) -> None:
    """The loss of the shards is that of the whole, of which they are written in 8 bits."""
    config = hub.read_config(folder / "model")
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    tokens = torch.arange(12).reshape(2, 6)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(2)}
    dense = gpt.loss(config, hub.load(folder / "model", config), batch)
    params = hub.load(folder / "model", config, specs=specs, mesh=mesh)
    if folder.name in QUANTISED:
        hub.save(folder / "fp8", config, params, specs=specs, mesh=mesh, quantise="fp8-row")
    mapped = ft.shard_map(lambda w: gpt.loss(config, w, batch), mesh, (specs,), P())
    torch.testing.assert_close(mapped(params), dense, rtol=1e-5, atol=0)
    report("numbers: ok")


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "True", [Path(folder) for folder in sys.argv[2:]])
