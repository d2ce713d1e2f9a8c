"""Pipelines: schedules as data."""

from functron.pipeline.action import Action
from functron.pipeline.schedule import Schedule, Transfer, place

__all__ = ["Action", "Schedule", "Transfer", "place"]
