"""functron: training large transformers as pure functions over sharded pytrees.

A model is a pure function of a tree of parameters; specs say how a mesh splits them; `shard_map`
makes of both a per-rank program with explicit collectives. Simulate it in this process, or bind
the mesh to processes and run it unchanged.
"""

from functron import checkpoint, hub, nn, optim, params, pipeline
from functron.compiler.jit import jit
from functron.core import random, tree
from functron.core.scopes import named_scope
from functron.models import bert, gpt, llava, lora, mamba, t5, vit
from functron.models.generation import generate
from functron.models.options import Hook, ModelOptions
from functron.params import ParamDef, abstract_params, init_params, num_params, param_specs
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
    shard,
    shard_map,
)
from functron.spmd import collectives as lax
from functron.training.step import State, init_state, make_pipelined_step, make_step, state_specs
from functron.transforms import (
    Gather,
    accumulate,
    assume_shares,
    checkpoint_name,
    custom_vjp,
    fsdp,
    grad,
    policies,
    remat,
    scan,
    sync_gradients,
    value_and_grad,
    vjp,
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
    "assume_shares",
    "bert",
    "checkpoint",
    "checkpoint_name",
    "custom_vjp",
    "debug",
    "eval_shape",
    "fsdp",
    "gather",
    "generate",
    "gpt",
    "grad",
    "hub",
    "init_params",
    "init_state",
    "jit",
    "lax",
    "llava",
    "lora",
    "make_pipelined_step",
    "make_step",
    "mamba",
    "named_scope",
    "nn",
    "num_params",
    "optim",
    "param_specs",
    "params",
    "pipeline",
    "policies",
    "random",
    "remat",
    "scan",
    "shard",
    "shard_map",
    "state_specs",
    "sync_gradients",
    "t5",
    "trace",
    "tree",
    "value_and_grad",
    "vit",
    "vjp",
]
