"""Run by test_derivatives.py with 2 processes: bound programs against simulated ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, P, gpt, lax, tree
from functron.spmd import spec as sharding
from tests.transforms.derivative_programs import (
    PROGRAMS,
    SPECS,
    TANGENTS_T,
    W_T,
    X_T,
)

MESH = Mesh(tp=2)


def compare(name, got, want, specs, bound):
    flat = tree.broadcast_prefix(specs, want, is_leaf=sharding.is_spec)
    for a, b, spec in zip(tree.leaves(got), tree.leaves(want), flat, strict=True):
        part = sharding.shard(b, spec, MESH, bound.coordinate)
        torch.testing.assert_close(a, part, rtol=1e-12, atol=1e-12, msg=lambda m: name + m)


def inside(program, mode):
    total = lambda w, x: program(w, x).square().sum()

    def of_ranks(w, x, t):
        if mode == "hvp":
            made = ft.jvp(lambda w: ft.grad(total)(w, x), (w,), (t,))[1]
            return ft.sync_gradients(made, SPECS)
        if mode == "jvp-jvp":
            return ft.jvp(lambda w: ft.jvp(lambda w: total(w, x), (w,), (t,))[1], (w,), (t,))
        if mode == "linearize":
            return ft.linearize(lambda w: program(w, x), w)[1](t)
        return ft.sync_gradients(ft.hessian(lambda x: total(w, x))(x), P())

    outs = {"hvp": SPECS, "jvp-jvp": (P(), P())}
    return of_ranks, (SPECS, P(), SPECS), outs.get(mode, P())


def check(bound):
    """Programs and modes pairwise: each program with one mode, each mode with two programs."""
    args = W_T, X_T, TANGENTS_T[0]
    modes = ["hvp", "jvp-jvp", "linearize", "hessian"]
    for i, (name, program) in enumerate(PROGRAMS.items()):
        if name == "scan":
            continue
        mode = modes[i % len(modes)]
        of_ranks, ins, outs = inside(program, mode)
        want = ft.shard_map(of_ranks, MESH, ins, outs)(*args)
        local = [local_parts(x, spec, bound) for x, spec in zip(args, ins, strict=True)]
        got = ft.shard_map(of_ranks, bound, ins, outs)(*local)
        compare(f"{name} {mode}: ", got, want, outs, bound)


def local_parts(value, specs, bound):
    flat = tree.broadcast_prefix(specs, value, is_leaf=sharding.is_spec)
    return tree.map_columns(
        lambda x, spec: sharding.shard(x, spec, MESH, bound.coordinate), value, flat
    )


def check_ring():
    """A product with the Hessian of a decoder's loss, whose keys and values go round."""
    config = gpt.GPTConfig(
        vocab_size=16, num_layers=1, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16, max_seq=8,
        dtype="float64",
    )  # fmt: skip
    tokens = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone(), "rows": torch.arange(2)}
    w = ft.init_params(ft.random.key(0), gpt.defs(config))
    v = tree.map(lambda x: torch.cos(3 * x + 1), w)

    def program(w, v, data):
        slope = ft.grad(lambda w: gpt.loss(config, w, data))
        return ft.sync_gradients(ft.jvp(slope, (w,), (v,))[1], P())

    mesh = Mesh(cp=2)
    ins = P(), P(), gpt.batch_specs()
    want = ft.shard_map(program, mesh, ins, P())(w, v, data)
    here = mesh.bind()
    flat = tree.broadcast_prefix(ins[2], data, is_leaf=sharding.is_spec)
    local = tree.map_columns(
        lambda x, spec: sharding.shard(x, spec, mesh, here.coordinate), data, flat
    )
    got = ft.shard_map(program, here, ins, P(), check=False)(w, v, local)  # it was, simulated
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def check_refused(bound):
    """A rule that is not linear, on the process of each rank."""
    f = ft.custom_jvp(torch.sin, lambda args, tangents: (args[0].sin(), tangents[0] ** 2))
    share = lambda x: ft.grad(lambda x: lax.psum(f(x).sum(), "tp"))(x)
    with pytest.raises(ValueError, match="not linear in them, by pow"):
        ft.shard_map(share, bound, P("tp"), P("tp"))(X_T[0])


def main():
    dist.init_process_group("gloo")
    check(MESH.bind())
    check_ring()
    check_refused(MESH.bind())
    if dist.get_rank() == 0:
        print("check: ok")
    dist.destroy_process_group()


main()
