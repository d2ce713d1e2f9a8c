"""Transforms: functions to functions, on trees, inside or outside a mapped program.

`grad`, `value_and_grad` and `vjp` differentiate, `sync_gradients` adds ranks' shares; `custom_vjp`
gives a function a backward of its own; `remat` computes again instead of keeping, by `policies`;
`scan` runs layers, `accumulate` microbatches; `fsdp` and `Gather` gather sharded parameters at use;
`mean_gradients` and its wrappers are what a training step takes its gradients from.
"""

from functron.transforms import policies
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.fsdp import Gather, fsdp
from functron.transforms.gradient import assume_shares, grad, sync_gradients, value_and_grad, vjp
from functron.transforms.gradient_functions import (
    NESTINGS,
    BoundGradients,
    GradientFunction,
    View,
    accumulated,
    encoded,
    frozen,
    gathered_once,
    mean_gradients,
    nesting_table,
    scattered,
    with_targets,
    with_view,
    without_targets,
    wrap_gradients,
)
from functron.transforms.policies import checkpoint_name
from functron.transforms.remat import remat
from functron.transforms.scan import accumulate, scan

__all__ = [
    "NESTINGS",
    "BoundGradients",
    "Gather",
    "GradientFunction",
    "View",
    "accumulate",
    "accumulated",
    "assume_shares",
    "checkpoint_name",
    "custom_vjp",
    "encoded",
    "frozen",
    "fsdp",
    "gathered_once",
    "grad",
    "mean_gradients",
    "nesting_table",
    "policies",
    "remat",
    "scan",
    "scattered",
    "sync_gradients",
    "value_and_grad",
    "vjp",
    "with_targets",
    "with_view",
    "without_targets",
    "wrap_gradients",
]
