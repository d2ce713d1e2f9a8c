"""A mesh whose ranks are processes that a notebook starts, calls, interrupts and ends.

`session` is the notebook's side: `StartedMesh`, the functions that it maps over its ranks, and the
`Handle`s that they return. `worker` is the program of a rank. `shipping` is what travels between
them: functions and classes by value, as they are now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.apps.notebook.session import Handle, RankError, RemoteFunction, StartedMesh, start

import_lazily(__name__)
