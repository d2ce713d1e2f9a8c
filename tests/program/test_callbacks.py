"""Callbacks, checks and breakpoints in programs of every kind; calls and their order against JAX."""

import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import functron as ft
from functron import Mesh, P, debug, lax
from functron.program import text
from functron.program.callbacks import effects_where
from functron.program.equations import Scan
from functron.program.interpreter import RankValues
from functron.program.overlap import split_scan_body
from functron.program.parse import parse

MESH = Mesh(dp=2, tp=2)
X = torch.arange(4.0).reshape(2, 2)


@pytest.fixture
def seen():
    return []


def keep_in(seen):
    """A callback that keeps values, and the place of the rank, in a list."""

    def keep(value, coordinate=None):
        seen.append(value.tolist() if coordinate is None else (coordinate, value.tolist()))

    return keep


def forms(f, *args):
    """A function as it is, as a traced program, and compiled."""
    return [f, ft.trace(f)(*args), ft.jit(f, backend="eager")]


# --- callbacks


def test_it_is_called_once_for_every_rank_in_every_form(seen):
    def program(x, scale):
        total = lax.psum((x * scale).sum(), "tp")
        debug.callback(keep_in(seen), total, coordinate=True)
        return lax.psum(total, "dp")

    mapped = ft.shard_map(program, MESH, (P("dp", "tp"), P()), P())
    for run in forms(mapped, X, torch.tensor(2.0)):
        seen.clear()
        run(X, torch.tensor(2.0))
        assert seen == [
            ({"dp": 0, "tp": 0}, 2.0), ({"dp": 0, "tp": 1}, 2.0),
            ({"dp": 1, "tp": 0}, 10.0), ({"dp": 1, "tp": 1}, 10.0),
        ]  # fmt: skip


def test_it_gets_trees_of_plain_tensors_and_other_values(seen):
    def draw(tree, title, *, step=None):
        seen.append((tree, title, step))

    def program(x):
        debug.callback(draw, {"x": x, "n": [3, None]}, "losses", step=x.sum() > 1)
        debug.callback(lambda: seen.append("here"))
        return x

    for run in forms(ft.shard_map(program, Mesh(tp=2), P("tp"), P("tp")), torch.ones(4)):
        seen.clear()
        run(torch.ones(4))
        assert [row for row in seen if row == "here"] == ["here"] * 2
        given = [row for row in seen if row != "here"]
        assert len(given) == 2
        for tree, title, step in given:
            assert (type(tree["x"]), tree["x"].requires_grad) == (torch.Tensor, False)
            assert (tree["n"], title, step.dtype) == ([3, None], "losses", torch.bool)


def test_what_it_keeps_stays_as_it_was(seen):
    def step(x):
        debug.callback(seen.append, x)
        return x + 1

    f = ft.jit(step, donate=0, backend="eager")
    x = torch.zeros(2)
    for _ in range(3):
        x = f(x)
    assert [x.tolist() for x in seen] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    y = torch.zeros(2)
    step(y)
    y.add_(1)
    assert seen[-1].tolist() == [0.0, 0.0]


def jax_calls(f, *args):
    """The values with which JAX calls a callback, and how many there were."""
    found = []
    jax.block_until_ready(f(lambda x: found.append(np.asarray(x).tolist()), jax, jnp)(*args))
    jax.effects_barrier()
    return found


ours = types.SimpleNamespace(debug=debug, grad=ft.grad, vmap=torch.func.vmap, lax=lax)


def observed(call, m, np_):
    def f(x):
        m.debug.callback(call, x)
        return np_.sin(x).sum()

    return f


def scanned(call, m, np_):
    def body(c, row):
        m.debug.callback(call, row, ordered=True)
        m.debug.callback(call, c, ordered=True)
        return c + row, None

    return lambda x: m.lax.scan(body, x[0] * 0, x)[0]


