"""`compile` for real processes over gloo, against the simulation of all ranks in one process.

The tests start this file's `main` under torchrun; every rank compares its own shards.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, lax, optim, random, tree
from functron.compiler import compile as compile_program
from functron.compiler import inductor
from functron.program.equations import Scan
from functron.program.trace import trace
from functron.spmd.params import Normal
from tests.ranks import on_the_first
from tests.transforms.flow_programs import loop, switch

pytestmark = pytest.mark.distributed

ALL = ("dp", "tp")
S = P(ALL)
PROGRAM = "import sys; from tests.compiler.test_compile_ranks import main; main(*sys.argv[1:])"

# x is [8, 4] on each rank
VALUES = {
    "psum": lambda x: lax.psum(x, "tp"),
    "psum_int": lambda x: lax.psum((x * 10).to(torch.int64), ALL),
    "pmean": lambda x: lax.pmean(x, ALL),
    "pmax": lambda x: lax.pmax(x, ALL),
    "pmin_bool": lambda x: lax.pmin(x > 0, "tp"),
    "all_gather": lambda x: lax.all_gather(x, "tp", axis=1),
    "all_gather_tiled": lambda x: lax.all_gather(x.t(), ALL, axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "tp", tiled=True),
    "psum_scatter_inner": lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True),
    "all_to_all_tuple": lambda x: lax.all_to_all(x, ALL, 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]),
    "ppermute_open": lambda x: lax.ppermute(x.t(), "tp", [(1, 0)]),
    "ppermute_self": lambda x: lax.ppermute(x, "tp", [(1, 1)]),
    "ppermute_tuple": lambda x: lax.ppermute(x, ALL, [(0, 1)]),
    "pbroadcast": lambda x: lax.pbroadcast(x.t(), ALL, ft.lax.axis_size(ALL) - 1),
    "axis_index": lambda x: x * (1 + lax.axis_index(ALL)),
    "scanned": lambda x: ft.scan(
        lambda c, row: (torch.tanh(lax.psum(c * row, "tp")), lax.ppermute(c, "tp", [(0, 1)])),
        x[0],
        x,
    ),
    "switched": lambda x: switch(
        lax.axis_index("dp"),
        [lambda x: lax.psum(x, "tp").sin(), lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)])],
        x,
    ),
    "looped": lambda x: x * loop(  # for as long on all ranks
        lambda c: c[1] < 3,
        lambda c: (lax.psum(c[0], "tp").tanh(), c[1] + 1),
        (x.detach(), torch.tensor(0)),
    )[0],
}  # fmt: skip
ROUGH = ("pmax", "pmin", "psum_int")
# one of each kind, for Inductor, which takes long: in --full. No collective is in what it compiles
SOME = (
    "psum", "pmin_bool", "all_gather_tiled", "psum_scatter_inner", "all_to_all_tuple",
    "ppermute_open", "pbroadcast", "axis_index", "scanned", "switched",
)  # fmt: skip


def everything(x, names):
    """All values; and gradients of the sum of squares, weighted so that no errors cancel."""

    def loss(x):
        x = torch.sin(x)
        values = {name: VALUES[name](x) for name in names}
        ys = [y for name in names if not name.startswith(ROUGH) for y in tree.leaves(values[name])]
        total = sum((i + 1) * y.square().sum() for i, y in enumerate(ys))
        return lax.psum(total, ALL), values

    return ft.grad(loss, has_aux=True)(x)


def assert_shards(got, want, specs, mesh, tolerance):
    for path, a, b in zip(
        tree.paths(want), tree.leaves(got), tree.leaves(ft.shard(want, specs, mesh)), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, path=path: f"{path}: {m}"
        )


def check_collectives(mesh, names=tuple(VALUES), **options):
    size = mesh.mesh.size
    x = torch.randn(8 * size, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    mine = ft.shard(x, S, mesh)
    chosen = functools.partial(everything, names=names)
    program = trace(ft.shard_map(chosen, mesh, S, S, check=False))(mine)
    executable = compile_program(program, mesh, **options)
    want = on_the_first(lambda: ft.shard_map(chosen, mesh.mesh, S, S, check=False)(x))
    for _ in range(2):
        assert_shards(executable(mine), want, S, mesh, 1e-12)


# --- a training step in Megatron's manner, split over dp and tp

WIDE = Normal(0.3)
STEPS = 2


def defs(num_layers):
    return {
        "layers": {
            "up": ft.ParamDef((num_layers, 8, 16), (None, None, "mlp"), WIDE),
            "down": ft.ParamDef((num_layers, 16, 8), (None, "mlp", None), WIDE),
            "scale": ft.ParamDef((num_layers, 8), (None, None), WIDE),
            "shift": ft.ParamDef((num_layers, 8), (None, None), WIDE),
        },
        "head": ft.ParamDef((8, 4), (None, None), WIDE),
    }


def loss(params, batch, key):
    def layer(x, p):
        y = lax.psum(torch.tanh(x @ p["up"]) @ p["down"], "tp")
        return x + y * p["scale"] + p["shift"], None

    x, _ = ft.scan(layer, batch["x"], params["layers"])
    return lax.psum((x @ params["head"] - batch["y"]).square().sum(), ft.DATA_AXES)


def num_targets(batch):
    return lax.psum(batch["y"].isfinite().sum(), ft.DATA_AXES)


def training(mesh, num_layers=2, update=None):
    """A step with AdamW, or another update; a state, and its specs."""
    specs = ft.param_specs(defs(num_layers), ft.Rules({"mlp": "tp"}))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), update or optim.adamw(1e-2))
    state = ft.init_state(random.key(0), defs(num_layers), specs, optimizer, mesh)
    step = ft.make_step(ft.mean_gradients(loss, num_targets), optimizer, mesh, specs)
    return step, state, ft.state_specs(specs, optimizer)


def simulated_training(mesh, update):
    """The last state, and the metrics of each step."""
    step, state, _ = training(mesh, update=update)
    history = []
    for batch in batches(mesh):
        state, metrics = step(state, batch)
        history.append(tree.map(torch.clone, metrics))
    return tree.map(torch.clone, state), history


def batches(mesh):
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = {k: torch.randn(4, n, generator=generator) for k, n in (("x", 8), ("y", 4))}
        yield ft.shard(batch, P(ft.DATA_AXES), mesh)


def num_reductions(block):
    """All-reduces that the user and autodiff wrote; the body of a scan counts once."""
    scans = [e.op for e in block.equations if isinstance(e.op, Scan)]
    return sum(e.name == "psum" for e in block.equations) + sum(
        num_reductions(scan.body) for scan in scans
    )


def check_training(mesh, *, overlap, backend, **options):
    """Also: what overlaps has fewer, larger reductions, where Inductor's code shows them.

    With AdamW where nothing is compiled: `test_jit.py` compiles it, and no collective is in it.
    """
    update = optim.sgd(0.1, momentum=0.9) if backend == "inductor" else None
    step, state, specs = training(mesh, update=update)
    program = trace(step, donate=0)(state, next(batches(mesh)))
    # what overlaps starts layers' reductions from outside of what Inductor compiles, too
    options = {**options, "overlap": overlap, "prefetch": overlap}
    executable = compile_program(program, mesh, backend=backend, **options)
    if backend == "inductor":
        num = sum(code.count("all_reduce_.default(") for code in executable.code)
        written = num_reductions(program.block)
        assert num < written if overlap else num == written

    pointers = [leaf.data_ptr() for leaf in tree.leaves(state.params)]
    want, history = on_the_first(lambda: simulated_training(mesh.mesh, update))
    for mine, want_metrics in zip(batches(mesh), history, strict=True):
        state, metrics = executable(state, mine)
        assert_shards(metrics, want_metrics, P(), mesh, 1e-5)
    assert_shards(state, want, specs, mesh, 1e-5)
    assert [leaf.data_ptr() for leaf in tree.leaves(state.params)] == pointers


@contextlib.contextmanager
def each_kernel_once():
    """Check that inside this with block no two ranks compile the same kernel."""
    made = []
    compiling = inductor._compile

    def noting(graph, operands, path, use):
        made.append(path.name)
        return compiling(graph, operands, path, use)

    inductor._compile = noting
    yield
    inductor._compile = compiling
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, made)
    names = [name for names in everyone for name in names]
    assert names
    assert len(set(names)) == len(names), everyone


def main(cache, backend, *axes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh.parse(",".join(axes)).bind()
    if mesh.mesh.size == 2:  # without Inductor, which takes long
        check_collectives(mesh, overlap=False, backend="eager")
    else:
        with each_kernel_once():
            if backend == "inductor":
                check_collectives(mesh, SOME, cache=cache)
            check_training(mesh, cache=cache, overlap=True, backend="inductor")
        check_collectives(mesh, backend="eager")
        check_training(mesh, cache=cache, overlap=False, backend=backend)
    print(f"rank {dist.get_rank()}: ok\n", end="")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("axes", "backend"),
    [
        # one axis, without overlap: of two, the training step is compiled so
        pytest.param(("tp=2",), "eager", marks=pytest.mark.full),
        (("dp=2", "tp=2"), "eager"),
        # what does not overlap too, whose reductions are counted then
        pytest.param(("dp=2", "tp=2"), "inductor", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_equal_their_simulation(axes, backend, torchrun, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "kernels"
    done = torchrun(PROGRAM, 2 ** len(axes), folder, backend, *axes, timeout=300)
    for rank in range(2 ** len(axes)):
        assert f"rank {rank}: ok" in done.stdout
