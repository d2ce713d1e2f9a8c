"""`compile`: what compiled programs compute, with which memory, kernels and artefacts.

Most run with backend="eager", which runs the plan and the graphs without Inductor.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functron as ft
from functron import tree
from functron.compiler import compile as compile_program
from functron.compiler.executable import Backend
from functron.ops.attention import attention
from functron.program.equations import Scan
from functron.program.trace import trace
from tests.transforms.flow_programs import loop, switch

TABLE = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One folder of artefacts, since Inductor compiles its headers once per folder."""
    return tmp_path_factory.getbasetemp() / "kernels"


def made(fn, *args, donate=(), backend: Backend = "eager", **options):
    return compile_program(trace(fn, donate=donate)(*args), backend=backend, **options)


def assert_same(got, want, tolerance=1e-12):
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a == b


def check(fn, *args, **options):
    """A compiled function computes what the function does, in the layout that was traced."""
    executable = made(fn, *args, **options)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    for _ in range(2):  # the second run finds whatever the first one left behind
        got = executable(*args)
        assert_same(got, fn(*args))
    assert_same(args, tuple(copies), 0)
    for result, output in zip(tree.leaves(got), executable.program.outputs, strict=True):
        if isinstance(result, torch.Tensor) and result.numel():
            assert result.stride() == output.value.stride
    return executable


# --- small functions


def returns_argument_twice(x):
    return x, x, x + 1


def returns_result_twice(x):
    y = x * 2
    return {"first": y, "second": y, "row": y[0]}


def returns_mixed(x):
    return {"none": None, "number": 7, "text": "a", "tensor": x + 1, "nothing": ()}


def picks(x):
    values, indices = torch.topk(x, 2, dim=1)
    ordered = torch.sort(x, dim=0, descending=True)
    return values, indices, ordered.values, x.max(dim=1).indices, torch.var_mean(x, 0)


def cuts(x):
    a, b, c = x.split([1, 1, 2], dim=0)
    first, _ = (x * 3).chunk(2, dim=1)
    return a + c[0], b, (x + 1).unbind(1)[2], first, x.unbind(0)[3], c.t()


def of_views(x):
    y = x.t()[1:].reshape(-1)
    return y, x[:, 1], x.view(2, 2, 6)[1], x.unsqueeze(0).expand(2, 4, 6), x.diagonal()[1:].sum()


def scalars(x):
    return x.sum(), x.mean() > 0, x[0, 0], x.argmax(), x.norm()


def integers(x):
    i = (x * 10).to(torch.int64)
    half = x.to(torch.bfloat16)
    return i // 3, i % 2 == 0, x > 0, ~(x > 0), half * 2, i.to(torch.uint8), i.bool().any()


def closes_over(x):
    return x[:3, :3] * TABLE, TABLE, TABLE[1:], TABLE


def of_zeros(x):
    none = x[:0]
    return none, none * 2, none.sum(), torch.cat([none, x]), x.new_zeros(0, 3), none.t() + 1


def of_constants(x):
    ones = torch.ones(2, 3, dtype=torch.float64)
    return (
        ones,
        torch.arange(4),
        torch.full((2,), 5.0) + 1,
        x + ones.sum(),
        torch.tensor([1.0, 2.0]),
    )


def writes_to_expanded(x):
    """Of each row other columns change: entries that share memory before do not after."""
    i, wide = torch.tensor([0, 1]), (2 * x[0, :3]).expand(2, 2, 3)
    rows = torch.tensor([[0], [1]]), i
    y = x[:4, :3].reshape(2, 2, 3)
    return (
        wide.sin().expand(2, 2, 3).index_add(1, i, y),
        x[1, :3].cos().expand(2, 2, 3).index_add(1, i, y),
        x[2, :3].sin().expand(2, 2, 3).index_copy(1, i, y),
        x[3, :3].exp().expand(2, 2, 3).index_put(rows, y, accumulate=True),
    )


SMALL = [
    returns_argument_twice, returns_result_twice, returns_mixed, picks, cuts, of_views, scalars,
    integers, closes_over, of_zeros, of_constants,
    writes_to_expanded,
]  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("fn", SMALL, ids=lambda fn: fn.__name__)
def test_small_functions(fn, layout):
    x = {
        "contiguous": randn(4, 6),
        "transposed": randn(6, 4).t(),
        "strided": randn(8, 12)[::2, ::2],
    }[layout]
    if fn is of_views and layout != "contiguous":
        x = x.contiguous()[:4]
    check(fn, x)


