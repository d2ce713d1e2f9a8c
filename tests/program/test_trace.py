"""Tracing: its equations, their sizes, and its refusals."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.program.equations import Scan
from functron.program.trace import trace


def abstract_step(name, mesh, seq):
    config = gpt.PRESETS[name]
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.adamw(1e-4)
    params = ft.abstract_params(defs)
    scalar, key = (torch.empty(s, dtype=torch.int64, device="meta") for s in ((), (2,)))
    state = ft.State(scalar, params, optimizer.init(params), key)
    rows = torch.empty(mesh["dp"], dtype=torch.int64, device="meta")
    tokens = torch.empty(mesh["dp"], seq, dtype=torch.int64, device="meta")
    step = ft.make_step(
        ft.mean_gradients(lambda p, b, k: gpt.loss(config, p, b), gpt.num_targets),
        optimizer,
        mesh,
        specs,
    )
    return step, state, {"tokens": tokens, "targets": tokens, "rows": rows}


def is_collective(equation, name):
    return not isinstance(equation.op, Scan) and equation.op.name() == f"functron::{name}"


def test_llama_on_1024_ranks_is_traced_at_local_shapes():
    mesh = Mesh(dp=128, tp=8)
    step, state, batch = abstract_step("llama3-8b", mesh, 8192)
    program = trace(step, donate=0)(state, batch)
    shapes = {given.path: given.var.shape for given in program.inputs}
    assert shapes["0/params/blocks/mlp/up/w"] == (32, 4096, 14336 // 8)
    assert shapes["0/params/blocks/attention/q/w"] == (32, 4096, 32 // 8, 128)
    assert shapes["1/tokens"] == (1, 8192)
    forward, backward = [e for e in program.block.equations if e.name == "scan"]
    assert (forward.op.length, backward.op.length) == (32, 32)
    assert (forward.op.reverse, backward.op.reverse) == (False, True)
    # Megatron's count: one all-reduce after attention, one after the mlp, and their transposes
    for scan in (forward, backward):
        reduced = [e for e in scan.op.body.equations if is_collective(e, "psum")]
        assert [e.args[1] for e in reduced] == ["tp", "tp"]
        assert [e.results[0].shape for e in reduced] == [(1, 8192, 4096)] * 2
    by_path = {output.path: output.value.shape for output in program.outputs}
    assert by_path["0/params/blocks/mlp/up/w"] == (32, 4096, 14336 // 8)
    assert all(given.donated == given.path.startswith("0/") for given in program.inputs
               if given.role == "argument")  # fmt: skip


def test_scopes_lines_and_phases():
    mesh = Mesh(tp=2)

    def program(w, x):
        def loss(w):
            with ft.named_scope("project"):
                y = lax.psum(x @ w, "tp")  # the line
            return (y**2).sum()

        return ft.grad(loss)(w)

    f = ft.shard_map(program, mesh, (P("tp"), P(None, "tp")), P("tp"), check=False)
    equations = trace(f)(torch.ones(4, 3), torch.ones(2, 4)).block.equations
    products = [e for e in equations if e.name == "mm"]
    assert [e.where.phase for e in products] == ["forward", "backward"]
    assert [e.where.scopes for e in products] == [("project",), ("project",)]
    assert all(e.where.line.endswith("# the line`") for e in products)
    sums = [e for e in equations if is_collective(e, "psum")]
    assert [e.where.phase for e in sums] == ["forward", "backward"]


def test_axis_indices_and_closed_over_tensors_are_inputs():
    table = torch.arange(6.0)

    def program(x):
        return x * lax.axis_index("tp") + table[:2]

    f = ft.shard_map(program, Mesh(dp=2, tp=3), P(("dp", "tp")), P(("dp", "tp")))
    program = trace(f)(torch.ones(12))
    roles = {given.role: given for given in program.inputs}
    assert roles["axis_index"].path == "tp"
    assert roles["axis_index"].var.dtype == torch.int64
    assert roles["constant"].value is table


def test_in_place_operations_become_pure():
    def program(x):
        y = x * 2
        y.add_(1).mul_(y)
        return y

    traced = trace(program)(torch.ones(3))
    assert [e.name for e in traced.block.equations] == ["mul", "add", "mul"]
    assert traced.block.equations[-1].operands == (traced.block.equations[1].results[0],) * 2


def test_dead_equations_are_dropped():
    def program(x):
        x.exp()
        return x + 1

    assert [e.name for e in trace(program)(torch.ones(3)).block.equations] == ["add"]


def test_statics_stay_in_the_structure():
    program = trace(lambda x, n, options: x * n + len(options["name"]))(
        torch.ones(2), 3, {"name": "abc"}
    )
    assert program.static == {1: 3, 2: "abc"}
    with pytest.raises(ValueError, match="got 4; wanted 3"):
        program.flatten((torch.ones(2), 4, {"name": "abc"}))
    with pytest.raises(ValueError, match="structure"):
        program.flatten((torch.ones(2), 3, {"other": "abc"}))


def test_simulation_traced_on_global_values():
    mesh = Mesh(dp=2)
    f = ft.shard_map(lambda x: lax.psum(x.sum(), "dp"), mesh, P("dp"), P())
    program = trace(f, simulate=True)(torch.ones(4, 3))
    assert program.inputs[0].var.shape == (4, 3)
    assert not [e for e in program.block.equations if e.op.namespace == "functron"]


def raises_if(x):
    return x if x.sum() > 0 else -x


def raises_item(x):
    return x * x.sum().item()


def raises_mask(x):
    return x[x > 0]


def raises_nonzero(x):
    return x.nonzero()


def raises_rank(x):
    return lax.psum(x, "tp") if lax.axis_index("tp") == 0 else x


@pytest.mark.parametrize(
    "program", [raises_if, raises_item, raises_mask, raises_nonzero, raises_rank]
)
def test_data_dependent_control_flow_is_refused_with_its_line(program):
    f = ft.shard_map(program, Mesh(tp=2), P("tp"), P("tp"), check=False)
    with pytest.raises(ValueError, match=r"the number in a tensor.*torch.where") as error:
        trace(f)(torch.ones(4))
    assert f"test_trace.py:{program.__code__.co_firstlineno + 1}" in str(error.value)


def test_hidden_randomness_is_refused():
    with pytest.raises(ValueError, match=r"test_trace.py.*random numbers.*functron.random"):
        trace(lambda x: x + torch.randn(3))(torch.ones(3))
    with pytest.raises(ValueError, match="random numbers"):
        trace(lambda x: torch.nn.functional.dropout(x, 0.5, training=True))(torch.ones(3))


def test_mutation_of_what_is_not_donated_is_refused():
    with pytest.raises(ValueError, match=r"modifies argument 0/w in place.*donate="):
        trace(lambda p: p["w"].add_(1))({"w": torch.ones(3)})
    table = torch.zeros(3)

    def writes_outside(x):
        table.add_(x)
        return x

    with pytest.raises(ValueError, match="closes over in place"):
        trace(writes_outside)(torch.ones(3))
    assert table.eq(0).all()
    assert trace(lambda p: p["w"].add_(1), donate=0)({"w": torch.ones(3)}).outputs[0].path == ""


def writes_a_row(x):
    y = x * 1
    y[0] = 0
    y[:, 1] += y[:, 0]
    return y, y[1]


def reads_an_older_view(x):
    y = x * 1
    flat, row = y.view(-1), y[1]
    y.add_(1)
    flat.mul_(2)
    return flat, row, y


def writes_through_a_transpose(x):
    y = x.exp()
    t = y.t()
    t[0].copy_(x[:, 1])
    return t * y.t()


def fills_a_diagonal(x):
    return torch.func.hessian(lambda x: (x.sin() * x.sum()).sum())(x)


def reads_a_view_of_turned_memory(x):
    y = (x * 1).t().clone(memory_format=torch.preserve_format)
    row = y[0]
    y.add_(1)
    row.mul_(3)
    return row, y


def saves_what_a_view_was_overwritten_with(x):
    def total(x):
        y = x * 1
        y[:, :1].tanh_()
        return (y * y.cos()).sum()

    return torch.func.grad(total)(x)


def rounds_to_its_own_dtype(x):
    y = x * 1
    y += torch.full((2,), 1 / 3, dtype=torch.float64)
    y[0].copy_(y.double()[1])
    return y


@pytest.mark.parametrize(
    "program",
    [
        writes_a_row,
        reads_an_older_view,
        writes_through_a_transpose,
        fills_a_diagonal,
        reads_a_view_of_turned_memory,
        saves_what_a_view_was_overwritten_with,
        rounds_to_its_own_dtype,
    ],
)
def test_mutation_through_views_becomes_pure(program):
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    traced = trace(program)(x)
    torch.testing.assert_close(traced(x), program(x))
    assert not [e for e in traced.block.equations if e.op._schema.is_mutable]


def test_mutation_that_memory_cannot_show_is_refused():
    def older(x):
        y = x * 1
        row = y.view(torch.int32)
        y.add_(1)
        return row

    with pytest.raises(ValueError, match=r"a view is used after"):
        trace(older)(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"broadcast to what is modified"):
        trace(lambda x: (x * 1).sum(0).add_(x))(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"whose elements overlap"):
        trace(lambda x: (x[:1] * 1).expand(3, 2).add_(1))(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"are those of a torch.float32 value"):
        trace(lambda x: (x * 1).view(torch.int32).fill_(1))(torch.ones(3, 2))


def test_a_program_that_would_be_differentiated_is_refused():
    def loss(x):
        return (x * x.detach()).sum()

    program = trace(loss)(torch.ones(3))
    with pytest.raises(ValueError, match=r"argument 0.*ft.trace\(ft.grad\(loss\)\)"):
        torch.func.grad(program)(torch.ones(3))
    with pytest.raises(ValueError, match="would be differentiated"):
        program(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        assert program(torch.ones(3, requires_grad=True)) == 3
    assert torch.func.vmap(program)(torch.ones(2, 3)).tolist() == [3, 3]


def _dual(f, x):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, x))


FORWARD = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": torch.func.linearize,
    "make_dual": _dual,
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
    "jvp around grad": lambda f, x: torch.func.jvp(
        lambda x: torch.func.grad(lambda y: y.sum() * f(x))(x).sum(), (x,), (x,)
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_program_that_would_be_differentiated_forward_is_refused(name):
    """The tangent of ``sum(stop(x) x)`` is that of the second factor: half of what equations say."""

    def loss(x):
        return (x * x.detach()).sum()

    x = torch.tensor([1.0, 2.0, 3.0])
    assert torch.func.jvp(loss, (x,), (torch.ones(3),))[1] == 6
    for program in (trace(loss)(x), ft.jit(loss, backend="eager").compile(x)):
        with pytest.raises(ValueError, match=r"would be differentiated\n.*argument 0.*fix: diff"):
            FORWARD[name](program, x)


class _Holder:
    """An object that is no tree, and has a tensor."""

    def __init__(self, w):
        self.w = w

    def times(self, x):
        return (self.w * x).sum()


def _program(f):
    return lambda x: trace(f)(x)(x)


def _jitted(f):
    return ft.jit(f, backend="eager")


def _partitioned(f):
    return ft.partition(f, Mesh(tp=3), (P("tp"),))


OUTSIDE = {
    "grad": lambda f, w: torch.func.grad(f)(w),
    "jvp": lambda f, w: torch.func.jvp(f, (w,), (w,)),
    "vmap": lambda f, w: torch.func.vmap(f)(w[None]),
    "ft.grad": lambda f, w: ft.grad(f)(w),
    "tape": lambda f, w: f(w.clone().requires_grad_()).backward(),
}


@pytest.mark.parametrize("held", [False, True], ids=["closure", "object"])
@pytest.mark.parametrize("make", [_program, _jitted, _partitioned])
@pytest.mark.parametrize("name", OUTSIDE)
def test_programs_that_close_over_what_is_differentiated_or_mapped_are_refused(name, make, held):
    """Its numbers would be constants: gradients of 1 in place of 2, no tangent, no batch."""

    def f(w):
        times = _Holder(w).times if held else lambda x: (w * x).sum()
        return make(times)(torch.ones(3)) + w.sum()

    words = "closes over .* outside of it\n.*shape .3.; .*fix: pass it to .* as an argument"
    under = make is _jitted and name in ("grad", "jvp", "vmap")  # which jit always refuses
    with pytest.raises(ValueError, match="jit outermost" if under else words):
        OUTSIDE[name](f, torch.tensor([1.0, 2.0, 3.0]))


def test_programs_may_close_over_what_nothing_tracks_where_they_are_called():
    x = torch.ones(3)

    def outer(v, w):
        own = torch.ones(3)  # of this level of grad, which does not differentiate it
        parts = [make(lambda x, c=c: (c * x).sum()) for c in (w, own) for make in
                 (_program, _partitioned)]  # fmt: skip
        return (v * sum(part(x) for part in parts)).sum()

    w = torch.tensor([1.0, 2.0, 3.0])
    assert torch.func.grad(outer)(x, w).tolist() == [18, 18, 18]
    assert torch.func.jvp(lambda v: outer(v, w), (x,), (x,))[1] == 54
    w.requires_grad_()
    made = [_jitted(_Holder(w).times), _partitioned(_Holder(w).times)]
    with torch.no_grad():
        made.append(trace(_Holder(w).times)(x))
        assert [f(x).item() for f in made] == [6, 6, 6]
    for f in made:  # a tape runs here
        with pytest.raises(ValueError, match=r"closes over .* outside of it"):
            f(x)


def test_a_tensor_of_another_trace_is_refused():
    kept = []
    trace(lambda x: kept.append(x * 2) or x)(torch.ones(3))
    with pytest.raises(ValueError, match="kept from another trace"):
        trace(lambda x: x + kept[0])(torch.ones(3))


def test_a_tensor_kept_from_a_scanned_function_is_refused():
    def program(x):
        kept = []

        def step(carry, row):
            kept.append(carry * row)
            return carry + row, None

        carry, _ = ft.scan(step, x[0], x)
        return carry + kept[0]

    with pytest.raises(ValueError, match=r"inside a scanned function.*as the carry or as y"):
        trace(program)(torch.ones(3, 2))


def test_bad_calls_are_refused():
    f = ft.shard_map(lambda x: x, Mesh(dp=2), P("dp"), P("dp"))
    with pytest.raises(ValueError, match="argument 0"):
        trace(f)(torch.ones(3))
    with pytest.raises(TypeError, match="keyword"):
        trace(f)(x=torch.ones(4))
    with pytest.raises(ValueError, match="leave them out"):
        trace(f, mesh=Mesh(dp=2), in_specs=P())(torch.ones(4))
    with pytest.raises(ValueError, match="both or neither"):
        trace(f.f, mesh=Mesh(dp=2))(torch.ones(4))
    with pytest.raises(ValueError, match="positions of 1 arguments"):
        trace(f, donate=3)(torch.ones(4))
    with pytest.raises(ValueError, match="while another program"):
        trace(lambda x: trace(f)(x))(torch.ones(4))


def test_random_keys_trace_and_give_the_same_bits():
    from functron.program.interpreter import run_in_lockstep

    def program(key):
        return random.normal(key, (4, 3), torch.float64)

    key = random.key(7)
    torch.testing.assert_close(run_in_lockstep(trace(program)(key), key), program(key))


def test_a_program_runs_on_arguments_of_another_layout_only_if_it_was_traced_so():
    program = trace(lambda x: x.t() @ x)(torch.ones(3, 2).t())
    assert program.inputs[0].var.stride == (1, 2)
    assert tree.leaves(program.outputs[0].value.shape) == [3, 3]


def test_in_place_views_change_the_shape_from_there_on():
    """Vector times matrix squeezes its result in place, inside torch."""
    w, c = torch.randn(3, 2, 2), torch.randn(2)

    def f(c, w):
        return ft.scan(lambda c, w: (c @ w + c, c), c, w)

    program = trace(f)(c, w)
    for got, want in zip(tree.leaves(program(c, w)), tree.leaves(f(c, w)), strict=True):
        torch.testing.assert_close(got, want)
    grad = ft.grad(lambda c: f(c, w)[0].sum())
    torch.testing.assert_close(trace(grad)(c)(c), grad(c))


COMPUTED = {
    # what torch's rules of types and layouts tell apart: numbers that are equal, keywords, strides
    "an integer": lambda x, w: x.long() * 2,
    "a float": lambda x, w: x.long() * 2.0,
    "a truth": lambda x, w: x.long() * True,
    "of another type": lambda x, w: x.sum(0, dtype=torch.float64),
    "of its own type": lambda x, w: x.sum(0),
    "a copy of a transpose": lambda x, w: x.transpose(0, 1).clone(),
    "a copy": lambda x, w: x.clone(),
    "sums of a transpose": lambda x, w: x.transpose(0, 1) + x.transpose(0, 1),
    # results that show memory of others, one and several
    "a product seen otherwise": lambda x, w: x @ w,
    "parts": lambda x, w: x.split(1),
    "rows": lambda x, w: x.unbind(1),
    "a window": lambda x, w: x[:, 1:].transpose(1, 2),
    # several results of their own
    "the largest and where": lambda x, w: torch.max(x, 2),
    # from nothing
    "numbers": lambda x, w: torch.arange(3) + torch.ones(3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_are_like_those_of_torch_also_when_they_are_known(dtype):
    x, w = torch.zeros(2, 3, 4), torch.zeros(4, 5)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for name, function in [*COMPUTED.items(), *COMPUTED.items()]:
            program = trace(function)(x, w)
            results = [output.value for output in program.outputs]
            real = tree.leaves(function(x, w))
            assert [(v.shape, v.stride, v.dtype) for v in results] == [
                (tuple(y.shape), y.stride(), y.dtype) for y in real
            ], name
            inputs = [given.var for given in program.inputs]
            mine = first_of_each([v.storage for v in (*inputs, *results)])
            memory = [y.untyped_storage().data_ptr() for y in (x, w, *real)]
            assert mine == first_of_each(memory), name
    finally:
        torch.set_default_dtype(default)


def first_of_each(values):
    """Of each value the place of the first that equals it."""
    return [values.index(value) for value in values]


def test_another_tracer_inside_is_refused():
    """It would see nothing, and torch.func.linearize so gave wrong numbers."""

    def product(x, v):
        return torch.func.linearize(torch.func.grad(lambda x: (x * x).sum()), x)[1](v)

    with pytest.raises(ValueError, match=r"another tracer .*torch\.func\.jvp"):
        trace(product)(torch.ones(3), torch.ones(3))


def test_tangents_of_zero_have_memory_of_their_own():
    """torch's zero tensors have none, which compiled code writes into."""

    def f(x):
        return torch.ones_like(x).index_put((torch.tensor([0, 2, 2]),), x, accumulate=True)

    program = trace(lambda x, v: torch.func.jvp(f, (x,), (v,)))(torch.ones(3, 2), torch.ones(3, 2))
    ops = [e.op for e in program.block.equations]
    assert torch.ops.aten.zeros.default in ops
    assert torch.ops.aten._efficientzerotensor.default not in ops
