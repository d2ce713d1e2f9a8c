"""shard_map's own behaviour, where JAX has no counterpart: static specs, donation, errors, fakes."""

import functools
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import functron as ft
from functron import Mesh, P, lax, shard_map
from functron.ops.foreach import foreach_
from functron.spmd.simulate import product

MESH = Mesh(dp=2, tp=2)
X = torch.arange(32.0).view(4, 8)


def test_static_arguments_and_results_pass_through():
    class Options:
        scale = 3.0

    options = Options()

    def program(x, options, name):
        return x * options.scale, (name, options)

    y, (name, same) = shard_map(program, MESH, (P("dp"), None, None), (P("dp"), None))(
        X, options, "n"
    )
    torch.testing.assert_close(y, 3 * X)
    assert name == "n"
    assert same is options


def test_numbers_are_replicated_values():
    def program(x, n):
        return x * n, n + 1

    y, n = shard_map(program, MESH, (P("dp"), P()), (P("dp"), P()))(X, 2)
    torch.testing.assert_close(y, 2 * X)
    assert n == 3


def test_containers_named_tuples_and_none():
    class Pair(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor | None

    got = shard_map(lambda p: Pair(p.left + 1, p.right), MESH, Pair(P("dp"), P()), P("dp"))
    with pytest.raises(ValueError, match="one entry per argument"):
        got(Pair(X, None), X, X)
    out = shard_map(lambda p: Pair(p.left + 1, p.right), MESH, (P("dp"),), P("dp"))(Pair(X, None))
    assert isinstance(out, Pair)
    assert out.right is None
    torch.testing.assert_close(out.left, X + 1)


@pytest.mark.parametrize("spec", [P("dp", "tp"), P(None, ("dp", "tp")), P("tp"), P()], ids=repr)
def test_updates_in_place_reach_the_callers_tensor(spec):
    x = X.clone()

    def program(x):
        x.add_(1.0)
        return x

    memory = x.data_ptr()
    out = shard_map(program, MESH, spec, spec, donate=0)(x)
    torch.testing.assert_close(out, X + 1)
    assert out.data_ptr() == memory
    with pytest.raises(ValueError, match="was donated to program as argument 0"):
        x.sum()


def writes(x):
    x[:1] = 0.0


def updates_as_optimizers_do(x):
    foreach_(lambda column: torch._foreach_add_(column, 1.0), {"x": [x]})


def fused(x):
    state = [torch.zeros_like(x) for _ in range(2)]
    foreach_(
        lambda x, g, m, v: torch._fused_adamw_(
            x, g, m, v, [], [torch.tensor(1.0) for _ in x], lr=0.1, beta1=0.9, beta2=0.9,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        ),
        {"x": [x]},
        {"g": [x.clone()], "m": state[:1], "v": state[1:]},
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(), MESH], ids=str)
@pytest.mark.parametrize("edit", [torch.relu_, writes, updates_as_optimizers_do, fused])
def test_edits_of_what_is_not_donated_are_refused(edit, mesh):
    def program(scale, tensors):
        edit(tensors["x"])
        return tensors["x"] * scale

    mapped = lambda **how: shard_map(program, mesh, (P(), P("dp")), P("dp"), **how)
    with pytest.raises(
        ValueError, match=r"(?s)program \(.*modified .*argument 1/x.*clone.*donate=1"
    ):
        mapped()(2.0, {"x": X.clone()})
    with pytest.raises(ValueError, match=r"(?s)argument 1/x.*donate=1"):
        mapped(donate=0)(2.0, {"x": X.clone()})
    mapped(donate=(0, 1))(2.0, {"x": X.clone()})
    x = X.clone()
    edit = lambda x: writes(x.clone())
    mapped()(2.0, {"x": x})
    assert torch.equal(x, X)


def test_donated_arguments_that_share_memory_are_refused_before_the_program_runs():
    """As `functron.jit` refuses them: the first update would change the other."""

    def program(x, y):
        return x.add_(1.0), y

    mapped = shard_map(program, MESH, P(("dp", "tp")), P(("dp", "tp")), donate=0)
    x = X.clone()
    for other in (x, x.view(4, 8)):
        with pytest.raises(
            ValueError, match=r"(?s)donated arguments share memory.*memory of its own"
        ):
            mapped(x, other)
    assert torch.equal(x, X)
    assert torch.equal(mapped(x, X)[0], X + 1)


