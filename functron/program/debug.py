"""``functron.debug``: looking into programs and values, by JAX's names.

Callbacks, prints and checks of programs that run are in `functron.program.callbacks`; the search
for faults (wrong derivatives, the first NaN) in `functron.program.faults`, and for keys that are
used twice in `functron.program.key_reuse`; tables of trees and drawings of specs in
`functron.program.displays`; types of values in `functron.program.types`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.core.errors import full_tracebacks
    from functron.program.callbacks import breakpoint, callback, check, no_checks, print
    from functron.program.displays import show, visualize_sharding
    from functron.program.faults import check_grads, nans
    from functron.program.key_reuse import check_key_reuse
    from functron.program.types import check_types, typed
    from functron.spmd.donation import snapshot_donated

import_lazily(__name__)
