"""Programs that would be silently wrong are refused, by message, before any number is used."""

import re
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, shard_map, tree

MESH = Mesh(dp=2, tp=2)
SPECS = {"up": P(None, "tp"), "down": P("tp", None), "scale": P()}


def weights():
    return {"up": torch.randn(8, 16), "down": torch.randn(16, 8), "scale": torch.randn(8)}


def mlp(w, x):
    return lax.psum(torch.relu((x * w["scale"]) @ w["up"]) @ w["down"], "tp")


def loss(w, x):
    return lax.pmean(mlp(w, x).square().mean(), "dp")


def run(program, in_specs, out_specs, *args):
    return shard_map(program, MESH, in_specs, out_specs)(*args)


X = torch.randn(4, 8)
IN = (SPECS, P("dp"))


def test_the_right_program_passes():
    def step(w, x):
        value, grads = ft.value_and_grad(loss)(w, x)
        return value, ft.sync_gradients(grads, SPECS)

    run(step, IN, (P(), SPECS), weights(), X)


def test_forgotten_psum():
    def forgets(w, x):
        hidden = torch.relu((x * w["scale"]) @ w["up"])
        return {"y": hidden @ w["down"]}

    with pytest.raises(ValueError, match="varies over 'tp'") as error:
        run(forgets, IN, P("dp"), weights(), X)
    text = str(error.value)
    assert "output y" in text
    assert 'return {"y": hidden @ w["down"]}' in text
    assert "test_broken_programs.py" in text
    assert "lax.psum(..., 'tp')" in text
    assert "'dp'" not in text.split("got a value")[1].split("wanted")[0]


def test_doubled_psum():
    def doubles(w, x):
        return lax.psum(mlp(w, x), "tp")

    with pytest.raises(ValueError, match="redundant reduction") as error:
        run(doubles, IN, P("dp"), weights(), X)
    text = str(error.value)
    assert 'return lax.psum(mlp(w, x), "tp")' in text
    assert "counted 2 times" in text


def test_psum_over_the_wrong_axis():
    def wrong(w, x):
        return lax.psum(torch.relu(x @ w["up"]) @ w["down"], "dp")

    with pytest.raises(ValueError, match="varies over 'tp'"):
        run(wrong, IN, P("dp"), weights(), X)


def test_psum_over_a_misspelt_axis():
    def misspelt(w, x):
        return lax.psum(x @ w["up"], "tpp")

    with pytest.raises(ValueError, match=r"unbound axis name 'tpp' at .*did you mean 'tp'"):
        run(misspelt, IN, P("dp"), weights(), X)


def test_spec_typo():
    with pytest.raises(ValueError, match=r"in_specs/0/up: got P\(None, 'tpp'\).*did you mean 'tp'"):
        shard_map(mlp, MESH, ({**SPECS, "up": P(None, "tpp")}, P("dp")), P("dp"))


def test_rank_dependent_value_declared_replicated():
    def depends(x):
        return x.sum() * 0 + lax.axis_index("tp")

    with pytest.raises(ValueError, match="varies over 'tp'"):
        run(depends, P(), P(), X)


def test_gradient_never_synchronised():
    def forgets(w, x):
        return ft.value_and_grad(loss)(w, x)

    with pytest.raises(ValueError, match="varies over") as error:
        run(forgets, IN, (P(), SPECS), weights(), X)
    text = str(error.value)
    assert all(path in text for path in ("1/up", "1/down", "1/scale"))
    assert "call sync_gradients" in text


def test_outputs_that_one_reduction_would_mend_are_one_problem():
    """Simulated and traced: the line since which they vary, and the first paths."""
    w = {f"w{i}": torch.ones(4) for i in range(9)}

    def step(w, x):
        grads = ft.grad(lambda w: lax.psum(sum((p * x).sum() for p in w.values()), "dp"))(w)
        return tree.map(lambda p, g: p - g, w, grads)

    f = ft.shard_map(step, Mesh(dp=2), (P(), P("dp", None)), P())
    program = ft.trace(f)(w, torch.ones(2, 4))
    for call in (lambda: f(w, torch.ones(2, 4)), program.check):
        with pytest.raises(ValueError, match="output w0, and 8 more") as error:
            call()
        _, *rows = str(error.value).split("\n")
        assert len(rows) == 1
        assert "(w1, w2, w3, ...)" in rows[0]
        assert re.search(r"it varies since .*`grads = ft\.grad", rows[0])


