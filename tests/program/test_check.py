"""The check of traced programs agrees with the simulator's."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.program.check import check, varying
from functron.program.equations import Block, Equation, Scan, Var
from functron.program.trace import trace
from functron.spmd.simulate import varying_axes
from tests.transforms.flow_programs import loop, switch

MESH = Mesh(dp=2, tp=2)
W, X = torch.ones(4, 4), torch.ones(4, 4)
IN = (P(None, "tp"), P("dp"))


def refuses(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def assert_agreement(program, mesh, in_specs, out_specs, *args):
    """Simulator and check both pass, or both refuse; the check's message comes back."""
    f = ft.shard_map(program, mesh, in_specs, out_specs)
    by_types = refuses(trace(f)(*args).check)
    by_simulator = refuses(lambda: f(*args))
    assert bool(by_simulator) == bool(by_types), (by_simulator, by_types)
    return by_types


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


def extremum(w, x):
    return lax.pmax((x @ w).sum(), ("dp", "tp"))


def untouched(w, x):
    return w


PROGRAMS = {
    forgotten_psum: "'dp'.*'tp'",
    half_reduced: "varies over 'dp'",
    reduced: "",
    doubled: "psum over 'tp' at .*already replicated over 'tp'.*counted 2 times",
    gathered: "",
    scattered: "varies over 'dp'.*lax.psum_scatter",
    permuted: "varies over 'dp'.*lax.ppermute",
    indexed: r"varies over 'dp'.*lax.axis_index\('dp'\)",
    assumed: "",
    extremum: "",
    untouched: r"varies over 'tp', from argument 0, split by P\(None, 'tp'\)",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_agrees_with_the_simulator(program):
    message = assert_agreement(program, MESH, IN, P(), W, X)
    if PROGRAMS[program]:
        assert_matches(message, PROGRAMS[program])
    else:
        assert not message


def assert_matches(message, pattern):
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        raise ValueError(message)


# --- scans, which the simulator unrolls


def shifts_register(carry, row):
    """Row by row a value moves from c to b to a."""
    _, b, c = carry
    return (b, c, row), row


def swaps(carry, row):
    a, b, c = carry
    return (b, a, c), a


def sums_the_first(carry, row):
    """A reduction that is redundant from the second iteration on."""
    a, b, c = carry
    return (lax.psum(a, "dp"), b, c), a


@pytest.mark.parametrize("body", [shifts_register, swaps, sums_the_first], ids=lambda b: b.__name__)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("start", ["a", "b", "c", "none"])
def test_scans_agree_with_the_unrolled_loop(body, length, start):
    def program(x):
        same = torch.ones(2)
        first = tuple(x[0] if name == start else same for name in "abc")
        rows = torch.stack([x[0] if body is shifts_register else same] * length)
        last, ys = ft.scan(body, first, rows)
        return [*last, ys]

    assert_same_variation(program, MESH, P(None, "dp"), torch.ones(3, 4))
    for position in range(4):
        chosen = lambda x, position=position: program(x)[position]
        assert_agreement(chosen, MESH, P(None, "dp"), P(), torch.ones(3, 4))


# --- switches and loops


def varying_outputs(program, in_specs, *args):
    traced = trace(ft.shard_map(program, MESH, in_specs, P(), check=False))(*args)
    axes = varying(traced)
    return [set(axes[output.value]) for output in traced.outputs]


def test_a_switch_varies_as_its_branches_and_its_index_do():
    def program(x, y):  # x varies over dp, y over tp
        same = torch.zeros((), dtype=torch.int64)
        mine = lax.axis_index("tp")
        sums = [lambda a: lax.psum(a, "dp"), lambda a: lax.psum(a, "dp") * 2]
        branches = [lambda a, b: (a * 1, b * 1), lambda a, b: (a + lax.psum(b, "tp"), b * 2)]
        return (
            switch(same, sums, x), switch(mine, sums, x), *switch(same, branches, x, y),
            switch(same, [lambda a, b: a, lambda a, b: b], x, y),
        )  # fmt: skip

    specs = P(None, "dp"), P(None, "tp")
    found = varying_outputs(program, specs, torch.ones(3, 4), torch.ones(3, 4))
    assert found == [set(), {"tp"}, {"dp"}, {"tp"}, {"dp", "tp"}]


def test_a_loop_varies_as_its_fixed_point_and_its_condition_do():
    def program(x, y):
        a = b = c = torch.ones(3, 2)
        # what varies moves on by one place in each iteration
        shifted = loop(lambda s: s[3] < 2, lambda s: (s[1], s[2], x, s[3] + 1), (a, b, c, a[0, 0]))
        until = loop(lambda s: s.sum() > y.sum(), lambda s: s * 0.5, a)
        summed = loop(lambda s: s.sum() > 9, lambda s: lax.psum(s * x, "dp"), a)
        return *shifted, until, summed

    specs = P(None, "dp"), P(None, "tp")
    found = varying_outputs(program, specs, torch.ones(3, 4), torch.ones(3, 4))
    assert found == [{"dp"}, {"dp"}, {"dp"}, set(), {"tp"}, set()]


DIVIDED = {
    "branch": lambda x: switch(lax.axis_index("tp"), [lambda x: lax.psum(x, "tp"), torch.neg], x),
    "inner branch": lambda x: switch(
        (x[0, 0] > 0).to(torch.int64),
        [lambda x: switch(0, [lambda x: lax.all_gather(x, "tp").sum(0)], x), torch.neg],
        x,
    ),
    "body": lambda x: loop(lambda x: x.sum() > 1, lambda x: lax.psum(x, "tp") / 4, x),
    "condition": lambda x: loop(lambda c: lax.pmax(c[0, 0], "tp") + c.sum() > 1, torch.neg, x),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", DIVIDED)
def test_collectives_that_only_some_ranks_reach_are_refused(name, checked):
    specs = P("dp", "tp")
    f = ft.shard_map(DIVIDED[name], MESH, specs, specs, check=checked)
    pattern = (
        r"(psum|all_gather|pmax) over 'tp' at .*test_check.py:\d+.*inside a branch or loop at "
        r".*flow_programs.py.*varies over 'tp'; it varies since .*ranks would wait.*fix: make it"
    )
    with pytest.raises(ValueError, match=pattern):
        trace(f)(torch.ones(4, 4)).check()


def test_collectives_over_other_axes_pass():
    def program(x):
        index = lax.axis_index("dp")
        left = switch(index, [lambda x: lax.psum(x, "tp"), lambda x: lax.psum(-x, "tp")], x)
        return loop(lambda c: c.sum() > 1, lambda c: lax.psum(c * x, "tp") / 4, left)

    trace(ft.shard_map(program, MESH, P("dp", "tp"), P("dp")))(torch.ones(4, 4)).check()


def assert_same_variation(program, mesh, in_specs, *args):
    """Every output varies over the axes over which the simulator finds it batched."""
    found = []

    def observed(*local):
        out = program(*local)
        found[:] = [frozenset(varying_axes(leaf)) for leaf in tree.leaves(out)]
        return out

    ft.shard_map(observed, mesh, in_specs, P(), check=False)(*args)
    want = list(found)
    traced = trace(ft.shard_map(program, mesh, in_specs, P(), check=False))(*args)
    axes = varying(traced)
    assert [axes[o.value] for o in traced.outputs] == want


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (lambda w, x: torch._foreach_norm([w, x]), [{"tp"}, {"dp"}]),
        (lambda w, x: torch._foreach_add([w, x], [2 * w, 3 * x]), [{"tp"}, {"dp"}]),
        (lambda w, x: torch._foreach_mul([w, x], x.sum()), [{"dp", "tp"}, {"dp"}]),
    ],
)
def test_lists_are_computed_element_by_element(program, want):
    """The simulator has no vmap rule for list operations, so what they must give stands here."""
    traced = trace(ft.shard_map(program, MESH, IN, P(), check=False))(W, X)
    axes = varying(traced)
    assert [axes[output.value] for output in traced.outputs] == want


