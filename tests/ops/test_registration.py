"""ops.register: what follows from a reference is what torch computes of it, under everything."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vmap

import functron as ft
from functron import Mesh, P, lax, ops, tree
from functron.ops import nvrtc
from functron.ops.launch import cuda
from functron.ops.operations import Gradient
from functron.partitioning import product
from tests.kernels.emulator import Emulator, missing

generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=generator, dtype=torch.float64)
S = torch.randn(6, generator=generator, dtype=torch.float64)
MESH = Mesh(dp=2, tp=3)


def reference(x, s, eps: float = 0.5):
    return torch.tanh(x * s) + eps * x.square()


def slope(args, results, cotangents):
    """Written down; `results` saves a tanh."""
    x, s, eps = args
    y = results[0] - eps * x.square()
    inner = (1 - y.square()) * cotangents[0]
    ds = inner * x
    return (
        inner * s + 2 * eps * x * cotangents[0],
        ds.flatten(0, -2).sum(0) if ds.dim() > 1 else ds,
        None,
    )


def as_gradient():
    def backward(saved, cotangents):
        *args, y = saved
        return slope(tuple(args), (y,), cotangents)

    return Gradient(backward, save=lambda args, outputs: (*args, *outputs))


KINDS = {
    "alone": {},
    "dims": {"dims": "...d,d->...d"},
    "kernel": {"kernel": reference, "devices": ("cpu",), "dims": "...d,d->...d"},
    "kernel without dims": {"kernel": reference, "devices": ("cpu",)},
    "backward": {"backward": slope},
    "backward and dims": {"backward": slope, "dims": "...d,d->...d"},
    "gradient": {"backward": as_gradient(), "kernel": reference, "devices": ("cpu", "cuda")},
}
OPS = {kind: ops.register("test_wave", reference, **given) for kind, given in KINDS.items()}


def total(f):
    return lambda x, s: f(x, s).square().sum()


def ranks(of):
    """`of` of a function of ranks, whose results are a rank's."""

    def run(f):
        local = ft.shard_map(lambda x, s: f(x, s), MESH, (P("dp", "tp"), P("tp")), P("dp", "tp"))
        return of(local)

    return run


def inside(f):
    def program(x, s):
        loss = lambda x, s: lax.psum(total(f)(x, s), ("dp", "tp"))
        grads = ft.grad(loss, (0, 1))(x, s)
        products = ft.jvp(ft.grad(loss, (0, 1)), (x, s), (x, s))[1]
        return ft.sync_gradients((grads, products), (specs, specs))

    specs = P("dp", "tp"), P("tp")
    return ft.shard_map(program, MESH, specs, (specs, specs))


USES = {
    "value": lambda f: f(X, S),
    "grad": lambda f: grad(total(f), (0, 1))(X, S),
    "hessian": lambda f: hessian(total(f), (0, 1))(X[:2], S),
    "jvp": lambda f: jvp(f, (X, S), (S * X, S)),
    "jacfwd twice": lambda f: jacfwd(jacfwd(total(f), 1), 1)(X, S),
    "vmap": lambda f: vmap(f, (0, None))(X, S),
    "vmap of both": lambda f: vmap(f, (1, 0))(X[:3].T.contiguous().T[:, None], S.outer(S)[:1]),
    "vmap of grad": lambda f: vmap(grad(total(f), (0, 1)), (0, None))(X, S),
    "grad of vmap": lambda f: grad(total(vmap(f, (0, None))), (0, 1))(X, S),
    "remat": lambda f: ft.grad(total(ft.remat(f)), (0, 1))(X, S),
    "scan": lambda f: ft.grad(
        lambda s: ft.scan(lambda c, x: (c + f(x, s).sum(), None), S.new_zeros(()), X)[0]
    )(S),
    "trace": lambda f: traced(lambda x, s: ft.grad(total(f), (0, 1))(x, s)),
    "trace of a scan": lambda f: traced(lambda x, s: ft.grad(
        lambda s: ft.scan(lambda c, x: (c + f(x, s).sum(), None), s.new_zeros(()), x)[0]
    )(s)),
    "jit": lambda f: ft.jit(ft.grad(total(f), (0, 1)), backend="eager")(X, S),
    "mapped": ranks(lambda f: f(X, S)),
    "grad of mapped": ranks(lambda f: grad(total(f), (0, 1))(X, S)),
    "product with the Hessian of mapped": ranks(
        lambda f: jvp(grad(total(f), (0, 1)), (X, S), (X, S))[1]
    ),
}  # fmt: skip