def test_the_axes_of_the_mesh_are_suggested_first():
    for call in (
        lambda: ft.shard_map(lambda x: x, Mesh(dp=2, tp=2), P("dpp"), P()),
        lambda: run(lambda w, x: lax.psum(x, "dpp"), IN, P(), weights(), X),
    ):
        with pytest.raises(ValueError, match="did you mean 'dp'"):
            call()


@pytest.mark.parametrize("name", ["cond", "while_loop", "scan"])
def test_operations_of_functions_are_refused_in_words(name):
    higher = torch._higher_order_ops

    def program(x):
        if name == "cond":
            return torch.cond(x.sum() > 0, lambda x: x * 1, lambda x: -x, (x,))
        if name == "while_loop":
            start = torch.zeros((), dtype=torch.int64)
            return higher.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (start, x))[1]
        return higher.scan(lambda c, x: (c + x, c * x), x[0], x)[0]

    words = r"takes functions.*fix: lax\.cond, lax\.while_loop or functron\.scan"
    mapped = ft.shard_map(program, Mesh(dp=2), P("dp"), P("dp"))
    unchecked = ft.shard_map(program, Mesh(dp=2, tp=2), P("dp"), P("dp"), check=False)
    for call in (ft.trace(mapped), ft.trace(program), mapped, unchecked):
        with pytest.raises(ValueError, match=words):
            call(torch.ones(4, 3))


def test_operations_of_functions_are_refused_in_a_simulation_alone():
    """torch's rule of cond under nested vmaps takes a branch and operands of other ranks."""

    def program(x, y):
        return torch.cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (y,))[0]

    x, y = torch.tensor([[1.0, 2.0], [-3.0, -4.0]]), torch.arange(4.0).reshape(2, 2)
    mapped = ft.shard_map(program, Mesh(dp=2), (P("dp"), P("dp")), P("dp"))
    for call in (
        lambda: mapped(x, y),
        lambda: torch.func.grad(lambda y: mapped(x, y).sum())(y),
        lambda: torch.func.vmap(mapped)(x.expand(3, 2, 2), y.expand(3, 2, 2)),
    ):
        with pytest.raises(ValueError, match=r"takes functions.*fix: lax\.cond"):
            call()
    one_level = torch.func.vmap(program)(x, y)  # which torch has right
    assert one_level.equal(torch.stack([y[0].sin(), y[1].cos()]))


def test_a_tensor_of_a_rank_that_was_kept_is_refused_as_an_argument():
    kept = []
    f = ft.shard_map(lambda x: (kept.append(x * 2), x)[1], Mesh(dp=2), P("dp"), P("dp"))
    f(torch.ones(4))
    with pytest.raises(ValueError, match=r"tensor of a simulated rank after .*fix: return it"):
        f(kept[0])


@pytest.mark.parametrize("way", ["list", "cell", "global", "default", "in vmap", "in grad"])
def test_a_tensor_of_a_rank_that_was_kept_is_refused_in_a_closure(way):
    """torch numbers levels anew for each call, so that a later one would take it for its own."""
    kept = []
    keep = ft.shard_map(lambda x: (kept.append(x * 2), x)[1], Mesh(dp=2), P("dp"), P("dp"))
    keep(torch.ones(4))
    tensor = kept[0]
    programs = {
        "list": lambda x: x + kept[0],
        "cell": lambda x: x + tensor,
        "global": eval("lambda x: x + TENSOR", {"TENSOR": tensor}),
        "default": lambda x, y=tensor: x + y,
    }
    mapped = ft.shard_map(programs.get(way, programs["cell"]), Mesh(tp=2), P("tp"), P("tp"))
    words = r"closes over, of shape \[2\].*tensor of a simulated rank after .*fix: return it"
    calls = {
        "in vmap": lambda: torch.func.vmap(lambda x: mapped(x))(torch.ones(3, 4)),
        "in grad": lambda: torch.func.grad(lambda x: mapped(x).sum())(torch.ones(4)),
    }
    with pytest.raises(ValueError, match=words):
        calls.get(way, lambda: mapped(torch.ones(4)))()


