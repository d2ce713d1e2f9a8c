"""Recipes: complete configurations of large runs, made by the planner, with job scripts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from functron.apps.planner.search import count_chunks
from functron.core.errors import nearest, refuse
from functron.core.tables import table
from functron.models.config import GPTConfig
from functron.spmd import DATA_AXES, Mesh
from functron.training.config import TrainConfig, configure, load, with_precision

_FOLDER = Path(__file__).parent / "recipe_files"
RECIPES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of the recipes."""


def read_recipe(name: str) -> str:
    """The file of a recipe, which `functron.training.config.load` reads.

    Raises:
        ValueError: there is no such recipe.
    """
    if name not in RECIPES:
        wanted = "a recipe: functron recipe ls lists them"
        refuse("no such recipe", "name", repr(name), wanted, nearest(name, RECIPES))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(name: str) -> TrainConfig:
    """The run of a recipe.

    Raises:
        ValueError: as `read_recipe`.
    """
    read_recipe(name)
    return load(_FOLDER / f"{name}.toml")


def list_recipes() -> str:
    """A table of the recipes, with their meshes and the planner's estimates."""
    rows = [["recipe", "GPUs", "mesh", "samples x tokens", "expected"]]
    for name in RECIPES:
        config = load_recipe(name)
        size = Mesh.parse(config.parallelism.mesh).size
        batch = f"{config.data.global_batch} x {config.data.seq}"
        rows.append([name, str(size), config.parallelism.mesh, batch, _read_comments(name)[1]])
    return table(rows, left=5)


def _read_comments(name: str) -> list[str]:
    """The lines above a recipe: the command that made it, its estimate, the published run that it
    resembles, what the planner would rather do, and the source of the rest."""
    lines = read_recipe(name).splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


_GPUS_PER_NODE = 8


def make_job_script(name: str) -> str:
    """The Slurm script of a recipe, on machines of eight GPUs, which requeues itself.

    Raises:
        ValueError: as `read_recipe`.
    """
    size = Mesh.parse(load_recipe(name).parallelism.mesh).size
    ranks = min(size, _GPUS_PER_NODE)
    text = (_FOLDER / "job.sbatch").read_text(encoding="utf-8")
    fields = {"NAME": name, "NODES": str(size // ranks), "RANKS": str(ranks)}
    for field_name, value in fields.items():
        text = text.replace(f"@{field_name}@", value)
    return text


def shrink_run(config: TrainConfig, *, steps: int = 3) -> TrainConfig:
    """The same parallelism with a model of a few thousand parameters, small enough to simulate.

    Axes of the mesh have at most 2 ranks, pipeline ranks at most 2 stages. Layers keep their kinds:
    grouped heads, latent attention, experts, leading dense layers. Data is random, precision is
    float32, and nothing is compiled.

    Args:
        config: the run of a GPT.
        steps: that it takes.
    """
    sizes = {axis: min(size, 2) for axis, size in Mesh.parse(config.parallelism.mesh).axes}
    few = configure(config, gpt=_shrink_model(config, sizes.get("pp", 1)))
    microbatches = min(config.parallelism.microbatches, 4)
    data_ranks = math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
    return configure(
        with_precision(few, "float32"),
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()),
        chunks=min(config.parallelism.chunks, 2),
        seq=32,
        microbatches=microbatches,
        global_batch=data_ranks * microbatches,
        steps=steps,
        learning_rate=replace(config.learning_rate, name="constant", warmup_steps=0),
        format="mock",
        data="",
        prefetch=0,
        compile=False,
        layout="",
    )


def _shrink_model(config: TrainConfig, pp: int) -> GPTConfig:
    """The architecture of the same kinds of layers, with four heads of eight dims."""
    model, moe = config.gpt, config.gpt.moe
    stages = pp * min(count_chunks(config), 2)
    dense, alternate = min(model.dense_layers, 1), bool(model.dense_at)
    num_layers = max(stages, 1 + dense + alternate)
    latent = {"kv_rank": 8, "rope_head_dim": 8, "v_head_dim": 8, "q_rank": 16 * bool(model.q_rank)}
    if moe is not None:
        groups = min(moe.num_groups, 2)
        moe = replace(
            moe, num_experts=4, top_k=2, expert_dim=16, shared_dim=16 * bool(moe.shared_dim),
            num_groups=groups, top_groups=min(moe.top_groups, groups),
        )  # fmt: skip
    return replace(
        model,
        num_layers=num_layers,
        dense_layers=dense,
        dense_at=tuple(range(1 + dense, num_layers, 2)) if alternate else (),
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2 if model.kv_heads < model.num_heads else 0,
        head_dim=8,
        mlp_dim=48,
        vocab_size=120,
        vocab_multiple=16,
        max_seq=64,
        window=min(model.window, 16),
        rope_scaling=None,
        moe=moe,
        **(latent if model.kv_rank else {}),
    )
