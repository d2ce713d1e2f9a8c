"""Hessian-vector products of a decoder's loss, on meshes, against the dense model in float64.

Dense ones are torch.func's, in reverse mode twice: forward mode, where it is wrong, is not asked.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.func import jvp, vmap

import functron as ft
from functron import Mesh, P, gpt, lax, random, tree
from functron.spmd.spec import is_spec, spec_axes

LLAMA = gpt.GPTConfig(
    vocab_size=16, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=16,
    max_seq=8, init_stddev=0.3, dtype="float64",
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt2": replace(
        LLAMA, norm="layer", activation="gelu_tanh", gated=False, bias=True, positions="learned"
    ),
    "latent": replace(
        LLAMA, num_layers=1, num_kv_heads=0, kv_rank=6, rope_head_dim=4, v_head_dim=6
    ),
}


def batch() -> dict:
    tokens = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@functools.cache
def dense(model: str):
    """Parameters, a vector, and the product of the loss's Hessian with it."""
    config, data, grad = MODELS[model], batch(), torch.func.grad
    w = ft.init_params(random.key(0), gpt.defs(config))
    v = tree.map(lambda x: torch.cos(3 * x + 1), w)
    slope = grad(lambda w: gpt.loss(config, w, data))
    return w, v, grad(lambda w: inner(slope(w), v))(w)


def forward_over_reverse(f, w, v, specs):
    return ft.jvp(ft.grad(f), (w,), (v,))[1]


def reverse_over_forward(f, w, v, specs):
    return ft.grad(lambda w: jvp(f, (w,), (v,))[1])(w)


def reverse_over_reverse(f, w, v, specs):
    def slope(w):
        grads = ft.sync_gradients(ft.grad(f)(w), specs)
        rows = zip(*map(tree.leaves, (grads, v)), tree.leaves(specs, is_spec), strict=True)
        return sum(lax.psum((g * x).sum(), spec_axes(spec)) for g, x, spec in rows)

    return ft.grad(slope)(w)


def product(form, config, mesh, stream):
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    options = ft.ModelOptions(stream=stream)

    def program(w, v, data):
        return ft.sync_gradients(
            form(lambda w: gpt.loss(config, w, data, options), w, v, specs), specs
        )

    return ft.shard_map(program, mesh, (specs, specs, P(ft.DATA_AXES)), specs)


def assert_close(got, want):
    for path, x, y in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert (x - y).abs().max() <= 1e-10 * y.abs().max().clamp(min=1e-2), path


SP = gpt.SEQUENCE_PARALLEL_STREAM
FORMS = [forward_over_reverse, reverse_over_forward, reverse_over_reverse]


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("mesh", "stream"),
    [
        (Mesh(dp=2), gpt.STREAM),
        (Mesh(tp=2), gpt.STREAM),
        (Mesh(tp=2), SP),
        (Mesh(dp=2, tp=2), SP),
    ],
    ids=["dp", "tp", "sp", "dp-tp-sp"],
)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("form", FORMS)
def test_simulated(form, model, mesh, stream):
    w, v, want = dense(model)
    assert_close(product(form, MODELS[model], mesh, stream)(w, v, batch()), want)


@pytest.mark.parametrize(
    ("form", "model", "mesh", "stream"),
    [
        (forward_over_reverse, "llama", Mesh(tp=2), gpt.STREAM),
        (reverse_over_forward, "gpt2", Mesh(dp=2), gpt.STREAM),
        (reverse_over_reverse, "gpt2", Mesh(dp=2, tp=2), SP),
        (reverse_over_forward, "latent", Mesh(tp=2), gpt.STREAM),
    ],
)
def test_traced_and_compiled(form, model, mesh, stream):
    """Indices of ranks are first asked for inside of a transform."""
    w, v, want = dense(model)
    mapped = product(form, MODELS[model], mesh, stream)
    program = ft.trace(mapped)(w, v, batch())
    program.check()
    assert_close(program(w, v, batch()), want)
    if model == "gpt2" and mesh.size == 2:  # the simulation of all ranks, compiled
        assert_close(ft.jit(mapped, backend="eager")(w, v, batch()), want)


