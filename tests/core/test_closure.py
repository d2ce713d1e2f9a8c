"""Hoisting: every place where a function can hold a tensor that something differentiates."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
from torch.func import grad, vmap

import functron as ft
from functron import Mesh, P
from functron.core.closure import hoist


def leaf(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


X = torch.tensor(2.0, dtype=torch.float64)
GLOBAL = leaf(3.0)
GLOBAL_TREE = {"a": [leaf(3.0)], "b": None}


def uses_global(x):
    return x * GLOBAL


def uses_global_tree(x):
    return x * GLOBAL_TREE["a"][0]


def calls_another(x):
    return uses_global(x)


def calls_in_nested_code(x):
    return next(uses_global(y) for y in (lambda z: (z,))(x))


def decorated(f):
    @functools.wraps(f)
    def wrapper(x):
        return f(x)

    return wrapper


def even(x, depth):
    return x if depth == 0 else odd(x * GLOBAL, depth - 1)


def odd(x, depth):
    return x if depth == 0 else even(x, depth - 1)


def recursive_globals(x):
    return even(x, 2)


class Model(NamedTuple):
    w: torch.Tensor

    def apply(self, x):
        return x * self.w

    def bound(self):
        return self.apply


def over_cell():
    w = leaf(3.0)
    return lambda x: x * w


def over_default():
    return lambda x, w=leaf(3.0): x * w  # noqa: B008


def over_keyword_default():
    def f(x, *, w=leaf(3.0)):  # noqa: B008
        return x * w

    return f


def over_partial():
    return functools.partial(lambda w, x: x * w, leaf(3.0))


def over_partial_keyword():
    return functools.partial(lambda x, w: x * w, w=leaf(3.0))


def over_partial_of_closure():
    w = leaf(3.0)
    return functools.partial(lambda one, x: one * x * w, 1.0)


def over_method():
    return Model(leaf(3.0)).apply


def over_nested_function():
    w = leaf(3.0)

    def inner(x):
        return x * w

    def middle(x):
        return inner(x)

    return lambda x: middle(x)


def over_nested_containers():
    held = {"layers": [(leaf(3.0), "name"), 5], "more": Model(X)}
    return lambda x: x * held["layers"][0][0]


def over_container_of_functions():
    w = leaf(3.0)
    steps = [lambda x: x * w, lambda x: x]
    return lambda x: steps[1](steps[0](x))


def over_recursion():
    w = leaf(3.0)

    def power(x, depth=1):
        return x if depth == 0 else power(x * w, depth - 1)

    return power


def over_mutual_recursion():
    w = leaf(3.0)

    def first(x, depth=2):
        return x if depth == 0 else second(x * w, depth - 1)

    def second(x, depth):
        return x if depth == 0 else first(x, depth - 1)

    return first


def over_wrapped():
    w = leaf(3.0)
    return decorated(lambda x: x * w)


CASES = {
    maker.__name__: maker
    for maker in (
        over_cell,
        over_default,
        over_keyword_default,
        over_partial,
        over_partial_keyword,
        over_partial_of_closure,
        over_method,
        over_nested_function,
        over_nested_containers,
        over_container_of_functions,
        over_recursion,
        over_mutual_recursion,
        over_wrapped,
    )
} | {
    f.__name__: lambda f=f: f
    for f in (
        uses_global,
        uses_global_tree,
        calls_another,
        calls_in_nested_code,
        recursive_globals,
    )
}


@pytest.fixture(params=list(CASES))
def function(request):
    """A function that computes 3 x, the 3 being a tensor that it closes over."""
    return CASES[request.param]()


def test_the_tensor_is_found_and_replaced(function):
    assert function(X).item() == 6.0
    tensors, close = hoist(function)
    assert [t.item() for t in tensors] == [3.0]
    other = torch.tensor(5.0, dtype=torch.float64)
    assert close([other])(X).item() == 10.0
    assert close(tensors)(X).item() == 6.0
    assert function(X).item() == 6.0  # the original is what it was


def test_gradients_reach_it(function):
    """Remat sees only its operands, so closed-over tensors are hoisted."""
    tensors, _ = hoist(function)
    (gradient,) = torch.autograd.grad(ft.remat(function)(X), tensors)
    assert gradient.item() == 2.0


def global_partial(x):
    return PARTIAL(x)


def global_remat(x):
    return REMAT(x)


PARTIAL = functools.partial(lambda w, x: x * w, GLOBAL)
REMAT = ft.remat(uses_global)


@pytest.mark.parametrize("f", [global_partial, global_remat])
def test_globals_that_wrap_functions(f):
    """A notebook's ``block = ft.remat(block)`` or ``partial(block, w)``, used by another function."""
    (gradient,) = torch.autograd.grad(ft.remat(f)(X), GLOBAL)
    assert gradient.item() == 2.0


