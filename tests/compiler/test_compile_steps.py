"""`compile`: donated memory, the number of kernels, stored artefacts, training steps, refusals."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
import torch

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, lax, optim, random, tree
from functron.compiler import compile as compile_program
from functron.compiler import inductor
from functron.compiler.executable import match_donations
from functron.compiler.lower import graph_module
from functron.compiler.segments import procedure
from functron.program.trace import trace
from functron.spmd.donation import Donated
from tests.compiler.test_compile import assert_same, made, randn


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "kernels"


# --- donation: a and b are [2, 2], both donated; w is [3, 2, 2]


def scanned(a, w):
    return ft.scan(lambda a, w: (torch.tanh(a @ w), a), a, w)


def needed_by_a_later_kernel(a, b, w):
    y = a @ b
    return y, scanned(y, w)[0] + a


def needed_by_a_later_scan(a, b, w):
    y = a + 1
    return y, ft.scan(lambda c, w: (torch.tanh(c @ w + a), None), y, w)[0]


def needed_as_a_view_later(a, b, w):
    t = a.t()
    y = a + 1
    return y, scanned(y, w)[0] + t[0]


def carried_through(a, b, w):
    c, ys = ft.scan(lambda c, w: (c, c @ w), a, w)
    return c, a + 1, ys


def swapped_by_a_scan(a, b, w):
    (c, d), _ = ft.scan(lambda c, w: ((c[1], c[0]), None), (a, b), w)
    return a + 1, c, d


# the function, and for each result the argument whose memory it has to be in; None: in no donated
# one; "any": the value matters only
DONATED = {
    "updated": (lambda a, b, w: (a + 1, b * 2), [0, 1]),
    "updated_from_both": (lambda a, b, w: (a + b, a - b), [0, 1]),
    "swapped": (lambda a, b, w: (b, a), [1, 0]),
    "updated_and_swapped": (lambda a, b, w: (b + 1, a + 1), [0, 1]),
    "turned": (lambda a, b, w: (b.t().contiguous(), a.t().contiguous()), [0, 1]),
    "one_returned": (lambda a, b, w: (a + b, b), [0, 1]),
    "other_returned": (lambda a, b, w: (b, a + b), [1, 0]),
    "returned_twice": (lambda a, b, w: (b, (b, a + b)), [1, 1, 0]),
    "result_twice": (lambda a, b, w: (lambda y: (y, (y, b)))(a + b), [0, 0, 1]),
    "result_and_view": (lambda a, b, w: (lambda y: (y, y[1:], b))(a + b), [0, "any", 1]),
    "product_added": (lambda a, b, w: (a + b @ w[0], b + 1), [0, 1]),
    "product_added_turned": (lambda a, b, w: ((w[1].t() @ b).view(2, 2) + a, b + 1), [0, 1]),
    "product_added_to_what_is_read": (lambda a, b, w: (a + b @ w[0], b + a), [0, 1]),
    "product_of_what_it_is_added_to": (lambda a, b, w: (a + a @ w[0], b + 1), [0, 1]),
    "product_read_twice": (lambda a, b, w: (lambda y: (a + y, b + y))(b @ w[0]), [0, 1]),
    "chain": (lambda a, b, w: (b * 2, (b * 2 + a) * 3), [0, 1]),
    "view_returned": (lambda a, b, w: (a[1:], b + 1, a + 1), [None, 1, None]),
    "by_path": (lambda a, b, w: {"1": a * 2, "0": b * 3}, [0, 1]),
    "after_a_scan": (lambda a, b, w: (a + scanned(b, w)[0], b + 1), [0, 1]),
    "before_a_scan": (lambda a, b, w: (a + 1, b + scanned(a + 1, w)[0]), [0, 1]),
    "later_kernel": (needed_by_a_later_kernel, [None, "any"]),
    "later_scan": (needed_by_a_later_scan, [None, "any"]),
    "later_view": (needed_as_a_view_later, [None, "any"]),
    "carried_through": (carried_through, [0, 1, None]),
    "swapped_by_a_scan": (swapped_by_a_scan, ["any", "any", "any"]),
    "gradient": (
        lambda a, b, w: (a - ft.grad(lambda a: scanned(a, w)[0].sum())(a), b + 1),
        [0, 1],
    ),
}


def check_donation(executable, fn, memory):
    a, b, w = randn(2, 2), randn(2, 2, seed=1), randn(3, 2, 2, seed=2)
    pointers = [a.data_ptr(), b.data_ptr()]
    want, kept = fn(a.clone(), b.clone(), w), w.clone()
    for _ in range(2):  # an artefact must not remember the memory of another call
        got = executable(a, b, w)
        assert_same(got, want)
        for value, place in zip(tree.leaves(got), memory, strict=True):
            if place is None:
                assert value.data_ptr() not in pointers
            elif place != "any":
                assert value.data_ptr() == pointers[place]
        assert type(a) is type(b) is Donated
        assert torch.equal(w, kept)
        a, b = randn(2, 2), randn(2, 2, seed=1)
        pointers = [a.data_ptr(), b.data_ptr()]


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("name", DONATED)
def test_donated_memory(name, unroll):
    fn, memory = DONATED[name]
    if unroll and name in ("later_kernel", "later_scan", "later_view"):
        memory = ["any"] * len(memory)  # in one kernel, which writes at its end
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executable = made(
            fn, randn(2, 2), randn(2, 2), randn(3, 2, 2), donate=(0, 1), unroll=unroll
        )
    check_donation(executable, fn, memory)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("updated_and_swapped", marks=pytest.mark.full),
        *("turned", "later_kernel", "product_added"),
    ],
)
def test_donated_memory_through_inductor(name, cache):
    fn, memory = DONATED[name]
    arguments = randn(2, 2), randn(2, 2), randn(3, 2, 2)
    executable = made(fn, *arguments, donate=(0, 1), backend="inductor", cache=cache)
    check_donation(executable, fn, memory)


def test_donation_that_is_of_no_use_warns():
    def fn(a, b, c):
        return a + 1, b.sum(), c.sum()

    arguments = randn(3), randn(4), torch.arange(3)
    program = trace(fn, donate=(0, 1, 2))(*arguments)
    with pytest.warns(UserWarning, match=r"fn: .*no result can take: 1, 2; wanted .*; fix: do not"):
        executable = compile_program(program, backend="eager")
    assert executable.updated == ("0",)
    assert_same(executable(*[x.clone() for x in arguments]), fn(*arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_program(trace(fn, donate=0)(*arguments), backend="eager")


# --- kernels and artefacts


def training(
    mesh,
    num_layers=2,
    dtype: Literal["float32", "float64"] = "float32",
    loss_options=None,
    update=optim.adamw,
    **changes,
):
    config = gpt.GPTConfig(
        vocab_size=40, num_layers=num_layers, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=8,
        init_stddev=0.2, dtype=dtype, **changes,
    )  # fmt: skip
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), update(1e-2))

    def loss(params, batch, key):
        key = key if config.dropout else None
        return gpt.loss(config, params, batch, ft.ModelOptions(**(loss_options or {})), key=key)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    return step, ft.init_state(random.key(0), defs, specs, optimizer, mesh)


def batch_of(seed):
    tokens = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].contiguous()
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets, "rows": torch.arange(4)}


def num_kernels(num_layers):
    step, state = training(Mesh(), num_layers)
    block = trace(step, donate=0)(state, batch_of(0)).block
    return len(procedure(block, block.outputs).kernels())


def apart(params, grads):
    """Gradients in half precision, clipped by their norm, and an update of each parameter."""
    wide = [g.float() * 2 for g in grads]
    factor = 1 / (1 + torch.stack([g.square().sum() for g in wide]).sum().sqrt())
    sizes = [p.shape[0] for p in params]
    assert len({*sizes}) == 2
    return [p * 0.9 - (g * factor).tanh() for p, g in zip(params, wide, strict=True)]


def test_updates_of_parameters_apart_are_kernels_that_are_alike():
    params = [randn(3 if i % 3 else 5, 2, seed=i) for i in range(15)]
    grads = [randn(*p.shape, seed=20 + i).half() for i, p in enumerate(params)]
    program = trace(apart, donate=0)(params, grads)
    donated = match_donations(program)
    steps = procedure(program.block, program.block.outputs, donated=donated, alike=True)
    graphs = Counter(graph_module(k, {}).code for k in steps.kernels())
    # ten sums of squares and updates of one shape; the five of the other, and the norm
    assert sorted(graphs.values()) == [1, 1, 10, 10]
    # gradients are not kept in full precision between the two
    assert all(v.size <= 1 for k in steps.kernels() for v in k.results if v.shape != (3, 2))
    assert len(steps.inside) == 15
    wanted = apart(params, grads)
    made = compile_program(program, backend="eager")
    assert_same(made([p.clone() for p in params], grads), wanted)


UNLIKE = [  # of parameters: rows, dtype, whether transposed; factors of their updates
    (3, torch.float64, False, {"eps": 1e-8}),
    (3, torch.float64, True, {"eps": 1e-8}),
    (3, torch.float32, False, {"eps": 1e-8}),
    (5, torch.float64, False, {"eps": 1e-8}),
    (3, torch.float64, False, {"eps": 1e-3}),
    (3, torch.float64, False, {"eps": 1e-8, "decay": 0.1}),
    (3, torch.float64, False, {"eps": 1e-8, "rate": 0.5}),
    (3, torch.float64, False, {"eps": 1e-8, "frozen": True}),
]


def update_unlike(params, grads, moments):
    """Updates of 48 parameters, six of each kind; the two of each pair read one gradient."""
    new, second = [], []
    for i, (p, m) in enumerate(zip(params, moments, strict=True)):
        kind, g = UNLIKE[i % len(UNLIKE)][3], grads[i % (len(grads))]
        m = m * 0.9 + g * g * 0.1
        step = g / (m.sqrt() + kind["eps"]) + (p * kind["decay"] if "decay" in kind else 0)
        rate = kind.get("rate", 1e-2)
        new.append(p if kind.get("frozen") else p - step.tanh() * rate)
        second.append(m)
    return new, second


def test_what_is_not_alike_is_never_computed_by_one_kernel(monkeypatch):
    """Other shapes, dtypes, strides, factors, and what is frozen; each kernel runs uncompiled."""

    def leave(graph, reads, *_, wait):
        signature = [(v.shape, v.stride, v.dtype) for v in reads]
        return (lambda operands: graph(*operands)), f"{graph.code}{signature}"

    monkeypatch.setattr(inductor, "compile_graph", leave)
    kinds = UNLIKE * 6

    def draw(seed):
        rows = enumerate(kinds)
        made = [(randn(n, n, seed=seed + i).to(dtype), turned) for i, (n, dtype, turned, _) in rows]
        return [x.mT if turned else x for x, turned in made]

    params, grads = draw(0), draw(100)[:24]
    moments = [x.square() for x in draw(200)]
    wanted = update_unlike(params, grads, moments)
    program = trace(update_unlike, donate=(0, 2))(params, grads, moments)
    made = compile_program(program)
    assert 6 <= len(made.code) <= 16
    copies = [[x.mT.clone().mT if not x.is_contiguous() else x.clone() for x in row]
              for row in (params, moments)]  # fmt: skip
    assert_same(made(copies[0], grads, copies[1]), wanted)
    tied = [params[0] if i == 8 else x for i, x in enumerate(params)]
    with pytest.raises(ValueError, match="argument 0/8: got the memory of 0/0; wanted memory of"):
        made(tied, grads, moments)


def test_collectives_stay_in_order_beside_parts_that_are_alike():
    """Stages of a pipeline have other parts than one another, and would meet in other sums."""
    mesh = Mesh(pp=2)

    def fn(xs, y):
        made = [(x * 2 - 1).tanh().exp().sin().cos() for x in xs]
        first = lax.psum(torch.stack([x.sum() for x in made]).sum(), "pp")
        return made, first, lax.psum(y, "pp")

    xs, y = [randn(3, seed=i) for i in range(8)], randn(2)
    program = trace(ft.shard_map(fn, mesh, P(), P(), check=False))(xs, y)
    names = [[e.results[0].shape for e in each if e.name == "psum"] for each in (
        program.block.equations,
        [e for k in procedure(program.block, program.block.outputs, alike=True).kernels()
         for e in k.equations],
    )]  # fmt: skip
    assert names[0] == names[1] == [(), (2,)]


def test_the_number_of_kernels_does_not_depend_on_depth():
    # scalars first; before, between and after the forward and the backward scan; their bodies
    assert num_kernels(3) == num_kernels(12) <= 6


def counting(monkeypatch):
    calls = []
    compiling = inductor._compile

    def count(*args):
        calls.append(args)
        return compiling(*args)

    monkeypatch.setattr(inductor, "_compile", count)
    return calls


def scaled_step(w, x):
    carry, _ = ft.scan(lambda a, w: (torch.tanh(a * w[0]), None), x, w)
    return w * carry.sum(), torch.tensor([1.0, 2.0]) * x.sum()


def test_kernels_are_kept_on_disk(cache, monkeypatch):
    calls = counting(monkeypatch)
    w, x = randn(3, 2, 2), randn(5, 2)  # kernels that no other test has
    settings = {"donate": 0, "backend": "inductor", "cache": cache}
    first = made(scaled_step, w, x, **settings)
    num = len(calls)
    assert num == len(first.code) >= 2
    again = made(scaled_step, w, x, **settings)
    assert len(calls) == num
    assert again.code == first.code
    for executable in (first, again, again):
        given = w.clone()
        pointer = given.data_ptr()
        got = executable(given, x)
        assert got[0].data_ptr() == pointer
        assert_same(got, scaled_step(w, x))

    deeper = made(scaled_step, randn(9, 2, 2), x, **settings)
    assert len(set(deeper.code) & set(first.code)) >= 1  # the body of the scans
    assert len(calls) < 2 * num

    num = len(calls)
    other = made(scaled_step, w, x, options={"epilogue_fusion": False}, **settings)
    assert len(calls) == num + len(other.code)
    assert_same(other(w.clone(), x), scaled_step(w, x))


# --- training steps

CASES = {
    "plain": {},
    "remat": {"loss_options": {"remat": "full"}},
    "tied": {"tied": True, "num_kv_heads": 2, "qk_norm": True},
    "dropout": {"dropout": 0.1, "loss_options": {"remat": "selective"}},
    "sequence": {"loss_options": {"stream": gpt.SEQUENCE_PARALLEL_STREAM, "remat": "dots"}},
}


def check_steps(step, state, tolerance, **options):
    program = trace(step, donate=0, simulate=True)(state, batch_of(0))
    executable = compile_program(program, **options)
    state_got = tree.map(torch.clone, state)
    for seed in range(3):
        state, want = step(state, batch_of(seed))
        state_got, got = executable(state_got, batch_of(seed))
        assert_same(got, want, tolerance)
    assert_same(state_got, state, tolerance)
    paths = {f"0/{path}" for path in tree.paths(state)}
    # all of the state is updated in place; the simulation hands on a copy of the key
    assert paths - set(executable.updated) <= {"0/key"}


@pytest.mark.pairwise(
    of=lambda case, mesh: [{"case": case}, {"mesh": mesh, "split": case in ("plain", "sequence")}]
)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_three_training_steps(case, mesh):
    step, state = training(mesh, dtype="float64", **CASES[case])
    check_steps(step, state, 1e-10, backend="eager")


# a scan with remat and random bits is compiled in test_jit.py, and a step of a simulated mesh
@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_three_training_steps_through_inductor(cache, dropout):
    options = {"remat": "full"}
    step, state = training(Mesh(), dropout=dropout, loss_options=options, update=optim.sgd)
    check_steps(step, state, 1e-5, cache=cache)


# --- refusals


def test_other_arguments_are_refused_with_all_offenders():
    executable = made(lambda batch, w: batch["x"] @ w + batch["y"], {"x": X, "y": X[:, 0]}, X.t())
    with pytest.raises(ValueError, match="compile") as error:
        executable({"x": X.float(), "y": X[0]}, X.t().contiguous())
    lines = str(error.value).splitlines()
    assert "compiled for other arguments" in lines[0]
    assert [line.strip(" -") for line in lines[1:]] == [
        "argument 0/x: got float32[2, 3] on cpu; wanted float64[2, 3] on cpu",
        "argument 0/y: got float64[3] on cpu; wanted float64[2] with strides (3,) on cpu",
        "argument 1: got float64[3, 2] on cpu; wanted float64[3, 2] with strides (1, 3) on cpu",
    ]
    with pytest.raises(ValueError, match=r"structure.*fix: trace it again"):
        executable({"x": X}, X.t())


X = randn(2, 3)


def test_unknown_options_and_backends_are_refused_together():
    program = trace(lambda x: x + 1)(X)
    options = {"epilog_fusion": True, "max_autotune": False}
    with pytest.raises(ValueError, match="compile") as error:
        compile_program(program, options=options, backend="aot")  # pyright: ignore
    text = str(error.value)
    assert "options: got 'epilog_fusion'; wanted an option of Inductor; fix: did you mean" in text
    assert "'epilogue_fusion'" in text
    assert "'max_autotune'; wanted" not in text
    assert "backend: got 'aot'; wanted 'inductor' or 'eager'" in text


def test_meshes_that_do_not_fit_are_refused():
    fn = ft.shard_map(lambda x: lax.psum(x, "dp"), Mesh(dp=2), P("dp"), P())
    program = trace(fn)(X)
    wanted = r"mesh: got {}; wanted the bound mesh of 2 ranks; fix: pass mesh.bind\(\).*simulate="
    with pytest.raises(ValueError, match=wanted.format("no processes")):
        compile_program(program, backend="eager")
    with pytest.raises(ValueError, match=wanted.format("a simulated mesh")):
        compile_program(program, Mesh(dp=2), backend="eager")
    other = BoundMesh(Mesh(tp=2), 0, {"tp": 0}, {"tp": "none"}, "cpu")
    message = r"mesh: got Mesh\(tp=2\); wanted Mesh\(dp=2\); fix: trace for the same mesh"
    with pytest.raises(ValueError, match=message):
        compile_program(program, other, backend="eager")
    simulated = compile_program(trace(fn, simulate=True)(X), backend="eager")
    assert torch.equal(simulated(X), X[:1] + X[1:])


@pytest.mark.parametrize(("fused", "count"), [(False, 7), (True, 4)])
def test_gradients_of_weights_are_written_where_they_are_kept(fused, count):
    """A layer's own, but of vectors: into its row of the gradients of all layers."""
    step, state = training(Mesh(), 3, fused_projections=fused)
    block = trace(step, donate=0)(state, batch_of(0)).block
    steps = procedure(block, block.outputs)
    graphs = [graph_module(kernel, {}).graph for kernel in steps.kernels()]
    (layer,) = [
        graph
        for graph in graphs
        if graph.find_nodes(op="call_function", target=torch.ops.functron.mm_into.default)
    ]
    copies = layer.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    products = layer.find_nodes(op="call_function", target=torch.ops.functron.mm_into.default)
    assert (len(products), len(copies)) == (count, 2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, name in ("product_added", "product_added_turned"))
        for name in DONATED
        if "product" in name
    ],
)
def test_products_are_added_where_nothing_else_reads(name, count):
    fn, _ = DONATED[name]
    block = trace(fn, donate=(0, 1))(randn(2, 2), randn(2, 2), randn(3, 2, 2)).block
    (kernel,) = procedure(block, block.outputs).kernels()
    updates = tuple(zip(block.inputs[:2], kernel.results, strict=True))
    found = graph_module(replace(kernel, updates=updates, results=()), {}).graph
    added = found.find_nodes(op="call_function", target=torch.ops.functron.mm_onto.default)
    assert len(added) == count


@pytest.mark.full
@pytest.mark.parametrize(("fused", "launches"), [(False, (13, 22)), (True, (10, 14))])
def test_launches_of_a_layer(fused, launches, cache):
    """By Inductor's code for a CPU, forward and backward, of a layer as Llama 3 8B has it."""
    config = replace(
        gpt.PRESETS["llama3-8b"], vocab_size=256, num_layers=3, embed_dim=128, num_heads=8,
        num_kv_heads=2, mlp_dim=256, max_seq=64, dtype="bfloat16", fused_projections=fused,
    )  # fmt: skip
    params = ft.init_params(random.key(0), gpt.defs(config))
    data = {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("tokens", "targets")}
    compiled = ft.jit(ft.grad(lambda p, b: gpt.loss(config, p, b)), cache=cache)
    calls = re.compile(
        r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.M
    )
    found = [
        len(calls.findall(code.split("def call")[-1].split("def benchmark")[0]))
        for code in compiled.compile(params, data).code
    ]
    assert (found[1], found[3]) == launches
