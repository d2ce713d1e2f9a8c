"""The first number that is not finite, and keys that are used twice; verdicts on keys against JAX."""

import re
import types

import jax
import pytest
import torch
from jax import numpy as jnp
from jax.experimental.key_reuse import _core as jax_key_reuse

import functron as ft
from functron import Mesh, P, debug, lax, random

# --- numbers that are not finite

MESH = Mesh(dp=2, tp=2)
W = torch.eye(2).expand(3, 2, 2) * 2.0
X = torch.tensor([[3.0, 3.0], [5.0, 5.0], [0.3, 1.4], [4.0, 4.0]])


def loss(w, x):
    def body(c, w):
        with ft.named_scope("layer"):
            c = torch.log(c @ w)
        return c, None

    return lax.psum(lax.scan(body, x, w)[0].sum(), ("dp", "tp"))


def test_it_names_equation_place_row_and_ranks():
    """log 0.6 < 0 in the second layer, for the row of the third of four ranks alone."""
    step = ft.shard_map(
        ft.value_and_grad(loss), MESH, (P(), P(("dp", "tp"))), (P(), P()), check=False
    )
    with pytest.raises(ValueError, match="nans: ") as caught:
        debug.nans(step)(W, X)
    head, result, *operands = str(caught.value).splitlines()
    assert "log (forward, in layer, row 1 of scan body) makes the first number that is" in head
    assert re.search(r"test_faults.py:\d+: `c = torch.log\(c @ w\)`, on rank dp=1,tp=0$", head)
    assert result == "  result %log f32[1,2]: 1 NaN of 2, others from 0.722336 to 0.722336"
    assert operands == ["  operand %mm f32[1,2]: from -1.02165 to 2.05924"]
    (value, grad), again = debug.nans(step)(W, X + 2), step(W, X + 2)
    torch.testing.assert_close(value, again[0])
    torch.testing.assert_close(grad, again[1])


def test_it_names_what_backward_made():
    def f(x):
        return torch.where(x > 0, x.sqrt(), 0.0).sum()

    x = torch.tensor([0.0, 4.0])
    assert debug.nans(f)(x) == 2
    with pytest.raises(ValueError, match=r"\(backward\) makes the first number") as caught:
        debug.nans(ft.grad(f))(x)
    assert "x.sqrt()" in str(caught.value)
    assert "1 inf of 2" in str(caught.value) or "1 NaN of 2" in str(caught.value)


def test_arguments_that_are_not_finite_are_named():
    mapped = ft.shard_map(lambda t: lax.psum(t["w"] * 2, "dp"), MESH, P("dp"), P())
    with pytest.raises(
        ValueError, match=r"argument 0/w comes with numbers that are not finite"
    ) as e:
        debug.nans(mapped)({"w": torch.tensor([1.0, float("nan")])})
    assert "f32[2]: 1 NaN of 2, others from 1 to 1" in str(e.value)
    with pytest.raises(ValueError, match=r"output 0 has infinities that came with arguments") as e:
        debug.nans(mapped)({"w": torch.tensor([1.0, float("inf")])})
    assert "argument 0/w, f32[2]: 1 inf of 2" in str(e.value)


def test_infinities_that_mask_are_none():
    def attend(scores, mask):
        hidden = scores.masked_fill(mask, -torch.inf)
        return hidden.softmax(-1)

    scores = torch.zeros(2, 2)
    causal = torch.tensor([[False, True], [False, False]])
    torch.testing.assert_close(debug.nans(attend)(scores, causal), attend(scores, causal))
    with pytest.raises(ValueError, match="softmax") as caught:
        debug.nans(attend)(scores, torch.ones(2, 2, dtype=torch.bool))
    assert "infinities before it: " in str(caught.value)
    # a mask of numbers, which is added
    numbers = torch.where(causal, -torch.inf, 0.0)
    assert debug.nans(lambda s, m: (s + m).softmax(-1))(scores, numbers).isfinite().all()


def test_overflow_is_found_and_may_be_passed_over():
    f = lambda x: torch.exp(-torch.exp(x))
    x = torch.tensor([0.0, 200.0])
    with pytest.raises(ValueError, match=r"exp \(forward\) makes") as caught:
        debug.nans(f)(x)
    assert "1 inf of 2" in str(caught.value)
    assert debug.nans(f, infs=False)(x)[1] == 0


def test_a_number_comes_from_another_rank():
    def program(x):
        y = 1 / x
        return lax.psum(y - y.exp(), "dp")

    mapped = ft.shard_map(program, MESH, P("dp"), P())
    with pytest.raises(ValueError, match=r"reciprocal|div") as caught:
        debug.nans(mapped)(torch.tensor([1.0, 0.0]))
    assert "on ranks dp=1,tp=0; dp=1,tp=1" in str(caught.value)


