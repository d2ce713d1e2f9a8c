"""Effects in branches and loops: of the ranks and elements alone that are there."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, debug, lax, random

MESH, X = Mesh(dp=4), torch.arange(4.0)


def program(seen):
    keep = lambda x, coordinate: seen.append((*coordinate.values(), x.tolist()))

    def f(x):
        def large(x):
            debug.callback(keep, x.sum(), coordinate=True)
            debug.check(x.sum() > 1, "large {}", x)
            return x * 2

        def small(x):
            debug.print("small {}", x.sum())
            debug.check(x.sum() <= 1, "small {}", x)
            return x

        def grow(x):
            debug.print("grow {}", x.sum())
            return x + 1

        return lax.while_loop(lambda x: x.sum() < 3, grow, lax.cond(x.sum() > 1, large, small, x))

    return f


def lines(name):
    small = [f"[{name}=0] small 0.0", f"[{name}=1] small 1.0"]
    grow = [(0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]
    return [*small, *(f"[{name}={at}] grow {value:.1f}" for at, value in grow)]


def forms(f, x):
    return [f, ft.trace(f)(x), ft.jit(f, backend="eager")]


@pytest.mark.parametrize("name", ["dp", "vmap"])
def test_effects_are_of_those_that_are_there(name, capsys):
    seen = []
    f = program(seen)
    mapped, x = ft.shard_map(f, MESH, P("dp"), P("dp")), X
    if name == "vmap":
        mapped, x = torch.func.vmap(f), X[:, None]
    for run in forms(mapped, x):
        seen.clear()
        assert run(x).flatten().tolist() == [3.0, 3.0, 4.0, 6.0]
        assert seen == [(2, 2.0), (3, 3.0)]
        assert capsys.readouterr().out.splitlines() == lines(name)


def test_a_branch_that_is_not_taken_has_no_nan():
    f = lambda x: lax.cond(x.sum() > 0, lambda x: x.log(), lambda x: x, x)
    mapped = ft.shard_map(f, MESH, P("dp"), P("dp"))
    torch.testing.assert_close(debug.nans(mapped)(X - 1), mapped(X - 1))


def in_one_branch(key, pred):
    normal, uniform = (lambda k, draw=d: draw(k, (2,)) for d in (random.normal, random.uniform))
    return lax.cond(pred, normal, uniform, key)


def in_loop(key, pred):
    return lax.while_loop(
        lambda c: c.sum() < 3, lambda c: c + random.uniform(key, (2,)), torch.zeros(2)
    )


def carried(key, pred):
    def body(c):
        sub, key = random.split(c[1])
        return c[0] + random.uniform(sub, (2,)), key

    return lax.while_loop(lambda c: c[0].sum() < 3, body, (torch.zeros(2), key))


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (in_one_branch, None),
        (carried, None),
        (lambda k, p: in_one_branch(k, p) + random.normal(k, (2,)), "used before, by normal"),
        (in_loop, "used in each iteration of loop"),
    ],
)
def test_keys_in_branches_and_loops(f, said):
    check = lambda: debug.check_key_reuse(f)(random.key(0), torch.tensor(True))
    if said is None:
        check()
    else:
        with pytest.raises(ValueError, match=said):
            check()
