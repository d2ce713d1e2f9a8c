"""remat's policies: plain gradients, and only what is not kept is computed again."""

import gc
import itertools
import re
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functron as ft
from functron import Mesh, P, checkpoint_name, gpt, lax, policies, random, tree
from functron.core.compat import is_wrapped
from functron.program.interpreter import run_in_lockstep
from functron.program.trace import trace
from functron.spmd.donation import Donated
from functron.training.config import configure, with_precision
from functron.training.setup import make_setup
from functron.transforms.remat import Kept

torch.manual_seed(0)
W = torch.randn(6, 6, dtype=torch.float64)
X = torch.randn(4, 6, dtype=torch.float64)

POLICIES = {
    "everything": policies.everything,
    "nothing": policies.nothing,
    "dots": policies.dots,
    "hidden": policies.names("hidden"),
    "hidden and out": policies.names("hidden", "out"),
    "offload": policies.offload("hidden"),
    "all three": policies.dots | policies.names("out") | policies.offload("hidden"),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(autouse=True)
def _no_divergence():
    """Backward warns where it could not use what was kept: in none of these programs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="remat")
        yield


class Operations(TorchDispatchMode):
    """Counts operations by name, below every transform."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def count(fn, *names: str) -> tuple[int, ...]:
    with Operations() as operations:
        fn()
    return tuple(operations.counts[name] for name in names)


def same(got, want, tolerance=1e-12):
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def block(w, x):
    hidden = checkpoint_name(torch.tanh(x @ w), "hidden")
    return checkpoint_name(torch.einsum("ij,jk->ik", hidden, w), "out").sin()


def plain(w, x):
    return (torch.tanh(x @ w) @ w).sin()


@every_policy
def test_gradients_of_every_order_are_those_of_the_function(policy):
    r = lambda w, x: ft.remat(block, policy=policy)(w, x).square().sum()
    f = lambda w, x: plain(w, x).square().sum()
    same(r(W, X), f(W, X))
    want = torch.func.grad(f, (0, 1))(W, X)
    same(ft.grad(r, (0, 1))(W, X), want)
    same(torch.func.grad(r, (0, 1))(W, X), want)
    taped = W.clone().requires_grad_()
    r(taped, X).backward()
    same(taped.grad, want[0])
    same(torch.func.jacrev(torch.func.grad(r))(W, X), torch.func.hessian(f)(W, X))
    rows = lambda g: torch.func.vmap(torch.func.grad(g), (None, 0))(W, X[:, None])
    same(rows(r), rows(f))
    same(ft.grad(lambda w: torch.func.vmap(r, (None, 0))(w, X[:, None]).sum())(W), want[0])


# forward multiplies twice (mm and, from einsum, bmm), backward four times; tanh and sin run once
RUNS = {
    "everything": (1, 1, 1, 1),
    "nothing": (2, 2, 2, 2),
    "dots": (1, 1, 2, 2),
    "hidden": (2, 2, 1, 2),
    "hidden and out": (2, 1, 1, 2),
    "offload": (2, 2, 1, 2),
    "all three": (1, 1, 1, 2),
}


@pytest.mark.parametrize("differentiate", ["tape", "func", "simulated outside", "simulated inside"])
@pytest.mark.parametrize("name", POLICIES)
def test_only_what_is_not_kept_runs_again(name, differentiate):
    r = lambda w, x: ft.remat(block, policy=POLICIES[name])(w, x).square().sum()
    ranks = lambda g: ft.shard_map(g, Mesh(dp=2), (P(), P("dp")), P(), check=False)
    run = {
        "tape": lambda: ft.grad(r)(W, X),
        "func": lambda: torch.func.grad(r)(W, X),
        "simulated outside": lambda: ft.grad(ranks(lambda w, x: lax.psum(r(w, x), "dp")))(W, X),
        "simulated inside": lambda: ranks(ft.grad(lambda w, x: lax.psum(r(w, x), "dp")))(W, X),
    }[differentiate]
    unmapped = differentiate in ("tape", "func")
    # under vmap a product with unmapped weights may be mm or bmm
    mm, bmm, tanh, sin = count(run, "mm", "bmm", "tanh", "sin")
    want_mm, want_bmm, want_tanh, want_sin = RUNS[name]
    assert (tanh, sin) == (want_tanh, want_sin)
    assert mm + bmm == want_mm + want_bmm + 3
    if unmapped:
        assert (mm - want_mm, bmm - want_bmm) == (1, 2)


MESHES = [
    (Mesh(dp=2), False), (Mesh(tp=2), False), (Mesh(tp=2), True), (Mesh(dp=2, tp=2), True),
]  # fmt: skip


def layer(w, x, stream):
    x = checkpoint_name(ft.nn.gather_sequence(x, stream), "gathered")
    hidden = checkpoint_name(torch.tanh(x @ w["up"]), "hidden")
    return checkpoint_name(
        ft.nn.reduce_partial(hidden @ w["down"], stream), "out"
    ).sin()  # fmt: skip


SPECS = {"up": P(None, "tp"), "down": P("tp")}
WEIGHTS = {"up": W, "down": W.mT.contiguous()}
ACTIVATIONS = torch.randn(4, 6, 6, dtype=torch.float64)


def distributed(policy, mesh, sequence_parallel):
    stream = gpt.SEQUENCE_PARALLEL_STREAM if sequence_parallel else gpt.STREAM

    def program(w, x):
        def loss(w, x):
            rows = ft.remat(lambda w, x: layer(w, x, stream), policy=policy)(w, x).square()
            axes = (*ft.DATA_AXES, "tp") if sequence_parallel else ft.DATA_AXES
            return lax.psum(rows.sum(), axes)

        value, grads = ft.value_and_grad(loss)(w, x)
        return value, ft.sync_gradients(grads, SPECS)

    return ft.shard_map(program, mesh, (SPECS, stream), (P(), SPECS))


@pytest.mark.parametrize(("mesh", "sequence_parallel"), MESHES, ids=str)
@every_policy
def test_meshes_and_traced_programs(policy, mesh, sequence_parallel):
    dense = lambda w: (torch.tanh(ACTIVATIONS @ w["up"]) @ w["down"]).sin().square().sum()
    grads, value = torch.func.grad_and_value(dense)(WEIGHTS)
    step = distributed(policy, mesh, sequence_parallel)
    same(step(WEIGHTS, ACTIVATIONS), (value, grads))
    program = trace(step)(WEIGHTS, ACTIVATIONS)
    same(run_in_lockstep(program, WEIGHTS, ACTIVATIONS), (value, grads))


def recomputed(program) -> Counter[str]:
    return Counter(e.name for e, _ in program.block.walk() if e.where.phase == "recompute")


# a program holds nothing that no one needs: the function's result is never computed again
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (policies.nothing, {"all_gather": 1, "mm": 1, "tanh": 1, "psum_scatter": 1, "cos": 0}),
        (policies.names("gathered"), {"all_gather": 0, "mm": 2, "psum_scatter": 1}),
        (policies.names("out"), {"all_gather": 1, "mm": 1, "tanh": 1, "psum_scatter": 0}),
        (policies.names("gathered", "out"), {"all_gather": 0, "mm": 1, "psum_scatter": 0}),
        (policies.dots, {"all_gather": 1, "mm": 0, "tanh": 1, "psum_scatter": 1}),
        (policies.everything, {"all_gather": 0, "mm": 0, "tanh": 0, "psum_scatter": 0}),
    ],
    ids=["nothing", "gathered", "out", "both", "dots", "everything"],
)
def test_kept_results_of_collectives_do_not_communicate_again(policy, again):
    program = trace(distributed(policy, Mesh(tp=2), True))(WEIGHTS, ACTIVATIONS)
    found = recomputed(program)
    collectives = ("all_gather", "psum_scatter")
    assert {k: found[k] for k in collectives} == {k: again[k] for k in collectives}, found
    assert (found["mm"] == 0) == (again["mm"] == 0), found
    assert (found["barrier"] > 0) == (policy is not policies.everything)


