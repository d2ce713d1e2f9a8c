"""Training runs: a configuration, what follows of it on a mesh, steps, records and folders.

Names are imported when they are first used: a command that reads run folders needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.training import run_folder
    from functron.training.config import TrainConfig, configure, load
    from functron.training.costs import step_report
    from functron.training.loop import (
        FiniteHook,
        LoopHook,
        Meter,
        every,
        loop,
        progress,
        record_to,
        stop_on_signals,
    )
    from functron.training.records import compare
    from functron.training.run import prepare
    from functron.training.run_folder import with_changed_batch
    from functron.training.setup import RunSetup, make_setup
    from functron.training.train import train

import_lazily(__name__)
