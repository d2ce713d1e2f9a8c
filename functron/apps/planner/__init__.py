"""Planning of runs: machines as data, estimates of steps, and a search for the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.planner.estimates import (
        PlannedStep,
        StateBytes,
        estimate,
        estimate_memory,
        estimate_step,
    )
    from functron.apps.planner.machines import (
        MACHINES,
        Hardware,
        RankPlacement,
        divide_nodes,
        hardware,
        is_known,
    )
    from functron.apps.planner.measurements import (
        Measurement,
        describe_estimate,
        estimate_run,
        find_this_machine,
        measure,
        report_comparison,
    )
    from functron.apps.planner.rates import HardwareRates, TracedPiece, TracedPieces, trace_pieces
    from functron.apps.planner.recipes import (
        RECIPES,
        list_recipes,
        make_job_script,
        read_recipe,
        shrink_run,
    )
    from functron.apps.planner.report import Estimate, compare_software
    from functron.apps.planner.search import (
        Choices,
        explain_misfit,
        search,
        why,
    )
    from functron.apps.planner.sizing import Target, find_gpus, find_neighbours
    from functron.apps.planner.software import FUNCTRON, OTHERS, Software
    from functron.apps.planner.space import (
        Space,
        parse_settings,
    )
    from functron.apps.planner.trials import (
        Timing,
        check_machine_is_here,
        fit_rates,
        time_steps,
        try_best,
    )

import_lazily(__name__)
