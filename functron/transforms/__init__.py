"""Transforms: functions to functions, on trees, inside or outside a mapped program.

`grad`, `value_and_grad` and `vjp` differentiate, `sync_gradients` adds ranks' shares; `custom_vjp`
gives a function a backward of its own; `remat` computes again instead of keeping, by `policies`;
`scan` runs layers, `accumulate` microbatches; `fsdp` and `Gather` gather sharded parameters at use.
"""

from functron.transforms import policies
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.fsdp import Gather, fsdp
from functron.transforms.gradient import assume_shares, grad, sync_gradients, value_and_grad, vjp
from functron.transforms.policies import checkpoint_name
from functron.transforms.remat import remat
from functron.transforms.scan import accumulate, scan

__all__ = [
    "Gather",
    "accumulate",
    "assume_shares",
    "checkpoint_name",
    "custom_vjp",
    "fsdp",
    "grad",
    "policies",
    "remat",
    "scan",
    "sync_gradients",
    "value_and_grad",
    "vjp",
]