# --- gradients


def loss(w, x):
    return lax.psum(((x @ w) ** 2).sum(), ("dp", "tp"))


def synchronised(w, x):
    return ft.sync_gradients(ft.grad(loss)(w, x), IN[0])


def never_synchronised(w, x):
    return ft.grad(loss)(w, x)


def synchronised_twice(w, x):
    return ft.sync_gradients(synchronised(w, x), IN[0])


def summed_before(w, x):
    return ft.sync_gradients(lax.psum(ft.grad(loss)(w, x), "dp"), IN[0])


def of_a_varying_loss(w, x):
    return ft.sync_gradients(ft.grad(lambda w: ((x @ w) ** 2).sum())(w), IN[0])


def not_of_ft_grad(w, x):
    return ft.sync_gradients(torch.func.grad(loss)(w, x), IN[0])


def not_of_ft_grad_and_split_everywhere(w, x):
    return ft.sync_gradients(torch.func.grad(lambda x: loss(w, x))(x), P(("dp", "tp")))


def not_of_ft_grad_beside_what_is(w, x):
    good = ft.sync_gradients(ft.grad(loss)(w, x), IN[0])
    return good + ft.sync_gradients(torch.func.grad(loss)(good, x), IN[0])


def declared(w, x):
    ranks = lax.axis_size(("dp", "tp"))
    shares = torch.func.grad(lambda w: loss(w, x) / ranks)(w)
    return ft.sync_gradients(ft.assume_shares(shares), IN[0])


