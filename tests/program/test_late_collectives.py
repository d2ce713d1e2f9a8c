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


def run(bound, *, late, backend, **options):
    """The losses and the last state of some steps, and what became of their collectives."""
    step, state, _ = training(bound, dropout=0.0, **options)
    data = ft.shard(batch(), P(ft.DATA_AXES), bound)
    program = ft.trace(step, donate=0)(state, data)
    compiled = compile_program(program, bound, backend=backend)
    losses = []
    with collectives(late=late) as made:
        for _ in range(STEPS):
            state, metrics = compiled(state, data)
            losses.append(metrics["loss"].item())
    return losses, tree.leaves(state), made


CASES = {
    "fsdp": (Mesh(fsdp=2), "inductor", {}),
    "several": (
        Mesh(dp=2, fsdp=2, cp=2, tp=2), "inductor",
        {"stream": gpt.SEQUENCE_PARALLEL_STREAM, "microbatches": 2},
    ),
    "remat": (Mesh(fsdp=2), "eager", {"remat": "full", "microbatches": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_that_come_at_the_wait_give_the_same_numbers(case, monkeypatch):
    mesh, backend, options = CASES[case]
    with lone(mesh, monkeypatch) as bound:
        losses, leaves, made = run(bound, late=True, backend=backend, **options)
        wanted, expected, _ = run(bound, late=False, backend=backend, **options)
    assert made.started
    assert not made.found, made.found
    assert not made.pending, made.pending
    assert losses == wanted
    for a, b in zip(leaves, expected, strict=True):
        assert torch.equal(a, b)


def test_a_gather_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(neighbours, "_wait", lambda value: value)
    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        losses, _, made = run(bound, late=True, backend="eager")
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
        _, _, made = run(bound, late=True, backend="eager")
    assert made.found
    assert all(written in offence for offence in made.found), made.found
