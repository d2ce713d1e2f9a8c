"""Quantised linear layers: the three products by hand, and the same numbers on every mesh."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import functron as ft
from functron import DATA_AXES, P, lax, nn, random, tree
from functron.nn.moe import MoEConfig, moe, moe_defs
from functron.nn.moe import layer as moe_layer
from functron.ops.quantise import (
    HISTORY,
    QuantisedFormat,
    RoundingDraw,
    dequantise,
    hadamard,
    magnitude,
    quantise,
    remember,
)
from functron.precision import RECIPES, Recipe, grouped_product, history_def, product
from functron.program.interpreter import ambient_inputs, run_block
from functron.spmd import Mesh, Rules, spec_axes

BATCH, SEQ, EMBED, MLP = 2, 256, 256, 512
DRAWN = "hadamard(e4m3@row+stochastic*e4m3@row+stochastic)"
EVERY = f"fprop={DRAWN} dgrad={DRAWN} wgrad={DRAWN}"  # what can be drawn is, along every dim
CURRENT = [name for name in RECIPES if name != "fp8-delayed"]  # which needs a history
KEY = random.key(7)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def decoded(x: Tensor, form: QuantisedFormat, draw: RoundingDraw | None = None) -> Tensor:
    return dequantise(quantise(x, form, magnitude(x, form), draw)).double()


@pytest.mark.parametrize("name", CURRENT)
def test_three_products_by_hand(name):
    """y, dx and dw are float64 products of decoded operands, each by its own format."""
    recipe = RECIPES[name]
    x, w, dy = randn(BATCH, 128, EMBED), randn(EMBED, 128, seed=1), randn(BATCH, 128, 128, seed=2)
    layer = product(recipe, key=KEY, rows=P())
    y, pull = torch.func.vjp(layer, x, w)
    dx, dw = pull(dy)
    flat, d = x.flatten(0, 1), dy.flatten(0, 1)
    tokens, outputs = torch.arange(len(flat)), torch.arange(128)
    bits = {  # counters are row-major positions in dy, whose columns are outputs
        1: lambda: RoundingDraw(KEY, tokens * 128, outputs, 2),
        2: lambda: RoundingDraw(KEY, outputs, tokens * 128, 5),
    }
    want = {}
    pairs = {"fprop": (flat, w.mT), "dgrad": (d, w), "wgrad": (flat.mT, d.mT)}
    for number, (part, (a, b)) in enumerate(pairs.items()):
        how = getattr(recipe, part)
        if how.hadamard:
            a, b = (hadamard(m, KEY, tokens, 8 + number) for m in (a, b))
        forms = how.left, how.right
        a, b = (
            decoded(m, form, bits[number]() if form.stochastic else None)
            for m, form in zip((a, b), forms, strict=True)
        )
        want[part] = a @ b.mT
    torch.testing.assert_close(y.flatten(0, 1), want["fprop"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx.flatten(0, 1), want["dgrad"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw, want["wgrad"], rtol=1e-12, atol=1e-11)
    # on the tape, and in bfloat16: a float32 sum of the same, rounded
    leaves = [v.bfloat16().requires_grad_() for v in (x, w)]
    out = layer(*leaves)
    grads = torch.autograd.grad(out, leaves, dy.bfloat16())
    assert [v.dtype for v in (out, *grads)] == [torch.bfloat16] * 3
    assert out.isfinite().all()


HALF_UNIT = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}


@pytest.mark.parametrize("name", CURRENT)
def test_error_of_a_product(name):
    """Against the unquantised product, within a bound that follows from the formats alone.

    An operand a' = a + e has |e_i| <= max(u |a_i|, s_i) with u half a unit of the last bit
    (relative to numbers that are normal) and s_i half a step of subnormal ones times the scale, at
    most `u` times the scale times the smallest normal number; to nearest. Stochastically it is
    twice that. Then |a' b' - a b| <= |e_a| |b| + |a| |e_b| + |e_a| |e_b|, elementwise products of
    matrices of magnitudes. FP4's scales are rounded themselves: to 1/16 of a block's magnitude.
    """
    recipe = RECIPES[name]
    x, w, dy = randn(BATCH, 128, EMBED), randn(EMBED, 128, seed=1), randn(BATCH, 128, 128, seed=2)
    y, pull = torch.func.vjp(product(recipe, key=KEY, rows=P()), x, w)
    dx, dw = pull(dy)
    flat, d = x.flatten(0, 1), dy.flatten(0, 1)
    found = {
        "fprop": (y.flatten(0, 1), flat, w.mT),
        "dgrad": (dx.flatten(0, 1), d, w),
        "wgrad": (dw, flat.mT, d.mT),
    }

    def error(m, form, mixed):
        unit = HALF_UNIT[form.element] * (2 if form.stochastic else 1)
        if (
            mixed
        ):  # magnitudes after mixing are at most 4 times the largest of 16; signs do not matter
            groups = m.abs().unflatten(-1, (-1, 16)).norm(dim=-1, keepdim=True)
            m = groups.expand(-1, -1, 16).flatten(-2)  # |m'_j| <= ||m|| of its group
        rows, cols = {"tensor": m.shape, "row": (1, m.shape[1])}.get(form.blocks, form.block)
        blocks = m.abs().unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
        most = blocks.amax((1, 3), keepdim=True).expand_as(blocks).flatten(2, 3).flatten(0, 1)
        largest, smallest = {"e4m3": (448, 2**-6), "e5m2": (57344, 2**-14), "e2m1": (6, 1)}[
            form.element
        ]
        scale = most / largest * (2 if form.blocks == "1x32" else 17 / 16)
        saturated = most / 16 if form.element == "e2m1" else 0
        return m.abs(), torch.maximum(unit * m.abs(), unit * scale * smallest) + saturated

    for part, (got, a, b) in found.items():
        how = getattr(recipe, part)
        a_, e_a = error(a, how.left, how.hadamard)
        b_, e_b = error(b, how.right, how.hadamard)
        bound = e_a @ b_.mT + a_ @ e_b.mT + e_a @ e_b.mT
        off = (got - a @ b.mT).abs()
        assert (off <= bound).all()
        assert off.mean() > 1e-4 * bound.mean()  # the bound says something


# --- meshes


def pair(recipe: Recipe, stream: P, local: bool = False):
    """A column- and a row-parallel layer with a nonlinear function between, as a decoder has them."""
    tokens = P(DATA_AXES, "cp")

    def layer(params, x):
        x = nn.gather_sequence(x, stream)
        up = product(recipe, outer="tp", rows=tokens, key=random.fold_in(KEY, 0), path="up")
        down = product(recipe, inner="tp", rows=tokens, key=random.fold_in(KEY, 1), path="down")
        h = torch.nn.functional.gelu(up(x, params["up"]))
        return nn.reduce_partial(down(h, params["down"]), stream)

    return layer


SPECS = {"up": P(None, "tp"), "down": P("tp", None)}
WHOLE, SEQUENCE = P(DATA_AXES, "cp"), P(DATA_AXES, ("cp", "tp"))
MESHES = {
    "tp=2": WHOLE, "tp=2 sequence": SEQUENCE, "dp=2": WHOLE, "cp=2": WHOLE,
    "dp=2,tp=2 sequence": SEQUENCE, "tp=2,cp=2 sequence": SEQUENCE, "fsdp=2,ep=2": WHOLE,
}  # fmt: skip
BY_DEFAULT = ("fp8-tensor", "fp8-row", "nvfp4", EVERY)  # the others send nothing for their scales
CASES = [
    pytest.param(
        recipe, name,
        marks=[] if "dp=2,tp=2" in name and recipe in BY_DEFAULT else pytest.mark.full,
        id=f"{'all drawn' if recipe == EVERY else recipe}-{name}",
    )
    for recipe in (*CURRENT, EVERY) for name in MESHES
]  # fmt: skip


def problem():
    """Parameters, activations and a cotangent, of magnitudes that differ between ranks."""
    params = {"up": randn(EMBED, MLP) / 16, "down": randn(MLP, EMBED, seed=1) / 22}
    x = randn(4, SEQ, EMBED, seed=2)
    x[1] *= 3
    params["up"][:, : MLP // 2] *= 2
    return params, x, randn(*x.shape, seed=3)


operands = pytest.fixture(scope="module")(problem)


@pytest.fixture(scope="module")
def alone(operands):
    """The numbers of one device, by recipe."""
    params, x, dy = operands
    made = {}

    def of(name):
        if name not in made:
            y, pull = torch.func.vjp(pair(Recipe.parse(name), WHOLE), params, x)
            made[name] = y, pull(dy)
        return made[name]

    return of


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_every_mesh_has_the_numbers_of_one_device(recipe, name, operands, alone):
    """Forward and gradients, to float64's sums: not one code differs.

    Gradients are taken inside of the mesh and synchronised, and outside of it.
    """
    params, x, dy = operands
    y, gradients = alone(recipe)
    mesh, stream = Mesh.parse(name.split()[0]), MESHES[name]
    layer = pair(Recipe.parse(recipe), stream)
    mapped = ft.shard_map(layer, mesh, (SPECS, stream), stream)

    def inside(cotangent, params, x):
        def loss(params, x):
            out = (layer(params, x) * cotangent).sum()
            return lax.psum(out, spec_axes(stream))

        _, grads = ft.value_and_grad(loss, (0, 1))(params, x)
        return ft.sync_gradients(grads, (SPECS, stream))

    step = ft.shard_map(inside, mesh, (stream, SPECS, stream), (SPECS, stream))
    close(step(dy, params, x), gradients)
    value, pull = torch.func.vjp(mapped, params, x)
    close(value, y)
    close(pull(dy), gradients)


@pytest.mark.full
@pytest.mark.distributed
def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_matmul.py"), 4, timeout=180)
    assert all(f"{name}: ok" in done.stdout for name in ("fp8-tensor", "fp8-row", "nvfp4"))


def test_local_scaling_depends_on_the_mesh(operands, alone):
    """And sends nothing: what "global" is for."""
    params, x, _ = operands
    local = Recipe.parse(f"{RECIPES['fp8-tensor']}".replace("global", "local"))
    mapped = ft.shard_map(pair(local, WHOLE), Mesh(tp=2), (SPECS, WHOLE), WHOLE)
    y = alone("fp8-tensor")[0]
    assert 1e-4 < (mapped(params, x) - y).norm() / y.norm() < 0.1

    def sent(recipe):
        program = ft.trace(
            ft.shard_map(pair(recipe, WHOLE), Mesh(dp=2, tp=2), (SPECS, WHOLE), WHOLE)
        )
        return [row for row in program(params, x).cost().collectives if row.op == "pmax"]

    assert sent(local) == []
    rows = sent(RECIPES["fp8-tensor"])
    assert {(row.axis, row.count, row.payload_bytes) for row in rows} == {
        ("dp", 2, 16),
        ("tp", 2, 16),
    }
    assert sent(RECIPES["fp8-block"]) == []


def replicated(recipe, partial):
    """A layer that tensor parallelism leaves whole, before one that it splits."""

    def layer(params, x):
        tokens = P(DATA_AXES)
        narrow = product(recipe, rows=tokens, partial=partial, key=KEY, path="narrow")
        up = product(recipe, outer="tp", rows=tokens, key=KEY, path="up")
        down = product(recipe, inner="tp", rows=tokens, key=KEY, path="down")
        h = up(narrow(x, params["narrow"]), params["up"])
        return lax.psum(down(torch.tanh(h), params["down"]), "tp")

    return layer


@pytest.mark.parametrize("recipe", ["fp8-tensor", pytest.param("nvfp4", marks=pytest.mark.full)])
def test_cotangents_that_are_parts_of_sums(recipe, operands):
    """Of a product that an axis leaves whole: refused, or named and right."""
    params, x, dy = operands
    params = {**params, "narrow": randn(EMBED, EMBED, seed=5) / 16}
    specs = {**SPECS, "narrow": P()}
    y, pull = torch.func.vjp(replicated(RECIPES[recipe], ()), params, x)
    want = pull(dy)

    def gradients(partial):
        layer = replicated(RECIPES[recipe], partial)

        def inside(dy, params, x):
            loss = lambda params, x: (layer(params, x) * dy).sum()
            grads = ft.grad(loss, (0, 1))(params, x)
            return ft.sync_gradients(grads, (specs, P()))

        step = ft.shard_map(inside, Mesh(tp=2), (P(), specs, P()), (specs, P()))
        return step(dy, params, x)

    with pytest.raises(ValueError, match=r"(?s)product of narrow.*axis 'tp'.*partial=\('tp',\)"):
        gradients(())
    close(gradients(("tp",)), want)
    assert y.isfinite().all()


# --- delayed scaling


def delayed_steps(mesh, *, microbatches=1, remat=False, stream=WHOLE):
    """The histories and losses of three steps of two layers in a scan, by one program."""
    recipe, depth = RECIPES["fp8-delayed"], 2
    params = {
        "up": randn(depth, EMBED, 64) / 16,
        "down": randn(depth, 64, EMBED, seed=1) / 8,
        "histories": torch.zeros(depth, 2, 3, HISTORY),
    }
    specs = {"up": P(None, None, "tp"), "down": P(None, "tp"), "histories": P()}
    tokens = P(DATA_AXES, "cp")

    def block(x, layer):
        up = product(recipe, outer="tp", rows=tokens)
        down = product(recipe, inner="tp", rows=tokens)
        h = up(nn.gather_sequence(x, stream), layer["up"], layer["histories"][0])
        y = down(torch.tanh(h), layer["down"], layer["histories"][1])
        return x + nn.reduce_partial(y, stream), None

    def loss(params, batch):
        body = ft.remat(block) if remat else block
        y, _ = ft.scan(body, batch, params)
        return lax.psum(y.square().sum(), spec_axes(stream)) / 1e4

    def step(params, batch):
        value, grads = ft.accumulate(ft.value_and_grad(loss), microbatches)(params, batch)
        grads = ft.sync_gradients(grads, specs)
        counts = grads.pop("histories")
        new = tree.map(lambda p, g: p - 0.05 * g, {k: params[k] for k in grads}, grads)
        return {**new, "histories": remember(params["histories"], counts)}, value

    x = randn(4, 32, EMBED, seed=2) * torch.tensor([1.0, 5, 2, 3], dtype=torch.float64).view(
        4, 1, 1
    )
    run = ft.shard_map(step, Mesh.parse(mesh), (specs, stream), (specs, P()))
    losses = []
    for _ in range(3):
        params, value = run(params, x)
        losses.append(value)
    return params, torch.stack(losses)


def test_delayed_scaling_is_state():
    """A step's histories are those of one device, one batch and no recomputation: to the bit.

    And so are its scales, whatever adds up cotangents: accumulation, a scan over layers, ranks.
    """
    want, losses = delayed_steps("")
    history = want["histories"]
    assert (history[..., -3:] > 0).all()
    assert (history[..., :-3] == 0).all()
    assert losses.isfinite().all()
    for mesh, settings in (
        ("dp=2,tp=2", {"stream": SEQUENCE}),
        ("cp=2", {"microbatches": 2, "remat": True}),
    ):
        got, values = delayed_steps(mesh, **settings)
        assert torch.equal(got["histories"], history)
        close(values, losses)
        close(got["up"], want["up"])


def test_scales_are_of_the_steps_before():
    recipe = RECIPES["fp8-delayed"]
    x, w, dy = randn(1, 8, 32), randn(32, 16), randn(1, 8, 16)
    history = torch.zeros(3, HISTORY)
    history[:, 7] = torch.tensor([2.0, 0.5, 8.0])
    layer = product(recipe)
    y, pull = torch.func.vjp(layer, x, w, history)
    dx, dw, counts = pull(dy)

    def known(m, form, most):
        q = quantise(m, QuantisedFormat.parse(form), torch.tensor(most))
        return dequantise(q).double()

    flat, d = x[0], dy[0]
    x_, w_ = known(flat, "e4m3@tensor", 2.0), known(w, "e4m3@tensor", 0.5)
    d_ = known(d, "e5m2@tensor", 8.0)
    assert x_.abs().max() == 2  # saturated
    close(y[0], x_ @ w_)
    close(dx[0], d_ @ w_.mT)
    close(dw, x_.mT @ d_)
    after = remember(history, counts)[:, -1]
    seen = torch.stack([m.abs().max() for m in (x, w, dy)])
    assert ((seen <= after) & (after < 1.25 * seen)).all()
    with pytest.raises(
        ValueError, match=r"(?s)history: got None; wanted float32 of shape \(3, 256\)"
    ):
        layer(x, w)
    with pytest.raises(ValueError, match=r"history: got torch.float32 of shape .*; wanted None"):
        product(RECIPES["fp8-tensor"])(x, w, history)
    # experts have histories of their own: each one's rows as those of a layer
    sizes, w = torch.tensor([3, 0, 4]), randn(3, 32, 16)
    rows, dy = x[0], dy[0]
    dy[7] = rows[7] = torch.nan  # of no expert
    several = torch.stack([history, history, history * 4])
    experts = grouped_product(recipe, path="experts")
    y, pull = torch.func.vjp(lambda x, w, h: experts(x, w, sizes, history=h), rows, w, several)
    got = (y, *pull(dy))
    for e, at in enumerate((slice(0, 3), slice(3, 3), slice(3, 7))):
        y, pull = torch.func.vjp(layer, rows[None, at], w[e], several[e])
        dx, dw, counts = pull(dy[None, at])
        for a, b in zip(got, (y[0], dx[0], dw, counts), strict=True):
            close(a[e] if len(a) == 3 else a[at], b)
    with pytest.raises(
        ValueError, match=r"(?s)experts.*history: got .*wanted float32 of shape \(3, 3"
    ):
        experts(rows, w, sizes, history=history)
    with pytest.raises(ValueError, match=r"(?s)dgrad: got .*e4m3@row.*by tensors"):
        Recipe.parse("fprop=high dgrad=e4m3@row*e4m3@row wgrad=high scaling=delayed")
    assert history_def(4).shape == (4, 3, HISTORY)


# --- what it refuses


def test_sizes_that_blocks_do_not_divide(operands):
    w = randn(256, 128).requires_grad_()
    block, small = (product(RECIPES[name], path="layers/up") for name in ("fp8-block", "mxfp8"))
    with pytest.raises(
        ValueError,
        match=r"(?s)layers/up, inputs \(fprop\): got 200; wanted a multiple of 32.*192 or 224",
    ):
        small(randn(2, 128, 200), randn(200, 128))
    with pytest.raises(
        ValueError, match=r"(?s)layers/up, tokens \(wgrad\): got 100.*make it 128 on"
    ):
        block(randn(2, 100, 256), w)
    zigzag = product(RECIPES["fp8-block"], runs=2)
    with pytest.raises(ValueError, match=r"tokens \(wgrad\): got 128; wanted a multiple of 256"):
        zigzag(randn(2, 128, 256), w)
    assert block(randn(2, 100, 256), w.detach()).shape == (2, 100, 128)  # forward needs no tokens
    # squares of activations have whole blocks of tokens, and of what ranks share
    squares = "e4m3@128x128*e4m3@1x128", "e4m3@1x128*e4m3@128x128"
    first = product(Recipe.parse(f"fprop={squares[0]} dgrad=high wgrad=high"))
    with pytest.raises(ValueError, match=r"tokens \(fprop\): got 200; wanted a multiple of 128"):
        first(randn(2, 100, 200), randn(200, 130))
    assert first(randn(2, 64, 200), randn(200, 130)).shape == (2, 64, 130)
    last = product(Recipe.parse(f"fprop=high dgrad=high wgrad={squares[1]}"), outer="tp")
    split = ft.shard_map(last, Mesh(tp=2), (P(), P(None, "tp")), P(None, "tp"))
    with pytest.raises(ValueError, match=r"outputs \(wgrad\): got 96; wanted a multiple of 128"):
        torch.func.vjp(split, randn(128, 200), randn(200, 192))
    assert torch.func.vjp(split, randn(128, 200), randn(200, 256))[0].shape == (128, 256)
    with pytest.raises(ValueError, match=r"tokens \(fprop\): got 1; wanted a multiple of 128"):
        grouped_product(Recipe.parse(f"fprop={squares[0]} dgrad=high wgrad=high"))(
            randn(128, 256), randn(1, 256, 128), torch.tensor([128])
        )
    params, x, _ = operands
    mapped = ft.shard_map(pair(RECIPES["fp8-block"], WHOLE), Mesh(tp=8), (SPECS, WHOLE), WHOLE)
    with pytest.raises(
        ValueError, match=r"up, outputs \(fprop\): got 64; wanted a multiple of 128"
    ):
        mapped(params, x)


def in_blocks(x: Tensor, rows: int) -> Tensor:
    """Rounded to E4M3 under a scale for each block of `rows` and 128 columns, by NumPy."""
    x = x.float().numpy()
    y = np.zeros(x.shape)
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], 128)):
        at = slice(i, i + rows), slice(j, j + 128)
        by = np.float32(448) / np.abs(x[at]).max()
        y[at] = (x[at] * by).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * (1 / by)
    return torch.from_numpy(y)


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 320), (200, 130), (320, 576), (1, 1)])
@pytest.mark.parametrize("experts", [False, True])
def test_weights_that_blocks_do_not_divide(inputs, outputs, experts):
    """Blocks at the ends are smaller: the three products are float64's of what each decodes to.

    Experts' gradients have one scale for each feature, as they sum a number of rows that is data.
    """
    x, w, dy = randn(128, inputs), randn(inputs, outputs, seed=1), randn(128, outputs, seed=2)
    if experts:
        run = grouped_product(RECIPES["fp8-block"])
        layer = lambda x, w: run(x, w[None], torch.tensor([128]))
    else:
        layer = product(RECIPES["fp8-block"])
    y, pull = torch.func.vjp(layer, x, w)
    dx, dw = pull(dy)
    close(y, in_blocks(x, 1) @ in_blocks(w, 128))
    close(dx, in_blocks(dy, 1) @ in_blocks(w.mT, 128))
    close(dw, in_blocks(x.mT, 1) @ in_blocks(dy.mT, 1).mT)
    low = [v.bfloat16().requires_grad_() for v in (x, w)]
    out = layer(*low)
    assert [v.shape for v in torch.autograd.grad(out, low, dy.bfloat16())] == [x.shape, w.shape]


ODD = 200  # of the stream, and of a layer that no axis splits
ODD_SPECS = {**SPECS, "narrow": P()}


def odd(stream: P):
    """A layer that every rank of tp has, before a pair that it splits, all of odd widths."""
    recipe, tokens = RECIPES["fp8-block"], P(DATA_AXES, "cp")
    splits = "tp" in stream[1]

    def layer(params, x):
        own = P(DATA_AXES, ("cp", "tp")) if splits else tokens
        narrow = product(recipe, rows=own, partial=() if splits else "tp", path="narrow")
        up = product(recipe, outer="tp", rows=tokens, path="up")
        down = product(recipe, inner="tp", rows=tokens, path="down")
        h = nn.gather_sequence(narrow(x, params["narrow"]), stream)
        h = down(torch.tanh(up(h, params["up"])), params["down"])
        return nn.reduce_partial(h, stream)

    return layer


@pytest.mark.parametrize("name", ["tp=2", "dp=2,tp=2", "tp=2 sequence", "tp=2,cp=2", "fsdp=2"])
def test_incomplete_blocks_on_every_mesh(name):
    """Of dims that are whole on every rank; where one is split within a block it is refused."""
    mesh, *split = name.split()
    stream = SEQUENCE if split else WHOLE
    params = {
        "narrow": randn(ODD, 130, seed=4) / 14,
        "up": randn(130, MLP) / 11,
        "down": randn(MLP, ODD, seed=1) / 22,
    }
    x, dy = randn(2, SEQ, ODD, seed=2), randn(2, SEQ, ODD, seed=3)
    y, pull = torch.func.vjp(odd(WHOLE), params, x)
    layer = odd(stream)

    def inside(dy, params, x):
        def loss(params, x):
            return lax.psum((layer(params, x) * dy).sum(), spec_axes(stream))

        grads = ft.grad(loss, (0, 1))(params, x)
        return layer(params, x), ft.sync_gradients(grads, (ODD_SPECS, stream))

    specs = stream, ODD_SPECS, stream
    step = ft.shard_map(inside, Mesh.parse(mesh), specs, (stream, specs[1:]))
    got, gradients = step(dy, params, x)
    close(got, y)
    close(gradients, pull(dy))
    params["up"], params["down"] = randn(130, 576), randn(576, ODD)
    if "tp" in mesh:
        wanted = r"up, outputs \(fprop\): got 288; wanted a multiple of 128.*over fewer ranks"
        with pytest.raises(ValueError, match=wanted):
            step(dy, params, x)
    else:
        assert step(dy, params, x)[0].isfinite().all()


def test_memory_of_incomplete_blocks():
    """Tensor cores are given padded copies, which the program's memory has."""

    def extra(inputs, outputs):
        given = torch.empty(128, inputs), torch.empty(inputs, outputs)
        program = ft.trace(product(RECIPES["fp8-block"]))(*given)
        (moment,) = [m for m in program.memory().timeline if m.equation == "scaled_matmul"]
        (equation,) = [e for e, _ in program.block.walk() if e.name == "scaled_matmul"]
        there = (*given, *equation.operands, *equation.results)
        return moment.total - sum(value.nbytes for value in there)

    assert extra(512, 256) == 0
    # 384 inputs of both, of 640 outputs; and the result of these
    assert extra(320, 576) == 128 * 384 + 640 * 384 + 4 * 128 * 640
    assert extra(384, 576) == 640 * 384 + 4 * 128 * 640


