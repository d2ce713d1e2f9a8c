"""Iterations that overlap: how scans are cut for it; test_prefetch_ranks.py runs them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random
from functron.compiler import executor
from functron.compiler.segments import Loop, procedure
from functron.program.equations import Scan
from functron.program.overlap import list_turns, sink_rank_sums, split_scan_body
from functron.transforms import Gather

CONFIG = gpt.GPTConfig(
    vocab_size=32, num_layers=3, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=8,
    init_stddev=0.3, vocab_multiple=4, dtype="float64",
)  # fmt: skip


def batch(rows: int = 8) -> dict:
    tokens = torch.randint(0, 32, (rows, 9), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(rows)}


def training(
    mesh, *, remat="none", stream=gpt.STREAM, microbatches=1, axes=("fsdp",), dropout=0.2, **options
):
    config = replace(CONFIG, dropout=dropout)
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh, fsdp=axes))
    optimizer = optim.sgd(0.1)  # what overlaps is in the gradients

    def loss(params, data, key):
        return gpt.loss(
            config,
            params,
            data,
            ft.ModelOptions(stream=stream, remat=remat, gather=Gather(specs, **options)),
            key=key,
        )

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), microbatches),
        optimizer,
        mesh,
        specs,
    )
    return step, ft.init_state(random.key(1), defs, specs, optimizer, mesh), specs


def loops(steps):
    """All loops of a procedure, those inside loops after them."""
    for step in steps.steps:
        if isinstance(step, Loop):
            yield step
            yield from loops(step.body)


def traced(mesh, **options):
    step, state, _ = training(mesh, **options)
    return ft.trace(step, donate=0)(state, batch())


# --- how scans are cut


@pytest.mark.pairwise(of=lambda remat, mesh: [{"remat": remat}, {"mesh": mesh}])
@pytest.mark.parametrize("remat", ["none", "full", "selective", "dots"])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, fsdp=2, tp=2)], ids=str)
def test_both_scans_of_layers_gather_ahead_and_reduce_behind(mesh, remat):
    program = traced(mesh, remat=remat, stream=gpt.SEQUENCE_PARALLEL_STREAM)
    steps = procedure(program.block, program.block.outputs, prefetch=True)
    forward, backward = loops(steps)
    # one for what tp splits as well, one for the rest
    count = 1 if mesh["tp"] == 1 else 2
    for loop in (forward, backward):
        assert loop.ahead is not None
        assert [(e.name, e.args[1]) for e in loop.gathers] == [("all_gather", "fsdp")] * count
        kernels = loop.body.kernels()
        inside = [(e.name, e.args[1]) for k in kernels for e in k.equations if "gather" in e.name]
        assert ("all_gather", "fsdp") not in inside
    assert forward.behind == ()
    (behind,) = backward.behind
    assert [(e.name, e.args[1]) for e in behind.round.sums] == [("psum_scatter", "fsdp")] * count
    names = [e.name for k in behind.procedure.kernels() for e in k.equations]
    assert not {"mm", "bmm"} & set(names)


def test_sums_of_sums_run_behind_the_iteration_after():
    """Over dp, of what was scattered over fsdp."""
    block = sink_rank_sums(traced(Mesh(dp=2, fsdp=2), dropout=0.0).block)
    *_, backward = loops(procedure(block, block.outputs, prefetch=True))
    found = [[(e.name, e.args[1]) for e in part.round.sums] for part in backward.behind]
    assert found == [[("psum_scatter", "fsdp")], [("psum", "dp")]]
    assert sum(part.stacks for part in backward.behind[:-1]) == 0  # all that is stacked is a sum


def test_the_turns_of_two_rounds():
    assert list(list_turns(3, gathers=False, rounds=2)) == [
        ("begin", 0), ("compute", 0), ("reduce", 0),
        ("begin", 1), ("compute", 1), ("reduce", 1), ("end", 0),
        ("begin", 2), ("compute", 2), ("reduce", 2), ("end", 1), ("end", 0),
        ("end", 2), ("end", 1), ("end", 2),
    ]  # fmt: skip
    assert list(list_turns(0, gathers=True, rounds=2)) == []


def test_microbatches_are_loops_around_loops():
    program = traced(Mesh(fsdp=2), microbatches=2)
    outer, *inner = loops(procedure(program.block, program.block.outputs, prefetch=True))
    assert outer.ahead is None  # what all microbatches gather is no slice
    assert outer.behind == ()
    assert all(loop.ahead is not None for loop in inner)
    assert sum(bool(loop.behind) for loop in inner) == 1


def scan_of(f, *args, mesh=None) -> Scan:
    mapped = ft.shard_map(f, mesh or Mesh(fsdp=2), P("fsdp"), P("fsdp"), check=False)
    program = ft.trace(mapped)(*args)
    return next(e.op for e in program.block.equations if isinstance(e.op, Scan))


def test_what_depends_on_the_carry_is_not_started_early():
    x = torch.ones(4, 6)

    def f(x):
        body = lambda c, row: (
            lax.all_gather(c * row, "fsdp").sum(0),
            lax.psum_scatter(c, "fsdp", tiled=True),
        )
        return ft.scan(body, torch.ones(6), x)[1]

    op = scan_of(f, x)
    parts = split_scan_body(op, op.body.outputs)
    assert parts is not None
    assert parts.gathers == ()
    assert [e.name for e in parts.rounds[0].sums] == ["psum_scatter"]  # which leads to ys alone


def test_a_reduction_that_is_carried_is_not_ended_late():
    def f(x):
        def body(c, row):
            part = lax.psum_scatter(lax.all_gather(row, "fsdp", tiled=True), "fsdp", tiled=True)
            return c + part, None

        return ft.scan(body, torch.ones(6), x)[0]

    op = scan_of(f, torch.ones(4, 6))
    parts = split_scan_body(op, op.body.outputs)
    assert parts is not None
    assert [e.name for e in parts.gathers] == ["all_gather"]
    assert parts.rounds == ()


def test_one_iteration_has_no_neighbour():
    def f(x):
        return ft.scan(
            lambda c, row: (c + lax.all_gather(row, "fsdp").sum(0), None), torch.ones(6), x
        )[0]

    op = scan_of(f, torch.ones(2, 6))
    assert op.length == 1
    assert split_scan_body(op, op.body.outputs) is None


@pytest.mark.parametrize(
    ("inputs", "outputs", "call"),
    [((), 1, "all_reduce_"), ((), 2, "all_reduce"), ((0,), 1, "all_reduce")],
    ids=["own", "shown_twice", "an_input"],
)
def test_sums_are_taken_in_place_where_nothing_else_shows_them(monkeypatch, inputs, outputs, call):
    fn = ft.shard_map(lambda x: lax.psum(x * 2, "dp"), Mesh(dp=2), P("dp"), P())
    block = ft.trace(fn)(torch.ones(4)).block
    (equation,) = (e for e in block.equations if e.name == "psum")
    value, calls = equation.args[0], []
    names = ("all_reduce", "all_reduce_")
    record = {name: lambda x, *_, name=name: calls.append(name) for name in names}
    monkeypatch.setattr(executor, "_c10d", SimpleNamespace(**record))
    maker = SimpleNamespace(inputs=[value for _ in inputs], outputs=[value] * outputs)
    executor._make_reduction(equation, {"dp": "a group"}, maker)(torch.ones(2))  # pyright: ignore
    assert calls == [call]
