"""``functron.lax``: collectives, control flow and operations of per-rank programs, by JAX's names.

Collectives are in `functron.spmd.collectives`, branches and loops in
`functron.transforms.control_flow` and `functron.transforms.scan`, scans of associative functions in
`functron.transforms.associative_scan`, slices at indices known when a program runs in
`functron.transforms.indexing`, operations that torch lacks in `functron.transforms.lax_operations`,
solutions of equations in `functron.transforms.implicit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.spmd.collectives import (
        all_gather,
        all_to_all,
        assume_replicated,
        axis_index,
        axis_size,
        global_index,
        pbroadcast,
        pmax,
        pmean,
        pmin,
        ppermute,
        psum,
        psum_scatter,
        ragged_all_to_all,
        stop_gradient,
    )
    from functron.spmd.spec import real_entries
    from functron.transforms.associative_scan import associative_scan
    from functron.transforms.control_flow import (
        cond,
        fori_loop,
        map,  # noqa: A004  (as jax.lax.map)
        select_n,
        switch,
        while_loop,
    )
    from functron.transforms.implicit import custom_linear_solve, custom_root
    from functron.transforms.indexing import (
        dynamic_index_in_dim,
        dynamic_slice,
        dynamic_slice_in_dim,
        dynamic_update_index_in_dim,
        dynamic_update_slice,
        dynamic_update_slice_in_dim,
    )
    from functron.transforms.lax_operations import (
        clamp,
        cumlogsumexp,
        cummax,
        cummin,
        cumprod,
        cumsum,
        optimization_barrier,
        reduce_precision,
    )
    from functron.transforms.scan import scan

import_lazily(__name__)
