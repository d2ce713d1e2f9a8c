"""`run_block`: a block in plain eager mode, in simulation, on processes and while tracing."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, tree
from functron.ops.attention import attention
from functron.ops.cross_entropy import check_ids
from functron.program.equations import Scan
from functron.program.interpreter import ambient_inputs, run_block, run_in_lockstep
from functron.program.trace import trace
from functron.transforms.remat import tie
from tests.program.test_lockstep import gpt_step


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def evaluated(program, *args):
    """The result of a program where this is called, for this rank's arguments."""
    leaves = program.flatten(args)
    values = {i.var: leaves[i.var] for i in program.inputs if i.role == "argument"}
    out = run_block(program.block, {**values, **ambient_inputs(program.inputs)})
    return tree.unflatten(program.out_structure, out)


def assert_same(got, want, tolerance=0.0):
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def operations(program):
    """The operations of a program with their phases and scopes; reshapes are not told apart."""
    return Counter(
        (equation.name.replace("_unsafe_view", "view"), equation.where.phase, equation.where.scopes)
        for equation, _ in program.block.walk()
    )


@pytest.mark.pairwise(of=lambda mesh, options: [{"mesh": mesh}, {"options": options}])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1, "sequence_parallel": True, "remat": "dots"},
        {"tied": True, "num_kv_heads": 1, "num_microbatches": 2, "remat": "selective"},
        {"norm": "layer", "bias": True, "positions": "learned", "gated": False}
        | {"activation": "gelu", "z_loss": 1e-3, "remat": "full"},
    ],
    ids=lambda options: "-".join(options),
)
def test_whole_steps(options, mesh):
    step, state, batch = gpt_step(mesh, **options)
    program = trace(step)(state, batch)
    mapped = ft.shard_map(
        lambda *args: evaluated(program, *args), mesh, step.in_specs, step.out_specs
    )
    again = trace(mapped)(state, batch)  # a scan stays one equation
    assert operations(again) == operations(program)
    got = mapped(state, batch)
    assert_same(got, run_in_lockstep(program, state, batch), 1e-10)
    assert_same(got, run_in_lockstep(again, state, batch), 1e-10)
    assert_same(got, step(tree.map(torch.clone, state), batch), 1e-10)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_and_its_gradient_on_simulated_ranks(device):
    """torch has no batching rule for its flash kernels, of a CPU or a GPU: ranks join the samples."""
    mesh, dtype = Mesh(dp=2), torch.float32 if device == "cpu" else torch.bfloat16
    operands = [randn(4, 8, 2, 16, seed=seed).to(device, dtype) for seed in range(3)]

    def loss(operands):
        return attention(*operands, causal=True).float().square().sum()

    def gradients(*operands):
        return ft.grad(lambda operands: lax.psum(loss(operands), "dp"))(operands)

    specs = (P("dp"),) * 3
    program = trace(ft.shard_map(gradients, mesh, specs, specs))(*operands)
    assert "flash_attention" in str(program)
    mapped = ft.shard_map(lambda *args: evaluated(program, *args), mesh, specs, specs)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    assert_same(mapped(*operands), torch.func.grad(loss)(tuple(operands)), tolerance)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, ("dp", "tp")),
    "pmax": lambda x: lax.pmax(x, "tp"),
    "pmin": lambda x: lax.pmin(x, ("tp", "dp")),
    "all_gather": lambda x: lax.all_gather(x, ("dp", "tp"), axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "dp", [(0, 1)]),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(
        x, torch.arange(2) + lax.axis_index("tp"), "tp", capacity=8
    )[0],
    "assume_replicated": lambda x: x - lax.assume_replicated(lax.all_gather(x, "tp").sum(0), "tp"),
    "axis_index": lambda x: x * (1 + lax.axis_index(("dp", "tp"))),
    "gradient": lambda x: ft.grad(lambda x: lax.psum((x**2).sum(), ("dp", "tp")))(x),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_in_simulation(name):
    mesh, spec = Mesh(dp=2, tp=2), P("dp", "tp")
    f = ft.shard_map(lambda x: COLLECTIVES[name](torch.sin(x)), mesh, spec, spec)
    x = randn(8, 8)
    program = trace(f)(x)
    assert_same(ft.shard_map(lambda x: evaluated(program, x), mesh, spec, spec)(x), f(x))