CONFIG = gpt.GPTConfig(
    vocab_size=40, num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48, max_seq=16,
    init_stddev=0.2, dtype="float64", dropout=0.1,
)  # fmt: skip


def decoder_gradients(remat, mesh=None, stream=gpt.STREAM, config=CONFIG):
    mesh = mesh or Mesh()
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    weights = ft.init_params(random.key(0), gpt.defs(config))
    tokens = torch.randint(0, 40, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}

    def program(weights, batch, key):
        loss = lambda w: gpt.loss(
            config, w, batch, ft.ModelOptions(stream=stream, remat=remat), key=key
        )
        value, grads = ft.value_and_grad(loss)(weights)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs))
    return mapped, (weights, batch, random.key(1))


@pytest.mark.pairwise
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("stream", [gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM], ids=["", "sp"])
@pytest.mark.parametrize("remat", ["full", "selective", "dots"])
def test_the_decoder(remat, mesh, stream):
    step, args = decoder_gradients("none")
    want = step(*args)
    step, args = decoder_gradients(remat, mesh, stream)
    same(step(*args), want)


def test_the_decoder_recomputes_what_it_says():
    products = {}
    for remat in ("none", "full", "selective", "dots"):
        step, args = decoder_gradients(remat, config=CONFIG)
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        products[remat] = count(lambda: step(*args), "mm", flash, "sigmoid", "silu")  # noqa: B023
    layers, (mm, flash, *_) = CONFIG.num_layers, products["none"]
    assert flash == layers
    assert products["full"][:2] == (mm + 7 * layers, 2 * layers)
    assert products["selective"][:2] == (mm, 2 * layers)
    assert products["dots"][:2] == (mm, layers)


