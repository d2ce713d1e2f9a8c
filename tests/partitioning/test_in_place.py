"""Writes in place, through views: gradients on meshes and in traces are those of torch's tape.

``pytest --full`` takes three hundred functions by seed, ``--seeds N`` as many; by default four.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import functron as ft
from functron import P
from tests.partitioning import in_place
from tests.partitioning.in_place import FORMS, READS, VIEWS, Case, View


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        seeds, full = map(metafunc.config.getoption, ("--seeds", "--full"))
        default = 300 if full else 4
        metafunc.parametrize("seed", range(default if seeds is None else seeds))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_seeds(seed):
    case = in_place.draw(seed)
    assert case == in_place.draw(seed)
    lines = [*in_place.check(case), *in_place.check_mapped(case)]
    assert not lines, "\n".join([*lines, case.text()])


def _case(operation: str, view: str, form: str, read: str = READS[0]) -> Case:
    return Case(operation, ((View(view), False, form, read),))


CASES = {
    "+=": _case("product", "h", "t += y"),
    "*=": _case("linear", "h", "t *= y"),
    "/=": _case("product", "h", "t /= 3 + y * y"),
    "[..., i] =": _case("product", "h[..., 1]", "t.copy_(y)"),
    "all views": _case("heads", "h.transpose(1, 2).flatten(2)[..., 2:]", "t.mul_(2)"),
    "a number": _case("heads", "h.transpose(0, 1)", "t.fill_(p['b'].sum())"),
    "what a view was before": _case("linear", "h.narrow(-1, 1, 2)", "t.tanh_()"),
    "no window": _case("flat", "h.as_strided((2, 3), (1, 7), 3).mT", "t.mul_(y)"),
    "zeros of a kind": _case("constant", "h.transpose(0, 1)", "t += y"),
    "unseen by the tape": _case("product", "h", "with torch.no_grad(): t.mul_(3)"),
    "unseen through a view": _case("linear", "h[1]", "t.detach().mul_(3)"),
    "strides of a part": Case(
        "product",
        (
            (View("h[1]"), False, "t += y", ""),
            (View("h.as_strided((2, 3), (1, 7), 3)", owned=True), True, "t *= y", "(t * t).sum()"),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_once_failed(name):
    lines = in_place.check(CASES[name], ("one", "sp", "dp+tp"))
    assert not lines, "\n".join([*lines, CASES[name].text()])


def test_every_form_and_view_is_drawn():
    drawn = [step for seed in range(400) for step in in_place.drawn(seed).steps]
    assert {view for view, *_ in drawn} == {*VIEWS}
    assert {form for *_, form, _ in drawn} == {*FORMS}
    assert any(view.owned and nested for view, nested, *_ in drawn)


def test_a_write_to_all_or_a_part_of_a_split_product_gathers_nothing():
    """Sums of gradients are all that is sent, with the sequence or the batch split."""

    def loss(p, x):
        h = x @ p["w"]
        h += p["b"]
        h[..., 0] = 0.5
        h[..., 2:4] *= p["b"][2:4]
        h.transpose(0, 1).mul_(2)
        return (h * h).sum()

    params = {name: in_place.PARAMS[name] for name in ("b", "w")}
    for axis, rows in (("tp", P(None, "tp")), ("dp", P("dp"))):
        mapped = ft.partition(ft.grad(loss), ft.Mesh(**{axis: 2}), (P(), rows), P())
        program = ft.trace(mapped)(params, in_place.X)
        program.check()
        ops = [(e.name, e.op) for e in program.block.equations]
        sent = Counter(name for name, op in ops if getattr(op, "namespace", "") == "functron")
        assert {*sent} <= {"psum", "vary", "require_replicated"}
        assert sent["psum"] <= 5
        wanted = torch.func.grad(loss)(params, in_place.X)
        torch.testing.assert_close(mapped(params, in_place.X), wanted, rtol=1e-12, atol=1e-12)


def test_a_view_that_the_tape_forgets_is_refused():
    def loss(x):
        h = x * 2
        h[0].unsqueeze_(0)[:, 1:].mul_(2)
        return (h * h).sum()

    with pytest.raises(ValueError, match=r"aten.unsqueeze_.*tape forgets.*aten.unsqueeze.default"):
        ft.trace(ft.grad(loss))(torch.ones(4, 3))


ROWS = [((2, 2), (2, 12), 0), ((2, 3), (1, 7), 3), ((2, 2), (2, 2), 6)]
SHOWN = {  # a view of 4 by 6, and of ROWS, by where they start, those with places outside of it
    "a row": (lambda h: h[1], {0, 3}),
    "a row of zeros": (lambda h: torch.zeros_like(h)[1], {0, 3}),
    "every other": (lambda h: h[:, ::2], {3}),
    "turned": (lambda h: h.t()[:2], {0, 3, 6}),
}
STRIDED = {"as_strided": torch.as_strided, "as_strided_copy": torch.as_strided_copy}


@pytest.mark.parametrize("grad", [ft.grad, torch.func.grad], ids=["ft", "torch"])
@pytest.mark.parametrize("op", STRIDED)
@pytest.mark.parametrize("name", SHOWN)
def test_a_trace_differentiates_strides_of_a_view_or_refuses_them(name, op, grad):
    """The oracle takes the strides of what owns the memory, which torch differentiates right."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    view_of, outside = SHOWN[name]
    # zeros have a derivative from the write on, and so no tape where the view is taken; the one of
    # torch.func.grad then takes views of what owns the memory by itself, and a copy is a constant
    if name == "a row of zeros" and (grad is torch.func.grad or op == "as_strided_copy"):
        outside = set()
    told = rf"test_in_place.py.*aten.{op}.default is differentiated, and shows memory.*fix: call "
    for size, stride, start in ROWS:

        def loss(x, of=None, size=size, stride=stride, start=start):
            h = x * 2
            view = view_of(h)
            whole = view if of is None else of(view)
            shown = STRIDED[op](whole, size, stride, start)
            view.mul_(x[0, 0])
            shown = shown * 1 if op == "as_strided" else shown
            return (shown * shown).sum() + (view * h.sum()).sum()

        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf, lambda view: view._base), leaf)
        if start in outside:
            with pytest.raises(ValueError, match=told):
                ft.trace(grad(loss))(x)
        else:
            got = ft.trace(grad(loss))(x)(x)
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        # the function itself, and its derivative where the equations are differentiated
        torch.testing.assert_close(ft.trace(loss)(x)(x), loss(x), rtol=1e-12, atol=1e-12)
        mapped = ft.partition(ft.grad(loss), ft.Mesh(dp=2), (P("dp"),), P("dp"))
        torch.testing.assert_close(mapped(x), wanted, rtol=1e-12, atol=1e-12)


