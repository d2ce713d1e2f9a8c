"""Programs start collectives early and wait late: never too late, never with memory that changes."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, random, tree
from functron.compiler import compile as compile_program
from functron.compiler import executor
from functron.compiler.lower import graph_module
from functron.compiler.segments import procedure
from functron.nn import context
from functron.spmd import ragged
from functron.training.config import configure
from functron.training.setup import make_setup
from tests.compiler.late_collectives import collectives, lone
from tests.compiler.test_prefetch import CONFIG, batch, loops, training

STEPS = 2


def runs(bound, backend, *lates, **options):
    """Of each run of some steps its losses, its last state and what became of its collectives."""
    step, state, _ = training(bound, dropout=0.0, **options)
    data = ft.shard(batch(), P(ft.DATA_AXES), bound)
    compiled = compile_program(ft.trace(step, donate=0)(state, data), bound, backend=backend)
    yield from repeated(compiled, state, data, *lates)


def repeated(compiled, state, data, *lates):
    """The same of a compiled step, each time from `state`."""
    for late in lates:
        now, losses = tree.map(torch.clone, state), []
        with collectives(late=late) as made:
            for _ in range(STEPS):
                now, metrics = compiled(now, data)
                losses.append(metrics["loss"].item())
        yield losses, tree.leaves(now), made


CASES = {
    "fsdp": (Mesh(fsdp=2), {}),
    "remat": (Mesh(fsdp=2), {"remat": "full", "microbatches": 2}),
    "several": (Mesh(dp=2, fsdp=2, tp=2), {"stream": gpt.SEQUENCE_PARALLEL_STREAM}),
}


# what is compiled for good is small below: a scan that gathers ahead, and gradients in one bucket
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "eager") for case in CASES),
        pytest.param("fsdp", "inductor", marks=pytest.mark.full),
    ],
)
def test_results_that_come_at_the_wait_give_the_same_numbers(case, backend, monkeypatch):
    mesh, options = CASES[case]
    with lone(mesh, monkeypatch) as bound:
        assert_agreement(*runs(bound, backend, True, False, **options))


def assert_agreement(late, at_once):
    (losses, leaves, made), (wanted, expected, _) = late, at_once
    assert made.started
    assert not made.found, made.found
    assert not made.pending, made.pending
    assert losses == wanted
    for a, b in zip(leaves, expected, strict=True):
        assert torch.equal(a, b)


OF_TRAINING = {
    "zero": {"mesh": "dp=2", "zero": 1},
    "zero-2": {"mesh": "dp=2,tp=2", "zero": 2, "microbatches": 2},
    "ring": {"mesh": "cp=2,dp=2"},
    "keys": {"mesh": "cp=2", "context": "gather"},
    "ulysses": {"mesh": "ulysses=2"},
}


@pytest.mark.parametrize("case", OF_TRAINING)
def test_steps_of_training_give_the_same_numbers(case, monkeypatch):
    config = configure(gpt=CONFIG, global_batch=8, seq=8, **OF_TRAINING[case])
    with lone(Mesh.parse(config.parallelism.mesh), monkeypatch) as bound:
        made = make_setup(config, bound)
        state, data = made.init(random.key(1)), ft.shard(batch(), gpt.batch_specs(), bound)
        program = ft.trace(made.step, donate=0)(state, data)
        compiled = compile_program(program, bound, backend="eager")
        assert_agreement(*repeated(compiled, state, data, True, False))


def test_a_compiled_scan_that_gathers_ahead_gives_the_same_numbers(monkeypatch):
    """Layers split over fsdp: forward and backward gather one ahead, backward reduces one behind."""
    spec = P(None, "fsdp")

    layer = ft.fsdp(lambda w, x: torch.tanh(x @ w), P("fsdp"))

    def step(params, x):
        def loss(params):
            y, _ = ft.scan(lambda x, w: (layer(w, x), None), x, params)
            return lax.psum(y.sum(), "fsdp")

        value, grads = ft.value_and_grad(loss)(params)
        return params - 1e-3 * grads, {"loss": value}

    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        mapped = ft.shard_map(step, bound, (spec, P("fsdp")), (spec, P()))
        given = ft.shard((torch.full((3, 4, 4), 0.3), torch.eye(4)), (spec, P("fsdp")), bound)
        program = ft.trace(mapped, donate=0)(*given)
        cut = list(loops(procedure(program.block, program.block.outputs, prefetch=True)))
        assert [(loop.ahead is None, not loop.behind) for loop in cut] == [
            (False, True), (False, False),
        ]  # fmt: skip
        compiled = compile_program(program, bound)
        assert_agreement(*repeated(compiled, *given, True, False))


def test_gradients_in_one_bucket_give_the_same_numbers(monkeypatch):
    """Compiled for good, reductions over dp are merged and in place, those over tp moved about."""
    specs = {"up": P(None, "tp"), "down": P("tp")}
    sizes = {"up": (6, 8), "down": (8, 5)}
    params = {name: torch.full(size, 0.3) for name, size in sizes.items()}

    def loss(params, x):
        hidden = torch.tanh((x[:, :, None] * params["up"]).sum(1))  # sums, which Inductor fuses
        y = lax.psum((hidden[:, :, None] * params["down"]).sum(1), "tp")
        return lax.psum(y.square().sum(), ft.DATA_AXES)

    def step(params, x):
        value, grads = ft.value_and_grad(loss)(params, x)
        grads = ft.sync_gradients(grads, specs)
        return tree.map(lambda p, g: p - 1e-3 * g, params, grads), {"loss": value}

    with lone(Mesh(dp=2, tp=2), monkeypatch) as bound:
        mapped = ft.shard_map(step, bound, (specs, P(ft.DATA_AXES)), (specs, P()))
        given = ft.shard(params, specs, bound), torch.linspace(-1, 1, 24).view(4, 6)
        program = ft.trace(mapped)(*given)
        started = {}
        for backend in ("eager", "inductor"):
            compiled = compile_program(program, bound, backend=backend)
            late, at_once = repeated(compiled, *given, True, False)
            assert_agreement(late, at_once)
            started[backend] = sum(late[2].started.values())
    assert started["inductor"] < started["eager"], started


def test_what_is_still_being_sent_is_not_written_over(monkeypatch):
    """An operation in place of its operand, which nothing but a collective under way reads."""
    place = [0, 2**62, 0, 1, 0, 1, 0]

    def step(p):
        param, mu, nu = p + 1, p * 0.1, p * p + 1
        whole = lax.all_gather(param, "dp")
        rate, count = torch.full((), 0.1), torch.zeros((), dtype=torch.int64)
        states = (param, None, mu, nu, p, rate, None, None, count, None)
        new, *_ = torch.ops.functron.adamw(*states, 0.9, 0.99, 1e-8, 0.0, 0, place)
        return whole, new

    with lone(Mesh(dp=2), monkeypatch) as bound:
        program = ft.trace(ft.shard_map(step, bound, P(), P(), check=False))(torch.ones(4))
        (kernel,) = procedure(program.block, program.block.outputs).kernels()
        names = [
            str(n.target) for n in graph_module(kernel, bound.groups, overlap=True).graph.nodes
        ]
        update = next(i for i, name in enumerate(names) if "adamw" in name)
        assert update < names.index("_c10d_functional.wait_tensor.default")  # meanwhile
        compiled = compile_program(program, bound, backend="eager")
        with collectives(late=True) as made:
            whole, new = compiled(torch.ones(4))
    assert not made.found, made.found
    assert torch.equal(whole, torch.full((2, 4), 2.0))
    assert not torch.equal(new, whole[0])


def test_bounded_ragged_exchanges_are_waited_for_where_rows_are_read(monkeypatch):
    """As on GPUs: rows are sent with room to spare, and picked when they have come."""
    x, sizes = torch.arange(12.0).view(6, 2), torch.tensor([2, 3])

    def send(x, sizes):
        rows, came = lax.ragged_all_to_all(x, sizes, "ep", capacity=8, room=4)
        return rows.sin(), (x * came.sum()) @ x.t()

    with lone(Mesh(ep=2), monkeypatch) as bound:
        program = ft.trace(ft.shard_map(send, bound, P(), P(), check=False))(x, sizes)
        with collectives(late=False):
            exactly = compile_program(program, bound, backend="eager")(x, sizes)
        monkeypatch.setattr(ragged, "pads", lambda device, room=0: room > 0)
        (kernel,) = procedure(program.block, program.block.outputs).kernels()
        nodes = graph_module(kernel, bound.groups, overlap=True).graph.nodes
        names = [str(n.target).split(".")[1] for n in nodes if n.op == "call_function"]
        start, end = names.index("ragged_ranks"), names.index("ragged_end")
        assert "mm" in names[start:end]
        assert names[end - 1] == "wait_tensor"
        with collectives(late=True) as made:
            padded = compile_program(program, bound, backend="eager")(x, sizes)
    assert not made.found, made.found
    assert not made.pending, made.pending
    assert torch.equal(exactly[0][:4], torch.cat([x[:2], x[:2]]).sin())  # of rank 0, from both
    for a, b in zip(exactly, padded, strict=True):
        assert torch.equal(a, b)


def test_a_ring_sends_the_next_keys_before_it_computes_these(monkeypatch):
    """On processes, eagerly: keys and values of the next step, and what travels home, meanwhile."""
    args = [torch.linspace(-1, 1, 64, dtype=torch.float64).view(1, 4, 2, 8) + i for i in range(3)]

    def run(events):
        for name in ("block", "block_backward"):
            original = getattr(context, name)

            def noting(*args, original=original, **kwargs):
                events.append("block")
                return original(*args, **kwargs)

            monkeypatch.setattr(context, name, noting)

        def step(*args):
            loss = lambda *x: context.context_attention(*x, balanced=True).sin().sum()
            return ft.grad(loss, (0, 1, 2))(*args)

        return ft.shard_map(step, bound, P(None, "cp"), P(None, "cp"), check=False)(*args)

    with lone(Mesh(cp=3), monkeypatch) as bound:
        with collectives(late=True) as made:
            values = run(made.events)
        monkeypatch.undo()
        assert not made.found, made.found
        assert not made.pending, made.pending
        with collectives(late=False) as plain:
            wanted = run(plain.events)
    for a, b in zip(tree.leaves(values), tree.leaves(wanted), strict=True):
        assert torch.equal(a, b)
    first, then = ["start"] * 2, ["wait"] * 2  # of keys and of values
    assert made.events == [
        *first, "block", *then, *first, "block", "block", *then, "block", "block",
        *first, "block", *then, *first, "block", "block",  # backward
        *first, *then, "block", "block",  # cotangents on their way, while the last step is computed
        *then, *first, *then,
    ]  # fmt: skip


def test_a_gather_that_is_not_waited_for_is_found(monkeypatch):
    monkeypatch.setattr(executor, "_wait", lambda value: value)
    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        ((losses, _, made),) = runs(bound, "eager", True)
    assert made.pending
    assert any(loss != loss for loss in losses)


@pytest.mark.parametrize("written", ["operand", "result"])
def test_memory_that_changes_under_a_collective_is_found(written, monkeypatch):
    start = executor._make_gather

    def planted(equation, groups):
        original = start(equation, groups)

        def begin(x):
            x = x.clone()
            made = original(x)
            (x if written == "operand" else made).zero_()
            return made

        return begin

    monkeypatch.setattr(executor, "_make_gather", planted)
    with lone(Mesh(fsdp=2), monkeypatch) as bound:
        ((_, _, made),) = runs(bound, "eager", True)
    assert made.found
    assert all(written in offence for offence in made.found), made.found
