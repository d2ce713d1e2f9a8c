"""`ft.jit`: what it computes, when it compiles, what donation does, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, lax, optim, random, tree
from functron.spmd.donation import Donated

X = torch.arange(6.0).reshape(2, 3)


def eager(fn=None, **options):
    return ft.jit(fn, backend="eager", **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "kernels"


# --- what it computes


def test_compiles_once_and_computes_what_the_function_does(cache):
    calls = []

    @ft.jit(cache=cache)
    def f(a, b):
        calls.append(1)
        return {"sum": a["x"] + b, "same": a["x"], "none": None, "number": 3}

    for i in range(3):
        x = X + i
        got = f({"x": x}, 2 * x)
        assert torch.equal(got["sum"], 3 * x)
        assert torch.equal(got["same"], x)
        assert (got["none"], got["number"]) == (None, 3)
    assert calls == [1]


def test_gradients_of_scans(cache):
    """With dropout, whose random bits are those of eager layers, in what is computed again."""
    w = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = X.double()

    @ft.remat
    def layer(x, row):
        w, key = row
        return torch.where(random.bernoulli(key, 0.7, x.shape), torch.tanh(x * w), 0.0), None

    def loss(w, keys):
        return ft.scan(layer, x, (w, keys))[0].sum()

    compiled = ft.jit(ft.grad(loss), cache=cache)
    for key in random.split(random.key(1), 2):
        keys = random.split(key, 2)
        torch.testing.assert_close(compiled(w, keys), torch.func.grad(loss)(w, keys))


def test_tangents_that_are_zero_are_written_into(cache):
    """torch's zero tensors have no memory: Inductor failed."""
    rows = torch.tensor([0, 1, 1])

    def f(x):
        return torch.ones_like(x).index_put((rows,), x[rows], accumulate=True)

    def push(x, v):
        return torch.func.jvp(f, (x,), (v,))

    torch.testing.assert_close(ft.jit(push, cache=cache)(X, X), push(X, X))


def test_inside_a_larger_program_it_is_the_function():
    inner = eager(lambda x: x + 1)
    program = ft.trace(lambda x: inner(x) * 2)(X)
    assert [equation.name for equation in program.block.equations] == ["add", "mul"]
    assert torch.equal(eager(lambda x: inner(x) * 2)(X), (X + 1) * 2)


def test_simulated_meshes_are_compiled_whole(cache):
    mesh = Mesh(dp=2, tp=3)
    f = ft.shard_map(
        lambda x: lax.psum(x * (1 + lax.axis_index("tp")), "dp"), mesh, P("dp", "tp"), P(None, "tp")
    )
    assert torch.equal(ft.jit(f, cache=cache)(X), f(X))


def test_the_program_and_the_executable_can_be_had(cache):
    f = ft.jit(lambda x, y: x @ y + 1, donate=0, cache=cache)
    x, y = torch.ones(3, 3), torch.ones(3, 3)
    assert [e.name for e in f.trace(x, y).block.equations] == ["mm", "add"]
    executable = f.compile(x, y)
    assert executable.updated == ("0",)
    assert "cpp_fused_add" in executable.code[0]
    assert f.compile(x, y) is executable
    assert torch.equal(x, torch.ones(3, 3))  # nothing ran


# --- signatures


def test_other_arguments_say_what_changed():
    f = eager(lambda batch, rate: batch["x"] * rate)
    f({"x": X}, 0.5)
    message = r"argument 0/x: got float32\[3, 2\] on cpu; wanted float32\[2, 3\] on cpu"
    with pytest.raises(ValueError, match=message):
        f({"x": X.reshape(3, 2)}, 0.5)
    with pytest.raises(ValueError, match=r"float64\[2, 3\] on cpu; .*num_signatures"):
        f({"x": X.double()}, 0.5)
    with pytest.raises(ValueError, match=r"float32\[2, 3\] with strides \(1, 2\)"):
        f({"x": X.T.contiguous().T}, 0.5)
    with pytest.raises(ValueError, match=r"argument 1: got 0.25; wanted 0.5; fix: .*static="):
        f({"x": X}, 0.25)
    with pytest.raises(ValueError, match=r"argument 0/y: got .*; wanted nothing"):
        f({"x": X, "y": X}, 0.5)
    assert torch.equal(f({"x": X}, 0.5), X / 2)