def products(program) -> dict[str, int]:
    """How often a traced program runs each product."""
    counted = Counter()
    for equation, times in program.block.walk():
        if "matmul" in equation.name or "grouped" in equation.name or equation.name == "mm":
            counted[equation.name] += times
    return counted


@pytest.mark.parametrize("model", ["llama3-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-row", "mxfp8"])
def test_products_are_not_computed_again_in_any_precision(model, precision):
    counted = {}
    for remat in ("none", "dots", "full"):
        config = with_precision(configure(model=model), precision)
        config = configure(config, gpt={"num_layers": 2}, remat=remat, seq=64, global_batch=2)
        counted[remat] = products(make_setup(config, Mesh()).program())
    assert counted["dots"] == counted["none"]
    assert sum(counted["full"].values()) > sum(counted["none"].values())


def stack(policy, layers=8):
    """A stack of transformer-like blocks with named values, in float32."""
    batch, size, width = 16, 64, 32
    w = {
        "qk": torch.randn(layers, width, 2 * width) / width,
        "up": torch.randn(layers, width, 4 * width) / width,
        "down": torch.randn(layers, 4 * width, width) / width,
    }
    x = torch.randn(batch, size, width)

    def one(x, w):
        q, k = (x @ w["qk"]).chunk(2, -1)
        x = x + checkpoint_name(torch.softmax(q @ k.mT, -1) @ x, "attention")
        return x + torch.nn.functional.gelu(x @ w["up"]).sin() @ w["down"], None

    f = lambda w: ft.scan(ft.remat(one, policy=policy), x, w)[0].square().sum()
    return f, w


ORDER = [
    policies.nothing, policies.names("attention"), policies.dots, policies.everything,
]  # fmt: skip


def test_peak_memory_grows_with_what_is_kept(peak_bytes):
    peaks, promised = [], []
    for policy in ORDER:
        f, w = stack(policy)
        peaks.append(peak_bytes(lambda: ft.grad(f)(w)))  # noqa: B023
        promised.append(trace(ft.grad(f))(w).memory().peak_bytes)
    # at least one value of the size of a block's input for most of the other seven blocks; each
    # peak comes at another moment
    kept = 4 * 16 * 64 * 32 * 4
    for figures in (peaks, promised):
        assert all(b - a >= kept for a, b in itertools.pairwise(figures)), figures


@pytest.fixture
def only_new():
    """Leaves what lives already out of what `gc` lists, so that `storages` is quick."""
    gc.freeze()


def storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that live and that `gc` lists, by address of its owner."""
    gc.collect()
    # by type: asking an object that stands for another for its class can make that other
    kinds = ((v, type(v)) for v in gc.get_objects())
    tensors = [v for v, t in kinds if issubclass(t, torch.Tensor) and t is not Donated]
    live = [v for v in tensors if not is_wrapped(v)]
    return {s._cdata: s for s in (value.untyped_storage() for value in live)}


def bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes that live now and did not when ``before``, which keeps its addresses taken, was listed."""
    return sum(s.nbytes() for address, s in storages().items() if address not in before)


