"""Gathering at use: the numbers of the function itself, and what is sent and kept for it."""

from __future__ import annotations

import importlib

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, tree
from functron.transforms import Gather, fsdp, policies, remat, scan
from functron.transforms.parameter_gather import Encoded, MatrixCode, attach_codes
from functron.transforms.scan import accumulate

DIM, ROWS, LAYERS = 8, 4, 3
MESHES = [
    Mesh(fsdp=2),
    Mesh(fsdp=4),
    Mesh(dp=2, fsdp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(dp=2, fsdp=2, tp=2),
]
SPECS = {
    "up": P("fsdp", "tp"),
    "down": P("tp", "fsdp"),
    "scale": P("fsdp"),
    "shift": P(),
    "both": P(("tp", "fsdp")),
}


def params(dtype=torch.float64, layers: int | None = None) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (DIM, 16), "down": (16, DIM), "scale": (DIM,), "shift": (DIM,), "both": (16,)}
    lead = () if layers is None else (layers,)
    return {
        name: torch.randn(*lead, *shape, generator=generator, dtype=dtype) / 2
        for name, shape in shapes.items()
    }


def inputs(dtype=torch.float64) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


def block(w, x):
    """One tensor-parallel layer; "both" is whole but for tp, and split by it."""
    y = torch.tanh(x @ w["up"] + w["both"])
    return x + lax.psum(y @ w["down"], "tp") * w["scale"] + w["shift"]


def dense_loss(w, x):
    return block(w, x).square().mean()


def mean_loss(f):
    return lambda w, x: lax.pmean(f(w, x).square().mean(), ("dp", "fsdp"))


def gradients(f, mesh, specs=SPECS, **options):
    def program(w, x):
        value, grads = ft.value_and_grad(mean_loss(f))(w, x)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, P(("dp", "fsdp"))), (P(), specs), **options)


def assert_close(got, want, tolerance=1e-12):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, path=path: f"{path}: {m}"
        )


def counts(f, *args) -> dict:
    """How many of each collective run over fsdp, by phase."""
    rows = ft.trace(f)(*args).cost().collectives
    return {(row.op, row.phase): row.count for row in rows if row.axis == "fsdp"}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("regather", [True, False])
def test_gradients_are_those_of_the_function(mesh, regather):
    w, x = params(), inputs()
    want = torch.func.grad_and_value(dense_loss)(w, x)
    f = gradients(fsdp(block, SPECS, regather=regather), mesh)
    value, grads = f(w, x)
    assert_close((grads, value), want)
    traced = ft.trace(f)(w, x)
    traced.check()
    got = traced(w, x)
    assert_close((got[1], got[0]), want)


@pytest.mark.parametrize("policy", [policies.nothing, policies.dots], ids=["nothing", "dots"])
@pytest.mark.parametrize("outside", [True, False])
def test_composes_with_remat_and_scan(policy, outside):
    w, x = params(layers=LAYERS), inputs()
    specs = tree.map(lambda s: P(None, *s), SPECS, is_leaf=lambda s: isinstance(s, P))

    def dense(w, x):
        for i in range(LAYERS):
            x = block(tree.map(lambda leaf, i=i: leaf[i], w), x)
        return x.square().mean()

    layer = remat(fsdp(block, SPECS), policy=policy) if outside else fsdp(
        remat(block, policy=policy), SPECS
    )  # fmt: skip

    def model(w, x):
        return scan(lambda x, row: (layer(row, x), None), x, w)[0]

    f = gradients(model, Mesh(dp=2, fsdp=2, tp=1), specs)
    want = torch.func.grad_and_value(dense)(w, x)
    value, grads = f(w, x)
    assert_close((grads, value), want)
    got = ft.trace(f)(w, x)(w, x)
    assert_close((got[1], got[0]), want)
    # whichever is around the other, backward gathers once more, and not twice
    assert counts(f, w, x) == {
        ("all_gather", "forward"): LAYERS,
        ("all_gather", "recompute"): LAYERS,
        ("psum_scatter", "backward"): LAYERS,
        ("psum", "forward"): 1,
        ("psum", "backward"): 1 + 1,
    }


def test_torch_func_transforms():
    """Hessian-vector products, forward mode, and a vmap of the user's own inside the program."""
    w, x = params(), inputs()
    f = fsdp(block, SPECS)
    mapped = ft.shard_map(mean_loss(f), Mesh(dp=2, fsdp=2), (SPECS, P(("dp", "fsdp"))), P())
    direction = tree.map(torch.cos, w)

    def product(loss):
        return torch.func.jvp(lambda w: torch.func.grad(loss)(w, x), (w,), (direction,))[1]

    assert_close(product(mapped), product(dense_loss))

    def each(w, x):
        return lax.pmean(
            torch.func.vmap(lambda row: f(w, row).square().mean())(x).mean(), ("fsdp",)
        )

    got = torch.func.grad(ft.shard_map(each, Mesh(fsdp=2), (SPECS, P("fsdp")), P()))(w, x)
    assert_close(got, torch.func.grad(dense_loss)(w, x))