def test_what_is_drawn_needs_a_key():
    with pytest.raises(ValueError, match=r"(?s)quantised product of up.*key: got None.*fold_in"):
        torch.func.vjp(product(RECIPES["nvfp4"], path="up"), randn(128, 128), randn(128, 128))
    with pytest.raises(ValueError, match=r"(?s)rows: got None.*spec of the tokens"):
        torch.func.vjp(product(RECIPES["nvfp4"], key=KEY), randn(128, 128), randn(128, 128))
    mixed = replace(RECIPES["nvfp4"], fprop=RECIPES["nvfp4"].wgrad)
    with pytest.raises(ValueError, match=r"(?s)quantised product of up.*key: got None.*fold_in"):
        product(mixed, path="up")


BAD = [torch.inf, torch.nan, -torch.inf]


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))], ids=str
)
@pytest.mark.parametrize("experts", [False, True])
def test_nothing_that_overflows_is_hidden(turn, experts):
    """One NaN or infinity in x, w or dy is in every number that it is part of, in all recipes."""
    sizes = torch.tensor([64, 64])
    for name, recipe in RECIPES.items():
        history = torch.ones(3, HISTORY) if recipe.scaling == "delayed" else None
        if experts:
            several = None if history is None else torch.stack([history] * 2)
            made = grouped_product(recipe)
            run = lambda x, w, made=made, h=several: made(x, w, sizes, history=h)
        else:
            made = product(recipe, key=KEY, rows=P())
            run = lambda x, w, made=made, h=history: made(x, w[0], h)
        for number, operand in enumerate(("x", "w", "dy")):
            x, w, dy = randn(128, 128), randn(2, 128, 128), randn(128, 128)
            {"x": x[3], "w": w[0, 3], "dy": dy[3]}[operand][5] = BAD[(number + turn) % 3]
            y, pull = torch.func.vjp(run, x, w)
            dx, dw = pull(dy)
            rows = slice(64) if experts else slice(None)
            seen = {
                "x": (y[3], dw[0, 5]), "w": (y[rows, 5], dx[rows, 3]), "dy": (dx[3], dw[0, :, 5])
            }[operand]  # fmt: skip
            for part in seen:
                assert part.isnan().all(), (name, operand)


