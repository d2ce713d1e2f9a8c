"""functron: training large transformers as pure functions over sharded pytrees.

A model is a pure function of a tree of parameters; specs say how a mesh splits them; `shard_map`
makes of both a per-rank program with explicit collectives. Simulate it in this process, or bind
the mesh to processes and run it unchanged.

Names are imported when they are first used, so that ``import functron`` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron import (
        checkpoint,
        data,
        hub,
        models,
        nn,
        ops,
        optim,
        pipeline,
        precision,
        spmd,
        training,
        transforms,
    )
    from functron.apps import planner as plan
    from functron.apps.zoo import bert, llava, mamba, t5, vit
    from functron.compiler.jit import jit
    from functron.core import random, tree
    from functron.core.scopes import named_scope
    from functron.models import gpt, lora
    from functron.models.generation import generate
    from functron.models.options import Hook, ModelOptions
    from functron.partitioning import constrain, from_module, partition
    from functron.program import debug
    from functron.program.displays import show, visualize_sharding
    from functron.program.trace import Program, eval_shape, trace
    from functron.program.types import typeof
    from functron.spmd import (
        CONTEXT_AXES,
        DATA_AXES,
        BoundMesh,
        Mesh,
        P,
        Rules,
        Uneven,
        gather,
        params,
        shard,
        shard_map,
    )
    from functron.spmd.params import ParamDef, abstract_params, init_params, num_params, param_specs
    from functron.training import viz
    from functron.training.step import State, grad_norm, init_state, make_step, state_specs
    from functron.transforms import (
        Gather,
        accumulate,
        accumulated,
        assume_shares,
        capture,
        checkpoint_name,
        custom_jvp,
        custom_vjp,
        encoded,
        frozen,
        fsdp,
        gathered_once,
        grad,
        hessian,
        intervene,
        jacfwd,
        jacrev,
        jvp,
        lax,
        linear_transpose,
        linearize,
        mean_gradients,
        policies,
        remat,
        scan,
        scattered,
        sync_gradients,
        value_and_grad,
        vjp,
        vmap,
        with_targets,
    )

__version__ = "0.1.0"

import_lazily(__name__)
