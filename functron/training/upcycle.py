"""Upcycling: a mixture of experts that begins as the dense model that it is made of.

Every expert begins as the dense feed-forward layer, or as one of equal slices of its hidden
features, and whichever experts a token chooses, together they compute what the layer did
(Komatsuzaki et al. 2022, "Sparse upcycling"; He et al. 2024, "Upcycling large language models into
mixture of experts", for slices). Training then lets them differ.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from functron import checkpoint
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.models import gpt
from functron.models.gpt import GPTConfig
from functron.nn.moe import MoEConfig
from functron.params import num_params
from functron.training import config, run_folder
from functron.training.convert import begin, newest_params


def upcycled_config(dense: GPTConfig, moe: MoEConfig) -> GPTConfig:
    """The architecture of `dense` with its feed-forward layers made layers of experts.

    Raises:
        ValueError: it has experts already, or the experts' settings do not allow that they compute
            together what the dense layer does; all reasons are listed.
    """
    parts = dense.mlp_dim // moe.expert_dim
    found = []
    if dense.moe is not None:
        found.append(Problem("model", "one with experts", "a dense one"))
    if dense.mlp_dim % moe.expert_dim:
        fix = f"set it to {dense.mlp_dim} for whole copies"
        found.append(
            Problem("expert_dim", str(moe.expert_dim), f"a divisor of {dense.mlp_dim}", fix)
        )
    for name, count in (("num_experts", moe.num_experts), ("top_k", moe.top_k)):
        if parts and count % parts:
            wanted = f"a multiple of {parts}, the slices of mlp_dim={dense.mlp_dim}"
            found.append(
                Problem(name, str(count), wanted, f"set it to {-(-count // parts) * parts}")
            )
    plain = replace(moe, aux_loss=0.0, z_loss=0.0, aux="sequence", jitter=0.0, dispatch="alltoall")
    like = MoEConfig(
        moe.num_experts, moe.top_k, moe.expert_dim,
        score=moe.score, normalise=moe.normalise, renormalise=moe.renormalise,
        router_bias=moe.router_bias, balance_bias=moe.balance_bias, balance_rate=moe.balance_rate,
        expert_bias=dense.bias, router_dtype=moe.router_dtype,
    )  # fmt: skip
    sums_to_one = moe.normalise == "after" or moe.renormalise
    if plain != like or not sums_to_one:
        got = "capacity, groups, scale, shared or latent experts, or weights whose sum is not 1"
        wanted = "tokens that choose, are not dropped, and weigh their experts by parts of 1"
        found.append(Problem("moe", got, wanted, "set renormalise, and leave the others out"))
    raise_problems("cannot make experts of this model", found)
    return replace(dense, moe=moe)


def upcycle(
    params: tree.Tree, dense: GPTConfig, moe: MoEConfig, *, seed: int = 0
) -> tuple[tree.Tree, GPTConfig]:
    """Parameters of a mixture of experts that computes what the dense model does, and its config.

    With expert_dim a fraction 1 / g of mlp_dim, experts come in groups of g slices. A group's
    experts have one router column, so that a token chooses whole groups, and their output matrices
    are multiplied by g, as each weighs 1 / g of the group's weight.

    Args:
        params: of the dense model, whole.
        dense: its architecture.
        moe: the experts.
        seed: of the routers' random weights.

    Raises:
        ValueError: as `upcycled_config`.
    """
    made = upcycled_config(dense, moe)
    blocks = dict(params["blocks"])
    mlp, parts = blocks.pop("mlp"), dense.mlp_dim // moe.expert_dim
    blocks["moe"] = {
        "router": _router(made, seed, parts, mlp["up"]["w"]),
        "experts": {name: _experts(name, layer, moe, parts) for name, layer in mlp.items()},
    }
    return {**params, "blocks": blocks}, made


def _router(config: GPTConfig, seed: int, parts: int, like: torch.Tensor) -> dict:
    defs = gpt.defs(config)["blocks"]["moe"]["router"]
    groups = (*defs["w"].shape[:-1], defs["w"].shape[-1] // parts)
    key = random.key(seed).to(like.device)
    w = defs["w"].init(key, groups, like.dtype, None)
    zeros = {
        name: torch.zeros(d.shape, dtype=d.dtype, device=like.device)
        for name, d in defs.items()
        if name != "w"
    }
    return {"w": w.repeat_interleave(parts, -1), **zeros}


def _experts(name: str, layer: dict, moe: MoEConfig, parts: int) -> dict:
    """Copies of one linear layer, stacked by expert after the dim of layers."""
    copies = moe.num_experts // parts
    dim = -2 if name == "down" else -1  # of the hidden features in the matrix
    w = torch.stack(layer["w"].chunk(parts, dim), 1).repeat(1, copies, 1, 1)
    out = {"w": w * parts if name == "down" else w}
    if "b" in layer:
        b = layer["b"]
        slices = b.unsqueeze(1) if name == "down" else torch.stack(b.chunk(parts, -1), 1)
        out["b"] = slices.repeat(1, moe.num_experts // slices.shape[1], 1)
    return out


_DIVIDED = (
    "sequence_parallel", "context", "zigzag", "expert_axes", "schedule", "chunks", "layout",
    "vocab_over_pp", "zero", "gather",
)  # fmt: skip
"""Settings of the dense run's division among ranks, which other models divide in other ways."""


def upcycle_run(
    source: Path, target: Path, moe: MoEConfig, *, seed: int = 0, averaged: bool = False
) -> str:
    """Make a run folder with a mixture of experts of the newest checkpoint in a dense run's folder.

    It has step 0 of a training run in it: the parameters, without state of an optimizer;
    ``functron train --resume --out TARGET`` goes on from there.

    Args:
        source: the dense run's folder.
        target: the folder to make.
        moe: the experts.
        seed: of the routers' random weights.
        averaged: begin as the dense run's average of its parameters.

    Returns:
        A line with the number of experts and parameters, and the folder.

    Raises:
        ValueError: `source` is no run, `target` exists, or as `upcycled_config`.
    """
    run_folder.refuse_existing(target, "cannot upcycle")
    settings = config.load(source / run_folder.CONFIG)
    if settings.architecture is not settings.gpt:
        refuse("cannot upcycle", str(source), settings.family.title, "a run of a dense GPT")
    params = newest_params(source, settings, averaged=averaged, read=checkpoint.read_params)
    params, made = upcycle(params, settings.gpt, moe, seed=seed)
    # the dense run's recipe: of one that was imported it is for fine-tuning
    run = replace(
        settings, model=f"{settings.model}-experts", source=f"run:{source}", gpt=made, lora_rank=0,
        mesh="", nproc=0, out="", resume=False,
        **{name: getattr(config.TrainConfig, name) for name in _DIVIDED},
    )  # fmt: skip

    def keep(folder: Path) -> None:
        if (source / run_folder.HUB).is_dir():
            shutil.copytree(source / run_folder.HUB, folder)

    begin(target, run, params, keep)
    count = num_params(gpt.defs(made))
    return f"{moe.num_experts} experts, {count:,} parameters ({made.dtype}) in {target}"