CASES = {
    "as it is": observed,
    "gradient": lambda *m: m[1].grad(observed(*m)),
    "second derivative": lambda *m: m[1].grad(lambda x: m[1].grad(observed(*m))(x).sum()),
    "vmap": lambda *m: m[1].vmap(observed(*m)),
    "vmap of gradients": lambda *m: m[1].vmap(m[1].grad(observed(*m))),
    "gradient of vmap": lambda *m: m[1].grad(lambda x: m[1].vmap(observed(*m))(x).sum()),
    "scan": scanned,
    "gradient of a scan": lambda *m: m[1].grad(scanned(*m)),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_and_their_order_are_those_of_jax(case):
    values = np.arange(3.0)
    want = jax_calls(CASES[case], jnp.asarray(values))
    found = []
    f = CASES[case](lambda x: found.append(x.tolist()), ours, torch)
    for run in forms(f, torch.tensor(values)):
        found.clear()
        run(torch.tensor(values))
        assert found == want


def test_ranks_are_called_as_jax_calls_devices(seen):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    f = lambda x: (jax.debug.callback(lambda x: want.append(x.tolist()), x), x.sum())[1]
    want = []
    mapped = jax.shard_map(f, mesh=jax.sharding.Mesh(devices, ("dp", "tp")),
                           in_specs=PartitionSpec("dp"), out_specs=PartitionSpec(),
                           check_vma=False)  # fmt: skip
    jax.block_until_ready(mapped(jnp.arange(2.0)))
    jax.effects_barrier()

    def program(x):
        debug.callback(keep_in(seen), x)
        return lax.psum(x.sum(), "dp")

    ft.shard_map(program, MESH, P("dp"), P())(torch.arange(2.0))
    assert sorted(seen) == sorted(want)
    assert len(want) == 4


def test_it_is_not_called_again_where_backward_recomputes(seen):
    """JAX calls it in both runs; a second run here is the same numbers again."""

    def loss(w):
        def block(w):
            y = w @ w
            debug.callback(keep_in(seen), y.sum())
            debug.check(y.isfinite(), "not finite")
            return (y @ w).sin()

        return ft.remat(block, policy=ft.policies.dots)(w).sum()

    w = torch.eye(2)
    for run in [*forms(ft.grad(loss), w), torch.func.grad(loss)]:
        seen.clear()
        run(w)
        assert seen == [2.0]


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_it_does_is_no_part_of_what_remat_keeps():
    """Its operations run in forward alone, so that backward would run others than were kept."""

    def loss(w):
        def block(w):
            debug.callback(lambda y: y @ y, w)
            return (w @ w).sin()

        return ft.remat(block, policy=ft.policies.dots)(w).sum()

    ft.grad(loss)(torch.eye(2))
    torch.func.vmap(ft.grad(loss))(torch.eye(2).expand(3, 2, 2))


def test_it_runs_outside_of_the_program(seen):
    def inside(x):
        seen.append(float(ft.shard_map(lambda x: lax.psum(x, "tp"), MESH, P("tp"), P())(x).sum()))

    def program(x):
        debug.callback(inside, torch.ones(2) * x.sum())
        return x

    for run in forms(ft.shard_map(program, MESH, P("tp"), P("tp")), torch.ones(2)):
        seen.clear()
        run(torch.ones(2))
        assert seen == [2.0] * 4


def test_a_scan_stays_for_its_callbacks(seen):
    def program(x):
        def body(c, row):
            debug.callback(keep_in(seen), row)
            return c + row, None

        lax.scan(body, x[0] * 0, x)
        return x * 2

    for run in forms(program, torch.arange(2.0)):
        seen.clear()
        run(torch.arange(2.0))
        assert seen == [0.0, 1.0]


def test_a_partitioned_function_calls_it_with_whole_values(seen):
    def f(x):
        debug.callback(keep_in(seen), x, coordinate=True)
        debug.print("sum {}", x.sum())
        debug.check(x < 5, "got {}", x.max())
        return x * 2

    split = ft.partition(f, Mesh(dp=2), in_specs=(P("dp"),), out_specs=P("dp"))
    split(torch.arange(2.0))
    assert seen == [({"dp": 0}, [0.0, 1.0]), ({"dp": 1}, [0.0, 1.0])]
    with pytest.raises(ValueError, match=r"debug.check at .*got 6.0"):
        split(torch.tensor([6.0, 1.0]))


def test_text_has_the_name_of_a_function(seen):
    def draw(x):
        seen.append(x.tolist())

    def paint(x):
        pass

    def program(of):
        def f(x):
            debug.callback(of, x, ordered=True)
            return x

        return ft.trace(f)(torch.ones(2))

    traced = program(draw)
    written = text.format(traced)
    assert "debug_callback('draw', [%arg_0_0], [], [], [], ordered=True)" in written
    read = parse(written)
    assert text.format(read) == written
    assert traced.diff(read) == ""
    assert traced.diff(program(paint)).count("paint") == 1
    traced.check()
    assert traced.cost().hardware_flops == 0
    with pytest.raises(ValueError, match=r"draw: got its name alone.*fix: trace the program again"):
        read(torch.ones(2))
    assert seen == []


def test_what_it_raises_names_it_and_the_rank():
    def fails(x):
        raise KeyError("x")

    def program(x):
        debug.callback(fails, x)
        return x

    for run in forms(ft.shard_map(program, MESH, P("tp"), P("tp")), torch.ones(2)):
        with pytest.raises(KeyError) as caught:
            run(torch.ones(2))
        note = "\n".join(caught.value.__notes__)
        assert re.search(r"in the callback 'fails' at .*test_callbacks.py.* for dp=0 tp=0", note)


def test_ordered_callbacks_of_a_scan_are_not_put_off():
    """A scan's sums that nothing waits for end with a later iteration, and what reads them."""

    def program(x, ordered):
        def body(c, row):
            total = lax.psum(row, "dp")
            debug.print("{}", total, ordered=ordered)
            return c + row, total

        return lax.scan(body, x[0] * 0, x)

    def late(ordered):
        mapped = ft.shard_map(lambda x: program(x, ordered), MESH, P(None, "dp"), (P("dp"), P()))
        (equation,) = [e for e in ft.trace(mapped)(X).block.equations if isinstance(e.op, Scan)]
        split = split_scan_body(equation.scan, equation.scan.body.outputs)
        return (
            [] if split is None else [e.name for part in split.rounds for e in part.block.equations]
        )

    assert late(False) == ["debug_print"]
    assert late(True) == []


def test_compiled_code_calls_between_its_kernels(seen):
    def step(x):
        def body(c, row):
            c = torch.tanh(c + row * 2)
            debug.callback(keep_in(seen), c, ordered=True)
            debug.check(c < 0.99, "got {:.3f}", c)
            return c, None

        return lax.scan(body, x[0] * 0, x)[0]

    f, x = ft.jit(step), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    step(x)
    want = list(seen)
    seen.clear()
    f(x)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(want), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"debug.check at .*test_callbacks.py.*got 0.99"):
        f(x + 1)


