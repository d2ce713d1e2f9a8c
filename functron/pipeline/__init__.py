"""Pipelines: schedules as data, models divided into stages, and one executor for all of it."""

from functron.pipeline.execute import Pipeline, pipelined
from functron.pipeline.layout import (
    Layout,
    Part,
    balanced_layout,
    even_layout,
    format_layout,
    parse_layout,
    whole,
)
from functron.pipeline.partition import Partition, collect
from functron.pipeline.registry import NAMES, make
from functron.pipeline.schedule import Schedule, Transfer, place
from functron.pipeline.timeline import Action, Costs, Timeline

__all__ = [
    "NAMES",
    "Action",
    "Costs",
    "Layout",
    "Part",
    "Partition",
    "Pipeline",
    "Schedule",
    "Timeline",
    "Transfer",
    "balanced_layout",
    "collect",
    "even_layout",
    "format_layout",
    "make",
    "parse_layout",
    "pipelined",
    "place",
    "whole",
]
