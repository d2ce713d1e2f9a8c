"""Precision: the dtypes that a run computes, sums, keeps and sends in, as one named value."""

from functron.precision.policy import POLICIES, Policy

__all__ = ["POLICIES", "Policy"]
