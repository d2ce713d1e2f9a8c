"""Guards of long runs: ranks that hang or are slow.

Each is a section of the configuration with its hook: `watchdog` (a step that hangs, and which rank
is to blame) and `stragglers` (a rank that the others wait for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.guard.stragglers import StragglersConfig
    from functron.apps.guard.watchdog import WatchdogConfig

import_lazily(__name__)
