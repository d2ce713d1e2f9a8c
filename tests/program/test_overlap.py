"""The order of issue: what starts early and waits late, in the programs that are compiled."""

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, random, tree
from functron.compiler.lower import graph_module
from functron.compiler.segments import procedure
from functron.program.equations import Scan
from functron.program.overlap import divide_sequences, order_equations, sink_rank_sums
from functron.program.text import axis_of
from functron.program.timeline import Rates
from functron.training.config import configure
from functron.training.setup import make_setup
from tests.compiler.test_prefetch import CONFIG, batch

RATES = Rates(flops=1e9, memory=1e10, links=2e8, latency=1e-6)


def trained(mesh: str, **options):
    """The plan of a training step of a small decoder."""
    config = configure(gpt=CONFIG, mesh=mesh, seq=8, **{"global_batch": 8, **options})
    return make_setup(config, Mesh.parse(mesh))


def outside(block, axis: str) -> int:
    """The bytes that are summed over an axis outside of scans."""
    return sum(
        e.operands[0].nbytes
        for e in block.equations
        if axis_of(e) == axis and e.name in ("psum", "psum_scatter")
    )


def assert_hides(program, axis: str, most: float) -> None:
    """Exposed seconds after, as a part of those before: of 3 layers only one is exposed."""
    before = program.timeline(RATES, eager=True)
    spent = [RATES(e) * n for e, n in program.block.walk() if axis_of(e) == axis]
    assert before.exposed[axis] == pytest.approx(sum(spent))
    after = program.timeline(RATES)
    assert after.exposed[axis] < most * before.exposed[axis]
    assert after.total < before.total
    assert after.total == pytest.approx(after.busy["compute"] + sum(after.exposed.values()))


@pytest.mark.parametrize(
    ("mesh", "options", "most"),
    [
        # 3 divides no width: they are padded; parameters are gathered at the end
        ("dp=3", {"zero": 1, "global_batch": 9}, 0.6),
        ("dp=2,tp=2", {"sequence_parallel": True, "microbatches": 2}, 0.45),  # behind the last one
    ],
    ids=str,
)
def test_sums_that_scans_compute_are_the_same_numbers(mesh, options, most):
    made = trained(mesh, **options)
    state, data = made.init(random.key(1)), batch(options.get("global_batch", 8))
    program = ft.trace(made.step)(state, data)
    moved = replace(program, block=sink_rank_sums(program.block))
    layers = [e for e in moved.block.equations if isinstance(e.op, Scan)][-1]
    inside = [e.name for e in layers.op.body.equations if axis_of(e) == "dp"]
    assert outside(moved.block, "dp") < 0.6 * outside(program.block, "dp")
    # what is small travels together; what tp splits, and what it does not
    assert inside == (["psum_scatter"] * 9 if mesh == "dp=3" else ["psum"] * 2)
    for a, b in zip(
        tree.leaves(program(state, data)), tree.leaves(moved(state, data)), strict=True
    ):
        assert torch.equal(a, b)
    assert_hides(program, "dp", most)


@pytest.mark.parametrize(
    ("mesh", "options", "most"),
    [
        ("dp=2", {}, 0.45),
        ("dp=2", {"zero": 2}, 0.45),
        ("fsdp=2", {}, 0.45),
        ("dp=2,fsdp=2", {}, 0.45),  # of sums over dp of what fsdp has scattered
        ("tp=2", {}, 0.9),  # each layer waits for what it sums forward
    ],
    ids=str,
)
def test_layers_hide_their_communication(mesh, options, most):
    assert_hides(trained(mesh, **options).program(), mesh.partition("=")[0], most)


def test_kernels_start_and_wait_in_the_order_that_the_timeline_reads():
    def f(a, b):
        return a @ a, lax.psum(a @ b, "tp") @ b, b @ b

    mapped = ft.shard_map(f, Mesh(tp=2), P(), P(), check=False)
    program = ft.trace(mapped)(torch.ones(4, 4), torch.ones(4, 4))
    names = [e.name for e in order_equations(program.block.equations)]
    assert names == ["mm", "psum", "mm", "mm", "mm"]
    (kernel,) = procedure(program.block, program.block.outputs).kernels()

    def lowered(overlap):
        nodes = graph_module(kernel, {"tp": "tp"}, overlap=overlap).graph.nodes
        found = [n.target.name().split("::")[1] for n in nodes if n.op == "call_function"]
        return [name for name in found if not name.startswith("contiguous")]

    assert lowered(True) == ["mm", "all_reduce", "mm", "mm", "wait_tensor", "mm"]
    assert lowered(False) == ["mm", "mm", "all_reduce", "wait_tensor", "mm", "mm"]


def test_products_beside_gathers_of_sequences_in_parts():
    """Numbers are the same but for rounding, and what tp sends is exposed for less long."""
    options = {"sequence_parallel": True, "global_batch": 2}
    made = trained("tp=2", **options)
    state, data = made.init(random.key(1)), batch(2)
    program = ft.trace(made.step)(state, data)
    cut = replace(program, block=divide_sequences(program.block, 2))

    def products(block):
        return sum(times for e, times in block.walk() if e.name in ("all_gather", "psum_scatter"))

    # 4 and 4 of each of 3 layers, but for two scatters of sums of products in backward
    assert products(cut.block) == products(program.block) + 3 * 6 + 2
    rows = zip(tree.leaves(program(state, data)), tree.leaves(cut(state, data)), strict=True)
    for a, b in rows:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    rates = Rates(flops=1e9, memory=1e12, links=2e8)
    whole, parts = (program.timeline(rates, sequence_parts=n) for n in (1, 2))
    assert parts.exposed["tp"] < 0.75 * whole.exposed["tp"]
    assert (
        divide_sequences(program.block, 3) is program.block
    )  # which do not divide the 4 rows of a rank
    with pytest.raises(ValueError, match="sequence_parts: got 2; wanted a program with gathers"):
        ft.jit(lambda x: x + 1, sequence_parts=2, backend="eager")(torch.ones(2))
