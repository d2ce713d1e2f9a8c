"""Plans before runs: machines as data, the time and memory of a step, and the fastest one."""

from functron.plan.estimate import (
    Estimate,
    StateBytes,
    Step,
    estimate,
    step_estimate,
    step_memory,
)
from functron.plan.hardware import MACHINES, Hardware, Placement, hardware
from functron.plan.pieces import Piece, Pieces, pieces
from functron.plan.rates import FUNCTRON, HardwareRates, Software
from functron.plan.search import Candidate, Space, search, why

__all__ = [
    "FUNCTRON",
    "MACHINES",
    "Candidate",
    "Estimate",
    "Hardware",
    "HardwareRates",
    "Piece",
    "Pieces",
    "Placement",
    "Software",
    "Space",
    "StateBytes",
    "Step",
    "estimate",
    "hardware",
    "pieces",
    "search",
    "step_estimate",
    "step_memory",
    "why",
]
