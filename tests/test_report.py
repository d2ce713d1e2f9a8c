"""Reporters that need extras: what they write is read back by the package it is for."""

import pytest

from functron import report

RECORDS = [
    {"step": 1, "loss": 3.5, "grad_norm": 1.25, "mfu": None},
    {"step": 2, "loss": 3.0, "grad_norm": 0.5, "mfu": 0.25},
]


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with report.tensorboard(tmp_path) as write:
        for record in RECORDS:
            write(record)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "grad_norm", "mfu"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 3.5), (2, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("mfu")] == [(2, 0.25)]
