"""Printing from every kind of program, and drawings of shardings."""

import re
import types
from xml.etree import ElementTree

import pytest
import torch

import functron as ft
from functron import BoundMesh, Mesh, P, debug, lax
from functron.program import text
from functron.program.parse import parse
from functron.program.trace import trace


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_prints_where_nothing_is_mapped(capsys):
    debug.print("{} and {x:.2f}, {{braces}} {name!r}", 3, x=torch.tensor(1.234), name="a{b}")
    assert lines(capsys) == ["3 and 1.23, {braces} 'a{b}'"]


def program(x):
    debug.print("sum {:.0f}", x.sum())
    total = lax.psum(x.sum(), "tp")
    debug.print("total {total:.0f} of {n}", total=total, n=lax.axis_size("tp"))
    return lax.psum(total, "dp")


MESH = Mesh(dp=2, tp=2)
X = torch.arange(4.0).reshape(2, 2)


def test_a_line_per_rank_over_which_it_varies(capsys):
    ft.shard_map(program, MESH, P("dp", "tp"), P())(X)
    assert lines(capsys) == [
        "[dp=0 tp=0] sum 0",
        "[dp=0 tp=1] sum 1",
        "[dp=1 tp=0] sum 2",
        "[dp=1 tp=1] sum 3",
        "[dp=0] total 1 of 2",
        "[dp=1] total 5 of 2",
    ]


def test_prints_once_under_differentiation(capsys):
    def loss(w):
        debug.print("w {}", w.sum())
        return (w**2).sum()

    w = torch.ones(3)
    for grad in (ft.grad, torch.func.grad):
        grad(loss)(w)
        assert lines(capsys) == ["w 3.0"]


def test_prints_under_vmap(capsys):
    torch.func.vmap(lambda x: debug.print("{}", x.sum()) or x)(torch.ones(2, 3))
    assert lines(capsys) == ["[vmap=0] 3.0", "[vmap=1] 3.0"]


def test_a_traced_program_prints_when_it_runs(capsys):
    traced = trace(ft.shard_map(program, MESH, P("dp", "tp"), P()))(X)
    assert lines(capsys) == []
    traced(X)
    got = lines(capsys)
    assert got[:4] == [
        "[dp=0 tp=0] sum 0",
        "[dp=0 tp=1] sum 1",
        "[dp=1 tp=0] sum 2",
        "[dp=1 tp=1] sum 3",
    ]
    assert got[4] == "[dp=0 tp=0] total 1 of 2"
    assert "debug_print" in str(traced)


def test_prints_in_every_iteration_of_a_scan(capsys):
    def fn(x):
        def step(c, row):
            debug.print("row {:.0f}", row.sum())
            return c + row, None

        return ft.scan(step, torch.zeros(2), x)[0]

    fn(X)
    eager = lines(capsys)
    trace(fn)(X)(X)
    assert lines(capsys) == eager == ["row 1", "row 5"]


def test_what_str_format_can_do(capsys):
    x = torch.tensor([[1.25, -2.0], [0.0, 1e3]])
    debug.print("{x:.1f} {x[1][1]} {x.shape} {0!r:>5} {1:.{2}f}", 7, x[0, 0], 3, x=x)
    assert lines(capsys) == ["[[1.2, -2.0], [0.0, 1000.0]] 1000.0 torch.Size([2, 2])     7 1.250"]
    debug.print("{}|{}", torch.tensor(True), torch.arange(3))
    assert lines(capsys) == ["True|tensor([0, 1, 2])"]


def test_trees(capsys):
    tree = {"a": torch.tensor(1.5), "b": [torch.arange(2.0), "{text}", None], "c": 3}
    debug.print("{tree:.2f}", tree=tree)
    assert lines(capsys) == ["{'a': 1.50, 'b': [[0.00, 1.00], '{text}', None], 'c': 3}"]
    debug.print("{}", {"n": 3})
    assert lines(capsys) == ["{'n': 3}"]