@pytest.mark.distributed
def test_collectives_on_processes(torchrun):
    torchrun(
        textwrap.dedent(
            f"""
            import sys
            import torch
            import functron as ft
            from functron import Mesh, P, lax
            from functron.program.trace import trace
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_interpreter import COLLECTIVES, assert_same, evaluated, randn
            from tests.ranks import on_the_first

            torch.distributed.init_process_group("gloo")
            mesh, spec = Mesh(dp=2, tp=2), P("dp", "tp")
            bound = mesh.bind()
            x = randn(8, 8)
            mine = ft.shard(x, spec, bound)
            for name, collective in COLLECTIVES.items():
                body = lambda x: collective(torch.sin(x))
                whole = on_the_first(lambda: ft.shard_map(body, mesh, spec, spec)(x))
                want = ft.shard(whole, spec, bound)
                f = ft.shard_map(body, bound, spec, spec)
                program = trace(f)(mine)
                got = ft.shard_map(lambda x: evaluated(program, x), bound, spec, spec)(mine)
                assert_same(got, want, 1e-14)
            torch.distributed.destroy_process_group()
            """
        ),
        4,
    )


def test_axes_must_have_the_size_that_was_traced():
    f = ft.shard_map(lambda x: lax.psum(x, "tp"), Mesh(tp=4), P("tp"), P())
    program = trace(f)(randn(4))
    with pytest.raises(ValueError, match=r"psum over 'tp' was traced for 4 ranks, and there are 2"):
        ft.shard_map(lambda x: evaluated(program, x), Mesh(tp=2), P("tp"), P())(randn(2))
    with pytest.raises(ValueError, match=r"there are 1 here.*fix: trace it for this one"):
        evaluated(program, randn(1))


def through_memory(x):
    y = x.clone()
    y[1:, ::2] = 3  # in place, so that it is recorded as a scatter into memory
    y.t()[0].mul_(2)
    return torch.as_strided(y, (2, 2), (1, 3), 1), y


def many_at_once(x):
    xs = [x, x[0], x.sum()]
    norms = torch._foreach_norm(xs)
    sums = torch._foreach_add(torch._foreach_mul(xs, 2.0), xs, alpha=3)
    return norms, torch._foreach_addcmul(sums, xs, xs, 0.5), torch._foreach_sqrt(norms)


def attends(x):
    q = x.reshape(1, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)