# --- checks


def positive(x):
    debug.check(x > 0, "{name} is {x:.1f}", name="x", x=x)
    return lax.psum(x.sum(), ("dp", "tp"))


def test_a_check_names_line_ranks_and_values():
    mapped = ft.shard_map(positive, MESH, P("dp", "tp"), P())
    for run in forms(mapped, X + 1):
        torch.testing.assert_close(run(X + 1), torch.tensor(10.0))
    said = []
    for run in forms(mapped, X):
        with pytest.raises(
            ValueError, match=r"debug.check at .*test_callbacks.py:\d+: `debug"
        ) as e:
            run(X - 1)
        said.append(str(e.value).splitlines()[1:] or [str(e.value).rpartition("`: ")[2]])
    both = ["  [dp=0 tp=0] x is [[-1.0]]", "  [dp=0 tp=1] x is [[0.0]]"]
    assert said == [both, [both[0].strip()], both]  # a program is run rank by rank


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda f: f(torch.tensor([1.0, -2.0])), r"at .*test_callbacks.py.*: got -2.0"),
        (lambda f: ft.grad(f)(torch.tensor([-2.0])), "got -2.0"),
        (lambda f: torch.func.grad(f)(torch.tensor([-2.0])), "got -2.0"),
        (lambda f: torch.func.vmap(f)(torch.tensor([[1.0], [-2.0]])), r"\[vmap=1\] got -2.0"),
        (lambda f: ft.jit(ft.grad(f), backend="eager")(torch.tensor([-2.0])), "got -2.0"),
        (lambda f: lax.scan(lambda c, r: (c + f(r), None), torch.tensor(0.0), X - 2), "got -2.0"),
        (lambda f: ft.jit(lambda x: lax.scan(lambda c, r: (c + f(r), None), x[0, 0], x)[0],
                          backend="eager")(X - 2), "got -2.0"),
        (lambda f: ft.trace(lambda x: torch.func.vmap(f)(x))(X)(X - 2), r"\[vmap=0\] got -2.0"),
    ],
)  # fmt: skip
def test_checks_work_under_transforms(run, said):
    def f(x):
        debug.check((x > 0).all(), "got {}", x.min())
        return x.log().sum()

    with pytest.raises(ValueError, match=said):
        run(f)


