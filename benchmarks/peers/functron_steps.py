"""functron's training steps: on any mesh, eager, compiled, simulated or pipelined.

Every maker builds the program of this process (or rank) and returns ``step() -> loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from peers.models import LEARNING_RATE, SEED, WEIGHT_DECAY, Step, layout
from torch import Tensor

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, optim, random
from functron.pipeline import Partition, Pipeline, Schedule
from functron.transforms import Gather


def training(
    c: gpt.GPTConfig,
    mesh: Mesh | BoundMesh,
    *,
    stream: P = gpt.STREAM,
    regather: bool = True,
    masters: bool = False,
    device: str = "cpu",
) -> tuple[Callable, ft.State]:
    """functron's eager ``(state, batch) -> (state, metrics)`` on `mesh`, and the first state.

    With `masters` the optimizer updates float32 copies of the parameters.
    """
    defs = gpt.defs(c)
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    config = optim.OptimizerConfig(
        b2=0.999, weight_decay=WEIGHT_DECAY, clip_norm=0.0, fp32_masters=masters
    )
    optimizer = optim.make_optimizer(config, LEARNING_RATE, mask=None, defs=defs)
    key = random.key(SEED, device=device)
    state = ft.init_state(key, defs, specs, optimizer, mesh, masters=masters)
    options = ft.ModelOptions(stream=stream)
    if "fsdp" in mesh.shape:
        options = replace(options, gather=Gather(specs, regather=regather))

    def loss(params, batch, key):
        return gpt.loss(c, params, batch, options, key=key)

    sharing = ft.mean_gradients(loss, gpt.num_targets)
    return ft.make_step(sharing, optimizer, mesh, specs, metrics=()), state


def mesh_step(
    c: gpt.GPTConfig,
    batch: dict,
    mesh: Mesh | BoundMesh,
    *,
    compile_with: Callable | None = None,
    **options: Any,
) -> Step:
    """A step on `mesh`, eager or as `compile_with` makes it, on this process's part of the batch.

    `options` are those of `training`.
    """
    train, state = training(c, mesh, **options)
    if compile_with is not None:
        train = compile_with(train)
    if isinstance(mesh, BoundMesh):
        batch = ft.shard(batch, P(ft.DATA_AXES), mesh)
    return _stepping(train, state, batch)


def _stepping(train: Callable, state: ft.State, batch: dict) -> Step:
    def step() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return metrics["loss"].item()

    return step


def named_step(words: list[str], c: gpt.GPTConfig, batch: dict) -> Step:
    """The step that words name: an axis, "sp", "keep", "eager", "simulated", "unrolled", "zb-h1".

    Processes send by memory that they share, and by gloo alone with "sockets". A pipeline's
    backward is whole with "whole"; else cotangents leave before weights' gradients are computed.
    With "bf16" parameters are in bfloat16 and have float32 masters.
    """
    if "pp" in words:
        num_microbatches = batch["tokens"].shape[0]
        if "zb-h1" in words:
            schedule = ft.pipeline.make("zb-h1", 2, num_microbatches)
        else:
            schedule = ft.pipeline.make("1f1b", 2, num_microbatches, split="whole" not in words)
        compile_with = None if "eager" in words else {}
        return pipelined_step(c, batch, schedule, compile_with, "balanced" in words)[0]
    axis = next((word for word in words if word in ("dp", "fsdp", "tp")), None)
    shared = "sockets" not in words
    mesh = Mesh(**{axis: 2}).bind(shared_memory=shared) if axis else Mesh()
    if "simulated" in words:
        mesh = Mesh(dp=2, tp=2)
    options: dict[str, Any] = {"regather": "keep" not in words}
    if "bf16" in words:
        c, options["masters"] = replace(c, dtype="bfloat16"), True
    if "sp" in words:
        options["stream"] = gpt.SEQUENCE_PARALLEL_STREAM
    if not {"eager", "simulated"} & {*words}:
        unroll = {"unroll": True} if "unrolled" in words else {}
        options["compile_with"] = partial(ft.jit, donate=(0,), **unroll)
    return mesh_step(c, batch, mesh, **options)


def pipelined_step(
    c: gpt.GPTConfig,
    batch: dict,
    schedule: Schedule,
    compile_with: Mapping[str, Any] | None,
    balanced: bool = False,
) -> tuple[Step, Pipeline, list[Tensor]]:
    """A step under `schedule`, its stages and update compiled or not.

    Also the pipeline, for what can be observed of it, and this rank's parameters.
    """
    mesh = Mesh(pp=schedule.num_ranks).bind()
    stages_of = layout(c, schedule.num_stages, balanced=balanced)
    partition = Partition(stages_of, schedule.pipes, gpt.uses(c))
    defs = partition.local_defs(gpt.defs(c), mesh.coordinate["pp"])
    specs = ft.param_specs(defs, gpt.rules(c, mesh))
    optimizer = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    state = ft.init_state(random.key(SEED), defs, specs, optimizer, mesh)

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(c, part, params, x, batch)
        return y / total if part.loss else y

    stages = ft.pipeline.pipelined(stage, partition, schedule, compile=compile_with)
    sharing = ft.pipeline.gradients(stages, gpt.num_targets)
    train = ft.make_step(sharing, optimizer, mesh, specs, metrics=())
    return _stepping(train, state, batch), stages, ft.tree.leaves(state.params)
