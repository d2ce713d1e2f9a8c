"""``functron evaluate``: loss and perplexity of a trained model on texts that it has not seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from functron import checkpoint, launch, lora, random, run_folder, tree
from functron.commands.device import device_type
from functron.config import TrainConfig, load
from functron.errors import Problem, raise_problems
from functron.held_out import HeldOut, check, open_sets, problems_of
from functron.held_out_loss import evaluate, loss_program
from functron.recipe import assemble, placement
from functron.spmd import DATA_AXES, BoundMesh, Mesh
from functron.train import own_part

_PARALLEL = (
    "sequence_parallel", "context", "zigzag", "expert_axes", "schedule", "chunks", "layout",
    "vocab_over_pp", "zero", "gather", "compile", "log_layers_every",
)  # fmt: skip
"""What a run divides among ranks in its own ways, which are not those of another mesh."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Say how well a trained model predicts texts: loss, perplexity and number of tokens of each.

    Attributes:
        run: the run folder that training left, of which the newest checkpoint is read.
        data: sets by name, such as "wiki=PREFIX1 code=PREFIX2", each read as the run reads its
            data; empty: those that the run evaluates itself, or the validation part of its split.
        batches: how many batches of each; 0: all of it, once.
        batch: samples per batch, over all ranks; 0: as many as the run has on a rank at a time.
        averaged: evaluate the average of the parameters that the run keeps
            (--optimizer.ema-decay).
        mesh: axes and sizes, such as pp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        json: print a JSON object instead of lines.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Path]
    data: str = ""
    batches: int = 0
    batch: int = 0
    averaged: bool = False
    mesh: str = ""
    nproc: int = 0
    json: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


def run(arguments: Sequence[str]) -> int:
    """Print the numbers of every set."""
    options = tyro.cli(EvaluateOptions, args=arguments, prog="functron evaluate")
    here = launch.process()
    with launch.mistakes():
        mesh = Mesh.parse(options.mesh)
        config = _configured(options, mesh)
        _check(config, options, mesh, here)
        path = checkpoint.latest(options.run / run_folder.CHECKPOINTS)
        kind = device_type(options.device, options.nproc)
    if here is None and options.nproc:
        return launch.launch(options.nproc, ["-m", "functron", "evaluate", *arguments])
    with launch.mistakes():
        bound, device = launch.join(mesh, here, kind) if here else (mesh, torch.device(kind))
        sets, score = open_sets(config), _scorer(config, bound, device, path)
    found = score(sets)
    launch.leave()
    if here is None or here.rank == 0:
        print(json.dumps(_words(found)) if options.json else "\n".join(_lines(found)), flush=True)
    return 0


def _configured(options: EvaluateOptions, mesh: Mesh) -> TrainConfig:
    """The run, on this mesh and with these sets."""
    config = load(options.run / run_folder.CONFIG)
    rows = config.global_batch // _share(Mesh.parse(config.mesh), config.microbatches)
    parts = {name: getattr(TrainConfig, name) for name in _PARALLEL}
    config = replace(config, mesh=options.mesh, microbatches=mesh["pp"], **parts)
    return replace(
        config,
        out=str(options.run),
        global_batch=options.batch or max(rows, 1) * _share(mesh, mesh["pp"]),
        eval_every=1,
        eval_data=options.data or config.eval_data,
        eval_batches=options.batches,
        eval_averaged=options.averaged,
    )


def _share(mesh: Mesh, microbatches: int) -> int:
    """Into how many parts a batch is cut."""
    return microbatches * math.prod(mesh[axis] for axis in DATA_AXES)


def _check(
    config: TrainConfig, options: EvaluateOptions, mesh: Mesh, here: launch.Process | None
) -> None:
    found = [
        Problem(name, str(value), "at least 0")
        for name in ("batches", "batch", "nproc")
        if (value := getattr(options, name)) < 0
    ]
    share = _share(mesh, config.microbatches)
    if not found and config.global_batch % share:
        fix = f"set it to {-(-config.global_batch // share) * share}"
        found.append(Problem("batch", str(config.global_batch), f"a multiple of {share}", fix))
    processes = here.world_size if here else options.nproc
    if processes and processes != mesh.size:
        got = f"{processes} for a mesh of {mesh.size}"
        found.append(Problem("nproc", got, "one process per rank", f"set it to {mesh.size}"))
    raise_problems("cannot evaluate", [*found, *problems_of(config)])
    check(config)


def _scorer(
    config: TrainConfig, mesh: Mesh | BoundMesh, device: torch.device, path: Path
) -> Callable[[Sequence[HeldOut]], dict]:
    """What evaluates sets with the parameters of a checkpoint, of which others stay on disk."""
    names = list(checkpoint.Checkpoint(path))
    if not lora.has_adapters(names):
        config = replace(config, lora_rank=0)  # a run that has begun from a model without
    recipe = assemble(config, mesh)
    partition = recipe.partition if isinstance(mesh, BoundMesh) else None
    where = placement(config, mesh, partition)
    like = recipe.init(random.key(0).to("meta"), mesh)
    if config.eval_averaged:
        assert recipe.averaged is not None
        state = checkpoint.restore(path, like, placement=where, device=device)
        params = recipe.averaged(state)
    else:
        only = {"params": like.params}
        params = checkpoint.restore(path, only, placement=where, device=device)["params"]
    program = loss_program(config, mesh)

    def batch(held_out: HeldOut, index: int) -> dict[str, torch.Tensor]:
        host = own_part(mesh, lambda part: held_out.batch(index, part))
        return tree.map(lambda leaf: leaf.to(device), host)

    return lambda sets: evaluate(program, params, sets, batch)


def _words(found: dict) -> dict:
    """What JSON has words for."""
    return {
        name: {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        for name, numbers in found.items()
    }


def _lines(found: dict) -> list[str]:
    return [
        f"{name}: loss {numbers['loss']:.4f}, perplexity {numbers['perplexity']:.2f}, "
        f"{numbers['tokens']:,} tokens"
        for name, numbers in found.items()
    ]