def test_memory_that_was_not_written_says_nothing():
    def f(x):
        y = torch.empty(64)
        y[:2] = x
        return y[:2] * 2

    for _ in range(8):
        torch.full((64,), float("nan"))
        assert debug.nans(f)(torch.ones(2)).tolist() == [2.0, 2.0]


PAIR = torch.tensor([4.0, -1.0])


def choose(x):
    """sqrt and its derivative are not finite where it is not taken."""
    return lax.cond(x > 0, torch.sqrt, lambda x: 2 * x, x)


def halve(x):
    """Of a row that is done, the step is NaN."""
    return lax.while_loop(lambda c: c > 1, lambda c: torch.log(c - 1) * 0 + c / 2, x)


PASSED = {
    "a cond of rows": (torch.func.vmap(choose), PAIR, [2.0, -2.0]),
    "its gradient": (ft.grad(lambda x: torch.func.vmap(choose)(x).sum()), PAIR, [0.25, 2.0]),
    "gradients of rows": (torch.func.vmap(ft.grad(choose)), PAIR * 0, [2.0, 2.0]),
    "a gradient of ranks": (
        ft.grad(
            ft.shard_map(lambda x: lax.psum(choose(x[0]), "dp"), Mesh(dp=2), P("dp"), P())
        ), PAIR, [0.25, 2.0],
    ),
    "a loop of rows": (torch.func.vmap(halve), torch.tensor([4.5, 0.5]), [0.5625, 0.5]),
    "where": (lambda x: torch.where(x > 0, x.sqrt(), 2 * x), PAIR, [2.0, -2.0]),
    "two, one after the other": (lambda x: torch.where(x > 0, x.sqrt() + x.log(), x), PAIR * 0, [0.0, 0.0]),
}  # fmt: skip
BLAMED = {
    "a row that takes it": (torch.func.vmap(lambda x: choose(x) + (x + 0.5).log()), PAIR, "log"),
    "a derivative of what is not selected": (
        ft.grad(lambda x: torch.where(x > 0, x.sqrt(), 2 * x).sum()), PAIR, "sqrt",
    ),
    "that a choice is made by": (
        lambda x: torch.where(x.sqrt().isfinite().all(), x, 2 * x), PAIR, "sqrt",
    ),
    "that an int is made of": (lambda x: x.log().argmax(), PAIR, "log"),
    "a loop that it keeps going": (
        lambda x: lax.while_loop(lambda c: ~(c.log() > 9).all(), lambda c: c * 1, x), PAIR, "log",
    ),
    "an error that follows": (
        lambda x: torch.eye(2)[x.log().nan_to_num(9.0).long()], PAIR, "log",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSED)
def test_what_is_not_selected_is_passed_over(case):
    f, x, want = PASSED[case]
    assert debug.nans(f)(x).tolist() == pytest.approx(want)


@pytest.mark.parametrize("case", BLAMED)
def test_what_has_a_part_in_results_is_told(case):
    f, x, name = BLAMED[case]
    with pytest.raises(
        ValueError, match=rf"nans: {name} \(forward\) makes the first .*test_faults"
    ):
        debug.nans(f)(x)


def test_effects_are_had_once(capsys):
    def f(x):
        debug.print("{}", x.sum())
        return torch.where(x > 0, x.sqrt(), 2 * x)

    debug.nans(f)(PAIR)
    assert capsys.readouterr().out == "3.0\n"


# --- keys


ours = types.SimpleNamespace(
    random=random, zeros=torch.zeros, scan=lax.scan, vmap=torch.func.vmap, arange=torch.arange,
    grad=ft.grad, remat=ft.remat, lax=lax, where=torch.where, stack=torch.stack, number=torch.tensor,
)  # fmt: skip
theirs = types.SimpleNamespace(
    random=jax.random, zeros=jnp.zeros, scan=jax.lax.scan, vmap=jax.vmap, arange=jnp.arange,
    grad=jax.grad, remat=jax.checkpoint, lax=jax.lax, where=jnp.where, stack=jnp.stack,
    number=jnp.array,
)  # fmt: skip


def draws(m, *keys):
    return sum(m.random.normal(key, (2,)) for key in keys)


def in_scan(m, key, body, xs=None):
    return m.scan(lambda c, x: body(c, x), (m.zeros(2), key), m.arange(3) if xs is None else xs)[0][
        0
    ]


def two_draws(c, keys):
    return c + draws(ours, keys[0], keys[1]), None


def draw_rows(m, keys):
    return m.scan(lambda c, k: (c + draws(m, k), None), m.zeros(2), keys)[0]


def branch(m, yes, no, *operands):
    return m.lax.cond(m.number(True), yes, no, *operands)


def count_up(m, step, carry):
    return m.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (m.number(0), carry)
    )[1]