def test_wrong_fields_are_refused(capsys):
    with pytest.raises(ValueError, match=r"test_debug.py.*no value for the field 'y'"):
        debug.print("{y}", x=1)
    with pytest.raises(ValueError, match=r"argument 1: got no field for it.*\n.*argument x"):
        debug.print("{}", 1, 2, x=3)
    assert lines(capsys) == []


def test_values_of_several_types_of_rank_share_lines(capsys):
    """A value that does not vary stands in every line of one that does; numbers stay as they are."""

    def program(x, y):
        debug.print("{} {} {n}", x.sum(), y.sum(), n=lax.axis_size("dp"))
        debug.print("here")
        return x.sum(1)

    y = torch.arange(2.0)
    ft.shard_map(program, MESH, (P("dp"), P("tp")), P("dp"))(X, y)
    assert lines(capsys) == [
        "[dp=0 tp=0] 1.0 0.0 2",
        "[dp=0 tp=1] 1.0 1.0 2",
        "[dp=1 tp=0] 5.0 0.0 2",
        "[dp=1 tp=1] 5.0 1.0 2",
        "here",
    ]
    ft.shard_map(lambda y: debug.print("{}", y) or y, MESH, P("tp"), P("tp"))(y)
    assert lines(capsys) == ["[tp=0] tensor([0.])", "[tp=1] tensor([1.])"]


def test_user_vmaps_inside_ranks(capsys):
    def program(x):
        def row(v):
            debug.print("{}", v.sum())
            return v

        return torch.func.vmap(row, in_dims=1, out_dims=1)(x)

    f = ft.shard_map(program, MESH, P("dp"), P("dp"))
    want = [f"[dp={i} vmap={j}] {X[i, j]}" for i in range(2) for j in range(2)]
    f(X)
    assert lines(capsys) == want
    traced = trace(f)(X)
    assert lines(capsys) == []
    traced(X)
    by_rank = [
        f"[dp={i} tp={t} vmap={j}] {X[i, j]}" for i in range(2) for t in range(2) for j in range(2)
    ]
    assert lines(capsys) == by_rank


def test_nested_vmaps_and_transforms(capsys):
    def fn(x):
        torch.func.vmap(lambda y: debug.print("{x} {y}", x=x, y=y) or y)(torch.arange(2))
        return x.sum()

    torch.func.vmap(fn)(torch.tensor([5.0, 6.0]))
    assert lines(capsys) == [
        "[vmap=0 vmap1=0] 5.0 0", "[vmap=0 vmap1=1] 5.0 1",
        "[vmap=1 vmap1=0] 6.0 0", "[vmap=1 vmap1=1] 6.0 1",
    ]  # fmt: skip
    printed = lambda x: debug.print("{}", x) or x.sin()
    x = torch.tensor(2.0)
    torch.func.jvp(printed, (x,), (x,))
    torch.func.vmap(torch.func.grad(printed))(torch.tensor([1.0, 3.0]))
    torch.func.grad(torch.func.grad(printed))(x)
    printed(x.clone().requires_grad_()).backward()
    assert lines(capsys) == ["2.0", "[vmap=0] 1.0", "[vmap=1] 3.0", "2.0", "2.0"]


def test_prints_once_under_remat(capsys):
    def loss(x):
        return ft.remat(lambda x: debug.print("{}", x.sum()) or x.sin())(x).sum()

    ft.grad(loss)(torch.ones(3))
    torch.func.grad(loss)(torch.ones(3))
    trace(ft.grad(loss))(torch.ones(3))(torch.ones(3))
    assert lines(capsys) == ["3.0"] * 3


def test_nothing_is_printed_where_nothing_is_computed(capsys):
    def program(x):
        debug.print("{} and {}", x, "static")
        debug.print("static")
        return x

    program(torch.ones(2, device="meta"))
    assert lines(capsys) == ["static"]
    trace(program)(torch.ones(2))
    ft.eval_shape(program)(torch.ones(2))
    assert lines(capsys) == []