def test_edits_are_refused_in_traces_too():
    program = shard_map(lambda x: (writes(x), x)[1], MESH, P("dp"), P("dp"))
    with pytest.raises(ValueError, match=r"modifies argument 0 in place.*donate"):
        ft.trace(program)(X.clone())


def test_a_replicated_value_is_held_and_computed_once():
    """That is what makes simulating dp cheap: nothing that is equal on all ranks is repeated."""
    shapes = []

    def program(w):
        inner = w
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        shapes.append(tuple(inner.shape))
        return w * 2

    shard_map(program, MESH, P(), P())(X)
    assert shapes == [tuple(X.shape)]


def test_keyword_arguments_are_refused():
    with pytest.raises(TypeError, match=r"\['x'\].*functools.partial"):
        shard_map(lambda x: x, MESH, P("dp"), P("dp"))(x=X)
    bound = functools.partial(lambda x, n: x * n, n=2)
    torch.testing.assert_close(shard_map(bound, MESH, P("dp"), P("dp"))(X), 2 * X)


def test_all_bad_arguments_are_listed():
    def program(a, b):
        return a

    with pytest.raises(ValueError, match="arguments of program") as error:
        shard_map(program, MESH, (P("dp"), P("tp")), P("dp"))(
            {"x": torch.zeros(3), "y": torch.zeros(4)}, [torch.zeros(5)]
        )
    text = str(error.value)
    assert "argument 0/x" in text
    assert "argument 1/0" in text
    assert "0/y" not in text


def test_leaves_of_other_types_say_what_to_do():
    with pytest.raises(TypeError, match=r"str with P\('dp'\); wanted a tensor; fix: spec None"):
        shard_map(lambda x: x, MESH, P("dp"), P("dp"))("text")
    with pytest.raises(TypeError, match=r"a tensor with the static spec None; wanted P\(\)"):
        shard_map(lambda x, o: x, MESH, (P("dp"), None), P("dp"))(X, {"t": X})


def test_specs_that_are_no_specs():
    with pytest.raises(ValueError, match=r"in_specs: got 'dp'; wanted a P or None; fix: write P"):
        shard_map(lambda x: x, MESH, "dp", P())
    with pytest.raises(TypeError, match=r"wanted a functron\.Mesh"):
        shard_map(lambda x: x, {"dp": 2}, P(), P())


def test_nested_maps_over_the_same_axis_are_refused():
    def outer(x):
        return shard_map(lambda y: y, MESH, P("dp"), P("dp"))(x)

    with pytest.raises(ValueError, match=r"\['dp', 'tp'\] are already bound"):
        shard_map(outer, MESH, P("dp"), P("dp"))(X)


def test_nested_maps_over_other_axes_compose():
    def outer(x):
        inner = shard_map(lambda y: lax.psum(y.sum(0), "tp"), Mesh(tp=2), P("tp"), P())
        return lax.psum(inner(x), "dp")

    got = shard_map(outer, Mesh(dp=2), P("dp"), P())(X)
    torch.testing.assert_close(got, X.sum(0))


def test_standard_axes_are_absent_outside_any_mesh():
    assert lax.psum(X, "tp") is X
    assert lax.axis_size(("dp", "tp")) == 1
    assert lax.axis_index("tp") == 0
    torch.testing.assert_close(lax.all_gather(X, "tp", axis=1, tiled=True), X)


def test_groups_are_refused_with_the_alternative():
    with pytest.raises(ValueError, match=r"axis_index_groups.*Mesh\(node=2, local=4\)"):
        lax.psum(X, "tp", axis_index_groups=[[0, 1]])


def test_axes_may_have_any_name():
    mesh = Mesh(node=2, local=2)
    got = shard_map(lambda x: lax.psum(x, ("node", "local")), mesh, P(("node", "local")), P())(X)
    torch.testing.assert_close(got, X.sum(0, keepdim=True))


def test_check_works_on_fake_tensors_for_meshes_of_any_size():
    mesh = Mesh(dp=512, tp=8)
    with FakeTensorMode():
        w, x = torch.empty(4096, 8192), torch.empty(1024, 4096)
        specs = (P(None, "tp"), P("dp"))
        good = shard_map(lambda w, x: lax.psum((x @ w).sum(), ("dp", "tp")), mesh, specs, P())
        assert good(w, x).shape == ()
        with pytest.raises(ValueError, match="varies over 'tp'"):
            shard_map(lambda w, x: lax.psum((x @ w).sum(), "dp"), mesh, specs, P())(w, x)


def test_the_programs_name_survives():
    def program(x):
        """Doc."""
        return x

    mapped = shard_map(program, MESH, P(), P())
    assert mapped.__name__ == "program"
    assert mapped.__doc__ == "Doc."


