"""Mixtures of experts: layers of which each token uses a few parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.nn.moe.config import MOE_NEEDS, MoEConfig
    from functron.nn.moe.layer import ExpertActivation, expert_defs, experts, mixture, moe, moe_defs
    from functron.nn.moe.room import (
        ROOMS,
        Fit,
        RowBounds,
        fit_rows,
        mean_nodes,
        needed_room,
        overflowed,
        room_at_least,
    )
    from functron.nn.moe.router import (
        FilledSums,
        Router,
        RouterInput,
        RouterOutput,
        RouterSums,
        Routing,
        auxiliary,
        capacity,
        route,
        router_defs,
        statistics,
        summary,
    )

import_lazily(__name__)
