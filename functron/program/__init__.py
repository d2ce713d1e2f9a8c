"""Programs as values: one rank's whole computation, traced, printed, checked and costed.

`trace` makes a `trace.Program` of the data in `equations`; `text` prints it and `parse` reads it
again; `interpreter` runs it; `check`, `cost`, `memory` and `timeline` are its analyses; `overlap`
is the order in which it is issued, with communication under computation; `debug` looks into
programs as they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.program.timeline import ProgramTimeline, Rates

import_lazily(__name__)
