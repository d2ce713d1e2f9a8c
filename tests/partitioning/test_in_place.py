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
}


@pytest.mark.parametrize("name", CASES)
def test_what_once_failed(name):
    lines = in_place.check(CASES[name], ("one", "sp", "dp+tp"))
    assert not lines, "\n".join([*lines, CASES[name].text()])


def test_every_form_and_view_is_drawn():
    drawn = [step for seed in range(400) for step in in_place.drawn(seed).steps]
    assert {view for view, *_ in drawn} == {*VIEWS}
    assert {form for *_, form, _ in drawn} == {*FORMS}


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
