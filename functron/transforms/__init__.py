"""Transforms: functions to functions, on trees, inside or outside a mapped program."""

from functron.transforms import policies
from functron.transforms.accumulate import accumulate
from functron.transforms.gradient import grad, sync_gradients, value_and_grad, vjp
from functron.transforms.policies import checkpoint_name
from functron.transforms.remat import remat
from functron.transforms.scan import scan

__all__ = [
    "accumulate",
    "checkpoint_name",
    "grad",
    "policies",
    "remat",
    "scan",
    "sync_gradients",
    "value_and_grad",
    "vjp",
]
