"""Switches and loops of unknown length in traced programs, against Python's own if and while."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P, debug, lax, tree
from functron.pipeline.cut import cut_program
from functron.program.interpreter import ambient_inputs, run_block
from functron.program.parse import parse
from functron.program.trace import trace
from tests.transforms.flow_programs import loop, switch

W = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).sin()
X = torch.linspace(-0.9, 1.1, 12, dtype=torch.float64).view(4, 3)
V = X.cos()


def assert_same(got, want, tolerance=1e-12):
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def choose(index, x, w=W):
    """Branches that close over a parameter, and of which one does not use it."""
    branches = [lambda x: torch.sin(x) @ w, lambda x: x * x * 2, lambda x: (x @ w) @ w * x]
    return switch(index, branches, x).sin().sum()


DERIVATIVES = {
    "value": lambda i, x: choose(i, x),
    "grad": lambda i, x: ft.grad(lambda x, w: choose(i, x, w), argnums=(0, 1))(x, W),
    "func grad": lambda i, x: torch.func.grad(lambda w: choose(i, x, w))(W),
    "grad of grad": lambda i, x: ft.grad(lambda x: (ft.grad(lambda x: choose(i, x))(x) ** 2).sum())(
        x
    ),
    "jvp": lambda i, x: torch.func.jvp(lambda x: choose(i, x), (x,), (V,)),
    "jvp of grad": lambda i, x: torch.func.jvp(torch.func.grad(lambda x: choose(i, x)), (x,), (V,)),
    "hessian": lambda i, x: torch.func.hessian(lambda x: choose(i, x))(x),
    "jacrev": lambda i, x: torch.func.jacrev(lambda w: choose(i, x, w))(W),
    "vmap": lambda i, x: torch.func.vmap(lambda x: choose(i, x))(x),
    "vmap of parameters": lambda i, x: torch.func.vmap(lambda w: choose(i, x, w))(
        torch.stack([W, W.cos()])
    ),
    "vmap of grad": lambda i, x: torch.func.vmap(torch.func.grad(lambda x: choose(i, x)))(x),
    "grad of vmap": lambda i, x: ft.grad(
        lambda x: torch.func.vmap(lambda x: choose(i, x[None]))(x).sum()
    )(x),
    "complex": lambda i, x: ft.grad(
        lambda x: (
            switch(
                i,
                [lambda z: z * z, lambda z: z.conj() * z + z.sin(), torch.neg],
                torch.complex(x, x.sin()),
            )
            .real.sin()
            .sum()
        )
    )(x),
    "vjp": lambda i, x: ft.vjp(lambda x: choose(i, x), x)[1](torch.tensor(2.0, dtype=x.dtype)),
    "remat": lambda i, x: ft.grad(ft.remat(lambda x: choose(i, x)))(x),
    "scan": lambda i, x: ft.grad(
        lambda x: ft.scan(lambda c, row: (c + choose(i, row * c), None), x.sum(), x)[0]
    )(x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_switch_has_the_derivatives_of_the_branch(name):
    f = DERIVATIVES[name]
    program = trace(f)(torch.tensor(0), X)
    assert any(equation.name == "switch" for equation, _ in program.block.walk())
    assert str(parse(str(program))) == str(program)
    compiled = ft.jit(f, backend="eager")
    for index, branch in ((-3, 0), (0, 0), (1, 1), (2, 2), (9, 2)):
        want = f(branch, X)
        assert_same(program(torch.tensor(index), X), want)
        assert_same(compiled(torch.tensor(index), X), want)


def test_a_branch_that_is_not_taken_has_no_part_in_a_derivative():
    """Of a product with zero, an infinite derivative would make NaN."""

    def f(x):
        return switch((x > 0).to(torch.int64), [torch.zeros_like, torch.sqrt], x)

    for g in (ft.grad(f), ft.grad(ft.grad(f)), lambda x: torch.func.jvp(f, (x,), (x + 1,))[1]):
        program = trace(g)(torch.tensor(0.0))
        assert program(torch.tensor(0.0)) == 0
    rows = torch.func.vmap(torch.func.grad(f))
    got = trace(rows)(torch.zeros(2))(torch.tensor([0.0, 4.0]))
    assert_same(got, torch.tensor([0.0, 0.25]))


def test_a_list_that_grows_later_is_what_it_was():
    def f(x):
        rows = [x.sin()]
        branches = [lambda a: (a, a), lambda a: (a * rows[-1], a)]
        for _ in range(2):
            rows += switch(1, branches, rows[-1])
        return sum(row.square().sum() for row in rows)

    y = X.sin().requires_grad_()
    total = sum((row**2).sum() for row in (y, y * y, y, y * y, y))
    (want,) = torch.autograd.grad(total, y)
    assert_same(trace(ft.grad(f))(X)(X), want * X.cos())


def test_a_mapped_index_gives_each_row_its_branch():
    def f(indices, x):
        branches = [torch.sin, lambda x: x * x, lambda x: x**3]
        return torch.func.vmap(lambda i, x: switch(i, branches, x))(indices, x)

    indices = torch.tensor([0, 1, 2, 7])
    want = torch.stack([X[0].sin(), X[1] ** 2, X[2] ** 3, X[3] ** 3])
    assert_same(trace(f)(indices, X)(indices, X), want)


def test_results_are_trees_and_integers_pass():
    def f(i, x):
        out = switch(
            i,
            [lambda t: {"a": t["x"].sum(), "n": t["n"] + 1}, lambda t: {"a": t["x"][0, 0], "n": t["n"]}],
            {"x": x, "n": torch.tensor(3)},
        )  # fmt: skip
        return out["a"] * out["n"], out["n"]

    g = trace(ft.grad(lambda x, i: f(i, x), has_aux=True))(X, torch.tensor(0))
    want = torch.zeros_like(X)
    want[0, 0] = 3
    assert_same(g(X, torch.tensor(0)), (torch.full_like(X, 4), torch.tensor(4)))
    assert_same(g(X, torch.tensor(1)), (want, torch.tensor(3)))


def test_prints_in_branches_are_kept_and_are_those_of_the_branch(capfd):
    def f(i, x):
        switch(i, [lambda x: debug.print("left") or x, lambda x: debug.print("right") or x], x)
        return x * 2

    for run in (trace(f)(torch.tensor(0), X), ft.jit(f, backend="eager")):
        run(torch.tensor(1), X)
        said = capfd.readouterr()
        assert "right" in said.out + said.err
        assert "left" not in said.out + said.err


# --- loops


def shrink(x, w=W, limit=0.05):
    """The carry after at most 7 iterations, and how many there were."""

    def body(carry):
        x, n = carry
        return (x @ w).tanh() * 0.5, n + 1

    def more(carry):
        return (carry[0].square().sum() > limit) & (carry[1] < 7)

    return loop(more, body, (x, torch.tensor(0)))


FORWARD = {
    "value": shrink,
    "jvp": lambda x: torch.func.jvp(lambda x: shrink(x)[0], (x,), (V,)),
    "jvp of what it closes over": lambda x: torch.func.jvp(lambda w: shrink(x, w)[0], (W,), (W,)),
    "jacfwd": lambda x: torch.func.jacfwd(lambda x: shrink(x)[0])(x),
    "jacfwd of jacfwd": lambda x: torch.func.jacfwd(
        torch.func.jacfwd(lambda s: shrink(x * s)[0].sum())
    )(torch.tensor(1.1, dtype=x.dtype)),
    "jvp of complex": lambda x: torch.func.jvp(
        lambda x: (
            loop(
                lambda c: c[1] < 3,
                lambda c: (c[0] * c[0] + c[0].conj(), c[1] + 1),
                (torch.complex(x, x.sin()), torch.tensor(0)),
            )[0].real
        ),
        (x,),
        (V,),
    ),
    "grad of what does not flow through": lambda x: ft.grad(
        lambda x: (shrink(x.detach())[0] * x).sum()
    )(x),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_loop_has_the_values_and_tangents_of_a_loop(name):
    f = FORWARD[name]
    program = trace(f)(X)
    assert any(equation.name == "while" for equation, _ in program.block.walk())
    assert str(parse(str(program))) == str(program)
    compiled = ft.jit(f, backend="eager")
    for x in (X, X * 3, X * 1e-3):  # the last has no iteration
        assert_same(program(x), f(x))
        assert_same(compiled(x), f(x))


MAPPED = {
    "rows": (lambda xs: torch.func.vmap(shrink)(xs), shrink),
    "rows of rows": (
        lambda xs: torch.func.vmap(torch.func.vmap(lambda x: shrink(x[None])))(xs),
        lambda x: tree.map(lambda *y: torch.stack(y), *(shrink(row[None]) for row in x)),
    ),
    "tangents": (
        lambda xs: torch.func.vmap(FORWARD["jvp"])(xs),
        FORWARD["jvp"],
    ),
    "of a common length": (
        lambda xs: torch.func.vmap(
            lambda x: loop(
                lambda c: c[1] < 3, lambda c: (c[0] * x, c[1] + 1), (torch.ones_like(X), torch.tensor(0))
            )[0]
        )(xs),
        lambda x: x**3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_loop_ends_when_all_rows_are_done(name):
    f, one = MAPPED[name]
    scales = torch.tensor([0.01, 1, 0.3, 2], dtype=X.dtype)
    xs = X[None] * scales[:, None, None]
    want = tree.map(lambda *rows: torch.stack(rows), *(one(x) for x in xs))
    assert_same(trace(f)(xs)(xs), want)
    assert_same(ft.jit(f, backend="eager")(xs), want)


def test_reverse_mode_of_a_loop_is_refused():
    with pytest.raises(ValueError, match=r"while_loop at .*in reverse.*fori_loop.*jvp"):
        trace(ft.grad(lambda x: shrink(x)[0].sum()))(X)


# --- meshes

MESH = Mesh(dp=2, tp=2)
SPECS = P("dp", "tp"), P(None, "tp")
A = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
B = A.cos() * 2 - 1


def by_rank(x, w):
    """Ranks of dp take branches that communicate over tp."""
    branches = [
        lambda x: lax.psum(x @ w.mT @ w, "tp").sin(),
        lambda x: lax.psum(x, "tp").cos() * 2,
    ]
    return lax.psum((switch(lax.axis_index("dp"), branches, x) ** 2).sum(), "dp")


def by_rank_dense(x, w):
    left = sum(x[:2, k : k + 2] @ w[:, k : k + 2].mT @ w[:, k : k + 2] for k in (0, 2)).sin()
    return (left**2).sum() + ((x[2:, :2] + x[2:, 2:]).cos() * 2).square().sum()


def test_ranks_take_their_branches():
    def gradients(x, w):
        return ft.sync_gradients(ft.grad(by_rank, argnums=(0, 1))(x, w), SPECS)

    value = ft.shard_map(by_rank, MESH, SPECS, P())
    for program in (trace(value)(A, B), trace(value, simulate=True)(A, B)):
        program.check()
        assert_same(program(A, B), by_rank_dense(A, B))
    program = trace(ft.shard_map(gradients, MESH, SPECS, SPECS))(A, B)
    program.check()
    want = torch.func.grad(by_rank_dense, argnums=(0, 1))(A, B)
    assert_same(program(A, B), want)
    # a bound: of the sums over tp, the branch that sends most
    sent = trace(value)(A, B).cost().sent_bytes("tp")
    assert sent == 2 * 2 * 8


def test_ranks_end_their_loops():
    def alone(x, w):
        return loop(lambda c: c.abs().max() > 0.1, lambda c: c * w[0, 0], x)

    def together(x, w):
        more = lambda c: lax.pmax(c.abs().max(), ("dp", "tp")) > 0.1
        return loop(more, lambda c: lax.psum(c, "tp") * 0.3, x)

    def dense(x, shrunk):
        while x.abs().max() > 0.1:
            x = shrunk(x)
        return x

    w = torch.full_like(B, 0.3)
    parts = [[dense(A[i : i + 2, k : k + 2], lambda x: x * 0.3) for k in (0, 2)] for i in (0, 2)]
    want = {
        alone: torch.cat([torch.cat(row, 1) for row in parts]),
        together: dense(A, lambda x: (x[:, :2] + x[:, 2:]).repeat(1, 2) * 0.3),
    }
    for f, expected in want.items():
        mapped = ft.shard_map(f, MESH, SPECS, P("dp", "tp"))
        program = trace(mapped)(A, w)
        program.check()
        assert_same(program(A, w), expected)
        simulated = trace(mapped, simulate=True)(A, w)
        assert_same(simulated(A, w), expected)
        assert_same(rerun(program, P("dp", "tp"))(A, w), expected)


def rerun(program, out_specs):
    """A traced program run again on the ranks of a simulated mesh."""

    def inner(*args):
        values = {**ambient_inputs(program.inputs), **program.flatten(args)}
        return run_block(program.block, values)[0]

    return ft.shard_map(inner, program.mesh, SPECS, out_specs)


def test_a_program_runs_again_in_vmaps_and_in_traces():
    program = trace(ft.shard_map(by_rank, MESH, SPECS, P()))(A, B)
    again = rerun(program, P())
    assert_same(again(A, B), by_rank_dense(A, B))
    traced = trace(again)(A, B)
    assert [e.name for e, _ in traced.block.walk()] == [e.name for e, _ in program.block.walk()]
    assert_same(traced(A, B), by_rank_dense(A, B))


def test_a_replicated_index_leaves_results_replicated():
    def f(x, w):
        index = (lax.psum(x.sum(), ("dp", "tp")) > 0).to(torch.int64)
        branches = [lambda x: lax.psum(x, ("dp", "tp")), lambda x: lax.psum(x * 2, ("dp", "tp"))]
        return switch(index, branches, x)

    mapped = ft.shard_map(f, MESH, SPECS, P())
    total = sum(A[i : i + 2, k : k + 2] for i in (0, 2) for k in (0, 2))
    for simulate in (False, True):
        program = trace(mapped, simulate=simulate)(A, B)
        program.check()
        assert_same(program(A, B), total)
        assert_same(program(A + 1, B), (total + 4) * 2)


def test_pieces_of_a_program_have_whole_switches():
    def joint(i, x, ct):
        y, pullback = ft.vjp(lambda x, w: choose(i, x, w), x, W)
        dx, dw = pullback(ct)
        return y, dx, dw

    args = torch.tensor(2), X, torch.tensor(1.5, dtype=X.dtype)
    program = trace(joint)(*args)
    values = {i.var: x for i, x in zip(program.inputs, args, strict=False)}
    values |= ambient_inputs(program.inputs)
    found = []
    for piece in cut_program(program, [[0], [1], [2]]):
        out = run_block(piece.block, {v: values[v] for v in piece.block.inputs})
        found += out[: len(piece.outputs)]
        values.update(zip(piece.keeps, out[len(piece.outputs) :], strict=True))
    assert_same(tuple(found), joint(2, *args[1:]))


# --- wrong uses


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: loop(lambda c: c > 0, lambda c: c, x), r"gives \(4, 3\) torch.bool; wanted a bool"),
        (lambda x: loop(lambda c: c.sum(), lambda c: c, x), r"gives \(\) torch.float64"),
        (lambda x: loop(lambda c: c.sum() > 0, lambda c: c[0], x), r"carry: got \(3,\).*wanted \(4, 3\)"),
        (lambda x: loop(lambda c: c[0].sum() > 0, lambda c: c[:1], (x, x)), "the carry after"),
        (lambda x: loop(lambda c: c[0].sum() > 0, lambda c: c, (x, 1)), r"1: got 1; wanted a tensor"),
        (lambda x: switch(0, [lambda x: x, lambda x: (x,)], x), r"branch 1/0: got .*wanted nothing, as in branch 0"),
        (lambda x: switch(0, [torch.view_as_real, lambda z: z], torch.complex(x, x)), r"branch 1: got \(4, 3\) torch.complex128 at .*wanted \(4, 3, 2\) torch.float"),
        (lambda x: switch(0, [lambda x: x, lambda x: x[0]], x), r"branch 1: got \(3,\)"),
        (lambda x: switch(0, [lambda x: x, lambda x: x.float()], x), r"got .*float32.*wanted .*float64"),
        (lambda x: switch(0, [lambda x: (x, 1)], x), r"branch 0 of a switch .*1: got 1; wanted a tensor"),
    ],
)  # fmt: skip
def test_wrong_uses_are_named(f, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trace(f)(X)


@pytest.mark.parametrize("what", ["switch", "while loop"])
def test_partition_refuses_by_name(what):
    def f(x):
        return switch(0, [torch.sin, torch.cos], x) if what == "switch" else shrink(x)[0]

    told = rf"partition: .*a {what}, whose blocks.*fix: .*; or ft.shard_map of that part, between"
    with pytest.raises(ValueError, match=told):
        ft.partition(f, Mesh(dp=2), in_specs=P("dp"), out_specs=P("dp"))(X)


def test_a_mapped_part_stands_between_partitioned_ones():
    """As the refusal says: numbers and gradients are those of the whole without a mesh."""
    mesh, rows = Mesh(dp=2), P("dp")

    def middle(x, total):
        x = lax.cond(total(x.sum()) > 0, torch.sin, torch.cos, x)
        return lax.cond(total(x[0].sum()) > 9, torch.exp, lambda x: x * x, x)

    before, after = (lambda x: torch.softmax(x, 0)), (lambda x: (x * x.sum(0)).sum())
    inner = ft.shard_map(lambda x: middle(x, lambda y: lax.psum(y, "dp")), mesh, rows, rows)
    first = ft.partition(before, mesh, rows, rows)
    last = ft.partition(after, mesh, rows, P())
    taped = [X.clone().requires_grad_() for _ in range(2)]
    parts = last(inner(first(taped[0])))
    whole = after(middle(before(taped[1]), lambda y: y))
    torch.testing.assert_close(parts, whole)
    parts.backward(), whole.backward()
    torch.testing.assert_close(taped[0].grad, taped[1].grad)
