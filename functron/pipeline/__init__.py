"""Pipelines: schedules as data."""

from functron.pipeline.action import Action
from functron.pipeline.registry import NAMES, make
from functron.pipeline.schedule import Schedule, Transfer, place
from functron.pipeline.timeline import Costs, Timeline

__all__ = ["NAMES", "Action", "Costs", "Schedule", "Timeline", "Transfer", "make", "place"]