def test_microbatches_and_positions():
    """Tokens say by `index` where they are: halves of a batch are rounded as the whole is."""
    recipe = RECIPES["nvfp4"]
    x, w, dy = randn(2, 128, EMBED), randn(EMBED, 128), randn(2, 128, 128, seed=1)

    def dx(rows):
        layer = product(recipe, key=KEY, rows=P(), index=(rows, None))
        return torch.func.vjp(lambda x: layer(x, w), x[rows])[1](dy[rows])[0]

    whole = product(recipe, key=KEY, rows=P())
    want = torch.func.vjp(lambda x: whole(x, w), x)[1](dy)[0]
    # magnitudes of tensors are those of what is there: the same for both halves here
    x[1], dy[1] = x[0], dy[0]
    want = torch.func.vjp(lambda x: whole(x, w), x)[1](dy)[0]
    parts = [dx(torch.tensor([i])) for i in (0, 1)]
    assert torch.equal(torch.cat(parts), want)
    assert not torch.equal(parts[0], parts[1])


def both_gradients(x, w, dy):
    """Of layers of two recipes."""

    def of(name):
        layer = product(RECIPES[name], key=KEY, rows=P())
        return ft.grad(lambda x, w: (layer(x, w) * dy).sum(), (0, 1))(x, w)

    return of("fp8-tensor"), of("nvfp4")


