"""The check of traced programs agrees with the simulator's."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax
from functron.program.check import varying
from functron.program.trace import trace

MESH = Mesh(dp=2, tp=2)
W, X = torch.ones(4, 4), torch.ones(4, 4)
IN = (P(None, "tp"), P("dp"))


def forgotten_psum(w, x):
    return (x @ w @ w.mT).sum()


def half_reduced(w, x):
    return lax.psum((x @ w @ w.mT).sum(), "tp")


def reduced(w, x):
    return lax.psum((x @ w @ w.mT).sum(), ("dp", "tp"))


def doubled(w, x):
    return lax.psum(lax.psum((x @ w @ w.mT).sum(), ("dp", "tp")), "tp")


def gathered(w, x):
    return lax.all_gather(lax.all_gather(x @ w, "tp", axis=1, tiled=True), "dp", tiled=True).sum()


def scattered(w, x):
    return lax.psum(lax.psum_scatter(x @ w, "dp", tiled=True).sum(), "tp")


def permuted(w, x):
    return lax.ppermute(lax.pmean((x @ w).sum(), ("dp", "tp")), "dp", [(0, 1), (1, 0)])


def indexed(w, x):
    return lax.pmean((x @ w).sum(), ("dp", "tp")) * lax.axis_index("dp")


def assumed(w, x):
    return lax.assume_replicated((x @ w).sum(), ("dp", "tp"))


def varies_by_carry(w, x):
    step = lambda c, row: (c + row, None)
    return ft.scan(step, torch.zeros(()), lax.all_gather(x.sum(1), "dp", tiled=True) * w.sum())[0]


def varies_later(w, x):
    def step(carry, row):
        _, b = carry
        return (b, row.sum()), None

    zero = torch.zeros(())
    return ft.scan(step, (zero, zero), x)[0][0]


def equal_carry(w, x):
    step = lambda c, row: (lax.psum(row.sum(), "dp") + 0 * c, c)
    return ft.scan(step, torch.zeros(()), x)[0]


def extremum(w, x):
    return lax.pmax((x @ w).sum(), ("dp", "tp"))


PROGRAMS = [
    forgotten_psum, half_reduced, reduced, doubled, gathered, scattered, permuted, indexed,
    assumed, varies_by_carry, varies_later, equal_carry, extremum,
]  # fmt: skip


def refuses(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_agrees_with_the_simulator(program):
    f = ft.shard_map(program, MESH, IN, P())
    traced = trace(f)(W, X)
    by_simulator, by_types = refuses(lambda: f(W, X)), refuses(traced.check)
    assert bool(by_simulator) == bool(by_types), (by_simulator, by_types)


def loss(w, x):
    return lax.psum(((x @ w) ** 2).sum(), ("dp", "tp"))


def synchronised(w, x):
    return ft.sync_gradients(ft.grad(loss)(w, x), IN[0])


def never_synchronised(w, x):
    return ft.grad(loss)(w, x)


def synchronised_twice(w, x):
    return ft.sync_gradients(synchronised(w, x), IN[0])


def of_a_varying_loss(w, x):
    return ft.sync_gradients(ft.grad(lambda w: ((x @ w) ** 2).sum())(w), IN[0])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (synchronised, ""),
        (never_synchronised, "varies over 'dp'.*sync_gradients"),
        (synchronised_twice, "already replicated over 'dp'"),
        (of_a_varying_loss, "a loss that varies over 'dp'"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_gradients(program, message):
    f = ft.shard_map(program, MESH, IN, IN[0])
    by_types = refuses(trace(f)(W, X).check)
    assert bool(refuses(lambda: f(W, X))) == bool(message) == bool(by_types)
    if message:
        with pytest.raises(ValueError, match=message):
            trace(f)(W, X).check()


def test_messages_name_path_axis_line_and_fix():
    def program(w, x):
        return {"loss": (x @ w).sum()}  # the culprit

    f = ft.shard_map(program, MESH, IN, P())
    with pytest.raises(ValueError, match=r"output loss: got a value that varies over 'dp', made at "
                       r".*test_check.py:.*# the culprit.*\n.*'tp'"):  # fmt: skip
        trace(f)(W, X).check()


def test_unchecked_programs_pass():
    f = ft.shard_map(forgotten_psum, MESH, IN, P(), check=False)
    trace(f)(W, X).check()


def test_varying_tells_the_axes_of_every_value():
    f = ft.shard_map(half_reduced, MESH, IN, P(), check=False)
    program = trace(f)(W, X)
    axes = varying(program)
    assert axes[program.outputs[0].value] == {"dp"}
    assert axes[program.block.equations[0].results[0]] <= {"dp", "tp"}
