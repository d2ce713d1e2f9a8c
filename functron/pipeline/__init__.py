"""Pipelines: schedules as data, models divided into stages, and one executor for all of them.

A `Schedule` is a table of the actions of ranks, tick by tick, a `Layout` gives every stage its
layers, and a `Partition` every rank its parameters. `pipelined` runs them, with the loss and the
gradients of the model without a pipeline. ::

    schedule = pipeline.make("zb-h1", num_ranks=4, num_microbatches=8)
    layout = pipeline.even_layout(schedule.num_stages, num_layers=32)
    uses = {"embed": "E", "blocks": "t", "norm": "L"}
    stages = pipeline.pipelined(stage, pipeline.Partition(layout, schedule.pipes, uses), schedule)
    loss, gradients = stages.value_and_grad(params, batch)  # in shard_map(..., stages="pp")

``print(schedule)`` shows the table, ``schedule.gantt()`` draws it, and ``schedule.simulate(costs)``
is its `Timeline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.pipeline.execute import Pipeline, gradients, pipelined
    from functron.pipeline.partition import (
        Layout,
        Part,
        Partition,
        balanced_layout,
        collect,
        even_layout,
        format_layout,
        parse_layout,
        whole,
    )
    from functron.pipeline.registry import NAMES, make
    from functron.pipeline.schedule import Schedule, Transfer, place
    from functron.pipeline.timeline import Action, Costs, Timeline

import_lazily(__name__)
