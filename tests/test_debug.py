"""Printing from every kind of program, and drawings of shardings."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, debug, lax
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


def test_fields_of_tensors_are_refused():
    with pytest.raises(ValueError, match=r"the field '0\.shape' of a tensor"):
        debug.print("{0.shape}", torch.ones(2))


def test_draws_two_dims():
    text = str(debug.visualize_sharding(P("dp", "tp"), (4, 8), Mesh(dp=2, tp=2)))
    assert text.splitlines()[1:] == [
        "┌───┬───┐",
        "│ 0 │ 1 │",
        "├───┼───┤",
        "│ 2 │ 3 │",
        "└───┴───┘",
        "down: dim 0, 4 in 2 of 2 over dp",
        "across: dim 1, 8 in 2 of 4 over tp",
    ]


def test_replicas_share_a_block():
    drawing = debug.visualize_sharding(P(None, None, "tp"), (4, 8, 6), Mesh(dp=2, tp=2))
    assert drawing.cells == {(0, 0): (0, 2), (0, 1): (1, 3)}
    assert "0,2" in str(drawing)
    assert debug.visualize_sharding(P(), (4,), Mesh(dp=4)).cells == {(0,): (0, 1, 2, 3)}
    assert "0-3" in str(debug.visualize_sharding(P(), (), Mesh(dp=4)))


def test_several_axes_on_one_dim():
    drawing = debug.visualize_sharding(P(("tp", "dp")), (8,), Mesh(dp=2, tp=2))
    assert [drawing.cells[i,] for i in range(4)] == [(0,), (2,), (1,), (3,)]


def test_pictures_are_well_formed():
    from xml.etree import ElementTree

    svg = debug.visualize_sharding(P("dp", "tp"), (4, 8), Mesh(dp=2, tp=2))._repr_html_()
    assert len(list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"))) == 4


def test_a_spec_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="shape"):
        debug.visualize_sharding(P("dp"), (3,), Mesh(dp=2))
