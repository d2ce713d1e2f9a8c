"""Programs as values: one rank's whole computation, traced, printed, checked and costed.

`trace` makes a `program.Program` of the data in `equations`; `text` prints it and `parse` reads it
again; `check`, `cost`, `memory` and `timeline` are its analyses; `order` is that in which it is
issued; `debug` looks into programs as they run.
"""

from functron.program.timeline import ProgramTimeline, Rates

__all__ = ["ProgramTimeline", "Rates"]