def split_carry(m):
    def step(c):
        first, second = m.random.split(c[1])
        return c[0] + draws(m, first), second

    return step


def carried(m, key):
    def body(c, x):
        key, sub = m.random.split(c[1])
        return (c[0] + m.random.normal(sub, (2,)), key), None

    return in_scan(m, key, body)


CASES = {
    "one draw": (True, lambda m, k: draws(m, k)),
    "two draws": (False, lambda m, k: draws(m, k, k)),
    "two samplers": (False, lambda m, k: m.random.uniform(k, (2,)) + draws(m, k)),
    "bits, then a split": (False, lambda m, k: (m.random.bits(k, (2,)), draws(m, m.random.split(k)[0]))),
    "parts": (True, lambda m, k: draws(m, *m.random.split(k))),
    "the same part": (False, lambda m, k: draws(m, (s := m.random.split(k))[0], s[0])),
    "a draw after a split": (False, lambda m, k: draws(m, m.random.split(k)[0], k)),
    "fold_in of numbers": (True, lambda m, k: draws(m, *(m.random.fold_in(k, i) for i in range(3)))),
    "a carried key": (True, carried),
    "a carried key that stays": (False, lambda m, k: in_scan(
        m, k, lambda c, x: ((c[0] + m.random.normal(c[1], (2,)), c[1]), None))),
    "a key of outside in a scan": (False, lambda m, k: in_scan(
        m, m.random.key(1), lambda c, x: ((c[0] + m.random.normal(k, (2,)), c[1]), None))),
    "keys of rows": (True, lambda m, k: m.scan(
        lambda c, k: (c + m.random.normal(k, (2,)), None), m.zeros(2), m.random.split(k, 3))[0]),
    "a key of a row twice": (False, lambda m, k: m.scan(
        lambda c, k: (c + draws(m, k, k), None), m.zeros(2), m.random.split(k, 3))[0]),
    "fold_in of the row": (True, lambda m, k: in_scan(
        m, m.random.key(1), lambda c, x: ((c[0] + m.random.normal(m.random.fold_in(k, x), (2,)), c[1]), None))),
    "vmap": (True, lambda m, k: m.vmap(lambda k: m.random.normal(k, (2,)))(m.random.split(k, 3))),
    "vmap and a row of it": (False, lambda m, k: (
        (s := m.random.split(k, 3)), m.vmap(lambda k: m.random.normal(k, (2,)))(s), draws(m, s[1]))),
    "gradient": (True, lambda m, k: m.grad(lambda x: (draws(m, k) * x).sum())(m.zeros(2))),
    "remat": (True, lambda m, k: m.grad(lambda x: m.remat(lambda x: (draws(m, k) * x).sum())(x))(m.zeros(2))),
    "rows of a scan, and one of them": (False, lambda m, k: (s := m.random.split(k, 3), draw_rows(m, s), draws(m, s[1]))),
    "rows of two scans": (False, lambda m, k: (s := m.random.split(k, 3), draw_rows(m, s), draw_rows(m, s))),
    "rows of a map": (True, lambda m, k: m.lax.map(lambda k: draws(m, k), m.random.split(k, 3), batch_size=2)),
    "rows of a map, and one of them": (False, lambda m, k: (
        s := m.random.split(k, 3), m.lax.map(lambda k: draws(m, k), s), draws(m, s[0]))),
    "one row again and again": (False, lambda m, k: draw_rows(m, m.stack([k, k]))),
    "slices that overlap": (False, lambda m, k: (
        s := m.random.split(k, 3), draw_rows(m, s[:2]), draw_rows(m, s[1:]))),
    "a slice and its row": (False, lambda m, k: (s := m.random.split(k, 3), draw_rows(m, s[:2]), draws(m, s[1]))),
    "stacked and taken": (False, lambda m, k: (
        s := m.random.split(k), draws(m, m.stack([s[0], s[1]])[0], s[0]))),
    "chosen by select_n": (False, lambda m, k: (
        s := m.random.split(k), draws(m, m.lax.select_n(m.number(True), s[0], s[1]), s[0]))),
    "chosen by where": (False, lambda m, k: (
        s := m.random.split(k), draws(m, m.where(m.number(True), s[0], s[1]), s[0]))),
    "chosen by an index": (False, lambda m, k: (
        s := m.random.split(k),
        draws(m, m.lax.dynamic_index_in_dim(s, m.number(0), keepdims=False), s[0]))),
    "chosen by a branch": (False, lambda m, k: (
        s := m.random.split(k), draws(m, branch(m, lambda a, b: a, lambda a, b: b, *s), s[0]))),
    "in both branches": (True, lambda m, k: branch(m, lambda k: draws(m, k), lambda k: 2 * draws(m, k), k)),
    "twice in a branch": (False, lambda m, k: branch(m, lambda k: draws(m, k, k), lambda k: m.zeros(2), k)),
    "in a branch and after it": (False, lambda m, k: (
        branch(m, lambda k: draws(m, k), lambda k: m.zeros(2), k), draws(m, k))),
    "in two branches": (False, lambda m, k: [
        branch(m, lambda k: draws(m, k), lambda k: m.zeros(2), k) for _ in range(2)]),
    "returned by branches": (False, lambda m, k: (
        draws(m, branch(m, lambda k: k, lambda k: k, k), k))),
    "drawn with and returned by a branch": (False, lambda m, k: draws(m, branch(
        m, lambda k: (draws(m, k), k), lambda k: (m.zeros(2), k), k)[1])),
    "a part is drawn with or the whole returned": (True, lambda m, k: draws(m, branch(
        m, lambda k: (draws(m, (s := m.random.split(k))[0]), s[1]), lambda k: (m.zeros(2), k), k)[1])),
    "outside of a while loop": (False, lambda m, k: count_up(m, lambda c: c + draws(m, k), m.zeros(2))),
    "in the condition": (False, lambda m, k: m.lax.while_loop(
        lambda c: (c < 3) & (draws(m, k).sum() < 9), lambda c: c + 1, m.number(0))),
    "carried by a while loop": (True, lambda m, k: count_up(m, split_carry(m), (m.zeros(2), k))),
    "carried by a while loop, and after it": (True, lambda m, k: draws(
        m, count_up(m, split_carry(m), (m.zeros(2), k))[1])),
    "carried by a while loop, and outside": (False, lambda m, k: (
        count_up(m, split_carry(m), (m.zeros(2), k)), draws(m, k))),
    "in a fori loop": (False, lambda m, k: m.lax.fori_loop(0, 3, lambda i, c: c + draws(m, k), m.zeros(2))),
    "fold_in of a fori loop": (True, lambda m, k: m.lax.fori_loop(
        0, 3, lambda i, c: c + draws(m, m.random.fold_in(k, i)), m.zeros(2))),
    "returned among ys": (False, lambda m, k: draws(m, m.scan(
        lambda c, k: (c + draws(m, k), k), m.zeros(2), m.random.split(k, 3))[1][0])),
    "made for ys": (True, lambda m, k: draws(m, *m.scan(
        lambda c, k: (c + draws(m, (s := m.random.split(k))[0]), s[1]),
        m.zeros(2), m.random.split(k, 3))[1])),
    "drawn with and carried on": (False, lambda m, k: in_scan(m, k, lambda c, x: (
        s := m.random.split(c[1]), ((c[0] + draws(m, s[0]), s[0]), None))[1])),
    "carries that change places": (False, lambda m, k: m.scan(
        lambda c, x: ((c[0] + draws(m, c[1]), c[2], c[1]), None),
        (m.zeros(2), *m.random.split(k)), m.arange(4))[0][0]),
    "carries that move up": (True, lambda m, k: m.scan(
        lambda c, x: (s := m.random.split(c[1]), ((c[0] + draws(m, c[2]), s[0], s[1]), None))[1],
        (m.zeros(2), *m.random.split(k)), m.arange(4))[0][0]),
    "of a row, in each inner iteration": (False, lambda m, k: m.scan(
        lambda c, k: (m.scan(lambda c, i: (c + draws(m, k), None), c, m.arange(2))[0], None),
        m.zeros(2), m.random.split(k, 3))),
    "randint": (True, lambda m, k: m.random.randint(k, (2,), 0, 5)),
}  # fmt: skip