def test_small_functions_through_inductor(cache):
    chosen = [fn for fn in SMALL if fn is not of_views]

    def everything(x, y):
        return [fn(x) for fn in chosen], of_views(y)

    check(everything, randn(8, 12)[::2, ::2], randn(4, 6), backend="inductor", cache=cache)


def test_without_tensors_and_with_static_arguments():
    executable = check(lambda x, n, flags: x[n] if flags["row"] else x, randn(3, 2), 1, {"row": 1})
    with pytest.raises(ValueError, match="argument 1: got 2; wanted 1"):
        executable(randn(3, 2), 2, {"row": 1})
    assert made(lambda: (1, None))() == (1, None)
    assert torch.equal(made(lambda: torch.arange(3) * 2)(), torch.tensor([0, 2, 4]))


# --- scans: c is [2], x is [3, 2], w is [3, 2, 2]


def layer(c, row):
    return torch.tanh(c * row), c + row


def stack(c, w):
    return ft.scan(lambda c, w: (torch.tanh(torch.mv(w, c)), torch.mv(w, c).sin()), c, w)


def then(c, x, second):
    ys = ft.scan(layer, c, x)[1]
    return second(ys)


SCANS = {
    "plain": lambda c, x, w: ft.scan(layer, c, x),
    "flipped": lambda c, x, w: ft.scan(layer, c, x.flip(0)),
    "of_one": lambda c, x, w: ft.scan(layer, c, x[:1]),
    "of_none": lambda c, x, w: ft.scan(layer, c * 2, x[:0])[0],
    "without_xs": lambda c, x, w: ft.scan(lambda c, _: (c * 2, c), c, None, length=3),
    "gradient": lambda c, x, w: ft.grad(lambda w: stack(c, w)[0].sum())(w),
    "gradient_of_ys": lambda c, x, w: ft.value_and_grad(lambda c: stack(c, w)[1][:2].sum())(c),
    "gradient_of_both": lambda c, x, w: ft.grad(lambda a: sum(map(torch.sum, stack(*a))))((c, w)),
    "gradient_of_products": lambda c, x, w: ft.grad(
        lambda w: ft.scan(lambda a, w: (torch.tanh(a @ w), a @ w), x, w)[1].square().sum()
    )(w),
    "remat": lambda c, x, w: ft.grad(
        lambda w: ft.scan(ft.remat(lambda c, w: (torch.tanh(torch.mv(w, c)), None)), c, w)[0].sum()
    )(w),
    "nested": lambda c, x, w: ft.scan(
        lambda a, w: ft.scan(lambda a, row: (torch.tanh(torch.mv(w, a) + row), a + x[0]), a, x),
        c,
        w,
    ),
    "gradient_of_nested": lambda c, x, w: ft.grad(
        lambda x: ft.scan(
            lambda a, w: ft.scan(lambda a, row: (torch.tanh(torch.mv(w, a) + row), a * row), a, x),
            c,
            w,
        )[1].sum()
    )(x),
    "ys_whole_and_scanned": lambda c, x, w: then(c, x, lambda ys: (ys, ft.scan(layer, c, ys))),
    "ys_scanned_twice": lambda c, x, w: then(
        c, x, lambda ys: (ft.scan(layer, c, ys)[0], ft.scan(layer, c, ys)[1].sum())
    ),
    "ys_as_xs_and_const": lambda c, x, w: then(
        c, x, lambda ys: ft.scan(lambda c, y: (c + ys[0] * y, None), c, ys)
    ),
    "ys_twice_as_xs": lambda c, x, w: then(
        c, x, lambda ys: ft.scan(lambda c, y: (c + y[0] * y[1], y[0]), c, (ys, ys))
    ),
    "slice_of_ys": lambda c, x, w: then(c, x, lambda ys: (ys[1:].t(), ft.scan(layer, c, ys[1:]))),
    "xs_twice": lambda c, x, w: ft.scan(lambda c, r: (c * r[0], r[0] + r[1]), c, (x, x)),
    "carry_unchanged": lambda c, x, w: ft.scan(lambda c, r: (c, c + r), c, x),
    "carry_and_nothing": lambda c, x, w: ft.scan(lambda c, r: (c, None), c, x),
    "carry_becomes_const": lambda c, x, w: ft.scan(lambda a, r: (c, a), c * 2, x),
    "carry_becomes_x": lambda c, x, w: ft.scan(lambda c, r: (r, c), c, x),
    "carries_swap": lambda c, x, w: ft.scan(lambda a, r: ((a[1], a[0]), r), (c, c * 2), x),
    "y_is_const": lambda c, x, w: ft.scan(lambda a, r: (a + r, (c, w)), c, x),
    "y_is_x": lambda c, x, w: ft.scan(lambda a, r: (a + 1, r), c, x),
    "y_twice": lambda c, x, w: ft.scan(lambda a, r: (a, [a + r] * 2), c, x),
    "y_is_new": lambda c, x, w: ft.scan(lambda a, r: (a, torch.arange(2)), c, x),
    "ys_are_views": lambda c, x, w: ft.scan(lambda a, r: (a, ((r @ r).t(), r[1], a[:1])), c, w),
    "transposed_ys_scanned": lambda c, x, w: ft.scan(
        stack, c, ft.scan(lambda a, r: (a, torch.stack([r, r @ r]).transpose(0, 2)), c, w)[1]
    ),
}


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("name", SCANS)
def test_scans(name, unroll):
    executable = check(SCANS[name], randn(2), randn(3, 2), randn(3, 2, 2), unroll=unroll)
    scans = [e.op for e in executable.program.block.equations if isinstance(e.op, Scan)]
    if unroll:
        assert not scans
    elif name.startswith("gradient"):
        assert {scan.reverse for scan in scans} == {False, True}


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_no_iteration_gives_ys_of_length_zero(unroll):
    x = randn(0, 2, 3).transpose(1, 2)  # JAX's result; the eager scan cannot know the shape
    carry, ys = made(lambda c, x: ft.scan(lambda c, r: (c, r.t()), c, x), TABLE, x, unroll=unroll)(
        TABLE, x
    )
    assert torch.equal(carry, TABLE)
    assert (ys.shape, ys.dtype) == ((0, 2, 3), torch.float64)


