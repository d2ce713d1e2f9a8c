"""Programs as values: one rank's whole computation, traced, printed, checked and costed.

`trace` makes a `program.Program` of the data in `equations`; `text` prints it and `parse` reads it
again; `check`, `cost` and `memory` are its analyses; `debug` looks into programs as they run.
"""
