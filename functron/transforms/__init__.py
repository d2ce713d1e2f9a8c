"""Transforms: functions to functions, on trees, inside or outside a mapped program."""

from functron.transforms.accumulate import accumulate
from functron.transforms.gradient import grad, sync_gradients, value_and_grad, vjp
from functron.transforms.remat import remat
from functron.transforms.scan import scan

__all__ = ["accumulate", "grad", "remat", "scan", "sync_gradients", "value_and_grad", "vjp"]
