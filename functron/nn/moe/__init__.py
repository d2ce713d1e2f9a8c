"""Mixtures of experts: layers of which each token uses a few parts."""

from functron.nn.moe.config import MOE_NEEDS, MoEConfig
from functron.nn.moe.layer import ExpertActivation, expert_defs, experts, mixture, moe, moe_defs
from functron.nn.moe.router import (
    Router,
    RouterInput,
    RouterOutput,
    RouterSums,
    Routing,
    auxiliary,
    capacity,
    route,
    router_defs,
    statistics,
    summary,
)

__all__ = [
    "MOE_NEEDS",
    "ExpertActivation",
    "MoEConfig",
    "Router",
    "RouterInput",
    "RouterOutput",
    "RouterSums",
    "Routing",
    "auxiliary",
    "capacity",
    "expert_defs",
    "experts",
    "mixture",
    "moe",
    "moe_defs",
    "route",
    "router_defs",
    "statistics",
    "summary",
]