def test_a_tensor_of_a_rank_that_was_kept_by_an_earlier_call_of_the_same_function():
    kept = []

    def adds_the_first(x):
        kept.append(x * 2)
        return x + kept[0]

    f = ft.shard_map(adds_the_first, Mesh(dp=2), P("dp"), P("dp"))
    assert f(torch.ones(4)).tolist() == [3.0] * 4
    with pytest.raises(ValueError, match="tensor of a simulated rank after"):
        f(torch.ones(4))


def test_a_tensor_of_a_rank_that_was_kept_is_refused_by_functions_of_any_kind():
    kept = []
    ft.shard_map(lambda x: (kept.append(x * 2), x)[1], Mesh(dp=2), P("dp"), P("dp"))(torch.ones(4))
    calls = (
        lambda: ft.jit(lambda x: x + 1)(kept[0]),
        lambda: ft.trace(lambda x: x + kept[0])(torch.ones(2)),
        lambda: ft.value_and_grad(lambda w: (w * kept[0]).sum())(torch.ones(2)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="tensor of a simulated rank after"):
            call()


def test_tensors_of_enclosing_transforms_may_be_closed_over():
    """Of an outer shard_map, of vmap and of grad, which are running."""
    x = torch.arange(4.0, dtype=torch.float64)

    def outer(x):
        inner = ft.shard_map(lambda y: y * x.sum(), Mesh(tp=2), P("tp"), P("tp"))
        return inner(torch.ones(2, dtype=torch.float64))

    got = ft.shard_map(outer, Mesh(dp=2), P("dp"), P("dp"))(x)
    assert got.tolist() == [1.0, 1.0, 5.0, 5.0]

    def scaled(w):
        one = torch.ones(2, dtype=torch.float64)
        return ft.shard_map(lambda y: y * w, Mesh(tp=2), P("tp"), P("tp"))(one).sum()

    assert torch.func.vmap(torch.func.grad(scaled))(x).tolist() == [2.0] * 4


def test_gradient_never_synchronised_where_its_numbers_happen_to_agree():
    """Nothing splits the batch here, yet the shares must still be added up."""

    def forgets(w, x):
        return ft.grad(lambda w: (w["scale"] * x).square().sum())(w)

    with pytest.raises(ValueError, match="output scale"):
        run(forgets, (SPECS, P()), SPECS, weights(), X)


def test_gradient_synchronised_twice():
    def twice(w, x):
        grads = ft.grad(loss)(w, x)
        return ft.sync_gradients(ft.sync_gradients(grads, SPECS), SPECS)

    with pytest.raises(ValueError, match=r"(?s)already summed over 'dp'.*call sync_gradients once"):
        run(twice, IN, SPECS, weights(), X)


def test_unsynchronised_gradient_reaching_the_optimizer():
    optimizer = ft.optim.adamw(1e-3)

    def step(w, state, x):
        return optimizer.step_(ft.grad(loss)(w, x), state, w)

    w = weights()
    state_specs = optimizer.specs(SPECS)
    with pytest.raises(ValueError, match="sync_gradients"):
        run(step, (SPECS, state_specs, P("dp")), (SPECS, state_specs), w, optimizer.init(w), X)


def test_loss_not_reduced():
    def step(w, x):
        grads = ft.grad(lambda w: mlp(w, x).square().mean())(w)
        return ft.sync_gradients(grads, SPECS)

    with pytest.raises(ValueError, match=r"a loss that varies over 'dp'.*lax.psum"):
        run(step, IN, SPECS, weights(), X)


def test_redundant_psum_scatter():
    def doubles(w, x):
        return lax.psum_scatter(mlp(w, x), "tp", scatter_dimension=1, tiled=True)

    with pytest.raises(ValueError, match="psum_scatter over 'tp'"):
        run(doubles, IN, P("dp", "tp"), weights(), X)


def _written(x):
    y = torch.zeros(2, 8)
    y[0] = x[0]
    return y


def _added(x):
    y = torch.zeros(2, 8)
    y += x
    return y


_DRAWS, _READS = "draws torch's own random numbers", "asks for the number in a tensor"
_WRITES = "into a tensor that all ranks share"


@pytest.mark.parametrize(
    ("program", "means"),
    [
        pytest.param(program, means, id=f"{number}")
        for means, programs in {
            _DRAWS: [
                lambda x: torch.nn.functional.dropout(x),
                lambda x: x * torch.rand(8),
                lambda x: torch.nn.functional.rrelu(x, training=True),
            ],
            _READS: [
                lambda x: x * x.sum().item(),
                lambda x: x if x.sum() > 0 else -x,
                lambda x: x[: int(lax.axis_index("dp")) + 1],
                lambda x: x.nonzero(),
                lambda x: x[x > 0],
                lambda x: torch.masked_select(x, x > 0),
                lambda x: torch.where(x > 0)[0],
                lambda x: x * x.tolist()[0][0],
                lambda x: x if torch.allclose(x, x) else -x,
                lambda x: torch.unique(x),
            ],
            _WRITES: [_written, _added],
        }.items()
        for number, program in enumerate(programs)
    ],
)
def test_what_no_rank_may_do_is_taught_with_the_users_line(program, means):
    """In simulation as `functron.trace` teaches it, also where it is differentiated."""
    line = rf"{Path(__file__).name}:\d+: `.*the program .*{re.escape(means)}.*fix: "
    with pytest.raises(ValueError, match=line) as caught:
        run(program, P("dp"), P("dp"), X)
    with pytest.raises(ValueError, match=line):
        torch.func.grad(lambda x: run(program, P("dp"), P("dp"), x).sum())(X)
    assert "vmap" not in str(caught.value)


def test_simulation_and_trace_say_the_same():
    def program(x):
        return x if x.sum() > 0 else -x

    said = []
    for call in (shard_map, lambda *how: ft.trace(shard_map(*how))):
        with pytest.raises(ValueError, match="the program") as caught:
            call(program, MESH, P("dp"), P("dp"))(X)
        said.append(re.sub(r"^\w+: | \(aten\S+\)", "", str(caught.value)))
    assert said[0] == said[1]


def test_what_torch_says_well_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(lambda x: x @ torch.ones(3, 3), P("dp"), P("dp"), X)


def test_derivative_of_pmax():
    def wrong(x):
        return ft.grad(lambda x: lax.pmax(x, ("dp", "tp")).sum())(x)

    with pytest.raises(ValueError, match=r"pmax over .* has no derivative.*stop_gradient"):
        run(wrong, P("dp"), P("dp"), X)


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_derivative_of_an_extremum_from_outside(name):
    mapped = shard_map(
        lambda x: getattr(lax, name)(x.sum(), ("dp", "tp")), MESH, P("dp", "tp"), P()
    )
    with pytest.raises(ValueError, match=f"{name} over .* has no derivative"):
        torch.func.grad(mapped)(X)
    with pytest.raises(ValueError, match=f"{name} over .* has no derivative"):
        torch.func.jvp(mapped, (X,), (X,))
    taped = X.clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name} over .* has no derivative"):
        mapped(taped).backward()
    stopped = shard_map(
        lambda x: getattr(lax, name)(lax.stop_gradient(x).sum(), ("dp", "tp")) + 0 * lax.psum(x.sum(), ("dp", "tp")),
        MESH, P("dp", "tp"), P(),
    )  # fmt: skip
    torch.testing.assert_close(torch.func.grad(stopped)(X), torch.zeros_like(X))