# What is left alone


def plain(x):
    constant = torch.tensor(3.0)
    return (lambda y: y * constant)(x)


def test_nothing_tracked_leaves_the_function_as_it_is():
    w = torch.tensor(3.0)
    held = [w, {"b": w}]
    for f in (plain, lambda x: x * w, lambda x: x * held[0], functools.partial(torch.mul, w)):
        tensors, close = hoist(f)
        assert tensors == []
        assert close([]) is f


def test_parts_without_tracked_tensors_are_not_copied():
    w, untouched = leaf(3.0), [torch.tensor(1.0)]

    def helper(x):
        return x

    def f(x):
        return helper(x) * w, helper, untouched

    _, close = hoist(f)
    value, same_helper, same_list = close([leaf(5.0)])(X)
    assert value.item() == 10.0
    assert same_helper is helper
    assert same_list is untouched


def test_containers_and_methods_keep_their_types():
    model = Model(leaf(3.0))
    _, close = hoist(lambda: model)
    other = leaf(5.0)
    rebuilt = close([other])()
    assert type(rebuilt) is Model
    assert rebuilt.w is other
    assert close([other])().bound()(X).item() == 10.0


def test_names_and_signatures_are_kept():
    w = leaf(3.0)

    def f(x, scale=2.0, *, shift=1.0):
        """Scaled."""
        return x * w * scale + shift

    f.note = "kept"
    closed = hoist(f)[1]([leaf(5.0)])
    assert (closed.__name__, closed.__doc__, closed.note) == ("f", "Scaled.", "kept")
    assert closed(X).item() == 21.0
    assert closed(X, 1.0, shift=0.0).item() == 10.0


def test_each_tensor_is_one_operand():
    w, v = leaf(3.0), leaf(4.0)
    held = [w, {"again": w}]

    def f(x, other=w):
        return x * w * held[0] * held[1]["again"] * other + v

    tensors, close = hoist(f)
    assert sorted(t.item() for t in tensors) == [3.0, 4.0]
    replacement = {3.0: 2.0, 4.0: 1.0}
    new = [torch.tensor(replacement[t.item()], dtype=torch.float64) for t in tensors]
    assert close(new)(X).item() == 2.0 * 2.0**4 + 1.0


def test_unfilled_cells_are_skipped():
    def f(x):
        return x * w if x is not None else later

    w = leaf(3.0)
    tensors, close = hoist(f)
    assert [t.item() for t in tensors] == [3.0]
    assert close([leaf(5.0)])(X).item() == 10.0
    later = 1  # until here the cell is empty


def test_builtins_and_torch_functions():
    for f in (len, torch.sin, torch.nn.functional.relu, str.upper):
        tensors, close = hoist(f)
        assert tensors == []
        assert close([]) is f


# What counts as tracked


def test_tensors_of_transforms():
    """Values being differentiated or mapped by torch.func are found; those at rest are not."""
    counts = []

    def probe(w):
        counts.append(len(hoist(lambda x: x * w)[0]))
        return w * 1.0

    probe(X)
    grad(probe)(X)
    vmap(probe)(torch.stack([X, X]))
    torch.func.jvp(probe, (X,), (X,))
    assert counts == [0, 1, 1, 1]


def test_gradients_through_transforms():
    def total(w):
        block = ft.remat(lambda x: torch.sin(x * w))
        return block(block(X))

    def plain_total(w):
        return torch.sin(torch.sin(X * w) * w)

    w = torch.tensor([0.3, 0.7], dtype=torch.float64)
    torch.testing.assert_close(vmap(grad(total))(w), vmap(grad(plain_total))(w))
    torch.testing.assert_close(grad(grad(total))(w[0]), grad(grad(plain_total))(w[0]))