@pytest.mark.usefixtures("only_new")
def test_between_forward_and_backward_only_operands_and_kept_values_live():
    x = torch.randn(128, 64, requires_grad=True)
    w = torch.randn(64, 64)

    def f(w, x):
        y = checkpoint_name((x @ w).sin(), "y").cos()
        return (y @ w).tanh().sum()

    size = 128 * 64 * 4
    for policy, kept in ((policies.nothing, 0), (policies.names("y"), size)):
        before = storages()
        out = ft.remat(f, policy=policy)(w, x)
        assert abs(bytes_since(before) - kept) < 100
        (grad,) = torch.autograd.grad(out, x)
        assert abs(bytes_since(before) - size) < 100  # the gradient itself
        del grad, out


def test_kept_values_are_freed_as_backward_uses_them():
    made: list[weakref.ref] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                made.append(weakref.ref(out.untyped_storage()))
            return out

    f = ft.remat(lambda x: checkpoint_name(x.exp(), "e").cos().sum(), policy=policies.names("e"))
    x = torch.randn(8, requires_grad=True)
    with Watch():
        out = f(x)
        assert len(made) == 1
        assert made[0]() is not None
        # the graph stays, what was kept does not; a second backward computes it again
        first = torch.autograd.grad(out, x, retain_graph=True)
        assert made[0]() is None
        assert len(made) == 1
        second = torch.autograd.grad(out, x)
        assert len(made) == 2
    same(first, second)
    same(first[0], -x.exp().sin() * x.exp(), 1e-6)


def test_values_modified_in_place_are_not_trusted():
    def inside(w, x):
        hidden = checkpoint_name(x @ w, "a")
        hidden.mul_(2)
        out = checkpoint_name(hidden.sin(), "b")
        return out.add_(1)

    pure = lambda w, x: (2 * (x @ w)).sin() + 1
    want = torch.func.grad(lambda w: pure(w, X).square().sum())(W)
    for policy in (policies.dots, policies.names("a", "b"), policies.offload("a", "b")):
        same(ft.grad(lambda w: ft.remat(inside, policy=policy)(w, X).square().sum())(W), want)  # noqa: B023

    def outside(w):
        f = lambda w: checkpoint_name((X @ w).exp(), "y")
        return ft.remat(f, policy=policies.names("y"))(w).mul_(3).sum()

    same(ft.grad(outside)(W), 3 * X.mT @ (X @ W).exp())


def test_names_reach_through_views_copies_and_casts():
    def f(w, x):
        y = (x @ w).reshape(2, 2, 6).transpose(0, 2).contiguous().double()
        return checkpoint_name(y[1:], "y").sin().sum()

    x = X.float().requires_grad_()
    out = ft.remat(f, policy=policies.names("y"))(W.float(), x)
    assert count(lambda: out.backward(), "mm") == (1,)  # backward's own


def test_operations_with_several_results():
    def f(x):
        y = torch.nn.functional.layer_norm(x, (6,))
        return checkpoint_name(y, "y").sin().sum()

    r = ft.remat(f, policy=policies.names("y"))
    x = X.clone().requires_grad_()
    out = r(x)
    assert count(lambda: out.backward(), "native_layer_norm") == (0,)
    same(x.grad, torch.func.grad(f)(X))


def test_nested_remat_and_scans():
    def inner(c, w):
        return checkpoint_name(torch.tanh(c @ w), "inner"), None

    def outer(w, x):
        c, _ = ft.scan(ft.remat(inner, policy=policies.names("inner")), x, w)
        return checkpoint_name(c.sin() @ w[0], "outer").cos()

    ws = torch.stack([W, W.mT, W + 1])
    f = lambda w: outer(w, X).square().sum()
    want = torch.func.grad(f)(ws)
    for policy in (policies.nothing, policies.dots, policies.names("inner", "outer")):
        r = lambda w: ft.remat(outer, policy=policy)(w, X).square().sum()  # noqa: B023
        same(ft.grad(r)(ws), want)
        same(torch.func.grad(r)(ws), want)
        program = trace(ft.grad(r))(ws)
        same(run_in_lockstep(program, ws), want)
        # in a program, what the scan computes is computed again, what lies outside is kept
        assert recomputed(program)["sin"] == 1


