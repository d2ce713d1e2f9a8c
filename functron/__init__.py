"""functron: training large transformers as pure functions over sharded pytrees.

A model is a pure function of a tree of parameters; specs say how a mesh splits them; `shard_map`
makes of both a per-rank program with explicit collectives. Simulate it in this process, or bind
the mesh to processes and run it unchanged.

Names are imported when they are first used, so that ``import functron`` takes no time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

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
    from functron.compiler.jit import jit
    from functron.core import random, tree
    from functron.core.scopes import named_scope
    from functron.models import bert, gpt, llava, lora, mamba, t5, vit
    from functron.models.generation import generate
    from functron.models.options import Hook, ModelOptions
    from functron.partitioning import constrain, from_module, partition
    from functron.program import debug
    from functron.program.program import Program
    from functron.program.trace import eval_shape, trace
    from functron.spmd import (
        CONTEXT_AXES,
        DATA_AXES,
        BoundMesh,
        Mesh,
        P,
        Rules,
        gather,
        params,
        shard,
        shard_map,
    )
    from functron.spmd import collectives as lax
    from functron.spmd.params import ParamDef, abstract_params, init_params, num_params, param_specs
    from functron.training.step import State, grad_norm, init_state, make_step, state_specs
    from functron.transforms import (
        Gather,
        accumulate,
        accumulated,
        assume_shares,
        checkpoint_name,
        custom_vjp,
        encoded,
        frozen,
        fsdp,
        gathered_once,
        grad,
        mean_gradients,
        policies,
        remat,
        scan,
        scattered,
        sync_gradients,
        value_and_grad,
        vjp,
        with_targets,
    )

__version__ = "0.1.0"

__all__ = [
    "CONTEXT_AXES",
    "DATA_AXES",
    "BoundMesh",
    "Gather",
    "Hook",
    "Mesh",
    "ModelOptions",
    "P",
    "ParamDef",
    "Program",
    "Rules",
    "State",
    "abstract_params",
    "accumulate",
    "accumulated",
    "assume_shares",
    "bert",
    "checkpoint",
    "checkpoint_name",
    "constrain",
    "custom_vjp",
    "data",
    "debug",
    "encoded",
    "eval_shape",
    "from_module",
    "frozen",
    "fsdp",
    "gather",
    "gathered_once",
    "generate",
    "gpt",
    "grad",
    "grad_norm",
    "hub",
    "init_params",
    "init_state",
    "jit",
    "lax",
    "llava",
    "lora",
    "make_step",
    "mamba",
    "mean_gradients",
    "models",
    "named_scope",
    "nn",
    "num_params",
    "ops",
    "optim",
    "param_specs",
    "params",
    "partition",
    "pipeline",
    "plan",
    "policies",
    "precision",
    "random",
    "remat",
    "scan",
    "scattered",
    "shard",
    "shard_map",
    "spmd",
    "state_specs",
    "sync_gradients",
    "t5",
    "trace",
    "training",
    "transforms",
    "tree",
    "value_and_grad",
    "vit",
    "vjp",
    "with_targets",
]

_MODULES: Mapping[str, str] = MappingProxyType({
    name: f"functron{package}.{name}"
    for package, names in {
        "": "checkpoint data hub models nn ops optim pipeline precision spmd training "
        "transforms",
        ".core": "random tree",
        ".models": "bert gpt llava lora mamba t5 vit",
        ".program": "debug",
        ".spmd": "params",
        ".transforms": "policies",
    }.items()
    for name in names.split()
} | {"lax": "functron.spmd.collectives", "plan": "functron.apps.planner"})  # fmt: skip
"""Public names of modules, and the modules."""

_MEMBERS: Mapping[str, str] = MappingProxyType({
    name: f"functron.{module}"
    for module, names in {
        "compiler.jit": "jit",
        "core.scopes": "named_scope",
        "models.generation": "generate",
        "models.options": "Hook ModelOptions",
        "spmd.params": "ParamDef abstract_params init_params num_params param_specs",
        "partitioning": "constrain from_module partition",
        "program.program": "Program",
        "program.trace": "eval_shape trace",
        "spmd": "CONTEXT_AXES DATA_AXES BoundMesh Mesh P Rules gather shard shard_map",
        "training.step": "State grad_norm init_state make_step state_specs",
        "transforms": "Gather accumulate accumulated assume_shares checkpoint_name custom_vjp "
        "encoded frozen fsdp gathered_once grad mean_gradients remat scan scattered sync_gradients "
        "value_and_grad vjp with_targets",
    }.items()
    for name in names.split()
})  # fmt: skip
"""Public names of what is in modules, and the modules."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _MEMBERS:
        value = getattr(importlib.import_module(_MEMBERS[name]), name)
    else:
        raise AttributeError(f"module 'functron' has no attribute {name!r}")
    globals()[name] = value  # it is not asked for again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