def of_a_vjp(w, x):
    value, pull = ft.vjp(lambda w: loss(w, x), w)
    seed = torch.full_like(value, 1 / lax.axis_size(("dp", "tp")))
    return ft.sync_gradients(pull(seed), IN[0])[0]


def accumulated(w, x):
    rows = x.unflatten(0, (2, -1))
    total, _ = ft.scan(lambda sum_, row: (sum_ + ft.grad(loss)(w, row), None), 0 * w, rows)
    again = ft.accumulate(ft.grad(loss), 2)(w, x)
    shares = 0.25 * (total + again).to(torch.float32).to(w.dtype)
    return ft.sync_gradients({"w": 2 * shares}, IN[0])["w"]


def of_the_ranks_own_loss(w, x):
    return lax.pmean(torch.func.grad(lambda w: ((x @ w) ** 2).sum())(w), "dp")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (synchronised, ""),
        (never_synchronised, "varies over 'dp'.*own share of a gradient.*sync_gradients"),
        (synchronised_twice, "sync_gradients at .*already summed over 'dp'.*sync_gradients once"),
        (summed_before, "sync_gradients at .*already summed over 'dp'"),
        (of_a_varying_loss, "a loss that varies over 'dp'.*'tp'.*from argument 0"),
        (of_a_varying_loss, "differentiate that with ft.grad, whose results sync_gradients"),
        (not_of_ft_grad, "no rank's share.*with ft.grad, not torch.func.grad"),
        (not_of_ft_grad_and_split_everywhere, "no rank's share"),
        (not_of_ft_grad_beside_what_is, "no rank's share"),
        (declared, ""),
        (of_a_vjp, ""),
        (accumulated, ""),
        (of_the_ranks_own_loss, ""),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_gradients(program, message):
    out = P(("dp", "tp")) if program is not_of_ft_grad_and_split_everywhere else IN[0]
    got = assert_agreement(program, MESH, IN, out, W, X)
    assert bool(got) == bool(message)
    if message:
        assert_matches(got, message)


@pytest.mark.parametrize("program", [synchronised, declared, of_a_vjp, accumulated])
def test_shares_that_are_accepted_add_up(program):
    want = torch.func.grad(lambda w: ((X @ w) ** 2).sum())(W)
    got = ft.shard_map(program, MESH, IN, IN[0])(W, X)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


# --- training steps

RIGHT, FORGETS, TWICE, WRONG_SPECS, LOCAL_NORM, LOCAL_METRIC, LOCAL_LOSS = VARIANTS = (
    "right", "forgets", "twice", "wrong specs", "local norm", "local metric", "local loss",
)  # fmt: skip


def training_step(
    variant, mesh, *, sequence_parallel=False, remat="none", microbatches=1, **changes
):
    """A decoder's step with one thing wrong, and its arguments."""
    config = gpt.GPTConfig(
        vocab_size=8, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, max_seq=4,
        dtype="float64", **changes,
    )  # fmt: skip
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.adamw(1e-2)
    stream = gpt.SEQUENCE_PARALLEL_STREAM if sequence_parallel else gpt.STREAM
    synced_as = specs
    if variant == WRONG_SPECS:
        synced_as = {**specs, "unembed": P("dp", "tp")}

    def mean_loss(params, batch):
        key = random.key(0) if config.dropout else None
        total = gpt.loss(
            config, params, batch, ft.ModelOptions(stream=stream, remat=remat), key=key
        )
        total = total / gpt.num_targets(batch)
        return total * batch["rows"].sum() if variant == LOCAL_LOSS else total

    def step(state, batch):
        both = ft.accumulate(ft.value_and_grad(mean_loss), microbatches)
        value, shares = both(state.params, batch)
        grads = shares if variant == FORGETS else ft.sync_gradients(shares, synced_as)
        grads = ft.sync_gradients(grads, specs) if variant == TWICE else grads
        norm = optim.global_norm(shares if variant == LOCAL_NORM else grads, specs)
        params, opt_state = optimizer.step_(grads, state.opt_state, state.params)
        value = value + batch["rows"].sum() if variant == LOCAL_METRIC else value
        metrics = {"loss": value, "norm": norm}
        return ft.State(state.step + 1, params, opt_state, state.key), metrics

    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    tokens = torch.arange(16).reshape(4, 4) % 8
    batch = {"tokens": tokens, "targets": tokens, "rows": torch.arange(4)}
    layout = ft.state_specs(specs, optimizer)
    return step, (layout, P("dp")), (layout, P()), state, batch


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_steps_agree(variant):
    step, in_specs, out_specs, state, batch = training_step(variant, MESH)
    f = ft.shard_map(step, MESH, in_specs, out_specs, donate=0)
    by_types = refuses(trace(f, donate=0)(state, batch).check)
    by_simulator = refuses(lambda: f(state, batch))
    assert bool(by_simulator) == bool(by_types) == (variant != RIGHT), (by_simulator, by_types)


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "remat": "full"},
        {"dropout": 0.1, "sequence_parallel": True},
        {"tied": True, "num_kv_heads": 2, "microbatches": 2},
        {"qk_norm": True, "z_loss": 1e-3},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=128, tp=2)], ids=str)
