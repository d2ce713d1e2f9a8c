"""Run by test_distributed.py under torchrun with 4 processes: bound programs against simulated.

The simulation itself is tested against JAX; here every rank compares what the process groups give
with its shard of what the simulation gives, for values, gradients and second derivatives.
"""

from __future__ import annotations

import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.core import compat
from functron.spmd import spec as sharding

torch.set_default_dtype(torch.float64)
MESH = Mesh(dp=2, tp=2)
ALL = ("dp", "tp")
generator = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=generator)


def compare(name, got, want, specs, bound, tolerance=1e-12):
    flat = tree.broadcast_prefix(specs, want, is_leaf=sharding.is_spec)
    for a, b, spec in zip(tree.leaves(got), tree.leaves(want), flat, strict=True):
        part = sharding.shard(b, spec, MESH, bound.coordinate)
        assert (a.dtype, a.shape) == (part.dtype, part.shape), (name, a, part)
        torch.testing.assert_close(a, part, rtol=tolerance, atol=tolerance, msg=lambda m: name + m)


S = P("dp", "tp")
VALUES = {
    "psum": (lambda x: lax.psum(x, "tp"), P("dp")),
    "psum_tuple": (lambda x: lax.psum(x, ALL), P()),
    "psum_bool": (lambda x: lax.psum(x > 0, "tp"), P("dp")),
    "pmean": (lambda x: lax.pmean(x, "dp"), P(None, "tp")),
    "pmax": (lambda x: lax.pmax(x, ALL), P()),
    "pmin_int": (lambda x: lax.pmin((10 * x).to(torch.int64), "tp"), P("dp")),
    "pmax_bool": (lambda x: lax.pmax(x > 0, "tp"), P("dp")),
    "all_gather": (lambda x: lax.all_gather(x, "tp", axis=1), P("dp")),
    "all_gather_tuple": (lambda x: lax.all_gather(x, ("tp", "dp"), axis=-1), P()),
    "all_gather_bool": (lambda x: lax.all_gather(x > 0, "tp", axis=1, tiled=True), P("dp")),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "tp", tiled=True), P(("dp", "tp"))),
    "psum_scatter_tuple": (
        lambda x: lax.psum_scatter(x, ("tp", "dp"), scatter_dimension=1, tiled=True),
        P(None, ("tp", "dp")),
    ),
    "psum_scatter_int": (
        lambda x: lax.psum_scatter((9 * x).to(torch.int32), "tp", tiled=True), P(("dp", "tp")),
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True), P(("dp", "tp"))),
    "all_to_all_tuple": (lambda x: lax.all_to_all(x, ALL, 1, 0, tiled=True), P(None, ALL)),
    "all_to_all_untiled": (lambda x: lax.all_to_all(x[:2], "dp", 0, 1), P("tp", "dp")),
    "ppermute": (lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]), S),
    "ppermute_partial": (lambda x: lax.ppermute(x, "dp", [(1, 0)]), S),
    "ppermute_tuple": (lambda x: lax.ppermute(x, ALL, [(0, 3), (3, 1)]), S),
    "pbroadcast": (lambda x: lax.pbroadcast(x, ALL, 2), P()),
    "pbroadcast_reversed": (lambda x: lax.pbroadcast(x, ("tp", "dp"), 2), P()),
    "pbroadcast_bool": (lambda x: lax.pbroadcast(x > 0, "tp", 1), P("dp")),
    "pbroadcast_int": (lambda x: lax.pbroadcast((9 * x).to(torch.int32), "dp", 1), P(None, "tp")),
    "axis_index": (lambda x: x + lax.axis_index(ALL), S),
    "assume_replicated": (lambda x: lax.assume_replicated(lax.psum(x, "tp"), "dp") * 0, P()),
}  # fmt: skip


def check_values(bound):
    x = randn(8, 8)
    mine = sharding.shard(x, S, MESH, bound.coordinate)
    for name, (program, out) in VALUES.items():
        want = ft.shard_map(program, MESH, S, out)(x)
        compare(name, ft.shard_map(program, bound, S, out)(mine), want, out, bound)