def traced(f):
    return ft.trace(f)(X, S)(X, S)


def same(got, want):
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.pairwise
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_is_its_reference(kind, use):
    same(USES[use](OPS[kind]), USES[use](reference))


@pytest.mark.parametrize("kind", ["dims", "backward", "kernel"])
@pytest.mark.parametrize("life", ["simulated", "traced", "jitted"])
def test_inside_a_mapped_program(kind, life):
    program = inside(OPS[kind])
    g = grad(total(reference), (0, 1))
    want = g(X, S), jvp(g, (X, S), (X, S))[1]
    if life == "traced":
        made = ft.trace(program)(X, S)
        made.check()
        assert "custom::test_wave" in str(made)
        same(made(X, S), want)
    else:
        run = ft.jit(program, backend="eager") if life == "jitted" else program
        same(run(X, S), want)


def test_tape_and_numbers_by_name():
    x, s = X.clone().requires_grad_(), S.clone().requires_grad_()
    for kind in KINDS:
        got = torch.autograd.grad(total(OPS[kind])(x, s), (x, s))
        same(got, grad(total(reference), (0, 1))(X, S))
    same(OPS["kernel"](X, S, eps=2.0), reference(X, S, 2.0))
    same(OPS["alone"](s=S, x=X), reference(X, S))


