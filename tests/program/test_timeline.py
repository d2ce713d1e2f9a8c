"""Timelines by hand: who waits for whom, and what nothing hides."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, tree
from functron.nn.moe import MoEConfig
from functron.pipeline import Part
from functron.pipeline.cut import join_programs
from functron.pipeline.stage_backward import StageCall, trace_stage
from functron.program.timeline import COMPUTE, ExposedTraffic, Rates, StreamInterval
from functron.program.trace import trace
from functron.spmd.spec import local_shape

A = torch.ones(4, 4)


def traced(f, *args, mesh=None):
    mapped = ft.shard_map(f, mesh or Mesh(tp=2), P(), P(), check=False)
    return trace(mapped)(*args)


def costs(**seconds):
    """Seconds by the name of the operation; 0 of others."""
    return lambda equation: seconds.get(equation.name, 0.0)


def rows(timeline):
    return [tuple(row)[:6] for row in timeline.rows]


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
    # a ring over 2 ranks sends all 16 float32 once; two of five seconds are exposed
    assert half.rows[-1] == StreamInterval("psum", "tp", 3.0, 8.0, "tp", 2.0, 64.0)
    assert half.traffic == {("tp", "psum"): (1, 5.0, 2.0, 64.0, 64.0 * 2 / 5)}
    assert hidden.traffic == {("tp", "psum"): (1, 2.0, 0.0, 64.0, 0.0)}
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


def exchanging(a, b):
    """A layer of experts in small: a product, an exchange, and a product of what came."""
    return lax.all_to_all(a @ b, "ep", 0, 0, tiled=True) @ b


@pytest.mark.parametrize(
    ("seconds", "waited"),
    [
        # the second product starts when the first exchange does, at 3; each has ended when it is due
        (2.0, 0.0),
        # they are under way from 3 to 7, and to 11; what they lead to is due at 6, and at 10
        (4.0, 1.0 + 1.0),
    ],
)
def test_what_one_program_sends_lies_under_what_another_computes(seconds, waited):
    """In a combined cell of a schedule; apart, each exchange is waited for."""
    program = traced(exchanging, A, A, mesh=Mesh(ep=2))
    spent = costs(mm=3.0, all_to_all=seconds)
    alone = program.timeline(spent)
    # of 16 float32 half go to the other rank
    assert alone.traffic == {("ep", "all_to_all"): (1, seconds, seconds, 32.0, 32.0)}
    both = join_programs(program, program).timeline(spent)
    exposed = 64.0 * waited / (2 * seconds)
    assert both.traffic == {("ep", "all_to_all"): (2, 2 * seconds, waited, 64.0, exposed)}
    assert (both.total, both.exposed) == (12.0 + waited, {"ep": waited})


def test_experts_of_one_microbatch_under_the_attention_of_another():
    """Combined 1F1B runs forward and backward as one program; plain 1F1B runs one after another."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=4096)
    config = gpt.GPTConfig(
        vocab_size=512, num_layers=1, embed_dim=2048, num_heads=16, mlp_dim=256, max_seq=8192,
        moe=moe, dtype="bfloat16",
    )  # fmt: skip
    mesh, seq = Mesh(ep=4), 8192
    pieces = trace_stages(config, mesh, seq, ft.ModelOptions(expert_room=1.25))
    rates = Rates(flops=4e14, memory=2e12, links=5e10, latency=1e-5)
    name = "ep", "ragged_all_to_all"
    apart = [each.timeline(rates).traffic[name] for each in pieces]
    plain = ExposedTraffic(*map(sum, zip(*apart, strict=True)))
    forward, backward = pieces
    joint = join_programs(forward, backward).timeline(rates).traffic[name]
    # two rows of 2,048 bfloat16 for each of 8,192 tokens, of which a rank of four sends three
    # quarters: there and back, forward and backward
    assert plain.sent_bytes == joint.sent_bytes == 4 * 2 * seq * 2048 * 2 * 3 / 4
    assert plain.exposed_bytes > 0.6 * plain.sent_bytes
    assert joint.exposed_bytes < 0.1 * plain.exposed_bytes, joint


def trace_stages(config, mesh, seq, options):
    """Forward and backward of a layer in the middle of a pipeline, as its schedule runs them."""
    part, layers = Part(range(1)), {"blocks": gpt.defs(config, options)["blocks"]}
    specs = ft.param_specs(layers, gpt.rules(config, mesh))

    def local(d, spec):
        return torch.empty(local_shape(d.shape, spec, mesh), dtype=d.dtype, device="meta")

    tokens = torch.empty(1, seq, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    x = torch.empty(1, seq, config.embed_dim, dtype=config.stream_dtype, device="meta")
    call = StageCall(0, part, False, tree.map(local, layers, specs), x, batch, (), {})

    def function(part, params, x, batch):
        return gpt.stage_loss(config, part, params, x, batch, options)

    stage = trace_stage(function, call, mesh, split=False)
    return [stage.piece_program(index) for index in range(2)]


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
        ["compute", "6", "s"],
        ["tp", "5", "s", "2", "s", "64", "B", "26", "B"],
        ["1", "psum", "5", "s", "2", "s", "64", "B", "26", "B"],
    ]  # fmt: skip
    assert found.gantt(40).splitlines() == [
        "compute │mm mm   │",
        "tp      │   psum │",
    ]
    for piece in ("exposed", "psum: 5 s, 2 s exposed", "<svg"):
        assert piece in found._repr_html_()