@pytest.fixture
def small():
    return [v.float() for v in (randn(2, 128, 128), randn(128, 64), randn(2, 128, 64, seed=1))]


def test_traced(small):
    """The program has one equation for each operand and product, with their FLOPs by dtype."""
    program = ft.trace(both_gradients)(*small)
    names = [equation.name for equation, _ in program.block.walk()]
    assert names.count("quantise") == 12
    assert names.count("scaled_matmul") == 6
    assert names.count("hadamard") == 2
    assert names.count("mm") == 0
    assert "'e5m2@tensor'" in str(program)
    assert "'e2m1@1x16+stochastic'" in str(program)
    flops, found = 2 * 256 * 128 * 64, program.cost()
    by_dtype = {torch.float4_e2m1fn_x2: 3, torch.float8_e4m3fn: 2, torch.float8_e5m2: 1}
    assert found.flops_by_dtype == {dtype: many * flops for dtype, many in by_dtype.items()}
    assert "f8_e5m2" in str(found)
    want = tree.leaves(both_gradients(*small))
    assert all(map(torch.equal, tree.leaves(program(*small)), want))

    def again(*args):  # as pipelines run parts of a program, here for two ranks at once
        environment = ambient_inputs(program.inputs)
        environment.update(zip(program.block.inputs, args, strict=False))
        return run_block(program.block, environment)

    mapped = torch.func.vmap(again)(*(torch.stack([v, v]) for v in small))
    assert all(torch.equal(got[1], one) for got, one in zip(mapped, want, strict=True))