def test_small_leaves_travel_together_and_large_ones_alone():
    w = {
        "a": torch.ones(8, 4),
        "b": torch.ones(8),
        "large": torch.ones(1 << 19, 2),
        "c": torch.ones(2, 2),
    }
    specs = {"a": P("fsdp"), "b": P("fsdp"), "large": P("fsdp"), "c": P()}
    x = torch.ones(2, 1)

    def total(w, x):
        return sum(leaf.square().sum() for leaf in tree.leaves(w)) * x

    f = gradients(fsdp(total, specs), Mesh(fsdp=2), specs)
    assert counts(f, w, x) == {
        ("all_gather", "forward"): 2,
        ("all_gather", "recompute"): 2,
        ("psum_scatter", "backward"): 2,
        ("psum", "forward"): 1,
        ("psum", "backward"): 2,  # the transpose of the mean; the gradient of c
    }


@pytest.mark.parametrize(
    ("regather", "gathered"), [(True, 2), (False, 1)], ids=["regather", "kept"]
)
def test_bytes_are_those_of_the_formula(regather, gathered):
    w, x = {"up": torch.ones(DIM, 32)}, torch.ones(8, DIM)
    specs, size = {"up": P("fsdp")}, 4 * DIM * 32
    f = gradients(
        fsdp(lambda w, x: torch.tanh(x @ w["up"]) @ w["up"].mT, specs, regather=regather),
        Mesh(fsdp=4),
        specs,
    )
    rows = ft.trace(f)(w, x).cost().collectives
    sent = {
        op: sum(r.sent_bytes for r in rows if r.op == op) for op in ("all_gather", "psum_scatter")
    }
    assert sent == {"all_gather": gathered * size * 3 // 4, "psum_scatter": size * 3 // 4}


def test_mixed_precision():
    """bf16 is computed and sent; gradients are added in the dtype asked for, and become fp32."""
    w = {"up": torch.randn(DIM, 32, generator=torch.Generator().manual_seed(0))}
    x, specs, mesh = inputs(torch.bfloat16), {"up": P("fsdp")}, Mesh(fsdp=4)
    seen = []

    def f(w, x):
        seen.append(w["up"].dtype)
        return torch.tanh(x @ w["up"]).float()

    for reduce_dtype, size in ((torch.float32, 4), (None, 2)):
        mapped = gradients(
            fsdp(f, specs, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype), mesh, specs
        )
        _, grads = mapped(w, x)
        assert grads["up"].dtype == torch.float32
        rows = {
            r.op: r.payload_bytes
            for r in ft.trace(mapped)(w, x).cost().collectives
            if r.phase != "recompute"
        }
        assert rows["all_gather"] == 2 * w["up"].numel()
        assert rows["psum_scatter"] == size * w["up"].numel()
        # by hand: each rank's bf16 gradient, added up in that dtype
        parts = []
        for rank in range(4):
            leaf = w["up"].bfloat16().requires_grad_()
            y = torch.tanh(x[rank : rank + 1] @ leaf).float().square().mean() / 4
            parts.append(torch.autograd.grad(y, leaf)[0].to(reduce_dtype or torch.bfloat16))
        want = torch.stack(parts).sum(0).float()
        torch.testing.assert_close(grads["up"], want, rtol=1e-6, atol=1e-8)
    assert set(seen) == {torch.bfloat16}


def test_sums_over_two_axes_in_reduce_dtype():
    """Summed in float32 all the way: bf16 would lose what the second axis adds."""
    w = {"a": torch.zeros(4)}
    specs = {"a": P(("dp", "fsdp"))}

    def program(w, x):
        f = fsdp(lambda w, x: (w["a"].float() * x).sum(), specs, axes=("dp", "fsdp"),
                 compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # fmt: skip
        return torch.func.grad(f)(w, x[0])

    x = torch.tensor([1.0, 2**-9, 2**-9, 2**-10])  # each a bf16; so is no partial sum
    mapped = ft.shard_map(program, Mesh(dp=2, fsdp=2), (specs, P(("dp", "fsdp"))), specs)
    assert mapped(w, x)["a"].tolist() == [1 + 2**-8 + 2**-10] * 4


def test_the_tape_keeps_shards_where_it_gathers_again(peak_bytes, monkeypatch):
    """On one rank whose gather doubles: between forward and backward the copies are gone."""
    module = importlib.import_module(
        "functron.transforms.parameter_gather"
    )  # the name is the function's

    class Doubling:
        name, size, token = "fsdp", 2, None

    monkeypatch.setattr(module, "lookup", lambda names: [Doubling()] if "fsdp" in names else [])
    monkeypatch.setattr(module, "_all_gather", lambda x, *_: torch.stack([x, x]))
    w = [torch.randn(128, 256).requires_grad_() for _ in range(8)]  # 128 KiB each, 256 gathered
    x = torch.ones(1, 256).requires_grad_()

    def forward(regather):
        y = x
        layer = fsdp(lambda w, y: torch.tanh(y @ w), P("fsdp"), regather=regather)
        for leaf in w:
            y = layer(leaf, y)
        return y.sum()

    size = 256 * 1024
    assert 8 * size <= peak_bytes(lambda: forward(False)) < 9 * size
    shards = 4 * size  # which the tape keeps instead
    assert shards <= peak_bytes(lambda: forward(True)) < shards + 3 * size
    got, want = (torch.autograd.grad(forward(regather), w) for regather in (True, False))
    assert_close(got, want, 0)


@pytest.mark.parametrize("regather", [True, False])
def test_codes_travel_in_place_of_a_parameter(regather):
    """Of integers, in 32 bits for 64: the gradient is that of the numbers, which nobody sends."""
    generator, x = torch.Generator().manual_seed(0), inputs()
    w = {
        "up": torch.randint(-4, 5, (DIM, 4, 4), generator=generator).double(),
        "down": torch.randint(-4, 5, (4, 4, DIM), generator=generator).double(),
    }
    specs = {"up": P("fsdp", "tp"), "down": P("tp", None, "fsdp")}
    product = ft.custom_vjp(
        lambda x, like, code: x @ code.double(),
        lambda x, like, code: (x @ code.double(), (x, code)),
        lambda kept, dy: (dy @ kept[1].double().mT, kept[0].mT @ dy, None),
    )

    def linear(x, w, start, end):
        if not isinstance(w, Encoded):
            return x @ w.flatten(start, end)
        return product(x, w.flatten(start, end).like, w.codes[0].both[0])

    def layer(w, x):
        return lax.psum(linear(torch.tanh(linear(x, w["up"], 1, 2)), w["down"], 0, 1), "tp")

    def coded(w, x):
        codes = {
            name: Encoded(None, (MatrixCode((value.flatten(*dims).detach().int(),)),))
            for name, value, dims in (("up", w["up"], (1, 2)), ("down", w["down"], (0, 1)))
        }
        return fsdp(layer, specs, regather=regather)(attach_codes(w, codes), x)

    f = gradients(coded, Mesh(fsdp=2, tp=2), specs)
    value, grads = f(w, x)
    want = torch.func.grad_and_value(lambda w, x: layer(w, x).square().mean())(w, x)
    assert_close((grads, value), want)
    rows = ft.trace(f)(w, x).cost().collectives
    size = tree.nbytes(w) // 2  # of this rank's part over tp
    rows = [row for row in rows if row.axis == "fsdp"]
    sent = {row.op: sum(r.payload_bytes for r in rows if r.op == row.op) for row in rows}
    assert sent["all_gather"] == size // 2 * (1 + regather)
    assert sent["psum_scatter"] == size


def test_says_what_it_cannot_gather():
    w = {"a": torch.ones(8), "b": torch.ones(8, 8)}
    given = {"a": P(("fsdp", "tp")), "b": P("fsdp")}

    def program(w):
        fsdp(lambda w: w, {"a": given["a"], "b": P("fsdp", None, None)})(w)
        return torch.zeros(())

    with pytest.raises(ValueError, match="fsdp cannot gather") as caught:
        ft.shard_map(program, Mesh(fsdp=2, tp=2), (given,), P())(w)
    text = str(caught.value)
    assert "write that dim as ('tp', 'fsdp')" in text
    assert "the specs of one row" in text


def test_dtypes_must_be_floating():
    with pytest.raises(TypeError, match=r"compute_dtype: got torch\.int32"):
        fsdp(lambda w: w, P(), compute_dtype=torch.int32)


def test_without_a_mesh_it_is_the_block():
    w, x = params(), inputs()
    assert torch.equal(fsdp(block, SPECS)(w, x), block(w, x))
    assert Gather().at("anything")(w) is not None
    for a, b in zip(tree.leaves(Gather()(w)), tree.leaves(w), strict=True):
        assert a is b


def test_microbatches_gather_each():
    w, x = (
        {"up": torch.randn(DIM, 8, dtype=torch.float64)},
        torch.randn(8, DIM, dtype=torch.float64),
    )
    specs = {"up": P("fsdp")}
    f = fsdp(lambda w, x: torch.tanh(x @ w["up"]), specs)

    def program(w, x):
        both = accumulate(ft.value_and_grad(lambda w, x: lax.psum(f(w, x).sum(), "fsdp")), 2)
        value, grads = both(w, x)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(program, Mesh(fsdp=2), (specs, P("fsdp")), (P(), specs))
    grads, value = torch.func.grad_and_value(lambda w: torch.tanh(x @ w["up"]).sum())(w)
    got = mapped(w, x)
    assert_close((got[1], got[0]), (grads, value))
    assert counts(mapped, w, x)[("all_gather", "forward")] == 2