def is_right(check):
    try:
        check()
    except (ValueError, jax.errors.KeyReuseError):
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_verdicts_are_those_of_jax(case):
    right, f = CASES[case]
    assert is_right(lambda: debug.check_key_reuse(lambda key: f(ours, key))(random.key(0))) == right

    check = jax_key_reuse.check_key_reuse
    assert is_right(lambda: check(lambda key: f(theirs, key), jax.random.key(0))) == right


def test_both_lines_are_named():
    def f(key):
        first = random.normal(key, (2,))
        with ft.named_scope("noise"):
            second = random.uniform(key, (2,))
        return first + second

    with pytest.raises(ValueError, match="f uses random keys more than once") as caught:
        debug.check_key_reuse(f)(random.key(0, device="meta"))
    (problem,) = str(caught.value).splitlines()[1:]
    assert "the key of uniform at " in problem
    assert "`second = random.uniform(key, (2,))` in noise: got used before, by normal at" in problem
    assert "`first = random.normal(key, (2,))`; wanted one use of every key; fix: " in problem


def test_a_scan_is_named_with_its_iterations():
    def f(key, xs):
        def step(c, x):
            return c + random.normal(key, (2,)) * x, None

        return lax.scan(step, torch.zeros(2), xs)[0]

    mapped = ft.shard_map(f, MESH, (P(), P()), P())
    with pytest.raises(ValueError, match="used in each of the 3 iterations of scan step"):
        debug.check_key_reuse(mapped)(random.key(0), torch.ones(3))
    debug.check_key_reuse(mapped)(random.key(0), torch.ones(1))


