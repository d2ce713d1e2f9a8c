"""Programs start collectives early and wait late: never too late, never with memory that changes."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, tree
from functron.program import neighbours
from functron.program.compile import compile as compile_program
from tests.program.late_collectives import collectives, lone
from tests.program.test_prefetch import batch, training

STEPS = 2


def runs(bound, backend, *lates, **options):
    """Of each run of some steps its losses, its last state and what became of its collectives."""
    step, state, _ = training(bound, dropout=0.0, **options)
    data = ft.shard(batch(), P(ft.DATA_AXES), bound)
    compiled = compile_program(ft.trace(step, donate=0)(state, data), bound, backend=backend)
    for late in lates:
        now, losses = tree.map(torch.clone, state), []
        with collectives(late=late) as made:
            for _ in range(STEPS):
                now, metrics = compiled(now, data)
                losses.append(metrics["loss"].item())
        yield losses, tree.leaves(now), made


CASES = {
    "fsdp": (Mesh(fsdp=2), "inductor", {}),
    "remat": (Mesh(fsdp=2), "eager", {"remat": "full", "microbatches": 2}),
    "several": (
        Mesh(dp=2, fsdp=2, tp=2), "eager", {"stream": gpt.SEQUENCE_PARALLEL_STREAM},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_that_come_at_the_wait_give_the_same_numbers(case, monkeypatch):
    mesh, backend, options = CASES[case]
    with lone(mesh, monkeypatch) as bound:
        late, at_once = runs(bound, backend, True, False, **options)
    (losses, leaves, made), (wanted, expected, _) = late, at_once
    assert made.started
    assert not made.found, made.found
    assert not made.pending, made.pending
    assert losses == wanted
    for a, b in zip(leaves, expected, strict=True):
        assert torch.equal(a, b)


def test_a_gather_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(neighbours, "_wait", lambda value: value)
    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        ((losses, _, made),) = runs(bound, "eager", True)
    assert made.pending
    assert any(loss != loss for loss in losses)


@pytest.mark.parametrize("written", ["operand", "result"])
def test_memory_that_changes_under_a_collective_is_found(written, monkeypatch):
    start = neighbours._gather

    def planted(equation, groups):
        original = start(equation, groups)

        def begin(x):
            x = x.clone()
            made = original(x)
            (x if written == "operand" else made).zero_()
            return made

        return begin

    monkeypatch.setattr(neighbours, "_gather", planted)
    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        ((_, _, made),) = runs(bound, "eager", True)
    assert made.found
    assert all(written in offence for offence in made.found), made.found