def test_named_scopes_and_phases_of_what_runs_again():
    @ft.named_scope("inside")
    def f(w, x):
        return (x @ w).sin()

    def loss(w, x):
        with ft.named_scope("outside"):
            y = ft.remat(f)(w, x)
        return y.square().sum()

    program = trace(ft.grad(loss))(W, X)
    where = {(e.name, e.where.phase): e.where for e, _ in program.block.walk()}
    assert where["mm", "recompute"].scopes == ("outside", "inside")
    assert where["mm", "forward"].scopes == ("outside", "inside")
    assert where["cos", "backward"].scopes == ("outside", "inside")
    assert "x @ w" in where["mm", "recompute"].line


def test_recomputation_depends_on_the_cotangent():
    """So that no compiler can merge it with forward, at the cost of one copy of the smallest."""

    def f(w, scale, x):
        return torch.tanh((x @ w) * scale).sin() @ w.mT

    w, scale, x = torch.randn(8, 512), torch.randn(512), torch.randn(64, 8)
    loss = lambda w: ft.remat(f)(w, scale, x).square().sum()
    program = trace(ft.grad(loss))(w)
    equations = [e for e, _ in program.block.walk()]
    barriers = [e for e in equations if e.name == "barrier"]
    assert [e.results[0].shape for e in barriers] == [(64, 8)]
    after = set(barriers[0].results)
    for equation in equations[equations.index(barriers[0]) + 1 :]:
        if equation.where.phase == "recompute" and not equation.aliases:
            assert after & set(equation.operands), equation.name
        if after & set(equation.operands):
            after |= set(equation.results)
    cotangent = barriers[0].args[1]
    made_in = {value: e.where.phase for e in equations for value in e.results}
    assert made_in[cotangent] == "backward"


def test_offloaded_values_wait_in_host_memory():
    """On make-believe CUDA tensors, where autograd does not run: tests/test_gpu.py has the rest."""
    with FakeTensorMode():
        made = torch.empty(16, 4, device="cuda").mT
        away = Kept.of((made, None)).to_host()
        assert away.leaves[0].device.type == "cpu"
        back, nothing = away.results(made)
    assert (back.device, back.shape, back.stride()) == (made.device, made.shape, made.stride())
    assert nothing is None


def test_offload_on_the_cpu_copies_nothing():
    f = ft.remat(block, policy=policies.offload("hidden"))
    w = W.clone().requires_grad_()
    assert count(lambda: f(w, X).sum().backward(), "_to_copy") == (0,)


def test_a_function_that_runs_differently_is_computed_again_with_a_warning():
    runs = []

    def fickle(w, x):
        runs.append(1)
        x = x + 1 if len(runs) > 1 else x.sin()
        return (x @ w).cos()

    w = W.clone().requires_grad_()
    out = ft.remat(fickle, policy=policies.dots)(w, X)
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="remat")
        with pytest.warns(UserWarning, match="1 kept results were computed again"):
            out.sum().backward()
    same(w.grad, (X + 1).mT @ -((X + 1) @ W).sin())


def test_checkpoint_name_is_the_identity():
    assert checkpoint_name(X, "x") is X
    f = lambda x: checkpoint_name(x.sin(), "s") * 2
    with Operations():  # a mode that looks at operations, as remat and tracing do
        same(f(X), 2 * X.sin())
        same(torch.func.vmap(f, 1, 1)(X), 2 * X.sin())
        same(torch.func.jvp(f, (X,), (X,))[1], 2 * X.cos() * X)
        same(torch.func.grad(lambda x: f(x).sum())(X), 2 * X.cos())
        same(
            torch.func.vmap(torch.func.jacrev(torch.func.grad(lambda x: f(x).sum())))(X),
            torch.diag_embed(-2 * X.sin()),
        )


def test_decorator():
    @ft.remat(policy=policies.names("hidden"))
    def f(w, x):
        return block(w, x)

    same(ft.grad(lambda w: f(w, X).sum())(W), torch.func.grad(lambda w: plain(w, X).sum())(W))
    assert f.__name__ == "f"
    assert ft.remat(block, policy=policies.everything) is block


def test_policies_are_values():
    assert policies.names("a", "b") == policies.names("b", "a")
    assert policies.nothing | policies.dots == policies.dots
    both = policies.names("a") | policies.offload("a", "b")
    assert (both.on_device, both.on_host) == ({"a"}, {"b"})