@pytest.mark.parametrize(
    ("right", "f"),
    [
        # found beyond JAX: keys that are made alike
        (False, lambda k: draws(ours, random.fold_in(k, 1), random.fold_in(k, 1))),
        (False, lambda k: draws(ours, random.key(3), random.key(3))),
        (False, lambda k: draws(ours, random.split(k)[1], random.split(k)[1])),
        (False, lambda k: draws(ours, random.split(k)[1], random.split(k, 3)[1])),
        # allowed beyond JAX: parts of one array, and keys made again
        (True, lambda k: draws(ours, random.split(k)[0], random.split(k)[1])),
        (True, lambda k: [random.normal(k, (4,), index=(torch.arange(2) + i,)) for i in (0, 2)]),
        (False, lambda k: [random.normal(k, (4,), index=(torch.arange(2),)) for _ in range(2)]),
        (False, lambda k: [random.normal(k, (n,), index=(torch.arange(n - 3),)) for n in (4, 5)]),
        # allowed beyond JAX: what is chosen by an iteration, is not among what is chosen from, or
        # is shared by elements of a vmap
        (True, lambda k: (s := random.split(k, 3), draw_rows(ours, s[:2]), draws(ours, s[2]))),
        (True, lambda k: [draw_rows(ours, rows) for rows in random.split(k, 4).split(2)]),
        (True, lambda k: lax.scan(two_draws, torch.zeros(2), random.split(k, 6).view(3, 2, 2))),
        (
            True,
            lambda k: (
                s := random.split(k, 3),
                lax.fori_loop(
                    0,
                    3,
                    lambda i, c: c + draws(ours, lax.dynamic_index_in_dim(s, i, keepdims=False)),
                    torch.zeros(2),
                ),
            ),
        ),
        (
            True,
            lambda k: (
                s := random.split(k, 3),
                draws(ours, torch.where(torch.tensor(True), s[0], s[1]), s[2]),
            ),
        ),
        (True, lambda k: (s := random.split(k), draws(ours, torch.stack([s[0], s[1]])[1], s[0]))),
        (True, lambda k: torch.func.vmap(lambda k: random.normal(k, (2,)))(torch.stack([k, k]))),
        # found beyond JAX: one branch gives the key itself
        (
            False,
            lambda k: draws(ours, branch(ours, lambda k: k, lambda k: random.fold_in(k, 1), k), k),
        ),
    ],
)
def test_keys_that_are_made_alike_and_parts_of_an_array(right, f):
    assert is_right(lambda: debug.check_key_reuse(f)(random.key(0))) == right


def test_a_training_step_uses_every_key_once():
    """Dropout of two microbatches draws the rows of each of one array."""
    from tests.program.test_lockstep import gpt_step

    step, state, batch = gpt_step(MESH, dropout=0.1, remat="full", num_microbatches=2)
    debug.check_key_reuse(step)(state, batch)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: debug.nans(3), TypeError, "f"),
        (lambda: debug.check_key_reuse("f"), TypeError, "f"),
        (
            lambda: debug.check_key_reuse(ft.partition(torch.sin, MESH, in_specs=(P(),))),
            TypeError,
            "partition, capture or",
        ),
        (lambda: debug.nans(lambda x: x * x.item())(torch.ones(())), ValueError, "test_faults.py"),
        (lambda: debug.nans(lambda x: x)(x=1), TypeError, "keyword"),
        (lambda: debug.check_key_reuse(lambda x: torch.rand(2))(torch.ones(2)), ValueError, "key"),
    ],
)
def test_wrong_uses_are_refused(call, kind, said):
    with pytest.raises(kind, match=said):
        call()