@dataclasses.dataclass
class Unregistered:
    """A dataclass that trees do not know."""

    w: torch.Tensor


class Plain:
    """An object with a tensor."""

    def __init__(self, w):
        self.w = w


def _squares(m):
    return (m.w**2).sum()


def _ruled(f):
    return ft.custom_vjp(f, lambda m: (f(m), m.w), lambda w, g: (Plain(2 * w * g),))


SEEN_BY_NOTHING = {
    "remat's argument": lambda kind: lambda w: ft.remat(_squares)(kind(w)),
    "remat's output": lambda kind: lambda w: ft.remat(lambda w: kind(w**2))(w).w.sum(),
    "custom_vjp's argument": lambda kind: lambda w: _ruled(_squares)(kind(w)),
    "scan's carry": lambda kind: (
        lambda w: ft.scan(lambda m, x: (kind(m.w * x), x), kind(w), torch.ones(2, 3))[0].w.sum()
    ),
    "vjp's primal": lambda kind: lambda w: ft.vjp(_squares, kind(w))[0],
    "vjp's output": lambda kind: lambda w: ft.vjp(lambda w: kind(w**2), w)[0].w.sum(),
    "the auxiliary value": lambda kind: (
        lambda w: ft.value_and_grad(lambda w: ((w**2).sum(), kind(w)), has_aux=True)(w)[0][0]
    ),
    "shard_map's output": lambda kind: (
        lambda w: ft.shard_map(lambda x: kind(x * 2), Mesh(dp=3), (P("dp"),), P())(w).w.sum()
    ),
    "partition's output": lambda kind: (
        lambda w: ft.partition(lambda x: kind(x * 2), Mesh(dp=3), (P("dp"),))(w).w.sum()
    ),
    "trace's output": lambda kind: lambda w: ft.trace(lambda x: kind(x * 2))(torch.ones(3)),
    "eval_shape's output": lambda kind: lambda w: ft.eval_shape(lambda x: kind(x * 2))(w),
}


@pytest.mark.parametrize("kind", [Unregistered, Plain])
@pytest.mark.parametrize("name", SEEN_BY_NOTHING)
def test_objects_with_tensors_that_trees_do_not_see_are_refused(name, kind):
    """``ft.grad`` of ``sum(w**2) + sum(w)`` was 1 in place of 2 w + 1 where it saw half of it."""

    def f(w):
        return SEEN_BY_NOTHING[name](kind)(w) + w.sum()

    with pytest.raises(TypeError, match=rf"{kind.__name__} with tensors; .*register_dataclass"):
        ft.grad(f)(torch.tensor([1.0, 2.0, 3.0]))


def test_tensors_held_by_arguments_that_are_not_differentiated_count_outside():
    """``d/dw sum(d/dv (w v^2))`` at v = w is 2 w, and 2 w again by the inner argument: 4 w."""

    def f(w):
        return ft.grad(lambda v, m: (m.w * v**2).sum())(w, Unregistered(w)).sum()

    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(torch.func.grad(lambda w: (2 * w * w).sum())(w), 4 * w)
    torch.testing.assert_close(ft.grad(f)(w), 4 * w)
    kept = w.clone()
    inner = ft.grad(lambda v, m: (m.w * v**2).sum())
    torch.testing.assert_close(ft.grad(lambda w: inner(kept, Unregistered(w)).sum())(w), 2 * kept)


def test_objects_whose_tensors_nothing_tracks_stay_static():
    w, table = torch.tensor([1.0, 2.0, 3.0]), Plain(torch.ones(3) * 2)
    f = ft.remat(lambda w, m: (m.w * w**2).sum())
    torch.testing.assert_close(ft.grad(f)(w, table), 4 * w)
    static = ft.shard_map(lambda w, m: m.w * w, Mesh(dp=3), (P("dp"), None), P("dp"))
    with pytest.raises(TypeError, match=r"static spec None.*register_dataclass"):
        static(w, Unregistered(w))