def test_right_training_steps_pass(mesh, options):
    step, in_specs, out_specs, state, batch = training_step(RIGHT, mesh, **options)
    batch = tree.map(lambda x: x.repeat_interleave(mesh["dp"], 0), batch)
    f = ft.shard_map(step, mesh, in_specs, out_specs)
    trace(f, donate=0)(state, batch).check()


# --- random programs: every operation takes and gives local values [4, 4]

CUBE = Mesh(dp=2, pp=1, tp=2)
SPECS = (P("dp"), P(None, "tp"), P(), P("dp", "tp"), P("pp"))
AXES = (("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("pp",), ("pp", "tp"))


def _scan(a, b, c):
    return ft.scan(lambda carry, row: (b * carry.sin() + row, carry), a, torch.stack([c, b]))[1][1]


ELEMENTWISE = {
    "add": lambda a, b, c: a + b,
    "matmul": lambda a, b, c: a @ b.mT,
    "where": lambda a, b, c: torch.where(a > 0, b, c),
    "softmax": lambda a, b, c: torch.softmax(a, 1),
    "zeros_like": lambda a, b, c: torch.zeros_like(a),
    "new_ones": lambda a, b, c: a.new_ones(4, 4),
    "constant": lambda a, b, c: torch.ones(4, 4),
    "layer_norm": lambda a, b, c: torch.nn.functional.layer_norm(a, (4,), b[0], c[0]),
    "cat": lambda a, b, c: torch.cat([a, b])[2:6],
    "view_as": lambda a, b, c: a.reshape(16).view_as(b),
    "gather": lambda a, b, c: a.gather(0, (b > 0).long()),
    "embedding": lambda a, b, c: torch.nn.functional.embedding((a > 0).long()[0], b),
    "sort": lambda a, b, c: a.sort(0).values,
    "in_place": lambda a, b, c: a.sin().mul_(2),
    "scan": _scan,
    "remat": lambda a, b, c: ft.remat(lambda a: (a * b).cos())(a),
    "grad": lambda a, b, c: torch.func.grad(lambda a: (a.sin() @ b).sum())(a),
    "vmap": lambda a, b, c: torch.func.vmap(lambda row: row * b[0])(a),
}
COLLECTIVES = {
    "psum": lambda a, axes: lax.psum(a, axes),
    "pmean": lambda a, axes: lax.pmean(a, axes),
    "pmax": lambda a, axes: lax.pmax(a, axes),
    "all_gather": lambda a, axes: lax.all_gather(a, axes, axis=1, tiled=True)[:, :4],
    "psum_scatter": lambda a, axes: lax.psum_scatter(
        a.repeat(lax.axis_size(axes), 1), axes, tiled=True
    ),
    "all_to_all": lambda a, axes: lax.all_to_all(a, axes, 0, 0, tiled=True),
    "ppermute": lambda a, axes: lax.ppermute(a, axes, [(0, 0)]),
    "pbroadcast": lambda a, axes: lax.pbroadcast(a, axes, 0),
    "assume_replicated": lambda a, axes: lax.assume_replicated(a, axes),
    "axis_index": lambda a, axes: a * lax.axis_index(axes),
    "inside_vmap": lambda a, axes: torch.func.vmap(lambda row: lax.pmean(row, axes))(a),
    "inside_grad": lambda a, axes: torch.func.grad(
        lambda a: lax.all_gather(a.sin(), axes).sum()
    )(a),
}  # fmt: skip

operations = st.lists(
    st.tuples(
        st.sampled_from([*ELEMENTWISE, *COLLECTIVES] + ["psum", "pmean"] * 2),
        st.tuples(*[st.integers(0, 20)] * 3),
        st.sampled_from(AXES),
    ),
    min_size=1,
    max_size=8,
)


def run_operations(chosen, *args):
    """Every value that the operations give: none of them is dead."""
    values = list(args)
    for name, picks, axes in chosen:
        a, b, c = (values[-1 - pick % len(values)] for pick in picks)
        one = COLLECTIVES.get(name)
        values.append(one(a, axes) if one else ELEMENTWISE[name](a, b, c))
    return values[len(args) :]


def arguments():
    shapes = [(8, 4), (4, 8), (4, 4), (8, 8), (4, 4)]
    return [torch.linspace(-1, 1, m * n).reshape(m, n) for m, n in shapes]


@settings(max_examples=60)
@given(operations)
def test_random_programs_vary_where_the_simulator_batches(chosen):
    program = lambda *args: run_operations(chosen, *args)
    assert_same_variation(program, CUBE, SPECS, *arguments())


@settings(max_examples=60)
@given(operations, st.lists(st.sampled_from((P(), P("dp"), P("tp"), P("dp", "tp"))), min_size=8))
def test_random_programs_are_refused_by_both_or_neither(chosen, specs):
    program = lambda *args: run_operations(chosen, *args)
    assert_agreement(program, CUBE, SPECS, specs[: len(chosen)], *arguments())


# --- what the message says, and programs that no trace makes


def test_messages_name_path_axis_lines_and_fix():
    def program(w, x):
        hidden = torch.relu(x @ w)  # here it enters
        return {"loss": hidden.sum()}  # the culprit

    f = ft.shard_map(program, MESH, IN, P())
    pattern = (
        r"output loss: got a value that varies over 'tp', made at .*test_check.py:\d+: .*"
        r"# the culprit`; it varies since .*# here it enters`, from argument 0, split by "
        r"P\(None, 'tp'\); wanted .*; fix: reduce it with lax.psum\(..., 'tp'\)"
    )
    with pytest.raises(ValueError, match=pattern) as error:
        trace(f)(W, X).check()
    assert "varies over 'dp'" in str(error.value)


def test_a_line_that_runs_often_is_reported_once():
    def program(w, x):
        step = lambda c, _: (ft.remat(lambda c: lax.psum(c, "dp"))(c), None)
        return ft.scan(step, w.sum(), None, length=3)[0]

    f = ft.shard_map(program, MESH, IN, P())
    message = refuses(trace(f)(W, X).check)
    assert message.count("already replicated over 'dp'") == 1
    assert "output: got a value that varies over 'tp'" in message


def test_unchecked_programs_pass():
    f = ft.shard_map(forgotten_psum, MESH, IN, P(), check=False)
    trace(f)(W, X).check()


def test_varying_tells_the_axes_of_every_value():
    def program(w, x):
        return ft.scan(lambda c, row: (c + lax.psum(row, "dp"), None), w.sum(0), x)[0]

    program = trace(ft.shard_map(program, MESH, IN, P("tp")))(torch.ones(4, 8), X)
    axes = varying(program)
    assert axes[program.inputs[0].var] == {"tp"}
    assert axes[program.outputs[0].value] == {"tp"}
    (scan,) = [e for e in program.block.equations if isinstance(e.op, Scan)]
    assert [axes[value] for value in scan.op.body.inputs] == [{"tp"}, {"dp"}]


def test_random_numbers_vary_and_barriers_keep_their_first_operand():
    base = trace(ft.shard_map(lambda w, x: (w + 1, x), MESH, IN, (P(None, "tp"), P("dp"))))(W, X)
    w, x = (given.var for given in base.inputs)
    fresh = [Var(name, (4, 2), (2, 1), torch.float32, w.device, 9, 32) for name in ("r", "b")]
    aten, ours = torch.ops.aten, torch.ops.functron
    equations = (
        Equation(aten.rand_like.default, (w,), {}, (fresh[0],)),
        Equation(ours.barrier.default, (w, x), {}, (fresh[1],)),
    )
    program = replace(base, block=Block((w, x), equations, tuple(fresh)), outputs=())
    axes = varying(program)
    assert [axes[value] for value in fresh] == [{"dp", "tp"}, {"tp"}]
    check(program)