def test_as_many_signatures_as_allowed():
    f = eager(lambda x: x + 1, num_signatures=2)
    for size in (2, 3, 2, 3):
        assert torch.equal(f(torch.zeros(size)), torch.ones(size))
    with pytest.raises(ValueError, match="compiled for 2 signatures"):
        f(torch.zeros(4))


def test_strides_of_dims_of_one_element_are_no_other_layout():
    f = eager(lambda x, y: x * 2 + y)
    wide = torch.arange(12.0).view(2, 3, 2)
    same = wide[:1]  # its first stride is 6, as of a new tensor, or what was cut away
    other = torch.as_strided(wide, (1, 3, 2), (17, 2, 1))
    assert torch.equal(f(same, other), same * 2 + other)
    assert torch.equal(f(other, same), other * 2 + same)
    with pytest.raises(
        ValueError, match=r"got float32\[1, 3, 2\] with strides .*; wanted float32\[1, 3, 2\] on"
    ):
        f(torch.arange(6.0).view(1, 2, 3).mT, same)


def test_static_arguments_compile_anew():
    seen = []

    @eager(static=(1, 2))
    def f(x, power, flags):
        seen.append((power, flags))
        return x**power if flags["on"] else x

    for power, flag in ((2, True), (2, 1), (3, True), (2, True)):
        assert torch.equal(f(X, power, {"on": flag}), X**power)
    assert seen == [(2, {"on": True}), (2, {"on": 1}), (3, {"on": True})]
    with pytest.raises(TypeError, match="argument 1: got a tensor; wanted other values"):
        f(X, torch.ones(()), {"on": True})
    with pytest.raises(TypeError, match=r"got a set as argument 1; wanted a tensor, or what can"):
        f(X, set(), {"on": True})
    with pytest.raises(ValueError, match=r"static=\[3\]"):
        eager(lambda x: x, static=3)(X)


# --- donation


def test_donated_memory_becomes_the_results_and_cannot_be_used():
    f = eager(lambda state, x: ({"a": state["a"] + x, "b": state["b"]}, x.sum()), donate=0)
    state = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    pointers = {name: value.data_ptr() for name, value in state.items()}
    result, _ = f(state, X)
    assert {name: value.data_ptr() for name, value in result.items()} == pointers
    assert torch.equal(result["a"], X)
    assert isinstance(state["a"], Donated)
    with pytest.raises(ValueError, match=r"donated to <lambda> as argument 0/a.*use the result"):
        state["a"] + 1
    with pytest.raises(ValueError, match="donated to <lambda>"):
        torch.stack([X[0], state["a"]])
    with pytest.raises(ValueError, match="donated to <lambda>"):
        print(state["a"].shape)
    assert "0/a" in repr(state["a"])
    with pytest.raises(ValueError, match=r"argument 0/a: got a tensor that was donated.*1 more"):
        f(state, X)


def test_donating_memory_that_another_argument_shows():
    f = eager(lambda a, b: a + b, donate=0)
    with pytest.raises(ValueError, match=r"argument 1: got the memory of 0; wanted memory of its"):
        f(X, X)
    same = torch.zeros(3)
    g = eager(lambda state: {k: v + 1 for k, v in state.items()}, donate=0)
    with pytest.raises(ValueError, match="argument 0/b: got the memory of 0/a"):
        g({"a": same, "b": same})
    assert torch.equal(same, torch.zeros(3))


# --- what is refused


def test_where_compiled_code_cannot_be():
    f = eager(lambda x: (x * x).sum())
    with pytest.raises(ValueError, match=r"jit\(grad\(f\)\) instead of grad\(jit\(f\)\)"):
        torch.func.grad(f)(X)
    with pytest.raises(ValueError, match=r"torch.func transform"):
        torch.func.vmap(f)(X)
    with pytest.raises(ValueError, match="require gradients"):
        f(X.clone().requires_grad_())
    with torch.no_grad():
        assert f(X.clone().requires_grad_()) == 55
    with pytest.raises(TypeError, match=r"keyword arguments \['x'\]"):
        f(x=X)