def check_derivatives(bound):
    """Boundary cotangents, gradients inside and outside, Hessian-vector products."""
    specs = {"up": P(None, "tp"), "down": P("tp"), "scale": P()}
    w = {"up": randn(8, 16), "down": randn(16, 8), "scale": randn(8)}
    x = randn(8, 8)
    local = ft.shard((w, x), (specs, P("dp")), bound)

    def mlp(w, x):
        y = lax.psum(torch.tanh((x * w["scale"]) @ w["up"]) @ w["down"], "tp")
        y = lax.all_gather(y, "tp", axis=1, tiled=True)[:, ::2] + y
        y = y + lax.pbroadcast(y * y * (1 + lax.axis_index("tp")), ("dp", "tp"), 3)
        return lax.pmean(lax.ppermute(y, "dp", [(0, 1)]).pow(2).sum() + y.sum(), "dp")

    def maps(mesh):
        return ft.shard_map(mlp, mesh, (specs, P("dp")), P())

    def gradients(mesh):
        def program(w, x):
            value, grads = ft.value_and_grad(ft.remat(mlp))(w, x)
            return value, ft.sync_gradients(grads, specs)

        return ft.shard_map(program, mesh, (specs, P("dp")), (P(), specs))

    compare("inside", gradients(bound)(*local), gradients(MESH)(w, x), (P(), specs), bound)
    both = torch.func.grad(maps(bound), (0, 1))(*local)
    compare("outside", both, torch.func.grad(maps(MESH), (0, 1))(w, x), (specs, P("dp")), bound)
    taped = tree.map(lambda leaf: leaf.clone().requires_grad_(), local[0])
    maps(bound)(taped, local[1]).backward()
    got = tree.map(lambda leaf: leaf.grad, taped)
    compare("tape", got, torch.func.grad(maps(MESH))(w, x), specs, bound)

    def hvp(mesh, w, x):
        v = tree.map(torch.cos, w)
        return torch.func.jvp(lambda w: torch.func.grad(maps(mesh))(w, x), (w,), (v,))[1]

    compare("hvp", hvp(bound, *local), hvp(MESH, w, x), specs, bound, 1e-10)

    def products(mesh):
        def program(w, x):
            v = tree.map(torch.cos, w)
            moved = torch.func.jvp(ft.grad(lambda w: mlp(w, x)), (w,), (v,))[1]
            return ft.sync_gradients(moved, specs)

        return ft.shard_map(program, mesh, (specs, P("dp")), specs)

    want = products(MESH)(w, x)
    compare("hvp inside", products(bound)(*local), want, specs, bound, 1e-10)
    compiled = ft.jit(products(bound), backend="eager")
    compare("hvp compiled", compiled(*local), want, specs, bound, 1e-10)


