"""Pipelines: schedules as data."""

from functron.pipeline.action import Action
from functron.pipeline.schedule import Schedule, Transfer, place
from functron.pipeline.timeline import Costs, Timeline

__all__ = ["Action", "Costs", "Schedule", "Timeline", "Transfer", "place"]
