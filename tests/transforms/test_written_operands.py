"""Functions that loops, branches and operations run change no tensor of the caller's."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax
from tests.transforms.lives import LIVES

WRITES = ft.ops.register("test_writes_its_operand", lambda x: x.add_(1))
ITSELF = ft.ops.register("test_returns_its_operand", lambda x: x)
RULES = ft.ops.register(
    "test_backward_writes", lambda x: x * 1, backward=lambda args, out, cts: (cts[0].mul_(2),)
)
YES = torch.tensor(True)


def plus_closed(x):
    held = {"deep": [x]}
    inner = lambda: held["deep"][0].mul_(2)
    return lambda c, _: (c + inner().sum(), None)


KEEPS = lambda x: x * 1, lambda x: (x * 1, None), lambda _, cotangent: (cotangent,)


def of_rules(forward, backward):
    f = ft.custom_vjp(KEEPS[0], forward, backward)
    return ft.grad(lambda x: (f(x) ** 2).sum())


WRITERS = {
    "scan, carry": lambda x: ft.scan(lambda c, _: (c.add_(1), None), x, length=2),
    "scan, own carry": lambda x: ft.scan(lambda c, _: (c.add_(1), c), x.clone(), length=2),
    "scan, later carry": lambda x: ft.scan(
        lambda c, first: ((c + 1 if first else c.add_(1)), c), x, torch.tensor([True, False])
    ),
    "scan, row": lambda x: ft.scan(lambda c, row: (c + row.add_(1), None), torch.zeros(()), x),
    "scan, closure": lambda x: ft.scan(plus_closed(x), torch.zeros(()), length=2),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c.add_(1), x),
    "while, predicate": lambda x: lax.while_loop(lambda c: c.add_(1).sum() < 9, lambda c: c, x),
    "fori": lambda x: lax.fori_loop(0, 2, lambda i, c: c.add_(i), x),
    "fori to a tensor": lambda x: lax.fori_loop(0, YES.int(), lambda i, c: c.add_(i), x),
    "cond": lambda x: lax.cond(YES, lambda c: c.add_(1), lambda c: c, x),
    "cond by a number": lambda x: lax.cond(1, lambda c: c.add_(1), lambda c: c, x),
    "cond, an element": lambda x: lax.cond(YES, lambda c: c.__setitem__(0, 5.0) or c, lambda c: c, x),
    "cond, closure": lambda x: lax.cond(YES, lambda: x.add_(1), lambda: x),
    "switch of rows": lambda x: torch.func.vmap(
        lambda i: lax.switch(i, [lambda: x.add_(1), lambda: x])
    )(torch.arange(2)),
    "map": lambda x: lax.map(lambda row: row.add_(1), x),
    "map of batches": lambda x: lax.map(lambda row: row.add_(1), x, batch_size=2),
    "associative_scan": lambda x: lax.associative_scan(lambda a, b: a.add_(b), x),
    "remat": lambda x: ft.remat(lambda x: x.add_(1))(x),
    "jvp": lambda x: ft.jvp(lambda x: x.add_(1) * 1, (x,), (x + 1,)),
    "custom_vjp": lambda x: ft.custom_vjp(lambda x: x.add_(1), *KEEPS[1:])(x),
    "custom_vjp, forward": lambda x: of_rules(lambda x: (x.add_(1) * 1, None), KEEPS[2])(x),
    "custom_vjp, backward": lambda x: of_rules(KEEPS[1], lambda _, ct: (ct.add_(1),))(x),
    "custom_vjp, jvp": lambda x: ft.jvp(
        ft.custom_vjp(*KEEPS, lambda args, ts: (args[0] * 1, ts[0].add_(1))), (x,), (x + 1,)
    ),
    "custom_jvp": lambda x: ft.custom_jvp(lambda x: x.add_(1), lambda args, ts: (args, ts))(x),
    "custom_root, f": lambda x: lax.custom_root(
        lambda x: x.sub_(1), x, lambda f, x: x - f(x), lambda g, y: y
    ),
    "custom_linear_solve, matvec": lambda x: lax.custom_linear_solve(
        lambda x: x.mul_(2), x, lambda matvec, b: matvec(b) / 4
    ),
    "register, backward": ft.grad(lambda x: (RULES(x) ** 2).sum()),
    "register": WRITES,
    "register, rows": torch.func.vmap(WRITES),
    "register, ranks": ft.shard_map(WRITES, Mesh(dp=3), P("dp"), P("dp")),
    "vmap of scan": lambda x: torch.func.vmap(
        lambda x: ft.scan(lambda c, _: (c.add_(1), None), x, length=2)[0]
    )(x),
    "a simulated cond": ft.shard_map(
        lambda x: lax.cond(x.sum() > 0, lambda c: c.add_(1), lambda c: c, x),
        Mesh(dp=3), P("dp"), P("dp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_writes_in_place_are_refused(writer):
    with pytest.raises(ValueError, match="in place, which it was given or closes over"):
        WRITERS[writer](torch.arange(1.0, 4.0))


RECORDED = ["scan, carry", "scan, own carry", "scan, row", "scan, closure", "fori", "map", "while"]


@pytest.mark.parametrize("life", list(LIVES)[1:])
@pytest.mark.parametrize("writer", RECORDED)
def test_they_are_refused_in_programs_too(writer, life):
    with pytest.raises(ValueError, match="in place, which it was given or closes over"):
        LIVES[life](lambda x: WRITERS[writer](2 * x))(torch.arange(1.0, 4.0))


SHOWN = {
    "slice": lambda x: lax.dynamic_slice(x, (0,), (2,)),
    "slice in dim": lambda x: lax.dynamic_slice_in_dim(x, 0, 2),
    "index": lambda x: lax.dynamic_index_in_dim(x, 0),
    "index without dim": lambda x: lax.dynamic_index_in_dim(x, 0, keepdims=False),
    "branch": lambda x: lax.cond(YES, lambda x: x[:2], lambda x: x[2:], x),
    "branch itself": lambda x: lax.cond(YES, lambda x: x, torch.neg, x),
    "no step": lambda x: lax.fori_loop(0, 0, lambda i, c: c + 1, x),
    "steps that reverse": lambda x: lax.fori_loop(0, 2, lambda i, c: c.view(2, 2).mT.flatten(), x),
    "steps that show": lambda x: lax.fori_loop(0, 2, lambda i, c: c.view_as(c), x),
    "while that shows": lambda x: lax.while_loop(
        lambda c: c[1] < 1, lambda c: (c[0].view_as(c[0]), c[1] + 1), (x, 0)
    )[0],
    "rows": lambda x: ft.scan(lambda c, row: (row, None), torch.zeros(()), x)[0],
    "whole slice": lambda x: lax.dynamic_slice(x, (0,), (4,)),
    "whole update": lambda x: lax.dynamic_update_slice(torch.zeros(4), x, (0,)),
    "branch by a number": lambda x: lax.cond(True, lambda x: x, torch.neg, x),
    "closed over": lambda x: lax.cond(YES, lambda: x, lambda: -x),
    "closed over by a step": lambda x: ft.scan(lambda c, _: (x, None), 2 * x, length=2)[0],
    "no step of while": lambda x: lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x),
    "steps that do nothing": lambda x: lax.fori_loop(0, 2, lambda i, c: c, x),
    "steps written out": lambda x: ft.scan(lambda c, _: (c, None), x, length=2, unroll=True)[0],
    "rows of a batch": lambda x: lax.map(lambda row: row, x, batch_size=9),
    "barrier": lax.optimization_barrier,
    "one case": lambda x: lax.select_n(torch.tensor(0), x),
    "one maximum": lambda x: lax.cummax(x[None])[0],
    "register": lambda x: torch.func.vmap(ITSELF)(x),
    "one element": lambda x: lax.associative_scan(torch.add, x[None])[0],
}


@pytest.mark.parametrize("word", SHOWN)
def test_an_update_of_a_result_in_place_changes_no_operand(word):
    """A donated tensor is gone, or it is as it was."""
    update = ft.shard_map(lambda x: x.add_(1), Mesh(), P(), P(), donate=0)
    x = torch.arange(4.0)
    shown = SHOWN[word](x)
    want = shown + 1
    assert torch.equal(update(shown), want)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("word", SHOWN)
def test_a_result_is_a_value_in_every_life(word, life):
    """As in JAX, where nothing that is done to an operand or a result reaches the other."""

    def program(x):
        one, other = x * 1, x * 1
        first, second = SHOWN[word](one), SHOWN[word](other)
        first.add_(100)
        other.mul_(10)
        return one * 1, second * 1

    x = torch.arange(4.0)
    one, second = LIVES[life](program)(x)
    assert torch.equal(one, x)
    assert torch.equal(second, SHOWN[word](x))


@pytest.mark.parametrize("life", LIVES)
def test_results_that_are_one_tensor_are_two_values(life):
    twice = lambda x: 2 * (x,)
    words = {
        "cond": lambda x: lax.cond(YES, lambda x: twice(2 * x), twice, x),
        "scan": lambda x: ft.scan(lambda c, _: (twice(2 * c[0]), None), twice(x), length=1)[0],
        "while": lambda x: lax.while_loop(lambda c: c[0][1] < 2, lambda c: twice(2 * c[0]), twice(x)),
    }  # fmt: skip

    def program(x):
        made = {name: word(x) for name, word in words.items()}
        for one, _ in made.values():
            one.zero_()
        return {name: other * 1 for name, (_, other) in made.items()}

    assert {k: v.tolist() for k, v in LIVES[life](program)(torch.ones(2)).items()} == {
        name: [2, 2] for name in words
    }