def test_options_that_contradict():
    with pytest.raises(ValueError, match=r"arguments \[1\] both as donate and as static"):
        ft.jit(lambda x: x, donate=(0, 1), static=1)
    with pytest.raises(ValueError, match="num_signatures=0"):
        ft.jit(lambda x: x, num_signatures=0)
    with pytest.raises(ValueError, match="options: got 'cudagraphs'"):
        ft.jit(lambda x: x, options={"cudagraphs": True})(X)
    with pytest.raises(ValueError, match=r"donate=\[2\]"):
        ft.jit(lambda x: x, donate=2)(X)


def test_what_tracing_refuses_names_the_line():
    def branches(x):
        return x if x.sum() > 0 else -x  # on a number

    def writes(x):
        x.add_(1)  # to an argument
        return x * 2

    with pytest.raises(ValueError, match="# on a number"):
        eager(branches)(X)
    with pytest.raises(ValueError, match="# to an argument"):
        eager(writes)(X)
    assert torch.equal(eager(writes, donate=0)(X.clone()), (X + 1) * 2)


@pytest.mark.full
def test_torch_compile_names_jit_where_it_stops_and_is_right_where_it_may_stop():
    mapped = ft.shard_map(lambda x: lax.psum(x, "dp"), Mesh(dp=2), P("dp"), P())

    def f(x):
        return optim.global_norm({"a": x}) * mapped(x * 2)

    x = torch.arange(4.0)
    whole = torch.compile(f, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"fix: functron\.jit\(f\) in place of torch\.compile"):
        whole(x)
    assert torch.equal(torch.compile(f, backend="eager")(x), f(x))


def test_a_bound_mesh_inside_is_refused():
    two = BoundMesh(Mesh(dp=2), 0, {"dp": 0}, {"dp": "none"}, "cpu")
    inner = ft.shard_map(lambda x: lax.psum(x, "dp"), two, P("dp"), P())
    with pytest.raises(ValueError, match="jit what shard_map returned over a bound mesh"):
        eager(lambda x: inner(x) * 2)(X)


# --- training steps

CONFIG = gpt.GPTConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, max_seq=16
)
STEPS = 4


def training(mesh, stream=gpt.STREAM, dropout=0.1, remat="none"):
    config = dataclasses.replace(CONFIG, dropout=dropout)
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    adamw = optim.adamw(3e-3, weight_decay=0.1)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), adamw)

    def loss(params, batch, key):
        return gpt.loss(config, params, batch, ft.ModelOptions(stream=stream, remat=remat), key=key)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    return step, state


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (4, 17), generator=generator)
        rows = torch.arange(4)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous(), "rows": rows}


def losses(step, state, part=lambda batch: batch):
    found = []
    for batch in batches():
        state, metrics = step(state, part(batch))
        found.append(float(metrics["loss"]))
    return found, state


@functools.cache
def dense(dropout):
    return losses(*training(Mesh(), dropout=dropout))


# in default runs the compiled step of a model is that of processes, below, and those of scans with
# remat and dropout and of a simulated mesh are small
@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "dropout", "remat"),
    [
        (Mesh(), 0.1, "full"),
        (Mesh(), 0.1, "none"),
        (Mesh(dp=2, tp=2), 0.0, "none"),
        (Mesh(dp=2, tp=2), 0.1, "none"),
    ],
    ids=str,
)
def test_compiled_steps(mesh, dropout, remat, cache):
    step, state = training(mesh, dropout=dropout, remat=remat)
    compiled = ft.jit(step, donate=0, cache=cache)
    updated = set(compiled.compile(state, next(batches())).updated)
    assert {f"0/{path}" for path in tree.paths(state)} - updated <= {"0/key"}
    found, state = losses(compiled, state)
    want, want_state = dense(dropout)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    for name, got, wanted in zip(
        tree.paths(state.params),
        tree.leaves(state.params),
        tree.leaves(want_state.params),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5, msg=name)


