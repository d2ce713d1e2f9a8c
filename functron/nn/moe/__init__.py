"""Mixtures of experts: layers of which each token uses a few parts."""

from functron.nn.moe.balance import auxiliary
from functron.nn.moe.capacity import capacity
from functron.nn.moe.config import MoEConfig
from functron.nn.moe.router import Routing, route, router_defs
from functron.nn.moe.statistics import RouterSums, statistics, summary

__all__ = [
    "MoEConfig",
    "RouterSums",
    "Routing",
    "auxiliary",
    "capacity",
    "route",
    "router_defs",
    "statistics",
    "summary",
]
