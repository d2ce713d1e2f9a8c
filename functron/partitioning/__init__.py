"""Partitioning: functions of whole values, and annotations, to the per-rank program of any mesh.

`partition` makes the program: it traces the function in `global_view`, finds where values
lie (`propagate`, by the `rules` of operations and the `placement`s that they allow), and runs
equations on `shards`. `module` makes functions of modules, and `search` finds specs of parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.partitioning.global_view import constrain
    from functron.partitioning.labels import PartitionRule, pointwise, product
    from functron.partitioning.module import from_module
    from functron.partitioning.partition import Partitioned, partition
    from functron.partitioning.placement import Digit, ValuePlacement
    from functron.partitioning.rules import reduction, whole
    from functron.partitioning.search import FoundSpecs, search
    from functron.partitioning.sections import LocalSections, cut_layers

import_lazily(__name__)
