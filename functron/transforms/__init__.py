"""Transforms: functions to functions, on trees, inside or outside a mapped program.

`grad`, `value_and_grad`, `vjp`, `jvp`, `linearize`, `jacfwd`, `jacrev` and `hessian` differentiate,
`sync_gradients` adds ranks' shares; `custom_vjp` and `custom_jvp` give a function a derivative of
its own; `vmap` maps over trees; `remat` computes again instead of keeping, by `policies`;
`capture` and `intervene` return and replace named values; `scan` runs layers, `accumulate`
microbatches; `fsdp` and `Gather` gather sharded parameters at use; `mean_gradients` and its
wrappers are what a training step takes its gradients from. `lax` has collectives, loops and
branches by JAX's names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.transforms import lax, policies
    from functron.transforms.batching import vmap
    from functron.transforms.capture import capture, intervene
    from functron.transforms.custom_vjp import custom_jvp, custom_vjp
    from functron.transforms.derivatives import hessian, jacfwd, jacrev, jvp, linearize
    from functron.transforms.gradient import (
        assume_shares,
        grad,
        sync_gradients,
        value_and_grad,
        vjp,
    )
    from functron.transforms.gradient_functions import (
        NESTINGS,
        BoundGradients,
        GradientFunction,
        View,
        accumulated,
        encoded,
        frozen,
        gathered_once,
        informed,
        mean_gradients,
        nesting_table,
        retaken,
        scattered,
        with_targets,
        with_view,
        without_targets,
        wrap_gradients,
    )
    from functron.transforms.implicit import linear_transpose
    from functron.transforms.parameter_gather import Gather, fsdp
    from functron.transforms.policies import checkpoint_name
    from functron.transforms.remat import remat
    from functron.transforms.scan import accumulate, scan

import_lazily(__name__)