@pytest.mark.parametrize("fn", [through_memory, many_at_once, attends], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_operations_without_batching_rules(fn, layout):
    x = randn(2, 5, 3, 4)
    program = trace(fn)(x[0, 0])
    rows = x if layout == "contiguous" else x.movedim(1, -1).contiguous().movedim(-1, 1)
    at_once = torch.vmap(torch.vmap(lambda x: evaluated(program, x), in_dims=0), in_dims=0)(rows)
    one_by_one = [[fn(row.contiguous()) for row in some] for some in x]
    want = tree.map(
        lambda *some: torch.stack(some),
        *[tree.map(lambda *some: torch.stack(some), *some) for some in one_by_one],
    )
    assert_same(at_once, want, 1e-14)
    assert_same(evaluated(program, rows[1, 2]), one_by_one[1][2])


def test_layouts_are_those_of_the_program():
    def f(w, x):
        x, ys = ft.scan(lambda x, w: (torch.tanh(x @ w), x.t()), x, w)
        return x, ys, ft.scan(lambda x, y: (x + y.t(), None), x, ys)[0]

    args = randn(3, 4, 4), randn(5, 4)
    program = trace(f)(*args)
    got = evaluated(program, *args)
    assert_same(got, run_in_lockstep(program, *args))
    assert [x.stride() for x in got] == [output.value.stride for output in program.outputs]


def test_memory_is_freed_after_its_last_use():
    live = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
                live.append(torch.utils.weak.WeakTensorKeyDictionary())
                live[-1][out] = True
            return out

    def f(x):
        for _ in range(3):
            x = torch.sin(x)
        return torch.cos(x)

    x = randn(4)
    program = trace(f)(x)
    values = {program.inputs[0].var: x}
    with Watch():
        out = run_block(program.block, values)
    assert [len(alive) for alive in live] == [0, 0, 0, 1]
    assert [*values.values()] == out  # the input is gone from it, and all between


def test_prints_on_every_rank(capsys):
    def f(x):
        ft.debug.print("x = {:.1f}", x.sum())
        return torch.vmap(lambda x: (ft.debug.print("row {}", x.sum()), x)[1])(x)

    mesh, spec = Mesh(tp=2), P("tp")
    mapped = ft.shard_map(f, mesh, spec, spec)
    x = torch.arange(4.0).reshape(2, 2)
    program = trace(mapped)(x)
    assert capsys.readouterr().out == ""
    mapped(x)
    want = capsys.readouterr().out
    ft.shard_map(lambda x: evaluated(program, x), mesh, spec, spec)(x)
    assert capsys.readouterr().out == want


def test_nothing_is_taped():
    x = randn(3).requires_grad_()
    program = trace(torch.sin)(x.detach())
    assert not evaluated(program, x).requires_grad


def test_a_scan_of_other_layouts_is_recorded_as_a_loop():
    def f(w, x):
        return ft.scan(lambda x, w: (torch.tanh(x @ w), None), x, w)[0]

    w, x = randn(3, 4, 4), randn(5, 4)
    program = trace(f)(w, x)
    turned = trace(lambda w, x: evaluated(program, w, x))(w.mT, x)
    assert not any(isinstance(e.op, Scan) for e, _ in turned.block.walk())
    assert_same(run_in_lockstep(turned, w.mT, x), f(w.mT, x))


def test_names_and_barriers_are_recorded_again_under_vmap():
    def f(x, y):
        return ft.checkpoint_name(torch.sin(x), "sin") + tie(torch.cos(x), y)

    x, y = randn(2, 3), randn(3)
    program = trace(f)(x[0], y)
    again = trace(torch.vmap(lambda x: evaluated(program, x, y)))(x)
    names = [equation.name for equation in again.block.equations]
    assert (names.count("checkpoint_name"), names.count("barrier")) == (1, 1)
    assert_same(run_in_lockstep(again, x), torch.sin(x) + torch.cos(x))
    rows = torch.vmap(lambda y: evaluated(program, x[0], y))(y.expand(4, 3))
    assert_same(rows, (torch.sin(x[0]) + torch.cos(x[0])).expand(4, 3))


def test_ids_are_checked_here_and_in_lockstep():
    def f(ids):
        check_ids(ids, "tokens", 4)
        return ids + 1

    mesh = Mesh(dp=2)
    mapped = ft.shard_map(f, mesh, P("dp"), P("dp"))
    program = trace(mapped)(torch.arange(4))
    again = trace(ft.shard_map(lambda x: evaluated(program, x), mesh, P("dp"), P("dp")))
    assert "check_ids" in str(again(torch.arange(4)))
    for run in (program, ft.shard_map(lambda x: evaluated(program, x), mesh, P("dp"), P("dp"))):
        assert_same(run(torch.arange(4)), torch.arange(1, 5))
        with pytest.raises(ValueError, match="tokens outside of the vocabulary"):
            run(torch.tensor([0, 1, 2, 4]))
