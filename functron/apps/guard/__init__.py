"""Guards of long runs: against ranks that hang or are slow, wrong bits, and losses that jump.

Each is a section of the configuration with its hook: `watchdog` (a step that hangs, and which rank
is to blame), `stragglers` (a rank that the others wait for), `corruption` (replicas of the state
that differ), `anomalies` (numbers that are not as they should be) and `restarts` (processes that
are started again, on fewer or more ranks). `faults` puts what all of these are for into a run, for
tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.guard import faults
    from functron.apps.guard.anomalies import AnomalyConfig, attribute_fault
    from functron.apps.guard.corruption import CorruptionError, ReplicasConfig, leaf_hash
    from functron.apps.guard.restarts import (
        Elastic,
        RestartsConfig,
        fitting,
        num_slots,
        pause_seconds,
        read_progress,
        seconds_of,
        settings_of_restarts,
        usable_sizes,
    )
    from functron.apps.guard.stragglers import StragglersConfig
    from functron.apps.guard.watchdog import WatchdogConfig

import_lazily(__name__)