def test_strides_that_are_written_anew():
    """What torch gives for strides in place, and for a scatter, of a view and of all."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def scattered(x):
        return torch.as_strided_scatter((x * 2)[1], x[:2, :3], (2, 3), (3, 1), 6)

    def outside(x):
        return torch.as_strided_scatter((x * 2)[1], x[:2, :3], (2, 3), (1, 7), 3)

    def in_place(x):
        h = x * 2
        row = h[1]
        h.as_strided_((2, 3), (1, 7), 3)
        h.mul_(3)
        return row * h.sum()

    told = r"test_in_place.*tape.*fix: (whole = x.clone|use)"
    for f in (scattered, outside, in_place):
        torch.testing.assert_close(ft.trace(f)(x)(x), f(x), rtol=0, atol=0)
        torch.testing.assert_close(ft.partition(f, ft.Mesh(dp=2), P(), P())(x), f(x))
        for grad in (ft.grad, torch.func.grad):
            with pytest.raises(ValueError, match=told):
                ft.trace(grad(lambda x, f=f: f(x).sum()))(x)

    gaps = torch.randn(4, 12, dtype=torch.float64)[:, ::2]
    with pytest.raises(ValueError, match=r"as_strided_scatter.*densely.*fix: whole = x.clone"):
        ft.trace(lambda x: torch.as_strided_scatter(x, x[:2, :2], (2, 2), (2, 12), 0))(gaps)
