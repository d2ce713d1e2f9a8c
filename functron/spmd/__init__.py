"""Meshes, specs, collectives and shard_map: per-rank programs, simulated or distributed.

`Mesh` names the axes and `P` splits values over them; `shard_map` runs a per-rank program on all
ranks, which communicate by `collectives` (``functron.lax``). Below these: `axes` (what an axis name
means where a program runs), `primitives` (collectives with derivatives and vmap rules), `simulate`
(all ranks in one process), `shared_memory` (collectives through the memory of one machine),
`flight` (what a process entered and left) and `ragged` (all-to-all of as many rows as there are).
`params` says what parameters are, before any exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.spmd import collectives
    from functron.spmd.mesh import (
        CONTEXT_AXES,
        DATA_AXES,
        FSDP_AXES,
        STANDARD_AXES,
        BoundMesh,
        Mesh,
    )
    from functron.spmd.shard_map import gather, shard, shard_map
    from functron.spmd.spec import P, Rules, Uneven, local_shape, offsets, spec_axes

import_lazily(__name__)
