"""Run by test_uneven_composition.py in 3 or 4 processes: what they do not divide, against one rank.

Steps, shards and their padding, checkpoints and exports. Arguments: a folder, names of `MESHES`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, checkpoint, gpt, hub, optim, random, tree
from functron.nn import IGNORE_INDEX
from functron.nn.moe import MoEConfig
from functron.spmd.spec import is_spec, shard

ALL = ("vocab", "heads", "mlp", "embed", "expert")
CONFIG = gpt.GPTConfig(
    vocab_size=50, num_layers=1, embed_dim=20, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=23,
    max_seq=8, vocab_multiple=1, init_stddev=0.3, dtype="float64",
)  # fmt: skip
MIXTURE = replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, renormalise=True))
MESHES = {"tp": Mesh(tp=3), "fsdp": Mesh(fsdp=3), "ep": Mesh(ep=3), "folded": Mesh(ep=2, tp=2)}


def config_of(name: str) -> gpt.GPTConfig:
    """The model of a mesh; of 5 experts, 2 x 2 ranks have 2, 1, 2 and none."""
    assert MIXTURE.moe is not None
    five = replace(MIXTURE, vocab_size=51, moe=replace(MIXTURE.moe, num_experts=5))
    return {"ep": MIXTURE, "folded": five}.get(name, CONFIG)


def batch(step: int) -> dict:
    tokens = torch.randint(0, 50, (12, 9), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(12)}


def optimizer():
    return optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))


def steps_on(config, mesh, num_steps=2):
    """The state and metrics after some steps, on one rank, on simulated ones, or here."""
    plain = mesh.mesh if isinstance(mesh, ft.BoundMesh) else mesh
    axes, stream = ("ep",), gpt.STREAM
    if plain["ep"] > 1 and plain["tp"] > 1:
        axes, stream = ("ep", "tp"), gpt.SEQUENCE_PARALLEL_STREAM
    rules = gpt.rules(config, plain, uneven=ALL, expert_axes=axes)
    specs = ft.param_specs(gpt.defs(config), rules)
    options = ft.ModelOptions(stream, gather=ft.Gather(specs), expert_axes=axes)
    gradients = ft.mean_gradients(
        lambda params, batch, key: gpt.loss(config, params, batch, options), gpt.num_targets
    )
    state = ft.init_state(random.key(1), gpt.defs(config), specs, optimizer(), mesh)
    step = ft.make_step(gradients, optimizer(), mesh, specs)
    history = []
    for number in range(num_steps):
        data = ft.shard(batch(number), P(ft.DATA_AXES), mesh)
        state, metrics = step(state, data)
        history += [metrics["loss"], metrics["grad_norm"]]
    return state, ft.state_specs(specs, optimizer()), torch.stack(history)


def check(name: str, config, folder: Path) -> None:
    mesh = MESHES[name].bind("cpu")
    want, _, want_history = steps_on(config, Mesh())
    state, specs, history = steps_on(config, mesh)
    torch.testing.assert_close(history, want_history, rtol=1e-10, atol=0)
    flat = tree.broadcast_prefix(specs, state, is_leaf=is_spec)
    padded = 0
    for path, leaf, whole, spec in zip(
        tree.paths(want), tree.leaves(state), tree.leaves(want), flat, strict=True
    ):
        part = shard(whole, spec, mesh, mesh.coordinate)
        torch.testing.assert_close(leaf, part, rtol=1e-9, atol=1e-12, msg=f"{name} {path}")
        padding = shard(torch.ones(whole.shape), spec, mesh, mesh.coordinate) == 0
        assert (leaf[padding] == 0).all(), f"{name} {path}"
        padded += bool(padding.any())
    assert padded > 3 or mesh.rank < mesh.size - 1, f"{name}: {padded}"
    placement = checkpoint.Placement.of(tree.map(lambda x: x.to("meta"), want), specs, mesh)
    with checkpoint.Saver(folder / name, placement) as saver:
        saver.save(1, state)
        saver.wait()
    whole = ft.gather(state.params, specs.params, mesh)
    for leaf, d in zip(tree.leaves(whole), tree.leaves(gpt.defs(config)), strict=True):
        assert leaf.shape == d.shape
    hub.save(folder / f"{name} hub", config, state.params, specs=specs.params, mesh=mesh)
    if mesh.rank == 0:
        torch.save(whole, folder / f"{name}.pt")
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in sys.argv[2:]:
        check(each, config_of(each), Path(sys.argv[1]))
    dist.destroy_process_group()