def test_many_ranks_are_counted():
    f = ft.shard_map(lambda x: debug.check(x > 0, "{}", x) or x, Mesh(dp=16), P("dp"), P("dp"))
    with pytest.raises(ValueError, match=r"(?s)\[dp=7\] tensor\(\[0.\]\)\n  \.\.\. and 8 more$"):
        f(torch.zeros(16))


def test_checks_of_bools():
    debug.check(True, "never")
    with pytest.raises(ValueError, match="no 3"):
        debug.check(False, "no {}", 3)
    program = ft.trace(lambda x: debug.check(False, "reached") or x)(X)
    with pytest.raises(ValueError, match="reached"):
        program(X)


def test_checks_are_left_out(seen):
    def f(x):
        debug.check(x > 0, "{}", x)
        return x * 2

    with debug.no_checks():
        f(X)
        program = ft.trace(f)(X)
        compiled = ft.jit(f, backend="eager")
        compiled(X)
    assert [e.name for e in program.block.equations] == ["mul"]
    assert torch.equal(compiled(X), X * 2)
    with pytest.raises(ValueError, match=r"debug\.check"):
        f(X)


def test_nothing_is_called_or_checked_where_nothing_is_computed(seen):
    def f(x):
        debug.callback(keep_in(seen), x)
        debug.check(x > 0, "{}", x)
        return x

    f(X.to("meta"))
    ft.eval_shape(f)(X)
    ft.trace(f)(X)
    assert seen == []


# --- breakpoints

STOPS = """
import torch
import functron as ft
from functron import P, lax

def program(x):
    double = x * 2
    ft.debug.breakpoint(double=double.sum())
    after = 1
    return lax.psum(double.sum(), "tp")

f = ft.shard_map(program, ft.Mesh(tp=2), P("tp"), P())
print("result", f(torch.arange(2.0)).item())
print("compiled", ft.jit(f, backend="eager")(torch.arange(2.0)).item())
"""
TYPED = (
    "p double.shape\np double + 1\nn\np after\nc\np 'first', double + 1\nc\np 'second', double\nc\n"
)


def test_a_breakpoint_stops_in_the_frame_of_the_user_or_with_values(tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "stops.py")], input=TYPED, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [line.replace("(Pdb) ", "") for line in done.stdout.splitlines()]
    for line in (
        "[tp=0] double = 0.0", "[tp=1] double = 2.0",
        "torch.Size([1])",  # of a rank
        "1",  # of `after`, in the next line of the program
        "result 2.0",
        "('first', tensor(1.))", "('second', tensor(2.))",
        "compiled 2.0",
    ):  # fmt: skip
        assert line in shown, done.stdout
    assert any(line.startswith("[tp=1] ") and "stops.py:8" in line for line in shown)


def test_a_traced_breakpoint_is_a_callback_of_its_values():
    program = ft.trace(lambda x: debug.breakpoint(x=x) or x)(X)
    (stop,) = program.block.equations
    assert (stop.name, stop.args[0], stop.ordered) == ("debug_callback", "breakpoint", True)


def test_another_debugger_is_called(monkeypatch, seen):
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append("stopped"))
    debug.breakpoint()
    assert seen == ["stopped"]


# --- wrong uses


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda x: debug.callback(3, x), TypeError, "fn"),
        (lambda x: debug.callback(print, Holder(x)), TypeError, "a Holder with tensors.*dict"),
        (lambda x: debug.callback(lambda: x.sum()), ValueError, "a tensor of the program that it closes over.*fix: ft.debug.callback"),
        (lambda x: debug.check(x, "x"), TypeError, "pred: got a tensor of torch.float32.*x > 0"),
        (lambda x: debug.check(1, "x"), TypeError, "pred: got 1; wanted a bool"),
        (lambda x: debug.check(x > 0, "{y}", x=x), ValueError, "debug.check at .*no value for the field 'y'"),
        (lambda x: debug.check(x > 0, "bad", x=x), ValueError, "argument x: got no field for it"),
        (lambda x: debug.print("{}", 1, 2, ordered=True), ValueError, "argument 1: got no field"),
        (lambda x: debug.breakpoint(), ValueError, r"there are no numbers yet.*debug.breakpoint\(x=x\)"),
    ],
)  # fmt: skip
def test_wrong_uses_are_refused_with_the_fix(call, kind, said):
    with pytest.raises(kind, match=said):
        ft.trace(lambda x: call(x) or x)(X)


