"""Timelines by hand: who waits for whom, and what nothing hides."""

import torch

import functron as ft
from functron import Mesh, P, lax
from functron.program.timeline import COMPUTE, Rates, StreamInterval
from functron.program.trace import trace

A = torch.ones(4, 4)


def traced(f, *args, mesh=None):
    mapped = ft.shard_map(f, mesh or Mesh(tp=2), P(), P(), check=False)
    return trace(mapped)(*args)


def costs(**seconds):
    """Seconds by the name of the operation; 0 of others."""
    return lambda equation: seconds.get(equation.name, 0.0)


def rows(timeline):
    return [tuple(row) for row in timeline.rows]


def test_two_products_and_an_all_reduce():
    def beside(a, b):
        return lax.psum(a @ b, "tp"), a @ a

    program = traced(beside, A, A)
    hidden = program.timeline(costs(mm=3.0, psum=2.0))
    assert rows(hidden) == [
        ("mm", COMPUTE, 0.0, 3.0, None, 0.0),
        ("mm", COMPUTE, 3.0, 6.0, None, 0.0),
        ("psum", "tp", 3.0, 5.0, "tp", 0.0),
    ]
    assert (hidden.total, hidden.exposed) == (6.0, {"tp": 0.0})
    half = program.timeline(costs(mm=3.0, psum=5.0))
    assert half.rows[-1] == StreamInterval("psum", "tp", 3.0, 8.0, "tp", exposed=2.0)
    assert (half.total, half.exposed, half.busy) == (8.0, {"tp": 2.0}, {COMPUTE: 6.0, "tp": 5.0})
    at_once = program.timeline(costs(mm=3.0, psum=2.0), overlap=False)
    assert rows(at_once)[1] == ("mm", COMPUTE, 5.0, 8.0, None, 0.0)
    assert (at_once.total, at_once.exposed) == (8.0, {"tp": 2.0})


def of_dp(a, b):
    return lax.psum(a @ b, "dp"), lax.psum(b @ a, "dp")


def of_fsdp(a, b):
    return lax.all_gather(a, "fsdp") @ b, lax.all_gather(b, "fsdp") @ a


def of_tp(a, b):
    return lax.psum(a @ b, "tp") @ b, b @ a


def test_what_is_not_compiled_waits_for_all_that_it_sends():
    """Products of 3 seconds and collectives of 2, one of which compiled programs hide."""
    for axis, step, seconds in (
        ("dp", of_dp, (3 + 2 + 3 + 2, 3 + 3 + 2)),
        ("fsdp", of_fsdp, (2 + 3 + 2 + 3, 2 + 3 + 3)),
        ("tp", of_tp, (3 + 2 + 3 + 3, 3 + 3 + 3)),
    ):
        program = traced(step, A, A, mesh=Mesh(**{axis: 2}))
        spent = costs(mm=3.0, bmm=3.0, psum=2.0, all_gather=2.0)
        found = [program.timeline(spent, eager=eager) for eager in (True, False)]
        assert tuple(each.total for each in found) == seconds
        products = 9.0 if axis == "tp" else 6.0
        assert [each.exposed for each in found] == [{axis: t - products} for t in seconds]
        assert rows(found[0]) == rows(program.timeline(spent, overlap=False, prefetch=False))


def test_what_reads_a_result_waits_for_it_and_what_was_written_before_does_not():
    def after(a, b):
        return lax.psum(a @ b, "tp") @ b

    exposed = traced(after, A, A).timeline(costs(mm=3.0, psum=2.0))
    assert (exposed.total, exposed.exposed) == (8.0, {"tp": 2.0})

    def apart(a, b):  # a @ a is written after what reads the sum, and before it in the order
        return lax.psum(a @ b, "tp") @ b, a @ a

    moved = traced(apart, A, A).timeline(costs(mm=3.0, psum=2.0))
    assert (moved.total, moved.exposed) == (9.0, {"tp": 0.0})

    def last(a, b):  # what leads to a collective comes first
        return a @ a, lax.psum(a @ b, "tp")

    assert traced(last, A, A).timeline(costs(mm=3.0, psum=2.0)).exposed == {"tp": 0.0}


