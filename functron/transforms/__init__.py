"""Transforms: functions to functions, on trees, inside or outside a mapped program."""

from functron.transforms import policies
from functron.transforms.accumulate import accumulate
from functron.transforms.fsdp import Gather, fsdp
from functron.transforms.gradient import grad, sync_gradients, value_and_grad, vjp
from functron.transforms.policies import checkpoint_name
from functron.transforms.remat import remat
from functron.transforms.scan import scan

__all__ = [
    "Gather",
    "accumulate",
    "checkpoint_name",
    "fsdp",
    "grad",
    "policies",
    "remat",
    "scan",
    "sync_gradients",
    "value_and_grad",
    "vjp",
]