def test_gradients_of_a_printing_program_are_recorded_once(capsys):
    def loss(x):
        debug.print("x {}", x.sum())
        return lax.psum((x**2).sum(), ("dp", "tp"))

    step = lambda x: ft.value_and_grad(loss)(x)
    f = ft.shard_map(step, MESH, P("dp", "tp"), (P(), P("dp", "tp")))
    f(X)
    want = [f"[dp={i} tp={j}] x {X[i, j]}" for i in range(2) for j in range(2)]
    assert lines(capsys) == want
    traced = trace(f)(X)
    traced(X)
    assert lines(capsys) == want
    assert [e.name for e, _ in traced.block.walk()].count("debug_print") == 1
    assert [e.where.phase for e, _ in traced.block.walk() if e.name == "debug_print"] == ["forward"]


def test_the_text_of_a_printing_program_parses_back(capsys):
    def program(x):
        debug.print("{{'[\"{}\n", x.sum())
        return x

    traced = trace(ft.shard_map(program, MESH, P("dp", "tp"), P("dp", "tp")))(X)
    written = text.format(traced)
    assert text.format(parse(written)) == written
    traced.check()


PROCESSES = """
import torch, torch.distributed as dist
import functron as ft
from functron import P, lax

dist.init_process_group("gloo")
mesh = ft.Mesh(dp=2, pp=1).bind()

def program(x):
    ft.debug.print("sum {:.0f} of {n}", x.sum(), n=lax.axis_size("dp"))
    return lax.psum(x.sum(), "dp")

f = ft.shard_map(program, mesh, P("dp"), P())
f(torch.full((1,), 1.0 + dist.get_rank()))
shapes = ft.eval_shape(f)(torch.ones(1))
assert shapes.shape == () and shapes.is_meta
local = ft.shard_map(lambda x: lax.all_gather(x * 2, "dp"), mesh, P("dp"), P())
assert ft.eval_shape(local)(torch.ones(3, device="meta")).shape == (2, 3)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_every_process_prints_its_line(torchrun):
    out = torchrun(PROCESSES, 2).stdout.splitlines()
    assert sorted(out) == ["[dp=0] sum 1 of 2", "[dp=1] sum 2 of 2"]


# --- drawings


def test_draws_two_dims():
    text = str(debug.visualize_sharding((4, 8), P("dp", "tp"), Mesh(dp=2, tp=2, cp=2)))
    assert text.splitlines() == [
        "(4, 8) by P('dp', 'tp') on Mesh(dp=2,tp=2,cp=2): each rank holds (2, 4)",
        "      0:4   4:8",
        "    ┌─────┬─────┐",
        "0:2 │ 0,1 │ 2,3 │",
        "    ├─────┼─────┤",
        "2:4 │ 4,5 │ 6,7 │",
        "    └─────┴─────┘",
        "down: dim 0 over dp",
        "across: dim 1 over tp",
        "replicated over cp",
    ]


def test_draws_one_dim_and_none():
    assert str(debug.visualize_sharding((6,), P("tp"), Mesh(tp=2))).splitlines()[1:] == [
        "   0:3   3:6",
        " ┌─────┬─────┐",
        " │  0  │  1  │",
        " └─────┴─────┘",
        "across: dim 0 over tp",
    ]
    assert debug.visualize_sharding((4,), P(), Mesh(dp=4)).cells == {(0,): (0, 1, 2, 3)}
    assert "│ 0-3 │" in str(debug.visualize_sharding((), P(), Mesh(dp=4)))


def test_many_dims_draw_the_first_two_that_are_split():
    drawing = debug.visualize_sharding((4, 8, 6), P(None, "tp", "pp"), Mesh(dp=2, tp=2))
    assert drawing.cells == {(0, 0): (0, 2), (0, 1): (1, 3)}  # dims 0 and 1: pp is absent
    three = debug.visualize_sharding(
        (4, 5, 6, 2), P("dp", None, "tp", "cp"), Mesh(dp=2, tp=2, cp=2)
    )
    assert [dim.number for dim in three.dims] == [0, 2]
    assert three.cells[1, 0] == (4, 5)
    assert "not drawn: dim 3 over cp, in 2 parts" in str(three)
    assert "replicated" not in str(three)


def test_several_axes_on_one_dim():
    drawing = debug.visualize_sharding((8,), P(("tp", "dp")), Mesh(dp=2, tp=2))
    assert [drawing.cells[i,] for i in range(4)] == [(0,), (2,), (1,), (3,)]


@pytest.mark.parametrize("spec", [P("dp", "tp"), P("tp", "dp"), P(None, ("dp", "tp")), P("tp")])
def test_blocks_are_where_the_shards_are(spec):
    """Against the arithmetic that shards tensors."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    drawing = debug.visualize_sharding((8, 8), spec, mesh)
    value = torch.arange(64).reshape(8, 8)
    for rank in range(mesh.size):
        mine = ft.spmd.spec.shard(value, spec, mesh, mesh.coordinate(rank))
        (at,) = [index for index, ranks in drawing.cells.items() if rank in ranks]
        slices = [dim.bounds(block).split(":") for dim, block in zip(drawing.dims, at, strict=True)]
        rows, columns = (slice(int(low), int(high)) for low, high in slices)
        assert torch.equal(mine, value[rows, columns])