OWN = Mesh(dp=2, dpp=2)
ON_DP = lambda x: lax.psum(x, "dp")


@pytest.mark.parametrize(
    ("program", "spec", "out"),
    [
        (ON_DP, P(("dp", "dpp")), P("dpp")),
        (lambda x: ON_DP(x) + lax.axis_index("dpp"), P("dp"), P("dpp")),
        (lambda x: lax.pmean(ON_DP(x), "dpp"), P("dp"), P()),
        (lambda x: lax.pmean(ft.remat(lambda x: lax.pmean(x, "dpp"))(x), "dp"), P("dp"), P()),
    ],
)
def test_axes_of_ones_own_that_are_named_pass(program, spec, out):
    shard_map(program, OWN, spec, out)(X)


def test_an_axis_that_nothing_names_is_refused():
    idle = shard_map(ON_DP, OWN, P("dp"), P())
    message = (
        r"(?s)leaves ranks without.*axis 'dpp'.*2 ranks do the same work.*did you mean '[dp]p'"
    )
    for call in (lambda: idle(X), lambda: ft.trace(idle)(X)):
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(shard_map(ON_DP, Mesh(dp=2), P("dp"), P())(X), X[:2] + X[2:])
    for how in ({"replicated_over": "dpp"}, {"replicated_over": ("dpp",)}, {"check": False}):
        assert torch.equal(shard_map(ON_DP, OWN, P("dp"), P(), **how)(X), X[:2] + X[2:])
    shard_map(ON_DP, Mesh(dp=2, tp=2, dpp=1), P("dp"), P())(X)  # tp may be for other programs


def test_cotangents_that_are_equal_are_not_summed():
    def step(x, w, second):
        def loss(w):
            y = lax.psum(x @ w, "tp", equal_cotangents=True)
            other = x[:, 0] if second else 1.0  # of each rank's own
            return lax.psum((y.square().sum(1) * other).sum() / 2, "tp" if second else ())

        return ft.grad(loss)(w)

    specs, w = (P(None, "tp"), P("tp"), None), torch.linspace(-1, 1, 24).view(8, 3)
    dense = torch.func.grad(lambda w: (X @ w).square().sum() / 2)(w)
    checked = shard_map(lambda *args: ft.sync_gradients(step(*args), P("tp")), MESH, specs, P("tp"))
    torch.testing.assert_close(checked(X, w, False), dense)
    program = ft.trace(checked)(X, w, False)
    program.check()
    assert {row.axis for row in program.cost().collectives if row.phase == "backward"} == {"dp"}
    with pytest.raises(
        ValueError, match=r"equal_cotangents=True: got a cotangent of shape \(4, 3\)"
    ):
        checked(X, w, True)
    with pytest.raises(ValueError, match=r"psum over 'tp' at .*: got a cotangent that varies"):
        ft.trace(checked)(X, w, True).check()


def test_products_of_ranks_are_those_of_whole_matrices():
    """Rows over one axis and columns over another, in both orders, to second derivatives."""
    generator = torch.Generator().manual_seed(0)
    x, w, v = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((4, 3, 6), (6, 8), (8, 6))
    )

    def ranks(x, w, v):
        hidden = torch.tanh(product(x, w))
        return lax.psum(product(hidden, v), "tp")

    def value(f):
        return lambda w: f(x, w, v).sin().sum()

    def derivatives(f):
        grad = torch.func.grad(value(f))
        twice = torch.func.grad(lambda w: grad(w).cos().sum())
        return f(x, w, v), grad(w), twice(w), torch.func.jvp(grad, (w,), (w.cos(),))[1]

    def own(x, w, v):
        total = ft.grad(lambda w: lax.psum(ranks(x, w, v).sin().sum(), ("dp", "cp")))(w)
        return ft.sync_gradients(total, P(None, "tp"))

    def dense(x, w, v):
        return torch.tanh(x @ w) @ v

    expected = derivatives(dense)
    for mesh in (Mesh(dp=2, cp=3, tp=2), Mesh(tp=2, dp=2, cp=3)):
        specs = (P("dp", "cp"), P(None, "tp"), P("tp"))
        mapped = shard_map(ranks, mesh, specs, P("dp", "cp"))
        for got, want in zip(derivatives(mapped), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        inside = shard_map(own, mesh, specs, P(None, "tp"))(x, w, v)
        torch.testing.assert_close(inside, expected[1], rtol=1e-12, atol=1e-12)
