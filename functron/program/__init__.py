"""Programs as values: one rank's whole computation, traced, printed, checked and costed."""