def test_names_that_the_function_never_marks():
    f = ft.remat(block, policy=policies.names("hiden"))
    message = r"keeps 'hiden', which the function never marked.*did you mean 'hidden'\? .*out"
    for differentiate in (ft.grad, torch.func.grad):
        with pytest.raises(ValueError, match=message):
            differentiate(lambda w: f(w, X).sum())(W)
    with pytest.raises(ValueError, match=message):
        trace(ft.grad(lambda w: f(w, X).sum()))(W)
    unmarked = ft.remat(plain, policy=policies.offload("a"))
    with pytest.raises(ValueError, match=r"keeps 'a'.*use one of: none"):
        ft.grad(lambda w: unmarked(w, X).sum())(W)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ft.remat(block, policy="dots"),
            TypeError,
            "policy: got 'dots' (str); wanted a RematPolicy; fix: one of functron.policies: nothing",
        ),
        (lambda: policies.names(), ValueError, "names: got no names"),
        (lambda: policies.offload("a", 3), ValueError, "argument 1: got 3; wanted the name"),
        (lambda: checkpoint_name(X, ""), ValueError, "got ''; wanted a name"),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_forward_mode():
    pushed = lambda f: torch.func.jvp(torch.func.grad(lambda w: f(w, X).sum()), (W,), (W,))
    torch.testing.assert_close(pushed(ft.remat(block, policy=policies.dots)), pushed(block))


@pytest.mark.usefixtures("only_new")
def test_without_derivatives_nothing_is_remembered():
    f = ft.remat(block, policy=policies.names("hidden"))
    calls = len(tree_leaves(f(W, X)))
    assert calls == 1
    before = storages()
    out = f(W, X)
    assert bytes_since(before) == out.nbytes


@every_policy
def test_integers_among_the_results(policy):
    """Counts of a layer come out beside its results, also in simulation."""

    def layer(w, x):
        hidden = checkpoint_name(torch.sin(x @ w), "hidden")
        return checkpoint_name(hidden @ w, "out"), (hidden > 0).sum(), torch.arange(2)

    def gradient(w, x):
        def loss(w):
            out, count, _ = ft.remat(layer, policy=policy)(w, x)
            return lax.psum((out**2).sum(), "dp"), lax.psum(count, "dp")

        grads, counted = ft.grad(loss, has_aux=True)(w)
        return ft.sync_gradients(grads, P()), counted

    plain = torch.func.grad(lambda w: (layer(w, X)[0] ** 2).sum())(W)
    for mesh in (Mesh(), Mesh(dp=2)):
        grads, counted = ft.shard_map(gradient, mesh, (P(), P("dp")), P())(W, X)
        torch.testing.assert_close(grads, plain)
        assert counted == layer(W, X)[1]


def test_a_rule_with_a_derivative_of_its_own_runs_the_same_operations_twice():
    """Its tape asks for memory without numbers, in backward alone: what was kept was made again."""

    rule = ft.custom_vjp(torch.sin, lambda x: (x.sin(), x), lambda x, dy: (dy * x.cos(),))

    def f(w, x):
        return (rule(x @ w) @ w).square().sum()

    def products(f):
        program = trace(ft.grad(f))(W, X)
        torch.testing.assert_close(program(W, X), torch.func.grad(f)(W, X))
        return sum(equation.name == "mm" for equation in program.block.equations)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products(ft.remat(f, policy=policies.dots)) == products(f)


def test_a_norm_of_16_bits_needs_what_its_program_says(peak_bytes):
    """Its backward has rows in float32, each as long as the program needs it and no longer.

    Besides, torch's engine holds the cotangent, of 16 bits, until backward is done with it.
    """
    x = torch.randn(1024, 256).bfloat16()
    scale = torch.ones(256, dtype=torch.bfloat16)
    gradients = ft.grad(lambda x, w: (ft.nn.rms_norm(x, w, eps=1e-5) * x).square().sum(), (0, 1))
    measured = peak_bytes(lambda: gradients(x, scale)) + x.nbytes + scale.nbytes
    promised = trace(gradients)(x, scale).memory().peak_bytes
    assert promised + x.nbytes == pytest.approx(measured, rel=0.2)