def test_large_meshes_are_shortened():
    drawing = debug.visualize_sharding((64, 64), P("dp", "tp"), Mesh(dp=64, cp=8, tp=8))
    rows = str(drawing).splitlines()
    assert len(rows) < 25
    assert " 0,8,…,56 " in rows[3]
    assert any(row.strip().startswith("…") for row in rows)
    assert any("63:64" in row for row in rows)


def test_pictures_show_what_the_text_shows():
    drawing = debug.visualize_sharding((4, 8), P("dp", "tp"), Mesh(dp=2, tp=2, cp=2))
    name = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawing._repr_html_())
    assert len(list(root.iter(f"{name}rect"))) == 4
    shown = [element.text for element in root.iter(f"{name}text")]
    assert {"0,1", "2,3", "4,5", "6,7", "0:2", "4:8", "replicated over cp"} <= set(shown)
    assert len({rect.get("fill") for rect in root.iter(f"{name}rect")}) == 4


def test_tensors_handles_and_trees_are_drawn_as_their_shapes_are():
    mesh, spec = Mesh(dp=2, tp=2), P(None, "tp")
    whole = debug.visualize_sharding((4, 6), spec, mesh)
    handle = types.SimpleNamespace(shape=(4, 6), dtype=torch.float32, spec=spec, mesh=mesh)
    coordinate = {"dp": 0, "tp": 1}
    bound = BoundMesh(mesh, 1, coordinate, {}, "cpu")
    for drawn in (
        debug.visualize_sharding(torch.zeros(4, 6), spec, mesh),
        debug.visualize_sharding(handle),
        debug.visualize_sharding(torch.zeros(4, 3), spec, bound),  # a shard
    ):
        assert str(drawn) == str(whole)
    several = debug.visualize_sharding({"a": torch.zeros(4, 6), "h": handle}, spec, mesh)
    assert [each.cells for each in several.drawings] == [whole.cells] * 2
    root = ElementTree.fromstring(several._repr_html_())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("0,2") == 2
    assert "a (4, 6) P(None, 'tp')" in texts
    assert len(repr(several).splitlines()) <= 20


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((P("dp"), (4,), Mesh(dp=2)), r"array_or_shape, spec, mesh"),
        ((torch.zeros(4), P("dp")), "no mesh"),
        ((torch.zeros(4), None, Mesh(dp=2)), "no spec"),
    ],
)
def test_what_a_drawing_lacks_is_named(given, problem):
    with pytest.raises(ValueError, match=problem):
        debug.visualize_sharding(*given)