def test_one_axis_has_one_stream_and_two_have_two():
    def both(a):
        return lax.psum(a, "tp"), lax.psum(a + 1, "dp"), lax.psum(a + 2, "tp")

    found = traced(both, A, mesh=Mesh(dp=2, tp=2)).timeline(costs(psum=2.0, add=1.0))
    assert rows(found) == [
        ("add", COMPUTE, 0.0, 1.0, None, 0.0),
        ("add", COMPUTE, 1.0, 2.0, None, 0.0),
        ("psum", "dp", 1.0, 3.0, "dp", 1.0),  # beside the first one over tp
        ("psum", "tp", 0.0, 2.0, "tp", 0.0),
        ("psum", "tp", 2.0, 4.0, "tp", 1.0),
    ]
    assert found.total == 4.0
    assert found.exposed == {"dp": 1.0, "tp": 1.0}


def test_layers_gather_one_ahead_and_reduce_one_behind():
    """Of 4 layers' gathers and reductions the first and the last are exposed."""

    def step(w, x):
        def loss(w):
            layer = lambda x, w: (x @ lax.all_gather(w, "fsdp", tiled=True), None)
            return ft.scan(layer, x, w)[0].sum()

        return ft.grad(loss)(w)

    program = traced(step, torch.ones(4, 2, 4), torch.ones(2, 4), mesh=Mesh(fsdp=2))
    spent = costs(mm=3.0, all_gather=2.0, psum_scatter=2.0)
    apart = program.timeline(spent, prefetch=False, overlap=False)
    # forward 4 products, backward 7 or 8 of them: x needs no gradient
    products = 3.0 * sum(times for e, times in program.block.walk() if e.name == "mm")
    count = sum(times for e, times in program.block.walk() if e.name == "all_gather")
    assert (apart.total, apart.exposed) == (
        products + 2.0 * (count + 4),
        {"fsdp": 2.0 * (count + 4)},
    )
    ahead = program.timeline(spent)
    scans = count // 4
    assert ahead.exposed == {"fsdp": 2.0 * (scans + 1)}
    assert ahead.total == products + 2.0 * (scans + 1)


def test_rates_are_a_roofline_and_a_ring():
    def f(a, b):
        return lax.psum(a @ b, "tp"), (a + b).t()

    program = traced(f, A, A)
    rates = Rates(flops=10.0, memory=100.0, links={"tp": 8.0}, latency=0.5)
    spent = {e.name: rates(e) for e, _ in program.block.walk()}
    assert spent["mm"] == 2 * 4**3 / 10.0  # 128 FLOPs, and 192 bytes
    assert spent["add"] == 3 * 64 / 100.0
    assert spent["t"] == 0.0
    assert spent["psum"] == 0.5 + 64 / 8.0  # 2 (n - 1) / n is 1 for 2 ranks
    assert Rates(1.0, 1.0, links=8.0)(program.block.equations[-1]) >= 0


def test_a_timeline_shows_as_text_and_as_a_picture():
    found = traced(lambda a: (lax.psum(a @ a, "tp"), a @ a), A).timeline(costs(mm=3.0, psum=5.0))
    assert "8 s" in str(found)
    assert [line.split() for line in str(found).splitlines()[2:]] == [
        ["compute", "6", "s"], ["tp", "5", "s", "2", "s"],
    ]  # fmt: skip
    assert found.gantt(40).splitlines() == [
        "compute │mm mm   │",
        "tp      │   psum │",
    ]
    for piece in ("exposed", "psum: 5 s, 2 s exposed", "<svg"):
        assert piece in found._repr_html_()