def test_a_step_of_a_simulated_mesh(cache):
    """A layer split over tp, batches over dp, in the manner of Megatron: clipped, AdamW."""
    mesh, specs = Mesh(dp=2, tp=2), {"up": P(None, "tp"), "down": P("tp")}
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.adamw(1e-2))
    data = torch.linspace(-1, 1, 24).view(4, 6)

    def loss(params, x, key):
        hidden = torch.tanh((x[:, :, None] * params["up"]).sum(1))  # sums, which Inductor fuses
        y = lax.psum((hidden[:, :, None] * params["down"]).sum(1), "tp")
        return lax.psum(y.square().sum(), ft.DATA_AXES)

    count = lambda x: lax.psum(x.isfinite().sum(), ft.DATA_AXES)
    found = []
    for on in (Mesh(), mesh):
        step = ft.make_step(ft.mean_gradients(loss, count), optimizer, on, specs)
        params = {"up": torch.full((6, 8), 0.3), "down": torch.full((8, 3), 0.2)}
        zero = torch.zeros((), dtype=torch.int64)
        state = ft.State(zero, params, optimizer.init(params), random.key(0))
        if on == mesh:
            step = ft.jit(step, donate=0, cache=cache)
            updated = set(step.compile(state, data).updated)
            assert {f"0/{path}" for path in tree.paths(state)} - updated <= {"0/key"}
        rows = []
        for _ in range(2):
            state, metrics = step(state, data)
            rows.append(tree.map(torch.clone, metrics))
        found.append((state.params, rows))
    for path, want, got in zip(tree.paths(found[0]), *map(tree.leaves, found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, at=path: at + m)


RANKS = """
import json, sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
import functron as ft
from functron import Mesh, P, gpt
from test_jit import losses, training
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = Mesh.parse(sys.argv[4]).bind()
stream = gpt.SEQUENCE_PARALLEL_STREAM if sys.argv[3] == "split" else gpt.STREAM
step, state = training(mesh, stream, float(sys.argv[2]))
step = ft.jit(step, donate=0, cache=sys.argv[1], backend=sys.argv[5])
found, _ = losses(step, state, lambda batch: ft.shard(batch, P(ft.DATA_AXES), mesh))
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


# bits of processes are evaluated in tests/pipeline and test_prefetch_ranks.py, eager steps of them in
# tests/models; Inductor's of a decoder are in test_prefetch_ranks.py, and those of collectives over two
# axes in test_compile_ranks.py
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dropout", "stream", "mesh", "backend"),
    [
        (0.0, "split", "tp=2", "eager"),
        pytest.param(0.0, "split", "dp=2,tp=2", "inductor", marks=pytest.mark.full),
        pytest.param(0.0, "whole", "dp=2,tp=2", "inductor", marks=pytest.mark.full),
        pytest.param(0.1, "split", "dp=2,tp=2", "inductor", marks=pytest.mark.full),
    ],
)
def test_steps_of_processes(torchrun, cache, dropout, stream, mesh, backend):
    program = RANKS.format(folder=str(Path(__file__).parent))
    arguments = cache, dropout, stream, mesh, backend
    done = torchrun(program, Mesh.parse(mesh).size, *arguments, timeout=400)
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    torch.testing.assert_close(found, dense(dropout)[0], rtol=1e-5, atol=1e-5)


DIFFERS = """
import torch, torch.distributed as dist, functron as ft
from functron import Mesh, P, lax
dist.init_process_group("gloo")
mesh = Mesh(tp=2).bind()

def differs(x):
    y = lax.psum(x, "tp")
    return y * 2 if mesh.rank == 0 else y + lax.psum(x * x, "tp")

try:
    ft.jit(ft.shard_map(differs, mesh, P("tp"), P()), backend="eager")(torch.ones(3))
except ValueError as error:
    print("refused" if "tp_index is" in str(error) and "psum" in str(error) else error)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_branch_that_differs_by_rank_is_refused_instead_of_hanging(torchrun):
    assert torchrun(DIFFERS, 2, timeout=60).stdout.count("refused") == 2