def test_a_spec_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a multiple of 2"):
        debug.visualize_sharding((3,), P("dp"), Mesh(dp=2))


def test_check_grads_passes_what_is_right():
    mesh, specs = Mesh(dp=2, tp=2), ({"w": P("tp"), "b": P()}, P("dp", "tp"), P())

    def program(params, x, rows):
        y = lax.psum(torch.tanh(x @ params["w"]), "tp") * params["b"]
        y = lax.all_gather(y, "dp", axis=1, tiled=True) + lax.ppermute(y, "tp", [(0, 1)])[:, :1]
        top = lax.pmax(lax.stop_gradient(y), "tp")
        return {"y": ft.remat(torch.exp)(y - top).log() + top, "rows": rows}

    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(4, 3, generator=generator), "b": torch.ones(3)}
    args = params, torch.randn(2, 4, generator=generator), torch.arange(3)
    ft.debug.check_grads(program, mesh, *args, in_specs=specs)
    smooth = lambda params, x, rows: lax.psum(torch.tanh(x @ params["w"]), "tp") * params["b"]
    mapped = ft.shard_map(smooth, mesh, specs, P("dp"))
    ft.debug.check_grads(mapped, mesh, *args, order=2, modes=("rev", "fwd"))


def squares(forgets):
    """The sum of squares over ranks with a rule of its own, which may forget its psum."""
    f = lambda x: lax.psum(x.square(), "tp")
    rule = lambda x, ct: (2 * x * (ct if forgets else lax.psum(ct, "tp")),)
    return ft.custom_vjp(f, lambda x: (f(x), x), rule)


def test_check_grads_finds_a_rule_that_forgot_a_psum():
    mesh, x = Mesh(tp=4), torch.arange(1.0, 9.0).view(2, 4)
    specs = ({"x": P(None, "tp")},)
    run = lambda forgets, **how: ft.debug.check_grads(
        lambda tree: squares(forgets)(tree["x"]), mesh, {"x": x}, in_specs=specs, **how
    )
    run(False, order=2)
    with pytest.raises(
        ValueError, match=r"argument 0/x: got .* by rev; wanted .*custom_vjp"
    ) as bad:
        run(True)
    got, want = map(float, re.findall(r"got (\S+) by rev; wanted (\S+),", str(bad.value))[0])
    assert abs(got - want) > 0.1 * abs(want)
    # on one rank nothing was forgotten
    ft.debug.check_grads(squares(True), Mesh(), x)


def test_check_grads_finds_wrong_second_derivatives():
    """A gradient that is right, whose own derivative is cut off."""
    f = lambda x: lax.psum(x**3, "tp")
    rule = lambda x, ct: (3 * lax.stop_gradient(x).square() * lax.psum(ct, "tp"),)
    program = ft.custom_vjp(f, lambda x: (f(x), x), rule)
    args = Mesh(tp=2), torch.tensor([1.0, 2.0])
    ft.debug.check_grads(program, *args, in_specs=P("tp"))
    with pytest.raises(ValueError, match=r"order 2 .*(?s:.)*gradient of argument 0: got 0 by rev"):
        ft.debug.check_grads(program, *args, in_specs=P("tp"), order=2)


def test_check_grads_refuses_what_it_cannot_check():
    with pytest.raises(ValueError, match="order: got 0") as caught:
        ft.debug.check_grads(torch.sin, Mesh(), torch.arange(3), order=0, modes=("back",))
    assert 'modes: got \'back\'; wanted "rev" or "fwd"' in str(caught.value)
    assert "no floating-point tensor" in str(caught.value)
