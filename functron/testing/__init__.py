"""What tests of runs need: faults as values, put into a run on purpose."""

from functron.testing import faults

__all__ = ["faults"]
