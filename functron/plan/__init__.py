"""Plans before runs: machines as data, and the time and memory that a step takes on them."""

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

__all__ = [
    "FUNCTRON",
    "MACHINES",
    "Estimate",
    "Hardware",
    "HardwareRates",
    "Piece",
    "Pieces",
    "Placement",
    "Software",
    "StateBytes",
    "Step",
    "estimate",
    "hardware",
    "pieces",
    "step_estimate",
    "step_memory",
]