@pytest.mark.full
def test_compiled(small):
    """Operands are the same bits, so codes and sums are."""
    got, want = ft.jit(both_gradients)(*small), both_gradients(*small)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))


# --- experts


@pytest.mark.parametrize("name", CURRENT)
def test_experts_by_hand(name):
    """Each expert's products are those of its rows alone, by the recipe for rows; others have none.

    Rows of no expert hold NaN, which reaches nothing.
    """
    recipe = RECIPES[name].grouped()
    sizes, rows = torch.tensor([5, 0, 7]), 15
    x, w, dy = randn(rows, 128), randn(3, 128, 256, seed=1), randn(rows, 256, seed=2)
    x[:5] *= 9
    x[12:] = dy[12:] = torch.nan
    y, pull = torch.func.vjp(lambda x, w: grouped_product(RECIPES[name])(x, w, sizes), x, w)
    dx, dw = pull(dy)
    assert (dw[1] == 0).all()
    for g, at in ((0, slice(0, 5)), (2, slice(5, 12))):
        ops = {"fprop": (x[at], w[g].mT), "dgrad": (dy[at], w[g]), "wgrad": (x[at].mT, dy[at].mT)}
        got = {"fprop": y[at], "dgrad": dx[at], "wgrad": dw[g]}
        for part, (a, b) in ops.items():
            how = getattr(recipe, part)
            want = decoded(a, how.left) @ decoded(b, how.right).mT
            torch.testing.assert_close(got[part], want, rtol=1e-12, atol=1e-11)