def linearized(f, w, v, specs):
    return ft.linearize(ft.grad(f), w)[1](v)


FEW = replace(LLAMA, num_layers=1)
RINGS = {
    "ring": (FEW, Mesh(dp=2, tp=2, cp=2), {}),
    "remat": (FEW, Mesh(tp=2, cp=2), {"remat": "full"}),
    "sinks and caps": (
        replace(FEW, sinks=True, score_cap=5.0, logit_cap=5.0, window=3), Mesh(cp=2), {}
    ),
    "kernels": (replace(FEW, qk_norm=True), Mesh(cp=2), {"kernels": ft.ops.use("kernel")}),
    "gathered at use": (FEW, Mesh(fsdp=2, cp=2), {"gather": True, "remat": "dots"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form", "life"),
    [
        ("ring", forward_over_reverse, "simulated"),
        ("ring", linearized, "simulated"),
        ("remat", forward_over_reverse, "traced"),
        ("remat", reverse_over_forward, "simulated"),
        ("sinks and caps", forward_over_reverse, "jitted"),
        ("kernels", reverse_over_forward, "traced"),
        ("gathered at use", forward_over_reverse, "simulated"),
    ],
)
def test_of_split_sequences(name, form, life):
    """Keys and values go round, in the transposes of their transposes too."""
    config, mesh, given = RINGS[name]
    data = {**batch(), "rows": torch.arange(4)}
    w = ft.init_params(random.key(0), gpt.defs(config))
    v = tree.map(lambda x: torch.cos(3 * x + 1), w)
    grad = torch.func.grad
    slope = grad(lambda w: gpt.loss(config, w, data))
    want = grad(lambda w: inner(slope(w), v))(w)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    stream = SP if mesh["tp"] > 1 else gpt.STREAM
    given = {**given, **({"gather": ft.Gather(specs)} if "gather" in given else {})}
    options = ft.ModelOptions(stream=stream, **given)

    def program(w, v, data):
        made = form(lambda w: gpt.loss(config, w, data, options), w, v, specs)
        return ft.sync_gradients(made, specs)

    mapped = ft.shard_map(program, mesh, (specs, specs, gpt.batch_specs()), specs)
    if life == "traced":
        mapped = ft.trace(mapped)(w, v, data)
        mapped.check()
    run = ft.jit(mapped, backend="eager") if life == "jitted" else mapped
    assert_close(run(w, v, data), want)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=2)], ids=str)
def test_many_gradients_and_products_at_once(mesh):
    """vmap of ft.grad, and of a product with each of several vectors, traced and checked."""
    generator = torch.Generator().manual_seed(0)
    x, vs = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    w = torch.randn(4, dtype=torch.float64, generator=generator)

    def loss(w, x):
        return lax.psum((torch.tanh(w * x) * (1 + lax.axis_index("tp"))).sum(), "tp")

    def of_samples(w, x, vs):
        grads = vmap(ft.grad(loss), (None, 0))(w, x)
        products = vmap(lambda v: jvp(lambda w: ft.grad(loss)(w, x[0]), (w,), (v,))[1])(vs)
        return ft.sync_gradients((grads, products), P())

    f = ft.shard_map(of_samples, mesh, (P(), P(), P()), P())
    slope = 1 / torch.cosh(w * x) ** 2 * x
    bend = -2 * torch.tanh(w * x[0]) / torch.cosh(w * x[0]) ** 2 * x[0] ** 2
    want = (3 * slope, 3 * bend * vs)
    program = ft.trace(f)(w, x, vs)
    program.check()
    for got in (f(w, x, vs), program(w, x, vs)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_loss_that_varies_under_vmap_is_refused_where_it_is_traced():
    def own(w):
        return ft.grad(lambda w: (w * lax.axis_index("tp")).sum())(w)

    f = ft.shard_map(lambda w: vmap(own)(w), Mesh(tp=2), P(), P("tp"))
    with pytest.raises(ValueError, match=r"got a loss that varies over 'tp'"):
        ft.trace(f)(torch.ones(2, 3)).check()
