"""Sums taken into scans: the same numbers, no stack of what is added, rows updated in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import tree
from functron.compiler import compile as compile_program
from functron.compiler.segments import recompute_slices
from functron.pipeline.cut import sink_sums
from functron.program.equations import Scan
from functron.program.interpreter import run_in_lockstep
from functron.program.trace import trace

LAYERS = 3


def args(dtype=torch.float64, sums=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"w": randn(LAYERS, 4, 4).to(dtype), "b": randn(LAYERS, 4).to(dtype)}
    totals = tree.map(lambda leaf: randn(*leaf.shape).to(sums), weights)
    return weights, randn(5, 4).to(dtype), totals


def step(weights, x, totals):
    def block(x, layer):
        return torch.tanh(x @ layer["w"] + layer["b"]), None

    def loss(weights):
        return ft.scan(block, x, weights)[0].square().sum()

    grads = ft.grad(loss)(weights)
    return tree.map(lambda total, g: total + g.to(total.dtype), totals, grads)


def sunk(fn, given, donate=()):
    program = trace(fn, donate=donate)(*given)
    totals = [i.var for i in program.inputs if i.path.startswith("2/")]
    return program, sink_sums(program, totals)


def adds(program) -> int:
    """Additions to whole stacks."""
    return sum(
        e.name == "add" and e.outputs[0].shape[:1] == (LAYERS,) for e in program.block.equations
    )


@pytest.mark.parametrize(("dtype", "sums"), [
    (torch.float64, torch.float64), (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_rows_are_summed_inside(dtype, sums):
    given = args(dtype, sums)
    whole, program = sunk(step, given)
    assert (adds(whole), adds(program)) == (2, 0)
    got, want = run_in_lockstep(program, *given), run_in_lockstep(whole, *given)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True))
    assert tree.leaves(got)[0].dtype == sums


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_donated_sums_are_updated_in_place(backend):
    given = args()
    want = step(*given)
    _, program = sunk(step, given, donate=2)
    run = compile_program(program, backend=backend)
    memory = [leaf.data_ptr() for leaf in tree.leaves(given[2])]
    got = run(*given)
    assert [leaf.data_ptr() for leaf in tree.leaves(got)] == memory
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sums_that_something_else_reads_stay():
    def also(weights, x, totals):
        new = step(weights, x, totals)
        return new, totals["w"].sum()

    given = args()
    whole, program = sunk(also, given)
    assert (adds(whole), adds(program)) == (2, 1)
    got, want = run_in_lockstep(program, *given), run_in_lockstep(whole, *given)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True))


def test_a_stack_that_something_else_reads_stays():
    def also(weights, x, totals):
        def block(x, layer):
            return torch.tanh(x @ layer["w"]), x

        _, ys = ft.scan(block, x, weights)
        return totals + ys, ys.sum()

    weights, x, _ = args()
    program = trace(also)(weights, x, torch.zeros(LAYERS, 5, 4, dtype=torch.float64))
    totals = [i.var for i in program.inputs if i.path == "2"]
    assert sink_sums(program, totals).block.equations == program.block.equations
    scans = [e.op for e in program.block.equations if isinstance(e.op, Scan)]
    assert len(scans) == 1


@pytest.mark.parametrize("returned", [False, True], ids=["handed", "returned"])
def test_backward_makes_again_what_is_cheap(returned):
    """silu(gate) is made again of gate, whether or not the caller is given it as well."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(LAYERS, 4, 4, generator=generator, dtype=torch.float64)
        for name in ("gate", "up", "down")
    }
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)

    def block(x, layer):
        active = torch.nn.functional.silu((x @ layer["gate"]).view(5, 4))
        return x + (active * (x @ layer["up"])) @ layer["down"], active if returned else None

    def loss(weights, x):
        y, actives = ft.scan(block, x, weights)
        return y.square().sum(), actives

    step = ft.grad(loss, has_aux=True)
    program = trace(step)(weights, x)
    lean = replace(program, block=recompute_slices(program.block))
    before, after = (
        [len(e.args) for e in p.block.equations if isinstance(e.op, Scan)] for p in (program, lean)
    )
    assert after == [before[0], before[1] - 1]
    got = run_in_lockstep(lean, weights, x)
    for one, other in zip(
        tree.leaves(got), tree.leaves(run_in_lockstep(program, weights, x)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    leaves, y = tree.map(lambda w: w.clone().requires_grad_(), weights), x
    for i in range(LAYERS):
        y, _ = block(y, tree.map(lambda w, i=i: w[i], leaves))
    y.square().sum().backward()
    for one, leaf in zip(tree.leaves(got[0]), tree.leaves(leaves), strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-12, atol=1e-12)