class Holder:
    def __init__(self, x):
        self.x = x


PROCESSES = """
import time
import torch, torch.distributed as dist
import functron as ft
from functron import P, lax

dist.init_process_group("gloo")
mesh, rank, seen = ft.Mesh(dp=2).bind(), dist.get_rank(), []

def program(x):
    ft.debug.callback(lambda x, coordinate: seen.append((coordinate, x.tolist())), x, coordinate=True)
    ft.debug.check(x < 5, "got {x}", x=x)
    return lax.psum(x.sum(), "dp")

f = ft.shard_map(program, mesh, P("dp"), P())
x = torch.full((1,), 1.0 + rank)
f(x), ft.jit(f, backend="eager")(x)
assert seen == [({"dp": rank}, [1.0 + rank])] * 2, seen
assert ft.debug.nans(f)(x) == 3
choose = lambda x: torch.where(x < 1.5, x, (x - 1.5).sqrt()).sum() + 0 * lax.psum(x.sum(), "dp")
g = ft.shard_map(lambda x: choose(x)[None], mesh, P("dp"), P("dp"))
assert abs(ft.debug.nans(g)(x).item() - [1.0, 0.5**0.5][rank]) < 1e-6  # NaN on the first, not selected
for bad, said in [
    (ft.debug.nans(ft.shard_map(lambda x: lax.psum((x - 1.5).sqrt(), "dp"), mesh, P("dp"), P())), "sqrt (forward) makes the first"),
    (ft.shard_map(lambda x: ft.debug.breakpoint() or x, mesh, P("dp"), P("dp")), "a terminal, which all"),
]:
    try:
        bad(x)
        raise SystemExit("nothing was raised")
    except ValueError as error:
        assert said in str(error), error
        print(str(error).partition("on rank ")[2].splitlines()[:1] or "refused")
start = time.monotonic()
try:
    f(x + 3.5)
except Exception as error:
    print(type(error).__name__, "dp=1" in str(error), time.monotonic() - start < 120)
"""


@pytest.mark.distributed
def test_processes_call_their_own_and_none_hangs(torchrun):
    out = torchrun(PROCESSES, 2).stdout.splitlines()
    assert sorted(out) == sorted(
        [*["['dp=0']", "refused"] * 2, "ValueError True True", "LostRanksError False True"]
    )


# --- where some ranks or elements alone take part


def masked(seen, pred):
    def program(x):
        with effects_where(pred(x)):
            debug.callback(keep_in(seen), x.sum(), coordinate=True)
            debug.check(pred(x), "never")
            debug.print("here")
            with effects_where(x.sum() > 100):
                debug.check(False, "never")
        return x

    return program


def test_effects_of_ranks_that_a_mask_leaves_out(seen, capsys):
    program = masked(seen, lambda x: x.sum() > 1)
    mapped = ft.shard_map(program, MESH, P("dp", "tp"), P("dp", "tp"))
    for run in forms(mapped, X):
        seen.clear()
        run(X)
        assert seen == [({"dp": 1, "tp": 0}, 2.0), ({"dp": 1, "tp": 1}, 3.0)]
        assert capsys.readouterr().out.splitlines() == ["[dp=1 tp=0] here", "[dp=1 tp=1] here"]
    traced = ft.trace(mapped)(X)
    assert text.format(parse(text.format(traced))) == text.format(traced)
    assert "where=[%gt" in text.format(traced)


def test_effects_of_elements_that_a_mask_leaves_out(seen, capsys):
    program = torch.func.vmap(masked(seen, lambda x: x.sum() > 1))
    for run in forms(program, X):
        seen.clear()
        run(X)
        assert seen == [({"vmap": 1}, 5.0)]
        assert capsys.readouterr().out.splitlines() == ["[vmap=1] here"]


def test_masks_of_ranks_in_lockstep(seen):
    traced = ft.trace(
        ft.shard_map(lambda x: debug.callback(keep_in(seen), x) or x, MESH, P("tp"), P("tp"))
    )
    program = traced(torch.arange(2.0))
    with effects_where(RankValues([torch.tensor(rank == 2) for rank in range(4)])):
        program(torch.arange(2.0))
    assert seen == [[0.0]]
    with effects_where(True, False):
        debug.callback(keep_in(seen), X)
    assert seen == [[0.0]]
