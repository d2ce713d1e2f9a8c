"""Search: the specs that Megatron's papers have, and those that send least of all there are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import P
from functron.partitioning import search
from functron.transforms.custom_vjp import custom_vjp

pytest.importorskip("scipy")

SHAPES = {
    "q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64),
    "gate": (64, 256), "up": (64, 256), "down": (256, 64), "norm": (64,), "mlp_norm": (64,),
}  # fmt: skip
BLOCK = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
X = torch.empty(4, 32, 64, device="meta")


def rms_norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def block(w, x):
    """Eight heads of queries, four of keys and values."""
    h = rms_norm(x, w["norm"])
    q, k, v = ((h @ w[n]).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ w["o"]
    h = rms_norm(x, w["mlp_norm"])
    return x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def mlp(w, x):
    return x + torch.relu(x @ w["up"]) @ w["down"]


def held(w) -> int:
    return sum(value.nbytes for value in w.values())


def one_more_sends(layer, w, specs, x, x_spec, axis: str, size: int) -> float:
    """The bytes over an axis that one more layer adds to a training step, forward and backward.

    Infinitely many where all ranks compute products of all of it.
    """

    def step(layers, x):
        def loss(layers):
            h = x
            for w in layers:
                h = layer(w, h)
            return h.square().mean()

        return ft.value_and_grad(loss)(layers)

    costs = []
    for depth in (1, 2):
        layout = ([specs] * depth, x_spec), (P(), [specs] * depth)
        mapped = ft.partition(step, ft.Mesh(**{axis: size}), *layout, pick="cheapest")
        costs.append(ft.trace(mapped)([w] * depth, x).cost())
    flops = 6 * x.numel() * 64 * 2 // size  # of two products, forward and twice in backward
    if costs[1].hardware_flops - costs[0].hardware_flops > flops:
        return math.inf
    return costs[1].sent_bytes(axis) - costs[0].sent_bytes(axis)


@pytest.mark.parametrize("spec", [P("dp"), P("dp", "tp")], ids=["tp", "tp and sequence"])
def test_megatrons_layout_of_a_block_is_found(spec):
    """Columns, then rows, of attention and of the MLP (Shoeybi et al. 2019, section 3)."""

    def loss(w, x):
        return ft.constrain(block(w, x), spec).square().mean()

    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), P(None, "tp"))
    megatron = {**columns, "o": P("tp"), "down": P("tp"), "norm": P(), "mlp_norm": P()}
    mesh, bound = ft.Mesh(dp=2, tp=4), int(0.3 * held(BLOCK))
    found = search(loss, mesh, (P(), spec), BLOCK, X, axes=("tp",), memory_bytes=bound)
    assert found.specs == megatron
    assert found.memory_bytes == (held(BLOCK) - 2 * 256) // 4 + 2 * 256
    # of a dp rank's stream: two all-reduces forward, two backward, or a gather and a reduce-scatter
    # for each; gradients of both norms; and the loss of what is split
    stream, norms, mean = 2 * 32 * 64 * 4, 2 * 256, 2 * 4 * (spec != P("dp"))
    assert found.cost == pytest.approx(1.5 * (4 * stream + norms + mean))


@pytest.mark.parametrize(("axis", "spec", "part"), [("tp", P(), 0.6), ("fsdp", P("fsdp"), 0.8)])
def test_no_other_specs_that_fit_send_less(axis, spec, part):
    """All 9 ways to split two matrices, partitioned; what one more layer sends is the cost."""
    w = {"up": torch.empty(16, 64, device="meta"), "down": torch.empty(64, 16, device="meta")}
    x, bound = torch.empty(16, 8, 16, device="meta"), int(part * held(w))

    def loss(w, x):
        return mlp(w, x).square().mean()

    mesh = ft.Mesh(**{axis: 4})
    found = search(loss, mesh, (P(), spec), w, x, axes=(axis,), memory_bytes=bound)
    sends = {}
    for up, down in itertools.product((P(), P(axis), P(None, axis)), repeat=2):
        specs = {"up": up, "down": down}
        if sum(w[n].nbytes // (4 if s else 1) for n, s in specs.items()) <= bound:
            sends[up, down] = one_more_sends(mlp, w, specs, x, spec, axis, 4)
    chosen = found.specs["up"], found.specs["down"]
    assert sends[chosen] == min(sends.values()) < math.inf
    loss_too = 0 if axis == "tp" else 2 * 1.5 * 4  # which the difference of two depths lacks
    assert found.cost == pytest.approx(sends[chosen] + loss_too)


def test_functions_with_a_backward_of_their_own_count_as_their_forward():
    """As BLOOM's activation: the specs and what they cost are those without the rule."""
    w = {"up": torch.empty(16, 64, device="meta"), "down": torch.empty(64, 16, device="meta")}
    x = torch.empty(16, 8, 16, device="meta")
    relu = custom_vjp(torch.relu, lambda x: (torch.relu(x), x), lambda x, dy: (dy * (x > 0),))
    found = [
        search(lambda w, x, f=f: (x + f(x @ w["up"]) @ w["down"]).square().mean(), ft.Mesh(tp=4),
               (P(), P()), w, x, axes=("tp",), memory_bytes=int(0.6 * held(w)))
        for f in (torch.relu, relu)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_mistakes_are_told():
    def stacked(w, x):
        return ft.scan(lambda h, w: (mlp(w, h), None), x, w)[0]

    w = {"up": torch.empty(2, 16, 64), "down": torch.empty(2, 64, 16)}
    layer = {name: value[0] for name, value in w.items()}
    x, mesh, options = torch.empty(4, 16), ft.Mesh(tp=4), {"axes": ("tp",), "memory_bytes": 10**6}
    with pytest.raises(ValueError, match=r"search: at .* the function calls scan; wanted"):
        search(stacked, mesh, (P(), P()), w, x, **options)
    with pytest.raises(ValueError, match=r"axes: got 'dp'; wanted axes of more than one rank: tp"):
        search(mlp, mesh, (P(), P()), layer, x, axes=("dp",), memory_bytes=10**6)
    with pytest.raises(ValueError, match=r"memory_bytes=1,000.*at least the 2,048 of parameters"):
        search(mlp, mesh, (P(), P()), layer, x, axes=("tp",), memory_bytes=1000)