def check_bytes_of_broadcasts(bound):
    """A broadcast is one: an all-reduce of zeros would send twice as much."""
    sent = []

    class Sent(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "c10d" in op.namespace and "wait" not in op.name():
                sent.append((op.name().split("::")[1], args[0].nbytes))
            return op(*args, **(kwargs or {}))

    mine = ft.shard(randn(8, 8), S, bound)
    with Sent():
        ft.shard_map(lambda x: lax.pbroadcast(x, ALL, 2), bound, S, P())(mine)
    assert sent == [("broadcast", mine.nbytes)] * 2, sent


def check_closures(bound):
    """A replicated tensor that the program closes over gets the sum of all ranks' cotangents."""
    scale, x = randn(8), randn(8, 8)

    def loss(mesh, scale, x):
        def program(x):
            return lax.pmean((torch.tanh(x * scale) ** 2).sum(), "dp")

        return ft.shard_map(program, mesh, P("dp"), P())(x)

    local = ft.shard(x, P("dp"), bound)
    got = torch.func.grad(lambda s: loss(bound, s, local))(scale)
    compare("closure", got, torch.func.grad(lambda s: loss(MESH, s, x))(scale), P(), bound)
    taped = scale.clone().requires_grad_()
    loss(bound, taped, local).backward()
    compare("closure tape", taped.grad, got, P(), bound)


def check_refusals(bound):
    """Broken programs are refused on fake tensors before the first collective: none hangs."""
    x = sharding.shard(randn(8, 8), S, MESH, bound.coordinate)
    for program, out, message in (
        (lambda x: x * 2, P("dp"), "varies over 'tp'"),
        (lambda x: lax.psum(lax.psum(x, "tp"), "tp"), P("dp"), "redundant reduction"),
        (lambda x: lax.psum(x, "tq"), P("dp"), "unbound axis name"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            ft.shard_map(program, bound, S, out)(x)
        assert "gloo_program.py" in str(refused.value)
    full = lambda x: lax.psum(x.square().sum(), ALL)
    program = ft.shard_map(lambda x: ft.sync_gradients(torch.func.grad(full)(x), S), bound, S, S)
    with pytest.raises(ValueError, match=r"no rank's share.*torch.func.grad, which counts"):
        program(x)
    edits = lambda x: (x.add_(1.0), x)[1]
    with pytest.raises(ValueError, match=r"argument 0: .*donate=0 to shard_map"):
        ft.shard_map(edits, bound, S, S)(x.clone())
    given, want = x.clone(), x + 1.0
    result = ft.shard_map(edits, bound, S, S, donate=0)(given)
    assert torch.equal(result, want)
    with pytest.raises(ValueError, match="was donated to <lambda> as argument 0"):
        given.sum()
    norm = ft.shard_map(lambda x: optim.global_norm({"x": x}), bound, S, P())
    with pytest.raises(ValueError, match="got no specs, on a mesh with 'dp', 'tp'"):
        norm(x)
    with pytest.raises(ValueError, match="got 4 processes; wanted 3 processes"):
        Mesh(dp=3).bind()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ft.shard_map(lambda x: lax.psum(x * x.sum().item(), "tp"), bound, S, P("dp"))(x)
    assert any("could not be checked" in str(w.message) for w in caught)


def check_that_ranks_agree_on_what_is_checked(bound):
    """By the values of arguments, not by their addresses: a check communicates."""
    module = sys.modules["functron.spmd.shard_map"]
    calls, real = [], module.check_shapes
    module.check_shapes = lambda *args: (calls.append(args[0]), real(*args))
    try:
        program = ft.shard_map(lambda x, *_: x + 1, bound, (S, None, None, None), S)
        for number in range(30):
            program(torch.zeros(2, 2), None, ("a", 1.5), True if number else 1)
        assert len(calls) == 2, len(calls)  # True is not 1
        for _ in range(3):
            program(torch.zeros(2, 2), {"dict": 1}, None, None)
        assert len(calls) == 5, len(calls)  # what has no hash is checked every time
    finally:
        module.check_shapes = real


def check_training(bound):
    """Three steps of the decoder, dropout and microbatches included; init bitwise equal."""
    config = gpt.GPTConfig(
        vocab_size=60, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48,
        max_seq=16, dropout=0.1, dtype="float64",
    )  # fmt: skip
    tokens = torch.randint(0, 60, (8, 17), generator=generator)
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}

    def train(mesh, stream):
        defs = gpt.defs(config)
        specs = ft.param_specs(defs, gpt.rules(config, mesh))
        optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.adamw(1e-2))
        state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
        first = tree.map(torch.clone, state.params)

        def loss(params, batch, key):
            return gpt.loss(config, params, batch, ft.ModelOptions(stream=stream), key=key)

        step = ft.make_step(
            ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), 2), optimizer, mesh, specs
        )
        history = []
        for _ in range(3):
            before = state
            state, metrics = step(state, ft.shard(data, P(ft.DATA_AXES), mesh))
            history.append(metrics)
            with pytest.raises(ValueError, match="donated to step as argument 0/step"):
                step(before, ft.shard(data, P(ft.DATA_AXES), mesh))
        return first, state.params, history, specs

    for stream in (gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM):
        first, last, history, _ = train(bound, stream)
        want_first, want_last, want_history, specs = train(MESH, stream)
        compare("init", first, want_first, specs, bound, 0.0)
        compare("params", last, want_last, specs, bound, 1e-9)
        compare("metrics", history, want_history, P(), bound, 1e-10)
        whole = ft.gather(last, specs, bound)
        compare("gather", whole, want_last, P(), bound, 1e-9)


def bind():
    """The mesh, each of whose groups has had a collective of all its ranks before anything else."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as connect:
        mesh = MESH.bind()
    groups = [compat.group(mesh.groups[axis]) for axis in mesh.axis_names]
    assert [call.kwargs["group"] for call in connect.call_args_list] == groups
    return mesh


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = bind()
    checks = (
        check_values, check_derivatives, check_bytes_of_broadcasts, check_closures, check_refusals,
        check_that_ranks_agree_on_what_is_checked, check_training,
    )  # fmt: skip
    for check in checks:
        check(mesh)
        if dist.get_rank() == 0:
            print(f"{check.__name__}: ok", flush=True)
    dist.destroy_process_group()