def test_the_check_can_be_switched_off():
    def forgets(w, x):
        return x @ w["up"] @ w["down"]

    got = shard_map(forgets, MESH, IN, P("dp"), check=False)(w := weights(), X)
    # the first rank of tp stands for all: its half of the sum
    torch.testing.assert_close(got, X @ w["up"][:, :8] @ w["down"][:8])


def test_transposes_are_exempt_from_the_redundancy_check():
    """psum transposes to psum, of cotangents that may be replicated."""

    def program(x):
        return torch.func.grad(lambda x: lax.psum(x, "dp").sum())(x)

    got = run(program, P("dp"), P(("dp",)), X)
    torch.testing.assert_close(got, torch.full_like(X, 2.0))


def test_value_kept_past_the_end_of_its_program():
    kept = []

    def leaks(x):
        kept.append(x * lax.axis_index("dp"))
        return x

    run(leaks, P("dp"), P("dp"), X)
    with pytest.raises((ValueError, RuntimeError)):
        lax.psum(kept[0] + 1, "dp") if lax.axis_size("dp") > 1 else kept[0].sum().item()


def _kept(differentiated):
    """A tensor of a simulated rank, of shape [2] on two ranks, also from inside of `ft.grad`."""
    kept = []

    def loss(x):
        kept.append(x * 2)
        return lax.psum((x**2).sum(), "dp")

    f = ft.grad(loss) if differentiated else loss
    ft.shard_map(f, Mesh(dp=2), P("dp"), P("dp") if differentiated else P())(torch.arange(4.0))
    return kept[-1]