def test_long_sums_through_inductor_are_close_to_float64(cache):
    """Equal summands, whose rounding errors have one sign: Inductor alone is off by 1e-5 and more."""
    x, y = torch.full((200_000, 5), 0.1), torch.full((200_000, 5), 0.1, dtype=torch.bfloat16)

    def everything(x, y):
        roots = torch.linalg.vector_norm(x), *torch._foreach_norm([x])
        return x.sum(), x.sum(0), (2 * x).mean(), x.mean(0, keepdim=True), y.float().sum(), *roots

    got = made(everything, x, y, backend="inductor", cache=cache)(x, y)
    want = everything(x.double(), y.double())
    for a, b, dtype in zip(got, want, [torch.float32] * 7, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-7, atol=0)


def test_wide_products_through_inductor_are_close_to_float64(cache):
    """Forward and both gradients of a layer: oneDNN takes factors as they lie, transposed or not."""
    x, w, g = randn(256, 512).float(), randn(512, 320, seed=1).float(), randn(256, 320).float()
    three = lambda x, w, g: (x @ w, g @ w.t(), x.t() @ g, (2 * x) @ w[:, :8])
    executable = made(three, x, w, g, backend="inductor", cache=cache)
    for a, b in zip(executable(x, w, g), three(x.double(), w.double(), g.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-4)  # a sum of 512 terms of 1
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    calls = "".join(executable.code).count("mkldnn._linear_pointwise.default(")
    assert calls == (2 if wide else 0)  # of the others, one is small and one is transposed


def test_causal_attention_through_inductor_skips_what_is_hidden(cache, monkeypatch):
    """Of 128 queries, the first 64 read no later key; forward and backward, heads of keys shared."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k, g = randn(1, 128, 4, 8).float(), randn(1, 128, 2, 8, seed=1).float(), randn(1, 128, 4, 8)

    def gradients(q, k, v, g):
        loss = lambda q, k, v: (attention(q, k, v, causal=True) * g).sum()
        return torch.func.grad(loss, (0, 1, 2))(q, k, v)

    operands = (q, k, 2 * k, g.float())
    executable = made(gradients, *operands, backend="inductor", cache=cache)
    assert "functron.causal_flash.default(" in "".join(executable.code)
    assert "functron.causal_flash_backward.default(" in "".join(executable.code)
    q, k, v, g = (x.double().transpose(1, 2).requires_grad_() for x in operands)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    hidden = torch.ones(128, 128, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    for got, want in zip(
        executable(*operands), torch.autograd.grad(out, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(got.double().transpose(1, 2), want, rtol=0, atol=1e-5)


def test_scans_through_inductor(cache):
    chosen = ["gradient_of_both", "ys_whole_and_scanned", "carries_swap", "ys_are_views"]

    def everything(c, x, w):
        return {name: SCANS[name](c, x, w) for name in chosen}

    check(everything, randn(2), randn(3, 2), randn(3, 2, 2), backend="inductor", cache=cache)


# --- switches and loops: i is an index, x is [3, 2]


def grow(c):
    return torch.tanh(c) + 1, c[0]


FLOWS = {
    "branches_return_operands": lambda i, x: switch(i, [lambda x: x, lambda x: x[1:2] * x], x),
    "branches_return_views": lambda i, x: switch(i, [lambda x: x[1], lambda x: x.t()[:2, 0]], x) * 2,
    "branches_have_nothing": lambda i, x: switch(i, [lambda: x * 2, lambda: x.cos()]),
    "one_branch": lambda i, x: switch(i, [torch.sin], x),
    "results_twice": lambda i, x: switch(i, [lambda x: (x, x), lambda x: (x.sin(), x)], x),
    "in_a_scan": lambda i, x: ft.scan(
        lambda c, r: (switch(i, [torch.sin, torch.cos], c) * r, c), x[0], x
    ),
    "a_scan_inside": lambda i, x: switch(i, [lambda x: ft.scan(layer, x[0], x), lambda x: (x[1], x)], x),
    "ys_whole_to_a_switch": lambda i, x: switch(
        i, [torch.sin, torch.cos], ft.scan(layer, x[0], x)[1]
    ),
    "gradient": lambda i, x: ft.grad(
        lambda x: switch(i, [lambda x: ft.scan(layer, x[0], x)[1], torch.sin], x).square().sum()
    )(x),
    "gradient_in_a_scan": lambda i, x: ft.grad(
        lambda x: ft.scan(lambda c, r: (switch(i, [lambda c, r: c.sin(), torch.mul], c, r), c), x[0], x)[0].sum()
    )(x),
    "loop": lambda i, x: loop(lambda c: c[1] < i, lambda c: (c[0].sin(), c[1] + 1), (x, i * 0)),
    "loop_swaps": lambda i, x: loop(
        lambda c: c[2] < 3, lambda c: (c[1], c[0], c[2] + 1), (x, x * 2, i)
    ),
    "loop_without_an_iteration": lambda i, x: loop(lambda c: c.sum() > 1e9, torch.sin, x) + x,
    "loop_in_a_scan": lambda i, x: ft.scan(
        lambda c, r: (loop(lambda c: c.sum() > 1, lambda c: c / 2, c + r.abs()), c), x[0], x
    ),
    "loop_in_a_loop": lambda i, x: loop(
        lambda c: c.sum() > 0.1,
        lambda c: loop(lambda d: d.sum() > c.sum() / 2, lambda d: d * 0.7, c),
        x.abs(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("name", FLOWS)
def test_switches_and_loops(name, unroll):
    for index in range(2):
        check(FLOWS[name], torch.tensor(index), randn(3, 2), unroll=unroll)


def test_switches_and_loops_through_inductor(cache):
    chosen = ["branches_return_views", "gradient", "loop", "loop_in_a_scan"]

    def everything(i, x):
        return {name: FLOWS[name](i, x) for name in chosen}

    check(everything, torch.tensor(1), randn(3, 2), backend="inductor", cache=cache)


DONATING = {
    "branch_returns_it": lambda i, x: (y := switch(i, [lambda x: x, torch.sin], x)) * 2 + y.mean(),
    "loop_may_return_it": lambda i, x: (
        loop(lambda c: c.sum() > 1e9, torch.sin, x).clone() * 3 + x,
        loop(lambda c: c.sum() < -1e9, torch.sin, x),
    ),
    "taken_after": lambda i, x: (x.sum() + switch(i, [torch.sin, torch.cos], x), x * 2),
}


@pytest.mark.parametrize("name", DONATING)
def test_donated_memory_is_whole_until_switches_and_loops_have_read_it(name):
    for index in range(2):
        i, x = torch.tensor(index), randn(3, 2)
        executable = made(DONATING[name], i, x, donate=1)
        assert_same(executable(i, x.clone()), DONATING[name](i, x))


# Random programs: a pool of rows [2] and one of matrices [3, 2]; each step adds to them.

VALUES = {
    "sin": lambda a, b, m, i: a.sin(),
    "add": lambda a, b, m, i: a + b,
    "mul": lambda a, b, m, i: (a * b).tanh(),
    "flip": lambda a, b, m, i: a.flip(0),
    "pick": lambda a, b, m, i: m[i % 3],
    "mean": lambda a, b, m, i: m.mean(0),
    "tile": lambda a, b, m, i: a.expand(3, 2),
    "outer": lambda a, b, m, i: m * b,
    "cumsum": lambda a, b, m, i: m.cumsum(0).tanh(),
    "product": lambda a, b, m, i: (m @ m[1:]).tanh(),
    "turn": lambda a, b, m, i: m.t().reshape(3, 2),
}
NUMBER = st.integers(0, 30)
SIMPLE = st.tuples(st.sampled_from(list(VALUES)), NUMBER, NUMBER)
STEP = st.recursive(
    SIMPLE,
    lambda step: st.tuples(
        st.sampled_from(["scan", "switch"]), NUMBER, NUMBER, NUMBER, st.lists(step, max_size=4)
    ),
    max_leaves=6,
)


def run(steps, rows, matrices):
    rows, matrices = list(rows), list(matrices)
    for name, i, j, *rest in steps:
        a, b = rows[i % len(rows)], rows[j % len(rows)]
        m = matrices[j % len(matrices)]
        if name == "scan":
            carry, ys = ft.scan(body_of(rows, matrices, *rest), a, m)
            rows.append(carry)
            matrices += ys
        elif name == "switch":
            branches = [lambda a, m: (a, m[1]), branch_of(rows, matrices, *rest)]
            rows += switch((b.sum() > 0).to(torch.int64), branches, a, m)
        else:
            value = VALUES[name](a, b, m, i)
            (rows if value.dim() == 1 else matrices).append(value)
    return rows, matrices


def body_of(rows, matrices, pick, steps):
    def body(carry, x):
        found, _ = run(steps, [*rows[-2:], carry, x], matrices[-2:])
        return found[-1], (found[pick % len(found)], found[-1])

    return body


def branch_of(rows, matrices, pick, steps):
    def branch(a, m):
        found, _ = run(steps, [*rows[-2:], a], [*matrices[-2:], m])
        return found[-1], found[pick % len(found)]

    return branch


@settings(max_examples=15)
@given(st.lists(STEP, min_size=1, max_size=6), st.booleans())
def test_random_programs(steps, differentiate):
    def program(row, matrix):
        rows, matrices = run(steps, [row], [matrix])
        return rows[-2:], matrices[-2:]

    def loss(args):
        return sum(value.square().sum() for value in tree.leaves(program(*args)))

    def fn(row, matrix):
        return ft.grad(loss)((row, matrix)) if differentiate else program(row, matrix)

    for unroll in (False, True):
        check(fn, randn(2), randn(3, 2), unroll=unroll)


@pytest.mark.parametrize("name", ["taken", "joined", "written"])
def test_views_of_what_inductor_lays_out_otherwise(name):
    """Its `index_select` and `cat` of a permuted tensor have other strides than torch's own."""
    x = torch.arange(120.0).view(2, 4, 5, 3)

    def taken(x):
        return x.permute(0, 3, 1, 2).index_select(1, torch.tensor([0, 2])).flatten(1)

    def joined(x):
        return torch.cat([x.permute(0, 3, 1, 2)] * 2, 1).permute(0, 2, 3, 1).flatten(0, 2)

    def written(x):
        y = x.permute(0, 3, 1, 2).index_select(1, torch.tensor([0, 2]))
        second = y[:, 1]
        y[:, 0].add_(1)  # after which `second` is taken anew from the memory of y
        return torch.cat([second * 2, y[:, 0]])

    f = {"taken": taken, "joined": joined, "written": written}[name]
    assert torch.equal(ft.jit(f)(x), f(x))


def test_results_are_laid_out_as_torch_lays_them_out():
    """Those of one kernel are operands of others, which are compiled for their strides."""
    x = torch.arange(120.0).view(2, 4, 5, 3)

    def kept(x):
        one = torch.cat([x.permute(0, 2, 1, 3)], 2)  # of which Inductor makes a clone
        rows = x.permute(0, 3, 1, 2).index_select(1, torch.tensor([0, 2]))
        return {"one": one, "rows": rows, "turned": rows.transpose(0, 3)}

    got, want = ft.jit(kept)(x), kept(x)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert {k: v.stride() for k, v in got.items()} == {k: v.stride() for k, v in want.items()}