EXPERTS, HIDDEN = 4, 128
LAYOUTS = {  # mesh, axes of experts, stream
    "ep=2": (("ep",), WHOLE),
    "dp=2,ep=2,tp=2": (("ep",), WHOLE),
    "ep=2,tp=2 folded": (("ep", "tp"), SEQUENCE),
}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=[] if name == (by_default or name) else pytest.mark.full)
        for recipe, by_default in (
            ("fp8-tensor", ""), ("fp8-row", "dp=2,ep=2,tp=2"), ("mxfp8", "ep=2,tp=2 folded"),
            ("fp8-block", "ep=2"),
        )
        for name in LAYOUTS
        if recipe != "fp8-block" or "dp=2" not in name  # 64 of an expert's 128 on each rank of tp
    ],
)  # fmt: skip
def test_a_layer_of_experts_on_every_mesh(recipe, name, monkeypatch):
    """Rows sorted by expert, from all ranks: the numbers of one device, and their gradients."""
    config = MoEConfig(num_experts=EXPERTS, top_k=2, expert_dim=HIDDEN, renormalise=True)
    axes, stream = LAYOUTS[name]
    defs = moe_defs(config, 32, gated=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    params = tree.map(lambda d: randn(*d.shape, seed=len(d.shape) + d.shape[-1]) / 6, defs)
    x, dy = randn(4, 16, 32), randn(4, 16, 32, seed=1)

    def products(axes):
        split = () if "tp" in axes else ("tp",)

        def grouped(rows, w, *rest):
            of = {"outer": split} if rows.shape[1] == 32 else {"inner": split}
            return grouped_product(RECIPES[recipe], experts=axes, **of)(rows, w, *rest)

        monkeypatch.setattr(moe_layer, "grouped_matmul", grouped)

    def layer(params, x, rows, positions):
        y, _, _ = moe(
            params, x, config, activation="silu", stream=stream, axes=axes, rows=rows,
            positions=positions, counted=positions >= 0,
        )  # fmt: skip
        return y

    rest = torch.arange(4), torch.arange(16).expand(4, 16)
    products(("ep",))
    want, pull = torch.func.vjp(lambda *moving: layer(*moving, *rest), params, x)
    products(axes)
    mesh = Mesh.parse(name.split()[0])
    rules = {"expert": axes, "expert_mlp": None if "tp" in axes else "tp", "mlp": "tp"}
    in_specs = ft.param_specs(defs, Rules(rules)), stream
    specs = (*in_specs, P(DATA_AXES), stream)

    def inside(dy, params, x, *rest):
        def loss(*moving):
            return lax.psum((layer(*moving, *rest) * dy).sum(), spec_axes(stream))

        grads = ft.grad(loss, (0, 1))(params, x)
        return layer(params, x, *rest), ft.sync_gradients(grads, in_specs)

    step = ft.shard_map(inside, mesh, (stream, *specs), (stream, in_specs))
    got, gradients = step(dy, params, x, *rest)
    close(got, want)
    for a, b in zip(tree.leaves(gradients), tree.leaves(pull(dy)), strict=True):
        close(a, b)


def test_layers_at_the_ends_and_logits_keep_torchs_products():
    low = nn.Matmul(first=1, last=2)
    assert [low.of_layer(i, 5) is nn.MATMUL for i in range(6)] == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    assert low.of_logits is nn.MATMUL
    assert low._replace(logits=True).of_logits is not nn.MATMUL