AROUND = {
    "torch.func.grad": torch.func.grad,
    "vmap": lambda f: lambda w: torch.func.vmap(f)(w[None]),
    "ft.grad": ft.grad,
}
INSIDE = {
    "remat": lambda k: ft.remat(lambda w: (w * k).sum()),
    "scan": lambda k: lambda w: ft.scan(lambda c, x: (c * k, None), w, None, 2)[0].sum(),
    "grad": lambda k: lambda w: ft.grad(lambda w: (w * k).sum())(w).sum(),
    "vjp": lambda k: lambda w: ft.vjp(lambda w: (w * k).sum(), w)[0],
    "partition": lambda k: ft.partition(lambda x: (x * k).sum(), Mesh(dp=2), (P("dp"),)),
    "trace": lambda k: lambda w: w.sum() * ft.trace(lambda x: (x * k).sum())(W)(W),
}
W = torch.ones(2)
ORPHANED = r"uses a tensor of a simulated rank after .*fix: return it"


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_tensors_kept_from_ranks_are_refused_in_closures_under_transforms(
    around, inside, differentiated
):
    """torch says that it has a bug, or takes them for tensors of another vmap."""
    with pytest.raises(ValueError, match=ORPHANED):
        AROUND[around](INSIDE[inside](_kept(differentiated)))(W)


@pytest.mark.parametrize("differentiated", [False, True])
def test_tensors_kept_from_ranks_are_refused_as_leaves(differentiated, tmp_path):
    kept = _kept(differentiated)
    uses = [
        lambda: ft.optim.adamw(0.1).init({"k": kept}),
        lambda: ft.checkpoint.save(tmp_path / "saved", {"k": kept}),
        lambda: ft.tree.map(lambda x: x * 2, {"k": kept}),
        lambda: ft.tree.map(lambda x: x * 2, kept),
        lambda: ft.trace(lambda x: x * 2)(kept),
        lambda: ft.trace(lambda x: x * 2)(W)(kept),
        lambda: ft.eval_shape(lambda x: x * 2)(kept),
        lambda: ft.grad(lambda x: (x * 2).sum())(kept),
        lambda: ft.grad(lambda w: (w * kept).sum())(W),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=ORPHANED):
            use()
