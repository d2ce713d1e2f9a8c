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
from functron.plan.search import Candidate, Found, Model, Ranked, Space, search, why

__all__ = [
    "FUNCTRON",
    "MACHINES",
    "Candidate",
    "Estimate",
    "Found",
    "Hardware",
    "HardwareRates",
    "Model",
    "Piece",
    "Pieces",
    "Placement",
    "Ranked",
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