def test_several_results_integers_views_and_none():
    def parts(x, bias: torch.Tensor | None, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        moved = x if bias is None else x + bias
        return moved.T, moved.topk(k, -1).indices  # a view, and no floating point

    op = ops.register("test_parts", parts)
    for bias in (None, S):
        got, want = op(X, bias), parts(X, bias)
        same(got, want)
        assert got[0].is_contiguous()
        same(vmap(op, (0, None))(X[None], bias), [x[None] for x in want])
    assert torch.equal(op(X, S)[1], parts(X, S)[1])
    same(grad(lambda x: op(x, S)[0].square().sum())(X), 2 * (X + S))
    _, (moved, none) = ft.jvp(lambda x: op(x, S), (X,), (X,))
    assert none is None
    same(moved, X.T)
    out = op(X, None)[0]
    out.zero_()  # its own memory
    assert X.abs().min() > 0


def test_a_backward_of_its_own_counts():
    """As of a straight-through estimator: rounding has no other derivative."""
    through = ops.register(
        "test_round", lambda x: x.round(), backward=lambda args, results, cts: (3 * cts[0],)
    )
    three = torch.full_like(X, 3.0)
    same(grad(lambda x: through(x).sum())(X), three)
    same(vmap(grad(lambda x: through(x).sum()))(X), three)
    same(grad(lambda x: vmap(through)(x).sum())(X), three)


def test_registered_again():
    first = ops.register("test_again", lambda x: 2 * x)
    program = ft.trace(lambda x: first(x))(X)
    second = ops.register("test_again", lambda x, y: 3 * x * y)
    assert second.name == "test_again_2"
    same((first(X), program(X), second(X, X)), (2 * X, 2 * X, 3 * X * X))


def test_travels_to_other_processes(tmp_path):
    """By value, with what it was registered with; one that knows the name has it already."""
    cloudpickle = pytest.importorskip("cloudpickle")
    op = ops.register("test_travels", lambda x: 2 * x, kernel=lambda x: 2 * x, devices=("cpu",))
    (tmp_path / "op").write_bytes(cloudpickle.dumps(lambda x: op(x)))
    code = (
        "import pickle, sys, torch, functron as ft; f, g = (pickle.loads("
        "open(sys.argv[1], 'rb').read()) for _ in range(2)); x = torch.ones(2);"
        "assert f(x).tolist() == g(x).tolist() == [2, 2];"
        "assert ft.grad(lambda x: f(x).sum())(x).tolist() == [2, 2];"
        "assert not hasattr(torch.ops.custom, 'test_travels_2')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "op")], check=True)
    assert cloudpickle.loads(cloudpickle.dumps(op)) is op


def test_costs_and_memory():
    op = ops.register("test_product", lambda x, w: torch.tanh(x @ w))
    program = ft.trace(lambda x, w: op(x, w))(X, X.T.contiguous())
    assert program.cost().hardware_flops == 2 * 4 * 6 * 4
    assert program.cost().bytes_accessed == 8 * (24 + 24 + 16)
    assert program.memory().peak_bytes >= 8 * (24 + 24 + 16)
    told = ops.register("test_told", lambda x: x.sin(), flops=lambda x: 7 * x.shape[0])
    assert ft.trace(lambda x: told(x))(X).cost().hardware_flops == 28


def test_text_of_programs_is_read_again():
    from functron.program.parse import parse

    program = ft.trace(lambda x, s: OPS["dims"](x, s))(X, S)
    same(parse(str(program))(X, S), reference(X, S))


# --- how functron.partition may split it

ROW = ops.register("test_rows", lambda x, s: x.softmax(-1) * s, dims="...D,D->...D")
SUM = ops.register("test_sum", lambda x, y: (x * y).sum(0), dims="bd,bd->d")
RULE = ops.register("test_rule", lambda x, w: x @ w, partition=product("mk,kn->mn"))
PARTITIONED = {
    "elements": (OPS["dims"], (P("dp", "tp"), P("tp")), (X, S), set()),
    "leading dims": (OPS["dims"], (P("dp", None, "tp"), P("tp")), (X[:, None], S), set()),
    "whole rows": (ROW, (P("dp"), P()), (X, S), set()),
    "whole rows, split": (ROW, (P("dp", "tp"), P()), (X, S), {"all_gather"}),
    "sums": (SUM, (P("dp", "tp"), P("dp", "tp")), (X, X + 1), {"psum"}),
    "a rule": (RULE, (P("dp", "tp"), P("tp")), (X, X.T), {"psum"}),
}


@pytest.mark.parametrize("name", PARTITIONED)
def test_partitioned(name):
    op, specs, args, sent = PARTITIONED[name]
    plain = op.reference
    f = ft.partition(lambda *xs: op(*xs), MESH, specs, P())
    same(f(*args), plain(*args))
    g = ft.partition(ft.grad(lambda *xs: op(*xs).square().sum(), (0, 1)), MESH, specs, P())
    same(g(*args), grad(lambda *xs: plain(*xs).square().sum(), (0, 1))(*args))
    made = ft.partition(lambda *xs: op(*xs), MESH, specs)
    text = str(ft.trace(made)(*args))
    assert {word for word in ("psum(", "all_gather(") if f"= {word}" in text} == {
        f"{word}(" for word in sent
    }


# --- kernels

TEXT = """
// build: ELEMENT = float, __half
#include "numeric.cuh"
extern "C" __global__ void __launch_bounds__(64)
scaled_square(ELEMENT* out, const ELEMENT* x, const ELEMENT* s, long long dim, float eps, long long count) {
  for (long long i = blockIdx.x * 64ll + threadIdx.x; i < count; i += 64ll * gridDim.x)
    out[i] = x[i] * x[i] * s[i % dim] + eps;
}
"""


def scaled_square(x, s, dim: int, eps: float, count: int):
    return x.square() * s + eps


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_cuda_text_on_the_emulator(tmp_path):
    kernel = ops.CudaKernel(TEXT, "scaled_square", grid=lambda *args: 2, block=64)
    op = ops.register("test_cuda", scaled_square, kernel=kernel, dims="...d,d->...d")

    class Launch(Emulator):
        def __call__(self, source, *args, **settings):
            (tmp_path / f"{source.name}.cu").write_text(source.text)
            (tmp_path / "numeric.cuh").write_text((nvrtc.FOLDER / "numeric.cuh").read_text())
            super().__call__(source.name, *args, **settings)

    x = torch.randn(5, 33, generator=generator)
    s = torch.randn(33, generator=generator)
    got = op.kernel(Launch(seed=1, folder=tmp_path), x.T.contiguous().T, s, 33, 0.25, x.numel())
    torch.testing.assert_close(got, scaled_square(x, s, 33, 0.25, 0))
    assert op(x, s, 33, 0.25, x.numel()).shape == x.shape  # on CPUs the reference
    with pytest.raises(ValueError, match=r"got operands on cpu; wanted all of them on one GPU"):
        op.kernel(cuda, x, s, 33, 0.25, x.numel())


TRITON = """
import doctest, torch, functron as ft
example = doctest.DocTestParser().get_doctest({text!r}, dict(ft=ft, torch=torch), "register", "", 0)
results = doctest.DocTestRunner().run(example, clear_globs=False)
assert results.failed == 0 and results.attempted == 6, results
x, s = torch.randn(2, 3, 5), torch.randn(5)
ns = example.globs
op, plain = ns["exp_scale"], lambda x, s: x.exp() * s
close = torch.testing.assert_close
close(op(x, s), plain(x, s))
total = lambda f: lambda x, s: f(x, s).square().sum()
close(torch.func.vmap(op, (0, None))(x, s), plain(x, s))
close(ft.grad(total(op), (0, 1))(x, s), ft.grad(total(plain), (0, 1))(x, s))
close(ft.hessian(total(op))(x[0], s), ft.hessian(total(plain))(x[0], s))
mesh = ft.Mesh(dp=2, tp=5)
f = ft.shard_map(lambda x, s: op(x, s), mesh, (ft.P("dp", None, "tp"), ft.P("tp")), ft.P("dp", None, "tp"))
close(f(x, s), plain(x, s))
close(ft.trace(lambda x, s: op(x, s))(x, s)(x, s), plain(x, s))
close(ft.jit(total(op), backend="eager")(x, s), total(plain)(x, s))
print("triton: ok")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)
def test_the_example_of_a_triton_kernel_runs_in_its_interpreter():
    """In float32, where the interpreter is to be trusted."""
    text = TRITON.format(text=inspect.getdoc(ops.register))
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "triton: ok" in done.stdout


def test_the_example_is_one():
    example = doctest.DocTestParser().get_examples(inspect.getdoc(ops.register) or "")
    assert len(example) >= 6


# --- mistakes


def of_lists(xs: list[torch.Tensor]):
    return xs[0]


def pair(x):
    return x, x


def wrong_shape(x):
    return x[0]


def call(reference, *args, **given):
    return lambda: ops.register("test_wrong", reference, **given)(*args)


def wrong_backward(rule):
    return lambda: grad(lambda x: ops.register("w", reference, backward=rule)(x, S).sum())(X)


WRONG = {
    "a name": (lambda: ops.register("two words", reference), "wanted a word of letters, digits"),
    "a name that writes": (lambda: ops.register("add_", reference), "does not end in _"),
    "a name of torch's": (
        lambda: ops.register("aten::sin", reference), "an operation of torch or of a library"
    ),
    "lists of tensors": (
        lambda: ops.register("test_wrong", of_lists),
        "parameters of the reference\n  - xs: got list[torch.Tensor]; wanted no annotation or",
    ),
    "any number of operands": (
        lambda: ops.register("test_wrong", lambda *xs: xs[0]), "xs: got *xs; wanted a positional"
    ),
    "several results, unannotated": (
        call(pair, X), "fix: annotate the reference -> tuple[Tensor, Tensor]"
    ),
    "a number for a tensor": (call(reference, X, 3.0), "s: got 3.0; wanted a tensor; fix: make it"),
    "too many arguments": (call(lambda x: x, X, X), "too many positional"),
    "text alone": (call(reference, X, S, kernel=TEXT), "kernel: got a str; wanted a CudaKernel or a function"),
    "a device": (call(reference, X, S, devices=("tpu",)), 'wanted a tuple of "cuda" and "cpu"'),
    "CUDA text on CPUs": (
        call(reference, X, S, kernel=ops.CudaKernel(TEXT, "k", lambda *a: 1), devices=("cpu",)),
        "for CUDA text; wanted",
    ),
    "a kernel's shape": (
        call(lambda x: x, X, kernel=wrong_shape, devices=("cpu",)),
        "results are not those of the reference\n  - result 0: got (6,) torch.float64; wanted (4, 6)",
    ),
    "a kernel's count": (
        call(lambda x: x, X, kernel=pair, devices=("cpu",)), "kernel returned (Tensor, Tensor)"
    ),
    "dims of other tensors": (
        call(reference, X, S, dims="bd->bd"), "wanted letters for 2 tensors, ->, and those for 1"
    ),
    "dims of results alone": (call(reference, X, S, dims="bd,d->bk"), "none of results alone"),
    "a backward without a tuple": (
        lambda: grad(lambda x: ops.register("w", lambda x: x, backward=lambda a, r, c: c[0])(x).sum())(X),
        "backward returned Tensor; wanted a tuple with one cotangent for each argument",
    ),
    "a backward of another length": (
        lambda: grad(lambda x: ops.register("w", reference, backward=lambda a, r, c: c)(x, S).sum())(X),
        "backward returned 1 cotangents; wanted one for each of the 3 arguments (x, s, eps)",
    ),
    "a Python if under vmap": (
        lambda: vmap(ops.register("w", lambda x: x if x.sum() > 0 else -x))(X),
        "its reference asks for the number in a tensor, as a Python if",
        "fix: lax.cond or lax.while_loop, torch.where on both results",
    ),
    "a cotangent's shape": (
        wrong_backward(lambda a, r, c: (c[0], c[0], None)),
        "not like the operands\n  - s: got (4, 6) torch.float64; wanted (6,) torch.float64, as "
        "the operand; fix: sum it over",
    ),
    "a cotangent's dtype": (
        wrong_backward(lambda a, r, c: (c[0].float(), None, None)),
        "x: got (4, 6) torch.float32; wanted (4, 6) torch.float64, as the operand; fix: cast it",
    ),
    "a cotangent that is a number": (
        wrong_backward(lambda a, r, c: (1.0, None, None)),
        "x: got float; wanted a tensor, (4, 6) torch.float64",
    ),
    "a cotangent of a number": (
        wrong_backward(lambda a, r, c: (c[0], None, c[0])),
        "got (4, 6) torch.float64; wanted None, as it is no tensor",
    ),
    "dims of other ranks": (
        lambda: ft.partition(
            lambda x: SUM(x, x), MESH, (P(),), P()
        )(X[None]),
        "got a tensor of shape (1, 4, 6) for 'bd' of its dims; wanted 2 of them",
    ),
    "no dims in a partition": (
        lambda: ft.partition(lambda x, s: OPS["alone"](x, s), MESH, (P("dp"), P()), P())(X, S),
        "for which there is no rule",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    run, message, *others = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as caught:
        run()
    assert all(each in str(caught.value) for each in others)
